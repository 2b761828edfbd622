"""Hold a fast function against its twin by the derived tolerance, on made inputs; and see which path a call takes."""

import contextlib
import inspect
import itertools
import os
import threading
from types import SimpleNamespace

import ml_dtypes
import numpy as np

import attnc
from attnc import _call, _isa, masks, reference
from attnc._checks import attention_args
from attnc.reference import _scores
from attnc.testing import assert_within, exact_attention, tolerance

SEED = int(os.environ.get("ATTNC_SEED", "0"))       # of all random inputs
DTYPES = ("float32", "float64", "float16", "bfloat16")
WANT = ("lse", "weights", "scores")
ORDERS, FEW_ROWS = 4, 256       # a twin of fewer rows adds its terms in this many other orders too
# q_heads, kv_heads, q_len, kv_len, head_dim, value_dim: few rows in one block of keys; few rows, keys split over tasks;
# rows that fill vectors, and keys that are whole ones; rows in several tasks with shared keys
PATHS = {"few": (6, 3, 3, 70, 20, 20), "split": (4, 2, 3, 2100, 9, 5), "strips": (4, 2, 7, 150, 32, 64),
         "shared": (4, 2, 36, 530, 8, 12)}
PATH_OF = {"few": "in_place", "split": "in_place", "strips": "strips", "shared": "packed"}


def dtypes_in_turn(*axes):
    """Each combination of the axes with two of the dtypes, in turn: every value meets all four.

    A dtype has a load and a store of its own; beside these there are two types to compute in. So the parity of a
    combination chooses float32 and float64, or the two of 16 bits.
    """
    pairs = ("float32", "float64"), ("float16", "bfloat16")
    return [(*(value for _, value in places), dtype)
            for places in itertools.product(*map(enumerate, axes))
            for dtype in pairs[sum(place for place, _ in places) % 2]]


@contextlib.contextmanager
def kernels(isa):
    """The kernels of an instruction set. For the whole process, as monkeypatch would; but the tests that do no more to
    it may run in several threads (make test-parallel)."""
    before = _isa.isa()
    _isa.use(isa)
    try:
        yield
    finally:
        _isa.use(before)


def dtype_of(name):
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def normal(random, shape, dtype="float32"):
    """Standard normal numbers in a dtype given by name."""
    return random.standard_normal(shape).astype(dtype_of(dtype))


def inputs(random, batch=(2,), q_heads=2, kv_heads=2, q_len=5, kv_len=7, head_dim=8, value_dim=None, dtype="float32"):
    """Query, key and value."""
    value_dim = head_dim if value_dim is None else value_dim
    shapes = (q_heads, q_len, head_dim), (kv_heads, kv_len, head_dim), (kv_heads, kv_len, value_dim)
    return [normal(random, (*batch, *shape), dtype) for shape in shapes]


def largest(x):
    """The largest finite magnitude."""
    magnitude = np.abs(np.asarray(x, np.longdouble))
    return float(magnitude.max(initial=0, where=np.isfinite(magnitude)))


def largest_visible(arguments):
    """The largest finite magnitude of the values that some row may see."""
    seen = masks.allowed(arguments).any(-2)
    group = arguments.q_heads // arguments.kv_heads if arguments.kv_heads else 1
    seen = seen.reshape(*seen.shape[:-2], arguments.kv_heads, group, arguments.kv_len).any(-2)
    value = np.broadcast_to(arguments.value, (*arguments.batch, *arguments.value.shape[-3:]))
    return largest(np.where(seen[..., None], value.astype(arguments.acc), 0))


_expected = {}
sharing = threading.RLock()     # what the threads of a test share: the twins' answers, and their product


def expected(function, *arrays, **options):
    """What a function of the reference gives; the last few answers are kept for the next instruction set."""
    parts = (*arrays, *options.items())
    frozen = [(x.dtype.str, x.shape, x.tobytes()) if isinstance(x, np.ndarray) else repr(x)
              for part in parts for x in (part if isinstance(part, tuple) else (part,))]
    name = (function.__module__, function.__name__, *frozen)
    with sharing:
        if name not in _expected:
            if len(_expected) >= 8:
                del _expected[next(iter(_expected))]
            _expected[name] = function(*arrays, **options)
        return _expected[name]


def twins(query, key, value, **options):
    """Exact and honest result, and the scale of each part's rounding errors."""
    exact = exact_attention(query, key, value, **options)
    honest = reference.attention(query, key, value, want=WANT, **options)
    arguments = attention_args(query, key, value, **options)
    scale = {"output": largest_visible(arguments), "weights": 1.0, "scores": max(1.0, largest(exact.scores))}
    scale["lse"] = max(scale["scores"], largest(exact.lse))
    return exact, honest, scale


@contextlib.contextmanager
def in_order(order):
    """The reference with products whose terms are added one after another, in one of the orders there are.

    How well NumPy's own product rounds depends on the BLAS it was built with and the processor: some add the terms of
    a small product in as many sums as a vector has lanes, with a fraction of the error.
    """
    def product(query, key):
        batch = np.broadcast_shapes(query.shape[:-2], key.shape[:-2])
        total = np.zeros((*batch, query.shape[-2], key.shape[-2]), query.dtype)
        depths = np.arange(query.shape[-1])
        for d in np.random.default_rng(order).permutation(depths) if order else depths:
            total += query[..., d, None] * key[..., None, :, d]
        return total

    with sharing:
        before, _scores.product = _scores.product, product
        try:
            yield
        finally:
            _scores.product = before


def farthest(twin, exact, rows):
    """What `twin()` gives, each part by the order of summation in which its error is the largest.

    `exact` is an array, or the arrays of a result by name. The order of a sum is free. In a case of a few rows the
    largest error of one order is a matter of luck, that of a few orders is the formula's. The number of rows alone says
    which orders, so the tolerance is known before a result is seen.
    """
    found = [twin()]
    for order in range(ORDERS if rows < FEW_ROWS else 0):
        with in_order(order):
            found.append(twin())
    if isinstance(exact, np.ndarray):
        return max(found, key=lambda honest: tolerance(exact, honest))
    return SimpleNamespace(**{name: max((getattr(result, name) for result in found),
                                        key=lambda part, wanted=exact[name]: tolerance(wanted, part))
                              for name in vars(found[0])})


def judges(query, key, value, **options):
    """`twins`, whose honest result is that of the order of summation that errs most."""
    exact, honest, scale = twins(query, key, value, **options)
    return exact, farthest(lambda: reference.attention(query, key, value, want=WANT, **options), vars(exact),
                           honest.lse.size), scale


def judges_of_scores(query, key, stage, **options):
    """Exact and honest scores of a stage."""
    exact = wide_scores(query, key, stage, **options)
    return exact, farthest(lambda: reference.attention_scores(query, key, stage=stage, **options), exact,
                           exact.size // max(exact.shape[-1], 1))


def check_attention(query, key, value, want=WANT, out=None, num_threads=None, **options):
    """`attnc.attention` with all it can give, within tolerance of the reference one precision up; the result."""
    exact, honest, scale = expected(judges, query, key, value, **options)
    got = attnc.attention(query, key, value, want=want, out=out, num_threads=num_threads, **options)
    found = vars(got) if want else {"output": got}
    for name, array in found.items():
        assert_within(array, getattr(exact, name), getattr(honest, name), scale=scale[name], name=name)
    return got


def check_scores(query, key, stage, **options):
    """`attnc.attention_scores` within tolerance of its twin in a wider precision."""
    exact, honest = expected(judges_of_scores, query, key, stage=stage, **options)
    got = attnc.attention_scores(query, key, stage=stage, **options)
    assert_within(got, exact, honest, scale=max(1.0, largest(exact)), name=stage)
    return got


def wide_scores(query, key, stage, **options):
    """Scores of a stage, one precision up."""
    a = attention_args(query, key, None, **options)
    a.acc = np.dtype(np.longdouble if a.acc == np.float64 else np.float64)
    with np.errstate(all="ignore"):
        if stage == "masked":
            return _scores.masked_scores(a, masks.allowed(a)).reshape(a.weights_shape)
        scores = np.where(masks.within_lengths(a), _scores.unmasked_scores(a, stage), -np.inf)
        return scores.reshape(a.weights_shape)


@contextlib.contextmanager
def plans():
    """Collect the Plan of each call within, how it is cut; the fast entry, which has none, is closed for them."""
    taken, run, run_fast = [], _call.run, _call.run_fast

    def watched(*arguments, **arrays):
        taken.append(run(*arguments, **arrays))
        return taken[-1]

    _call.run, _call.run_fast = watched, lambda *arguments: None
    try:
        yield taken
    finally:
        _call.run, _call.run_fast = run, run_fast


def same_bits(a, b):
    """Whether two results are equal to the bit, NaN payloads aside."""
    a, b = np.ascontiguousarray(a), np.ascontiguousarray(b)
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    bits = f"u{a.dtype.itemsize}"
    return bool(((a.view(bits) == b.view(bits)) | (np.isnan(a) & np.isnan(b))).all())


def assert_same_bits(a, b, name="result"):
    """Results, or results with names, equal to the bit."""
    if isinstance(a, attnc.AttentionResult):
        for part in vars(a):
            assert_same_bits(getattr(a, part), getattr(b, part), part)
        return
    if not same_bits(a, b):
        wide = [np.asarray(x).astype(np.float64) for x in (a, b)]
        differs = [] if a.shape != b.shape else np.argwhere(~((wide[0] == wide[1]) | np.isnan(wide[0] + wide[1])))
        raise AssertionError(f"{name}: {a.dtype} {a.shape} and {b.dtype} {b.shape} differ in bits, "
                             f"{len(differs)} places, first {[d.tolist() for d in differs[:3]]}")


def parameters(function):
    """Name, kind and default of each parameter: all of a signature but its annotations."""
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]
