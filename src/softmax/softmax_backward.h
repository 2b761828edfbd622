/* softmax_backward.h (template over REAL; after softmax/softmax_rows.h): the gradient of the stand-alone softmax. */

/* Gradient of softmax: y * (g - sum(g * y)); of log-softmax: g - exp(y) * sum(g). Excluded elements add nothing. */
static void T(softmax_backward_task)(RowCall *call, int thread, ix from, ix to) {
    const RowOp *op = &call->op;
    const ix chunk = T(chunk_of)(op->n);
    REAL *g = (REAL *)(call->scratch + thread * call->scratch_bytes), *y = g + round_up(chunk, LANES);
    for (ix i = from; i < to; i++) {
        const char *grad = op->x.data + batch_offset(&op->x, &op->batch, i);
        const char *result = op->y.data + batch_offset(&op->y, &op->batch, i);
        char *out = op->out.data + batch_offset(&op->out, &op->batch, i);
        double sum = 0, low = 0;
        for (int pass = 0; pass < 2; pass++)
            for (ix first = 0; first < op->n; first += chunk) {
                if (row_stopped(call, thread, first, chunk)) return;
                ix n = ix_min(chunk, op->n - first);
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
                    for (ix j = start; j < ix_min(start + SUMMED, n); j += LANES) {
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
