"""Products of weights and arrays without the matrix, and attention rollout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from .. import _call
from .._checks import Args
from .._checks import weights as checks
from .._slices import part
from .._types import Array, ArrayLike, Progress
from . import _sweeps
from ._sweeps import COLUMNS, Steps

if TYPE_CHECKING:
    from ._held import Held
    from ._weights import AttentionWeights


def times(W: Held, x: ArrayLike, steps: Steps | None = None) -> np.ndarray:
    """``W @ x``: attention with `x` as the values."""
    a = W._a
    given = checks.check_operand(x, a, False)
    columns = given[:, None] if given.ndim == 1 else given
    dtype = np.promote_types(W.dtype, np.float32 if columns.dtype.itemsize == 2 else columns.dtype)
    columns = columns.astype(dtype, copy=False)
    out = np.empty((*a.batch, a.q_heads, a.q_len, columns.shape[-1]), dtype)
    columns = np.broadcast_to(columns, (*a.batch, a.q_heads, *columns.shape[-2:]))
    heads_per_kv = a.heads_per_kv
    for member in range(heads_per_kv):
        some = members(a, member) if heads_per_kv > 1 else part(a)
        some.value_dim = columns.shape[-1]
        some.dtype, some.acc = dtype, dtype
        some.sinks = None if some.sinks is None else some.sinks.astype(dtype)
        some.alibi_slopes = None if some.alibi_slopes is None else some.alibi_slopes.astype(dtype)
        its = out[..., member::heads_per_kv, :, :]
        norm = None if W._given is None else np.empty((*a.batch, some.q_heads, a.q_len, 2))
        request = None if norm is None else _call.RowRequest(norm=norm)
        unit = _call.run("attend", some, request, None if steps is None else steps.part(),
                         value=columns[..., member::heads_per_kv, :, :], out=its).unit
        if norm is not None and W._given is not None:
            _rescale(its, norm, unit, W._given.reshape(*a.batch, a.q_heads, -1)[..., member::heads_per_kv, :])
    shape = (*W.shape[:-1], columns.shape[-1])
    return out.reshape(shape)[..., 0] if given.ndim == 1 else out.reshape(shape)


def members(a: Args, member: int) -> Args:
    """Arguments with one query head per key head: the query heads of that index in their groups."""
    some = part(a)
    every = slice(member, None, a.heads_per_kv)
    some.query, some.q_heads = a.query[..., every, :, :], a.kv_heads
    for name, axis in (("mask", -3), ("block_mask", -3), ("bias", -3), ("relative_bias", -3), ("relative_key", -3),
                       ("relative_query", -3), ("alibi_slopes", -1), ("sinks", -1)):
        x = getattr(a, name)
        if x is not None and x.ndim >= -axis and x.shape[axis] > 1:
            setattr(some, name, x[(..., every, *[slice(None)] * (-axis - 1))])
    lists = a.key_indices
    if lists is not None and lists.shape[-3] == a.q_heads != a.kv_heads:
        some.key_indices = lists[..., every, :, :]
    return some


def _rescale(out: np.ndarray, norm: np.ndarray, unit: float, given: np.ndarray) -> None:
    """Rescale products of normalized weights to those under a given lse, in place."""
    with np.errstate(all="ignore"):
        nothing = is_empty(norm) | (given == -np.inf)
        factor = np.where(nothing, 0, np.exp(norm[..., 0] * unit - given.astype(np.float64)) / norm[..., 1])
        out *= factor[..., None].astype(out.dtype)
        out[factor == 0] = 0


def is_empty(norm: np.ndarray) -> np.ndarray:
    """Which rows saw no key. Rows whose scores are all NaN also have the maximum -inf, but their sum is NaN."""
    nothing: np.ndarray = (norm[..., 0] == -np.inf) & ~np.isnan(norm[..., 1])
    return nothing


class Factor(Protocol):
    """A matrix that `Transposed` accepts."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> np.dtype[Any]: ...

    def _product(self, x: ArrayLike, transposed: bool) -> Array: ...


class Transposed:
    """The transpose of weights: ``W.T @ X`` sums over the rows; a weight of 0 adds nothing."""

    def __init__(self, weights: Factor):
        self.T = weights

    @property
    def shape(self) -> tuple[int, ...]:
        """(..., kv_len, q_len)."""
        return *self.T.shape[:-2], self.T.shape[-1], self.T.shape[-2]

    @property
    def dtype(self) -> np.dtype[Any]:
        """That of the weights."""
        return self.T.dtype

    def __repr__(self) -> str:
        return f"{type(self).__name__}(shape={self.shape}, dtype={self.dtype.name})"

    def __matmul__(self, x: ArrayLike) -> Array:
        return self.T._product(x, True)


def transposed_times(W: Held, x: ArrayLike) -> np.ndarray:
    """``W.T @ x``."""
    a = W._a
    given = checks.check_operand(x, a, True)
    columns = given[:, None] if given.ndim == 1 else given
    lead = (*a.batch, a.q_heads)
    columns = np.broadcast_to(columns, (*lead, *columns.shape[-2:]))
    out = np.zeros((*lead, a.kv_len, columns.shape[-1]), W.dtype)
    norm = W._norm(None)
    for first in range(0, columns.shape[-1], COLUMNS):
        factors = np.ascontiguousarray(columns[..., first:first + COLUMNS], W.dtype)
        out[..., first:first + COLUMNS] = _sweeps.keys(a, norm, W._given, None, factors=factors)["products"]
    out = out.reshape(*W.shape[:-2], a.kv_len, out.shape[-1])
    return out[..., 0] if given.ndim == 1 else out


def linear_operator(W: AttentionWeights) -> Any:
    """The weights of one head as a SciPy LinearOperator."""
    from scipy.sparse.linalg import LinearOperator

    checks.check_one_head(W.shape)
    return LinearOperator(W.shape, matvec=lambda x: W @ np.ravel(x), rmatvec=lambda x: W.T @ np.ravel(x),
                          matmat=lambda x: W @ x, rmatmat=lambda x: W.T @ x, dtype=W.dtype)


def rollout(
        layers: Sequence[AttentionWeights], start: ArrayLike, *, residual: float = 0.5, progress: Progress = None
) -> Array:
    """Attention rollout (Abnar and Zuidema 2020): the share of each input token in `start`, without a matrix.

    A layer has the matrix ``A = residual * identity + (1 - residual) * mean over heads of W``; from the last layer to
    the first, ``start`` becomes ``A.T @ start``.

    Parameters
    ----------
    layers : sequence of AttentionWeights
        Layers from first to last; q_len and kv_len are equal, and the same in all layers.
    start : int or float array (batch..., length)
        The index of a token of the last layer, or an amount for each token.
    residual : float
        The share of the residual connection, from 0 to 1.
    progress : bool or function, optional
        As for `AttentionWeights.topk`; a function is called after each layer.

    Returns
    -------
    array (batch..., length)
        The share of each input token in `start`.

    Raises
    ------
    TypeError, ValueError
        For layers that are not weights, lengths that differ, or a wrong start or residual.

    Examples
    --------
    >>> from attnc import AttentionWeights
    >>> W = AttentionWeights([[0.], [0.]], [[1.], [0.]], causal=True)
    >>> rollout([W, W], 1)
    array([0.4375, 0.5625])
    """
    layers, residual = checks.check_layers(layers), checks.check_residual(residual)
    amounts = checks.check_start(start, layers)
    with Steps(progress, len(layers)) as steps:
        for W in reversed(layers):
            column = amounts[..., None] if W.ndim == 2 else amounts[..., None, :, None]
            passed = (W.T @ column)[..., 0]
            amounts = residual * amounts + (1 - residual) * (passed if W.ndim == 2 else passed.mean(-2))
            report = steps.part()
            if report is not None:
                report(1, 1)
    return amounts
