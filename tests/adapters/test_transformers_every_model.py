"""Every model class of transformers that can be made small: what `eager` gives, or refused and in the list of those."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.more
pytest.importorskip("torch")
pytest.importorskip("transformers")

HERE = Path(__file__).parent
REFUSED = dict(line.split("\t") for line in (HERE / "refused_models.txt").read_text().splitlines())
# Of float32 through a few layers of weights that make rows differ, in units of the largest number of a result: the
# largest of all classes is 4e-5. A mask that is lost costs 0.4 and more.
TOLERANCE = 1e-4
BUILT = 1250        # classes; the others want packages, inputs or sizes that are not tried


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What attnc does in each class, by its name; examined in as many processes as there are processors."""
    count = len(os.sched_getaffinity(0))
    files = [tmp_path_factory.mktemp("found") / "lines.json" for _ in range(count)]
    with contextlib.ExitStack() as stack:
        runs = [subprocess.Popen([sys.executable, HERE / "every_model.py", str(part), str(count)],
                                 stdout=stack.enter_context(file.open("w")), stderr=subprocess.DEVNULL)
                for part, file in enumerate(files)]
        assert [run.wait() for run in runs] == [0] * count
    lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    return {each.pop("class"): each for each in lines}


def refusals(each) -> list[str]:
    return [each[way] for way in ("made", "set") if isinstance(each[way], str)]


def test_most_classes_can_be_made(found):
    built = [name for name, each in found.items() if "unbuilt" not in each]
    assert len(built) >= BUILT, {name: each["unbuilt"] for name, each in found.items() if "unbuilt" in each}


def test_a_class_gives_what_eager_gives_or_is_refused(found):
    wrong = {}
    for name, each in found.items():
        ways = [each[way] for way in ("made", "set") if not isinstance(each.get(way, ""), str)]
        if any(not error < TOLERANCE + 10 * each["noise"] for error in ways):
            wrong[name] = each
    assert not wrong


def test_the_refused_classes_are_those_of_the_list(found):
    """Both ways: one that is refused and not in the list, one of the list that would be right or is not there."""
    refused = {name for name, each in found.items() if "unbuilt" not in each and refusals(each)}
    assert refused == set(REFUSED)


def test_a_refusal_says_why(found):
    for name, reason in REFUSED.items():
        for text in refusals(found[name]):
            assert text.startswith("ValueError: ") and reason in text, (name, text)
