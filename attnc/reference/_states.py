"""Merging: attention over several sets of keys from the attention over each."""

from __future__ import annotations

import numpy as np

from .._checks import states_args


def merge_states(states, *, layout="bhnd") -> tuple[np.ndarray, np.ndarray]:
    """Output and lse of attention over all keys from those of its parts: the definition of `attnc.merge_states`.

    Parameters
    ----------
    states : sequence of (output, lse)
        Outputs (..., length, dim) of one shape with their lse (..., length), each over keys of its own.
    layout : {"bhnd", "bnhd"}
        Order of the last axes of the outputs: heads before length or after it.

    Returns
    -------
    tuple (output, lse)
        In float64 if an array is float64, else in float32.

    Raises
    ------
    TypeError, ValueError
        For a wrong dtype or shape, naming the state.

    Examples
    --------
    >>> merge_states([([[1.]], [0.]), ([[5.]], [np.log(3.)])])
    (array([[4.]]), array([1.38629436]))
    """
    outputs, lses, acc = states_args(states, layout)
    outputs, lses = np.stack(outputs).astype(acc), np.stack(lses).astype(acc)
    with np.errstate(all="ignore"):
        largest = lses.max(0)
        shift = np.where(largest == -np.inf, 0, largest)
        shares = np.exp(lses - shift)
        total = shares.sum(0)
        shares = (shares / np.where(total == 0, 1, total))[..., None]
        output = np.where(lses[..., None] == -np.inf, 0, shares * outputs).sum(0)
        lse = shift + np.log(total)
    return np.ascontiguousarray(output.swapaxes(-2, -3) if layout == "bnhd" else output), lse
