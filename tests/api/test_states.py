"""Keys in parts: merged states and streamed chunks give the attention over all keys, in less memory than these take."""

import copy
import pickle
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from checking import DTYPES, PATHS, assert_same_bits, dtype_of, inputs, largest, largest_visible, normal, twins

import attnc
from attnc import reference
from attnc._checks import attention_args
from attnc.testing import assert_within, exact_attention


def parts(function, query, key, value, cuts, mask=None, **options):
    """States of a function for keys cut at `cuts`; the sinks are in the first."""
    states, sinks = [], options.pop("sinks", None)
    for start, stop in zip((0, *cuts), (*cuts, key.shape[-2]), strict=True):
        found = function(query, key[..., start:stop, :], value[..., start:stop, :], want="lse",
                         mask=None if mask is None else mask[..., start:stop], sinks=sinks, **options)
        states.append((found.output, found.lse))
        sinks = None
    return states


# Merging

@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("path", PATHS)
def test_merged_is_the_whole(isa, path, dtype, seed):
    random = np.random.default_rng(seed)
    q_heads, _, q_len, kv_len, *_ = PATHS[path]
    query, key, value = inputs(random, (2,), *PATHS[path], dtype=dtype)
    mask = random.random((q_len, kv_len)) < 0.7
    mask[0], mask[1, :kv_len // 3] = False, False
    options = dict(mask=mask, sinks=random.standard_normal(q_heads), softcap=5.0)
    cuts = kv_len // 3, kv_len // 3, kv_len // 2
    exact = exact_attention(query, key, value, **options)
    states = parts(attnc.attention, query, key, value, cuts, **options)
    honest = reference.merge_states(parts(reference.attention, query, key, value, cuts, **options))
    scale = largest_visible(attention_args(query, key, value, **options))
    a, b, c, d = states
    for merged in (attnc.merge_states(states), attnc.merge_states(tuple(states[::-1])),
                   attnc.merge_states([attnc.merge_states([a, b]), attnc.merge_states([c, d])]),
                   attnc.merge_states([a, attnc.merge_states([attnc.merge_states([c, b]), d])])):
        assert isinstance(merged, tuple) and merged[0].flags.c_contiguous
        assert_within(merged[0], exact.output, honest[0], scale=scale, eps_dtype=dtype_of(dtype), name="output")
        assert_within(merged[1], exact.lse, honest[1], scale=max(largest(exact.lse), largest(exact.scores)), name="lse")


@pytest.mark.parametrize("dtypes, wide", [
    ("float16 float32", "float32"), ("bfloat16 float32", "float32"), ("float32 float64", "float64"),
    ("float64 float32", "float64")])
def test_dtypes(dtypes, wide, seed):
    """The twin, on numbers of any dtype; any float64 makes the result float64."""
    random = np.random.default_rng(seed)
    of_output, of_lse = dtypes.split()
    states = [(normal(random, (2, 3, 4, 5), of_output), normal(random, (2, 3, 4), of_lse)) for _ in range(5)]
    before = [(output.copy(), lse.copy()) for output, lse in states]
    got, honest = attnc.merge_states(states), reference.merge_states(states)
    exact = reference.merge_states([(x.astype(np.float64), y.astype(np.float64)) for x, y in states])
    for name, x, y, z in zip(("output", "lse"), got, exact, honest, strict=True):
        assert x.dtype == wide
        assert_within(x, y, z, scale=max(largest(output) for output, _ in states), name=name)
    for state, same in zip(states, before, strict=True):
        assert_same_bits(state[0], same[0])
        assert_same_bits(state[1], same[1])


def test_one_state_is_itself(seed):
    random = np.random.default_rng(seed)
    state = normal(random, (2, 3, 4)), normal(random, (2, 3))
    got = attnc.merge_states([state])
    assert_same_bits(got[0], state[0])
    assert_same_bits(got[1], state[1])
    assert not np.shares_memory(got[0], state[0]) and not np.shares_memory(got[1], state[1])


@pytest.mark.parametrize("module", [attnc, reference])
def test_states_without_keys(module):
    """-inf adds nothing, whatever lies in its output; nothing and nothing is nothing."""
    some, lse = np.array([[1.0, 2.0], [3.0, 4.0]]), np.array([0.5, -np.inf])
    garbage = np.array([[np.nan, np.inf], [-np.inf, np.nan]])
    output, merged = module.merge_states([(garbage, np.full(2, -np.inf)), (some, lse), (garbage, np.full(2, -np.inf))])
    np.testing.assert_array_equal(output, [[1, 2], [0, 0]])
    np.testing.assert_array_equal(merged, lse)


@pytest.mark.parametrize("module", [attnc, reference])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("where", [0, 1])
def test_a_bad_lse_stays_in_its_row(module, bad, where, seed):
    states = [(x, y.copy()) for x, y in [(normal(np.random.default_rng(seed + i), (4, 3), "float64"), np.arange(4.0))
                                         for i in range(2)]]
    clean = module.merge_states(states)
    states[where][1][2] = bad
    output, lse = module.merge_states(states)
    assert np.isnan(output[2]).all() and np.isnan(lse[2])
    rest = [0, 1, 3]
    assert_same_bits(output[rest], clean[0][rest])
    assert_same_bits(lse[rest], clean[1][rest])


@pytest.mark.parametrize("module", [attnc, reference])
def test_values_that_are_no_numbers_stay_in_their_place(module):
    ones = np.ones((3, 2)), np.zeros(3)
    output, lse = module.merge_states([ones, (np.array([[np.nan, 1], [np.inf, 1], [1, -np.inf]]), np.zeros(3))])
    np.testing.assert_array_equal(output, [[np.nan, 1], [np.inf, 1], [1, -np.inf]])
    assert np.isfinite(lse).all()


@pytest.mark.parametrize("module", [attnc, reference])
def test_far_apart(module):
    """Exponents that overflow unless the maximum is subtracted first."""
    output, lse = module.merge_states([([[1.0]], [3e4]), ([[2.0]], [-3e4]), ([[5.0]], [3e4])])
    np.testing.assert_allclose(output, [[3.0]], rtol=1e-15)
    np.testing.assert_allclose(lse, [3e4 + np.log(2)], rtol=1e-15)


@pytest.mark.parametrize("module", [attnc, reference])
def test_the_other_layout_merges_packed_sequences(isa, module, seed):
    random = np.random.default_rng(seed)
    query, key, value = (normal(random, (9, heads, 8)) for heads in (4, 2, 2))
    bounds, half = [0, 2, 9], [0, 1, 4]
    first, rest = np.r_[0, 2:5], np.r_[1, 5:9]
    states = [module.attention_varlen(query, key[keys], value[keys], bounds, cuts, want="lse")
              for keys, cuts in ((first, half), (rest, [0, 1, 5]))]
    output, lse = module.merge_states([(x.output, x.lse) for x in states], layout="bnhd")
    whole = module.attention_varlen(query, key, value, bounds, bounds, want="lse")
    assert output.shape == (9, 4, 8) and output.flags.c_contiguous
    np.testing.assert_allclose(output, whole.output, atol=16 * 2.0**-23 * largest(value))
    np.testing.assert_allclose(lse, whole.lse, atol=16 * 2.0**-23 * largest(whole.lse))


STATE = np.zeros((2, 5, 3)), np.zeros((2, 5))


@pytest.mark.parametrize("module", [attnc, reference])
@pytest.mark.parametrize("error, states, options, words", [
    (TypeError, np.zeros((2, 2)), {}, "states must be a list or tuple of pairs"),
    (ValueError, [], {}, "states is empty"),
    (TypeError, [STATE, np.zeros(3)], {}, r"states\[1\] must be a pair \(output, lse\), got float64 array"),
    (TypeError, [STATE, (*STATE, 1)], {}, r"states\[1\] must be a pair"),
    (TypeError, [(STATE[0].astype(complex), STATE[1])], {}, r"states\[0\]\[0\] has dtype complex128"),
    (TypeError, [STATE, (STATE[0], None)], {}, r"states\[1\]\[1\] must be an array, got None"),
    (ValueError, [STATE, (STATE[0][:1], STATE[1])], {}, r"states\[1\]\[0\] has shape \(1, 5, 3\); wanted \(2, 5, 3\)"),
    (ValueError, [(STATE[0], STATE[1].T)], {}, r"states\[0\]\[1\] has shape \(5, 2\); wanted \(2, 5\)"),
    (ValueError, [STATE], {"layout": "bnhd"}, r"states\[0\]\[1\] has shape \(2, 5\); wanted \(5, 2\)"),
    (ValueError, [(np.zeros(3), 0.0)], {}, r"states\[0\]\[0\] has 1 axes"),
    (ValueError, [(np.zeros((3, 2)), np.zeros(3))], {"layout": "bnhd"}, r"states\[0\]\[0\] has 2 axes"),
    (ValueError, [STATE], {"layout": "nhd"}, "layout must be one of"),
])
def test_merge_errors(module, error, states, options, words):
    with pytest.raises(error, match=words):
        module.merge_states(states, **options)


# Streaming

def stream(query, key, value, cuts, axis=-2, mask=None, key_mask=None, bias=None, **options):
    """The result of an AttentionState that got the keys cut at `cuts`."""
    state = attnc.AttentionState(query, **options)
    for start, stop in zip((0, *cuts), (*cuts, key.shape[axis]), strict=True):
        chunk = (slice(start, stop),) + (slice(None),) * (-1 - axis)
        more = {name: x[..., start:stop] for name, x in (("mask", mask), ("key_mask", key_mask), ("bias", bias))
                if x is not None}
        state.update(key[(..., *chunk)], value[(..., *chunk)], **more)
        assert state.kv_len == stop
    return state.result()


STREAMED = {
    "plain": lambda random, sizes: {},
    "causal": lambda random, sizes: {"causal": True, "q_offset": sizes["kv_len"] - sizes["q_len"]},
    "before the keys": lambda random, sizes: {"causal": True, "q_offset": -2},
    "window": lambda random, sizes: {
        "window": (sizes["kv_len"] // 2, 3), "q_offset": np.array([0, sizes["kv_len"] // 2])},
    "masks": lambda random, sizes: {
        "mask": random.random((sizes["q_len"], sizes["kv_len"])) < 0.7,
        "key_mask": random.random((2, sizes["kv_len"])) < 0.7,
        "bias": random.standard_normal((sizes["q_heads"], 1, sizes["kv_len"]))},
    "all": lambda random, sizes: {
        "causal": True, "window": (sizes["kv_len"] - 9, None), "q_offset": sizes["kv_len"] - sizes["q_len"],
        "alibi_slopes": random.random(sizes["q_heads"]) / 50, "sinks": random.standard_normal(sizes["q_heads"]),
        "softcap": 3.0, "scale": -0.5, "bias": random.standard_normal((1, sizes["q_len"], sizes["kv_len"]))},
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", STREAMED)
def test_streamed_is_one_piece(isa, name, path, dtype, seed):
    random = np.random.default_rng([seed, len(name)])
    q_heads, _, q_len, kv_len, *_ = PATHS[path]
    query, key, value = inputs(random, (2,), *PATHS[path], dtype=dtype)
    options = STREAMED[name](random, dict(q_heads=q_heads, q_len=q_len, kv_len=kv_len))
    exact, honest, scale = twins(query, key, value, **options)
    for cuts in ((), (kv_len // 2,), (0, 1, 2, kv_len // 3, kv_len // 3, kv_len)):
        got = stream(query, key, value, cuts, **options)
        for part in ("output", "lse"):
            assert_within(getattr(got, part), getattr(exact, part), getattr(honest, part), scale=scale[part], name=part)


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_key_at_a_time(isa, dtype, seed):
    """A thousand chunks: half precision is rounded once, at the end."""
    query, key, value = inputs(np.random.default_rng(seed), (), 4, 2, 3, 1000, 8, dtype=dtype)
    exact, honest, scale = twins(query, key, value)
    got = stream(query, key, value, range(1, 1000), num_threads=1)
    for part in ("output", "lse"):
        assert_within(getattr(got, part), getattr(exact, part), getattr(honest, part), scale=scale[part], name=part)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("path", PATHS)
def test_half_precision_is_rounded_once(isa, path, dtype, seed):
    """The state of half-precision chunks is that of the same numbers in float32, rounded at the end."""
    arrays = inputs(np.random.default_rng(seed), (), *PATHS[path], dtype=dtype)
    got = stream(*arrays, (10, 20, 30))
    wide = stream(*(x.astype(np.float32) for x in arrays), (10, 20, 30))
    assert_same_bits(got.lse, wide.lse)
    assert_same_bits(got.output, wide.output.astype(dtype_of(dtype)))


@pytest.mark.parametrize("far", [-2000.0, 2000.0])
def test_scores_far_from_zero_after_nothing(isa, far):
    """Chunks that no row may see come first, in between and last."""
    query, key, value = np.zeros((1, 2, 4)), np.zeros((1, 6, 4)), np.arange(6.0).reshape(1, 6, 1)
    got = stream(query, key, value, (1, 2, 3, 5), mask=np.array([0, 0, 1, 0, 0, 1], bool), bias=np.full(6, far))
    np.testing.assert_allclose(got.output, 3.5, rtol=1e-15)
    np.testing.assert_allclose(got.lse, far + np.log(2), rtol=1e-15)


def test_two_axes_and_the_other_layout(isa, seed):
    query, key, value = inputs(np.random.default_rng(seed), (2,), 4, 2, 5, 90, 8, 6)
    plain = stream(query, key, value, (30, 31), causal=True, q_offset=20)
    other = stream(*(x.swapaxes(-2, -3) for x in (query, key, value)), (30, 31), axis=-3, causal=True, q_offset=20,
                   layout="bnhd")
    assert_same_bits(other.output, np.ascontiguousarray(plain.output.swapaxes(-2, -3)))
    assert_same_bits(other.lse, plain.lse)
    alone = stream(query[0, 0], key[0, 0], value[0, 0], (30, 31), sinks=0.5, alibi_slopes=0.25, q_offset=85)
    assert alone.output.shape == (5, 6) and alone.lse.shape == (5,)
    whole = attnc.attention(query[0, 0], key[0, 0], value[0, 0], sinks=0.5, alibi_slopes=0.25, want="lse")
    np.testing.assert_allclose(alone.output, whole.output, atol=16 * 2.0**-23 * largest(value))


def test_keys_bring_the_batch_axes(isa, seed):
    query, key, value = inputs(np.random.default_rng(seed), (3,), 4, 2, 5, 40)
    got = stream(query[0], key, value, (7,))
    assert got.output.shape == (3, 4, 5, 8)
    assert_same_bits(got.output[1], stream(query[0], key[1], value[1], (7,)).output)


def test_dtypes_of_chunks(isa, seed):
    """The result is of the promoted dtype of the query and of all chunks."""
    query, key, value = inputs(np.random.default_rng(seed), (), 2, 2, 3, 4, dtype="float16")
    for chunks, wanted in ((["float16"] * 2, "float16"), (["float16", "bfloat16"], "float32"),
                           (["float32", "float16"], "float32"), (["float16", "float64"], "float64")):
        state = attnc.AttentionState(query)
        for dtype in chunks:
            state.update(key.astype(dtype_of(dtype)), value.astype(dtype_of(dtype)))
        got = state.result()
        assert got.output.dtype == wanted and got.lse.dtype == ("float64" if wanted == "float64" else "float32")


def test_the_state_keeps_copies(isa, seed):
    """Arrays may be used again as soon as a call is over; a result is not changed by later chunks."""
    query, key, value = inputs(np.random.default_rng(seed), (), 2, 2, 3, 8)
    sinks, slopes, offset = np.zeros(2, np.float32), np.ones(2, np.float32), np.array(5)
    wanted = stream(query, key, value, (4,), sinks=sinks, alibi_slopes=slopes, q_offset=offset)
    given = query.copy()
    state = attnc.AttentionState(given, sinks=sinks, alibi_slopes=slopes, q_offset=offset)
    given[...], sinks[...], slopes[...], offset[...] = np.nan, np.nan, np.nan, 0
    chunk = key[:, :4].copy(), value[:, :4].copy()
    state.update(*chunk)
    chunk[0][...] = chunk[1][...] = np.nan
    early = state.result()
    kept = early.output.copy()
    state.update(key[:, 4:], value[:, 4:])
    assert_same_bits(early.output, kept)
    assert_same_bits(state.result(), wanted)
    state.result().output[...] = 7
    assert_same_bits(state.result(), wanted)


def test_only_empty_chunks(isa):
    query = np.ones((2, 3, 4), np.float32)
    nothing = np.ones((2, 0, 4), np.float32)
    got = stream(query, nothing, nothing, (0, 0))
    assert not got.output.any() and (got.lse == -np.inf).all()
    np.testing.assert_array_equal(stream(query, nothing, nothing, (0, 0), sinks=[1.0, -2.0]).lse, [[1] * 3, [-2] * 3])


QUERY, KEY, VALUE = np.ones((2, 4, 5, 8)), np.ones((2, 2, 7, 8)), np.ones((2, 2, 7, 3))


@pytest.mark.parametrize("error, key, value, options, words", [
    (ValueError, KEY[..., :4], VALUE, {}, "key has head_dim 4, query has 8"),
    (ValueError, KEY[:, :, :6], VALUE, {}, "value has length 7, key has 6"),
    (ValueError, np.ones((2, 3, 7, 8)), np.ones((2, 3, 7, 3)), {}, "query has 4 heads, no multiple of the 3 of key"),
    (ValueError, KEY[:, :1], VALUE[:, :1], {}, "key_chunk has kv_heads 1; wanted 2, as in the first chunk"),
    (ValueError, KEY, VALUE[..., :2], {}, "value_chunk has value_dim 2; wanted 3"),
    (ValueError, KEY[None, None].repeat(3, 0), VALUE, {}, r"key_chunk has batch \(3, 1, 2\); wanted \(2,\)"),
    (TypeError, KEY.astype(complex), VALUE, {}, "key_chunk has dtype complex128"),
    (TypeError, KEY, np.ma.array(VALUE), {}, "value_chunk is a numpy.ma masked array"),
    (TypeError, KEY, VALUE.astype(np.uint16), {}, r"pass it as value_chunk.view\(ml_dtypes.bfloat16\)"),
    (TypeError, KEY, None, {}, "value_chunk must be an array, got None"),
    (ValueError, KEY, VALUE, {"mask": np.ones((5, 8), bool)}, r"mask has shape \(5, 8\)"),
    (ValueError, KEY, VALUE, {"key_mask": np.ones((2, 14), bool)}, "key_mask has shape"),
    (TypeError, KEY, VALUE, {"bias": np.ones((5, 7), bool)}, "bias must be"),
])
def test_a_wrong_chunk_leaves_the_state_as_it_was(error, key, value, options, words):
    state = attnc.AttentionState(QUERY, sinks=np.ones(4))
    state.update(KEY, VALUE)
    before = state.result()
    with pytest.raises(error, match=words):
        state.update(key, value, **options)
    assert state.kv_len == 7
    assert_same_bits(state.result(), before)
    state.update(KEY[:, :, :3], VALUE[:, :, :3])
    np.testing.assert_allclose(state.result().lse, np.log(10 * np.exp(8**0.5) + np.exp(1)), rtol=1e-14)


def test_a_wrong_first_chunk_is_forgotten():
    state = attnc.AttentionState(QUERY, sinks=np.ones(4))
    with pytest.raises(ValueError, match="head_dim"):
        state.update(KEY[..., :4], VALUE)
    state.update(KEY[:, :1], VALUE[:, :1])
    np.testing.assert_allclose(state.result().lse, np.log(7 * np.exp(8**0.5) + np.exp(1)), rtol=1e-14)


@pytest.mark.parametrize("error, options, words", [
    (ValueError, {"causal": True}, "q_offset is None; wanted the position of the first query row among all keys"),
    (ValueError, {"window": (3, 0)}, "q_offset is None"),
    (ValueError, {"alibi_slopes": np.ones(4)}, "q_offset is None"),
    (TypeError, {"causal": 1}, "causal must be True or False"),
    (ValueError, {"sinks": np.ones(3)}, r"sinks has shape \(3,\)"),
    (ValueError, {"q_offset": np.ones(3, int)}, r"q_offset has shape \(3,\)"),
    (ValueError, {"alibi_slopes": np.ones(3), "q_offset": 0}, "alibi_slopes has shape"),
    (ValueError, {"softcap": 0}, "softcap must be greater than 0"),
    (ValueError, {"num_threads": 0}, "num_threads"),
    (ValueError, {"layout": "nhd"}, "layout must be one of"),
    (TypeError, {"query": QUERY.astype(complex)}, "query has dtype complex128"),
    (ValueError, {"query": np.ones(3)}, "query has 1 axes"),
    (ValueError, {"query": np.ones((3, 4)), "layout": "bnhd"}, "layout='bnhd' wanted"),
])
def test_construction_errors(error, options, words):
    with pytest.raises(error, match=words):
        attnc.AttentionState(**{"query": QUERY, **options})


def test_no_window_needs_no_offset():
    states = [attnc.AttentionState(QUERY, **options) for options in ({"window": (None, None)}, {})]
    for state in states:
        state.update(KEY, VALUE)
    assert_same_bits(*(state.result() for state in states))


def test_a_result_needs_a_chunk():
    with pytest.raises(ValueError, match="no chunk was given"):
        attnc.AttentionState(QUERY).result()


# More keys than the process may have memory for

MANY, DIM, CHUNK = 1_200_000, 64, 60_000
STREAM = """
import resource
import numpy as np
import attnc

limit = 450 << 20
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
path, rows = {path!r}, ({many}, {dim})
try:
    np.memmap(path, np.float32, "r", shape=rows)
    np.memmap(path, np.float32, "r", shape=(2, *rows))
except OSError:
    pass
else:
    raise SystemExit("the limit does not forbid one piece")
state = attnc.AttentionState(np.load(path + ".query.npy"), scale=0.25, causal=True, q_offset={many} - 3)
for start in range(0, {many}, {chunk}):
    key, value = (np.memmap(path, np.float32, "r", 4 * {dim} * first, (1, {chunk}, {dim}))
                  for first in (start, {many} + start))
    state.update(key, value)
result = state.result()
np.savez(path + ".npz", output=result.output, lse=result.lse)
print(state.kv_len)
"""


def test_a_map_larger_than_the_memory_limit(python, tmp_path, seed):
    """Zeros, but for some keys and values: all the zeros together are a sink, so that the exact result is known."""
    random = np.random.default_rng(seed)
    path = str(tmp_path / "keys_and_values")
    query = normal(random, (2, 3, DIM))
    np.save(path + ".query.npy", query)
    some = np.r_[0, np.sort(random.choice(MANY - 3, 2000, replace=False)) + 1, MANY - 1]
    np.memmap(path, np.float32, "w+", shape=(2, MANY, DIM))[:, some] = normal(random, (2, len(some), DIM))
    both = np.memmap(path, np.float32, "r", shape=(2, 1, MANY, DIM))
    assert both.nbytes > 450 << 20

    code = STREAM.format(path=path, many=MANY, dim=DIM, chunk=CHUNK)
    assert python(code, OPENBLAS_NUM_THREADS="1", OMP_NUM_THREADS="2") == str(MANY)
    with np.load(path + ".npz") as got:
        streamed = attnc.AttentionResult(got["output"], lse=got["lse"])
    one_piece = attnc.attention(query, *both, scale=0.25, causal=True, q_offset=MANY - 3, want="lse")

    exact, honest = [], []
    key, value = both[:, :, some]
    for row in range(3):
        seen = some <= MANY - 3 + row
        zeros = np.full(2, np.log(MANY - 2 + row - seen.sum()))
        arrays = query[:, row:row + 1], key[:, seen], value[:, seen]
        exact.append(exact_attention(*arrays, scale=0.25, sinks=zeros))
        honest.append(reference.attention(*arrays, scale=0.25, sinks=zeros, want="lse"))
    for name, scale in (("output", largest(value)), ("lse", max(largest(x.scores) for x in exact))):
        x, y = (np.concatenate([getattr(row, name) for row in rows], 1) for rows in (exact, honest))
        for result in (streamed, one_piece):
            assert_within(getattr(result, name), x, y, scale=scale, name=name)


# Copies and threads

@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_are_independent(way, seed):
    query, key, value = inputs(np.random.default_rng(seed), (2,), 4, 2, 5, 30, 16)
    state = attnc.AttentionState(query, causal=True, q_offset=25)
    state.update(key[:, :, :20], value[:, :, :20])
    other = way(state)
    before = other.result()
    state.update(key[:, :, 20:], value[:, :, 20:])
    assert other.kv_len == 20 and state.kv_len == 30
    assert_same_bits(other.result(), before)
    other.update(key[:, :, 20:], value[:, :, 20:])
    assert_same_bits(other.result(), state.result())


@pytest.mark.parametrize("options", [{}, {"causal": True, "q_offset": 2000}], ids=["anywhere", "by position"])
def test_no_chunk_of_threads_that_update_is_lost(monkeypatch, options):
    state = attnc.AttentionState(np.zeros((1, 4), np.float32), **options)
    check = sys.modules["attnc.states"]._check_sizes

    def slow(*args):        # lets other threads go on in the middle of an update
        time.sleep(0.001)
        check(*args)

    def update(number):
        for _ in range(10):
            state.update(np.zeros((3, 4), np.float32), np.full((3, 2), number, np.float32))

    monkeypatch.setattr(sys.modules["attnc.states"], "_check_sizes", slow)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(update, range(8), timeout=100))
    result = state.result()
    assert state.kv_len == 8 * 10 * 3
    np.testing.assert_allclose(result.lse, np.log(240), rtol=1e-5)
    np.testing.assert_allclose(result.output, 3.5, rtol=1e-5)


def test_an_update_within_another_of_the_same_thread_is_refused(monkeypatch):
    """A chunk that a signal handler gives within an update would be lost without a word."""
    state, chunk = attnc.AttentionState(np.zeros((1, 4), np.float32)), np.zeros((3, 4), np.float32)
    state.update(chunk, chunk)
    check = sys.modules["attnc.states"]._check_sizes

    def interrupted(*args):
        with pytest.raises(RuntimeError, match="within a call of the same thread"):
            state.update(chunk, chunk)
        check(*args)

    monkeypatch.setattr(sys.modules["attnc.states"], "_check_sizes", interrupted)
    state.update(chunk, chunk)
    assert state.kv_len == 6
