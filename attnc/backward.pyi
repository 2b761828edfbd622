"""Types of backward.py."""

from typing import Any, Literal, TypeAlias

from numpy.typing import ArrayLike, NDArray

from .results import AttentionGradients

_Want: TypeAlias = Literal["query", "key", "value", "bias", "sinks"]

def attention_backward(
    grad_output: ArrayLike, query: ArrayLike, key: ArrayLike, value: ArrayLike, output: ArrayLike, lse: ArrayLike, *,
    mask: ArrayLike | None = ..., key_mask: ArrayLike | None = ..., bias: ArrayLike | None = ..., causal: bool = ...,
    window: tuple[int | None, int | None] | None = ..., q_offset: ArrayLike | None = ..., scale: float | None = ...,
    softcap: float | None = ..., alibi_slopes: ArrayLike | None = ..., sinks: ArrayLike | None = ...,
    q_segments: ArrayLike | None = ..., k_segments: ArrayLike | None = ..., q_lengths: ArrayLike | None = ...,
    kv_lengths: ArrayLike | None = ..., layout: Literal["bhnd", "bnhd"] = ..., want: _Want | tuple[_Want, ...] = ...,
    grad_lse: ArrayLike | None = ..., num_threads: int | None = ...
) -> AttentionGradients: ...
def softmax_backward(
    grad_output: ArrayLike, output: ArrayLike, axis: int | tuple[int, ...] | None = ..., *,
    num_threads: int | None = ...
) -> NDArray[Any]: ...
def log_softmax_backward(
    grad_output: ArrayLike, output: ArrayLike, axis: int | tuple[int, ...] | None = ..., *,
    num_threads: int | None = ...
) -> NDArray[Any]: ...
