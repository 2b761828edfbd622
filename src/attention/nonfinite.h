/* nonfinite.h (template over REAL; after gemm/pack.h): adds the value rows that packing excludes from the product (not
 * finite, or so large (LARGEST) that their sums could overflow), key by key, to the rows that may see the key. */

/* Adds weight times value in columns start .. stop to those of rows from .. n of the group r0 that may see the key.
 * nonfinite_o sums large values scaled, so that they cannot overflow before the division by the row sum. */
static void T(add_nonfinite)(const Params *p, Task *t, ix r0, ix from, ix n, ix block, const int32_t *nonfinite,
                             ix n_nonfinite, ix start, ix stop) {
    ix first = block * p->block_k;
    if (!n_nonfinite) return;
    if (!t->uses_nonfinite) memset(t->nonfinite_o, 0, t->rows * p->value_stride * sizeof(REAL));
    t->uses_nonfinite = 1;
    for (ix k = 0; k < n_nonfinite; k++) {
        ix j = nonfinite[k];
        if (j < t->column || j >= t->column_stop) continue;
        T(load_value)(p, t, first + j, start, stop - start, t->line);
        for (ix r = r0 + from; r < r0 + n; r++) {
            if (first + j < t->row[r].start || first + j >= t->row[r].stop) continue;
            if (t->uses_allow && !t->allow[(r - r0) * p->width + j]) continue;
            if (p->bias.data) {
                const REAL *b = t->bias_row[r - r0];
                if (b[j - ix_max(t->row[r].start - first, t->column)] == -INFINITY) continue;
            }
            REAL w = P_(s)[(r - r0) * p->width + j], *o = P_(o) + r * p->value_stride,
                *big = P_(nonfinite_o) + r * p->value_stride;
            for (ix i = start; i < stop; i++) {
                REAL v = ((const REAL *)t->line)[i - start];
                if (FABS(v) < LARGEST) o[i] += w * v;
                else big[i] += w * (v * LARGE_SCALE);
            }
        }
    }
}

static void T(rescale_nonfinite)(const Params *p, Task *t, ix r0, ix n) {
    if (t->uses_nonfinite)
        for (ix r = 0; r < n; r++)
            for (ix i = 0; i < p->value_stride; i++) P_(nonfinite_o)[(r0 + r) * p->value_stride + i] *= P_(alpha)[r];
}
