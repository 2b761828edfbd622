/* call.h: a call in progress: parameters, kernels and memory, and what its threads poll and report. */
#ifndef ATTNC_CALL_H
#define ATTNC_CALL_H

#include "call/process.h"             /* first: Python.h says which functions of the C library there are */

#include "call/gradient_params.h"
#include "call/path.h"

typedef struct Kernels Kernels;          /* kernels.h */

#define POLL_SECONDS 0.05

typedef struct {
    Params p;
    const Kernels *kernels;
    const Format *format;
    Gradients *gradients;                /* of BACKWARD, else NULL */
    size_t bytes;                        /* of `memory`, whose parts follow */
    char *memory;
    char *scratch;                       /* p.scratch_bytes for each thread */
    char *packed;                        /* a round's keys and values, if shared */
    char *states;                        /* a round's states of few rows, if their keys are split */
    double *row_norms;                   /* row maxima and inverse sums for the second pass of the weights */
    double *bins;                        /* a round's parts of maps */
    ix first_head, heads;                /* kv heads of this round */
    ix first_split, round_splits;
    ix chunk, chunks;                    /* of a map: blocks of a chunk of keys, and chunks */
    double next_poll;
    void *progress;                      /* a Python function of (done, total), or NULL */
    ix total;                            /* tasks */
    Count done;
} Call;

/* Every 50 ms the calling thread runs signal handlers and reports progress; a raised exception stops all threads. */
static inline void poll(Call *call, int thread) {
    if (thread != 0) return;
    double now = seconds();
    if (now <= call->next_poll) return;
    if (run_signal_handlers() || (call->progress && report_progress(call->progress, call->done, call->total)))
        call->p.stop = 1;
    call->next_poll = seconds() + POLL_SECONDS;
}

#endif
