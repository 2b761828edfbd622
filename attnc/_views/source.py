"""What a picture needs of attention weights, from a dense array or from lazy weights, whose matrix is never built."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from .._checks import integer
from .._checks.arrays import as_array, describe
from .._types import ArrayLike, Head, Progress, Reduced, Shape
from ..weights import AttentionWeights
from ..weights._sweeps import Steps as Steps
from .lazy import Lazy, missing, slack
from .tokens import starts


def load(weights: ArrayLike | Source, mask: ArrayLike | None = None) -> Source:
    """The weights as a source of shape (layers, heads, q_len, kv_len): `Dense`, `Lazy`, or several one above another.

    Parameters
    ----------
    weights : array (..., q_len, kv_len), AttentionWeights, or a list or tuple of these, one a layer
        Axes before the heads are layers; two axes are one head of one layer. An array is all that NumPy can read:
        tensors of torch (off their graph and device), arrays of jax and dask, whatever has ``__array__`` or DLPack.
    mask : bool array that broadcasts to the weights, optional
        True where a key is allowed. Without it, a weight of exactly 0 counts as not allowed; so do the masked places
        of a numpy.ma array.

    Raises
    ------
    TypeError, ValueError
        If these are no weights: fewer than two axes, an empty axis, no float dtype, negative or above 1.
    """
    if isinstance(weights, (Dense, Lazy, Stack)):
        return weights
    if isinstance(weights, AttentionWeights):
        if mask is not None:
            raise ValueError("mask is for dense arrays; lazy weights know their own")
        return Lazy(weights)
    if isinstance(weights, (list, tuple)) and weights and all(_is_layer(layer) for layer in weights):
        parts = [load(layer, mask) for layer in weights]
        return parts[0] if len(parts) == 1 else Stack(parts)
    if isinstance(weights, (list, tuple)) and any(layer is None for layer in weights):
        raise TypeError("weights must be an array for each layer, got None: a model of transformers returns its "
                        "weights with output_attentions=True and attn_implementation='eager'")
    return Dense(weights, mask)


def _is_layer(layer: object) -> bool:
    return isinstance(layer, AttentionWeights) or len(getattr(layer, "shape", ())) >= 2


def read_array(name: str, x: Any) -> np.ndarray:
    """`x` as an array; a tensor of torch leaves its graph and device first, and bfloat16, which NumPy lacks."""
    if hasattr(x, "detach"):
        x = x.detach().cpu()
        x = x.float() if str(x.dtype) == "torch.bfloat16" else x
    if not hasattr(x, "__array__"):
        if hasattr(x, "__dlpack__"):
            x = np.from_dlpack(x)
        elif hasattr(x, "dense"):       # lazy weights of attnc.integrations.dask
            x = x.dense()
    return as_array(name, x)


def pick(source: Source, head: Head) -> tuple[int, int]:
    """(layer, head) from an index that is an int where there is one layer, else a pair; None where there is one."""
    layers, heads = source.shape[:2]
    if head is None:
        if layers * heads == 1:
            return 0, 0
        raise ValueError(f"head must say which of {heads} heads{f' of {layers} layers' * (layers > 1)} is wanted")
    if isinstance(head, (tuple, list)):
        if len(head) != 2:
            raise ValueError(f"head must be an integer or a pair (layer, head), got {head}")
        return integer("layer of head", head[0], 0, layers - 1), integer("head", head[1], 0, heads - 1)
    if layers > 1:
        raise ValueError(f"head must be a pair (layer, head), since there are {layers} layers; got {head}")
    return 0, integer("head", head, 0, heads - 1)


def head_name(source: Source, chosen: tuple[int, int] | None) -> str:
    """Which head of several (layer, head) is; nothing where there is only one, and their number for None."""
    layers, heads = source.shape[:2]
    if chosen is None:
        return f"{layers * heads} heads" if layers * heads > 1 else ""
    return "layer {}, head {}".format(*chosen) if layers > 1 else f"head {chosen[1]}" if heads > 1 else ""


def check_row(source: Source, row: int) -> int:
    """`row` counted from 0; negative ones count from the end, as in NumPy."""
    q_len: int = source.shape[2]
    return integer("row", row, -q_len, q_len - 1) % q_len


def telling(pooled: np.ndarray, q_len: int) -> int:
    """The row whose bin has the weight that stands out most; the first row and key aside, which are often a sink.

    A weight w stands out by w log(w n) among the n bins that its row may see: rows that see few keys have large weights
    that say nothing.
    """
    count = (~np.isnan(pooled)).sum(1)[1:, None]
    inner = np.nan_to_num(pooled)[1:, 1:]
    if not inner.size:
        return 0
    out = inner * np.log(np.maximum(inner * count, np.finfo(np.float32).tiny))
    return int(starts(q_len, len(pooled))[1 + int(out.max(1).argmax())])


def entropy_of(share: np.ndarray, nowhere: ArrayLike) -> float:
    """The entropy of one row in nats, its share on no key an event as in `AttentionWeights.entropy`."""
    return float(_entropy(np.append(share, nowhere).astype(np.float64)))


class Dense:
    """Weights in an array."""

    def __init__(self, weights: Any, mask: ArrayLike | None = None) -> None:
        given, hidden, eps = weights, None, _eps(getattr(weights, "dtype", None))
        if isinstance(weights, np.ma.MaskedArray):
            hidden, weights = np.ma.getmask(weights), weights.data
        weights = read_array("weights", weights)
        if weights.dtype == object:
            raise TypeError(f"weights must be an array of floats or AttentionWeights, got {describe(given)}")
        if weights.dtype.kind != "f" and weights.dtype.name != "bfloat16":
            raise TypeError(f"weights must be floats, got {weights.dtype.name}")
        if weights.ndim < 2 or weights.size == 0:
            raise ValueError(f"weights must be (..., q_len, kv_len) and not empty, got shape {weights.shape}")
        allowed = None if hidden is None or hidden is np.ma.nomask else ~hidden
        if mask is not None:
            mask = read_array("mask", mask)
            if mask.dtype != bool:
                raise TypeError(f"mask must be bool, True where a key is allowed, got {mask.dtype.name}")
            try:
                allowed = np.broadcast_to(mask, weights.shape)
            except ValueError:
                raise ValueError(f"mask must broadcast to the weights, {weights.shape}, got {mask.shape}") from None
        heads = weights.shape[-3] if weights.ndim > 2 else 1
        self.shape = (weights.size // (heads * weights.shape[-1] * weights.shape[-2]), heads, *weights.shape[-2:])
        self.weights = weights.reshape(self.shape)
        if self.weights.dtype not in (np.float32, np.float64):      # float16, bfloat16; longdouble, other byte orders
            self.weights = self.weights.astype(np.float32 if weights.dtype.itemsize <= 4 else np.float64)
        self.allowed = (self.weights != 0) if allowed is None else allowed.reshape(self.shape)
        if not np.all(self.allowed | (self.weights == 0)):
            self.weights = np.where(self.allowed, self.weights, 0)
        low, high = np.nanmin(self.weights, initial=0), np.nanmax(self.weights, initial=0)
        if low < 0 or high > 1.01:
            raise ValueError(f"weights must lie between 0 and 1, got {low:.4g} to {high:.4g}; "
                             "if these are scores, attnc.softmax makes weights of them")
        self._slack = slack(eps, self.shape[3])

    def map(self, bins: tuple[int, int], reduce: Reduced, progress: Progress = None) -> np.ndarray:
        """(layers, heads, row bins, column bins): NaN where nothing is allowed."""
        rows, columns = (starts(length, count) for length, count in zip(self.shape[2:], bins, strict=True))
        add = np.maximum.reduceat if reduce == "max" else np.add.reduceat
        pooled = add(add(self.weights, columns, axis=-1, dtype=None), rows, axis=-2, dtype=None)
        if reduce == "mean":
            pooled = pooled / np.diff(rows, append=self.shape[2])[:, None]
        seen = np.logical_or.reduceat(np.logical_or.reduceat(self.allowed, columns, axis=-1), rows, axis=-2)
        return np.where(seen, pooled, np.nan)

    def only(self, layer: int, head: int) -> Dense:
        """A source of one head."""
        one = object.__new__(Dense)
        one.__dict__.update(self.__dict__, shape=(1, 1, *self.shape[2:]))
        one.weights, one.allowed = (array[layer:layer + 1, head:head + 1] for array in (self.weights, self.allowed))
        return one

    def summary(self, bins: tuple[int, int], k: int, progress: Progress = None) -> tuple[np.ndarray, ...]:
        """All that a page shows of rows: map, top weights and keys, entropy, mean distance, the share on no key."""
        return self.map(bins, "mean"), *self.topk(k), self.entropy(), self.mean_distance(), self.no_key()

    def topk(self, k: int) -> tuple[np.ndarray, np.ndarray]:
        """The k largest weights of each row and their keys; -1 where there is none."""
        k = min(k, self.shape[3])
        last = np.uint64(self.shape[3] - 1)
        keys = np.empty((*self.shape[:3], k), np.int64)
        for place in np.ndindex(self.shape[:2]):        # one head at a time: each takes 8 bytes a weight
            # One integer orders by weight, then by the smaller key: floats that are not negative order as their bits.
            code = self.weights[place].astype(np.float32).view(np.uint32).astype(np.uint64) << np.uint64(32)
            code = code | (last - np.arange(self.shape[3], dtype=np.uint64))
            best = -np.sort(-np.partition(code, self.shape[3] - k)[..., -k:].astype(np.int64))
            keys[place] = int(last) - (best & 0xFFFFFFFF)
        found = np.take_along_axis(self.allowed, keys, -1)
        return np.take_along_axis(self.weights, keys, -1), np.where(found, keys, -1)

    def entropy(self, progress: Progress = None) -> np.ndarray:
        return np.asarray(_entropy(self.weights) + _entropy(self.no_key()[..., None]))

    def no_key(self, progress: Progress = None) -> np.ndarray:
        """The share of each row that went to no key, as with sinks."""
        return missing(self.weights.sum(-1), self._slack, self.allowed.any(-1)).astype(self.weights.dtype)

    def column(self, key: int, progress: Progress = None) -> np.ndarray:
        return np.asarray(self.weights[..., key])

    def diagonal(self, offset: int, progress: Progress = None) -> np.ndarray:
        """The weight of each row on the key `offset` after its index; 0 where there is none."""
        at = np.arange(self.shape[2]) + offset
        there = (at >= 0) & (at < self.shape[3])
        return np.where(there, self.weights[..., np.arange(self.shape[2]), np.clip(at, 0, self.shape[3] - 1)], 0)

    def row(self, layer: int, head: int, row: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The weights of one row, which keys it may see, and its share that went to no key."""
        share, allowed = self.weights[layer, head, row], self.allowed[layer, head, row]
        return share, allowed, missing(share.sum(), self._slack, allowed.any())

    def mean_distance(self, progress: Progress = None) -> np.ndarray:
        at = np.arange(self.shape[2])[:, None] + self.shape[3] - self.shape[2]
        far = np.abs(at - np.arange(self.shape[3]))
        return np.asarray((self.weights * far.astype(self.weights.dtype)).sum(-1))

    def key_mass(self, progress: Progress = None) -> np.ndarray:
        """Mean weight that each key gets from the rows that may see it."""
        seen = self.allowed.sum(-2)
        return np.asarray(np.divide(self.weights.sum(-2), seen, out=np.zeros(seen.shape), where=seen > 0))


class Stack:
    """Sources of equal shapes, one a layer."""

    shape: Shape

    def __init__(self, parts: Sequence[Dense | Lazy | Stack]) -> None:
        for part in parts[1:]:
            if part.shape[1:] != parts[0].shape[1:]:
                raise ValueError(f"all layers must have the same (heads, q_len, kv_len), got {parts[0].shape[1:]} "
                                 f"and {part.shape[1:]}")
        self.parts = parts
        self.shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])

    def __getattr__(self, name: str) -> Callable[..., np.ndarray]:
        if name not in ("entropy", "no_key", "column", "diagonal", "mean_distance", "key_mass"):
            raise AttributeError(name)

        def over_parts(*arguments: int, progress: Progress = None) -> np.ndarray:
            with Steps(progress, len(self.parts)) as steps:
                return np.concatenate([getattr(part, name)(*arguments, progress=steps.part()) for part in self.parts])

        return over_parts

    def map(self, bins: tuple[int, int], reduce: Reduced, progress: Progress = None) -> np.ndarray:
        with Steps(progress, len(self.parts)) as steps:
            return np.concatenate([part.map(bins, reduce, steps.part()) for part in self.parts])

    def summary(self, bins: tuple[int, int], k: int, progress: Progress = None) -> tuple[np.ndarray, ...]:
        with Steps(progress, len(self.parts)) as steps:
            found = [part.summary(bins, k, steps.part()) for part in self.parts]
        return tuple(np.concatenate(parts) for parts in zip(*found, strict=True))

    def only(self, layer: int, head: int) -> Source:
        part, layer = self._part(layer)
        return part.only(layer, head)

    def row(self, layer: int, head: int, row: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        part, layer = self._part(layer)
        return part.row(layer, head, row)

    def _part(self, layer: int) -> tuple[Dense | Lazy | Stack, int]:
        """The source that has this layer, and its place in it."""
        ends = np.cumsum([part.shape[0] for part in self.parts])
        at = int(np.searchsorted(ends, layer, side="right"))
        return self.parts[at], layer - int(ends[at]) + self.parts[at].shape[0]


Source: TypeAlias = Dense | Lazy | Stack


def _eps(dtype: object) -> float:
    """The rounding of weights of this dtype, which may be that of another library; float32's at least."""
    small = {"bfloat16": 2.0**-7, "float16": 2.0**-10}
    return next((eps for name, eps in small.items() if str(dtype).endswith(name)), 2.0**-23)


def _entropy(weights: np.ndarray) -> np.ndarray:
    """-Σ w ln w over the last axis, in nats, where 0 ln 0 is 0."""
    logs = np.log(np.maximum(weights, np.finfo(weights.dtype).tiny))
    return np.asarray(np.maximum(-(weights * logs).sum(-1), 0))
