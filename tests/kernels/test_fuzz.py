"""Seeded random calls: the answer of the reference within tolerance, or the same kind of error; with a reproduction."""

import fuzz
import numpy as np
import pytest
from checking import DTYPES, WANT, check_attention, check_scores, dtype_of, farthest, inputs, kernels, largest
from layouts import drawn
from slow import NAMES, some_option

import attnc
from attnc import _isa, reference
from attnc.testing import assert_within

pytestmark = pytest.mark.kernels
CASES, MORE_CASES = 1000, 100_000


def lengths(random):
    """Mostly short; at times long enough for several blocks or a split."""
    kind = random.random()
    if kind < 0.85:
        return int(random.integers(0, 14)), int(random.integers(0, 40))
    if kind < 0.95:
        return int(random.integers(10, 140)), int(random.integers(30, 300))
    return int(random.integers(1, 4)), int(random.integers(500, 2500))


def one(seed):
    """One random call; raises AssertionError if attnc and its reference disagree."""
    random = np.random.default_rng(seed)
    dtype = DTYPES[random.integers(4)]
    kv_heads, group = int(random.integers(1, 4)), int(random.integers(1, 4))
    batch = [(), (1,), (2,), (2, 2), (0,)][random.choice(5, p=[0.3, 0.2, 0.3, 0.15, 0.05])]
    q_len, kv_len = lengths(random)
    if dtype == "float64":
        kv_len = min(kv_len, 300)
    dims = [int(random.integers(0, 70)) if random.random() < 0.8 else int(random.integers(70, 260)) for _ in "kv"]
    arrays = inputs(random, batch, kv_heads * group, kv_heads, q_len, kv_len, *dims, dtype=dtype)
    if random.random() < 0.1:                       # mixed dtypes
        i, other = random.integers(3), DTYPES[random.integers(3 if dtype != "float64" else 2)]
        arrays[i] = arrays[i].astype(dtype_of(other))
    options = {}
    for name in NAMES:
        if random.random() < 0.2:
            options |= some_option(name, random, batch, kv_heads * group, q_len, kv_len, dims[0])
    arrays = [drawn(x, random) for x in arrays]
    if random.random() < 0.2:
        arrays, options = [x.swapaxes(-2, -3) for x in arrays], options | {"layout": "bnhd"}
    kind = random.random()
    try:
        reference.attention(*arrays, want=WANT, **options)
    except (TypeError, ValueError) as error:
        with pytest.raises(type(error)) as raised:
            attnc.attention(*arrays, want=WANT, **options)
        assert type(raised.value) is type(error) and str(raised.value) == str(error)
        return
    threads = int(random.integers(1, 5))
    if kind < 0.7:
        check_attention(*arrays, num_threads=threads, **options)
    elif kind < 0.8:
        check_scores(*arrays[:2], ("raw", "scaled", "capped", "masked")[random.integers(4)], **options)
    elif kind < 0.9:
        exact = reference.attention(*(x.astype(np.float64) for x in arrays), want="weights", **options).weights
        rows = exact.size // max(exact.shape[-1], 1)
        honest = farthest(lambda: reference.attention_weights(*arrays[:2], **options), exact, rows)
        if dtype != "float64" and honest.shape == exact.shape:
            got = attnc.attention_weights(*arrays[:2], num_threads=threads, **options)
            assert_within(got, exact, honest, name="weights")
    else:
        x = arrays[0]
        axis = int(random.integers(x.ndim))
        where = random.random(x.shape) < 0.7 if random.random() < 0.5 else None
        for function in ("softmax", "log_softmax"):
            honest = getattr(reference, function)(x, axis, where=where)
            exact = getattr(reference, function)(x.astype(np.float64), axis, where=where)
            scale = max(1.0, largest(exact)) * (1 if dtype != "float64" else 2)   # float64: the twin errs as far
            got = getattr(attnc, function)(x, axis, where=where, num_threads=threads)
            assert_within(got, exact, honest, scale=scale)


def run(first, count, isas):
    for seed in range(first, first + count):
        isa = isas[seed % len(isas)]
        _isa.use(isa)
        try:
            with np.errstate(all="ignore"):
                one(seed)
        except BaseException:
            print(f"\nreproduce: ATTNC_ISA={isa} PYTHONPATH=tests:tests/kernels "
                  f"python -c 'import test_fuzz; test_fuzz.one({seed})'")
            raise


@pytest.fixture
def isas():
    """The instruction sets that run here; the one in use is put back at the end."""
    with kernels(_isa.isa()):
        yield _isa.available()


@pytest.mark.parametrize("part", range(4))
def test_fuzz(part, seed, isas):
    run(10**6 * seed + part * CASES // 4, CASES // 4, isas)


@pytest.mark.more
@pytest.mark.parametrize("part", range(20))
def test_fuzz_more(part, seed, isas):
    run(10**6 * seed + 10**5 + part * MORE_CASES // 20, MORE_CASES // 20, isas)


# Every public function, garbage too: tests/fuzz.py

FUNCTION_CASES, MORE_FUNCTION_CASES = 4000, 100_000


@pytest.mark.parametrize("part", range(2))
def test_fuzz_functions(part, seed, isas):
    count = FUNCTION_CASES // 2
    assert fuzz.run(10**6 * seed + part * count, count) == []


@pytest.mark.more
@pytest.mark.parametrize("part", range(10))
def test_fuzz_functions_more(part, seed, isas):
    count = MORE_FUNCTION_CASES // 10
    assert fuzz.run(10**6 * seed + 10**5 + part * count, count) == []


def test_the_cases_are_of_every_kind_right_and_wrong():
    """Half of the cases end in an error; each function and method has right ones."""
    right, wrong = set(), 0
    for seed in range(1000):
        kind, call, _ = fuzz.case(seed)
        result, error = fuzz.answer(call, attnc)
        wrong += error is not None
        if error is None and fuzz.arrays_of(result):
            right.add(kind)
    assert 250 < wrong < 750
    assert right >= set(attnc.reference.__all__) | {"AttentionState"}
