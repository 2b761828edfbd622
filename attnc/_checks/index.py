"""Check an index of the weights, and resolve it axis by axis as NumPy does."""

import math
import operator
from types import EllipsisType
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from .._types import Shape
from .arrays import describe

ALL = slice(None)
_Part: TypeAlias = int | slice | np.ndarray | EllipsisType | None


class Selection(NamedTuple):
    """What an index takes.

    `axes` has for each axis of the weights a slice, of one place for an int, or the places of all points, an array.
    `points` is the shape that the arrays of the index broadcast to. `rest` is an index of the axes of slices: it drops
    those of ints and adds those of None; in the result `front` of them come before the axes of the points.
    """

    axes: tuple[slice | np.ndarray, ...]
    points: Shape
    rest: tuple[_Part, ...]
    front: int


def check_index(index: object, shape: Shape) -> Selection:
    """`index` as NumPy reads it for an array of this shape."""
    parts = [_part(one) for one in (index if isinstance(index, tuple) else (index,))]
    dots = sum(part is Ellipsis for part in parts)
    if dots > 1:
        raise IndexError("an index can have only one ellipsis ('...')")
    taken = sum(map(_n_axes, parts))
    if taken > len(shape):
        raise IndexError(f"too many indices: the weights have {len(shape)} axes, but {taken} were indexed")
    axes: list[slice | np.ndarray] = []
    rest: list[_Part] = []
    shapes: list[Shape] = []
    for part in parts if dots else (*parts, Ellipsis):
        if part is Ellipsis:
            axes += [ALL] * (len(shape) - taken)
            rest += [ALL] * (len(shape) - taken)
        elif isinstance(part, np.ndarray):
            axes += _places(part, shape, len(axes))
            shapes.append(part.shape if part.dtype != bool else (np.count_nonzero(part),))
        else:
            if isinstance(part, int):
                place = _within(part, shape[len(axes)], len(axes))
                axes.append(slice(place, place + 1))
            elif part is not None:
                axes.append(part)
            rest.append(0 if isinstance(part, int) else None if part is None else ALL)
    if dots:
        rest.append(Ellipsis)       # so that a result without axes is an array
    if not shapes:
        return Selection(tuple(axes), (), tuple(rest), 0)
    try:
        points = np.broadcast_shapes(*shapes)
    except ValueError:
        raise IndexError(f"the arrays of an index must broadcast together; got {', '.join(map(str, shapes))}") from None
    for axis, (one, length) in enumerate(zip(axes, shape, strict=True)):
        if isinstance(one, np.ndarray):
            axes[axis] = np.broadcast_to(_all_within(one, points, length, axis), points).ravel()
    return Selection(tuple(axes), points, tuple(rest), _front(parts, len(shape), len(points)))


def _part(one: Any) -> _Part:
    """None, an ellipsis, a slice, an int, or an array of ints or bools."""
    if one is None or one is Ellipsis or isinstance(one, slice):
        return one
    if not isinstance(one, (bool, np.bool_)) and not getattr(one, "ndim", 0):
        try:
            return operator.index(one)
        except TypeError:
            pass
    places = np.asarray(one)
    if places.size == 0 and not isinstance(one, np.ndarray):
        places = places.astype(np.int64)        # an empty list
    if places.dtype.kind not in "biu":
        raise IndexError("an index has ints, slices, None, an ellipsis and arrays of ints or bools, got "
                         f"{describe(one)}")
    return places


def _n_axes(part: _Part) -> int:
    """How many axes of the weights a part stands for."""
    if isinstance(part, np.ndarray) and part.dtype == bool:
        return part.ndim
    return int(part is not None and part is not Ellipsis)


def _places(part: np.ndarray, shape: Shape, axis: int) -> list[np.ndarray]:
    """The places on each axis that an array stands for, from `axis` on."""
    if part.dtype != bool:
        return [part]
    sizes = shape[axis:axis + part.ndim]
    if part.shape != sizes:
        first = axis + [a == b for a, b in zip(part.shape, sizes, strict=True)].index(False)
        raise IndexError(f"a bool array of shape {part.shape} indexes axis {first} with size {shape[first]}; wanted "
                         f"{sizes}, the sizes from axis {axis} on")
    return list(part.nonzero()) if part.ndim else []


def _within(place: int, length: int, axis: int) -> int:
    """A place on an axis, counted from 0."""
    if not -length <= place < length:
        raise IndexError(f"index {place} is out of bounds for axis {axis} with size {length}")
    return place % length


def _all_within(places: np.ndarray, points: Shape, length: int, axis: int) -> np.ndarray:
    """Places on an axis, counted from 0; as in NumPy, they may be any where there is no point."""
    if math.prod(points):
        for extreme in (places.min(), places.max()):
            _within(int(extreme), length, axis)
    places = places.astype(np.int64)
    return np.where(places < 0, places + length, places)


def _front(parts: list[_Part], n_axes: int, n_points: int) -> int:
    """How many axes of the result come before those of the points, which NumPy says: it is asked for points of no size
    in an array whose axes are 1 long."""
    probe: list[Any] = []
    for part in parts:
        if isinstance(part, np.ndarray):
            probe += [np.zeros((0,) * n_points, np.int64)] * _n_axes(part) or [np.False_]
        else:
            probe.append(0 if isinstance(part, int) else ALL if isinstance(part, slice) else part)
    found: np.ndarray = np.empty((1,) * n_axes)[tuple(probe)]
    return found.shape.index(0)
