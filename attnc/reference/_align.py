"""Alignment: every place's best sum, one after another, and the way back."""

from __future__ import annotations

import numpy as np

from .._checks import align_args
from .._types import ArrayLike, Integers


def align(matrix: ArrayLike, *, medfilt: int | None = 7) -> tuple[Integers, Integers]:
    """The definition of `attnc.align`."""
    given, width = align_args(matrix, medfilt)
    x = np.array(given, np.float64)
    if width > 1:
        half = width // 2
        around = np.pad(x, ((0, 0), (half, half)), mode="reflect")
        x = np.median([around[:, shift:shift + x.shape[1]] for shift in range(width)], axis=0)
    best = np.full(x.shape, -np.inf)
    for i, j in np.ndindex(x.shape):
        best[i, j] = x[i, j] + max((best[place] for place in _before(i, j)), default=0)
    if best[-1, -1] == -np.inf:
        raise ValueError("matrix has no path without -inf; wanted at least one")
    path = [(x.shape[0] - 1, x.shape[1] - 1)]
    while path[-1] != (0, 0):
        path.append(max(_before(*path[-1]), key=lambda place: best[place]))     # of equal ones the first
    rows, frames = np.array(path[::-1], np.int64).T.copy()
    return rows, frames


def _before(i: int, j: int) -> list[tuple[int, int]]:
    """Where a path may come from, the preferred place first."""
    return [place for place in ((i - 1, j - 1), (i, j - 1), (i - 1, j)) if min(place) >= 0]
