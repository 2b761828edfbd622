"""Exact statistics of attention weights on dask arrays; each block of keys uses the lse over all keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import dask
import dask.array as da
import numpy as np

import attnc

from ..._checks.weights import check_bins, check_k
from ...results import TopKeys
from ._attention import assembled, states
from ._grid import Grid, args_of

if TYPE_CHECKING:
    from ._grid import Block


class AttentionWeights:
    """The weights of `attnc.integrations.dask.attention` as an object; only `dense` builds the matrix.

    Parameters
    ----------
    query, key : dask arrays
    **options
        Options of `attnc.integrations.dask.attention`.

    Attributes
    ----------
    shape : tuple (batch..., q_heads, q_len, kv_len), or (q_len, kv_len) for 2-D inputs
        Results for 2-D inputs have no axes of batch and heads either.
    dtype : dtype
        The accumulation dtype, float32 or float64, which all results have.
    lse : dask array (batch..., q_heads, q_len)

    Examples
    --------
    >>> import dask.array as da
    >>> x = da.ones((1, 1, 8, 4), chunks=(1, 1, 4, 4), dtype="float32")
    >>> W = AttentionWeights(x, x)
    >>> W
    AttentionWeights(shape=(1, 1, 8, 8), dtype=float32, chunksize=(1, 1, 4, 4))
    >>> W.key_mass().compute(scheduler="sync")
    array([[[1., 1., 1., 1., 1., 1., 1., 1.]]], dtype=float32)
    """

    def __init__(self, query: da.Array, key: da.Array, **options: Any):
        self._grid = Grid(query, key, None, options)
        a = self._grid.args
        self.shape = a.weights_shape
        self.dtype = a.acc
        self._lse = states(self._grid)[1]
        self.lse = self._shown(self._lse)
        self._grid.options.pop("sinks", None)       # the lse includes them

    def __repr__(self) -> str:
        grid = self._grid
        blocks = [*grid.batch, grid.heads, grid.rows, grid.keys]
        sizes = [max((block.size for block in axis), default=0) for axis in blocks]
        sizes[-3] *= grid.args.heads_per_kv
        chunks = tuple(sizes[-2:] if grid.args.two_d else sizes)
        return f"{type(self).__name__}(shape={self.shape}, dtype={self.dtype.name}, chunksize={chunks})"

    def dense(self) -> da.Array:
        """The dense weights, (batch..., q_heads, q_len, kv_len), with a chunk for each pair of blocks."""
        return self._shown(self._pairs(_dense, lambda rows, keys: (rows.size, keys.size)))

    def topk(self, k: int) -> TopKeys:
        """The k largest weights of each row and their keys, as `attnc.AttentionWeights.topk`: (..., q_len, k) each."""
        a, k = self._grid.args, check_k(k)
        weights, indices = {}, {}
        for place, shape, batch, head, rows in self._grid.row_blocks():
            parts = [self._delayed(_topk, batch, head, rows, keys, k, keys.start)
                     for keys in self._grid.seen(batch, head, rows)]
            best = dask.delayed(_best)(parts, k, (*shape, rows.size), a.acc)
            weights[*place, 0] = da.from_delayed(best[0], (*shape, rows.size, k), a.acc)
            indices[*place, 0] = da.from_delayed(best[1], (*shape, rows.size, k), np.int64)
        return TopKeys(self._shown(assembled(weights)), self._shown(assembled(indices)))

    def key_mass(self) -> da.Array:
        """The sum over all rows of the weight of each key, (batch..., q_heads, kv_len)."""
        masses = self._pairs(_key_mass, lambda rows, keys: (1, keys.size))
        return self._shown(masses.sum(-2, dtype=np.float64).astype(self.dtype))

    def map(self, bins: tuple[int, int]) -> da.Array:
        """The weights reduced to `bins`, as `attnc.AttentionWeights.map`: (batch..., q_heads, row_bins, col_bins)."""
        bins = check_bins(bins, self._grid.args)
        sums = self._pairs(_map, lambda rows, keys: (bins[0], bins[1]), bins, self.shape)
        lead = sums.shape[:-2]
        sums = sums.reshape(*lead, -1, bins[0], sums.shape[-1] // bins[1], bins[1]).sum((-2, -4), dtype=np.float64)
        rows = np.bincount(np.arange(self.shape[-2]) * bins[0] // self.shape[-2], minlength=bins[0])
        return self._shown((sums / rows[:, None]).astype(self.dtype))

    def _shown(self, result: da.Array) -> da.Array:
        return result[0] if self._grid.args.two_d else result

    def _delayed(self, function: Callable[..., Any], batch: Sequence[Block], head: Block, rows: Block, keys: Block,
                 *more: Any) -> Any:
        """A task on the weights of a pair of blocks."""
        lse = self._grid.cut(self._lse[..., None], batch, self._grid.q_heads(head), rows)[..., 0]
        query, key, _ = self._grid.inputs(batch, head, rows, keys)
        options = self._grid.part(batch, head, rows, keys)
        return dask.delayed(_under)(function, query, key, lse, options, (rows.start, keys.start), more)

    def _pairs(self, function: Callable[..., Any], shape: Callable[[Block, Block], tuple[int, int]],
               *more: Any) -> da.Array:
        """A block of results for each pair of blocks; zeros where no row may see a key."""
        found = {}
        for place, sizes, batch, head, rows in self._grid.row_blocks():
            seen = {keys.number for keys in self._grid.seen(batch, head, rows)}
            for keys in self._grid.keys:
                whole = (*sizes, *shape(rows, keys))
                if keys.number in seen:
                    task = self._delayed(function, batch, head, rows, keys, *more)
                    found[*place, keys.number] = da.from_delayed(task, whole, self.dtype)
                else:
                    found[*place, keys.number] = da.zeros(whole, dtype=self.dtype, chunks=whole)
        return assembled(found)


def _under(function: Callable[..., Any], query: np.ndarray, key: np.ndarray, lse: np.ndarray, options: dict[str, Any],
           start: tuple[int, int], more: tuple[Any, ...]) -> Any:
    """Call the function with the weights of a block of keys under the lse of all keys."""
    return function(attnc.AttentionWeights._of(args_of(query, key, None, options, ()), lse), start, *more)


def _dense(weights: attnc.AttentionWeights, start: tuple[int, int]) -> np.ndarray:
    return weights.dense()


def _key_mass(weights: attnc.AttentionWeights, start: tuple[int, int]) -> np.ndarray:
    return weights.key_mass()[..., None, :]


def _topk(weights: attnc.AttentionWeights, start: tuple[int, int], k: int,
          first: int) -> tuple[np.ndarray, np.ndarray]:
    found = weights.topk(min(k, weights.shape[-1]))
    return found.weights, np.where(found.indices < 0, -1, found.indices + first)


def _best(parts: list[tuple[np.ndarray, np.ndarray]], k: int, lead: tuple[int, ...],
          dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """The k best results of all blocks of keys: by weight, ties to the smaller index, missing ones last."""
    weights = np.concatenate([np.zeros((*lead, k), dtype), *(part[0] for part in parts)], -1)
    indices = np.concatenate([np.full((*lead, k), -1), *(part[1] for part in parts)], -1)
    order = np.lexsort((indices, np.where(indices < 0, np.inf, -weights)), axis=-1)[..., :k]
    wrong = np.isnan(weights).any(-1, keepdims=True)
    return np.where(wrong, np.nan, np.take_along_axis(weights, order, -1)), np.take_along_axis(indices, order, -1)


def _map(weights: attnc.AttentionWeights, start: tuple[int, int], bins: tuple[int, int],
         shape: tuple[int, ...]) -> np.ndarray:
    """Sums over this block's part of each bin."""
    labels = [np.arange(first, first + length) * count // whole for first, length, count, whole in zip(
        start, weights.shape[-2:], bins, shape[-2:], strict=True)]
    lows = [label[0] for label in labels]
    pooled = weights.pool(*(label - low for label, low in zip(labels, lows, strict=True)))
    rows = np.bincount(labels[0] - lows[0])
    out = np.zeros((*weights.shape[:-2], *bins), pooled.dtype)
    out[..., lows[0]:labels[0][-1] + 1, lows[1]:labels[1][-1] + 1] = pooled * rows[:, None]
    return out
