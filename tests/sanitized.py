"""Run quick tests on kernels whose every address and undefined operation is watched (GCC's sanitizers).

    python tests/sanitized.py [arguments of pytest]

The modules are built into build/sanitized/ and loaded after the sanitizer's runtime. Python and NumPy themselves are
not watched. Adding 0 to NULL, which C2y allows, is no error for GCC; it is one for Clang's sanitizer.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "build" / "sanitized"
FLAGS = "-fsanitize=address,undefined -fno-sanitize-recover=undefined"
TESTS = ("invariants", "special", "softmax", "states", "varlen", "weighted_sum", "given_lse", "backward")


def library(file: str) -> str:
    asked = subprocess.run(["gcc", f"-print-file-name={file}"], capture_output=True, text=True, check=True)
    return asked.stdout.strip()


def build() -> None:
    shutil.rmtree(TARGET, ignore_errors=True)
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-build-isolation",
         "--no-deps", "--target", TARGET, ROOT], check=True,
        env=os.environ | {"CC": "gcc", "CFLAGS": f"{FLAGS} -fno-omit-frame-pointer -g1", "LDFLAGS": FLAGS})


def main(*arguments: str) -> int:
    build()
    watched = {
        "PYTHONPATH": str(TARGET), "PYTHONMALLOC": "malloc",      # Python's own pools would hide overruns
        "LD_PRELOAD": f"{library('libasan.so')} {library('libstdc++.so.6')}",     # the second one throws NumPy's errors
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1", "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    # A limit of the address space leaves no room for the shadow memory.
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "not memory_limit",
               *arguments, *(f"tests/test_{test}.py" for test in TESTS)]
    return subprocess.run(command, cwd=ROOT, env=os.environ | watched).returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
