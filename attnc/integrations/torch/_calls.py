"""Observes the calls of attention in a running model: which module makes them, with which tensors.

A TorchFunctionMode sees every call in the thread that runs the model, under any imported name. torch does not use its
fused layers while a mode is on, which would change the last bits of the output; so within these layers the mode is off,
and the names that they look up are replaced (`_names`). `_functions` handles the call of each function.
"""

from __future__ import annotations

import collections
import contextlib
import threading
from contextvars import ContextVar
from types import FunctionType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode, _pop_mode_temporarily

if TYPE_CHECKING:
    from collections.abc import Callable

SEEN: dict[Any, Callable[..., Any]] = {}        # the handler that the mode calls in place of each function


class Call:
    """One call of attention: (..., heads, length, dim) tensors and options of `attnc.attention`.

    `grad_output` converts the gradient of the tensor `output` to that of the attention's output; `statistics` come from
    the same computation.
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
    """An observer of the calls of attention in a model; the thread that runs the model passes each to `take`."""

    def __init__(self, model: torch.nn.Module):
        self.model = model
        self.names = {id(module): name for name, module in model.named_modules()}
        self.holding = {name: found for name, module in model.named_modules() if (found := _held_parameters(module))}
        self.held = frozenset(x for found in self.holding.values() for x in found)
        self.used: set[int] = set()     # of these, those that a module computed with outside a MultiheadAttention

    def take(self, layer: str, call: int, index: int, seen: Call) -> None:
        raise NotImplementedError

    def beside(self, layer: str, call: int, index: int) -> tuple[str, ...]:
        """Statistics to compute beside the output of this call, if attnc computes it."""
        raise NotImplementedError

    def ran(self, layer: str, seen: bool, holds: bool) -> None:
        """Called after a MultiheadAttention, or a module that `holds` one, returns; `seen`: with a call observed."""
        raise NotImplementedError


def _held_parameters(module: torch.nn.Module) -> frozenset[int]:
    """The ids of the parameters of each MultiheadAttention that a module holds itself."""
    return frozenset(id(x) for child in module.children() if isinstance(child, torch.nn.MultiheadAttention)
                     for x in child.parameters())


class _Pass:
    """A forward pass of a watcher's model in one thread: the outermost call of one of its modules."""

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
    """The state of the current thread."""

    def __init__(self) -> None:
        self.passes: list[_Pass] = []
        self.busy = False       # within an observed function, whose inner calls do not count
        self.probe = False      # whether a call of attention raises its arguments instead of returning
        self.packed: torch.Tensor | None = None     # a query whose rows are heads that share a key head
        self.beside: tuple[str, ...] = ()       # statistics to compute in the call in progress,
        self.statistics: dict[str, np.ndarray] = {}     # and their values
        self.compiled = False   # whether a compiled function was called


here = _Here()
_lock = threading.Lock()
_watchers: tuple[Watcher, ...] = ()         # of all threads
_mine: ContextVar[tuple[Watcher, ...]] = ContextVar("attnc_watchers", default=())


def watching(within_patch: bool = False) -> bool:
    """Whether calls of attention in this thread are observed, or a call by `patch` must compute statistics."""
    return bool(here.passes) and (not here.busy or (within_patch and bool(here.beside)))


def are_there() -> bool:
    """Whether there are watchers, in any thread."""
    return bool(_watchers)


def begin(watcher: Watcher) -> None:
    """Start to pass the calls of its model to a watcher."""
    global _watchers
    with _lock:
        _watchers = (*_watchers, watcher)
    _mine.set((*_mine.get(), watcher))


def end(watcher: Watcher) -> None:
    """Stop passing calls to a watcher, from any thread."""
    global _watchers
    with _lock:
        _watchers = tuple(x for x in _watchers if x is not watcher)
    _mine.set(tuple(x for x in _mine.get() if x is not watcher))


def _watchers_of(module: torch.nn.Module) -> list[Watcher]:
    """The watchers of a module: those entered in this thread or task, or, if there are none, in all others."""
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
        see = SEEN.get(function)
        if see is None and type(function) is FunctionType:
            see = vars(function).get("attnc_sees")
        if see is None or here.busy:
            result = function(*args, **kwargs) if kwargs else function(*args)
            if not here.busy and any([each.watcher.held for each in here.passes]):
                _note_use(args, kwargs or {}, result)
            return result
        return see(function, *args, **kwargs or {})


def _note_use(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
    """Note the parameters of a MultiheadAttention that a module reads itself, to compute tensors."""
    if not isinstance(result, torch.Tensor | tuple | list):     # attributes such as the dtype are no use of it
        return
    given = {id(x) for one in (*args, *kwargs.values()) for x in (one if isinstance(one, tuple | list) else (one,))}
    for each in here.passes:
        found = given & each.watcher.held
        if found and not any([isinstance(module, torch.nn.MultiheadAttention) for module in each.modules]):
            each.watcher.used |= found


def is_on() -> bool:
    stack = torch._C._get_function_stack_at
    return any([isinstance(stack(i), _Mode) for i in range(torch._C._len_torch_function_stack())])


def off() -> contextlib.AbstractContextManager[Any]:
    """Turn the mode off, unless other modes are on, with which torch does not use its fused layers either."""
    alone = torch._C._len_torch_function_stack() == 1 and is_on()
    return _pop_mode_temporarily() if alone else contextlib.nullcontext()


def run(theirs: Callable[..., Any], module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a module while there are watchers."""
    if torch._C._current_graph_task_id() != -1:     # checkpointing recomputes calls that were observed before
        return theirs(module, *args, **kwargs)
    started = [_Pass(x) for x in _watchers_of(module)] if len(here.passes) < len(_watchers) else []
    inside = [each for each in (*here.passes, *started) if id(module) in each.watcher.names]
    if not inside:
        return theirs(module, *args, **kwargs)
    heads = isinstance(module, torch.nn.MultiheadAttention)
    holds = inside[0].watcher.names[id(module)] in inside[0].watcher.holding
    before = [each.calls.total() for each in inside] if heads or holds else []
    here.passes.extend(started)
    for each in inside:
        each.modules.append(module)
    try:
        try:
            if is_on():
                result = theirs(module, *args, **kwargs)
            else:
                with _Mode():
                    result = theirs(module, *args, **kwargs)
        except Exception as error:
            if here.compiled:       # with fullgraph=True torch raises because the graph did not run
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


def busy(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function whose inner calls do not count."""
    before, here.busy = here.busy, True
    try:
        return function(*args, **kwargs)
    finally:
        here.busy = before


def tell(seen: Call, weight: torch.Tensor | None = None) -> None:
    """Pass a call to the watchers; `weight` is the projection of a module that did not call its attention."""
    with torch.no_grad():
        for each in list(here.passes):
            if each.modules:
                each.see(seen, weight)


def beside() -> tuple[str, ...]:
    """Statistics to compute beside the output of the next call of attnc's own attention."""
    if here.busy:
        return here.beside
    return tuple(dict.fromkeys(name for each in here.passes for name in each.watcher.beside(*each.place())))


def tell_of(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: dict[str, Any],
         output: torch.Tensor, statistics: dict[str, np.ndarray]) -> None:
    """Pass a call of attnc's own attention to the watchers."""
    if here.busy:
        here.statistics = statistics
    else:
        tell(Call(query, key, value, options, output, statistics=statistics))
