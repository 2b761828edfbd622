"""Attention over keys that come in parts: merging what was found over each, and a state that takes them one by one."""

from __future__ import annotations

from typing import Any, NamedTuple, Never

import numpy as np

from . import _call
from ._checks import Args, attention_args, states_args
from ._checks.arrays import accumulator, float_array, promoted
from ._checks.spellings import hides_unknown, unexpected
from ._lock import Locked
from ._norms import norms
from ._types import Array, ArrayLike, Layout, State, Window
from .results import AttentionResult


def merge_states(states: list[State] | tuple[State, ...], *, layout: Layout = "bhnd") -> tuple[Array, Array]:
    """Output and lse of attention over all keys, from those of attention over parts of them.

    Parameters
    ----------
    states : sequence of (output, lse)
        Outputs (..., length, dim), all of one shape, with their lse (..., length), each over keys of its own; from
        ``attention(..., want="lse")``. Sinks may have been in one of them. Half precision is widened.
    layout : {"bhnd", "bnhd"}
        Order of the last axes of the outputs: heads before length or after it, as for `attention` and
        `attention_varlen`.

    Returns
    -------
    tuple (output, lse)
        In float64 if an array is float64, else in float32, so that merging what was merged loses nothing: the order of
        merging changes the result by rounding only. A row with lse -inf adds nothing; if all are, it gives 0 and -inf.
        NaN stays in its row. An lse holds its part's share of the keys up to a factor of ``exp(eps * abs(lse))``.

    Raises
    ------
    TypeError, ValueError
        For a wrong dtype or shape, naming the state.

    Examples
    --------
    >>> import numpy as np
    >>> merge_states([([[1.]], [0.]), ([[5.]], [np.log(3.)])])  # one key of value 1, three of value 5
    (array([[4.]]), array([1.38629436]))
    """
    outputs, lses, acc = states_args(states, layout)
    output, top, total = _merged([_Part(*state) for state in zip(outputs, lses, strict=True)], acc)
    output = np.ascontiguousarray(output.swapaxes(-2, -3) if layout == "bnhd" else output)
    return output, _lse(top, total).astype(acc)


class _Part(NamedTuple):
    """Attention over some keys, with the sum of exp(score) of each row as ``total * exp(top)``: a running lse would be
    rounded to its own magnitude by every chunk, a running total is not."""

    output: np.ndarray
    top: np.ndarray
    total: np.ndarray | float = 1.0


def _merged(parts: list[_Part], acc: np.dtype) -> _Part:
    """The parts as one, with output in `acc` and, being small, `top` and `total` in float64."""
    tops = [part.top.astype(np.float64) for part in parts]
    top = tops[0]
    for other in tops[1:]:
        top = np.maximum(top, other)
    with np.errstate(all="ignore"):
        shift = np.where(top == -np.inf, 0, top)
        shares = [part.total * np.exp(its_top - shift) for part, its_top in zip(parts, tops, strict=True)]
        total = sum(shares)
        divisor = np.where(total == 0, 1, total)
        output, product = np.zeros(parts[0].output.shape, acc), np.empty(parts[0].output.shape, acc)
        for part, its_top, share in zip(parts, tops, shares, strict=True):
            np.multiply(part.output.astype(acc, copy=False), (share / divisor).astype(acc)[..., None], out=product)
            product[its_top == -np.inf] = 0  # a row that saw no key, whose output may be anything
            output += product
    return _Part(output, top, total)


def _sums(a: Args, lse: np.ndarray) -> tuple[np.ndarray, np.ndarray | float]:
    """Top and total of each row, apart where the lse is too large to hold both."""
    known = norms(a, lse)
    if known is None:
        return lse, 1.0
    apart = known.inverse > 0
    with np.errstate(divide="ignore"):
        return np.where(apart, known.top, lse), np.where(apart, 1 / known.inverse, 1.0)


def _lse(top: np.ndarray, total: np.ndarray | float) -> np.ndarray:
    with np.errstate(all="ignore"):
        return top + np.log(total)


class AttentionState(Locked):
    """Attention of a query over keys and values that come in chunks, each released after use.

    Key ``j`` of a chunk stands at the number of keys seen before, plus ``j``. The result is that of `attention` over
    all keys in one piece, to rounding; memory is needed for the query, the output and one chunk. Threads may share it:
    updates take turns, a result has all chunks of the updates before it. Copies are independent.

    Parameters
    ----------
    query : array (..., q_heads, q_len, head_dim) or (q_len, head_dim)
        As in `attention`; copied.
    q_offset : int or int array (batch...), optional
        Position of the first row among all keys. `causal`, `window` and `alibi_slopes` need it: where the last row
        stands is not known before the last chunk.
    sinks : float array (q_heads,), optional
        As in `attention`; they enter once, whatever the number of chunks.
    causal, window, scale, softcap, alibi_slopes, layout, num_threads
        As in `attention`. Arrays over the batch fit the leading axes of the query.

    Raises
    ------
    TypeError, ValueError
        For a wrong dtype or a wrong shape or value, naming the argument; for a missing `q_offset`.

    Examples
    --------
    >>> import numpy as np
    >>> query, key, value = np.ones((1, 2)), np.zeros((3, 2)), np.array([[1.], [2.], [6.]])
    >>> state = AttentionState(query)
    >>> for start in range(3):
    ...     state.update(key[start:start + 1], value[start:start + 1])
    >>> state, state.result().output
    (AttentionState(query=(1, 2); 3 keys), array([[3.]]))
    """

    @hides_unknown
    def __init__(
            self, query: ArrayLike, *, q_offset: ArrayLike | None = None, sinks: ArrayLike | None = None,
            causal: bool = False, window: Window | None = None, scale: float | None = None,
            softcap: float | None = None, alibi_slopes: ArrayLike | None = None, layout: Layout = "bhnd",
            num_threads: int | None = None, **unknown: Never) -> None:
        if unknown:
            unexpected(AttentionState.__init__, unknown)
        super().__init__()
        options: dict[str, Any] = dict(sinks=sinks, causal=causal, window=window, scale=scale, softcap=softcap,
                       alibi_slopes=alibi_slopes, layout=layout, num_threads=num_threads)
        query = float_array("query", query)
        a = attention_args(query, query, None, q_offset=q_offset, **options)  # for the keys: no option depends on them
        if q_offset is None and (a.causal or a.window is not None or a.alibi_slopes is not None):
            raise ValueError("q_offset is None; wanted the position of the first query row among all keys, which "
                             "causal, window and alibi_slopes need: the number of keys is not known yet")
        for name in ("sinks", "alibi_slopes"):
            if options[name] is not None:
                options[name] = np.array(options[name])
        self._options = options
        self._q_offset = None if a.q_offset is None else np.array(a.q_offset)
        self._query = query.astype(a.acc)  # wide: what a chunk gives is rounded to half precision only at the end
        self._seen = _Seen(query.dtype, 0)

    def __repr__(self) -> str:
        given = {**self._options, "q_offset": self._q_offset}
        options = "".join(f", {name}={_shown(x)}" for name, x in given.items()
                          if not (x is None or x is False or (name == "layout" and x == "bhnd")))
        return f"{type(self).__name__}(query={self._query.shape}{options}; {self.kv_len} keys)"

    @property
    def kv_len(self) -> int:
        """Keys seen so far."""
        return self._seen.kv_len

    def update(
            self, key_chunk: ArrayLike, value_chunk: ArrayLike, *, mask: ArrayLike | None = None,
            key_mask: ArrayLike | None = None, bias: ArrayLike | None = None) -> None:
        """Attend over the next keys and values.

        Parameters
        ----------
        key_chunk, value_chunk : array
            Like key and value of `attention`, of any length; batch axes, heads and value_dim as in the first chunk.
        mask, key_mask, bias : array, optional
            As in `attention`, over the keys of this chunk.

        Raises
        ------
        TypeError, ValueError
            For a wrong dtype or a wrong shape, naming the argument. The state is then as it was.
        """
        key, value = float_array("key_chunk", key_chunk), float_array("value_chunk", value_chunk)
        with self._turn():
            seen = self._seen
            offset = None if self._q_offset is None else self._q_offset - seen.kv_len
            a = attention_args(self._query, key, value, mask=mask, key_mask=key_mask, bias=bias, q_offset=offset,
                               **self._options)
            sizes = {"batch": a.batch, "kv_heads": a.kv_heads, "value_dim": a.value_dim}
            if seen.sizes is not None:
                _check_sizes(sizes, seen.sizes)
                a.sinks = None  # in the lse since the first chunk
            output = np.empty((*a.batch, a.q_heads, a.q_len, a.value_dim), a.dtype)
            lse = np.empty(output.shape[:-1], a.acc)
            _call.run("attend", a, value=a.value, out=output, lse=lse)
            part = _Part(output, *_sums(a, lse))
            if seen.part is not None:
                part = _merged([seen.part, part], promoted(seen.part.output.dtype, output.dtype))
            dtype = promoted(seen.dtype, key.dtype, value.dtype)
            self._seen = _Seen(dtype, seen.kv_len + a.kv_len, sizes, part)

    def result(self) -> AttentionResult:
        """Output and lse of attention over all keys seen so far; more chunks may follow.

        Returns
        -------
        AttentionResult
            ``output`` in the promoted dtype of the query and all chunks, ``lse`` in the accumulation dtype.

        Raises
        ------
        ValueError
            Before the first chunk, which says how many value columns there are; one of no keys will do.
        """
        seen = self._seen
        if seen.part is None:
            raise ValueError("no chunk was given; wanted an update before the result, for the shape of the output")
        output, top, total = seen.part
        lse = _lse(top, total).astype(accumulator(seen.dtype))
        if self._options["layout"] == "bnhd":
            output = output.swapaxes(-2, -3)
        if self._query.ndim == 2:
            output, lse = output[0], lse[0]
        with np.errstate(all="ignore"):
            return AttentionResult(output.astype(seen.dtype, order="C"), lse=lse)


def _shown(option: object) -> str:
    """An option in a repr: an array by its shape."""
    if isinstance(option, np.ndarray):
        return str(option.shape) if option.ndim else str(option)
    return repr(option)


class _Seen(NamedTuple):
    """What is known after some chunks; arrays of the part are (batch..., q_heads, q_len[, value_dim])."""

    dtype: np.dtype
    kv_len: int
    sizes: dict[str, Any] | None = None
    part: _Part | None = None


def _check_sizes(sizes: dict[str, Any], first: dict[str, Any]) -> None:
    """Raise unless a chunk fits the first one."""
    for name, size in sizes.items():
        if size != first[name]:
            argument = "value_chunk" if name == "value_dim" else "key_chunk"
            raise ValueError(f"{argument} has {name} {size}; wanted {first[name]}, as in the first chunk")
