/* base.h: the primitives of simd.h in plain compiler vectors, for any processor: the definition of each. */

#define TILE_VECTORS 2   /* 6 rows x 2 vectors: 12 of 16 registers hold sums */

#define ROUND_F32 0x1.8p23f   /* (x + this) - this is the integer nearest to |x| < 2**22, ties to even */
#define ROUND_F64 0x1.8p52

INLINE vf vf_choose(vfi yes, vf a, vf b) { return (vf)(((vfi)a & yes) | ((vfi)b & ~yes)); }
INLINE vd vd_choose(vdi yes, vd a, vd b) { return (vd)(((vdi)a & yes) | ((vdi)b & ~yes)); }

INLINE vf vf_fma(vf a, vf b, vf c) { return a * b + c; }
INLINE vd vd_fma(vd a, vd b, vd c) { return a * b + c; }
INLINE vf vf_max(vf a, vf b) { return vf_choose(a > b, a, b); }
INLINE vd vd_max(vd a, vd b) { return vd_choose(a > b, a, b); }
INLINE vf vf_round(vf a) { return (a + ROUND_F32) - ROUND_F32; }
INLINE vd vd_round(vd a) { return (a + ROUND_F64) - ROUND_F64; }
#include "exponent.h"

INLINE vf vf_zero_below(vf p, vf t, float limit) { return (vf)((vfi)p & ~(t < limit)); }
INLINE vd vd_zero_below(vd p, vd t, double limit) { return (vd)((vdi)p & ~(t < limit)); }

INLINE vf vf_unless_equal(vf v, vf a, vf b) { return vf_choose(a == b, b, v); }
INLINE vd vd_unless_equal(vd v, vd a, vd b) { return vd_choose(a == b, b, v); }

INLINE vf vf_keep_bits(vf v, unsigned bits, vf other) {
    vfi lane = {1, 2, 4, 8};
    return vf_choose((lane & (int32_t)bits) != 0, v, other);
}
INLINE vd vd_keep_bits(vd v, unsigned bits, vd other) {
    vdi lane = {1, 2};
    return vd_choose((lane & (int64_t)bits) != 0, v, other);
}
INLINE vf vf_keep_bytes(vf v, const uint8_t *b, vf other) {
    vfi bytes = {b[0], b[1], b[2], b[3]};
    return vf_choose(bytes != 0, v, other);
}
INLINE vd vd_keep_bytes(vd v, const uint8_t *b, vd other) {
    vdi bytes = {b[0], b[1]};
    return vd_choose(bytes != 0, v, other);
}

INLINE unsigned vf_above(vf a, vf b) {
    vfi yes = (a > b) & (vfi){1, 2, 4, 8};
    return yes[0] | yes[1] | yes[2] | yes[3];
}
INLINE unsigned vd_above(vd a, vd b) {
    vdi yes = (a > b) & (vdi){1, 2};
    return yes[0] | yes[1];
}

INLINE float vf_sum(vf v) { return (v[0] + v[2]) + (v[1] + v[3]); }
INLINE double vd_sum(vd v) { return v[0] + v[1]; }
INLINE float vf_largest(vf v) {
    v = vf_max(v, __builtin_shufflevector(v, v, 2, 3, 0, 1));
    return v[0] > v[1] ? v[0] : v[1];
}
INLINE double vd_largest(vd v) { return v[0] > v[1] ? v[0] : v[1]; }

INLINE void vf_transpose(vf r[VF]) {
    vf a = __builtin_shufflevector(r[0], r[1], 0, 4, 1, 5), b = __builtin_shufflevector(r[2], r[3], 0, 4, 1, 5);
    vf c = __builtin_shufflevector(r[0], r[1], 2, 6, 3, 7), d = __builtin_shufflevector(r[2], r[3], 2, 6, 3, 7);
    r[0] = __builtin_shufflevector(a, b, 0, 1, 4, 5);
    r[1] = __builtin_shufflevector(a, b, 2, 3, 6, 7);
    r[2] = __builtin_shufflevector(c, d, 0, 1, 4, 5);
    r[3] = __builtin_shufflevector(c, d, 2, 3, 6, 7);
}
INLINE void vd_transpose(vd r[VD]) {
    vd a = __builtin_shufflevector(r[0], r[1], 0, 2), b = __builtin_shufflevector(r[0], r[1], 1, 3);
    r[0] = a;
    r[1] = b;
}

INLINE vf vf_fold(const vf r[TILE_VECTORS]) {
    return __builtin_shufflevector(r[0], r[1], 0, 4, 1, 5) + __builtin_shufflevector(r[0], r[1], 2, 6, 3, 7);
}
INLINE vd vd_fold(const vd r[TILE_VECTORS]) {
    return __builtin_shufflevector(r[0], r[1], 0, 2) + __builtin_shufflevector(r[0], r[1], 1, 3);
}
INLINE vf vf_sums(const vf r[VF / TILE_VECTORS]) {
    return __builtin_shufflevector(r[0], r[1], 0, 1, 4, 5) + __builtin_shufflevector(r[0], r[1], 2, 3, 6, 7);
}
INLINE vd vd_sums(const vd r[VD / TILE_VECTORS]) { return r[0]; }

INLINE vf vf_load_i8(const int8_t *p) { return (vf){p[0], p[1], p[2], p[3]}; }
/* Copied through arrays, because p need not be aligned. */
INLINE vf vf_load_f16(const uint16_t *p) {
    uint16_t h[VF];
    memcpy(h, p, sizeof h);
    return (vf){f16_widen(h[0]), f16_widen(h[1]), f16_widen(h[2]), f16_widen(h[3])};
}
INLINE void vf_store_f16(uint16_t *p, vf v) {
    uint16_t h[VF];
    for (int i = 0; i < VF; i++) h[i] = f16_round(v[i]);
    memcpy(p, h, sizeof h);
}
