"""The chain on checked arguments: from scores to weights, lse and output, values summed by their weights."""

from __future__ import annotations

import numpy as np

from .. import masks
from .._checks import Args, WeightedSumArgs
from ._scores import masked_scores, per_query_head, stored_scores
from ._softmax import softmax_of_scores


def run(a: Args) -> dict[str, np.ndarray]:
    """Scores, weights, lse and, if there is a value, output of checked arguments, all in the dtype ``a.acc``."""
    allowed = masks.allowed(a)
    scores, unit = stored_scores(a, allowed)
    weights, lse, *_ = softmax_of_scores(scores, unit, allowed, a.sinks)
    if a.q_lengths is not None:
        lse = np.where(masks.rows_within(a), lse, a.acc.type(-np.inf))  # a row of padding has no sink either
    found = {"scores": (scores * unit).reshape(a.weights_shape), "weights": weights.reshape(a.weights_shape),
             "lse": lse.reshape(a.lse_shape)}
    if a.value is not None:
        output = sum_of_values(weights, allowed & (scores != -np.inf).any(-1, keepdims=True), a)  # else 0
        found["output"] = (output.swapaxes(-2, -3) if a.layout == "bnhd" else output).reshape(a.out_shape)
    return found


def weights_under(lse: np.ndarray, a: Args) -> np.ndarray:
    """Weights of keys that are part of what a row sees, whose lse is given; in the dtype ``a.acc``."""
    allowed, lse = masks.allowed(a), lse.reshape(*a.batch, a.q_heads, a.q_len, 1)
    weights = np.where(allowed & (lse != -np.inf), np.exp(masked_scores(a, allowed) - lse), 0)
    return np.where(np.isnan(lse), lse, weights).reshape(a.weights_shape)


def sum_of_values(weights: np.ndarray, seen: np.ndarray, a: Args | WeightedSumArgs) -> np.ndarray:
    """``weights @ value``, but 0 * NaN must not reach a row: keys with a non-finite value are added one by one."""
    value = per_query_head(np.ascontiguousarray(a.value, a.acc), a)
    finite = np.isfinite(value).all(-1)
    if finite.all():
        return np.asarray(weights @ value + 0)  # +0 for -0: the sign of a value with weight 0 must not show either
    output = np.where(finite[..., None, :], weights, 0) @ np.where(finite[..., None], value, 0) + 0
    for j in np.flatnonzero(~finite.reshape(-1, a.kv_len).all(0)):
        adds = seen[..., j, None] & ~finite[..., None, j, None]
        output = output + np.where(adds, weights[..., j, None] * value[..., None, j, :], 0)
    return output
