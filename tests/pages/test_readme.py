"""README.md, the pages on options and on speed: examples run, tables are whole, speeds are those that were measured."""

import copy
import doctest
import importlib.util
import inspect
import json
import os
import re
import textwrap
from pathlib import Path

import attnc

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
SPEED = (ROOT / "docs" / "speed.md").read_text(encoding="utf-8")
OPTIONS = (ROOT / "docs" / "guide" / "options.md").read_text(encoding="utf-8")
CHAIN = (ROOT / "docs" / "guide" / "chain.md").read_text(encoding="utf-8")
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
BLOCK = re.compile(r"^( *)```python\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)


def failures(text):
    """What the examples of a text give that they do not show; later ones see the names of earlier ones."""
    names, found = {}, []
    runner = doctest.DocTestRunner(verbose=False)
    for number, block in enumerate(BLOCK.finditer(text)):
        line = text.count("\n", 0, block.start()) + 1
        examples = doctest.DocTestParser().get_doctest(textwrap.dedent(block[2]), names, f"block {number}", None, line)
        runner.run(examples, out=found.append, clear_globs=False)
        names = examples.globs
    return found


def benchmark_script():
    spec = importlib.util.spec_from_file_location("readme_table", ROOT / "benchmarks" / "readme.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_examples_give_what_they_show():
    assert len(BLOCK.findall(TEXT)) == TEXT.count("```python") >= 2
    assert not failures(TEXT), "".join(failures(TEXT))


def test_an_example_that_shows_something_else_is_found():
    assert failures(CHAIN.replace("▁kitabı    17.541   3.101  0.3530", "▁kitabı    17.541   3.101  0.3531"))
    assert failures("```python\n>>> 1 / 0\n```\n")


def test_the_table_of_options_has_every_option():
    [table] = re.findall(r"^\| option .*?\n((?:\|.*\n)+)", OPTIONS, re.MULTILINE)
    named = [name for row in table.splitlines() for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    functions = attnc.attention, attnc.attention_scores, attnc.attention_weights
    options = {p.name for f in functions for p in inspect.signature(f).parameters.values() if p.default is not p.empty}
    assert sorted(named) == sorted(options)


def test_the_files_that_it_links_exist():
    links = [link for link in re.findall(r"\]\(([^)]+)\)", TEXT) if "://" not in link]
    assert len(links) >= 5
    assert [link for link in links if not (ROOT / link.partition("#")[0]).exists()] == []


def test_the_speed_tables_are_the_committed_measurement():
    script = benchmark_script()
    results = script.measurements(script.RESULTS)
    assert results and all(result["passed"] for result in results)
    assert [f"{result['machine']['make']}.json" for result in results] == sorted(os.listdir(script.RESULTS))
    cases = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    pages = (TEXT, script.front), (SPEED, script.short), (cases, script.whole)
    for text, section in pages:
        assert script.updated(text, section(results)) == text, "python benchmarks/readme.py writes it again"
    for case in results[0]["cases"]:
        case["share"] = {"median": 0.001, "min": 0.001} if "share" in case else None
    results[0]["cases"] = [{name: value for name, value in case.items() if value} for case in results[0]["cases"]]
    for text, section in pages:
        assert script.updated(text, section(results)) != text


def quiet(found):
    """A measurement as if the probes of the limits had agreed."""
    for case in found["cases"]:
        if "limit" in case:
            case["limit"]["spread"] = 0.01
    return found


def test_the_speed_tables_name_the_worst_and_the_best_machine():
    script = benchmark_script()
    one = quiet(script.measurements(script.RESULTS)[0])
    other = copy.deepcopy(one)
    other["machine"]["make"] = "intel-family6-model207"
    for case in other["cases"]:
        if "share" in case:
            case["limit"]["spread"], case["share"] = 0.2, {"median": 0.001, "min": 0.001}
        for entry in case["contenders"].values():
            if "ratio" in entry:
                entry["ratio"] = {"median": 0.77, "min": 0.7}
    make = one["machine"]["make"]
    for section in (script.front, script.short):
        text = section([one, other])
        assert "| 0% (intel-family6-model207) to " in text and f"({make})" in text
        assert text.count("Noisy: the limit's probes spread by 20%.") == 1
    assert "0.77 " in script.short([one, other]) and ", intel-family6-model207)" in script.short([one, other])
    assert "0.8 (" in script.front([one, other]) and ", intel-family6-model207) to " in script.front([one, other])
    assert "fma, noisy" in script.whole([one, other]) and "fma, noisy" not in script.whole([one])


def test_a_machine_on_which_few_cases_were_measured_joins_the_tables():
    script = benchmark_script()
    one = script.measurements(script.RESULTS)[0]
    other = copy.deepcopy(one)
    other["machine"]["make"] = "intel-family6-model207"
    other["cases"] = [case for case in other["cases"] if case["name"] == "f32 1,32/8,1,8192,128"]
    other["cases"][0]["share"], other["cases"][0]["commit"] = {"median": 0.001, "min": 0.001}, "abcdef0123456789"
    short = script.short([one, other])
    [line] = [line for line in short.splitlines() if line.startswith("| decode")]
    assert "| 0% (intel-family6-model207) to " in line and "| 12 " in line
    assert short.count("commit abcdef0123.") == 1
    assert "(intel-family6-model207)" in script.front([one, other])
    assert script.whole([one, other]).count("Not measured: ") == 1 + bool(script.lacking(one))
    assert script.whole([one, other]).endswith(script.whole([other]))


def test_the_table_of_statistics_is_the_committed_measurement():
    script = benchmark_script()
    result = json.loads(script.WEIGHTS.read_text(encoding="utf-8"))
    assert result["passed"]
    assert script.updated(SPEED, script.weights(result), script.STATISTICS) == SPEED, "benchmarks/readme.py writes it"
    result["cases"][0]["statistics"]["topk"]["attnc"]["of_plain"]["median"] += 1
    assert script.updated(SPEED, script.weights(result), script.STATISTICS) != SPEED


def test_the_table_of_many_cores_is_the_committed_prediction():
    script = benchmark_script()
    result = json.loads(script.CORES.read_text(encoding="utf-8"))
    predicted, known = [case["name"] for case in result["cases"]], [case.name for case in script.cases.SETS["full"]]
    assert len(predicted) >= 80 and [name for name in known if name in predicted] == predicted
    assert script.updated(SPEED, script.many_cores(result), script.MANY_CORES) == SPEED, "readme.py writes it"
    result["cases"][0]["threads"]["64"]["share"] /= 2
    assert script.updated(SPEED, script.many_cores(result), script.MANY_CORES) != SPEED
    found = [{"name": "a", "memory": False, "off": {"1": 0.01, "2": -0.04}},
             {"name": "b", "memory": True, "off": {"1": 0.01, "2": -0.2}}]
    text = script.many_cores(result | {"validation": {"make": "amd-family26", "cases": found}})
    assert "1 of 2 cases are within 5 % on both, of the 1 that memory binds 0." in text
    assert "b (+1% on 1, -20% on 2)" in text


def test_the_script_refuses_what_is_wrong_and_names_the_cases_that_are_missing(tmp_path, monkeypatch, capsys):
    script = benchmark_script()
    [result] = script.measurements(script.RESULTS)[:1]
    assert "f32 1,8,8192,8192,128 causal;" not in script.whole([result]).partition("| case")[0]
    result["cases"] = [case for case in result["cases"] if "8192" not in case["name"]]
    said = script.whole([result]).partition("| case")[0]
    assert "Not measured: " in said and "f32 1,8,8192,8192,128 causal;" in said
    monkeypatch.setattr(script, "README", tmp_path / "README.md")
    monkeypatch.setattr(script, "PAGE", tmp_path / "PAGE.md")
    monkeypatch.setattr(script, "SPEED_PAGE", tmp_path / "speed.md")
    monkeypatch.setattr(script, "RESULTS", tmp_path)
    (tmp_path / "result.json").write_text(json.dumps(result | {"passed": False}), encoding="utf-8")
    script.README.write_text(TEXT, encoding="utf-8")
    script.SPEED_PAGE.write_text(SPEED, encoding="utf-8")
    assert script.main() == 1
    assert "not all is right" in capsys.readouterr().err
    assert script.README.read_text(encoding="utf-8") == TEXT and not script.PAGE.exists()


def test_the_command_it_shows_for_the_table_is_the_one_that_makes_it():
    [shown] = re.findall(r"^    python -m (attnc bench --json .*)$", SPEED, re.MULTILINE)
    assert shown.replace("benchmarks/results", "$(RESULTS)") in MAKEFILE
    assert "RESULTS := benchmarks/results\n" in MAKEFILE
    assert "bench --peers \"\" --compare $(RESULTS)/cases\n" in MAKEFILE


def test_every_make_command_that_it_names_exists():
    targets = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE))
    named = set(re.findall(r"(?:^    |`|: )make ([a-z-]+)", TEXT, re.MULTILINE))
    assert {"run", "test", "docs", "wheel", "bench", "bench-readme"} <= named <= targets


def test_it_is_short():
    assert len(TEXT.splitlines()) <= 150


def test_make_says_what_it_does_before_what_is_silent():
    """Each recipe with a command that shows nothing for long begins that part with a line for the reader."""
    slow = re.compile(r"\$\(PIP\) install|-m (venv|ruff|mypy|mypy\.stubtest|build|auditwheel)( |$)")
    said, checked = False, 0
    for line in MAKEFILE.splitlines():
        said &= line.startswith("\t")       # of this recipe
        if line.startswith("\t$(SAY) "):
            said = True
        elif line.startswith("\t") and slow.search(line):
            assert said, line
            said, checked = False, checked + 1
    assert checked >= 9
