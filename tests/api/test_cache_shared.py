"""A cache whose values are columns of its keys: the bits of a cache with both, in half the memory."""

import copy
import pickle

import numpy as np
import pytest
from checking import DTYPES, assert_same_bits, dtype_of, normal

import attnc
from attnc import reference

DIM, VALUE_DIM = 36, 32
MODULES = pytest.mark.parametrize("module", [attnc, reference], ids=["attnc", "reference"])
ALL = [*DTYPES, "int8"]


def made(module, keys, dtype, shared=True, capacity=40, **options):
    """A cache of these keys, in two parts; without `shared` their first columns are appended as values too."""
    cache = module.KVCache(2, 1, DIM, VALUE_DIM, capacity=capacity, dtype=dtype_of(dtype), shared=shared, **options)
    for part, lengths in ((slice(0, 13), [6, 13]), (slice(13, None), None)):
        value = None if shared else keys[:, :, part, :VALUE_DIM]
        cache.append(keys[:, :, part], value, lengths=lengths)
    return cache


def numbers(seed, dtype="float32"):
    random = np.random.default_rng(seed)
    return normal(random, (2, 1, 30, DIM)), normal(random, (2, 8, 3, DIM), "float32" if dtype == "int8" else dtype)


@MODULES
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{}, {"window": (20, 0), "capacity": 25}], ids=["plain", "ring"])
def test_the_bits_of_a_cache_with_both(isa, module, options, dtype, seed):
    keys, query = numbers(seed, dtype)
    one, two = (made(module, keys, dtype, shared, **options) for shared in (True, False))
    assert_same_bits(one.attend(query, causal=True, want="lse"), two.attend(query, causal=True, want="lse"))
    assert_same_bits(np.ascontiguousarray(one.values), np.ascontiguousarray(two.values))
    if not options:
        assert_same_bits(one.attend(query), module.attention(
            query, one.keys, one.keys[..., :VALUE_DIM].copy(), kv_lengths=one.lengths))


@pytest.mark.parametrize("dtype", ALL)
def test_against_the_twin(isa, dtype, seed):
    keys, query = numbers(seed, dtype)
    got, wanted = (made(module, keys, dtype) for module in (attnc, reference))
    for change in (lambda c: None, lambda c: c.keep([[[0, 2, 17]], [[5, 1, 20]]]), lambda c: c.reorder([1, 1]),
                   lambda c: c.append(keys[:, :, :2]), lambda c: c.truncate(3)):
        change(got)
        change(wanted)
        eps = 2**-6 if dtype == "bfloat16" else 2**-9 if dtype == "float16" else 2**-18
        np.testing.assert_allclose(got.attend(query).astype(np.float64), wanted.attend(query).astype(np.float64),
                                   rtol=0, atol=8 * eps)


@pytest.mark.parametrize("dtype", ALL)
def test_memory(dtype):
    both, one = (attnc.KVCache(1, 1, 576, 512, capacity=64, dtype=dtype_of(dtype), shared=shared)
                 for shared in (False, True))
    size = dtype_of(dtype).itemsize
    assert one.nbytes == 64 * (576 * size + (4 if dtype == "int8" else 0))
    assert both.nbytes == 64 * (1088 * size + (8 if dtype == "int8" else 0))
    assert np.shares_memory(one.keys, one.values) and "shared=True" in repr(one) and "shared" not in repr(both)


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_copies(way, dtype, seed):
    keys, query = numbers(seed, dtype)
    cache = made(attnc, keys, dtype)
    other = way(cache)
    assert_same_bits(other.attend(query), cache.attend(query))
    assert np.shares_memory(other.keys, other.values) and not np.shares_memory(other.keys, cache.keys)
    before = cache.attend(query)
    other.append(keys[:, :, :3])
    assert_same_bits(cache.attend(query), before)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_weights(isa, dtype, seed):
    keys, query = numbers(seed, dtype)
    one, two = (made(attnc, keys, dtype, shared) for shared in (True, False))
    assert_same_bits(one.weights(query).dense(), two.weights(query).dense())


@MODULES
@pytest.mark.parametrize("error, words, call", [
    (ValueError, "value_dim is 9 and head_dim 8; wanted at most head_dim", lambda m: m.KVCache(
        1, 1, 8, 9, capacity=4, dtype="float32", shared=True)),
    (TypeError, "shared must be True or False, got int 1", lambda m: m.KVCache(
        1, 1, 8, capacity=4, dtype="float32", shared=1)),
    (TypeError, "value was given to a cache whose values are the first columns", lambda m: m.KVCache(
        1, 1, 8, capacity=4, dtype="float32", shared=True).append(np.zeros((1, 1, 1, 8)), np.zeros((1, 1, 1, 8)))),
    (TypeError, "value must be an array, got None", lambda m: m.KVCache(
        1, 1, 8, capacity=4, dtype="float32").append(np.zeros((1, 1, 1, 8)))),
])
def test_errors(module, error, words, call):
    with pytest.raises(error, match=words):
        call(module)
