"""The arguments of a capture: statistics and functions, layers, heads and rows."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeAlias

from ... import AttentionWeights
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
    """A requested layer: index of a call, name of a module, or name and call."""

    def __init__(self, argument: str, given: Any, names: Collection[str]):
        self.given, self.met = given, False
        if isinstance(given, tuple) and (len(given) != 2 or not isinstance(given[0], str)):
            raise ValueError(f"{argument} has {given!r}; wanted an index, a name or (name, call)")
        name, self.number = given if isinstance(given, tuple) else (given, None)
        if isinstance(name, str):
            self.name: str | None = name
            self.whole = name in names
            if not any(self._is(x) for x in names):
                raise ValueError(f"{argument} has {name!r}; no module of the model has that in its name")
        else:
            self.name, self.number = None, operator.index(name)
        if self.number is not None and self.number < 0:
            raise ValueError(f"{argument} has {given!r}; wanted the number of a call, counted from 0")

    def _is(self, name: str) -> bool:
        """Whether `name` is that of the module or of one within it; or, if no module has it, contains its parts."""
        if self.whole:
            return name == self.name or self.name == "" or name.startswith(f"{self.name}.")
        return f".{self.name}." in f".{name}."

    def meets(self, layer: str, call: int, index: int) -> bool:
        found = index == self.number if self.name is None else self._is(layer) and self.number in (None, call)
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
        given = [what] if isinstance(what, str) or callable(what) else list(what)
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
    one = isinstance(layers, str) or hasattr(layers, "__index__") or (pair and hasattr(layers[1], "__index__"))
    return [layers] if one else list(layers)


def head_list(heads: Any) -> list[int]:
    return [operator.index(x) for x in ([heads] if hasattr(heads, "__index__") else heads)]


def row_slice(rows: Any) -> slice | None:
    if rows is None:
        return None
    if not isinstance(rows, slice) or rows.step not in (None, 1):
        raise ValueError(f"rows is {rows!r}; wanted a slice of step 1")
    return rows
