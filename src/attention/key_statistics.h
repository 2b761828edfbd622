/* key_statistics.h (template over REAL; after attention/row_norms.h): statistics of keys: sums over rows whose norm is
 * known, in float64 and in the order of the rows. */

STEP void T(begin_key_statistics)(const Params *p, Task *t) {
    const KeyRequest *w = &p->key_request;
    memset(t->stats.mass, 0, p->width * sizeof(double));
    memset(t->stats.bin, 0, p->width * sizeof(double));
    memset(t->stats.visible, 0, p->width * sizeof(double));
    memset(t->stats.hits, 0, p->width * sizeof(int64_t));
    memset(t->stats.largest, 0, p->width * sizeof(REAL));
    memset(t->stats.products, 0, p->width * w->columns * sizeof(double));
}

/* Turns scores into weights under the norm, in place; adds their sum over rows, times `factor`, to part (`first`: sets
 * part), and their maximum to top. With `given`, weights may be above 1. */
INLINE void T(weights_of_keys)(const int rows, const int given, const int first, REAL *s, ix stride, ix from, ix to,
                               const REAL *shift, VEC c, const REAL *inverse, const REAL *factor,
                               REAL *part, REAL *top) {
    for (ix j = from; j < to; j += LANES) {
        VEC sum = first ? V(set1)(0) : V(load)(part + j), peak = V(load)(top + j);
        UNROLL for (int r = 0; r < rows; r++) {
            VEC power = (V(load)(s + r * stride + j) - V(set1)(shift[r])) * c;
            VEC x = (given ? V(exp2_any)(power) : V(exp2)(power)) * V(set1)(inverse[r]);
            V(store)(s + r * stride + j, x);
            sum = V(fma)(x, V(set1)(factor[r]), sum);
            peak = V(max)(x, peak);              /* keeps a NaN of an earlier row */
        }
        V(store)(part + j, sum);
        V(store)(top + j, peak);
    }
}

/* Adds weights of the part times the factors of their rows to the sums of each key. */
static void T(add_products)(const Params *p, Task *t, ix r0, ix n) {
    const KeyRequest *w = &p->key_request;
    const ix width = p->width, columns = w->columns, from = t->column, to = t->column_stop;
    const REAL *x[GROUP_ROWS], *s = P_(s);
    for (ix r = 0; r < GROUP_ROWS; r++)
        x[r] = (const REAL *)w->factors + row_index(p, t, r0 + (r < n ? r : 0)) * columns;
    for (ix c = 0; c < columns; c++) {
        double *restrict sum = t->stats.products + c * width;
        REAL *restrict part = t->stats.part;
        for (ix j = from; j < to; j++) part[j] = 0;
        for (ix r = 0; r < n; r++) {
            const REAL f = x[r][c], *restrict row = s + r * width;
            if (w->nonfinite_factors) for (ix j = from; j < to; j++) part[j] += row[j] != 0 ? row[j] * f : 0;
            else for (ix j = from; j < to; j++) part[j] += row[j] * f;
        }
        for (ix j = from; j < to; j++) sum[j] += part[j];
    }
}

/* Closes a bin of rows: adds what each key of the block received to its bin of keys. */
STEP void T(close_bin)(const Params *p, Task *t, ix block) {
    const KeyRequest *w = &p->key_request;
    const int64_t *slot = w->slot + block * p->block_k;
    ix n = ix_min(p->block_k, p->kv_len - block * p->block_k);
    double *bins, *from = t->stats.bin;
    if (t->stats.row_bin < 0) return;
    bins = t->stats.bins + t->stats.row_bin * t->stats.slots;
    for (ix j = 0; j < n; j++) {
        if (slot[j] < 0) continue;
        double *x = bins + slot[j];
        if (!w->map_max) *x += from[j];
        else if (!(from[j] <= *x) && *x == *x) *x = from[j];
    }
    memset(from, 0, p->width * sizeof(double));
}

/* Adds the weights of a group of rows, whose sum is in `part`, to the bins of its rows. */
static void T(fill_bins)(const Params *p, Task *t, ix r0, ix n, ix block, const REAL *part) {
    const KeyRequest *w = &p->key_request;
    const int64_t *bin = w->row_bin + t->first + r0;
    double *restrict sum = t->stats.bin;
    for (ix r = 0, end; r < n; r = end) {
        for (end = r + 1; end < n && bin[end] == bin[r]; end++);
        if (bin[r] != t->stats.row_bin) T(close_bin)(p, t, block);
        t->stats.row_bin = bin[r];
        if (!w->map_max && end - r == n) {
            for (ix j = t->column; j < t->column_stop; j++) sum[j] += part[j];
            continue;
        }
        for (ix i = r; i < end; i++) {
            const REAL *restrict s = P_(s) + i * p->width;
            if (!w->map_max) for (ix j = t->column; j < t->column_stop; j++) sum[j] += s[j];
            else for (ix j = t->column; j < t->column_stop; j++)
                sum[j] = s[j] <= sum[j] || sum[j] != sum[j] ? sum[j] : s[j];
        }
    }
}

/* Adds the weights of a group of rows, from its scores of a block, to the statistics of the block's keys. */
STEP void T(add_key_statistics)(const Params *p, Task *t, ix r0, ix n, ix block) {
    const KeyRequest *w = &p->key_request;
    const ix width = p->width, from = t->from, to = t->to;
    REAL *s = P_(s), *part = t->stats.part, *top = t->stats.largest;
    REAL shift[GROUP_ROWS], inverse[GROUP_ROWS], factor[GROUP_ROWS];
    int nan[GROUP_ROWS];
    for (ix r = 0; r < n; r++) {
        REAL *row = s + r * width;
        shift[r] = P_(final_max)[r0 + r];
        inverse[r] = (REAL)t->inverse[r0 + r];
        nan[r] = inverse[r] != inverse[r];                   /* a NaN row, whose weights are NaN where it sees a key */
        factor[r] = w->row_weights ? ((const REAL *)w->row_weights)[row_index(p, t, r0 + r)] : 1;
        int empty = shift[r] == -INFINITY && !nan[r];
        if (w->visible && !empty)
            for (ix j = t->column; j < t->column_stop; j++) t->stats.visible[j] += row[j] == -INFINITY ? 0 : factor[r];
        if (!nan[r] && !empty) continue;
        for (ix j = from; j < to; j++) {
            t->stats.nan[r * width + j] = row[j] != -INFINITY;
            row[j] = -INFINITY;
        }
        shift[r] = inverse[r] = 0;
    }
    const VEC c = V(set1)((REAL)p->exponent);
#define ROWS(rows) T(weights_of_keys)(rows, 0, 1, s, width, from, to, shift, c, inverse, factor, part, top)
    if (!w->given) { ROW_CASES(n, ROWS) }
#undef ROWS
    for (ix r = 0; w->given && r < n; r++)                   /* row by row: less code for a rare case, equal sums */
        T(weights_of_keys)(1, 1, r == 0, s + r * width, width, from, to, shift + r, c,
                           inverse + r, factor + r, part, top);
    for (ix r = 0; r < n; r++)
        for (ix j = t->column; nan[r] && j < t->column_stop; j++) {
            if (!t->stats.nan[r * width + j]) continue;
            s[r * width + j] = top[j] = NAN;
            if (factor[r] != 0) part[j] = NAN;
        }
    double *restrict mass = t->stats.mass;
    if (w->mass) for (ix j = t->column; j < t->column_stop; j++) mass[j] += part[j];
    if (w->map) T(fill_bins)(p, t, r0, n, block, part);
    if (w->hits)
        for (ix r = 0; r < n; r++)
            for (ix j = t->column; j < t->column_stop; j++) t->stats.hits[j] += s[r * width + j] > (REAL)w->threshold;
    if (w->products) T(add_products)(p, t, r0, n);
}

/* Writes the statistics of a block's keys, after all rows of a query head. */
STEP void T(write_key_statistics)(const Params *p, Task *t, ix head, ix block) {
    const KeyRequest *w = &p->key_request;
    ix first = block * p->block_k, n = ix_min(p->block_k, p->kv_len - first);
    ix at = (t->batch * p->q_heads + head) * p->kv_len + first;
    for (ix j = 0; j < n; j++) {
        if (w->mass) ((REAL *)w->mass)[at + j] = (REAL)t->stats.mass[j];
        if (w->visible) ((REAL *)w->visible)[at + j] = (REAL)t->stats.visible[j];
        if (w->max) ((REAL *)w->max)[at + j] = ((REAL *)t->stats.largest)[j];
        if (w->hits) w->hits[at + j] = t->stats.hits[j];
        for (ix c = 0; c < w->columns; c++)
            ((REAL *)w->products)[(at + j) * w->columns + c] = (REAL)t->stats.products[c * p->width + j];
    }
}

/* Writes row `bin` of the map of query head `head` from its partial maps, in the order of chunks. */
STEP void T(merge_bins)(const Params *p, Task *t, const double *parts, ix chunks, ix head, ix bin) {
    const KeyRequest *w = &p->key_request;
    double *sum = t->stats.merged;
    memset(sum, 0, w->key_bins * sizeof(double));
    for (ix chunk = 0; chunk < chunks; chunk++) {
        ix first = w->slot_start[chunk], n = w->slot_start[chunk + 1] - first;
        const double *part = parts + first * w->row_bins + bin * n;
        for (ix i = 0; i < n; i++) {
            double *x = sum + w->slot_bin[first + i];
            if (!w->map_max) *x += part[i];
            else if (!(part[i] <= *x) && *x == *x) *x = part[i];
        }
    }
    double rows = w->map_max || w->bin_rows[bin] == 0 ? 1 : w->bin_rows[bin];
    REAL *map = (REAL *)w->map + (head * w->row_bins + bin) * w->key_bins;
    for (ix k = 0; k < w->key_bins; k++) map[k] = (REAL)(sum[k] / rows);
}
