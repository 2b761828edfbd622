"""The contenders of packed sequences; those without a function for them pad, or take one sequence after another."""

from itertools import pairwise
from typing import Any

import numpy as np

import attnc
from attnc.bench import Arrays, Call, Options
from attnc.bench.cases import aligned, visible
from attnc.bench.cases import case as case_of
from attnc.bench.cases.packed import Packed, sequences
from attnc.bench.contenders import attention, onnxmodels
from attnc.bench.contenders.tensors import from_torch, import_torch, to_torch
from attnc.bench.timing import seconds_per_call

TRIALS = 3      # calls of each way before the faster one is timed


def setup_attnc(case: Packed, arrays: Arrays, options: Options, threads: int) -> Call:
    """The package itself."""
    def call() -> list[np.ndarray]:
        output = attnc.attention_varlen(*arrays, num_threads=threads, **options)
        return [output[rows].swapaxes(0, 1) for rows in parts]

    parts = [slice(*ends) for ends in pairwise(arrays[3])]
    return call


def setup_numpy(case: Packed, arrays: Arrays, options: Options, threads: int) -> Call:
    """The composite, for one sequence after another."""
    calls = [attention.setup_numpy(each, tuple(np.ascontiguousarray(x)[None] for x in three), options, threads)
             for each, three in zip(case.alone(), sequences(arrays), strict=True)]
    return lambda: [call()[0] for call in calls]


def setup_torch(case: Packed, arrays: Arrays, options: Options, threads: int) -> Call:
    """Padded sequences with a mask, or one call for each sequence: whichever is faster."""
    torch = import_torch(threads)
    ways = [_padded_torch(torch, case, arrays, options), _one_by_one(torch, case, arrays, options)]
    for call in ways:
        call()
    return min(ways, key=lambda call: min(seconds_per_call(call, 1) for _ in range(TRIALS)))


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
