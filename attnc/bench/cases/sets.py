"""The shapes that are measured, as data: the cases of a quick look, of the full run, and tiny ones for the tests."""

from fnmatch import fnmatchcase
from typing import TypeAlias

from attnc.bench.cases.attention import DrawnCase, case, drawn
from attnc.bench.cases.caches import Int8Cache, Latent, Mapped
from attnc.bench.cases.dense import DenseWeights
from attnc.bench.cases.gradients import Gradients
from attnc.bench.cases.links import Softmax, WeightedSum
from attnc.bench.cases.packed import Packed, paged
from attnc.bench.cases.selected import Selected
from attnc.testing import Case

BenchCase: TypeAlias = (Case | Softmax | WeightedSum | Gradients | DenseWeights | Int8Cache | Latent | Mapped
                       | Packed | Selected)


def _prefill(dtype: str) -> tuple[Case, ...]:
    """The shapes of encoders, of decoders reading their prompt, and of an image model."""
    return (
        case(1, 12, 512, 512, 64, dtype),
        case(1, 12, 1024, 1024, 64, dtype, causal=True),
        case(1, 16, 2048, 2048, 64, dtype),
        case(1, (32, 8), 2048, 2048, 128, dtype, causal=True),
        case(1, 8, 8192, 8192, 128, dtype, causal=True),
        case(8, 12, 197, 197, 64, dtype),
    )


def _decode(dtype: str) -> tuple[Case, ...]:
    """One or a few new tokens against a cache of keys and values, grouped heads and not."""
    return (
        case(1, (32, 8), 1, 8192, 128, dtype),
        case(1, 32, 1, 4096, 128, dtype),
        case(8, (32, 8), 1, 4096, 128, dtype),
        case(1, (32, 8), 4, 8192, 128, dtype),
    )


def _odd() -> tuple[Case, ...]:
    """Depths and lengths that fill no whole vector or register tile, each after the multiple of 16 that holds it."""
    depths = [(case(1, 12, 1024, 1024, depth, value_dim=value_dim)) for depth, value_dim in (
        (48, 48), (40, 40), (80, 80), (72, 72), (96, 96), (160, 160), (192, 128), (256, 256), (576, 512))]
    lengths = [case(1, 12, length, length, 64) for length in (208, 197, 592, 577, 1024, 1023, 1504, 1500)]
    return (*depths, *lengths)


def _biases() -> tuple[DrawnCase, ...]:
    """Folding models (small heads, a bias for each pair of residues), T5's bias of the distance, DeBERTa's
    content-relative terms, Swin's windows."""
    pairs = [drawn("bias", True, case(24, heads, 384, 384, depth), "pair bias") for heads, depth in (
        (8, 8), (4, 16), (4, 32))]
    return (*pairs, drawn("relative_bias", True, case(1, 12, 512, 512, 64, scale=1.0), "T5's bias"),
            drawn("tables", True, case(1, 12, 512, 512, 64), "DeBERTa's terms"),
            drawn("bias", True, case(512, 3, 49, 49, 32), "window bias"))


EMBEDDED = 8, 31, 64, 110, 190, 256, 380, 512   # tokens of the sentences of a batch

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
    "biases of models": _biases(),
    "blocks of keys": (drawn("block_mask", False, case(1, 2, 8192, 8192, 64), "10 % of blocks"),),
    "cross-attention": (case(2, 8, 4096, 77, 40), case(1, 12, 512, 64, 64)),
    "window": (
        case(1, 8, 8192, 8192, 64, causal=True),
        case(1, 8, 8192, 8192, 64, causal=True, window=(127, 0)),
    ),
    "caches": (
        Int8Cache(case(1, (32, 8), 1, 8192, 128)), Latent(case(1, (128, 1), 1, 4096, 576, value_dim=512)),
        Mapped(case(1, 8, 1, 65536, 64)),
    ),
    "packed sequences": (
        Packed("of 8 to 512 tokens", EMBEDDED, EMBEDDED, 12, 12, 64),
        Packed("a prompt and 7 new tokens", (128, *[1] * 7), (2048, 4096, 3000, 2500, 1500, 800, 300, 64), 32, 8, 128,
               causal=True),
        paged(16, 32, 8, 128, (4096, 3500, 3000, 2500, 2000, 1500, 1000, 500)),
    ),
    "lists of keys": (Selected(case(1, (64, 1), 64, 32768, 128), 2048),),
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
    "gradients": (Gradients(case(1, 16, 2048, 2048, 64)), Gradients(case(1, (32, 8), 2048, 2048, 128, causal=True)),
                  *(Gradients(case(1, 12, 1024, 1024, 64, dtype)) for dtype in ("float64", "float16", "bfloat16"))),
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
        drawn("relative_bias", True, case(2, 2, 9, 12, 8)), drawn("block_mask", False, case(1, 2, 140, 300, 8)),
        Softmax((6, 50)), Softmax((40, 7), axis=0, dtype="float64"), WeightedSum(4, 2, 9, 11, 8),
        Gradients(case(1, (4, 2), 9, 9, 8, causal=True)), DenseWeights(case(1, 2, 6, 6, 8)),
        Int8Cache(case(1, (4, 2), 1, 33, 8)), Latent(case(1, (12, 1), 1, 30, 8, value_dim=4)),
        Mapped(case(1, 2, 1, 90, 8), chunk=40), Packed("of 2 and 9 tokens", (2, 9), (5, 9), 4, 2, 8, causal=True),
        paged(4, 4, 2, 8, (5, 9, 3)), Selected(case(2, (4, 2), 5, 40, 8), 7),
    ),
}


def regime(name: str) -> str | None:
    """The regime that the case of this name belongs to."""
    return next((each for each, found in REGIMES.items() if any(case.name == name for case in found)), None)


def matches(name: str, pattern: str | None) -> bool:
    """Whether a case's name holds the glob `pattern`, or its regime is of that name."""
    return pattern is None or fnmatchcase(name, f"*{pattern}*") or regime(name) == pattern


def select(name: str, pattern: str | None = None) -> tuple[BenchCase, ...]:
    """The cases of set `name` that match `pattern`, of which there must be one."""
    chosen = tuple(each for each in SETS[name] if matches(each.name, pattern))
    if not chosen:
        known = "\n  ".join(each.name for each in SETS[name])
        raise ValueError(f"no case of the {name} set matches {pattern!r}; it has\n  {known}")
    return chosen
