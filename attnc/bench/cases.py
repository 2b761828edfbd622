"""The shapes that are measured, as data: the cases of a quick look, of the full run, and tiny ones for the tests."""

from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np

from attnc.bench.dense import DenseWeights
from attnc.bench.gradients import Gradients
from attnc.bench.links import SHORT, Softmax, WeightedSum
from attnc.testing import Case

DECODE_ROWS = 8             # up to so many query rows, fetching a key from memory costs more than using it
MEMORY_BYTES = 1 << 28      # beyond every cache
LEAST_COPIED = 1 << 20      # a smaller case is one of calls, not of memory


def case(batch, heads, q_len, kv_len, head_dim, dtype="float32", value_dim=None, **options) -> Case:
    """A case named after its shape; `heads` is one number, or (query heads, key/value heads)."""
    q_heads, kv_heads = heads if isinstance(heads, tuple) else (heads, heads)
    shown = f"{q_heads}/{kv_heads}" if q_heads != kv_heads else q_heads
    depths = head_dim if value_dim in (None, head_dim) else f"{head_dim}/{value_dim}"
    words = [f"{SHORT[dtype]} {batch},{shown},{q_len},{kv_len},{depths}"]
    words += [name for name, value in options.items() if value is True]
    words += ["window {},{}".format(*options["window"])] if "window" in options else []
    words += options.get("want", ())
    return Case(" ".join(words), batch, q_heads, kv_heads, q_len, kv_len, head_dim, value_dim, dtype,
                tuple(options.items()))


@dataclass(frozen=True)
class DrawnCase(Case):
    """A case with a random mask or bias for every row and key.

    Parameters
    ----------
    drawn : {"mask", "bias"}
        A mask allows 7 keys of 8, so that no block of keys can be skipped; a bias is standard normal.
    per_head : bool
        Whether each head has its own, or all share one.
    """

    drawn: str = "mask"
    per_head: bool = False

    def make(self, seed: int):
        """As `Case.make`, with the array among the options."""
        arrays, options = super().make(seed)
        random = np.random.default_rng((seed, 1))
        shape = self.batch, self.q_heads if self.per_head else 1, self.q_len, self.kv_len
        if self.drawn == "mask":
            return arrays, {**options, "mask": random.random(shape, np.float32) < 7 / 8}
        return arrays, {**options, "bias": random.standard_normal(shape, np.float32)}


def drawn(what: str, per_head: bool) -> DrawnCase:
    """The plain case 1,12,1024,1024,64 with a mask or a bias."""
    plain = case(1, 12, 1024, 1024, 64)
    words = f"{plain.name} {what} {'a head' if per_head else 'shared'}"
    return DrawnCase(words, 1, 12, 12, 1024, 1024, 64, drawn=what, per_head=per_head)


def _prefill(dtype):
    """The shapes of encoders, of decoders reading their prompt, and of an image model."""
    return (
        case(1, 12, 512, 512, 64, dtype),
        case(1, 12, 1024, 1024, 64, dtype, causal=True),
        case(1, 16, 2048, 2048, 64, dtype),
        case(1, (32, 8), 2048, 2048, 128, dtype, causal=True),
        case(1, 8, 8192, 8192, 128, dtype, causal=True),
        case(8, 12, 197, 197, 64, dtype),
    )


def _decode(dtype):
    """One or a few new tokens against a cache of keys and values, grouped heads and not."""
    return (
        case(1, (32, 8), 1, 8192, 128, dtype),
        case(1, 32, 1, 4096, 128, dtype),
        case(8, (32, 8), 1, 4096, 128, dtype),
        case(1, (32, 8), 4, 8192, 128, dtype),
    )


def _odd():
    """Depths and lengths that fill no whole vector or register tile, each after the multiple of 16 that holds it."""
    depths = [(case(1, 12, 1024, 1024, depth, value_dim=value_dim)) for depth, value_dim in (
        (48, 48), (40, 40), (80, 80), (72, 72), (96, 96), (160, 160), (192, 128), (256, 256), (576, 512))]
    lengths = [case(1, 12, length, length, 64) for length in (208, 197, 592, 577, 1024, 1023, 1504, 1500)]
    return (*depths, *lengths)


# What a user may come with, each bound by something else. The report has a line for each regime, made of all its cases.
REGIMES = {
    "float32": _prefill("float32"),
    "float64": (*_prefill("float64"), case(1, 12, 1024, 1024, 64, "float64"), case(1, 8, 4096, 4096, 128, "float64")),
    "bfloat16": _prefill("bfloat16")[2:5],
    "float16": _prefill("float16")[2:5],
    "decode": (*_decode("float32"), *_decode("float16"), *_decode("bfloat16")),
    "chunked prefill": (case(1, (32, 8), 256, 8192, 128, causal=True),),
    "short": (case(64, 8, 64, 64, 64), case(8, 12, 128, 128, 64), case(256, 4, 16, 16, 32)),
    "tiny calls": (case(1, 4, 16, 16, 32), case(1, 1, 1, 64, 64), case(1, 1, 8, 8, 16)),
    "odd sizes": _odd(),
    "masks and biases": (drawn("mask", False), drawn("mask", True), drawn("bias", False), drawn("bias", True)),
    "window": (
        case(1, 8, 8192, 8192, 64, causal=True),
        case(1, 8, 8192, 8192, 64, causal=True, window=(127, 0)),
    ),
    "dense weights": (
        case(1, 12, 512, 512, 64, want=("weights",)),
        case(1, 16, 4096, 4096, 64, want=("weights",)),
        case(8, 12, 197, 197, 64, want=("weights",)),
        DenseWeights(case(1, 12, 512, 512, 64)), DenseWeights(case(1, 16, 4096, 4096, 64)),
        DenseWeights(case(8, 12, 197, 197, 64)),
    ),
    "softmax": (
        Softmax((1024, 64)), Softmax((128, 1024)), Softmax((128, 1024), dtype="float64"),
        Softmax((128, 1024), dtype="float16"), Softmax((128, 1024), dtype="bfloat16"),
        Softmax((1024, 128), axis=0), Softmax((16, 64, 128), axis=1), Softmax((128, 1024), function="log_softmax"),
        Softmax((32768, 1024)), Softmax((16384, 1024), dtype="float64"), Softmax((65536, 1024), dtype="bfloat16"),
        Softmax((2048, 16384), axis=0), Softmax((64, 512, 1024), axis=1),
        Softmax((32768, 1024), function="log_softmax"), Softmax((100, 1000000)),
    ),
    "gradients": (Gradients(case(1, 16, 2048, 2048, 64)), Gradients(case(1, (32, 8), 2048, 2048, 128, causal=True))),
    "weighted sum": (WeightedSum(12, 12, 512, 512, 64), WeightedSum(32, 8, 2048, 2048, 128)),
}

SETS = {
    "full": tuple(each for regime in REGIMES.values() for each in regime),
    "quick": (
        case(1, 12, 512, 512, 64),
        case(1, 12, 1024, 1024, 64, causal=True),
        case(8, 12, 197, 197, 64),
        case(1, 12, 512, 512, 64, "float64"),
        case(1, 12, 512, 512, 64, want=("weights",)),
    ),
    "lengths": (
        *(case(1, 8, length, length, 64) for length in (64, 128, 256, 512, 1024, 2048, 4096, 8192)),
        *(case(1, (32, 8), 1, length, 128) for length in (256, 1024, 4096, 16384, 65536)),
    ),
    "tiny": (
        case(1, (4, 2), 9, 9, 8, causal=True),
        case(2, 2, 5, 7, 8, "float64"),
        case(1, 2, 6, 6, 8, want=("weights",)),
        case(1, 2, 1, 33, 8),
        case(1, 2, 40, 40, 8, causal=True, window=(3, 0)),
        DrawnCase("f32 1,2,20,24,8 bias a head", 1, 2, 2, 20, 24, 8, drawn="bias", per_head=True),
        Softmax((6, 50)), Softmax((40, 7), axis=0, dtype="float64"), WeightedSum(4, 2, 9, 11, 8),
        Gradients(case(1, (4, 2), 9, 9, 8, causal=True)), DenseWeights(case(1, 2, 6, 6, 8)),
    ),
}


def regime(name: str) -> str | None:
    """The regime that the case of this name belongs to."""
    return next((each for each, found in REGIMES.items() if any(case.name == name for case in found)), None)


def matches(name: str, pattern: str | None) -> bool:
    """Whether a case's name holds the glob `pattern`."""
    return pattern is None or fnmatchcase(name, f"*{pattern}*")


def select(name: str, pattern: str | None = None) -> tuple[Case, ...]:
    """The cases of set `name` that match `pattern`, of which there must be one."""
    chosen = tuple(each for each in SETS[name] if matches(each.name, pattern))
    if not chosen:
        known = "\n  ".join(each.name for each in SETS[name])
        raise ValueError(f"no case of the {name} set matches {pattern!r}; it has\n  {known}")
    return chosen


def visible(each: Case, options: dict, rows: np.ndarray | None = None) -> np.ndarray | None:
    """Causal and window as one boolean mask of some rows (all by default), bottom-right; None without either."""
    left, right = options.get("window") or (None, None)
    if not options.get("causal") and left is right is None:
        return None
    keys = np.arange(each.kv_len)
    positions = (np.arange(each.q_len) if rows is None else rows)[:, None] + each.kv_len - each.q_len
    keep = np.ones((len(positions), each.kv_len), bool)
    if options.get("causal"):
        keep &= keys <= positions
    if left is not None:
        keep &= keys >= positions - left
    if right is not None:
        keep &= keys <= positions + right
    return keep


def aligned(each: Case, options: dict) -> bool:
    """Whether the causal triangle of a peer that aligns it top-left says all that `visible` would say."""
    return bool(options.get("causal")) and each.q_len == each.kv_len and not options.get("window")


def reads(each) -> bool:
    """Whether so few rows use a key once it has been read that memory decides, not arithmetic."""
    return isinstance(each, Case) and each.q_len <= DECODE_ROWS


def copies(each, arrays: tuple) -> list[tuple]:
    """Inputs for calls in turn: where reading binds a case, so many that no cache holds what the next one reads."""
    if not reads(each) or each.bytes < LEAST_COPIED:
        return [arrays]
    return [arrays, *(tuple(array.copy() for array in arrays) for _ in range(MEMORY_BYTES // each.bytes))]


def wanted(options: dict) -> tuple[str, ...]:
    """The results a case asks for beside the output, always as a tuple."""
    want = options.get("want", ())
    return (want,) if isinstance(want, str) else tuple(want)
