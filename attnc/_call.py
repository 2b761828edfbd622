"""Entry to the kernels: checked arguments and, by name, the arrays that a call reads or writes besides."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np

from . import _isa
from ._checks import Args, SoftmaxArgs, SoftmaxBackwardArgs, WeightedSumArgs
from ._types import Array, ArrayLike, Report, Shape
from .threads import resolve

Operands: TypeAlias = tuple[Any, ...]   # of a softmax: the arrays x, out, where and y; the last two may be None
COPIED = 1 << 22        # elements that NumPy copies at a time, in milliseconds: a copy handles no signals


@dataclass(slots=True, kw_only=True)
class RowRequest:
    """Arrays (batch..., q_heads, q_len) that receive statistics of rows (src/call/requests.h); None: not wanted."""

    norm: np.ndarray | None = None              # (..., 2): row maximum and inverse row sum
    entropy: np.ndarray | None = None
    max: np.ndarray | None = None
    mean_position: np.ndarray | None = None
    mean_distance: np.ndarray | None = None
    top: np.ndarray | None = None               # (..., k), and their keys
    top_keys: np.ndarray | None = None
    k: int = 0
    given: np.ndarray | None = None             # an lse that is an input


@dataclass(slots=True, kw_only=True)
class KeyRequest:
    """Arrays (batch..., q_heads, kv_len) that receive statistics of keys, and what these are sums of."""

    norm: np.ndarray | None = None              # of each row, or
    given: np.ndarray | None = None             # its lse
    row_weights: np.ndarray | None = None
    order: np.ndarray | None = None             # the rows that count, None: all
    walk: int = 0                               # their number
    mass: np.ndarray | None = None
    max: np.ndarray | None = None
    visible: np.ndarray | None = None           # sum of the row weights of rows that see the key
    hits: np.ndarray | None = None
    threshold: float = 0.0
    map: np.ndarray | None = None               # (batch..., q_heads, row bins, key bins), and its bins:
    map_max: bool = False
    row_bin: np.ndarray | None = None
    bin_rows: np.ndarray | None = None
    key_bins: int = 0
    slot: np.ndarray | None = None
    slot_start: np.ndarray | None = None
    slot_bin: np.ndarray | None = None
    products: np.ndarray | None = None          # (..., columns), and the factors of the rows:
    factors: np.ndarray | None = None
    columns: int = 0
    nonfinite_factors: bool = False


def run(
        mode: str, a: Args | WeightedSumArgs, request: RowRequest | KeyRequest | None = None,
        progress: Report | None = None, **named: np.ndarray | int | None) -> Any:
    """Compute `mode` for the checked arguments `a` (src/kernels.pyx, compute()); the Plan of the call."""
    return _isa.kernels.compute(mode, a, *resolve(a.num_threads), request, progress, **named)


def run_fast(
        query: ArrayLike, key: ArrayLike, value: ArrayLike, causal: bool, out: Array | None,
        num_threads: int | None) -> Array | None:
    """Attention without other options; None if the unchecked arguments need the full checks."""
    output: Array | None = _isa.kernels.fast_attention(query, key, value, causal, out, *resolve(num_threads))
    return output


def run_fast_rows(
        x: ArrayLike, axis: object, out: Array | None, logarithm: bool, num_threads: int | None) -> Array | None:
    """Softmax or log-softmax along one axis; None if the unchecked arguments need the full checks."""
    output: Array | None = _isa.kernels.fast_softmax(x, axis, out, logarithm, *resolve(num_threads))
    return output


def run_rows(arrays: Operands, a: SoftmaxArgs | SoftmaxBackwardArgs, logarithm: bool) -> None:
    """Call the kernels of the softmax along ``a.axes``."""
    axes, out = a.axes, arrays[1]
    if axes != (out.ndim - 1,):
        arrays = _rows_last(arrays, axes)
    elif arrays[0].strides[-1] != arrays[0].itemsize:
        arrays = _neighbours_last(arrays)
    _isa.kernels.softmax(arrays, arrays[0].shape, code(a.acc), logarithm, *resolve(a.num_threads))
    if len(axes) > 1 and not np.may_share_memory(arrays[1], out):  # joining the axes took a copy
        moved = np.moveaxis(out, axes, range(-len(axes), 0))
        _copy(moved, arrays[1].reshape(moved.shape))


def _rows_last(arrays: Operands, axes: Shape) -> Operands:
    """Moves the summed axes last and joins them; without any, each element is a row of its own."""
    if not axes:
        return tuple([None if array is None else array[..., None] for array in arrays])
    if len(axes) > 1:
        return tuple([None if array is None else _joined(array, axes) for array in arrays])
    order = [axis for axis in range(arrays[0].ndim) if axis != axes[0]]
    return _neighbours_last(tuple([None if array is None else array.transpose(*order, *axes) for array in arrays]))


def _neighbours_last(arrays: Operands) -> Operands:
    """Moves adjacent rows next to the row axis, where rows are strided: the kernels read them together."""
    x = arrays[0]
    if x.strides[-1] == x.itemsize or x.itemsize not in x.strides[:-2]:
        return arrays
    axis = x.strides.index(x.itemsize)
    return tuple([None if array is None else np.moveaxis(array, axis, -2) for array in arrays])


def _joined(array: np.ndarray, axes: Shape) -> np.ndarray:
    """Moves the axes last and joins them into one, as a view where the strides allow it."""
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
    """Number by which the kernels know an accumulation dtype."""
    return 1 if dtype.char == "d" else 0
