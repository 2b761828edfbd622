"""What must hold between calls, to rounding: order of keys, grouped heads, masks said in two ways, merging."""

import numpy as np
import pytest
from checking import PATHS, WANT, assert_same_bits, inputs, largest

import attnc
from attnc import masks

EPS = float(np.finfo(np.float64).eps)


@pytest.fixture(params=PATHS)
def arrays(request, seed):
    """Query, key and value in float64, of each path."""
    return inputs(np.random.default_rng(seed), (2,), *PATHS[request.param], dtype="float64")


def assert_near(a, b, terms=1):
    """To a forward bound: each of `terms` products and sums rounds once."""
    for name in vars(a):
        x, y = getattr(a, name), getattr(b, name)
        np.testing.assert_array_equal(np.isfinite(x), np.isfinite(y))
        np.testing.assert_allclose(x, y, rtol=0, atol=(64 + terms) * EPS * max(1.0, largest(x)), err_msg=name)


def test_the_order_of_the_keys(isa, arrays, seed):
    query, key, value = arrays
    order = np.random.default_rng(seed).permutation(key.shape[-2])
    plain = attnc.attention(query, key, value, want=("lse", "weights"))
    mixed = attnc.attention(query, key[:, :, order], value[:, :, order], want=("lse", "weights"))
    mixed.weights = mixed.weights[..., np.argsort(order)]
    assert_near(plain, mixed, len(order))


def test_grouped_heads_are_repeated_heads(isa, arrays):
    query, key, value = arrays
    group = query.shape[1] // key.shape[1]
    grouped = attnc.attention(query, key, value, want=WANT, causal=True)
    repeated = attnc.attention(query, *(np.repeat(x, group, 1) for x in (key, value)), want=WANT, causal=True)
    assert_near(grouped, repeated, key.shape[-2])


def test_options_are_masks(isa, arrays):
    """Causal, windows, lengths, segments, blocks and bias -inf say what a mask could say, to the bit."""
    query, key, value = arrays
    q_len, kv_len = query.shape[-2], key.shape[-2]
    lengths = np.array([kv_len - 5, kv_len // 2])
    q_segments, k_segments = np.arange(q_len) % 3 - 1, np.arange(kv_len) % 4 - 1
    causal = masks.causal_mask(q_len, kv_len)
    cells = np.random.default_rng(2).random((query.shape[1], -(-q_len // 16), -(-kv_len // 48))) < 0.3
    blocks = np.repeat(np.repeat(cells, 16, -2)[:, :q_len], 48, -1)[..., :kv_len]
    for options, mask in (
            ({"causal": True}, causal),
            ({"causal": True, "q_offset": 3}, masks.causal_mask(q_len, kv_len, 3)),
            ({"window": (40, 2)}, masks.window_mask(q_len, kv_len, (40, 2))),
            ({"key_mask": masks.length_mask(lengths, kv_len)}, masks.length_mask(lengths, kv_len)[:, None, None]),
            ({"kv_lengths": lengths, "q_offset": 0}, masks.length_mask(lengths, kv_len)[:, None, None]),
            ({"q_segments": q_segments, "k_segments": k_segments}, masks.segment_mask(q_segments, k_segments)),
            ({"block_mask": (cells, 16, 48)}, blocks),
            ({"block_mask": (cells, 16, 48), "causal": True}, blocks & causal),
            ({"mask": causal, "window": (40, None)}, causal & masks.window_mask(q_len, kv_len, (40, None)))):
        one = attnc.attention(query, key, value, want=WANT, **options)
        other = attnc.attention(query, key, value, want=WANT, mask=mask)
        assert_same_bits(one, other)
        bias = np.where(mask, 0.0, -np.inf)
        assert_near(one, attnc.attention(query, key, value, want=WANT, bias=bias), kv_len)


def test_parts_merge_by_their_lse(isa, arrays):
    query, key, value = arrays
    mask = np.random.default_rng(1).random((query.shape[-2], key.shape[-2])) < 0.5
    mask[0] = False
    whole = attnc.attention(query, key, value, mask=mask, want="lse")
    cut = key.shape[-2] // 3
    parts = [attnc.attention(query, key[:, :, side], value[:, :, side], mask=mask[:, side], want="lse")
             for side in (slice(None, cut), slice(cut, None))]
    lse = np.logaddexp(parts[0].lse, parts[1].lse)
    safe = np.where(lse == -np.inf, 0, lse)
    merged = sum(part.output * np.exp(part.lse - safe)[..., None] for part in parts)
    assert_near(whole, attnc.AttentionResult(merged, lse=lse), key.shape[-2])


def test_sinks_are_a_key_without_value(isa, arrays):
    query, key, value = arrays
    sinks = np.linspace(-2, 2, query.shape[1])
    got = attnc.attention(query, key, value, sinks=sinks, want=("lse", "weights"))
    plain = attnc.attention(query, key, value, want=("lse", "weights"))
    lse = np.logaddexp(plain.lse, sinks[:, None])
    share = np.exp(plain.lse - lse)[..., None]
    assert_near(got, attnc.AttentionResult(plain.output * share, lse=lse, weights=plain.weights * share), key.shape[-2])
    np.testing.assert_allclose(got.weights.sum(-1), 1 - np.exp(sinks[:, None] - got.lse), atol=1e-13)


def test_shifting_all_scores_changes_no_weight(isa, arrays):
    query, key, value = arrays
    plain = attnc.attention(query, key, value, want=("lse", "weights"))
    shifted = attnc.attention(query, key, value, bias=np.full((1, 1), 8.0), want=("lse", "weights"))
    shifted.lse = shifted.lse - 8
    assert_near(plain, shifted, key.shape[-2])


def test_linear_in_the_values(isa, arrays):
    query, key, value = arrays
    output = attnc.attention(query, key, value)
    assert_same_bits(attnc.attention(query, key, value * 4), output * 4)
    constant = attnc.attention(query, key, np.full_like(value, 3.0))
    np.testing.assert_allclose(constant, 3, rtol=(64 + key.shape[-2]) * EPS)


def test_a_huge_softcap_is_none_and_a_small_one_evens_out(isa, arrays):
    query, key, value = arrays
    plain = attnc.attention(query, key, value, want=WANT)
    assert_near(plain, attnc.attention(query, key, value, want=WANT, softcap=1e9), key.shape[-2])
    even = attnc.attention_weights(query, key, softcap=1e-12)
    np.testing.assert_allclose(even, 1 / key.shape[-2], rtol=1e-11)


def test_alibi_is_a_bias(isa, arrays):
    query, key, value = arrays
    q_len, kv_len = query.shape[-2], key.shape[-2]
    slopes = attnc.alibi_slopes(query.shape[1])
    distance = np.abs(np.arange(kv_len) - (np.arange(q_len) + kv_len - q_len)[:, None])
    got = attnc.attention(query, key, value, alibi_slopes=slopes, want=WANT)
    assert_near(got, attnc.attention(query, key, value, bias=-slopes[:, None, None] * distance, want=WANT), kv_len)


def test_the_last_rows_of_the_whole_are_the_short_call(isa, seed):
    """Bottom-right alignment: what a decoder sees at each step is the last row of what it would see of all."""
    query, key, value = inputs(np.random.default_rng(seed), (), 4, 2, 130, 130, 16, dtype="float64")
    whole = attnc.attention(query, key, value, causal=True, want="lse")
    for rows in (1, 4, 5, 64, 100):
        short = attnc.attention(query[:, -rows:], key, value, causal=True, want="lse")
        assert_near(short, attnc.AttentionResult(whole.output[:, -rows:], lse=whole.lse[:, -rows:]), 130)
    for step in (1, 2, 17, 129):
        one = attnc.attention(query[:, step - 1:step], key[:, :step], value[:, :step], want="lse")
        assert_near(one, attnc.AttentionResult(whole.output[:, step - 1:step], lse=whole.lse[:, step - 1:step]), 130)
