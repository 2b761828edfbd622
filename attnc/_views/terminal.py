"""Weights in a terminal: a pooled map in shaded blocks, and the largest weights of a row."""

from collections.abc import Iterator

import numpy as np

from .._types import Head, Progress, Tokens
from .colours import ramp
from .source import Source, check_row, entropy_of, head_name, pick, telling
from .tokens import check_bins, check_tokens, shorten, starts, width

BLOCKS, PLAIN = "  ░░▒▒▓▓██", "  ..::++##"      # five shades, two columns each
HIDDEN = "··", "--"                              # a cell that is not allowed
BAR = "█▏▎▍▌▋▊▉"
SIGNS = BLOCKS + BAR + "·×›…“”"                  # what a terminal must be able to write
LABEL = 14


def show(
        source: Source, tokens: Tokens = None, key_tokens: Tokens = None, *, head: Head = None, row: int | None = None,
        top: int = 8, columns: int = 80, colour: bool = False, ascii: bool = False, progress: Progress = None) -> str:
    """The text of a map and one of its rows.

    Parameters
    ----------
    source : from `source.load`
    tokens, key_tokens, head
        As in `attnc.plot.heatmap`.
    row : int, optional
        Which row is listed; by default the one whose largest weight away from the first key stands out most.
    top : int
        How many of its keys are listed.
    columns : int
        Width of the terminal.
    colour : bool
        Backgrounds in 256 colours instead of shades.
    ascii : bool
        Only ASCII signs, for terminals that have no others.
    progress : bool or function, optional
        As in `AttentionWeights.map`, for lazy weights.

    Returns
    -------
    str
    """
    layers, heads, q_len, kv_len = source.shape
    names = check_tokens("tokens", tokens, q_len, "the queries")
    keys = check_tokens("key_tokens", key_tokens, kv_len, "the keys")
    keys = names if keys is None and q_len == kv_len else keys
    chosen = None if head is None and layers * heads > 1 else pick(source, head)
    one = source if chosen is None else source.only(*chosen)
    label = max(map(width, (shorten(name, LABEL) for name in names or [str(q_len - 1)])))
    max_cells = max((columns - label - 3) // 2, 4)
    bins = min(check_bins(None, q_len, kv_len, max_cells)[0], 32), check_bins(None, q_len, kv_len, max_cells)[1]
    pooled = one.map(bins, "mean", progress).reshape(-1, *bins)
    allowed = ~np.isnan(pooled).all(0)
    pooled = np.where(allowed, np.nan_to_num(pooled).mean(0), np.nan)
    row = telling(pooled, q_len) if row is None else check_row(source, row)

    which = "mean of " * (chosen is None) + (head_name(source, chosen) or "head 0")
    cells = f", {bins[0]} × {bins[1]} cells" if bins != (q_len, kv_len) else ""
    lines = [f"{which}: {q_len} queries × {kv_len} keys{cells}", ""]
    lines += _map(pooled, names, label, row, q_len, colour, ascii)
    lines += [_positions(bins[1], kv_len, label), *_legend(pooled, allowed, columns, colour, ascii), ""]
    lines += _row(one, row, names, keys, top, columns, ascii)
    text = "\n".join(line.rstrip() for line in lines)
    return text.translate(str.maketrans("×›…“”", "x>~''")) if ascii else text


def _map(
        pooled: np.ndarray, names: list[str] | None, label: int, row: int, q_len: int, colour: bool,
        ascii: bool) -> Iterator[str]:
    first, largest = starts(q_len, len(pooled)), np.nanmax(pooled, initial=0) or 1.0
    for at, cells in enumerate(pooled):
        here = row * len(pooled) // q_len == at
        start = row if here else first[at]
        name = shorten(names[start], LABEL) if names else str(start)
        yield f"{' ' * (label - width(name))}{name} {'›' if here else ' '}" + "".join(
            _cell(weight, largest, colour, ascii) for weight in cells) + ("\x1b[0m" if colour else "")


def _cell(weight: float, largest: float, colour: bool, ascii: bool) -> str:
    if np.isnan(weight):
        return ("\x1b[0m" if colour else "") + HIDDEN[ascii]
    part = (weight / largest) ** 0.5
    if not colour:
        level = round(4 * float(part))
        return (PLAIN if ascii else BLOCKS)[2 * level:2 * level + 2]
    red, green, blue = (round(5 * value / 255) for value in ramp(dark=True)[round(255 * part)].tolist())
    return f"\x1b[48;5;{16 + 36 * red + 6 * green + blue}m  "


def _positions(count: int, kv_len: int, label: int) -> str:
    """The positions of keys below their columns, where there is room."""
    first, text = starts(kv_len, count), ""
    for at in range(0, count, max(1, -(-(len(str(kv_len)) + 1) // 2) if kv_len > 10 else 1)):
        text = text.ljust(2 * at) + str(first[at])
    return " " * (label + 2) + text


def _legend(pooled: np.ndarray, allowed: np.ndarray, columns: int, colour: bool, ascii: bool) -> Iterator[str]:
    """What shades mean, with fewer steps where there is less room."""
    largest, end = np.nanmax(pooled, initial=0) or 1.0, "\x1b[0m" if colour else ""
    steps = (part * part * largest for part in ((0, 0.25, 0.5, 0.75, 1) if columns >= 70 else (0, 0.5, 1)))
    yield "square-root shades: " + " ".join(f"{_cell(step, largest, colour, ascii)}{end} {step:.2g}" for step in steps)
    if not allowed.all():
        yield f"{HIDDEN[ascii]} not allowed"


def _row(
        source: Source, row: int, names: list[str] | None, keys: list[str] | None, top: int, columns: int,
        ascii: bool) -> Iterator[str]:
    """The largest weights of one row, averaged over heads where there are several."""
    layers, heads = source.shape[:2]
    places = [source.row(layer, head, row) for layer in range(layers) for head in range(heads)]
    shares, seen, none = zip(*places, strict=True)
    share, allowed, nowhere = np.asarray(np.mean(shares, 0, np.float64)), np.any(seen, axis=0), float(np.mean(none))
    entropy = entropy_of(share, nowhere)
    who = f"row {row}" + (f" “{shorten(names[row], 2 * LABEL)}”" if names else "")
    yield f"{who}: entropy {entropy:.2f} nats, {np.exp(entropy):.1f} effective keys"
    if nowhere:
        yield f"  {nowhere:.4f} on no key (sink)"
    order = np.argsort(-share, kind="stable")
    order = order[allowed[order]][:top]
    label = max((width(shorten(keys[at], 2 * LABEL)) for at in order), default=0) if keys else 0
    room = max(min(columns - label - 22, 40), 4)
    for at in order:
        name = shorten(keys[at], 2 * LABEL) if keys else ""
        eighths = round(8 * room * float(np.nan_to_num(share[at] / (share[order[0]] or 1))))
        bar = "#" * (eighths // 8) if ascii else "█" * (eighths // 8) + (BAR[eighths % 8] if eighths % 8 else "")
        yield f"  {name}{' ' * (label - width(name))}  key {at:<6} {share[at]:.4f} {bar}"
    if not len(order):
        yield "  it may see no key"
