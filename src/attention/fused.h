/* fused.h (template over REAL; after gemm/strip.h, attention/queries.h, attention/epilogue.h): the fused kernel for
 * small heads: scores, softmax and weighted sum of a strip of rows in one pass, with keys and values in place.
 *
 * As in strip.h each lane is a row, so scores, maxima and row sums need no reduction across lanes; nothing is packed,
 * and each tile of scores prefetches a few lines of the next head. The operations have the order of the other paths,
 * hence equal bits. A head of 16 rows, 16 keys and depth 32 takes 1370 cycles instead of 2350, 520 of them for the
 * products (Zen 5). */

#if VECTOR_BYTES >= 32

/* Rows of n elements as the products read them: in place, or widened. */
typedef struct { const char *at; ix row; } T(Rows);

/* Vectors of the widest strip: with AVX2 it has 16 rows in double too, so that keys, which fill L1, come from L2 half
 * as often and the weighted sum has tiles of 5 and 6 rows instead of 4 (64,8,64,64,64 from L2: 5 % faster). */
enum { T(MOST_STRIP_VECTORS) = VECTOR_BYTES == 64 ? (int)T(STRIP_VECTORS) : 16 / LANES };
/* Vectors and keys of a register tile of scores for a strip. */
INLINE int T(fused_vectors)(const int vectors) { return vectors < (int)T(WIDE) ? vectors : (int)T(WIDE); }
INLINE int T(fused_tile)(const int vectors) { return T(fused_vectors)(vectors) == 1 ? LANES : GROUP_ROWS; }

static T(Rows) T(rows_as_real)(const Array *a, const char *src, ix n, ix rows, REAL *wide) {
    if (a->dtype == NATIVE && a->col == (ix)sizeof(REAL)) return (T(Rows)){src, a->row};
    for (ix i = 0; i < rows; i++) T(load_row)(src + i * a->row, a->col, a->dtype, n, wide + i * n);
    return (T(Rows)){(const char *)wide, n * (ix)sizeof(REAL)};
}

/* Packs the task's queries from r0 on into a strip [depth][row], and repeats the last one to fill it. Prefetches the
 * queries of the next head. */
INLINE void T(pack_strip)(const int vectors, const Params *p, const Task *t, ix r0, REAL *dst) {
    const ix next = p->next_head * p->heads_per_kv * p->query.head, size = T(element_size)(p->query.dtype);
    const REAL *x[T(MOST_STRIP_VECTORS) * LANES];
    const char *row[T(MOST_STRIP_VECTORS) * LANES];
    for (ix i = 0; i < vectors * LANES; i++) {
        ix r = ix_min(r0 + i, t->rows - 1);
        row[i] = row_address(t, &p->query, t->query, r);
        x[i] = p->copy_queries ? T(query_row)(p, row[i], P_(q) + r * p->depth_stride) : (const REAL *)row[i];
    }
    for (ix i = 0; i < vectors * LANES; i += LANES)
        for (ix d = 0; d < p->head_dim; d += LANES) {
            VEC square[LANES];
            UNROLL for (int k = 0; k < LANES; k++) {
                square[k] = V(loadu)(x[i + k] + d);
                __builtin_prefetch(row[i + k] + next + d * size, 0, 2);
            }
            V(transpose)(square);
            UNROLL for (int k = 0; k < LANES; k++) V(store)(dst + (d + k) * vectors * LANES + i, square[k]);
        }
}

/* What the strips of a head prefetch of the next one: every `step` bytes a line, from byte `from` on. */
typedef struct { const char *key, *value; ix key_bytes, value_bytes, from, step; } T(NextHead);

INLINE void T(prefetch_share)(const T(NextHead) *next, const char *at, ix row, ix bytes, ix n) {
    if (row == bytes) bytes *= n, n = 1;
    for (; n > 0; n--, at += row)
        for (ix i = next->from; i < bytes; i += next->step) __builtin_prefetch(at + i, 0, 2);
}

/* Prefetches a strip's share of keys and values first .. first + n to L2: L1 is full of this head. Evenly over all
 * strips, because a line with each step of the first one waits for free line buffers: 64,8,64,64,64 on one thread of a
 * Zen 4 takes 0.86 of the time in float32 and in float64. */
INLINE void T(prefetch_head)(const Params *p, const T(NextHead) *next, ix first, ix n) {
    T(prefetch_share)(next, next->key + first * p->key.row, p->key.row, next->key_bytes, n);
    T(prefetch_share)(next, next->value + first * p->value.row, p->value.row, next->value_bytes, n);
}

/* Puts the biases of a strip's rows from r0 on where their scores will be, [key][row]; the last square repeats keys of
 * the one before. Windows of 49 rows of depth 32 take 0.73 of the time that they take packed, heads of 256 to 384 rows
 * 0.85 to 1.04 of it. */
INLINE void T(fused_bias)(const int vectors, const Params *p, const Task *t, ix r0, ix columns, REAL *s) {
    const Array *a = &p->bias;
    const int in_place = a->dtype == NATIVE && a->col == (ix)sizeof(REAL) && columns >= LANES;
    for (ix i = 0; i < vectors * LANES; i += LANES) {
        const char *row[LANES];
        for (ix k = 0; k < LANES; k++) row[k] = row_address(t, a, t->bias, ix_min(r0 + i + k, t->rows - 1));
        for (ix j = 0; j < columns; j += LANES) {
            const ix first = ix_max(ix_min(j, columns - LANES), 0);
            VEC square[LANES];
            UNROLL for (int k = 0; k < LANES; k++) {
                const char *src = row[k] + first * a->col;
                REAL line[LANES] = {0};
                if (!in_place) T(load_row)(src, a->col, a->dtype, ix_min(LANES, columns), line);
                square[k] = V(loadu)(in_place ? (const REAL *)src : line);
            }
            V(transpose)(square);
            UNROLL for (int k = 0; k < LANES; k++) V(store)(s + (first + k) * vectors * LANES + i, square[k]);
        }
    }
}

/* Computes scores [key][row] of a strip with the first `columns` keys (-inf where a row sees fewer), to a whole vector
 * of keys, and row maxima; with `biased` the scaled products are added to what s holds. The last tile repeats keys of
 * the one before; fewer keys than a tile are copied, and with `biased` those of the last tile. */
INLINE void T(fused_scores)(const int vectors, const int biased, const Params *p, T(Rows) keys, const REAL *q,
                            ix columns, const VEC *stop, int full, const T(NextHead) *next, REAL *s, VEC *peak) {
    const int tile = T(fused_tile)(vectors), wide = T(fused_vectors)(vectors);
    const ix strip = vectors * LANES, row_bytes = p->head_dim * (ix)sizeof(REAL);
    REAL line[T(MOST_ROWS) * FUSED_DEPTH] __attribute__((aligned(64)));
    const VEC scale = V(set1)((REAL)p->scale), never = V(set1)(-INFINITY);
    const ix rest = columns % tile;
    const int copies = biased ? rest > 0 : columns < tile;
    Prefetch none = {0};
    if (copies && rest)
        for (ix i = 0; i < tile; i++)
            memcpy(line + i * p->head_dim, keys.at + (columns - rest + ix_min(i, rest - 1)) * keys.row, row_bytes);
    for (ix j = 0; j < columns; j += tile) {
        const int few = copies && (!biased || j + tile > columns);
        const ix first = few ? j : ix_min(j, columns - tile);
        T(prefetch_head)(p, next, first, ix_min(tile, columns));
        UNROLL for (int from = 0; from < vectors; from += wide) {
            VEC sum[T(MOST_ROWS)][T(MOST_VECTORS)];
            T(rank1_lanes)(0, tile, wide, (const char *)(q + from * LANES), strip * sizeof(REAL),
                           few ? (const char *)line : keys.at + first * keys.row, few ? row_bytes : keys.row,
                           sizeof(REAL), p->head_dim, &none, sum);
            UNROLL for (int i = 0; i < tile; i++)
                UNROLL for (int v = 0; v < wide; v++) {
                    REAL *at = s + (first + i) * strip + (from + v) * LANES;
                    VEC x = sum[i][v];
                    if (biased) {                                       /* as finish_scores() */
                        const VEC y = V(load)(at);
                        x = V(unless_equal)(x * scale + y, y, never);
                    }
                    if (!full || few) x = V(keep_bits)(x, V(above)(stop[from + v], V(set1)((REAL)(first + i))), never);
                    peak[from + v] = V(max)(x, peak[from + v]);
                    V(store)(at, x);
                }
        }
    }
    for (ix j = columns * strip; j < round_up(columns, LANES) * strip; j += LANES) V(store)(s + j, never);
}

/* Turns scores into weights and sets the inverse of each row's sum, 0 for a row that sees no key. */
INLINE void T(fused_softmax)(const int vectors, const Params *p, ix columns, const VEC *peak, REAL *s, REAL *inverse) {
    const VEC c = V(set1)((REAL)p->exponent), zero = V(set1)(0);
    UNROLL for (int v = 0; v < vectors; v++) {
        VEC sum[LANES], shift = V(keep_bits)(peak[v], V(above)(peak[v], V(set1)(-INFINITY)), zero);
        UNROLL for (int i = 0; i < LANES; i++) sum[i] = zero;
        for (ix j = 0; j < columns; j += LANES)
            for (ix i = 0; i < LANES; i += 2)
                UNROLL for (int k = 0; k < 2; k++) {
                    REAL *at = s + (j + i + k) * vectors * LANES + v * LANES;
                    VEC x = V(exp2)((V(load)(at) - shift) * c);
                    sum[i + k] += x;
                    V(store)(at, x);
                }
        UNROLL for (int half = LANES / 2; half; half /= 2)      /* the order of V(sum) */
            UNROLL for (int i = 0; i < half; i++) sum[i] += sum[i + half];
        V(store)(inverse + v * LANES, V(unless_equal)(V(set1)(1) / sum[0], sum[0], zero));
    }
}

/* Writes `vectors` vectors of columns from c on for `tile` rows, of which `rows` from row r of the task on exist; `w`
 * are their weights, [key][strip]. Prefetches the same output of the next strip, or of the next head. Returns x - x
 * summed over what it writes: 0, or NaN if a sum is not finite. */
INLINE VEC T(fused_columns)(const int vectors, const int tile, const Params *p, const Task *t, T(Rows) values, ix c,
                            ix r, ix rows, ix columns, const REAL *w, ix strip, const REAL *inverse) {
    Prefetch none = {0};
    VEC sum[T(MOST_ROWS)][T(MOST_VECTORS)], odd = V(set1)(0);
    T(rank1_lanes)(0, tile, vectors, values.at + c * (ix)sizeof(REAL), values.row, (const char *)w, sizeof(REAL),
                   strip * sizeof(REAL), columns, &none, sum);
    UNROLL for (int i = 0; i < tile; i++) {
        if (i >= rows) break;
        REAL *dst = P_(o) + (r + i) * p->value_stride;
        if (T(writes_out_in_place)(p)) {
            dst = (REAL *)row_address(t, &p->out, t->out, r + i);
            __builtin_prefetch((const char *)(dst + c) + strip * p->out.row, 1);
        }
        UNROLL for (int k = 0; k < vectors; k++) {
            odd += sum[i][k] - sum[i][k];
            V(storeu)(dst + c + k * LANES, sum[i][k] * V(set1)(inverse[i]) + V(set1)(0));
        }
    }
    return odd;
}

/* Writes the output of rows r0 .. r0 + rows, a strip. Returns 0 if a sum is not finite. */
INLINE int T(fused_values)(const Params *p, const Task *t, T(Rows) values, ix r0, ix rows, ix strip, ix columns,
                           const REAL *w, const REAL *inverse) {
    VEC odd = V(set1)(0);
    for (ix c = 0, vectors; c < p->value_dim; c += vectors * LANES) {
        vectors = ix_min(T(WIDE), (p->value_dim - c) / LANES);
        for (ix i = 0, n; i < rows; i += n) {
#define COLUMNS(vectors, tile) odd += T(fused_columns)(vectors, tile, p, t, values, c, r0 + i, rows - i, columns, \
                                                       w + i, strip, inverse + i)
#define WIDE_COLUMNS(tile) COLUMNS(T(WIDE), tile)
            const ix left = rows - i;
            n = vectors == 1 ? ix_min(LANES, left) : left > 2 * GROUP_ROWS ? GROUP_ROWS : left > GROUP_ROWS
                ? (left + 1) / 2 : left;
            if (T(WIDE) == 1 || vectors == 1) COLUMNS(1, LANES);
            else ROW_CASES(n, WIDE_COLUMNS)
#undef WIDE_COLUMNS
#undef COLUMNS
        }
    }
    for (ix r = r0; r < r0 + rows && !T(writes_out_in_place)(p); r++)
        T(store_row)(P_(o) + r * p->value_stride, p->value_dim, row_address(t, &p->out, t->out, r),
                     p->out.col, p->out.dtype);
    return V(all_zero)(odd);
}

/* Whether the first n values are so small that packing would not exclude one (attention/nonfinite.h), NaN aside. */
INLINE int T(all_small)(const Params *p, T(Rows) values, ix n) {
    VEC largest = V(set1)(0), other = largest;          /* two chains: value_dim is a multiple of 8 */
    for (const char *row = values.at; n > 0; n--, row += values.row)
        for (ix c = 0; c < p->value_dim; c += T(STRIP)) {
            const REAL *x = (const REAL *)row + c;
            largest = V(max)((VEC)((VINT)V(loadu)(x) & MAGNITUDE), largest);
            if (T(STRIP_VECTORS) == 2) other = V(max)((VEC)((VINT)V(loadu)(x + LANES) & MAGNITUDE), other);
        }
    return V(largest)(V(max)(largest, other)) < LARGEST;
}

typedef struct { T(Rows) key, value; } T(FusedHead);

/* The strip's scores to weights, and its output. The head's rows see its first `seen` keys. Returns 0 if a value needs
 * the unfused path. */
INLINE int T(fused_output)(const int vectors, const Params *p, const Task *t, T(Rows) values, ix r0, ix seen,
                           ix columns, const VEC *peak, REAL *s) {
    REAL inverse[T(MOST_STRIP_VECTORS) * LANES] __attribute__((aligned(64)));
    T(fused_softmax)(vectors, p, columns, peak, s, inverse);
    if (!r0 && !T(all_small)(p, values, seen)) return 0;
    return T(fused_values)(p, t, values, r0, ix_min(vectors * LANES, t->rows - r0), vectors * LANES, columns, s,
                           inverse);
}
/* Compiled once for strips with and without a bias. */
STEP int T(fused_output_wide)(const Params *p, const Task *t, T(Rows) values, ix r0, ix seen, ix columns,
                              const VEC *peak, REAL *s) {
    return T(fused_output)(T(MOST_STRIP_VECTORS), p, t, values, r0, seen, columns, peak, s);
}
STEP int T(fused_output_narrow)(const Params *p, const Task *t, T(Rows) values, ix r0, ix seen, ix columns,
                                const VEC *peak, REAL *s) {
    return T(fused_output)(T(STRIP_VECTORS), p, t, values, r0, seen, columns, peak, s);
}

/* One strip of rows from r0 on; returns as fused_output(). */
INLINE int T(fused_strip)(const int vectors, const int biased, const Params *p, const Task *t, T(FusedHead) head,
                          const T(NextHead) *next, ix r0, ix seen) {
    enum { MOST = T(MOST_STRIP_VECTORS) * LANES };
    REAL q[FUSED_DEPTH * MOST] __attribute__((aligned(64)));
    REAL s[(FUSED_KEYS + T(MOST_ROWS)) * MOST] __attribute__((aligned(64))), stops[MOST] __attribute__((aligned(64)));
    const ix strip = vectors * LANES, rows = ix_min(strip, t->rows - r0);
    ix columns = 0, fewest = FUSED_KEYS;
    VEC peak[T(MOST_STRIP_VECTORS)], stop[T(MOST_STRIP_VECTORS)];
    for (ix i = 0; i < strip; i++) {
        ix sees = i < rows ? t->row[r0 + i].stop : 0;
        columns = ix_max(columns, sees);
        if (i < rows) fewest = ix_min(fewest, sees);
        stops[i] = (REAL)sees;
    }
    UNROLL for (int v = 0; v < vectors; v++) peak[v] = V(set1)(-INFINITY), stop[v] = V(load)(stops + v * LANES);
    T(pack_strip)(vectors, p, t, r0, q);
    if (biased) T(fused_bias)(vectors, p, t, r0, columns, s);
    T(fused_scores)(vectors, biased, p, head.key, q, columns, stop, fewest >= columns, next, s, peak);
    return vectors == T(STRIP_VECTORS) ? T(fused_output_narrow)(p, t, head.value, r0, seen, columns, peak, s)
                                       : T(fused_output_wide)(p, t, head.value, r0, seen, columns, peak, s);
}

INLINE int T(attend_strips)(const int biased, const Params *p, const Task *t) {
    const ix keys = t->lengths.kv_length;
    REAL *wide = t->wide;
    const T(FusedHead) head = {
        T(rows_as_real)(&p->key, t->key, p->head_dim, keys, wide),
        T(rows_as_real)(&p->value, t->value, p->value_dim, keys, wide + p->kv_len * p->head_dim)};
    ix seen = 0;
    for (ix r = 0; r < t->rows; r++) seen = ix_max(seen, t->row[r].stop);
    const ix most = T(MOST_STRIP_VECTORS) * LANES, strip = T(STRIP);
    T(NextHead) next = {t->key + p->next_head * p->key.head, t->value + p->next_head * p->value.head,
                        p->head_dim * T(element_size)(p->key.dtype), p->value_dim * T(element_size)(p->value.dtype),
                        0, ceil_div(t->rows, most) * 64};
    for (ix r = 0; r < t->rows; next.from += 64) {
        const int wider = most == strip || t->rows - r > strip;
        const int small = wider ? T(fused_strip)(T(MOST_STRIP_VECTORS), biased, p, t, head, &next, r, seen)
                                : T(fused_strip)(T(STRIP_VECTORS), biased, p, t, head, &next, r, seen);
        if (!small) return 0;
        r += wider ? most : strip;
    }
    return 1;
}

/* Two functions: in one, whose frame has room for both, calls without a bias take 1.1 times as long. */
STEP int T(attend_plain)(const Params *p, const Task *t) { return T(attend_strips)(0, p, t); }
STEP int T(attend_biased)(const Params *p, const Task *t) { return T(attend_strips)(1, p, t); }

/* Attention of the task's rows, whose keys are one block and one step of the weighted sum; returns 0 if a value needs
 * the unfused path. */
INLINE int T(attend_fused)(const Params *p, const Task *t) {
    if (VECTOR_BYTES == 32 && p->bias.data) return T(attend_biased)(p, t);          /* as is_small_and_plain() */
    return T(attend_plain)(p, t);
}

#else           /* never chosen (path.h) */
static int T(attend_fused)(const Params *p, Task *t) { (void)p; (void)t; return 0; }
#endif
