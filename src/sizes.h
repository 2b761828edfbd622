/* sizes.h: the block sizes in one record, with what each was measured by (float32 with AVX-512, where nothing is said). */
#ifndef ATTNC_SIZES_H
#define ATTNC_SIZES_H

#include "params.h"

/* block_k and split_k, and what they follow from, fix the order of sums: they are constants, whatever the machine. The
 * sizes of a task are free, and are shares of the L2 cache (runtime.h), which is 1 MB where the figures were taken. */
typedef struct {
    ix most_block_k, least_block_k;      /* keys of a block: the most that fit in */
    ix block_bytes;                      /* of their keys and values: half of L2 */
    ix direct_block_k;                   /* keys of a block of few rows that read them in place, but for strips */
    ix split_k;                          /* keys of a split, where rows are few */
    ix few_rows;                         /* up to here one task holds all rows, packs for itself and the keys are split */
    ix block_q;                          /* rows of a task beyond that, */
    ix task_share;                       /* or as many as have queries and sums in this share (1/64) of L2 */
    ix keep_share;                       /* of scores that a task keeps to turn them into dense weights */
    ix whole_share;                      /* of rows and block of a task that packs for itself: a head, */
    ix part_rows;                        /* or a part of it, of so many rows at least */
} Sizes;

static const Sizes SIZES = {
    .most_block_k = 512, .least_block_k = 64,
    .block_bytes = 512 * 1024,           /* 256 K: 3 % slower at D = 128 (avx2, base: the same; float64: 2 %) */
    .direct_block_k = 1024,              /* 512: 2 % slower, 128: 12 %: memory changes between keys and values */
    .split_k = 1024,
    .few_rows = 64,
    .block_q = 192,                      /* 96: 2 % slower, keys come twice from L3 (float64, D = 128: 5 %); 288: 1 % */
    .task_share = 24,                    /* 12, 48: within 1 % at D = 64, 128 and 256, float64 too */
    .keep_share = 24,                    /* 12: 2 to 7 % slower with dense weights; 48: within 3 % */
    .whole_share = 72,                   /* half of it: 1,16,2048,2048,64 3 % slower, float64 5 % */
    .part_rows = 512,                    /* one head of 1,024 rows: 256 4 % slower, 1024 9 % */
};

#endif
