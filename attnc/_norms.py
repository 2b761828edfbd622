"""Row maximum and row sum apart, for rows whose lse is so large that it cannot hold the sum."""

import copy
from typing import Any, NamedTuple

import numpy as np

from . import _call

FAR = 1024.0             # an lse beyond this has lost more than 2**-14 of the row sum in float32
AGREEMENT = 4            # roundings by which two lse of the same keys may differ


class Norms(NamedTuple):
    """Of each row (batch..., q_heads, q_len), in float64; the sum of its exp(score) is ``exp(top) / inverse``."""

    stored: np.ndarray      # (..., 2): the maximum as the kernels store scores, and the inverse
    top: np.ndarray
    inverse: np.ndarray     # 0 where the row's lse is as good, or is not that of these keys

    def shares_of(self, sinks: np.ndarray) -> np.ndarray:
        """The share of each row's sink; NaN where the lse is to be used."""
        return np.where(self.inverse > 0, np.exp(sinks[:, None] - self.top) * self.inverse, np.nan)


def norms(a: Any, lse: np.ndarray, sinks: np.ndarray | None = None) -> Norms | None:
    """The norms of the rows whose `lse` is large and belongs to exactly the keys of `a`; None without a large one.

    `sinks` are given apart where the arguments `a` are those of the gradients, which have none.
    """
    with np.errstate(all="ignore"):
        if not ((np.abs(lse) > FAR) & (lse != -np.inf)).any():
            return None
        if sinks is not None:
            a = copy.copy(a)
            a.sinks = sinks
        rows = (*a.batch, a.q_heads, a.q_len)
        stored, own = np.empty((*rows, 2), np.float64), np.empty(rows, a.acc)
        unit = _call.run("attend", a, _call.RowRequest(norm=stored), lse=own).unit
        stored[~_agrees(own, lse.reshape(rows))] = 0
        return Norms(stored, stored[..., 0] * unit, stored[..., 1])


def _agrees(own: np.ndarray, lse: np.ndarray) -> np.ndarray:
    """Where a given `lse` is large, and `own`, that of these keys, is the same but for rounding."""
    bound = AGREEMENT * np.finfo(lse.dtype).eps * np.abs(lse)
    same: np.ndarray = (np.abs(lse) > FAR) & (lse != -np.inf) & ((np.abs(own - lse) <= bound) | (own == lse))
    return same
