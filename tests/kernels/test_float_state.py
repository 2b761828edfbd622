"""The floating-point state of the caller: its control word and flags change no result and are left as they were."""

import ctypes
import platform
import warnings
from collections import namedtuple

import numpy as np
import pytest
from calls import all_calls, arrays_of
from checking import assert_same_bits, inputs

import attnc

# Bits of the flags, words of fenv_t with control and flags, flush to zero, rounding up and to zero. The inexact flag is
# raised by any division in Python, such as that of the default scale.
State = namedtuple("State", "invalid divide overflow underflow inexact control flags flush up zero")
STATES = {"x86_64": State(1, 4, 8, 16, 32, 7, 7, 0x8040, 0x4000, 0x6000),
          "aarch64": State(1, 2, 4, 8, 16, 0, 1, 1 << 24, 1 << 22, 3 << 22)}
STATE = STATES.get(platform.machine())
pytestmark = [pytest.mark.kernels, pytest.mark.skipif(
    STATE is None or platform.libc_ver()[0] != "glibc", reason="the layout of the state is not known here")]


def test_no_flag_is_left_and_no_warning_given(isa):
    """Masked places, -inf, underflow and lanes behind the end of a row are computed on, and must not show."""
    libm = ctypes.CDLL("libm.so.6")
    forbidden = STATE.invalid | STATE.divide | STATE.overflow | STATE.underflow
    random = np.random.default_rng(0)
    for q_len, kv_len, dim in ((1, 1, 1), (3, 33, 5), (7, 40, 40), (70, 65, 16), (2, 3000, 8)):
        query, key, value = inputs(random, (1,), 2, 2, q_len, kv_len, dim)
        bias = np.where(random.random((q_len, kv_len)) < 0.5, -np.inf, -200 * random.random((q_len, kv_len)))
        large = np.sign(value) * np.float32(3e38)
        with warnings.catch_warnings(), np.errstate(all="raise"):
            warnings.simplefilter("error")
            libm.feclearexcept(forbidden)
            attnc.attention(query, key, value, bias=bias, causal=True, want=("lse", "weights"), num_threads=1)
            attnc.attention(query, key, large, softcap=0.1)
            attnc.softmax(np.full((3, 3), -np.inf))
            attnc.log_softmax(query * np.float32(1e20))
            assert libm.fetestexcept(forbidden) == 0


def environment(libm, changed=None):
    """The floating-point environment of this thread; with `changed` it is set to that first."""
    words = (ctypes.c_uint32 * 8)()
    if changed is not None:
        libm.fesetenv(changed)
    libm.fegetenv(words)
    return words


@pytest.mark.parametrize("modes", [("flush",), ("up",), ("zero",), ("flush", "zero")], ids="-".join)
@pytest.mark.parametrize("threads", [1, 2])
def test_the_callers_control_word_changes_no_bit_and_stays(isa, modes, threads):
    random = np.random.default_rng(0)
    query, key, value = inputs(random, (1,), 4, 2, 80, 300, 16)
    value, steep = value * np.float32(1e-40), query * 30
    calls = (lambda: attnc.attention(query, key, value, want=("lse", "weights"), num_threads=threads),
             lambda: attnc.attention(query[:, :, :1], key, value, num_threads=threads),
             lambda: attnc.softmax(steep, num_threads=threads),
             lambda: attnc.weighted_sum(query[..., :5], value[:, :, :5], num_threads=threads))
    wanted = [call() for call in calls]
    assert wanted[0].output.any()
    libm = ctypes.CDLL("libm.so.6")
    before, odd = environment(libm), environment(libm)
    odd[STATE.flags] &= ~(STATE.invalid | STATE.divide | STATE.overflow | STATE.underflow | STATE.inexact)
    for mode in modes:
        odd[STATE.control] |= getattr(STATE, mode)
    try:
        for call, right in zip(calls, wanted, strict=True):
            environment(libm, odd)
            got = call()
            after = environment(libm)
            environment(libm, before)
            for word in (STATE.control, STATE.flags):
                assert (after[word] ^ odd[word]) & ~STATE.inexact == 0, "control word and flags as they were"
            assert_same_bits(got, right)
    finally:
        environment(libm, before)


def test_every_call_where_subnormal_numbers_are_flushed():
    """What NumPy adds up itself may lose subnormal sums, no more."""
    libm = ctypes.CDLL("libm.so.6")
    before, odd = environment(libm), environment(libm)
    odd[STATE.control] |= STATE.flush
    for name, call in all_calls(steep=40).items():
        wanted = arrays_of(call())
        try:
            environment(libm, odd)
            got, after = call(), environment(libm)
        finally:
            environment(libm, before)
        assert after[STATE.control] & STATE.flush == STATE.flush, name
        for x, right in zip(arrays_of(got), wanted, strict=True):
            np.testing.assert_allclose(x.astype(np.float64), right.astype(np.float64), rtol=0, atol=2.0**-125)


def test_import_and_threads_born_under_another_control_word(python):
    """The import changes nothing, and the threads of the pool, which inherit the word, compute as all others do."""
    said = python(f"""
import ctypes, hashlib
import numpy as np
libm, words, usual = ctypes.CDLL("libm.so.6"), (ctypes.c_uint32 * 8)(), (ctypes.c_uint32 * 8)()
x = np.random.default_rng(0).standard_normal((1, 8, 200, 16)).astype(np.float32)
small = x * np.float32(1e-40)
modes = {STATE.flush | STATE.up}
libm.fegetenv(usual)
libm.fegetenv(words)
words[{STATE.control}] |= modes
libm.fesetenv(words)
import attnc
libm.fegetenv(words)
print(words[{STATE.control}] & modes == modes)
for threads in 4, 1:
    print(hashlib.sha1(attnc.attention(x, x, small, num_threads=threads).tobytes()).hexdigest())
libm.fesetenv(usual)
for threads in 4, 1:
    print(hashlib.sha1(attnc.attention(x, x, small, num_threads=threads).tobytes()).hexdigest())
""").split()
    assert said[0] == "True"
    assert len(set(said[1:])) == 1 and len(said) == 5
