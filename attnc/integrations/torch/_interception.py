"""A function of another library with one of ours in its place, for as long as someone wants it there."""

from __future__ import annotations

import collections
import threading
import types
import warnings
from collections.abc import Callable
from typing import Any


class Interception:
    """The one place where ``module.name`` is replaced and restored.

    Purposes are entered and left in any order and from any thread: ours comes with the first and goes with the last.
    `make` gets a namespace with what it stands for, `theirs`, and the `purposes` of the moment, and gives ours; without
    a purpose ours does what theirs does, for whoever has kept it.
    """

    def __init__(self, module: types.ModuleType, name: str, make: Callable[[types.SimpleNamespace], Any]):
        self._module, self._name, self._make = module, name, make
        self._lock = threading.RLock()
        self._counts: collections.Counter[str] = collections.Counter()
        self._state = types.SimpleNamespace(theirs=None, purposes=frozenset())
        self._ours = None

    def stands_in(self, module: Any) -> bool:
        """Whether the name is one of this module."""
        return module is self._module

    def enter(self, purpose: str) -> None:
        """Put ours in place, or leave it there."""
        with self._lock:
            current = getattr(self._module, self._name)
            if self._counts:
                self._warn_unless_ours(current)
            else:
                # A new one: what another library has put there may call the one before, which goes on as it always did.
                self._state = types.SimpleNamespace(theirs=current, purposes=frozenset())
                self._ours = self._make(self._state)
                setattr(self._module, self._name, self._ours)
            self._count(purpose, 1)

    def leave(self, purpose: str) -> None:
        """Take ours away, unless there are others; what another library has put there since then stays."""
        with self._lock:
            self._count(purpose, -1)
            if not self._counts and self._warn_unless_ours(getattr(self._module, self._name)):
                setattr(self._module, self._name, self._state.theirs)

    def _count(self, purpose: str, change: int) -> None:
        self._counts[purpose] += change
        self._counts = +self._counts
        self._state.purposes = frozenset(self._counts)

    def _warn_unless_ours(self, current: object) -> bool:
        if current is self._ours:
            return True
        warnings.warn(f"{self._module.__name__}.{self._name} was replaced by {current!r} while attnc's was in its "
                      "place; it stays", RuntimeWarning, stacklevel=4)
        return False
