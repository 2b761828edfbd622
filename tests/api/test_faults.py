"""What all calls have in common: they bear refused memory, errors, each other, huge sizes, and leave nothing behind."""

import gc
import sys
import threading
import warnings
from pathlib import Path

import numpy as np
import pytest
from calls import all_calls, arrays_of
from checking import inputs
from test_checks import WRONG, check
from test_memory import resident

import attnc
from attnc import _isa

NAMES = list(all_calls())
WITHOUT_SCRATCH = {"align", "merge_states"}      # of the kernels


def bits(found):
    return [(x.dtype, x.shape, np.ascontiguousarray(x).tobytes()) for x in arrays_of(found)]


def test_calls_give_what_they_should():
    """Every public function that computes is among them, and each gives arrays that are the same twice."""
    calls = all_calls()
    for name in set(attnc.__all__) - {"AttentionGradients", "AttentionResult", "AttentionWeights", "alibi_slopes",
                                      "deberta_relative_index", "explorer", "isa", "show_config", "get_num_threads",
                                      "set_num_threads", "t5_relative_bias", "t5_relative_bias_backward", "threads"}:
        assert name in calls
    for name, call in calls.items():
        assert bits(call()) == bits(call()) != [], name


@pytest.mark.parametrize("name", NAMES)
def test_refused_scratch_is_a_memory_error(isa, name):
    """Whichever allocation of the kernels fails, the call says so, counts its threads down, and the next is right."""
    call = all_calls()[name]
    wanted, refused, threads = bits(call()), 0, attnc.get_num_threads()
    try:
        while refused < 100:
            _isa.kernels.refuse_memory(refused)
            try:
                got = bits(call())
            except MemoryError as error:
                assert "no memory" in str(error)
                assert not _isa.kernels.refuse_memory(-1), "the error was that of the hook"
                assert bits(call()) == wanted
                refused += 1
            else:
                assert _isa.kernels.refuse_memory(-1), "an allocation failed without an error"
                break
    finally:
        _isa.kernels.refuse_memory(-1)
    assert got == wanted and attnc.get_num_threads() == threads
    assert (refused > 0) == (name not in WITHOUT_SCRATCH)


def test_no_memory_anywhere(python):
    """With hardly any address space left NumPy's allocations fail too: only MemoryError comes; then all is right."""
    said = python(f"import sys\nsys.path.insert(0, {str(Path(__file__).parents[1])!r})" + """
import resource
import numpy as np, attnc
from calls import all_calls, arrays_of
from checking import inputs
calls = all_calls(q_len=200, kv_len=1500)
small = all_calls()
def run(calls, room):
    failed = set()
    with open("/proc/self/statm") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    for name, call in calls.items():
        resource.setrlimit(resource.RLIMIT_AS, (size + room * 2**20, hard))
        try:
            call()
        except MemoryError:
            failed.add(name)
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
    return failed
hard = resource.getrlimit(resource.RLIMIT_AS)[1]
run(calls, 1000)
cushion = [bytearray(100_000) for _ in range(100)]      # for small things: where its buffers fail NumPy 2.4 crashes
del cushion
failed = set()
for room in (0, 0, 1, 4):
    failed |= run(calls, room)
    run(small, room)
wanted = [x.tobytes() for call in all_calls().values() for x in arrays_of(call())]
assert wanted == [x.tobytes() for call in small.values() for x in arrays_of(call())]
print(len(failed), len(calls))
""", MALLOC_MMAP_THRESHOLD_="200000", MALLOC_TRIM_THRESHOLD_="100000000")     # large arrays go back when they are freed
    failing, calls = map(int, said.split())
    assert failing > calls // 6


def states_of(calls):
    return {name: bits(call()) for name, call in calls.items()}


def test_reference_counts_after_errors():
    """No error of an argument keeps a reference to any of them."""
    def fail(arguments):
        full = {"query": check().query, "key": check().key, "value": check().value, **arguments}
        if "stage" in arguments:
            del full["value"]
        fails(lambda: (attnc.attention_scores if "stage" in arguments else attnc.attention)(**full))

    # None, numbers and text are held by others too.
    held = [x for _, arguments, _ in WRONG.values() for x in arguments.values()
            if not isinstance(x, int | float | complex | str | tuple | None)]
    assert len(held) > 40

    for _, arguments, _ in WRONG.values():
        fail(arguments)
    gc.collect()
    before = [sys.getrefcount(x) for x in held]
    for _, arguments, _ in WRONG.values():
        for _ in range(20):
            fail(arguments)
    gc.collect()
    assert [sys.getrefcount(x) for x in held] == before


def failing_calls():
    """Calls that fail in each function and object but attention itself, at every stage; and the arrays they take."""
    query, key, value = inputs(np.random.default_rng(0), (2,), 4, 2, 6, 9, 8)
    result = attnc.attention(query, key, value, want="lse")
    weights, tokens, bounds = attnc.AttentionWeights(query, key), query[0].swapaxes(0, 1).copy(), np.array([0, 2, 6])
    twice, out, odd = np.array([0, 4, 2]), np.empty((2, 4, 6, 9)), np.full((2, 2, 9, 8), np.nan, np.float32)
    cache, state = attnc.KVCache(2, 2, 8, capacity=9, dtype=np.int8), attnc.AttentionState(query)
    full = attnc.KVCache(2, 2, 8, capacity=9, dtype="float32")
    full.append(key, value)

    def interrupted(*_):
        raise KeyError("stop")

    calls = [
        lambda: attnc.attention_backward(query, query, key, value, result.output, result.lse[0]),
        lambda: attnc.attention_backward(key, query, key, value, result.output, result.lse),
        lambda: attnc.attention_backward(query, query, key, value, result.output, result.lse, want="keys"),
        lambda: attnc.softmax_backward(query, key), lambda: attnc.log_softmax_backward(query, query, 7),
        lambda: attnc.attention_varlen(tokens, tokens, tokens, twice, bounds),
        lambda: attnc.attention_varlen(tokens, tokens, tokens[:3], bounds, bounds),
        lambda: attnc.merge_states([(query, result.lse), (key, result.lse)]), lambda: attnc.merge_states([query, key]),
        lambda: cache.append(key, odd), lambda: cache.append(key[:1], value), lambda: cache.attend(query, sinks=key),
        lambda: full.append(key, value), lambda: full.truncate(twice), lambda: full.reorder(twice),
        lambda: attnc.KVCache(2, 2, 8, capacity=9, dtype=query), lambda: state.update(key, value[:, :, 1:]),
        lambda: state.update(key, value, mask=bounds), lambda: attnc.AttentionState(query, sinks=key),
        lambda: attnc.AttentionWeights(query, key[..., 1:]), lambda: weights[..., bounds + 9], lambda: weights[query],
        lambda: weights.dense(out=query), lambda: weights.dense(out=out, dtype="float32"),
        lambda: weights.dense(progress=interrupted), lambda: weights @ key, lambda: weights.T @ key[0, 0],
        lambda: weights.map(bounds), lambda: weights.pool(bounds, twice), lambda: weights.lost_mass(query),
        lambda: weights.key_mass(rows=twice + 9), lambda: weights.key_mass(row_weights=odd), lambda: weights.topk(key),
        lambda: weights.sparse(threshold=bounds), lambda: weights.summary(topk=0), lambda: weights.head(0),
        lambda: attnc.rollout([weights, query], 1), lambda: attnc.rollout([weights] * 2, query),
        lambda: attnc.softmax(query, where=bounds), lambda: attnc.weighted_sum(out, value[..., 1:, :]),
    ]
    return calls, (query, key, value, tokens, bounds, twice, out, odd, result.output, result.lse, interrupted)


def fails(call):
    with pytest.raises((TypeError, ValueError, IndexError, KeyError)):
        call()


def test_reference_counts_after_errors_elsewhere():
    calls, held = failing_calls()
    for call in calls:
        fails(call)
    gc.collect()
    before = [sys.getrefcount(x) for x in held]
    for call in calls * 20:
        fails(call)
    gc.collect()
    assert [sys.getrefcount(x) for x in held] == before


@pytest.mark.parametrize("steep", [1, 3, 10, 30])
def test_no_call_raises_a_floating_point_error(isa, steep):
    """Masked rows, weights of 1e-40 and of 0: nothing shows, even where NumPy is told to raise for everything."""
    calls = all_calls(steep=steep)
    with warnings.catch_warnings(), np.errstate(all="raise"):
        warnings.simplefilter("error")
        for name, call in calls.items():
            assert arrays_of(call()), name


def run_many(calls, times):
    for _ in range(times):
        for call in calls:
            call()


@pytest.mark.more
@pytest.mark.parametrize("right", [True, False], ids=["right", "failing"])
def test_ten_thousand_calls_take_no_memory(right):
    calls = list(all_calls(q_len=7, kv_len=40).values()) if right else [
        lambda call=call: fails(call) for call in failing_calls()[0]]
    run_many(calls, 20)
    gc.collect()
    before = resident()
    run_many(calls, 10_000 // len(calls) + 1)
    gc.collect()
    assert resident() - before < 2 * 2**20


def race(workers, times):
    """Python threads that make mixed calls, each in an order of its own; every result has the bits it has alone."""
    calls = {**all_calls(), **{f"{name} 2": call for name, call in all_calls(1, 70, 300, "float16").items()}}
    wanted, names, wrong = states_of(calls), list(calls), []
    start = threading.Barrier(workers)

    def work(seed):
        random = np.random.default_rng(seed)
        try:
            start.wait()
            for i in random.integers(len(names), size=times):
                if bits(calls[names[i]]()) != wanted[names[i]]:
                    raise AssertionError(names[i])
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong[0]


def test_mixed_calls_at_the_same_time(isa):
    race(8, 40)


@pytest.mark.more
def test_mixed_calls_at_the_same_time_more(isa):
    race(8, 1000)


@pytest.mark.skipif(sys.maxsize < 2**40, reason="sizes of 64 bits")
@pytest.mark.parametrize("n", [2**31 - 1, 2**31, 2**31 + 1, 2**40, 2**61 - 1])     # the most floats that NumPy counts
def test_huge_sizes_are_refused_or_right(isa, n):
    """Views of one element with sizes at the ends of the integers: MemoryError or ValueError; at once."""
    one = np.ones((1, 1), np.float32)
    for name, shape in {"length": (n, 1), "depth": (1, n)}.items():
        x = np.broadcast_to(one, shape)
        tries = [lambda x=x: attnc.attention(one, one, x.reshape(1, n), want="weights"), lambda x=x: attnc.softmax(x),
                 lambda x=x: attnc.weighted_sum(one, x.reshape(1, n))] * (n > 2**32)
        if name == "length":
            tries += [lambda x=x: attnc.attention_scores(x, x), lambda x=x: attnc.attention_weights(x, x, causal=True),
                      lambda x=x: attnc.attention(x, x, x, want="weights"),
                      lambda x=x: attnc.AttentionWeights(x, x).dense(),
                      lambda x=x: attnc.AttentionWeights(x, x).head_mean()]
        for call in tries:
            with pytest.raises((MemoryError, ValueError)):
                call()


@pytest.mark.more
def test_more_than_2_31_keys():
    """Keys past 2**31, where an int would wrap."""
    n = 2**31 + 70
    keys = np.broadcast_to(np.float32(1), (n, 1))
    got = attnc.attention(keys[:2], keys, keys, want="lse", kv_lengths=n - 3)
    np.testing.assert_allclose(got.output, 1, rtol=1e-6)
    np.testing.assert_allclose(got.lse, 1 + np.log(n - 3), rtol=1e-6)
