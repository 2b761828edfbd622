"""The names that are replaced while calls are observed, and their replacements.

A replacement only calls the original unless calls are observed in its thread.
"""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from . import _calls, _functions
from ._calls import Watcher, here, watching
from ._interception import Interception

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import SimpleNamespace

PURPOSE = "capture"
_FUSED = (torch.nn.TransformerEncoder, torch.nn.TransformerEncoderLayer, torch.nn.MultiheadAttention)


def enter(watcher: Watcher) -> list[Interception]:
    """Start to pass the calls of its model to a watcher; returns the replaced names."""
    _calls.begin(watcher)
    replaced = _names()
    for each in replaced:
        each.enter(PURPOSE)
    return replaced


def leave(watcher: Watcher, replaced: list[Interception]) -> None:
    for each in replaced:
        each.leave(PURPOSE)
    _calls.end(watcher)


def _stand_in(see: Callable[..., Any], state: SimpleNamespace) -> Callable[..., Any]:
    @functools.wraps(state.theirs)
    def ours(*args: Any, **kwargs: Any) -> Any:
        return see(state.theirs, *args, **kwargs) if _is_watched(state) else state.theirs(*args, **kwargs)

    _functions.is_seen(ours, see)
    return ours


def _forward(state: SimpleNamespace) -> Callable[..., Any]:
    """The forward of a module with a fused layer: turns the mode off, so that torch still uses that layer."""
    @functools.wraps(state.theirs)
    def forward(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not _is_watched(state):
            return state.theirs(self, *args, **kwargs)
        with _calls.off():
            return state.theirs(self, *args, **kwargs)

    return forward


def _call_impl(state: SimpleNamespace) -> Callable[..., Any]:
    @functools.wraps(state.theirs)
    def call_impl(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not _calls.are_there():
            return state.theirs(self, *args, **kwargs)
        return _calls.run(state.theirs, self, args, kwargs)

    return call_impl


def _pack(state: SimpleNamespace) -> Callable[..., Any]:
    @functools.wraps(state.theirs)
    def pack_gqa(x: torch.Tensor | None, count: int) -> torch.Tensor | None:
        found: torch.Tensor | None = state.theirs(x, count)
        if _is_watched(state) and here.packed is None:     # the query's call precedes those of mask and bias
            here.packed = found
        return found

    return pack_gqa


def _uncompiled(state: SimpleNamespace) -> Callable[..., Any]:
    """The function that torch consults at the call of a compiled function; within a capture it runs uncompiled."""
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
    """The names to replace, among them those of modules that were imported later.

    `pack_gqa` of transformers turns the heads of a single generated token into rows.
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
    Interception(functional, "multi_head_attention_forward", functools.partial(_stand_in, _functions.mha)),
    Interception(torch, "_native_multi_head_attention", functools.partial(_stand_in, _functions.native_mha)),
    Interception(torch, "_transformer_encoder_layer_fwd", functools.partial(_stand_in, _functions.native_layer)),
]
