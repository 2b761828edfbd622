/* finish_scores.h (template over REAL; after attention/mask.h): turns products into the scores that enter the softmax:
 * scale, softcap, bias and alibi in this order, then -inf for excluded keys. */

/* Adds -slope times the distance, which is exact in double and then rounded once to REAL. */
static void T(add_alibi)(const Params *p, const Task *t, ix r, REAL *s) {
    REAL slope;
    ix position = saturating_add(t->row[r].position, t->lengths.offset);
    memcpy(&slope, address(&p->slopes, &p->batch, t->batch, t->row[r].head), sizeof slope);
    if (t->k_positions)
        for (ix j = t->column; j < t->column_stop; j++)
            s[j] += -slope * (REAL)fabs((double)position - (double)position_of(p, t, t->first_key + j));
    else for (ix j = t->column; j < t->column_stop; j++)
        s[j] += -slope * (REAL)fabs((double)position - (double)(t->first_key + j));
}

/* The scores of columns j .. stop, whole vectors that a row sees, without a softcap: no branch within the loop, where
 * the general one has several (relative bias 1.04 instead of 1.11 x plain attention). b: the bias at column 0. */
INLINE VEC T(finish_whole)(const int finish, const int biased, const int select, VEC scale, ix j, ix stop,
                           const uint8_t *allow, const REAL *b, REAL *s, VEC peak) {
    const VEC never = V(set1)(-INFINITY);
    for (; j < stop; j += LANES) {
        VEC x = V(load)(s + j);
        if (finish) x *= scale;
        if (biased) {
            VEC y = V(loadu)(b + j);
            x = V(unless_equal)(x + y, y, never);
        }
        if (select) x = V(keep_bytes)(x, allow + j, never);
        peak = V(max)(x, peak);
        V(store)(s + j, x);
    }
    return peak;
}

/* Finishes the scores of a row in one pass; returns their lanewise maximum. `finish`: applies scale, softcap and bias
 * (b, from column lo). `select`: sets the scores of excluded keys to -inf, even where they are NaN. */
INLINE VEC T(finish_row)(const int finish, const int select, const Params *p, const Task *t, ix lo, ix hi,
                         const uint8_t *allow, const REAL *b, REAL *s) {
    const VEC never = V(set1)(-INFINITY), scale = V(set1)((REAL)p->scale), cap = V(set1)((REAL)p->softcap);
    const ix whole_start = round_up(lo, LANES), whole_stop = hi / LANES * LANES;
    VEC peak = never;
    for (ix j = t->from; j < t->to; j += LANES) {
        const int whole = j >= lo && j + LANES <= hi;
        if (j == whole_start && j < whole_stop && !(finish && p->softcap > 0)) {
#define WHOLE(biased, select) \
    T(finish_whole)(finish, biased, select, scale, j, whole_stop, allow, b ? b - lo : NULL, s, peak)
            if (finish && b) peak = select && t->uses_allow ? WHOLE(1, 1) : WHOLE(1, 0);
            else peak = select && t->uses_allow ? WHOLE(0, 1) : WHOLE(0, 0);
#undef WHOLE
            j = whole_stop - LANES;
            continue;
        }
        ix skip = 0, stop = LANES;
        if (!whole) skip = ix_min(ix_max(lo - j, 0), LANES), stop = ix_min(ix_max(hi - j, 0), LANES);
        VEC x = V(load)(s + j);
        if (finish) x *= scale;
        if (finish && p->softcap > 0) x = cap * V(tanh)(x / cap);
        if (finish && b) {
            VEC y;
            if (whole) y = V(loadu)(b + j - lo);
            else {
                REAL edge[LANES] = {0};
                for (ix i = skip; i < stop; i++) edge[i] = b[j + i - lo];
                y = V(loadu)(edge);
            }
            x = V(unless_equal)(x + y, y, never);
        }
        if (select && t->uses_allow) x = V(keep_bytes)(x, allow + j, never);
        else if (select && !whole) x = V(keep_bits)(x, ((1u << stop) - 1) & ~((1u << skip) - 1), never);
        peak = V(max)(x, peak);
        V(store)(s + j, x);
    }
    return peak;
}

STEP void T(finish_scores)(const Params *p, Task *t, ix r0, ix n) {
    for (ix r = r0; r < r0 + n; r++) {
        REAL *s = P_(s) + (r - r0) * p->width;
        const REAL *b = p->bias.data ? t->bias_row[r - r0] : NULL;
        const uint8_t *allow = t->allow + (r - r0) * p->width;
        ix lo = ix_max(t->row[r].start - t->first_key, t->column);
        ix hi = ix_min(t->row[r].stop - t->first_key, t->column_stop);
        VEC peak;
        if (p->raw_scores) peak = T(finish_row)(0, 1, p, t, lo, hi, allow, NULL, s);
        else if (!p->slopes.data) peak = T(finish_row)(1, 1, p, t, lo, hi, allow, b, s);
        else {
            T(finish_row)(1, 0, p, t, lo, hi, allow, b, s);
            T(add_alibi)(p, t, r, s);
            peak = T(finish_row)(0, 1, p, t, lo, hi, allow, NULL, s);
        }
        V(store)(P_(peaks) + (r - r0) * LANES, peak);
    }
}
