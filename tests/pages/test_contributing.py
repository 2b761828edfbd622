"""CONTRIBUTING.md: every file and function that it names is there, and its map names every file of attnc/ and src/."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
FILE = re.compile(r"[\w./*]*\.(?:py|pyi|pyx|pxi|h|css|html|js|typed)")


def section(begin, end):
    """The part of the page between two texts that it holds."""
    return TEXT.partition(begin)[2].partition(end)[0]


def defined(name, file):
    """Whether the file defines a function of that name: of Python or Cython, of C by its type or by a macro."""
    name = rf"(?:\w\()?\b{re.escape(name)}\)?\("         # T(name)( of a template
    forms = (rf"^ *(?:c?p?def|async def) (?:[^#\n]* )?\**{name}", rf"^\w[^#;\n]* \**{name}[^;{{\n]*(?:\{{|$)",
             rf"^#define {name}")
    return re.search("|".join(forms), file.read_text(encoding="utf-8"), re.MULTILINE) is not None


def places(text, folder=ROOT):
    """The functions named in a text, each with the file that is named before it."""
    file = None
    for token in re.findall(r"`([^`]+)`", text):
        if FILE.fullmatch(token):
            file = folder / token
        elif token.endswith("()"):
            yield token[:-2], file


CHANGES = re.findall(r"^\| (?!what \|)([^-|][^|]*) \| (.+) \|$",
                     section("**Where would I change ...**", "**An option.**"), re.MULTILINE)
FLOW = re.findall(r"^    ( *)(\S+) +((?:\w+\(\)(?:, )?)+)  ",
                  section("every other call goes this way:", "`attend_group()`"), re.MULTILINE)


def test_the_tables_are_read():
    """The tests below can fail: what they read is there."""
    assert len(CHANGES) >= 8 and len(FLOW) >= 12
    assert defined("attend_step", ROOT / "src/forward.pxi") and defined("values_tile", ROOT / "src/attention/values.h")
    assert not defined("divide", ROOT / "src/forward.pxi") and not defined("attend_step", ROOT / "CONTRIBUTING.md")


@pytest.mark.parametrize(("what", "where"), CHANGES)
def test_where_to_change_names_files_and_functions_that_are_there(what, where):
    found = list(places(where))
    assert found, "no function is named"
    for token in re.findall(r"`([^`]+)`", where):
        assert not FILE.fullmatch(token) or (ROOT / token).is_file(), token
    for name, file in found:
        assert file is not None and defined(name, file), f"{name}() is not in {file}"


@pytest.mark.parametrize(("indent", "file", "functions"), FLOW)
def test_the_way_of_a_call_names_functions_that_are_there(indent, file, functions):
    path = ROOT / ("src/attention" if indent else "") / file
    for name in re.findall(r"\w+(?=\(\))", functions):
        assert defined(name, path), f"{name}() is not in {path}"


def test_the_table_of_paths_is_that_of_the_kernels():
    table = section("| path | when | file | border |\n", "\n\n")
    rows = re.findall(r"^\| (\w+) \| [^|]+ \| ([^|]+) \|([^|]*)\|$", table, re.MULTILINE)
    source = (ROOT / "src/call/path.h").read_text(encoding="utf-8")
    names = re.search(r"PATH_NAMES\[PATHS\] = \{(.*)\}", source)[1]
    assert [name for name, _, _ in rows] == re.findall(r'"(\w+)"', names)
    sizes = (ROOT / "src/call/sizes.h").read_text(encoding="utf-8")
    for _, files, borders in rows:
        folder = ROOT / "src"
        for file in re.findall(r"`([^`]+)`", files):
            path = folder / file
            assert path.is_file(), path
            folder = path.parent
        for border in re.findall(r"`(\w+)(?:\(\))?`", borders):
            assert re.search(rf"\b{border}\b", source + sizes), border


def test_the_map_names_every_file_of_the_package_and_its_sources():
    """By name and as often as there are files of that name."""
    [found] = re.findall(r"^## Map$.*?^### Around them$", TEXT, re.MULTILINE | re.DOTALL)
    cells = [row.split("|")[1] for row in found.splitlines() if row.startswith("| `")]
    lines = [line for line in found.splitlines() if line.startswith("`attnc/")]
    named = [Path(name).name for part in cells + lines for name in re.findall(r"`([\w/]+\.(?:pyx|pxi|py|h))`", part)]
    there = [path.name for folder in ("attnc", "src") for kind in ("py", "pyx", "pxi", "h")
             for path in (ROOT / folder).rglob(f"*.{kind}")]
    assert sorted(named) == sorted(there)


def test_the_page_on_adding_an_option_names_files_and_functions_that_are_there():
    text = (ROOT / "docs" / "how" / "add-an-option.md").read_text(encoding="utf-8")
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    found = list(places(text))
    assert len(found) >= 8
    for token in re.findall(r"`([\w./]+/[\w./]+)`", text):
        assert (ROOT / token).exists(), token
    for name, file in found:
        assert file is not None and defined(name, file), f"{name}() is not in {file}"
