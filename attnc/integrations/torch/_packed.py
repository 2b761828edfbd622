"""Packed sequences of tensors through `attnc.attention_varlen`, with gradients: cumulative lengths, jagged tensors."""

from __future__ import annotations

from typing import Any

import torch

import attnc

from . import _calls, _tensors
from ._tensors import array, as_tensor

OF_PACKED = ("query", "key", "value", "sinks")      # what has gradients


class Packed(torch.autograd.Function):    # type: ignore[misc]    # torch is Any to mypy
    """`attnc.attention_varlen` and `attnc.attention_varlen_backward` as one autograd function: output and lse."""

    @staticmethod
    def forward(ctx: Any, bounds: tuple[Any, Any], names: tuple[str, ...], options: dict[str, Any],
                *tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        *inputs, options = _arrays(bounds, names, options, tensors)
        found = attnc.attention_varlen(*inputs, **options, want="lse")
        output, lse = as_tensor(found.output), as_tensor(found.lse)
        ctx.save_for_backward(*tensors, output, lse)
        ctx.call = bounds, names, options
        ctx.set_materialize_grads(False)
        return output, lse

    @staticmethod
    @torch.autograd.function.once_differentiable    # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad_output: torch.Tensor | None,
                 grad_lse: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        *tensors, output, lse = ctx.saved_tensors
        bounds, names, options = ctx.call
        query, key, value, *bounds, options = _arrays(bounds, names, options, tensors)
        want: Any = tuple(name for name, needs in zip(names, ctx.needs_input_grad[3:], strict=True) if needs)
        grad_output = torch.zeros_like(output) if grad_output is None else grad_output
        found = attnc.attention_varlen_backward(
            array(grad_output), query, key, value, array(output), array(lse), *bounds, want=want,
            grad_lse=None if grad_lse is None else array(grad_lse), **options)
        return None, None, None, *(as_tensor(getattr(found, name)) if name in want else None for name in names)


def _arrays(bounds: tuple[Any, Any], names: tuple[str, ...], options: dict[str, Any],
            tensors: tuple[torch.Tensor, ...]) -> list[Any]:
    """Query, key, value, the bounds and the options as arrays."""
    given = dict(zip(names, map(array, tensors), strict=True))
    return [given.pop("query"), given.pop("key"), given.pop("value"), *bounds, {**options, **given}]


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_seqlens_q: Any, cu_seqlens_k: Any,
           options: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and lse of packed (tokens, heads, dim) tensors; gradients for query, key, value and sinks."""
    query, key, value = _tensors.autocast(query, key, value)
    tensors = {"query": query, "key": key, "value": value,
               **{name: x for name, x in options.items() if isinstance(x, torch.Tensor)}}
    if not _tensors.are_eager(tensors.values()):
        raise ValueError("packed sequences of tensors have no operator: wanted plain tensors, in a call that neither "
                         "torch.compile nor torch.func transforms")
    if torch.is_grad_enabled():
        _tensors.need_gradients({name: x for name, x in tensors.items() if x.requires_grad})
    bounds = tuple(map(_tensors.as_array, (cu_seqlens_q, cu_seqlens_k)))
    others = {name: _tensors.as_array(x) for name, x in options.items() if name not in OF_PACKED}
    tensors = {name: x for name, x in tensors.items() if name in OF_PACKED}
    others.update({name: x for name, x in options.items() if name in OF_PACKED and name not in tensors})
    found: tuple[torch.Tensor, torch.Tensor] = Packed.apply(bounds, tuple(tensors), others, *tensors.values())
    return found


def is_jagged(*tensors: Any) -> bool:
    """Whether all are nested tensors of layout torch.jagged."""
    return all([isinstance(x, torch.Tensor) and x.is_nested and x.layout is torch.jagged for x in tensors])


def jagged(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, want: Any, options: dict[str, Any],
           one_dtype: bool = False) -> torch.Tensor | attnc.AttentionResult:
    """`attnc.attention_varlen` of jagged tensors (batch, heads, lengths, dim), each example a sequence.

    With `one_dtype` other dtypes are refused as torch refuses them.
    """
    names = (want,) if isinstance(want, str) else tuple(want)
    if not {"lse"}.issuperset(names):
        raise ValueError(f"want must be out of 'lse' for jagged tensors, got {want!r}")
    if _calls.watching(within_patch=True):
        raise ValueError("capture cannot record the attention of nested tensors")
    options = dict(options)
    ragged = 1 if options.pop("layout", "bhnd") == "bnhd" else 2
    packed, bounds = [], []
    for name, x in (("query", query), ("key", key), ("value", value)):
        tokens, offsets = _tokens(name, x, ragged)
        packed.append(tokens)
        bounds.append(offsets)
    if one_dtype:
        _tensors.check_one_dtype(*_tensors.autocast(*packed))
    if bounds[2] is not bounds[1] and not torch.equal(bounds[2], bounds[1]):
        raise ValueError("value has other lengths than key; wanted equal ones")
    output, lse = attend(packed[0], packed[1], packed[2], bounds[0], bounds[1], options)
    result = _jagged_like(output, bounds[0], ragged)
    return attnc.AttentionResult(result, lse=_jagged_like(lse.transpose(0, 1), bounds[0], 2)) if names else result


def _tokens(name: str, x: torch.Tensor, ragged: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens (tokens, heads, dim) of a jagged tensor, and where each example begins and ends."""
    if not is_jagged(x):
        raise ValueError(f"{name} must be a jagged tensor as the others are, got "
                         f"{_tensors.why_not(x) or 'a dense tensor'}")
    if x.dim() != 4 or x._ragged_idx != ragged:
        axes = "(batch, lengths, heads, dim)" if ragged == 1 else "(batch, heads, lengths, dim)"
        raise ValueError(f"{name} has {x.dim()} axes, of which axis {x._ragged_idx} is jagged; wanted {axes}")
    if x.lengths() is not None:
        raise ValueError(f"{name} has gaps between its examples; wanted {name}.contiguous()")
    tokens = (x.transpose(1, 2) if ragged == 2 else x).values()
    _tensors.check_floating(name, tokens)
    return tokens, x.offsets()


def _jagged_like(tokens: torch.Tensor, offsets: torch.Tensor, ragged: int) -> torch.Tensor:
    found = torch.nested.nested_tensor_from_jagged(tokens, offsets)
    return found.transpose(1, 2) if ragged == 2 else found
