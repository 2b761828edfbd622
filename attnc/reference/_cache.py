"""The KV cache: all tokens appended so far, and attention over those that a window keeps."""

from __future__ import annotations

from typing import Never, Unpack, overload

import numpy as np

from .._checks import OPTIONS, append_args, cache_sizes, check_attend, options_of, reorder_args, truncate_args
from .._checks.arrays import accumulator, float_array
from .._checks.spellings import hides_unknown, unexpected
from .._lock import Locked
from .._types import Array, ArrayLike, BlockMask, CacheOptions, DTypeLike, Layout, Wanted, Window
from ..results import AttentionResult
from ._attention import attention


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
            dtype: DTypeLike, window: Window | None = None) -> None:
        super().__init__()
        self._sizes = s = cache_sizes(batch, kv_heads, head_dim, value_dim, capacity, dtype, window)
        dtype = np.float64 if s.dtype == np.int8 else s.dtype  # in which a scale times an integer is exact
        self.keys = np.zeros((s.batch, s.kv_heads, s.capacity, s.head_dim), dtype)
        self.values = np.zeros((s.batch, s.kv_heads, s.capacity, s.value_dim), dtype)
        self.lengths = np.zeros(s.batch, np.int64)
        self._oldest = np.zeros(s.batch, np.int64)    # what a cache that keeps no more than `capacity` would still have

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._sizes.shown(self.lengths)})"

    def append(
            self, key: ArrayLike, value: ArrayLike, *, lengths: ArrayLike | None = None,
            layout: Layout = "bhnd") -> None:
        """Add tokens behind those that are there; `lengths` says how many of them count in each batch element."""
        with self._turn():
            key, value, counts = append_args(key, value, lengths, layout, self._sizes, self.lengths)
            needed = int((self.lengths + counts).max(initial=0))
            self.keys, self.values = _grown(self.keys, needed), _grown(self.values, needed)
            for x, rows in ((key, self.keys), (value, self.values)):
                with np.errstate(all="ignore"):
                    x = _rounded(x) if self._sizes.dtype == np.int8 else x.astype(rows.dtype)
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
            key_mask: ArrayLike | None = None, bias: ArrayLike | None = None, relative_bias: ArrayLike | None = None,
            causal: bool = False, window: Window | None = None, q_offset: ArrayLike | None = None,
            scale: float | None = None, softcap: float | None = None, alibi_slopes: ArrayLike | None = None,
            sinks: ArrayLike | None = None, q_segments: ArrayLike | None = None, k_segments: ArrayLike | None = None,
            q_lengths: ArrayLike | None = None, layout: Layout = "bhnd", want: Wanted | tuple[()] = (),
            out: Array | None = None, num_threads: int | None = None, **unknown: Never) -> np.ndarray | AttentionResult:
        """Attention of a query over the tokens that are there; its last row stands at the last token."""
        if unknown:
            unexpected(KVCache.attend, unknown)
        check_attend(self._sizes, mask=mask, block_mask=block_mask, key_mask=key_mask, bias=bias,
                     relative_bias=relative_bias, window=window, q_offset=q_offset, q_segments=q_segments,
                     k_segments=k_segments)
        query = float_array("query", query)
        scaled = self._sizes.dtype == np.int8
        wide = query.astype(accumulator(query.dtype), copy=False) if scaled else query
        with self._turn():
            keys, values, lengths = self.keys, self.values, self.lengths    # replaced by changes, never written
        if scaled:
            keys, values = keys.astype(wide.dtype), values.astype(wide.dtype)
        if layout == "bnhd":
            keys, values = keys.swapaxes(1, 2), values.swapaxes(1, 2)
        window, kv_lengths = self._sizes.window or window, lengths
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

    def truncate(self, lengths: ArrayLike) -> None:
        """Drop the last tokens: `lengths` stay in each batch element."""
        with self._turn():
            self.lengths = truncate_args(lengths, self._sizes, self.lengths, self._oldest)
            self._oldest = np.minimum(self._oldest, self.lengths)

    def reorder(self, indices: ArrayLike) -> None:
        """Make batch element ``i`` what ``indices[i]`` was."""
        with self._turn():
            indices = reorder_args(indices, self._sizes)
            self.keys, self.values = self.keys[indices], self.values[indices]
            self.lengths, self._oldest = self.lengths[indices], self._oldest[indices]


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
