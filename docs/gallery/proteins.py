"""
Contact maps of proteins, without the weights of all heads
==========================================================

Residues that touch in a folded protein look at each other in a language model of its sequence. A contact map adds up
all heads, both ways, less the average product correction (APC): what sums of rows and columns explain. Libraries keep
the weights of all heads of all layers for that; here it needs their sums, and one weighted sum of the heads of a layer.

:Shows: the contact map of an antibody's heavy chain; the three loops that bind, and where two of them meet
:Data: the model of heavy chains in the package sapiens 1.0.2 (MIT); the sequence of trastuzumab; ESM at random weights
:Time: 10 s
:Memory: 900 MB
:Needs: attnc[plot], torch, transformers; sapiens, installed with --no-deps
"""

import argparse
import re
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from matplotlib import pyplot
from transformers import EsmConfig, EsmForMaskedLM, RobertaConfig, RobertaForMaskedLM

from attnc.integrations.torch import capture


def contacts(model, tokens, coefficients):
    """Sum of coefficients times weights both ways less APC, over all heads; without the first and the last token."""
    found, inner = np.zeros((tokens.shape[1] - 2,) * 2, np.float32), slice(1, -1)

    def add(weights, record):
        heads = coefficients[record.index]
        both = weights.weighted(heads=heads)[0, inner, inner]
        sums = weights.row_mass(keys=inner)[0, :, inner] + weights.key_mass(rows=inner)[0, :, inner]
        np.add(found, both + both.T - (heads[:, None] * sums / sums.sum(-1, keepdims=True)).T @ sums, out=found)

    with torch.no_grad(), capture(model, {"added": add}):
        model(tokens)
    return found

# %%
# At random weights, in the shape of ESM-2 with 1,024 residues, the map is that of `predict_contacts` of transformers,
# whose learned coefficients are random here too.
torch.manual_seed(0)
esm = EsmForMaskedLM(EsmConfig(
    vocab_size=33, hidden_size=160, num_hidden_layers=4, num_attention_heads=10, intermediate_size=320, pad_token_id=1,
    mask_token_id=32, position_embedding_type="rotary", max_position_embeddings=1026)).eval()
for parameter in esm.parameters():
    if parameter.ndim > 1:
        torch.nn.init.normal_(parameter, std=0.15)
regression = esm.esm.contact_head.regression
torch.nn.init.normal_(regression.weight, std=10)
tokens = torch.tensor([[0, *np.random.default_rng(0).integers(4, 24, 1024), 2]])

def high_water():       # of the memory of the process, in KB
    return int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1])

def peak(run):
    """What a function gives, and by how many megabytes the process grew at most meanwhile (on Linux)."""
    Path("/proc/self/clear_refs").write_text("5")
    before, result, after = high_water(), run(), high_water()
    return result, (after - before) / 1024

with torch.no_grad():
    ours, ours_mb = peak(lambda: contacts(esm, tokens, regression.weight.reshape(4, 10).numpy()))
    ours = (torch.tensor(ours) + regression.bias).sigmoid()
    esm.set_attn_implementation("eager")
    theirs, theirs_mb = peak(lambda: esm.predict_contacts(tokens, torch.ones_like(tokens))[0])
print(f"peak memory: {ours_mb:.0f} MB; {theirs_mb:.0f} MB in predict_contacts")
assert (ours - theirs).abs().max() < 1e-5 and theirs.std() > 0.01 and theirs_mb > 5 * ours_mb

# %%
# Real weights: four layers that fill in hidden residues of human antibodies. The checkpoint is one of fairseq, whose
# names are not those of transformers.
NAMES = {
    "decoder.sentence_encoder": "roberta", "decoder.lm_head": "lm_head", "roberta.layers": "roberta.encoder.layer",
    "embed_tokens": "embeddings.word_embeddings", "embed_positions": "embeddings.position_embeddings",
    "emb_layer_norm": "embeddings.LayerNorm", "self_attn_layer_norm": "attention.output.LayerNorm",
    "final_layer_norm": "output.LayerNorm", "self_attn.out_proj": "attention.output.dense",
    "self_attn.q_proj": "attention.self.query", "self_attn.k_proj": "attention.self.key",
    "self_attn.v_proj": "attention.self.value", "fc1": "intermediate.dense", "fc2": "output.dense",
    "lm_head.weight": "lm_head.decoder.weight", "lm_head.bias": "lm_head.decoder.bias"}
torch.serialization.add_safe_globals([argparse.Namespace])
file = Path(find_spec("sapiens").origin).parent / "models/v1/checkpoint_vh.pt"
weights = {"roberta.embeddings.token_type_embeddings.weight": torch.zeros(1, 128)}
for name, tensor in torch.load(file, "cpu", weights_only=True)["model"].items():
    for old, new in NAMES.items():
        name = name.replace(old, new)
    weights[name] = tensor
model = RobertaForMaskedLM(RobertaConfig(
    vocab_size=25, hidden_size=128, num_hidden_layers=4, num_attention_heads=8, intermediate_size=256,
    max_position_embeddings=146, type_vocab_size=1, layer_norm_eps=1e-5)).eval()
assert model.load_state_dict(weights, strict=False).missing_keys == ["lm_head.bias"]        # the decoder's bias again
CHAIN = ("EVQLVESGGGLVQPGGSLRLSCAASGFNIKDTYIHWVRQAPGKGLEWVARIYPTNGYTRYADSVKGRFTISADTSKNTAYLQMNSLRAEDTAVYYCSRWGGDG"
         "FYAMDYWGQGTLVTVSS")
tokens = torch.tensor([[0, *("ACDEFGHIKLMNPQRSTVWY".index(residue) + 4 for residue in CHAIN), 2]])
with torch.no_grad():
    assert (model(tokens).logits.argmax(-1) == tokens).float().mean() > 0.85        # it knows this chain
found = contacts(model, tokens, np.full((4, 8), 1 / 32))

# %%
# Frames: the loops CDR1, CDR2 and CDR3 (by the AbM definition), which bind the antigen. In the fold the first two lie
# side by side: of the five strongest pairs of residues at least 15 apart in the chain, three join these two.
loops = [(CHAIN.index(loop), len(loop)) for loop in ("GFNIKDTYIH", "RIYPTNGYTR", "WGGDGFYAMDY")]
(first, n), (second, m), _ = loops
figure, ax = pyplot.subplots(figsize=(7, 6), layout="constrained")
image = ax.imshow(found, cmap="Blues", vmin=0, vmax=np.quantile(found, 0.99))
for name, x, y, width, height in [(f"CDR{i}", start, start, length, length) for i, (start, length) in
                                  enumerate(loops, 1)] + [("CDR1 and CDR2", second, first, m, n)]:
    ax.add_patch(pyplot.Rectangle((x - 0.5, y - 0.5), width, height, fill=False, color="#b3541e", linewidth=2))
    ax.text(x + width + 1 if x < 90 else x - 10, y, name, color="#b3541e", va="center")
ax.set(xlabel="residue", ylabel="residue", title="Heavy chain of trastuzumab")
figure.colorbar(image, label="mean weight, both ways, less APC", extend="both")
figure.set_label("A square map with dark blocks along the diagonal; frames mark the three loops, and dark spots away "
                 "from the diagonal, where the first loop meets the second.")
pairs = [divmod(int(place), len(CHAIN)) for place in np.argsort(-np.triu(found, 15), axis=None)[:5]]
print("strongest pairs:", *(f"{CHAIN[i]}{i + 1}-{CHAIN[j]}{j + 1}" for i, j in pairs))
assert sum(first <= i < first + n and second <= j < second + m for i, j in pairs) == 3
