"""Cases as data, and the rule by which a result is right: shared by tests, benchmarks and users."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import numpy as np

from . import masks
from ._checks import attention_args
from ._types import ArrayLike, DTypeLike, Shape
from .reference import _chain
from .results import AttentionResult

__all__ = ["Case", "assert_within", "error_and_tolerance", "exact_attention", "tolerance"]


@dataclass(frozen=True)
class Case:
    """Sizes, dtype and options of one attention, from which inputs are made.

    Parameters
    ----------
    name : str
    batch, q_heads, kv_heads, q_len, kv_len, head_dim : int
    value_dim : int, optional
        By default `head_dim`.
    dtype : str
        Of query, key and value; ``"bfloat16"`` needs ml_dtypes.
    options : tuple of (name, value)
        Options of `attnc.attention`.

    Examples
    --------
    >>> case = Case("small", 1, 2, 1, 4, 4, 8, options=(("causal", True),))
    >>> (query, key, value), options = case.make(seed=0)
    >>> query.shape, key.shape, options, case.flops
    ((1, 2, 4, 8), (1, 1, 4, 8), {'causal': True}, 640)
    """

    name: str
    batch: int
    q_heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    value_dim: int = cast(int, None)        # head_dim, once made
    dtype: str = "float32"
    options: tuple[tuple[str, Any], ...] = ()

    def __post_init__(self) -> None:
        if self.value_dim is None:
            object.__setattr__(self, "value_dim", self.head_dim)

    def __str__(self) -> str:
        return self.name

    def make(self, seed: int) -> tuple[tuple[np.ndarray, ...], dict[str, Any]]:
        """Query, key and value of standard normal numbers, and the options as a dictionary."""
        random = np.random.default_rng(seed)
        arrays = tuple([standard_normal(random, shape, self.dtype) for shape in self._shapes()])
        return arrays, dict(self.options)

    @cached_property
    def flops(self) -> int:
        """Floating-point operations: 2 (D + Dv) for each (batch, query head, row, key) that the row may see."""
        return 2 * (self.head_dim + self.value_dim) * self._visible()

    @property
    def bytes(self) -> int:
        """Bytes of query, key and value read once and the output written once."""
        query, key, value = self._shapes()
        elements = sum(math.prod(shape) for shape in (query, key, value, (*query[:-1], self.value_dim)))
        return elements * dtype_of(self.dtype).itemsize

    def _shapes(self) -> tuple[Shape, ...]:
        query, key = (self.q_heads, self.q_len, self.head_dim), (self.kv_heads, self.kv_len, self.head_dim)
        bnhd = dict(self.options).get("layout") == "bnhd"
        return tuple([(self.batch, length, heads, dim) if bnhd else (self.batch, heads, length, dim)
                      for heads, length, dim in (query, key, (*key[:2], self.value_dim))])

    def _visible(self) -> int:
        """How many (batch, query head, row, key) there are; one head stands for all if no option tells them apart."""
        options = {name: value for name, value in self.options if name not in _HIDE_NOTHING}
        if not options:
            return self.batch * self.q_heads * self.q_len * self.kv_len
        heads = self.q_heads if options.keys() & {"mask", "bias"} else 1
        rows, keys = (np.broadcast_to(np.float32(0), (self.batch, heads, length, 1))
                      for length in (self.q_len, self.kv_len))
        a = attention_args(rows, keys, None, **options)
        if options.keys() <= {"causal", "window"}:      # each row sees a range: no matrix of 64 GB at 256k
            left, right = a.window or (None, None)
            at = masks.positions(a)
            first = 0 * at if left is None else at - left
            end = at + (self.kv_len + self.q_len if right is None else right) + 1
            if a.causal:
                end = np.minimum(end, at + 1)
            keys_of_rows = np.clip(end, 0, self.kv_len) - np.clip(first, 0, self.kv_len)
            return int(np.maximum(keys_of_rows, 0).sum()) * self.batch * self.q_heads
        return int(np.count_nonzero(masks.allowed(a))) * self.q_heads // max(heads, 1)


_HIDE_NOTHING = ("want", "layout", "scale", "softcap", "alibi_slopes", "sinks", "num_threads")


def dtype_of(name: str) -> np.dtype:
    """The dtype of a name, bfloat16 among them."""
    if name == "bfloat16":
        import ml_dtypes  # noqa: F401 (registers the name)
    return np.dtype(name)


def standard_normal(random: np.random.Generator, shape: Shape, dtype: str) -> np.ndarray:
    """Standard normal numbers, drawn in float32 for a narrower dtype."""
    if dtype == "float64":
        return random.standard_normal(shape)
    return random.standard_normal(shape, np.float32).astype(dtype_of(dtype), copy=False)


def exact_attention(query: ArrayLike, key: ArrayLike, value: ArrayLike, **options: Any) -> AttentionResult:
    """The reference computed one precision up: in float64, for float64 inputs in long double.

    Parameters
    ----------
    query, key, value : array
    **options
        Those of `attnc.attention`; `want` and `out` are of no effect.

    Returns
    -------
    AttentionResult
        ``output, lse, weights, scores``, all in the wider precision. Where long double is no wider than float64 (Arm
        on macOS, MSVC) float64 inputs are computed in float64.

    Examples
    --------
    >>> exact_attention(np.ones((1, 4)), np.ones((2, 4)), np.ones((2, 1))).weights.dtype == np.longdouble
    True
    """
    a = attention_args(query, key, value, **{**options, "out": None})
    a.acc = np.dtype(np.longdouble if a.acc == np.float64 else np.float64)
    with np.errstate(all="ignore"):
        found = _chain.run(a)
    return AttentionResult(found.pop("output"), **found)


def tolerance(exact: ArrayLike, honest: ArrayLike, *, scale: float = 1.0, eps_dtype: DTypeLike | None = None) -> float:
    """Largest error that a result may have: twice that of the honest twin, plus 4 eps of the numbers at work.

    Parameters
    ----------
    exact : array
        The result in a wider precision: `exact_attention`, or the reference of float64 inputs.
    honest : array
        The reference of the original inputs, rounded where an implementation has to round.
    scale : float
        For an output the largest visible ``abs(value)``; for weights 1; for an lse ``max(1, abs(lse), abs(score))``.
    eps_dtype : dtype, optional
        Whose eps counts; by default that of `honest`.

    Returns
    -------
    float

    Examples
    --------
    >>> tolerance(np.array([1.0]), np.array([1.0], np.float32), scale=2.0) == 8 * 2.0**-23
    True
    """
    exact, honest = np.asarray(exact), np.asarray(honest)
    errors = _errors(honest, exact)
    largest = errors.max(initial=0.0, where=np.isfinite(errors))  # a wrong NaN of the twin widens no tolerance
    return float(2 * largest + 4 * _eps(honest.dtype if eps_dtype is None else np.dtype(eps_dtype)) * scale)


def error_and_tolerance(
        got: ArrayLike, exact: ArrayLike, honest: ArrayLike, *, scale: float = 1.0,
        eps_dtype: DTypeLike | None = None) -> tuple[float, float]:
    """The largest error of `got` and its `tolerance`; the error is inf if dtype, shape or a NaN or inf differ.

    Parameters
    ----------
    got : array
        The result to judge.
    exact, honest, scale, eps_dtype
        As in `tolerance`.

    Returns
    -------
    tuple of float

    Examples
    --------
    >>> error_and_tolerance(np.array([1.5]), np.array([1.0]), np.array([1.0]))[0]
    0.5
    """
    got, exact, honest = np.asarray(got), np.asarray(exact), np.asarray(honest)
    limit = tolerance(exact, honest, scale=scale, eps_dtype=eps_dtype)
    if got.dtype != honest.dtype or got.shape != exact.shape:
        return float("inf"), limit
    return float(_errors(got, exact).max(initial=0.0)), limit


def assert_within(
        got: ArrayLike, exact: ArrayLike, honest: ArrayLike, *, scale: float = 1.0, eps_dtype: DTypeLike | None = None,
        name: str = "result") -> None:
    """Raise unless `got` has the dtype of `honest`, the shape of `exact`, and every element within `tolerance`.

    NaN must meet NaN, and inf the inf of its sign: elements that are not finite are compared, never skipped.

    Parameters
    ----------
    got : array
        The result to judge.
    exact, honest, scale, eps_dtype
        As in `tolerance`.
    name : str
        What the message calls `got`.

    Raises
    ------
    AssertionError
        Saying where the worst element is, what was wanted there and how many are wrong.

    Examples
    --------
    >>> assert_within(np.array([1.0]), np.array([1.0]), np.array([1.0]))
    """
    got, exact, honest = np.asarray(got), np.asarray(exact), np.asarray(honest)
    if got.dtype != honest.dtype:
        raise AssertionError(f"{name} has dtype {got.dtype.name}, wanted {honest.dtype.name}")
    if got.shape != exact.shape:
        raise AssertionError(f"{name} has shape {got.shape}, wanted {exact.shape}")
    limit = tolerance(exact, honest, scale=scale, eps_dtype=eps_dtype)
    errors = _errors(got, exact)
    wrong = int(np.count_nonzero(~(errors <= limit)))  # with a NaN tolerance all are wrong
    if wrong:
        worst = tuple(int(i) for i in np.unravel_index(errors.argmax(), errors.shape))
        raise AssertionError(f"{name}{list(worst)} is {got[worst]!s}, wanted {exact[worst]!s}: error "
                             f"{errors[worst]:.3g}, tolerance {limit:.3g}; {wrong} of {errors.size} elements are wrong")


def _errors(x: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """|x - exact|; for elements not finite 0 if they agree, inf if not. An `exact` beyond the range of `x` is inf."""
    wide = np.result_type(exact.dtype, np.float64)
    with np.errstate(all="ignore"):
        wanted = exact.astype(x.dtype).astype(wide)
        x, exact = x.astype(wide), exact.astype(wide)
        same = (x == wanted) | (np.isnan(x) & np.isnan(wanted))
        return np.where(np.isfinite(x) & np.isfinite(wanted), np.abs(x - exact), np.where(same, 0, np.inf))


def _eps(dtype: np.dtype) -> float:
    return 2.0**-7 if dtype.name == "bfloat16" else float(np.finfo(dtype).eps)
