"""The shapes that are measured, as data: the cases of a quick look, of the full run, and tiny ones for the tests."""

from fnmatch import fnmatchcase

import numpy as np

from attnc.testing import Case

_SHORT = {"float32": "f32", "float64": "f64", "float16": "f16", "bfloat16": "bf16"}


def case(batch, heads, q_len, kv_len, head_dim, dtype="float32", **options) -> Case:
    """A case named after its shape; `heads` is one number, or (query heads, key/value heads)."""
    q_heads, kv_heads = heads if isinstance(heads, tuple) else (heads, heads)
    shown = f"{q_heads}/{kv_heads}" if q_heads != kv_heads else q_heads
    words = [f"{_SHORT[dtype]} {batch},{shown},{q_len},{kv_len},{head_dim}"]
    words += [name for name, value in options.items() if value is True]
    words += ["window {},{}".format(*options["window"])] if "window" in options else []
    words += options.get("want", ())
    return Case(" ".join(words), batch, q_heads, kv_heads, q_len, kv_len, head_dim, dtype=dtype,
                options=tuple(options.items()))


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


_WEIGHTS = (
    case(1, 12, 512, 512, 64, want=("weights",)),
    case(1, 16, 4096, 4096, 64, want=("weights",)),
    case(8, 12, 197, 197, 64, want=("weights",)),
)

_WINDOW = (
    case(1, 8, 8192, 8192, 64, causal=True),
    case(1, 8, 8192, 8192, 64, causal=True, window=(127, 0)),
)

SETS = {
    "full": (*_prefill("float32"), *_prefill("float64"), *_WEIGHTS, *_WINDOW),
    "quick": (
        case(1, 12, 512, 512, 64),
        case(1, 12, 1024, 1024, 64, causal=True),
        case(8, 12, 197, 197, 64),
        case(1, 12, 512, 512, 64, "float64"),
        case(1, 12, 512, 512, 64, want=("weights",)),
    ),
    "tiny": (
        case(1, (4, 2), 9, 9, 8, causal=True),
        case(2, 2, 5, 7, 8, "float64"),
        case(1, 2, 6, 6, 8, want=("weights",)),
        case(1, 2, 1, 33, 8),
        case(1, 2, 40, 40, 8, causal=True, window=(3, 0)),
    ),
}


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


def rows_per_key(each: Case) -> int:
    """How many query rows use one key once it has been read: what decides between arithmetic and memory."""
    return each.q_len * each.q_heads // max(each.kv_heads, 1)


def wanted(options: dict) -> tuple[str, ...]:
    """The results a case asks for beside the output, always as a tuple."""
    want = options.get("want", ())
    return (want,) if isinstance(want, str) else tuple(want)
