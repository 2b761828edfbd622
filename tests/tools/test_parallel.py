"""Tests in several Python threads at the same time: they pass, and a race fails them."""

import subprocess
import sys

import pytest
from build_tree import ROOT

pytest.importorskip("pytest_run_parallel")
pytestmark = pytest.mark.more

RACE = """
import time
shared = [0]
def test_adds():
    before = shared[0]
    time.sleep(0.01)
    shared[0] += 1
    assert shared[0] == before + 1
"""


def run(*arguments):
    return subprocess.run([sys.executable, ROOT / "tests" / "tools" / "parallel.py", *arguments], text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def test_a_race_is_found(tmp_path):
    (tmp_path / "test_race.py").write_text(RACE)
    done = run(tmp_path)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout


def test_all_pass():
    done = run()
    assert done.returncode == 0, done.stdout[-10_000:]
    assert " passed" in done.stdout
