"""The base of lazy matrices, and of lazy weights, which hold their arguments and the lse and norm of their rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from .._checks import Args
from .._checks.index import check_index
from .._checks.weights import check_distance
from .._slices import part
from .._types import Array, Progress, Report
from ..results import TopKeys
from . import _operands, _places, _sweeps
from ._sweeps import Steps

ALL = slice(None)


class Lazy:
    """A matrix for each head, or a single one, whose entries are computed on demand."""

    _has_heads = True       # the third axis from the end, if any, is that of heads

    @property
    def shape(self) -> tuple[int, ...]:
        """(..., q_len, kv_len)."""
        raise NotImplementedError

    @property
    def dtype(self) -> np.dtype[Any]:
        """That of all results: the accumulation dtype."""
        raise NotImplementedError

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(shape={self.shape}, dtype={self.dtype.name})"

    def __getitem__(self, index: Any) -> Any:
        chosen = check_index(index, self.shape)
        with self._answer():
            return _places.select(self, chosen)

    @contextmanager
    def _answer(self, progress: Progress = None, parts: int = 1) -> Iterator[Steps]:
        """Context of the work on one result: raises if an array changes before the end of it."""
        with Steps(progress, parts) as steps:
            self._check_operands()
            yield steps
            self._check_operands()

    @property
    def _arrays(self) -> dict[str, Array]:
        """The arrays that the matrix holds, by the names of arguments."""
        raise NotImplementedError

    def _check_operands(self) -> None:
        """Raise if an array has changed since the first result."""
        raise NotImplementedError

    def _norm(self, report: Report | None) -> Array | None:
        """Compute what entries need to know of their rows, once."""
        raise NotImplementedError

    def _write(self, lead: tuple[slice, ...], rows: slice, keys: slice, out: Array, visible: bool = False) -> None:
        """Write entries of consecutive rows and keys, of the slices `lead` of the leading axes; a NaN row is NaN
        throughout, or, with `visible`, only at keys that it sees."""
        raise NotImplementedError


class Held(Lazy):
    """Checked arguments of weights, a given lse, and the norm and lse of the rows once they are computed."""

    _a: Args
    _given: Array | None
    _known: tuple[Array, Array] | None          # norm (batch..., q_heads, q_len, 2) and lse as shown

    def _hold(self, a: Args, given: Array | None) -> None:
        self._a, self._given = a, given
        self._known = None
        if given is not None:
            self._check_operands()

    @property
    def shape(self) -> tuple[int, ...]:
        """(..., q_heads, q_len, kv_len) or (q_len, kv_len)."""
        return self._a.weights_shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """That of all results: the accumulation dtype."""
        return self._a.acc

    @property
    def _arrays(self) -> dict[str, Array]:
        return self._a.arrays if self._given is None else self._a.arrays | {"lse": self._given}

    def _check_operands(self) -> None:
        operands = vars(self).get("_operands")
        if operands is None:
            since = "the first answer was computed" if self._given is None else "the lse was given"
            operands = _operands.Operands(self._arrays, since)
            operands = vars(self).setdefault("_operands", operands)     # one for all threads
        try:
            operands.check()
        except RuntimeError:
            self._known = None           # may mix values from before and after the change
            raise

    def _lse(self) -> Array:
        return self._known_rows(None)[1] if self._given is None else self._given

    def _norm(self, report: Report | None) -> Array | None:
        """Maximum and inverse sum of each row; None where an lse was given."""
        return self._known_rows(report)[0] if self._given is None else None

    def _known_rows(self, report: Report | None) -> tuple[Array, Array]:
        """Norm and lse, computed when they are first needed."""
        if self._known is None:
            self._sweep_rows((), None, report)
        assert self._known is not None
        return self._known

    def _norm_of(
            self, some: Args, batch: tuple[slice, ...], heads: slice, rows: slice) -> tuple[Array | None, Array | None]:
        """The norm or the given lse of some rows, whose arguments are `some`; for few rows the rest is not computed."""
        index = (*(batch or [ALL] * len(self._a.batch)), heads, rows)
        whole = (*self._a.batch, self._a.q_heads, self._a.q_len)
        if self._given is not None:
            return None, np.ascontiguousarray(self._given.reshape(whole)[index])
        count = some.q_heads * some.q_len * int(np.prod(some.batch, dtype=np.int64))
        if self._known is None and 2 * count < int(np.prod(whole, dtype=np.int64)):
            return _sweeps.rows(some, None, (), None, None)["norm"], None
        return np.ascontiguousarray(self._known_rows(None)[0][index]), None

    def _sweep_rows(self, names: tuple[str, ...], k: int | None, report: Report | None) -> dict[str, Any]:
        if "mean_distance" in names:
            check_distance(self._a)
        found = _sweeps.rows(self._a, self._given, names, k, report)
        if self._given is None:
            lse = found["lse"].reshape(self._a.lse_shape)
            lse.flags.writeable = False          # users see this array, and all later results use it
            self._known = found["norm"], lse
        shown: dict[str, Any] = {name: found[name].reshape(self._a.lse_shape) for name in names}
        if k is not None:
            shape = (*self._a.lse_shape, k)
            shown["topk"] = TopKeys(found["top"].reshape(shape), found["top_keys"].reshape(shape))
        return shown

    def _write(self, lead: tuple[slice, ...], rows: slice, keys: slice, out: Array, visible: bool = False) -> None:
        """Write weights of consecutive rows and keys; heads that are not all of them are computed one at a time."""
        a, batch = self._a, lead[:-1]
        heads = lead[-1] if lead else ALL
        places = range(*heads.indices(a.q_heads))
        if len(places) == a.q_heads and places.step == 1:
            self._write_heads(batch, ALL, rows, keys, out if lead else out[None], visible)
            return
        for i, head in enumerate(places):
            self._write_heads(batch, slice(head, head + 1), rows, keys, out[..., i:i + 1, :, :], visible)

    def _write_heads(self, batch: tuple[slice, ...], heads: slice, rows: slice, keys: slice, out: Array,
                     visible: bool) -> None:
        some_rows = part(self._a, batch=batch, heads=heads, rows=rows)
        norm, given = self._norm_of(some_rows, batch, heads, rows)
        some = part(some_rows, keys=keys)
        _sweeps.places(some, norm, given, out)
        if visible and np.isnan(out).any():
            out[np.isnan(out) & (_sweeps.scores(some) == -np.inf)] = 0
