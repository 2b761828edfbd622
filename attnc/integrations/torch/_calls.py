"""The calls of attention that a model makes, seen in passing: which module makes them, with which tensors.

A mode of torch's functions sees every call in the thread that runs the model, by whatever name it was imported. torch
leaves its fused layers when a mode is on, which would change the last bits of the output, so inside of these the mode
is off and the names that they look up are replaced: here, for as long as someone watches.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import inspect
import sys
import threading
from contextvars import ContextVar
from types import FunctionType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode, _pop_mode_temporarily

from ._interception import Interception
from ._signature import arguments_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import SimpleNamespace

PURPOSE = "capture"
_FUSED = (torch.nn.TransformerEncoder, torch.nn.TransformerEncoderLayer, torch.nn.MultiheadAttention)


class Call:
    """One call of attention: (..., heads, length, dim) tensors and options of `attnc.attention`.

    `output` is the tensor whose gradient `grad_output` turns into that of the attention's output; `statistics` came out
    of the same computation.
    """

    def __init__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: dict[str, Any],
                 output: torch.Tensor, grad_output: Callable[[torch.Tensor], torch.Tensor] | None = None,
                 statistics: dict[str, np.ndarray] | None = None):
        self.statistics = statistics or {}
        self.options = {name: x for name, x in options.items() if name != "layout"}
        if options.get("layout") == "bnhd":
            query, key, value = (x.transpose(-2, -3) for x in (query, key, value))
            grad_output = grad_output or (lambda grad: grad.transpose(-2, -3))
        if query.ndim == 2:
            query, key, value = query[None], key[None], value[None]
            grad_output = grad_output or (lambda grad: grad[None])
            self.statistics = {name: x[None] for name, x in self.statistics.items()}
        self.query, self.key, self.value = query, key, value
        self.output, self.grad_output = output, grad_output or (lambda grad: grad)


class Watcher:
    """Someone who wants the calls of attention in a model; `take` gets each, from the thread that runs the model."""

    def __init__(self, model: torch.nn.Module):
        self.model = model
        self.names_replaced: list[Interception] = []
        self.names = {id(module): name for name, module in model.named_modules()}
        self.holding = {id(module) for module in model.modules()
                        if any(isinstance(x, torch.nn.MultiheadAttention) for x in module.children())}

    def take(self, layer: str, call: int, index: int, seen: Call) -> None:
        raise NotImplementedError

    def beside(self, layer: str, call: int, index: int) -> tuple[str, ...]:
        """Statistics of this call to be computed beside its output, if it is attnc that computes it."""
        raise NotImplementedError

    def ran(self, layer: str, seen: bool, holds: bool) -> None:
        """A MultiheadAttention, or a module that `holds` one, has returned; whether a call was seen in it."""
        raise NotImplementedError


class _Pass:
    """A watcher's model in one thread, from the outermost call of one of its modules until that returns."""

    def __init__(self, watcher: Watcher):
        self.watcher = watcher
        self.modules: list[torch.nn.Module] = []
        self.calls: collections.Counter[str] = collections.Counter()

    def place(self, weight: torch.Tensor | None = None) -> tuple[str, int, int]:
        """Layer, call and index of the next call of attention."""
        module = self.modules[-1]
        if weight is not None:      # the fused layer does not call the module of its attention
            module = next((x for x in module.children() if getattr(x, "in_proj_weight", None) is weight), module)
        layer = self.watcher.names[id(module)]
        return layer, self.calls[layer], self.calls.total()

    def see(self, seen: Call, weight: torch.Tensor | None) -> None:
        place = self.place(weight)
        self.calls[place[0]] += 1
        self.watcher.take(*place, seen)


class _Here(threading.local):
    """What goes on in this thread."""

    def __init__(self) -> None:
        self.passes: list[_Pass] = []
        self.busy = False       # in the function that was seen: what it calls is part of it
        self.probe = False      # whether a call of attention gives its arguments in place of a result
        self.packed: torch.Tensor | None = None     # a query whose rows are heads that share a key head
        self.beside: tuple[str, ...] = ()       # statistics that are wanted of the call in progress,
        self.statistics: dict[str, np.ndarray] = {}     # and those that came of it
        self.compiled = False   # whether a compiled function was called


here = _Here()
_lock = threading.Lock()
_watchers: tuple[Watcher, ...] = ()         # of all threads
_mine: ContextVar[tuple[Watcher, ...]] = ContextVar("attnc_watchers", default=())


def watching(within_patch: bool = False) -> bool:
    """Whether calls of attention in this thread are to be seen, or one by `patch` is to give statistics."""
    return bool(here.passes) and (not here.busy or (within_patch and bool(here.beside)))


def enter(watcher: Watcher) -> None:
    """Let a watcher have the calls of its model from now on."""
    global _watchers
    with _lock:
        _watchers = (*_watchers, watcher)
    _mine.set((*_mine.get(), watcher))
    watcher.names_replaced = _names()
    for each in watcher.names_replaced:
        each.enter(PURPOSE)


def leave(watcher: Watcher) -> None:
    """No more calls for this watcher, whichever thread it was entered from."""
    global _watchers
    for each in watcher.names_replaced:
        each.leave(PURPOSE)
    with _lock:
        _watchers = tuple(x for x in _watchers if x is not watcher)
    _mine.set(tuple(x for x in _mine.get() if x is not watcher))


def _watchers_of(module: torch.nn.Module) -> list[Watcher]:
    """The watchers of a module: those that this thread or task has entered, and if it has none, those of all others."""
    running = [each.watcher for each in here.passes]
    found = [x for x in _watchers if id(module) in x.names and x not in running]
    if not found:
        return []
    own = _mine.get()
    mine = [x for x in found if x in own]
    return mine if mine or any(x in own for x in running) else found


class _Mode(TorchFunctionMode):     # type: ignore[misc]    # torch is Any to mypy
    def __torch_function__(self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (),
                           kwargs: dict[str, Any] | None = None) -> Any:
        see = _SEEN.get(function)
        if see is None and type(function) is FunctionType:
            see = vars(function).get("attnc_sees")
        if see is None or here.busy:
            return function(*args, **kwargs) if kwargs else function(*args)
        return see(function, *args, **kwargs or {})


def _is_on() -> bool:
    stack = torch._C._get_function_stack_at
    return any([isinstance(stack(i), _Mode) for i in range(torch._C._len_torch_function_stack())])


def _off() -> contextlib.AbstractContextManager[Any]:
    """Without the mode, unless there are others: with those torch does not take its fused layers either."""
    alone = torch._C._len_torch_function_stack() == 1 and _is_on()
    return _pop_mode_temporarily() if alone else contextlib.nullcontext()


def _run(theirs: Callable[..., Any], module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A call of a module while there are watchers."""
    if torch._C._current_graph_task_id() != -1:     # what checkpointing computes again was seen before
        return theirs(module, *args, **kwargs)
    started = [_Pass(x) for x in _watchers_of(module)] if len(here.passes) < len(_watchers) else []
    inside = [each for each in (*here.passes, *started) if id(module) in each.watcher.names]
    if not inside:
        return theirs(module, *args, **kwargs)
    heads, holds = isinstance(module, torch.nn.MultiheadAttention), id(module) in inside[0].watcher.holding
    before = [each.calls.total() for each in inside] if heads or holds else []
    here.passes.extend(started)
    for each in inside:
        each.modules.append(module)
    try:
        try:
            if _is_on():
                result = theirs(module, *args, **kwargs)
            else:
                with _Mode():
                    result = theirs(module, *args, **kwargs)
        except Exception as error:
            if here.compiled:       # of a whole graph torch finds that it did not run
                raise _calls_compiled(inside[0].watcher.names[id(module)]) from error
            raise
        if here.compiled:
            raise _calls_compiled(inside[0].watcher.names[id(module)])
        for each, count in zip(inside, before, strict=heads or holds):
            each.watcher.ran(each.watcher.names[id(module)], each.calls.total() > count, holds and not heads)
        return result
    finally:
        here.compiled = False
        for each in inside:
            each.modules.pop()
        for each in started:
            here.passes.remove(each)


def _calls_compiled(name: str) -> ValueError:
    return ValueError(f"{name!r} calls a function of torch.compile, where capture cannot see; run the model under "
                      "torch.compiler.set_stance(\"force_eager\")")


# What is done for each function. The mode is off in them.

class _Arguments(Exception):
    """The arguments of a call of attention, from a call that was made for them alone."""


def busy(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A call of which all that it calls is part."""
    before, here.busy = here.busy, True
    try:
        return function(*args, **kwargs)
    finally:
        here.busy = before


def _tell(seen: Call, weight: torch.Tensor | None = None) -> None:
    with torch.no_grad():
        for each in list(here.passes):
            if each.modules:
                each.see(seen, weight)


def beside() -> tuple[str, ...]:
    """Statistics to be computed beside the output of the next call of attnc's own attention."""
    if here.busy:
        return here.beside
    return tuple(dict.fromkeys(name for each in here.passes for name in each.watcher.beside(*each.place())))


def tell(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: dict[str, Any],
         output: torch.Tensor, statistics: dict[str, np.ndarray]) -> None:
    """A call of attnc's own attention."""
    if here.busy:
        here.statistics = statistics
    else:
        _tell(Call(query, key, value, options, output, statistics=statistics))


def _sdpa_arguments(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None,
                    dropout_p: float = 0.0, is_causal: bool = False, *, scale: float | None = None,
                    enable_gqa: bool = False) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict[str, Any]]:
    with torch.no_grad():
        return arguments_of(query, key, value, attn_mask, is_causal, scale, enable_gqa)


def sdpa(theirs: Callable[..., Any], *args: Any, **kwargs: Any) -> torch.Tensor:
    """``scaled_dot_product_attention``."""
    if here.probe:
        raise _Arguments(*_refusing(_sdpa_arguments, *args, **kwargs))
    packed, here.packed = here.packed, None
    here.beside, here.statistics = beside(), {}
    try:
        output = busy(theirs, *args, **kwargs)
    finally:
        statistics, here.beside, here.statistics = here.statistics, (), {}
    query, key, value, options = _refusing(_sdpa_arguments, *args, **kwargs)
    if args and args[0] is packed:
        heads = query.shape[1] * query.shape[2]
        if options.get("bias", options.get("mask", query)).shape[1] > 1:
            options = {name: x.reshape(len(x), heads, 1, -1) if name in ("mask", "bias") else x
                       for name, x in options.items()}
        seen = Call(query.reshape(len(query), heads, 1, -1), key, value, options, output,
                    lambda grad: grad.reshape(len(grad), heads, 1, -1))
    else:
        seen = Call(query, key, value, options, output, statistics=statistics)
    _tell(seen)
    return output


def _mha(theirs: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``multi_head_attention_forward``, which multiplies matrices where it is asked for their weights."""
    given = _bind(functional_mha, args, kwargs)
    if not given["need_weights"]:
        with _off():
            result: tuple[torch.Tensor, torch.Tensor | None] = theirs(*args, **kwargs)
            return result
    output, weights = busy(theirs, *args, **kwargs)
    here.probe = True
    try:
        with _off(), torch.no_grad():
            theirs(**given | {"need_weights": False, "is_causal": False})
        raise ValueError("capture cannot see the attention of multi_head_attention_forward: it does not call "
                         "torch.nn.functional.scaled_dot_product_attention")
    except _Arguments as found:
        query, key, value, options = found.args
    finally:
        here.probe = False

    def grad_output(grad: torch.Tensor) -> torch.Tensor:
        grad = grad[:, None] if grad.ndim == 2 else grad        # (q_len, batch, embedding)
        return (grad @ given["out_proj_weight"]).unflatten(-1, (query.shape[1], -1)).permute(1, 2, 0, 3)

    _tell(Call(query, key, value, options, output, grad_output))
    return output, weights


def _native_mha(theirs: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What ``MultiheadAttention`` calls in evaluation."""
    output = busy(theirs, *args, **kwargs)
    given = dict(zip(("query", "key", "value", "embed_dim", "num_heads", "weight", "bias", "out_weight", "out_bias",
                      "mask", "need_weights", "average_attn_weights", "mask_type"), args, strict=False)) | kwargs
    _fused(given["query"], given, output[0])
    return output


def _native_layer(theirs: Callable[..., Any], *args: Any, **kwargs: Any) -> torch.Tensor:
    """What ``TransformerEncoderLayer`` calls in evaluation."""
    output = busy(theirs, *args, **kwargs)
    given = dict(zip(("src", "embed_dim", "num_heads", "weight", "bias", "out_weight", "out_bias", "use_gelu",
                      "norm_first", "eps", "norm_weight", "norm_bias", "norm_weight_2", "norm_bias_2", "ffn_weight_1",
                      "ffn_bias_1", "ffn_weight_2", "ffn_bias_2", "mask", "mask_type"), args, strict=False)) | kwargs
    x = given["src"]
    if given["norm_first"] and not x.is_nested:
        x = functional.layer_norm(x, (given["embed_dim"],), given["norm_weight"], given["norm_bias"], given["eps"])
    _fused(x, given, output)
    return output


def _fused(x: torch.Tensor, given: dict[str, Any], output: torch.Tensor) -> None:
    if x.is_nested:
        raise ValueError("capture cannot see into nested tensors, which TransformerEncoder makes of a padded batch in "
                         "evaluation; make it with enable_nested_tensor=False, or set its use_nested_tensor to False")
    query, key, value = functional.linear(x, given["weight"], given["bias"]).unflatten(
        -1, (3, given["num_heads"], -1)).permute(2, 0, 3, 1, 4)
    options: dict[str, Any] = {}
    if given.get("mask") is not None:       # not 0: hidden, also if it is a number to add
        mask = given["mask"].to(torch.bool).logical_not()
        options["key_mask" if given["mask_type"] == 1 else "mask"] = mask
    _tell(Call(query, key, value, options, output), given["weight"])


def _refusing(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Say of what cannot be captured that it was the capture that could not."""
    try:
        return function(*args, **kwargs)
    except (TypeError, ValueError) as error:
        raise type(error)(f"capture cannot see this attention: {error}") from error


# The names.

def _bind(signature: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    bound = inspect.signature(signature).bind(*args, **kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)


functional_mha = functional.multi_head_attention_forward
_SEEN: dict[Any, Callable[..., Any]] = {
    torch._C._nn.scaled_dot_product_attention: sdpa, torch.ops.aten.scaled_dot_product_attention: sdpa,
    torch.ops.aten.scaled_dot_product_attention.default: sdpa, functional_mha: _mha,
    torch._native_multi_head_attention: _native_mha, torch._transformer_encoder_layer_fwd: _native_layer}


def is_seen(function: Any, see: Callable[..., Any]) -> None:
    """Let the mode take a function for one of those that are seen."""
    vars(function)["attnc_sees"] = see


# What stands in the place of a name does what theirs does unless calls are watched in this thread.

def _stand_in(see: Callable[..., Any], state: SimpleNamespace) -> Callable[..., Any]:
    @functools.wraps(state.theirs)
    def ours(*args: Any, **kwargs: Any) -> Any:
        return see(state.theirs, *args, **kwargs) if _is_watched(state) else state.theirs(*args, **kwargs)

    is_seen(ours, see)
    return ours


def _forward(state: SimpleNamespace) -> Callable[..., Any]:
    """Of a module that has a fused layer: the mode is off, so that it takes it when it would."""
    @functools.wraps(state.theirs)
    def forward(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not _is_watched(state):
            return state.theirs(self, *args, **kwargs)
        with _off():
            return state.theirs(self, *args, **kwargs)

    return forward


def _call_impl(state: SimpleNamespace) -> Callable[..., Any]:
    @functools.wraps(state.theirs)
    def call_impl(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not _watchers:
            return state.theirs(self, *args, **kwargs)
        return _run(state.theirs, self, args, kwargs)

    return call_impl


def _pack(state: SimpleNamespace) -> Callable[..., Any]:
    @functools.wraps(state.theirs)
    def pack_gqa(x: torch.Tensor | None, count: int) -> torch.Tensor | None:
        found: torch.Tensor | None = state.theirs(x, count)
        if _is_watched(state) and here.packed is None:     # the query comes before mask and bias
            here.packed = found
        return found

    return pack_gqa


def _uncompiled(state: SimpleNamespace) -> Callable[..., Any]:
    """What the compiler of torch asks at the call of a compiled function: here it runs as it was written."""
    @functools.wraps(state.theirs)
    def callback_from_stance(callback: Any) -> Any:
        found = state.theirs(callback)
        if found in (None, False) or not watching():
            return found
        here.compiled = True
        return None

    return callback_from_stance


def _is_watched(state: SimpleNamespace) -> bool:
    if torch.compiler.is_compiling():
        return False
    if not state.purposes:
        state.put_back()
    return watching()


def _names() -> list[Interception]:
    """The names to be replaced, with those of modules that were not imported at first.

    One is a function of transformers that makes rows of the heads of a single generated token.
    """
    for owner, name, make in (("transformers.integrations.sdpa_attention", "pack_gqa", _pack),
                              ("torch._dynamo.eval_frame", "_callback_from_stance", _uncompiled)):
        module: Any = sys.modules.get(owner)
        if hasattr(module, name) and not any(x.owner is module for x in INTERCEPTIONS):
            INTERCEPTIONS.append(Interception(module, name, make))
    return list(INTERCEPTIONS)


INTERCEPTIONS = [
    Interception(torch.nn.Module, "_call_impl", _call_impl),
    *(Interception(each, "forward", _forward) for each in _FUSED),
    Interception(functional, "multi_head_attention_forward", functools.partial(_stand_in, _mha)),
    Interception(torch, "_native_multi_head_attention", functools.partial(_stand_in, _native_mha)),
    Interception(torch, "_transformer_encoder_layer_fwd", functools.partial(_stand_in, _native_layer)),
]
