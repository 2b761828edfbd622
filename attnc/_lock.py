"""A lock of an object whose changes take turns; copies and pickles get one of their own."""

from __future__ import annotations

import threading
from typing import Any


class Locked:
    """What has `_lock`, held while it changes or is copied. The thread that holds it may take it again."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __getstate__(self) -> dict[str, Any]:
        with self._lock:
            state = dict(vars(self))
        del state["_lock"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._lock = threading.RLock()
