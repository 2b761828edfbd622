"""Check the arguments of the stand-alone functions: softmax, log_softmax, weighted_sum and align."""

from dataclasses import dataclass

import numpy as np

from .._types import Shape
from .arrays import accumulator, check_fits, float_array, promoted
from .attention import broadcast_batch, check_groups
from .options import bools
from .output import check_out
from .scalars import check_num_threads, integer


@dataclass(slots=True)
class SoftmaxArgs:
    """Checked arguments of softmax; `axes` are normalised to be non-negative and sorted."""

    x: np.ndarray
    axes: Shape
    where: np.ndarray | None
    out: np.ndarray | None
    dtype: np.dtype
    acc: np.dtype
    num_threads: int | None


@dataclass(slots=True)
class WeightedSumArgs:
    """Checked arguments of weighted_sum; arrays have a heads axis and keep their own batch axes."""

    weights: np.ndarray
    value: np.ndarray
    two_d: bool
    batch: Shape
    q_heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    value_dim: int
    dtype: np.dtype
    acc: np.dtype
    out: np.ndarray | None
    out_shape: Shape
    num_threads: int | None


def softmax_args(x: object, axis: object, where: object, out: object, num_threads: object) -> SoftmaxArgs:
    """Check the arguments of softmax and log_softmax; `out` may be `x` itself."""
    values = float_array("x", x)
    axes = check_axes(axis, values.ndim)
    keep = None
    if where is not None:
        keep = bools("where", where, "take part", "a 0/1 mask is where.astype(bool)")
        check_fits("where", keep.shape, values.shape, "the shape of x")
    if num_threads is not None:
        num_threads = check_num_threads(num_threads)
    if out is not None:
        out = check_out(out, values.shape, values.dtype, dict(x=x, where=where), in_place="x")
    return SoftmaxArgs(values, axes, keep, out, values.dtype, accumulator(values.dtype), num_threads)


def check_axes(axis: object, ndim: int) -> Shape:
    if type(axis) is int and -ndim <= axis < ndim:
        return (axis % ndim,)
    if axis is None:
        return tuple(range(ndim))
    given = axis if isinstance(axis, (tuple, list)) else (axis,)
    if ndim == 0 and given:
        raise ValueError(f"axis must be None or () for a scalar x, got {axis!r}")
    axes = [integer("axis", one, -ndim, ndim - 1) % ndim for one in given]
    if len(set(axes)) < len(axes):
        raise ValueError(f"axis names an axis twice, got {axis} for {ndim} axes; wanted each once")
    return tuple(sorted(axes))


def weighted_sum_args(weights: object, value: object, out: object, num_threads: object) -> WeightedSumArgs:
    """Check weights (..., q_heads, q_len, kv_len) against value (..., kv_heads, kv_len, value_dim)."""
    given = dict(weights=weights, value=value)
    weights, value = float_array("weights", weights), float_array("value", value)
    two_d = weights.ndim == value.ndim == 2
    for name, x in (("weights", weights), ("value", value)):
        if x.ndim < 3 and not two_d:
            raise ValueError(f"{name} has {x.ndim} axes, shape {x.shape}; wanted weights (q_len, kv_len) with value "
                             "(kv_len, dim), or both with (batch..., heads) in front")
    if two_d:
        weights, value = weights[None], value[None]

    def shapes() -> str:
        return f"weights {weights.shape[two_d:]}, value {value.shape[two_d:]}"

    q_heads, q_len, kv_len = weights.shape[-3:]
    kv_heads, value_len, value_dim = value.shape[-3:]
    if value_len != kv_len:
        raise ValueError(f"value has length {value_len}, weights has {kv_len} keys; wanted equal: {shapes()}")
    check_groups("weights", q_heads, "value", kv_heads, shapes)
    batch = broadcast_batch(shapes, weights.shape[:-3], value.shape[:-3])
    dtype = promoted(weights.dtype, value.dtype)
    out_shape = (q_len, value_dim) if two_d else (*batch, q_heads, q_len, value_dim)
    if num_threads is not None:
        num_threads = check_num_threads(num_threads)
    if out is not None:
        out = check_out(out, out_shape, dtype, given)
    return WeightedSumArgs(weights, value, two_d, batch, q_heads, kv_heads, q_len, kv_len, value_dim, dtype,
                           accumulator(dtype), out, out_shape, num_threads)


def align_args(matrix: object, medfilt: object) -> tuple[np.ndarray, int]:
    """The matrix (rows, frames), and the width of the median filter that changes something."""
    given = float_array("matrix", matrix)
    if given.ndim != 2 or not given.size:
        raise ValueError(f"matrix has shape {given.shape}; wanted (rows, frames) with at least one of each")
    width = 1 if medfilt is None else integer("medfilt", medfilt, 1, 2**31 - 1)
    if width % 2 == 0:
        raise ValueError(f"medfilt must be odd, got {width}")
    largest = given.max()       # NaN if there is one
    if not largest < np.inf:
        raise ValueError(f"matrix holds {'inf' if largest == np.inf else 'NaN'}; wanted finite numbers, or -inf where "
                         "the path must not go")
    return given, width if width // 2 < given.shape[1] else 1
