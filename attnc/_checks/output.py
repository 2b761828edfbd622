"""Check the array that a caller gives to receive the result."""

from typing import Any

import numpy as np

from .._types import Array, Shape
from .arrays import as_array, describe

OVERLAP_WORK = 100_000  # steps of NumPy's exact test; arrays that need more count as overlapping


def check_out(out: object, shape: Shape, dtype: np.dtype, inputs: dict[str, Any], in_place: str | None = None) -> Array:
    """`out`, which must take a result of `shape` and `dtype` and share no memory with `inputs`.

    The input named `in_place` may be the very same elements as `out`.
    """
    if not isinstance(out, np.ndarray) or isinstance(out, np.ma.MaskedArray):
        raise TypeError(f"out must be a numpy.ndarray of dtype {dtype.name} and shape {shape}, got {describe(out)}")
    if out.dtype is not dtype:
        if not out.dtype.isnative:
            raise TypeError(f"out must have native byte order, got dtype {out.dtype.str}; wanted {dtype.str}")
        if out.dtype != dtype:
            raise TypeError(f"out has dtype {out.dtype.name}; wanted {dtype.name}, the dtype of the result")
    if out.shape != shape:
        raise ValueError(f"out has shape {out.shape}; wanted {shape}")
    flags = out.flags
    if not flags.writeable:
        raise ValueError("out is read-only; wanted a writable array")
    if not flags.c_contiguous and _overlaps_itself(out):
        raise ValueError(f"out has strides {out.strides} for shape {shape}: elements share memory; "
                         "wanted an array with a place for each element")
    check_apart(out, inputs, in_place)
    return out


def check_apart(out: np.ndarray, inputs: dict[str, Any], in_place: str | None = None) -> None:
    """Raise if `out` shares memory with one of `inputs`, but for that named `in_place`, if it is the same elements."""
    for name, x in inputs.items():
        if x is None or (x is out and name == in_place):
            continue
        x = as_array(name, x)
        if np.may_share_memory(out, x) and not (name == in_place and _same_elements(out, x)) and _overlap(out, x):
            raise ValueError(f"out shares memory with {name}; wanted memory of its own")


def _same_elements(out: np.ndarray, x: np.ndarray) -> bool:
    return (x.dtype == out.dtype and x.shape == out.shape and x.strides == out.strides
            and x.__array_interface__["data"][0] == out.__array_interface__["data"][0])


def _overlaps_itself(x: np.ndarray) -> bool:
    """Whether two elements share a byte."""
    if not x.size:
        return False
    extent = x.itemsize         # of the axes so far, from the smallest stride to the largest
    for stride, length in sorted((abs(stride), n) for stride, n in zip(x.strides, x.shape, strict=True) if n > 1):
        if stride < extent:
            break
        extent += stride * (length - 1)
    else:
        return False
    # Two places differ first in some axis; moved to the start of this axis and of those before, they still overlap.
    for _ in range(x.ndim):
        if _overlap(x[:1], x[1:]):
            return True
        x = x[0]
    return False


def _overlap(a: np.ndarray, b: np.ndarray) -> bool:
    try:
        return np.shares_memory(a, b, max_work=OVERLAP_WORK)  # type: ignore[arg-type]    # of its stub: any int
    except np.exceptions.TooHardError:
        return True
