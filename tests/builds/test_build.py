"""Building: every module gets the flags of its own instruction set only, and what the compiler lacks is said."""

import platform
import re
import shutil
import subprocess
import sys
import sysconfig

import pytest
from build_tree import COMPILER, MADE, ROOT, compiler, copy_sources, pip, run

from attnc import _cpu, _isa

MACHINE = platform.machine().lower()
X86 = MACHINE in ("x86_64", "amd64")
LOWEST = "neon" if MACHINE in ("aarch64", "arm64") else "base"
FLAGS = {"base": set(), "avx2": {"-march=x86-64-v3"}, "avx512": {"-march=x86-64-v4"}, "cpu": set()}
INEXACT = ("-Ofast", "-ffast-math", "-funsafe-math-optimizations", "-fassociative-math", "-ffinite-math-only",
           "-march=native", "-mtune=native")

# What came after SSE2, the base of x86-64: AVX and later carry a v (verr and verw do not count), the rest by name.
# xgetbv is asked for only where CPUID offers it; tzcnt is how the older "rep bsf" is shown.
ABOVE_BASE = re.compile(r"""
    v(?!err|erw)[a-z0-9]+ | k(mov|and|or|xor|not|test|shift|unpck)[a-z]+
    | addsubp[sd] | h(add|sub)p[sd] | mov(ddup|shdup|sldup|ntdqa) | lddqu
    | pshufb | palignr | pabs[bwd] | ph(add|sub)(s?w|d) | phminposuw | psign[bwd] | pmulhrsw | pmaddubsw
    | blendv?p[sd] | pblend(vb|w) | round[ps][sd] | dpp[sd] | (extract|insert)ps | p(extr|insr)[bdq]
    | p(max|min)(s[bd]|u[wd]) | pmov[sz]x[a-z]+ | pmul(ld|dq) | ptest | mpsadbw | packusdw
    | pcmp(eq|gt)q | pcmp[ei]str[im] | crc32[bwlq]? | popcnt[wlq]? | lzcnt[wlq]?
    | andn[lq]? | bextr[lq]? | bls[ir][lq]? | bzhi[lq]? | mulx[lq]?
    | [rs][ahlo][rl]x[lq]? | pdep[lq]? | pext[lq]?""", re.VERBOSE)


def build_ext(folder, cc):
    return run(sys.executable, "setup.py", "build_ext", "--inplace", folder=folder, CC=cc)


# Clang refuses such flags as unknown: once it left every set out for one of them, the base too.
@pytest.mark.parametrize("refuses", ["-none", "-fvect-cost-model=*|-fpeel-loops|-fno-schedule-insns"])
def test_each_module_gets_the_flags_of_its_own_instruction_set_and_none_that_round_otherwise(refuses, tmp_path):
    tree = copy_sources(tmp_path / "tree")
    done = build_ext(tree, compiler(tmp_path / "cc", refuses=refuses, compiles=False))
    assert done.returncode == 0, done.stdout
    commands = [line.split() for line in (tmp_path / "cc.log").read_text().splitlines()]
    compiled = {word.split("/")[1]: words for words in commands for word in words
                if word.startswith("build/") and word.endswith(".c")}
    assert set(compiled) == (set(FLAGS) if X86 else {LOWEST, "cpu"})
    for isa, words in compiled.items():
        assert {word for word in words if word.startswith("-m")} == FLAGS.get(isa, set()), isa
        assert "-ffp-contract=off" in words
        assert ("-fopenmp" in words) == (isa != "cpu")
    assert not [word for words in commands for word in words if word in INEXACT]


# Gives an empty file for each source, but not before a second one is being compiled.
MEETING = """\
#!/bin/sh
case "$*" in *build/*.c*)
    touch {folder}/started-$$
    tries=0
    until [ "$(ls {folder} | wc -l)" -gt 1 ]; do
        tries=$((tries + 1)); [ $tries -lt 200 ] || { echo "compiled alone" >&2; exit 1; }
        sleep 0.1
    done;;
esac
while [ $# -gt 1 ]; do [ "$1" != -o ] || : > "$2"; shift; done
"""


@pytest.mark.parametrize("hook", ["build_editable", "build_wheel"])
def test_modules_are_compiled_in_parallel(hook, tmp_path):
    """By the hooks that pip calls: pip itself would take the installed package out of this environment."""
    tree, meeting, cc = copy_sources(tmp_path / "tree"), tmp_path / "meeting", tmp_path / "cc"
    meeting.mkdir()
    cc.write_text(MEETING.replace("{folder}", str(meeting)))
    cc.chmod(0o755)
    code = f"from setuptools import build_meta; build_meta.{hook}({str(tmp_path)!r})"
    done = run(sys.executable, "-c", code, folder=tree, CC=str(cc))
    assert done.returncode == 0, done.stdout[-3000:]
    assert len(list(meeting.iterdir())) > 1


def test_what_the_compiler_lacks_is_left_out_said_and_listed(tmp_path):
    """A build without OpenMP and without any instruction set above the base is right, and tells both."""
    cc = compiler(tmp_path / "cc", refuses="-march=x86-64-v*|-fopenmp")
    tree, target = copy_sources(tmp_path / "tree"), tmp_path / "target"
    text = pip("install", "--verbose", "--no-build-isolation", "--no-deps", "--target", target, tree,
               folder=tmp_path, CC=cc)
    left_out = ["avx2", "avx512", "avx512bf16"] if X86 else []
    assert "attnc: the compiler has no OpenMP" in text
    for isa in left_out:
        assert re.search(rf"the .*\b{isa}\b.* kernels are left out", text)
    empty = tmp_path / "empty"
    empty.mkdir()

    def python(*arguments, **environment):
        return run(sys.executable, "-P", *arguments, folder=empty, PYTHONPATH=str(target), **environment)

    show = ("import attnc; found = attnc.show_config(); "
            "print(attnc.__file__, found['openmp'], found['threads'], *found['built'], '|', *found['left_out'])")
    assert python("-c", show).stdout.split() == [
        str(target / "attnc" / "__init__.py"), "0", "1", LOWEST, "|", *left_out]
    checked = python("-m", "attnc", "check")
    assert checked.returncode == 0 and "FAIL" not in checked.stdout and "within tolerance" in checked.stdout
    if left_out:
        refused = python("-c", "import attnc", ATTNC_ISA="avx2")
        assert refused.returncode == 1
        assert "ImportError: attnc: instruction set 'avx2' was left out when attnc was built; available: base" \
            in refused.stdout


HEADERS = """
#include "call/process.h"
#include "kernels.h"
#include "probes/hooks.h"
#include "probes/probes.h"
const Kernels *kernels(void) { return KERNELS; }
"""


@pytest.mark.parametrize("built", [isa for isa in _cpu.BUILT if isa not in _isa.MODULE_OF])
@pytest.mark.parametrize("cc", ["gcc", "clang"])
def test_our_c_gives_no_warning(cc, built, tmp_path):
    """All headers in one file; what only the Cython side calls would be unused there."""
    if shutil.which(cc) is None:
        pytest.skip(f"{cc} is not there")
    (tmp_path / "headers.c").write_text(HEADERS)
    done = run(cc, "-fsyntax-only", "-std=c11", "-Wall", "-Wextra", "-Werror", "-Wno-unused-function",
               f"-I{sysconfig.get_path('include')}", f"-I{ROOT / 'src'}", *FLAGS.get(built, ()), "headers.c",
               folder=tmp_path)
    assert done.returncode == 0, done.stdout


@pytest.mark.more
def test_the_modules_compile_for_free_threaded_python(tmp_path):
    """With the headers of an ordinary Python, told that it has no GIL; the limited API does not exist there."""
    if sys.version_info < (3, 13):
        pytest.skip("the headers of Python 3.13 or newer are needed")
    tree = copy_sources(tmp_path / "tree")
    build_ext(tree, compiler(tmp_path / "cc", compiles=False))
    for source in (f"build/{LOWEST}/src/kernels.c", "build/cpu/src/cpu.c"):
        done = run(*COMPILER.split(), "-fsyntax-only", "-std=c11", "-fopenmp", "-DPy_GIL_DISABLED=1",
                   f"-I{sysconfig.get_path('include')}", "-Isrc", source, folder=tree)
        assert done.returncode == 0, done.stdout
        assert "Py_MOD_GIL_NOT_USED" in (tree / source).read_text()


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


def instructions(module):
    """Mnemonic and operands of every instruction in a module."""
    listing = subprocess.run(["objdump", "-d", "--no-show-raw-insn", module.__file__], capture_output=True, text=True,
                             check=True).stdout
    lines = [line.split("\t", 1)[1].split("#")[0] for line in listing.splitlines() if re.match(r" *[0-9a-f]+:\t", line)]
    assert len(lines) > 1000
    return lines


def above_base(lines):
    return sorted({line.split()[0] for line in lines if line.split() and ABOVE_BASE.fullmatch(line.split()[0])})


@pytest.mark.skipif(not X86 or not shutil.which("objdump"), reason="needs x86-64 and objdump")
def test_no_module_holds_an_instruction_above_its_set():
    assert above_base(instructions(_cpu)) == []
    assert above_base(instructions(_isa.load("base"))) == []
    for isa, width, wider in (("avx2", "%ymm", ("%zmm", "{%k")), ("avx512", "%zmm", ())):
        if isa in _isa.available():
            lines = instructions(_isa.load(isa))
            assert {"vmulps", "vmulpd"} <= set(above_base(lines))
            assert sum(width in line for line in lines) > 100
            assert not [line for line in lines for register in wider if register in line]
