/* queries.h (template over REAL; after gemm/rows.h, gemm/strip.h): prepares a task's queries for the products. */

/* Address of a query row: in place, or of a copy if it is not contiguous REAL, or is negated or padded. */
INLINE const REAL *T(query_row)(const Params *p, const char *src, REAL *copy) {
    const Array *a = &p->query;
    ix depth = p->head_dim;
    const REAL *x = T(row)(src, a->col, a->dtype, depth, copy);
    if (p->flip) {
        for (ix d = 0; d < depth; d++) copy[d] = -x[d];
        x = copy;
    }
    if (p->unfused != PACKED && depth < p->depth_stride) {           /* whole vectors, padded with zeros */
        if (x != copy) memcpy(copy, x, depth * sizeof(REAL));
        for (ix d = depth; d < p->depth_stride; d++) copy[d] = 0;
        x = copy;
    }
    return x;
}

/* Sets the addresses of the query rows, and the state of rows that have seen no key. */
INLINE void T(begin_rows)(const int pairs, const Params *p, Task *t) {
    for (ix r = 0; r < t->rows; r++) {
        P_(row_max)[r] = -INFINITY;
        t->row_sum[r] = 0;
        REAL *copy = P_(q) + r * p->depth_stride;
        t->q_rows[r] = copy;
        /* Skips even a memset() of 0 bytes, which takes 0.2 us on an untouched page. */
        if (!t->query) continue;
        if (t->row[r].position >= t->lengths.q_length) {       /* padding, or another sequence's row */
            memset(copy, 0, p->depth_stride * sizeof(REAL));
            continue;
        }
        const char *src = row_address(t, &p->query, t->query, r);
        t->q_rows[r] = pairs ? PAIR_ROW(p, src, copy) : T(query_row)(p, src, copy);
    }
    if (p->unfused == STRIPS) T(pack_strips)(p, t, pairs ? p->head_dim / 2 : p->head_dim);
    memset(t->o, 0, t->rows * p->value_stride * sizeof(REAL));
    t->uses_nonfinite = 0;
}

STEP void T(begin)(const Params *p, Task *t) {
    if (p->pairs) T(begin_rows)(1, p, t);
    else T(begin_rows)(0, p, t);
}
