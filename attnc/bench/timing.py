"""Timing one call: how often to repeat it, how long it takes, and when the process is idle."""

import time
from collections.abc import Callable, Sequence

import numpy as np

from attnc.bench import Json

SAMPLE_SECONDS = 0.02       # a timed sample lasts at least about this long
CROWDED = 0.85              # of the processors: probes that got less were disturbed; the clock errs by a few percent
CALM_SECONDS = 0.004
PATIENCE_SECONDS = 0.5


def seconds_per_call(call: Callable[[], object], repeat: int) -> float:
    """The mean time of `repeat` calls in a row."""
    begin = time.perf_counter()
    for _ in range(repeat):
        call()
    return (time.perf_counter() - begin) / repeat


def calibrate(call: Callable[[], object], target: float = SAMPLE_SECONDS) -> int:
    """How many calls make a sample of `target` seconds; warms the call up on the way."""
    repeat = 1
    while (spent := repeat * seconds_per_call(call, repeat)) < target / 4:
        repeat *= 2
    return max(1, round(repeat * target / spent))


def settle() -> bool:
    """Wait until no thread of this process is running, so that the next contender has the processor to itself.

    Thread pools spin for a while after their work: BLAS for some 25 ms, OpenMP and onnxruntime for less.
    """
    deadline = time.perf_counter() + PATIENCE_SECONDS
    while time.perf_counter() < deadline:
        before = time.process_time()
        time.sleep(CALM_SECONDS)
        if time.process_time() - before < CALM_SECONDS / 10:
            return True
    return False


def spread(values: Sequence[float] | np.ndarray) -> Json:
    """Median, smallest and largest, ready for JSON."""
    return {"median": float(np.median(values)), "min": float(min(values)), "max": float(max(values))}
