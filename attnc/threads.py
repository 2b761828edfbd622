"""How many threads a call uses: its argument, the context, the default, or what OpenMP and the cgroup allow."""

from __future__ import annotations

import contextlib
import contextvars
import math
import os

from . import _isa
from ._checks import check_num_threads


def _cgroup_limit() -> int:
    """Processors that the CPU quota of this process's cgroup allows, rounded up; a large number if there is none."""
    version_2, version_1 = "/sys/fs/cgroup/cpu.max", "/sys/fs/cgroup/cpu/cpu.cfs_"
    for paths in ((version_2,), (version_1 + "quota_us", version_1 + "period_us")):
        with contextlib.suppress(OSError, ValueError):
            quota, period = map(int, " ".join(map(_read, paths)).split())
            if quota > 0:
                return max(1, math.ceil(quota / period))
    return 1 << 20


def _read(path: str) -> str:
    with open(path) as file:  # pathlib would take longer to import than all of attnc
        return file.read()


def _from_environment() -> int | None:
    text = os.environ.get("ATTNC_NUM_THREADS")
    if not text:
        return None
    try:
        return check_num_threads(int(text))
    except ValueError:
        raise ImportError(f"attnc: ATTNC_NUM_THREADS must be an integer from 1 to 4096, got {text!r}") from None


class _Entry:
    """One entry into a `threads` context that has not been left."""

    __slots__ = ("left", "num_threads")

    def __init__(self, num_threads: int | None):
        self.num_threads = num_threads
        self.left = False       # from another context than it was entered in


_CGROUP_LIMIT = _cgroup_limit()
_default: int | None = _from_environment()
# Not the number but all entries, so that contexts that overlap (generators) can be left in any order.
_entries: contextvars.ContextVar[tuple[_Entry, ...]] = contextvars.ContextVar("attnc.threads", default=())


def _innermost(entries: tuple[_Entry, ...]) -> int | None:
    """The number of the last context that was entered here and not left, or the default."""
    for entry in reversed(entries):
        if not entry.left:
            return entry.num_threads
    return _default


def resolve(num_threads: int | None) -> tuple[int, bool]:
    """The number of threads of a call, and whether it was asked for in that call.

    A negative number is the most that OpenMP's own answer may be: only calls worth sharing ask for that.
    """
    if num_threads is not None:
        return num_threads, True
    entries = _entries.get()
    chosen = _innermost(entries) if entries else _default
    return -_CGROUP_LIMIT if chosen is None else chosen, False


def get_num_threads() -> int:
    """Threads that a call uses when it is not given ``num_threads``.

    Returns
    -------
    int
        The number of the `threads` context that the caller is in; otherwise what `set_num_threads` or
        ``ATTNC_NUM_THREADS`` set; otherwise OpenMP's own answer at this moment (``OMP_NUM_THREADS``, threadpoolctl), at
        most the processors that affinity and the cgroup's quota allow.
        A call takes fewer while other calls of this process are at work.

    Examples
    --------
    >>> get_num_threads() >= 1
    True
    """
    chosen = _innermost(_entries.get())
    return chosen if chosen is not None else min(_isa.kernels.threads_now(), _CGROUP_LIMIT)


def set_num_threads(num_threads: int | None) -> None:
    """Set the default number of threads for all calls of this process; None gives it back to OpenMP.

    Callers in a `threads` context keep that context's number until they leave it.

    Raises
    ------
    TypeError, ValueError
        If `num_threads` is not an integer from 1 to 4096.

    Examples
    --------
    >>> set_num_threads(None)
    """
    global _default
    _default = None if num_threads is None else check_num_threads(num_threads)


class threads(contextlib.ContextDecorator):
    """A context in which the caller's calls use `num_threads` threads; also a decorator of functions.

    It holds where it was entered (`contextvars`): in this thread or asyncio task, and in the tasks and
    ``asyncio.to_thread`` calls that it starts inside. Other threads keep their number, and so do those of a pool,
    even one that is started inside: pass ``num_threads=`` there, or call `set_num_threads`. Contexts may be
    entered several times, overlap, and be left in any order.

    Parameters
    ----------
    num_threads : int or None
        From 1 to 4096; None is OpenMP's own answer, whatever `set_num_threads` says.

    Raises
    ------
    TypeError, ValueError
        If `num_threads` is not an integer from 1 to 4096.

    Notes
    -----
    A generator that yields inside the context leaves its caller in it until it goes on, as with any context variable.
    Free-threaded Python 3.14 starts threads with a copy of the caller's context (``sys.flags.thread_inherit_context``).

    Examples
    --------
    >>> with threads(1):
    ...     get_num_threads()
    1
    """

    def __init__(self, num_threads: int | None):
        self._num_threads = None if num_threads is None else check_num_threads(num_threads)
        self._open: list[_Entry] = []

    def __enter__(self) -> None:
        entry = _Entry(self._num_threads)
        self._open.append(entry)
        _entries.set((*[other for other in _entries.get() if not other.left], entry))

    def __exit__(self, *error: object) -> None:
        entries = _entries.get()
        for entry in reversed(entries):
            if entry in self._open:
                self._open.remove(entry)
                _entries.set(tuple([other for other in entries if other is not entry]))
                return
        self._open.pop().left = True    # entered elsewhere: a generator that another thread has closed
