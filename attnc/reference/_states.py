"""Merging: attention over several sets of keys from the attention over each."""

from __future__ import annotations

import numpy as np

from .._checks import states_args
from .._types import Array, Layout, State


def merge_states(states: list[State] | tuple[State, ...], *, layout: Layout = "bhnd") -> tuple[Array, Array]:
    """Output and lse of attention over all keys from those of its parts: the definition of `attnc.merge_states`.

    Parameters, results and errors are those of `attnc.merge_states`.

    Examples
    --------
    >>> merge_states([([[1.]], [0.]), ([[5.]], [np.log(3.)])])
    (array([[4.]]), array([1.38629436]))
    """
    parts, lse_parts, acc = states_args(states, layout)
    outputs, lses = np.stack(parts).astype(acc), np.stack(lse_parts).astype(acc)
    with np.errstate(all="ignore"):
        largest = lses.max(0)
        shift = np.where(largest == -np.inf, 0, largest)
        shares = np.exp(lses - shift)
        total = shares.sum(0)
        shares = (shares / np.where(total == 0, 1, total))[..., None]
        output = np.where(lses[..., None] == -np.inf, 0, shares * outputs).sum(0)
        lse = shift + np.log(total)
    return np.ascontiguousarray(output.swapaxes(-2, -3) if layout == "bnhd" else output), lse
