"""Tensors to arrays and back without copies, and attention on tensors."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch

import attnc


def as_array(x):
    """The memory of a CPU tensor as an array; anything else as it is."""
    if not isinstance(x, torch.Tensor):
        return x
    if x.device.type != "cpu" or x.layout != torch.strided:
        raise ValueError(f"attnc takes dense tensors on the CPU, got {x.layout} on {x.device}")
    if x.dtype == torch.bfloat16:
        import ml_dtypes
        return x.detach().view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
    return x.detach().numpy()


def as_tensor(x: np.ndarray) -> torch.Tensor:
    if x.dtype.name == "bfloat16":
        return torch.from_numpy(x.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(x)


def attention(query, key, value, *, want=(), **options):
    given = [query, key, value, *options.values()]
    if torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in given):
        raise ValueError("no gradients yet")
    found = attnc.attention(*map(as_array, (query, key, value)), want=want,
                            **{name: as_array(x) for name, x in options.items()})
    if not want:
        return as_tensor(found)
    return SimpleNamespace(output=as_tensor(found.output), weights=as_tensor(found.weights))
