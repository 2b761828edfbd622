/* rows.h (template over REAL): converts rows of user memory, of any dtype and stride, from and to contiguous REAL. */

#define NATIVE (sizeof(REAL) == 4 ? F32 : F64)

/* Loads LANES elements of a dtype, widened to REAL; double vectors load float64 alone. */
INLINE VEC T(load_as)(const int dtype, const char *src) {
    (void)dtype;
#if REAL_BITS == 32
    switch (dtype) {
    case F16: return vf_load_f16((const uint16_t *)src);
    case BF16: return vf_load_bf16((const uint16_t *)src);
    case I8: return vf_load_i8((const int8_t *)src);
    }
#endif
    return V(loadu)((const REAL *)src);
}
INLINE int T(loads)(int dtype) { return dtype == NATIVE || (REAL_BITS == 32 && dtype != F64); }

static REAL T(element)(const char *p, int dtype) {
    union { float f; double d; uint16_t h; } x;
    switch (dtype) {
    case F32: memcpy(&x.f, p, 4); return x.f;
    case F16: memcpy(&x.h, p, 2); return f16_widen(x.h);
    case BF16: memcpy(&x.h, p, 2); return bf16_widen(x.h);
    case I8: return *(const int8_t *)p;
    default: memcpy(&x.d, p, 8);
    }
    /* a finite double beyond float becomes the largest finite float, not infinity */
    if (sizeof(REAL) == 4 && fabs(x.d) > FLT_MAX && fabs(x.d) <= DBL_MAX) return x.d < 0 ? -FLT_MAX : FLT_MAX;
    return (REAL)x.d;
}

INLINE ix T(element_size)(int dtype) {
    return dtype == F32 || dtype == PAIRS ? 4 : dtype == F64 ? 8 : dtype == I8 ? 1 : 2;
}

/* Loads vector i of a step of the microkernel (rank1.h); `both`: the second row of ROW_PAIRS exists. */
INLINE VEC T(load_step)(const int kind, const char *b, ix stride, int i, int both) {
#if REAL_BITS == 32 && BF16_DOT
    static const uint16_t zeros[VF];
    if (kind == ROW_PAIRS) {
        const uint16_t *low = (const uint16_t *)b + i * VF;
        return vf_load_pairs(low, both ? (const uint16_t *)(b + stride) + i * VF : zeros);
    }
#else
    (void)stride;
    (void)both;
#endif
    if (kind == PAIRS) return V(loadu)((const REAL *)b + i * LANES);
    return T(load_as)(kind, b + i * LANES * T(element_size)(kind));
}

static void T(load_row)(const char *src, ix stride, int dtype, ix n, REAL *dst) {
    ix i = 0;
    if (stride == T(element_size)(dtype)) {
        if (dtype == NATIVE) {
            memcpy(dst, src, n * sizeof(REAL));
            return;
        }
#if REAL_BITS == 32
        if (dtype == BF16)
            for (; i + LANES <= n; i += LANES) V(storeu)(dst + i, vf_load_bf16((const uint16_t *)src + i));
        if (dtype == F16)
            for (; i + LANES <= n; i += LANES) V(storeu)(dst + i, vf_load_f16((const uint16_t *)src + i));
        if (dtype == I8)
            for (; i + LANES <= n; i += LANES) V(storeu)(dst + i, vf_load_i8((const int8_t *)src + i));
#endif
    }
    for (; i < n; i++) dst[i] = T(element)(src + i * stride, dtype);
}

/* The row itself where it is contiguous REAL, else a copy in `line`. */
INLINE const REAL *T(row)(const char *src, ix stride, int dtype, ix n, REAL *line) {
    if (dtype == NATIVE && stride == (ix)sizeof(REAL) && (uintptr_t)src % sizeof(REAL) == 0) return (const REAL *)src;
    T(load_row)(src, stride, dtype, n, line);
    return line;
}

static void T(store_row)(const REAL *src, ix n, char *dst, ix stride, int dtype) {
    ix i = 0;
    if (dtype == NATIVE && stride == (ix)sizeof(REAL)) {
        memcpy(dst, src, n * sizeof(REAL));
        return;
    }
#if REAL_BITS == 32
    if (dtype == F16 && stride == 2)
        for (; i + LANES <= n; i += LANES) vf_store_f16((uint16_t *)dst + i, V(loadu)(src + i));
    if (dtype == BF16 && stride == 2)
        for (; i + LANES <= n; i += LANES) vf_store_bf16((uint16_t *)dst + i, V(loadu)(src + i));
#endif
    for (; i < n; i++) {
        char *p = dst + i * stride;
        float f = (float)src[i];
        double d = src[i];
        uint16_t h;
        switch (dtype) {
        case F32: memcpy(p, &f, 4); break;
        case F64: memcpy(p, &d, 8); break;
        case F16: h = f16_round(sizeof(REAL) == 8 ? round_to_odd(d) : f); memcpy(p, &h, 2); break;
        default: h = bf16_round(sizeof(REAL) == 8 ? round_to_odd(d) : f); memcpy(p, &h, 2);
        }
    }
}
