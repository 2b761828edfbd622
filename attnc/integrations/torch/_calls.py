"""The calls of attention that a model makes, seen in passing: which module makes them, with which tensors.

A mode of torch's functions sees every call in the thread that runs the model, by whatever name it was imported. torch
leaves its fused layers when a mode is on, which would change the last bits of the output, so inside of these the mode
is off and the names that they look up are replaced (`_names`). What a call of each function is, is in `_functions`.
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

SEEN: dict[Any, Callable[..., Any]] = {}        # what is done in place of a function, by the function


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


def are_there() -> bool:
    """Whether there are watchers, in any thread."""
    return bool(_watchers)


def begin(watcher: Watcher) -> None:
    """Let a watcher have the calls of its model from now on."""
    global _watchers
    with _lock:
        _watchers = (*_watchers, watcher)
    _mine.set((*_mine.get(), watcher))


def end(watcher: Watcher) -> None:
    """No more calls for this watcher, whichever thread it began in."""
    global _watchers
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
        see = SEEN.get(function)
        if see is None and type(function) is FunctionType:
            see = vars(function).get("attnc_sees")
        if see is None or here.busy:
            return function(*args, **kwargs) if kwargs else function(*args)
        return see(function, *args, **kwargs or {})


def is_on() -> bool:
    stack = torch._C._get_function_stack_at
    return any([isinstance(stack(i), _Mode) for i in range(torch._C._len_torch_function_stack())])


def off() -> contextlib.AbstractContextManager[Any]:
    """Without the mode, unless there are others: with those torch does not take its fused layers either."""
    alone = torch._C._len_torch_function_stack() == 1 and is_on()
    return _pop_mode_temporarily() if alone else contextlib.nullcontext()


def run(theirs: Callable[..., Any], module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
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
            if is_on():
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


def busy(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A call of which all that it calls is part."""
    before, here.busy = here.busy, True
    try:
        return function(*args, **kwargs)
    finally:
        here.busy = before


def tell(seen: Call, weight: torch.Tensor | None = None) -> None:
    """Hand a call to those who watch; `weight` is the projection of a module that did not call its attention."""
    with torch.no_grad():
        for each in list(here.passes):
            if each.modules:
                each.see(seen, weight)


def beside() -> tuple[str, ...]:
    """Statistics to be computed beside the output of the next call of attnc's own attention."""
    if here.busy:
        return here.beside
    return tuple(dict.fromkeys(name for each in here.passes for name in each.watcher.beside(*each.place())))


def tell_of(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: dict[str, Any],
         output: torch.Tensor, statistics: dict[str, np.ndarray]) -> None:
    """A call of attnc's own attention."""
    if here.busy:
        here.statistics = statistics
    else:
        tell(Call(query, key, value, options, output, statistics=statistics))
