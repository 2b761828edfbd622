/* in_place.h (template over REAL; after gemm/rank1.h, gemm/strip.h, attention/values.h): scores and weighted sum of few
 * rows, for which packing a key costs more than its use.
 *
 * Keys and values are read in place, once, and widened in registers: such calls are bound by memory bandwidth. A score
 * is a dot product with the depth in the lanes, and one tree reduces LANES of them; rows that fill vectors take strips
 * instead. */

#define DOT_KEYS (TILE_VECTORS < LANES ? TILE_VECTORS : LANES)     /* keys of a register tile of 6 x DOT_KEYS sums */

/* The dtype of loads from rows of n elements: the array's own if they can be read in place, else NATIVE, of copies. */
static int T(in_place_dtype)(const Array *a, ix n, int *copied) {
    *copied = !T(loads)(a->dtype) || a->col != T(element_size)(a->dtype) || n % LANES != 0;
    return *copied ? NATIVE : a->dtype;
}

/* Calls with the dtype of loads as a constant. */
#if REAL_BITS == 32
#define DTYPE_CASES(call) switch (dtype) { case F16: call(F16); break; case BF16: call(BF16); break; \
                                                  case I8: call(I8); break; default: call(F32); }
#else
#define DTYPE_CASES(call) (void)dtype; do call(F64) while (0);
#endif

/* ------------------------------------------------------------------------------------------------------ scores */

/* Multiplies rows by DOT_KEYS keys and folds the products to one vector per row. */
INLINE void T(dots)(const int dtype, const int rows, const REAL *const *q, const char *const *k, Prefetch *prefetch,
                    ix depth, VEC (*part)[LANES / DOT_KEYS], ix at) {
    const ix size = T(element_size)(dtype);
    Prefetch near = *prefetch;
    ix d = 0, stop;
    do {
        VEC sum[GROUP_ROWS][DOT_KEYS];
        UNROLL for (int r = 0; r < rows; r++)
            UNROLL for (int v = 0; v < DOT_KEYS; v++) sum[r][v] = V(set1)(0);
        stop = ix_min(depth, d + CHAIN * LANES);
        for (ix i = d; i < stop; i += LANES) {
            VEC x[DOT_KEYS];
            UNROLL for (int v = 0; v < DOT_KEYS; v++) x[v] = T(load_as)(dtype, k[v] + i * size);
            prefetch_next(&near, DOT_KEYS * LANES * size);
            UNROLL for (int r = 0; r < rows; r++) {
                VEC y = V(loadu)(q[r] + i);
                UNROLL for (int v = 0; v < DOT_KEYS; v++) sum[r][v] = PRODUCT(dtype == PAIRS, x[v], y, sum[r][v]);
            }
        }
        UNROLL for (int r = 0; r < rows; r++) {
            VEC x = V(fold)(sum[r]);
            if (d) x += part[r][at];
            part[r][at] = x;
        }
        d = stop;
    } while (d < depth);
    *prefetch = near;
}

/* Loads the scales of int8 keys first .. first + LANES, of which `valid` exist. */
INLINE VEC T(load_scales)(const float *scale, ix first, ix valid) {
#if REAL_BITS == 32
    if (valid == LANES) return V(loadu)(scale + first);
#endif
    REAL some[LANES] = {0};
    for (ix i = 0; i < valid; i++) some[i] = (REAL)scale[first + i];
    return V(loadu)(some);
}

/* Computes scores of up to six rows with the LANES keys at k. */
INLINE void T(dot_rows)(const int dtype, const int rows, const REAL *const *q_rows, const char *const *k,
                        Prefetch *prefetch, ix depth, REAL *s, ix stride) {
    const REAL *q[GROUP_ROWS];
    VEC part[GROUP_ROWS][LANES / DOT_KEYS];
    UNROLL for (int r = 0; r < rows; r++) q[r] = q_rows[r];
    for (ix i = 0; i < LANES; i += DOT_KEYS) T(dots)(dtype, rows, q, k + i, prefetch, depth, part, i / DOT_KEYS);
    UNROLL for (int r = 0; r < rows; r++) V(store)(s + r * stride, V(sums)(part[r]));
}

/* Computes scores of all rows with LANES keys at k, in place or widened; `key` is their address in the array. */
static __attribute__((noinline)) void T(score_strips)(const int pairs, const Params *p, const Task *t, const char *k,
                                                      ix row, const char *key, REAL *s) {
    const Array *a = &p->key;
    const ix depth = pairs ? p->head_dim / 2 : p->head_dim, bytes = p->head_dim * T(element_size)(a->dtype);
    Prefetch prefetch = {0};
    if (!t->key_rows) prefetch = prefetch_from(a, bytes, key + PREFETCH_BYTES / bytes * a->row);
    for (ix r = 0; r < t->rows; r += T(STRIP)) {
        const REAL *q = P_(strips) + r * p->depth_stride;
        if (pairs) T(strip_scores)(1, q, k, row, depth, &prefetch, s + r * p->width, p->width);
        else T(strip_scores)(0, q, k, row, depth, &prefetch, s + r * p->width, p->width);
        prefetch = (Prefetch){0};
    }
}

/* Sets the addresses of LANES keys: in place, or widened to REAL in t->line. Columns past `valid` repeat the last key;
 * they are masked later. */
INLINE void T(find_keys)(const int dtype, int copied, int widened, const Params *p, Task *t, ix key, ix valid,
                         const char **k) {
    const Array *a = &p->key;
    for (ix v = 0; v < LANES; v++) {
        REAL *line = (REAL *)t->line + v * p->depth_stride;
        k[v] = t->key + row_of_key(t, key + ix_min(v, valid - 1)) * a->row;
        if (!copied && !widened) continue;
        if (dtype == PAIRS && !copied) memcpy(line, k[v], 2 * p->head_dim);
        else if (dtype == PAIRS) LOAD_PAIRS(k[v], a->col, p->head_dim, line);
        else if (copied) {
            T(load_row)(k[v], a->col, a->dtype, p->head_dim, line);
            for (ix d = p->head_dim; d < p->depth_stride; d++) line[d] = 0;
        } else for (ix d = 0; d < p->head_dim; d += LANES)
            V(store)(line + d, T(load_as)(dtype, k[v] + d * T(element_size)(dtype)));
        k[v] = (const char *)line;
    }
}

/* Prefetches keys ahead of `key`: by the cursor that is returned where LANES of them lie in consecutive rows, as in
 * pages; in bursts elsewhere. */
INLINE Prefetch T(prefetch_keys)(const Params *p, const Task *t, ix key, int from_start) {
    const Array *a = &p->key;
    const ix bytes = p->head_dim * T(element_size)(a->dtype);
    const ix ahead = key + ix_max(GATHER_AHEAD, PREFETCH_BYTES / ix_max(bytes, 1)), last = ahead + LANES - 1;
    const int in_run = last < t->lengths.kv_length && t->key_rows[last] - t->key_rows[ahead] == LANES - 1;
    if (from_start || (!in_run && key % GATHER_AHEAD == 0))
        T(prefetch_rows)(t, a, t->key, p->head_dim, key, from_start);
    if (!in_run) return (Prefetch){0};
    return prefetch_from(a, bytes, t->key + t->key_rows[ahead] * a->row);
}

/* Scales the scores of `valid` int8 keys from column j on, and excludes the columns past them. */
INLINE void T(close_scores)(const Params *p, Task *t, ix n, ix block, ix j, ix valid) {
    VEC scale = V(set1)(1);
    if (t->key_scale) scale = T(load_scales)(t->key_scale, block * p->block_k + j, valid);
    for (ix r = 0; r < n && (t->key_scale || valid < LANES); r++) {
        REAL *s = P_(s) + r * p->width + j;
        V(store)(s, V(keep_bits)(V(load)(s) * scale, (1u << valid) - 1, V(set1)(-INFINITY)));
    }
}

INLINE void T(find_peaks)(const Params *p, Task *t, ix n) {
    for (ix r = 0; r < n; r++) {
        VEC peak = V(set1)(-INFINITY);
        for (ix j = t->from; j < t->to; j += LANES) peak = V(max)(V(load)(P_(s) + r * p->width + j), peak);
        V(store)(P_(peaks) + r * LANES, peak);
    }
}

INLINE void T(score_keys)(const int dtype, int copied, const Params *p, Task *t, ix n, ix block) {
    const Array *a = &p->key;
    const ix depth = dtype == PAIRS ? p->head_dim / 2 : p->depth_stride, each = rows_of_tile(n);
    const char *keys = t->key + block * p->block_k * a->row, *k[LANES];
    const REAL *const *q_rows = (const REAL *const *)t->q_rows;
    const int strips = p->unfused == STRIPS;
    Prefetch prefetch = {0}, none = {0};
    if (!t->key_rows)
        prefetch = prefetch_ahead_of(a, p->head_dim * T(element_size)(a->dtype), keys, t->from, 0);
    for (ix j = t->from; j < t->to; j += LANES) {
        ix valid = ix_min(LANES, t->column_stop - j);
        const char *key = keys + j * a->row;
        if (t->key_rows) prefetch = T(prefetch_keys)(p, t, block * p->block_k + j, j == t->from);
        /* Rows a multiple of 4096 bytes apart share a cache set, so strips copy them. */
        const int as_is = strips && !copied && !t->key_rows && (dtype == NATIVE || dtype == PAIRS) && valid == LANES
            && a->row % 4096 != 0;
        if (!as_is) T(find_keys)(dtype, copied, strips, p, t, block * p->block_k + j, valid, k);
        if (strips)
            T(score_strips)(dtype == PAIRS, p, t, as_is ? key : k[0],
                            as_is ? a->row : p->depth_stride * (ix)sizeof(REAL), key, P_(s) + j);
        else for (ix r = 0; r < n; r += each) {
            REAL *s = P_(s) + r * p->width + j;
            ix m = ix_min(each, n - r);
#define ROWS(rows) T(dot_rows)(dtype, rows, q_rows + r, k, r ? &none : &prefetch, depth, s, p->width)
            ROW_CASES(m, ROWS)
#undef ROWS
        }
        T(close_scores)(p, t, n, block, j, valid);
    }
    T(find_peaks)(p, t, n);
}

STEP void T(scores_in_place)(const Params *p, Task *t, ix n, ix block) {
    int copied, dtype = T(in_place_dtype)(&p->key, p->head_dim, &copied);
#define KIND(type) { T(score_keys)(type, copied, p, t, n, block); break; }
    DTYPE_CASES(KIND)
#undef KIND
}

/* ------------------------------------------------------------------------------------------------------ values */

/* o = o * alpha + sum, unless a sum is not finite: then it stores nothing and returns 0. */
INLINE int T(store_finite)(const int rows, const int vectors, const REAL *alpha, VEC (*sum)[TILE_VECTORS], REAL *o,
                           ix o_stride, int check) {
    VEC odd = V(set1)(0);
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int i = 0; i < vectors; i++) {
            sum[r][i] = V(fma)(V(set1)(alpha[r]), V(load)(o + r * o_stride + i * LANES), sum[r][i]);
            odd += sum[r][i] - sum[r][i];
        }
    if (check && !V(all_zero)(odd)) return 0;
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int i = 0; i < vectors; i++) V(store)(o + r * o_stride + i * LANES, sum[r][i]);
    return 1;
}

/* o = o * alpha + weights @ values for rows x vectors, as values_tile() of values.h, but for any dtype; stores nothing
 * and returns 0 if a sum is not finite. */
INLINE int T(sum_tile)(const int dtype, const int in_runs, const int rows, const int vectors, const REAL *w,
                       ix w_stride, const char *v, ix v_stride, const int64_t *places, ix run, Prefetch *prefetch,
                       ix keys, const REAL *alpha, REAL *o, ix o_stride) {
    VEC sum[TALL_ROWS][TILE_VECTORS];
    const REAL *w_rows[TALL_ROWS];
    UNROLL for (int r = 0; r < rows; r++) w_rows[r] = w + r * w_stride;
    T(rank1)(dtype, in_runs, rows, vectors, w_rows, 1, v, v_stride, places, run, keys, prefetch, sum, NULL);
    return T(store_finite)(rows, vectors, alpha, sum, o, o_stride, 1);
}

/* Narrower chunks of dtypes other than REAL are copied to L1: reading them in place would double the code. */
INLINE int T(in_place_chunk)(const int dtype, ix vectors) { return dtype == NATIVE || vectors == TILE_VECTORS; }

INLINE int T(sum_vectors)(const int dtype, const int in_runs, const int rows, ix vectors, const REAL *w, ix w_stride,
                          const char *v, ix v_stride, const int64_t *places, ix run, Prefetch *prefetch, ix keys,
                          const REAL *alpha, REAL *o, ix o_stride) {
    int finite = 1;
#define TILE(vectors) finite = T(sum_tile)(dtype, in_runs, rows, vectors, w, w_stride, v, v_stride, places, run, \
                                           prefetch, keys, alpha, o, o_stride)
    if (rows > GROUP_ROWS && (dtype != NATIVE || vectors == TALL_VECTORS)) TILE(TALL_VECTORS);
    else if (rows > GROUP_ROWS) TILE(1);
    else if (dtype == NATIVE) VECTOR_CASES(TILE)
    else TILE(TILE_VECTORS);
#undef TILE
    return finite;
}

static int T(sum_rows)(int dtype, ix n, ix vectors, const REAL *w, ix w_stride, const char *v, ix v_stride,
                       const int64_t *places, ix run, Prefetch *prefetch, ix keys, const REAL *alpha, REAL *o,
                       ix o_stride) {
    int finite = 1;
#define ROWS(rows) finite = T(sum_vectors)(kind, in_runs, rows, vectors, w, w_stride, v, v_stride, places, run, \
                                           prefetch, keys, alpha, o, o_stride)
#define KIND(type) { \
        const int kind = type; \
        if (places) { const int in_runs = 1; TALL_CASES(n, ROWS) } \
        else { const int in_runs = 0; TALL_CASES(n, ROWS) } \
        break; }
    DTYPE_CASES(KIND)
#undef KIND
#undef ROWS
    return finite;
}

/* Recomputes sums of rows first .. stop that are not finite in one vector of columns. Row by row, because the keys that
 * one row sees must not change another's bits; vector by vector, because tiles of every shape consist of vectors. The
 * first pass excludes values that are not finite, which keeps the bits of rows that do not see them. If a sum is still
 * not finite, which depends on visible values alone, the second pass also excludes values of at least LARGEST. Not
 * inlined, because that slows the calling loops by 4 % (AVX2). */
static __attribute__((noinline, cold)) void T(sum_nonfinite)(const Params *p, Task *t, ix first, ix stop, ix block,
                                                             ix from, ix keys, ix vector, const REAL *alpha) {
    const ix column = vector * LANES, valid = ix_min(LANES, p->value_dim - column);
    ix n_nonfinite = 0;
    REAL *copy = t->packed.values;
    Prefetch none = {0};
    for (ix r = first; r < stop; r++) {
        REAL *o = P_(o) + r * p->value_stride + column;
        const REAL *w = P_(s) + r * p->width + from;
        for (int pass = 0, finite = 0; pass < 2 && !finite; pass++) {
            n_nonfinite = 0;
            for (ix j = 0; j < keys; j++) {
                REAL *x = copy + j * LANES;
                int excluded = 0;
                T(load_value)(p, t, block * p->block_k + from + j, column, valid, x);
                for (ix i = 0; i < valid; i++) excluded |= !(FABS(x[i]) < (pass ? LARGEST : INFINITY));
                for (ix i = excluded ? 0 : valid; i < LANES; i++) x[i] = 0;
                if (excluded) t->packed.nonfinite[n_nonfinite++] = (int32_t)(from + j);
            }
            finite = T(sum_tile)(NATIVE, 0, 1, 1, w, 0, (char *)copy, LANES * sizeof(REAL), NULL, 0, &none, keys,
                                  alpha + r, o, 0);
            /* The weights or earlier sums are not finite, so neither is the row. */
            if (pass && !finite)
                T(values_tile)(0, 1, 1, &w, copy, LANES, keys, alpha + r, o, 0);
        }
        T(add_nonfinite)(p, t, 0, r, r + 1, block, t->packed.nonfinite, n_nonfinite, column, column + valid);
    }
}

/* Copies n value rows from key `first` on that follow from no stride, widened and padded; returns the copies. */
static const char *T(gather_values)(const Params *p, Task *t, ix first, ix n, int from_start) {
    const Array *a = &p->value;
    for (ix j = 0; j < n; j++) {
        REAL *x = (REAL *)t->gathered + j * p->value_stride;
        if (j % GATHER_AHEAD == 0) T(prefetch_rows)(t, a, t->value, p->value_dim, first + j, from_start && j == 0);
        T(load_row)(t->value + t->key_rows[first + j] * a->row, a->col, a->dtype, p->value_dim, x);
        for (ix d = p->value_dim; d < p->value_stride; d++) x[d] = 0;
    }
    return t->gathered;
}

/* A cursor that prefetches value rows from `key` on, as far as they are consecutive. */
static Prefetch T(prefetch_values)(const Params *p, const Task *t, ix key) {
    const Array *a = &p->value;
    if (key >= t->lengths.kv_length) return (Prefetch){0};
    return prefetch_from(a, p->value_dim * T(element_size)(a->dtype), t->value + t->key_rows[key] * a->row);
}

/* Multiplies the weights of a step by the scales of int8 values. */
INLINE void T(scale_weights)(const float *scale, ix n, ix keys, const REAL *w, ix w_stride, REAL *scaled) {
    for (ix r = 0; r < n; r++)
        for (ix j = 0; j < keys; j++) scaled[r * IN_PLACE_KEYS + j] = w[r * w_stride + j] * (REAL)scale[j];
}

/* o = o * alpha + weights @ values in steps of IN_PLACE_KEYS keys, counted from key 0: a step's values stay in L1 for
 * all chunks of columns and register tiles of rows. The scales of int8 values multiply the weights. Rows of pages are
 * read in runs (0.88 of the rate of contiguous ones, float32, 16 keys a page, 512 bytes a row; copied first: 0.65);
 * shorter runs are copied. */
STEP void T(values_in_place)(const Params *p, Task *t, ix n, ix block) {
    const Array *a = &p->value;
    const REAL *alpha = P_(alpha), ones[IN_PLACE_ROWS] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
    const ix each = rows_of_sums(n);
    const int twice = n - each > GROUP_ROWS;
    REAL scaled[IN_PLACE_ROWS * IN_PLACE_KEYS];
    Prefetch none = {0};
    int copied, dtype = T(in_place_dtype)(a, p->value_dim, &copied);
    const int own = dtype, own_copied = copied;
    T(rescale_nonfinite)(p, t, 0, n);
    for (ix from = t->column, stop; from < t->column_stop; from = stop, alpha = ones) {
        const REAL *w = P_(s) + from;
        ix w_stride = p->width;
        stop = ix_min((from / IN_PLACE_KEYS + 1) * IN_PLACE_KEYS, t->column_stop);
        if (t->value_scale) {
            const float *scale = t->value_scale + block * p->block_k + from;
            T(scale_weights)(scale, n, stop - from, w, w_stride, scaled);
            w = scaled;
            w_stride = IN_PLACE_KEYS;
        }
        const ix first = block * p->block_k + from, bytes = p->value_dim * T(element_size)(a->dtype);
        const int64_t *places = t->key_rows ? t->key_rows + first : NULL;
        const ix run = places ? run_of_rows(t, first, stop - from) : 0;
        const int gathered = places && run < SHORT_RUN;
        const char *values = t->value + (places ? 0 : first * a->row);
        const ix row = gathered ? p->value_stride * (ix)sizeof(REAL) : a->row;
        const ix col = gathered ? (ix)sizeof(REAL) : a->col;
        Prefetch prefetch = {0};
        ix prefetched = 0;      /* bytes of the next step's rows, in pages */
        copied = own_copied && !gathered, dtype = gathered ? NATIVE : own;
        if (gathered) values = T(gather_values)(p, t, first, stop - from, from == t->column), places = NULL;
        else if (!places) prefetch = prefetch_ahead_of(a, bytes, values, 0, twice);
        else if (from == t->column) T(prefetch_rows)(t, a, t->value, p->value_dim, first, 1);
        for (ix c = 0; c < T(chunks)(p); c++) {
            ix start = T(chunk_start)(p, c), vectors = T(chunk_start)(p, c + 1) - start, v_stride = row;
            const char *v = values + start * LANES * col;
            int as_is = !copied && T(in_place_chunk)(dtype, vectors);
            if (!as_is) {
                ix valid = ix_min(vectors * LANES, p->value_dim - start * LANES);
                memset(t->line, 0, vectors * LANES * sizeof(REAL));
                T(pack_chunk)(0, a, v, places, NULL, stop - from, valid, vectors, t->line, t->packed.keys);
                v = t->packed.keys;
                v_stride = vectors * LANES * (ix)sizeof(REAL);
            }
            for (ix r = 0, m; r < n; r += m) {
                REAL *o = P_(o) + r * p->value_stride + start * LANES;
                m = ix_min(each, n - r);
                const ix wide = vectors_of_sums(m, vectors), size = LANES * T(element_size)(as_is ? dtype : NATIVE);
                for (ix i = 0; i < vectors; i += wide) {
                    const ix now = ix_min(wide, vectors - i);
                    if (places && (!r || twice)) {
                        prefetch = T(prefetch_values)(p, t, block * p->block_k + stop + prefetched / bytes);
                        prefetch.half = twice;
                        prefetched += (stop - from) * now * size >> twice;
                    }
                    if (!T(sum_rows)(as_is ? dtype : NATIVE, m, now, w + r * w_stride, w_stride, v + i * size, v_stride,
                                     as_is ? places : NULL, run, r && !twice ? &none : &prefetch, stop - from,
                                     alpha + r, o + i * LANES, p->value_stride))
                        for (ix k = start + i; k < start + ix_min(i + wide, vectors); k++)
                            T(sum_nonfinite)(p, t, r, r + m, block, from, stop - from, k, alpha);
                }
            }
        }
    }
}
