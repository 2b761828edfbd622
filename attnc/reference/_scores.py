"""Scores: how well each query matches each key, stage by stage."""

from __future__ import annotations

import numpy as np

from .. import masks
from .._checks import Args, attention_args, options_of
from .._checks.arrays import saturated


def attention_scores(query, key, *, stage="masked", mask=None, key_mask=None, bias=None, causal=False, window=None,
                     q_offset=None, scale=None, softcap=None, alibi_slopes=None, sinks=None, q_segments=None,
                     k_segments=None, q_lengths=None, kv_lengths=None, layout="bhnd", out=None, num_threads=None,
                     ) -> np.ndarray:
    """Scores of every query with every key: the definition of `attnc.attention_scores`.

    Parameters
    ----------
    query : array (..., q_heads, q_len, head_dim) or (q_len, head_dim)
    key : array (..., kv_heads, kv_len, head_dim) or (kv_len, head_dim)
    stage : {"masked", "capped", "scaled", "raw"}
        ``"raw"`` is the product, ``"scaled"`` times the scale, ``"capped"`` after the softcap, ``"masked"`` with bias,
        linear bias and every mask. Earlier stages ignore the options of later ones.
    mask, key_mask, bias, causal, window, q_offset, scale, softcap, alibi_slopes, sinks, q_segments, k_segments, \
q_lengths, kv_lengths, layout, num_threads
        As in `attention`. Sinks appear in no stage.
    out : array, optional
        Receives the scores: exact shape and dtype, no memory shared with an input.

    Returns
    -------
    array (..., q_heads, q_len, kv_len) or (q_len, kv_len)
        float64 if an input is float64, else float32. Keys that a row may not see have -inf in stage ``"masked"``,
        places past a length in every stage.

    Raises
    ------
    TypeError, ValueError
        For a wrong dtype or a wrong shape or value, naming the argument.

    Examples
    --------
    >>> attention_scores([[1., 0.]], [[2., 1.], [3., 4.]], stage="raw")
    array([[2., 3.]])
    """
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
    scores = a.acc.type(a.scale) * scores
    if stage == "scaled" or a.softcap is None:
        return scores
    softcap = a.acc.type(a.softcap)
    return softcap * np.tanh(scores / softcap)


def product(query: np.ndarray, key: np.ndarray) -> np.ndarray:
    """How well each query matches each key."""
    return query @ key.swapaxes(-1, -2)


def masked_scores(a: Args, allowed: np.ndarray) -> np.ndarray:
    """The finished scores: masked by selection, so that what is not allowed cannot matter, not even NaN."""
    scores = unmasked_scores(a, "capped")
    if a.bias is not None:
        scores = scores + saturated(a.bias, a.acc)
    if a.alibi_slopes is not None:
        distance = np.abs(np.arange(a.kv_len) - masks.positions(a)).astype(a.acc)
        scores = scores - a.alibi_slopes[..., None, None] * distance
    return np.where(allowed, scores, a.acc.type(-np.inf))


def stored_scores(a: Args, allowed: np.ndarray) -> tuple[np.ndarray, np.floating]:
    """Finished scores as ``scores * unit``. With nothing but a scale, it is applied after the maximum is subtracted, so
    that scores which it takes out of the range of floats have their weights; `scores` are then products."""
    magnitude = abs(a.scale)
    if a.softcap is not None or a.bias is not None or a.alibi_slopes is not None or not 1e-30 < magnitude < 1e30:
        return masked_scores(a, allowed), a.acc.type(1)
    scores = unmasked_scores(a, "raw")
    return np.where(allowed, -scores if a.scale < 0 else scores, a.acc.type(-np.inf)), a.acc.type(magnitude)


def per_query_head(x: np.ndarray, a: Args) -> np.ndarray:
    """Keys or values with each head repeated for the query heads that share it."""
    return x if a.q_heads == a.kv_heads else np.repeat(x, a.q_heads // a.kv_heads, axis=-3)
