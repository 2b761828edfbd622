"""The relevance of weights: every statement against its twin, with all options; what may not change a bit; errors."""

import copy
import pickle

import numpy as np
import pytest
from checking import DTYPES, PATHS, assert_same_bits, inputs, largest, normal
from slow import NAMES, Slow, assert_close, bounds, problem, some_option
from weighing import twin

import attnc
from attnc import reference
from attnc.testing import assert_within

SIGNS = ("positive", "both")
SHAPES = {"few": PATHS["few"], "tasks": (2, 1, 210, 70, 8, 8), "blocks": (1, 1, 30, 300, 16, 40)}


def twins_of(query, key, value, grad, sign, options):
    """The twin, and the twin one precision up."""
    return [twin(query, key, wide, **options).relevance(value, grad, sign=sign) for wide in (False, True)]


class Relevances:
    """The relevance three times: fast, honest (the twin), exact (the twin one precision up)."""

    def __init__(self, query, key, value, grad, sign="positive", **options):
        self.fast = attnc.AttentionWeights(query, key, **options).relevance(value, grad, sign=sign)
        self.honest, self.exact = twins_of(query, key, value, grad, sign, options)
        self.dense = [self.honest._visible(), self.exact._visible()]

    def check(self, say, scale=1.0, name="result"):
        """`say` of all three: the fast one within tolerance; returns it."""
        with np.errstate(all="ignore"):
            got, honest, exact = (say(R) for R in (self.fast, self.honest, self.exact))
        assert_within(got, exact, honest, scale=max(scale, largest(exact)), name=name)
        return got

    def check_all(self, random):
        *_, q_len, kv_len = self.fast.shape
        size = largest(self.dense[1])
        dense = self.check(lambda R: R.dense(), size, "dense")
        assert_same_bits(self.fast[..., 1:, :-1], dense[..., 1:, :-1])
        assert_same_bits(self.fast[..., -1, :], dense[..., -1, :])
        for how in ({}, {"rows": slice(1, None, 2)}, {"rows": [0, q_len - 1, 0], "heads": "group"}, {"heads": "mean"},
                    {"row_weights": random.standard_normal(self.fast.shape[:-1]).astype(np.float32)}):
            self.check(lambda R, how=how: R.key_mass(**how), size * q_len, f"key_mass {how}")
        for keys in (None, slice(1, None, 2), [0, -1, 0], np.arange(kv_len) % 3 == 0):
            self.check(lambda R, keys=keys: R.row_mass(keys=keys), size * kv_len, f"row_mass {keys}")
        bins = tuple(int(random.integers(1, n + 1)) for n in (q_len, kv_len))
        self.check(lambda R: R.map(bins), size * kv_len, "map")
        groups = random.integers(-1, 3, q_len), random.integers(-1, 4, kv_len)
        self.check(lambda R: R.pool(*groups), size * kv_len, "pool")
        for lead in ((), self.fast.shape[:-2]):
            x, y = (normal(random, (*lead, n, 3), self.fast.dtype.name) for n in (kv_len, q_len))
            self.check(lambda R, x=x: R @ x, size * kv_len * largest(x), "R @ x")
            self.check(lambda R, y=y: R.T @ y, size * q_len * largest(y), "R.T @ y")
        x = normal(random, (kv_len,), self.fast.dtype.name)
        self.check(lambda R: R @ x, size * kv_len * largest(x), "R @ vector")


def some_arrays(random, *sizes, dtype="float32", batch=(2,)):
    """Query, key, value and gradient."""
    query, key, value = inputs(random, batch, *sizes, dtype=dtype)
    return query, key, value, normal(random, (*batch, query.shape[-3], query.shape[-2], value.shape[-1]), dtype)


@pytest.mark.parametrize("sign", SIGNS)
@pytest.mark.parametrize("number", range(5))
def test_all_options_together(isa, number, sign, seed):
    (query, key, value), options = problem(number + 1000 * seed)
    random = np.random.default_rng(number)
    batch = np.broadcast_shapes(query.shape[:-3], key.shape[:-3])
    value = normal(random, (*key.shape[:-1], 3), "float64")
    grad = normal(random, (*batch, *query.shape[-3:-1], 3), "float64")
    Relevances(query, key, value, grad, sign, **options).check_all(random)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_odd_sizes(isa, shape, dtype, seed):
    """Several tasks and blocks of keys, some of the options, an empty row and sinks."""
    random = np.random.default_rng(seed)
    sizes = q_heads, _, q_len, kv_len, dim, _ = SHAPES[shape]
    arrays = some_arrays(random, *sizes, dtype=dtype)
    options = dict(causal=True, q_offset=np.array([abs(kv_len - q_len), -3]), sinks=random.standard_normal(q_heads))
    for name in random.choice([name for name in NAMES if name not in (*options, "q_lengths")], 2, replace=False):
        options |= some_option(str(name), random, (2,), q_heads, q_len, kv_len, dim)
    both = Relevances(*arrays, SIGNS[seed % 2], **options)
    both.check_all(random)
    if q_len > 64:
        x = normal(random, (q_len, 70), both.fast.dtype.name)
        both.check(lambda R: R.T @ x, largest(both.dense[1]) * q_len * largest(x), "R.T @ many")
        both.check(lambda R: R.map((q_len - 1, 5)), largest(both.dense[1]) * kv_len, "map of many rows")


@pytest.mark.parametrize("sign", SIGNS)
@pytest.mark.parametrize("number", range(12))
def test_the_twin_against_loops(number, sign):
    (query, key, _), options = problem(number + 50)
    random = np.random.default_rng(number)
    batch = np.broadcast_shapes(query.shape[:-3], key.shape[:-3])
    value, grad = random.standard_normal((*key.shape[:-1], 2)), random.standard_normal((*batch, *query.shape[-3:-1], 2))
    wanted = Slow(query, key, value, **options).relevance(grad, sign == "positive")
    got = reference.AttentionWeights(query, key, **options).relevance(value, grad, sign=sign)
    bound = 16 * bounds((query, key, value), options, np.finfo(float).eps)["weights"] * max(1.0, largest(wanted))
    assert_close(got.dense(), wanted, bound)
    assert_close(got.key_mass(), wanted.sum(-2), bound * wanted.shape[-2])
    assert_close(got.row_mass(), wanted.sum(-1), bound * wanted.shape[-1])


def test_layouts_two_axes_and_mixed_dtypes(isa, seed):
    random = np.random.default_rng(seed)
    query, key, value, grad = some_arrays(random, 4, 2, 9, 12, 8, 6)
    wanted = attnc.AttentionWeights(query, key, causal=True).relevance(value, grad).dense()
    swapped = [x.swapaxes(-2, -3) for x in (query, key, value, grad)]
    other = attnc.AttentionWeights(*swapped[:2], causal=True, layout="bnhd").relevance(*swapped[2:])
    assert_same_bits(other.dense(), wanted)
    one = attnc.AttentionWeights(query[0, 3], key[0, 1], causal=True).relevance(value[0, 1], grad[0, 3])
    assert one.shape == (9, 12) and one.key_mass().shape == (12,) and one.map((2, 3)).shape == (2, 3)
    np.testing.assert_allclose(one.dense(), wanted[0, 3], rtol=1e-5, atol=1e-6)
    head = attnc.AttentionWeights(query, key, causal=True).head(0, 3).relevance(value[0, 1], grad[0, 3])
    assert_same_bits(head.row_mass(), one.row_mass())
    wide = Relevances(query, key, value.astype(np.float64), grad, causal=True, alibi_slopes=np.ones(4) / 8)
    assert wide.fast.dtype == np.float64
    wide.check_all(random)
    shared = attnc.AttentionWeights(query, key, causal=True).relevance(value[:1], grad)
    apart = attnc.AttentionWeights(query, key, causal=True).relevance(np.repeat(value[:1], 2, 0), grad)
    assert_same_bits(shared.key_mass(), apart.key_mass())


@pytest.mark.parametrize("dtype", ["float16", "int8"])
def test_over_the_rows_of_a_cache(isa, dtype, seed):
    """Keys of 8 bits have scales, which are not those of the values."""
    random = np.random.default_rng(seed)
    query, key, value, grad = some_arrays(random, 4, 2, 9, 300, 8)
    made = []
    for module in (attnc, reference):
        cache = module.KVCache(2, 2, 8, capacity=300, dtype=dtype)
        cache.append(key, value)
        made.append(cache.weights(query, causal=True))
    fast, honest = (W.relevance(value, grad, sign="both") for W in made)
    for say in (lambda R: R.dense(), lambda R: R.key_mass(), lambda R: R @ value[0, 0], lambda R: R.map((3, 50))):
        np.testing.assert_allclose(say(fast), say(honest), rtol=1e-4, atol=1e-5)
    fast, honest = (W.weighted(heads=[1, -1, 0, 2]) for W in made)
    np.testing.assert_allclose(fast.key_mass(), honest.key_mass(), rtol=1e-4, atol=1e-5)


def test_under_a_given_lse(isa, seed):
    """Rows of -inf, inf and NaN among them."""
    random = np.random.default_rng(seed)
    arrays = some_arrays(random, 4, 2, 9, 150, 8, 8)
    lse = random.uniform(5, 8, (2, 4, 9))
    lse[..., 1], lse[0, ..., 2], lse[1, 0, 0] = -np.inf, np.inf, np.nan
    for given in (lse, np.full((2, 4, 9), 1.0)):
        Relevances(*arrays, lse=given, causal=True).check_all(random)


def test_far_scores(isa, seed):
    """The digits of the weights stay where the lse has lost them."""
    random = np.random.default_rng(seed)
    arrays = some_arrays(random, 2, 2, 40, 60, 8, 8)
    Relevances(*arrays, bias=np.full(60, 1e6), sign="both").check_all(random)


@pytest.mark.parametrize("sign", SIGNS)
def test_what_is_not_finite_stays_where_it_belongs(isa, sign, seed):
    """NaN queries, gradients and values, and infinite ones: each reaches the places that see it, and those alone."""
    random = np.random.default_rng(seed)
    query, key, value, grad = some_arrays(random, 2, 2, 40, 80, 8, 8, batch=(1,))
    clean = attnc.AttentionWeights(query, key, causal=True, q_offset=0).relevance(value, grad, sign=sign)
    say = (lambda R: R.dense(), lambda R: R.key_mass(), lambda R: R.row_mass(), lambda R: R.map((5, 7)),
           lambda R: R @ np.ones((80, 2)), lambda R: R.T @ np.ones((40, 2)))
    before = [one(clean) for one in say]
    hidden_key, hidden_value = key.copy(), value.copy()
    hidden_key[..., 40:, :], hidden_value[..., 40:, :] = np.nan, np.inf
    hidden = attnc.AttentionWeights(query, hidden_key, causal=True, q_offset=0)
    for one, wanted in zip(say, before, strict=True):
        assert_same_bits(one(hidden.relevance(hidden_value, grad, sign=sign)), wanted)
    query, value, grad = (x.copy() for x in (query, value, grad))
    query[0, 0, 3], grad[0, 1, 5, 2], value[0, 1, 7, 1] = np.nan, np.nan, np.nan
    grad[0, 0, 9], value[0, 0, 11, 0] = np.inf, -np.inf
    Relevances(query, key, value, grad, sign, causal=True, q_offset=0).check_all(random)
    odd = attnc.AttentionWeights(query, key, causal=True, q_offset=0).relevance(value, grad, sign=sign)
    assert np.isnan(odd.row_mass()).any(-1).all() and not np.isnan(odd.row_mass()[0, 0, :3]).any()
    assert not np.isnan(odd.key_mass(rows=[0, 1])).any()
    x = np.ones((80, 2), np.float32)
    x[50, 1], x[20, 0] = np.nan, np.inf         # 50: of no row
    got = clean @ x
    dense = before[0]
    assert np.isfinite(got[..., 1]).all()
    assert np.array_equal(~np.isfinite(got[..., 0]), dense[..., 20] != 0)


def test_threads_mates_and_strides_change_no_bit(isa, seed):
    random = np.random.default_rng(seed)
    query, key, value, grad = some_arrays(random, 4, 2, 300, 700, 16, 24)
    options = dict(causal=True, kv_lengths=np.array([700, 301]))
    say = (lambda R: R.dense(), lambda R: R.key_mass(), lambda R: R.row_mass(), lambda R: R.map((90, 70)),
           lambda R: R @ np.linspace(0, 1, 700), lambda R: R.T @ np.linspace(0, 1, 300))
    one, three = (attnc.AttentionWeights(query, key, num_threads=n, **options).relevance(value, grad) for n in (1, 3))
    apart = [np.repeat(x, 2, -1)[..., ::2] for x in (query, key, value, grad)]
    strided = attnc.AttentionWeights(*apart[:2], **options).relevance(*apart[2:])
    mate = attnc.AttentionWeights(query[1], key[1], causal=True, kv_lengths=301).relevance(value[1], grad[1])
    for each in say:
        wanted = each(one)
        assert_same_bits(each(three), wanted)
        assert_same_bits(each(strided), wanted)
        assert_same_bits(each(mate), wanted[1])


def test_every_statement_obeys_progress(isa):
    random = np.random.default_rng(0)
    query, key, value, grad = some_arrays(random, 4, 2, 90, 120, 8)
    R = attnc.AttentionWeights(query, key).relevance(value, grad)
    methods = {"key_mass": R.key_mass, "row_mass": R.row_mass, "map": lambda **p: R.map((3, 4), **p),
               "pool": lambda **p: R.pool(np.arange(90) % 3, np.arange(120) % 4, **p), "dense": R.dense,
               "sparse": lambda **p: R.sparse(threshold=0.1, **p),
               "reduce": lambda **p: R.reduce(lambda s, tile, _: s + float(tile.sum()), 0.0, **p)}
    for name, method in methods.items():
        told = []
        method(progress=lambda done, total: told.append((done, total)))  # noqa: B023
        assert told[-1][0] == told[-1][1] > 0 and told == sorted(told), name
        with pytest.raises(TypeError, match="progress must be"):
            method(progress=3)

        def stop(done, total):
            raise RuntimeError("enough")

        with pytest.raises(RuntimeError, match="enough"):
            method(progress=stop)


ANSWERS = {"dense": lambda R: R.dense(), "index": lambda R: R[0, 0, 1], "key_mass": lambda R: R.key_mass(),
           "row_mass": lambda R: R.row_mass(), "map": lambda R: R.map((2, 2)), "@": lambda R: R @ np.ones(12),
           "T @": lambda R: R.T @ np.ones(9), "pool": lambda R: R.pool(np.zeros(9, int), np.zeros(12, int)),
           "blocks": lambda R: list(R.blocks(4)), "pickle": pickle.dumps, "copy": copy.copy}


@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize("which", ["query", "key", "value", "grad_output"])
def test_arrays_that_change_are_named(isa, name, which):
    query, key, value, grad = some_arrays(np.random.default_rng(0), 4, 2, 9, 12, 8)
    R = attnc.AttentionWeights(query, key).relevance(value, grad)
    R.key_mass()
    ANSWERS[name](R)
    dict(query=query, key=key, value=value, grad_output=grad)[which][0, 0] += 1
    with pytest.raises(RuntimeError, match=f"^{which} changed since the first answer was computed"):
        ANSWERS[name](R)


def test_copies_and_pickles_answer_alike(isa):
    query, key, value, grad = some_arrays(np.random.default_rng(0), 4, 2, 9, 12, 8)
    R = attnc.AttentionWeights(query, key).relevance(value, grad, sign="both")
    for other in (copy.copy(R), copy.deepcopy(R), pickle.loads(pickle.dumps(R))):
        assert_same_bits(other.key_mass(), R.key_mass())
        assert_same_bits(other.dense(), R.dense())
    assert repr(R) == "Relevance(shape=(2, 4, 9, 12), dtype=float32)"
    assert repr(R.T) == "Transposed(shape=(2, 4, 12, 9), dtype=float32)"


@pytest.mark.parametrize("sizes", [(2, 2, 0, 5, 4), (2, 2, 5, 0, 4), (2, 2, 3, 4, 0), (0, 0, 3, 4, 2)])
def test_empty_axes(isa, sizes):
    query, key, value, grad = some_arrays(np.random.default_rng(0), *sizes)
    R = attnc.AttentionWeights(query, key).relevance(value, grad)
    Q = reference.AttentionWeights(query, key).relevance(value, grad)
    for say in (lambda R: R.dense(), lambda R: R.key_mass(), lambda R: R.row_mass(), lambda R: R.map((1, 1)),
                lambda R: R @ np.ones((R.shape[-1], 2)), lambda R: R.T @ np.ones((R.shape[-2], 2))):
        got, wanted = say(R), say(Q)
        assert got.shape == wanted.shape and got.dtype == wanted.dtype
        np.testing.assert_allclose(got, wanted, atol=1e-6)


def test_through_layers_it_is_the_product_of_matrices(isa, seed):
    """C = C + mean over heads of R @ C, from the identity (Chefer, Gur and Wolf 2021); a row of it by `rollout`."""
    random = np.random.default_rng(seed)
    layers = [some_arrays(random, 4, 4, 30, 30, 8, batch=()) for _ in range(3)]
    lazy = [attnc.AttentionWeights(q, k).relevance(v, g) for q, k, v, g in layers]
    C, wanted = np.eye(30), np.eye(30)
    for R, (q, k, v, g) in zip(lazy, layers, strict=True):
        C = C + (R @ C).mean(0)
        dense = attnc.attention_weights(q, k) * np.maximum(g @ v.swapaxes(-1, -2), 0)
        wanted = wanted + dense.mean(0) @ wanted
    np.testing.assert_allclose(C, wanted, rtol=1e-4)
    np.testing.assert_allclose(2**3 * attnc.rollout(lazy, 5), wanted[5], rtol=1e-4)


@pytest.mark.parametrize("module", [attnc, reference])
@pytest.mark.parametrize(("error", "changes", "words"), [
    (ValueError, {"value": np.zeros((2, 4, 12, 8))}, r"value has shape \(2, 4, 12, 8\); wanted \(batch"),
    (ValueError, {"value": np.zeros((2, 2, 11, 8))}, "value has shape"),
    (ValueError, {"value": np.zeros((3, 2, 12, 8))}, "value has shape"),
    (ValueError, {"value": np.float64(1)}, "value has shape"),
    (ValueError, {"grad": np.zeros((2, 4, 9, 7))}, "grad_output has shape .*; wanted the shape of the output"),
    (ValueError, {"grad": np.zeros((4, 9, 8))}, "grad_output has shape"),
    (TypeError, {"grad": np.zeros((2, 4, 9, 8), complex)}, "grad_output has dtype complex128"),
    (TypeError, {"value": None}, "value must be an array, got None"),
    (ValueError, {"sign": "negative"}, r"sign must be one of \('positive', 'both'\), got 'negative'"),
    (TypeError, {"sign": 1}, "sign must be a string"),
])
def test_errors(module, error, changes, words):
    query, key, value, grad = some_arrays(np.random.default_rng(0), 4, 2, 9, 12, 8)
    given = {"value": value, "grad": grad, "sign": "positive", **changes}
    with pytest.raises(error, match=words):
        module.AttentionWeights(query, key).relevance(given["value"], given["grad"], sign=given["sign"])


@pytest.mark.parametrize("module", [attnc, reference])
def test_errors_of_statements(module):
    query, key, value, grad = some_arrays(np.random.default_rng(0), 4, 2, 9, 12, 8)
    R = module.AttentionWeights(query, key).relevance(value, grad)
    for call, words in ((lambda: R.row_mass(keys=[12]), "keys must be from -12 to 11"),
                        (lambda: R.row_mass(keys=np.ones(11, bool)), "keys is a bool array of shape"),
                        (lambda: R.key_mass(rows=[9]), "rows must be"), (lambda: R @ np.ones(9), "the operand of @"),
                        (lambda: R.T @ np.ones(12), "the operand of @"), (lambda: R.map((0, 1)), "row_bins"),
                        (lambda: R.dense(dtype="int8"), "dtype must be"),
                        (lambda: R.pool([0], [0]), "query_labels has shape")):
        with pytest.raises((ValueError, TypeError), match=words):
            call()
    with pytest.raises(ValueError, match="out shares memory with value"):
        R = module.AttentionWeights(np.zeros((12, 2)), np.zeros((12, 2)))
        value = np.zeros((12, 12))
        R.relevance(value, np.zeros((12, 12))).dense(out=value)


def test_memory_is_that_of_blocks():
    """Of one head of 4,096 x 4,096, 64 MB dense, in a few of them."""
    from attnc.bench.machine import PeakMemory

    query, key, value, grad = some_arrays(np.random.default_rng(0), 1, 1, 4096, 4096, 16, batch=())
    R = attnc.AttentionWeights(query, key).relevance(value, grad)
    R.row_mass()
    with PeakMemory() as peak:
        for _ in range(2):
            R.key_mass(), R.map((300, 300)), R @ value[0], R.T @ grad[0]
    assert peak.bytes is None or peak.bytes < 40e6


