"""Small models of transformers with random weights, one for each thing that attention must be able to do."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from transformers.masking_utils import sdpa_mask

SMALL = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 64, "vocab_size": 99}
GROUPED = {**SMALL, "num_key_value_heads": 2}
DEEP = {**GROUPED, "head_dim": 8, "sliding_window": 4}
TOKENS = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
HALVES = {f"{side}_{what}": size for side in ("encoder", "decoder")
          for what, size in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 64))}
MODELS = {  # for grouped heads, windows, softcap, sinks, biases, chunks, values of another width
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
    "ModernBert": ("ModernBertModel", {**SMALL, "local_attention": 4, "global_attn_every_n_layers": 2}),
    "Llama4Text": ("Llama4ForCausalLM", {**GROUPED, "head_dim": 8, "attention_chunk_size": 4, "num_local_experts": 2,
                                         "intermediate_size_mlp": 64}),
    "DeepseekV3": ("DeepseekV3ForCausalLM", {
        **SMALL, "num_key_value_heads": 4, "moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "n_group": 1, "topk_group": 1, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 8, "v_head_dim": 6, "first_k_dense_replace": 1}),
}
LENGTH = 12
NO_DROPOUT = {
    "GPT2": {"attn_pdrop": 0, "resid_pdrop": 0, "embd_pdrop": 0}, "T5": {"dropout_rate": 0}, "Whisper": {"dropout": 0},
    "Bert": {"attention_probs_dropout_prob": 0, "hidden_dropout_prob": 0}}

_made = {}


def exact_attention(module, query, key, value, mask, scaling=None, softcap=None, s_aux=None, position_bias=None,
                    **kwargs):
    """The formula in the dtype of its inputs; where a row sees nothing 0. (`eager` takes its softmax in float32.)"""
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    scores = scores if position_bias is None else scores + position_bias
    mask = torch.ones_like(scores, dtype=torch.bool) if mask is None else mask
    scores = scores.masked_fill(~mask, -torch.inf)
    if s_aux is not None:
        sink = s_aux[:, None, None].expand(*scores.shape[:3], 1)
        scores, mask = torch.cat([scores, sink], -1), torch.cat([mask, torch.ones_like(mask[..., :1])], -1)
    seen = mask.any(-1, keepdim=True)
    weights = torch.softmax(torch.where(seen, scores, 0.0), -1) * seen
    weights = weights[..., :key.shape[2]]
    return (weights @ value).transpose(1, 2).contiguous(), weights


def exact_mask(*sizes, allow_is_causal_skip=True, allow_is_bidirectional_skip=True, **arguments):
    """Booleans, always."""
    return sdpa_mask(*sizes, allow_is_causal_skip=False, allow_is_bidirectional_skip=False, **arguments)


transformers.AttentionInterface.register("exact", exact_attention)
transformers.AttentionMaskInterface.register("exact", exact_mask)


def model_of(name, dtype=torch.float32, attention="attnc"):
    """The model with weights large enough that its rows of attention differ; the same ones for every dtype."""
    if (name, dtype) not in _made:
        class_name, options = MODELS[name]
        config = getattr(transformers, name + "Config")(**options, **TOKENS, **NO_DROPOUT.get(name, {}))
        torch.manual_seed(0)
        model = getattr(transformers, class_name)._from_config(config, attn_implementation="eager")
        if "experts" in str(options):
            model.set_experts_implementation("eager")   # the others know no float64
        with torch.no_grad():
            for part, weight in model.named_parameters():
                if weight.ndim > 1 or "sinks" in part:
                    weight.normal_(0, 0.3)
        _made[name, dtype] = model.to(dtype)
    model = _made[name, dtype].eval()
    model.set_attn_implementation(attention)
    return model


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
