/* block_mask.h: which keys a row may see by block_mask, each cell of which covers a block of rows and keys. */
#ifndef ATTNC_BLOCK_MASK_H
#define ATTNC_BLOCK_MASK_H

#include <string.h>

#include "call/task.h"

/* The cells of task row r: a byte for each block of keys, `col` bytes apart. */
static inline const char *cells_of_row(const Params *p, const Task *t, ix r) {
    const Array *a = &p->block_mask;
    return t->block_mask + t->row[r].head * a->head + (p->mask_row + t->row[r].position) / p->mask_rows * a->row;
}

/* The smallest range within `keys` that has every key that a row of the group sees. */
static inline Range keys_in_seen_cells(const Params *p, const Task *t, ix r0, ix n, Range keys) {
    const ix size = p->mask_keys, zero = p->mask_key, col = p->block_mask.col;
    const ix first = (keys.start + zero) / size, last = (keys.stop - 1 + zero) / size;
    const char *before = NULL;
    ix low = last + 1, high = first - 1;
    for (ix r = r0; r < r0 + n; r++) {
        const char *cells = cells_of_row(p, t, r);
        if (t->row[r].start == t->row[r].stop || cells == before) continue;
        before = cells;
        for (ix c = first; c < low; c++)
            if (cells[c * col]) low = c;
        for (ix c = last; c > high; c--)
            if (cells[c * col]) high = c;
    }
    return (Range){ix_max(keys.start, low * size - zero), ix_min(keys.stop, (high + 1) * size - zero)};
}

/* Clears allow[j], j < n, where row r may not see key from + j. */
static inline void and_cells(const Params *p, const Task *t, ix r, ix from, ix n, uint8_t *allow) {
    const char *cells = cells_of_row(p, t, r);
    for (ix j = 0, stop; j < n; j = stop) {
        const ix cell = (from + j + p->mask_key) / p->mask_keys;
        stop = ix_min(n, (cell + 1) * p->mask_keys - p->mask_key - from);
        if (!cells[cell * p->block_mask.col]) memset(allow + j, 0, stop - j);
    }
}

#endif
