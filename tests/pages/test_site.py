"""The site of docs/: its examples run, every public name has a page, and broken links are found."""

import importlib
import importlib.util
import inspect
import re
from pathlib import Path

import pytest
from test_readme import BLOCK, failures

import attnc

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(path for folder in ("start", "guide", "how", ".") for path in (DOCS / folder).glob("*.md")
               if ">>>" in path.read_text(encoding="utf-8"))
ELSEWHERE = {"attention-weight.md", "attention-weight.tr.md", "clients.md"}     # run by tests of their own
INTEGRATIONS = ("torch", "transformers", "onnx", "dask")        # those that say what is public; of the others, below
API = (DOCS / "api" / "index.md").read_text(encoding="utf-8")
LISTED = re.findall(r"^   ([\w.]+)$", API, re.MULTILINE)


def links():
    spec = importlib.util.spec_from_file_location("links", DOCS / "links.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", [page for page in PAGES if page.name not in ELSEWHERE],
                         ids=lambda page: str(page.relative_to(DOCS)))
def test_the_examples_of_a_page_give_what_they_show(page):
    text = page.read_text(encoding="utf-8")
    assert len(BLOCK.findall(text)) == text.count("```python")
    assert not failures(text), "".join(failures(text))


def test_every_public_name_has_a_page():
    public = set(attnc.__all__)
    for module in ("plot", "masks", "datasets", "testing"):
        found = importlib.import_module(f"attnc.{module}")
        names = getattr(found, "__all__", None) or [
            name for name, member in vars(found).items()
            if callable(member) and not name.startswith("_") and member.__module__ == found.__name__]
        public |= {f"{module}.{name}" for name in names} - {"masks.alibi_slopes"}
    assert len(LISTED) == len(set(LISTED))
    assert public <= set(LISTED), public - set(LISTED)


def without_example(names):
    """Those of `names` whose docstring shows no example."""
    found = []
    for name in names:
        folder, _, attribute = f"attnc.{name}".rpartition(".")
        if ">>>" not in (inspect.getdoc(getattr(importlib.import_module(folder), attribute)) or ""):
            found.append(name)
    return found


MADE_BY_CAPTURE = {f"integrations.torch.{name}" for name in ("AttentionRecord", "Records")}     # which shows them


def test_every_page_of_the_reference_has_an_example():
    assert not without_example([name for name in LISTED if not name.startswith("integrations.")])
    assert without_example(["attention", "config.version"]) == ["config.version"]


@pytest.mark.peers
@pytest.mark.parametrize("module", INTEGRATIONS)
def test_every_public_name_of_an_adapter_has_a_page(module):
    found = importlib.import_module(f"attnc.integrations.{module}")
    torch = importlib.import_module("attnc.integrations.torch")      # what others take from it has one page
    names = {f"integrations.{module}.{name}" for name in found.__all__ if callable(getattr(found, name))
             and (module == "torch" or getattr(torch, name, None) is not getattr(found, name))}
    assert names <= set(LISTED), names - set(LISTED)
    assert not without_example([name for name in LISTED if name.split(".")[1:2] == [module]
                                and name not in MADE_BY_CAPTURE])


def test_a_broken_link_and_a_picture_without_words_are_found(tmp_path):
    (tmp_path / "a.html").write_text('<p id="here"><a href="#here">x</a><a href="b.html#there">y</a>'
                                     '<a href="https://example.org/z">z</a></p>', encoding="utf-8")
    (tmp_path / "b.html").write_text('<p id="there"><img src="a.html" alt="what it shows"></p>', encoding="utf-8")
    assert links().broken(tmp_path) == []
    (tmp_path / "b.html").write_text('<a href="c.html"></a><a href="a.html#no"></a><img src="a.html">',
                                     encoding="utf-8")
    assert len(links().broken(tmp_path)) == 4
