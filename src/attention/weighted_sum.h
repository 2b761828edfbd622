/* weighted_sum.h (template over REAL; after attention/values.h): the weighted sum under given weights. */

/* o += given weights @ values for one block. Rows that are contiguous REAL are read in place, others copied. A weight
 * of exactly 0 excludes its value, so nonfinite values are tested and added one by one. */
STEP void T(weighted_sum)(const Params *p, Task *t, ix r0, ix n, ix block, Packed kv) {
    const Array *a = &p->weights;
    const REAL *w[GROUP_ROWS];
    ix first = block * p->block_k, stop = ix_min(p->block_k, p->kv_len - first), n_nonfinite = *kv.n_nonfinite;
    t->uses_allow = n_nonfinite != 0;
    for (ix r = 0; r < n; r++) {
        REAL *copy = P_(s) + r * p->width;
        const char *src = row_address(t, a, t->weights, r0 + r) + first * a->col;
        w[r] = copy;
        if (n_nonfinite) T(load_row)(src, a->col, a->dtype, stop, copy);
        else w[r] = T(row)(src, a->col, a->dtype, stop, copy);
        P_(alpha)[r] = 1;
        t->row_sum[r0 + r] = 1;
        for (ix k = 0; k < n_nonfinite; k++) t->allow[r * p->width + kv.nonfinite[k]] = copy[kv.nonfinite[k]] != 0;
    }
    t->column = 0;
    t->column_stop = stop;
    T(add_nonfinite)(p, t, r0, 0, n, block, kv.nonfinite, n_nonfinite, 0, p->value_dim);
    for (ix r = 0; r < n; r++)
        for (ix k = 0; k < n_nonfinite; k++) P_(s)[r * p->width + kv.nonfinite[k]] = 0;
    for (; t->column < stop; t->column = t->column_stop) {
        t->column_stop = ix_min(t->column + T(WEIGHTED_KEYS), stop);
        t->ahead_row = t->column_stop < stop ? r0 : r0 + n;
        t->ahead_key = t->column_stop < stop ? first + t->column_stop : first;
        T(add_real_values)(p, t, r0, n, block, w, kv.values);
    }
}
