"""Heads joined into one matrix: their mean, and any weighted sum of them as an object of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from .._checks import weights as checks
from .._types import Array, ArrayLike, Integers, Progress, Reduced, Report, Rows
from ..results import TopKeys
from . import _pooling
from ._blocks import Blocks
from ._held import Held
from ._keys import bin_labels
from ._products import Transposed

if TYPE_CHECKING:
    from ._weights import AttentionWeights


class Heads(Held):
    """Methods of `AttentionWeights` that join its heads."""

    def head_mean(self, *, out: Array | None = None, progress: Progress = None) -> Array:
        """The mean over the heads as an array (..., q_len, kv_len), a block of rows at a time.

        Parameters
        ----------
        out : array, optional
            Receives the mean; of its shape and dtype.
        progress : bool or function, optional
        """
        a, total = self._a, self.weighted(heads=np.ones(self._a.q_heads))
        if out is not None:
            checks.check_acc_out(out, (*a.batch, a.q_len, a.kv_len), a)
        mean = total.dense(out=out, progress=progress)
        with np.errstate(under="ignore"):
            mean /= max(a.q_heads, 1)
        return mean

    def weighted(self, *, heads: ArrayLike) -> WeightedHeads:
        """A weighted sum of the heads as one matrix, without building it: ``sum(heads[h] * W[..., h, :, :])``.

        Parameters
        ----------
        heads : float array (batch..., q_heads)
            The coefficient of each head; leading axes broadcast. A head with 0 adds nothing, even if it holds NaN.

        Returns
        -------
        WeightedHeads
            Of shape (..., q_len, kv_len), with the statistics, dense parts and products that the weights have.

        Raises
        ------
        TypeError, ValueError
            For a wrong dtype, a wrong shape, or coefficients that are not finite.

        Examples
        --------
        >>> from attnc import AttentionWeights
        >>> W = AttentionWeights(np.zeros((2, 3, 8)), np.zeros((2, 4, 8)), causal=True)
        >>> A = W.weighted(heads=[1.0, -0.5])
        >>> A
        WeightedHeads(shape=(3, 4), dtype=float64)
        >>> A[0], A.key_mass(rows=[0]), A.row_mass(keys=slice(1))
        (array([0.25, 0.25, 0.  , 0.  ]), array([0.25, 0.25, 0.  , 0.  ]), array([0.25      , 0.16666667, 0.125     ]))
        """
        return WeightedHeads(self, checks.check_coefficients(heads, self._a))  # type: ignore[arg-type]


class WeightedHeads(Blocks):
    """A weighted sum of heads, which `attnc.AttentionWeights.weighted` makes: (..., q_len, kv_len).

    It holds the arrays of the weights and has their dtype. Sums and products are sums over the heads' own; statistics
    that are not linear (`topk`, `max`, `entropy`, `key_max`, `key_hits` and the like) are computed from dense blocks of
    rows. For these a key counts for a row if the weighted sum is not 0.

    Examples
    --------
    >>> from attnc import AttentionWeights
    >>> AttentionWeights(np.zeros((2, 1, 8)), np.zeros((2, 4, 8))).weighted(heads=[1.0, -0.5]).dense()
    array([[0.125, 0.125, 0.125, 0.125]])
    """

    _has_heads = False

    def __init__(self, weights: AttentionWeights, coefficients: np.ndarray):
        self._W, self._coefficients = weights, coefficients

    @property
    def shape(self) -> tuple[int, ...]:
        """(..., q_len, kv_len)."""
        a = self._W._a
        return *a.batch, a.q_len, a.kv_len

    @property
    def dtype(self) -> np.dtype[Any]:
        """That of the weights."""
        return self._W.dtype

    # Rows

    def row_mass(self, *, keys: Rows = None, progress: Progress = None) -> Array:
        """The sum of each row over some keys, as `attnc.AttentionWeights.row_mass`: (..., q_len)."""
        return self._sum(self._W.row_mass(keys=keys, progress=progress), 1)

    def lost_mass(self, keep: ArrayLike, *, progress: Progress = None) -> Array:
        """The mass that each row loses if only some keys are kept, as `attnc.AttentionWeights.lost_mass`: (..., q_len).

        `keep` broadcasts to (..., q_len, kv_len).
        """
        keep = checks.check_keep_of(keep, self.shape)
        keep = keep[..., None, :, :] if keep.ndim > 2 and self._W.ndim > 2 else keep
        return self._sum(self._W.lost_mass(keep, progress=progress), 1)

    def mean_distance(self, *, progress: Progress = None) -> Array:
        """``sum(a[j] * abs(position - j))`` of each row (..., q_len)."""
        return self._sum(self._W.mean_distance(progress=progress), 1)

    def mean_position(self, *, progress: Progress = None) -> Array:
        """``sum(a[j] * j)`` of each row (..., q_len); -1 where no head with a coefficient other than 0 sees a key."""
        of_heads, c = self._W.mean_position(progress=progress), self._coefficients[..., None]
        empty = ((of_heads.reshape(*c.shape[:-1], self.shape[-2]) == -1) | (c == 0)).all(-2)
        return np.where(empty, -1, self._sum(np.where(of_heads == -1, 0, of_heads), 1)).astype(self.dtype)

    def topk(self, k: int, *, progress: Progress = None) -> TopKeys:
        """The k largest entries of each row and their keys, as `attnc.AttentionWeights.topk`; 0 does not count."""
        k = checks.check_k(k)
        weights = np.zeros((*self.shape[:-1], k), self.dtype)
        indices = np.full(weights.shape, -1)
        with self._answer(progress, 1 + _pooling.n_blocks(self)) as steps:
            self._norm(steps.part())
            for some, block in _pooling.blocks(self, steps):
                ranked = np.where(block == 0, -np.inf, block)
                order = np.argsort(-ranked, axis=-1, kind="stable")[..., :k]
                best = np.take_along_axis(ranked, order, -1)
                nan, there = np.isnan(block).any(-1), best > -np.inf
                weights[..., some, :order.shape[-1]] = np.where(there, best, 0)
                indices[..., some, :order.shape[-1]] = np.where(there, order, -1)
                weights[..., some, :][nan], indices[..., some, :][nan] = np.nan, -1
        return TopKeys(weights, indices)

    def max(self, *, progress: Progress = None) -> Array:
        """The largest entry of each row that is not 0: (..., q_len)."""
        return self.topk(1, progress=progress).weights[..., 0]

    def argmax(self, *, progress: Progress = None) -> Integers:
        """The key of the largest entry of each row, the first of equals; -1 for a row of zeros."""
        return self.topk(1, progress=progress).indices[..., 0]

    def entropy(self, *, progress: Progress = None) -> Array:
        """``-sum(a * log(a))`` of each row (..., q_len), in nats, without sinks; no coefficient may be below 0."""
        checks.check_not_negative(self._coefficients)
        return self._row_by_row(lambda a: np.maximum(-np.where(a == 0, 0, a * np.log(a)).sum(-1), 0), progress)

    def effective_keys(self, *, progress: Progress = None) -> Array:
        """``exp(entropy)`` of each row (..., q_len)."""
        return np.exp(self.entropy(progress=progress))

    # Keys

    def key_mass(
            self, *, rows: Rows = None, row_weights: ArrayLike | None = None, progress: Progress = None) -> Array:
        """Sum over the rows, as `attnc.AttentionWeights.key_mass`: (..., kv_len); `row_weights` fit (..., q_len)."""
        amounts, c = checks.check_amounts(row_weights, self.shape[:-1], self.dtype), self._coefficients
        amounts = c[0] * amounts if self._W.ndim == 2 else c[..., None] * amounts[..., None, :]
        return self._W.key_mass(rows=rows, row_weights=amounts, heads="sum", progress=progress)

    def key_max(self, *, rows: Rows = None, progress: Progress = None) -> Array:
        """The largest entry of each key over the `rows`, at least 0: (..., kv_len)."""
        found = np.zeros((*self.shape[:-2], self.shape[-1]), self.dtype)
        self._key_by_key(rows, lambda block: np.maximum(found, block.max(-2, initial=0), out=found), progress)
        return found

    def key_hits(self, threshold: float, *, rows: Rows = None, progress: Progress = None) -> Integers:
        """Number of the `rows` whose entry at each key is above `threshold`: int64 (..., kv_len)."""
        above = self.dtype.type(checks.check_threshold(threshold, self.dtype))
        found = np.zeros((*self.shape[:-2], self.shape[-1]), np.int64)
        self._key_by_key(rows, lambda block: np.add(found, (block > above).sum(-2), out=found), progress)
        return found

    def map(self, bins: tuple[int, int], *, reduce: Reduced = "mean", progress: Progress = None) -> Array:
        """A binned map, as `attnc.AttentionWeights.map`: (..., row_bins, col_bins)."""
        if checks.check_reduce(reduce) == "mean":
            return self._sum(self._W.map(bins, progress=progress), 2)
        row_bins, key_bins = checks.check_bins(bins, self._W._a)
        return self._largest(bin_labels(row_bins, self.shape[-2]), bin_labels(key_bins, self.shape[-1]), progress)

    def pool(self, query_labels: ArrayLike, key_labels: ArrayLike, *, reduce: Reduced = "mean",
             progress: Progress = None) -> Array:
        """A map over given groups, as `attnc.AttentionWeights.pool`: (..., query groups, key groups)."""
        if checks.check_reduce(reduce) == "mean":
            return self._sum(self._W.pool(query_labels, key_labels, progress=progress), 2)
        rows = checks.check_labels("query_labels", query_labels, self.shape[-2])
        return self._largest(rows, checks.check_labels("key_labels", key_labels, self.shape[-1]), progress)

    # Products

    @property
    def T(self) -> Transposed:
        """The transpose, for ``A.T @ X``."""
        return Transposed(self)

    def __matmul__(self, x: ArrayLike) -> Array:
        return self._product(x, False)

    def _product(self, x: ArrayLike, transposed: bool) -> Array:
        given = checks.check_factor(x, self.shape, transposed)
        columns = given[:, None] if given.ndim == 1 else given
        if self._W.ndim > 2:
            columns = columns[..., None, :, :]
        found = self._sum((self._W.T if transposed else self._W) @ columns, 2)
        return found[..., 0] if given.ndim == 1 else found

    # What is computed from

    @property
    def _arrays(self) -> dict[str, Array]:
        return self._W._arrays

    def _check_operands(self) -> None:
        self._W._check_operands()

    def _norm(self, report: Report | None) -> Array | None:
        return self._W._norm(report)

    def _write(self, lead: tuple[slice, ...], rows: slice, keys: slice, out: Array, visible: bool = False) -> None:
        out[...] = 0
        block = np.empty(out.shape, self.dtype)
        for head in range(self._coefficients.shape[-1]):
            c = self._coefficients[..., head][lead]
            if not c.any():
                continue
            if self._W.ndim == 2:
                self._W._write((), rows, keys, block, visible)
            else:
                its = lead or (slice(None),) * (self.ndim - 2)
                self._W._write((*its, slice(head, head + 1)), rows, keys, block[..., None, :, :], visible)
            with np.errstate(all="ignore"):
                c = c[..., None, None]
                out += block * c if c.all() else np.where(c == 0, 0, block * c)

    def _sum(self, x: np.ndarray, axes: int) -> np.ndarray:
        """The sum in float64 over the heads of x (..., q_heads, ...); those with 0 add nothing."""
        x = x if self._W.ndim > 2 else x[None]
        c = self._coefficients.reshape(*self._coefficients.shape, *[1] * axes).astype(np.float64)
        with np.errstate(all="ignore"):
            found: np.ndarray = np.where(c == 0, 0, x * c).sum(-axes - 1).astype(x.dtype)
        return found

    def _row_by_row(self, function: Callable[[np.ndarray], np.ndarray], progress: Progress) -> np.ndarray:
        found = np.zeros(self.shape[:-1], self.dtype)
        with self._answer(progress, 1 + _pooling.n_blocks(self)) as steps, np.errstate(all="ignore"):
            self._norm(steps.part())
            for some, block in _pooling.blocks(self, steps):
                found[..., some] = function(block)
        return found

    def _key_by_key(self, rows: Rows, function: Callable[[np.ndarray], object], progress: Progress) -> None:
        counts = checks.check_rows(rows, self._W._a)
        with self._answer(progress, 1 + _pooling.n_blocks(self)) as steps, np.errstate(all="ignore"):
            self._norm(steps.part())
            for some, block in _pooling.blocks(self, steps):
                function(block if counts is None else block[..., counts[some] > 0, :])

    def _largest(self, rows: np.ndarray, keys: np.ndarray, progress: Progress) -> np.ndarray:
        with self._answer(progress, 1 + _pooling.n_blocks(self)) as steps:
            self._norm(steps.part())
            groups = int(rows.max(initial=-1)) + 1, int(keys.max(initial=-1)) + 1
            return _pooling.pooled(self, rows, keys, *groups, True, steps)
