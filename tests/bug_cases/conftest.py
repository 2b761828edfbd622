"""What bug cases need beside the fixtures of all tests: code that may crash, in a process of its own."""

import os
from pathlib import Path

import pytest


@pytest.fixture
def alone(python):
    """Run code that may crash in a process of its own, with one instruction set and the helpers of this folder."""

    def run(code, isa, **more):
        path = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
        return python(code, ATTNC_ISA=isa, PYTHONPATH=path, **more)

    return run
