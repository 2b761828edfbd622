/* integers.h: integer arithmetic of sizes and positions, and the atomics that the threads of a call share. */
#ifndef ATTNC_INTEGERS_H
#define ATTNC_INTEGERS_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef ptrdiff_t ix;

typedef _Atomic int Flag;
typedef _Atomic ptrdiff_t Count;
/* One atomic addition; Cython's += would be a load and a store. */
static inline void add_atomically(Count *count, ix n) { *count += n; }

typedef struct { ix start, stop; } Range;

/* An integer of an array, which may be unaligned. */
static inline int64_t integer_at(const char *x) {
    int64_t value;
    memcpy(&value, x, sizeof value);
    return value;
}

static inline ix ix_min(ix a, ix b) { return a < b ? a : b; }
static inline ix ix_max(ix a, ix b) { return a > b ? a : b; }
static inline ix ceil_div(ix a, ix b) { return (a + b - 1) / b; }
static inline ix round_up(ix a, ix b) { return ceil_div(a, b) * b; }

/* a + b, saturated at the ends of the range: positions may be any int64. */
static inline ix saturating_add(ix a, ix b) {
    ix sum;
    return __builtin_add_overflow(a, b, &sum) ? (b < 0 ? PTRDIFF_MIN : PTRDIFF_MAX) : sum;
}

#endif
