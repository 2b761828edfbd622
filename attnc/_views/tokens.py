"""Tokens as people read them: without sub-word marks, shortened, and thinned to what fits."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

import numpy as np

from .._checks import integer

_BLANKS = {"": "∅", " ": "␣", "\n": "⏎", "\t": "⇥", "\r": "␍"}


def check_tokens(name: str, tokens, length: int, of: str) -> list[str] | None:
    """`tokens` as a list of str, one for each of `length` positions, cleaned; None stays None."""
    if tokens is None:
        return None
    if isinstance(tokens, (str, bytes)) or not isinstance(tokens, (Sequence, np.ndarray)):
        raise TypeError(f"{name} must be a list of str, got {type(tokens).__name__}")
    tokens = [str(token) for token in tokens]
    if len(tokens) != length:
        raise ValueError(f"{name} must be as many as {of}, {length}, got {len(tokens)}")
    return clean(tokens)


def clean(tokens: Sequence[str]) -> list[str]:
    """Tokens without the marks of sub-words: ``▁`` (SentencePiece), ``##`` (WordPiece), ``Ġ`` (bytes as letters).

    Where a ``Ġ`` or ``Ċ`` shows that bytes are written as letters, as in GPT-2, they are turned back into text;
    a token that is a part of a character stays as it is.
    """
    bytewise = any("Ġ" in token or "Ċ" in token for token in tokens)
    return [_clean(_decoded(token) if bytewise else token) for token in tokens]


def _clean(token: str) -> str:
    bare = token.lstrip("▁ ").removeprefix("##") or token.replace("▁", " ")
    bare = "".join(_BLANKS.get(sign, sign) for sign in bare) if not bare.strip() else bare.replace("\n", "⏎")
    return bare or _BLANKS[""]


def _decoded(token: str) -> str:
    try:
        return bytes(_BYTES[sign] for sign in token).decode()
    except (KeyError, UnicodeDecodeError):      # a special token, or a part of a character
        return token


def _letters() -> dict[str, int]:
    """The letter by which byte-level vocabularies write each byte: printable ones stand for themselves."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}


_BYTES = _letters()


def width(text: str) -> int:
    """How many columns a terminal gives to `text`: two for a wide letter, none for a combining one."""
    return sum(0 if unicodedata.combining(sign) or unicodedata.category(sign) == "Cf"
               else 2 if unicodedata.east_asian_width(sign) in "WF" else 1 for sign in text)


def shorten(text: str, columns: int) -> str:
    """`text` in at most `columns` columns, the end replaced by an ellipsis."""
    if width(text) <= columns:
        return text
    while text and width(text) > columns - 1:
        text = text[:-1]
    return text + "…"


def starts(length: int, bins: int) -> np.ndarray:
    """The first position of each bin, where position i is in bin ``i * bins // length``."""
    return -(-np.arange(bins) * length // bins)


def check_bins(bins, q_len: int, kv_len: int, default: int) -> tuple[int, int]:
    """`bins` as (row bins, column bins); None is at most `default` each; an int is cut to each length."""
    if bins is None:
        return min(default, q_len), min(default, kv_len)
    if isinstance(bins, (tuple, list)):
        if len(bins) != 2:
            raise ValueError(f"bins must be an integer or a pair (row_bins, col_bins), got {bins}")
        return integer("row_bins", bins[0], 1, q_len), integer("col_bins", bins[1], 1, kv_len)
    bins = integer("bins", bins, 1, max(q_len, kv_len))
    return min(bins, q_len), min(bins, kv_len)


def thinned(count: int, most: int) -> np.ndarray:
    """Positions of at most `most` labels among `count`, in even steps from 0."""
    return np.arange(0, count, max(1, -(-count // max(most, 1))))
