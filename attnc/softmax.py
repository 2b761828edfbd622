"""Stand-alone softmax and log-softmax over any axes."""

from __future__ import annotations

from typing import Never

import numpy as np

from . import _call
from ._checks import softmax_args
from ._checks.spellings import hides_unknown, unexpected
from ._types import Array, ArrayLike, Axes


@hides_unknown
def softmax(
        x: ArrayLike, axis: Axes = -1, *, where: ArrayLike | None = None, out: Array | None = None,
        num_threads: int | None = None, **unknown: Never) -> Array:
    """``exp(x) / sum(exp(x))`` along `axis`, with the largest element subtracted first: never an overflow.

    Parameters
    ----------
    x : array
        float32, float64, float16 or bfloat16 (ml_dtypes); bools and integers count as float64.
    axis : int, tuple of int or None
        The axes of the sum; None is all of them.
    where : bool array, optional
        Broadcasts to the shape of `x`. Elements at False take no part, whatever they hold, and give 0.
    out : array, optional
        Receives the result; of the result's shape and dtype. It may be `x` itself.
    num_threads : int, optional
        See `attnc.get_num_threads` for the default.

    Returns
    -------
    array of the shape and float dtype of `x`
        Where `where` is False all along the axis: 0. A row that holds NaN or +inf, or only -inf: NaN.

    Raises
    ------
    TypeError, ValueError
        For a wrong dtype or a wrong shape or value, naming the argument.

    Examples
    --------
    >>> import numpy as np
    >>> softmax([0., np.log(3.)])
    array([0.25, 0.75])
    """
    if unknown:
        unexpected(softmax, unknown)
    return _run(x, axis, where, out, num_threads, False)


@hides_unknown
def log_softmax(
        x: ArrayLike, axis: Axes = -1, *, where: ArrayLike | None = None, out: Array | None = None,
        num_threads: int | None = None, **unknown: Never) -> Array:
    """``log(softmax(x))`` along `axis` without loss of small values.

    Parameters, dtypes and errors are those of `softmax`; elements at False in `where` give -inf.

    Examples
    --------
    >>> log_softmax([0., 0.])
    array([-0.69314718, -0.69314718])
    """
    if unknown:
        unexpected(log_softmax, unknown)
    return _run(x, axis, where, out, num_threads, True)


def _run(
        x: ArrayLike, axis: Axes, where: ArrayLike | None, out: Array | None, num_threads: int | None,
        logarithm: bool) -> Array:
    if where is None:
        output = _call.run_fast_rows(x, axis, out, logarithm, num_threads)
        if output is not None:
            return output
    a = softmax_args(x, axis, where, out, num_threads)
    output = np.empty(a.x.shape, a.dtype) if a.out is None else a.out
    keep = None if a.where is None else np.broadcast_to(a.where, a.x.shape)
    _call.run_rows((a.x, output, keep, None), a, logarithm)
    return output
