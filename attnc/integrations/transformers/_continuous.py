"""Continuous batching with attnc: transformers runs it for a fixed list of attentions, which this extends by ours."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from transformers import ContinuousBatchingManager, PreTrainedModel
from transformers.generation.continuous_batching import initialization
from transformers.generation.continuous_batching.input_outputs import PagedAttentionArgs

import attnc

from ..torch import _tensors
from ._choice import NAME

PAGED = f"paged|{NAME}"
ARGUMENTS = {*PagedAttentionArgs.__annotations__, "k_cache", "v_cache"}


def watch() -> None:
    """Make continuous batching take a model with attnc as it is, and decode by block tables, as with FlashAttention."""
    switch, fast_path = (ContinuousBatchingManager.switch_to_cb_friendly_attn,
                         initialization.ensure_decode_fast_path_is_available)
    if hasattr(switch, "attnc"):
        return

    @functools.wraps(switch)
    def switched(self: Any, model: PreTrainedModel, *args: Any, **kwargs: Any) -> None:
        if model.config._attn_implementation not in (NAME, PAGED):
            switch(self, model, *args, **kwargs)

    @functools.wraps(fast_path)
    def with_fast_path(config: Any, cb_config: Any, user_requested: bool) -> None:
        blocks, types = cb_config.max_blocks_per_request, initialization.group_layers_by_attn_type(config)
        with_tables = all(initialization.ATTN_TYPE_TO_ALLOCATOR[name].supports_block_table for name in types)
        ours = config._attn_implementation in (NAME, PAGED) and with_tables
        fast_path(config, cb_config, user_requested and not ours)
        if ours:
            cb_config.max_blocks_per_request = blocks

    vars(switched)["attnc"] = True
    ContinuousBatchingManager.switch_to_cb_friendly_attn = switched
    initialization.ensure_decode_fast_path_is_available = with_fast_path


@torch.compiler.disable     # type: ignore[untyped-decorator]    # torch is Any to mypy
def decode(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, block_table: torch.Tensor,
           k_cache: torch.Tensor, v_cache: torch.Tensor, cu_seq_lens_k: Any, options: dict[str, Any]) -> torch.Tensor:
    """Write one token of each sequence to its page, and attend from it to all tokens of its sequence.

    Query, key and value are (1, sequences, heads, dim), the caches (pages, page, heads, dim), and `cu_seq_lens_k`
    bounds the tokens of the sequences, the new ones among them.
    """
    lengths = cu_seq_lens_k.diff().long()
    rows = lengths.nonzero()[:, 0]      # a sequence without tokens is padding of the batch
    page, last = k_cache.shape[1], lengths[rows] - 1
    places = block_table[rows, last // page].long(), last % page
    k_cache[places], v_cache[places] = key[0, rows].to(k_cache.dtype), value[0, rows].to(v_cache.dtype)
    # A row is the last token of its sequence: it sees all that causal order allows.
    given: Any = {name: _tensors.as_array(x) for name, x in options.items() if name not in ("causal", "q_offset")}
    arrays = {name: _tensors.as_array(x) for name, x in (("query", query[0]), ("key", k_cache), ("value", v_cache))}
    found = attnc.attention_varlen(**arrays, cu_seqlens_q=np.arange(len(lengths) + 1), block_table=block_table.numpy(),
                                   kv_lengths=lengths.numpy(), **given)
    return _tensors.as_tensor(found)[None]
