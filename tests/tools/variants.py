"""Run tests on kernels that are built otherwise: watched by sanitizers or valgrind, without OpenMP, or for AVX-512.

    python tests/tools/variants.py gcc|clang|thread|valgrind|serial|avx512 [--planted] [arguments of pytest]

gcc and clang watch addresses and undefined operations. thread is Clang's race detector, with LLVM's OpenMP (Debian's
libomp-dev), of which Archer tells it what a parallel region orders. valgrind is memcheck on kernels built as usual.
serial has no OpenMP, and runs the whole suite. avx512 has the sets of AVX-512 alone, on a processor with AVX2: their
intrinsics come from avx512/immintrin.h beside this file. The modules are built from a copy of the sources in
build/variants/ and loaded after the runtime of the sanitizer; Python and NumPy themselves are not watched. With
--planted the lowest set alone is built, from a copy that has a fault, and the run succeeds if it is reported.

Watched code is up to fifty times as slow, so of each test function only a few cases run on each set (--cases, in
conftest.py), the same for every run of one ATTNC_SEED. gcc has two cases of every test of the kernels, on all sets but
avx512, whose module is that of avx512bf16; clang, which takes four times as long to build, the same on base and avx2.
thread has the tests whose calls take more than one thread. valgrind has random calls of every public function
(fuzz.py), on base and avx2 in turn: there pytest would take minutes to collect its tests.
"""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from build_tree import ROOT, compiler, copy_sources

TOOLS = Path(__file__).resolve().parent
AVX512 = "-march=x86-64-v4"
LOG = "report"      # where a sanitizer writes, with the number of the process behind


def files(cases: int, *names: str) -> tuple[str, ...]:
    """Arguments of pytest: some cases of each test in these files, in as many processes as there are processors."""
    paths = [next((ROOT / "tests").glob(f"*/test_{name}.py")) for name in names]
    return ("-n", "auto", "--cases", str(cases), *(str(path.relative_to(ROOT)) for path in paths))


# Watched code takes more stack and address space; what a module is made of is not asked of a watched one.
LIMITS = "small_stacks or cannot_be_created or created_again"
UNWATCHED = f"memory_limit or calls_take_no_memory or instruction or wider_registers or {LIMITS}"
# What one thread does, what needs refused memory, what counts signals (they are held back until a system call).
ALONE = ("no_memory or refused_scratch or huge_sizes or reference_counts or floating_point_error or ten_thousand_calls "
         f"or handler_that_raises or {LIMITS}")
KERNELS = ("-m", "kernels and not more and not peers", *files(2), "tests")


@dataclass(frozen=True)
class Change:
    file: str
    there: str              # in it,
    instead: str            # and what takes its place


@dataclass(frozen=True)
class Fault(Change):
    test: str | None        # a test that comes by, or those of the way,
    reported: str           # and what the report says then


@dataclass(frozen=True)
class Way:
    compiler: str
    flags: str              # of compiler and linker
    tests: tuple[str, ...]  # and options of pytest, or a script
    fault: Fault | None
    refuses: str = "-none"              # flags of the sets that are left out
    left_out: str = "memory_limit"      # tests; a limit of the address space leaves no room for the shadow memory
    changes: tuple[Change, ...] = ()    # of the sources


# The module of AVX-512 alone, with its intrinsics by AVX2 and the two instructions in assembly as functions.
EMULATED = (
    Change("setup.py", 'X86 = {"base": [], "avx2": ["-march=x86-64-v3"], "avx512": ["-march=x86-64-v4"]}',
           f'X86 = {{"avx512": ["-march=x86-64-v3", "-D__AVX512F__", "-I{TOOLS}/avx512", "-Wno-psabi"]}}'),
    Change("src/cpu.pyx", 'has_avx2() && __builtin_cpu_supports("avx512f")',
           'has_avx2() || __builtin_cpu_supports("avx512f")'),
    Change("src/cpu.pyx", "has_avx512() && cpuid(7, 1, 0, 5)", "has_avx512()"),
    Change("src/simd/avx512.h", '__asm__("vcvtneps2bf16 %1, %0" : "=v"(pairs) : "v"(v));',
           "pairs = emulated_cvtneps_bf16((__m512)v);"),
    Change("src/simd/avx512.h", '__asm__("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(a), "vm"(b));',
           "sum = (vf)emulated_dpbf16((__m512)a, (__m512)b, (__m512)sum);"),
)


WAYS = {
    "gcc": Way("gcc", "-fsanitize=address,undefined -fno-sanitize-recover=undefined -O1", KERNELS,
               Fault("src/call/process.h", "&memory, 64, bytes ?", "&memory, 64, bytes > 9999 ? bytes / 2 : bytes ?",
                     "states", "AddressSanitizer: heap-"), left_out=f"{UNWATCHED} or avx512- or avx512]"),
    "clang": Way("clang", "-fsanitize=address,undefined -fno-sanitize-recover=undefined -shared-libasan -O1", KERNELS,
                 # Python builds with -fwrapv: sums that overflow, of pointers too, are defined and not watched.
                 Fault("src/attention/queries.h", "t->row_sum[r] = 0;",
                       "volatile int far = 40; t->row_sum[r] = 0 * (1 << far);", "weighted_sum",
                       "shift exponent 40 is too large"),
                 refuses=AVX512, left_out=UNWATCHED),
    "thread": Way("clang", "-fsanitize=thread", files(
                      2, "threads", "bits", "faults", "float_state", "signals", "invariants", "backward", "softmax",
                      "weighted_sum", "varlen", "cache", "weights", "weights_calls"),
                  Fault("src/call/integers.h", "_Atomic ptrdiff_t Count", "ptrdiff_t Count", "bits", "data race"),
                  refuses=AVX512, left_out=ALONE),
    # valgrind 3.19 knows no AVX-512: there Python is not offered those sets.
    "valgrind": Way("gcc", "", ("tests/fuzz.py", "1000"),
                    Fault("src/attention/queries.h", "        t->row_sum[r] = 0;\n", "", None,
                          "uninitialised"), refuses=AVX512),
    # Built without flags of their own: what builds is tested on the usual kernels.
    "serial": Way("gcc", "", ("-m", "not more and not peers"), None, refuses="-fopenmp",
                  left_out="test_build or test_wheel"),
    # Clang keeps vectors that are split in two in registers; GCC takes five times as long to build them in memory.
    # Two halves of a vector are loaded from where the whole one would be refused: alignment is watched.
    "avx512": Way("clang", "-fsanitize=alignment -fsanitize-trap=alignment",
                  ("-m", "kernels and not more and not peers", *files(0), "tests"), None,
                  left_out="no_instruction_above_the_base and kernels_base", changes=EMULATED),
}


def said(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def library(file: str, cc: str = "gcc") -> str:
    return said(cc, f"-print-file-name={file}")


def build(way: Way, folder: Path, fault: Fault | None) -> None:
    """The package in folder/site, from a copy of the sources."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    tree = copy_sources(folder / "tree")
    for change in (*way.changes, *([fault] if fault else [])):
        file = tree / change.file
        text = file.read_text()
        assert change.there in text, f"{change.file} has no {change.there!r}"
        file.write_text(text.replace(change.there, change.instead))
    # Last, behind the -g0 of setup.py: with lines in the reports.
    cc = compiler(folder / "cc", cc=way.compiler, refuses="-march=*" if fault else way.refuses,
                  flags=f"{way.flags} -fno-omit-frame-pointer -gdwarf-4 -g1")
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-build-isolation",
         "--no-deps", "--target", folder / "site", tree], check=True, env=os.environ | {"CC": cc})


def settings(name: str, log: Path) -> tuple[list[str], dict[str, str]]:
    """The command that goes before Python, and the environment, in which a way watches."""
    # Old runtimes have no room for themselves where addresses are drawn from 32 bits, as newer kernels do: -R.
    front = ["setarch", "-R"]
    preload = [library("libstdc++.so.6")]           # throws NumPy's errors
    if name in ("serial", "avx512"):
        return [], {}
    if name == "valgrind":
        front += ["valgrind", "--quiet", "--error-exitcode=66", f"--log-file={log}.%p",
                  f"--suppressions={TOOLS / 'valgrind.supp'}"]
        return front, {}
    if name == "thread":
        # GCC's runtime has the same interface; LLVM 14's crashes when it is preloaded, as its libstdc++ starts first.
        preload.insert(0, library("libtsan.so"))
        archer = Path(said("clang", "-print-resource-dir")).parents[1] / "libarcher.so"
        return front, {"LD_PRELOAD": " ".join(preload), "OMP_TOOL_LIBRARIES": str(archer),
                       "TSAN_OPTIONS": f"ignore_noninstrumented_modules=1:exitcode=66:log_path={log}:"
                                       f"allocator_may_return_null=1:suppressions={TOOLS / 'thread.supp'}"}
    runtime = library("libasan.so") if name == "gcc" else library("libclang_rt.asan-x86_64.so", "clang")
    return front, {"LD_PRELOAD": " ".join([runtime, *preload]),
                   "ASAN_OPTIONS": f"detect_leaks=0:allocator_may_return_null=1:log_path={log}",
                   "UBSAN_OPTIONS": f"print_stacktrace=1:log_path={log}"}


def main(name: str, *arguments: str) -> int:
    way, folder = WAYS[name], ROOT / "build" / "variants" / name
    fault = way.fault if "--planted" in arguments else None
    build(way, folder, fault)
    front, watched = settings(name, folder / LOG)
    # Python's own pools would hide overruns; the safe path keeps the checkout from what the tests start.
    watched |= {"PYTHONPATH": os.pathsep.join([str(folder / "site"), str(ROOT / "tests")]), "PYTHONMALLOC": "malloc",
                "PYTHONSAFEPATH": "1", "OMP_WAIT_POLICY": "passive"}     # processes share the processors
    python = [*front, sys.executable]
    tests = ("--maxfail", "1", *files(2, fault.test)) if fault and fault.test else way.tests
    if not tests[0].endswith(".py"):
        # GCC's watcher of undefined operations writes to stderr, which pytest would lose with the process that it ends.
        tests = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--capture=sys", "-k", f"not ({way.left_out})", *tests)
    environment = os.environ | watched
    subprocess.run([*python, "-m", "attnc", "info"], cwd=ROOT, env=environment, check=True)
    status = subprocess.run([*python, *tests, *(word for word in arguments if word != "--planted")],
                            cwd=ROOT, env=environment).returncode
    reports = "".join(path.read_text(errors="replace") for path in folder.glob(f"{LOG}.*"))
    # Of huge sizes, that a test asks for.
    reports = re.sub(r"==\d+==WARNING: \w+Sanitizer failed to allocate .*\n+", "", reports)
    print(reports)
    if fault:
        return 0 if fault.reported in reports else 1
    return status or bool(reports)


if __name__ == "__main__":
    if sys.argv[1:2] not in [[name] for name in WAYS]:
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:]))
