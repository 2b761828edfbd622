/* softmax_rows.h (template over REAL; after gemm/rows.h): stand-alone softmax and log-softmax of rows.
 *
 * A row of up to ROW_KEPT bytes is read from memory once, a longer one twice: for maximum and sum by chunks, then for
 * the result. Order of a sum, here and in softmax_columns.h: vectors of LANES neighbours are added to the sum of a part
 * of SUMMED elements, the lanes of a part by halving, the parts in double. The last vector is the last LANES elements;
 * those that the vector before it has too add 0. */

#define SUMMED (16 * LANES)

/* sum + low += x, where low is the rounding error of sum (Neumaier 1974), which double sums of doubles need. */
INLINE void T(add_exactly)(double *sum, double *low, double x) {
    double total = *sum + x;
    if (REAL_BITS == 64) *low += *sum >= x ? (*sum - total) + x : (x - total) + *sum;
    *sum = total;
}

/* Elements that are loaded at a time: the row, or a chunk of it. */
INLINE ix T(chunk_of)(ix n) { return n <= ROW_KEPT / (ix)sizeof(REAL) ? n : ROW_CHUNK / (ix)sizeof(REAL); }

/* LANES elements from element i on, and back; `dtype` is a constant where these are inlined. */
INLINE VEC T(get)(const char *x, const int dtype, ix i) {
    return T(load_as)(dtype, x + i * T(element_size)(dtype));
}
INLINE void T(put)(char *x, int dtype, ix i, VEC v) {
#if REAL_BITS == 32
    if (dtype == F16) { vf_store_f16((uint16_t *)x + i, v); return; }
    if (dtype == BF16) { vf_narrow_bf16((uint16_t *)x + i, v); return; }
#else
    (void)dtype;
#endif
    V(storeu)((REAL *)x + i, v);
}

/* put(), or with `past` a non-temporal store, for which x + i must be aligned to the vector. */
INLINE void T(put_past)(const int past, char *x, int dtype, ix i, VEC v) {
    if (!past) {
        T(put)(x, dtype, i, v);
        return;
    }
#if REAL_BITS == 32
    if (dtype != F32) {
        vh half;
        T(put)((char *)&half, dtype, 0, v);
        vh_stream((uint16_t *)x + i, half);
        return;
    }
#else
    (void)dtype;
#endif
    V(stream)((REAL *)x + i, v);
}

/* Call f with the dtype as a constant, so that its loop is compiled for each dtype. */
#if REAL_BITS == 32
#define WITH_DTYPE(dtype, f, ...) \
    (dtype == F16 ? f(F16, __VA_ARGS__) : dtype == BF16 ? f(BF16, __VA_ARGS__) : f(F32, __VA_ARGS__))
#else
#define WITH_DTYPE(dtype, f, ...) ((void)(dtype), f(F64, __VA_ARGS__))
#endif

INLINE VEC T(shifted_exp)(VEC x, VEC shift) { return V(exp2)((x - shift) * V(set1)((REAL)0x1.71547652b82fep+0)); }

/* The number subtracted from the elements: the maximum, or 0 while all are -inf, so that no -inf is subtracted from
 * -inf. A row that ends so is 0 / 0. */
INLINE REAL T(shift_of)(REAL top) { return top == -INFINITY ? 0 : top; }

/* Raise the maximum to that of a new part, and rescale the sum. */
INLINE void T(raise_top)(REAL *top, REAL peak, double *sum, double *low) {
    if (!(peak > *top)) return;
    if (*sum != 0) {
        const double factor = V(exp2_one)((*top - peak) * (REAL)0x1.71547652b82fep+0);
        *sum *= factor;
        *low *= factor;
    }
    *top = peak;
}

INLINE REAL T(peak_of)(int dtype, const char *x, ix n) {
    VEC a = T(get)(x, dtype, n - LANES), b = a, c = a, d = a;
    ix i = 0;
    for (; i + 4 * LANES <= n; i += 4 * LANES) {
        a = V(max)(T(get)(x, dtype, i), a);
        b = V(max)(T(get)(x, dtype, i + LANES), b);
        c = V(max)(T(get)(x, dtype, i + 2 * LANES), c);
        d = V(max)(T(get)(x, dtype, i + 3 * LANES), d);
    }
    for (; i + LANES <= n; i += LANES) a = V(max)(T(get)(x, dtype, i), a);
    a = V(max)(V(max)(a, b), V(max)(c, d));
    return V(largest)(V(max)(a, V(set1)(-INFINITY)));      /* not NaN: its exponential makes the sum NaN */
}

/* Add the exponentials of n elements to the sum, and keep them in e unless it is NULL. Prefetches the memory that is
 * read next, from `next` on, `pace` bytes per element. */
INLINE void T(add_exps)(int dtype, const char *x, ix n, REAL shift, double *sum, double *low, REAL *e,
                          const char *next, ix pace) {
    const VEC s = V(set1)(shift);
    for (ix i = 0; i < n; ) {
        const ix stop = ix_min(i + SUMMED, n);
        VEC part = V(set1)(0);
        for (; i + LANES <= stop; i += LANES) {
            VEC p = T(shifted_exp)(T(get)(x, dtype, i), s);
            part += p;
            if (e) V(storeu)(e + i, p);
            __builtin_prefetch(next + i * pace);
        }
        if (i < stop) {
            VEC p = T(shifted_exp)(T(get)(x, dtype, n - LANES), s);
            part += V(keep_bits)(p, ~0u << (LANES - (n - i)), V(set1)(0));
            if (e) V(storeu)(e + n - LANES, p);
            i = n;
        }
        T(add_exactly)(sum, low, V(sum)(part));
    }
}

/* From the sum of a row to the factor of its exponentials or, for log-softmax, the logarithm to subtract; NaN for a row
 * of -inf alone or with a NaN or +inf. */
INLINE REAL T(factor_of)(double sum, int logarithm) {
    const double valid = sum > 0 ? sum : NAN;
    return logarithm ? (REAL)vd_log(vd_set1(valid))[0] : (REAL)(1 / valid);
}

/* The same for n rows, rounded up to whole vectors of double: a vector of logarithms takes no longer than one. */
INLINE void T(factors)(const double *sum, const double *low, ix n, int logarithm, REAL *by) {
    for (ix r = 0; r < n; r += VD) {
        const vd total = vd_loadu(sum + r) + vd_loadu(low + r);
        const vdi some = (vdi)(total > vd_set1(0));
        const vd valid = (vd)(((vdi)total & some) | ((vdi)vd_set1(NAN) & ~some));
        double y[VD];
        if (logarithm) vd_storeu(y, vd_log(valid));
        else vd_storeu(y, vd_set1(1) / valid);
        for (ix k = 0; k < VD; k++) by[r + k] = (REAL)y[k];
    }
}

/* Elements before the first one that is aligned to a vector, from which on non-temporal stores can begin. */
INLINE ix T(lead)(const char *out, ix size, int past) {
    return past ? (ix)(-(uintptr_t)out & (LANES * size - 1)) / size : 0;
}

/* Store the last LANES of n results; after non-temporal stores only those behind the last whole vector, because a
 * second store to such a line would read it from memory. */
INLINE void T(put_last)(char *out, int dtype, ix n, ix lead, int past, VEC last) {
    const ix size = T(element_size)(dtype), rest = (n - lead) % LANES;
    if (!past) T(put)(out, dtype, n - LANES, last);
    else if (rest) {
        char line[LANES * sizeof(REAL)];
        T(put)(line, dtype, 0, last);
        memcpy(out + (n - rest) * size, line + (LANES - rest) * size, (size_t)(rest * size));
    }
}
INLINE void T(put_first)(char *out, int dtype, ix lead, VEC first) {
    char line[LANES * sizeof(REAL)];
    T(put)(line, dtype, 0, first);
    memcpy(out, line, (size_t)(lead * T(element_size)(dtype)));
}

/* The last vector is read before its neighbours are written, because out may be the input. */
#define EACH(expression, get_it) \
    do { \
        VEC v = get_it(n - LANES), last = expression; \
        v = get_it(0); \
        if (lead) T(put_first)(out, dtype, lead, expression); \
        for (ix i = lead; i + LANES <= n; i += LANES) { \
            v = get_it(i); \
            __builtin_prefetch(next + i * pace); \
            T(put_past)(past, out, dtype, i, expression); \
        } \
        T(put_last)(out, dtype, n, lead, past, last); \
    } while (0)
#define FROM_X(i) T(get)(x, dtype, i)
#define FROM_E(i) V(loadu)(e + i)

/* Results of n elements: from their exponentials if they were kept, else from the elements. */
INLINE void T(results)(int dtype, const char *x, const REAL *e, ix n, REAL top, REAL by, int logarithm, char *out,
                       int past, const char *next, ix pace) {
    const ix lead = T(lead)(out, T(element_size)(dtype), past);
    const VEC shift = V(set1)(T(shift_of)(top)), factor = V(set1)(by);
    if (logarithm) EACH((v - shift) - factor, FROM_X);
    else if (e) EACH(v * factor, FROM_E);
    else EACH(T(shifted_exp)(v, shift) * factor, FROM_X);
}
#undef EACH
#undef FROM_X
#undef FROM_E

static REAL T(row_peak)(int dtype, const char *x, ix n) { return WITH_DTYPE(dtype, T(peak_of), x, n); }
static void T(row_exps)(int dtype, const char *x, ix n, REAL shift, double *sum, double *low, REAL *e,
                          const char *next, ix pace) {
    WITH_DTYPE(dtype, T(add_exps), x, n, shift, sum, low, e, next, pace);
}
static void T(row_results)(int dtype, const char *x, const REAL *e, ix n, REAL top, REAL by, int logarithm, char *out,
                           int past, const char *next, ix pace) {
    WITH_DTYPE(dtype, T(results), x, e, n, top, by, logarithm, out, past, next, pace);
}

/* Copy n bytes from `stage` to `out` by non-temporal stores of whole lines; both have the same offset in a line. */
static void T(flush)(const char *stage, char *out, ix n) {
    ix i = ix_min((ix)(-(uintptr_t)out & 63), n);
    memcpy(out, stage, (size_t)i);
    for (; i + 64 <= n; i += 64)
        for (ix k = 0; k < 64; k += LANES * (ix)sizeof(REAL))
            V(stream)((REAL *)(out + i + k), V(load)((const REAL *)(stage + i + k)));
    memcpy(out + i, stage + i, (size_t)(n - i));
}

/* Maxima of rows side by side. */
INLINE void T(peaks)(const int dtype, const int rows, const char *x, ix step, ix n, REAL *top) {
    VEC high[TOGETHER];
    if (rows == 1) {
        *top = T(peak_of)(dtype, x, n);
        return;
    }
    UNROLL for (int r = 0; r < rows; r++) high[r] = T(get)(x + r * step, dtype, n - LANES);
    for (ix i = 0; i + LANES <= n; i += LANES)
        UNROLL for (int r = 0; r < rows; r++) high[r] = V(max)(T(get)(x + r * step, dtype, i), high[r]);
    UNROLL for (int r = 0; r < rows; r++) top[r] = V(largest)(V(max)(high[r], V(set1)(-INFINITY)));
}

/* Softmax of groups of `rows` contiguous rows. One loop computes the exponentials of a group and writes the results of
 * the group before, after the maxima of the next group: no step waits for a maximum, a sum over lanes and a division,
 * which take 125 cycles a row. The exponentials of two groups are kept, those of row r from r * n on. */
INLINE void T(groups)(const int dtype, const int rows, int logarithm, ix n, const char *x, ix step, char *out,
                      ix out_step, ix groups, REAL *e, int past) {
    const ix size = T(element_size)(dtype), of_group = rows * round_up(n, LANES) + ROW_GAP / (ix)sizeof(REAL);
    const int streams = rows == 1 && past, staged = rows > 1 && past && out_step == n * size;
    char *stage = (char *)(e + 2 * of_group);
    REAL top[TOGETHER], shift[TOGETHER] = {0}, factor[2 * TOGETHER] = {0};      /* whole vectors of double */
    const char *closed = x;
    if (groups == 0) return;
    T(peaks)(dtype, rows, x, step, n, top);
    for (ix k = 0; k <= groups; k++, x += rows * step) {
        const REAL *old = e + (~k & 1) * of_group;
        REAL *kept = e + (k & 1) * of_group, before[TOGETHER];
        double sum[2 * TOGETHER] = {0}, low[2 * TOGETHER] = {0};
        char *to = staged ? stage + ((uintptr_t)out & 63) : out;
        const ix to_step = staged ? n * size : out_step, lead = rows == 1 ? T(lead)(out, size, past) : 0;
        VEC last[TOGETHER] = {{0}};
        UNROLL for (int r = 0; r < rows; r++) before[r] = shift[r], shift[r] = T(shift_of)(top[r]);
#define RESULT(r, i) (logarithm ? (T(get)(closed + (r) * step, dtype, i) - V(set1)(before[r])) - V(set1)(factor[r]) \
                                : V(loadu)(old + (r) * n + (i)) * V(set1)(factor[r]))
#define LOOP(write, logarithm, streams) \
    do { \
        for (; i + LANES <= stop; i += LANES) \
            UNROLL for (int r = 0; r < rows; r++) { \
                VEC p = T(shifted_exp)(T(get)(x + r * step, dtype, i), V(set1)(shift[r])); \
                part[r] += p; \
                if (!logarithm) V(storeu)(kept + r * n + i, p); \
                if (write) T(put_past)(streams, to + r * to_step, dtype, i + lead, RESULT(r, i + lead)); \
                __builtin_prefetch(x + (r + 2 * rows) * step + i * size); \
            } \
    } while (0)
        if (k) {
            UNROLL for (int r = 0; r < rows; r++) last[r] = RESULT(r, n - LANES);
            if (lead) T(put_first)(to, dtype, lead, RESULT(0, 0));
        }
        if (k + 1 < groups) T(peaks)(dtype, rows, x + rows * step, step, n, top);
        /* A row's parts are summed behind the loop: without these sums it keeps its constants in registers. */
        VEC parts[ROW_IN_TURN / (16 * sizeof(VEC))];
        ix n_parts = 0;
        for (ix i = 0; k < groups && i < n; ) {
            const ix stop = ix_min(i + SUMMED, n);
            VEC part[TOGETHER] = {{0}};
            /* Each usual case has a loop without branches. */
            if (!k || streams) LOOP(k && i + lead + LANES <= n, logarithm, streams);
            else if (logarithm) LOOP(1, 1, 0);
            else LOOP(1, 0, 0);
            if (i < stop) {
                UNROLL for (int r = 0; r < rows; r++) {
                    VEC p = T(shifted_exp)(T(get)(x + r * step, dtype, n - LANES), V(set1)(shift[r]));
                    part[r] += V(keep_bits)(p, ~0u << (LANES - (n - i)), V(set1)(0));
                    if (!logarithm) V(storeu)(kept + r * n + n - LANES, p);
                }
                i = n;
            }
            if (rows == 1) parts[n_parts++] = part[0];
            else UNROLL for (int r = 0; r < rows; r++) T(add_exactly)(&sum[r], &low[r], V(sum)(part[r]));
        }
        for (ix i = 0; i < n_parts; i++) T(add_exactly)(sum, low, V(sum)(parts[i]));
        for (ix i = lead; k == groups && i + LANES <= n; i += LANES)
            UNROLL for (int r = 0; r < rows; r++)
                T(put_past)(streams, to + r * to_step, dtype, i, RESULT(r, i));
#undef LOOP
#undef RESULT
        if (k) {
            UNROLL for (int r = 0; r < rows; r++)
                T(put_last)(to + r * to_step, dtype, n, lead, streams, last[r]);
            if (staged) T(flush)(to, out, rows * n * size);
            out += rows * out_step;
        }
        closed = x;
        if (rows > 1) T(factors)(sum, low, rows, logarithm, factor);
        else factor[0] = T(factor_of)(sum[0] + low[0], logarithm);
    }
}

/* Contiguous rows of at least one vector are read and written in place. Other rows, and all with `where`, go through
 * the buffer `line`, padded at its front with -inf to a whole vector. */
INLINE int T(row_in_place)(const RowOp *op, ix n) {
    const ix size = T(element_size)(op->x.dtype);
    return op->x.col == size && op->out.col == size && !op->where.data && n >= LANES;
}

static const char *T(open_part)(const RowOp *op, const char *x, const char *where, ix first, ix n, REAL *line) {
    const ix fill = ix_max(0, LANES - n);
    for (ix j = 0; j < fill; j++) line[j] = -INFINITY;
    line += fill;
    T(load_row)(x + first * op->x.col, op->x.col, op->x.dtype, n, line);
    if (where)
        for (ix j = 0; j < n; j++)
            if (!where[(first + j) * op->where.col]) line[j] = -INFINITY;
    return (const char *)(line - fill);
}

/* store_row() with the rounding of put(). */
static void T(store_line)(const REAL *line, ix n, char *out, ix stride, int dtype) {
    char half[LANES * sizeof(REAL)];
    for (ix i = 0; dtype == BF16 && i < n; i += LANES) {
        T(put)(half, BF16, 0, V(loadu)(line + i));
        for (ix j = 0; j < ix_min(LANES, n - i); j++) memcpy(out + (i + j) * stride, half + 2 * j, 2);
    }
    if (dtype != BF16) T(store_row)(line, n, out, stride, dtype);
}

static void T(close_part)(const RowOp *op, char *out, const char *where, ix first, ix n, REAL *line) {
    line += ix_max(0, LANES - n);
    if (where)
        for (ix j = 0; j < n; j++)
            if (!where[(first + j) * op->where.col]) line[j] = op->logarithm ? -INFINITY : 0;
    T(store_line)(line, n, out + first * op->out.col, op->out.col, op->out.dtype);
}

static void T(softmax_row)(RowCall *call, int thread, const char *x, const char *where, char *out, const char *next,
                           REAL *e, REAL *line, int past) {
    const RowOp *op = &call->op;
    const ix n = op->n, chunk = T(chunk_of)(n), size = T(element_size)(op->x.dtype);
    const int here = T(row_in_place)(op, (n - 1) % chunk + 1), dtype = here ? op->x.dtype : NATIVE;
    REAL top = -INFINITY;
    double sum = 0, low = 0;
    const char *part = x;
    if (op->logarithm || chunk < n) e = NULL;
    for (ix first = 0; first < n; first += chunk) {
        if (row_stopped(call, thread, first, chunk)) return;
        const ix m = ix_min(chunk, n - first), padded = ix_max(m, LANES);
        part = here ? x + first * size : T(open_part)(op, x, where, first, m, line);
        T(raise_top)(&top, T(row_peak)(dtype, part, padded), &sum, &low);
        T(row_exps)(dtype, part, padded, T(shift_of)(top), &sum, &low, e,
                      chunk < n ? part + chunk * size : next, chunk < n ? size : size / 2);
    }
    const REAL factor = T(factor_of)(sum + low, op->logarithm);
    for (ix first = 0; first < n; first += chunk) {
        if (row_stopped(call, thread, first, chunk)) return;
        const ix m = ix_min(chunk, n - first);
        if (here) {
            T(row_results)(dtype, x + first * size, e, m, top, factor, op->logarithm, out + first * size, past,
                           chunk < n ? x + (first + chunk) * size : next + n / 2 * size, chunk < n ? size : size / 2);
            continue;
        }
        if (chunk < n) part = T(open_part)(op, x, where, first, m, line);
        T(row_results)(dtype, part, e, ix_max(m, LANES), top, factor, op->logarithm, (char *)line, 0, x, 0);
        T(close_part)(op, out, where, first, m, line);
    }
}

#define GROUPS(dtype, rows) T(groups)(dtype, rows, op->logarithm, op->n, x, step, out, out_step, groups, e, past)
static void T(softmax_together)(const RowOp *op, const char *x, ix step, char *out, ix out_step, ix groups, REAL *e,
                                int past) {
    WITH_DTYPE(op->x.dtype, GROUPS, TOGETHER);
}
static void T(softmax_in_turn)(const RowOp *op, const char *x, ix step, char *out, ix out_step, ix groups, REAL *e,
                               int past) {
    WITH_DTYPE(op->x.dtype, GROUPS, 1);
}
#undef GROUPS

/* Bytes from a row to the next along the last batch axis. */
INLINE ix T(row_step)(const Array *a) {
    return a->data && a->n_batch && a->shape[a->n_batch - 1] != 1 ? a->strides[a->n_batch - 1] : 0;
}

static void T(softmax_rows_task)(RowCall *call, int thread, ix from, ix to) {
    const RowOp *op = &call->op;
    REAL *line = (REAL *)(call->scratch + thread * call->scratch_bytes),
        *e = line + round_up(T(chunk_of)(op->n), LANES);
    const ix length = op->batch.n ? op->batch.shape[op->batch.n - 1] : 1;
    const int together = op->n * (ix)sizeof(REAL) <= ROW_SHORT && T(row_in_place)(op, op->n);
    const int in_turn = op->n * (ix)sizeof(REAL) <= ROW_IN_TURN && T(row_in_place)(op, op->n);
    const ix step = T(row_step)(&op->x), out_step = T(row_step)(&op->out), where_step = T(row_step)(&op->where);
    for (ix i = from, run; i < to; i += run) {
        const char *x = op->x.data + batch_offset(&op->x, &op->batch, i);
        const char *where = op->where.data ? op->where.data + batch_offset(&op->where, &op->batch, i) : NULL;
        char *out = op->out.data + batch_offset(&op->out, &op->batch, i);
        run = ix_min(to - i, length - i % length);
        const int past = op->stream && ((uintptr_t)out | (uintptr_t)out_step) % T(element_size)(op->out.dtype) == 0;
        ix k = 0;
        if (together) {
            k = run / TOGETHER * TOGETHER;
            T(softmax_together)(op, x, step, out, out_step, run / TOGETHER, e, past);
            x += k * step, out += k * out_step;
        }
        if (in_turn) T(softmax_in_turn)(op, x, step, out, out_step, run - k, e, past);
        else for (; k < run; k++, x += step, out += out_step)
            T(softmax_row)(call, thread, x, where ? where + k * where_step : NULL, out, x + step, e, line, past);
    }
    if (op->stream) stream_end();
}
