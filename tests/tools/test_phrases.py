"""tests/tools/phrases.py finds the phrases of its list, over line ends too, and nothing else."""

import phrases
import pytest

PHRASES = phrases.banned(phrases.LIST.read_text(encoding="utf-8"))


def test_every_phrase_of_the_list_is_found_and_has_a_remedy():
    assert len(PHRASES) >= 15 and all(instead for _, instead in PHRASES)


@pytest.mark.parametrize("text", ["keys in hand", "# what nobody\n# wrote", "read where they\n    lie", "So many rows"])
def test_what_is_banned_is_found(text):
    [(line, _, instead)] = phrases.found(f"fine\n{text}\nfine\n", PHRASES)
    assert line == 2 and instead


def test_plain_words_are_not():
    assert phrases.found("keys in place; a handful of so-called rows; where it is read, at once", PHRASES) == []


def test_pages_and_sources_are_read():
    names = {path.name for path in phrases.files()}
    assert {"README.md", "attention.py", "rank1.h", "kernels.pyx", "Makefile"} <= names
    assert not any(name.endswith(".tr.md") for name in names)
