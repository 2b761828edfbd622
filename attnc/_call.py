"""From checked arguments to one call of the kernels: dtype codes, views, and the order of the arrays."""

from __future__ import annotations

import numpy as np

from . import _isa
from .threads import resolve

ATTEND, SCORES, WEIGH, WEIGHTS = 0, 1, 2, 3
_CODES = {"f": 0, "d": 1, "e": 2}  # by dtype character; a dtype of kind V that passes the checks is bfloat16
BFLOAT16 = 3


def run(mode: int, a, *, value=None, out=None, lse=None, weights=None, scores=None,
        scale: float | None = None) -> tuple:
    """Call the kernels for the arguments `a`; arrays that are None are not read or written. Returns how it was cut."""
    return call(mode, *_operands(a, value, out, lse, weights, scores, scale), a.num_threads)


def run_backward(b, delta: np.ndarray, *, query=None, key=None, value=None, bias=None) -> tuple:
    """Write the gradients that are given, and delta, for the checked arguments `b`. Returns how it was cut."""
    arrays, batch, sizes, options = _operands(b.args, b.args.value, None, b.lse, None, None, None)
    extra = (b.grad_output, b.output, b.grad_lse, delta, query, key, value, bias)
    codes, extra_codes = (tuple([0 if x is None else code(x.dtype) for x in xs]) for xs in (arrays, extra))
    count, explicit = resolve(b.args.num_threads)
    return _isa.kernels.backward(tuple([bits(x) for x in arrays]), codes, tuple([bits(x) for x in extra]), extra_codes,
                                 batch, sizes, options, count, explicit)


def _operands(a, value, out, lse, weights, scores, scale: float | None) -> tuple:
    """Arrays in the order of the kernels, batch, sizes and options."""
    left, right = a.window or (None, None)
    arrays = (
        a.query, a.key, value, out, lse, weights, scores, a.mask, a.key_mask, a.bias,
        None if a.q_offset is None else np.asarray(a.q_offset, np.int64), a.sinks, a.alibi_slopes, a.q_segments,
        a.k_segments, a.q_lengths, a.kv_lengths, None, None)
    sizes = (a.q_heads, a.kv_heads, a.q_len, a.kv_len, a.head_dim, 0 if value is None else a.value_dim)
    options = (_CODES[a.acc.char], a.causal, -1 if left is None else left, -1 if right is None else right,
               a.scale if scale is None else scale, a.softcap or 0.0)
    return arrays, a.batch, sizes, options


def call(mode: int, arrays: tuple, batch: tuple, sizes: tuple, options: tuple, num_threads: int | None) -> tuple:
    codes = tuple([0 if x is None else code(x.dtype) for x in arrays])
    if BFLOAT16 in codes:
        arrays = tuple([bits(x) for x in arrays])
    count, explicit = resolve(num_threads)
    return _isa.kernels.attention(mode, arrays, codes, batch, sizes, options, count, explicit)


def run_rows(arrays: tuple, a, logarithm: bool) -> None:
    """Call the kernels of the softmax for x, out, where and y (the last two may be None) along ``a.axes``."""
    axes = a.axes
    if not axes:  # each element is its own row
        views = [None if array is None else array[..., None] for array in arrays]
    elif len(axes) == 1:
        views = [None if array is None else np.moveaxis(array, axes[0], -1) for array in arrays]
    else:
        views = [None if array is None else _joined(array, axes) for array in arrays]
    views = _neighbours_last(views)
    x, out, target = views[0], arrays[1], views[1]
    codes = tuple([0 if array is None else code(array.dtype) for array in views])
    count, explicit = resolve(a.num_threads)
    _isa.kernels.softmax(tuple([bits(array) for array in views]), codes, x.shape[:-1], x.shape[-1],
                         code(a.acc), logarithm, count, explicit)
    if len(axes) > 1 and not np.may_share_memory(target, out):  # joining the axes took a copy
        moved = np.moveaxis(out, axes, range(-len(axes), 0))
        moved[...] = target.reshape(moved.shape)


def _neighbours_last(views: list) -> list:
    """The order of rows that the kernels like: where a row's elements lie apart, rows that are neighbours are last."""
    x = views[0]
    if x.strides[-1] == x.itemsize or x.itemsize not in x.strides[:-2]:
        return views
    axis = x.strides.index(x.itemsize)
    return [None if array is None else np.moveaxis(array, axis, -2) for array in views]


def _joined(array: np.ndarray, axes: tuple) -> np.ndarray:
    """The axes moved to the end and joined into one, as a view where the strides allow it."""
    moved = np.moveaxis(array, axes, range(-len(axes), 0))
    rest = moved.shape[:moved.ndim - len(axes)]
    return moved.reshape(*rest, int(np.prod(moved.shape[len(rest):])))


def bits(x: np.ndarray | None) -> np.ndarray | None:
    """bfloat16 as uint16, in which form it can be exported as a buffer; others as they are."""
    return x.view(np.uint16) if x is not None and code(x.dtype) == BFLOAT16 else x


def code(dtype: np.dtype) -> int:
    """The kernels' number of a float dtype; of bool and int64, which they do not ask, 0."""
    return _CODES.get(dtype.char, BFLOAT16 if dtype.kind == "V" else 0)
