"""Lazy weights as a source of pictures: every number comes from a sweep over tiles, never from the matrix."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from .._types import ArrayLike, Progress, Reduced

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
        return self._seen(self.weights.map(bins, reduce=reduce, progress=progress), bins)

    def summary(self, bins: tuple[int, int], k: int, progress: Progress = None) -> tuple[np.ndarray, ...]:
        found: Any = self.weights.summary(topk=k, entropy=True, mean_distance=True, map=bins, progress=progress)
        return (self._seen(found.map, bins), self._shaped(found.topk.weights), self._shaped(found.topk.indices),
                self._shaped(found.entropy), self._shaped(found.mean_distance))

    def _seen(self, pooled: np.ndarray, bins: tuple[int, int]) -> np.ndarray:
        """The map with NaN in cells where nothing is allowed."""
        pooled = self._shaped(pooled)
        even = self.weights._even()
        if even is None:
            return pooled
        return np.where(even.map(bins, reduce="max").reshape(pooled.shape) > 0, pooled, np.nan)

    def entropy(self) -> np.ndarray:
        return self._shaped(self.weights.entropy())

    def mean_distance(self) -> np.ndarray:
        return self._shaped(self.weights.mean_distance())

    def no_key(self) -> np.ndarray:
        weights = self.weights
        if self._whole:
            return np.zeros(self.shape[:3])
        return self._shaped(missing(weights.lost_mass(np.zeros((1, 1), bool)), self._slack, weights.lse > -np.inf))

    def column(self, key: int) -> np.ndarray:
        return self._shaped(self.weights[..., key])

    def diagonal(self, offset: int, block: int = 64) -> np.ndarray:
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
            nowhere = missing(share.sum(), self._slack, self.weights.lse[(*places, row)] > -np.inf)
        if even is None:
            return share, np.ones(share.shape, bool), nowhere
        return share, even[(*(places or (0,)), row)] > 0, nowhere

    def key_mass(self) -> np.ndarray:
        return self._shaped(self.weights.key_mass(normalize=True))
