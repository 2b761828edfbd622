"""Reports of a run: tables, noise, regressions, and measurements in pieces."""

import pytest

from attnc.bench import cases, report, runner

TINY = cases.SETS["tiny"]


def test_a_line_for_each_regime_holds_its_worst_case():
    def entry(share, ratio, **extra):
        return {"name": f"case {ratio}", "regime": "short", "disturbed": 0, "limit": {"name": "fma"},
                "share": {"median": share, "min": share},
                "contenders": {"attnc": {}, "torch": {"ratio": {"median": ratio, "min": ratio}}}, **extra}

    result = {"machine": {"make": "amd-family26"}, "settings": {"rounds": 9},
              "cases": [entry(0.8, 1.5), entry(0.6, 0.9), entry(0.7, 3.0, disturbed=9)]}
    table = report.regime_table([result])
    assert "amd-family26" not in table and "3, 1 not measured" in table and "60% to 80% of fma" in table
    assert "0.90 torch (case 0.9)" in table and "1.50 torch (case 1.5)" in table and "3.00" not in table
    other = result | {"machine": {"make": "intel-family6-model207"}, "cases": [entry(0.7, 0.95), entry(0.9, 1.2)]}
    table = report.regime_table([result, other])
    assert "60% (amd-family26) to 90% (intel-family6-model207) of fma" in table
    assert "0.90 torch (case 0.9, amd-family26)" in table and "1.50 torch (case 1.5, amd-family26)" in table
    assert report.regime_table([other]).count("case 1.2") == 1
    detail = result | {"cases": [entry(0.8, 1.5) | {"contenders": {
        "attnc": {"error": 1e-7, "tolerance": 2e-7, "memory": 2_000_000}}}]}
    assert "1.0e-07 of 2.0e-07" in report.detail_table(detail)


def result_with(share, threads=2, isa="base", disturbed=0, **limit):
    return {"machine": {"isa": isa, "threads": threads}, "settings": {"rounds": 9}, "blas": {}, "cases": [
        {"name": "a", "share": {"median": share, "min": share}, "disturbed": disturbed,
         "limit": {"name": "fma", **limit}, "contenders": {"attnc": {}}}]}


def test_a_noisy_run_says_so_first_and_in_the_table():
    quiet, noisy = result_with(0.8, spread=0.09), result_with(0.8, spread=0.23)
    assert report.noise(noisy) == 0.23 and report.noise(result_with(0.8)) == 0
    assert "80%) fma, noisy |" in report.speed_table(noisy)
    assert report.notes(noisy)[0].startswith("Noisy run: the limit's probes spread by 23% in half of the cases")
    for calm in (quiet, result_with(0.8)):          # older results have no spread
        assert "noisy" not in report.speed_table(calm) and "Noisy" not in " ".join(report.notes(calm))
    mostly = quiet | {"cases": [*quiet["cases"], *quiet["cases"], *noisy["cases"]]}
    assert "noisy" in report.speed_table(mostly) and "Noisy" not in " ".join(report.notes(mostly))


def test_the_spread_of_the_probes_is_recorded():
    def sample(rate):
        return {"seconds": 1.0, "quiet": True, "disturbed": False, "before": {"rate": rate}, "after": {"rate": rate}}

    limit = {"name": "fma", "unit": "FLOP/s", "work": 1.0}
    for rates, wanted in (([2.0] * 9, 0), ([2.0, 1.0, 2.0, 1.0, 2.0], 0.5), ([2.0] * 39 + [1.0], 0)):
        samples = {"attnc": {turn: sample(rate) for turn, rate in enumerate(rates)}}
        found = runner._summary(TINY[0], {"attnc": {}}, samples, limit)
        assert found["limit"]["spread"] == pytest.approx(wanted), "one probe of many that fails is no noise"


def test_a_share_that_fell_is_a_regression():
    assert report.regressions(result_with(0.80), result_with(0.71)) == []
    assert report.regressions(result_with(0.80), result_with(0.69)) == ["a: share fell from 80% to 69%"]
    assert report.regressions(result_with(0.80), result_with(0.80) | {"cases": []}) == ["a: was 80%, now missing"]
    failed = result_with(0.80) | {"cases": [{"name": "a", "failed": "wrong"}]}
    assert report.regressions(result_with(0.80), failed) == ["a: was 80%, now failed"]
    assert "cannot be compared" in report.regressions(result_with(0.80), result_with(0.80, disturbed=5))[0]
    assert report.regressions(result_with(0.80), result_with(0.80, disturbed=4)) == []
    assert "| disturbed " in report.speed_table(result_with(388.67, disturbed=5))
    assert "| 80% (min 80%) fma " in report.speed_table(result_with(0.80, disturbed=4))
    report.comparable(result_with(0.8), "base", 2)
    for other in (("base", 1), ("avx2", 2)):
        with pytest.raises(ValueError, match="cannot compare"):
            report.comparable(result_with(0.8), *other)


def test_cases_are_added_to_a_measurement_of_the_same_machine():
    def result(commit, *names, **parts):
        return {"format": 2, "machine": {"isa": "base"}, "versions": {}, "settings": {"rounds": 9}, "commit": commit,
                "blas": {commit: []}, "passed": True, **parts,
                "cases": [{"name": name, "commit": commit} for name in names]}

    old = result("first", "a", "b", "gone")
    del old["cases"][0]["commit"]       # as older files
    both = report.merged(old, result("second", "c", "b"), ["a", "b", "c", "d"])
    assert [(case["name"], case["commit"]) for case in both["cases"]] == [("a", "first"), ("b", "second"),
                                                                         ("c", "second")]
    assert both["blas"] == {"first": [], "second": []} and both["passed"]
    failed = result("second", "c") | {"cases": [{"name": "c", "failed": "wrong"}]}
    assert not report.merged(old, failed, ["a", "c"])["passed"]
    for part in ("machine", "versions", "settings", "format"):
        with pytest.raises(ValueError, match=f"another {part}"):
            report.merged(old, result("second", "c", **{part: {"other": 1}}), ["c"])
