/* dense.h (template over REAL; after attention/online_softmax.h, attention/row_norms.h): writes dense weights and
 * scores, a block of keys at a time. */

/* Stores one row's part of a block, times `factor`, and `fill` in the block's columns outside the part. */
INLINE void T(store_part)(const Params *p, const Task *t, const Array *a, char *batch, ix r, ix block, const REAL *s,
                          REAL factor, REAL fill) {
    ix first = block * p->block_k, n = ix_min(p->block_k, p->kv_len - first), j = 0;
    char *dst = row_address(t, a, batch, r) + first * a->col;
    int in_place = a->dtype == NATIVE && a->col == (ix)sizeof(REAL) && (uintptr_t)dst % sizeof(REAL) == 0;
    REAL *x = in_place ? (REAL *)dst : (REAL *)t->line;
    for (; j < t->column; j++) x[j] = fill;
    /* The first store is unaligned and overlaps the second, so that all others are aligned. */
    if (j + LANES <= t->column_stop) {
        V(storeu)(x + j, V(loadu)(s + j) * V(set1)(factor));
        j += LANES - (ix)((uintptr_t)(x + j) / sizeof(REAL) % LANES);
    }
    for (; j + LANES <= t->column_stop; j += LANES) V(store)(x + j, V(loadu)(s + j) * V(set1)(factor));
    for (; j < t->column_stop; j++) x[j] = s[j] * factor;
    for (; j < n; j++) x[j] = fill;
    if (x == (REAL *)t->line) T(store_row)(x, n, dst, a->col, a->dtype);
}

/* Stores dense weights of a block from weights relative to the row maximum `then`; `now` is the final maximum. */
INLINE void T(store_relative)(const Params *p, Task *t, ix r0, ix n, ix block, const REAL *then, const REAL *now,
                              const double *inverses) {
    REAL *factors = P_(alpha);
    for (ix r = 0; r < n; r += LANES) {
        VEC a = V(loadu)(then + r), b = V(loadu)(now + r);
        VEC gap = (VEC)((VINT)(a - b) & ~(a == b));      /* 0 also for -inf - -inf */
        V(store)(factors + r, V(exp2)(gap * V(set1)((REAL)p->exponent)));
    }
    for (ix r = 0; r < n; r++) {
        REAL inverse = (REAL)inverses[r], factor = factors[r] * inverse;
        T(store_part)(p, t, &p->weights, t->weights, r0 + r, block, P_(s) + r * p->width, factor, inverse - inverse);
    }
}

/* Stores the kept weights of a group and block. */
STEP void T(store_kept)(const Params *p, Task *t, ix r0, ix n, ix block) {
    T(store_relative)(p, t, r0, n, block, P_(block_max) + block * p->block_q + r0, P_(row_max) + r0, t->row_sum + r0);
}

/* Stores weights that were not kept, from a second online softmax: the same running maximum gives the same bits. */
STEP void T(store_again)(const Params *p, Task *t, ix r0, ix n, ix block) {
    if (t->column < t->column_stop) T(online_softmax)(p, t, r0, n, block);
    T(store_relative)(p, t, r0, n, block, P_(row_max) + r0, P_(final_max) + r0, t->inverse + r0);
}

/* Stores weights of a block under a given lse. */
STEP void T(store_under_lse)(const Params *p, Task *t, ix r0, ix n, ix block) {
    const VEC c = V(set1)((REAL)p->exponent);
    const ix column = t->column, columns = t->column_stop;
    for (ix r = r0; r < r0 + n; r++) {
        REAL *s = P_(s) + (r - r0) * p->width, lse = P_(final_max)[r];
        t->column_stop = lse == -INFINITY ? column : columns;       /* a row that sees no key has zeros */
        for (ix j = t->from; column < t->column_stop && j < t->to; j += LANES)
            V(store)(s + j, V(exp2_any)((V(load)(s + j) - V(set1)(lse)) * c));
        T(store_part)(p, t, &p->weights, t->weights, r, block, s, (REAL)t->inverse[r],
                      (REAL)(t->inverse[r] - t->inverse[r]));
    }
    t->column_stop = columns;
}

STEP void T(store_scores)(const Params *p, Task *t, ix r0, ix n, ix block) {
    for (ix r = r0; r < r0 + n; r++)
        T(store_part)(p, t, &p->scores, t->scores, r, block, P_(s) + (r - r0) * p->width, (REAL)p->unit, -INFINITY);
}
