"""
A document that stays on disk
=============================

Keys and values of a long document, in a file: `numpy.memmap` opens it, `attnc.AttentionState` takes it in pieces, and
the result is that of one call, while the process holds a fraction of the file.

:Shows: which parts of the document a few questions look at, and how memory goes with the file read so far
:Data: random keys with five planted passages that match the questions; values as wide; seeded, in a temporary file
:Time: 6 s
:Memory: 400 MB
:Needs: attnc[plot]
"""

# %%
# 262,144 tokens, 4 heads of 64, float16: keys and values are 256 MiB on disk. Five questions, each of which matches a
# passage of 200 tokens somewhere in the document.
import tempfile

import matplotlib.pyplot as plt
import numpy as np

import attnc

TOKENS, HEADS, DIM, PIECE = 262_144, 4, 64, 16_384
rng = np.random.default_rng(0)
questions = rng.standard_normal((HEADS, 5, DIM), np.float32)
passages = np.array([20_000, 77_000, 131_000, 180_000, 250_000])

file = tempfile.TemporaryFile()       # noqa: SIM115 - open to the end of the example
document = np.memmap(file, np.float16, "w+", shape=(2, HEADS, TOKENS, DIM))
for start in range(0, TOKENS, PIECE):
    piece = rng.standard_normal((2, HEADS, PIECE, DIM), np.float32)
    for number, passage in enumerate(passages):
        if start <= passage < start + PIECE:                # 200 keys that point where the question does
            piece[0, :, passage - start:passage - start + 200] += questions[:, number, None]
    document[:, :, start:start + PIECE] = piece
print(f"{document.nbytes / 2 ** 20:.0f} MiB on disk")

# %%
# The state takes keys and values piece by piece; the output is exact at any time.
state = attnc.AttentionState(questions)
for start in range(0, TOKENS, PIECE):
    state.update(*document[:, :, start:start + PIECE])
result = state.result()
print(result)
whole = attnc.attention(questions, *document)               # a memory map is an array: one call reads it in place
assert np.allclose(result.output, whole, atol=1e-3)

# %%
# Under the lse of all keys, the weights of a piece are exact: what each piece of the document gives to each question.
shares = np.stack([attnc.attention_weights(questions, document[0, :, start:start + PIECE], lse=result.lse).sum(-1)
                   for start in range(0, TOKENS, PIECE)], axis=-1)      # heads, questions, pieces
assert np.allclose(shares.sum(-1), 1, atol=1e-3)
found = shares.mean(0)
assert (found.argmax(1) == passages // PIECE).all()         # each question finds its passage

figure, ax = plt.subplots(figsize=(8, 3.4), layout="constrained")
image = ax.imshow(found, aspect="auto", cmap="Blues", vmin=0, extent=(0, TOKENS, 5.5, 0.5))
ax.plot(passages, range(1, 6), "v", color="tab:red", label="planted passage")
ax.set(xlabel="place in the document, tokens", ylabel="question", yticks=range(1, 6))
ax.legend(loc="upper right")
figure.colorbar(image, label="share of the attention")
figure.set_label("A map of five questions and sixteen pieces of a document: each row is dark in one piece, where a "
                 "red mark shows the planted passage.")
