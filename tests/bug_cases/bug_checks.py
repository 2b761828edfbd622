"""An oracle in long double, written apart from attnc's reference, and the comparison of results with it."""

import ctypes
import mmap

import ml_dtypes
import numpy as np

from attnc import reference
from attnc.testing import assert_within

F16, F32, F64, BF16 = np.dtype("f2"), np.dtype("f4"), np.dtype("f8"), np.dtype(ml_dtypes.bfloat16)
DTYPES = (F32, F64, F16, BF16)
EXTRA = ("weights", "lse")


def randn(seed, shape, dtype=F32):
    """Standard normal numbers; `seed` may be a generator."""
    random = np.random.default_rng(seed)
    return random.standard_normal(shape).astype(dtype)


def qkv(seed, lead, q_len, kv_len, depth, value_dim=None, dtype=F32, kv_heads=None):
    """Query, key and value of leading axes `lead`, whose last is the number of query heads."""
    random = np.random.default_rng(seed)
    kv_lead = lead if kv_heads is None else (*lead[:-1], kv_heads)
    shapes = (*lead, q_len, depth), (*kv_lead, kv_len, depth), (*kv_lead, kv_len, value_dim or depth)
    return [randn(random, shape, dtype) for shape in shapes]


def rows_of_scores(scores, dtype):
    """Query, key and value whose scores are those given (scale 1), with all values 1."""
    scores = np.asarray(scores).astype(dtype)
    return np.ones((1, 1), dtype), scores[:, None], np.ones((scores.size, 1), dtype)


# ------------------------------------------------------------------------------------------------ the oracle


def wide(x):
    return np.asarray(x).astype(np.longdouble)


def allowed_keys(shape, mask=None, bias=None, causal=False, window=None):
    """Which of (..., q_len, kv_len) take part, with bottom-right alignment."""
    q_len, kv_len = shape[-2:]
    distance = np.arange(kv_len) - (np.arange(q_len)[:, None] + kv_len - q_len)
    allowed = np.ones(shape, bool)
    if causal:
        allowed &= distance <= 0
    left, right = window or (None, None)
    if left is not None:
        allowed &= distance >= -left
    if right is not None:
        allowed &= distance <= right
    if mask is not None:
        allowed &= mask
    if bias is not None:
        allowed &= wide(bias) != -np.inf
    return allowed


def oracle(query, key, value, *, mask=None, bias=None, causal=False, window=None, softcap=None, scale=None):
    """Output, weights, lse and scores of finite inputs, in long double."""
    query, key, value = wide(query), wide(key), wide(value)
    if query.ndim > 2 and key.shape[-3] != query.shape[-3]:
        key, value = (np.repeat(x, query.shape[-3] // x.shape[-3], -3) for x in (key, value))
    scale = (1 / np.sqrt(np.longdouble(query.shape[-1])) if query.shape[-1] else 1) if scale is None else wide(scale)
    scores = query @ np.swapaxes(key, -1, -2) * scale
    allowed = allowed_keys(scores.shape, mask, bias, causal, window)
    if softcap:
        scores = softcap * np.tanh(scores / softcap)
    if bias is not None:
        scores = scores + np.where(np.isneginf(wide(bias)), 0, wide(bias))
    top = scores.max(-1, keepdims=True, where=allowed, initial=-np.inf)
    top = np.where(np.isneginf(top), 0, top)
    shares = np.where(allowed, np.exp(np.where(allowed, scores - top, 0)), 0)
    total = shares.sum(-1, keepdims=True)
    weights = shares / np.where(total == 0, 1, total)
    with np.errstate(divide="ignore"):
        lse = (top + np.log(total))[..., 0]
    return {"output": weights @ value, "weights": weights, "lse": lse, "scores": np.where(allowed, scores, 0),
            "allowed": allowed}


def softmax_oracle(x, axis=-1):
    x = wide(x)
    shares = np.exp(x - x.max(axis, keepdims=True))
    return shares / shares.sum(axis, keepdims=True)


# ------------------------------------------------------------------------------------------------ comparison


def largest(x):
    return float(np.abs(wide(x)).max(initial=0))


def check(api, query, key, value, *, exact=None, **options):
    """Output, weights and lse within tolerance of the oracle, with and without the extras; inputs unchanged."""
    inputs = [x for x in (query, key, value, options.get("mask"), options.get("bias")) if x is not None]
    before = [np.array(x, copy=True) for x in inputs]
    exact = oracle(query, key, value, **options) if exact is None else exact
    honest = reference.attention(query, key, value, want=EXTRA, **options)
    result = api.attention(query, key, value, want=EXTRA, **options)
    scales = {"output": largest(value), "weights": 1, "lse": max(1, largest(exact["scores"]),
                                                                 largest(exact["lse"][np.isfinite(exact["lse"])]))}
    for name, scale in scales.items():
        assert_within(getattr(result, name), exact[name], getattr(honest, name), scale=scale, name=name)
    assert not result.weights[~exact["allowed"]].any(), "a weight of a key that takes no part is not exactly 0"
    assert_same_bytes(api.attention(query, key, value, **options), result.output)
    for x, old in zip(inputs, before, strict=True):
        assert_same_bytes(x, old)
    return result


def check_softmax(api, x, axis=-1):
    """A softmax within tolerance of the oracle."""
    result = api.softmax(x, axis)
    assert_within(result, softmax_oracle(x, axis), reference.softmax(x, axis), name="softmax")
    return result


def assert_same_bytes(a, b):
    """Equal dtype, shape and bytes."""
    assert a.dtype == b.dtype and a.shape == b.shape
    assert np.ascontiguousarray(a).tobytes() == np.ascontiguousarray(b).tobytes(), "bits differ"


# ------------------------------------------------------------------------------------------------ memory


def buried(x, pad=70):
    """The same values as a view in the middle of a buffer of NaN."""
    buffer = np.full(x.size + 2 * pad, np.nan, x.dtype)
    view = buffer[pad:pad + x.size].reshape(x.shape)
    view[...] = x
    return view


def before_guard(x):
    """A copy whose last byte is the last one before memory that may not be read."""
    page, size = mmap.PAGESIZE, x.size * x.itemsize
    pages = -(-size // page)
    memory = mmap.mmap(-1, (pages + 1) * page)
    guard = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + pages * page
    if ctypes.CDLL(None, use_errno=True).mprotect(ctypes.c_void_p(guard), ctypes.c_size_t(page), 0):
        raise OSError(ctypes.get_errno(), "mprotect")
    view = np.frombuffer(memory, np.uint8, size, pages * page - size).view(x.dtype).reshape(x.shape)
    view[...] = x
    return view
