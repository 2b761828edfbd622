"""Bug cases on masks, biases, causal alignment, windows, and on NaN behind and before them."""

import itertools

import numpy as np
import pytest
from bug_checks import BF16, DTYPES, EXTRA, F16, F32, F64, assert_same_bytes, buried, check, qkv, randn, rows_of_scores
from checking import expected

import attnc
from attnc import reference


def test_b01_fully_masked_rows(api):
    mask = np.array([[1, 0, 0, 1], [1, 1, 0, 0], [0, 0, 0, 0]], bool)
    for dtype in DTYPES:
        inputs = qkv(1, (1, 1), 3, 4, 4, dtype=dtype)
        for options in ({"mask": mask}, {"bias": np.where(mask, 0, -np.inf).astype(dtype)}):
            with np.errstate(all="raise"):
                result = check(api, *inputs, **options)
            assert (result.output[..., 2, :] == 0).all() and (result.weights[..., 2, :] == 0).all()
            assert (result.lse[..., 2] == -np.inf).all()


@pytest.mark.parametrize("bad", [1e10, np.nan, np.inf, -np.inf, 1e38])
def test_b03_what_is_masked_changes_no_bit(api, bad):
    clean = np.arange(8, dtype=F32).reshape(1, 2, 4)
    mask = np.array([True, False])
    for which in range(2):
        inputs = [clean, clean.copy(), clean.copy()]
        inputs[1 + which][0, 1, 0] = bad
        result = api.attention(*inputs, mask=mask, want="weights")
        assert_same_bytes(result.output, np.ascontiguousarray(np.broadcast_to(clean[:, :1], (1, 2, 4))))
        assert_same_bytes(result.weights, np.array([[[1, 0], [1, 0]]], F32))


def test_b05_nan_that_is_seen_stays(api):
    for options in ({}, {"causal": True}):
        query, key, value = qkv(5, (2, 4), 16, 16, 8)
        clean = api.attention(query, key, value, **options)
        query[0, 1, 3, 2] = np.nan
        result = api.attention(query, key, value, want=EXTRA, **options)
        bad = np.zeros((2, 4, 16), bool)
        bad[0, 1, 3] = True
        for array in vars(result).values():
            assert np.isnan(array[bad]).all()
        np.testing.assert_array_equal(result.output[~bad], clean[~bad])
    assert np.isnan(api.attention(np.full_like(query, np.nan), key, value)).all()


def test_b05_nan_in_one_column_of_the_values_reaches_that_column(api):
    query, key, value = qkv(55, (1, 2), 5, 40, 8)
    clean = api.attention(query, key, value)
    value[0, 0, 33, 2] = np.nan
    result = api.attention(query, key, value)
    assert np.isnan(result[0, 0, :, 2]).all()
    others = np.arange(8) != 2
    np.testing.assert_allclose(result[0, 0][:, others], clean[0, 0][:, others], rtol=0, atol=1e-6)
    assert_same_bytes(result[0, 1], clean[0, 1])


def test_b07_a_row_without_keys_is_not_the_mean(api):
    query, key, _ = qkv(7, (1, 1), 4, 4, 4)
    value = np.full((1, 1, 4, 4), 7, F32)
    without_two = np.arange(4)[:, None] != 2
    last_only = np.tri(4, dtype=bool)
    last_only[1] = [0, 0, 0, 1]  # allowed by the mask alone and by causal alone, by both together nothing
    for mask, row, options in ((without_two, 2, {}), (last_only, 1, {"causal": True}),
                               (last_only, 1, {"window": (1, 0)})):
        result = check(api, query, key, value, mask=np.broadcast_to(mask, (4, 4)), **options)
        assert (result.output[0, 0, row] == 0).all() and (result.weights[0, 0, row] == 0).all()


def test_b09_causal_with_fewer_rows_than_keys(api):
    for q_len, kv_len in ((1, 4), (1, 16), (2, 10), (5, 7), (16, 16), (3, 130), (65, 130), (7, 3), (130, 65)):
        check(api, *qkv(9, (2, 2), q_len, kv_len, 8), causal=True)
    query, key, value = qkv(90, (1, 2), 40, 40, 8)
    whole = api.attention(query, key, value, causal=True)
    for n in (1, 2, 7, 39):
        np.testing.assert_allclose(api.attention(query[..., -n:, :], key, value, causal=True), whole[..., -n:, :],
                                   rtol=0, atol=1e-6)


def test_b11_the_cap_comes_before_the_mask(api):
    query, key, value = qkv(11, (1, 2), 4, 4, 8)
    value[..., 3, :] = 1e6
    seen = np.tri(4, dtype=bool)
    for options in ({"causal": True}, {"bias": np.where(seen, 0, -np.inf).astype(F32)}, {"mask": seen}):
        result = check(api, query, key, value, softcap=2.0, **options)
        assert (np.abs(result.output[..., :3, :]) < 10).all()
    query, key, value = qkv(111, (1, 2), 4, 4, 8)
    check(api, query * 5, key, value, softcap=2.0, bias=randn(112, (4, 4)) * 4)


@pytest.mark.parametrize("dtype", ["u1", "i8", "f4", "f2"])
def test_b25_a_mask_that_is_not_bool_is_refused(api, dtype):
    query, key, value = qkv(25, (1, 2), 3, 6, 8)
    mask = np.array([1, 0, 1, 1, 0, 1])
    check(api, query, key, value, mask=mask.astype(bool))
    for name in ("mask", "key_mask"):
        with pytest.raises(TypeError, match=name):
            api.attention(query, key, value, **{name: mask.astype(dtype)})


def test_b25_a_bias_of_any_float_type_adds_and_others_are_refused(api):
    query, key, value = qkv(25, (1, 2), 3, 6, 8)
    ones = np.array([1, 0, 1, 1, 0, 1])
    for dtype in DTYPES:
        check(api, query, key, value, bias=ones.astype(dtype))
        check(api, *(x.astype(F16) for x in (query, key, value)), bias=randn(251, (3, 6), dtype))
    for dtype in (bool, np.uint8, np.int64):
        with pytest.raises(TypeError, match="bias"):
            api.attention(query, key, value, bias=ones.astype(dtype))


def test_b37_a_window_bounds_both_sides(api):
    for window in ((0, 0), (3, 0), (0, 3), (3, 5), (None, 2), (2, None), (None, None), (50, 50)):
        for (q_len, kv_len), causal in itertools.product(((20, 20), (7, 20), (20, 7), (40, 1)), (False, True)):
            check(api, *qkv(37, (1, 2), q_len, kv_len, 8), window=window, causal=causal)
    query, key, value = qkv(370, (1, 1), 9, 9, 4)
    result = api.attention(query, key, value, window=(0, 0), want="weights")
    assert_same_bytes(result.output, value)
    assert_same_bytes(result.weights, np.eye(9, dtype=F32)[None, None])


@pytest.mark.parametrize("options", [
    {"causal": True, "q_offset": -50}, {"causal": True, "q_offset": -5}, {"window": (3, 0), "q_offset": 5000},
    {"window": (3, 0), "q_offset": -5000}, {"window": (None, 3), "q_offset": -5000},
    {"window": (3, None), "q_offset": 5000}, {"window": (2**60, 2**60)}, {"kv_lengths": [0, 3]},
    {"kv_lengths": [0, 3], "causal": True}, {"q_lengths": [0, 1]}, {"kv_lengths": 0},
    {"window": (0, 0), "kv_lengths": [0, 3]}, {"key_mask": [[False], [True]]},
])
@pytest.mark.parametrize("q_len, kv_len", [(20, 7), (1, 7), (20, 700), (3, 3000), (40, 1)])
def test_b37_rows_and_blocks_that_lie_outside_of_everything(isa, q_len, kv_len, options):
    if np.max(options.get("kv_lengths", 0)) > kv_len:
        options = options | {"kv_lengths": [0, kv_len]}
    if "key_mask" in options:
        options = {"key_mask": np.repeat(options["key_mask"], kv_len, 1)}
    query, key, value = qkv(371, (2, 2), q_len, kv_len, 8)
    want = expected(reference.attention, query, key, value, want=("weights", "lse", "scores"), **options)
    got = attnc.attention(query, key, value, want=("weights", "lse", "scores"), **options)
    for name, array in vars(want).items():
        np.testing.assert_allclose(getattr(got, name), array, rtol=1e-5, atol=1e-5)
    assert_same_bytes(attnc.attention(query, key, value, **options), got.output)
    np.testing.assert_array_equal(attnc.attention_weights(query, key, **options), got.weights)
    np.testing.assert_array_equal(attnc.attention_scores(query, key, **options), got.scores)


def test_b39_causal_holds_when_weights_are_wanted(api):
    for lead in ((), (2,), (2, 3), (2, 2, 3)):
        for dtype in DTYPES:
            check(api, *qkv(39, lead, 9, 9, 8, dtype=dtype), causal=True)
    query, key, value = qkv(391, (1, 2), 12, 12, 8)
    clean = api.attention(query, key, value, causal=True)
    key[..., 8:, :] = value[..., 8:, :] = 1e6
    for want in ((), "weights", EXTRA):
        result = api.attention(query, key, value, causal=True, want=want)
        assert_same_bytes(getattr(result, "output", result)[..., :8, :], clean[..., :8, :])


def test_b41_inputs_that_are_broadcast_views(api):
    random = np.random.default_rng(41)
    query = randn(random, (2, 4, 5, 8))
    key = np.broadcast_to(randn(random, (2, 1, 7, 8)), (2, 4, 7, 8))
    value = np.broadcast_to(randn(random, (1, 1, 7, 6)), (2, 4, 7, 6))
    check(api, query, key, value)
    check(api, query, key, value, bias=np.broadcast_to(randn(random, (1, 7)), (2, 4, 5, 7)))
    check(api, query, key, value, mask=np.broadcast_to(random.random((2, 1, 1, 7)) > 0.3, (2, 4, 5, 7)))
    check(api, query, key, value, mask=random.random((2, 1, 1, 7)) > 0.3)
    one = np.broadcast_to(F32.type(3), value.shape)
    check(api, np.broadcast_to(query[:, :, :1], query.shape), key, one, causal=True)


def test_b55_a_mask_of_true_alone_changes_nothing(api):
    query, key, value = qkv(55, (2, 4), 8, 8, 16)
    plain = api.attention(query, key, value)
    for mask in (np.ones((2, 4, 8, 8), bool), np.ones((8, 8), bool), np.ones(8, bool), np.array(True)):
        assert_same_bytes(api.attention(query, key, value, mask=mask), plain)


def test_b55_masks_with_strides(api):
    query, key, value = qkv(55, (2, 4), 8, 8, 16)
    large = np.random.default_rng(551).random((2, 4, 16, 24)) > 0.4
    record = np.zeros((8, 8), [("other", "u1"), ("mask", "?")])
    record["mask"], record["other"] = large[0, 0, :8, :8], 1
    transposed = large[:, :, :8, :8].swapaxes(-1, -2)
    for mask in (large[:, :, ::2, ::3], transposed, large[:, :, 7::-1, 7::-1], record["mask"]):
        check(api, query, key, value, mask=mask)


def test_b55_bytes_other_than_1_are_true(api):
    inputs = qkv(55, (2, 4), 8, 8, 16)
    number = np.random.default_rng(552).integers(0, 4, (8, 8)).astype(np.uint8)
    assert_same_bytes(api.attention(*inputs, mask=number.view(bool)), api.attention(*inputs, mask=number != 0))


def test_b57_grouped_heads_and_masks(api):
    inputs = qkv(57, (2, 4), 3, 5, 8, kv_heads=2)
    random = np.random.default_rng(571)
    for shape in ((2, 1, 3, 5), (1, 4, 3, 5), (4, 3, 5), (2, 4, 1, 5), (4, 1, 1), (2, 1, 1, 1)):
        check(api, *inputs, mask=random.random(shape) > 0.3)
        check(api, *inputs, bias=randn(random, shape))


def test_b87_allowed_scores_far_below_any_mask_value(api):
    for dtype, lows in ((F32, (-2e5, -1e30, -3e38)), (F64, (-2e5, -1e300)), (F16, (-6e4,)), (BF16, (-1e30,))):
        for low in lows:
            query, key, value = rows_of_scores([low, 0, low, 0, low * 0.9], dtype)
            result = api.attention(query, key, value, mask=np.array([1, 0, 1, 0, 0], bool), scale=1.0, want="weights")
            np.testing.assert_array_equal(result.weights.astype(F64), [[0.5, 0, 0.5, 0, 0]])


def test_b92_a_bias_broadcast_over_any_axes(api):
    for q_len in (7, 1):
        inputs = qkv(921, (3, 5), q_len, 11, 8)
        whole = (3, 5, q_len, 11)
        for keep in itertools.product((False, True), repeat=4):
            bias = buried(randn(92, [n if kept else 1 for n, kept in zip(whole, keep, strict=True)]))
            check(api, *inputs, bias=bias)
            check(api, *inputs, bias=np.broadcast_to(bias, whole))
            check(api, *inputs, mask=bias > 0)


def test_b99_a_mask_is_not_added(api):
    _, key, value = qkv(99, (1, 1), 1, 4, 4)
    weights = api.attention_weights(np.zeros((1, 1, 1, 4), F32), key, mask=np.array([1, 1, 0, 0], bool))
    np.testing.assert_array_equal(weights, [[[[0.5, 0.5, 0, 0]]]])
    check(api, np.zeros((1, 1, 1, 4), F32), key, value, mask=np.array([1, 1, 0, 0], bool))
