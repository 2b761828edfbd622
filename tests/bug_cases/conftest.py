"""The implementations that every bug case runs on: each instruction set that can run here, and the reference."""

import os
from pathlib import Path

import pytest

import attnc
from attnc import _isa, reference


@pytest.fixture(params=[*_isa.available(), "reference"])
def api(request, monkeypatch):
    """attnc with the kernels of one instruction set, or attnc.reference: the same functions, the same contract."""
    if request.param == "reference":
        return reference
    monkeypatch.setattr(_isa, "kernels", _isa.load(request.param))
    return attnc


@pytest.fixture
def alone(python):
    """Run code that may crash in a process of its own, with one instruction set and the helpers of this folder."""

    def run(code, isa, **more):
        path = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
        return python(code, ATTNC_ISA=isa, PYTHONPATH=path, **more)

    return run
