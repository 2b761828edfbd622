/* steps.h: the templates for one accumulation type, between the macros that name it (tiles.h) and their removal. */
#define PANEL (LANES * TILE_VECTORS)
#define P_(name) ((REAL *)t->name)

INLINE REAL T(exp2_one)(REAL t) { return V(exp2)(V(set1)(t))[0]; }

#include "rows.h"
#include "pack.h"
#include "places.h"
#include "tile.h"
#include "direct.h"
#include "results.h"
#include "softmax.h"

#undef PANEL
#undef SUMMED
#undef NATIVE
#undef P_
#undef VECTOR_CASES
#undef ROW_CASES
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
