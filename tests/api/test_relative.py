"""The bias of distances: what it means, and T5's table of buckets."""

import numpy as np
import pytest
from checking import assert_same_bits, inputs

import attnc
from attnc import reference


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"q_offset": 5, "window": (20, 3)}, {"kv_lengths": [40, 9]}],
                         ids=str)
def test_it_is_a_bias_that_repeats(isa, options, seed):
    """To the bit what a bias of the whole matrix gives; rows and keys count from 0 whatever the options are."""
    random = np.random.default_rng(seed)
    for q_len, kv_len in ((30, 50), (2, 50), (50, 3), (1, 1)):
        if "kv_lengths" in options:
            options = {"kv_lengths": [kv_len, kv_len // 2]}
        arrays = inputs(random, (2,), 4, 2, q_len, kv_len, 16)
        relative = random.standard_normal((4, q_len + kv_len - 1)).astype(np.float32)
        dense = relative[:, np.arange(kv_len) - np.arange(q_len)[:, None] + q_len - 1]
        got, wanted = (attnc.attention(*arrays, want=("lse", "weights"), **one, **options)
                       for one in ({"relative_bias": relative}, {"bias": dense}))
        for name in ("output", "lse", "weights"):
            assert_same_bits(getattr(got, name), getattr(wanted, name), name)


def test_alibi_is_a_special_case(isa):
    query, key, value = inputs(np.random.default_rng(0), (), 4, 2, 9, 30, 8, dtype="float64")
    slopes, places = attnc.alibi_slopes(4), np.arange(38) - 8 - 21      # behind the row, which stands at i + 21
    got = attnc.attention(query, key, value, relative_bias=-slopes[:, None] * np.abs(places))
    np.testing.assert_allclose(got, attnc.attention(query, key, value, alibi_slopes=slopes), rtol=0, atol=1e-14)


def test_minus_infinity_in_either_bias_forbids(isa):
    """Also where the other is plus infinity, and where the key or its value is NaN."""
    query, key, value = inputs(np.random.default_rng(0), (), 2, 2, 5, 7, 8)
    key[:, 3], value[:, 3] = np.nan, np.inf
    bias, relative = np.zeros((5, 7), np.float32), np.zeros(11, np.float32)
    bias[:, 3], relative[2] = -np.inf, np.inf
    relative[0] = -np.inf
    bias[4, 0] = np.inf                                     # the place of the first distance
    bias[[4, 3, 2], [2, 1, 0]] = -np.inf                    # those of the third
    got = attnc.attention(query, key, value, bias=bias, relative_bias=relative, want="weights")
    wanted = reference.attention(query, key, value, bias=bias, relative_bias=relative, want="weights")
    assert np.isfinite(got.output).all() and not got.weights[:, :, 3].any() and not got.weights[:, 4, 0].any()
    np.testing.assert_allclose(got.output, wanted.output, rtol=0, atol=1e-6)


@pytest.mark.parametrize("bidirectional", [True, False])
def test_t5_there_and_back(bidirectional):
    """The gradient of a table is the transpose of what makes the bias from it."""
    random = np.random.default_rng(0)
    options = {"q_offset": 7, "max_distance": 40, "bidirectional": bidirectional}
    table, grad = random.standard_normal((12, 3)), random.standard_normal((3, 99))
    bias = attnc.t5_relative_bias(table, 50, 50, **options)
    back = attnc.t5_relative_bias_backward(grad, 12, 50, 50, **options)
    assert bias.shape == (3, 99) and back.shape == (12, 3)
    np.testing.assert_allclose((bias * grad).sum(), (table * back).sum(), rtol=1e-12)


def test_t5_buckets_by_distance():
    """A bucket for each of the first four distances on either side, then wider ones, the last without an end."""
    table = np.arange(16.0)[:, None]
    bias = attnc.t5_relative_bias(table, 1, 200, q_offset=100, max_distance=32)[0]
    assert bias[100] == 0 and bias[[99, 98, 97, 96]].tolist() == [1, 2, 3, 4]
    assert bias[[101, 102, 103, 104]].tolist() == [9, 10, 11, 12]
    assert (np.diff(bias[:101]) <= 0).all() and bias[:68].min() == bias[0] == 7 and bias[133:].min() == bias[-1] == 15
    one_side = attnc.t5_relative_bias(table, 1, 200, q_offset=100, max_distance=32, bidirectional=False)[0]
    assert not one_side[100:].any() and one_side[[99, 92]].tolist() == [1, 8] and one_side[0] == 15


@pytest.mark.parametrize("error, options, words", [
    (ValueError, {"table": np.ones(4)}, "table has shape"), (TypeError, {"table": np.ones((4, 1), complex)}, "table"),
    (ValueError, {"table": np.ones((3, 1))}, "buckets must be"), (ValueError, {"q_len": -1}, "q_len"),
    (TypeError, {"kv_len": 2.0}, "kv_len"), (ValueError, {"max_distance": 2}, "max_distance"),
    (TypeError, {"bidirectional": 1}, "bidirectional"), (TypeError, {"q_offset": 0.5}, "q_offset")])
def test_t5_refuses(error, options, words):
    with pytest.raises(error, match=words):
        attnc.t5_relative_bias(**({"table": np.ones((8, 2)), "q_len": 3, "kv_len": 4} | options))


def test_t5_backward_refuses_another_length():
    with pytest.raises(ValueError, match=r"grad_output has shape \(2, 7\); wanted .* \(heads, 6\)"):
        attnc.t5_relative_bias_backward(np.ones((2, 7)), 8, 3, 4)


def test_no_rows_or_keys():
    for q_len, kv_len in ((0, 3), (3, 0), (0, 0)):
        assert attnc.t5_relative_bias(np.ones((8, 2)), q_len, kv_len).shape == (2, max(q_len + kv_len - 1, 0))
        arrays = inputs(np.random.default_rng(0), (), 2, 2, q_len, kv_len, 4)
        got = attnc.attention(*arrays, relative_bias=np.zeros((2, max(q_len + kv_len - 1, 0))))
        assert got.shape == (2, q_len, 4) and not got.any()
