/* row_statistics.h (template over REAL; after attention/epilogue.h): statistics of rows, taken from a block's scores
 * and weights beside the softmax. */

/* Least log2 of a weight: finite, so that 0 log 0 is 0, and so small that exp2 of it is 0 in any type. */
enum { T(MIN_POWER) = -(1 << 14) };

/* -------------------------------------------------------------------------------------------- the largest scores */

INLINE int T(worse)(REAL a, int32_t i, REAL b, int32_t j) { return a < b || (a == b && i > j); }

/* Sifts a score down from the root of the heap, which holds the worst score. */
static void T(sift)(REAL *s, int32_t *keys, ix n, REAL x, int32_t key) {
    ix at = 0, child;
    while ((child = 2 * at + 1) < n) {
        child += child + 1 < n && T(worse)(s[child + 1], keys[child + 1], s[child], keys[child]);
        if (!T(worse)(s[child], keys[child], x, key)) break;
        s[at] = s[child];
        keys[at] = keys[child];
        at = child;
    }
    s[at] = x;
    keys[at] = key;
}

/* A number below the k largest scores of the first part that a row sees: k lanes have a maximum above it. */
INLINE REAL T(first_limit)(VEC peaks, ix k) {
    REAL least = INFINITY;
    if (k > LANES) return -INFINITY;
    for (ix i = 0; i < LANES; i++)
        if (__builtin_popcount(V(above)(peaks, V(set1)(peaks[i]))) < k && peaks[i] < least) least = peaks[i];
    return sizeof(REAL) == 4 ? least - FABS(least) * FLT_EPSILON - FLT_TRUE_MIN
                             : least - FABS(least) * (REAL)DBL_EPSILON - (REAL)DBL_TRUE_MIN;
}

/* Replaces the worst score of a row's heap by each larger one; equal scores, which come later, and NaN do not enter. */
static void T(take_top)(const Params *p, Task *t, ix r, const REAL *s, VEC peaks, ix first) {
    const ix k = p->row_request.k;
    REAL *heap = (REAL *)t->stats.heap + r * k, limit = heap[0];
    int32_t *keys = t->stats.heap_keys + r * k;
    if (!(V(largest)(peaks) > limit)) return;
    if (limit == -INFINITY) limit = T(first_limit)(peaks, k);    /* of 512 scores, 11 enter for k = 8, not 41 */
    for (ix j = t->from; j < t->to; j += LANES) {
        if (heap[0] > limit) limit = heap[0];
        unsigned bits = V(above)(V(load)(s + j), V(set1)(limit));
        for (; bits; bits &= bits - 1) {
            ix i = j + __builtin_ctz(bits);
            if (s[i] > heap[0]) T(sift)(heap, keys, k, s[i], (int32_t)(first + i));
        }
    }
}

/* -------------------------------------------------------------------------------------------------- beside softmax */

STEP void T(begin_row_statistics)(const Params *p, Task *t) {
    const RowRequest *w = &p->row_request;
    for (ix r = 0; r < t->rows && w->sums; r++) t->stats.surprise[r] = t->stats.position[r] = t->stats.distance[r] = 0;
    for (ix i = 0; i < t->rows * w->k; i++) {
        ((REAL *)t->stats.heap)[i] = -INFINITY;
        t->stats.heap_keys[i] = INT32_MAX;
    }
}

/* Saves what the softmax overwrites: the scores, and the state of the rows. */
STEP void T(add_scores_to_statistics)(const Params *p, Task *t, ix r0, ix n, ix block) {
    const RowRequest *w = &p->row_request;
    for (ix r = 0; r < n && w->k; r++)
        T(take_top)(p, t, r0 + r, P_(s) + r * p->width, V(load)(P_(peaks) + r * LANES), block * p->block_k);
    if (!w->sums) return;
    for (ix r = 0; r < n; r++) {
        t->stats.sum_before[r] = t->row_sum[r0 + r];
        t->stats.max_before[r] = P_(row_max)[r0 + r];
        if (w->entropy)
            memcpy((REAL *)t->stats.scores + r * p->width + t->from, P_(s) + r * p->width + t->from,
                   (t->to - t->from) * sizeof(REAL));
    }
}

/* Sums weight x log2 weight over a part, both relative to the row maximum. */
INLINE void T(surprises)(const int rows, const REAL *w, const REAL *s, ix stride, ix from, ix to, const REAL *shift,
                         VEC c, double *total) {
    VEC sum[GROUP_ROWS];
    UNROLL for (int r = 0; r < rows; r++) sum[r] = V(set1)(0);
    for (ix j = from; j < to; j += LANES)
        UNROLL for (int r = 0; r < rows; r++) {
            VEC power = V(max)((V(load)(s + r * stride + j) - V(set1)(shift[r])) * c, V(set1)(T(MIN_POWER)));
            sum[r] = V(fma)(V(load)(w + r * stride + j), power, sum[r]);
        }
    UNROLL for (int r = 0; r < rows; r++) total[r] = V(sum)(sum[r]);
}

/* Sums weight, weight x column, and weight x distance from column `own` over a part. */
static void T(moments)(const REAL *w, ix from, ix to, REAL own, double *sums) {
    REAL lanes[LANES];
    for (ix i = 0; i < LANES; i++) lanes[i] = (REAL)i;
    VEC weight = V(set1)(0), place = weight, distance = weight;
    for (ix j = from; j < to; j += LANES) {
        VEC x = V(load)(w + j), at = V(loadu)(lanes) + V(set1)((REAL)j), away = at - V(set1)(own);
        weight += x;
        place = V(fma)(x, at, place);
        distance = V(fma)(x, (VEC)((VINT)away & MAGNITUDE), distance);
    }
    sums[0] = V(sum)(weight);
    sums[1] = V(sum)(place);
    sums[2] = V(sum)(distance);
}

/* moments() of k_positions instead of columns, in double because positions may be far apart. */
static void T(moments_by_position)(const Params *p, const Task *t, const REAL *w, ix first, ix own, double *sums) {
    sums[0] = sums[1] = sums[2] = 0;
    for (ix j = t->column; j < t->column_stop; j++) {
        const double at = (double)position_of(p, t, first + j);
        sums[1] += (double)w[j] * at;
        sums[2] += (double)w[j] * fabs((double)own - at);
    }
}

/* Adds a part after its softmax: older sums are rescaled, and shifted, to the new row maximum. */
STEP void T(add_weights_to_statistics)(const Params *p, Task *t, ix r0, ix n, ix block) {
    const RowRequest *w = &p->row_request;
    const REAL *alpha = P_(alpha);
    ix first = block * p->block_k;
    if (!w->sums) return;
    if (w->entropy) {
        REAL shift[GROUP_ROWS];
        double total[GROUP_ROWS];
        for (ix r = 0; r < n; r++) shift[r] = P_(row_max)[r0 + r] == -INFINITY ? 0 : P_(row_max)[r0 + r];
#define ROWS(rows) \
    T(surprises)(rows, P_(s), t->stats.scores, p->width, t->from, t->to, shift, V(set1)((REAL)p->exponent), total)
        ROW_CASES(n, ROWS)
#undef ROWS
        for (ix r = 0; r < n; r++) {
            double *sum = t->stats.surprise + r0 + r,
                step = (t->stats.max_before[r] - (double)P_(row_max)[r0 + r]) * p->exponent;
            /* avoids 0 * inf */
            if (t->stats.sum_before[r] != 0)
                *sum = alpha[r] == 0 ? 0 : alpha[r] * (*sum + t->stats.sum_before[r] * step);
            *sum += total[r];
        }
    }
    if (!w->position && !w->distance) return;
    for (ix r = 0; r < n; r++) {
        double sums[3];
        const ix own = saturating_add(t->row[r0 + r].position, t->lengths.offset);
        if (t->k_positions) T(moments_by_position)(p, t, P_(s) + r * p->width, first, own, sums);
        else T(moments)(P_(s) + r * p->width, t->from, t->to, (REAL)((double)own - (double)first), sums);
        t->stats.position[r0 + r] = alpha[r] * t->stats.position[r0 + r] + (sums[1] + (double)first * sums[0]);
        t->stats.distance[r0 + r] = alpha[r] * t->stats.distance[r0 + r] + sums[2];
    }
}

/* ---------------------------------------------------------------------------------------------------------- results */

/* Writes the heap in descending order, its scores as weights. */
static void T(store_top)(const Params *p, Task *t, ix r, REAL top, REAL inverse, int empty) {
    const ix k = p->row_request.k, at = row_index(p, t, r) * k;
    REAL *heap = (REAL *)t->stats.heap + r * k, *out = (REAL *)p->row_request.top + at;
    int32_t *keys = t->stats.heap_keys + r * k;
    int64_t *out_keys = p->row_request.top_keys + at;
    for (ix n = k - 1; n >= 0; n--) {                     /* the worst of those left goes to the end */
        REAL x = heap[n];
        int32_t key = keys[n];
        heap[n] = heap[0];
        keys[n] = keys[0];
        T(sift)(heap, keys, n, x, key);
    }
    for (ix i = 0; i < k; i++) {
        int found = keys[i] != INT32_MAX && inverse == inverse && !empty;
        out[i] = found ? V(exp2_one)((heap[i] - top) * (REAL)p->exponent) * inverse : inverse == inverse ? 0 : inverse;
        out_keys[i] = found ? keys[i] : -1;
    }
}

/* Writes statistics of rows that have seen all their keys; before write_rows(), which replaces the row sums. */
STEP void T(write_row_statistics)(const Params *p, Task *t, ix r0, ix n) {
    const RowRequest *w = &p->row_request;
    for (ix r = r0; r < r0 + n; r++) {
        const ix i = row_index(p, t, r);
        const double top = (double)P_(row_max)[r] * p->unit, own = t->row_sum[r];
        double lse = 0, sum = T(close_row)(p, t, r, &lse), inverse = own == 0 ? 0 : 1 / sum;
        double rest = log(sum);          /* lse - top, without the cancellation of a large top */
        if (w->given) {
            double given = ((const REAL *)w->given)[i];
            rest = given - top;
            inverse = own == 0 || given == -INFINITY ? 0 : own == own ? exp(-rest) : own;
        }
        const int empty = own == 0 || (w->given && inverse == 0);
        if (w->norm) w->norm[2 * i] = P_(row_max)[r], w->norm[2 * i + 1] = inverse;
        if (w->max) ((REAL *)w->max)[i] = (REAL)inverse;
        if (w->top) T(store_top)(p, t, r, P_(row_max)[r], (REAL)inverse, empty);
        if (w->position) ((REAL *)w->position)[i] = empty ? -1 : (REAL)(t->stats.position[r] * inverse);
        if (w->distance) ((REAL *)w->distance)[i] = empty ? 0 : (REAL)(t->stats.distance[r] * inverse);
        if (!w->entropy) continue;
        double entropy = inverse == 0 ? 0 : inverse * (own * rest - t->stats.surprise[r] * (p->unit / p->exponent));
        if (p->sinks.data) {                                 /* the sink counts as one more key */
            REAL sink;
            memcpy(&sink, p->sinks.data + t->row[r].head * p->sinks.head, sizeof sink);
            double gap = sink - top, surprise = gap > 0 ? log1p(own * exp(-gap)) : rest - gap;
            double share = sink == -INFINITY ? 0 : exp(-surprise);
            if (share != 0) entropy += share * surprise;
        }
        ((REAL *)w->entropy)[i] = empty || entropy < 0 ? 0 : (REAL)entropy;
    }
}
