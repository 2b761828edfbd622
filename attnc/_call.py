"""From checked arguments to one call of the kernels: the order of arrays, sizes and options."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from . import _isa
from .threads import resolve

ATTEND, SCORES, WEIGH, WEIGHTS = 0, 1, 2, 3
ROW_STATISTICS, KEY_STATISTICS, PLACES = 0, 1, 2     # parts of `statistics`
COPIED = 1 << 22        # elements that NumPy copies in one piece, in milliseconds: it does not look for signals


def run(mode: int, a, **arrays) -> tuple:
    """Call the kernels for the arguments `a` with the `arrays` of `_operands`. Returns how the call was cut."""
    return call(mode, *_operands(a, **arrays), a.num_threads)


def run_fast(query, key, value, causal, out, num_threads) -> np.ndarray | None:
    """Attention without other options, if the kernels see at once that the unchecked arguments are right."""
    return _isa.kernels.fast_attention(query, key, value, causal, out, *resolve(num_threads))


def statistics(part: int, a, wants: tuple, progress, **arrays) -> float:
    """Call the kernels for statistics of the weights; `wants` and the result are those of their `statistics`."""
    return _isa.kernels.statistics(part, *_operands(a, **arrays), *resolve(a.num_threads), wants, progress)


def run_backward(b, norm: np.ndarray | None, delta: np.ndarray, *, query=None, key=None, value=None,
                 bias=None) -> tuple:
    """Write the gradients that are given, and delta, for the checked arguments `b`. Returns how it was cut."""
    arrays, batch, sizes, options = _operands(b.args, value=b.args.value, lse=b.lse)
    extra = (b.grad_output, b.output, b.grad_lse, delta, query, key, value, bias)
    return _isa.kernels.backward(arrays, extra, batch, sizes, options, *resolve(b.args.num_threads), norm)


def _operands(a, *, value=None, out=None, lse=None, weights=None, scores=None, scale: float | None = None,
              scales: tuple = (None, None)) -> tuple:
    """Arrays in the order of the kernels, batch, sizes and options. None is not read or written."""
    left, right = a.window or (None, None)
    arrays = (
        a.query, a.key, value, out, lse, weights, scores, a.mask, a.key_mask, a.bias,
        None if a.q_offset is None else np.asarray(a.q_offset, np.int64), a.sinks, a.alibi_slopes, a.q_segments,
        a.k_segments, a.q_lengths, a.kv_lengths, None, None, *scales)
    sizes = (a.q_heads, a.kv_heads, a.q_len, a.kv_len, a.head_dim, 0 if value is None else a.value_dim)
    options = (code(a.acc), a.causal, -1 if left is None else left, -1 if right is None else right,
               a.scale if scale is None else scale, a.softcap or 0.0)
    return arrays, a.batch, sizes, options


def call(mode: int, arrays: tuple, batch: tuple, sizes: tuple, options: tuple, num_threads: int | None) -> tuple:
    return _isa.kernels.attention(mode, arrays, batch, sizes, options, *resolve(num_threads))


def run_rows(arrays: tuple, a, logarithm: bool) -> None:
    """Call the kernels of the softmax for x, out, where and y (the last two may be None) along ``a.axes``."""
    axes, out = a.axes, arrays[1]
    if axes != (out.ndim - 1,):
        arrays = _rows_last(arrays, axes)
    elif arrays[0].strides[-1] != arrays[0].itemsize:
        arrays = _neighbours_last(arrays)
    _isa.kernels.softmax(arrays, arrays[0].shape, code(a.acc), logarithm, *resolve(a.num_threads))
    if len(axes) > 1 and not np.may_share_memory(arrays[1], out):  # joining the axes took a copy
        moved = np.moveaxis(out, axes, range(-len(axes), 0))
        _copy(moved, arrays[1].reshape(moved.shape))


def _rows_last(arrays: tuple, axes: tuple) -> tuple:
    """The axes of a sum as the last one, joined if there are several; without any each element is its own row."""
    if not axes:
        return tuple([None if array is None else array[..., None] for array in arrays])
    if len(axes) > 1:
        return tuple([None if array is None else _joined(array, axes) for array in arrays])
    order = [axis for axis in range(arrays[0].ndim) if axis != axes[0]]
    return _neighbours_last(tuple([None if array is None else array.transpose(*order, *axes) for array in arrays]))


def _neighbours_last(arrays: tuple) -> tuple:
    """The order of rows that the kernels like: where a row's elements lie apart, rows that are neighbours are last."""
    x = arrays[0]
    if x.strides[-1] == x.itemsize or x.itemsize not in x.strides[:-2]:
        return arrays
    axis = x.strides.index(x.itemsize)
    return tuple([None if array is None else np.moveaxis(array, axis, -2) for array in arrays])


def _joined(array: np.ndarray, axes: tuple) -> np.ndarray:
    """The axes moved to the end and joined into one, as a view where the strides allow it."""
    moved = np.moveaxis(array, axes, range(-len(axes), 0))
    first = moved.ndim - len(axes)
    joined = *moved.shape[:first], int(np.prod(moved.shape[first:]))
    steps = [(n, step) for n, step in zip(moved.shape[first:], moved.strides[first:], strict=True) if n != 1]
    if moved.size <= COPIED or all(step == n * inner for (_, step), (n, inner) in pairwise(steps)):
        return moved.reshape(joined)
    whole = np.empty(moved.shape, moved.dtype)
    _copy(whole, moved)
    return whole.reshape(joined)


def _copy(target: np.ndarray, source: np.ndarray) -> None:
    """``target[...] = source`` in parts, between which Python lets signal handlers run."""
    if target.size <= COPIED:
        target[...] = source
        return
    step = COPIED * len(target) // target.size
    for i in range(0, len(target), max(step, 1)):
        if step:
            target[i:i + step] = source[i:i + step]
        else:
            _copy(target[i], source[i])


def code(dtype: np.dtype) -> int:
    """The kernels' number of an accumulation dtype."""
    return 1 if dtype.char == "d" else 0
