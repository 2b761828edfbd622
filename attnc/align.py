"""Monotonic alignment of the rows and columns of a matrix, such as the tokens and frames of a speech model."""

from __future__ import annotations

import numpy as np

from . import _cpu
from ._checks import align_args
from ._types import ArrayLike, Integers

BLOCK = 1 << 22         # compared elements of one piece, which takes milliseconds: signals come between pieces


def align(matrix: ArrayLike, *, medfilt: int | None = 7) -> tuple[Integers, Integers]:
    """The monotonic path through a matrix with the largest sum, by dynamic time warping.

    A path collects an element at each step, so a longer one collects more of a matrix of weights: standardise the
    columns, or subtract the mean, first.

    Parameters
    ----------
    matrix : array (rows, frames)
        How well each row (a token) goes with each frame, such as the mean of some heads' attention weights; -inf where
        the path must not go.
    medfilt : int, optional
        Odd width of a median filter along the frames, which are reflected at both ends; no filter for 1, None, or a
        width of which half is at least the number of frames.

    Returns
    -------
    rows, frames : int64 arrays of one length
        The path: it starts at (0, 0), ends at the last row and frame, and each step goes to the next row, the next
        frame or both. Among equal sums, from the end, it comes by the diagonal, then from the frame before.

    Raises
    ------
    TypeError, ValueError
        For a wrong dtype, an empty matrix or one not of two axes, NaN or +inf in it, an even width, and where each path
        meets -inf.

    Notes
    -----
    Sums are float64. Time is O(rows * frames), memory a byte for each element. These are the paths of openai-whisper's
    word times, where a tie of the diagonal and the row before takes the frame before instead, at a loss.

    Examples
    --------
    >>> import numpy as np
    >>> weights = np.array([[0.9, 0.8, 0.1, 0.0], [0.1, 0.1, 0.9, 0.2], [0.0, 0.1, 0.0, 0.8]])
    >>> rows, frames = align(weights - weights.mean(0), medfilt=None)
    >>> rows, frames
    (array([0, 0, 1, 2]), array([0, 1, 2, 3]))
    >>> frames[np.flatnonzero(np.diff(rows, prepend=-1))]       # the frame at which each row begins
    array([0, 2, 3])
    """
    given, width = align_args(matrix, medfilt)
    n, m = given.shape
    line, window, sums, moves = np.empty(m), np.empty(width), np.empty(m), np.empty((n, m), np.uint8)
    step = max(1, BLOCK // (m * width))
    for start in range(0, n, step):
        block = np.require(given[start:start + step], np.float64, ["C", "A"])
        _cpu.align_rows(block, line, window, sums, moves[start:start + step], start == 0)
    if not np.isfinite(sums[-1]):
        raise ValueError("matrix has no path without -inf; wanted at least one")
    rows, frames = np.empty((2, n + m - 1), np.int64)
    first = _cpu.align_path(moves, rows, frames)
    return rows[first:].copy(), frames[first:].copy()
