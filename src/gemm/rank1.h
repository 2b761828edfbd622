/* rank1.h (template over REAL; after gemm/rows.h): the microkernel: rank-1 updates of sums that stay in registers. */

/* sum[r][i] += a[r][k * along] * b[k][i] over n steps k, for rows x vectors of sums: one load of a vector of b serves
 * all rows, one broadcast of an element of a all vectors.
 *
 * `kind` says what a step of b is: a dtype, a row of which is widened as it is loaded; PAIRS, words of two bfloat16,
 * which vf_dot() multiplies and adds; ROW_PAIRS, two rows of bfloat16, b and the one behind it (zeros behind the last
 * of `keys`), that are interleaved as they are loaded. `smallest` receives the least magnitude of such pairs. Rows of b
 * are `stride` bytes apart. */
INLINE void T(rank1)(const int kind, const int rows, const int vectors, const REAL *const *a, ix along, const char *b,
                     ix stride, ix n, Prefetch *prefetch, VEC (*sum)[TILE_VECTORS], VEC *smallest) {
    const ix step = kind == ROW_PAIRS ? 2 : 1, bytes = step * vectors * LANES * T(element_size)(kind);
    const REAL *w[TALL_ROWS];
    Prefetch near = {0};
    if (prefetch) near = *prefetch;
    UNROLL for (int r = 0; r < rows; r++) {
        w[r] = a[r];
        UNROLL for (int i = 0; i < vectors; i++) sum[r][i] = V(set1)(0);
    }
    for (ix k = 0; k < n; k += step, b += step * stride) {
        VEC x[TILE_VECTORS];
        UNROLL for (int i = 0; i < vectors; i++) x[i] = T(load_step)(kind, b, stride, i, k + 1 < n);
        if (kind == ROW_PAIRS) UNROLL for (int i = 0; i < vectors; i++) *smallest = MIN_PAIRS(*smallest, x[i]);
        if (prefetch && rows > GROUP_ROWS && near.half) prefetch_next(&near, bytes / 2);
        else if (prefetch) prefetch_next(&near, bytes);
        UNROLL for (int r = 0; r < rows; r++) {
            VEC y = V(set1)(w[r][k / step * along]);
            UNROLL for (int i = 0; i < vectors; i++) sum[r][i] = PRODUCT(kind >= PAIRS, y, x[i], sum[r][i]);
        }
    }
    if (prefetch) *prefetch = near;
}
