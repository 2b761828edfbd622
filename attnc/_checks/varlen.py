"""Check the arguments of attention_varlen: packed tokens, and where each of their sequences starts and ends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .arrays import as_array
from .attention import Args, attention_args
from .options import check_alibi_slopes, integers


@dataclass(slots=True)
class VarlenArgs:
    """Arguments of the tokens as one sequence, and the first row and the length of each sequence (int64)."""

    args: Args
    q_starts: np.ndarray
    k_starts: np.ndarray
    q_lengths: np.ndarray
    kv_lengths: np.ndarray


def varlen_args(
        query: object, key: object, value: object, cu_seqlens_q: object, cu_seqlens_k: object, *, alibi_slopes: object,
        want: object, **options: Any) -> VarlenArgs:
    """Check everything; the slopes may have one row per sequence."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        x = as_array(name, x)
        if x.ndim != 3:
            raise ValueError(f"{name} has {x.ndim} axes, shape {x.shape}; wanted (tokens, heads, dim)")
    a = attention_args(query, key, value, layout="bnhd", want=want, **options)
    for name in a.want:
        if name != "lse":
            raise ValueError(f"want={name!r} has no shape for sequences of several lengths; wanted 'lse' or nothing: "
                             "attention gives it for one sequence at a time")
    q_starts, q_lengths = _sequences("cu_seqlens_q", cu_seqlens_q, a.q_len, "query")
    k_starts, kv_lengths = _sequences("cu_seqlens_k", cu_seqlens_k, a.kv_len, "key")
    if len(q_lengths) != len(kv_lengths):
        raise ValueError(f"cu_seqlens_q bounds {len(q_lengths)} sequences, cu_seqlens_k {len(kv_lengths)}; "
                         "wanted equally many")
    if alibi_slopes is not None:
        a.alibi_slopes = check_alibi_slopes(alibi_slopes, a, (len(q_lengths),))
    return VarlenArgs(a, q_starts, k_starts, q_lengths, kv_lengths)


def _sequences(name: str, bounds: object, tokens: int, packed: str) -> tuple[np.ndarray, np.ndarray]:
    """Starts and lengths from the running sum of lengths: 0, then the end of each sequence."""
    bounds = integers(name, bounds)
    if bounds.ndim != 1 or bounds.size == 0:
        raise ValueError(f"{name} has shape {bounds.shape}; wanted (sequences + 1,): 0 and the end of each sequence")
    if bounds[0] != 0:
        raise ValueError(f"{name} starts at {bounds[0]}; wanted 0")
    falls = np.flatnonzero(bounds[1:] < bounds[:-1])
    if falls.size:
        i = int(falls[0])
        raise ValueError(f"{name} falls from {bounds[i]} to {bounds[i + 1]} at sequence {i}; "
                         "wanted ends that never fall")
    if bounds[-1] != tokens:
        raise ValueError(f"{name} ends at {bounds[-1]}; wanted {tokens}, the tokens of {packed}")
    return bounds[:-1].copy(), np.diff(bounds)
