"""Build one kernel module per instruction set from src/kernels.pyx, and the module that says which of them may run."""

import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

# Best last: each name is a promise of what the processor and its operating system must offer (src/cpu.pyx checks it).
# The module of avx512 serves avx512bf16 too: two instructions of it, written as assembly, are used there.
X86 = {"base": [], "avx2": ["-march=x86-64-v3"], "avx512": ["-march=x86-64-v4"]}
ARM = {"neon": []}
SERVES = {"avx512": ["avx512", "avx512bf16"]}
# Flags of GCC that make a set smaller or faster; a compiler that does not know them all, as Clang, builds it without.
# The loops that -O3 copies are an eighth of a module and gain nothing, but for those that it makes vectors (1.47 times
# as fast with masks) and, with AVX2, those that it peels (softmax of columns: up to 1.2). On Arm the first scheduling
# pass moves loads up until sums of the register tile are spilled (38 instructions a depth, one of the 24 sums in
# memory; without it 36, none).
#
# base, for processors without AVX2, is compiled for size: 83 kB less of a wheel of 1,550, whose limit is 1,500. Float32
# attention takes 3 % longer there; softmax, float64 and decoding 6 to 32 %.
LEAN = ["-O2", "-fvect-cost-model=dynamic"]
TUNING = {"base": ["-Os"], "avx2": [*LEAN, "-fpeel-loops"], "avx512": LEAN, "neon": ["-fno-schedule-insns"]}
# What is built for, not what builds: get_platform() follows _PYTHON_HOST_PLATFORM.
TARGET = sysconfig.get_platform().lower().rpartition("-")[2].replace("universal2", platform.machine().lower())
ISAS = X86 if TARGET in ("x86_64", "amd64") else ARM if TARGET in ("aarch64", "arm64") else {"base": []}

# No -ffast-math: it breaks -inf and NaN. Contraction is off so that only an explicit fma is one, in every loop alike.
# Nothing is thrown through C, and tables to unwind it by would be 22 kB of a wheel.
COMMON = ["-std=c11", "-O3", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off", "-fvisibility=hidden",
          "-fno-asynchronous-unwind-tables", "-g0"]
DIRECTIVES = {
    "language_level": 3, "boundscheck": False, "wraparound": False, "initializedcheck": False, "cdivision": True,
    "freethreading_compatible": True, "binding": False, "embedsignature": False,
}
SRC = Path(__file__).resolve().parent / "src"
HEADERS = sorted(f"src/{path.relative_to(SRC).as_posix()}" for path in SRC.rglob("*") if path.suffix in (".h", ".pxi"))
FREE_THREADED = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
LIMITED_API = [] if FREE_THREADED else [("Py_LIMITED_API", "0x030B0000")]

WINDOWS = sys.platform == "win32"     # there clang-cl, which takes Clang's own flags behind a prefix
COMPILER = (os.environ.get("CC") or sysconfig.get_config_var("CC") or ("clang-cl" if WINDOWS else "cc")).split()
INCLUDE = f"-I{sysconfig.get_path('include')}"
EMPTY = "int main(void) { return 0; }"
ASSEMBLY = {"avx512": 'int main(void) { __asm__("vdpbf16ps %zmm0, %zmm0, %zmm0"); return 0; }'}


def options(flags):
    """Flags as the compiler's driver takes them."""
    return [f"/clang:{flag}" for flag in flags] if WINDOWS else [*flags]


def run(command):
    """The finished command, or None when there is no such program."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60)
    except OSError:
        return None


def compiles(source, *flags):
    """Whether the C compiler builds and links `source` with `flags`."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "probe.c"
        path.write_text(source)
        done = run([*COMPILER, *options(flags), str(path), "-o", str(path.with_suffix(""))])
        return done is not None and done.returncode == 0 and path.with_suffix("").exists()


def tell(text):
    print(f"attnc: {text}", file=sys.stderr)


def extension(name, source, flags, folder, macros=(), openmp=()):
    [module] = cythonize(
        [Extension(
            f"attnc.{name}", [source], include_dirs=["src"], depends=HEADERS,
            define_macros=[*LIMITED_API, *macros], py_limited_api=not FREE_THREADED,
        )],
        # One call each, with its own folder: two modules of one .pyx in a single call would overwrite each other's C.
        build_dir=f"build/{folder}", include_path=["src"], compiler_directives=DIRECTIVES)
    # Not given to cythonize: it remembers the flags of a .pyx and would add them to those of the next module from it.
    module.extra_compile_args = options([*COMMON, *flags, *openmp])
    module.extra_link_args = [] if WINDOWS else list(openmp)
    return module


class BuildExt(build_ext):
    """The build by COMPILER, which on Windows is not what setuptools would take."""

    # An editable install resets the command and then looks for its options by this name, or else by that of the class:
    # without it the option `parallel` is lost, and the modules are compiled one after another.
    command_name = "build_ext"

    def build_extensions(self):
        if WINDOWS:
            self.compiler.initialize(self.plat_name)
            self.compiler.cc = shutil.which(COMPILER[0])
        super().build_extensions()


if not compiles(EMPTY):
    sys.exit(f"attnc: no working C compiler ({' '.join(COMPILER)}); install one (gcc or clang, for example "
             "'apt-get install gcc libc6-dev'), or name it in CC. A wheel needs none.")
if not compiles(f"#include <Python.h>\n{EMPTY}", INCLUDE):
    sys.exit(f"attnc: {COMPILER[0]} finds no Python.h in {INCLUDE[2:]}; install the headers of this Python "
             "(for example 'apt-get install python3-dev').")
OPENMP = ["-fopenmp"] if compiles("#include <omp.h>\nint main(void) { return omp_get_max_threads() < 1; }",
                                  "-fopenmp") else []
if not OPENMP:
    tell("the compiler has no OpenMP: the kernels are built for one thread only (gcc has it; clang needs libomp-dev)")
built = [isa for isa, flags in ISAS.items() if compiles(ASSEMBLY.get(isa, EMPTY), *flags)]
left_out = [isa for isa in ISAS if isa not in built]
for isa in left_out:
    tell(f"{' '.join(COMPILER)} does not take {' '.join(ISAS[isa])}: "
         f"the {' and '.join(SERVES.get(isa, [isa]))} kernels are left out")

version = run([*COMPILER, "--version"]).stdout.partition("\n")[0].replace("\\", "").replace('"', "") or "unknown"
facts = {fact: ",".join(name for isa in isas for name in SERVES.get(isa, [isa]))
         for fact, isas in (("ATTNC_BUILT", built), ("ATTNC_LEFT_OUT", left_out))} | {"ATTNC_COMPILER": version}
tuning = {isa: TUNING[isa] if compiles(EMPTY, "-Werror", *TUNING[isa]) else [] for isa in built}
modules = [extension(f"_kernels_{isa}", "src/kernels.pyx", [*ISAS[isa], *tuning[isa]], isa, openmp=OPENMP)
           for isa in built]
modules.append(extension("_cpu", "src/cpu.pyx", [], "cpu", [(name, f'"{text}"') for name, text in facts.items()]))

setup(
    ext_modules=modules,
    cmdclass={"build_ext": BuildExt},
    options={
        "build_ext": {"parallel": len(modules)},
        "bdist_wheel": {} if FREE_THREADED else {"py_limited_api": "cp311"},
    },
)
