"""Names of other libraries' arguments: the error says what they are called here, and small calls do not pay for it."""

import inspect
import re

import numpy as np
import pytest

import attnc
from attnc import reference
from attnc._checks import spellings

X = np.ones((2, 4, 8))
CALLS = {
    "attention": (X, X, X), "attention_scores": (X, X), "attention_weights": (X, X), "weighted_sum": (X[..., :4], X),
    "attention_backward": (X, X, X, X, X, X[..., 0]), "attention_varlen": (X, X, X, [0, 2], [0, 2]), "softmax": (X,),
    "log_softmax": (X,), "softmax_backward": (X, X), "log_softmax_backward": (X, X), "AttentionWeights": (X, X),
    "AttentionState": (X,),
}
FUNCTIONS = [getattr(module, name) for module in (attnc, reference) for name in CALLS if hasattr(module, name)]
SAID = [
    ({"is_causal": True}, "use causal=True: the last row sees the last key"),
    ({"attn_mask": X > 0}, "use mask= for bools"),
    ({"attn_mask": X}, "use bias=, which is added"),
    ({"window_size": (-1, 0)}, "use window=(None, 0)"),
    ({"sliding_window": 128}, "use window=(127, 0)"),
    ({"softmax_scale": 1.0}, "use scale="),
    ({"num_heads": 8}, "heads are an axis"),
    ({"dropout_p": 0.1}, "no dropout"),
    ({"return_lse": True}, 'use want="lse"'),
    ({"caussal": True}, "use causal="),
    ({"colour": 1}, "it takes query, key, value, mask, "),
]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f"{f.__module__}.{f.__qualname__}")
def test_every_function_answers_and_hides_how(function):
    name, parameters = function.__name__, inspect.signature(function).parameters
    hint = "use causal=False" if {"causal", "q_offset"} <= parameters.keys() else "it takes "
    with pytest.raises(TypeError, match=rf"^{name}\(\) got an unexpected .* 'is_causal'; {hint}"):
        function(*CALLS[name], is_causal=False)
    kinds = {parameter.kind for parameter in parameters.values()}
    assert inspect.Parameter.VAR_KEYWORD not in kinds


@pytest.mark.parametrize(("given", "words"), SAID, ids=lambda x: next(iter(x)) if isinstance(x, dict) else "")
def test_what_is_said(given, words):
    with pytest.raises(TypeError, match=re.escape(words)):
        attnc.attention(X, X, X, **given)


def test_a_cache_answers_when_it_attends():
    for module in (attnc, reference):
        cache = module.KVCache(1, 2, 8, capacity=4, dtype="float32")
        with pytest.raises(TypeError, match=r"^KVCache\.attend\(\) .*use causal=True"):
            cache.attend(X[None], is_causal=True)


def test_a_hint_names_only_what_the_function_takes():
    for function, name, words in ((attnc.softmax, "softmax_scale", "it takes x, axis, "),
                                  (attnc.softmax, "dim", "use axis="),
                                  (attnc.AttentionWeights, "need_weights", "it takes query, key, "),
                                  (attnc.attention_varlen, "cu_seqlens", "use cu_seqlens_q="),
                                  (attnc.attention_varlen, "lengths", "it takes query, key, "),
                                  (attnc.attention_varlen, "layout", "it takes query, key, ")):
        with pytest.raises(TypeError, match=rf"'{name}'; {words}"):
            function(*CALLS[function.__name__], **{name: 2})


def test_every_name_that_is_suggested_is_there():
    names = set()
    for function in FUNCTIONS:
        names |= inspect.signature(function).parameters.keys()
    hints = [hint(True) if callable(hint) else hint for hint in spellings._SPELLINGS.values()]
    suggested = {name for hint in hints for name in re.findall(r"(\w+)=", hint)}
    assert {"causal", "window", "bias"} <= suggested <= names
    own = inspect.signature(attnc.attention).parameters
    assert spellings._SPELLINGS.keys() & own.keys() == {"q_lengths"}        # which attention_varlen does not take


def test_what_is_passed_beside_it_is_not_evaluated():
    """The error comes before any check of the arrays."""
    with pytest.raises(TypeError, match="is_causal"):
        attnc.attention(None, None, None, is_causal=True)
