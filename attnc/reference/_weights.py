"""Statements about weights, from the dense matrix: the definition of `attnc.AttentionWeights` and `rollout`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Never

import numpy as np

from .. import masks
from .._checks import Args, attention_args, check_lse, options_of
from .._checks import weights as checks
from .._checks.spellings import hides_unknown, unexpected
from .._types import (
    Array,
    ArrayLike,
    BlockMask,
    HeadsReduced,
    Integers,
    Layout,
    Progress,
    Reduced,
    Rows,
    Shape,
    Sign,
    Window,
)
from ..results import TopKeys, WeightsSummary
from ._aggregates import bin_labels, one_head, over_heads, row_counts
from ._chain import run, weights_under
from ._matrix import Matrix
from ._relevance import Relevance, WeightedHeads, mass_of_rows
from ._scores import masked_scores, stored_scores
from ._softmax import softmax_of_scores


class AttentionWeights(Matrix):
    """The weights of attention and their statistics: the definition of `attnc.AttentionWeights`.

    Parameters, methods, results and errors are those of `attnc.AttentionWeights`, but each answer is computed from the
    arrays as they are then. A key counts for a row if the row may see it and its score is not -inf; a row that sees
    none is empty.

    Examples
    --------
    >>> W = AttentionWeights([[1., 0.]], [[1., 0.], [1., 0.]])
    >>> W.dense(), W.key_mass()
    (array([[0.5, 0.5]]), array([0.5, 0.5]))
    """

    @hides_unknown
    def __init__(
            self, query: ArrayLike, key: ArrayLike, *, mask: ArrayLike | None = None,
            block_mask: BlockMask | None = None, key_indices: ArrayLike | None = None,
            key_mask: ArrayLike | None = None, bias: ArrayLike | None = None, relative_bias: ArrayLike | None = None,
            relative_index: ArrayLike | None = None, relative_key: ArrayLike | None = None,
            relative_query: ArrayLike | None = None, causal: bool = False, window: Window | None = None,
            q_offset: ArrayLike | None = None, k_positions: ArrayLike | None = None, scale: float | None = None,
            softcap: float | None = None, alibi_slopes: ArrayLike | None = None, sinks: ArrayLike | None = None,
            q_segments: ArrayLike | None = None, k_segments: ArrayLike | None = None,
            q_lengths: ArrayLike | None = None, kv_lengths: ArrayLike | None = None, layout: Layout = "bhnd",
            lse: ArrayLike | None = None, num_threads: int | None = None, **unknown: Never) -> None:
        if unknown:
            unexpected(AttentionWeights.__init__, unknown)
        self._a = a = attention_args(query, key, None, *options_of(locals()), num_threads=num_threads)
        self._given = None if lse is None else check_lse(lse, a)

    @classmethod
    def of(cls, a: Args) -> AttentionWeights:
        """The weights of checked arguments."""
        weights = object.__new__(cls)
        weights._a, weights._given = a, None
        return weights

    @property
    def shape(self) -> Shape:
        return self._a.weights_shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return self._a.acc

    @property
    def _arrays(self) -> dict[str, np.ndarray]:
        return self._a.arrays

    def _all(self) -> np.ndarray:
        with np.errstate(all="ignore"):
            return run(self._a)["weights"] if self._given is None else weights_under(self._given, self._a)

    @property
    def lse(self) -> Array:
        with np.errstate(all="ignore"):
            return run(self._a)["lse"] if self._given is None else self._given

    def head(self, *index: int) -> AttentionWeights:
        places = checks.check_head(index, self.shape)
        one = self.of(one_head(self._a, places) if places else self._a)
        one._given = None if self._given is None else self._given[places]
        return one

    # Rows

    def _scores(self) -> tuple[np.ndarray, np.floating]:
        """Scores and their unit (`stored_scores`)."""
        with np.errstate(all="ignore"):
            scores, unit = stored_scores(self._a, masks.allowed(self._a))
        return scores.reshape(self.shape), unit

    def _seen(self) -> np.ndarray:
        """Which keys count for which row."""
        seen: np.ndarray = self._scores()[0] != -np.inf
        return seen if self._given is None else seen & (self._given != -np.inf)[..., None]

    def _visible(self) -> np.ndarray:
        """Weights where the row sees the key, else 0: those of a NaN row are NaN only there."""
        return np.where(self._seen(), self.dense(), 0)

    def _rows(self) -> tuple[np.ndarray, np.ndarray]:
        """Which rows are empty, and which are NaN."""
        dense = self.dense()
        empty = np.asarray(~self._seen().any(-1))
        if self._given is not None:
            empty = empty | (self._given == np.inf)
        return empty, np.isnan(dense).any(-1) & ~empty

    def topk(self, k: int, *, progress: Progress = None) -> TopKeys:
        k = checks.check_k(k)
        checks.check_progress(progress)
        empty, nan = self._rows()
        scores = np.where((empty | nan)[..., None], -np.inf, self._scores()[0])
        order = np.argsort(-scores, axis=-1, kind="stable")[..., :k]
        found = np.take_along_axis(scores, order, -1) > -np.inf
        weights = np.where(found, np.take_along_axis(self._visible(), order, -1), 0)
        weights = np.where(nan[..., None], np.nan, weights).astype(self.dtype)
        spare = [(0, 0)] * (self.ndim - 1) + [(0, k - order.shape[-1])]
        weights = np.pad(weights, spare)
        weights[nan] = np.nan
        return TopKeys(weights, np.pad(np.where(found, order, -1), spare, constant_values=-1))

    def entropy(self, *, progress: Progress = None) -> Array:
        checks.check_progress(progress)
        empty, _ = self._rows()
        a, weights = self._a, self._visible()
        allowed = masks.allowed(a)
        with np.errstate(all="ignore"):
            if self._given is None:
                _, _, logs, sink_logs = softmax_of_scores(*stored_scores(a, allowed), allowed, a.sinks)
            else:
                logs, sink_logs = masked_scores(a, allowed) - self._given.reshape(*allowed.shape[:-1], 1), None
            entropy = -np.where(weights == 0, 0, weights * logs.reshape(self.shape)).sum(-1)
            if sink_logs is not None:
                share = np.exp(sink_logs)
                entropy = entropy - np.where(share == 0, 0, share * sink_logs).reshape(entropy.shape)
        return np.where(empty, 0, np.maximum(entropy, 0)).astype(self.dtype)

    def effective_keys(self, *, progress: Progress = None) -> Array:
        return np.exp(self.entropy(progress=progress))

    def max(self, *, progress: Progress = None) -> Array:
        return self.topk(1, progress=progress).weights[..., 0]

    def argmax(self, *, progress: Progress = None) -> Integers:
        return self.topk(1, progress=progress).indices[..., 0]

    def mean_position(self, *, progress: Progress = None) -> Array:
        checks.check_progress(progress)
        empty, _ = self._rows()
        places = self._shaped(masks.key_positions(self._a).astype(self.dtype))
        return np.where(empty, -1, (self._visible() * places).sum(-1)).astype(self.dtype)

    def mean_distance(self, *, progress: Progress = None) -> Array:
        checks.check_progress(progress)
        checks.check_distance(self._a)
        distance = self._shaped(np.abs(masks.key_positions(self._a) - masks.positions(self._a)).astype(self.dtype))
        return np.asarray((self._visible() * distance).sum(-1), self.dtype)

    def _shaped(self, x: np.ndarray) -> np.ndarray:
        """Something of the shape of the scores, with two axes if the weights have."""
        return x.reshape(x.shape[-2:]) if self._a.two_d and x.ndim > 2 else x

    def row_mass(self, *, keys: Rows = None, progress: Progress = None) -> Array:
        checks.check_progress(progress)
        mass = mass_of_rows(self, keys)
        return np.where(self._rows()[1], np.nan, mass).astype(self.dtype)


    def lost_mass(self, keep: ArrayLike, *, progress: Progress = None) -> Array:
        checks.check_progress(progress)
        keep = checks.check_keep(keep, self._a)
        return np.asarray(np.where(keep, 0, self._visible()).sum(-1), self.dtype)

    # Keys

    def _counts(self, rows: Rows, row_weights: ArrayLike | None) -> np.ndarray:
        checks.check_rows(rows, self._a)
        weights = checks.check_row_weights(row_weights, self._a)
        counts = np.ones(1, self.dtype) if rows is None else row_counts(rows, self.shape[-2]).astype(self.dtype)
        return counts if weights is None else counts * weights.astype(self.dtype)

    def key_mass(
            self, *, rows: Rows = None, row_weights: ArrayLike | None = None, heads: HeadsReduced | None = None,
            normalize: bool = False, out: Array | None = None, progress: Progress = None) -> Array:
        checks.check_progress(progress)
        checks.check_heads(heads)
        counts = self._counts(rows, row_weights)[..., None]
        with np.errstate(all="ignore"):
            mass = np.where(counts == 0, 0, self._visible() * counts).sum(-2)
            if normalize:
                seeing = np.where(self._seen(), counts, 0).sum(-2)
                mass = np.where(seeing == 0, 0, mass / seeing)
        mass = over_heads(mass, heads, self._a).astype(self.dtype)
        if out is None:
            return mass
        checks.check_acc_out(out, mass.shape, self._a)
        out += mass
        return out

    def key_max(self, *, rows: Rows = None, progress: Progress = None) -> Array:
        checks.check_progress(progress)
        counts = self._counts(rows, None)[..., None]
        return np.asarray(np.where(counts == 0, 0, self._visible()).max(-2, initial=0), self.dtype)

    def key_hits(self, threshold: float, *, rows: Rows = None, progress: Progress = None) -> Integers:
        checks.check_progress(progress)
        threshold, counts = checks.check_threshold(threshold, self.dtype), self._counts(rows, None)[..., None]
        above = self._seen() & (self._visible() > self.dtype.type(threshold)) & (counts != 0)
        return np.asarray(above.sum(-2), np.int64)

    # Pictures

    def map(self, bins: tuple[int, int], *, reduce: Reduced = "mean", progress: Progress = None) -> Array:
        checks.check_reduce(reduce)
        row_bins, col_bins = checks.check_bins(bins, self._a)
        q_len, kv_len = self.shape[-2:]
        rows, keys = bin_labels(row_bins, q_len), bin_labels(col_bins, kv_len)
        return self._pooled(rows, keys, row_bins, col_bins, reduce, progress)

    def pool(
            self, query_labels: ArrayLike, key_labels: ArrayLike, *, reduce: Reduced = "mean",
            progress: Progress = None) -> Array:
        rows = checks.check_labels("query_labels", query_labels, self.shape[-2])
        keys = checks.check_labels("key_labels", key_labels, self.shape[-1])
        return self._pooled(rows, keys, rows.max(initial=-1) + 1, keys.max(initial=-1) + 1, reduce, progress)

    def head_mean(self, *, out: Array | None = None, progress: Progress = None) -> Array:
        checks.check_progress(progress)
        mean = self.dense() if self._a.two_d else self.dense().mean(-3) if self._a.q_heads else self.dense().sum(-3)
        if out is None:
            return mean
        checks.check_acc_out(out, mean.shape, self._a)[...] = mean
        return out

    def weighted(self, *, heads: ArrayLike) -> WeightedHeads:
        return WeightedHeads(self, checks.check_coefficients(heads, self._a))

    def relevance(self, value: ArrayLike, grad_output: ArrayLike, *, sign: Sign = "positive") -> Relevance:
        return Relevance(self, *checks.check_relevance(value, grad_output, sign, self._a))

    def linear_operator(self) -> Any:
        from scipy.sparse.linalg import aslinearoperator

        checks.check_one_head(self.shape)
        return aslinearoperator(self.dense())

    def summary(
            self, *, topk: int | None = None, entropy: bool = False, effective_keys: bool = False, max: bool = False,
            argmax: bool = False, mean_position: bool = False, mean_distance: bool = False, key_mass: bool = False,
            key_max: bool = False, map: tuple[int, int] | None = None, lse: bool = False,
            progress: Progress = None) -> WeightsSummary:
        checks.check_progress(progress)
        asked = dict(
            entropy=entropy, effective_keys=effective_keys, max=max, argmax=argmax, mean_position=mean_position,
            mean_distance=mean_distance, key_mass=key_mass, key_max=key_max)
        found: dict[str, Any] = {} if topk is None else {"topk": self.topk(topk)}
        found.update({name: getattr(self, name)() for name, wanted in asked.items() if wanted})
        if map is not None:
            found["map"] = self.map(map)
        if lse:
            found["lse"] = self.lse
        return WeightsSummary(**found)

def rollout(
        layers: Sequence[AttentionWeights] | AttentionWeights, start: ArrayLike, *, residual: float = 0.5,
        progress: Progress = None) -> Array:
    """What of `start` came from where, through all layers: the definition of `attnc.rollout`.

    Parameters, result and errors are those of `attnc.rollout`.

    Examples
    --------
    >>> W = AttentionWeights([[0.], [0.]], [[1.], [0.]], causal=True)
    >>> rollout([W, W], 1)
    array([0.4375, 0.5625])
    """
    checks.check_progress(progress)
    layers, amounts, residual = checks.check_layers(layers), None, checks.check_residual(residual)
    amounts = checks.check_start(start, layers)
    for W in reversed(layers):
        column = amounts[..., None] if W.ndim == 2 else amounts[..., None, :, None]
        passed = (W.T @ column)[..., 0]
        passed = passed if W.ndim == 2 else passed.mean(-2)
        amounts = residual * amounts + (1 - residual) * passed
    return amounts
