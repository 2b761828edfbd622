"""The benchmark of statistics of weights: it runs, wrong results are refused, the table says what was measured."""

import json
from dataclasses import replace

import numpy as np
import pytest
from measure import weights

CASE = weights.TINY[0]


@pytest.fixture(scope="module")
def expected():
    return weights._Expected(CASE)


def results(setup):
    """What a contender gives for each statistic."""
    arrays, options = CASE.make(0)
    lines, *found = setup(CASE, arrays, options, 1)()
    assert (lines[0] > 0).all() and lines.shape[1] == len(CASE.asked)
    counts = [2 if name == "topk" else 5 if name == "summary" else 1 for name in CASE.asked]
    assert len(found) == sum(counts)
    ends = np.cumsum(counts)
    return {name: found[end - count:end] for name, count, end in zip(CASE.asked, counts, ends, strict=True)}


@pytest.mark.parametrize("setup", [weights.setup_attnc, weights.setup_numpy])
def test_every_statistic_is_right_and_a_wrong_one_is_found(setup, expected):
    for name, arrays in results(setup).items():
        assert expected.judge(name, arrays) is None
        for at, array in enumerate(arrays):
            wrong = array.copy()
            wrong[0, -1, -1] = wrong[0, -1, -1] + 1 if array.dtype.kind == "f" else (array[0, -1, -1] + 1) % 70
            assert "is wrong" in expected.judge(name, [*arrays[:at], wrong, *arrays[at + 1:]])


@pytest.mark.peers
@pytest.mark.parametrize("setup", [weights.setup_eager, weights.setup_identity])
def test_those_of_torch_are_right(setup, expected):
    pytest.importorskip("torch")
    for name, arrays in results(setup).items():
        assert expected.judge(name, arrays) is None


def test_a_run(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(weights, "PEERS", {"numpy": "numpy"})
    monkeypatch.setattr(weights, "TINY", tuple(replace(case, asked=("topk", "map")) for case in weights.TINY))
    file = tmp_path / "result.json"
    assert weights.main(["--tiny", "--rounds", "1", "--threads", "1", "--json", str(file)]) == 0
    result = json.loads(file.read_text())
    assert result["passed"] and len(result["cases"]) == 2
    for found in result["cases"][0]["statistics"].values():
        assert found["attnc"]["of_plain"]["median"] > 0 and found["numpy"]["ratio"]["min"] > 0
    assert "numpy" not in result["cases"][1]["statistics"]["topk"]
    result["cases"][0]["statistics"]["map"] |= {
        "attnc": {"of_plain": {"median": 1.25}, "memory": 2_000_000},
        "numpy": {"memory": 400_000_000, "ratio": {"median": 7.04}}}
    [line] = [line for line in weights.table(result).splitlines() if line.startswith("| map")]
    assert line.split("|")[2].strip() == "1.25" and "| 2 " in line and "x 7.0, x 200" in line
    assert "x attention, causal" in capsys.readouterr().out


def test_what_is_wrong_is_not_timed(monkeypatch):
    monkeypatch.setattr(weights._Expected, "judge", lambda self, *arguments: "topk is wrong")
    result = weights.measure([replace(CASE, asked=("topk",))], 1, 1)
    assert not result["passed"] and "attnc: topk is wrong" in result["cases"][0]["failed"]
