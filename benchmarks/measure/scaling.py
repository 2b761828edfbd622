"""How speed and memory go with threads, with callers at the same time, and with the length.

    python benchmarks/scaling.py --json benchmarks/results/scaling.json
"""

import contextvars
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import attnc
from attnc._isa import kernels
from attnc.bench import Arrays, Call, Json, Options, cases, machine, report
from attnc.bench.timing import CROWDED, calibrate, seconds_per_call, spread
from attnc.testing import Case
from measure import script

CALLERS = 8
PROBES = 3                          # at a time, of which the best counts
RETRIES = 5                         # samples of a case that may be taken again because others used the processors
LONG_SECONDS = 1                    # a call this long is measured once


@dataclass(frozen=True)
class ScalingCase:
    """What is measured of a case: ``"threads"``, ``"callers"`` (this many calls of each of them), or ``"growth"``."""

    kind: str
    case: Case
    calls: int = 0

    @property
    def name(self) -> str:
        return f"{self.kind}: {self.case.name}"


def _threads(*heads_and_lengths: tuple[int, int, Options]) -> tuple[Any, ...]:
    return tuple(ScalingCase("threads", cases.case(1, heads, length, length, 64, **options))
                 for heads, length, options in heads_and_lengths)


def _growth(*lengths: int) -> tuple[Any, ...]:
    return tuple(ScalingCase("growth", cases.case(1, 1, length, length, 64, causal=True)) for length in lengths)


CASES = (
    *_threads((1, 1024, {}), (2, 1024, {}), (3, 1024, {}), (1, 2048, {}), (2, 4096, {}), (1, 2048, {"causal": True}),
              (2, 2048, {"causal": True}), (3, 2048, {"causal": True}), (1, 4096, {"causal": True})),
    ScalingCase("callers", cases.case(1, 4, 16, 16, 32), 3000),
    ScalingCase("callers", cases.case(1, 4, 128, 128, 64), 400),
    ScalingCase("callers", cases.case(1, 8, 256, 256, 64), 100),
    ScalingCase("callers", cases.case(1, 8, 1, 4096, 64), 100),
    ScalingCase("callers", cases.case(1, 12, 1024, 1024, 64), 4),
    *_growth(4096, 8192, 16384, 32768, 65536, 131072, 262144),
)
TINY = *_threads((1, 64, {})), ScalingCase("callers", cases.case(1, 2, 9, 9, 8), 3), *_growth(32, 64)


def measure(chosen: Sequence[ScalingCase], threads: int, rounds: int) -> Json:
    """Every case in rounds; a result ready for JSON."""
    ways = {"threads": _scaling, "callers": _together, "growth": _length}
    found = [{"name": each.name, "kind": each.kind, **ways[each.kind](each, threads, rounds)} for each in chosen]
    return {**machine.describe(threads), "settings": {"rounds": rounds, "callers": CALLERS}, "cases": found,
            "passed": True}


def _share(case: Case, call: Call, threads: int, repeat: int, warm: bool = True) -> tuple[Any, ...]:
    """Seconds of a call, and its rate over that of multiply-and-adds before and after it, on a number of threads."""
    for _ in range(RETRIES):
        wall, own = time.perf_counter(), time.process_time()
        before = max(kernels.fma_peak("float32", threads) for _ in range(PROBES))
        busy = (time.process_time() - own) / ((time.perf_counter() - wall) * threads)
        if warm:
            call()
        seconds = seconds_per_call(call, repeat)
        after = max(kernels.fma_peak("float32", threads) for _ in range(PROBES))
        if busy > CROWDED or seconds > LONG_SECONDS:
            break
    return seconds, case.flops / seconds / ((before + after) / 2)


def _scaling(each: ScalingCase, threads: int, rounds: int) -> Json:
    """The speed of all threads over that of one, each as a share of what multiply-and-adds reach with as many."""
    arrays, options = each.case.make(0)
    counts = 1, threads
    calls = [lambda n=n: attnc.attention(*arrays, num_threads=n, **options) for n in counts]
    repeats = [calibrate(call) for call in calls]
    taken = np.array([[_share(each.case, *both) for both in zip(calls, counts, repeats, strict=True)]
                      for _ in range(rounds)])
    seconds, shares = taken[..., 0], taken[..., 1]
    return {"share": [float(np.median(share)) for share in shares.T],
            "speedup": spread(seconds[:, 0] / seconds[:, 1]),
            "of_probe": spread(shares[:, 1] / shares[:, 0])}


def _together(each: ScalingCase, threads: int, rounds: int) -> Json:
    """The throughput of threads of Python that call at the same time over that of the same calls one after another.

    One after another they take turns too, so that either way a cache holds the inputs of all callers or of none.
    """
    inputs = [each.case.make(seed) for seed in range(CALLERS)]

    def work(arrays: Arrays, options: Options, start: threading.Barrier) -> None:
        start.wait()
        for _ in range(each.calls):
            attnc.attention(*arrays, **options)

    def alone() -> float:
        begin = time.perf_counter()
        for _ in range(each.calls):
            for arrays, options in inputs:
                attnc.attention(*arrays, **options)
        return time.perf_counter() - begin

    def together() -> float:
        start = threading.Barrier(CALLERS + 1)
        callers = [threading.Thread(target=contextvars.copy_context().run, args=(work, *given, start))
                   for given in inputs]      # in the context below
        for caller in callers:
            caller.start()
        start.wait()
        begin = time.perf_counter()
        for caller in callers:
            caller.join()
        return time.perf_counter() - begin

    with attnc.threads(threads):
        alone()
        taken = np.array([(alone(), together()) for _ in range(rounds)])
    return {"seconds": float(np.median(taken[:, 0])) / (CALLERS * each.calls),
            "throughput": spread(taken[:, 0] / taken[:, 1])}


def _length(each: ScalingCase, threads: int, rounds: int) -> Json:
    """The share of the peak, the same at every length if time grows as the work, and the memory beside the inputs."""
    arrays, options = each.case.make(0)

    def call() -> Any:
        return attnc.attention(*arrays, num_threads=threads, **options)

    with machine.PeakMemory() as peak:
        seconds, share = _share(each.case, call, threads, 1, warm=False)
    shares = [share]
    if seconds < LONG_SECONDS:
        repeat = calibrate(call)
        shares = [_share(each.case, call, threads, repeat)[1] for _ in range(rounds)]
    return {"seconds": seconds, "memory": peak.bytes, "inputs": sum(array.nbytes for array in arrays),
            "share": spread(shares)}


def table(result: Json) -> str:
    """A table for each kind."""
    kinds = "threads", "callers", "growth"
    found = {kind: [case for case in result["cases"] if case["kind"] == kind] for kind in kinds}
    names = {case["name"]: case["name"].partition(": ")[2] for case in result["cases"]}
    threads = result["machine"]["threads"]
    return "\n\n".join([
        report.table(["case", "share, 1 thread", f"share, {threads} threads", "speedup", "of the probe's"], [
            [names[case["name"]], *(f"{share:.0%}" for share in case["share"]), f"{case['speedup']['median']:.2f}",
             f"{case['of_probe']['median']:.2f} ({case['of_probe']['min']:.2f})"] for case in found["threads"]]),
        report.table(["case", "one call, us", f"throughput of {CALLERS} callers over one"], [
            [names[case["name"]], f"{case['seconds'] * 1e6:.1f}",
             f"{case['throughput']['median']:.2f} ({case['throughput']['min']:.2f})"] for case in found["callers"]]),
        report.table(["case", "seconds", "share", "MB beside the inputs' MB"], [
            [names[case["name"]], f"{case['seconds']:.4f}", f"{case['share']['median']:.0%}",
             f"{(case['memory'] or 0) / 1e6:.1f} beside {case['inputs'] / 1e6:.1f}"] for case in found["growth"]]),
    ])


def main(arguments: list[str] | None = None) -> int:
    return script.run(__doc__, CASES, TINY, measure, table, arguments)
