"""Keys that the package kvpress keeps, which tests/api/test_evictions.py compares with the recipes of the guide.

    python benchmarks/capture/kvpress_keys.py [--check]

It needs kvpress in an environment of its own, since that asks for an older transformers: `pip install kvpress==0.5.5`.
"""

import argparse
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np

FILE = Path(__file__).resolve().parents[2] / "tests" / "api" / "kvpress_keys.npz"
# batch, query heads, key heads, length, depth, keys that stay
CASES = (1, 4, 4, 40, 16, 20), (2, 8, 2, 70, 32, 30), (1, 6, 3, 150, 8, 33), (2, 2, 1, 300, 64, 150)
WINDOW, KERNEL, SINKS = 8, 5, 4


def arrays(case):
    """Query and key of a case: sharp enough that no two keys receive the same."""
    batch, q_heads, kv_heads, length, depth, _ = CASES[case]
    random = np.random.default_rng(case)
    return (2 * random.standard_normal((batch, q_heads, length, depth)),
            random.standard_normal((batch, kv_heads, length, depth)))


def weights(query, key):
    """Those of the eager attention of transformers, whose keys are repeated for the heads that share them."""
    import torch

    query, key = (torch.from_numpy(x) for x in (query, key))
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    scores = query @ key.mT / query.shape[-1] ** 0.5
    return torch.softmax(scores + torch.triu(torch.full_like(scores[0, 0], -torch.inf), 1), -1)


def kept(case):
    """The places that each press keeps, (batch, key heads, n) in ascending order: those of values that are places."""
    import kvpress
    import torch

    query, key = arrays(case)
    batch, q_heads, kv_heads, length, depth, n = CASES[case]
    ratio = 1 - (n + 0.5) / length
    module = SimpleNamespace(head_dim=depth, config=SimpleNamespace(
        num_attention_heads=q_heads, num_key_value_heads=kv_heads))
    places = torch.arange(length, dtype=torch.float64)[:, None].expand(batch, kv_heads, length, depth)
    hidden = torch.zeros(batch, length, 1)
    presses = {"h2o": kvpress.ObservedAttentionPress(ratio),
               "snapkv": kvpress.SnapKVPress(ratio, window_size=WINDOW, kernel_size=KERNEL),
               "streaming_llm": kvpress.StreamingLLMPress(ratio, n_sink=SINKS)}
    found = {}
    for name, press in presses.items():
        _, stay = press.compress(module, hidden, torch.from_numpy(key), places, weights(query, key), {})
        found[f"{name}_{case}"] = np.sort(stay[..., 0].numpy().astype(np.int16), -1)
        assert found[f"{name}_{case}"].shape[-1] == n
    return found


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--check", action="store_true", help="compare with the committed keys instead of writing them")
    found = {name: x for case in range(len(CASES)) for name, x in kept(case).items()}
    if not parser.parse_args().check:
        np.savez_compressed(FILE, **found)
        return 0
    with np.load(FILE) as file:
        differ = [name for name in found if not np.array_equal(file[name], found[name])]
    for name in differ:
        print(name, "differs")
    return bool(differ)


if __name__ == "__main__":
    sys.exit(main())
