"""The contenders of keys and values that are held between calls; rows that share a key head are folded into one."""

from collections.abc import Callable
from typing import Any

import numpy as np

import attnc
from attnc.bench import Arrays, Call, Options, Unsupported
from attnc.bench.cases import case as case_of
from attnc.bench.cases.caches import Int8Cache, Latent, Mapped, again
from attnc.bench.contenders import attention, compilers
from attnc.bench.contenders.tensors import from_torch, import_torch, to_torch

Held = Int8Cache | Latent | Mapped


def setup_attnc(case: Held, arrays: Arrays, options: Options, threads: int) -> Call:
    """`KVCache.attend`, over int8 rows or shared ones; `AttentionState` over chunks of a file."""
    query, key, value = arrays
    if isinstance(case, Mapped):
        return lambda: _streamed(case, arrays, threads)
    shared = isinstance(case, Latent)
    batch, heads, length, dim = key.shape
    cache = attnc.KVCache(batch, heads, dim, value.shape[-1], capacity=length, shared=shared,
                          dtype=key.dtype if shared else np.int8)
    cache.append(key, None if shared else value)
    return lambda: cache.attend(query, num_threads=threads)


def _streamed(case: Mapped, arrays: Arrays, threads: int) -> np.ndarray:
    query, key, value = arrays[0], again(arrays[1]), again(arrays[2])
    state = attnc.AttentionState(query, num_threads=threads)
    for start in range(0, case.case.kv_len, case.chunk):
        stop = start + case.chunk
        state.update(key[:, :, start:stop], value[:, :, start:stop])
    return state.result().output


def setup_numpy(case: Held, arrays: Arrays, options: Options, threads: int) -> Call:
    """What one writes with NumPy: int8 rows times their scales, then the composite; of a file chunk by chunk."""
    query, key, value = arrays
    folded, scale = _folded(case, query), np.float32(case.case.head_dim ** -0.5)
    if isinstance(case, Latent):
        return _delegated(attention.setup_numpy, case, arrays, threads)
    if isinstance(case, Int8Cache):
        rows = [_quantized(array) for array in (key, value)]
        return lambda: _composite(folded * scale, *(part * by for part, by in rows)).reshape(query.shape)

    def call() -> np.ndarray:
        keys, values = again(key), again(value)
        top, total, output = np.float32(-np.inf), np.float32(0), np.float32(0)
        for start in range(0, case.case.kv_len, case.chunk):
            scores = (folded * scale) @ keys[:, :, start:start + case.chunk].swapaxes(-1, -2)
            new = np.maximum(top, scores.max(-1, keepdims=True))
            np.exp(np.subtract(scores, new, out=scores), out=scores)
            kept, top = np.exp(top - new), new
            total = total * kept + scores.sum(-1, keepdims=True)
            output = output * kept + scores @ values[:, :, start:start + case.chunk]
        return np.asarray(output / total).reshape(query.shape)

    return call


def _composite(query: np.ndarray, key: np.ndarray, value: np.ndarray) -> np.ndarray:
    scores = query @ key.swapaxes(-1, -2)
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=-1, keepdims=True)
    return np.asarray(scores @ value)


def setup_torch(case: Held, arrays: Arrays, options: Options, threads: int) -> Call:
    """``scaled_dot_product_attention``; int8 rows are multiplied out first, a file is one map."""
    if isinstance(case, Latent):
        return _delegated(attention.setup_torch, case, arrays, threads)
    torch = import_torch(threads)
    query, key, value = arrays
    folded = to_torch(torch, _folded(case, query))
    attend = torch.nn.functional.scaled_dot_product_attention
    if isinstance(case, Int8Cache):
        rows = [tuple(to_torch(torch, part) for part in _quantized(array)) for array in (key, value)]

        def of_int8() -> Any:
            with torch.inference_mode():
                wide = [part.to(torch.float32).mul_(by) for part, by in rows]
                return from_torch(torch, attend(folded, *wide)).reshape(query.shape)

        return of_int8

    def of_file() -> Any:
        with torch.inference_mode():
            maps = [to_torch(torch, again(array)) for array in (key, value)]
            return from_torch(torch, attend(folded, *maps)).reshape(query.shape)

    return of_file


def setup_onnxruntime(case: Held, arrays: Arrays, options: Options, threads: int) -> Call:
    """The standard operator Attention over latents and a copy of the values."""
    return _delegated(attention.setup_onnxruntime, case, arrays, threads)


def setup_onnxruntime_mha(case: Held, arrays: Arrays, options: Options, threads: int) -> Call:
    """MultiHeadAttention, the same."""
    return _delegated(attention.setup_onnxruntime_mha, case, arrays, threads)


def setup_openvino(case: Held, arrays: Arrays, options: Options, threads: int) -> Call:
    """The operation ScaledDotProductAttention, the same."""
    return _delegated(compilers.setup_openvino, case, arrays, threads)


def _delegated(setup: Callable[..., Call], case: Held, arrays: Arrays, threads: int) -> Call:
    """The contender of plain attention over folded rows."""
    if not isinstance(case, Latent):
        raise Unsupported("has no such function")
    query, c = arrays[0], case.case
    plain = case_of(c.batch, c.kv_heads, c.q_heads // c.kv_heads * c.q_len, c.kv_len, c.head_dim, c.dtype, c.value_dim)
    call = setup(plain, (_folded(case, query), *map(np.ascontiguousarray, arrays[1:])), {}, threads)
    return lambda: call().reshape(*query.shape[:3], c.value_dim)


def _folded(case: Held, query: np.ndarray) -> np.ndarray:
    """The rows of all query heads that read one key head, as rows of one head; these cases have no order of rows."""
    c = case.case
    return query.reshape(c.batch, c.kv_heads, -1, c.head_dim)


def _quantized(array: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows as int8 and their scales, as the int8 cache has them."""
    scales = abs(array).max(axis=-1, keepdims=True) / np.float32(127)
    return np.rint(array / scales).astype(np.int8), scales
