"""Models with an attention of their own: what they compute under attnc, what is refused, and who says so."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import pytest

pytestmark = pytest.mark.peers
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from every_model import distance, run  # noqa: E402
from tiny import inputs_of, made, small  # noqa: E402
from torch import nn  # noqa: E402

from attnc.integrations import transformers as ours  # noqa: E402

OWN = {"MPNetModel": "MPNetConfig", "BloomForCausalLM": "BloomConfig", "MptForCausalLM": "MptConfig",
       "XGLMForCausalLM": "XGLMConfig", "RoFormerModel": "RoFormerConfig", "MegatronBertModel": "MegatronBertConfig"}
TABLES = {"FalconForCausalLM": "FalconConfig", "GPTNeoForCausalLM": "GPTNeoConfig", "SamVisionModel": "SamVisionConfig",
          "Data2VecVisionModel": "Data2VecVisionConfig", "GitForCausalLM": "GitConfig"}
TOLERANCE = 1e-4    # of float32 through two layers; a mask that is lost costs 0.1 and more


@pytest.fixture(scope="module", autouse=True)
def registered():
    assert ours.register() == ours.register() == "attnc"


def config_of(name):
    return small(getattr(transformers, name)())


def tiny(name, config, kind):
    return made(getattr(transformers, name), config_of(config), kind)


def compared(model, other, padding):
    """How far two models of the same weights are from each other."""
    other.load_state_dict(model.state_dict())
    inputs = inputs_of(model, padding)
    return distance(run(other, inputs), run(model, inputs), inputs.get("attention_mask"), padding)


@pytest.mark.filterwarnings("ignore:.*attention of its own")      # of its base model, too
@pytest.mark.parametrize("padding", ["left", "right", None])
@pytest.mark.parametrize("name", OWN)
def test_its_own_attention_adds_what_eager_adds(name, padding):
    model = tiny(name, OWN[name], "eager")
    with pytest.warns(UserWarning, match=f"{name}.* attention of its own"):
        other = tiny(name, OWN[name], "attnc")
    assert compared(model, other, padding) == 0
    if padding == "right":      # which is not because the mask did not matter
        inputs = inputs_of(model, padding)
        without = run(model, {name: x for name, x in inputs.items() if name != "attention_mask"})
        assert distance(run(other, inputs), without, None, None) > 1e-3


@pytest.mark.filterwarnings("ignore:.*attention of its own")
@pytest.mark.parametrize("name", ["MPNetModel", "BloomForCausalLM"])
def test_no_capture_of_it(name):
    model = tiny(name, OWN[name], "attnc")
    with pytest.raises(ValueError, match=f"{name} never called attention"), torch.no_grad(), ours.capture(model):
        model(torch.arange(4, 9)[None])


def test_no_capture_of_a_model_that_did_not_run():
    model = tiny("LlamaModel", "LlamaConfig", "attnc")
    with pytest.raises(ValueError, match="LlamaModel never called attention"), ours.capture(model):
        pass
    with pytest.raises(KeyError, match="another error"), ours.capture(model):     # is not hidden
        raise KeyError("another error")


@pytest.mark.parametrize("name", ["MPNetModel", "FalconForCausalLM"])
def test_set_later_it_stays_eager(name):
    """transformers says so in its log."""
    model = tiny(name, {**OWN, **TABLES}[name], "eager")
    model.set_attn_implementation("attnc")
    assert model.config._attn_implementation == "eager"
    with pytest.raises(ValueError, match=r"'eager'.*'attnc'"), ours.capture(model):
        pass


@pytest.mark.parametrize("name", TABLES)
def test_a_table_of_attentions_is_refused_by_name(name):
    family = name.removesuffix("ForCausalLM").removesuffix("Model")
    for _ in range(2):
        with pytest.raises(ValueError, match=rf"{family}\w*Attention is a model's own attention.*'eager'.*'attnc'"):
            tiny(name, TABLES[name], "attnc")
    assert tiny(name, TABLES[name], "eager").config._attn_implementation == "eager"


def test_a_table_of_attentions_keeps_what_was_made_of_it():
    """transformers takes the name for GIT, whose image encoder calls the interface."""
    model, other = (tiny("GitForCausalLM", "GitConfig", "eager") for _ in range(2))
    with pytest.warns(UserWarning, match="GitForCausalLM has an attention of its own, GitSelfAttention"):
        other.set_attn_implementation("attnc")
    assert other.config._attn_implementation == "attnc"
    assert compared(model, other, "right") < TOLERANCE


def test_another_name_is_still_missing_from_the_table():
    with pytest.raises(ValueError):
        tiny("FalconModel", "FalconConfig", "attnc")
    table = transformers.models.falcon.modeling_falcon.FALCON_ATTENTION_CLASSES
    assert isinstance(table, dict) and {"eager", "sdpa"} <= set(table)
    with pytest.raises(KeyError, match="flax"):
        table["flax"]


def test_parts_of_one_file_that_do_not_use_its_table_are_taken():
    model, other = (tiny("GitVisionModel", "GitVisionConfig", kind) for kind in ("eager", "attnc"))
    assert compared(model, other, None) < TOLERANCE


# A model from elsewhere: transformers knows nothing of it


class OwnSelfAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.heads, self.qkv = config.num_attention_heads, nn.Linear(config.hidden_size, 3 * config.hidden_size)

    def forward(self, x, mask):
        query, key, value = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        weights = (query @ key.mT / query.shape[-1] ** 0.5 + mask).softmax(-1)
        return (weights @ value).transpose(1, 2).flatten(2)


class OwnModel(transformers.LlamaPreTrainedModel):
    """One layer, whose mask comes from transformers and whose attention does not."""

    def __init__(self, config):
        super().__init__(config)
        self.embeddings, self.attention = nn.Embedding(config.vocab_size, config.hidden_size), OwnSelfAttention(config)
        self.post_init()

    def forward(self, input_ids, attention_mask=None):
        x = self.embeddings(input_ids)
        mask = transformers.masking_utils.create_causal_mask(self.config, x, attention_mask, None)
        return {"x": self.attention(x, mask)}


@pytest.mark.parametrize("padding", ["right", None])
def test_a_model_from_elsewhere(padding):
    model = made(OwnModel, config_of("LlamaConfig"), "eager")
    try:
        OwnModel._can_set_attn_implementation_cached_value = False     # asks the source of the class's file, this one
        with pytest.warns(UserWarning, match="OwnModel has an attention of its own"):
            other = made(OwnModel, config_of("LlamaConfig"), "attnc")
    finally:
        del OwnModel._can_set_attn_implementation_cached_value
    assert compared(model, other, padding) == 0
    inputs = inputs_of(model, padding)
    before = run(other, inputs)[".x"]
    inputs["input_ids"][:, -1] = 5
    np.testing.assert_array_equal(run(other, inputs)[".x"][:, :-1], before[:, :-1])      # causal


# Towers of one model with different attentions


def test_towers_by_name():
    config = small(transformers.LlavaConfig(vision_config={"model_type": "clip_vision_model"}))
    model = transformers.LlavaModel._from_config(
        config, attn_implementation={"": "sdpa", "text_config": "attnc", "vision_config": "eager"}).eval()
    assert model.language_model.config._attn_implementation == "attnc"
    assert model.vision_tower.config._attn_implementation == "eager"
    tokens = torch.arange(4, 12)[None]
    with torch.no_grad(), ours.capture(model, "entropy") as records:
        found = model(input_ids=tokens).last_hidden_state
        assert len(records) == 2 and all("language_model" in record.layer for record in records)
        model.set_attn_implementation("eager")
        torch.testing.assert_close(found, model(input_ids=tokens).last_hidden_state)
