/* strip.h (template over REAL; after gemm/rows.h): products of strips: each lane is a query row, and each element of a
 * key is broadcast to all rows of a strip.
 *
 * No sum crosses lanes: 92 % of FMA peak at head_dim 128; dot products with the depth in the lanes reach 70 %. */

enum { T(STRIP) = LANES < 8 ? 8 : LANES, T(STRIP_VECTORS) = T(STRIP) / LANES };      /* rows_of_strip() of path.h */
/* WIDE: vectors of a register tile of the fused kernel. With AVX2 two by six keys reach 97 % of FMA peak and one by
 * eight 82 % (Zen 4, float32). The sums of no tile are more than MOST_ROWS x MOST_VECTORS. */
enum { T(WIDE) = VECTOR_BYTES == 64 ? 1 : 2, T(MOST_VECTORS) = LANES == 2 ? 4 : 2,
       T(MOST_ROWS) = (int)LANES > (int)GROUP_ROWS ? LANES : GROUP_ROWS };

/* Packs the task's queries, padded to whole vectors, into strips [strip][depth][row]. */
INLINE void T(pack_strips)(const Params *p, Task *t, ix depth) {
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

/* The microkernel with rows in the lanes: sum[i] = the sum of x * b[i] over n steps, for `rows` rows i of b that are
 * `row` bytes apart. A step advances x, `vectors` vectors, by `x_step` bytes and b by `along`. Row 8 has an address
 * register of its own: 16 addresses from six registers. Each step prefetches one line: free beside 16 products, while
 * several lines at once cost 1.7 cycles each. */
INLINE void T(rank1_lanes)(const int pairs, const int rows, const int vectors, const char *x, ix x_step, const char *b,
                           ix row, ix along, ix n, Prefetch *prefetch, VEC (*sum)[T(MOST_VECTORS)]) {
    const ix r3 = 3 * row, r5 = 5 * row, r7 = 7 * row, at[8] = {0, row, 2 * row, r3, 4 * row, r5, 2 * r3, r7};
    const char *b8 = b + 8 * row;
    Prefetch near = *prefetch;
    UNROLL for (int i = 0; i < rows; i++)
        UNROLL for (int v = 0; v < vectors; v++) sum[i][v] = V(set1)(0);
    for (const char *end = b + n * along; b != end; x += x_step, b += along, b8 += along) {
        VEC strip[T(MOST_VECTORS)];
        prefetch_next(&near, 64);
        UNROLL for (int v = 0; v < vectors; v++) strip[v] = V(loadu)((const REAL *)x + v * LANES);
        UNROLL for (int i = 0; i < rows; i++) {
            REAL y;
            memcpy(&y, (i < 8 ? b : b8) + at[i % 8], sizeof y);
            UNROLL for (int v = 0; v < vectors; v++)
                sum[i][v] = PRODUCT(pairs, V(set1)(y), strip[v], sum[i][v]);
        }
    }
    *prefetch = near;
}

/* Multiplies a strip by LANES keys, `row` bytes apart, into rows of s. */
INLINE void T(strip_scores)(const int pairs, const REAL *q, const char *k, ix row, ix depth, Prefetch *prefetch,
                            REAL *s, ix stride) {
    const ix chain = pairs ? CHAIN / 2 : CHAIN;
    for (ix from = 0, stop; from < depth; from = stop) {
        VEC sum[LANES][T(MOST_VECTORS)];
        stop = ix_min(depth, from + chain);
        T(rank1_lanes)(pairs, LANES, T(STRIP_VECTORS), (const char *)(q + from * T(STRIP)), T(STRIP) * sizeof(REAL),
                       k + from * (ix)sizeof(REAL), row, sizeof(REAL), stop - from, prefetch, sum);
        UNROLL for (int v = 0; v < T(STRIP_VECTORS); v++) {
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
