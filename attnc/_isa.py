"""Choose the kernels of the best instruction set that this processor and its operating system offer."""

import os
from importlib import import_module
from types import ModuleType


def _compiled(name: str) -> ModuleType:
    """A compiled module; ImportError that says whether it is missing, or why it cannot be loaded."""
    try:
        return import_module(f"attnc.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"attnc.{name}":
            raise
        raise ImportError(
            "attnc: the compiled kernels are missing. In a source tree, build them with 'pip install -e .' "
            "(a C compiler is needed; 'make run' does all of it); otherwise install attnc from a wheel."
        ) from error
    except ImportError as error:        # an interpreter that may not share it, a library that it lacks
        raise ImportError(f"attnc: the compiled module attnc.{name} cannot be loaded: {error}") from error


_cpu = _compiled("_cpu")

ORDER = ("avx512bf16", "avx512", "avx2", "neon", "base")  # best first
MODULE_OF = {"avx512bf16": "avx512"}    # sets that differ in two instructions share a module


def available() -> tuple[str, ...]:
    """Instruction sets that are built and can run here, best first."""
    return tuple(name for name in ORDER if name in _cpu.BUILT and _cpu.supports(name))


def load(name: str) -> ModuleType:
    """The kernel module of an instruction set; ImportError if it cannot run here."""
    if name not in available():
        why = "was left out when attnc was built" if name in _cpu.LEFT_OUT else "cannot run here"
        raise ImportError(f"attnc: instruction set {name!r} {why}; available: {', '.join(available())}")
    return _compiled(f"_kernels_{MODULE_OF.get(name, name)}")


def use(name: str) -> None:
    """Choose the kernels of an instruction set, for the whole process."""
    global kernels, _chosen
    module = load(name)
    module.multiply_pairs(name == "avx512bf16")
    kernels, _chosen = module, name


def isa() -> str:
    """The instruction set in use: ``"avx512bf16"``, ``"avx512"``, ``"avx2"``, ``"neon"`` or ``"base"``.

    The environment variable ``ATTNC_ISA``, read when attnc is imported, chooses another one of those available.

    Examples
    --------
    >>> isa() in available()
    True
    """
    return _chosen


kernels: ModuleType
_chosen: str
use(os.environ.get("ATTNC_ISA") or available()[0])
