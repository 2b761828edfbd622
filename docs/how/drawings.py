"""Draw the figures of the pages on how attention is computed, from the numbers and masks that they speak of.

    python docs/how/drawings.py FOLDER
"""

import sys
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

import attnc

BLUE, RED, GREY, PALE = "#2b6cb0", "#c53030", "#718096", "#bee3f8"


def tiles():
    """The matrix of scores, cut into tasks, blocks of keys and register tiles."""
    figure = Figure(figsize=(8, 4), layout="constrained")
    ax = figure.subplots()
    ax.set(xlim=(0, 2048), ylim=(768, 0), xlabel="keys", ylabel="query rows", aspect="equal")
    for row in range(0, 768, 192):
        ax.add_patch(Rectangle((0, row), 2048, 192, fill=False, edgecolor=BLUE, linewidth=2))
    for key in range(0, 2048, 512):
        ax.add_patch(Rectangle((key, 192), 512, 192, facecolor=PALE, edgecolor=BLUE, linewidth=1, linestyle="--"))
    for row in range(192, 384, 6):
        ax.add_patch(Rectangle((512, row), 512, 6, facecolor="none", edgecolor=GREY, linewidth=0.4))
    ax.add_patch(Rectangle((512, 282), 64, 6, facecolor=RED, edgecolor=RED))
    for text, xy, at in (("a task: 192 rows, on one thread", (1200, 100), (1200, 100)),
                         ("a block of 512 keys, packed once for all tasks", (1500, 300), (1060, 470)),
                         ("a register tile: 6 rows x 64 keys", (544, 285), (60, 660))):
        ax.annotate(text, xy, at, color="black", fontsize=10,
                    arrowprops={"arrowstyle": "-", "color": GREY} if xy != at else None)
    return figure


def online():
    """Maximum, sum and output of one row, block by block."""
    scores = np.random.default_rng(3).standard_normal(256) + np.linspace(0, 2.5, 256)
    values = np.sin(np.arange(256) / 20)
    starts = range(0, 256, 32)
    top, total, output, kept = -np.inf, 0.0, 0.0, []
    for start in starts:
        block = scores[start:start + 32]
        new = max(top, block.max())
        rescale = np.exp(top - new)
        weights = np.exp(block - new)
        total, output, top = total * rescale + weights.sum(), output * rescale + weights @ values[start:start + 32], new
        kept.append((top, total, output / total, rescale))
    expected = attnc.softmax(scores) @ values
    assert np.isclose(kept[-1][2], expected) and len({each[0] for each in kept}) > 2
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots(3, 1, sharex=True)
    ends = [start + 32 for start in starts]
    axes[0].plot(scores, ".", color=GREY, markersize=3)
    axes[0].step([0, *ends], [kept[0][0], *(each[0] for each in kept)], color=RED)
    axes[0].set(ylabel="score, and its\nlargest so far")
    axes[1].step([0, *ends], [0, *(each[1] for each in kept)], color=BLUE)
    for end, each in zip(ends, kept, strict=True):
        if each[3] < 1 and end > 32:
            axes[1].annotate(f"x {each[3]:.2f}", (end, each[1]), textcoords="offset points", xytext=(-34, 6), color=RED)
    axes[1].set(ylabel="sum, relative\nto the largest", ylim=(0, 1.3 * max(each[1] for each in kept)))
    axes[2].plot(ends, [each[2] for each in kept], "o-", color=BLUE)
    axes[2].axhline(expected, color=GREY, linestyle="--")
    axes[2].set(ylabel="output so far", xlabel="keys seen, in blocks of 32", xlim=(0, 256))
    return figure


def classes():
    """Blocks of a causal mask with a window that are skipped, computed without a mask, or with one."""
    length, rows, keys = 480, 48, 32
    allowed = attnc.masks.causal_mask(length, length) & attnc.masks.window_mask(length, length, (190, 0))
    shares = allowed.reshape(length // rows, rows, length // keys, keys).mean((1, 3))
    figure = Figure(figsize=(7, 5), layout="constrained")
    ax = figure.subplots()
    ax.imshow(allowed, cmap="Greys", vmax=4, interpolation="nearest")
    colours = {"SKIP": "none", "FULL": PALE, "PARTIAL": "#fed7d7"}
    for (i, j), share in np.ndenumerate(shares):
        kind = "SKIP" if share == 0 else "FULL" if share == 1 else "PARTIAL"
        ax.add_patch(Rectangle((j * keys - 0.5, i * rows - 0.5), keys, rows, facecolor=colours[kind], edgecolor=GREY,
                               alpha=0.75, linewidth=0.6))
    counts = int((shares == 0).sum()), int((shares == 1).sum()), int(((shares > 0) & (shares < 1)).sum())
    for name, count, colour in zip(("skipped", "full: no mask is looked at", "partial: selected by the mask"), counts,
                                   ("white", PALE, "#fed7d7"), strict=True):
        ax.plot([], [], "s", color=colour, markeredgecolor=GREY, markersize=10, label=f"{count} {name}")
    ax.legend(loc="upper right", framealpha=1)
    ax.set(xlabel="keys", ylabel="query rows")
    return figure


def packing():
    """Keys as they are stored, and as panels of 64 keys from which a register tile reads vectors."""
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.9))
    number = np.add.outer(np.arange(16) * 8, np.arange(8))
    left.imshow(number, cmap="Blues", vmin=-40, vmax=180)
    left.set(title="stored: a key is a row", xlabel="head_dim", ylabel="key", xticks=[], yticks=range(0, 16, 4))
    panels = np.concatenate([number[:8].T, np.full((8, 1), np.nan), number[8:].T], axis=1)
    right.imshow(panels, cmap="Blues", vmin=-40, vmax=180)
    right.add_patch(Rectangle((-0.5, 2.5), 8, 1, fill=False, edgecolor=RED, linewidth=2))
    right.set(title="packed: panels of keys, transposed", ylabel="head_dim", xticks=[3.5, 12.5], yticks=[],
              xticklabels=["panel 0", "panel 1"])
    right.set_xlabel("red: one vector load, the same element of neighbouring keys", color=RED)
    return figure


def sweep():
    """Weights of a block under the lse of the rows, and what a sweep adds up from them."""
    query, key = np.random.default_rng(5).standard_normal((2, 24, 16))
    weights = attnc.attention_weights(query, key, causal=True)
    W = attnc.AttentionWeights(query, key, causal=True)
    figure = Figure(figsize=(6.4, 5.4), layout="constrained")
    axes = figure.subplot_mosaic([["map", "rows"], ["keys", "."]], width_ratios=(3, 1.1), height_ratios=(3, 1.1))
    axes["map"].imshow(weights, cmap="Blues", norm="linear", vmax=0.5, aspect="auto")
    for at in range(0, 24, 8):
        axes["map"].axvline(at - 0.5, color=GREY, linewidth=0.6)
        axes["map"].axhline(at - 0.5, color=GREY, linewidth=0.6)
    axes["map"].add_patch(Rectangle((-0.5, 15.5), 8, 8, fill=False, edgecolor=RED, linewidth=2))
    axes["map"].set(xlabel="keys", ylabel="query rows", title="weights, computed again block by block")
    axes["rows"].barh(range(24), W.entropy(), color=BLUE)
    axes["rows"].set(ylim=(23.5, -0.5), yticks=[], title="entropy")
    axes["keys"].bar(range(24), W.key_mass(), color=BLUE)
    axes["keys"].set(xlim=(-0.5, 23.5), xticks=[], ylabel="key mass")
    assert np.allclose(weights.sum(0), W.key_mass())
    return figure


FIGURES = tiles, online, classes, packing, sweep


def draw(folder: Path) -> None:
    """Each figure as `name`.svg in the folder."""
    folder.mkdir(exist_ok=True)
    for function in FIGURES:
        function().savefig(folder / f"{function.__name__}.svg")


if __name__ == "__main__":
    draw(Path(sys.argv[1]))
