/* mask.h (template over REAL; after gemm/rows.h): which keys of a block a group of rows sees. */

/* allow &= the bools at m, whose elements are `stride` bytes apart */
INLINE void T(and_bools)(uint8_t *restrict allow, const char *restrict m, ix stride, ix n) {
    if (stride == 1) for (ix j = 0; j < n; j++) allow[j] &= m[j] != 0;        /* vectorised by the compiler */
    else if (stride == 0 && n > 0 && !*m) memset(allow, 0, n);
    else if (stride != 0) for (ix j = 0; j < n; j++) allow[j] &= m[j * stride] != 0;
}

INLINE int T(is_all_minus_inf)(const REAL *b, ix n) {        /* most biases return at the first element */
    for (ix j = 0; j < n; j++)
        if (b[j] != -INFINITY) return 0;
    return 1;
}

/* sum = b + the relative bias of row r from key `first` on; -inf in either excludes a key. */
static __attribute__((noinline)) void T(add_relative_bias)(const Params *p, const Task *t, ix r, ix first, ix n,
                                                           const REAL *b, REAL *sum) {
    const Array *a = &p->relative;
    const char *src = row_address(t, a, t->relative, r) + first * a->col;
    for (ix j = 0; j < n; j++) {
        REAL x = T(element)(src + j * a->col, a->dtype);
        sum[j] = b[j] == -INFINITY || x == -INFINITY ? -INFINITY : b[j] + x;
    }
}

/* Sets the bytes of masks, segments and positions, and the address of each row's bias. Returns whether any key of the
 * part may be visible; `all` receives whether all are, the bias aside. */
static int T(allow_rows)(const Params *p, Task *t, ix r0, ix n, ix block, int *all) {
    ix first = block * p->block_k;
    int some = 0, bytes = p->mask.data || p->block_mask.data || p->key_indices.data || p->key_mask.data
        || p->q_segments.data || t->tests_positions;
    *all = 1;
    for (ix r = r0; r < r0 + n; r++) {
        ix i = t->row[r].position, lo = ix_max(t->row[r].start - first, t->column);
        ix hi = ix_max(lo, ix_min(t->row[r].stop - first, t->column_stop)), width = hi - lo, from = first + lo;
        uint8_t any = width > 0, every = 1, *restrict row = t->allow + (r - r0) * p->width, *restrict allow = row + lo;
        if (bytes) {
            memset(row, 0, t->to);
            memset(allow, 1, width);
        }
        if (p->mask.data)
            T(and_bools)(allow, row_address(t, &p->mask, t->mask, r) + from * p->mask.col, p->mask.col, width);
        if (p->block_mask.data) and_cells(p, t, r, from, width, allow);
        if (p->key_indices.data) and_list(p, t, r, from, width, allow);
        if (p->key_mask.data) T(and_bools)(allow, t->key_mask + from * p->key_mask.col, p->key_mask.col, width);
        if (p->q_segments.data) {
            int64_t own = *(const int64_t *)(t->q_segments + i * p->q_segments.row);
            const char *k = t->k_segments + from * p->k_segments.col;
            for (ix j = 0; j < width; j++) allow[j] &= own >= 0 && *(const int64_t *)(k + j * p->k_segments.col) == own;
        }
        if (t->tests_positions)
            and_positions(allow, t->k_positions + from * p->k_positions.col, p->k_positions.col, width,
                          positions_seen(p, t->lengths, i));
        if (bytes) {
            any = 0;
            for (ix j = 0; j < width; j++) {
                any |= allow[j];
                every &= allow[j];
            }
            *all &= every && lo == t->column && hi == t->column_stop;
        }
        if (p->bias.data) {
            const char *src = row_address(t, &p->bias, t->bias, r) + from * p->bias.col;
            REAL *copy = P_(bias_rows) + (r - r0) * p->width + lo;
            const REAL *b = T(row)(src, p->bias.col, p->bias.dtype, width, copy);
            if (p->relative.data) {
                T(add_relative_bias)(p, t, r, from, width, b, copy);
                b = copy;
            }
            t->bias_row[r - r0] = b;
            if (any && !some) any = !T(is_all_minus_inf)(b, width);
        }
        some |= any;
    }
    return some;
}

/* Prefetches, before the products of the panel at column j, the mask and bias that the next group of rows (from r0)
 * reads there, and the dense weights that this group writes if the block is its only one. */
static void T(prefetch_panel)(const Params *p, const Task *t, ix r0, ix rows, ix j) {
    const Array *m = &p->mask, *b = &p->bias, *w = &p->weights;
    ix first = t->first_key + j;
    /* Without it the compiler finds no effect and drops the call. */
    __asm__ volatile("");
    for (ix r = r0; r < ix_min(r0 + GROUP_ROWS, t->rows); r++) {
        if (m->data) __builtin_prefetch(row_address(t, m, t->mask, r) + first * m->col);
        if (b->data && b->row != -b->col)                            /* rows of a relative bias overlap */
            prefetch_lines(row_address(t, b, t->bias, r) + first * b->col, PANEL * b->col, 0);
    }
    if (p->kept_scores && p->k_blocks == 1 && w->col == (ix)sizeof(REAL))
        for (ix r = r0 - rows; r < r0; r++)
            prefetch_lines(row_address(t, w, t->weights, r) + first * w->col, PANEL * w->col, 1);
}

/* Sets the columns of the block that any row of the group sees, and returns whether they need a mask. */
STEP enum Visibility T(visibility)(const Params *p, Task *t, ix r0, ix n, ix block) {
    ix first = block * p->block_k, last = ix_max(first, ix_min(first + p->block_k, t->lengths.kv_length));
    t->first_key = first;
    ix start = PTRDIFF_MAX, stop = 0, inner_start = 0, inner_stop = PTRDIFF_MAX;
    const int by_key = p->by_position && !t->positions.ascend;
    t->tests_positions = 0;
    for (ix r = r0; r < r0 + n; r++) {
        inner_start = ix_max(inner_start, t->row[r].start);
        inner_stop = ix_min(inner_stop, t->row[r].stop);
        if (t->row[r].start == t->row[r].stop) continue;
        start = ix_min(start, t->row[r].start);
        stop = ix_max(stop, t->row[r].stop);
        if (!by_key) continue;
        const Range seen = positions_seen(p, t->lengths, t->row[r].position), span = t->positions.span;
        t->tests_positions |= seen.start > span.start || seen.stop < span.stop;
    }
    t->column = ix_min(ix_max(start, first), last) - first;
    t->column_stop = ix_max(ix_min(stop, last), first) - first;
    if (start < stop && (p->block_mask.data || p->key_indices.data)) {
        Range seen = {first + t->column, first + t->column_stop};
        if (p->block_mask.data && seen.start < seen.stop) seen = keys_in_seen_cells(p, t, r0, n, seen);
        if (p->key_indices.data && seen.start < seen.stop) seen = keys_in_lists(p, t, r0, n, seen);
        t->column = seen.start - first;
        t->column_stop = seen.stop - first;
    }
    if (start >= stop || t->column >= t->column_stop) {
        t->column = t->column_stop = 0;
        return SKIP;
    }
    t->from = t->column / PANEL * PANEL;
    t->to = round_up(t->column_stop, LANES);
    /* Columns from column_stop on become -inf anyway. */
    int full = inner_start <= first + t->from && inner_stop >= first + t->column_stop;
    if ((p->block_mask.data || p->key_indices.data) && t->from < t->column) full = 0;
    t->uses_allow = 0;
    if (p->masked) {
        int all;
        if (!T(allow_rows)(p, t, r0, n, block, &all)) {
            t->column = t->column_stop = 0;
            return SKIP;
        }
        t->uses_allow = !all;
    }
    return full && !t->uses_allow ? FULL : PARTIAL;
}
