"""Attention of packed sequences: one sequence after another."""

from __future__ import annotations

from typing import Never, Unpack, overload

import numpy as np

from .._checks import varlen_args
from .._checks.spellings import hides_unknown, unexpected
from .._types import Array, ArrayLike, Lse, VarlenOptions, Window
from ..results import AttentionResult
from ._attention import attention


@overload
def attention_varlen(
        query: ArrayLike, key: ArrayLike, value: ArrayLike, cu_seqlens_q: ArrayLike, cu_seqlens_k: ArrayLike, *,
        want: tuple[()] = ..., out: Array | None = ..., **options: Unpack[VarlenOptions]) -> Array: ...


@overload
def attention_varlen(
        query: ArrayLike, key: ArrayLike, value: ArrayLike, cu_seqlens_q: ArrayLike, cu_seqlens_k: ArrayLike, *,
        want: Lse, out: Array | None = ..., **options: Unpack[VarlenOptions]) -> AttentionResult: ...


@hides_unknown
def attention_varlen(
        query: ArrayLike, key: ArrayLike, value: ArrayLike, cu_seqlens_q: ArrayLike, cu_seqlens_k: ArrayLike, *,
        causal: bool = False, window: Window | None = None, scale: float | None = None, softcap: float | None = None,
        alibi_slopes: ArrayLike | None = None, sinks: ArrayLike | None = None, want: Lse | tuple[()] = (),
        out: Array | None = None, num_threads: int | None = None, **unknown: Never) -> np.ndarray | AttentionResult:
    """`attention` of each sequence of packed tokens: the definition of `attnc.attention_varlen`.

    Parameters, results and errors are those of `attnc.attention_varlen`.

    Examples
    --------
    >>> query, key, value = np.zeros((2, 1, 4)), np.zeros((3, 1, 4)), np.array([2., 4., 7.]).reshape(3, 1, 1)
    >>> attention_varlen(query, key, value, [0, 1, 2], [0, 2, 3]).ravel()
    array([3., 7.])
    """
    if unknown:
        unexpected(attention_varlen, unknown)
    v = varlen_args(query, key, value, cu_seqlens_q, cu_seqlens_k, causal=causal, window=window, scale=scale,
                    softcap=softcap, alibi_slopes=alibi_slopes, sinks=sinks, want=want, out=out,
                    num_threads=num_threads)
    a, values = v.args, np.asarray(v.args.value)
    output = np.empty(a.out_shape, a.dtype) if out is None else out
    lse = np.empty(a.lse_shape, a.acc)
    for i in range(len(v.q_lengths)):
        rows = slice(v.q_starts[i], v.q_starts[i] + v.q_lengths[i])
        keys = slice(v.k_starts[i], v.k_starts[i] + v.kv_lengths[i])
        slopes = a.alibi_slopes if a.alibi_slopes is None or a.alibi_slopes.ndim == 1 else a.alibi_slopes[i]
        found = attention(a.query[:, rows], a.key[:, keys], values[:, keys], causal=a.causal, window=a.window,
                          scale=a.scale, softcap=a.softcap, alibi_slopes=slopes, sinks=a.sinks, want="lse")
        output[rows], lse[:, rows] = found.output.swapaxes(0, 1), found.lse
    return AttentionResult(output, lse=lse) if a.want else output
