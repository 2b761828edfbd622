"""The mappings of which statistics of weights consist, one head, row or entry at a time: their definition."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from .._checks import Args
from .._types import ArrayLike, Index, Shape


def over_heads(x: np.ndarray, heads: str | None, a: Args) -> np.ndarray:
    """Something (..., q_heads, n) reduced over the query heads, or over those that read the same key head."""
    if heads is None or a.two_d:
        return x
    if heads == "group":
        found = np.zeros((*x.shape[:-2], a.kv_heads, x.shape[-1]), x.dtype)
        for head in range(a.q_heads):
            found[..., head * a.kv_heads // a.q_heads, :] += x[..., head, :]
        return found
    found = np.zeros((*x.shape[:-2], x.shape[-1]), x.dtype)
    for head in range(a.q_heads):
        found = np.maximum(found, x[..., head, :]) if heads == "max" else found + x[..., head, :]
    return found / a.q_heads if heads == "mean" and a.q_heads else found


def bin_labels(bins: int, length: int) -> np.ndarray:
    """The bin of each place: as many places in each as `length` allows."""
    return np.array([place * bins // length for place in range(length)], np.int64)


def row_counts(rows: slice | ArrayLike, length: int) -> np.ndarray:
    """How often each row is named by an index of the rows."""
    if not isinstance(rows, slice):
        rows = np.asarray(rows) if np.size(rows) else slice(0)  # a tuple too is a list of rows, not an index of axes
    named = np.arange(length)[rows]
    return np.array([np.count_nonzero(named == row) for row in range(length)], np.int64)


def kept(weights: np.ndarray, threshold: float | None, top_p: float | None) -> np.ndarray:
    """Which weights a sparse export keeps, never one of 0."""
    if top_p is None:
        return (weights > 0) & (weights >= threshold)
    keep = np.zeros(weights.shape, bool)
    for row in np.ndindex(weights.shape[:-1]):
        ranked = weights[row].astype(np.float64)
        total, share = ranked.sum(), 0.0
        for key in np.argsort(-ranked, kind="stable"):
            if not share < top_p * total or not ranked[key] > 0:
                break
            keep[(*row, key)] = True
            share += ranked[key]
    return keep


def tiles(shape: Shape, rows: int, keys: int) -> Iterator[Index]:
    """Indices of tiles, head after head, from the first row on, from the first key on."""
    *lead, q_len, kv_len = shape
    for head in np.ndindex(*lead):
        for r, k in itertools.product(range(0, q_len, rows), range(0, kv_len, keys)):
            yield *head, slice(r, min(r + rows, q_len)), slice(k, min(k + keys, kv_len))


def one_head(a: Args, places: Shape) -> Args:
    """Arguments of one head as if its arrays had come with two axes: each as it is for all heads, indexed."""
    *batch, head = places

    def of(x: int | np.ndarray | None, *axes: int) -> Any:
        return None if x is None else np.broadcast_to(x, (*a.batch, *axes))[tuple(batch)]

    def of_head(x: np.ndarray | None, *axes: int) -> Any:
        return None if x is None else of(x, a.q_heads, *axes)[head:head + 1]

    one = copy.copy(a)
    one.two_d, one.batch, one.q_heads, one.kv_heads = True, (), 1, 1
    one.query = of_head(a.query, a.q_len, a.head_dim)
    kv_head = head * a.kv_heads // a.q_heads
    one.key = of(a.key, *a.key.shape[-3:])[kv_head:kv_head + 1]
    one.mask, one.bias, one.relative_bias = (
        of_head(x, a.q_len, a.kv_len) for x in (a.mask, a.bias, a.relative_bias))
    one.relative_key, one.relative_query = (
        None if x is None else of_head(x, *x.shape[-2:]) for x in (a.relative_key, a.relative_query))
    one.block_mask = None if a.block_mask is None else of_head(a.block_mask, *a.block_mask.shape[-2:])
    lists = a.key_indices
    if lists is not None:
        heads = lists.shape[-3]
        of_list = head if heads == a.q_heads else 0 if heads == 1 else kv_head
        one.key_indices = of(lists, *lists.shape[-3:])[of_list:of_list + 1]
    one.alibi_slopes, one.sinks = of_head(a.alibi_slopes), of_head(a.sinks)
    one.key_mask, one.k_segments, one.q_segments = of(a.key_mask, a.kv_len), of(a.k_segments, a.kv_len), \
        of(a.q_segments, a.q_len)
    if a.k_positions is not None:
        one.k_positions = of(a.k_positions, a.kv_heads, a.kv_len)[head * a.kv_heads // a.q_heads]
    one.q_offset, one.q_lengths, one.kv_lengths = of(a.q_offset), of(a.q_lengths), of(a.kv_lengths)
    return one
