"""The model of many cores: the tasks that the kernels record, their makespan by hand, memory, the page."""

import numpy as np
import pytest
from checking import inputs
from test_benchmarks import script

import attnc
from attnc import _isa
from attnc.bench.cases import case, select
from attnc.bench.cases.gradients import Gradients
from attnc.bench.cases.links import Softmax, WeightedSum

model = script("many_cores")


def trace_of(*loops, serial=0.0, static=False):
    return model.Trace([np.array(loop, float) for loop in loops], serial, static)


def test_tasks_go_to_the_next_free_thread():
    assert model.makespan(trace_of([3, 1, 1, 1]), 1) == 6
    two = model.makespan(trace_of([3, 1, 1, 1]), 2)
    assert two == pytest.approx(3 + model.LOOP_SECONDS)
    assert model.makespan(trace_of([1, 1, 1, 3]), 2) == pytest.approx(4, abs=1e-4), "all wait for the last one"
    assert model.makespan(trace_of([1, 1, 1, 3], static=True), 2) == pytest.approx(4, abs=1e-4)
    assert model.makespan(trace_of([3, 1, 1, 1], static=True), 2) == pytest.approx(4, abs=1e-4)
    assert model.makespan(trace_of([1, 1], [2], serial=5), 8) == pytest.approx(8, abs=1e-4), "loops have a barrier"
    assert model.makespan(trace_of([1, 1], [2]), 2, slower=1.5) == pytest.approx(3.5, abs=1e-4), "one is not slower"


def test_the_share_is_that_of_equal_tasks_on_all_threads(monkeypatch):
    monkeypatch.setattr(model, "LOOP_SECONDS", 0)
    plain, place = case(1, 8, 64, 64, 64), model.Machine(1e9)
    one = trace_of([8.0])
    for tasks, threads, share in (([1.0] * 8, 8, 1), ([1.0] * 8, 16, 1 / 2), ([1.0] * 9, 8, 1 / 2),
                                  ([2.0] * 8, 8, 1 / 2)):
        found = model.predicted(plain, one, trace_of(tasks), threads, place)
        assert found["share"] == pytest.approx(share), (tasks, threads)


def test_memory_is_shared_and_lies_on_one_socket_unless_it_is_interleaved(monkeypatch):
    monkeypatch.setattr(model, "LOOP_SECONDS", 0)
    place, spread = model.Machine(10e9), model.Machine(10e9, interleaved=True)
    assert place.bandwidth(1) == 10e9 and place.bandwidth(16) == 160e9
    assert place.bandwidth(64) == place.bandwidth(128) == model.SOCKET_BANDWIDTH == spread.bandwidth(64)
    assert model.SOCKET_BANDWIDTH < spread.bandwidth(128) <= 2 * model.SOCKET_BANDWIDTH
    decode = case(1, (32, 8), 1, 8192, 128)
    seconds = decode.bytes / 10e9
    found = model.predicted(decode, trace_of([seconds]), trace_of([seconds / 128] * 128), 128, place)
    asked = 128 * 10e9 / model.SOCKET_BANDWIDTH         # of what the socket gives
    assert found["seconds"] == pytest.approx(seconds / 128 * (1 + asked**2)**0.5, rel=1e-6)
    assert 0.9 < found["share"] < 1, "near what memory gives"
    assert model.traffic(case(1, 8, 64, 64, 64)) == model.traffic(Softmax((16, 64))) == (0, 0)
    assert model.traffic(Softmax((32768, 1024))) == (4 * 2**25, 4 * 2**25)
    assert model.traffic(case(1, 16, 4096, 4096, 64, want=("weights",))) == (0, 4 * 16 * 2**24)


def test_tasks_wait_for_each_others_traffic():
    assert model.crowding(1e9, 0, 1.0, 1, 1e9) == 1, "alone, its own waiting is in its time"
    assert model.crowding(1e9, 0, 1.0, 2, 6e9) == pytest.approx((1 + 1 / 9)**0.5)
    assert model.crowding(1e9, 0, 1.0, 100, 1e9) == pytest.approx(100, rel=1e-4), "memory is all"
    assert model.crowding(0, 0, 1.0, 8, 1e9) == 1
    assert model.crowding(0, 1e9, 1.0, 2, 6e9) == 1, "no thread waits for a store"
    assert model.crowding(1e9, 1e9, 1.0, 6, 6e9) == 2, "but it takes bandwidth"


@pytest.mark.parametrize("each", [
    case(1, 4, 200, 200, 16), case(1, (8, 2), 1, 5000, 32), case(16, 4, 32, 32, 32),
    case(1, 2, 100, 300, 16, causal=True), case(1, 2, 100, 300, 16, want=("weights",)),
    Softmax((512, 512)), Softmax((1024, 4096), axis=0),
    WeightedSum(4, 2, 300, 300, 16), Gradients(case(1, 4, 200, 200, 16)),
], ids=lambda each: each.name)
def test_the_tasks_of_a_call_are_timed(each):
    call = model.contender(each)(1)
    one, many = model.traced(call, 1, each), model.traced(call, 16, each)
    for trace in (one, many):
        assert all((loop > 0).all() for loop in trace.loops) and trace.serial >= 0
        assert model.makespan(trace, 1) == pytest.approx(trace.total)
    tasks = [sum(map(len, trace.loops)) for trace in (one, many)]
    assert 1 <= tasks[0] <= tasks[1]
    assert model.makespan(many, 16) < many.total
    assert _isa.kernels.trace(0) == 0, "the hook is gone"


def test_a_traced_call_gives_the_bits_of_any_other(isa):
    arrays = inputs(np.random.default_rng(0), (1,), 4, 2, 150, 300, 32)
    wanted = attnc.attention(*arrays, causal=True)
    records = np.full((2, 2), -1.0)
    _isa.kernels.trace(32, records)
    try:
        got = attnc.attention(*arrays, causal=True, num_threads=1)
    finally:
        n = _isa.kernels.trace(0)
    assert np.array_equal(got, wanted)
    assert n > 2 and (records[:, 0] == 1).all() and (records[:, 1] >= 0).all(), "no more than there is room for"
    assert _isa.kernels.trace(0) == 0


def test_cases_are_simulated_and_validated_one_after_another(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(model, "PROBES", 1)
    file = tmp_path / "out.json"
    names = [each.name for each in select("tiny", "f32 1,2,*,8")][:2]
    for name in reversed(names):
        arguments = ["--set", "tiny", "--cases", name, "--json", str(file)]
        assert model.main(arguments) == 0
        assert model.main([*arguments, "--validate", "--seconds", "0.01"]) == 0
    said = capsys.readouterr().out
    result = model.json.loads(file.read_text(encoding="utf-8"))
    assert [case["name"] for case in result["cases"]] == names
    assert {case["name"] for case in result["validation"]["cases"]} == set(names) and names[0] in said
    assert set(result["cases"][0]["threads"]) == set(map(str, model.THREADS))
    assert f"| {names[0]} |" in model.table(result) and "of 1 cases within 5 %" in said
    assert f"Tasks timed on {model.machine.make()}." in model.table(result)
    assert f"threads of {model.machine.make()}: " in model.validation(result)
    result["validation"]["make"] = "another"
    file.write_text(model.json.dumps(result), encoding="utf-8")
    assert model.main([*arguments, "--validate", "--seconds", "0.01"]) == 0
    again = model.json.loads(file.read_text(encoding="utf-8"))
    assert len(again["validation"]["cases"]) == 1, "of one make of processor"
