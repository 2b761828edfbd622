"""What other libraries call an argument, and what it is here: the text of the error for a name that is not known."""

import inspect
import re
from collections.abc import Callable, Collection
from typing import Any, Never, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def _causal(value: Any) -> str:
    return f"use causal={value!r}: the last row sees the last key; q_offset=0 gives torch's alignment at the first"


def _mask(value: Any) -> str:
    if str(getattr(value, "dtype", "")).rpartition(".")[2].startswith(("float", "bfloat")):
        return "use bias=, which is added to the scores"
    return "use mask= for bools, True = attend; bias= for floats, which are added to the scores"


def _window(value: Any) -> str:
    if isinstance(value, (tuple, list)) and len(value) == 2:
        return f"use window=({', '.join('None' if side in (-1, None) else str(side) for side in value)})"
    width = f"{value - 1}" if isinstance(value, int) and value > 0 else "width - 1"
    return f"use window=({width}, 0) if the row's own key is counted in the width; (left, right) do not count it"


_HEADS = "heads are an axis of the arrays, (..., heads, length, head_dim)"

# By the names of torch, FlashAttention, JAX, Keras, transformers, ONNX and MLX.
_SPELLINGS: dict[str, str | Callable[[Any], str]] = {
    **dict.fromkeys(("is_causal", "use_causal_mask"), _causal),
    **dict.fromkeys(("attn_mask", "attention_mask", "attn_bias"), _mask),
    **dict.fromkeys(("window_size", "local_window_size", "sliding_window"), _window),
    **dict.fromkeys(("softmax_scale", "sm_scale", "scaling", "qk_scale"), "use scale="),
    **dict.fromkeys(("logit_cap", "logits_soft_cap", "soft_cap", "attn_logit_softcapping"), "use softcap="),
    **dict.fromkeys(("num_heads", "nheads", "n_heads", "num_kv_heads"), _HEADS),
    **dict.fromkeys(("dropout", "dropout_p", "dropout_rate", "attention_dropout"), "attnc has no dropout"),
    **dict.fromkeys(("need_weights", "output_attentions", "return_attn_probs"), 'use want="weights"'),
    **dict.fromkeys(("return_lse", "return_softmax_lse", "return_residual"), 'use want="lse"'),
    **dict.fromkeys(("cu_seqlens", "cu_seqlens_q", "cu_seqlens_k"), "use attention_varlen for packed sequences"),
    **dict.fromkeys(("key_value_seq_lengths", "cache_seqlens", "seqused_k"), "use kv_lengths="),
    **dict.fromkeys(("page_table", "block_tables"), "use block_table="),
    "block_table": "use attention_varlen for keys and values in pages; they have no gradients",
    **dict.fromkeys(("alibi", "slopes"), "use alibi_slopes="),
    **dict.fromkeys(("sink", "s_aux"), "use sinks="),
    **dict.fromkeys(("threads", "n_threads"), "use num_threads="),
    "dim": "use axis=",
    "enable_gqa": "fewer key heads than query heads need no flag",
    "key_padding_mask": "use key_mask=, in which True = attend",
    "lengths": "use q_lengths= and kv_lengths=, the valid rows and keys of a padded batch",
    "position_bias": "use bias=, or relative_bias= if it depends on the distance alone",
    "q_lengths": "use cu_seqlens_q=, the running sum of the lengths",
    "query_seq_lengths": "use q_lengths=",
    "return_attention_scores": 'use want="weights", or want="scores" for those before the softmax',
    "segment_ids": "use q_segments= and k_segments=",
}


def unexpected(function: Callable[..., Any], unknown: dict[str, Any], options: Collection[str] = ()) -> Never:
    """Raise the error that Python raises for unknown names, with what they are called here.

    `options` are the names that the function takes by ``**options``.
    """
    name, value = next(iter(unknown.items()))
    title = function.__qualname__.removesuffix(".__init__")
    known = [each.name for each in inspect.signature(function).parameters.values()
             if each.name != "self" and each.kind is not each.VAR_KEYWORD] + list(options)
    hint = _SPELLINGS.get(name)
    text = hint(value) if callable(hint) else hint
    suggested = re.findall(r"\b(\w+)=", text or "")
    if suggested and not set(known).issuperset(suggested):
        text = None
    elif text is None or f"use {title} " in text:
        from difflib import get_close_matches

        close = get_close_matches(name, known, 1, 0.75)
        text = f"use {close[0]}=" if close else None
    raise TypeError(f"{title}() got an unexpected keyword argument {name!r}"
                    + (f"; {text}" if text else f"; it takes {', '.join(known)}"))


def hides_unknown(function: F) -> F:
    """The same function, whose signature does not show the ``**unknown`` by which it meets names it does not know.

    A wrapper that meets them would cost a small call of attention several percent.
    """
    signature = inspect.signature(function)
    shown = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
    function.__signature__ = signature.replace(parameters=shown)     # type: ignore[attr-defined]
    return function
