/* open_task.h: sets a task's rows, keys and arrays. */
#ifndef ATTNC_OPEN_TASK_H
#define ATTNC_OPEN_TASK_H

#include "call/call.h"

/* First row of a query block. Blocks differ by at most one register tile of rows, so that threads finish together. */
static inline ix first_row(const Params *p, ix block) {
    return ix_min(ceil_div(p->rows, GROUP_ROWS) * block / p->q_blocks * GROUP_ROWS, p->rows);
}

/* Sets the keys and values of kv head `head`, counted over the batch. */
static void open_head(const Params *p, Task *t, ix head) {
    t->batch = head / p->kv_heads;
    t->kv_head = head % p->kv_heads;
    t->lengths = lengths_of(p, t->batch);
    t->key = address(&p->key, &p->batch, t->batch, t->kv_head);
    t->value = address(&p->value, &p->batch, t->batch, t->kv_head);
    t->key_scale = (const float *)address(&p->key_scale, &p->batch, t->batch, t->kv_head);
    t->value_scale = (const float *)address(&p->value_scale, &p->batch, t->batch, t->kv_head);
    t->k_positions = address(&p->k_positions, &p->batch, t->batch, t->kv_head);
    t->key_rows = (const int64_t *)address(&p->key_rows, &p->batch, t->batch, t->kv_head);
}

/* Sets the addresses of the task's batch element in the other arrays. */
static void open_arrays(const Params *p, Task *t) {
    t->query = address(&p->query, &p->batch, t->batch, 0);
    t->out = address(&p->out, &p->batch, t->batch, 0);
    t->lse = address(&p->lse, &p->batch, t->batch, 0);
    t->weights = address(&p->weights, &p->batch, t->batch, 0);
    t->scores = address(&p->scores, &p->batch, t->batch, 0);
    t->mask = address(&p->mask, &p->batch, t->batch, 0);
    t->block_mask = address(&p->block_mask, &p->batch, t->batch, 0);
    t->key_indices = address(&p->key_indices, &p->batch, t->batch, 0);
    t->key_mask = address(&p->key_mask, &p->batch, t->batch, 0);
    t->bias = address(&p->bias, &p->batch, t->batch, 0);
    t->relative = address(&p->relative, &p->batch, t->batch, 0);
    t->q_segments = address(&p->q_segments, &p->batch, t->batch, 0);
    t->k_segments = address(&p->k_segments, &p->batch, t->batch, 0);
}

/* Sets the rows of a query block of a kv head, their visible keys, and the blocks of keys of a split that they need. */
static void open_task(const Params *p, Task *t, ix head, ix block, ix split) {
    ix first = PTRDIFF_MAX, last = 0;
    open_head(p, t, head);
    t->first = first_row(p, block);
    t->rows = first_row(p, block + 1) - t->first;
    ix position = t->first / p->heads_per_kv, member = t->first % p->heads_per_kv;
    Range keys = visible(p, t->lengths, position);
    for (ix r = 0; r < t->rows; r++) {
        t->row[r] = (Row){keys.start, keys.stop, position, t->kv_head * p->heads_per_kv + member};
        if (keys.start < keys.stop) first = ix_min(first, keys.start), last = ix_max(last, keys.stop);
        if (++member == p->heads_per_kv) {
            position++, member = 0;
            keys = visible(p, t->lengths, position);
        }
    }
    t->block_start = ix_max(first / p->block_k, split * p->split_k);
    t->block_stop = ix_min(ceil_div(last, p->block_k), (split + 1) * p->split_k);
    open_arrays(p, t);
}

/* Sets the positions of a block's keys; returns whether any of rows first .. last of the batch element may see one of
 * them, 1 without k_positions. */
static int open_block(const Params *p, Task *t, ix block, ix first, ix last) {
    if (!p->by_position) return 1;
    const ix key = block * p->block_k, stop = ix_min(key + p->block_k, t->lengths.kv_length);
    const Range rows = {positions_seen(p, t->lengths, first).start, positions_seen(p, t->lengths, last).stop};
    t->positions = positions_of_keys(t->k_positions, p->k_positions.col, key, stop);
    return overlap(rows, t->positions.span);
}

static int open_block_of_head(const Params *p, Task *t, ix block) {
    return open_block(p, t, block, 0, t->lengths.q_length - 1);
}

/* Keys of the opened block that row i may see by position; if positions do not ascend, all once it may see one. */
static Range keys_seen(const Params *p, const Task *t, ix i, ix block) {
    const Range seen = positions_seen(p, t->lengths, i), span = t->positions.span;
    const char *k = t->k_positions;
    ix start = block * p->block_k, stop = ix_min(start + p->block_k, t->lengths.kv_length), first = start;
    if (i >= t->lengths.q_length || !overlap(seen, span)) return (Range){0, 0};
    if (t->positions.ascend && seen.start > span.start)
        start = first_key_from(k, p->k_positions.col, first, stop, seen.start);
    if (t->positions.ascend && seen.stop < span.stop)
        stop = first_key_from(k, p->k_positions.col, first, stop, seen.stop);
    return start < stop ? (Range){start, stop} : (Range){0, 0};
}

/* Sets the rows' ranges of keys within a block; returns whether any row sees a key of it. */
static int open_block_of_rows(const Params *p, Task *t, ix block) {
    if (!p->by_position) return 1;
    const int near = open_block(p, t, block, t->row[0].position, t->row[t->rows - 1].position);
    int some = 0;
    for (ix r = 0; r < t->rows; r++) {
        Row *row = t->row + r;
        const int again = r && row->position == row[-1].position;       /* query heads of a kv head */
        Range keys = {0, 0};
        if (again) keys = (Range){row[-1].start, row[-1].stop};
        else if (near) keys = keys_seen(p, t, row->position, block);
        row->start = keys.start, row->stop = keys.stop;
        some |= keys.start < keys.stop;
    }
    return some;
}

/* Sets the next rows of a walk over a query head (KEY_STATISTICS); returns whether any sees the block by position. */
static int open_walk(const Params *p, Task *t, ix head, ix first, ix block) {
    const KeyRequest *k = &p->key_request;
    ix begin = block * p->block_k;
    int some = 0;
    t->first = first;
    t->rows = ix_min(p->block_q, k->walk - first);
    for (ix r = 0; r < t->rows; r++) {
        ix position = k->order ? k->order[first + r] : first + r;
        Range keys = p->by_position ? keys_seen(p, t, position, block) : visible(p, t->lengths, position);
        t->row[r] = (Row){keys.start, keys.stop, position, head};
        some |= keys.start < ix_min(keys.stop, begin + p->block_k) && begin < keys.stop;
    }
    return some;
}

#endif
