/* params.h: the parameters of a call: arrays as pointers and byte strides, sizes, options, and the sizes of blocks. */
#ifndef ATTNC_PARAMS_H
#define ATTNC_PARAMS_H

#include <stddef.h>
#include <stdint.h>

#include "call/integers.h"
#include "call/requests.h"

enum { F32, F64, F16, BF16, I8 };    /* stored dtypes; each int8 row of key and value has a scale */

/* What a call computes. */
enum Mode { ATTEND, SCORES, WEIGHTED_SUM, WEIGHTS_UNDER_LSE, KEY_STATISTICS, BACKWARD };

/* An array argument. Batch axes use the buffer's own shape and strides, so any rank works and a broadcast axis (absent,
 * or of length 1) costs nothing; the trailing axes have named strides, 0 where broadcast. */
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
    Array mask, block_mask, key_indices, key_mask, bias, relative, q_offset, k_positions, sinks, slopes;
    Array q_segments, k_segments, q_lengths, kv_lengths;
    /* relative: a second bias, NULL unless there is a first */
    Array relative_key, relative_query;    /* tables of content-relative terms (call/tables.h), NULL: not given */
    Array q_starts, k_starts;    /* first row of each packed sequence; rows past a q_length belong to other sequences */
    Array key_rows;              /* contiguous int64: the row of `key` and `value` in which each key lies */
    Array key_scale, value_scale;    /* float factors of int8 rows, contiguous; not given for other dtypes */
    Batch batch;
    ix batches, q_heads, kv_heads;
    ix heads_per_kv;             /* query heads of a kv head */
    ix q_len, kv_len, head_dim, value_dim;
    int mode;                    /* enum Mode */
    int type;                    /* F32 or F64: accumulation */
    int pairs;                   /* products are of pairs of bfloat16 */
    int causal;
    ix left, right;              /* window, -1: unbounded */
    double scale, softcap;       /* softcap 0: none */
    double exponent;             /* exponent of 2 per unit of stored score */
    double unit;                 /* natural score per unit of stored score: |scale| if raw_scores, else 1 */
    int raw_scores;              /* scores stay raw products: no softcap, bias or alibi, scale within 1e-30..1e30 */
    int flip;                    /* queries are negated as they are loaded, which applies a scale's sign exactly */
    ix list_keys, list_heads;    /* keys of a list of key_indices, and query heads that share one */
    ix mask_rows, mask_keys;     /* rows and keys of a block of block_mask */
    ix mask_row, mask_key;       /* position of row 0 and key 0 in block_mask's first block */
    int by_position;             /* causal order or a window reads k_positions instead of a key's index */
    int masked;                  /* a mask, bias, segments or positions may exclude keys of a row's key range */
    int bias_alone;              /* a bias, and no other option but the scale, changes scores or excludes keys */
    const int32_t *relative_index;       /* table row of each j - i, at j - i + q_len - 1; NULL: no tables */
    ix table_first, table_rows;  /* the rows of the tables that the index names: the first one, and their number */
    ix table_bytes, tables_bytes;        /* of a packed table, and of all of relative_key, which come first */
    char *tables;                /* packed: panels of relative_key, rows of relative_query */
    ix row_stride;               /* of products of a query row with relative_key, in scratch */
    ix key_products;             /* numbers of the products of a packed block with relative_query */

    ix rows;                     /* q_len * heads_per_kv: query rows of one kv head, position-major */
    int path;                    /* enum Path, as chosen */
    int unfused;                 /* enum Path of the steps: `path`, or the one that FUSED falls back to */
    ix group_rows;               /* rows of one group, which take each step together */
    ix block_q, block_k, q_blocks, k_blocks;
    ix split_k, splits;          /* blocks of keys per split; 1 split unless the rows are few */
    int shared;                  /* keys and values are packed: 1 once per kv head for all tasks, 0 by each task */
    int parts;                   /* if not shared: tasks per kv head */
    int next_head;               /* distance to the kv head whose task a thread most likely takes next */
    int copy_queries;            /* query rows are copied before use */
    ix kept_scores;              /* dense weights: parts (group, block) of scores kept until row sums are known */
    ix depth_stride;             /* head_dim padded to whole vectors */
    ix value_stride;             /* value_dim padded to whole vectors: a row of the output accumulator */
    ix width;                    /* columns of a block in scratch: block_k, or fewer for a short kv_len */
    ix pack_bytes, scratch_bytes, state_bytes;
    RowRequest row_request;
    KeyRequest key_request;
    int n_threads;
    Flag stop;
} Params;

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

/* Address of batch element b and a head; NULL stays NULL, because adding even 0 to it is undefined. */
static inline char *address(const Array *a, const Batch *batch, ix b, ix head) {
    return a->data ? a->data + batch_offset(a, batch, b) + head * a->head : NULL;
}

static inline int64_t batch_int(const Array *a, const Params *p, ix b, int64_t otherwise) {
    return a->data ? *(const int64_t *)(a->data + batch_offset(a, &p->batch, b)) : otherwise;
}

#endif
