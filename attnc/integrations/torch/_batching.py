"""torch.vmap of the operators: one call, in which the mapped axis is the first batch axis."""

from __future__ import annotations

import types
from typing import TYPE_CHECKING, Any

import torch

from . import _formula
from ._operators import ARRAYS, INPUTS, LIBRARY, NUMBERS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# Number of an argument's axes after those of the batch; sinks have no batch axes unless they are mapped.
_AXES = {"query": 3, "key": 3, "value": 3, "output": 3, "grad_output": 3, "lse": 2, "grad_lse": 2, "mask": 3,
         "key_indices": 3, "bias": 3, "relative_bias": 2, "relative_key": 3, "relative_query": 3, "key_mask": 1,
         "k_positions": 2, "q_segments": 1, "k_segments": 1, "alibi_slopes": 1, "sinks": 1, "q_lengths": 0,
         "kv_lengths": 0, "q_offset": 0}
_ORDER = list(NUMBERS).index("order")


class _Folded:
    """The arguments of an operator by name; tensors have the mapped axis first and every batch axis."""

    def __init__(self, size: int, in_dims: Sequence[int | None], names: Sequence[str], args: Sequence[Any]):
        given, dims = dict(zip(names, args, strict=False)), dict(zip(names, in_dims, strict=False))
        shapes = {name: [n for k, n in enumerate(x.shape) if k != dims[name]] for name, x in given.items()
                  if x is not None}
        rank = max(len(shapes[name]) for name in ("query", "key", "value") if name in shapes)
        self.two_d, self.size, self.shapes, self.given = rank == 2, size, shapes, given
        self.mapped = {name for name in shapes if dims[name] is not None}
        for name in ("scale", "softcap", "relative_index"):
            if name in self.mapped:
                what = "one array" if name == "relative_index" else "one number"
                raise ValueError(f"{name} is mapped by vmap; wanted {what} for all examples")
        for name, x in given.items():
            if name in _AXES and x is not None:
                x = x[None] if dims[name] is None else x.movedim(dims[name], 0)
                missing = max(rank - 3, 0) + _AXES[name] - (x.ndim - 1)
                given[name] = x.reshape(x.shape[0], *[1] * missing, *x.shape[1 + max(-missing, 0):])
        if "sinks" not in self.mapped and given.get("sinks") is not None:
            given["sinks"] = given["sinks"].reshape(-1)
        self.expand("query")     # because a mapped mask alone would not make a batch

    def expand(self, *names: str) -> None:
        for name in names:
            if (x := self.given[name]) is not None:
                self.given[name] = x.expand(self.size, *x.shape[1:])

    def unfold(self, x: torch.Tensor, heads: bool = True) -> torch.Tensor:
        """A result without the axis of the one head that 2-D arguments have."""
        return x.squeeze(1) if self.two_d and heads else x

    def arguments(self, *numbers: Any) -> list[Any]:
        own = list(numbers)
        own[_ORDER] = None      # the axes in memory are those of one example
        return [*self.given.values(), *own]


# torch is Any to mypy, hence its decorators are untyped.

@torch._disable_dynamo     # type: ignore[untyped-decorator]
def _attention(info: Any, in_dims: Sequence[int | None], *args: Any) -> tuple[tuple[torch.Tensor, ...], Any]:
    folded = _Folded(info.batch_size, in_dims, INPUTS, args)
    *numbers, weights = args[len(INPUTS):]
    function = _formula.attention if "sinks" in folded.mapped else torch.ops.attnc.attention.default
    output, lse, dense = function(*folded.arguments(*numbers), weights)
    results = folded.unfold(output), folded.unfold(lse), folded.unfold(dense) if weights else dense
    return results, (0, 0, 0 if weights else None)


@torch._disable_dynamo     # type: ignore[untyped-decorator]
def _attention_backward(info: Any, in_dims: Sequence[int | None], *args: Any) -> tuple[list[torch.Tensor], list[int]]:
    names = ("grad_output", "grad_lse", "query", "key", "value", "output", "lse", *ARRAYS)
    folded = _Folded(info.batch_size, in_dims, names, args)
    *numbers, want = args[len(names):]
    wanted, given = want.split(), folded.given
    folded.expand("grad_output", "grad_lse", "output", "lse", *(name for name in wanted if name != "sinks"))
    found = {}
    if "sinks" in wanted:
        found["sinks"] = _sinks_gradient(folded, numbers)
    given["sinks"] = None       # the lse includes their effect on the other gradients
    if others := [name for name in wanted if name != "sinks"]:
        gradients = torch.ops.attnc.attention_backward.default(*folded.arguments(*numbers), " ".join(others))
        found.update(zip(others, gradients, strict=True))
    results = [found[name].reshape(folded.size, *folded.shapes[name]) for name in wanted]
    return results, [0] * len(results)


def _sinks_gradient(folded: _Folded, numbers: Sequence[Any]) -> torch.Tensor:
    given = folded.given
    lse = given["lse"]
    grad, output = (given[name].to(lse.dtype) for name in ("grad_output", "output"))
    delta = (grad * output).sum(-1)
    if numbers[list(NUMBERS).index("layout")] == "bnhd":
        delta = delta.transpose(-1, -2)
    if given["grad_lse"] is not None:
        delta = delta - given["grad_lse"]
    found = _formula.sinks_gradient(delta, lse, given["sinks"].to(lse.dtype))
    return found.sum(tuple(range(1, found.ndim - 1)))


@torch._disable_dynamo     # type: ignore[untyped-decorator]
def _attention_places(info: Any, in_dims: Sequence[int | None], *args: Any) -> tuple[torch.Tensor, int]:
    names = ("query", "key", *ARRAYS)
    folded = _Folded(info.batch_size, in_dims, names, args)
    return folded.unfold(torch.ops.attnc.attention_places.default(*folded.arguments(*args[len(names):]))), 0


def _of_grads_batched(rule: Callable[..., Any]) -> Any:
    """The rule for ``is_grads_batched=True``, which uses an older mechanism than torch.func."""
    @torch._disable_dynamo     # type: ignore[untyped-decorator]
    def function(*args: Any) -> Any:
        level = torch._C._vmapmode_increment_nesting() - 1
        torch._C._vmapmode_decrement_nesting()
        mapped = [isinstance(x, torch.Tensor) and torch._C._functorch.is_legacy_batchedtensor(x) for x in args]
        # a tensor that only an outer level has mapped gets an axis of size 1
        plain = [torch._remove_batch_dim(x, level, 1, 0) if is_mapped else x
                 for x, is_mapped in zip(args, mapped, strict=True)]
        info = types.SimpleNamespace(batch_size=max(x.shape[0] for x, y in zip(plain, mapped, strict=True) if y))
        results, dims = rule(info, [0 if is_mapped else None for is_mapped in mapped], *plain)
        found = [x if dim is None else torch._add_batch_dim(x, dim, level)
                 for x, dim in zip(results, dims, strict=True)]
        return found if isinstance(results, list) else tuple(found)
    return function


for _name, _function in (("attention", _attention), ("attention_backward", _attention_backward),
                         ("attention_places", _attention_places)):
    torch.library.register_vmap(f"attnc::{_name}", _function, lib=LIBRARY)
for _name, _function in (("attention", _attention), ("attention_backward", _attention_backward)):
    LIBRARY.impl(_name, _of_grads_batched(_function), "Batched")
