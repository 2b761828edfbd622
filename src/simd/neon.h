/* neon.h: the primitives of simd.h for the 128-bit vectors of every 64-bit Arm processor. */
#include <arm_neon.h>

/* 6 rows x 4 vectors: 24 of 32 registers hold sums; 8 load instructions feed 24 fma (8 rows x 3 vectors: 10, as two
 * vectors are one load but each row's query is one), and 4 vectors divide block_k, as 3 do not. */
#define TILE_VECTORS 4

INLINE vf vf_fma(vf a, vf b, vf c) { return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b); }
INLINE vd vd_fma(vd a, vd b, vd c) { return (vd)vfmaq_f64((float64x2_t)c, (float64x2_t)a, (float64x2_t)b); }
/* fmax would give NaN if either operand is NaN, fmaxnm the first operand if the second is NaN. */
INLINE vf vf_max(vf a, vf b) {
    float32x4_t x = (float32x4_t)a, y = (float32x4_t)b;
    return (vf)vbslq_f32(vcgtq_f32(x, y), x, y);
}
INLINE vd vd_max(vd a, vd b) {
    float64x2_t x = (float64x2_t)a, y = (float64x2_t)b;
    return (vd)vbslq_f64(vcgtq_f64(x, y), x, y);
}
INLINE vf vf_round(vf a) { return (vf)vrndnq_f32((float32x4_t)a); }
INLINE vd vd_round(vd a) { return (vd)vrndnq_f64((float64x2_t)a); }
#include "exponent.h"

INLINE vf vf_zero_below(vf p, vf t, float limit) {
    return (vf)vbicq_u32((uint32x4_t)p, vcltq_f32((float32x4_t)t, vdupq_n_f32(limit)));
}
INLINE vd vd_zero_below(vd p, vd t, double limit) {
    return (vd)vbicq_u64((uint64x2_t)p, vcltq_f64((float64x2_t)t, vdupq_n_f64(limit)));
}

INLINE vf vf_unless_equal(vf v, vf a, vf b) {
    return (vf)vbslq_f32((uint32x4_t)(a == b), (float32x4_t)b, (float32x4_t)v);
}
INLINE vd vd_unless_equal(vd v, vd a, vd b) {
    return (vd)vbslq_f64((uint64x2_t)(a == b), (float64x2_t)b, (float64x2_t)v);
}

INLINE vf vf_keep_bits(vf v, unsigned bits, vf other) {
    uint32x4_t yes = vtstq_u32((uint32x4_t){1, 2, 4, 8}, vdupq_n_u32(bits));
    return (vf)vbslq_f32(yes, (float32x4_t)v, (float32x4_t)other);
}
INLINE vd vd_keep_bits(vd v, unsigned bits, vd other) {
    uint64x2_t yes = vtstq_u64((uint64x2_t){1, 2}, vdupq_n_u64(bits));
    return (vd)vbslq_f64(yes, (float64x2_t)v, (float64x2_t)other);
}
INLINE vf vf_keep_bytes(vf v, const uint8_t *b, vf other) {
    uint32_t four;
    memcpy(&four, b, 4);
    uint32x4_t bytes = vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(four))));
    return (vf)vbslq_f32(vtstq_u32(bytes, bytes), (float32x4_t)v, (float32x4_t)other);
}
INLINE vd vd_keep_bytes(vd v, const uint8_t *b, vd other) {
    uint64x2_t bytes = {b[0], b[1]};
    return (vd)vbslq_f64(vtstq_u64(bytes, bytes), (float64x2_t)v, (float64x2_t)other);
}

INLINE unsigned vf_above(vf a, vf b) { return vaddvq_u32((uint32x4_t)((a > b) & (vfi){1, 2, 4, 8})); }
INLINE unsigned vd_above(vd a, vd b) { return (unsigned)vaddvq_u64((uint64x2_t)((a > b) & (vdi){1, 2})); }

/* vaddvq would add neighbours first; softmax/softmax_columns.h and all other sets add halves. */
INLINE float vf_sum(vf v) { return vaddv_f32(vadd_f32(vget_low_f32((float32x4_t)v), vget_high_f32((float32x4_t)v))); }
INLINE double vd_sum(vd v) { return vaddvq_f64((float64x2_t)v); }
INLINE float vf_largest(vf v) { return vmaxvq_f32((float32x4_t)v); }
INLINE double vd_largest(vd v) { return vmaxvq_f64((float64x2_t)v); }

INLINE vf vf_load_i8(const int8_t *p) { return (vf){p[0], p[1], p[2], p[3]}; }
INLINE vf vf_load_f16(const uint16_t *p) { return (vf)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
INLINE void vf_store_f16(uint16_t *p, vf v) { vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)v))); }

INLINE void vd_transpose(vd r[VD]) {
    float64x2_t a = (float64x2_t)r[0], b = (float64x2_t)r[1];
    r[0] = (vd)vtrn1q_f64(a, b);
    r[1] = (vd)vtrn2q_f64(a, b);
}
INLINE void vf_transpose(vf r[VF]) {
    vd even[2], odd[2];      /* columns 0 and 2, 1 and 3, of rows in pairs */
    UNROLL for (int i = 0; i < 2; i++) {
        even[i] = (vd)vtrn1q_f32((float32x4_t)r[2 * i], (float32x4_t)r[2 * i + 1]);
        odd[i] = (vd)vtrn2q_f32((float32x4_t)r[2 * i], (float32x4_t)r[2 * i + 1]);
    }
    vd_transpose(even);
    vd_transpose(odd);
    r[0] = (vf)even[0], r[1] = (vf)odd[0], r[2] = (vf)even[1], r[3] = (vf)odd[1];
}

INLINE vf vf_fold(const vf r[4]) {
    float32x4_t a = vpaddq_f32((float32x4_t)r[0], (float32x4_t)r[1]),
        b = vpaddq_f32((float32x4_t)r[2], (float32x4_t)r[3]);
    return (vf)vpaddq_f32(a, b);
}
INLINE vd vd_fold(const vd r[2]) { return (vd)vpaddq_f64((float64x2_t)r[0], (float64x2_t)r[1]); }
INLINE vf vf_sums(const vf r[1]) { return r[0]; }
INLINE vd vd_sums(const vd r[1]) { return r[0]; }
