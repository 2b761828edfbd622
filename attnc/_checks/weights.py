"""Check the arguments of AttentionWeights and rollout: rows, labels, bins and counts."""

from typing import Any, Literal

import numpy as np

from .._types import ArrayLike, DTypeLike, Report, Shape
from .arrays import as_array, check_fits, describe, float_array, saturated
from .attention import Args
from .options import bools, integers, score_axes
from .output import check_out
from .scalars import check_choice, finite, integer

MAX_KEYS = 2**31 - 1      # of topk: key indices are int32
HEADS = ("mean", "sum", "max", "group")
REDUCTIONS = ("mean", "max")
SIGNS = ("positive", "both")


def check_head(index: Shape, shape: Shape) -> Shape:
    """Places on all leading axes."""
    if len(index) != len(shape) - 2:
        raise IndexError(f"a head is named by {len(shape) - 2} ints, one for each axis before rows and keys; "
                         f"got {index}")
    return tuple(integer("a place of the head", one, -length, length - 1) % length
                 for one, length in zip(index, shape[:-2], strict=True))


def check_one_head(shape: Shape) -> None:
    """Raise unless these are the weights of a single head."""
    if len(shape) > 2:
        raise ValueError(f"the weights have shape {shape}; wanted those of one head: W.head(...) gives them")


def check_tile(rows: object, keys: object) -> tuple[int, int]:
    """The most rows and keys of a tile."""
    return integer("rows", rows, 1, 2**62), integer("keys", keys, 1, 2**62)


def check_dense_dtype(dtype: DTypeLike) -> np.dtype:
    """A dtype that weights can be stored in."""
    dtype = np.dtype(dtype)
    if (dtype.kind != "f" and dtype.name != "bfloat16") or dtype.char == "g":
        raise TypeError(f"dtype must be float16, bfloat16, float32 or float64, got {dtype.name}")
    return dtype


def check_dense_out(out: object, dtype: DTypeLike | None, shape: Shape, acc: np.dtype, arrays: Any) -> np.ndarray:
    """The array that dense weights are written to, of any float dtype; a memory map too."""
    wanted = check_dense_dtype(out.dtype if dtype is None and isinstance(out, np.ndarray) else dtype or acc)
    return check_out(out, shape, wanted, arrays)


def check_k(k: object) -> int:
    """How many keys of each row."""
    return integer("k", k, 1, MAX_KEYS)


def check_distance(a: Args) -> None:
    """Raise where rows have no position to be distant from."""
    if a.k_positions is not None and a.q_offset is None:
        raise ValueError("mean_distance was asked of weights with k_positions and without q_offset; wanted the "
                         "position of the first row")


def check_bins(bins: object, a: Args) -> tuple[int, int]:
    """The sizes of a map: at most one bin for each row and key."""
    if not isinstance(bins, (tuple, list)) or len(bins) != 2:
        raise TypeError(f"bins must be a pair (row_bins, col_bins), got {describe(bins)}")
    return integer("row_bins", bins[0], 1, max(a.q_len, 1)), integer("col_bins", bins[1], 1, max(a.kv_len, 1))


def check_labels(name: str, labels: object, length: int) -> np.ndarray:
    """The group of each place, a negative one for none."""
    labels = integers(name, labels, high=MAX_KEYS)
    if labels.shape != (length,):
        raise ValueError(f"{name} has shape {labels.shape}; wanted ({length},), a group for each place")
    return labels


def check_rows(rows: object, a: Args) -> np.ndarray | None:
    """How often each row is named; None: every row once."""
    return None if rows is None else _counts("rows", rows, a.q_len)


def check_keys(keys: object, length: int) -> np.ndarray:
    """How often each key is named; None: every key once."""
    return np.ones(length, np.int64) if keys is None else _counts("keys", keys, length)


def _counts(name: str, named: Any, length: int) -> np.ndarray:
    counts = np.zeros(length, np.int64)
    if isinstance(named, slice):
        counts[named] = 1
        return counts
    places = as_array(name, named)
    if places.dtype == bool:
        if places.shape != (length,):
            raise ValueError(f"{name} is a bool array of shape {places.shape}; wanted ({length},)")
        return places.astype(np.int64)
    if places.size:
        places = integers(name, named, -length, length - 1)
    np.add.at(counts, places.astype(np.int64).ravel(), 1)
    return counts


def check_row_weights(row_weights: object, a: Args) -> np.ndarray | None:
    """How much each row counts, in the accumulation dtype, as it was given."""
    if row_weights is None:
        return None
    weights = saturated(float_array("row_weights", row_weights), a.acc)
    target = (a.q_len,) if a.two_d else (*a.batch, a.q_heads, a.q_len)
    check_fits("row_weights", weights.shape, target, "(q_len,)" if a.two_d else "(batch..., q_heads, q_len)")
    if not np.isfinite(weights).all():
        raise ValueError("row_weights must be finite, got NaN or inf")
    return weights


def check_coefficients(coefficients: object, a: Args) -> np.ndarray:
    """How much each head counts, (batch..., q_heads) in the accumulation dtype."""
    target = (*a.batch, a.q_heads)
    given = float_array("heads", coefficients)
    check_fits("heads", given.shape, target, "(batch..., q_heads)")
    found = saturated(given, a.acc)
    if not np.isfinite(found).all():
        raise ValueError("heads must be finite, got NaN or inf")
    return np.array(np.broadcast_to(found, target))


def check_not_negative(coefficients: np.ndarray) -> None:
    """Raise unless a weighted sum of heads can have an entropy."""
    if (coefficients < 0).any():
        raise ValueError(f"heads has coefficients below 0, the least {coefficients.min()}; wanted none for an entropy")


def check_relevance(value: object, grad_output: object, sign: object, a: Args) -> tuple[np.ndarray, np.ndarray, bool]:
    """Values and gradients of the output in (..., heads, length, dim) order; whether only what is above 0 counts."""
    sign = check_choice("sign", sign, SIGNS)
    value, grad = float_array("value", value), float_array("grad_output", grad_output)
    swapped = a.layout == "bnhd" and not a.two_d
    lengths = [(heads, length)[::-1 if swapped else 1] for heads, length in ((a.kv_heads, a.kv_len),
                                                                             (a.q_heads, a.q_len))]
    axes = "length, heads" if swapped else "heads, length"
    if a.two_d:
        lengths, axes = [(a.kv_len,), (a.q_len,)], "length"
    batch = () if a.two_d else a.batch
    dim = value.shape[-1] if value.ndim else 0
    check_fits("value", value.shape, (*batch, *lengths[0], dim), f"(batch..., {axes}, value_dim)",
               exact=len(lengths[0]) + 1)
    check_fits("grad_output", grad.shape, (*batch, *lengths[1], dim), f"the shape of the output, (batch..., {axes}, "
               "value_dim)", exact=len(batch) + len(lengths[1]) + 1)
    if a.two_d:
        return value[None], grad[None], sign == "positive"
    if swapped:
        value, grad = value.swapaxes(-2, -3), grad.swapaxes(-2, -3)
    return value, grad, sign == "positive"


def check_heads(heads: object) -> str | None:
    return None if heads is None else check_choice("heads", heads, HEADS)


def check_reduce(reduce: object) -> str:
    return check_choice("reduce", reduce, REDUCTIONS)


def check_threshold(threshold: object, acc: np.dtype) -> float:
    threshold = finite("threshold", threshold, acc)
    if threshold < 0:
        raise ValueError(f"threshold must be at least 0, as weights are, got {threshold}")
    return threshold


def check_sparse(threshold: object, top_p: object, acc: np.dtype) -> tuple[float | None, float | None]:
    """What a sparse export keeps: exactly one of the two."""
    if (threshold is None) == (top_p is None):
        raise ValueError("sparse takes one of threshold= and top_p=, got " + ("neither" if top_p is None else "both"))
    if threshold is not None:
        return check_threshold(threshold, acc), None
    top_p = finite("top_p", top_p, np.dtype(np.float64))
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p must be greater than 0 and at most 1, got {top_p}")
    return None, top_p


def check_keep(keep: object, a: Args) -> np.ndarray:
    """True where a key stays."""
    keep = bools("keep", keep, "the key stays",
                 f"0/1 as bool is keep.astype(bool), places of keys are np.isin(np.arange({a.kv_len}), keep)")
    check_fits("keep", keep.shape, *score_axes(a))
    return keep


def check_keep_of(keep: object, shape: Shape) -> np.ndarray:
    """True where a key of a weighted sum of heads stays."""
    keep = bools("keep", keep, "the key stays", f"places of keys are np.isin(np.arange({shape[-1]}), keep)")
    check_fits("keep", keep.shape, shape, "(batch..., q_len, kv_len)")
    return keep


def check_amounts(row_weights: object, shape: Shape, acc: np.dtype) -> np.ndarray:
    """How much each row of a weighted sum of heads counts: (..., q_len)."""
    if row_weights is None:
        return np.ones(1, acc)
    weights = saturated(float_array("row_weights", row_weights), acc)
    check_fits("row_weights", weights.shape, shape, "(batch..., q_len)")
    if not np.isfinite(weights).all():
        raise ValueError("row_weights must be finite, got NaN or inf")
    return weights


def check_progress(progress: object) -> Literal[True] | Report | None:
    """None, a function that is called with (done, total) now and then, or True, which is a bar."""
    if progress is None or isinstance(progress, (bool, np.bool_)):
        return True if progress else None
    if not callable(progress):
        raise TypeError(f"progress must be True, False or a function of (done, total), got {describe(progress)}")
    return progress


def check_acc_out(out: object, shape: Shape, a: Args) -> np.ndarray:
    """The array, of the accumulation dtype, that a statement is written or added to."""
    return check_out(out, shape, a.acc, a.arrays)


def check_operand(x: object, a: Args, transposed: bool) -> np.ndarray:
    """What a product takes: (length,), or (..., length, columns) with leading axes that broadcast to those of W."""
    return check_factor(x, (*(() if a.two_d else (*a.batch, a.q_heads)), a.q_len, a.kv_len), transposed)


def check_factor(x: object, shape: Shape, transposed: bool) -> np.ndarray:
    """The same for a product with a lazy matrix of that shape, or with its transpose."""
    x, length = float_array("the operand of @", x), shape[-2 if transposed else -1]
    axes = "q_len" if transposed else "kv_len"
    if x.ndim == 0 or x.shape[-1 if x.ndim == 1 else -2] != length:
        raise ValueError(f"the operand of @ has shape {x.shape}; wanted ({axes},) or (..., {axes}, columns), {axes} "
                         f"= {length}")
    check_fits("the operand of @", x.shape[:-2], shape[:-2], "leading axes of the weights")
    return x


def check_residual(residual: object) -> float:
    """The share of a layer that passes by the attention."""
    residual = finite("residual", residual, np.dtype(np.float64))
    if not 0 <= residual <= 1:
        raise ValueError(f"residual must be from 0 to 1, got {residual}")
    return residual


def check_layers(layers: object) -> list[Any]:
    """Weights of layers with as many rows as keys, all of one length."""
    found: list[Any] = list(layers) if isinstance(layers, (list, tuple)) else [layers]
    if not found:
        raise ValueError("layers is empty; wanted the AttentionWeights of at least one layer")
    for i, layer in enumerate(found):
        if not getattr(layer, "_has_heads", False):
            raise TypeError(f"layers[{i}] must be AttentionWeights, got {describe(layer)}")
        if layer.shape[-2:] != found[0].shape[-1:] * 2:
            raise ValueError(f"layers[{i}] has shape {layer.shape}; wanted as many rows as keys, {found[0].shape[-1]} "
                             "as in layers[0]")
    return found


def check_start(start: ArrayLike, layers: list[Any]) -> np.ndarray:
    """Where a rollout begins: a place, or amounts (..., length) with the batch axes of the layers or fewer."""
    length = layers[0].shape[-1]
    if np.ndim(start) == 0:
        amounts: np.ndarray = np.zeros(length, layers[0].dtype)
        amounts[integer("start", start, -length, length - 1)] = 1
        return amounts
    amounts = float_array("start", start)
    if amounts.shape[-1] != length:
        raise ValueError(f"start has shape {amounts.shape}; wanted an int or (..., {length}), an amount for each token")
    return amounts
