"""Put the model's table and the measured one into docs/scale.md."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import ring_model

ROOT = Path(__file__).resolve().parent.parent
PAGE, RESULT = ROOT / "docs" / "scale.md", ROOT / "benchmarks" / "results" / "ring.json"
MARKS = {"model": ("<!-- model: made by benchmarks/ring_model.py -->", "<!-- end of model -->"),
         "ring": ("<!-- ring: from benchmarks/results/ring.json -->", "<!-- end of ring -->")}


def measured() -> str:
    """The table of what was measured."""
    lines = ["| length | heads | head_dim | keys seen | efficiency | messages | overlap |", "|---" * 7 + "|"]
    for case in json.loads(RESULT.read_text(encoding="utf-8")):
        kind = "causal, zigzag" if case["causal"] else "full"
        lines.append(f"| {case['length']:,} | {case['heads']} on {case['kv_heads']} | {case['dim']} | {kind} | "
                     f"{case['efficiency']:.0%} | {case['messages']:.1%} | {case['overlap']:.0%} |")
    return "\n".join(lines)


def updated(text: str) -> str:
    """The page with both tables."""
    for name, table in (("model", ring_model.table()), ("ring", measured())):
        begin, end = MARKS[name]
        before, _, rest = text.partition(begin)
        text = f"{before}{begin}\n{table}\n{end}{rest.partition(end)[2]}"
    return text


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
