"""Turn what users pass into arrays of the dtypes that attention computes with, or say why that cannot be."""

from functools import lru_cache

import numpy as np

from .._types import Array, Shape

FLOAT16, FLOAT32, FLOAT64 = np.dtype(np.float16), np.dtype(np.float32), np.dtype(np.float64)
SUPPORTED = "float16, bfloat16, float32, float64, bool or an integer type"


def describe(x: object) -> str:
    """What an error message says about an argument: its dtype and shape, or its type and value."""
    if isinstance(x, np.ndarray):
        return f"{x.dtype.name} array of shape {x.shape}"
    kind, text = type(x).__name__, repr(x)
    text = text if len(text) <= 60 else text[:57] + "..."
    return text if text.startswith(f"{kind}(") else f"{kind} {text}"


def as_array(name: str, x: object, empty: np.dtype | None = None) -> np.ndarray:
    """`x` as a plain ndarray, without a copy where it is one already.

    `empty` is the dtype of a list without elements, which NumPy makes float64.
    """
    if type(x) is np.ndarray:
        return x
    if isinstance(x, np.ma.MaskedArray):
        instead = {"query": "; mask= or key_mask= say which keys count, of functions that have them",
                   "x": "; where= says which elements take part"}
        instead["key"] = instead["value"] = instead["query"]
        raise TypeError(f"{name} is a numpy.ma masked array, whose mask would be lost; wanted a plain array, such as "
                        f"its data{instead.get(name, '')}")
    if x is None:
        raise TypeError(f"{name} must be an array, got None")
    try:
        found = np.asarray(x)
    except ValueError as error:  # nested lists of unequal lengths
        raise ValueError(f"{name} must be readable as one array, got {type(x).__name__}: {error}") from error
    except Exception as error:  # whatever an object's own __array__ raises
        raise TypeError(f"{name} must be readable as one array, got {type(x).__name__}: {error}") from error
    return found if empty is None or found.size or not isinstance(x, (list, tuple)) else found.astype(empty)


def float_array(name: str, x: object) -> Array:
    """`x` in its own float dtype and native byte order; bools and integers as float64."""
    if type(x) is np.ndarray and (x.dtype is FLOAT32 or x.dtype is FLOAT64):
        return x
    x = as_array(name, x)
    dtype = _computed_as(x.dtype)
    if dtype is None:
        raise TypeError(f"{name} has dtype {x.dtype.name}; wanted {SUPPORTED}{_advice(name, x.dtype)}")
    return x if dtype == x.dtype else x.astype(dtype)


def native_floats(name: str, x: object, advice: str) -> Array:
    """`x`, which must be of a float dtype already, in native byte order."""
    x = as_array(name, x)
    dtype = _computed_as(x.dtype)
    if dtype is None or x.dtype.kind in "biu":
        raise TypeError(f"{name} must be float16, bfloat16, float32 or float64, got {describe(x)}{advice}")
    return x if dtype == x.dtype else x.astype(dtype)


@lru_cache(maxsize=64)
def _computed_as(dtype: np.dtype) -> np.dtype | None:
    """The native float dtype that stands for `dtype`, or None. bfloat16 is known by its name, not by an import."""
    if dtype.char in "efd":
        return np.dtype(dtype.char)
    if dtype.name == "bfloat16":
        return dtype
    if dtype.kind in "biu" and dtype.name != "uint16":
        return FLOAT64
    return None


def _advice(name: str, dtype: np.dtype) -> str:
    if dtype.name == "uint16":
        x = "x" if " " in name else name       # of the operand of @
        return (f": bfloat16 often travels as uint16, pass it as {x}.view(ml_dtypes.bfloat16); "
                f"pass true integers as {x}.astype(numpy.float64)")
    return ""


def promoted(*dtypes: np.dtype) -> np.dtype:
    """The dtype of results: equal dtypes stay, float16 with bfloat16 is float32, otherwise the wider."""
    first, *others = dtypes
    if all([dtype is first or dtype == first for dtype in others]):
        return first
    return FLOAT64 if FLOAT64 in dtypes else FLOAT32


def accumulator(dtype: np.dtype) -> np.dtype:
    """The dtype in which sums and the softmax are computed: float64 for float64, else float32."""
    return FLOAT64 if dtype.char == "d" else FLOAT32


def saturated(x: np.ndarray, acc: np.dtype) -> np.ndarray:
    """`x` rounded to `acc`; a finite value beyond its range becomes the largest finite one of its sign."""
    if x.dtype == acc:
        return x
    with np.errstate(over="ignore"):
        rounded = x.astype(acc)
    if x.dtype == FLOAT64:
        beyond = np.isinf(rounded) & np.isfinite(x)
        rounded = np.where(beyond, np.copysign(np.finfo(acc).max, rounded), rounded)
    return rounded


def check_fits(name: str, shape: Shape, target: Shape, axes: str, exact: int = 0) -> None:
    """Raise unless `shape` broadcasts to `target` without enlarging it; the last `exact` axes must be equal."""
    missing = len(target) - len(shape)
    fits = missing >= 0 and len(shape) >= exact
    for i in range(len(shape) if fits else 0):
        wanted = target[missing + i]
        fits = fits and (shape[i] == wanted or (shape[i] == 1 and i < len(shape) - exact))
    if not fits:
        ends = f" and ends with {target[len(target) - exact:]}" if exact else ""
        or_less = f", or a shape that broadcasts to it{ends}" if exact < len(target) else ""
        raise ValueError(f"{name} has shape {shape}; wanted {axes} = {target}{or_less}")
