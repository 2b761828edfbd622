"""What depends on the distance of row and key alone: the bias of T5 from its table, and the table rows of DeBERTa."""

from __future__ import annotations

import math

import numpy as np

from ._checks.arrays import accumulator, float_array
from ._checks.scalars import MAX_OFFSET, integer
from ._types import Array, ArrayLike


def t5_relative_bias(table: ArrayLike, q_len: int, kv_len: int, *, q_offset: int | None = None,
                     max_distance: int = 128, bidirectional: bool = True) -> Array:
    """The bias of T5 (Raffel et al. 2020) for ``relative_bias=``, from the table that a model has learned.

    Distances from 0 to a quarter of the buckets (half of them if not `bidirectional`) have a bucket each, larger ones
    share logarithmically wider buckets up to `max_distance`.

    Parameters
    ----------
    table : float array (buckets, heads)
        The weight of ``relative_attention_bias`` in models of transformers.
    q_len, kv_len : int
        Numbers of rows and keys.
    q_offset : int, optional
        Position of the first row; by default ``kv_len - q_len``, so that the last row stands at the last key.
    max_distance : int
        The distance from which on all share the last bucket.
    bidirectional : bool
        Whether keys behind the row have buckets of their own, as in encoders; in decoders they have the bucket of 0.

    Returns
    -------
    array (heads, q_len + kv_len - 1)
        In the dtype of the table.

    Raises
    ------
    TypeError, ValueError
        For a wrong dtype, a negative length, a `table` without two axes or with too few buckets, or a `max_distance`
        within the distances that have a bucket each.

    Examples
    --------
    Two rows and two keys; the row's own position is the entry in the middle.

    >>> t5_relative_bias([[0.], [1.], [2.], [3.]], 2, 2)
    array([[1., 0., 3.]])
    """
    table = float_array("table", table)
    if table.ndim != 2:
        raise ValueError(f"table has shape {table.shape}; wanted (buckets, heads)")
    return np.ascontiguousarray(table[_buckets(q_len, kv_len, q_offset, len(table), max_distance, bidirectional)].T)


def t5_relative_bias_backward(grad_output: ArrayLike, buckets: int, q_len: int, kv_len: int, *,
                              q_offset: int | None = None, max_distance: int = 128, bidirectional: bool = True
                              ) -> Array:
    """Gradient of the table of `t5_relative_bias` from that of its result.

    Parameters
    ----------
    grad_output : float array (heads, q_len + kv_len - 1)
        ``attention_backward(..., want="relative_bias").relative_bias``, summed over the batch.
    buckets : int
        Rows of the table.
    q_len, kv_len, q_offset, max_distance, bidirectional
        As they went into `t5_relative_bias`.

    Returns
    -------
    array (buckets, heads)
        In the dtype of `grad_output`, summed in float64.

    Raises
    ------
    TypeError, ValueError
        As `t5_relative_bias`; for a `grad_output` of another shape.

    Examples
    --------
    >>> t5_relative_bias_backward([[1., 2., 4.]], 4, 2, 2).ravel()
    array([2., 1., 0., 4.])
    """
    grad = float_array("grad_output", grad_output)
    places = _buckets(q_len, kv_len, q_offset, buckets, max_distance, bidirectional)
    if grad.ndim != 2 or grad.shape[1] != len(places):
        raise ValueError(f"grad_output has shape {grad.shape}; wanted (heads, q_len + kv_len - 1) = "
                         f"(heads, {len(places)})")
    table = np.zeros((buckets, len(grad)), np.result_type(accumulator(grad.dtype), np.float64))
    np.add.at(table, places, grad.T.astype(table.dtype))
    return table.astype(grad.dtype)


def deberta_relative_index(q_len: int, kv_len: int, buckets: int, max_position: int, *, q_offset: int | None = None
                           ) -> Array:
    """The table row of each distance in DeBERTa (He et al. 2021), for ``relative_index=``.

    Row ``buckets + d`` of a table belongs to a key that stands ``d`` before the query row. Distances up to half of the
    buckets have a row each, larger ones share logarithmically wider ranges up to `max_position`; the first and the last
    row also stand for all beyond.

    Parameters
    ----------
    q_len, kv_len : int
        Numbers of rows and keys.
    buckets : int
        ``position_buckets`` in configurations of transformers: half of the rows of a table. 0 gives each distance a row
        of its own, up to `max_position`, as in the first DeBERTa.
    max_position : int
        ``max_relative_positions``, or ``max_position_embeddings`` where that is below 1.
    q_offset : int, optional
        Position of the first row; by default ``kv_len - q_len``, so that the last row stands at the last key.

    Returns
    -------
    array (q_len + kv_len - 1,)
        int64, from 0 to twice the buckets (or twice `max_position`) less 1.

    Raises
    ------
    TypeError, ValueError
        For a number that is no integer or out of range.

    Examples
    --------
    Two rows and three keys: from two keys behind the row to one ahead of it.

    >>> deberta_relative_index(2, 3, 4, 16)
    array([6, 5, 4, 3])
    """
    q_len, kv_len = integer("q_len", q_len, 0, 2**40), integer("kv_len", kv_len, 0, 2**40)
    offset = kv_len - q_len if q_offset is None else integer("q_offset", q_offset, -MAX_OFFSET, MAX_OFFSET)
    buckets = integer("buckets", buckets, 0, 2**30)
    if buckets == 1:
        raise ValueError("buckets must be 0 or at least 2, got 1")
    middle = buckets // 2
    max_position = integer("max_position", max_position, middle + 2 if buckets else 1, 2**30)
    before = q_len - 1 - np.arange(max(q_len + kv_len - 1, 0)) + offset
    span, rows = buckets or max_position, before
    if buckets:
        # In float32, as the models do, so that the buckets have their borders.
        far = np.log(np.maximum(np.abs(before), middle).astype(np.float32) / np.float32(middle))
        steps = np.ceil(far / np.log(np.float32((max_position - 1) / middle)) * np.float32(middle - 1))
        rows = np.where(np.abs(before) <= middle, before, (steps.astype(np.int64) + middle) * np.sign(before))
    return np.clip(rows + span, 0, 2 * span - 1)


def _buckets(q_len: int, kv_len: int, q_offset: int | None, buckets: int, max_distance: int, bidirectional: bool
             ) -> np.ndarray:
    """The bucket of each distance: int64 (q_len + kv_len - 1,)."""
    q_len, kv_len = integer("q_len", q_len, 0, 2**40), integer("kv_len", kv_len, 0, 2**40)
    offset = kv_len - q_len if q_offset is None else integer("q_offset", q_offset, -MAX_OFFSET, MAX_OFFSET)
    if not isinstance(bidirectional, bool | np.bool_):
        raise TypeError(f"bidirectional must be a bool, got {type(bidirectional).__name__}")
    buckets = integer("buckets", buckets, 4 if bidirectional else 2, 2**31)
    sides = 2 if bidirectional else 1
    of_side = buckets // sides
    exact = of_side // 2
    max_distance = integer("max_distance", max_distance, exact + 1, 2**31)
    after = np.arange(max(q_len + kv_len - 1, 0)) - (q_len - 1) - offset        # positions of the key behind the row
    distance = np.abs(after) if bidirectional else -np.minimum(after, 0)
    # In float32, as the models do, so that the buckets have their borders.
    far = np.log(np.maximum(distance, 1).astype(np.float32) / np.float32(exact)) / np.float32(
        math.log(max_distance / exact)) * np.float32(of_side - exact)
    bucket = np.where(distance < exact, distance, np.minimum(exact + far.astype(np.int64), of_side - 1))
    return bucket + of_side * (after > 0) if bidirectional else bucket
