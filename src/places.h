/* places.h (template over REAL): which places of a block a group of rows sees. */

/* allow &= the bools at m, whose elements lie `stride` bytes apart */
INLINE void T(and_bools)(uint8_t *restrict allow, const char *restrict m, ix stride, ix n) {
    if (stride == 1) for (ix j = 0; j < n; j++) allow[j] &= m[j] != 0;        /* becomes vectors of bytes */
    else if (stride == 0 && n > 0 && !*m) memset(allow, 0, n);
    else if (stride != 0) for (ix j = 0; j < n; j++) allow[j] &= m[j * stride] != 0;
}

/* mask, key_mask, bias = -inf and segments as bytes; returns whether any / all of the part's places are allowed */
static int T(allow_rows)(const Params *p, Task *t, ix r0, ix n, ix block, int *all) {
    ix first = block * p->block_k;
    uint8_t any = 0, every = 1;
    for (ix r = r0; r < r0 + n; r++) {
        ix i = t->row[r].position, h = t->row[r].head, lo = most(t->row[r].start - first, t->column);
        ix hi = most(lo, least(t->row[r].stop - first, t->columns)), width = hi - lo, from = first + lo;
        uint8_t *restrict row = t->allow + (r - r0) * p->width, *restrict allow = row + lo;
        memset(row, 0, t->to);
        memset(allow, 1, width);
        if (p->mask.data)
            T(and_bools)(allow, t->mask + i * p->mask.row + h * p->mask.head + from * p->mask.col, p->mask.col, width);
        if (p->key_mask.data) T(and_bools)(allow, t->key_mask + from * p->key_mask.col, p->key_mask.col, width);
        if (p->q_segments.data) {
            int64_t mine = *(const int64_t *)(t->q_segments + i * p->q_segments.row);
            const char *k = t->k_segments + from * p->k_segments.col;
            for (ix j = 0; j < width; j++) allow[j] &= mine >= 0 && *(const int64_t *)(k + j * p->k_segments.col) == mine;
        }
        if (p->bias.data) {
            const char *src = t->bias + i * p->bias.row + h * p->bias.head + from * p->bias.col;
            REAL *copy = P_(bias_rows) + (r - r0) * p->width + lo;
            const REAL *restrict b = T(row)(src, p->bias.col, p->bias.dtype, width, copy);
            t->bias_row[r - r0] = b;
            for (ix j = 0; j < width; j++) allow[j] &= b[j] != -INFINITY;
        }
        for (ix j = 0; j < width; j++) {
            any |= allow[j];
            every &= allow[j];
        }
        every &= lo == t->column && hi == t->columns;
    }
    *all = every;
    return any;
}

/* Cut the block to the columns that some row of the group sees, and say what is to be masked in it. */
static int T(classify)(const Params *p, Task *t, ix r0, ix n, ix block) {
    ix first = block * p->block_k, last = most(first, least(first + p->block_k, t->lengths.kv_length));
    ix start = PTRDIFF_MAX, stop = 0, inner_start = 0, inner_stop = PTRDIFF_MAX;
    for (ix r = r0; r < r0 + n; r++) {
        inner_start = most(inner_start, t->row[r].start);
        inner_stop = least(inner_stop, t->row[r].stop);
        if (t->row[r].start == t->row[r].stop) continue;
        start = least(start, t->row[r].start);
        stop = most(stop, t->row[r].stop);
    }
    t->column = least(most(start, first), last) - first;
    t->columns = most(least(stop, last), first) - first;
    if (start >= stop || t->column >= t->columns) {
        t->column = t->columns = 0;
        return SKIP;
    }
    t->from = t->column / PANEL * PANEL;
    t->to = round_up(t->columns, LANES);
    /* a plain product is cut to the exact columns as it is stored; a finished score must be masked there afterwards */
    int full = inner_start <= first + t->from && inner_stop >= first + (p->plain ? t->columns : t->to);
    t->choose = 0;
    if (p->arrays) {
        int all;
        if (!T(allow_rows)(p, t, r0, n, block, &all)) {
            t->column = t->columns = 0;
            return SKIP;
        }
        t->choose = !all;
    }
    return full && !t->choose ? FULL : PARTIAL;
}
