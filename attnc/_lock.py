"""Locks of objects whose changes take turns, and wait for readers; copies and pickles get locks of their own."""

import threading
from typing import Any

WITHIN = ("{} is used within a call of the same thread that changes or reads it, as by a signal handler; wanted one "
          "call at a time")


class Locked:
    """Base of objects whose `_lock` is held during changes and copies."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def _turn(self) -> threading.RLock:
        """The lock; RuntimeError if this thread holds it: a signal handler's change within another would be lost."""
        if self._lock._is_owned():      # type: ignore[attr-defined]
            raise RuntimeError(WITHIN.format(type(self).__name__))
        return self._lock

    def __getstate__(self) -> dict[str, Any]:
        with self._lock:
            state = dict(vars(self))
        del state["_lock"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._lock = threading.RLock()


class Readable(Locked):
    """Base of objects that several threads read at a time; changes of what they read wait for them."""

    def __init__(self) -> None:
        super().__init__()
        self._readers: dict[threading.Lock, int] = {}       # the lock and the thread of each running call that reads

    def _reader(self) -> threading.Lock:
        """A lock to be held until the call has read; released in a `finally`, so that an interrupt releases it too."""
        reader = threading.Lock()
        reader.acquire()
        return reader

    def _enter(self, reader: threading.Lock) -> None:
        with self._turn():
            self._readers[reader] = threading.get_ident()

    def _leave(self, reader: threading.Lock) -> None:
        reader.release()
        self._readers.pop(reader, None)

    def _wait_for_readers(self) -> None:
        """Wait for the reading calls of other threads; none begins while this thread holds the lock."""
        for reader, thread in self._readers.copy().items():
            if thread == threading.get_ident():
                if reader.locked():
                    raise RuntimeError(WITHIN.format(type(self).__name__))
            else:
                with reader:
                    pass

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        del state["_readers"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._readers = {}
