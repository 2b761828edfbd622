"""The objects that carry more than one result."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np


def _shown(arrays: Mapping[str, Any]) -> str:
    """Name, shape and dtype of arrays, of torch's tensors too; of lists their length."""
    return ", ".join(
        f"{name} [{len(x)} arrays]" if isinstance(x, list)
        else f"{name} {tuple(x.shape)} {str(x.dtype).removeprefix('torch.')}" for name, x in arrays.items())


class AttentionResult:
    """The output of attention and, as attributes, what ``want=`` asked for.

    It unpacks into the output and what was asked for, in the order of ``want=``.

    Parameters
    ----------
    output : ndarray
        What attention returns without ``want=``.
    **wanted : ndarray
        One array for each name in ``want=``, such as ``lse`` or ``weights``.

    Examples
    --------
    >>> AttentionResult(np.zeros((2, 8)), lse=np.zeros(2))
    AttentionResult(output (2, 8) float64, lse (2,) float64)
    >>> from attnc import attention
    >>> output, lse = attention(np.zeros((2, 8)), np.zeros((3, 8)), np.ones((3, 4)), want="lse")
    >>> output.shape, lse
    ((2, 4), array([1.09861229, 1.09861229]))
    """

    output: np.ndarray
    lse: np.ndarray
    weights: np.ndarray
    scores: np.ndarray
    entropy: np.ndarray
    max: np.ndarray
    argmax: np.ndarray

    def __init__(self, output: np.ndarray, **wanted: np.ndarray) -> None:
        self.output = output
        self.__dict__.update(wanted)

    def __iter__(self) -> Iterator[np.ndarray]:
        return iter(vars(self).values())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({_shown(vars(self))})"


class TopKeys(NamedTuple):
    """The largest weights of each row and their keys: arrays (..., q_len, k), from the largest down.

    Examples
    --------
    >>> from attnc import AttentionWeights
    >>> top = AttentionWeights(np.zeros((1, 2)), np.zeros((4, 2))).topk(2)
    >>> top
    TopKeys(weights (1, 2) float64, indices (1, 2) int64)
    >>> weights, indices = top
    >>> weights, indices
    (array([[0.25, 0.25]]), array([[0, 1]]))
    """

    weights: np.ndarray
    indices: np.ndarray

    def __repr__(self) -> str:
        return f"{type(self).__name__}({_shown(self._asdict())})"


class WeightsSummary:
    """What `AttentionWeights.summary` was asked for, one attribute each.

    Examples
    --------
    >>> WeightsSummary(entropy=np.zeros((2, 8)))
    WeightsSummary(entropy (2, 8) float64)
    """

    def __init__(self, **found: np.ndarray | TopKeys) -> None:
        self.__dict__.update(found)

    def __repr__(self) -> str:
        arrays = {name: x.weights if isinstance(x, TopKeys) else x for name, x in vars(self).items()}
        return f"{type(self).__name__}({_shown(arrays)})"


class SparseWeights:
    """The weights that were kept, row after row (CSR), and what each row lost.

    Parameters
    ----------
    indptr : int64 array (rows + 1,)
        Where each row begins in `indices` and `data`; rows are all of (..., heads, q_len) in this order.
    indices : int64 array
        The keys that were kept, ascending in each row.
    data : array
        Their weights.
    dropped : array (..., heads, q_len)
        The sum of the other weights of each row, sinks not counted.
    shape : tuple
        That of the weights, (..., heads, q_len, kv_len).

    Examples
    --------
    >>> SparseWeights(np.array([0, 1]), np.array([2]), np.array([0.75]), np.array([0.25]), (1, 3))
    SparseWeights((1, 3) float64, 1 of 3 kept)
    """

    def __init__(self, indptr: np.ndarray, indices: np.ndarray, data: np.ndarray, dropped: np.ndarray,
                 shape: tuple[int, ...]) -> None:
        self.indptr, self.indices, self.data, self.dropped, self.shape = indptr, indices, data, dropped, shape

    def toscipy(self) -> Any:
        """A `scipy.sparse.csr_array` of shape (rows, kv_len), where rows are all of (..., heads, q_len)."""
        from scipy import sparse

        shape = (len(self.indptr) - 1, self.shape[-1])
        return sparse.csr_array((self.data, self.indices, self.indptr), shape=shape)

    def __repr__(self) -> str:
        kept = f"{len(self.data)} of {math.prod(self.shape)} kept"
        return f"{type(self).__name__}({self.shape} {self.data.dtype}, {kept})"


class AttentionGradients:
    """Gradients as attributes, one for each name in ``want=``: ``query``, ``key``, ``value``, ``bias``,
    ``relative_bias``, ``relative_key``, ``relative_query``, ``sinks``.

    They unpack in the order of ``want=``.

    Parameters
    ----------
    **wanted : ndarray
        Each of the shape and dtype of what it is the gradient of.

    Examples
    --------
    >>> AttentionGradients(query=np.zeros((2, 8)), key=np.zeros((3, 8)))
    AttentionGradients(query (2, 8) float64, key (3, 8) float64)
    """

    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    bias: np.ndarray
    relative_bias: np.ndarray
    relative_key: np.ndarray
    relative_query: np.ndarray
    sinks: np.ndarray

    def __init__(self, **wanted: np.ndarray) -> None:
        self.__dict__.update(wanted)

    __iter__, __repr__ = AttentionResult.__iter__, AttentionResult.__repr__
