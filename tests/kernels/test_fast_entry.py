"""The fast entries of calls without options: the bits of the checked way, and None for all that needs the checks."""

import numpy as np
import pytest
from checking import assert_same_bits

import attnc
from attnc import _isa

SHAPES = {      # query, key, value
    "2-D": ((16, 24), (9, 24), (9, 24)),
    "3-D": ((4, 16, 32), (4, 16, 32), (4, 16, 32)),
    "groups": ((2, 6, 5, 16), (2, 3, 70, 16), (2, 3, 70, 16)),
    "batch axes": ((2, 1, 3, 4, 40, 8), (2, 1, 3, 2, 50, 8), (2, 1, 3, 2, 50, 12)),
    "long": ((3, 100, 64), (3, 600, 64), (3, 600, 64)),
    "no rows": ((4, 0, 8), (4, 5, 8), (4, 5, 8)),
    "no keys": ((4, 3, 8), (4, 0, 8), (4, 0, 6)),
    "no depth": ((4, 3, 0), (4, 5, 0), (4, 5, 6)),
    "no batch": ((0, 4, 3, 8), (0, 4, 5, 8), (0, 4, 5, 8)),
}


def fast(arrays, causal=False, out=None, num_threads=1):
    """The result of the fast entry, or None."""
    return _isa.kernels.fast_attention(*arrays, causal, out, num_threads, True)


def draw(shapes, dtype="float32"):
    random = np.random.default_rng(0)
    return [random.standard_normal(shape).astype(dtype) for shape in shapes]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_the_bits_of_the_checked_way(isa, shapes, dtype, causal):
    arrays = draw(shapes, dtype)
    wanted = attnc.attention(*arrays, causal=causal, want="lse").output
    for threads in (1, 2):
        short = fast(arrays, causal, None, threads)
        assert short.flags.c_contiguous and short.dtype == wanted.dtype and short.shape == wanted.shape
        assert_same_bits(short, wanted)
    out = np.full_like(wanted, np.nan)
    assert fast(arrays, causal, out) is out
    assert_same_bits(out, wanted)
    assert_same_bits(attnc.attention(*arrays, causal=causal, num_threads=1), wanted)


def test_strides(isa):
    query, key, value = (np.repeat(x, 2, 2)[:, ::-1, ::2] for x in draw(SHAPES["long"]))
    assert_same_bits(fast((query, key, value)), attnc.attention(query, key, value, want="lse").output)


def test_what_is_left_to_the_checks(isa):
    query, key, value = draw(SHAPES["groups"])
    arrays = query, key, value
    assert fast(arrays) is not None
    both = np.zeros((2, *query.shape), np.float32)
    for odd in (
            (query[0], key, value), (query, key[:1], value), (query, key, value[:1]), (query[:, :5], key, value),
            (query[..., :8], key, value), (query, key[..., 1:, :], value), (query, key[:, :2], value),
            (query.astype("f8"), key, value), tuple(x.astype("i4") for x in arrays),
            tuple(x.astype(">f4") for x in arrays), (query.tolist(), key, value), (query, None, value),
            (query, key, np.ma.array(value)),
            (query[0, 0, 0], key[0, 0, 0], value[0, 0, 0]), (query[:, :0], key[:, :0], value[:, :0])):
        assert fast(odd) is None
    for causal in (1, np.True_, None, "yes"):
        assert fast(arrays, causal) is None
    for threads in (0, -1, 4097, True, 2.0, np.int64(2), "2", None):
        assert fast(arrays, num_threads=threads) is None
    read_only = np.empty_like(query)
    read_only.flags.writeable = False
    for out in (query, both[0, :1], both[0].astype("f8"), both[..., ::2], read_only, both.tolist(),
                np.ma.array(both[0]), both[0].swapaxes(0, 1), both[0, ..., ::-1]):
        assert fast(arrays, out=out) is None
    assert fast((both[1], key, value), out=both[0]) is not None
    shifted = both.reshape(-1)[1:query.size + 1].reshape(query.shape)
    assert fast((both[0], key, value), out=shifted) is None


def test_errors_are_those_of_the_long_way():
    query, key, value = draw(SHAPES["3-D"])
    with pytest.raises(ValueError, match="out shares memory with query"):
        attnc.attention(query, key, value, out=query)
    with pytest.raises(ValueError, match="key has head_dim 31"):
        attnc.attention(query, key[..., 1:], value)
    with pytest.raises(TypeError, match="causal must be True or False"):
        attnc.attention(query, key, value, causal=1)


def fast_rows(x, axis=-1, out=None, logarithm=False, num_threads=1):
    """The softmax of the fast entry, or None."""
    return _isa.kernels.fast_softmax(x, axis, out, logarithm, num_threads, True)


@pytest.mark.parametrize("function", ["softmax", "log_softmax"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize("shape", [(7,), (40, 3), (9, 64), (3, 70, 40), (5, 1, 33, 1), (64, 2100), (2, 0, 3), (3, 0)])
def test_the_softmax_of_the_checked_way(isa, shape, dtype, function):
    (x,) = draw([shape], dtype)
    for axis in range(-x.ndim, x.ndim):
        wanted = getattr(attnc, function)(x, axis, where=np.True_)
        for threads in (1, 2):
            short = fast_rows(x, axis, None, function == "log_softmax", threads)
            assert short.flags.c_contiguous and short.dtype == wanted.dtype and short.shape == wanted.shape
            assert_same_bits(short, wanted)
        for out in (np.full_like(x, np.nan), x.copy()):
            given = out if np.array_equal(out, x) else x
            assert fast_rows(given, axis, out, function == "log_softmax") is out
            assert_same_bits(out, wanted)


def test_which_softmax_is_left_to_the_checks(isa):
    both = np.zeros((2, 6, 8), np.float32)
    x, other = both
    assert fast_rows(x) is not None and fast_rows(x, out=x) is x and fast_rows(x, out=other) is other
    for odd in (x[:, ::2], x.T, x[::-1], x.astype(">f4"), x.astype("i4"), x.tolist(), None, np.ma.array(x),
                x.astype(bool), np.float32(1), np.zeros((), np.float32)):
        assert fast_rows(odd) is None
    for axis in (2, -3, 2**70, None, (0,), 1.0, True, np.int64(1), "1"):
        assert fast_rows(x, axis) is None
    for threads in (0, -1, 4097, True, 2.0, np.int64(2), "2", None):
        assert fast_rows(x, num_threads=threads) is None
    read_only = np.empty_like(x)
    read_only.flags.writeable = False
    shifted = both.reshape(-1)[1:x.size + 1].reshape(x.shape)
    for out in (other[:5], other.astype("f8"), other.T, other[..., ::-1], read_only, other.tolist(), np.ma.array(other),
                shifted, x.reshape(8, 6), other[None]):
        assert fast_rows(x, out=out) is None
    with pytest.raises(ValueError, match="out shares memory with x"):
        attnc.softmax(x, out=shifted)
