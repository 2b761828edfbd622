"""Attention, its weights and the weighted sum: arguments checked, the chain computed, dtypes as promised."""

from __future__ import annotations

from typing import Never, Unpack, overload

import numpy as np

from .._checks import Args, attention_args, check_lse, options_of, weighted_sum_args
from .._checks.arrays import as_array
from .._checks.spellings import hides_unknown, unexpected
from .._types import Array, ArrayLike, BlockMask, Layout, Options, Wanted, Window
from ..results import AttentionResult
from ._chain import run, sum_of_values, weights_under
from ._weights import AttentionWeights


@overload
def attention(
        query: ArrayLike, key: ArrayLike, value: ArrayLike, *, want: tuple[()] = ..., out: Array | None = ...,
        **options: Unpack[Options]) -> Array: ...


@overload
def attention(
        query: ArrayLike, key: ArrayLike, value: ArrayLike, *, want: Wanted, out: Array | None = ...,
        **options: Unpack[Options]) -> AttentionResult: ...


@hides_unknown
def attention(
        query: ArrayLike, key: ArrayLike, value: ArrayLike, *, mask: ArrayLike | None = None,
        block_mask: BlockMask | None = None, key_indices: ArrayLike | None = None, key_mask: ArrayLike | None = None,
        bias: ArrayLike | None = None, relative_bias: ArrayLike | None = None, relative_index: ArrayLike | None = None,
        relative_key: ArrayLike | None = None, relative_query: ArrayLike | None = None, causal: bool = False,
        window: Window | None = None, q_offset: ArrayLike | None = None, k_positions: ArrayLike | None = None,
        scale: float | None = None, softcap: float | None = None, alibi_slopes: ArrayLike | None = None,
        sinks: ArrayLike | None = None, q_segments: ArrayLike | None = None, k_segments: ArrayLike | None = None,
        q_lengths: ArrayLike | None = None, kv_lengths: ArrayLike | None = None, layout: Layout = "bhnd",
        want: Wanted | tuple[()] = (), out: Array | None = None, num_threads: int | None = None,
        **unknown: Never) -> np.ndarray | AttentionResult:
    """Softmax of the scores of query and key, times value: the definition of `attnc.attention`.

    Row ``i`` stands at position ``p = i + q_offset``, key ``j`` at ``k = j`` or ``k_positions[j]``; the row sees the
    keys that all masks allow::

        x      = relative_index[j - i + q_len - 1]
        raw    = query[i] . key[j] + query[i] . relative_key[x] + relative_query[x] . key[j]
        score  = cap(scale * raw) + bias[i, j] + relative_bias[j - i + q_len - 1] - slope * |p - j|
        cap(x) = softcap * tanh(x / softcap)
        lse    = log(sum of exp(score) over the keys it sees, and exp(sink))
        weight = exp(score - lse) for the keys it sees, else exactly 0
        output = sum of weight * value[j]

    Parameters, results and errors are those of `attnc.attention`; `num_threads` is checked and has no effect.

    Examples
    --------
    >>> attention([[1., 0.]], [[1., 0.], [1., 0.]], [[2., 4.], [4., 8.]])
    array([[3., 6.]])
    """
    if unknown:
        unexpected(attention, unknown)
    a = attention_args(query, key, as_array("value", value), *options_of(locals()), want=want, out=out,
                       num_threads=num_threads)
    return attend(a)


def attend(a: Args) -> np.ndarray | AttentionResult:
    """`attention` of checked arguments."""
    with np.errstate(all="ignore"):
        found = run(a)
        output = found["output"].astype(a.dtype, order="C")
        found["weights"] = found["weights"].astype(a.dtype)
        weights = AttentionWeights.of(a)
        found.update({name: getattr(weights, name)() for name in ("entropy", "max", "argmax") if name in a.want})
    if a.out is not None:
        a.out[...] = output
        output = a.out
    return AttentionResult(output, **{name: found[name] for name in a.want}) if a.want else output


@hides_unknown
def attention_weights(
        query: ArrayLike, key: ArrayLike, *, mask: ArrayLike | None = None, block_mask: BlockMask | None = None,
        key_indices: ArrayLike | None = None, key_mask: ArrayLike | None = None, bias: ArrayLike | None = None,
        relative_bias: ArrayLike | None = None, relative_index: ArrayLike | None = None,
        relative_key: ArrayLike | None = None, relative_query: ArrayLike | None = None, causal: bool = False,
        window: Window | None = None, q_offset: ArrayLike | None = None, k_positions: ArrayLike | None = None,
        scale: float | None = None, softcap: float | None = None, alibi_slopes: ArrayLike | None = None,
        sinks: ArrayLike | None = None, q_segments: ArrayLike | None = None, k_segments: ArrayLike | None = None,
        q_lengths: ArrayLike | None = None, kv_lengths: ArrayLike | None = None, layout: Layout = "bhnd",
        lse: ArrayLike | None = None, out: Array | None = None, num_threads: int | None = None,
        **unknown: Never) -> np.ndarray:
    """The weights of `attention`, for every row and key: the definition of `attnc.attention_weights`.

    Parameters, results and errors are those of `attnc.attention_weights`.

    Examples
    --------
    >>> attention_weights([[1., 0.]], [[1., 0.], [1., 0.]])
    array([[0.5, 0.5]])
    """
    if unknown:
        unexpected(attention_weights, unknown)
    a = attention_args(query, key, None, *options_of(locals()), out=out, num_threads=num_threads, gives="weights")
    with np.errstate(all="ignore"):
        weights = run(a)["weights"] if lse is None else weights_under(check_lse(lse, a), a)
        weights = weights.astype(a.dtype)
    if out is None:
        return weights
    out[...] = weights
    return out


@hides_unknown
def weighted_sum(
        weights: ArrayLike, value: ArrayLike, *, out: Array | None = None,
        num_threads: int | None = None, **unknown: Never) -> np.ndarray:
    """``weights @ value`` over grouped heads: the definition of `attnc.weighted_sum`.

    Parameters, results and errors are those of `attnc.weighted_sum`.

    Examples
    --------
    >>> weighted_sum([[0.5, 0.5, 0.]], [[1.], [3.], [np.nan]])
    array([[2.]])
    """
    if unknown:
        unexpected(weighted_sum, unknown)
    a = weighted_sum_args(weights, value, out, num_threads)
    with np.errstate(all="ignore"):
        weights = np.ascontiguousarray(a.weights, a.acc)
        result = sum_of_values(weights, weights != 0, a).astype(a.dtype).reshape(a.out_shape)
    if out is None:
        return result
    out[...] = result
    return out
