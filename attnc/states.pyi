"""Types of states.py."""

from typing import Any, Literal, TypeVar

from numpy.typing import ArrayLike, NDArray

from .results import AttentionResult

_State = TypeVar("_State", bound=tuple[ArrayLike, ArrayLike] | list[Any])      # a list of pairs of any arrays is one

def merge_states(
    states: list[_State] | tuple[_State, ...], *, layout: Literal["bhnd", "bnhd"] = ...
) -> tuple[NDArray[Any], NDArray[Any]]: ...

class AttentionState:
    def __init__(
        self, query: ArrayLike, *, q_offset: ArrayLike | None = ..., sinks: ArrayLike | None = ..., causal: bool = ...,
        window: tuple[int | None, int | None] | None = ..., scale: float | None = ..., softcap: float | None = ...,
        alibi_slopes: ArrayLike | None = ..., layout: Literal["bhnd", "bnhd"] = ..., num_threads: int | None = ...
    ) -> None: ...
    @property
    def kv_len(self) -> int: ...
    def update(
        self, key_chunk: ArrayLike, value_chunk: ArrayLike, *, mask: ArrayLike | None = ...,
        key_mask: ArrayLike | None = ..., bias: ArrayLike | None = ...
    ) -> None: ...
    def result(self) -> AttentionResult: ...
