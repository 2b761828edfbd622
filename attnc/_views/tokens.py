"""Text as people read it: tokens without sub-word marks, control characters as escapes, labels that fit."""

import re
import unicodedata
from collections.abc import Sequence
from os import PathLike
from pathlib import Path

import numpy as np

from .._checks import integer
from .._types import Bins, Tokens

_BLANKS = {"": "∅", " ": "␣", "\n": "⏎", "\t": "⇥", "\r": "␍"}
_BREAKS = {sign: shown for sign, shown in _BLANKS.items() if sign.strip(" ")}
SIGNS = 16      # letters and combining marks that a column may hold
# C0 and C1 controls, bidirectional and zero-width ones, surrogates without a partner, line and paragraph separators.
_HIDDEN = {"Cc", "Cf", "Cs", "Zl", "Zp"}
# Signs of category Cf that are drawn: they stand before a number or a name.
_DRAWN = frozenset("\u0600\u0601\u0602\u0603\u0604\u0605\u06dd\u070f\u0890\u0891\u08e2\U000110bd\U000110cd")
_JOINER = "\u034f"       # the grapheme joiner, invisible though no control by its category
# Joiners stay between two letters of scripts that are spelled with them (Arabic to Mongolian), and within emoji.
_JOINING = "[\u0600-\u18af\u2190-\u2bff\ufe0f\U0001f000-\U0001faff]"
_JOINED = re.compile(f"(?<={_JOINING})[\u200c\u200d](?={_JOINING})")


def visible(text: str) -> str:
    """`text` with its control characters as escapes, so that a terminal or a page shows them instead of obeying them.

    Examples
    --------
    >>> print(visible("a\\x1b[2Jb\\u202ec"))
    a\\x1b[2Jb\\u202ec
    """
    if text.isprintable() and _JOINER not in text:
        return text
    joiners = {found.start() for found in _JOINED.finditer(text)}
    return "".join(_escaped(sign) if at not in joiners else sign for at, sign in enumerate(text))


def _escaped(sign: str) -> str:
    hidden = (unicodedata.category(sign) in _HIDDEN and sign not in _DRAWN) or sign == _JOINER
    return sign.encode("unicode_escape").decode() if hidden else sign


def address(path: str | PathLike[str]) -> str:
    """The address of a file, which browsers and most terminals open."""
    return Path(path).resolve().as_uri()


def visible_lines(text: str) -> str:
    """`text` with every control character but line feeds as an escape."""
    return "\n".join(map(visible, text.split("\n")))


def check_tokens(name: str, tokens: Tokens, length: int, of: str) -> list[str] | None:
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
    a token that is a part of a character stays as it is. Blanks and control characters become visible.
    """
    bytewise = any("Ġ" in token or "Ċ" in token for token in tokens)
    return [_clean(_decoded(token) if bytewise else token) for token in tokens]


def _clean(token: str) -> str:
    bare = token.lstrip("▁ ").removeprefix("##") or token.replace("▁", " ")
    signs = _BLANKS if not bare.strip() else _BREAKS
    return visible("".join(signs.get(sign, sign) for sign in bare)) or _BLANKS[""]


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
    return len(text) if text.isascii() else sum(map(_columns, text))


def _columns(sign: str) -> int:
    if unicodedata.combining(sign) or unicodedata.category(sign) in ("Cf", "Me", "Mn"):
        return 0
    return 2 if unicodedata.east_asian_width(sign) in "WF" else 1


def shorten(text: str, columns: int) -> str:
    """`text` in at most `columns` columns, the end replaced by an ellipsis; reads no more of it than it keeps."""
    used = kept = 0
    for at, sign in enumerate(text):
        used += _columns(sign)
        if used > columns or at >= SIGNS * columns:     # a sign of no column may be followed by any number of them
            return text[:kept] + "…"
        if used < columns:
            kept = at + 1
    return text


def starts(length: int, bins: int) -> np.ndarray:
    """The first position of each bin, where position i is in bin ``i * bins // length``."""
    return -(-np.arange(bins) * length // bins)


def check_bins(bins: Bins, q_len: int, kv_len: int, default: int) -> tuple[int, int]:
    """`bins` as (row bins, column bins); None is at most `default` each; an int is cut to each length."""
    if bins is None:
        return min(default, q_len), min(default, kv_len)
    if isinstance(bins, (tuple, list)):
        if len(bins) != 2:
            raise ValueError(f"bins must be an integer or a pair (row_bins, col_bins), got {bins}")
        return integer("row_bins", bins[0], 1, q_len), integer("col_bins", bins[1], 1, kv_len)
    bins = integer("bins", bins, 1, max(q_len, kv_len))
    return min(bins, q_len), min(bins, kv_len)


def thinned(count: int, max_labels: int) -> np.ndarray:
    """Positions of at most `max_labels` labels among `count`, in even steps from 0."""
    return np.arange(0, count, max(1, -(-count // max(max_labels, 1))))
