"""The arguments of a capture: statistics and functions, layers, heads and rows."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from ... import AttentionWeights
from ..._checks import integer
from ._records import AttentionRecord

STATISTICS = ("topk", "key_mass", "entropy", "map", "effective_keys", "max", "argmax", "mean_position",
              "mean_distance", "key_max", "lse")
BESIDE = frozenset(("entropy", "max", "argmax", "lse"))     # attnc's attention computes these beside its output
TENSORS = ("weights", "value", "grad_output")
NAMES = (*STATISTICS, *TENSORS, "relevance")

Layer: TypeAlias = int | str | tuple[str, int]
Heads: TypeAlias = int | Sequence[int]
Function: TypeAlias = Callable[[AttentionWeights, AttentionRecord], Any]
What: TypeAlias = "str | Function | Sequence[str | Function] | Mapping[str, Function]"


class Place:
    """A requested layer: index of a call, name of a module, or name and call.

    `names` has the name in records for each name of a module: a module may be an attribute of several.
    """

    def __init__(self, argument: str, given: Any, names: Mapping[str, str]):
        self.given, self.met = given, False
        if isinstance(given, tuple) and (len(given) != 2 or not isinstance(given[0], str)):
            raise ValueError(f"{argument} has {given!r}; wanted an index, a name or (name, call)")
        name, self.number = given if isinstance(given, tuple) else (given, None)
        self.layers: frozenset[str] | None = None       # None: of all, by index
        if isinstance(name, str):
            self.layers = frozenset(names[x] for x in names if self._is(name, x, name in names))
            if not self.layers:
                raise ValueError(f"{argument} has {name!r}; no module of the model has that in its name")
        else:
            self.number = _index(argument, name, "an index, a name or (name, call)")
        if self.number is not None and _index(argument, self.number, "the number of a call") < 0:
            raise ValueError(f"{argument} has {given!r}; wanted the number of a call, counted from 0")

    @staticmethod
    def _is(wanted: str, name: str, whole: bool) -> bool:
        """Whether a name is that of the module or of one within it; or, if no module has it, contains its parts."""
        if whole:
            return wanted in ("", name) or name.startswith(f"{wanted}.")
        return f".{wanted}." in f".{name}."

    def meets(self, layer: str, call: int, index: int) -> bool:
        found = index == self.number if self.layers is None else layer in self.layers and self.number in (None, call)
        self.met |= found
        return found


def asked(what: What) -> tuple[tuple[str, ...], dict[str, Function]]:
    """Names of statistics, and functions by the name of their result in a record."""
    if isinstance(what, Mapping):
        wrong = [name for name, x in what.items() if not callable(x) or not isinstance(name, str)]
        if wrong:
            raise ValueError(f"what has {wrong[0]!r}: {what[wrong[0]]!r}; wanted functions by names")
        given: list[Any] = []
        functions = dict(what)
    else:
        given = [what] if isinstance(what, str) or callable(what) else _listed("what", what, "names and functions")
        functions = {}
    names: list[str] = []
    for x in given:
        if isinstance(x, str):
            if x not in NAMES:
                raise ValueError(f"what has {x!r}; wanted names out of {', '.join(NAMES)}, or functions")
            names.extend([*TENSORS] if x == "relevance" else [x])
        elif callable(x):
            name = getattr(x, "__name__", "result")
            name = name if name.isidentifier() else "result"
            if name in functions:
                raise ValueError(f"what has two functions of the name {name!r}; wanted a dict of functions by name")
            functions[name] = x
        else:
            raise TypeError(f"what has {x!r}; wanted names and functions")
    taken = [name for name in functions if name in (*NAMES, *dir(AttentionRecord), *AttentionRecord.__annotations__)]
    if taken:
        raise ValueError(f"what has a function of the name {taken[0]!r}, which a record uses; wanted another")
    if not names and not functions:
        raise ValueError(f"what is {what!r}; wanted names out of {', '.join(NAMES)}, or functions")
    return tuple(dict.fromkeys(names)), functions


def layer_list(layers: Any) -> list[Any]:
    """The layers of an argument that may be a single layer, such as a pair of a name and a number."""
    pair = isinstance(layers, tuple) and len(layers) == 2 and isinstance(layers[0], str)
    one = isinstance(layers, str) or (pair and hasattr(layers[1], "__index__"))
    return [layers] if one else _listed("layers", layers, "indices, names and pairs (name, call)")


def head_list(heads: Any) -> list[int]:
    return [_index("heads", x, "integers") for x in _listed("heads", heads, "integers")]


def row_slice(rows: Any) -> slice | None:
    if rows is None:
        return None
    if not isinstance(rows, slice) or rows.step not in (None, 1):
        raise ValueError(f"rows is {rows!r}; wanted a slice of step 1")
    for x in rows.start, rows.stop:
        if x is not None:
            _index("rows", x, "a slice of integers")
    return rows


def bin_counts(bins: Any) -> tuple[int, int]:
    if not isinstance(bins, tuple | list) or len(bins) != 2:
        raise TypeError(f"bins is {bins!r}; wanted a pair (row_bins, col_bins)")
    return integer("row_bins", bins[0], 1, 2**31 - 1), integer("col_bins", bins[1], 1, 2**31 - 1)


def _listed(argument: str, given: Any, wanted: str) -> list[Any]:
    """An argument that is one item or several; arrays and tensors of several have an ``__index__`` too."""
    if isinstance(given, np.ndarray | torch.Tensor):
        given = given.tolist()
    if hasattr(given, "__index__"):
        return [given]
    if not isinstance(given, Iterable):
        raise TypeError(f"{argument} is {given!r}; wanted {wanted}")
    return list(given)


def _index(argument: str, x: Any, wanted: str) -> int:
    if isinstance(x, bool | np.bool_) or not hasattr(x, "__index__"):
        raise TypeError(f"{argument} has {x!r}; wanted {wanted}")
    return operator.index(x)
