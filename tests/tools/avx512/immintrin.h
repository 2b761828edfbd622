/* immintrin.h: the AVX-512 of src/simd/ by AVX2, FMA and F16C, for processors without it (variants.py avx512).
 *
 * Found before the compiler's own header, which it includes; then every name that the kernels use stands for a function
 * of this file. A name that is missing here does not compile, because the compiler's intrinsics ask for -mavx512f.
 * Each function gives the bits that Intel's manual says: of a NaN only that it is one, and no exceptions. */
#ifndef __AVX512F__                         /* -D__AVX512F__ comes with this file: other modules take what is theirs */
#include_next <immintrin.h>
#elif !defined(ATTNC_AVX512_EMULATED)
#define ATTNC_AVX512_EMULATED
#undef __AVX512F__
#include_next <immintrin.h>
#define __AVX512F__ 1

#define EMULATED static inline __attribute__((always_inline))
typedef union { __m512 v; __m256 half[2]; __m128 part[4]; } Emulated_ps;
typedef union { __m512d v; __m256d half[2]; __m128d part[4]; } Emulated_pd;
typedef union { __m512i v; __m256i half[2]; __m128i part[4]; } Emulated_si;
typedef int Emulated_i32 __attribute__((vector_size(64), may_alias));
typedef unsigned Emulated_u32 __attribute__((vector_size(64), may_alias));
typedef short Emulated_i16 __attribute__((vector_size(64), may_alias));
typedef short Emulated_i16_half __attribute__((vector_size(32), may_alias));

/* On halves, by the instruction of AVX2 that has the same meaning lane by lane or within parts of 128 bits. */
#define EMULATED_2(kind, type, name, instruction) \
    EMULATED type emulated_##name(type a, type b) { \
        Emulated_##kind x = {a}, y = {b}; \
        for (int i = 0; i < 2; i++) x.half[i] = instruction(x.half[i], y.half[i]); \
        return x.v; \
    }
EMULATED_2(ps, __m512, add_ps, _mm256_add_ps)
EMULATED_2(pd, __m512d, add_pd, _mm256_add_pd)
EMULATED_2(ps, __m512, max_ps, _mm256_max_ps)
EMULATED_2(pd, __m512d, max_pd, _mm256_max_pd)
EMULATED_2(ps, __m512, unpacklo_ps, _mm256_unpacklo_ps)
EMULATED_2(ps, __m512, unpackhi_ps, _mm256_unpackhi_ps)
EMULATED_2(pd, __m512d, unpacklo_pd, _mm256_unpacklo_pd)
EMULATED_2(pd, __m512d, unpackhi_pd, _mm256_unpackhi_pd)
EMULATED_2(si, __m512i, and_si512, _mm256_and_si256)
EMULATED_2(si, __m512i, add_epi16, _mm256_add_epi16)
EMULATED_2(si, __m512i, add_epi32, _mm256_add_epi32)
EMULATED_2(si, __m512i, min_epu16, _mm256_min_epu16)
#define _mm512_add_ps emulated_add_ps
#define _mm512_add_pd emulated_add_pd
#define _mm512_max_ps emulated_max_ps
#define _mm512_max_pd emulated_max_pd
#define _mm512_unpacklo_ps emulated_unpacklo_ps
#define _mm512_unpackhi_ps emulated_unpackhi_ps
#define _mm512_unpacklo_pd emulated_unpacklo_pd
#define _mm512_unpackhi_pd emulated_unpackhi_pd
#define _mm512_and_si512 emulated_and_si512
#define _mm512_add_epi16 emulated_add_epi16
#define _mm512_add_epi32 emulated_add_epi32
#define _mm512_min_epu16 emulated_min_epu16

EMULATED __m512 emulated_fmadd_ps(__m512 a, __m512 b, __m512 c) {
    Emulated_ps x = {a}, y = {b}, z = {c};
    for (int i = 0; i < 2; i++) z.half[i] = _mm256_fmadd_ps(x.half[i], y.half[i], z.half[i]);
    return z.v;
}
EMULATED __m512d emulated_fmadd_pd(__m512d a, __m512d b, __m512d c) {
    Emulated_pd x = {a}, y = {b}, z = {c};
    for (int i = 0; i < 2; i++) z.half[i] = _mm256_fmadd_pd(x.half[i], y.half[i], z.half[i]);
    return z.v;
}
#define _mm512_fmadd_ps emulated_fmadd_ps
#define _mm512_fmadd_pd emulated_fmadd_pd

EMULATED __m512 emulated_set1_ps(float x) {
    Emulated_ps r = {.half = {_mm256_set1_ps(x), _mm256_set1_ps(x)}};
    return r.v;
}
EMULATED __m512d emulated_set1_pd(double x) {
    Emulated_pd r = {.half = {_mm256_set1_pd(x), _mm256_set1_pd(x)}};
    return r.v;
}
EMULATED __m512i emulated_set1_epi32(int x) {
    Emulated_si r = {.half = {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}};
    return r.v;
}
EMULATED __m512i emulated_set1_epi16(short x) {
    Emulated_si r = {.half = {_mm256_set1_epi16(x), _mm256_set1_epi16(x)}};
    return r.v;
}
EMULATED __m512i emulated_loadu_si512(const void *p) {
    Emulated_si r;
    for (int i = 0; i < 2; i++) r.half[i] = _mm256_loadu_si256((const __m256i *)p + i);
    return r.v;
}
/* The upper half is what no caller may look at. */
EMULATED __m512i emulated_castsi256_si512(__m256i a) {
    Emulated_si r = {.half = {a, _mm256_set1_epi32(0x5EEDBAD)}};
    return r.v;
}
#define _mm512_set1_ps emulated_set1_ps
#define _mm512_set1_pd emulated_set1_pd
#define _mm512_set1_epi32 emulated_set1_epi32
#define _mm512_set1_epi16 emulated_set1_epi16
#define _mm512_loadu_si512 emulated_loadu_si512
#define _mm512_castsi256_si512 emulated_castsi256_si512

EMULATED void emulated_aligned(const void *p) {
    if ((unsigned long)p % 64) __builtin_trap();
}
EMULATED void emulated_stream_ps(float *p, __m512 v) {
    emulated_aligned(p);
    Emulated_ps x = {v};
    for (int i = 0; i < 2; i++) _mm256_stream_ps(p + 8 * i, x.half[i]);
}
EMULATED void emulated_stream_pd(double *p, __m512d v) {
    emulated_aligned(p);
    Emulated_pd x = {v};
    for (int i = 0; i < 2; i++) _mm256_stream_pd(p + 4 * i, x.half[i]);
}
#define _mm512_stream_ps(p, v) emulated_stream_ps(p, v)
#define _mm512_stream_pd(p, v) emulated_stream_pd(p, v)

/* Lanes and masks: bit i of a mask is lane i. */
#define EMULATED_COMPARE(a, b, how) ({ \
    Emulated_ps x_ = {a}, y_ = {b}; \
    (__mmask16)(_mm256_movemask_ps(_mm256_cmp_ps(x_.half[0], y_.half[0], how)) \
                | _mm256_movemask_ps(_mm256_cmp_ps(x_.half[1], y_.half[1], how)) << 8); })
#define EMULATED_COMPARE_PD(a, b, how) ({ \
    Emulated_pd x_ = {a}, y_ = {b}; \
    (__mmask8)(_mm256_movemask_pd(_mm256_cmp_pd(x_.half[0], y_.half[0], how)) \
               | _mm256_movemask_pd(_mm256_cmp_pd(x_.half[1], y_.half[1], how)) << 4); })
EMULATED __m256i emulated_lanes_epi32(int bits) {
    const __m256i lane = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    return _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(bits), lane), lane);
}
EMULATED __m256i emulated_lanes_epi64(int bits) {
    const __m256i lane = _mm256_setr_epi64x(1, 2, 4, 8);
    return _mm256_cmpeq_epi64(_mm256_and_si256(_mm256_set1_epi64x(bits), lane), lane);
}
EMULATED __m512 emulated_mask_mov_ps(__m512 other, __mmask16 bits, __m512 v) {
    Emulated_ps x = {v}, y = {other};
    for (int i = 0; i < 2; i++) {
        __m256 lanes = (__m256)emulated_lanes_epi32(bits >> 8 * i);
        y.half[i] = _mm256_blendv_ps(y.half[i], x.half[i], lanes);
    }
    return y.v;
}
EMULATED __m512d emulated_mask_mov_pd(__m512d other, __mmask8 bits, __m512d v) {
    Emulated_pd x = {v}, y = {other};
    for (int i = 0; i < 2; i++) {
        __m256d lanes = (__m256d)emulated_lanes_epi64(bits >> 4 * i);
        y.half[i] = _mm256_blendv_pd(y.half[i], x.half[i], lanes);
    }
    return y.v;
}
EMULATED __m512 emulated_maskz_mov_ps(__mmask16 bits, __m512 v) { return emulated_mask_mov_ps((__m512){0}, bits, v); }
EMULATED __m512d emulated_maskz_mov_pd(__mmask8 bits, __m512d v) { return emulated_mask_mov_pd((__m512d){0}, bits, v); }
EMULATED __m512i emulated_mask_or_epi32(__m512i other, __mmask16 bits, __m512i a, __m512i b) {
    return (__m512i)emulated_mask_mov_ps((__m512)other, bits, (__m512)((Emulated_i32)a | (Emulated_i32)b));
}
EMULATED __mmask16 emulated_test_epi8_mask(__m128i a, __m128i b) {
    return (__mmask16)~_mm_movemask_epi8(_mm_cmpeq_epi8(_mm_and_si128(a, b), _mm_setzero_si128()));
}
EMULATED __mmask32 emulated_cmplt_epu16_mask(__m512i a, __m512i b) {
    union { __m512i v; unsigned short lane[32]; } x = {a}, y = {b};
    __mmask32 bits = 0;
    for (int i = 0; i < 32; i++) bits |= (__mmask32)(x.lane[i] < y.lane[i]) << i;
    return bits;
}
#undef _mm512_cmp_ps_mask
#undef _mm512_cmp_pd_mask
#undef _mm512_cmplt_epu16_mask
#define _mm512_cmp_ps_mask EMULATED_COMPARE
#define _mm512_cmp_pd_mask EMULATED_COMPARE_PD
#define _mm512_mask_mov_ps emulated_mask_mov_ps
#define _mm512_mask_mov_pd emulated_mask_mov_pd
#define _mm512_maskz_mov_ps emulated_maskz_mov_ps
#define _mm512_maskz_mov_pd emulated_maskz_mov_pd
#define _mm512_mask_or_epi32 emulated_mask_or_epi32
#define _mm_test_epi8_mask emulated_test_epi8_mask
#define _mm512_cmplt_epu16_mask emulated_cmplt_epu16_mask

/* Shifts and conversions */
EMULATED __m512i emulated_slli_epi32(__m512i a, unsigned count) { return (__m512i)((Emulated_u32)a << count); }
EMULATED __m512i emulated_srli_epi32(__m512i a, unsigned count) { return (__m512i)((Emulated_u32)a >> count); }
EMULATED __m512i emulated_cvtepu16_epi32(__m256i a) {
    Emulated_si r = {.half = {_mm256_cvtepu16_epi32(_mm256_castsi256_si128(a)),
                              _mm256_cvtepu16_epi32(_mm256_extracti128_si256(a, 1))}};
    return r.v;
}
EMULATED __m512i emulated_cvtepi8_epi32(__m128i a) {
    Emulated_si r = {.half = {_mm256_cvtepi8_epi32(a), _mm256_cvtepi8_epi32(_mm_srli_si128(a, 8))}};
    return r.v;
}
EMULATED __m256i emulated_cvtepi32_epi16(__m512i a) {       /* the lower 16 bits */
    return (__m256i)__builtin_convertvector((Emulated_i32)a, Emulated_i16_half);
}
EMULATED __m512 emulated_cvtepi32_ps(__m512i a) {
    Emulated_si x = {a};
    Emulated_ps r = {.half = {_mm256_cvtepi32_ps(x.half[0]), _mm256_cvtepi32_ps(x.half[1])}};
    return r.v;
}
EMULATED __m512 emulated_cvtph_ps(__m256i a) {
    Emulated_ps r = {.half = {_mm256_cvtph_ps(_mm256_castsi256_si128(a)),
                              _mm256_cvtph_ps(_mm256_extracti128_si256(a, 1))}};
    return r.v;
}
#undef _mm512_slli_epi32
#undef _mm512_srli_epi32
#undef _mm512_cvtps_ph
#define _mm512_slli_epi32 emulated_slli_epi32
#define _mm512_srli_epi32 emulated_srli_epi32
#define _mm512_cvtepu16_epi32 emulated_cvtepu16_epi32
#define _mm512_cvtepi8_epi32 emulated_cvtepi8_epi32
#define _mm512_cvtepi32_epi16 emulated_cvtepi32_epi16
#define _mm512_cvtepi32_ps emulated_cvtepi32_ps
#define _mm512_cvtph_ps emulated_cvtph_ps
#define _mm512_cvtps_ph(a, how) ({ \
    Emulated_ps x_ = {a}; \
    _mm256_set_m128i(_mm256_cvtps_ph(x_.half[1], (how) & 7), _mm256_cvtps_ph(x_.half[0], (how) & 7)); })

/* Rounding to an integer: how & 0xF0, the binary places that stay, is 0. */
#undef _mm512_roundscale_ps
#undef _mm512_roundscale_pd
#define _mm512_roundscale_ps(a, how) ({ \
    _Static_assert(((how) & 0xF0) == 0, "binary places"); \
    Emulated_ps x_ = {a}; \
    for (int i_ = 0; i_ < 2; i_++) x_.half[i_] = _mm256_round_ps(x_.half[i_], how); \
    x_.v; })
#define _mm512_roundscale_pd(a, how) ({ \
    _Static_assert(((how) & 0xF0) == 0, "binary places"); \
    Emulated_pd x_ = {a}; \
    for (int i_ = 0; i_ < 2; i_++) x_.half[i_] = _mm256_round_pd(x_.half[i_], how); \
    x_.v; })

/* a * 2**floor(b), rounded once: by powers whose product is exact until the last, which alone may make it subnormal.
 * Infinite b: 0 and infinity have no product, but a quiet NaN in a gives infinity or 0. */
EMULATED __m256d emulated_power(__m256d n) {        /* 2**n for an integer -1022 <= n <= 1023 */
    __m256i bits = _mm256_castpd_si256(_mm256_add_pd(n, _mm256_set1_pd(0x1.8p52 + 1023)));
    return _mm256_castsi256_pd(_mm256_slli_epi64(bits, 52));
}
EMULATED __m256d emulated_within(__m256d n, double low, double high) {
    return _mm256_min_pd(_mm256_max_pd(n, _mm256_set1_pd(low)), _mm256_set1_pd(high));
}
EMULATED __m256d emulated_scalef_pd_half(__m256d a, __m256d b) {
    const __m256d infinity = _mm256_set1_pd(__builtin_inf()), zero = _mm256_setzero_pd();
    __m256d n = emulated_within(_mm256_floor_pd(b), -2200, 2200);
    __m256d last = emulated_within(n, -1022, 1023), rest = _mm256_sub_pd(n, last);
    __m256d middle = emulated_within(rest, -1022, 1023), first = _mm256_sub_pd(rest, middle);
    __m256d r = _mm256_mul_pd(_mm256_mul_pd(a, emulated_power(first)), emulated_power(middle));
    r = _mm256_mul_pd(r, emulated_power(last));
    __m256d up = _mm256_cmp_pd(b, infinity, _CMP_EQ_OQ), down = _mm256_cmp_pd(b, -infinity, _CMP_EQ_OQ);
    __m256i quiet = _mm256_slli_epi64(_mm256_castpd_si256(a), 12);          /* the first bit of the fraction, as sign */
    __m256d quiet_nan = _mm256_and_pd(_mm256_cmp_pd(a, a, _CMP_UNORD_Q), (__m256d)((__v4di)quiet < 0));
    r = _mm256_blendv_pd(r, _mm256_mul_pd(a, infinity), up);                /* 0: NaN */
    r = _mm256_blendv_pd(r, _mm256_mul_pd(a, zero), down);                  /* infinite: NaN */
    r = _mm256_blendv_pd(r, infinity, _mm256_and_pd(up, quiet_nan));
    r = _mm256_blendv_pd(r, zero, _mm256_and_pd(down, quiet_nan));
    return _mm256_blendv_pd(r, b, _mm256_cmp_pd(b, b, _CMP_UNORD_Q));
}
/* In double the product of a float is exact; _mm256_cvtpd_ps rounds it. A signalling NaN stays one. */
EMULATED __m256d emulated_widen(__m128 a) {
    __m256i signalling = _mm256_cvtepi32_epi64((__m128i)((((__v4si)a & 0x7FC00000) == 0x7F800000)
                                                         & (((__v4si)a & 0x3FFFFF) != 0)));
    __m256d wide = _mm256_cvtps_pd(a);
    return _mm256_andnot_pd((__m256d)(signalling & _mm256_set1_epi64x(1ll << 51)), wide);
}
EMULATED __m512 emulated_scalef_ps(__m512 a, __m512 b) {
    Emulated_ps x = {a}, y = {b};
    for (int i = 0; i < 4; i++) {
        __m256d n = _mm256_cvtps_pd(y.part[i]), infinite = _mm256_cmp_pd(n - n, n - n, _CMP_UNORD_Q);
        n = _mm256_blendv_pd(emulated_within(n, -400, 400), n, infinite);   /* where no double is infinite or rounded */
        x.part[i] = _mm256_cvtpd_ps(emulated_scalef_pd_half(emulated_widen(x.part[i]), n));
    }
    return x.v;
}
EMULATED __m512d emulated_scalef_pd(__m512d a, __m512d b) {
    Emulated_pd x = {a}, y = {b};
    for (int i = 0; i < 2; i++) x.half[i] = emulated_scalef_pd_half(x.half[i], y.half[i]);
    return x.v;
}
#define _mm512_scalef_ps emulated_scalef_ps
#define _mm512_scalef_pd emulated_scalef_pd

/* Shuffles: of parts of 128 bits, two of a and two of b; of floats within each part; of 16 bits anywhere. */
#undef _mm512_shuffle_f32x4
#undef _mm512_shuffle_f64x2
#undef _mm512_shuffle_ps
#define _mm512_shuffle_f32x4(a, b, how) ({ \
    Emulated_ps x_ = {a}, y_ = {b}, r_ = {.part = {x_.part[(how) & 3], x_.part[(how) >> 2 & 3], \
                                                   y_.part[(how) >> 4 & 3], y_.part[(how) >> 6]}}; \
    r_.v; })
#define _mm512_shuffle_f64x2(a, b, how) \
    ((__m512d)_mm512_shuffle_f32x4((__m512)(a), (__m512)(b), how))
#define _mm512_shuffle_ps(a, b, how) ({ \
    Emulated_ps x_ = {a}, y_ = {b}; \
    for (int i_ = 0; i_ < 2; i_++) x_.half[i_] = _mm256_shuffle_ps(x_.half[i_], y_.half[i_], how); \
    x_.v; })
EMULATED __m512i emulated_permutex2var_epi16(__m512i a, __m512i order, __m512i b) {
    union { __m512i v; short lane[32]; } index = {order}, r;
    union { __m512i v[2]; short lane[64]; } from = {.v = {a, b}};
    for (int i = 0; i < 32; i++) r.lane[i] = from.lane[index.lane[i] & 63];
    return r.v;
}
#define _mm512_permutex2var_epi16 emulated_permutex2var_epi16

/* Sums and maxima over lanes, in the order of the compiler's own: the upper half first. */
#define EMULATED_REDUCE(name) \
    EMULATED float emulated_reduce_##name##_ps(__m512 v) { \
        Emulated_ps x = {v}; \
        __m256 half = _mm256_##name##_ps(x.half[1], x.half[0]); \
        __m128 r = _mm_##name##_ps(_mm256_extractf128_ps(half, 1), _mm256_castps256_ps128(half)); \
        r = _mm_##name##_ps(r, _mm_movehl_ps(r, r)); \
        return _mm_cvtss_f32(_mm_##name##_ps(r, _mm_movehdup_ps(r))); \
    } \
    EMULATED double emulated_reduce_##name##_pd(__m512d v) { \
        Emulated_pd x = {v}; \
        __m256d half = _mm256_##name##_pd(x.half[1], x.half[0]); \
        __m128d r = _mm_##name##_pd(_mm256_extractf128_pd(half, 1), _mm256_castpd256_pd128(half)); \
        return _mm_cvtsd_f64(_mm_##name##_pd(r, _mm_unpackhi_pd(r, r))); \
    }
EMULATED_REDUCE(add)
EMULATED_REDUCE(max)
#define _mm512_reduce_add_ps emulated_reduce_add_ps
#define _mm512_reduce_add_pd emulated_reduce_add_pd
#define _mm512_reduce_max_ps emulated_reduce_max_ps
#define _mm512_reduce_max_pd emulated_reduce_max_pd

/* vdpbf16ps: a fused multiplication and addition for the upper bfloat16 of each lane, then one for the lower; subnormal
 * numbers count as 0 before and after each, whatever MXCSR says, which stays as it was. */
EMULATED __m512 emulated_dpbf16(__m512 a, __m512 b, __m512 sum) {
    Emulated_ps x = {a}, y = {b}, z = {sum};
    const unsigned flush = 0x9FC0;                  /* subnormal results and operands to 0, no exception */
    unsigned before;
    for (int i = 0; i < 2; i++) {
        const __m256 upper = (__m256)_mm256_set1_epi32((int)0xFFFF0000);
        __m256 x1 = _mm256_and_ps(x.half[i], upper), x0 = (__m256)_mm256_slli_epi32((__m256i)x.half[i], 16);
        __m256 y1 = _mm256_and_ps(y.half[i], upper), y0 = (__m256)_mm256_slli_epi32((__m256i)y.half[i], 16);
        __asm__("vstmxcsr %1\n\tvldmxcsr %6\n\tvfmadd231ps %3, %2, %0\n\tvfmadd231ps %5, %4, %0\n\tvldmxcsr %1"
                : "+x"(z.half[i]), "=m"(before) : "x"(x1), "x"(y1), "x"(x0), "x"(y0), "m"(flush));
    }
    return z.v;
}
/* vcvtneps2bf16: to nearest even, subnormal numbers to 0 of their sign, a NaN to a quiet one */
EMULATED __m256i emulated_cvtneps_bf16(__m512 v) {
    Emulated_u32 u = (Emulated_u32)v, exponent = u & 0x7F800000, magnitude = u & 0x7FFFFFFF;
    Emulated_u32 rounded = (u + 0x7FFF + (u >> 16 & 1)) >> 16;
    Emulated_u32 nan = (Emulated_u32)(magnitude > 0x7F800000), small = (Emulated_u32)(exponent == 0);
    Emulated_u32 r = (nan & (u >> 16 | 0x40)) | (small & (u >> 16 & 0x8000)) | (~(nan | small) & rounded);
    return emulated_cvtepi32_epi16((__m512i)r);
}

#endif
