/* tiles.h: the steps of tile.h and results.h for float and for double, and the table by which the loops call them. */
#ifndef ATTNC_TILES_H
#define ATTNC_TILES_H

#include <float.h>
#include <math.h>

#include "ahead.h"
#include "gradients.h"
#include "pairs.h"
#include "sizes.h"
#include "vmath.h"

/* Register tiles of sums over values in place: of GROUP_ROWS x TILE_VECTORS at most, or higher and less wide where those are
 * fewer. 16 rows of bfloat16 at a depth of 128 take 54 cycles a key by three wide ones, 36 by two high ones. */
#if TILE_VECTORS == 4
enum { TALL_ROWS = 8, TALL_VECTORS = 2 };
#define SUM_CASES(n, call) switch (n) { case 7: call(7); break; case 8: call(8); break; default: ROW_CASES(n, call) }
#else
enum { TALL_ROWS = GROUP_ROWS, TALL_VECTORS = TILE_VECTORS };
#define SUM_CASES(n, call) ROW_CASES(n, call)
#endif
static ix rows_of_sums(ix n) {
    ix tiles = ceil_div(n, TALL_ROWS);
    return tiles < ceil_div(n, GROUP_ROWS) ? ceil_div(n, tiles) : rows_of_tile(n);
}
static ix vectors_of_sums(ix rows, ix vectors) { return rows > GROUP_ROWS ? TALL_VECTORS : vectors; }

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
    void (*scores_direct)(const Params *, Task *, ix, ix);
    void (*finish_scores)(const Params *, Task *, ix, ix);
    void (*softmax)(const Params *, Task *, ix, ix, ix);
    void (*values)(const Params *, Task *, ix, ix, ix, Packed);
    void (*values_direct)(const Params *, Task *, ix, ix);
    int (*attend_short)(const Params *, Task *);
    void (*finish)(const Params *, Task *, ix, ix);
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
    void (*softmax_backward_rows)(const RowOp *, ix, ix, void *);
    void (*begin_seen)(const Params *, Task *);
    void (*see_scores)(const Params *, Task *, ix, ix, ix);
    void (*see_weights)(const Params *, Task *, ix, ix, ix);
    void (*finish_seen)(const Params *, Task *, ix, ix);
    void (*load_norm)(const Params *, Task *);
    void (*clear_keys)(const Params *, Task *);
    void (*receive)(const Params *, Task *, ix, ix, ix);
    void (*close_bin)(const Params *, Task *, ix);
    void (*finish_keys)(const Params *, Task *, ix, ix);
    void (*merge_bins)(const Params *, Task *, const double *, ix, ix, ix);
} Tile;

/* `step` names the steps that multiply: those of the type itself, or dot.h's */
#define TILE(type, real, lanes, packed, step) { \
    sizeof(real), lanes * TILE_VECTORS, lanes, packed, begin_##step, pack_##step, classify_##type, scores_##step, \
    scores_direct_##step, finish_scores_##type, softmax_##step, values_##step, values_direct_##step, \
    attend_short_##type, finish_##type, store_kept_##type, \
    store_again_##type, store_under_lse_##type, store_scores_##type, save_state_##type, merge_state_##type, save_row_stats_##type, \
    load_row_stats_##type, load_lse_##type, weigh_##type, softmax_rows_##type, softmax_strips_##type, softmax_backward_rows_##type, \
    begin_seen_##type, see_scores_##type, see_weights_##type, finish_seen_##type, load_norm_##type, clear_keys_##type, \
    receive_##type, close_bin_##type, finish_keys_##type, merge_bins_##type }

static const Tile TILES[] = {                       /* index: Params.type, or DOT */
    TILE(f32, float, VF, sizeof(float), f32),
    TILE(f64, double, VD, sizeof(double), f64),
#if BF16_DOT
    TILE(f32, float, VF, 2, dot),
#endif
};
enum { DOT = 2, HAS_DOT = BF16_DOT };               /* the tiles for bfloat16 alone, and whether there are any */

/* The steps of backward.h, in the order of an algorithm that uses those above for its scores */
typedef struct {
    void (*deltas)(const Params *, const Backward *, Task *, Sweep *);
    void (*load)(const Params *, const Backward *, Task *, Sweep *);
    void (*pack)(const Params *, const Backward *, Task *, ix, Sweep *);
    void (*cap_slopes)(const Params *, const Task *, ix, Sweep *);
    void (*score_gradients)(const Params *, const Task *, ix, ix, int, Sweep *);
    void (*clear_unseen)(const Params *, const Task *, ix, ix, Sweep *);
    void (*add_query)(const Params *, const Backward *, const Task *, ix, ix, void *, Sweep *);
    void (*add_keys)(const Params *, const Backward *, Task *, ix, int, Sweep *);
    void (*add_bias)(const Params *, const Backward *, const Task *, ix, ix, ix, Sweep *);
    void (*store_query)(const Params *, const Backward *, const Task *, void *);
    void (*store_keys)(const Params *, const Backward *, const Task *, ix, int, Sweep *);
} BackwardTile;

#define BACKWARD_TILE(type) { \
    row_deltas_##type, load_backward_##type, pack_backward_##type, cap_slopes_##type, score_gradients_##type, clear_unseen_##type, \
    add_query_##type, add_keys_##type, add_bias_##type, store_query_sums_##type, store_key_sums_##type }

static const BackwardTile BACKWARD_TILES[] = {BACKWARD_TILE(f32), BACKWARD_TILE(f64)};

#endif
