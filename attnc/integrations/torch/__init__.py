"""PyTorch: attention on CPU tensors without copies, with gradients and under torch.compile."""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional
from torch.overrides import handle_torch_function, has_torch_function

import attnc

from . import _batching, _calls, _functions, _names, _packed, _tensors  # noqa: F401  registers vmap rules
from ._capture import capture
from ._derivatives import Attention, has_tangent
from ._interception import Interception
from ._operators import arguments, room
from ._records import AttentionRecord, Records
from ._signature import arguments_of, check, order_of, packed_options
from ._tensors import as_array, as_tensor

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import SimpleNamespace

    from ..._types import Wanted

__all__ = ["AttentionRecord", "Records", "as_array", "as_tensor", "attention", "attention_weights", "capture",
           "patch", "scaled_dot_product_attention"]


def scaled_dot_product_attention(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0, is_causal: bool = False, *, scale: float | None = None,
        enable_gqa: bool = False) -> torch.Tensor:
    """`torch.nn.functional.scaled_dot_product_attention`, computed by attnc, with the arguments and meaning of torch's.

    ``is_causal=True`` is top-left: row 0 sees only key 0, also if there are more keys than rows.

    Parameters
    ----------
    query, key, value : tensor (..., heads, length, dim) or (length, dim)
        Of one dtype: float32, float64, float16 or bfloat16. Leading axes broadcast, heads too. Or jagged tensors
        (batch, heads, lengths, dim), without `attn_mask`: `attnc.attention_varlen` computes these, without padding.
    attn_mask : tensor, optional
        bool (True = attend) or floating point (added to the scores); broadcasts to (..., length, keys).
    dropout_p : float
        Must be 0: attnc has no dropout.
    is_causal : bool
        Cannot be combined with `attn_mask`.
    scale : float, optional
        By default ``1 / sqrt(dim)``.
    enable_gqa : bool
        Whether there may be fewer heads of keys and values than of queries.

    Returns
    -------
    tensor (..., heads, length, dim of value)
        With gradients for query, key, value and a floating-point mask.

    Raises
    ------
    TypeError, ValueError
        For arguments that do not fit each other or that attnc does not support, naming them.

    Examples
    --------
    >>> query = torch.ones(1, 4, 2, 8, requires_grad=True)
    >>> scaled_dot_product_attention(query, query, query, is_causal=True).sum().backward()
    >>> query.grad.shape
    torch.Size([1, 4, 2, 8])
    """
    if dropout_p != 0:
        raise ValueError(f"attnc has no dropout: dropout_p must be 0, got {dropout_p}")
    if any([_packed.is_jagged(x) for x in (query, key, value)]):
        given = packed_options(query, key, attn_mask, is_causal, scale, enable_gqa)
        return _packed.jagged(query, key, value, (), given, one_dtype=True)
    *operands, options = arguments_of(query, key, value, attn_mask, is_causal, scale, enable_gqa)
    order = None if query.is_contiguous() else order_of(query, key, value, attn_mask, enable_gqa)
    query, key, value = operands
    return _attend(query, key, value, (), options, order)


def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, want: Wanted | tuple[()] = (),
              **options: Any) -> torch.Tensor | attnc.AttentionResult:
    """`attnc.attention` on tensors: its options, its defaults and its results, with gradients.

    Parameters
    ----------
    query, key, value : tensor
        Floating point, on the CPU. Or jagged tensors (batch, heads, lengths, dim), with the options of
        `attnc.attention_varlen` and want ``"lse"``.
    want : name or tuple of names
        As in `attnc.attention`. Weights have no gradient; scores are for calls without gradients.
    **options
        Options of `attnc.attention` except `out`; arrays among them may be tensors.

    Returns
    -------
    tensor, or attnc.AttentionResult of tensors
        With gradients for query, key, value, `bias`, `relative_bias`, `relative_key`, `relative_query` and `sinks`,
        through output and lse.

    Raises
    ------
    TypeError, ValueError
        As `attnc.attention`; for tensors that are not dense or not on the CPU; for an option that requires grad but has
        no gradient.

    Examples
    --------
    >>> query, sinks = torch.ones(1, 4, 2, 8), torch.zeros(4, requires_grad=True)
    >>> result = attention(query, query, query, causal=True, sinks=sinks, want="lse")
    >>> (result.output.sum() + result.lse.sum()).backward()
    >>> result.lse.shape, sinks.grad.shape
    (torch.Size([1, 4, 2]), torch.Size([4]))
    """
    if "out" in options:
        raise TypeError("attention on tensors has no option out")
    if any([_packed.is_jagged(x) for x in (query, key, value)]):
        return _packed.jagged(query, key, value, want, options)
    check(query, key, value)
    for name, x in options.items():
        if isinstance(x, torch.Tensor):
            _tensors.check(name, x)
    query, key, value = _tensors.autocast(query, key, value)
    return _attend(query, key, value, want, options)


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, want: Any, options: dict[str, Any],
            order: list[int] | None = None) -> torch.Tensor | attnc.AttentionResult:
    """Attention of checked tensors; reports the call to watchers."""
    if torch.compiler.is_compiling() or not _calls.watching(within_patch=True):
        return _compute(query, key, value, want, options, order)
    names = (want,) if isinstance(want, str) else tuple(want)
    graph = torch.is_grad_enabled() and any([x.requires_grad for x in (query, key, value, *options.values())
                                             if isinstance(x, torch.Tensor)])
    beside = () if graph else _calls.beside()
    found = _calls.busy(_compute, query, key, value, tuple(dict.fromkeys((*names, *beside))), options, order)
    statistics = {name: _tensors.array(getattr(found, name)) for name in beside}
    result = attnc.AttentionResult(found.output, **{name: getattr(found, name) for name in names}) if names \
        else found.output if beside else found
    _calls.tell_of(query, key, value, options, found.output if names or beside else found, statistics)
    return result


def _compute(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, want: Any, options: dict[str, Any],
             order: list[int] | None) -> torch.Tensor | attnc.AttentionResult:
    """Attention as a plain call, as an autograd function, or as an operator."""
    tensors = {"query": query, "key": key, "value": value,
               **{name: x for name, x in options.items() if isinstance(x, torch.Tensor)}}
    graph = torch.is_grad_enabled() and _tensors.need_gradients(tensors)
    eager = _tensors.are_eager(tensors.values())
    if eager and not graph:
        arrays = {name: _tensors.array(x) for name, x in tensors.items()}
        output = room(query, value, order)
        if output is not None:
            arrays["out"] = _tensors.array(output)
        found = attnc.attention(**{**options, **arrays}, want=want)
        if not want:
            return as_tensor(found) if output is None else output
        return attnc.AttentionResult(**{name: as_tensor(x) for name, x in vars(found).items()})
    names = (want,) if isinstance(want, str) else tuple(want)
    if not {"lse", "weights"}.issuperset(names):
        raise ValueError(f"want must be out of 'lse' and 'weights' where gradients are recorded, got {want!r}")
    if devices := ", ".join(f"{name} on {x.device}" for name, x in tensors.items() if x.device != query.device):
        raise ValueError(f"query is on {query.device}, {devices}; wanted one device")
    if eager:
        others = {name: x for name, x in options.items() if name not in tensors}
        output, lse, weights = Attention.apply("weights" in names, tuple(tensors), others, order,
                                                *tensors.values())
    else:
        output, lse, weights = torch.ops.attnc.attention.default(query, key, value, *arguments(options, order),
                                                                 "weights" in names)
    results = {"lse": lse, "weights": weights}
    return attnc.AttentionResult(output, **{name: results[name] for name in names}) if names else output


def attention_weights(query: torch.Tensor, key: torch.Tensor, **options: Any) -> attnc.AttentionWeights:
    """The weights of tensors as an `attnc.AttentionWeights`, for statistics without the matrix; NumPy results.

    Parameters
    ----------
    query, key : tensor
        Not requiring grad, unless under ``torch.no_grad()``: statistics have no gradient.
    **options
        Options of `attnc.AttentionWeights`; arrays among them may be tensors.

    Returns
    -------
    attnc.AttentionWeights

    Raises
    ------
    TypeError, ValueError
        As `attnc.AttentionWeights`; for tensors that require grad, are not dense or not on the CPU.

    Examples
    --------
    >>> weights = attention_weights(torch.zeros(4, 8), torch.zeros(4, 8), causal=True)
    >>> weights.topk(1).weights.ravel()
    array([1.        , 0.5       , 0.33333334, 0.25      ], dtype=float32)
    """
    given = {"query": query, "key": key, **options}
    arrays = {name: as_array(x) for name, x in given.items()}
    for name, x in given.items():
        if isinstance(x, torch.Tensor) and (has_tangent(x) or (x.requires_grad and torch.is_grad_enabled())):
            what = "has a tangent" if has_tangent(x) else "requires grad"
            raise ValueError(f"{name} {what}, but statistics have no gradient; pass {name}.detach()")
    return attnc.AttentionWeights(**arrays)


class patch(contextlib.ContextDecorator):
    """Context in which attnc computes ``torch.nn.functional.scaled_dot_product_attention``, in all threads.

    Torch still computes calls that `scaled_dot_product_attention` refuses (dropout, other devices, sparse tensors,
    nested ones that are not jagged, subclasses of tensors) and code compiled by ``torch.jit.script``. The name is
    replaced only in ``torch.nn.functional``: code that has imported the function itself keeps torch's. Contexts may
    overlap, be re-entered and be left in any order; the last one restores the original function, or warns if another
    library has replaced the name in the meantime.

    Examples
    --------
    >>> layer = torch.nn.MultiheadAttention(8, 2, batch_first=True)
    >>> with patch():
    ...     layer(*[torch.zeros(1, 3, 8)] * 3, need_weights=False)[0].shape
    torch.Size([1, 3, 8])
    """

    def __init__(self) -> None:
        self._entered: list[bool] = []

    def __enter__(self) -> None:
        _INTERCEPTION.enter("patch")
        self._entered.append(True)

    def __exit__(self, *error: object) -> None:
        if not self._entered:
            raise RuntimeError("a patch() was left that had not been entered")
        self._entered.pop()
        _INTERCEPTION.leave("patch")


def _stand_in(state: SimpleNamespace) -> Callable[..., torch.Tensor]:
    """The replacement of torch's function; annotated and without keyword-only parameters, for torch.jit.script."""
    def scaled_dot_product_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
                                     attn_mask: torch.Tensor | None = None, dropout_p: float = 0.0,
                                     is_causal: bool = False, scale: float | None = None,
                                     enable_gqa: bool = False) -> torch.Tensor:
        if torch.jit.is_scripting():
            return torch._C._nn.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal,
                                                             scale=scale, enable_gqa=enable_gqa)
        return _route(state, query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)

    scaled_dot_product_attention.__doc__ = state.theirs.__doc__
    # Pickled by torch's name: unpickling gives whatever function has that name then.
    scaled_dot_product_attention.__module__ = functional.__name__
    scaled_dot_product_attention.__qualname__ = scaled_dot_product_attention.__name__
    _functions.is_seen(scaled_dot_product_attention, _functions.sdpa)
    return scaled_dot_product_attention


def _route(state: SimpleNamespace, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
           attn_mask: torch.Tensor | None, *args: Any, **options: Any) -> torch.Tensor:
    if not state.purposes and not torch.compiler.is_compiling():
        state.put_back()
    tensors = [query, key, value, *([] if attn_mask is None else [attn_mask])]
    if ("patch" in state.purposes and attn_mask is None and not torch.compiler.is_compiling()
            and not torch._C._len_torch_function_stack() and _packed.is_jagged(query, key, value)):
        with contextlib.suppress(TypeError, ValueError):        # torch computes what attnc refuses
            return scaled_dot_product_attention(query, key, value, attn_mask, *args, **options)
    seen = _names.PURPOSE in state.purposes and not torch.compiler.is_compiling() and _calls.watching()
    if seen or ("patch" in state.purposes and all(_tensors.is_plain(x) for x in tensors)):
        # an active mode, since plain tensors override nothing
        if not torch.compiler.is_compiling() and has_torch_function(tensors):
            return handle_torch_function(functional.scaled_dot_product_attention, tensors, query, key, value,
                                         attn_mask, *args, **options)
        if seen:
            return _functions.sdpa(functools.partial(_route, state), query, key, value, attn_mask, *args, **options)
        try:
            return scaled_dot_product_attention(query, key, value, attn_mask, *args, **options)
        except (TypeError, ValueError):
            pass    # torch computes what attnc refuses
    return state.theirs(query, key, value, attn_mask, *args, **options)


_INTERCEPTION = Interception(functional, "scaled_dot_product_attention", _stand_in)
_names.INTERCEPTIONS.append(_INTERCEPTION)
