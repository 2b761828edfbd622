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


def check_dense_out(out: object, dtype: DTypeLike | None, a: Args) -> np.ndarray:
    """The array that dense weights are written to, of any float dtype; a memory map too."""
    wanted = check_dense_dtype(out.dtype if dtype is None and isinstance(out, np.ndarray) else dtype or a.acc)
    return check_out(out, a.weights_shape, wanted, a.arrays)


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
    if rows is None:
        return None
    counts = np.zeros(a.q_len, np.int64)
    if isinstance(rows, slice):
        counts[rows] = 1
        return counts
    places = as_array("rows", rows)
    if places.dtype == bool:
        if places.shape != (a.q_len,):
            raise ValueError(f"rows is a bool array of shape {places.shape}; wanted ({a.q_len},)")
        return places.astype(np.int64)
    if places.size:
        places = integers("rows", rows, -a.q_len, a.q_len - 1)
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


def check_operand(x: object, a: Args, length: int, transposed: bool) -> np.ndarray:
    """What a product takes: (length,), or (..., length, columns) with leading axes that broadcast to those of W."""
    x = float_array("the operand of @", x)
    axes = "q_len" if transposed else "kv_len"
    if x.ndim == 0 or x.shape[-1 if x.ndim == 1 else -2] != length:
        raise ValueError(f"the operand of @ has shape {x.shape}; wanted ({axes},) or (..., {axes}, columns), {axes} "
                         f"= {length}")
    lead = () if a.two_d else (*a.batch, a.q_heads)
    check_fits("the operand of @", x.shape[:-2], lead, "leading axes of the weights")
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
        if not hasattr(layer, "head_mean"):
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
