/* relative_gradients.h (template over REAL; after attention/gradients.h, attention/relative_terms.h): the gradients of
 * content-relative terms.
 *
 * The dS that name one row of a table are summed first: for each query row, which is the gradient of its product with
 * relative_key, and for each key, that of its product with relative_query. Then each gradient is one product more. */

#define G_(name) ((REAL *)b->name)

/* Copies a table as rows of zero-padded factors. A row that is not finite is 0: its dS are NaN or 0. */
static void T(copy_table_task)(Call *call, ix i) {
    const Params *p = &call->p;
    const Gradients *g = call->gradients;
    const ix of_keys = count_tables(&p->relative_key, p->q_heads);
    const Array *a = i < of_keys ? &p->relative_key : &p->relative_query;
    const char *rows = table_address(p, a, i < of_keys ? i : i - of_keys);
    REAL *x = (REAL *)(call->scratch + g->tables + i * table_rows_bytes(p, g, call->format));
    for (ix k = 0; k < p->table_rows; k++, x += g->factor_stride) {
        T(load_row)(rows + k * a->row, a->col, a->dtype, p->head_dim, x);
        for (ix d = p->head_dim; d < g->factor_stride; d++) x[d] = 0;
        if (!T(is_finite)(x, g->factor_stride)) memset(x, 0, g->factor_stride * sizeof(REAL));
        for (ix d = 0; p->flip && i >= of_keys && d < p->head_dim; d++) x[d] = -x[d];
    }
}

/* The copy of the table of a query head, from its first named row on. */
INLINE const REAL *T(table_rows)(const Call *call, const Task *t, const Array *a, ix head) {
    const Params *p = &call->p;
    const Gradients *g = call->gradients;
    const ix before = a == &p->relative_key ? 0 : count_tables(&p->relative_key, p->q_heads);
    const ix i = before + table_of(p, a, t->batch, head);
    return (const REAL *)(call->scratch + g->tables + i * table_rows_bytes(p, g, call->format));
}

/* o[r] += the sum over n steps k of w[r * across + k * along] * x[k], for any number of rows. */
static void T(add_product)(const REAL *w, ix across, ix along, ix rows, const REAL *x, ix stride, ix n, REAL *o) {
    const ix all = stride / LANES - 1, chunks = ceil_div(all, TILE_VECTORS);
    for (ix c = 0; c < chunks; c++) {
        const ix from = T(first_vector)(all, c, chunks), vectors = T(first_vector)(all, c + 1, chunks) - from;
        const REAL *y = x + from * LANES;
        for (ix r = 0, some; r < rows; r += some) {
            REAL *sums = o + r * stride + from * LANES;
            some = ix_min(GROUP_ROWS, rows - r);
#define ROWS(k) T(product_chunk)(k, vectors, w + r * across, across, along, y, stride, n, sums)
            ROW_CASES(some, ROWS)
#undef ROWS
        }
    }
}

/* The rows of the tables that the task's rows and a block's keys name. */
INLINE Range T(rows_of_blocks)(const Params *p, const Task *t, ix block) {
    const ix first = block * p->block_k, n = ix_min(p->block_k, t->lengths.kv_length - first);
    const ix low = t->row[0].position, high = t->row[t->rows - 1].position;
    return rows_named(p, first - high, n + high - low);
}

/* Sets the sums of the task's rows to 0, where the block adds to them. */
STEP void T(clear_row_sums)(const Params *p, const Task *t, ix block, GradientScratch *b) {
    const Range named = T(rows_of_blocks)(p, t, block);
    for (ix r = 0; r < t->rows; r++)
        memset(G_(row_sums) + r * p->row_stride + named.start, 0, (named.stop - named.start) * sizeof(REAL));
}

STEP void T(clear_table_gradients)(const Call *call, GradientScratch *b) {
    const Params *p = &call->p;
    const Gradients *g = call->gradients;
    const ix bytes = table_rows_bytes(p, g, call->format);
    if (g->relative_key.data) memset(b->d_relative_key, 0, (p->relative_key.head ? p->heads_per_kv : 1) * bytes);
    if (g->relative_query.data) memset(b->d_relative_query, 0, tables_of_head(p) * bytes);
}

/* Rows from r on that have one table, of n. */
INLINE ix T(rows_of_table)(const Params *p, const Array *a, ix n) { return a->head && p->heads_per_kv > 1 ? 1 : n; }

/* Sums a group's dS by table row. */
STEP void T(sum_by_table_row)(const Params *p, const Task *t, ix r0, ix n, int want, Packed kv, GradientScratch *b) {
    const int of_row = p->relative_key.data && want & (WANT_QUERY | WANT_TABLES);
    const int of_keys = p->relative_query.data && want & (WANT_KEY | WANT_TABLES);
    for (ix r = r0; r < r0 + n; r++) {
        const Row *at = t->row + r;
        const ix from = ix_max(at->start - t->first_key, t->column);
        const ix stop = ix_min(at->stop - t->first_key, t->column_stop);
        const int32_t *index = p->relative_index + p->q_len - 1 - at->position + t->first_key;
        const REAL *s = G_(scores) + r * p->width;
        if (of_row) {
            REAL *sums = G_(row_sums) + r * p->row_stride - p->table_first;
            for (ix j = from; j < stop; j++) sums[index[j]] += s[j];
        }
        if (of_keys) {
            const ix member = p->relative_query.head ? at->head % p->heads_per_kv : 0;
            REAL *sums = G_(key_sums) + member * (p->key_products / tables_of_head(p))
                - (p->table_first + *kv.first_row) * p->width;
            for (ix j = from; j < stop; j++) sums[index[j] * p->width + j] += s[j];
        }
    }
}

/* dQ of a group += its sums times the rows of relative_key */
STEP void T(add_relative_query_gradients)(const Call *call, const Task *t, ix r0, ix n, void *d_query,
                                          GradientScratch *b) {
    const Params *p = &call->p;
    const ix stride = call->gradients->factor_stride;
    const Range named = T(rows_of_group)(p, t, r0, n);
    for (ix r = r0, some; r < r0 + n; r += some) {
        const REAL *rows = T(table_rows)(call, t, &p->relative_key, t->row[r].head);
        some = T(rows_of_table)(p, &p->relative_key, r0 + n - r);
        T(add_product)(G_(row_sums) + r * p->row_stride + named.start, p->row_stride, 1, some,
                       rows + named.start * stride, stride, named.stop - named.start, (REAL *)d_query + r * stride);
    }
}

/* The gradient of relative_key += the sums of the task's rows, transposed, times these rows */
STEP void T(add_relative_key_gradients)(const Call *call, const Task *t, ix block, GradientScratch *b) {
    const Params *p = &call->p;
    const Gradients *g = call->gradients;
    const Range named = T(rows_of_blocks)(p, t, block);
    if (b->any_nonfinite) T(exclude_nonfinite_rows)(p, g, t, 0, 0, b);
    for (ix r = 0, some; r < t->rows; r += some) {
        const ix member = p->relative_key.head ? t->row[r].head % p->heads_per_kv : 0;
        some = T(rows_of_table)(p, &p->relative_key, t->rows - r);
        T(add_product)(G_(row_sums) + r * p->row_stride + named.start, 1, p->row_stride, named.stop - named.start,
                       G_(query) + r * g->stride, g->stride, some,
                       G_(d_relative_key) + (member * p->table_rows + named.start) * g->stride);
    }
}

/* dK of a block += its sums, transposed, times the rows of relative_query, whose gradient += the sums times the keys */
STEP void T(add_sums_of_keys)(const Call *call, const Task *t, ix block, int want, Packed kv, GradientScratch *b) {
    const Params *p = &call->p;
    const ix first = block * p->block_k, n = ix_min(p->block_k, t->lengths.kv_length - first);
    const ix tables = tables_of_head(p);
    const ix stride = call->gradients->factor_stride, zero = *kv.first_row;
    for (ix m = 0; m < tables; m++) {
        const REAL *sums = G_(key_sums) + m * (p->key_products / tables);
        const REAL *rows = T(table_rows)(call, t, &p->relative_query, t->kv_head * p->heads_per_kv + m);
        for (ix j = 0, keys; want & WANT_KEY && j < n; j += keys) {
            keys = ix_min(GROUP_ROWS, n - j);
            const Range named = rows_of_keys(p, t->lengths.q_length, first + j, keys);
            T(add_product)(sums + (named.start - zero) * p->width + j, 1, p->width, keys, rows + named.start * stride,
                           stride, named.stop - named.start, G_(d_key) + j * stride);
        }
        const Range named = rows_of_keys(p, t->lengths.q_length, first, n);
        if (want & WANT_TABLES && call->gradients->relative_query.data)
            T(add_product)(sums, p->width, 1, named.stop - named.start, b->key_factors, stride, n,
                           G_(d_relative_query) + (m * p->table_rows + named.start) * stride);
    }
}

/* Writes the gradients of the tables of a kv head, without the sums over heads and batch elements that share them. */
STEP void T(write_table_gradients)(const Call *call, const Task *t, GradientScratch *b) {
    const Params *p = &call->p;
    const Gradients *g = call->gradients;
    for (int k = 0; k < 2; k++) {
        const Array *a = k ? &g->relative_query : &g->relative_key, *of = k ? &p->relative_query : &p->relative_key;
        const ix tables = of->head ? p->heads_per_kv : 1;
        const REAL scale = (REAL)(p->flip && !k ? -p->scale : p->scale);     /* the copied queries have its sign */
        REAL *x = k ? b->d_relative_query : b->d_relative_key;
        for (ix m = 0; a->data && m < tables; m++) {
            char *dst = address(a, &p->batch, t->batch, t->kv_head * tables + m) + p->table_first * a->row;
            for (ix i = 0; i < p->table_rows; i++, x += g->factor_stride)
                T(store_sums)(a, dst + i * a->row, x, p->head_dim, scale);
        }
    }
}

#undef G_
