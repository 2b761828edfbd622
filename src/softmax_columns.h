/* softmax_columns.h (template over REAL): the softmax of rows whose elements lie apart while rows are neighbours.
 *
 * Vectors go across LANES rows ("columns"), up to STRIP of them at a time; a row has the bits that softmax.h gives it. */

#define STRIP_LANES (STRIP * LANES)

/* Columns in work: LANES of them are a group, whose elements (then powers) follow one another in `kept`. */
typedef struct {
    const char *x, *where;
    char *out;
    ix columns, groups;
    REAL *kept;
    REAL top[STRIP_LANES];
    double sum[STRIP_LANES], low[STRIP_LANES];
} T(Strip);

/* v where a column takes part in row i, else `other`. */
INLINE VEC T(keep_where)(const RowOp *op, const T(Strip) *s, ix i, ix g, ix valid, VEC v, REAL other) {
    const char *where = s->where + i * op->where.col + g * LANES * op->where.row;
    uint8_t bytes[16] = {0};
    for (ix j = 0; j < valid; j++) bytes[j] = (uint8_t)where[j * op->where.row];
    return V(keep_bytes)(v, bytes, V(set1)(other));
}

/* Call f with the number of groups, and whether all are full and take part, as constants where that is worth it. */
#define WITH_GROUPS(dtype, f) \
    do { \
        if (s->where || s->columns < s->groups * LANES) WITH_DTYPE(dtype, f, s->groups, 0); \
        else if (s->groups == STRIP) WITH_DTYPE(dtype, f, STRIP, 1); \
        else WITH_DTYPE(dtype, f, s->groups, 1); \
    } while (0)

/* Elements first .. first + n of all columns to `kept`, -inf where excluded; their maxima to `peak`. */
INLINE void T(load_columns)(int dtype, const RowOp *op, const T(Strip) *s, ix first, ix n, ix groups, int plain,
                            REAL *peak) {
    const ix size = dtype == F32 ? 4 : dtype == F64 ? 8 : 2, step = op->x.col;
    const char *x = s->x + first * step;
    REAL *kept = s->kept;
    VEC high[STRIP];
    for (ix g = 0; g < groups; g++) high[g] = V(set1)(-INFINITY);
    for (ix i = 0; i < n; i++, x += step) {
        for (ix g = 0; g < groups; g++) {
            const ix valid = plain ? LANES : least(LANES, s->columns - g * LANES);
            VEC v;
            if (valid == LANES) v = T(get)(x, dtype, g * LANES);
            else {
                REAL line[LANES] = {0};
                T(load_row)(x + g * LANES * size, size, dtype, valid, line);
                v = V(loadu)(line);
            }
            if (!plain && s->where) v = T(keep_where)(op, s, first + i, g, valid, v, -INFINITY);
            V(store)(kept + (g * n + i) * LANES, v);
            high[g] = V(max)(v, high[g]);
        }
        for (ix at = 0; at < groups * LANES * size; at += 64) __builtin_prefetch(x + groups * LANES * size + at);   /* next */
    }
    for (ix g = 0; g < groups; g++) V(storeu)(peak + g * LANES, high[g]);
}

#define LOAD(dtype, groups, plain) T(load_columns)(dtype, op, s, first, n, groups, plain, peak)
static void T(load_strip)(int dtype, const RowOp *op, const T(Strip) *s, ix first, ix n, REAL *peak) {
    WITH_GROUPS(dtype, LOAD);
}
#undef LOAD

/* Add the powers of n elements of a group to its sums, each column in the order of softmax.h; keep them if asked. */
static void T(add_columns)(REAL *x, ix n, const REAL *top, double *sum, double *low, int keep) {
    VEC shift = {0}, part[LANES];
    for (ix c = 0; c < LANES; c++) shift[c] = T(shift_of)(top[c]);
    for (ix i = 0; i < n; i += SUMMED) {
        const ix stop = least(i + SUMMED, n), full = i + (stop - i) / LANES * LANES;
        for (ix l = 0; l < LANES; l++) {
            VEC total = V(set1)(0);
            for (ix k = i + l; k < full; k += LANES) {
                VEC p = T(power)(V(load)(x + k * LANES), shift);
                if (keep) V(store)(x + k * LANES, p);
                total += p;
            }
            part[l] = total;
        }
        for (ix k = full; k < stop; k++) {
            VEC p = T(power)(V(load)(x + k * LANES), shift);
            if (keep) V(store)(x + k * LANES, p);
            part[LANES - (stop - k)] += p;
        }
        for (ix half = LANES / 2; half; half /= 2)
            for (ix l = 0; l < half; l++) part[l] += part[l + half];
        for (ix c = 0; c < LANES; c++) T(add_exactly)(&sum[c], &low[c], part[0][c]);
    }
}

/* Results of elements first .. first + n: from their powers, or from the elements, whichever `kept` holds. */
INLINE void T(store_columns)(int dtype, const RowOp *op, const T(Strip) *s, ix first, ix n, ix groups, int plain,
                             const REAL *by, int powers) {
    const ix size = dtype == F32 ? 4 : dtype == F64 ? 8 : 2, step = op->out.col;
    const int logarithm = op->logarithm;
    const REAL *kept = s->kept;
    char *out = s->out + first * step;
    REAL shifts[STRIP_LANES];
    VEC shift[STRIP], factor[STRIP];
    for (ix c = 0; c < groups * LANES; c++) shifts[c] = T(shift_of)(s->top[c]);
    for (ix g = 0; g < groups; g++) shift[g] = V(loadu)(shifts + g * LANES), factor[g] = V(loadu)(by + g * LANES);
    for (ix i = 0; i < n; i++, out += step)
        for (ix g = 0; g < groups; g++) {
            const ix valid = plain ? LANES : least(LANES, s->columns - g * LANES);
            VEC v = V(load)(kept + (g * n + i) * LANES);
            if (logarithm) v = (v - shift[g]) - factor[g];
            else v = (powers ? v : T(power)(v, shift[g])) * factor[g];
            if (!plain && s->where) v = T(keep_where)(op, s, first + i, g, valid, v, logarithm ? -INFINITY : 0);
            if (valid == LANES) T(put)(out, dtype, g * LANES, v);
            else {
                REAL line[LANES];
                V(storeu)(line, v);
                T(store_row)(line, valid, out + g * LANES * size, size, dtype);
            }
        }
}

#define STORE(dtype, groups, plain) T(store_columns)(dtype, op, s, first, n, groups, plain, by, powers)
static void T(store_strip)(int dtype, const RowOp *op, const T(Strip) *s, ix first, ix n, const REAL *by, int powers) {
    WITH_GROUPS(dtype, STORE);
}
#undef STORE

static void T(softmax_strip)(const RowOp *op, T(Strip) *s) {
    const ix n = op->n, chunk = T(chunk_of)(n), columns = s->groups * LANES;
    const int dtype = op->x.dtype, powers = chunk == n && !op->logarithm;
    REAL peak[STRIP_LANES], factor[STRIP_LANES];
    for (ix c = 0; c < columns; c++) s->top[c] = -INFINITY, s->sum[c] = s->low[c] = 0;
    for (ix first = 0; first < n; first += chunk) {
        const ix m = least(chunk, n - first);
        T(load_strip)(dtype, op, s, first, m, peak);
        for (ix c = 0; c < columns; c++) T(raise_top)(&s->top[c], peak[c], &s->sum[c], &s->low[c]);
        for (ix g = 0; g < s->groups; g++)
            T(add_columns)(s->kept + g * m * LANES, m, s->top + g * LANES, s->sum + g * LANES, s->low + g * LANES,
                           powers);
    }
    for (ix c = 0; c < columns; c++) factor[c] = T(factor_of)(s->sum[c] + s->low[c], op->logarithm);
    for (ix first = 0; first < n; first += chunk) {
        const ix m = least(chunk, n - first);
        if (chunk < n) T(load_strip)(dtype, op, s, first, m, peak);
        T(store_strip)(dtype, op, s, first, m, factor, powers);
    }
}

/* Strips from .. to of all: those of one set of columns are neighbours. */
static void T(softmax_strips)(const RowOp *op, ix from, ix to, void *scratch) {
    const ix wide = op->strip * LANES, strips = ceil_div(op->columns, wide);
    T(Strip) s;
    s.kept = scratch;
    for (ix i = from; i < to; i++) {
        const ix first = i % strips * wide, row = i / strips * op->columns + first;
        s.columns = least(wide, op->columns - first);
        s.groups = ceil_div(s.columns, LANES);
        s.x = op->x.data + batch_offset(&op->x, &op->batch, row);
        s.out = op->out.data + batch_offset(&op->out, &op->batch, row);
        s.where = op->where.data ? op->where.data + batch_offset(&op->where, &op->batch, row) : NULL;
        T(softmax_strip)(op, &s);
    }
}

#undef STRIP_LANES
#undef WITH_GROUPS
