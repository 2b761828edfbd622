"""Weighted sums of heads: every statement against its twin, and contact maps from sums of rows and keys alone."""

import copy
import pickle

import numpy as np
import pytest
from checking import DTYPES, PATHS, assert_same_bits, inputs, largest, normal
from slow import NAMES, problem, some_option
from weighing import twin

import attnc
from attnc import reference
from attnc.testing import assert_within

SHAPES = {"few": PATHS["few"], "tasks": (4, 2, 110, 70, 8, 8), "blocks": (2, 1, 13, 600, 16, 16)}


def check_all(query, key, coefficients, random, **options):
    """Every statement of fast, honest and exact."""
    made = attnc.AttentionWeights(query, key, **options), twin(query, key, **options), twin(query, key, True, **options)
    fast, honest, exact = (W.weighted(heads=coefficients) for W in made)
    *_, q_len, kv_len = fast.shape
    size = max(1.0, largest(np.abs(coefficients).sum(-1)))

    def check(say, scale=1.0, name="result"):
        with np.errstate(all="ignore"):
            got, twins, wide = (say(A) for A in (fast, honest, exact))
        assert_within(got, wide, twins, scale=max(scale, largest(wide)), name=name)
        return got

    dense = check(lambda A: A.dense(), size, "dense")
    assert dense.shape == fast.shape and dense.dtype == fast.dtype
    assert_same_bits(fast[..., 1:, :-1], dense[..., 1:, :-1])
    for keys in (None, slice(1, None, 2), [0, -1, 0]):
        check(lambda A, keys=keys: A.row_mass(keys=keys), size * 2, f"row_mass {keys}")
    check(lambda A: A.lost_mass(np.arange(kv_len) % 3 == 0), size, "lost_mass")
    check(lambda A: A.lost_mass(np.ones(fast.shape, bool)), size, "lost_mass of nothing")
    check(lambda A: A.mean_position(), size * kv_len, "mean_position")
    check(lambda A: A.mean_distance(), size * (kv_len + q_len), "mean_distance")
    check(lambda A: A.max(), size, "max")
    top = fast.topk(3)
    check(lambda A: A.topk(3).weights, size, "topk")
    there = np.take_along_axis(dense, np.maximum(top.indices, 0), -1)
    np.testing.assert_array_equal(np.where(top.indices < 0, 0, there), np.where(np.isnan(top.weights), 0, top.weights))
    np.testing.assert_array_equal(top.indices[..., 0], fast.argmax())
    if (coefficients >= 0).all():
        check(lambda A: A.entropy(), size * 10, "entropy")
        check(lambda A: A.effective_keys(), size * 10, "effective_keys")
    amounts = random.standard_normal(fast.shape[:-1]).astype(np.float32)
    for how in ({}, {"rows": slice(1, None, 2)}, {"rows": [0, -1, 0]}, {"row_weights": amounts}):
        check(lambda A, how=how: A.key_mass(**how), size * q_len, f"key_mass {how}")
    check(lambda A: A.key_max(), size, "key_max")
    check(lambda A: A.key_max(rows=[q_len - 1]), size, "key_max of a row")
    hits, wanted = fast.key_hits(0.3), exact.key_hits(0.3)
    if not np.isclose(dense, 0.3, atol=1e-3).any():
        np.testing.assert_array_equal(hits, wanted)
    bins = tuple(int(random.integers(1, n + 1)) for n in (q_len, kv_len))
    groups = random.integers(-1, 3, q_len), random.integers(-1, 4, kv_len)
    for reduce in ("mean", "max"):
        check(lambda A, reduce=reduce: A.map(bins, reduce=reduce), size, f"map {reduce}")
        check(lambda A, reduce=reduce: A.pool(*groups, reduce=reduce), size, f"pool {reduce}")
    for lead in ((), fast.shape[:-2]):
        x, y = (normal(random, (*lead, n, 3), fast.dtype.name) for n in (kv_len, q_len))
        check(lambda A, x=x: A @ x, size * largest(x), "A @ x")
        check(lambda A, y=y: A.T @ y, size * q_len * largest(y), "A.T @ y")
    x = normal(random, (kv_len,), fast.dtype.name)
    check(lambda A: A @ x, size * largest(x), "A @ vector")


def drawn(random, shape, negative):
    """Coefficients that float32 holds, one of them 0."""
    found = random.integers(-4 if negative else 1, 5, shape) / 4
    found[..., 0] = 0
    return found.astype(np.float32)


@pytest.mark.parametrize("number", range(6))
def test_all_options_together(isa, number, seed):
    (query, key, _), options = problem(number + 1000 * seed)
    random = np.random.default_rng(number)
    batch = np.broadcast_shapes(query.shape[:-3], key.shape[:-3])
    shape = (*(batch if number % 2 else ()), query.shape[-3])
    check_all(query, key, drawn(random, shape, number % 3 == 0), random, **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_odd_sizes(isa, shape, dtype, seed):
    random = np.random.default_rng(seed)
    q_heads, _, q_len, kv_len, dim, _ = SHAPES[shape]
    query, key, _ = inputs(random, (2,), *SHAPES[shape], dtype=dtype)
    options = dict(causal=True, q_offset=np.array([abs(kv_len - q_len), -3]), sinks=random.standard_normal(q_heads))
    for name in random.choice([name for name in NAMES if name not in (*options, "q_lengths")], 2, replace=False):
        options |= some_option(str(name), random, (2,), q_heads, q_len, kv_len, dim)
    check_all(query, key, drawn(random, (q_heads,), True), random, **options)


def test_two_axes_nan_rows_and_a_given_lse(isa, seed):
    random = np.random.default_rng(seed)
    query, key, _ = inputs(random, (), 3, 3, 20, 40, 8)
    check_all(query[0], key[0], np.array([1.5], np.float32), random, causal=True)
    check_all(query, key, np.ones(3, np.float32), random, lse=random.uniform(3, 5, (3, 20)))
    query[1, 4] = np.nan
    check_all(query, key, np.array([1, 2, -1], np.float32), random, causal=True, q_offset=0)
    A = attnc.AttentionWeights(query, key).weighted(heads=[1.0, 0.0, 2.0])        # the head of the NaN counts 0
    for found in (A.dense(), A.key_mass(), A.row_mass(), A.map((3, 3)), A @ np.ones(40), A.T @ np.ones(20),
                  A.topk(2).weights, A.pool(np.zeros(20, int), np.zeros(40, int), reduce="max")):
        assert np.isfinite(found).all()


def test_a_head_that_counts_in_one_batch_element_alone(isa, seed):
    query, key, _ = inputs(np.random.default_rng(seed), (2,), 2, 2, 20, 40, 8)
    query[0, 1, 4] = np.nan
    A = attnc.AttentionWeights(query, key).weighted(heads=[[1.0, 0.0], [1.0, 2.0]])
    for found in (A.dense(), A.key_mass(), A.row_mass(), A.map((3, 3)), A @ np.ones(40), A.T @ np.ones(20),
                  A.key_max()):
        assert np.isfinite(found).all()


def test_the_mean_of_heads_is_one(isa, seed):
    query, key, _ = inputs(np.random.default_rng(seed), (2,), 4, 2, 30, 50, 8)
    W = attnc.AttentionWeights(query, key, causal=True)
    A = W.weighted(heads=np.full(4, 0.25))
    assert_same_bits(A.dense(), W.head_mean())
    np.testing.assert_allclose(A.key_mass(), W.key_mass(heads="mean"), rtol=1e-6)
    np.testing.assert_allclose(A.dense(dtype="float16"), W.head_mean(), atol=1e-3)


def test_threads_change_no_bit_and_copies_answer_alike(isa, seed):
    query, key, _ = inputs(np.random.default_rng(seed), (2,), 4, 2, 130, 300, 16)
    one, three = (attnc.AttentionWeights(query, key, num_threads=n).weighted(heads=[1, -2, 3, 4]) for n in (1, 3))
    say = (lambda A: A.dense(), lambda A: A.key_mass(), lambda A: A.row_mass(), lambda A: A.map((9, 9)),
           lambda A: A @ np.linspace(0, 1, 300), lambda A: A.T @ np.linspace(0, 1, 130), lambda A: A.max())
    for each in say:
        for other in (three, copy.deepcopy(one), pickle.loads(pickle.dumps(one))):
            assert_same_bits(each(other), each(one))
    assert repr(one) == "WeightedHeads(shape=(2, 130, 300), dtype=float32)"
    query[0, 0] += 1
    for each in say:
        with pytest.raises(RuntimeError, match="query changed"):
            each(one)


METHODS = {
    "topk": (2,), "max": (), "argmax": (), "entropy": (), "effective_keys": (), "mean_position": (),
    "mean_distance": (), "row_mass": (), "lost_mass": (np.ones(50, bool),), "key_mass": (), "key_max": (),
    "key_hits": (0.1,),
    "map": ((2, 2),), "pool": (np.zeros(30, int), np.zeros(50, int)), "dense": ()}


@pytest.mark.parametrize("name", METHODS)
def test_progress(isa, name):
    query, key, _ = inputs(np.random.default_rng(0), (2,), 4, 2, 30, 50, 8)
    A, told = attnc.AttentionWeights(query, key).weighted(heads=np.ones(4)), []
    getattr(A, name)(*METHODS[name], progress=lambda done, total: told.append((done, total)))
    assert told[-1][0] == told[-1][1] > 0 and told == sorted(told)


@pytest.mark.parametrize("module", [attnc, reference])
@pytest.mark.parametrize(("error", "heads", "words"), [
    (ValueError, [1.0, 2.0], r"heads has shape \(2,\); wanted \(batch..., q_heads\) = \(2, 4\)"),
    (ValueError, np.ones((3, 4)), "heads has shape"), (ValueError, [1, 2, np.nan, 4], "heads must be finite"),
    (TypeError, "mean", "heads has dtype"), (TypeError, None, "heads must be an array"),
])
def test_errors(module, error, heads, words):
    query, key, _ = inputs(np.random.default_rng(0), (2,), 4, 2, 9, 12, 8)
    with pytest.raises(error, match=words):
        module.AttentionWeights(query, key).weighted(heads=heads)


@pytest.mark.parametrize("module", [attnc, reference])
def test_errors_of_statements(module):
    query, key, _ = inputs(np.random.default_rng(0), (2,), 4, 2, 9, 12, 8)
    A = module.AttentionWeights(query, key).weighted(heads=[1, 1, 1, -1])
    for call, words in ((lambda: A.entropy(), "heads has coefficients below 0, the least -1"),
                        (lambda: A.row_mass(keys=[12]), "keys must be"), (lambda: A.key_mass(rows=[9]), "rows must be"),
                        (lambda: A.key_mass(row_weights=np.ones((2, 4, 9))), "row_weights has shape"),
                        (lambda: A.lost_mass(np.ones((2, 4, 9, 12), bool)), "keep has shape"),
                        (lambda: A.lost_mass([0, 1]), "keep must be bool"),
                        (lambda: A @ np.ones(9), "the operand of @"),
                        (lambda: A @ np.ones((2, 4, 12, 1)), "the operand of @ has shape"),
                        (lambda: A.map((1, 1), reduce="sum"), "reduce must be"), (lambda: A.topk(0), "k must be"),
                        (lambda: module.rollout([A], 0), "must be AttentionWeights")):
        with pytest.raises((TypeError, ValueError), match=words):
            call()


def dense_contacts(weights, coefficients, inner):
    """The contact map of protein language models, from dense weights: symmetric, with average product correction."""
    maps = weights[:, inner, inner].astype(np.float64)
    maps = maps + maps.swapaxes(-1, -2)
    rows, keys, total = maps.sum(-1, keepdims=True), maps.sum(-2, keepdims=True), maps.sum((-1, -2), keepdims=True)
    return np.tensordot(coefficients, maps - rows * keys / total, 1)


@pytest.mark.parametrize("layers", [1, 3])
def test_contact_maps_need_sums_and_one_block_at_a_time(isa, layers, seed):
    """Rao et al. 2021: the regression over heads is a weighted sum of them less one of products of their sums."""
    random = np.random.default_rng(seed)
    heads, length = 5, 90
    inner = slice(1, length - 1)            # without the tokens of start and end
    lazy = [attnc.AttentionWeights(*(3 * x for x in inputs(random, (), heads, heads, length, length, 8)[:2]))
            for _ in range(layers)]
    coefficients = random.standard_normal((layers, heads))
    wanted = sum(dense_contacts(W.dense(), c, inner) for W, c in zip(lazy, coefficients, strict=True))
    sums = []                               # of each head once: rows plus keys, as the map is symmetric
    for W in lazy:
        both = W.row_mass(keys=inner)[:, inner].astype(np.float64) + W.key_mass(rows=inner)[:, inner]
        sums.append((both, both.sum(-1)))
    joined = [W.weighted(heads=c) for W, c in zip(lazy, coefficients, strict=True)]
    for i in range(1, length - 1, 30):      # a block of the map needs two blocks of the weights
        for j in range(1, length - 1, 30):
            rows, keys = slice(i, min(i + 30, length - 1)), slice(j, min(j + 30, length - 1))
            block = sum(A[rows, keys].astype(np.float64) + A[keys, rows].T for A in joined)
            for (both, total), c in zip(sums, coefficients, strict=True):
                mine, other = both[:, rows.start - 1:rows.stop - 1], both[:, keys.start - 1:keys.stop - 1]
                block -= np.einsum("h,hi,hj->ij", c / total, mine, other)
            np.testing.assert_allclose(block, wanted[rows.start - 1:rows.stop - 1, keys.start - 1:keys.stop - 1],
                                       atol=1e-5)
