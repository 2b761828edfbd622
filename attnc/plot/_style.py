"""Style of all figures: lazy import of matplotlib, colours, norms, labels, colour bars."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .._views.colours import ramp
from .._views.tokens import shorten, thinned, width

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.colorbar import Colorbar
    from matplotlib.colors import ListedColormap, Normalize
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

INK, SOFT, FAINT, PAPER = "#1d2433", "#5b6475", "#d5d9e2", "#eef0f4"
BAR, STRONG, WARM, GREY = "#6f8fca", "#2d4a9e", "#b3541e", "#a9b1bf"
# Fonts with other scripts than Latin, Greek, Cyrillic, Hebrew and Arabic, which matplotlib's own has.
FONTS = ("Noto Sans CJK SC", "Noto Sans CJK JP", "PingFang SC", "Hiragino Sans", "Microsoft YaHei", "Malgun Gothic",
         "WenQuanYi Zen Hei", "Arial Unicode MS", "Noto Sans Devanagari", "Nirmala UI", "Noto Sans Thai",
         "Noto Sans Bengali", "Noto Sans Tamil", "Noto Sans Ethiopic", "Noto Sans Georgian", "Noto Sans Armenian")
LABEL = 14      # columns of a token's label; longer ones end with an ellipsis
NAME = 20       # of a token's name in a title
MAX_COUNT = 2**31   # of bars or maps: any number that fits
NORMS = ("sqrt", "log", "linear")


def pyplot() -> Any:
    """matplotlib.pyplot, or an ImportError that says how to get it."""
    try:
        from matplotlib import pyplot
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        raise ImportError("attnc.plot needs matplotlib: pip install matplotlib") from error
    return pyplot


def new_axes(ax: Axes | None, **size: Any) -> Axes:
    return pyplot().subplots(layout="constrained", **size)[1] if ax is None else ax


def new_figure(figure: Figure | None, **size: Any) -> Figure:
    return pyplot().figure(layout="constrained", **size) if figure is None else figure


def colours(dark: bool = False) -> ListedColormap:
    from matplotlib.colors import ListedColormap

    return ListedColormap(ramp(dark) / 255, name="attnc")


def norm(name: str | Normalize, largest: float) -> tuple[Normalize, str]:
    """From a name to matplotlib's norm and the words for the colour bar."""
    pyplot()
    from matplotlib import colors

    if name not in NORMS and not isinstance(name, colors.Normalize):
        raise ValueError(f"norm must be one of {', '.join(map(repr, NORMS))} or a matplotlib Normalize, got {name!r}")
    largest = largest if largest > 0 else 1.0
    if name == "sqrt":
        return colors.PowerNorm(0.5, vmin=0, vmax=largest), "weight (square-root colours)"
    if name == "log":
        low = largest / 1e4
        return colors.LogNorm(vmin=low, vmax=largest, clip=True), f"weight (log colours; below {low:.0e} as the lowest)"
    if name == "linear":
        return colors.Normalize(0, largest), "weight"
    return name, "weight"


def bar(
        figure: Figure, image: AxesImage, axes: Axes, name: str | Normalize, words: str, size: float = 9,
        **options: Any) -> Colorbar:
    """A colour bar that says what the colours mean, with round numbers that do not crowd and the largest."""
    largest = image.norm.vmax
    steps = [0.0]
    for exponent in range(int(np.floor(np.log10(largest))) - 2, 1):
        for step in (1, 2, 5):
            value = step * 10.0**exponent
            if value < largest and (value / largest) ** 0.5 - (steps[-1] / largest) ** 0.5 >= 0.13:
                steps.append(value)
    if 1 - (steps[-1] / largest) ** 0.5 < 0.06:
        steps.pop()
    made = figure.colorbar(image, ax=axes, ticks=[*steps, largest] if name == "sqrt" else None, **options)
    made.set_label(words, fontsize=size, color=SOFT, labelpad=6)
    made.outline.set_visible(False)
    made.ax.tick_params(length=0, labelsize=size, labelcolor=INK, which="both")
    if name == "sqrt":
        made.ax.set_yticklabels([f"{step:.3g}" for step in (*steps, largest)])
    return made


def hatch(ax: Axes) -> None:
    """Grey hatching behind the cells: it shows where none is drawn, at keys that are not allowed."""
    ax.set_facecolor("#e6e7ea")
    ax.patch.set(hatch="/////", edgecolor="#c6c9d0", linewidth=0)


def hatched(ax: Axes, corners: list[tuple[float, float]]) -> None:
    """Squares of one unit with the hatching, below what is drawn on them."""
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Rectangle

    ax.add_collection(PatchCollection([Rectangle(corner, 1, 1) for corner in corners], facecolor="#e6e7ea",
                                      edgecolor="#c6c9d0", hatch="/////", linewidth=0, zorder=-1))


def frame(ax: Axes, left: bool = False) -> None:
    """Hide the spines but, with `left`, the left one."""
    for side, spine in ax.spines.items():
        spine.set_visible(left and side == "left")
        spine.set_color(FAINT)
    ax.tick_params(length=0, labelcolor=INK)


def label_axis(axis: Axis, tokens: list[str] | None, first: np.ndarray, size: float, room: float) -> None:
    """Tokens, or positions without them, at the places whose first positions are `first`; thinned to fit `room`.

    `room` is the length of the axis in points. Tokens are written across the axis, positions along it.
    """
    across = tokens or axis.axis_name == "y"
    needed = 1.35 * size if across else (0.62 * len(str(first[-1])) + 1.2) * size
    if tokens:
        places = thinned(len(first), int(room / needed))
        names = [shorten(tokens[first[at]], LABEL) for at in places]
    else:
        steps = (step * 10**power for power in range(20) for step in (1, 2, 5))
        step = next(step for step in steps if (first[-1] + 1) / step * needed <= room or step > first[-1])
        names = [str(position) for position in range(0, first[-1] + 1, step)]
        places = np.searchsorted(first, [*map(int, names)], side="right") - 1
    axis.set_ticks(places, [plain(name) for name in names], fontsize=size, **font(names))


def row_name(names: list[str] | None, row: int) -> str:
    """What a title calls a row."""
    return shorten(names[row], NAME) if names else f"row {row}"


def font(texts: Iterable[object]) -> dict[str, list[str]]:
    """Options of a text: beside the usual fonts, those of this machine that have letters which the usual ones lack."""
    if all(sign < "\u0600" for text in texts for sign in str(text)):
        return {}
    from matplotlib import font_manager, rcParams

    here = set(font_manager.get_font_names())
    return {"fontfamily": [*rcParams["font.family"], *(name for name in FONTS if name in here)]}


def plain(text: object) -> str:
    """Text in which dollar signs are letters, not mathematics."""
    return str(text).replace("$", r"\$")


def room(ax: Axes) -> tuple[float, float]:
    """Width and height of the axes in points, before the layout is final."""
    box = ax.get_position()
    width, height = ax.figure.get_size_inches()
    return 72 * width * box.width, 72 * height * box.height


def levels(places: Sequence[float], texts: Sequence[str], size: float, room: float) -> list[tuple[int, bool]] | None:
    """How to write `texts` over the points `places` of an axis of `room` points; None if they do not fit.

    Each gets a level and whether it ends at its place rather than beginning there. The last ones end there, if they
    would leave the axis or if one after them covers their place. Each is above all whose text or place it covers;
    placed from the border between both kinds outwards, no line from a text down to its place meets another text.
    """
    order = sorted(range(len(places)), key=places.__getitem__)
    long = [0.68 * size * width(text) + size for text in texts]
    split, covered = len(order), float("inf")       # where texts that end at their place begin, and what they cover
    for rank in reversed(range(len(order))):
        at = order[rank]
        if places[at] + long[at] > room or places[at] > covered:
            split, covered = rank, min(covered, places[at] - long[at])
    if covered < 0:
        return None
    found: dict[int, tuple[int, bool]] = {}
    placed: list[tuple[int, float, float]] = []
    for ends, group in ((True, order[split:]), (False, order[split - 1::-1] if split else [])):
        for at in group:
            start, end = sorted((places[at], places[at] - long[at] if ends else places[at] + long[at]))
            level = 1 + max((level for level, low, high in placed if low <= end and start <= high), default=-1)
            placed.append((level, start, end))
            found[at] = level, ends
    return [found[at] for at in range(len(places))]


def ink_on(rgba: Sequence[float]) -> str:
    """White or ink, whichever has more contrast (WCAG 2) with a colour."""
    colour = np.array(rgba[:3])
    linear = np.where(colour <= 0.04045, colour / 12.92, ((colour + 0.055) / 1.055) ** 2.4)
    return INK if linear @ [0.2126, 0.7152, 0.0722] > 0.19 else "white"
