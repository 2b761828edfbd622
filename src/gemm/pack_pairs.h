/* pack_pairs.h (template for float; after gemm/pack.h): packs keys and values for bfloat16 dot products, whose lanes
 * multiply pairs: two depths of a key, or one column of two values.
 *
 * Keys are panels [panel][depth / 2][panel width], values chunks [chunk][key / 2][chunk width]; a zero pads an odd
 * count. A pair is stored in the bits of a float. Sums are float; only the weighted sum rounds weights to bfloat16. The
 * instruction takes subnormal numbers for 0: the product excludes subnormal values, and counts subnormal queries and
 * keys (below 1.2e-38) as 0. */
#if PAIR_PRODUCTS

static void pack_keys_pairs(const Params *p, const Task *t, ix first, ix n, float *dst) {
    const char *at[VF], *ahead[VF];
    const ix panel_width = VF * TILE_VECTORS, depths = ceil_div(p->head_dim, 2), step = 2 * p->key.col;
    for (ix j = 0; j < n; j += VF) {
        float *panel = dst + j / panel_width * panel_width * depths + j % panel_width;
        find_rows_f32(t, t->key, p->key.row, first + j, ix_min(VF, n - j), at, ahead);
        for (ix d = 0; d < depths; d += VF) {
            ix width = ix_min(VF, depths - d);
            vf square[VF];
            for (ix i = 0; i < VF; i++) {
                const char *src = at[i] + d * step;
                __builtin_prefetch(ahead[i] + d * step);
                if (j + i >= n) square[i] = vf_set1(0);
                else if (p->key.col == 2 && 2 * (d + VF) <= p->head_dim) square[i] = vf_loadu((const float *)src);
                else {
                    float line[VF] = {0};
                    load_pairs(src, p->key.col, ix_min(2 * width, p->head_dim - 2 * d), 0, line);
                    square[i] = vf_loadu(line);
                }
            }
            vf_transpose(square);
            for (ix i = 0; i < width; i++) vf_store(panel + (d + i) * panel_width, square[i]);
        }
    }
}

/* Lanes that the product excludes: not finite, so large that sums could overflow, or subnormal. */
INLINE vfi not_in_product(vf x) {
    vf magnitude = (vf)((vfi)x & INT32_MAX);
    return ~(magnitude < vf_set1(0x1p95f)) | (((vfi)magnitude < 0x00800000) & ((vfi)magnitude != 0));
}

static void pack_values_pairs(const Params *p, const Task *t, ix first, ix n, Packed kv) {
    const Array *a = &p->value;
    const vfi none = {0};
    vfi odd = {0};
    for (ix c = 0; c < chunks_f32(p); c++) {
        ix from = chunk_start_f32(p, c), width = (chunk_start_f32(p, c + 1) - from) * VF;
        ix valid = ix_min(width, p->value_dim - from * VF);
        const char *values = t->value + from * VF * a->col;
        float *dst = (float *)kv.values + from * VF * ceil_div(n, 2), *low = t->line, *high = low + p->value_stride;
        memset(low, 0, width * sizeof(float));
        memset(high, 0, width * sizeof(float));
        for (ix j = 0; j < n; j += 2, dst += width) {
            int both = j + 1 < n, whole = a->col == 2 && valid == width;
            const char *src = values + row_of_key(t, first + j) * a->row;
            const char *next = values + row_of_key(t, first + j + both) * a->row;
            for (ix i = GATHER_AHEAD; i < GATHER_AHEAD + 2; i++)
                __builtin_prefetch(values + row_of_key(t, ix_min(first + j + i, t->lengths.kv_length - 1)) * a->row);
            if (!whole) load_row_f32(src, a->col, BF16, valid, low);
            if (!both) memset(high, 0, width * sizeof(float));
            else if (!whole) load_row_f32(next, a->col, BF16, valid, high);
            for (ix i = 0; i < width; i += VF) {
                vf x = whole ? vf_load_bf16((const uint16_t *)src + i) : vf_loadu(low + i);
                vf y = whole && both ? vf_load_bf16((const uint16_t *)next + i) : vf_loadu(high + i);
                odd |= not_in_product(x) | not_in_product(y);
                vf_store(dst + i, (vf)((vfi)((vfu)x >> 16) | (vfi)y));
            }
        }
    }
    if (!memcmp(&odd, &none, sizeof none)) return;
    for (ix j = 0; j < n; j++) {                  /* rare: find these rows and exclude them */
        int excluded = 0;
        for (int pass = 0; pass <= excluded && pass < 2; pass++)
            for (ix c = 0; c < chunks_f32(p); c++) {
                ix from = chunk_start_f32(p, c), width = (chunk_start_f32(p, c + 1) - from) * VF;
                uint32_t *pair = (uint32_t *)kv.values + from * VF * ceil_div(n, 2) + j / 2 * width;
                for (ix i = 0; i < width; i++) {
                    uint32_t magnitude = pair[i] >> (j % 2 * 16) & 0x7FFF;
                    if (pass) pair[i] &= j % 2 ? 0xFFFF : 0xFFFF0000;
                    else excluded |= magnitude >= (127 + 95) << 7 || (magnitude && magnitude < 0x80);
                }
            }
        if (excluded) kv.nonfinite[(*kv.n_nonfinite)++] = (int32_t)j;
    }
}

STEP void pack_pairs_f32(const Params *p, Task *t, ix block, Packed kv) {
    ix first = block * p->block_k, n = ix_min(p->block_k, t->lengths.kv_length - first);
    if (kv.keys) pack_keys_pairs(p, t, first, n, kv.keys);
    if (!kv.values) return;
    *kv.n_nonfinite = 0;
    if (p->value_dim) pack_values_pairs(p, t, first, n, kv);
}

#endif
