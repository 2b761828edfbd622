"""The scripts of benchmarks/: what the plots take from a result, and which counts of instructions are refused."""

import importlib.util

import pytest
from build_tree import ROOT


def script(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def result():
    """Two lengths of arithmetic and two of reading, at half of the limit."""
    def case(limit, length, seconds):
        return {"kv_len": length, "flops": 4e9, "bytes": 2e9, "limit": {"name": limit, "rate": 1e10}, "contenders": {
            "attnc": {"seconds": seconds}, "wrong": {"failed": "wrong", "seconds": 1.0}, "other": {"unsupported": ""}}}

    cases = [case("fma", 64, 0.8), case("fma", 128, 0.4), case("read", 64, 0.4), case("read", 256, 0.4)]
    return {"machine": {"cpu": "a processor", "isa": "base", "threads": 2}, "cases": cases}


def test_the_series_are_rates_beside_the_limit():
    plots = script("plots")
    assert plots.series(result(), "fma", "flops") == ([(64, 10.0), (128, 10.0)], {"attnc": [(64, 5.0), (128, 10.0)]})
    assert plots.series(result(), "read", "bytes") == ([(64, 10.0), (256, 10.0)], {"attnc": [(64, 5.0), (256, 5.0)]})


@pytest.mark.parametrize("machines", [1, 2])
def test_the_plot_is_drawn_of_every_machine(machines, tmp_path):
    pyplot = pytest.importorskip("matplotlib.image")
    script("plots").draw([result()] * machines, tmp_path / "out.png")
    assert (tmp_path / "out.png").read_bytes()[:4] == b"\x89PNG"
    assert pyplot.imread(tmp_path / "out.png").shape[0] == pytest.approx(machines * 4.4 * 110, abs=2)


def test_counts_may_move_by_three_percent():
    compare = script("instructions").compare
    assert compare({"a": 1000, "b": 1000}, {"a": 1029, "b": 971}) == []
    assert compare({"a": 1000, "b": 1000}, {"a": 1031, "b": 969}) == [
        "a: 1,000 instructions, now 1,031 (+3.1%)", "b: 1,000 instructions, now 969 (-3.1%)"]
