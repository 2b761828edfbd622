"""What was measured as a Markdown table, and the comparison of two runs."""

FELL_POINTS = 10    # a share that fell by more than this many points is a regression


def speed_table(result: dict) -> str:
    """The cases with attnc's share of the limit and, for every other contender, its time over attnc's."""
    names = [name for name in _contenders(result) if name != "attnc"]
    header = ["case (B, heads, Nq, Nk, D)", "share of limit", *(f"{name} / attnc" for name in names)]
    rows = []
    for case in result["cases"]:
        if "failed" in case:
            rows.append([case["name"], f"FAIL: {case['failed']}", *("" for _ in names)])
            continue
        limit, share = case["limit"]["name"], case["share"]
        shown, mark = f"{share['median']:.0%} (min {share['min']:.0%}) {limit}", ""
        if _disturbed(case, result):
            shown, mark = "disturbed", "~ "
        rows.append([case["name"], shown, *(_ratio(case["contenders"][name], mark) for name in names)])
    return table(header, rows)


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table whose columns are padded, so that it can be read as plain text too."""
    widths = [max(len(line[column]) for line in (header, *rows)) for column in range(len(header))]

    def line(cells):
        return "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + " |"

    return "\n".join([line(header), "|" + "|".join("-" * (width + 2) for width in widths) + "|", *map(line, rows)])


def notes(result: dict) -> list[str]:
    """How to read the table, why a cell is empty, and what was odd."""
    rounds, threads = result["settings"]["rounds"], result["machine"]["threads"]
    lines = ["Share: attnc's rate over the limit measured directly before and after it. Ratio: paired time of the "
             "other over attnc's; above 1, attnc is faster.",
             f"Medians (minima) of {rounds} rounds, {threads} threads, every contender in a process of its own."]
    if any(case.get("limit", {}).get("name") == "weights" for case in result["cases"]):
        lines.append("Limit \"weights\": 1.1 x the same call without weights + 1.3 x filling a new array of their "
                     "shape; 100% or more is within it.")
    if result["blas"].get("numpy"):
        lines.append(f"BLAS of NumPy: {', '.join(result['blas']['numpy'])}.")
    if any(_disturbed(case, result) for case in result["cases"]):
        lines.append("Disturbed: other processes wanted the processors in half of the rounds or more; ratios marked ~ "
                     "are no measurement.")
    lines += [f"Other processes disturbed {case['disturbed']} of {rounds} rounds of {case['name']}."
              for case in result["cases"] if case.get("disturbed")]
    reasons = {}
    for case in result["cases"]:
        for name, entry in case["contenders"].items():
            reason = entry.get("failed") or entry.get("unsupported")
            if reason and "failed" not in case:
                reasons.setdefault((name, reason), []).append(case["name"])
            if entry.get("restless"):
                lines.append(f"{name} kept the processor busy after {entry['restless']} samples of {case['name']}.")
    for (name, reason), where in reasons.items():
        cases = "every case" if len(where) == len(result["cases"]) else "; ".join(where)
        lines.append(f"No {name}: {reason} ({cases}).")
    return lines


def comparable(old: dict, isa: str, threads: int) -> None:
    """Raise ValueError if `old` ran with another instruction set or thread count, which makes shares incomparable."""
    for what, now in (("isa", isa), ("threads", threads)):
        if old["machine"][what] != now:
            raise ValueError(f"cannot compare: {what} was {old['machine'][what]} and is {now}")


def regressions(old: dict, new: dict) -> list[str]:
    """The cases of `old` whose share fell by more than `FELL_POINTS` points in `new`, or that cannot be compared."""
    found = []
    now = {case["name"]: case for case in new["cases"]}
    for case in old["cases"]:
        if "share" not in case:
            continue
        after = now.get(case["name"])
        if _disturbed(case, old) or (after and _disturbed(after, new)):
            found.append(f"{case['name']}: disturbed by other processes, cannot be compared")
        elif after is None or "share" not in after:
            found.append(f"{case['name']}: was {case['share']['median']:.0%}, now {'failed' if after else 'missing'}")
        elif 100 * (case["share"]["median"] - after["share"]["median"]) > FELL_POINTS:
            found.append(f"{case['name']}: share fell from {case['share']['median']:.0%} to "
                         f"{after['share']['median']:.0%}")
    return found


def _disturbed(case, result) -> bool:
    """Whether other processes took part in so many rounds that the median says nothing."""
    return 2 * case.get("disturbed", 0) >= result["settings"]["rounds"]


def _contenders(result):
    """Every contender that has a ratio somewhere, in their order."""
    seen = {}
    for case in result["cases"]:
        for name, entry in case["contenders"].items():
            seen[name] = seen.get(name, False) or "ratio" in entry
    return [name for name, measured in seen.items() if measured]


def _ratio(entry, mark):
    ratio = entry.get("ratio")
    return f"{mark}{ratio['median']:.2f} ({ratio['min']:.2f})" if ratio and "failed" not in entry else "-"
