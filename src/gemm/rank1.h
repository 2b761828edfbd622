/* rank1.h (template over REAL; after gemm/rows.h): the microkernel: n rank-1 updates of a register tile. */

/* sum[r][i] = the sum of a[r][k * along] * b[k][i] over n steps k, for rows x vectors of sums: each vector of b is
 * loaded once for all rows, each element of a broadcast once for all vectors.
 *
 * `kind` is what a step reads: a dtype (a row of b, widened as it is loaded), PAIRS (words of two bfloat16, for
 * vf_dot()) or ROW_PAIRS (two bfloat16 rows of b, interleaved as they are loaded; zeros stand in for a missing second
 * row). `smallest` receives the least magnitude in ROW_PAIRS. Rows of b are `stride` bytes apart; `in_runs`, each
 * run of `run` rows begins at row places[k]. */
INLINE void T(rank1)(const int kind, const int in_runs, const int rows, const int vectors, const REAL *const *a,
                     ix along, const char *b, ix stride, const int64_t *places, ix run, ix n, Prefetch *prefetch,
                     VEC (*sum)[TILE_VECTORS], VEC *smallest) {
    const ix step = kind == ROW_PAIRS ? 2 : 1, bytes = step * vectors * LANES * T(element_size)(kind);
    const REAL *w[TALL_ROWS];
    Prefetch near = {0};
    if (prefetch) near = *prefetch;
    UNROLL for (int r = 0; r < rows; r++) {
        w[r] = a[r];
        UNROLL for (int i = 0; i < vectors; i++) sum[r][i] = V(set1)(0);
    }
    for (ix from = 0, stop; from < n; from = stop) {
        const char *x_row = in_runs ? b + places[from] * stride : b;
        stop = in_runs ? ix_min(from + run, n) : n;
        for (ix k = from; k < stop; k += step, x_row += step * stride) {
            VEC x[TILE_VECTORS];
            UNROLL for (int i = 0; i < vectors; i++) x[i] = T(load_step)(kind, x_row, stride, i, k + 1 < n);
            if (kind == ROW_PAIRS)
                UNROLL for (int i = 0; i < vectors; i++) *smallest = MIN_PAIRS(*smallest, x[i]);
            if (prefetch && rows > GROUP_ROWS && near.half) prefetch_next(&near, bytes / 2);
            else if (prefetch) prefetch_next(&near, bytes);
            UNROLL for (int r = 0; r < rows; r++) {
                VEC y = V(set1)(w[r][k / step * along]);
                UNROLL for (int i = 0; i < vectors; i++) sum[r][i] = PRODUCT(kind >= PAIRS, y, x[i], sum[r][i]);
            }
        }
    }
    if (prefetch) *prefetch = near;
}
