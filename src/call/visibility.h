/* visibility.h: which keys a query row may see by position: lengths, causal and window. */
#ifndef ATTNC_VISIBILITY_H
#define ATTNC_VISIBILITY_H

#include "call/params.h"

enum Visibility { SKIP, PARTIAL, FULL };      /* what a group of rows sees of a block of keys */

/* Positions of one batch element. */
typedef struct { ix q_length, kv_length, offset; } Lengths;

static inline Lengths lengths_of(const Params *p, ix b) {
    Lengths n = {batch_int(&p->q_lengths, p, b, p->q_len), batch_int(&p->kv_lengths, p, b, p->kv_len), 0};
    n.offset = batch_int(&p->q_offset, p, b, n.kv_length - n.q_length);
    return n;
}

/* Keys that query position i may see; empty (0, 0) for a row past its length. */
static inline Range visible(const Params *p, Lengths n, ix i) {
    ix position = saturating_add(i, n.offset), start = 0, stop = n.kv_length;
    if (p->causal) stop = ix_min(stop, saturating_add(position, 1));
    if (p->right >= 0) stop = ix_min(stop, saturating_add(saturating_add(position, p->right), 1));
    if (p->left >= 0) start = ix_max(start, saturating_add(position, -p->left));
    if (i >= n.q_length || start >= stop) return (Range){0, 0};
    return (Range){start, stop};
}

#endif
