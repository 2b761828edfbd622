"""Scores as far from zero as floats go: weights, statistics and gradients, by what is known of rows of equal scores."""

import itertools
import math

import numpy as np
import pytest
from checking import DTYPES, assert_same_bits, dtype_of

import attnc
from attnc import reference

LARGEST = {"float32": 3.4e38, "float64": 1.7e308, "float16": 3.4e38, "bfloat16": 3.38e38}
LEVELS = (0.0, 1e4, 1e9, 1e15, None)         # None: the largest float
SIZES = {"few": (3, 70), "shared": (40, 530), "split": (2, 2100)}
KEYS = (5, 11, 12, 69)                       # those with the level, the others are below it


def rows_at(level, how, size, dtype):
    """Query, key and options of rows whose scores, by `bias` or `product`, are `level` at KEYS; those of the others are
    lower by half the largest float, or not allowed where that is no number."""
    q_len, kv_len = SIZES[size]
    step = 4e4 if (how, dtype) == ("product", "float16") else 0.5 * LARGEST[dtype]
    low = -np.inf if level - step < -LARGEST[dtype] else level - step
    scores = np.where(np.isin(np.arange(kv_len), KEYS), level, low)
    query, key = np.zeros((1, q_len, 2), dtype_of(dtype)), np.zeros((1, kv_len, 2), dtype_of(dtype))
    if how == "bias":
        return query, key, dict(bias=scores.astype(np.float64 if dtype == "float64" else np.float32))
    query[..., 0] = 1
    key[..., 0] = np.where(scores == -np.inf, 0, scores)
    return query, key, dict(scale=1.0, mask=np.isin(np.arange(kv_len), KEYS) | (low != -np.inf))


def shares_of(level, sink):
    """The weight of each of KEYS, the entropy, and the share of the sink."""
    gap = sink - level
    if gap > 800:
        return 0.0, 0.0, 1.0
    log_total = gap + math.log1p(len(KEYS) * math.exp(-gap)) if gap > 0 else math.log(len(KEYS) + math.exp(gap))
    weight, alone = math.exp(-log_total), math.exp(gap - log_total)
    of_sink = math.log1p(len(KEYS) * math.exp(-gap)) if gap > 0 else log_total - gap
    return weight, len(KEYS) * weight * log_total + (alone * of_sink if alone else 0.0), alone


def cases(dtype):
    for level in LEVELS:
        for sign in (1, -1):
            # a product of half precision ends at 65504; what a number is in the dtype is what both sides start from
            for how in ("bias", "product"):
                number = sign * (LARGEST[dtype] if level is None else level)
                if how == "product" and dtype == "float16" and abs(number) > 6e4:
                    continue
                if how == "product":
                    number = float(np.asarray(number, dtype_of(dtype)))
                if not math.isfinite(number):
                    continue
                number = float(np.float64(number) if dtype == "float64" else np.float32(number))
                far = (0.5, 0.9 * LARGEST[dtype], -0.9 * LARGEST[dtype]) if how == "bias" else ()
                for sink in (None, number, *far):
                    yield number, how, None if sink is None else float(np.float32(sink) if dtype != "float64" else sink)


# Rows of 16 bits are computed in float32: one size of them.
@pytest.mark.parametrize("size, dtype", [*itertools.product(SIZES, ("float32", "float64")),
                                         ("shared", "float16"), ("shared", "bfloat16")])
def test_statistics(isa, size, dtype):
    check_statistics(attnc, size, dtype)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_statistics_of_the_twin(dtype):
    check_statistics(reference, "few", dtype)


def check_statistics(api, size, dtype):
    eps = np.finfo(np.float64 if dtype == "float64" else np.float32).eps
    for level, how, sink in cases(dtype):
        query, key, options = rows_at(level, how, size, dtype)
        sinks = {} if sink is None else {"sinks": np.array([sink])}
        weight, entropy, _ = shares_of(level, -math.inf if sink is None else sink)
        W = api.AttentionWeights(query, key, **options, **sinks)
        beside = api.attention(query, key, key, want=("entropy", "max", "argmax", "lse"), **options, **sinks)
        where, (q_len, kv_len) = f"{level} {how} {sink}", SIZES[size]
        for got in (W.entropy(), beside.entropy):
            assert (got >= 0).all(), where
            np.testing.assert_allclose(got, entropy, rtol=8 * eps, atol=8 * eps, err_msg=where)
        for got in (W.max(), beside.max):
            np.testing.assert_allclose(got, weight, rtol=8 * eps, atol=0, err_msg=where)
        assert (W.argmax() == KEYS[0]).all() and (beside.argmax == KEYS[0]).all(), where
        np.testing.assert_allclose(W.effective_keys(), math.exp(entropy), rtol=16 * eps, err_msg=where)
        top = W.topk(5)
        assert (top.indices[..., :4] == KEYS).all(), where
        np.testing.assert_allclose(top.weights[..., :4], weight, rtol=8 * eps, err_msg=where)
        assert not top.weights[..., 4].any(), where
        wanted = np.where(np.isin(np.arange(kv_len), KEYS), weight, 0.0)
        for got, value in ((W.dense(), wanted), (W.key_max(), wanted), (W.key_mass(), q_len * wanted),
                           (W.mean_position(), wanted @ np.arange(kv_len)), (W @ np.ones(kv_len), len(KEYS) * weight),
                           (W.T @ np.ones(q_len), q_len * wanted), (W[0, 0, 11], weight),
                           (W.map((1, 1), reduce="max"), weight), (W.sparse(top_p=0.9).data, weight)):
            value = np.broadcast_to(value, np.shape(got)) if np.size(got) else np.zeros(np.shape(got))
            np.testing.assert_allclose(got, value, rtol=(16 + q_len) * eps, atol=0, err_msg=where)
        assert (W.key_hits(weight / 2) == np.where(wanted > weight / 2, q_len, 0)).all(), where


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_entropy_is_never_negative(isa, dtype, seed):
    """Scores of every magnitude, with sinks of every magnitude, against the sums in long double."""
    random, (q_len, kv_len) = np.random.default_rng(seed), (60, 140)
    top = math.log10(LARGEST[dtype])

    def magnitudes(shape):
        return random.choice([-1, 1], shape) * 10 ** random.uniform(-3, top, shape)

    for trial in range(20):
        near = random.standard_normal((q_len, kv_len)) if trial % 2 else magnitudes((q_len, kv_len))
        bias = np.clip(magnitudes((q_len, 1)) + near, -LARGEST[dtype], LARGEST[dtype]).astype(dtype)
        sinks = magnitudes(1).astype(dtype)
        s = np.concatenate([bias, np.broadcast_to(sinks, (q_len, 1))], 1).astype(np.longdouble)
        d = s - s.max(-1, keepdims=True)
        logs = d - np.log(np.exp(d).sum(-1, keepdims=True))
        wanted = -np.where(np.exp(logs) == 0, 0, np.exp(logs) * logs).sum(-1)
        got = attnc.AttentionWeights(np.zeros((q_len, 3), dtype), np.zeros((kv_len, 3), dtype), bias=bias,
                                     sinks=sinks).entropy()
        assert (got >= 0).all()
        np.testing.assert_allclose(got, wanted.astype(float), rtol=0, atol=32 * np.finfo(dtype).eps)


@pytest.mark.parametrize("under", [-1e9, -3.4e38, 1e9, 3.4e38, np.inf, -np.inf])
def test_entropy_under_a_far_lse(isa, under):
    """It is about these keys alone, under weights that an lse of 24 bits makes 0, 1 or more: never below 0."""
    for level in (-3.4e38, -1e9, 1e9, 3.4e38):
        bias = np.full(3, level, np.float32)
        arrays = np.zeros((1, 2, 4), np.float32), np.zeros((1, 3, 4), np.float32)
        lse = np.full((1, 2), under, np.float32)
        for module in (attnc, reference):
            assert (module.AttentionWeights(*arrays, bias=bias, lse=lse).entropy() == 0).all()


# Overflow by the scale alone: products are finite, scores are not

OVER = {"float32": (2.0**46, 1e15), "float64": (2.0**465, 1e29), "float16": (16000.0, 9e29),
        "bfloat16": (2.0**46, 1e15)}


@pytest.mark.parametrize("dtype", OVER)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("sign", [1, -1], ids=["positive scale", "negative scale"])
@pytest.mark.parametrize("sink", [None, 0.5, -np.inf])
def test_a_scale_that_overflows(api, sink, sign, size, dtype):
    """Weights, output and statistics are those of the scores before they overflow; lse and scores are infinite."""
    x, scale = OVER[dtype]
    q_len, kv_len = SIZES[size]
    query = np.full((1, q_len, 4), x, dtype_of(dtype))
    sinks = {} if sink is None else {"sinks": np.array([sink])}
    for lse in (np.inf, -np.inf):
        most = 4 if lse > 0 else -1
        key = np.full((1, kv_len, 4), sign * np.sign(most) * 2 * x, dtype_of(dtype))
        key[0, 7] = key[0, 9] = sign * most * x
        value = np.zeros((1, kv_len, 2), dtype_of(dtype))
        value[0, 7], value[0, 9] = 1, 3
        want = ("weights", "lse", "scores", "entropy", "max", "argmax")
        got = api.attention(query, key, value, scale=sign * scale, want=want, **sinks)
        assert_same_bits(api.attention(query, key, value, scale=sign * scale, **sinks), got.output)
        drowned = lse < 0 and sink == 0.5
        assert (got.scores == lse).all() and (got.lse == (sink if drowned else lse)).all()
        assert (got.weights[..., [7, 9]] == (0 if drowned else 0.5)).all()
        assert np.count_nonzero(got.weights) == (0 if drowned else 2 * q_len)
        assert (got.output == (0 if drowned else 2)).all()
        np.testing.assert_allclose(got.entropy, 0 if drowned else math.log(2), rtol=4e-7)
        assert (got.max == (0 if drowned else 0.5)).all() and (got.argmax == 7).all()
        W = api.AttentionWeights(query, key, scale=sign * scale, **sinks)
        assert (W.entropy() == got.entropy).all() and (W.topk(2).indices == [7, 9]).all()
        assert (W.key_mass()[0, [7, 9]] == (0 if drowned else q_len / 2)).all()
        back = api.attention_backward(np.ones_like(got.output), query, key, value, got.output, got.lse,
                                         want="value", scale=sign * scale, **sinks).value
        assert (back[0, [7, 9]] == (q_len / 2 if lse > 0 else 0)).all()
        assert np.count_nonzero(back) == (4 if lse > 0 else 0)


@pytest.mark.parametrize("options", [{"bias": np.zeros(40)}, {"alibi_slopes": [0.0]}], ids=["bias", "alibi"])
def test_overflow_before_another_option_is_an_infinite_score(api, options):
    """What is added to a score needs the score: +inf makes the row NaN, -inf is no key."""
    query, key = np.full((1, 3, 1), 1e15, np.float32), np.full((1, 40, 1), 1e15, np.float32)
    got = api.attention(query, key, key, scale=1e10, want="lse", **options)
    assert np.isnan(got.output).all() and np.isnan(got.lse).all()
    got = api.attention(query, -key, key, scale=1e10, want="lse", **options)
    assert not got.output.any() and (got.lse == -np.inf).all()


# Gradients under an lse that has no digits left for the number of keys

@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_gradients(api, size, dtype, seed):
    random = np.random.default_rng(seed)
    eps = np.finfo(np.float64 if dtype == "float64" else np.float32).eps
    half = {"float16": 2.0**-10, "bfloat16": 2.0**-7}.get(dtype, 0)
    for level, how, sink in cases(dtype):
        query, key, options = rows_at(level, how, size, dtype)
        sinks = {} if sink is None else {"sinks": np.array([sink])}
        weight, _, alone = shares_of(level, -math.inf if sink is None else sink)
        value = random.integers(-4, 5, (1, SIZES[size][1], 3)).astype(dtype_of(dtype))
        result = api.attention(query, key, value, want="lse", **options, **sinks)
        grad = random.integers(-4, 5, result.output.shape).astype(dtype_of(dtype))
        want = ("value", *(("bias",) if how == "bias" else ()), *sinks)
        got = api.attention_backward(grad, query, key, value, result.output, result.lse, want=want, **options,
                                        **sinks)
        g, v = grad[0].astype(float), value[0, KEYS, :].astype(float)
        output = weight * v.sum(0)
        where = f"{level} {how} {sink}"
        bound = 64 * eps + half
        np.testing.assert_allclose(got.value[0, KEYS, :].astype(float), weight * g.sum(0) + 0 * v, rtol=0,
                                   atol=bound * 4 * len(g), err_msg=where)
        assert np.count_nonzero(got.value) <= 3 * len(KEYS), where
        wanted = (weight * (g @ v.T - (g @ output)[:, None])).sum(0)
        if how == "bias":
            np.testing.assert_allclose(got.bias[list(KEYS)], wanted, rtol=0, atol=bound * 100 * len(g), err_msg=where)
        if sink is not None:
            np.testing.assert_allclose(got.sinks, -alone * (g @ output).sum(), rtol=0, atol=bound * 100 * len(g),
                                       err_msg=where)


@pytest.mark.parametrize("layout", ["bhnd", "bnhd", "one head"])
def test_gradients_where_some_rows_are_far(api, layout, seed):
    """What a row adds to all its scores changes no gradient; near, empty and padded rows beside far ones."""
    random, (batch, heads) = np.random.default_rng(seed), ((), 1) if layout == "one head" else ((2,), 4)
    lead = () if layout == "one head" else (2, heads)
    query, key = np.zeros((*lead, 9, 6), np.float32), np.zeros((*lead, 80, 6), np.float32)
    value, grad = (random.standard_normal((*lead, n, 5)).astype(np.float32) for n in (80, 9))
    bias = np.where(random.random((*lead, 9, 80)) < 0.5, 0, -np.inf).astype(np.float32)
    bias[..., 4, :] = -np.inf
    far = np.float32([0, -1e9, 3e38, 5, 0, -2e3, 1e15, 0, -3e38])[:, None]
    options = dict(q_lengths=[7, 9], kv_lengths=[80, 33]) if batch else {}
    if layout == "bnhd":
        query, key, value, grad = (x.swapaxes(-2, -3) for x in (query, key, value, grad))
        options["layout"] = layout
    found = []
    for shift in (far, 0 * far):
        shifted, sinks = bias + shift, np.full(heads, -3.4e38)
        result = api.attention(query, key, value, bias=shifted, sinks=sinks, want="lse", **options)
        want = ("query", "key", "value", "bias", "sinks")
        found.append(api.attention_backward(grad, query, key, value, result.output, result.lse, bias=shifted,
                                            sinks=sinks, want=want, **options))
    for name, wanted in vars(found[1]).items():
        np.testing.assert_allclose(getattr(found[0], name), wanted, rtol=0, atol=2e-5, err_msg=name)
    assert found[1].value.any() and found[1].bias.any()


def test_a_chunk_under_a_far_lse(isa, seed):
    """What the lse of more keys than these has lost is lost: weights of a chunk are wrong by eps * |lse| at most."""
    random = np.random.default_rng(seed)
    value, grad = random.standard_normal((1, 90, 2)).astype(np.float32), np.ones((1, 5, 2), np.float32)
    query, key = np.zeros((1, 5, 4), np.float32), np.zeros((1, 90, 4), np.float32)
    for far in (-3e3, 2e4, -1e5):
        bias = np.full(90, far, np.float32)
        whole = attnc.attention(query, key, value, bias=bias, want="lse")
        bound = np.finfo(np.float32).eps * abs(far) + 1e-6
        for part in (slice(0, 30), slice(30, 90)):
            got = attnc.attention_backward(grad, query, key[:, part], value[:, part], whole.output, whole.lse,
                                           bias=bias[part], want="value")
            np.testing.assert_allclose(got.value, 5 / 90, rtol=bound)
            weights = attnc.attention_weights(query, key[:, part], bias=bias[part], lse=whole.lse)
            np.testing.assert_allclose(weights, 1 / 90, rtol=bound)


@pytest.mark.parametrize("far", [-3.4e38, -1e9, 1e4, 1e15])
@pytest.mark.parametrize("sink", [None, 0.5, "far"])
def test_a_state_of_chunks(isa, far, sink, seed):
    """Chunks of unlike sizes count by their keys, and the sink once."""
    value = np.random.default_rng(seed).standard_normal((1, 10, 2)).astype(np.float32)
    sinks = None if sink is None else np.float32([far if sink == "far" else sink])
    state = attnc.AttentionState(np.zeros((1, 5, 4), np.float32), sinks=sinks)
    for chunk in (slice(0, 1), slice(1, 7), slice(7, 7), slice(7, 10)):
        size = chunk.stop - chunk.start
        state.update(np.zeros((1, size, 4), np.float32), value[:, chunk], bias=np.full(size, far, np.float32))
    keys = 10 if sink is None or (sink == 0.5 and far > 0) else 11 if sink == "far" else math.inf
    wanted = np.broadcast_to(value.astype(float).sum(-2, keepdims=True) / keys, (1, 5, 2))
    np.testing.assert_allclose(state.result().output, wanted, rtol=0, atol=2e-6)
