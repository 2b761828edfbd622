"""Every model class of transformers, as small as it can be made, and inputs that it takes."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import importlib
import inspect
import os
import pathlib
import re

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel

BATCH, LENGTH, VOCABULARY = 2, 9, 99
WORDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3}


def _patterns(sizes: dict) -> list:
    return [(re.compile(names), size) for names, size in sizes.items()]


COUNTS = _patterns({        # at any width
    r"((num|n|encoder|decoder|text|vision|image)_?\w*_?)?(layers|layer|blocks|depth)": 2,
    r"vocab_size\w*": VOCABULARY, r"image_size|img_size|input_size": 32, r"patch_size": 8, r"max_source_positions": 32,
    r"num_queries": 8, r"(num|n)_\w*experts|num_experts\w*|moe_num_experts": 4, r"n_group|topk_group": 1,
    r"num_experts_per_tok(en)?|moe_top_?k|moe_k|top_k|topk|experts_top_k|num_selected_experts|index_topk": 2,
    r"\w+_token_(id|index)": VOCABULARY - 1, r"num_mel_bins|n_mels": 16,
})
WIDTHS = _patterns({        # for a width of 32; in proportion for others
    r"hidden_size|d_model|n_embd|embed_dim|embedding_size|emb_dim|dim|hidden_dim|n_embed|width|channels|projection_dim"
    r"|(text|vision|audio|image|encoder|decoder)_(embed_dim|hidden_size)|output_dim|out_hidden_size|d_latents": 32,
    r"intermediate_size|d_ff|d_inner|n_inner|ffn_dim|(en|de)coder_ffn_dim|ffn_hidden_size|\w*_intermediate_size"
    r"|dim_feedforward|mlp_dim": 64,
    r"(global_)?head_dim|attention_head_dim|d_kv|attention_head_size|qk_(rope|nope)_head_dim|v_head_dim|rotary_dim"
    r"|index_head_dim": 8,
    r"(kv|q)_lora_rank": 16,
})
HEADS = _patterns({
    r"num_attention_heads|n_head|n_heads|num_heads|(en|de)coder_attention_heads|attention_heads|index_n_heads": 4,
    r"num_key_value_heads|num_kv_heads|n_kv_heads|multi_query_heads": 2,
})
SERIES = {"prediction_length": 4, "context_length": 4, "lags_sequence": [1, 2], "num_time_features": 1}
SPECIAL = {     # what a configuration must say itself
    "AutoformerConfig": SERIES, "InformerConfig": SERIES, "TimeSeriesTransformerConfig": SERIES,
    "BambaConfig": {"attn_layer_indices": [1]}, "JambaConfig": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "EsmConfig": {"vocab_size": VOCABULARY}, "GPTNeoConfig": {"attention_types": [[["global", "local"], 1]]},
    "BridgeTowerVisionConfig": {"hidden_size": 64}, "GraniteMoeHybridConfig": {"layer_types": ["mamba", "attention"]},
    "DeepseekV2Config": {"num_experts_per_tok": 2}, "NemotronConfig": {"num_key_value_heads": 2},
    "TimesFm2_5Config": {"context_length": 6, "patch_length": 2},       # no patch is padding
}


def classes() -> list[type[PreTrainedModel]]:
    """Every class of a model that transformers has, by name."""
    root = pathlib.Path(transformers.__path__[0], "models")
    for file in sorted(root.glob("*/modeling_*.py")):
        with contextlib.suppress(ImportError):
            importlib.import_module(f"transformers.models.{file.parent.name}.{file.stem}")

    def below(cls):
        for each in cls.__subclasses__():
            yield each
            yield from below(each)

    found = {cls for cls in below(PreTrainedModel) if cls.__module__.startswith("transformers.models.")}
    found = {cls for cls in found if cls.config_class and cls.forward is not torch.nn.Module.forward}
    return sorted(found, key=lambda cls: (cls.__module__, cls.__name__))


def _size(name: str, now: int, width: int | None) -> int:
    for table, factor in ((COUNTS, 1), (WIDTHS if width else (), (width or 32) // 32), (HEADS if width else (), 1)):
        for pattern, size in table:
            if pattern.fullmatch(name):
                return min(now, size * factor)
    return now


def small(config, width: int | None = 32, mrope: bool = False):
    """A configuration like this one with few layers, words and pixels, and where a width is given no wider.

    With `mrope` its rotary embeddings are cut for three axes, as those of models that see have them.
    """
    given = {}
    alike = {"num_key_value_heads": "num_attention_heads"}      # in a model whose heads are not grouped
    if any(getattr(config, name, 0) != getattr(config, other, 1) for name, other in alike.items()):
        alike = {}
    kinds = list(dict.fromkeys(getattr(config, "layer_types", None) or ()))
    fields = {field.name for field in dataclasses.fields(config) if field.init} - {"id2label", "label2id"}
    for name in fields:
        try:
            now = getattr(config, name, None)
        except RuntimeError:        # one value for each layer
            continue
        if isinstance(now, PreTrainedConfig):
            given[name] = small(now, width, mrope)
        elif name in WORDS and not isinstance(now, (list, tuple)) and (now is not None or name == "pad_token_id"):
            given[name] = WORDS[name]
        elif isinstance(now, int) and not isinstance(now, bool):
            given[name] = _size(alike.get(name, name), now, width)
        elif isinstance(now, (list, tuple)) and len(now) == 2 and name in ("image_size", "img_size", "patch_size"):
            given[name] = type(now)(_size(name, each, width) for each in now)
        elif isinstance(now, float) and "drop" in name:
            given[name] = 0.0
        elif name == "head_dim" and width:
            given[name] = width // 4
        elif name == "rope_parameters" and mrope:
            turned = int(width // 4 * now.get("partial_rotary_factor", 1)) // 2
            given[name] = {**now, "mrope_section": [turned - 2 * (turned // 4), turned // 4, turned // 4]}
    if kinds and "layer_types" in fields:       # a layer of each kind
        given["layer_types"] = (kinds * 2)[:max(2, len(kinds))]
        given.update(dict.fromkeys(fields & {"num_hidden_layers", "num_layers", "n_layer"}, len(given["layer_types"])))
    given = {name: x for name, x in given.items() if x is not vars(config).get(name)}
    return type(config)(**{**given, **SPECIAL.get(type(config).__name__, {})})


@functools.cache
def configurations(cls: type[PreTrainedConfig]) -> tuple[list, str]:
    """Configurations from small to large, and why there is none of some width."""
    found, reasons = [], []
    for width, mrope in ((32, False), (32, True), (64, False), (None, False)):
        try:
            found.append(small(cls(), width, mrope))
        except Exception as error:
            reasons.append(f"{type(error).__name__}: {error}")
    return found, " | ".join(dict.fromkeys(reasons))


def made(cls: type[PreTrainedModel], config: PreTrainedConfig, attention: str) -> PreTrainedModel:
    """A model with random weights, the same for each attention."""
    torch.manual_seed(0)
    return cls._from_config(copy.deepcopy(config), attn_implementation=attention).eval()


def enlarge(model: PreTrainedModel) -> None:
    """Give it weights so large that its rows of attention differ."""
    torch.manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 2 and "embed" not in name:
                weight.normal_(0, 1.5 * weight.shape[-1] ** -0.5)
            elif weight.ndim > 1:
                weight.normal_(0, 0.3)


class Inputs:
    """Random inputs by name of argument, as a model's configuration has them."""

    def __init__(self, model: PreTrainedModel, padding: str | None, turned: bool):
        self.config, self.turned, self.random = model.config, turned, torch.Generator().manual_seed(1)
        self.attention_mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
        if padding:
            self.attention_mask[0, slice(-3, None) if padding == "right" else slice(3)] = 0
        self.input_ids = torch.randint(4, 90, (BATCH, LENGTH), generator=self.random)
        self.input_ids[:, 5] = WORDS["eos_token_id"]
        if type(model).__name__.endswith("MultipleChoice"):
            self.input_ids = self.input_ids[:, None].repeat(1, 2, 1)
            self.attention_mask = self.attention_mask[:, None].repeat(1, 2, 1)
        self.decoder_input_ids = self.input_ids[:, :7]
        size = self.number("hidden_size", "d_model", default=32)
        self.inputs_embeds = self.hidden_states = self.floats(BATCH, LENGTH, size)
        self.encoder_hidden_states = self.floats(BATCH, 5, size)
        self.query_embeds = self.floats(BATCH, 4, size)
        self.bbox = torch.randint(0, 99, (BATCH, LENGTH, 4), generator=self.random).sort(-1).values
        self.pixel_values = self.image = self.images()
        self.pixel_values_videos = self.floats(BATCH, 4, 3, 32, 32)
        self.pixel_mask = torch.ones(BATCH, *self.pixel_values.shape[-2:], dtype=torch.long)
        self.input_features = self.sound(2 * self.number("max_source_positions", default=32))
        spectrogram = self.number("max_length", default=None) or 64, self.number("num_mel_bins", default=1)
        self.input_values = self.floats(BATCH, *(spectrogram if turned else [1600]))
        self.past_values, self.past_time_features = self.floats(BATCH, 6), self.floats(BATCH, 6, 1)
        self.past_observed_mask = torch.ones(BATCH, 6)
        self.future_values, self.future_time_features = self.floats(BATCH, 4), self.floats(BATCH, 4, 1)
        self.grid_thw = self.image_grid_thw = torch.tensor([[1, 4, 4]] * BATCH)
        self.aspect_ratio_ids = torch.ones(BATCH, 1, dtype=torch.long)
        self.aspect_ratio_mask = torch.ones(BATCH, 1, 4, dtype=torch.long)
        self.visual_feats = self.floats(BATCH, 4, self.number("visual_feat_dim", default=8))
        self.visual_pos = torch.rand(BATCH, 4, 4, generator=self.random)

    def floats(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.random)

    def number(self, *names, default):
        for config in (self.config, *(getattr(self.config, name, None) for name in self.config.sub_configs)):
            for name in names:
                if getattr(config, name, None) is not None:
                    return getattr(config, name)
        return default

    def images(self) -> torch.Tensor:
        size = self.number("image_size", "img_size", "input_size", default=64)
        size = tuple(size.values())[:2] if isinstance(size, dict) else size
        sides = tuple(size)[-2:] if isinstance(size, (list, tuple)) else (size, size)
        return self.floats(BATCH, self.number("num_channels", "in_channels", "in_chans", default=3), *sides)

    def sound(self, length: int) -> torch.Tensor:
        bins = self.number("num_mel_bins", "feature_size", "input_feat_per_channel", "feature_projection_input_dim",
                           "n_mels", "input_dim", default=128)
        return self.floats(BATCH, length, bins) if self.turned else self.floats(BATCH, bins, length)


def variants_of(model: PreTrainedModel) -> list[tuple]:
    """What may be added to the inputs that are needed or taken away, and whether sound has its axes turned."""
    names = inspect.signature(model.forward).parameters.keys()
    more = [(), *([("pixel_values",), ("-input_ids", "pixel_values")] if "pixel_values" in names else []),
            *([("-decoder_input_ids",)] if model.config.is_encoder_decoder else [])]
    return [(each, turned) for each in more
            for turned in ((False, True) if names & {"input_features", "input_values"} else (False,))]


def inputs_of(model: PreTrainedModel, padding: str | None = None, variant=((), False)) -> dict:
    """Inputs for what `forward` cannot do without, and for what the variant adds or takes away."""
    more, turned = variant
    parameters = inspect.signature(model.forward).parameters
    given = vars(Inputs(model, padding, turned))
    wanted = {name for name, p in parameters.items()
              if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
    wanted |= {model.main_input_name, "input_ids", "bbox", *more}
    if model.config.is_encoder_decoder:
        wanted.add("decoder_input_ids")
    if "input_ids" in parameters:
        wanted.discard("inputs_embeds")
    wanted -= {name.removeprefix("-") for name in more if name.startswith("-")}
    found = {name: given[name] for name in wanted & parameters.keys() & given.keys()}
    if found.keys() & {"input_ids", "inputs_embeds"} and "attention_mask" in parameters:
        found["attention_mask"] = given["attention_mask"]
    return found
