"""Attention with gradients: as a function of torch.autograd, and as operators for who records or compiles calls."""

from __future__ import annotations

import torch

import attnc
from attnc._checks.scalars import check_window

from ._tensors import array, as_tensor

ARRAYS = ("mask", "key_mask", "bias", "q_offset", "alibi_slopes", "sinks", "q_segments", "k_segments", "q_lengths",
          "kv_lengths")
NUMBERS = {"causal": "bool", "left": "SymInt?", "right": "SymInt?", "offset": "SymInt?", "scale": "float?",
           "softcap": "float?", "layout": "str", "num_threads": "SymInt?"}
SCHEMA = ", ".join([*(f"Tensor? {name}" for name in ARRAYS), *(f"{kind} {name}" for name, kind in NUMBERS.items())])


class Attention(torch.autograd.Function):
    """Attention with gradients without an operator, whose dispatch takes longer than a small attention."""

    @staticmethod
    def forward(ctx, weights: bool, names: tuple, options: dict, *tensors):
        arrays = {name: array(x) for name, x in zip(names, tensors, strict=True)}
        found = attnc.attention(**arrays, **options, want=("lse", "weights") if weights else "lse")
        output, lse = as_tensor(found.output), as_tensor(found.lse)
        ctx.save_for_backward(*tensors, output, lse)
        ctx.names, ctx.options = names, options
        ctx.set_materialize_grads(False)
        given = as_tensor(found.weights) if weights else None
        if weights:
            ctx.mark_non_differentiable(given)
        return output, lse, given

    @staticmethod
    def backward(ctx, grad_output, grad_lse, _):
        if torch.is_grad_enabled():
            raise RuntimeError("attnc has no second derivatives: a backward pass with create_graph=True is refused")
        *tensors, output, lse = ctx.saved_tensors
        arrays = {name: array(x) for name, x in zip(ctx.names, tensors, strict=True)}
        want = tuple(name for name, needs in zip(ctx.names, ctx.needs_input_grad[3:], strict=True) if needs)
        grad_output = torch.zeros_like(output) if grad_output is None else grad_output
        found = attnc.attention_backward(
            array(grad_output), output=array(output), lse=array(lse), want=want,
            grad_lse=None if grad_lse is None else array(grad_lse), **arrays, **ctx.options)
        return None, None, None, *(as_tensor(getattr(found, name)) if name in want else None for name in ctx.names)


# The operators. Their arguments are query, key, value, ARRAYS, NUMBERS; a result that is not wanted is empty.

def arguments(options: dict) -> list:
    """The options as the operators take them."""
    given = dict(options)
    window = given.pop("window", None)
    left, right = (None, None) if window is None else check_window(window) or (None, None)
    numbers = {"left": left, "right": right, "layout": given.pop("layout", "bhnd"),
               "causal": given.pop("causal", False),
               "offset": given.pop("q_offset") if isinstance(given.get("q_offset"), int) else None}
    arrays = [given.pop(name, None) for name in ARRAYS]
    numbers = [numbers[name] if name in numbers else given.pop(name, None) for name in NUMBERS]
    if given:
        raise TypeError(f"attention has no option {', '.join(given)}")
    return [*(None if x is None else torch.as_tensor(x) for x in arrays), *numbers]


def _options(rest: tuple) -> dict:
    arrays = {name: None if x is None else array(x) for name, x in zip(ARRAYS, rest, strict=False)}
    numbers = dict(zip(NUMBERS, rest[len(ARRAYS):], strict=True))
    left, right, offset = (numbers.pop(name) for name in ("left", "right", "offset"))
    if left is not None or right is not None:
        numbers["window"] = (left, right)
    if offset is not None:
        arrays["q_offset"] = offset
    return {**arrays, **numbers}


@torch.library.custom_op("attnc::attention", mutates_args=(), device_types="cpu", schema=(
    f"(Tensor query, Tensor key, Tensor value, {SCHEMA}, bool weights) -> (Tensor, Tensor, Tensor)"))
def _attention(query, key, value, *rest):
    *rest, weights = rest
    found = attnc.attention(*map(array, (query, key, value)), want=("lse", "weights") if weights else ("lse",),
                            **_options(rest))
    output = as_tensor(found.output)
    return output, as_tensor(found.lse), as_tensor(found.weights) if weights else output.new_empty(0)


@_attention.register_fake
def _(query, key, value, *rest):
    layout, weights = rest[len(ARRAYS) + list(NUMBERS).index("layout")], rest[-1]
    batch = torch.broadcast_shapes(query.shape[:-3], key.shape[:-3], value.shape[:-3])
    rows, columns = query.shape[-3:-1], value.shape[-1:]
    if layout == "bnhd":
        output, rows, keys = (*batch, *rows, *columns), rows[::-1], key.shape[-3]
    else:
        output, keys = (*batch, *rows, *columns), key.shape[-2]
    dtype = torch.promote_types(torch.promote_types(query.dtype, key.dtype), value.dtype)
    lse = query.new_empty((*batch, *rows), dtype=torch.float64 if dtype is torch.float64 else torch.float32)
    return (query.new_empty(output, dtype=dtype), lse,
            query.new_empty((*batch, *rows, keys) if weights else 0, dtype=dtype))


@torch.library.custom_op("attnc::attention_backward", mutates_args=(), device_types="cpu", schema=(
    "(Tensor grad_output, Tensor grad_lse, Tensor query, Tensor key, Tensor value, Tensor output, Tensor lse, "
    f"{SCHEMA}, str want) -> Tensor[]"))
def _attention_backward(grad_output, grad_lse, query, key, value, output, lse, *rest):
    *rest, want = rest
    found = attnc.attention_backward(*map(array, (grad_output, query, key, value, output, lse)),
                                     want=tuple(want.split()), grad_lse=array(grad_lse), **_options(rest))
    return [as_tensor(gradient) for gradient in vars(found).values()]


@_attention_backward.register_fake
def _(grad_output, grad_lse, query, key, value, output, lse, *rest):
    given = dict(zip(("query", "key", "value", *ARRAYS), (query, key, value, *rest), strict=False))
    return [given[name].new_empty(given[name].shape) for name in rest[-1].split()]


def _save(ctx, inputs, output) -> None:
    tensors = 3 + len(ARRAYS)
    ctx.save_for_backward(*inputs[:tensors], *output[:2])
    ctx.numbers = inputs[tensors:-1]
    ctx.mark_non_differentiable(output[2])


def _backward(ctx, grad_output, grad_lse, _):
    *tensors, output, lse = ctx.saved_tensors
    inputs = ("query", "key", "value", *ARRAYS)
    want = [name for name, needs in zip(inputs, ctx.needs_input_grad, strict=False) if needs]
    found = torch.ops.attnc.attention_backward(grad_output, grad_lse, *tensors[:3], output, lse, *tensors[3:],
                                               *ctx.numbers, " ".join(want))
    found = dict(zip(want, found, strict=True))
    return (*(found.get(name) for name in inputs), *[None] * (len(NUMBERS) + 1))


_attention.register_autograd(_backward, setup_context=_save)
