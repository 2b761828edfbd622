"""Checks models that select ``"attnc"``: attention classes of their own cause an error, or a warning, with the name."""

from __future__ import annotations

import functools
import sys
import warnings
from typing import Any, NoReturn

from transformers import PreTrainedModel

NAME = "attnc"


def watch() -> None:
    """Check each transformers model that selects attnc, before its layers are made."""
    check = PreTrainedModel.get_correct_attn_implementation
    if hasattr(check, "attnc"):
        return

    @functools.wraps(check)
    def checked(self: PreTrainedModel, requested_attention: str | None, *args: Any, **kwargs: Any) -> Any:
        found = check(self, requested_attention, *args, **kwargs)
        if found == NAME:
            _look_at(self)
        return found

    vars(checked)["attnc"] = True
    PreTrainedModel.get_correct_attn_implementation = checked


def _look_at(model: PreTrainedModel) -> None:
    cls = type(model)
    tables = [table for each in cls.__mro__ for table in _tables(each.__module__)]
    made = {type(part) for part in model.modules()}     # empty while the model is being made
    own = sorted(each.__name__ for table in tables for each in made.intersection(table.values()))
    if own or not (tables or cls._can_set_attn_implementation()):
        name = ", ".join(["an attention of its own", *own[:1]])
        warnings.warn(f"{cls.__name__} has {name}, which does not call transformers' interface: "
                      "it runs, attnc does not", UserWarning, stacklevel=3)


class _OwnAttentions(dict[str, Any]):
    """Attention classes of a model by the name of an implementation, among which attnc is missing."""

    def __missing__(self, name: str) -> NoReturn:
        if name != NAME:
            raise KeyError(name)
        raise ValueError(f"{self['eager'].__name__} is a model's own attention, with classes for "
                         f"{' and '.join(map(repr, self))} in place of transformers' interface: it cannot be {name!r}")


def _tables(module: str) -> list[_OwnAttentions]:
    """The tables of attention classes in a module, replaced by tables that raise an error with the class's name."""
    found = []
    for name, x in vars(sys.modules.get(module, object)).items():
        if type(x) is dict and "eager" in x and all(isinstance(each, type) for each in x.values()):
            found.append((name, _OwnAttentions(x)))
        elif isinstance(x, _OwnAttentions):
            found.append((name, x))
    for name, table in found:
        setattr(sys.modules[module], name, table)
    return [table for _, table in found]
