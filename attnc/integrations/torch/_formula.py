"""Attention and its gradients in torch's own operations, with dense matrices, for derivatives of any kind and order.

The kernels compute values and first gradients. Tangents and derivatives of gradients come from these formulas, which
have the same meaning; `attnc.reference` has them in NumPy.
"""

from __future__ import annotations

import types
from typing import TYPE_CHECKING, Any

import torch

from ._operators import ARRAYS, INPUTS, NUMBERS

if TYPE_CHECKING:
    from collections.abc import Sequence


def attention(*args: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The results of the operator `attention`; sinks may have batch axes, (batch..., q_heads)."""
    *operands, weights = args
    p = _parts(operands)
    output = _given_axes(p, p.weights @ p.value).to(p.dtype)
    if p.order is not None:
        output = output.permute(p.order).contiguous().permute([p.order.index(axis) for axis in range(output.ndim)])
    lse, dense = p.lse.squeeze(-1), p.weights.to(p.dtype)
    lse = lse if p.dtype is torch.float64 else lse.float()
    if p.two_d:
        lse, dense = lse.squeeze(0), dense.squeeze(0)
    return output, lse, dense if weights else output.new_empty(0)


def attention_backward(grad_output: torch.Tensor, grad_lse: torch.Tensor | None, query: torch.Tensor,
                       key: torch.Tensor, value: torch.Tensor, output: torch.Tensor, lse: torch.Tensor,
                       *rest: Any) -> list[torch.Tensor]:
    """The results of the operator `attention_backward`.

    Output and lse are recomputed as functions of the inputs; the given ones have no derivative.
    """
    *options, want = rest
    p = _parts((query, key, value, *options))
    grad = _kernel_axes(p, grad_output.to(p.query.dtype))
    if p.within is not None:
        grad = torch.where(p.within, grad, 0)
    delta = (grad * (p.weights @ p.value)).sum(-1, keepdim=True)
    if grad_lse is not None:
        lse_grad = grad_lse[..., None].to(delta.dtype)
        delta = delta - (lse_grad if p.within is None else torch.where(p.within, lse_grad, 0))
    d_scores = torch.where(p.allowed, p.weights * (grad @ p.value.mT - delta), 0)
    d_products = d_scores if p.slope is None else d_scores * p.slope
    d_products = d_products * p.scale
    found = {}
    # the sums that name a row of the tables, of each query row and of each key
    of_rows = None if p.relative_key is None else _by_table_row(d_products, p.rows, p.relative_key)
    of_keys = None if p.relative_query is None else _by_table_row(d_products.mT, p.rows.mT, p.relative_query)
    for name in want.split():
        if name == "query":
            total = d_products @ p.key
            found[name] = _given_axes(p, total if of_rows is None else total + of_rows @ p.relative_key)
        elif name in ("key", "value"):
            total = d_products.mT @ p.query if name == "key" else p.weights.mT @ grad
            if name == "key" and of_keys is not None:
                total = total + of_keys @ p.relative_query
            found[name] = _given_axes(p, total.unflatten(-3, (-1, p.group)).sum(-3))
        elif name == "bias":
            found[name] = d_scores
        elif name == "relative_bias":
            found[name] = _of_distances(d_scores)
        elif name == "relative_key" and of_rows is not None:
            found[name] = of_rows.mT @ p.query
        elif name == "relative_query" and of_keys is not None:
            found[name] = of_keys.mT @ p.key
        else:
            found[name] = sinks_gradient(delta.squeeze(-1), p.lse.squeeze(-1), p.sinks)
    given = dict(zip(INPUTS, (query, key, value, *options), strict=False))
    return [_sum_to(x, given[name].shape).to(given[name].dtype) for name, x in found.items()]


def sinks_gradient(delta: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """Gradient of the sinks of each batch element, (batch..., q_heads): the sum over rows of -delta times the share."""
    empty = lse == -torch.inf
    share = torch.where(empty, 0, torch.exp(sinks[..., None] - torch.where(empty, 0, lse)))
    return -torch.where(share == 0, 0, share * delta).sum(-1)


def _parts(args: Sequence[Any]) -> types.SimpleNamespace:
    """Operands in (..., q_heads, length, dim) order and the accumulation dtype, with weights, lse and their parts.

    A query, key or value that is not finite counts as 0, and the rows that may see it become NaN, so that it has no
    influence on other rows.
    """
    p = types.SimpleNamespace(**dict(zip((*INPUTS, *NUMBERS), args, strict=True)))
    p.dtype = torch.promote_types(torch.promote_types(p.query.dtype, p.key.dtype), p.value.dtype)
    # torch.autocast ignores float64; turning it off has no effect below the first level of torch.func
    acc = torch.float64 if p.dtype is torch.float64 or torch.is_autocast_enabled("cpu") else torch.float32
    p.two_d = max(p.query.ndim, p.key.ndim, p.value.ndim) == 2
    batch = torch.broadcast_shapes(*(x.shape[:-3] for x in (p.query, p.key, p.value)))
    query, key, value = (x if p.two_d else x.expand(*batch, *x.shape[-3:]) for x in (p.query, p.key, p.value))
    empty = [x.new_empty((*x.shape[:-1], 0), dtype=acc) for x in (query, key)]
    of_places = {**{name: getattr(p, name) for name in ARRAYS}, **dict.fromkeys((
        "bias", "relative_bias", "relative_index", "relative_key", "relative_query", "sinks", "scale", "softcap"))}
    numbers = {**{name: getattr(p, name) for name in NUMBERS}, "factor": None, "cap": None, "order": None}
    places = torch.ops.attnc.attention_places(*empty, *of_places.values(), *numbers.values())

    if p.scale is None:
        p.scale = max(1, p.query.shape[-1]) ** -0.5 if p.factor is None else p.factor
    cap = p.softcap if p.cap is None else p.cap
    query, key, value = (_kernel_axes(p, x.to(acc)) for x in (query, key, value))
    p.group = query.shape[-3] // key.shape[-3] if key.shape[-3] else 1
    finite_query = query.isfinite().all(-1, keepdim=True)
    finite_key, finite_value = (x.isfinite().all(-1, keepdim=True) for x in (key, value))
    p.query, key, value = (torch.where(finite, x, 0) for finite, x in (
        (finite_query, query), (finite_key, key), (finite_value, value)))
    p.key, p.value, finite_keys = (x.repeat_interleave(p.group, -3) for x in (key, value, finite_key & finite_value))

    scores, p.slope = p.query @ p.key.mT, None
    finite_tables = torch.ones((), dtype=torch.bool)
    if p.relative_index is not None:
        p.rows = p.relative_index.long()[_distances(scores.shape, scores.device)]
        for name in ("relative_key", "relative_query"):
            table = getattr(p, name)
            if table is None:
                continue
            finite = table.isfinite().all(-1)
            finite_tables = finite_tables & finite[..., p.rows]
            table = torch.where(finite[..., None], table, 0).to(acc)
            setattr(p, name, table)
            scores = scores + (_at_rows(p.query @ table.mT, p.rows) if name == "relative_key"
                               else _at_rows(p.key @ table.mT, p.rows.mT).mT)
    scores = scores * p.scale
    if cap is not None:
        capped = torch.tanh(scores / cap)
        scores, p.slope = cap * capped, 1 - capped ** 2
    p.allowed = (places != -torch.inf).expand(scores.shape)
    for bias in (p.bias, None if p.relative_bias is None else _at_places(p.relative_bias, scores.shape)):
        if bias is not None:
            p.allowed = p.allowed & (bias != -torch.inf)
            scores = scores + torch.where(bias == -torch.inf, 0, bias.to(acc))
    some = p.allowed.any(-1, keepdim=True)
    # rows without a key are rows of zeros until the end, so that no derivative contains inf - inf
    scores = torch.where(p.allowed, scores + torch.where(places == -torch.inf, 0, places),
                         torch.where(some, -torch.inf, 0.0).to(acc))
    p.within = None
    if p.q_lengths is not None:
        p.within = (torch.arange(p.query.shape[-2], device=p.query.device)
                    < p.q_lengths[..., None, None]).unsqueeze(-1)
    nothing = scores.new_full((*scores.shape[:-1], 1), -torch.inf)
    row = scores
    if p.sinks is not None:
        p.sinks = p.sinks.to(acc) if p.sinks.ndim else p.sinks[None].to(acc)
        sink = p.sinks[..., None, None].expand(nothing.shape)
        row = torch.cat([scores, sink], -1)
        nothing = sink if p.within is None else torch.where(p.within, sink, -torch.inf)
    lse = torch.logsumexp(row, -1, keepdim=True)
    # not exp(scores - lse): the lse of scores far from 0 loses the digits of the sum
    weights = torch.softmax(row, -1)[..., :scores.shape[-1]]
    finite = finite_query & finite_keys.mT & finite_tables
    intact = torch.where(some & ~(finite | ~p.allowed).all(-1, keepdim=True), torch.nan, 1.0)
    p.weights = torch.where(p.allowed, weights * intact, 0)
    p.lse = torch.where(some, lse * intact, nothing)
    return p


def _at_places(relative_bias: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """The relative bias of each row and key, (..., q_len, kv_len)."""
    return relative_bias[..., _distances(shape, relative_bias.device)]


def _at_rows(products: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Products with all rows of a table at the row of each place, (..., length, places)."""
    return torch.take_along_dim(products, rows.expand(*products.shape[:-1], rows.shape[-1]), -1)


def _by_table_row(x: torch.Tensor, rows: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """The sums over the places of each table row, (..., length, table rows)."""
    return x.new_zeros((*x.shape[:-1], table.shape[-2])).scatter_add(-1, rows.expand(x.shape), x)


def _of_distances(d_scores: torch.Tensor) -> torch.Tensor:
    """The sum over rows and keys of each distance, (..., q_len + kv_len - 1)."""
    *lead, rows, keys = d_scores.shape
    total = d_scores.new_zeros((*lead, max(rows + keys - 1, 0)))
    return total.index_add(-1, _distances(d_scores.shape, d_scores.device).flatten(), d_scores.flatten(-2))


def _distances(shape: Sequence[int], device: torch.device) -> torch.Tensor:
    """The index into a relative bias of each row and key, (q_len, kv_len)."""
    rows, keys = torch.arange(shape[-2], device=device), torch.arange(shape[-1], device=device)
    return keys - rows[:, None] + shape[-2] - 1


def _kernel_axes(p: types.SimpleNamespace, x: torch.Tensor) -> torch.Tensor:
    return x[None] if x.ndim == 2 else x.transpose(-2, -3) if p.layout == "bnhd" else x


def _given_axes(p: types.SimpleNamespace, x: torch.Tensor) -> torch.Tensor:
    return x.squeeze(0) if p.two_d else x.transpose(-2, -3) if p.layout == "bnhd" else x


def _sum_to(x: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """The gradient of a tensor of `shape` from that of its broadcast: the sum over the broadcast axes."""
    missing = x.ndim - len(shape)
    axes = [k for k in range(x.ndim) if k < missing or (shape[k - missing] == 1 and x.shape[k] != 1)]
    return (x.sum(axes, keepdim=True) if axes else x).reshape(shape)
