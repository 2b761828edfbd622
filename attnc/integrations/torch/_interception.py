"""Replaces a function of another library by one of ours, for as long as a purpose needs it."""

from __future__ import annotations

import collections
import threading
import types
import warnings
import weakref
from collections.abc import Callable
from typing import Any


class Interception:
    """Replaces and restores ``owner.name``; the owner is a module or a class.

    Purposes are entered and left in any order and from any thread: the first installs our function, the last removes
    it. `make` receives a namespace of the original, `theirs`, the current `purposes` and `put_back`, and returns ours.
    Without a purpose ours, which other code may have kept, calls theirs and then `put_back`: another library that found
    ours in place may have restored it after the last purpose was left.
    """

    def __init__(self, owner: types.ModuleType | type, name: str, make: Callable[[types.SimpleNamespace], Any]):
        self.owner, self._name, self._make = owner, name, make
        self._lock = threading.RLock()
        self._counts: collections.Counter[str] = collections.Counter()
        self._state = types.SimpleNamespace(theirs=None, purposes=frozenset(), put_back=self._put_back)
        self._ours = None
        self._left: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()   # theirs, by earlier ours

    def enter(self, purpose: str) -> None:
        """Install ours, unless it is installed."""
        with self._lock:
            if self._counts:
                self._warn_unless_ours(getattr(self.owner, self._name))
            else:
                self._put_back()
                # A new function: another library's replacement may call the previous one, which must go on unchanged.
                self._state = types.SimpleNamespace(theirs=getattr(self.owner, self._name), purposes=frozenset(),
                                                    put_back=self._put_back)
                self._ours = self._make(self._state)
                setattr(self.owner, self._name, self._ours)
            self._count(purpose, 1)

    def leave(self, purpose: str) -> None:
        """Remove ours with the last purpose; another library's later replacement stays."""
        with self._lock:
            self._count(purpose, -1)
            if not self._counts:
                self._left[self._ours] = self._state.theirs
                if self._warn_unless_ours(getattr(self.owner, self._name)):
                    self._put_back()

    def _put_back(self) -> None:
        """Restore the name if it has ours and there is no purpose."""
        with self._lock:
            while not self._counts and (current := getattr(self.owner, self._name)) in self._left:
                setattr(self.owner, self._name, self._left[current])

    def _count(self, purpose: str, change: int) -> None:
        self._counts[purpose] += change
        self._counts = +self._counts
        self._state.purposes = frozenset(self._counts)

    def _warn_unless_ours(self, current: object) -> bool:
        if current is self._ours:
            return True
        warnings.warn(f"{self.owner.__name__}.{self._name} was replaced by {current!r} while attnc's was in its "
                      "place; it stays", RuntimeWarning, stacklevel=4)
        return False
