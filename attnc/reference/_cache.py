"""The KV cache: all tokens appended so far, and attention over those that a window keeps."""

from __future__ import annotations

from typing import Never, Unpack, overload

import numpy as np

from .._checks import (
    OPTIONS,
    append_args,
    cache_sizes,
    check_attend,
    check_no_distances,
    check_rows_stay,
    keep_args,
    options_of,
    reorder_args,
    truncate_args,
)
from .._checks.arrays import accumulator, float_array
from .._checks.spellings import hides_unknown, unexpected
from .._lock import Locked
from .._types import Array, ArrayLike, BlockMask, CacheOptions, DTypeLike, Layout, Wanted, Window
from ..results import AttentionResult
from ._attention import attention
from ._weights import AttentionWeights


class KVCache(Locked):
    """Keys and values of the tokens so far: the definition of `attnc.KVCache`.

    It keeps all tokens, also those that a window has left behind, and int8 rows as the numbers that they stand for.
    Calls from several threads take turns.

    Parameters, methods, results and errors are those of `attnc.KVCache`.

    Examples
    --------
    >>> cache = KVCache(1, 1, 2, capacity=8, dtype=np.float32)
    >>> cache.append(np.zeros((1, 1, 2, 2)), np.array([1., 2.]).reshape(1, 1, 2, 1) * np.ones(2))
    >>> cache.attend(np.ones((1, 1, 1, 2), np.float32))
    array([[[[1.5, 1.5]]]], dtype=float32)
    """

    def __init__(
            self, batch: int, kv_heads: int, head_dim: int, value_dim: int | None = None, *, capacity: int,
            dtype: DTypeLike, window: Window | None = None, shared: bool = False) -> None:
        super().__init__()
        self._sizes = s = cache_sizes(batch, kv_heads, head_dim, value_dim, capacity, dtype, window, shared)
        dtype = np.float64 if s.dtype == np.int8 else s.dtype  # in which a scale times an integer is exact
        self.keys = np.zeros((s.batch, s.kv_heads, s.capacity, s.head_dim), dtype)
        self.values = np.zeros((s.batch, s.kv_heads, s.capacity, s.value_dim), dtype)
        self.lengths = np.zeros(s.batch, np.int64)
        self._oldest = np.zeros(s.batch, np.int64)    # what a cache that keeps no more than `capacity` would still have
        self._evicted = np.zeros(s.batch, np.int64)
        self._positions = np.zeros((s.batch, s.kv_heads, 0), np.int64)     # of the tokens that are there

    @property
    def positions(self) -> np.ndarray:
        """Position of the token in each row (batch, kv_heads, lengths.max()), -1 past the length."""
        used = int(self.lengths.max(initial=0))
        return np.where(np.arange(used) < self.lengths[:, None, None], self._positions[:, :, :used], -1)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._sizes.shown(self.lengths)})"

    def append(
            self, key: ArrayLike, value: ArrayLike | None = None, *, lengths: ArrayLike | None = None,
            layout: Layout = "bhnd") -> None:
        """Add tokens behind those that are there; `lengths` says how many of them count in each batch element."""
        with self._turn():
            key, value, counts = append_args(key, value, lengths, layout, self._sizes, self.lengths)
            needed = int((self.lengths + counts).max(initial=0))
            self.keys, self.values = _grown(self.keys, needed), _grown(self.values, needed)
            self._positions = _grown(self._positions[..., None], needed)[..., 0]
            for i, (start, count) in enumerate(zip(self.lengths, counts, strict=True)):
                self._positions[i, :, start:start + count] = self._evicted[i] + np.arange(start, start + count)
            with np.errstate(all="ignore"):
                key, value = (_rounded(x) if self._sizes.dtype == np.int8 else x.astype(self.keys.dtype)
                              for x in (key, value))
            if self._sizes.shared:
                value = key[..., :self._sizes.value_dim]
            for x, rows in ((key, self.keys), (value, self.values)):
                for i, (start, count) in enumerate(zip(self.lengths, counts, strict=True)):
                    rows[i, :, start:start + count] = x[i, :, :count]
            self.lengths = self.lengths + counts
            self._oldest = np.maximum(self._oldest, self.lengths - self._sizes.capacity)

    @overload
    def attend(self, query: ArrayLike, *, want: tuple[()] = ..., out: Array | None = ...,
               **options: Unpack[CacheOptions]) -> Array: ...

    @overload
    def attend(self, query: ArrayLike, *, want: Wanted, out: Array | None = ...,
               **options: Unpack[CacheOptions]) -> AttentionResult: ...

    @hides_unknown
    def attend(
            self, query: ArrayLike, *, mask: ArrayLike | None = None, block_mask: BlockMask | None = None,
            key_indices: ArrayLike | None = None, key_mask: ArrayLike | None = None, bias: ArrayLike | None = None,
            relative_bias: ArrayLike | None = None, relative_index: ArrayLike | None = None,
            relative_key: ArrayLike | None = None, relative_query: ArrayLike | None = None, causal: bool = False,
            window: Window | None = None, q_offset: ArrayLike | None = None, scale: float | None = None,
            softcap: float | None = None, alibi_slopes: ArrayLike | None = None, sinks: ArrayLike | None = None,
            q_segments: ArrayLike | None = None, k_segments: ArrayLike | None = None,
            q_lengths: ArrayLike | None = None, layout: Layout = "bhnd", want: Wanted | tuple[()] = (),
            out: Array | None = None, num_threads: int | None = None, **unknown: Never) -> np.ndarray | AttentionResult:
        """Attention of a query over the tokens that are there; its last row stands at the last token."""
        if unknown:
            unexpected(KVCache.attend, unknown)
        check_attend(self._sizes, mask=mask, block_mask=block_mask, key_indices=key_indices, key_mask=key_mask,
                     bias=bias, relative_bias=relative_bias, relative_index=relative_index, window=window,
                     q_offset=q_offset, q_segments=q_segments, k_segments=k_segments)
        query = float_array("query", query)
        scaled = self._sizes.dtype == np.int8
        wide = query.astype(accumulator(query.dtype), copy=False) if scaled else query
        with self._turn():
            keys, values, lengths = self.keys, self.values, self.lengths    # replaced by changes, never written
            k_positions, offset = self._places(query, q_lengths, layout, relative_bias, relative_index)
        if scaled:
            keys, values = keys.astype(wide.dtype), values.astype(wide.dtype)
        if layout == "bnhd":
            keys, values = keys.swapaxes(1, 2), values.swapaxes(1, 2)
        window, kv_lengths = self._sizes.window or window, lengths
        q_offset = offset if q_offset is None else q_offset
        options = dict(zip(OPTIONS, options_of(locals()), strict=True))
        result = attention(wide, keys, values, **options, want=want, num_threads=num_threads,
                           out=None if scaled else out)
        if not scaled:
            return result
        found = vars(result) if isinstance(result, AttentionResult) else {"output": result}
        found = {name: x if name in ("lse", "scores") else x.astype(query.dtype) for name, x in found.items()}
        if out is not None:
            out[...] = found["output"]
            found["output"] = out
        return AttentionResult(**found) if want else found["output"]

    @hides_unknown
    def weights(
            self, query: ArrayLike, *, mask: ArrayLike | None = None, block_mask: BlockMask | None = None,
            key_indices: ArrayLike | None = None, key_mask: ArrayLike | None = None, bias: ArrayLike | None = None,
            relative_bias: ArrayLike | None = None, relative_index: ArrayLike | None = None,
            relative_key: ArrayLike | None = None, relative_query: ArrayLike | None = None, causal: bool = False,
            window: Window | None = None, q_offset: ArrayLike | None = None, scale: float | None = None,
            softcap: float | None = None, alibi_slopes: ArrayLike | None = None, sinks: ArrayLike | None = None,
            q_segments: ArrayLike | None = None, k_segments: ArrayLike | None = None,
            q_lengths: ArrayLike | None = None, layout: Layout = "bhnd", lse: ArrayLike | None = None,
            num_threads: int | None = None, **unknown: Never) -> AttentionWeights:
        """The weights of a query over the tokens that are there, ``lengths.max()`` of them."""
        if unknown:
            unexpected(KVCache.weights, unknown)
        check_rows_stay("weights", self._sizes)
        query = float_array("query", query)
        with self._turn():
            used = int(self.lengths.max(initial=0))
            keys, kv_lengths = self.keys[:, :, :used], self.lengths
            k_positions, offset = self._places(query, q_lengths, layout, relative_bias, relative_index)
        if self._sizes.dtype == np.int8:
            query = query.astype(accumulator(query.dtype), copy=False)
            keys = keys.astype(query.dtype)
        if layout == "bnhd":
            keys = keys.swapaxes(1, 2)
        k_positions = None if k_positions is None else k_positions[:, :, :used]
        q_offset = offset if q_offset is None else q_offset
        options = dict(zip(OPTIONS, options_of(locals()), strict=True))
        return AttentionWeights(query, keys, **options, lse=lse, num_threads=num_threads)

    def _places(
            self, query: np.ndarray, q_lengths: ArrayLike | None, layout: Layout, relative_bias: ArrayLike | None,
            relative_index: ArrayLike | None) -> tuple[np.ndarray | None, np.ndarray | None]:
        """Positions of the keys and of the first row; None where they are as without."""
        if not self._evicted.any():
            return None, None
        check_no_distances(relative_bias=relative_bias, relative_index=relative_index)
        axis = 3 if layout == "bnhd" else 2
        if query.ndim < axis:
            return None, None               # refused by what the query goes to
        rows = query.shape[-axis] if q_lengths is None else np.asarray(q_lengths)
        spare = self.keys.shape[2] - self._positions.shape[2]
        return np.pad(self._positions, [(0, 0), (0, 0), (0, spare)]), self.lengths + self._evicted - rows

    def truncate(self, lengths: ArrayLike) -> None:
        """Drop the last tokens: `lengths` stay in each batch element."""
        with self._turn():
            self.lengths = truncate_args(lengths, self._sizes, self.lengths, self._oldest)
            self._oldest = np.minimum(self._oldest, self.lengths)
            self._evicted = np.where(self.lengths == 0, 0, self._evicted)

    def keep(self, indices: ArrayLike) -> None:
        """Leave out all tokens but those in some rows, (batch, kv_heads, n), which keep their positions."""
        with self._turn():
            kept, counts = keep_args(indices, self._sizes, self.lengths)
            stop = int(counts.max(initial=0))
            for name in ("keys", "values", "_positions"):
                rows = getattr(self, name).copy()
                for i, head in np.ndindex(kept.shape[:2]):
                    rows[i, head, :stop] = rows[i, head, kept[i, head, :stop]]
                setattr(self, name, rows)
            self._evicted = self._evicted + self.lengths - counts
            self.lengths = counts

    def reorder(self, indices: ArrayLike) -> None:
        """Make batch element ``i`` what ``indices[i]`` was."""
        with self._turn():
            indices = reorder_args(indices, self._sizes)
            self.keys, self.values = self.keys[indices], self.values[indices]
            self.lengths, self._oldest = self.lengths[indices], self._oldest[indices]
            self._positions, self._evicted = self._positions[indices], self._evicted[indices]


def _grown(rows: np.ndarray, needed: int) -> np.ndarray:
    """Rows with zeros behind, for a window, whose tokens may be more than the capacity."""
    more = max(needed - rows.shape[2], 0)
    return np.concatenate((rows, np.zeros((*rows.shape[:2], more, rows.shape[3]), rows.dtype)), axis=2)


def _rounded(x: np.ndarray) -> np.ndarray:
    """Each row rounded to multiples of a 127th of its largest magnitude."""
    x = x.astype(np.float32)
    scales = np.abs(x).max(-1, initial=0, keepdims=True) / np.float32(127)
    rounded = np.clip(np.rint(x / np.where(scales == 0, 1, scales)), -127, 127)
    return np.asarray(rounded * scales.astype(np.float64))
