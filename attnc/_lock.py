"""A lock of an object whose changes take turns; copies and pickles get one of their own."""

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
