"""Statistics of each row of the weights, computed in one sweep that needs no lse."""

from __future__ import annotations

from typing import Any

import numpy as np

from .._checks import weights as checks
from .._slices import part
from .._types import Array, ArrayLike, Integers, Progress, Rows
from ..results import TopKeys
from . import _sweeps
from ._held import Held
from ._products import is_empty, times

ROW_BLOCK = 1024     # rows per step of `lost_mass`, where its mask and that of the weights must be joined


class RowStatistics(Held):
    """Methods of `AttentionWeights` with a result for each row."""

    def topk(self, k: int, *, progress: Progress = None) -> TopKeys:
        """The k keys of each row with the largest weights.

        Parameters
        ----------
        k : int
            At least 1; it may exceed kv_len.
        progress : bool or function, optional
            True shows a bar by tqdm, or a percentage on stderr if tqdm is not installed; a function is called
            repeatedly with (done, total).

        Returns
        -------
        TopKeys (weights, indices), each (..., q_heads, q_len, k)
            Descending by weight; of equal weights the smaller index (int64) comes first. Places beyond the number of
            keys that a row sees have 0 and -1; a row with NaN has NaN and -1.

        Examples
        --------
        >>> from attnc import AttentionWeights
        >>> weights, keys = AttentionWeights([[1.]], [[0.], [0.], [np.log(2.)]]).topk(2)
        >>> weights, keys
        (array([[0.5 , 0.25]]), array([[2, 0]]))
        """
        return self._topk(checks.check_k(k), progress)

    def entropy(self, *, progress: Progress = None) -> Array:
        """The entropy of each row, in nats: how widely its weights spread.

        Returns
        -------
        array (..., q_heads, q_len)
            ``-sum(w * log(w))``; a sink counts as one more key. 0 for a row that sees no key. Under a given lse the sum
            is over the keys of these weights only.
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

    def row_mass(self, *, keys: Rows = None, progress: Progress = None) -> Array:
        """The sum of each row's weights over some keys.

        Parameters
        ----------
        keys : slice, int array or bool array (kv_len,), optional
            The keys that count, by default all; a key that is named twice counts twice.
        progress : bool or function, optional

        Returns
        -------
        array (..., q_heads, q_len)

        Examples
        --------
        >>> from attnc import AttentionWeights
        >>> AttentionWeights([[1.]], [[0.], [0.], [np.log(2.)]]).row_mass(keys=[0, 2])
        array([0.75])
        """
        counts = checks.check_keys(keys, self._a.kv_len).astype(self.dtype)
        with self._answer(progress, self._a.heads_per_kv) as steps:
            return times(self, counts, steps)

    def lost_mass(self, keep: ArrayLike, *, progress: Progress = None) -> Array:
        """The mass that each row loses if only some keys are kept.

        Parameters
        ----------
        keep : bool array
            True for keys that stay; broadcasts to (..., q_heads, q_len, kv_len).
        progress : bool or function, optional

        Returns
        -------
        array (..., q_heads, q_len)
            The sum of the weights of the other keys, as accurate as a weight; a sink is not counted.

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
            norm = self._norm(steps.part())
            for start in range(0, self._a.q_len, step):
                rows = slice(start, start + step)
                some = part(self._a, rows=rows)
                hidden = ~_rows_of(keep, start, step)
                some.mask = hidden if some.mask is None else some.mask & hidden
                some.sinks = None
                others = _sweeps.rows(some, None, (), None, steps.part())
                given = None if self._given is None else self._given[..., rows].reshape(others["lse"].shape)
                share = share_of(others, None if norm is None else norm[..., rows, :], given)
                with np.errstate(under="ignore", over="ignore"):
                    lost[..., rows] = share.reshape(lost[..., rows].shape)
        return lost

    def _one(self, name: str, progress: Progress) -> Array:
        found: Array = self._rows(progress, name)[name]
        return found

    def _topk(self, k: int, progress: Progress) -> TopKeys:
        found: TopKeys = self._rows(progress, k=k)["topk"]
        return found

    def _rows(self, progress: Progress, *names: str, k: int | None = None) -> dict[str, Any]:
        """Statistics of rows by name, in the shapes of results; keeps the norm and lse that they bring."""
        with self._answer(progress, 1) as steps:
            return self._sweep_rows(names, k, steps.part())


def share_of(part: dict[str, Any], norm: Array | None, given: Array | None) -> np.ndarray:
    """The mass of some keys of each row, in float64, from their norm and that of all keys, or a given lse.

    A norm keeps maximum and sum apart, because their lse loses digits where scores are far from 0.
    """
    top, inverse = part["norm"][..., 0], part["norm"][..., 1]
    with np.errstate(all="ignore"):
        if norm is not None:
            share = np.exp((top - norm[..., 0]) * part["unit"]) * norm[..., 1] / inverse
        else:
            share = np.exp(top * part["unit"] - np.asarray(given, np.float64)) / inverse
            share = np.where(given == -np.inf, 0, share)
    found: np.ndarray = np.where(is_empty(part["norm"]), 0, share)
    return found


def _rows_of(mask: np.ndarray, start: int, step: int) -> np.ndarray:
    """Some rows of a mask, whose axis of rows may be absent or of length 1."""
    return mask[..., start:start + step, :] if mask.ndim >= 2 and mask.shape[-2] > 1 else mask
