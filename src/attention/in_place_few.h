/* in_place_few.h (template over REAL; after attention/in_place.h): the steps of in_place.h for one or two query rows.
 *
 * The tiles of in_place.h hold two sums of a row with AVX2, which wait for each other; those below hold 8 sums or 4 of
 * each of two rows. float32 and float64 come to L1 in address order first; narrower dtypes, whose arithmetic takes
 * longer, are prefetched meanwhile (f16 1,32/16,1,8192,128: 0.70 to 0.87 of the time). The sums have the order of
 * in_place.h. */

#define USES_FEW (VECTOR_BYTES == 32)    /* AVX2: measured on Zen 4; tiles of AVX-512 have twice the sums */
enum { T(MOST_KEYS) = LANES < 8 ? LANES : 8, T(MOST_SUMS) = 8 };
#define FEW_TILE(rows, most) ((rows) == 1 ? (most) : 4)      /* vectors or keys of a tile */
#define FEW_CASES(n, call) switch (n) { case 1: call(1); break; default: call(2); }

/* Whether the steps below read the array's rows, which takes no copies. */
static inline int T(few)(const Array *a, ix rows, ix depth) {
    int copied = 1;
    if (USES_FEW && rows <= FEW_ROWS) T(in_place_dtype)(a, depth, &copied);
    return !copied;
}

/* ------------------------------------------------------------------------------------------------------ scores */

/* dots() of in_place.h for more keys at once. */
INLINE void T(few_dots)(const int dtype, const int rows, const int keys, const REAL *const *q, const char *const *k,
                        Prefetch *prefetch, ix depth, VEC (*part)[LANES / DOT_KEYS], ix at) {
    const ix size = T(element_size)(dtype);
    Prefetch near = *prefetch;
    ix d = 0, stop;
    do {
        VEC sum[FEW_ROWS][T(MOST_KEYS)];
        UNROLL for (int r = 0; r < rows; r++)
            UNROLL for (int v = 0; v < keys; v++) sum[r][v] = V(set1)(0);
        stop = ix_min(depth, d + CHAIN * LANES);
        for (ix i = d; i < stop; i += LANES) {
            VEC x[T(MOST_KEYS)];
            UNROLL for (int v = 0; v < keys; v++) x[v] = T(load_as)(dtype, k[v] + i * size);
            prefetch_next(&near, keys * LANES * size);
            UNROLL for (int r = 0; r < rows; r++) {
                VEC y = V(loadu)(q[r] + i);
                UNROLL for (int v = 0; v < keys; v++) sum[r][v] = V(fma)(x[v], y, sum[r][v]);
            }
        }
        UNROLL for (int r = 0; r < rows; r++)
            UNROLL for (int v = 0; v < keys; v += DOT_KEYS) {
                VEC x = V(fold)(sum[r] + v);
                if (d) x += part[r][at + v / DOT_KEYS];
                part[r][at + v / DOT_KEYS] = x;
            }
        d = stop;
    } while (d < depth);
    *prefetch = near;
}

INLINE void T(few_dot_rows)(const int dtype, const int rows, const REAL *const *q_rows, const char *const *k,
                            Prefetch *prefetch, ix depth, REAL *s, ix stride) {
    const int keys = FEW_TILE(rows, T(MOST_KEYS));
    const REAL *q[FEW_ROWS];
    VEC part[FEW_ROWS][LANES / DOT_KEYS];
    UNROLL for (int r = 0; r < rows; r++) q[r] = q_rows[r];
    for (ix i = 0; i < LANES; i += keys)
        T(few_dots)(dtype, rows, keys, q, k + i, prefetch, depth, part, i / DOT_KEYS);
    UNROLL for (int r = 0; r < rows; r++) V(store)(s + r * stride, V(sums)(part[r]));
}

INLINE void T(few_score_keys)(const int dtype, const Params *p, Task *t, ix n, ix block) {
    const Array *a = &p->key;
    const ix first = block * p->block_k, bytes = p->head_dim * T(element_size)(dtype);
    const char *k[LANES];
    const REAL *const *q_rows = (const REAL *const *)t->q_rows;
    const int reads = dtype == NATIVE && !t->key_rows;
    Prefetch prefetch = {0};
    if (!t->key_rows && !reads) prefetch = prefetch_ahead_of(a, bytes, t->key + first * a->row, t->from, 0);
    for (ix j = t->from; j < t->to; j += LANES) {
        ix valid = ix_min(LANES, t->column_stop - j);
        REAL *s = P_(s) + j;
        if (t->key_rows) prefetch = T(prefetch_keys)(p, t, first + j, j == t->from);
        if (reads) read_rows(a, bytes, t->key + (first + j) * a->row, valid);
        T(find_keys)(dtype, 0, 0, p, t, first + j, valid, k);
#define ROWS(rows) T(few_dot_rows)(dtype, rows, q_rows, k, &prefetch, p->head_dim, s, p->width)
        FEW_CASES(n, ROWS)
#undef ROWS
        T(close_scores)(p, t, n, block, j, valid);
    }
    T(find_peaks)(p, t, n);
}

STEP void T(few_scores)(const Params *p, Task *t, ix n, ix block) {
    const int dtype = p->key.dtype;
#define KIND(type) { T(few_score_keys)(type, p, t, n, block); break; }
    DTYPE_CASES(KIND)
#undef KIND
}

/* ------------------------------------------------------------------------------------------------------ values */

/* A step of the weighted sum is one piece of keys or several, whose sums go on from those of the pieces before. */
typedef struct { const REAL *w; REAL *begun; ix w_stride, keys; int first, last; } T(Piece);

/* sum_tile() of in_place.h for a piece. Runs of `run` rows begin at row places[k], or all follow each other. */
INLINE int T(few_tile)(const int dtype, const int rows, const int vectors, const T(Piece) *piece, const char *v, ix row,
                       const int64_t *places, ix run, Prefetch *prefetch, const REAL *alpha, REAL *o, ix o_stride) {
    const REAL *w[FEW_ROWS];
    VEC sum[FEW_ROWS][T(MOST_SUMS)];
    REAL *begun = piece->begun;
    Prefetch near = *prefetch;
    UNROLL for (int r = 0; r < rows; r++) {
        w[r] = piece->w + r * piece->w_stride;
        UNROLL for (int i = 0; i < vectors; i++)
            sum[r][i] = piece->first ? V(set1)(0) : V(load)(begun + r * o_stride + i * LANES);
    }
    for (ix from = 0, stop; from < piece->keys; from = stop) {
        const char *at = v + (places ? places[from] : from) * row;
        stop = ix_min(from + run, piece->keys);
        for (ix k = from; k < stop; k++, at += row) {
            VEC x[T(MOST_SUMS)];
            UNROLL for (int i = 0; i < vectors; i++) x[i] = T(load_as)(dtype, at + i * LANES * T(element_size)(dtype));
            prefetch_next(&near, vectors * LANES * T(element_size)(dtype));
            UNROLL for (int r = 0; r < rows; r++) {
                VEC y = V(set1)(w[r][k]);
                UNROLL for (int i = 0; i < vectors; i++) sum[r][i] = V(fma)(y, x[i], sum[r][i]);
            }
        }
    }
    *prefetch = near;
    if (piece->last) {
        VEC odd = V(set1)(0);
        UNROLL for (int r = 0; r < rows; r++)
            UNROLL for (int i = 0; i < vectors; i++) {
                sum[r][i] = V(fma)(V(set1)(alpha[r]), V(load)(o + r * o_stride + i * LANES), sum[r][i]);
                odd += sum[r][i] - sum[r][i];
            }
        if (!V(all_zero)(odd)) return 0;
    }
    if (piece->last) begun = o;
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int i = 0; i < vectors; i++) V(store)(begun + r * o_stride + i * LANES, sum[r][i]);
    return 1;
}

static int T(few_sums)(int dtype, ix n, ix vectors, const T(Piece) *piece, const char *v, ix row, const int64_t *places,
                       ix run, Prefetch *prefetch, const REAL *alpha, REAL *o, ix o_stride) {
    int finite = 1;
#define TILE(rows, vectors) finite = T(few_tile)(kind, rows, vectors, piece, v, row, places, run, prefetch, alpha, o, \
                                                 o_stride)
#define ROWS(rows) { \
        const int wide = FEW_TILE(rows, T(MOST_SUMS)); \
        if (vectors == wide) TILE(rows, wide); \
        else if (vectors == 2) TILE(rows, 2); \
        else TILE(rows, 1); }
#define KIND(type) { const int kind = type; FEW_CASES(n, ROWS) break; }
    DTYPE_CASES(KIND)
#undef KIND
#undef ROWS
#undef TILE
    return finite;
}

/* values_in_place() of in_place.h. float32 and float64 are read piece by piece; narrower dtypes are prefetched
 * meanwhile, and so are rows of lists, which no hardware prefetcher foresees. */
STEP void T(few_values)(const Params *p, Task *t, ix n, ix block) {
    const Array *a = &p->value;
    const REAL *alpha = P_(alpha), ones[FEW_ROWS] = {1, 1};
    const int dtype = a->dtype;
    const ix size = T(element_size)(dtype), bytes = p->value_dim * size, all = p->value_stride / LANES;
    const ix wide = FEW_TILE(n, T(MOST_SUMS));
    REAL scaled[FEW_ROWS * IN_PLACE_KEYS];
    T(rescale_nonfinite)(p, t, 0, n);
    for (ix from = t->column, stop; from < t->column_stop; from = stop, alpha = ones) {
        T(Piece) piece = {.w = P_(s) + from, .w_stride = p->width, .begun = t->begun};
        stop = ix_min((from / IN_PLACE_KEYS + 1) * IN_PLACE_KEYS, t->column_stop);
        const ix first = block * p->block_k + from, keys = stop - from;
        if (t->value_scale) {
            T(scale_weights)(t->value_scale + first, n, keys, piece.w, piece.w_stride, scaled);
            piece.w = scaled, piece.w_stride = IN_PLACE_KEYS;
        }
        const int64_t *places = t->key_rows ? t->key_rows + first : NULL;
        const ix run = places ? run_of_rows(t, first, keys) : keys;
        const int listed = places && run < SHORT_RUN, reads = dtype == NATIVE && !listed;
        ix piece_keys = listed ? GATHER_AHEAD : IN_PLACE_KEYS;
        ix prefetched = 0;      /* bytes of the next step's rows, in pages */
        while (reads && piece_keys > 4 && piece_keys * bytes > PIECE_BYTES) piece_keys /= 2;
        Prefetch prefetch = {0};
        if (!places && !reads) prefetch = prefetch_ahead_of(a, bytes, t->value + first * a->row, 0, 0);
        if (places && !reads && !listed && from == t->column) T(prefetch_rows)(t, a, t->value, p->value_dim, first, 1);
        for (ix at = 0; at < keys; at += piece.keys, piece.w += piece.keys) {
            piece.keys = ix_min(piece_keys, keys - at);
            piece.first = at == 0, piece.last = at + piece.keys == keys;
            const int64_t *rows = places ? places + at : NULL;
            const char *values = places ? t->value : t->value + (first + at) * a->row;
            if (listed) T(prefetch_rows)(t, a, t->value, p->value_dim, first + at, from == t->column && !at);
            for (ix k = 0; reads && k < piece.keys; k += run)
                read_rows(a, bytes, values + (rows ? rows[k] : 0) * a->row, ix_min(run, piece.keys - k));
            for (ix start = 0, vectors; start < all; start += vectors) {
                REAL *o = P_(o) + start * LANES;
                vectors = all - start >= wide ? wide : all - start >= 2 ? 2 : 1;
                if (places && !reads && !listed) {
                    prefetch = T(prefetch_values)(p, t, block * p->block_k + stop + prefetched / bytes);
                    prefetched += keys * vectors * LANES * size;
                }
                if (!T(few_sums)(dtype, n, vectors, &piece, values + start * LANES * size, a->row, rows, run, &prefetch,
                                 alpha, o, p->value_stride))
                    for (ix k = start; k < start + vectors; k++)
                        T(sum_nonfinite)(p, t, 0, n, block, from, keys, k, alpha);
                piece.begun = (REAL *)t->begun + (start + vectors) * LANES;
            }
            piece.begun = t->begun;
        }
    }
}
