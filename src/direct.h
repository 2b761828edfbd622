/* direct.h (template over REAL): the two products for so few rows that packing a key would cost more than using it.
 *
 * Keys and values are read where they are, once: the call is bound by that reading. A score is a dot product along the
 * lanes; sixteen of them (LANES) are summed across by one transposition. Values enter the same tile as packed ones do. */

/* Products of rows with two keys, lane by lane: part[row][key] gets the sums before they are added over the lanes. A deep
 * product is a sum of chains, as in tile.h. */
INLINE void T(dots)(const int rows, const REAL *const *q, const REAL *k0, const REAL *k1, ix depth, VEC (*part)[LANES], ix key) {
    UNROLL for (int r = 0; r < rows; r++) part[r][key] = part[r][key + 1] = V(set1)(0);
    for (ix d = 0, stop; d < depth; d = stop) {
        VEC sum0[GROUP_ROWS], sum1[GROUP_ROWS];
        UNROLL for (int r = 0; r < rows; r++) sum0[r] = sum1[r] = V(set1)(0);
        stop = least(depth, d + T(CHAIN) * LANES);
        for (ix i = d; i < stop; i += LANES) {
            VEC x0 = V(loadu)(k0 + i), x1 = V(loadu)(k1 + i);
            UNROLL for (int r = 0; r < rows; r++) {
                VEC y = V(loadu)(q[r] + i);
                sum0[r] = V(fma)(x0, y, sum0[r]);
                sum1[r] = V(fma)(x1, y, sum1[r]);
            }
        }
        UNROLL for (int r = 0; r < rows; r++) {
            part[r][key] += sum0[r];
            part[r][key + 1] += sum1[r];
        }
    }
}

/* A key as whole vectors: in place, or copied with zeros behind it. */
INLINE const REAL *T(key_row)(const Params *p, const char *src, REAL *line) {
    ix depth = p->head_dim;
    if (depth % LANES == 0) return T(row)(src, p->key.col, p->key.dtype, depth, line);
    T(load_row)(src, p->key.col, p->key.dtype, depth, line);
    for (ix d = depth; d < p->depth_stride; d++) line[d] = 0;
    return line;
}

INLINE void T(direct_rows)(const int rows, const Params *p, Task *t, const REAL *const *q_rows, ix block) {
    const REAL *q[GROUP_ROWS];
    VEC part[GROUP_ROWS][LANES], peak[GROUP_ROWS];
    REAL *line0 = t->line, *line1 = line0 + p->depth_stride;
    const char *keys = t->key + block * p->block_k * p->key.row;
    UNROLL for (int r = 0; r < rows; r++) q[r] = q_rows[r], peak[r] = V(set1)(-INFINITY);
    for (ix j = t->from; j < t->to; j += LANES) {
        ix last = least(LANES, t->columns - j) - 1;
        for (ix i = 0; i < LANES; i += 2) {              /* behind the last key its own row stands in, and is masked */
            const REAL *k0 = T(key_row)(p, keys + (j + least(i, last)) * p->key.row, line0);
            const REAL *k1 = T(key_row)(p, keys + (j + least(i + 1, last)) * p->key.row, line1);
            T(dots)(rows, q, k0, k1, p->depth_stride, part, i);
        }
        unsigned bits = ((1u << LANES) - 1) >> (LANES - 1 - last);
        UNROLL for (int r = 0; r < rows; r++) {
            V(transpose)(part[r]);
            UNROLL for (int half = LANES / 2; half; half /= 2)
                UNROLL for (int i = 0; i < half; i++) part[r][i] += part[r][i + half];
            VEC s = V(keep_bits)(part[r][0], bits, V(set1)(-INFINITY));
            V(store)(P_(s) + r * p->width + j, s);
            peak[r] = V(max)(s, peak[r]);
        }
    }
    UNROLL for (int r = 0; r < rows; r++) V(store)(P_(peaks) + r * LANES, peak[r]);
}

static void T(scores_direct)(const Params *p, Task *t, ix r0, ix n, ix block) {
    const REAL *const *q = (const REAL *const *)t->q_rows + r0;
#define ROWS(rows) T(direct_rows)(rows, p, t, q, block)
    ROW_CASES(ROWS)
#undef ROWS
}

/* ------------------------------------------------------------------------------------------------------ values */

INLINE int T(values_checked)(const int rows, ix vectors, const Params *p, const REAL *w, const REAL *v, ix stride, ix keys,
                             const REAL *alpha, REAL *o) {
    int fine = 1;
    const REAL *w_rows[GROUP_ROWS];
    UNROLL for (int r = 0; r < rows; r++) w_rows[r] = w + r * p->width;
#define TILE(vectors) fine = T(values_tile)(0, rows, vectors, 1, w_rows, v, stride, keys, alpha, o, p->value_stride)
    VECTOR_CASES(TILE)
#undef TILE
    return fine;
}

INLINE void T(values_unchecked)(const int rows, ix vectors, const Params *p, const REAL *w, const REAL *v, ix stride, ix keys,
                                const REAL *alpha, REAL *o) {
    const REAL *w_rows[GROUP_ROWS];
    UNROLL for (int r = 0; r < rows; r++) w_rows[r] = w + r * p->width;
#define TILE(vectors) T(values_tile)(0, rows, vectors, 0, w_rows, v, stride, keys, alpha, o, p->value_stride)
    VECTOR_CASES(TILE)
#undef TILE
}

/* The sums came out not finite. Values that are not, then also those so large that their sum is not, are taken out of
 * the product and added key by key. The first step leaves no bit of a row changed that may not see such a key, and the
 * second is taken for what visible values do alone. */
static void T(values_guarded)(const Params *p, Task *t, ix r0, ix n, ix block, ix from, ix keys, ix chunk, const REAL *v, ix stride,
                              const REAL *alpha) {
    ix start = T(chunk_start)(p, chunk), vectors = T(chunk_start)(p, chunk + 1) - start, width = vectors * LANES, n_apart = 0;
    REAL *o = P_(o) + r0 * p->value_stride + start * LANES, *copy = t->packed.values;
    const REAL *w = P_(s) + from;
    for (int pass = 0; pass < 2; pass++) {
        n_apart = 0;
        for (ix j = 0; j < keys; j++) {
            int apart = 0;
            for (ix i = 0; i < width; i++) apart |= !(FABS(v[j * stride + i]) < (pass ? APART : INFINITY));
            for (ix i = 0; i < width; i++) copy[j * width + i] = apart ? 0 : v[j * stride + i];
            if (apart) t->packed.apart[n_apart++] = (int32_t)(from + j);
        }
        int fine = 1;
#define ROWS(rows) fine = T(values_checked)(rows, vectors, p, w, copy, width, keys, alpha, o)
        ROW_CASES(ROWS)
#undef ROWS
        if (fine) break;
        if (pass) {                                       /* the weights or the sums before are not finite: so is the row */
#define ROWS(rows) T(values_unchecked)(rows, vectors, p, w, copy, width, keys, alpha, o)
            ROW_CASES(ROWS)
#undef ROWS
        }
    }
    T(add_apart)(p, t, r0, n, block, t->packed.apart, n_apart, start * LANES, least(p->value_dim, (start + vectors) * LANES));
}

/* o = o * alpha + weights @ values in steps of DIRECT_KEYS keys counted from key 0: a step's values stay in L1 while the
 * chunks of their columns are taken in turn. */
static void T(values_direct)(const Params *p, Task *t, ix r0, ix n, ix block) {
    const Array *a = &p->value;
    const char *values = t->value + block * p->block_k * a->row;
    const REAL *alpha = P_(alpha), ones[GROUP_ROWS] = {1, 1, 1, 1, 1, 1};
    int in_place = a->dtype == NATIVE && a->col == (ix)sizeof(REAL) && p->value_dim % LANES == 0 && a->row % (ix)sizeof(REAL) == 0
                   && (uintptr_t)values % sizeof(REAL) == 0;
    T(rescale_apart)(p, t, r0, n);
    for (ix from = t->column, stop; from < t->columns; from = stop, alpha = ones) {
        stop = least((from / DIRECT_KEYS + 1) * DIRECT_KEYS, t->columns);
        for (ix c = 0; c < T(chunks)(p); c++) {
            ix start = T(chunk_start)(p, c), vectors = T(chunk_start)(p, c + 1) - start, stride = vectors * LANES;
            const char *src = values + from * a->row + start * LANES * a->col;
            const REAL *v = (const REAL *)src, *w = P_(s) + from;
            REAL *o = P_(o) + r0 * p->value_stride + start * LANES;
            if (in_place) stride = a->row / (ix)sizeof(REAL);
            else {
                REAL *copy = t->packed.keys;
                ix valid = least(stride, p->value_dim - start * LANES);
                memset(t->line, 0, stride * sizeof(REAL));
                T(pack_chunk)(0, a, src, stop - from, valid, vectors, t->line, copy);
                v = copy;
            }
            int fine = 1;
#define ROWS(rows) fine = T(values_checked)(rows, vectors, p, w, v, stride, stop - from, alpha, o)
            ROW_CASES(ROWS)
#undef ROWS
            if (!fine) T(values_guarded)(p, t, r0, n, block, from, stop - from, c, v, stride, alpha);
        }
    }
}
