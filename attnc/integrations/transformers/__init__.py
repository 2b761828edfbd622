"""transformers: ``attn_implementation="attnc"``, and statistics of a model's attention weights while it runs."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.utils import TransformersKwargs
from transformers.utils.output_capturing import _active_collector

from ..torch import AttentionRecord, attention, capture
from . import _choice, _continuous, _packed
from ._choice import NAME
from ._deberta import patch_deberta
from ._distances import of_distances
from ._mask import Mask, mask

__all__ = ["NAME", "AttentionRecord", "capture", "patch_deberta", "register"]

# Arguments that a model passes on but attention does not need; any other unknown argument is an error.
_NOT_OURS = {*TransformersKwargs.__annotations__, *_continuous.ARGUMENTS, "cache", "cache_position", "deterministic",
             "logits_to_keep", "position_embeddings", "return_dict", "use_cache"}


def register() -> str:
    """Register ``attn_implementation="attnc"`` with transformers: exact attention on the CPU, with weights on request.

    Also ``"paged|attnc"``, by which transformers' continuous batching (``model.generate_batch``) knows it; a model with
    ``"attnc"`` runs there alike.

    Select it when a model is made (``from_config(config, attn_implementation="attnc")``, also `from_pretrained`) or
    later (``model.set_attn_implementation("attnc")``). A part of a model whose attention does not call transformers'
    interface runs its own code, as under ``"eager"``; a UserWarning names its class when the model is made.

    Returns
    -------
    str
        The name, ``"attnc"``.

    Raises
    ------
    ValueError
        Not here, but on making a model that has attention classes of its own for each implementation (Falcon, GPT-Neo,
        SAM): the message names them.

    Examples
    --------
    >>> import torch
    >>> from transformers import LlamaConfig, LlamaModel
    >>> config = LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
    ...                      num_key_value_heads=2, vocab_size=100)
    >>> model = LlamaModel._from_config(config, attn_implementation=register()).eval()
    >>> with torch.no_grad():
    ...     found = model(torch.arange(5)[None], output_attentions=True)
    >>> found.last_hidden_state.shape, found.attentions[0].shape
    (torch.Size([1, 5, 32]), torch.Size([1, 4, 5, 5]))
    """
    for name in NAME, _continuous.PAGED:
        AttentionInterface.register(name, attend)
        AttentionMaskInterface.register(name, mask)
    _choice.watch()
    _continuous.watch()
    return NAME


def attend(module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
           attention_mask: torch.Tensor | None, dropout: float = 0.0, scaling: float | None = None,
           is_causal: bool | None = None, softcap: float | None = None, s_aux: torch.Tensor | None = None,
           sliding_window: int | None = None, position_bias: torch.Tensor | None = None,
           indices: torch.Tensor | None = None, output_attentions: bool = False,
           cu_seq_lens_q: torch.Tensor | None = None, cu_seq_lens_k: torch.Tensor | None = None,
           block_table: torch.Tensor | None = None, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The attention function: (batch, heads, length, dim) in, (batch, length, heads, dim) and weights or None out.

    With `cu_seq_lens_q` the length is that of packed sequences, of which each sees itself alone; with `block_table`
    each token is the next of a sequence in the pages of continuous batching. The output has gradients for query, key,
    value, position bias and sinks; the weights have none.

    Raises
    ------
    ValueError
        For arguments that attnc does not support or does not know, naming them.
    """
    unknown = [name for name, given in kwargs.items() if given is not None and name not in _NOT_OURS]
    if unknown:
        raise ValueError(f"attnc does not know the argument {', '.join(unknown)} of {type(module).__name__}")
    if dropout:
        raise ValueError(f"attnc has no dropout of attention weights; the model is in training with {dropout}")
    options = _mask_options(attention_mask, query, key)
    packed = cu_seq_lens_q is not None
    if attention_mask is None:
        # Not module.is_causal, which cross-attention may have and `eager` ignores: only the argument of the call.
        if is_causal and (packed or query.shape[2] > 1):
            options = {"causal": True, "q_offset": 0}   # top-left: the keys of an empty static cache are more than rows
        if packed and sliding_window is not None:       # which a mask would contain
            options["window"] = sliding_window - 1, sliding_window - 1
    if position_bias is not None:
        # A leaf wants the gradient of each of its elements.
        dense = packed or (position_bias.is_leaf and position_bias.requires_grad)
        relative = None if dense else of_distances(position_bias)
        if relative is not None:
            options["relative_bias"] = relative
        else:
            options["bias"] = position_bias + options["bias"] if "bias" in options else position_bias
    if indices is not None:
        options["mask"] = _chosen(indices, key.shape[2], options.get("mask"))
    options.update(scale=scaling, softcap=softcap, sinks=s_aux)
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    weights = output_attentions or _weights_are_collected()
    if block_table is not None:
        if weights:
            raise ValueError("attnc gives no weights in steps of continuous batching that read keys by a block table")
        pages = block_table, kwargs["k_cache"], kwargs["v_cache"]
        return _continuous.decode(query, key, value, *pages, cu_seq_lens_k, options), None
    if cu_seq_lens_q is not None:
        bounds = cu_seq_lens_q, cu_seq_lens_q if cu_seq_lens_k is None else cu_seq_lens_k
        if len(query) != 1:
            raise ValueError(f"attnc takes packed sequences as one example, got {len(query)} with cu_seq_lens_q")
        output = None if weights else _packed.attend(query, key, value, *bounds, options)
        if output is not None:
            return output, None
        options = _packed.segments(*bounds, query.shape[1], key.shape[1], options)
    result = attention(query, key, value, **options, layout="bnhd", want="weights" if weights else ())
    return (result.output, result.weights) if weights else (result, None)


def _chosen(indices: torch.Tensor, kv_len: int, mask: torch.Tensor | None) -> torch.Tensor:
    """The mask of the keys that a sparse attention selects for each row, (batch, q_len, count)."""
    chosen = torch.zeros((*indices.shape[:2], kv_len), dtype=torch.bool).scatter(-1, indices.long(), True)[:, None]
    return chosen if mask is None else chosen & mask


def _weights_are_collected() -> bool:
    """Whether the model was called with output_attentions=True, which some models (GPT-2) do not pass on."""
    return any(name.endswith("attentions") for name in _active_collector.get() or ())


def _mask_options(given: Any, query: torch.Tensor, key: torch.Tensor) -> dict[str, Any]:
    """The options of `attnc.attention` for a mask: a `Mask`, bool (True = attend) or floating point (added)."""
    if given is None:
        return {}
    if not isinstance(given, torch.Tensor) or given.ndim != 4:
        what = f"{type(given).__name__} of shape {tuple(getattr(given, 'shape', ()))}"
        raise ValueError(f"attnc takes masks (batch, 1, queries, keys), got {what}")
    if given.shape[-1] != key.shape[2] or given.shape[-2] not in (1, query.shape[2]):
        raise ValueError(f"the mask {tuple(given.shape)} does not fit {query.shape[2]} queries and {key.shape[2]} keys")
    if isinstance(given, Mask):
        return dict(given.options)
    if given.dtype == torch.bool:
        return {"mask": given}
    if given.is_floating_point():
        return {"bias": given}
    raise ValueError(f"attnc takes masks of bool (True = attend) or floating point (added), got {given.dtype}")
