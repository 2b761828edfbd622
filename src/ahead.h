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
    int turn, turns;                     /* one call of so many moves on */
} Ahead;

/* The stream for row `at` of a block of rows of so many bytes. A task's only group is AHEAD_BYTES ahead. Of several, which
 * find the block in L2 but for the first, each asks for its share of the next one: memory is never idle (float32, 16 rows:
 * 20 % faster than with all of it in the first group). */
static inline Ahead ahead_of(const Params *p, const Task *t, const Array *a, ix bytes, const char *block, ix at, ix r0) {
    ix groups = ceil_div(t->rows, GROUP_ROWS), row = AHEAD_BYTES / most(bytes, 1) + at;
    if (groups > 1) row = p->block_k + (r0 / GROUP_ROWS * p->block_k + at) / groups;
    const char *from = block + row * a->row;
    return (Ahead){from, from + bytes, a->row, a->row - bytes, 1, (int)groups};
}

/* Ask for the next `bytes`, a constant. */
static inline __attribute__((always_inline)) void fetch(Ahead *s, const ix bytes) {
    if (--s->turn) return;
    s->turn = s->turns;
    if (bytes >= 64 || ((uintptr_t)s->at & 63) < (uintptr_t)bytes)
        for (int i = 0; i < bytes; i += 64) __builtin_prefetch(s->at + i);
    s->at += bytes;
    if (s->at >= s->end) s->at += s->gap, s->end += s->row;
}

#endif
