/* backward.h (template over REAL; after attention/gradients.h, attention/relative_gradients.h, attention/forward.h):
 * the loops of the gradients: blocks of rows against blocks of keys. */

/* Computes a group's scores and products of grad_out and value; returns 0 if the group sees no key of the block. */
INLINE int T(gradient_products)(const Params *p, const Gradients *g, Task *t, ix r, ix n, ix block, int want,
                                int capped, GradientScratch *b) {
    const ix at = r * p->width * (ix)sizeof(REAL);
    enum Visibility visibility = T(visibility)(p, t, r, n, block);
    if (visibility == SKIP) return 0;
    t->s = (char *)b->weights + at;
    T(scores_packed)(p, t, r, n, b->keys);
    if (p->relative_index) T(add_relative_terms)(p, t, r, n, b->keys);
    if (capped) T(cap_slopes)(p, t, n, b);
    if (!p->raw_scores || visibility == PARTIAL) T(finish_scores)(p, t, r, n);
    if (want != WANT_VALUE) {
        Task products = *t;
        products.s = (char *)b->scores + at;
        products.q_rows = b->grad_rows;
        T(scores_packed)(&g->products, &products, r, n, b->values);
    }
    return 1;
}

/* The gradients of a block of rows and a block of keys, one line per step. */
INLINE void T(backward_block)(const Call *call, Task *t, ix block, int want, GradientScratch *b, void *d_query) {
    const Params *p = &call->p;
    const Gradients *g = call->gradients;
    const int terms = p->relative_index && !g->relevance && want & (WANT_QUERY | WANT_KEY | WANT_TABLES);
    const int row_terms = terms && p->relative_key.data && want & (WANT_QUERY | WANT_TABLES);
    const int capped = p->softcap != 0 && want != WANT_BIAS && !g->relevance;
    int any_visible = 0;
    T(load_gradient_rows)(p, g, t, b);
    T(load_lse)(p, t);
    if (row_terms) T(clear_row_sums)(p, t, block, b);
    for (ix r = 0; r < t->rows; r += GROUP_ROWS) {
        ix n = ix_min(GROUP_ROWS, t->rows - r);
        if (T(gradient_products)(p, g, t, r, n, block, want, capped, b)) {
            any_visible = 1;
            T(score_gradients)(p, g, t, r, n, capped, b);
            if (want & WANT_BIAS) T(add_bias_gradients)(p, g, t, r, n, block, b);
            if (want & WANT_QUERY) T(add_query_gradients)(p, g, t, r, n, d_query, b);
            if (terms) T(sum_by_table_row)(p, t, r, n, want, b->keys, b);
            if (row_terms && want & WANT_QUERY) T(add_relative_query_gradients)(call, t, r, n, d_query, b);
        }
        T(clear_invisible)(p, t, r, n, b);
        b->part[r / GROUP_ROWS] = (Range){t->column, t->column_stop};
    }
    if (any_visible && want & (WANT_KEY | WANT_VALUE)) T(add_key_gradients)(p, g, t, block, want, b);
    if (any_visible && row_terms && g->relative_key.data && want & WANT_TABLES)
        T(add_relative_key_gradients)(call, t, block, b);
}

INLINE void T(open_gradients)(const Call *call, Task *t, GradientScratch *b) {
    const Params *p = &call->p;
    char *scratch = call->scratch + t->thread * p->scratch_bytes + call->gradients->base;
    carve_gradients(p, call->gradients, call->format, scratch, b);
}

/* Writes delta of a block of rows. */
static void T(deltas_task)(Call *call, Task *t) {
    GradientScratch b;
    T(open_gradients)(call, t, &b);
    T(write_deltas)(&call->p, call->gradients, t, &b);
}

/* Computes the gradients in `want` for blocks `rows` of rows and blocks `keys` of keys of a kv head. */
static void T(gradients_task)(Call *call, Task *t, ix head, Range rows, Range keys, int want) {
    const Params *p = &call->p;
    const Gradients *g = call->gradients;
    const ix size = p->block_q * g->factor_stride * (ix)sizeof(REAL);
    GradientScratch b;
    T(open_gradients)(call, t, &b);
    const int of_keys = p->relative_query.data && !g->relevance && want & (WANT_KEY | WANT_TABLES);
    if (want & WANT_QUERY) memset(b.d_query, 0, (rows.stop - rows.start) * size);
    if (want & WANT_TABLES) T(clear_table_gradients)(call, &b);
    for (ix block = keys.start; block < keys.stop; block++) {
        int packed = 0;
        memset(b.d_key, 0, p->width * g->factor_stride * sizeof(REAL));
        memset(b.d_value, 0, p->width * g->value_stride * sizeof(REAL));
        if (of_keys) memset(b.key_sums, 0, p->key_products * sizeof(REAL));
        for (ix i = rows.start; i < rows.stop; i++) {
            open_task(p, t, head, i, 0);
            if (block < t->block_start || block >= t->block_stop || !open_block_of_rows(p, t, block)) continue;
            if (!packed) T(pack_gradient_keys)(p, g, t, block, &b);
            packed = 1;
            T(backward_block)(call, t, block, want, &b, (char *)b.d_query + (i - rows.start) * size);
            if (p->stop) return;
            poll(call, t->thread);
        }
        if (packed && of_keys) T(add_sums_of_keys)(call, t, block, want, b.keys, &b);
        if (want & (WANT_KEY | WANT_VALUE)) {
            open_head(p, t, head);
            T(write_key_gradients)(p, g, t, block, want, &b);
        }
    }
    for (ix i = rows.start; want & WANT_QUERY && i < rows.stop; i++) {
        open_task(p, t, head, i, 0);
        T(write_query_gradients)(p, g, t, (char *)b.d_query + (i - rows.start) * size);
    }
    if (want & WANT_TABLES) {
        open_head(p, t, head);
        T(write_table_gradients)(call, t, &b);
    }
}
