"""Check the arguments that are single numbers, flags or names."""

import math
import numbers
import operator
from typing import Any

import numpy as np

from .._types import Window
from .arrays import describe

LAYOUTS = ("bhnd", "bnhd")
STAGES = ("raw", "scaled", "capped", "masked")
WANTED = ("lse", "weights", "scores", "entropy", "max", "argmax")
MAX_THREADS = 4096
MAX_OFFSET = 2**53   # positions stay exact in float64 and far from the ends of int64
MAX_WINDOW = 2**62   # more than the distance of any two positions


def integer(name: str, value: Any, low: int, high: int) -> int:
    """`value` as an int between `low` and `high`."""
    if isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} must be an integer, got {describe(value)}")
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {describe(value)}") from None
    if not low <= number <= high:
        raise ValueError(f"{name} must be an integer from {low} to {high}, got {number}")
    return number


def finite(name: str, value: Any, acc: np.dtype) -> float:
    """`value` as a finite float; beyond the range of `acc` the largest finite number of its sign."""
    if isinstance(value, np.ndarray) and value.ndim == 0:
        value = value[()]
    is_real = isinstance(value, numbers.Real) or type(value).__name__ == "bfloat16"
    if not is_real or isinstance(value, bool):
        raise TypeError(f"{name} must be a real number, got {describe(value)}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{name} must be finite as a float64, got {describe(value)}")
    largest = float(np.finfo(acc).max)
    return min(max(number, -largest), largest)


def check_scale(scale: object, head_dim: int, acc: np.dtype) -> float:
    """The factor of the scores; None is 1/sqrt(head_dim)."""
    if scale is None:
        return 1.0 / math.sqrt(head_dim) if head_dim else 1.0
    return finite("scale", scale, acc)


def check_softcap(softcap: object, acc: np.dtype) -> float:
    """The bound of capped scores, kept where `acc` can divide by it."""
    softcap = finite("softcap", softcap, acc)
    if softcap <= 0:
        raise ValueError(f"softcap must be greater than 0, got {softcap}; softcap=None switches it off")
    return max(softcap, float(np.finfo(acc).tiny))


def check_causal(causal: object) -> bool:
    if not isinstance(causal, (bool, np.bool_)):
        raise TypeError(f"causal must be True or False, got {describe(causal)}")
    return bool(causal)


def check_window(window: object) -> Window | None:
    """The pair (left, right) of counts beside a row's own position; None for each unbounded side, None for both."""
    if isinstance(window, numbers.Integral) and not isinstance(window, bool):
        raise ValueError(f"window must be a pair (left, right), got the bare integer {window}, which can be read as "
                         f"window=({window}, 0), only looking back, or window=({window}, {window}), to both sides")
    if not isinstance(window, (tuple, list)):
        raise TypeError(f"window must be a pair (left, right), got {describe(window)}")
    if len(window) != 2:
        raise ValueError(f"window must be a pair (left, right), got {len(window)} elements: {window}")
    left, right = (None if count is None else _side(side, count)
                   for side, count in zip(("left", "right"), window, strict=True))
    return None if left is right is None else (left, right)


def _side(side: str, count: object) -> int:
    if isinstance(count, numbers.Integral) and int(count) > MAX_WINDOW:
        return MAX_WINDOW
    if isinstance(count, numbers.Integral) and not isinstance(count, bool) and int(count) < 0:
        raise ValueError(f"the {side} side of window must be at least 0, or None for unbounded, got {count}")
    return integer(f"the {side} side of window", count, 0, MAX_WINDOW)


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> str:
    """`value`, which must be one of `choices`."""
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a string, one of {choices}, got {describe(value)}")
    if value not in choices:
        raise ValueError(f"{name} must be one of {choices}, got {value!r}")
    return value


def check_want(want: object, names: tuple[str, ...] = WANTED) -> tuple[str, ...]:
    """The names wanted besides the output, each once, in the order asked."""
    if isinstance(want, str):
        want = (want,)
    if not isinstance(want, (tuple, list)):
        raise TypeError(f"want must be a name or a tuple of names out of {names}, got {describe(want)}")
    return tuple(dict.fromkeys(check_choice("want", name, names) for name in want))


def check_num_threads(num_threads: object) -> int:
    return integer("num_threads", num_threads, 1, MAX_THREADS)
