"""Check keys and values that lie in pages: the table of each sequence's pages, and what a paged cache is asked."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from .arrays import as_array, check_fits, float_array
from .attention import check_groups
from .cache import MAX_SIZE, check_shared, given_rows, row_dtype
from .options import INT64, integers
from .scalars import integer


@dataclass(slots=True)
class Pages:
    """Where the tokens of each sequence lie: token j in row ``first[i, j // page] + j % page`` of key and value."""

    first: np.ndarray       # (sequences, pages), int64: the row of a page's first token, 0 where none is used
    page: int

    def rows(self, sequences: Any, kv_len: int) -> np.ndarray:
        """The rows of the first `kv_len` tokens of some sequences, (sequences, 1, kv_len); any behind their lengths."""
        first = self.first[sequences, :-(-kv_len // self.page)]
        rows = first[:, :, None] + np.arange(min(self.page, kv_len))
        return rows.reshape(len(first), 1, -1)[:, :, :kv_len]


def open_pages(
        key: object, value: object, block_table: object, kv_lengths: object, cu_seqlens_k: object, sequences: int
) -> tuple[np.ndarray, np.ndarray | None, Pages, np.ndarray]:
    """Keys and values as rows (rows, heads, dim), where the tokens lie in them, and the length of each sequence."""
    if cu_seqlens_k is not None:
        raise TypeError("cu_seqlens_k was given with block_table; wanted None, and kv_lengths=np.diff(cu_seqlens_k)")
    if kv_lengths is None:
        raise TypeError("kv_lengths is missing: block_table needs the number of keys of each sequence")
    given = {"key": float_array("key", key)} | ({} if value is None else {"value": float_array("value", value)})
    for name, x in given.items():
        if x.ndim != 4:
            raise ValueError(f"{name} has {x.ndim} axes, shape {x.shape}; wanted pages (n_pages, page, heads, dim)")
        if x.shape[1] == 0:
            raise ValueError(f"{name} has pages of 0 tokens, shape {x.shape}; wanted at least 1")
        check_fits(name, x.shape[:2], given["key"].shape[:2], "the pages of key", exact=2)
    n_pages, page = given["key"].shape[:2]
    table = as_array("block_table", block_table, INT64)
    if table.ndim != 2 or len(table) != sequences:
        raise ValueError(f"block_table has shape {table.shape}; wanted (sequences, pages) = ({sequences}, pages)")
    lengths = integers("kv_lengths", kv_lengths, 0)
    check_fits("kv_lengths", lengths.shape, (sequences,), "(sequences,)", exact=1)
    for i in np.flatnonzero(lengths > table.shape[1] * page)[:1]:
        raise ValueError(f"kv_lengths is {lengths[i]} for sequence {i}, which has {table.shape[1]} pages of {page} in "
                         "block_table; wanted no more than they hold")
    used = np.arange(table.shape[1]) < -(-lengths // page)[:, None]
    # before the range is checked: -1 behind the last page may be 2**64 - 1 of uint64
    table = integers("block_table", np.where(used, table, np.zeros((), table.dtype)))
    for i, j in np.argwhere(used & ((table < 0) | (table >= n_pages)))[:1]:
        raise ValueError(f"block_table names page {table[i, j]} for tokens from {j * page} of sequence {i}, which has "
                         f"{lengths[i]}; wanted from 0 to {n_pages - 1}, as key has {n_pages} pages")
    return *_as_rows(given["key"], given.get("value"), table), lengths


def _as_rows(
        key: np.ndarray, value: np.ndarray | None, table: np.ndarray
) -> tuple[np.ndarray, np.ndarray | None, Pages]:
    """Views of all rows from the first page to the last; copies of the used pages where no view has one row stride."""
    page, steps = key.shape[1], {_rows_a_page(x) for x in (key, value) if x is not None and x.size}
    if len(steps) > 1 or 0 in steps:
        used, places = np.unique(table, return_inverse=True)        # key[used] keeps the order of the axes in memory
        key, value = np.ascontiguousarray(key[used]), None if value is None else np.ascontiguousarray(value[used])
        table, steps = places.reshape(table.shape), {page}
    step = steps.pop() if steps else page
    count = (len(key) - 1) * step + page if len(key) else 0
    views = [None if x is None else np.lib.stride_tricks.as_strided(
        x, (count, *x.shape[2:]), (x.strides[0] if page == 1 else x.strides[1], *x.strides[2:]), writeable=False)
        for x in (key, value)]
    assert views[0] is not None
    return views[0], views[1], Pages(table * step, page)


def _rows_a_page(x: np.ndarray) -> int:
    """The distance of two pages in rows, where those of a page follow each other; 0 if it is no number of rows."""
    page, (page_stride, stride, *_) = int(x.shape[1]), x.strides
    if page == 1 or len(x) == 1:
        return page
    return int(page_stride // stride) if stride > 0 and page_stride > 0 and page_stride % stride == 0 else 0


@dataclass(frozen=True)
class PagedSizes:
    """What a paged cache holds."""

    n_pages: int
    page: int
    kv_heads: int
    head_dim: int
    value_dim: int
    dtype: np.dtype
    shared: bool

    def shown(self, sequences: int, free: int) -> str:
        """The arguments of the cache and what it holds, for its repr."""
        value_dim = "" if self.value_dim == self.head_dim else f", value_dim={self.value_dim}"
        return (f"n_pages={self.n_pages}, page={self.page}, kv_heads={self.kv_heads}, head_dim={self.head_dim}"
                f"{value_dim}, dtype={self.dtype.name}{', shared=True' * self.shared}; {sequences} sequences, {free} "
                "pages free")


def paged_sizes(
        n_pages: object, page: object, kv_heads: object, head_dim: object, value_dim: object, dtype: Any,
        shared: object) -> PagedSizes:
    """The arguments of the constructor."""
    sizes = {name: integer(name, size, low, MAX_SIZE) for name, size, low in (
        ("n_pages", n_pages, 0), ("page", page, 1), ("kv_heads", kv_heads, 0), ("head_dim", head_dim, 0),
        ("value_dim", head_dim if value_dim is None else value_dim, 0))}
    return PagedSizes(**sizes, dtype=row_dtype(dtype),
                      shared=check_shared(shared, sizes["head_dim"], sizes["value_dim"]))


def sequence_ids(
        name: str, ids: object, known: Any, issued: int, once: bool = False, one: bool = False) -> list[int]:
    """Ids of sequences that the cache holds, as a list; one id counts as a list of it."""
    given = integers(name, ids)
    if given.ndim > (0 if one else 1):
        raise ValueError(f"{name} has shape {given.shape}; wanted an id{'' if one else ' or a list of ids'}")
    found: list[int] = given.reshape(-1).tolist()
    for i in found:
        if i not in known:
            state = "was freed" if 0 <= i < issued else "was never added"
            raise ValueError(f"{name} names sequence {i}, which {state}; wanted what add() or fork() gave")
    if once and len(set(found)) < len(found):
        twice = next(i for i in found if found.count(i) > 1)
        raise ValueError(f"{name} names sequence {twice} twice; wanted each once")
    return found


def counts_of(name: str, counts: object, tokens: int, of: str, sequences: int) -> np.ndarray:
    """How many of the packed tokens each sequence has; by default all have the same number."""
    if counts is None:
        if tokens % sequences if sequences else tokens:
            raise ValueError(f"{of} has {tokens} tokens for {sequences} sequences; wanted a multiple, or {name}= with "
                             "the number of each")
        return np.full(sequences, tokens // sequences if sequences else 0, INT64)
    found = integers(name, counts, 0)
    check_fits(name, found.shape, (sequences,), "(len(ids),)", exact=1)
    if found.sum() != tokens:
        raise ValueError(f"{name} sums to {found.sum()}; wanted {tokens}, the tokens of {of}")
    return found


def paged_query(query: object, q_lengths: object, sizes: PagedSizes, sequences: int) -> np.ndarray:
    """How many rows of a packed query each sequence has."""
    x = as_array("query", query)
    if x.ndim != 3:
        raise ValueError(f"query has {x.ndim} axes, shape {x.shape}; wanted (tokens, q_heads, head_dim)")
    check_groups("query", x.shape[1], "the cache", sizes.kv_heads, lambda: f"query {x.shape}")
    if x.shape[2] != sizes.head_dim:
        raise ValueError(f"query has head_dim {x.shape[2]}, the cache has {sizes.head_dim}; wanted equal: query "
                         f"{x.shape}")
    return counts_of("q_lengths", q_lengths, len(x), "query", sequences)


def paged_tokens(
        key: object, value: object, lengths: object, sizes: PagedSizes, sequences: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Packed keys and values (tokens, heads, dim), and how many of them each sequence has."""
    found = given_rows(key, value, sizes)
    for name, x, dim in zip(("key", "value"), found, (sizes.head_dim, sizes.value_dim), strict=True):
        wanted = len(found[0]) if found[0].ndim == 3 else "tokens", sizes.kv_heads, dim
        if x.shape != wanted:
            raise ValueError(f"{name} has shape {x.shape}; wanted (tokens, kv_heads, dim) = "
                             f"({', '.join(map(str, wanted))})")
    return *found, counts_of("lengths", lengths, len(found[0]), "key", sequences)


def lengths_left(lengths: object, ids: list[int], held: Any) -> list[int]:
    """How many of its first tokens each sequence keeps: no more than it has, `held`."""
    found = integers("lengths", lengths, 0)
    check_fits("lengths", found.shape, (len(ids),), "an integer or (len(ids),)")
    kept: list[int] = np.broadcast_to(found, (len(ids),)).tolist()
    for i, length in zip(ids, kept, strict=True):
        if length > held[i]:
            raise ValueError(f"lengths asks for {length} tokens of sequence {i}, which has {held[i]}; wanted no more")
    return kept


def check_room(needed: int, free: int, sizes: PagedSizes) -> None:
    """Raise where there are not enough free pages."""
    if needed > free:
        raise MemoryError(f"{needed} more pages of {sizes.page} tokens are needed, and {free} of {sizes.n_pages} are "
                          "free; nothing was appended")
