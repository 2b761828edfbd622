/* half.h: float16 and bfloat16 as bits, one element at a time; the only place that knows their layout. */
#ifndef ATTNC_HALF_H
#define ATTNC_HALF_H

#include <stdint.h>

static inline float bf16_widen(uint16_t h) {
    union { uint32_t u; float f; } x = {(uint32_t)h << 16};
    return x.f;
}
/* Float to bfloat16, ties to even; a NaN stays one although its payload is cut. */
static inline uint16_t bf16_round(float f) {
    union { uint32_t u; float f; } x = {.f = f};
    uint32_t rounded = (x.u + 0x7FFF + ((x.u >> 16) & 1)) >> 16;
    return (uint16_t)((x.u & 0x7FFFFFFF) > 0x7F800000 ? (x.u >> 16) | 0x40 : rounded);
}
/* Half to float, one element: the exponent field moved by multiplying with 2**112, infinities and NaN put back. */
static inline float f16_widen(uint16_t h) {
    union { uint32_t u; float f; } x = {(uint32_t)(h & 0x7FFF) << 13};
    x.f *= 0x1p112f;
    if ((h & 0x7C00) == 0x7C00) x.u |= 0x7F800000;
    x.u |= (uint32_t)(h & 0x8000) << 16;
    return x.f;
}
/* Float to half, ties to even: an addition rounds at the right bit, in the subnormal range and above it. */
static inline uint16_t f16_round(float f) {
    union { uint32_t u; float f; } x = {.f = f};
    uint16_t sign = (uint16_t)((x.u >> 16) & 0x8000);
    x.u &= 0x7FFFFFFF;
    if (x.u > 0x7F800000) return sign | 0x7E00 | (uint16_t)((x.u >> 13) & 0x3FF);
    if (x.u >= 0x477FF000) return sign | 0x7C00;
    if (x.u < 0x38800000) {
        x.f += 0.5f;
        return sign | (uint16_t)(x.u - 0x3F000000);
    }
    x.u += 0xFFF + ((x.u >> 13) & 1) - 0x38000000;
    return sign | (uint16_t)(x.u >> 13);
}

#endif
