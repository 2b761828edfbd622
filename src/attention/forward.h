/* forward.h (template over REAL; after attention/queries.h, attention/scores.h, attention/finish_scores.h,
 * attention/values.h, attention/in_place.h, attention/in_place_few.h, attention/in_place_pairs.h, gemm/pack_pairs.h,
 * attention/epilogue.h, attention/dense.h, attention/splits.h, attention/weighted_sum.h, attention/fused.h,
 * attention/row_statistics.h, attention/key_statistics.h, attention/relative_terms.h): the loops of a task: blocks
 * of keys, and groups of rows in a block. */

/* Steps that multiply have a second version, for pairs of bfloat16. */
#if PAIR_PRODUCTS
#define STEP_OF(step) (p->pairs ? T(step##_pairs) : T(step))
#else
#define STEP_OF(step) T(step)
#endif

/* Packs a block, and computes what else every row needs of its keys. */
INLINE void T(pack_block)(const Params *p, Task *t, ix block, Packed kv) {
    STEP_OF(pack)(p, t, block, kv);
    if (kv.keys && p->relative_query.data) T(multiply_keys)(p, t, block, kv);
}

/* The packed keys and values of a block; packs them now unless they are shared. */
INLINE Packed T(packed_block)(Call *call, Task *t, ix block) {
    const Params *p = &call->p;
    ix head = t->batch * p->kv_heads + t->kv_head - call->first_head;
    if (p->shared) return packed_at(p, call->format, call->packed + (head * p->k_blocks + block) * p->pack_bytes);
    if (p->unfused == PACKED) T(pack_block)(p, t, block, t->packed);
    return t->packed;
}

/* Computes finished, masked scores of a group and block. */
STEP void T(scores)(const Params *p, Task *t, ix r, ix n, ix block, Packed kv, enum Visibility visibility) {
    if (p->unfused == PACKED) STEP_OF(scores_packed)(p, t, r, n, kv);
    else if (p->unfused == IN_PLACE && T(few)(&p->key, n, p->head_dim)) T(few_scores)(p, t, n, block);
    else STEP_OF(scores_in_place)(p, t, n, block);
    if (p->relative_index) T(add_relative_terms)(p, t, r, n, kv);
    if (!p->raw_scores || visibility == PARTIAL) T(finish_scores)(p, t, r, n);
}

/* Packs a block that all tasks of a kv head share. */
static void T(pack_task)(Call *call, Task *t, ix block, Packed kv) {
    const Params *p = &call->p;
    if (block * p->block_k < t->lengths.kv_length && open_block_of_head(p, t, block)) T(pack_block)(p, t, block, kv);
}

/* ------------------------------------------------------------------------------------------------------ kept scores */

/* Scores that are kept until the row sums are known take one part of scratch per group and block; with a single block
 * all groups use one part in turn. */
INLINE ix T(kept_part)(const Params *p, ix r, ix block) {
    return p->k_blocks > 1 ? r / p->group_rows * p->k_blocks + block : 0;
}

INLINE void T(open_kept)(const Params *p, Task *t, char *kept, ix part) {
    t->s = kept + part * p->group_rows * p->width * (ix)sizeof(REAL);
}

/* Writes dense weights of a group from the kept ones; blocks that were not visited are zeros. */
INLINE void T(write_kept)(const Params *p, Task *t, ix r, ix n, char *kept) {
    for (ix block = 0; block < p->k_blocks; block++) {
        ix part = T(kept_part)(p, r, block);
        int visited = t->block_start <= block && block < t->block_stop;
        T(open_kept)(p, t, kept, part);
        t->column = visited ? t->kept_part[part].start : 0;
        t->column_stop = visited ? t->kept_part[part].stop : 0;
        T(store_kept)(p, t, r, n, block);
    }
}

/* -------------------------------------------------------------------------------------------------------- attention */

/* Attention of one group of rows (six, or all rows in place) over one block of keys, one line per step. */
INLINE void T(attend_group)(const Params *p, Task *t, ix r, ix n, ix block, Packed kv, char *kept) {
    if (p->mode == WEIGHTED_SUM) {
        T(weighted_sum)(p, t, r, n, block, kv);
        return;
    }
    enum Visibility visibility = T(visibility)(p, t, r, n, block);
    if (p->kept_scores) {
        ix part = T(kept_part)(p, r, block);
        T(open_kept)(p, t, kept, part);
        t->kept_part[part] = (Range){t->column, t->column_stop};
    }
    if (visibility == SKIP) return;
    T(scores)(p, t, r, n, block, kv, visibility);
    if (p->row_request.any) T(add_scores_to_statistics)(p, t, r, n, block);
    STEP_OF(online_softmax)(p, t, r, n, block);
    if (p->row_request.any) T(add_weights_to_statistics)(p, t, r, n, block);
    if (!p->value_dim) return;
    if (p->unfused == PACKED) STEP_OF(values_packed)(p, t, r, n, block, kv);
    else if (T(few)(&p->value, n, p->value_dim)) T(few_values)(p, t, n, block);
    else STEP_OF(values_in_place)(p, t, n, block);
}

/* Writes the results of rows that have seen all their keys. */
STEP void T(close_group)(Call *call, Task *t, ix r, ix n, char *kept) {
    const Params *p = &call->p;
    if (p->mode == WEIGHTED_SUM)                              /* given weights are not normalised */
        for (ix k = r; k < r + n; k++) t->row_sum[k] = 1;
    /* Polls after each row, because sorting a million keys takes a third of a second. */
    for (ix k = r; p->row_request.any && k < r + n; k++) {
        if (p->stop) return;
        T(write_row_statistics)(p, t, k, 1);
        poll(call, t->thread);
    }
    T(write_rows)(p, t, r, n);
    if (p->kept_scores) T(write_kept)(p, t, r, n, kept);
}

INLINE void T(close_groups)(Call *call, Task *t, char *kept) {
    const ix rows = call->p.group_rows;
    for (ix r = 0; r < t->rows; r += rows) T(close_group)(call, t, r, ix_min(rows, t->rows - r), kept);
}

/* Attention of the task's rows over its blocks of keys; closes each group right after its last block. */
STEP void T(attend_blocks)(Call *call, Task *t) {
    const Params *p = &call->p;
    char *kept = t->s;
    if (p->path == FUSED && T(attend_fused)(p, t)) return;
    T(begin)(p, t);
    if (p->row_request.any) T(begin_row_statistics)(p, t);
    for (ix block = t->block_start; block < t->block_stop; block++) {
        if (p->stop) return;
        Packed kv = {0};
        int last = block == t->block_stop - 1;
        if (open_block_of_rows(p, t, block)) kv = T(packed_block)(call, t, block);
        else if (!last && !p->kept_scores) continue;
        for (ix r = 0; r < t->rows; r += p->group_rows) {
            ix n = ix_min(p->group_rows, t->rows - r);
            T(attend_group)(p, t, r, n, block, kv, kept);
            if (last && p->splits == 1) T(close_group)(call, t, r, n, kept);
        }
        if (!last) poll(call, t->thread);
    }
    /* Rows that see no key. */
    if (t->block_start >= t->block_stop && p->splits == 1) T(close_groups)(call, t, kept);
}

/* Saves row maxima and inverse sums if a second pass computes the weights. */
INLINE void T(close_task)(Call *call, Task *t) {
    const Params *p = &call->p;
    if (p->mode == ATTEND && p->weights.data && !p->kept_scores && !p->stop) T(save_row_norms)(p, t, call->row_norms);
}

/* Attention of a query block over all its keys. */
static void T(attend_task)(Call *call, Task *t) {
    T(attend_blocks)(call, t);
    T(close_task)(call, t);
}

/* Attention of few rows over one split of the keys; saves the state for merge_task(). */
static void T(split_task)(Call *call, Task *t, char *state) {
    T(attend_blocks)(call, t);
    T(save_state)(&call->p, t, state);
}

/* Merges the states first .. last of a kv head in key order; unless `done`, into state 0, for the next round. */
static void T(merge_task)(Call *call, Task *t, char *states, ix first, ix last, int done) {
    const Params *p = &call->p;
    const ix size = p->rows * p->state_bytes;
    T(begin)(p, t);
    for (ix k = first; k <= last; k++) T(merge_state)(p, t, states + k * size);
    if (!done) {
        T(save_state)(p, t, states);
        return;
    }
    T(close_groups)(call, t, NULL);
    T(close_task)(call, t);
}

/* ----------------------------------------------------------------------------------------- dense scores and weights */

/* Writes dense scores, or weights, of the task's rows over one split, block by block. */
static void T(dense_task)(Call *call, Task *t, ix split, int weights) {
    const Params *p = &call->p;
    const int under_lse = p->mode == WEIGHTS_UNDER_LSE;
    T(begin)(p, t);
    if (p->key_request.norm || p->key_request.given) T(load_given_norms)(p, t);
    else if (under_lse) T(load_lse)(p, t);
    else if (weights) T(load_row_norms)(p, t, call->row_norms);
    for (ix block = split * p->split_k; block < ix_min(p->k_blocks, (split + 1) * p->split_k); block++) {
        Packed kv = {0};
        if (p->stop) return;
        if (open_block_of_rows(p, t, block) && t->block_start <= block && block < t->block_stop)
            kv = T(packed_block)(call, t, block);
        for (ix r = 0; r < t->rows; r += p->group_rows) {
            ix n = ix_min(p->group_rows, t->rows - r);
            enum Visibility visibility = T(visibility)(p, t, r, n, block);
            if (visibility != SKIP) T(scores)(p, t, r, n, block, kv, visibility);
            if (under_lse) T(store_under_lse)(p, t, r, n, block);
            else if (weights) T(store_again)(p, t, r, n, block);
            else T(store_scores)(p, t, r, n, block);
        }
        poll(call, t->thread);
    }
}

/* ---------------------------------------------------------------------------------------------- statistics of keys */

/* The partial maps of a query head of this round. */
INLINE double *T(bins_of)(const Call *call, ix head, ix member) {
    const KeyRequest *k = &call->p.key_request;
    return call->bins + (head * call->p.heads_per_kv + member) * k->row_bins * k->slot_start[call->chunks];
}

/* Computes statistics of a block of keys over all rows of a query head, in order. */
INLINE void T(key_statistics_of_head)(Call *call, Task *t, ix block, ix head) {
    const Params *p = &call->p;
    const KeyRequest *k = &p->key_request;
    T(begin_key_statistics)(p, t);
    t->stats.row_bin = -1;
    for (ix first = 0; first < k->walk; first += p->block_q) {
        if (p->stop) return;
        if (!open_walk(p, t, head, first, block)) continue;
        T(begin)(p, t);
        T(load_given_norms)(p, t);
        for (ix r = 0; r < t->rows; r += GROUP_ROWS) {
            ix n = ix_min(GROUP_ROWS, t->rows - r);
            enum Visibility visibility = T(visibility)(p, t, r, n, block);
            if (visibility == SKIP) continue;
            T(scores)(p, t, r, n, block, t->packed, visibility);
            T(add_key_statistics)(p, t, r, n, block);
        }
        poll(call, t->thread);
    }
    if (k->map) T(close_bin)(p, t, block);
    T(write_key_statistics)(p, t, head, block);
}

/* Computes statistics of a chunk of a kv head's keys over all rows of its query heads. */
static void T(key_statistics_task)(Call *call, Task *t, ix head, ix chunk) {
    const Params *p = &call->p;
    const KeyRequest *k = &p->key_request;
    open_head(p, t, call->first_head + head);
    open_arrays(p, t);
    for (ix block = chunk * call->chunk; block < ix_min(p->k_blocks, (chunk + 1) * call->chunk); block++) {
        if (block * p->block_k < t->lengths.kv_length && open_block_of_head(p, t, block))
            T(pack_block)(p, t, block, t->packed);
        for (ix member = 0; member < p->heads_per_kv; member++) {
            if (k->map) {
                t->stats.slots = k->slot_start[chunk + 1] - k->slot_start[chunk];
                t->stats.bins = T(bins_of)(call, head, member) + k->slot_start[chunk] * k->row_bins;
                if (block == chunk * call->chunk)
                    memset(t->stats.bins, 0, k->row_bins * t->stats.slots * sizeof(double));
            }
            T(key_statistics_of_head)(call, t, block, t->kv_head * p->heads_per_kv + member);
        }
    }
}

/* Writes the maps of a kv head's query heads from their partial maps. */
static void T(maps_task)(Call *call, Task *t, ix head) {
    const Params *p = &call->p;
    for (ix member = 0; member < p->heads_per_kv; member++)
        for (ix bin = 0; bin < p->key_request.row_bins && !p->stop; bin++) {
            T(merge_bins)(p, t, T(bins_of)(call, head, member), call->chunks,
                          (call->first_head + head) * p->heads_per_kv + member, bin);
            poll(call, t->thread);
        }
}
