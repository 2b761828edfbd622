"""weighted_sum against its twin: grouped heads, broadcast batches, given weights of any kind, zeros that hide NaN."""

import numpy as np
import pytest
from checking import DTYPES, assert_same_bits, dtype_of, expected, largest, normal

import attnc
from attnc import reference
from attnc.testing import assert_within


def check(weights, value, **arguments):
    """Within tolerance of the twin in a wider precision."""
    honest = expected(reference.weighted_sum, weights, value)
    exact = expected(exactly, weights, value)
    sums = np.abs(weights.astype(np.float64))
    sums = sums.sum(-1, where=np.isfinite(sums)).max(initial=1)   # what weights sum to is the scale of the errors
    got = attnc.weighted_sum(weights, value, **arguments)
    assert_within(got, exact, honest, scale=float(sums) * largest(value), name="weighted_sum")
    return got


def exactly(weights, value):
    """Products added one precision up; a weight of 0 takes no part."""
    wide = np.longdouble if np.float64 in (weights.dtype, value.dtype) else np.float64
    group = weights.shape[-3] // value.shape[-3] if weights.ndim > 2 and value.shape[-3] else 1
    wide_weights, wide_value = weights.astype(wide), value.astype(wide)
    if group > 1:
        wide_value = np.repeat(wide_value, group, axis=-3)
    with np.errstate(all="ignore"):
        return np.where(wide_weights[..., None] == 0, 0, wide_weights[..., None] * wide_value[..., None, :, :]).sum(-2)


def shares(random, shape, dtype):
    weights = random.random(shape)
    return (weights / weights.sum(-1, keepdims=True)).astype(dtype_of(dtype))


SHAPES = [(1, 1, 1, 1, 1), (2, 2, 5, 70, 20), (6, 2, 3, 2100, 9), (4, 1, 40, 530, 16), (2, 2, 113, 203, 5),
          (3, 3, 2, 7, 257), (2, 1, 4, 0, 3), (2, 1, 0, 4, 3), (2, 1, 4, 3, 0), (0, 0, 4, 3, 2)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(isa, shape, dtype, seed):
    random = np.random.default_rng(seed)
    q_heads, kv_heads, q_len, kv_len, dim = shape
    value = normal(random, (2, kv_heads, kv_len, dim), dtype)
    check(shares(random, (2, q_heads, q_len, kv_len), dtype), value)
    check(normal(random, (2, q_heads, q_len, kv_len), dtype), value)      # negative weights, not normalised


def test_mixed_dtypes(isa, seed):
    random = np.random.default_rng(seed)
    for first in DTYPES:
        for second in DTYPES:
            for q_len in (3, 70):
                check(shares(random, (2, q_len, 90), first), normal(random, (1, 90, 12), second))


@pytest.mark.parametrize("batches", [((), ()), ((2, 1), (3,)), ((), (2, 2)), ((1, 3), (2, 1))], ids=str)
@pytest.mark.parametrize("q_len", [2, 70])
def test_ranks_and_broadcast_batches(isa, batches, q_len, seed):
    random = np.random.default_rng(seed)
    weights, value = normal(random, (*batches[0], 4, q_len, 30)), normal(random, (*batches[1], 2, 30, 7))
    got = check(weights, value)
    assert got.shape == (*np.broadcast_shapes(*batches), 4, q_len, 7)
    flat = check(weights[(0,) * (weights.ndim - 2)], value[(0,) * (value.ndim - 2)])
    assert flat.shape == (q_len, 7)


@pytest.mark.parametrize("q_len", [3, 70])
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf, 3e38])
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_a_weight_of_zero_hides_any_value(isa, q_len, poison, dtype, seed):
    random = np.random.default_rng(seed)
    weights, value = normal(random, (2, q_len, 40), dtype), normal(random, (2, 40, 5), dtype)
    weights[..., ::2, [3, 17]], weights[..., ::2, 20] = 0, -0.0
    clean = attnc.weighted_sum(weights, value)
    value[:, [3, 17, 20], 1:] = poison
    got = check(weights, value)
    assert_same_bits(got[:, ::2], clean[:, ::2])


@pytest.mark.parametrize("q_len", [3, 70])
def test_weights_that_are_not_finite(isa, q_len, seed):
    random = np.random.default_rng(seed)
    weights, value = normal(random, (1, q_len, 40)), normal(random, (1, 40, 5))
    weights[0, 0, 3], weights[0, 1, 5], weights[0, 2, 7] = np.nan, np.inf, -np.inf
    got = check(weights, value)
    assert np.isnan(got[0, 0]).all() and np.isinf(got[0, 1:3]).all() and np.isfinite(got[0, 3:]).all()
    value[0, 5] = 0
    assert np.isnan(check(weights, value)[0, 1]).all()


def test_threads_strides_and_out_change_no_bit(isa, seed):
    random = np.random.default_rng(seed)
    for q_len, kv_len in ((2, 3000), (90, 130)):
        weights, value = shares(random, (2, 4, q_len, kv_len), "float32"), normal(random, (2, 2, kv_len, 20))
        wanted = attnc.weighted_sum(weights, value, num_threads=1)
        for threads in (2, 3, 7):
            assert_same_bits(attnc.weighted_sum(weights, value, num_threads=threads), wanted)
        out = np.empty((2, 4, 20, q_len), np.float32).swapaxes(-1, -2)
        assert attnc.weighted_sum(np.asfortranarray(weights), value[::-1][::-1], out=out) is out
        assert_same_bits(out, wanted)
        assert_same_bits(attnc.weighted_sum(weights[:1], value[:1]), wanted[:1])
        assert_same_bits(attnc.weighted_sum(weights[:, :2], value[:, :1]), wanted[:, :2])
        swapped = weights.astype(">f4"), value.astype(">f4")
        assert_same_bits(attnc.weighted_sum(*swapped), wanted)


@pytest.mark.parametrize("q_len", [4, 80])
def test_the_chain_gives_the_output(isa, q_len, seed):
    """weighted_sum(softmax(scores)) is attention, to rounding."""
    random = np.random.default_rng(seed)
    query, key, value = (normal(random, (2, n, 16), "float64") for n in (q_len, 120, 120))
    weights = attnc.softmax(attnc.attention_scores(query, key, causal=True))
    chained = attnc.weighted_sum(weights, value)
    np.testing.assert_allclose(chained, attnc.attention(query, key, value, causal=True), rtol=0, atol=1e-14)


def test_read_only_weights(isa, seed):
    random = np.random.default_rng(seed)
    weights, value = shares(random, (2, 9, 30), "float32"), normal(random, (2, 30, 4))
    wanted = attnc.weighted_sum(weights, value)
    weights.flags.writeable = value.flags.writeable = False
    assert_same_bits(attnc.weighted_sum(weights, value), wanted)
    check(np.broadcast_to(weights[:1, :1], weights.shape), value)
