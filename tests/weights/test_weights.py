"""AttentionWeights: every statement against its twin from the dense matrix, with all options, and the identities."""

import numpy as np
import pytest
from checking import DTYPES, PATHS, assert_same_bits, expected, inputs, largest, normal
from slow import NAMES, problem, some_option
from weighing import Twins, at_least_one

import attnc
from attnc import reference
from attnc.testing import assert_within

SEEDS = range(12)


def check_rows(twins):
    length = max(twins.fast.shape[-1], 1)
    twins.check(lambda W: W.lse, twins.logits, "lse")
    twins.check(lambda W: W.entropy(), twins.logits, "entropy")
    twins.check(lambda W: W.effective_keys(), lambda exact: twins.logits * at_least_one(exact), "effective_keys")
    twins.check(lambda W: W.max(), name="max")
    twins.check(lambda W: W.mean_position(), length, "mean_position")
    twins.check(lambda W: W.mean_distance(), at_least_one, "mean_distance")
    for k in (1, 3, length + 2):
        top = twins.check_topk(k)
    np.testing.assert_array_equal(twins.fast.argmax(), top.indices[..., 0])


def check_keys(twins, random):
    q_len, kv_len = twins.fast.shape[-2:]
    for keys in (None, slice(1, None, 2), [0, -1, 0], np.arange(kv_len) % 3 == 0):
        twins.check(lambda W, keys=keys: W.row_mass(keys=keys), 2.0, f"row_mass {keys}")
    amounts = random.standard_normal(twins.fast.shape[:-1])
    for options in ({}, {"normalize": True}, {"rows": slice(1, None, 2)}, {"rows": [0, q_len - 1, 0], "heads": "group"},
                    {"row_weights": amounts}, {"row_weights": amounts[..., :1], "rows": [0]}, {"heads": "mean"},
                    {"heads": "max"}, {"heads": "sum"}):
        scale = largest(amounts) * q_len if "row_weights" in options else 1.0
        twins.check(lambda W, options=options: W.key_mass(**options),
                    lambda exact, scale=scale: scale * at_least_one(exact), f"key_mass {options}")
    twins.check(lambda W: W.key_max(), name="key_max")
    twins.check(lambda W: W.key_max(rows=[q_len - 1]), name="key_max of a row")
    row_bins, col_bins = (int(random.integers(1, n + 1)) for n in (q_len, kv_len))
    for reduce in ("mean", "max"):
        twins.check(lambda W, reduce=reduce: W.map((row_bins, col_bins), reduce=reduce), name=f"map {reduce}")
        groups = random.integers(-1, 3, q_len), random.integers(-1, 4, kv_len)
        twins.check(lambda W, reduce=reduce, groups=groups: W.pool(*groups, reduce=reduce), name=f"pool {reduce}")
    for threshold in (0.1, 0.5):
        if not np.isclose(twins.exact.dense().astype(float), threshold, atol=1e-3).any():
            np.testing.assert_array_equal(twins.fast.key_hits(threshold), twins.exact.key_hits(threshold))


def check_products(twins, random):
    *lead, q_len, kv_len = twins.fast.shape
    for shape in ((kv_len,), (kv_len, 3), (*lead, kv_len, 2)):
        x = normal(random, shape, twins.fast.dtype.name)
        twins.check(lambda W, x=x: W @ x, largest(x), f"W @ {shape}")
    for shape in ((q_len,), (q_len, 3), (*lead, q_len, 2)):
        x = normal(random, shape, twins.fast.dtype.name)
        twins.check(lambda W, x=x: W.T @ x, largest(x) * q_len, f"W.T @ {shape}")


def check_parts(twins, random):
    """Dense weights and selections, which have the same bits."""
    *lead, q_len, kv_len = twins.fast.shape
    dense = twins.check(lambda W: W.dense(), name="dense")
    assert_same_bits(np.asarray(twins.fast), dense)
    rows, keys = random.integers(-q_len, q_len, 4), random.integers(-kv_len, kv_len, 4)
    choices = [(..., 0, slice(None)), (..., slice(None, None, -2), 0), (..., rows, slice(1, None)), (..., rows, keys),
               (..., slice(None), keys), (..., rows[:, None], keys), (..., rows.reshape(2, 2), slice(None)),
               (..., np.arange(q_len) % 2 == 0, slice(None)), (..., [], slice(None)), (..., -1, -1), ()]
    if lead:
        choices += [0, (0, ..., rows, slice(None)), (..., -1, slice(None), slice(None)), (0, ..., 0),
                    (slice(None, None, -1), ..., slice(None), slice(0, 2))]
    if len(lead) == 2:
        choices += [(0, slice(None), rows), (0, slice(None), slice(None), keys), (slice(None), 0, rows, keys),
                    (0, slice(None, None, 2), 0, keys), (0, 1)]
    for index in choices:
        assert_same_bits(twins.fast[index], dense[index], f"index {index}")
    for start, block in twins.fast.blocks(2):
        assert_same_bits(block, dense[..., start, :])
    twins.check(lambda W: W.head_mean(), name="head_mean")
    keep = random.random((q_len, kv_len)) < 0.5
    twins.check(lambda W: W.lost_mass(keep), name="lost_mass")
    twins.check(lambda W: W.lost_mass(keep[0]), name="lost_mass of keys")
    sparse, exact = twins.fast.sparse(threshold=0.3), twins.exact.sparse(threshold=0.3)
    assert sparse.indptr.tolist() == exact.indptr.tolist() and sparse.indices.tolist() == exact.indices.tolist()
    twins.check(lambda W: W.sparse(threshold=0.3).dropped, name="dropped")
    total = twins.fast.reduce(lambda sum, tile, index: sum + tile.sum(dtype=np.longdouble), 0.0, rows=3, keys=2)
    np.testing.assert_allclose(float(total), float(dense.sum(dtype=np.longdouble)), rtol=1e-12)


@pytest.mark.parametrize("number", SEEDS)
def test_all_options_together(isa, number, seed):
    (query, key, _), options = problem(number + 1000 * seed)
    random = np.random.default_rng(number)
    twins = Twins(query, key, **options)
    check_rows(twins)
    check_keys(twins, random)
    check_products(twins, random)
    check_parts(twins, random)


SHAPES = {"few": PATHS["few"], "tasks": (2, 1, 210, 70, 8, 8), "blocks": (1, 1, 13, 1100, 16, 16)}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_odd_sizes(isa, shape, dtype, seed):
    """Several tasks and blocks of keys, some of the options, an empty row and sinks."""
    random = np.random.default_rng(seed)
    q_heads, _, q_len, kv_len, dim, _ = SHAPES[shape]
    query, key, _ = inputs(random, (2,), *SHAPES[shape], dtype=dtype)
    options = dict(causal=True, q_offset=np.array([abs(kv_len - q_len), -3]), sinks=random.standard_normal(q_heads))
    for name in random.choice([name for name in NAMES if name not in (*options, "q_lengths")], 2, replace=False):
        options |= some_option(str(name), random, (2,), q_heads, q_len, kv_len, dim)
    twins = Twins(query, key, **options)
    twins.check(lambda W: W.entropy(), twins.logits, "entropy")
    twins.check(lambda W: W.mean_position(), kv_len, "mean_position")
    twins.check(lambda W: W.mean_distance(), kv_len, "mean_distance")
    twins.check_topk(5)
    for how in ({}, {"normalize": True, "rows": slice(-7, None)}, {"heads": "group"}):
        twins.check(lambda W, how=how: W.key_mass(**how), at_least_one, "key_mass")
    twins.check(lambda W: W.key_max(), name="key_max")
    for bins in ((3, 5), (q_len, kv_len), (1, 1)):
        twins.check(lambda W, bins=bins: W.map(bins), name="map")
    labels = random.integers(-1, 4, q_len), random.integers(-1, 9, kv_len)
    for reduce in ("mean", "max"):
        twins.check(lambda W, reduce=reduce: W.pool(*labels, reduce=reduce), name="pool")
    x = normal(random, (q_len, 70), twins.fast.dtype.name)
    twins.check(lambda W: W.T @ x, largest(x) * q_len, "W.T @ x")
    x = normal(random, (kv_len, 3), twins.fast.dtype.name)
    twins.check(lambda W: W @ x, largest(x), "W @ x")
    rows, keys = random.integers(0, q_len, 3), random.integers(0, kv_len, 3)
    dense = twins.check(lambda W: W.dense(), name="dense")
    for index in ((..., rows, keys), (..., rows, slice(None)), (0, -1, slice(3, None)), (..., slice(1, -1), keys)):
        assert_same_bits(attnc.AttentionWeights(query, key, **options)[index], dense[index], f"index {index}")


@pytest.mark.parametrize("dtype", DTYPES)
def test_under_a_given_lse(isa, dtype, seed):
    """Over more keys than these; rows of -inf, inf and NaN among them."""
    random = np.random.default_rng(seed)
    query, key, _ = inputs(random, (2,), 4, 2, 9, 150, 8, dtype=dtype)
    lse = random.uniform(5, 8, (2, 4, 9))
    lse[..., 1], lse[0, ..., 2], lse[1, 0, 0] = -np.inf, np.inf, np.nan
    twins = Twins(query, key, lse=lse, causal=True)
    with np.errstate(all="ignore"):
        check_rows(twins)
        check_keys(twins, random)
        check_parts(twins, random)
    check_products(twins, random)
    twins = Twins(query, key, lse=np.full((2, 4, 9), 1.0))      # below that of these keys
    twins.check(lambda W: W.key_mass(), at_least_one, "key_mass")


def test_nan_stays_where_it_belongs(isa, seed):
    """A row that is NaN makes the keys that it sees NaN, no others, and a hidden key changes no bit."""
    random = np.random.default_rng(seed)
    query, key, _ = inputs(random, (1,), 2, 2, 40, 600, 8)
    query[0, 0, 3] = np.nan
    options = dict(causal=True, q_offset=0)
    twins = Twins(query, key, **options)
    with np.errstate(all="ignore"):
        check_rows(twins)
        check_keys(twins, random)
        twins.check(lambda W: W.T @ np.ones(40), 40, "W.T @ ones")
    clean = attnc.AttentionWeights(query, key, **options)
    key[..., 40:, :] = np.inf
    hidden = attnc.AttentionWeights(query, key, **options)
    for say in SAYINGS:
        assert_same_bits(say(hidden), say(clean))
    assert np.isnan(clean.key_mass()[0, 0]).sum() == 4


@pytest.mark.parametrize("far", [0, 300, 16384, -16384, 1e6])
@pytest.mark.parametrize("how", ["bias", "product"])
def test_lost_mass_and_products_keep_the_digits_of_far_scores(isa, how, far, seed):
    """An lse near 16,384 has steps of 2e-3 in float32; a weight is off by 2e-7."""
    random = np.random.default_rng(seed)
    query, key, _ = inputs(random, (2,), 4, 2, 30, 50, 16)
    options = {"sinks": np.full(4, far + 0.5)} if how == "bias" else {}
    if how == "bias":
        options["bias"] = np.full(50, float(far))
    else:
        query[..., 0], key[..., 0] = abs(far) ** 0.5 * 2, np.sign(far) * abs(far) ** 0.5 * 2        # over sqrt(16)
    keep = random.random((30, 50)) < 0.5
    twins = Twins(query, key, **options)
    twins.check(lambda W: W.lost_mass(keep), name="lost_mass")
    twins.check(lambda W: W.row_mass(keys=keep[0]), name="row_mass")


SAYINGS = [
    lambda W: W.lse, lambda W: W.entropy(), lambda W: W.topk(4).weights, lambda W: W.topk(4).indices,
    lambda W: W.mean_position(), lambda W: W.mean_distance(), lambda W: W.key_mass(),
    lambda W: W.key_mass(normalize=True),
    lambda W: W.key_max(), lambda W: W.key_hits(0.01), lambda W: W.map((5, 7)), lambda W: W.dense(),
    lambda W: W.T @ np.linspace(0, 1, W.shape[-2]), lambda W: W @ np.linspace(0, 1, W.shape[-1]),
    lambda W: W.pool(np.arange(W.shape[-2]) % 3, np.arange(W.shape[-1]) % 5, reduce="max"),
    lambda W: W.pool(np.arange(W.shape[-2]) % 3, np.arange(W.shape[-1]) % 5)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_threads_and_mates_change_no_bit(isa, dtype, seed):
    random = np.random.default_rng(seed)
    query, key, _ = inputs(random, (2,), 4, 2, 300, 700, 16, dtype=dtype)
    options = dict(causal=True, kv_lengths=np.array([700, 301]))
    one, three = (attnc.AttentionWeights(query, key, num_threads=n, **options) for n in (1, 3))
    mate = attnc.AttentionWeights(query[1], key[1], causal=True, kv_lengths=301)
    head = one.head(1, 2)
    for say in SAYINGS:
        wanted = say(one)
        assert_same_bits(say(three), wanted)
        assert_same_bits(say(mate), wanted[1])
        assert_same_bits(say(head), wanted[1, 2])


def test_summary_has_the_bits_of_its_parts(isa, seed):
    random = np.random.default_rng(seed)
    query, key, _ = inputs(random, (2,), 4, 2, 100, 300, 16)
    names = ("entropy", "effective_keys", "max", "argmax", "mean_position", "mean_distance", "key_mass", "key_max")
    W = attnc.AttentionWeights(query, key, causal=True)
    found = W.summary(topk=3, map=(4, 6), lse=True, **dict.fromkeys(names, True))
    alone = attnc.AttentionWeights(query, key, causal=True)
    for name in names:
        assert_same_bits(getattr(found, name), getattr(alone, name)(), name)
    assert_same_bits(found.topk.weights, alone.topk(3).weights)
    assert_same_bits(found.map, alone.map((4, 6)))
    assert_same_bits(found.lse, alone.lse)
    assert list(vars(found)) == ["topk", *names, "map", "lse"]


def test_identities(isa, seed):
    random = np.random.default_rng(seed)
    query, key, value = inputs(random, (2,), 2, 2, 60, 90, 16, dtype="float64")
    options = dict(window=(20, 3), sinks=[0.5, -np.inf])
    W = attnc.AttentionWeights(query, key, **options)
    dense, close = W.dense(), dict(rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(W.topk(90).weights, -np.sort(-dense, -1), **close)
    np.testing.assert_allclose(W.map((60, 90)), dense, **close)
    np.testing.assert_allclose(W.map((1, 1))[..., 0, 0] * 60, dense.sum((-1, -2)), **close)
    np.testing.assert_allclose(W.key_mass().sum(-1), dense.sum((-1, -2)), **close)
    np.testing.assert_allclose(W.T @ np.ones(60), W.key_mass(), **close)
    np.testing.assert_allclose(W @ np.ones(90), dense.sum(-1), **close)
    np.testing.assert_allclose(W @ value, attnc.attention(query, key, value, **options), **close)
    scores = np.where(dense > 0, attnc.attention_scores(query, key, window=(20, 3)), 0)
    share = np.exp(0.5 - W.lse[:, 0])
    entropy = W.lse - (dense * scores).sum(-1)
    entropy[:, 0] -= share * 0.5
    np.testing.assert_allclose(W.entropy(), entropy, **close)
    keep = np.arange(90) % 3 == 0
    np.testing.assert_allclose(W.lost_mass(keep), dense[..., ~keep].sum(-1), **close)
    np.testing.assert_allclose(W.key_mass(heads="mean"), W.key_mass().mean(-2), **close)
    total = np.zeros((2, 2, 90))
    for part in (slice(0, 20), slice(20, 60)):
        assert W.key_mass(rows=part, out=total) is total
    np.testing.assert_allclose(total, W.key_mass(), **close)


def test_ties_go_to_the_first_key(isa):
    for dtype in (np.float32, np.float64):
        W = attnc.AttentionWeights(np.zeros((2, 70, 4), dtype), np.ones((2, 700, 4), dtype))
        for k in (1, 3, 8, 20, 700):
            assert (W.topk(k).indices == np.arange(k)).all()
        np.testing.assert_allclose(W.entropy(), np.log(700), rtol=1e-6)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_beside_the_output(isa, path, dtype, seed):
    """`want=` of statistics changes no bit of what else there is, and gives what AttentionWeights gives."""
    random = np.random.default_rng(seed)
    q_heads, _, q_len, kv_len, *_ = PATHS[path]
    query, key, value = inputs(random, (2,), *PATHS[path], dtype=dtype)
    options = dict(bias=random.standard_normal((q_len, kv_len)), sinks=random.standard_normal(q_heads), causal=True)
    plain = attnc.attention(query, key, value, want=("lse", "weights"), **options)
    got = attnc.attention(query, key, value, want=("entropy", "lse", "max", "weights", "argmax"), **options)
    for name in ("output", "lse", "weights"):
        assert_same_bits(getattr(got, name), getattr(plain, name), name)
    assert_same_bits(attnc.attention(query, key, value, want="entropy", **options).output, plain.output)
    twins = Twins(query, key, **options)
    honest = expected(reference.attention, query, key, value, want=("entropy", "max", "argmax"), **options)
    for name in ("entropy", "max"):
        scale = twins.logits if name == "entropy" else 1.0
        _, exact = twins.ask(lambda W, name=name: getattr(W, name)())
        assert_within(getattr(got, name), exact, getattr(honest, name), scale=scale)
    assert got.argmax.dtype == honest.argmax.dtype == np.int64
    dense, _ = twins.ask(lambda W: W.dense())
    there = np.take_along_axis(dense, got.argmax[..., None], -1)[..., 0]
    np.testing.assert_allclose(there, honest.max, rtol=1e-5)


def test_empty_axes(isa):
    for q_len, kv_len in ((0, 3), (3, 0), (0, 0)):
        W = attnc.AttentionWeights(np.ones((2, q_len, 4)), np.ones((2, kv_len, 4)))
        assert W.dense().shape == W[:].shape == (2, q_len, kv_len) and W.entropy().shape == (2, q_len)
        assert (W.topk(2).indices == -1).all() and (W.max() == 0).all() and (W.argmax() == -1).all()
        assert W.key_mass().shape == (2, kv_len) and (W.map((1, 1)) == 0).all()
        assert (W @ np.ones((kv_len, 2))).shape == (2, q_len, 2) and (W.T @ np.ones(q_len)).shape == (2, kv_len)
        assert len(list(W.blocks())) == (q_len > 0)
        for how in ({"threshold": 0.5}, {"top_p": 0.5}):
            for sparse in (W.sparse(**how), reference.AttentionWeights(W._a.query, W._a.key).sparse(**how)):
                assert sparse.indptr.tolist() == [0] * (2 * q_len + 1) and not sparse.dropped.any()
