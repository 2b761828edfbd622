"""Attention on tensors, with gradients, and tensors to arrays and back without copies."""

from __future__ import annotations

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
    """An array's memory as a tensor."""
    if x.dtype.name == "bfloat16":
        return torch.from_numpy(x.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(x)


def attention(query, key, value, *, bias=None, sinks=None, want=(), **options):
    """`attnc.attention` on tensors, with gradients; weights have none."""
    tensors = query, key, value, bias, sinks
    options = {name: as_array(x) for name, x in options.items()}
    if torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in tensors):
        output, weights = _Attention.apply(*tensors, options, want)
    else:
        output, weights, _ = _forward(tensors, options, want)
    return attnc.AttentionResult(output, weights=weights) if want else output


def _forward(tensors, options, want, lse=False):
    query, key, value, bias, sinks = map(as_array, tensors)
    want = (*((want,) if want else ()), *(("lse",) if lse else ()))
    found = attnc.attention(query, key, value, bias=bias, sinks=sinks, want=want, **options)
    if not want:
        return as_tensor(found), None, None
    return as_tensor(found.output), as_tensor(found.weights) if "weights" in want else None, getattr(found, "lse", None)


class _Attention(torch.autograd.Function):
    """Attention that remembers its inputs, its output and the lse."""

    @staticmethod
    def forward(ctx, query, key, value, bias, sinks, options, want):
        output, weights, ctx.lse = _forward((query, key, value, bias, sinks), options, want, lse=True)
        ctx.save_for_backward(query, key, value, bias, sinks, output)
        ctx.options = options
        if weights is not None:
            ctx.mark_non_differentiable(weights)
        return output, weights

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_output, _):
        query, key, value, bias, sinks, output = map(as_array, ctx.saved_tensors)
        names = "query", "key", "value", "bias", "sinks"
        want = tuple(name for name, needed in zip(names, ctx.needs_input_grad, strict=False) if needed)
        found = attnc.attention_backward(as_array(grad_output), query, key, value, output, ctx.lse, bias=bias,
                                         sinks=sinks, want=want, **ctx.options)
        grads = (as_tensor(np.ascontiguousarray(getattr(found, name))) if name in want else None for name in names)
        return (*grads, None, None)
