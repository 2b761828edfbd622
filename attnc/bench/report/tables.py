"""What was measured, as Markdown tables, and how to read them."""

from collections.abc import Sequence

import numpy as np

from attnc.bench import Json

NOISY = 0.10    # of a limit's probes: how far the 10th percentile lies below the 90th; less on a quiet machine

LIMITS = {
    "fma": "Limit \"fma\": the peak of multiply-and-adds; for bfloat16 that of its dot products where there are any.",
    "read": "Limit \"read\": the bandwidth of reading memory. Calls take turns over copies of their inputs, more than "
            "the caches hold.",
    "weights": "Limit \"weights\": 1.1 x the same call without weights + 1.3 x filling an array of their shape, new "
               "or used again as theirs is; 100% or more is within it.",
    "plain": "Limit \"plain\": 1.15 x the same call without the mask, 1.25 x without the bias, 1.1 x without the "
             "relative bias; 100% or more is within it.",
    "file": "Limit \"file\": the bandwidth of reading the same file through a new mapping.",
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
            if case["limit"].get("spread", 0) > NOISY:
                shown += ", noisy"
        if disturbed(case, result):
            shown, mark = "disturbed", "~ "
        rows.append([case["name"], shown, *(_ratio(case["contenders"][name], mark) for name in names)])
    return table(header, rows)


def regime_table(results: Sequence[Json]) -> str:
    """A line for each regime, made of all its cases on all machines: the worst and the best share, and the cases where
    another comes nearest and is farthest; each with its make of processor where there are several."""
    regimes: dict[str, list[tuple[Json, Json]]] = {}
    for result in results:
        for case in result["cases"]:
            regimes.setdefault(case["regime"], []).append((case, result))
    rows = []
    for name, found in regimes.items():
        fair = [(case, result) for case, result in found if "failed" not in case and not disturbed(case, result)]
        left_out = f", {len(found) - len(fair)} not measured" if len(fair) < len(found) else ""
        count = f"{len({case['name'] for case, _ in found})}{left_out}"
        nearest = [near for case, result in fair if (near := fastest_other(case, _make_of(result, results)))]
        rows.append([name, count, share_range(fair, results),
                     *(_shown(each) for each in ((min(nearest), max(nearest)) if nearest else (None, None)))])
    return table(["regime", "cases", "share of limit", "fastest other / attnc: worst case", "best case"], rows)


def _make_of(result: Json, results: Sequence[Json]) -> str:
    """The make of processor, where a table is of several."""
    return str(result["machine"]["make"]) if len(results) > 1 else ""


def share_range(measured: Sequence[tuple[Json, Json]], results: Sequence[Json]) -> str:
    """The worst and the best share of these cases, each with its result, and the limits that they are shares of."""
    shares = [(case["share"]["median"], _make_of(result, results)) for case, result in measured if "share" in case]
    if not shares:
        return "-"
    limits = ", ".join(dict.fromkeys(case["limit"]["name"] for case, _ in measured if "share" in case))
    ends = [f"{share:.0%}" + (f" ({make})" if make else "") for share, make in (min(shares), max(shares))]
    return f"{' to '.join(ends if len(shares) > 1 else ends[:1])} of {limits}"


def fastest_other(case: Json, make: str = "") -> tuple[float, str, str, str] | None:
    """The smallest ratio of another contender, its name, the case's, and the make of processor."""
    ratios = [(entry["ratio"]["median"], name, case["name"], make) for name, entry in case["contenders"].items()
              if "ratio" in entry and "failed" not in entry]
    return min(ratios, default=None)


def _shown(nearest: tuple[float, str, str, str] | None) -> str:
    if nearest is None:
        return "-"
    ratio, name, case, make = nearest
    return f"{ratio:.2f} {name} ({case}{', ' if make else ''}{make})"


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
    """How to read the table, why a cell is empty, and what disturbed the run."""
    rounds, threads = result["settings"]["rounds"], result["machine"]["threads"]
    lines = []
    if noise(result) > NOISY:
        lines.append(f"Noisy run: the limit's probes spread by {noise(result):.0%} in half of the cases or more, on a "
                     f"quiet machine by less than {NOISY:.0%}. Shares and ratios may be off by as much.")
    lines += ["Share: attnc's rate over the limit measured directly before and after it. Ratio: paired time of the "
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


def noise(result: Json) -> float:
    """The spread of the limit's probes in the middle one of the cases; 0 where it was not recorded."""
    spreads = [case["limit"]["spread"] for case in result["cases"] if "spread" in case.get("limit", {})]
    return float(np.median(spreads)) if spreads else 0.0


def disturbed(case: Json, result: Json) -> bool:
    """Whether other processes took part in half of the rounds or more, so that the median says nothing."""
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
