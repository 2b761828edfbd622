"""Gradients and tangents: an autograd function for plain calls, and torch's rules for the operators.

The kernels compute first gradients. Tangents (forward mode) and derivatives of gradients use the formulas in torch's
own operations, at the level of torch.func that needs them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad

import attnc

from . import _formula
from ._operators import ARRAYS, INPUTS, LIBRARY, NUMBERS, arguments, room
from ._tensors import GRADIENTS, are_eager, array, as_tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class Attention(torch.autograd.Function):    # type: ignore[misc]    # torch is Any to mypy
    """Attention with gradients, without an operator, whose dispatch takes longer than a small attention."""

    @staticmethod
    def forward(ctx: Any, weights: bool, names: tuple[str, ...], options: dict[str, Any], order: list[int] | None,
                *tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        arrays: dict[str, Any] = {name: array(x) for name, x in zip(names, tensors, strict=True)}
        output = room(tensors[0], tensors[2], order)
        found = attnc.attention(**arrays, **options, want=("lse", "weights") if weights else "lse",
                                out=None if output is None else array(output))
        output, lse = as_tensor(found.output) if output is None else output, as_tensor(found.lse)
        ctx.save_for_backward(*tensors, output, lse)
        ctx.names, ctx.options = names, options
        ctx.set_materialize_grads(False)
        given = as_tensor(found.weights) if weights else None
        if weights:
            ctx.mark_non_differentiable(given)
        return output, lse, given

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor | None, grad_lse: torch.Tensor | None,
                 _: None) -> tuple[torch.Tensor | None, ...]:
        *tensors, output, lse = ctx.saved_tensors
        want = [name for name, needs in zip(ctx.names, ctx.needs_input_grad[4:], strict=True) if needs]
        grad_output = torch.zeros_like(output) if grad_output is None else grad_output
        grads = [grad_output] if grad_lse is None else [grad_output, grad_lse]
        batched = any([torch._C._functorch.is_legacy_batchedtensor(x) for x in grads])     # is_grads_batched=True
        if not torch.is_grad_enabled() and not batched and are_eager([*tensors, *grads]):
            arrays: dict[str, Any] = {name: array(x) for name, x in zip(ctx.names, tensors, strict=True)}
            result = attnc.attention_backward(
                array(grad_output), output=array(output), lse=array(lse), want=tuple(want),
                grad_lse=None if grad_lse is None else array(grad_lse), **arrays, **ctx.options)
            found = {name: as_tensor(x) for name, x in vars(result).items()}
        else:
            query, key, value, *options = tensors
            options = {**ctx.options, **dict(zip(ctx.names[3:], options, strict=True))}
            found = dict(zip(want, torch.ops.attnc.attention_backward.default(
                grad_output, grad_lse, query, key, value, output, lse, *arguments(options), " ".join(want)),
                strict=True))
        return None, None, None, None, *(found.get(name) for name in ctx.names)


# The operators. A rule handles one level of torch.func, like those of torch's own operators, and `_below` passes the
# call to the next level. Function.apply would begin at the first level again, hence _SingleLevelFunction.

class _Attention(torch.autograd.function._SingleLevelFunction):    # type: ignore[misc]    # torch is Any to mypy
    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        output, lse, weights = _below(torch.ops.attnc.attention.default, args)
        ctx.save_for_backward(*args[:len(INPUTS)], output, lse)
        ctx.numbers = args[len(INPUTS):-1]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(weights)
        return output, lse, weights

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor | None, grad_lse: torch.Tensor | None,
                 _: None) -> tuple[torch.Tensor | None, ...]:
        *tensors, output, lse = ctx.saved_tensors
        want = [name for name, needs in zip(INPUTS, ctx.needs_input_grad, strict=False) if needs]
        grad_output = torch.zeros_like(output) if grad_output is None else grad_output
        found = torch.ops.attnc.attention_backward.default(grad_output, grad_lse, *tensors[:3], output, lse,
                                                           *tensors[3:], *ctx.numbers, " ".join(want))
        found = dict(zip(want, found, strict=True))
        return (*(found.get(name) for name in INPUTS), *[None] * (len(NUMBERS) + 1))


class _AttentionBackward(torch.autograd.function._SingleLevelFunction):    # type: ignore[misc]    # Any to mypy
    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[torch.Tensor, ...]:
        ctx.save_for_backward(*(x for x in args if isinstance(x, torch.Tensor)))
        ctx.rest = [None if isinstance(x, torch.Tensor) else (x,) for x in args]
        return tuple(_below(torch.ops.attnc.attention_backward.default, args))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        saved = iter(ctx.saved_tensors)
        args = [next(saved) if x is None else x[0] for x in ctx.rest]
        wanted = [i for i, needs in enumerate(ctx.needs_input_grad) if needs]

        def function(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
            given = dict(zip(wanted, inputs, strict=True))
            return tuple(_formula.attention_backward(*(given.get(i, x) for i, x in enumerate(args))))

        _, pull = torch.func.vjp(function, *(args[i] for i in wanted))
        found = dict(zip(wanted, pull(grads), strict=True))
        return tuple(found.get(i) for i in range(len(args)))


def has_tangent(x: torch.Tensor) -> bool:
    # not forward_ad.unpack_dual, which does not know a level that a compiled graph has entered
    return torch._VF._unpack_dual(x, level=0)[1] is not None


def _below(operator: Callable[..., Any], args: Sequence[Any]) -> Any:
    """The call at the next level, with derivatives, which a Function turns off for inner calls."""
    with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True), torch._C._AutoDispatchBelowAutograd():
        return operator(*args)


def _rule(operator: Callable[..., Any], function: Any, formula: Any, names: Sequence[str]) -> Any:
    """The rule of autograd for an operator whose first arguments are tensors of these names."""
    @torch._disable_dynamo     # type: ignore[untyped-decorator]    # torch is Any to mypy
    def rule(*args: Any) -> Any:
        tensors = [(name, x) for name, x in zip(names, args, strict=False) if x is not None]
        duals = {name for name, x in tensors if has_tangent(x)}
        needs_grad = {name for name, x in tensors if x.requires_grad} if torch.is_grad_enabled() else set()
        for name, _ in tensors:
            if name in ARRAYS and name not in GRADIENTS and name in duals | needs_grad:
                what = "has a tangent" if name in duals else "requires grad"
                raise ValueError(f"{name} {what}, but attnc has no derivative for it; pass {name}.detach()")
        if duals:
            return formula(*args)
        if not needs_grad:
            return _below(operator, args)
        with enable_single_level_autograd_function():
            return function(*args)
    return rule


def _register() -> None:
    operators = torch.ops.attnc
    gradients = ("grad_output", "grad_lse", "query", "key", "value", "output", "lse", *ARRAYS)
    LIBRARY.impl("attention", _rule(operators.attention.default, _Attention.apply, _formula.attention, INPUTS),
                 "Autograd")
    LIBRARY.impl("attention_backward", _rule(
        operators.attention_backward.default, lambda *args: list(_AttentionBackward.apply(*args)),
        _formula.attention_backward, gradients), "Autograd")
    LIBRARY.impl("attention_places", _rule(operators.attention_places.default, None, None,
                                           ("query", "key", *ARRAYS)), "Autograd")


_register()
