/* fused.h (template over REAL; after gemm/strip.h, attention/queries.h, attention/epilogue.h): the fused kernel for
 * small heads: scores, softmax and weighted sum of a strip of rows in one pass, with keys and values in place.
 *
 * As in strip.h each lane is a row, so scores, maxima and row sums need no reduction across lanes; nothing is packed,
 * and each head prefetches the next one. The operations have the order of the other paths, hence equal bits. A head of
 * 16 rows, 16 keys and depth 32 takes 1370 cycles instead of 2350, 520 of them for the products (Zen 5). */

#if VECTOR_BYTES >= 32

/* Rows of n elements as the products read them: in place, or widened. */
typedef struct { const char *at; ix row; } T(Rows);

static T(Rows) T(rows_as_real)(const Array *a, const char *src, ix n, ix rows, REAL *wide) {
    if (a->dtype == NATIVE && a->col == (ix)sizeof(REAL)) return (T(Rows)){src, a->row};
    for (ix i = 0; i < rows; i++) T(load_row)(src + i * a->row, a->col, a->dtype, n, wide + i * n);
    return (T(Rows)){(const char *)wide, n * (ix)sizeof(REAL)};
}

/* Packs the task's queries from r0 on into a strip [depth][row], and repeats the last one to fill it. Prefetches the
 * queries of the next head. */
INLINE void T(pack_strip)(const Params *p, const Task *t, ix r0, REAL *dst) {
    const ix next = p->heads_per_kv * p->query.head, size = T(element_size)(p->query.dtype);
    const REAL *x[T(STRIP)];
    const char *row[T(STRIP)];
    for (ix i = 0; i < T(STRIP); i++) {
        ix r = ix_min(r0 + i, t->rows - 1);
        row[i] = row_address(t, &p->query, t->query, r);
        x[i] = p->copy_queries ? T(query_row)(p, row[i], P_(q) + r * p->depth_stride) : (const REAL *)row[i];
    }
    for (ix i = 0; i < T(STRIP); i += LANES)
        for (ix d = 0; d < p->head_dim; d += LANES) {
            VEC square[LANES];
            UNROLL for (int k = 0; k < LANES; k++) {
                square[k] = V(loadu)(x[i + k] + d);
                __builtin_prefetch(row[i + k] + next + d * size);
            }
            V(transpose)(square);
            UNROLL for (int k = 0; k < LANES; k++) V(store)(dst + (d + k) * T(STRIP) + i, square[k]);
        }
}

/* Computes scores [key][row] of a strip with the first `columns` keys (-inf where a row sees fewer) and row maxima. */
INLINE void T(fused_scores)(const Params *p, T(Rows) keys, const REAL *q, ix columns, const VEC *stop, int full,
                            Prefetch prefetch, REAL *s, VEC *peak) {
    REAL line[LANES * FUSED_DEPTH] __attribute__((aligned(64)));
    for (ix j = 0; j < columns; j += LANES) {
        ix row = keys.row, valid = ix_min(LANES, columns - j);
        const char *k = keys.at + j * row;
        VEC sum[LANES][T(STRIP_VECTORS)];
        if (valid < LANES) {
            for (ix i = 0; i < LANES; i++)
                memcpy(line + i * p->head_dim, k + ix_min(i, valid - 1) * row, p->head_dim * sizeof(REAL));
            k = (const char *)line;
            row = p->head_dim * (ix)sizeof(REAL);
        }
        T(rank1_lanes)(0, (const char *)q, T(STRIP) * sizeof(REAL), k, row, sizeof(REAL), p->head_dim,
                       &prefetch, sum, NULL);
        UNROLL for (int i = 0; i < LANES; i++)
            UNROLL for (int v = 0; v < T(STRIP_VECTORS); v++) {
                VEC x = sum[i][v];
                if (!full || valid < LANES)
                    x = V(keep_bits)(x, V(above)(stop[v], V(set1)((REAL)(j + i))), V(set1)(-INFINITY));
                peak[v] = V(max)(x, peak[v]);
                V(store)(s + (j + i) * T(STRIP) + v * LANES, x);
            }
    }
}

/* Turns scores into weights and sets the inverse of each row's sum, 0 for a row that sees no key. */
INLINE void T(fused_softmax)(const Params *p, ix columns, const VEC *peak, REAL *s, REAL *inverse) {
    const VEC c = V(set1)((REAL)p->exponent), zero = V(set1)(0);
    UNROLL for (int v = 0; v < T(STRIP_VECTORS); v++) {
        VEC sum[LANES], shift = V(keep_bits)(peak[v], V(above)(peak[v], V(set1)(-INFINITY)), zero);
        UNROLL for (int i = 0; i < LANES; i++) sum[i] = zero;
        for (ix j = 0; j < columns; j += LANES)
            for (ix i = 0; i < LANES; i += 2)
                UNROLL for (int k = 0; k < 2; k++) {
                    REAL *at = s + (j + i + k) * T(STRIP) + v * LANES;
                    VEC x = V(exp2)((V(load)(at) - shift) * c);
                    sum[i + k] += x;
                    V(store)(at, x);
                }
        UNROLL for (int half = LANES / 2; half; half /= 2)      /* the order of V(sum) */
            UNROLL for (int i = 0; i < half; i++) sum[i] += sum[i + half];
        V(store)(inverse + v * LANES, V(unless_equal)(V(set1)(1) / sum[0], sum[0], zero));
    }
}

/* Writes the output of rows r0 .. r0 + rows. Returns 0 if a sum is not finite, or a value so large that packing would
 * exclude it. */
INLINE int T(fused_values)(const Params *p, const Task *t, T(Rows) values, ix r0, ix rows, ix columns, const REAL *w,
                           const REAL *inverse, Prefetch prefetch) {
    const int writes_out = T(writes_out_in_place)(p);
    VEC largest = V(set1)(0), odd = V(set1)(0);
    for (ix c = 0; c < p->value_dim; c += T(STRIP))
        for (ix i0 = 0; i0 < rows; i0 += LANES) {
            VEC sum[LANES][T(STRIP_VECTORS)];
            T(rank1_lanes)(0, values.at + c * (ix)sizeof(REAL), values.row, (const char *)(w + i0), sizeof(REAL),
                           T(STRIP) * sizeof(REAL), columns, &prefetch, sum, &largest);
            UNROLL for (int i = 0; i < LANES; i++) {
                if (i0 + i >= rows) break;
                const ix r = r0 + i0 + i;
                REAL *dst = (writes_out ? (REAL *)row_address(t, &p->out, t->out, r) : P_(o) + r * p->value_stride) + c;
                UNROLL for (int k = 0; k < T(STRIP_VECTORS); k++) {
                    odd += sum[i][k] - sum[i][k];
                    V(storeu)(dst + k * LANES, sum[i][k] * V(set1)(inverse[i0 + i]) + V(set1)(0));
                }
            }
        }
    for (ix r = r0; r < r0 + rows && !writes_out; r++)
        T(store_row)(P_(o) + r * p->value_stride, p->value_dim, row_address(t, &p->out, t->out, r),
                     p->out.col, p->out.dtype);
    return V(all_zero)(odd) && V(largest)(largest) < LARGEST;
}

/* Attention of the task's rows, whose keys are one block and one step of the weighted sum; returns 0 if a value needs
 * the unfused path. */
STEP int T(attend_fused)(const Params *p, Task *t) {
    REAL q[FUSED_DEPTH * T(STRIP)] __attribute__((aligned(64))), s[FUSED_KEYS * T(STRIP)] __attribute__((aligned(64)));
    REAL inverse[T(STRIP)] __attribute__((aligned(64))), stops[T(STRIP)] __attribute__((aligned(64)));
    const Prefetch none = {0};
    const ix keys = t->lengths.kv_length;
    const ix key_bytes = p->head_dim * T(element_size)(p->key.dtype),
        value_bytes = p->value_dim * T(element_size)(p->value.dtype);
    REAL *wide = t->wide;
    const T(Rows) key = T(rows_as_real)(&p->key, t->key, p->head_dim, keys, wide);
    const T(Rows) value = T(rows_as_real)(&p->value, t->value, p->value_dim, keys, wide + p->kv_len * p->head_dim);
    for (ix r0 = 0; r0 < t->rows; r0 += T(STRIP)) {
        ix rows = ix_min(T(STRIP), t->rows - r0), columns = 0, fewest = FUSED_KEYS;
        VEC peak[T(STRIP_VECTORS)], stop[T(STRIP_VECTORS)];
        for (ix i = 0; i < T(STRIP); i++) {
            ix sees = i < rows ? t->row[r0 + i].stop : 0;
            columns = ix_max(columns, sees);
            if (i < rows) fewest = ix_min(fewest, sees);
            stops[i] = (REAL)sees;
        }
        UNROLL for (int v = 0; v < T(STRIP_VECTORS); v++)
            peak[v] = V(set1)(-INFINITY), stop[v] = V(load)(stops + v * LANES);
        T(pack_strip)(p, t, r0, q);
        const Prefetch values = r0 ? none : prefetch_from(&p->value, value_bytes, t->value);
        const Prefetch next_head = r0 ? none : prefetch_from(&p->key, key_bytes, t->key + p->key.head);
        T(fused_scores)(p, key, q, columns, stop, fewest >= columns, values, s, peak);
        T(fused_softmax)(p, columns, peak, s, inverse);
        if (!T(fused_values)(p, t, value, r0, rows, columns, s, inverse, next_head)) return 0;
    }
    return 1;
}

#else           /* never chosen (path.h) */
static int T(attend_fused)(const Params *p, Task *t) { (void)p; (void)t; return 0; }
#endif
