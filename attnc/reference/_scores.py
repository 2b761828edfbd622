"""Scores: how well each query matches each key, stage by stage."""

from __future__ import annotations

from typing import Never

import numpy as np

from .. import masks
from .._checks import Args, WeightedSumArgs, attention_args, options_of
from .._checks.arrays import saturated
from .._checks.spellings import hides_unknown, unexpected
from .._types import Array, ArrayLike, BlockMask, Layout, Stage, Window


@hides_unknown
def attention_scores(
        query: ArrayLike, key: ArrayLike, *, stage: Stage = "masked", mask: ArrayLike | None = None,
        block_mask: BlockMask | None = None, key_indices: ArrayLike | None = None, key_mask: ArrayLike | None = None,
        bias: ArrayLike | None = None, relative_bias: ArrayLike | None = None, relative_index: ArrayLike | None = None,
        relative_key: ArrayLike | None = None, relative_query: ArrayLike | None = None, causal: bool = False,
        window: Window | None = None, q_offset: ArrayLike | None = None, k_positions: ArrayLike | None = None,
        scale: float | None = None, softcap: float | None = None, alibi_slopes: ArrayLike | None = None,
        sinks: ArrayLike | None = None, q_segments: ArrayLike | None = None, k_segments: ArrayLike | None = None,
        q_lengths: ArrayLike | None = None, kv_lengths: ArrayLike | None = None, layout: Layout = "bhnd",
        out: Array | None = None, num_threads: int | None = None, **unknown: Never) -> np.ndarray:
    """Scores of every query with every key: the definition of `attnc.attention_scores`.

    Parameters, results and errors are those of `attnc.attention_scores`.

    Examples
    --------
    >>> attention_scores([[1., 0.]], [[2., 1.], [3., 4.]], stage="raw")
    array([[2., 3.]])
    """
    if unknown:
        unexpected(attention_scores, unknown)
    a = attention_args(query, key, None, *options_of(locals()), out=out, num_threads=num_threads, stage=stage,
                       gives="scores")
    with np.errstate(all="ignore"):
        if stage == "masked":
            scores = masked_scores(a, masks.allowed(a))
        else:
            scores = np.where(masks.within_lengths(a), unmasked_scores(a, stage), a.acc.type(-np.inf))
    scores = scores.reshape(a.weights_shape)
    if out is None:
        return scores
    out[...] = scores
    return out


def unmasked_scores(a: Args, stage: str) -> np.ndarray:
    """The product of query and key, as far as `stage`."""
    query, key = a.query.astype(a.acc), per_query_head(a.key.astype(a.acc), a)
    scores = product(query, key)
    if stage == "raw":
        return scores
    if a.relative_index is not None:
        scores = scores + relative_terms(a, query, key)
    if stage == "unscaled":
        return scores
    scores = np.asarray(a.acc.type(a.scale) * scores)
    if stage == "scaled" or a.softcap is None:
        return scores
    softcap = a.acc.type(a.softcap)
    return np.asarray(softcap * np.tanh(scores / softcap))


def relative_terms(a: Args, query: np.ndarray, key: np.ndarray) -> np.ndarray:
    """The products of queries and keys with the table row of their distance."""
    rows, total = rows_of_distances(a), np.zeros((), a.acc)
    if a.relative_key is not None:
        of_rows = product(query, saturated(a.relative_key, a.acc))
        total = total + np.take_along_axis(of_rows, _spread(rows, of_rows), -1)
    if a.relative_query is not None:
        of_keys = product(key, saturated(a.relative_query, a.acc))
        total = total + np.take_along_axis(of_keys, _spread(rows.T, of_keys), -1).swapaxes(-1, -2)
    return total


def rows_of_distances(a: Args) -> np.ndarray:
    """The table row of each row and key, (q_len, kv_len)."""
    assert a.relative_index is not None
    rows: np.ndarray = a.relative_index[np.arange(a.kv_len) - np.arange(a.q_len)[:, None] + a.q_len - 1]
    return rows


def _spread(rows: np.ndarray, of: np.ndarray) -> np.ndarray:
    return np.broadcast_to(rows, (*of.shape[:-2], *rows.shape))


def product(query: np.ndarray, key: np.ndarray) -> np.ndarray:
    """How well each query matches each key."""
    return np.asarray(query @ key.swapaxes(-1, -2))


def masked_scores(a: Args, allowed: np.ndarray) -> np.ndarray:
    """The finished scores: masked by selection, so that what is not allowed cannot matter, not even NaN."""
    scores = unmasked_scores(a, "capped")
    if a.bias is not None:
        scores = scores + saturated(a.bias, a.acc)
    if a.relative_bias is not None:
        scores = scores + saturated(a.relative_bias, a.acc)
    if a.alibi_slopes is not None:
        distance = np.abs(masks.key_positions(a) - masks.positions(a)).astype(a.acc)
        scores = scores - a.alibi_slopes[..., None, None] * distance
    return np.where(allowed, scores, a.acc.type(-np.inf))


def stored_scores(a: Args, allowed: np.ndarray) -> tuple[np.ndarray, np.floating]:
    """Finished scores as ``scores * unit``. With nothing but a scale, it is applied after the maximum is subtracted, so
    that scores which it takes out of the range of floats have their weights; `scores` are then products."""
    magnitude = abs(a.scale)
    finished = any(x is not None for x in (a.softcap, a.bias, a.relative_bias, a.alibi_slopes))
    if finished or not 1e-30 < magnitude < 1e30:
        return masked_scores(a, allowed), a.acc.type(1)
    scores = unmasked_scores(a, "unscaled")
    return np.where(allowed, -scores if a.scale < 0 else scores, a.acc.type(-np.inf)), a.acc.type(magnitude)


def per_query_head(x: np.ndarray, a: Args | WeightedSumArgs) -> np.ndarray:
    """Keys or values with each head repeated for the query heads that share it."""
    return x if a.q_heads == a.kv_heads else np.repeat(x, a.q_heads // a.kv_heads, axis=-3)
