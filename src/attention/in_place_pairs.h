/* in_place_pairs.h (template for float; after attention/in_place.h): the steps of in_place.h for bfloat16 dot products.
 * Scores pair adjacent depths of a key; the weighted sum pairs keys 2 i and 2 i + 1, whose value rows are interleaved
 * in registers. */
#if PAIR_PRODUCTS

STEP void scores_in_place_pairs_f32(const Params *p, Task *t, ix n, ix block) {
    score_keys_f32(PAIRS, p->key.col != 2, p, t, n, block);
}

/* o = o * alpha + weights @ values for rows x vectors, over pairs of keys. Stores nothing and returns 0 if a sum is not
 * finite (with `check`), or a value is subnormal (with `check` == 2). */
INLINE int sum_pairs(const int rows, const int vectors, const float *w, ix w_stride, const char *v, ix v_stride,
                     Prefetch *prefetch, ix keys, int check, const float *alpha, float *o, ix o_stride) {
    vf sum[TALL_ROWS][TILE_VECTORS], smallest = (vf)~(vfi){0};
    const float *w_rows[TALL_ROWS];
    UNROLL for (int r = 0; r < rows; r++) w_rows[r] = w + r * w_stride;
    rank1_f32(ROW_PAIRS, 0, rows, vectors, w_rows, 1, v, v_stride, NULL, 0, keys, prefetch, sum, &smallest);
    if (check == 2 && vf_subnormal_pairs(smallest)) return 0;    /* the product took them for 0 */
    return store_finite_f32(rows, vectors, alpha, sum, o, o_stride, check);
}

static int sum_pairs_rows(ix n, const float *w, ix w_stride, const char *v, ix v_stride, Prefetch *prefetch, ix keys,
                          int check, const float *alpha, float *o, ix o_stride) {
    int finite = 1;
#define ROWS(rows) \
    finite = sum_pairs(rows, rows > GROUP_ROWS ? TALL_VECTORS : TILE_VECTORS, w, w_stride, v, v_stride, prefetch, \
                       keys, check, alpha, o, o_stride)
    TALL_CASES(n, ROWS)
#undef ROWS
    return finite;
}

/* Copies n columns from `start` on of the value rows of keys first .. first + keys, contiguous. */
static void copy_halves(const Params *p, const Task *t, ix first, ix keys, ix start, ix n, uint16_t *dst) {
    const Array *a = &p->value;
    for (ix j = first; j < first + keys; j++, dst += n) {
        const char *v = t->value + row_of_key(t, j) * a->row + start * a->col;
        if (t->key_rows && start == 0 && (j - first) % GATHER_AHEAD == 0)
            prefetch_rows_f32(t, a, t->value, p->value_dim, j, j == first);
        for (ix i = 0; i < n; i++) memcpy(dst + i, v + i * a->col, 2);
    }
}

/* sum_nonfinite() of in_place.h that excludes subnormal values too. It takes TALL_VECTORS from `start` on for every
 * tile shape, because the last rows of a head may have a wider tile than the others. */
static __attribute__((noinline, cold)) void sum_nonfinite_pairs(const Params *p, Task *t, ix first, ix stop, ix block,
                                                                ix from, ix keys, ix start, const float *alpha) {
    const ix width = TALL_VECTORS * VF;
    ix n_nonfinite = 0;
    uint16_t *copy = t->packed.values;
    Prefetch none = {0};
    for (ix r = first; r < stop; r++) {
        const float *w = (const float *)t->pairs + r * (p->width / 2) + from / 2;
        float *o = (float *)t->o + r * p->value_stride + start * VF;
        for (int pass = 0, finite = 0; !finite; pass++) {
            copy_halves(p, t, block * p->block_k + from, keys, start * VF, width, copy);
            n_nonfinite = 0;
            for (ix j = 0; j < keys; j++) {
                uint16_t *x = copy + j * width;
                int excluded = 0;
                for (ix i = 0; i < width; i++) {
                    unsigned magnitude = x[i] & 0x7FFF;
                    excluded |= magnitude >= (pass ? (127 + 95) << 7 : 0x7F80) || (magnitude && magnitude < 0x80);
                }
                if (excluded) memset(x, 0, 2 * width), t->packed.nonfinite[n_nonfinite++] = (int32_t)(from + j);
            }
            finite = sum_pairs(1, TALL_VECTORS, w, 0, (char *)copy, 2 * width, &none, keys, !pass, alpha + r, o, 0);
        }
        add_nonfinite_f32(p, t, 0, r, r + 1, block, t->packed.nonfinite, n_nonfinite, start * VF, start * VF + width);
    }
}

STEP void values_in_place_pairs_f32(const Params *p, Task *t, ix n, ix block) {
    const Array *a = &p->value;
    const char *values = t->value + block * p->block_k * a->row;
    const float *alpha = t->alpha, ones[IN_PLACE_ROWS] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
    const ix each = rows_of_sums(n), w_stride = p->width / 2;
    const int twice = n - each > GROUP_ROWS;
    Prefetch none = {0};
    rescale_nonfinite_f32(p, t, 0, n);
    for (ix from = t->column / 2 * 2, stop; from < t->column_stop; from = stop, alpha = ones) {
        const float *w = (const float *)t->pairs + from / 2;
        stop = ix_min((from / IN_PLACE_KEYS + 1) * IN_PLACE_KEYS, t->column_stop);
        Prefetch prefetch = {0};
        if (!t->key_rows) prefetch = prefetch_ahead_of(a, 2 * p->value_dim, values, from, twice);
        for (ix c = 0; c < chunks_f32(p); c++) {
            ix start = chunk_start_f32(p, c), row = a->row;
            const char *v = values + from * a->row + start * VF * a->col;
            if (a->col != 2 || t->key_rows) {
                copy_halves(p, t, block * p->block_k + from, stop - from, start * VF, TILE_VECTORS * VF,
                            t->packed.keys);
                v = t->packed.keys;
                row = 2 * TILE_VECTORS * VF;
            }
            for (ix r = 0, m; r < n; r += m) {
                float *o = (float *)t->o + r * p->value_stride + start * VF;
                m = ix_min(each, n - r);
                const ix wide = vectors_of_sums(m, TILE_VECTORS);
                for (ix i = 0; i < TILE_VECTORS; i += wide)
                    if (!sum_pairs_rows(m, w + r * w_stride, w_stride, v + 2 * i * VF, row,
                                        r && !twice ? &none : &prefetch, stop - from, 2, alpha + r, o + i * VF,
                                        p->value_stride))
                        for (ix k = start + i; k < start + i + wide; k += TALL_VECTORS)
                            sum_nonfinite_pairs(p, t, r, r + m, block, from, stop - from, k, alpha);
            }
        }
    }
}

#endif
