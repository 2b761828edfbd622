"""The Keras layers, on each backend that is installed, in a process of its own."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = [pytest.mark.more, pytest.mark.skipif(find_spec("keras") is None, reason="keras is not installed")]


@pytest.mark.parametrize("backend", ["torch", "jax", "numpy"])
def test_layers_are_those_of_keras(backend):
    pytest.importorskip(backend)
    done = subprocess.run([sys.executable, str(Path(__file__).with_name("keras_layers.py"))], capture_output=True,
                          text=True, timeout=300, env=os.environ | {"KERAS_BACKEND": backend})
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip().endswith("all right")
