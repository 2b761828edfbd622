"""Dense weights block by block: as one array, as an iterator, reduced by a user's function, as a sparse matrix."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from .._checks import integer
from .._checks import weights as checks
from .._checks.index import check_index
from .._types import Array, DTypeLike, Folded, Index, Progress
from ..results import SparseWeights
from . import _places
from ._held import Lazy


class Blocks(Lazy):
    """Methods that compute dense weights, a block at a time."""

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> Array:
        if copy is False:
            raise ValueError("the weights are computed: an array of them is always new; wanted copy=None or True")
        return self.dense(dtype=dtype)

    def dense(self, *, dtype: DTypeLike | None = None, out: Array | None = None, progress: Progress = None) -> Array:
        """The whole matrix as an array.

        Parameters
        ----------
        dtype : dtype, optional
            float16, bfloat16, float32 or float64; by default the dtype of `out`, or of the matrix.
        out : array, optional
            Receives the matrix; of its shape and any of these dtypes. It may be a `numpy.memmap`.
        progress : bool or function, optional

        Returns
        -------
        array (..., q_len, kv_len)
        """
        if out is None:
            out = np.empty(self.shape, self.dtype if dtype is None else checks.check_dense_dtype(dtype))
        else:
            checks.check_dense_out(out, dtype, self.shape, self.dtype, self._arrays)
        rows = _places.rows_of_block(self.shape, self.dtype)
        with self._answer(progress, 1 + -(-self.shape[-2] // rows)) as steps:
            self._norm(steps.part())
            for some, block in _places.row_blocks(self, rows):
                with np.errstate(under="ignore", over="ignore"):
                    out[..., some, :] = block
                report = steps.part()
                if report is not None:
                    report(1, 1)
        return out

    def blocks(self, rows: int = 256) -> Iterator[tuple[slice, Array]]:
        """Iterate over the rows in blocks: pairs of a slice of rows and their weights (..., q_heads, rows, kv_len)."""
        rows = integer("rows", rows, 1, 2**62)
        for start in range(0, self.shape[-2], rows):
            some = slice(start, min(start + rows, self.shape[-2]))
            yield some, self[..., some, :]

    def reduce(
            self, function: Callable[[Folded, Array, Index], Folded],
            initial: Folded = None,  # type: ignore[assignment]
            *, rows: int = 256, keys: int = 4096, progress: Progress = None) -> Folded:
        """Fold a function over tiles of the weights: ``state = function(state, tile, index)``.

        Parameters
        ----------
        function : callable
            Receives the state, a tile of one head (2-D) and its index: ``W.dense()[index]`` is the tile.
        initial : object
            The first state.
        rows, keys : int
            The largest number of rows and keys of a tile.
        progress : bool or function, optional

        Returns
        -------
        object
            The last state. Exceptions of the function are passed on.

        Examples
        --------
        >>> from attnc import AttentionWeights
        >>> W = AttentionWeights(np.ones((2, 6, 4)), np.ones((2, 5, 4)))
        >>> W.reduce(lambda largest, tile, index: max(largest, float(tile.max())), 0.0)
        0.2
        """
        state, (rows, keys) = initial, checks.check_tile(rows, keys)
        with self._answer(progress, 1 + _n_tiles(self.shape, rows, keys)) as steps:
            self._norm(steps.part())
            for index in _tiles(self.shape, rows, keys):
                state = function(state, self[index], index)
                report = steps.part()
                if report is not None:
                    report(1, 1)
        return state

    def sparse(
            self, *, threshold: float | None = None, top_p: float | None = None, progress: Progress = None
    ) -> SparseWeights:
        """Only the large weights, and the sum of the dropped weights of each row.

        Parameters
        ----------
        threshold : float, optional
            Keep weights of at least this value.
        top_p : float, optional
            Or keep, in each row, the fewest largest weights whose sum reaches this share of the row's sum.
        progress : bool or function, optional

        Returns
        -------
        SparseWeights
            ``indptr, indices, data`` over all rows in order (CSR) and ``dropped`` (..., q_heads, q_len).

        Examples
        --------
        >>> from attnc import AttentionWeights
        >>> W = AttentionWeights([[1.]], [[0.], [0.], [np.log(2.)]])
        >>> W.sparse(top_p=0.5).data, W.sparse(threshold=0.3).dropped
        (array([0.5]), array([0.5]))
        """
        threshold, top_p = checks.check_sparse(threshold, top_p, self.dtype)
        counts, indices, data = [], [np.empty(0, np.int64)], [np.empty(0, self.dtype)]
        dropped = np.zeros(self.shape[:-1], self.dtype)
        with self._answer(progress, 1 + _n_tiles(self.shape, 256, max(self.shape[-1], 1))) as steps:
            self._norm(steps.part())
            for *lead, rows, _ in _tiles(self.shape, 256, max(self.shape[-1], 1)):
                block = _places.select(self, check_index((*lead, rows), self.shape))
                keep = _kept(block, threshold, top_p)
                counts.append(np.count_nonzero(keep, -1))
                places, flat = np.flatnonzero(keep), block.reshape(-1)
                indices.append(places - np.repeat(np.arange(len(block)) * block.shape[-1], counts[-1]))
                data.append(flat[places])
                flat[places] = 0        # what is left is dropped
                dropped[(*lead, rows)] = flat.reshape(block.shape).sum(-1)
                report = steps.part()
                if report is not None:
                    report(1, 1)
        indptr = np.concatenate([[0], *counts]).cumsum() if self.shape[-1] else np.zeros(dropped.size + 1, np.int64)
        return SparseWeights(indptr, np.concatenate(indices), np.concatenate(data), dropped, self.shape)


def _tiles(shape: tuple[int, ...], rows: int, keys: int) -> Iterator[tuple[Any, ...]]:
    """Indices of tiles of at most rows x keys weights of one head: ints, then two slices."""
    for lead in np.ndindex(shape[:-2]):
        for r in range(0, shape[-2], rows):
            for k in range(0, shape[-1], keys):
                yield *lead, slice(r, min(r + rows, shape[-2])), slice(k, min(k + keys, shape[-1]))


def _n_tiles(shape: tuple[int, ...], rows: int, keys: int) -> int:
    """Number of `_tiles`."""
    return math.prod(shape[:-2]) * -(-shape[-2] // rows) * -(-shape[-1] // keys)


def _kept(weights: np.ndarray, threshold: float | None, top_p: float | None) -> np.ndarray:
    """Which weights a sparse export keeps; never a weight of 0."""
    if top_p is None:
        least = weights.dtype.type(threshold)       # 0 also where it is smaller than what the dtype holds
        return weights >= least if least > 0 else weights > 0
    order = np.argsort(-weights, axis=-1, kind="stable")
    ranked = np.take_along_axis(weights, order, -1).astype(np.float64)
    before = ranked.cumsum(-1) - ranked
    keep = np.empty(weights.shape, bool)
    np.put_along_axis(keep, order, before < top_p * ranked.sum(-1, keepdims=True), -1)
    return keep & (weights > 0)
