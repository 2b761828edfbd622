/* results.h (template over REAL): from the running state of a task to what the caller gets: output, lse, weights, scores;
 * and the merging of states that saw different keys. */

/* ------------------------------------------------------------------------------------ output, lse, statistics */

/* The row sum with the sink logit in it, and (if wanted) the lse; both from the maximum in natural units. */
static double T(close_row)(const Params *p, const Task *t, ix r, double *lse) {
    double top = (double)P_(row_max)[r] * p->unit, sum = t->row_sum[r];
    int alive = t->row[r].position < t->lengths.q_length;
    if (p->lse.data) *lse = sum == 0 ? -INFINITY : top + log(sum);
    if (!p->sinks.data || !alive) return sum;
    REAL logit;
    memcpy(&logit, p->sinks.data + t->row[r].head * p->sinks.head, sizeof logit);
    if (logit == -INFINITY) return sum;
    double sink = logit;
    if (sum == 0) {
        *lse = sink;
        return 0;
    }
    double larger = sink > top ? sink : top, share = top == larger ? 1 : exp(top - larger);   /* 1 where the scale gave inf */
    double total = sum * share + exp(sink - larger);
    *lse = larger + log(total);
    return top == larger ? total : total * exp(larger - top);
}

INLINE char *T(row_pointer)(const Task *t, const Array *a, char *batch, ix r) {
    return batch + t->row[r].position * a->row + t->row[r].head * a->head;
}

/* Whether the rows of the output are whole vectors of REAL, which can be written in place. */
INLINE int T(whole_out)(const Params *p) {
    return p->out.dtype == NATIVE && p->out.col == (ix)sizeof(REAL) && p->value_dim == p->value_stride;
}

static void T(finish)(const Params *p, Task *t, ix r0, ix n) {
    for (ix r = r0; r < r0 + n; r++) {
        if (p->q_starts.data && t->row[r].position >= t->lengths.q_length) continue;
        double lse, sum = T(close_row)(p, t, r, &lse);
        double inverse = sum == 0 ? 0 : 1 / sum;
        t->row_sum[r] = inverse;
        if (p->lse.data) {
            REAL x = (REAL)lse;
            memcpy(T(row_pointer)(t, &p->lse, t->lse, r), &x, sizeof x);
        }
        if (!p->out.data || !p->value_dim) continue;
        REAL *o = P_(o) + r * p->value_stride, *big = P_(apart_o) + r * p->value_stride, f = (REAL)inverse;
        /* + 0: a sum that underflowed to -0 becomes 0, so that keys which add nothing can not turn its sign */
        char *dst = T(row_pointer)(t, &p->out, t->out, r);
        for (ix i = 0; i < p->value_dim * (ix)sizeof(REAL); i += 64) __builtin_prefetch(dst + GROUP_ROWS * p->out.row + i, 1);
        REAL *x = T(whole_out)(p) && !t->uses_apart ? (REAL *)dst : o;
        if (sum == 0) memset(x, 0, p->value_stride * sizeof(REAL));
        else if (t->uses_apart) for (ix i = 0; i < p->value_stride; i++) o[i] = o[i] * f + (big[i] * f) * (1 / APART_SCALE);
        else for (ix i = 0; i < p->value_stride; i += LANES) V(storeu)(x + i, V(load)(o + i) * V(set1)(f) + V(set1)(0));
        if (x == o) T(store_row)(o, p->value_dim, dst, p->out.col, p->out.dtype);
    }
}

/* ------------------------------------------------------------------------------------------ weights and scores */

/* One row's part of a block, times factor, with `fill` at the block's places outside the part. */
INLINE void T(store_part)(const Params *p, const Task *t, const Array *a, char *batch, ix r, ix block, const REAL *s, REAL factor,
                          REAL fill) {
    ix first = block * p->block_k, n = least(p->block_k, p->kv_len - first), j = 0;
    char *dst = T(row_pointer)(t, a, batch, r) + first * a->col;
    REAL *x = a->dtype == NATIVE && a->col == (ix)sizeof(REAL) && (uintptr_t)dst % sizeof(REAL) == 0 ? (REAL *)dst : (REAL *)t->line;
    for (; j < t->column; j++) x[j] = fill;
    if (j + LANES <= t->columns) {             /* one store up to a boundary of the vector size, the others lie on it */
        V(storeu)(x + j, V(loadu)(s + j) * V(set1)(factor));
        j += LANES - (ix)((uintptr_t)(x + j) / sizeof(REAL) % LANES);
    }
    for (; j + LANES <= t->columns; j += LANES) V(store)(x + j, V(loadu)(s + j) * V(set1)(factor));
    for (; j < t->columns; j++) x[j] = s[j] * factor;
    for (; j < n; j++) x[j] = fill;
    if (x == (REAL *)t->line) T(store_row)(x, n, dst, a->col, a->dtype);
}

/* Weights of a block from weights relative to the row maximum of that moment, when the last one and the sum are known. */
INLINE void T(store_relative)(const Params *p, Task *t, ix r0, ix n, ix block, const REAL *then, const REAL *now,
                              const double *inverses) {
    REAL *factors = P_(alpha);
    for (ix r = 0; r < n; r += LANES) {
        VEC a = V(loadu)(then + r), b = V(loadu)(now + r);
        VEC gap = (VEC)((VINT)(a - b) & ~(a == b));      /* 0 also for -inf - -inf */
        V(store)(factors + r, V(exp2)(gap * V(set1)((REAL)p->c)));
    }
    for (ix r = 0; r < n; r++) {
        REAL inverse = (REAL)inverses[r], factor = factors[r] * inverse;
        T(store_part)(p, t, &p->weights, t->weights, r0 + r, block, P_(s) + r * p->width, factor, inverse - inverse);
    }
}

static void T(store_kept)(const Params *p, Task *t, ix r0, ix n, ix block) {
    T(store_relative)(p, t, r0, n, block, P_(block_max) + block * p->block_q + r0, P_(row_max) + r0, t->row_sum + r0);
}

/* The same bits where nothing was kept: the running maximum is followed a second time. */
static void T(store_again)(const Params *p, Task *t, ix r0, ix n, ix block) {
    if (t->column < t->columns) T(softmax)(p, t, r0, n, block);
    T(store_relative)(p, t, r0, n, block, P_(row_max) + r0, P_(final_max) + r0, t->inverse + r0);
}

/* 2**t of any sign, which a given lse may lead to. */
INLINE VEC T(exp2_any)(VEC t) {
    VEC magnitude = (VEC)((VINT)t & MAGNITUDE), x = V(exp2)(-magnitude);
    VINT positive = t > V(set1)(0);
    return (VEC)(((VINT)(V(set1)(1) / x) & positive) | ((VINT)x & ~positive));
}

/* Weights of a block under a given lse, which stands in final_max in the units of the stored scores. */
static void T(store_under_lse)(const Params *p, Task *t, ix r0, ix n, ix block) {
    const VEC c = V(set1)((REAL)p->c);
    const ix column = t->column, columns = t->columns;
    for (ix r = r0; r < r0 + n; r++) {
        REAL *s = P_(s) + (r - r0) * p->width, lse = P_(final_max)[r];
        t->columns = lse == -INFINITY ? column : columns;          /* a row without keys: zeros, whatever is here */
        for (ix j = t->from; column < t->columns && j < t->to; j += LANES)
            V(store)(s + j, T(exp2_any)((V(load)(s + j) - V(set1)(lse)) * c));
        T(store_part)(p, t, &p->weights, t->weights, r, block, s, (REAL)t->inverse[r], (REAL)(t->inverse[r] - t->inverse[r]));
    }
    t->columns = columns;
}

static void T(store_scores)(const Params *p, Task *t, ix r0, ix n, ix block) {
    for (ix r = r0; r < r0 + n; r++)
        T(store_part)(p, t, &p->scores, t->scores, r, block, P_(s) + (r - r0) * p->width, (REAL)p->unit, -INFINITY);
}

/* ------------------------------------------------------------------------------------------ states of few rows */

/* A state is what is known of a row after some keys: [sum of values][sum of values apart][maximum][uses apart] and the
 * row sum in double. Its place in memory: */
INLINE REAL *T(state)(const Params *p, char *states, ix r) { return (REAL *)(states + r * p->state_bytes); }
INLINE double *T(state_sum)(const Params *p, REAL *state) { return (double *)(state + 2 * p->value_stride + LANES); }

static void T(save_state)(const Params *p, Task *t, char *states) {
    ix width = p->value_stride;
    for (ix i = 0; i < t->rows * width; i++) {       /* sums so large that states of them could overflow go apart */
        REAL *o = P_(o) + i;
        if (!(FABS(*o) >= APART)) continue;
        if (!t->uses_apart) memset(t->apart_o, 0, t->rows * width * sizeof(REAL));
        t->uses_apart = 1;
        P_(apart_o)[i] += *o * APART_SCALE;
        *o = 0;
    }
    for (ix r = 0; r < t->rows; r++) {
        REAL *x = T(state)(p, states, r);
        memcpy(x, P_(o) + r * width, width * sizeof(REAL));
        if (t->uses_apart) memcpy(x + width, P_(apart_o) + r * width, width * sizeof(REAL));
        x[2 * width] = P_(row_max)[r];
        x[2 * width + 1] = t->uses_apart;
        *T(state_sum)(p, x) = t->row_sum[r];
    }
}

/* Take in the next state in key order. An empty one (maximum -inf, sum 0) changes no bit. */
static void T(merge_state)(const Params *p, Task *t, char *states) {
    ix width = p->value_stride;
    for (ix r = 0; r < t->rows; r++) {
        REAL *x = T(state)(p, states, r), old = P_(row_max)[r], other = x[2 * width], new = other > old ? other : old;
        REAL alpha = old == new ? 1 : T(exp2_one)((old - new) * (REAL)p->c);
        REAL beta = other == new ? 1 : T(exp2_one)((other - new) * (REAL)p->c);
        REAL *o = P_(o) + r * width, *big = P_(apart_o) + r * width;
        for (ix i = 0; i < width; i++) o[i] = o[i] * alpha + x[i] * beta;
        if (x[2 * width + 1] != 0 && !t->uses_apart) {
            memset(t->apart_o, 0, t->rows * width * sizeof(REAL));
            t->uses_apart = 1;
        }
        if (t->uses_apart)
            for (ix i = 0; i < width; i++) big[i] = big[i] * alpha + (x[2 * width + 1] != 0 ? x[width + i] * beta : 0);
        t->row_sum[r] = t->row_sum[r] * alpha + *T(state_sum)(p, x) * beta;
        P_(row_max)[r] = new;
    }
}

/* The two numbers by which the weights of a row are computed again: its maximum and the inverse of its sum. */
static void T(save_row_stats)(const Params *p, Task *t, double *stats) {
    for (ix r = 0; r < t->rows; r++) {
        double *x = stats + 2 * ((t->batch * p->kv_heads + t->kv_head) * p->rows + t->first + r);
        x[0] = P_(row_max)[r];
        x[1] = t->row_sum[r];
    }
}
static void T(load_row_stats)(const Params *p, Task *t, double *stats) {
    for (ix r = 0; r < t->rows; r++) {
        double *x = stats + 2 * ((t->batch * p->kv_heads + t->kv_head) * p->rows + t->first + r);
        P_(final_max)[r] = (REAL)x[0];
        t->inverse[r] = x[1];
    }
}

/* A given lse takes the place of the maximum, in the units of the stored scores; the sum is in it. A norm with an inverse
 * above 0 is more exact: it keeps maximum and sum apart. */
static void T(load_lse)(const Params *p, Task *t) {
    for (ix r = 0; r < t->rows; r++) {
        const ix i = (t->batch * p->q_heads + t->row[r].head) * p->q_len + t->row[r].position;
        const double *norm = p->key_wants.norm ? p->key_wants.norm + 2 * i : NULL;
        const int exact = norm && norm[1] > 0;
        REAL lse;
        memcpy(&lse, T(row_pointer)(t, &p->lse, t->lse, r), sizeof lse);
        P_(final_max)[r] = exact ? (REAL)norm[0] : (REAL)(lse / p->unit);
        t->inverse[r] = exact ? norm[1] : lse == lse ? 1 : lse;
    }
}

/* ------------------------------------------------------------------------------------------------ weighted sum */

/* o += given weights @ values for one block, in steps of so many keys: the weights of the next step are asked for before
 * a step is computed. 75 % of FMA peak at (512, 512) @ (512, 64); steps of 64: the same, 256: 70, 512: 65; without: 56. */
enum { T(WEIGHED_KEYS) = 128 };

static void T(prefetch_given)(const Params *p, const Task *t, ix r0, ix key) {
    __asm__ volatile("");                /* else the compiler sees a function without effect, and leaves the call out */
    for (ix r = r0; r < least(r0 + GROUP_ROWS, t->rows); r++) {
        const char *x = T(row_pointer)(t, &p->weights, t->weights, r) + key * p->weights.col;
        for (ix i = 0; i < T(WEIGHED_KEYS) * p->weights.col; i += 64) __builtin_prefetch(x + i);
    }
}

/* Rows that are contiguous REAL are read in place, others copied. Where a weight is exactly 0, the value does not matter:
 * weights of values kept apart go their own way. */
static void T(weigh)(const Params *p, Task *t, ix r0, ix n, ix block, Packed kv) {
    const Array *a = &p->weights;
    const REAL *w[GROUP_ROWS];
    ix first = block * p->block_k, stop = least(p->block_k, p->kv_len - first), n_apart = *kv.n_apart;
    t->choose = n_apart != 0;
    for (ix r = 0; r < n; r++) {
        REAL *copy = P_(s) + r * p->width;
        const char *src = T(row_pointer)(t, a, t->weights, r0 + r) + first * a->col;
        w[r] = copy;
        if (n_apart) T(load_row)(src, a->col, a->dtype, stop, copy);
        else w[r] = T(row)(src, a->col, a->dtype, stop, copy);
        P_(alpha)[r] = 1;
        t->row_sum[r0 + r] = 1;
        for (ix k = 0; k < n_apart; k++) t->allow[r * p->width + kv.apart[k]] = copy[kv.apart[k]] != 0;
    }
    t->column = 0;
    t->columns = stop;
    T(add_apart)(p, t, r0, 0, n, block, kv.apart, n_apart, 0, p->value_dim);
    for (ix r = 0; r < n; r++)
        for (ix k = 0; k < n_apart; k++) P_(s)[r * p->width + kv.apart[k]] = 0;
    for (; t->column < stop; t->column = t->columns) {
        t->columns = least(t->column + T(WEIGHED_KEYS), stop);
        if (t->columns < stop) T(prefetch_given)(p, t, r0, first + t->columns);
        else T(prefetch_given)(p, t, r0 + n, first);
        T(add_real_values)(p, t, r0, n, block, w, kv.values);
    }
}
