/* params.h: what one call means (arrays as pointers and byte strides, sizes, options) and how it is cut into blocks. */
#ifndef ATTNC_PARAMS_H
#define ATTNC_PARAMS_H

#include <stddef.h>
#include <stdint.h>

#include "wants.h"

typedef ptrdiff_t ix;

/* What threads of a call tell each other. */
typedef _Atomic int Flag;
typedef _Atomic ptrdiff_t Count;
static inline void count_more(Count *count, ix n) { *count += n; }      /* one step; of Cython's += a load and a store */

enum { F32, F64, F16, BF16, I8 };   /* stored dtypes; int8 rows of key and value come with a scale each */

/* An argument: batch axes are walked through the buffer's own shape and strides, so that no rank is too high and a
 * broadcast axis (absent, or of length 1) costs nothing; the last axes have their strides by name, 0 if broadcast. */
typedef struct {
    char *data;                  /* NULL: not given */
    int dtype;
    ix n_batch;
    const ix *shape, *strides;
    ix head, row, col;
    const int64_t *starts;       /* packed sequences: the first row of each batch element; else NULL */
} Array;

/* The batch axes that all arguments of a call share. */
typedef struct { ix n; const ix *shape; } Batch;

typedef struct {
    Array query, key, value, out, lse, weights, scores;
    Array mask, key_mask, bias, q_offset, sinks, slopes, q_segments, k_segments, q_lengths, kv_lengths;
    Array q_starts, k_starts;    /* packed sequences: where they start; rows past a q_length belong to others */
    Array key_scale, value_scale;    /* float factors of int8 rows, one behind the other; not given for other dtypes */
    Batch batch;
    ix batches, q_heads, kv_heads, group, q_len, kv_len, head_dim, value_dim;
    int type;                    /* F32 or F64: accumulation */
    int causal;
    ix left, right;              /* window, -1: unbounded */
    double scale, softcap;       /* softcap 0: none */
    double c;                    /* exponent of 2 per unit of score */
    double unit;                 /* natural score per unit of stored score: |scale| if plain, else 1 */
    int plain;                   /* scores stay raw products: no softcap, bias, alibi, and scale is not 0 */
    int flip;                    /* query is loaded with its sign changed: a negative scale, exactly */
    int given_lse;               /* weights are asked for under an lse that is an input */
    int arrays;                  /* mask, key_mask, bias or segments decide places beside the key range */

    ix rows;                     /* q_len * group: query rows of one kv head, position-major */
    ix block_q, block_k, q_blocks, k_blocks;
    ix depth_stride;             /* head_dim padded to whole vectors */
    ix value_stride;             /* value_dim padded to whole vectors: a row of the output accumulator */
    ix split_k, splits;          /* blocks of keys per split; 1 split unless the rows are few */
    int whole;                   /* parts of a kv head, each a task that packs for itself; 0: see shared */
    int copied;                  /* query rows are copied before use */
    int direct;                  /* so few rows that keys and values are read in place, */
    int strips;                  /* and so many that they fill vectors */
    int brief;                   /* all steps of a strip of rows at once (short.h) */
    ix group_rows;               /* rows that take the steps together */
    int shared;                  /* keys and values packed once per kv head (else by the task that reads them) */
    ix keep;                     /* weights: parts (group, block) of scores a task keeps until the row sums are known */
    ix width;                    /* columns of a block in scratch: block_k, or what short keys need */
    ix pack_bytes, scratch_bytes, state_bytes;
    RowWants row_wants;
    KeyWants key_wants;
    int n_threads;
    Flag stop;
} Params;

/* A stand-alone softmax: rows of n elements over all other axes. */
typedef struct {
    Array x, out, where;
    Array y;                     /* NULL, or the result whose gradient is x: out is the gradient of its input */
    Batch batch;
    ix rows, n;
    ix columns;                  /* that many rows at a time are neighbours in memory while their elements are not; or 0 */
    ix strip;                    /* vectors of such rows that are worked on at a time, */
    ix lead;                     /* after so many rows at first, behind which out is at a border of lines */
    int type, logarithm;
    int stream;                  /* out is written past the caches: it is too large to stay there */
    int (*stopped)(void *);      /* lets signal handlers run; whether the call is to end */
    void *call;
} RowOp;

enum { ROW_CHUNKS_A_POLL = 64 }; /* of a long row: about 100 microseconds */

static inline int row_stopped(const RowOp *op, ix first, ix chunk) {
    return first && first % (ROW_CHUNKS_A_POLL * chunk) == 0 && op->stopped(op->call);
}

enum {
    ROW_KEPT = 64 * 1024,        /* bytes of a row's powers that are kept until their sum is known, */
    ROW_CHUNK = 16 * 1024,       /* and of a part of a row that is too long for that: it is to stay in L1 */
    ROW_SHORT = 1024,            /* bytes up to which rows are worked on side by side, */
    TOGETHER = 4,                /* so many, */
    ROW_IN_TURN = 8192,          /* and up to which one is written while the next is summed; 4096: 1.2 x for float64 */
    ROW_GAP = 2112,              /* between powers of both: loads wait for stores n * 4096 bytes off (512: 4 % more) */
    STRIP = 8                    /* most vectors of rows whose elements lie apart; 4 and 16 are 20 % slower */
};

/* Offset in bytes of batch element b. */
static inline ix batch_offset(const Array *a, const Batch *batch, ix b) {
    if (a->starts) return a->starts[b] * a->row;
    ix offset = 0;
    for (ix d = batch->n - 1, k = a->n_batch - 1; k >= 0 && d >= 0; d--, k--) {
        ix size = batch->shape[d];
        if (a->shape[k] != 1) offset += (b % size) * a->strides[k];
        b /= size;
    }
    return offset;
}

/* Where batch element b and a head begin; NULL stays NULL, as not even 0 may be added to it. */
static inline char *place_of(const Array *a, const Batch *batch, ix b, ix head) {
    return a->data ? a->data + batch_offset(a, batch, b) + head * a->head : NULL;
}

static inline int64_t batch_int(const Array *a, const Params *p, ix b, int64_t otherwise) {
    return a->data ? *(const int64_t *)(a->data + batch_offset(a, &p->batch, b)) : otherwise;
}

#endif
