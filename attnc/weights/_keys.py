"""Statistics of each key, and of bins of rows and keys: reductions over rows whose lse is known."""

from __future__ import annotations

from typing import Any

import numpy as np

from .._checks import Args
from .._checks import weights as checks
from .._types import Array, ArrayLike, HeadsReduced, Integers, Progress, Reduced, Rows
from . import _sweeps
from ._held import Held
from ._sweeps import Bins, Steps


class KeyStatistics(Held):
    """Methods of `AttentionWeights` with a result for each key or bin of keys, over the rows that see the key."""

    def key_mass(
            self, *, rows: Rows = None, row_weights: ArrayLike | None = None,
            heads: HeadsReduced | None = None, normalize: bool = False,
            out: Array | None = None, progress: Progress = None) -> Array:
        """The mass that each key receives: the sum of its weights over the rows.

        Parameters
        ----------
        rows : slice, int array or bool array (q_len,), optional
            The rows that count, by default all; a row that is named twice counts twice.
        row_weights : float array, optional
            A factor for each row; broadcasts to (..., q_heads, q_len).
        heads : {"mean", "sum", "max", "group"}, optional
            The reduction over heads; "group" sums the query heads that share a key head, as a cache holds them.
        normalize : bool
            Divide by the number of rows that may see the key, or the sum of their `row_weights`; 0 if there are none.
        out : array, optional
            Receives the sum of itself and the result: mass over several calls, for evictions from a cache.
        progress : bool or function, optional

        Returns
        -------
        array (..., q_heads, kv_len); without the axis of heads, or with that of the keys, by `heads`

        Examples
        --------
        >>> from attnc import AttentionWeights
        >>> AttentionWeights([[0.], [0.]], [[1.], [0.]], causal=True).key_mass()
        array([1.5, 0.5])
        """
        over, (order, amounts) = checks.check_heads(heads), self._walk(rows, row_weights)
        shape = _mass_shape(self._a, over)
        if out is not None:
            checks.check_acc_out(out, shape, self._a)
        with self._answer(progress, 2) as steps:
            found = self._sweep_keys(steps, order=order, row_weights=amounts,
                                     names=("mass", "visible") if normalize else ("mass",))
        mass = found["mass"]
        if normalize:
            with np.errstate(all="ignore"):
                mass = np.where(found["visible"] == 0, 0, mass / found["visible"])
        mass = over_heads(mass, over, self._a).reshape(shape)
        if out is None:
            return mass
        out += mass
        return out

    def key_max(self, *, rows: Rows = None, progress: Progress = None) -> Array:
        """The largest weight that each key receives from the `rows` (as in `key_mass`): (..., q_heads, kv_len)."""
        order, _ = self._walk(rows, None)
        with self._answer(progress, 2) as steps:
            return self._sweep_keys(steps, order=order, names=("max",))["max"].reshape(self._key_shape)

    def key_hits(self, threshold: float, *, rows: Rows = None, progress: Progress = None) -> Integers:
        """Number of the `rows` whose weight of each key is above `threshold`: int64 (..., q_heads, kv_len)."""
        threshold = checks.check_threshold(threshold, self.dtype)
        order, _ = self._walk(rows, None)
        with self._answer(progress, 2) as steps:
            return self._sweep_keys(steps, order=order, threshold=threshold)["hits"].reshape(self._key_shape)

    def map(
            self, bins: tuple[int, int], *, reduce: Reduced = "mean", progress: Progress = None
    ) -> Array:
        """The weights reduced to a map of bins of rows and keys.

        Parameters
        ----------
        bins : tuple (row_bins, col_bins)
            Numbers of bins, at most q_len and kv_len. Row i is in bin ``i * row_bins // q_len``; likewise keys.
        reduce : {"mean", "max"}
            "mean" takes the mean over a bin's rows of the sum over its keys, so that a row of the map sums to the mean
            of its rows' sums; "max" the largest weight.
        progress : bool or function, optional

        Returns
        -------
        array (..., q_heads, row_bins, col_bins)

        Examples
        --------
        >>> from attnc import AttentionWeights
        >>> AttentionWeights([[0.], [0.]], [[1.], [0.]], causal=True).map((1, 2))
        array([[0.75, 0.25]])
        """
        binned = self._map_bins(bins, checks.check_reduce(reduce))
        with self._answer(progress, 2) as steps:
            return self._shaped_map(self._sweep_keys(steps, bins=binned)["map"])

    def pool(
            self, query_labels: ArrayLike, key_labels: ArrayLike, *, reduce: Reduced = "mean",
            progress: Progress = None) -> Array:
        """A map over given groups, for example from sub-words to words or from patches to regions.

        Parameters
        ----------
        query_labels, key_labels : int array (q_len,) and (kv_len,)
            The group of each row and key, from 0; a negative label excludes the row or key.
        reduce : {"mean", "max"}
            As in `map`. A group without members gives 0.
        progress : bool or function, optional

        Returns
        -------
        array (..., q_heads, query groups, key groups)

        Examples
        --------
        >>> from attnc import AttentionWeights
        >>> AttentionWeights([[0.], [0.]], [[1.], [0.]], causal=True).pool([0, 0], [0, 0])
        array([[1.]])
        """
        rows = checks.check_labels("query_labels", query_labels, self._a.q_len)
        keys = checks.check_labels("key_labels", key_labels, self._a.kv_len)
        largest = checks.check_reduce(reduce) == "max"
        bins = Bins(rows, keys, int(rows.max(initial=-1)) + 1, int(keys.max(initial=-1)) + 1, largest)
        with self._answer(progress, 2) as steps:
            return self._shaped_map(self._sweep_keys(steps, bins=bins)["map"])

    def _walk(self, rows: Rows, row_weights: ArrayLike | None) -> tuple[np.ndarray | None, np.ndarray | None]:
        """The rows that count (None: all), and their factors, contiguous (batch..., q_heads, q_len) (None: 1)."""
        counts, weights = checks.check_rows(rows, self._a), checks.check_row_weights(row_weights, self._a)
        if counts is not None and counts.max(initial=0) > 1:
            weights = (1 if weights is None else weights) * counts.astype(self.dtype)
        if weights is not None:
            weights = np.ascontiguousarray(np.broadcast_to(weights, (*self._a.batch, self._a.q_heads, self._a.q_len)))
        return None if counts is None else np.flatnonzero(counts), weights

    @property
    def _key_shape(self) -> tuple[int, ...]:
        return *self.shape[:-2], self.shape[-1]

    def _map_bins(self, bins: tuple[int, int], reduce: str) -> Bins:
        row_bins, key_bins = checks.check_bins(bins, self._a)
        np.empty((*self.shape[:-2], row_bins, key_bins), self._a.acc)       # raises MemoryError before any work
        return Bins(bin_labels(row_bins, self._a.q_len), bin_labels(key_bins, self._a.kv_len), row_bins,
                    key_bins, reduce == "max")

    def _shaped_map(self, found: Array) -> np.ndarray:
        return found.reshape(*self.shape[:-2], *found.shape[-2:])

    def _sweep_keys(self, steps: Steps, **wanted: Any) -> dict[str, np.ndarray]:
        norm = self._norm(steps.part())
        return _sweeps.keys(self._a, norm, self._given, steps.part(), **wanted)


def over_heads(x: Array, heads: str | None, a: Args) -> Array:
    """x (..., q_heads, n) reduced over its heads, or over those that share a key head."""
    if heads is None or a.two_d:
        return x
    if heads == "group":
        x, heads = x.reshape(*x.shape[:-2], a.kv_heads, a.heads_per_kv, x.shape[-1]), "sum"
    if heads == "max":
        found: Array = x.max(-2, initial=0)
        return found
    with np.errstate(under="ignore"):
        found = x.sum(-2)
        return found / max(a.q_heads, 1) if heads == "mean" else found


def _mass_shape(a: Args, heads: str | None) -> tuple[int, ...]:
    """Shape of a statistic of keys after `over_heads`."""
    if a.two_d:
        return (a.kv_len,)
    left = {None: (a.q_heads,), "group": (a.kv_heads,)}.get(heads, ())
    return *a.batch, *left, a.kv_len


def bin_labels(bins: int, length: int) -> np.ndarray:
    """The bin of each index i: floor(i * bins / length)."""
    return np.arange(length, dtype=np.int64) * bins // max(length, 1)
