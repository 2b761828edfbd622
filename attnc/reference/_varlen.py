"""Attention of packed sequences, its weights and gradients: one sequence after another."""

from __future__ import annotations

from typing import Any, Never, Unpack, overload

import numpy as np

from .._checks import Args, check_varlen_names, varlen_args, varlen_backward_args
from .._checks.arrays import float_array
from .._checks.spellings import hides_unknown, unexpected
from .._types import Array, ArrayLike, Gradient, PagedOptions, Ragged, VarlenOptions, Wanted, Window
from ..results import AttentionGradients, AttentionResult
from ._attention import attend
from ._backward import gradients
from ._weights import AttentionWeights


@overload
def attention_varlen(
        query: ArrayLike, key: ArrayLike, value: ArrayLike, cu_seqlens_q: ArrayLike,
        cu_seqlens_k: ArrayLike | None = ..., *, want: tuple[()] = ..., out: Array | None = ...,
        **options: Unpack[PagedOptions]) -> Array: ...


@overload
def attention_varlen(
        query: ArrayLike, key: ArrayLike, value: ArrayLike, cu_seqlens_q: ArrayLike,
        cu_seqlens_k: ArrayLike | None = ..., *, want: Wanted, out: Array | None = ...,
        **options: Unpack[PagedOptions]) -> AttentionResult: ...


@hides_unknown
def attention_varlen(
        query: ArrayLike, key: ArrayLike, value: ArrayLike, cu_seqlens_q: ArrayLike,
        cu_seqlens_k: ArrayLike | None = None, *, block_table: ArrayLike | None = None,
        kv_lengths: ArrayLike | None = None, mask: Ragged | None = None, key_indices: Ragged | None = None,
        key_mask: ArrayLike | None = None, bias: Ragged | None = None, relative_bias: Ragged | None = None,
        relative_index: Ragged | None = None, relative_key: ArrayLike | None = None,
        relative_query: ArrayLike | None = None, causal: bool = False, window: Window | None = None,
        q_offset: ArrayLike | None = None, k_positions: Ragged | None = None, scale: float | None = None,
        softcap: float | None = None, alibi_slopes: ArrayLike | None = None, sinks: ArrayLike | None = None,
        q_segments: ArrayLike | None = None, k_segments: ArrayLike | None = None, want: Wanted | tuple[()] = (),
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
    v = varlen_args(query, key, value, cu_seqlens_q, cu_seqlens_k, block_table=block_table, kv_lengths=kv_lengths,
                    mask=mask, key_indices=key_indices, key_mask=key_mask, bias=bias, relative_bias=relative_bias,
                    relative_index=relative_index, relative_key=relative_key, relative_query=relative_query,
                    causal=causal, window=window, q_offset=q_offset, k_positions=k_positions, scale=scale,
                    softcap=softcap, alibi_slopes=alibi_slopes, sinks=sinks, q_segments=q_segments,
                    k_segments=k_segments, want=want, out=out, num_threads=num_threads)
    a = v.args
    output = np.empty(a.out_shape, a.dtype) if out is None else out
    found: dict[str, list[np.ndarray]] = {name: [] for name in a.want}
    for i, one_args in enumerate(v.gathered()):
        one_args.out = output[v.rows(i)]
        one = attend(one_args)
        for name, pieces in found.items():
            pieces.append(getattr(one, name))
    wanted: dict[str, Any] = {name: pieces if name in ("weights", "scores") else _joined(pieces, a, name)
                              for name, pieces in found.items()}
    return AttentionResult(output, **wanted) if a.want else output


def _joined(pieces: list[np.ndarray], a: Args, name: str) -> np.ndarray:
    """Statements about the rows of all sequences, (q_heads, q_tokens)."""
    return np.concatenate([np.empty((a.q_heads, 0), np.int64 if name == "argmax" else a.acc), *pieces], axis=-1)


def attention_weights_varlen(query: ArrayLike, key: ArrayLike, cu_seqlens_q: ArrayLike,
                             cu_seqlens_k: ArrayLike | None = None,
                             **options: Unpack[PagedOptions]) -> list[AttentionWeights]:
    """The weights of each sequence of packed tokens: the definition of `attnc.attention_weights_varlen`."""
    check_varlen_names(attention_weights_varlen, options, pages=True)
    v = varlen_args(query, key, None, cu_seqlens_q, cu_seqlens_k, has_value=False, **options)
    return [AttentionWeights.of(a) for a in v.gathered()]


def attention_varlen_backward(
        grad_output: ArrayLike, query: ArrayLike, key: ArrayLike, value: ArrayLike, output: ArrayLike, lse: ArrayLike,
        cu_seqlens_q: ArrayLike, cu_seqlens_k: ArrayLike, *, want: Gradient = ("query", "key", "value"),
        grad_lse: ArrayLike | None = None, **options: Unpack[VarlenOptions]) -> AttentionGradients:
    """Gradients of each sequence of packed tokens: the definition of `attnc.attention_varlen_backward`."""
    check_varlen_names(attention_varlen_backward, options)
    grad_output = float_array("grad_output", grad_output)
    v = varlen_args(query, key, value, cu_seqlens_q, cu_seqlens_k, **options)
    b = varlen_backward_args(v, grad_output, output, lse, grad_lse, want)
    total: dict[str, Any] = {name: np.zeros_like(v.tokens(name), order="C")
                             for name in ("query", "key", "value") if name in b.want}
    total |= {name: [] for name in b.want if name in v.own}
    total |= {"sinks": np.zeros(b.sinks.shape)} if b.sinks is not None and "sinks" in b.want else {}
    total |= {name: np.zeros(x.shape, v.args.acc) for name, x in b.tables.items() if name in b.want}
    for i, one_args in enumerate(b.alone(v)):
        one = None if one_args is None else gradients(one_args)
        for name, whole in total.items():
            if name in v.own:
                whole.append(getattr(one, name, None))
            elif name == "sinks" or name in b.tables:
                total[name] = whole + getattr(one, name, 0)
            else:
                whole[v.rows(i) if name == "query" else v.keys(i)] = getattr(one, name)
    with np.errstate(over="ignore"):
        if b.sinks is not None and "sinks" in total:
            total["sinks"] = total["sinks"].astype(b.sinks.dtype)
        total |= {name: total[name].astype(x.dtype) for name, x in b.tables.items() if name in total}
    return AttentionGradients(**{name: total[name] for name in b.want})
