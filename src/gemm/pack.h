/* pack.h (template over REAL; after gemm/rows.h): packs a block's keys and values from user memory. */

/* Packs keys first .. first + n of a kv head into panels [panel][depth][PANEL]. */
static void T(pack_keys)(const Params *p, const char *key, const float *scale, ix first, ix n, REAL *dst) {
    const Array *a = &p->key;
    ix depth = p->head_dim;
    int contiguous = a->dtype == NATIVE && a->col == (ix)sizeof(REAL);
    for (ix j = 0; j < n; j += LANES) {
        REAL *panel = dst + (j / PANEL) * PANEL * depth + j % PANEL;
        ix valid = ix_min(LANES, n - j);
        for (ix d = 0; d < depth; d += LANES) {
            ix width = ix_min(LANES, depth - d);
            VEC square[LANES];
            for (ix i = 0; i < LANES; i++) {
                const char *src = key + (first + j + i) * a->row + d * a->col;
                /* Hardware prefetchers do not follow 16 streams. */
                __builtin_prefetch(src + LANES * a->row);
                if (i >= valid) square[i] = V(set1)(0);
                else if (contiguous && width == LANES) square[i] = V(loadu)((const REAL *)src);
                else {
                    REAL line[LANES] = {0};
                    T(load_row)(src, a->col, a->dtype, width, line);
                    square[i] = V(loadu)(line);
                    if (scale) square[i] *= V(set1)((REAL)scale[first + j + i]);
                }
            }
            V(transpose)(square);
            for (ix i = 0; i < width; i++) V(store)(panel + (d + i) * PANEL, square[i]);
        }
    }
    /* Columns after the last vector of keys stay unset: tiles are whole vectors, so none reads them. */
}

/* Values are packed in chunks of whole vectors, whose widths differ by at most one vector. */
INLINE ix T(chunks)(const Params *p) { return ceil_div(p->value_stride / LANES, TILE_VECTORS); }
INLINE ix T(chunk_start)(const Params *p, ix c) { return c * (p->value_stride / LANES) / T(chunks)(p); }

/* Rare: zeroes the value rows that have NaN or an entry of at least LARGEST, and lists them (attention/nonfinite.h). */
static void T(exclude_nonfinite)(const Params *p, ix n, Packed kv) {
    for (ix j = 0; j < n; j++) {
        int excluded = 0;
        for (int pass = 0; pass <= excluded && pass < 2; pass++) {
            for (ix c = 0; c < T(chunks)(p); c++) {
                ix from = T(chunk_start)(p, c), width = T(chunk_start)(p, c + 1) - from;
                REAL *x = (REAL *)kv.values + from * LANES * n + j * width * LANES;
                for (ix i = 0; i < width * LANES; i++) {
                    if (pass) x[i] = 0;
                    else excluded |= !(FABS(x[i]) < LARGEST);
                }
            }
        }
        if (excluded) kv.nonfinite[(*kv.n_nonfinite)++] = (int32_t)j;
    }
}

INLINE VINT T(pack_chunk)(const int contiguous, const Array *a, const char *src, const float *scale, ix n, ix valid,
                          ix vectors, REAL *line, REAL *dst) {
    VINT large = {0};
    for (ix j = 0; j < n; j++, src += a->row, dst += vectors * LANES) {
        const REAL *x = (const REAL *)src;
        if (!contiguous) {
            T(load_row)(src, a->col, a->dtype, valid, line);
            x = line;
        }
        for (ix v = 0; v < vectors; v++) {
            VEC y = V(loadu)(x + v * LANES);
            if (v * sizeof(VEC) % 64 == 0) __builtin_prefetch(src + 16 * a->row + v * (ix)sizeof(VEC));
            if (!contiguous && scale) y *= V(set1)((REAL)scale[j]);
            large |= ~((VEC)((VINT)y & MAGNITUDE) < V(set1)(LARGEST));
            V(store)(dst + v * LANES, y);
        }
    }
    return large;
}

static void T(pack_values)(const Params *p, const char *value, const float *scale, ix first, ix n, REAL *line,
                           Packed kv) {
    const Array *a = &p->value;
    VINT large = {0}, none = {0};
    if (scale) scale += first;
    for (ix c = 0; c < T(chunks)(p); c++) {
        ix from = T(chunk_start)(p, c), vectors = T(chunk_start)(p, c + 1) - from;
        ix valid = ix_min(vectors * LANES, p->value_dim - from * LANES);
        const char *src = value + first * a->row + from * LANES * a->col;
        REAL *dst = (REAL *)kv.values + from * LANES * n;
        if (a->dtype == NATIVE && a->col == (ix)sizeof(REAL) && valid == vectors * LANES)
            large |= T(pack_chunk)(1, a, src, NULL, n, valid, vectors, line, dst);
        else {
            memset(line, 0, vectors * LANES * sizeof(REAL));
            large |= T(pack_chunk)(0, a, src, scale, n, valid, vectors, line, dst);
        }
    }
    if (memcmp(&large, &none, sizeof none)) T(exclude_nonfinite)(p, n, kv);
}

/* Loads columns start .. start + n of one value row, times its scale. */
static void T(load_value)(const Params *p, const Task *t, ix key, ix start, ix n, REAL *dst) {
    const Array *a = &p->value;
    T(load_row)(t->value + key * a->row + start * a->col, a->col, a->dtype, n, dst);
    if (t->value_scale)
        for (ix i = 0; i < n; i++) dst[i] *= (REAL)t->value_scale[key];
}

/* Whether the values of a task's only block already have the packed layout and are all below LARGEST. The check takes a
 * quarter of the time of a copy (64 keys, value_dim 64). */
static int T(packed_already)(const Params *p, const Task *t, ix n) {
    const Array *a = &p->value;
    const REAL *x = (const REAL *)t->value;
    VINT large = {0}, none = {0};
    if (p->shared || p->k_blocks > 1 || a->dtype != NATIVE || a->col != (ix)sizeof(REAL)
        || p->value_dim != p->value_stride
        || a->row != p->value_dim * (ix)sizeof(REAL) || T(chunks)(p) > 1 || (uintptr_t)x % sizeof(REAL)) return 0;
    for (ix i = 0; i < n * p->value_dim; i += LANES) {
        __builtin_prefetch((const char *)(x + i) + 2048);
        large |= ~((VEC)((VINT)V(loadu)(x + i) & MAGNITUDE) < V(set1)(LARGEST));
    }
    return !memcmp(&large, &none, sizeof none);
}

/* Packs a block of the task's kv head into the members of kv that are not NULL. */
STEP void T(pack)(const Params *p, Task *t, ix block, Packed kv) {
    ix first = block * p->block_k, n = ix_min(p->block_k, t->lengths.kv_length - first);
    if (kv.keys) T(pack_keys)(p, t->key, t->key_scale, first, n, kv.keys);
    if (!kv.values) return;
    *kv.n_nonfinite = 0;
    if (p->value_dim && T(packed_already)(p, t, n)) t->packed.values = (void *)t->value;
    else if (p->value_dim) T(pack_values)(p, t->value, t->value_scale, first, n, t->line, kv);
}
