"""A BERT encoder in float64 NumPy that yields the queries, keys and values of every layer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

_erf = np.vectorize(math.erf, otypes=[np.float64])


class Layer(NamedTuple):
    """The attention inputs of one layer, each (heads, tokens, head_dim), and the hidden states it leaves."""

    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    hidden: np.ndarray


def encode(words: np.ndarray, params: Mapping[str, np.ndarray], *, layers: int, heads: int,
           eps: float) -> Iterator[Layer]:
    """Run one sentence through the encoder and yield each layer in turn.

    Parameters
    ----------
    words : array (tokens, hidden), float64
        Word embeddings of the tokens, special tokens included; the first stands at position 0.
    params : mapping of str to float64 array
        ``emb.pos``, ``emb.type``, ``emb.ln.w``, ``emb.ln.b`` and, with ``.w`` (out, in) and ``.b`` each, for layer
        ``i`` after ``l{i}.``: ``q``, ``k``, ``v``, ``ao`` (attention output), ``fi`` and ``fo`` (feed-forward in and
        out), ``aln`` and ``oln`` (the layer norms after the attention and after the feed-forward part).
    layers, heads : int
        Size of the model.
    eps : float
        What the layer norms add to the variance.

    Notes
    -----
    All of it is float64, so that the float32 arrays that are kept do not depend on the order in which a particular
    BLAS adds: such differences lie some eight digits below the last one kept.
    """
    def linear(x: np.ndarray, name: str) -> np.ndarray:
        return x @ params[f"{name}.w"].T + params[f"{name}.b"]

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        x = x - x.mean(-1, keepdims=True)
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * params[f"{name}.w"] + params[f"{name}.b"]

    def split(x: np.ndarray) -> np.ndarray:
        return x.reshape(len(x), heads, -1).swapaxes(0, 1)

    x = norm(words + params["emb.pos"][:len(words)] + params["emb.type"][0], "emb.ln")
    for layer in range(layers):
        at = f"l{layer}."
        query, key, value = (split(linear(x, at + name)) for name in "qkv")
        context = (attention_weights(query, key) @ value).swapaxes(0, 1).reshape(x.shape)
        x = norm(x + linear(context, at + "ao"), at + "aln")
        inner = linear(x, at + "fi")
        inner = 0.5 * inner * (1 + _erf(inner / math.sqrt(2)))  # the exact GELU, not its tanh approximation
        x = norm(x + linear(inner, at + "fo"), at + "oln")
        yield Layer(query, key, value, x)


def attention_weights(query: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Softmax of query·key/sqrt(head_dim): (heads, tokens, tokens) from two (heads, tokens, head_dim) arrays."""
    scores = query @ key.swapaxes(-1, -2) / math.sqrt(query.shape[-1])
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def strongest(layers: list[Layer], rows: list[int], columns: list[int]) -> tuple[int, int, float]:
    """The layer and head in which one word attends most to another, and that weight.

    The weight is summed over the key tokens (`columns`) of the one word and averaged over the query tokens (`rows`)
    of the other.
    """
    weights = np.stack([attention_weights(layer.query, layer.key) for layer in layers])
    between = weights[:, :, rows][..., columns].sum(-1).mean(-1)
    layer, head = np.unravel_index(between.argmax(), between.shape)
    return int(layer), int(head), float(between[layer, head])
