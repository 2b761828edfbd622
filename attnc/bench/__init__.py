"""The parity benchmark: is attnc right on this machine, and how near is it to what the machine can do?

``python -m attnc check`` and ``python -m attnc bench`` are its command lines; ``attnc.bench.runner.run`` gives the
measurements as a dictionary.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

Arrays: TypeAlias = tuple[np.ndarray, ...]      # inputs of a case
Options: TypeAlias = dict[str, Any]             # of its function
Call: TypeAlias = Callable[[], Any]             # of a contender: gives its output, or output and weights
Json: TypeAlias = dict[str, Any]                # what is measured


class Unsupported(Exception):
    """A contender is not installed, or cannot do a case; the message says why."""

    @classmethod
    def import_of(cls, error: ImportError) -> "Unsupported":
        """For a contender that cannot be imported."""
        return cls("not installed" if isinstance(error, ModuleNotFoundError) else f"cannot be imported: {error}")
