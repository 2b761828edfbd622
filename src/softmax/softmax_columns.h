/* softmax_columns.h (template over REAL; after softmax/softmax_rows.h): the softmax along a strided axis, where the
 * last axis is contiguous.
 *
 * The lanes of a vector are neighbouring softmax rows, called columns here because their elements lie below each other
 * in memory; up to MAX_COLUMN_VECTORS vectors are computed at a time. A row has the same bits as in softmax_rows.h. */

#define MAX_COLUMNS (MAX_COLUMN_VECTORS * LANES)
#define PREFETCH_ROWS 8  /* distance of prefetches: each line of columns is on a page of its own */

/* A group of neighbouring columns; `kept` has their elements, then exponentials, as [element][column]. */
typedef struct {
    const char *x, *where;
    char *out;
    ix columns, vectors;
    REAL *kept;
    REAL peak[MAX_COLUMNS], top[MAX_COLUMNS];
    double sum[MAX_COLUMNS], low[MAX_COLUMNS];
} T(Columns);

/* v where element i of a column is included, else `other`. */
INLINE VEC T(keep_where)(const RowOp *op, const T(Columns) *s, ix i, ix g, ix valid, VEC v, REAL other) {
    const char *where = s->where + i * op->where.col + g * LANES * op->where.row;
    uint8_t bytes[16] = {0};
    for (ix j = 0; j < valid; j++) bytes[j] = (uint8_t)where[j * op->where.row];
    return V(keep_bytes)(v, bytes, V(set1)(other));
}

/* Call f with the number of vectors, and whether all of their columns exist (`fewest` columns do) and are included, as
 * constants where that is faster. */
#define WITH_GROUPS(dtype, f, fewest) \
    do { \
        if (s->where || (fewest) < s->vectors * LANES) WITH_DTYPE(dtype, f, s->vectors, 0); \
        else if (s->vectors == MAX_COLUMN_VECTORS) WITH_DTYPE(dtype, f, MAX_COLUMN_VECTORS, 1); \
        else WITH_DTYPE(dtype, f, s->vectors, 1); \
    } while (0)

/* Load element i of the columns into `kept`, -inf where excluded, and raise the maxima. */
INLINE void T(load_line)(int dtype, const RowOp *op, const T(Columns) *s, ix i, ix vectors, int unmasked, REAL *kept,
                         VEC *high) {
    const ix size = T(element_size)(dtype);
    const char *x = s->x + i * op->x.col;
    for (ix g = 0; g < vectors; g++) {
        const ix valid = unmasked ? LANES : ix_min(LANES, s->columns - g * LANES);
        VEC v;
        if (valid == LANES) v = T(get)(x, dtype, g * LANES);
        else {
            REAL line[LANES] = {0};
            T(load_row)(x + g * LANES * size, size, dtype, valid, line);
            v = V(loadu)(line);
        }
        if (!unmasked && s->where) v = T(keep_where)(op, s, i, g, valid, v, -INFINITY);
        V(store)(kept + g * LANES, v);
        high[g] = V(max)(v, high[g]);
    }
}

/* Load elements first .. first + n of all columns into `kept`, and their maxima into s->peak. */
INLINE void T(load_columns)(int dtype, const RowOp *op, T(Columns) *s, ix first, ix n, ix vectors, int unmasked) {
    const ix size = T(element_size)(dtype);
    VEC high[MAX_COLUMN_VECTORS];
    for (ix g = 0; g < vectors; g++) high[g] = V(set1)(-INFINITY);
    for (ix i = 0; i < n; i++) {
        const char *ahead = s->x + (first + i + PREFETCH_ROWS) * op->x.col;
        for (ix at = 0; i + PREFETCH_ROWS < n && at < vectors * LANES * size; at += 64)
            __builtin_prefetch(ahead + at);
        T(load_line)(dtype, op, s, first + i, vectors, unmasked, s->kept + i * vectors * LANES, high);
    }
    for (ix g = 0; g < vectors; g++) V(storeu)(s->peak + g * LANES, high[g]);
}

#define LOAD(dtype, vectors, unmasked) T(load_columns)(dtype, op, s, first, n, vectors, unmasked)
static void T(load_group)(int dtype, const RowOp *op, T(Columns) *s, ix first, ix n) {
    WITH_GROUPS(dtype, LOAD, s->columns);
}
#undef LOAD

INLINE VEC T(shifts_of)(VEC top) { return (VEC)((VINT)top & ~(VINT)(top == V(set1)(-INFINITY))); }

/* Add the exponentials of n elements of a vector of columns, `step` apart, to the sums, each column in the order of
 * softmax_rows.h; with `keep` they replace the elements. */
static void T(add_columns)(REAL *x, ix step, ix n, const REAL *top, double *sum, double *low, int keep) {
    const VEC shift = T(shifts_of)(V(loadu)(top));
    for (ix i = 0; i < n; i += SUMMED) {
        const ix stop = ix_min(i + SUMMED, n), full = i + (stop - i) / LANES * LANES;
        VEC part[16];
        REAL line[LANES];
        UNROLL for (ix l = 0; l < LANES; l++) part[l] = V(set1)(0);
        for (ix k = i; k < full; k += LANES)
            UNROLL for (ix l = 0; l < LANES; l++) {
                VEC p = T(shifted_exp)(V(load)(x + (k + l) * step), shift);
                if (keep) V(store)(x + (k + l) * step, p);
                part[l] += p;
            }
        if (full < stop) {
            VEC rest[LANES];                /* a copy in memory: part, indexed at run time, would leave its registers */
            UNROLL for (ix l = 0; l < LANES; l++) rest[l] = part[l];
            for (ix k = full; k < stop; k++) {
                VEC p = T(shifted_exp)(V(load)(x + k * step), shift);
                if (keep) V(store)(x + k * step, p);
                rest[LANES - (stop - k)] += p;
            }
            UNROLL for (ix l = 0; l < LANES; l++) part[l] = rest[l];
        }
#define HALVE(half) if (LANES > (half)) UNROLL for (ix l = 0; l < (half); l++) part[l] += part[l + (half)]
        HALVE(8);
        HALVE(4);
        HALVE(2);
        HALVE(1);
#undef HALVE
        V(storeu)(line, part[0]);
        for (ix c = 0; c < LANES; c++) T(add_exactly)(&sum[c], &low[c], line[c]);
    }
}

/* Store the results of elements first .. first + n, from the exponentials (`exps`) or the elements in `kept`. The
 * elements of `next`, a group of the same size or NULL, replace them, so that memory is read and written at once. */
INLINE void T(store_columns)(int dtype, const RowOp *op, const T(Columns) *s, ix first, ix n, ix vectors, int unmasked,
                             const REAL *by, int exps, T(Columns) *next) {
    const ix size = T(element_size)(dtype), step = op->out.col;
    const int logarithm = op->logarithm;
    REAL *kept = s->kept;
    const int stream = op->stream && (uintptr_t)s->out % (LANES * size) == 0 && step % (LANES * size) == 0;
    char *out = s->out + first * step;
    VEC shift[MAX_COLUMN_VECTORS], factor[MAX_COLUMN_VECTORS], high[MAX_COLUMN_VECTORS];
    for (ix g = 0; g < vectors; g++) {
        shift[g] = T(shifts_of)(V(loadu)(s->top + g * LANES)), factor[g] = V(loadu)(by + g * LANES);
        high[g] = V(set1)(-INFINITY);
    }
    for (ix i = 0; i < n; i++, out += step, kept += vectors * LANES) {
        if (next && i + PREFETCH_ROWS < n)
            for (ix at = 0; at < vectors * LANES * size; at += 64)
                __builtin_prefetch(next->x + (i + PREFETCH_ROWS) * op->x.col + at);
        for (ix g = 0; g < vectors; g++) {
            const ix valid = unmasked ? LANES : ix_min(LANES, s->columns - g * LANES);
            VEC v = V(load)(kept + g * LANES);
            if (logarithm) v = (v - shift[g]) - factor[g];
            else v = (exps ? v : T(shifted_exp)(v, shift[g])) * factor[g];
            if (!unmasked && s->where) v = T(keep_where)(op, s, first + i, g, valid, v, logarithm ? -INFINITY : 0);
            if (valid == LANES) T(put_past)(stream, out, dtype, g * LANES, v);
            else {
                REAL line[LANES];
                T(put)((char *)line, dtype, 0, v);
                memcpy(out + g * LANES * size, line, (size_t)(valid * size));
            }
        }
        if (next) T(load_line)(dtype, op, next, i, vectors, unmasked, kept, high);
    }
    if (next)
        for (ix g = 0; g < vectors; g++) V(storeu)(next->peak + g * LANES, high[g]);
}

#define STORE(dtype, vectors, unmasked) T(store_columns)(dtype, op, s, first, n, vectors, unmasked, by, exps, next)
static void T(store_group)(int dtype, const RowOp *op, const T(Columns) *s, ix first, ix n, const REAL *by, int exps,
                           T(Columns) *next) {
    WITH_GROUPS(dtype, STORE, next ? ix_min(s->columns, next->columns) : s->columns);
}
#undef STORE

/* The softmax of a group of columns. With `loaded` its only chunk is in `kept` already; afterwards that of `next` is,
 * unless it is NULL. */
static void T(softmax_group_of_columns)(RowCall *call, int thread, T(Columns) *s, int loaded, T(Columns) *next) {
    const RowOp *op = &call->op;
    const ix n = op->n, chunk = T(chunk_of)(n), columns = s->vectors * LANES;
    const int dtype = op->x.dtype, exps = chunk == n && !op->logarithm;
    REAL factor[MAX_COLUMNS];
    memset(s->sum, 0, columns * sizeof(double));
    memset(s->low, 0, columns * sizeof(double));
    for (ix first = 0; first < n; first += chunk) {
        if (row_stopped(call, thread, first, chunk)) return;
        const ix m = ix_min(chunk, n - first);
        if (!loaded) T(load_group)(dtype, op, s, first, m);
        if (first == 0) memcpy(s->top, s->peak, columns * sizeof(REAL));
        else for (ix c = 0; c < columns; c++) T(raise_top)(&s->top[c], s->peak[c], &s->sum[c], &s->low[c]);
        for (ix g = 0; g < s->vectors; g++)
            T(add_columns)(s->kept + g * LANES, columns, m, s->top + g * LANES, s->sum + g * LANES, s->low + g * LANES,
                           exps);
    }
    T(factors)(s->sum, s->low, columns, op->logarithm, factor);
    for (ix first = 0; first < n; first += chunk) {
        if (row_stopped(call, thread, first, chunk)) return;
        const ix m = ix_min(chunk, n - first);
        if (chunk < n) T(load_group)(dtype, op, s, first, m);
        T(store_group)(dtype, op, s, first, m, factor, exps, next);
    }
}

static void T(open_columns)(const RowOp *op, ix i, T(Columns) *s) {
    const ix wide = op->column_vectors * LANES, lead = op->lead,
        groups = ceil_div(op->columns - lead, wide) + (lead > 0);
    const ix k = i % groups, first = lead ? ix_max(0, lead + (k - 1) * wide) : k * wide;
    const ix row = i / groups * op->columns + first;
    s->columns = lead && k == 0 ? lead : ix_min(wide, op->columns - first);
    s->vectors = ceil_div(s->columns, LANES);
    s->x = op->x.data + batch_offset(&op->x, &op->batch, row);
    s->out = op->out.data + batch_offset(&op->out, &op->batch, row);
    s->where = op->where.data ? op->where.data + batch_offset(&op->where, &op->batch, row) : NULL;
}

/* Groups of columns from .. to, numbered over all slices. */
static void T(softmax_columns_task)(RowCall *call, int thread, ix from, ix to) {
    const RowOp *op = &call->op;
    T(Columns) pair[2], *s = pair, *next = pair + 1;
    int loaded = 0;
    pair[0].kept = pair[1].kept = (REAL *)(call->scratch + thread * call->scratch_bytes);
    T(open_columns)(op, from, s);
    for (ix i = from; i < to; i++) {
        if (i + 1 < to) T(open_columns)(op, i + 1, next);
        const int like = i + 1 < to && next->vectors == s->vectors && T(chunk_of)(op->n) == op->n;
        T(softmax_group_of_columns)(call, thread, s, loaded, like ? next : NULL);
        T(Columns) *done = s;
        s = next, next = done, loaded = like;
    }
    if (op->stream) stream_end();
}

#undef MAX_COLUMNS
#undef PREFETCH_ROWS
#undef WITH_GROUPS
