"""``jax.nn.dot_product_attention`` computed by attnc's kernels on the CPU, under ``jit``, ``vmap`` and ``grad``."""

from __future__ import annotations

from functools import partial
from numbers import Integral
from typing import Any, NamedTuple, NoReturn, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

import attnc

from .._checks import attention_args
from .._checks.arrays import accumulator, promoted

OWN_AXES = {"query": 3, "key": 3, "value": 3, "bias": 3, "mask": 3, "q_lengths": 0, "kv_lengths": 0}  # after the batch

Arrays: TypeAlias = dict[str, Any]      # of jax or NumPy arrays, or jax's tracers


class _Options(NamedTuple):
    """The static options of a traced function."""

    causal: bool
    scale: float | None
    window: tuple[int | None, int | None] | None


def dot_product_attention(
        query: ArrayLike, key: ArrayLike, value: ArrayLike, bias: ArrayLike | None = None,
        mask: ArrayLike | None = None, *, scale: ArrayLike | None = None, is_causal: bool = False,
        query_seq_lengths: ArrayLike | None = None, key_value_seq_lengths: ArrayLike | None = None,
        local_window_size: int | tuple[int, int] | None = None, implementation: str | None = None,
        return_residual: bool = False) -> Any:
    """`jax.nn.dot_product_attention`, computed by a callback to `attnc.attention`.

    Parameters
    ----------
    query, key, value : float array (B, T, N, H) or (T, N, H); (B, S, K, H) or (S, K, H) with N a multiple of K
        The value may have another depth. More batch axes may precede B; missing leading axes have length 1.
    bias, mask : array that broadcasts to (B, N, T, S), optional
        Floats to add to the scores; bools, True = attend. Axes are aligned from the right, as in jax.
    scale : float, optional
        ``1 / sqrt(H)`` by default. A traced scale multiplies the query, so that it can be mapped and has a gradient.
    is_causal, query_seq_lengths, key_value_seq_lengths, local_window_size
        As in jax: causal order is top-left, an int window is symmetric. Lengths are (B,), or () for all.
    implementation : {None, "attnc"}
        Both mean attnc.
    return_residual : bool
        Whether to return the lse too, (B, T, N).

    Returns
    -------
    array (B, T, N, H), or (output, lse)
        Rows that see no key, and rows at or past `query_seq_lengths`, are 0; jax gives the mean of the values there.
        The lse is float32 (float64 for float64 inputs); jax rounds it to the dtype of the key.

    Raises
    ------
    TypeError, ValueError
        When the function is traced, for a wrong shape or dtype, or another implementation. Lengths beyond the arrays
        raise when it runs.
    NotImplementedError
        For second derivatives.

    Notes
    -----
    Gradients of query, key, value, bias and a traced scale are exact, also through the lse, which jax does not
    differentiate. jax refuses forward mode (`jax.jvp`, `jax.jacfwd`, `jax.linearize`) with a TypeError. Under `vmap`,
    with any `in_axes`, one call of the kernels computes all examples; unmapped arrays are not copied.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> x = jnp.ones((1, 2, 1, 4))
    >>> float(jax.jit(dot_product_attention)(x, x, x).sum())
    8.0
    """
    if implementation not in (None, "attnc"):
        raise ValueError(f"implementation={implementation!r}; wanted None or 'attnc'")
    window: Any = local_window_size
    if window is not None:
        window = (window, window) if isinstance(window, Integral) else tuple(window)
    arrays = {"query": query, "key": key, "value": value, "bias": bias, "mask": mask,
              "q_lengths": query_seq_lengths, "kv_lengths": key_value_seq_lengths}
    arrays = {name: jnp.asarray(array) for name, array in arrays.items() if array is not None}
    own_rank, dtypes = arrays["query"].ndim, [arrays[name].dtype for name in ("query", "key", "value")]
    if not all(jnp.issubdtype(dtype, jnp.floating) for dtype in dtypes):
        raise TypeError(f"query, key and value have dtypes {', '.join(map(str, dtypes))}; wanted floats")
    if isinstance(scale, jax.core.Tracer):              # a product in jax, which maps and differentiates it
        if scale.shape:
            raise ValueError(f"scale has shape {scale.shape}; wanted a scalar")
        wide = jnp.promote_types(dtypes[0], jnp.float32)
        arrays["query"], scale = arrays["query"].astype(wide) * scale.astype(wide), 1.0
    arrays = _with_all_axes(arrays)
    options = _Options(bool(is_causal), None if scale is None else float(scale), window)
    _check(options, arrays)
    output, lse = _attend(options, arrays)
    output = _with_axes_of(output.astype(promoted(*dtypes)), own_rank)
    return (output, _with_axes_of(lse.swapaxes(-1, -2), own_rank - 1)) if return_residual else output


def _with_all_axes(arrays: Arrays) -> Arrays:
    """Every array with the same number of batch axes, so that the axis of `vmap`, before them, aligns in all arrays."""
    batch_axes = max(1, *(arrays[name].ndim - 3 for name in ("query", "key", "value")))
    found = {}
    for name, array in arrays.items():
        missing = batch_axes + OWN_AXES[name] - array.ndim
        if missing < 0 and set(array.shape[:-missing]) != {1}:
            raise ValueError(f"{_called(name)} has shape {array.shape}; wanted at most {array.ndim + missing} axes")
        found[name] = array.reshape((1,) * missing + array.shape[max(0, -missing):])
    return found


def _with_axes_of(array: Any, rank: int) -> Any:
    """Drop leading axes of length 1 that the caller's query does not have."""
    extra = 0
    while array.ndim - extra > rank and array.shape[extra] == 1:
        extra += 1
    return array.reshape(array.shape[extra:])


def _called(text: str) -> str:
    """Replace attnc's names of arguments by jax's."""
    return text.replace("q_lengths", "query_seq_lengths").replace("kv_lengths", "key_value_seq_lengths")


def _check(options: _Options, arrays: Arrays) -> None:
    """Raise for wrong shapes and dtypes while jax traces, by stand-ins of one element with those of the arrays."""
    stand_ins = {name: np.broadcast_to(np.zeros((), array.dtype), array.shape) for name, array in arrays.items()}
    inputs, more = _split(options, stand_ins)
    try:
        attention_args(*inputs, **more)
    except (TypeError, ValueError) as error:
        raise type(error)(_called(str(error))) from None


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(options: _Options, arrays: Arrays) -> Any:
    query, value = arrays["query"], arrays["value"]
    dtype = promoted(*(arrays[name].dtype for name in ("query", "key", "value")))
    *_, length, heads, _ = query.shape
    batch = np.broadcast_shapes(*(arrays[name].shape[:-3] for name in ("query", "key", "value")))
    results = (jax.ShapeDtypeStruct((*batch, length, heads, value.shape[-1]), dtype),
               jax.ShapeDtypeStruct((*batch, heads, length), accumulator(dtype)))
    return jax.pure_callback(partial(_forward, options, query.ndim), results, arrays, vmap_method="expand_dims")


def _forward(options: _Options, rank: int, arrays: Arrays) -> tuple[np.ndarray, np.ndarray]:
    """Runs outside of jax, on NumPy arrays of `rank` axes, preceded by those of `vmap` (of length 1 if unmapped)."""
    arrays, mapped = _mapped(arrays, rank)
    inputs, more = _split(options, arrays | _spread({"query": arrays["query"]}, mapped))
    result = attnc.attention(*inputs, want="lse", **more)
    return result.output, result.lse


def _mapped(arrays: Arrays, rank: int) -> tuple[Arrays, tuple[int, ...]]:
    """NumPy arrays, and the lengths of the axes that `vmap` has added to them."""
    arrays = {name: np.asarray(array) for name, array in arrays.items()}
    count = arrays["query"].ndim - rank
    return arrays, np.broadcast_shapes(*(array.shape[:count] for array in arrays.values()))


def _spread(arrays: Arrays, mapped: tuple[int, ...]) -> Arrays:
    """Views of the arrays, broadcast to all mapped examples."""
    return {name: np.broadcast_to(array, mapped + array.shape[len(mapped):]) for name, array in arrays.items()}


def _split(options: _Options, arrays: Arrays) -> tuple[list[Any], dict[str, Any]]:
    """Positional inputs, and the options of attnc."""
    more = dict(arrays)
    inputs = [more.pop(name) for name in ("query", "key", "value")]
    offset = 0 if options.causal or options.window else None            # jax's causal order is top-left
    return inputs, {"layout": "bnhd", "causal": options.causal, "scale": options.scale, "window": options.window,
                    "q_offset": offset, **more}


def _save(options: _Options, arrays: Arrays) -> tuple[Any, tuple[Any, ...]]:
    output, lse = _attend(options, arrays)
    return (output, lse), (arrays, output, lse)


def _pull_back(options: _Options, saved: tuple[Any, ...], grads: tuple[Any, Any]) -> tuple[Arrays]:
    arrays, output, lse = saved
    found = _gradients(options, arrays, {"grad_output": grads[0], "grad_lse": grads[1], "output": output, "lse": lse})
    return ({name: found.get(name) for name in arrays},)                # bools and ints have no gradient


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _gradients(options: _Options, arrays: Arrays, rows: Arrays) -> Any:
    results = {name: jax.ShapeDtypeStruct(arrays[name].shape, arrays[name].dtype)
               for name in ("query", "key", "value", "bias") if name in arrays}
    return jax.pure_callback(partial(_backward, options, arrays["query"].ndim, tuple(results)), results, arrays, rows,
                             vmap_method="expand_dims")


@_gradients.defjvp     # type: ignore[untyped-decorator]
def _refuse_second(options: _Options, primals: Any, tangents: Any) -> NoReturn:
    raise NotImplementedError("attnc.integrations.jax.dot_product_attention has no second derivatives")


def _backward(options: _Options, rank: int, wanted: tuple[Any, ...], arrays: Arrays, rows: Arrays) -> Arrays:
    """Runs outside of jax, on NumPy arrays as in `_forward`; each mapped example has gradients of its own."""
    arrays, mapped = _mapped(arrays, rank)
    _, of_rows = _mapped({"query": rows["output"], **rows}, rank)
    mapped = np.broadcast_shapes(mapped, of_rows)
    inputs, more = _split(options, arrays | _spread({name: arrays[name] for name in wanted}, mapped))
    query, key, value = inputs
    rows = _spread({name: np.asarray(array) for name, array in rows.items()}, mapped)
    found = attnc.attention_backward(rows["grad_output"], query, key, value, rows["output"], rows["lse"],
                                     grad_lse=rows["grad_lse"], want=wanted, **more)
    return {name: np.asarray(getattr(found, name)) for name in wanted}


_attend.defvjp(_save, _pull_back)
