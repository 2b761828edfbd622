"""What a cache forgets and what its weights are: rows that stay, their positions, lazy weights over rows in place."""

import copy
import pickle

import numpy as np
import pytest
from checking import assert_same_bits, dtype_of, normal

import attnc
from attnc import reference
from attnc.testing import assert_within

DTYPES = ("float32", "float64", "float16", "bfloat16", "int8")
OPTIONS = {
    "plain": {},
    "causal": {"causal": True, "window": (90, None)},
    "all": {"causal": True, "softcap": 4.0, "alibi_slopes": [0.1, 0.0, 0.3, 1.0], "sinks": [0.5, -np.inf, 2.0, 0.0]},
}


def tokens(random, count, dims=(24, 40)):
    """Keys and values of some tokens."""
    return tuple(normal(random, (2, 2, count, dim)) for dim in dims)


def pair(random, dtype, counts, capacity=220, dims=(24, 40)):
    """A cache and its twin after some appends, of which the second batch element takes a few tokens less."""
    dtype = np.dtype(np.int8) if dtype == "int8" else dtype_of(dtype)
    caches = [module.KVCache(2, 2, *dims, capacity=capacity, dtype=dtype) for module in (attnc, reference)]
    for count in counts:
        rows = tokens(random, count, dims)
        for cache in caches:
            cache.append(*rows, lengths=[count, max(count - 3, 0)])
    return caches


def kept(random, lengths, counts):
    """Rows of each head, (2, 2, n), in any order and -1 behind them."""
    found = np.full((2, 2, max(counts)), -1)
    for b, head in np.ndindex(2, 2):
        found[b, head, :counts[b]] = random.choice(int(lengths[b]), counts[b], replace=False)
    return found


# Weights

@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", OPTIONS)
def test_weights_over_what_it_holds(isa, options, dtype, seed):
    random = np.random.default_rng(seed)
    cache, twin = pair(random, dtype, [150, 1, 40])
    query = normal(random, (2, 4, 5, 24), "float64" if dtype == "float64" else "float32")
    W, honest = (each.weights(query, **OPTIONS[options]) for each in (cache, twin))
    assert W.shape == honest.shape == (2, 4, 5, 191) and W.dtype == query.dtype
    want = cache.attend(query, want=("weights", "lse"), **OPTIONS[options])
    assert_same_bits(W.dense(dtype=query.dtype), W.dense())
    exact = twin.weights(query.astype(np.float64), **OPTIONS[options])
    assert_within(W.dense(), exact.dense(), honest.dense(), scale=1.0)
    assert_within(want.weights[..., :191].astype(W.dtype), exact.dense(), want.weights[..., :191].astype(W.dtype))
    assert not W.dense()[1, ..., 184:].any() and W.dense()[1, :, -1, 183].all()
    for name in ("entropy", "key_mass", "mean_distance"):
        scale = 200 if name == "mean_distance" else 5.0
        assert_within(getattr(W, name)(), getattr(exact, name)(), getattr(honest, name)(), scale=scale, name=name)
    assert_within(W.lse, exact.lse, honest.lse, scale=9.0, name="lse")
    assert_same_bits(W[0, 1, 2:, 7:99], W.dense()[0, 1, 2:, 7:99])
    assert_same_bits(W.head(1, 3).dense(), W.dense()[1, 3])
    swapped = cache.weights(query.swapaxes(1, 2), layout="bnhd", **OPTIONS[options])
    assert_same_bits(swapped.dense(), W.dense())


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_weights_are_of_the_rows_in_place(dtype, seed):
    random = np.random.default_rng(seed)
    cache, _ = pair(random, dtype, [100])
    query = normal(random, (2, 4, 5, 24))
    W = cache.weights(query)
    assert np.shares_memory(W._a.key, cache.keys)
    before = W.dense()
    cache.append(*tokens(random, 3), lengths=[3, 0])        # behind the longest length: no row of these weights
    assert_same_bits(W.dense(), before)
    copies = copy.deepcopy(W), pickle.loads(pickle.dumps(W))
    cache.reorder([1, 0])
    with pytest.raises(RuntimeError, match=r"key.* changed since the first answer"):
        W.dense()
    for other in copies:
        assert_same_bits(other.dense(), before)
    lse = cache.attend(query, want="lse").lse
    given = cache.weights(query, lse=lse + np.float32(np.log(2)))
    np.testing.assert_allclose(given.dense().sum(-1), 0.5, rtol=1e-5)
    assert not attnc.KVCache(2, 2, 24, 40, capacity=9, dtype=dtype).weights(query).lse.max() > -np.inf


# Rows that stay

@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", OPTIONS)
def test_what_stays_keeps_its_position(isa, options, dtype, seed):
    """Against the twin, and against all tokens with a mask of those that were left out."""
    random = np.random.default_rng(seed)
    cache, twin = pair(random, dtype, [150, 20])
    whole = [copy.copy(each) for each in (cache, twin)]
    indices = kept(random, cache.lengths, (60, 41))
    for each in (cache, twin):
        each.keep(indices)
        assert each.lengths.tolist() == [60, 41]
        for b, head in np.ndindex(2, 2):
            n = [60, 41][b]
            assert_same_bits(each.positions[b, head, :n], np.sort(indices[b, head, :n]))
            assert (each.positions[b, head, n:] == -1).all()
    more = tokens(random, 4)
    for each in (cache, twin, *whole):
        each.append(*more, lengths=[4, 2])
    assert_same_bits(cache.positions, twin.positions)
    assert cache.positions[0, :, 60:].tolist() == [[170, 171, 172, 173]] * 2
    assert cache.positions[1, :, 41:43].tolist() == [[164, 165]] * 2
    query = normal(random, (2, 4, 3, 24), "float64" if dtype == "float64" else "float32")
    got, honest = (each.attend(query, want="lse", **OPTIONS[options]) for each in (cache, twin))
    mask = np.zeros((2, 2, 220), bool)
    for b, head in np.ndindex(2, 2):
        mask[b, head, cache.positions[b, head, :cache.lengths[b]]] = True
    same = whole[1].attend(query.astype(np.float64), want="lse", mask=mask.repeat(2, 1)[:, :, None],
                           **OPTIONS[options])
    assert_within(got.output, same.output, honest.output, scale=5.0, name="output")
    assert_within(got.lse, same.lse, honest.lse, scale=9.0, name="lse")
    placed = {} if options == "plain" else {"q_offset": [171, 163]}
    if dtype != "int8":
        assert_same_bits(got, attnc.attention(
            query, cache.keys[:, :, :64], cache.values[:, :, :64], kv_lengths=cache.lengths, want="lse",
            k_positions=cache.positions, **placed, **OPTIONS[options]))
    W, exact = cache.weights(query, **OPTIONS[options]), twin.weights(query.astype(np.float64), **OPTIONS[options])
    assert W.shape == (2, 4, 3, 64)
    assert_within(W.dense(), exact.dense(), twin.weights(query, **OPTIONS[options]).dense(), scale=1.0)
    np.testing.assert_allclose(W.mean_position(), exact.mean_position(), rtol=1e-4)
    lengths = cache.attend(query, q_lengths=[3, 1], **OPTIONS[options])
    assert_same_bits(lengths[1, :, 0], cache.attend(query[:, :, :1], **OPTIONS[options])[1, :, 0])


def test_changes_carry_positions(seed):
    random = np.random.default_rng(seed)
    caches = pair(random, "int8", [30])
    query = normal(random, (2, 4, 2, 24))
    indices = kept(random, caches[0].lengths, (12, 9))
    for each in caches:
        each.keep(indices)
        each.reorder([1, 1])
        assert each.lengths.tolist() == [9, 9]
        assert (each.positions == np.sort(indices[1, :, :9])).all()
        each.append(*tokens(np.random.default_rng(1), 3), lengths=[3, 1])
        each.truncate([11, 9])          # the second element drops the token that it took, the first one of three
        assert each.positions[0, :, 9:].tolist() == [[27, 28]] * 2
        each.append(*tokens(np.random.default_rng(2), 1))
        assert each.positions[:, 0, :].max(-1).tolist() == [29, 27]
        each.keep(np.stack([[range(2, 12)] * 2, [[*range(8), -1, -1]] * 2]))
        assert each.lengths.tolist() == [10, 8]
    assert_same_bits(caches[0].positions, caches[1].positions)
    np.testing.assert_allclose(*(each.attend(query, causal=True) for each in caches), atol=2e-6)
    other, loaded = copy.deepcopy(caches[0]), pickle.loads(pickle.dumps(caches[0]))
    for each in (other, loaded):
        assert_same_bits(each.attend(query, causal=True, alibi_slopes=np.ones(4)),
                         caches[0].attend(query, causal=True, alibi_slopes=np.ones(4)))
        each.append(*tokens(random, 1))
        assert each.positions[0, 0, -1] == 30
    assert caches[0].positions.shape == (2, 2, 10)
    for each in caches:
        each.truncate(0)
        each.append(*tokens(random, 2))
        assert each.positions.tolist() == [[[0, 1]] * 2] * 2


def test_a_cache_that_keeps_all_pays_nothing(seed):
    cache, _ = pair(np.random.default_rng(seed), "float32", [30])
    nbytes = cache.nbytes
    assert cache.positions.shape == (2, 2, 30) and not cache.positions.flags.writeable
    assert (cache.positions[0] == np.arange(30)).all() and (cache.positions[1, :, 27:] == -1).all()
    cache.keep(np.stack([[range(30)] * 2, [[*range(27), -1, -1, -1]] * 2]))
    assert cache.nbytes == nbytes and cache._positions is None
    cache.keep(np.full((2, 2, 0), 0))
    assert cache.lengths.tolist() == [0, 0] and cache.nbytes == nbytes + 2 * 2 * 220 * 8
    cache.append(*tokens(np.random.default_rng(seed), 1))
    assert cache.positions.tolist() == [[[30]] * 2, [[27]] * 2]


def test_a_ring_says_where_its_rows_stand():
    ring = attnc.KVCache(1, 1, 2, capacity=4, dtype=np.float32, window=(2, 0))
    ring.append(*np.ones((2, 1, 1, 3, 2)))
    assert ring.positions.tolist() == [[[0, 1, 2]]]
    ring.append(*np.ones((2, 1, 1, 3, 2)))
    assert ring.positions.tolist() == [[[4, 5, 2, 3]]]


def errors():
    rows = np.tile(np.arange(4), (2, 2, 1))
    last = rows.copy()
    last[1, 1, 3] = 5
    few, gap, twice = rows.copy(), rows.copy(), rows.copy()
    few[0, 1, 3], gap[0, 1, 1], twice[1, 0] = -1, -1, [2, 1, 2, 0]
    yield ValueError, r"indices has shape \(2, 4\); wanted \(batch, kv_heads, n\) = \(2, 2, n\)", rows[0]
    yield ValueError, r"indices has shape \(1, 2, 4\)", rows[:1]
    yield TypeError, "indices must be an integer or an array of integers", rows.astype(float)
    yield TypeError, "indices must be an integer or an array of integers", rows > 0
    yield ValueError, "indices must be from -1 to", rows - 2
    yield ValueError, "names slot 5 of batch element 1, which holds 5 tokens", last
    yield ValueError, "names 3 slots in batch element 0, head 1, and 4 in head 0; wanted the same number", few
    yield ValueError, "has a slot behind -1 in batch element 0, head 1; wanted -1 at the end only", gap
    yield ValueError, "names slot 2 twice in batch element 1, head 0", twice


@pytest.mark.parametrize("module", [attnc, reference])
@pytest.mark.parametrize("error, words, indices", [*errors()])
def test_errors_of_keep(module, error, words, indices):
    cache = module.KVCache(2, 2, 24, 40, capacity=8, dtype=np.float32)
    cache.append(*tokens(np.random.default_rng(0), 5))
    before = cache.keys.copy(), cache.lengths.copy(), cache.positions
    with pytest.raises(error, match=words):
        cache.keep(indices)
    for x, y in zip(before, (cache.keys, cache.lengths, cache.positions), strict=True):
        assert_same_bits(x, y)


@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
@pytest.mark.parametrize("axes", [0, 1, 2])
def test_queries_of_too_few_axes_are_refused_beside_rows_left_out(layout, axes):
    said = []
    for module in (attnc, reference):
        cache = module.KVCache(2, 2, 24, 40, capacity=8, dtype=np.float32)
        cache.append(*tokens(np.random.default_rng(0), 5))
        cache.keep([[[0, 2], [1, 3]], [[0, 1], [3, 4]]])
        for call in (cache.attend, cache.weights):
            with pytest.raises(ValueError, match=f"query has {axes} axes|layout") as raised:
                call(np.ones((24,) * axes, np.float32), layout=layout)
            said.append(str(raised.value))
    assert said[:2] == said[2:]


@pytest.mark.parametrize("module", [attnc, reference])
def test_a_ring_keeps_no_rows(module):
    ring = module.KVCache(1, 1, 2, capacity=4, dtype=np.float32, window=(2, 0))
    ring.append(*np.ones((2, 1, 1, 3, 2)))
    with pytest.raises(ValueError, match="keep was asked of a cache with a window, whose rows move"):
        ring.keep([[[0]]])
    with pytest.raises(ValueError, match="weights was asked of a cache with a window, whose rows move"):
        ring.weights(np.ones((1, 1, 1, 2)))
