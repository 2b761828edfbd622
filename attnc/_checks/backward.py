"""Check the arguments of the gradients: those of the forward pass, its results, and what is wanted."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from .._types import Shape
from .arrays import accumulator, as_array, check_fits, float_array, promoted, saturated
from .attention import OPTIONS, Args, attention_args
from .options import check_lse, check_sinks
from .scalars import check_num_threads, check_want
from .stages import check_axes

GRADIENTS = ("query", "key", "value", "bias", "relative_bias", "relative_key", "relative_query", "sinks")


@dataclass(slots=True)
class BackwardArgs:
    """Checked arguments of attention_backward; the rows' arrays in (..., heads, length, dim) order.

    `args` has no sinks: the lse includes them.
    """

    args: Args
    grad_output: np.ndarray
    output: np.ndarray
    lse: np.ndarray
    grad_lse: np.ndarray | None
    sinks: np.ndarray | None
    sinks_like: np.ndarray | None
    want: tuple[str, ...]

    def as_given(self, gradient: np.ndarray) -> np.ndarray:
        """A gradient of query, key or value in the axes of what the caller gave."""
        a = self.args
        return gradient[0] if a.two_d else gradient.swapaxes(-2, -3) if a.layout == "bnhd" else gradient


def backward_args(
        grad_output: object, query: object, key: object, value: object, output: object, lse: object, *options: object,
        want: object, grad_lse: object, **named: Any) -> BackwardArgs:
    """Check everything; the options of attention but `want` and `out` come in the order of `OPTIONS`, or by name."""
    named.update(zip(OPTIONS, options, strict=False))
    sinks = named.pop("sinks")
    grad_output = float_array("grad_output", grad_output)
    a = attention_args(query, key, as_array("value", value), **named)
    return gradient_args(a, grad_output, output, lse, sinks, grad_lse, want)


def gradient_args(a: Args, grad_output: np.ndarray, output: object, lse: object, sinks: object, grad_lse: object,
                  want: object) -> BackwardArgs:
    """Check what the gradients need beside the arguments of the forward pass, which are checked, without sinks."""
    names = check_want(want, GRADIENTS)
    if not names:
        raise ValueError(f"want is empty; wanted at least one name out of {GRADIENTS}")
    optional = dict(bias=a.bias, relative_bias=a.relative_bias, relative_key=a.relative_key,
                    relative_query=a.relative_query, sinks=sinks)
    for name, given in optional.items():
        if name in names and given is None:
            raise ValueError(f"want has {name!r}, but no {name} was given")
    rows = "the shape of the output"
    grad_output = _rows(a, _exactly("grad_output", grad_output, a.out_shape, rows))
    output = _rows(a, _exactly("output", float_array("output", output), a.out_shape, rows))
    lse = check_lse(lse, a)
    if grad_lse is not None:
        grad_lse = saturated(float_array("grad_lse", grad_lse), a.acc)
        _exactly("grad_lse", grad_lse, a.lse_shape, "the shape of the lse")
    like = None if sinks is None else float_array("sinks", sinks)
    return BackwardArgs(a, grad_output, output, lse, grad_lse, None if sinks is None else check_sinks(sinks, a), like,
                        names)


def _exactly(name: str, x: np.ndarray, shape: Shape, what: str) -> np.ndarray:
    check_fits(name, x.shape, shape, what, exact=len(shape))
    return x


def _rows(a: Args, x: np.ndarray) -> np.ndarray:
    return x[None] if a.two_d else x.swapaxes(-2, -3) if a.layout == "bnhd" else x


@dataclass(slots=True)
class SoftmaxBackwardArgs:
    """Checked arguments of softmax_backward and log_softmax_backward."""

    grad_output: np.ndarray
    output: np.ndarray
    axes: Shape
    dtype: np.dtype
    acc: np.dtype
    num_threads: int | None


def softmax_backward_args(
        grad_output: object, output: object, axis: object, num_threads: object) -> SoftmaxBackwardArgs:
    """Check a result of softmax and its gradient, which have one shape."""
    grad_output, output = float_array("grad_output", grad_output), float_array("output", output)
    _exactly("grad_output", grad_output, output.shape, "the shape of output")
    axes = check_axes(axis, output.ndim)
    dtype = promoted(grad_output.dtype, output.dtype)
    if num_threads is not None:
        num_threads = check_num_threads(num_threads)
    return SoftmaxBackwardArgs(grad_output, output, axes, dtype, accumulator(dtype), num_threads)
