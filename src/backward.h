/* backward.h (template over REAL): the gradients of attention, for a block of query rows and a block of keys.
 *
 * The weights P are computed again under the lse of the forward pass; with dP = dO V^T and delta = rowsum(dO * O) the
 * gradient of the scores is dS = P * (dP - delta), and dV += P^T dO, dQ += dS K, dK += dS^T Q (Dao et al. 2022,
 * appendix B.2). A weight or dS of exactly 0 passes nothing on, whatever it meets: so no hidden key or row of padding
 * can change a bit. */

#define B_(name) ((REAL *)b->name)

/* ------------------------------------------------------------------------------------------------------ loading */

INLINE int T(is_finite)(const REAL *x, ix n) {
    VINT odd = {0}, none = {0};
    for (ix i = 0; i < n; i += LANES) {
        VEC y = V(load)(x + i);
        odd |= ~(y - y == 0);
    }
    return !memcmp(&odd, &none, sizeof none);
}

INLINE char *T(batch)(const Params *p, const Task *t, const Array *a) {
    return place_of(a, &p->batch, t->batch, 0);
}

/* Copies of the task's rows of an array, with zeros behind; rows of padding are zeros and are not read. */
static void T(load_rows)(const Params *p, const Task *t, const Array *a, ix depth, ix stride, int flip, REAL *dst,
                         const void **rows, uint8_t *odd) {
    char *batch = T(batch)(p, t, a);
    for (ix r = 0; r < t->rows; r++) {
        REAL *x = dst + r * stride;
        ix filled = t->row[r].position < t->lengths.q_length ? depth : 0;
        rows[r] = x;
        if (filled) T(load_row)(T(row_pointer)(t, a, batch, r), a->col, a->dtype, depth, x);
        for (ix d = filled; d < stride; d++) x[d] = 0;
        if (flip) for (ix d = 0; d < depth; d++) x[d] = -x[d];
        odd[r] |= !T(is_finite)(x, stride);
    }
}

static void T(load_backward)(const Params *p, const Backward *w, Task *t, Sweep *b) {
    memset(b->odd, 0, t->rows);
    T(load_rows)(p, t, &p->query, p->head_dim, w->stride, p->flip, b->query, t->q_rows, b->odd);
    T(load_rows)(p, t, &w->grad_out, w->value_dim, w->value_stride, 0, b->grad_out, b->grad_rows, b->odd);
    b->any_odd = 0;
    char *delta = T(batch)(p, t, &w->delta);
    for (ix r = 0; r < t->rows; r++) {
        b->any_odd |= b->odd[r];
        memcpy(B_(delta) + r, T(row_pointer)(t, &w->delta, delta, r), sizeof(REAL));
    }
}

/* Keys and values of a block: panels of both, and rows of the keys. */
static void T(pack_backward)(const Params *p, const Backward *w, Task *t, ix block, Sweep *b) {
    const Array *a = &p->key;
    Task mirror = *t;
    ix first = block * p->block_k, n = least(p->block_k, t->lengths.kv_length - first);
    mirror.key = t->value;
    T(pack)(p, t, block, b->keys);
    T(pack)(&w->products, &mirror, block, b->values);
    for (ix j = 0; j < n; j++) {
        REAL *x = B_(key_rows) + j * w->stride;
        T(load_row)(t->key + (first + j) * a->row, a->col, a->dtype, p->head_dim, x);
        for (ix d = p->head_dim; d < w->stride; d++) x[d] = 0;
        if (!T(is_finite)(x, w->stride)) memset(x, 0, w->stride * sizeof(REAL));     /* its dS are NaN or 0 */
    }
}

/* delta of the task's rows, to its array */
static void T(row_deltas)(const Params *p, const Backward *w, Task *t, Sweep *b) {
    const Array *g = &w->grad_out, *o = &w->output;
    char *grad = T(batch)(p, t, g), *output = T(batch)(p, t, o);
    char *grad_lse = T(batch)(p, t, &w->grad_lse), *delta = T(batch)(p, t, &w->delta);
    for (ix r = 0; r < t->rows; r++) {
        REAL sum = 0;
        if (t->row[r].position < t->lengths.q_length) {
            T(load_row)(T(row_pointer)(t, g, grad, r), g->col, g->dtype, w->value_dim, b->grad_out);
            T(load_row)(T(row_pointer)(t, o, output, r), o->col, o->dtype, w->value_dim, b->d_value);
            VEC part = V(set1)(0);
            ix d = 0;
            for (; d + LANES <= w->value_dim; d += LANES)
                part = V(fma)(V(load)(B_(grad_out) + d), V(load)(B_(d_value) + d), part);
            for (; d < w->value_dim; d++) sum += B_(grad_out)[d] * B_(d_value)[d];
            sum += V(sum)(part);
            if (grad_lse) sum -= T(element)(T(row_pointer)(t, &w->grad_lse, grad_lse, r), w->grad_lse.dtype);
        }
        memcpy(T(row_pointer)(t, &w->delta, delta, r), &sum, sizeof sum);
    }
}

/* ------------------------------------------------------------------------------------------------------- scores */

/* The derivative of the softcap, 1 - tanh(x / softcap)**2, from the products before it. */
static void T(cap_slopes)(const Params *p, const Task *t, ix n, Sweep *b) {
    const VEC factor = V(set1)((REAL)p->scale), cap = V(set1)((REAL)p->softcap);
    for (ix r = 0; r < n; r++)
        for (ix j = t->from; j < t->to; j += LANES) {
            VEC x = V(tanh)(V(load)(P_(s) + r * p->width + j) * factor / cap);
            V(store)(B_(slopes) + r * p->width + j, V(set1)(1) - x * x);
        }
}

/* From scores and dP to weights and dS, in place. A rounded lse must not make a weight larger than 1. */
INLINE void T(gradients)(const int rows, const int capped, const Params *p, REAL *s, REAL *g, ix from, ix to,
                         const REAL *lse, const double *inverse, const REAL *delta, const REAL *slopes) {
    const VEC c = V(set1)((REAL)p->c), never = V(set1)(-INFINITY), zero = V(set1)(0);
    VINT alive[GROUP_ROWS];
    UNROLL for (int r = 0; r < rows; r++) alive[r] = V(set1)(lse[r]) != never;
    for (ix j = from; j < to; j += LANES) {
        UNROLL for (int r = 0; r < rows; r++) {
            VEC x = V(load)(s + r * p->width + j);
            VEC w = V(exp2)(-V(max)(zero, (V(set1)(lse[r]) - x) * c)) * V(set1)((REAL)inverse[r]);
            w = (VEC)((VINT)w & (x != never) & alive[r]);
            VEC d = w * (V(load)(g + r * p->width + j) - V(set1)(delta[r]));
            if (capped) d *= V(load)(slopes + r * p->width + j);
            V(store)(s + r * p->width + j, w);
            V(store)(g + r * p->width + j, (VEC)((VINT)d & (w != zero)));
        }
    }
}

static void T(score_gradients)(const Params *p, const Task *t, ix r0, ix n, int capped, Sweep *b) {
    REAL *s = B_(weights) + r0 * p->width, *g = B_(scores) + r0 * p->width;
    const REAL *lse = P_(final_max) + r0, *delta = B_(delta) + r0, *slopes = b->slopes;
    const double *inverse = t->inverse + r0;
#define ROWS(rows) \
    if (capped) T(gradients)(rows, 1, p, s, g, t->from, t->to, lse, inverse, delta, slopes); \
    else T(gradients)(rows, 0, p, s, g, t->from, t->to, lse, inverse, delta, slopes)
    ROW_CASES(n, ROWS)
#undef ROWS
}

/* Zeros at the columns of a group that were not computed. */
static void T(clear_unseen)(const Params *p, const Task *t, ix r0, ix n, Sweep *b) {
    ix from = t->column < t->columns ? t->from : 0, to = t->column < t->columns ? t->to : 0;
    for (ix r = r0; r < r0 + n; r++) {
        REAL *rows[] = {B_(weights) + r * p->width, B_(scores) + r * p->width};
        for (int k = 0; k < 2; k++) {
            memset(rows[k], 0, from * sizeof(REAL));
            memset(rows[k] + to, 0, (p->width - to) * sizeof(REAL));
        }
    }
}

/* ----------------------------------------------------------------------------------------------------- products */

/* o += sum over n steps k of coefficient w[r * across + k * along] times row x[k], for rows x vectors;
 * the rows of x and o are `stride` apart. */
INLINE void T(sum_tile)(const int rows, const int vectors, const REAL *w, ix across, ix along, const REAL *x, ix stride,
                        ix n, REAL *o) {
    VEC sum[GROUP_ROWS][TILE_VECTORS];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int i = 0; i < vectors; i++) sum[r][i] = V(set1)(0);
    for (ix k = 0; k < n; k++, x += stride, w += along) {
        VEC y[TILE_VECTORS];
        UNROLL for (int i = 0; i < vectors; i++) y[i] = V(load)(x + i * LANES);
        UNROLL for (int r = 0; r < rows; r++) {
            VEC f = V(set1)(w[r * across]);
            UNROLL for (int i = 0; i < vectors; i++) sum[r][i] = V(fma)(f, y[i], sum[r][i]);
        }
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int i = 0; i < vectors; i++) {
            REAL *to = o + r * stride + i * LANES;
            V(store)(to, V(load)(to) + sum[r][i]);
        }
}

/* The width of a row in vectors is cut into chunks that differ by at most one vector. */
INLINE ix T(cut)(ix vectors, ix chunk) { return chunk * vectors / ceil_div(vectors, TILE_VECTORS); }

/* A chunk of `vectors` vectors: the number as a constant */
INLINE void T(sum_chunk)(const int rows, ix vectors, const REAL *w, ix across, ix along, const REAL *x, ix stride, ix n,
                         REAL *o) {
#define TILE(vectors) T(sum_tile)(rows, vectors, w, across, along, x, stride, n, o)
    VECTOR_CASES(TILE)
#undef TILE
}

/* dQ of a group += dS K */
static void T(add_query)(const Params *p, const Backward *w, const Task *t, ix r0, ix n, void *sums, Sweep *b) {
    REAL *o = sums;
    ix all = p->depth_stride / LANES, keys = t->columns - t->column;
    const REAL *coefficients = B_(scores) + r0 * p->width + t->column;
    const REAL *rows_of_keys = B_(key_rows) + t->column * w->stride;
    o += r0 * w->stride;
    for (ix c = 0; T(cut)(all, c) < all; c++) {
        ix from = T(cut)(all, c), vectors = T(cut)(all, c + 1) - from;
        const REAL *x = rows_of_keys + from * LANES;
#define ROWS(rows) T(sum_chunk)(rows, vectors, coefficients, p->width, 1, x, w->stride, keys, o + from * LANES)
        ROW_CASES(n, ROWS)
#undef ROWS
    }
}

/* For each six keys the rows that may see one of them. */
static void T(set_spans)(const Task *t, ix keys, Sweep *b) {
    for (ix j = 0; j < keys; j += GROUP_ROWS) {
        Range rows = {t->rows, 0};
        for (ix g = 0; g * GROUP_ROWS < t->rows; g++)
            if (b->part[g].start < j + GROUP_ROWS && b->part[g].stop > j) {
                rows.start = least(rows.start, g * GROUP_ROWS);
                rows.stop = least(t->rows, (g + 1) * GROUP_ROWS);
            }
        b->span[j / GROUP_ROWS] = rows;
    }
}

/* o of each key += the sum over the rows of coefficient [row][key] times row x */
static void T(add_to_keys)(const Params *p, const REAL *coefficients, const REAL *x, ix stride, ix keys,
                           const Range *span, REAL *sums) {
    ix all = stride / LANES - 1;
    for (ix c = 0; T(cut)(all, c) < all; c++) {
        ix from = T(cut)(all, c), vectors = T(cut)(all, c + 1) - from;
        for (ix j = 0; j < keys; j += GROUP_ROWS) {
            Range rows = span[j / GROUP_ROWS];
            ix n = least(GROUP_ROWS, keys - j);
            const REAL *w = coefficients + rows.start * p->width + j, *y = x + rows.start * stride + from * LANES;
            REAL *o = sums + j * stride + from * LANES;
            if (rows.start >= rows.stop) continue;
#define ROWS(k) T(sum_chunk)(k, vectors, w, 1, p->width, y, stride, rows.stop - rows.start, o)
            ROW_CASES(n, ROWS)
#undef ROWS
        }
    }
}

/* Rows that are not finite leave the products. Of a query its dS are NaN or 0 already; a grad_out is added by hand. */
static void T(take_out_odd)(const Params *p, const Backward *w, const Task *t, ix keys, int want, Sweep *b) {
    for (ix r = 0; r < t->rows; r++) {
        REAL *g = B_(grad_out) + r * w->value_stride;
        if (!b->odd[r]) continue;
        for (ix j = 0; want & WANT_VALUE && j < keys; j++) {
            REAL weight = B_(weights)[r * p->width + j], *o = B_(d_value) + j * w->value_stride;
            if (weight != 0)
                for (ix d = 0; d < w->value_dim; d++) o[d] += weight * g[d];
        }
        memset(g, 0, w->value_stride * sizeof(REAL));
        memset(B_(query) + r * w->stride, 0, w->stride * sizeof(REAL));
    }
}

/* dV += P^T dO and dK += dS^T Q of a block of rows and of keys */
static void T(add_keys)(const Params *p, const Backward *w, Task *t, ix block, int want, Sweep *b) {
    ix keys = least(p->block_k, t->lengths.kv_length - block * p->block_k);
    T(set_spans)(t, keys, b);
    if (b->any_odd) T(take_out_odd)(p, w, t, keys, want, b);
    if (want & WANT_VALUE) T(add_to_keys)(p, b->weights, b->grad_out, w->value_stride, keys, b->span, b->d_value);
    if (want & WANT_KEY) T(add_to_keys)(p, b->scores, b->query, w->stride, keys, b->span, b->d_key);
}

/* The gradient of the bias += dS; places that share an element of the bias are added in order. */
static void T(add_bias)(const Params *p, const Backward *w, const Task *t, ix r0, ix n, ix block, Sweep *b) {
    const Array *a = &w->bias;
    char *batch = a->data + batch_offset(a, &p->batch, t->batch) + block * p->block_k * a->col;
    for (ix r = r0; r < r0 + n; r++) {
        const REAL *g = B_(scores) + r * p->width;
        char *dst = T(row_pointer)(t, a, batch, r);
        if (a->col == 0) {
            double sum = 0;
            for (ix j = t->column; j < t->columns; j++) sum += g[j];
            if (a->dtype == F64) *(double *)dst += sum;
            else *(float *)dst += (float)sum;
        }
        else if (a->dtype == F64)
            for (ix j = t->column; j < t->columns; j++) *(double *)(dst + j * a->col) += g[j];
        else for (ix j = t->column; j < t->columns; j++) *(float *)(dst + j * a->col) += (float)g[j];
    }
}

/* ------------------------------------------------------------------------------------------------------ storing */

INLINE void T(store_sums)(const Array *a, char *dst, REAL *x, ix depth, REAL factor) {
    for (ix d = 0; d < depth; d++) x[d] = x[d] * factor + 0;    /* + 0: a sum that is -0 becomes 0 */
    T(store_row)(x, depth, dst, a->col, a->dtype);
}

static void T(store_query_sums)(const Params *p, const Backward *w, const Task *t, void *sums) {
    REAL *x = sums;
    const Array *a = &w->query;
    char *batch = T(batch)(p, t, a);
    for (ix r = 0; r < t->rows; r++)
        T(store_sums)(a, T(row_pointer)(t, a, batch, r), x + r * w->stride, p->head_dim, (REAL)p->scale);
}

/* dK and dV of all keys of a block, those past a length too; a flipped query takes the sign of the scale with it. */
static void T(store_key_sums)(const Params *p, const Backward *w, const Task *t, ix block, int want, Sweep *b) {
    const Array *k = &w->key, *v = &w->value;
    const REAL scale = (REAL)(p->flip ? -p->scale : p->scale);
    ix first = block * p->block_k, n = least(p->block_k, p->kv_len - first);
    char *key = place_of(k, &p->batch, t->batch, t->kv_head), *value = place_of(v, &p->batch, t->batch, t->kv_head);
    for (ix j = 0; j < n; j++) {
        if (want & WANT_KEY) T(store_sums)(k, key + (first + j) * k->row, B_(d_key) + j * w->stride, p->head_dim, scale);
        if (want & WANT_VALUE) T(store_sums)(v, value + (first + j) * v->row, B_(d_value) + j * w->value_stride, w->value_dim, 1);
    }
}

/* ------------------------------------------------------------------------------------------- stand-alone softmax */

/* Rows of softmax: y * (g - sum(g * y)); of log-softmax: g - exp(y) * sum(g). An element left out does not count. */
static void T(softmax_backward_rows)(const RowOp *op, ix from, ix to, void *scratch) {
    const ix chunk = T(chunk_of)(op->n);
    REAL *g = scratch, *y = g + round_up(chunk, LANES);
    for (ix i = from; i < to; i++) {
        const char *grad = op->x.data + batch_offset(&op->x, &op->batch, i);
        const char *result = op->y.data + batch_offset(&op->y, &op->batch, i);
        char *out = op->out.data + batch_offset(&op->out, &op->batch, i);
        double sum = 0, low = 0;
        for (int pass = 0; pass < 2; pass++)
            for (ix first = 0; first < op->n; first += chunk) {
                if (row_stopped(op, first, chunk)) return;
                ix n = least(chunk, op->n - first);
                if (!pass || op->n > chunk) {
                    T(load_row)(grad + first * op->x.col, op->x.col, op->x.dtype, n, g);
                    T(load_row)(result + first * op->y.col, op->y.col, op->y.dtype, n, y);
                    for (ix j = n; j < round_up(n, LANES); j++) g[j] = y[j] = 0;
                    const VEC none = V(set1)(op->logarithm ? -INFINITY : 0);
                    for (ix j = 0; j < n; j += LANES) {
                        VEC share = V(load)(y + j);
                        V(store)(g + j, (VEC)((VINT)V(load)(g + j) & (share != none)));
                        if (op->logarithm) V(store)(y + j, V(exp2)(share * V(set1)((REAL)0x1.71547652b82fep+0)));
                    }
                }
                const VEC total = V(set1)((REAL)(sum + low));
                for (ix start = 0; !pass && start < n; start += SUMMED) {
                    VEC part = V(set1)(0);
                    for (ix j = start; j < least(start + SUMMED, n); j += LANES) {
                        VEC x = V(load)(g + j);
                        if (!op->logarithm) x *= V(load)(y + j);
                        part += x;
                    }
                    T(add_exactly)(&sum, &low, V(sum)(part));
                }
                if (!pass) continue;
                for (ix j = 0; j < n; j += LANES) {
                    VEC share = V(load)(y + j), x = V(load)(g + j), factor = total;
                    if (!op->logarithm) factor = x - total;
                    VEC change = (VEC)((VINT)(share * factor) & (share != V(set1)(0)));
                    V(store)(g + j, change);
                    if (op->logarithm) V(store)(g + j, x - change);
                }
                T(store_row)(g, n, out + first * op->out.col, op->out.col, op->out.dtype);
            }
    }
}
#undef B_
