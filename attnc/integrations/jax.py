"""``jax.nn.dot_product_attention`` by attnc's kernels: under ``jit``, ``vmap`` and ``grad``, on the CPU."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import numpy as np

import attnc

from .._checks.arrays import accumulator, promoted


class _Options(NamedTuple):
    """What is known when a function is traced."""

    causal: bool
    scale: float | None
    window: tuple | None


def dot_product_attention(query, key, value, bias=None, mask=None, *, scale=None, is_causal=False,
                          query_seq_lengths=None, key_value_seq_lengths=None, local_window_size=None,
                          implementation=None, return_residual=False):
    """The function of this name in `jax.nn`, by a call back to `attnc.attention`.

    Parameters
    ----------
    query, key, value : array (B, T, N, H) or (T, N, H); (B, S, K, H) or (S, K, H) with N a multiple of K
        The value may have another depth. Any batch axes before them.
    bias, mask : array that broadcasts to (B, N, T, S), optional
        Floats to add to the scores; bools, True = attend.
    scale, is_causal, query_seq_lengths, key_value_seq_lengths, local_window_size
        As in jax: causal from the top left, an int window is symmetric.
    implementation : {None, "attnc"}
        There is one.
    return_residual : bool
        Also the lse, (B, T, N).

    Returns
    -------
    array (B, T, N, H), or (output, lse)
        Rows that see no key, and rows at or past `query_seq_lengths`, are 0; jax gives the mean of the values there.

    Raises
    ------
    TypeError, ValueError
        For what `attnc.attention` would refuse, when the function runs; for an implementation of another library.

    Notes
    -----
    Gradients of query, key, value and bias are those of `attnc.attention_backward`; there are none of the residual's
    other uses than through the lse, and no second derivatives.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> x = jnp.ones((1, 2, 1, 4))
    >>> float(jax.jit(dot_product_attention)(x, x, x).sum())
    8.0
    """
    if implementation not in (None, "attnc"):
        raise ValueError(f"implementation={implementation!r}; wanted None or 'attnc'")
    window = local_window_size
    if window is not None:
        window = (window, window) if isinstance(window, int) else tuple(window)
    options = _Options(bool(is_causal), None if scale is None else float(scale), window)
    arrays = {"query": query, "key": key, "value": value, "bias": bias, "mask": mask,
              "q_lengths": query_seq_lengths, "kv_lengths": key_value_seq_lengths}
    arrays = {name: jax.numpy.asarray(array) for name, array in arrays.items() if array is not None}
    for name in ("bias", "mask"):
        extra = arrays[name].ndim - arrays["query"].ndim if name in arrays else 0
        if extra > 0 and set(arrays[name].shape[:extra]) == {1}:         # (1, N, T, S) for inputs without a batch
            arrays[name] = arrays[name].reshape(arrays[name].shape[extra:])
    output, lse = _attend(options, arrays)
    return (output, lse.swapaxes(-1, -2)) if return_residual else output


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(options, arrays):
    query, value = arrays["query"], arrays["value"]
    dtype = promoted(*(arrays[name].dtype for name in ("query", "key", "value")))
    *batch, length, heads, _ = query.shape
    batch = np.broadcast_shapes(tuple(batch), *(arrays[name].shape[:-3] for name in ("key", "value")))
    results = (jax.ShapeDtypeStruct((*batch, length, heads, value.shape[-1]), dtype),
               jax.ShapeDtypeStruct((*batch, heads, length), accumulator(dtype)))
    return jax.pure_callback(partial(_forward, options), results, arrays, vmap_method="broadcast_all")


def _forward(options, arrays):
    """Runs outside of jax, on NumPy arrays."""
    inputs, more = _split(options, arrays)
    result = attnc.attention(*inputs, want="lse", **more)
    return result.output, result.lse


def _split(options, arrays):
    """Positional inputs, and the options of attnc."""
    arrays = {name: np.asarray(array) for name, array in arrays.items()}
    inputs = [arrays.pop(name) for name in ("query", "key", "value")]
    offset = 0 if options.causal or options.window else None            # jax counts from the top left
    return inputs, {"layout": "bnhd", "causal": options.causal, "scale": options.scale, "window": options.window,
                    "q_offset": offset, **arrays}


def _save(options, arrays):
    output, lse = _attend(options, arrays)
    return (output, lse), (arrays, output, lse)


def _pull_back(options, saved, grads):
    arrays, output, lse = saved
    grad_output, grad_lse = grads
    wanted = [name for name in ("query", "key", "value", "bias") if name in arrays]
    results = {name: jax.ShapeDtypeStruct(arrays[name].shape, arrays[name].dtype) for name in wanted}
    found = jax.pure_callback(partial(_backward, options, tuple(wanted)), results, grad_output, grad_lse, arrays,
                              output, lse, vmap_method="broadcast_all")
    return ({name: found.get(name) for name in arrays},)                # bools and ints have no gradient


def _backward(options, wanted, grad_output, grad_lse, arrays, output, lse):
    """Runs outside of jax, on NumPy arrays."""
    inputs, more = _split(options, arrays)
    grad_output, grad_lse, output, lse = (np.asarray(x) for x in (grad_output, grad_lse, output, lse))
    found = attnc.attention_backward(grad_output, *inputs, output, lse, grad_lse=grad_lse, want=wanted, **more)
    return {name: np.asarray(getattr(found, name)) for name in wanted}


_attend.defvjp(_save, _pull_back)
