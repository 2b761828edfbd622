"""Lazy weights as a source of pictures: every number comes from a sweep over tiles, never from the matrix."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from .._slices import part
from .._types import ArrayLike, Progress, Reduced
from ..weights._sweeps import Steps

if TYPE_CHECKING:
    from ..weights import AttentionWeights


def slack(eps: float, kv_len: int) -> float:
    """Rounding error that a sum of `kv_len` weights may have."""
    return 4 * eps * math.sqrt(kv_len)


def missing(total: ArrayLike, slack: float, seeing: np.ndarray | np.bool_) -> np.ndarray:
    """Share of each row on no key (sinks): ``1 - total`` beyond rounding, where the row sees a key."""
    share = 1 - np.asarray(total, np.float64)
    return np.where((share > slack) & seeing, share, 0)


class Lazy:
    """Weights that are computed when they are asked for; the methods are those of `source.Dense`."""

    def __init__(self, weights: AttentionWeights) -> None:
        self.lead = weights.shape[:-2]
        if 0 in weights.shape:
            raise ValueError(f"weights must not be empty, got shape {weights.shape}")
        self.shape = (math.prod(self.lead[:-1]), self.lead[-1] if self.lead else 1, *weights.shape[-2:])
        self.weights = weights
        self._whole = weights._a.sinks is None and weights._given is None       # rows sum to 1, or are empty
        self._slack = slack(np.finfo(weights.dtype).eps, self.shape[3])

    def only(self, layer: int, head: int) -> Lazy:
        return Lazy(self.weights.head(*self._places(layer, head)))

    def _places(self, layer: int, head: int) -> tuple[int, ...]:
        return (*map(int, np.unravel_index(layer, self.lead[:-1])), head) if self.lead else ()

    def _shaped(self, array: np.ndarray) -> np.ndarray:
        return np.asarray(array).reshape(*self.shape[:2], *array.shape[len(self.lead):])

    def map(self, bins: tuple[int, int], reduce: Reduced, progress: Progress = None) -> np.ndarray:
        even = self.weights._even()
        with Steps(progress, 1 + (even is not None)) as steps:
            return self._seen(even, self.weights.map(bins, reduce=reduce, progress=steps.part()), bins, steps)

    def summary(self, bins: tuple[int, int], k: int, progress: Progress = None) -> tuple[np.ndarray, ...]:
        even = self.weights._even()
        with Steps(progress, 1 + (even is not None) + (not self._whole)) as steps:
            found: Any = self.weights.summary(topk=k, entropy=True, mean_distance=True, map=bins,
                                              progress=steps.part())
            return (self._seen(even, found.map, bins, steps), self._shaped(found.topk.weights),
                    self._shaped(found.topk.indices), self._shaped(found.entropy), self._shaped(found.mean_distance),
                    self.no_key(None if self._whole else steps.part()))

    def _seen(self, even: AttentionWeights | None, pooled: np.ndarray, bins: tuple[int, int],
              steps: Steps) -> np.ndarray:
        """The map with NaN in cells where nothing is allowed; `even` are weights of the same visible keys."""
        pooled = self._shaped(pooled)
        if even is None:
            return pooled
        return np.where(even.map(bins, reduce="max", progress=steps.part()).reshape(pooled.shape) > 0, pooled, np.nan)

    def entropy(self, progress: Progress = None) -> np.ndarray:
        return self._shaped(self.weights.entropy(progress=progress))

    def mean_distance(self, progress: Progress = None) -> np.ndarray:
        return self._shaped(self.weights.mean_distance(progress=progress))

    def no_key(self, progress: Progress = None) -> np.ndarray:
        weights = self.weights
        if self._whole:
            return np.zeros(self.shape[:3])
        lost = weights.lost_mass(np.zeros((1, 1), bool), progress=progress)
        return self._shaped(missing(lost, self._slack, weights.lse > -np.inf))

    def column(self, key: int, progress: Progress = None) -> np.ndarray:
        self._know_rows(progress)
        return self._shaped(self.weights[..., key])

    def _know_rows(self, progress: Progress) -> None:
        """Compute what each weight needs to know of its row, which takes one sweep."""
        with self.weights._answer(progress) as steps:
            self.weights._norm(steps.part())

    def diagonal(self, offset: int, progress: Progress = None, block: int = 64) -> np.ndarray:
        self._know_rows(progress)
        q_len, kv_len = self.shape[2:]
        found = np.zeros(self.shape[:3], self.weights.dtype)
        for start in range(max(0, -offset), min(q_len, kv_len - offset), block):
            rows = slice(start, min(start + block, q_len, kv_len - offset))
            square = self._shaped(self.weights[..., rows, rows.start + offset:rows.stop + offset])
            found[..., rows] = square.diagonal(axis1=-2, axis2=-1)
        return found

    def row(self, layer: int, head: int, row: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        places = self._places(layer, head)
        share, even = self.weights[(*places, row)], self.weights._even()
        nowhere = np.zeros(())
        if not self._whole:
            nowhere = missing(share.sum(), self._slack, self._lse_of(places, row) > -np.inf)
        if even is None:
            return share, np.ones(share.shape, bool), nowhere
        return share, even[(*(places or (0,)), row)] > 0, nowhere

    def _lse_of(self, places: tuple[int, ...], row: int) -> np.ndarray:
        """The lse of one row, without those of the others."""
        W = self.weights
        if W._given is not None:
            return np.asarray(W._given[(*places, row)])
        one = W.head(*places) if places else W
        return type(W)._of(part(one._a, rows=slice(row, row + 1)), None).lse.reshape(())

    def key_mass(self, progress: Progress = None) -> np.ndarray:
        return self._shaped(self.weights.key_mass(normalize=True, progress=progress))
