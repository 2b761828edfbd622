"""Models of transformers with attnc as their attention: what `eager` gives, within honest rounding."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import ml_dtypes
import numpy as np
import pytest

from attnc.testing import assert_within

pytestmark = pytest.mark.peers
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from attnc.integrations import transformers as ours  # noqa: E402

SMALL = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 64, "vocab_size": 99}
GROUPED = {**SMALL, "num_key_value_heads": 2}
DEEP = {**GROUPED, "head_dim": 8, "sliding_window": 4}
TOKENS = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
HALVES = {f"{side}_{what}": size for side in ("encoder", "decoder")
          for what, size in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 64))}
MODELS = {  # what it stands for: grouped heads; a window; softcap; sinks; ...
    "Llama": ("LlamaForCausalLM", GROUPED),
    "Mistral": ("MistralForCausalLM", {**GROUPED, "sliding_window": 4}),
    "Gemma2": ("Gemma2ForCausalLM", {**DEEP, "attn_logit_softcapping": 2.0}),
    "GptOss": ("GptOssForCausalLM", {**DEEP, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "GPT2": ("GPT2LMHeadModel", {"n_embd": 32, "n_head": 4, "n_layer": 2, "vocab_size": 99, "n_positions": 64}),
    "Bert": ("BertForMaskedLM", SMALL),
    "T5": ("T5ForConditionalGeneration", {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4,
                                          "vocab_size": 99, "decoder_start_token_id": 3}),
    "ViT": ("ViTModel", {**SMALL, "image_size": 32, "patch_size": 8}),
    "Whisper": ("WhisperForConditionalGeneration", {
        **HALVES, "d_model": 32, "vocab_size": 99, "num_mel_bins": 8, "max_source_positions": 16,
        "max_target_positions": 64, "decoder_start_token_id": 3, "begin_suppress_tokens": None,
        "tie_word_embeddings": False}),
}
WRITERS = [name for name in MODELS if name not in ("Bert", "ViT")]
PADDED = [name for name in MODELS if name not in ("ViT", "Whisper")]
LENGTH = 12


@pytest.fixture(scope="module", autouse=True)
def registered():
    """One thread: on busy processors torch's threads take ten times as long for models this small."""
    assert ours.register() == "attnc"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


_made = {}


def model_of(name, dtype=torch.float32, attention="attnc"):
    """The model with weights large enough that its rows of attention differ; the same ones for every dtype."""
    if (name, dtype) not in _made:
        class_name, options = MODELS[name]
        config = getattr(transformers, name + "Config")(**options, **TOKENS, **NO_DROPOUT.get(name, {}))
        torch.manual_seed(0)
        model = getattr(transformers, class_name)._from_config(config, attn_implementation="eager")
        if name == "GptOss":
            model.set_experts_implementation("eager")   # the others know no float64
        with torch.no_grad():
            for part, weight in model.named_parameters():
                if weight.ndim > 1 or "sinks" in part:
                    weight.normal_(0, 0.3)
        _made[name, dtype] = model.to(dtype)
    model = _made[name, dtype].eval()
    model.set_attn_implementation(attention)
    return model


NO_DROPOUT = {
    "GPT2": {"attn_pdrop": 0, "resid_pdrop": 0, "embd_pdrop": 0}, "T5": {"dropout_rate": 0}, "Whisper": {"dropout": 0},
    "Bert": {"attention_probs_dropout_prob": 0, "hidden_dropout_prob": 0}}


def inputs_of(name, padding=None, dtype=torch.float32):
    """The inputs of a forward call, and which tokens of them count."""
    random = torch.Generator().manual_seed(1)
    tokens = torch.randint(4, 99, (2, LENGTH), generator=random)
    counts = torch.ones(2, LENGTH, dtype=torch.long)
    if padding == "left":
        counts[0, :5] = 0
    elif padding == "right":
        counts[0, -5:] = 0
    if name == "ViT":
        return {"pixel_values": torch.randn(2, 3, 32, 32, generator=random).to(dtype)}, None
    if name == "Whisper":
        features = torch.randn(2, 8, 32, generator=random).to(dtype)
        return {"input_features": features, "decoder_input_ids": tokens}, None
    found = {"input_ids": tokens, "attention_mask": counts} if padding else {"input_ids": tokens}
    return {**found, "decoder_input_ids": tokens[:, :7]} if name == "T5" else found, counts.bool()


def results_of(model, inputs, counts):
    """Every tensor that the model gives, by name; the rows of padding left out."""
    with torch.no_grad():
        output = model(**inputs, output_attentions=True, use_cache=False)
    found = {}
    for name, given in output.items():
        for layer, x in enumerate(given if isinstance(given, tuple) else (given,)):
            rows = x.transpose(1, 2) if name.endswith("attentions") else x
            padded = counts is not None and rows.shape[:2] == counts.shape
            found[f"{name} {layer}"] = (rows[counts] if padded else rows).to(torch.float64).numpy()
    return found


def assert_as_eager(name, inputs, counts, dtype=torch.float32):
    """Within twice the distance of `eager` from `eager` in float64."""
    wide = {key: x.double() if x.is_floating_point() else x for key, x in inputs.items()}
    exact = results_of(model_of(name, torch.float64, "eager"), wide, counts)
    honest = results_of(model_of(name, dtype, "eager"), inputs, counts)
    got = results_of(model_of(name, dtype, "attnc"), inputs, counts)
    assert got.keys() == exact.keys() and any("attentions" in key for key in got)
    for key in exact:
        assert_within(got[key], exact[key], honest[key], scale=np.abs(exact[key]).max(),
                      eps_dtype="float32" if dtype == torch.float32 else ml_dtypes.bfloat16, name=f"{name}: {key}")


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_attentions(name, isa):
    assert_as_eager(name, *inputs_of(name))


@pytest.mark.parametrize("padding", ["left", "right"])
@pytest.mark.parametrize("name", PADDED)
def test_padding(name, padding):
    assert_as_eager(name, *inputs_of(name, padding))


@pytest.mark.parametrize("name", MODELS)
def test_bfloat16(name):
    padding = "left" if name in PADDED else None
    assert_as_eager(name, *inputs_of(name, padding, torch.bfloat16), torch.bfloat16)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("name", WRITERS)
def test_twenty_tokens(name, beams, cache):
    inputs, _ = inputs_of(name, "left")
    inputs.pop("decoder_input_ids", None)
    how = {"max_new_tokens": 20, "num_beams": beams, "do_sample": False, "use_cache": True}
    if cache == "static":
        how["cache_implementation"] = "static"
    eager, found = (model_of(name, attention=kind).generate(**inputs, **how) for kind in ("eager", "attnc"))
    assert found.shape[1] >= 20 and len(found.unique()) > 4
    assert found.tolist() == eager.tolist()
