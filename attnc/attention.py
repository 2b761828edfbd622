"""Attention and its links, scores, weights, weighted sum: arguments checked, results allocated, kernels called."""

from __future__ import annotations

from typing import Never, Unpack, overload

import numpy as np

from . import _call, _gather
from ._checks import Args, attention_args, check_lse, weighted_sum_args
from ._checks.arrays import as_array
from ._checks.attention import BHND, NOTHING
from ._checks.spellings import hides_unknown, unexpected
from ._types import Array, ArrayLike, BlockMask, Layout, Options, Stage, Wanted, Window
from .results import AttentionResult

STATISTICS = frozenset(("entropy", "max", "argmax"))


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
        **unknown: Never) -> Array | AttentionResult:
    """Exact attention: ``softmax(scale * query @ key.T + bias) @ value``, row by row, without the matrix of weights.

    The options, all off by default, go together in any number:

    - which keys a row sees: `mask`, `block_mask`, `key_indices`, `key_mask`, `causal`, `window` (and `q_offset`,
      `k_positions`), `q_segments` with `k_segments`, `q_lengths` and `kv_lengths`;
    - what is done to scores: `relative_index` with `relative_key` and `relative_query`, `scale`, `softcap`, `bias`,
      `relative_bias`, `alibi_slopes`, `sinks`;
    - what comes back, and how it is computed: `want`, `layout`, `out`, `num_threads`.

    Row ``i`` stands at position ``i + q_offset``, key ``j`` at ``j`` or ``k_positions[j]``. With ``causal=True`` a row
    sees the keys up to its own position; by default the last row sees the last key (bottom-right), here for 2 rows and
    4 keys::

        1 1 1 0
        1 1 1 1

    Parameters
    ----------
    query : array (..., q_heads, q_len, head_dim) or (q_len, head_dim)
        float32, float64, float16 or bfloat16 (ml_dtypes); bools and integers count as float64. Any strides.
    key, value : array (..., kv_heads, kv_len, head_dim) and (..., kv_heads, kv_len, value_dim), or 2-D like `query`
        Query head ``h`` reads head ``h // (q_heads // kv_heads)``. Leading axes broadcast.
    mask : bool array, optional
        True = attend; broadcasts to (..., q_heads, q_len, kv_len).
    block_mask : tuple (mask, rows, keys), optional
        A bool array (batch..., q_heads, ceil(q_len / rows), ceil(kv_len / keys)), True = attend, over blocks of `rows`
        by `keys` places, which count from 0. Blocks of keys that no row of a block may see cost nothing.
    key_indices : int array (batch..., q_heads or kv_heads or 1, q_len, n), optional
        The keys that each row may see, -1 for none, in any order and any number of times. Output, lse and statistics of
        rows read these keys alone, in place: they cost n keys for each row.
    key_mask : bool array (batch..., kv_len), optional
        True = attend, for all rows of a batch element.
    bias : float array, optional
        Added to the scores, read in place; broadcasts as `mask`. -inf means not allowed.
    relative_bias : float array (..., q_heads, q_len + kv_len - 1), optional
        A bias of the distance alone: entry ``j - i + q_len - 1`` is added to the score of row ``i`` and key ``j``,
        which count from 0 whatever `q_offset` is. Broadcasts and forbids as `bias`; see `attnc.t5_relative_bias`.
    relative_index : int array (q_len + kv_len - 1,), optional
        The row of the tables that belongs to each distance: to ``j - i`` at ``j - i + q_len - 1``.
    relative_key, relative_query : float array (..., q_heads, rows, head_dim), optional
        Tables of content-relative terms, with axes of heads and batch that broadcast: the score of row ``i`` and key
        ``j`` also has ``scale * query[i] @ relative_key[x]`` and ``scale * relative_query[x] @ key[j]``, where ``x``
        is ``relative_index[j - i + q_len - 1]``; before the softcap. Rows that no visible pair has do not matter. See
        `attnc.deberta_relative_index`.
    causal : bool
        Only keys at or before the row's position.
    window : tuple (left, right), optional
        At most `left` keys before and `right` keys after the row's own position; None is unbounded. Keys outside cost
        no work.
    q_offset : int or int array (batch...), optional
        Position of the first row; by default kv length - q length. 0 is top-left alignment.
    k_positions : int array (kv_len,) or (batch..., kv_heads or 1, kv_len), optional
        The position of each key, from 0 and in any order, in place of ``j``: for keys that are no longer next to each
        other, as in a cache that forgets. With `causal`, `window` or `alibi_slopes` it needs `q_offset`.
    scale : float, optional
        By default ``1 / sqrt(head_dim)``.
    softcap : float, optional
        ``softcap * tanh(score / softcap)`` before the bias.
    alibi_slopes : float array (q_heads,) or (batch..., q_heads), optional
        Adds ``-slope * |position - j|``; see `attnc.alibi_slopes`.
    sinks : float array (q_heads,), optional
        A logit per head that takes part in the softmax and has no value; it is in the lse.
    q_segments, k_segments : int array (batch..., q_len) and (batch..., kv_len), optional
        A row sees keys of its own segment; a negative id sees nothing.
    q_lengths, kv_lengths : int or int array (batch...), optional
        Valid rows and keys of right-padded batches; the padding is never read.
    layout : {"bhnd", "bnhd"}
        Order of the last axes of query, key, value and output: heads before length or after it.
    want : name or tuple of names
        Out of ``"lse"``, ``"entropy"``, ``"max"`` and ``"argmax"`` (..., q_heads, q_len), ``"weights"`` and
        ``"scores"`` (..., q_heads, q_len, kv_len). See `AttentionWeights` for the
        statistics; none changes a bit of the output.
    out : array, optional
        Receives the output: exact shape and dtype, no memory shared with an input.
    num_threads : int, optional
        See `attnc.get_num_threads` for the default. The result has the same bits for any number.

    Returns
    -------
    array (..., q_heads, q_len, value_dim), or AttentionResult
        Output and weights in the promoted dtype of query, key and value; lse (natural log) and scores in float32, or
        float64 if an input is float64. A row that sees no key: output 0, weights 0, lse -inf or its sink; a row of
        padding -inf. A key that a row may not see never changes a bit of it, not even if it is NaN.

    Raises
    ------
    TypeError, ValueError
        For a wrong dtype or a wrong shape or value, naming the argument, before any work.
    MemoryError
        If there is no memory for the result or the scratch.

    Notes
    -----
    Keys are taken in blocks with a running maximum and sum of each row (Milakov and Gimelshein 2018; Dao et al. 2022).
    `attnc.reference.attention` is the definition in plain NumPy.

    Examples
    --------
    >>> import numpy as np
    >>> query, key, value = np.float32([[1, 0]]), np.float32([[1, 0], [0, 0]]), np.float32([[2, 4], [4, 8]])
    >>> result = attention(query, key, value, scale=np.log(3), want="weights")
    >>> result.weights
    array([[0.75, 0.25]], dtype=float32)
    >>> result.output
    array([[2.5, 5. ]], dtype=float32)
    """
    if unknown:
        unexpected(attention, unknown)
    if (mask is key_mask is bias is relative_bias is relative_index is relative_key is relative_query is q_offset
            is k_positions is scale is softcap is alibi_slopes is sinks is q_segments is k_segments is q_lengths
            is kv_lengths is None and window is None and block_mask is None and key_indices is None and layout is BHND
            and want is NOTHING):
        output = _call.run_fast(query, key, value, causal, out, num_threads)
        if output is not None:
            return output
    a = attention_args(  # by position, here and below: options_of or keywords would take a microsecond
        query, key, as_array("value", value), mask, block_mask, key_indices, key_mask, bias, relative_bias,
        relative_index, relative_key, relative_query, causal, window, q_offset, k_positions, scale, softcap,
        alibi_slopes, sinks, q_segments, k_segments, q_lengths, kv_lengths, layout, want, out, num_threads)
    return attend(a)


def attend(
        a: Args, value_scale: np.ndarray | None = None, key_rows: np.ndarray | None = None) -> Array | AttentionResult:
    """`attention` of checked arguments; `value_scale` has the factors of the int8 values of a cache, and `key_rows`,
    (batch..., kv_heads or 1, kv_len), the row of key and value in which each key lies."""
    output = np.empty(a.out_shape, a.dtype) if a.out is None else a.out
    view = output[None] if a.two_d else output.swapaxes(-2, -3) if a.layout == "bnhd" else output
    if not a.want and a.key_indices is None:
        _call.run("attend", a, None, None, value=a.value, out=view, value_scale=value_scale, key_rows=key_rows)
        return output
    wanted = {name: _result(name, a) for name in a.want}
    if "scores" in wanted:
        _call.run("scores", a, scores=wanted["scores"], key_rows=key_rows)
    # int8 rows have scales of their own; products of a block of keys with tables serve all rows
    if a.key_indices is not None and a.key_scale is None and a.relative_index is None:
        if "weights" in wanted:
            _call.run("attend", a, weights=wanted["weights"], key_rows=key_rows)
        _gather.attend(a, view, {name: x for name, x in wanted.items() if name not in ("scores", "weights")}, key_rows)
        return AttentionResult(output, **wanted) if a.want else output
    results = dict(value=a.value, out=view, lse=wanted.get("lse"), weights=wanted.get("weights"),
                   value_scale=value_scale, key_rows=key_rows)
    if STATISTICS.isdisjoint(wanted):
        _call.run("attend", a, None, None, **results)
    else:
        top = np.empty((*a.lse_shape, 1), a.acc) if "argmax" in wanted else None
        request = _call.RowRequest(entropy=wanted.get("entropy"), max=wanted.get("max"), top=top,
                                   top_keys=wanted.get("argmax"), k=int("argmax" in wanted))
        _call.run("attend", a, request, None, **results)
    return AttentionResult(output, **wanted) if a.want else output


def _result(name: str, a: Args) -> np.ndarray:
    """Room for what `want` names."""
    dtype = a.dtype if name == "weights" else np.int64 if name == "argmax" else a.acc
    return np.empty(a.weights_shape if name in ("weights", "scores") else a.lse_shape, dtype)


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
        out: Array | None = None, num_threads: int | None = None, **unknown: Never) -> Array:
    """Scores of every query with every key: how well they match, before the softmax.

    Parameters
    ----------
    query : array (..., q_heads, q_len, head_dim) or (q_len, head_dim)
    key : array (..., kv_heads, kv_len, head_dim) or (kv_len, head_dim)
    stage : {"masked", "capped", "scaled", "raw"}
        ``"raw"`` is the product of query and key, ``"scaled"`` has the products with the tables and the scale,
        ``"capped"`` the softcap, ``"masked"`` bias, linear bias and every mask. Earlier stages ignore the options of
        later ones.
    mask, block_mask, key_indices, key_mask, bias, relative_bias, relative_index, relative_key, relative_query, \
causal, window, q_offset, k_positions, scale, softcap, alibi_slopes, sinks, q_segments, k_segments, q_lengths, \
kv_lengths, layout, num_threads
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
    if unknown:
        unexpected(attention_scores, unknown)
    a = attention_args(
        query, key, None, mask, block_mask, key_indices, key_mask, bias, relative_bias, relative_index, relative_key,
        relative_query, causal, window, q_offset, k_positions, scale, softcap, alibi_slopes, sinks, q_segments,
        k_segments, q_lengths, kv_lengths, layout, NOTHING, out, num_threads, stage, "scores")
    if stage != "masked":
        a.mask = a.block_mask = a.key_indices = a.key_mask = a.bias = a.relative_bias = a.alibi_slopes = None
        a.window = a.q_segments = a.k_segments = None
        a.causal = False
        a.softcap = a.softcap if stage == "capped" else None
    scores = np.empty(a.weights_shape, a.acc) if out is None else out
    if stage == "raw":
        a.scale, a.relative_index = 1.0, None
    _call.run("scores", a, scores=scores)
    return scores


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
        **unknown: Never) -> Array:
    """The weights of `attention` for every row and key: each key's share of the row.

    Parameters
    ----------
    query : array (..., q_heads, q_len, head_dim) or (q_len, head_dim)
    key : array (..., kv_heads, kv_len, head_dim) or (kv_len, head_dim)
    mask, block_mask, key_indices, key_mask, bias, relative_bias, relative_index, relative_key, relative_query, \
causal, window, q_offset, k_positions, scale, softcap, alibi_slopes, sinks, q_segments, k_segments, q_lengths, \
kv_lengths, layout, num_threads
        As in `attention`.
    lse : float array (..., q_heads, q_len) or (q_len,), optional
        The lse of each row over more keys than these, from ``attention(..., want="lse")``, `merge_states` or
        `AttentionState`: gives these keys their weights among all, ``exp(score - lse)``, exact up to a factor of
        ``exp(eps * abs(lse))``. It holds the sinks.
    out : array, optional
        Receives the weights: exact shape and dtype, no memory shared with an input. Memory that is used again is
        faster than new memory.

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
    >>> import numpy as np
    >>> attention_weights([[1., 0.]], [[1., 0.]], lse=[np.log(4.) + np.sqrt(0.5)])  # one of four such keys
    array([[0.25]])
    """
    if unknown:
        unexpected(attention_weights, unknown)
    a = attention_args(
        query, key, None, mask, block_mask, key_indices, key_mask, bias, relative_bias, relative_index, relative_key,
        relative_query, causal, window, q_offset, k_positions, scale, softcap, alibi_slopes, sinks, q_segments,
        k_segments, q_lengths, kv_lengths, layout, NOTHING, out, num_threads, gives="weights")
    given = None if lse is None else check_lse(lse, a)
    weights = np.empty(a.weights_shape, a.dtype) if out is None else out
    if given is None:
        _call.run("attend", a, weights=weights)
    else:
        _call.run("weights_under_lse", a, lse=given, weights=weights)
    return weights


@hides_unknown
def weighted_sum(
        weights: ArrayLike, value: ArrayLike, *, out: Array | None = None, num_threads: int | None = None,
        **unknown: Never) -> Array:
    """``weights @ value`` over grouped heads: each output row is the sum of the values times the row's weights.

    Parameters
    ----------
    weights : array (..., q_heads, q_len, kv_len) or (q_len, kv_len)
        A weight of exactly 0 contributes nothing, even if the value is NaN.
    value : array (..., kv_heads, kv_len, value_dim) or (kv_len, value_dim)
        Query head ``h`` reads head ``h // (q_heads // kv_heads)``. Leading axes broadcast.
    out : array, optional
        Receives the result: exact shape and dtype, no memory shared with an input.
    num_threads : int, optional
        See `attnc.get_num_threads` for the default.

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
    >>> import numpy as np
    >>> weighted_sum([[0.5, 0.5, 0.]], [[1.], [3.], [np.nan]])
    array([[2.]])
    """
    if unknown:
        unexpected(weighted_sum, unknown)
    a = weighted_sum_args(weights, value, out, num_threads)
    output = np.empty(a.out_shape, a.dtype) if out is None else out
    _call.run("weighted_sum", a, value=a.value, weights=a.weights, out=output[None] if a.two_d else output)
    return output
