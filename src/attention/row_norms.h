/* row_norms.h (template over REAL; after gemm/rows.h): the norm of a row, from which a second pass computes its
 * weights: the maximum (or a given lse) in final_max, and the inverse of the sum. */

INLINE double *T(row_norm)(const Params *p, const Task *t, double *norms, ix r) {
    return norms + 2 * ((t->batch * p->kv_heads + t->kv_head) * p->rows + t->first + r);
}

STEP void T(save_row_norms)(const Params *p, Task *t, double *norms) {
    for (ix r = 0; r < t->rows; r++) {
        double *x = T(row_norm)(p, t, norms, r);
        x[0] = P_(row_max)[r];
        x[1] = t->row_sum[r];
    }
}

STEP void T(load_row_norms)(const Params *p, Task *t, double *norms) {
    for (ix r = 0; r < t->rows; r++) {
        double *x = T(row_norm)(p, t, norms, r);
        P_(final_max)[r] = (REAL)x[0];
        t->inverse[r] = x[1];
    }
}

/* Sets a given lse, in the units of the stored scores, as the maximum; it includes the sum, whose inverse becomes 1. */
INLINE void T(set_lse)(const Params *p, Task *t, ix r, REAL lse) {
    P_(final_max)[r] = (REAL)(lse / p->unit);
    t->inverse[r] = lse == lse ? 1 : lse;
}

/* Loads the lse, or a norm whose inverse is above 0: more exact, because it keeps maximum and sum apart. */
STEP void T(load_lse)(const Params *p, Task *t) {
    for (ix r = 0; r < t->rows; r++) {
        const double *norm = p->key_request.norm ? p->key_request.norm + 2 * row_index(p, t, r) : NULL;
        REAL lse;
        memcpy(&lse, row_address(t, &p->lse, t->lse, r), sizeof lse);
        T(set_lse)(p, t, r, lse);
        if (norm && norm[1] > 0) P_(final_max)[r] = (REAL)norm[0], t->inverse[r] = norm[1];
    }
}

/* Loads the norm that statistics of rows wrote, or a given lse. */
STEP void T(load_given_norms)(const Params *p, Task *t) {
    const double *norm = p->key_request.norm;
    const REAL *given = p->key_request.given;
    for (ix r = 0; r < t->rows; r++) {
        ix i = row_index(p, t, r);
        if (given) T(set_lse)(p, t, r, given[i]);
        else P_(final_max)[r] = (REAL)norm[2 * i], t->inverse[r] = norm[2 * i + 1];
    }
}
