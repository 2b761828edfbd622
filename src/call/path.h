/* path.h: the paths by which the kernels compute attention, and the choice between them. */
#ifndef ATTNC_PATH_H
#define ATTNC_PATH_H

#include "call/params.h"
#include "call/sizes.h"

/* PACKED     keys and values are packed into panels and chunks; register tiles of 6 rows (attention/scores.h, values.h)
 * IN_PLACE   few rows: keys and values are read in place, a score is a dot product over lanes (attention/in_place.h)
 * STRIPS     few rows that fill vectors: each lane is a row, keys are broadcast from memory (gemm/strip.h)
 * FUSED      small heads: scores, softmax and weighted sum of a strip of rows in one pass (attention/fused.h) */
enum Path { PACKED, IN_PLACE, STRIPS, FUSED, PATHS };
static const char *const PATH_NAMES[PATHS] = {"packed", "in_place", "strips", "fused"};

/* The sizes of an element type on an instruction set. */
typedef struct {
    int real;                    /* bytes of an accumulated number */
    int lanes;                   /* of a vector */
    int panel;                   /* keys of a panel */
    int packed;                  /* bytes of a packed number: less than `real` where bfloat16 is multiplied in pairs */
} Format;

/* Rows of a strip: two independent chains of sums for each multiply-and-add that a cycle can start. */
static inline ix rows_of_strip(const Format *f) { return ix_max(8, f->lanes); }

/* Statistics of a row must not depend on the number of rows of a call, so all of them take one path. */
static inline int for_statistics(const Params *p) {
    return p->row_request.any || p->key_request.norm || p->key_request.given;
}

/* The path for p->rows query rows of a kv head, unless fused: packing a key pays off when more than 16 rows use it;
 * strips need rows in more than half of their lanes. Content-relative terms are products of packed keys. */
static inline enum Path path_of_rows(const Params *p, const Format *f) {
    if (p->rows > IN_PLACE_ROWS || p->mode == WEIGHTED_SUM || p->mode == BACKWARD || for_statistics(p)
        || p->relative_index) return PACKED;
    return p->rows > GROUP_ROWS && 2 * p->rows > f->lanes && p->head_dim > 0 ? STRIPS : IN_PLACE;
}

/* Keys of a block: the most whose keys and values fit in block_bytes; in-place rows stream in long blocks. */
static inline ix keys_of_block(const Params *p, const Format *f, enum Path path) {
    ix keys = SIZES.max_block_k;
    if (path == IN_PLACE) return SIZES.in_place_block_k;
    while (keys > SIZES.min_block_k && keys * (p->head_dim + p->value_dim) * f->real > SIZES.block_bytes) keys /= 2;
    return keys;
}

/* Whether rows fill strips well enough to be fused: those of STRIPS, or strips with at most a sixth of their lanes
 * unused (24 rows in 32 lanes, 400 keys: fused is 11 % slower). More than few_rows rows are fused with 32-byte vectors
 * alone: with 64-byte ones it was not measured. 16-byte vectors cannot broadcast from memory: fused calls would take
 * 1.2 to 2.4 times as long. */
static inline int fills_strips(const Params *p, const Format *f, enum Path path) {
    if (f->lanes * f->real < 32) return 0;
    if (p->rows <= IN_PLACE_ROWS) return path == STRIPS && p->kv_len <= IN_PLACE_KEYS;
    if (p->rows > SIZES.few_rows)
        return f->lanes * f->real == 32 && p->kv_len * (p->head_dim + p->value_dim) * f->real <= FUSED_BYTES;
    return 5 * round_up(p->rows, rows_of_strip(f)) <= 6 * p->rows;
}

/* Whether the fused kernel covers the call: one block of keys, no option that changes scores or excludes keys beyond
 * causal order or, with 32-byte vectors, a bias (64-byte ones were not measured), and no result but the output. */
static inline int is_small_and_plain(const Params *p, const Format *f, enum Path path) {
    return p->mode == ATTEND && p->out.data && p->kv_len <= ix_min(keys_of_block(p, f, path), FUSED_KEYS)
        && p->head_dim <= FUSED_DEPTH && p->head_dim % f->lanes == 0 && p->value_dim % rows_of_strip(f) == 0
        && (p->bias_alone ? f->lanes * f->real == 32 : p->raw_scores && !p->masked)
        && p->left < 0 && !p->sinks.data && !p->q_starts.data && !p->q_lengths.data
        && !p->key_scale.data && !p->key_rows.data && !p->relative_index && f->packed == f->real
        && !p->lse.data && !p->weights.data && !p->scores.data && !p->row_request.any;
}

/* The path of a call. Equal rows must get equal bits and each path has its own reduction order, so the choice follows
 * from rows, depths, dtype and options alone, never from threads or strides. `unfused` receives the path that FUSED
 * falls back to when a value is not finite, and the path itself otherwise. */
static inline enum Path choose_path(const Params *p, const Format *f, int *unfused) {
    *unfused = path_of_rows(p, f);
    return fills_strips(p, f, *unfused) && is_small_and_plain(p, f, *unfused) ? FUSED : *unfused;
}

#endif
