"""Bug cases on the numbers: overflow, underflow, sums, lse, and the flags of the floating-point unit."""

import ctypes
import itertools
import math
import platform

import numpy as np
import pytest
from bug_checks import (
    BF16,
    DTYPES,
    EXTRA,
    F16,
    F32,
    F64,
    assert_same_bytes,
    buried,
    check,
    check_softmax,
    oracle,
    qkv,
    randn,
    rows_of_scores,
    wide,
)

import attnc
from attnc import reference


def eps(dtype):
    return 2.0**-7 if dtype == BF16 else float(np.finfo(dtype).eps)


def test_b15_parts_that_saw_nothing_merge(api):
    query, key, value = qkv(15, (1, 2), 6, 20, 8, dtype=F64)
    mask = np.random.default_rng(151).random((6, 20)) > 0.4
    mask[0, :10] = mask[1, 10:] = mask[2] = False
    whole = check(api, query, key, value, mask=mask)
    for cut in (10, 1, 19):
        parts = [api.attention(query, key[..., half, :], value[..., half, :], mask=mask[:, half], want="lse")
                 for half in (slice(0, cut), slice(cut, 20))]
        lse = np.logaddexp(parts[0].lse, parts[1].lse)
        share = [np.exp(np.where(np.isneginf(part.lse), -np.inf, part.lse - np.where(np.isneginf(lse), 0, lse)))
                 for part in parts]
        merged = sum(w[..., None] * part.output for w, part in zip(share, parts, strict=True))
        np.testing.assert_allclose(merged, whole.output, rtol=0, atol=1e-13)
        np.testing.assert_allclose(lse, whole.lse, rtol=0, atol=1e-13)


def test_b17_a_score_of_plus_infinity_is_nan_for_its_row_alone(api):
    for dtype in (F32, F64):
        for row in ([1, 1, np.inf], [np.inf, np.inf, 0], [np.inf, -np.inf, 2]):
            result = api.softmax(np.array([row, [2, 2, 2]], dtype))
            assert np.isnan(result[0]).all()
            np.testing.assert_allclose(result[1], 1 / 3, rtol=1e-6)
            query, key, value = np.ones((2, 1), dtype), np.array(row, dtype)[:, None], np.ones((3, 1), dtype)
            bias = np.array([[0, 0, 0], [-np.inf if math.isinf(x) else 0 for x in row]], dtype)
            weights = api.attention(query, key, value, bias=bias, want="weights").weights
            assert np.isnan(weights[0]).all() and np.isfinite(weights[1]).all()
    np.testing.assert_array_equal(api.softmax(np.array([1, 1, 1e38], F32)), [0, 0, 1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shift", [0, 80, 1000, -1000])
def test_b19_every_length_subtracts_the_maximum(api, dtype, shift):
    for n in range(1, 71):
        x = (np.linspace(-5, 5, n) + shift).astype(dtype)
        check_softmax(api, x)
        check(api, *rows_of_scores(x, dtype), scale=1.0)


def test_b21_weights_are_per_head(api):
    for kv_heads in (4, 2):
        inputs = qkv(21, (2, 4), 5, 7, 8, kv_heads=kv_heads)
        result = check(api, *inputs)
        assert result.weights.shape == (2, 4, 5, 7)
        assert np.abs(result.weights[:, 0] - result.weights[:, 1]).max() > 0.01
        values = np.repeat(inputs[2], 4 // kv_heads, 1)
        np.testing.assert_allclose(result.weights @ values, result.output, rtol=0, atol=1e-6)


def test_b45_weights_at_the_end_of_the_range(api):
    for dtype, drops, smallest, close in ((F32, np.arange(80, 110, 0.25), 1.2e-38, 2e-5),
                                          (F64, np.arange(700, 750, 0.5), 2.3e-308, 1e-12)):
        found = [float(api.softmax(np.array([0, -drop], dtype))[1]) for drop in drops]
        assert found == sorted(found, reverse=True)
        for drop, weight in zip(drops, found, strict=True):
            exact = math.exp(-drop)
            if exact > smallest * 1.01:
                assert abs(weight / exact - 1) < close
            assert 0 <= weight <= exact * (1 + close) + float(np.finfo(dtype).smallest_subnormal)


def test_b53_products_beyond_the_range_of_the_inputs(api):
    random = np.random.default_rng(53)
    query, key = ((60 + random.random((1, 1, n, 64))).astype(F16) for n in (3, 20))
    value = randn(random, (1, 1, 20, 8), F16)
    check(api, query, key, value)
    check(api, query * F16.type(4), key * F16.type(4), value, scale=1e-3)
    large = np.full((2, 1, 4), 1e19, F32)  # the product overflows float32: NaN, never a finite wrong number
    assert np.isnan(api.attention(large, large, large, scale=1e-38)).all()


def test_b73_the_lse_is_that_of_the_scores(api):
    query, key, value = qkv(73, (1, 1), 3, 200, 8, dtype=F64)
    bias = np.where(np.arange(200) < 100, 50.0, -50.0)
    for options in ({"bias": bias}, {"bias": -bias}, {"softcap": 3.0}, {"scale": 2.0}, {"scale": -2.0}):
        check(api, query, key, value, **options)


def test_b85_many_equal_scores_in_half_precision(api):
    for dtype in (F16, BF16):
        for n in (257, 512, 2049, 4096):
            np.testing.assert_array_equal(api.softmax(np.zeros((1, n), dtype)), np.full((1, n), 1 / n).astype(dtype))
        for n in (257, 512, 2049, 4096, 10000, 70000):
            query, key, value = np.zeros((1, 2, 4), dtype), np.zeros((1, n, 4), dtype), np.ones((1, n, 4), dtype)
            assert (api.attention(query, key, value) == 1).all()


def test_b85_many_equal_values(api):
    for dtype, n, q_len in itertools.product((F32, F64, F16), (512, 4096, 70000), (1, 64)):
        query, key, value = np.zeros((q_len, 4), dtype), np.zeros((n, 4), dtype), np.full((n, 4), 0.1, dtype)
        error = np.abs(api.attention(query, key, value) - wide(value[0, 0])).max()
        # sums of blocks of 512 keys, then of the blocks: half an eps for each addition, in the worst case all one way
        additions = n if api is reference else 512 + n / 512
        assert error <= 0.1 * (additions * eps(np.result_type(dtype, F32)) + eps(dtype)) / 2


@pytest.mark.parametrize("shift", [50, -50])
def test_b87_values_of_one_sign_stay_between_the_smallest_and_the_largest(api, shift):
    query, key, _ = qkv(872, (1, 2), 9, 600, 16)
    value = (shift + np.random.default_rng(873).random((1, 2, 600, 4))).astype(F32)
    output = api.attention(query * 10, key, value)
    slack = 600 * np.finfo(F32).eps * abs(shift)
    assert (output >= value.min() - slack).all() and (output <= value.max() + slack).all()


def test_b105_padding_is_no_key(api):
    for n in (*range(1, 71), 127, 128, 129, 130):
        query, key, value = rows_of_scores(np.full(n, -20.0), F32)
        result = api.attention(query, key, value, scale=1.0, want=EXTRA)
        np.testing.assert_allclose(result.output, 1, rtol=0, atol=4 * 2.0**-23)
        np.testing.assert_allclose(result.weights, 1 / n, rtol=1e-6)
        np.testing.assert_allclose(result.lse, -20 + math.log(n), rtol=1e-6)


def test_b107_huge_inputs(api):
    for dtype, n in itertools.product((F32, BF16, F64), (1, 2, 5)):
        query, key = np.full((1, 1, 1, 64), 133120, dtype), np.full((1, 1, n, 64), 133120, dtype)
        result = api.attention(query, key, key, want=EXTRA)
        np.testing.assert_allclose(result.output.astype(F64), query.astype(F64), rtol=4 * eps(dtype))
        assert_same_bytes(result.weights, np.full((1, 1, 1, n), 1 / n).astype(dtype))
        assert np.isfinite(result.lse).all()
    random = np.random.default_rng(107)
    query, key = ((random.standard_normal((1, 1, n, 64)) * 1e4).astype(F32) for n in (5, 40))
    weights = api.attention_weights(query, key)
    exact = oracle(query, key, key)
    assert np.isfinite(weights).all()
    np.testing.assert_allclose(weights.sum(-1), 1, rtol=1e-6)
    ranked = np.sort(exact["scores"], -1)
    clear = ranked[..., -1] - ranked[..., -2] > 1e4
    assert clear.any()
    same = weights.argmax(-1) == exact["scores"].argmax(-1)
    assert same[clear].all() and (weights.max(-1)[clear] > 0.999).all()


@pytest.mark.parametrize("dtype, close", [(F32, 3e-6), (F64, 1e-13), (F16, 2e-3), (BF16, 2e-2)], ids=str)
def test_b109_every_lane_computes_the_same_exponential(api, dtype, close):
    first = np.array([9.34623, 8.43469, 7.19462, 6.59385, 5.89481, 5.67304])
    x = np.concatenate([first - 0.1 * i for i in range(12)])
    for n in range(1, 71):
        y = x[:n].astype(dtype)
        exact = np.exp(wide(y) - wide(y).max())
        exact /= exact.sum()
        for weights in (api.softmax(y), api.attention_weights(*rows_of_scores(y, dtype)[:2], scale=1.0)[0]):
            np.testing.assert_allclose(wide(weights).astype(F64), exact.astype(F64), rtol=close)


INVALID_DIVIDE_OVERFLOW = {"x86_64": 1 | 4 | 8, "AMD64": 1 | 4 | 8}.get(platform.machine(), 1 | 2 | 4)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "fetestexcept"), reason="the C library does not show its flags")
def test_b90_the_flags_stay_as_they_were(isa):
    libm = ctypes.CDLL(None)
    for n in (*range(1, 41), 65):
        query, key, value = (buried(x) for x in qkv(90, (1, 2), 3, n, n))
        nothing, half = np.zeros(n, bool), np.where(np.arange(n) % 2, -np.inf, 0).astype(F32)
        for options in ({}, {"causal": True}, {"mask": nothing}, {"bias": half}, {"softcap": 1.0},
                        {"bias": (-60.0 * np.arange(n)).astype(F32)}):
            libm.feclearexcept(INVALID_DIVIDE_OVERFLOW)
            with np.errstate(all="raise"):
                attnc.attention(query, key, value, want=EXTRA, **options)
                attnc.softmax(query)
            assert libm.fetestexcept(INVALID_DIVIDE_OVERFLOW) == 0
