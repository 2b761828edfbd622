/* tables.h: the tables of content-relative terms: which rows an index names, and where packed tables lie.
 *
 * The score of row i and key j has query_i . relative_key[x] and relative_query[x] . key_j besides, with the table row
 * x that relative_index names for j - i. Tables are packed once for a call, in its memory. */
#ifndef ATTNC_TABLES_H
#define ATTNC_TABLES_H

#include "call/path.h"

/* Number of tables that differ: one for each query head and batch element, or one for all. */
static inline ix count_tables(const Array *a, ix q_heads) {
    ix n = a->head ? q_heads : 1;
    if (!a->data) return 0;
    for (ix k = 0; k < a->n_batch; k++)
        if (a->strides[k] && a->shape[k] != 1) n *= a->shape[k];
    return n;
}

/* Which of these a query head of batch element b has. */
static inline ix table_of(const Params *p, const Array *a, ix b, ix head) {
    ix i = a->head ? head : 0, step = a->head ? p->q_heads : 1;
    for (ix d = p->batch.n - 1, k = a->n_batch - 1; k >= 0 && d >= 0; d--, k--) {
        const ix size = p->batch.shape[d];
        if (a->strides[k] && a->shape[k] != 1) {
            i += b % size * step;
            step *= size;
        }
        b /= size;
    }
    return i;
}

/* Address of the first named row of table i. */
static inline const char *table_address(const Params *p, const Array *a, ix i) {
    const char *at = a->data + p->table_first * a->row;
    if (a->head) {
        at += i % p->q_heads * a->head;
        i /= p->q_heads;
    }
    for (ix k = a->n_batch - 1; k >= 0; k--)
        if (a->strides[k] && a->shape[k] != 1) {
            at += i % a->shape[k] * a->strides[k];
            i /= a->shape[k];
        }
    return at;
}

/* Tables of relative_query that the query heads of a kv head have. */
static inline ix tables_of_head(const Params *p) {
    return !p->relative_query.data ? 0 : p->relative_query.head ? p->heads_per_kv : 1;
}

/* The table rows, counted from table_first, that distances j - i of first .. first + n name. */
static inline Range rows_named(const Params *p, ix first, ix n) {
    const int32_t *x = p->relative_index + first + p->q_len - 1;
    int32_t low = INT32_MAX, high = -1;
    for (ix k = 0; k < n; k++) {
        low = x[k] < low ? x[k] : low;
        high = x[k] > high ? x[k] : high;
    }
    return n > 0 ? (Range){low - p->table_first, high + 1 - p->table_first} : (Range){0, 0};
}

/* The table rows that keys first .. first + n name for any of `rows` query rows from row 0. */
static inline Range rows_of_keys(const Params *p, ix rows, ix first, ix n) {
    return rows > 0 ? rows_named(p, first - rows + 1, n + rows - 1) : (Range){0, 0};
}

/* Sets which rows the index names, and the sizes of packed tables; returns their bytes. */
static ix measure_tables(Params *p, const Format *f) {
    const ix depth = round_up(p->head_dim, f->lanes);
    p->table_first = 0;
    Range named = rows_of_keys(p, p->q_len, 0, p->kv_len);
    p->table_first = named.start;
    p->table_rows = named.stop - named.start;
    p->table_bytes = round_up(p->table_rows, f->panel) * depth * f->real;
    p->tables_bytes = count_tables(&p->relative_key, p->q_heads) * p->table_bytes;
    p->row_stride = p->relative_key.data ? round_up(p->table_rows, f->panel) + f->lanes : 0;
    return p->tables_bytes + count_tables(&p->relative_query, p->q_heads) * p->table_bytes;
}

/* Sets the room for the products of a block of keys with relative_query. */
static void measure_key_products(Params *p) {
    ix most = 0;
    for (ix first = 0; p->relative_query.data && first < p->kv_len; first += p->block_k) {
        Range named = rows_of_keys(p, p->q_len, first, ix_min(p->block_k, p->kv_len - first));
        most = ix_max(most, named.stop - named.start);
    }
    p->key_products = tables_of_head(p) * most * p->width;
}

#endif
