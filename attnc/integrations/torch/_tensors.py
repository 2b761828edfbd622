"""Conversion of tensors to arrays and back without copies, and the checks of tensors that attnc accepts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch._subclasses import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad

if TYPE_CHECKING:
    from collections.abc import Iterable

GRADIENTS = ("query", "key", "value", "bias", "relative_bias", "relative_key", "relative_query", "sinks")
_PLAIN = {torch.Tensor, torch.nn.Parameter}
_TRACING = FakeTensor, FunctionalTensor
_FLOATS = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
_FOREIGN = {dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)
            and (dtype.is_complex or dtype.is_floating_point)} - _FLOATS


def as_array(x: Any) -> Any:
    """The memory of a dense tensor on the CPU as an array; returns other objects unchanged.

    Parameters
    ----------
    x : torch.Tensor, or anything else

    Raises
    ------
    ValueError
        For a tensor that is on another device, sparse, nested or quantised.

    Examples
    --------
    >>> as_array(torch.ones(2)), as_array([1, 2])
    (array([1., 1.], dtype=float32), [1, 2])
    """
    if not isinstance(x, torch.Tensor):
        return x
    if why := why_not(x):
        raise ValueError(f"attnc takes dense tensors on the CPU, got {why}")
    try:
        return array(x)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"attnc takes dense tensors on the CPU, got one without memory of its own: {error}") from error


def array(x: torch.Tensor) -> np.ndarray:
    if x.dtype is torch.bfloat16:
        import ml_dtypes  # NumPy itself has no bfloat16

        bits: np.ndarray = x.detach().view(torch.uint16).numpy(force=True)
        return bits.view(ml_dtypes.bfloat16)
    # materializes what torch computes lazily, such as the sign of z.conj().imag
    found: np.ndarray = x.numpy(force=True)
    return found


def as_tensor(x: np.ndarray) -> torch.Tensor:
    """The memory of an array as a tensor, bfloat16 among its dtypes.

    Parameters
    ----------
    x : array

    Examples
    --------
    >>> as_tensor(as_array(torch.ones(2, dtype=torch.bfloat16)))
    tensor([1., 1.], dtype=torch.bfloat16)
    """
    if x.dtype.kind == "V":
        return torch.from_numpy(x.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(x)


def why_not(x: Any) -> str | None:
    """The reason why attnc does not accept a tensor, or None."""
    if not isinstance(x, torch.Tensor):
        return type(x).__name__
    if x.is_nested:
        return "a nested tensor"
    if x.is_quantized:
        return "a quantised tensor"
    if x.layout is not torch.strided:
        return f"layout {x.layout}"
    if x.device.type not in ("cpu", "meta"):
        return f"device {x.device}"
    if x.dtype in _FOREIGN:
        return f"dtype {x.dtype}"
    return None


def is_plain(x: Any) -> bool:
    """Whether this is a plain tensor, or one that torch.compile traces with, and no other subclass."""
    return type(x) in _PLAIN or isinstance(x, _TRACING)


def check(name: str, x: Any) -> None:
    if why := why_not(x):
        error = ValueError if isinstance(x, torch.Tensor) else TypeError
        raise error(f"{name} must be a dense tensor on the CPU of a dtype that attnc has, got {why}")


def autocast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Query, key and value in the dtype of torch.autocast, which leaves float64 as it is."""
    if not torch.is_autocast_enabled("cpu"):
        return tensors
    dtype = torch.get_autocast_dtype("cpu")
    return tuple(x if x.dtype is torch.float64 or not x.is_cpu else x.to(dtype) for x in tensors)


def check_floating(name: str, x: torch.Tensor) -> None:
    """Raise unless this is a tensor of floats that attnc computes with."""
    check(name, x)
    if not x.dtype.is_floating_point:
        raise TypeError(f"{name} must be of a floating-point dtype, got {x.dtype}")


def check_one_dtype(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    """Raise for mixed dtypes, which torch's function refuses."""
    if not query.dtype == key.dtype == value.dtype:
        raise TypeError(f"query, key and value must have one dtype, got {query.dtype}, {key.dtype} and {value.dtype}")


def need_gradients(tensors: dict[str, torch.Tensor]) -> bool:
    """Whether an input or option requires grad; an error if there is no gradient for it."""
    found = [name for name, x in tensors.items() if x.requires_grad]
    for name in found:
        if name not in GRADIENTS:
            raise ValueError(f"{name} requires grad, but attnc has no gradient for it; pass {name}.detach()")
    return bool(found)


def are_eager(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether these are plain tensors and nothing records or transforms the call, so that no operator is needed."""
    return not (torch.compiler.is_compiling() or torch.jit.is_tracing() or torch._C._len_torch_dispatch_stack()
                or torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0
                or any([type(x) not in _PLAIN or not x.is_cpu for x in tensors]))
