"""capture(): records statistics of a model's attention weights while it runs, without changing its output."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ... import AttentionWeights
from ..._checks import integer
from ..._slices import part, some_heads
from . import _calls, _names
from ._asked import BESIDE, STATISTICS, Heads, Layer, Place, What, asked, bin_counts, head_list, layer_list, row_slice
from ._records import AttentionRecord, Records
from ._tensors import as_array


@contextlib.contextmanager
def capture(model: torch.nn.Module, what: What = ("topk", "key_mass", "entropy", "map"), *,
            layers: Layer | Sequence[Layer] | None = None,
            heads: Heads | Mapping[Layer, Heads] | None = None, rows: slice | None = None, topk: int = 8,
            bins: tuple[int, int] = (64, 64)) -> Iterator[Records]:
    """Record statistics of the attention weights of a model while it runs, without building their matrices.

    It observes every call of ``scaled_dot_product_attention`` and of `torch.nn.MultiheadAttention` that modules of the
    model make, also by names imported earlier and in torch's fused layers, and calls of attnc's own attention. The
    output keeps every bit: torch computes it, or attnc within `patch` and with transformers' ``"attnc"``. Weights are
    those before dropout. A module that does not run records nothing. Captures may be nested and overlap in any order. A
    call goes to the captures of the thread or task that runs the model, or, if that has none of this model, to those of
    all others.

    Parameters
    ----------
    model : torch.nn.Module
        In evaluation or training mode; run it by calling it or one of its modules.
    what : name, function, a sequence of both, or a dict of functions by name
        Statistics of `attnc.AttentionWeights` by name, out of ``"topk"``, ``"key_mass"``, ``"entropy"``, ``"map"``,
        ``"effective_keys"``, ``"max"``, ``"argmax"``, ``"mean_position"``, ``"mean_distance"``, ``"key_max"``,
        ``"lse"``. Further names: ``"weights"``, the lazy object itself, which holds copies of query and key;
        ``"value"``, a copy of the values; ``"grad_output"``, the gradient of the attention's output, None until
        ``backward()`` of a loss, then accumulated like `Tensor.grad`; ``"relevance"``, all three, for
        ``AttentionRecord.relevance``. A function ``f(weights, call)`` receives the lazy weights and the record so far;
        the record has its result under the function's name, or as `result` if that is no identifier, as for a lambda.
    layers : index, name, (name, call) or a list of them, optional
        An index is the number of a call of attention in a forward pass, from 0. A name selects the attention within
        the module of that name, or, if there is none, within all modules whose dotted names contain it. With a number,
        only that call of the module in a forward pass, from 0. By default all layers, or those of `heads`.
    heads : int, list of int, or a dict of either by layer, optional
        Query heads to record, by default all. In a dict the first layer that matches a call decides.
    rows : slice, optional
        Query rows to record, such as ``slice(-1, None)``; step 1. By default all.
    topk : int
        Number of keys per row for ``"topk"``.
    bins : tuple of int
        Size of the map, at most that of the weights.

    Yields
    ------
    Records of AttentionRecord
        A list with a record for each call, in order. Attributes: `layer`, the name of the calling module; `call` and
        `index`, the numbers of the call within that module and within the forward pass, from 0; `shape`, that of the
        recorded weights (..., heads, rows, keys); and the requested results. A forward pass is the outermost call of a
        module of the model, in generation one per token. `Records.join` joins the records of each layer. Memory is
        linear in the number of tokens.

    Raises
    ------
    ValueError
        For unknown entries of `what`, `layers` or `heads`, and for compiled models. During the run, for calls that
        cannot be recorded: nested tensors, other devices, a `MultiheadAttention` with its own code, a head that does
        not exist, gradients under ``no_grad``. After the run, for a layer without a call, or a model without attention.

    Examples
    --------
    >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    >>> with torch.no_grad(), capture(layer, ("entropy", lambda weights, call: weights.dense().mean(1))) as records:
    ...     _ = layer(torch.randn(1, 5, 8))
    >>> records
    [AttentionRecord(self_attn, (1, 2, 5, 5): entropy, result)]
    >>> records[0].entropy.shape, records[0].result.shape
    ((1, 2, 5), (1, 5, 5))
    """
    collector = _Collector(model, what, layers, heads, rows, topk, bins)
    replaced = _names.enter(collector)
    try:
        yield collector.records
    finally:
        _names.leave(collector, replaced)
    collector.check()


class _Collector(_calls.Watcher):
    """One capture: its arguments and records."""

    def __init__(self, model: torch.nn.Module, what: What, layers: Layer | Sequence[Layer] | None,
                 heads: Heads | Mapping[Layer, Heads] | None, rows: slice | None, topk: int, bins: tuple[int, int]):
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        super().__init__(model)
        _refuse_graphs(self.names, model)
        self.names_asked, self.functions = asked(what)
        self.statistics = tuple(name for name in self.names_asked if name in STATISTICS)
        self.bins, self.topk, self.rows = bin_counts(bins), integer("topk", topk, 1, 2**31 - 1), row_slice(rows)
        self.heads = heads if isinstance(heads, Mapping) else None
        self.same_heads = None if heads is None or self.heads is not None else head_list(heads)
        if layers is None and self.heads is not None:
            layers = list(self.heads)
        if layers is not None and not (given := layer_list(layers)):
            empty = "heads" if self.heads == {} else "layers"
            raise ValueError(f"{empty} is empty; wanted at least one layer, or None for all")
        names = {name: self.names[id(x)] for name, x in model.named_modules(remove_duplicate=False)}
        self.of_heads = [(Place("heads", x, names), head_list(chosen)) for x, chosen in (self.heads or {}).items()]
        self.layers = None if layers is None else [Place("layers", x, names) for x in given]
        self.count, self._order = 0, _Order()
        self.holders: dict[str, bool] = {}      # modules that ran and hold a MultiheadAttention: a call was observed
        self.records = Records()

    def check(self) -> None:
        """Raise, after the run, for calls that did not happen or could not be observed."""
        if not self.count:
            config = getattr(self.model, "config", None)
            kind = getattr(config, "_attn_implementation", None)
            hint = (f": it runs {kind!r}; model.set_attn_implementation('sdpa'), or 'attnc'"
                    if kind not in (None, "sdpa", "attnc") else
                    ": it was not run by calling it or a module of it, or by compiled code, or its attention is its "
                    "own code, which calls neither scaled_dot_product_attention nor MultiheadAttention")
            raise ValueError(f"{type(self.model).__name__} never called attention{hint}")
        for name, seen in self.holders.items():
            if not seen and self.used & self.holding[name]:
                raise ValueError(f"capture cannot see the attention of {name!r}, which computes with the parameters of "
                                 "a MultiheadAttention without calling it, or scaled_dot_product_attention")
        for name, places in (("heads", [place for place, _ in self.of_heads]), ("layers", self.layers or [])):
            for place in places:
                if not place.met:
                    raise ValueError(f"{name} has {place.given!r}, for which no attention was called; a forward pass "
                                     f"had {self.count} calls")

    def ran(self, layer: str, seen: bool, holds: bool) -> None:
        if holds:       # a module may leave its MultiheadAttention out, in one call or always
            self.holders[layer] = self.holders.get(layer, False) or seen
        elif not seen:
            raise ValueError(f"capture cannot see the attention of {layer!r}, a MultiheadAttention that does not call "
                             "scaled_dot_product_attention")

    def beside(self, layer: str, call: int, index: int) -> tuple[str, ...]:
        if self.rows is not None or self.heads is not None or self.same_heads is not None \
                or not BESIDE.issuperset(self.statistics) \
                or not (self.layers is None or any([place.meets(layer, call, index) for place in self.layers])):
            return ()
        return self.statistics

    def take(self, layer: str, call: int, index: int, seen: _calls.Call) -> None:
        self.count = max(self.count, index + 1)
        reordered = self._order.moved(layer, call, index, seen.key, seen.query.shape[-2])
        fitting = [chosen for place, chosen in self.of_heads if place.meets(layer, call, index)]
        if self.layers is not None and not any([place.meets(layer, call, index) for place in self.layers]):
            return
        heads = fitting[0] if fitting else self.same_heads
        record = AttentionRecord(layer=layer, call=call, index=index, shape=(), q_len=seen.query.shape[-2],
                                 reordered=reordered, _bins=self.bins)
        self._fill(record, seen, heads)
        self.records.append(record)

    def _fill(self, record: AttentionRecord, seen: _calls.Call, heads: list[int] | None) -> None:
        keep = "weights" in self.names_asked
        (query, key, value), options = _arrays(seen, record.layer)
        weights = AttentionWeights(query, key, **options)
        if heads is not None:
            count = weights._a.q_heads
            wrong = [head for head in heads if not 0 <= head < count]
            if wrong:
                raise ValueError(f"heads has {wrong[0]}; {record.layer!r} has {count} heads")
            taken = np.asarray(heads, np.int64)
            value = value.take(taken // (count // value.shape[-3]), -3)
            weights = AttentionWeights._of(some_heads(weights._a, heads), None)
        if self.rows is not None:
            weights = AttentionWeights._of(part(weights._a, rows=self.rows), None)
        if keep:
            a = weights._a
            a.query, a.key = a.query.copy(), a.key.copy()       # later steps overwrite a static cache
        if keep or self.functions:
            weights._check_operands()       # takes the fingerprint now: options must not change after this call
        record.shape = weights.shape
        asked: dict[str, Any] = dict.fromkeys(self.statistics, True)
        if "topk" in asked:
            asked["topk"] = self.topk
        if "map" in asked:
            asked["map"] = tuple(max(1, min(x)) for x in zip(self.bins, weights.shape[-2:], strict=True))
        found = {} if not asked else seen.statistics if self.rows is None and heads is None and \
            seen.statistics.keys() >= asked.keys() else vars(weights.summary(**asked))
        for name in self.names_asked:
            if name in STATISTICS:
                setattr(record, name, found[name])
            elif name == "weights":
                record.weights = weights
            elif name == "value":
                record.value = value.copy()
            elif name == "grad_output":
                self._listen(record, seen, heads)
        for name, function in self.functions.items():
            setattr(record, name, function(weights, record))

    def _listen(self, record: AttentionRecord, seen: _calls.Call, heads: list[int] | None) -> None:
        """Store the gradient of the output in the record when it is computed."""
        if not seen.output.requires_grad:
            raise ValueError(f"the attention of {record.layer!r} has no gradient, which \"grad_output\" and "
                             "\"relevance\" wait for; run the model without no_grad or inference_mode")
        record.grad_output = None
        rows = slice(None) if self.rows is None else self.rows

        def received(grad: torch.Tensor) -> None:
            with torch.no_grad():
                found = as_array(seen_grad(grad))
            if heads is not None:
                found = found[..., heads, :, :]
            found = found[..., rows, :].copy()
            record.grad_output = found if record.grad_output is None else record.grad_output + found

        seen_grad = seen.grad_output
        seen.output.register_hook(received)


class _Order(threading.local):
    """Detects whether keys of the previous pass have moved, by the first two numbers of each key."""

    def __init__(self) -> None:
        self.keys: dict[tuple[str, int], np.ndarray] = {}
        self.found = False

    def moved(self, layer: str, call: int, index: int, key: torch.Tensor, new: int) -> bool:
        """Whether keys have moved, by this or an earlier call of the pass; `new` keys of a static cache may differ."""
        self.found &= index > 0
        try:
            now = as_array(key)[:, 0, :, :2].copy()
        except (ValueError, IndexError):        # no batch of sequences, or tensors that cannot be captured
            return self.found
        before = self.keys.get((layer, call))
        self.keys[layer, call] = now
        if before is not None and before.shape[0] == now.shape[0] and before.shape[1] <= now.shape[1] != new:
            same = now[:, :before.shape[1]]
            if before.tobytes() != same.tobytes():
                differ = (before != same).any(-1).sum(-1)
                self.found |= bool((differ > (new if before.shape == now.shape else 0)).any())
        return self.found


def _refuse_graphs(names: dict[int, str], model: torch.nn.Module) -> None:
    """Raise for compiled code, which does not call the functions that it was made from."""
    for module in model.modules():
        name = names[id(module)] or type(module).__name__
        if isinstance(module, torch._dynamo.OptimizedModule) or module._compiled_call_impl or _is_compiled(module):
            raise ValueError(f"{name} is compiled; capture needs it as it was before torch.compile")
        if isinstance(module, torch.jit.ScriptModule) and "attention" in str(getattr(module, "inlined_graph", "")):
            raise ValueError(f"{name} is compiled by torch.jit, and calls attention where capture cannot see it")


def _is_compiled(module: torch.nn.Module) -> bool:
    functions = [*vars(module).values(), *(x for cls in type(module).__mro__ for x in vars(cls).values())]
    return any([hasattr(x, "_torchdynamo_orig_callable") and not hasattr(x, "_torchdynamo_disable")
                for x in functions if callable(x) and not isinstance(x, torch.nn.Module | type)])


def _arrays(seen: _calls.Call, layer: str) -> tuple[list[np.ndarray], dict[str, Any]]:
    try:
        return ([as_array(x) for x in (seen.query, seen.key, seen.value)],
                {name: as_array(x) for name, x in seen.options.items()})
    except ValueError as error:
        raise ValueError(f"capture cannot see the attention of {layer!r}: {error}") from error
