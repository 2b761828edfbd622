/* call.h: the state of a call: parameters, kernels, memory and progress. */
#ifndef ATTNC_CALL_H
#define ATTNC_CALL_H

#include "call/process.h"             /* first: Python.h sets the feature macros of the C library */

#include "call/gradient_params.h"
#include "call/tables.h"

typedef struct Kernels Kernels;          /* kernels.h */

#define POLL_SECONDS 0.05

typedef struct {
    Params p;
    const Kernels *kernels;
    const Format *format;
    Gradients *gradients;                /* for BACKWARD, else NULL */
    size_t bytes;                        /* size of `memory`; its parts follow */
    char *memory;
    char *scratch;                       /* p.scratch_bytes for each thread */
    char *packed;                        /* a round's keys and values, if shared */
    char *states;                        /* a round's states of few rows, if their keys are split */
    double *row_norms;                   /* row maxima and inverse sums for the second pass of the weights */
    double *bins;                        /* a round's partial maps */
    ix first_head, heads;                /* kv heads of this round */
    ix first_split, round_splits;
    ix chunk, chunks;                    /* KEY_STATISTICS: blocks of keys per chunk, and number of chunks */
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
