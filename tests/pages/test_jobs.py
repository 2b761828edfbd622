"""The examples of docs/gallery/ that run real models: each in a process of its own, as a reader runs it."""

from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.peers

GALLERY = Path(__file__).resolve().parents[2] / "docs" / "gallery"
JOBS = {    # and the packages without which it cannot run
    "chemistry": ("torch", "transformers", "rxnmapper"),
    "long_document": ("torch",),
    "proteins": ("torch", "transformers", "sapiens"),
    "reading": ("onnx", "onnxruntime", "rapidocr"),
    "speech": ("torch", "numba", "tiktoken", "whisper"),
    "vision": ("torch", "transformers", "sklearn"),
}


@pytest.mark.parametrize("name", JOBS)
def test_a_job_does_what_it_says(name, python):
    missing = [package for package in JOBS[name] if find_spec(package) is None]
    if missing:
        pytest.skip(f"the package {missing[0]} is not installed")
    done = python(f"import runpy, torch; torch.set_num_threads(1); runpy.run_path({str(GALLERY / f'{name}.py')!r}); "
                  "from matplotlib import pyplot; print(len(pyplot.get_fignums()))",
                  MPLBACKEND="agg", HF_HUB_OFFLINE="1")
    assert int(done.splitlines()[-1]) >= 1
