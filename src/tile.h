/* tile.h (template over REAL): the steps of attention on a group of up to 6 query rows and one block of keys.
 *
 * Per group and block: 6 x block_k scores are written once to L1 and read once by each step; the keys and values stream
 * from L2 (block_k * (D + Dv) * 4 bytes), one vector load of them for 6 fused multiply-adds per row tile. */

#define P_(name) ((REAL *)t->name)

/* ---------------------------------------------------------------------------------------------------- packing */

/* Keys first .. first + n of a kv head to panels [panel][depth][PANEL]. */
static void T(pack_keys)(const Params *p, const char *key, ix first, ix n, REAL *dst) {
    const Array *a = &p->key;
    ix depth = p->head_dim;
    int direct = a->dtype == NATIVE && a->col == (ix)sizeof(REAL);
    for (ix j = 0; j < n; j += LANES) {
        REAL *panel = dst + (j / PANEL) * PANEL * depth + j % PANEL;
        ix valid = least(LANES, n - j);
        for (ix d = 0; d < depth; d += LANES) {
            ix width = least(LANES, depth - d);
            VEC square[LANES];
            for (ix i = 0; i < LANES; i++) {
                const char *src = key + (first + j + i) * a->row + d * a->col;
                if (i >= valid) square[i] = V(set1)(0);
                else if (direct && width == LANES) square[i] = V(loadu)((const REAL *)src);
                else {
                    REAL line[LANES] = {0};
                    T(load_row)(src, a->col, a->dtype, width, line);
                    square[i] = V(loadu)(line);
                }
            }
            V(transpose)(square);
            for (ix i = 0; i < width; i++) V(store)(panel + (d + i) * PANEL, square[i]);
        }
    }
    /* the panel's columns behind the last vector of keys are never read: tiles are cut to whole vectors of keys */
}

/* Values to chunks of whole vectors; chunk c starts at vector p(c) = c * vectors / chunks, so widths differ by at most one. */
INLINE ix T(chunks)(const Params *p) { return ceil_div(p->value_stride / LANES, TILE_VECTORS); }
INLINE ix T(chunk_start)(const Params *p, ix c) { return c * (p->value_stride / LANES) / T(chunks)(p); }

static void T(pack_values)(const Params *p, const char *value, ix first, ix n, REAL *line, Packed kv) {
    const Array *a = &p->value;
    REAL *dst = kv.values;
    ix dim = p->value_dim, chunks = T(chunks)(p);
    int direct = a->dtype == NATIVE && a->col == (ix)sizeof(REAL) && dim % LANES == 0;
    VINT large = {0};
    for (ix j = 0; j < n; j++) {
        const REAL *row = (const REAL *)(value + (first + j) * a->row);
        if (!direct) {
            memset(line + dim / LANES * LANES, 0, dim % LANES ? LANES * sizeof(REAL) : 0);
            T(load_row)((const char *)row, a->col, a->dtype, dim, line);
            row = line;
        }
        for (ix c = 0; c < chunks; c++) {
            ix from = T(chunk_start)(p, c), width = T(chunk_start)(p, c + 1) - from;
            REAL *to = dst + from * LANES * n + j * width * LANES;
            for (ix v = 0; v < width; v++) {
                VEC x = V(loadu)(row + (from + v) * LANES);
                large |= ~((VEC)((VINT)x & MAGNITUDE) < V(set1)(APART));
                V(store)(to + v * LANES, x);
            }
        }
    }
    *kv.n_apart = 0;
    VINT none = {0};
    if (!memcmp(&large, &none, sizeof none)) return;
    for (ix j = 0; j < n; j++) {                 /* rare: find the rows and take them out of the product */
        int apart = 0;
        for (int pass = 0; pass <= apart && pass < 2; pass++) {
            for (ix c = 0; c < chunks; c++) {
                ix from = T(chunk_start)(p, c), width = T(chunk_start)(p, c + 1) - from;
                REAL *x = dst + from * LANES * n + j * width * LANES;
                for (ix i = 0; i < width * LANES; i++) {
                    if (pass) x[i] = 0;
                    else apart |= !(FABS(x[i]) < APART);
                }
            }
        }
        if (apart) kv.apart[(*kv.n_apart)++] = (int32_t)j;
    }
}

static void T(pack)(const Params *p, Task *t, ix block, Packed kv) {
    ix first = block * p->block_k, n = least(p->block_k, t->lengths.kv_length - first);
    T(pack_keys)(p, t->key, first, n, kv.keys);
    *kv.n_apart = 0;
    if (p->value_dim) T(pack_values)(p, t->value, first, n, t->line, kv);
}

/* ------------------------------------------------------------------------------------------------------ begin */

/* Load the query rows, interleaved by six, and set the running state of an empty row. */
static void T(begin)(const Params *p, Task *t) {
    const Array *a = &p->query;
    ix depth = p->head_dim;
    REAL *line = t->line;
    for (ix r = 0; r < t->rows; r++) {
        const char *src = t->query + row_position(p, t, r) * a->row + row_head(p, t, r) * a->head;
        REAL *q = P_(q) + (r / GROUP_ROWS) * GROUP_ROWS * depth + r % GROUP_ROWS;
        T(load_row)(src, a->col, a->dtype, depth, line);
        if (p->flip)
            for (ix d = 0; d < depth; d++) q[d * GROUP_ROWS] = -line[d];
        else
            for (ix d = 0; d < depth; d++) q[d * GROUP_ROWS] = line[d];
        P_(row_max)[r] = -INFINITY;
        t->row_sum[r] = 0;
    }
    memset(t->o, 0, t->rows * p->value_stride * sizeof(REAL));
    t->uses_apart = 0;
}

/* ------------------------------------------------------------------------- which places of a block a group sees */

/* mask, key_mask, bias = -inf and segments as bytes; returns whether any / all of the part's places are allowed */
static int T(allow_rows)(const Params *p, Task *t, ix r0, ix n, ix block, int *all) {
    ix first = block * p->block_k, any = 0, every = 1;
    for (ix r = r0; r < r0 + n; r++) {
        ix i = row_position(p, t, r), h = row_head(p, t, r), lo = most(t->range[r].start - first, t->column);
        ix hi = least(t->range[r].stop - first, t->columns);
        uint8_t *allow = t->allow + (r - r0) * p->block_k;
        memset(allow, 0, t->to);
        if (lo < hi) memset(allow + lo, 1, hi - lo);
        if (p->mask.data) {
            const char *m = t->mask + i * p->mask.row + h * p->mask.head + first * p->mask.col;
            for (ix j = lo; j < hi; j++) allow[j] &= m[j * p->mask.col] != 0;
        }
        if (p->key_mask.data) {
            const char *m = t->key_mask + first * p->key_mask.col;
            for (ix j = lo; j < hi; j++) allow[j] &= m[j * p->key_mask.col] != 0;
        }
        if (p->q_segments.data) {
            int64_t mine = *(const int64_t *)(t->q_segments + i * p->q_segments.row);
            const char *k = t->k_segments + first * p->k_segments.col;
            for (ix j = lo; j < hi; j++) allow[j] &= mine >= 0 && *(const int64_t *)(k + j * p->k_segments.col) == mine;
        }
        if (p->bias.data) {
            REAL *b = P_(bias_rows) + (r - r0) * p->block_k;
            if (lo < hi)
                T(load_row)(t->bias + i * p->bias.row + h * p->bias.head + (first + lo) * p->bias.col, p->bias.col,
                            p->bias.dtype, hi - lo, b + lo);
            for (ix j = lo; j < hi; j++) allow[j] &= b[j] != -INFINITY;
        }
        ix seen = 0;
        for (ix j = lo; j < hi; j++) seen += allow[j];
        any |= seen != 0;
        every &= seen == t->columns - t->column;
    }
    *all = (int)every;
    return (int)any;
}

/* Cut the block to the columns that some row of the group sees, and say what is to be masked in it. */
static int T(classify)(const Params *p, Task *t, ix r0, ix n, ix block) {
    ix first = block * p->block_k, last = least(first + p->block_k, t->lengths.kv_length);
    ix start = PTRDIFF_MAX, stop = 0, inner_start = 0, inner_stop = PTRDIFF_MAX;
    for (ix r = r0; r < r0 + n; r++) {
        inner_start = most(inner_start, t->range[r].start);
        inner_stop = least(inner_stop, t->range[r].stop);
        if (t->range[r].start == t->range[r].stop) continue;
        start = least(start, t->range[r].start);
        stop = most(stop, t->range[r].stop);
    }
    t->column = most(start, first) - first;
    t->columns = least(stop, last) - first;
    if (start >= stop || t->column >= t->columns) return SKIP;
    t->from = t->column / PANEL * PANEL;
    t->to = round_up(t->columns, LANES);
    int full = inner_start <= first + t->from && inner_stop >= first + t->to;
    t->choose = 0;
    if (p->arrays) {
        int all;
        if (!T(allow_rows)(p, t, r0, n, block, &all)) return SKIP;
        t->choose = !all;
    }
    return full && !t->choose ? FULL : PARTIAL;
}

/* ----------------------------------------------------------------------------------------------------- scores */

/* rows x vectors products of query rows with one panel of keys; the depth runs in order for every tile shape, so a
 * score has the same bits wherever its row and key fall. */
INLINE void T(scores_tile)(const int rows, const int vectors, const REAL *q, const REAL *k, ix depth, REAL *s, ix stride) {
    VEC sum[GROUP_ROWS][TILE_VECTORS];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < vectors; v++) sum[r][v] = V(set1)(0);
    for (ix d = 0; d < depth; d++, q += GROUP_ROWS, k += PANEL) {
        VEC key[TILE_VECTORS];
        UNROLL for (int v = 0; v < vectors; v++) key[v] = V(load)(k + v * LANES);
        UNROLL for (int r = 0; r < rows; r++) {
            VEC x = V(set1)(q[r]);
            UNROLL for (int v = 0; v < vectors; v++) sum[r][v] = V(fma)(x, key[v], sum[r][v]);
        }
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < vectors; v++) V(store)(s + r * stride + v * LANES, sum[r][v]);
}

/* One function per number of rows, with the vector counts inside: sizes are constants where registers are assigned. */
#if TILE_VECTORS == 4
#define VECTOR_CASES(call) switch (vectors) { case 1: call(1); break; case 2: call(2); break; case 3: call(3); break; default: call(4); }
#else
#define VECTOR_CASES(call) switch (vectors) { case 1: call(1); break; default: call(2); }
#endif
#define ROW_CASES(call) switch (n) { case 1: call(1); break; case 2: call(2); break; case 3: call(3); break; \
                                     case 4: call(4); break; case 5: call(5); break; default: call(6); }

INLINE void T(scores_rows)(const int rows, const Params *p, const Task *t, const REAL *q, const REAL *k) {
    for (ix j = t->from; j < t->to; j += PANEL) {
        REAL *s = P_(s) + j;
        ix vectors = least(PANEL, t->to - j) / LANES;
        const REAL *panel = k + j * p->head_dim;
#define TILE(vectors) T(scores_tile)(rows, vectors, q, panel, p->head_dim, s, p->block_k)
        VECTOR_CASES(TILE)
#undef TILE
    }
}

static void T(scores)(const Params *p, Task *t, ix r0, ix n, Packed kv) {
    const REAL *q = P_(q) + r0 * p->head_dim, *k = kv.keys;
#define ROWS(rows) T(scores_rows)(rows, p, t, q, k)
    ROW_CASES(ROWS)
#undef ROWS
}

/* What is not a plain product: scale, softcap, bias, alibi, in this order. */
static void T(finish_scores)(const Params *p, Task *t, ix r0, ix n, ix block) {
    const REAL cap = (REAL)p->softcap;
    for (ix r = r0; r < r0 + n; r++) {
        REAL *s = P_(s) + (r - r0) * p->block_k;
        const REAL *b = P_(bias_rows) + (r - r0) * p->block_k;
        for (ix j = t->from; j < t->to; j += LANES) {
            VEC x = V(load)(s + j) * V(set1)((REAL)p->scale);
            if (cap > 0) x = V(set1)(cap) * V(tanh)(x / V(set1)(cap));
            V(store)(s + j, x);
        }
        if (p->bias.data)
            for (ix j = t->column; j < t->columns; j++) s[j] += b[j];
        if (p->slopes.data) {
            REAL slope;
            ix position = saturating_add(row_position(p, t, r), t->lengths.offset), first = block * p->block_k;
            memcpy(&slope, p->slopes.data + batch_offset(&p->slopes, &p->batch, t->batch) + row_head(p, t, r) * p->slopes.head, sizeof slope);
            for (ix j = t->column; j < t->columns; j++) s[j] += -slope * (REAL)fabs((double)position - (double)(first + j));
        }
    }
}

/* Places that are not allowed become -inf by selection, whatever the product there is. */
static void T(mask)(const Params *p, Task *t, ix r0, ix n, ix block) {
    const VEC never = V(set1)(-INFINITY);
    ix first = block * p->block_k;
    for (ix r = r0; r < r0 + n; r++) {
        REAL *s = P_(s) + (r - r0) * p->block_k;
        const uint8_t *allow = t->allow + (r - r0) * p->block_k;
        ix lo = t->range[r].start - first, hi = t->range[r].stop - first;
        for (ix j = t->from; j < t->to; j += LANES) {
            if (t->choose) V(store)(s + j, V(keep_bytes)(V(load)(s + j), allow + j, never));
            else if (j < lo || j + LANES > hi) {
                ix skip = least(most(lo - j, 0), LANES), stop = least(most(hi - j, 0), LANES);
                unsigned bits = ((1u << stop) - 1) & ~((1u << skip) - 1);
                V(store)(s + j, V(keep_bits)(V(load)(s + j), bits, never));
            }
        }
    }
}

/* ---------------------------------------------------------------------------------------------------- softmax */

/* Scores to weights relative to the running row maximum; alpha is the factor that older sums take. A block that adds
 * nothing to a row gives alpha = 1 and adds 0: it changes no bit. */
static void T(softmax)(const Params *p, Task *t, ix r0, ix n, ix block) {
    const VEC c = V(set1)((REAL)p->c);
    for (ix r = r0; r < r0 + n; r++) {
        REAL *s = P_(s) + (r - r0) * p->block_k;
        VEC top = V(set1)(-INFINITY), top2 = top;
        ix j = t->from;
        for (; j + 2 * LANES <= t->to; j += 2 * LANES) {      /* the running maximum is second: a NaN score is passed over */
            top = V(max)(V(load)(s + j), top);
            top2 = V(max)(V(load)(s + j + LANES), top2);
        }
        if (j < t->to) top = V(max)(V(load)(s + j), top);
        REAL old = P_(row_max)[r], new = V(largest)(V(max)(top, top2));
        new = new > old ? new : old;
        const VEC shift = V(set1)(new == -INFINITY ? 0 : new);
        VEC sum = V(set1)(0), sum2 = sum;
        for (j = t->from; j + 2 * LANES <= t->to; j += 2 * LANES) {
            VEC a = V(exp2)((V(load)(s + j) - shift) * c), b = V(exp2)((V(load)(s + j + LANES) - shift) * c);
            sum += a;
            sum2 += b;
            V(store)(s + j, a);
            V(store)(s + j + LANES, b);
        }
        if (j < t->to) {
            VEC a = V(exp2)((V(load)(s + j) - shift) * c);
            sum += a;
            V(store)(s + j, a);
        }
        REAL alpha = old == new ? 1 : T(exp2_one)((old - new) * (REAL)p->c);
        P_(alpha)[r - r0] = alpha;
        P_(row_max)[r] = new;
        t->row_sum[r] = t->row_sum[r] * alpha + V(sum)(sum + sum2);
        if (p->keep) P_(block_max)[r * p->k_blocks + block] = new;
    }
}

/* ----------------------------------------------------------------------------------------------------- values */

/* o = o * alpha + weights @ values for rows x vectors: the rescaling is the start value of the sums. */
INLINE void T(values_tile)(const int rows, const int vectors, const REAL *w, ix w_stride, const REAL *v, ix keys,
                           const REAL *alpha, REAL *o, ix o_stride) {
    VEC sum[GROUP_ROWS][TILE_VECTORS];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int i = 0; i < vectors; i++) sum[r][i] = V(set1)(alpha[r]) * V(load)(o + r * o_stride + i * LANES);
    for (ix j = 0; j < keys; j++, v += vectors * LANES) {
        VEC value[TILE_VECTORS];
        UNROLL for (int i = 0; i < vectors; i++) value[i] = V(load)(v + i * LANES);
        UNROLL for (int r = 0; r < rows; r++) {
            VEC x = V(set1)(w[r * w_stride + j]);
            UNROLL for (int i = 0; i < vectors; i++) sum[r][i] = V(fma)(x, value[i], sum[r][i]);
        }
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int i = 0; i < vectors; i++) V(store)(o + r * o_stride + i * LANES, sum[r][i]);
}

INLINE void T(values_rows)(const int rows, const Params *p, const Task *t, REAL *o, const REAL *values, ix keys_in_block) {
    ix chunks = T(chunks)(p), keys = t->columns - t->column;
    const REAL *w = P_(s) + t->column;
    for (ix c = 0; c < chunks; c++) {
        ix from = T(chunk_start)(p, c), vectors = T(chunk_start)(p, c + 1) - from;
        const REAL *v = values + from * LANES * keys_in_block + t->column * vectors * LANES;
#define TILE(vectors) T(values_tile)(rows, vectors, w, p->block_k, v, keys, P_(alpha), o + from * LANES, p->value_stride)
        VECTOR_CASES(TILE)
#undef TILE
    }
}

/* Values kept apart: weight times value, key by key, only for rows that may see the key. Large ones are summed apart and
 * scaled, so that they can not overflow before the division by the row sum. */
static void T(values_apart)(const Params *p, Task *t, ix r0, ix n, ix block, Packed kv) {
    const Array *a = &p->value;
    ix first = block * p->block_k;
    if (!t->uses_apart) memset(t->apart_o, 0, t->rows * p->value_stride * sizeof(REAL));
    t->uses_apart = 1;
    for (ix k = 0; k < *kv.n_apart; k++) {
        ix j = kv.apart[k];
        if (j < t->column || j >= t->columns) continue;
        T(load_row)(t->value + (first + j) * a->row, a->col, a->dtype, p->value_dim, t->line);
        const REAL *v = t->line;
        for (ix r = r0; r < r0 + n; r++) {
            if (first + j < t->range[r].start || first + j >= t->range[r].stop) continue;
            if (t->choose && !t->allow[(r - r0) * p->block_k + j]) continue;
            REAL w = P_(s)[(r - r0) * p->block_k + j], *o = P_(o) + r * p->value_stride, *big = P_(apart_o) + r * p->value_stride;
            for (ix i = 0; i < p->value_dim; i++) {
                if (FABS(v[i]) < APART) o[i] += w * v[i];
                else big[i] += w * (v[i] * APART_SCALE);
            }
        }
    }
}

static void T(values)(const Params *p, Task *t, ix r0, ix n, ix block, Packed kv) {
    REAL *o = P_(o) + r0 * p->value_stride;
    const REAL *values = kv.values;
    ix keys_in_block = least(p->block_k, t->lengths.kv_length - block * p->block_k);
    if (t->uses_apart)
        for (ix r = 0; r < n; r++)
            for (ix i = 0; i < p->value_stride; i++) P_(apart_o)[(r0 + r) * p->value_stride + i] *= P_(alpha)[r];
#define ROWS(rows) T(values_rows)(rows, p, t, o, values, keys_in_block)
    ROW_CASES(ROWS)
#undef ROWS
    if (*kv.n_apart) T(values_apart)(p, t, r0, n, block, kv);
}
