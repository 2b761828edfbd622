"""One HTML file to explore attention weights in a browser, without the network and without the matrix."""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Sequence
from importlib.resources import files
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from .._checks import integer
from .._files import write_text
from .._types import ArrayLike, Bins, Head, Progress, Shape, Tokens
from .colours import ramp
from .source import Source, check_row, load, pick, telling
from .tokens import address, check_bins, check_tokens, shorten, visible

CODE_BITS = 24              # of a key and its weight together
MAX_KEYS = 2**16            # leaves 8 bits for the weight
MAX_TOP = 64
NAME = 200                  # columns of a token; the page does not grow with longer ones
PERCENTILE = 99


def explorer(
        weights: ArrayLike | Source, tokens: Tokens = None, *, key_tokens: Tokens = None,
        path: str | PathLike[str] | None = None, mask: ArrayLike | None = None, bins: Bins = None,
        top: int | None = None, head: Head = None, row: int | None = None, title: str = "Attention weights",
        progress: Progress = None) -> Page:
    """Make one self-contained HTML page in which weights can be looked at, head by head and row by row.

    An overview of all heads, ordered by layer or by a statistic; the pooled map of one; for the row under the pointer
    or chosen by the arrow keys its largest weights as words and numbers, its entropy, and the shares of the sink and of
    the first key apart. The file needs no network; it follows the light or dark setting of its reader.

    Parameters
    ----------
    weights : array (..., heads, q_len, kv_len), AttentionWeights, or a list or tuple of these, one a layer
        Axes before the heads are layers. An array is all that NumPy can read, such as the ``attentions`` of a model in
        torch. Lazy weights are swept tile by tile: the matrix is never built.
    tokens : list of str, optional
        Names of the queries, and of the keys too where there are as many; in any script. Sub-word marks are taken off.
    key_tokens : list of str, optional
        Names of the keys, where they are others: then distances between positions mean nothing and are left out.
    path : str or path-like, optional
        File to write; it appears whole or not at all.
    mask : bool array that broadcasts to the weights, optional
        For arrays: True where a key is allowed. Without it a weight of exactly 0 counts as not allowed.
    bins : int or (row_bins, col_bins), optional
        Cells of each map; by default the lengths, at most 96 each. A cell is one byte.
    top : int, optional
        Largest weights kept for each row, 8 by default and 64 at most. Each takes three bytes: the index of the key in
        as many bits as it needs, the square root of the weight in the rest (15 bits for 512 keys, where a weight is off
        by less than 0.00004).
    head : int or (layer, head), optional
        The head that is shown first; by default the first one.
    row : int, optional
        The row that is shown first, negative ones count from the end; by default the row of that head whose largest
        weight away from the first key stands out most.
    title : str
        Heading of the page.
    progress : bool or function, optional
        As in `AttentionWeights.topk`, for lazy weights.

    Returns
    -------
    Page
        ``page.html`` is the text, ``page.save(path)`` writes it, and a notebook shows it; printed, it says where it was
        written and how to open it.

    Raises
    ------
    ValueError, TypeError
        More than 65,536 keys; tokens that do not match the length; bins of 0 or more than the length; a head or row
        that is not there; layers of different shapes; what is no array of weights.
    OSError
        If the file cannot be written.

    Notes
    -----
    The colours of a map end at its largest weight; where that is twice the 99th percentile of all cells without the
    first key, as in causal models, they end at the percentile, and a checkbox of the page changes it.

    The size is about 4/3 (bins² + q_len (3 top + 6)) bytes a head: under 5 MB for 12 layers of 12 heads and 512 tokens.

    Examples
    --------
    >>> import attnc, attnc.datasets
    >>> data = attnc.datasets.load("turkish")
    >>> page = attnc.explorer(attnc.AttentionWeights(data.query, data.key), data.tokens)
    >>> page.html.startswith("<!DOCTYPE html>"), len(page.html) < 60_000
    (True, True)
    """
    source = load(weights, mask)
    q_len, kv_len = source.shape[2:]
    if kv_len > MAX_KEYS:
        raise ValueError(f"weights must have at most {MAX_KEYS} keys to be explored, got {kv_len}; attnc.plot.heatmap "
                         "and AttentionWeights.map have no such bound")
    names = check_tokens("tokens", tokens, q_len, "the queries")
    key_names = check_tokens("key_tokens", key_tokens, kv_len, "the keys")
    bins = check_bins(bins, q_len, kv_len, 96)
    top = min(8 if top is None else integer("top", top, 1, MAX_TOP), kv_len)
    layer, head = (0, 0) if head is None else pick(source, head)
    row = None if row is None else check_row(source, row)
    same = bool(names and not key_names and q_len == kv_len)
    summary = source.summary(bins, top, progress)
    if row is None:
        row = telling(summary[0][layer, head], q_len)
    data = _data(source, summary, bins, top, cross=key_names is not None)
    names, key_names = (found and [shorten(name, NAME) for name in found] for found in (names, key_names))
    data |= {"tokens": names, "keyTokens": key_names, "same": same, "head": layer * source.shape[1] + head, "row": row}
    page = Page(visible(str(title)), data, source.shape)
    if path is not None:
        page.save(path)
    return page


class Page:
    """A self-contained HTML page.

    Attributes
    ----------
    html : str
        The whole page.
    """

    def __init__(self, title: str, data: dict[str, Any], shape: Shape) -> None:
        self._shape, self._title = shape, f"{title}: {_counts(shape)}"
        self._path: Path | None = None
        self.html = _page(title, self._title, data)

    def save(self, path: str | PathLike[str]) -> Path:
        """Write the page to `path`, whole or not at all, and return the path."""
        write_text(path, self.html)
        self._path = Path(path)
        return self._path

    def __repr__(self) -> str:
        written = f"; written, open {address(self._path)}" if self._path else ""
        return f"Page({_counts(self._shape)}: {round(len(self.html.encode()) / 1000):,} kB{written})"

    def _repr_html_(self) -> str:
        return (f'<iframe srcdoc="{html.escape(self.html)}" title="{html.escape(self._title)}" '
                'sandbox="allow-scripts" style="width:100%;height:800px;border:0"></iframe>')


def _counts(shape: Shape) -> str:
    names = (("layer", "layers"), ("head", "heads"), ("query", "queries"), ("key", "keys"))
    return ", ".join(f"{count:,} {name[count != 1]}" for count, name in zip(shape, names, strict=True))


def _data(
        source: Source, summary: Sequence[np.ndarray], bins: tuple[int, int], top: int, cross: bool) -> dict[str, Any]:
    """Data of the page: maps, rows and statistics, encoded."""
    layers, heads, q_len, kv_len = source.shape
    pooled, weights, keys, entropy, distance, nowhere = summary
    first = source.column(0)
    shares = [first, nowhere if nowhere.any() else None]
    largest = np.maximum(np.nan_to_num(pooled).max((-1, -2)), np.finfo(np.float32).tiny)
    # The fourth root: colours that end at a percentile, a small part of the largest, still have many steps.
    levels = 1 + np.round(254 * np.sqrt(np.sqrt(np.nan_to_num(pooled) / largest[..., None, None])))
    levels = np.where(np.isnan(pooled), 0, levels)
    bits = CODE_BITS - max(1, (kv_len - 1).bit_length())
    best = _codes(weights, keys, bits)
    places = [(layer, head) for layer in range(layers) for head in range(heads)]
    return {
        "layers": layers, "heads": heads, "rows": q_len, "keys": kv_len, "bins": bins, "top": top, "weightBits": bits,
        "maps": _text(levels.astype(np.uint8)), "largest": largest.ravel().tolist(),
        "percentile": PERCENTILE, "high": _high(pooled, largest),
        "rowData": [[_text(entropy[at].astype("<f4")), *(share if share is None else _text(_sixteenths(share[at]))
                                                         for share in shares), _text(best[at])] for at in places],
        "statistics": _statistics(entropy, None if cross else distance, first, nowhere,
                                  None if cross else source.diagonal(kv_len - q_len - 1)),
        "colours": {"light": _text(ramp()), "dark": _text(ramp(dark=True))},
    }


def _high(pooled: np.ndarray, largest: np.ndarray) -> Any:
    """For each head the weight that all but a hundredth of the cells stay below, those of the first key aside."""
    inner = pooled[..., 1:].reshape(*largest.shape, -1)
    found = [np.percentile(cells, PERCENTILE) if cells.size else 0
             for cells in (row[~np.isnan(row)] for row in inner.reshape(largest.size, -1))]
    return np.where(np.array(found) > 0, found, largest.ravel()).astype(float).tolist()


def _statistics(
        entropy: np.ndarray, distance: np.ndarray | None, first: np.ndarray, nowhere: np.ndarray,
        previous: np.ndarray | None) -> dict[str, Any]:
    """Statistics by which the page sorts heads, each the mean over a head's rows, where it has a meaning."""
    found = {
        "entropy": ("entropy", " nats", 1, entropy), "distance": ("distance", "", 1, distance),
        "first": ("first key", "share", -1, first), "previous": ("key before", "share", -1, previous),
        "none": ("no key", "share", -1, nowhere if nowhere.any() else None),
    }
    return {name: {"label": label, "unit": unit, "sort": sort, "values": _means(rows)}
            for name, (label, unit, sort, rows) in found.items() if rows is not None}


def _means(rows: np.ndarray) -> Any:
    """Means over the rows that are no NaN; 0 where there is none."""
    good = ~np.isnan(rows)
    return (np.where(good, rows, 0).sum(-1) / np.maximum(good.sum(-1), 1)).round(5).ravel().tolist()


def _codes(weights: np.ndarray, keys: np.ndarray, bits: int) -> np.ndarray:
    """Three bytes for each key and weight, lowest first; 0 where there is none."""
    roots = np.round(np.sqrt(np.clip(np.nan_to_num(weights), 0, 1)) * (2**bits - 1)).astype(np.uint32)
    codes = np.where((keys >= 0) & (roots > 0), keys.astype(np.uint32) << np.uint32(bits) | roots, 0).astype("<u4")
    return np.asarray(codes[..., None].view(np.uint8)[..., :3])


def _sixteenths(share: np.ndarray) -> np.ndarray:
    return np.asarray(np.round(np.clip(np.nan_to_num(share), 0, 1) * 65535), "<u2")


def _text(array: np.ndarray) -> str:
    return base64.b64encode(np.ascontiguousarray(array).tobytes()).decode("ascii")


def _page(title: str, whole_title: str, data: dict[str, Any]) -> str:
    """The page with its style, program and data inside."""
    html_, css, js = (files(__package__).joinpath(f"page.{kind}").read_text(encoding="utf-8")
                      for kind in ("html", "css", "js"))
    # "<" would end the element that holds the data.
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return html_ % {"title": html.escape(title), "whole": html.escape(whole_title), "css": css, "js": js, "data": text}
