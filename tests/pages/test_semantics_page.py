"""docs/semantics.md names the test of every difference it states, and leaves none out."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_every_difference_in_the_page_has_a_test_and_every_test_is_in_the_page():
    page = (ROOT / "docs" / "semantics.md").read_text()
    named = set(re.findall(r"`(test_\w+)\.(test_differs_\w+)`", page))
    written = {(path.stem, name) for path in (ROOT / "tests").glob("*/test_*.py")
               for name in re.findall(r"^def (test_differs_\w+)", path.read_text(), re.MULTILINE)}
    assert named == written
