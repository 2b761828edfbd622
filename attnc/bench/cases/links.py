"""Cases of the links of the chain that are functions of their own: softmax and weighted sum."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np

from attnc import reference
from attnc._types import Shape
from attnc.bench import Arrays, Json, Options
from attnc.bench.cases.attention import SHORT
from attnc.testing import dtype_of, error_and_tolerance, standard_normal

CONTENDERS = "attnc.bench.contenders.links"
ROWS = 8            # that are verified along the last axis but one, where the softmax does not run along it
CACHE_BYTES = 4 << 20   # input and output of a call that stays in the caches, the last one at the latest
WIDE_ROW = 1 << 20  # bytes of a row beyond the second-level cache, which is read a second time


@dataclass(frozen=True)
class Softmax:
    """A softmax or log-softmax of a whole array along one axis, into an array that is there."""

    shape: Shape
    axis: int = -1
    dtype: str = "float32"
    function: str = "softmax"
    options: tuple[()] = field(default=(), init=False)
    contenders = CONTENDERS

    @property
    def name(self) -> str:
        shape = ",".join(map(str, self.shape))
        return f"{SHORT[self.dtype]} {self.function} {shape}" + ("" if self.axis == -1 else f" axis {self.axis}")

    @property
    def bytes(self) -> int:
        """Of the input; the output has as many."""
        return int(prod(self.shape) * dtype_of(self.dtype).itemsize)

    @property
    def reads(self) -> int:
        """How often the input has to come from memory; 0 where it is in cache."""
        if 2 * self.bytes <= CACHE_BYTES:
            return 0
        wide = self.axis == -1 and self.shape[-1] * dtype_of(self.dtype).itemsize > WIDE_ROW
        return 2 if wide else 1

    def describe(self) -> Json:
        """Its sizes for the JSON file."""
        return {"shape": list(self.shape), "axis": self.axis, "bytes": self.bytes}

    def make(self, seed: int) -> tuple[Arrays, Options]:
        """One array of standard normal numbers, and no options."""
        return (standard_normal(np.random.default_rng(seed), self.shape, self.dtype),), {}

    def expected(self, seed: int) -> "Expected":
        """What a contender has to give."""
        (x,), _ = self.make(seed)
        rows: slice | np.ndarray = slice(None)
        if self.axis == -1:
            rows = np.unique(np.linspace(0, x.shape[-2] - 1, ROWS).astype(np.intp))
        function, x = getattr(reference, self.function), x[..., rows, :]
        wide = np.longdouble if self.dtype == "float64" else np.float64
        logarithm = _log_softmax(x.astype(wide), self.axis)
        exact = np.exp(logarithm) if self.function == "softmax" else logarithm
        return Expected(rows, exact, function(x, self.axis), 1.0 if self.function == "softmax" else abs(exact).max())


@dataclass(frozen=True)
class WeightedSum:
    """Dense weights times values, over grouped heads."""

    q_heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    value_dim: int
    dtype: str = "float32"
    options: tuple[()] = field(default=(), init=False)
    contenders = CONTENDERS

    @property
    def name(self) -> str:
        value = f"{self.kv_heads},{self.kv_len},{self.value_dim}"
        return f"{SHORT[self.dtype]} weighted_sum {self.q_heads},{self.q_len},{self.kv_len} x {value}"

    @property
    def flops(self) -> int:
        return 2 * self.q_heads * self.q_len * self.kv_len * self.value_dim

    def describe(self) -> Json:
        """Its sizes for the JSON file."""
        return {"q_heads": self.q_heads, "kv_heads": self.kv_heads, "q_len": self.q_len, "kv_len": self.kv_len,
                "value_dim": self.value_dim, "flops": self.flops}

    def make(self, seed: int) -> tuple[Arrays, Options]:
        """Weights, whose rows sum to 1, and standard normal values; no options."""
        random = np.random.default_rng(seed)
        weights = random.random((self.q_heads, self.q_len, self.kv_len), np.float32)
        weights /= weights.sum(-1, keepdims=True)
        value = random.standard_normal((self.kv_heads, self.kv_len, self.value_dim), np.float32)
        return (weights, value), {}

    def expected(self, seed: int) -> "Expected":
        """What a contender has to give."""
        (weights, value), _ = self.make(seed)
        rows = np.unique(np.linspace(0, self.q_len - 1, ROWS).astype(np.intp))
        weights = weights[:, rows]
        exact = reference.weighted_sum(weights.astype(np.float64), value.astype(np.float64))
        return Expected(rows, exact, reference.weighted_sum(weights, value), float(abs(value).max()))


def _log_softmax(x: np.ndarray, axis: int) -> np.ndarray:
    x = x - x.max(axis, keepdims=True)
    return np.asarray(x - np.log(np.exp(x).sum(axis, keepdims=True)))


@dataclass
class Expected:
    """The exact and the honest result in the rows that are looked at."""

    rows: slice | np.ndarray
    exact: np.ndarray
    honest: np.ndarray
    scale: float

    def judge(self, results: Sequence[np.ndarray]) -> tuple[float, float]:
        """The error and the tolerance of the one result."""
        (result,) = results
        return error_and_tolerance(result, self.exact, self.honest, scale=self.scale)
