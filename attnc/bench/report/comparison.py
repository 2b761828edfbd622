"""Two runs: which shares fell from one to the other, and both as one result."""

import json
from collections.abc import Sequence
from pathlib import Path

from attnc.bench import Json
from attnc.bench.report.tables import disturbed

FELL_POINTS = 10    # a share that fell by more than this many points is a regression


def earlier(file: Path) -> Json:
    """What an earlier run wrote to `file`; ValueError if the file holds anything else."""
    try:
        old: Json = json.loads(file.read_text(encoding="utf-8"))
        regressions(old, old)                       # reads all that a comparison reads
        comparable(old, old["machine"]["isa"], old["machine"]["threads"])
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise ValueError(f"{file} is no result of bench --json: {type(error).__name__}: {error}") from None
    return old


def comparable(old: Json, isa: str, threads: int) -> None:
    """Raise ValueError if `old` ran with another instruction set or thread count, which makes shares incomparable."""
    for what, name, now in (("isa", "the instruction set", isa), ("threads", "the number of threads", threads)):
        if old["machine"][what] != now:
            raise ValueError(f"cannot compare with a measurement of {old['machine'].get('cpu', 'another machine')}: "
                             f"{name} was {old['machine'][what]} and is {now}")


def regressions(old: Json, new: Json) -> list[str]:
    """The cases of `old` whose share fell by more than `FELL_POINTS` points in `new`, or that cannot be compared."""
    found = []
    now = {case["name"]: case for case in new["cases"]}
    for case in old["cases"]:
        if "share" not in case:
            continue
        after = now.get(case["name"])
        if disturbed(case, old) or (after and disturbed(after, new)):
            found.append(f"{case['name']}: disturbed by other processes, cannot be compared")
        elif after is None or "share" not in after:
            found.append(f"{case['name']}: was {case['share']['median']:.0%}, now {'failed' if after else 'missing'}")
        elif 100 * (case["share"]["median"] - after["share"]["median"]) > FELL_POINTS:
            found.append(f"{case['name']}: share fell from {case['share']['median']:.0%} to "
                         f"{after['share']['median']:.0%}")
    return found


def merged(old: Json, new: Json, order: Sequence[str]) -> Json:
    """`new` with the cases of `old` that it has not measured, sorted by the names in `order`; others are dropped.

    ValueError if another processor, other versions or other settings measured them. Each case keeps its commit.
    """
    for part in ("format", "machine", "versions", "settings"):
        if old.get(part) != new[part]:
            raise ValueError(f"cannot add cases to a measurement of another {part}: {old.get(part)}, now {new[part]}")
    known = {case["name"]: {"commit": old.get("commit"), **case} for case in old["cases"]}
    known |= {case["name"]: case for case in new["cases"]}
    chosen = [known[name] for name in order if name in known]
    return new | {"blas": old.get("blas", {}) | new["blas"], "cases": chosen,
                  "passed": all("failed" not in case for case in chosen)}
