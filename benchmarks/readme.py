"""Put the measured tables into README.md (four cases), docs/speed.md (regimes) and benchmarks/README.md (all cases)."""

import json
import sys
from pathlib import Path

from attnc.bench import cases, statistics
from attnc.bench.report import detail_table, notes, regime_table, speed_table, table

ROOT = Path(__file__).resolve().parent.parent
README, SPEED_PAGE, PAGE = ROOT / "README.md", ROOT / "docs" / "speed.md", ROOT / "benchmarks" / "README.md"
RESULT = ROOT / "benchmarks" / "results" / "readme.json"
WEIGHTS = ROOT / "benchmarks" / "results" / "weights.json"
SPEED = "<!-- speed: made by `make bench-readme` -->", "<!-- end of speed -->"
STATISTICS = "<!-- statistics: made by benchmarks/readme.py -->", "<!-- end of statistics -->"
FRONT = {       # of the README: what a case is, in words
    "f32 1,32/8,2048,2048,128 causal": "float32, 2,048 tokens, 32 heads on 8 of 128, causal",
    "bf16 1,32/8,2048,2048,128 causal": "bfloat16, the same",
    "f32 1,32/8,1,8192,128": "one new token on 8,192 keys, the same heads",
    "f32 1,8,8192,8192,64 causal window 127,0": "float32, 8,192 tokens, 8 heads of 64, a window of 128",
}
PACKAGES = ("numpy", "torch", "onnxruntime", "openvino", "jax", "scipy")


def where(result: dict) -> str:
    """Machine, versions and commit of a measurement."""
    machine, versions = result["machine"], result["versions"]
    packages = ", ".join(f"{name} {versions[name]}" for name in PACKAGES if name in versions)
    return (f"{machine['cpu']}, instruction set {machine['isa']}, {machine['threads']} threads; {packages}; commit "
            f"{(result['commit'] or 'unknown')[:10]}.")


def front(result: dict) -> str:
    """The table of the README."""
    measured, rows = {case["name"]: case for case in result["cases"]}, []
    for name, words in FRONT.items():
        case = measured[name]
        ratio, other = min((entry["ratio"]["median"], other) for other, entry in case["contenders"].items()
                           if "ratio" in entry and "failed" not in entry)
        rows.append([words, f"{case['share']['median']:.0%} of {case['limit']['name']}", f"{ratio:.1f} ({other})"])
    return "\n\n".join([where(result), table(["case", "share of limit", "fastest other / attnc"], rows)])


def short(result: dict) -> str:
    """The table of the page on speed."""
    return "\n\n".join([where(result), regime_table(result)])


def whole(result: dict) -> str:
    """The tables of the page of all cases."""
    listed = "\n".join(f"- {note}" for note in notes(result))
    return "\n\n".join([where(result), speed_table(result), listed, detail_table(result)])


def weights(result: dict) -> str:
    """The table of the statistics of weights."""
    return "\n\n".join([where(result), statistics.table(result)])


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
    SPEED_PAGE.write_text(text, encoding="utf-8")
    result = json.loads(RESULT.read_text(encoding="utf-8"))
    missing = {case.name for case in cases.SETS["full"]} - {case["name"] for case in result["cases"]}
    if missing or not result["passed"]:
        reason = f"no {', '.join(sorted(missing))}" if missing else "not all is right"
        print(f"{RESULT} is not fit to show: {reason}", file=sys.stderr)
        return 1
    for page, section in ((README, front), (SPEED_PAGE, short), (PAGE, whole)):
        page.write_text(updated(page.read_text(encoding="utf-8"), section(result)), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
