"""Threads: how many a call takes, calls at the same time, and nothing of the process changed by them."""

import asyncio
import ctypes
import os
import re
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from checking import assert_same_bits, inputs, plans

import attnc
from attnc import _isa

pytestmark = pytest.mark.kernels
threads_module = sys.modules["attnc.threads"]      # the name in the package is the context


@pytest.fixture(autouse=True)
def default():
    """The default as it was, after each test."""
    yield
    attnc.set_num_threads(None)


@pytest.fixture
def arrays(seed):
    return inputs(np.random.default_rng(seed), (2,), 4, 2, 100, 300, 16)


def taken(arrays, **options):
    with plans() as plan:
        attnc.attention(*arrays, **options)
    return plan[-1].threads


def test_the_argument_the_context_the_default(arrays):
    attnc.set_num_threads(3)
    assert attnc.get_num_threads() == 3 == taken(arrays)
    with attnc.threads(2):
        assert taken(arrays) == 2
        assert taken(arrays, num_threads=5) == 5
        with attnc.threads(1):
            assert taken(arrays) == 1
        assert taken(arrays) == 2
    assert taken(arrays) == 3
    with pytest.raises(KeyError), attnc.threads(1):
        raise KeyError
    assert attnc.get_num_threads() == 3
    attnc.set_num_threads(None)
    assert 1 <= attnc.get_num_threads() <= len(os.sched_getaffinity(0))


@pytest.mark.parametrize("wrong", [0, -1, 4097, 10**30])
def test_numbers_out_of_range(wrong, arrays):
    for call in (attnc.set_num_threads, lambda n: attnc.attention(*arrays, num_threads=n),
                 lambda n: attnc.threads(n).__enter__(), lambda n: attnc.softmax(arrays[0], num_threads=n)):
        with pytest.raises(ValueError, match="num_threads must be an integer from 1 to 4096"):
            call(wrong)


@pytest.mark.parametrize("wrong", ["2", 2.5, True, [2]])
def test_no_numbers(wrong, arrays):
    for call in (attnc.set_num_threads, lambda n: attnc.attention(*arrays, num_threads=n)):
        with pytest.raises(TypeError, match="num_threads"):
            call(wrong)


def test_the_environment(python):
    code = "import attnc; print(attnc.get_num_threads())"
    assert python(code, ATTNC_NUM_THREADS="3") == "3"
    assert python(code, OMP_NUM_THREADS="1") == "1"
    assert python(code, OMP_NUM_THREADS="1", ATTNC_NUM_THREADS="2") == "2"
    assert python(code, ATTNC_NUM_THREADS="") == python(code)
    for wrong in ("0", "many", "-2", "2.5"):
        said = python("try: import attnc\nexcept ImportError as error: print(error)", ATTNC_NUM_THREADS=wrong)
        assert "ATTNC_NUM_THREADS" in said and repr(wrong) in said


def test_affinity_is_a_limit(python):
    code = "import os, attnc; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); print(attnc.get_num_threads())"
    assert python(code) == "1"


def test_threadpoolctl_is_a_limit(arrays):
    threadpoolctl = pytest.importorskip("threadpoolctl")
    with threadpoolctl.threadpool_limits(1):
        assert attnc.get_num_threads() == 1 == taken(arrays)
    assert attnc.get_num_threads() >= 1


@pytest.mark.parametrize("files, processors", [
    ({"cpu.max": "150000 100000"}, 2), ({"cpu.max": "100000 100000"}, 1), ({"cpu.max": "1000 100000"}, 1),
    ({"cpu.max": "max 100000"}, 1 << 20), ({}, 1 << 20), ({"cpu.max": "nonsense"}, 1 << 20),
    ({"cpu/cpu.cfs_quota_us": "250000", "cpu/cpu.cfs_period_us": "100000"}, 3),
    ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 1 << 20),
], ids=str)
def test_the_quota_of_the_cgroup(monkeypatch, files, processors):
    def read(path):
        try:
            return files[path.removeprefix("/sys/fs/cgroup/")]
        except KeyError:
            raise FileNotFoundError(path) from None

    monkeypatch.setattr(threads_module, "_read", read)
    assert threads_module._cgroup_limit() == processors


def test_the_quota_is_a_limit_of_calls(monkeypatch, arrays):
    monkeypatch.setattr(threads_module, "_CGROUP_LIMIT", 1)
    assert attnc.get_num_threads() == 1 == taken(arrays)
    assert taken(arrays, num_threads=2) == 2
    attnc.set_num_threads(2)
    assert taken(arrays) == 2


def openmp():
    """The OpenMP library that the kernels of this process use."""
    if not _isa.kernels.openmp():
        pytest.skip("built without OpenMP")
    with open("/proc/self/maps") as maps:
        paths = [line.split()[-1] for line in maps if re.search(r"lib(gomp|omp|iomp)", line)]
    return ctypes.CDLL(paths[0])


def test_the_number_of_openmp_stays(arrays):
    """Other OpenMP code of the process runs with its own number of threads."""
    library = openmp()
    before = library.omp_get_max_threads()
    for threads in (1, 7, 2):
        attnc.attention(*arrays, num_threads=threads)
        assert library.omp_get_max_threads() == before
    with pytest.raises(ValueError):
        attnc.attention(*arrays, num_threads=0)
    attnc.set_num_threads(5)
    attnc.softmax(np.ones((300, 1000)))
    assert library.omp_get_max_threads() == before


def test_calls_at_the_same_time(isa, arrays):
    """Eight threads of Python, each with its own calls: every result has the bits it has alone."""
    big = inputs(np.random.default_rng(1), (1,), 4, 4, 150, 700, 32)
    calls = [lambda: attnc.attention(*arrays, causal=True, want=("lse", "weights")), lambda: attnc.attention(*big),
             lambda: attnc.attention(big[0][:, :, :1], *big[1:]), lambda: attnc.softmax(big[0] * 9),
             lambda: attnc.attention_scores(*arrays[:2]), lambda: attnc.attention(*big, num_threads=3)]
    wanted = [call() for call in calls]
    start = threading.Barrier(8)

    def work(n):
        start.wait()
        for i in range(40):
            k = (n + i) % len(calls)
            assert_same_bits(calls[k](), wanted[k])
        return n

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(work, range(8), timeout=120)) == list(range(8))
    assert attnc.get_num_threads() == taken(arrays), "the count of threads at work is back to nothing"


def test_threads_come_and_go(arrays):
    """Threads of Python that end take nothing of the pool with them."""
    wanted = attnc.attention(*arrays)
    for _ in range(30):
        found = []
        thread = threading.Thread(target=lambda found=found: found.append(attnc.attention(*arrays, num_threads=2)))
        thread.start()
        thread.join(20)
        assert_same_bits(found[0], wanted)


@pytest.mark.parametrize("name", _isa.available())
def test_small_stacks(python, name):
    """Threads with 64 KiB of stack are enough, as docs/platforms.md says: big arrays lie in scratch memory."""
    code = """
import os, threading, numpy as np, attnc
threading.stack_size(max(64 * 1024, os.sysconf("SC_THREAD_STACK_MIN")))
found = []
def work():
    for dtype in (np.float32, np.float64, np.float16):
        x = np.random.default_rng(0).standard_normal((2, 4, 130, 300)).astype(dtype)
        for n in (1, 2):
            options = dict(causal=True, softcap=3.0, num_threads=n)
            result = attnc.attention(x, x, x, want=("lse", "weights"), **options)
            attnc.attention_backward(x, x, x, x, result.output, result.lse, **options)
            attnc.attention(x[..., :1, :], x, x, num_threads=n)
            attnc.attention_scores(x, x, num_threads=n)
            attnc.softmax(x.reshape(-1), num_threads=n)
            weights = attnc.AttentionWeights(x, x, num_threads=n)
            found.append([weights.entropy(), weights.key_mass(), weights.topk(3)])
thread = threading.Thread(target=work)
thread.start(); thread.join()
print(len(found))
"""
    assert python(code, OMP_STACKSIZE="64K", ATTNC_ISA=name) == "6"


# Contexts: each thread and task has its own


def test_contexts_that_overlap_in_two_threads():
    """Enter A, enter B, leave A, leave B: each thread has its own number, and nothing is left behind."""
    default, first, second = attnc.get_num_threads(), attnc.threads(3), attnc.threads(5)
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
        def numbers():
            return one.submit(attnc.get_num_threads).result(20), other.submit(attnc.get_num_threads).result(20)

        assert numbers() == (default, default)
        one.submit(first.__enter__).result(20)
        other.submit(second.__enter__).result(20)
        assert numbers() == (3, 5) and attnc.get_num_threads() == default
        one.submit(first.__exit__, None, None, None).result(20)
        assert numbers() == (default, 5)
        other.submit(second.__exit__, None, None, None).result(20)
        assert numbers() == (default, default)


def test_the_default_of_the_process_reaches_all_but_contexts(arrays):
    with attnc.threads(3), ThreadPoolExecutor(1) as pool:      # a pool that is started inside
        attnc.set_num_threads(5)
        assert taken(arrays) == attnc.get_num_threads() == 3
        inherits = getattr(sys.flags, "thread_inherit_context", False)
        assert pool.submit(attnc.get_num_threads).result(20) == (3 if inherits else 5)
        with attnc.threads(None):
            assert attnc.get_num_threads() <= len(os.sched_getaffinity(0))
    assert taken(arrays) == attnc.get_num_threads() == 5


def test_contexts_of_tasks():
    """A task starts with the number of the one that made it, and changes its own alone."""
    default = attnc.get_num_threads()

    async def task(number, entered, leave):
        found = [attnc.get_num_threads()]
        with attnc.threads(number):
            entered.set()
            await leave.wait()
            found += attnc.get_num_threads(), await asyncio.to_thread(attnc.get_num_threads)
        return [*found, attnc.get_num_threads()]

    async def main():
        events = [asyncio.Event() for _ in range(4)]
        with attnc.threads(7):
            first = asyncio.create_task(task(3, events[0], events[1]))
            second = asyncio.create_task(task(5, events[2], events[3]))
            await events[0].wait()
            await events[2].wait()
            assert attnc.get_num_threads() == 7
        assert attnc.get_num_threads() == default
        events[1].set()
        assert await first == [7, 3, 3, 7]
        events[3].set()
        assert await second == [7, 5, 5, 7]

    asyncio.run(main())
    assert attnc.get_num_threads() == default


def inside(number):
    with attnc.threads(number):
        yield


def test_contexts_of_generators_are_left_in_any_order():
    default, generators = attnc.get_num_threads(), [inside(n) for n in (3, 5, 7)]
    for generator in generators:
        next(generator)
    for closed, left in ((1, 7), (2, 3), (0, default)):
        generators[closed].close()
        assert attnc.get_num_threads() == left


def test_a_generator_that_another_thread_closes():
    default, generator = attnc.get_num_threads(), inside(3)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result(20)     # starts the thread
        next(generator)
        with attnc.threads(5):
            pool.submit(generator.close).result(20)
            assert pool.submit(attnc.get_num_threads).result(20) == default and attnc.get_num_threads() == 5
    assert attnc.get_num_threads() == default


def test_one_context_entered_twice():
    default, context = attnc.get_num_threads(), attnc.threads(3)
    with context:
        with context, attnc.threads(5), context:
            assert attnc.get_num_threads() == 3
        assert attnc.get_num_threads() == 3
    assert attnc.get_num_threads() == default
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result(20)
        with context:       # by two threads at the same time
            pool.submit(context.__enter__).result(20)
            pool.submit(context.__exit__, None, None, None).result(20)
            assert attnc.get_num_threads() == 3 and pool.submit(attnc.get_num_threads).result(20) == default
    assert attnc.get_num_threads() == default


def test_a_context_as_a_decorator():
    @attnc.threads(3)
    def number(again):
        return number(False) if again else attnc.get_num_threads()

    default = attnc.get_num_threads()
    assert number(True) == 3 and attnc.get_num_threads() == default
