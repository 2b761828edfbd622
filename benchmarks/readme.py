"""Put the measured tables into README.md (four cases), docs/speed.md (regimes) and benchmarks/README.md (all cases)."""

import json
import sys
from pathlib import Path

from many_cores import table as many_cores_table
from many_cores import validation
from measure.weights import table as statistics_table

from attnc.bench import cases
from attnc.bench.report import detail_table, noise, notes, regime_table, speed_table, table
from attnc.bench.report.tables import NOISY, fastest_other, share_range

ROOT = Path(__file__).resolve().parent.parent
README, SPEED_PAGE, PAGE = ROOT / "README.md", ROOT / "docs" / "speed.md", ROOT / "benchmarks" / "README.md"
RESULTS = ROOT / "benchmarks" / "results" / "cases"       # a file for each make of processor
CORES = ROOT / "benchmarks" / "results" / "many_cores.json"
WEIGHTS = ROOT / "benchmarks" / "results" / "weights.json"
SPEED = "<!-- speed: made by `make bench-readme` -->", "<!-- end of speed -->"
MANY_CORES = "<!-- many cores: made by benchmarks/readme.py -->", "<!-- end of many cores -->"
STATISTICS = "<!-- statistics: made by benchmarks/readme.py -->", "<!-- end of statistics -->"
FRONT = {       # of the README: what a case is, in words
    "f32 1,32/8,2048,2048,128 causal": "float32, 2,048 tokens, 32 heads on 8 of 128, causal",
    "bf16 1,32/8,2048,2048,128 causal": "bfloat16, the same",
    "f32 1,32/8,1,8192,128": "one new token on 8,192 keys, the same heads",
    "f32 1,8,8192,8192,64 causal window 127,0": "float32, 8,192 tokens, 8 heads of 64, a window of 128",
}
PACKAGES = ("numpy", "torch", "onnxruntime", "openvino", "jax", "scipy", "pywhispercpp")


def where(result: dict) -> str:
    """Machine, versions and commit of a measurement, and whether the machine was busy."""
    machine, versions = result["machine"], result["versions"]
    packages = ", ".join(f"{name} {versions[name]}" for name in PACKAGES if name in versions)
    make = f" ({machine['make']})" if "make" in machine else ""
    commits = ", ".join(dict.fromkeys((case.get("commit", result["commit"]) or "unknown")[:10]
                                      for case in result["cases"]))
    noisy = f" Noisy: the limit's probes spread by {noise(result):.0%}." if noise(result) > NOISY else ""
    return (f"{machine['cpu']}{make}, instruction set {machine['isa']}, {machine['threads']} threads; {packages}; "
            f"commit {commits}.{noisy}")


def measurements(folder: Path) -> list[dict]:
    """The results of all makes of processors, by name."""
    return [json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.glob("*.json"))]


def machines(results: list[dict]) -> str:
    """A line for each measurement."""
    return "\n".join(f"- {where(result)}" for result in results) if len(results) > 1 else where(results[0])


def front(results: list[dict]) -> str:
    """The table of the README: the worst and the best over all makes of processors."""
    rows = []
    for name, words in FRONT.items():
        measured = [(case, result) for result in results for case in result["cases"] if case["name"] == name]
        nearest = [fastest_other(case, result["machine"]["make"]) for case, result in measured]
        ends = [f"{ratio:.1f} ({other}{f', {make}' if len(results) > 1 else ''})"
                for ratio, other, _, make in sorted({min(nearest), max(nearest)})]
        rows.append([words, share_range(measured, results), " to ".join(ends)])
    return "\n\n".join([machines(results), table(["case", "share of limit", "fastest other / attnc"], rows)])


def short(results: list[dict]) -> str:
    """The table of the page on speed: the worst and the best over all makes of processors."""
    return "\n\n".join([machines(results), regime_table(results)])


def whole(results: list[dict]) -> str:
    """The tables of the page of all cases, one machine after another."""
    return "\n\n".join(
        part for result in results
        for part in (where(result), *lacking(result), speed_table(result),
                     "\n".join(f"- {note}" for note in notes(result)), detail_table(result)))


def lacking(result: dict) -> list[str]:
    """A sentence with the cases that were not measured on this machine, if there are any."""
    measured = {case["name"] for case in result["cases"]}
    missing = [case.name for case in cases.SETS["full"] if case.name not in measured]
    return [f"Not measured: {'; '.join(missing)}."] if missing else []


def weights(result: dict) -> str:
    """The table of the statistics of weights."""
    return "\n\n".join([where(result), statistics_table(result)])


def many_cores(result: dict) -> str:
    """The table of what is predicted for many cores, and how the prediction was validated."""
    return "\n\n".join([many_cores_table(result), validation(result)])


def updated(text: str, section: str, markers: tuple = SPEED) -> str:
    """The text with the section between the markers."""
    begin, end = markers
    before, _, rest = text.partition(begin)
    _, _, after = rest.partition(end)
    if not after:
        raise ValueError(f"the page lacks the markers {begin} and {end}")
    return f"{before}{begin}\n{section}\n{end}{after}"


def main() -> int:
    found = json.loads(WEIGHTS.read_text(encoding="utf-8"))
    text = updated(SPEED_PAGE.read_text(encoding="utf-8"), weights(found), STATISTICS)
    text = updated(text, many_cores(json.loads(CORES.read_text(encoding="utf-8"))), MANY_CORES)
    SPEED_PAGE.write_text(text, encoding="utf-8")
    results = measurements(RESULTS)
    for result in results:
        if not result["passed"]:
            print(f"{result['machine']['make']}.json is not fit to show: not all is right", file=sys.stderr)
            return 1
    for page, section in ((README, front), (SPEED_PAGE, short), (PAGE, whole)):
        page.write_text(updated(page.read_text(encoding="utf-8"), section(results)), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
