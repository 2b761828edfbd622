"""docs/clients.md: the examples of every client give what they show, each section by itself."""

import doctest
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.peers
TEXT = (Path(__file__).parents[2] / "docs" / "clients.md").read_text(encoding="utf-8")
SECTIONS = {part.partition("\n")[0]: part for part in re.split(r"^## ", TEXT, flags=re.MULTILINE)[1:]}
NEEDS = {"PyTorch": ("torch", "ml_dtypes"), "transformers": ("torch", "transformers"), "ONNX": ("onnx",),
         "JAX": ("jax",), "Keras": ("keras",), "dask": ("dask",), "MPI": ("mpi4py",)}


def failures(section):
    """What the examples of a section give that they do not show, and how many there are."""
    runner, found = doctest.DocTestRunner(verbose=False), []
    result = runner.run(doctest.DocTestParser().get_doctest(section, {}, "clients.md", None, 0), out=found.append)
    return found, result.attempted


def test_every_client_has_examples():
    assert SECTIONS.keys() == NEEDS.keys()


@pytest.mark.parametrize("name", NEEDS)
def test_the_examples_give_what_they_show(name, monkeypatch):
    if find_spec("torch") and not find_spec("tensorflow"):
        monkeypatch.setenv("KERAS_BACKEND", "torch")
    for package in NEEDS[name]:
        pytest.importorskip(package)
    found, attempted = failures(SECTIONS[name])
    assert not found, "".join(found)
    assert attempted >= 7


def test_an_example_that_shows_something_else_is_found():
    pytest.importorskip("onnx")
    assert failures(SECTIONS["ONNX"].replace("True)", "False)"))[0]
