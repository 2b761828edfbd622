"""Every model class of transformers, small, with inputs, and how far attnc's results are from those of `eager`."""

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
import signal

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel

LENGTH, VOCABULARY, BATCH = 9, 99, 2
LARGEST = 40e6      # weights of a model
WORDS = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3}
LAYERS = re.compile(r"(num|n|encoder|decoder|text|vision|image)_?\w*_?(layers|layer|blocks|depth)|depth")
WIDTHS = {re.compile(pattern): size for pattern, size in {      # for a width of 32
    r"hidden_size|d_model|n_embd|embed_dim|embedding_size|emb_dim|dim|hidden_dim|n_embed|width|channels"
    r"|projection_dim|(text|vision|audio|image|encoder|decoder)_(embed_dim|hidden_size)|output_dim|out_hidden_size": 32,
    r"intermediate_size|d_ff|d_inner|n_inner|ffn_dim|(en|de)coder_ffn_dim|ffn_hidden_size|\w*_intermediate_size"
    r"|dim_feedforward|mlp_dim": 64,
    r"num_attention_heads|n_head|n_heads|num_heads|(en|de)coder_attention_heads|attention_heads": 4,
    r"num_key_value_heads|num_kv_heads|n_kv_heads|multi_query_heads": 2,
    r"(global_)?head_dim|attention_head_dim|d_kv|attention_head_size": 8,
}.items()}
COUNTS = {re.compile(pattern): size for pattern, size in {
    r"num_(local_|routed_)?experts|n_routed_experts|moe_num_experts": 4, r"vocab_size\w*": VOCABULARY,
    r"image_size|img_size|input_size": 32, r"patch_size": 8, r"max_source_positions": 32, r"num_queries": 8,
}.items()}


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
    found = {cls for cls in found if not cls.__name__.endswith("PreTrainedModel") and cls.config_class}
    return sorted(found, key=lambda cls: (cls.__module__, cls.__name__))


def small(value, width: int | None):
    """A configuration like this one with few layers, words and pixels, and where a width is given no wider."""
    given = {}
    for field in dataclasses.fields(value):
        name, now = field.name, getattr(value, field.name, None)
        if not field.init or name in ("id2label", "label2id"):
            continue
        if isinstance(now, PreTrainedConfig):
            given[name] = small(now, width)
        elif name in WORDS and not isinstance(now, (list, tuple)) and (now is not None or name == "pad_token_id"):
            given[name] = WORDS[name]
        elif isinstance(now, int) and not isinstance(now, bool):
            found = size_of(name, now, width)
            if found < now:
                given[name] = found
        elif isinstance(now, (list, tuple)) and len(now) == 2 and name in ("image_size", "img_size", "patch_size"):
            given[name] = type(now)(size_of(name, each, width) for each in now)
        elif isinstance(now, float) and "drop" in name:
            given[name] = 0.0
    return type(value)(**given)


def size_of(name: str, now: int, width: int | None) -> int:
    if LAYERS.fullmatch(name):
        return min(now, 2)
    if name.endswith(("_token_id", "_token_index")):
        return min(now, VOCABULARY - 1)
    for table, factor in ((COUNTS, 1), (WIDTHS if width else {}, (width or 32) // 32)):
        for pattern, size in table.items():
            if pattern.fullmatch(name):
                heads = "heads" in name
                return min(now, size if heads else size * factor)
    return now


@functools.cache
def configurations(cls: type[PreTrainedConfig]) -> list[PreTrainedConfig]:
    """From small to large: the ones that can be made."""
    found = []
    for width in (32, 64, None):
        with contextlib.suppress(Exception):
            found.append(small(cls(), width))
    return found


def made(cls, config, kind: str):
    config = copy.deepcopy(config)
    torch.manual_seed(0)
    return cls._from_config(config, attn_implementation=kind).eval()


def enlarge(model) -> None:
    """Weights large enough that the rows of attention differ."""
    torch.manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 2 and "embed" not in name:
                weight.normal_(0, 1.5 * weight.shape[-1] ** -0.5)
            elif weight.ndim > 1:
                weight.normal_(0, 0.3)


def number(config, *names, default):
    for each in (config, *(getattr(config, sub, None) for sub in config.sub_configs)):
        for name in names:
            value = getattr(each, name, None)
            if value is not None:
                return value
    return default


def inputs_of(model, dtype, padding="right") -> dict:
    """Random inputs for what `forward` cannot do without."""
    config, random = model.config, torch.Generator().manual_seed(1)
    parameters = inspect.signature(model.forward).parameters
    counts = torch.ones(BATCH, LENGTH, dtype=torch.long)
    if padding == "right":
        counts[0, -3:] = 0
    elif padding == "left":
        counts[0, :3] = 0
    tokens = torch.randint(4, 90, (BATCH, LENGTH), generator=random)
    main = model.main_input_name
    found = {}

    def floats(*shape):
        return torch.randn(*shape, generator=random).to(dtype)

    def image():
        size = number(config, "image_size", "img_size", "input_size", default=64)
        height, width_ = size if isinstance(size, (list, tuple)) else (size, size)
        return floats(BATCH, number(config, "num_channels", "in_channels", "in_chans", default=3), height, width_)

    hidden = number(config, "hidden_size", "d_model", default=32)
    makers = {
        "input_ids": lambda: tokens, "pixel_values": image, "hidden_states": lambda: floats(BATCH, LENGTH, hidden),
        "inputs_embeds": lambda: floats(BATCH, LENGTH, hidden),
        "input_features": lambda: floats(BATCH, number(config, "num_mel_bins", "feature_size", default=80), 2 * number(
            config, "max_source_positions", default=50)),
        "input_values": lambda: floats(BATCH, 1600), "decoder_input_ids": lambda: tokens[:, :7],
        "bbox": lambda: torch.randint(0, 99, (BATCH, LENGTH, 4), generator=random).sort(-1).values,
        "pixel_values_videos": lambda: floats(BATCH, 4, 3, 32, 32),
    }
    needed = {name for name, p in parameters.items() if p.default is inspect.Parameter.empty
              and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
    wanted = needed | {main} | ({"input_ids", "bbox"} & set(parameters))
    if config.is_encoder_decoder and "decoder_input_ids" in parameters:
        wanted |= {"decoder_input_ids"}
    if type(model).__name__.endswith("MultipleChoice"):
        tokens, counts = tokens[:, None].expand(-1, 2, -1), counts[:, None].expand(-1, 2, -1)
    if "input_ids" in wanted:
        wanted -= {"inputs_embeds"}
    for name in wanted:
        if name in makers:
            found[name] = makers[name]()
    if "attention_mask" in needed or ("attention_mask" in parameters and found.keys() & {"input_ids", "inputs_embeds"}):
        found["attention_mask"] = counts
    return found


def numbers_of(output, name="") -> dict[str, torch.Tensor]:
    """Every tensor of floats in an output, by place."""
    if isinstance(output, torch.Tensor):
        return {name: output.detach().double()} if output.is_floating_point() else {}
    if isinstance(output, dict):
        output = list(output.items())
    elif isinstance(output, (list, tuple)):
        output = list(enumerate(output))
    else:
        return {}
    found = {}
    for key, each in output:
        found.update(numbers_of(each, f"{name}.{key}"))
    return found


def run(model, inputs):
    torch.manual_seed(0)
    with torch.no_grad():
        return numbers_of(model(**inputs))


def distance(got, wanted, counts) -> float:
    """The largest difference, in units of the largest number; of tokens that count."""
    if got.keys() != wanted.keys():
        return float("inf")
    largest = 0.0
    for name, x in wanted.items():
        y = got[name]
        if x.shape != y.shape:
            return float("inf")
        if counts is not None and x.shape[:2] == counts.shape:
            x, y = x[counts.bool()], y[counts.bool()]
        if x.numel():
            same = (x == y) | (x.isnan() & y.isnan())
            error = torch.where(same, 0.0, (x - y).abs()).max() / max(x[x.isfinite()].abs().max().item()
                                                                      if x.isfinite().any() else 1.0, 1e-30)
            largest = max(largest, float("inf") if error.isnan() else error.item())
    return largest


class TooLong(BaseException):
    pass


@contextlib.contextmanager
def seconds(limit: int):
    def stop(*_):
        raise TooLong(f"more than {limit} s")
    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(limit)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def eager_model(cls):
    """A model with the inputs that its eager attention takes, or the reason why there is none."""
    reasons = []
    for config in configurations(cls.config_class):
        try:
            with torch.device("meta"):
                count = sum(x.numel() for x in made(cls, config, "eager").parameters())
            if count > LARGEST:
                reasons.append(f"{count:.0e} weights")
                continue
            model = made(cls, config, "eager")
            first = copy.deepcopy(model.state_dict())
            for dtype, large in ((torch.float32, True), (torch.float32, False)):
                try:
                    if large:
                        enlarge(model)
                    else:
                        model.load_state_dict(first)
                    model = model.to(dtype)
                    inputs = inputs_of(model, dtype)
                    found = run(model, inputs)
                    if not found:
                        raise ValueError("no numbers come out")
                    if not all(x.isfinite().any() for x in found.values()):
                        raise ValueError("no finite numbers")
                    return model, config, dtype
                except Exception as error:
                    reasons.append(f"{type(error).__name__}: {str(error)[:150]}")
        except Exception as error:
            reasons.append(f"{type(error).__name__}: {str(error)[:150]}")
    return " | ".join(dict.fromkeys(reasons))


def examine(cls, paddings=("right", "left", None)) -> dict:
    """What attnc does in this class, chosen when it is made and later: distances from `eager`, or errors."""
    try:
        with seconds(12):
            found = eager_model(cls)
            if isinstance(found, str):
                return {"unbuilt": found}
            model, config, dtype = found
            result = {"dtype": str(dtype), "weights": sum(x.numel() for x in model.parameters())}
            wanted = {}
            for padding in paddings:
                inputs = inputs_of(model, dtype, padding)
                wanted[padding] = inputs, run(model, inputs)
            again = run(model, inputs)
            result["noise"] = distance(again, wanted[paddings[-1]][1], None)
            for way in ("made", "set"):
                try:
                    if way == "made":
                        other = made(cls, config, "attnc").to(dtype)
                        other.load_state_dict(model.state_dict())
                    else:
                        other = model
                        other.set_attn_implementation("attnc")
                        result["set is"] = other.config._attn_implementation
                    for padding, (inputs, right) in wanted.items():
                        key = f"{way} {padding}"
                        result[key] = distance(run(other, inputs), right, inputs.get("attention_mask"))
                except Exception as error:
                    result[f"{way} error"] = f"{type(error).__name__}: {str(error)[:300]}"
            return result
    except TooLong as error:
        return {"unbuilt": str(error)}
