/* splits.h (template over REAL; after gemm/rows.h): saves and merges the states of few rows whose keys are split. */

/* The state of a row after some keys: [sum of values][sum of nonfinite values][maximum][uses nonfinite] and the row sum
 * in double. */
INLINE REAL *T(state)(const Params *p, char *states, ix r) { return (REAL *)(states + r * p->state_bytes); }
INLINE double *T(state_sum)(const Params *p, REAL *state) { return (double *)(state + 2 * p->value_stride + LANES); }

STEP void T(save_state)(const Params *p, Task *t, char *states) {
    ix width = p->value_stride;
    for (ix i = 0; i < t->rows * width; i++) {       /* scales sums so large that a merge could overflow */
        REAL *o = P_(o) + i;
        if (!(FABS(*o) >= LARGEST)) continue;
        if (!t->uses_nonfinite) memset(t->nonfinite_o, 0, t->rows * width * sizeof(REAL));
        t->uses_nonfinite = 1;
        P_(nonfinite_o)[i] += *o * LARGE_SCALE;
        *o = 0;
    }
    for (ix r = 0; r < t->rows; r++) {
        REAL *x = T(state)(p, states, r);
        memcpy(x, P_(o) + r * width, width * sizeof(REAL));
        if (t->uses_nonfinite) memcpy(x + width, P_(nonfinite_o) + r * width, width * sizeof(REAL));
        x[2 * width] = P_(row_max)[r];
        x[2 * width + 1] = t->uses_nonfinite;
        *T(state_sum)(p, x) = t->row_sum[r];
    }
}

/* Merge the next state in key order. An empty one (maximum -inf, sum 0) changes no bit. */
STEP void T(merge_state)(const Params *p, Task *t, char *states) {
    ix width = p->value_stride;
    for (ix r = 0; r < t->rows; r++) {
        REAL *x = T(state)(p, states, r), old = P_(row_max)[r], other = x[2 * width], new = other > old ? other : old;
        REAL alpha = old == new ? 1 : V(exp2_one)((old - new) * (REAL)p->exponent);
        REAL beta = other == new ? 1 : V(exp2_one)((other - new) * (REAL)p->exponent);
        REAL *o = P_(o) + r * width, *big = P_(nonfinite_o) + r * width;
        for (ix i = 0; i < width; i++) o[i] = o[i] * alpha + x[i] * beta;
        if (x[2 * width + 1] != 0 && !t->uses_nonfinite) {
            memset(t->nonfinite_o, 0, t->rows * width * sizeof(REAL));
            t->uses_nonfinite = 1;
        }
        if (t->uses_nonfinite)
            for (ix i = 0; i < width; i++) big[i] = big[i] * alpha + (x[2 * width + 1] != 0 ? x[width + i] * beta : 0);
        t->row_sum[r] = t->row_sum[r] * alpha + *T(state_sum)(p, x) * beta;
        P_(row_max)[r] = new;
    }
}
