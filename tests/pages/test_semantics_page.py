"""docs/semantics.md: rules have numbers, and every difference from other libraries has its test."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "semantics.md").read_text(encoding="utf-8")


def test_every_difference_in_the_page_has_a_test_and_every_test_is_in_the_page():
    named = set(re.findall(r"`(test_\w+)\.(test_differs_\w+)`", PAGE))
    written = {(path.stem, name) for path in (ROOT / "tests").glob("*/test_*.py")
               for name in re.findall(r"^def (test_differs_\w+)", path.read_text(), re.MULTILINE)}
    assert named == written


def test_every_rule_has_a_number_of_its_own():
    text = PAGE.partition("## Moving from X")[0]
    numbers = [int(number) for number in re.findall(r"^(?:- )?\*\*(\d+)\.\*\* ", text, re.MULTILINE)]
    assert sorted(numbers) == list(range(1, len(numbers) + 1)) and len(numbers) >= 55
    bullets = re.findall(r"^- (?!\*\*\d+\.\*\* ).*", text, re.MULTILINE)
    assert not bullets, bullets
