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
#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>
#endif

static volatile int forked = 0;          /* in a forked child GNU OpenMP would wait for threads that do not exist */
static _Atomic int working = 0;          /* threads in use by calls of this module, which later calls leave to them */

static void after_fork_in_child(void) { forked = 1; working = 0; }
static int watch_forks(void) {
#ifndef _WIN32
    return pthread_atfork(NULL, NULL, after_fork_in_child);
#else
    return 0;
#endif
}

/* `share` / 64 of the L2 cache, in bytes. An unknown or larger cache counts as 1 MB, a smaller one as 256 KB. */
static ptrdiff_t share_of_l2(ptrdiff_t share) {
    static _Atomic ptrdiff_t bytes = 0;               /* racing threads write the same number */
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

/* OpenMP's default number of threads (OMP_NUM_THREADS, threadpoolctl), at most the processors of this thread's
 * affinity. */
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
    clock_gettime(CLOCK_MONOTONIC, &now);       /* a wall clock that is set back would delay Ctrl-C */
#endif
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* Returns the threads of a call, and counts them as in use until leave_threads(). An explicit number is granted in
 * full, a default one less the threads in use. Negative: OpenMP's default, at most -threads. */
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

/* Threads for a test run on this processor: on another one they would still be ending when OpenMP creates its own
 * threads, which the system then leaves on the busy processor of their caller for the next 5 to 8 ms. */
static void stay_here(pthread_attr_t *attributes) {
    pthread_attr_init(attributes);
#ifdef __GLIBC__
    cpu_set_t here;
    const int processor = sched_getcpu();
    CPU_ZERO(&here);
    if (processor < 0 || processor >= CPU_SETSIZE) return;
    CPU_SET(processor, &here);
    pthread_attr_setaffinity_np(attributes, sizeof here, &here);
#endif
}

/* Whether the system can create this many more threads at once. */
static int can_create(int threads) {
    pthread_mutex_t gate = PTHREAD_MUTEX_INITIALIZER;
    pthread_attr_t attributes;
    pthread_t *created = malloc((size_t)threads * sizeof *created);
    int n = 0;
    if (created == NULL) return 0;
    stay_here(&attributes);
    pthread_mutex_lock(&gate);                  /* keeps each from ending before the last is created */
    while (n < threads && pthread_create(&created[n], &attributes, pass_gate, &gate) == 0) n++;
    pthread_mutex_unlock(&gate);
    for (int i = 0; i < n; i++) pthread_join(created[i], NULL);
    pthread_attr_destroy(&attributes);
    pthread_mutex_destroy(&gate);
    free(created);
    return n == threads;
}
#endif

/* Returns `threads` for a parallel region, or 1 if the system cannot create them: then OpenMP would end the process.
 * OpenMP has a pool for each calling thread, so each calling thread tests its largest region once. The test creates
 * twice as many threads, because ended threads may still count against a limit when OpenMP creates its own. */
static int possible_threads(int threads) {
#if defined(_OPENMP) && !defined(_WIN32)
    static _Thread_local int proven = 1;
    static _Thread_local double ask_again = 0;
    if (threads <= proven) return threads;
    if (seconds() < ask_again) return 1;
    if (can_create(2 * (threads - proven))) return proven = threads;
    ask_again = seconds() + 1;                  /* a failed test takes as long as a successful one */
    return 1;
#else
    return threads;
#endif
}

/* Runs Python's signal handlers under the GIL. Returns whether one raised; its exception stays set in this thread. */
static int run_signal_handlers(void) {
    PyGILState_STATE gil = PyGILState_Ensure();
    int raised = PyErr_CheckSignals() != 0;
    PyGILState_Release(gil);
    return raised;
}

/* Calls function(done, total) under the GIL. Returns whether it raised. */
static int report_progress(void *function, ptrdiff_t done, ptrdiff_t total) {
    PyGILState_STATE gil = PyGILState_Ensure();
    PyObject *answer = PyObject_CallFunction((PyObject *)function, "nn", done, total);
    Py_XDECREF(answer);
    PyGILState_Release(gil);
    return answer == NULL;
}

static int raise_pending(void) { return PyErr_Occurred() ? -1 : 0; }

/* Test hook: allocations that succeed before one fails, those of small calls included; negative: none fails. */
static int granted = -1;

/* Benchmark hook, set by trace() of probes.pxi: calls are cut for `threads` threads and run on one, which records the
 * phase and the seconds of each of its shares of tasks, as far as there is room. */
typedef struct {
    int threads;                 /* 0: no hook */
    ptrdiff_t room, n;
    double phase, (*records)[2];
} Trace;
static Trace trace;

/* Processor time of this thread: what other processes take of it does not count. */
static inline double thread_seconds(void) {
#ifdef CLOCK_THREAD_CPUTIME_ID
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
#else
    return seconds();
#endif
}

static inline void record(double began) {
    if (trace.n < trace.room) {
        trace.records[trace.n][0] = trace.phase;
        trace.records[trace.n][1] = thread_seconds() - began;
    }
    trace.n++;
}

/* More than this the C library maps anew for each call: huge pages make it 64 MB in 0.1 ms instead of 5. */
enum { MAPPED_BYTES = 32 << 20, HUGE_PAGE = 2 << 20 };

static void *aligned_memory(size_t bytes) {
    if (bytes > PTRDIFF_MAX - 4096 || (granted >= 0 && granted-- == 0)) return NULL;
#ifdef _WIN32
    return _aligned_malloc(bytes, 64);
#else
    void *memory = NULL;
    const int mapped = bytes > MAPPED_BYTES;
    if (posix_memalign(&memory, mapped ? HUGE_PAGE : 64, bytes ? bytes : 64)) return NULL;
#ifdef MADV_HUGEPAGE
    if (mapped) (void)madvise(memory, bytes, MADV_HUGEPAGE);
#endif
    return memory;
#endif
}
static void free_aligned(void *memory) {
#ifdef _WIN32
    _aligned_free(memory);
#else
    free(memory);
#endif
}

/* Scratch of `bytes` bytes, aligned: in `local` if its `size` bytes are enough, else from the heap. */
static char *scratch_memory(size_t bytes, char *local, size_t size) {
    return bytes + 64 <= size && granted < 0 ? local + (64 - (uintptr_t)local % 64) : (char *)aligned_memory(bytes);
}
static void free_scratch(char *memory, const char *local, size_t size) {
    if (memory < local || memory >= local + size) free_aligned(memory);
}

#endif
