"""What objects show of themselves, and the order in which results unpack."""

import itertools

import numpy as np
import pytest

import attnc
from attnc import reference

X = np.random.default_rng(0).standard_normal((2, 4, 3, 8))


@pytest.mark.parametrize("module", [attnc, reference])
@pytest.mark.parametrize("made, shown", [
    (lambda m: m.AttentionWeights(X, X[:, :2, :2]), "AttentionWeights(shape=(2, 4, 3, 2), dtype=float64)"),
    (lambda m: m.AttentionWeights(X, X[:, :2, :2]).T, "Transposed(shape=(2, 4, 2, 3), dtype=float64)"),
    (lambda m: m.AttentionWeights(X[0, 0], X[0, 0, :2]).T, "Transposed(shape=(2, 3), dtype=float64)"),
    (lambda m: m.KVCache(2, 4, 8, capacity=9, dtype="float16"),
     "KVCache(batch=2, kv_heads=4, head_dim=8, capacity=9, dtype=float16; 0 tokens)"),
    (lambda m: filled(m.KVCache(2, 4, 8, capacity=9, dtype=np.int8, window=(3, None)), [3, 3]),
     "KVCache(batch=2, kv_heads=4, head_dim=8, capacity=9, dtype=int8, window=(3, None); 3 tokens)"),
    (lambda m: filled(m.KVCache(2, 4, 8, 8, capacity=3, dtype=">f4"), [0, 2]),
     "KVCache(batch=2, kv_heads=4, head_dim=8, capacity=3, dtype=float32; 0 to 2 tokens)"),
    (lambda m: m.KVCache(0, 4, 8, 5, capacity=3, dtype=float),
     "KVCache(batch=0, kv_heads=4, head_dim=8, value_dim=5, capacity=3, dtype=float64; 0 tokens)"),
    (lambda m: m.PagedKVCache(9, 16, 4, 8, dtype="float16"),
     "PagedKVCache(n_pages=9, page=16, kv_heads=4, head_dim=8, dtype=float16; 0 sequences, 9 pages free)"),
    (lambda m: m.PagedKVCache(0, 1, 4, 8, 5, dtype=float),
     "PagedKVCache(n_pages=0, page=1, kv_heads=4, head_dim=8, value_dim=5, dtype=float64; 0 sequences, 0 pages free)"),
])
def test_reprs(module, made, shown):
    assert repr(made(module)) == shown


def filled(cache, lengths):
    cache.append(X, X, lengths=lengths)
    return cache


@pytest.mark.parametrize("options, shown", [
    ({}, ""), ({"causal": False, "layout": "bhnd"}, ""),
    ({"layout": "bnhd", "scale": 0.5}, ", scale=0.5, layout='bnhd'"),
    ({"causal": True, "q_offset": 3, "window": (3, None)}, ", causal=True, window=(3, None), q_offset=3"),
    ({"sinks": np.ones(4), "q_offset": [1, 2], "num_threads": 1}, ", sinks=(4,), num_threads=1, q_offset=(2,)"),
    ({"softcap": 30.0, "alibi_slopes": attnc.alibi_slopes(4), "q_offset": 0},
     ", softcap=30.0, alibi_slopes=(4,), q_offset=0")])
def test_repr_of_a_state(options, shown):
    query = X.swapaxes(1, 2) if options.get("layout") == "bnhd" else X
    state = attnc.AttentionState(query, **options)
    assert repr(state) == f"AttentionState(query={query.shape}{shown}; 0 keys)"
    state.update(query, query)
    assert repr(state) == f"AttentionState(query={query.shape}{shown}; 3 keys)"


NAMES = ("lse", "weights", "scores", "entropy", "max", "argmax")


@pytest.mark.parametrize("module", [attnc, reference])
def test_results_unpack_in_the_order_of_want(isa, module):
    output, lse = module.attention(X, X, X, want="lse")
    assert output.shape == X.shape and lse.shape == X.shape[:-1]
    for want in itertools.permutations(NAMES, 3):
        result = module.attention(X, X, X, want=want)
        for array, name in zip(result, ("output", *want), strict=True):
            assert array is getattr(result, name)
    with pytest.raises(ValueError, match="not enough values to unpack"):
        output, lse, _ = module.attention(X, X, X, want="lse")
    for want in itertools.permutations(("query", "key", "value")):
        found = module.attention_backward(output, X, X, X, output, lse, want=want)
        assert [array is getattr(found, name) for array, name in zip(found, want, strict=True)] == [True] * 3


def test_results_of_every_function_unpack(isa):
    output, lse = attnc.attention_varlen(X[0], X[0], X[0], [0, 1, 4], [0, 2, 4], want="lse")
    assert output.shape == (4, 3, 8) and lse.shape == (3, 4)
    output, lse = filled(attnc.KVCache(2, 4, 8, capacity=9, dtype=float), [3, 3]).attend(X, want="lse")
    assert output.shape == X.shape and lse.shape == X.shape[:-1]
    state = attnc.AttentionState(X)
    state.update(X, X)
    again, its = state.result()
    np.testing.assert_allclose(again, output, rtol=1e-12)
    np.testing.assert_allclose(its, lse, rtol=1e-12)
    merged, _ = attnc.merge_states([tuple(state.result())])
    np.testing.assert_array_equal(merged, again)
