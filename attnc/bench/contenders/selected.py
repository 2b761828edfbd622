"""The contenders of lists of keys: libraries without such an option gather the keys of each row, or mask the rest."""

from typing import Any

import numpy as np

import attnc
from attnc.bench import Arrays, Call, Options
from attnc.bench.cases.selected import Selected
from attnc.bench.contenders.packed import faster
from attnc.bench.contenders.tensors import from_torch, import_torch, to_torch


def setup_attnc(case: Selected, arrays: Arrays, options: Options, threads: int) -> Call:
    """The package itself."""
    *three, lists = arrays
    return lambda: attnc.attention(*three, key_indices=lists, num_threads=threads)


def setup_numpy(case: Selected, arrays: Arrays, options: Options, threads: int) -> Call:
    """Row by row: its keys and values gathered, then the composite of all heads that share a key head."""
    query, key, value, lists = arrays
    c, scale = case.case, np.float32(case.case.head_dim ** -0.5)
    grouped = query.reshape(c.batch, c.kv_heads, -1, *query.shape[-2:])
    out = np.empty((*grouped.shape[:-1], c.value_dim), query.dtype)

    def call() -> np.ndarray:
        for row in range(c.q_len):
            keys, values = (np.take(x, lists[0, 0, row], axis=-2) for x in (key, value))
            scores = (grouped[..., row, :] * scale) @ keys.swapaxes(-1, -2)
            scores -= scores.max(axis=-1, keepdims=True)
            np.exp(scores, out=scores)
            scores /= scores.sum(axis=-1, keepdims=True)
            np.matmul(scores, values, out=out[..., row, :])
        return out.reshape(*query.shape[:-1], c.value_dim)

    return call


def setup_torch(case: Selected, arrays: Arrays, options: Options, threads: int) -> Call:
    """``scaled_dot_product_attention`` over gathered keys, a batch element for each row, or over all keys under a mask,
    whichever is faster."""
    torch = import_torch(threads)
    query, key, value, lists = (to_torch(torch, x) for x in arrays)
    attend, c = torch.nn.functional.scaled_dot_product_attention, case.case
    heads_per_kv = c.q_heads // c.kv_heads
    mask = torch.zeros((1, 1, c.q_len, c.kv_len), dtype=torch.bool).scatter_(-1, lists, True)

    def gathered() -> Any:
        with torch.inference_mode():
            keys, values = (x[:, :, lists[0, 0]].transpose(1, 2).flatten(0, 1) for x in (key, value))
            rows = query.unflatten(1, (c.kv_heads, heads_per_kv)).permute(0, 3, 1, 2, 4).flatten(0, 1)
            output = attend(rows, keys, values).unflatten(0, (c.batch, c.q_len))
            return from_torch(torch, output.permute(0, 2, 3, 1, 4).flatten(1, 2))

    def masked() -> Any:
        with torch.inference_mode():
            return from_torch(torch, attend(query, key, value, attn_mask=mask, enable_gqa=heads_per_kv > 1))

    return faster(gathered, masked)
