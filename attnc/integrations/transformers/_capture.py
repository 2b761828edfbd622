"""Statistics of the attention weights of a model's layers, collected while it runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from ... import AttentionWeights
from ..torch import as_array
from ._choice import NAME

STATISTICS = ("topk", "key_mass", "entropy", "map", "effective_keys", "max", "argmax", "mean_position",
              "mean_distance", "key_max", "lse")
NAMES = (*STATISTICS, "weights")
_PER_HEAD = {"sinks": 0, "bias": 1, "mask": 1}      # options that have an axis of heads, and where
_active: ContextVar[tuple[_Collector, ...]] = ContextVar("attnc_captures", default=())


class AttentionRecord(SimpleNamespace):
    """What one call of one layer's attention gave: its `layer` (name of the module), `shape` and what was asked for."""

    def __repr__(self) -> str:
        held = ", ".join(name for name in vars(self) if name not in ("layer", "shape"))
        return f"AttentionRecord({self.layer}, {self.shape}: {held})"


@contextlib.contextmanager
def capture(model: PreTrainedModel, what: str | tuple[str, ...] = ("topk", "key_mass", "entropy", "map"), *,
            layers: int | str | Sequence[int | str] | None = None, heads: int | Sequence[int] | None = None,
            topk: int = 8, bins: tuple[int, int] = (64, 64)) -> Iterator[list[AttentionRecord]]:
    """Collect statistics of the attention weights of a model while it runs, without ever making their matrices.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        With ``attn_implementation="attnc"``, or with parts that have it.
    what : name or tuple of names
        Statistics of `attnc.AttentionWeights`, out of ``"topk"``, ``"key_mass"``, ``"entropy"``, ``"map"``,
        ``"effective_keys"``, ``"max"``, ``"argmax"``, ``"mean_position"``, ``"mean_distance"``, ``"key_max"``,
        ``"lse"``; and ``"weights"``, the lazy object itself, which holds copies of query and key.
    layers : int, str or a list of them, optional
        By number, in the order in which they first run, or by a part of the module's name. By default all.
    heads : int or list of int, optional
        Which query heads. By default all.
    topk : int
        How many keys of each row.
    bins : tuple of int
        Size of the map; that of the weights where they are smaller.

    Yields
    ------
    list of AttentionRecord
        One for each call of each layer, in their order: for generated tokens one for each step. Attributes: `layer`,
        the name of its module, `shape`, that of the weights (batch, heads, q_len, kv_len), and one for each name asked.
        Memory is linear in the length of the tokens.

    Raises
    ------
    ValueError
        If the model runs another attention or is compiled, or if a name in `what`, a layer or a head is not known; for
        the number of a layer, and for a model that never called attnc, when the run is over.

    Examples
    --------
    >>> import torch
    >>> from attnc.integrations.transformers import register
    >>> from transformers import BertConfig, BertModel
    >>> config = BertConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    >>> model = BertModel._from_config(config, attn_implementation=register()).eval()
    >>> with torch.no_grad(), capture(model, ("entropy", "topk"), layers=1) as records:
    ...     _ = model(torch.arange(100, 110)[None])
    >>> records
    [AttentionRecord(encoder.layer.1.attention.self, (1, 4, 10, 10): entropy, topk)]
    >>> records[0].entropy.shape, records[0].topk.indices.shape
    ((1, 4, 10), (1, 4, 10, 8))
    """
    collector = _Collector(model, what, layers, heads, topk, bins)
    token = _active.set((*_active.get(), collector))
    try:
        yield collector.records
    finally:
        _active.reset(token)
    collector.check_layers()


def collect(module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, options: dict[str, Any]) -> None:
    """Hand a call of attention to the captures that want it."""
    for collector in _active.get():
        collector.take(module, query, key, options)


class _Collector:
    """One capture: what it wants, and what it has."""

    def __init__(self, model: PreTrainedModel, what: str | tuple[str, ...],
                 layers: int | str | Sequence[int | str] | None, heads: int | Sequence[int] | None, topk: int,
                 bins: tuple[int, int]):
        self.what = (what,) if isinstance(what, str) else tuple(what)
        unknown = [name for name in self.what if name not in NAMES]
        if unknown or not self.what:
            raise ValueError(f"what is {what!r}; wanted names out of {', '.join(NAMES)}")
        found = {id(x.config): x.config._attn_implementation for x in model.modules() if isinstance(x, PreTrainedModel)}
        if NAME not in found.values():
            raise ValueError(f"the model runs {model.config._attn_implementation!r}; capture needs {NAME!r}: "
                             f"model.set_attn_implementation({NAME!r})")
        if any(isinstance(x, torch._dynamo.OptimizedModule) or x._compiled_call_impl for x in model.modules()):
            raise ValueError("the model is compiled; capture needs it as it was")
        self.model = type(model).__name__
        self.names = {id(module): name for name, module in model.named_modules()}
        self.layers = [layers] if isinstance(layers, (int, str)) else layers
        for layer in self.layers or ():
            if isinstance(layer, str) and not any(layer in name for name in self.names.values()):
                raise ValueError(f"no module of the model has {layer!r} in its name")
        self.heads = [heads] if isinstance(heads, int) else heads
        self.asked: dict[str, Any] = {name: True for name in self.what if name != "weights"}
        if "topk" in self.asked:
            self.asked["topk"] = topk
        self.bins = bins
        self.order: dict[str, int] = {}
        self.records: list[AttentionRecord] = []

    def check_layers(self) -> None:
        """Only after the run is it known how many layers there are."""
        ran = len(self.order)
        if not ran:
            raise ValueError(f"{self.model} never called attnc: it did not run, or its attention is its own code")
        wrong = [layer for layer in self.layers or () if not isinstance(layer, str) and layer not in range(ran)]
        if wrong:
            raise ValueError(f"layers has {wrong[0]}; the model ran {ran} layers of attention")

    def take(self, module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, options: dict[str, Any]) -> None:
        name = self.names.get(id(module))
        if name is None:        # another model, which runs meanwhile
            return
        place = self.order.setdefault(name, len(self.order))
        if self.layers is not None and not any(x in name if isinstance(x, str) else x == place for x in self.layers):
            return
        arrays = [as_array(x) for x in (query, key)]
        options = {option: as_array(x) for option, x in options.items()}
        if self.heads is not None:
            arrays, options = _chosen(arrays, options, self.heads)
        if "weights" in self.what:
            arrays = [x.copy() for x in arrays]     # a static cache is written again
        weights = AttentionWeights(*arrays, **options)
        asked = dict(self.asked)
        if "map" in asked:
            asked["map"] = tuple(map(min, self.bins, weights.shape[-2:]))
        found = vars(weights.summary(**asked)) if asked else {}
        if "weights" in self.what:
            weights._check_operands()       # from now on its options must stay as they are in this call
            found = {**found, "weights": weights}
        self.records.append(AttentionRecord(layer=name, shape=weights.shape, **{key: found[key] for key in self.what}))


def _chosen(arrays: list[Any], options: dict[str, Any],
            heads: Sequence[int]) -> tuple[list[Any], dict[str, Any]]:
    """Query, key and options of a few query heads, each with a key head of its own."""
    query, key = arrays
    wrong = [head for head in heads if not 0 <= head < query.shape[1]]
    if wrong:
        raise ValueError(f"heads has {wrong[0]}; the layer has {query.shape[1]} heads")
    taken = np.asarray(heads, int)
    found = dict(options)
    for name, axis in _PER_HEAD.items():
        x = options.get(name)
        if x is not None and x.shape[axis] > 1:
            found[name] = x.take(taken, axis)
    return [query[:, taken], key[:, taken // (query.shape[1] // key.shape[1])]], found
