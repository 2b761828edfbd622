/* half.h: float16 and bfloat16 as bits, one element at a time: the only file that knows their layout. */
#ifndef ATTNC_HALF_H
#define ATTNC_HALF_H

#include <stdint.h>

static inline float bf16_widen(uint16_t h) {
    union { uint32_t u; float f; } x = {(uint32_t)h << 16};
    return x.f;
}
/* Float to bfloat16, ties to even; a NaN stays one, whatever bits its payload loses. */
static inline uint16_t bf16_round(float f) {
    union { uint32_t u; float f; } x = {.f = f};
    uint32_t rounded = (x.u + 0x7FFF + ((x.u >> 16) & 1)) >> 16;
    return (uint16_t)((x.u & 0x7FFFFFFF) > 0x7F800000 ? (x.u >> 16) | 0x40 : rounded);
}
/* Half to float: a multiplication by 2**112 rebiases the exponent; infinities and NaN are restored. */
static inline float f16_widen(uint16_t h) {
    union { uint32_t u; float f; } x = {(uint32_t)(h & 0x7FFF) << 13};
    x.f *= 0x1p112f;
    if ((h & 0x7C00) == 0x7C00) x.u |= 0x7F800000;
    x.u |= (uint32_t)(h & 0x8000) << 16;
    return x.f;
}
/* Double to float on the way to 16 bits: of the two floats around it the one with an odd last bit, so that the next
 * rounding falls on the right side of a tie (Boldo and Melquiond 2008). */
static inline float round_to_odd(double d) {
    union { uint32_t u; float f; } x = {.f = (float)d};
    double rounded = x.f;
    if (d != d || rounded == d || x.u & 1) return x.f;
    x.u += (rounded < 0 ? -rounded : rounded) > (d < 0 ? -d : d) ? -1u : 1u;
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
