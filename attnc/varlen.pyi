"""Types of varlen.py: without `want` the result is one array, with it an object."""

from typing import Any, Literal, TypeAlias, overload

from numpy.typing import ArrayLike, NDArray

from ._checks import VarlenArgs
from .results import AttentionResult

_Want: TypeAlias = Literal["lse"]

PATH_ROWS: tuple[int, ...]

@overload
def attention_varlen(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, cu_seqlens_q: ArrayLike, cu_seqlens_k: ArrayLike, *,
    causal: bool = ..., window: tuple[int | None, int | None] | None = ..., scale: float | None = ...,
    softcap: float | None = ..., alibi_slopes: ArrayLike | None = ..., sinks: ArrayLike | None = ...,
    want: tuple[()] = ..., out: NDArray[Any] | None = ..., num_threads: int | None = ...
) -> NDArray[Any]: ...
@overload
def attention_varlen(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, cu_seqlens_q: ArrayLike, cu_seqlens_k: ArrayLike, *,
    causal: bool = ..., window: tuple[int | None, int | None] | None = ..., scale: float | None = ...,
    softcap: float | None = ..., alibi_slopes: ArrayLike | None = ..., sinks: ArrayLike | None = ...,
    want: _Want | tuple[_Want, *tuple[_Want, ...]], out: NDArray[Any] | None = ..., num_threads: int | None = ...
) -> AttentionResult: ...
def alike(v: VarlenArgs) -> list[list[int]]: ...
