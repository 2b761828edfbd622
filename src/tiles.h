/* tiles.h: the steps of tile.h and results.h for float and for double, and the table by which the loops call them. */
#ifndef ATTNC_TILES_H
#define ATTNC_TILES_H

#include <float.h>
#include <math.h>

#include "pairs.h"
#include "sizes.h"
#include "task.h"
#include "vmath.h"

/* A value row with an entry this large leaves the product (tile.h): 2**32 of them may be summed without overflow. */
#define REAL float
#define REAL_BITS 32
#define VEC vf
#define VINT vfi
#define LANES VF
#define V(name) vf_##name
#define T(name) name##_f32
#define FABS fabsf
#define MAGNITUDE INT32_MAX
#define APART 0x1p95f
#define APART_SCALE 0x1p-32f
#include "steps.h"

#define REAL double
#define REAL_BITS 64
#define VEC vd
#define VINT vdi
#define LANES VD
#define V(name) vd_##name
#define T(name) name##_f64
#define FABS fabs
#define MAGNITUDE INT64_MAX
#define APART 0x1p991
#define APART_SCALE 0x1p-32
#include "steps.h"

#include "dot.h"

typedef struct {
    int real, panel, lanes;
    int packed;                          /* bytes of a packed number */
    void (*begin)(const Params *, Task *);
    void (*pack)(const Params *, Task *, ix, Packed);
    int (*classify)(const Params *, Task *, ix, ix, ix);
    void (*scores)(const Params *, Task *, ix, ix, Packed);
    void (*scores_direct)(const Params *, Task *, ix, ix, ix);
    void (*finish_scores)(const Params *, Task *, ix, ix);
    void (*softmax)(const Params *, Task *, ix, ix, ix);
    void (*values)(const Params *, Task *, ix, ix, ix, Packed);
    void (*values_direct)(const Params *, Task *, ix, ix, ix);
    void (*finish)(const Params *, Task *, ix, ix);
    void (*prefetch_weights)(const Params *, const Task *, ix, ix, ix);
    void (*store_kept)(const Params *, Task *, ix, ix, ix);
    void (*store_again)(const Params *, Task *, ix, ix, ix);
    void (*store_under_lse)(const Params *, Task *, ix, ix, ix);
    void (*store_scores)(const Params *, Task *, ix, ix, ix);
    void (*save_state)(const Params *, Task *, char *);
    void (*merge_state)(const Params *, Task *, char *);
    void (*save_row_stats)(const Params *, Task *, double *);
    void (*load_row_stats)(const Params *, Task *, double *);
    void (*load_lse)(const Params *, Task *);
    void (*weigh)(const Params *, Task *, ix, ix, ix, Packed);
    void (*softmax_rows)(const RowOp *, ix, ix, void *);
    void (*softmax_strips)(const RowOp *, ix, ix, void *);
} Tile;

/* `step` names the steps that multiply: those of the type itself, or dot.h's */
#define TILE(type, real, lanes, packed, step) { \
    sizeof(real), lanes * TILE_VECTORS, lanes, packed, begin_##step, pack_##step, classify_##type, scores_##step, \
    scores_direct_##type, finish_scores_##type, softmax_##step, values_##step, values_direct_##type, \
    finish_##type, prefetch_weights_##type, store_kept_##type, \
    store_again_##type, store_under_lse_##type, store_scores_##type, save_state_##type, merge_state_##type, save_row_stats_##type, \
    load_row_stats_##type, load_lse_##type, weigh_##type, softmax_rows_##type, softmax_strips_##type }

static const Tile TILES[] = {                       /* index: Params.type, or DOT */
    TILE(f32, float, VF, sizeof(float), f32),
    TILE(f64, double, VD, sizeof(double), f64),
#if BF16_DOT
    TILE(f32, float, VF, 2, dot),
#endif
};
enum { DOT = 2, HAS_DOT = BF16_DOT };               /* the tiles for bfloat16 alone, and whether there are any */

#endif
