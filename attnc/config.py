"""What this build of attnc can do and is using."""

from __future__ import annotations

from typing import Any

from . import _cpu, _isa
from .threads import get_num_threads


class Config(dict[str, Any]):
    """The configuration by name; printed one entry a line."""

    def __repr__(self) -> str:
        width = max(map(len, self))
        return "\n".join(f"{name:{width}}  {self._text(value)}" for name, value in self.items())

    @staticmethod
    def _text(value: object) -> str:
        return ", ".join(map(str, value)) or "none" if isinstance(value, (tuple, list)) else str(value)


def version() -> str:
    """The version of the installed distribution; "unknown" if the package is used without being installed."""
    import importlib.metadata  # slow to import, and rarely needed

    try:
        return importlib.metadata.version("attnc")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def show_config() -> Config:
    """Version, instruction sets, threads, OpenMP and compiler.

    Returns
    -------
    dict
        ``version``; ``isa`` in use; ``available`` here, best first; ``built`` into this installation; ``left_out`` by
        the compiler that built it; ``threads`` that a call would use now; ``openmp`` version date (yyyymm), 0 for
        none; ``compiler``. It prints one entry a line.

    Examples
    --------
    >>> show_config()["isa"] in show_config()["available"]
    True
    """
    return Config(
        version=version(), isa=_isa.isa(), available=_isa.available(), built=_cpu.BUILT,
        left_out=_cpu.LEFT_OUT, threads=get_num_threads(), openmp=_isa.kernels.openmp(), compiler=_cpu.COMPILER)
