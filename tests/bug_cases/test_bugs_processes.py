"""Bug cases on threads, forks, references and memory: what a call leaves behind."""

import gc
import sys
import threading

import numpy as np
import pytest
from bug_checks import EXTRA, F32, assert_same_bytes, qkv

import attnc

FORKS = """
import os, signal, threading, time
import attnc
from bug_checks import qkv, assert_same_bytes

arrays = qkv(23, (2, 4), 64, 64, 16)
want = attnc.attention(*arrays)

def same():
    assert_same_bytes(attnc.attention(*arrays), want)
    return True

def in_child(function, limit=20):
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = 0 if function() else 2
        finally:
            os._exit(code)
    end = time.monotonic() + limit
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status) == 0
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise AssertionError("the child hangs")
"""


@pytest.mark.parametrize("steps", [
    "assert in_child(same)\nsame()",
    "assert in_child(lambda: in_child(same))\nsame()",
    "assert in_child(lambda: True)\nthread = threading.Thread(target=same, daemon=True)\nthread.start()\n"
    "thread.join(20)\nassert not thread.is_alive()\nsame()",
    "done = []\nthread = threading.Thread(target=lambda: done.append(in_child(same)))\nthread.start()\nthread.join()\n"
    "assert done == [True]\nsame()",
], ids=["child", "grandchild", "parent", "from a thread"])
def test_b23_b111_after_a_fork(alone, isa, steps):
    alone(FORKS + steps, isa)


@pytest.mark.more
@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak of the memory as Linux states it")
def test_b27_a_window_takes_no_memory_for_a_mask(alone, isa):
    grown = alone("""
import resource, numpy as np, attnc
arrays = [np.ones((1, 16384, 64), np.float32) for _ in range(3)]
out = np.zeros((1, 16384, 64), np.float32)
attnc.attention(*(x[:, :256] for x in arrays))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
attnc.attention(*arrays, window=(64, 0), out=out)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
""", isa)
    assert int(grown) < 64 * 1024  # a mask of bools takes 268 MB


def test_b63_calls_at_once_on_the_same_arrays(isa):
    query, key, value = qkv(63, (1, 4), 20, 70, 16)
    want = attnc.attention(query, key, value)
    counts = [sys.getrefcount(x) for x in (query, key, value)]
    failures = []

    def work():
        try:
            for i in range(40):
                if i % 10 == 9:
                    with pytest.raises(ValueError):
                        attnc.attention(query, key[..., :5, :], value)
                else:
                    assert_same_bytes(attnc.attention(query, key, value), want)
        except BaseException as error:
            failures.append(error)

    workers = [threading.Thread(target=work) for _ in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failures, failures[0]
    del workers
    gc.collect()
    assert [sys.getrefcount(x) for x in (query, key, value)] == counts


def test_b81_fewer_rows_than_threads_give_the_same_bits_every_time(isa):
    for heads, q_len in ((1, 1), (2, 3), (3, 4)):
        query, key, value = qkv(81, (1, heads), q_len, 4097, 16)
        want = attnc.attention(query, key, value, want=EXTRA, num_threads=1)
        for _ in range(30):
            result = attnc.attention(query, key, value, want=EXTRA, num_threads=8)
            for name, array in vars(want).items():
                assert_same_bytes(getattr(result, name), array)


def test_b103_references_after_calls_that_fail(isa):
    query, key, value = qkv(103, (1, 1), 2, 3, 4)
    one = np.ones((1, 1, 4, 1), F32)
    odd = np.lib.stride_tricks.as_strided(one, one.shape, (0, 0, 4, 0))
    arrays = (query, key, value, odd)
    counts = [sys.getrefcount(x) for x in arrays]
    for _ in range(300):
        for bad in (value.astype("M8[s]"), value[..., :2, :], "no"):
            with pytest.raises((TypeError, ValueError)):
                attnc.attention(query, key, bad)
        with pytest.raises(ValueError):
            attnc.attention(query, key, value, out=query)
        attnc.attention(odd, odd, odd)
        attnc.attention(query[..., :0, :], key, value)
    gc.collect()
    assert [sys.getrefcount(x) for x in arrays] == counts
