"""The command line, ``attnc`` or ``python -m attnc``: ``info``, ``check``, ``bench`` and ``view``."""

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attnc
import attnc.datasets
from attnc._files import whole, write_text
from attnc._views.source import Source
from attnc._views.tokens import address, visible, visible_lines
from attnc.bench import cases, machine, parity, report, runner
from attnc.bench.contenders import CONTENDERS
from attnc.bench.report import chain

ROUNDS, QUICK_ROUNDS = 9, 3
EXAMPLES = """\
one example each:
  PROG info                                    for a bug report; --json for programs
  PROG check                                   is attnc right on this machine? in seconds
  PROG bench --quick                           how fast is it here? in half a minute
  PROG view weights.npz --html weights.html    a file of yours, as a page for the browser

A file for view: numpy.savez("weights.npz", query=query, key=key, tokens=tokens)
"""


def _parser() -> argparse.ArgumentParser:
    prog = "attnc" if Path(sys.argv[0]).stem == "attnc" else "python -m attnc"
    parser = argparse.ArgumentParser(
        prog=prog, epilog=EXAMPLES.replace("PROG", prog),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Exact CPU attention: what is here, whether it is right on this machine, and how fast it is.")
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version")
    commands = parser.add_subparsers(dest="command")

    info = commands.add_parser("info", help="show the configuration")
    info.add_argument("--json", action="store_true", help="as JSON")
    info.set_defaults(run=_info)

    check = commands.add_parser("check", help="compare every public function with its NumPy twin")
    check.add_argument("--isa", metavar="NAME", help="instruction set to use, as ATTNC_ISA")
    check.set_defaults(run=_check)

    bench = commands.add_parser("bench", help="measure speed against this machine's limits and every installed peer")
    size = bench.add_mutually_exclusive_group()
    size.add_argument("--quick", dest="set", action="store_const", const="quick", default="full",
                      help="the chain on a real sentence, the parity table and a few cases, in half a minute")
    size.add_argument("--set", choices=tuple(cases.SETS), help="which cases: full by default, lengths is a sweep")
    size.add_argument("--tiny", dest="set", action="store_const", const="tiny", help=argparse.SUPPRESS)
    bench.add_argument("--json", metavar="FILE", type=Path,
                       help="write everything measured to FILE after each case; in a folder, to the file of this "
                            "make of processor")
    bench.add_argument("--add", action="store_true",
                       help="with --json: the cases of the file that are not measured now stay in it")
    bench.add_argument("--compare", metavar="FILE", type=Path,
                       help=f"exit 1 if a share fell by more than {report.FELL_POINTS} points since FILE was written; "
                            "of a folder, the file of this make of processor")
    bench.add_argument("--cases", metavar="PATTERN",
                       help="only cases whose name holds this, * and ? as in file names, or those of this regime")
    bench.add_argument("--peers", metavar="NAMES",
                       help=f"only these of {','.join(list(CONTENDERS)[1:])}; an empty one is none")
    bench.add_argument("--rounds", metavar="N", type=_positive,
                       help=f"rounds per case (default {ROUNDS}, with --quick {QUICK_ROUNDS})")
    bench.add_argument("--threads", metavar="N", type=_positive, help="threads for every contender")
    bench.add_argument("--isa", metavar="NAME", help="instruction set to use, as ATTNC_ISA")
    bench.set_defaults(run=_bench)

    view = commands.add_parser("view", help="look at the attention weights in a file", description=(
        "Show a map of attention weights and the largest weights of a row. FILE holds arrays by name: weights; or "
        "query and key, with any option of attnc.AttentionWeights (window as two integers, -1 for None); and tokens, "
        "if there are any."))
    view.add_argument("file", metavar="FILE.npz", type=Path)
    view.add_argument("--head", metavar="H", type=_place, help="head, or layer,head; otherwise the mean over all")
    view.add_argument("--row", metavar="N", type=int, help="row whose largest weights are listed")
    view.add_argument("--top", metavar="N", type=_positive, default=8, help="how many of them (default 8)")
    view.add_argument("--html", metavar="OUT.html", type=Path, help="write a page to explore in a browser, all heads")
    view.add_argument("--plot", metavar="OUT.png", type=Path,
                      help="write a figure (needs matplotlib): of the head, or of all side by side")
    view.set_defaults(run=_view)
    return parser


class _Version(argparse.Action):
    """As argparse's own, which would read the metadata for every command."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(f"attnc {attnc.__version__}")
        parser.exit()


def _place(text: str) -> int | tuple[int, ...]:
    parts = text.split(",")
    if not 1 <= len(parts) <= 2 or not all(part.strip().isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"a head, or layer,head, not {text!r}")
    return int(text) if len(parts) == 1 else tuple(map(int, parts))


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"a number of at least 1, not {text!r}")
    return int(text)


def main(arguments: list[str] | None = None) -> int:
    """Run one command and give its exit status.

    0 is success, 1 wrong or slower, 2 a bad request, 130 Ctrl-C, 141 a closed pipe.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:      # closed before Python started, as by ``>&-``
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - open to the end
    try:
        try:
            return _run(sys.argv[1:] if arguments is None else arguments)
        finally:
            sys.stdout.flush()      # here, where its error is handled
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())      # for what Python still flushes at its end
        return 141


def _run(arguments: list[str]) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.command is None:
        parser.print_help()
        return 0
    try:
        isa = getattr(options, "isa", None)
        if isa and isa not in (attnc.isa(), os.environ.get("ATTNC_ISA")):
            return _with_isa(isa, arguments)
        status: int = options.run(options)
        return status
    except BrokenPipeError:
        raise
    except (ValueError, TypeError, ImportError, OSError, MemoryError) as error:
        print(visible_lines(str(error)) or type(error).__name__, file=sys.stderr)
        return 2
    except runner.Failed as error:
        print(f"a contender cannot start: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        sys.unraisablehook = lambda _: None     # what was half made, as a ZipFile of an import, complains when it goes
        print("stopped", file=sys.stderr)
        return 130


def _with_isa(isa: str, arguments: list[str]) -> int:
    """The same command in another process: kernels are chosen once, at import."""
    available = attnc.show_config()["available"]
    if isa not in available:
        raise ValueError(f"instruction set {isa!r} cannot run here; there are {', '.join(available)}")
    sys.stdout.flush()
    command = [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}; from attnc.__main__ import main; "
               f"sys.exit(main({arguments!r}))"]
    process = subprocess.Popen(command, env=os.environ | {"ATTNC_ISA": isa})
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:       # the terminal sends it to the child too, which says so and ends
            continue


def _info(options: argparse.Namespace) -> int:
    configuration = attnc.show_config()
    print(json.dumps(dict(configuration), indent=2, default=str) if options.json else configuration)
    return 0


def _header(threads: int) -> None:
    print(f"attnc {attnc.__version__} on {machine.cpu_name()}\n"
          f"instruction set {attnc.isa()}, {threads} threads on {machine.cores()} processors")


def _check(options: argparse.Namespace) -> int:
    _header(attnc.get_num_threads())
    return _print_parity()


def _print_parity() -> int:
    with _Progress(parity.steps()) as progress:
        lines = parity.check(progress)
    print(parity.show(lines))
    wrong = sum(not line.passed for line in lines)
    print(f"\nParity: {len(lines) - wrong} of {len(lines)} within tolerance" + (f", {wrong} FAIL" if wrong else ""))
    return 1 if wrong else 0


def _bench(options: argparse.Namespace) -> int:
    if options.add and not options.json:
        raise ValueError("--add needs --json: the file whose other cases stay")
    chosen = cases.select(options.set, options.cases)
    contenders = _contenders(options.peers, options.set)
    old = _earlier(options.compare, options.cases) if options.compare else None
    save = _save(options) if options.json else None
    threads = options.threads or attnc.get_num_threads()
    if old:
        report.comparable(old, attnc.isa(), threads)
    _header(threads)
    for warning in machine.warnings():
        print(f"Note: {warning}")
    if options.set == "quick":
        print(f"\n{chain.describe(attnc.datasets.load('turkish'))}")
    print()
    if _print_parity():
        print("Not measured: what is wrong has no speed.")
        return 1
    print(flush=True)
    rounds = options.rounds or (QUICK_ROUNDS if options.set == "quick" else ROUNDS)
    with _Progress(runner.steps(chosen, contenders, rounds)) as progress:
        result = runner.run(chosen, contenders=contenders, threads=threads, rounds=rounds, progress=progress,
                            save=save)
    print(report.speed_table(result), "", *report.notes(result), sep="\n")
    found = report.regressions(old, result) if old else []
    print(*(f"FAIL {visible(line)}" for line in found), sep="\n", end="\n" if found else "")
    return 0 if result["passed"] and not found else 1


def _view(options: argparse.Namespace) -> int:
    from attnc._views import files, terminal

    source, tokens, key_tokens = files.read(options.file)
    out, progress = sys.stdout, sys.stderr.isatty()
    colour = out.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    encoding = out.encoding or "ascii"
    text = terminal.show(source, tokens, key_tokens, head=options.head, row=options.row, top=options.top, colour=colour,
                         columns=shutil.get_terminal_size().columns, ascii=not _writes(encoding, terminal.SIGNS),
                         progress=progress)
    print(text.encode(encoding, "replace").decode(encoding))
    if options.html:
        page = attnc.explorer(source, tokens, key_tokens=key_tokens, path=options.html, head=options.head,
                              row=options.row, title=options.file.stem, progress=progress)
        print(f"\n{visible(str(options.html))}: a page of all heads, {round(len(page.html.encode()) / 1000):,} kB; "
              f"open {address(options.html)} in a browser")
    if options.plot:
        _plot(options, source, tokens, key_tokens)
        print(f"\n{visible(str(options.plot))}: a figure; open {address(options.plot)}")
    return 0


def _plot(options: argparse.Namespace, source: Source, tokens: list[str] | None, key_tokens: list[str] | None) -> None:
    one = options.head is not None or source.shape[0] * source.shape[1] == 1
    progress = sys.stderr.isatty()
    drawn = (attnc.plot.heatmap(source, tokens, key_tokens=key_tokens, head=options.head, progress=progress).figure
             if one else attnc.plot.heads(source, progress=progress))
    with whole(options.plot) as part:
        drawn.savefig(part, dpi=150)


def _writes(encoding: str, text: str) -> bool:
    try:
        return bool(text.encode(encoding))
    except UnicodeEncodeError:
        return False


def _earlier(file: Path, pattern: str | None) -> dict[str, Any]:
    """An earlier result, without the cases that are not asked for now."""
    chosen = _file_of_make(file)
    if chosen != file and not chosen.exists():
        there = ", ".join(sorted(each.stem for each in file.glob("*.json"))) or "none"
        raise ValueError(f"{file} holds no result of this make of processor, {machine.make()} (there are: {there}); "
                         f"'bench --json {file}' measures one")
    old = report.earlier(chosen)
    return old | {"cases": [case for case in old["cases"] if cases.matches(case["name"], pattern)]}


def _save(options: argparse.Namespace) -> Callable[[dict[str, Any]], None]:
    """What writes a result to the file of ``--json``; with ``--add`` beside the cases that the file has."""
    file = _file_of_make(options.json)
    kept = report.earlier(file) if options.add and file.exists() else None
    names = [case.name for case in cases.SETS[options.set]]

    def save(result: dict[str, Any]) -> None:
        whole = report.merged(kept, result, names) if kept else result
        write_text(file, json.dumps(whole, indent=1) + "\n")

    return save


def _file_of_make(path: Path) -> Path:
    """The file itself; in a folder, that of this machine's make of processor."""
    return path / f"{machine.make()}.json" if path.is_dir() else path


def _contenders(names: str | None, size: str) -> dict[str, str]:
    if names is None:       # the twin is the slowest: a quick look has seen it in the parity table
        return {name: setup for name, setup in CONTENDERS.items() if name != "twin" or size != "quick"}
    asked = [name.strip() for name in names.split(",") if name.strip()]
    if unknown := set(asked) - set(CONTENDERS):
        raise ValueError(f"no peer named {', '.join(sorted(unknown))}; there are {', '.join(CONTENDERS)}")
    return {name: setup for name, setup in CONTENDERS.items() if name == "attnc" or name in asked}


class _Progress:
    """A tqdm bar on a terminal where tqdm is installed, otherwise nothing."""

    def __init__(self, total: int) -> None:
        self.bar = None
        if sys.stderr.isatty():
            try:
                from tqdm import tqdm
            except ModuleNotFoundError:
                return
            self.bar = tqdm(total=total, leave=False, bar_format="{percentage:3.0f}% {bar:20} {elapsed} {desc}")

    def __call__(self, text: str) -> None:
        if self.bar is not None:
            self.bar.set_description_str(text, refresh=False)
            self.bar.update()

    def __enter__(self) -> "_Progress":
        return self

    def __exit__(self, *error: object) -> None:
        if self.bar is not None:
            self.bar.close()


if __name__ == "__main__":
    sys.exit(main())
