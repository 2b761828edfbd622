"""Bars: what one row weighs, and what each key receives."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .._checks import integer
from .._checks.weights import check_progress
from .._types import ArrayLike, Head, Progress, Tokens
from .._views.source import Source, check_row, entropy_of, head_name, load, pick
from .._views.tokens import shorten
from . import _style
from ._maps import _names

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def row(
        weights: ArrayLike | Source, row: int, tokens: Tokens = None, *, key_tokens: Tokens = None, head: Head = None,
        mask: ArrayLike | None = None, most: int = 10, ax: Axes | None = None) -> Axes:
    """Draw one row of weights as bars, largest first, each starting where the one before ends: their running sum.

    The title names the head and gives the entropy of the row in nats and its exponential, the number of effective keys.

    Parameters
    ----------
    weights : array (..., q_len, kv_len) or AttentionWeights
    row : int
        Which query; negative ones count from the end.
    tokens, key_tokens, head, mask, ax
        As in `heatmap`; a head must be named where there are several.
    most : int
        How many keys get a bar; the others share one. Weight that went to no key (sinks) has its own.

    Returns
    -------
    matplotlib Axes

    Raises
    ------
    ValueError, TypeError
        As `heatmap`, and for a row out of range.

    Examples
    --------
    >>> import attnc.plot, attnc.datasets
    >>> data = attnc.datasets.load("turkish")
    >>> weights = attnc.attention_weights(data.query, data.key)
    >>> ax = attnc.plot.row(weights, data.rows[0], data.tokens, head=data.head)
    >>> [label.get_text() for label in ax.get_yticklabels()][:2]
    ['kitabı', 'ediyor']
    """
    source = load(weights, mask)
    layer, head = pick(source, head)
    row = check_row(source, row)
    names, keys = _names(tokens, key_tokens, *source.shape[2:])
    share, allowed, nowhere = source.row(layer, head, row)
    share = share.astype(np.float64)
    order = np.argsort(-share, kind="stable")
    order, most = order[allowed[order]], integer("most", most, 1, _style.MAX_COUNT)
    if len(order) > most + 1:       # one key alone needs no name for the others
        order = order[:most]
    others = int(allowed.sum()) - len(order)
    rest = max(float(share[allowed].sum() - share[order].sum()), 0.0)

    labels = [_label(keys, at) for at in order]
    shares, colours = [*share[order]], [_style.STRONG] * len(order)
    if others:
        labels.append(f"{others} other keys")
        shares.append(rest)
        colours.append(_style.GREY)
    if nowhere:
        labels.append("no key (sink)")
        shares.append(nowhere)
        colours.append(_style.WARM)

    ax = _style.new_axes(ax, figsize=(6.4, 1.3 + 0.3 * max(len(labels), 3)))
    _style.frame(ax)
    at, ends = np.arange(len(labels)), np.cumsum(shares)
    ax.barh(at, ends, height=0.64, color=_style.PAPER, zorder=1)
    ax.vlines([0.25, 0.5, 0.75, 1], -0.6, len(labels) - 0.4, color="white", linewidth=0.8, zorder=1.5)
    ax.barh(at, shares, left=ends - shares, height=0.64, color=colours, zorder=2)
    for y, part, end in zip(at, shares, ends, strict=True):
        ax.text(1.02, y, f"{part:.4f}", va="center", fontsize=9, color=_style.INK)
        ax.text(1.28, y, f"{end:.1%}", va="center", ha="right", fontsize=9, color=_style.SOFT)
    for x, side, name in ((1.02, "left", "weight"), (1.28, "right", "sum")):
        ax.annotate(name, (x, 1), (0, 6), xycoords=("data", "axes fraction"), textcoords="offset points", ha=side,
                    fontsize=9, color=_style.SOFT)
    ax.set_yticks(at, [_style.plain(label) for label in labels], fontsize=9.5, **_style.font(labels))
    ax.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "25 %", "50 %", "75 %", "100 %"], fontsize=8.5)
    ax.tick_params(axis="x", labelcolor=_style.SOFT)
    ax.set(xlim=(0, 1.29), ylim=(len(labels) - 0.45, -0.6))
    entropy = entropy_of(share, nowhere)
    who = f"“{_style.row_name(names, row)}”" if names else f"row {row}"
    who = ", ".join(filter(None, (head_name(source, (layer, head)), who)))
    ax.set_title(_style.plain(f"{who}\nentropy {entropy:.2f} nats, as {np.exp(entropy):.1f} keys of equal weight"),
                 fontsize=10.5, color=_style.INK, loc="left", pad=18, **_style.font([who]))
    return ax


def _label(keys: list[str] | None, at: int) -> str:
    return shorten(keys[at], _style.LABEL) if keys else f"key {at}"


def key_mass(
        weights: ArrayLike | Source, tokens: Tokens = None, *, head: Head = None, mask: ArrayLike | None = None,
        name: int = 3, ax: Axes | None = None, progress: Progress = None) -> Axes:
    """Draw how much weight each key receives: the mean over the rows that may see it.

    Parameters
    ----------
    weights : array (..., q_len, kv_len) or AttentionWeights
    tokens : list of str, optional
        Names of the keys.
    head : int or (layer, head), optional
        Which head; None is the mean over all of them.
    mask, ax
        As in `heatmap`.
    name : int
        How many of the largest are named over their bars, where the axis cannot name all keys. The smallest
        are left out where the names would take more than half of the height.
    progress : bool or function, optional
        As in `AttentionWeights.key_mass`, for lazy weights.

    Returns
    -------
    matplotlib Axes

    Raises
    ------
    ValueError, TypeError
        As `heatmap`.

    Examples
    --------
    >>> import attnc.plot, attnc.datasets
    >>> data = attnc.datasets.load("coreference")
    >>> weights = attnc.attention_weights(data.query, data.key)
    >>> attnc.plot.key_mass(weights, data.tokens).get_ylabel()
    'mean weight received'
    """
    source = load(weights, mask)
    layers, heads, _, kv_len = source.shape
    keys = _names(None, tokens, *source.shape[2:])[1]
    integer("name", name, 0, _style.MAX_COUNT)
    check_progress(progress)
    chosen = None if head is None and layers * heads > 1 else pick(source, head)
    mass = (source if chosen is None else source.only(*chosen)).key_mass(progress=progress).mean((0, 1))
    made, ax = ax is None, _style.new_axes(ax, figsize=(7, 3))
    _style.frame(ax)
    ax.grid(axis="y", color=_style.PAPER, linewidth=1)
    ax.set_axisbelow(True)
    few = kv_len <= 64
    at = np.arange(kv_len)
    if few:
        ax.bar(at, mass, width=0.72, color=_style.BAR)
    else:
        ax.fill_between(at, mass, step="mid", color=_style.BAR, linewidth=0)
    ax.set(xlim=(-0.6, kv_len - 0.4), ylim=(0, 1.18 * (np.nanmax(mass, initial=0) or 1.0)), xlabel="key",
           ylabel="mean weight received")
    _style.label_axis(ax.xaxis, keys, at, 8.5, _style.room(ax)[0])
    ax.tick_params(axis="x", rotation=90 if keys else 0)
    ax.set_title("mean of " * (chosen is None) + head_name(source, chosen), fontsize=11, color=_style.INK)
    if name and (not few or len(ax.get_xticks()) < kv_len):
        if made:
            ax.figure.draw_without_rendering()      # lays out: from then on the axes has its size
        _name(ax, keys, mass, np.argsort(-mass, kind="stable")[:name])
    return ax


def _name(ax: Axes, keys: list[str] | None, mass: np.ndarray, chosen: np.ndarray, size: float = 8.5) -> None:
    """Names above the bars of the chosen keys, on as many levels as they need, each with a line to its bar."""
    from matplotlib.transforms import offset_copy

    room, height = _style.room(ax)
    low, high = ax.get_xlim()
    line = 1.4 * size
    max_levels = int(height / 2 / line)
    for some in range(min(len(chosen), 8 * max_levels), 0, -1):
        labels = [_label(keys, key) for key in chosen[:some]]
        levels = _style.levels([(key - low) / (high - low) * room for key in chosen[:some]], labels, size, room)
        if levels and max(levels)[0] < max_levels:
            break
    else:
        return
    count = 1 + max(levels)[0]
    ax.set_ylim(0, 1.03 * (np.nanmax(mass, initial=0) or 1.0) / (1 - count * line / height))
    for key, label, (level, ends) in zip(chosen, labels, levels, strict=False):
        at = offset_copy(ax.get_xaxis_transform(), ax.figure, y=(level - count) * line, units="points")
        ax.annotate(_style.plain(label), (key, mass[key]), (key, 1), textcoords=at, ha="right" if ends else "left",
                    va="bottom", fontsize=size, color=_style.INK, **_style.font([label]),
                    arrowprops={"arrowstyle": "-", "relpos": (ends, 0), "shrinkA": 0, "shrinkB": 0,
                                "color": _style.SOFT, "linewidth": 0.7})
