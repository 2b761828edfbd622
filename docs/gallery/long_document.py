"""
Where does a token look, 65,536 tokens back?
============================================

A decoder of one head reads 65,536 tokens of source code. Its weights would be a matrix of 16 GiB. While it runs,
`attnc.integrations.torch.capture` takes one row, what each key receives and a small map of the whole, and
`attnc.explorer` makes a page of the head.

:Shows: which of 65,536 tokens one of them looks at, the share of the first token, and a map of the whole head
:Data: modules of the running Python's own library (PSF licence); a head of attention with weights set by hand
:Time: 15 s
:Memory: 250 MB
:Needs: attnc[plot], torch
"""

import re
import sysconfig
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from matplotlib import pyplot

import attnc
from attnc.integrations.torch import capture

LENGTH, DIM = 65_536, 64
FILES = ("csv", "calendar", "tokenize", "enum", "fractions", "dataclasses", "argparse", "difflib")
TEXTS = [(Path(sysconfig.get_path("stdlib")) / f"{name}.py").read_text("utf-8") for name in FILES]
PARTS = [re.findall(r"\w+|[^\w\s]|\n *", text) for text in TEXTS]
TOKENS = [token for part in PARTS for token in part][:LENGTH]
WORDS, IDS = np.unique(TOKENS, return_inverse=True)
assert len(TOKENS) == LENGTH

# %%
# A head as models have them, set by hand: a token looks at what followed the same token before. One that is new looks
# at the first token, an attention sink, whose key has an axis of its own.


class LookBack(torch.nn.Module):
    def __init__(self):
        super().__init__()
        vectors = torch.randn(len(WORDS), DIM - 1, generator=torch.Generator().manual_seed(0))
        self.embedding = torch.nn.Embedding.from_pretrained(torch.nn.functional.normalize(vectors, dim=-1))

    def forward(self, ids):
        value = torch.nn.functional.pad(self.embedding(ids), (0, 1))[:, None]
        key, query = value.roll(1, dims=2), 60 * value
        key[..., 0, :], query[..., -1] = torch.eye(DIM)[-1], 48
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=1)


# %%
# The row: of names that come up 6 to 12 times, the one that is spread most widely, at its last place. What a function
# of the weights gives is kept: a row, statistics of one sweep, and the lazy weights, which hold query and key.
names = [i for i, count in enumerate(np.bincount(IDS)) if 6 <= count <= 12 and len(WORDS[i]) > 6]
*before, row = max((np.flatnonzero(i == IDS) for i in names), key=np.std).tolist()
start = time.perf_counter()
model = LookBack()
with torch.no_grad(), capture(model, {
        "row": lambda weights, _: weights[0, 0, row], "lazy": lambda weights, _: weights,
        "all": lambda weights, _: weights.summary(key_mass=True, map=(128, 128))}) as records:
    model(torch.tensor(IDS)[None])
found = records[0]
looked = np.sort(np.argsort(-found.row)[:len(before)])
print(f"{time.perf_counter() - start:.1f} s; {TOKENS[row]!r} at {row} looks at", looked)
assert (looked - 1).tolist() == before and found.row[looked].sum() > 0.99

# %%
# The first token receives the rows of new words, and nearly nothing else.
sink, new = found.all.key_mass[0, 0, 0] / LENGTH, len(WORDS) / LENGTH
print(f"share of the first token: {sink:.4f}; share of new words: {new:.4f}")
assert abs(sink - new) < 0.001

# %%
# The explorer's page has all of it: the map, each row's largest weights, and the entropies.
start = time.perf_counter()
with tempfile.TemporaryDirectory() as folder:
    page = attnc.explorer(found.lazy, TOKENS, row=row, path=Path(folder) / "weights.html")
    print(f"{time.perf_counter() - start:.1f} s, {(Path(folder) / 'weights.html').stat().st_size / 1e6:.1f} MB:", page)

# %%
# Above, where this name looks: an equal share for each time that it came up. Below, the whole head as a map: each file
# has words of its own, those that are new look at the first token, and the words of the language look everywhere.
borders = np.minimum(np.cumsum([0, *map(len, PARTS)]), LENGTH)
middles, shown = (borders[1:] + borders[:-1]) / 2, np.diff(borders) > 2000
figure, (above, below) = pyplot.subplots(2, 1, sharex=True, figsize=(8, 8), height_ratios=(1, 3), layout="constrained")
above.stem(looked, found.row[looked], basefmt=" ", markerfmt=".")
above.axvline(row, color="#b3541e")
above.set(ylabel="weight", ylim=0, title=f"{TOKENS[row]} at token {row:,} (brown) looks at what followed it before")
image = below.imshow(found.all.map[0, 0], extent=(0, LENGTH, LENGTH, 0), norm="log", cmap="Blues", aspect="auto")
below.set(xticks=middles[shown], yticks=middles[shown], xlabel="keys", ylabel="queries")
below.set_xticklabels(np.array(FILES)[shown], rotation=30)
below.set_yticklabels(np.array(FILES)[shown])
for border in borders:
    below.axvline(border, color="0.7", linewidth=0.5)
    below.axhline(border, color="0.7", linewidth=0.5)
figure.colorbar(image, label="weight of a query on 512 keys")
figure.set_label("Above, bars of equal height at a few places among 65,536; below, a triangle of blocks, one for each "
                 "file, with a dark first column, where new words look.")
