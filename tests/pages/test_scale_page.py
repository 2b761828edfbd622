"""docs/scale.md: its tables are those of the scripts, its formula that of the simulation, and its examples run."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.peers
ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")


def script(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def test_the_tables_are_those_of_the_scripts():
    assert script("scale_page").updated(TEXT) == TEXT, "python benchmarks/scale_page.py writes them again"


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 16, 256])
def test_the_formula_is_the_simulation(ranks, causal):
    model = script("ring_model")
    for length in (1 << 12, 1 << 16, 1 << 20):
        work = model.Work(length, 32, 8, 128, 7e12, causal, zigzag=causal)
        for network in model.NETWORKS:
            simulated = model.simulate(work, ranks, network)
            assert model.formula(work, ranks, network) == pytest.approx(simulated, rel=0.02)


def test_in_one_piece_each_a_causal_ring_takes_as_long_as_its_last_rank():
    model = script("ring_model")
    work = model.Work(1 << 20, 32, 8, 128, 7e12, causal=True)
    seconds = model.simulate(work, 16, model.NETWORKS[-1])
    assert seconds == pytest.approx(work.alone() * (16 - 0.5) / 128, rel=0.01)


@pytest.mark.parametrize("package", ["dask", "mpi4py"])
def test_the_examples_run(package):
    pytest.importorskip(package)
    [block] = [block for block in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL) if package in block]
    found = {}
    exec(compile(block, "docs/scale.md", "exec"), found)
    if package == "dask":
        assert float(found["mass"].sum()) == pytest.approx(8 * 4096, rel=1e-5)      # each row gives 1
    else:
        assert found["grads"].query.shape == found["query"].shape == found["result"].output.shape
