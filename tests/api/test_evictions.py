"""The policies of docs/guide/caches.md keep the keys that the package kvpress keeps, on the cache and on its twin."""

import doctest
import importlib.util
from pathlib import Path

import numpy as np
import pytest

import attnc
from attnc import reference

ROOT = Path(__file__).resolve().parents[2]
SPEC = importlib.util.spec_from_file_location("kvpress_keys", ROOT / "benchmarks" / "capture" / "kvpress_keys.py")
kvpress_keys = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(kvpress_keys)
CASES = range(len(kvpress_keys.CASES))
MOST_LINES = 20


def policies():
    """The functions that the page defines, and how many lines each has."""
    text = (ROOT / "docs" / "guide" / "caches.md").read_text(encoding="utf-8")
    found, lines = {"np": np}, {}
    for example in doctest.DocTestParser().get_examples(text):
        if example.source.startswith("def "):
            exec(example.source, found)
            lines[example.source[4:example.source.index("(")]] = example.source.count("\n")
    return {name: found[name] for name in lines}, lines


POLICIES, LINES = policies()


def filled(module, key):
    batch, kv_heads, length, depth = key.shape
    cache = module.KVCache(batch, kv_heads, depth, capacity=length, dtype="float64")
    cache.append(key, key)
    return cache


@pytest.mark.parametrize("module", [attnc, reference])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ["h2o", "snapkv", "streaming_llm"])
def test_the_same_keys_as_kvpress(name, case, module):
    query, key = kvpress_keys.arrays(case)
    cache, n = filled(module, key), kvpress_keys.CASES[case][-1]
    options = {"h2o": {}, "snapkv": {"window": kvpress_keys.WINDOW, "kernel": kvpress_keys.KERNEL},
               "streaming_llm": {"sinks": kvpress_keys.SINKS}}[name]
    given = (cache, n) if name == "streaming_llm" else (cache, query, n)
    cache.keep(POLICIES[name](*given, **options))
    with np.load(kvpress_keys.FILE) as file:
        wanted = file[f"{name}_{case}"]
    np.testing.assert_array_equal(cache.positions, wanted)
    assert (np.diff(wanted, axis=-1) > 0).all() and wanted.shape[-1] < key.shape[2]


@pytest.mark.parametrize("module", [attnc, reference])
@pytest.mark.parametrize("case", CASES)
def test_a_budget_by_top_p(case, module):
    """The fewest keys with the share, and those that kvpress keeps at a budget of as many."""
    query, key = kvpress_keys.arrays(case)
    cache = filled(module, key)
    mass = cache.weights(query, causal=True).key_mass(heads="group", normalize=True)
    share = np.sort(mass, -1)[..., ::-1].cumsum(-1) / mass.sum(-1, keepdims=True)
    budget = kvpress_keys.CASES[case][-1]
    p = share[0, :, budget - 1].min() - 1e-9        # what one head of the first element needs as many for
    cache.keep(POLICIES["top_p"](cache, query, p))
    for b, n in enumerate(cache.lengths):
        assert (share[b, :, n - 1] >= p).all() and (n == 1 or (share[b, :, n - 2] < p).any())
    with np.load(kvpress_keys.FILE) as file:
        assert cache.lengths[0] == budget
        np.testing.assert_array_equal(cache.positions[0, :, :budget], file[f"h2o_{case}"][0])


def test_policies_are_short():
    assert LINES.keys() == {"h2o", "snapkv", "streaming_llm", "top_p"}
    assert max(LINES.values()) <= MOST_LINES
