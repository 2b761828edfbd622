"""Measure ring attention: ``mpiexec -n 2 python benchmarks/ring.py``, a thread for each rank; JSON on standard output.

Efficiency is the time of one rank doing all the work alone over what `ranks` of them take together times their number.
The time of communication alone is measured by the same messages without any attention; overlap is the part of it that
the ring hides behind the computation.
"""

import json
import sys
import time

import numpy as np
from mpi4py import MPI

import attnc
from attnc._checks import attention_args
from attnc.integrations.mpi import _Ring, ring_attention, scatter

ROUNDS = 7
CASES = (       # length, heads, kv heads, dim, causal
    (4096, 16, 4, 64, False), (4096, 16, 4, 64, True), (16384, 8, 8, 64, True))


def median(comm, function, rounds=ROUNDS):
    """The median over rounds of the time of the slowest rank."""
    times = []
    for _ in range(rounds):
        comm.Barrier()
        began = time.perf_counter()
        function()
        times.append(comm.allreduce(time.perf_counter() - began, MPI.MAX))
    return float(np.median(times))


def measure(comm, length, heads, kv_heads, dim, causal):
    order = "zigzag" if causal else "contiguous"
    random = np.random.default_rng(0)
    arrays = [random.standard_normal((n, length, dim), np.float32) for n in (heads, kv_heads, kv_heads)]
    query, key, value = (scatter(comm, x, order) for x in arrays)

    def alone():
        if comm.rank == 0:
            attnc.attention(*arrays, causal=causal, num_threads=1)

    def messages():
        ring = _Ring(comm, "messages", order, lambda: attention_args(query, key, value, causal=causal))
        ring.turn(lambda held, arrays: None, [key, value])

    got = ring_attention(comm, query, key, value, causal=causal, order=order, num_threads=1)
    np.testing.assert_allclose(got, scatter(comm, attnc.attention(*arrays, causal=causal), order), atol=2e-6)
    whole, sent = median(comm, alone), median(comm, messages)
    ring = median(comm, lambda: ring_attention(comm, query, key, value, causal=causal, order=order, num_threads=1))
    computed = whole / comm.size
    return {"length": length, "heads": heads, "kv_heads": kv_heads, "dim": dim, "causal": causal, "ranks": comm.size,
            "efficiency": computed / ring, "messages": sent / ring,
            "overlap": float(np.clip((computed + sent - ring) / sent, 0, 1))}


def main() -> int:
    found = [measure(MPI.COMM_WORLD, *case) for case in CASES]
    if MPI.COMM_WORLD.rank == 0:
        print(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
