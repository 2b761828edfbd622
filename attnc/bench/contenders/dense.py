"""The contenders of dense weights, each writing to memory that is used again."""

from typing import Any

import numpy as np

import attnc
from attnc.bench import Arrays, Call, Options
from attnc.bench.cases.dense import DenseWeights
from attnc.bench.contenders.tensors import from_torch, import_torch, to_torch


def _room(case: DenseWeights) -> np.ndarray:
    one = case.case
    return np.empty((one.batch, one.q_heads, one.q_len, one.kv_len), np.dtype(one.dtype))


def setup_attnc(case: DenseWeights, arrays: Arrays, options: Options, threads: int) -> Call:
    """The package itself."""
    query, key, out = *arrays[:2], _room(case)
    return lambda: attnc.attention_weights(query, key, out=out, num_threads=threads)


def setup_numpy(case: DenseWeights, arrays: Arrays, options: Options, threads: int) -> Call:
    """What one writes with NumPy: all in one array."""
    query, key, out = *arrays[:2], _room(case)
    scale = query.dtype.type(case.case.head_dim ** -0.5)

    def call() -> np.ndarray:
        np.matmul(query * scale, key.swapaxes(-1, -2), out=out)
        np.subtract(out, out.max(-1, keepdims=True), out=out)
        np.exp(out, out=out)
        np.divide(out, out.sum(-1, keepdims=True), out=out)
        return out

    return call


def setup_torch(case: DenseWeights, arrays: Arrays, options: Options, threads: int) -> Call:
    """``torch.matmul`` and ``torch.softmax``, each into a tensor that is there."""
    torch = import_torch(threads)
    query, key = (to_torch(torch, array) for array in arrays[:2])
    scores, out = (to_torch(torch, _room(case)) for _ in range(2))
    scale = case.case.head_dim ** -0.5

    def call() -> Any:
        with torch.inference_mode():
            torch.matmul(query * scale, key.transpose(-1, -2), out=scores)
            return from_torch(torch, torch.softmax(scores, -1, out=out))

    return call
