"""Packed sequences of many lengths, one after another in memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from attnc import reference
from attnc.bench import Arrays, Json, Options
from attnc.bench.cases.attention import SHORT, case
from attnc.testing import Case, error_and_tolerance, exact_attention, standard_normal


@dataclass(frozen=True)
class Packed:
    """`attention_varlen`: the lengths of each sequence, and the heads that all have."""

    words: str
    q_lengths: tuple[int, ...]
    kv_lengths: tuple[int, ...]
    q_heads: int
    kv_heads: int
    head_dim: int
    causal: bool = False
    dtype: str = "float32"
    contenders = "attnc.bench.contenders.packed"

    @property
    def options(self) -> tuple[tuple[str, bool], ...]:
        return (("causal", True),) if self.causal else ()

    @property
    def name(self) -> str:
        heads = f"{self.q_heads}/{self.kv_heads}" if self.q_heads != self.kv_heads else self.q_heads
        return f"{SHORT[self.dtype]} {len(self.q_lengths)} sequences,{heads},{self.head_dim} {self.words}"

    @property
    def flops(self) -> int:
        return sum(each.flops for each in self.alone())

    def alone(self) -> list[Case]:
        """Each sequence as a case of its own."""
        heads = self.q_heads, self.kv_heads
        return [case(1, heads, rows, keys, self.head_dim, self.dtype, **dict(self.options))
                for rows, keys in zip(self.q_lengths, self.kv_lengths, strict=True)]

    def describe(self) -> Json:
        """Its sizes for the JSON file."""
        names = ("q_heads", "kv_heads", "head_dim", "causal", "flops")
        return {name: getattr(self, name) for name in names} | {
            "q_lengths": list(self.q_lengths), "kv_lengths": list(self.kv_lengths)}

    def make(self, seed: int) -> tuple[Arrays, Options]:
        """Tokens ``(tokens, heads, dim)`` of query, key and value, and the bounds of the sequences."""
        random = np.random.default_rng(seed)
        tokens = (sum(self.q_lengths), self.q_heads), *((sum(self.kv_lengths), self.kv_heads),) * 2
        arrays = [standard_normal(random, (*shape, self.head_dim), self.dtype) for shape in tokens]
        bounds = [np.cumsum((0, *lengths)) for lengths in (self.q_lengths, self.kv_lengths)]
        return (*arrays, *bounds), dict(self.options)

    def expected(self, seed: int) -> "Expected":
        """What a contender has to give: an output of each sequence."""
        arrays, options = self.make(seed)
        each = [[x[None] for x in three] for three in sequences(arrays)]
        return Expected([exact_attention(*three, **options).output[0] for three in each],
                        [reference.attention(*three, **options)[0] for three in each], float(abs(arrays[2]).max()))


@dataclass(frozen=True)
class Paged(Packed):
    """One new token of each sequence, on keys and values in the pages of a `PagedKVCache`."""

    page: int = 16
    q_len = 1       # of a sequence: memory decides

    @property
    def name(self) -> str:
        return f"{super().name}, pages of {self.page}"

    @property
    def bytes(self) -> int:
        """Of keys, values, query and output."""
        return sum(each.bytes for each in self.alone())

    def describe(self) -> Json:
        """As `Packed.describe`, with the tokens of a page."""
        return super().describe() | {"page": self.page}


def paged(page: int, q_heads: int, kv_heads: int, head_dim: int, kv_lengths: tuple[int, ...]) -> Paged:
    """The case of new tokens on these many keys."""
    words = f"on {min(kv_lengths):,} to {max(kv_lengths):,} keys"
    return Paged(words, (1,) * len(kv_lengths), kv_lengths, q_heads, kv_heads, head_dim, page=page)


def sequences(arrays: Arrays) -> list[list[np.ndarray]]:
    """Query, key and value of each sequence as ``(heads, length, dim)``."""
    query, key, value, *bounds = arrays
    ends = [list(pairwise(bound)) for bound in bounds]
    return [[x[slice(*at)].swapaxes(0, 1) for x, at in zip((query, key, value), (rows, keys, keys), strict=True)]
            for rows, keys in zip(*ends, strict=True)]


@dataclass
class Expected:
    """The exact and the honest output of each sequence."""

    exact: list[np.ndarray]
    honest: list[np.ndarray]
    scale: float
    rows = slice(None)

    def judge(self, results: Sequence[np.ndarray]) -> tuple[float, float]:
        """The error and the tolerance of the worst of the sequences."""
        pairs = [error_and_tolerance(*three, scale=self.scale)
                 for three in zip(results, self.exact, self.honest, strict=True)]
        return max(pairs, key=lambda pair: pair[0] / pair[1])
