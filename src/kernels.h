/* kernels.h: the templates for float and for double, and the table of their tasks that a call's loops go through. */
#ifndef ATTNC_KERNELS_H
#define ATTNC_KERNELS_H

#include "call/open_task.h"

#include <float.h>
#include <math.h>

#include "call/block_mask.h"
#include "call/key_lists.h"
#include "call/scratch.h"
#include "gemm/cases.h"
#include "gemm/pairs.h"
#include "gemm/prefetch.h"
#include "simd/math.h"
#include "softmax/softmax_call.h"

#define REAL float
#define REAL_BITS 32
#define VEC vf
#define VINT vfi
#define LANES VF
#define V(name) vf_##name
#define T(name) name##_f32
#define FABS fabsf
#define MAGNITUDE INT32_MAX
#define LARGEST 0x1p95f                  /* 2**32 values of this size may be summed without overflow */
#define LARGE_SCALE 0x1p-32f
#include "template.h"

#define REAL double
#define REAL_BITS 64
#define VEC vd
#define VINT vdi
#define LANES VD
#define V(name) vd_##name
#define T(name) name##_f64
#define FABS fabs
#define MAGNITUDE INT64_MAX
#define LARGEST 0x1p991
#define LARGE_SCALE 0x1p-32
#include "template.h"

/* The task functions, which the .pxi files schedule: X(name, arguments). */
#define TASKS(X) \
    X(pack, (Call *, Task *, ix block, Packed))                  /* a block for all tasks of a kv head */ \
    X(pack_table, (Call *, ix i))                                /* a table of content-relative terms */ \
    X(attend, (Call *, Task *))                                  /* rows against all their keys */ \
    X(split, (Call *, Task *, char *state))                      /* few rows against a split of the keys */ \
    X(merge, (Call *, Task *, char *states, ix first, ix last, int done))        /* the states of such rows */ \
    X(dense, (Call *, Task *, ix split, int weights))            /* every score or weight of the rows */ \
    X(key_statistics, (Call *, Task *, ix head, ix chunk))       /* all rows against a chunk of keys */ \
    X(maps, (Call *, Task *, ix head))                           /* a head's maps from the parts of its chunks */ \
    X(deltas, (Call *, Task *))                                  /* of a block of rows */ \
    X(gradients, (Call *, Task *, ix head, Range rows, Range keys, int want)) \
    X(copy_table, (Call *, ix i))                                /* pack_table for gradients */ \
    X(softmax_rows, (RowCall *, int thread, ix from, ix to)) \
    X(softmax_columns, (RowCall *, int thread, ix from, ix to)) \
    X(softmax_backward, (RowCall *, int thread, ix from, ix to))

#define FIELD(name, arguments) void (*name) arguments;
#define ENTRY_F32(name, arguments) name##_task_f32,
#define ENTRY_F64(name, arguments) name##_task_f64,
struct Kernels { TASKS(FIELD) };
static const Kernels KERNELS[] = {{TASKS(ENTRY_F32)}, {TASKS(ENTRY_F64)}};      /* index: Params.type */
#undef FIELD
#undef ENTRY_F32
#undef ENTRY_F64

enum { PAIRED = 2 };
static const Format FORMATS[] = {                   /* index: Params.type, or PAIRED */
    {sizeof(float), VF, VF * TILE_VECTORS, sizeof(float)},
    {sizeof(double), VD, VD * TILE_VECTORS, sizeof(double)},
    {sizeof(float), VF, VF * TILE_VECTORS, sizeof(uint16_t)},
};

/* Whether the products are bfloat16 dot products: the instruction set has them, and query, key and value (if given) are
 * bfloat16 and accumulated in float. Read in place, heads must be whole vectors and chunks. */
static inline int multiplies_pairs(const Params *p) {
    int aligned = p->head_dim % (2 * VF) == 0 && p->value_dim % (VF * TILE_VECTORS) == 0;
    int packed = path_of_rows(p, &FORMATS[F32]) == PACKED;
    return bf16_dot && (aligned || packed) && p->mode != WEIGHTED_SUM && p->mode != BACKWARD && p->type == F32
        && !p->relative_index
        && p->query.dtype == BF16 && p->key.dtype == BF16 && (!p->value.data || p->value.dtype == BF16);
}

#endif
