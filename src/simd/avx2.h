/* avx2.h: the primitives of simd.h for AVX2 with FMA and F16C. */
#include <immintrin.h>

#define TILE_VECTORS 2   /* 6 rows x 2 vectors: 12 of 16 registers hold sums */

INLINE vf vf_fma(vf a, vf b, vf c) { return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
INLINE vd vd_fma(vd a, vd b, vd c) { return (vd)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c); }
INLINE vf vf_max(vf a, vf b) { return (vf)_mm256_max_ps((__m256)a, (__m256)b); }
INLINE vd vd_max(vd a, vd b) { return (vd)_mm256_max_pd((__m256d)a, (__m256d)b); }
INLINE vf vf_round(vf a) { return (vf)_mm256_round_ps((__m256)a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
INLINE vd vd_round(vd a) { return (vd)_mm256_round_pd((__m256d)a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
#include "exponent.h"

INLINE vf vf_zero_below(vf p, vf t, float limit) {
    return (vf)_mm256_and_ps(_mm256_cmp_ps((__m256)t, _mm256_set1_ps(limit), _CMP_NLT_UQ), (__m256)p);
}
INLINE vd vd_zero_below(vd p, vd t, double limit) {
    return (vd)_mm256_and_pd(_mm256_cmp_pd((__m256d)t, _mm256_set1_pd(limit), _CMP_NLT_UQ), (__m256d)p);
}

INLINE vf vf_unless_equal(vf v, vf a, vf b) { return (vf)_mm256_blendv_ps((__m256)v, (__m256)b, (__m256)(a == b)); }
INLINE vd vd_unless_equal(vd v, vd a, vd b) { return (vd)_mm256_blendv_pd((__m256d)v, (__m256d)b, (__m256d)(a == b)); }

INLINE vf vf_keep_bits(vf v, unsigned bits, vf other) {
    vfi lane = {1, 2, 4, 8, 16, 32, 64, 128};
    return (vf)_mm256_blendv_ps((__m256)other, (__m256)v, (__m256)((lane & (int32_t)bits) != 0));
}
INLINE vd vd_keep_bits(vd v, unsigned bits, vd other) {
    vdi lane = {1, 2, 4, 8};
    return (vd)_mm256_blendv_pd((__m256d)other, (__m256d)v, (__m256d)((lane & (int64_t)bits) != 0));
}
INLINE vf vf_keep_bytes(vf v, const uint8_t *b, vf other) {
    vfi bytes = (vfi)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)b));
    return (vf)_mm256_blendv_ps((__m256)other, (__m256)v, (__m256)(bytes != 0));
}
INLINE vd vd_keep_bytes(vd v, const uint8_t *b, vd other) {
    int32_t four;
    memcpy(&four, b, 4);
    vdi bytes = (vdi)_mm256_cvtepu8_epi64(_mm_cvtsi32_si128(four));
    return (vd)_mm256_blendv_pd((__m256d)other, (__m256d)v, (__m256d)(bytes != 0));
}

INLINE unsigned vf_above(vf a, vf b) { return _mm256_movemask_ps(_mm256_cmp_ps((__m256)a, (__m256)b, _CMP_GT_OQ)); }
INLINE unsigned vd_above(vd a, vd b) { return _mm256_movemask_pd(_mm256_cmp_pd((__m256d)a, (__m256d)b, _CMP_GT_OQ)); }

#define HALVE(name, op_ps, op_pd) \
    INLINE float vf_##name(vf v) { \
        __m128 x = _mm_##op_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1)); \
        x = _mm_##op_ps(x, _mm_movehl_ps(x, x)); \
        return _mm_cvtss_f32(_mm_##op_ps(x, _mm_movehdup_ps(x))); \
    } \
    INLINE double vd_##name(vd v) { \
        __m128d x = _mm_##op_pd(_mm256_castpd256_pd128((__m256d)v), _mm256_extractf128_pd((__m256d)v, 1)); \
        return _mm_cvtsd_f64(_mm_##op_pd(x, _mm_unpackhi_pd(x, x))); \
    }
HALVE(sum, add_ps, add_pd)
HALVE(largest, max_ps, max_pd)
#undef HALVE

INLINE vf vf_load_f16(const uint16_t *p) { return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }
INLINE void vf_store_f16(uint16_t *p, vf v) {
    _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

INLINE vf vf_load_i8(const int8_t *p) {
    return (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
}

INLINE void vf_transpose(vf r[VF]) {
    __m256 t[8], u[8];
    UNROLL for (int i = 0; i < 8; i += 2) {
        t[i] = _mm256_unpacklo_ps((__m256)r[i], (__m256)r[i + 1]);
        t[i + 1] = _mm256_unpackhi_ps((__m256)r[i], (__m256)r[i + 1]);
    }
    UNROLL for (int i = 0; i < 8; i += 4) {
        UNROLL for (int k = 0; k < 2; k++) {
            u[i + 2 * k] = (__m256)_mm256_unpacklo_pd((__m256d)t[i + k], (__m256d)t[i + k + 2]);
            u[i + 2 * k + 1] = (__m256)_mm256_unpackhi_pd((__m256d)t[i + k], (__m256d)t[i + k + 2]);
        }
    }
    UNROLL for (int k = 0; k < 4; k++) {
        r[k] = (vf)_mm256_permute2f128_ps(u[k], u[k + 4], 0x20);
        r[k + 4] = (vf)_mm256_permute2f128_ps(u[k], u[k + 4], 0x31);
    }
}
INLINE void vd_transpose(vd r[VD]) {
    __m256d u[4];
    UNROLL for (int i = 0; i < 4; i += 2) {
        u[i] = _mm256_unpacklo_pd((__m256d)r[i], (__m256d)r[i + 1]);
        u[i + 1] = _mm256_unpackhi_pd((__m256d)r[i], (__m256d)r[i + 1]);
    }
    UNROLL for (int k = 0; k < 2; k++) {
        r[k] = (vd)_mm256_permute2f128_pd(u[k], u[k + 2], 0x20);
        r[k + 2] = (vd)_mm256_permute2f128_pd(u[k], u[k + 2], 0x31);
    }
}

INLINE vf vf_fold(const vf r[TILE_VECTORS]) { return (vf)_mm256_hadd_ps((__m256)r[0], (__m256)r[1]); }
INLINE vd vd_fold(const vd r[TILE_VECTORS]) { return (vd)_mm256_hadd_pd((__m256d)r[0], (__m256d)r[1]); }
INLINE vf vf_sums(const vf r[VF / TILE_VECTORS]) {
    __m256 a = _mm256_hadd_ps((__m256)r[0], (__m256)r[1]), b = _mm256_hadd_ps((__m256)r[2], (__m256)r[3]);
    return (vf)_mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
}
INLINE vd vd_sums(const vd r[VD / TILE_VECTORS]) {
    __m256d a = (__m256d)r[0], b = (__m256d)r[1];
    return (vd)_mm256_add_pd(_mm256_permute2f128_pd(a, b, 0x20), _mm256_permute2f128_pd(a, b, 0x31));
}
