"""Attention, its weights and the weighted sum: arguments checked, the chain computed, dtypes as promised."""

from __future__ import annotations

import numpy as np

from .._checks import attention_args, check_lse, options_of, weighted_sum_args
from .._checks.arrays import as_array
from ..results import AttentionResult
from ._chain import run, sum_of_values, weights_under
from ._weights import AttentionWeights


def attention(query, key, value, *, mask=None, key_mask=None, bias=None, causal=False, window=None, q_offset=None,
              scale=None, softcap=None, alibi_slopes=None, sinks=None, q_segments=None, k_segments=None,
              q_lengths=None, kv_lengths=None, layout="bhnd", want=(), out=None, num_threads=None,
              ) -> np.ndarray | AttentionResult:
    """Softmax of the scores of query and key, times value: the definition of `attnc.attention`.

    Row ``i`` stands at position ``p = i + q_offset``, key ``j`` at ``j``; the row sees the keys that all masks allow::

        score  = cap(scale * query[i] . key[j]) + bias[i, j] - slope * |p - j|      cap(x) = softcap * tanh(x / softcap)
        lse    = log(sum of exp(score) over the keys it sees, and exp(sink))
        weight = exp(score - lse) for the keys it sees, else exactly 0
        output = sum of weight * value[j]

    Parameters
    ----------
    query : array (..., q_heads, q_len, head_dim) or (q_len, head_dim)
        float32, float64, float16 or bfloat16; bools and integers count as float64.
    key, value : array (..., kv_heads, kv_len, head_dim) and (..., kv_heads, kv_len, value_dim), or 2-D like `query`
        Query head ``h`` reads head ``h // (q_heads // kv_heads)``. Leading axes broadcast.
    mask : bool array, optional
        True = attend; broadcasts to (..., q_heads, q_len, kv_len).
    key_mask : bool array (batch..., kv_len), optional
        True = attend, for all rows of a batch element.
    bias : float array, optional
        Added to the scores; broadcasts as `mask`. -inf means not allowed.
    causal : bool
        Only keys at or before the row's position.
    window : tuple (left, right), optional
        Only so many keys before and after the row's own position; None is unbounded.
    q_offset : int or int array (batch...), optional
        Position of the first row; by default kv length - q length, so that the last row sees the last key.
    scale : float, optional
        By default ``1 / sqrt(head_dim)``.
    softcap : float, optional
    alibi_slopes : float array (q_heads,) or (batch..., q_heads), optional
    sinks : float array (q_heads,), optional
        A logit per head that takes part in the softmax and has no value.
    q_segments, k_segments : int array (batch..., q_len) and (batch..., kv_len), optional
        A row sees keys of its own segment; a negative id sees nothing.
    q_lengths, kv_lengths : int or int array (batch...), optional
        Valid rows and keys; the rest is padding.
    layout : {"bhnd", "bnhd"}
        Order of the last axes of query, key, value and output: heads before length or after it.
    want : name or tuple of names
        Out of ``"lse"``, ``"entropy"``, ``"max"`` and ``"argmax"`` (..., q_heads, q_len), ``"weights"`` and
        ``"scores"`` (..., q_heads, q_len, kv_len). See `AttentionWeights` for the statistics.
    out : array, optional
        Receives the output: exact shape and dtype, no memory shared with an input.
    num_threads : int, optional
        Checked, and of no effect here.

    Returns
    -------
    array (..., q_heads, q_len, value_dim), or AttentionResult
        Output and weights in the promoted dtype of query, key and value; lse and scores in float32, or float64 if an
        input is float64. A row that sees no key: output 0, weights 0, lse -inf or its sink; of padding -inf.
        A row with a NaN score at a key it sees, or a score of +inf: output, lse and all its weights NaN.

    Raises
    ------
    TypeError, ValueError
        For a wrong dtype or a wrong shape or value, naming the argument.

    Examples
    --------
    >>> attention([[1., 0.]], [[1., 0.], [1., 0.]], [[2., 4.], [4., 8.]])
    array([[3., 6.]])
    """
    a = attention_args(query, key, as_array("value", value), *options_of(locals()), want=want, out=out,
                       num_threads=num_threads)
    with np.errstate(all="ignore"):
        found = run(a)
        output = found["output"].astype(a.dtype, order="C")
        found["weights"] = found["weights"].astype(a.dtype)
        weights = AttentionWeights.of(a)
        found.update({name: getattr(weights, name)() for name in ("entropy", "max", "argmax") if name in a.want})
    if out is not None:
        out[...] = output
        output = out
    return AttentionResult(output, **{name: found[name] for name in a.want}) if a.want else output


def attention_weights(query, key, *, mask=None, key_mask=None, bias=None, causal=False, window=None, q_offset=None,
                      scale=None, softcap=None, alibi_slopes=None, sinks=None, q_segments=None, k_segments=None,
                      q_lengths=None, kv_lengths=None, layout="bhnd", lse=None, out=None, num_threads=None,
                      ) -> np.ndarray:
    """The weights of `attention`, for every row and key: the definition of `attnc.attention_weights`.

    Parameters
    ----------
    query : array (..., q_heads, q_len, head_dim) or (q_len, head_dim)
    key : array (..., kv_heads, kv_len, head_dim) or (kv_len, head_dim)
    mask, key_mask, bias, causal, window, q_offset, scale, softcap, alibi_slopes, sinks, q_segments, k_segments, \
q_lengths, kv_lengths, layout, num_threads
        As in `attention`.
    lse : float array (..., q_heads, q_len) or (q_len,), optional
        The lse of each row over more keys than these: the weights are ``exp(score - lse)``. It holds the sinks.
    out : array, optional
        Receives the weights: exact shape and dtype, no memory shared with an input.

    Returns
    -------
    array (..., q_heads, q_len, kv_len) or (q_len, kv_len)
        In the promoted dtype of query and key. Rows sum to 1, or to less with sinks, or to 0 if they see no key.
        Under a given lse: to the share of these keys; a row whose lse is -inf has weights 0, one of NaN has NaN.

    Raises
    ------
    TypeError, ValueError
        For a wrong dtype or a wrong shape or value, naming the argument; `sinks` together with `lse`.

    Examples
    --------
    >>> attention_weights([[1., 0.]], [[1., 0.], [1., 0.]])
    array([[0.5, 0.5]])
    """
    a = attention_args(query, key, None, *options_of(locals()), out=out, num_threads=num_threads, gives="weights")
    with np.errstate(all="ignore"):
        weights = run(a)["weights"] if lse is None else weights_under(check_lse(lse, a), a)
        weights = weights.astype(a.dtype)
    if out is None:
        return weights
    out[...] = weights
    return out


def weighted_sum(weights, value, *, out=None, num_threads=None) -> np.ndarray:
    """``weights @ value`` over grouped heads: the definition of `attnc.weighted_sum`.

    Parameters
    ----------
    weights : array (..., q_heads, q_len, kv_len) or (q_len, kv_len)
        A weight of exactly 0 contributes nothing, even if the value is NaN.
    value : array (..., kv_heads, kv_len, value_dim) or (kv_len, value_dim)
    out : array, optional
        Receives the result: exact shape and dtype, no memory shared with an input.
    num_threads : int, optional
        Checked, and of no effect here.

    Returns
    -------
    array (..., q_heads, q_len, value_dim) or (q_len, value_dim)
        In the promoted dtype, summed in float64 if an input is float64, else in float32.

    Raises
    ------
    TypeError, ValueError
        For a wrong dtype or a wrong shape or value, naming the argument.

    Examples
    --------
    >>> weighted_sum([[0.5, 0.5, 0.]], [[1.], [3.], [np.nan]])
    array([[2.]])
    """
    a = weighted_sum_args(weights, value, out, num_threads)
    with np.errstate(all="ignore"):
        weights = np.ascontiguousarray(a.weights, a.acc)
        result = sum_of_values(weights, weights != 0, a).astype(a.dtype).reshape(a.out_shape)
    if out is None:
        return result
    out[...] = result
    return out
