"""Build one kernel module per instruction set from src/kernels.pyx, and the module that says which of them may run."""

import os
import platform
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, setup

# Best last: each name is a promise of what the processor and its operating system must offer (src/cpu.pyx checks it).
X86 = {"base": [], "avx2": ["-march=x86-64-v3"], "avx512": ["-march=x86-64-v4"]}
ISAS = X86 if platform.machine().lower() in ("x86_64", "amd64") else {"base": []}

# No -ffast-math: it breaks -inf and NaN. Contraction is off so that only an explicit fma is one, in every loop alike.
COMMON = ["-std=c11", "-O3", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off", "-fvisibility=hidden", "-g0"]
DIRECTIVES = {
    "language_level": 3, "boundscheck": False, "wraparound": False, "initializedcheck": False, "cdivision": True,
    "freethreading_compatible": True, "binding": False, "embedsignature": False,
}
ROOT = Path(__file__).resolve().parent
HEADERS = sorted(str(p.relative_to(ROOT)) for pattern in ("*.h", "simd/*.h", "*.pxi") for p in (ROOT / "src").glob(pattern))
FREE_THREADED = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
LIMITED_API = [] if FREE_THREADED else [("Py_LIMITED_API", "0x030B0000")]


def compiler():
    return (os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()


def compiles(source, flags):
    """Whether the C compiler builds and links `source` with `flags`; False also when there is no compiler."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "probe.c"
        path.write_text(source)
        try:
            done = subprocess.run([*compiler(), *flags, str(path), "-o", str(path.with_suffix(""))], capture_output=True, timeout=60)
        except OSError:
            return False
    return done.returncode == 0


def compiler_version():
    try:
        done = subprocess.run([*compiler(), "--version"], capture_output=True, text=True, timeout=60)
    except OSError:
        return "unknown"
    return done.stdout.splitlines()[0] if done.stdout else "unknown"


def extension(name, source, flags, isa, macros=()):
    module = Extension(
        f"attnc.{name}", [source], include_dirs=["src"], depends=HEADERS, extra_compile_args=[*COMMON, *flags],
        extra_link_args=OPENMP, define_macros=[*LIMITED_API, *macros], py_limited_api=not FREE_THREADED,
    )
    # One call each, with its own folder: two extensions from one .pyx in a single call would overwrite each other's C.
    return cythonize([module], build_dir=f"build/{isa}", include_path=["src"], compiler_directives=DIRECTIVES)


if not compiles("int main(void) { return 0; }", []):
    sys.exit(f"attnc: no working C compiler ({' '.join(compiler())}); install one (gcc or clang, e.g. 'apt-get install gcc') or set CC")
OPENMP = ["-fopenmp"] if compiles("#include <omp.h>\nint main(void) { return omp_get_max_threads() < 1; }", ["-fopenmp"]) else []
if not OPENMP:
    print("attnc: the compiler has no OpenMP; the kernels are built without threads (install libgomp or libomp)", file=sys.stderr)

built = {isa: compiles("int main(void) { return 0; }", flags) for isa, flags in ISAS.items()}
extensions = []
for isa, flags in ISAS.items():
    if built[isa]:
        extensions += extension(f"_kernels_{isa}", "src/kernels.pyx", [*flags, *OPENMP], isa)
quoted = {
    "ATTNC_BUILT": ",".join(isa for isa in ISAS if built[isa]),
    "ATTNC_LEFT_OUT": ",".join(isa for isa in ISAS if not built[isa]),
    "ATTNC_COMPILER": compiler_version(),
}
extensions += extension("_cpu", "src/cpu.pyx", [], "cpu", [(name, f'"{text}"') for name, text in quoted.items()])

setup(
    packages=["attnc", *sorted(f"attnc.{p.parent.relative_to(ROOT / 'attnc')}".replace(os.sep, ".")
                              for p in (ROOT / "attnc").glob("*/**/__init__.py"))],
    package_data={"attnc": ["py.typed", "datasets/*", "datasets/*/*"]},
    ext_modules=extensions,
    options={} if FREE_THREADED else {"bdist_wheel": {"py_limited_api": "cp311"}},
)
