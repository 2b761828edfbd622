"""Agreement with PyTorch in float64, and one test for every way in which it means something else."""

import numpy as np
import pytest

import attnc
from attnc import reference
from attnc.testing import assert_within

pytestmark = pytest.mark.peers
torch = pytest.importorskip("torch")

from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402

sdpa = torch.nn.functional.scaled_dot_product_attention
RANDOM = np.random.default_rng(0)
MASK = RANDOM.random((4, 9, 13)) < 0.7
MASK[1, 2] = False  # a row that sees nothing
BIAS = RANDOM.standard_normal((2, 1, 9, 13))


def inputs(dtype="float64", q_heads=4, kv_heads=4, q_len=9, kv_len=13, head_dim=16, value_dim=16, seed=0):
    random = np.random.default_rng(seed)
    shapes = (q_heads, q_len, head_dim), (kv_heads, kv_len, head_dim), (kv_heads, kv_len, value_dim)
    return [random.standard_normal((2, *shape)).astype(dtype) for shape in shapes]


def theirs(query, key, value, attn_mask=None, **options):
    """torch's own float64 formula, without its fused kernels."""
    tensors = [torch.from_numpy(x.astype(np.float64)) for x in (query, key, value)]
    with sdpa_kernel(SDPBackend.MATH):
        return sdpa(*tensors, attn_mask=None if attn_mask is None else torch.from_numpy(attn_mask), **options).numpy()


AGREE = {  # sizes, our options, theirs
    "plain": ({}, {}, {}),
    "bool mask, one row of it empty": ({}, {"mask": MASK}, {"attn_mask": MASK}),
    "bias": ({}, {"bias": BIAS}, {"attn_mask": BIAS}),
    "bias of minus infinity": ({}, {"bias": np.where(MASK, 0.5, -np.inf)}, {"attn_mask": np.where(MASK, 0.5, -np.inf)}),
    "causal, square": ({"q_len": 13}, {"causal": True}, {"is_causal": True}),
    "causal, top-left": ({}, {"causal": True, "q_offset": 0}, {"is_causal": True}),
    "causal, more rows than keys": ({"q_len": 20}, {"causal": True, "q_offset": 0}, {"is_causal": True}),
    "grouped heads": ({"kv_heads": 2}, {}, {"enable_gqa": True}),
    "one key head": ({"kv_heads": 1}, {"causal": True, "q_offset": 0}, {"enable_gqa": True, "is_causal": True}),
    "scale": ({}, {"scale": 0.3}, {"scale": 0.3}),
    "negative scale": ({}, {"scale": -0.3}, {"scale": -0.3}),
    "scale 0": ({}, {"scale": 0.0}, {"scale": 0.0}),
    "narrow values": ({"value_dim": 3}, {}, {}),
    "wide values": ({"value_dim": 40}, {"mask": MASK}, {"attn_mask": MASK}),
    "one row, long": ({"q_len": 1, "kv_len": 3000}, {}, {}),
    "long, grouped": ({"q_len": 300, "kv_len": 700, "kv_heads": 2}, {"causal": True, "q_offset": 0},
                      {"enable_gqa": True, "is_causal": True}),
}


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
@pytest.mark.parametrize("name", AGREE)
def test_agrees_with_torch_in_float64(name, dtype, isa):
    sizes, ours, torchs = AGREE[name]
    arrays = inputs(dtype, **sizes)
    honest = reference.attention(*arrays, **ours)
    scale = np.abs(arrays[2]).max()
    assert_within(attnc.attention(*arrays, **ours), theirs(*arrays, **torchs), honest, scale=scale)


def test_agrees_in_bfloat16(isa):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    arrays = inputs(ml_dtypes.bfloat16)
    honest = reference.attention(*arrays)
    assert_within(attnc.attention(*arrays), theirs(*arrays), honest, scale=np.abs(arrays[2].astype(np.float64)).max())


def multihead(**options):
    """A module that projects nothing, so that its heads are slices of its input: 8 = 2 heads of 4."""
    module = torch.nn.MultiheadAttention(8, 2, bias=False, batch_first=True, dtype=torch.float64, **options)
    with torch.no_grad():
        module.in_proj_weight.copy_(torch.eye(8).repeat(3, 1))
        module.out_proj.weight.copy_(torch.eye(8))
    return module


def heads(x):
    return x.reshape(*x.shape[:2], 2, 4).swapaxes(1, 2)


def test_multihead_weights_and_output(isa):
    query, key = np.random.default_rng(3).standard_normal((2, 2, 6, 8))
    ignore = np.array([[False] * 6, [False] * 4 + [True] * 2])
    with torch.no_grad():
        output, weights = multihead()(torch.from_numpy(query), torch.from_numpy(key), torch.from_numpy(key),
                                      key_padding_mask=torch.from_numpy(ignore), average_attn_weights=False)
    options = {"key_mask": ~ignore}
    got = attnc.attention(heads(query), heads(key), heads(key), want="weights", **options)
    honest = reference.attention(heads(query), heads(key), heads(key), want="weights", **options)
    assert_within(got.weights, weights.numpy(), honest.weights, name="weights")
    assert_within(got.output, heads(output.numpy()), honest.output, scale=np.abs(key).max())


# ------------------------------------------------------------------- where torch means something else


def test_differs_causal_is_top_left():
    query, key, value = inputs()
    np.testing.assert_array_equal(theirs(query, key, value, is_causal=True)[:, :, 0], value[:, :, 0])
    aligned = np.tri(9, 13, k=4, dtype=bool)
    np.testing.assert_allclose(attnc.attention(query, key, value, causal=True), theirs(query, key, value, aligned),
                               rtol=0, atol=1e-13)


def test_differs_nan_behind_the_mask_leaks():
    query, key, value = inputs()
    mask = np.arange(13) < 12
    clean = attnc.attention(query, key, value, mask=mask)
    for poisoned in (key, value):
        poisoned[:, :, 12] = np.nan
        assert np.isnan(theirs(query, key, value, np.tile(mask, (9, 1)))).all()
        np.testing.assert_array_equal(attnc.attention(query, key, value, mask=mask), clean)


def test_differs_mask_with_causal_is_an_error():
    query, key, value = inputs()
    with pytest.raises(RuntimeError):
        theirs(query, key, value, MASK, is_causal=True)
    both = MASK & np.tri(9, 13, dtype=bool)
    np.testing.assert_allclose(attnc.attention(query, key, value, mask=MASK, causal=True, q_offset=0),
                               theirs(query, key, value, both), rtol=0, atol=1e-13)


def test_differs_float_masks_have_an_argument_of_their_own():
    query, key, value = inputs()
    added = theirs(query, key, value, BIAS)
    with pytest.raises(TypeError, match="bias="):
        attnc.attention(query, key, value, mask=BIAS)
    np.testing.assert_allclose(attnc.attention(query, key, value, bias=BIAS), added, rtol=0, atol=1e-13)


def test_differs_grouped_heads_need_a_flag():
    query, key, value = inputs(kv_heads=2)
    with pytest.raises(RuntimeError):
        theirs(query, key, value)
    assert attnc.attention(query, key, value).shape == query.shape


def test_differs_mixed_dtypes_are_refused():
    query, key, value = inputs()
    with pytest.raises(RuntimeError):
        sdpa(torch.from_numpy(query.astype(np.float32)), torch.from_numpy(key), torch.from_numpy(value))
    assert attnc.attention(query.astype(np.float32), key, value).dtype == np.float64


def test_differs_integers_are_refused():
    query, key, value = (np.rint(x).astype(np.int64) for x in inputs())
    with pytest.raises(RuntimeError):
        sdpa(*map(torch.from_numpy, (query, key, value)))
    np.testing.assert_allclose(attnc.attention(query, key, value), theirs(query, key, value), rtol=0, atol=1e-13)


def test_differs_fewer_values_than_keys_are_accepted():
    query, key, value = inputs("float32")
    short = value[:, :, :-1]
    assert sdpa(*map(torch.from_numpy, (query, key, short))).shape == query.shape
    with pytest.raises(ValueError, match="value"):
        attnc.attention(query, key, short)


def test_differs_multihead_masks_say_what_to_ignore():
    x = np.random.default_rng(3).standard_normal((1, 3, 8))
    keep = np.array([[True, True, False]])
    with torch.no_grad():
        ignored, _ = multihead()(*[torch.from_numpy(x)] * 3, key_padding_mask=torch.from_numpy(~keep))
    got = attnc.attention(*[heads(x)] * 3, key_mask=keep)
    np.testing.assert_allclose(got, heads(ignored.numpy()), rtol=0, atol=1e-13)


def test_differs_multihead_weights_are_averaged_over_heads():
    x = np.random.default_rng(3).standard_normal((2, 3, 8))
    with torch.no_grad():
        _, averaged = multihead()(*[torch.from_numpy(x)] * 3)
    got = attnc.attention_weights(heads(x), heads(x))
    assert averaged.shape == (2, 3, 3) and got.shape == (2, 2, 3, 3)
    np.testing.assert_allclose(got.mean(1), averaged.numpy(), rtol=0, atol=1e-13)


def test_differs_multihead_weights_of_an_empty_row_are_nan():
    x = np.random.default_rng(3).standard_normal((1, 3, 8))
    nothing = np.ones((1, 3), bool)
    with torch.no_grad():
        output, weights = multihead()(*[torch.from_numpy(x)] * 3, key_padding_mask=torch.from_numpy(nothing))
    assert weights.isnan().all() and output.isnan().all()
    got = attnc.attention(*[heads(x)] * 3, key_mask=~nothing, want=("weights", "lse"))
    assert (got.output == 0).all() and (got.weights == 0).all() and (got.lse == -np.inf).all()


def test_differs_multihead_weights_come_after_dropout():
    x = np.random.default_rng(3).standard_normal((1, 16, 8))
    torch.manual_seed(0)
    with torch.no_grad():
        _, weights = multihead(dropout=0.5).train()(*[torch.from_numpy(x)] * 3)
    assert np.abs(weights.numpy().sum(-1) - 1).max() > 0.1
    np.testing.assert_allclose(attnc.attention_weights(heads(x), heads(x)).sum(-1), 1, rtol=0, atol=1e-14)


def test_torch_may_flush_subnormal_numbers():
    """The switch of this thread, and of those that are started under it, changes no bit of a result."""
    query, key, value = inputs("float32", q_len=90, kv_len=300)
    value = value * np.float32(1e-40)
    wanted = attnc.attention(query, key, value, num_threads=1)
    assert wanted.any() and torch.set_flush_denormal(True)
    try:
        got = [attnc.attention(query, key, value, num_threads=n) for n in (1, 2, 5)]
        assert not (torch.from_numpy(value) * 1).any(), "still set"
    finally:
        torch.set_flush_denormal(False)
    for one in got:
        np.testing.assert_array_equal(one, wanted)
