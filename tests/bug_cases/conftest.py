"""The implementations that every bug case runs on: each instruction set that can run here, and the reference."""

import contextlib
import os
from pathlib import Path

import pytest
from checking import kernels

import attnc
from attnc import _isa, reference


@pytest.fixture(params=[*_isa.available(), "reference"])
def api(request):
    """attnc with the kernels of one instruction set, or attnc.reference: the same functions, the same contract."""
    with kernels(request.param) if request.param in _isa.available() else contextlib.nullcontext():
        yield reference if request.param == "reference" else attnc


@pytest.fixture
def alone(python):
    """Run code that may crash in a process of its own, with one instruction set and the helpers of this folder."""

    def run(code, isa, **more):
        path = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
        return python(code, ATTNC_ISA=isa, PYTHONPATH=path, **more)

    return run
