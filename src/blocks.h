/* blocks.h: integers only: which keys a query row may see by position, and how a call is cut into blocks. */
#ifndef ATTNC_BLOCKS_H
#define ATTNC_BLOCKS_H

#include "params.h"

enum { SKIP, PARTIAL, FULL };        /* what a group of rows sees of a block of keys */
enum { GROUP_ROWS = 6 };             /* rows of a register tile */
enum { DIRECT_ROWS = 16 };           /* most rows that read keys and values in place, all of them as one group */
enum { AHEAD_BYTES = 16384 };        /* keys and values in place are asked for so far before their use (8 K: 5 % slower) */
enum { SHORT_DEPTH = 128 };          /* deepest heads whose rows take all steps at once: a strip of queries is 8 KB */
enum { SHORT_KEYS = 512 };           /* and most keys of them: 32 rows and 512 keys 15 % faster than packed, 64 rows 4 % */
enum { DIRECT_KEYS = 64 };           /* keys of a step of the weighted sum over values in place */

static inline ix least(ix a, ix b) { return a < b ? a : b; }
static inline ix most(ix a, ix b) { return a > b ? a : b; }
static inline ix ceil_div(ix a, ix b) { return (a + b - 1) / b; }
static inline ix round_up(ix a, ix b) { return ceil_div(a, b) * b; }
/* Rows of each register tile, where n rows are shared evenly by as few as hold them. */
static inline ix rows_of_tile(ix n) { return ceil_div(n, ceil_div(n, GROUP_ROWS)); }

typedef struct { ix start, stop; } Range;

/* Positions of one batch element. */
typedef struct { ix q_length, kv_length, offset; } Lengths;

static inline Lengths lengths_of(const Params *p, ix b) {
    Lengths n = {batch_int(&p->q_lengths, p, b, p->q_len), batch_int(&p->kv_lengths, p, b, p->kv_len), 0};
    n.offset = batch_int(&p->q_offset, p, b, n.kv_length - n.q_length);
    return n;
}

/* a + b for window bounds: positions may be any int64, so the sum stops at the ends instead of wrapping. */
static inline ix saturating_add(ix a, ix b) {
    ix sum;
    return __builtin_add_overflow(a, b, &sum) ? (b < 0 ? PTRDIFF_MIN : PTRDIFF_MAX) : sum;
}

/* Keys that query position i may see by length, causal and window; empty (0, 0) for a row past its length. */
static inline Range visible(const Params *p, Lengths n, ix i) {
    ix position = saturating_add(i, n.offset), start = 0, stop = n.kv_length;
    if (p->causal) stop = least(stop, saturating_add(position, 1));
    if (p->right >= 0) stop = least(stop, saturating_add(saturating_add(position, p->right), 1));
    if (p->left >= 0) start = most(start, saturating_add(position, -p->left));
    if (i >= n.q_length || start >= stop) return (Range){0, 0};
    return (Range){start, stop};
}

#endif
