"""The KV cache: the bits of attention over its rows, the ring of a window, int8 rows, errors, copies, threads."""

import copy
import pickle
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from checking import assert_same_bits, dtype_of, largest, normal, parameters

import attnc
from attnc import reference
from attnc.testing import assert_within, exact_attention

SIZES = {"batch": 2, "kv_heads": 2, "head_dim": 24, "value_dim": 40}
OPTIONS = {
    "plain": {},
    "causal": {"causal": True, "scale": -0.3},
    "all": {"causal": True, "softcap": 4.0, "alibi_slopes": [0.1, 0.0, 0.3, 1.0], "sinks": [0.5, -np.inf, 2.0, 0.0]},
}


def tokens(random, count, dtype="float32", dims=(24, 40)):
    """Keys and values of some tokens."""
    return tuple(normal(random, (2, 2, count, dim), dtype) for dim in dims)


def filled(module, random, dtype, parts, capacity=1100, dims=(24, 40), **options):
    """A cache after some appends, of which the second batch element takes a few tokens less."""
    cache = module.KVCache(2, 2, *dims, capacity=capacity, dtype=dtype_of(dtype), **options)
    for count in parts:
        cache.append(*tokens(random, count, dims=dims), lengths=[count, max(count - 3, 0)])
    return cache


@pytest.mark.parametrize("dtype, q_len", [
    ("float32", 1), ("float32", 40), ("float64", 3), ("float16", 5), ("bfloat16", 9)])
@pytest.mark.parametrize("options", OPTIONS)
def test_the_bits_of_attention_over_its_rows(isa, q_len, options, dtype, seed):
    random = np.random.default_rng(seed)
    cache = filled(attnc, random, dtype, [600, 1, 441])
    assert cache.lengths.tolist() == [1042, 1035]
    query = normal(random, (2, 4, q_len, 24), dtype)
    want = ("lse", "weights")
    got = cache.attend(query, want=want, **OPTIONS[options])
    assert_same_bits(got, attnc.attention(query, cache.keys, cache.values, kv_lengths=cache.lengths, want=want,
                                          **OPTIONS[options]))
    swapped = cache.attend(query.swapaxes(1, 2), layout="bnhd", **OPTIONS[options])
    assert_same_bits(swapped.swapaxes(1, 2), got.output)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float32 swapped"])
def test_rows_are_what_was_appended(dtype, seed):
    random = np.random.default_rng(seed)
    dtype = np.dtype(np.float32).newbyteorder() if "swapped" in dtype else dtype_of(dtype)
    cache = attnc.KVCache(2, 2, 24, 40, capacity=9, dtype=dtype)
    assert cache.keys.dtype.isnative
    key, value = tokens(random, 9)
    cache.append(key[:, :, :4], value[:, :, :4])
    cache.append(*(x[:, :, 4:].swapaxes(1, 2) for x in (key, value)), layout="bnhd", lengths=np.array([5, 2]))
    for rows, x in ((cache.keys, key), (cache.values, value)):
        assert_same_bits(rows[0], x[0].astype(rows.dtype))
        assert_same_bits(rows[1, :, :6], x[1, :, :6].astype(rows.dtype))
        assert not rows.flags.writeable
    assert cache.keys.ctypes.data % 64 == 0 and not cache.lengths.flags.writeable
    assert cache.nbytes == cache.keys.nbytes + cache.values.nbytes and cache.key_scales is None


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_truncate_and_reorder(isa, dtype, seed):
    random = np.random.default_rng(seed)
    cache, again = (filled(attnc, np.random.default_rng(seed), dtype, [20, 3], capacity=30) for _ in range(2))
    query = normal(random, (2, 4, 1, 24), "float32")
    before = cache.attend(query)
    cache.append(*tokens(random, 5))
    cache.truncate([23, 17])
    assert_same_bits(cache.attend(query), before)
    cache.reorder([1, 1])
    assert cache.lengths.tolist() == [17, 17]
    assert_same_bits(cache.attend(query[[1, 1]]), before[[1, 1]])
    again.reorder(np.array([1, 0]))
    assert_same_bits(again.attend(query[::-1]), before[::-1])
    again.truncate(0)
    assert not again.attend(query).any()


@pytest.mark.parametrize("dtype, window", [("float32", (0, None)), ("float16", (20, 2)), ("int8", (17, 0))])
@pytest.mark.parametrize("options", OPTIONS)
def test_a_window_is_a_ring(isa, window, options, dtype, seed):
    """Many more tokens than rows, three at a time: within tolerance of a cache that keeps them all."""
    random = np.random.default_rng(seed)
    cache, twin = (module.KVCache(2, 2, 24, 40, capacity=24, dtype=dtype, window=window)
                   for module in (attnc, reference))
    for count in (1, 20, 3, 3, 3, 1, 3, 24, 3):
        rows = tokens(random, count)
        for each in (cache, twin):
            each.append(*rows, lengths=[count, max(count - 1, 1)])
        query = normal(random, (2, 4, min(count, 3), 24), "float16" if dtype == "float16" else "float32")
        got = cache.attend(query, want="lse", q_lengths=[query.shape[2], 1], **OPTIONS[options])
        honest = twin.attend(query, want="lse", q_lengths=[query.shape[2], 1], **OPTIONS[options])
        exact = exact_attention(query, twin.keys, twin.values, kv_lengths=twin.lengths, window=window,
                                q_lengths=[query.shape[2], 1], **OPTIONS[options])
        assert_within(got.output, exact.output, honest.output, scale=largest(twin.values), name="output")
        scores = max(1.0, largest(np.where(np.isfinite(exact.scores), exact.scores, 0)), largest(exact.lse))
        assert_within(got.lse, exact.lse, honest.lse, scale=scores, name="lse")
    assert cache.lengths.tolist() == twin.lengths.tolist() == [61, 54]
    cache.truncate(cache.lengths - 1)


def test_a_ring_that_is_cut_back(isa, seed):
    """A token whose row a later one has taken stays gone when that one is dropped: an error, never the wrong token."""
    random = np.random.default_rng(seed)
    ring, twin = (module.KVCache(2, 2, 24, 40, capacity=16, dtype="float32", window=(3, 0))
                  for module in (attnc, reference))
    query = normal(random, (2, 4, 12, 24))
    for count in (10, 10):
        rows = tokens(random, count)
        for each in (ring, twin):
            each.append(*rows)                       # of 20 tokens the first 4 are gone
    for length, most in ((18, 11), (16, 9)):
        for each in (ring, twin):
            each.truncate(length)
            with pytest.raises(ValueError, match="whose window needs tokens before 4, which later ones have replaced"):
                each.truncate([length, 6])
        ring.reorder([1, 1])
        twin.reorder([1, 1])
        for n in (1, most):
            got, honest = (each.attend(query[:, :, :n], causal=True) for each in (ring, twin))
            exact = exact_attention(query[:, :, :n], twin.keys, twin.values, kv_lengths=length, window=(3, 0))
            assert_within(got, exact.output, honest, scale=largest(twin.values))
        with pytest.raises(ValueError, match=f"wanted at most {most} rows: tokens before 4 of batch element 0"):
            ring.attend(query[:, :, :most + 1])


@pytest.mark.parametrize("dtype, q_len, dims", [
    ("float32", 1, (64, 64)), ("float16", 3, (32, 48)), ("bfloat16", 5, (24, 40)), ("float64", 2, (16, 16)),
    ("float32", 9, (64, 16)), ("float32", 35, (24, 40))])
def test_int8_rows(isa, q_len, dims, dtype, seed):
    """Within tolerance of attention over the rows that they stand for, on every path."""
    random = np.random.default_rng(seed)
    parts = [1050 if q_len < 30 else 90, 1]
    cache, twin = (filled(module, np.random.default_rng(seed), "int8", parts, dims=dims)
                   for module in (attnc, reference))
    query = normal(random, (2, 4, q_len, dims[0]), dtype)
    for rows, scales, meant in ((cache.keys, cache.key_scales, twin.keys),
                                (cache.values, cache.value_scales, twin.values)):
        assert rows.dtype == np.int8 and scales.dtype == np.float32
        assert (rows * scales[..., None].astype(np.float64) == meant).all()
    want = ("lse", "weights", "scores")
    got, honest = (each.attend(query, causal=True, want=want) for each in (cache, twin))
    exact = (exact_attention if dtype == "float64" else reference.attention)(
        query.astype(np.float64), twin.keys, twin.values, kv_lengths=cache.lengths, causal=True, want=want)
    assert got.output.dtype == query.dtype
    scores = max(1.0, largest(np.where(np.isfinite(exact.scores), exact.scores, 0)))
    scales = {"output": largest(twin.values), "weights": 1.0, "scores": scores, "lse": max(scores, largest(exact.lse))}
    for name, scale in scales.items():
        assert_within(getattr(got, name), getattr(exact, name), getattr(honest, name), scale=scale, name=name)
    assert_same_bits(cache.attend(query, causal=True, num_threads=2), got.output)


def test_the_error_of_int8_rows(seed):
    """At most half a step, a step being a 127th of the largest magnitude of the row; zeros stay zeros."""
    random = np.random.default_rng(seed)
    cache = attnc.KVCache(2, 2, 24, 40, capacity=50, dtype="int8")
    key, value = (x * 10.0 ** random.integers(-20, 20, (2, 2, 50, 1)) for x in tokens(random, 50, "float64"))
    key[0, 0, 7] = 0
    cache.append(key, value)
    for x, rows, scales in ((key, cache.keys, cache.key_scales), (value, cache.values, cache.value_scales)):
        error = np.abs(rows * scales[..., None].astype(np.float64) - x)
        bound = np.abs(x).max(-1, keepdims=True) / 254
        assert (error <= bound * (1 + 1e-4)).all() and (error > bound * 0.9).any()
    assert not cache.keys[0, 0, 7].any() and cache.key_scales[0, 0, 7] == 0
    assert cache.nbytes == cache.keys.nbytes + cache.values.nbytes + 2 * cache.key_scales.nbytes


def test_the_error_of_int8_attention(isa, seed):
    """Scores move by at most the query's 1-norm times the key's half step, values by theirs: the output by both."""
    random = np.random.default_rng(seed)
    rows = tokens(random, 300, "float64")
    cache = attnc.KVCache(2, 2, 24, 40, capacity=300, dtype="int8")
    cache.append(*rows)
    query = normal(random, (2, 4, 1, 24), "float64")
    exact = attnc.attention(query, *rows)
    steps = np.repeat(cache.key_scales.astype(np.float64), 2, 1)[:, :, None] / 2
    moved = (np.abs(query).sum(-1, keepdims=True) * steps).max(-1, keepdims=True) / np.sqrt(24)
    bound = np.expm1(2 * moved) * largest(rows[1]) + cache.value_scales.max() / 2
    error = np.abs(cache.attend(query) - exact)
    assert (error <= bound).all() and error.max() > 1e-6


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_rows_behind_the_length_change_no_bit(isa, dtype, seed):
    random = np.random.default_rng(seed)
    cache = filled(attnc, random, dtype, [33], capacity=70)
    query = normal(random, (2, 4, 3, 24), "float32")
    clean = cache.attend(query, causal=True, want="lse")
    for x in (cache._keys, cache._values, *cache._scales):
        if x is not None:
            x[0, :, 33:], x[1, :, 30:] = (np.nan, np.inf) if x.dtype != np.int8 else (-128, 127)
    assert_same_bits(cache.attend(query, causal=True, want="lse"), clean)


def test_large_int8_values_do_not_overflow(isa):
    """Sums that could overflow are taken apart, as for other dtypes."""
    cache = attnc.KVCache(1, 1, 16, 16, capacity=200, dtype="int8")
    cache.append(np.zeros((1, 1, 200, 16)), np.full((1, 1, 200, 16), 3e38))
    got = cache.attend(np.ones((1, 1, 1, 16), np.float32))
    assert np.allclose(got, 3e38, rtol=1e-5)


def errors():
    rows = {"key": np.zeros((2, 2, 4, 24)), "value": np.zeros((2, 2, 4, 40))}
    nan = {**rows, "value": np.full((2, 2, 4, 40), np.nan)}
    query = np.zeros((2, 4, 1, 24), np.float32)
    yield ValueError, "batch must be an integer from 0", lambda m: m.KVCache(-1, 2, 8, capacity=4, dtype="float32")
    yield TypeError, "kv_heads must be an integer", lambda m: m.KVCache(1, 2.0, 8, capacity=4, dtype="float32")
    yield ValueError, "capacity must be an integer from 1", lambda m: m.KVCache(1, 2, 8, capacity=0, dtype="float32")
    yield TypeError, "dtype is int16; wanted float32", lambda m: m.KVCache(1, 2, 8, capacity=4, dtype="int16")
    yield TypeError, "dtype must be a dtype", lambda m: m.KVCache(1, 2, 8, capacity=4, dtype="floaty")
    yield TypeError, "dtype must be a dtype, got None", lambda m: m.KVCache(1, 2, 8, capacity=4, dtype=None)
    yield ValueError, "bounded number of keys", lambda m: m.KVCache(1, 2, 8, capacity=4, dtype="f4", window=(None, 0))
    yield ValueError, "capacity of at least 5", lambda m: m.KVCache(1, 2, 8, capacity=4, dtype="f4", window=(4, 0))
    yield ValueError, r"key has shape \(2, 4, 24\); wanted \(batch", \
        lambda m: cache(m).append(rows["key"][0], rows["value"])
    yield ValueError, r"value has shape .* \(2, 2, 4, 40\)", lambda m: cache(m).append(rows["key"], rows["key"])
    yield ValueError, r"= \(2, 2, 2, 24\)", lambda m: cache(m).append(**rows, layout="bnhd")
    yield ValueError, "lengths must be from 0 to 4", lambda m: cache(m).append(**rows, lengths=[5, 1])
    yield ValueError, r"lengths has shape \(3,\)", lambda m: cache(m).append(**rows, lengths=[1, 1, 1])
    yield ValueError, "batch element 1 holds 5 tokens, capacity is 8; nothing was appended", \
        lambda m: cache(m).append(**rows, lengths=[1, 4])
    yield ValueError, "value has entries that are not finite as float32; int8", \
        lambda m: cache(m, "int8").append(**nan, lengths=[3, 1])
    yield ValueError, "key has entries that are not finite as float32; int8", \
        lambda m: cache(m, "int8").append(rows["key"] + 1e39, rows["value"], lengths=[3, 1])
    yield ValueError, "lengths asks for 4 tokens in batch element 0, which holds 3", lambda m: cache(m).truncate(4)
    yield ValueError, r"indices has shape \(1,\); wanted \(batch,\)", lambda m: cache(m).reorder([0])
    yield ValueError, "indices must be from 0 to 1", lambda m: cache(m).reorder([0, 2])
    yield TypeError, "indices must be an integer", lambda m: cache(m).reorder([0.0, 1.0])
    yield ValueError, "query has 3 heads", lambda m: cache(m).attend(query[:, :3])
    yield ValueError, "mask was given to a cache with a window", \
        lambda m: cache(m, window=(2, 0)).attend(query, mask=np.ones((1, 8), bool))


def cache(module, dtype="float32", **options):
    """Of capacity 8, with 3 and 5 tokens."""
    made = module.KVCache(2, 2, 24, 40, capacity=8, dtype=dtype, **options)
    made.append(np.ones((2, 2, 5, 24)), np.ones((2, 2, 5, 40)), lengths=[3, 5])
    return made


@pytest.mark.parametrize("module", [attnc, reference])
@pytest.mark.parametrize("error, words, call", [*errors()])
def test_errors(module, error, words, call):
    with pytest.raises(error, match=words):
        call(module)


def test_errors_of_rows_that_move():
    ring = cache(attnc, window=(4, 0))
    ring.append(np.ones((2, 2, 8, 24)), np.ones((2, 2, 8, 40)))
    query = np.ones((2, 4, 5, 24), np.float32)
    with pytest.raises(ValueError, match="want='weights' has no meaning"):
        ring.attend(query[:, :, :1], want="weights")
    with pytest.raises(ValueError, match="query has length 5, and its first row looks 4 keys back; wanted at most 4"):
        ring.attend(query)
    with pytest.raises(ValueError, match="9 more tokens do not fit: batch element 0 has a window, capacity is 8"):
        ring.append(np.ones((2, 2, 9, 24)), np.ones((2, 2, 9, 40)))
    with pytest.raises(ValueError, match="whose window needs tokens before 3, which later ones have replaced"):
        ring.truncate([6, 13])
    assert ring.lengths.tolist() == [11, 13]


def test_nothing_is_written_after_an_error(seed):
    made = cache(attnc)
    before = made.keys.copy(), made.values.copy(), made.lengths.copy()
    rows = np.full((2, 2, 4, 24), 7.0), np.full((2, 2, 4, 40), 7.0)
    for bad in ({"lengths": [4, 4]}, {"lengths": [4, -1]}):
        with pytest.raises(ValueError, match=r"lengths|fit"):
            made.append(*rows, **bad)
    for x, y in zip(before, (made.keys, made.values, made.lengths), strict=True):
        assert_same_bits(x, y)


def test_the_twin_has_the_same_methods():
    for name in ("__init__", "append", "attend", "weights", "keep", "truncate", "reorder"):
        fast, twin = (parameters(getattr(module.KVCache, name)) for module in (attnc, reference))
        assert fast == twin


# Copies

COPIES = {"copy": copy.copy, "deepcopy": copy.deepcopy, "pickle": lambda x: pickle.loads(pickle.dumps(x))}


@pytest.mark.parametrize("module", [attnc, reference])
@pytest.mark.parametrize("dtype, window", [("float32", None), ("bfloat16", (20, 0)), ("int8", (20, 0))])
@pytest.mark.parametrize("way", COPIES)
def test_copies_are_independent(way, dtype, window, module, seed):
    """A copy answers as its original did, and neither sees what becomes of the other."""
    random = np.random.default_rng(seed)
    kind = np.dtype(np.int8) if dtype == "int8" else dtype_of(dtype)
    cache = module.KVCache(2, 2, 24, 40, capacity=30, dtype=kind, window=window)
    cache.append(*tokens(random, 29), lengths=[29, 20])
    if window:
        cache.append(*tokens(random, 8))
    query = normal(random, (2, 4, 2, 24), "float32")
    before, other = cache.attend(query), COPIES[way](cache)
    assert_same_bits(other.attend(query), before)
    cache.truncate(cache.lengths - [1, 2])
    cache.append(*tokens(random, 1))
    changed = cache.attend(query)
    assert_same_bits(other.attend(query), before)
    other.reorder([1, 0])
    other.append(*tokens(random, 1))
    assert_same_bits(cache.attend(query), changed)


def test_a_copy_keeps_the_rows_in_use_alone(seed):
    cache = attnc.KVCache(1, 1, 8, capacity=100_000, dtype=np.float32)
    cache.append(*np.random.default_rng(seed).standard_normal((2, 1, 1, 5, 8)))
    assert len(pickle.dumps(cache)) < 2000
    other = copy.copy(cache)
    assert other.nbytes == cache.nbytes and other.keys.ctypes.data % 64 == other.values.ctypes.data % 64 == 0
    assert_same_bits(other.keys[:, :, :5], cache.keys[:, :, :5])


# Threads

def slow(monkeypatch, name):
    """Let other threads go on before and after each call of a function of the package."""
    module, _, name = name.rpartition(".")
    function = getattr(sys.modules[module], name)

    def paused(*args, **kwargs):
        time.sleep(0.001)
        result = function(*args, **kwargs)
        time.sleep(0.001)
        return result

    monkeypatch.setattr(sys.modules[module], name, paused)


def at_once(*calls):
    """Make each call in a thread of its own, all at the same time."""
    start = threading.Barrier(len(calls))

    def work(call):
        start.wait(20)
        return call()

    with ThreadPoolExecutor(len(calls)) as pool:
        return [found.result(100) for found in [pool.submit(work, call) for call in calls]]


@pytest.mark.parametrize("window", [None, (3, 0)])
def test_tokens_that_are_views_of_rows_which_the_append_overwrites(window, seed):
    """Values that are keys, of batch elements in another order: the rows of before."""
    random = np.random.default_rng(seed)
    cache = attnc.KVCache(2, 1, 8, capacity=4, dtype="float32", window=window)
    key, value, new = (normal(random, (2, 1, 4, 8)) for _ in range(3))
    cache.append(key, value)
    if window is None:
        cache.truncate(0)
    cache.append(new, cache.keys[::-1])
    np.testing.assert_array_equal(cache.keys, new)
    np.testing.assert_array_equal(cache.values, key[::-1])


def test_keys_that_are_views_of_rows_of_other_batch_elements(seed):
    random = np.random.default_rng(seed)
    cache = attnc.KVCache(2, 1, 8, capacity=4, dtype="float32", window=(3, 0))
    key, value = (normal(random, (2, 1, 4, 8)) for _ in range(2))
    cache.append(key, value)
    cache.append(cache.keys[::-1], cache.values)
    np.testing.assert_array_equal(cache.keys, key[::-1])


@pytest.mark.parametrize("module, inside", [
    (attnc, "attnc.cache.slots"), (reference, "attnc.reference._cache._grown")])
def test_no_token_of_threads_that_append_is_lost(monkeypatch, module, inside):
    slow(monkeypatch, inside)
    cache = module.KVCache(1, 1, 2, capacity=8 * 10 * 3, dtype=np.float32)

    def append(number):
        for i in range(10):
            tokens = np.full((1, 1, 3, 2), 100 * number + i, np.float32)
            cache.append(tokens, -tokens)

    at_once(*(lambda n=n: append(n) for n in range(8)))
    assert cache.lengths.tolist() == [8 * 10 * 3]
    first = cache.keys[0, 0, ::3, 0]
    assert sorted(first) == [100 * n + i for n in range(8) for i in range(10)]
    for rows, sign in ((cache.keys, 1), (cache.values, -1)):
        np.testing.assert_array_equal(rows[0, 0, :, 0], sign * np.repeat(first, 3))


USES = {"append": lambda cache: cache.append(*np.ones((2, 1, 1, 1, 2))), "truncate": lambda cache: cache.truncate(0),
        "reorder": lambda cache: cache.reorder([0]), "attend": lambda cache: cache.attend(np.ones((1, 1, 1, 2))),
        "copy": copy.copy, "keep": lambda cache: cache.keep(np.zeros((1, 1, 0), int)),
        "weights": lambda cache: cache.weights(np.ones((1, 1, 1, 2)))}


def used_within(monkeypatch, place, use):
    """Make the function at `place` call `use` first, as a signal handler would; whatever that raises is kept."""
    module, _, name = place.rpartition(".")
    function, raised = getattr(sys.modules[module], name), []

    def interrupted(*args, **kwargs):
        if not raised:
            raised.append(None)
            with pytest.raises(RuntimeError, match="within a call of the same thread") as raised[0]:
                use()
        return function(*args, **kwargs)

    monkeypatch.setattr(sys.modules[module], name, interrupted)
    return raised


@pytest.mark.parametrize("module, inside, use", [
    *((attnc, "attnc.cache.slots", use) for use in USES),
    *((attnc, "attnc.cache.attend", use) for use in ("append", "truncate", "reorder", "keep")),
    *((reference, "attnc.reference._cache._grown", use) for use in USES if use != "copy")])
def test_a_use_within_another_of_the_same_thread_is_refused(monkeypatch, module, inside, use):
    """A token that a signal handler appends within an append would be lost without a word."""
    cache = module.KVCache(1, 1, 2, capacity=8, dtype=np.float32)
    USES["append"](cache)
    raised = used_within(monkeypatch, inside, lambda: USES[use](cache))
    USES["attend" if inside.endswith("attend") else "append"](cache)
    assert raised and cache.lengths.tolist() == [1 if inside.endswith("attend") else 2]
    USES[use](cache)


@pytest.mark.parametrize("change", ["append", "reorder", "truncate"])
@pytest.mark.parametrize("module, inside", [
    (attnc, "attnc.cache.attend"), (reference, "attnc.reference._cache.attention")])
def test_attention_beside_changes_sees_one_state(monkeypatch, module, inside, change, seed):
    """What the kernels find at the beginning of a call is there until its end; a change comes before or after."""
    random = np.random.default_rng(seed)
    cache = module.KVCache(2, 1, 8, capacity=30, dtype=np.float32, window=(25, 0))
    cache.append(*random.standard_normal((2, 2, 1, 30, 8)))
    query, parts, seen = normal(random, (2, 2, 1, 8), "float32"), random.standard_normal((9, 2, 2, 1, 20, 8)), []
    within, changed = threading.Event(), threading.Event()
    states = [cache.attend(query)]
    after = copy.deepcopy(cache)
    calls = {"append": lambda cache: cache.append(*parts[0]), "reorder": lambda cache: cache.reorder([1, 0]),
             "truncate": lambda cache: cache.truncate(28)}
    calls[change](after)
    states.append(after.attend(query))
    place, _, name = inside.rpartition(".")
    function = getattr(sys.modules[place], name)

    def twice(*args, **kwargs):
        seen.append(function(*args, **kwargs))
        within.set()
        changed.wait(0.2)       # long enough for a change that does not wait
        seen.append(function(*args, **kwargs))
        return seen[-1]

    def alter():
        within.wait(20)
        calls[change](cache)
        changed.set()

    monkeypatch.setattr(sys.modules[place], name, twice)
    found, _ = at_once(lambda: cache.attend(query), alter)
    for one in (*seen, found):
        assert_same_bits(one, states[0])
    assert_same_bits(cache.attend(query), states[1])


def test_attention_of_threads_runs_at_the_same_time(monkeypatch):
    cache = attnc.KVCache(1, 1, 8, capacity=4, dtype=np.float32)
    cache.append(*np.ones((2, 1, 1, 3, 8)))
    both = threading.Barrier(2)
    attend = sys.modules["attnc.cache"].attend

    def together(*args, **scales):
        both.wait(20)
        return attend(*args, **scales)

    monkeypatch.setattr("attnc.cache.attend", together)
    found = at_once(*[lambda: cache.attend(np.ones((1, 1, 1, 8), np.float32))] * 2)
    assert_same_bits(*found)


def test_attention_that_ends_with_an_error_holds_nobody_up(monkeypatch):
    cache = attnc.KVCache(1, 1, 8, capacity=4, dtype=np.float32)
    cache.append(*np.ones((2, 1, 1, 1, 8)))

    def stopped(*args, **scales):
        raise KeyboardInterrupt

    monkeypatch.setattr("attnc.cache.attend", stopped)
    with pytest.raises(KeyboardInterrupt):
        cache.attend(np.ones((1, 1, 1, 8), np.float32))
    at_once(lambda: cache.append(*np.ones((2, 1, 1, 1, 8))))
    assert cache.lengths.tolist() == [2]
