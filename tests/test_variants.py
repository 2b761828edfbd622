"""Kernels built otherwise: sanitizers and valgrind find nothing, but do find a fault; without OpenMP all passes."""

import shutil
import subprocess
import sys

import pytest
from build_tree import ROOT
from variants import WAYS

pytestmark = pytest.mark.more


def run(name, *arguments):
    tools = ["setarch", WAYS[name].compiler, *(["valgrind"] if name == "valgrind" else [])]
    missing = [tool for tool in tools if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} is not there")
    done = subprocess.run([sys.executable, ROOT / "tests" / "variants.py", name, *arguments], text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert done.returncode == 0, done.stdout[-10_000:]
    return done.stdout


@pytest.mark.parametrize("name", WAYS)
def test_nothing_is_found(name):
    said = run(name)
    assert " passed" in said and ("openmp     0\n" in said) == (name == "serial")


@pytest.mark.parametrize("name", [name for name, way in WAYS.items() if way.fault])
def test_a_fault_is_found(name):
    run(name, "--planted")
