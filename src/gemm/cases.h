/* cases.h: calls with run-time sizes made constants, so that sums of register tiles stay in registers. */
#ifndef ATTNC_CASES_H
#define ATTNC_CASES_H

#include "call/sizes.h"
#include "simd/simd.h"

/* One call for each number of vectors of a tile. */
#if TILE_VECTORS == 4
#define VECTOR_CASES(call) switch (vectors) { case 1: call(1); break; case 2: call(2); break; \
                                              case 3: call(3); break; default: call(4); }
#else
#define VECTOR_CASES(call) switch (vectors) { case 1: call(1); break; default: call(2); }
#endif

/* One call for each number of rows of a group. */
#define ROW_CASES(n, call) switch (n) { case 1: call(1); break; case 2: call(2); break; case 3: call(3); break; \
                                     case 4: call(4); break; case 5: call(5); break; default: call(6); }

/* Register tiles of sums over values in place: GROUP_ROWS x TILE_VECTORS at most, or taller and narrower where that
 * needs fewer. 16 rows of bfloat16 at a depth of 128 take 54 cycles a key in three wide tiles, 36 in two tall ones. */
#if TILE_VECTORS == 4
enum { TALL_ROWS = 8, TALL_VECTORS = 2 };
#define TALL_CASES(n, call) switch (n) { case 7: call(7); break; case 8: call(8); break; default: ROW_CASES(n, call) }
#else
enum { TALL_ROWS = GROUP_ROWS, TALL_VECTORS = TILE_VECTORS };
#define TALL_CASES(n, call) ROW_CASES(n, call)
#endif
static inline ix rows_of_sums(ix n) {
    ix tiles = ceil_div(n, TALL_ROWS);
    return tiles < ceil_div(n, GROUP_ROWS) ? ceil_div(n, tiles) : rows_of_tile(n);
}
static inline ix vectors_of_sums(ix rows, ix vectors) { return rows > GROUP_ROWS ? TALL_VECTORS : vectors; }

#endif
