"""A function of another library with one of ours in its place, for as long as someone wants it there."""

from __future__ import annotations

import collections
import threading
import types
import warnings
import weakref
from collections.abc import Callable
from typing import Any


class Interception:
    """The one place where ``owner.name`` is replaced and restored; the owner is a module or a class.

    Purposes are entered and left in any order and from any thread: ours comes with the first and goes with the last.
    `make` gets a namespace with what it stands for, `theirs`, the `purposes` of the moment, and `put_back`, and gives
    ours. Without a purpose ours does what theirs does, for code that has kept it, and calls `put_back`: another library
    that found ours in place may have put it there again after the last purpose was left.
    """

    def __init__(self, owner: types.ModuleType | type, name: str, make: Callable[[types.SimpleNamespace], Any]):
        self.owner, self._name, self._make = owner, name, make
        self._lock = threading.RLock()
        self._counts: collections.Counter[str] = collections.Counter()
        self._state = types.SimpleNamespace(theirs=None, purposes=frozenset(), put_back=self._put_back)
        self._ours = None
        self._left: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()   # what an ours stood for

    def enter(self, purpose: str) -> None:
        """Put ours in place, or leave it there."""
        with self._lock:
            if self._counts:
                self._warn_unless_ours(getattr(self.owner, self._name))
            else:
                self._put_back()
                # A new one: what another library has put there may call the one before, which goes on as it always did.
                self._state = types.SimpleNamespace(theirs=getattr(self.owner, self._name), purposes=frozenset(),
                                                    put_back=self._put_back)
                self._ours = self._make(self._state)
                setattr(self.owner, self._name, self._ours)
            self._count(purpose, 1)

    def leave(self, purpose: str) -> None:
        """Take ours away, unless there are others; what another library has put there since then stays."""
        with self._lock:
            self._count(purpose, -1)
            if not self._counts:
                self._left[self._ours] = self._state.theirs
                if self._warn_unless_ours(getattr(self.owner, self._name)):
                    self._put_back()

    def _put_back(self) -> None:
        """Restore the name if what stands there is ours without a purpose."""
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
