/* pairs.h: loads bfloat16 rows as 32-bit words of two numbers, the operands of dot-product instructions. */
#ifndef ATTNC_PAIRS_H
#define ATTNC_PAIRS_H

#include "call/params.h"
#include "simd/simd.h"

/* Operands of rank1.h beside the dtypes of params.h: words of two bfloat16; bfloat16 rows read two at a time. */
enum { PAIRS = 8, ROW_PAIRS };

#if BF16_DOT

/* Loads n bfloat16 as ceil(n / 2) pairs, each number XORed with `flip`. */
static void load_pairs(const char *src, ix stride, ix n, unsigned flip, float *dst) {
    for (ix i = 0; i < n; i += 2) {
        uint16_t low, high = 0;
        memcpy(&low, src + i * stride, 2);
        if (i + 1 < n) memcpy(&high, src + (i + 1) * stride, 2);
        uint32_t pair = (uint32_t)(low ^ flip) | (uint32_t)(high ^ (i + 1 < n ? flip : 0)) << 16;
        memcpy(dst + i / 2, &pair, 4);
    }
}

/* Address of a query row as pairs: in place, or of its copy. */
static const float *pair_row(const Params *p, const char *src, float *copy) {
    if (p->query.col == 2 && p->head_dim % 2 == 0 && !p->flip && (uintptr_t)src % 4 == 0) return (const float *)src;
    load_pairs(src, p->query.col, p->head_dim, p->flip ? 0x8000 : 0, copy);
    return copy;
}

#endif
#endif
