/* relative_terms.h (template over REAL; after gemm/pack.h, attention/scores.h): content-relative terms: products of
 * queries and keys with the table row of their distance, which are added to the products of queries with keys.
 *
 * Both are products with tables, and each score takes its two numbers from them. Those of a group of rows are computed
 * right before their use and stay in L1; those of a block of keys serve all rows that meet the packed block. */

enum { T(STRETCH) = 64 };      /* keys whose products a group adds in turn: their cache lines serve all its rows */

/* Packs table i; with `flip`, the rows that multiply keys are negated as queries are. */
static void T(pack_table_task)(Call *call, ix i) {
    const Params *p = &call->p;
    const Array *a = &p->relative_query;
    const ix of_keys = count_tables(&p->relative_key, p->q_heads), depth = round_up(p->head_dim, LANES);
    REAL *x = (REAL *)(p->tables + i * p->table_bytes);
    if (i < of_keys) {
        const Task rows = {.key = table_address(p, &p->relative_key, i), .lengths = {.kv_length = p->table_rows}};
        Params table = *p;
        table.key = p->relative_key;
        T(pack_keys)(&table, &rows, 0, p->table_rows, x);
        return;
    }
    const char *rows = table_address(p, a, i - of_keys);
    for (ix k = 0; k < p->table_rows; k++, x += depth) {
        T(load_row)(rows + k * a->row, a->col, a->dtype, p->head_dim, x);
        for (ix d = 0; p->flip && d < p->head_dim; d++) x[d] = -x[d];
    }
}

/* s[r][j] = x[r] . y[j] for the packed y `from` .. `stop`, in whole vectors. */
INLINE void T(multiply_panels)(const int rows, const REAL *const *x_rows, const REAL *y, ix depths, ix from, ix stop,
                               REAL *s, ix stride) {
    const unsigned every = (1u << LANES) - 1;
    for (ix d = 0, depth; d == 0 || d < depths; d += depth) {
        const REAL *x[GROUP_ROWS];
        VEC unused[GROUP_ROWS];
        depth = ix_min(depths - d, CHAIN);
        UNROLL for (int r = 0; r < rows; r++) x[r] = x_rows[r] + d, unused[r] = V(set1)(0);
        for (ix j = from / PANEL * PANEL; j < stop; j += PANEL) {
            const ix vectors = ceil_div(ix_min(PANEL, stop - j), LANES);
#define TILE(vectors) \
    T(scores_tile)(0, rows, vectors, x, y + j * depths + d * PANEL, depth, d == 0, every, s + j, stride, unused)
            VECTOR_CASES(TILE)
#undef TILE
        }
        if (depths == 0) break;
    }
}

/* Computes the products of a packed block of keys with the rows of relative_query that any query row names. */
STEP void T(multiply_keys)(const Params *p, const Task *t, ix block, Packed kv) {
    const Array *a = &p->relative_query;
    const ix first = block * p->block_k, n = ix_min(p->block_k, t->lengths.kv_length - first);
    const ix depth = round_up(p->head_dim, LANES), tables = tables_of_head(p);
    const Range all = rows_of_keys(p, t->lengths.q_length, first, n);
    *kv.first_row = all.start;
    for (ix m = 0; m < tables; m++) {
        const ix table = table_of(p, a, t->batch, t->kv_head * p->heads_per_kv + m);
        const REAL *rows = (const REAL *)(p->tables + p->tables_bytes + table * p->table_bytes);
        REAL *s = (REAL *)kv.products + m * (p->key_products / tables);
        for (ix j = 0; j < n; j += PANEL) {
            const ix keys = ix_min(PANEL, n - j);
            const Range named = rows_of_keys(p, t->lengths.q_length, first + j, keys);
            for (ix k = named.start, some; k < named.stop; k += some) {
                const REAL *x[GROUP_ROWS];
                some = ix_min(GROUP_ROWS, named.stop - k);
                for (ix r = 0; r < some; r++) x[r] = rows + (k + r) * depth;
#define ROWS(rows) \
    T(multiply_panels)(rows, x, kv.keys, p->head_dim, j, j + keys, s + (k - all.start) * p->width, p->width)
                ROW_CASES(some, ROWS)
#undef ROWS
            }
        }
    }
}

/* The rows of relative_key that a group of rows names in its part of the block. */
INLINE Range T(rows_of_group)(const Params *p, const Task *t, ix r0, ix n) {
    ix low = PTRDIFF_MAX, high = 0;
    for (ix r = r0; r < r0 + n; r++) {
        if (t->row[r].start == t->row[r].stop) continue;
        low = ix_min(low, t->row[r].position);
        high = ix_max(high, t->row[r].position);
    }
    return rows_named(p, t->first_key + t->column - high, t->column_stop - t->column + high - low);
}

/* Computes the products of a group's queries with these rows; rows of one head, or of all if they share a table, go
 * together. */
INLINE void T(multiply_queries)(const Params *p, const Task *t, ix r0, ix n, Range named) {
    const Array *a = &p->relative_key;
    for (ix r = 0, some; r < n; r += some) {
        const ix head = t->row[r0 + r].head;
        const REAL *const *q = (const REAL *const *)t->q_rows + r0 + r;
        const REAL *panels = (const REAL *)(p->tables + table_of(p, a, t->batch, head) * p->table_bytes);
        for (some = 1; r + some < n && (!a->head || t->row[r0 + r + some].head == head);) some++;
#define ROWS(rows) \
    T(multiply_panels)(rows, q, panels, p->head_dim, named.start, named.stop, P_(row_products) + r * p->row_stride, \
                       p->row_stride)
        ROW_CASES(some, ROWS)
#undef ROWS
    }
}

INLINE void T(add_terms)(const int of_row, const int of_keys, const int32_t *index, const REAL *row, const REAL *keys,
                            ix stride, ix from, ix stop, REAL *s) {
    for (ix j = from; j < stop; j++) {
        const ix x = index[j];
        REAL sum = s[j];
        if (of_row) sum += row[x];
        if (of_keys) sum += keys[x * stride + j];
        s[j] = sum;
    }
}

/* Adds both terms to the products of a group, where a row sees a key. */
STEP void T(add_relative_terms)(const Params *p, Task *t, ix r0, ix n, Packed kv) {
    const int of_row = p->relative_key.data != NULL, of_keys = p->relative_query.data != NULL;
    const ix per_table = of_keys ? p->key_products / tables_of_head(p) : 0;
    if (of_row) T(multiply_queries)(p, t, r0, n, T(rows_of_group)(p, t, r0, n));
    for (ix column = t->column; column < t->column_stop; column += T(STRETCH))
        for (ix r = 0; r < n; r++) {
            const Row *at = t->row + r0 + r;
            const ix from = ix_max(at->start - t->first_key, column);
            const ix stop = ix_min(ix_min(at->stop - t->first_key, t->column_stop), column + T(STRETCH));
            const int32_t *index = p->relative_index + p->q_len - 1 - at->position + t->first_key;
            const REAL *row = P_(row_products) + r * p->row_stride - p->table_first;
            const ix member = p->relative_query.head ? at->head % p->heads_per_kv : 0;
            const REAL *keys = of_keys ? (const REAL *)kv.products + member * per_table
                - (p->table_first + *kv.first_row) * p->width : NULL;
            REAL *s = P_(s) + r * p->width;
            if (of_row && of_keys) T(add_terms)(1, 1, index, row, keys, p->width, from, stop, s);
            else if (of_row) T(add_terms)(1, 0, index, row, keys, p->width, from, stop, s);
            else T(add_terms)(0, 1, index, row, keys, p->width, from, stop, s);
        }
    for (ix r = 0; r < n; r++) {
        VEC peak = V(set1)(-INFINITY);
        for (ix j = t->from; j < t->to; j += LANES) peak = V(max)(V(load)(P_(s) + r * p->width + j), peak);
        V(store)(P_(peaks) + r * LANES, peak);
    }
}
