"""The parity benchmark: every contender is right or refused, the rounds are paired, the result is whole."""

import importlib
import json
import os
import platform
import re
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import attnc
from attnc import reference
from attnc.bench import Unsupported, cases, machine, parity, report, runner, timing, worker
from attnc.bench.cases import caches
from attnc.bench.cases.attention import MEMORY_BYTES
from attnc.bench.cases.links import Softmax
from attnc.bench.contenders import CONTENDERS, attention
from attnc.bench.report import chain
from attnc.datasets import load
from attnc.testing import Case

TINY = cases.SETS["tiny"]
PEER_CASES = (
    cases.case(2, 3, 7, 7, 16),
    cases.case(1, 2, 9, 9, 16, causal=True),
    cases.case(1, 2, 5, 9, 16, causal=True),                # wider than high: the triangle must be bottom-right
    cases.case(2, (4, 2), 6, 8, 16),
    cases.case(1, 2, 9, 9, 16, scale=0.3),
    cases.case(1, 2, 9, 9, 8, "float64", causal=True),
    cases.case(1, 2, 9, 9, 16, "float16"),
    cases.case(1, 2, 5, 9, 16, causal=True, want=("weights",)),
    cases.drawn("bias", True, cases.case(3, (4, 2), 6, 8, 16)),
    cases.drawn("mask", True, cases.case(2, 2, 6, 8, 16)),
    cases.drawn("relative_bias", True, cases.case(2, 3, 6, 8, 16)),
    cases.drawn("tables", True, cases.case(2, 3, 6, 8, 16)),
    cases.drawn("block_mask", False, cases.case(1, (4, 2), 140, 300, 16)),
)
OTHER_CASES = [each for each in TINY if not isinstance(each, Case)]


def setup_of(name):
    module, _, function = CONTENDERS[name].partition(":")
    return getattr(importlib.import_module(module), function)


def arrays_of(result):
    return result if isinstance(result, (tuple, list)) else (result,)


@pytest.fixture(scope="module")
def worker_of():
    """The process of a contender, as in a run: importing openvino forks, of which one that has imported jax warns."""
    found = {}

    def get(name):
        if name not in found:
            found[name] = runner.Worker(CONTENDERS[name], 1)
        return found[name]

    yield get
    for each in found.values():
        each.close()


@pytest.mark.parametrize("case", PEER_CASES, ids=str)
@pytest.mark.parametrize("name", CONTENDERS)
def test_a_contender_computes_the_case_or_says_why_not(worker_of, name, case):
    if name == "torch-flex" and "block_mask" in case.make(0)[1]:
        pytest.skip("compiles for 20 seconds: test_flex_attention_is_right")
    expected = parity.Expected(case, 0)
    try:
        results, _ = worker_of(name).ask("prepare", case, 0, expected.rows, False)
    except Unsupported as reason:
        assert name not in ("attnc", "twin", "numpy") and str(reason)
        pytest.skip(f"{name}: {reason}")
    error, tolerance = expected.judge(results)
    assert error <= tolerance
    again, _ = worker_of(name).ask("prepare", case, 0, expected.rows, False)
    assert expected.judge(again) == (error, tolerance)


@pytest.mark.parametrize("case", OTHER_CASES, ids=lambda each: each.name)
@pytest.mark.parametrize("name", CONTENDERS)
def test_a_contender_computes_what_is_no_plain_attention_or_says_why_not(worker_of, name, case):
    expected = case.expected(0)
    try:
        results, _ = worker_of(name).ask("prepare", case, 0, expected.rows, False)
    except Unsupported as reason:
        assert name != "attnc"
        pytest.skip(f"{name}: {reason}")
    error, tolerance = expected.judge(results)
    assert error <= tolerance
    results[0] = results[0] + 1
    assert expected.judge(results)[0] > tolerance


@pytest.mark.more
def test_flex_attention_is_right(worker_of):
    pytest.importorskip("torch")
    [case] = [each for each in PEER_CASES if each.name.endswith("block_mask shared")]
    expected = parity.Expected(case, 0)
    results, _ = worker_of("torch-flex").ask("prepare", case, 0, expected.rows, False)
    error, tolerance = expected.judge(results)
    assert error <= tolerance


def test_a_drawn_mask_over_blocks_shows_each_row_as_many():
    case = cases.drawn("block_mask", False, cases.case(1, 2, 1000, 2600, 8))
    blocks, rows, keys = case.make(0)[1]["block_mask"]
    assert blocks.shape == (1, 1, 8, 21) and (rows, keys) == (128, 128)
    assert (blocks.sum(-1) == 2).all() and blocks[0, 0].diagonal().all()
    assert case.flops == cases.case(1, 2, 1000, 2600, 8).flops * 2 // 21
    assert not np.array_equal(blocks, case.make(1)[1]["block_mask"][0])


@pytest.mark.parametrize("what", cases.ADDED)
def test_what_other_libraries_add_or_mask_is_what_the_option_means(what):
    case = cases.drawn(what, True, cases.case(1, 2, 5, 9, 8))
    (query, key, value), options = case.make(0)
    given = cases.added(case, options)
    name = "mask" if given.dtype == bool else "bias"
    np.testing.assert_array_equal(attnc.attention(query, key, value, **options),
                                  attnc.attention(query, key, value, **{name: given}))
    rows = np.array([1, 4])
    np.testing.assert_array_equal(cases.added(case, options, rows), given[..., rows, :])
    assert cases.added(case, {}) is None


def test_the_files_of_a_mapped_case_go_with_their_arrays():
    [case] = [each for each in TINY if each.name.endswith("from a file")]
    arrays, _ = case.make(0)
    files = [Path(array.filename) for array in arrays[1:]]
    assert sum(file.stat().st_size for file in files) == case.bytes
    np.testing.assert_array_equal(caches.again(arrays[1]), arrays[1])
    del arrays
    assert not any(file.exists() for file in files)


@pytest.mark.parametrize("name", ["twin", "numpy", "torch"])
def test_a_contender_takes_bfloat16(name):
    pytest.importorskip("ml_dtypes")
    case = cases.case(1, 2, 9, 9, 16, "bfloat16")
    try:
        call = setup_of(name)(case, *case.make(0), 1)
    except Unsupported as reason:
        pytest.skip(f"{name}: {reason}")
    error, tolerance = parity.Expected(case, 0).judge(arrays_of(call()))
    assert error <= tolerance


def test_the_composite_in_slices_is_the_same(monkeypatch):
    case = cases.case(2, (4, 2), 6, 8, 16, want=("weights",))
    whole = setup_of("numpy")(case, *case.make(0), 1)()
    monkeypatch.setattr(attention, "COMPOSITE_BYTES", 1)
    for part, full in zip(setup_of("numpy")(case, *case.make(0), 1)(), whole, strict=True):
        np.testing.assert_allclose(part, full, rtol=0, atol=1e-6)


def test_an_option_a_peer_lacks_is_refused():
    case = cases.case(1, 1, 4, 4, 8, softcap=5.0)
    with pytest.raises(Unsupported, match="softcap"):
        setup_of("numpy")(case, *case.make(0), 1)


def test_rows_of_a_large_case_are_sampled_from_first_to_last(monkeypatch):
    case = cases.case(1, (4, 2), 50, 60, 8, causal=True, want=("weights",))
    monkeypatch.setitem(parity.VERIFIED_SCORES, "narrower", 4 * 60 * 7)
    expected = parity.Expected(case, 3)
    assert len(expected.rows) == 7 and expected.rows[0] == 0 and expected.rows[-1] == 49
    arrays, options = case.make(3)
    whole = reference.attention(*arrays, **options)
    error, tolerance = expected.judge([whole.output[..., expected.rows, :], whole.weights[..., expected.rows, :]])
    assert error <= tolerance
    error, tolerance = expected.judge([whole.output[..., expected.rows, :], whole.weights[..., expected.rows - 1, :]])
    assert error > tolerance


# Contenders of the tests, found by their module and name in a worker's process.

def setup_right(case, arrays, options, threads):
    return setup_of("numpy")(case, arrays, options, threads)


def setup_slow(case, arrays, options, threads):
    call = setup_right(case, arrays, options, threads)

    def slow():
        time.sleep(0.03)
        return call()

    return slow


def setup_wrong(case, arrays, options, threads):
    right = setup_right(case, arrays, options, threads)

    def call():
        results = [np.array(each) for each in arrays_of(right())]
        results[-1][..., -1, -1] += 0.001
        return results if len(results) > 1 else results[0]

    return call


def setup_dying(case, arrays, options, threads):
    if case.kv_heads == TINY[0].kv_heads and case.q_heads == TINY[0].q_heads:
        sys.exit(3)
    return setup_right(case, arrays, options, threads)


def setup_talking(case, arrays, options, threads):
    print("hello on standard output, threads", os.environ["OMP_NUM_THREADS"])
    return setup_right(case, arrays, options, threads)


def setup_broken(case, arrays, options, threads):
    raise RuntimeError("out of order")


@pytest.fixture
def contenders(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    return {"attnc": CONTENDERS["attnc"]} | {
        name: f"{Path(__file__).stem}:setup_{name}" for name in ("slow", "wrong", "dying", "talking", "broken")}


def test_a_run_is_whole_and_refuses_what_is_wrong(contenders):
    told = []
    result = runner.run(TINY[:1], contenders=contenders, threads=1, rounds=3, progress=told.append)
    assert len(told) == runner.steps(TINY[:1], contenders, 3)
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    assert_schema(result)
    assert result["passed"] and result["machine"]["threads"] == 1
    entries = result["cases"][0]["contenders"]
    assert entries["wrong"]["failed"].startswith("wrong: error") and entries["wrong"]["error"] > 0
    assert "status 3" in entries["dying"]["failed"]
    assert entries["broken"]["failed"] == "RuntimeError: out of order"
    assert not any("ratio" in entries[name] or "seconds" in entries[name] for name in ("wrong", "dying", "broken"))
    assert "ratio" in entries["talking"]
    assert entries["slow"]["seconds"] >= 0.03       # it sleeps that long
    text = report.speed_table(result) + "\n" + "\n".join(report.notes(result))
    assert "slow / attnc" in text and "wrong / attnc" not in text and "No wrong: wrong: error" in text


def test_a_contender_that_died_is_back_for_the_next_case(contenders):
    chosen = {name: contenders[name] for name in ("attnc", "dying")}
    first, second = runner.run(TINY[:2], contenders=chosen, threads=1, rounds=2)["cases"]
    assert "status 3" in first["contenders"]["dying"]["failed"]
    assert second["contenders"]["dying"]["ratio"]["median"] > 0


def test_a_matrix_beyond_memory_is_refused(monkeypatch):
    pytest.importorskip("onnxruntime")
    monkeypatch.setattr(machine, "available_memory", lambda: 1000)
    with pytest.raises(Unsupported, match="GB"):
        setup_of("onnxruntime")(TINY[0], *TINY[0].make(0), 1)


def test_attnc_itself_is_verified_first(contenders):
    lying = {"attnc": contenders["wrong"], "right": contenders["talking"]}
    result = runner.run(TINY[:1], contenders=lying, threads=1, rounds=2)
    assert not result["passed"]
    case = result["cases"][0]
    assert case["failed"].startswith("wrong: error") and "share" not in case
    assert "ratio" not in case["contenders"]["right"]
    assert "FAIL: wrong" in report.speed_table(result)


def test_every_limit_is_measured():
    result = runner.run(TINY, contenders={"attnc": CONTENDERS["attnc"]}, threads=2, rounds=2)
    assert_schema(result)
    names = [case["limit"]["name"] if "limit" in case else None for case in result["cases"]]
    assert names == ["fma", "read", "weights", "read", "fma", "plain", "plain", "fma", None, None, "fma", "fma",
                     "weights", "read", "fma", "file", "fma", "read", "fma"]
    assert all(case["limit"]["busy"] > 0 for case in result["cases"] if "limit" in case)
    assert {"plain", "fill", "fill_again"} <= result["cases"][2]["limit"].keys()
    assert "1.3 x filling" in "\n".join(report.notes(result))


def assert_schema(result):
    assert set(result) == {"format", "machine", "versions", "blas", "commit", "environment", "settings", "cases",
                           "passed"}
    assert result["format"] == runner.FORMAT
    assert {"cpu", "make", "cores", "platform", "isa", "threads"} == set(result["machine"])
    assert {"python", "numpy", "attnc"} <= set(result["versions"])
    attention = {"batch", "q_heads", "kv_heads", "q_len", "kv_len", "head_dim", "value_dim", "options", "flops",
                 "bytes"}
    softmax, weighted = {"shape", "axis", "bytes"}, {"q_heads", "kv_heads", "q_len", "kv_len", "value_dim", "flops"}
    gradients = attention - {"options", "bytes"}
    dense = {"batch", "q_heads", "kv_heads", "q_len", "kv_len", "head_dim"}
    held = dense | {"value_dim"}
    packed = {"q_heads", "kv_heads", "head_dim", "causal", "flops", "q_lengths", "kv_lengths"}
    always = {"name", "regime", "dtype", "contenders", "disturbed", "commit"}
    for case in result["cases"]:
        assert set(case) - always - {"limit", "share"} in (attention, softmax, weighted, gradients, dense, held, packed,
                                                          packed | {"page"}, held | {"named", "flops"})
        assert always <= set(case) and ("limit" in case) == ("share" in case)
        if "limit" in case:
            assert {"name", "unit", "work", "rate", "spread"} <= set(case["limit"]) and case["limit"]["rate"] > 0
        spreads = [entry["ratio"] for entry in case["contenders"].values() if "ratio" in entry]
        for spread in (*spreads, *(case[part] for part in ("share",) if part in case)):
            assert 0 < spread["min"] <= spread["median"] <= spread["max"]


def test_every_case_belongs_to_a_regime_and_copies_fill_the_caches():
    for name, found in cases.REGIMES.items():
        assert {cases.regime(case.name) for case in found} == {name}
    few = cases.case(1, 2, 1, 20000, 16)
    arrays, _ = few.make(0)
    made = cases.copies(few, arrays)
    assert made[0] is arrays and len(made) * few.bytes > MEMORY_BYTES
    assert all(np.array_equal(x, y) and not np.shares_memory(x, y) for x, y in zip(made[0], made[-1], strict=True))
    for case in (cases.case(1, 2, 1, 9, 8), cases.case(1, 2, 100, 20000, 16), Softmax((9, 9))):
        assert len(cases.copies(case, case.make(0)[0])) == 1


def test_the_peak_of_memory_is_that_of_the_call():
    with machine.PeakMemory() as peak:
        array = np.ones(1 << 24)
        del array
    if peak.bytes is None:
        pytest.skip("this system does not tell")
    assert 0.9 * (1 << 27) < peak.bytes < 2 * (1 << 27)


def test_one_case_per_name_and_every_set_can_be_chosen_from():
    for name, chosen in cases.SETS.items():
        assert len({case.name for case in chosen}) == len(chosen), name
        assert cases.select(name) == chosen
    assert [case.name for case in cases.select("full", "f64*causal")] == [
        "f64 1,12,1024,1024,64 causal", "f64 1,32/8,2048,2048,128 causal", "f64 1,8,8192,8192,128 causal"]
    assert cases.select("full", "decode") == cases.REGIMES["decode"]
    with pytest.raises(ValueError, match="no case of the tiny set matches 'nothing'"):
        cases.select("tiny", "nothing")


class Clock:
    """Time as the tests want it to pass, in place of the module `time`."""

    def __init__(self, working=0.0):
        self.now, self.own, self.working = 0.0, 0.0, working

    def sleep(self, seconds):
        self.now += seconds
        self.own += seconds if self.now < self.working else 0.0

    def perf_counter(self):
        return self.now

    def process_time(self):
        return self.own


@pytest.mark.parametrize(("seconds", "repeat"), [(1e-6, 20000), (0.001, 20), (0.011, 2), (0.03, 1), (3.0, 1)])
def test_samples_repeat_a_fast_call_and_not_a_slow_one(seconds, repeat, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(timing, "time", clock)
    assert timing.calibrate(lambda: clock.sleep(seconds), target=0.02) == repeat
    assert timing.seconds_per_call(lambda: clock.sleep(seconds), 3) == pytest.approx(seconds)


def test_rest_is_waited_for_but_not_for_ever(monkeypatch):
    clock = Clock(working=0.03)
    monkeypatch.setattr(timing, "time", clock)
    assert timing.settle() and 0.03 <= clock.now < 0.04
    clock = Clock(working=1000.0)
    monkeypatch.setattr(timing, "time", clock)
    assert not timing.settle() and clock.now < 1.0


def test_a_disturbed_sample_is_taken_again(monkeypatch):
    busy = iter([0.5, 0.99, 0.95, 0.96])
    limit = SimpleNamespace(probe=lambda: {"rate": 1.0, "busy": next(busy)})
    contender = worker.Contender(CONTENDERS["numpy"], 1)
    contender.call, contender.repeat, contender.seconds, contender.limit = (lambda: None), 1, 1.0, limit
    sample = contender.sample()
    assert not sample["disturbed"] and sample["before"]["busy"] == 0.95
    limit.probe = lambda: {"rate": 1.0, "busy": 0.5}
    assert contender.sample()["disturbed"]


def test_the_chain_shows_the_weight_the_data_set_names():
    data = load("turkish")
    text, norm = chain.chain(data)
    (line,) = [line for line in text.splitlines() if data.tokens[data.columns[0]] in line]
    raw, scaled, weight = (float(cell) for cell in line.split("|")[2:5])
    head = (data.query[data.head], data.key[data.head], data.value[data.head])
    expected = reference.attention_weights(*head[:2])[data.rows[0], data.columns[0]]
    assert weight == pytest.approx(float(expected), abs=1e-4)
    assert scaled == pytest.approx(raw / data.query.shape[-1] ** 0.5, abs=1e-3)
    assert norm == pytest.approx(float(np.linalg.norm(reference.attention(*head)[data.rows[0]])), rel=1e-5)
    assert data.sentence in chain.describe(data)


def test_a_forced_blas_kernel_is_told(monkeypatch):
    monkeypatch.delenv("OPENBLAS_CORETYPE", raising=False)
    monkeypatch.delenv("OPENBLAS_L2_SIZE", raising=False)
    assert machine.warnings() == []
    monkeypatch.setenv("OPENBLAS_CORETYPE", "Haswell")
    assert "OPENBLAS_CORETYPE=Haswell" in machine.warnings()[0]
    assert machine.describe(2)["environment"]["OPENBLAS_CORETYPE"] == "Haswell"
    assert machine.describe(2)["machine"]["isa"] == attnc.isa()


def test_a_contender_that_cannot_start_leaves_no_process(monkeypatch):
    started, environment = [], dict(os.environ)
    make = runner._SPAWN.Process
    monkeypatch.setattr(runner._SPAWN, "Process", lambda **options: started.append(make(**options)) or started[-1],
                        raising=False)
    with pytest.raises(runner.Failed, match="no_such_module"):
        runner.run(TINY[:1], contenders={"attnc": "no_such_module:setup"}, threads=1)
    assert len(started) == 1 and not started[0].is_alive() and started[0].exitcode is not None
    assert os.environ == environment


def test_a_contender_prints_to_standard_error_and_has_its_threads(contenders, capfd, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    runner.run(TINY[:1], contenders={name: contenders[name] for name in ("attnc", "talking")}, threads=1, rounds=1)
    said = capfd.readouterr()
    assert "hello on standard output" in said.err and "threads 1" in said.err and not said.out
    assert os.environ["OMP_NUM_THREADS"] == "5"


@pytest.mark.parametrize(("info", "make"), [
    ({"vendor_id_raw": "AuthenticAMD", "family": 26, "model": 2, "brand_raw": "AMD EPYC"}, "amd-family26"),
    ({"vendor_id_raw": "GenuineIntel", "family": 6, "model": 207, "brand_raw": "INTEL(R) XEON(R)"},
     "intel-family6-model207"),
    ({"brand_raw": "Neoverse-N1 (r3p1)"}, "neoverse-n1-r3p1"),
    ({"vendor_id_raw": "AuthenticAMD", "brand_raw": "AMD EPYC"}, "amd-epyc"),
])
def test_the_make_of_the_processor_is_the_name_of_a_file(info, make, monkeypatch):
    monkeypatch.setattr(machine, "_cpu_info", lambda: info)
    assert machine.make() == machine.describe(2)["machine"]["make"] == make
    monkeypatch.setattr(machine, "_cpu_info", dict)         # without py-cpuinfo
    assert re.fullmatch("[a-z0-9]+(-[a-z0-9]+)*", machine.make())


def test_the_name_of_the_processor(monkeypatch):
    machine._cpu_info.cache_clear()
    known = SimpleNamespace(get_cpu_info=lambda: {"brand_raw": "a processor"})
    unknown = SimpleNamespace(get_cpu_info=dict)
    for module, wanted in ((known, "a processor"), (unknown, platform.processor() or platform.machine()),
                           (None, platform.processor() or platform.machine())):
        monkeypatch.setitem(sys.modules, "cpuinfo", module)
        assert machine.cpu_name() == wanted
        machine._cpu_info.cache_clear()


def test_a_contender_that_is_broken_says_so():
    assert str(Unsupported.import_of(ModuleNotFoundError("No module named 'torch'"))) == "not installed"
    assert str(Unsupported.import_of(ImportError("libgomp.so.1"))) == "cannot be imported: libgomp.so.1"
