"""What a measurement depends on: processor, threads, versions, commit, environment variables that change speed."""

import os
import platform
import re
import subprocess
import sys
from functools import cache
from importlib import metadata
from pathlib import Path

import numpy as np

import attnc
from attnc.bench import Json

_PACKAGES = ("torch", "transformers", "onnxruntime", "onnx", "openvino", "jax", "scipy", "ml_dtypes",
             "pywhispercpp", "threadpoolctl")
_MAKERS = {"AuthenticAMD": "amd", "GenuineIntel": "intel"}
_PREFIXES = ("ATTNC_", "OMP_", "GOMP_", "KMP_", "OPENBLAS_", "MKL_", "NPY_", "MALLOC_")


@cache
def _cpu_info() -> Json:
    """What py-cpuinfo says of the processor, which takes a second; nothing without it."""
    try:
        import cpuinfo

        return dict(cpuinfo.get_cpu_info())
    except Exception:       # not installed; or an unknown kind of processor, for which it raises no class of its own
        return {}


def cpu_name() -> str:
    """The processor's own name for itself; without py-cpuinfo what Python knows."""
    return _cpu_info().get("brand_raw") or platform.processor() or platform.machine()


def make() -> str:
    """Maker and family of the processor: machines of one make have comparable shares, and one file of results.

    ``amd-family26``; Intel tells its designs apart by the model too: ``intel-family6-model207``. Processors without
    such numbers have their name.
    """
    info = _cpu_info()
    maker, family = _MAKERS.get(info.get("vendor_id_raw", "")), info.get("family")
    if maker is None or family is None:
        return re.sub("[^a-z0-9]+", "-", cpu_name().lower()).strip("-")
    return f"{maker}-family{family}" + (f"-model{info.get('model')}" if maker == "intel" else "")


def cores() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def available_memory() -> float:
    """Bytes that can be had without swapping; infinite where the system does not tell."""
    try:
        for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("MemAvailable"):
                return 1024 * int(line.split()[1])
    except OSError:
        pass
    return float("inf")


class PeakMemory:
    """How far the memory of this process rises above where it was; `bytes` is None where the system does not tell."""

    def __enter__(self) -> "PeakMemory":
        self.before = self._reset()
        return self

    def __exit__(self, *error: object) -> None:
        peak = self._status("VmHWM")
        self.bytes = None if self.before is None or peak is None else max(0, peak - self.before)

    def _reset(self) -> int | None:
        try:
            Path("/proc/self/clear_refs").write_text("5")      # the high-water mark is what is held now
        except OSError:
            return None
        return self._status("VmRSS")

    @staticmethod
    def _status(name: str) -> int | None:
        try:
            lines = Path("/proc/self/status").read_text().splitlines()
        except OSError:
            return None
        return next((1024 * int(line.split()[1]) for line in lines if line.startswith(name)), None)


def versions() -> Json:
    """Versions of Python, NumPy, attnc and every peer that is installed, without importing the peers."""
    found = {"python": platform.python_version(), "numpy": np.__version__, "attnc": attnc.__version__}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def blas() -> list[str]:
    """The BLAS libraries loaded in this process and their kernels, when threadpoolctl is there to tell."""
    try:
        import threadpoolctl
    except ImportError:
        return []
    return [" ".join(str(pool[key]) for key in ("internal_api", "version", "architecture") if pool.get(key))
            for pool in threadpoolctl.threadpool_info() if pool["user_api"] == "blas"]


def commit() -> str | None:
    """The commit of the checkout this package is imported from, with a plus sign if files differ; None without one."""
    root = Path(attnc.__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None
    git = ["git", "-C", str(root)]
    try:
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        changes = subprocess.run([*git, "status", "--porcelain", "--untracked-files=no"], capture_output=True,
                                 text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
    return head + ("+" if changes else "")


def describe(threads: int) -> Json:
    """All of it, ready for JSON."""
    return {
        "machine": {"cpu": cpu_name(), "make": make(), "cores": cores(), "platform": platform.platform(),
                    "isa": attnc.isa(), "threads": threads},
        "versions": versions(),
        "blas": blas(),
        "commit": commit(),
        "environment": {name: value for name, value in sorted(os.environ.items()) if name.startswith(_PREFIXES)},
    }


def warnings() -> list[str]:
    """What in this environment makes the comparison unfair, and how to avoid it."""
    forced = [name for name in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE") if name in os.environ]
    if not forced:
        return []
    settings = " and ".join(f"{name}={os.environ[name]}" for name in forced)
    unset = " ".join(f"-u {name}" for name in forced)
    return [f"{settings}: OpenBLAS may not choose its own kernels, so ratios to NumPy (and to a torch built on it) "
            f"flatter attnc. Fair: env {unset} {os.path.basename(sys.executable)} -m attnc bench"]
