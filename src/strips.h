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
