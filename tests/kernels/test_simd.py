"""The primitives: exp2 and tanh against wider arithmetic by their ulp bound, every 16-bit pattern, every rounding.

Reference values come from long double, with 11 bits more than float64 where the platform has them: its own error is
below 1/1000 ulp of float64 and nothing beside a ulp of float32.
"""

import ml_dtypes
import numpy as np
import pytest

import attnc
from attnc import _isa

# Where 2**r lies below 1 its ulp is eps/2. The last addition rounds by 1/2 ulp. Before it, p * r is at most 0.293: the
# rounding of p and its last step carry about 0.293 * 1.3 ulp into it, together below 1. Without fma the product rounds
# once more, by a quarter of an ulp.
EXP2_ULP = {"avx512bf16": 1.0, "avx512": 1.0, "avx2": 1.0, "neon": 1.0, "base": 1.25}
# e/(e+2): e has the error of one rounded fma (0.5 ulp) and of the polynomial's product (about 1 ulp, twice: argument
# and coefficient), which e/(e+2) passes on in full for small e; the addition and the division round once each.
TANH_ULP = 4.0
WIDE = pytest.mark.skipif(np.finfo(np.longdouble).nmant < 63, reason="long double is no wider than float64 here")


def errors_in_ulp(got, exact):
    """Error of each element in units of the last place of the exact result."""
    ulp = np.spacing(np.abs(exact.astype(got.dtype)))
    return np.abs(got.astype(exact.dtype) - exact) / ulp.astype(exact.dtype)


def apply(name, x):
    x = x.copy()
    _isa.kernels.apply(name, x)
    return x


def exp2_of_patterns(step, chunk=1 << 22, start=0):
    """The largest error of exp2 over the float32 bit patterns in [-126, -0]."""
    first, last = 0x80000000, int(np.float32(-126).view(np.uint32))
    worst = 0.0
    for low in range(first + start, last + 1, step * chunk):
        x = np.arange(low, min(low + step * chunk, last + 1), step, dtype=np.uint32).view(np.float32)
        worst = max(worst, float(errors_in_ulp(apply("exp2", x), np.exp2(x.astype(np.float64))).max()))
    return worst


def test_exp2_float32(isa, seed):
    """A sample of more than a million patterns, another one for each seed, and all near the integers and halves."""
    assert exp2_of_patterns(1021, start=seed % 1021) <= EXP2_ULP[isa]
    middles = (np.arange(-252, 1, dtype=np.float32) / 2)[:, None]
    near = (middles.view(np.uint32).astype(np.int64) + np.arange(-50, 51)).astype(np.uint32).view(np.float32).ravel()
    near = near[(near >= -126) & (near <= 0)]
    assert errors_in_ulp(apply("exp2", near), np.exp2(near.astype(np.float64))).max() <= EXP2_ULP[isa]


@pytest.mark.more
def test_exp2_float32_every_pattern(isa):
    assert exp2_of_patterns(1) <= EXP2_ULP[isa]


@WIDE
def test_exp2_float64(isa, seed):
    random = np.random.default_rng(seed)
    x = np.concatenate([-random.random(400_000) * 1022, -random.random(200_000),
                        -2.0 ** random.uniform(-60, 0, 100_000), np.arange(-2044, 1) / 2])
    assert errors_in_ulp(apply("exp2", x), np.exp2(x.astype(np.longdouble))).max() <= EXP2_ULP[isa]


@pytest.mark.parametrize("dtype, least", [(np.float32, -126), (np.float64, -1022)])
def test_exp2_at_the_ends(isa, dtype, least):
    below = np.nextafter(dtype(least), dtype(-np.inf))
    x = np.array([0, -0.0, -1, -2, least, below, least - 1, -1e30, -np.inf, np.nan], dtype)
    got = apply("exp2", x)
    assert got[:5].tolist() == [1, 1, 0.5, 0.25, 2.0**least]
    assert got[5:9].tolist() == [0, 0, 0, 0] and not np.signbit(got[5:9]).any()
    assert np.isnan(got[9])
    rising = apply("exp2", np.linspace(least, 0, 100_001, dtype=dtype))
    assert (np.diff(rising) >= 0).all()


@pytest.mark.parametrize("dtype", ["float32", pytest.param("float64", marks=WIDE)])
def test_tanh(isa, dtype, seed):
    random = np.random.default_rng(seed)
    x = np.concatenate([random.uniform(-25, 25, 300_000), 2.0 ** random.uniform(-100, 7, 300_000),
                        -(2.0 ** random.uniform(-4, 2, 300_000))])
    x = x.astype(dtype)
    exact = np.tanh(x.astype(np.float64 if dtype == "float32" else np.longdouble))
    worst = errors_in_ulp(apply("tanh", x), exact).max()
    assert worst <= TANH_ULP, worst
    got = apply("tanh", x)
    assert (np.abs(got) <= 1).all() and np.array_equal(np.signbit(got), np.signbit(x))
    ends = apply("tanh", np.array([0.0, -0.0, np.inf, -np.inf, 1e30, np.nan], dtype))
    assert ends[:5].tolist() == [0, 0, 1, -1, 1] and np.signbit(ends[1]) and np.isnan(ends[5])


HALVES = [(2, np.float16), (3, ml_dtypes.bfloat16)]


def every_pattern(dtype):
    """All 16-bit numbers as float32; where NumPy has an instruction for it (Arm), a signalling NaN is invalid."""
    with np.errstate(invalid="ignore"):
        return np.arange(65536, dtype=np.uint16).view(dtype).astype(np.float32)


@pytest.mark.parametrize("code, dtype", HALVES, ids=["float16", "bfloat16"])
def test_widening_of_every_pattern(isa, code, dtype):
    bits = np.arange(65536, dtype=np.uint16)
    got = np.empty(65536, np.float32)
    _isa.kernels.convert(bits, got, code, True)
    wanted = every_pattern(dtype)
    nan = np.isnan(wanted)
    assert nan.any() and np.isnan(got[nan]).all()
    np.testing.assert_array_equal(got[~nan].view(np.uint32), wanted[~nan].view(np.uint32))


@pytest.mark.parametrize("code, dtype", HALVES, ids=["float16", "bfloat16"])
def test_rounding(isa, code, dtype, seed):
    """All halves, all midpoints of neighbours with the floats beside them, and floats of every size."""
    halves = every_pattern(dtype)
    finite = np.sort(halves[np.isfinite(halves)])
    middle = ((finite[1:].astype(np.float64) + finite[:-1]) / 2).astype(np.float32)      # exact in float32
    top = np.float32(65520 if dtype == np.float16 else 3.3961775e38)                      # where rounding reaches inf
    floats = np.random.default_rng(seed).integers(0, 2**32, 400_000, dtype=np.uint32).view(np.float32)
    beside = [np.nextafter(y, np.float32(s)) for y in (middle, finite) for s in (np.inf, -np.inf)]
    ends = [top, -top, np.nextafter(top, np.float32(0)), np.nextafter(top, np.float32(np.inf))]
    x = np.concatenate([halves, middle, *beside, ends, floats]).astype(np.float32)
    got = np.empty(x.size, np.uint16)
    _isa.kernels.convert(x, got, code, False)
    with np.errstate(all="ignore"):
        wanted = x.astype(dtype)
    nan = np.isnan(x)
    assert np.isnan(got.view(dtype)[nan]).all()
    np.testing.assert_array_equal(got[~nan], wanted[~nan].view(np.uint16))


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=["float16", "bfloat16"])
def test_rows_are_rounded_as_by_the_conversion(isa, dtype, seed):
    """Contiguous rows take vectors, strided ones do not: one answer."""
    x = np.random.default_rng(seed).standard_normal((1, 40, 23)).astype(dtype)
    plain = attnc.attention(x, x, x, num_threads=1)
    out = np.empty((1, 40, 46), dtype)[..., ::2]
    attnc.attention(x, x, x, out=out)
    assert plain.tobytes() == out.tobytes()
