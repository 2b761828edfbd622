"""The weights at chosen rows and keys: one call of the kernels for each run of consecutive rows."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from .._checks.index import Selection

if TYPE_CHECKING:
    from ._held import Lazy

Place: TypeAlias = slice | np.ndarray

BLOCK_BYTES = 8 << 20     # largest block of dense weights, where only some are needed


def select(W: Lazy, chosen: Selection) -> Any:
    """The result of NumPy's indexing of the dense weights: an array, or a scalar where no axis is left."""
    out = _taken(W, chosen.axes, math.prod(chosen.points))
    if not chosen.points:
        return out[(0, *chosen.rest)]
    axes = len(chosen.points)
    out = out.reshape(*chosen.points, *out.shape[1:])[(*[slice(None)] * axes, *chosen.rest)]
    return np.moveaxis(out, range(axes), range(chosen.front, chosen.front + axes))


def _taken(W: Lazy, axes: tuple[Place, ...], n_points: int) -> np.ndarray:
    """Weights (points, axes of slices...); `axes` has, for each axis of W, a slice or the indices of all points."""
    *lead, rows, keys = axes
    sizes = [len(range(*one.indices(length))) for one, length in zip(axes, W.shape, strict=True)
             if isinstance(one, slice)]
    placed = [i for i, one in enumerate(lead) if not isinstance(one, slice)]
    whole = isinstance(rows, slice) and isinstance(keys, slice)         # the same for all points of a head
    axis = 0 if whole else len(lead) - len(placed) + isinstance(rows, slice)
    out = np.empty((*sizes[:axis], n_points, *sizes[axis:]), W.dtype)   # raises MemoryError before any work
    for heads, points in _heads(lead, placed, W.shape, n_points) if out.size else ():
        if whole:
            _fill(W, heads, rows, keys, np.expand_dims(out[points[0]], placed))
            out[points[1:]] = out[points[0]]
        elif len(points) == n_points:
            _fill(W, heads, rows, keys, np.expand_dims(out, placed))
        else:
            some = np.empty((*sizes[:axis], len(points), *sizes[axis:]), W.dtype)
            its_rows, its_keys = (one if isinstance(one, slice) else one[points] for one in (rows, keys))
            _fill(W, heads, its_rows, its_keys, np.expand_dims(some, placed))
            out[(*[slice(None)] * axis, points)] = some
    return np.moveaxis(out, axis, 0)


def _heads(lead: list[Place], placed: list[int], shape: tuple[int, ...],
           n_points: int) -> Iterator[tuple[tuple[Any, ...], np.ndarray | range]]:
    """Pairs of heads, as a slice of each leading axis, and their points, ascending; `placed` axes have points."""
    if not placed:
        yield tuple(lead), range(n_points)
        return
    sizes = [shape[axis] for axis in placed]
    number = np.ravel_multi_index(tuple(np.asarray(lead[axis]) for axis in placed), sizes)
    numbers, counts = np.unique(number, return_counts=True)
    groups = np.split(np.argsort(number, kind="stable"), counts.cumsum()[:-1])
    for head, points in zip(zip(*np.unravel_index(numbers, sizes), strict=True), groups, strict=True):
        heads = lead.copy()
        for axis, place in zip(placed, head, strict=True):
            heads[axis] = slice(int(place), int(place) + 1)
        yield tuple(heads), points


def _fill(W: Lazy, lead: tuple[Any, ...], rows: Place, keys: Place, out: np.ndarray) -> None:
    """Write weights of the heads in `lead`: at pairs of `rows` and `keys` if both are arrays, else at all of them."""
    if not isinstance(rows, slice) and not isinstance(keys, slice):
        _pointwise(W, lead, rows, keys, out)
        return
    listed = []
    for one, axis in ((rows, -2), (keys, -1)):
        if isinstance(one, slice):
            one = np.arange(W.shape[axis])[one]
            if len(one) and one[0] > one[-1]:       # runs are found in ascending order only
                one, out = one[::-1], np.flip(out, axis)
        listed.append(one)
    outer(W, lead, listed[0], listed[1], out)


def rows_of_block(shape: tuple[int, ...], dtype: np.dtype[Any]) -> int:
    """Number of rows of a block of dense weights that fit in BLOCK_BYTES, at least 1."""
    return max(1, BLOCK_BYTES // max(1, math.prod(shape[:-2]) * shape[-1] * dtype.itemsize))


def row_blocks(W: Lazy, rows: int, visible: bool = False) -> Iterator[tuple[slice, np.ndarray]]:
    """Slices of at most `rows` rows, and their dense places; inside an answer. For `visible` see `Lazy._write`."""
    lead, keys = (slice(None),) * (W.ndim - 2), slice(0, W.shape[-1])
    for start in range(0, W.shape[-2] if W.shape[-1] else 0, rows):
        some = slice(start, min(start + rows, W.shape[-2]))
        block = np.empty((*W.shape[:-2], some.stop - some.start, W.shape[-1]), W.dtype)
        if block.size:
            W._write(lead, some, keys, block, visible)
        yield some, block


def outer(W: Lazy, lead: tuple[Any, ...], rows: np.ndarray, keys: np.ndarray, out: np.ndarray) -> None:
    """Write weights at all pairs of `rows` and `keys` (1-D) of the heads in `lead` to `out` (lead..., rows, keys)."""
    if not out.size:
        return
    first, last = int(keys.min()), int(keys.max()) + 1
    consecutive = bool((np.diff(keys) == 1).all())
    at = 0
    for run in _runs(rows):
        step = len(run) if consecutive else max(1, BLOCK_BYTES // _nbytes(out, 1, last - first))
        for r in range(run.start, run.stop, step):
            n = min(step, run.stop - r)
            block, span = slice(r, r + n), slice(first, last)
            if consecutive:
                W._write(lead, block, span, out[..., at:at + n, :])
            else:
                wide = np.empty((*out.shape[:-2], n, last - first), out.dtype)
                W._write(lead, block, span, wide)
                np.take(wide, keys - first, -1, out=out[..., at:at + n, :])
            at += n


def _nbytes(out: np.ndarray, rows: int, keys: int) -> int:
    return int(np.prod(out.shape[:-2], dtype=np.int64)) * rows * keys * out.itemsize


def _runs(places: np.ndarray) -> Iterator[range]:
    """Split indices into ranges of consecutive ones."""
    cuts = np.flatnonzero(np.diff(places) != 1) + 1
    for start, stop in zip([0, *cuts], [*cuts, len(places)], strict=True):
        if stop > start:
            yield range(int(places[start]), int(places[start]) + int(stop - start))


def _pointwise(W: Lazy, lead: tuple[Any, ...], rows: np.ndarray, keys: np.ndarray, out: np.ndarray) -> None:
    """Write one weight per head for each pair of a row and a key."""
    order = np.argsort(rows, kind="stable")
    there, starts = np.unique(rows[order], return_index=True)
    ends = [*starts.tolist(), rows.size]
    step = max(1, BLOCK_BYTES // _nbytes(out[..., None], 1, W.shape[-1]))
    for i in range(0, len(there), step):
        some = there[i:i + step]
        pairs = order[ends[i]:ends[i + len(some)]]
        first, last = int(keys[pairs].min()), int(keys[pairs].max()) + 1
        wide = np.empty((*out.shape[:-1], len(some), last - first), W.dtype)
        outer(W, lead, some, np.arange(first, last), wide)
        out[..., pairs] = wide[..., np.searchsorted(some, rows[pairs]), keys[pairs] - first]
