/* task.h: the state of one task (some query rows of one kv head, against some of its keys) and where it lies in scratch. */
#ifndef ATTNC_TASK_H
#define ATTNC_TASK_H

#include "blocks.h"

/* One block of keys and values in the kernels' layout: keys as panels [panel][head_dim][panel width], values as chunks
 * [chunk][key][chunk width], both padded with zeros to whole vectors; a value row with an entry that is not finite, or so
 * large that a sum of weighted rows could overflow, is zero here and listed in `apart`. What is NULL is not packed. */
typedef struct {
    void *keys, *values;
    ix *n_apart;
    int32_t *apart;
} Packed;

/* A query row: the keys it may see by position, where it stands, and its query head. */
typedef struct { ix start, stop, position, head; } Row;

typedef struct {
    ix batch, kv_head, first, rows;      /* rows first .. first + rows of the kv head, ordered by position, then by head:
                                            the rows of a tile see nearly the same keys */
    ix block_start, block_stop;          /* blocks of keys that some row may see, in this task's split */
    Lengths lengths;
    Row *row;
    const char *query, *key, *value;     /* batch element applied, and the kv head to key and value */
    const float *key_scale, *value_scale;
    char *out, *lse, *weights, *scores;
    const char *mask, *key_mask, *bias, *q_segments, *k_segments;

    const void **q_rows;                 /* [row] where the query is */
    void *q;                             /* [row][head_dim] copies */
    void *strips;                        /* [strip][head_dim][strip's rows] copies, where rows are the lanes of vectors */
    void *wide;                          /* [key][head_dim], [key][value_dim] copies of short heads that are not REAL in place */
    void *s;                             /* [group's row][width] scores, then weights; with keep: [group][block] of these */
    uint16_t *halves;                    /* [group's row][width] weights rounded to bfloat16, where products take pairs of them */
    void *o;                             /* [row][value_stride] sum of weighted values */
    void *apart_o;                       /* the same for values kept apart, times 2**-32 */
    void *row_max, *alpha, *block_max;   /* [row], [group's row], with keep: [block][row] */
    void *peaks;                         /* [group's row][vector] lanewise maxima of the scores in hand */
    double *row_sum;
    void *final_max;                     /* [row] of a second pass: the maximum (or given lse) and the inverse sum */
    double *inverse;
    Range *kept_part;                    /* with keep: [group][block] columns kept */
    void *bias_rows;                     /* [group's row][width] copies */
    const void *bias_row[DIRECT_ROWS];   /* where the bias of a row is, from the first key of the part it sees */
    uint8_t *allow;                      /* [group's row][width] */
    void *line;                          /* one padded row while loading and storing */
    Packed packed;                       /* where this task packs, if it packs itself */
    int uses_apart;                      /* apart_o holds something */

    /* the part of a block in hand: exact columns [column, columns), computed ones [from, to) in whole vectors */
    ix column, columns, from, to;
    ix first_key;                        /* of the block */
    int choose;                          /* allow holds the places of this part */

    Seen seen;                           /* of statistics */
} Task;

#endif
