"""bfloat16 alone: pairs of depths and of keys, where the processor multiplies them so, and everywhere else the same."""

import ml_dtypes
import numpy as np
import pytest
from checking import assert_same_bits, check_attention, inputs

import attnc

BF16 = np.dtype(ml_dtypes.bfloat16)
ROWS = 20        # beyond those that read keys in place


@pytest.mark.parametrize("head_dim, value_dim", [(1, 1), (7, 16), (16, 33), (33, 7), (64, 96), (130, 3), (600, 40)])
@pytest.mark.parametrize("kv_len", [1, 2, 63, 129, 515])
def test_odd_depths_and_odd_lengths(isa, seed, head_dim, value_dim, kv_len):
    random = np.random.default_rng(seed)
    arrays = inputs(random, (1,), 2, 1, ROWS, kv_len, head_dim, value_dim, dtype="bfloat16")
    check_attention(*arrays, causal=True, q_offset=3)


@pytest.mark.parametrize("scale", [0.25, -0.25])
def test_gaps_between_elements_and_between_rows(isa, seed, scale):
    random = np.random.default_rng(seed)
    arrays = inputs(random, (1,), 2, 2, ROWS, 77, 10, dtype="bfloat16")
    plain = check_attention(*arrays, scale=scale)
    apart = [np.repeat(x, 3, axis=-1)[..., ::3] for x in arrays]
    shifted = [np.concatenate([x[..., :1], x], axis=-1)[..., 1:] for x in arrays]
    for changed in (apart, shifted):
        assert_same_bits(attnc.attention(*changed, scale=scale, want=("lse", "weights", "scores")), plain)


@pytest.mark.parametrize("first", [0, 1, 4, 5])
@pytest.mark.parametrize("poison", [np.nan, np.inf, 3e38])
def test_the_other_key_of_a_pair_changes_nothing_where_it_is_hidden(isa, seed, first, poison):
    """Rows see an odd number of keys from `first` on, so that a pair is cut at one end or both."""
    random = np.random.default_rng(seed)
    query, key, value = inputs(random, (1,), 1, 1, ROWS, 40, 16, dtype="bfloat16")
    mask = np.zeros((ROWS, 40), bool)
    mask[:, first:first + 7] = True
    clean = check_attention(query, key, value, mask=mask)
    key[..., ~mask[0], :] = value[..., ~mask[0], :] = poison
    assert_same_bits(attnc.attention(query, key, value, mask=mask), clean.output)


def test_values_below_the_smallest_normal_number_are_summed(isa):
    """The instruction takes them for 0, so they have to leave the product."""
    smallest = np.array(1, np.uint16).view(BF16)
    value = np.full((1, 6, 4), smallest * 64, BF16)
    zeros = np.zeros((1, ROWS, 8), BF16)
    got = attnc.attention(zeros, np.zeros((1, 6, 8), BF16), value)
    assert got.dtype == BF16 and np.all(got == value[0, 0])


def test_means_of_numbers_near_the_largest_stay_finite(isa):
    value = np.full((1, 31, 4), 3.3e38, BF16)
    got = attnc.attention(np.zeros((1, ROWS, 8), BF16), np.zeros((1, 31, 8), BF16), value)
    assert np.all(got == value[0, 0])


@pytest.mark.parametrize("q_len", [1, 4, 7, 8])
@pytest.mark.parametrize("kv_len", [1, 63, 700])
def test_few_rows_read_pairs_in_place(isa, seed, q_len, kv_len):
    random = np.random.default_rng(seed)
    arrays = inputs(random, (1,), 2, 1, q_len, kv_len, 64, 128, dtype="bfloat16")
    plain = check_attention(*arrays, scale=-0.1, window=(37, 2))
    apart = [np.repeat(x, 3, axis=-1)[..., ::3] for x in arrays]
    assert_same_bits(attnc.attention(*apart, scale=-0.1, window=(37, 2), want=("lse", "weights", "scores")), plain)


@pytest.mark.parametrize("first", [0, 1, 4, 5])
@pytest.mark.parametrize("poison", [np.nan, np.inf, 3e38, 1e-39])
@pytest.mark.parametrize("rows", [3, 13, 16])
def test_hidden_values_in_place_change_nothing(isa, seed, first, poison, rows):
    random = np.random.default_rng(seed)
    query, key, value = inputs(random, (1,), 1, 1, rows, 40, 64, dtype="bfloat16")
    mask = np.zeros((rows, 40), bool)
    mask[:, first:first + 7] = True
    clean = check_attention(query, key, value, mask=mask)
    key[..., ~mask[0], :] = value[..., ~mask[0], :] = poison
    assert_same_bits(attnc.attention(query, key, value, mask=mask), clean.output)


@pytest.mark.parametrize("number", [*np.array([1, 127], np.uint16).view(BF16), 3.3e38])
@pytest.mark.parametrize("rows", [3, 13, 16])
def test_values_in_place_that_leave_the_product(isa, number, rows):
    """They may stand in some columns alone, and so in one of the register tiles."""
    value = np.ones((1, 31, 64), BF16)
    value[..., 40:50] = number
    got = attnc.attention(np.zeros((1, rows, 64), BF16), np.zeros((1, 31, 64), BF16), value)
    assert np.all(got == value[0, 0])


@pytest.mark.parametrize("number", [np.nan, np.inf, 3.3e38, 1e-39])
@pytest.mark.parametrize("rows", range(7, 17))
def test_equal_rows_in_place_have_the_same_bits(isa, seed, number, rows):
    """The last rows may be a lower and wider register tile than those before: 13 are 7 and 6."""
    query, key, value = inputs(np.random.default_rng(seed), (), 1, 1, rows, 40, 64, 128, dtype="bfloat16")
    query[..., 1:, :] = query[..., :1, :]
    value[..., 17, 40] = value[..., 30, 127] = number
    got = attnc.attention(query, key, value)
    assert_same_bits(got, np.repeat(got[..., :1, :], rows, axis=-2))
