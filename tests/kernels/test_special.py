"""Numbers at the edge: huge, tiny, infinite, NaN; what a row may not see must not change a bit of it."""

import numpy as np
import pytest
from checking import (
    DTYPES,
    PATHS,
    WANT,
    assert_same_bits,
    check_attention,
    dtype_of,
    dtypes_in_turn,
    inputs,
    normal,
)
from layouts import MEMORY
from slow import some_option

import attnc
from attnc import masks, reference
from attnc._checks import attention_args


def hidden_in_some_rows(random, q_len, kv_len):
    mask = random.random((2, 1, q_len, kv_len)) < 0.6
    mask[:, :, ::2, kv_len - 2] = False
    return mask


HIDING = {
    "mask": lambda random, q_len, kv_len: {"mask": hidden_in_some_rows(random, q_len, kv_len)},
    "key_mask": lambda random, q_len, kv_len: {"key_mask": ~np.isin(np.arange(kv_len), [1, kv_len - 2])},
    "bias": lambda random, q_len, kv_len: {"bias": np.where(hidden_in_some_rows(random, q_len, kv_len), 0.5, -np.inf)},
    "causal": lambda random, q_len, kv_len: {"causal": True},
    "window": lambda random, q_len, kv_len: {"window": (kv_len // 3, 0), "q_offset": [kv_len // 2, 2]},
    "segments": lambda random, q_len, kv_len: {
        "q_segments": np.arange(q_len) % 3 - 1, "k_segments": np.arange(kv_len) % 3 - 1},
    "q_lengths": lambda random, q_len, kv_len: {"q_lengths": [q_len - 1, q_len // 2]},
    "kv_lengths": lambda random, q_len, kv_len: {"kv_lengths": [kv_len - 2, kv_len // 2]},
}
POISON = ("nan", "inf", "-inf", "largest")


def largest_number(dtype):
    return {"float64": np.finfo(np.float64).max, "float16": 65504.0}.get(dtype.name, 3.38e38)


def poisoned(x, keys, poison):
    """A copy with the keys' entries replaced."""
    x = x.copy()
    x[..., keys, :] = largest_number(x.dtype) if poison == "largest" else float(poison)
    return x


@pytest.mark.parametrize("name, path, dtype", dtypes_in_turn(HIDING, PATHS))
def test_what_a_row_may_not_see_changes_no_bit(isa, name, path, dtype, seed):
    """Rows that see the poisoned keys are left out; options that hide nothing are drawn at random."""
    random = np.random.default_rng([seed, len(name), len(path)])
    q_heads, _, q_len, kv_len, dim, _ = PATHS[path]
    query, key, value = inputs(random, (2,), *PATHS[path], dtype=dtype)
    options = HIDING[name](random, q_len, kv_len)
    for other in ("scale", "softcap", "alibi_slopes", "sinks"):
        if random.random() < 0.3:
            options |= some_option(other, random, (2,), q_heads, q_len, kv_len, dim)
    keys = [1, kv_len - 2] if name in ("key_mask", "window") else [kv_len - 2]
    clear = ~masks.allowed(attention_args(query, key, value, **options))[..., keys].any(-1)
    assert clear.any()
    clean = attnc.attention(query, key, value, want=WANT, **options)
    for poison in POISON:
        dirty = attnc.attention(query, poisoned(key, keys, poison), poisoned(value, keys, poison), want=WANT, **options)
        for part in ("output", *WANT):
            assert_same_bits(getattr(clean, part)[clear], getattr(dirty, part)[clear], f"{part}, {poison}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_reach_the_rows_that_see_them(isa, path, dtype, poison, seed):
    random = np.random.default_rng(seed)
    query, key, value = inputs(random, (2,), *PATHS[path], dtype=dtype)
    kv_len = key.shape[-2]
    for j in (3, kv_len // 2, kv_len - 1):
        value[:, 0, j, j % 3] = poison
    got = check_attention(query, key, value)
    assert_same_bits(got, attnc.attention(query, *map(MEMORY["every second"], (key, value)), want=WANT))
    check_attention(query, key, value, mask=random.random((query.shape[-2], kv_len)) < 0.5)
    check_attention(query, key, value, causal=True, softcap=3.0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("path", PATHS)
def test_a_nan_score_makes_its_row_nan_and_only_that(isa, path, dtype, seed):
    query, key, value = inputs(np.random.default_rng(seed), (2,), *PATHS[path], dtype=dtype)
    clean = attnc.attention(query, key, value, want=WANT, causal=True)
    row, j = query.shape[-2] // 2, key.shape[-2] - 1
    query[1, 2, row, 1] = np.nan
    key[0, 0, j, 1] = np.nan
    got = check_attention(query, key, value, causal=True)
    sees = np.zeros(clean.lse.shape, bool)
    sees[1, 2, row] = sees[0, :2, -1] = True
    for name in ("output", "weights"):
        assert np.isnan(getattr(got, name)[sees]).all()
        assert_same_bits(getattr(got, name)[~sees], getattr(clean, name)[~sees], name)
    assert np.array_equal(np.isnan(got.lse), sees)


@pytest.mark.parametrize("q_len", [1, 70])
def test_infinite_scores(isa, q_len):
    query, key, value = (np.ones((1, *shape), np.float32) for shape in ((q_len, 1), (40, 1), (40, 2)))
    key[0, 33] = np.inf
    got = check_attention(query, key, value)
    assert np.isnan(got.output).all() and np.isnan(got.weights).all() and np.isnan(got.lse).all()
    got = check_attention(query, -key, value)
    assert not got.weights[..., 33].any() and np.isfinite(got.lse).all()
    got = check_attention(query, np.full_like(key, -np.inf), value)
    assert not got.output.any() and not got.weights.any() and (got.lse == -np.inf).all()
    value[0, 3, 1] = np.nan
    for sinks in (None, [0.5]):
        assert not check_attention(query, np.full_like(key, -np.inf), value, sinks=sinks).output.any()
    value[0, 3, 1] = 1
    got = check_attention(query, key, value, bias=np.where(np.arange(40) == 33, -np.inf, 0.0))
    assert np.isfinite(got.output).all() and not got.weights[..., 33].any()


@pytest.mark.parametrize("apart", [1e12, 1e30])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("q_len", [1, 70])
def test_huge_scores(isa, apart, sign, dtype, q_len, seed):
    """Scores `apart` from each other: the whole weight goes to one key, and the lse is its score."""
    random = np.random.default_rng(seed)
    key = (random.permutation(40) * sign * (apart / 40)).reshape(1, 40, 1).astype(dtype_of(dtype))
    query = np.ones((1, q_len, 1), dtype_of(dtype))
    value = normal(random, (1, 40, 3), dtype)
    for options in ({"scale": 1.0}, {"scale": -0.5}, {"scale": 1.0, "bias": np.zeros(40, np.float32)}):
        got = check_attention(query, key, value, **options)
        winner = np.argmax(key[0, :, 0].astype(float) * options["scale"])
        assert (got.output.astype(float) == value[0, winner].astype(float)).all()
        assert (got.weights.argmax(-1) == winner).all() and (got.weights.astype(float).sum(-1) == 1).all()


@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_equal_huge_scores_share_evenly(isa, count, dtype):
    x = np.full((1, 1, 64), 133120, dtype_of(dtype))
    many = np.full((1, count, 64), 133120, dtype_of(dtype))
    got = check_attention(x, many, many)
    np.testing.assert_allclose(got.output.astype(float), 133120, rtol=2.0**-22 if dtype == "float32" else 2.0**-7)
    np.testing.assert_allclose(got.weights.astype(float), 1 / count, rtol=2.0**-22 if dtype == "float32" else 2.0**-7)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("q_len, kv_len", [(1, 5), (1, 2500), (70, 100)])
def test_values_near_the_largest_finite_number(isa, dtype, q_len, kv_len, seed):
    """A weighted mean of finite numbers is finite, also where their sum is not."""
    random = np.random.default_rng(seed)
    query, key, _ = inputs(random, (2,), 2, 1, q_len, kv_len, 8, dtype=dtype)
    top = 0.98 * largest_number(dtype_of(dtype))
    value = (random.choice([top, -top, 1.0, 0.0], (2, 1, kv_len, 5))).astype(dtype_of(dtype))
    value[..., 0] = top
    got = check_attention(query, key, value)
    assert np.isfinite(got.output.astype(np.float64)).all()
    check_attention(query, key, value, causal=True, sinks=[0.5, -1.0])


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_subnormal_numbers(isa, dtype, seed):
    random = np.random.default_rng(seed)
    tiny = np.finfo(dtype).smallest_subnormal
    query, key, value = inputs(random, (2,), 2, 2, 9, 40, 8, dtype=dtype)
    few = (random.integers(-9, 9, value.shape) * tiny).astype(dtype)
    got = check_attention(query, key, few)
    assert got.output.any(), "subnormal values are not flushed to zero"
    check_attention((query * tiny * 100).astype(dtype), key, value)
    check_attention(query, key, value, bias=np.full((9, 40), tiny, dtype))


def test_wide_options_saturate(isa):
    """bias, sinks and slopes are rounded to the accumulation dtype first, a finite one to a finite one."""
    query, key, value = inputs(np.random.default_rng(0), (), 2, 2, 3, 5, 4)
    top = float(np.finfo(np.float32).max)
    far = np.array([0.0, -1e300, -1e300, -np.inf, 0.0])
    for name, wide, narrow in (
            ("bias", far, np.maximum(far, -top)), ("bias", np.full(5, -1e300), np.full(5, -top)),
            ("sinks", [1e300, -1e300], [top, -top]), ("alibi_slopes", [1e300, 0.5], [top, 0.5])):
        narrow = np.where(np.isinf(wide), wide, narrow)
        got = check_attention(query, key, value, **{name: narrow})
        assert np.isfinite(got.output).all()
        assert_same_bits(attnc.attention(query, key, value, want=WANT, **{name: wide}), attnc.attention(
            query, key, value, want=WANT, **{name: narrow.astype(np.float32)}))


def test_a_bias_is_not_looked_at_where_nothing_is_allowed(isa):
    query, key, value = inputs(np.random.default_rng(0), (), 2, 2, 3, 5, 4)
    check_attention(query, key, value, bias=np.where(np.arange(5) == 2, np.nan, 0.0), mask=np.arange(5) != 2)


@pytest.mark.parametrize("kv_len", [1, 2, 15, 16, 17, 63, 64, 65, 127, 130, 511, 513, 1030])
@pytest.mark.parametrize("q_len", [1, 70])
def test_padding_of_a_block_has_no_weight(isa, kv_len, q_len):
    """Scores of -20 everywhere: a padding key with score 0 would take nearly all of the weight."""
    query, key = np.ones((1, q_len, 4), np.float32), np.full((1, kv_len, 4), -10.0, np.float32)
    got = check_attention(query, key, np.ones((1, kv_len, 3), np.float32))
    np.testing.assert_allclose(got.output, 1, rtol=1e-6)
    np.testing.assert_allclose(got.lse, -20 + np.log(kv_len), rtol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_the_last_row_sees_leaves_the_others_large_values_alone(isa, dtype, seed):
    """Rows of a group are repaired each for itself: a NaN key that one sees takes nothing out of the others' sums."""
    random = np.random.default_rng(seed)
    query, key, value = (normal(random, (2, length, 64), dtype) for length in (6, 40, 40))
    value = value * value.dtype.type({"float64": 1e300, "float16": 1e4}.get(dtype, 1e30))
    before = attnc.attention(query, key, value, causal=True)
    key[:, -1] = np.nan
    after = attnc.attention(query, key, value, causal=True)
    assert_same_bits(before[:, :-1], after[:, :-1])
    assert np.isnan(after[:, -1]).all()


@pytest.mark.parametrize("dtype, least", [("float32", -87), ("float64", -708)])
def test_weights_below_the_smallest_normal_number_are_0(isa, dtype, least):
    """As docs/semantics.md says; the definition keeps them."""
    query, key, value = (np.zeros((1, n, 1), dtype) for n in (1, 3, 3))
    value[0, 2] = np.inf
    options = {"bias": np.array([[0, least, least - 1]], dtype)}
    weights = attnc.attention_weights(query, key, **options)[0, 0]
    assert weights[1] >= np.finfo(dtype).tiny and weights[2] == 0
    assert (reference.attention_weights(query, key, **options)[0, 0] > 0).all()
    assert np.isnan(attnc.attention(query, key, value, **options)).all()
    assert attnc.AttentionWeights(query, key, **options).key_hits(0.0).tolist() == [[1, 1, 0]]
