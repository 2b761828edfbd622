/* gradients.h (template over REAL; after gemm/pack.h, gemm/rank1.h, attention/row_norms.h, attention/forward.h): the
 * steps of the gradients of attention, for a block of query rows and a block of keys.
 *
 * The weights P are recomputed from the lse of the forward pass; with dP = dO V^T and delta = rowsum(dO * O) the
 * gradient of the scores is dS = P * (dP - delta), and dV += P^T dO, dQ += dS K, dK += dS^T Q (Dao et al. 2022,
 * appendix B.2). A weight or dS of exactly 0 contributes nothing, even where it multiplies NaN, so excluded keys and
 * padding rows change no bit. */

#define G_(name) ((REAL *)b->name)

/* ------------------------------------------------------------------------------------------------------ loading */

INLINE int T(is_finite)(const REAL *x, ix n) {
    VINT odd = {0}, none = {0};
    for (ix i = 0; i < n; i += LANES) {
        VEC y = V(load)(x + i);
        odd |= ~(y - y == 0);
    }
    return !memcmp(&odd, &none, sizeof none);
}

INLINE char *T(batch)(const Params *p, const Task *t, const Array *a) { return address(a, &p->batch, t->batch, 0); }

/* Copies the task's rows of an array and pads them with zeros; padding rows are not read and become zeros. */
static void T(load_rows)(const Params *p, const Task *t, const Array *a, ix depth, ix stride, int flip, REAL *dst,
                         const void **rows, uint8_t *nonfinite) {
    char *batch = T(batch)(p, t, a);
    for (ix r = 0; r < t->rows; r++) {
        REAL *x = dst + r * stride;
        ix filled = t->row[r].position < t->lengths.q_length ? depth : 0;
        rows[r] = x;
        if (filled) T(load_row)(row_address(t, a, batch, r), a->col, a->dtype, depth, x);
        for (ix d = filled; d < stride; d++) x[d] = 0;
        if (flip) for (ix d = 0; d < depth; d++) x[d] = -x[d];
        nonfinite[r] |= !T(is_finite)(x, stride);
    }
}

STEP void T(load_gradient_rows)(const Params *p, const Gradients *w, Task *t, GradientScratch *b) {
    memset(b->nonfinite, 0, t->rows);
    if (w->row_factors.data)
        T(load_rows)(p, t, &w->row_factors, w->factor_dim, w->factor_stride, 0, b->row_factors, t->q_rows,
                     b->nonfinite);
    T(load_rows)(p, t, &p->query, p->head_dim, w->stride, p->flip, b->query, t->q_rows, b->nonfinite);
    T(load_rows)(p, t, &w->grad_out, w->value_dim, w->value_stride, 0, b->grad_out, b->grad_rows, b->nonfinite);
    b->any_nonfinite = 0;
    char *delta = T(batch)(p, t, &w->delta);
    for (ix r = 0; r < t->rows; r++) {
        b->any_nonfinite |= b->nonfinite[r];
        if (delta) memcpy(G_(delta) + r, row_address(t, &w->delta, delta, r), sizeof(REAL));
        else G_(delta)[r] = 0;
    }
}

/* Packs panels of a block's keys and values, and copies the rows that dS multiplies. */
STEP void T(pack_gradient_keys)(const Params *p, const Gradients *w, Task *t, ix block, GradientScratch *b) {
    const Array *a = &w->key_factors;
    const char *rows = address(a, &p->batch, t->batch, t->kv_head);
    Task mirror = *t;
    ix first = block * p->block_k, n = ix_min(p->block_k, t->lengths.kv_length - first);
    mirror.key = t->value;
    mirror.key_scale = NULL;
    T(pack_block)(p, t, block, b->keys);
    T(pack)(&w->products, &mirror, block, b->values);
    for (ix j = 0; rows && j < n; j++) {
        REAL *x = G_(key_factors) + j * w->factor_stride;
        const ix row = w->relevance ? first + j : row_of_key(t, first + j);
        T(load_row)(rows + row * a->row, a->col, a->dtype, w->factor_dim, x);
        for (ix d = w->factor_dim; d < w->factor_stride; d++) x[d] = 0;
        /* The dS of a key that is not finite are NaN or 0. */
        if (!T(is_finite)(x, w->factor_stride)) memset(x, 0, w->factor_stride * sizeof(REAL));
    }
}

/* Writes delta of the task's rows. */
STEP void T(write_deltas)(const Params *p, const Gradients *w, Task *t, GradientScratch *b) {
    const Array *g = &w->grad_out, *o = &w->output;
    char *grad = T(batch)(p, t, g), *output = T(batch)(p, t, o);
    char *grad_lse = T(batch)(p, t, &w->grad_lse), *delta = T(batch)(p, t, &w->delta);
    for (ix r = 0; r < t->rows; r++) {
        REAL sum = 0;
        if (t->row[r].position < t->lengths.q_length) {
            T(load_row)(row_address(t, g, grad, r), g->col, g->dtype, w->value_dim, b->grad_out);
            T(load_row)(row_address(t, o, output, r), o->col, o->dtype, w->value_dim, b->d_value);
            VEC part = V(set1)(0);
            ix d = 0;
            for (; d + LANES <= w->value_dim; d += LANES)
                part = V(fma)(V(load)(G_(grad_out) + d), V(load)(G_(d_value) + d), part);
            for (; d < w->value_dim; d++) sum += G_(grad_out)[d] * G_(d_value)[d];
            sum += V(sum)(part);
            if (grad_lse) sum -= T(element)(row_address(t, &w->grad_lse, grad_lse, r), w->grad_lse.dtype);
        }
        memcpy(row_address(t, &w->delta, delta, r), &sum, sizeof sum);
    }
}

/* ------------------------------------------------------------------------------------------------------- scores */

/* The derivative of the softcap, 1 - tanh(x / softcap)**2, from the products before it. */
STEP void T(cap_slopes)(const Params *p, const Task *t, ix n, GradientScratch *b) {
    const VEC factor = V(set1)((REAL)p->scale), cap = V(set1)((REAL)p->softcap);
    for (ix r = 0; r < n; r++)
        for (ix j = t->from; j < t->to; j += LANES) {
            VEC x = V(tanh)(V(load)(P_(s) + r * p->width + j) * factor / cap);
            V(store)(G_(slopes) + r * p->width + j, V(set1)(1) - x * x);
        }
}

/* Turns scores and dP into weights and dS, in place; dP - delta is at least `least`. A rounded lse must not make a
 * weight larger than 1. */
INLINE void T(gradients)(const int rows, const Params *p, REAL *s, REAL *g, ix from, ix to,
                         const REAL *lse, const double *inverse, const REAL *delta, VEC least) {
    const VEC c = V(set1)((REAL)p->exponent), never = V(set1)(-INFINITY), zero = V(set1)(0);
    VINT alive[GROUP_ROWS];
    UNROLL for (int r = 0; r < rows; r++) alive[r] = V(set1)(lse[r]) != never;
    for (ix j = from; j < to; j += LANES) {
        UNROLL for (int r = 0; r < rows; r++) {
            VEC x = V(load)(s + r * p->width + j);
            VEC w = V(exp2)(-V(max)(zero, (V(set1)(lse[r]) - x) * c)) * V(set1)((REAL)inverse[r]);
            w = (VEC)((VINT)w & (x != never) & alive[r]);
            VEC d = w * V(max)(least, V(load)(g + r * p->width + j) - V(set1)(delta[r]));       /* NaN stays */
            V(store)(s + r * p->width + j, w);
            V(store)(g + r * p->width + j, (VEC)((VINT)d & (w != zero)));
        }
    }
}

STEP void T(score_gradients)(const Params *p, const Gradients *w, const Task *t, ix r0, ix n, int capped,
                             GradientScratch *b) {
    REAL *s = G_(weights) + r0 * p->width, *g = G_(scores) + r0 * p->width;
    const REAL *lse = P_(final_max) + r0, *delta = G_(delta) + r0, *slopes = b->slopes;
    const double *inverse = t->inverse + r0;
    const VEC least = V(set1)(w->relevance == POSITIVE ? 0 : -INFINITY);
#define ROWS(rows) T(gradients)(rows, p, s, g, t->from, t->to, lse, inverse, delta, least)
    ROW_CASES(n, ROWS)
#undef ROWS
    for (ix r = 0; capped && r < n; r++)
        for (ix j = t->from; j < t->to; j += LANES) {
            const ix at = r * p->width + j;
            VEC d = V(load)(g + at) * V(load)(slopes + at);
            V(store)(g + at, (VEC)((VINT)d & (V(load)(s + at) != V(set1)(0))));
        }
}

/* Zeroes a group's columns that were not computed. */
STEP void T(clear_invisible)(const Params *p, const Task *t, ix r0, ix n, GradientScratch *b) {
    ix from = t->column < t->column_stop ? t->from : 0, to = t->column < t->column_stop ? t->to : 0;
    for (ix r = r0; r < r0 + n; r++) {
        REAL *rows[] = {G_(weights) + r * p->width, G_(scores) + r * p->width};
        for (int k = 0; k < 2; k++) {
            memset(rows[k], 0, from * sizeof(REAL));
            memset(rows[k] + to, 0, (p->width - to) * sizeof(REAL));
        }
    }
}

/* ----------------------------------------------------------------------------------------------------- products */

/* o[r] += the sum over n steps k of w[r * across + k * along] * x[k], for rows x vectors; rows of x and o are `stride`
 * apart. */
INLINE void T(product_tile)(const int rows, const int vectors, const REAL *w, ix across, ix along, const REAL *x,
                            ix stride, ix n, REAL *o) {
    VEC sum[TALL_ROWS][TILE_VECTORS];
    const REAL *w_rows[GROUP_ROWS];
    UNROLL for (int r = 0; r < rows; r++) w_rows[r] = w + r * across;
    T(rank1)(NATIVE, 0, rows, vectors, w_rows, along, (const char *)x, stride * sizeof(REAL), NULL, 0, n, NULL, sum,
             NULL);
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int i = 0; i < vectors; i++) {
            REAL *to = o + r * stride + i * LANES;
            V(store)(to, V(load)(to) + sum[r][i]);
        }
}

/* First vector of one of the chunks of a row: chunks differ by at most one vector. */
INLINE ix T(first_vector)(ix vectors, ix chunk, ix chunks) { return chunk * vectors / chunks; }

/* product_tile() with `vectors` as a constant. */
INLINE void T(product_chunk)(const int rows, ix vectors, const REAL *w, ix across, ix along, const REAL *x, ix stride,
                             ix n, REAL *o) {
#define TILE(vectors) T(product_tile)(rows, vectors, w, across, along, x, stride, n, o)
    VECTOR_CASES(TILE)
#undef TILE
}

/* dQ of a group += dS K */
STEP void T(add_query_gradients)(const Params *p, const Gradients *w, const Task *t, ix r0, ix n, void *sums,
                                 GradientScratch *b) {
    REAL *o = sums;
    const ix stride = w->factor_stride;
    ix all = stride / LANES - 1, chunks = ceil_div(all, TILE_VECTORS), keys = t->column_stop - t->column;
    const REAL *coefficients = G_(scores) + r0 * p->width + t->column;
    const REAL *rows_of_keys = G_(key_factors) + t->column * stride;
    o += r0 * stride;
    for (ix c = 0; c < chunks; c++) {
        ix from = T(first_vector)(all, c, chunks), vectors = T(first_vector)(all, c + 1, chunks) - from;
        const REAL *x = rows_of_keys + from * LANES;
#define ROWS(rows) T(product_chunk)(rows, vectors, coefficients, p->width, 1, x, stride, keys, o + from * LANES)
        ROW_CASES(n, ROWS)
#undef ROWS
    }
}

/* Sets the range of rows that may see a key of each group of six. */
static void T(set_spans)(const Task *t, ix keys, GradientScratch *b) {
    for (ix j = 0; j < keys; j += GROUP_ROWS) {
        Range rows = {t->rows, 0};
        for (ix g = 0; g * GROUP_ROWS < t->rows; g++)
            if (b->part[g].start < j + GROUP_ROWS && b->part[g].stop > j) {
                rows.start = ix_min(rows.start, g * GROUP_ROWS);
                rows.stop = ix_min(t->rows, (g + 1) * GROUP_ROWS);
            }
        b->span[j / GROUP_ROWS] = rows;
    }
}

/* sums[key] += the sum over rows of coefficients[row][key] * x[row]. */
static void T(add_to_keys)(const Params *p, const REAL *coefficients, const REAL *x, ix stride, ix keys,
                           const Range *span, REAL *sums) {
    ix all = stride / LANES - 1, chunks = ceil_div(all, TILE_VECTORS);
    for (ix c = 0; c < chunks; c++) {
        ix from = T(first_vector)(all, c, chunks), vectors = T(first_vector)(all, c + 1, chunks) - from;
        for (ix j = 0; j < keys; j += GROUP_ROWS) {
            Range rows = span[j / GROUP_ROWS];
            ix n = ix_min(GROUP_ROWS, keys - j);
            const REAL *w = coefficients + rows.start * p->width + j, *y = x + rows.start * stride + from * LANES;
            REAL *o = sums + j * stride + from * LANES;
            if (rows.start >= rows.stop) continue;
#define ROWS(k) T(product_chunk)(k, vectors, w, 1, p->width, y, stride, rows.stop - rows.start, o)
            ROW_CASES(n, ROWS)
#undef ROWS
        }
    }
}

/* Excludes rows that are not finite from the products. The dS of such a query are NaN or 0 already; such a grad_out is
 * added here, where its weight is not 0. */
static void T(exclude_nonfinite_rows)(const Params *p, const Gradients *w, const Task *t, ix keys, int want,
                                      GradientScratch *b) {
    for (ix r = 0; r < t->rows; r++) {
        REAL *g = G_(grad_out) + r * w->value_stride;
        if (!b->nonfinite[r]) continue;
        for (ix j = 0; want & WANT_VALUE && j < keys; j++) {
            REAL weight = G_(weights)[r * p->width + j], *o = G_(d_value) + j * w->value_stride;
            if (weight != 0)
                for (ix d = 0; d < w->value_dim; d++) o[d] += weight * g[d];
        }
        memset(g, 0, w->value_stride * sizeof(REAL));
        memset(G_(query) + r * w->stride, 0, w->stride * sizeof(REAL));
    }
}

/* dV += P^T dO and dK += dS^T Q of a block of rows and of keys */
STEP void T(add_key_gradients)(const Params *p, const Gradients *w, Task *t, ix block, int want, GradientScratch *b) {
    ix keys = ix_min(p->block_k, t->lengths.kv_length - block * p->block_k);
    T(set_spans)(t, keys, b);
    if (b->any_nonfinite) T(exclude_nonfinite_rows)(p, w, t, keys, want, b);
    if (want & WANT_VALUE) T(add_to_keys)(p, b->weights, b->grad_out, w->value_stride, keys, b->span, b->d_value);
    if (want & WANT_KEY) T(add_to_keys)(p, b->scores, b->row_factors, w->factor_stride, keys, b->span, b->d_key);
}

/* The gradient of the bias += dS; scores that share an element of the bias are added in order. */
STEP void T(add_bias_gradients)(const Params *p, const Gradients *w, const Task *t, ix r0, ix n, ix block,
                                GradientScratch *b) {
    const Array *a = &w->bias;
    char *batch = a->data + batch_offset(a, &p->batch, t->batch) + block * p->block_k * a->col;
    for (ix r = r0; r < r0 + n; r++) {
        const REAL *g = G_(scores) + r * p->width;
        char *dst = row_address(t, a, batch, r);
        if (a->col == 0) {
            double sum = 0;
            for (ix j = t->column; j < t->column_stop; j++) sum += g[j];
            if (a->dtype == F64) *(double *)dst += sum;
            else *(float *)dst += (float)sum;
        }
        else if (a->dtype == F64)
            for (ix j = t->column; j < t->column_stop; j++) *(double *)(dst + j * a->col) += g[j];
        else for (ix j = t->column; j < t->column_stop; j++) *(float *)(dst + j * a->col) += (float)g[j];
    }
}

/* ------------------------------------------------------------------------------------------------------ storing */

INLINE void T(store_sums)(const Array *a, char *dst, REAL *x, ix depth, REAL factor) {
    for (ix d = 0; d < depth; d++) x[d] = x[d] * factor + 0;    /* + 0: a sum that is -0 becomes 0 */
    T(store_row)(x, depth, dst, a->col, a->dtype);
}

STEP void T(write_query_gradients)(const Params *p, const Gradients *w, const Task *t, void *sums) {
    REAL *x = sums;
    const REAL scale = w->relevance ? 1 : (REAL)p->scale;
    const Array *a = &w->query;
    char *batch = T(batch)(p, t, a);
    for (ix r = 0; r < t->rows; r++)
        T(store_sums)(a, row_address(t, a, batch, r), x + r * w->factor_stride, w->factor_dim, scale);
}

/* Writes dK and dV of all keys of a block, also past a length; with `flip` the copied queries have the scale's sign. */
STEP void T(write_key_gradients)(const Params *p, const Gradients *w, const Task *t, ix block, int want,
                                 GradientScratch *b) {
    const Array *k = &w->key, *v = &w->value;
    const REAL scale = w->relevance ? 1 : (REAL)(p->flip ? -p->scale : p->scale);
    ix first = block * p->block_k, n = ix_min(p->block_k, p->kv_len - first);
    char *key = address(k, &p->batch, t->batch, t->kv_head), *value = address(v, &p->batch, t->batch, t->kv_head);
    for (ix j = 0; j < n; j++) {
        if (want & WANT_KEY)
            T(store_sums)(k, key + (first + j) * k->row, G_(d_key) + j * w->factor_stride, w->factor_dim, scale);
        if (want & WANT_VALUE)
            T(store_sums)(v, value + (first + j) * v->row, G_(d_value) + j * w->value_stride, w->value_dim, 1);
    }
}

#undef G_
