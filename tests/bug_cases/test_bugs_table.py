"""The table of reports and the tests name the same bugs."""

import re
from pathlib import Path

HERE = Path(__file__).parent


def test_every_bug_in_the_table_has_a_test_and_every_test_is_in_the_table():
    table = set(re.findall(r"^\| (B\d+) \|.*\| \[.+\]\(https://", (HERE / "README.md").read_text(), re.MULTILINE))
    names = re.findall(r"def test_((?:b\d+_)+)", "".join(path.read_text() for path in HERE.glob("test_bugs_*.py")))
    assert table == {bug.upper() for name in names for bug in name.strip("_").split("_")}
