"""Building: every module gets the flags of its own instruction set only, and what the compiler lacks is said."""

import platform
import shutil
import sys

import pytest
from build_tree import MADE, ROOT, compiler, copy_sources, pip, run

X86 = platform.machine().lower() in ("x86_64", "amd64")
FLAGS = {"base": set(), "avx2": {"-march=x86-64-v3"}, "avx512": {"-march=x86-64-v4"}, "cpu": set()}
INEXACT = ("-Ofast", "-ffast-math", "-funsafe-math-optimizations", "-fassociative-math", "-ffinite-math-only",
           "-march=native", "-mtune=native")


def build_ext(folder, cc):
    return run(sys.executable, "setup.py", "build_ext", "--inplace", folder=folder, CC=cc)


def test_each_module_gets_the_flags_of_its_own_instruction_set_and_none_that_round_otherwise(tmp_path):
    tree = copy_sources(tmp_path / "tree")
    done = build_ext(tree, compiler(tmp_path / "cc", compiles=False))
    assert done.returncode == 0, done.stdout
    commands = [line.split() for line in (tmp_path / "cc.log").read_text().splitlines()]
    compiled = {word.split("/")[1]: words for words in commands for word in words
                if word.startswith("build/") and word.endswith(".c")}
    assert set(compiled) == (set(FLAGS) if X86 else {"base", "cpu"})
    for isa, words in compiled.items():
        assert {word for word in words if word.startswith("-m")} == FLAGS[isa], isa
        assert "-ffp-contract=off" in words
        assert ("-fopenmp" in words) == (isa != "cpu")
    assert not [word for words in commands for word in words if word in INEXACT]


def test_what_the_compiler_lacks_is_left_out_said_and_listed(tmp_path):
    """A build without OpenMP and without any instruction set above the base is right, and tells both."""
    cc = compiler(tmp_path / "cc", refuses="-march=x86-64-v*|-fopenmp")
    tree, target = copy_sources(tmp_path / "tree"), tmp_path / "target"
    text = pip("install", "--verbose", "--no-build-isolation", "--no-deps", "--target", target, tree,
               folder=tmp_path, CC=cc)
    left_out = ["avx2", "avx512"] if X86 else []
    assert "attnc: the compiler has no OpenMP" in text
    for isa in left_out:
        assert f"the {isa} kernels are left out" in text
    empty = tmp_path / "empty"
    empty.mkdir()

    def python(*arguments, **environment):
        return run(sys.executable, "-P", *arguments, folder=empty, PYTHONPATH=str(target), **environment)

    show = ("import attnc; found = attnc.show_config(); "
            "print(attnc.__file__, found['openmp'], found['threads'], *found['built'], '|', *found['left_out'])")
    assert python("-c", show).stdout.split() == [
        str(target / "attnc" / "__init__.py"), "0", "1", "base", "|", *left_out]
    checked = python("-m", "attnc", "check")
    assert checked.returncode == 0 and "FAIL" not in checked.stdout and "within tolerance" in checked.stdout
    if left_out:
        refused = python("-c", "import attnc", ATTNC_ISA="avx2")
        assert refused.returncode == 1
        assert "ImportError: attnc: instruction set 'avx2' was left out when attnc was built; available: base" \
            in refused.stdout


@pytest.mark.parametrize(("refuses", "message"), [
    ("*", "no working C compiler"),
    ("-I*include*", "finds no Python.h"),
])
def test_without_a_compiler_or_headers_the_build_says_what_to_install(refuses, message, tmp_path):
    done = build_ext(copy_sources(tmp_path / "tree"), compiler(tmp_path / "cc", refuses=refuses, compiles=False))
    assert done.returncode == 1
    assert "attnc: " in done.stdout and message in done.stdout
    assert "apt-get install" in done.stdout and "Traceback" not in done.stdout


def test_a_source_tree_without_kernels_says_how_to_build_them(tmp_path):
    shutil.copytree(ROOT / "attnc", tmp_path / "attnc", ignore=MADE)
    # -S: the import hook of an editable installation would find the kernels of the checkout.
    done = run(sys.executable, "-S", "-c", "import attnc", folder=tmp_path)
    assert done.returncode == 1
    assert "ImportError: attnc: the compiled kernels are missing" in done.stdout
    assert "pip install -e ." in done.stdout and "make run" in done.stdout
