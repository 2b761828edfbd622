"""Packed sequences of transformers, bounded by cu_seq_lens: through `attnc.attention_varlen`, or as segments."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ..torch import _calls, _packed, _tensors

# What the packed tokens share with each sequence alone; other options make one call with segments.
_OF_SEQUENCES = {"causal", "window", "q_offset", "scale", "softcap", "sinks"}


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_seq_lens_q: torch.Tensor,
           cu_seq_lens_k: torch.Tensor, options: dict[str, Any]) -> torch.Tensor | None:
    """Attention of packed (1, tokens, heads, dim) tensors; None if it needs `segments` instead."""
    options = _without_equal_segments(options, cu_seq_lens_q, cu_seq_lens_k)
    tensors = [query, key, value, *(x for x in options.values() if isinstance(x, torch.Tensor))]
    if not _tensors.are_eager(tensors) or _calls.watching(within_patch=True) or options.keys() - _OF_SEQUENCES:
        return None
    options.pop("q_offset", None)       # in each sequence the last row stands at the last key
    output, _ = _packed.attend(query[0], key[0], value[0], cu_seq_lens_q, cu_seq_lens_k, options)
    return output[None]


def segments(cu_seq_lens_q: torch.Tensor, cu_seq_lens_k: torch.Tensor, q_len: int, kv_len: int,
             options: dict[str, Any]) -> dict[str, Any]:
    """The options with which `attnc.attention` over all tokens gives each sequence what it gives it alone."""
    rows, keys = torch.arange(q_len), torch.arange(kv_len)
    q_ids, k_ids = (torch.searchsorted(ends[1:].to(torch.int64), x, right=True)
                    for ends, x in ((cu_seq_lens_q, rows), (cu_seq_lens_k, keys)))
    options = dict(options)
    if options.get("causal") or options.get("window") is not None:
        # The row at index i stands at i + kv_len, and the last key of its sequence where its last row stands.
        shift = torch.cat([cu_seq_lens_q[1:] - cu_seq_lens_k[1:], cu_seq_lens_q[-1:] - cu_seq_lens_k[-1:]])
        options.update(k_positions=keys + kv_len + shift.to(torch.int64)[k_ids], q_offset=kv_len)
    for name, ids in (("q_segments", q_ids), ("k_segments", k_ids)):
        given = options.get(name)
        if given is not None:           # both must agree
            given = torch.as_tensor(given)
            ids = torch.where(given < 0, -1, given * len(cu_seq_lens_q) + ids)
        options[name] = ids
    return options


def _without_equal_segments(options: dict[str, Any], cu_seq_lens_q: torch.Tensor,
                            cu_seq_lens_k: torch.Tensor) -> dict[str, Any]:
    """The options without segments that position_ids gave and that say nothing more than the bounds."""
    options = {name: x for name, x in options.items() if x is not None}
    given = options.get("q_segments")
    if given is None or torch.compiler.is_compiling() or given is not options["k_segments"]:
        return options
    begins = np.flatnonzero((np.diff(given) != 0).any(0)) + 1
    if (given < 0).any() or not (torch.equal(cu_seq_lens_q, cu_seq_lens_k)
                                 and np.isin(begins, cu_seq_lens_q.numpy()).all()):
        return options
    return {name: x for name, x in options.items() if name not in ("q_segments", "k_segments")}
