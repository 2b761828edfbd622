/* cases.h: makes run-time tile sizes compile-time constants, so that a register tile's sums stay in registers. */
#ifndef ATTNC_CASES_H
#define ATTNC_CASES_H

#include "call/sizes.h"
#include "simd/simd.h"

/* Calls with a tile's vectors as a constant. */
#if TILE_VECTORS == 4
#define VECTOR_CASES(call) switch (vectors) { case 1: call(1); break; case 2: call(2); break; \
                                              case 3: call(3); break; default: call(4); }
#else
#define VECTOR_CASES(call) switch (vectors) { case 1: call(1); break; default: call(2); }
#endif

/* Calls with a group's rows as a constant. */
#define ROW_CASES(n, call) switch (n) { case 1: call(1); break; case 2: call(2); break; case 3: call(3); break; \
                                     case 4: call(4); break; case 5: call(5); break; default: call(6); }

/* Register tiles of the weighted sum over values in place: GROUP_ROWS x TILE_VECTORS, or TALL_ROWS x TALL_VECTORS where
 * fewer of these hold all rows. 16 bfloat16 rows, depth 128: 36 cycles per key in two tall tiles, 54 in three wide. */
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
