"""Kernels built otherwise: sanitizers and valgrind find nothing, but do find a fault; the others pass their tests."""

import shutil
import subprocess
import sys
from collections import Counter

import pytest
from build_tree import ROOT
from variants import WAYS

from attnc import _isa
from attnc._cpu import BUILT

pytestmark = pytest.mark.more


def run(name, *arguments):
    tools = ["setarch", WAYS[name].compiler, *(["valgrind"] if name == "valgrind" else [])]
    missing = [tool for tool in tools if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} is not there")
    if name == "avx512" and "avx2" not in _isa.available():
        pytest.skip("AVX-512 is emulated by AVX2")
    done = subprocess.run([sys.executable, ROOT / "tests" / "tools" / "variants.py", name, *arguments], text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert done.returncode == 0, done.stdout[-10_000:]
    return done.stdout


@pytest.mark.parametrize("name", WAYS)
def test_nothing_is_found(name):
    said = run(name)
    assert (" passed" in said or ", 0 wrong" in said) and ("openmp     0\n" in said) == (name == "serial")
    assert ("available  avx512bf16, avx512\n" in said) == (name == "avx512")


@pytest.mark.parametrize("name", [name for name, way in WAYS.items() if way.fault])
def test_a_fault_is_found(name):
    run(name, "--planted")


def test_a_few_cases_are_of_every_test_on_every_set():
    def collected(*options):
        done = subprocess.run([sys.executable, "-m", "pytest", "-q", "--collect-only", *options,
                               "tests/kernels/test_dot.py"], cwd=ROOT, text=True, stdout=subprocess.PIPE, check=True)
        return [line for line in done.stdout.splitlines() if "::" in line]

    def kinds(tests):
        return [(test.partition("[")[0], isa) for test in tests for isa in BUILT
                if f"[{isa}-" in test or f"[{isa}]" in test]

    every, few = collected("-m", "kernels"), collected("-m", "kernels", "--cases", "2")
    assert set(kinds(few)) == set(kinds(every)) and set(few) <= set(every)
    assert max(Counter(kinds(few)).values()) == 2 and len(few) < len(every) / 2
