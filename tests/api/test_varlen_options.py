"""Packed sequences with every option, every result and gradients: what each sequence has alone."""

import numpy as np
import pytest
from checking import assert_same_bits, dtypes_in_turn, normal
from slow import some_option
from test_varlen import packed

import attnc
from attnc import reference
from attnc._checks import attention as checks

MODULES = pytest.mark.parametrize("module", [attnc, reference], ids=["attnc", "reference"])
NAMES = ("mask", "key_indices", "key_mask", "bias", "relative_bias", "causal", "window", "q_offset", "scale", "softcap",
         "alibi_slopes", "sinks", "segments", "tables")
MIXED = [0, 1, 40, 3, 0, 70, 2], [4, 0, 40, 90, 0, 33, 9]
LISTS = ("mask", "key_indices", "bias", "relative_bias")


def option(name, random, q_lengths, kv_lengths):
    """An option of packed tokens, and that of each sequence alone."""
    count = len(q_lengths)
    if name == "segments":
        q, k = (random.integers(-1, 2, sum(x)) for x in (q_lengths, kv_lengths))
        return {"q_segments": q, "k_segments": k}, [
            {"q_segments": x, "k_segments": y} for x, y in zip(cut(q, q_lengths), cut(k, kv_lengths), strict=True)]
    if name == "key_mask":
        x = random.random(sum(kv_lengths)) < 0.7
        return {name: x}, [{name: its} for its in cut(x, kv_lengths)]
    if name in ("q_offset", "alibi_slopes"):
        x = random.integers(-2, 9, count) if name == "q_offset" else random.random((count, 4))
        return {name: x}, [{name: its if its.ndim else int(its)} for its in x]
    own = [some_option(name, random, (), 4, q, k, 8) for q, k in zip(q_lengths, kv_lengths, strict=True)]
    if name == "tables":
        shared = {table: normal(random, (4, 9, 8)) for table in own[0] if table != "relative_index"}
        lists = [None, *(one["relative_index"] for one in own[1:])]
        return {"relative_index": lists, **shared}, [{}, *({"relative_index": x, **shared} for x in lists[1:])]
    if name in LISTS:
        own[0] = {name: None}
        return {name: [one[name] for one in own]}, own
    return own[0] if own else {}, [own[0]] * count


def cut(x, lengths):
    return np.split(x, np.cumsum(lengths)[:-1])


def alone(function, arrays, own, *rows, **options):
    """A function of each sequence alone; `rows` are more arrays over the query tokens, in their second last axis."""
    query, key, value, q_bounds, k_bounds = arrays
    for i, its in enumerate(own):
        r, k = slice(*q_bounds[i:i + 2]), slice(*k_bounds[i:i + 2])
        given = [query[r], key[k], *([] if value is None else [value[k]])]
        yield function(*given, *(x[r] if x.ndim == 3 else x[:, r] for x in rows), layout="bnhd", **its, **options)


@MODULES
@pytest.mark.parametrize("name, dtype", dtypes_in_turn(NAMES))
def test_every_option_and_result(isa, module, name, dtype, seed):
    random = np.random.default_rng([seed, len(name)])
    arrays = packed(random, MIXED, dtype, dims=(8, 4))
    given, own = option(name, random, *MIXED)
    want = ("lse", "entropy", "argmax", "weights", "scores", "max")
    got = module.attention_varlen(*arrays, want=want, **given)
    assert tuple(vars(got)) == ("output", *want) and "weights [7 arrays]" in repr(got)
    wanted = list(alone(module.attention, arrays, own, want=want))
    assert_same_bits(got.output, np.concatenate([one.output for one in wanted]))
    for part in want:
        pieces = [getattr(one, part) for one in wanted]
        if part in ("weights", "scores"):
            assert isinstance(getattr(got, part), list)
            for x, y in zip(getattr(got, part), pieces, strict=True):
                assert_same_bits(x, y, part)
        else:
            assert_same_bits(getattr(got, part), np.concatenate(pieces, -1), part)
    assert_same_bits(module.attention_varlen(*arrays, **given), got.output)


@MODULES
@pytest.mark.parametrize("name", NAMES)
def test_lazy_weights(isa, module, name, seed):
    random = np.random.default_rng([seed, len(name)])
    query, key, _, *bounds = packed(random, MIXED, dims=(8, 4))
    given, own = option(name, random, *MIXED)
    got = module.attention_weights_varlen(query, key, *bounds, **given)
    for W, wanted in zip(got, alone(module.AttentionWeights, (query, key, None, *bounds), own), strict=True):
        assert type(W) is module.AttentionWeights
        assert_same_bits(W.dense(), wanted.dense())
        assert_same_bits(W.key_mass(), wanted.key_mass())


@MODULES
@pytest.mark.parametrize("name", ["plain", *NAMES])
def test_gradients(isa, module, name, seed):
    random = np.random.default_rng([seed, len(name)])
    arrays = packed(random, MIXED, dims=(8, 4))
    given, own = ({}, [{}] * 7) if name == "plain" else option(name, random, *MIXED)
    output, lse = module.attention_varlen(*arrays, want="lse", **given)
    grad, grad_lse = normal(random, output.shape), normal(random, lse.shape)
    lists = tuple(one for one in ("bias", "relative_bias") if one in given)
    shared = tuple(one for one in ("relative_key", "relative_query", "sinks") if one in given)
    want = ("query", "key", "value", *lists, *shared)
    got = module.attention_varlen_backward(grad, *arrays[:3], output, lse, *arrays[3:], want=want, grad_lse=grad_lse,
                                           **given)
    assert tuple(vars(got)) == want

    def backward(query, key, value, grad, output, lse, grad_lse, **its):
        its["want"] = tuple(one for one in want if one in ("query", "key", "value") or its.get(one) is not None)
        return module.attention_backward(grad, query, key, value, output, lse, grad_lse=grad_lse, **its)

    parts = list(alone(backward, arrays, own, grad, output, lse, grad_lse))
    for part in want:
        pieces = [getattr(one, part, None) for one in parts]
        if part in lists:
            assert pieces[0] is None and getattr(got, part)[0] is None
            for x, y in zip(getattr(got, part)[1:], pieces[1:], strict=True):
                assert_same_bits(x, y, part)
        elif part in shared:
            given = [x for x in pieces if x is not None]
            assert len(given) == len(parts) - (part != "sinks")
            assert_same_bits(getattr(got, part), sum(given, start=np.zeros_like(given[0])))
        else:
            assert_same_bits(getattr(got, part), np.concatenate(pieces), part)


def test_other_sequences_change_no_bit_of_a_gradient(isa, seed):
    """Every second sequence full of NaN: the gradients of the others keep their bits."""
    query, key, value, *bounds = packed(np.random.default_rng(seed), "prefill")
    options = {"causal": True, "key_mask": np.random.default_rng(seed).random(len(key)) < 0.8}

    def gradients():
        output, lse = attnc.attention_varlen(query, key, value, *bounds, want="lse", **options)
        return attnc.attention_varlen_backward(np.ones_like(output), query, key, value, output, lse, *bounds, **options)

    clean = gradients()
    kept = np.ones(len(query), bool)
    for i in range(0, 5, 2):
        where = slice(*bounds[0][i:i + 2])
        kept[where], query[where], value[where] = False, np.nan, np.nan
    dirty = gradients()
    for name in ("query", "key", "value"):
        assert_same_bits(getattr(clean, name)[kept], getattr(dirty, name)[kept], name)


@MODULES
@pytest.mark.parametrize("lengths", [MIXED, ([], [])], ids=["sequences", "none"])
@pytest.mark.parametrize("dtype", ["int8", ">f4", "<f8"])
def test_gradients_have_the_dtype_of_their_argument(module, lengths, dtype):
    """Integers count as float64; sinks are summed over the sequences before they are rounded."""
    query, key, value, *bounds = packed(np.random.default_rng(0), lengths, dims=(8, 4))
    query, key, value = (x.astype(dtype) for x in (query, key, value))
    for sinks in np.float16, np.float32, np.float64:
        options = {"sinks": np.linspace(-1, 1, 4).astype(sinks)}
        output, lse = module.attention_varlen(query, key, value, *bounds, want="lse", **options)
        got = module.attention_varlen_backward(np.ones_like(output), query, key, value, output, lse, *bounds,
                                               want=("query", "key", "value", "sinks"), **options)
        assert got.sinks.dtype == sinks and got.sinks.shape == (4,)
        for x in got.query, got.key, got.value:
            assert x.dtype == ("<f8" if dtype == "int8" else np.dtype(dtype).newbyteorder("="))
            assert x.dtype.isnative
        wide = module.attention_varlen_backward(np.ones_like(output), query, key, value, output, lse, *bounds,
                                                want="sinks", sinks=options["sinks"].astype(float)).sinks
        assert_same_bits(got.sinks, wide.astype(sinks))


@pytest.mark.parametrize("name", ["out_of_place", "layout", "block_mask", "q_lengths", "window_size", "scaling"])
def test_names_that_are_no_option_of_packed_tokens(name):
    """The same error from every function, whatever comes with it; a hint never names what the function lacks."""
    query, key, value, *bounds = packed(np.random.default_rng(0), MIXED, dims=(8, 4))
    output, lse = attnc.attention_varlen(query, key, value, *bounds, want="lse")
    calls = {"attention_varlen": (query, key, value, *bounds), "attention_weights_varlen": (query, key, *bounds),
             "attention_varlen_backward": (output, query, key, value, output, lse, *bounds)}
    said = {"window_size": r"use window=\(4, 0\)", "scaling": "use scale=",
            "q_lengths": "use cu_seqlens_q="}.get(name, "it takes .*query.* causal, ")
    for module in attnc, reference:
        for function, given in calls.items():
            with pytest.raises(TypeError, match=rf"^{function}\(\) got an unexpected .* '{name}'; {said}"):
                getattr(module, function)(*given, **{name: 5})


@MODULES
def test_no_sequence(module):
    arrays = packed(np.random.default_rng(0), "none")
    got = module.attention_varlen(*arrays, want=("lse", "weights", "argmax"), key_mask=np.ones(0, bool))
    assert got.output.shape == (0, 4, 24) and got.weights == [] and got.lse.shape == got.argmax.shape == (4, 0)
    assert module.attention_weights_varlen(*arrays[:2], *arrays[3:]) == []
    grads = module.attention_varlen_backward(got.output, *arrays[:3], got.output, got.lse, *arrays[3:],
                                             sinks=np.zeros(4), want=("query", "sinks"))
    assert grads.query.shape == (0, 4, 16) and grads.sinks.tolist() == [0] * 4


@MODULES
@pytest.mark.parametrize("error, options, words", [
    (ValueError, {"relative_index": [], "relative_key": np.zeros((3, 5, 16))}, r"relative_key has shape \(3, 5, 16\)"),
    (ValueError, {"relative_index": [], "relative_query": np.zeros((5, 15))}, r"relative_query has shape \(5, 15\)"),
    (TypeError, {"relative_index": [], "relative_key": np.zeros((5, 16), int)}, "relative_key must be float16"),
    (ValueError, {"relative_index": [], "relative_key": np.zeros((5, 16)), "relative_query": np.zeros((4, 16))},
     r"relative_query has shape \(4, 16\)"),
    (ValueError, {"q_segments": []}, "q_segments was given and k_segments was not"),
    (ValueError, {"bias": [None]}, "bias must be a list of one array .* 0 sequences, got 1"),
    (ValueError, {"softcap": -1.0}, "softcap"), (ValueError, {"sinks": np.zeros(5)}, "sinks"),
])
def test_options_are_checked_without_a_sequence(module, error, options, words):
    query, key, value, *bounds = packed(np.random.default_rng(0), "none")
    with pytest.raises(error, match=words):
        module.attention_varlen(query, key, value, *bounds, **options)
    with pytest.raises(error, match=words):
        module.attention_weights_varlen(query, key, *bounds, **options)


@MODULES
@pytest.mark.parametrize("name", ["bias", "relative_bias", "relative_key", "relative_query"])
def test_a_gradient_that_some_sequences_have(module, name, seed):
    """Wanted alone, where the first sequence has no bias and no distances."""
    random = np.random.default_rng(seed)
    query, key, value, *ends = packed(random, MIXED, dims=(8, 4))
    kind = "tables" if name.endswith(("key", "query")) else name
    given = next(x for x, _ in iter(lambda: option(kind, random, *MIXED), None) if name in x)   # one table or both
    output, lse = module.attention_varlen(query, key, value, *ends, want="lse", **given)
    every = (name, "query", "key", "value")
    one, all_ = (getattr(module.attention_varlen_backward(
        output, query, key, value, output, lse, *ends, want=want, **given), name) for want in (name, every))
    assert len(one) == len(all_)
    for x, y in zip(one, all_, strict=True):
        assert (x is None and y is None) or np.array_equal(x, y)


QUERY, KEY, VALUE = np.zeros((5, 4, 8)), np.zeros((7, 2, 8)), np.zeros((7, 2, 3))


@MODULES
@pytest.mark.parametrize("error, options, words", [
    (TypeError, {"bias": np.zeros((4, 5, 7))}, "bias must be a list of one array .* 2 sequences, got ndarray"),
    (ValueError, {"mask": [None]}, "mask must be a list of one array .* 2 sequences, got 1"),
    (ValueError, {"bias": [None, np.zeros((5, 7))]}, r"sequence 1: bias has shape \(5, 7\)"),
    (TypeError, {"mask": [np.zeros((2, 3)), None]}, "sequence 0: mask must be bool"),
    (ValueError, {"relative_bias": [None, np.zeros(7)]}, r"sequence 1: relative_bias .* \(4, 6\)"),
    (TypeError, {"key_mask": np.zeros(7)}, "key_mask must be bool"),
    (ValueError, {"key_mask": np.zeros(6, bool)}, r"key_mask has shape \(6,\); wanted \(kv_tokens,\) = \(7,\)"),
    (ValueError, {"q_segments": np.zeros(5, int)}, "^q_segments was given and k_segments was not"),
    (ValueError, {"relative_index": [np.zeros(4, int), None]}, "sequence 0: relative_index was given without a table"),
    (ValueError, {"relative_index": [None] * 2, "relative_key": np.zeros((3, 5, 8))}, r"^relative_key has shape \(3, "),
    (ValueError, {"q_segments": np.zeros(7, int), "k_segments": np.zeros(7, int)}, r"q_segments has shape \(7,\)"),
    (ValueError, {"q_offset": [1, 2, 3]}, r"q_offset has shape \(3,\); wanted an integer or \(sequences,\) = \(2,\)"),
    (TypeError, {"q_offset": 0.5}, "q_offset must be an integer"),
])
def test_errors(module, error, options, words):
    out = np.full((5, 4, 3), 7.0)
    with pytest.raises(error, match=words):
        module.attention_varlen(QUERY, KEY, VALUE, [0, 2, 5], [0, 3, 7], out=out, **options)
    assert (out == 7).all()


@MODULES
@pytest.mark.parametrize("error, options, words", [
    (ValueError, {"lse": np.zeros((5, 4))}, r"lse has shape \(5, 4\); wanted \(q_heads, q_tokens\) = \(4, 5\)"),
    (ValueError, {"grad_output": np.zeros((5, 4, 8))}, r"grad_output has shape \(5, 4, 8\)"),
    (ValueError, {"want": ("query", "bias")}, "want has 'bias', but no bias was given"),
    (ValueError, {"want": ()}, "want is empty"), (ValueError, {"want": "weights"}, "weights"),
    (TypeError, {"kv_lengths": [3, 4]}, r"attention_varlen_backward\(\) got an unexpected .* 'kv_lengths'; it takes "),
    (TypeError, {"is_causal": True}, r"attention_varlen_backward\(\) got .* 'is_causal'; use causal=True"),
    (TypeError, {"out": VALUE}, r"attention_varlen_backward\(\) got an unexpected keyword argument 'out'"),
    (TypeError, {"block_mask": None}, r"attention_varlen_backward\(\) got .* 'block_mask'; it takes .*, mask, "),
])
def test_errors_of_gradients(module, error, options, words):
    given = {"grad_output": VALUE[:5].repeat(2, 1), "query": QUERY, "key": KEY, "value": VALUE,
             "output": VALUE[:5].repeat(2, 1), "lse": np.zeros((4, 5)), "cu_seqlens_q": [0, 2, 5],
             "cu_seqlens_k": [0, 3, 7], **options}
    with pytest.raises(error, match=words):
        module.attention_varlen_backward(**given)


@MODULES
@pytest.mark.parametrize("name, words", [("bias", "bias of sequence 1"), ("key_mask", "key_mask"),
                                         ("alibi_slopes", "alibi_slopes"), ("q_offset", "q_offset")])
def test_out_shares_no_memory_with_an_option_of_any_sequence(module, name, words):
    """The option of one sequence must not lie in the rows of another, which are written before it is read."""
    out = np.full((5, 4, 3), 7.0)
    rows = {"bias": [None, out.reshape(-1)[:48].reshape(4, 3, 4)], "key_mask": out.reshape(-1).view(bool)[:7],
            "alibi_slopes": out.reshape(-1)[:8].reshape(2, 4), "q_offset": out.reshape(-1).view(np.int64)[:2]}
    if name == "q_offset":
        out.view(np.int64)[...] = 7
    with pytest.raises(ValueError, match=f"out shares memory with {words}; wanted"):
        module.attention_varlen(QUERY, KEY, VALUE, [0, 2, 5], [0, 3, 7], out=out, **{name: rows[name]})


@MODULES
@pytest.mark.parametrize("options", [{"bias": [None] * 3}, {"want": "entropy"}], ids=str)
def test_arguments_of_a_sequence_are_checked_once(module, options, monkeypatch):
    calls, check = [], checks._check_inputs
    monkeypatch.setattr(checks, "_check_inputs", lambda *inputs: (calls.append(1), check(*inputs)))
    module.attention_varlen(QUERY, KEY, VALUE, [0, 2, 4, 5], [0, 3, 5, 7], **options)
    assert len(calls) == 1 + 3
