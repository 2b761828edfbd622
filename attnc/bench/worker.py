"""One contender in a process of its own: it prepares a case and times it when told to, over a connection."""

import importlib
import itertools
import signal
import sys
from contextlib import redirect_stdout
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from attnc.bench import Call, Json, Unsupported, machine
from attnc.bench.cases import copies
from attnc.bench.timing import CROWDED, calibrate, seconds_per_call, settle
from attnc.testing import Case

RETRIES = 5             # samples of a case that may be taken again: a machine that is always busy stays so
LONG_SECONDS = 0.1      # a call this long needs no untimed one before it to wake up the threads


class Contender:
    """The commands a worker answers, as methods."""

    def __init__(self, setup: str, threads: int) -> None:
        module, _, function = setup.partition(":")
        self.setup = getattr(importlib.import_module(module), function)
        self.name = function
        self.threads = threads
        self.repeat, self.seconds, self.retries = 1, 0.0, RETRIES
        self.call: Any = None
        self.limit: Any = None

    def prepare(
            self, case: Any, seed: int, rows: slice | np.ndarray,
            with_limit: bool) -> tuple[list[np.ndarray], int | None]:
        """Set the case up and give what it computes in the given query rows, for the caller to verify."""
        self.call = self.limit = None     # lets go of the last case's arrays first
        arrays, options = case.make(seed)
        setup = self.setup
        if not isinstance(case, Case):                  # it names the module of its contenders
            setup = getattr(importlib.import_module(case.contenders), self.name, None)
        if setup is None:
            raise Unsupported("has no such function")
        calls = [setup(case, each, options, self.threads) for each in copies(case, arrays)]
        self.call = calls[0] if len(calls) == 1 else _in_turns(calls)
        with machine.PeakMemory() as self.peak:
            result = self.call()
        results = result if isinstance(result, (tuple, list)) else (result,)
        chosen = [np.ascontiguousarray(each[..., rows, :]) for each in results]
        if with_limit:
            from attnc.bench.limits import limit_for

            limit = limit_for(case, options)
            self.limit = limit and limit(case, arrays, options, self.threads)
        settle()
        return chosen, self.peak.bytes

    def warm(self) -> Json | None:
        """Find out how often to repeat the call in a sample; gives the name and the work of the limit, if asked for."""
        self.repeat = calibrate(self.call)
        self.seconds = seconds_per_call(self.call, self.repeat)
        self.retries = RETRIES
        settle()
        return self.limit and {"name": self.limit.name, "unit": self.limit.unit, "work": self.limit.work}

    def sample(self) -> Json:
        """The mean time of a call now, between two probes of the limit if there is one.

        A sample whose probes had to share the processors with other processes is taken again, a few times a case.
        """
        while True:
            if self.seconds < LONG_SECONDS:
                self.call()
            before = self.limit and self.limit.probe()
            seconds = seconds_per_call(self.call, self.repeat)
            after = self.limit and self.limit.probe()
            disturbed = bool(self.limit) and min(before["busy"], after["busy"]) < CROWDED
            if not disturbed or not self.retries:
                break
            self.retries -= 1
        quiet = settle()
        return {"seconds": seconds, "before": before, "after": after, "disturbed": disturbed, "quiet": quiet}

    def libraries(self) -> list[str]:
        """The BLAS libraries this contender has loaded."""
        from attnc.bench.machine import blas

        return blas()


def _in_turns(calls: list[Call]) -> Call:
    """One call after another, so that no call finds its inputs in the caches."""
    turn = itertools.cycle(calls)
    return lambda: next(turn)()


def serve(connection: Connection) -> None:
    """Answer commands until the other end closes; what the contender prints goes to standard error."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)    # Ctrl-C is for the parent, which then ends this process
    contender = None
    with redirect_stdout(sys.stderr):
        while True:
            try:
                name, arguments = connection.recv()
            except EOFError:
                return
            try:
                if name == "contender":
                    contender, value = Contender(*arguments), None
                else:
                    value = getattr(contender, name)(*arguments)
                reply = ("done", value)
            except Unsupported as reason:
                reply = ("unsupported", str(reason))
            except Exception as error:
                reply = ("failed", f"{type(error).__name__}: {error}")
            connection.send(reply)
