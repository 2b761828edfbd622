"""Types of attention.py: without `want` the result is one array, with it an object."""

from typing import Any, Literal, TypeAlias, overload

from numpy.typing import ArrayLike, NDArray

from ._checks import Args
from .results import AttentionResult

_Want: TypeAlias = Literal["lse", "weights", "scores", "entropy", "max", "argmax"]

STATISTICS: frozenset[str]

@overload
def attention(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, *, mask: ArrayLike | None = ...,
    key_mask: ArrayLike | None = ..., bias: ArrayLike | None = ..., causal: bool = ...,
    window: tuple[int | None, int | None] | None = ..., q_offset: ArrayLike | None = ..., scale: float | None = ...,
    softcap: float | None = ..., alibi_slopes: ArrayLike | None = ..., sinks: ArrayLike | None = ...,
    q_segments: ArrayLike | None = ..., k_segments: ArrayLike | None = ..., q_lengths: ArrayLike | None = ...,
    kv_lengths: ArrayLike | None = ..., layout: Literal["bhnd", "bnhd"] = ..., want: tuple[()] = ...,
    out: NDArray[Any] | None = ..., num_threads: int | None = ...
) -> NDArray[Any]: ...
@overload
def attention(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, *, mask: ArrayLike | None = ...,
    key_mask: ArrayLike | None = ..., bias: ArrayLike | None = ..., causal: bool = ...,
    window: tuple[int | None, int | None] | None = ..., q_offset: ArrayLike | None = ..., scale: float | None = ...,
    softcap: float | None = ..., alibi_slopes: ArrayLike | None = ..., sinks: ArrayLike | None = ...,
    q_segments: ArrayLike | None = ..., k_segments: ArrayLike | None = ..., q_lengths: ArrayLike | None = ...,
    kv_lengths: ArrayLike | None = ..., layout: Literal["bhnd", "bnhd"] = ...,
    want: _Want | tuple[_Want, *tuple[_Want, ...]], out: NDArray[Any] | None = ..., num_threads: int | None = ...
) -> AttentionResult: ...
def attention_scores(
    query: ArrayLike, key: ArrayLike, *, stage: Literal["raw", "scaled", "capped", "masked"] = ...,
    mask: ArrayLike | None = ..., key_mask: ArrayLike | None = ..., bias: ArrayLike | None = ..., causal: bool = ...,
    window: tuple[int | None, int | None] | None = ..., q_offset: ArrayLike | None = ..., scale: float | None = ...,
    softcap: float | None = ..., alibi_slopes: ArrayLike | None = ..., sinks: ArrayLike | None = ...,
    q_segments: ArrayLike | None = ..., k_segments: ArrayLike | None = ..., q_lengths: ArrayLike | None = ...,
    kv_lengths: ArrayLike | None = ..., layout: Literal["bhnd", "bnhd"] = ..., out: NDArray[Any] | None = ...,
    num_threads: int | None = ...
) -> NDArray[Any]: ...
def attention_weights(
    query: ArrayLike, key: ArrayLike, *, mask: ArrayLike | None = ..., key_mask: ArrayLike | None = ...,
    bias: ArrayLike | None = ..., causal: bool = ..., window: tuple[int | None, int | None] | None = ...,
    q_offset: ArrayLike | None = ..., scale: float | None = ..., softcap: float | None = ...,
    alibi_slopes: ArrayLike | None = ..., sinks: ArrayLike | None = ..., q_segments: ArrayLike | None = ...,
    k_segments: ArrayLike | None = ..., q_lengths: ArrayLike | None = ..., kv_lengths: ArrayLike | None = ...,
    layout: Literal["bhnd", "bnhd"] = ..., lse: ArrayLike | None = ..., out: NDArray[Any] | None = ...,
    num_threads: int | None = ...
) -> NDArray[Any]: ...
def weighted_sum(
    weights: ArrayLike, value: ArrayLike, *, out: NDArray[Any] | None = ..., num_threads: int | None = ...
) -> NDArray[Any]: ...
def attend(
    a: Args, scales: tuple[NDArray[Any] | None, NDArray[Any] | None] = ...
) -> NDArray[Any] | AttentionResult: ...
