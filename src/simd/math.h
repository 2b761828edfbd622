/* math.h: exp2 of t <= 0, tanh, and the logarithm of x >= 1, on vectors.
 *
 * exp2: 2**t = 2**n * p(t - n) with n the nearest integer; t - n is exact, so no two-part ln 2 is needed. Below the
 * smallest normal exponent the result is exactly 0 (a weight of -inf is 0, and no subnormal slows the products).
 * Largest error with fma, measured: float 0.92 ulp (degree 6, minimax; 8e-10 before rounding), double 0.90 ulp (degree
 * 11, Chebyshev nodes, 8.5e-18); without fma 1.18. tests/kernels/test_simd.py holds bounds derived from the operations.
 * NaN gives NaN. */
#ifndef ATTNC_MATH_H
#define ATTNC_MATH_H

#include "simd/simd.h"

/* (2**r - 1) / r for |r| <= 1/2 */
INLINE vf vf_exp2m1_over(vf r) {
    vf p = vf_set1(0x1.41fbbcp-13f);
    p = vf_fma(p, r, vf_set1(0x1.5f3e52p-10f));
    p = vf_fma(p, r, vf_set1(0x1.3b2d4cp-7f));
    p = vf_fma(p, r, vf_set1(0x1.c6aee8p-5f));
    p = vf_fma(p, r, vf_set1(0x1.ebfbdcp-3f));
    return vf_fma(p, r, vf_set1(0x1.62e430p-1f));
}
/* Twice as many terms, in pairs, which halve the chain of dependent operations: 9 cycles a vector instead of 10
 * (AVX-512), 15 instead of 52 (SSE2). The first two are no pair, which would cost a fifth of an ulp. */
INLINE vd vd_exp2m1_over(vd r) {
    vd square = r * r;
    vd a = vd_fma(vd_set1(0x1.e9d3fe3952179p-32), r, vd_set1(0x1.e6063f7217bc6p-28));
    vd b = vd_fma(vd_set1(0x1.b524fae627834p-24), r, vd_set1(0x1.62bfd47773353p-20));
    vd c = vd_fma(vd_set1(0x1.ffcbfc670dcd4p-17), r, vd_set1(0x1.430913096fd9fp-13));
    vd d = vd_fma(vd_set1(0x1.5d87fe78a5276p-10), r, vd_set1(0x1.3b2ab6fba1ddap-7));
    vd e = vd_fma(vd_set1(0x1.c6b08d704a0c2p-5), r, vd_set1(0x1.ebfbdff82c598p-3));
    vd p = vd_fma(vd_fma(vd_fma(vd_fma(a, square, b), square, c), square, d), square, e);
    return vd_fma(p, r, vd_set1(0x1.62e42fefa39efp-1));
}

INLINE vf vf_exp2(vf t) {
    vf n = vf_round(t), r = t - n;
    return vf_zero_below(vf_scale2(vf_fma(vf_exp2m1_over(r), r, vf_set1(1)), n), t, -126);
}
INLINE vd vd_exp2(vd t) {
    vd n = vd_round(t), r = t - n;
    return vd_zero_below(vd_scale2(vd_fma(vd_exp2m1_over(r), r, vd_set1(1)), n), t, -1022);
}

INLINE float vf_exp2_one(float t) { return vf_exp2(vf_set1(t))[0]; }
INLINE double vd_exp2_one(double t) { return vd_exp2(vd_set1(t))[0]; }

/* exp2 of t of any sign: a score may be above a given lse. */
INLINE vf vf_exp2_any(vf t) {
    vf x = vf_exp2(-(vf)((vfi)t & INT32_MAX));
    vfi positive = t > vf_set1(0);
    return (vf)(((vfi)(vf_set1(1) / x) & positive) | ((vfi)x & ~positive));
}
INLINE vd vd_exp2_any(vd t) {
    vd x = vd_exp2(-(vd)((vdi)t & INT64_MAX));
    vdi positive = t > vd_set1(0);
    return (vd)(((vdi)(vd_set1(1) / x) & positive) | ((vdi)x & ~positive));
}

/* Whether all x are 0: of x - x, whether all are finite. */
INLINE int vf_all_zero(vf x) {
    vfi some = ~(x == 0), none = {0};
    return !memcmp(&some, &none, sizeof none);
}
INLINE int vd_all_zero(vd x) {
    vdi some = ~(x == 0), none = {0};
    return !memcmp(&some, &none, sizeof none);
}

/* tanh x = e / (e + 2), e = exp(2|x|) - 1 built so that a small x loses no digits; beyond 2|x| log2(e) = 60 it is 1. */
INLINE vf vf_tanh(vf x) {
    vf sign = (vf)((vfi)x & INT32_MIN), ax = (vf)((vfi)x & INT32_MAX);
    vf t = -vf_max(vf_set1(-60), -(ax * vf_set1(0x1.715476p+1f)));
    vf n = vf_round(t), r = t - n, power = vf_scale2(vf_set1(1), n);
    vf e = vf_fma(power, r * vf_exp2m1_over(r), power - vf_set1(1));
    return (vf)((vfi)(e / (e + vf_set1(2))) | (vfi)sign);
}
INLINE vd vd_tanh(vd x) {
    vd sign = (vd)((vdi)x & INT64_MIN), ax = (vd)((vdi)x & INT64_MAX);
    vd t = -vd_max(vd_set1(-60), -(ax * vd_set1(0x1.71547652b82fep+1)));
    vd n = vd_round(t), r = t - n, power = vd_scale2(vd_set1(1), n);
    vd e = vd_fma(power, r * vd_exp2m1_over(r), power - vd_set1(1));
    return (vd)((vdi)(e / (e + vd_set1(2))) | (vdi)sign);
}

/* log x for x >= 1: x = 2**k * m with m in [sqrt(1/2), sqrt(2)), log m = 2 artanh f = 2 (f + f**3/3 + ... + f**21/21)
 * with f = (m - 1) / (m + 1); the omitted terms are below 2e-17 of it. A NaN stays one. */
INLINE vd vd_log(vd x) {
    const vdi root = (vdi){0} + 0x3FE6A09E667F3BCD;                        /* sqrt(1/2) */
    vdi n = (vdi)(((vdu)((vdi)x - root)) >> 52);
    vd k = (vd)(n | 0x4330000000000000) - vd_set1(0x1p52), m = (vd)((vdi)x - (n << 52));
    vd f = (m - vd_set1(1)) / (m + vd_set1(1)), r = f * f, p = vd_set1(2. / 21);
    for (int i = 19; i > 1; i -= 2) p = vd_fma(p, r, vd_set1(2. / i));
    vd low = vd_fma(f * r, p, k * vd_set1(0x1.a39ef35793c76p-33));
    return k * vd_set1(0x1.62e42feep-1) + (f + f + low) + (x - x);         /* ln 2 in two parts, the product exact */
}

#endif
