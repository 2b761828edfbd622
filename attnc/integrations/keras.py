"""Keras layers whose attention attnc computes; on request the same call returns the attention scores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import ops

import attnc


class _Attention:
    """The base of both layers: overrides `_compute_attention`, Keras's hook for subclasses."""

    _return_attention_scores: bool      # set by Keras

    def _compute_attention(self, query: Any, key: Any, value: Any, attention_mask: Any = None,
                           training: bool | None = None, return_attention_scores: bool | None = None,
                           use_causal_mask: bool = False) -> tuple[Any, Any]:
        """Output of projected heads, (batch, length, heads, dim), and scores (batch, heads, length, keys) or None."""
        rate = getattr(self, "_dropout", None) or getattr(self, "dropout", 0.0)
        if training and rate:
            raise NotImplementedError(f"attnc has no dropout: dropout must be 0 in training, got {rate}")
        if len(query.shape) != 4:
            raise NotImplementedError(f"attention_axes has {len(query.shape) - 3} axes; attnc attends over one")
        scores = self._return_attention_scores if return_attention_scores is None else return_attention_scores
        mask = attention_mask
        if mask is not None:
            mask = ops.cast(mask if len(mask.shape) == 4 else ops.expand_dims(mask, -3), "bool")
        return attend(query, self._own_heads(key), self._own_heads(value), mask, causal=use_causal_mask, scores=scores)

    def _own_heads(self, x: Any) -> Any:
        return x


@keras.saving.register_keras_serializable("attnc")
class MultiHeadAttention(_Attention, keras.layers.MultiHeadAttention):    # type: ignore[misc]    # Any to mypy
    """`keras.layers.MultiHeadAttention` computed by attnc; ``return_attention_scores=True`` adds no second pass.

    Parameters
    ----------
    **options
        Options of `keras.layers.MultiHeadAttention`. ``dropout`` must be 0 in training.

    Notes
    -----
    On the torch and jax backends `attnc.attention_backward` computes the gradients of the output; scores have none.

    Examples
    --------
    >>> layer = MultiHeadAttention(num_heads=2, key_dim=4)
    >>> query, value = np.ones((1, 3, 8), "float32"), np.ones((1, 5, 8), "float32")
    >>> output, scores = layer(query, value, return_attention_scores=True)
    >>> tuple(output.shape), tuple(scores.shape)
    ((1, 3, 8), (1, 2, 3, 5))
    """


@keras.saving.register_keras_serializable("attnc")
class GroupedQueryAttention(_Attention, keras.layers.GroupQueryAttention):    # type: ignore[misc]    # Any to mypy
    """`keras.layers.GroupQueryAttention` computed by attnc, which reads each key head once for its query heads.

    Parameters
    ----------
    **options
        Options of `keras.layers.GroupQueryAttention`. ``dropout`` must be 0 in training.

    Examples
    --------
    >>> layer = GroupedQueryAttention(head_dim=4, num_query_heads=4, num_key_value_heads=2)
    >>> tuple(layer(np.ones((1, 3, 8), "float32"), np.ones((1, 3, 8), "float32"), use_causal_mask=True).shape)
    (1, 3, 8)
    """

    def _own_heads(self, x: Any) -> Any:
        return x[:, :, ::self.num_repeats]          # the layer has repeated them


def attend(query: Any, key: Any, value: Any, mask: Any, *, causal: bool, scores: bool) -> tuple[Any, Any]:
    """Output and scores (or None) for tensors of the current backend."""
    backend = keras.backend.backend()
    if backend not in _BACKENDS:
        raise NotImplementedError(f"attnc.integrations.keras has the backends {', '.join(_BACKENDS)}; the one in use "
                                  f"is {backend}")
    return _BACKENDS[backend](query, key, value, mask, causal, scores)


def _numpy(query: Any, key: Any, value: Any, mask: Any, causal: bool, scores: bool) -> tuple[Any, Any]:
    return _by(attnc.attention, query, key, value, mask, causal, scores)


def _torch(query: Any, key: Any, value: Any, mask: Any, causal: bool, scores: bool) -> tuple[Any, Any]:
    from .torch import attention

    return _by(attention, query, key, value, mask, causal, scores)


def _by(attention: Callable[..., Any], query: Any, key: Any, value: Any, mask: Any, causal: bool,
        scores: bool) -> tuple[Any, Any]:
    options = {"layout": "bnhd", "causal": causal, "q_offset": 0 if causal else None}
    if mask is not None:
        options["mask"] = mask
    if not scores:
        return attention(query, key, value, **options), None
    result = attention(query, key, value, want="weights", **options)
    return result.output, result.weights


def _jax(query: Any, key: Any, value: Any, mask: Any, causal: bool, scores: bool) -> tuple[Any, Any]:
    import jax

    from .jax import dot_product_attention

    output = dot_product_attention(query, key, value, mask=mask, is_causal=causal)
    if not scores:
        return output, None
    shape = (query.shape[0], query.shape[2], query.shape[1], key.shape[1])

    def weights(query: Any, key: Any, mask: Any) -> np.ndarray:
        query, key, mask = (None if x is None else np.asarray(x) for x in (query, key, mask))
        return attnc.attention_weights(query, key, mask=mask, causal=causal, q_offset=0 if causal else None,
                                       layout="bnhd")

    found = jax.pure_callback(weights, jax.ShapeDtypeStruct(shape, query.dtype),
                              *(jax.lax.stop_gradient(x) for x in (query, key)), mask, vmap_method="sequential")
    return output, found


_BACKENDS: dict[str, Callable[..., tuple[Any, Any]]] = {"torch": _torch, "jax": _jax, "numpy": _numpy}
