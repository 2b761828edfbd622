"""The operators by which torch records, transforms or compiles calls of attention: schemas, kernels and shapes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

import attnc
from attnc._checks.scalars import check_window

from ._tensors import array, as_tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

ARRAYS = ("mask", "key_indices", "key_mask", "bias", "relative_bias", "relative_index", "relative_key",
          "relative_query", "q_offset", "k_positions", "alibi_slopes", "sinks", "q_segments", "k_segments", "q_lengths",
          "kv_lengths", "scale", "softcap")
INPUTS = ("query", "key", "value", *ARRAYS)
# An option that is an array or a number has a name for each: q_offset and offset, scale and factor, softcap and cap.
NUMBERS = {"causal": "bool", "left": "SymInt?", "right": "SymInt?", "offset": "SymInt?", "factor": "float?",
           "cap": "float?", "layout": "str", "num_threads": "SymInt?", "order": "SymInt[]?"}
_NUMBER = (int, float, torch.SymInt, torch.SymFloat)
_AS_ARRAY = {"offset": "q_offset", "factor": "scale", "cap": "softcap"}
SCHEMA = ", ".join([*(f"Tensor? {name}" for name in ARRAYS), *(f"{kind} {name}" for name, kind in NUMBERS.items())])
LIBRARY = torch.library.Library("attnc", "FRAGMENT")


def arguments(options: dict[str, Any], order: Sequence[int] | None = None) -> list[Any]:
    """The options in the order of the operators: ARRAYS, then NUMBERS; `order` is the memory order of output axes."""
    given = dict(options)
    window = given.pop("window", None)
    left, right = (None, None) if window is None else check_window(window) or (None, None)
    numbers = {"left": left, "right": right, "layout": given.pop("layout", "bhnd"), "order": order,
               "causal": given.pop("causal", False)}
    for number, name in _AS_ARRAY.items():
        numbers[number] = given.pop(name) if isinstance(given.get(name), _NUMBER) else None
    arrays = [given.pop(name, None) for name in ARRAYS]
    rest = [numbers[name] if name in numbers else given.pop(name, None) for name in NUMBERS]
    if given:
        raise TypeError(f"attention has no option {', '.join(given)}")
    # the default device may be another than the CPU
    return [*(x if x is None or isinstance(x, torch.Tensor) else torch.as_tensor(x, device="cpu") for x in arrays),
            *rest]


def _options(rest: Sequence[Any]) -> dict[str, Any]:
    """The options of `attnc.attention` from the result of `arguments`."""
    options: dict[str, Any] = {name: None if x is None else array(x) for name, x in zip(ARRAYS, rest, strict=False)}
    numbers = dict(zip(NUMBERS, rest[len(ARRAYS):], strict=True))
    del numbers["order"]
    window = numbers.pop("left"), numbers.pop("right")
    if window != (None, None):
        numbers["window"] = window
    for number, name in _AS_ARRAY.items():
        value = numbers.pop(number)
        if value is not None:
            options[name] = value
    for name in ("scale", "softcap"):
        if options[name] is not None:
            options[name] = float(options[name])
    return {**options, **numbers}


def room(query: torch.Tensor, value: torch.Tensor, order: Sequence[int] | None) -> torch.Tensor | None:
    """An empty output in the query's dtype whose axes have this order in memory, or None without an order."""
    return None if order is None else torch.empty_permuted((*query.shape[:-1], value.shape[-1]), order,
                                                           dtype=query.dtype, device=query.device)


# Each operator has the arguments INPUTS and NUMBERS beside its own; a result that is not wanted is empty. After a graph
# break torch.compile tries to compile every called function, so functions of operators disable it. torch is Any to
# mypy, hence its decorators are untyped.

LIBRARY.define(f"attention(Tensor query, Tensor key, Tensor value, {SCHEMA}, bool weights) -> (Tensor, Tensor, Tensor)",
               tags=torch.Tag.pt2_compliant_tag)
LIBRARY.define("attention_backward(Tensor grad_output, Tensor? grad_lse, Tensor query, Tensor key, Tensor value, "
               f"Tensor output, Tensor lse, {SCHEMA}, str want) -> Tensor[]", tags=torch.Tag.pt2_compliant_tag)
LIBRARY.define(f"attention_places(Tensor query, Tensor key, {SCHEMA}) -> Tensor", tags=torch.Tag.pt2_compliant_tag)


@torch.library.impl(LIBRARY, "attention", "CPU")     # type: ignore[untyped-decorator]
@torch._disable_dynamo     # type: ignore[untyped-decorator]
def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
               *rest: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    *options, weights = rest
    output = room(query, value, options[-1])
    found = attnc.attention(*map(array, (query, key, value)), want=("lse", "weights") if weights else ("lse",),
                            out=None if output is None else array(output), **_options(options))
    output = as_tensor(found.output) if output is None else output
    return output, as_tensor(found.lse), as_tensor(found.weights) if weights else output.new_empty(0)


@torch.library.register_fake("attnc::attention", lib=LIBRARY)     # type: ignore[untyped-decorator]
def _(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
      *rest: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    (layout, _, order), weights = rest[-4:-1], rest[-1]
    batch = torch.broadcast_shapes(query.shape[:-3], key.shape[:-3], value.shape[:-3])
    rows, columns = query.shape[-3:-1], value.shape[-1:]
    if layout == "bnhd":
        shape, rows, keys = (*batch, *rows, *columns), rows[::-1], key.shape[-3]
    else:
        shape, keys = (*batch, *rows, *columns), key.shape[-2]
    dtype = torch.promote_types(torch.promote_types(query.dtype, key.dtype), value.dtype)
    lse = query.new_empty((*batch, *rows), dtype=torch.float64 if dtype is torch.float64 else torch.float32)
    output = query.new_empty(shape, dtype=dtype) if order is None else room(query, value, order)
    return output, lse, query.new_empty((*batch, *rows, keys) if weights else 0, dtype=dtype)


@torch.library.impl(LIBRARY, "attention_backward", "CPU")     # type: ignore[untyped-decorator]
@torch._disable_dynamo     # type: ignore[untyped-decorator]
def _attention_backward(grad_output: torch.Tensor, grad_lse: torch.Tensor | None, query: torch.Tensor,
                        key: torch.Tensor, value: torch.Tensor, output: torch.Tensor, lse: torch.Tensor,
                        *rest: Any) -> list[torch.Tensor]:
    *options, want = rest
    found = attnc.attention_backward(*map(array, (grad_output, query, key, value, output, lse)),
                                     want=tuple(want.split()), grad_lse=None if grad_lse is None else array(grad_lse),
                                     **_options(options))
    # contiguous like the fake's, since some gradients have the layout of the kernels
    return [as_tensor(gradient).contiguous() for gradient in vars(found).values()]


@torch.library.register_fake("attnc::attention_backward", lib=LIBRARY)     # type: ignore[untyped-decorator]
def _(grad_output: torch.Tensor, grad_lse: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor,
      value: torch.Tensor, output: torch.Tensor, lse: torch.Tensor, *rest: Any) -> list[torch.Tensor]:
    given = dict(zip(INPUTS, (query, key, value, *rest), strict=False))
    return [given[name].new_empty(given[name].shape) for name in rest[-1].split()]


@torch.library.impl(LIBRARY, "attention_places", "CPU")     # type: ignore[untyped-decorator]
@torch._disable_dynamo     # type: ignore[untyped-decorator]
def _attention_places(query: torch.Tensor, key: torch.Tensor, *rest: Any) -> torch.Tensor:
    """The addend of each score from all options but the biases: -inf, ALiBi's distance times slope, or 0."""
    return as_tensor(attnc.attention_scores(array(query)[..., :0], array(key)[..., :0], **_options(rest)))


@torch.library.register_fake("attnc::attention_places", lib=LIBRARY)     # type: ignore[untyped-decorator]
def _(query: torch.Tensor, key: torch.Tensor, *rest: Any) -> torch.Tensor:
    batch = torch.broadcast_shapes(query.shape[:-3], key.shape[:-3])
    rows, keys = query.shape[-3:-1], key.shape[-2]
    if rest[-3] == "bnhd":
        rows, keys = rows[::-1], key.shape[-3]
    wide = torch.float64 in (query.dtype, key.dtype)
    return query.new_empty((*batch, *rows, keys), dtype=torch.float64 if wide else torch.float32)
