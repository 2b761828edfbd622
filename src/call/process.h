/* process.h: what a call needs of the process: OpenMP (or none), signals, forks, the clock, aligned memory. */
#ifndef ATTNC_PROCESS_H
#define ATTNC_PROCESS_H

#include <Python.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <time.h>
#ifdef _WIN32
#include <malloc.h>
#endif
#ifdef _OPENMP
#include <omp.h>
#endif
#ifndef _WIN32
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>
#endif

static volatile int forked = 0;          /* set in a child: GNU OpenMP would wait there for threads that do not exist */
static _Atomic int working = 0;          /* threads of this module at work, for callers that share the processor */

static void after_fork_in_child(void) { forked = 1; working = 0; }
static int watch_forks(void) {
#ifndef _WIN32
    return pthread_atfork(NULL, NULL, after_fork_in_child);
#else
    return 0;
#endif
}

/* `share` 64ths of the L2 cache, which is taken for 1 MB where it is unknown or larger: a task is to need no more. */
static ptrdiff_t share_of_l2(ptrdiff_t share) {
    static _Atomic ptrdiff_t bytes = 0;               /* threads that race here write the same */
    if (!bytes) {
        long found = 0;
#ifdef _SC_LEVEL2_CACHE_SIZE
        found = sysconf(_SC_LEVEL2_CACHE_SIZE);
#endif
        bytes = found <= 0 || found > 1 << 20 ? 1 << 20 : found < 1 << 18 ? 1 << 18 : found;
    }
    return bytes / 64 * share;
}

static int openmp_version(void) {
#ifdef _OPENMP
    return _OPENMP;
#else
    return 0;
#endif
}

/* OpenMP's own answer (OMP_NUM_THREADS, threadpoolctl), at most the processors this thread may run on now. */
static int default_threads(void) {
#ifdef _OPENMP
    int threads = omp_get_max_threads(), processors = omp_get_num_procs();
    return forked ? 1 : threads < processors ? threads : processors;
#else
    return 1;
#endif
}

static double seconds(void) {
    struct timespec now;
#ifdef _WIN32
    timespec_get(&now, TIME_UTC);
#else
    clock_gettime(CLOCK_MONOTONIC, &now);       /* a clock that is set back must not delay Ctrl-C */
#endif
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* Threads a call takes, counted until leave_threads: all it asked for, or by default what others left. A negative
 * number stands for OpenMP's own answer, at most so many. */
static int enter_threads(int threads, int explicit_number) {
    if (threads < 0) {
        int now = default_threads();
        threads = now < -threads ? now : -threads;
    }
    int others = working;
    if (!explicit_number && others > 0) threads = threads - others > 1 ? threads - others : 1;
    if (forked || threads < 1) threads = 1;
    working += threads;
    return threads;
}
static void leave_threads(int threads) { working -= threads; }

#if defined(_OPENMP) && !defined(_WIN32)
static void *pass_gate(void *gate) {
    pthread_mutex_lock(gate);
    pthread_mutex_unlock(gate);
    return NULL;
}

/* Whether so many threads can exist at once, besides those that exist. */
static int can_create(int threads) {
    pthread_mutex_t gate = PTHREAD_MUTEX_INITIALIZER;
    pthread_t *created = malloc((size_t)threads * sizeof *created);
    int n = 0;
    if (created == NULL) return 0;
    pthread_mutex_lock(&gate);                  /* keeps each from ending before the last is created */
    while (n < threads && pthread_create(&created[n], NULL, pass_gate, &gate) == 0) n++;
    pthread_mutex_unlock(&gate);
    for (int i = 0; i < n; i++) pthread_join(created[i], NULL);
    pthread_mutex_destroy(&gate);
    free(created);
    return n == threads;
}
#endif

/* Threads that a parallel region may have: all, or 1 if the system refuses to create them, where OpenMP would end the
 * process. Each calling thread has a pool of its own in OpenMP, so each asks once for its largest region. The question
 * creates twice as many threads: those that have ended may still count when OpenMP creates its own. */
static int possible_threads(int threads) {
#if defined(_OPENMP) && !defined(_WIN32)
    static _Thread_local int proven = 1;
    static _Thread_local double ask_again = 0;
    if (threads <= proven) return threads;
    if (seconds() < ask_again) return 1;
    if (can_create(2 * (threads - proven))) return proven = threads;
    ask_again = seconds() + 1;                  /* a refusal costs as much as creating threads */
    return 1;
#else
    return threads;
#endif
}

/* Takes the GIL for signal handlers; a raised exception stays set in this thread's state. Returns whether one is. */
static int run_signal_handlers(void) {
    PyGILState_STATE gil = PyGILState_Ensure();
    int raised = PyErr_CheckSignals() != 0;
    PyGILState_Release(gil);
    return raised;
}

/* Progress as Python sees it: function(done, total). Returns whether it raised. */
static int report_progress(void *function, ptrdiff_t done, ptrdiff_t total) {
    PyGILState_STATE gil = PyGILState_Ensure();
    PyObject *answer = PyObject_CallFunction((PyObject *)function, "nn", done, total);
    Py_XDECREF(answer);
    PyGILState_Release(gil);
    return answer == NULL;
}

static int raise_pending(void) { return PyErr_Occurred() ? -1 : 0; }

/* Tests: after so many times memory is refused, once (small calls ask too); negative: never. */
static int granted = -1;

static void *aligned_memory(size_t bytes) {
    if (bytes > PTRDIFF_MAX - 4096 || (granted >= 0 && granted-- == 0)) return NULL;
#ifdef _WIN32
    return _aligned_malloc(bytes, 64);
#else
    void *memory = NULL;
    return posix_memalign(&memory, 64, bytes ? bytes : 64) ? NULL : memory;
#endif
}
static void free_aligned(void *memory) {
#ifdef _WIN32
    _aligned_free(memory);
#else
    free(memory);
#endif
}

/* `bytes` of scratch: in `local`, of `size` bytes, where that is enough. */
static char *scratch_memory(size_t bytes, char *local, size_t size) {
    return bytes + 64 <= size && granted < 0 ? local + (64 - (uintptr_t)local % 64) : (char *)aligned_memory(bytes);
}
static void free_scratch(char *memory, const char *local, size_t size) {
    if (memory < local || memory >= local + size) free_aligned(memory);
}

#endif
