"""Draw GFLOP/s over length and GB/s over decode length, each with the machine's limit as a line, for each machine.

    python -m attnc bench --set lengths --json benchmarks/results/lengths
    python benchmarks/plots.py

many_cores.png is the share of the ideal that benchmarks/many_cores.py predicts.
"""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent
COLOURS = {"attnc": "tab:red", "numpy": "tab:blue", "torch": "tab:orange", "onnxruntime": "tab:green",
           "onnxruntime-mha": "tab:olive", "openvino": "tab:purple", "jax": "tab:brown", "scipy": "tab:gray"}
RESULTS = ROOT / "results" / "lengths"
CORES = ROOT / "results" / "many_cores.json"
CORES_SHOWN = ("f32 1,8,8192,8192,128 causal", "f32 1,32/8,2048,2048,128 causal", "f32 1,16,2048,2048,64",
               "f32 1,12,512,512,64", "f32 1,32/8,1,8192,128", "f32 1,32/8,2048,2048,128 causal backward")
PANELS = (      # limit, axis of the length, rate of a case per second, unit, title
    ("fma", "tokens", "flops", "GFLOP/s", "Attention, 8 heads of 64, float32"),
    ("read", "keys in the cache", "bytes", "GB/s", "One new token, 32 heads on 8 of 128, float32"),
)


def series(result: dict, limit: str, work: str) -> tuple[list, dict]:
    """Lengths with the limit's rate, and for each contender its (length, rate), rates in units of 1e9 a second."""
    line, found = [], {}
    for case in result["cases"]:
        if case.get("limit", {}).get("name") != limit:
            continue
        line.append((case["kv_len"], case["limit"]["rate"] / 1e9))
        for name, entry in case["contenders"].items():
            if "seconds" in entry and "failed" not in entry and name != "twin":
                found.setdefault(name, []).append((case["kv_len"], case[work] / entry["seconds"] / 1e9))
    return line, found


def draw(results: list[dict], path: Path) -> None:
    """Both panels of each machine into one picture, a machine below the other."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.4 * len(results)), layout="constrained")
    drawn = {}
    for part, result in zip(figure.subfigures(len(results), 1, squeeze=False)[:, 0], results, strict=True):
        draw_machine(result, part, drawn)
    figure.legend(drawn.values(), drawn.keys(), loc="outside right upper", frameon=False, fontsize=9)
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=110)


def draw_machine(result: dict, figure, drawn: dict) -> None:
    """Both panels of one machine; `drawn` receives the lines of the legend."""
    for axes, (limit, tokens, work, unit, title) in zip(figure.subplots(1, 2), PANELS, strict=True):
        line, found = series(result, limit, work)
        [drawn["limit of this machine"]] = axes.plot(*zip(*line, strict=True), color="0.35", linestyle="--")
        for name, points in found.items():
            own = name == "attnc"
            [drawn[name]] = axes.plot(*zip(*points, strict=True), marker="o", markersize=4, color=COLOURS[name],
                                      linewidth=2.4 if own else 1.2, zorder=3 if own else 2)
        axes.set(xscale="log", title=title, xlabel=tokens, ylabel=unit, ylim=(0, None))
        axes.set_xscale("log", base=2)
        axes.set_xticks([length for length, _ in line], [f"{length:,}" for length, _ in line], rotation=35)
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    machine = result["machine"]
    figure.suptitle(f"{machine['cpu']}, {machine['isa']}, {machine['threads']} threads", fontsize=9, color="0.35")


def draw_cores(result: dict, path: Path) -> None:
    """The share of the ideal over the threads, of chosen cases."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.4), layout="constrained")
    axes = figure.subplots()
    for case in result["cases"]:
        if case["name"] in CORES_SHOWN:
            threads = sorted(map(int, case["threads"]))
            label = f"{case['name']} ({case['gflop']:.3g} GFLOP)"
            axes.plot(threads, [100 * case["threads"][str(n)]["share"] for n in threads], marker="o", markersize=4,
                      label=label)
    axes.set_xscale("log", base=2)
    axes.set(xlabel="threads", ylabel="% of the ideal", ylim=(0, 105), title="Predicted from the tasks of the plan")
    axes.set_xticks(threads, [str(n) for n in threads])
    axes.axhline(85, color="0.35", linestyle="--", linewidth=1)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=110)


def main() -> int:
    draw_cores(json.loads(CORES.read_text(encoding="utf-8")), ROOT / "plots" / "many_cores.png")
    draw([json.loads(file.read_text(encoding="utf-8")) for file in sorted(RESULTS.glob("*.json"))],
         ROOT / "plots" / "lengths.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
