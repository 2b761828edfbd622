"""The measurement of threads, callers and growth: it runs, and its table says what was found."""

import json

import pytest
from measure import scaling


def test_a_run(tmp_path, capsys):
    file = tmp_path / "result.json"
    assert scaling.main(["--tiny", "--rounds", "1", "--threads", "1", "--json", str(file)]) == 0
    result = json.loads(file.read_text())
    threads, callers, short, long = result["cases"]
    assert threads["of_probe"]["median"] > 0 and len(threads["share"]) == 2
    assert callers["throughput"]["median"] > 0
    assert short["share"]["median"] > 0 and long["inputs"] == 2 * short["inputs"]
    threads |= {"share": [0.5, 0.25], "of_probe": {"median": 0.5, "min": 0.4}}
    assert "50% " in scaling.table(result) and "0.50 (0.40)" in scaling.table(result)
    assert "throughput of 8 callers" in capsys.readouterr().out


def test_every_call_is_made(monkeypatch):
    made = []
    monkeypatch.setattr(scaling.attnc, "attention", lambda *arrays, **options: made.append(arrays))
    case = next(each for each in scaling.TINY if each.kind == "callers")
    scaling._together(case, 1, 2)
    assert len(made) == scaling.CALLERS * case.calls * (1 + 2 + 2)


@pytest.mark.parametrize("kind", ["threads", "callers", "growth"])
def test_every_kind_is_measured(kind):
    assert any(each.kind == kind for each in scaling.CASES) and any(each.kind == kind for each in scaling.TINY)
