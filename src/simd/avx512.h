/* avx512.h: the primitives of simd.h for AVX-512 F, BW, CD, DQ and VL. */
#include <immintrin.h>

#define TILE_VECTORS 4   /* 6 rows x 4 vectors: 24 of 32 registers hold sums; 10 loads feed 24 fma */

INLINE vf vf_fma(vf a, vf b, vf c) { return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
INLINE vd vd_fma(vd a, vd b, vd c) { return (vd)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c); }
INLINE vf vf_max(vf a, vf b) { return (vf)_mm512_max_ps((__m512)a, (__m512)b); }
INLINE vd vd_max(vd a, vd b) { return (vd)_mm512_max_pd((__m512d)a, (__m512d)b); }
INLINE vf vf_round(vf a) { return (vf)_mm512_roundscale_ps((__m512)a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
INLINE vd vd_round(vd a) { return (vd)_mm512_roundscale_pd((__m512d)a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
INLINE vf vf_scale2(vf p, vf n) { return (vf)_mm512_scalef_ps((__m512)p, (__m512)n); }
INLINE vd vd_scale2(vd p, vd n) { return (vd)_mm512_scalef_pd((__m512d)p, (__m512d)n); }

/* p, but exactly 0 in the lanes where t < limit (p where t is NaN) */
INLINE vf vf_zero_below(vf p, vf t, float limit) {
    return (vf)_mm512_maskz_mov_ps(_mm512_cmp_ps_mask((__m512)t, _mm512_set1_ps(limit), _CMP_NLT_UQ), (__m512)p);
}
INLINE vd vd_zero_below(vd p, vd t, double limit) {
    return (vd)_mm512_maskz_mov_pd(_mm512_cmp_pd_mask((__m512d)t, _mm512_set1_pd(limit), _CMP_NLT_UQ), (__m512d)p);
}

/* v, but b in the lanes where a == b */
INLINE vf vf_unless_equal(vf v, vf a, vf b) {
    return (vf)_mm512_mask_mov_ps((__m512)v, _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_EQ_OQ), (__m512)b);
}
INLINE vd vd_unless_equal(vd v, vd a, vd b) {
    return (vd)_mm512_mask_mov_pd((__m512d)v, _mm512_cmp_pd_mask((__m512d)a, (__m512d)b, _CMP_EQ_OQ), (__m512d)b);
}

/* lanes of v where the bit of `bits` (or the byte) is set, `other` elsewhere */
INLINE vf vf_keep_bits(vf v, unsigned bits, vf other) {
    return (vf)_mm512_mask_mov_ps((__m512)other, (__mmask16)bits, (__m512)v);
}
INLINE vd vd_keep_bits(vd v, unsigned bits, vd other) {
    return (vd)_mm512_mask_mov_pd((__m512d)other, (__mmask8)bits, (__m512d)v);
}
INLINE vf vf_keep_bytes(vf v, const uint8_t *b, vf other) {
    __m128i bytes = _mm_loadu_si128((const __m128i *)b);
    return vf_keep_bits(v, _mm_test_epi8_mask(bytes, bytes), other);
}
INLINE vd vd_keep_bytes(vd v, const uint8_t *b, vd other) {
    __m128i bytes = _mm_loadl_epi64((const __m128i *)b);
    return vd_keep_bits(v, _mm_test_epi8_mask(bytes, bytes), other);
}

/* bits of the lanes where a > b */
INLINE unsigned vf_above(vf a, vf b) { return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_GT_OQ); }
INLINE unsigned vd_above(vd a, vd b) { return _mm512_cmp_pd_mask((__m512d)a, (__m512d)b, _CMP_GT_OQ); }

INLINE float vf_sum(vf v) { return _mm512_reduce_add_ps((__m512)v); }
INLINE double vd_sum(vd v) { return _mm512_reduce_add_pd((__m512d)v); }
INLINE float vf_largest(vf v) { return _mm512_reduce_max_ps((__m512)v); }
INLINE double vd_largest(vd v) { return _mm512_reduce_max_pd((__m512d)v); }

INLINE vf vf_load_f16(const uint16_t *p) { return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
INLINE void vf_store_f16(uint16_t *p, vf v) {
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

INLINE vf vf_load_bf16(const uint16_t *p) {
    return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16);
}
INLINE void vf_store_bf16(uint16_t *p, vf v) {
    __m512i u = (__m512i)v, high = _mm512_srli_epi32(u, 16), odd = _mm512_and_si512(high, _mm512_set1_epi32(1));
    __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7FFF)), odd), 16);
    __mmask16 nan = _mm512_cmp_ps_mask((__m512)v, (__m512)v, _CMP_UNORD_Q);
    rounded = _mm512_mask_or_epi32(rounded, nan, high, _mm512_set1_epi32(0x40));
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16(rounded));
}
INLINE vf vf_load_i8(const int8_t *p) {
    return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
}

/* The two instructions of AVX512-BF16 are assembly, because compilers accept the intrinsics only in functions built for
 * that set, and this module also runs on processors without it (bf16_dot of simd.h).
 *
 * Rounds to nearest even, but subnormal numbers to 0. */
INLINE void vf_store_pairs(uint16_t *p, vf v) {
    __m256i pairs;
    __asm__("vcvtneps2bf16 %1, %0" : "=v"(pairs) : "v"(v));
    _mm256_storeu_si256((__m256i *)p, pairs);
}
/* sum + the products of the two bfloat16 in each lane */
INLINE vf vf_dot(vf a, vf b, vf sum) {
    __asm__("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(a), "vm"(b));
    return sum;
}
/* lane i: the bfloat16 at low[i] and at high[i] */
INLINE vf vf_load_pairs(const uint16_t *low, const uint16_t *high) {
    static const int16_t order[32] = {0, 32, 1, 33, 2, 34, 3, 35, 4, 36, 5, 37, 6, 38, 7, 39,
                                      8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
    __m512i a = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *)low));
    __m512i b = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *)high));
    return (vf)_mm512_permutex2var_epi16(a, _mm512_loadu_si512(order), b);
}
/* Finds subnormal bfloat16 by a running minimum of 2 x - 1 in 16 bits, which drops the sign and makes 0 the largest. */
INLINE vf vf_least_pairs(vf least, vf v) {
    __m512i twice = _mm512_add_epi16((__m512i)v, (__m512i)v);
    return (vf)_mm512_min_epu16((__m512i)least, _mm512_add_epi16(twice, _mm512_set1_epi16(-1)));
}
INLINE int vf_subnormal_pairs(vf least) {
    return _mm512_cmplt_epu16_mask((__m512i)least, _mm512_set1_epi16(0xFF)) != 0;
}

/* Transposes VF x VF (VD x VD) elements in place: pairs, then quads within 128-bit parts, then the parts. */
INLINE void vf_transpose(vf r[VF]) {
    __m512 t[16], u[16];
    UNROLL for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_ps((__m512)r[i], (__m512)r[i + 1]);
        t[i + 1] = _mm512_unpackhi_ps((__m512)r[i], (__m512)r[i + 1]);
    }
    UNROLL for (int i = 0; i < 16; i += 4) {
        UNROLL for (int k = 0; k < 2; k++) {
            u[i + 2 * k] = (__m512)_mm512_unpacklo_pd((__m512d)t[i + k], (__m512d)t[i + k + 2]);
            u[i + 2 * k + 1] = (__m512)_mm512_unpackhi_pd((__m512d)t[i + k], (__m512d)t[i + k + 2]);
        }
    }
    UNROLL for (int k = 0; k < 4; k++) {
        __m512 x0 = _mm512_shuffle_f32x4(u[k], u[k + 4], 0x44), x1 = _mm512_shuffle_f32x4(u[k], u[k + 4], 0xEE);
        __m512 y0 = _mm512_shuffle_f32x4(u[k + 8], u[k + 12], 0x44),
            y1 = _mm512_shuffle_f32x4(u[k + 8], u[k + 12], 0xEE);
        r[k] = (vf)_mm512_shuffle_f32x4(x0, y0, 0x88);
        r[k + 4] = (vf)_mm512_shuffle_f32x4(x0, y0, 0xDD);
        r[k + 8] = (vf)_mm512_shuffle_f32x4(x1, y1, 0x88);
        r[k + 12] = (vf)_mm512_shuffle_f32x4(x1, y1, 0xDD);
    }
}
INLINE void vd_transpose(vd r[VD]) {
    __m512d u[8];
    UNROLL for (int i = 0; i < 8; i += 2) {
        u[i] = _mm512_unpacklo_pd((__m512d)r[i], (__m512d)r[i + 1]);
        u[i + 1] = _mm512_unpackhi_pd((__m512d)r[i], (__m512d)r[i + 1]);
    }
    UNROLL for (int k = 0; k < 2; k++) {
        __m512d x0 = _mm512_shuffle_f64x2(u[k], u[k + 2], 0x44), x1 = _mm512_shuffle_f64x2(u[k], u[k + 2], 0xEE);
        __m512d y0 = _mm512_shuffle_f64x2(u[k + 4], u[k + 6], 0x44),
            y1 = _mm512_shuffle_f64x2(u[k + 4], u[k + 6], 0xEE);
        r[k] = (vd)_mm512_shuffle_f64x2(x0, y0, 0x88);
        r[k + 2] = (vd)_mm512_shuffle_f64x2(x0, y0, 0xDD);
        r[k + 4] = (vd)_mm512_shuffle_f64x2(x1, y1, 0x88);
        r[k + 6] = (vd)_mm512_shuffle_f64x2(x1, y1, 0xDD);
    }
}

/* fold and sums take 30 shuffles and 15 additions for 16 keys; transposing first would take 64 shuffles. */
INLINE vf vf_fold(const vf r[TILE_VECTORS]) {
    __m512 a = (__m512)r[0], b = (__m512)r[1], c = (__m512)r[2], d = (__m512)r[3];
    a = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    c = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    return (vf)_mm512_add_ps(_mm512_shuffle_ps(a, c, 0x44), _mm512_shuffle_ps(a, c, 0xEE));
}
INLINE vd vd_fold(const vd r[TILE_VECTORS]) {
    __m512d a = (__m512d)r[0], b = (__m512d)r[1], c = (__m512d)r[2], d = (__m512d)r[3];
    a = _mm512_add_pd(_mm512_unpacklo_pd(a, b), _mm512_unpackhi_pd(a, b));
    c = _mm512_add_pd(_mm512_unpacklo_pd(c, d), _mm512_unpackhi_pd(c, d));
    return (vd)_mm512_add_pd(_mm512_shuffle_f64x2(a, c, 0x88), _mm512_shuffle_f64x2(a, c, 0xDD));
}
INLINE vf vf_sums(const vf r[VF / TILE_VECTORS]) {
    __m512 a = (__m512)r[0], b = (__m512)r[1], c = (__m512)r[2], d = (__m512)r[3];
    a = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xDD));
    c = _mm512_add_ps(_mm512_shuffle_f32x4(c, d, 0x88), _mm512_shuffle_f32x4(c, d, 0xDD));
    return (vf)_mm512_add_ps(_mm512_shuffle_f32x4(a, c, 0x88), _mm512_shuffle_f32x4(a, c, 0xDD));
}
INLINE vd vd_sums(const vd r[VD / TILE_VECTORS]) {
    __m512d a = (__m512d)r[0], b = (__m512d)r[1];
    return (vd)_mm512_add_pd(_mm512_shuffle_f64x2(a, b, 0x88), _mm512_shuffle_f64x2(a, b, 0xDD));
}
