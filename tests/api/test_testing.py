"""The helpers that judge results: above all that they can fail."""

import ml_dtypes
import numpy as np
import pytest

from attnc import masks, reference
from attnc.results import AttentionResult
from attnc.testing import Case, assert_within, error_and_tolerance, tolerance

EPS = float(np.finfo(np.float32).eps)


def triple():
    """A right result, the exact one and an honest one half an eps off."""
    exact = np.linspace(0.5, 0.9, 6).reshape(2, 3)
    exact[1, 0], exact[1, 1] = np.nan, -np.inf
    honest = exact.astype(np.float32)
    return honest.copy(), exact, honest


def test_a_right_result_passes():
    got, exact, honest = triple()
    assert_within(got, exact, honest)
    got[0, 1] += 3 * EPS
    assert_within(got, exact, honest)
    error, limit = error_and_tolerance(got, exact, honest)
    assert 2 * EPS < error <= limit
    empty = np.zeros((0, 3), np.float32)
    assert_within(empty, empty, empty)


@pytest.mark.parametrize("index, wrong", [
    ((0, 1), 0.6), ((0, 1), 0.58 + 6 * EPS), ((0, 0), np.nan), ((0, 0), np.inf), ((1, 0), 0.0), ((1, 1), np.inf),
    ((1, 1), np.nan), ((1, 1), -1e38), ((1, 0), np.inf)])
def test_a_wrong_element_fails(index, wrong):
    got, exact, honest = triple()
    got[index] = wrong
    with pytest.raises(AssertionError, match=rf"weights\[{index[0]}, {index[1]}\] is .* 1 of 6 elements"):
        assert_within(got, exact, honest, name="weights")
    error, limit = error_and_tolerance(got, exact, honest)
    assert error > limit
    assert np.isfinite(limit)
    assert np.isfinite(error) == (index[0] == 0 and np.isfinite(wrong))


@pytest.mark.parametrize("change, words", [
    (lambda x: x.astype(np.float64), "dtype float64, wanted float32"),
    (lambda x: x[:, :2], r"shape \(2, 2\), wanted \(2, 3\)"),
    (lambda x: x[None], r"shape \(1, 2, 3\)")])
def test_a_wrong_dtype_or_shape_fails(change, words):
    got, exact, honest = triple()
    with pytest.raises(AssertionError, match=words):
        assert_within(change(got), exact, honest)
    assert error_and_tolerance(change(got), exact, honest)[0] == np.inf


def test_tolerance_is_the_rule():
    exact = np.array([1.0, 2.0])
    honest = np.array([1.0, 2.0 + 8 * EPS], np.float32)
    assert tolerance(exact, honest, scale=3.0) == 2 * 8 * EPS + 4 * EPS * 3
    assert tolerance(exact, honest.astype(np.float64)) == 2 * 8 * EPS + 4 * 2.0**-52
    assert tolerance(exact, honest, eps_dtype=ml_dtypes.bfloat16) == 2 * 8 * EPS + 4 * 2.0**-7
    assert tolerance(exact, exact.astype(ml_dtypes.bfloat16)) == 4 * 2.0**-7


def test_a_wrong_twin_earns_no_slack():
    exact, honest = np.array([1.0, 2.0]), np.array([np.nan, 2.0], np.float32)
    assert tolerance(exact, honest) == 4 * EPS
    with pytest.raises(AssertionError):
        assert_within(honest, exact, honest)


def test_beyond_the_range_of_the_dtype_is_infinite():
    exact = np.array([1e6])
    assert_within(np.array([np.inf], np.float16), exact, np.array([np.inf], np.float16))
    with pytest.raises(AssertionError):
        assert_within(np.array([65504], np.float16), exact, np.array([np.inf], np.float16))


@pytest.mark.parametrize("options", [
    {}, {"causal": True}, {"window": (2, 0)}, {"window": (1, 3), "causal": True, "q_offset": 2}, {"scale": 2.0},
    {"kv_lengths": 4, "q_lengths": (1, 3)}, {"mask": np.arange(48).reshape(4, 3, 4) % 3 > 0},
    {"want": ("lse",), "layout": "bnhd"}], ids=str)
def test_flops_count_what_is_visible(options):
    kv_len = 4 if "mask" in options else 7
    case = Case("name", 2, 4, 2, 3, kv_len, 8, value_dim=5, options=tuple(options.items()))
    arrays, made = case.make(0)
    assert made == dict(options)
    scores = reference.attention(*arrays, **{**options, "want": "scores"}).scores
    assert case.flops == 2 * (8 + 5) * np.isfinite(scores).sum()


def test_case():
    case = Case("name", 2, 4, 2, 3, 7, 8, dtype="bfloat16", value_dim=5)
    (query, key, value), options = case.make(1)
    assert (query.shape, key.shape, value.shape) == ((2, 4, 3, 8), (2, 2, 7, 8), (2, 2, 7, 5))
    assert query.dtype == key.dtype == value.dtype == ml_dtypes.bfloat16 and options == {}
    output = reference.attention(query, key, value)
    assert case.bytes == query.nbytes + key.nbytes + value.nbytes + output.nbytes
    assert str(case) == "name"
    again, other = case.make(1)[0], case.make(2)[0]
    assert all(x.tobytes() == y.tobytes() for x, y in zip(again, (query, key, value), strict=True))
    assert other[0].tobytes() != query.tobytes()
    assert Case("name", 1, 1, 1, 1, 1, 8).value_dim == 8


def test_attention_result():
    result = AttentionResult(np.zeros((2, 8)), lse=np.zeros(2))
    assert repr(result) == "AttentionResult(output (2, 8) float64, lse (2,) float64)"
    assert not hasattr(result, "weights")


@pytest.mark.parametrize("window", [None, (None, None), (2, None), (None, 1), (1, 3), (0, 0)], ids=str)
@pytest.mark.parametrize("q_len, kv_len", [(5, 9), (9, 5), (4, 4), (0, 3), (3, 0)])
@pytest.mark.parametrize("causal", [False, True])
def test_flops_of_a_range_of_keys_are_those_of_its_mask(q_len, kv_len, causal, window):
    options = {"causal": causal} | ({} if window is None else {"window": window})
    case = Case("name", 2, 3, 1, q_len, kv_len, 4, options=tuple(options.items()))
    mask = masks.window_mask(q_len, kv_len, window or (None, None)) & (masks.causal_mask(q_len, kv_len) | (not causal))
    assert case.flops == 2 * 3 * 16 * mask.sum()


def test_flops_of_a_long_case_need_no_matrix():
    case = Case("name", 1, 1, 1, 2**20, 2**20, 64, options=(("causal", True),))
    assert case.flops == 256 * (2**20 * (2**20 + 1) // 2)


def test_nothing_is_within_a_tolerance_that_is_nan():
    with pytest.raises(AssertionError, match="wrong"):
        assert_within(np.array([1.0]), np.array([2.0]), np.array([2.0]), scale=np.nan)
