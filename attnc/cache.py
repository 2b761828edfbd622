"""A cache of keys and values for decoding: rows that are appended, attended to, cut back and reordered."""

from __future__ import annotations

import threading
from types import EllipsisType
from typing import Any, Never, TypeAlias, TypeVar, Unpack, overload

import numpy as np
from numpy.typing import NDArray

from ._checks import (
    Args,
    append_args,
    attention_args,
    cache_sizes,
    check_attend,
    check_cache_want,
    reorder_args,
    truncate_args,
)
from ._checks.arrays import float_array
from ._checks.spellings import hides_unknown, unexpected
from ._lock import WITHIN, Locked
from ._types import Array, ArrayLike, BlockMask, CacheOptions, DTypeLike, Integers, Layout, Wanted, Window
from .attention import attend
from .results import AttentionResult

_Scalar = TypeVar("_Scalar", bound=np.generic)
_Changes: TypeAlias = list[tuple[Array, EllipsisType | tuple[slice | Integers, ...], Array]]

_QUANTIZED = 1 << 20  # entries that become int8 at a time, in milliseconds
_ALIGNMENT = 64  # a vector that crosses a line of memory is read as two: 10 % of the speed of decoding


class KVCache(Locked):
    """Keys and values of the tokens so far, for attention of the next ones; each batch element has its own length.

    An error leaves it as it was; Ctrl-C leaves it as it was or as it was to be, never between the two. Threads may
    share it: changes take turns and wait for the `attend` calls at work, which run at the same time as each other.
    ``copy.copy``, ``copy.deepcopy`` and pickle give an independent cache and keep the rows in use.

    Parameters
    ----------
    batch, kv_heads, head_dim : int
    value_dim : int, optional
        By default `head_dim`.
    capacity : int
        Tokens of a batch element.
    dtype : dtype
        Of the rows: float32, float16, bfloat16 (ml_dtypes), float64, or int8. An int8 row has a scale of its own,
        ``max(abs(row)) / 127``, and its entries are rounded to the nearest multiple of it: the error of an entry is at
        most ``max(abs(row)) / 254``. The scale of a key multiplies its score and that of a value its weight, so that
        no row is ever widened in memory.
    window : tuple (left, right), optional
        As in `attention`, with a bounded left: keys up to these distances before and after a row's own position. Token
        ``t`` then lies in row ``t % capacity``: new tokens replace those that no later row can see.

    Attributes
    ----------
    keys, values : array (batch, kv_heads, capacity, head_dim) and (batch, kv_heads, capacity, value_dim)
        Read-only views; rows past the length hold anything.
    key_scales, value_scales : array (batch, kv_heads, capacity), or None
        Of int8 rows: a row times its scale is what was appended, rounded.
    lengths : int array (batch,)
        Tokens appended to each batch element; read-only.

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

    def __init__(
            self, batch: int, kv_heads: int, head_dim: int, value_dim: int | None = None, *, capacity: int,
            dtype: DTypeLike, window: Window | None = None) -> None:
        super().__init__()
        self._sizes = s = cache_sizes(batch, kv_heads, head_dim, value_dim, capacity, dtype, window)
        self._allocate()
        self._lengths = np.zeros(s.batch, np.int64)
        self._oldest = np.zeros(s.batch, np.int64)       # the first token whose row no later one has taken

    @property
    def keys(self) -> Array:
        """Rows of the keys."""
        return _read_only(self._keys)

    @property
    def values(self) -> Array:
        """Rows of the values."""
        return _read_only(self._values)

    @property
    def key_scales(self) -> NDArray[np.float32] | None:
        """Factors of int8 keys, or None."""
        return _read_only(self._scales[0]) if self._scales[0] is not None else None

    @property
    def value_scales(self) -> NDArray[np.float32] | None:
        """Factors of int8 values, or None."""
        return _read_only(self._scales[1]) if self._scales[1] is not None else None

    @property
    def lengths(self) -> Integers:
        """Tokens of each batch element."""
        return _read_only(self._lengths)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._sizes.shown(self._lengths)})"

    @property
    def nbytes(self) -> int:
        """Bytes of all rows and scales, used or not."""
        return sum(x.nbytes for x in self._rows())

    def append(
            self, key: ArrayLike, value: ArrayLike, *, lengths: ArrayLike | None = None, layout: Layout = "bhnd"
    ) -> None:
        """Add tokens behind those that are there.

        Parameters
        ----------
        key, value : array (batch, kv_heads, tokens, head_dim) and (batch, kv_heads, tokens, value_dim)
            Rounded to the dtype of the cache.
        lengths : int or int array (batch,), optional
            How many of the tokens count in each batch element; by default all.
        layout : {"bhnd", "bnhd"}
            Order of the axes: heads before tokens or after them.

        Raises
        ------
        TypeError, ValueError
            For a wrong dtype or shape; for more tokens than fit; for entries that are not finite where rows are int8.
            The cache is then as it was.
        """
        with self._turn():
            *given, counts = append_args(key, value, lengths, layout, self._sizes, self._lengths)
            with np.errstate(all="ignore"):
                stored = [_quantized(x) if self._sizes.dtype == np.int8
                          else (x.astype(self._sizes.dtype, copy=False), None) for x in given]
            ends = self._lengths + counts
            oldest = np.maximum(self._oldest, ends - self._sizes.capacity)
            changes: _Changes = [(self._lengths, ..., ends), (self._oldest, ..., oldest)]
            for i, (start, count) in enumerate(zip(self._lengths, counts, strict=True)):
                places = slice(None), _slots(int(start), int(count), self._sizes.capacity)
                targets = zip(stored, (self._keys, self._values), self._scales, strict=True)
                for (rows, scales), target, factors in targets:
                    changes.append((target[i], places, rows[i][:, :count]))
                    if factors is not None and scales is not None:
                        changes.append((factors[i], places, scales[i][:, :count]))
            self._wait_for_readers()
            _make(changes)

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
            out: Array | None = None, num_threads: int | None = None, **unknown: Never) -> Array | AttentionResult:
        """Attention of a query over the tokens that are there; its last row stands at the last token.

        Without a window it has the bits of ``attention(query, cache.keys, cache.values, kv_lengths=cache.lengths,
        ...)``; int8 rows count as being of the query's dtype.

        Parameters
        ----------
        query : array (batch, q_heads, q_len, head_dim)
        mask, block_mask, key_mask, bias, relative_bias, causal, window, q_offset, scale, softcap, alibi_slopes, \
sinks, q_segments, k_segments, q_lengths, layout, want, out, num_threads
            As in `attention`; there are `capacity` keys. A cache with a window takes none of the arrays over keys, no
            `window` and no `q_offset`, and gives no weights or scores: its rows move.

        Returns
        -------
        array (batch, q_heads, q_len, value_dim), or AttentionResult
            As in `attention`.

        Raises
        ------
        TypeError, ValueError
            For a wrong dtype or a wrong shape or value; for a query whose first row looks back at tokens that later
            ones have replaced.
        """
        if unknown:
            unexpected(KVCache.attend, unknown)
        reader = threading.Lock()       # held until the rows are no longer read; an interrupt leaves it released
        reader.acquire()
        try:
            with self._turn():
                self._readers[reader] = threading.get_ident()
            s = self._sizes
            check_attend(s, mask=mask, block_mask=block_mask, key_mask=key_mask, bias=bias,
                         relative_bias=relative_bias, window=window, q_offset=q_offset, q_segments=q_segments,
                         k_segments=k_segments)
            key, value = self._keys, self._values
            if s.dtype == np.int8:  # for the checks: arrays of the same shapes, and of the query's dtype
                zero = np.zeros((), float_array("query", query).dtype)
                key, value = np.broadcast_to(zero, key.shape), np.broadcast_to(zero, value.shape)
            if layout == "bnhd":
                key, value = key.swapaxes(1, 2), value.swapaxes(1, 2)
            a = attention_args(  # by position, as attention does
                query, key, value, mask, block_mask, key_mask, bias, relative_bias, causal, s.window or window,
                q_offset, scale, softcap, alibi_slopes, sinks, q_segments, k_segments, q_lengths,
                np.minimum(self._lengths, s.capacity), layout, want, out, num_threads)
            if s.window is not None:
                check_cache_want(a, s, self._lengths, self._oldest)
                self._unroll(a)
            if s.dtype == np.int8:
                a.key, a.value = self._keys, self._values
            return attend(a, key_scale=self._scales[0], value_scale=self._scales[1])
        finally:
            reader.release()
            self._readers.pop(reader, None)

    def truncate(self, lengths: ArrayLike) -> None:
        """Drop the last tokens.

        Parameters
        ----------
        lengths : int or int array (batch,)
            Tokens that stay in each batch element.

        Raises
        ------
        TypeError, ValueError
            For more tokens than there are; for tokens in the window of which others have been replaced.
        """
        with self._turn():
            kept = truncate_args(lengths, self._sizes, self._lengths, self._oldest)
            self._wait_for_readers()
            _make([(self._lengths, ..., kept), (self._oldest, ..., np.minimum(self._oldest, kept))])

    def reorder(self, indices: ArrayLike) -> None:
        """Make batch element ``i`` what ``indices[i]`` was, as in beam search.

        Parameters
        ----------
        indices : int array (batch,)
            An element may be chosen several times, or not at all.

        Raises
        ------
        TypeError, ValueError
            For a wrong shape or an index that is not there.
        """
        with self._turn():
            chosen = reorder_args(indices, self._sizes)
            moved = np.flatnonzero(chosen != np.arange(self._sizes.batch))
            used = self._used()
            changes: _Changes = [(x, ..., x[chosen]) for x in (self._lengths, self._oldest)]
            if moved.size:
                changes += [(x, (moved, slice(None), slice(used)), x[chosen[moved], :, :used]) for x in self._rows()]
            self._wait_for_readers()
            _make(changes)

    def __getstate__(self) -> dict[str, Any]:
        with self._turn():
            state = super().__getstate__()
            del state["_readers"]
            for name in ("_lengths", "_oldest"):
                state[name] = state[name].copy()
            for name in ("_keys", "_values", "_scales"):
                del state[name]
            state["rows"] = [x[:, :, :self._used()].copy() for x in self._rows()]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        rows = state.pop("rows")
        super().__setstate__(state)
        self._allocate()
        for mine, given in zip(self._rows(), rows, strict=True):
            mine[:, :, :given.shape[2]] = given

    def _allocate(self) -> None:
        """Memory for the rows, and the calls that read them now: a lock held by each, and its thread."""
        s = self._sizes
        rows, scaled = (s.batch, s.kv_heads, s.capacity), s.dtype == np.int8
        self._keys, self._values = _aligned((*rows, s.head_dim), s.dtype), _aligned((*rows, s.value_dim), s.dtype)
        self._scales = tuple(_aligned(rows, np.dtype(np.float32)) if scaled else None for _ in range(2))
        self._readers: dict[threading.Lock, int] = {}

    def _rows(self) -> list[np.ndarray]:
        return [x for x in (self._keys, self._values, *self._scales) if x is not None]

    def _used(self) -> int:
        """Rows that hold a token of some batch element."""
        return min(int(self._lengths.max(initial=0)), self._sizes.capacity)

    def _wait_for_readers(self) -> None:
        """Let the `attend` calls of other threads end; no new one begins while this thread holds the lock."""
        for reader, thread in self._readers.copy().items():
            if thread == threading.get_ident():
                if reader.locked():
                    raise RuntimeError(WITHIN.format(type(self).__name__))
            else:
                with reader:
                    pass

    def _unroll(self, a: Args) -> None:
        """Where rows have been replaced their order says nothing: what a row sees is said by a mask instead."""
        s = self._sizes
        if s.window is None or not self._oldest.any():
            return
        last = self._lengths[:, None] - 1
        token = last - (last - np.arange(s.capacity)) % s.capacity                       # (batch, capacity)
        q_lengths = a.q_len if a.q_lengths is None else np.reshape(a.q_lengths, (-1, 1))
        position = self._lengths[:, None] - q_lengths + np.arange(a.q_len)               # (batch, q_len)
        distance = token[:, None, None, :] - position[:, None, :, None]
        left, right = s.window
        seen = (distance >= -left) & (token >= 0)[:, None, None, :]
        for bound in ([] if right is None else [right]) + ([0] if a.causal else []):
            seen &= distance <= bound
        a.mask, a.window, a.causal = seen, None, False
        if a.alibi_slopes is not None:
            a.bias = -a.alibi_slopes[..., None, None] * np.abs(distance).astype(a.acc)
            a.alibi_slopes = None


def _aligned(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """Zeros that begin at a line of memory."""
    nbytes = int(np.prod(shape, dtype=object)) * dtype.itemsize
    memory = np.zeros(nbytes + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start:start + nbytes].view(dtype).reshape(shape)


def _read_only(x: NDArray[_Scalar]) -> NDArray[_Scalar]:
    view = x.view()
    view.flags.writeable = False
    return view


def _make(changes: _Changes) -> None:
    """Assign what was prepared, to the end also if an interrupt comes: rows, scales and lengths belong together."""
    try:
        for array, places, new in changes:
            array[places] = new
    except BaseException:
        for array, places, new in changes:
            array[places] = new
        raise


def _slots(start: int, count: int, capacity: int) -> slice | Integers:
    """Rows of `count` tokens from token `start` on."""
    first = start % capacity
    if first + count <= capacity:
        return slice(first, first + count)
    return np.arange(start, start + count) % capacity


def _quantized(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows as int8 and their factors."""
    tokens = x.shape[2]
    if x.size > _QUANTIZED and tokens > 1:  # in parts, between which Python lets signal handlers run
        step = max(_QUANTIZED * tokens // x.size, 1)
        rows, scales = zip(*[_quantized(x[:, :, i:i + step]) for i in range(0, tokens, step)], strict=True)
        return np.concatenate(rows, axis=2), np.concatenate(scales, axis=2)
    x = x.astype(np.float32, copy=False)
    scales = np.abs(x).max(-1, initial=0) / np.float32(127)
    rows = np.rint(x / np.where(scales == 0, 1, scales)[..., None])
    return np.clip(rows, -127, 127).astype(np.int8), scales
