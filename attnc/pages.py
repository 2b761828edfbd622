"""A cache of keys and values in pages, for many sequences of any lengths, which share the pages of common prefixes."""

from __future__ import annotations

from typing import Any, NamedTuple, Unpack, cast, overload

import numpy as np

from ._checks import (
    check_room,
    check_varlen_names,
    lengths_left,
    paged_query,
    paged_sizes,
    paged_tokens,
    sequence_ids,
)
from ._lock import Readable
from ._rows import aligned, apart, read_only
from ._types import Array, ArrayLike, DTypeLike, Integers, VarlenOptions, Wanted
from .results import AttentionResult
from .varlen import attention_varlen, attention_weights_varlen
from .weights import AttentionWeights


class _State(NamedTuple):
    """What lies where. A change replaces the whole in one assignment, after it wrote rows that no sequence has."""

    sequences: dict[int, tuple[Integers, int]]      # the pages of each sequence, and its tokens
    users: Integers                                 # the number of sequences that have each page
    issued: int                                     # ids given so far


class PagedKVCache(Readable):
    """Keys and values of many sequences, in pages that are taken from one pool as the sequences grow.

    A sequence is named by the id that `add` or `fork` gave. Queries, keys and values are packed: the tokens of one
    sequence after another, as in `attention_varlen`. An error leaves the cache unchanged; after Ctrl-C it is in the
    state before or after the change. Threads may share it: changes take turns, those that write rows wait for running
    `attend` calls, which run concurrently. ``copy.copy``, ``copy.deepcopy`` and pickle give an independent cache.

    Parameters
    ----------
    n_pages : int
        Pages in the pool, which is allocated at once.
    page : int
        Tokens of a page, at least 1; 16 to 256 are usual.
    kv_heads, head_dim : int
    value_dim : int, optional
        By default `head_dim`.
    dtype : dtype
        Of the rows: float32, float16, bfloat16 (ml_dtypes) or float64.
    shared : bool
        Whether the values are the first `value_dim` columns of the keys, as in `KVCache`; the pages then hold only the
        keys.

    Attributes
    ----------
    keys, values : array (n_pages, page, kv_heads, head_dim) and (n_pages, page, kv_heads, value_dim)
        Read-only views, as `attention_varlen` takes them with `block_table`.
    lengths : dict
        The number of tokens of each sequence, by id.
    free_pages : int
        Pages that no sequence has.
    nbytes : int
        Bytes of all pages.

    Raises
    ------
    TypeError, ValueError
        For a wrong size or dtype.

    Examples
    --------
    Two answers to one prompt, whose pages they share:

    >>> import numpy as np
    >>> cache = PagedKVCache(8, 2, 1, 1, dtype=np.float64)
    >>> prompt = cache.add()
    >>> cache.append(prompt, np.zeros((3, 1, 1)), np.array([1., 2., 6.]).reshape(3, 1, 1))
    >>> other = cache.fork(prompt)
    >>> cache.append([prompt, other], np.zeros((2, 1, 1)), np.array([7., -1.]).reshape(2, 1, 1))
    >>> cache.attend([prompt, other], np.ones((2, 1, 1))).ravel()
    array([4., 2.])
    >>> cache
    PagedKVCache(n_pages=8, page=2, kv_heads=1, head_dim=1, dtype=float64; 2 sequences, 5 pages free)
    >>> cache.block_table([prompt, other])
    array([[0, 2],
           [0, 1]])
    """

    def __init__(self, n_pages: int, page: int, kv_heads: int, head_dim: int, value_dim: int | None = None, *,
                 dtype: DTypeLike, shared: bool = False) -> None:
        super().__init__()
        self._sizes = s = paged_sizes(n_pages, page, kv_heads, head_dim, value_dim, dtype, shared)
        self._state = _State({}, np.zeros(s.n_pages, np.int64), 0)
        self._allocate()

    @property
    def keys(self) -> Array:
        """Pages of the keys."""
        return read_only(self._keys)

    @property
    def values(self) -> Array:
        """Pages of the values."""
        return read_only(self._values)

    @property
    def lengths(self) -> dict[int, int]:
        """Tokens of each sequence."""
        return {i: length for i, (_, length) in self._state.sequences.items()}

    @property
    def free_pages(self) -> int:
        """Pages that no sequence has."""
        return int(np.count_nonzero(self._state.users == 0))

    @property
    def nbytes(self) -> int:
        """Bytes of all pages, used or not."""
        return sum(x.nbytes for x in self._stored())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._sizes.shown(len(self._state.sequences), self.free_pages)})"

    def add(self) -> int:
        """Begin a sequence without tokens.

        Returns
        -------
        int
            Its id. Ids are never given twice.
        """
        with self._turn():
            state = self._state
            sequences = state.sequences | {state.issued: (np.zeros(0, np.int64), 0)}
            self._state = _State(sequences, state.users, state.issued + 1)
            return state.issued

    def fork(self, sequence: int) -> int:
        """Begin a sequence with the tokens of another, whose pages both then share.

        A page of which one of them has filled a part is copied when the other appends to it; full pages stay shared.

        Parameters
        ----------
        sequence : int
            An id.

        Returns
        -------
        int
            The id of the new sequence.

        Raises
        ------
        TypeError, ValueError
            For what is no id of a sequence.
        """
        with self._turn():
            state = self._state
            (source,) = sequence_ids("sequence", sequence, state.sequences, state.issued, one=True)
            pages, length = state.sequences[source]
            users = state.users.copy()
            users[pages] += 1
            self._state = _State(state.sequences | {state.issued: (pages, length)}, users, state.issued + 1)
            return state.issued

    def free(self, ids: ArrayLike) -> None:
        """End sequences; pages that no other one shares return to the pool.

        Parameters
        ----------
        ids : int or int array
            Each id once.

        Raises
        ------
        TypeError, ValueError
            For an id that was freed before or never given. Nothing is freed then.
        """
        with self._turn():
            state = self._state
            ended = sequence_ids("ids", ids, state.sequences, state.issued, once=True)
            users = state.users.copy()
            for i in ended:
                users[state.sequences[i][0]] -= 1
            left = {i: x for i, x in state.sequences.items() if i not in ended}
            self._state = _State(left, users, state.issued)

    def truncate(self, ids: ArrayLike, lengths: ArrayLike) -> None:
        """Drop the last tokens of sequences; pages that then hold none of theirs, and no other one's, are free.

        Parameters
        ----------
        ids : int or int array
            Each id once.
        lengths : int or int array (len(ids),)
            The number of tokens that each keeps.

        Raises
        ------
        TypeError, ValueError
            For more tokens than a sequence has, and for ids of no sequence. The cache is then unchanged.
        """
        with self._turn():
            state, page = self._state, self._sizes.page
            chosen = sequence_ids("ids", ids, state.sequences, state.issued, once=True)
            users, sequences = state.users.copy(), dict(state.sequences)
            for i, length in zip(chosen, lengths_left(lengths, chosen, self.lengths), strict=True):
                pages, _ = sequences[i]
                kept = -(-length // page)
                users[pages[kept:]] -= 1
                sequences[i] = pages[:kept], length
            self._state = _State(sequences, users, state.issued)

    def append(
            self, ids: ArrayLike, key: ArrayLike, value: ArrayLike | None = None, *,
            lengths: ArrayLike | None = None) -> None:
        """Append tokens to sequences.

        Parameters
        ----------
        ids : int or int array
            Each id once.
        key, value : array (tokens, kv_heads, head_dim) and (tokens, kv_heads, value_dim)
            The new tokens of the first sequence, then those of the second, and so on. Rounded to the dtype of the
            cache. With `shared`, only the key.
        lengths : int array (len(ids),), optional
            The number of new tokens of each sequence; by default all have the same number.

        Raises
        ------
        TypeError, ValueError
            For a wrong dtype or shape, and for ids of no sequence.
        MemoryError
            When there are not enough free pages. In each case the cache is unchanged.
        """
        with self._turn():
            state, page = self._state, self._sizes.page
            chosen = sequence_ids("ids", ids, state.sequences, state.issued, once=True)
            key, value, counts = paged_tokens(key, value, lengths, self._sizes, len(chosen))
            users, copied, needed = state.users.copy(), [], []
            for i, count in zip(chosen, counts.tolist(), strict=True):
                pages, length = state.sequences[i]
                shared = count > 0 and length % page > 0 and users[pages[-1]] > 1
                users[pages[-1:]] -= shared
                copied.append(bool(shared))
                needed.append(-(-(length + count) // page) - len(pages) + shared)
            new = np.flatnonzero(users == 0)
            check_room(sum(needed), len(new), self._sizes)
            key, value = (apart(x, self._stored()) for x in (key, value))
            sequences, rows, taken = dict(state.sequences), [], 0
            self._wait_for_readers()
            for i, count, is_copied, more in zip(chosen, counts.tolist(), copied, needed, strict=True):
                pages, length = state.sequences[i]
                if more:
                    fresh = new[taken:taken + more]
                    taken += more
                    if is_copied:
                        for x in self._stored():
                            x[fresh[0], :length % page] = x[pages[-1], :length % page]
                    pages = np.concatenate((pages[:len(pages) - is_copied], fresh))
                places = np.arange(length, length + count)
                rows.append(pages[places // page] * page + places % page)
                sequences[i] = pages, length + count
            users[new[:taken]] = 1
            at = np.divmod(np.concatenate([np.zeros(0, np.int64), *rows]), page)
            with np.errstate(all="ignore"):
                for x, new_rows in zip(self._stored(), (key, value), strict=not self._sizes.shared):
                    x[at] = new_rows
            self._state = _State(sequences, users, state.issued)

    @overload
    def attend(self, ids: ArrayLike, query: ArrayLike, *, q_lengths: ArrayLike | None = ..., want: tuple[()] = ...,
               out: Array | None = ..., **options: Unpack[VarlenOptions]) -> Array: ...

    @overload
    def attend(self, ids: ArrayLike, query: ArrayLike, *, q_lengths: ArrayLike | None = ..., want: Wanted,
               out: Array | None = ..., **options: Unpack[VarlenOptions]) -> AttentionResult: ...

    def attend(
            self, ids: ArrayLike, query: ArrayLike, *, q_lengths: ArrayLike | None = None,
            want: Wanted | tuple[()] = (), out: Array | None = None,
            **options: Unpack[VarlenOptions]) -> Array | AttentionResult:
        """Attention of queries over the tokens of their sequences; the last row of each stands at its last token.

        It has the bits of `attention` over the tokens of each sequence alone.

        Parameters
        ----------
        ids : int or int array
            An id may occur several times.
        query : array (tokens, q_heads, head_dim)
            The rows of the first sequence, then those of the second, and so on.
        q_lengths : int array (len(ids),), optional
            The number of rows of each sequence; by default all have the same number.
        want, out
            As in `attention_varlen`.
        **options
            Those of `attention_varlen`.

        Returns
        -------
        array (tokens, q_heads, value_dim), or AttentionResult
            As `attention_varlen`.

        Raises
        ------
        TypeError, ValueError
            For a wrong dtype or a wrong shape or value, and for ids of no sequence.
        """
        check_varlen_names(PagedKVCache.attend, options)
        reader = self._reader()
        try:
            self._enter(reader)
            ends, where = self._where(ids, query, q_lengths)
            found: Array | AttentionResult = attention_varlen(
                query, self._keys, self._values, ends, None, **where, want=cast(Any, want), out=out, **options)
            return found
        finally:
            self._leave(reader)

    def weights(self, ids: ArrayLike, query: ArrayLike, *, q_lengths: ArrayLike | None = None,
                **options: Unpack[VarlenOptions]) -> list[AttentionWeights]:
        """The weights of queries over the tokens of their sequences; each object holds a copy of its keys.

        Parameters
        ----------
        ids, query, q_lengths
            As in `attend`.
        **options
            Those of `attention_weights_varlen`.

        Returns
        -------
        list of AttentionWeights
            One for each id, of shape (q_heads, rows, tokens).

        Raises
        ------
        TypeError, ValueError
            As `attend`.
        """
        check_varlen_names(PagedKVCache.weights, options)
        with self._turn():
            ends, where = self._where(ids, query, q_lengths)
            return attention_weights_varlen(query, self._keys, ends, None, **where, **options)

    def block_table(self, ids: ArrayLike) -> Integers:
        """The pages of sequences.

        Parameters
        ----------
        ids : int or int array

        Returns
        -------
        int array (len(ids), pages)
            As `attention_varlen` takes it: -1 behind the last page of each.

        Raises
        ------
        TypeError, ValueError
            For ids of no sequence.
        """
        return self._places(ids)[0]

    def __getstate__(self) -> dict[str, Any]:
        with self._turn():
            state = super().__getstate__()
            used = np.flatnonzero(self._state.users)
            del state["_keys"], state["_values"]
            state["rows"] = used, [x[used] for x in self._stored()]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        used, pages = state.pop("rows")
        super().__setstate__(state)
        self._allocate()
        for mine, given in zip(self._stored(), pages, strict=True):
            mine[used] = given

    def _allocate(self) -> None:
        s = self._sizes
        # The rows of a head in one piece: those of pages that follow each other are read as one stream.
        self._keys, *own = (np.moveaxis(aligned((s.kv_heads, s.n_pages, s.page, dim), s.dtype), 0, 2)
                            for dim in ((s.head_dim,) if s.shared else (s.head_dim, s.value_dim)))
        self._values = own[0] if own else self._keys[..., :s.value_dim]

    def _stored(self) -> list[Array]:
        """The pages that have memory of their own."""
        return [self._keys] if self._sizes.shared else [self._keys, self._values]

    def _where(self, ids: ArrayLike, query: ArrayLike, q_lengths: ArrayLike | None) -> tuple[Integers, dict[str, Any]]:
        """Where the rows of each sequence end, and which of the pages have its keys."""
        table, lengths = self._places(ids)
        counts = paged_query(query, q_lengths, self._sizes, len(table))
        return np.concatenate(([0], np.cumsum(counts))), {"block_table": table, "kv_lengths": lengths}

    def _places(self, ids: ArrayLike) -> tuple[Integers, Integers]:
        """The pages of sequences, -1 behind the last of each, and their lengths."""
        state = self._state     # once: another thread may replace it
        held = [state.sequences[i] for i in sequence_ids("ids", ids, state.sequences, state.issued)]
        table = np.full((len(held), max((len(pages) for pages, _ in held), default=0)), -1, np.int64)
        for row, (pages, _) in zip(table, held, strict=True):
            row[:len(pages)] = pages
        return table, np.array([length for _, length in held], np.int64)
