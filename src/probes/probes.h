/* probes.h: this machine's limits with this instruction set: multiply-and-add, reading, filling, copying. */
#ifndef ATTNC_PROBES_H
#define ATTNC_PROBES_H

#include <stddef.h>

#include "simd/simd.h"

#ifdef __aarch64__
enum { CHAINS = 20 };        /* independent sums, at least latency x units: 4 x 4 on the largest Arm cores */
#else
enum { CHAINS = 12 };        /* 4 x 2 on x86; `base` has 16 registers */
#endif

/* n steps of CHAINS multiply-and-adds of whole vectors; returns the sum, so that the compiler keeps them all */
static double multiply_add_f32(long n, float x) {
    vf a[CHAINS], b = vf_set1(x), c = vf_set1(1 - x), sum = vf_set1(0);
    UNROLL for (int i = 0; i < CHAINS; i++) a[i] = vf_set1((float)i);
    for (long k = 0; k < n; k++)
        UNROLL for (int i = 0; i < CHAINS; i++) a[i] = vf_fma(a[i], b, c);
    UNROLL for (int i = 0; i < CHAINS; i++) sum += a[i];
    return vf_sum(sum);
}
static double multiply_add_f64(long n, double x) {
    vd a[CHAINS], b = vd_set1(x), c = vd_set1(1 - x), sum = vd_set1(0);
    UNROLL for (int i = 0; i < CHAINS; i++) a[i] = vd_set1(i);
    for (long k = 0; k < n; k++)
        UNROLL for (int i = 0; i < CHAINS; i++) a[i] = vd_fma(a[i], b, c);
    UNROLL for (int i = 0; i < CHAINS; i++) sum += a[i];
    return vd_sum(sum);
}

/* The same with pairs of bfloat16, both of them x; without dot products of pairs bfloat16 is widened. */
static double multiply_add_bf16(long n, float x) {
    if (!bf16_dot) return multiply_add_f32(n, x);
#if BF16_DOT
    uint16_t halves[2 * VF];
    vf a[CHAINS], sum = vf_set1(0);
    UNROLL for (int i = 0; i < 2 * VF; i++) halves[i] = bf16_round(x);
    vf b = vf_loadu((const float *)halves);
    UNROLL for (int i = 0; i < CHAINS; i++) a[i] = vf_set1((float)i);
    for (long k = 0; k < n; k++)
        UNROLL for (int i = 0; i < CHAINS; i++) a[i] = vf_dot(b, b, a[i]);
    UNROLL for (int i = 0; i < CHAINS; i++) sum += a[i];
    return vf_sum(sum);
#endif
}

static double read_bytes(const char *p, ptrdiff_t n) {
    vf sum[8];
    UNROLL for (int i = 0; i < 8; i++) sum[i] = vf_set1(0);
    for (; n >= 8 * VECTOR_BYTES; n -= 8 * VECTOR_BYTES, p += 8 * VECTOR_BYTES)
        UNROLL for (int i = 0; i < 8; i++) sum[i] += vf_loadu((const float *)(p + i * VECTOR_BYTES));
    return vf_sum((sum[0] + sum[1]) + (sum[2] + sum[3]) + ((sum[4] + sum[5]) + (sum[6] + sum[7])));
}

/* Copies with non-temporal stores, from the first aligned vector of p on. */
static void copy_bytes(char *p, const char *from, ptrdiff_t n) {
    for (ptrdiff_t i = -(uintptr_t)p & (VECTOR_BYTES - 1); i + VECTOR_BYTES <= n; i += VECTOR_BYTES)
        vf_stream((float *)(p + i), vf_loadu((const float *)(from + i)));
    stream_end();
}

static void fill_bytes(char *p, ptrdiff_t n) {
    for (; n >= VECTOR_BYTES; n -= VECTOR_BYTES, p += VECTOR_BYTES) vf_storeu((float *)p, vf_set1(1));
}

#endif
