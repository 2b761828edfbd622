/* softmax.h (template over REAL): stand-alone softmax and log-softmax of rows, any dtype and stride.
 *
 * A row that fits the buffer is read once; a longer one is read twice (maximum and sum, then the result). */

enum { T(CHUNK) = 16384 / sizeof(REAL) };
#define SUMMED (8 * LANES)       /* elements added in one vector of REAL before they go to the sum in double */

/* sum + low += x, where low keeps what the additions to sum have lost (Neumaier 1974): double sums of doubles need it */
INLINE void T(add_exactly)(double *sum, double *low, double x) {
    double total = *sum + x;
    *low += *sum >= x ? (*sum - total) + x : (x - total) + *sum;
    *sum = total;
}

/* Load a part of a row, -inf where excluded and behind its end; returns the number of elements padded to vectors. */
static ix T(load_part)(const RowOp *op, const char *x, const char *where, ix first, ix n, REAL *buffer) {
    T(load_row)(x + first * op->x.col, op->x.col, op->x.dtype, n, buffer);
    ix padded = round_up(n, LANES);
    for (ix j = n; j < padded; j++) buffer[j] = -INFINITY;
    if (where)
        for (ix j = 0; j < n; j++)
            if (!where[(first + j) * op->where.col]) buffer[j] = -INFINITY;
    return padded;
}

static void T(softmax_row)(const RowOp *op, const char *x, const char *where, char *out, REAL *buffer, REAL *results) {
    const REAL log2e = (REAL)0x1.71547652b82fep+0;
    REAL top = -INFINITY;
    double sum = 0, low = 0;
    ix padded = 0;
    for (ix first = 0; first < op->n; first += T(CHUNK)) {
        padded = T(load_part)(op, x, where, first, least(T(CHUNK), op->n - first), buffer);
        VEC peak = V(set1)(-INFINITY);
        for (ix j = 0; j < padded; j += LANES) peak = V(max)(V(load)(buffer + j), peak);
        REAL new = V(largest)(peak);
        new = new > top ? new : top;
        /* nothing finite so far: 0 - 0 below keeps a later part right, a NaN or -inf row is settled at the end */
        const VEC shift = V(set1)(new == -INFINITY ? 0 : new);
        const double rescale = top == new ? 1 : T(exp2_one)((top - new) * log2e);
        sum *= rescale;
        low *= rescale;
        for (ix from = 0; from < padded; from += SUMMED) {
            VEC part = V(set1)(0);
            for (ix j = from; j < least(from + SUMMED, padded); j += LANES) {
                VEC e = V(exp2)((V(load)(buffer + j) - shift) * V(set1)(log2e));
                part += e;
                V(store)(results + j, e);
            }
            T(add_exactly)(&sum, &low, V(sum)(part));
        }
        top = new;
    }
    sum += low;
    /* a row of -inf alone gives NaN (0/0), as does +inf (through inf - inf) and NaN */
    const REAL inverse = (REAL)(1 / sum), shift = top, log_sum = (REAL)log(sum);
    const REAL poison = sum > 0 ? 0 : (REAL)NAN;
    int whole = op->n <= T(CHUNK);
    for (ix first = 0; first < op->n; first += T(CHUNK)) {
        ix n = least(T(CHUNK), op->n - first);
        if (!whole) padded = T(load_part)(op, x, where, first, n, buffer);
        for (ix j = 0; j < padded; j += LANES) {
            VEC y;
            if (op->logarithm) y = (V(load)(buffer + j) - V(set1)(shift)) - V(set1)(log_sum);
            else if (whole) y = V(load)(results + j) * V(set1)(inverse);
            else y = V(exp2)((V(load)(buffer + j) - V(set1)(shift)) * V(set1)(log2e)) * V(set1)(inverse);
            V(store)(results + j, y + V(set1)(poison));
        }
        if (where)
            for (ix j = 0; j < n; j++)
                if (!where[(first + j) * op->where.col]) results[j] = op->logarithm ? -INFINITY : 0;
        T(store_row)(results, n, out + first * op->out.col, op->out.col, op->out.dtype);
    }
}

static void T(softmax_rows)(const RowOp *op, ix from, ix to, void *scratch) {
    REAL *buffer = scratch, *results = buffer + T(CHUNK);
    for (ix i = from; i < to; i++) {
        const char *where = op->where.data ? op->where.data + batch_offset(&op->where, &op->batch, i) : NULL;
        T(softmax_row)(op, op->x.data + batch_offset(&op->x, &op->batch, i), where,
                       op->out.data + batch_offset(&op->out, &op->batch, i), buffer, results);
    }
}
