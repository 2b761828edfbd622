"""Statistics of weights without their matrix: against those who build it, and as multiples of plain attention.

    python benchmarks/weights.py --json benchmarks/results/weights.json
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import attnc
from attnc import reference
from attnc.bench import Arrays, Call, Json, Options, Unsupported, machine, report, runner
from attnc.bench.contenders.tensors import import_torch, to_torch
from attnc.bench.timing import spread
from attnc.results import SparseWeights
from attnc.testing import Case, error_and_tolerance
from measure import script

TOP = 8
STATISTICS = {"topk": ("topk",), "entropy": ("entropy",), "max": ("max",), "key_mass": ("key_mass",), "map": ("map",),
              "summary": ("topk", "entropy", "key_mass", "map"), "relevance": ("relevance",),
              **{name: (name,) for name in (
                  "effective_keys", "argmax", "mean_position", "mean_distance", "key_max", "row_mass", "lost_mass",
                  "key_hits", "pool", "sparse", "product", "transposed")}}
SHOWN = {"topk": f"topk({TOP})", "map": "map of 64 x 64",
         "summary": f"topk({TOP}), entropy, key_mass, map in one sweep", "relevance": "relevance, map of 64 x 64",
         "row_mass": "row_mass of half of the keys", "lost_mass": "lost_mass, half of the keys stay",
         "key_hits": "key_hits of weights over 4 / keys", "pool": "pool of 64 x 64 groups",
         "sparse": "sparse, of weights over 4 / keys", "product": "W @ X", "transposed": "W.T @ X"}
PEERS = {"torch": "eager", "torch-identity": "identity", "numpy": "numpy"}
SELECTED = 4.0      # a weight counts for key_hits and sparse if it is this many times that of a uniform row
NEAR = 1e-5         # a weight that is nearer to the threshold, relatively, may count or not
SLOW_ROUNDS = 2     # of the peers, which take many seconds


@dataclass(frozen=True)
class StatisticsCase(Case):
    """An attention, and which of its statistics are asked for."""

    asked: tuple[str, ...] = tuple(STATISTICS)
    bins: tuple[int, int] = (64, 64)

    def make(self, seed: int) -> tuple[Any, ...]:
        """Query and key, and the options; every result is wanted."""
        (query, key, _), options = super().make(seed)
        return (query, key), {**options, "want": self.asked}


def _case(
        heads: int, length: int, asked: tuple[str, ...] = tuple(STATISTICS), bins: tuple[int, int] = (64, 64),
        **options: Any) -> StatisticsCase:
    words = "causal" if options.get("causal") else "full"
    return StatisticsCase(f"f32 1,{heads},{length},{length},64 {words}", 1, heads, heads, length, length, 64,
                          options=tuple(options.items()), asked=asked, bins=bins)


CASES = _case(16, 4096), _case(16, 4096, causal=True)
TINY = _case(2, 70, bins=(5, 7)), _case(2, 70, bins=(5, 7), causal=True)


def _passed(case: StatisticsCase) -> list[np.ndarray]:
    """Values, and the gradients of the output that relevance multiplies."""
    random, heads = np.random.default_rng(1), (case.batch, case.q_heads)
    return [random.standard_normal((*heads, n, case.head_dim), np.float32) for n in (case.kv_len, case.q_len)]


def _threshold(case: StatisticsCase) -> float:
    return SELECTED / case.kv_len


def _labels(length: int, groups: int) -> np.ndarray:
    """The group of each place: all of like size, none of neighbours."""
    return np.arange(length) * 7919 % groups


def _members(case: StatisticsCase) -> tuple[np.ndarray, np.ndarray]:
    """The groups as matrices of (groups, rows) and (keys, groups), which make sums and means of products."""
    of_rows, of_keys = (np.eye(groups, dtype=np.float32)[_labels(length, groups)] for length, groups in zip(
        (case.q_len, case.kv_len), case.bins, strict=True))
    return np.ascontiguousarray(of_rows.T / of_rows.sum(0)[:, None]), of_keys


# Of what no summary has: from lazy weights.
METHODS: dict[str, Callable[[Any, StatisticsCase], Any]] = {
    "relevance": lambda W, case: W.relevance(*_passed(case)).map(case.bins),
    "row_mass": lambda W, case: W.row_mass(keys=np.arange(case.kv_len // 2)),
    "lost_mass": lambda W, case: W.lost_mass(np.arange(case.kv_len) < case.kv_len // 2),
    "key_hits": lambda W, case: W.key_hits(_threshold(case)),
    "pool": lambda W, case: W.pool(*(_labels(*each) for each in zip(W.shape[-2:], case.bins, strict=True))),
    "sparse": lambda W, case: W.sparse(threshold=_threshold(case)),
    "product": lambda W, case: W @ _passed(case)[0],
    "transposed": lambda W, case: W.T @ _passed(case)[1],
}


def _of_matrix(case: StatisticsCase, array: Callable[[Any], Any]) -> dict[str, Callable[[Any], list[Any]]]:
    """The statistics that NumPy and torch spell alike; `array` makes one of theirs."""
    half, keys = case.kv_len // 2, np.arange(case.kv_len, dtype=np.float32)
    distance = array(abs(keys - np.arange(case.kv_len - case.q_len, case.kv_len, dtype=np.float32)[:, None]))
    value, gradient = _passed(case)
    of_rows, of_keys = map(array, _members(case))
    return {"key_hits": lambda w: [(w > _threshold(case)).sum(-2)], "pool": lambda w: [of_rows @ (w @ of_keys)],
            "argmax": lambda w: [w.argmax(-1)], "mean_position": lambda w: [w @ array(keys)],
            "mean_distance": lambda w: [(w * distance).sum(-1)], "row_mass": lambda w: [w[..., :half].sum(-1)],
            "lost_mass": lambda w: [w[..., half:].sum(-1)], "product": lambda w: [w @ array(value)],
            "transposed": lambda w: [w.swapaxes(-1, -2) @ array(gradient)]}


def _sparse(weights: Any, threshold: float, columns: Callable[[Any], Any]) -> list[SparseWeights]:
    """What `AttentionWeights.sparse` gives, from a matrix; `columns` are the keys of what is True."""
    keep = weights >= threshold
    ends = np.asarray(keep.sum(-1)).cumsum()
    return [SparseWeights(np.concatenate(([0], ends)), np.asarray(columns(keep)), np.asarray(weights[keep]),
                          np.asarray((weights * ~keep).sum(-1)), tuple(weights.shape))]


def _said(W: Any, statistic: str, case: StatisticsCase) -> list[Any]:
    """The arrays of a statistic of lazy weights."""
    if statistic in METHODS:
        return [METHODS[statistic](W, case)]
    values = {"topk": TOP, "map": case.bins}
    arguments = {name: values.get(name, True) for name in STATISTICS[statistic]}
    return _flat(vars(W.summary(**arguments)), STATISTICS[statistic])


def _flat(found: Json, names: Iterable[str]) -> list[Any]:
    """The arrays of these statistics; of topk the weights and the indices."""
    return [array for name in names for array in (found[name] if isinstance(found[name], tuple) else (found[name],))]


def _dense(found: Any) -> Any:
    """An array; of sparse weights the last head as a matrix (1, 1, rows, keys), which is what is verified."""
    if not isinstance(found, SparseWeights):
        return np.asarray(found)
    rows, keys = found.shape[-2:]
    ends = found.indptr[-rows - 1:]
    matrix = np.zeros((1, 1, rows, keys), found.data.dtype)
    mine = slice(ends[0], ends[-1])
    matrix[0, 0, np.repeat(np.arange(rows), np.diff(ends)), found.indices[mine]] = found.data[mine]
    return matrix


def _report(found: Json, seconds: Json, memory: Json) -> tuple[Any, ...]:
    """What a round gives: two lines of numbers for each statistic, then the arrays of the first, of the second, ..."""
    found = {name: [_dense(each) for each in arrays] for name, arrays in found.items()}
    lines = np.array([[seconds[name] for name in found], [memory[name] or np.nan for name in found]])
    return lines, *(array for name in found for array in found[name])


def setup_attnc(case: StatisticsCase, arrays: Arrays, options: Options, threads: int) -> Call:
    """The package: each statistic directly after plain attention over the same queries and keys."""
    query, key = arrays
    value = _passed(case)[0]
    options = {name: option for name, option in options.items() if name != "want"}

    def call() -> tuple[np.ndarray, ...]:
        found, seconds, memory, plain = {}, {}, {}, []
        for statistic in case.asked:
            with machine.PeakMemory() as peak:
                began = time.perf_counter()
                W = attnc.AttentionWeights(query, key, num_threads=threads, **options)
                found[statistic] = _said(W, statistic, case)
                seconds[statistic] = time.perf_counter() - began
            memory[statistic] = peak.bytes
            began = time.perf_counter()
            attnc.attention(query, key, value, num_threads=threads, **options)
            plain.append(time.perf_counter() - began)
        lines, *results = _report(found, seconds, memory)
        return np.vstack([lines, [plain]]), *results

    return call


def _with_matrix(
        case: StatisticsCase, matrix: Callable[[], Any], say: dict[str, Callable[[Any], Any]]) -> tuple[Any, ...]:
    """The statistics of a matrix; each takes the time of making the matrix and its own."""
    with machine.PeakMemory() as made:
        began = time.perf_counter()
        weights = matrix()
        making = time.perf_counter() - began
    held = weights.nbytes
    parts, seconds, memory = {}, {}, {}
    for name in dict.fromkeys(part for statistic in case.asked for part in STATISTICS[statistic]):
        with machine.PeakMemory() as peak:
            began = time.perf_counter()
            parts[name] = say[name](weights)
            seconds[name] = time.perf_counter() - began
        memory[name] = None if peak.bytes is None or made.bytes is None else max(made.bytes, held + peak.bytes)
    found = {statistic: [array for part in STATISTICS[statistic] for array in parts[part]]
             for statistic in case.asked}
    whole = {name: making + sum(seconds[part] for part in STATISTICS[name]) for name in case.asked}
    peaks = {name: None if made.bytes is None else max(memory[part] or 0 for part in STATISTICS[name])
            for name in case.asked}
    return _report(found, whole, peaks)


def setup_numpy(case: StatisticsCase, arrays: Arrays, options: Options, threads: int) -> Call:
    """Products and softmax in place, then NumPy's own functions."""
    query, key = arrays
    rows, columns = (length // count for length, count in zip((case.q_len, case.kv_len), case.bins, strict=True))

    def matrix() -> np.ndarray:
        weights = (query * np.float32(case.head_dim ** -0.5)) @ key.swapaxes(-1, -2)
        weights -= weights.max(axis=-1, keepdims=True)
        np.exp(weights, out=weights)
        weights /= weights.sum(axis=-1, keepdims=True)
        return weights

    def topk(weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        indices = np.argpartition(weights, -TOP, axis=-1)[..., -TOP:]
        chosen = np.take_along_axis(weights, indices, -1)
        order = np.argsort(-chosen, axis=-1)
        return np.take_along_axis(chosen, order, -1), np.take_along_axis(indices, order, -1)

    def entropy(weights: np.ndarray) -> list[np.ndarray]:
        logs = np.log(weights)
        logs *= weights
        return [-logs.sum(-1)]

    def pooled(weights: Any) -> list[Any]:
        sums = weights.reshape(*weights.shape[:-1], -1, columns).sum(-1)
        return [sums.reshape(*weights.shape[:-2], -1, rows, sums.shape[-1]).mean(-2)]

    def relevance(weights: np.ndarray) -> list[np.ndarray]:
        value, gradient = _passed(case)
        passed = gradient @ value.swapaxes(-1, -2)
        np.maximum(passed, 0, out=passed)
        passed *= weights
        return pooled(passed)

    say = {"topk": topk, "entropy": entropy, "max": lambda w: [w.max(-1)], "key_mass": lambda w: [w.sum(-2)],
           "map": pooled, "relevance": relevance, "effective_keys": lambda w: [np.exp(entropy(w)[0])],
           "key_max": lambda w: [w.max(-2)],
           "sparse": lambda w: _sparse(w, _threshold(case), lambda keep: np.nonzero(keep)[-1]),
           **_of_matrix(case, np.asarray)}
    return lambda: _with_matrix(case, matrix, say)


def _setup_torch(case: StatisticsCase, arrays: Arrays, threads: int, way: Callable[[Any, Any, Any], Any]) -> Call:
    torch = import_torch(threads)
    query, key = (to_torch(torch, array) for array in arrays)
    rows, columns = (length // count for length, count in zip((case.q_len, case.kv_len), case.bins, strict=True))

    def pooled(weights: Any) -> list[Any]:
        sums = weights.reshape(*weights.shape[:-1], -1, columns).sum(-1)
        return [sums.reshape(*weights.shape[:-2], -1, rows, sums.shape[-1]).mean(-2)]

    def relevance(weights: Any) -> list[Any]:
        value, gradient = (to_torch(torch, array) for array in _passed(case))
        return pooled((gradient @ value.mT).clamp_(min=0).mul_(weights))

    say = {"topk": lambda w: torch.topk(w, TOP), "entropy": lambda w: [torch.special.entr(w).sum(-1)],
           "max": lambda w: [w.amax(-1)], "key_mass": lambda w: [w.sum(-2)], "map": pooled, "relevance": relevance,
           "effective_keys": lambda w: [torch.special.entr(w).sum(-1).exp()], "key_max": lambda w: [w.amax(-2)],
           "sparse": lambda w: _sparse(w, _threshold(case), lambda keep: keep.nonzero(as_tuple=True)[-1]),
           **_of_matrix(case, torch.from_numpy)}

    def call() -> tuple[np.ndarray, ...]:
        with torch.inference_mode():
            return _with_matrix(case, lambda: way(torch, query, key), say)

    return call


def setup_eager(case: StatisticsCase, arrays: Arrays, options: Options, threads: int) -> Call:
    """torch as the models of transformers do it where weights are asked for."""
    return _setup_torch(case, arrays, threads, lambda torch, query, key: torch.softmax(
        query @ key.mT * case.head_dim ** -0.5, dim=-1))


def setup_identity(case: StatisticsCase, arrays: Arrays, options: Options, threads: int) -> Call:
    """scaled_dot_product_attention, which never gives its weights, over the identity as values: its output is they."""
    def way(torch: Any, query: Any, key: Any) -> Any:
        identity = torch.eye(case.kv_len).expand(*key.shape[:2], -1, -1)
        return torch.nn.functional.scaled_dot_product_attention(query, key, identity)

    return _setup_torch(case, arrays, threads, way)


class _Expected:
    """The statistics of the last head from the definition, and what is wrong with those of another."""

    def __init__(self, case: StatisticsCase) -> None:
        (query, key), options = case.make(0)
        options.pop("want")
        twins = [reference.AttentionWeights(query[0, -1].astype(dtype), key[0, -1].astype(dtype), **options)
                 for dtype in (np.float64, np.float32)]
        value, gradient = (array[0, -1] for array in _passed(case))
        named = [name for parts in STATISTICS.values() for name in parts if name not in METHODS]
        everything: Options = dict.fromkeys(named, True) | {"topk": TOP, "map": case.bins}
        last = {"relevance": lambda W, case: W.relevance(value, gradient).map(case.bins),
                "product": lambda W, case: W @ value, "transposed": lambda W, case: W.T @ gradient}
        said = [vars(twin.summary(**everything)) | {name: say(twin, case) for name, say in (METHODS | last).items()}
                for twin in twins]
        self.known = {name: [_flat(each, STATISTICS[name]) for each in said] for name in STATISTICS}
        self.dense = twins[0].dense()
        threshold = _threshold(case)
        self.near = abs(self.dense - threshold) <= NEAR * threshold     # may be kept or not
        self.above = (self.dense >= threshold) & ~self.near
        self.known["sparse"] = [[np.where(self.above | self.near, twin.dense(), 0)] for twin in twins]

    def judge(self, statistic: str, arrays: Sequence[np.ndarray]) -> str | None:
        """None if all is right: weights at the indices too, since two may be equal but for rounding."""
        for array, exact, honest in zip(arrays, *self.known[statistic], strict=True):
            got = array[0, -1]
            if statistic == "key_hits":
                surplus = got - self.above.sum(0)
                if got.dtype.kind != "i" or (surplus < 0).any() or (surplus > self.near.sum(0)).any():
                    return "key_hits is wrong: not the number of weights above the threshold"
                continue
            if statistic == "sparse":
                exact, honest = (np.where(self.near & (got == 0), 0, known) for known in (exact, honest))
            if got.dtype.kind == "i":
                places = np.maximum(got, 0).reshape(len(got), -1)
                got = np.where(got < 0, 0, np.take_along_axis(self.dense, places, -1).reshape(got.shape))
                got = got.astype(np.float32)
                exact, honest = (known[0] for known in self.known["max" if statistic == "argmax" else "topk"])
            error, allowed = error_and_tolerance(got, exact, honest, scale=max(1.0, np.abs(exact).max()))
            if not error <= allowed:
                return f"{statistic} is wrong: error {error:.1e} where {allowed:.1e} is allowed"
        return None


def measure(cases: Sequence[StatisticsCase], threads: int, rounds: int) -> Json:
    """Every case verified, then measured in rounds; a result ready for JSON."""
    found = [_measure(case, threads, rounds, PEERS if at == 0 else {}) for at, case in enumerate(cases)]
    return {**machine.describe(threads), "settings": {"rounds": rounds, "slow_rounds": min(rounds, SLOW_ROUNDS)},
            "cases": found, "passed": all("failed" not in case for case in found)}


def _measure(case: StatisticsCase, threads: int, rounds: int, peers: dict[str, str]) -> Json:
    expected = _Expected(case)
    found: Json = {"name": case.name, "statistics": {name: {} for name in case.asked}, "without": {}}
    workers: dict[str, runner.Worker] = {}

    def verified(name: str, each: StatisticsCase = case) -> Any:
        """The numbers of one call of all that is asked, if its results are right."""
        (lines, *arrays), _ = workers[name].ask("prepare", each, 0, slice(None), False)
        for at, statistic in enumerate(each.asked):
            count = len(expected.known[statistic][0])
            if wrong := expected.judge(statistic, arrays[:count]):
                raise runner.Failed(f"{name}: {wrong}")
            found["statistics"][statistic].setdefault(name, {}).setdefault("memory", _number(lines[1, at]))
            arrays = arrays[count:]
        return lines

    try:
        for statistic in case.asked:      # in a new process, whose memory holds nothing of another's
            workers["attnc"] = runner.Worker(f"{__name__}:setup_attnc", threads)
            verified("attnc", replace(case, asked=(statistic,)))
            if statistic != case.asked[-1]:
                workers.pop("attnc").close()
        for name, way in peers.items():
            workers[name] = runner.Worker(f"{__name__}:setup_{way}", threads)
        _times(found, workers, verified, rounds)
    except runner.Failed as reason:
        found["failed"] = str(reason)
    finally:
        for worker in workers.values():
            worker.close()
    return found


def _times(found: Json, workers: dict[str, runner.Worker], verified: Callable[[str], Any], rounds: int) -> None:
    """Seconds, multiples of plain attention and, where the peers take part, their time over that of attnc."""
    own, plain = [], []
    ratios: dict[str, list[np.ndarray]] = {name: [] for name in workers if name != "attnc"}
    for turn in range(rounds):
        lines = verified("attnc")
        own.append(lines[0])
        plain.append(lines[2])
        for name in list(ratios) if turn < SLOW_ROUNDS else ():
            try:
                ratios[name].append(verified(name)[0] / own[-1])
            except Unsupported as reason:
                found["without"][name] = str(reason)
                del ratios[name]
    for at, entry in enumerate(found["statistics"].values()):
        entry["attnc"]["seconds"] = float(np.median([line[at] for line in own]))
        entry["attnc"]["of_plain"] = spread([a[at] / b[at] for a, b in zip(own, plain, strict=True)])
        for name, kept in ratios.items():
            entry[name]["ratio"] = spread([line[at] for line in kept])


def _number(value: float) -> int | None:
    return None if np.isnan(value) else int(value)


def table(result: Json) -> str:
    """Each statistic as a multiple of plain attention, then the time and the memory of the others over attnc's."""
    first = result["cases"][0]["statistics"]
    names = [name for name in PEERS if all(name in found for found in first.values())]
    header = ["statistic", *(f"x attention, {case['name'].split()[-1]}" for case in result["cases"]), "MB",
              *(f"{name}: time, memory" for name in names)]
    rows = []
    for statistic, found in first.items():
        multiples = [f"{case['statistics'][statistic]['attnc']['of_plain']['median']:.2f}" for case in result["cases"]]
        memory = found["attnc"]["memory"]
        rows.append([SHOWN.get(statistic, statistic), *multiples, f"{memory / 1e6:.0f}" if memory is not None else "-",
                     *(_peer(found[name], memory) for name in names)])
    return report.table(header, rows)


def _peer(entry: Json, memory: int | None) -> str:
    more = f", x {entry['memory'] / memory:,.0f}" if memory and entry["memory"] else ""
    return f"x {entry['ratio']['median']:.1f}{more}"


def main(arguments: list[str] | None = None) -> int:
    return script.run(__doc__, CASES, TINY, measure, table, arguments)
