"""Handlers of the functions that compute attention: each calls the original and reports its arguments.

The mode that observes calls is off within them.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from ._calls import SEEN, Call, beside, busy, here, off, tell
from ._signature import arguments_of

if TYPE_CHECKING:
    from collections.abc import Callable

functional_mha = functional.multi_head_attention_forward


class _Arguments(Exception):
    """Carries the arguments of a call of attention that was made only to obtain them."""


def _sdpa_arguments(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None,
                    dropout_p: float = 0.0, is_causal: bool = False, *, scale: float | None = None,
                    enable_gqa: bool = False) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict[str, Any]]:
    with torch.no_grad():
        return arguments_of(query, key, value, attn_mask, is_causal, scale, enable_gqa)


def sdpa(theirs: Callable[..., Any], *args: Any, **kwargs: Any) -> torch.Tensor:
    """``scaled_dot_product_attention``."""
    if here.probe:
        raise _Arguments(*_refusing(_sdpa_arguments, *args, **kwargs))
    packed, here.packed = here.packed, None
    here.beside, here.statistics = beside(), {}
    try:
        output = busy(theirs, *args, **kwargs)
    finally:
        statistics, here.beside, here.statistics = here.statistics, (), {}
    query, key, value, options = _refusing(_sdpa_arguments, *args, **kwargs)
    if args and args[0] is packed:
        heads = query.shape[1] * query.shape[2]
        if options.get("bias", options.get("mask", query)).shape[1] > 1:
            options = {name: x.reshape(len(x), heads, 1, -1) if name in ("mask", "bias") else x
                       for name, x in options.items()}
        seen = Call(query.reshape(len(query), heads, 1, -1), key, value, options, output,
                    lambda grad: grad.reshape(len(grad), heads, 1, -1))
    else:
        seen = Call(query, key, value, options, output, statistics=statistics)
    tell(seen)
    return output


def mha(theirs: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``multi_head_attention_forward``, which computes dense matrices if its weights are requested."""
    given = _bind(functional_mha, args, kwargs)
    if not given["need_weights"]:
        with off():
            result: tuple[torch.Tensor, torch.Tensor | None] = theirs(*args, **kwargs)
            return result
    output, weights = busy(theirs, *args, **kwargs)
    here.probe = True
    try:
        with off(), torch.no_grad():
            theirs(**given | {"need_weights": False, "is_causal": False})
        raise ValueError("capture cannot see the attention of multi_head_attention_forward: it does not call "
                         "torch.nn.functional.scaled_dot_product_attention")
    except _Arguments as found:
        query, key, value, options = found.args
    finally:
        here.probe = False

    def grad_output(grad: torch.Tensor) -> torch.Tensor:
        grad = grad[:, None] if grad.ndim == 2 else grad        # (q_len, batch, embedding)
        return (grad @ given["out_proj_weight"]).unflatten(-1, (query.shape[1], -1)).permute(1, 2, 0, 3)

    tell(Call(query, key, value, options, output, grad_output))
    return output, weights


def native_mha(theirs: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The fused function that ``MultiheadAttention`` calls in evaluation."""
    output = busy(theirs, *args, **kwargs)
    given = dict(zip(("query", "key", "value", "embed_dim", "num_heads", "weight", "bias", "out_weight", "out_bias",
                      "mask", "need_weights", "average_attn_weights", "mask_type"), args, strict=False)) | kwargs
    _fused(given["query"], given, output[0])
    return output


def native_layer(theirs: Callable[..., Any], *args: Any, **kwargs: Any) -> torch.Tensor:
    """The fused function that ``TransformerEncoderLayer`` calls in evaluation."""
    output = busy(theirs, *args, **kwargs)
    given = dict(zip(("src", "embed_dim", "num_heads", "weight", "bias", "out_weight", "out_bias", "use_gelu",
                      "norm_first", "eps", "norm_weight", "norm_bias", "norm_weight_2", "norm_bias_2", "ffn_weight_1",
                      "ffn_bias_1", "ffn_weight_2", "ffn_bias_2", "mask", "mask_type"), args, strict=False)) | kwargs
    x = given["src"]
    if given["norm_first"] and not x.is_nested:
        x = functional.layer_norm(x, (given["embed_dim"],), given["norm_weight"], given["norm_bias"], given["eps"])
    _fused(x, given, output)
    return output


def _fused(x: torch.Tensor, given: dict[str, Any], output: torch.Tensor) -> None:
    if x.is_nested:
        raise ValueError("capture cannot see into nested tensors, which TransformerEncoder makes of a padded batch in "
                         "evaluation; make it with enable_nested_tensor=False, or set its use_nested_tensor to False")
    query, key, value = functional.linear(x, given["weight"], given["bias"]).unflatten(
        -1, (3, given["num_heads"], -1)).permute(2, 0, 3, 1, 4)
    options: dict[str, Any] = {}
    if given.get("mask") is not None:       # excludes keys where it is not 0, also if its dtype is floating point
        mask = given["mask"].to(torch.bool).logical_not()
        options["key_mask" if given["mask_type"] == 1 else "mask"] = mask
    tell(Call(query, key, value, options, output), given["weight"])


def _refusing(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function; its errors say that the capture raised them."""
    try:
        return function(*args, **kwargs)
    except (TypeError, ValueError) as error:
        raise type(error)(f"capture cannot see this attention: {error}") from error


def _bind(signature: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    bound = inspect.signature(signature).bind(*args, **kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)


SEEN |= {
    torch._C._nn.scaled_dot_product_attention: sdpa, torch.ops.aten.scaled_dot_product_attention: sdpa,
    torch.ops.aten.scaled_dot_product_attention.default: sdpa, functional_mha: mha,
    torch._native_multi_head_attention: native_mha, torch._transformer_encoder_layer_fwd: native_layer}


def is_seen(function: Any, see: Callable[..., Any]) -> None:
    """Mark a function, so that the mode calls its handler `see`."""
    vars(function)["attnc_sees"] = see
