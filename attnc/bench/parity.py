"""Is it right? Every public function against its NumPy twin, and every contender before it is timed."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np

import attnc
import attnc.datasets
from attnc import reference
from attnc.bench import Arrays, Options
from attnc.bench.cases import ADDED, added, visible, wanted
from attnc.bench.report import table
from attnc.bench.twins import beside_the_chain, largest, wide
from attnc.testing import Case, error_and_tolerance, exact_attention

# Scores the reference of one case may hold, larger cases are verified in some rows; long double has no BLAS.
VERIFIED_SCORES = {"float64": 1 << 20, "narrower": 1 << 23}
REAL = ("turkish", "coreference")
# Public names that compute nothing: classes of results, the process and its threads, pictures.
WITHOUT_NUMBERS = {"AttentionGradients", "AttentionResult", "explorer", "get_num_threads", "isa", "set_num_threads",
                   "show_config"}


@dataclass(frozen=True)
class Line:
    """One line of the parity table."""

    function: str
    case: str
    error: float
    tolerance: float

    @property
    def passed(self) -> bool:
        return bool(self.error <= self.tolerance)


def _random_inputs() -> Iterator[tuple[str, Arrays, Options]]:
    """Small cases, one for each thing that takes another path: name, arrays, options."""
    grouped = Case("f32 grouped causal", 2, 4, 2, 17, 33, 16, options=(("causal", True),))
    yield grouped.name, *grouped.make(1)
    wider = Case("f64 mask, bias, Dv 24", 1, 3, 3, 21, 40, 16, value_dim=24, dtype="float64")
    arrays, options = wider.make(2)
    random = np.random.default_rng(3)
    mask = random.random((21, 40)) < 0.7
    mask[4] = False
    yield wider.name, arrays, {**options, "mask": mask, "bias": random.standard_normal((3, 1, 40))}
    long = Case("f32 few rows, many keys", 1, 4, 1, 1, 3000, 64)
    yield long.name, *long.make(4)
    half = Case("f16", 1, 2, 2, 9, 70, 32, dtype="float16")
    yield half.name, *half.make(5)
    every = Case("f32 every option", 2, 4, 2, 13, 29, 16)
    arrays, options = every.make(7)
    yield every.name, arrays, options | {
        "causal": True, "window": (20, None), "scale": 0.3, "softcap": 4.0, "sinks": random.standard_normal(4),
        "alibi_slopes": attnc.alibi_slopes(4), "bias": random.standard_normal((4, 13, 29)),
        "mask": random.random((13, 29)) < 0.8, "q_segments": np.repeat([0, 1], [6, 7]),
        "k_segments": np.repeat([0, 1], [15, 14]), "q_lengths": [13, 9], "kv_lengths": [29, 20]}
    if find_spec("ml_dtypes"):
        brain = Case("bf16", 1, 2, 2, 9, 70, 32, dtype="bfloat16")
        yield brain.name, *brain.make(6)


def _inputs() -> Iterator[tuple[str, Arrays, Options]]:
    for name in REAL:
        data = attnc.datasets.load(name)
        yield name, (data.query, data.key, data.value), {}
    yield from _random_inputs()


def steps() -> int:
    """How often `check` reports progress."""
    return sum(1 for _ in _inputs())


def check(progress: Callable[[str], None] | None = None) -> list[Line]:
    """Compare every public function with its twin on the shipped real inputs and on a few random cases.

    What is beside the chain is compared where results accumulate in float32. `progress` is called with the name of
    each case that is done.
    """
    lines: list[Line] = []
    for case, arrays, options in _inputs():
        lines += _check_case(case, arrays, options)
        if progress is not None:
            progress(case)
    return lines


def _check_case(case: str, arrays: Arrays, options: Options) -> Iterator[Line]:
    """One line for each result; the functions of a matrix get the twin's own scores and weights."""
    query, key, value = arrays
    exact = exact_attention(*arrays, **options)
    scores = reference.attention_scores(query, key, **options)
    weights = reference.attention_weights(query, key, **options)
    log_weights = reference.log_softmax(scores.astype(np.float64))
    of_scores, of_value = max(1.0, largest(exact.scores)), largest(value)

    def compare(function: str, given: Arrays, exact: np.ndarray, size: float, /, **arguments: Any) -> Line:
        got, honest = (getattr(module, function)(*given, **arguments) for module in (attnc, reference))
        return Line(function, case, *error_and_tolerance(got, exact, honest, scale=size))

    yield compare("attention_scores", (query, key), exact.scores, of_scores, **options)
    yield compare("softmax", (scores,), np.exp(log_weights), 1.0)
    yield compare("log_softmax", (scores,), log_weights, max(of_scores, largest(log_weights)))
    yield compare("attention_weights", (query, key), exact.weights, 1.0, **options)
    yield compare("weighted_sum", (weights, value), reference.weighted_sum(*wide((weights, value))), of_value)
    yield compare("attention", arrays, exact.output, of_value, **options)
    got, honest = (module.attention(*arrays, want="lse", **options).lse for module in (attnc, reference))
    yield Line("attention lse", case, *error_and_tolerance(got, exact.lse, honest,
                                                           scale=max(of_scores, largest(exact.lse))))
    if honest.dtype == np.float32:
        for trio in beside_the_chain(arrays, options):
            yield Line(trio.function, case, *error_and_tolerance(*trio[1:4], scale=trio.scale))


def show(lines: list[Line]) -> str:
    """The parity table as text: of each function every line that failed, or the one that came nearest to it."""
    rows = []
    for function in dict.fromkeys(line.function for line in lines):
        own = [line for line in lines if line.function == function]
        failed = [line for line in own if not line.passed]
        for line in failed or [max(own, key=lambda line: line.error / line.tolerance if line.error else 0.0)]:
            rows.append([function, str(len(own)), line.case, f"{line.error:.1e}", f"{line.tolerance:.1e}",
                         "pass" if line.passed else "FAIL"])
    return table(["function", "cases", "nearest to its tolerance", "largest error", "tolerance", ""], rows)


class Expected:
    """What a benchmark case must give: the float64 reference, and the twin, whose error sets the tolerance.

    Attributes
    ----------
    rows : ndarray of int
        The query rows that are looked at: all of them, or for a large case evenly spaced ones with first and last.
    """

    def __init__(self, case: Case, seed: int) -> None:
        (query, key, value), options = case.make(seed)
        per_row = max(1, case.batch * case.q_heads * case.kv_len)
        budget = VERIFIED_SCORES["float64" if case.dtype == "float64" else "narrower"]
        count = min(case.q_len, max(2, budget // per_row))
        self.rows = np.unique(np.linspace(0, case.q_len - 1, count).astype(np.intp))
        options = {name: value for name, value in options.items() if name != "want"}
        mask = visible(case, options, self.rows)    # the rows are picked out, so each carries what it may see
        options = {name: value for name, value in options.items() if name not in ("causal", "window")}
        given = added(case, options, self.rows)
        options = {name: value for name, value in options.items() if name not in ADDED}
        if given is not None:
            options["mask" if given.dtype == bool else "bias"] = given
        if mask is not None:
            options["mask"] = mask
        arrays = query[..., self.rows, :], key, value
        names = ("output", *wanted(dict(case.options)))
        exact = exact_attention(*arrays, **options)
        honest = reference.attention(*arrays, want=("weights",), **options)
        self.exact, self.honest = ([getattr(result, name) for name in names] for result in (exact, honest))
        self.scales = (largest(value), 1.0)

    def judge(self, results: Sequence[np.ndarray]) -> tuple[float, float]:
        """The error and the tolerance of the worst of `results`: output, then weights if the case wants them."""
        if len(results) != len(self.exact):
            raise ValueError(f"{len(results)} results, wanted {len(self.exact)}")
        pairs = [error_and_tolerance(*four[:3], scale=four[3])
                 for four in zip(results, self.exact, self.honest, self.scales, strict=False)]
        return max(pairs, key=lambda pair: pair[0] / pair[1])
