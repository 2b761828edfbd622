"""Attention of packed sequences: one sequence after another."""

from __future__ import annotations

import numpy as np

from .._checks import varlen_args
from ..results import AttentionResult
from ._attention import attention


def attention_varlen(query, key, value, cu_seqlens_q, cu_seqlens_k, *, causal=False, window=None, scale=None,
                     softcap=None, alibi_slopes=None, sinks=None, want=(), out=None, num_threads=None,
                     ) -> np.ndarray | AttentionResult:
    """`attention` of each sequence of packed tokens: the definition of `attnc.attention_varlen`.

    Parameters
    ----------
    query : array (q_tokens, q_heads, head_dim)
    key, value : array (kv_tokens, kv_heads, head_dim) and (kv_tokens, kv_heads, value_dim)
    cu_seqlens_q, cu_seqlens_k : int array (sequences + 1,)
        Running sum of the lengths: 0, then the end of each sequence, the last one the number of tokens.
    causal, window, scale, softcap, sinks
        As in `attention`. In each sequence the last row stands at the last key.
    alibi_slopes : float array (q_heads,) or (sequences, q_heads), optional
    want : name or tuple of names
        ``"lse"`` (q_heads, q_tokens) or nothing.
    out : array (q_tokens, q_heads, value_dim), optional
        Receives the output: exact shape and dtype, no memory shared with an input.
    num_threads : int, optional
        Checked, and of no effect here.

    Returns
    -------
    array (q_tokens, q_heads, value_dim), or AttentionResult
        As in `attention`: a row that sees no key has output 0 and lse -inf or its sink.

    Raises
    ------
    TypeError, ValueError
        For a wrong dtype or a wrong shape or value, naming the argument.

    Examples
    --------
    >>> query, key, value = np.zeros((2, 1, 4)), np.zeros((3, 1, 4)), np.array([2., 4., 7.]).reshape(3, 1, 1)
    >>> attention_varlen(query, key, value, [0, 1, 2], [0, 2, 3]).ravel()
    array([3., 7.])
    """
    v = varlen_args(query, key, value, cu_seqlens_q, cu_seqlens_k, causal=causal, window=window, scale=scale,
                    softcap=softcap, alibi_slopes=alibi_slopes, sinks=sinks, want=want, out=out,
                    num_threads=num_threads)
    a = v.args
    output = np.empty(a.out_shape, a.dtype) if out is None else out
    lse = np.empty(a.lse_shape, a.acc)
    for i in range(len(v.q_lengths)):
        rows = slice(v.q_starts[i], v.q_starts[i] + v.q_lengths[i])
        keys = slice(v.k_starts[i], v.k_starts[i] + v.kv_lengths[i])
        slopes = a.alibi_slopes if a.alibi_slopes is None or a.alibi_slopes.ndim == 1 else a.alibi_slopes[i]
        found = attention(a.query[:, rows], a.key[:, keys], a.value[:, keys], causal=a.causal, window=a.window,
                          scale=a.scale, softcap=a.softcap, alibi_slopes=slopes, sinks=a.sinks, want="lse")
        output[rows], lse[:, rows] = found.output.swapaxes(0, 1), found.lse
    return AttentionResult(output, lse=lse) if a.want else output
