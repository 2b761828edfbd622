/* requests.h: the statistics of weights that a call computes, in arrays contiguous over (batch, q_head, row or key). */
#ifndef ATTNC_REQUESTS_H
#define ATTNC_REQUESTS_H

#include <stddef.h>
#include <stdint.h>

/* Statistics of rows, computed beside the softmax. NULL: not wanted; void pointers are to the accumulation type. */
typedef struct {
    int any;                     /* any of those below */
    int sums;                    /* any that sums over the keys: entropy, position, distance */
    double *norm;                /* [row][2] row maximum and inverse of the row sum: all that later passes need */
    void *entropy, *max, *position, *distance;
    void *top;                   /* [row][k] the largest weights, descending */
    int64_t *top_keys;
    ptrdiff_t k;
    const void *given;           /* [row] an lse that is an input */
} RowRequest;

/* Statistics of keys, summed over rows whose norm (or given lse) is an input. */
typedef struct {
    const double *norm;
    const void *given;
    const void *row_weights;     /* [row], NULL: 1 */
    const int64_t *order;        /* the rows to walk, NULL: all */
    ptrdiff_t walk;              /* their number */
    void *mass, *max, *visible;  /* [key] sum of weights, largest weight, sum of the row weights of rows that see it */
    int64_t *hits;               /* [key] rows whose weight is above threshold */
    double threshold;
    void *map;                   /* [row bin][key bin] */
    int map_max;                 /* map has each bin's largest weight; else its sum over keys and mean over rows */
    const int64_t *row_bin;      /* [walked row] its bin, ascending */
    const double *bin_rows;      /* [row bin] its number of rows */
    ptrdiff_t row_bins, key_bins;
    const int64_t *slot;         /* [key] its bin's index within its chunk of blocks, -1: none */
    const int64_t *slot_start;   /* [chunk + 1] the first slot of a chunk */
    const int64_t *slot_bin;     /* [slot] its bin of keys */
    void *products;              /* [key][columns] sum of weights times factors */
    const void *factors;         /* [row][columns] */
    ptrdiff_t columns;
    int nonfinite_factors;       /* some factors are not finite: those with weight 0 are excluded */
} KeyRequest;

#endif
