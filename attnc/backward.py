"""Gradients of attention and of the softmax: arguments checked, results allocated, kernels called."""

from __future__ import annotations

import math
from typing import Never

import numpy as np

from . import _call
from ._checks import Args, BackwardArgs, SoftmaxBackwardArgs, backward_args, options_of, softmax_backward_args
from ._checks.options import overlapping_rows
from ._checks.spellings import hides_unknown, unexpected
from ._norms import norms
from ._types import Array, ArrayLike, Axes, BlockMask, Gradient, Layout, Window
from .results import AttentionGradients


@hides_unknown
def attention_backward(
        grad_output: ArrayLike, query: ArrayLike, key: ArrayLike, value: ArrayLike, output: ArrayLike, lse: ArrayLike,
        *, mask: ArrayLike | None = None, block_mask: BlockMask | None = None, key_indices: ArrayLike | None = None,
        key_mask: ArrayLike | None = None, bias: ArrayLike | None = None, relative_bias: ArrayLike | None = None,
        relative_index: ArrayLike | None = None, relative_key: ArrayLike | None = None,
        relative_query: ArrayLike | None = None, causal: bool = False, window: Window | None = None,
        q_offset: ArrayLike | None = None, k_positions: ArrayLike | None = None, scale: float | None = None,
        softcap: float | None = None, alibi_slopes: ArrayLike | None = None, sinks: ArrayLike | None = None,
        q_segments: ArrayLike | None = None, k_segments: ArrayLike | None = None, q_lengths: ArrayLike | None = None,
        kv_lengths: ArrayLike | None = None, layout: Layout = "bhnd", want: Gradient = ("query", "key", "value"),
        grad_lse: ArrayLike | None = None, num_threads: int | None = None, **unknown: Never) -> AttentionGradients:
    """Gradients of `attention` from its inputs, its output and its lse, without the matrix of weights.

    The weights are computed again, block by block, under the lse: memory is linear in the lengths.

    Parameters
    ----------
    grad_output : array of the shape of `output`
        Gradient of what the output was used for.
    query, key, value : array
        As they went into `attention`.
    output, lse : array
        What ``attention(..., want="lse")`` gave. They may be those over more keys than these (`merge_states`,
        `AttentionState`): then the gradients of these keys are their part of the whole.
    mask, block_mask, key_indices, key_mask, bias, relative_bias, relative_index, relative_key, relative_query, \
causal, window, q_offset, k_positions, scale, softcap, alibi_slopes, sinks, q_segments, k_segments, q_lengths, \
kv_lengths, layout, num_threads
        As they went into `attention`.
    want : name or tuple of names
        Out of ``"query"``, ``"key"``, ``"value"``, ``"bias"``, ``"relative_bias"``, ``"relative_key"``,
        ``"relative_query"`` and ``"sinks"``.
    grad_lse : float array (..., q_heads, q_len), optional
        Gradient of what the lse was used for.

    Returns
    -------
    AttentionGradients
        An attribute for each name, of the shape and dtype of that argument (bools and integers count as float64);
        summed in float32, or float64 if an input is float64. A row without keys, a row of padding and a weight of
        exactly 0 contribute nothing, so that a key that no row sees has gradient 0, whatever it holds.

    Raises
    ------
    TypeError, ValueError
        For a wrong dtype or a wrong shape or value, naming the argument; a name in `want` of what was not given.
    MemoryError
        If there is no memory for the result or the scratch.

    Notes
    -----
    The recomputation is that of Dao et al. 2022 (FlashAttention), appendix B. A kv head is one task where heads keep
    all threads busy, else the rows and the keys are divided over threads; the bits are the same. Where the lse is that
    of these keys and ``abs(lse) > 1024``, it has lost digits: one more pass computes maximum and sum of the rows.
    `attnc.reference.attention_backward` is the definition in plain NumPy.

    Examples
    --------
    >>> import numpy as np
    >>> from attnc import attention
    >>> query, key, value = np.array([[0.]]), np.array([[1.], [-1.]]), np.array([[3.], [5.]])
    >>> result = attention(query, key, value, want="lse")
    >>> attention_backward(np.ones((1, 1)), query, key, value, result.output, result.lse, want="query").query
    array([[-1.]])
    """
    if unknown:
        unexpected(attention_backward, unknown)
    b = backward_args(grad_output, query, key, value, output, lse, *options_of(locals()), want=want, grad_lse=grad_lse,
                      num_threads=num_threads)
    return gradients(b)


def gradients(b: BackwardArgs) -> AttentionGradients:
    """`attention_backward` of checked arguments."""
    a = b.args
    delta = np.empty(a.lse_shape, a.acc)
    found = {name: _empty(b, name) for name in b.want if name in ("query", "key", "value")}
    if "bias" in b.want and a.bias is not None:
        shared = a.bias.size != math.prod(a.weights_shape)      # by several scores, whose gradients add up
        found["bias"] = np.zeros(a.bias.shape, np.float64 if shared else a.acc)
    if "relative_bias" in b.want and a.relative_bias is not None:
        distances = np.zeros((*a.relative_bias.shape[:-2], max(a.q_len + a.kv_len - 1, 0)), np.float64)
        found["relative_bias"] = overlapping_rows(distances, a.q_len, a.kv_len, writeable=True)
    tables = {name: _tables(a, name) for name in ("relative_key", "relative_query") if name in b.want}
    known = norms(b.args, b.lse, b.sinks)
    _call.run("backward", a, None, None, value=a.value, grad_output=b.grad_output, output=b.output, lse=b.lse,
              grad_lse=b.grad_lse, delta=delta, norm=None if known is None else known.stored,
              **{f"d_{name}": gradient for name, gradient in (found | tables).items()})
    for name in found.keys() & {"query", "key", "value"}:
        given = getattr(a, name)
        if found[name].shape != given.shape:
            found[name] = _sum_to(found[name], given.shape).astype(given.dtype)
        found[name] = b.as_given(found[name])
    if "bias" in found and a.bias is not None:
        found["bias"] = found["bias"].astype(a.bias.dtype, copy=False)
    if "relative_bias" in found and a.relative_bias is not None:
        found["relative_bias"] = distances.astype(a.relative_bias.dtype, copy=False)
    for name, gradient in tables.items():
        given = getattr(a, name)
        found[name] = _sum_to(gradient, given.shape).astype(given.dtype, copy=False)
    if "sinks" in b.want and b.sinks is not None and b.sinks_like is not None:
        with np.errstate(all="ignore"):
            shares = None if known is None else known.shares_of(b.sinks)
            found["sinks"] = _of_sinks(b, b.sinks, delta, shares).reshape(b.sinks_like.shape).astype(b.sinks_like.dtype)
    return AttentionGradients(**{name: found[name] for name in b.want})


def _empty(b: BackwardArgs, name: str) -> np.ndarray:
    """A place for a gradient, (batch..., heads, length, dim): in the accumulation dtype if batch elements share it."""
    a, given = b.args, getattr(b.args, name)
    shape = *a.batch, *given.shape[-3:]
    dtype = given.dtype if given.shape == shape else a.acc
    new = np.empty if a.q_len and a.q_heads else np.zeros        # without a row the kernels write nothing
    if a.layout == "bnhd":
        return new((*shape[:-3], shape[-2], shape[-3], shape[-1]), dtype).swapaxes(-2, -3)
    return new(shape, dtype)


def _tables(a: Args, name: str) -> np.ndarray:
    """A place for the gradients of a table: for each batch element and query head, or each key head if all heads share
    the table."""
    table: np.ndarray = getattr(a, name)
    shared = table.ndim < 3 or table.shape[-3] == 1
    if not shared and table.strides[-3] == 0:          # the kernels would take it for shared
        setattr(a, name, table.copy())
    return np.zeros((*a.batch, a.kv_heads if shared else a.q_heads, *table.shape[-2:]), a.acc)


def _of_sinks(b: BackwardArgs, sinks: np.ndarray, delta: np.ndarray, known: np.ndarray | None) -> np.ndarray:
    """Gradient of the sinks: the share of each sink times -delta, over all rows; summed in float64 at least.

    `known` has the shares of rows that do not depend on the lse, and NaN for the others.
    """
    wide = np.result_type(np.float64, delta.dtype)
    rows = math.prod(b.args.batch), b.args.q_heads, b.args.q_len
    lse, delta = (x.reshape(rows).astype(wide) for x in (b.lse, delta))
    share = np.where(lse == -np.inf, 0, np.exp(sinks[:, None] - lse))
    if known is not None:
        share = np.where(np.isnan(known.reshape(rows)), share, known.reshape(rows))
    gradient: np.ndarray = -np.where(share == 0, 0, share * delta).sum((0, 2))
    return gradient


def _sum_to(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The gradient of an array of `shape` from that of its broadcast: the sum over the axes that were broadcast."""
    missing = x.ndim - len(shape)
    axes = [k for k in range(x.ndim) if k < missing or (shape[k - missing] == 1 and x.shape[k] != 1)]
    return (x.sum(tuple(axes), keepdims=True) if axes else x).reshape(shape)


@hides_unknown
def softmax_backward(
        grad_output: ArrayLike, output: ArrayLike, axis: Axes = -1, *, num_threads: int | None = None,
        **unknown: Never) -> Array:
    """Gradient of the input of softmax: ``output * (grad_output - sum(grad_output * output))`` along `axis`.

    Parameters
    ----------
    grad_output : array of the shape of `output`
        Gradient of what the output was used for. Where `output` is exactly 0 it does not count.
    output : array
        What `softmax` gave.
    axis : int, tuple of int or None
        As it went into `softmax`.
    num_threads : int, optional
        See `attnc.get_num_threads` for the default.

    Returns
    -------
    array
        Of the shape of `output`, in the promoted dtype.

    Raises
    ------
    TypeError, ValueError
        For a wrong dtype or a wrong shape or value, naming the argument.

    Examples
    --------
    >>> softmax_backward([1., 0.], [0.5, 0.5])
    array([ 0.25, -0.25])
    """
    if unknown:
        unexpected(softmax_backward, unknown)
    return _softmax_backward(softmax_backward_args(grad_output, output, axis, num_threads), False)


@hides_unknown
def log_softmax_backward(
        grad_output: ArrayLike, output: ArrayLike, axis: Axes = -1, *, num_threads: int | None = None,
        **unknown: Never) -> Array:
    """Gradient of the input of log-softmax: ``grad_output - exp(output) * sum(grad_output)`` along `axis`.

    Parameters, dtypes and errors are those of `softmax_backward`; where `output` is -inf, `grad_output` does not count.

    Examples
    --------
    >>> import numpy as np
    >>> log_softmax_backward([1., 0.], np.log([0.5, 0.5]))
    array([ 0.5, -0.5])
    """
    if unknown:
        unexpected(log_softmax_backward, unknown)
    return _softmax_backward(softmax_backward_args(grad_output, output, axis, num_threads), True)


def _softmax_backward(b: SoftmaxBackwardArgs, logarithm: bool) -> np.ndarray:
    gradient = np.empty(b.output.shape, b.dtype)
    _call.run_rows((b.grad_output, gradient, None, b.output), b, logarithm)
    return gradient
