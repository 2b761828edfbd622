/* task.h: the state of one task: some query rows of one kv head against some of its keys. */
#ifndef ATTNC_TASK_H
#define ATTNC_TASK_H

#include "call/sizes.h"
#include "call/visibility.h"

/* One packed block: keys as panels [panel][head_dim][panel width], values as chunks [chunk][key][chunk width], both
 * padded with zeros to whole vectors. A value row with an entry that is not finite, or so large that a sum of weighted
 * rows could overflow, is zero here and listed in `nonfinite` (attention/nonfinite.h). NULL parts are not packed. */
typedef struct {
    void *keys, *values;
    ix *n_nonfinite;
    int32_t *nonfinite;
    void *products;              /* [table][table row][key] of relative_query with the keys, from *first_row on */
    ix *first_row;
} Packed;

/* A query row: the keys it may see by position, its position, and its query head. */
typedef struct { ix start, stop, position, head; } Row;

/* Scratch of statistics (requests.h). */
typedef struct {
    double *surprise, *position, *distance;   /* [row] sums of weight x (log2 weight, key, distance) from row_max */
    void *scores;                             /* [6][width] scores before the softmax */
    double sum_before[GROUP_ROWS];            /* row sums and maxima before the block */
    double max_before[GROUP_ROWS];
    void *heap;                               /* [row][k] largest scores so far, the worst first */
    int32_t *heap_keys;

    double *mass, *bin, *visible, *products;  /* [key] of the block; products: [column][key] */
    ix row_bin, slots;                        /* the row bin that `bin` sums, -1: none; key bins of the chunk */
    double *bins;                             /* [row bin][slot] the chunk's part of the map */
    uint8_t *nan;                             /* [6][width] keys that a NaN row sees */
    double *merged;                           /* [key bin] */
    int64_t *hits;
    void *largest, *part;                     /* [key] */
} StatScratch;

typedef struct {
    int thread;
    ix batch, kv_head, first, rows;      /* rows first .. first + rows of the kv head, ordered by position,
                                            then by head: the rows of a tile see nearly the same keys */
    ix block_start, block_stop;          /* blocks of keys that some row may see, in this task's split */
    Lengths lengths;
    Row *row;
    const char *query, *key, *value;     /* query of the batch element; key and value of the kv head */
    const float *key_scale, *value_scale;
    char *out, *lse, *weights, *scores;
    const char *mask, *block_mask, *key_indices, *key_mask, *bias, *relative, *q_segments, *k_segments;
    const char *k_positions;             /* of the kv head */
    const int64_t *key_rows;             /* of the kv head, NULL: key j lies in row j */

    const void **q_rows;                 /* [row] address of the query */
    void *q;                             /* [row][head_dim] copies */
    void *strips;                        /* [strip][head_dim][strip's rows] copies, for paths with rows in the lanes */
    void *wide;                          /* FUSED: [key][head_dim], [key][value_dim] copies of other dtypes */
    void *s;                             /* [group's row][width] scores, then weights; kept: [group][block] of these */
    uint16_t *pairs;                     /* [group's row][width] weights rounded to bfloat16, for pair products */
    void *o;                             /* [row][value_stride] sum of weighted values */
    void *nonfinite_o;                   /* the same for nonfinite values, times 2**-32 */
    void *row_max, *alpha, *block_max;   /* [row], [group's row], kept: [block][row] */
    void *peaks;                         /* [group's row][vector] lanewise maxima of the group's scores */
    double *row_sum;
    void *final_max;                     /* [row] for a second pass: maximum (or given lse), and inverse of the sum */
    double *inverse;
    Range *kept_part;                    /* [group][block] columns kept */
    void *bias_rows;                     /* [group's row][width] copies */
    void *row_products;                  /* [group's row][table row] of the queries with relative_key */
    const void *bias_row[IN_PLACE_ROWS]; /* [group's row] address of the bias at the first key that the row sees */
    uint8_t *allow;                      /* [group's row][width] */
    void *line;                          /* buffer of one padded row for loads and stores */
    void *begun;                         /* IN_PLACE, few rows: [row][value_stride] sums of a step so far */
    void *gathered;                      /* IN_PLACE, key_rows: [key of a step][value_stride] copies of values */
    Packed packed;                       /* the packed block of a task that packs for itself */
    int uses_nonfinite;                  /* nonfinite_o has been set */

    /* the part of the block that the group sees: columns [column, column_stop), computed in whole vectors [from, to) */
    ix column, column_stop, from, to;
    ix first_key;                        /* of the block */
    Positions positions;                 /* by_position: of the block's keys */
    int tests_positions;                 /* they do not ascend, and a row of the group does not see all of them */
    ix ahead_row, ahead_key;             /* WEIGHTED_SUM: first row and key of the weights of the next step */
    int uses_allow;                      /* `allow` says which keys of this part a row sees */

    StatScratch stats;
} Task;

/* The row of `key` and `value` in which a key lies. */
static inline ix row_of_key(const Task *t, ix key) { return t->key_rows ? t->key_rows[key] : key; }

/* The rows of keys first .. first + n in runs, as pages have them: the largest power of two, up to n, whose multiples
 * cut them into consecutive rows. */
static inline ix run_of_rows(const Task *t, ix first, ix n) {
    const int64_t *rows = t->key_rows + first;
    ix cuts = 0;
    for (ix i = 1; i < n; i++) cuts |= rows[i] == rows[i - 1] + 1 ? 0 : i;
    return cuts ? cuts & -cuts : n;
}

/* The position of a key. */
static inline int64_t position_of(const Params *p, const Task *t, ix key) {
    return integer_at(t->k_positions + key * p->k_positions.col);
}

/* Index of task row r in arrays over (batch, q_head, row). */
static inline ix row_index(const Params *p, const Task *t, ix r) {
    return (t->batch * p->q_heads + t->row[r].head) * p->q_len + t->row[r].position;
}

/* Address of task row r in an array whose batch element is at `batch`. */
static inline char *row_address(const Task *t, const Array *a, const char *batch, ix r) {
    return (char *)batch + t->row[r].position * a->row + t->row[r].head * a->head;
}

#endif
