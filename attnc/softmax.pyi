"""Types of softmax.py."""

from typing import Any

from numpy.typing import ArrayLike, NDArray

def softmax(
    x: ArrayLike, axis: int | tuple[int, ...] | None = ..., *, where: ArrayLike | None = ...,
    out: NDArray[Any] | None = ..., num_threads: int | None = ...
) -> NDArray[Any]: ...
def log_softmax(
    x: ArrayLike, axis: int | tuple[int, ...] | None = ..., *, where: ArrayLike | None = ...,
    out: NDArray[Any] | None = ..., num_threads: int | None = ...
) -> NDArray[Any]: ...
