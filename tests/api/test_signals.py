"""Ctrl-C in a long call, fork, and the other ways to start a process."""

import multiprocessing
import os
import signal
import sys
import time

import numpy as np
import pytest
from checking import assert_same_bits, inputs

import attnc

LONG = """
import os, signal, sys, threading, time, numpy as np, attnc
signal.signal(signal.SIGINT, signal.default_int_handler)     # a shell's background jobs inherit it ignored
def big(*shape):
    return np.ones(shape, np.float32)
def again(call):        # without keeping results: to free gigabytes takes half a second
    while True:
        call()
x = big(1, 8, {n}, 64)
calls = dict(
    attention=lambda: attnc.attention(x, x, x),
    few_rows=lambda: again(lambda: attnc.attention(x[:, :, :1], x, x)),
    split=lambda: attnc.attention(np.broadcast_to(big(1, 1, 8, 64), (200000, 1, 8, 64)), x[:, :1], x[:, :1]),
    scores=lambda: again(lambda: attnc.attention_scores(x[:, :2], x[:, :2])),
    weights=lambda: again(lambda: attnc.attention_weights(x[:, :2], x[:, :2])),
    backward=lambda: attnc.attention_backward(x, x, x, x, x, np.ones(x.shape[:-1], np.float32)),
    topk=lambda: attnc.AttentionWeights(x, x).topk(4),
    key_mass=lambda: attnc.AttentionWeights(x, x, lse=np.zeros((1, 8, {n}))).key_mass(),
    softmax=lambda out=big(4000, 4000): again(lambda: attnc.softmax(big(4000, 4000), out=out)),
    weighted_sum=lambda: attnc.weighted_sum(np.broadcast_to(big(1, 1, 60000), (1, 400000, 60000)), x[0, :1]),
)
rows = [0, {n}]
cache = attnc.KVCache(1, 8, 64, capacity={n}, dtype="float32")
cache.append(x, x)
calls.update(
    varlen=lambda: attnc.attention_varlen(*[x[0].swapaxes(0, 1)] * 3, rows, rows),
    cache=lambda: cache.attend(x),
    merge=lambda: again(lambda: attnc.merge_states([(x, x[..., 0])] * 2)),
    map=lambda: attnc.AttentionWeights(x, x).map((9, 9)),
    relevance=lambda: attnc.AttentionWeights(x, x, lse=np.zeros((1, 8, {n}))).relevance(x, x) @ x,
    weighted=lambda: attnc.AttentionWeights(x, x).weighted(heads=np.ones(8)).max(),
    product=lambda: attnc.AttentionWeights(x, x) @ x,
    rows_of_sums=lambda: attnc.attention(x, x, x, want=("lse", "entropy", "argmax")),
    all_wants=lambda: again(lambda: attnc.attention(x, x, x, want=("lse", "weights", "scores"))),
    softmax_backward=lambda y=big(3000, 4000): again(lambda: attnc.softmax_backward(y, y)),
)
small = np.random.default_rng(0).standard_normal((2, 4, 90, 16)).astype(np.float32)
wanted = attnc.attention(small, small, small, causal=True)
sent = []
timer = threading.Timer(0.6, lambda: (sent.append(time.perf_counter()), os.kill(os.getpid(), signal.SIGINT)))
timer.start()
try:
    calls[{name!r}]()
except KeyboardInterrupt:
    took = time.perf_counter() - sent[0]
else:
    sys.exit("the call ended before the signal came")
assert (attnc.attention(small, small, small, causal=True) == wanted).all()
assert attnc.get_num_threads() >= 1
print(took)
"""


SHORT = ("few_rows", "scores", "weights", "softmax", "merge", "softmax_backward")      # made many times


@pytest.mark.parametrize("name", ["attention", "backward", "few_rows", "split", "scores", "weights", "softmax",
                                  "weighted_sum", "topk", "key_mass", "varlen", "cache", "merge", "map", "product",
                                  "relevance", "weighted",
                                  "rows_of_sums", "all_wants", "softmax_backward"])
def test_ctrl_c(python, name, capsys):
    """KeyboardInterrupt comes soon (meant is 0.25 s; asserted what no load can excuse), and the next call is right."""
    n = 2000 if name == "all_wants" else 5000 if name in SHORT else 60000
    took = float(python(LONG.format(name=name, n=n), timeout=120))
    with capsys.disabled():
        print(f" [{name}: {1000 * took:.0f} ms]", end="")
    assert took < 2


ONE_TASK = """
import os, signal, threading, time, numpy as np, attnc
signal.signal(signal.SIGINT, signal.default_int_handler)
def same(x, *shape):
    return np.broadcast_to(x, shape)
one = np.float32(1)
def row(x=same(one, 40_000_000), where=same(True, 40_000_000)):
    return lambda: attnc.softmax(x, where=where)
def columns():
    x = np.ones((20_000_000, 2), np.float32)
    return lambda: attnc.log_softmax(x, axis=0, out=x)
def row_backward(x=same(one, 80_000_000)):
    return lambda: attnc.softmax_backward(x, x)
def axes():
    x = np.ones((120, 120, 120, 30), np.float32)
    return lambda: attnc.softmax(x, axis=(0, 2), out=x)
def topk():
    W = attnc.AttentionWeights(np.ones((12, 1), np.float32), np.random.default_rng(0).random((300_000, 1), np.float32))
    return lambda: W.topk(300_000)
def map():
    W = attnc.AttentionWeights(*np.ones((2, 9000, 1), np.float32))
    return lambda: W.map((9000, 9000))
def append():
    x = np.ones((1, 8, 60000, 64), np.float32)
    cache = attnc.KVCache(1, 8, 64, capacity=len(x[0, 0]), dtype="int8")
    return lambda: cache.append(x, x)
call = {name}()
longest, last = 0, time.process_time()
def tick(*_):
    global longest, last
    now = time.process_time()
    longest, last = max(longest, now - last), now
signal.signal(signal.SIGALRM, tick)
signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
start = last = time.process_time()
call()
signal.setitimer(signal.ITIMER_REAL, 0)
end = time.process_time()
print(max(longest, end - last), end - start)
"""


@pytest.mark.parametrize("name", ["row", "columns", "row_backward", "axes", "topk", "map", "append"])
def test_signals_within_what_is_one_task(python, name, capsys):
    """One long row, strip, copy of NumPy or sort: handlers run many times before it ends. In processor time, which
    other processes do not lengthen."""
    longest, whole = map(float, python(ONE_TASK.format(name=name)).split())
    with capsys.disabled():
        print(f" [{name}: {1000 * longest:.0f} of {1000 * whole:.0f} ms]", end="")
    assert longest < 0.25 * whole + 0.1         # they run every 50 ms, on two threads


def test_a_handler_that_raises(python):
    """What a Python signal handler raises comes through the call; a handler that returns lets it go on."""
    assert python("""
import signal, numpy as np, attnc
x = np.ones((1, 8, 30000, 64), np.float32)
class Stop(Exception): pass
seen = []
def handler(number, frame):
    seen.append(number)
    if len(seen) == 3:
        raise Stop
signal.signal(signal.SIGALRM, handler)
signal.setitimer(signal.ITIMER_REAL, 0.1, 0.1)
try:
    attnc.attention(x, x, x)
except Stop:
    signal.setitimer(signal.ITIMER_REAL, 0)
    print(len(seen))
""") == "3"


def test_signals_are_left_alone_in_other_threads(python):
    """A call in a thread that is not Python's main one does not take the signal; the main thread does."""
    assert python("""
import signal, threading, time, os, numpy as np, attnc
signal.signal(signal.SIGINT, signal.default_int_handler)     # a background job inherits it ignored
x = np.ones((1, 4, 3000, 64), np.float32)
found = []
thread = threading.Thread(target=lambda: found.append(attnc.attention(x, x, x)))
thread.start()
try:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(5)
except KeyboardInterrupt:
    thread.join()
    print(len(found), found[0].shape)
""") == "1 (1, 4, 3000, 64)"


# Processes. GNU OpenMP's threads do not survive a fork: a child that used them would wait for ever.

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")


def compute(seed=0):
    query, key, value = inputs(np.random.default_rng(seed), (2,), 4, 2, 100, 300, 16)
    x = np.random.default_rng(seed).random((400, 900))
    return attnc.attention(query, key, value, num_threads=2), attnc.softmax(x, num_threads=2)


@needs_fork
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning", "ignore:.*fork.*:RuntimeWarning")
@pytest.mark.parametrize("child_computes", [True, False])
def test_fork_after_use(child_computes):
    """The child gives the same bits (alone, without threads); the parent goes on with its threads."""
    wanted = compute()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            got = compute() if child_computes else wanted
            status = 0 if all(a.tobytes() == b.tobytes() for a, b in zip(got, wanted, strict=True)) else 2
            status = status or (3 if child_computes and attnc.get_num_threads() != 1 else 0)
        finally:
            os._exit(status)
    assert waited(child) == 0
    for a, b in zip(compute(), wanted, strict=True):
        assert_same_bits(a, b)


def waited(child, seconds=20):
    """The exit status of a child process, which is ended if it hangs."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "hangs"


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning", "ignore:.*fork.*:RuntimeWarning")
@pytest.mark.parametrize("method", multiprocessing.get_all_start_methods())
def test_multiprocessing(method, monkeypatch):
    monkeypatch.setattr(sys, "path", [os.path.dirname(__file__), *sys.path])
    wanted = compute()
    with multiprocessing.get_context(method).Pool(2) as pool:
        for got in pool.map_async(compute, [0, 0, 0]).get(60):
            for a, b in zip(got, wanted, strict=True):
                assert_same_bits(a, b)


# What an interrupt leaves behind


def interrupted_everywhere(call, state):
    """Interrupt a call at each line of the package that it runs, in turn; `state()` is then as before or as after."""
    wanted, n = None, 0
    while True:
        left = n

        def trace(frame, event, argument):
            nonlocal left
            if "attnc" not in frame.f_code.co_filename:
                return None
            if event == "line":
                left -= 1
                if left == -1:
                    raise KeyboardInterrupt
            return trace

        target = state(None)
        before = state(target)
        sys.settrace(trace)
        try:
            call(target)
        except KeyboardInterrupt:
            pass
        else:
            sys.settrace(None)
            assert n > 20 and state(target) == wanted
            return
        finally:
            sys.settrace(None)
        if wanted is None:
            complete = state(None)
            call(complete)
            wanted = state(complete)
        assert state(target) in (before, wanted), f"interrupted at line {n} of the call"
        n += 1


def rows_of(x):
    return [np.random.default_rng(7).standard_normal((2, 1, n, 4)).astype(np.float32) for n in (x, x)]


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("change", [
    lambda cache: cache.append(*rows_of(3)), lambda cache: cache.append(*rows_of(3), lengths=[1, 3]),
    lambda cache: cache.reorder([1, 0]), lambda cache: cache.truncate([4, 5]),
    lambda cache: cache.keep([[[3, 0]], [[1, 4]]]),
], ids=["append", "append some", "reorder", "truncate", "keep"])
def test_an_interrupted_cache_is_as_before_or_as_after(change, dtype, request):
    keeps = "keep" in request.node.callspec.id

    def state(cache):
        if cache is None:
            cache = attnc.KVCache(2, 1, 4, capacity=6, dtype=dtype, window=None if keeps else (3, 0))
            cache.append(*rows_of(5), lengths=[4, 5])
            cache.append(*rows_of(1))
            return cache
        parts = (cache.keys, cache.values, cache.key_scales, cache.value_scales, cache.lengths, cache._oldest,
                 cache.positions, cache._evicted)
        return [x.tobytes() for x in parts if x is not None]

    interrupted_everywhere(change, state)


@pytest.mark.parametrize("change", [
    lambda cache: cache.append([0, 2], *(x[0].swapaxes(0, 1) for x in rows_of(6)), lengths=[1, 5]),
    lambda cache: cache.fork(0), lambda cache: cache.free([2, 0]), lambda cache: cache.truncate([0, 1], [3, 0]),
], ids=["append", "fork", "free", "truncate"])
def test_an_interrupted_paged_cache_is_as_before_or_as_after(change):
    def state(cache):
        if cache is None:
            cache = attnc.PagedKVCache(9, 3, 1, 4, dtype="float32")
            for n in (4, 5, 0):
                cache.append(cache.add(), *(x[0].swapaxes(0, 1) for x in rows_of(n)))
            cache.append(cache.fork(0), *(x[0].swapaxes(0, 1) for x in rows_of(0)))
            return cache
        lengths, table = cache.lengths, cache.block_table(list(cache.lengths))
        held = [x[row].reshape(-1, 1, 4)[:n].tobytes() for x in (cache.keys, cache.values)
                for row, n in zip(table, lengths.values(), strict=True)]
        return lengths, table.tolist(), cache.free_pages, cache._state.issued, held

    interrupted_everywhere(change, state)


def test_an_interrupted_state_is_as_before_or_as_after():
    def state(found):
        if found is None:
            found = attnc.AttentionState(rows_of(3)[0])
            found.update(*rows_of(5))
            return found
        result = found.result()
        return found.kv_len, result.output.tobytes(), result.lse.tobytes()

    interrupted_everywhere(lambda found: found.update(*rows_of(4)), state)
