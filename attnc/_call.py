"""From checked arguments to one call of the kernels: dtype codes, views, and the order of the arrays."""

from __future__ import annotations

import numpy as np

from . import _isa
from .threads import resolve

ATTEND, SCORES, WEIGH, WEIGHTS = 0, 1, 2, 3
_CODES = {"f": 0, "d": 1, "e": 2}  # by dtype character; a dtype of kind V that passes the checks is bfloat16
BFLOAT16 = 3


def run(mode: int, a, *, value=None, out=None, lse=None, weights=None, scores=None,
        scale: float | None = None) -> tuple:
    """Call the kernels for the arguments `a`; arrays that are None are not read or written. Returns how it was cut."""
    left, right = a.window or (None, None)
    arrays = (
        a.query, a.key, value, out, lse, weights, scores, a.mask, a.key_mask, a.bias,
        None if a.q_offset is None else np.asarray(a.q_offset, np.int64), a.sinks, a.alibi_slopes, a.q_segments,
        a.k_segments, a.q_lengths, a.kv_lengths, None, None)
    sizes = (a.q_heads, a.kv_heads, a.q_len, a.kv_len, a.head_dim, 0 if value is None else a.value_dim)
    options = (_CODES[a.acc.char], a.causal, -1 if left is None else left, -1 if right is None else right,
               a.scale if scale is None else scale, a.softcap or 0.0)
    return call(mode, arrays, a.batch, sizes, options, a.num_threads)


def call(mode: int, arrays: tuple, batch: tuple, sizes: tuple, options: tuple, num_threads: int | None) -> tuple:
    codes = tuple([0 if x is None else code(x.dtype) for x in arrays])
    if BFLOAT16 in codes:
        arrays = tuple([bits(x) for x in arrays])
    count, explicit = resolve(num_threads)
    return _isa.kernels.attention(mode, arrays, codes, batch, sizes, options, count, explicit)


def bits(x: np.ndarray | None) -> np.ndarray | None:
    """bfloat16 as uint16, in which form it can be exported as a buffer; others as they are."""
    return x.view(np.uint16) if x is not None and code(x.dtype) == BFLOAT16 else x


def code(dtype: np.dtype) -> int:
    """The kernels' number of a float dtype; of bool and int64, which they do not ask, 0."""
    return _CODES.get(dtype.char, BFLOAT16 if dtype.kind == "V" else 0)
