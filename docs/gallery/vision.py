"""
Which part of a picture did it decide by? Rollout and relevance of a vision transformer
=======================================================================================

Weights say where a model looks, not what mattered. Rollout multiplies the weights of all layers; relevance counts a
weight only by the gradient of the answer that reaches it, so it is about the class that was named. Both come out of one
forward and one backward pass of an unmodified ViT, by `attnc.integrations.torch.capture`.

:Shows: ten digits, and over each the patches by rollout and by relevance
:Data: scikit-learn's digits (BSD-3), in a frame of two pixels; a ViT of three layers that is trained here
:Time: 15 s
:Memory: 300 MB
:Needs: attnc[plot], torch, transformers, scikit-learn
"""

import numpy as np
import torch
from matplotlib import pyplot
from sklearn.datasets import load_digits
from transformers import ViTConfig, ViTForImageClassification

import attnc
from attnc.integrations.torch import capture

# %%
# Training: 1,437 digits, twelve times. A patch is 2 x 2 pixels, so a picture is 36 patches, of which the outer 20 are
# always empty, and the token of the class.
torch.manual_seed(0)
digits = load_digits()
order = torch.randperm(len(digits.target))
pictures = torch.nn.functional.pad(torch.tensor(digits.images / 16, dtype=torch.float32)[order, None], (2, 2, 2, 2))
classes = torch.tensor(digits.target)[order]
model = ViTForImageClassification(ViTConfig(
    image_size=12, patch_size=2, num_channels=1, num_labels=10, hidden_size=48, num_hidden_layers=3,
    num_attention_heads=4, intermediate_size=96, hidden_dropout_prob=0, attention_probs_dropout_prob=0,
    initializer_range=0.1))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=12 * 22)
for _ in range(12):
    for some in torch.randperm(1437)[:22 * 64].split(64):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(pixel_values=pictures[some]).logits, classes[some]).backward()
        optimizer.step()
        schedule.step()

# %%
# Of 360 pictures that it has not seen all records are taken at once: the lazy weights, and what relevance needs, which
# the backward pass of the right answers brings.
model.eval()
pictures, classes = pictures[1437:], classes[1437:]
with capture(model, ("weights", "relevance")) as records:
    scores = model(pixel_values=pictures).logits
    scores[torch.arange(360), classes].sum().backward()
right = (scores.argmax(-1) == classes).numpy()
print(f"{right.mean():.1%} of {len(right)} are right")
assert right.mean() >= 0.95

# %%
# `attnc.rollout` starts from the token of the class and goes down. The relevance of Chefer and others adds up on the
# way: what a token has so far, and what its keys pass to it.
rollout = attnc.rollout([record.weights for record in records], np.eye(37)[np.zeros(360, int)])
through = np.broadcast_to(np.eye(37, dtype=np.float32), (360, 37, 37))
for record in records:
    through = through + (record.relevance() @ through[:, None]).mean(1)
found = {"rollout": rollout[:, 1:], "relevance": through[:, 0, 1:]}

# %%
# How much of it lies on ink, beside a map that is the same everywhere:
ink = torch.nn.functional.avg_pool2d(pictures, 2).flatten(1).numpy() > 0.1
for name, shares in found.items():
    shares = shares / shares.sum(-1, keepdims=True)
    print(f"{name}: {(shares * ink).sum(-1).mean():.0%} on ink, which covers {ink.mean():.0%}")
on_ink = (found["relevance"] * ink).sum(-1) / found["relevance"].sum(-1)
assert on_ink.mean() > 1.5 * ink.mean() and (on_ink > ink.mean(-1)).mean() > 0.9

# %%
# One digit of each class that was named rightly.
figure, axes = pyplot.subplots(3, 10, figsize=(10, 3.4), layout="constrained")
for digit, column in enumerate(axes.T):
    i = np.flatnonzero(right & (classes == digit).numpy())[0]
    for ax, name in zip(column, ("picture", "rollout", "relevance"), strict=True):
        ax.imshow(pictures[i, 0].numpy(), cmap="Greys", extent=(0, 12, 12, 0))
        if name != "picture":
            patches = found[name][i].reshape(6, 6) / found[name][i].max()
            ax.imshow(np.zeros((6, 6)), cmap="autumn", alpha=0.8 * patches, extent=(0, 12, 12, 0))      # red
        ax.set(xticks=(), yticks=(), ylabel=name if digit == 0 else "")
figure.set_label("Ten digits in a row; below each the same digit under red patches, by rollout spread over the whole "
                 "picture, by relevance on a few patches, most of them of its strokes.")
