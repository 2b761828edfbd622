/* scratch.h: lays out a task's arrays in the scratch of its thread. */
#ifndef ATTNC_SCRATCH_H
#define ATTNC_SCRATCH_H

#include "call/call.h"

static inline ix padded(ix bytes) { return round_up(bytes, 64); }

/* Takes the next `bytes` of the scratch. */
static inline char *carve(char **at, ix bytes) {
    char *part = *at;
    *at += padded(bytes);
    return part;
}

/* Whether rows of the array are contiguous and of the accumulation type. */
static inline int contiguous(const Params *p, const Format *f, const Array *a) {
    return a->dtype == p->type && a->col == f->real;
}

/* Bytes of a packed block of keys and values. */
static inline ix packed_bytes(const Params *p, const Format *f) {
    return padded(p->width * round_up(p->head_dim, 2) * f->packed) + padded(p->width * p->value_stride * f->packed)
        + padded(p->width * (ix)sizeof(int32_t) + 64) + padded(p->key_products * f->real);
}

/* The parts of one packed block; for paths in place, two copies of a chunk of a step's values instead. */
static inline Packed packed_at(const Params *p, const Format *f, char *s) {
    Packed kv = {.keys = s};
    if (p->unfused != PACKED) {
        ix chunk = IN_PLACE_KEYS * f->panel * f->real;
        kv.values = s + chunk;
        kv.n_nonfinite = (ix *)(s + 2 * chunk);
    } else {
        kv.values = s + padded(p->width * round_up(p->head_dim, 2) * f->packed);
        kv.products = s + p->pack_bytes - padded(p->key_products * f->real);
        kv.n_nonfinite = (ix *)((char *)kv.products - padded(p->width * (ix)sizeof(int32_t) + 64));
    }
    kv.first_row = kv.n_nonfinite + 1;
    kv.nonfinite = (int32_t *)((char *)kv.n_nonfinite + 64);
    return kv;
}

static inline ix own_packed_bytes(const Params *p, const Format *f) {
    if (p->unfused != PACKED) return 2 * IN_PLACE_KEYS * f->panel * f->real + IN_PLACE_KEYS * (ix)sizeof(int32_t) + 64;
    return p->shared ? 0 : p->pack_bytes;
}

static inline void carve_statistics(const Params *p, const Format *f, char **at, StatScratch *s) {
    const RowRequest *r = &p->row_request;
    const KeyRequest *k = &p->key_request;
    ix real = f->real, rows = r->sums ? p->block_q : 0, keys = p->mode == KEY_STATISTICS ? p->width : 0;
    s->surprise = (double *)carve(at, rows * 8);
    s->position = (double *)carve(at, rows * 8);
    s->distance = (double *)carve(at, rows * 8);
    s->scores = carve(at, r->sums ? GROUP_ROWS * p->width * real : 0);
    s->heap = carve(at, p->block_q * r->k * real);
    s->heap_keys = (int32_t *)carve(at, p->block_q * r->k * 4);
    s->mass = (double *)carve(at, keys * 8);
    s->bin = (double *)carve(at, keys * 8);
    s->visible = (double *)carve(at, keys * 8);
    s->hits = (int64_t *)carve(at, keys * 8);
    s->products = (double *)carve(at, keys * k->columns * 8);
    s->nan = (uint8_t *)carve(at, GROUP_ROWS * keys);
    s->largest = carve(at, keys * real);
    s->part = carve(at, keys * real);
    s->merged = (double *)carve(at, k->map ? k->key_bins * 8 : 0);
}

/* Sets the task's arrays in `scratch`; returns their bytes. */
static ix carve_task(const Params *p, const Format *f, char *scratch, Task *t) {
    ix real = f->real, rows = p->block_q, sums = rows * p->value_stride * real, group = p->group_rows * p->width;
    int in_place = p->unfused != PACKED;
    int widens = p->path == FUSED && !(contiguous(p, f, &p->key) && contiguous(p, f, &p->value));
    char *at = scratch;
    t->q = carve(&at, p->copy_queries ? rows * p->depth_stride * real : 0);
    t->strips = carve(&at, p->unfused == STRIPS ? p->group_rows * p->depth_stride * real : 0);
    t->wide = carve(&at, widens ? p->kv_len * (p->head_dim + p->value_dim) * real : 0);
    t->s = carve(&at, ix_max(p->kept_scores, 1) * group * real);
    t->o = carve(&at, sums);
    t->nonfinite_o = carve(&at, sums);
    t->row_max = carve(&at, rows * real + 64);
    t->alpha = carve(&at, p->group_rows * real + 64);
    t->block_max = carve(&at, p->kept_scores ? rows * p->k_blocks * real + 64 : 0);
    t->row_sum = (double *)carve(&at, rows * 8);
    t->row = (Row *)carve(&at, rows * (ix)sizeof(Row));
    t->bias_rows = carve(&at, p->bias.data ? group * real : 0);
    t->row_products = carve(&at, p->group_rows * p->row_stride * real);
    t->allow = (uint8_t *)carve(&at, p->masked || p->mode == WEIGHTED_SUM ? group : 0);
    t->line = carve(&at, (ix_max((in_place ? f->lanes : 4) * p->depth_stride, ix_max(2 * p->value_stride, p->width))
                          + f->lanes) * real);
    t->begun = carve(&at, in_place ? ix_min(p->group_rows, FEW_ROWS) * p->value_stride * real : 0);
    t->gathered = carve(&at, in_place && p->key_rows.data ? IN_PLACE_KEYS * p->value_stride * real : 0);
    t->packed = packed_at(p, f, carve(&at, own_packed_bytes(p, f)));
    t->kept_part = (Range *)carve(&at, p->kept_scores * (ix)sizeof(Range));
    t->q_rows = (const void **)carve(&at, rows * (ix)sizeof(void *));
    t->peaks = carve(&at, p->group_rows * 64);
    t->final_max = carve(&at, rows * real + 64);
    t->inverse = (double *)carve(&at, rows * 8);
    t->pairs = (uint16_t *)carve(&at, f->packed < real ? group * 2 : 0);
    carve_statistics(p, f, &at, &t->stats);
    return padded(at - scratch);
}

/* Bytes of a table's rows as factors. */
static inline ix table_rows_bytes(const Params *p, const Gradients *g, const Format *f) {
    return p->table_rows * g->factor_stride * f->real;
}

/* Sets the arrays of gradients in `scratch`; returns their bytes. */
static ix carve_gradients(const Params *p, const Gradients *g, const Format *f, char *scratch, GradientScratch *b) {
    ix real = f->real, rows = p->block_q, keys = p->width;
    char *at = scratch;
    b->query = carve(&at, rows * g->stride * real);
    b->grad_out = carve(&at, rows * g->value_stride * real);
    b->grad_rows = (const void **)carve(&at, rows * (ix)sizeof(void *));
    b->nonfinite = (uint8_t *)carve(&at, rows);
    b->delta = carve(&at, rows * real);
    b->weights = carve(&at, rows * p->width * real);
    b->scores = carve(&at, rows * p->width * real);
    b->slopes = carve(&at, p->softcap != 0 ? GROUP_ROWS * p->width * real : 0);
    b->keys.keys = carve(&at, keys * p->head_dim * real);
    b->values.keys = carve(&at, keys * g->value_dim * real);
    b->keys.values = b->values.values = NULL;      /* both are panels of keys */
    b->row_factors = g->relevance ? carve(&at, rows * g->factor_stride * real) : b->query;
    b->key_factors = carve(&at, keys * g->factor_stride * real);
    b->d_query = carve(&at, g->query.data ? g->accumulators * rows * g->factor_stride * real : 0);
    b->d_key = carve(&at, keys * g->factor_stride * real);
    b->d_value = carve(&at, keys * g->value_stride * real);
    int terms = p->relative_index && !g->relevance, of_row = terms && p->relative_key.data;
    b->keys.products = carve(&at, p->key_products * real);
    b->keys.first_row = (ix *)carve(&at, sizeof(ix));
    b->row_sums = carve(&at, of_row ? rows * p->row_stride * real : 0);
    b->key_sums = carve(&at, terms ? p->key_products * real : 0);
    b->d_relative_key = carve(&at, g->relative_key.data ? (p->relative_key.head ? p->heads_per_kv : 1)
                              * table_rows_bytes(p, g, f) : 0);
    b->d_relative_query = carve(&at, g->relative_query.data ? tables_of_head(p) * table_rows_bytes(p, g, f) : 0);
    b->part = (Range *)carve(&at, rows * (ix)sizeof(Range));
    b->span = (Range *)carve(&at, keys * (ix)sizeof(Range));
    return padded(at - scratch);
}

#endif
