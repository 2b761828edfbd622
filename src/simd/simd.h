/* simd.h: vectors of float (vf) and double (vd) with the same names for every instruction set.
 *
 * The width follows the compiler's flags. + - * / and comparisons are the compiler's own vector operators; the headers
 * of simd/ hold the rest, and simd/base.h defines it in plain compiler vectors:
 *   round (to nearest even), scale2 (p * 2**n), max (the second operand where either is NaN), fma,
 *   keep_bits / keep_bytes (lanes chosen by an integer or by bool bytes), zero_below, unless_equal, transpose,
 *   above (the bits of lanes where one is larger),
 *   sum, largest (over the lanes; by halving, so the order is fixed and short),
 *   vf_load_f16 / vf_store_f16, vf_load_i8,
 *   fold (DOT_KEYS vectors to one), then sums (LANES / DOT_KEYS of these to one): lane i is the sum over the lanes of
 *   vector i. */
#ifndef ATTNC_SIMD_H
#define ATTNC_SIMD_H

#include <stdint.h>
#include <string.h>

#include "simd/half.h"

#if defined(__AVX512F__)
#define VECTOR_BYTES 64
#elif defined(__AVX2__)
#define VECTOR_BYTES 32
#else
#define VECTOR_BYTES 16
#endif

/* BF16_DOT: this module has vf_dot() and vf_store_pairs(). bf16_dot: the chosen instruction set has their instructions;
 * it is set once, when the set is chosen, so that `avx512` and `avx512bf16` share a module. */
#if defined(__AVX512F__)
#define BF16_DOT 1
static int bf16_dot;
static inline void use_bf16_dot(int on) { bf16_dot = on; }
#else
#define BF16_DOT 0
enum { bf16_dot = 0 };
static inline void use_bf16_dot(int on) { (void)on; }
#endif

#define INLINE static inline __attribute__((always_inline))
#ifdef __clang__                /* Clang ignores GCC's pragma, and would keep the sums of a tile in memory */
#define UNROLL _Pragma("clang loop unroll(full)")
#define ROLLED _Pragma("clang loop unroll(disable)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#define ROLLED _Pragma("GCC unroll 1")
#endif

typedef float vf __attribute__((vector_size(VECTOR_BYTES), may_alias));
typedef double vd __attribute__((vector_size(VECTOR_BYTES), may_alias));
typedef int32_t vfi __attribute__((vector_size(VECTOR_BYTES), may_alias));
typedef int64_t vdi __attribute__((vector_size(VECTOR_BYTES), may_alias));
typedef float vf_unaligned __attribute__((vector_size(VECTOR_BYTES), may_alias, aligned(1)));
typedef double vd_unaligned __attribute__((vector_size(VECTOR_BYTES), may_alias, aligned(1)));

typedef uint32_t vfu __attribute__((vector_size(VECTOR_BYTES), may_alias));
typedef uint64_t vdu __attribute__((vector_size(VECTOR_BYTES), may_alias));

enum { VF = VECTOR_BYTES / 4, VD = VECTOR_BYTES / 8 };   /* lanes */

typedef uint16_t vh __attribute__((vector_size(VECTOR_BYTES / 2), may_alias));

INLINE vf vf_set1(float x) { return x - (vf){0}; }       /* x - 0 is x, also for -0 */
INLINE vd vd_set1(double x) { return x - (vd){0}; }
INLINE vf vf_load(const float *p) { return *(const vf *)p; }
INLINE vd vd_load(const double *p) { return *(const vd *)p; }
INLINE vf vf_loadu(const float *p) { return *(const vf_unaligned *)p; }
INLINE vd vd_loadu(const double *p) { return *(const vd_unaligned *)p; }
INLINE void vf_store(float *p, vf v) { *(vf *)p = v; }
INLINE void vd_store(double *p, vd v) { *(vd *)p = v; }
INLINE void vf_storeu(float *p, vf v) { *(vf_unaligned *)p = v; }
INLINE void vd_storeu(double *p, vd v) { *(vd_unaligned *)p = v; }

#if !defined(__AVX512F__)    /* compilers would split these into two halves, so avx512.h has its own */
/* bf16_widen and bf16_round of half.h on lanes */
INLINE vf vf_load_bf16(const uint16_t *p) {
    vh h;
    memcpy(&h, p, sizeof h);
    return (vf)(__builtin_convertvector(h, vfu) << 16);
}
INLINE void vf_store_bf16(uint16_t *p, vf v) {
    vfu u = (vfu)v, nan = (vfu)(v != v), rounded = (u + 0x7FFF + ((u >> 16) & 1)) >> 16;
    vh h = __builtin_convertvector((nan & ((u >> 16) | 0x40)) | (~nan & rounded), vh);
    memcpy(p, &h, sizeof h);
}
#endif

#if defined(__AVX512F__)
#include "simd/avx512.h"
#elif defined(__AVX2__)
#include "simd/avx2.h"
#elif defined(__aarch64__)
#include "simd/neon.h"
#else
#include "simd/base.h"
#endif

/* Rounds to bfloat16, and may round a subnormal number to 0: one instruction instead of eight. */
INLINE void vf_narrow_bf16(uint16_t *p, vf v) {
#if BF16_DOT
    if (bf16_dot) {
        vf_store_pairs(p, v);
        return;
    }
#endif
    vf_store_bf16(p, v);
}

/* Non-temporal stores of aligned vectors: they bypass the caches and do not read the line first. stream_end() orders
 * them before later stores. */
#if defined(__AVX512F__)
INLINE void vf_stream(float *p, vf v) { _mm512_stream_ps(p, (__m512)v); }
INLINE void vd_stream(double *p, vd v) { _mm512_stream_pd(p, (__m512d)v); }
INLINE void vh_stream(uint16_t *p, vh v) { _mm256_stream_si256((__m256i *)p, (__m256i)v); }
#elif defined(__AVX2__)
INLINE void vf_stream(float *p, vf v) { _mm256_stream_ps(p, (__m256)v); }
INLINE void vd_stream(double *p, vd v) { _mm256_stream_pd(p, (__m256d)v); }
INLINE void vh_stream(uint16_t *p, vh v) { _mm_stream_si128((__m128i *)p, (__m128i)v); }
#elif defined(__SSE2__)
#include <emmintrin.h>
INLINE void vf_stream(float *p, vf v) { _mm_stream_ps(p, (__m128)v); }
INLINE void vd_stream(double *p, vd v) { _mm_stream_pd(p, (__m128d)v); }
INLINE void vh_stream(uint16_t *p, vh v) { memcpy(p, &v, sizeof v); }
#else
INLINE void vf_stream(float *p, vf v) { vf_store(p, v); }
INLINE void vd_stream(double *p, vd v) { vd_store(p, v); }
INLINE void vh_stream(uint16_t *p, vh v) { memcpy(p, &v, sizeof v); }
#endif
#if defined(__SSE2__)
INLINE void stream_end(void) { _mm_sfence(); }
#else
INLINE void stream_end(void) {}
#endif

/* fp_enter() selects round-to-nearest, keeps subnormals and masks exceptions; fp_leave() restores the state, flags
 * included (pool threads may have a stale state, and a caller may have set flush-to-zero). */
#if defined(__SSE2__)
#include <xmmintrin.h>
typedef unsigned fp_state;
INLINE fp_state fp_enter(void) { fp_state s = _mm_getcsr(); _mm_setcsr(0x1F80); return s; }
INLINE void fp_leave(fp_state s) { _mm_setcsr(s); }
#elif defined(__aarch64__)
typedef struct { uint64_t control, status; } fp_state;
INLINE fp_state fp_enter(void) {
    fp_state s;
    __asm__ volatile("mrs %0, fpcr" : "=r"(s.control));
    __asm__ volatile("mrs %0, fpsr" : "=r"(s.status));
    __asm__ volatile("msr fpcr, %0" : : "r"((uint64_t)0));
    return s;
}
INLINE void fp_leave(fp_state s) {
    __asm__ volatile("msr fpcr, %0" : : "r"(s.control));
    __asm__ volatile("msr fpsr, %0" : : "r"(s.status));
}
#else
#include <fenv.h>
typedef fenv_t fp_state;
INLINE fp_state fp_enter(void) { fp_state s; fegetenv(&s); fesetenv(FE_DFL_ENV); return s; }
INLINE void fp_leave(fp_state s) { fesetenv(&s); }
#endif

#endif
