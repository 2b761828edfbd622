/* sizes.h: the sizes of tiles and blocks, each with its measurement (float32 on AVX-512 unless stated). */
#ifndef ATTNC_SIZES_H
#define ATTNC_SIZES_H

#include "call/integers.h"

enum {
    GROUP_ROWS = 6,                      /* rows of a register tile: 6 x 4 vectors fill the 32 registers of AVX-512 */
    IN_PLACE_ROWS = 16,                  /* most rows of a kv head that read keys and values in place, as one group */
    IN_PLACE_KEYS = 64,                  /* keys of a step of the weighted sum over values in place */
    CHAIN = 256,                         /* longest chain of additions: a deeper product is a sum of several chains,
                                            because rounding errors grow with the length of a chain */
    FEW_ROWS = 2,                        /* most query rows for attention/in_place_few.h */
    PIECE_BYTES = 4096,                  /* value rows in place that few query rows read before they sum them */
    FUSED_DEPTH = 128,                   /* deepest heads of the fused path: a strip of queries is 8 KB */
    FUSED_KEYS = 512,                    /* longest kv_len that is fused: 15 % faster than packed at 32 rows; 64: 4 % */
    FUSED_BYTES = 224 * 1024,            /* most bytes of keys and values that are fused for more than few_rows rows:
                                            128 keys of depth 64 11 % faster than packed, 208 3 %, 512 equal (AVX2) */
    SHORT_RUN = 8,                       /* values whose rows follow in shorter runs are copied to L1 for the sums */
    GATHER_AHEAD = 32,                   /* keys by which rows that follow from no stride are prefetched ahead */
    PACK_CHUNKS = 4                      /* chunks of values packed together: L1 holds few lines a power of two apart */
};

/* block_k, split_k and the sizes they follow from fix the reduction order, so they are the same on every machine. The
 * sizes of a task do not: they are shares of the L2 cache (process.h), which had 1 MB in these measurements. */
typedef struct {
    ix max_block_k, min_block_k;         /* keys of a block: the most that fit in block_bytes */
    ix block_bytes;                      /* of a block's keys and values: half of L2 */
    ix in_place_block_k;                 /* keys of a block that is read in place, except by strips */
    ix split_k;                          /* keys of a split, where rows are few */
    ix few_rows;                         /* up to this number one task has all rows and packs; keys are split */
    ix block_q;                          /* rows of a task beyond few_rows, */
    ix task_share;                       /* or as many as fit queries and sums into this share (in 64ths) of L2 */
    ix keep_share;                       /* share for the scores that a task keeps for dense weights */
    ix own_share;                        /* share for rows and block of a task that packs for itself: a head, */
    ix part_rows;                        /* or a part of a head with at least this number of rows, */
    ix long_part_rows;                   /* or with this one, if the packed head is longer than SHARED_BYTES */
} Sizes;

static const Sizes SIZES = {
    .max_block_k = 512, .min_block_k = 64,
    .block_bytes = 576 * 1024,           /* 256 K: 3 % slower at D = 128 (avx2, base: the same; float64: 2 %); 512 K:
                                            2 to 5 % slower at 576/512, where it takes half the keys (avx2) */
    .in_place_block_k = 1024,            /* 512: 2 % slower, 128: 12 %, because reads alternate keys and values */
    .split_k = 1024,
    .few_rows = 64,
    .block_q = 192,                      /* 96: 2 % slower, keys come twice from L3 (float64, D = 128: 5 %); 288: 1 % */
    .task_share = 24,                    /* 12, 48: within 1 % at D = 64, 128 and 256, float64 too */
    .keep_share = 24,                    /* 12: 2 to 7 % slower with dense weights; 48: within 3 % */
    .own_share = 72,                     /* half of it: 1,16,2048,2048,64 3 % slower, float64 5 % */
    .part_rows = 512,                    /* one head of 1,024 rows: 256 4 % slower, 1024 9 % */
    .long_part_rows = 24,                /* packing a key takes as long as multiplying 9 rows by it */
};

/* Rows per register tile when the fewest possible tiles share n rows evenly. */
static inline ix rows_of_tile(ix n) { return ceil_div(n, ceil_div(n, GROUP_ROWS)); }

#endif
