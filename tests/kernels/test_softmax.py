"""Stand-alone softmax and log-softmax against their twins: axes, dtypes, strides, where, odd rows."""

import numpy as np
import pytest
from checking import DTYPES, dtype_of, dtypes_in_turn, largest, normal

import attnc
from attnc import reference
from attnc.testing import assert_within

FUNCTIONS = ("softmax", "log_softmax")


def check(function, x, axis=-1, where=None, **arguments):
    """Within tolerance of the twin in a wider precision."""
    wide = x.astype(np.longdouble if x.dtype == np.float64 else np.float64)
    honest = getattr(reference, function)(x, axis, where=where)
    exact = exactly(function, wide, axis, where)
    got = getattr(attnc, function)(x, axis, where=where, **arguments)
    assert_within(got, exact, honest, scale=1.0 if function == "softmax" else max(1.0, largest(exact)), name=function)
    return got


def exactly(function, x, axis, where):
    """The definition, in the precision of `x`."""
    keep = np.broadcast_to(True if where is None else where, x.shape)
    with np.errstate(all="ignore"):
        top = np.where(keep, x, -np.inf).max(axis, keepdims=True, initial=-np.inf)
        total = np.where(keep, np.exp(x - top), 0).sum(axis, keepdims=True)
        if function == "softmax":
            return np.where(keep, np.exp(x - top) / total, 0)
        return np.where(keep, x - top - np.log(total), -np.inf)


@pytest.mark.parametrize("function, n, dtype", dtypes_in_turn(
    FUNCTIONS, [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 63, 65, 100, 1000, 4095, 4096, 4097, 9000]))
def test_lengths(isa, function, dtype, n, seed):
    random = np.random.default_rng([seed, n])
    x = normal(random, (3, n), dtype) * dtype_of(dtype).type(4)
    check(function, x)
    check(function, x, where=random.random((3, n)) < 0.5)
    check(function, np.sort(x))                 # the largest element comes last, so every part rescales
    check(function, np.sort(x)[:, ::-1])


@pytest.mark.parametrize("axis", [0, 1, 2, -1, -3, (0, 2), (1, 0), (0, 1, 2), None, ()], ids=str)
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_axes(isa, function, axis, dtype, seed):
    random = np.random.default_rng(seed)
    x = normal(random, (5, 19, 6), dtype)
    axis_of = axis if axis is not None else (0, 1, 2)
    for where in (None, random.random((19, 1)) < 0.5, np.array(True)):
        got = check(function, x, axis_of, where=where)
        assert np.array_equal(getattr(attnc, function)(x, axis, where=where), got)
    for view in (x.T, x[::-1, ::2], np.asfortranarray(x), x[:, None], np.broadcast_to(x[:1], x.shape)):
        if view.ndim == 3:
            check(function, view, axis_of)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_out(isa, function, seed):
    random = np.random.default_rng(seed)
    for axis in (-1, 0, (0, 2), None):
        x = normal(random, (4, 33, 5))
        wanted = getattr(attnc, function)(x, axis)
        strided, turned = np.full((4, 33, 10), 7, np.float32)[..., ::2], np.empty((5, 33, 4), np.float32).T
        for out in (np.empty_like(x), strided, turned):
            assert getattr(attnc, function)(x, axis, out=out) is out
            np.testing.assert_array_equal(out, wanted)
        assert getattr(attnc, function)(x, axis, out=x) is x
        np.testing.assert_array_equal(x, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [2, 40, 5000])
def test_odd_rows(isa, dtype, n):
    inf, nan = np.inf, np.nan
    x = np.zeros((7, n), dtype_of(dtype))
    x[0] = -inf
    x[1, n // 2], x[2, n - 1], x[3, 0], x[4, n - 1] = inf, nan, -inf, -inf
    x[5] = np.finfo(np.float16).min
    x[6, 0], x[6, n - 1] = inf, nan
    with np.errstate(all="raise"):
        got = {function: check(function, x) for function in FUNCTIONS}
    assert np.isnan(got["softmax"][[0, 1, 2, 6]].astype(float)).all()
    assert np.isfinite(got["softmax"][[3, 4, 5]].astype(float)).all()
    hidden = np.isfinite(x.astype(float))
    for function, nothing in (("softmax", 0), ("log_softmax", -inf)):
        got = check(function, x, where=hidden)
        assert (got[~hidden].astype(float) == nothing).all() and (got[0].astype(float) == nothing).all()
        check(function, x, where=np.zeros_like(hidden))


def test_huge_and_tiny(isa):
    for dtype, top in ((np.float32, 3e38), (np.float64, 1e308)):
        assert attnc.softmax(np.array([1, 1, top], dtype)).tolist() == [0, 0, 1]
        assert attnc.softmax(np.array([-top, 0, top], dtype)).tolist() == [0, 0, 1]
        check("softmax", np.array([-1000, 0, 1e-30, -80], dtype))
        check("log_softmax", np.array([-1000, 0, 1e-30, -80], dtype))
    check("softmax", np.linspace(-90, 0, 400, dtype=np.float32))
    np.testing.assert_array_equal(attnc.softmax(np.full((2, 64), 1e4, np.float16)), np.float16(1 / 64))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_empty_scalar_and_integer(isa, function):
    twin, fast = getattr(reference, function), getattr(attnc, function)
    for x, axis in (((np.zeros((0, 3))), -1), (np.zeros((3, 0)), -1), (np.zeros((3, 0)), 0), (np.float32(2), None),
                    (np.zeros((2, 0, 3)), (0, 2)), ([1, 2], -1), ([[True, False]], None), (np.float64(2), ())):
        got, wanted = fast(x, axis), twin(x, axis)
        assert got.dtype == wanted.dtype and got.shape == wanted.shape
        np.testing.assert_allclose(got, wanted, rtol=1e-14)


def test_logarithms(isa):
    """Of n equal elements each has the weight 1/n: within two ulp, alone, side by side and in columns."""
    for n in (*range(1, 300), 4097, 70001):
        for got in attnc.log_softmax(np.zeros(n)), attnc.log_softmax(np.zeros((n, 5)), 0):
            assert (abs(got + np.log(n)) <= 2 * np.spacing(np.log(n))).all() and (got == got.flat[0]).all()
        same = attnc.log_softmax(np.zeros((6, n), np.float32))
        assert (abs(same + np.log(n)) <= 2 * np.spacing(np.float32(np.log(n)))).all() and (same == same[0, 0]).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 3, 16, 257, 17000])
def test_columns_have_the_bits_of_rows(isa, dtype, n, seed):
    """Rows whose elements lie apart are worked on side by side: whole strips, the rest of one, and a few."""
    random = np.random.default_rng([seed, n])
    for columns in (2, 37, 150) if n < 1000 else (18,):
        x = normal(random, (2, n, columns), dtype) * dtype_of(dtype).type(4)
        where = random.random((n, columns)) < 0.7
        odd = x.copy()
        odd[0, n // 2, 0], odd[1, 0, -1], odd[1, :, 0] = np.nan, np.inf, -np.inf
        for function in FUNCTIONS:
            fast = getattr(attnc, function)
            for array, keep in ((x, None), (x, where), (odd, None), (odd, where[:, :1])):
                rows = np.ascontiguousarray(array.swapaxes(1, 2))
                wanted = fast(rows, where=None if keep is None else keep.swapaxes(0, 1)).swapaxes(1, 2)
                np.testing.assert_array_equal(fast(array, 1, where=keep).astype(float), wanted.astype(float))
            wanted = fast(x, 1)
            assert fast(x, 1, out=x) is x and x.tobytes() == wanted.tobytes()


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_side_by_side_and_in_turn_have_the_bits_of_one_alone(isa, function, dtype, seed):
    """Short rows are taken four at a time, longer ones while the one before is written, the longest alone."""
    random, fast = np.random.default_rng(seed), getattr(attnc, function)
    for n in (16, 37, 64, 129, 256, 300, 511, 1000, 1024, 1030, 2100):
        x = normal(random, (11, n), dtype) * dtype_of(dtype).type(6)
        x[3, n // 2], x[5], x[6, 1] = np.nan, -np.inf, np.inf
        wanted = np.stack([fast(row) for row in x])
        strided = np.empty((11, 2 * n), x.dtype)[:, ::2]
        for got in (fast(x), fast(x[::-1])[::-1], fast(x[:7]), fast(x[2:]), fast(x, out=strided), fast(x, out=x)):
            first = 2 if len(got) == 9 else 0
            np.testing.assert_array_equal(got.astype(float), wanted[first:first + len(got)].astype(float))


def test_subnormal_results_do_not_depend_on_strides(isa):
    x = np.zeros((40, 40), dtype_of("bfloat16"))
    x[:, ::3] = np.linspace(-88, -84, 40)[:, None]
    wanted = np.stack([attnc.softmax(row) for row in x]).tobytes()
    assert attnc.softmax(x).tobytes() == wanted and attnc.softmax(np.asfortranarray(x)).tobytes() == wanted
    out = np.empty((40, 80), x.dtype)[:, ::2]
    assert attnc.softmax(x, out=out).tobytes() == wanted
    assert attnc.softmax(x, where=np.True_).tobytes() == wanted


@pytest.mark.parametrize("dtype", DTYPES)
def test_columns_out_of_cache_have_the_bits_of_rows(isa, dtype, seed):
    """They are written past the caches, wherever the array begins, a strip while the next is read."""
    x = normal(np.random.default_rng(seed), (33, 2**19 // dtype_of(dtype).itemsize), dtype)
    wanted = attnc.softmax(np.ascontiguousarray(x.T), num_threads=1).T.astype(x.dtype, order="C").tobytes()
    buffer = np.empty(x.nbytes + 128, np.uint8)
    for offset in (0, 16, 24, 1):
        out = buffer[-buffer.ctypes.data % 64 + offset:][:x.nbytes].view(x.dtype).reshape(x.shape)
        assert attnc.softmax(x, 0, out=out, num_threads=1 + offset % 3).tobytes() == wanted
    assert attnc.softmax(x, 0, out=x, num_threads=1).tobytes() == wanted


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_out_of_cache_have_the_bits_of_a_few(isa, function, dtype, seed):
    """They are written past the caches, in whole lines wherever the array begins, the ends of a row apart."""
    random, fast = np.random.default_rng(seed), getattr(attnc, function)
    for n, offset, gap in ((64, 0, 0), (67, 16, 0), (200, 24, 8), (1000, 32, 1), (1000, 1, 0), (5000, 16, 0),
                           (40000, 40, 0)):
        few = normal(random, (11, n), dtype)
        wanted, size = fast(few), few.dtype.itemsize
        x = np.tile(few, (2**24 // (11 * n * size) + 1, 1))
        buffer = np.full(len(x) * (n + gap) * size + 128, 7, np.uint8)
        start = -buffer.ctypes.data % 64 + offset
        out = np.ndarray(x.shape, x.dtype, buffer, start, ((n + gap) * size, size))
        assert fast(x, out=out, num_threads=1 + n % 3) is out
        assert all(out[i:i + 11].tobytes() == wanted.tobytes() for i in range(0, len(x), 11))
        assert (buffer[:start] == 7).all() and (buffer[start + len(x) * (n + gap) * size:] == 7).all()


def test_rows_have_the_same_bits_for_any_number_of_threads_and_mates(isa, seed):
    x = normal(np.random.default_rng(seed), (300, 1001))
    for function in FUNCTIONS:
        wanted = getattr(attnc, function)(x, num_threads=1)
        for threads in (2, 3, 7):
            assert getattr(attnc, function)(x, num_threads=threads).tobytes() == wanted.tobytes()
        assert getattr(attnc, function)(x[17]).tobytes() == wanted[17].tobytes()
        assert getattr(attnc, function)(np.asfortranarray(x)).tobytes() == wanted.tobytes()
        buffer = np.zeros(4 * x.size + 1, np.uint8)[1:].view(np.float32).reshape(x.shape)
        buffer[...] = x
        assert not buffer.flags.aligned and getattr(attnc, function)(buffer).tobytes() == wanted.tobytes()
        swapped = x.astype(x.dtype.newbyteorder())
        assert getattr(attnc, function)(swapped).tobytes() == wanted.tobytes()


@pytest.mark.parametrize("dtype", ["float64", "float16"])
def test_columns_in_front_of_a_line_may_be_more_than_a_strip(isa, dtype):
    """Written past the scratch they end the process."""
    memory = np.zeros(4096, np.uint8)
    for start in range(-memory.ctypes.data % 64, 128, 2 if dtype == "float16" else 8):
        for n in (5, 9, 40):
            out = memory[start:start + n * np.dtype(dtype).itemsize].view(dtype)
            for _ in range(20):
                assert (attnc.softmax(np.ones(n, dtype), (), out=out) == 1).all()
