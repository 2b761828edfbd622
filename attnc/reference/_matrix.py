"""What every lazy matrix says of itself, from all of it in memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from .._checks import integer
from .._checks import weights as checks
from .._checks.index import check_index
from .._types import Array, ArrayLike, DTypeLike, Folded, Index, Progress, Reduced, Shape
from ..results import SparseWeights
from ._aggregates import kept, tiles


class Matrix:
    """Dense parts, maps and products of a matrix for each head, or of one."""

    _has_heads = True

    @property
    def shape(self) -> Shape:
        raise NotImplementedError

    @property
    def dtype(self) -> np.dtype[Any]:
        raise NotImplementedError

    @property
    def _arrays(self) -> dict[str, np.ndarray]:
        raise NotImplementedError

    def _all(self) -> np.ndarray:
        """The matrix, in which a NaN row is NaN throughout."""
        raise NotImplementedError

    def _visible(self) -> np.ndarray:
        """The matrix, in which a NaN row is NaN where it sees the key, else 0."""
        raise NotImplementedError

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def dense(self, *, dtype: DTypeLike | None = None, out: Array | None = None, progress: Progress = None) -> Array:
        checks.check_progress(progress)
        with np.errstate(all="ignore"):
            dense = self._all()
            if out is None:
                return dense.astype(self.dtype if dtype is None else checks.check_dense_dtype(dtype))
            checks.check_dense_out(out, dtype, self.shape, self.dtype, self._arrays)[...] = dense
            return out

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> Array:
        if copy is False:
            raise ValueError("the weights are computed: an array of them is always new; wanted copy=None or True")
        return self.dense() if dtype is None else self.dense().astype(dtype)

    def __getitem__(self, index: Any) -> Any:
        check_index(index, self.shape)
        return self.dense()[index]

    def _pooled(
            self, rows: np.ndarray, keys: np.ndarray, row_bins: int, col_bins: int, reduce: Reduced,
            progress: Progress) -> Array:
        checks.check_progress(progress)
        gather: Any = np.maximum if checks.check_reduce(reduce) == "max" else np.add
        weights = self._visible()[..., rows >= 0, :][..., keys >= 0]
        rows, keys = rows[rows >= 0], keys[keys >= 0]
        found = np.zeros((*self.shape[:-2], row_bins, col_bins), self.dtype)
        gather.at(found, (..., rows[:, None], keys), weights)
        if gather is np.add:
            found /= np.maximum(np.bincount(rows, minlength=row_bins), 1).astype(self.dtype)[:, None]
        return found

    @property
    def T(self) -> Transposed:
        return Transposed(self)

    def __matmul__(self, x: ArrayLike) -> Array:
        x = checks.check_factor(x, self.shape, False)
        return products(self._visible(), x)

    def sparse(
            self, *, threshold: float | None = None, top_p: float | None = None,
            progress: Progress = None) -> SparseWeights:
        checks.check_progress(progress)
        threshold, top_p = checks.check_sparse(threshold, top_p, self.dtype)
        weights = self._visible()
        keep = kept(weights, threshold, top_p)
        rows = keep.reshape(math.prod(self.shape[:-1]), self.shape[-1])
        indptr = np.concatenate([[0], rows.sum(-1).cumsum()])
        dropped = np.where(keep, 0, weights).sum(-1).astype(self.dtype)
        return SparseWeights(indptr, np.nonzero(rows)[1], weights[keep], dropped, self.shape)

    def blocks(self, rows: int = 256) -> Iterator[tuple[slice, Array]]:
        rows = integer("rows", rows, 1, 2**62)
        dense = self.dense()
        for start in range(0, self.shape[-2], rows):
            part = slice(start, min(start + rows, self.shape[-2]))
            yield part, dense[..., part, :]

    def reduce(
            self, function: Callable[[Folded, Array, Index], Folded],
            initial: Folded = None,  # type: ignore[assignment]
            *, rows: int = 256, keys: int = 4096,
            progress: Progress = None) -> Folded:
        checks.check_progress(progress)
        rows, keys = checks.check_tile(rows, keys)
        dense, state = self.dense(), initial
        for index in tiles(self.shape, rows, keys):
            state = function(state, dense[index], index)
        return state

    def __repr__(self) -> str:
        return f"{type(self).__name__}(shape={self.shape}, dtype={self.dtype.name})"


class Transposed:
    """The transpose of weights, for ``W.T @ X``."""

    def __init__(self, weights: Matrix) -> None:
        self.T = weights

    @property
    def shape(self) -> Shape:
        return *self.T.shape[:-2], self.T.shape[-1], self.T.shape[-2]

    def __matmul__(self, x: ArrayLike) -> Array:
        x = checks.check_factor(x, self.T.shape, True)
        return products(self.T._visible().swapaxes(-1, -2), x).astype(self.T.dtype)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(shape={self.shape}, dtype={self.T.dtype.name})"


def products(weights: np.ndarray, x: np.ndarray) -> np.ndarray:
    """``weights @ x``, where a weight of 0 adds nothing, whatever stands in `x`."""
    if x.ndim == 1:
        return products(weights, x[:, None])[..., 0]
    finite = np.where(np.isfinite(x), x, 0)
    total = weights @ finite
    for i, c in np.argwhere((~np.isfinite(x)).any(tuple(range(x.ndim - 2)))):
        w, odd = weights[..., i], x[..., i, c, None]
        with np.errstate(all="ignore"):
            total[..., c] += np.where((w != 0) & ~np.isfinite(odd), w * odd, 0)
    return total
