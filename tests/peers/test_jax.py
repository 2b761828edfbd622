"""Agreement with jax.nn.dot_product_attention, and one test for every way in which it means something else."""

import numpy as np
import pytest

import attnc
from attnc import reference
from attnc.testing import assert_within

pytestmark = pytest.mark.more
jax = pytest.importorskip("jax")


@pytest.fixture(autouse=True)
def double_precision():
    old = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", old)


def inputs(dtype="float32", q_heads=4, kv_heads=4, q_len=9, kv_len=13, head_dim=16):
    random = np.random.default_rng(0)
    shapes = (q_len, q_heads, head_dim), (kv_len, kv_heads, head_dim), (kv_len, kv_heads, head_dim)
    return [random.standard_normal((2, *shape)).astype(dtype) for shape in shapes]


def theirs(query, key, value, **options):
    result = jax.nn.dot_product_attention(query, key, value, implementation="xla", **options)
    return [np.asarray(x) for x in result] if options.get("return_residual") else np.asarray(result)


RANDOM = np.random.default_rng(1)
MASK = RANDOM.random((4, 9, 13)) < 0.7
MASK[..., 0] = True
BIAS = RANDOM.standard_normal((2, 1, 9, 13)).astype(np.float32)
AGREE = {  # sizes, our options, theirs
    "plain": ({}, {}, {}),
    "mask": ({}, {"mask": MASK}, {"mask": MASK}),
    "bias": ({}, {"bias": BIAS}, {"bias": BIAS}),
    "mask, bias and causal": ({}, {"mask": MASK, "bias": BIAS, "causal": True, "q_offset": 0},
                              {"mask": MASK, "bias": BIAS, "is_causal": True}),
    "grouped heads": ({"kv_heads": 2}, {}, {}),
    "scale": ({}, {"scale": 0.3}, {"scale": 0.3}),
    "window": ({"q_len": 13}, {"window": (3, 1)}, {"local_window_size": (3, 1)}),
    "lengths": ({}, {"kv_lengths": np.array([5, 13]), "q_offset": 0},
                {"key_value_seq_lengths": np.array([5, 13], np.int32)}),
}


@pytest.mark.parametrize("name", AGREE)
def test_agrees_with_jax_to_single_precision(name, isa):
    sizes, ours, options = AGREE[name]
    arrays = inputs(**sizes)
    other = theirs(*arrays, **options)
    exact = reference.attention(*[x.astype(np.float64) for x in arrays], layout="bnhd", **ours)
    # jax computes in float32 as well, so both are held to the same exact result by each other's error
    assert_within(attnc.attention(*arrays, layout="bnhd", **ours), exact, other, scale=np.abs(arrays[2]).max())
    np.testing.assert_allclose(other, exact, rtol=0, atol=1e-5)


def test_differs_causal_is_top_left():
    query, key, value = inputs()
    np.testing.assert_array_equal(theirs(query, key, value, is_causal=True)[:, 0], value[:, 0])
    aligned = np.tri(9, 13, k=4, dtype=bool)
    np.testing.assert_allclose(attnc.attention(query, key, value, causal=True, layout="bnhd"),
                               theirs(query, key, value, mask=aligned[None, None]), rtol=0, atol=1e-5)


def test_differs_windows_count_from_the_top_left():
    query, key, value = inputs()
    np.testing.assert_array_equal(theirs(query, key, value, local_window_size=(0, 0)), value[:, :9])
    np.testing.assert_array_equal(attnc.attention(query, key, value, window=(0, 0), layout="bnhd"), value[:, 4:])


def test_differs_a_bare_window_is_symmetric():
    query, key, value = inputs(q_len=13)
    np.testing.assert_array_equal(theirs(query, key, value, local_window_size=2),
                                  theirs(query, key, value, local_window_size=(2, 2)))
    with pytest.raises((TypeError, ValueError), match="window"):
        attnc.attention(query, key, value, window=2, layout="bnhd")


def test_differs_a_row_that_sees_nothing_is_the_mean():
    query, key, value = inputs()
    mask = np.zeros((1, 1, 9, 13), bool)
    output, lse = theirs(query, key, value, mask=mask, return_residual=True)
    np.testing.assert_allclose(output, np.broadcast_to(value.mean(1, keepdims=True), output.shape), rtol=0, atol=1e-6)
    assert np.isfinite(lse).all() and (lse < -1e38).all()
    got = attnc.attention(query, key, value, mask=mask, want="lse", layout="bnhd")
    assert (got.output == 0).all() and (got.lse == -np.inf).all()


def test_differs_no_valid_keys_is_the_mean():
    query, key, value = inputs()
    output = theirs(query, key, value, key_value_seq_lengths=np.zeros(2, np.int32))
    np.testing.assert_allclose(output, np.broadcast_to(value.mean(1, keepdims=True), output.shape), rtol=0, atol=1e-6)
    assert (attnc.attention(query, key, value, kv_lengths=0, layout="bnhd") == 0).all()


def test_differs_a_bias_of_minus_infinity_is_nan():
    query, key, value = inputs()
    bias = np.full((1, 1, 9, 13), -np.inf, np.float32)
    assert np.isnan(theirs(query, key, value, bias=bias)).all()
    assert (attnc.attention(query, key, value, bias=bias, layout="bnhd") == 0).all()


def test_differs_nan_values_behind_the_mask_leak():
    query, key, value = inputs()
    mask = np.broadcast_to(np.arange(13) < 12, (1, 1, 9, 13))
    clean = attnc.attention(query, key, value, mask=mask, layout="bnhd")
    value[:, 12] = np.nan
    assert np.isnan(theirs(query, key, value, mask=mask)).all()
    np.testing.assert_array_equal(attnc.attention(query, key, value, mask=mask, layout="bnhd"), clean)


def test_differs_float64_is_computed_in_float32():
    arrays = inputs("float64")
    exact = reference.attention(*arrays, layout="bnhd")
    other = theirs(*arrays)
    assert other.dtype == np.float64 and np.abs(other - exact).max() > 1e-9
    np.testing.assert_allclose(attnc.attention(*arrays, layout="bnhd"), exact, rtol=0, atol=1e-14)


def test_differs_values_of_another_width_are_refused():
    query, key, value = inputs()
    with pytest.raises(ValueError):
        theirs(query, key, value[..., :5])
    assert attnc.attention(query, key, value[..., :5], layout="bnhd").shape == (2, 9, 4, 5)
