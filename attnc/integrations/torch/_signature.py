"""Converts the arguments of torch's attention to those of attnc; checks them, and broadcasts ranks and heads."""

from __future__ import annotations

from typing import Any

import torch

from . import _tensors


def arguments_of(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None,
                 is_causal: bool, scale: float | None,
                 enable_gqa: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Query, key, value and options of `attnc.attention` for a call of torch's; raises if attnc has no equivalent."""
    check(query, key, value)
    query, key, value = _tensors.autocast(query, key, value)
    if is_causal and attn_mask is not None:
        raise ValueError("attn_mask and is_causal=True were given; wanted one of them")
    _tensors.check_one_dtype(query, key, value)
    options: dict[str, Any] = {"scale": scale, "causal": is_causal, "q_offset": 0 if is_causal else None}
    if attn_mask is not None:
        _tensors.check("attn_mask", attn_mask)
        if attn_mask.dtype != torch.bool and not attn_mask.is_floating_point():
            raise TypeError(f"attn_mask must be bool (True = attend) or floating point (added), got {attn_mask.dtype}")
        options["mask" if attn_mask.dtype == torch.bool else "bias"] = attn_mask
    return *_heads(query, key, value, enable_gqa), options


def packed_options(query: torch.Tensor, key: torch.Tensor, attn_mask: torch.Tensor | None, is_causal: bool,
                   scale: float | None, enable_gqa: bool) -> dict[str, Any]:
    """Options of `attnc.attention_varlen` for a call of torch's with jagged tensors (batch, heads, lengths, dim)."""
    if attn_mask is not None:
        raise ValueError("attn_mask was given with jagged tensors; wanted it left out")
    jagged = [getattr(x, "_ragged_idx", None) for x in (query, key)]      # None: a dense tensor, refused later
    if jagged == [2, 2] and query.shape[1] != key.shape[1] and not enable_gqa:
        raise ValueError(f"query has {query.shape[1]} heads, key has {key.shape[1]}; wanted equally many, "
                         "or enable_gqa=True")
    return {"scale": scale, "causal": is_causal, "q_offset": 0 if is_causal else None}


def check(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    """Raise unless these are tensors that attnc computes with."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        _tensors.check_floating(name, x)


def order_of(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None,
             grouped: bool) -> list[int] | None:
    """The memory order of the output's axes: the query's, if torch's fused kernel would run, else None.

    Code that takes a view of the output, such as ``.transpose(1, 2).view(...)``, depends on this order.
    """
    fused = (query.ndim == key.ndim == value.ndim == 4 and query.shape[0] == key.shape[0] == value.shape[0]
             and key.shape[1] == value.shape[1] and (grouped or key.shape[1] == query.shape[1])
             and query.shape[3] == value.shape[3] and all([x.stride(3) == 1 for x in (query, key, value)])
             and (attn_mask is None or (attn_mask.ndim in (2, 4) and not attn_mask.requires_grad)))
    strides = query.stride()
    if not fused or 0 in strides:
        return None
    # comparisons, which torch.compile can trace with symbolic strides
    places = [sum([strides[j] > strides[i] or (strides[j] == strides[i] and j < i) for j in range(4)])
              for i in range(4)]
    return [places.index(place) for place in range(4)]


def _heads(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
           grouped: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Give query, key and value ranks that attnc accepts together, and broadcast heads as torch does."""
    if max(query.ndim, key.ndim, value.ndim) > 2:
        query, key, value = (x[None] if x.ndim == 2 else x for x in (query, key, value))
        counts = query.shape[-3], key.shape[-3], value.shape[-3]
        most = max(counts)
        if counts[1] != counts[2] or counts[0] < most:
            query, key, value = (x.expand(*x.shape[:-3], most, -1, -1) if x.shape[-3] == 1 else x
                                 for x in (query, key, value))
        elif counts[0] != counts[1] and counts[1] != 1 and not grouped:
            raise ValueError(f"query has {counts[0]} heads, key has {counts[1]}; wanted equally many, "
                             "or enable_gqa=True")
    return query, key, value
