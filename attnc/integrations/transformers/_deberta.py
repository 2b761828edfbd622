"""DeBERTa, whose attention adds content-relative terms and does not call transformers' interface: a patch of models."""

from __future__ import annotations

import types
from typing import Any, NamedTuple, TypeVar

import torch
from transformers.models.deberta import modeling_deberta as first
from transformers.models.deberta_v2 import modeling_deberta_v2 as second

from ..torch import attention
from ._distances import of_distances

Model = TypeVar("Model", bound=torch.nn.Module)
_CLASSES = first.DisentangledSelfAttention, second.DisentangledSelfAttention


class _Terms(NamedTuple):
    """The operands of a call of attention, (batch, heads, length, dim), and its content-relative terms."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    options: dict[str, Any]


def patch_deberta(model: Model) -> Model:
    """Make the attention of a DeBERTa (the first, v2 or v3) attnc's, in place; its parameters stay what they are.

    DeBERTa has its own attention, which forms two more matrices for each head: products of queries and of keys with
    vectors of their distance. They become the `relative_key` and `relative_query` of `attnc.attention`, block by block.
    A call that attnc cannot take (positions that are not those of the tokens in order, talking heads) runs the model's
    own code. Outputs are those of the model but for rounding, with gradients; rows of padding have other values, which
    reach no other row.

    Parameters
    ----------
    model : torch.nn.Module
        A model, or a part of one, with modules ``DisentangledSelfAttention``.

    Returns
    -------
    torch.nn.Module
        The same model.

    Raises
    ------
    ValueError
        For a model without such a module; from a call in training with dropout of attention weights.

    Examples
    --------
    >>> from transformers import DebertaV2Config, DebertaV2Model
    >>> config = DebertaV2Config(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    ...                          vocab_size=100, relative_attention=True, position_buckets=8, max_relative_positions=32,
    ...                          pos_att_type=["c2p", "p2c"], share_att_key=True)
    >>> model = patch_deberta(DebertaV2Model(config).eval())
    >>> with torch.no_grad():
    ...     model(torch.arange(50)[None]).last_hidden_state.shape
    torch.Size([1, 50, 32])
    """
    found = [module for module in model.modules() if isinstance(module, _CLASSES)]
    if not found:
        raise ValueError(f"{type(model).__name__} has no DisentangledSelfAttention; wanted a model of DeBERTa")
    for module in found:
        module.forward = types.MethodType(_forward, module)
    return model


def _forward(self: Any, hidden_states: torch.Tensor, attention_mask: torch.Tensor, output_attentions: bool = False,
             query_states: torch.Tensor | None = None, relative_pos: torch.Tensor | None = None,
             rel_embeddings: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The forward of DisentangledSelfAttention."""
    terms = (_of_second if isinstance(self, second.DisentangledSelfAttention) else _of_first)(
        self, hidden_states, query_states, relative_pos, rel_embeddings)
    if terms is None:
        found: tuple[torch.Tensor, torch.Tensor | None] = type(self).forward(
            self, hidden_states, attention_mask, output_attentions, query_states, relative_pos, rel_embeddings)
        return found
    if self.training and self.dropout.p:
        raise ValueError(f"attnc has no dropout of attention weights; the model is in training with {self.dropout.p}")
    seen = attention_mask.bool()
    mask = None if seen.all() else seen
    result: Any = attention(terms.query, terms.key, terms.value, mask=mask, **terms.options,
                            want="weights" if output_attentions else ())
    output, weights = (result.output, result.weights) if output_attentions else (result, None)
    return output.transpose(1, 2).flatten(2), weights


def _of_second(self: Any, hidden_states: torch.Tensor, query_states: torch.Tensor | None,
               relative_pos: torch.Tensor | None, rel_embeddings: torch.Tensor | None) -> _Terms | None:
    """DeBERTa v2 and v3; None for what is left to their own code."""
    rows = hidden_states if query_states is None else query_states
    query, key, value = (_heads(self, x) for x in (
        self.query_proj(rows), self.key_proj(hidden_states), self.value_proj(hidden_states)))
    both = [name for name in ("c2p", "p2c") if name in self.pos_att_type]
    options: dict[str, Any] = {"scale": (query.shape[-1] * (1 + len(both))) ** -0.5}
    if not self.relative_attention:
        return _Terms(query, key, value, options)
    if rel_embeddings is None or rows.shape[1] != hidden_states.shape[1]:
        return None
    if relative_pos is None:
        relative_pos = second.build_relative_position(query, key, self.position_buckets, self.max_relative_positions)
    options["relative_index"] = _index(relative_pos, self.pos_ebd_size)
    if options["relative_index"] is None:
        return None
    embeddings = self.pos_dropout(rel_embeddings)[:2 * self.pos_ebd_size]
    names = ("key_proj", "query_proj") if self.share_att_key else ("pos_key_proj", "pos_query_proj")
    for kind, option, name in zip(("c2p", "p2c"), ("relative_key", "relative_query"), names, strict=True):
        if kind in both:
            options[option] = _heads(self, getattr(self, name)(embeddings)[None])[0]
    return _Terms(query, key, value, options if both else {"scale": options["scale"]})


def _of_first(self: Any, hidden_states: torch.Tensor, query_states: torch.Tensor | None,
              relative_pos: torch.Tensor | None, rel_embeddings: torch.Tensor | None) -> _Terms | None:
    """The first DeBERTa; None for what is left to its own code."""
    if self.talking_head or query_states is not None:
        return None
    query, key, value = _heads(self, self.in_proj(hidden_states)).chunk(3, -1)
    query, value = (x + _heads(self, bias[None, None]) for x, bias in ((query, self.q_bias), (value, self.v_bias)))
    options: dict[str, Any] = {"scale": (query.shape[-1] * (1 + len(self.pos_att_type))) ** -0.5}
    if not self.relative_attention or relative_pos is None or rel_embeddings is None:
        return _Terms(query, key, value, options)
    options["relative_index"] = _index(relative_pos, self.max_relative_positions)
    if options["relative_index"] is None:
        return None
    embeddings = self.pos_dropout(rel_embeddings)[:2 * self.max_relative_positions]
    for kind, option, name in (("c2p", "relative_key", "pos_proj"), ("p2c", "relative_query", "pos_q_proj")):
        if kind in self.pos_att_type:
            options[option] = _heads(self, getattr(self, name)(embeddings)[None])[0]
    return _Terms(query, key, value, options if len(options) > 2 else {"scale": options["scale"]})


def _heads(self: Any, x: torch.Tensor) -> torch.Tensor:
    """(batch, length, heads * dim) as (batch, heads, length, dim)."""
    return x.unflatten(-1, (self.num_attention_heads, -1)).transpose(1, 2)


def _index(relative_pos: torch.Tensor, span: int) -> torch.Tensor | None:
    """The table row of each distance; None unless the positions are those of tokens in order."""
    found = of_distances(relative_pos)
    if found is None or found.numel() != found.shape[-1]:
        return None
    distances = found.flatten()
    if not torch.equal(distances, -distances.flip(-1)):      # a key before a row is as far as the row behind the key
        return None
    return torch.clamp(distances + span, 0, 2 * span - 1).long()
