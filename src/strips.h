/* strips.h (template over REAL): the products of direct.h for rows that fill vectors.
 *
 * Queries lie side by side, [strip][depth][row]; an element of a key is multiplied with all rows of a strip, straight from memory,
 * and nothing is summed across lanes: 92 % of FMA peak at a depth of 128, where dot products along the lanes reach 70. */

/* A rounding error grows with the length of a chain of additions: a deep product is a sum of chains of this length. */
enum { T(CHAIN) = 256 };

enum { T(STRIP) = LANES < 8 ? 8 : LANES };                /* rows: two chains of sums for each cycle of a multiply-and-add */

/* All queries of the task, which are whole vectors (direct.h), as strips. */
INLINE void T(lay_strips)(const Params *p, Task *t, ix depth) {
    for (ix r0 = 0; r0 < t->rows; r0 += LANES) {
        REAL *dst = P_(strips) + r0 / T(STRIP) * T(STRIP) * p->depth_stride + r0 % T(STRIP);
        for (ix d = 0; d < depth; d += LANES) {
            VEC square[LANES];
            for (ix i = 0; i < LANES; i++)
                square[i] = r0 + i < t->rows ? V(loadu)((const REAL *)t->q_rows[r0 + i] + d) : V(set1)(0);
            V(transpose)(square);
            for (ix i = 0; i < LANES; i++) V(store)(dst + (d + i) * T(STRIP), square[i]);
        }
    }
}

/* Rows in memory, so far ahead of those in hand, are asked for while these are used: `span` steps for a row of them, which
 * begins `row` bytes behind the one before, and `bytes` a step. A line beside 16 products costs nothing, several at once cost
 * 1.7 cycles each. */
typedef struct { const char *at; ix row, span, bytes; } T(Next);

INLINE T(Next) T(next_rows)(const char *at, ix row, ix span, ix bytes) {
    return row == span * bytes ? (T(Next)){at, 0, PTRDIFF_MAX / 4, bytes} : (T(Next)){at, row, span, bytes};
}

/* sum[i] += x times the number at k in row i; row 8 is at k8: 16 addresses of six registers. */
INLINE void T(add_strip)(const int dot, VEC (*sum)[T(STRIP) / LANES], const VEC *x, const char *k, const char *k8, ix row) {
    const ix r3 = 3 * row, r5 = 5 * row, r7 = 7 * row, at[8] = {0, row, 2 * row, r3, 4 * row, r5, 2 * r3, r7};
    UNROLL for (int i = 0; i < LANES; i++) {
        REAL y;
        memcpy(&y, (i < 8 ? k : k8) + at[i % 8], sizeof y);
        UNROLL for (int v = 0; v < T(STRIP) / LANES; v++) sum[i][v] = PRODUCT(dot, V(set1)(y), x[v], sum[i][v]);
    }
}

/* Products of a strip with LANES keys, `row` bytes apart, to rows of s. */
INLINE void T(strip)(const int dot, const REAL *q, const char *k, ix row, ix depth, T(Next) next, REAL *s, ix stride) {
    enum { VECTORS = T(STRIP) / LANES };
    const ix chain = dot ? T(CHAIN) / 2 : T(CHAIN);
    const char *k8 = k + 8 * row;
    for (ix from = 0, stop; from < depth; from = stop) {
        VEC sum[LANES][VECTORS];
        UNROLL for (int i = 0; i < LANES; i++)
            UNROLL for (int v = 0; v < VECTORS; v++) sum[i][v] = V(set1)(0);
        stop = least(depth, from + chain);
        for (ix d = from; d < stop; next.at += next.row) {
            const ix end = least(stop, d + next.span);
            for (const char *near = next.at; d < end; d++, near += next.bytes, k += sizeof(REAL), k8 += sizeof(REAL), q += T(STRIP)) {
                VEC x[VECTORS];
                __builtin_prefetch(near);
                UNROLL for (int v = 0; v < VECTORS; v++) x[v] = V(load)(q + v * LANES);
                T(add_strip)(dot, sum, x, k, k8, row);
            }
        }
        UNROLL for (int v = 0; v < VECTORS; v++) {
            VEC square[LANES];
            UNROLL for (int i = 0; i < LANES; i++) square[i] = sum[i][v];
            V(transpose)(square);
            UNROLL for (int i = 0; i < LANES; i++) {
                REAL *dst = s + (v * LANES + i) * stride;
                if (from) square[i] += V(load)(dst);
                V(store)(dst, square[i]);
            }
        }
    }
}

/* The scores of all rows with LANES keys at k, in place or widened, whose own place in memory is `key`. */
static __attribute__((noinline)) void T(strips)(const int dot, const Params *p, const Task *t, const char *k, ix row, const char *key,
                                                REAL *s) {
    const Array *a = &p->key;
    const ix depth = dot ? p->head_dim / 2 : p->head_dim, bytes = p->head_dim * T(element_size)(a->dtype);
    T(Next) next = T(next_rows)(key + AHEAD_BYTES / bytes * a->row, a->row, ceil_div(depth, LANES), bytes / depth * LANES);
    for (ix r = 0; r < t->rows; r += T(STRIP)) {
        const REAL *q = P_(strips) + r * p->depth_stride;
#define STRIP(dot) T(strip)(dot, q, k, row, depth, next, s + r * p->width, p->width)
        if (dot) STRIP(1);
        else STRIP(0);
#undef STRIP
        next = (T(Next)){k, 0, depth, 0};
    }
}

/* o = o * alpha + weights @ values for LANES columns and n rows, one strip of single vectors, whose weights are w_row bytes apart.
 * Sums that are not all finite are not stored, and the answer is 0. */
INLINE int T(sum_strip)(ix n, const char *w, ix w_row, const char *v, ix v_row, ix keys, T(Next) next, const REAL *alpha, REAL *o,
                        ix o_stride) {
    const char *w8 = w + 8 * w_row;
    VEC sum[LANES][T(STRIP) / LANES];
    VINT odd = {0}, none = {0};
    UNROLL for (int i = 0; i < LANES; i++) sum[i][0] = V(set1)(0);
    for (ix j = 0; j < keys; next.at += next.row) {
        const ix end = least(keys, j + next.span);
        for (const char *near = next.at; j < end; j++, near += next.bytes, w += sizeof(REAL), w8 += sizeof(REAL), v += v_row) {
            VEC x = V(loadu)((const REAL *)v);
            __builtin_prefetch(near);
            T(add_strip)(0, sum, &x, w, w8, w_row);
        }
    }
    UNROLL for (int r = 0; r < LANES; r++) {
        if (r >= n) break;
        sum[r][0] = V(fma)(V(set1)(alpha[r]), V(load)(o + r * o_stride), sum[r][0]);
        odd |= ~(sum[r][0] - sum[r][0] == 0);
    }
    if (memcmp(&odd, &none, sizeof none)) return 0;
    UNROLL for (int r = 0; r < LANES; r++)
        if (r < n) V(store)(o + r * o_stride, sum[r][0]);
    return 1;
}

/* Whether values in place are summed in strips: where one vector holds all rows, and three register tiles would be needed. They
 * come from memory as fast as they are used (16 rows of float32: 182 cycles a key, by tiles 212); widened ones do so by tiles too. */
INLINE int T(sums_strips)(int dtype, ix rows) { return (int)LANES >= DIRECT_ROWS && dtype == NATIVE && rows > 2 * GROUP_ROWS; }
