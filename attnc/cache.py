"""A cache of keys and values for decoding, with append, attention, truncation, eviction and reordering."""

from __future__ import annotations

from typing import Any, Never, Unpack, overload

import numpy as np
from numpy.typing import NDArray

from ._checks import (
    Args,
    append_args,
    attention_args,
    cache_sizes,
    check_attend,
    check_cache_want,
    check_no_distances,
    check_rows_stay,
    keep_args,
    reorder_args,
    truncate_args,
)
from ._checks.arrays import float_array
from ._checks.spellings import hides_unknown, unexpected
from ._lock import Readable
from ._rows import Changes, aligned, apart, make, quantized, read_only, slots
from ._types import Array, ArrayLike, BlockMask, CacheOptions, DTypeLike, Integers, Layout, Wanted, Window
from .attention import attend
from .results import AttentionResult
from .weights import AttentionWeights


class KVCache(Readable):
    """Keys and values of earlier tokens, for attention of the next ones; each batch element has its own length.

    An error leaves the cache unchanged; after Ctrl-C it is in the state before or after the change, never between the
    two. Threads may share it: changes take turns and wait for running `attend` calls, which run concurrently.
    ``copy.copy``, ``copy.deepcopy`` and pickle give an independent cache with the rows in use.

    Parameters
    ----------
    batch, kv_heads, head_dim : int
    value_dim : int, optional
        By default `head_dim`.
    capacity : int
        Most tokens that a batch element holds.
    dtype : dtype
        Of the rows: float32, float16, bfloat16 (ml_dtypes), float64, or int8. An int8 row has a scale of its own,
        ``max(abs(row)) / 127``, and its entries are rounded to the nearest multiple of it: the error of an entry is at
        most ``max(abs(row)) / 254``. The scale of a key multiplies its score and that of a value its weight, so that
        no row is widened in memory.
    shared : bool
        Whether the values are the first `value_dim` columns of the keys; the cache then stores only the keys. For
        latents of multi-head latent attention: 576 numbers per token instead of 1,088. An int8 value has the scale of
        its key.
    window : tuple (left, right), optional
        As in `attention`, with a bounded left: keys up to these distances before and after a row's own position. Token
        ``t`` is then in row ``t % capacity``: new tokens replace those that no later row can see.

    Attributes
    ----------
    keys, values : array (batch, kv_heads, capacity, head_dim) and (batch, kv_heads, capacity, value_dim)
        Read-only views; the contents of rows past the length are undefined.
    key_scales, value_scales : array (batch, kv_heads, capacity), or None
        Scales of int8 rows: a row times its scale is the appended row, rounded.
    lengths : int array (batch,)
        Tokens of each batch element: those appended, without those that `keep` and `truncate` removed; read-only.
    positions : int array (batch, kv_heads, lengths.max())
        Position of each row's token among all tokens ever appended; -1 past the length. Computed on access.

    Raises
    ------
    TypeError, ValueError
        For a wrong size, dtype or window.

    Examples
    --------
    >>> import numpy as np
    >>> cache = KVCache(1, 1, 2, capacity=8, dtype=np.float32)
    >>> cache.append(np.zeros((1, 1, 3, 2)), np.array([1., 2., 6.]).reshape(1, 1, 3, 1) * np.ones(2))
    >>> cache.attend(np.ones((1, 1, 1, 2), np.float32))
    array([[[[3., 3.]]]], dtype=float32)
    >>> cache.truncate(2)
    >>> cache.attend(np.ones((1, 1, 1, 2), np.float32)), cache.lengths
    (array([[[[1.5, 1.5]]]], dtype=float32), array([2]))
    >>> cache
    KVCache(batch=1, kv_heads=1, head_dim=2, capacity=8, dtype=float32; 2 tokens)
    """

    _positions: Integers | None     # (batch, kv_heads, capacity), once `keep` has removed rows

    def __init__(
            self, batch: int, kv_heads: int, head_dim: int, value_dim: int | None = None, *, capacity: int,
            dtype: DTypeLike, window: Window | None = None, shared: bool = False) -> None:
        super().__init__()
        self._sizes = s = cache_sizes(batch, kv_heads, head_dim, value_dim, capacity, dtype, window, shared)
        self._allocate()
        self._lengths = np.zeros(s.batch, np.int64)
        self._oldest = np.zeros(s.batch, np.int64)       # the first token that no later one has replaced
        self._evicted = np.zeros(s.batch, np.int64)      # tokens that `keep` removed

    @property
    def keys(self) -> Array:
        """Rows of the keys."""
        return read_only(self._keys)

    @property
    def values(self) -> Array:
        """Rows of the values."""
        return read_only(self._values)

    @property
    def key_scales(self) -> NDArray[np.float32] | None:
        """Factors of int8 keys, or None."""
        return read_only(self._scales[0]) if self._scales[0] is not None else None

    @property
    def value_scales(self) -> NDArray[np.float32] | None:
        """Factors of int8 values, or None."""
        return read_only(self._scales[1]) if self._scales[1] is not None else None

    @property
    def lengths(self) -> Integers:
        """Tokens of each batch element."""
        return read_only(self._lengths)

    @property
    def positions(self) -> Integers:
        """Position of the token in each row, -1 past the length."""
        s, used = self._sizes, self._used()
        held = np.arange(used) < np.minimum(self._lengths, s.capacity)[:, None, None]
        positions = np.where(held, self._row_positions(used), -1)
        return read_only(np.ascontiguousarray(np.broadcast_to(positions, (s.batch, s.kv_heads, used))))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._sizes.shown(self._lengths)})"

    @property
    def nbytes(self) -> int:
        """Bytes of all rows and scales, used or not, and of positions once `keep` has removed rows."""
        return sum(x.nbytes for x in self._rows())

    def append(
            self, key: ArrayLike, value: ArrayLike | None = None, *, lengths: ArrayLike | None = None,
            layout: Layout = "bhnd") -> None:
        """Append tokens.

        Parameters
        ----------
        key, value : array (batch, kv_heads, tokens, head_dim) and (batch, kv_heads, tokens, value_dim)
            Rounded to the dtype of the cache. With `shared`, only the key.
        lengths : int or int array (batch,), optional
            The number of tokens to append in each batch element; by default all.
        layout : {"bhnd", "bnhd"}
            Order of the axes: heads before tokens or after them.

        Raises
        ------
        TypeError, ValueError
            For a wrong dtype or shape; for more tokens than fit; for entries that are not finite, if rows are int8. The
            cache is then unchanged.
        """
        with self._turn():
            *given, counts = append_args(key, value, lengths, layout, self._sizes, self._lengths)
            with np.errstate(all="ignore"):
                stored = [quantized(x) if self._sizes.dtype == np.int8
                          else (apart(x.astype(self._sizes.dtype, copy=False), (self._keys, self._values)), None)
                          for x in (given[:1] if self._sizes.shared else given)]
            ends = self._lengths + counts
            oldest = np.maximum(self._oldest, ends - self._sizes.capacity)
            changes: Changes = [(self._lengths, ..., ends), (self._oldest, ..., oldest)]
            for i, (start, count) in enumerate(zip(self._lengths, counts, strict=True)):
                places = slice(None), slots(int(start), int(count), self._sizes.capacity)
                targets = zip(stored, (self._keys, self._values), self._scales, strict=not self._sizes.shared)
                for (rows, scales), target, factors in targets:
                    changes.append((target[i], places, rows[i][:, :count]))
                    if factors is not None and scales is not None:
                        changes.append((factors[i], places, scales[i][:, :count]))
                if self._positions is not None:
                    changes.append((self._positions[i], places, self._evicted[i] + np.arange(start, start + count)))
            self._wait_for_readers()
            make(changes)

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
            out: Array | None = None, num_threads: int | None = None, **unknown: Never) -> Array | AttentionResult:
        """Attention of a query over the cached tokens; its last row has the position of the last token.

        Without a window it has the bits of ``attention(query, cache.keys, cache.values, kv_lengths=cache.lengths,
        ...)``; int8 rows count as rows of the query's dtype.

        Parameters
        ----------
        query : array (batch, q_heads, q_len, head_dim)
        mask, block_mask, key_indices, key_mask, bias, relative_bias, relative_index, relative_key, relative_query, \
causal, window, q_offset, scale, softcap, alibi_slopes, sinks, q_segments, k_segments, q_lengths, layout, want, out, \
num_threads
            As in `attention`, with `capacity` keys. A cache with a window accepts no arrays over keys, no `window` and
            no `q_offset`, and gives no weights or scores, because tokens have no fixed row.

        Returns
        -------
        array (batch, q_heads, q_len, value_dim), or AttentionResult
            As in `attention`.

        Raises
        ------
        TypeError, ValueError
            For a wrong dtype or a wrong shape or value; for a query whose first row may see tokens that later ones
            have replaced.
        """
        if unknown:
            unexpected(KVCache.attend, unknown)
        reader = self._reader()
        try:
            self._enter(reader)
            s = self._sizes
            check_attend(s, mask=mask, block_mask=block_mask, key_indices=key_indices, key_mask=key_mask, bias=bias,
                         relative_bias=relative_bias, relative_index=relative_index, window=window, q_offset=q_offset,
                         q_segments=q_segments, k_segments=k_segments)
            a = attention_args(  # by position, as attention does
                query, *self._for_checks(query, layout, s.capacity), mask, block_mask, key_indices, key_mask, bias,
                relative_bias, relative_index, relative_key, relative_query, causal, s.window or window, q_offset,
                None, scale, softcap, alibi_slopes, sinks, q_segments, k_segments, q_lengths,
                np.minimum(self._lengths, s.capacity), layout, want, out, num_threads)
            if s.window is not None:
                check_cache_want(a, s, self._lengths, self._oldest)
            self._place(a)
            if s.dtype == np.int8:
                a.key, a.value, a.key_scale = self._keys, self._values, self._scales[0]
            return attend(a, self._scales[1])
        finally:
            self._leave(reader)

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
        """The weights of a query over the cached tokens, whose rows are read in place when a result needs them.

        Parameters
        ----------
        query : array (batch, q_heads, q_len, head_dim)
        mask, block_mask, key_indices, key_mask, bias, relative_bias, relative_index, relative_key, relative_query, \
causal, window, q_offset, scale, softcap, alibi_slopes, sinks, q_segments, k_segments, q_lengths, layout, lse, \
num_threads
            As in `AttentionWeights`, with ``lengths.max()`` keys.

        Returns
        -------
        AttentionWeights
            Of shape (batch, q_heads, q_len, ``lengths.max()``), over the current lengths. It holds the rows of the
            cache: after a change of these, its methods raise a RuntimeError (see `AttentionWeights`); rows that
            `append` adds after the longest length are no change.

        Raises
        ------
        TypeError, ValueError
            For a wrong dtype or a wrong shape or value; for a cache with a window, whose rows move.

        Examples
        --------
        >>> cache = KVCache(1, 1, 2, capacity=8, dtype=np.int8)
        >>> cache.append(np.ones((1, 1, 4, 2)), np.ones((1, 1, 4, 2)))
        >>> cache.weights(np.ones((1, 2, 3, 2)), causal=True).key_mass(heads="group")
        array([[[2.16666667, 2.16666667, 1.16666667, 0.5       ]]])
        """
        if unknown:
            unexpected(KVCache.weights, unknown)
        with self._turn():
            s, used = self._sizes, self._used()
            check_rows_stay("weights", s)
            key, _ = self._for_checks(query, layout, used)
            a = attention_args(  # by position, as attention does
                query, key, None, mask, block_mask, key_indices, key_mask, bias, relative_bias, relative_index,
                relative_key, relative_query, causal, window, q_offset, None, scale, softcap, alibi_slopes, sinks,
                q_segments, k_segments, q_lengths, self._lengths.copy(), layout, (), None, num_threads)
            self._place(a)
            if self._scales[0] is not None:
                a.key, a.key_scale = self._keys[:, :, :used], self._scales[0][:, :, :used]
            return AttentionWeights._of(a, lse)

    def truncate(self, lengths: ArrayLike) -> None:
        """Drop the last tokens.

        Parameters
        ----------
        lengths : int or int array (batch,)
            Tokens that stay in each batch element.

        Raises
        ------
        TypeError, ValueError
            For more tokens than the cache holds; for lengths at which the window includes replaced tokens.

        Notes
        -----
        The position of the next token falls by the number of dropped tokens; after ``truncate(0)`` it is 0.
        """
        with self._turn():
            kept = truncate_args(lengths, self._sizes, self._lengths, self._oldest)
            self._wait_for_readers()
            make([(self._lengths, ..., kept), (self._oldest, ..., np.minimum(self._oldest, kept)),
                  (self._evicted, ..., np.where(kept == 0, 0, self._evicted))])

    def keep(self, indices: ArrayLike) -> None:
        """Evict all tokens but some, which keep their positions.

        Parameters
        ----------
        indices : int array (batch, kv_heads, n)
            Rows that stay, listed in any order; the cache compacts them in their present order. -1 at the end stands
            for none. All heads of a batch element keep the same number of rows.

        Raises
        ------
        TypeError, ValueError
            For a wrong dtype or shape; for a row that is named twice or holds no token; for a cache with a window. The
            cache is then unchanged.

        Examples
        --------
        >>> cache = KVCache(1, 1, 2, capacity=4, dtype=np.float32)
        >>> cache.append(np.zeros((1, 1, 4, 2)), np.arange(8.).reshape(1, 1, 4, 2))
        >>> cache.keep([[[3, 0]]])
        >>> cache.append(np.zeros((1, 1, 1, 2)), np.full((1, 1, 1, 2), 7))
        >>> cache.positions, cache.lengths
        (array([[[0, 3, 4]]]), array([3]))
        >>> cache.attend(np.zeros((1, 1, 1, 2), np.float32), window=(2, 0))   # tokens 3 and 4
        array([[[[6.5, 7. ]]]], dtype=float32)
        """
        with self._turn():
            kept, counts = keep_args(indices, self._sizes, self._lengths)
            if (counts == self._lengths).all():
                return
            if self._positions is None:     # equal to those without this array, so an interrupt here changes nothing
                positions = np.zeros(self._keys.shape[:3], np.int64)
                positions[:, :, :self._used()] = np.arange(self._used())
                self._positions = positions
            stop = int(counts.max(initial=0))
            moved = (kept[:, :, :stop] != np.arange(stop)).any((0, 1))
            first = int(moved.argmax()) if moved.any() else stop
            places = np.arange(kept.shape[0])[:, None, None], np.arange(kept.shape[1])[:, None]
            changes: Changes = [(self._evicted, ..., self._evicted + self._lengths - counts),
                                (self._lengths, ..., counts)]
            changes += [(x, (slice(None), slice(None), slice(first, stop)), x[(*places, kept[:, :, first:stop])])
                        for x in self._rows()]
            self._wait_for_readers()
            make(changes)

    def reorder(self, indices: ArrayLike) -> None:
        """Replace each batch element ``i`` by element ``indices[i]``, as in beam search.

        Parameters
        ----------
        indices : int array (batch,)
            An element may occur several times, or not at all.

        Raises
        ------
        TypeError, ValueError
            For a wrong shape or an index out of range.
        """
        with self._turn():
            chosen = reorder_args(indices, self._sizes)
            moved = np.flatnonzero(chosen != np.arange(self._sizes.batch))
            used = self._used()
            changes: Changes = [(x, ..., x[chosen]) for x in (self._lengths, self._oldest, self._evicted)]
            if moved.size:
                changes += [(x, (moved, slice(None), slice(used)), x[chosen[moved], :, :used]) for x in self._rows()]
            self._wait_for_readers()
            make(changes)

    def __getstate__(self) -> dict[str, Any]:
        with self._turn():
            state = super().__getstate__()
            for name in ("_lengths", "_oldest", "_evicted"):
                state[name] = state[name].copy()
            for name in ("_keys", "_values", "_scales", "_positions"):
                del state[name]
            state["rows"] = [x[:, :, :self._used()].copy() for x in self._rows()]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        rows = state.pop("rows")
        super().__setstate__(state)
        self._allocate()
        if len(rows) > len(self._rows()):
            self._positions = np.zeros(self._keys.shape[:3], np.int64)
        for mine, given in zip(self._rows(), rows, strict=True):
            mine[:, :, :given.shape[2]] = given

    def _allocate(self) -> None:
        """Allocate the rows."""
        s = self._sizes
        rows, scaled = (s.batch, s.kv_heads, s.capacity), s.dtype == np.int8
        self._keys = aligned((*rows, s.head_dim), s.dtype)
        self._values = self._keys[..., :s.value_dim] if s.shared else aligned((*rows, s.value_dim), s.dtype)
        of_keys, of_values = (aligned(rows, np.dtype(np.float32)) if scaled else None for _ in range(2))
        self._scales = of_keys, of_keys if s.shared else of_values
        self._positions = None

    def _rows(self) -> list[np.ndarray]:
        stored = (self._keys, self._scales[0]) if self._sizes.shared else (self._keys, self._values, *self._scales)
        return [x for x in (*stored, self._positions) if x is not None]

    def _for_checks(self, query: ArrayLike, layout: str, rows: int) -> tuple[np.ndarray, np.ndarray]:
        """The first rows of keys and values in the axes of `layout`; for int8, stand-ins of the query's dtype."""
        key, value = self._keys[:, :, :rows], self._values[:, :, :rows]
        if self._sizes.dtype == np.int8:
            zero = np.zeros((), float_array("query", query).dtype)
            key, value = np.broadcast_to(zero, key.shape), np.broadcast_to(zero, value.shape)
        return (key.swapaxes(1, 2), value.swapaxes(1, 2)) if layout == "bnhd" else (key, value)

    def _used(self) -> int:
        """Number of rows that hold a token of any batch element."""
        return min(int(self._lengths.max(initial=0)), self._sizes.capacity)

    def _place(self, a: Args) -> None:
        """Set the positions of rows and of the query, unless rows hold tokens 0, 1, ... in order."""
        if not (self._evicted.any() or self._oldest.any()):
            return
        a.k_positions = self._row_positions(a.kv_len)
        check_no_distances(relative_bias=a.relative_bias, relative_index=a.relative_index)
        if a.q_offset is None:
            q_lengths = a.q_len if a.q_lengths is None else a.q_lengths
            a.q_offset = self._lengths + self._evicted - q_lengths

    def _row_positions(self, rows: int) -> Integers:
        """The positions of the first `rows` rows, (batch, kv_heads or 1, rows); undefined past the length."""
        if self._positions is not None:
            return self._positions[:, :, :rows]
        last = self._lengths[:, None, None] - 1
        return last - (last - np.arange(rows)) % self._sizes.capacity
