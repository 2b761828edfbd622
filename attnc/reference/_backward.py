"""Gradients of attention and of the softmax, by the rules of calculus and with the whole matrix in memory."""

from __future__ import annotations

from typing import Any, Never

import numpy as np

from .. import masks
from .._checks import Args, BackwardArgs, backward_args, options_of, softmax_backward_args
from .._checks.arrays import saturated
from .._checks.spellings import hides_unknown, unexpected
from .._types import ArrayLike, Axes, BlockMask, Gradient, Layout, Shape, Window
from ..results import AttentionGradients
from ._scores import masked_scores, per_query_head, product, rows_of_distances, stored_scores, unmasked_scores
from ._softmax import softmax_of_scores


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
    """Gradients of attention: the definition of `attnc.attention_backward`.

    With the weights w of a row, its values v and its gradient g::

        delta   = g . output - grad_lse
        d_score = w * (g . v[j] - delta)          d_product = scale * d_score * (1 - tanh(product / softcap)**2)
        d_query = sum of d_product * key[j]       d_key[j] = sum over the rows of d_product * query
        d_bias  = d_score                         d_value[j] = sum over the rows of w * g
        d_relative_bias[m] = sum of d_score over the places with j - i + q_len - 1 = m
        d_relative_key[x]   = sum of d_product * query[i] over the places of table row x
        d_relative_query[x] = sum of d_product * key[j] over these; d_query and d_key have the rows' part besides
        d_sink  = sum over the rows of -exp(sink - lse) * delta

    Parameters, results and errors are those of `attnc.attention_backward`.

    Examples
    --------
    >>> import numpy as np
    >>> from attnc.reference import attention
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
    with np.errstate(all="ignore"):
        found = run(b)
        a = b.args
        like: dict[str, Any] = {name: getattr(a, name) for name in b.want} | {"sinks": b.sinks_like}
        return AttentionGradients(**{name: found[name].astype(like[name].dtype, order="C") for name in b.want})


def run(b: BackwardArgs) -> dict[str, np.ndarray]:
    """The gradients of checked arguments, those of the scores, and the weights, all in the dtype ``args.acc``."""
    a = b.args
    allowed, within = masks.allowed(a), True if a.q_lengths is None else masks.rows_within(a)[..., None]
    lse = b.lse.astype(a.acc).reshape(*a.batch, a.q_heads, a.q_len, 1)
    grad, output = (np.where(within, x.astype(a.acc), 0) for x in (b.grad_output, b.output))
    grad_lse = np.zeros((), a.acc) if b.grad_lse is None else b.grad_lse.astype(a.acc).reshape(lse.shape)
    delta = np.where(within, (grad * output).sum(-1, keepdims=True) - grad_lse, 0)

    scores = masked_scores(a, allowed)
    weights = np.exp(np.minimum(scores - lse, 0))
    weights = np.where((scores != -np.inf) & (lse != -np.inf), weights, 0)
    own = softmax_of_scores(*stored_scores(a, allowed), allowed, b.sinks)
    same = agrees(own.lse, b.lse.reshape(own.lse.shape))     # too large to hold the digits that the weights need
    weights = np.where(same[..., None], own.weights, weights)
    d_weights = product(grad, per_query_head(np.asarray(a.value, a.acc), a))
    d_scores = np.where(weights == 0, 0, weights * (d_weights - delta))
    d_products = d_scores
    if a.softcap is not None:
        slope = 1 - np.tanh(unmasked_scores(a, "scaled") / a.acc.type(a.softcap)) ** 2
        d_products = np.where(weights == 0, 0, d_scores * slope)

    scale, key, query = a.acc.type(a.scale), per_query_head(a.key.astype(a.acc), a), a.query.astype(a.acc)
    found = {"query": sum_of_rows(d_products, key), "key": sum_of_rows(d_products.swapaxes(-1, -2), query),
             "value": per_kv_head(sum_of_rows(weights.swapaxes(-1, -2), grad), a)}
    tables = of_tables(a, d_products, query, key, found) if a.relative_index is not None else {}
    found |= {"query": scale * found["query"], "key": scale * per_kv_head(found["key"], a)}
    found = {name: b.as_given(sum_to(x + 0, getattr(a, name).shape)) for name, x in found.items()}
    found |= {"scores": d_scores, "weights": weights}
    found |= {name: sum_to(scale * x, getattr(a, name).shape) for name, x in tables.items()}
    if "bias" in b.want and a.bias is not None:
        found["bias"] = sum_to(d_scores, a.bias.shape)
    if "relative_bias" in b.want and a.relative_bias is not None:
        found["relative_bias"] = of_distances(sum_to(d_scores, a.relative_bias.shape))
    if b.sinks is not None and own.sink_logs is not None:
        found["sinks"] = of_sinks(b, b.sinks, delta[..., 0], np.where(same, own.sink_logs, -np.inf), same)
        if b.sinks_like is not None:
            found["sinks"] = found["sinks"].reshape(b.sinks_like.shape)
    return found


def of_tables(a: Args, d_products: np.ndarray, query: np.ndarray, key: np.ndarray, found: dict[str, np.ndarray]
              ) -> dict[str, np.ndarray]:
    """Gradients of the tables, without the scale; adds their rows to those of query and key in `found`."""
    rows, gradients = rows_of_distances(a), {}
    for name, d, other, of in (("relative_key", d_products, query, "query"),
                               ("relative_query", d_products.swapaxes(-1, -2), key, "key")):
        table = getattr(a, name)
        if table is None:
            continue
        places = rows if of == "query" else rows.T
        by_row = np.zeros((*d.shape[:-1], table.shape[-2]), d.dtype)        # the sums of d that name a row
        for i in range(len(places)):
            np.add.at(by_row[..., i, :].T, places[i], d[..., i, :].T)
        found[of] = found[of] + sum_of_rows(by_row, saturated(table, a.acc))
        gradients[name] = sum_of_rows(by_row.swapaxes(-1, -2), np.broadcast_to(other, (*d.shape[:-1], other.shape[-1])))
    return gradients


def agrees(own: np.ndarray, lse: np.ndarray) -> np.ndarray:
    """Where `lse` is too large to hold the row sum, but is that of these keys: four roundings from `own` at most.

    Beyond 1024 float32 rounds an lse by up to 2**-14 and more, and each weight by that share.
    """
    large = (np.abs(lse) > 1024) & (lse != -np.inf)
    return np.asarray(large & ((own == lse) | (np.abs(own - lse) <= 4 * np.finfo(lse.dtype).eps * np.abs(lse))))


def of_sinks(b: BackwardArgs, sinks: np.ndarray, delta: np.ndarray, sink_logs: np.ndarray, known: np.ndarray
             ) -> np.ndarray:
    """Gradient of the sinks, one head after another: each sink has the share ``exp(sink - lse)`` of its rows.

    `sink_logs` has the logarithms of the shares where they are `known` without the lse.
    """
    wide = np.result_type(np.float64, delta.dtype)
    lse, found = b.lse.reshape(delta.shape).astype(wide), np.zeros(b.args.q_heads, wide)
    for head in range(b.args.q_heads):
        rows = (..., head, slice(None))
        logs = np.where(known[rows], sink_logs[rows], sinks[head] - lse[rows])
        share = np.where((lse[rows] == -np.inf) & ~known[rows], 0, np.exp(logs))
        found[head] -= np.where(share == 0, 0, share * delta[rows]).sum()
    return found


def of_distances(d_scores: np.ndarray) -> np.ndarray:
    """The sum over all places (i, j) of each distance, at ``j - i + q_len - 1``."""
    *lead, q_len, kv_len = d_scores.shape
    total = np.zeros((*lead, max(q_len + kv_len - 1, 0)), d_scores.dtype)
    for i in range(q_len if kv_len else 0):
        total[..., q_len - 1 - i:q_len - 1 - i + kv_len] += d_scores[..., i, :]
    return total


def sum_to(x: np.ndarray, shape: Shape) -> np.ndarray:
    """Gradient of an array of `shape` from that of its broadcast: the sum over all its copies."""
    while x.ndim > len(shape):
        x = x.sum(0)
    for axis, length in enumerate(shape):
        x = x.sum(axis, keepdims=True) if length == 1 else x
    return x


def sum_of_rows(coefficients: np.ndarray, x: np.ndarray) -> np.ndarray:
    """``coefficients @ x``, where a coefficient of exactly 0 adds nothing, whatever it meets."""
    finite = np.isfinite(x).all(-1)
    total = np.where(finite[..., None, :], coefficients, 0) @ np.where(finite[..., None], x, 0)
    for j in np.flatnonzero(~finite.all(tuple(range(finite.ndim - 1)))):
        adds = (coefficients[..., j, None] != 0) & ~finite[..., None, j, None]
        total = total + np.where(adds, coefficients[..., j, None] * x[..., None, j, :], 0)
    return total


def per_kv_head(x: np.ndarray, a: Args) -> np.ndarray:
    """Gradients of keys or values, summed over the query heads that share a head."""
    if a.q_heads == a.kv_heads:
        return x
    return np.asarray(x.reshape(*x.shape[:-3], a.kv_heads, a.q_heads // a.kv_heads, *x.shape[-2:]).sum(-3))


@hides_unknown
def softmax_backward(
        grad_output: ArrayLike, output: ArrayLike, axis: Axes = -1, *, num_threads: int | None = None,
        **unknown: Never) -> np.ndarray:
    """Gradient of the input of softmax: ``output * (grad_output - sum(grad_output * output))`` along `axis`.

    The definition of `attnc.softmax_backward`.

    Parameters, results and errors are those of `attnc.softmax_backward`.

    Examples
    --------
    >>> softmax_backward([1., 0.], [0.5, 0.5])
    array([ 0.25, -0.25])
    """
    if unknown:
        unexpected(softmax_backward, unknown)
    b = softmax_backward_args(grad_output, output, axis, num_threads)
    with np.errstate(all="ignore"):
        share = b.output.astype(b.acc)
        grad = np.where(share == 0, 0, b.grad_output.astype(b.acc))
        change = share * (grad - (grad * share).sum(b.axes, keepdims=True))
        return np.where(share == 0, 0, change).astype(b.dtype)


@hides_unknown
def log_softmax_backward(
        grad_output: ArrayLike, output: ArrayLike, axis: Axes = -1, *, num_threads: int | None = None,
        **unknown: Never) -> np.ndarray:
    """Gradient of the input of log-softmax: ``grad_output - exp(output) * sum(grad_output)`` along `axis`.

    The definition of `attnc.log_softmax_backward`.

    Parameters, dtypes and errors are those of `softmax_backward`; where `output` is -inf, `grad_output` does not count.

    Examples
    --------
    >>> import numpy as np
    >>> log_softmax_backward([1., 0.], np.log([0.5, 0.5]))
    array([ 0.5, -0.5])
    """
    if unknown:
        unexpected(log_softmax_backward, unknown)
    b = softmax_backward_args(grad_output, output, axis, num_threads)
    with np.errstate(all="ignore"):
        share = np.exp(b.output.astype(b.acc))
        grad = np.where(b.output == -np.inf, 0, b.grad_output.astype(b.acc))
        change = share * grad.sum(b.axes, keepdims=True)
        return (grad - np.where(share == 0, 0, change)).astype(b.dtype)
