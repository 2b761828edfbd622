/* pack.h (template over REAL; after gemm/rows.h): packs a block's keys and values from user memory. */

/* Rows by which keys and values are prefetched ahead, to PREFETCH_CACHE: half of them with AVX2 make 128 rows of latent
 * attention (1,128/1,1,8192,576/512) 1.03 to 1.06 times as long; with AVX-512 more were not measured. */
enum { T(KEYS_AHEAD) = VECTOR_BYTES == 32 ? 2 * LANES : LANES, T(VALUES_AHEAD) = VECTOR_BYTES == 32 ? 32 : 16 };

/* Sets the addresses of LANES keys from `key` on, of which `valid` exist, and those to prefetch meanwhile. Rows that
 * follow from no stride are prefetched from further ahead: nothing else fetches them. */
INLINE void T(find_rows)(const Task *t, const char *rows, ix row, ix key, ix valid, const char **at,
                         const char **ahead) {
    const ix last = t->lengths.kv_length - 1;
    for (ix i = 0; i < LANES; i++) {
        at[i] = rows + row_of_key(t, key + ix_min(i, valid - 1)) * row;
        ahead[i] = t->key_rows ? rows + t->key_rows[ix_min(key + GATHER_AHEAD + i, last)] * row
                               : at[i] + T(KEYS_AHEAD) * row;
    }
}

/* Transposes LANES keys by LANES depths from d on, contiguous elements of a dtype, into a panel. */
INLINE void T(pack_square)(const int dtype, const char *const *at, ix d, REAL *panel) {
    VEC square[LANES];
    UNROLL for (int i = 0; i < LANES; i++) square[i] = T(load_as)(dtype, at[i] + d * T(element_size)(dtype));
    V(transpose)(square);
    UNROLL for (int i = 0; i < LANES; i++) V(store)(panel + i * PANEL, square[i]);
}

/* The same for `keys` keys by `width` depths of any dtype and stride, times their scales unless NULL. */
static void T(pack_part)(const Array *a, const char *const *at, ix d, const float *scale, ix keys, ix width,
                         REAL *panel) {
    const int in_place = a->dtype == NATIVE && a->col == (ix)sizeof(REAL) && width == LANES;
    VEC square[LANES];
    for (ix i = 0; i < LANES; i++) {
        const char *src = at[i] + d * a->col;
        REAL line[LANES] = {0};
        if (i < keys && !in_place) T(load_row)(src, a->col, a->dtype, width, line);
        square[i] = V(loadu)(i < keys && in_place ? (const REAL *)src : line);
        if (i < keys && scale) square[i] *= V(set1)((REAL)scale[i]);
    }
    V(transpose)(square);
    for (ix i = 0; i < width; i++) V(store)(panel + i * PANEL, square[i]);
}

/* Packs keys first .. first + n of a kv head into panels [panel][depth][PANEL]. `dtype` is that of contiguous keys
 * without scales, else NATIVE. Hardware prefetchers do not follow as many streams as a square has rows. */
INLINE void T(pack_panels)(const int dtype, const Params *p, const Task *t, ix first, ix n, REAL *dst) {
    const Array *a = &p->key;
    const float *scale = t->key_scale ? t->key_scale + first : NULL;
    const char *at[LANES], *ahead[LANES];
    const ix depth = p->head_dim, size = T(element_size)(dtype);
    const int contiguous = a->dtype == dtype && a->col == size && !scale;
    for (ix j = 0; j < n; j += LANES) {
        REAL *panel = dst + (j / PANEL) * PANEL * depth + j % PANEL;
        const ix valid = ix_min(LANES, n - j);
        T(find_rows)(t, t->key, a->row, first + j, valid, at, ahead);
        for (ix d = 0; d < depth; d += LANES, panel += LANES * PANEL) {
            if (!contiguous || d * size % 64 == 0)
                for (ix i = 0; i < LANES; i++) __builtin_prefetch(ahead[i] + d * a->col, 0, PREFETCH_CACHE);
            if (contiguous && valid == LANES && d + LANES <= depth) T(pack_square)(dtype, at, d, panel);
            else T(pack_part)(a, at, d, scale ? scale + j : NULL, valid, ix_min(LANES, depth - d), panel);
        }
    }
    /* Columns after the last vector of keys stay unset: tiles are whole vectors, so none reads them. */
}

static void T(pack_keys)(const Params *p, const Task *t, ix first, ix n, REAL *dst) {
#if REAL_BITS == 32
    if (p->key.dtype == F16) { T(pack_panels)(F16, p, t, first, n, dst); return; }
    if (p->key.dtype == BF16) { T(pack_panels)(BF16, p, t, first, n, dst); return; }
#endif
    T(pack_panels)(NATIVE, p, t, first, n, dst);
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

/* Prefetches rows of n elements that follow from no stride to L2: those GATHER_AHEAD to twice that behind `key`, with
 * `first` those before them too. Bursts to L2 read random rows of 512 bytes at 4 GB/s, rows one by one to L1 at 2. */
static void T(prefetch_rows)(const Task *t, const Array *a, const char *rows, ix n, ix key, int first) {
    const ix bytes = a->col == T(element_size)(a->dtype) ? n * a->col : 0;
    const ix stop = ix_min(key + 2 * GATHER_AHEAD, t->lengths.kv_length);
    __asm__ volatile("");               /* without it the compiler finds no effect and drops the call */
    for (key += first ? 0 : GATHER_AHEAD; key < stop; key++)
        for (ix i = 0; i < bytes; i += 64) __builtin_prefetch(rows + t->key_rows[key] * a->row + i, 0, 2);
}

/* Packs a chunk of n value rows: those from `src` on, or with `rows` the rows of these numbers. */
INLINE VINT T(pack_chunk)(const int contiguous, const Array *a, const char *src, const int64_t *rows,
                          const float *scale, ix n, ix valid, ix vectors, REAL *line, REAL *dst) {
    const char *first = src;
    VINT large = {0};
    for (ix j = 0; j < n; j++, src += a->row, dst += vectors * LANES) {
        if (rows) src = first + rows[j] * a->row;
        const REAL *x = (const REAL *)src;
        if (!contiguous) {
            T(load_row)(src, a->col, a->dtype, valid, line);
            x = line;
        }
        for (ix v = 0; v < vectors; v++) {
            VEC y = V(loadu)(x + v * LANES);
            if (!rows && v * sizeof(VEC) % 64 == 0)
                __builtin_prefetch(src + T(VALUES_AHEAD) * a->row + v * (ix)sizeof(VEC), 0, PREFETCH_CACHE);
            if (!contiguous && scale) y *= V(set1)((REAL)scale[j]);
            large |= ~((VEC)((VINT)y & MAGNITUDE) < V(set1)(LARGEST));
            V(store)(dst + v * LANES, y);
        }
    }
    return large;
}

/* Packs whole chunks, contiguous elements of a dtype, row by row: reads memory in address order (512 values of 64
 * float32 on Zen 4: 12 cycles per line from memory instead of 30, 5.5 from L3 instead of 8). */
INLINE VINT T(pack_rows)(const int dtype, const Array *a, const char *src, ix n, ix chunks, REAL *dst) {
    const ix bytes = PANEL * T(element_size)(dtype);
    VINT large = {0};
    for (ix j = 0; j < n; j++, src += a->row, dst += PANEL)
        for (ix c = 0; c < chunks; c++) {
            const char *x = src + c * bytes;
            for (ix i = 0; i < bytes; i += 64)
                __builtin_prefetch(x + T(VALUES_AHEAD) * a->row + i, 0, PREFETCH_CACHE);
            UNROLL for (int v = 0; v < TILE_VECTORS; v++) {
                VEC y = T(load_as)(dtype, x + v * (bytes / TILE_VECTORS));
                large |= ~((VEC)((VINT)y & MAGNITUDE) < V(set1)(LARGEST));
                V(store)(dst + c * n * PANEL + v * LANES, y);
            }
        }
    return large;
}

/* The same for all chunks of a block, PACK_CHUNKS at a time. */
INLINE VINT T(pack_whole_chunks)(const int dtype, const Params *p, const char *src, ix n, REAL *dst) {
    const ix bytes = PANEL * T(element_size)(dtype), chunks = T(chunks)(p);
    VINT large = {0};
    for (ix c = 0, m; c < chunks; c += m) {
        m = ix_min(PACK_CHUNKS, chunks - c);
        large |= T(pack_rows)(dtype, &p->value, src + c * bytes, n, m, dst + c * n * PANEL);
    }
    return large;
}

/* Any values: rows that follow from no stride, partial chunks, other strides and dtypes, scales. */
static VINT T(pack_chunks)(const Params *p, const Task *t, ix first, ix n, REAL *packed) {
    const Array *a = &p->value;
    const float *scale = t->value_scale ? t->value_scale + first : NULL;
    /* All chunks of a few rows at a time where these are prefetched as whole rows. */
    const ix step = t->key_rows ? GATHER_AHEAD : n;
    VINT large = {0};
    for (ix j = 0, m; j < n; j += m) {
        const int64_t *rows = t->key_rows ? t->key_rows + first + j : NULL;
        const char *values = t->value + (rows ? 0 : first * a->row);
        m = ix_min(step, n - j);
        if (rows) T(prefetch_rows)(t, a, t->value, p->value_dim, first + j, j == 0);
        for (ix c = 0; c < T(chunks)(p); c++) {
            ix from = T(chunk_start)(p, c), vectors = T(chunk_start)(p, c + 1) - from;
            ix valid = ix_min(vectors * LANES, p->value_dim - from * LANES);
            const char *src = values + from * LANES * a->col;
            REAL *dst = packed + from * LANES * n + j * vectors * LANES;
            if (a->dtype == NATIVE && a->col == (ix)sizeof(REAL) && valid == vectors * LANES)
                large |= T(pack_chunk)(1, a, src, rows, NULL, m, valid, vectors, t->line, dst);
            else {
                memset(t->line, 0, vectors * LANES * sizeof(REAL));
                large |= T(pack_chunk)(0, a, src, rows, scale, m, valid, vectors, t->line, dst);
            }
        }
    }
    return large;
}

static void T(pack_values)(const Params *p, const Task *t, ix first, ix n, Packed kv) {
    const Array *a = &p->value;
    const char *src = t->value + first * a->row;
    const int whole = !t->key_rows && !t->value_scale && p->value_dim % PANEL == 0
        && a->col == T(element_size)(a->dtype);
    VINT large, none = {0};
    if (whole && a->dtype == NATIVE) large = T(pack_whole_chunks)(NATIVE, p, src, n, kv.values);
#if REAL_BITS == 32
    else if (whole && a->dtype == F16) large = T(pack_whole_chunks)(F16, p, src, n, kv.values);
    else if (whole && a->dtype == BF16) large = T(pack_whole_chunks)(BF16, p, src, n, kv.values);
#endif
    else large = T(pack_chunks)(p, t, first, n, kv.values);
    if (memcmp(&large, &none, sizeof none)) T(exclude_nonfinite)(p, n, kv);
}

/* Loads columns start .. start + n of one value row, times its scale. */
static void T(load_value)(const Params *p, const Task *t, ix key, ix start, ix n, REAL *dst) {
    const Array *a = &p->value;
    T(load_row)(t->value + row_of_key(t, key) * a->row + start * a->col, a->col, a->dtype, n, dst);
    if (t->value_scale)
        for (ix i = 0; i < n; i++) dst[i] *= (REAL)t->value_scale[key];
}

/* Whether the values of a task's only block already have the packed layout and are all below LARGEST. The check takes a
 * quarter of the time of a copy (64 keys, value_dim 64). */
static int T(packed_already)(const Params *p, const Task *t, ix n) {
    const Array *a = &p->value;
    const REAL *x = (const REAL *)t->value;
    VINT large = {0}, none = {0};
    if (p->shared || t->key_rows || p->k_blocks > 1 || a->dtype != NATIVE || a->col != (ix)sizeof(REAL)
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
    if (kv.keys) T(pack_keys)(p, t, first, n, kv.keys);
    if (!kv.values) return;
    *kv.n_nonfinite = 0;
    if (p->value_dim && T(packed_already)(p, t, n)) t->packed.values = (void *)t->value;
    else if (p->value_dim) T(pack_values)(p, t, first, n, kv);
}
