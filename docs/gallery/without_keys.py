"""
What a head does when its keys are removed
==========================================

The keys decide where a head looks, the values what it hands over. Two experiments on a real layer: all keys set to
zero, which leaves every head the plain mean of its values; and one key at a time masked, which shows which tokens a
head needs.

:Shows: how far each of 12 heads moves without its keys, and without each single token
:Data: layer 3 of all-MiniLM-L6-v2 on one sentence, in the package (`attnc.datasets`)
:Time: 2 s
:Memory: 100 MB
:Needs: attnc[plot]
"""

# %%
# The layer as the model computes it: 12 heads, 15 tokens.
import matplotlib.pyplot as plt
import numpy as np

import attnc
import attnc.datasets

data = attnc.datasets.load("coreference")
output = attnc.attention(data.query, data.key, data.value)

# %%
# Without keys every score is 0, so every weight is 1/15 and every row is the mean of the values.
blind = attnc.attention(data.query, np.zeros_like(data.key), data.value)
assert np.allclose(blind, data.value.mean(1, keepdims=True), atol=1e-6)


def moved(other):
    """How far each head's output is from the true one, as a share of its size."""
    return np.linalg.norm(other - output, axis=(1, 2)) / np.linalg.norm(output, axis=(1, 2))


# %%
# Without one token: `key_mask` is False there, the weights of the others keep their ratios. The token is removed as a
# key; as a query it stays. All 15 experiments are one call: `key_mask` has a batch axis, which query, key and value
# broadcast to.
tokens = len(data.tokens)
batch = (np.broadcast_to(array, (tokens, *array.shape)) for array in (data.query, data.key, data.value))
without = attnc.attention(*batch, key_mask=~np.eye(tokens, dtype=bool))
needs = np.stack([moved(each) for each in without], axis=1)            # heads, tokens
for head in (1, int(moved(blind).argmin())):
    print(f"head {head}: {moved(blind)[head]:.2f} without keys; most without "
          f"{data.tokens[needs[head].argmax()]!r}, {needs[head].max():.2f}")
assert needs.shape == (12, tokens)

# %%
# Left, how much each head is more than a mean of its values. Right, the tokens it needs.
order = moved(blind).argsort()
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.4), width_ratios=(1, 2.4), layout="constrained")
left.barh(range(12), moved(blind)[order], color="tab:blue")
left.set(yticks=range(12), yticklabels=[f"head {head}" for head in order], xlabel="change of the output",
         title="all keys zero")
image = right.imshow(needs[order], origin="lower", aspect="auto", cmap="Blues", norm="linear")
right.set(xticks=range(tokens), yticks=[], title="one token masked")
right.set_xticklabels(data.tokens, rotation=60, ha="right")
figure.colorbar(image, label="change of the output")
figure.set_label("Left: bars of how far the output of each of 12 heads moves when all keys are zero. Right: a map of "
                 "heads and tokens, dark where masking that token moves the head most.")
