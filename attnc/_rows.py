"""The rows of a cache: memory for them, changes that an interrupt cannot cut in two, and int8."""

from __future__ import annotations

from collections.abc import Iterable
from types import EllipsisType
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from ._types import Array, Integers

_Scalar = TypeVar("_Scalar", bound=np.generic)
Changes: TypeAlias = list[tuple[Array, EllipsisType | tuple[slice | Integers, ...], Array]]

QUANTIZED = 1 << 20     # entries that become int8 at a time, in milliseconds
ALIGNMENT = 64          # a vector that crosses a line of memory is read as two: 10 % of the speed of decoding


def aligned(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """Zeros that begin at a line of memory."""
    nbytes = int(np.prod(shape, dtype=object)) * dtype.itemsize
    memory = np.zeros(nbytes + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start:start + nbytes].view(dtype).reshape(shape)


def read_only(x: NDArray[_Scalar]) -> NDArray[_Scalar]:
    view = x.view()
    view.flags.writeable = False
    return view


def apart(x: np.ndarray, stored: Iterable[np.ndarray]) -> np.ndarray:
    """The new rows, copied if they are a view of the cache's own, which the changes before them may overwrite."""
    return x.copy() if any(np.may_share_memory(x, y) for y in stored) else x


def make(changes: Changes) -> None:
    """Assign what was prepared, to the end also if an interrupt comes: rows, scales and lengths belong together."""
    try:
        for array, places, new in changes:
            array[places] = new
    except BaseException:
        for array, places, new in changes:
            array[places] = new
        raise


def slots(start: int, count: int, capacity: int) -> slice | Integers:
    """Rows of `count` tokens from token `start` on."""
    first = start % capacity
    if first + count <= capacity:
        return slice(first, first + count)
    return np.arange(start, start + count) % capacity


def quantized(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows as int8 and their factors."""
    tokens = x.shape[2]
    if x.size > QUANTIZED and tokens > 1:  # in parts, between which Python lets signal handlers run
        step = max(QUANTIZED * tokens // x.size, 1)
        rows, scales = zip(*[quantized(x[:, :, i:i + step]) for i in range(0, tokens, step)], strict=True)
        return np.concatenate(rows, axis=2), np.concatenate(scales, axis=2)
    x = x.astype(np.float32, copy=False)
    scales = np.abs(x).max(-1, initial=0) / np.float32(127)
    rows = np.rint(x / np.where(scales == 0, 1, scales)[..., None])
    return np.clip(rows, -127, 127).astype(np.int8), scales
