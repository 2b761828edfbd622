"""Run the tests of the kernels on a processor that this machine is not, by qemu's user emulation.

    python tests/tools/emulated.py aarch64|nehalem|haswell [arguments of pytest]

These are the tests that run once for each instruction set, and those of its choice and of threads (the marker
`kernels`), all of them, over as many processes as there are processors.

The wheel is built, for aarch64 with the cross compiler, and installed beside its requirements into build/emulated/;
the Python of aarch64 is Debian's, unpacked there by apt-get and not installed. Needed are the Debian packages
qemu-user-static and, for aarch64, gcc-aarch64-linux-gnu, libc6-dev-arm64-cross and libgomp1-arm64-cross.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Without what qemu would warn about on every start.
CPUS = {"aarch64": "", "nehalem": "-cpu Nehalem",
        "haswell": "-cpu Haswell,-pcid,-x2apic,-tsc-deadline,-hle,-rtm,-invpcid"}
# NumPy is the oracle: under qemu 7.2 its AVX2 argsort is wrong (a permutation of 2100 is not inverted).
SETTINGS = {"haswell": {"NPY_DISABLE_CPU_FEATURES": "X86_V3"}}
REQUIRED = ["numpy>=2.0", "pytest>=8", "pytest-xdist>=3.6", "ml_dtypes>=0.5", "hypothesis>=6", "threadpoolctl>=3"]


def run(*command, **environment):
    # OPENBLAS_CORETYPE would take kernels for the processor that is there, and end the emulated one's processes.
    inherited = {name: text for name, text in os.environ.items() if not name.startswith("OPENBLAS_")}
    subprocess.run([str(word) for word in command], cwd=ROOT, check=True, env=inherited | environment)


def debian_python(folder: Path) -> Path:
    """Debian's Python for aarch64, unpacked below `folder`."""
    root, apt = folder / "root", folder / "apt"
    if not list(root.glob("usr/bin/python3.*")):
        for part in ("lists/partial", "cache/archives/partial"):
            (apt / part).mkdir(parents=True, exist_ok=True)
        get = ["apt-get", "-qq", "-o", "APT::Architecture=arm64", "-o", "APT::Architectures::=arm64",
               "-o", f"Dir::State::lists={apt / 'lists'}", "-o", f"Dir::Cache={apt / 'cache'}",
               "-o", "Dir::State::status=/dev/null"]
        run(*get, "update")
        run(*get, "install", "--download-only", "--yes", "--no-install-recommends", "python3", "libgomp1", "libstdc++6")
        for archive in sorted((apt / "cache" / "archives").glob("*.deb")):
            run("dpkg-deb", "-x", archive, root)
    return next(path for path in root.glob("usr/bin/python3.*") if path.name.count(".") == 1)


def environment_of(name: str, folder: Path) -> Path:
    """An environment whose python runs under qemu, with the wheel in it; the path of that python."""
    if name == "aarch64":
        python = debian_python(folder)
        version, emulator = python.name.removeprefix("python"), f"qemu-aarch64-static -L {folder / 'root'}"
        platforms = ["linux_aarch64", "manylinux_2_28_aarch64", "manylinux2014_aarch64"]
        cross = {"CC": "aarch64-linux-gnu-gcc", "LDSHARED": "aarch64-linux-gnu-gcc -shared",
                 "_PYTHON_HOST_PLATFORM": "linux-aarch64"}
    else:
        python = Path(sys._base_executable).resolve()
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        emulator = f"qemu-x86_64-static {CPUS[name]}"
        platforms, cross = ["linux_x86_64", "manylinux_2_28_x86_64", "manylinux2014_x86_64"], {}
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    for made in ("wheel", "env"):
        shutil.rmtree(folder / made, ignore_errors=True)
    run(*pip, "wheel", "--no-build-isolation", "--no-deps", "--wheel-dir", folder / "wheel", ".", **cross)
    [wheel] = (folder / "wheel").glob("*.whl")
    env = folder / "env"
    packages = env / "lib" / f"python{version}" / "site-packages"
    run(*pip, "install", *[word for one in platforms for word in ("--platform", one)], "--python-version", version,
        "--only-binary", ":all:", "--target", packages, *REQUIRED, wheel)
    (env / "pyvenv.cfg").write_text(f"home = {python.parent}\ninclude-system-site-packages = false\n")
    # A script, so that the processes that the tests start are emulated too; -0: by that name Python finds pyvenv.cfg.
    wrapper = env / "bin" / "python"
    wrapper.parent.mkdir()
    wrapper.write_text(f'#!/bin/sh\nexec {emulator} -0 {wrapper} {python} "$@"\n')
    wrapper.chmod(0o755)
    return wrapper


def main(name: str, *arguments: str) -> None:
    python = environment_of(name, ROOT / "build" / "emulated" / name)
    settings = SETTINGS.get(name, {}) | {"PYTHONSAFEPATH": "1"}     # not the attnc of the checkout, in no process
    run(python, "-m", "attnc", "info", **settings)
    run(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "auto",
        "-m", "kernels and not more and not peers", *arguments, **settings)


if __name__ == "__main__":
    if sys.argv[1:2] not in [[name] for name in CPUS]:
        sys.exit(__doc__)
    main(*sys.argv[1:])
