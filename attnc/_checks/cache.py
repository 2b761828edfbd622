"""Check the arguments of the KV cache: its sizes, the tokens that come, and which of them stay."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from .arrays import FLOAT16, FLOAT32, FLOAT64, as_array, check_fits, describe, float_array
from .attention import Args
from .options import INT64, integers
from .scalars import LAYOUTS, check_choice, check_window, integer

INT8 = np.dtype(np.int8)
MAX_SIZE = 2**40


@dataclass(frozen=True)
class CacheSizes:
    """What a cache holds: rows (batch, kv_heads, capacity, dim) of a dtype, and how many keys back a row looks."""

    batch: int
    kv_heads: int
    head_dim: int
    value_dim: int
    capacity: int
    dtype: np.dtype
    window: tuple[int, int | None] | None
    shared: bool

    def shown(self, lengths: np.ndarray) -> str:
        """The arguments of a cache and how many tokens it has, for its repr."""
        value_dim = "" if self.value_dim == self.head_dim else f", value_dim={self.value_dim}"
        window = "" if self.window is None else f", window={self.window}"
        low, high = lengths.min(initial=MAX_SIZE), lengths.max(initial=0)
        tokens = f"{high} tokens" if low >= high else f"{low} to {high} tokens"
        return (f"batch={self.batch}, kv_heads={self.kv_heads}, head_dim={self.head_dim}{value_dim}, "
                f"capacity={self.capacity}, dtype={self.dtype.name}{window}{', shared=True' * self.shared}; {tokens}")


def cache_sizes(
        batch: object, kv_heads: object, head_dim: object, value_dim: object, capacity: object, dtype: Any,
        window: object, shared: object) -> CacheSizes:
    """The arguments of the constructor."""
    value_dim = head_dim if value_dim is None else value_dim
    sizes = {name: integer(name, size, 0, MAX_SIZE) for name, size in (
        ("batch", batch), ("kv_heads", kv_heads), ("head_dim", head_dim), ("value_dim", value_dim))}
    is_shared = check_shared(shared, sizes["head_dim"], sizes["value_dim"])
    sizes["capacity"] = integer("capacity", capacity, 1, MAX_SIZE)
    dtype = row_dtype(dtype, int8=True)
    bounds = None if window is None else check_window(window)
    if bounds is not None:
        left, right = bounds
        if left is None:
            raise ValueError(f"window is {bounds}; wanted a bounded number of keys to the left: others are never "
                             "dropped")
        if left >= sizes["capacity"]:
            raise ValueError(f"window looks {left} keys back and capacity is {sizes['capacity']}; wanted a capacity of "
                             f"at least {left + 1}, and one more for each further row of a query")
        bounds = left, right
    return CacheSizes(**sizes, dtype=dtype, window=bounds, shared=is_shared)


def check_shared(shared: object, head_dim: int, value_dim: int) -> bool:
    """Whether values are the first columns of the keys."""
    if not isinstance(shared, (bool, np.bool_)):
        raise TypeError(f"shared must be True or False, got {describe(shared)}")
    if shared and value_dim > head_dim:
        raise ValueError(f"value_dim is {value_dim} and head_dim {head_dim}; wanted at most head_dim where values are "
                         "the first columns of the keys")
    return bool(shared)


def given_rows(key: object, value: object, sizes: Any) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values of new tokens as floats; those of a shared cache have no values of their own."""
    keys = float_array("key", key)
    if sizes.shared:
        if value is not None:
            raise TypeError("value was given to a cache whose values are the first columns of its keys; "
                            "wanted append(key)")
        value = keys[..., :sizes.value_dim]
    return keys, float_array("value", value)


def row_dtype(dtype: Any, int8: bool = False) -> np.dtype:
    """The dtype in which a cache holds its rows, in native byte order."""
    try:
        if dtype is None:       # which NumPy takes for float64
            raise TypeError
        dtype = np.dtype(dtype)
    except TypeError:
        raise TypeError(f"dtype must be a dtype, got {describe(dtype)}") from None
    dtype = dtype if dtype.name == "bfloat16" else dtype.newbyteorder("=")
    if dtype not in (FLOAT16, FLOAT32, FLOAT64) and dtype.name != "bfloat16" and not (int8 and dtype == INT8):
        wanted = "bfloat16, float64 or int8" if int8 else "bfloat16 or float64"
        raise TypeError(f"dtype is {dtype.name}; wanted float32, float16, {wanted}")
    found: np.dtype = dtype
    return found


def append_args(
        key: object, value: object, counts: object, layout: object, sizes: CacheSizes, lengths: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows as (batch, kv_heads, tokens, dim) views, and how many of them count in each batch element."""
    check_choice("layout", layout, LAYOUTS)
    key, value = given_rows(key, value, sizes)
    if layout == "bnhd" and key.ndim == value.ndim == 4:
        key, value = key.swapaxes(1, 2), value.swapaxes(1, 2)
    for name, x, dim in (("key", key, sizes.head_dim), ("value", value, sizes.value_dim)):
        wanted: tuple[object, ...] = (sizes.batch, sizes.kv_heads, key.shape[2] if key.ndim == 4 else "tokens", dim)
        if x.ndim != 4 or x.shape != wanted:
            order = "(batch, kv_heads, tokens, dim)" if layout == "bhnd" else "(batch, tokens, kv_heads, dim)"
            shown = x.shape if layout == "bhnd" or x.ndim != 4 else x.swapaxes(1, 2).shape
            wanted = wanted if layout == "bhnd" else (wanted[0], wanted[2], wanted[1], wanted[3])
            raise ValueError(f"{name} has shape {shown}; wanted {order} = ({', '.join(map(str, wanted))})")
    tokens = key.shape[2]
    counts = per_element("lengths", tokens if counts is None else counts, 0, tokens, sizes)
    full = counts > sizes.capacity if sizes.window is not None else lengths + counts > sizes.capacity
    if full.any():
        i = int(np.flatnonzero(full)[0])
        held = f"holds {lengths[i]} tokens" if sizes.window is None else "has a window"
        raise ValueError(f"{counts[i]} more tokens do not fit: batch element {i} {held}, capacity is {sizes.capacity}; "
                         "nothing was appended")
    if sizes.dtype == INT8:
        for name, x in (("key", key), ("value", value)):
            within = np.arange(tokens)[:, None] < counts[:, None, None, None]
            with np.errstate(over="ignore"):
                finite = np.isfinite(x.astype(FLOAT32, copy=False))
            if not (finite | ~within).all():
                raise ValueError(f"{name} has entries that are not finite as float32; int8 rows are finite; nothing "
                                 "was appended")
    return key, value, counts


def truncate_args(lengths: object, sizes: CacheSizes, held: np.ndarray, oldest: np.ndarray) -> np.ndarray:
    """The new lengths: at most the old ones, and with every key that their windows reach.

    `oldest` is the first token of each batch element whose row no later one has taken.
    """
    lengths = per_element("lengths", lengths, 0, 2**62, sizes)
    for i in np.flatnonzero(lengths > held)[:1]:
        raise ValueError(f"lengths asks for {lengths[i]} tokens in batch element {i}, which holds {held[i]}; "
                         "wanted no more")
    if sizes.window is not None:
        for i in np.flatnonzero(np.minimum(oldest, lengths) > np.maximum(lengths - sizes.window[0], 0))[:1]:
            raise ValueError(f"lengths asks for {lengths[i]} tokens in batch element {i}, whose window needs tokens "
                             f"before {oldest[i]}, which later ones have replaced")
    return lengths


def reorder_args(indices: object, sizes: CacheSizes) -> np.ndarray:
    """The batch element whose rows each one takes."""
    indices = as_array("indices", indices, INT64)
    if indices.shape != (sizes.batch,):
        raise ValueError(f"indices has shape {indices.shape}; wanted (batch,) = ({sizes.batch},)")
    return integers("indices", indices, 0, max(sizes.batch - 1, 0))


def keep_args(indices: object, sizes: CacheSizes, held: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The slots that stay, (batch, kv_heads, n) in ascending order and 0 behind them, and how many of each element."""
    check_rows_stay("keep", sizes)
    given = as_array("indices", indices, INT64)
    lead = sizes.batch, sizes.kv_heads
    if given.ndim != 3 or given.shape[:2] != lead:
        raise ValueError(f"indices has shape {given.shape}; wanted (batch, kv_heads, n) = ({lead[0]}, {lead[1]}, n)")
    slots = integers("indices", given, -1)
    used = slots >= 0
    counts = used.sum(-1)
    for i, head in np.argwhere((used[..., 1:] & ~used[..., :-1]).any(-1))[:1]:
        raise ValueError(f"indices has a slot behind -1 in batch element {i}, head {head}; wanted -1 at the end only")
    for i, head in np.argwhere(counts != counts[:, :1])[:1]:
        raise ValueError(f"indices names {counts[i, head]} slots in batch element {i}, head {head}, and {counts[i, 0]} "
                         "in head 0; wanted the same number for all heads of a batch element")
    for i, head, n in np.argwhere(slots >= held[:, None, None])[:1]:
        raise ValueError(f"indices names slot {slots[i, head, n]} of batch element {i}, which holds {held[i]} tokens")
    slots = np.sort(np.where(used, slots, np.iinfo(np.int64).max), axis=-1)
    for i, head, n in np.argwhere((slots[..., 1:] == slots[..., :-1]) & used[..., 1:])[:1]:
        raise ValueError(f"indices names slot {slots[i, head, n]} twice in batch element {i}, head {head}")
    return np.where(used, slots, 0), np.array(counts[:, :1].sum(-1))


def check_rows_stay(method: str, sizes: CacheSizes) -> None:
    """Raise where a method speaks of rows, and rows move."""
    if sizes.window is not None:
        raise ValueError(f"{method} was asked of a cache with a window, whose rows move; wanted a cache without one")


def check_no_distances(**options: object) -> None:
    """Raise where the distances of rows are not those of their tokens."""
    for name, given in options.items():
        if given is not None:
            raise ValueError(f"{name} was given to a cache that has left tokens out, and goes by the distance of rows; "
                             "wanted a bias")


def check_attend(sizes: CacheSizes, **options: object) -> None:
    """Raise for options that name positions, in a cache with a window, whose rows move."""
    for name, given in options.items():
        if sizes.window is not None and given is not None:
            raise ValueError(f"{name} was given to a cache with a window, whose rows move; wanted it left out")


def check_cache_want(a: Args, sizes: CacheSizes, lengths: np.ndarray, oldest: np.ndarray) -> None:
    """Raise for results per position in a cache with a window, and for a query whose window reaches dropped rows."""
    for name in a.want:
        if name != "lse":
            raise ValueError(f"want={name!r} has no meaning in a cache with a window, whose rows move; wanted 'lse' or "
                             "nothing")
    left = sizes.window[0] if sizes.window else 0
    rows = np.where(oldest > 0, lengths - oldest - left, a.q_len)
    for i in np.flatnonzero(rows < a.q_len)[:1]:
        raise ValueError(f"query has length {a.q_len}, and its first row looks {left} keys back; wanted at "
                         f"most {max(rows[i], 0)} rows: tokens before {oldest[i]} of batch element {i} are gone")


def per_element(name: str, x: object, low: int, high: int, sizes: CacheSizes) -> np.ndarray:
    """An int for all batch elements, or one for each, as an array (batch,) of its own."""
    x = integers(name, x, low, high)
    check_fits(name, x.shape, (sizes.batch,), "an integer or (batch,)")
    return np.array(np.broadcast_to(x, (sizes.batch,)), INT64)
