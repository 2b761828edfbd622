"""The command line: what it prints, its exit status, and that a wrong function does not pass."""

import json
import os
import re
import signal
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

import attnc
from attnc.__main__ import _parser, main
from attnc.bench import machine, parity, report, runner


def test_info_as_text_and_as_json(capsys):
    assert main(["info"]) == 0
    assert attnc.isa() in capsys.readouterr().out
    assert main(["info", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["isa"] == attnc.isa()


def test_check_passes_and_names_every_function(capsys):
    assert main(["check"]) == 0
    text = capsys.readouterr().out
    assert not [name for name in set(attnc.__all__) - parity.WITHOUT_NUMBERS if f"| {name}" not in text]
    assert "pass" in text and "FAIL" not in text


def test_check_reports_each_case_that_is_done():
    told = []
    parity.check(told.append)
    assert len(told) == len(set(told)) == parity.steps() > 4


def test_check_covers_every_public_name_and_case():
    lines = parity.check()
    assert {line.function.partition(" ")[0].partition(".")[0] for line in lines} == (
        set(attnc.__all__) - parity.WITHOUT_NUMBERS)
    of_float32 = {line.case for line in lines if line.function == "AttentionWeights entropy"}
    assert {"turkish", "coreference", "f32 every option", "f16"} <= of_float32
    assert {line.case for line in lines} - of_float32 == {"f64 mask, bias, Dv 24"}


def wrong_result(right):
    """A function whose result, or one array of it, is wrong in its last element."""

    def wrong(*arguments, **options):
        result = right(*arguments, **options)
        if isinstance(result, tuple):
            return (spoilt(result[0]), *result[1:])
        if isinstance(result, np.ndarray):
            return spoilt(result)
        name = next(iter(vars(result)))
        return SimpleNamespace(**{**vars(result), name: spoilt(getattr(result, name))})

    return wrong


def spoilt(array):
    array = np.array(array, float if array.dtype.kind == "i" else None)
    array[(-1,) * array.ndim] += 2.0**-4 * (1 + np.abs(array).max())
    return array


METHODS = ["entropy", "max", "mean_position", "mean_distance", "lost_mass", "row_mass", "key_mass", "key_max", "map",
           "head_mean", "dense", "__matmul__"]


@pytest.mark.parametrize(("owner", "function"), [
    *((attnc, name) for name in ("attention_varlen", "attention_backward", "softmax_backward", "log_softmax_backward",
                                 "merge_states", "rollout", "alibi_slopes", "align")),
    (attnc.KVCache, "attend"), (attnc.AttentionState, "result"), *((attnc.AttentionWeights, name) for name in METHODS)])
def test_check_fails_when_what_is_beside_the_chain_is_wrong(owner, function, monkeypatch):
    monkeypatch.setattr(owner, function, wrong_result(getattr(owner, function)))
    failed = {line.function for line in parity.check() if not line.passed}
    name = function if owner is attnc else owner.__name__
    assert failed and all(found.startswith(name) for found in failed - {"rollout"})


@pytest.mark.parametrize("function", ["attention_scores", "softmax", "log_softmax", "attention_weights",
                                      "weighted_sum"])
def test_check_fails_when_one_element_of_a_function_is_wrong(function, monkeypatch, capsys):
    right = getattr(attnc, function)

    def wrong(*arguments, **options):
        result = np.array(right(*arguments, **options))
        result[..., -1, -1] *= 1 + 64 * 2.0**-10
        return result

    monkeypatch.setattr(attnc, function, wrong)
    assert main(["check"]) == 1
    text = capsys.readouterr().out
    assert "FAIL" in text
    assert all(line.startswith(f"| {function} ") for line in text.splitlines() if line.endswith("FAIL |"))


def test_check_fails_when_the_fused_function_gives_nan(monkeypatch, capsys):
    right = attnc.attention

    def wrong(*arguments, want=(), **options):
        result = right(*arguments, want=want, **options)
        if not want:
            result[..., 0, 0] = np.nan
        return result

    monkeypatch.setattr(attnc, "attention", wrong)
    assert main(["check"]) == 1
    assert "inf" in capsys.readouterr().out


def test_bench_measures_nothing_when_parity_fails(monkeypatch, capsys):
    right = attnc.softmax
    monkeypatch.setattr(attnc, "softmax", lambda x, axis=-1: right(x, axis) * 1.01)
    assert main(["bench", "--tiny", "--rounds", "2"]) == 1
    text = capsys.readouterr().out
    assert "FAIL" in text and "share of limit" not in text


def test_bench_writes_json_and_compares_with_it(tmp_path, capsys, monkeypatch):
    for module in (report.tables, report.comparison):       # however busy this machine is
        monkeypatch.setattr(module, "disturbed", lambda case, result: False)
    file = tmp_path / "result.json"
    arguments = ["bench", "--tiny", "--cases", "1,4/2,9", "--rounds", "2", "--threads", "1", "--peers", "numpy"]
    assert main([*arguments, "--json", str(file)]) == 0
    text = capsys.readouterr().out
    assert "share of limit" in text and "numpy / attnc" in text and "twin / attnc" not in text
    result = json.loads(file.read_text(encoding="utf-8"))
    name = "f32 1,4/2,9,9,8 causal"
    assert [case["name"] for case in result["cases"]] == [name, f"{name} backward"]
    result["cases"][0]["share"]["median"] += 1e6
    file.write_text(json.dumps(result), encoding="utf-8")
    assert main([*arguments, "--compare", str(file)]) == 1
    assert f"FAIL {name}: share fell" in capsys.readouterr().out
    result["cases"][0]["share"]["median"] = 0.0
    file.write_text(json.dumps(result), encoding="utf-8")
    assert main([*arguments, "--compare", str(file)]) == 0
    assert main([*arguments, "--threads", "2", "--compare", str(file)]) == 2
    assert "the number of threads was 1 and is 2" in capsys.readouterr().err
    result["machine"]["isa"] = "\x1b[2J\u202e"       # text of a file never acts on the terminal
    file.write_text(json.dumps(result), encoding="utf-8")
    assert main([*arguments, "--compare", str(file)]) == 2
    assert r"the instruction set was \x1b[2J\u202e and is" in capsys.readouterr().err


def test_cases_are_added_to_the_file_one_by_one(tmp_path, monkeypatch):
    file, written = tmp_path / "result.json", []
    whole = attnc.__main__.write_text
    monkeypatch.setattr(attnc.__main__, "write_text", lambda *arguments: (written.append(arguments), whole(*arguments)))
    arguments = ["bench", "--tiny", "--rounds", "1", "--threads", "1", "--peers", "", "--json", str(file)]

    def names():
        return [case["name"] for case in json.loads(file.read_text(encoding="utf-8"))["cases"]]

    for add in (["--add"], []):         # nothing to add to; nothing asked to be kept
        assert main([*arguments, *add, "--cases", "softmax"]) == 0
        assert names() == ["f32 softmax 6,50", "f64 softmax 40,7 axis 0"] and len(written) == 2
        written.clear()
    assert main([*arguments, "--add", "--cases", "f64"]) == 0
    assert names() == ["f64 2,2,5,7,8", "f32 softmax 6,50", "f64 softmax 40,7 axis 0"]
    assert main([*arguments, "--add", "--cases", "f64", "--threads", "2"]) == 2
    assert main([*arguments[:-2], "--add"]) == 2, "--add without --json"
    assert names() == ["f64 2,2,5,7,8", "f32 softmax 6,50", "f64 softmax 40,7 axis 0"]


def test_a_folder_holds_a_result_for_each_make_of_processor(tmp_path, capsys, monkeypatch):
    for module in (report.tables, report.comparison):
        monkeypatch.setattr(module, "disturbed", lambda case, result: False)
    (tmp_path / "other-family1.json").write_text("{}", encoding="utf-8")
    monkeypatch.setattr(machine, "make", lambda: "this-family2")
    arguments = ["bench", "--tiny", "--cases", "f32 1,4/2,9,9,8 causal", "--rounds", "1", "--threads", "1",
                 "--peers", ""]
    assert main([*arguments, "--compare", str(tmp_path)]) == 2
    said = capsys.readouterr()
    assert "no result of this make of processor, this-family2 (there are: other-family1)" in said.err
    assert f"bench --json {tmp_path}" in said.err and said.out == ""
    assert main([*arguments, "--json", str(tmp_path)]) == 0
    assert sorted(file.name for file in tmp_path.iterdir()) == ["other-family1.json", "this-family2.json"]
    assert (tmp_path / "other-family1.json").read_text(encoding="utf-8") == "{}"
    result = json.loads((tmp_path / "this-family2.json").read_text(encoding="utf-8"))
    assert result["machine"]["make"] == "this-family2"
    result["cases"][0]["share"]["median"] += 1e6
    (tmp_path / "this-family2.json").write_text(json.dumps(result), encoding="utf-8")
    assert main([*arguments, "--compare", str(tmp_path)]) == 1
    assert "share fell" in capsys.readouterr().out


@pytest.mark.parametrize(("arguments", "message"), [
    (["bench", "--cases", "nothing"], "no case of the full set"),
    (["bench", "--peers", "numpi"], "no peer named numpi"),
    (["bench", "--compare", "missing.json"], "missing.json"),
])
def test_a_bad_request_is_status_2_and_says_why(arguments, message, capsys):
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("content", [
    b"{}", b"[]", b"{", b"\xff\xfe", b'{"cases": 3}', b'{"cases": [{}]}', b'{"cases": [], "machine": {}}',
    b'{"cases": [{"name": "a", "share": 1}], "machine": {"isa": "base", "threads": 1}, "settings": {"rounds": 1}}',
])
def test_a_file_to_compare_with_that_is_no_result(content, tmp_path, capsys):
    file = tmp_path / "other.json"
    file.write_bytes(content)
    assert main(["bench", "--tiny", "--compare", str(file)]) == 2
    found = capsys.readouterr()
    assert "other.json is no result of bench --json" in found.err and found.out == ""


@pytest.mark.parametrize(("arguments", "rounds"), [([], 9), (["--quick"], 3), (["--quick", "--rounds", "2"], 2)])
def test_a_quick_look_takes_fewer_rounds(arguments, rounds, monkeypatch, capsys):
    asked = {}

    def run(chosen, **options):
        asked.update(options)
        raise runner.Failed("nothing is measured")

    monkeypatch.setattr(runner, "run", run)
    monkeypatch.setattr(parity, "check", lambda progress: [])
    assert main(["bench", *arguments]) == 1 and asked["rounds"] == rounds
    assert ("twin" in asked["contenders"]) == ("--quick" not in arguments)
    assert "nothing is measured" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["bench", "--rounds", "0"], ["bench", "--threads", "-1"], ["fly"]])
def test_a_wrong_command_line_is_status_2(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2


def test_another_instruction_set_takes_another_process(capfd):
    available = [name for name in attnc.show_config()["available"] if name != attnc.isa()]
    if available:
        assert main(["check", "--isa", available[0]]) == 0
        assert f"instruction set {available[0]}," in capfd.readouterr().out


def test_an_instruction_set_that_is_not_there(capfd):
    for command in ("check", "bench"):
        assert main([command, "--isa", "abacus"]) == 2
        out, err = capfd.readouterr()
        assert out == "" and err.startswith("instruction set 'abacus' cannot run here; there are ") and "base" in err


def test_no_command_shows_the_help(capsys):
    assert main([]) == 0
    text = capsys.readouterr().out
    assert text.startswith("usage: python -m attnc")
    assert all(f"    {name} " in text for name in ("info", "check", "bench", "view"))
    shown = re.findall(r"^  python -m attnc (\w+)((?: [\w.-]+)*)  ", text, re.MULTILINE)     # an example a command
    assert [name for name, _ in shown] == ["info", "check", "bench", "view"]
    for name, options in shown:
        _parser().parse_args([name, *options.split()])


def test_version(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0 and capsys.readouterr().out == f"attnc {attnc.__version__}\n"


def started(*python, **options):
    return subprocess.Popen([sys.executable, "-W", "error", *python], text=True, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, **options)


@pytest.mark.parametrize("arguments", [["check"], ["info"], ["--help"], ["--version"], []], ids=" ".join)
def test_a_reader_that_goes_away(arguments):
    """As with ``| head``: no traceback, whether the output was written before or not."""
    with started("-m", "attnc", *arguments) as process:
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(60) in ((0, 141) if arguments in ([], ["--help"]) else (141,))      # argparse ignores it


@pytest.mark.parametrize(("closed", "arguments", "status"), [
    (">&-", "info", 0), (">&-", "view missing.npz", 2), ("2>&-", "view missing.npz", 2), (">&- 2>&-", "info", 0),
    (">&- 2>&-", "bench --tiny --cases nothing", 2)])
def test_closed_output_is_no_traceback(closed, arguments, status):
    command = f'"{sys.executable}" -m attnc {arguments} {closed}'
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == status and "Traceback" not in done.stderr


@pytest.mark.parametrize("arguments", [["check"], ["bench", "--tiny", "--peers", ""]], ids=" ".join)
@pytest.mark.parametrize("where", [[], ["--isa", "base"]], ids=["here", "child"])
def test_ctrl_c_is_no_traceback(arguments, where):
    code = f"""
import signal, sys, warnings
warnings.simplefilter("ignore", ResourceWarning)             # of a file that an interrupted import had open
signal.signal(signal.SIGINT, signal.default_int_handler)     # a shell's background jobs inherit it ignored
from attnc.__main__ import main
sys.exit(main({[*arguments, *where]!r}))
"""
    with started("-c", code, start_new_session=True, env={**os.environ, "PYTHONUNBUFFERED": "1"}) as process:
        process.stdout.readline()
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(60) == 130 and process.stderr.read() == "stopped\n"


def test_ctrl_c_silences_what_it_left_half_made(capsys, monkeypatch):
    """As a ZipFile of an import that was interrupted: its ``__del__`` misses attributes."""
    class Half:
        def __init__(self):
            raise KeyboardInterrupt

        def __del__(self):
            raise AttributeError("_writing")

    monkeypatch.setattr("attnc.__main__._check", lambda _: Half())
    monkeypatch.setattr(sys, "unraisablehook", sys.__unraisablehook__)     # pytest's own keeps them for later
    assert main(["check"]) == 130
    assert capsys.readouterr().err == "stopped\n"
