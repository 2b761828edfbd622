/* online_softmax.h (template over REAL; after gemm/rows.h): turns scores into weights relative to a running row maximum
 * (Milakov and Gimelshein 2018). */

/* Interleaves the rows of a group: six independent chains hide the latency of the polynomial, and one loop replaces six
 * (5.9 cycles per vector of 16 instead of 8.1 at block_k 512 on Zen 5). */
INLINE void T(exp2_rows)(const int pairs, const int rows, REAL *s, uint16_t *rounded, ix stride, ix from, ix to,
                      const REAL *shift, VEC c, double *total) {
    VEC sum[GROUP_ROWS];
    UNROLL for (int r = 0; r < rows; r++) sum[r] = V(set1)(0);
    for (ix j = from; j < to; j += LANES) {
        UNROLL for (int r = 0; r < rows; r++) {
            VEC x = V(exp2)((V(load)(s + r * stride + j) - V(set1)(shift[r])) * c);
            sum[r] += x;
            V(store)(s + r * stride + j, x);
            if (pairs) STORE_PAIRS(rounded + r * stride + j, x);
        }
    }
    UNROLL for (int r = 0; r < rows; r++) total[r] = V(sum)(sum[r]);
}

/* alpha receives the factor by which a new row maximum rescales older sums, exp2((old - new) * exponent). A block that
 * adds nothing to a row gives alpha = 1 and adds 0: it changes no bit. */
INLINE void T(softmax_group)(const int pairs, const Params *p, Task *t, ix r0, ix n, ix block) {
    const VEC c = V(set1)((REAL)p->exponent);
    REAL *s = P_(s), *row_max = P_(row_max) + r0, *alpha = P_(alpha), *peaks = P_(peaks), shift[IN_PLACE_ROWS];
    double total[IN_PLACE_ROWS];
    for (ix r = 0; r < n; r++) {
        REAL top = V(largest)(V(load)(peaks + r * LANES)), new = top > row_max[r] ? top : row_max[r];
        alpha[r] = row_max[r] == new ? 0 : row_max[r] - new;
        row_max[r] = new;
        shift[r] = new == -INFINITY ? 0 : new;
        if (p->kept_scores) P_(block_max)[block * p->block_q + r0 + r] = new;
    }
    for (ix r = 0; r < n; r += LANES) V(store)(alpha + r, V(exp2)(V(load)(alpha + r) * c));
    for (ix r = 0, m; r < n; r += m) {
        m = ix_min(GROUP_ROWS, n - r);
#define ROWS(rows) T(exp2_rows)(pairs, rows, s + r * p->width, t->pairs + r * p->width, p->width, t->from, t->to, \
                                shift + r, c, total + r)
        ROW_CASES(m, ROWS)
#undef ROWS
    }
    for (ix r = 0; r < n; r++) t->row_sum[r0 + r] = t->row_sum[r0 + r] * alpha[r] + total[r];
}

STEP void T(online_softmax)(const Params *p, Task *t, ix r0, ix n, ix block) {
    T(softmax_group)(0, p, t, r0, n, block);
}
#if PAIR_PRODUCTS
STEP void T(online_softmax_pairs)(const Params *p, Task *t, ix r0, ix n, ix block) {
    T(softmax_group)(1, p, t, r0, n, block);
}
#endif
