/* hooks.h: single primitives over arrays, for the tests. */
#ifndef ATTNC_HOOKS_H
#define ATTNC_HOOKS_H

#include "kernels.h"

#define APPLY(name, type, real, vec, lanes) \
    static void apply_##name##_##type(real *x, ix n) { \
        for (ix i = 0; i < n; i += lanes) { \
            real part[lanes] = {0}; \
            memcpy(part, x + i, ix_min(lanes, n - i) * sizeof(real)); \
            vec##_storeu(part, vec##_##name(vec##_loadu(part))); \
            memcpy(x + i, part, ix_min(lanes, n - i) * sizeof(real)); \
        } \
    }
APPLY(exp2, f32, float, vf, VF)
APPLY(exp2, f64, double, vd, VD)
APPLY(tanh, f32, float, vf, VF)
APPLY(tanh, f64, double, vd, VD)
#undef APPLY

static void widen_f32(const char *x, int dtype, float *y, ix n) { load_row_f32(x, 2, dtype, n, y); }
static void narrow_f32(const float *x, char *y, int dtype, ix n) { store_row_f32(x, n, y, 2, dtype); }

#endif
