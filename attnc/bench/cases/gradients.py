"""The gradients of attention as a case of their own."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from attnc import reference
from attnc._checks import backward_args
from attnc.bench import Arrays, Json, Options
from attnc.reference._backward import run
from attnc.testing import Case, error_and_tolerance

PRODUCTS = 5        # the scores again, and one for each of weights, query, key and value; the forward call has 2
NAMES = ("query", "key", "value")


@dataclass(frozen=True)
class Gradients:
    """The gradients of query, key and value of a case, from its output and lse."""

    case: Case
    contenders = "attnc.bench.contenders.gradients"

    @property
    def name(self) -> str:
        return f"{self.case.name} backward"

    @property
    def options(self) -> tuple[Any, ...]:
        return self.case.options

    @property
    def dtype(self) -> str:
        return self.case.dtype

    @property
    def flops(self) -> int:
        return self.case.flops * PRODUCTS // 2

    def describe(self) -> Json:
        """Its sizes for the JSON file."""
        names = ("batch", "q_heads", "kv_heads", "q_len", "kv_len", "head_dim", "value_dim")
        return {name: getattr(self.case, name) for name in names} | {"flops": self.flops}

    def make(self, seed: int) -> tuple[Arrays, Options]:
        """The gradient of the output, and the inputs; the options."""
        arrays, options = self.case.make(seed)
        shape = (*arrays[0].shape[:-1], arrays[2].shape[-1])
        grad = np.random.default_rng((seed, 2)).standard_normal(shape, np.float32).astype(arrays[0].dtype)
        return (grad, *arrays), options

    def expected(self, seed: int) -> "Expected":
        """What a contender has to give, by the first head of the keys."""
        (grad, query, key, value), options = self.make(seed)
        heads_per_kv = self.case.q_heads // self.case.kv_heads
        few = [grad[:1, :heads_per_kv], query[:1, :heads_per_kv], key[:1, :1], value[:1, :1]]
        return Expected(_exact(*few, **options), _of(reference, *few, **options), heads_per_kv)


def _of(module: Any, grad: np.ndarray, *arrays: np.ndarray, **options: Any) -> list[np.ndarray]:
    result = module.attention(*arrays, want="lse", **options)
    found = module.attention_backward(grad, *arrays, result.output, result.lse, **options)
    return [getattr(found, name) for name in NAMES]


def _exact(grad: np.ndarray, *arrays: np.ndarray, **options: Any) -> list[np.ndarray]:
    """In float64, from output and lse of its own; for float64 in long double."""
    if grad.dtype != np.float64:
        return _of(reference, *(x.astype(np.float64) for x in (grad, *arrays)), **options)
    result = reference.attention(*arrays, want="lse", **options)
    b = backward_args(grad, *arrays, result.output, result.lse, want=NAMES, sinks=None, grad_lse=None, **options)
    b.args.acc = np.dtype(np.longdouble)
    found = run(b)
    return [found[name] for name in NAMES]


@dataclass
class Expected:
    """The exact and the honest gradients of one head of keys and its queries."""

    exact: list[np.ndarray]
    honest: list[np.ndarray]
    heads_per_kv: int
    rows = slice(None)

    def judge(self, results: Sequence[np.ndarray]) -> tuple[float, float]:
        """The error and the tolerance of the worst of the three."""
        heads = (self.heads_per_kv, 1, 1)
        pairs = [error_and_tolerance(result[:1, :n], exact, honest, scale=float(abs(exact).max()))
                 for result, exact, honest, n in zip(results, self.exact, self.honest, heads, strict=True)]
        return max(pairs, key=lambda pair: pair[0] / pair[1])
