"""Packed sequences of tensors: jagged tensors in the adapter for torch, cu_seq_lens in that for transformers."""

import contextlib
import re

import numpy as np
import pytest

import attnc
from attnc.testing import assert_within

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")]
torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from models import model_of  # noqa: E402
from torch.nn import functional  # noqa: E402

from attnc.integrations import torch as adapter  # noqa: E402
from attnc.integrations import transformers as ours  # noqa: E402
from attnc.integrations.torch import _packed  # noqa: E402

ROWS, KEYS = [5, 1, 9, 0, 3], [2, 1, 12, 4, 3]
SAME = [5, 1, 7, 3]
torch_sdpa = functional.scaled_dot_product_attention


@pytest.fixture(scope="module", autouse=True)
def registered():
    ours.register()


@pytest.fixture
def packed_calls(monkeypatch):
    calls = []

    def spied(*args):
        calls.append(args)
        return attend(*args)

    attend = _packed.attend
    monkeypatch.setattr(_packed, "attend", spied)
    return calls


def tokens(lengths, heads=4, dim=8, seed=0, dtype=torch.float32):
    random = torch.Generator().manual_seed(seed)
    return torch.randn(sum(lengths), heads, dim, generator=random, dtype=torch.float64).to(dtype).requires_grad_()


def bounds(lengths):
    return torch.tensor([0, *np.cumsum(lengths)])


def jagged(values, lengths=None, offsets=None, layout="bhnd"):
    found = torch.nested.nested_tensor_from_jagged(values, bounds(lengths) if offsets is None else offsets)
    return found.transpose(1, 2) if layout == "bhnd" else found


def qkv(kv_heads=4, value_dim=8, dtype=torch.float32):
    return [tokens(ROWS, dtype=dtype), tokens(KEYS, kv_heads, seed=1, dtype=dtype),
            tokens(KEYS, kv_heads, value_dim, seed=2, dtype=dtype)]


def nested(query, key, value, layout="bhnd"):
    of_keys = bounds(KEYS)
    return jagged(query, ROWS, layout=layout), *(jagged(x, offsets=of_keys, layout=layout) for x in (key, value))


def one_by_one(query, key, value, is_causal):
    """torch's own attention of each example alone, packed again."""
    found = []
    for q, k, v in zip(query.split(ROWS), key.split(KEYS), value.split(KEYS), strict=True):
        mask = torch.ones(len(q), len(k), dtype=torch.bool).tril() if is_causal else None
        found.append(torch_sdpa(*(x.transpose(0, 1) for x in (q, k, v)), mask, enable_gqa=True).transpose(0, 1))
    return torch.cat(found)


@pytest.mark.parametrize("patched", [False, True], ids=["function", "patch"])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("kv_heads, value_dim", [(4, 8), (2, 5)])
def test_jagged_tensors_as_each_example_alone(kv_heads, value_dim, is_causal, patched, packed_calls):
    given = qkv(kv_heads, value_dim)
    loud = torch.randn(sum(ROWS), 4, value_dim, generator=torch.Generator().manual_seed(3))

    def outcome(x, function):
        output = function(*x)
        return [output, *torch.autograd.grad((output * loud.to(output.dtype)).sum(), x)]

    def ours_of(*x):
        options = {"is_causal": is_causal, "enable_gqa": kv_heads != 4}
        if not patched:
            return adapter.scaled_dot_product_attention(*nested(*x), **options).transpose(1, 2).values()
        with adapter.patch():
            return functional.scaled_dot_product_attention(*nested(*x), **options).transpose(1, 2).values()

    def theirs(*x):
        return one_by_one(*x, is_causal)

    got = outcome(given, ours_of)
    assert len(packed_calls) == 1
    honest = outcome(given, theirs)
    exact = outcome([x.detach().double().requires_grad_() for x in given], theirs)
    for a, b, c in zip(got, exact, honest, strict=True):
        assert_within(*(x.detach().numpy() for x in (a, b, c)), scale=float(b.detach().abs().max()),
                      eps_dtype="float32")


@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_attention_of_jagged_tensors_has_the_bits_of_varlen(dtype, layout):
    given, sinks = qkv(dtype=dtype), torch.linspace(-1, 1, 4, requires_grad=True)
    options = {"causal": True, "window": (4, 0), "softcap": 3.0, "scale": 0.4}
    found = adapter.attention(*nested(*given, layout), layout=layout, sinks=sinks, want="lse", **options)
    wanted = attnc.attention_varlen(*map(adapter.as_array, given), bounds(ROWS).numpy(), bounds(KEYS).numpy(),
                                    sinks=sinks.detach().numpy(), want="lse", **options)
    output = found.output if layout == "bnhd" else found.output.transpose(1, 2)
    assert adapter.as_array(output.values()).tobytes() == wanted.output.tobytes()
    assert found.lse.transpose(1, 2).values().detach().numpy().tobytes() == wanted.lse.T.tobytes()
    torch.autograd.grad(found.lse.values().sum() + output.values().float().sum(), [*given, sinks])


def test_the_output_has_the_lengths_of_the_query():
    query, key, value = nested(*qkv())
    assert (adapter.scaled_dot_product_attention(query, key, value) + query).shape == query.shape


@pytest.mark.parametrize("error, change, words", [
    (ValueError, {"attn_mask": torch.ones(1)}, "attn_mask was given with jagged tensors"),
    (ValueError, {"dropout_p": 0.5}, "no dropout"),
    (ValueError, {"key": "2 heads", "value": "2 heads"}, "query has 4 heads, key has 2; .* enable_gqa=True"),
    (ValueError, {"value": "rows"}, "value has other lengths than key"),
    (ValueError, {"key": "bnhd", "value": "bnhd"}, r"key has 4 axes, of which axis 1 is jagged; wanted \(batch, heads"),
    (ValueError, {"query": "gaps"}, "query has gaps between its examples"),
    (ValueError, {"query": "complex"}, "query must be .* got dtype torch.complex64"),
    (TypeError, {"key": "double"}, "query, key and value must have one dtype, got torch.float32, torch.float64 and "),
    (TypeError, {"query": "half"}, "must have one dtype, got torch.float16, torch.float32 and torch.float32"),
    (TypeError, {"query": "ints"}, "query must be of a floating-point dtype, got torch.int64"),
])
def test_jagged_tensors_that_are_refused(error, change, words):
    with torch.no_grad():
        query, key, value = qkv()
        make = {"2 heads": lambda: jagged(key[:, :2], KEYS), "rows": lambda: jagged(query, ROWS),
                "bnhd": lambda: jagged(key, KEYS, layout="bnhd"), "complex": lambda: jagged(query.cfloat(), ROWS),
                "double": lambda: jagged(key.double(), KEYS), "half": lambda: jagged(query.half(), ROWS),
                "ints": lambda: jagged(query.long(), ROWS),
                "gaps": lambda: torch.nested.nested_tensor_from_jagged(
                    query, bounds(ROWS), torch.tensor(ROWS) // 2, jagged_dim=1).transpose(1, 2)}
        given = dict(zip(("query", "key", "value"), nested(query, key, value), strict=True))
        given |= {name: make[x]() if isinstance(x, str) else x for name, x in change.items()}
        with pytest.raises(error, match=words):
            adapter.scaled_dot_product_attention(**given)


def test_mixed_dtypes_of_jagged_tensors():
    """torch refuses them, also under `patch`, unless autocast makes them one; `attention` promotes them."""
    with torch.no_grad():
        query, key, value = nested(*qkv())
        key = jagged(qkv()[1].detach().double(), KEYS)
        assert adapter.attention(query, key, value).dtype is torch.float64
        for context in adapter.patch, contextlib.nullcontext:
            with context(), pytest.raises(ValueError, match="Expected query, key, and value to have the same dtype"):
                functional.scaled_dot_product_attention(query, key, value)
        key = jagged(qkv()[1].detach().bfloat16(), KEYS)
        with torch.autocast("cpu", torch.bfloat16):
            assert adapter.scaled_dot_product_attention(query, key, value).dtype is torch.bfloat16


def test_what_is_wanted_of_jagged_tensors_and_their_gradients():
    given = nested(*qkv())
    with pytest.raises(ValueError, match="want must be out of 'lse' for jagged tensors, got 'weights'"):
        adapter.attention(*given, want="weights")
    with pytest.raises(ValueError, match="alibi_slopes requires grad, but attnc has no gradient for it"):
        adapter.attention(*given, alibi_slopes=torch.ones(4, requires_grad=True))
    with pytest.raises(TypeError, match="out"):
        adapter.attention(*given, out=given[0])


@pytest.mark.parametrize("function", [adapter.attention, adapter.scaled_dot_product_attention])
@pytest.mark.parametrize("i, name", list(enumerate(["query", "key", "value"])))
def test_a_dense_tensor_among_jagged_ones_is_named(function, i, name):
    given = list(nested(*qkv()))
    given[i] = torch.zeros(4, 2, 3, 8)
    with pytest.raises(ValueError, match=f"{name} must be a jagged tensor as the others are, got a dense tensor"):
        function(*given)


def packed_inputs(lengths=SAME, positions=True):
    ids = torch.randint(4, 99, (1, sum(lengths)), generator=torch.Generator().manual_seed(1))
    cu = bounds(lengths).to(torch.int32)
    found = {"input_ids": ids, "cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": max(lengths),
             "max_length_k": max(lengths)}
    if positions:
        found["position_ids"] = torch.cat([torch.arange(n) for n in lengths])[None]
    return found


def alone(model, inputs, lengths=SAME, **options):
    return [model(ids, position_ids=places, **options) for ids, places in
            zip(inputs["input_ids"].split(lengths, 1), inputs["position_ids"].split(lengths, 1), strict=True)]


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Gemma2", "GptOss", "Bert", "Llama4Text", "DeepseekV3"])
def test_models_take_cu_seq_lens(name, packed_calls):
    inputs, options = packed_inputs(), {} if name == "Bert" else {"use_cache": False}
    exact, honest = model_of(name, torch.float64), model_of(name)
    with torch.no_grad():
        exact, honest = (torch.cat([x[0] for x in alone(model, inputs, **options)], 1) for model in (exact, honest))
        assert not packed_calls
        found = model_of(name)(**inputs, **options)[0]
        assert packed_calls or name == "Llama4Text"     # whose chunks are segments, as are the next model's weights
        del packed_calls[:]
        with_weights = model_of(name)(**inputs, **options, output_attentions=True)
        assert not packed_calls
    for got in (found, with_weights[0]):
        assert_within(*(x.numpy() for x in (got, exact, honest)), scale=float(exact.abs().max()), eps_dtype="float32")
    seen = torch.block_diag(*[torch.ones(n, n) for n in SAME]) > 0
    for weights in with_weights.attentions:
        assert weights.shape[-2:] == seen.shape and not weights[..., ~seen].any()
        if name != "GptOss":        # which has sinks
            torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:-1]))


@pytest.mark.parametrize("name", ["Llama", "GptOss"])
def test_a_step_of_training_on_cu_seq_lens(name, packed_calls):
    inputs = packed_inputs()

    def gradients(model, packed):
        output = model(**inputs, use_cache=False)[0] if packed else torch.cat(
            [x[0] for x in alone(model, inputs, use_cache=False)], 1)
        return torch.autograd.grad(output.square().mean(), list(model.parameters()))

    got = gradients(model_of(name).train(), True)
    assert packed_calls
    honest, exact = gradients(model_of(name).train(), False), gradients(model_of(name, torch.float64).train(), False)
    for a, b, c in zip(got, exact, honest, strict=True):
        assert_within(*(x.numpy() for x in (a, b, c)), scale=float(b.abs().max()), eps_dtype="float32")


class Module(torch.nn.Module):
    is_causal = True


def attend(lengths_q, lengths_k, **options):
    """The attention function on packed tokens (1, heads, tokens, dim), as a list of what each sequence has."""
    query, key, value = (tokens(n, seed=i).detach() for i, n in enumerate((lengths_q, lengths_k, lengths_k)))
    query, key, value = (x.transpose(0, 1)[None] for x in (query, key, value))
    output, weights = ours.attend(Module(), query, key, value, None, cu_seq_lens_q=bounds(lengths_q),
                                  cu_seq_lens_k=bounds(lengths_k), **options)
    rows = zip(output[0].split(lengths_q), query[0].split(lengths_q, 1), key[0].split(lengths_k, 1),
               value[0].split(lengths_k, 1), strict=True)
    return [(o.numpy(), *(x.transpose(0, 1).numpy() for x in qkv)) for o, *qkv in rows], weights


@pytest.mark.parametrize("weights", [False, True], ids=["packed", "segments"])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("is_causal", [None, True])
def test_sequences_with_more_keys_than_rows(is_causal, window, weights):
    sinks = torch.linspace(-1, 1, 4)
    found, dense = attend([1, 4, 0, 1], [6, 9, 2, 1], is_causal=is_causal, sliding_window=window, scaling=0.3,
                          s_aux=sinks, output_attentions=weights)
    assert (dense is None) != weights
    for output, query, key, value in found:
        wanted = attnc.attention(query, key, value, causal=bool(is_causal), layout="bnhd", scale=0.3,
                                 window=window and (window - 1, window - 1), sinks=sinks.numpy())
        if weights:
            np.testing.assert_allclose(output, wanted, rtol=0, atol=1e-6)
        else:
            assert output.tobytes() == wanted.tobytes()


def test_segments_that_split_a_sequence_are_kept():
    from attnc.integrations.transformers import _packed as packed

    ids = np.array([[0, 0, 1, 1, 2]])
    split, equal = torch.tensor([0, 3, 5]), torch.tensor([0, 2, 4, 5])
    both = dict.fromkeys(("q_segments", "k_segments"), ids)
    assert "q_segments" in packed._without_equal_segments(both, split, split)
    assert packed._without_equal_segments(both, equal, equal) == {}
    assert "q_segments" in packed._without_equal_segments({"q_segments": ids, "k_segments": ids + 0}, equal, equal)
    joined = packed.segments(split, split, 5, 5, both)
    seen = joined["q_segments"][0][:, None] == joined["k_segments"][0]
    assert torch.equal(seen, torch.block_diag(*[torch.ones(n, n) for n in (2, 1, 1, 1)]) > 0)


def test_a_compiled_model_takes_cu_seq_lens():
    query, key, value = (tokens(SAME, seed=i).detach().transpose(0, 1)[None] for i in range(3))
    cu = bounds(SAME)

    def function(query, key, value, cu):
        return ours.attend(Module(), query, key, value, None, is_causal=True, cu_seq_lens_q=cu, cu_seq_lens_k=cu)[0]

    found = torch.compile(function, backend="eager")(query, key, value, cu)
    torch.testing.assert_close(found, function(query, key, value, cu), rtol=0, atol=1e-6)


def test_packed_tokens_that_are_refused():
    x = torch.zeros(2, 4, 5, 8)
    cu = torch.tensor([0, 2, 5])
    with pytest.raises(ValueError, match=re.escape("packed sequences as one example, got 2 with cu_seq_lens_q")):
        ours.attend(Module(), x, x, x, None, cu_seq_lens_q=cu, cu_seq_lens_k=cu)
    with pytest.raises(ValueError, match="cu_seqlens_q ends at 5; wanted 4"):
        ours.attend(Module(), x[:1, :, :4], x[:1], x[:1], None, cu_seq_lens_q=cu, cu_seq_lens_k=cu)
