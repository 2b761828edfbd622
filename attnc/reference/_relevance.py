"""Weights times the gradients that reach them, and weighted sums of heads, from dense matrices."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import numpy as np

from .._checks import weights as checks
from .._types import Array, ArrayLike, HeadsReduced, Integers, Progress, Reduced, Rows, Shape
from ..results import TopKeys
from ._aggregates import bin_labels, over_heads, row_counts
from ._matrix import Matrix, products
from ._scores import per_query_head, product

if TYPE_CHECKING:
    from ._weights import AttentionWeights


class Relevance(Matrix):
    """Weights times the gradients that reach them: the definition of what `attnc.AttentionWeights.relevance` gives."""

    def __init__(self, weights: AttentionWeights, value: np.ndarray, grad_output: np.ndarray, positive: bool) -> None:
        self._W = weights
        if np.dtype(np.float64) in (value.dtype, grad_output.dtype) and weights.dtype == np.float32:
            self._W = copy.copy(weights)
            self._W._a = copy.copy(weights._a)
            self._W._a.acc = np.dtype(np.float64)
        self._value, self._grad, self._positive = value, grad_output, positive

    @property
    def shape(self) -> Shape:
        return self._W.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return self._W.dtype

    @property
    def _arrays(self) -> dict[str, np.ndarray]:
        return self._W._arrays | {"value": self._value, "grad_output": self._grad}

    def _times_gradients(self, weights: np.ndarray) -> np.ndarray:
        a = self._W._a
        with np.errstate(all="ignore"):
            gradients = product(self._grad.astype(a.acc), per_query_head(self._value.astype(a.acc), a))
            gradients = np.maximum(gradients, 0) if self._positive else gradients
            return np.where(weights == 0, 0, weights * gradients.reshape(self.shape))

    def _all(self) -> np.ndarray:
        return self._times_gradients(self._W._all())

    def _visible(self) -> np.ndarray:
        return self._times_gradients(self._W._visible())

    def __matmul__(self, x: ArrayLike) -> Array:
        return products(self._visible(), checks.check_factor(x, self.shape, False).astype(self.dtype))

    def key_mass(self, *, rows: Rows = None, row_weights: ArrayLike | None = None, heads: HeadsReduced | None = None,
                 progress: Progress = None) -> Array:
        checks.check_progress(progress)
        checks.check_heads(heads)
        counts = self._W._counts(rows, row_weights)[..., None]
        with np.errstate(all="ignore"):
            mass = np.where(counts == 0, 0, self._visible() * counts).sum(-2)
        return over_heads(mass, heads, self._W._a).astype(self.dtype)

    def row_mass(self, *, keys: Rows = None, progress: Progress = None) -> Array:
        checks.check_progress(progress)
        return mass_of_rows(self, keys)

    def map(self, bins: tuple[int, int], *, progress: Progress = None) -> Array:
        row_bins, col_bins = checks.check_bins(bins, self._W._a)
        rows, keys = bin_labels(row_bins, self.shape[-2]), bin_labels(col_bins, self.shape[-1])
        return self._pooled(rows, keys, row_bins, col_bins, "mean", progress)

    def pool(self, query_labels: ArrayLike, key_labels: ArrayLike, *, progress: Progress = None) -> Array:
        rows = checks.check_labels("query_labels", query_labels, self.shape[-2])
        keys = checks.check_labels("key_labels", key_labels, self.shape[-1])
        return self._pooled(rows, keys, rows.max(initial=-1) + 1, keys.max(initial=-1) + 1, "mean", progress)


def mass_of_rows(W: Matrix, keys: Rows) -> np.ndarray:
    """The sum of each row over some keys."""
    checks.check_keys(keys, W.shape[-1])
    counts = np.ones(W.shape[-1], W.dtype) if keys is None else row_counts(keys, W.shape[-1]).astype(W.dtype)
    with np.errstate(all="ignore"):
        return np.asarray(np.where(counts == 0, 0, W._visible() * counts).sum(-1), W.dtype)


class WeightedHeads(Matrix):
    """A weighted sum of heads: the definition of what `attnc.AttentionWeights.weighted` gives."""

    _has_heads = False

    def __init__(self, weights: AttentionWeights, coefficients: np.ndarray) -> None:
        self._W, self._coefficients = weights, coefficients

    @property
    def shape(self) -> Shape:
        return *self._W._a.batch, *self._W.shape[-2:]

    @property
    def dtype(self) -> np.dtype[Any]:
        return self._W.dtype

    @property
    def _arrays(self) -> dict[str, np.ndarray]:
        return self._W._arrays

    def _sum(self, weights: np.ndarray) -> np.ndarray:
        weights = weights.reshape(*self._W._a.batch, self._W._a.q_heads, self.shape[-2], weights.shape[-1])
        total = np.zeros((*self._W._a.batch, *weights.shape[-2:]), self.dtype)
        for head in range(weights.shape[-3]):
            c = self._coefficients[..., head, None, None].astype(self.dtype)
            with np.errstate(all="ignore"):
                total += np.where(c == 0, 0, c * weights[..., head, :, :])
        return total

    def _all(self) -> np.ndarray:
        return self._sum(self._W._all())

    def _visible(self) -> np.ndarray:
        return self._sum(self._W._visible())

    # Rows

    def row_mass(self, *, keys: Rows = None, progress: Progress = None) -> Array:
        checks.check_progress(progress)
        return mass_of_rows(self, keys)

    def lost_mass(self, keep: ArrayLike, *, progress: Progress = None) -> Array:
        checks.check_progress(progress)
        keep = checks.check_keep_of(keep, self.shape)
        return np.asarray(np.where(keep, 0, self._visible()).sum(-1), self.dtype)

    def mean_distance(self, *, progress: Progress = None) -> Array:
        checks.check_progress(progress)
        return self._sum_of_rows(self._W.mean_distance())

    def mean_position(self, *, progress: Progress = None) -> Array:
        checks.check_progress(progress)
        empty, a = self._W._rows()[0], self._W._a
        mean = self._sum_of_rows(np.where(empty, 0, self._W.mean_position()))
        for index in np.ndindex(*mean.shape):
            *b, i = index
            rows = empty.reshape(*a.batch, a.q_heads, a.q_len)[(*b, slice(None), i)]
            if all(rows[self._coefficients[tuple(b)] != 0]):
                mean[index] = -1
        return mean

    def _sum_of_rows(self, x: np.ndarray) -> np.ndarray:
        """The weighted sum over the heads of something of each row."""
        return self._sum(np.broadcast_to(x[..., None], (*self._W.shape[:-1], 1)))[..., 0]

    def topk(self, k: int, *, progress: Progress = None) -> TopKeys:
        k = checks.check_k(k)
        checks.check_progress(progress)
        a = self._visible()
        weights, indices = np.zeros((*self.shape[:-1], k), self.dtype), np.full((*self.shape[:-1], k), -1)
        for row in np.ndindex(*self.shape[:-1]):
            if np.isnan(a[row]).any():
                weights[row] = np.nan
                continue
            there = [key for key in np.argsort(-a[row], kind="stable") if a[row][key] != 0][:k]
            weights[(*row, slice(len(there)))], indices[(*row, slice(len(there)))] = a[row][there], there
        return TopKeys(weights, indices)

    def max(self, *, progress: Progress = None) -> Array:
        return self.topk(1, progress=progress).weights[..., 0]

    def argmax(self, *, progress: Progress = None) -> Integers:
        return self.topk(1, progress=progress).indices[..., 0]

    def entropy(self, *, progress: Progress = None) -> Array:
        checks.check_progress(progress)
        checks.check_not_negative(self._coefficients)
        a = self._visible()
        with np.errstate(all="ignore"):
            return np.asarray(np.maximum(-np.where(a == 0, 0, a * np.log(a)).sum(-1), 0), self.dtype)

    def effective_keys(self, *, progress: Progress = None) -> Array:
        return np.exp(self.entropy(progress=progress))

    # Keys

    def _named(self, rows: Rows) -> np.ndarray:
        checks.check_rows(rows, self._W._a)
        return np.ones(self.shape[-2], np.int64) if rows is None else row_counts(rows, self.shape[-2])

    def key_mass(self, *, rows: Rows = None, row_weights: ArrayLike | None = None, progress: Progress = None) -> Array:
        checks.check_progress(progress)
        counts = self._named(rows).astype(self.dtype) * checks.check_amounts(row_weights, self.shape[:-1], self.dtype)
        with np.errstate(all="ignore"):
            mass = np.where(counts[..., None] == 0, 0, self._visible() * counts[..., None]).sum(-2)
        return np.asarray(mass, self.dtype)

    def key_max(self, *, rows: Rows = None, progress: Progress = None) -> Array:
        checks.check_progress(progress)
        return np.asarray(self._visible()[..., self._named(rows) > 0, :].max(-2, initial=0), self.dtype)

    def key_hits(self, threshold: float, *, rows: Rows = None, progress: Progress = None) -> Integers:
        checks.check_progress(progress)
        threshold = checks.check_threshold(threshold, self.dtype)
        above = self._visible()[..., self._named(rows) > 0, :] > self.dtype.type(threshold)
        return np.asarray(above.sum(-2), np.int64)

    # Pictures

    def map(self, bins: tuple[int, int], *, reduce: Reduced = "mean", progress: Progress = None) -> Array:
        checks.check_reduce(reduce)
        row_bins, col_bins = checks.check_bins(bins, self._W._a)
        rows, keys = bin_labels(row_bins, self.shape[-2]), bin_labels(col_bins, self.shape[-1])
        return self._pooled(rows, keys, row_bins, col_bins, reduce, progress)

    def pool(self, query_labels: ArrayLike, key_labels: ArrayLike, *, reduce: Reduced = "mean",
             progress: Progress = None) -> Array:
        rows = checks.check_labels("query_labels", query_labels, self.shape[-2])
        keys = checks.check_labels("key_labels", key_labels, self.shape[-1])
        return self._pooled(rows, keys, rows.max(initial=-1) + 1, keys.max(initial=-1) + 1, reduce, progress)
