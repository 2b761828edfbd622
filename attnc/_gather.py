"""Attention over the keys that `key_indices` names: each row is a batch element, whose keys lie in the rows it names.

The kernels read these rows in place (`key_rows`); options over keys are gathered to the n columns of a row.
"""

from __future__ import annotations

import copy
import math

import numpy as np

from . import _call
from ._checks import Args
from ._slices import offset_of, part

ELEMENTS = 1 << 22      # of a gathered option, or of lists, in one call of the kernels
OVER_KEYS = ("mask", "block_mask", "key_mask", "bias", "relative_bias", "q_segments")


def attend(a: Args, output: np.ndarray, wanted: dict[str, np.ndarray], key_rows: np.ndarray | None) -> None:
    """Write the output (..., q_heads, q_len, value_dim), and lse and statistics of rows, `lse_shape`.

    `key_rows` are the rows of key and value in which all keys lie, None: each in its own.
    """
    assert a.key_indices is not None and a.value is not None
    heads, _, n = a.key_indices.shape[-3:]
    # Lists of query heads that share a key head: a call for each key head, of which all heads read that one.
    calls = a.kv_heads if heads == a.q_heads != a.kv_heads else 1
    results = {name: x.reshape(*a.batch, a.q_heads, a.q_len) for name, x in wanted.items()}
    if calls == 1 and n * math.prod(a.batch) * a.q_heads * a.q_len <= ELEMENTS:
        if a.q_len:
            _attend(a, output, results, key_rows)
        return
    gathered = any(getattr(a, name) is not None for name in OVER_KEYS)
    row = n * math.prod(a.batch) * (a.q_heads if gathered else heads)
    step = max(1, ELEMENTS // max(row, 1))
    for i in range(calls):
        group = slice(i * a.q_heads // calls, (i + 1) * a.q_heads // calls)
        for first in range(0, a.q_len, step):
            rows = slice(first, min(first + step, a.q_len))
            some = part(a, heads=group, rows=rows)
            some.key, some.value, its = a.key, a.value, key_rows       # whole: key_rows may name any row
            if calls > 1:
                some.key, some.value = a.key[..., i:i + 1, :, :], a.value[..., i:i + 1, :, :]
                its = None if key_rows is None else key_rows[..., i:i + 1, :] if key_rows.shape[-2] > 1 else key_rows
            _attend(some, output[..., group, rows, :], {name: x[..., group, rows] for name, x in results.items()}, its)


def _attend(a: Args, output: np.ndarray, wanted: dict[str, np.ndarray], rows: np.ndarray | None) -> None:
    """One call of the kernels."""
    keys, counts = _used(a)
    b = _rows_as_batch(a, keys, counts)
    shape = (*b.batch, b.q_heads, 1)
    found = {name: np.empty(shape, np.int64 if name == "argmax" else a.acc) for name in wanted if name != "lse"}
    request = None
    if found:
        top = np.empty((*shape, 1), a.acc) if "argmax" in found else None
        request = _call.RowRequest(entropy=found.get("entropy"), max=found.get("max"), top=top,
                                   top_keys=found.get("argmax"), k=int("argmax" in found))
    lse = wanted["lse"].swapaxes(-1, -2)[..., None] if "lse" in wanted else None
    _call.run("attend", b, request, None, value=b.value, out=output.swapaxes(-2, -3)[..., None, :], lse=lse,
              key_rows=keys if rows is None else np.ascontiguousarray(_pick(rows[..., None, :, :], keys)))
    if "argmax" in found:
        places = found["argmax"]
        named = _pick(_each_head(keys, a), np.maximum(places, 0)) if keys.shape[-1] else places
        found["argmax"] = np.where(places < 0, -1, named)
    for name, x in found.items():
        wanted[name][...] = x[..., 0].swapaxes(-1, -2)


def _used(a: Args) -> tuple[np.ndarray, np.ndarray | None]:
    """The keys of each row (..., q_len, heads, n), and how many of the first of them count (None: all)."""
    assert a.key_indices is not None
    keys = a.key_indices.swapaxes(-2, -3)
    if a.kv_len == 0:
        keys = keys[..., :0]        # all are -1, and options over keys have no element to pick
    n = keys.shape[-1]
    unused = np.count_nonzero(keys < 0, -1) if n and (keys[..., 0] < 0).any() else None
    if unused is None and a.kv_lengths is None:
        return keys, None
    counts = np.full(keys.shape[:-1], n) if unused is None else n - unused
    if a.kv_lengths is not None:
        counts = np.count_nonzero((keys >= 0) & (keys < a.kv_lengths[..., None, None, None]), -1)
    if unused is not None:
        places = np.minimum(np.arange(n) + unused[..., None], n - 1)
        keys = np.maximum(np.take_along_axis(keys, places, -1), 0)
    return keys, counts


def _rows_as_batch(a: Args, keys: np.ndarray, counts: np.ndarray | None) -> Args:
    """Arguments with the axis of rows as the last batch axis, one row, and n keys."""
    assert a.value is not None
    heads, n = keys.shape[-2:]
    b = copy.copy(a)
    b.two_d = False
    b.batch, b.q_len, b.kv_len, b.kv_heads = (*a.batch, a.q_len), 1, n, a.kv_heads if heads == 1 else heads
    b.query = a.query.swapaxes(-2, -3)[..., None, :]
    b.key, b.value = a.key[..., None, :, :, :], a.value[..., None, :, :, :]
    if b.kv_heads != a.kv_heads:
        b.key, b.value = (np.broadcast_to(x, (*x.shape[:-3], heads, *x.shape[-2:])) for x in (b.key, b.value))
    if a.q_lengths is not None:
        b.q_lengths = (np.arange(a.q_len) < a.q_lengths[..., None]).astype(np.int64)
    b.kv_lengths = None if counts is None else counts.max(-1, initial=0)
    b.q_offset = b.k_positions = None
    if a.causal or a.window is not None or a.alibi_slopes is not None:      # what reads a position
        b.q_offset = np.asarray(offset_of(a))[..., None] + np.arange(a.q_len)
        b.k_positions = keys
        if a.k_positions is not None:
            b.k_positions = _pick(a.k_positions[..., None, :, :] if a.k_positions.ndim > 1 else a.k_positions, keys)
    if a.alibi_slopes is not None and a.alibi_slopes.ndim > 1:
        b.alibi_slopes = a.alibi_slopes[..., None, :]
    b.mask = _seen(a, keys, counts)
    for name, x in (("bias", a.bias), ("relative_bias", a.relative_bias)):
        if x is not None:
            setattr(b, name, _pick(_rows_first(x), _each_head(keys, a))[..., None, :])
    b.key_indices = b.block_mask = b.key_mask = b.q_segments = b.k_segments = None
    return b


def _seen(a: Args, keys: np.ndarray, counts: np.ndarray | None) -> np.ndarray | None:
    """What the masks say of each row's keys, (..., q_len, heads, 1, n)."""
    seen: list[np.ndarray] = []
    named = _each_head(keys, a)
    if counts is not None and (counts != counts[..., :1]).any():
        seen.append(_each_head(np.arange(keys.shape[-1]) < counts[..., None], a))
    if a.mask is not None:
        seen.append(_pick(_rows_first(a.mask), named))
    if a.block_mask is not None and a.block_sizes is not None:
        of_rows, of_keys, row, key = a.block_sizes
        cells = a.block_mask[..., (np.arange(a.q_len) + row) // of_rows, :]
        seen.append(_pick(_rows_first(cells), (named + key) // of_keys))
    if a.key_mask is not None:
        seen.append(_pick(a.key_mask[..., None, None, :], named))
    if a.q_segments is not None and a.k_segments is not None:
        own = a.q_segments[..., None, None]
        seen.append((_pick(a.k_segments[..., None, None, :], named) == own) & (own >= 0))
    if not seen:
        return None
    every = np.logical_and.reduce(np.broadcast_arrays(*seen)) if len(seen) > 1 else seen[0]
    return every[..., None, :]


def _rows_first(x: np.ndarray) -> np.ndarray:
    """An option that broadcasts to (..., heads, rows, keys) as one that does to (..., rows, heads, keys)."""
    return x.reshape(*[1] * (3 - x.ndim), *x.shape).swapaxes(-2, -3)


def _each_head(keys: np.ndarray, a: Args) -> np.ndarray:
    """Lists (..., heads, n) of key heads as those of query heads; one for all stays one."""
    return keys if keys.shape[-2] in (1, a.q_heads) else np.repeat(keys, a.heads_per_kv, -2)


def _pick(x: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Elements of the last axis, all other axes broadcast; an axis of length 1 has one element for all places."""
    if x.shape[-1] == 1:
        return np.broadcast_to(x, (*x.shape[:-1], places.shape[-1]))
    rank = max(x.ndim, places.ndim)
    x, places = (y.reshape(*[1] * (rank - y.ndim), *y.shape) for y in (x, places))
    return np.take_along_axis(x, places, -1)
