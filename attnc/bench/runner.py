"""Paired, interleaved rounds of attnc and its peers, each verified first and in a process of its own."""

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

import attnc
from attnc.bench import Json, Unsupported, machine
from attnc.bench.cases import BenchCase, regime
from attnc.bench.contenders import CONTENDERS
from attnc.bench.parity import Expected
from attnc.bench.timing import settle, spread
from attnc.bench.worker import serve
from attnc.testing import Case

FORMAT = 2
SLOW_SECONDS, SPARED = 0.3, 3       # a contender whose call takes longer is sampled in every third round
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_SPAWN = multiprocessing.get_context("spawn")


class Failed(Exception):
    """A contender raised, died, or computed something wrong."""


class Worker:
    """The near end of a contender's process; its methods wait for the answer, so that only one ever computes."""

    def __init__(self, setup: str, threads: int) -> None:
        self.setup, self.threads = setup, threads
        self.start()

    def start(self) -> None:
        """Start the process and let it import the contender."""
        self.connection, far = _SPAWN.Pipe()
        self.process = _SPAWN.Process(target=serve, args=(far,), daemon=True)
        with _environment(dict.fromkeys(_THREAD_VARIABLES, str(self.threads))):     # libraries read it as they load
            self.process.start()
        far.close()
        try:
            self.ask("contender", self.setup, self.threads)
        except BaseException:
            self.close()
            raise

    def revive(self) -> None:
        """Start the process again if it has died: a crash in one case must not cost the others."""
        if not self.process.is_alive():
            self.close()
            self.start()

    def ask(self, command: str, *arguments: Any) -> Any:
        """Send one command and give its value; raises Unsupported or Failed with the reason."""
        try:
            self.connection.send((command, arguments))
            kind, value = self.connection.recv()
        except (EOFError, OSError) as error:
            self.process.join()
            raise Failed(f"its process ended with status {self.process.exitcode}") from error
        if kind == "unsupported":
            raise Unsupported(value)
        if kind == "failed":
            raise Failed(value)
        return value

    def close(self) -> None:
        """End the process, at once."""
        self.process.kill()
        self.process.join()
        self.connection.close()


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """These environment variables for a process that starts now: multiprocessing passes on those of this one."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def run(
        cases: Sequence[BenchCase], *, contenders: dict[str, str] | None = None, threads: int | None = None,
        rounds: int = 9, seed: int = 0, progress: Callable[[str], None] | None = None,
        save: Callable[[Json], None] | None = None) -> Json:
    """Measure `cases` and give everything there is to say about them, ready for JSON.

    Parameters
    ----------
    cases : sequence of attnc.testing.Case
    contenders : dict, optional
        Name to ``"module:function"`` of a setup as in `attnc.bench.contenders`; it must hold ``"attnc"``.
    threads : int, optional
        For every contender; by default what attnc would use.
    rounds : int
        In each round every contender gives one sample, in an order that rotates; a slow one in every third.
    seed : int
        Of the random inputs.
    progress : callable, optional
        Called with the text of each step as it begins; `steps` says how many there will be.
    save : callable, optional
        Called after each case with the result so far.

    Returns
    -------
    dict
        ``machine``, ``versions``, ``blas``, ``commit``, ``environment``, ``settings``, ``cases`` and ``passed``.
    """
    contenders = contenders or CONTENDERS
    threads = threads or attnc.get_num_threads()
    progress = progress or (lambda text: None)
    described = machine.describe(threads)
    workers: dict[str, Worker] = {}
    results: list[Json] = []

    def found() -> Json:
        for worker in workers.values():
            worker.revive()
        return {
            "format": FORMAT,
            **described,
            "blas": {name: worker.ask("libraries") for name, worker in workers.items()},
            "settings": {"rounds": rounds, "seed": seed},
            "cases": list(results),
            "passed": all("failed" not in each for each in results),
        }

    try:
        for name, setup in contenders.items():
            progress(f"starting {name}")
            workers[name] = Worker(setup, threads)
        for case in cases:
            measured = _measure(case, workers, rounds, seed, progress)
            results.append(measured | {"commit": described["commit"]})
            if save:
                save(found())
        return found()
    finally:
        for worker in workers.values():
            worker.close()


def _measure(
        case: BenchCase, workers: dict[str, Worker], rounds: int, seed: int, progress: Callable[[str], None]) -> Json:
    """One case: verify every contender, then let those that are right run in rounds."""
    progress(f"{case.name}: reference")
    expected = Expected(case, seed) if isinstance(case, Case) else case.expected(seed)
    settle()
    entries, ready, limit = {}, {}, None
    for name, worker in workers.items():
        progress(f"{case.name}: verifying {name}")
        try:
            worker.revive()
            results, memory = worker.ask("prepare", case, seed, expected.rows, name == "attnc")
            error, tolerance = expected.judge(results)
            entries[name] = {"error": error if np.isfinite(error) else None, "tolerance": tolerance, "memory": memory}
            if not error <= tolerance:
                raise Failed(f"wrong: error {error:.1e} where {tolerance:.1e} is allowed")
            limit = worker.ask("warm") or limit
            ready[name] = worker
        except Unsupported as reason:
            entries[name] = {"unsupported": str(reason)}
        except Failed as reason:
            entries.setdefault(name, {})["failed"] = str(reason)
    samples: dict[str, dict[int, Json]] = {name: {} for name in ready}          # by round
    # Without attnc there is nothing to compare; the other entries still say what they are.
    for turn in range(rounds if "attnc" in ready else 0):
        progress(f"{case.name}: round {turn + 1}")
        order = list(ready)
        shift = turn % len(order)
        for name in order[shift:] + order[:shift]:
            if name != "attnc" and turn % SPARED and samples[name][0]["seconds"] > SLOW_SECONDS:
                continue
            try:
                samples[name][turn] = ready[name].ask("sample")
            except Failed as reason:
                entries[name]["failed"] = str(reason)
                del ready[name]
    return _summary(case, entries, {name: samples[name] for name in ready}, limit)


def _summary(case: BenchCase, entries: Json, samples: dict[str, dict[int, Json]], limit: Json | None) -> Json:
    """The medians and the worst of the rounds, each ratio taken within its round."""
    found = {"name": case.name, "regime": regime(case.name), "dtype": case.dtype, **_sizes(case), "contenders": entries}
    if "failed" in entries["attnc"] or "unsupported" in entries["attnc"]:
        reason = entries["attnc"].get("failed") or entries["attnc"]["unsupported"]
        return {**found, "failed": reason}
    own = np.array([each["seconds"] for each in samples["attnc"].values()])
    for name, rounds in samples.items():
        seconds = np.array([each["seconds"] for each in rounds.values()])
        restless = sum(not each["quiet"] for each in rounds.values())
        entries[name].update(seconds=float(np.median(seconds)), restless=restless)
        if name != "attnc":
            entries[name]["ratio"] = spread(seconds / own[list(rounds)])
    disturbed = sum(each["disturbed"] for each in samples["attnc"].values())
    if limit is None:
        return {**found, "disturbed": disturbed}
    pairs = [(each["before"], each["after"]) for each in samples["attnc"].values()]
    rates = np.array([(before["rate"] + after["rate"]) / 2 for before, after in pairs])
    probes = np.array([probe["rate"] for pair in pairs for probe in pair])
    low, high = np.quantile(probes, (0.1, 0.9))
    parts = {part: float(np.median([probe[part] for pair in pairs for probe in pair])) for part in pairs[0][0]}
    return {**found, "disturbed": disturbed, "limit": {**limit, **parts, "spread": float(1 - low / high)},
            "share": spread(limit["work"] / own / rates)}


def _sizes(case: BenchCase) -> Json:
    """What the case is, for a reader of the JSON file."""
    if not isinstance(case, Case):
        return case.describe()
    names = ("batch", "q_heads", "kv_heads", "q_len", "kv_len", "head_dim", "value_dim", "flops", "bytes")
    options = {name: list(value) if isinstance(value, tuple) else value for name, value in case.options}
    return {name: getattr(case, name) for name in names} | {"options": options}


def steps(cases: Sequence[BenchCase], contenders: dict[str, str], rounds: int) -> int:
    """How often `run` will report progress."""
    return len(contenders) + len(cases) * (1 + len(contenders) + rounds)
