/* short.h (template over REAL): all steps at once for strips of rows that see few keys, which are used where they lie.
 *
 * As in strips.h the lanes are rows, here until the weights are summed: maxima, sums and scores need no step across lanes,
 * nothing is packed, and each head asks for the next one. Every number is made by the operations of the other steps in their
 * order, and has their bits. 16 rows, 16 keys and depth 32: 2350 cycles a head by the other steps, 1370 so, of which the
 * products are 520. */

#if VECTOR_BYTES >= 32

/* Rows of n elements as the products read them: in place, or widened. */
typedef struct { const char *at; ix row; } T(Rows);

static T(Rows) T(short_rows)(const Array *a, const char *src, ix n, ix rows, REAL *wide) {
    if (a->dtype == NATIVE && a->col == (ix)sizeof(REAL)) return (T(Rows)){src, a->row};
    for (ix i = 0; i < rows; i++) T(load_row)(src + i * a->row, a->col, a->dtype, n, wide + i * n);
    return (T(Rows)){(const char *)wide, n * (ix)sizeof(REAL)};
}

/* Queries r0 .. of the task side by side, [depth][row]; behind the last one its own row stands in. */
INLINE void T(lay_short)(const Params *p, const Task *t, ix r0, REAL *dst) {
    const ix next = p->group * p->query.head, size = T(element_size)(p->query.dtype);
    const REAL *x[T(STRIP)];
    const char *row[T(STRIP)];
    for (ix i = 0; i < T(STRIP); i++) {
        ix r = least(r0 + i, t->rows - 1);
        row[i] = T(row_pointer)(t, &p->query, (char *)t->query, r);
        x[i] = p->copied ? T(query_row)(p, row[i], P_(q) + r * p->depth_stride) : (const REAL *)row[i];
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

/* Scores [key][row] of a strip with the first `columns` keys, -inf where a row sees less than these, and each row's maximum. */
INLINE void T(short_scores)(const Params *p, T(Rows) keys, const REAL *q, ix columns, const VEC *stop, int full, Ahead ahead,
                            REAL *s, VEC *peak) {
    enum { VECTORS = T(STRIP) / LANES };
    REAL line[LANES * SHORT_DEPTH] __attribute__((aligned(64)));
    for (ix j = 0; j < columns; j += LANES) {
        ix row = keys.row, valid = least(LANES, columns - j);
        const char *k = keys.at + j * row;
        if (valid < LANES) {
            for (ix i = 0; i < LANES; i++) memcpy(line + i * p->head_dim, k + least(i, valid - 1) * row, p->head_dim * sizeof(REAL));
            k = (const char *)line;
            row = p->head_dim * (ix)sizeof(REAL);
        }
        const char *k8 = k + 8 * row;
        VEC sum[LANES][VECTORS];
        UNROLL for (int i = 0; i < LANES; i++)
            UNROLL for (int v = 0; v < VECTORS; v++) sum[i][v] = V(set1)(0);
        for (ix d = 0; d < p->head_dim; d++, k += sizeof(REAL), k8 += sizeof(REAL)) {
            VEC x[VECTORS];
            fetch(&ahead, 64);
            UNROLL for (int v = 0; v < VECTORS; v++) x[v] = V(load)(q + d * T(STRIP) + v * LANES);
            T(add_strip)(0, sum, x, k, k8, row);
        }
        UNROLL for (int i = 0; i < LANES; i++)
            UNROLL for (int v = 0; v < VECTORS; v++) {
                VEC x = sum[i][v];
                if (!full || valid < LANES) x = V(keep_bits)(x, V(above)(stop[v], V(set1)((REAL)(j + i))), V(set1)(-INFINITY));
                peak[v] = V(max)(x, peak[v]);
                V(store)(s + (j + i) * T(STRIP) + v * LANES, x);
            }
    }
}

/* Scores to weights, and the inverse of each row's sum, which is 0 for a row that sees nothing. */
INLINE void T(short_softmax)(const Params *p, ix columns, const VEC *peak, REAL *s, REAL *inverse) {
    const VEC c = V(set1)((REAL)p->c), zero = V(set1)(0);
    UNROLL for (int v = 0; v < T(STRIP) / LANES; v++) {
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

/* The output of a strip, rows r0 .. r0 + rows of the task; 0 where a sum is not finite, or an entry of a value as large as those kept apart. */
INLINE int T(short_values)(const Params *p, const Task *t, T(Rows) values, ix r0, ix rows, ix columns, const REAL *w, const REAL *inverse,
                          Ahead ahead) {
    enum { VECTORS = T(STRIP) / LANES };
    const int whole = T(whole_out)(p);
    VEC large = V(set1)(0), odd = V(set1)(0);
    for (ix c = 0; c < p->value_dim; c += T(STRIP))
        for (ix i0 = 0; i0 < rows; i0 += LANES) {
            const char *at = (const char *)(w + i0), *v = values.at + c * (ix)sizeof(REAL);
            VEC sum[LANES][VECTORS];
            UNROLL for (int i = 0; i < LANES; i++)
                UNROLL for (int k = 0; k < VECTORS; k++) sum[i][k] = V(set1)(0);
            for (ix j = 0; j < columns; j++, v += values.row, at += T(STRIP) * sizeof(REAL)) {
                VEC x[VECTORS];
                fetch(&ahead, 64);
                UNROLL for (int k = 0; k < VECTORS; k++) {
                    x[k] = V(loadu)((const REAL *)v + k * LANES);
                    large = V(max)((VEC)((VINT)x[k] & MAGNITUDE), large);
                }
                T(add_strip)(0, sum, x, at, at + 8 * sizeof(REAL), sizeof(REAL));
            }
            UNROLL for (int i = 0; i < LANES; i++) {
                if (i0 + i >= rows) break;
                const ix r = r0 + i0 + i;
                REAL *dst = (whole ? (REAL *)T(row_pointer)(t, &p->out, t->out, r) : P_(o) + r * p->value_stride) + c;
                UNROLL for (int k = 0; k < VECTORS; k++) {
                    odd += sum[i][k] - sum[i][k];
                    V(storeu)(dst + k * LANES, sum[i][k] * V(set1)(inverse[i0 + i]) + V(set1)(0));
                }
            }
        }
    for (ix r = r0; r < r0 + rows && !whole; r++)
        T(store_row)(P_(o) + r * p->value_stride, p->value_dim, T(row_pointer)(t, &p->out, t->out, r), p->out.col, p->out.dtype);
    return T(all_zero)(odd) && V(largest)(large) < APART;
}

/* Attention of the task's rows, whose keys are one block and step of the weighted sum; 0 if some value needs the other steps. */
static int T(attend_short)(const Params *p, Task *t) {
    enum { VECTORS = T(STRIP) / LANES };
    REAL q[SHORT_DEPTH * T(STRIP)] __attribute__((aligned(64))), s[SHORT_KEYS * T(STRIP)] __attribute__((aligned(64)));
    REAL inverse[T(STRIP)] __attribute__((aligned(64))), stops[T(STRIP)] __attribute__((aligned(64)));
    const Ahead quiet = {0};
    const ix keys = t->lengths.kv_length;
    const ix key_bytes = p->head_dim * T(element_size)(p->key.dtype), value_bytes = p->value_dim * T(element_size)(p->value.dtype);
    REAL *wide = t->wide;
    const T(Rows) key = T(short_rows)(&p->key, t->key, p->head_dim, keys, wide);
    const T(Rows) value = T(short_rows)(&p->value, t->value, p->value_dim, keys, wide + p->kv_len * p->head_dim);
    for (ix r0 = 0; r0 < t->rows; r0 += T(STRIP)) {
        ix rows = least(T(STRIP), t->rows - r0), columns = 0, fewest = SHORT_KEYS;
        VEC peak[VECTORS], stop[VECTORS];
        for (ix i = 0; i < T(STRIP); i++) {
            ix sees = i < rows ? t->row[r0 + i].stop : 0;
            columns = most(columns, sees);
            if (i < rows) fewest = least(fewest, sees);
            stops[i] = (REAL)sees;
        }
        UNROLL for (int v = 0; v < VECTORS; v++) peak[v] = V(set1)(-INFINITY), stop[v] = V(load)(stops + v * LANES);
        T(lay_short)(p, t, r0, q);
        const Ahead values = r0 ? quiet : ahead_from(&p->value, value_bytes, t->value);
        const Ahead next = r0 ? quiet : ahead_from(&p->key, key_bytes, t->key + p->key.head);        /* of the next head */
        T(short_scores)(p, key, q, columns, stop, fewest >= columns, values, s, peak);
        T(short_softmax)(p, columns, peak, s, inverse);
        if (!T(short_values)(p, t, value, r0, rows, columns, s, inverse, next)) return 0;
    }
    return 1;
}

#else           /* never called (plan.pxi) */
static int T(attend_short)(const Params *p, Task *t) { (void)p; (void)t; return 0; }
#endif
