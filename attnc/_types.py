"""Names of types for annotations."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias, TypedDict, TypeVar

import numpy as np
from numpy.typing import ArrayLike as ArrayLike
from numpy.typing import DTypeLike as DTypeLike
from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]
Mask: TypeAlias = NDArray[np.bool_]
Integers: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float64]

Shape: TypeAlias = tuple[int, ...]
Axes: TypeAlias = int | tuple[int, ...] | None
Layout: TypeAlias = Literal["bhnd", "bnhd"]
Stage: TypeAlias = Literal["raw", "scaled", "capped", "masked"]
Window: TypeAlias = tuple[int | None, int | None]

_Result: TypeAlias = Literal["lse", "weights", "scores", "entropy", "max", "argmax"]
Wanted: TypeAlias = _Result | tuple[_Result, *tuple[_Result, ...]]
Ragged: TypeAlias = Sequence[ArrayLike | None]       # one array for each packed sequence
_Lse: TypeAlias = Literal["lse"]
Lse: TypeAlias = _Lse | tuple[_Lse, *tuple[_Lse, ...]]
_Gradient: TypeAlias = Literal["query", "key", "value", "bias", "relative_bias", "relative_key", "relative_query",
                               "sinks"]
Gradient: TypeAlias = _Gradient | tuple[_Gradient, ...]

# Options of statistics of weights.
HeadsReduced: TypeAlias = Literal["mean", "sum", "max", "group"]
Index: TypeAlias = tuple[int | slice, ...]
Progress: TypeAlias = bool | Callable[[int, int], object] | None
Reduced: TypeAlias = Literal["mean", "max"]
Report: TypeAlias = Callable[[int, int], object]
Rows: TypeAlias = slice | ArrayLike | None
Sign: TypeAlias = Literal["positive", "both"]

# Of pictures: cells of a map, an index of a head or (layer, head), names of positions.
Bins: TypeAlias = int | tuple[int, int] | None
Head: TypeAlias = int | tuple[int, int] | None
Tokens: TypeAlias = Sequence[str] | NDArray[np.str_] | None

State = TypeVar("State", bound=tuple[ArrayLike, ArrayLike] | list[Any])      # a list of pairs of any arrays is one
Folded = TypeVar("Folded")


BlockMask: TypeAlias = tuple[ArrayLike, int, int]      # a mask over blocks of rows by keys


class SharedOptions(TypedDict, total=False):
    """Options that mean the same over packed tokens and over arrays with batch axes."""

    causal: bool
    window: Window | None
    scale: float | None
    softcap: float | None
    alibi_slopes: ArrayLike | None
    sinks: ArrayLike | None
    num_threads: int | None


class VarlenOptions(SharedOptions, total=False):
    """What attention_varlen takes besides its inputs, `want` and `out`: the rest of an overload."""

    mask: Ragged | None
    key_indices: Ragged | None
    key_mask: ArrayLike | None
    bias: Ragged | None
    relative_bias: Ragged | None
    relative_index: Ragged | None
    relative_key: ArrayLike | None
    relative_query: ArrayLike | None
    k_positions: Ragged | None
    q_offset: ArrayLike | None
    q_segments: ArrayLike | None
    k_segments: ArrayLike | None


class PagedOptions(VarlenOptions, total=False):
    """What attention_varlen takes for keys and values in pages."""

    block_table: ArrayLike | None
    kv_lengths: ArrayLike | None


class CacheOptions(SharedOptions, total=False):
    """What KVCache.attend takes besides its query, `want` and `out`."""

    mask: ArrayLike | None
    block_mask: BlockMask | None
    key_indices: ArrayLike | None
    key_mask: ArrayLike | None
    bias: ArrayLike | None
    relative_bias: ArrayLike | None
    relative_index: ArrayLike | None
    relative_key: ArrayLike | None
    relative_query: ArrayLike | None
    q_offset: ArrayLike | None
    q_segments: ArrayLike | None
    k_segments: ArrayLike | None
    q_lengths: ArrayLike | None
    layout: Layout


class Options(CacheOptions, total=False):
    """What attention takes besides its inputs, `want` and `out`."""

    k_positions: ArrayLike | None
    kv_lengths: ArrayLike | None
