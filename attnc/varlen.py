"""Attention of packed sequences, its weights and its gradients: calls of the kernels for one or many sequences."""

from __future__ import annotations

import copy
from typing import Any, Never, Unpack, overload

import numpy as np

from . import _call, _isa
from ._checks import Args, VarlenArgs, check_varlen_names, varlen_args, varlen_backward_args
from ._checks.arrays import float_array
from ._checks.spellings import hides_unknown, unexpected
from ._checks.varlen import RAGGED
from ._types import Array, ArrayLike, Gradient, PagedOptions, Ragged, VarlenOptions, Wanted, Window
from .attention import attend
from .backward import gradients
from .results import AttentionGradients, AttentionResult
from .weights import AttentionWeights

RAGGED_RESULTS = ("weights", "scores")          # a list of one array a sequence


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
        out: Array | None = None, num_threads: int | None = None, **unknown: Never) -> Array | AttentionResult:
    """Attention of many sequences packed one after another, of any lengths, without padding.

    Sequence ``i`` has the query rows ``cu_seqlens_q[i]`` to ``cu_seqlens_q[i + 1]`` and the keys from
    ``cu_seqlens_k[i]`` to ``cu_seqlens_k[i + 1]``; it gets the bits that `attention` gives it alone.

    Parameters
    ----------
    query : array (q_tokens, q_heads, head_dim)
        float32, float64, float16 or bfloat16 (ml_dtypes); bools and integers count as float64. Any strides.
    key, value : array (kv_tokens, kv_heads, head_dim) and (kv_tokens, kv_heads, value_dim)
        Query head ``h`` reads head ``h // (q_heads // kv_heads)``. With `block_table`, pages
        (n_pages, page, kv_heads, head_dim) and (n_pages, page, kv_heads, value_dim), of any number of tokens each.
    cu_seqlens_q, cu_seqlens_k : int array (sequences + 1,)
        Running sum of the lengths: 0, then the end of each sequence, the last one the number of tokens. A sequence may
        have no rows or no keys. With `block_table`, `cu_seqlens_k` is None.
    block_table : int array (sequences, pages), optional
        The pages in which the keys of each sequence lie: key ``j`` at place ``j % page`` of page
        ``block_table[i, j // page]``. Sequences may share pages. Entries for no key are not looked at.
    kv_lengths : int array (sequences,), with `block_table`
        The number of keys of each sequence.
    mask, key_indices, bias, relative_bias, relative_index, k_positions : list of arrays, optional
        One for each sequence, as `attention` takes it for that sequence alone, or None.
    relative_key, relative_query : float array (q_heads, rows, head_dim), optional
        As in `attention`, for all sequences that have a `relative_index`.
    key_mask, q_segments, k_segments : array (kv_tokens,), (q_tokens,) and (kv_tokens,), optional
        As in `attention`, over the packed tokens; with `block_table`, over the keys of one sequence after another.
    causal, window, scale, softcap, sinks
        As in `attention`. In each sequence the last row stands at the last key.
    q_offset : int or int array (sequences,), optional
        Position of the first row of each sequence; by default its number of keys less its number of rows.
    alibi_slopes : float array (q_heads,) or (sequences, q_heads), optional
        As in `attention`.
    want : name or tuple of names
        As in `attention`: ``"lse"``, ``"entropy"``, ``"max"`` and ``"argmax"`` are (q_heads, q_tokens), ``"weights"``
        and ``"scores"`` a list with an array (q_heads, rows, keys) for each sequence.
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

    The same keys in pages of one token, those of the first sequence in pages 2 and 0:

    >>> pages = value[[1, 2, 0], None]
    >>> table = [[2, 0], [1, -1]]
    >>> attention_varlen(query, key[:, None], pages, [0, 1, 3], block_table=table, kv_lengths=[2, 1]).ravel()
    array([3., 7., 7.])

    Notes
    -----
    Without arrays of one sequence alone and with no more than the lse wanted, sequences of like size share a call of
    the kernels; else each has its own.
    """
    if unknown:
        unexpected(attention_varlen, unknown)
    v = varlen_args(query, key, value, cu_seqlens_q, cu_seqlens_k, block_table=block_table, kv_lengths=kv_lengths,
                    shared=True, mask=mask, key_indices=key_indices, key_mask=key_mask, bias=bias,
                    relative_bias=relative_bias, relative_index=relative_index, relative_key=relative_key,
                    relative_query=relative_query, causal=causal, window=window, q_offset=q_offset,
                    k_positions=k_positions, scale=scale, softcap=softcap, alibi_slopes=alibi_slopes, sinks=sinks,
                    q_segments=q_segments, k_segments=k_segments, want=want, out=out, num_threads=num_threads)
    output = np.empty(v.args.out_shape, v.args.dtype) if out is None else out
    if v.each is not None:
        return _one_by_one(v, v.each, output)
    lse = np.empty(v.args.lse_shape, v.args.acc) if v.args.want else None
    for sequences in alike(v):
        _run(v, sequences, output.swapaxes(0, 1), lse)
    return output if lse is None else AttentionResult(output, lse=lse)


def _one_by_one(v: VarlenArgs, each: list[Args], output: np.ndarray) -> Array | AttentionResult:
    """A call for each sequence."""
    a = v.args
    found: dict[str, Any] = {name: [] if name in RAGGED_RESULTS else np.empty(
        a.lse_shape, np.int64 if name == "argmax" else a.acc) for name in a.want}
    for i, one_args in enumerate(each):
        rows = v.rows(i)
        one_args.out = output[rows]
        one = attend(one_args, key_rows=None if v.pages is None else v.pages.rows([i], one_args.kv_len)[0])
        for name, whole in found.items():
            if name in RAGGED_RESULTS:
                whole.append(getattr(one, name))
            else:
                whole[:, rows] = getattr(one, name)
    return AttentionResult(output, **found) if a.want else output


def attention_weights_varlen(
        query: ArrayLike, key: ArrayLike, cu_seqlens_q: ArrayLike, cu_seqlens_k: ArrayLike | None = None,
        **options: Unpack[PagedOptions]) -> list[AttentionWeights]:
    """The weights of each sequence of packed tokens, as lazy objects over the tokens in place.

    Parameters
    ----------
    query : array (q_tokens, q_heads, head_dim)
    key : array (kv_tokens, kv_heads, head_dim)
        With `block_table`, pages, of which each object holds a copy of its sequence's keys.
    cu_seqlens_q, cu_seqlens_k : int array (sequences + 1,)
        As in `attention_varlen`.
    **options
        Those of `attention_varlen`.

    Returns
    -------
    list of AttentionWeights
        One for each sequence, of shape (q_heads, rows, keys).

    Raises
    ------
    TypeError, ValueError
        As `attention_varlen`.

    Examples
    --------
    >>> import numpy as np
    >>> W = attention_weights_varlen(np.zeros((3, 1, 4)), np.zeros((3, 1, 4)), [0, 1, 3], [0, 2, 3])
    >>> W[0].dense()
    array([[[0.5, 0.5]]])
    """
    check_varlen_names(attention_weights_varlen, options, pages=True)
    v = varlen_args(query, key, None, cu_seqlens_q, cu_seqlens_k, has_value=False, **options)
    return [AttentionWeights._of(a, None) for a in v.gathered()]


def attention_varlen_backward(
        grad_output: ArrayLike, query: ArrayLike, key: ArrayLike, value: ArrayLike, output: ArrayLike, lse: ArrayLike,
        cu_seqlens_q: ArrayLike, cu_seqlens_k: ArrayLike, *, want: Gradient = ("query", "key", "value"),
        grad_lse: ArrayLike | None = None, **options: Unpack[VarlenOptions]) -> AttentionGradients:
    """Gradients of `attention_varlen` from its inputs, its output and its lse; each sequence as if it were alone.

    Parameters
    ----------
    grad_output : array (q_tokens, q_heads, value_dim)
        Gradient of what the output was used for.
    query, key, value, cu_seqlens_q, cu_seqlens_k
        As they went into `attention_varlen`.
    output, lse : array (q_tokens, q_heads, value_dim) and (q_heads, q_tokens)
        What ``attention_varlen(..., want="lse")`` gave.
    want : name or tuple of names
        As in `attention_backward`.
    grad_lse : float array (q_heads, q_tokens), optional
        Gradient of what the lse was used for.
    **options
        Those of `attention_varlen`, as they went in.

    Returns
    -------
    AttentionGradients
        Those of query, key, value, tables and sinks of the shape of the argument; those of `bias` and `relative_bias` a
        list with one array for each sequence.

    Raises
    ------
    TypeError, ValueError
        For a wrong dtype or a wrong shape or value, naming the argument.

    Examples
    --------
    >>> import numpy as np
    >>> query, key, value = np.zeros((2, 1, 1)), np.array([1., -1., 5.])[:, None, None], np.ones((3, 1, 1))
    >>> bounds = [0, 1, 2], [0, 2, 3]
    >>> output, lse = attention_varlen(query, key, value, *bounds, want="lse")
    >>> grad = np.ones((2, 1, 1))
    >>> attention_varlen_backward(grad, query, key, value, output, lse, *bounds, want="value").value.ravel()
    array([0.5, 0.5, 1. ])
    """
    check_varlen_names(attention_varlen_backward, options)
    grad_output = float_array("grad_output", grad_output)
    v = varlen_args(query, key, value, cu_seqlens_q, cu_seqlens_k, **options)
    b = varlen_backward_args(v, grad_output, output, lse, grad_lse, want)
    parts = [None if one is None else gradients(one) for one in list(b.alone(v))]
    found: dict[str, Any] = {}
    for name in b.want:
        pieces: list[Any] = [getattr(part, name, None) for part in parts]
        if name in RAGGED:
            found[name] = pieces
        elif name == "sinks" or name in b.tables:
            of: Any = b.sinks if name == "sinks" else b.tables[name]
            zero = np.zeros(of.shape, np.float64 if name == "sinks" else v.args.acc)
            with np.errstate(over="ignore"):        # float16 may not hold the sum
                found[name] = sum((x for x in pieces if x is not None), start=zero).astype(of.dtype)
        else:
            found[name] = np.concatenate([v.tokens(name)[:0], *pieces])
    return AttentionGradients(**found)


def alike(v: VarlenArgs) -> list[list[int]]:
    """Sequences with rows, in groups for one call each: of one path, within a factor of four in rows and in keys, so
    that short ones do not pay for long ones; those with most work first, which balances the threads."""
    code = _call.code(v.args.acc)
    groups: dict[tuple[int, ...], list[int]] = {}
    q_lengths, kv_lengths = v.q_lengths.tolist(), v.kv_lengths.tolist()
    for i in np.argsort(-v.q_lengths * v.kv_lengths, kind="stable").tolist():
        if q_lengths[i]:
            # A sequence keeps the bits that it has alone.
            path = _isa.kernels.path_class(code, q_lengths[i] * v.args.heads_per_kv)
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
    if isinstance(a.q_offset, np.ndarray):
        a.q_offset = a.q_offset[sequences]
    k_starts = v.k_starts[sequences] if v.pages is None else None
    key_rows = None if v.pages is None else v.pages.rows(sequences, a.kv_len)
    _call.run("attend", a, value=a.value, out=output, lse=lse, q_starts=v.q_starts[sequences], k_starts=k_starts,
              key_rows=key_rows)
