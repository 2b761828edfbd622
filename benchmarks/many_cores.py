"""Predict how each case of the benchmark goes on 8 to 128 threads: the plan of that many, its tasks timed one by one.

    python benchmarks/many_cores.py --json benchmarks/results/many_cores.json
    python benchmarks/many_cores.py --validate      # prediction and measurement on 1 and 2 threads

A call is cut as for that many threads and run on one, which times every task (`trace` of the kernels); the tasks then
go in order to the next free of the threads, as the parallel loops do. The model adds the start of each loop, and for
what memory may bind what the traffic of all threads costs each of them (`crowding()`). It leaves out what cannot be
seen on few cores: clocks that fall when all cores work, and shared keys in L3.
"""

import argparse
import heapq
import importlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import hypot, log2
from pathlib import Path

import numpy as np

from attnc._isa import kernels
from attnc.bench import cases, machine
from attnc.bench.cases import copies, reads, wanted
from attnc.bench.cases.dense import DenseWeights
from attnc.bench.cases.links import Softmax
from attnc.bench.worker import _in_turns
from attnc.testing import Case, dtype_of

THREADS = (8, 16, 32, 64, 128)
SOCKET_CORES = 64
SOCKET_BANDWIDTH = 350e9    # bytes/s that a socket of twelve channels DDR5-4800 reads, 460 at most
LINK_BANDWIDTH = 120e9      # bytes/s that a socket reads from the memory of the other
LOOP_SECONDS = 1.5e-6       # to start and to end a parallel loop, times log2 of its threads
OWN_TASKS = 4               # of a thread, up to which a softmax deals them out in turn (softmax.pxi)
CACHED = 32 << 20           # bytes beyond which dense weights go to memory
REPEATS, PATIENCE = 5, 1.5  # traced calls of a plan, and seconds after which the second is the last
PROBES = 100                # of the limits that a validation takes: the best counts
SHARES = 1 << 18            # records of a call


@dataclass(frozen=True)
class Machine:
    """Bandwidth of reading by one thread, in bytes/s, and where the inputs lie if there are two sockets."""

    one: float
    interleaved: bool = False       # over both sockets, as by `numactl --interleave=all`; else on that of the caller

    def bandwidth(self, threads: int) -> float:
        """Bytes/s of a number of threads, which fill one socket before they use the other."""
        if threads <= SOCKET_CORES or not self.interleaved:
            return min(threads * self.one, SOCKET_BANDWIDTH)
        return min(threads * self.one, 2 * min(SOCKET_BANDWIDTH, 2 * LINK_BANDWIDTH))


@dataclass(frozen=True)
class Trace:
    """The seconds of each task of each parallel loop of a call, and those of the call outside of them."""

    loops: list[np.ndarray]
    serial: float
    static: bool = False            # tasks are dealt out in turn, not to the next free thread

    @property
    def total(self) -> float:
        """Seconds on one thread."""
        return self.serial + float(sum(loop.sum() for loop in self.loops))


def contender(case: cases.BenchCase) -> Callable[[int], Callable[[], object]]:
    """attnc's call of this case, as a function of the threads; inputs bound by memory change from call to call."""
    arrays, options = case.make(0)
    module = "attnc.bench.contenders.attention" if isinstance(case, Case) else case.contenders
    setup = importlib.import_module(module).setup_attnc
    inputs = copies(case, arrays)
    return lambda threads: _in_turns([setup(case, each, options, threads) for each in inputs])


def clock_seconds() -> float:
    """What it takes to ask for processor time, as the trace does for each task."""
    times = [time.thread_time() for _ in range(1000)]
    return float(np.median(np.diff(times)))


def traced(call: Callable[[], object], threads: int, case: cases.BenchCase) -> Trace:
    """The tasks of a call cut for `threads` threads, each the fastest of a few runs, in processor time."""
    records, best, serial, clock = np.empty((SHARES, 2)), None, np.inf, clock_seconds()
    began = time.perf_counter()
    try:
        for turn in range(REPEATS):
            kernels.trace(threads, records)
            start = time.thread_time()
            result = call()                 # held: to free it is not the call's work
            took = time.thread_time() - start
            del result
            n = kernels.trace(0)
            if n > SHARES:
                raise ValueError(f"{case.name}: {n} shares of tasks, more than {SHARES}")
            seconds = records[:n, 1].copy()
            serial = min(serial, took - seconds.sum() - n * clock)
            best = seconds if best is None else np.minimum(best, seconds)
            if turn >= 1 and time.perf_counter() - began > PATIENCE:
                break
    finally:
        kernels.trace(0)
    loops = np.split(best, np.flatnonzero(np.diff(records[:n, 0])) + 1) if n else []
    static = isinstance(case, Softmax) and n <= OWN_TASKS * threads
    return Trace(loops, max(serial, 0.0), static)


def makespan(trace: Trace, threads: int, slower: float = 1.0) -> float:
    """Seconds of the call on `threads` threads, each of which takes `slower` times as long for a task as one alone."""
    total = trace.serial
    for loop in trace.loops:
        taken = min(threads, len(loop))
        free = [0.0] * taken
        for i, seconds in enumerate(loop * (slower if taken > 1 else 1)):
            if trace.static:
                free[i % taken] += seconds
            else:
                heapq.heapreplace(free, free[0] + seconds)
        total += max(free) + (LOOP_SECONDS * log2(taken) if taken > 1 else 0)
    return total


def traffic(case: cases.BenchCase) -> tuple[float, float]:
    """Bytes that a call reads from memory and writes to it, where that may bind it; else 0 and 0."""
    if isinstance(case, Softmax):
        return case.bytes * case.reads, case.bytes if case.reads else 0
    if reads(case):
        return case.bytes, 0
    inner = getattr(case, "case", case)
    if isinstance(case, DenseWeights) or (isinstance(case, Case) and "weights" in wanted(dict(case.options))):
        size = inner.batch * inner.q_heads * inner.q_len * inner.kv_len * dtype_of(inner.dtype).itemsize
        return 0, size if size > CACHED else 0
    return 0, 0


def crowding(read: float, written: float, alone: float, threads: int, bandwidth: float) -> float:
    """How many times as long a task takes when several threads move what one alone moves in `alone` seconds.

    Their reads take the share u of what memory gives: u = threads * read / alone / bandwidth. A task has its own time
    and time in which it waits for a line behind those of other threads, the longer the more there are: together
    sqrt(1 + u**2), which is 1.06 at a third and u where memory is all. (The larger of 1 and u, as if no thread waited
    before memory is full, predicts 5 to 30 % too little for decoding on two threads.) No thread waits for a
    non-temporal store, but it takes bandwidth.
    """
    if threads == 1:
        return 1.0
    share = threads / alone / bandwidth
    return max(hypot(1.0, share * read), share * (read + written))


def predicted(case: cases.BenchCase, one: Trace, trace: Trace, threads: int, place: Machine) -> dict:
    """Makespan, and its share of the ideal: the time of one thread over theirs, or that of memory if it is longer."""
    moved, bandwidth = traffic(case), place.bandwidth(threads)
    seconds = makespan(trace, threads, crowding(*moved, one.total, threads, bandwidth))
    ideal = max(one.total / threads, sum(moved) / bandwidth)
    return {"seconds": seconds, "share": ideal / seconds}


def simulate(chosen: tuple[cases.BenchCase, ...]) -> Iterator[dict]:
    """Every case on every number of threads."""
    memory = np.ones(1 << 25)
    place = Machine(max(kernels.read_bandwidth(memory, 1) for _ in range(20)))
    for case in chosen:
        call = contender(case)(1)
        call()
        one, entry = traced(call, 1, case), {}
        for threads in THREADS:
            trace = traced(call, threads, case)
            entry[threads] = predicted(case, one, trace, threads, place)
            if threads > SOCKET_CORES and any(traffic(case)):
                spread = predicted(case, one, trace, threads, Machine(place.one, interleaved=True))
                entry[threads]["interleaved"] = spread["seconds"]
        print(f"{case.name}: " + ", ".join(f"{n}: {each['share']:.0%}" for n, each in entry.items()), flush=True)
        yield {"name": case.name, "gflop": getattr(case, "flops", 0) / 1e9, "seconds": one.total,
               "memory": any(traffic(case)), "make": machine.make(),
               "threads": {str(n): each for n, each in entry.items()}}


def validate(chosen: tuple[cases.BenchCase, ...], seconds: float) -> list[dict]:
    """The makespan on 1 and 2 threads as predicted, and the fastest of the calls made in `seconds`."""
    memory, found = np.ones(1 << 25), []
    peak, bandwidth = ({n: max(probe(n) for _ in range(PROBES)) for n in (1, 2)} for probe in (
        lambda n: kernels.fma_peak("float32", n), lambda n: kernels.read_bandwidth(memory, n)))
    for case in chosen:
        make = contender(case)
        calls = {n: make(n) for n in (1, 2)}
        for call in calls.values():
            call()
        one, two = traced(calls[1], 1, case), traced(calls[1], 2, case)
        moved = traffic(case)
        slower = crowding(*moved, one.total, 2, bandwidth[2]) if any(moved) else 2 * peak[1] / peak[2]
        expected = {1: one.total, 2: makespan(two, 2, slower)}
        best, end = {1: np.inf, 2: np.inf}, time.perf_counter() + seconds
        while time.perf_counter() < end or np.inf in best.values():
            for n, call in calls.items():
                start = time.perf_counter()
                call()
                best[n] = min(best[n], time.perf_counter() - start)
        off = {n: expected[n] / best[n] - 1 for n in best}
        found.append({"name": case.name, "memory": any(moved), "off": off})
        print(f"{case.name}: " + ", ".join(f"{n} threads {1e6 * expected[n]:,.0f} us predicted, {1e6 * best[n]:,.0f} "
                                           f"measured ({off[n]:+.0%})" for n in best), flush=True)
    return found


def table(result: dict) -> str:
    """The share of the ideal of every case, by threads."""
    makes = sorted({case["make"] for case in result["cases"]})
    lines = ["| case | GFLOP | bound by | " + " | ".join(f"{n} threads" for n in THREADS) + " | 128, interleaved |",
             "|---" * (len(THREADS) + 4) + "|"]
    for case in result["cases"]:
        of = case["threads"]
        last = of[str(THREADS[-1])]
        spread = f"{last['seconds'] / last['interleaved']:.1f} x" if "interleaved" in last else ""
        lines.append(f"| {case['name']} | {case['gflop']:.3g} | {'memory' if case['memory'] else 'products'} | "
                     + " | ".join(f"{of[str(n)]['share']:.0%}" for n in THREADS) + f" | {spread} |")
    return "\n".join([*lines, "", f"Tasks timed on {' and '.join(makes)}."])


def validation(result: dict) -> str:
    """How the predictions for 1 and 2 threads agree with what was measured, and which cases they miss."""
    found = result.get("validation", {}).get("cases", [])
    if not found:
        return "Not validated on a quiet machine yet."
    memory = [case for case in found if case["memory"]]
    missed = {case["name"]: case["off"] for case in found if not within(case)}
    listed = "; ".join(f"{name} ({', '.join(f'{off:+.0%} on {n}' for n, off in each.items())})"
                       for name, each in missed.items())
    near = f"{len(found) - len(missed)} of {len(found)} cases are within 5 % on both"
    return (f"Validated on 1 and 2 threads of {result['validation']['make']}: {near}, of the {len(memory)} that memory "
            f"binds {sum(map(within, memory))}." + (f" Missed (predicted over measured): {listed}." if missed else ""))


def within(case: dict) -> bool:
    """Whether the prediction is within 5 % on 1 and on 2 threads."""
    return all(abs(off) <= 0.05 for off in case["off"].values())


def replace(result: dict, found: list[dict], names: list[str]) -> None:
    """Put cases in the place of earlier ones of the same name, all in the order of `names`."""
    known = {case["name"]: case for case in (*result.get("cases", []), *found)}
    result["cases"] = [known[name] for name in names if name in known]


def save(result: dict, file: Path | None) -> None:
    if file:
        file.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the predictions, and the validation if it was made")
    parser.add_argument("--cases", metavar="PATTERN", help="only cases whose name holds this")
    parser.add_argument("--set", choices=tuple(cases.SETS), default="full")
    parser.add_argument("--validate", action="store_true", help="compare predictions with measurements")
    parser.add_argument("--seconds", type=float, default=4.0, help="of measuring for each case that is validated")
    options = parser.parse_args(arguments)
    chosen = cases.select(options.set, options.cases)
    result = json.loads(options.json.read_text(encoding="utf-8")) if options.json and options.json.exists() else {}
    names = [each.name for each in cases.SETS[options.set]]
    if options.validate:
        found = validate(chosen, options.seconds)
        print(f"{sum(map(within, found))} of {len(chosen)} cases within 5 % on both")
        if result.get("validation", {}).get("make") != machine.make():
            result["validation"] = {"make": machine.make(), "cases": []}
        replace(result["validation"], found, names)
    else:
        for entry in simulate(chosen):
            replace(result, [entry], names)
            save(result, options.json)
    save(result, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
