/* values.h (template over REAL; after gemm/rank1.h, attention/nonfinite.h): weighted sum over packed values. */

/* o = o * alpha + weights @ values for rows x vectors. One FMA rescales o as the sums are stored: sums that start from
 * o * alpha would cost the same, but round each addition at the magnitude of all blocks so far, not of this one. */
INLINE void T(values_tile)(const int pairs, const int rows, const int vectors, const REAL *const *w, const REAL *v,
                           ix v_stride, ix keys, const REAL *alpha, REAL *o, ix o_stride) {
    VEC sum[TALL_ROWS][TILE_VECTORS];
    T(rank1)(pairs ? PAIRS : NATIVE, 0, rows, vectors, w, 1, (const char *)v, v_stride * sizeof(REAL), NULL, 0,
             keys, NULL, sum, NULL);
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int i = 0; i < vectors; i++) {
            REAL *x = o + r * o_stride + i * LANES;
            V(store)(x, V(fma)(V(set1)(alpha[r]), V(load)(x), sum[r][i]));
        }
}

/* Keys of a step, before which the weights of the next step are prefetched. (512, 512) @ (512, 64) reaches 75 % of FMA
 * peak with steps of 64 or 128 keys, 70 % with 256, 65 % with 512, and 56 % without prefetches. */
enum { T(WEIGHTED_KEYS) = 128 };

/* Prefetches the weights of the next step in equal shares, one before each chunk of values. Zen 4 has half as many
 * misses in flight as a step has lines: all at once, 12,512,512 x 12,512,64 takes 1.10 to 1.14 times as long. */
static void T(prefetch_weights)(const Params *p, const Task *t, ix chunk, ix chunks) {
    const ix n = ix_min(GROUP_ROWS, t->rows - t->ahead_row);
    /* Without it the compiler finds no effect and drops the call. */
    __asm__ volatile("");
    for (ix r = n * chunk / chunks; r < n * (chunk + 1) / chunks; r++)
        prefetch_lines(row_address(t, &p->weights, t->weights, t->ahead_row + r) + t->ahead_key * p->weights.col,
                       T(WEIGHTED_KEYS) * p->weights.col, 0);
}

/* With `pairs`, a step is a pair of keys; where the part begins or ends inside one, its other key has the weight 0. */
INLINE void T(values_rows)(const int pairs, const int rows, const Params *p, const Task *t, const REAL *const *w,
                           REAL *o, const REAL *values, ix keys_in_block) {
    ix chunks = T(chunks)(p), first = pairs ? t->column / 2 : t->column,
        steps = (pairs ? ceil_div(t->column_stop, 2) : t->column_stop) - first;
    ix steps_in_block = pairs ? ceil_div(keys_in_block, 2) : keys_in_block;
    const REAL *w_rows[GROUP_ROWS];
    UNROLL for (int r = 0; r < rows; r++) w_rows[r] = w[r] + first;
    for (ix c = 0; c < chunks; c++) {
        ix from = T(chunk_start)(p, c), vectors = T(chunk_start)(p, c + 1) - from;
        const REAL *v = values + from * LANES * steps_in_block + first * vectors * LANES;
        if (p->mode == WEIGHTED_SUM) T(prefetch_weights)(p, t, c, chunks);
#define TILE(vectors) T(values_tile)(pairs, rows, vectors, w_rows, v, vectors * LANES, steps, P_(alpha), \
                                              o + from * LANES, p->value_stride)
        VECTOR_CASES(TILE)
#undef TILE
    }
}

/* o of a group += w[row][column] @ values over the part of the block that it sees. */
INLINE void T(add_values)(const int pairs, const Params *p, const Task *t, ix r0, ix n, ix block, const REAL *const *w,
                          const REAL *values) {
    REAL *o = P_(o) + r0 * p->value_stride;
    ix keys_in_block = ix_min(p->block_k, t->lengths.kv_length - block * p->block_k);
#define ROWS(rows) T(values_rows)(pairs, rows, p, t, w, o, values, keys_in_block)
    ROW_CASES(n, ROWS)
#undef ROWS
}

/* Not inlined, so that attention and weighted_sum share 13 KB of code per type and instruction set. */
STEP void T(add_real_values)(const Params *p, const Task *t, ix r0, ix n, ix block, const REAL *const *w,
                             const REAL *values) {
    T(add_values)(0, p, t, r0, n, block, w, values);
}

INLINE void T(values_group)(const int pairs, const Params *p, Task *t, ix r0, ix n, ix block, Packed kv) {
    const REAL *w[GROUP_ROWS];
    for (ix r = 0; r < n; r++) w[r] = pairs ? (const REAL *)t->pairs + r * (p->width / 2) : P_(s) + r * p->width;
    T(rescale_nonfinite)(p, t, r0, n);
    if (pairs) T(add_values)(1, p, t, r0, n, block, w, kv.values);
    else T(add_real_values)(p, t, r0, n, block, w, kv.values);
    T(add_nonfinite)(p, t, r0, 0, n, block, kv.nonfinite, *kv.n_nonfinite, 0, p->value_dim);
}

STEP void T(values_packed)(const Params *p, Task *t, ix r0, ix n, ix block, Packed kv) {
    T(values_group)(0, p, t, r0, n, block, kv);
}
#if PAIR_PRODUCTS
STEP void T(values_packed_pairs)(const Params *p, Task *t, ix r0, ix n, ix block, Packed kv) {
    T(values_group)(1, p, t, r0, n, block, kv);
}
#endif
