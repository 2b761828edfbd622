/* prefetch.h: a cursor that prefetches rows in address order, ahead of their use. */
#ifndef ATTNC_PREFETCH_H
#define ATTNC_PREFETCH_H

#include "call/task.h"
#include "simd/simd.h"

/* How far ahead the cursor prefetches keys and values in place, and to which cache: 3 is L1, 2 is L2. With AVX2 (Zen 4)
 * 4 rows of float32 on one thread read 20 GB/s by way of L2 and 10 by L1, which waits for few lines at a time; 16 KB
 * ahead 15, 64 KB 20. With AVX-512 L2 was not measured; 8 KB ahead is 5 % slower than 16. */
#if VECTOR_BYTES == 32
enum { PREFETCH_BYTES = 32768, PREFETCH_CACHE = 2 };
#else
enum { PREFETCH_BYTES = 16384, PREFETCH_CACHE = 3 };
#endif

/* Address order reaches 84 % of read bandwidth; the order of a register tile's loads, a row apart, 70 % (float32, 4
 * rows). */
typedef struct {
    const char *at, *end;                /* the next line, and the end of its row */
    ix row, gap;                         /* from the start of a row to the next one, and from its end */
    int half;                            /* prefetch half of the bytes read: two tiles read the rows of each step */
} Prefetch;                              /* {0}: prefetches nothing */

/* Starts at `at`, with rows of `bytes` bytes. */
static inline Prefetch prefetch_from(const Array *a, ix bytes, const char *at) {
    return (Prefetch){.at = at, .end = at + bytes, .row = a->row, .gap = a->row - bytes};
}

/* Starts PREFETCH_BYTES ahead of row `at` of a block. With `twice`, two tall tiles read each step of rows in turn: both
 * prefetch, at least a whole step ahead (16 rows of float32: 181 cycles per key instead of 215). */
static inline Prefetch prefetch_ahead_of(const Array *a, ix bytes, const char *block, ix at, int twice) {
    ix rows = ix_max(PREFETCH_BYTES / ix_max(bytes, 1), twice ? IN_PLACE_KEYS : 0);
    Prefetch prefetch = prefetch_from(a, bytes, block + (rows + at) * a->row);
    prefetch.half = twice;
    return prefetch;
}

static inline __attribute__((always_inline)) void prefetch_advance(Prefetch *s, ix bytes) {
    s->at += bytes;
    if (s->at >= s->end) s->at = s->end + s->gap, s->end += s->row;
}

/* Prefetches the lines that begin in the next `bytes`, a constant. */
static inline __attribute__((always_inline)) void prefetch_next(Prefetch *s, const ix bytes) {
    if (!s->end) return;
    if (bytes >= 64 || ((uintptr_t)s->at & 63) < (uintptr_t)bytes)
        for (int i = 0; i < bytes; i += 64) __builtin_prefetch(s->at + i, 0, PREFETCH_CACHE);
    prefetch_advance(s, bytes);
}

/* Prefetches the lines of `bytes` bytes from `at` on, for reads or, with `write`, for writes. */
static inline __attribute__((always_inline)) void prefetch_lines(const char *at, ix bytes, const int write) {
    for (ix i = 0; i < bytes; i += 64) {
        if (write) __builtin_prefetch(at + i, 1);
        else __builtin_prefetch(at + i);
    }
}

/* Reads a byte of each line of n rows of `bytes` bytes, in address order: hardware prefetchers follow such loads and
 * run ahead, which prefetch instructions do not make them do (one row of queries, float32, one thread of Zen 4: 22 GB/s
 * of keys and values instead of 12). They follow the addresses of each instruction: unrolled loads reach 9. */
static inline __attribute__((always_inline)) void read_rows(const Array *a, ix bytes, const char *at, ix n) {
    if (a->row == bytes) bytes *= n, n = n > 0;
    for (; n > 0; n--, at += a->row)
        ROLLED for (ix i = 0; i < bytes; i += 64) (void)*(const volatile char *)(at + i);
}

#endif
