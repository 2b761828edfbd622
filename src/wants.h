/* wants.h: which statistics of the weights a call wants, and where they go: contiguous over (batch, q_head, row or key). */
#ifndef ATTNC_WANTS_H
#define ATTNC_WANTS_H

#include <stddef.h>
#include <stdint.h>

/* Of rows, taken beside the softmax. A pointer that is NULL is not wanted; untyped ones are to the accumulation type. */
typedef struct {
    int any;                     /* of those below */
    int sums;                    /* of those that take sums over the keys: entropy, position, distance */
    double *norm;                /* [row][2]: by what the weights are computed again: row maximum, inverse of the row sum */
    void *entropy, *max, *position, *distance;
    void *top;                   /* [row][k] the largest weights, descending */
    int64_t *top_keys;
    ptrdiff_t k;
    const void *given;           /* [row] an lse that is an input */
} RowWants;

/* Of keys, summed over rows whose norm (or given lse) is an input. */
typedef struct {
    const double *norm;
    const void *given;
    const void *row_weights;     /* [row], NULL: 1 */
    const int64_t *order;        /* the rows to walk, NULL: all */
    ptrdiff_t walk;              /* how many */
    void *mass, *max, *seen;     /* [key] sum of weights, largest weight, sum of the row weights of rows that see it */
    int64_t *hits;               /* [key] rows whose weight is above threshold */
    double threshold;
    void *map;                   /* [row bin][key bin] */
    int map_max;                 /* the largest weight of a bin, else the sum over keys and the mean over rows */
    const int64_t *row_bin;      /* [walked row], never falling */
    const double *bin_rows;      /* [row bin] how many rows it has */
    ptrdiff_t row_bins, key_bins;
    const int64_t *slot;         /* [key] its bin's place among those of its chunk of blocks, -1: none */
    const int64_t *slot_start;   /* [chunk + 1] the first place of a chunk */
    const int64_t *slot_bin;     /* [place] */
    void *products;              /* [key][columns] sum of weights times factors */
    const void *factors;         /* [row][columns] */
    ptrdiff_t columns;
    int odd_factors;             /* some are not finite: where the weight is 0 they do not count */
} KeyWants;

/* Where a task keeps what it sees, in its scratch. */
typedef struct {
    double *surprise, *position, *distance;   /* [row] sums of weight x (log2 weight, key, distance), relative to row_max */
    void *scores;                             /* [6][width] copies from before the softmax */
    double before[6];                         /* row sums then */
    double before_max[6];
    void *heap;                               /* [row][k] largest scores so far, the worst first */
    int32_t *heap_keys;

    double *mass, *bin, *seen, *products;     /* [key] of the block in hand; products: [column][key] */
    ptrdiff_t row_bin, slots;                 /* the bin of rows that `bin` is of, -1: none yet; the bins of keys of the chunk */
    double *bins;                             /* [row bin][slot] the chunk's part of the map */
    uint8_t *odd;                             /* [6][width] keys that a NaN row sees */
    double *merged;                           /* [key bin] */
    int64_t *hits;
    void *largest, *part;                     /* [key] */
} Seen;

#endif
