"""What all tests share: the instruction sets that can run here, the seed, and Python processes of their own."""

import contextlib
import os
import random
import subprocess
import sys

import numpy as np
import pytest
from checking import SEED, kernels

import attnc
from attnc import _cpu, _isa, reference


def pytest_report_header():
    """Which instruction sets these tests exercise, which they cannot, and the seed that makes them happen again."""
    runs = _isa.available()
    cannot = [name for name in _cpu.BUILT if name not in runs]
    left_out = [f"{name} (left out by the compiler)" for name in _cpu.LEFT_OUT]
    return [f"instruction sets exercised: {', '.join(runs)}; NOT exercised: {', '.join(cannot + left_out) or 'none'}",
            f"ATTNC_SEED={SEED}, NumPy {np.__version__}"]


def pytest_addoption(parser):
    parser.addoption("--cases", type=int, default=0, metavar="N",
                     help="of each test function, on each instruction set, only N cases, drawn by ATTNC_SEED")


def pytest_collection_modifyitems(config, items):
    """Mark what runs once for each instruction set; those of a case run in turn, to share checking.expected."""
    order, alike = {}, {}
    for item in items:
        if {"isa", "api"} & set(item.fixturenames):
            item.add_marker("kernels")
        if item.get_closest_marker("peers"):
            item.fixturenames.insert(0, "one_thread")
        isa = item.callspec.params.get("isa") if hasattr(item, "callspec") else None
        case = item.nodeid.replace(f"[{isa}-", "[").replace(f"[{isa}]", "")
        order[item] = order.setdefault(case, len(order))
        alike.setdefault((item.nodeid.partition("[")[0], isa), []).append(item)
    items.sort(key=order.get)
    if count := config.getoption("cases"):
        some = {case for (name, _), cases in alike.items()      # the same cases on every set
                for case in random.Random(f"{SEED} {name}").sample(cases, min(count, len(cases)))}
        config.hook.pytest_deselected(items=[item for item in items if item not in some])
        items[:] = [item for item in items if item in some]
    elif "avx512bf16" in _isa.available():      # one module: avx512 differs in dot products of bfloat16
        for item in [item for (_, isa), cases in alike.items() if isa == "avx512" for item in cases[1:]]:
            if "bfloat16" not in item.nodeid:
                item.add_marker("more")


@pytest.fixture(params=_isa.available())
def isa(request):
    """Run the test once with the kernels of each instruction set that can run here."""
    with kernels(request.param):
        yield request.param


@pytest.fixture(params=[*_isa.available(), "reference"])
def api(request):
    """attnc with the kernels of one instruction set, or attnc.reference: the same functions, the same contract."""
    with kernels(request.param) if request.param in _isa.available() else contextlib.nullcontext():
        yield reference if request.param == "reference" else attnc


@pytest.fixture(scope="session")
def one_thread():
    """torch on one thread, for peers: on busy processors its threads take ten times as long for inputs this small."""
    torch = sys.modules.get("torch")
    if torch is None:
        yield
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def seed():
    """Where random inputs start: the environment variable ATTNC_SEED, or 0."""
    return SEED


@pytest.fixture
def python():
    """Run Python code in a process of its own, and return what it printed."""

    def run(code, *, timeout=300, **environment):     # an emulated processor takes ten times as long
        clean = {name: value for name, value in os.environ.items()
                 if not name.startswith(("ATTNC_", "OMP_")) or name == "OMP_TOOL_LIBRARIES"}      # of variants.py
        done = subprocess.run([sys.executable, "-W", "error", "-c", code], env={**clean, **environment},
                              capture_output=True, text=True, timeout=timeout)
        assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout.strip()

    return run
