"""The object that attention returns when more than the output is wanted."""

from __future__ import annotations

import numpy as np


class AttentionResult:
    """The output of attention and, as attributes, what ``want=`` asked for.

    Parameters
    ----------
    output : ndarray
        What attention returns without ``want=``.
    **wanted : ndarray
        One array for each name in ``want=``, such as ``lse`` or ``weights``.

    Examples
    --------
    >>> AttentionResult(np.zeros((2, 8)), lse=np.zeros(2))
    AttentionResult(output (2, 8), lse (2,))
    """

    def __init__(self, output: np.ndarray, **wanted: np.ndarray):
        self.output = output
        self.__dict__.update(wanted)

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name} {array.shape}" for name, array in vars(self).items())
        return f"{type(self).__name__}({shapes})"
