"""Put the measured tables into README.md (a line a regime or statistic) and benchmarks/README.md (a line a case)."""

import json
import sys
from pathlib import Path

from attnc.bench import cases, statistics
from attnc.bench.report import detail_table, notes, regime_table, speed_table

ROOT = Path(__file__).resolve().parent.parent
README, PAGE = ROOT / "README.md", ROOT / "benchmarks" / "README.md"
RESULT = ROOT / "benchmarks" / "results" / "readme.json"
WEIGHTS = ROOT / "benchmarks" / "results" / "weights.json"
SPEED = "<!-- speed: made by `make bench-readme` -->", "<!-- end of speed -->"
STATISTICS = "<!-- statistics: made by benchmarks/readme.py -->", "<!-- end of statistics -->"
PACKAGES = ("numpy", "torch", "onnxruntime", "openvino", "jax", "scipy")


def where(result: dict) -> str:
    """Machine, versions and commit of a measurement."""
    machine, versions = result["machine"], result["versions"]
    packages = ", ".join(f"{name} {versions[name]}" for name in PACKAGES if name in versions)
    return (f"{machine['cpu']}, instruction set {machine['isa']}, {machine['threads']} threads; {packages}; commit "
            f"{(result['commit'] or 'unknown')[:10]}.")


def short(result: dict) -> str:
    """The table of the README."""
    return "\n\n".join([where(result), regime_table(result)])


def whole(result: dict) -> str:
    """The tables of the page."""
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
    README.write_text(updated(README.read_text(encoding="utf-8"), weights(found), STATISTICS), encoding="utf-8")
    result = json.loads(RESULT.read_text(encoding="utf-8"))
    missing = {case.name for case in cases.SETS["full"]} - {case["name"] for case in result["cases"]}
    if missing or not result["passed"]:
        reason = f"no {', '.join(sorted(missing))}" if missing else "not all is right"
        print(f"{RESULT} is not fit to show: {reason}", file=sys.stderr)
        return 1
    for page, section in ((README, short), (PAGE, whole)):
        page.write_text(updated(page.read_text(encoding="utf-8"), section(result)), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
