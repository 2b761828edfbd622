"""Fused attention against the reference one precision up: every option, dtype, shape and instruction set."""

from itertools import combinations

import numpy as np
import pytest
from checking import PATHS, check_attention, dtypes_in_turn, inputs, normal
from slow import NAMES, some_option

import attnc
from attnc import datasets
from attnc.bench import cases
from attnc.testing import Case

# batch, q_heads, kv_heads, q_len, kv_len, head_dim, value_dim: lengths and depths beside every multiple of a vector,
# a register tile, a block; none is a power of two except where the boundary itself is meant
SHAPES = [
    ((), 1, 1, 1, 1, 1, 1),
    ((), 1, 1, 1, 147, 16, 16),
    ((), 2, 2, 113, 203, 59, 59),
    ((1,), 1, 1, 1023, 1024, 8, 8),
    ((2,), 6, 2, 7, 65, 111, 30),
    ((2,), 4, 1, 33, 513, 257, 3),
    ((3, 2), 3, 3, 5, 11, 1, 17),
    ((), 8, 2, 16, 129, 40, 128),       # q_len * group = 64: the last size of few rows
    ((), 8, 2, 17, 129, 40, 128),       # and the first beyond
    ((), 8, 8, 1, 3001, 64, 64),        # decoding: keys split
    ((2,), 8, 1, 3, 2049, 32, 48),
    ((), 2, 1, 97, 1025, 64, 64),       # one row into the second block of queries, one key into the third of keys
    ((), 1, 1, 13, 70, 600, 600),
    ((), 1, 1, 70, 70, 1100, 2),
    ((2,), 2, 2, 4, 0, 8, 8),
    ((2,), 2, 2, 0, 4, 8, 8),
    ((0,), 2, 2, 3, 4, 8, 8),
    ((2,), 0, 0, 3, 4, 8, 8),
    ((2,), 2, 1, 3, 4, 0, 8),
    ((2,), 2, 1, 3, 4, 8, 0),
    ((), 2, 1, 70, 4, 0, 0),
    ((), 5, 1, 2, 70, 64, 80),          # 10, 8 and 15 rows: two wide register tiles, a high one, two of them
    ((), 8, 1, 1, 70, 64, 80),
    ((), 5, 1, 3, 130, 64, 144),
    ((), 2, 1, 7, 4, 0, 3),            # 14 rows fill vectors, of no depth
]


def shape_id(shape):
    batch, q_heads, kv_heads, *rest = shape
    return f"{batch},{q_heads}/{kv_heads},{rest}".replace(" ", "")


@pytest.mark.parametrize("shape, causal, dtype", dtypes_in_turn(SHAPES, [False, True]),
                         ids=lambda x: shape_id(x) if isinstance(x, tuple) else str(x))
def test_shapes(isa, shape, causal, dtype, seed):
    arrays = inputs(np.random.default_rng(seed), *shape, dtype=dtype)
    check_attention(*arrays, causal=causal)


@pytest.mark.parametrize("name, path, dtype", dtypes_in_turn(NAMES, PATHS))
def test_each_option(isa, name, path, dtype, seed):
    random = np.random.default_rng([seed, len(name), len(path)])
    q_heads, _, q_len, kv_len, dim, _ = PATHS[path]
    arrays = inputs(random, (2,), *PATHS[path], dtype=dtype)
    check_attention(*arrays, **some_option(name, random, (2,), q_heads, q_len, kv_len, dim))


@pytest.mark.parametrize("names", list(combinations(NAMES, 2)), ids="-".join)
def test_pairs_of_options(isa, names, seed):
    path = list(PATHS)[sum(map(NAMES.index, names)) % len(PATHS)]
    random = np.random.default_rng([seed, *map(len, names)])
    q_heads, _, q_len, kv_len, dim, _ = PATHS[path]
    options = {}
    for name in names:
        options |= some_option(name, random, (2,), q_heads, q_len, kv_len, dim)
    check_attention(*inputs(random, (2,), *PATHS[path]), **options)


@pytest.mark.parametrize("layout, chance, path, dtype", dtypes_in_turn(["bhnd", "bnhd"], [0.3, 0.7], PATHS))
def test_many_options(isa, path, chance, layout, dtype, seed):
    random = np.random.default_rng([seed, int(10 * chance)])
    q_heads, _, q_len, kv_len, dim, _ = PATHS[path]
    arrays = inputs(random, (2,), *PATHS[path], dtype=dtype)
    options = {}
    for name in NAMES:
        if random.random() < chance:
            options |= some_option(name, random, (2,), q_heads, q_len, kv_len, dim)
    if layout == "bnhd":
        arrays = [np.ascontiguousarray(x.swapaxes(-2, -3)) for x in arrays]
    check_attention(*arrays, layout=layout, **options)


@pytest.mark.parametrize("mixed", [
    ("float16", "float32", "float32"), ("float32", "bfloat16", "bfloat16"), ("float16", "bfloat16", "float16"),
    ("float32", "float32", "float64"), ("float64", "float16", "bfloat16"), ("bfloat16", "bfloat16", "float16"),
    ("bfloat16", "bfloat16", "float32"), ("bfloat16", "bfloat16", "float64")], ids="-".join)
@pytest.mark.parametrize("path", PATHS)
def test_mixed_dtypes(isa, path, mixed, seed):
    random = np.random.default_rng(seed)
    arrays = inputs(random, (2,), *PATHS[path])
    check_attention(*(normal(random, x.shape, name) for x, name in zip(arrays, mixed, strict=True)), causal=True)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_bias_of_every_dtype(isa, dtype, seed):
    random = np.random.default_rng(seed)
    for acc in ("float32", "float64"):
        check_attention(*inputs(random, (2,), 4, 2, 33, 70, dtype=acc), bias=normal(random, (2, 1, 33, 70), dtype))


def test_bools_and_integers_count_as_float64(isa):
    random = np.random.default_rng(0)
    query, key = random.random((3, 8)) < 0.5, random.integers(-3, 3, (5, 8))
    value = random.integers(0, 9, (5, 2), np.int8)
    got = check_attention(query, key, value)
    assert got.output.dtype == np.float64


BATCHES = [((), (), ()), ((2,), (), (2,)), ((3, 1), (2,), (1, 1)), ((1, 2, 1), (3, 1, 2), (2,)),
           ((2, 1, 1, 3), (2, 1, 1), (1,))]


@pytest.mark.parametrize("batches", BATCHES, ids=str)
@pytest.mark.parametrize("lengths", [(3, 9), (40, 70), (2, 1500)], ids=str)
def test_ranks_and_broadcast_batches(isa, batches, lengths, seed):
    random = np.random.default_rng(seed)
    q_len, kv_len = lengths
    arrays = [normal(random, (*batch, *rest)) for batch, rest in zip(
        batches, [(4, q_len, 8), (2, kv_len, 8), (2, kv_len, 5)], strict=True)]
    batch = np.broadcast_shapes(*batches)
    options = {}
    for name in ("bias", "kv_lengths"):
        options |= some_option(name, random, batch, 4, q_len, kv_len, 8)
    check_attention(*arrays, causal=True, **options)


@pytest.mark.parametrize("lengths", [(1, 1), (3, 9), (70, 150), (1, 2500)], ids=str)
def test_two_axes(isa, lengths, seed):
    random = np.random.default_rng(seed)
    q_len, kv_len = lengths
    query, key, value = normal(random, (q_len, 8)), normal(random, (kv_len, 8)), normal(random, (kv_len, 3))
    bias = normal(random, (q_len, kv_len))
    got = check_attention(query, key, value, causal=True, sinks=0.3, alibi_slopes=[0.1], bias=bias)
    assert got.output.shape == (q_len, 3) and got.lse.shape == (q_len,) and got.weights.shape == (q_len, kv_len)


# The bias is broadcast in every way there is, over sizes that are all prime, so that no wrong offset can be right.

@pytest.mark.parametrize("ones", [[i for i in range(4) if n >> i & 1] for n in range(16)], ids=str)
@pytest.mark.parametrize("q_len", [1, 7, 67])
def test_broadcast_bias_and_mask(isa, ones, q_len, seed):
    random = np.random.default_rng(seed)
    full = (3, 5, q_len, 11)
    shape = tuple(1 if i in ones else n for i, n in enumerate(full))
    bias, mask = normal(random, shape), random.random(shape) < 0.7
    arrays = inputs(random, (3,), 5, 5, q_len, 11, 13)
    check_attention(*arrays, bias=bias, mask=mask)
    one, other = (attnc.attention(*arrays, bias=b, mask=m) for b, m in (
        (bias, mask), (np.broadcast_to(bias, full), np.broadcast_to(mask, full))))
    assert one.tobytes() == other.tobytes()


# Windows: wide and narrow ones over several blocks, with offsets that put rows before, among and behind the keys.

WINDOWS = [(0, 0), (None, 0), (5, None), (200, 30), (700, 0), (2**62, 2**62), (1, 2**70)]


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("q_offset", [None, 0, -50, 600, 5000, -5000, [0, 550], 2**53, -(2**53)], ids=str)
def test_windows_and_offsets(isa, window, q_offset, seed):
    random = np.random.default_rng(seed)
    options = dict(window=window, q_offset=q_offset, causal=window[1] is None)
    check_attention(*inputs(random, (2,), 2, 1, 40, 650, 4), **options)
    check_attention(*inputs(random, (2,), 2, 1, 2, 650, 4), **options)


@pytest.mark.parametrize("lengths", [0, 1, 511, 512, 513, 700, [0, 700], [513, 64]], ids=str)
@pytest.mark.parametrize("q_lengths", [None, 0, 1, [0, 40], [40, 7]], ids=str)
def test_lengths(isa, lengths, q_lengths, seed):
    random = np.random.default_rng(seed)
    for causal in (False, True):
        check_attention(*inputs(random, (2,), 2, 1, 40, 700, 4), kv_lengths=lengths, q_lengths=q_lengths, causal=causal)


def test_rows_that_see_nothing_give_zeros_without_a_warning(isa):
    query, key, value = (np.ones((2, 2, 70, 8), np.float32) for _ in "qkv")
    mask = np.ones((70, 70), bool)
    mask[[0, 30, 31, 32, 33, 34, 35, 36, 69]] = False
    for options in (dict(mask=mask), dict(mask=mask, sinks=[1.0, -np.inf]), dict(bias=np.where(mask, 0.0, -np.inf))):
        with np.errstate(all="raise"):
            got = check_attention(query, key, -value, **options)
        dead = ~mask[:, 0]
        assert not got.output[..., dead, :].any() and not np.signbit(got.output[..., dead, :]).any()
        assert not got.weights[..., dead, :].any()
    assert np.array_equal(got.lse[0, 0] == -np.inf, dead)


@pytest.mark.parametrize("name", ["turkish", "coreference"])
def test_real_inputs(isa, name):
    data = datasets.load(name)
    for dtype in (np.float32, np.float64, np.float16):
        check_attention(*(np.asarray(x).astype(dtype) for x in (data.query, data.key, data.value)))


@pytest.mark.parametrize("case", [case for case in cases.SETS["tiny"] if isinstance(case, Case)], ids=str)
def test_cases_of_the_benchmark(isa, case, seed):
    arrays, options = case.make(seed)
    options.pop("want", None)
    check_attention(*arrays, **options)


SCALES = [None, 0.0, -0.0, 0.25, -0.7, 3, np.float32(0.25), 1e-35, -1e-35, 1e-300, 1e35]


@pytest.mark.parametrize("scale", SCALES, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_scales(isa, scale, dtype, seed):
    arrays = inputs(np.random.default_rng(seed), (), 2, 1, 40, 70, 16, dtype=dtype)
    if scale == 1e35:
        arrays[0] = arrays[0] * np.asarray(1e-35, dtype)
    check_attention(*arrays, scale=scale)


def test_default_scale(isa, seed):
    arrays = inputs(np.random.default_rng(seed), (), 2, 2, 4, 9, 16)
    plain = attnc.attention(*arrays)
    assert np.array_equal(plain, attnc.attention(*arrays, scale=0.25))
    uniform = attnc.attention_weights(*arrays[:2], scale=0.0)
    assert (uniform == np.float32(1 / 9)).all()
