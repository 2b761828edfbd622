/* key_lists.h: which keys a row may see by key_indices: those of its list, ascending; -1 is none and comes first. */
#ifndef ATTNC_KEY_LISTS_H
#define ATTNC_KEY_LISTS_H

#include <string.h>

#include "call/task.h"

/* The list of task row r; its keys are contiguous. */
static inline const int64_t *list_of_row(const Params *p, const Task *t, ix r) {
    const Array *a = &p->key_indices;
    return (const int64_t *)(t->key_indices + t->row[r].head / p->list_heads * a->head + t->row[r].position * a->row);
}

/* The first place in a list with at least a given key. */
static inline ix place_in_list(const int64_t *list, ix n, ix key) {
    return first_key_from((const char *)list, sizeof *list, 0, n, key);
}

/* The smallest range within `keys` that has every key which a row of the group names. */
static inline Range keys_in_lists(const Params *p, const Task *t, ix r0, ix n, Range keys) {
    const int64_t *before = NULL;
    Range named = {keys.stop, keys.start};
    for (ix r = r0; r < r0 + n; r++) {
        const int64_t *list = list_of_row(p, t, r);
        if (t->row[r].start == t->row[r].stop || list == before) continue;
        before = list;
        const ix first = place_in_list(list, p->list_keys, keys.start);
        const ix stop = place_in_list(list, p->list_keys, keys.stop);
        if (first == stop) continue;
        named.start = ix_min(named.start, list[first]);
        named.stop = ix_max(named.stop, list[stop - 1] + 1);
    }
    return named;
}

/* Clears allow[j], j < n, where row r may not see key from + j. */
static inline void and_list(const Params *p, const Task *t, ix r, ix from, ix n, uint8_t *allow) {
    const int64_t *list = list_of_row(p, t, r);
    ix j = 0;
    for (ix k = place_in_list(list, p->list_keys, from); k < p->list_keys && list[k] < from + n; k++) {
        memset(allow + j, 0, list[k] - from - j);
        j = list[k] - from + 1;
    }
    memset(allow + j, 0, n - j);
}

#endif
