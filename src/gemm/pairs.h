/* pairs.h: rows of bfloat16 as pairs of numbers in a word, the form in which dot-product instructions take them. */
#ifndef ATTNC_PAIRS_H
#define ATTNC_PAIRS_H

#include "call/params.h"
#include "simd/simd.h"

/* Beside the dtypes of params.h: words of two bfloat16; rows of bfloat16 that are taken two at a time (rank1.h). */
enum { PAIRS = 8, ROW_PAIRS };

#if BF16_DOT

/* n bfloat16 as ceil(n / 2) pairs, their sign bits changed by `flip`. */
static void load_pairs(const char *src, ix stride, ix n, unsigned flip, float *dst) {
    for (ix i = 0; i < n; i += 2) {
        uint16_t low, high = 0;
        memcpy(&low, src + i * stride, 2);
        if (i + 1 < n) memcpy(&high, src + (i + 1) * stride, 2);
        uint32_t pair = (uint32_t)(low ^ flip) | (uint32_t)(high ^ (i + 1 < n ? flip : 0)) << 16;
        memcpy(dst + i / 2, &pair, 4);
    }
}

/* A query row as pairs: in place, or a copy. */
static const float *pair_row(const Params *p, const char *src, float *copy) {
    if (p->query.col == 2 && p->head_dim % 2 == 0 && !p->flip && (uintptr_t)src % 4 == 0) return (const float *)src;
    load_pairs(src, p->query.col, p->head_dim, p->flip ? 0x8000 : 0, copy);
    return copy;
}

#endif
#endif
