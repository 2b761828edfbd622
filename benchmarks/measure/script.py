"""The command line of the measurements that have a script of their own in ``benchmarks/``."""

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attnc
from attnc._files import write_text
from attnc.bench import Json, machine


def run(
        description: str, cases: Sequence[Any], tiny: Sequence[Any], measure: Callable[[Any, int, int], Json],
        show: Callable[[Json], str], arguments: list[str] | None = None) -> int:
    """Measure `cases`, or the `tiny` ones, print what `show` makes of the result, and give the exit status.

    ``measure(cases, threads, rounds)`` returns a dictionary with ``cases`` and whether all have ``passed``.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=attnc.get_num_threads())
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tiny", action="store_true", help="sizes that take no time, to see that it works")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    for warning in machine.warnings():
        print(f"Note: {warning}")
    result = measure(tiny if options.tiny else cases, options.threads, options.rounds)
    for case in result["cases"]:
        if "failed" in case:
            print(f"{case['name']}: {case['failed']}")
    if result["passed"]:
        print(show(result))
    if options.json:
        write_text(options.json, json.dumps(result, indent=1) + "\n")
    return 0 if result["passed"] else 1
