"""AttentionWeights as called: errors before any work, progress, interruption, memory, products with layers."""

import tracemalloc

import numpy as np
import pytest
from checking import assert_same_bits, dtype_of, inputs, parameters
from test_weights_changes import METHODS
from weighing import Twins

import attnc
from attnc import reference

MODULES = [attnc, reference]


def make(module=attnc, shape=(2, 4, 9, 12), **options):
    random = np.random.default_rng(0)
    *batch, heads, q_len, kv_len = shape
    query, key, _ = inputs(random, tuple(batch), heads, max(heads // 2, 1), q_len, kv_len, 8)
    return module.AttentionWeights(query, key, **options)


def test_twins_have_the_same_methods_and_signatures():
    def public(cls):
        return {name: getattr(cls, name) for name in dir(cls) if name in ("__init__", "__matmul__", "__getitem__")
                or not name.startswith("_")}

    fast, twin = public(attnc.AttentionWeights), public(reference.AttentionWeights)
    assert set(fast) == set(twin) - {"of"}
    for name, method in fast.items():
        if callable(method):
            assert parameters(method) == parameters(twin[name]), name


CALLS = [
    (ValueError, lambda W: W.map((0, 2)), "row_bins must be an integer from 1 to 9, got 0"),
    (ValueError, lambda W: W.map((2, 13)), "col_bins must be an integer from 1 to 12, got 13"),
    (TypeError, lambda W: W.map(3), "bins must be a pair"),
    (ValueError, lambda W: W.map((2, 2), reduce="sum"), "reduce must be one of"),
    (ValueError, lambda W: W.topk(0), "k must be an integer from 1"),
    (TypeError, lambda W: W.topk(2.0), "k must be an integer"),
    (ValueError, lambda W: W.pool(np.zeros(8, int), np.ones(12, int)), r"query_labels has shape \(8,\); wanted"),
    (TypeError, lambda W: W.pool(np.zeros(9, int), np.zeros(12)), "key_labels must be an integer"),
    (ValueError, lambda W: W.key_mass(rows=[9]), "rows must be from -9 to 8"),
    (TypeError, lambda W: W.key_mass(rows=[0.5]), "rows must be an integer"),
    (ValueError, lambda W: W.key_mass(rows=np.ones(3, bool)), "rows is a bool array of shape"),
    (ValueError, lambda W: W.key_mass(row_weights=np.ones(8)), "row_weights has shape"),
    (ValueError, lambda W: W.key_mass(row_weights=np.full(9, np.nan)), "row_weights must be finite"),
    (ValueError, lambda W: W.key_mass(heads="all"), "heads must be one of"),
    (ValueError, lambda W: W.key_mass(out=np.zeros((2, 4, 11), np.float32)), "out has shape"),
    (TypeError, lambda W: W.key_mass(out=np.zeros((2, 4, 12))), "out has dtype float64"),
    (ValueError, lambda W: W.key_hits(np.inf), "threshold must be finite"),
    (ValueError, lambda W: W.dense(out=np.zeros((2, 4, 9, 11), np.float32)), "out has shape"),
    (TypeError, lambda W: W.dense(dtype=int), "dtype must be float16"),
    (ValueError, lambda W: W.head_mean(out=np.zeros((2, 9, 11), np.float32)), "out has shape"),
    (ValueError, lambda W: W.sparse(), "takes one of threshold= and top_p=, got neither"),
    (ValueError, lambda W: W.sparse(top_p=0.0), "top_p must be greater than 0"),
    (TypeError, lambda W: W.lost_mass(np.ones(12)), "keep must be bool"),
    (ValueError, lambda W: W.lost_mass(np.ones(11, bool)), "keep has shape"),
    (ValueError, lambda W: W @ np.ones(11), "the operand of @ has shape"),
    (ValueError, lambda W: W.T @ np.ones((3, 9, 2)), "the operand of @ has shape"),
    (IndexError, lambda W: W[0, 0, 9], "index 9 is out of bounds for axis 2 with size 9"),
    (IndexError, lambda W: W[0, 0, 0, 0, 0], "too many indices"),
    (IndexError, lambda W: W[..., -13], "index -13 is out of bounds for axis 3 with size 12"),
    (IndexError, lambda W: W[:, [0, 4]], "index 4 is out of bounds for axis 1 with size 4"),
    (IndexError, lambda W: W[0, None, [1, 2], [0, 1, 2]], r"must broadcast together; got \(2,\), \(3,\)"),
    (IndexError, lambda W: W[..., 0, ...], "only one ellipsis"),
    (IndexError, lambda W: W[..., 0.5], "an index has ints, slices, .* got float 0.5"),
    (IndexError, lambda W: W["key"], "an index has ints, slices, .* got str 'key'"),
    (IndexError, lambda W: W[..., np.ones(2)], "an index has ints, slices, .* got float64 array"),
    (IndexError, lambda W: W[np.ones((2, 3), bool)], r"\(2, 3\) indexes axis 1 with size 4; wanted \(2, 4\)"),
    (TypeError, lambda W: W[0, "a":], "slice indices must be integers"),
    (ValueError, lambda W: W[::0], "slice step cannot be zero"),
    (ValueError, lambda W: W.reduce(max, rows=0), "rows must be an integer from 1"),
    (TypeError, lambda W: W.reduce(max, keys=2.0), "keys must be an integer"),
    (TypeError, lambda W: W.lost_mass([3, 5]), r"True = the key stays, .* np.isin\(np.arange\(12\), keep\)"),
    (TypeError, lambda W: W @ np.ones(12, np.uint16), r"pass it as x.view\(ml_dtypes.bfloat16\)"),
    (IndexError, lambda W: W.head(0), "a head is named by 2 ints"),
    (ValueError, lambda W: W.head(0, 4), "a place of the head must be an integer from -4 to 3"),
    (ValueError, lambda W: next(W.blocks(0)), "rows must be an integer from 1"),
    (TypeError, lambda W: W.entropy(progress=3), "progress must be True"),
    (ValueError, lambda W: np.array(W, copy=False), "an array of them is always new"),
]


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("error, call, words", CALLS)
def test_errors(module, error, call, words):
    with pytest.raises(error, match=words):
        call(make(module))


@pytest.mark.parametrize("module", MODULES)
def test_errors_of_rollout(module):
    W = make(module, (2, 9, 9))
    for error, arguments, words in (
            (ValueError, ([], 0), "layers is empty"), (TypeError, ([np.ones(3)], 0), "must be AttentionWeights"),
            (ValueError, ([W, make(module, (2, 9, 12))], 0), "wanted as many rows as keys"),
            (ValueError, ([W], 9), "start must be an integer from -9 to 8"),
            (ValueError, ([W], np.ones(8)), "start has shape")):
        with pytest.raises(error, match=words):
            module.rollout(*arguments)
    with pytest.raises(ValueError, match="residual must be from 0 to 1"):
        module.rollout([W], 0, residual=1.5)


def test_what_a_reduction_raises_comes_through(isa):
    W = make()

    def fail(state, tile, index):
        raise LookupError(str(index))

    with pytest.raises(LookupError):
        W.reduce(fail)
    assert_same_bits(W.entropy(), make().entropy())


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_progress(isa, method):
    told = []
    method(make(), lambda done, total: told.append((done, total)))
    assert told and told[-1][0] == told[-1][1] and told == sorted(told)


def test_progress_of_a_long_call_comes_while_it_works_and_may_stop_it(isa):
    query = np.ones((1, 6000, 64), np.float32)
    W, told, threads = attnc.AttentionWeights(query, query, num_threads=2), [], attnc.get_num_threads()

    def stop(done, total):
        told.append(done)
        if done > 0:
            raise InterruptedError

    for _ in range(20):                          # as often as it takes to be slow enough to be asked once
        query = np.concatenate([query, query], 1)
        W = attnc.AttentionWeights(query, query, num_threads=2)
        try:
            W.summary(topk=2, key_mass=True, map=(8, 8), progress=stop)
        except InterruptedError:
            if told[-1] < 1000:
                break
    assert 0 < told[-1] < 1000
    assert attnc.get_num_threads() == threads


def test_memory_of_a_long_call(isa):
    """1 x 12,000 x 12,000: the matrix would be 549 MiB; results and Python's part of the work are counted."""
    random = np.random.default_rng(0)
    query, key = (random.standard_normal((1, 12000, 16), np.float32) for _ in range(2))
    W = attnc.AttentionWeights(query, key, causal=True)
    tracemalloc.start()
    try:
        W.summary(topk=8, entropy=True, key_mass=True, map=(96, 96))
        W.T @ np.ones((12000, 2), np.float32)
        assert W[0, 7:7000:997, ::50].shape == (8, 240)
        assert W[0, np.arange(12000), np.arange(12000)].shape == (12000,)
        heads = attnc.AttentionWeights(np.broadcast_to(query, (48, *query.shape[1:])), key)
        assert heads[:, np.arange(0, 12000, 300), np.arange(0, 12000, 300)].shape == (48, 40)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 32 << 20


def test_rollout(isa, seed):
    random = np.random.default_rng(seed)
    layers = [[], [], []]
    for _ in range(3):
        query, key, _ = inputs(random, (2,), 4, 2, 20, 20, 8)
        for into, W in zip(layers, vars(Twins(query, key, causal=True)).values(), strict=False):
            into.append(W)
    fast, honest, exact = layers
    for start in (-1, 3, random.random((2, 20)).astype(np.float32)):
        got = attnc.rollout(fast, start, residual=0.3)
        attnc.testing.assert_within(got, reference.rollout(exact, start, residual=0.3),
                                    reference.rollout(honest, start, residual=0.3))
        np.testing.assert_allclose(got.sum(-1), np.ones(2) * (start.sum(-1) if np.ndim(start) else 1), rtol=1e-5)


def test_dense_into_any_float_array(isa, tmp_path):
    W = make()
    dense = W.dense()
    for dtype in ("float16", "float64"):
        out = np.empty(W.shape, dtype)
        assert W.dense(out=out) is out
        assert_same_bits(out, dense.astype(dtype))
    mapped = np.memmap(tmp_path / "weights", np.float32, "w+", shape=W.shape)
    assert_same_bits(np.asarray(W.dense(out=mapped)), dense)
    assert make().head_mean(out=np.empty((2, 9, 12), np.float32)).shape == (2, 9, 12)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_doubles_are_rounded_once(isa, dtype, seed):
    """No neighbour of a dense weight is nearer to it: by way of float32 ten in a million would have one."""
    W = attnc.AttentionWeights(*inputs(np.random.default_rng(seed), (), 4, 4, 500, 500, 4, dtype="float64")[:2])
    wanted, got = W.dense(), W.dense(dtype=dtype_of(dtype))
    error = np.abs(got.astype(np.float64) - wanted)
    for step in (1, -1):
        neighbour = (got.view(np.int16) + np.int16(step)).view(got.dtype).astype(np.float64)
        assert not (np.abs(neighbour - wanted) < error).any()


def test_too_much_is_refused_before_places_are_listed(python):
    taken = python("""
import resource, numpy as np, attnc
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
x = np.broadcast_to(np.float32(1), (2**24, 1))
W = attnc.AttentionWeights(x, x)
before = peak()
for call in (lambda: W[:, 1:], lambda: W.map((2**24, 2**24)), lambda: W.dense()):
    try:
        call()
    except (MemoryError, ValueError):
        continue
    raise AssertionError("that is 2**50 bytes")
print(peak() - before)
""")
    assert int(taken) < 32 * 1024, "a list of these places has 128 MiB"


def test_sparse_parts_are_the_weights(isa):
    W = make(causal=True)
    dense = W.dense()
    for how in ({"threshold": 0.2}, {"top_p": 0.8}):
        found = W.sparse(**how)
        again = np.zeros((72, 12), np.float32)
        again[np.repeat(np.arange(72), np.diff(found.indptr)), found.indices] = found.data
        kept = again.reshape(W.shape)
        assert ((kept == 0) | (kept == dense)).all()
        np.testing.assert_allclose(found.dropped, (dense - kept).sum(-1), atol=1e-6)
        if "top_p" in how:
            assert (kept.sum(-1) >= 0.8 * dense.sum(-1) - 1e-6).all()
            least = np.where(kept > 0, kept, 2).min(-1)
            assert (kept.sum(-1) - least < 0.8 * dense.sum(-1)).all()
        else:
            assert_same_bits(kept, np.where(dense >= 0.2, dense, 0))
    assert "of 864 kept" in repr(found)


def test_a_threshold_that_rounds_to_0_keeps_no_weight_of_0(isa):
    W = make(causal=True)
    kept = np.count_nonzero(W.dense())
    for threshold in (0, 1e-50, 5e-324):
        found = W.sparse(threshold=threshold)
        assert len(found.data) == kept and (found.data > 0).all()


def test_odd_factors_reach_only_keys_with_a_weight(isa):
    W = make(shape=(2, 9, 12), causal=True)
    x = np.ones(9, np.float32)
    x[2] = np.inf
    got, dense = W.T @ x, W.dense()
    assert (np.isinf(got) == (dense[:, 2] > 0)).all() and np.isfinite(got[dense[:, 2] == 0]).all()


@pytest.mark.parametrize("module", [attnc, reference])
def test_what_a_row_does_not_see_adds_nothing_to_its_product(isa, module):
    """Of 4 rows and 2 keys the first two rows see no key, whatever their lse."""
    arrays = np.zeros((4, 2)), np.zeros((2, 2))
    W = module.AttentionWeights(*arrays, causal=True)
    np.testing.assert_array_equal(W @ np.array([1.0, np.nan]), [0, 0, 1, np.nan])
    W = module.AttentionWeights(*arrays, causal=True, lse=[np.nan, 3.0, np.nan, 0.0])
    np.testing.assert_array_equal(W @ np.array([1.0, np.inf]), [0, 0, np.nan, np.inf])
