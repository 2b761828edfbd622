"""What this machine can do at most, measured next to each case: arithmetic, reading, or filling the weights."""

import numpy as np

import attnc
from attnc._isa import kernels
from attnc.bench.cases import rows_per_key, wanted
from attnc.bench.timing import calibrate, seconds_per_call

MEMORY_BYTES = 1 << 28      # beyond every cache
FEW_ROWS = 16               # below this many rows a key, fetching it from memory costs more than using it


class Arithmetic:
    """Fused multiply-adds of the accumulation type in the chosen instruction set: FLOP/s."""

    name, unit = "fma", "FLOP/s"

    def __init__(self, case, arrays, options, threads):
        self.work = case.flops
        self.dtype = "float64" if case.dtype == "float64" else "float32"
        self.threads = threads

    def probe(self) -> dict:
        return {"rate": kernels.fma_peak(self.dtype, self.threads)}


class Reading:
    """Reading memory once, as far as attention with few rows must: bytes/s."""

    name, unit = "read", "B/s"
    _memory = None

    def __init__(self, case, arrays, options, threads):
        self.work = case.bytes
        self.threads = threads
        if Reading._memory is None:
            Reading._memory = np.ones(MEMORY_BYTES // 8)

    def probe(self) -> dict:
        return {"rate": kernels.read_bandwidth(self._memory, self.threads)}


class Weights:
    """The time the weights may take: 1.1 times the call without them and 1.3 times filling such an array: calls/s.

    The array is a new one, as it is for every call that returns weights; `fill_again` is the same array once more.
    """

    name, unit = "weights", "calls/s"
    work = 1

    def __init__(self, case, arrays, options, threads):
        plain = {name: value for name, value in options.items() if name != "want"}
        self.call = lambda: attnc.attention(*arrays, num_threads=threads, **plain)
        self.shape = (case.batch, case.q_heads, case.q_len, case.kv_len)
        self.dtype = arrays[0].dtype
        self.threads = threads
        self.repeat = None

    def probe(self) -> dict:
        self.repeat = self.repeat or calibrate(self.call)
        plain = seconds_per_call(self.call, self.repeat)
        fresh = np.empty(self.shape, self.dtype)
        fill = kernels.fill(fresh, self.threads)
        again = kernels.fill(fresh, self.threads)
        return {"rate": 1 / (1.1 * plain + 1.3 * fill), "plain": plain, "fill": fill, "fill_again": again}


def limit_for(case, options):
    """The class of the limit that binds a case."""
    if "weights" in wanted(options):
        return Weights
    return Reading if rows_per_key(case) < FEW_ROWS else Arithmetic
