"""Attention and its weights on dask arrays: blocks of queries against blocks of keys, merged by output and lse."""

from ._attention import attention
from ._weights import AttentionWeights

__all__ = ["AttentionWeights", "attention"]
