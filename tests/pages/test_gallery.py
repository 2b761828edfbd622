"""The examples of docs/gallery/ say what they show and need; `make docs` runs them."""

import ast
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "docs" / "gallery").glob("*.py"))
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
FIELD = re.compile(r"^:(\w+): (.+)$", re.MULTILINE)


def faults(text):
    """What an example lacks of docs/gallery/CONTRIBUTING.md."""
    docstring, found = ast.get_docstring(ast.parse(text)), []
    title, line, *_ = docstring.splitlines()
    if not re.fullmatch("=+", line) or len(line) < len(title):
        found.append("no title")
    given = dict(FIELD.findall(docstring))
    if list(given) != ["Shows", "Data", "Time", "Memory", "Needs"]:
        found.append(f"fields {list(given)}")
        return found
    if not re.fullmatch(r"\d+ s", given["Time"]) or int(given["Time"].split()[0]) > 15:
        found.append("time")
    if not re.fullmatch(r"\d+ MB", given["Memory"]) or int(given["Memory"].split()[0]) > 1000:
        found.append("memory")
    if not set(re.fullmatch(r"attnc\[([\w,]+)\].*", given["Needs"])[1].split(",")) <= set(EXTRAS):
        found.append("extras")
    if "# %%" not in text or ".set_label(" not in text or "assert" not in text:
        found.append("no block of text, no description of a figure, or nothing asserted")
    if len(text.splitlines()) > 120:
        found.append("long")
    if re.search(r"https?://[^\s`]*\.(npz|zip|bin|gz)|urlopen|requests\.|from_pretrained\(\"[\w-]+/", text):
        found.append("a download")
    return found


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_says_what_it_shows_and_needs(path):
    assert faults(path.read_text(encoding="utf-8")) == []


def test_a_header_that_lacks_something_is_found():
    text = EXAMPLES[0].read_text(encoding="utf-8")
    for old, new in ((":Time: ", ":Tmie: "), (":Memory: ", ":Memory: about "), ("# %%", "#"), ("attnc[", "attnc[x"),
                     (".set_label(", ".label("), ("\n===", "\n---")):
        assert old in text and faults(text.replace(old, new)), old
