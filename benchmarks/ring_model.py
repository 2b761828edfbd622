"""Simulate ring attention on many ranks, message by message, and compare with the formula of docs/scale.md.

    python benchmarks/ring_model.py         # the table of docs/scale.md
"""

import sys
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Network:
    """Bandwidth of each link in bytes/s and the time until a message begins to arrive, in s."""

    name: str
    bandwidth: float
    latency: float


@dataclass(frozen=True)
class Work:
    """A sequence over all ranks, and the rate at which one rank computes, in FLOP/s."""

    length: int
    heads: int
    kv_heads: int
    dim: int
    rate: float
    causal: bool = False
    zigzag: bool = False

    def message(self, ranks: int) -> float:
        """Bytes of the keys and values, in float32, that a rank sends in each step."""
        return 2 * self.kv_heads * self.dim * 4 * self.length / ranks

    def alone(self) -> float:
        """Seconds that one rank needs for everything."""
        return 4 * self.heads * self.dim * self.length**2 * (0.5 if self.causal else 1) / self.rate

    def steps(self, ranks: int) -> np.ndarray:
        """Seconds of each rank (row) in each step (column)."""
        pair = 4 * self.heads * self.dim * (self.length / ranks)**2 / self.rate
        if not self.causal:
            return np.full((ranks, ranks), pair)
        if self.zigzag:
            return np.full((ranks, ranks), pair / 2)
        rank, step = np.ogrid[:ranks, :ranks]
        return np.where(step == 0, pair / 2, np.where(step <= rank, pair, 0.0))


NETWORKS = (Network("10 Gbit/s Ethernet", 1.25e9, 30e-6), Network("100 Gbit/s Ethernet", 12.5e9, 10e-6),
            Network("400 Gbit/s InfiniBand", 50e9, 2e-6))
RANKS = (16, 256, 4096)
# 32 query heads on 8 of 128, at 7 TFLOP/s a rank: 32 cores at the speed that the README's table has for each
WORKS = tuple(Work(length, 32, 8, 128, 7e12, causal=True, zigzag=True) for length in (1 << 17, 1 << 20))


def simulate(work: Work, ranks: int, network: Network) -> float:
    """Seconds until the last rank is done: a step begins when the one before is done and its message is there.

    A rank passes on what it has as soon as it begins with it, and its link carries one message after another.
    """
    compute = work.steps(ranks)
    transfer = work.message(ranks) / network.bandwidth
    begun, free = np.zeros(ranks), np.zeros(ranks)
    done = compute[:, 0].copy()
    for step in range(1, ranks):
        sent = np.maximum(begun, free) + transfer
        free = sent
        arrived = np.roll(sent + network.latency, 1)
        begun = np.maximum(done, arrived)
        done = begun + compute[:, step]
    return float(done.max())


def formula(work: Work, ranks: int, network: Network) -> float:
    """Seconds by docs/scale.md, where all ranks have the same work: one step, and the slower part of each other one."""
    transfer = work.message(ranks) / network.bandwidth + network.latency
    each = work.steps(ranks)[0, 0]
    return each + (ranks - 1) * max(each, transfer)


def table() -> str:
    """Efficiency for each length, network and number of ranks, by the simulation."""
    lines = ["| length | network | " + " | ".join(f"{ranks:,} ranks" for ranks in RANKS) + " |",
             "|---" * (len(RANKS) + 2) + "|"]
    for work in WORKS:
        for network in NETWORKS:
            cells = [f"{work.alone() / ranks / simulate(work, ranks, network):.1%}" for ranks in RANKS]
            lines.append(f"| {work.length:,} | {network.name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
    sys.exit(0)
