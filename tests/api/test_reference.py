"""The reference against an independent formulation: Python loops over rows, masks decided element by element."""

import math
from itertools import product

import ml_dtypes
import numpy as np
import pytest
from slow import NAMES, Slow, assert_close, bounds, full_batch, problem, slow_softmax, some_option

from attnc import reference
from attnc.testing import exact_attention

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


@pytest.mark.parametrize("seed", range(90))
def test_every_option(seed):
    arrays, options = problem(seed, chance=0.15 + 0.01 * (seed % 50))
    output, lse, weights = Slow(*arrays, **options).attention()
    got = reference.attention(*arrays, **options, want=("lse", "weights", "scores"))
    bound = bounds(arrays, options, np.finfo(float).eps)
    assert_close(got.output, output, bound["output"])
    assert_close(got.lse, lse, bound["lse"])
    assert_close(got.weights, weights, bound["weights"])
    assert_close(got.scores, Slow(*arrays, **options).scores("masked"), bound["scores"])
    assert np.array_equal(got.weights == 0, weights == 0)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", range(4))
def test_each_option_alone(name, seed):
    arrays, _ = problem(seed, chance=0)
    batch = np.broadcast_shapes(*(x.shape[:-3] for x in arrays))
    heads, q_len, dim = arrays[0].shape[-3:]
    options = some_option(name, np.random.default_rng(seed), batch, heads, q_len, arrays[1].shape[-2], dim)
    output, _, _ = Slow(*arrays, **options).attention()
    bound = bounds(arrays, options, np.finfo(float).eps)["output"]
    assert_close(reference.attention(*arrays, **options), output, bound)


@pytest.mark.parametrize("far", [0.0, -1e9, -1e15, 1e300])
@pytest.mark.parametrize("seed", range(15))
def test_entropy(seed, far):
    """Far from zero too, where differences of scores are all that counts; sinks are then near or far."""
    arrays, options = problem(seed, chance=0.3)
    if far:
        options["bias"] = far + np.zeros(arrays[1].shape[-2])
        options.pop("alibi_slopes", None)
        options["scale"] = 0.0
    wanted = Slow(*arrays, **options).entropy()
    got = reference.attention(*arrays, **options, want="entropy").entropy
    assert (got >= 0).all()
    bound = bounds(arrays, {name: x for name, x in options.items() if not far or name != "bias"}, np.finfo(float).eps)
    assert_close(got, wanted, 8 * bound["weights"])


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BFLOAT16], ids=str)
@pytest.mark.parametrize("seed", range(8))
def test_narrow_dtypes(dtype, seed):
    arrays, options = problem(seed, chance=0.3)
    arrays = [x.astype(dtype) for x in arrays]
    wide = [x.astype(np.float64) for x in arrays]
    output, lse, weights = Slow(*wide, **options).attention()
    got = reference.attention(*arrays, **options, want=("lse", "weights", "scores"))
    assert got.output.dtype == got.weights.dtype == dtype
    assert got.lse.dtype == got.scores.dtype == np.float32
    bound = bounds(wide, options, np.finfo(np.float32).eps)
    rounding = ml_dtypes.finfo(dtype).eps
    assert_close(got.output, output, bound["output"] + rounding * float(np.abs(wide[2]).max()))
    assert_close(got.weights, weights, bound["weights"] + rounding)
    assert_close(got.lse, lse, bound["lse"])


@pytest.mark.parametrize("stage", ["raw", "scaled", "capped", "masked"])
@pytest.mark.parametrize("seed", range(12))
def test_stages(stage, seed):
    arrays, options = problem(seed)
    query, key = full_batch(arrays)
    bound = 4 * bounds(arrays, {**options, "scale": 1.0}, np.finfo(float).eps)["scores"]
    got = reference.attention_scores(query, key, stage=stage, **options)
    assert_close(got, Slow(*arrays, **options).scores(stage), bound)


@pytest.mark.parametrize("seed", range(5))
def test_attention_weights_and_scores_are_those_of_attention(seed):
    arrays, options = problem(seed)
    got = reference.attention(*arrays, **options, want=("weights", "scores"))
    np.testing.assert_array_equal(reference.attention_weights(*full_batch(arrays), **options), got.weights)
    np.testing.assert_array_equal(reference.attention_scores(*full_batch(arrays), **options), got.scores)


def test_one_precision_up():
    arrays, options = problem(21)
    exact = exact_attention(*arrays, **options)
    assert exact.output.dtype == exact.lse.dtype == np.longdouble
    bound = bounds(arrays, options, np.finfo(float).eps)["output"]
    assert_close(exact.output.astype(float), reference.attention(*arrays, **options), bound)
    narrow = exact_attention(*(x.astype(BFLOAT16) for x in arrays), **options)
    assert narrow.output.dtype == np.float64


# Shapes and layouts

def test_two_dimensions_are_one_head():
    (query, key, value), _ = problem(0)
    query, key, value = query[0], key[0], value[0]
    options = dict(causal=True, sinks=0.3, alibi_slopes=[0.5], bias=np.ones((len(query), len(key))), key_mask=None)
    flat = reference.attention(query, key, value, **options, want=("lse", "weights"))
    options.update(sinks=[0.3])
    tall = reference.attention(query[None], key[None], value[None], **options, want=("lse", "weights"))
    for name in ("output", "lse", "weights"):
        np.testing.assert_array_equal(getattr(flat, name), getattr(tall, name)[0])


def test_layout_bnhd():
    arrays, options = problem(1)
    want = ("lse", "weights", "scores")
    plain = reference.attention(*arrays, **options, want=want)
    swapped = [x.swapaxes(-2, -3) for x in arrays]
    got = reference.attention(*swapped, **options, want=want, layout="bnhd")
    assert got.output.flags.c_contiguous
    np.testing.assert_array_equal(got.output.swapaxes(-2, -3), plain.output)
    for name in want:
        np.testing.assert_array_equal(getattr(got, name), getattr(plain, name))


@pytest.mark.parametrize("q_len, kv_len, dim, value_dim, heads", [
    (0, 3, 2, 2, 2), (3, 0, 2, 2, 2), (3, 4, 0, 2, 2), (3, 4, 2, 0, 2), (3, 4, 2, 2, 0), (0, 0, 0, 0, 0)])
def test_zero_length_axes(q_len, kv_len, dim, value_dim, heads):
    ones = [np.ones((2, heads, n, d), np.float32) for n, d in ((q_len, dim), (kv_len, dim), (kv_len, value_dim))]
    got = reference.attention(*ones, causal=True, want=("lse", "weights"))
    assert got.output.shape == (2, heads, q_len, value_dim)
    assert got.weights.shape == (2, heads, q_len, kv_len)
    np.testing.assert_array_equal(got.output, 1.0 if kv_len else 0.0)
    if kv_len == 0:
        assert (got.lse == -np.inf).all()


def test_out_receives_the_output():
    arrays, options = problem(3)
    plain = reference.attention(*arrays, **options)
    out = np.full_like(plain, 7)
    assert reference.attention(*arrays, **options, out=out) is out
    np.testing.assert_array_equal(out, plain)


DTYPES = [np.dtype(np.float16), BFLOAT16, np.dtype(np.float32), np.dtype(np.float64), np.dtype(bool), np.dtype("i4")]


@pytest.mark.parametrize("first, second", list(product(DTYPES, DTYPES)), ids=str)
def test_promotion(first, second):
    counts = [np.dtype(np.float64) if dtype.kind in "bi" else dtype for dtype in (first, second)]
    wider = np.dtype(np.float64 if np.float64 in counts else np.float32)
    wanted = counts[0] if counts[0] == counts[1] else wider
    got = reference.attention(np.ones((2, 3), first), np.ones((2, 3), second), np.ones((2, 3), first), want="lse")
    assert got.output.dtype == wanted
    assert got.lse.dtype == (np.float64 if wanted == np.float64 else np.float32)
    np.testing.assert_array_equal(got.output.astype(float), 1)


# What is not allowed cannot matter (rule 17)

HIDING = {
    "mask": lambda hide: {"mask": ~hide},
    "key_mask": lambda hide: {"key_mask": ~hide},
    "bias": lambda hide: {"bias": np.where(hide, -np.inf, 0.5)},
    "causal": lambda hide: {"causal": True, "q_offset": -4},
    "window": lambda hide: {"window": (None, 0), "q_offset": -4},
    "segments": lambda hide: {"q_segments": np.zeros(4, int), "k_segments": np.where(hide, -1, 0)},
    "kv_lengths": lambda hide: {"kv_lengths": np.flatnonzero(~hide).max(initial=-1) + 1},
}


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf, 3e38, -1.0])
@pytest.mark.parametrize("name", HIDING)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_hidden_keys_change_no_bit(name, poison, dtype):
    random = np.random.default_rng(5)
    query, key, value = (random.standard_normal((2, 2, 4, 3)).astype(dtype) for _ in "qkv")
    hide = np.zeros(4, bool)
    hide[1 if name not in ("causal", "window", "kv_lengths") else slice(2, 4)] = True
    if name in ("causal", "window"):
        hide[:] = True  # the rows stand before every key
    options = HIDING[name](hide)
    clean = reference.attention(query, key, value, **options, want=("lse", "weights", "scores"))
    key[..., hide, :] = value[..., hide, :] = poison
    dirty = reference.attention(query, key, value, **options, want=("lse", "weights", "scores"))
    for part in ("output", "lse", "weights", "scores"):
        assert getattr(clean, part).tobytes() == getattr(dirty, part).tobytes(), part


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_visible_poison_reaches_the_rows_that_see_it(poison):
    random = np.random.default_rng(6)
    query, key, value = (random.standard_normal((2, 5, 3)) for _ in "qkv")
    clean = reference.attention(query, key, value, causal=True)
    value[0, 3, 1] = poison
    got = reference.attention(query, key, value, causal=True)
    np.testing.assert_array_equal(got[1], clean[1])
    np.testing.assert_array_equal(got[0, :3], clean[0, :3])
    np.testing.assert_array_equal(got[0, 3:, 1], poison)
    np.testing.assert_allclose(got[0, 3:, ::2], clean[0, 3:, ::2], rtol=0, atol=1e-14)
    key[1, 3] = np.nan
    got = reference.attention(query, key, value, causal=True, want=("lse", "weights"))
    np.testing.assert_array_equal(got.output[1, :3], clean[1, :3])
    assert np.isnan(got.output[1, 3:]).all() and np.isnan(got.lse[1, 3:]).all()
    assert np.isnan(got.weights[1, 3:]).all()
    assert not got.weights[1, 2, 3:].any()


def test_infinite_scores():
    query, key, value = np.ones((1, 1)), np.array([[np.inf], [1.0]]), np.ones((2, 1))
    got = reference.attention(query, key, value, want=("lse", "weights"))
    assert np.isnan([*got.output.ravel(), *got.lse, *got.weights.ravel()]).all()
    got = reference.attention(query, -key, value, want=("lse", "weights"))
    assert got.weights.tolist() == [[0, 1]] and got.lse.tolist() == [-1]
    got = reference.attention(query, np.full((2, 1), -np.inf), value, want=("lse", "weights"))
    assert got.output.tolist() == [[0]] and got.weights.tolist() == [[0, 0]] and got.lse.tolist() == [-np.inf]


def test_rows_without_keys():
    query, key, value = np.ones((2, 3, 4)), np.ones((2, 5, 4)), np.full((2, 5, 1), -1.0)
    mask = np.array([[True], [False], [True]])
    got = reference.attention(query, key, value, mask=mask, sinks=[0.25, -np.inf], q_lengths=2, want=("lse", "weights"))
    assert got.lse[0, 1] == 0.25 and got.lse[1, 1] == -np.inf
    assert (got.lse[:, 2] == -np.inf).all()
    assert not got.output[:, 1:].any() and not np.signbit(got.output[:, 1:]).any()
    assert not got.weights[:, 1:].any()
    np.testing.assert_allclose(got.weights[:, 0].sum(-1), 1 - np.exp([0.25, -np.inf] - got.lse[:, 0]), rtol=1e-14)


def test_wide_bias_sinks_and_slopes_are_rounded_to_finite():
    query = key = np.zeros((1, 2, 1), np.float32)
    value = np.array([[[1.0], [3.0]]], np.float32)
    largest = np.finfo(np.float32).max
    got = reference.attention(query, key, value, bias=np.array([-1e300, -np.inf]), want=("lse", "weights"))
    assert got.weights.tolist() == [[[1, 0], [1, 0]]] and (got.lse == -largest).all()
    got = reference.attention(query, key, value, bias=np.array([-1e300, -1e300]))
    assert got.tolist() == [[[2], [2]]]
    got = reference.attention(query, key, value, sinks=[1e300], want="lse")
    assert (got.lse == largest).all() and not got.output.any()
    got = reference.attention(query, key, value, alibi_slopes=[1e300], want="weights")
    assert got.weights.tolist() == [[[1, 0], [0, 1]]]


def test_a_bias_is_not_looked_at_where_nothing_is_allowed():
    arrays = [np.ones((2, 2))] * 3
    got = reference.attention(*arrays, bias=np.array([[0, np.nan], [0, 0]]), causal=True)
    assert got.tolist() == [[1, 1], [1, 1]]


@pytest.mark.parametrize("scale", [1e30, -1e30, 1e300, 0])
def test_huge_scores(scale):
    query, key = np.ones((1, 1), np.float32), np.array([[1.0], [2.0]], np.float32)
    value = np.array([[5.0], [7.0]], np.float32)
    wanted = 6.0 if scale == 0 else 7.0 if scale > 0 else 5.0
    key = key / 4  # the largest float32 times 1/2 is finite
    assert reference.attention(query, key, value, scale=scale).item() == wanted


def test_no_input_is_written():
    arrays, options = problem(8)
    for x in (*arrays, *options.values()):
        if isinstance(x, np.ndarray):
            x.flags.writeable = False
    before = [x.copy() for x in arrays]
    reference.attention(*arrays, **options)
    for x, y in zip(arrays, before, strict=True):
        np.testing.assert_array_equal(x, y)


# Stages of their own

@pytest.mark.parametrize("axis", [-1, 0, 1, (0, 2), (-1, 1), None, ()], ids=str)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("function", [reference.softmax, reference.log_softmax])
def test_softmax(function, axis, masked):
    random = np.random.default_rng(9)
    x = random.standard_normal((3, 4, 5)) * 10
    where = random.random((4, 5)) < 0.5 if masked else None
    full = np.broadcast_to(True if where is None else where, x.shape)
    axes = range(3) if axis is None else [n % 3 for n in np.atleast_1d(axis).astype(int)]
    order = [n for n in range(3) if n not in axes] + sorted(axes)
    flat = [y.transpose(order).reshape(*(y.shape[n] for n in order[:3 - len(axes)]), -1) for y in (x, full)]
    wanted = slow_softmax(*flat, log=function is reference.log_softmax)
    wanted = wanted.reshape([x.shape[n] for n in order]).transpose(np.argsort(order))
    assert_close(function(x, axis, where=where), wanted, 64 * np.finfo(float).eps)


@pytest.mark.parametrize("function, nothing", [(reference.softmax, 0), (reference.log_softmax, -np.inf)])
def test_softmax_of_odd_rows(function, nothing):
    inf, nan = np.inf, np.nan
    for row in ([-inf, -inf], [inf, 0], [nan, 0]):
        assert np.isnan(function(row)).all()
    assert function([-inf, 0.0]).tolist() == [nothing, 1 if nothing == 0 else 0]
    got = function([nan, inf, 1.0], where=[False, False, True])
    assert got.tolist() == [nothing, nothing, 1 if nothing == 0 else 0]
    assert function([nan, 1.0], where=False).tolist() == [nothing] * 2
    assert function(np.zeros((2, 0))).shape == (2, 0)
    assert function(np.zeros((0, 2)), 0).shape == (0, 2)
    assert function(3.0, None) == (1 if nothing == 0 else 0)
    assert function([1, 2]).dtype == np.float64


@pytest.mark.parametrize("dtype", [np.float16, BFLOAT16, np.float32], ids=str)
def test_softmax_dtype_and_out(dtype):
    x = np.linspace(-3, 3, 12).reshape(3, 4).astype(dtype)
    wanted = reference.softmax(x.astype(np.float64))
    got = reference.softmax(x, out=x)
    assert got is x
    assert_close(x, wanted, ml_dtypes.finfo(dtype).eps)


def test_weighted_sum():
    random = np.random.default_rng(10)
    weights, value = random.standard_normal((2, 1, 4, 3, 5)), random.standard_normal((3, 2, 5, 2))
    wanted = np.zeros((2, 3, 4, 3, 2))
    for b, c, h, i, d in np.ndindex(wanted.shape):
        wanted[b, c, h, i, d] = math.fsum(weights[b, 0, h, i, j] * value[c, h // 2, j, d] for j in range(5))
    assert_close(reference.weighted_sum(weights, value), wanted, 1e-14)
    out = np.empty_like(wanted)
    assert reference.weighted_sum(weights, value, out=out) is out
    assert_close(out, wanted, 1e-14)


def test_weighted_sum_skips_weights_of_zero():
    weights = np.array([[0.0, 1.0], [-0.0, np.inf], [2.0, 0.0], [np.nan, 0.0]])
    value = np.array([[np.nan, 1.0], [3.0, -np.inf]])
    got = reference.weighted_sum(weights, value)
    np.testing.assert_array_equal(got, [[3, -np.inf], [np.inf, -np.inf], [np.nan, 2], [np.nan, np.nan]])
