/* scores.h (template over REAL; after gemm/rank1.h, attention/mask.h): the scores of packed keys, for a group of up to
 * 6 query rows and one block.
 *
 * Per group and block, 6 x block_k scores are written to L1 once and read once by each later step; keys and values
 * stream from L2 (block_k * (D + Dv) * 4 bytes), one vector load for 6 multiply-and-adds. */

/* Multiplies query rows by one panel of keys over `depth` depths (or pairs of them), and adds earlier products unless
 * `first`; lanes of the last vector without a bit in `tail` become -inf. Every tile shape sums the depths in order, so
 * the bits of a score do not depend on which tile computes it. */
INLINE void T(scores_tile)(const int pairs, const int rows, const int vectors, const REAL *const *q, const REAL *k,
                           ix depth, int first, unsigned tail, REAL *s, ix stride, VEC *peak) {
    VEC sum[TALL_ROWS][TILE_VECTORS];
    T(rank1)(pairs ? PAIRS : NATIVE, 0, rows, vectors, q, 1, (const char *)k, PANEL * sizeof(REAL), NULL, 0, depth,
             NULL, sum, NULL);
    if (!first)
        UNROLL for (int r = 0; r < rows; r++)
            UNROLL for (int v = 0; v < vectors; v++) sum[r][v] += V(load)(s + r * stride + v * LANES);
    if (tail + 1 < 1u << LANES)
        UNROLL for (int r = 0; r < rows; r++)
            sum[r][vectors - 1] = V(keep_bits)(sum[r][vectors - 1], tail, V(set1)(-INFINITY));
    UNROLL for (int r = 0; r < rows; r++) {
        UNROLL for (int v = 0; v < vectors; v++) {
            V(store)(s + r * stride + v * LANES, sum[r][v]);
            peak[r] = V(max)(sum[r][v], peak[r]);     /* max() returns its second operand for NaN */
        }
    }
}

INLINE void T(scores_rows)(const int pairs, const int rows, const Params *p, const Task *t, ix next,
                           const REAL *const *q_rows, const REAL *k) {
    const REAL *q[GROUP_ROWS];
    VEC peak[GROUP_ROWS];
    ix from = 0, depth, depths = pairs ? ceil_div(p->head_dim, 2) : p->head_dim;
    unsigned every = (1u << LANES) - 1, tail = every >> (t->to - t->column_stop);
    do {
        depth = ix_min(depths - from, pairs ? CHAIN / 2 : CHAIN);
        UNROLL for (int r = 0; r < rows; r++) q[r] = q_rows[r] + from, peak[r] = V(set1)(-INFINITY);
        for (ix j = t->from; j < t->to; j += PANEL) {
            REAL *s = P_(s) + j;
            ix vectors = ix_min(PANEL, t->to - j) / LANES;
            const REAL *panel = k + j * depths + from * PANEL;
            if ((p->masked || p->kept_scores) && from == 0) T(prefetch_panel)(p, t, next, rows, j);
#define TILE(vectors) \
    T(scores_tile)(pairs, rows, vectors, q, panel, depth, from == 0, j + PANEL < t->to ? every : tail, s, p->width, \
                   peak)
            VECTOR_CASES(TILE)
#undef TILE
        }
        from += depth;
    } while (from < depths);
    UNROLL for (int r = 0; r < rows; r++) V(store)(P_(peaks) + r * LANES, peak[r]);
}

/* Prefetches the queries and sums of the next group of rows. */
INLINE void T(prefetch_group)(const Params *p, const Task *t, ix r0) {
    for (ix r = r0; r < ix_min(r0 + GROUP_ROWS, t->rows); r++) {
        prefetch_lines(t->q_rows[r], p->head_dim * (ix)sizeof(REAL), 0);
        prefetch_lines((const char *)(P_(o) + r * p->value_stride), p->value_stride * (ix)sizeof(REAL), 1);
    }
}

INLINE void T(scores_group)(const int pairs, const Params *p, Task *t, ix r0, ix n, Packed kv) {
    const REAL *const *q = (const REAL *const *)t->q_rows + r0, *k = kv.keys;
    T(prefetch_group)(p, t, r0 + n);
#define ROWS(rows) T(scores_rows)(pairs, rows, p, t, r0 + n, q, k)
    ROW_CASES(n, ROWS)
#undef ROWS
}

STEP void T(scores_packed)(const Params *p, Task *t, ix r0, ix n, Packed kv) { T(scores_group)(0, p, t, r0, n, kv); }
#if PAIR_PRODUCTS
STEP void T(scores_packed_pairs)(const Params *p, Task *t, ix r0, ix n, Packed kv) {
    T(scores_group)(1, p, t, r0, n, kv);
}
#endif
