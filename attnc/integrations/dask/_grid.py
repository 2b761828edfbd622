"""Divides dask arrays into blocks for attention, with the part of each argument for a pair of query and key blocks.

All arguments are checked before any computation, by the checks of `attnc.attention` on stand-ins without memory. A
block of keys that no row of a query block may see by causal, window, lengths or block_mask is skipped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import TYPE_CHECKING, Any

import dask.array as da
import numpy as np

from ..._checks import attention_args
from ..._checks.options import keys_within

if TYPE_CHECKING:
    from ..._checks import Args

# The last axes of each option (h: query heads, g: kv heads, i: rows, j: keys, d: distance of row and key, r: table
# rows, c: head_dim); axes before them are batch axes.
AXES = {"mask": "hij", "bias": "hij", "relative_bias": "hd", "relative_index": "d", "relative_key": "hrc",
        "relative_query": "hrc", "key_mask": "j", "k_positions": "gj", "alibi_slopes": "h",
        "sinks": "h", "q_segments": "i", "k_segments": "j", "q_lengths": "", "kv_lengths": "", "q_offset": ""}
LENGTHS = ("q_lengths", "kv_lengths", "q_offset")    # options that decide which blocks there are
POSITIONS = ("causal", "window", "alibi_slopes")    # options that depend on the position of a row


@dataclass
class Block:
    """One block of an axis: its number, and its indices start .. stop."""

    number: int
    start: int
    stop: int

    @property
    def places(self) -> slice:
        return slice(self.start, self.stop)

    @property
    def size(self) -> int:
        return self.stop - self.start


def blocks(chunks: tuple[int, ...]) -> list[Block]:
    """The blocks of an axis with these chunks."""
    ends = np.cumsum((0, *chunks)).tolist()
    return [Block(n, start, stop) for n, (start, stop) in enumerate(pairwise(ends))]


class Grid:
    """Inputs with matching chunks, and the options of each pair of blocks.

    Attributes
    ----------
    args : Args
        Checked arguments of inputs of these shapes and dtypes.
    query, key, value : dask arrays (batch..., heads, length, dim), value None if there is none
    batch, heads, rows, keys : the blocks of each batch axis (a list for each), of kv heads, of queries and of keys
    """

    def __init__(self, query: da.Array, key: da.Array, value: da.Array | None, options: dict[str, Any]):
        given = {"query": query, "key": key} | ({} if value is None else {"value": value})
        for name, array in given.items():
            _check_chunks(name, array)
        for name in LENGTHS:
            if isinstance(options.get(name), da.Array):
                raise TypeError(f"{name} is a dask array; wanted an int or a NumPy array: it decides which blocks "
                                "there are")
        if isinstance(options.get("key_indices"), da.Array):
            raise TypeError("key_indices is a dask array; wanted a NumPy array: its lists are cut by blocks of keys")
        block_mask = options.get("block_mask")
        if isinstance(block_mask, tuple | list) and any(isinstance(x, da.Array) for x in block_mask):
            raise TypeError("the mask of block_mask is a dask array; wanted a NumPy array: it decides which blocks "
                            "there are")
        self.args = a = attention_args(_empty(query), _empty(key), None if value is None else _empty(value),
                                       **{name: _empty(option) for name, option in options.items()})
        self.options = {name: _array(option) if name in AXES else option for name, option in options.items()
                        if option is not None and name not in ("layout", "block_mask", "key_indices")}
        arrays = [array[None] if a.two_d else array.swapaxes(-2, -3) if a.layout == "bnhd" else array
                  for array in given.values()]
        self.query, self.key, *rest = _fitting(arrays, a)
        self.value = rest[0] if rest else None
        lead = len(a.batch)
        self.batch = [blocks(max((x.chunks[x.ndim - 3 - lead + axis] for x in (self.query, self.key)
                                  if x.ndim - 3 >= lead - axis), key=sum)) for axis in range(lead)]
        self.heads, self.rows = blocks(self.key.chunks[-3]), blocks(self.query.chunks[-2])
        self.keys = blocks(self.key.chunks[-2])
        self.q_length = np.asarray(a.q_len if a.q_lengths is None else a.q_lengths)
        self.kv_length = np.asarray(a.kv_len if a.kv_lengths is None else a.kv_lengths)
        self.offset = np.asarray(self.kv_length - self.q_length if a.q_offset is None else a.q_offset)

    def row_blocks(self) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], tuple[Block, ...], Block, Block]]:
        """Every block of rows: its numbers on each axis, the sizes of the axes before the length, and its blocks."""
        for batch, head, rows in product(product(*self.batch), self.heads, self.rows):
            place = (*(block.number for block in batch), head.number, rows.number)
            yield place, (*(block.size for block in batch), head.size * self.args.heads_per_kv), batch, head, rows

    def q_heads(self, head: Block) -> slice:
        """The query heads that read a block of kv heads."""
        return slice(head.start * self.args.heads_per_kv, head.stop * self.args.heads_per_kv)

    def cut(self, array: da.Array, batch: Sequence[Block], heads: slice | None, length: Block) -> da.Array:
        """The block of an input; batch axes of length 1 broadcast."""
        lead = [slice(None) if size == 1 else block.places
                for size, block in zip(array.shape[:-3], batch[len(batch) - (array.ndim - 3):], strict=True)]
        return array[(*lead, heads, length.places)]

    def inputs(self, batch: Sequence[Block], head: Block, rows: Block, keys: Block) -> list[da.Array | None]:
        """Query, key and value of a pair of blocks; the query, and so each result, has the accumulation dtype."""
        query = self.cut(self.query, batch, self.q_heads(head), rows).astype(self.args.acc)
        rest = [None if x is None else self.cut(x, batch, head.places, keys) for x in (self.key, self.value)]
        return [query, *rest]

    def seen(self, batch: Sequence[Block], head: Block, rows: Block) -> list[Block]:
        """The blocks of keys that any row of the block may see by position and block mask."""
        a = self.args
        causal = a.causal and a.k_positions is None        # keys of any position may be in a block
        left, right = (None, None) if a.window is None or a.k_positions is not None else a.window
        first, last = rows.start + self.offset.min(), rows.stop - 1 + self.offset.max()
        if rows.start >= self.q_length.max(initial=0):
            return []
        return [keys for keys in self.keys
                if keys.start < self.kv_length.max(initial=0) and not (causal and keys.start > last)
                and not (right is not None and keys.start > last + right)
                and not (left is not None and keys.stop - 1 < first - left)
                and (a.block_mask is None or self.block_mask(batch, head, rows, keys)[0].any())]

    def block_mask(self, batch: Sequence[Block], head: Block, rows: Block, keys: Block) -> tuple[Any, ...]:
        """The part of the mask over blocks, and `Args.block_sizes`: a pair of blocks may begin within a block of it."""
        a = self.args
        assert a.block_mask is not None and a.block_sizes is not None
        of_rows, of_keys, _, _ = a.block_sizes
        cells = [slice(part.start // size, -(-part.stop // size)) for part, size in ((rows, of_rows), (keys, of_keys))]
        mask = _cut_option(a.block_mask, "hij", {"h": self.q_heads(head), "i": cells[0], "j": cells[1]}, batch)
        return mask, (of_rows, of_keys, rows.start % of_rows, keys.start % of_keys)

    def part(self, batch: Sequence[Block], head: Block, rows: Block, keys: Block) -> dict[str, Any]:
        """The options of a pair of blocks, relative to the first row and key of the pair."""
        found = {name: option for name, option in self.options.items() if name not in AXES}
        zero = self.args.q_len - 1      # the distance 0 of a relative bias
        within = {"h": self.q_heads(head), "g": head.places, "i": rows.places, "j": keys.places, "r": slice(None),
                  "c": slice(None),
                  "d": slice(zero + keys.start - rows.stop + 1, zero + keys.stop - rows.start)}
        for name, option in self.options.items():
            if name in AXES and name not in LENGTHS:
                found[name] = _cut_option(option, AXES[name], within, batch)
        if self.args.q_lengths is not None:
            found["q_lengths"] = np.clip(_of(self.q_length, batch) - rows.start, 0, rows.size)
        if self.args.kv_lengths is not None:
            found["kv_lengths"] = np.clip(_of(self.kv_length, batch) - keys.start, 0, keys.size)
        if any(found.get(name) not in (None, False) if name != "alibi_slopes" else name in found for name in POSITIONS):
            first_key = keys.start if self.args.k_positions is None else 0
            found["q_offset"] = _of(self.offset, batch) + (rows.start - first_key)
        lists = self.args.key_indices
        if lists is not None:
            heads = head.places if lists.shape[-3] == self.args.kv_heads else self.q_heads(head)
            every = {"h": heads, "i": slice(None), "n": slice(None)}
            lists = _cut_option(lists[..., rows.places, :], "hin", every, batch)
            found["key_indices"] = keys_within(lists, keys.start, keys.stop)
        if self.args.block_mask is not None:
            found["block_mask"] = self.block_mask(batch, head, rows, keys)
        return found


def args_of(query: np.ndarray, key: np.ndarray, value: np.ndarray | None, options: dict[str, Any], want: Any) -> Args:
    """The arguments of a pair of blocks, of which `options` come from `part`."""
    options = dict(options)
    block_mask = options.pop("block_mask", None)
    a = attention_args(query, key, value, **options, want=want)
    if block_mask is not None:
        a.block_mask, a.block_sizes = block_mask
    return a


def _of(array: np.ndarray, batch: Sequence[Block]) -> np.ndarray:
    """The batch blocks of an array over the batch axes."""
    found: np.ndarray = _cut_option(array, "", {}, batch)
    return found


def _cut_option(option: Any, axes: str, within: dict[str, slice], batch: Sequence[Block]) -> Any:
    """The part of an option that belongs to a pair of blocks; axes of length 1 and missing axes broadcast."""
    if np.ndim(option) == 0:
        return option
    last = axes[max(0, len(axes) - option.ndim):]
    lead = option.ndim - len(last)
    places = [*(block.places for block in batch[len(batch) - lead:]), *(within[axis] for axis in last)]
    return option[tuple(slice(None) if size == 1 else place for size, place in zip(option.shape, places, strict=True))]


def _check_chunks(name: str, array: Any) -> None:
    if not isinstance(array, da.Array):
        raise TypeError(f"{name} is {type(array).__name__}; wanted a dask array (dask.array.from_array makes one)")
    if any(np.isnan(size) for size in array.shape):
        raise ValueError(f"{name} has chunks of unknown size, shape {array.shape}; wanted known ones: "
                         f"call {name}.compute_chunk_sizes() first")


def _empty(array: Any) -> Any:
    """For the checks, an array of the same shape and dtype that takes no memory; what is no dask array as it is."""
    return np.broadcast_to(np.zeros((), array.dtype), array.shape) if isinstance(array, da.Array) else array


def _array(option: Any) -> Any:
    """What can be cut: lists become arrays."""
    return option if isinstance(option, da.Array) else np.asarray(option)


def _fitting(arrays: list[da.Array], a: Args) -> list[da.Array]:
    """Rechunk to match: equal chunks of batch axes, whole groups of heads, whole depths, values like keys."""
    lead = len(a.batch)
    chunks = {}
    for axis in range(lead):
        found = [x.chunks[axis - lead + x.ndim - 3] for x in arrays if x.ndim - 3 >= lead - axis]
        chunks[axis] = max(found, key=lambda sizes: (sum(sizes), len(sizes)))
    heads_per_kv = a.heads_per_kv
    heads = arrays[0].chunks[-3]
    whole = all(size % heads_per_kv == 0 for size in heads)
    heads = tuple(size // heads_per_kv for size in heads) if whole else arrays[1].chunks[-3]
    fitted = []
    for n, x in enumerate(arrays):
        own = tuple(chunks[lead - (x.ndim - 3) + axis] if x.shape[axis] != 1 else (1,) for axis in range(x.ndim - 3))
        length = x.chunks[-2] if n < 2 else arrays[1].chunks[-2]
        own_heads = tuple(size * heads_per_kv for size in heads) if n == 0 else heads
        fitted.append(x.rechunk((*own, own_heads, length, (x.shape[-1],))))
    return fitted
