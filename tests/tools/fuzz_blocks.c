/* fuzz_blocks.c: libFuzzer's target (`make fuzz`) for src/call/visibility.h: what a row sees, against wide integers. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "call/visibility.h"

typedef __int128 wide;

#define HOLDS(what) do { if (!(what)) { fprintf(stderr, "%s is wrong\n", #what); abort(); } } while (0)

/* The next number: short ones, those at the ends of the integers, or any. */
static ix number(const uint8_t **data, size_t *size) {
    static const ix ends[] = {0, 1, -1, PTRDIFF_MAX, PTRDIFF_MIN, (ix)1 << 62, -((ix)1 << 62),
                              (ix)1 << 53, (ix)1 << 31};
    uint64_t x = 0;
    if (*size < 9) return 0;
    memcpy(&x, *data + 1, 8);
    int kind = **data % 4;
    *data += 9, *size -= 9;
    if (kind == 0) return (ix)x;
    if (kind == 1) return ends[x % 9] + (ix)(x >> 60) % 2 * (ends[x % 9] < 0 ? 1 : -1);
    return (ix)(x % 200) - 50;
}

static ix within(ix x, ix most) { return (ix)((uint64_t)x % ((uint64_t)most + 1)); }

static wide sum_within(wide x) { return x > PTRDIFF_MAX ? PTRDIFF_MAX : x < PTRDIFF_MIN ? PTRDIFF_MIN : x; }

/* What `visible` is to say, with integers that hold every sum; bounds are those that arguments may have. */
static void check_range(const uint8_t **data, size_t *size) {
    int64_t q_length, kv_length, offset;
    Params p;
    memset(&p, 0, sizeof p);
    p.q_len = within(number(data, size), (ix)1 << 62);
    p.kv_len = within(number(data, size), (ix)1 << 62);
    q_length = within(number(data, size), p.q_len), kv_length = within(number(data, size), p.kv_len);
    offset = number(data, size);
    ix choice = number(data, size);
    if (choice & 1) p.q_lengths.data = (char *)&q_length; else q_length = p.q_len;
    if (choice & 2) p.kv_lengths.data = (char *)&kv_length; else kv_length = p.kv_len;
    if (choice & 4) p.q_offset.data = (char *)&offset; else offset = kv_length - q_length;
    p.causal = (choice & 8) != 0;
    p.left = choice & 16 ? within(number(data, size), PTRDIFF_MAX) : -1;
    p.right = choice & 32 ? within(number(data, size), PTRDIFF_MAX) : -1;
    Lengths n = lengths_of(&p, 0);
    HOLDS(n.q_length == q_length && n.kv_length == kv_length && n.offset == offset);
    ix i = within(number(data, size), (ix)1 << 62);
    Range seen = visible(&p, n, i);
    wide position = sum_within((wide)i + offset), start = 0, stop = kv_length;
    if (p.causal && position + 1 < stop) stop = position + 1;
    if (p.right >= 0 && position + p.right + 1 < stop) stop = position + p.right + 1;
    if (p.left >= 0 && position - p.left > start) start = position - p.left;
    if (i >= q_length || start >= stop) start = stop = 0;
    HOLDS(seen.start == start && seen.stop == stop);
    HOLDS(0 <= seen.start && seen.start <= seen.stop && seen.stop <= kv_length);
}

static void check_sums(const uint8_t **data, size_t *size) {
    ix a = number(data, size), b = number(data, size);
    HOLDS(saturating_add(a, b) == sum_within((wide)a + b));
    HOLDS(ix_min(a, b) <= a && ix_min(a, b) <= b && ix_max(a, b) >= a
          && ix_min(a, b) + (wide)ix_max(a, b) == (wide)a + b);
    a = within(a, (ix)1 << 61), b = within(b, (ix)1 << 61) + 1;
    HOLDS((wide)ceil_div(a, b) * b >= a && (wide)(ceil_div(a, b) - 1) * b < a);
    HOLDS(round_up(a, b) % b == 0 && round_up(a, b) >= a && round_up(a, b) - a < b);
}

/* Of several batch axes, each of its size or 1: the element that plain counting finds. */
static void check_offsets(const uint8_t **data, size_t *size) {
    ix shape[4], own[4], strides[4], sizes = 1, wanted = 0;
    Batch batch = {1 + within(number(data, size), 3), shape};
    for (ix d = 0; d < batch.n; d++) shape[d] = 1 + within(number(data, size), 5), sizes *= shape[d];
    Array a;
    memset(&a, 0, sizeof a);
    a.n_batch = within(number(data, size), batch.n), a.shape = own, a.strides = strides;
    for (ix k = 0; k < a.n_batch; k++) {
        own[k] = number(data, size) & 1 ? shape[batch.n - a.n_batch + k] : 1;
        strides[k] = within(number(data, size), 1 << 20) - (1 << 19);
    }
    ix b = within(number(data, size), sizes - 1), left = b;
    for (ix d = batch.n - 1; d >= 0; left /= shape[d], d--) {
        ix k = d - (batch.n - a.n_batch);
        if (k >= 0 && own[k] > 1) wanted += left % shape[d] * strides[k];
    }
    HOLDS(batch_offset(&a, &batch, b) == wanted);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    check_range(&data, &size);
    check_sums(&data, &size);
    check_offsets(&data, &size);
    return 0;
}
