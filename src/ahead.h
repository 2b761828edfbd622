/* ahead.h: rows in place are asked for ahead of their use, as one stream of cache lines. */
#ifndef ATTNC_AHEAD_H
#define ATTNC_AHEAD_H

#include "task.h"

/* The lines are asked for one behind the other, whatever the order in which the loads come to them: that is how memory is
 * fast. With the lines of a register tile's loads, which are a row's step apart, float32 and 4 rows reach 70 % of the
 * bandwidth of plain reading, so 84 %. */
typedef struct {
    const char *at, *end;                /* the next line, and where its row ends */
    ix row, gap;                         /* from the start of a row to the next one, and from its end */
    int half;                            /* of what is used is asked for, as the rows of a step are used twice */
} Ahead;                                 /* {0}: nothing is asked for */

/* The stream of rows of so many bytes. */
static inline Ahead ahead_from(const Array *a, ix bytes, const char *at) {
    return (Ahead){at, at + bytes, a->row, a->row - bytes, 0};
}

/* The same, AHEAD_BYTES ahead of row `at` of a block of rows of so many bytes. Where two high tiles use a step of rows one
 * after the other, both take part, and the stream is a whole step ahead (16 rows of float32: 215 cycles a key, so 181). */
static inline Ahead ahead_of(const Array *a, ix bytes, const char *block, ix at, int twice) {
    Ahead ahead = ahead_from(a, bytes, block + (most(AHEAD_BYTES / most(bytes, 1), twice ? DIRECT_KEYS : 0) + at) * a->row);
    ahead.half = twice;
    return ahead;
}

/* Ask for the next `bytes`, a constant. */
static inline __attribute__((always_inline)) void fetch(Ahead *s, const ix bytes) {
    if (!s->end) return;
    if (bytes >= 64 || ((uintptr_t)s->at & 63) < (uintptr_t)bytes)
        for (int i = 0; i < bytes; i += 64) __builtin_prefetch(s->at + i);
    s->at += bytes;
    if (s->at >= s->end) s->at += s->gap, s->end += s->row;
}

#endif
