/* steps.h: the templates for one accumulation type, between the macros that name it (tiles.h) and their removal. */
#define PANEL (LANES * TILE_VECTORS)
#define P_(name) ((REAL *)t->name)

/* One step of a tile's products: of REAL, or with the constant `dot` (dot.h) of the pairs that stand in a word's bits. */
#if REAL_BITS == 32 && BF16_DOT
#define PRODUCT(dot, x, y, sum) ((dot) ? vf_dot(x, y, sum) : vf_fma(x, y, sum))
#define STORE_HALVES vf_store_pairs
#define PAIR_ROW pair_row
#define LOAD_PAIRS(src, stride, n, dst) load_pairs(src, stride, n, 0, dst)
#else
#define PRODUCT(dot, x, y, sum) ((void)(dot), V(fma)(x, y, sum))
#define STORE_HALVES(halves, x) ((void)(halves))
#define PAIR_ROW T(query_row)
#define LOAD_PAIRS(src, stride, n, dst) ((void)0)
#endif

INLINE REAL T(exp2_one)(REAL t) { return V(exp2)(V(set1)(t))[0]; }

#include "rows.h"
#include "pack.h"
#include "places.h"
#include "strips.h"
#include "tile.h"
#include "direct.h"
#if REAL_BITS == 32 && BF16_DOT
#include "direct_dot.h"
#endif
#include "results.h"
#include "short.h"
#include "rowstats.h"
#include "keystats.h"
#include "softmax.h"
#include "softmax_columns.h"
#include "backward.h"

#undef PANEL
#undef SUMMED
#undef WITH_DTYPE
#undef NATIVE
#undef PRODUCT
#undef STORE_HALVES
#undef PAIR_ROW
#undef LOAD_PAIRS
#undef P_
#undef VECTOR_CASES
#undef ROW_CASES
#undef DTYPE_CASES
#undef DOT_KEYS
#undef REAL
#undef REAL_BITS
#undef VEC
#undef VINT
#undef LANES
#undef V
#undef T
#undef FABS
#undef MAGNITUDE
#undef APART
#undef APART_SCALE
