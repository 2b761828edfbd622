"""No import cycle: modules of the package import each other in one direction, within functions too."""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import attnc

FOLDER = Path(attnc.__file__).parent


def named(path):
    parts = path.relative_to(FOLDER.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


# A stub stands for its compiled module.
FILES = {named(path): path for path in [*FOLDER.rglob("*.py"), *FOLDER.glob("_*.pyi")]}


def imports(name, text, is_package, modules):
    """The modules that a module's text imports, of `modules`; what is for type checkers alone does not run."""
    def walk(node):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = name.split(".") + [""] * is_package
            base = ".".join(parts[:len(parts) - node.level]) if node.level else ""
            base = ".".join(filter(None, [base, node.module]))
            for alias in node.names:
                yield f"{base}.{alias.name}" if f"{base}.{alias.name}" in modules else base
        for child in ast.iter_child_nodes(node):
            yield from walk(child)

    return {found for found in walk(ast.parse(text)) if found in modules}


def graph(texts, packages=()):
    return {name: imports(name, text, name in packages, texts) for name, text in texts.items()}


def ordered(edges):
    return list(TopologicalSorter(edges).static_order())


def test_no_import_cycle():
    packages = {name for name, path in FILES.items() if path.stem == "__init__"}
    edges = graph({name: path.read_text() for name, path in FILES.items()}, packages)
    assert "attnc._call" in edges["attnc.attention"] and "attnc.reference._scores" in edges["attnc.reference"]
    assert len(ordered(edges)) == len(FILES)


@pytest.mark.parametrize("text", ["from . import b", "from .b import x", "import a.b", "from a.b import x",
                                  "def f():\n    from . import b"])
def test_a_cycle_is_found(text):
    texts = {"a": "", "a.b": "from .c import x", "a.c": text}
    with pytest.raises(CycleError):
        ordered(graph(texts, {"a"}))
    texts["a.c"] = f"from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    {text.splitlines()[-1].strip()}"
    assert ordered(graph(texts, {"a"}))
