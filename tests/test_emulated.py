"""Processors that this machine is not: under emulation each chooses its kernels, and they pass their tests."""

import shutil
import subprocess
import sys

import pytest
from build_tree import ROOT

NEEDS = {"aarch64": ("qemu-aarch64-static", "aarch64-linux-gnu-gcc", "apt-get"),
         "nehalem": ("qemu-x86_64-static",), "haswell": ("qemu-x86_64-static",)}


@pytest.mark.more
@pytest.mark.parametrize("name, isa", [("aarch64", "neon"), ("nehalem", "base"), ("haswell", "avx2")])
def test_it_chooses_its_kernels_and_they_pass(name, isa):
    missing = [tool for tool in NEEDS[name] if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} is not there")
    done = subprocess.run([sys.executable, ROOT / "tests" / "emulated.py", name], text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert done.returncode == 0, done.stdout[-10_000:]
    assert f"isa        {isa}\n" in done.stdout and " passed" in done.stdout
