"""Which keys a query row may see, as boolean arrays: the definition of every masking option, and helpers for users."""

from __future__ import annotations

import numpy as np

from ._checks import Args, integer, scalars
from ._checks.attention import broadcast_batch
from ._checks.options import integers
from ._types import ArrayLike, Floats, Integers, Mask, Window

__all__ = ["alibi_slopes", "causal_mask", "length_mask", "segment_mask", "window_mask"]


def causal_mask(q_len: int, kv_len: int, q_offset: ArrayLike | None = None) -> Mask:
    """The mask of ``causal=True``: a row sees the keys up to its own position.

    Parameters
    ----------
    q_len, kv_len : int
        Number of query rows and of keys.
    q_offset : int or int array (batch...), optional
        Position of the first row; by default ``kv_len - q_len``, so that the last row sees every key.

    Returns
    -------
    bool array (q_len, kv_len), or (batch..., 1, q_len, kv_len) for an array of offsets
        True where the row may see the key; fits ``mask=``.

    Raises
    ------
    TypeError, ValueError
        If an argument is not an integer, or a length negative.

    Examples
    --------
    >>> causal_mask(2, 4).astype(int)
    array([[1, 1, 1, 0],
           [1, 1, 1, 1]])
    """
    keys, rows = _keys_and_positions(q_len, kv_len, q_offset)
    return keys <= rows


def window_mask(q_len: int, kv_len: int, window: Window, q_offset: ArrayLike | None = None) -> Mask:
    """The mask of ``window=(left, right)``: a row sees `left` keys before its position, its own, and `right` after.

    Parameters
    ----------
    q_len, kv_len, q_offset
        As in `causal_mask`.
    window : tuple (left, right)
        Counts that do not include the row's own position; None is unbounded.

    Returns
    -------
    bool array
        As `causal_mask`.

    Raises
    ------
    TypeError, ValueError
        If an argument is not an integer, a length or count negative, or `window` no pair.

    Examples
    --------
    >>> window_mask(3, 3, (1, 0)).astype(int)
    array([[1, 0, 0],
           [1, 1, 0],
           [0, 1, 1]])
    """
    sides = scalars.check_window(window) or (None, None)
    return _in_window(*_keys_and_positions(q_len, kv_len, q_offset), sides)


def length_mask(lengths: ArrayLike, length: int) -> Mask:
    """The mask of valid places in right-padded sequences.

    Parameters
    ----------
    lengths : int or int array (batch...)
        Valid count of each sequence.
    length : int
        Padded length.

    Returns
    -------
    bool array (batch..., length)
        True at the first ``lengths`` places; fits ``key_mask=``.

    Raises
    ------
    TypeError, ValueError
        If an argument is not of integers, or `length` negative.

    Examples
    --------
    >>> length_mask([1, 3], 3).astype(int)
    array([[1, 0, 0],
           [1, 1, 1]])
    """
    length = integer("length", length, 0, scalars.MAX_OFFSET)
    return np.arange(length) < integers("lengths", lengths)[..., None]


def segment_mask(q_segments: ArrayLike, k_segments: ArrayLike) -> Mask:
    """The mask of ``q_segments=, k_segments=``: a row sees the keys of its own segment; a negative id sees nothing.

    Parameters
    ----------
    q_segments : int array (batch..., q_len)
    k_segments : int array (batch..., kv_len)

    Returns
    -------
    bool array (q_len, kv_len), or (batch..., 1, q_len, kv_len) if there are batch axes
        True where the row may see the key; fits ``mask=``.

    Raises
    ------
    TypeError, ValueError
        If an argument is not an array of integers or has no axes, or the batch axes do not broadcast together.

    Examples
    --------
    >>> segment_mask([0, 0, 1], [0, 1, -1]).astype(int)
    array([[1, 0, 0],
           [1, 0, 0],
           [0, 1, 0]])
    """
    rows, keys = integers("q_segments", q_segments), integers("k_segments", k_segments)
    for name, x in (("q_segments", rows), ("k_segments", keys)):
        if x.ndim == 0:
            raise ValueError(f"{name} has no axes; wanted (batch..., length)")
    broadcast_batch(lambda: f"q_segments {rows.shape}, k_segments {keys.shape}", rows.shape[:-1], keys.shape[:-1])
    mask = _same_segment(rows, keys)
    return mask if max(rows.ndim, keys.ndim) > 1 else mask[0]


def alibi_slopes(heads: int) -> Floats:
    """The slopes of attention with linear biases (Press, Smith, Lewis 2022), for ``alibi_slopes=``.

    For a power of two these are ``2**(-8/heads), 2**(-16/heads), ... 2**-8``; for other counts those of the power of
    two below, then every other slope of the power of two above.

    Parameters
    ----------
    heads : int
        Number of query heads, at least 1.

    Returns
    -------
    float64 array (heads,)

    Raises
    ------
    TypeError, ValueError
        If `heads` is not an integer of at least 1.

    Examples
    --------
    >>> alibi_slopes(3)
    array([0.0625    , 0.00390625, 0.25      ])
    """
    heads = integer("heads", heads, 1, 2**20)
    below = 2 ** (heads.bit_length() - 1)
    slopes = 2.0 ** (-8.0 * np.arange(1, below + 1) / below)
    between = 2.0 ** (-4.0 * np.arange(1, 2 * below, 2) / below)
    return np.concatenate([slopes, between[:heads - below]])


def allowed(a: Args) -> Mask:
    """Which key each row may see by all options of `a` together: bool (*batch, q_heads, q_len, kv_len)."""
    keep = np.ones((*a.batch, a.q_heads, a.q_len, a.kv_len), np.bool_)
    keep &= within_lengths(a)
    if a.mask is not None:
        keep &= a.mask
    if a.block_mask is not None and a.block_sizes is not None:
        rows, keys, first_row, first_key = a.block_sizes
        cells = ((np.arange(a.q_len) + first_row) // rows)[:, None], (np.arange(a.kv_len) + first_key) // keys
        keep &= a.block_mask[..., cells[0], cells[1]]
    if a.key_indices is not None:
        keep &= in_lists(a)
    if a.key_mask is not None:
        keep &= a.key_mask[..., None, None, :]
    if a.bias is not None:
        keep &= a.bias != -np.inf
    if a.relative_bias is not None:
        keep &= a.relative_bias != -np.inf
    if a.causal:
        keep &= key_positions(a) <= positions(a)
    if a.window is not None:
        keep &= _in_window(key_positions(a), positions(a), a.window)
    if a.q_segments is not None and a.k_segments is not None:
        keep &= _same_segment(a.q_segments, a.k_segments)
    return keep


def in_lists(a: Args) -> Mask:
    """Which keys `key_indices` names: bool, broadcasts to (*batch, q_heads, q_len, kv_len)."""
    lists = a.key_indices
    assert lists is not None
    named = np.zeros((*lists.shape[:-1], a.kv_len + 1), np.bool_)       # the last column is that of -1
    np.put_along_axis(named, lists, True, -1)
    per_head = lists.shape[-3] == a.q_heads or lists.shape[-3] == 1
    return (named if per_head else np.repeat(named, a.heads_per_kv, -3))[..., :-1]


def within_lengths(a: Args) -> Mask:
    """Which places of the scores are not padding: bool, broadcasts to (*batch, q_heads, q_len, kv_len)."""
    rows, keys = np.ones((1, 1), bool), np.ones((1, 1), bool)
    if a.q_lengths is not None:
        rows = rows_within(a)[..., None]
    if a.kv_lengths is not None:
        keys = np.arange(a.kv_len) < a.kv_lengths[..., None, None, None]
    return rows & keys


def rows_within(a: Args) -> Mask:
    """Which rows are not padding, given `q_lengths`: bool, broadcasts to (*batch, q_heads, q_len)."""
    return np.arange(a.q_len) < np.asarray(a.q_lengths)[..., None, None]


def positions(a: Args) -> Integers:
    """The position of each row among the keys: int64, broadcasts to (*batch, q_heads, q_len, 1)."""
    offset: int | np.ndarray
    if a.q_offset is not None:
        offset = a.q_offset
    else:
        q_lengths = a.q_len if a.q_lengths is None else a.q_lengths
        kv_lengths = a.kv_len if a.kv_lengths is None else a.kv_lengths
        offset = kv_lengths - q_lengths
    rows: Integers = np.arange(a.q_len)[:, None] + np.asarray(offset)[..., None, None, None]
    return rows


def key_positions(a: Args) -> Integers:
    """The position of each key: int64, broadcasts to (*batch, q_heads, 1, kv_len)."""
    if a.k_positions is None:
        return np.arange(a.kv_len)
    if a.k_positions.ndim == 1 or a.k_positions.shape[-2] == 1:
        return a.k_positions[..., None, :]
    return np.repeat(a.k_positions, a.q_heads // a.kv_heads, axis=-2)[..., None, :]


def _keys_and_positions(q_len: int, kv_len: int, q_offset: ArrayLike | None) -> tuple[np.ndarray, np.ndarray]:
    """Positions of keys (kv_len,) and of rows (q_len, 1), or (batch..., 1, q_len, 1) for an array of offsets."""
    q_len = integer("q_len", q_len, 0, scalars.MAX_OFFSET)
    kv_len = integer("kv_len", kv_len, 0, scalars.MAX_OFFSET)
    offset = np.asarray(kv_len - q_len)
    if q_offset is not None:
        offset = integers("q_offset", q_offset, -scalars.MAX_OFFSET, scalars.MAX_OFFSET)
        offset = offset[..., None, None, None] if offset.ndim else offset
    return np.arange(kv_len), np.arange(q_len)[:, None] + offset


def _in_window(keys: np.ndarray, rows: np.ndarray, window: Window) -> np.ndarray:
    left, right = window
    keep = np.ones(np.broadcast_shapes(keys.shape, rows.shape), bool)
    if left is not None:
        keep &= keys >= rows - left
    if right is not None:
        keep &= keys <= rows + right
    return keep


def _same_segment(q_segments: np.ndarray, k_segments: np.ndarray) -> Mask:
    rows, keys = q_segments[..., None, :, None], k_segments[..., None, None, :]
    same: Mask = (rows == keys) & (rows >= 0)
    return same
