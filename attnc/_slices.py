"""Slices of checked arguments: some batch elements, heads, rows and keys, with the matching part of every option."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np

from ._checks import Args
from ._checks.options import keys_within, overlapping_rows

ALL = slice(None)


def part(a: Args, *, batch: tuple[slice, ...] = (), heads: slice = ALL, rows: slice = ALL, keys: slice = ALL) -> Args:
    """Arguments of a part of the weights, with the same positions and hence the same scores; arrays are views.

    `batch` has a slice for each batch axis or is empty. `heads` has whole groups that share a key head, or one head.
    Rows and keys have step 1. Default scale and offset come from the whole.
    """
    h0, h1, _ = heads.indices(a.q_heads)
    r0, r1, _ = rows.indices(a.q_len)
    k0, k1, _ = keys.indices(a.kv_len)
    r1, k1 = max(r0, r1), max(k0, k1)
    heads, rows, keys = slice(h0, h1), slice(r0, r1), slice(k0, k1)
    kv_heads = slice(h0 // a.heads_per_kv, -(-h1 // a.heads_per_kv))
    some = copy.copy(a)
    some.two_d = False
    some.batch = tuple(len(range(*one.indices(length))) for one, length in zip(batch, a.batch, strict=True)) \
        if batch else a.batch
    some.q_len, some.kv_len, some.q_heads, some.kv_heads = r1 - r0, k1 - k0, h1 - h0, kv_heads.stop - kv_heads.start
    offset = offset_of(a)
    some.query = _cut(a.query, batch, (heads, rows, ALL))
    some.key = _cut(a.key, batch, (kv_heads, keys, ALL))
    some.key_scale = _cut_option(a.key_scale, batch, (kv_heads, keys))
    some.mask, some.bias, some.relative_bias = (
        _cut_option(x, batch, (heads, rows, keys)) for x in (a.mask, a.bias, a.relative_bias))
    if a.block_mask is not None and a.block_sizes is not None:
        of_rows, of_keys, row, key = a.block_sizes
        row, key = row + r0, key + k0
        cells = (slice(row // of_rows, -(-(row + r1 - r0) // of_rows)),
                 slice(key // of_keys, -(-(key + k1 - k0) // of_keys)))
        some.block_mask = _cut_whole(a.block_mask, batch, heads, cells)
        some.block_sizes = of_rows, of_keys, row % of_rows, key % of_keys
    if a.key_indices is not None:
        of = kv_heads if a.key_indices.shape[-3] == a.kv_heads else heads
        lists = _cut(a.key_indices[..., rows, :], batch, (of, ALL, ALL))
        some.key_indices = lists if k1 - k0 == a.kv_len else keys_within(lists, k0, k1)
    if a.relative_index is not None:
        first = k0 + a.q_len - r1           # the entry of the first key and the last row
        some.relative_index = a.relative_index[first:first + max(some.q_len + some.kv_len - 1, 0)]
        some.relative_key, some.relative_query = (
            _cut_option(x, batch, (heads, ALL, ALL)) for x in (a.relative_key, a.relative_query))
    some.key_mask, some.k_positions = (
        _cut_option(a.key_mask, batch, (keys,)), _cut_option(a.k_positions, batch, (kv_heads, keys)))
    some.alibi_slopes, some.sinks = _cut_option(a.alibi_slopes, batch, (heads,)), _cut_option(a.sinks, (), (heads,))
    some.q_segments, some.k_segments = (
        _cut_option(a.q_segments, batch, (rows,)), _cut_option(a.k_segments, batch, (keys,)))
    first_key = 0 if a.k_positions is not None else k0
    some.q_offset = _cut(np.asarray(offset, np.int64) + (r0 - first_key), batch, ())
    if a.q_lengths is not None:
        some.q_lengths = np.clip(_cut(a.q_lengths, batch, ()) - r0, 0, r1 - r0)
    if a.kv_lengths is not None:
        some.kv_lengths = np.clip(_cut(a.kv_lengths, batch, ()) - k0, 0, k1 - k0)
    return some


def offset_of(a: Args) -> int | np.ndarray:
    """The position of the first row, by default that which puts the last row at the last key."""
    if a.q_offset is not None:
        return a.q_offset
    return (a.kv_len if a.kv_lengths is None else a.kv_lengths) - (a.q_len if a.q_lengths is None else a.q_lengths)


def one_head(a: Args, places: tuple[int, ...]) -> Args:
    """Arguments of a single head, as for arrays with two axes."""
    *batch, head = (slice(place, place + 1) for place in places)
    some = part(a, batch=tuple(batch), heads=head)
    some.two_d, some.batch = True, ()
    lead = len(batch)
    for name, trailing in _TRAILING.items():
        x = getattr(some, name)
        if x is not None:
            setattr(some, name, x.reshape(x.shape[max(x.ndim - trailing, 0):]) if lead else x)
    return some


def some_heads(a: Args, heads: Sequence[int]) -> Args:
    """Arguments of a few query heads in any order, each with a key head of its own; arrays with heads are copied."""
    taken = np.asarray(heads, np.int64)
    some = part(a)
    some.q_heads = some.kv_heads = len(taken)
    kv_heads = taken // a.heads_per_kv
    some.query, some.key = some.query.take(taken, -3), some.key.take(kv_heads, -3)
    for name in ("mask", "block_mask", "bias", "relative_key", "relative_query", "alibi_slopes", "sinks"):
        setattr(some, name, _take(getattr(some, name), taken, _TRAILING.get(name, 1)))
    if a.key_indices is not None:
        some.key_indices = _take(a.key_indices, kv_heads if a.key_indices.shape[-3] == a.kv_heads else taken, 3)
    for name in ("key_scale", "k_positions"):
        setattr(some, name, _take(getattr(some, name), kv_heads, _TRAILING[name]))
    if a.relative_bias is not None:         # a view of a value for each distance
        distances = np.concatenate((a.relative_bias[..., ::-1, 0], a.relative_bias[..., 0, 1:]), -1) \
            if a.q_len and a.kv_len else a.relative_bias[..., 0]
        found = _take(distances, taken, 2)
        assert found is not None
        some.relative_bias = overlapping_rows(found, a.q_len, a.kv_len)
    return some


def _take(x: np.ndarray | None, heads: np.ndarray, trailing: int) -> np.ndarray | None:
    """Some heads of an option whose axis of heads is -`trailing`; that axis may be absent or of length 1."""
    return x if x is None or x.ndim < trailing or x.shape[-trailing] == 1 else x.take(heads, -trailing)


_TRAILING = dict(query=3, key=3, key_scale=2, mask=3, block_mask=3, key_indices=3, bias=3, relative_bias=3,
                 relative_index=1, relative_key=3, relative_query=3, key_mask=1, alibi_slopes=1, q_segments=1,
                 k_segments=1, k_positions=2, q_offset=0, q_lengths=0, kv_lengths=0)


def _cut(x: np.ndarray, batch: tuple[slice, ...], trailing: tuple[slice, ...]) -> np.ndarray:
    """The part of an array whose axes align to the right with (batch..., trailing...); axes of length 1 broadcast."""
    index = (*batch, *trailing)[max(len(batch) + len(trailing) - x.ndim, 0):]
    lengths = x.shape[x.ndim - len(index):]
    places: list[Any] = [one if length != 1 else ALL for one, length in zip(index, lengths, strict=True)]
    return x[(..., *places)]


def _cut_whole(x: np.ndarray, batch: tuple[slice, ...], heads: slice, cells: tuple[slice, slice]) -> np.ndarray:
    """The part of a mask over blocks, whose last two axes are never broadcast."""
    return _cut(x[..., cells[0], cells[1]], batch, (heads, ALL, ALL))


def _cut_option(x: np.ndarray | None, batch: tuple[slice, ...], trailing: tuple[slice, ...]) -> np.ndarray | None:
    return None if x is None else _cut(x, batch, trailing)
