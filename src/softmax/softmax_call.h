/* softmax_call.h: operands, options and sizes of a stand-alone softmax, and the call in progress. */
#ifndef ATTNC_SOFTMAX_CALL_H
#define ATTNC_SOFTMAX_CALL_H

#include "call/call.h"

/* Rows of n elements, over all other axes. */
typedef struct {
    Array x, out, where;
    Array y;                     /* NULL, or the result whose gradient is x: out is the gradient of its input */
    Batch batch;
    ix rows, n;
    ix columns;                  /* length of the contiguous last axis if the softmax is along another one, else 0 */
    ix column_vectors;           /* vectors of columns that are computed at a time */
    ix lead;                     /* columns before the first whose output begins a cache line */
    int type, logarithm;
    int stream;                  /* output larger than the caches: non-temporal stores */
} RowOp;

enum {
    ROW_KEPT = 64 * 1024,        /* bytes of the longest row whose exponentials are kept until their sum is known */
    ROW_CHUNK = 16 * 1024,       /* bytes of a chunk of a longer row, which stays in L1 */
    ROW_SHORT = 1024,            /* bytes of the longest row that is computed together with others, */
    TOGETHER = 4,                /* this many at a time */
    ROW_IN_TURN = 8192,          /* bytes of the longest row written while the next is summed; 4096: 1.2x time (f64) */
    ROW_GAP = 2112,              /* bytes between the exponentials of both (512: 4 % slower): a load waits for a store
                                    a multiple of 4096 bytes away */
    MAX_COLUMN_VECTORS = 8,      /* vectors of columns at a time; 4 and 16 are 20 % slower */
    CHUNKS_A_POLL = 64           /* chunks of a long row between polls: about 100 microseconds */
};

typedef struct {
    RowOp op;
    char *scratch;
    ix scratch_bytes;            /* of a thread */
    ix pieces, of_a_task;        /* rows, or groups of columns */
    double next_poll;
    Flag stop;
} RowCall;

/* poll() of call.h, for a softmax. */
static inline void poll_rows(RowCall *call, int thread) {
    if (thread != 0 || seconds() <= call->next_poll) return;
    if (run_signal_handlers()) call->stop = 1;
    call->next_poll = seconds() + POLL_SECONDS;
}

/* Whether the call is to stop, asked now and then within a long row. */
static inline int row_stopped(RowCall *call, int thread, ix first, ix chunk) {
    if (first == 0 || first % (CHUNKS_A_POLL * chunk) != 0) return 0;
    poll_rows(call, thread);
    return call->stop;
}

#endif
