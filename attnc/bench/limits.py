"""What this machine can do at most, measured next to each case: arithmetic, reading, or what a simpler call takes."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np

import attnc
from attnc._isa import kernels
from attnc.bench import Arrays, Json, Options
from attnc.bench.cases.attention import ADDED, MEMORY_BYTES, DrawnCase, reads, wanted
from attnc.bench.cases.caches import Mapped, again
from attnc.bench.cases.dense import DenseWeights
from attnc.bench.cases.links import Softmax
from attnc.bench.timing import calibrate, seconds_per_call

PROBES = 3                  # at a time, of which the best counts
ALLOWED = {"mask": 1.15, "bias": 1.25, "relative_bias": 1.1}      # times the call without it


def _best(threads: int, function: Callable[..., float], *arguments: Any) -> Json:
    """The highest rate of a few probes, and the fraction of `threads` processors that they had to themselves.

    A probe that another process interrupts says too little of the machine, which would flatter the share.
    """
    wall, own = time.perf_counter(), time.process_time()
    rate = max(function(*arguments, threads) for _ in range(PROBES))
    return {"rate": rate, "busy": (time.process_time() - own) / ((time.perf_counter() - wall) * threads)}


class Arithmetic:
    """Fused multiply-adds in the chosen instruction set, or dot products of bfloat16 where it has them: FLOP/s."""

    name, unit = "fma", "FLOP/s"

    def __init__(self, case: Any, arrays: Arrays, options: Options, threads: int) -> None:
        self.work = case.flops
        self.dtype = "float32" if case.dtype == "float16" else case.dtype
        self.threads = threads

    def probe(self) -> Json:
        return _best(self.threads, kernels.fma_peak, self.dtype)


class Reading:
    """Reading memory once, as far as attention with few rows must: bytes/s."""

    name, unit = "read", "B/s"
    _memory = None

    def __init__(self, case: Any, arrays: Arrays, options: Options, threads: int) -> None:
        self.work = case.bytes
        self.threads = threads
        if Reading._memory is None:
            Reading._memory = np.ones(MEMORY_BYTES // 8)

    def probe(self) -> Json:
        return _best(self.threads, kernels.read_bandwidth, self._memory)


class Plain:
    """The time that a mask or a bias may take, as a multiple of the call without it: calls/s."""

    name, unit = "plain", "calls/s"
    work = 1

    def __init__(self, case: Any, arrays: Arrays, options: Options, threads: int) -> None:
        rest = {name: value for name, value in options.items() if name not in (*ADDED, "want")}
        self.call = lambda: attnc.attention(*arrays, num_threads=threads, **rest)
        self.case, self.threads = case, threads
        self.dtype = arrays[0].dtype
        self.repeat = 0

    def probe(self) -> Json:
        # A call is not all parallel, so whether the processors are free is seen by arithmetic.
        busy = _best(self.threads, kernels.fma_peak, "float32")["busy"]
        self.repeat = self.repeat or calibrate(self.call)
        plain = min(seconds_per_call(self.call, self.repeat) for _ in range(PROBES))
        return {"busy": busy, "plain": plain} | self.allowed(plain)

    def allowed(self, plain: float) -> Json:
        """The rate that is allowed where the plain call takes `plain` seconds, and what else was measured for it."""
        return {"rate": 1 / (ALLOWED[self.case.drawn] * plain)}


class Weights(Plain):
    """The time the weights may take: 1.1 times the call without them and 1.3 times filling such an array: calls/s.

    The array is a new one, as it is for every call that returns weights; `fill_again` is the same array once more,
    which counts where the memory of the weights is used again.
    """

    name = "weights"

    def __init__(self, case: Any, arrays: Arrays, options: Options, threads: int) -> None:
        super().__init__(getattr(case, "case", case), arrays, options, threads)
        self.again = isinstance(case, DenseWeights)

    def allowed(self, plain: float) -> Json:
        fills = []
        for _ in range(PROBES):
            array = np.empty((self.case.batch, self.case.q_heads, self.case.q_len, self.case.kv_len), self.dtype)
            fills.append((kernels.fill(array, self.threads), kernels.fill(array, self.threads)))
        fill, again = min(fills)
        rate = 1 / (1.1 * plain + 1.3 * (again if self.again else fill))
        return {"rate": rate, "fill": fill, "fill_again": again}


class Streaming:
    """Copying the input past the caches, after one more reading where a row is longer than the L2 cache: calls/s."""

    name, unit = "stream", "calls/s"
    work = 1

    def __init__(self, case: Any, arrays: Arrays, options: Options, threads: int) -> None:
        self.input, self.reads, self.threads = arrays[0].view(np.uint8), case.reads, threads
        self.output = np.empty_like(self.input)

    def probe(self) -> Json:
        read = _best(self.threads, kernels.read_bandwidth, self.input)
        copy = min(kernels.copy(self.input, self.output, self.threads) for _ in range(PROBES))
        return read | {"rate": 1 / ((self.reads - 1) * self.input.nbytes / read["rate"] + copy), "copy": copy}


class FileReading:
    """Reading the file of a case through new memory maps: bytes/s."""

    name, unit = "file", "B/s"

    def __init__(self, case: Any, arrays: Arrays, options: Options, threads: int) -> None:
        self.work, self.maps, self.threads = case.bytes, arrays[1:], threads

    def probe(self) -> Json:
        wall, own = time.perf_counter(), time.process_time()
        seconds = min(self._seconds() for _ in range(PROBES))
        busy = (time.process_time() - own) / ((time.perf_counter() - wall) * self.threads)
        return {"rate": self.work / seconds, "busy": busy}

    def _seconds(self) -> float:
        began = time.perf_counter()
        for mapped in self.maps:
            kernels.read_bandwidth(again(mapped), self.threads)
        return time.perf_counter() - began


def limit_for(case: Any, options: Options) -> type[Arithmetic | Reading | Plain | Streaming | FileReading] | None:
    """The class of the limit that binds a case; None for a softmax that stays in cache, where no single one does."""
    if isinstance(case, Softmax):
        return Streaming if case.reads else None
    if isinstance(case, Mapped):
        return FileReading
    if isinstance(case, DrawnCase) and case.drawn in ALLOWED:
        return Plain
    if isinstance(case, DenseWeights) or "weights" in wanted(options):
        return Weights
    return Reading if reads(case) else Arithmetic
