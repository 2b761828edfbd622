"""Content-relative terms: what they mean, which rows of a table matter, and what they leave alone."""

import tracemalloc

import numpy as np
import pytest
from checking import DTYPES, PATHS, assert_same_bits, check_attention, check_scores, inputs, normal, plans

import attnc
from attnc import reference

NAMES = ("relative_key", "relative_query")


def tables(random, heads, rows, dim, dtype="float32"):
    return {name: normal(random, (heads, rows, dim), dtype) for name in NAMES}


def buckets(q_len, kv_len, rows):
    """A row for each distance within half of the rows, the first and last ones for those beyond."""
    return np.clip(np.arange(q_len + kv_len - 1) - q_len + 1 + rows // 2, 0, rows - 1)


@pytest.mark.parametrize("name", [*NAMES, "both"])
@pytest.mark.parametrize("path", [*PATHS, "decode", "deep"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_path_and_dtype(isa, path, dtype, name, seed):
    sizes = PATHS | {"decode": (4, 4, 1, 600, 16, 16), "deep": (4, 2, 70, 90, 300, 8)}
    random = np.random.default_rng([seed, len(path)])
    q_heads, _, q_len, kv_len, dim, _ = sizes[path]
    some = tables(random, q_heads, 23, dim, dtype)
    options = {"relative_index": buckets(q_len, kv_len, 23)} | (some if name == "both" else {name: some[name]})
    with plans() as taken:
        check_attention(*inputs(random, (2,), *sizes[path], dtype=dtype), scale=0.5 / dim**0.5, **options)
    assert {plan.path for plan in taken} == {"packed"}


def test_a_dense_bias_of_the_same_products(isa, seed):
    """The terms are those that models form by two products and two gathers."""
    random = np.random.default_rng(seed)
    query, key, value = inputs(random, (), 4, 4, 40, 60, 16, dtype="float64")
    some, index = tables(random, 4, 9, 16, "float64"), random.integers(0, 9, 99)
    rows = index[np.arange(60) - np.arange(40)[:, None] + 39]
    of_rows = np.take_along_axis(query @ some["relative_key"].swapaxes(-1, -2), rows[None], -1)
    of_keys = np.take_along_axis(key @ some["relative_query"].swapaxes(-1, -2), rows.T[None], -1).swapaxes(-1, -2)
    got = attnc.attention(query, key, value, relative_index=index, **some)
    wanted = attnc.attention(query, key, value, bias=(of_rows + of_keys) / 4)
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("stage", ["raw", "scaled", "capped", "masked"])
def test_stages(isa, stage, seed):
    """The raw product is that of query and key alone; the terms are in every later stage."""
    random = np.random.default_rng(seed)
    query, key, _ = inputs(random, (2,), 4, 2, 20, 30, 8)
    options = {"relative_index": buckets(20, 30, 7), **tables(random, 4, 7, 8), "softcap": 4.0, "causal": True}
    check_scores(query, key, stage, **options)
    plain = attnc.attention_scores(query, key, stage=stage, softcap=4.0, causal=True)
    with_terms = attnc.attention_scores(query, key, stage=stage, **options)
    assert np.array_equal(plain, with_terms) == (stage == "raw")


@pytest.mark.parametrize("options", [{"causal": True}, {"window": (4, 2)}, {"kv_lengths": [20, 33], "q_offset": 0},
                                     {"mask": np.tri(70, 90, 8, bool)}], ids=str)
def test_rows_that_no_visible_pair_names_change_no_bit(isa, options, seed):
    """They may be NaN, also where a row of the table that the index never names lies between others that it does."""
    random = np.random.default_rng(seed)
    arrays = inputs(random, (2,), 4, 2, 70, 90, 16)
    index, some = np.arange(159) * 2, tables(random, 4, 400, 16)
    allowed = reference.attention(*arrays, want="weights", **options).weights != 0
    named = index[np.arange(90) - np.arange(70)[:, None] + 69]
    used = np.isin(np.arange(400), named[allowed.any((0, 1))])
    assert 5 < used.sum() < 159

    def results():
        got = attnc.attention(*arrays, relative_index=index, **some, want=("lse", "weights", "argmax"), **options)
        back = attnc.attention_backward(got.output, *arrays, got.output, got.lse, relative_index=index, **some,
                                        want=("query", "key", "value", *NAMES), **options)
        W = attnc.AttentionWeights(*arrays[:2], relative_index=index, **some, **options)
        return [*vars(got).values(), *vars(back).values(), W.key_mass(), W.entropy()]

    clean = results()
    for table in some.values():
        table[:, ~used] = np.nan
    for a, b in zip(clean, results(), strict=True):
        assert np.isfinite(a).sum() and not np.isnan(a).any()
        assert_same_bits(a, b)
    for gradient in clean[-4:-2]:
        assert not gradient[:, ~used].any() and gradient[:, used].any(-1).all()


def test_nan_in_a_row_that_is_named_stays_with_its_pairs(isa, seed):
    random = np.random.default_rng(seed)
    query, key, value = inputs(random, (), 2, 2, 70, 90, 16)
    index, some = buckets(70, 90, 200), tables(random, 2, 200, 16)
    clean = attnc.attention(query, key, value, relative_index=index, **some, window=(3, 3), q_offset=0)
    some["relative_key"][1, index[69 + 3]] = np.nan                  # of rows of head 1 that have a third key ahead
    got = attnc.attention(query, key, value, relative_index=index, **some, window=(3, 3), q_offset=0)
    assert np.isnan(got[1]).all()
    assert_same_bits(got[0], clean[0])
    some["relative_key"][1, index[69 + 3]] = 0
    key[:, 5] = np.nan
    got = attnc.attention(query, key, value, relative_index=index, **some, window=(3, 3), q_offset=0)
    assert np.isnan(got[:, 2:9]).all() and not np.isnan(got[:, 9:]).any() and not np.isnan(got[:, :2]).any()


def test_scores_out_of_range_because_of_the_scale(isa, seed):
    """The largest sum of products is subtracted before the scale, as without terms."""
    random = np.random.default_rng(seed)
    arrays, some = inputs(random, (), 2, 2, 30, 40, 8), tables(random, 2, 11, 8)
    check_attention(*arrays, relative_index=buckets(30, 40, 11), **some, scale=1e-20)
    got = attnc.attention(*arrays, relative_index=buckets(30, 40, 11), **some, scale=-1e29, want="weights").weights
    assert ((got == 0) | (got == 1)).all() and (got.sum(-1) == 1).all()


def test_bits(isa, seed):
    """No thread, batch mate, broadcast or stride changes a bit, nor where a slice of the weights begins."""
    random = np.random.default_rng(seed)
    arrays = inputs(random, (3,), 6, 3, 150, 600, 16)
    index = buckets(150, 600, 41)
    one = {name: normal(random, (1, 41, 16)) for name in NAMES}
    wanted = attnc.attention(*arrays, relative_index=index, **one, want=("lse", "weights"))
    for some in ({name: x.repeat(6, 0) for name, x in one.items()},
                 {name: np.broadcast_to(x, (3, 6, 41, 16)) for name, x in one.items()},
                 {name: np.repeat(x, 2, -1)[..., ::2] for name, x in one.items()}):
        for threads in (1, 2, 5):
            assert_same_bits(attnc.attention(*arrays, relative_index=index[::-1].copy()[::-1], **some,
                                             want=("lse", "weights"), num_threads=threads), wanted)
    alone = attnc.attention(*(x[1] for x in arrays), relative_index=index, **one)
    assert_same_bits(alone, wanted.output[1])
    W = attnc.AttentionWeights(*arrays[:2], relative_index=index, **one)
    dense = W.dense()
    for places in ((..., slice(40, 47), slice(500, 600)), (1, 2, 149), (2, slice(1, 5), slice(100), slice(3, 20))):
        assert_same_bits(W[places], dense[places])
    assert_same_bits(W.head(2, 5).entropy(), W.entropy()[2, 5])


def test_memory_grows_with_the_lengths(isa):
    """A table row for each of 8,191 distances: less than a tenth of one head's matrix, in a call of eight heads."""
    random = np.random.default_rng(0)
    arrays = inputs(random, (), 8, 8, 4096, 4096, 8)
    some = {"relative_key": normal(random, (1, 8191, 8))}
    tracemalloc.start()
    attnc.attention(*arrays, relative_index=np.arange(8191), **some, num_threads=2)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * 4096 * 4096 / 10


def test_a_cache_goes_by_the_distance_of_rows(isa, seed):
    random = np.random.default_rng(seed)
    query, key, value = inputs(random, (2,), 2, 2, 5, 30, 8)
    some = {"relative_index": buckets(5, 40, 9), **tables(random, 2, 9, 8)}
    for dtype in (np.float32, np.int8):
        cache, twin = (module.KVCache(2, 2, 8, capacity=40, dtype=dtype) for module in (attnc, reference))
        for each in (cache, twin):
            each.append(key, value)
        np.testing.assert_allclose(cache.attend(query, **some), twin.attend(query, **some), rtol=0, atol=1e-5)
        cut = {**some, "relative_index": some["relative_index"][:34]}
        np.testing.assert_allclose(cache.weights(query, **cut).key_mass(), twin.weights(query, **cut).key_mass(),
                                   rtol=0, atol=1e-5)
        for each in (cache, twin):
            each.keep(np.broadcast_to(np.arange(1, 20), (2, 2, 19)))
            for call in (each.attend, each.weights):
                with pytest.raises(ValueError, match="relative_index was given to a cache that has left tokens out"):
                    call(query, **(some if call == each.attend else {**some, "relative_index": np.zeros(23, int)}))
    for module in (attnc, reference):
        ring = module.KVCache(2, 2, 8, capacity=40, window=(9, 0), dtype=np.float32)
        ring.append(key, value)
        with pytest.raises(ValueError, match="relative_index was given to a cache with a window"):
            ring.attend(query, **some)
