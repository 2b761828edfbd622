"""The lazy object of attention weights: its arguments, dense weights, and several statistics in one call."""

from __future__ import annotations

from typing import Any, Never, Self

import numpy as np

from .._checks import Args, attention_args, check_lse
from .._checks import weights as checks
from .._checks.spellings import hides_unknown, unexpected
from .._slices import one_head
from .._types import Array, ArrayLike, BlockMask, DTypeLike, Layout, Progress, Sign, Window
from ..results import WeightsSummary
from . import _operands, _products, _sweeps
from ._blocks import Blocks
from ._heads import Heads
from ._keys import KeyStatistics
from ._relevance import Relevance
from ._rows import RowStatistics

ALL = slice(None)
# Every option that decides which keys a row may see.
_WHERE = ("mask", "block_mask", "key_indices", "key_mask", "bias", "relative_bias", "causal", "window", "q_offset",
          "k_positions", "q_segments", "k_segments", "q_lengths", "kv_lengths")
_FORBIDS = ("mask", "block_mask", "key_indices", "key_mask", "bias", "relative_bias", "causal", "window", "q_segments",
            "q_lengths", "kv_lengths")


class AttentionWeights(RowStatistics, KeyStatistics, Heads, Blocks):
    """The weights of attention without their matrix: any part of it, and exact statistics of all of it.

    It holds query, key and options, and computes on demand, with the tiles of `attention`; a thread needs memory for a
    few blocks of keys. The lse of the rows is computed once, when first needed. Results have equal bits for any number
    of threads. ``W[index]`` accepts every index that NumPy accepts and equals ``W.dense()[index]`` bit for bit.

    Parameters
    ----------
    query : array (..., q_heads, q_len, head_dim) or (q_len, head_dim)
    key : array (..., kv_heads, kv_len, head_dim) or (kv_len, head_dim)
        Both are held, not copied, like options that are arrays: their values must not change after the first result;
        see the notes.
    mask, block_mask, key_indices, key_mask, bias, relative_bias, relative_index, relative_key, relative_query, \
causal, window, q_offset, k_positions, scale, softcap, alibi_slopes, sinks, q_segments, k_segments, q_lengths, \
kv_lengths, layout, num_threads
        As in `attention`.
    lse : float array (..., q_heads, q_len) or (q_len,), optional
        As in `attention_weights`: the lse of each row over more keys than these, its sink included.

    Raises
    ------
    TypeError, ValueError
        For a wrong dtype or a wrong shape or value, naming the argument.
    RuntimeError
        From each method, naming the array, if an array that the weights hold has changed since the first result, or
        since the `lse` was given.

    Notes
    -----
    The first result takes a fingerprint of each array that the weights hold; every method compares it before and after
    its work, so that no result mixes two states. A fingerprint has up to 4,096 elements: all of a smaller array, and of
    a larger one at least one for each index of each axis up to 4,096 long. It detects every change of a small array,
    and in a large one a change of a whole head, a whole token or the whole array; it may miss a change of fewer
    elements, or of single tokens among more than 4,096. Arrays that the constructor converts are copies, which never
    change.

    Results are in the accumulation dtype: float64 if an input is float64, else float32. A key counts for a row if the
    row may see it and its score is not -inf; the contents of other keys change no bit, and a NaN row makes only the
    keys that it sees NaN. `attnc.reference.AttentionWeights` is the definition in plain NumPy.

    Examples
    --------
    >>> W = AttentionWeights([[1., 0.], [0., 0.]], [[np.log(3.), 0.], [0., 0.]], scale=1.0)
    >>> W
    AttentionWeights(shape=(2, 2), dtype=float64)
    >>> W[0], W.argmax(), W.key_mass()
    (array([0.75, 0.25]), array([0, 0]), array([1.25, 0.75]))
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
        a = attention_args(  # by position, as attention does
            query, key, None, mask, block_mask, key_indices, key_mask, bias, relative_bias, relative_index,
            relative_key, relative_query, causal, window, q_offset, k_positions, scale, softcap, alibi_slopes, sinks,
            q_segments, k_segments, q_lengths, kv_lengths, layout, (), None, num_threads)
        self._begin(a, lse)

    @classmethod
    def _of(cls, a: Args, lse: ArrayLike | None) -> Self:
        """The weights of checked arguments."""
        weights = object.__new__(cls)
        weights._begin(a, lse)
        return weights

    def _begin(self, a: Args, lse: ArrayLike | None) -> None:
        _operands.own_views(a)
        self._hold(a, None if lse is None else _read_only(check_lse(lse, a)))

    def __getstate__(self) -> tuple[Args, Array | None]:
        """State of copies and pickles, which compute their own lse."""
        if "_operands" in vars(self):
            self._check_operands()
        return self._a, self._given

    def __setstate__(self, state: tuple[Args, Array | None]) -> None:
        self._hold(*state)

    @property
    def lse(self) -> Array:
        """The lse of each row (..., q_heads, q_len), sinks included; computed once and read-only."""
        with self._answer():
            return self._lse()

    @property
    def T(self) -> _products.Transposed:
        """The transpose, for ``W.T @ X``: an array (q_len,) or (..., q_len, columns) gives sums over the rows.

        They are in the dtype of the weights; ``W @ X`` is in the promoted dtype of the weights and `X`.

        Examples
        --------
        >>> AttentionWeights(np.ones((5, 8)), np.ones((6, 8))).T
        Transposed(shape=(6, 5), dtype=float64)
        """
        return _products.Transposed(self)

    def __matmul__(self, x: ArrayLike) -> Array:
        return self._product(x, False)

    def _product(self, x: ArrayLike, transposed: bool) -> Array:
        with self._answer():
            return (_products.transposed_times if transposed else _products.times)(self, x)

    def _repr_html_(self) -> str:
        from .._views import notebook

        return notebook.page(self)

    def _repr_png_(self) -> bytes | None:
        from .._views import notebook

        return notebook.png(self)

    def head(self, *index: int) -> Self:
        """The weights of one head, with two axes: an int for each axis before the rows.

        Examples
        --------
        >>> AttentionWeights(np.ones((4, 5, 8)), np.ones((2, 6, 8))).head(3)
        AttentionWeights(shape=(5, 6), dtype=float64)
        """
        places = checks.check_head(index, self.shape)
        one = object.__new__(type(self))
        given = None if self._given is None else self._given[places]
        one._hold(one_head(self._a, places) if places else self._a, given)
        if "_operands" in vars(self):
            one._check_operands()
            self._check_operands()       # last: so the head took its fingerprint of unchanged arrays
        if self._known is not None:
            norm, lse = self._known
            one._known = (norm[places][None] if places else norm), lse[places]
        return one

    def relevance(self, value: ArrayLike, grad_output: ArrayLike, *, sign: Sign = "positive") -> Relevance:
        """Each weight times the gradient that reaches it, ``w * max(0, grad_output @ value.T)``, without the matrix.

        How much each weight matters for an output, after Chefer, Gur and Wolf 2021: an object with `map`, `pool`,
        `key_mass`, `row_mass`, products ``R @ X`` and ``R.T @ X``, and dense parts, none of which builds the matrix.

        Parameters
        ----------
        value : array (..., kv_heads, kv_len, value_dim) or (kv_len, value_dim)
            In the layout of query and key; held like them, not copied.
        grad_output : array of the shape of the output
            Gradient of the explained quantity with respect to the output of this attention.
        sign : {"positive", "both"}
            "both" keeps negative relevance.

        Returns
        -------
        Relevance
            Of the shape and dtype of the weights, or float64 if an array is float64. 0 where the weight is 0.

        Raises
        ------
        TypeError, ValueError
            For a wrong dtype or a wrong shape or value, naming the argument.

        Examples
        --------
        >>> W = AttentionWeights([[0.]], [[0.], [0.]])
        >>> R = W.relevance([[1.], [-3.]], [[2.]])
        >>> R.dense(), R.key_mass(), R @ [[1., 2.], [3., 4.]], W.relevance([[1.], [-3.]], [[2.]], sign="both")[0]
        (array([[1., 0.]]), array([1., 0.]), array([[1., 2.]]), array([ 1., -3.]))
        """
        return Relevance.of(self, *checks.check_relevance(value, grad_output, sign, self._a))

    def linear_operator(self) -> Any:
        """One head as a `scipy.sparse.linalg.LinearOperator`, for example for ``svds``; see `head`."""
        return _products.linear_operator(self)

    # Dense parts

    def dense(self, *, dtype: DTypeLike | None = None, out: Array | None = None, progress: Progress = None) -> Array:
        """All weights as an array.

        Parameters
        ----------
        dtype : dtype, optional
            float16, bfloat16, float32 or float64; by default that of `out` or the weights.
        out : array, optional
            Receives the weights; of their shape and any of these dtypes. It may be a `numpy.memmap`.
        progress : bool or function, optional

        Returns
        -------
        array (..., q_heads, q_len, kv_len) or (q_len, kv_len)
        """
        if out is None:
            out = np.empty(self.shape, self.dtype if dtype is None else checks.check_dense_dtype(dtype))
        else:
            checks.check_dense_out(out, dtype, self.shape, self.dtype, self._arrays)
        with self._answer(progress, 2) as steps:
            norm = self._norm(steps.part())
            if out.size:
                _sweeps.places(self._a, norm, self._given, out[None] if self._a.two_d else out, steps.part())
        return out

    def summary(
            self, *, topk: int | None = None, entropy: bool = False, effective_keys: bool = False, max: bool = False,
            argmax: bool = False, mean_position: bool = False, mean_distance: bool = False, key_mass: bool = False,
            key_max: bool = False, map: tuple[int, int] | None = None, lse: bool = False, progress: Progress = None
    ) -> WeightsSummary:
        """Several statistics in one sweep over the rows and one over the keys.

        Parameters
        ----------
        topk : int, optional
            The k of `topk`.
        map : tuple (row_bins, col_bins), optional
            The bins of `map`.
        entropy, effective_keys, max, argmax, mean_position, mean_distance, key_mass, key_max, lse : bool
            Whether to compute each, with the defaults of its method.
        progress : bool or function, optional

        Returns
        -------
        WeightsSummary
            Has an attribute for each requested statistic, equal to the result of the method of that name.

        Examples
        --------
        >>> AttentionWeights(np.ones((3, 4)), np.ones((5, 4))).summary(topk=2, entropy=True, map=(1, 2))
        WeightsSummary(topk (3, 2) float64, entropy (3,) float64, map (1, 2) float64)
        """
        asked = dict(
            entropy=entropy or effective_keys, max=max, mean_position=mean_position, mean_distance=mean_distance)
        rows = tuple(name for name, wanted in asked.items() if wanted)
        k = checks.check_k(topk) if topk is not None else 1 if argmax else None
        keys = tuple(name for name, wanted in (("mass", key_mass), ("max", key_max)) if wanted)
        bins = None if map is None else self._map_bins(map, "mean")
        found = {}
        with self._answer(progress, 2) as steps:
            report = steps.part()
            if rows or k is not None:
                found.update(self._sweep_rows(rows, k, report))
            if keys or bins is not None:
                sums = _sweeps.keys(self._a, self._norm(report), self._given, steps.part(), names=keys, bins=bins)
                found.update({f"key_{name}": sums[name].reshape(self._key_shape) for name in keys})
                found["map"] = self._shaped_map(sums["map"]) if bins is not None else None
            if lse:
                found["lse"] = self._lse().copy()
        if argmax:
            found["argmax"] = found["topk"].indices[..., 0].copy()
        if effective_keys:
            found["effective_keys"] = np.exp(found["entropy"])
        asked = dict(topk=topk is not None, entropy=entropy, effective_keys=effective_keys, max=max, argmax=argmax,
                     mean_position=mean_position, mean_distance=mean_distance, key_mass=key_mass, key_max=key_max,
                     map=map is not None, lse=lse)
        return WeightsSummary(**{name: found[name] for name, wanted in asked.items() if wanted})

    def _even(self) -> AttentionWeights | None:
        """Weights with the same visible keys but equal scores, so that none rounds to 0; None if rows see all keys."""
        a = self._a
        if all(getattr(a, name) is None or getattr(a, name) is False for name in _FORBIDS):
            return None
        query, key = (np.zeros((*array.shape[:-1], 1), np.float32) for array in (a.query, a.key))
        where = {name: getattr(a, name) for name in _WHERE}
        if a.relative_bias is not None:     # its first column and first row hold every distance
            where["relative_bias"] = np.concatenate([a.relative_bias[..., ::-1, 0], a.relative_bias[..., 0, 1:]], -1)
        del where["block_mask"]             # its first block may begin before row 0 and key 0
        even = AttentionWeights(query, key, **where)
        even._a.block_mask, even._a.block_sizes = a.block_mask, a.block_sizes
        return even


def _read_only(x: Array) -> Array:
    view = x.view()
    view.flags.writeable = False
    return view
