"""Processors that this machine is not: under emulation each chooses its kernels, and they pass their tests."""

import shutil
import subprocess
import sys

import pytest
from build_tree import ROOT

NEEDS = {"aarch64": ("qemu-aarch64-static", "aarch64-linux-gnu-gcc", "apt-get"),
         "nehalem": ("qemu-x86_64-static",), "haswell": ("qemu-x86_64-static",)}


def test_no_test_of_the_kernels_builds():
    """The compiler of an emulated processor is not there; a parameter named `isa` would mark a test as one of them."""
    command = [sys.executable, "-m", "pytest", "-c", ROOT / "pyproject.toml", "-p", "no:cacheprovider",
               "--collect-only", "-q", "-m", "kernels", ROOT / "tests" / "builds"]
    done = subprocess.run(command, text=True, capture_output=True)
    assert done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED, done.stdout


@pytest.mark.more
@pytest.mark.parametrize("name, chosen", [("aarch64", "neon"), ("nehalem", "base"), ("haswell", "avx2")])
def test_it_chooses_its_kernels_and_they_pass(name, chosen):
    missing = [tool for tool in NEEDS[name] if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} is not there")
    done = subprocess.run([sys.executable, ROOT / "tests" / "tools" / "emulated.py", name], text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert done.returncode == 0, done.stdout[-10_000:]
    assert f"isa        {chosen}\n" in done.stdout and " passed" in done.stdout
