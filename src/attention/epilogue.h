/* epilogue.h (template over REAL; after gemm/rows.h): writes output and lse of rows that have seen all their keys. */

/* Returns the row sum, relative to the row maximum, with the sink logit; sets *lse if wanted or if there is a sink. */
static double T(close_row)(const Params *p, const Task *t, ix r, double *lse) {
    double top = (double)P_(row_max)[r] * p->unit, sum = t->row_sum[r];
    int alive = t->row[r].position < t->lengths.q_length;
    if (p->lse.data) *lse = sum == 0 ? -INFINITY : top + log(sum);
    if (!p->sinks.data || !alive) return sum;
    REAL logit;
    memcpy(&logit, p->sinks.data + t->row[r].head * p->sinks.head, sizeof logit);
    if (logit == -INFINITY) return sum;
    double sink = logit;
    if (sum == 0) {
        *lse = sink;
        return 0;
    }
    /* Equal maxima may be inf, whose difference is NaN. */
    double larger = sink > top ? sink : top, share = top == larger ? 1 : exp(top - larger);
    double total = sum * share + exp(sink - larger);
    *lse = larger + log(total);
    return top == larger ? total : total * exp(larger - top);
}

/* Whether output rows are whole vectors of contiguous REAL, so that sums are written there directly. */
INLINE int T(writes_out_in_place)(const Params *p) {
    return p->out.dtype == NATIVE && p->out.col == (ix)sizeof(REAL) && p->value_dim == p->value_stride;
}

STEP void T(write_rows)(const Params *p, Task *t, ix r0, ix n) {
    for (ix r = r0; r < r0 + n; r++) {
        if (p->q_starts.data && t->row[r].position >= t->lengths.q_length) continue;
        double lse, sum = T(close_row)(p, t, r, &lse);
        double inverse = sum == 0 ? 0 : 1 / sum;
        t->row_sum[r] = inverse;
        if (p->lse.data) {
            REAL x = (REAL)lse;
            memcpy(row_address(t, &p->lse, t->lse, r), &x, sizeof x);
        }
        if (!p->out.data || !p->value_dim) continue;
        REAL *o = P_(o) + r * p->value_stride, *big = P_(nonfinite_o) + r * p->value_stride, f = (REAL)inverse;
        char *dst = row_address(t, &p->out, t->out, r);
        prefetch_lines(dst + GROUP_ROWS * p->out.row, p->value_dim * (ix)sizeof(REAL), 1);
        REAL *x = T(writes_out_in_place)(p) && !t->uses_nonfinite ? (REAL *)dst : o;
        /* + 0: a sum that underflowed to -0 becomes 0, so that keys that add nothing cannot change its sign */
        if (sum == 0) memset(x, 0, p->value_stride * sizeof(REAL));
        else if (t->uses_nonfinite)
            for (ix i = 0; i < p->value_stride; i++) o[i] = o[i] * f + (big[i] * f) * (1 / LARGE_SCALE);
        else for (ix i = 0; i < p->value_stride; i += LANES) V(storeu)(x + i, V(load)(o + i) * V(set1)(f) + V(set1)(0));
        if (x == o) T(store_row)(o, p->value_dim, dst, p->out.col, p->out.dtype);
    }
}
