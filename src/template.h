/* template.h: every template for one accumulation type, in order of use. kernels.h defines the parameters:
 *   REAL, REAL_BITS        the type and its width
 *   VEC, VINT, LANES       its vector, the integer vector of its bits, and their lanes
 *   V(name), T(name)       names of vector primitives, and of this type's functions
 *   FABS, MAGNITUDE        |x| of one number, and the bits of |x|
 *   LARGEST, LARGE_SCALE   magnitude from which products exclude a value, and the scale of sums of such values */
#define PANEL (LANES * TILE_VECTORS)
#define P_(name) ((REAL *)t->name)                      /* an array of the task */
#define STEP static __attribute__((noinline))           /* a step of the algorithm: a profile names it, compiled once */

/* Products of REAL or, with the constant `pairs`, of pairs of bfloat16, stored in a word's bits. */
#if REAL_BITS == 32 && BF16_DOT
#define PAIR_PRODUCTS 1
#define PRODUCT(pairs, x, y, sum) ((pairs) ? vf_dot(x, y, sum) : vf_fma(x, y, sum))
#define MIN_PAIRS vf_least_pairs
#define STORE_PAIRS vf_store_pairs
#define PAIR_ROW pair_row
#define LOAD_PAIRS(src, stride, n, dst) load_pairs(src, stride, n, 0, dst)
#else
#define PAIR_PRODUCTS 0
#define PRODUCT(pairs, x, y, sum) ((void)(pairs), V(fma)(x, y, sum))
#define MIN_PAIRS(least, x) (least)
#define STORE_PAIRS(pairs, x) ((void)(pairs))
#define PAIR_ROW T(query_row)
#define LOAD_PAIRS(src, stride, n, dst) ((void)0)
#endif

#include "gemm/rows.h"
#include "gemm/pack.h"
#include "gemm/rank1.h"
#include "gemm/strip.h"
#include "attention/queries.h"
#include "attention/mask.h"
#include "attention/scores.h"
#include "attention/relative_terms.h"
#include "attention/finish_scores.h"
#include "attention/online_softmax.h"
#include "attention/nonfinite.h"
#include "attention/values.h"
#include "attention/in_place.h"
#include "attention/in_place_few.h"
#include "gemm/pack_pairs.h"
#include "attention/in_place_pairs.h"
#include "attention/epilogue.h"
#include "attention/row_norms.h"
#include "attention/dense.h"
#include "attention/splits.h"
#include "attention/weighted_sum.h"
#include "attention/fused.h"
#include "attention/row_statistics.h"
#include "attention/key_statistics.h"
#include "attention/forward.h"
#include "attention/gradients.h"
#include "attention/relative_gradients.h"
#include "attention/backward.h"
#include "softmax/softmax_rows.h"
#include "softmax/softmax_columns.h"
#include "softmax/softmax_backward.h"

#undef PANEL
#undef P_
#undef STEP
#undef PAIR_PRODUCTS
#undef PRODUCT
#undef MIN_PAIRS
#undef STORE_PAIRS
#undef PAIR_ROW
#undef LOAD_PAIRS
#undef NATIVE
#undef DTYPE_CASES
#undef DOT_KEYS
#undef USES_FEW
#undef FEW_TILE
#undef FEW_CASES
#undef STEP_OF
#undef SUMMED
#undef WITH_DTYPE
#undef REAL
#undef REAL_BITS
#undef VEC
#undef VINT
#undef LANES
#undef V
#undef T
#undef FABS
#undef MAGNITUDE
#undef LARGEST
#undef LARGE_SCALE
