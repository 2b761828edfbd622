"""The mask handed to transformers: its options mean what transformers' booleans say, and foreign masks hold."""

import copy
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import pytest

from attnc import masks
from attnc._checks import attention_args

pytestmark = pytest.mark.peers
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from transformers import masking_utils as rules  # noqa: E402

from attnc.integrations import transformers as ours  # noqa: E402
from attnc.integrations.transformers._mask import Mask, mask  # noqa: E402

PACKED = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2, 2], [0, 0, 0, 0, 0, 0, 1, 1, 1]])
POSITIONS = torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5, 0, 1, 2]])
CAUSAL = rules.causal_mask_function
RULES = {
    "causal": CAUSAL,
    "all": rules.bidirectional_mask_function,
    "window": rules.sliding_window_causal_mask_function(4),
    "window of one": rules.sliding_window_causal_mask_function(1),
    "window on both sides": rules.sliding_window_bidirectional_mask_function(2),
    "chunks": rules.chunked_causal_mask_function(3, torch.tensor([0, 4])),
    "packed": rules.and_masks(rules.remap_positions_for_packed_sequence(CAUSAL, POSITIONS),
                              rules.packed_sequence_mask_function(PACKED)),
    "packed, with a window": rules.and_masks(
        rules.remap_positions_for_packed_sequence(rules.sliding_window_causal_mask_function(2), POSITIONS),
        rules.packed_sequence_mask_function(PACKED)),
}
UNKNOWN = {
    "a user's": lambda b, h, q, k: (q + k) % 2 == 0,
    "a user's with causal": rules.and_masks(CAUSAL, lambda b, h, q, k: (q + k) % 2 == 0),
    "blocks": rules.or_masks(CAUSAL, rules.blockwise_overlay(PACKED)),
    "two windows": rules.and_masks(rules.sliding_window_overlay(2), rules.sliding_window_overlay(3)),
    "positions of their own": rules.remap_positions_for_packed_sequence(CAUSAL, POSITIONS),
}
SIZES = {"square": (9, 9, 0, 0), "one row of a cache": (1, 9, 8, 0), "rows of a cache": (3, 9, 6, 0),
         "static cache": (5, 9, 0, 0), "static cache, later": (2, 9, 3, 0), "window of a cache": (2, 6, 9, 5)}
PADDING = {"none": None, "left": [[1] * 12, [0] * 4 + [1] * 8], "right": [[1] * 7 + [0] * 5, [1] * 12],
           "all seen": [[1] * 12] * 2, "in the middle": [[1, 0, 1] * 4, [1] * 12], "short": [[1] * 6, [0] + [1] * 5],
           "nothing": [[0] * 12, [1] * 12]}


def made(rule, size="square", padding="none", **more):
    q_len, kv_len, q_offset, kv_offset = SIZES[size]
    seen = PADDING[padding] and torch.tensor(PADDING[padding], dtype=torch.bool)[:, :kv_len + kv_offset]
    return mask(batch_size=2, q_length=q_len, kv_length=kv_len, q_offset=q_offset, kv_offset=kv_offset,
                mask_function=rule, attention_mask=seen, config=None, use_vmap=False, device=torch.device("cpu"),
                **{"dtype": torch.float32, **more})


def meaning(found):
    """Which places the options allow, by the definition of `attnc.masks`."""
    rows, keys = (np.zeros((2, 1, n, 1), np.float32) for n in found.shape[-2:])
    options = {name: x.numpy() if isinstance(x, torch.Tensor) else x for name, x in found.options.items()}
    return masks.allowed(attention_args(rows, keys, None, **options))


@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("rule", RULES)
def test_the_options_mean_what_the_booleans_say(rule, size, padding):
    size = "square" if "packed" in rule else size     # packed sequences have no cache
    found = made(RULES[rule], size, padding)
    assert type(found) is Mask and "mask" not in found.options
    allowed = meaning(found)
    numbers = found.numbers()
    assert numbers.shape == found.shape and type(numbers) is torch.Tensor and numbers.dtype == torch.float32
    least = np.finfo(np.float32).min
    np.testing.assert_array_equal(np.where(allowed, np.float32(0), least), numbers.numpy())
    assert list(found.options) == ["bias"] and found.options["bias"] is numbers


def test_the_options_are_few():
    assert made(RULES["causal"], padding="all seen").options == {"causal": True, "q_offset": 0}
    assert made(RULES["all"]).options == {}
    assert made(RULES["window"], "window of a cache").options == {"causal": True, "window": (3, None), "q_offset": 4}
    assert list(made(RULES["all"], padding="right").options) == ["kv_lengths"]
    assert list(made(RULES["all"], padding="left").options) == ["key_mask"]
    with torch._C.DisableTorchFunctionSubclass():
        assert made(RULES["causal"]).untyped_storage().nbytes() == 4
    assert "causal" in repr(made(RULES["causal"]))


@pytest.mark.parametrize("rule", UNKNOWN)
def test_a_rule_that_is_not_known_gives_booleans(rule):
    found = made(UNKNOWN[rule], padding="left", allow_is_causal_skip=True)
    seen = torch.tensor(PADDING["left"], dtype=torch.bool)[:, :9]
    wanted = rules.sdpa_mask(2, 9, 9, mask_function=UNKNOWN[rule], allow_is_causal_skip=False, attention_mask=seen)
    assert list(found.options) == ["mask"] and torch.equal(found.options["mask"], wanted)
    assert torch.equal(found + 0, rules.eager_mask(2, 9, 9, mask_function=UNKNOWN[rule], attention_mask=seen))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("rule", RULES)
def test_a_model_that_adds_the_mask_adds_what_eager_adds(rule, padding, dtype):
    """So that an attention of a model's own is right, and torch's code for sdpa too, which takes it as it is."""
    found, wanted = made(RULES[rule], padding=padding, dtype=dtype), eager(RULES[rule], padding, dtype=dtype)
    scores = torch.randn(2, 4, 9, 9, dtype=dtype)
    assert found.dtype == dtype and torch.is_floating_point(found)
    torch.testing.assert_close(scores + found, scores + wanted, rtol=0, atol=0)
    values = torch.randn(2, 4, 9, 8, dtype=dtype)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    found, query = made(RULES[rule], padding=padding, dtype=dtype), torch.randn(2, 4, 9, 8, dtype=dtype)
    torch.testing.assert_close(sdpa(query, values, values, found), sdpa(query, values, values, wanted), rtol=0, atol=0)


@pytest.mark.parametrize("padding", PADDING)
def test_none_where_eager_has_none(padding):
    wanted = eager(RULES["all"], padding, allow_is_bidirectional_skip=True)
    assert (made(RULES["all"], padding=padding, allow_is_bidirectional_skip=True) is None) == (wanted is None)
    assert made(RULES["all"], padding=padding) is not None
    assert made(RULES["causal"], padding=padding, allow_is_causal_skip=True) is not None


def eager(rule, padding, **more):
    """The mask that transformers' eager attention gets."""
    seen = PADDING[padding] and torch.tensor(PADDING[padding], dtype=torch.bool)[:, :9]
    return rules.eager_mask(2, 9, 9, mask_function=rule, attention_mask=seen, **more)


def test_strides_are_those_of_its_memory():
    found = made(RULES["causal"])
    assert set(found.stride()) == {0} and found.storage_offset() == 0 and not found.is_contiguous()
    assert "causal" in found.options and found.contiguous().stride() == (81, 81, 9, 1)
    with pytest.raises(NotImplementedError, match="strides"):
        found.as_strided((9,), (0,))


def test_memory_read_past_the_mask_is_nan():
    with torch._C.DisableTorchFunctionSubclass():
        assert (made(RULES["causal"]) + 0).isnan().all()


def test_an_offset_that_is_a_tensor():
    found = mask(1, 2, 9, torch.tensor(3), 0, CAUSAL)
    assert found.options == {"causal": True, "q_offset": 3}


OPERATIONS = {
    "a slice": lambda x: x[:, :, :, :4], "less": lambda x: x < 0, "where": lambda x: torch.where(x == 0, 0.0, -1.0),
    "joined": lambda x: torch.cat([x, x], dim=-1), "to bfloat16": lambda x: x.to(torch.bfloat16), "any": torch.any,
    "chosen": lambda x: x.index_select(0, torch.tensor([1, 0])), "repeated": lambda x: x.expand(2, 4, -1, -1),
    "padded": lambda x: torch.nn.functional.pad(x, (0, 3), value=torch.finfo(x.dtype).min), "copied": copy.deepcopy,
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_sees_the_numbers(name):
    found = made(RULES["causal"], padding="left")
    assert found.shape == (2, 1, 9, 9) and found.dtype == torch.float32 and found.dim() == 4 and len(found) == 2
    assert "causal" in found.options
    got, wanted = OPERATIONS[name](found), OPERATIONS[name](made(RULES["causal"], padding="left").numbers())
    assert type(got) is torch.Tensor and torch.equal(got, wanted)


def test_a_change_of_the_mask_is_kept():
    found = made(RULES["causal"], padding="left")
    least = torch.finfo(torch.float32).min
    found[:, :, 0, 1] = 0
    found.masked_fill_(torch.arange(9) == 0, least)
    bias = found.options["bias"]
    assert list(found.options) == ["bias"] and (bias[:, :, 0, 1] == 0).all() and (bias[..., 0] == least).all()


# What a model is given by its user


@pytest.fixture(scope="module")
def model():
    ours.register()
    config = transformers.LlamaConfig(hidden_size=32, num_attention_heads=4, num_hidden_layers=2, intermediate_size=64,
                                      vocab_size=99, num_key_value_heads=2, pad_token_id=0)
    torch.manual_seed(0)
    return transformers.LlamaModel._from_config(config).eval()


def run(model, kind, tokens=9, **given):
    model.set_attn_implementation(kind)
    with torch.no_grad():
        return model(torch.arange(3, 3 + tokens).expand(2, -1), **given).last_hidden_state.numpy()


@pytest.mark.parametrize("make", [lambda x: x, lambda x: torch.where(x, 0.0, torch.finfo(torch.float32).min)],
                         ids=["bool", "float"])
def test_a_mask_of_four_axes(model, make):
    own = torch.rand(2, 1, 9, 9, generator=torch.Generator().manual_seed(0)) < 0.6
    own = own | torch.eye(9, dtype=torch.bool)
    np.testing.assert_allclose(run(model, "attnc", attention_mask=make(own)),
                               run(model, "sdpa", attention_mask=make(own)), rtol=0, atol=2e-6)
    assert np.abs(run(model, "attnc") - run(model, "attnc", attention_mask=make(own))).max() > 1e-3


def test_packed_sequences(model):
    packed = run(model, "attnc", position_ids=POSITIONS)
    np.testing.assert_allclose(packed, run(model, "eager", position_ids=POSITIONS), rtol=0, atol=2e-6)
    assert np.abs(packed - run(model, "attnc")).max() > 1e-3


def test_a_position_bias_is_added_to_a_mask_of_numbers():
    query, key, bias, mask = (torch.randn(2, 4, 9, n, generator=torch.Generator().manual_seed(n)) for n in (8, 8, 9, 9))
    mask = mask.roll(1, 0)
    got, _ = ours.attend(None, query, key, key, mask, position_bias=bias)
    wanted = torch.nn.functional.scaled_dot_product_attention(query, key, key, bias + mask).transpose(1, 2)
    torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("given", ["nothing", "options", "booleans", "numbers"])
def test_keys_that_a_sparse_attention_has_chosen(given):
    """DeepSeek's indexer hands them down to an attention other than `eager` and `sdpa`."""
    query, key = torch.randn(2, 4, 9, 8), torch.randn(2, 4, 9, 8)
    indices = torch.rand(2, 9, 9).argsort(-1)[..., :5].to(torch.int32)
    allowed = torch.zeros(2, 1, 9, 9, dtype=torch.bool)
    for batch in range(2):
        for row in range(9):
            allowed[batch, 0, row, indices[batch, row].long()] = True
    mask = None if given == "nothing" else made(RULES["causal"] if given != "booleans" else UNKNOWN["a user's"])
    if given == "numbers":
        mask = mask + 0
    if mask is not None:
        allowed &= made(RULES["causal"] if given != "booleans" else UNKNOWN["a user's"]) == 0
    rows = allowed.any(-1)[:, 0]
    got, _ = ours.attend(torch.nn.Module(), query, key, key, mask, indices=indices)
    wanted = torch.nn.functional.scaled_dot_product_attention(query, key, key, allowed).transpose(1, 2)
    torch.testing.assert_close(got[rows], wanted[rows])
    assert rows.any() and not allowed.all()


@pytest.mark.parametrize("attribute", [None, True, False])
def test_without_a_mask_a_row_sees_every_key(attribute):
    """As in `eager`, whatever the module's `is_causal`, which sdpa takes for True where there is none."""
    module, query, key = torch.nn.Module(), torch.randn(2, 4, 3, 8), torch.randn(2, 4, 9, 8)
    if attribute is not None:
        module.is_causal = attribute
    got, _ = ours.attend(module, query, key, key, None)
    torch.testing.assert_close(got, torch.nn.functional.scaled_dot_product_attention(query, key, key).transpose(1, 2))


def test_causal_by_the_argument_of_a_call():
    """As sdpa has it: with more keys than rows a static cache is being filled."""
    query, key = torch.randn(2, 4, 3, 8), torch.randn(2, 4, 9, 8)
    got, _ = ours.attend(torch.nn.Module(), query, key, key, None, is_causal=True)
    wanted = torch.nn.functional.scaled_dot_product_attention(query, key, key, is_causal=True).transpose(1, 2)
    torch.testing.assert_close(got, wanted)


def test_what_it_cannot_do_is_an_error_that_names_it(model):
    model.set_attn_implementation("attnc")
    layer = model.layers[0].self_attn
    x = torch.zeros(2, 4, 9, 8)

    def refused(name, mask=None, query=x, **given):
        with pytest.raises(ValueError, match=name):
            ours.attend(layer, query, x, x, mask, **given)

    refused("dropout", dropout=0.1)
    refused("block_indices", block_indices=x)
    refused("sinks", sinks=x)
    refused("cu_seq_lens_q", cu_seq_lens_q=torch.tensor([0, 4, 9]))
    refused(r"\(2, 9\)", torch.ones(2, 9, dtype=torch.bool))
    refused("int64", torch.ones(2, 1, 9, 9, dtype=torch.int64))
    refused("does not fit", torch.ones(2, 1, 9, 8, dtype=torch.bool))
    refused("does not fit", mask=made(CAUSAL, "static cache"))
    refused("meta", query=x.to("meta"))
    ours.attend(layer, x, x, x, None, use_cache=True, num_items_in_batch=torch.tensor(1), block_indices=None)
