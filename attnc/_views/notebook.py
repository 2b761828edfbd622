"""Lazy weights as a notebook shows them: a small picture of the first heads, and text beside it."""

from __future__ import annotations

import base64
import html
import math
import struct
import zlib
from typing import TYPE_CHECKING

import numpy as np

from .colours import ramp
from .lazy import Lazy

if TYPE_CHECKING:
    from ..weights import AttentionWeights

HEADS, CELLS, SIDE, GAP = 12, 48, 96, 4
WORK = 2**25        # weights read for a picture that a notebook draws by itself: well under a second


def png(weights: AttentionWeights) -> bytes | None:
    """A picture of the first heads, at most twelve; None where one head would take long, there is no weight,
    or arrays have changed, which `page` says."""
    try:
        return _drawn(weights)
    except RuntimeError:
        return None


def _drawn(weights: AttentionWeights) -> bytes | None:
    count = _shown(weights)
    if not count:
        return None
    maps = [_map(weights, at) for at in range(count)]
    columns = min(count, 6)
    lines = -(-count // columns)
    height, width = maps[0].shape[:2]
    sheet = np.full((lines * (height + GAP) - GAP, columns * (width + GAP) - GAP, 3), 255, np.uint8)
    for at, cells in enumerate(maps):
        y, x = at // columns * (height + GAP), at % columns * (width + GAP)
        sheet[y:y + height, x:x + width] = cells
    return _png(sheet)


def page(weights: AttentionWeights) -> str:
    """The picture and, beside it, what the weights are."""
    lead, (q_len, kv_len) = weights.shape[:-2], weights.shape[-2:]
    count, heads = _shown(weights), math.prod(lead)
    lines = [f"<b>AttentionWeights</b> {html.escape(str(weights.shape))} {weights.dtype.name}",
             f"{heads:,} head{'s' * (heads != 1)}, {q_len:,} queries × {kv_len:,} keys; computed when asked for"]
    try:
        picture, changed = _drawn(weights), None
    except RuntimeError as error:
        picture, changed = None, error
    image = ""
    if picture:
        cells = "" if max(q_len, kv_len) <= CELLS else f", {min(q_len, CELLS)} × {min(kv_len, CELLS)} cells each"
        which = "Its map" if heads == 1 else f"Maps of head 0 to {count - 1}" if count > 1 else "Map of head 0"
        lines.append(f"{which}: rows are queries, columns keys{cells}; square-root colours, each up to its largest; "
                     "striped: not allowed")
        said = f"maps of the first {count} of {heads} heads" if heads > 1 else "map of the weights"
        image = f'<img alt="{said}" src="data:image/png;base64,{base64.b64encode(picture).decode()}">'
    elif changed:
        lines.append(f"Not drawn: {html.escape(str(changed))}")
    else:
        lines.append("Too many to draw unasked: <code>attnc.plot.heatmap(W)</code> or <code>W.map(bins)</code>"
                     if heads * q_len * kv_len else "Nothing to draw")
    text = "<br>".join(lines)
    return (f'<div style="display:flex;gap:14px;align-items:center;flex-wrap:wrap">{image}'
            f'<div style="max-width:32em;line-height:1.5">{text}</div></div>')


def _shown(weights: AttentionWeights) -> int:
    one = math.prod(weights.shape[-2:])
    return min(math.prod(weights.shape[:-2]), HEADS, WORK // one) if one else 0


def _map(weights: AttentionWeights, at: int) -> np.ndarray:
    """The cells of one head as colours, each some pixels wide."""
    lead = weights.shape[:-2]
    source = Lazy(weights.head(*(int(place) for place in np.unravel_index(at, lead))) if lead else weights)
    rows, keys = weights.shape[-2:]
    bins = min(rows, CELLS), min(keys, CELLS)
    pooled = source.map(bins, "mean")[0, 0]
    largest = np.nanmax(pooled, initial=0) or 1.0
    colours = ramp()[np.round(255 * np.sqrt(np.nan_to_num(pooled) / largest)).astype(int)]
    scale = max(1, SIDE // max(bins))
    colours, hidden = (np.repeat(np.repeat(array, scale, 0), scale, 1) for array in (colours, np.isnan(pooled)))
    stripes = np.add.outer(*(np.arange(length) for length in hidden.shape)) % 5 == 0
    return np.where(hidden[..., None], np.where(stripes, 196, 232)[..., None], colours).astype(np.uint8)


def _png(pixels: np.ndarray) -> bytes:
    """An RGB image as PNG (ISO/IEC 15948): signature, header, data, end; each line begins with filter type 0."""
    height, width = pixels.shape[:2]
    lines = np.concatenate([np.zeros((height, 1), np.uint8), pixels.reshape(height, -1)], axis=1)

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    return (b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
            + chunk(b"IDAT", zlib.compress(lines.tobytes(), 9)) + chunk(b"IEND", b""))
