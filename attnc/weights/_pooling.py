"""Statistics from dense blocks of rows, where the kernels have no reduction for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from . import _places

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ._held import Lazy
    from ._sweeps import Steps


def blocks(W: Lazy, steps: Steps | None = None) -> Iterator[tuple[slice, np.ndarray]]:
    """Slices of rows and their dense weights, each of which is one of the `steps`."""
    for some, block in _places.row_blocks(W, _places.rows_of_block(W.shape, W.dtype), True):
        report = None if steps is None else steps.part()
        yield some, block
        if report is not None:
            report(1, 1)


def n_blocks(W: Lazy) -> int:
    """Number of `blocks`."""
    return -(-W.shape[-2] // _places.rows_of_block(W.shape, W.dtype))


def key_sums(W: Lazy, amounts: np.ndarray) -> np.ndarray:
    """Sums over rows times their amounts (..., q_len): (..., kv_len). A row of amount 0 adds nothing, even NaN."""
    total = np.zeros((*W.shape[:-2], W.shape[-1]))
    amounts = np.broadcast_to(amounts, W.shape[:-1])
    with np.errstate(all="ignore"):
        for some, block in blocks(W):
            share = amounts[..., some, None]
            total += np.where(share == 0, 0, block * share).sum(-2, dtype=np.float64)
        return total.astype(W.dtype)


def row_sums(W: Lazy, counts: np.ndarray) -> np.ndarray:
    """Sums over keys times their counts: (..., q_len). A key of count 0 adds nothing, even NaN."""
    total = np.zeros(W.shape[:-1], W.dtype)
    with np.errstate(all="ignore"):
        for some, block in blocks(W):
            total[..., some] = np.where(counts == 0, 0, block * counts).sum(-1, dtype=np.float64)
    return total


def pooled(W: Lazy, rows: np.ndarray, keys: np.ndarray, n_rows: int, n_keys: int, largest: bool,
           steps: Steps | None = None) -> np.ndarray:
    """Means over groups of rows of sums over groups of keys, or the largest; a negative label is in no group."""
    gather: Any = np.maximum if largest else np.add
    found = np.zeros((*W.shape[:-2], n_rows, n_keys))
    with np.errstate(all="ignore"):
        for some, block in blocks(W, steps):
            taken = rows[some] >= 0
            gather.at(found, (..., rows[some][taken], slice(None)),
                      by_group(block[..., taken, :], keys, n_keys, gather))
        return (found if largest else found / members(rows, n_rows)).astype(W.dtype)


def members(labels: np.ndarray, groups: int) -> np.ndarray:
    """The sizes of groups of rows, as a column; 1 for an empty group."""
    column: np.ndarray = np.maximum(np.bincount(labels[labels >= 0], minlength=groups), 1)[:, None].astype(np.float64)
    return column


def by_group(x: np.ndarray, labels: np.ndarray, groups: int, gather: np.ufunc = np.add) -> np.ndarray:
    """The last axis reduced over groups, in float64; 0 for an empty group."""
    order = np.argsort(labels, kind="stable")[np.count_nonzero(labels < 0):]
    there, starts = np.unique(labels[order], return_index=True)
    found = np.zeros((*x.shape[:-1], groups))
    if len(there):
        found[..., there] = gather.reduceat(x[..., order], starts, axis=-1, dtype=np.float64)
    return found
