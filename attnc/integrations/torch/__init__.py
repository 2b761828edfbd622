"""PyTorch: attention on CPU tensors without copies, with gradients and under torch.compile."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional
from torch.overrides import handle_torch_function, has_torch_function

import attnc

from . import _batching, _tensors  # noqa: F401  registers what torch.vmap does with the operators
from ._derivatives import Attention, has_tangent
from ._interception import Interception
from ._operators import arguments, room
from ._tensors import as_array, as_tensor

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import SimpleNamespace

    from ..._types import Wanted

__all__ = ["as_array", "as_tensor", "attention", "attention_weights", "patch", "scaled_dot_product_attention"]


def scaled_dot_product_attention(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0, is_causal: bool = False, *, scale: float | None = None,
        enable_gqa: bool = False) -> torch.Tensor:
    """`torch.nn.functional.scaled_dot_product_attention`, by attnc: arguments and meaning are torch's.

    ``is_causal=True`` is top-left: row 0 sees key 0 alone, also where there are more keys than rows.

    Parameters
    ----------
    query, key, value : tensor (..., heads, length, dim) or (length, dim)
        Of one dtype: float32, float64, float16 or bfloat16. Leading axes broadcast, heads too.
    attn_mask : tensor, optional
        bool, True = attend, or floating point, which is added to the scores; broadcasts to (..., length, keys).
    dropout_p : float
        0: attnc has no dropout.
    is_causal : bool
        Not together with `attn_mask`.
    scale : float, optional
        By default ``1 / sqrt(dim)``.
    enable_gqa : bool
        Whether there may be fewer heads of keys and values than of queries.

    Returns
    -------
    tensor (..., heads, length, dim of value)
        With gradients for query, key, value and a mask that is added.

    Raises
    ------
    TypeError, ValueError
        For what does not go together, and for what attnc cannot do, by its name.

    Examples
    --------
    >>> query = torch.ones(1, 4, 2, 8, requires_grad=True)
    >>> scaled_dot_product_attention(query, query, query, is_causal=True).sum().backward()
    >>> query.grad.shape
    torch.Size([1, 4, 2, 8])
    """
    _check(query, key, value)
    query, key, value = _tensors.autocast(query, key, value)
    if dropout_p != 0:
        raise ValueError(f"attnc has no dropout: dropout_p must be 0, got {dropout_p}")
    if is_causal and attn_mask is not None:
        raise ValueError("attn_mask and is_causal=True were given; wanted one of them")
    if not query.dtype == key.dtype == value.dtype:
        raise TypeError(f"query, key and value must have one dtype, got {query.dtype}, {key.dtype} and {value.dtype}")
    options: dict[str, Any] = {"scale": scale, "causal": is_causal, "q_offset": 0 if is_causal else None}
    if attn_mask is not None:
        _tensors.check("attn_mask", attn_mask)
        if attn_mask.dtype != torch.bool and not attn_mask.is_floating_point():
            raise TypeError(f"attn_mask must be bool (True = attend) or floating point (added), got {attn_mask.dtype}")
        options["mask" if attn_mask.dtype == torch.bool else "bias"] = attn_mask
    order = None if query.is_contiguous() else _order(query, key, value, attn_mask, enable_gqa)
    return _attend(*_heads(query, key, value, enable_gqa), (), options, order)


def _order(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None,
           grouped: bool) -> list[int] | None:
    """The order in memory of the output's axes: that of the query where torch's fused kernel would run, else None.

    Code that takes a view of the output, such as ``.transpose(1, 2).view(...)``, depends on it.
    """
    fused = (query.ndim == key.ndim == value.ndim == 4 and query.shape[0] == key.shape[0] == value.shape[0]
             and key.shape[1] == value.shape[1] and (grouped or key.shape[1] == query.shape[1])
             and query.shape[3] == value.shape[3] and all([x.stride(3) == 1 for x in (query, key, value)])
             and (attn_mask is None or (attn_mask.ndim in (2, 4) and not attn_mask.requires_grad)))
    strides = query.stride()
    if not fused or 0 in strides:
        return None
    # by comparisons, which torch.compile follows with symbolic strides
    places = [sum([strides[j] > strides[i] or (strides[j] == strides[i] and j < i) for j in range(4)])
              for i in range(4)]
    return [places.index(place) for place in range(4)]


def _heads(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
           grouped: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ranks that attnc takes together; heads that torch would broadcast are."""
    if max(query.ndim, key.ndim, value.ndim) > 2:
        query, key, value = (x[None] if x.ndim == 2 else x for x in (query, key, value))
        counts = query.shape[-3], key.shape[-3], value.shape[-3]
        most = max(counts)
        if counts[1] != counts[2] or counts[0] < most:
            query, key, value = (x.expand(*x.shape[:-3], most, -1, -1) if x.shape[-3] == 1 else x
                                 for x in (query, key, value))
        elif counts[0] != counts[1] and counts[1] != 1 and not grouped:
            raise ValueError(f"query has {counts[0]} heads, key has {counts[1]}; wanted equally many, "
                             "or enable_gqa=True")
    return query, key, value


def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, want: Wanted | tuple[()] = (),
              **options: Any) -> torch.Tensor | attnc.AttentionResult:
    """`attnc.attention` on tensors: its options, its defaults and its results, with gradients.

    Parameters
    ----------
    query, key, value : tensor
        Floating point, on the CPU.
    want : name or tuple of names
        As in `attnc.attention`. Weights have no gradient; scores are for calls without gradients.
    **options
        Those of `attnc.attention` but `out`; those that are arrays may be tensors.

    Returns
    -------
    tensor, or attnc.AttentionResult of tensors
        With gradients for query, key, value, `bias` and `sinks`, through output and lse.

    Raises
    ------
    TypeError, ValueError
        As `attnc.attention`; for tensors that are not dense or not on the CPU; for an option whose gradient is asked
        for and does not exist.

    Examples
    --------
    >>> query, sinks = torch.ones(1, 4, 2, 8), torch.zeros(4, requires_grad=True)
    >>> result = attention(query, query, query, causal=True, sinks=sinks, want="lse")
    >>> (result.output.sum() + result.lse.sum()).backward()
    >>> result.lse.shape, sinks.grad.shape
    (torch.Size([1, 4, 2]), torch.Size([4]))
    """
    _check(query, key, value)
    for name, x in options.items():
        if isinstance(x, torch.Tensor):
            _tensors.check(name, x)
    if "out" in options:
        raise TypeError("attention on tensors has no option out")
    query, key, value = _tensors.autocast(query, key, value)
    return _attend(query, key, value, want, options)


def _check(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    for name, x in (("query", query), ("key", key), ("value", value)):
        _tensors.check(name, x)
        if not x.dtype.is_floating_point:
            raise TypeError(f"{name} must be of a floating-point dtype, got {x.dtype}")


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, want: Any, options: dict[str, Any],
            order: list[int] | None = None) -> torch.Tensor | attnc.AttentionResult:
    """Attention of tensors that were checked: by itself, as a function of autograd, or as an operator."""
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
        Those of `attnc.AttentionWeights`; those that are arrays may be tensors.

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
    """Within it, ``torch.nn.functional.scaled_dot_product_attention`` is attnc's where attnc can, in all threads.

    What `scaled_dot_product_attention` refuses goes to torch as before, among it dropout, tensors on other devices,
    nested and sparse ones and subclasses of tensors, and so does code compiled by ``torch.jit.script``. The name is
    replaced in ``torch.nn.functional`` alone: code that has imported the function itself keeps torch's. Contexts may
    overlap, be entered again and be left in any order; the last puts back what the first has found, unless another
    library has replaced it since, which is warned of.

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
    """What stands in the place of torch's function, as torch.jit.script takes it: annotated, nothing keyword-only."""
    def scaled_dot_product_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
                                     attn_mask: torch.Tensor | None = None, dropout_p: float = 0.0,
                                     is_causal: bool = False, scale: float | None = None,
                                     enable_gqa: bool = False) -> torch.Tensor:
        if torch.jit.is_scripting():
            return torch._C._nn.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal,
                                                             scale=scale, enable_gqa=enable_gqa)
        return _route(state, query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)

    scaled_dot_product_attention.__doc__ = state.theirs.__doc__
    # Pickled by torch's name, as what it stands for: a copy is whatever that name is where it is read.
    scaled_dot_product_attention.__module__ = functional.__name__
    scaled_dot_product_attention.__qualname__ = scaled_dot_product_attention.__name__
    return scaled_dot_product_attention


def _route(state: SimpleNamespace, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
           attn_mask: torch.Tensor | None, *args: Any, **options: Any) -> torch.Tensor:
    tensors = [query, key, value, *([] if attn_mask is None else [attn_mask])]
    if "patch" in state.purposes and all(_tensors.is_plain(x) for x in tensors):
        # of a mode: plain tensors override nothing
        if not torch.compiler.is_compiling() and has_torch_function(tensors):
            return handle_torch_function(functional.scaled_dot_product_attention, tensors, query, key, value,
                                         attn_mask, *args, **options)
        try:
            return scaled_dot_product_attention(query, key, value, attn_mask, *args, **options)
        except (TypeError, ValueError):
            pass    # what attnc refuses
    return state.theirs(query, key, value, attn_mask, *args, **options)


_INTERCEPTION = Interception(functional, "scaled_dot_product_attention", _stand_in)
