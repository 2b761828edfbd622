"""How many threads a call uses: its argument, the default, ATTNC_NUM_THREADS, or what OpenMP and the cgroup allow."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator

from . import _isa
from ._checks import check_num_threads


def _cgroup_limit() -> int:
    """Processors that the quota of this process's cgroup pays for, rounded up; a large number if there is none."""
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


_CGROUP_LIMIT = _cgroup_limit()
_default: int | None = _from_environment()


def resolve(num_threads: int | None) -> tuple[int, bool]:
    """The number of threads of a call, and whether it was asked for in that call.

    A negative number is the most that OpenMP's own answer may be: only calls worth sharing ask for that.
    """
    if num_threads is not None:
        return num_threads, True
    return -_CGROUP_LIMIT if _default is None else _default, False


def get_num_threads() -> int:
    """Threads that a call uses when it is not given ``num_threads``.

    Returns
    -------
    int
        What `set_num_threads` or ``ATTNC_NUM_THREADS`` set, otherwise OpenMP's own answer at this moment
        (``OMP_NUM_THREADS``, threadpoolctl), at most the processors that affinity and the cgroup's quota allow.
        A call takes fewer while other calls of this process are at work.

    Examples
    --------
    >>> get_num_threads() >= 1
    True
    """
    return _default if _default is not None else min(_isa.kernels.threads_now(), _CGROUP_LIMIT)


def set_num_threads(num_threads: int | None) -> None:
    """Set the default number of threads for all calls of this process; None gives it back to OpenMP.

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


@contextlib.contextmanager
def threads(num_threads: int | None) -> Iterator[None]:
    """A context in which `set_num_threads(num_threads)` holds.

    Examples
    --------
    >>> with threads(1):
    ...     get_num_threads()
    1
    """
    before = _default
    set_num_threads(num_threads)
    try:
        yield
    finally:
        set_num_threads(before)
