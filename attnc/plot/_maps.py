"""Maps of weights: one head, or all of them side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .._checks import integer
from .._checks.weights import check_progress
from .._types import ArrayLike, Bins, Head, Progress, Reduced, Tokens
from .._views.source import Source, Steps, head_name, load, pick
from .._views.tokens import check_bins, check_tokens, starts
from . import _style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap, Normalize
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

REDUCE = ("mean", "max")
GAP = 0.1       # between the maps of heads, as a part of their side
STATISTICS = {
    "entropy": "entropy {:.2f} nats",
    "distance": "{:.1f} keys away",
    "first": "{:.0%} on the first key",
    "previous": "{:.0%} on the key before",
}


def check_reduce(reduce: Reduced) -> Reduced:
    if reduce not in REDUCE:
        raise ValueError(f"reduce must be 'mean' or 'max', got {reduce!r}")
    return reduce


def heatmap(
        weights: ArrayLike | Source, tokens: Tokens = None, *, key_tokens: Tokens = None, head: Head = None,
        mask: ArrayLike | None = None, bins: Bins = None, reduce: Reduced = "mean", norm: str | Normalize = "sqrt",
        cmap: str | Colormap | None = None, colorbar: bool = True, numbers: bool | None = None, ax: Axes | None = None,
        progress: Progress = None, **imshow: Any) -> Axes:
    """Draw the weights of one head, or the mean over heads, as a map: a row for each query, a column for each key.

    Parameters
    ----------
    weights : array (..., q_len, kv_len) or AttentionWeights
        Lazy weights are pooled by the kernel first, tile by tile; an array by NumPy.
    tokens : list of str, optional
        Names of the queries, and of the keys too where there are as many. Sub-word marks are taken off; labels are
        thinned to what can be read. Positions without it.
    key_tokens : list of str, optional
        Names of the keys, where they are others.
    head : int or (layer, head), optional
        Which head. None is the only one, or the mean over all of them (with ``reduce="max"`` the largest).
    mask : bool array that broadcasts to the weights, optional
        True where a key is allowed. Without it a weight of exactly 0 in an array counts as not allowed; lazy weights
        know their own. Places that are not allowed are hatched, whatever the colour of 0.
    bins : int or (row_bins, col_bins), optional
        Cells of the map; by default the lengths, at most 256 each.
    reduce : {"mean", "max"}
        What a pooled cell shows: the mean over its rows of their weight on all of its keys; or the largest weight.
    norm : {"sqrt", "log", "linear"} or matplotlib Normalize
        How weights become colours. The colour bar says it. Linear colours hide all but the largest weights.
    cmap : optional
        Any colour map of matplotlib.
    colorbar : bool
        Whether to draw it.
    numbers : bool, optional
        Whether to write the weights into the cells; by default where there are at most 12 by 12.
    ax : matplotlib Axes, optional
        Where to draw; by default a figure of its own.
    progress : bool or function, optional
        As in `AttentionWeights.map`, for lazy weights.
    **imshow
        More options of ``Axes.imshow``.

    Returns
    -------
    matplotlib Axes

    Raises
    ------
    ValueError, TypeError
        For tokens that do not match the length, bins that are 0 or more than the length, a head that is not there.

    Examples
    --------
    >>> import attnc.plot, attnc.datasets
    >>> data = attnc.datasets.load("turkish")
    >>> weights = attnc.attention_weights(data.query, data.key)
    >>> ax = attnc.plot.heatmap(weights, data.tokens, head=data.head)
    >>> ax.get_title()
    'head 3'
    """
    source = load(weights, mask)
    layers, heads, q_len, kv_len = source.shape
    tokens, key_tokens = _names(tokens, key_tokens, q_len, kv_len)
    check_reduce(reduce)
    check_progress(progress)
    bins = check_bins(bins, q_len, kv_len, 256)
    chosen = None if head is None and layers * heads > 1 else pick(source, head)
    if chosen is not None:
        pooled = source.only(*chosen).map(bins, reduce, progress)[0, 0]
        title = head_name(source, chosen)
    else:
        pooled = _over_heads(source.map(bins, reduce, progress), reduce)
        title = f"{'mean' if reduce == 'mean' else 'largest'} of {head_name(source, None)}"
    scale, words = _style.norm(norm, np.nanmax(pooled, initial=0))
    made = ax is None
    ax = _style.new_axes(ax, figsize=(6.4, 5.6))
    image = draw(ax, pooled, scale, cmap, **imshow)
    size = 9 if max(bins) <= 24 else 8
    width, height = _style.room(ax)
    # Without a fixed shape of cells, an axes of its own loses about a quarter to labels and the bar.
    _style.label_axis(ax.yaxis, tokens, starts(q_len, bins[0]), size, height * (0.8 if made else 1))
    _style.label_axis(ax.xaxis, key_tokens, starts(kv_len, bins[1]), size, width * (0.8 if made else 1))
    ax.tick_params(axis="x", rotation=90 if key_tokens else 0)
    ax.set(xlabel="key", ylabel="query")
    ax.set_title(title, fontsize=11, color=_style.INK)
    if bins != (q_len, kv_len):
        of = "mean weight of a row on a cell" if reduce == "mean" else "largest weight in a cell"
        words = f"{words}\n{of}, {bins[0]} × {bins[1]} cells"
    if np.isnan(pooled).any():
        words += "\nhatched: not allowed"
    if colorbar:
        _style.bar(ax.figure, image, ax, norm, words, shrink=0.9)
    if max(bins) <= 12 if numbers is None else numbers:
        _numbers(ax, image, pooled)
    return ax


def _numbers(ax: Axes, image: AxesImage, pooled: np.ndarray) -> None:
    for (row, column), weight in np.ndenumerate(pooled):
        if not np.isnan(weight):
            text = f"{weight:.2f}".removeprefix("0") if weight >= 0.005 else "0"
            ax.text(column, row, text, ha="center", va="center", fontsize=7.5,
                    color=_style.ink_on(image.cmap(image.norm(weight))))


def draw(ax: Axes, pooled: np.ndarray, scale: Normalize, cmap: str | Colormap | None, **imshow: Any) -> AxesImage:
    """The cells of a map; those without a number let the hatching of the axes through."""
    _style.hatch(ax)
    _style.frame(ax)
    options = {"aspect": "auto", "interpolation": "nearest", "cmap": cmap or _style.colours(), "norm": scale} | imshow
    return ax.imshow(np.ma.masked_invalid(pooled), **options)


def _names(tokens: Tokens, key_tokens: Tokens, q_len: int, kv_len: int) -> tuple[list[str] | None, list[str] | None]:
    """Names of queries and keys; the keys take those of the queries where there are as many."""
    names = check_tokens("tokens", tokens, q_len, "the queries")
    keys = check_tokens("key_tokens", key_tokens, kv_len, "the keys")
    return names, names if keys is None and q_len == kv_len else keys


def _over_heads(pooled: np.ndarray, reduce: Reduced) -> np.ndarray:
    pooled = pooled.reshape(-1, *pooled.shape[-2:])
    allowed = ~np.isnan(pooled).all(0)
    filled = np.nan_to_num(pooled)
    return np.where(allowed, filled.mean(0) if reduce == "mean" else filled.max(0), np.nan)


def statistic(source: Source, name: str, progress: Progress = None) -> np.ndarray:
    """One number for each head, (layers, heads): the mean over its rows."""
    q_len, kv_len = source.shape[2:]
    if name == "entropy":
        rows = source.entropy(progress=progress)
    elif name == "distance":
        rows = source.mean_distance(progress=progress)
    elif name == "first":
        rows = source.column(0, progress=progress)
    else:
        rows = source.diagonal(kv_len - q_len - 1, progress=progress)
    return np.asarray(rows.mean(-1))


def heads(
        weights: ArrayLike | Source, *, mask: ArrayLike | None = None, order: str | None = None,
        most: int | None = None, bins: Bins = None, reduce: Reduced = "mean", norm: str | Normalize = "sqrt",
        cmap: str | Colormap | None = None, columns: int | None = None, figure: Figure | None = None,
        progress: Progress = None) -> Figure:
    """Draw a small map of every head, in a grid of layers and heads or ordered by a statistic.

    All maps are images of one Axes, each with its title as a text above it; rows are queries, columns keys.

    Parameters
    ----------
    weights : array (..., heads, q_len, kv_len), AttentionWeights, or a list of these, one a layer
        Axes before the heads are layers.
    mask, reduce, norm, cmap
        As in `heatmap`. All maps share their colours, which the bar explains.
    order : {None, "entropy", "distance", "first", "previous"}
        None keeps the grid. Otherwise the maps are sorted by the mean over rows of: the entropy in nats, smallest
        first; the distance from a row to the keys it weighs, smallest first; the weight on the first key, largest
        first; the weight on the key before the row's own position, largest first. Titles give the number.
    most : int, optional
        At most this many maps, the first of the order.
    bins : int or (row_bins, col_bins), optional
        Cells of each map; by default the lengths, at most 48 each.
    columns : int, optional
        Maps in a row of the figure.
    figure : matplotlib Figure or SubFigure, optional
        Where to draw; by default a new one.
    progress : bool or function, optional
        As in `AttentionWeights.map`, for lazy weights.

    Returns
    -------
    matplotlib Figure

    Raises
    ------
    ValueError, TypeError
        As `heatmap`, and for an order that is not in the list.

    Examples
    --------
    >>> import attnc.plot, attnc.datasets
    >>> data = attnc.datasets.load("coreference")
    >>> weights = attnc.attention_weights(data.query, data.key)
    >>> figure = attnc.plot.heads(weights, order="entropy", most=6)
    >>> figure.axes[0].texts[0].get_text()
    'head 5\\nentropy 0.83 nats'
    """
    source = load(weights, mask)
    layers, count, q_len, kv_len = source.shape
    if order is not None and order not in STATISTICS:
        raise ValueError(f"order must be None or one of {', '.join(map(repr, STATISTICS))}, got {order!r}")
    most = layers * count if most is None else integer("most", most, 1, _style.MAX_COUNT)
    bins = check_bins(bins, q_len, kv_len, 48)
    check_reduce(reduce)
    with Steps(progress, 1 if order is None else 2) as steps:
        shown, texts = _ordered(source, order, min(most, layers * count), steps)
        maps = source.map(bins, reduce, steps.part())
    if columns is None:
        columns = count if order is None and layers > 1 else _columns(len(shown))
    columns = min(integer("columns", columns, 1, _style.MAX_COUNT), len(shown))
    lines = -(-len(shown) // columns)
    side, size = (1.6, 8) if columns <= 6 else (1.1, 6.5)       # of a map in inches, of its title in points
    title = (1.35 * size * (2 if order else 1) + 4) / 72
    if figure is not None:      # of any size: titles stay as narrow as their maps
        side = _side(figure, columns, lines, title)
        size = min(size, 72 * side / (0.6 * max(len("L00 H00"), len(texts[0]))))
    above = title / side
    scale, words = _style.norm(norm, np.nanmax(maps, initial=0))
    from matplotlib.image import AxesImage

    cmap = cmap or _style.colours()
    wide, tall = columns * (1 + GAP) - GAP, lines * (1 + above + GAP) - GAP
    made = figure is None
    figure = _style.new_figure(figure, figsize=(max(side * wide + 1.2, 3.2), max(side * tall + 0.5, 2.5)))
    ax = figure.subplots()
    _style.frame(ax)
    corners = []
    for at, ((layer, head), text) in enumerate(zip(shown, texts, strict=True)):
        x, y = at % columns * (1 + GAP), at // columns * (1 + above + GAP) + above
        corners.append((x, y))
        image = AxesImage(ax, extent=(x, x + 1, y + 1, y), norm=scale, cmap=cmap, interpolation="nearest")
        image.set_data(np.ma.masked_invalid(maps[layer, head]))
        image.set_in_layout(False)
        ax.add_image(image)
        name = f"L{layer} H{head}" if layers > 1 else f"head {head}"
        ax.text(x + 0.5, y - 3 / 72 / side, name + text, fontsize=size, color=_style.INK, ha="center", va="bottom",
                in_layout=False)
    if np.isnan(maps).any():
        _style.hatched(ax, corners)
        words += "\nhatched: not allowed"
    ax.set(xlim=(0, wide), ylim=(tall, 0), aspect="equal", xticks=[], yticks=[], xlabel="key", ylabel="query")
    shrink = min(1, 6 / figure.get_figheight()) if made else 1     # as high as six inches beside many maps
    _style.bar(figure, image, ax, norm, words, size=8, aspect=35, pad=0.01, shrink=shrink, anchor=(0, 1))
    return figure


def _side(figure: Figure, columns: int, lines: int, title: float) -> float:
    """The inches of a map in a figure of this size, beside labels and the colour bar, below `title` inches of title."""
    width, height = map(float, figure.bbox.size / figure.dpi)
    return max(min((width - 1.2) / columns, (height - 0.5) / lines - title) / (1 + GAP), 0.1)


def _columns(count: int) -> int:
    """Maps in a line: few have four or six, many make a page that is a little wider than high."""
    return min(count, 4) if count <= 12 else max(6, round((4 / 3 * count) ** 0.5))


def _ordered(source: Source, order: str | None, most: int, steps: Steps) -> tuple[list[tuple[int, int]], list[str]]:
    """The (layer, head) of each map and what its title adds."""
    layers, count = source.shape[:2]
    pairs = [(layer, head) for layer in range(layers) for head in range(count)]
    if order is None:
        return pairs[:most], [""] * most
    values = statistic(source, order, steps.part())
    sign = 1 if order in ("entropy", "distance") else -1
    pairs.sort(key=lambda pair: sign * values[pair])
    return pairs[:most], ["\n" + STATISTICS[order].format(values[pair]) for pair in pairs[:most]]
