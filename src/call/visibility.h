/* visibility.h: which keys a query row may see by position: lengths, causal order and window. */
#ifndef ATTNC_VISIBILITY_H
#define ATTNC_VISIBILITY_H

#include "call/params.h"

enum Visibility { SKIP, PARTIAL, FULL };      /* how much of a block of keys a group of rows sees */

/* Positions of one batch element. */
typedef struct { ix q_length, kv_length, offset; } Lengths;

static inline Lengths lengths_of(const Params *p, ix b) {
    Lengths n = {batch_int(&p->q_lengths, p, b, p->q_len), batch_int(&p->kv_lengths, p, b, p->kv_len), 0};
    n.offset = batch_int(&p->q_offset, p, b, n.kv_length - n.q_length);
    return n;
}

/* Positions that causal order and window let query row i see. */
static inline Range positions_seen(const Params *p, Lengths n, ix i) {
    ix position = saturating_add(i, n.offset), start = PTRDIFF_MIN, stop = PTRDIFF_MAX;
    if (p->causal) stop = saturating_add(position, 1);
    if (p->right >= 0) stop = ix_min(stop, saturating_add(saturating_add(position, p->right), 1));
    if (p->left >= 0) start = saturating_add(position, -p->left);
    return (Range){start, stop};
}

/* Keys that query row i may see, as a range of indices; empty (0, 0) for a row past its length. With k_positions the
 * range ignores causal order and window, which keys_seen() of open_task.h applies block by block. */
static inline Range visible(const Params *p, Lengths n, ix i) {
    Range seen = p->by_position ? (Range){0, PTRDIFF_MAX} : positions_seen(p, n, i);
    ix start = ix_max(seen.start, 0), stop = ix_min(seen.stop, n.kv_length);
    if (i >= n.q_length || start >= stop) return (Range){0, 0};
    return (Range){start, stop};
}

/* Positions of the keys of a block: their span (empty for no keys), and whether they ascend, as in a cache. If they
 * do, a row sees a range of the keys; else each key is tested. */
typedef struct { Range span; int ascend; } Positions;

static inline __attribute__((always_inline)) Positions scan_positions(const char *k, ix stride, ix first, ix stop) {
    int falls = 0;
    if (first >= stop) return (Positions){{0, 0}, 1};
    for (ix j = first + 1; j < stop; j++) falls |= integer_at(k + j * stride) < integer_at(k + (j - 1) * stride);
    int64_t low = integer_at(k + first * stride), high = integer_at(k + (stop - 1) * stride);
    for (ix j = first; falls && j < stop; j++) {
        const int64_t x = integer_at(k + j * stride);
        low = x < low ? x : low;
        high = x > high ? x : high;
    }
    return (Positions){{low, high + 1}, !falls};
}

/* A constant stride lets the compiler vectorize contiguous positions. */
static Positions positions_of_keys(const char *k, ix stride, ix first, ix stop) {
    return stride == sizeof(int64_t) ? scan_positions(k, sizeof(int64_t), first, stop)
                                     : scan_positions(k, stride, first, stop);
}

/* The first of keys start .. stop, whose positions ascend, with at least a given position. */
static ix first_key_from(const char *k, ix stride, ix start, ix stop, ix position) {
    while (start < stop) {
        const ix middle = start + (stop - start) / 2;
        if (integer_at(k + middle * stride) < position) start = middle + 1;
        else stop = middle;
    }
    return start;
}

/* Clears allow[j] where position j, of n that are `stride` bytes apart, is not among those seen. */
static void and_positions(uint8_t *restrict allow, const char *restrict k, ix stride, ix n, Range seen) {
#define AND_POSITIONS(stride) for (ix j = 0; j < n; j++) { \
        const int64_t x = integer_at(k + j * (ix)(stride)); \
        allow[j] &= (x >= seen.start) & (x < seen.stop); \
    }
    if (stride == sizeof(int64_t)) AND_POSITIONS(sizeof(int64_t))
    else AND_POSITIONS(stride)
#undef AND_POSITIONS
}

/* Whether two ranges have a common element. */
static inline int overlap(Range a, Range b) { return ix_max(a.start, b.start) < ix_min(a.stop, b.stop); }

#endif
