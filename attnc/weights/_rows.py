"""What can be said of each row of the weights, in one sweep and without an lse known before."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import _call
from .._checks import weights as checks
from .._types import Array, ArrayLike, Integers, Progress
from ..results import TopKeys
from ._held import Held
from ._slices import part

ROW_BLOCK = 1024     # rows whose mask is joined with another one at a time


class RowStatistics(Held):
    """Methods of `AttentionWeights` with a result for each row."""

    def topk(self, k: int, *, progress: Progress = None) -> TopKeys:
        """The k keys of each row with the largest weights.

        Parameters
        ----------
        k : int
            From 1; more than there are keys is allowed.
        progress : bool or function, optional
            True shows a bar by tqdm, or a percentage on stderr where tqdm is not installed; a function is called with
            (done, total) now and then.

        Returns
        -------
        TopKeys (weights, indices), each (..., q_heads, q_len, k)
            Descending by weight, ties to the smaller index (int64). Where fewer than k keys are allowed: 0 and -1. A
            row with NaN: NaN and -1.

        Examples
        --------
        >>> from attnc import AttentionWeights
        >>> weights, keys = AttentionWeights([[1.]], [[0.], [0.], [np.log(2.)]]).topk(2)
        >>> weights, keys
        (array([[0.5 , 0.25]]), array([[2, 0]]))
        """
        return self._topk(checks.check_k(k), progress)

    def entropy(self, *, progress: Progress = None) -> Array:
        """The entropy of each row, in nats: how widely it looks.

        Returns
        -------
        array (..., q_heads, q_len)
            ``-sum(w * log(w))``; a sink counts as one more event. 0 for a row that sees no key. Under a given lse the
            sum is over these keys alone.
        """
        return self._one("entropy", progress)

    def effective_keys(self, *, progress: Progress = None) -> Array:
        """How many keys of equal weight would have the entropy of each row: ``exp(entropy)``, from 1."""
        return np.exp(self.entropy(progress=progress))

    def max(self, *, progress: Progress = None) -> Array:
        """The largest weight of each row (..., q_heads, q_len); 0 for a row that sees no key."""
        return self._one("max", progress)

    def argmax(self, *, progress: Progress = None) -> Integers:
        """The key with the largest weight of each row (int64), the first of equals; -1 for a row that sees none."""
        return self._topk(1, progress).indices[..., 0]

    def mean_position(self, *, progress: Progress = None) -> Array:
        """``sum(w[j] * j)`` of each row (..., q_heads, q_len); -1 for a row that sees no key."""
        return self._one("mean_position", progress)

    def mean_distance(self, *, progress: Progress = None) -> Array:
        """``sum(w[j] * abs(position - j))`` of each row (..., q_heads, q_len); 0 for a row that sees no key."""
        return self._one("mean_distance", progress)

    def lost_mass(self, keep: ArrayLike, *, progress: Progress = None) -> Array:
        """What each row would lose if only some keys were kept.

        Parameters
        ----------
        keep : bool array
            True = the key stays; broadcasts to (..., q_heads, q_len, kv_len).
        progress : bool or function, optional

        Returns
        -------
        array (..., q_heads, q_len)
            The sum of the weights of the other keys, as ``exp(their lse - lse)``; a sink is not counted.

        Examples
        --------
        >>> from attnc import AttentionWeights
        >>> AttentionWeights([[1.]], [[0.], [0.], [np.log(2.)]]).lost_mass([True, False, True])
        array([0.25])
        """
        keep = checks.check_keep(keep, self._a)
        keep = keep[None] if self._a.two_d and keep.ndim == 2 else keep
        mask = self._a.mask
        whole = mask is None or min(keep.ndim, mask.ndim) < 2 or keep.shape[-2] == mask.shape[-2]
        step = max(self._a.q_len, 1) if whole else ROW_BLOCK
        lost = np.empty(self._a.lse_shape, self.dtype)
        with self._answer(progress, 1 + -(-self._a.q_len // step)) as steps:
            self._norm(steps.part())
            lse = self._lse()
            for start in range(0, self._a.q_len, step):
                some = part(self._a, rows=slice(start, start + step))
                hidden = ~_rows_of(keep, start, step)
                some.mask = hidden if some.mask is None else some.mask & hidden
                some.sinks = None
                others = np.empty(some.lse_shape, self.dtype)
                _call.run("attend", some, _call.RowRequest(), steps.part(), lse=others)
                own = lse[..., start:start + step]
                with np.errstate(all="ignore"):
                    found = np.exp(others.reshape(own.shape) - own)
                lost[..., start:start + step] = np.where(others.reshape(own.shape) == -np.inf, 0, found)
        return np.where(lse == -np.inf, 0, lost)

    def _one(self, name: str, progress: Progress) -> Array:
        found: Array = self._rows(progress, name)[name]
        return found

    def _topk(self, k: int, progress: Progress) -> TopKeys:
        found: TopKeys = self._rows(progress, k=k)["topk"]
        return found

    def _rows(self, progress: Progress, *names: str, k: int | None = None) -> dict[str, Any]:
        """Statistics of rows by name as the user sees them; what they bring of norm and lse is kept."""
        with self._answer(progress, 1) as steps:
            return self._sweep_rows(names, k, steps.part())


def _rows_of(mask: np.ndarray, start: int, step: int) -> np.ndarray:
    """Some rows of a mask that may serve all with one, or have no axis of rows."""
    return mask[..., start:start + step, :] if mask.ndim >= 2 and mask.shape[-2] > 1 else mask
