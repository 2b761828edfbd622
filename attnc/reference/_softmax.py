"""Softmax: scores become shares of a whole."""

from __future__ import annotations

from typing import NamedTuple, Never

import numpy as np

from .._checks import SoftmaxArgs, softmax_args
from .._checks.spellings import hides_unknown, unexpected
from .._types import Array, ArrayLike, Axes


@hides_unknown
def softmax(
        x: ArrayLike, axis: Axes = -1, *, where: ArrayLike | None = None, out: Array | None = None,
        num_threads: int | None = None, **unknown: Never) -> np.ndarray:
    """``exp(x) / sum(exp(x))`` along `axis`: the definition of `attnc.softmax`.

    Parameters, results and errors are those of `attnc.softmax`.

    Examples
    --------
    >>> softmax([0., np.log(3.)])
    array([0.25, 0.75])
    """
    if unknown:
        unexpected(softmax, unknown)
    a = softmax_args(x, axis, where, out, num_threads)
    with np.errstate(all="ignore"):
        shifted, keep = _shifted(a)
        powers = np.where(keep, np.exp(shifted), 0)
        result = np.where(keep, powers / powers.sum(a.axes, keepdims=True), 0)
        return _returned(a, result)


@hides_unknown
def log_softmax(
        x: ArrayLike, axis: Axes = -1, *, where: ArrayLike | None = None, out: Array | None = None,
        num_threads: int | None = None, **unknown: Never) -> np.ndarray:
    """``log(softmax(x))`` along `axis` without loss of small values: the definition of `attnc.log_softmax`.

    Parameters, dtypes and errors are those of `softmax`; elements at False in `where` give -inf.

    Examples
    --------
    >>> log_softmax([0., 0.])
    array([-0.69314718, -0.69314718])
    """
    if unknown:
        unexpected(log_softmax, unknown)
    a = softmax_args(x, axis, where, out, num_threads)
    with np.errstate(all="ignore"):
        shifted, keep = _shifted(a)
        powers = np.where(keep, np.exp(shifted), 0)
        result = np.where(keep, shifted - np.log(powers.sum(a.axes, keepdims=True)), -np.inf)
        return _returned(a, result)


def _shifted(a: SoftmaxArgs) -> tuple[np.ndarray, np.ndarray]:
    """`x` less the largest element that takes part, and which elements do."""
    keep = np.broadcast_to(True if a.where is None else a.where, a.x.shape)
    x = a.x.astype(a.acc)
    largest = np.where(keep, x, -np.inf).max(a.axes, keepdims=True, initial=-np.inf)
    return x - largest, keep


def _returned(a: SoftmaxArgs, result: np.ndarray) -> np.ndarray:
    result = np.asarray(result).astype(a.dtype)
    if a.out is None:
        return result
    a.out[...] = result
    return a.out


class SoftmaxOfScores(NamedTuple):
    """Weights and lse of each row, and logarithms of the weights, which hold where the lse has no digits left."""

    weights: np.ndarray
    lse: np.ndarray
    logs: np.ndarray
    sink_logs: np.ndarray | None      # of the share of the sink, (..., q_heads, q_len)


def softmax_of_scores(
        scores: np.ndarray, unit: np.floating, allowed: np.ndarray, sinks: np.ndarray | None) -> SoftmaxOfScores:
    """The softmax of ``scores * unit``: weights are 0 where not allowed, but all NaN in a row that saw a NaN.

    Both the unit and the largest score come off before anything large is added.
    """
    top = scores.max(-1, keepdims=True, initial=-np.inf)
    shift = np.where(top == -np.inf, 0, top)
    logs = (scores - shift) * unit
    row_sum = np.where(allowed, np.exp(logs), 0).sum(-1, keepdims=True)
    largest, sink_logs = shift * unit, None
    if sinks is not None:
        sinks, own = sinks[:, None, None], np.where(top == -np.inf, top, largest)
        largest = np.maximum(own, sinks)
        gap = np.where(own == largest, 0, own - largest)
        sink_logs = np.where(sinks == -np.inf, sinks, sinks - largest)
        logs, row_sum = logs + gap, row_sum * np.exp(gap) + np.exp(sink_logs)
        sink_logs = (sink_logs - np.log(row_sum))[..., 0]
    powers = np.where(allowed, np.exp(logs), 0)
    weights = np.where(allowed.any(-1, keepdims=True), powers / np.where(row_sum == 0, 1, row_sum), 0)
    return SoftmaxOfScores(weights, (largest + np.log(row_sum))[..., 0], logs - np.log(row_sum), sink_logs)
