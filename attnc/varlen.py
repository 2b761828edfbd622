"""Attention of packed sequences: sequences of like size share a call of the kernels, which finds each by its start."""

from __future__ import annotations

import copy
from typing import Never, Unpack, overload

import numpy as np

from . import _call, _isa
from ._checks import VarlenArgs, varlen_args
from ._checks.spellings import hides_unknown, unexpected
from ._types import Array, ArrayLike, Lse, VarlenOptions, Window
from .results import AttentionResult


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
        out: Array | None = None, num_threads: int | None = None, **unknown: Never) -> Array | AttentionResult:
    """Attention of many sequences packed one after another, of any lengths, without padding.

    Sequence ``i`` has the query rows ``cu_seqlens_q[i]`` to ``cu_seqlens_q[i + 1]`` and the keys from
    ``cu_seqlens_k[i]`` to ``cu_seqlens_k[i + 1]``; it gets the bits that `attention` gives it alone.

    Parameters
    ----------
    query : array (q_tokens, q_heads, head_dim)
        float32, float64, float16 or bfloat16 (ml_dtypes); bools and integers count as float64. Any strides.
    key, value : array (kv_tokens, kv_heads, head_dim) and (kv_tokens, kv_heads, value_dim)
        Query head ``h`` reads head ``h // (q_heads // kv_heads)``.
    cu_seqlens_q, cu_seqlens_k : int array (sequences + 1,)
        Running sum of the lengths: 0, then the end of each sequence, the last one the number of tokens. A sequence may
        have no rows or no keys.
    causal, window, scale, softcap, sinks
        As in `attention`. In each sequence the last row stands at the last key.
    alibi_slopes : float array (q_heads,) or (sequences, q_heads), optional
        As in `attention`.
    want : name or tuple of names
        ``"lse"`` (q_heads, q_tokens) or nothing.
    out : array (q_tokens, q_heads, value_dim), optional
        Receives the output: exact shape and dtype, no memory shared with an input.
    num_threads : int, optional
        See `attnc.get_num_threads` for the default. The result has the same bits for any number.

    Returns
    -------
    array (q_tokens, q_heads, value_dim), or AttentionResult
        As in `attention`: a row that sees no key has output 0 and lse -inf or its sink.

    Raises
    ------
    TypeError, ValueError
        For a wrong dtype or a wrong shape or value, naming the argument, before any work.

    Examples
    --------
    Two sequences: one row with two keys, two rows with one key.

    >>> import numpy as np
    >>> query, key = np.zeros((3, 1, 4)), np.zeros((3, 1, 4))
    >>> value = np.array([2., 4., 7.]).reshape(3, 1, 1)
    >>> attention_varlen(query, key, value, [0, 1, 3], [0, 2, 3]).ravel()
    array([3., 7., 7.])
    """
    if unknown:
        unexpected(attention_varlen, unknown)
    v = varlen_args(query, key, value, cu_seqlens_q, cu_seqlens_k, causal=causal, window=window, scale=scale,
                    softcap=softcap, alibi_slopes=alibi_slopes, sinks=sinks, want=want, out=out,
                    num_threads=num_threads)
    output = np.empty(v.args.out_shape, v.args.dtype) if out is None else out
    lse = np.empty(v.args.lse_shape, v.args.acc) if v.args.want else None
    for sequences in alike(v):
        _run(v, sequences, output.swapaxes(0, 1), lse)
    return output if lse is None else AttentionResult(output, lse=lse)


def alike(v: VarlenArgs) -> list[list[int]]:
    """Sequences with rows, in groups for one call each: of one path, within a factor of four in rows and in keys, so
    that short ones do not pay for long ones; those with most work first, which balances the threads."""
    group = v.args.q_heads // v.args.kv_heads if v.args.kv_heads else 1
    code = _call.code(v.args.acc)
    groups: dict[tuple[int, ...], list[int]] = {}
    q_lengths, kv_lengths = v.q_lengths.tolist(), v.kv_lengths.tolist()
    for i in np.argsort(-v.q_lengths * v.kv_lengths, kind="stable").tolist():
        if q_lengths[i]:
            path = _isa.kernels.path_class(code, q_lengths[i] * group)     # a sequence keeps the bits that it has alone
            kind = path, q_lengths[i].bit_length() // 2, kv_lengths[i].bit_length() // 2
            groups.setdefault(kind, []).append(i)
    return list(groups.values())


def _run(v: VarlenArgs, sequences: list[int], output: np.ndarray, lse: np.ndarray | None) -> None:
    """One call of the kernels; `output` is (heads, tokens, dim)."""
    a = copy.copy(v.args)
    a.batch, a.q_lengths, a.kv_lengths = (len(sequences),), v.q_lengths[sequences], v.kv_lengths[sequences]
    a.q_len, a.kv_len = int(a.q_lengths.max()), int(a.kv_lengths.max())
    if a.alibi_slopes is not None and a.alibi_slopes.ndim == 2:
        a.alibi_slopes = a.alibi_slopes[sequences]
    _call.run("attend", a, value=a.value, out=output, lse=lse, q_starts=v.q_starts[sequences],
              k_starts=v.k_starts[sequences])
