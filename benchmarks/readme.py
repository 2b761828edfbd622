"""Put the measured speed table into README.md, between its two markers."""

import json
import sys
from pathlib import Path

from attnc.bench import cases
from attnc.bench.report import notes, speed_table

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
RESULT = ROOT / "benchmarks" / "results" / "readme.json"
BEGIN, END = "<!-- speed: made by `make bench-readme` -->", "<!-- end of speed -->"


def section(result: dict) -> str:
    """The table of a measurement, with where and how it was made."""
    machine, versions = result["machine"], result["versions"]
    packages = ", ".join(f"{name} {versions[name]}" for name in ("numpy", "torch", "onnxruntime") if name in versions)
    where = f"{machine['cpu']}, instruction set {machine['isa']}, {machine['threads']} threads; {packages}."
    return "\n\n".join([where, speed_table(result), "\n".join(f"- {note}" for note in notes(result))])


def updated(text: str, result: dict) -> str:
    """The README with the table of `result` between the markers."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    if not after:
        raise ValueError(f"README.md lacks the markers {BEGIN} and {END}")
    return f"{before}{BEGIN}\n{section(result)}\n{END}{after}"


def main() -> int:
    result = json.loads(RESULT.read_text(encoding="utf-8"))
    missing = {case.name for case in cases.SETS["full"]} - {case["name"] for case in result["cases"]}
    if missing or not result["passed"]:
        reason = f"no {', '.join(sorted(missing))}" if missing else "not all is right"
        print(f"{RESULT} is not fit to show: {reason}", file=sys.stderr)
        return 1
    README.write_text(updated(README.read_text(encoding="utf-8"), result), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
