"""Run quick tests on kernels that are watched: asan (addresses and undefined behaviour) or tsan (races).

    python tests/sanitized.py asan|tsan [arguments of pytest]

The modules are built into build/sanitized/ and loaded with the sanitizer's runtime before Python's own libraries. asan
takes GCC; tsan takes Clang, LLVM's OpenMP and its tool Archer, which tells the sanitizer what OpenMP orders (Debian:
clang, libomp-dev). Python and NumPy themselves are not watched.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FLAGS = {"asan": "-fsanitize=address,undefined -fno-sanitize-recover=undefined", "tsan": "-fsanitize=thread"}
COMPILERS = {"asan": "gcc", "tsan": "clang"}
TESTS = {
    "asan": ("invariants", "special", "softmax", "states", "varlen", "weighted_sum", "given_lse", "backward"),
    "tsan": ("bits", "threads"),
}


def runtime(name: str) -> str:
    """The library that is to be loaded first."""
    file = "libasan.so" if name == "asan" else "libclang_rt.tsan-x86_64.so"
    asked = [COMPILERS[name], f"-print-file-name={file}"]
    return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()


def build(name: str, target: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)
    flags = FLAGS[name] + " -shared-libsan" * (name == "tsan")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-build-isolation",
               "--no-deps", "--target", target, ROOT]
    added = {"CC": COMPILERS[name], "CFLAGS": f"{flags} -fno-omit-frame-pointer -g1", "LDFLAGS": flags}
    subprocess.run(command, env=os.environ | added, check=True)


def main(name: str, *arguments: str) -> int:
    target = ROOT / "build" / "sanitized" / name
    build(name, target)
    first = runtime(name)
    if name == "asan":      # NumPy's own library of C++ has to be there before the exceptions of others are watched
        first += " " + subprocess.run(["gcc", "-print-file-name=libstdc++.so.6"], capture_output=True, text=True,
                                      check=True).stdout.strip()
    watched = {
        "PYTHONPATH": str(target), "LD_PRELOAD": first, "PYTHONMALLOC": "malloc",
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1", "UBSAN_OPTIONS": "print_stacktrace=1",
        "TSAN_OPTIONS": "ignore_noninstrumented_modules=1:halt_on_error=1", "OMP_TOOL_LIBRARIES": "libarcher.so",
    }
    tests = [f"tests/test_{test}.py" for test in TESTS[name]]
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", "not memory_limit",
               *arguments, *tests]
    return subprocess.run(command, cwd=ROOT, env=os.environ | watched).returncode


if __name__ == "__main__":
    if sys.argv[1:2] not in (["asan"], ["tsan"]):
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:]))
