/* gradient_params.h: parameters of gradients, or of products with the relevance, beside Params, and a thread's scratch
 * for one block of rows and one of keys. */
#ifndef ATTNC_GRADIENT_PARAMS_H
#define ATTNC_GRADIENT_PARAMS_H

#include "call/task.h"

/* Gradients that a pass computes. */
enum { WANT_QUERY = 1, WANT_KEY = 2, WANT_VALUE = 4, WANT_BIAS = 8, WANT_TABLES = 16 };

/* The relevance R of a weight is its product with grad_out . value, or with the positive part of that. It has no delta
 * and no scale: R X replaces the gradient of the queries, R^T X that of the keys. */
enum { NO_RELEVANCE, SIGNED, POSITIVE };

typedef struct Gradients {
    Array grad_out, output, grad_lse, delta;       /* delta: of each row, sum(grad_out * output) - grad_lse */
    Array query, key, value, bias, relative;       /* the gradients; NULL where not wanted */
    Array relative_key, relative_query;            /* those of the tables, for each batch element and head */
    Array key_factors;                             /* rows that dS multiplies: the key, or X */
    Array row_factors;                             /* rows that R^T multiplies: X */
    int relevance;
    Params products;             /* a call whose scores are grad_out . value, the gradients of the weights */
    ix value_dim;
    ix factor_dim;               /* columns of the factors and of their weighted sums */
    ix stride, value_stride, factor_stride;        /* in scratch: of rows of query, of grad_out, of factors and sums */
    ix accumulators;             /* query blocks whose gradients a task sums */
    ix base;                     /* bytes of scratch before those of GradientScratch */
    ix row_tasks;                /* tasks of the pass over rows for each head */
    ix tables;                   /* offset from the scratch of the tables, [row][factor_stride] each */
    ix bias_rows, bias_keys, bias_heads;           /* blocks and heads with bias elements of their own */
} Gradients;

/* The stride of a row is its padded length plus one vector, because strides of a power of two share cache sets. */
typedef struct {
    void *query, *grad_out;      /* [row][stride] copies of a block of rows */
    void *row_factors;           /* [row][factor_stride] `query`, or copies of X */
    const void **grad_rows;      /* [row] address of grad_out */
    uint8_t *nonfinite;          /* [row] query or grad_out is not finite */
    int any_nonfinite;
    void *delta;                 /* [row] */
    void *weights, *scores;      /* [row][width] weights, and gradients of the scores before scale and softcap */
    void *slopes;                /* [6][width] with softcap: its derivative */
    Packed keys, values;         /* both as panels, for the two products that have keys in the lanes */
    void *key_factors;           /* [key][factor_stride] copies; a key that is not finite is 0 */
    void *d_query, *d_key, *d_value;     /* [row of the task], [key], [key]: sums */
    void *row_sums;              /* [row][table row] dS, summed by table row */
    void *key_sums;              /* as Packed.products: dS, summed by table row and key */
    void *d_relative_key, *d_relative_query;       /* [table][table row]: sums */
    Range *part;                 /* [group] columns of the block that the group sees */
    Range *span;                 /* [group of six keys] rows that may see any of them */
} GradientScratch;

#endif
