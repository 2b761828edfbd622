"""What was measured, as Markdown tables, and how to read them."""

from attnc.bench import Json

LIMITS = {
    "fma": "Limit \"fma\": the peak of multiply-and-adds; for bfloat16 that of its dot products where there are any.",
    "read": "Limit \"read\": the bandwidth of reading memory. Each call takes the next of so many copies of its inputs "
            "that no cache holds them.",
    "weights": "Limit \"weights\": 1.1 x the same call without weights + 1.3 x filling an array of their shape, new "
               "or used again as theirs is; 100% or more is within it.",
    "plain": "Limit \"plain\": 1.15 x the same call without the mask, 1.25 x without the bias; 100% or more is within "
             "it.",
    "stream": "Limit \"stream\": copying the input past the caches, after one more reading where a row is longer than "
              "1 MB.",
}


def speed_table(result: Json) -> str:
    """The cases with attnc's share of the limit and, for every other contender, its time over attnc's."""
    names = [name for name in _contenders(result) if name != "attnc"]
    header = ["case (B, heads, Nq, Nk, D)", "share of limit", *(f"{name} / attnc" for name in names)]
    rows = []
    for case in result["cases"]:
        if "failed" in case:
            rows.append([case["name"], f"FAIL: {case['failed']}", *("" for _ in names)])
            continue
        shown, mark = "-", ""
        if "share" in case:
            limit, share = case["limit"]["name"], case["share"]
            shown = f"{share['median']:.0%} (min {share['min']:.0%}) {limit}"
        if disturbed(case, result):
            shown, mark = "disturbed", "~ "
        rows.append([case["name"], shown, *(_ratio(case["contenders"][name], mark) for name in names)])
    return table(header, rows)


def regime_table(result: Json) -> str:
    """A line for each regime, made of all its cases: the range of shares, and the case where another comes nearest."""
    regimes: dict[str, list[Json]] = {}
    for case in result["cases"]:
        regimes.setdefault(case["regime"], []).append(case)
    rows = []
    for name, found in regimes.items():
        fair = [case for case in found if "failed" not in case and not disturbed(case, result)]
        shares = [case["share"]["median"] for case in fair if "share" in case]
        limits = dict.fromkeys(case["limit"]["name"] for case in fair if "share" in case)
        shown = f"{min(shares):.0%} to {max(shares):.0%} of {', '.join(limits)}" if shares else "-"
        left_out = f", {len(found) - len(fair)} not measured" if len(fair) < len(found) else ""
        nearest = [near for case in fair if (near := _nearest(case))]
        rows.append([name, f"{len(found)}{left_out}", shown if len(shares) != 1 else shown.partition(" to ")[2],
                     *(_shown(each) for each in (min(nearest), max(nearest)))] if nearest else
                    [name, f"{len(found)}{left_out}", shown, "-", "-"])
    return table(["regime", "cases", "share of limit", "fastest other / attnc: worst case", "best case"], rows)


def _nearest(case: Json) -> tuple[float, str, str] | None:
    """The smallest ratio of another contender, its name and the case's."""
    ratios = [(entry["ratio"]["median"], name, case["name"]) for name, entry in case["contenders"].items()
              if "ratio" in entry and "failed" not in entry]
    return min(ratios, default=None)


def _shown(nearest: tuple[float, str, str]) -> str:
    ratio, name, case = nearest
    return f"{ratio:.2f} {name} ({case})"


def detail_table(result: Json) -> str:
    """The largest error of attnc against what is allowed, and how far the memory of a process rises in a first call."""
    names = _contenders(result)
    rows = []
    for case in result["cases"]:
        entries = case["contenders"]
        own = entries.get("attnc", {})
        error = f"{own['error']:.1e} of {own['tolerance']:.1e}" if own.get("error") is not None else "-"
        rows.append([case["name"], error, *(_memory(entries[name]) for name in names)])
    return table(["case", "error of tolerance", *(f"{name}, MB" for name in names)], rows)


def _memory(entry: Json) -> str:
    return f"{entry['memory'] / 1e6:.1f}" if entry.get("memory") is not None and "failed" not in entry else "-"


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table whose columns are padded, so that it can be read as plain text too."""
    widths = [max(len(line[column]) for line in (header, *rows)) for column in range(len(header))]

    def line(cells: list[str]) -> str:
        return "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + " |"

    return "\n".join([line(header), "|" + "|".join("-" * (width + 2) for width in widths) + "|", *map(line, rows)])


def notes(result: Json) -> list[str]:
    """How to read the table, why a cell is empty, and what was odd."""
    rounds, threads = result["settings"]["rounds"], result["machine"]["threads"]
    lines = ["Share: attnc's rate over the limit measured directly before and after it. Ratio: paired time of the "
             "other over attnc's; above 1, attnc is faster.",
             f"Medians (minima) of {rounds} rounds, {threads} threads, every contender in a process of its own."]
    used = {case["limit"]["name"] for case in result["cases"] if "limit" in case}
    lines += [text for name, text in LIMITS.items() if name in used]
    if result["blas"].get("numpy"):
        lines.append(f"BLAS of NumPy: {', '.join(result['blas']['numpy'])}.")
    if any(disturbed(case, result) for case in result["cases"]):
        lines.append("Disturbed: other processes wanted the processors in half of the rounds or more; ratios marked ~ "
                     "are no measurement.")
    lines += [f"Other processes disturbed {case['disturbed']} of {rounds} rounds of {case['name']}."
              for case in result["cases"] if case.get("disturbed")]
    reasons: dict[tuple[str, str], list[str]] = {}
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


def disturbed(case: Json, result: Json) -> bool:
    """Whether other processes took part in so many rounds that the median says nothing."""
    return bool(2 * case.get("disturbed", 0) >= result["settings"]["rounds"])


def _contenders(result: Json) -> list[str]:
    """Every contender that has a ratio somewhere, in their order."""
    seen: dict[str, bool] = {}
    for case in result["cases"]:
        for name, entry in case["contenders"].items():
            seen[name] = seen.get(name, False) or "ratio" in entry
    return [name for name, measured in seen.items() if measured]


def _ratio(entry: Json, mark: str) -> str:
    ratio = entry.get("ratio")
    return f"{mark}{ratio['median']:.2f} ({ratio['min']:.2f})" if ratio and "failed" not in entry else "-"
