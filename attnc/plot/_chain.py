"""The chain for one query as one figure: score, scaled score, softmax, weight, weighted values, output."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .._checks import Args, attention_args, integer
from .._types import ArrayLike, Tokens
from .._views.source import read_array
from .._views.tokens import check_tokens, shorten, visible_lines
from ..attention import attention, attention_scores
from . import _style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

WORDS = {
    "title": "What “{token}” takes in",
    "score": "score", "score_is": "query · key",
    "scaled": "scaled score", "scaled_is": "score × {scale:.4g}",
    "masked": "final score", "masked_is": "with every option",
    "weight": "weight", "weight_is": "softmax of the scores",
    "value": "value", "value_is": "one row a key",
    "weighted": "weighted value", "weighted_is": "weight × value",
    "output": "output: their sum", "output_is": "output",
    "softmax": "weight of “{token}” = exp({score:.3f}) / Σ exp(score) = exp({score:.3f} − {lse:.3f}) = {weight:.4f}",
    "sum": "all weights sum to {total:.4f}",
    "sink": "no key (sink)", "others": "{count} other keys", "not_allowed": "not allowed",
    "colours": "value (square-root colours)",
}


def explain(
        query: ArrayLike, key: ArrayLike, value: ArrayLike, *, row: int, tokens: Tokens = None,
        key_tokens: Tokens = None, head: int | None = None, most: int = 14, words: dict[str, str] | None = None,
        figure: Figure | None = None, **options: Any) -> Figure:
    """Draw the whole chain for one query: from its scores to its output, with the numbers.

    Parameters
    ----------
    query : array (q_len, head_dim) or (heads, q_len, head_dim)
    key : array (kv_len, head_dim) or (kv_heads, kv_len, head_dim)
    value : array (kv_len, value_dim) or (kv_heads, kv_len, value_dim)
    row : int
        Which query; negative ones count from the end.
    tokens, key_tokens : list of str, optional
        Names of the queries, and of the keys where they are others.
    head : int, optional
        Which head, where there are several.
    most : int
        With more keys than this only those of the largest weights are shown, in the order of their positions; the
        others share one line.
    words : dict, optional
        Other texts for the figure, such as those of another language; the keys are those of
        ``attnc.plot._chain.WORDS``, and what is left out stays English.
    figure : matplotlib Figure or SubFigure, optional
        Where to draw; by default a new one.
    **options
        Options of `attention`: mask, bias, causal, window, q_offset, k_positions, scale, softcap, alibi_slopes, sinks,
        segments.

    Returns
    -------
    matplotlib Figure

    Raises
    ------
    ValueError, TypeError
        As `attention`; for a row or head that is not there, tokens that do not match, words that have no place.

    Examples
    --------
    >>> import attnc.plot, attnc.datasets
    >>> data = attnc.datasets.load("turkish")
    >>> figure = attnc.plot.explain(data.query, data.key, data.value, row=data.rows[0], tokens=data.tokens,
    ...                             head=data.head)
    >>> [ax.get_title(loc="left") for ax in figure.axes][:3]
    ['query · key', 'score × 0.1768', 'softmax of the scores']
    """
    if unknown := set(words or {}) - set(WORDS):
        raise ValueError(f"words has no place for {', '.join(sorted(map(repr, unknown)))}; "
                         f"there are {', '.join(WORDS)}")
    words = WORDS | {name: visible_lines(text) for name, text in (words or {}).items()}
    if wrong := options.keys() & {"want", "out", "stage", "relative_index", "relative_key", "relative_query"}:
        raise TypeError(f"explain shows every link of the chain; it has no option {', '.join(sorted(wrong))}")
    query, key, value = (read_array(name, x) for name, x in (("query", query), ("key", key), ("value", value)))
    args = attention_args(query, key, value, **options)
    if 0 in (args.q_len, args.kv_len, args.value_dim):
        raise ValueError(f"query, key and value must hold something to explain, got {args.q_len} queries and "
                         f"{args.kv_len} keys with {args.value_dim} values each")
    if args.batch:
        raise ValueError(f"query must be (q_len, head_dim) or (heads, q_len, head_dim), got a batch of {args.batch}")
    names = check_tokens("tokens", tokens, args.q_len, "the queries")
    keys = check_tokens("key_tokens", key_tokens, args.kv_len, "the keys")
    keys = names if keys is None and args.q_len == args.kv_len else keys
    row = integer("row", row, -args.q_len, args.q_len - 1) % args.q_len
    most = integer("most", most, 1, _style.MAX_COUNT)
    if head is None and args.q_heads > 1:
        raise ValueError(f"head must say which of {args.q_heads} heads is wanted")
    head = integer("head", head or 0, 0, args.q_heads - 1)
    one, key, value, options = _one_row(args, head, row)

    chain = _numbers(one, key, value, options, args.scale, words, most, keys)
    return _draw(figure, words | {"keys": chain["keys"]}, chain, _style.row_name(names, row))


def _numbers(
        one: np.ndarray, key: np.ndarray, value: np.ndarray, options: dict[str, Any], factor: float,
        words: dict[str, str], most: int, names: list[str] | None) -> dict[str, Any]:
    """Everything that the figure shows, computed link by link."""
    raw = attention_scores(one, key, stage="raw", **options)[0]
    scaled = attention_scores(one, key, stage="scaled", **options)[0]
    final = attention_scores(one, key, **options)[0]
    result = attention(one, key, value, want=("weights", "lse"), **options)
    weights, output = result.weights[0].astype(np.float64), result.output[0].astype(np.float64)
    value = value.astype(np.float64)
    order = np.argsort(-weights, kind="stable")[:most if len(weights) > most + 1 else None]
    chosen = np.sort(order)
    left = len(weights) - len(chosen)
    nowhere = 1 - weights.sum() if options["sinks"] is not None else 0.0
    label = [shorten(name, _style.LABEL) for name in names] if names else [f"key {at}" for at in range(len(weights))]
    labels = [label[at] for at in chosen]
    tail = []
    if left:
        labels.append(words["others"].format(count=left))
        tail.append(max(weights.sum() - weights[chosen].sum(), 0.0))
    if nowhere:
        labels.append(words["sink"])
        tail.append(nowhere)
    panels = [("score", words["score_is"], raw), ("scaled", words["scaled_is"].format(scale=factor), scaled)]
    if not np.array_equal(final, scaled):
        panels.append(("masked", words["masked_is"], final))
    panels = [(name, formula, np.append(numbers[chosen], [np.nan] * len(tail))) for name, formula, numbers in panels]
    panels.append(("weight", words["weight_is"], np.append(weights[chosen], tail)))
    some = weights[chosen, None]        # a weight of 0 takes nothing, whatever the value is
    weighted = np.multiply(some, value[chosen], out=np.zeros_like(value[chosen]), where=some != 0)
    lse, best = float(result.lse[0]), order[0] if len(order) else None
    sums = [words["sum"].format(total=weights.sum() + nowhere)]
    if best is not None and weights[best] > 0:
        sums.insert(0, words["softmax"].format(token=label[best], score=final[best], lse=lse, weight=weights[best]))
        terms = [f"{weights[at]:.4f} · v({label[at]})" for at in order[:3]]
        while len(terms) > 1 and sum(map(len, terms)) > 44:     # no wider than the bars
            terms.pop()
        sums.append(f"{words['output_is']} = {' + '.join(terms)}{' + …' * (len(weights) > len(terms))}")
    reach = max(float(np.abs(np.where(np.isfinite(value[chosen]), value[chosen], 0)).max(initial=0)), 1e-12)
    return {"panels": panels, "labels": labels, "keys": len(chosen), "value": value[chosen], "weighted": weighted,
            "output": output, "reach": reach, "sums": sums}


def _one_row(args: Args, head: int, row: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
    """Query, key and value of one head with one row, and the options as they are for it."""
    whole = (args.q_heads, args.q_len, args.kv_len)
    kv_head = head // (args.q_heads // args.kv_heads)
    offset = args.q_offset
    if offset is None:
        offset = int(_number(args.kv_lengths, args.kv_len)) - int(_number(args.q_lengths, args.q_len))
    options = {
        "causal": args.causal, "window": args.window, "scale": args.scale, "softcap": args.softcap,
        "q_offset": int(_number(offset, 0)) + row,
        "mask": None if args.mask is None else np.broadcast_to(args.mask, whole)[head, row:row + 1],
        "bias": None if args.bias is None else np.broadcast_to(args.bias, whole)[head, row:row + 1],
        "relative_bias": None if args.relative_bias is None else np.broadcast_to(args.relative_bias, whole)[head, row],
        "block_mask": _cells_of_row(args, head, row),
        "key_indices": _list_of_row(args, head, kv_head, row),
        "k_positions": None if args.k_positions is None else
            np.broadcast_to(args.k_positions, (args.kv_heads, args.kv_len))[kv_head],
        "key_mask": args.key_mask,
        "sinks": None if args.sinks is None else args.sinks[head:head + 1],
        "alibi_slopes": None if args.alibi_slopes is None else args.alibi_slopes[..., head:head + 1].reshape(1),
        "q_segments": None if args.q_segments is None else args.q_segments[..., row:row + 1],
        "k_segments": args.k_segments,
        "kv_lengths": None if args.kv_lengths is None else int(_number(args.kv_lengths, args.kv_len)),
        "q_lengths": None if args.q_lengths is None else int(row < int(_number(args.q_lengths, args.q_len))),
    }
    return args.query[head, row:row + 1], args.key[kv_head], np.asarray(args.value)[kv_head], options


def _cells_of_row(args: Args, head: int, row: int) -> tuple[np.ndarray, int, int] | None:
    """The mask over blocks of keys of one row."""
    if args.block_mask is None or args.block_sizes is None:
        return None
    rows, keys, _, _ = args.block_sizes
    cells = np.broadcast_to(args.block_mask, (args.q_heads, *args.block_mask.shape[-2:]))[head]
    return cells[row // rows][None], 1, keys


def _list_of_row(args: Args, head: int, kv_head: int, row: int) -> np.ndarray | None:
    """The keys that `key_indices` names for one row, (1, n)."""
    if args.key_indices is None:
        return None
    heads = len(args.key_indices)
    return args.key_indices[head if heads == args.q_heads else kv_head if heads > 1 else 0, row:row + 1]


def _number(array: int | np.ndarray | None, default: int) -> int:
    return default if array is None else np.asarray(array).reshape(-1)[0]


def _draw(figure: Figure | None, words: dict[str, Any], chain: dict[str, Any], token: str) -> Figure:
    """`chain` on one figure: bars of the scores and weights, colours for the vectors, and the two sums in numbers."""
    panels, lines = chain["panels"], len(chain["labels"])
    ratios = [1.0] * len(panels) + [1.45, 1.45]
    figure = _style.new_figure(figure, figsize=(1.6 * sum(ratios) + 0.9, 2.35 + 0.3 * lines))
    grid = figure.add_gridspec(2, len(ratios), width_ratios=ratios, height_ratios=[lines, 2.6])
    first: Any = None
    for column, (name, formula, numbers) in enumerate(panels):
        ax = figure.add_subplot(grid[0, column], sharey=first)
        first = first or ax
        _bars(ax, numbers, words, last=name == "weight")
        _head(ax, f"{column + 1}  {words[name]}", formula)
        ax.tick_params(labelleft=column == 0)
    first.set_yticks(np.arange(lines), [_style.plain(label) for label in chain["labels"]], fontsize=10,
                     **_style.font(chain["labels"]))
    first.set_ylim(lines - 0.45, -0.55)
    image = None
    for column, name in enumerate(("value", "weighted"), len(panels)):
        ax = figure.add_subplot(grid[0, column])
        image = _vectors(ax, chain[name], lines, chain["reach"])
        ax.set_ylim(first.get_ylim())
        _head(ax, f"{column + 1}  {words[name]}", words[f"{name}_is"])
    for ax in figure.axes:
        ax.xaxis.set_in_layout(False)
    below = figure.add_subplot(grid[1, -1])
    below.axis("off")
    strip = below.inset_axes([0, 0.42, 1, 0.32])
    _vectors(strip, chain["output"][None], 1, chain["reach"])
    strip.set_title(f"{len(ratios) + 1}  {words['output']}", fontsize=10, color=_style.INK, fontweight="bold",
                    loc="left", pad=5)
    _colour_key(figure.add_subplot(grid[1, -2]), image, words, chain["reach"])
    text = figure.add_subplot(grid[1, :len(panels)])
    text.axis("off")
    sums = text.text(0, 0.86, _style.plain("\n".join(chain["sums"])), fontsize=9.5, color=_style.INK, va="top",
                     linespacing=1.7, **_style.font(chain["sums"]))
    sums.set_in_layout(False)       # longer than its columns are wide, and nothing stands beside it
    figure.suptitle(_style.plain(words["title"].format(token=token)), fontsize=13, color=_style.INK, fontweight="bold",
                    x=0.01, ha="left", **_style.font([token]))
    return figure


def _head(ax: Axes, name: str, formula: str) -> None:
    ax.annotate(name, (0, 1), (0, 20), xycoords="axes fraction", textcoords="offset points", fontsize=10,
                color=_style.INK, fontweight="bold")
    # A title of its own, so that the layout makes room.
    ax.set_title(formula, fontsize=9, color=_style.SOFT, loc="left", pad=6)


def _bars(ax: Axes, numbers: np.ndarray, words: dict[str, Any], last: bool) -> None:
    """Bars from zero to both sides, each with its number beyond its end."""
    _style.frame(ax)
    finite = np.where(np.isfinite(numbers), numbers, 0)
    at = np.arange(len(numbers))
    colour = _style.STRONG if last else _style.BAR
    ax.barh(at, finite, height=0.62, color=np.where(finite < 0, _style.GREY, colour))
    low, high = min(finite.min(initial=0), 0), max(finite.max(initial=0), 0)
    span = (high - low) or 1.0
    ax.vlines(0, -0.5, len(numbers) - 0.5, color=_style.SOFT, linewidth=0.8)
    for y, number, width in zip(at, numbers, finite, strict=True):
        if np.isnan(number) and y >= words["keys"]:
            continue        # lines for other keys and the sink have weights, not scores
        text = f"{number:.{4 if last else 3}f}" if np.isfinite(number) else (
            words["not_allowed"] if number == -np.inf else str(number))
        ax.text(max(width, 0) + 0.04 * span, y, text, va="center", fontsize=9,
                color=_style.INK if np.isfinite(number) else _style.SOFT)
    ax.set(xlim=(low - 0.03 * span, high + 0.62 * span), xticks=[])


def _vectors(ax: Axes, vectors: np.ndarray, lines: int, reach: float) -> AxesImage:
    """One row of colours for each vector, signed square roots of its numbers; blue is negative, red positive."""
    _style.frame(ax)
    padded = np.full((lines, vectors.shape[1]), np.nan)
    padded[:len(vectors)] = np.sign(vectors) * np.sqrt(np.abs(vectors))
    image = ax.imshow(np.ma.masked_invalid(padded), aspect="auto", cmap="RdBu_r", vmin=-reach**0.5, vmax=reach**0.5,
                      interpolation="nearest")
    ax.hlines(np.arange(1, len(vectors)) - 0.5, -0.5, vectors.shape[1] - 0.5, color="white", linewidth=1.2)
    ax.set(xticks=[], yticks=[])
    return image


def _colour_key(ax: Axes, image: AxesImage, words: dict[str, Any], reach: float) -> None:
    ax.axis("off")
    bar = ax.figure.colorbar(image, cax=ax.inset_axes([0.0, 0.46, 1.0, 0.14]), orientation="horizontal",
                             ticks=[-reach**0.5, -(reach / 8) ** 0.5, 0, (reach / 8) ** 0.5, reach**0.5])
    bar.ax.set_xticklabels([f"{-reach:.2g}", f"{-reach / 8:.2g}", "0", f"{reach / 8:.2g}", f"{reach:.2g}"])
    bar.ax.tick_params(length=0, labelsize=8.5, labelcolor=_style.INK)
    bar.outline.set_visible(False)
    bar.set_label(words["colours"], fontsize=8.5, color=_style.SOFT)
