"""The output, and the lse, of attention on dask arrays."""

from __future__ import annotations

from typing import Any

import dask
import dask.array as da
import numpy as np

import attnc

from ..._checks import OPTIONS, options_of
from ..._checks.scalars import check_want
from ..._types import ArrayLike, BlockMask, Layout, Lse, Window
from ...attention import attend
from ...results import AttentionResult
from ._grid import Grid, args_of

FAN_IN = 4      # partial results that one task merges


def attention(
        query: da.Array, key: da.Array, value: da.Array, *, mask: ArrayLike | None = None,
        block_mask: BlockMask | None = None, key_indices: ArrayLike | None = None, key_mask: ArrayLike | None = None,
        bias: ArrayLike | None = None, relative_bias: ArrayLike | None = None, relative_index: ArrayLike | None = None,
        relative_key: ArrayLike | None = None, relative_query: ArrayLike | None = None, causal: bool = False,
        window: Window | None = None, q_offset: ArrayLike | None = None, k_positions: ArrayLike | None = None,
        scale: float | None = None, softcap: float | None = None, alibi_slopes: ArrayLike | None = None,
        sinks: ArrayLike | None = None, q_segments: ArrayLike | None = None, k_segments: ArrayLike | None = None,
        q_lengths: ArrayLike | None = None, kv_lengths: ArrayLike | None = None, layout: Layout = "bhnd",
        want: Lse | tuple[()] = (), num_threads: int | None = None) -> da.Array | AttentionResult:
    """`attnc.attention` on dask arrays with any chunks along batch, heads, queries and keys.

    Each block of queries is one task with each block of keys that any of its rows may see; the results are merged, four
    at a time, by output and lse.

    Parameters
    ----------
    query, key, value : dask arrays
        With shapes and dtypes as in `attnc.attention`. Batch axes and heads are rechunked to match, head_dim to one
        chunk, and the length of the value like that of the key.
    mask, key_mask, bias, relative_bias, relative_index, relative_key, relative_query, k_positions, alibi_slopes, \
sinks, q_segments, k_segments : dask or NumPy arrays, optional
    block_mask, key_indices, causal, window, q_offset, scale, softcap, q_lengths, kv_lengths, layout, num_threads
        As in `attnc.attention`; arrays among them are NumPy arrays. Blocks of a `block_mask` and chunks may have any
        sizes.
    want : name or tuple of names
        ``"lse"``; for weights and their statistics see `AttentionWeights`.

    Returns
    -------
    dask array like the output of `attnc.attention`, or AttentionResult of dask arrays
        Equal to the result of `attnc.attention` up to rounding.

    Raises
    ------
    TypeError, ValueError
        Before any computation, for a wrong dtype, shape or value, or chunks of unknown size, naming the argument.

    Examples
    --------
    >>> import dask.array as da
    >>> x = da.ones((1, 2, 8, 4), chunks=(1, 1, 4, 4), dtype="float32")
    >>> float(attention(x, x, x, causal=True).sum().compute(scheduler="sync"))
    64.0
    """
    if set(check_want(want)) - {"lse"}:
        raise ValueError(f"want={want!r}; wanted 'lse' or nothing: AttentionWeights has the weights and statistics")
    options = dict(zip(OPTIONS, options_of(locals()), strict=True), num_threads=num_threads)
    grid = Grid(query, key, value, options)
    output, lse = states(grid)
    a = grid.args
    if a.two_d:
        output, lse = output[0], lse[0]
    elif a.layout == "bnhd":
        output = output.swapaxes(-2, -3)
    output = output.astype(a.dtype)
    return AttentionResult(output, lse=lse) if want else output


def states(grid: Grid) -> tuple[da.Array, da.Array]:
    """Output and lse in the accumulation dtype, (batch..., q_heads, q_len[, value_dim])."""
    a = grid.args
    outputs, lses = {}, {}
    for place, sizes, batch, head, rows in grid.row_blocks():
        pairs = [(batch, head, rows, keys) for keys in grid.seen(batch, head, rows) or grid.keys[:1]]
        parts = [dask.delayed(_part)(*grid.inputs(*pair), grid.part(*pair), n == 0) for n, pair in enumerate(pairs)]
        while len(parts) > 1:
            parts = [dask.delayed(_merge)(parts[n:n + FAN_IN]) for n in range(0, len(parts), FAN_IN)]
        shape = (*sizes, rows.size)
        lses[place] = da.from_delayed(parts[0][1], shape, a.acc)
        outputs[*place, 0] = da.from_delayed(parts[0][0], (*shape, a.value_dim), a.acc)
    return assembled(outputs), assembled(lses)


def assembled(found: dict[tuple[int, ...], da.Array]) -> da.Array:
    """Join blocks, given by their numbers on each axis, to one array."""
    size = [1 + max(places) for places in zip(*found, strict=True)]
    nested = np.empty(size, object)
    for place, block in found.items():
        nested[place] = block
    return da.block(nested.tolist())


def _part(query: np.ndarray, key: np.ndarray, value: np.ndarray | None, options: dict[str, Any],
          first: bool) -> tuple[np.ndarray, np.ndarray]:
    """Output and lse over one block of keys; only the first block includes sinks."""
    if not first:
        options = {name: option for name, option in options.items() if name != "sinks"}
    if value is None:
        value = np.empty((*key.shape[:-1], 0), key.dtype)
    result = attend(args_of(query, key, value, options, "lse"))
    assert isinstance(result, AttentionResult)
    return result.output, result.lse


def _merge(parts: list[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    return attnc.merge_states(parts) if len(parts) > 1 else parts[0]
