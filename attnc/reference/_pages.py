"""The cache in pages: all tokens of each sequence, and a count of the pages that they would take."""

from __future__ import annotations

from typing import Any, Unpack, cast, overload

import numpy as np

from .._checks import (
    check_room,
    check_varlen_names,
    lengths_left,
    paged_query,
    paged_sizes,
    paged_tokens,
    sequence_ids,
)
from .._lock import Locked
from .._types import Array, ArrayLike, DTypeLike, Integers, VarlenOptions, Wanted
from ..results import AttentionResult
from ._varlen import attention_varlen, attention_weights_varlen
from ._weights import AttentionWeights


class PagedKVCache(Locked):
    """Keys and values of many sequences: the definition of `attnc.PagedKVCache`.

    It keeps the tokens of each sequence apart. Calls from several threads take turns.

    Parameters, methods, results and errors are those of `attnc.PagedKVCache`.

    Examples
    --------
    >>> cache = PagedKVCache(8, 2, 1, 1, dtype=np.float64)
    >>> prompt = cache.add()
    >>> cache.append(prompt, np.zeros((3, 1, 1)), np.array([1., 2., 6.]).reshape(3, 1, 1))
    >>> cache.attend(prompt, np.ones((1, 1, 1))).ravel()
    array([3.])
    """

    def __init__(self, n_pages: int, page: int, kv_heads: int, head_dim: int, value_dim: int | None = None, *,
                 dtype: DTypeLike, shared: bool = False) -> None:
        super().__init__()
        self._sizes = paged_sizes(n_pages, page, kv_heads, head_dim, value_dim, dtype, shared)
        self._issued = 0
        self._tokens: dict[int, tuple[Array, Array]] = {}       # keys and values (tokens, kv_heads, dim)
        self._pages: dict[int, list[int]] = {}

    @property
    def lengths(self) -> dict[int, int]:
        """Tokens of each sequence."""
        return {i: len(key) for i, (key, _) in self._tokens.items()}

    @property
    def free_pages(self) -> int:
        """Pages that no sequence has."""
        return len(self._free())

    def _free(self) -> list[int]:
        return sorted(set(range(self._sizes.n_pages)).difference(*self._pages.values()))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._sizes.shown(len(self._tokens), self.free_pages)})"

    def _begin(self, tokens: tuple[Array, Array], pages: list[int]) -> int:
        self._tokens, self._pages = self._tokens | {self._issued: tokens}, self._pages | {self._issued: pages}
        self._issued += 1
        return self._issued - 1

    def add(self) -> int:
        """Begin a sequence without tokens."""
        s = self._sizes
        with self._turn():
            return self._begin((np.zeros((0, s.kv_heads, s.head_dim), s.dtype),
                                np.zeros((0, s.kv_heads, s.value_dim), s.dtype)), [])

    def fork(self, sequence: int) -> int:
        """Begin a sequence with the tokens of another."""
        with self._turn():
            (source,) = sequence_ids("sequence", sequence, self._tokens, self._issued, one=True)
            return self._begin(self._tokens[source], self._pages[source])

    def free(self, ids: ArrayLike) -> None:
        """End sequences."""
        with self._turn():
            ended = sequence_ids("ids", ids, self._tokens, self._issued, once=True)
            self._tokens = {i: x for i, x in self._tokens.items() if i not in ended}
            self._pages = {i: x for i, x in self._pages.items() if i not in ended}

    def truncate(self, ids: ArrayLike, lengths: ArrayLike) -> None:
        """Drop the last tokens of sequences."""
        with self._turn():
            chosen = sequence_ids("ids", ids, self._tokens, self._issued, once=True)
            left = dict(zip(chosen, lengths_left(lengths, chosen, self.lengths), strict=True))
            tokens = {i: (self._tokens[i][0][:n], self._tokens[i][1][:n]) for i, n in left.items()}
            self._tokens = self._tokens | tokens
            self._pages = self._pages | {i: self._pages[i][:-(-n // self._sizes.page)] for i, n in left.items()}

    def append(
            self, ids: ArrayLike, key: ArrayLike, value: ArrayLike | None = None, *,
            lengths: ArrayLike | None = None) -> None:
        """Append tokens to sequences: all those of the first, then those of the second, and so on."""
        with self._turn():
            chosen = sequence_ids("ids", ids, self._tokens, self._issued, once=True)
            *new, counts = paged_tokens(key, value, lengths, self._sizes, len(chosen))
            tokens, pages, needed = dict(self._tokens), dict(self._pages), 0
            free = self._free()
            for i, count, end in zip(chosen, counts, np.cumsum(counts), strict=True):
                old = tokens[i]
                with np.errstate(all="ignore"):
                    one, two = (x[end - count:end].astype(self._sizes.dtype) for x in new)
                tokens[i] = np.concatenate((old[0], one)), np.concatenate((old[1], two))
                held, full = pages[i], len(old[0]) // self._sizes.page
                if count and any(page in other for page in held[full:] for j, other in pages.items() if j != i):
                    held = held[:full]      # the last one is copied
                more = -(-len(tokens[i][0]) // self._sizes.page) - len(held)
                pages[i] = held + free[needed:needed + more]
                needed += more
            check_room(needed, len(free), self._sizes)
            self._tokens, self._pages = tokens, pages

    @overload
    def attend(self, ids: ArrayLike, query: ArrayLike, *, q_lengths: ArrayLike | None = ..., want: tuple[()] = ...,
               out: Array | None = ..., **options: Unpack[VarlenOptions]) -> Array: ...

    @overload
    def attend(self, ids: ArrayLike, query: ArrayLike, *, q_lengths: ArrayLike | None = ..., want: Wanted,
               out: Array | None = ..., **options: Unpack[VarlenOptions]) -> AttentionResult: ...

    def attend(
            self, ids: ArrayLike, query: ArrayLike, *, q_lengths: ArrayLike | None = None,
            want: Wanted | tuple[()] = (), out: Array | None = None,
            **options: Unpack[VarlenOptions]) -> np.ndarray | AttentionResult:
        """Attention of packed queries over the tokens of their sequences."""
        check_varlen_names(PagedKVCache.attend, options)
        with self._turn():
            key, value, *ends = self._packed(ids, query, q_lengths)
        found: Array | AttentionResult = attention_varlen(query, key, value, *ends, want=cast(Any, want), out=out,
                                                          **options)
        return found

    def weights(self, ids: ArrayLike, query: ArrayLike, *, q_lengths: ArrayLike | None = None,
                **options: Unpack[VarlenOptions]) -> list[AttentionWeights]:
        """The weights of packed queries over the tokens of their sequences."""
        check_varlen_names(PagedKVCache.weights, options)
        with self._turn():
            key, _, *ends = self._packed(ids, query, q_lengths)
        return attention_weights_varlen(query, key, *ends, **options)

    def block_table(self, ids: ArrayLike) -> Integers:
        """The pages of sequences, -1 behind the last of each."""
        held = [self._pages[i] for i in sequence_ids("ids", ids, self._pages, self._issued)]
        most = max(map(len, held), default=0)
        return np.array([pages + [-1] * (most - len(pages)) for pages in held], np.int64).reshape(len(held), most)

    def _packed(self, ids: ArrayLike, query: ArrayLike, q_lengths: ArrayLike | None) -> list[Array]:
        """Keys and values of all sequences, and where the rows and the keys of each end."""
        s, chosen = self._sizes, sequence_ids("ids", ids, self._tokens, self._issued)
        counts = paged_query(query, q_lengths, s, len(chosen))
        held = [self._tokens[i] for i in chosen]
        return [*(np.concatenate([np.zeros((0, s.kv_heads, dim), s.dtype), *(x[of] for x in held)])
                  for of, dim in enumerate((s.head_dim, s.value_dim))),
                np.concatenate(([0], np.cumsum(counts))), np.cumsum([0, *(len(x[0]) for x in held)])]
