/* tile.h (template over REAL): the steps of attention on a group of up to 6 query rows and one block of keys.
 *
 * Per group and block: 6 x block_k scores are written once to L1 and read once by each step; the keys and values stream
 * from L2 (block_k * (D + Dv) * 4 bytes), one vector load of them for 6 fused multiply-adds per row tile. */

/* ------------------------------------------------------------------------------------------------------ begin */

/* A query row as the products read it: in place, or a copy where it is not REAL without gaps, or changes. */
INLINE const REAL *T(query_row)(const Params *p, const char *src, REAL *copy) {
    const Array *a = &p->query;
    ix depth = p->head_dim;
    const REAL *x = T(row)(src, a->col, a->dtype, depth, copy);
    if (p->flip) {
        for (ix d = 0; d < depth; d++) copy[d] = -x[d];
        x = copy;
    }
    if (p->direct && depth < p->depth_stride) {           /* whole vectors, with zeros behind */
        if (x != copy) memcpy(copy, x, depth * sizeof(REAL));
        for (ix d = depth; d < p->depth_stride; d++) copy[d] = 0;
        x = copy;
    }
    return x;
}

/* Find the query rows, and set the state of rows that have seen nothing. */
INLINE void T(begin_rows)(const int dot, const Params *p, Task *t) {
    const Array *a = &p->query;
    for (ix r = 0; r < t->rows; r++) {
        P_(row_max)[r] = -INFINITY;
        t->row_sum[r] = 0;
        REAL *copy = P_(q) + r * p->depth_stride;
        t->q_rows[r] = copy;
        if (!t->query) continue;            /* not even memset() of nothing: on a page never touched that takes 0.2 us */
        if (t->row[r].position >= t->lengths.q_length) {       /* padding or another sequence's: not read */
            memset(copy, 0, p->depth_stride * sizeof(REAL));
            continue;
        }
        const char *src = t->query + t->row[r].position * a->row + t->row[r].head * a->head;
        t->q_rows[r] = dot ? PAIR_ROW(p, src, copy) : T(query_row)(p, src, copy);
    }
    if (p->strips) T(lay_strips)(p, t, dot ? p->head_dim / 2 : p->head_dim);
    memset(t->o, 0, t->rows * p->value_stride * sizeof(REAL));
    t->uses_apart = 0;
}

/* ----------------------------------------------------------------------------------------------------- scores */

/* rows x vectors products of query rows with one panel of keys over `depth` depths (or, with `dot`, pairs of them), added
 * to those before unless they are the first; in the last vector, lanes without a bit in `tail` become -inf. The depth runs
 * in order for every tile shape, so a score has the same bits wherever its row and key fall. */
INLINE void T(scores_tile)(const int dot, const int rows, const int vectors, const REAL *const *q, const REAL *k, ix depth, int first,
                           unsigned tail, REAL *s, ix stride, VEC *peak) {
    VEC sum[GROUP_ROWS][TILE_VECTORS];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < vectors; v++) sum[r][v] = V(set1)(0);
    for (ix d = 0; d < depth; d++, k += PANEL) {
        VEC key[TILE_VECTORS];
        UNROLL for (int v = 0; v < vectors; v++) key[v] = V(load)(k + v * LANES);
        UNROLL for (int r = 0; r < rows; r++) {
            VEC x = V(set1)(q[r][d]);
            UNROLL for (int v = 0; v < vectors; v++) sum[r][v] = PRODUCT(dot, x, key[v], sum[r][v]);
        }
    }
    if (!first)
        UNROLL for (int r = 0; r < rows; r++)
            UNROLL for (int v = 0; v < vectors; v++) sum[r][v] += V(load)(s + r * stride + v * LANES);
    if (tail + 1 < 1u << LANES)
        UNROLL for (int r = 0; r < rows; r++) sum[r][vectors - 1] = V(keep_bits)(sum[r][vectors - 1], tail, V(set1)(-INFINITY));
    UNROLL for (int r = 0; r < rows; r++) {
        UNROLL for (int v = 0; v < vectors; v++) {
            V(store)(s + r * stride + v * LANES, sum[r][v]);
            peak[r] = V(max)(sum[r][v], peak[r]);     /* the running maximum is second: a NaN score is passed over */
        }
    }
}

/* One function per number of rows, with the vector counts inside: sizes are constants where registers are assigned. */
#if TILE_VECTORS == 4
#define VECTOR_CASES(call) switch (vectors) { case 1: call(1); break; case 2: call(2); break; case 3: call(3); break; default: call(4); }
#else
#define VECTOR_CASES(call) switch (vectors) { case 1: call(1); break; default: call(2); }
#endif
#define ROW_CASES(n, call) switch (n) { case 1: call(1); break; case 2: call(2); break; case 3: call(3); break; \
                                     case 4: call(4); break; case 5: call(5); break; default: call(6); }

/* Whether all are finite that were added, as x - x each. */
INLINE int T(all_zero)(VEC x) {
    VINT odd = ~(x == 0), none = {0};
    return !memcmp(&odd, &none, sizeof none);
}

INLINE void T(scores_rows)(const int dot, const int rows, const Params *p, const Task *t, ix next,
                           const REAL *const *q_rows, const REAL *k) {
    const REAL *q[GROUP_ROWS];
    VEC peak[GROUP_ROWS];
    ix from = 0, depth, depths = dot ? ceil_div(p->head_dim, 2) : p->head_dim;
    unsigned every = (1u << LANES) - 1, tail = every >> (t->to - t->columns);
    do {
        depth = least(depths - from, dot ? T(CHAIN) / 2 : T(CHAIN));
        UNROLL for (int r = 0; r < rows; r++) q[r] = q_rows[r] + from, peak[r] = V(set1)(-INFINITY);
        for (ix j = t->from; j < t->to; j += PANEL) {
            REAL *s = P_(s) + j;
            ix vectors = least(PANEL, t->to - j) / LANES;
            const REAL *panel = k + j * depths + from * PANEL;
            if ((p->arrays || p->keep) && from == 0) T(prefetch_panel)(p, t, next, rows, j);
#define TILE(vectors) T(scores_tile)(dot, rows, vectors, q, panel, depth, from == 0, j + PANEL < t->to ? every : tail, s, \
                                              p->width, peak)
            VECTOR_CASES(TILE)
#undef TILE
        }
        from += depth;
    } while (from < depths);
    UNROLL for (int r = 0; r < rows; r++) V(store)(P_(peaks) + r * LANES, peak[r]);
}

/* Ask for what the next group of rows will read first: its queries and its sums. */
INLINE void T(prefetch_group)(const Params *p, const Task *t, ix r0) {
    for (ix r = r0; r < least(r0 + GROUP_ROWS, t->rows); r++) {
        for (ix d = 0; d < p->head_dim; d += 64 / (ix)sizeof(REAL)) __builtin_prefetch((const REAL *)t->q_rows[r] + d);
        for (ix i = 0; i < p->value_stride; i += 64 / (ix)sizeof(REAL)) __builtin_prefetch(P_(o) + r * p->value_stride + i, 1);
    }
}

INLINE void T(scores_group)(const int dot, const Params *p, Task *t, ix r0, ix n, Packed kv) {
    const REAL *const *q = (const REAL *const *)t->q_rows + r0, *k = kv.keys;
    T(prefetch_group)(p, t, r0 + n);
#define ROWS(rows) T(scores_rows)(dot, rows, p, t, r0 + n, q, k)
    ROW_CASES(n, ROWS)
#undef ROWS
}

/* Alibi: -slope times the distance, which is exact before it is rounded to REAL. */
static void T(add_alibi)(const Params *p, const Task *t, ix r, REAL *s) {
    REAL slope;
    ix position = saturating_add(t->row[r].position, t->lengths.offset);
    memcpy(&slope, p->slopes.data + batch_offset(&p->slopes, &p->batch, t->batch) + t->row[r].head * p->slopes.head,
           sizeof slope);
    for (ix j = t->column; j < t->columns; j++)
        s[j] += -slope * (REAL)fabs((double)position - (double)(t->first_key + j));
}

/* The scores of a row in one pass, and their lanewise maximum. With `finish`: scale, softcap and bias (b, from column lo).
 * With `select`: places that are not allowed become -inf, whatever the product there is. */
INLINE VEC T(finish_row)(const int finish, const int select, const Params *p, const Task *t, ix lo, ix hi,
                         const uint8_t *allow, const REAL *b, REAL *s) {
    const VEC never = V(set1)(-INFINITY), scale = V(set1)((REAL)p->scale), cap = V(set1)((REAL)p->softcap);
    VEC peak = never;
    for (ix j = t->from; j < t->to; j += LANES) {
        const int whole = j >= lo && j + LANES <= hi;
        ix skip = 0, stop = LANES;
        if (!whole) skip = least(most(lo - j, 0), LANES), stop = least(most(hi - j, 0), LANES);
        VEC x = V(load)(s + j);
        if (finish) x *= scale;
        if (finish && p->softcap > 0) x = cap * V(tanh)(x / cap);
        if (finish && b) {
            VEC y;
            if (whole) y = V(loadu)(b + j - lo);
            else {
                REAL edge[LANES] = {0};
                for (ix i = skip; i < stop; i++) edge[i] = b[j + i - lo];
                y = V(loadu)(edge);
            }
            x = V(unless_equal)(x + y, y, never);
        }
        if (select && t->choose) x = V(keep_bytes)(x, allow + j, never);
        else if (select && !whole) x = V(keep_bits)(x, ((1u << stop) - 1) & ~((1u << skip) - 1), never);
        peak = V(max)(x, peak);
        V(store)(s + j, x);
    }
    return peak;
}

/* From products to the scores that enter the softmax: scale, softcap, bias, alibi in this order, then the selection. */
static void T(finish_scores)(const Params *p, Task *t, ix r0, ix n) {
    for (ix r = r0; r < r0 + n; r++) {
        REAL *s = P_(s) + (r - r0) * p->width;
        const REAL *b = p->bias.data ? t->bias_row[r - r0] : NULL;
        const uint8_t *allow = t->allow + (r - r0) * p->width;
        ix lo = most(t->row[r].start - t->first_key, t->column), hi = least(t->row[r].stop - t->first_key, t->columns);
        VEC peak;
        if (p->plain) peak = T(finish_row)(0, 1, p, t, lo, hi, allow, NULL, s);
        else if (!p->slopes.data) peak = T(finish_row)(1, 1, p, t, lo, hi, allow, b, s);
        else {
            T(finish_row)(1, 0, p, t, lo, hi, allow, b, s);
            T(add_alibi)(p, t, r, s);
            peak = T(finish_row)(0, 1, p, t, lo, hi, allow, NULL, s);
        }
        V(store)(P_(peaks) + (r - r0) * LANES, peak);
    }
}

/* ---------------------------------------------------------------------------------------------------- softmax */

/* The steps run over all rows of a group side by side: six independent chains hide the latency of the polynomial, and
 * there is one loop to leave instead of six (8.1 -> 5.9 cycles a vector of 16 at block_k 512 on Zen 5). */
INLINE void T(powers)(const int dot, const int rows, REAL *s, uint16_t *halves, ix stride, ix from, ix to, const REAL *shift, VEC c,
                      double *total) {
    VEC sum[GROUP_ROWS];
    UNROLL for (int r = 0; r < rows; r++) sum[r] = V(set1)(0);
    for (ix j = from; j < to; j += LANES) {
        UNROLL for (int r = 0; r < rows; r++) {
            VEC x = V(exp2)((V(load)(s + r * stride + j) - V(set1)(shift[r])) * c);
            sum[r] += x;
            V(store)(s + r * stride + j, x);
            if (dot) STORE_HALVES(halves + r * stride + j, x);
        }
    }
    UNROLL for (int r = 0; r < rows; r++) total[r] = V(sum)(sum[r]);
}

/* Scores to weights relative to the running row maximum; alpha is the factor that older sums take. A block that adds
 * nothing to a row gives alpha = 1 and adds 0: it changes no bit. */
INLINE void T(softmax_group)(const int dot, const Params *p, Task *t, ix r0, ix n, ix block) {
    const VEC c = V(set1)((REAL)p->c);
    REAL *s = P_(s), *row_max = P_(row_max) + r0, *alpha = P_(alpha), *peaks = P_(peaks), shift[DIRECT_ROWS];
    double total[DIRECT_ROWS];
    for (ix r = 0; r < n; r++) {
        REAL top = V(largest)(V(load)(peaks + r * LANES)), new = top > row_max[r] ? top : row_max[r];
        alpha[r] = row_max[r] == new ? 0 : row_max[r] - new;
        row_max[r] = new;
        shift[r] = new == -INFINITY ? 0 : new;
        if (p->keep) P_(block_max)[block * p->block_q + r0 + r] = new;
    }
    for (ix r = 0; r < n; r += LANES) V(store)(alpha + r, V(exp2)(V(load)(alpha + r) * c));
    for (ix r = 0, m; r < n; r += m) {
        m = least(GROUP_ROWS, n - r);
#define ROWS(rows) T(powers)(dot, rows, s + r * p->width, t->halves + r * p->width, p->width, t->from, t->to, shift + r, c, total + r)
        ROW_CASES(m, ROWS)
#undef ROWS
    }
    for (ix r = 0; r < n; r++) t->row_sum[r0 + r] = t->row_sum[r0 + r] * alpha[r] + total[r];
}

/* ----------------------------------------------------------------------------------------------------- values */

/* o = o * alpha + weights @ values for rows x vectors. The rescaling is one fma where the sums are stored; as their start
 * value it would cost the same, but every addition would round at the size of all blocks before instead of this one. */
INLINE void T(values_tile)(const int dot, const int rows, const int vectors, const REAL *const *w, const REAL *v, ix v_stride,
                           ix keys, const REAL *alpha, REAL *o, ix o_stride) {
    VEC sum[GROUP_ROWS][TILE_VECTORS];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int i = 0; i < vectors; i++) sum[r][i] = V(set1)(0);
    for (ix j = 0; j < keys; j++, v += v_stride) {
        VEC value[TILE_VECTORS];
        UNROLL for (int i = 0; i < vectors; i++) value[i] = V(loadu)(v + i * LANES);
        UNROLL for (int r = 0; r < rows; r++) {
            VEC x = V(set1)(w[r][j]);
            UNROLL for (int i = 0; i < vectors; i++) sum[r][i] = PRODUCT(dot, x, value[i], sum[r][i]);
        }
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int i = 0; i < vectors; i++) {
            REAL *x = o + r * o_stride + i * LANES;
            V(store)(x, V(fma)(V(set1)(alpha[r]), V(load)(x), sum[r][i]));
        }
}

/* With `dot`, a step is a pair of keys; where the part begins or ends inside one, its other key has the weight 0. */
INLINE void T(values_rows)(const int dot, const int rows, const Params *p, const Task *t, const REAL *const *w, REAL *o,
                           const REAL *values, ix keys_in_block) {
    ix chunks = T(chunks)(p), first = dot ? t->column / 2 : t->column, steps = (dot ? ceil_div(t->columns, 2) : t->columns) - first;
    ix steps_in_block = dot ? ceil_div(keys_in_block, 2) : keys_in_block;
    const REAL *w_rows[GROUP_ROWS];
    UNROLL for (int r = 0; r < rows; r++) w_rows[r] = w[r] + first;
    for (ix c = 0; c < chunks; c++) {
        ix from = T(chunk_start)(p, c), vectors = T(chunk_start)(p, c + 1) - from;
        const REAL *v = values + from * LANES * steps_in_block + first * vectors * LANES;
#define TILE(vectors) T(values_tile)(dot, rows, vectors, w_rows, v, vectors * LANES, steps, P_(alpha), \
                                              o + from * LANES, p->value_stride)
        VECTOR_CASES(TILE)
#undef TILE
    }
}

/* Values kept apart: weight times value, key by key, in columns start .. stop, for those of rows from .. n of the group r0
 * that may see the key. Large ones are summed apart and scaled, so that they can not overflow before the division by the row sum. */
static void T(add_apart)(const Params *p, Task *t, ix r0, ix from, ix n, ix block, const int32_t *apart, ix n_apart,
                         ix start, ix stop) {
    ix first = block * p->block_k;
    if (!n_apart) return;
    if (!t->uses_apart) memset(t->apart_o, 0, t->rows * p->value_stride * sizeof(REAL));
    t->uses_apart = 1;
    for (ix k = 0; k < n_apart; k++) {
        ix j = apart[k];
        if (j < t->column || j >= t->columns) continue;
        T(load_value)(p, t, first + j, start, stop - start, t->line);
        for (ix r = r0 + from; r < r0 + n; r++) {
            if (first + j < t->row[r].start || first + j >= t->row[r].stop) continue;
            if (t->choose && !t->allow[(r - r0) * p->width + j]) continue;
            if (p->bias.data) {
                const REAL *b = t->bias_row[r - r0];
                if (b[j - most(t->row[r].start - first, t->column)] == -INFINITY) continue;
            }
            REAL w = P_(s)[(r - r0) * p->width + j], *o = P_(o) + r * p->value_stride, *big = P_(apart_o) + r * p->value_stride;
            for (ix i = start; i < stop; i++) {
                REAL v = ((const REAL *)t->line)[i - start];
                if (FABS(v) < APART) o[i] += w * v;
                else big[i] += w * (v * APART_SCALE);
            }
        }
    }
}

static void T(rescale_apart)(const Params *p, Task *t, ix r0, ix n) {
    if (t->uses_apart)
        for (ix r = 0; r < n; r++)
            for (ix i = 0; i < p->value_stride; i++) P_(apart_o)[(r0 + r) * p->value_stride + i] *= P_(alpha)[r];
}

/* o of a group += w[row][column] @ values over the part in hand. */
INLINE void T(add_values)(const int dot, const Params *p, const Task *t, ix r0, ix n, ix block, const REAL *const *w,
                          const REAL *values) {
    REAL *o = P_(o) + r0 * p->value_stride;
    ix keys_in_block = least(p->block_k, t->lengths.kv_length - block * p->block_k);
#define ROWS(rows) T(values_rows)(dot, rows, p, t, w, o, values, keys_in_block)
    ROW_CASES(n, ROWS)
#undef ROWS
}

/* One copy of it for both who multiply REAL: 13 KB of code a type and set. */
static __attribute__((noinline)) void T(add_real_values)(const Params *p, const Task *t, ix r0, ix n, ix block, const REAL *const *w,
                                                         const REAL *values) {
    T(add_values)(0, p, t, r0, n, block, w, values);
}

INLINE void T(values_group)(const int dot, const Params *p, Task *t, ix r0, ix n, ix block, Packed kv) {
    const REAL *w[GROUP_ROWS];
    for (ix r = 0; r < n; r++) w[r] = dot ? (const REAL *)t->halves + r * (p->width / 2) : P_(s) + r * p->width;
    T(rescale_apart)(p, t, r0, n);
    if (dot) T(add_values)(1, p, t, r0, n, block, w, kv.values);
    else T(add_real_values)(p, t, r0, n, block, w, kv.values);
    T(add_apart)(p, t, r0, 0, n, block, kv.apart, *kv.n_apart, 0, p->value_dim);
}

/* The steps as the table has them: products of REAL; dot.h has those of bfloat16 pairs. */
static void T(begin)(const Params *p, Task *t) { T(begin_rows)(0, p, t); }
static void T(scores)(const Params *p, Task *t, ix r0, ix n, Packed kv) { T(scores_group)(0, p, t, r0, n, kv); }
static void T(softmax)(const Params *p, Task *t, ix r0, ix n, ix block) { T(softmax_group)(0, p, t, r0, n, block); }
static void T(values)(const Params *p, Task *t, ix r0, ix n, ix block, Packed kv) { T(values_group)(0, p, t, r0, n, block, kv); }
