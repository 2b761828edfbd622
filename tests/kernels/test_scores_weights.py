"""Scores of every stage, dense weights, and `want=` in every combination, against the twins."""

from itertools import combinations

import numpy as np
import pytest
from checking import DTYPES, PATHS, WANT, assert_same_bits, check_scores, expected, inputs, largest, plans
from slow import NAMES, some_option

import attnc
from attnc import reference
from attnc.testing import assert_within, exact_attention

STAGES = ("raw", "scaled", "capped", "masked")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stage", STAGES)
def test_stages(isa, stage, path, dtype, seed):
    random = np.random.default_rng([seed, len(stage)])
    q_heads, _, q_len, kv_len, dim, _ = PATHS[path]
    query, key, _ = inputs(random, (2,), *PATHS[path], dtype=dtype)
    check_scores(query, key, stage)
    options = {}
    for name in NAMES:
        options |= some_option(name, random, (2,), q_heads, q_len, kv_len, dim)
    check_scores(query, key, stage, **options)
    check_scores(query, key, stage, **some_option("kv_lengths", random, (2,), q_heads, q_len, kv_len, dim))


@pytest.mark.parametrize("stage", STAGES[:3])
def test_earlier_stages_ignore_the_options_of_later_ones(isa, stage, seed):
    random = np.random.default_rng(seed)
    query, key, _ = inputs(random, (2,), 4, 2, 33, 70)
    kept = {"scale": -0.3, "softcap": 2.0, "kv_lengths": [70, 20], "q_lengths": [3, 33]}
    more = dict(kept, mask=random.random((33, 70)) < 0.5, key_mask=random.random(70) < 0.5,
                bias=np.full((33, 70), np.nan), causal=True, window=(1, 1), q_offset=3, alibi_slopes=[1.0, 2, 3, 4],
                sinks=[1.0, 2, 3, 4], q_segments=np.zeros(33, int), k_segments=np.ones(70, int))
    got = attnc.attention_scores(query, key, stage=stage, **more)
    assert got.tobytes() == attnc.attention_scores(query, key, stage=stage, **kept).tobytes()
    assert (got[1, :, :, 20:] == -np.inf).all() and (got[0, :, 3:] == -np.inf).all()
    assert np.isfinite(got[1, :, :, :20]).all()


@pytest.mark.parametrize("stage", STAGES)
def test_scores_of_two_axes_and_of_the_other_layout(isa, stage, seed):
    random = np.random.default_rng(seed)
    query, key, _ = inputs(random, (2,), 4, 2, 70, 90)
    check_scores(query[0, 0], key[0, 0], stage, causal=True)
    got = check_scores(query.swapaxes(-2, -3), key.swapaxes(-2, -3), stage, layout="bnhd", causal=True)
    assert got.shape == (2, 4, 70, 90)


@pytest.mark.parametrize("scale", [None, 0.0, 1.0, -2.5, 1e-35, 1e35])
def test_scores_are_scaled_once(isa, scale):
    query, key, _ = inputs(np.random.default_rng(0), (), 2, 2, 9, 20, 16)
    raw = attnc.attention_scores(query, key, stage="raw")
    wanted = raw * np.float32(0.25 if scale is None else scale)
    np.testing.assert_array_equal(attnc.attention_scores(query, key, scale=scale), wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("chance", [0.0, 0.2, 0.5])
def test_attention_weights(isa, chance, path, dtype, seed):
    random = np.random.default_rng([seed, int(10 * chance)])
    q_heads, _, q_len, kv_len, dim, _ = PATHS[path]
    query, key, value = inputs(random, (2,), *PATHS[path], dtype=dtype)
    options = {}
    for name in NAMES:
        if random.random() < chance:
            options |= some_option(name, random, (2,), q_heads, q_len, kv_len, dim)
    got = attnc.attention_weights(query, key, **options)
    assert_within(got, exact_attention(query, key, value, **options).weights,
                  reference.attention_weights(query, key, **options), name="weights")
    if "sinks" not in options:
        sums = got.astype(np.float64).sum(-1)
        slack = kv_len * (2.0**-8 if dtype == "bfloat16" else 2.0**-11 if dtype == "float16" else 2.0**-23)
        dead = (reference.attention_weights(query, key, **options) == 0).all(-1)
        assert (np.abs(sums[~dead] - 1) <= slack * 0.5 + 1e-6).all() and not sums[dead].any()


# A row whose scores fit the cache keeps them until its sum is known; longer rows are computed a second time.

@pytest.mark.parametrize("q_len", [3, 70])
@pytest.mark.parametrize("kv_len, keeps", [(1000, True), (17000, False)])
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_kept_and_recomputed_weights(isa, q_len, kv_len, keeps, dtype, seed):
    random = np.random.default_rng(seed)
    query, key, value = inputs(random, (), 2, 1, q_len, kv_len, 8, 4, dtype=dtype)
    for options in ({}, {"causal": True, "sinks": [0.3, 1.0], "bias": random.standard_normal(kv_len)}):
        honest = expected(reference.attention, query, key, value, want="weights", **options)
        wide = [x.astype(np.float64) for x in (query, key, value)]
        if dtype == "float64":
            exact = expected(exact_attention, query[:, -1:], key, value, **options).weights
            got = attnc.attention(query, key, value, want="weights", **options).weights
            assert_within(got[:, -1:], exact, honest.weights[:, -1:], name="weights")
            assert_within(got, honest.weights, honest.weights, scale=64.0, name="weights")
            continue
        with plans() as taken:
            got = attnc.attention(query, key, value, want="weights", **options)
        exact = expected(reference.attention, *wide, want="weights", **options)
        assert_within(got.weights, exact.weights, honest.weights, name="weights")
        assert_within(got.output, exact.output, honest.output, scale=largest(value), name="output")
        if q_len == 70:
            assert taken[0].kept_scores == keeps


WANTS = [names for n in range(4) for names in combinations(WANT, n)] + [("scores", "lse"), ("weights", "weights")]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("options", [{}, {"causal": True, "softcap": 3.0}], ids=["plain", "options"])
def test_every_combination_of_want(isa, options, path, seed):
    """Each name gives an attribute; asking for more changes no bit of the rest."""
    arrays = inputs(np.random.default_rng(seed), (2,), *PATHS[path])
    everything = attnc.attention(*arrays, want=WANT, **options)
    plain = attnc.attention(*arrays, **options)
    assert type(plain) is np.ndarray
    assert_same_bits(plain, everything.output)
    for names in WANTS:
        got = attnc.attention(*arrays, want=names, **options)
        if not names:
            assert type(got) is np.ndarray
            continue
        assert set(vars(got)) == {"output", *names}
        for name in vars(got):
            assert_same_bits(getattr(got, name), getattr(everything, name), name)
    assert set(vars(attnc.attention(*arrays, want="lse", **options))) == {"output", "lse"}


def test_scores_are_those_of_attention_scores(isa, seed):
    query, key, value = inputs(np.random.default_rng(seed), (2,), 4, 2, 33, 90)
    options = dict(causal=True, softcap=2.0, alibi_slopes=np.arange(4.0))
    one = attnc.attention(query, key, value, want="scores", **options).scores
    assert_same_bits(one, attnc.attention_scores(query, key, **options))
