"""
Which atom becomes which: a head whose weights are the answer
=============================================================

rxnmapper's model learned to fill in hidden atoms of 1.3 million reactions. One of its 96 heads maps atoms of products
to those of reactants. Taken alone from a batch of reactions, its weights give the maps that the package finds.

:Shows: acetic anhydride and 4-aminophenol become paracetamol: a line from each atom of the product to where it was
:Data: the model in the package rxnmapper 0.4.3 (MIT), 40 reactions from textbooks and rxnmapper's maps of them
:Time: 5 s
:Memory: 700 MB
:Needs: attnc[plot], torch, transformers; rxnmapper, installed with --no-deps
"""

import json
import re
import time
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from matplotlib import colormaps, pyplot
from transformers import AlbertForMaskedLM

from attnc.integrations.torch import capture

HERE = Path(__file__).parent if "__file__" in globals() else Path()
REACTIONS = json.loads((HERE / "../../benchmarks/capture/expected/atom_maps.json").read_text())
FOLDER = Path(find_spec("rxnmapper").origin).parent / "models/transformers/albert_heads_8_uspto_all_1310k"
VOCABULARY = {token: i for i, token in enumerate((FOLDER / "vocab.txt").read_text().split("\n"))}
TOKEN = re.compile(r"\[[^\]]+]|Br?|Cl?|[NOSPFIbcnops]|>>|%\d\d|[().=#+\\/:~@?*$\d-]")

# %%
# A reaction is a SMILES string: letters are atoms; bonds follow from order, branches in parentheses and ring numbers.


def read(reaction):
    """Tokens; the token and the element of each atom; whether it is of the product; which atoms are bonded."""
    tokens, places, branches, rings, bonds, last = TOKEN.findall(reaction), [], [], {}, [], None
    for place, token in enumerate(tokens):
        if token[0].isalpha() or token[0] == "[":
            bonds += [] if last is None else [(last, len(places))]
            last = len(places)
            places.append(place)
        elif token in "()":
            last = branches.append(last) or last if token == "(" else branches.pop()
        elif token in rings:
            bonds.append((rings.pop(token), last))
        elif token[-1].isdigit():
            rings[token] = last
        elif token in (".", "~", ">>"):
            last = None
    bonded = np.zeros((len(places), len(places)), bool)
    bonded[tuple(np.array(bonds).T)] = True
    elements = np.array([re.search("[A-Z][a-z]?|[a-z]", tokens[place])[0].capitalize() for place in places])
    return tokens, np.array(places), elements, np.array(places) > tokens.index(">>"), bonded | bonded.T


# %%
# rxnmapper's map is greedy: of pairs of one element, the one with the largest share of its row comes first. Then pairs
# of neighbours of the two count 90 times as much, since most bonds stay.


def atom_map(weights, places, elements, product, bonded):
    """For each atom of the product the number of an atom of the reactants, or -1."""
    weights, old, new = weights[np.ix_(places, places)].astype(float), *map(np.flatnonzero, (~product, product))
    share = (weights[np.ix_(new, old)] + weights[np.ix_(old, new)].T) * (elements[new][:, None] == elements[old])
    found = np.full(len(new), -1)
    while share.any():
        rows = share / np.maximum(share.sum(1, keepdims=True), 1e-300)
        p, r = np.unravel_index(rows.argmax(), rows.shape)
        found[p] = r
        share[np.ix_(bonded[new[p]][new], bonded[old[r]][old])] *= 90
        share[p], share[:, r] = 0, 0
    return found


# %%
# All reactions are one batch. ALBERT runs one layer twelve times; ``heads={10: [5]}`` is head 5 of the call of index
# 10. Without `attnc.integrations.torch.capture` the weights of all heads of all calls are kept.

model = AlbertForMaskedLM.from_pretrained(FOLDER).eval()
reactions = [read(x["reaction"]) for x in REACTIONS]
texts = [["[CLS]", *tokens, "[SEP]"] for tokens, *_ in reactions]
ids = torch.tensor([[VOCABULARY[x] for x in text] + [0] * (max(map(len, texts)) - len(text)) for text in texts])
batch = {"input_ids": ids, "attention_mask": (ids > 0).long()}
start = time.perf_counter()
with torch.no_grad(), capture(model, {"head": lambda weights, _: weights[:, 0]}, heads={10: [5]}) as records:
    model(**batch)
middle, head = time.perf_counter(), records[0].head
model.set_attn_implementation("eager")
with torch.no_grad():
    every = sum(x.nbytes for x in model(**batch, output_attentions=True).attentions)
print(f"capture: {middle - start:.2f} s, {head.nbytes / 1e6:.1f} MB of weights kept; output_attentions: "
      f"{time.perf_counter() - middle:.2f} s, {every / 1e6:.0f} MB")
assert head.nbytes * 96 == every
maps = [atom_map(weights[1:, 1:], *reaction[1:]) for weights, reaction in zip(head, reactions, strict=True)]
assert all(found.tolist() == x["map"] for found, x in zip(maps, REACTIONS, strict=True)) and len(maps) >= 30

# %%
# Of the anhydride one half goes to the nitrogen; atoms without a colour leave. A line is as thick as its weight.

number = [x["name"] for x in REACTIONS].index("acetylation: paracetamol")
tokens, places, _, product, _ = reactions[number]
split, old, new = tokens.index(">>"), places[~product], places[product]
tints = colormaps["turbo"](np.linspace(0.05, 0.95, len(new))) * (0.85, 0.85, 0.85, 1)
x = np.r_[np.arange(split), 0, np.arange(len(tokens) - split - 1) + (2 * split + 1 - len(tokens)) / 2]
(figure, ax), colour = pyplot.subplots(figsize=(9, 3.4), layout="constrained"), {}
for p, r in enumerate(maps[number]):
    colour[old[r]] = colour[new[p]] = tints[p]
    share = (head[number][1 + new[p], 1 + old[r]] + head[number][1 + old[r], 1 + new[p]]) / 2
    ax.plot((x[old[r]], x[new[p]]), (0.9, 0.1), color=tints[p], linewidth=1 + 4 * share)
for place, token in enumerate(tokens):
    ax.text(x[place], place < split, "" if token == ">>" else token, color=colour.get(place, "0.6"), size=16,
            weight="bold", ha="center", va="center")
ax.set(xlim=(-1, split), ylim=(-0.15, 1.15), title="Acetic anhydride and 4-aminophenol (above) become paracetamol")
ax.axis("off")
figure.set_label("The reactants as text above the product as text; each atom of the product is joined by a line of its "
                 "own colour to the atom that it was. Four atoms of the anhydride stay grey: they leave.")
