"""The contenders of packed sequences; those without a function for them pad, or take one sequence after another."""

from itertools import pairwise
from typing import Any

import numpy as np

import attnc
from attnc.bench import Arrays, Call, Options, Unsupported
from attnc.bench.cases import aligned, visible
from attnc.bench.cases import case as case_of
from attnc.bench.cases.packed import Packed, Paged, sequences
from attnc.bench.contenders import attention, onnxmodels
from attnc.bench.contenders.tensors import from_torch, import_torch, to_torch
from attnc.bench.timing import seconds_per_call

TRIALS = 3      # calls of each way before the faster one is timed


def setup_attnc(case: Packed, arrays: Arrays, options: Options, threads: int) -> Call:
    """`attention_varlen`; of pages `PagedKVCache.attend`."""
    if isinstance(case, Paged):
        cache, ids = _cache(case, arrays)
        return lambda: list(cache.attend(ids, arrays[0], num_threads=threads)[:, :, None])

    def call() -> list[np.ndarray]:
        output = attnc.attention_varlen(*arrays, num_threads=threads, **options)
        return [output[rows].swapaxes(0, 1) for rows in parts]

    parts = [slice(*ends) for ends in pairwise(arrays[3])]
    return call


def _cache(case: Paged, arrays: Arrays) -> tuple[attnc.PagedKVCache, list[int]]:
    """A cache whose sequences have grown in turns, so that their pages lie between each other."""
    pages = [-(-length // case.page) for length in case.kv_lengths]
    cache = attnc.PagedKVCache(sum(pages), case.page, case.kv_heads, case.head_dim, dtype=arrays[0].dtype)
    ids = [cache.add() for _ in pages]
    rows = [[x.swapaxes(0, 1) for x in three[1:]] for three in sequences(arrays)]
    for start in range(0, max(case.kv_lengths), case.page):
        for name, (keys, values) in zip(ids, rows, strict=True):
            if start < len(keys):
                cache.append(name, keys[start:start + case.page], values[start:start + case.page])
    return cache, ids


def paged(case: Paged, arrays: Arrays) -> tuple[list[np.ndarray], np.ndarray]:
    """The pools of keys and values of that cache, and its table, with page 0 behind the end of a sequence."""
    cache, ids = _cache(case, arrays)
    return [np.array(cache.keys), np.array(cache.values)], np.maximum(cache.block_table(ids), 0)


def setup_numpy(case: Packed, arrays: Arrays, options: Options, threads: int) -> Call:
    """The composite, for one sequence after another; its pages are gathered first."""
    if isinstance(case, Paged):
        return _page_by_page_numpy(case, arrays)
    calls = [attention.setup_numpy(each, tuple(np.ascontiguousarray(x)[None] for x in three), options, threads)
             for each, three in zip(case.alone(), sequences(arrays), strict=True)]
    return lambda: [call()[0] for call in calls]


def _page_by_page_numpy(case: Paged, arrays: Arrays) -> Call:
    pools, table = paged(case, arrays)
    query = arrays[0].reshape(len(case.kv_lengths), case.kv_heads, -1, case.head_dim) * case.head_dim ** -0.5
    query = query.astype(arrays[0].dtype)

    def one(row: np.ndarray, own: np.ndarray, length: int) -> np.ndarray:
        keys, values = (pool[own].reshape(-1, *pool.shape[2:])[:length].swapaxes(0, 1) for pool in pools)
        scores = row @ keys.swapaxes(-1, -2)
        scores -= scores.max(axis=-1, keepdims=True)
        np.exp(scores, out=scores)
        scores /= scores.sum(axis=-1, keepdims=True)
        return np.asarray((scores @ values).reshape(case.q_heads, 1, -1))

    pages = [row[:-(-length // case.page)] for row, length in zip(table, case.kv_lengths, strict=True)]
    return lambda: [one(*three) for three in zip(query, pages, case.kv_lengths, strict=True)]


def setup_torch(case: Packed, arrays: Arrays, options: Options, threads: int) -> Call:
    """Padded sequences with a mask, or one call for each sequence: whichever is faster."""
    torch = import_torch(threads)
    if isinstance(case, Paged):
        return faster(_gathered_torch(torch, case, arrays), _page_by_page(torch, case, arrays))
    return faster(_padded_torch(torch, case, arrays, options), _one_by_one(torch, case, arrays, options))


def faster(*ways: Call) -> Call:
    """The call that takes less time in a few trials."""
    for call in ways:
        call()
    return min(ways, key=lambda call: min(seconds_per_call(call, 1) for _ in range(TRIALS)))


def _gathered_torch(torch: Any, case: Paged, arrays: Arrays) -> Call:
    """All sequences at once: their pages gathered, and a mask of the lengths."""
    pools, table = paged(case, arrays)
    pools, table = [to_torch(torch, pool) for pool in pools], torch.from_numpy(table)
    query = to_torch(torch, arrays[0])[:, :, None]
    seen = (torch.arange(table.shape[1] * case.page) < torch.tensor(case.kv_lengths)[:, None])[:, None, None]
    grouped = query.unflatten(1, (case.kv_heads, -1)).squeeze(3)        # rows that share a key head

    def call() -> list[np.ndarray]:
        with torch.inference_mode():
            rows = [pool[table].flatten(1, 2).transpose(1, 2) for pool in pools]
            output = torch.nn.functional.scaled_dot_product_attention(grouped, *rows, attn_mask=seen)
            return list(from_torch(torch, output.flatten(1, 2)[:, :, None]))

    return call


def _page_by_page(torch: Any, case: Paged, arrays: Arrays) -> Call:
    """One sequence after another: its own pages gathered, without a mask."""
    pools, table = paged(case, arrays)
    pools, query = [to_torch(torch, pool) for pool in pools], to_torch(torch, arrays[0])
    pages = [torch.from_numpy(row[:-(-n // case.page)]) for row, n in zip(table, case.kv_lengths, strict=True)]

    def call() -> list[np.ndarray]:
        found = []
        with torch.inference_mode():
            for row, own, length in zip(query, pages, case.kv_lengths, strict=True):
                rows = [pool[own].flatten(0, 1)[None, :length].transpose(1, 2) for pool in pools]
                output = torch.nn.functional.scaled_dot_product_attention(
                    row.reshape(1, case.kv_heads, -1, case.head_dim), *rows)
                found.append(from_torch(torch, output.flatten(1, 2)[0][:, None]))
        return found

    return call


def _padded_torch(torch: Any, case: Packed, arrays: Arrays, options: Options) -> Call:
    padded, mask = padding(case, arrays, options)
    tensors, seen = [to_torch(torch, x) for x in padded], torch.from_numpy(mask)

    def call() -> list[np.ndarray]:
        with torch.inference_mode():
            output = from_torch(torch, torch.nn.functional.scaled_dot_product_attention(
                *tensors, attn_mask=seen, enable_gqa=case.q_heads != case.kv_heads))
        return [each[:, :rows] for each, rows in zip(output, case.q_lengths, strict=True)]

    return call


def _one_by_one(torch: Any, case: Packed, arrays: Arrays, options: Options) -> Call:
    calls = []
    for each, three in zip(case.alone(), sequences(arrays), strict=True):
        tensors = [to_torch(torch, x)[None] for x in three]
        triangle = aligned(each, options)
        seen = None if triangle or each.q_len == 1 else visible(each, options)
        calls.append((tensors, {"is_causal": triangle, "attn_mask": None if seen is None else torch.from_numpy(seen)}))

    def call() -> list[np.ndarray]:
        with torch.inference_mode():
            return [from_torch(torch, torch.nn.functional.scaled_dot_product_attention(
                *tensors, enable_gqa=case.q_heads != case.kv_heads, **named)[0]) for tensors, named in calls]

    return call


def setup_onnxruntime(case: Packed, arrays: Arrays, options: Options, threads: int) -> Call:
    """The standard operator Attention over padded sequences with a mask."""
    if isinstance(case, Paged):
        raise Unsupported("gathers no pages")
    padded, mask = padding(case, arrays, options)
    batch, longest = len(case.q_lengths), (max(case.q_lengths), max(case.kv_lengths))
    whole = case_of(batch, (case.q_heads, case.kv_heads), *longest, case.head_dim, case.dtype)
    call = onnxmodels.standard(whole, padded, None, mask, case.head_dim ** -0.5, (), threads)
    return lambda: [each[:, :rows] for each, rows in zip(call(), case.q_lengths, strict=True)]


def padding(case: Packed, arrays: Arrays, options: Options) -> tuple[Arrays, np.ndarray]:
    """Query, key and value of all sequences as ``(batch, heads, longest, dim)`` with zeros behind, and the mask
    ``(batch, 1, rows, keys)``; padded rows see all keys, so that none is without any."""
    rows, keys = max(case.q_lengths), max(case.kv_lengths)
    sizes = (case.q_heads, rows), (case.kv_heads, keys), (case.kv_heads, keys)
    padded = tuple(np.zeros((len(case.q_lengths), *size, case.head_dim), arrays[0].dtype) for size in sizes)
    mask = np.ones((len(case.q_lengths), 1, rows, keys), bool)
    for at, (each, three) in enumerate(zip(case.alone(), sequences(arrays), strict=True)):
        for x, part in zip(padded, three, strict=True):
            x[at, :, :part.shape[1]] = part
        mask[at, :, :each.q_len, each.kv_len:] = False
        seen = visible(each, options)
        if seen is not None:
            mask[at, 0, :each.q_len, :each.kv_len] = seen
    return padded, mask
