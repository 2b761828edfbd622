"""Check the options of attention that are arrays against the sizes of its inputs."""

from __future__ import annotations

import numbers
from typing import TYPE_CHECKING

import numpy as np

from .._types import Shape
from .arrays import as_array, check_fits, describe, float_array, native_floats, saturated
from .output import check_apart
from .scalars import MAX_OFFSET, integer

if TYPE_CHECKING:
    from .attention import Args

BOOL, INT64 = np.dtype(np.bool_), np.dtype(np.int64)


def check_mask(mask: object, a: Args) -> np.ndarray:
    """The mask, True where a row may see a key."""
    mask = bools("mask", mask, "attend", "an additive float mask goes to bias=, a 0/1 mask is mask.astype(bool)")
    check_fits("mask", mask.shape, *score_axes(a))
    return mask


def check_block_mask(block_mask: object, a: Args) -> tuple[np.ndarray, tuple[int, int, int, int]]:
    """The mask over blocks; rows and keys of a block, and the row and key at which the first one begins."""
    if not isinstance(block_mask, (tuple, list)) or len(block_mask) != 3:
        raise TypeError(f"block_mask must be (mask, rows, keys): a bool array over blocks and the size of a block, "
                        f"got {describe(block_mask)}")
    given, rows, keys = block_mask
    mask = bools("mask of block_mask", given, "attend", "a 0/1 mask is mask.astype(bool)")
    rows, keys = (integer(f"{name} of block_mask", size, 1, 2**62) for name, size in (("rows", rows), ("keys", keys)))
    lead, axes = ((), "") if a.two_d else ((*a.batch, a.q_heads), "batch..., q_heads, ")
    check_fits("mask of block_mask", mask.shape, (*lead, -(-a.q_len // rows), -(-a.kv_len // keys)),
               f"({axes}ceil(q_len / rows), ceil(kv_len / keys))", exact=2)
    return mask, (rows, keys, 0, 0)


def check_key_indices(key_indices: object, a: Args) -> np.ndarray:
    """The keys that each row may see, (..., heads, q_len, n): ascending, -1 first, each key once.

    Heads are those of the queries, of the keys, or one for all.
    """
    lists = integers("key_indices", key_indices, -1, a.kv_len - 1)
    heads = lists.shape[-3] if lists.ndim > 2 and lists.shape[-3] == a.kv_heads else a.q_heads
    n = lists.shape[-1] if lists.ndim else 0
    lead, axes = ((), "") if a.two_d else ((*a.batch, heads), "batch..., q_heads | kv_heads | 1, ")
    check_fits("key_indices", lists.shape, (*lead, a.q_len, n), f"({axes}q_len, n)", exact=2)
    return ascending(lists if lists.ndim > 2 else lists[None])


def ascending(lists: np.ndarray) -> np.ndarray:
    """Lists of keys in ascending order, each key once; -1 is none, and comes first. A copy unless they are so."""
    if not (lists[..., 1:] > lists[..., :-1]).all() and not _ascends_from_none(lists):
        lists = np.sort(lists, -1)
        again = lists[..., 1:] == lists[..., :-1]
        if (again & (lists[..., 1:] >= 0)).any():
            lists[..., 1:][again] = -1
            lists.sort(-1)
    return lists if lists.strides[-1] == lists.itemsize else np.ascontiguousarray(lists)


def _ascends_from_none(lists: np.ndarray) -> bool:
    """Whether lists ascend, but for -1 that is repeated."""
    return bool(((lists[..., 1:] > lists[..., :-1]) | (lists[..., 1:] == -1) & (lists[..., :-1] == -1)).all())


def keys_within(lists: np.ndarray, start: int, stop: int) -> np.ndarray:
    """The part of `ascending` lists that names keys from `start` to `stop`, counted from `start`."""
    return ascending(np.where((lists >= start) & (lists < stop), lists - start, -1))


def check_key_mask(key_mask: object, a: Args) -> np.ndarray:
    """The mask that holds for all rows of a batch element."""
    key_mask = bools("key_mask", key_mask, "attend", "a 0/1 mask is key_mask.astype(bool)")
    check_fits("key_mask", key_mask.shape, (*a.batch, a.kv_len), "(batch..., kv_len)", exact=1)
    return key_mask


def check_bias(bias: object, a: Args) -> np.ndarray:
    """The bias in its own float dtype and strides."""
    bias = native_floats("bias", bias, "; a boolean or 0/1 mask, True = attend, goes to mask=")
    check_fits("bias", bias.shape, *score_axes(a))
    return bias


def check_relative_bias(relative_bias: object, a: Args) -> np.ndarray:
    """The bias of each distance, as a view of the shape of a bias: row i, key j is entry j - i + q_len - 1."""
    x = native_floats("relative_bias", relative_bias, "")
    length = max(a.q_len + a.kv_len - 1, 0)
    axes = "(q_len + kv_len - 1,)" if a.two_d else "(batch..., q_heads, q_len + kv_len - 1)"
    check_fits("relative_bias", x.shape, (length,) if a.two_d else (*a.batch, a.q_heads, length), axes, exact=1)
    return overlapping_rows(x, a.q_len, a.kv_len)


def check_tables(index: object, key: object, query: object, a: Args
                 ) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None]:
    """The table row of each distance, and the tables that meet the queries and the keys, in their own dtype."""
    names = {"relative_index": index, "relative_key": key, "relative_query": query}
    given = [name for name, x in names.items() if x is not None]
    if index is None:
        raise ValueError(f"{given[0]} was given and relative_index was not; wanted the table row of each distance")
    if len(given) == 1:
        raise ValueError("relative_index was given without a table; wanted relative_key, relative_query or both")
    tables = check_table_rows({name: names[name] for name in given[1:]}, a)
    rows = tables[given[1]].shape[-2]
    places = integers("relative_index", index, 0, max(rows - 1, 0))
    check_fits("relative_index", places.shape, (max(a.q_len + a.kv_len - 1, 0),), "(q_len + kv_len - 1,)", exact=1)
    if places.size and not rows:
        raise ValueError(f"{given[1]} has no rows; wanted the rows that relative_index names")
    return np.ascontiguousarray(places, np.int32), tables.get("relative_key"), tables.get("relative_query")


def check_table_rows(given: dict[str, object], a: Args) -> dict[str, np.ndarray]:
    """The tables that were given, of equally many rows."""
    tables = {name: native_floats(name, x, "") for name, x in given.items()}
    rows = None
    for name, table in tables.items():
        rows = table.shape[-2] if table.ndim > 1 and rows is None else rows
        target = (rows or 0, a.head_dim) if a.two_d else (*a.batch, a.q_heads, rows or 0, a.head_dim)
        check_fits(name, table.shape, target, "(rows, head_dim)" if a.two_d else "(batch..., q_heads, rows, head_dim)",
                   exact=2)
    return tables


def check_q_offset(q_offset: object, a: Args) -> int | np.ndarray:
    """The position of the first query row: an int for all, or an array over the batch."""
    offsets = integers("q_offset", q_offset, -MAX_OFFSET, MAX_OFFSET)
    check_fits("q_offset", offsets.shape, a.batch, "an integer or (batch...)")
    return offsets if offsets.ndim else int(offsets)


def check_k_positions(k_positions: object, a: Args) -> np.ndarray:
    """The position of each key; what stands past a length is not looked at."""
    if a.q_offset is None and (a.causal or a.window is not None or a.alibi_slopes is not None):
        raise ValueError("k_positions was given with causal, window or alibi_slopes, and q_offset was not; wanted the "
                         "position of the first row, which keys of any position do not tell")
    positions = integers("k_positions", k_positions)
    target = (a.kv_len,) if a.two_d else (*a.batch, a.kv_heads, a.kv_len)
    axes = "(kv_len,)" if a.two_d else "(batch..., kv_heads, kv_len)"
    check_fits("k_positions", positions.shape, target, axes, exact=1)
    if positions.size and not (positions.min() >= 0 and positions.max() <= MAX_OFFSET):
        used = positions
        if a.kv_lengths is not None:
            used = np.where(np.arange(a.kv_len) < a.kv_lengths[..., None, None], positions, 0)
        if used.min() < 0 or used.max() > MAX_OFFSET:
            raise ValueError(f"k_positions must be from 0 to {MAX_OFFSET}, got values from {used.min()} to "
                             f"{used.max()}")
    return positions


def check_lengths(name: str, lengths: object, length: int, a: Args) -> np.ndarray:
    """Valid counts of right-padded batch elements, 0 to `length`."""
    lengths = integers(name, lengths, 0, length)
    check_fits(name, lengths.shape, a.batch, "an integer or (batch...)")
    return lengths


def check_segments(q_segments: object, k_segments: object, a: Args) -> tuple[np.ndarray, np.ndarray]:
    """The segment ids of rows and of keys."""
    check_both_segments(q_segments, k_segments)
    q_segments = integers("q_segments", q_segments)
    k_segments = integers("k_segments", k_segments)
    check_fits("q_segments", q_segments.shape, (*a.batch, a.q_len), "(batch..., q_len)", exact=1)
    check_fits("k_segments", k_segments.shape, (*a.batch, a.kv_len), "(batch..., kv_len)", exact=1)
    return q_segments, k_segments


def check_both_segments(q_segments: object, k_segments: object) -> None:
    """Raise where one was given without the other."""
    if (q_segments is None) != (k_segments is None):
        given, missing = ("k_segments", "q_segments") if q_segments is None else ("q_segments", "k_segments")
        raise ValueError(f"{given} was given and {missing} was not; wanted both or neither")


def check_alibi_slopes(slopes: object, a: Args, batch: Shape | None = None) -> np.ndarray:
    """One slope per query head, of each batch element (by default those of the arguments) if it has the batch axes."""
    slopes = _logits("alibi_slopes", slopes, a)
    batch = a.batch if batch is None else batch
    check_fits("alibi_slopes", slopes.shape, (*batch, a.q_heads), "(q_heads,) or (batch..., q_heads)", exact=1)
    return slopes


def check_sinks(sinks: object, a: Args) -> np.ndarray:
    """One logit per query head."""
    sinks = _logits("sinks", sinks, a)
    check_fits("sinks", sinks.shape, (a.q_heads,), "(q_heads,)", exact=1)
    return sinks


def check_lse(lse: object, a: Args) -> np.ndarray:
    """The given lse of each row, contiguous in the accumulation dtype; -inf for rows of padding: they see nothing."""
    if a.sinks is not None:
        raise ValueError("sinks were given with lse; wanted one of them: the lse of a row holds its sink already")
    given, lse = lse, saturated(float_array("lse", lse), a.acc)
    axes = "(q_len,)" if a.two_d else "(batch..., q_heads, q_len)"
    check_fits("lse", lse.shape, a.lse_shape, axes, exact=len(a.lse_shape))
    if a.q_lengths is not None:
        lse = np.where(np.arange(a.q_len) < a.q_lengths[..., None, None], lse, a.acc.type(-np.inf)).reshape(lse.shape)
    if a.out is not None:
        check_apart(a.out, {"lse": given})
    return np.ascontiguousarray(lse)


def score_axes(a: Args) -> tuple[Shape, str]:
    """The shape of the scores, and the names of its axes."""
    if a.two_d:
        return (a.q_len, a.kv_len), "(q_len, kv_len)"
    return (*a.batch, a.q_heads, a.q_len, a.kv_len), "(batch..., q_heads, q_len, kv_len)"


def bools(name: str, x: object, true: str, advice: str) -> np.ndarray:
    """`x`, which must be bool; what `true` means, and what else may have been meant, is for the error."""
    x = as_array(name, x, BOOL)
    if x.dtype != bool:
        raise TypeError(f"{name} must be bool, True = {true}, got {describe(x)}; {advice}")
    return x


def overlapping_rows(x: np.ndarray, q_len: int, kv_len: int, writeable: bool = False) -> np.ndarray:
    """A view (..., q_len, kv_len) of x (..., q_len + kv_len - 1) with entry ``j - i + q_len - 1`` at (i, j)."""
    if not (q_len and kv_len):
        return np.zeros((*x.shape[:-1], q_len, kv_len), x.dtype)
    rows: np.ndarray = np.lib.stride_tricks.sliding_window_view(x, kv_len, -1, writeable=writeable)
    return rows[..., ::-1, :]


def integers(name: str, x: object, low: int = -2**63, high: int = 2**63 - 1) -> np.ndarray:
    """`x` as int64, every element from `low` to `high`."""
    if isinstance(x, numbers.Integral):
        return np.array(integer(name, x, low, high), INT64)
    given, x = x, as_array(name, x, INT64)
    if x.dtype.kind not in "iu":
        came = describe(given if x.ndim == 0 else x)
        raise TypeError(f"{name} must be an integer or an array of integers, got {came}")
    if x.size and not (low <= int(x.min()) and int(x.max()) <= high):
        raise ValueError(f"{name} must be from {low} to {high}, got values from {x.min()} to {x.max()}")
    if x.dtype is INT64 and x.flags.aligned:
        return x
    return np.require(x, INT64, "A")         # aligned: the kernels read whole integers


def _logits(name: str, x: object, a: Args) -> np.ndarray:
    """Floats in the accumulation dtype; the single head of 2-D inputs may have a scalar."""
    x = saturated(float_array(name, x), a.acc)
    return x.reshape(1) if a.two_d and x.ndim == 0 else x
