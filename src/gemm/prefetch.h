/* prefetch.h: a cursor that prefetches rows in address order, ahead of their use. */
#ifndef ATTNC_PREFETCH_H
#define ATTNC_PREFETCH_H

#include "call/task.h"

/* Lines are prefetched in address order whatever the order of the loads, because that is how memory is fast:
 * prefetching the lines of a register tile's own loads, which are a row apart, reaches 70 % of read bandwidth, address
 * order 84 % (float32, 4 rows). */
typedef struct {
    const char *at, *end;                /* the next line, and the end of its row */
    ix row, gap;                         /* from the start of a row to the next one, and from its end */
    int half;                            /* prefetch half of what is used, because the rows of a step are used twice */
} Prefetch;                              /* {0}: none */

/* The rows of `bytes` bytes from `at` on. */
static inline Prefetch prefetch_from(const Array *a, ix bytes, const char *at) {
    return (Prefetch){.at = at, .end = at + bytes, .row = a->row, .gap = a->row - bytes};
}

/* The same, PREFETCH_BYTES ahead of row `at` of a block. Where two tall tiles use a step of rows one after the other,
 * both prefetch, and a whole step ahead (16 rows of float32: 181 cycles a key instead of 215). */
static inline Prefetch prefetch_ahead_of(const Array *a, ix bytes, const char *block, ix at, int twice) {
    ix rows = ix_max(PREFETCH_BYTES / ix_max(bytes, 1), twice ? IN_PLACE_KEYS : 0);
    Prefetch prefetch = prefetch_from(a, bytes, block + (rows + at) * a->row);
    prefetch.half = twice;
    return prefetch;
}

static inline __attribute__((always_inline)) void prefetch_advance(Prefetch *s, ix bytes) {
    s->at += bytes;
    if (s->at >= s->end) s->at = s->end + s->gap, s->end += s->row;
}

/* Prefetch the lines that begin in the next `bytes`, a constant. */
static inline __attribute__((always_inline)) void prefetch_next(Prefetch *s, const ix bytes) {
    if (!s->end) return;
    if (bytes >= 64 || ((uintptr_t)s->at & 63) < (uintptr_t)bytes)
        for (int i = 0; i < bytes; i += 64) __builtin_prefetch(s->at + i);
    prefetch_advance(s, bytes);
}

/* Prefetch the lines of `bytes` bytes from `at` on, to be read or, with `write`, to be written. */
static inline __attribute__((always_inline)) void prefetch_lines(const char *at, ix bytes, const int write) {
    for (ix i = 0; i < bytes; i += 64) {
        if (write) __builtin_prefetch(at + i, 1);
        else __builtin_prefetch(at + i);
    }
}

#endif
