"""Queries, keys and values of real models: one layer each, small enough to ship."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.resources import files

import numpy as np

__all__ = ["Capture", "load", "names"]

_DATA = files(__name__) / "data"


@dataclass(frozen=True, eq=False)
class Capture:
    """What one attention layer of a real model computed for one sentence.

    Attributes
    ----------
    name : str
        The name it was loaded by.
    query, key, value : ndarray (heads, tokens, head_dim), float32
        All heads of the layer; stored as float32, so nothing is lost in loading. The model scales its scores by
        ``1/sqrt(head_dim)`` and masks nothing, which is what `attnc.attention` does by default.
    tokens : list of str
        The tokens, special ones and sub-word marks included; as many as ``query.shape[1]``.
    sentence : str
        The text the tokens come from.
    layer, head : int
        The layer in the model and the head of interest, both counted from 0.
    rows, columns : tuple of int
        The tokens of the word that attends and of the word that it attends to.
    weight : float
        How much it does so in `head`: the attention weights summed over `columns`, averaged over `rows`.
    source : str
        Model, package, licences, and how sentence, layer and head were chosen.

    Examples
    --------
    >>> data = load("turkish")
    >>> data.query.shape, data.tokens[data.rows[0]], data.tokens[data.columns[0]]
    ((12, 11, 32), '▁onu', '▁kitabı')
    """

    name: str
    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    tokens: list[str]
    sentence: str
    layer: int
    head: int
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    weight: float
    source: str

    def __repr__(self) -> str:
        heads, tokens, head_dim = self.query.shape
        return f"Capture({self.name!r}: {heads} heads, {tokens} tokens, head_dim {head_dim}, {self.sentence!r})"


def names() -> list[str]:
    """The names that `load` knows, sorted.

    Returns
    -------
    list of str

    Examples
    --------
    >>> import attnc.datasets
    >>> attnc.datasets.names()
    ['coreference', 'turkish']
    """
    return sorted(file.name.removesuffix(".npz") for file in _DATA.iterdir() if file.name.endswith(".npz"))


def load(name: str) -> Capture:
    """Load a layer of a real model.

    Parameters
    ----------
    name : str
        ``"coreference"``: all-MiniLM-L6-v2 reads "The animal did not cross the street because it was too tired.";
        one head of the layer shows what "it" is.
        ``"turkish"``: multilingual-e5-small reads "Ayşe kitabı okudu çünkü onu merak ediyordu." (Ayşe read the book
        because she was curious about it); one head links "onu" (it) with "kitabı" (the book).

    Returns
    -------
    Capture
        With `query`, `key`, `value` of shape (heads, tokens, head_dim), float32, `tokens`, and where they come from.
        Each call returns arrays of its own.

    Raises
    ------
    ValueError
        If there is no data set of that name; the message lists the names.

    Examples
    --------
    >>> import attnc.datasets
    >>> data = attnc.datasets.load("turkish")
    >>> data.query.shape, data.tokens[data.rows[0]], data.tokens[data.columns[0]]
    ((12, 11, 32), '▁onu', '▁kitabı')
    """
    if name not in names():
        raise ValueError(f"no data set named {name!r}; there are: {', '.join(names())}")
    with (_DATA / f"{name}.npz").open("rb") as file, np.load(file, allow_pickle=False) as arrays:
        facts = json.loads(str(arrays["facts"]))
        return Capture(
            name=name, query=arrays["query"], key=arrays["key"], value=arrays["value"],
            tokens=arrays["tokens"].tolist(), rows=tuple(facts.pop("rows")), columns=tuple(facts.pop("columns")),
            **facts,
        )

