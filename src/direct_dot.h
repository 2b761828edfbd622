/* direct_dot.h: the steps of direct.h for bfloat16 where products take pairs (dot.h): of depths as they lie in a key, of keys
 * 2 i and 2 i + 1 for the values, whose rows are interleaved in registers. */
static void scores_direct_dot(const Params *p, Task *t, ix n, ix block) {
    direct_keys_f32(PAIRS, p->key.col != 2, p, t, n, block);
}

/* o = o * alpha + weights @ values for rows x one whole chunk, over pairs of keys; the key missing at an odd end is 0. The answer is
 * 0, and nothing stored, where sums are not finite (if `check`), or values are subnormal (if it is 2). */
INLINE int sum_pairs(const int rows, const int vectors, const float *w, ix w_stride, const char *v, ix v_stride, Ahead *ahead,
                     ix keys, int check, const float *alpha, float *o, ix o_stride) {
    static const uint16_t zeros[VF * TILE_VECTORS];
    Ahead near = *ahead;
    vf sum[TALL_ROWS][TILE_VECTORS], odd = vf_set1(0), small = (vf)~(vfi){0};
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int i = 0; i < vectors; i++) sum[r][i] = vf_set1(0);
    for (ix j = 0; j < keys; j += 2, v += 2 * v_stride) {
        const uint16_t *low = (const uint16_t *)v, *high = j + 1 < keys ? (const uint16_t *)(v + v_stride) : zeros;
        vf value[TILE_VECTORS];
        UNROLL for (int i = 0; i < vectors; i++) value[i] = vf_load_pairs(low + i * VF, high + i * VF);
        UNROLL for (int i = 0; i < vectors; i++) small = vf_least_pairs(small, value[i]);
        if (rows > GROUP_ROWS && near.half) fetch(&near, 2 * vectors * VF);
        else fetch(&near, 4 * vectors * VF);
        UNROLL for (int r = 0; r < rows; r++) {
            vf x = vf_set1(w[r * w_stride + j / 2]);
            UNROLL for (int i = 0; i < vectors; i++) sum[r][i] = vf_dot(x, value[i], sum[r][i]);
        }
    }
    *ahead = near;
    if (check == 2 && vf_subnormal_pairs(small)) return 0;    /* the product took them for 0 */
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int i = 0; i < vectors; i++) {
            sum[r][i] = vf_fma(vf_set1(alpha[r]), vf_load(o + r * o_stride + i * VF), sum[r][i]);
            odd += sum[r][i] - sum[r][i];
        }
    if (check && !all_zero_f32(odd)) return 0;
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int i = 0; i < vectors; i++) vf_store(o + r * o_stride + i * VF, sum[r][i]);
    return 1;
}

static int sum_pairs_group(ix n, const float *w, ix w_stride, const char *v, ix v_stride, Ahead *ahead, ix keys,
                           int check, const float *alpha, float *o, ix o_stride) {
    int fine = 1;
#define ROWS(rows) fine = sum_pairs(rows, rows > GROUP_ROWS ? TALL_VECTORS : TILE_VECTORS, w, w_stride, v, v_stride, ahead, keys, \
                                    check, alpha, o, o_stride)
    SUM_CASES(n, ROWS)
#undef ROWS
    return fine;
}

/* n elements of each row, one row behind the other */
static void copy_halves(const char *v, const Array *a, ix keys, ix n, uint16_t *dst) {
    for (ix j = 0; j < keys; j++, v += a->row, dst += n)
        for (ix i = 0; i < n; i++) memcpy(dst + i, v + i * a->col, 2);
}

/* As values_guarded of direct.h, where subnormal values too are added key by key: in TALL_VECTORS from `start` on, whatever the
 * tile, for the last rows of a head may be a lower and wider one than those before. */
static __attribute__((noinline, cold)) void pairs_guarded(const Params *p, Task *t, ix first, ix stop, ix block, ix from, ix keys,
                                                          ix start, const float *alpha) {
    const Array *a = &p->value;
    const ix width = TALL_VECTORS * VF;
    ix n_apart = 0;
    const char *v = t->value + (block * p->block_k + from) * a->row + start * VF * a->col;
    uint16_t *copy = t->packed.values;
    Ahead quiet = {0};
    for (ix r = first; r < stop; r++) {
        const float *w = (const float *)t->halves + r * (p->width / 2) + from / 2;
        float *o = (float *)t->o + r * p->value_stride + start * VF;
        for (int pass = 0, fine = 0; !fine; pass++) {
            copy_halves(v, a, keys, width, copy);
            n_apart = 0;
            for (ix j = 0; j < keys; j++) {
                uint16_t *x = copy + j * width;
                int apart = 0;
                for (ix i = 0; i < width; i++) {
                    unsigned magnitude = x[i] & 0x7FFF;
                    apart |= magnitude >= (pass ? (127 + 95) << 7 : 0x7F80) || (magnitude && magnitude < 0x80);
                }
                if (apart) memset(x, 0, 2 * width), t->packed.apart[n_apart++] = (int32_t)(from + j);
            }
            fine = sum_pairs(1, TALL_VECTORS, w, 0, (char *)copy, 2 * width, &quiet, keys, !pass, alpha + r, o, 0);
        }
        add_apart_f32(p, t, 0, r, r + 1, block, t->packed.apart, n_apart, start * VF, start * VF + width);
    }
}

static void values_direct_dot(const Params *p, Task *t, ix n, ix block) {
    const Array *a = &p->value;
    const char *values = t->value + block * p->block_k * a->row;
    const float *alpha = t->alpha, ones[DIRECT_ROWS] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
    const ix each = rows_of_sums(n), w_stride = p->width / 2;
    const int twice = n - each > GROUP_ROWS;
    Ahead quiet = {0};
    rescale_apart_f32(p, t, 0, n);
    for (ix from = t->column / 2 * 2, stop; from < t->columns; from = stop, alpha = ones) {
        const float *w = (const float *)t->halves + from / 2;
        stop = least((from / DIRECT_KEYS + 1) * DIRECT_KEYS, t->columns);
        Ahead ahead = ahead_of(a, 2 * p->value_dim, values, from, twice);
        for (ix c = 0; c < chunks_f32(p); c++) {
            ix start = chunk_start_f32(p, c), row = a->row;
            const char *v = values + from * a->row + start * VF * a->col;
            if (a->col != 2) {
                copy_halves(v, a, stop - from, TILE_VECTORS * VF, t->packed.keys);
                v = t->packed.keys;
                row = 2 * TILE_VECTORS * VF;
            }
            for (ix r = 0, m; r < n; r += m) {
                float *o = (float *)t->o + r * p->value_stride + start * VF;
                m = least(each, n - r);
                const ix wide = vectors_of_sums(m, TILE_VECTORS);
                for (ix i = 0; i < TILE_VECTORS; i += wide)
                    if (!sum_pairs_group(m, w + r * w_stride, w_stride, v + 2 * i * VF, row, r && !twice ? &quiet : &ahead, stop - from,
                                         2, alpha + r, o + i * VF, p->value_stride))
                        for (ix k = start + i; k < start + i + wide; k += TALL_VECTORS)
                            pairs_guarded(p, t, r, r + m, block, from, stop - from, k, alpha);
            }
        }
    }
}
