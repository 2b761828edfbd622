"""The public surface: twins with the same signature, light imports, who may import whom, examples that run."""

import ast
import doctest
import importlib
import inspect
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from checking import parameters

import attnc
from attnc import reference

FOLDER = Path(attnc.__file__).parent
MODULES = sorted(path for path in FOLDER.rglob("*.py"))
# about the machine or pictures, not about numbers
WITHOUT_TWIN = {"explorer", "get_num_threads", "isa", "set_num_threads", "show_config", "threads"}
TWINS = sorted(name for name in attnc.__all__ if inspect.isfunction(getattr(attnc, name)) and name not in WITHOUT_TWIN)


@pytest.mark.parametrize("name", TWINS)
def test_every_function_has_a_twin_with_its_signature(name):
    fast, twin = parameters(getattr(attnc, name)), parameters(getattr(reference, name))
    assert fast == twin


CHOICES = {"layout": "bhnd", "stage": "masked", "residual": 0.5, "medfilt": 7, "max_distance": 128,
           "bidirectional": True}     # what can not be off


@pytest.mark.parametrize("name", TWINS)
def test_off_is_none_or_false(name):
    for parameter in inspect.signature(getattr(attnc, name)).parameters.values():
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
            if parameter.name == "want" and name.endswith("_backward"):     # a gradient of nothing is no use
                continue
            off = (None, False, ()) if parameter.name not in CHOICES else (CHOICES[parameter.name],)
            assert parameter.default in off or parameter.default is inspect.Parameter.empty, parameter


def test_the_lists_of_names_are_true():
    for module in (attnc, reference):
        assert module.__all__ == sorted(module.__all__) and all(hasattr(module, name) for name in module.__all__)
    assert set(reference.__all__) <= set(attnc.__all__)
    chain = {"attention", "attention_scores", "attention_weights", "softmax", "log_softmax", "weighted_sum"}
    assert chain <= set(TWINS)


@pytest.mark.parametrize("name", sorted(attnc.__all__))
def test_public_functions_are_documented_with_an_example(name):
    text = inspect.getdoc(getattr(attnc, name))
    assert text and ">>>" in text and len(text.splitlines()[0]) <= 120


def test_version():
    assert attnc.__version__ and attnc.show_config()["version"] == attnc.__version__
    with pytest.raises(AttributeError, match="nothing"):
        _ = attnc.nothing


# Importing

HEAVY = ("torch", "transformers", "scipy", "onnx", "onnxruntime", "matplotlib", "tqdm", "ml_dtypes", "threadpoolctl",
         "importlib.metadata")


def test_importing_takes_numpy_alone(python, capsys):
    said = python(f"""
import sys, time
import numpy
began, before = time.perf_counter(), set(sys.modules)
import attnc
took = time.perf_counter() - began
new = sorted(set(sys.modules) - before)
print([name for name in {HEAVY!r} if name in new], round(1000 * took, 1))
""")
    loaded, _, took = said.rpartition(" ")
    with capsys.disabled():
        print(f" [importing attnc after numpy: {took} ms]", end="")
    assert loaded == "[]"


LAZY = ("datasets", "integrations", "plot", "reference", "testing")


def test_modules_are_imported_when_they_are_asked_for(python):
    """``import attnc`` is enough for all of them, and imports none."""
    assert python(f"""
import sys, attnc
early = [name for name in {LAZY!r} if f"attnc.{{name}}" in sys.modules]
late = [name for name in {LAZY!r} if getattr(attnc, name) is not sys.modules[f"attnc.{{name}}"]]
print(early, late, attnc.reference.softmax([0.0]), attnc.datasets.names()[0], attnc.integrations.mpi.__name__)
""") == "[] [] [1.] coreference attnc.integrations.mpi"
    folder = FOLDER / "integrations"
    found = {path.name.removesuffix(".py") for path in folder.iterdir() if path.suffix == ".py" or path.is_dir()}
    assert {name for name in found if not name.startswith("_")} == set(attnc.integrations._MODULES)
    for module in (attnc, attnc.integrations):
        with pytest.raises(AttributeError, match=f"'{module.__name__}' has no attribute 'nothing'"):
            _ = module.nothing


def test_dir_is_what_is_public():
    assert dir(attnc) == sorted([*attnc.__all__, *LAZY, "__version__", "masks"])
    assert all(hasattr(attnc, name) for name in dir(attnc))


def test_importing_changes_nothing(python):
    """No random state, error state, warning filter, signal handler or environment variable is touched."""
    assert python("""
import os, signal, warnings, numpy as np
def state():
    handler = signal.getsignal(signal.SIGINT)
    return np.random.get_state()[1].tolist(), np.geterr(), list(warnings.filters), handler, dict(os.environ)
before = state()
import attnc
attnc.softmax(np.ones(3))
print(state() == before)
""") == "True"


def test_importing_brings_little_beside_numpy(python):
    """Import takes milliseconds because all but the kernels and the fast functions is imported when it is asked for."""
    brought = python("""
import sys, numpy
before = set(sys.modules)
import attnc
print(*sorted(set(sys.modules) - before))
""").split()
    others = {name for name in brought if name.partition(".")[0] != "attnc"}
    assert {name.partition(".")[0] for name in others if "cython" not in name} <= {
        "__future__", "copy", "dataclasses", "numpy", "threading"}
    assert "attnc._checks" in brought and len(brought) < 70
    later = re.compile(r"attnc\.(bench|datasets|integrations|plot|reference|_views)")
    assert not [name for name in brought if later.match(name)]


# Who may import whom: what a module knows of the others. A module not named here is a fast function.

FAST = {"_call", "_checks", "_gather", "_isa", "_lock", "_norms", "attention", "masks", "results", "threads"}
MAY_IMPORT = {
    "_checks": {"_checks"},
    "masks": {"_checks"},
    "_lock": set(),
    "results": set(),
    "reference": {"_checks", "_lock", "masks", "reference", "relative", "results"},
    "_isa": {"_cpu"},
    "align": {"_checks", "_cpu"},
    "relative": {"_checks"},
    "varlen": {*FAST, "backward", "weights"},
    "_rows": set(),
    "cache": {*FAST, "_rows", "weights"},
    "pages": {*FAST, "_rows", "varlen", "weights"},
    "threads": {"_checks", "_isa"},
    "_call": {"_checks", "_isa", "threads"},
    "_gather": {"_call", "_checks", "_slices"},
    "_slices": {"_checks"},
    "config": {"_cpu", "_isa", "threads"},
    "testing": {"_checks", "masks", "reference", "results"},
    "datasets": set(),
    "weights": {"_call", "_checks", "_isa", "_slices", "_views", "results", "weights"},
    "_files": set(),
    "_views": {"_checks", "_files", "_slices", "_views", "weights"},
    "plot": {"_checks", "_views", "attention", "plot"},
}
TOP = {"__init__", "__main__", "bench", "integrations"}     # may import anything; no module imports them


def imports(path):
    """The modules that a file imports, as (dotted name, whether at its top level)."""
    package = ("attnc", *path.relative_to(FOLDER).parts[:-1])
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        outer = node in tree.body
        if isinstance(node, ast.Import):
            yield from ((alias.name, outer) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = [*package[:len(package) - node.level + 1]] if node.level else []
            base += node.module.split(".") if node.module else []
            whole = len(base) == 1 and node.level        # from . import name: the name is the module
            yield from ((".".join([*base, alias.name] if whole else base), outer) for alias in node.names)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(FOLDER)))
def test_who_imports_whom(path):
    own = path.relative_to(FOLDER).parts[0].removesuffix(".py")
    for name, outer in imports(path):
        first, *rest = name.split(".")
        if first == "attnc" and rest and own not in TOP:
            assert rest[0] in MAY_IMPORT.get(own, FAST) | {"_types"}, f"{own} imports {name}"
        elif first != "attnc" and outer and own not in ("bench", "integrations"):
            assert first in sys.stdlib_module_names or first == "numpy", f"{own} imports {name} at its top"


def test_the_walk_of_imports_sees_what_is_there():
    found = {name for name, _ in imports(FOLDER / "attention.py")}
    assert {"attnc._call", "attnc._checks", "attnc.results", "numpy"} <= found
    assert "attnc.masks" in {name for name, _ in imports(FOLDER / "reference" / "_scores.py")}


# Examples

# Those of mpi.py start MPI, for which test_mpi.py has a process of its own.
EXAMPLES = [path for path in MODULES if ">>>" in path.read_text() and path.name != "mpi.py"]


@pytest.mark.parametrize("path", [
    pytest.param(path, marks=pytest.mark.peers if "integrations" in path.parts else ()) for path in EXAMPLES
], ids=lambda path: str(path.relative_to(FOLDER)))
def test_examples(path, isa):
    parts = path.relative_to(FOLDER.parent).with_suffix("").parts
    if "integrations" in parts:
        pytest.importorskip({"_onnx_fusion": "onnx"}.get(parts[2], parts[2]))
    if "plot" in parts:     # it warns of many open figures
        pytest.importorskip("matplotlib.pyplot").close("all")
    module = importlib.import_module(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    with np.printoptions(legacy=False):
        result = doctest.testmod(module, extraglobs={"np": np})
    assert result.attempted > 0 and result.failed == 0
