"""attnc inside other libraries; each module imports its library, and attnc itself imports none."""

from typing import TYPE_CHECKING

_MODULES = ("dask", "jax", "keras", "mpi", "onnx", "torch", "transformers")

if not TYPE_CHECKING:       # a type checker would take any name for one of these
    def __getattr__(name: str):
        if name in _MODULES:        # imports the library on first access
            from importlib import import_module

            return import_module(f".{name}", __name__)
        raise AttributeError(f"module 'attnc.integrations' has no attribute {name!r}")
