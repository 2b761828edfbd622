"""Families of models, unmodified: captured weights are those of the same model with its fused attention off."""

import copy
import json
import os

import numpy as np
import pytest

pytestmark = pytest.mark.peers
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

from attnc.integrations.torch import capture  # noqa: E402

TOLERANCE = 1e-6
SMALL = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
TOKENS = {"vocab_size": 60, "pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 3}
IMAGE = {"image_size": 32, "patch_size": 8}
RANDOM = torch.Generator().manual_seed(0)
IDS = torch.randint(4, 60, (2, 19), generator=RANDOM)
PADDED = torch.ones(2, 19, dtype=torch.long)
PADDED[1, 14:] = 0
PIXELS = torch.randn(2, 3, 32, 32, generator=RANDOM)
SPEECH = torch.randn(2, 8, 40, generator=RANDOM)
WHISPER = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
           "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "num_mel_bins": 8,
           "max_source_positions": 20, "max_target_positions": 32, "decoder_start_token_id": 2,
           "begin_suppress_tokens": None, "suppress_tokens": None}
CLIP_TEXT = {**SMALL, **TOKENS, "max_position_embeddings": 32}
FAMILIES = {  # class, options of its config, inputs
    "Whisper": ("WhisperForConditionalGeneration", {**WHISPER, **TOKENS},
                {"input_features": SPEECH, "decoder_input_ids": IDS}),
    "ViT": ("ViTModel", {**SMALL, **IMAGE}, {"pixel_values": PIXELS}),
    "Dinov2": ("Dinov2Model", {**SMALL, **IMAGE}, {"pixel_values": PIXELS}),
    "CLIP": ("CLIPModel", {"text_config": CLIP_TEXT, "vision_config": {**SMALL, **IMAGE}, "projection_dim": 16},
             {"input_ids": IDS, "attention_mask": PADDED, "pixel_values": PIXELS}),
    "Esm": ("EsmModel", {**SMALL, **TOKENS, "max_position_embeddings": 40, "position_embedding_type": "rotary"},
            {"input_ids": IDS, "attention_mask": PADDED}),
    "T5": ("T5ForConditionalGeneration", {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4,
                                          **TOKENS, "decoder_start_token_id": 1},
           {"input_ids": IDS, "attention_mask": PADDED, "decoder_input_ids": IDS[:, :7]}),
    "Qwen3": ("Qwen3ForCausalLM", {**SMALL, **TOKENS, "num_key_value_heads": 2, "head_dim": 12}, {"input_ids": IDS}),
    "Bert": ("BertModel", {**SMALL, **TOKENS, "max_position_embeddings": 32},
             {"input_ids": IDS, "attention_mask": PADDED}),
}


def spread(model):
    """Weights large enough that rows of attention differ, in float64."""
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.normal_(0, 0.3)
    return model.double().eval()


def attentions_of(output):
    """The matrices of a model's output, in the order of its calls of attention."""
    parts = [output.get(name) for name in ("text_model_output", "vision_model_output")]
    if any(parts):
        return [x for part in parts[::-1] for x in part.attentions]
    if "encoder_attentions" in output:
        pairs = zip(output.decoder_attentions, output.cross_attentions, strict=True)
        return [*output.encoder_attentions, *(x for pair in pairs for x in pair)]
    return list(output.attentions)


def report(name, records, wanted):
    """The largest difference; kept as a line of JSON where the environment names a file."""
    assert len(records) == len(wanted) > 0
    worst = 0.0
    for record, matrix in zip(records, wanted, strict=True):
        assert record.shape == tuple(matrix.shape)
        worst = max(worst, float(np.abs(record.weights.dense() - np.asarray(matrix)).max()))
    if os.environ.get("ATTNC_FAMILIES"):
        with open(os.environ["ATTNC_FAMILIES"], "a") as file:
            print(json.dumps([name, len(records), sorted({record.shape for record in records}), worst]), file=file)
    assert worst < TOLERANCE
    assert max(float(np.asarray(matrix).max()) for matrix in wanted) > 0.5      # rows that say something


@pytest.mark.parametrize("name", FAMILIES)
def test_models_of_transformers(name):
    class_name, options, inputs = FAMILIES[name]
    inputs = {key: x.double() if x.is_floating_point() else x for key, x in inputs.items()}
    config = getattr(transformers, name + "Config")(**options)
    models = [spread(getattr(transformers, class_name)._from_config(copy.deepcopy(config), attn_implementation=kind))
              for kind in ("eager", "sdpa")]
    models[1].load_state_dict(models[0].state_dict())
    with torch.no_grad():
        wanted = models[0](**inputs, output_attentions=True)
        plain = models[1](**inputs)
        with capture(models[1], "weights") as records:
            output = models[1](**inputs)
    assert torch.equal(output[0], plain[0])
    report(name, records, attentions_of(wanted))


def test_unet_of_diffusers(monkeypatch):
    diffusers = pytest.importorskip("diffusers")
    from diffusers.models.attention_processor import Attention, AttnProcessor

    model = spread(diffusers.UNet2DConditionModel(
        sample_size=8, in_channels=4, out_channels=4, block_out_channels=(16, 32), layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=4, norm_num_groups=4, cross_attention_dim=12))
    inputs = torch.randn(2, 4, 8, 8).double(), torch.tensor(3), torch.randn(2, 5, 12).double()
    with torch.no_grad():
        plain = model(*inputs).sample
        with capture(model, "weights") as records:
            output = model(*inputs).sample
        assert torch.equal(output, plain)
        found, theirs = [], Attention.get_attention_scores

        def scores(self, query, key, attention_mask=None):
            found.append(theirs(self, query, key, attention_mask))
            return found[-1]

        monkeypatch.setattr(Attention, "get_attention_scores", scores)
        model.set_attn_processor(AttnProcessor())
        model(*inputs)
    report("UNet2DCondition", records, [x.unflatten(0, (2, -1)) for x in found])
    assert {record.layer.rsplit(".", 1)[-1] for record in records} == {"attn1", "attn2"}


def test_openai_whisper():
    whisper = pytest.importorskip("whisper.model")
    sizes = whisper.ModelDimensions(n_mels=8, n_audio_ctx=20, n_audio_state=32, n_audio_head=4, n_audio_layer=2,
                                    n_vocab=60, n_text_ctx=32, n_text_state=32, n_text_head=4, n_text_layer=2)
    model, found = spread(whisper.Whisper(sizes)).float(), []      # it has no float64
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(0.7)
        plain = model(SPEECH, IDS)
        with capture(model, "weights") as records:
            output = model(SPEECH, IDS)
        assert torch.equal(output, plain)
        hooks = [module.register_forward_hook(lambda module, args, results: found.append(results[1].softmax(-1)))
                 for module in model.modules() if isinstance(module, whisper.MultiHeadAttention)]
        with whisper.disable_sdpa():
            model(SPEECH, IDS)
    for hook in hooks:
        hook.remove()
    report("openai-whisper", records, found)
    assert [record.layer for record in records][:2] == ["encoder.blocks.0.attn", "encoder.blocks.1.attn"]


class Table(nn.Module):
    """As TabPFN: cells attend over the columns of their row, then over the labelled rows of their column."""

    def __init__(self, width=24, heads=3, layers=2):
        super().__init__()
        self.heads, self.fused = heads, True
        self.layers = nn.ModuleList([nn.ModuleDict({name: nn.Linear(width, 3 * width) for name in ("columns", "rows")})
                                     for _ in range(layers)])
        self.weights = []

    def attend(self, project, x, labelled):
        query, key, value = project(x).unflatten(-1, (3, self.heads, -1)).permute(3, 0, 1, 4, 2, 5)
        key, value = key[..., :labelled, :], value[..., :labelled, :]
        if self.fused:
            found = functional.scaled_dot_product_attention(query, key, value)
        else:
            self.weights.append((query @ key.mT / query.shape[-1] ** 0.5).softmax(-1))
            found = self.weights[-1] @ value
        return x + found.transpose(-2, -3).flatten(-2)

    def forward(self, cells, labelled):         # (batch, rows, columns, width)
        for layer in self.layers:
            cells = self.attend(layer["columns"], cells, cells.shape[2])
            cells = self.attend(layer["rows"], cells.transpose(1, 2), labelled).transpose(1, 2)
        return cells


def test_table_model():
    model, cells = spread(Table()), torch.randn(2, 9, 5, 24).double()
    with torch.no_grad():
        plain = model(cells, 6)
        with capture(model, "weights") as records:
            assert torch.equal(model(cells, 6), plain)
        model.fused = False
        model(cells, 6)
    report("table model", records, model.weights)


def test_encoder_of_torch():
    """In evaluation, in its fused layer, and in training with grad."""
    model = spread(nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 48, batch_first=True, dropout=0.0), 3))
    x = torch.randn(2, 9, 32).double()
    wanted, layers = [], model.layers
    hidden = x
    for layer in layers:
        wanted.append(layer.self_attn(hidden, hidden, hidden, average_attn_weights=False)[1].detach())
        hidden = layer(hidden)
    for training in (True, False):
        model.train(training)
        with torch.set_grad_enabled(training), capture(model, "weights") as records:
            model(x)
        report(f"torch encoder, {'training' if training else 'fused'}", records, wanted)
