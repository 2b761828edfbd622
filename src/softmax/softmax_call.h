/* softmax_call.h: what a stand-alone softmax means, its sizes, and the call in progress. */
#ifndef ATTNC_SOFTMAX_CALL_H
#define ATTNC_SOFTMAX_CALL_H

#include "call/call.h"

/* Rows of n elements over all other axes. */
typedef struct {
    Array x, out, where;
    Array y;                     /* NULL, or the result whose gradient is x: out is the gradient of its input */
    Batch batch;
    ix rows, n;
    ix columns;                  /* this many rows are contiguous across, while their elements lie apart; else 0 */
    ix column_vectors;            /* vectors of such rows that are computed at a time */
    ix lead;                     /* rows before the first whose output begins a cache line */
    int type, logarithm;
    int stream;                  /* out is written past the caches: it is too large to stay there */
} RowOp;

enum {
    ROW_KEPT = 64 * 1024,        /* bytes of a row's powers that are kept until their sum is known */
    ROW_CHUNK = 16 * 1024,       /* bytes of a part of a longer row: it is to stay in L1 */
    ROW_SHORT = 1024,            /* bytes up to which rows are computed side by side, */
    TOGETHER = 4,                /* this many */
    ROW_IN_TURN = 8192,          /* bytes up to which a row is written while the next is summed; 4096: 1.2x, float64 */
    ROW_GAP = 2112,              /* bytes between powers of both: loads wait for stores n * 4096 bytes off (512: 4 %) */
    MAX_COLUMN_VECTORS = 8,      /* vectors of columns at a time; 4 and 16 are 20 % slower */
    CHUNKS_A_POLL = 64           /* of a long row: about 100 microseconds */
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
