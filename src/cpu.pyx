"""What is built once, without flags: the question which kernels may run here, and what needs no instruction set."""

from cpython.buffer cimport PyBUF_STRIDES, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport int64_t

include "align.pxi"

cdef extern from *:
    """
    #ifndef ATTNC_BUILT
    #define ATTNC_BUILT "base"
    #define ATTNC_LEFT_OUT ""
    #define ATTNC_COMPILER "unknown"
    #endif
    /* The compiler's own detection asks CPUID and XGETBV: whether the operating system saves the wide registers. */
    #if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
    #include <cpuid.h>
    /* Where older compilers have no name for it: a bit of register 0..3 (EAX .. EDX) of a leaf. */
    static int cpuid(unsigned leaf, unsigned sub, int r, int bit) {
        unsigned x[4];
        return __get_cpuid_count(leaf, sub, &x[0], &x[1], &x[2], &x[3]) && (x[r] >> bit & 1);
    }
    static int has_avx2(void) {
        __builtin_cpu_init();
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi")
            && __builtin_cpu_supports("bmi2") && cpuid(1, 0, 2, 29);       /* f16c */
    }
    static int has_avx512(void) {
        return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw")
            && __builtin_cpu_supports("avx512cd")
            && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    }
    static int has_avx512bf16(void) { return has_avx512() && cpuid(7, 1, 0, 5); }
    #else
    static int has_avx2(void) { return 0; }
    static int has_avx512(void) { return 0; }
    static int has_avx512bf16(void) { return 0; }
    #endif
    #if defined(__aarch64__)
    enum { HAS_NEON = 1 };        /* part of every 64-bit Arm processor */
    #else
    enum { HAS_NEON = 0 };
    #endif
    """
    int has_avx2()
    int has_avx512()
    int has_avx512bf16()
    int HAS_NEON
    const char* ATTNC_BUILT
    const char* ATTNC_LEFT_OUT
    const char* ATTNC_COMPILER


cdef tuple names(const char* text):
    return tuple(name for name in text.decode().split(",") if name)


BUILT = names(ATTNC_BUILT)          # instruction sets with a kernel module
LEFT_OUT = names(ATTNC_LEFT_OUT)    # sets whose flags the compiler did not take when this was built
COMPILER = ATTNC_COMPILER.decode()


def supports(str name):
    """Whether this machine can run the kernels of instruction set `name`."""
    if name == "avx512bf16":
        return bool(has_avx512bf16())
    if name == "avx512":
        return bool(has_avx512())
    if name == "avx2":
        return bool(has_avx2())
    return name == ("neon" if HAS_NEON else "base")
