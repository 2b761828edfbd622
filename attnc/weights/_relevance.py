"""The relevance of weights: each weight times the gradient that reaches it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, NamedTuple, Self

import numpy as np

from .. import _call
from .._checks import Args, attention_args
from .._checks import weights as checks
from .._checks.index import check_index
from .._slices import part
from .._types import Array, ArrayLike, HeadsReduced, Progress, Report, Rows
from . import _operands, _places, _pooling, _sweeps
from ._blocks import Blocks
from ._held import ALL, Held
from ._keys import bin_labels, over_heads
from ._products import Transposed, members
from ._sweeps import Steps

COLUMNS = 64                # columns per sweep
PIECE_BYTES = 4 << 20       # sums of keys per step of `_pool`


class State(NamedTuple):
    """Maximum and inverse sum of each row (batch..., q_heads, q_len, 2), and an lse: -inf if empty, NaN if NaN."""

    norm: np.ndarray
    lse: np.ndarray


class Relevance(Blocks):
    """The relevance of weights, without their matrix: each weight times the gradient that reaches it.

    `attnc.AttentionWeights.relevance` makes it. For weights w, values v and the gradient g of the output it is
    ``w[i, j] * max(0, g[i] @ v[j])``, or without the maximum for ``sign="both"``; 0 where the weight is 0. Its dtype is
    that of the weights, or float64 if an array is float64; results have equal bits for any number of threads.

    Examples
    --------
    >>> from attnc import AttentionWeights
    >>> R = AttentionWeights([[0.]], [[0.], [0.]]).relevance([[1.], [-3.]], [[2.]])
    >>> R.dense()
    array([[1., 0.]])
    """

    _W: Held
    _value: Array               # (batch..., kv_heads, kv_len, value_dim)
    _grad: Array                # (batch..., q_heads, q_len, value_dim)
    _positive: bool
    _products: Held             # scores of gradients and values in place of queries and keys
    _state: State | None        # under a given lse

    @classmethod
    def of(cls, weights: Held, value: Array, grad_output: Array, positive: bool) -> Self:
        """The relevance from checked arrays."""
        R = object.__new__(cls)
        if weights.dtype != np.float64 and np.dtype(np.float64) in (value.dtype, grad_output.dtype):
            weights = _wider(weights)
        R.__setstate__((weights, value.view(), grad_output.view(), positive))
        return R

    def __init__(self, *_: object) -> None:
        raise TypeError("the method relevance of AttentionWeights makes it")

    def __getstate__(self) -> tuple[Held, Array, Array, bool]:
        if "_operands" in vars(self):
            self._check_operands()
        return self._W, self._value, self._grad, self._positive

    def __setstate__(self, state: tuple[Held, Array, Array, bool]) -> None:
        self._W, self._value, self._grad, self._positive = state
        self._products, self._state = _Products(), None
        self._products._hold(_scores_args(self._grad, self._value, self._W._a), None)

    @property
    def shape(self) -> tuple[int, ...]:
        """(..., q_heads, q_len, kv_len) or (q_len, kv_len)."""
        return self._W.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """float64 if an input is float64, else float32."""
        return self._W.dtype

    @property
    def T(self) -> Transposed:
        """The transpose, for ``R.T @ X``: sums over the rows."""
        return Transposed(self)

    def __matmul__(self, x: ArrayLike) -> Array:
        return self._product(x, False)

    def key_mass(
            self, *, rows: Rows = None, row_weights: ArrayLike | None = None, heads: HeadsReduced | None = None,
            progress: Progress = None) -> Array:
        """The sum over the rows: how relevant each key is. Parameters are those of `attnc.AttentionWeights.key_mass`.

        Returns
        -------
        array (..., q_heads, kv_len); without the axis of heads, or with that of the keys, by `heads`
        """
        a, over = self._W._a, checks.check_heads(heads)
        counts, weights = checks.check_rows(rows, a), checks.check_row_weights(row_weights, a)
        amounts = np.ones(a.q_len, self.dtype) if counts is None else counts.astype(self.dtype)
        amounts = amounts if weights is None else amounts * weights.astype(self.dtype)
        with self._answer(progress, self._parts()) as steps:
            found = self._sweep(amounts[..., None], True, steps)[..., 0]
            if not np.isfinite(found).all():        # in the kernels, 0 times a nonfinite number is NaN
                found = _pooling.key_sums(self, amounts)
        return over_heads(found.reshape(*self.shape[:-2], self.shape[-1]), over, a)

    def row_mass(self, *, keys: Rows = None, progress: Progress = None) -> Array:
        """The sum of each row's relevance over some keys.

        Parameters
        ----------
        keys : slice, int array or bool array (kv_len,), optional
            The keys that count, by default all; a key that is named twice counts twice.
        progress : bool or function, optional

        Returns
        -------
        array (..., q_heads, q_len)
        """
        counts = checks.check_keys(keys, self.shape[-1]).astype(self.dtype)
        with self._answer(progress, self._parts()) as steps:
            found = self._sweep(counts[:, None], False, steps)[..., 0].reshape(self.shape[:-1])
            return found if np.isfinite(found).all() else _pooling.row_sums(self, counts)

    def map(self, bins: tuple[int, int], *, progress: Progress = None) -> Array:
        """The relevance reduced to a map of bins: the mean over a bin's rows of the sum over its keys.

        Parameters
        ----------
        bins : tuple (row_bins, col_bins)
            As in `attnc.AttentionWeights.map`.
        progress : bool or function, optional

        Returns
        -------
        array (..., q_heads, row_bins, col_bins)
        """
        row_bins, key_bins = checks.check_bins(bins, self._W._a)
        found = np.zeros((*self.shape[:-2], row_bins, key_bins), self.dtype)
        labels = bin_labels(row_bins, self.shape[-2]), bin_labels(key_bins, self.shape[-1])
        return self._pool(*labels, found, progress)

    def pool(self, query_labels: ArrayLike, key_labels: ArrayLike, *, progress: Progress = None) -> Array:
        """A map over given groups, as `attnc.AttentionWeights.pool`: (..., query groups, key groups)."""
        rows = checks.check_labels("query_labels", query_labels, self.shape[-2])
        keys = checks.check_labels("key_labels", key_labels, self.shape[-1])
        groups = int(rows.max(initial=-1)) + 1, int(keys.max(initial=-1)) + 1
        return self._pool(rows, keys, np.zeros((*self.shape[:-2], *groups), self.dtype), progress)

    def _pool(self, rows: np.ndarray, keys: np.ndarray, found: np.ndarray, progress: Progress) -> Array:
        """Sums over the rows of each bin, then over bins of keys, for some heads at a time."""
        a, (row_bins, key_bins) = self._W._a, found.shape[-2:]
        if not found.size or not a.kv_len:
            return found
        pieces = list(_pieces(a, a.kv_len * min(row_bins, COLUMNS) * self.dtype.itemsize))
        whole = found.reshape(*a.batch, a.q_heads, row_bins, key_bins)
        with self._answer(progress, self._parts(row_bins, len(pieces))) as steps:
            self._norm(steps.part())
            for first in range(0, row_bins, COLUMNS):
                bins = np.arange(first, min(first + COLUMNS, row_bins))
                theirs = np.flatnonzero((rows >= bins[0]) & (rows <= bins[-1]))
                if not len(theirs):
                    continue
                span = slice(int(theirs[0]), int(theirs[-1]) + 1)
                ones = (rows[span, None] == bins).astype(self.dtype)
                for piece in pieces:
                    its = self._sweep_piece(piece, ones, True, steps, span).swapaxes(-1, -2)
                    if not np.isfinite(its).all():
                        return _pooling.pooled(self, rows, keys, row_bins, key_bins, False)
                    with np.errstate(under="ignore", over="ignore"):
                        means = _pooling.by_group(its, keys, key_bins) / _pooling.members(rows, row_bins)[bins]
                        whole[(*piece, slice(first, first + COLUMNS))] = means
        return found

    # What is computed from

    @property
    def _arrays(self) -> dict[str, Array]:
        return self._W._arrays | {"value": self._value, "grad_output": self._grad}

    def _check_operands(self) -> None:
        self._W._check_operands()
        operands = vars(self).get("_operands")
        if operands is None:
            own = _operands.Operands({"value": self._value, "grad_output": self._grad}, "the first answer was computed")
            operands = vars(self).setdefault("_operands", own)
        operands.check()

    def _norm(self, report: Report | None) -> Array | None:
        return self._W._norm(report)

    def _write(self, lead: tuple[slice, ...], rows: slice, keys: slice, out: Array, visible: bool = False) -> None:
        step = _places.rows_of_block(out.shape, self.dtype)
        for start in range(rows.start, rows.stop, step):
            some = slice(start, min(start + step, rows.stop))
            its = out[..., some.start - rows.start:some.stop - rows.start, :]
            weights, gradients = np.empty(its.shape, self.dtype), np.empty(its.shape, self.dtype)
            self._W._write(lead, some, keys, weights, visible)
            self._products._write(lead, some, keys, gradients)
            with np.errstate(all="ignore"):
                if self._positive:
                    np.maximum(gradients, 0, out=gradients)
                its[...] = np.where(weights == 0, 0, weights * gradients)

    # Products

    def _product(self, x: ArrayLike, transposed: bool) -> Array:
        """``R @ x`` or ``R.T @ x``, in the dtype of R."""
        given = checks.check_factor(x, self.shape, transposed)
        with np.errstate(under="ignore", over="ignore"):
            columns = (given[:, None] if given.ndim == 1 else given).astype(self.dtype)
        finite = np.isfinite(columns)
        with self._answer() as steps:
            out = self._sweep(np.where(finite, columns, 0), transposed, steps)
            out = out.reshape(*self.shape[:-2], *out.shape[-2:])
            if not finite.all():
                self._add_nonfinite(out, np.where(finite, 0, columns), transposed)
        return out[..., 0] if given.ndim == 1 else out

    def _add_nonfinite(self, out: np.ndarray, x: np.ndarray, transposed: bool) -> None:
        """Add relevance times the entries of `x` that are not finite, where the relevance is not 0."""
        odd = np.flatnonzero((x != 0).any((*range(x.ndim - 2), -1)))
        with np.errstate(all="ignore"):
            for place in odd:
                chosen = (..., place, slice(None)) if transposed else (..., place)
                share = _places.select(self, check_index(chosen, self.shape))[..., None]
                row = x[..., place, None, :]
                out += np.where((share != 0) & (row != 0), share * row, 0)

    def _parts(self, columns: int = 1, pieces: int = 1) -> int:
        """Number of parts of the progress: the norm, and the sweeps."""
        a = self._W._a
        return 1 + a.heads_per_kv * -(-columns // COLUMNS) * pieces

    def _sweep(self, x: np.ndarray, transposed: bool, steps: Steps) -> np.ndarray:
        """Products with `x` (..., length, columns) for all heads: (batch..., q_heads, q_len or kv_len, columns)."""
        a = self._W._a
        self._norm(steps.part())
        return self._sweep_piece((*[ALL] * len(a.batch), slice(0, a.q_heads)), x, transposed, steps)

    def _sweep_piece(self, piece: tuple[slice, ...], x: np.ndarray, transposed: bool, steps: Steps,
                     rows: slice = ALL) -> np.ndarray:
        """Products with `x` for some rows and the heads of a piece, which are whole groups that share a key head."""
        a, state = self._W._a, self._rows()
        group = a.heads_per_kv
        *batch, heads = piece
        some = part(a, batch=tuple(batch), heads=heads, rows=rows)
        some.sinks, some.value_dim = None, self._value.shape[-1]
        kv = slice(heads.start // group, -(-heads.stop // group))
        value = self._value[_broadcast(self._value, (*batch, kv))]
        lead = (*some.batch, some.q_heads)
        x = np.broadcast_to(x, (*a.batch, a.q_heads, *x.shape[-2:]))[piece] if x.ndim > 2 else x
        x = np.broadcast_to(x, (*lead, *x.shape[-2:]))
        norm, lse, grad = (y[(*piece, rows)] for y in (state.norm, state.lse, self._grad))
        out = np.zeros((*lead, a.kv_len if transposed else some.q_len, x.shape[-1]), self.dtype)
        for member in range(group if out.size else 0):
            every = slice(member, None, group)
            its = members(some, member)
            for first in range(0, x.shape[-1], COLUMNS):
                columns = slice(first, first + COLUMNS)
                names = ("row_factors", "d_key") if transposed else ("key_factors", "d_query")
                arrays = x[..., every, :, columns], out[..., every, :, columns]
                _call.run("backward", its, None, steps.part(), value=value, lse=lse[..., every, :],
                          norm=np.ascontiguousarray(norm[..., every, :, :]), grad_output=grad[..., every, :, :],
                          relevance=2 if self._positive else 1, **dict(zip(names, arrays, strict=True)))
        return out

    def _rows(self) -> State:
        """The state from which the kernels compute the weights, also under a given lse."""
        W, a = self._W, self._W._a
        lead = (*a.batch, a.q_heads, a.q_len)
        if W._given is None:
            norm, lse = W._known_rows(None)
            return State(norm, lse.reshape(lead))
        if self._state is None:
            own, given = _sweeps.rows(a, None, (), None, None), W._given.reshape(lead).astype(np.float64)
            with np.errstate(all="ignore"):
                inverse = np.exp(own["norm"][..., 0] * own["unit"] - given)
            lse = np.where(np.isnan(given), np.nan, np.where(inverse > 0, own["lse"], -np.inf)).astype(self.dtype)
            norm = np.stack([own["norm"][..., 0], np.where(np.isfinite(given), inverse, 0)], -1)
            self._state = State(norm, np.where(np.isinf(given), -np.inf, lse).astype(self.dtype))
        return self._state


class _Products(Held):
    """Products of gradients and values, computed as the scores of queries and keys."""

    def _write_heads(self, batch: tuple[slice, ...], heads: slice, rows: slice, keys: slice, out: Array,
                     visible: bool) -> None:
        some = part(self._a, batch=batch, heads=heads, rows=rows, keys=keys)
        # Any `norm` selects one path for any number of rows, so that a row alone has the same bits.
        out[...] = _sweeps.scores(some, np.zeros((*some.batch, some.q_heads, some.q_len, 2)))


def _scores_args(grad: np.ndarray, value: np.ndarray, a: Args) -> Args:
    found = attention_args(grad, value, None, scale=1.0, num_threads=a.num_threads)
    found.acc, found.two_d, found.batch = a.acc, a.two_d, a.batch
    return found


def _wider(weights: Held) -> Held:
    """The same weights computed in float64."""
    a = copy.copy(weights._a)
    a.dtype = a.acc = np.dtype(np.float64)
    a.sinks, a.alibi_slopes = (None if x is None else x.astype(a.acc) for x in (a.sinks, a.alibi_slopes))
    wide = object.__new__(type(weights))
    wide._hold(a, None if weights._given is None else weights._given.astype(a.acc))
    return wide


def _broadcast(x: np.ndarray, index: tuple[slice, ...]) -> tuple[slice, ...]:
    """The index of the leading axes that `x` has; axes of length 1 broadcast."""
    lead = x.shape[:-2]
    return tuple(one if length != 1 else ALL
                 for one, length in zip(index[len(index) - len(lead):], lead, strict=True))


def _pieces(a: Args, head_bytes: int) -> Iterator[tuple[slice, ...]]:
    """Indices of heads in pieces whose results take at most PIECE_BYTES, at least one group of heads."""
    group = a.heads_per_kv
    count = int(np.prod(a.batch, dtype=np.int64)) * a.q_heads
    if count * head_bytes <= PIECE_BYTES:
        yield *[ALL] * len(a.batch), slice(0, a.q_heads)
        return
    step = max(1, PIECE_BYTES // (head_bytes * group)) * group
    for element in np.ndindex(*a.batch):
        for head in range(0, a.q_heads, step):
            yield *(slice(i, i + 1) for i in element), slice(head, min(head + step, a.q_heads))
