"""Gradients: the twin by finite differences, the kernels by the twin, and what can never change a bit of them."""

import numpy as np
import pytest
from checking import DTYPES, assert_same_bits, dtype_of, expected, farthest, inputs, largest, normal, same_bits

import attnc
from attnc import reference
from attnc._checks import backward_args
from attnc.reference import _backward, _scores
from attnc.testing import assert_within

ALL = ("query", "key", "value", "bias", "relative_bias", "relative_key", "relative_query", "sinks")
RANDOM = np.random.default_rng(0)
SIZES = dict(batch=(2,), q_heads=4, kv_heads=2, q_len=9, kv_len=13, head_dim=6, value_dim=5)
MASK = RANDOM.random((4, 9, 13)) < 0.7
MASK[1, 2] = False                          # a row that sees nothing
BIAS = RANDOM.standard_normal((2, 1, 9, 13))
CELLS = np.array([[1, 0, 1], [0, 0, 1], [1, 1, 0]], bool)
RELATIVE = RANDOM.standard_normal((2, 4, 21))
ROWS, TABLES = np.arange(21) % 8 // 2, RANDOM.standard_normal((2, 2, 4, 5, 6))     # the last row is not used
OPTIONS = {
    "plain": {},
    "mask": {"mask": MASK},
    "block_mask": {"block_mask": (CELLS, 4, 5), "causal": True},
    "key_mask": {"key_mask": np.arange(13) != 4},
    "bias": {"bias": BIAS},
    "relative_bias": {"relative_bias": RELATIVE},
    "relative_bias of one head": {"relative_bias": RELATIVE[:1, :1]},
    "relative_bias of all": {"relative_bias": np.where(np.arange(21) % 5 == 2, -np.inf, 0.5), "softcap": 0.7},
    "relative_key": {"relative_index": ROWS, "relative_key": TABLES[0], "scale": -0.4},
    "relative_query": {"relative_index": 3 - ROWS, "relative_query": TABLES[0, 1, :1], "causal": True},
    "both tables": {"relative_index": RANDOM.permutation(ROWS), "relative_key": TABLES[0, 0],
                    "relative_query": TABLES[1, :, :1], "softcap": 0.7, "mask": MASK},
    "bias of minus infinity": {"bias": np.where(MASK, 0.5, -np.inf)},
    "causal": {"causal": True},
    "top-left": {"causal": True, "q_offset": 0},
    "window": {"window": (3, 1)},
    "scale": {"scale": -0.4},
    "scale 0": {"scale": 0.0},
    "softcap": {"softcap": 0.7},
    "alibi": {"alibi_slopes": np.arange(4) / 8},
    "sinks": {"sinks": np.array([0.3, -np.inf, 1.0, -2.0])},
    "positions": {"k_positions": np.arange(26).reshape(2, 13)[:, ::-1], "causal": True, "q_offset": [4, 15]},
    "positions in order": {"k_positions": np.arange(0, 39, 3, np.int16), "window": (9, 2), "q_offset": 10,
                           "alibi_slopes": np.arange(4) / 8},
    "segments": {"q_segments": np.repeat([0, 1, -1], 3), "k_segments": np.repeat([0, 1], [6, 7])},
    "lengths": {"q_lengths": [9, 4], "kv_lengths": [0, 11], "sinks": np.zeros(4)},
    "all": {"mask": MASK, "bias": BIAS, "relative_bias": RELATIVE, "relative_index": ROWS, "relative_key": TABLES[0],
            "relative_query": TABLES[1], "causal": True, "window": (9, None),
            "softcap": 2.0, "scale": 0.9, "alibi_slopes": np.arange(4) / 8, "sinks": np.arange(4) / 4, "q_lengths": 8},
}
BIASES = [(2, 4, 9, 13), (4, 9, 13), (1, 4, 9, 13), (2, 1, 9, 13), (9, 13), (2, 4, 1, 13), (13,), (1, 1, 9, 1),
          (2, 4, 1, 1), (1, 1, 1, 1)]


def wants(options):
    return ("query", "key", "value", *(name for name in ALL[3:] if name in options))


def forward(query, key, value, seed=1, **options):
    """Gradients of output and lse, and the two."""
    result = attnc.attention(query, key, value, want="lse", **options)
    random = np.random.default_rng(seed)
    grad = random.standard_normal(result.output.shape).astype(result.output.dtype)
    return grad, result.output, result.lse, random.standard_normal(result.lse.shape)


def exact(grad, query, key, value, output, lse, **options):
    """The twin one precision up, and the scale of each gradient's rounding errors: sums of magnitudes."""
    b = backward_args(grad, query, key, value, output, lse, **{"sinks": None, "grad_lse": None, **options})
    a = b.args
    a.acc = np.dtype(np.longdouble if a.acc == np.float64 else np.float64)
    with np.errstate(all="ignore"):
        found = _backward.run(b)
        values = np.abs(_backward.per_query_head(a.value.astype(a.acc), a))
        grads, outputs = np.abs(b.grad_output.astype(a.acc)), np.abs(b.output.astype(a.acc))
        rows = (grads * outputs).sum(-1, keepdims=True) + (0 if b.grad_lse is None else largest(b.grad_lse))
        terms = found["weights"] * (grads @ values.swapaxes(-1, -2) + rows)
    terms = np.where(np.isfinite(terms), terms, 0)
    group = (*terms.shape[:-3], a.kv_heads, a.q_heads // a.kv_heads, *terms.shape[-2:])
    tables = {name: 0.0 if getattr(a, name) is None else largest(getattr(a, name))
              for name in ("relative_key", "relative_query")}
    scale = {"query": abs(a.scale) * largest(terms.sum(-1)) * (largest(a.key) + tables["relative_key"]),
             "key": abs(a.scale) * largest(terms.reshape(group).sum((-3, -2))) * (
                 largest(a.query) + tables["relative_query"]),
             "value": largest(found["weights"].reshape(group).sum((-3, -2))) * largest(b.grad_output),
             "sinks": largest(rows.sum((0, -2)))}
    if a.bias is not None:
        scale["bias"] = largest(_backward.sum_to(terms, a.bias.shape))
    for name, other in (("relative_key", a.query), ("relative_query", a.key)):
        if getattr(a, name) is not None:
            scale[name] = abs(a.scale) * largest(other) * largest(by_table_row(a, getattr(a, name), terms))
    if a.relative_bias is not None:
        scale["relative_bias"] = largest(_backward.of_distances(_backward.sum_to(terms, a.relative_bias.shape)))
    return found, scale


def by_table_row(a, table, terms):
    """The sums over the places of each table row, (..., heads or 1, rows)."""
    lead, rows = terms.shape[:-2], _scores.rows_of_distances(a)
    sums = np.stack([terms[..., rows == x].sum(-1) for x in range(table.shape[-2])], -1)
    return _backward.sum_to(sums.reshape(*lead, -1), table.shape[:-1])


def judges(*arrays, **options):
    """Exact and honest gradients, and the scale of their rounding errors."""
    wide, scale = exact(*arrays, **options)
    lse = arrays[-1]
    return wide, farthest(lambda: reference.attention_backward(*arrays, **options), wide, lse.size), scale


def check(query, key, value, want=None, grad_lse=True, **options):
    """`attnc.attention_backward` within tolerance of its twin one precision up; the result."""
    grad, output, lse, of_lse = forward(query, key, value, **options)
    arrays = grad, query, key, value, output, lse
    options |= {"want": wants(options) if want is None else want, "grad_lse": of_lse if grad_lse else None}
    wide, honest, scale = expected(judges, *arrays, **options)
    got = attnc.attention_backward(*arrays, **options)
    assert list(vars(got)) == list(options["want"])
    for name in vars(got):
        dtype = getattr(honest, name).dtype
        assert_within(getattr(got, name), wide[name], getattr(honest, name), scale=scale[name], name=name,
                      eps_dtype=lse.dtype if dtype == np.float64 else dtype)
    return got


# The twin: derivatives as differences, in float64

@pytest.mark.parametrize("name", OPTIONS)
def test_the_twin_by_finite_differences(name, seed):
    random = np.random.default_rng(seed)
    query, key, value = inputs(random, **SIZES, dtype="float64")
    options = {k: x.copy() if isinstance(x, np.ndarray) else x for k, x in OPTIONS[name].items()}
    grad, output, lse, grad_lse = forward(query, key, value, **options)
    grad_lse[np.isinf(lse)] = 0

    def loss():
        found = reference.attention(query, key, value, want="lse", **options)
        return (found.output * grad).sum() + (np.where(np.isinf(lse), 0, found.lse) * grad_lse).sum()

    got = reference.attention_backward(grad, query, key, value, output, lse, want=wants(options), grad_lse=grad_lse,
                                       **options)
    for of, array in {"query": query, "key": key, "value": value, **options}.items():
        if of not in wants(options):
            continue
        for _ in range(3):
            step = 1e-5 * random.standard_normal(array.shape) * np.isfinite(array)
            array += step
            above = loss()
            array -= 2 * step
            below = loss()
            array += step
            wanted = (np.where(np.isfinite(array), getattr(got, of), 0) * 2 * step).sum()
            assert abs(above - below - wanted) < 1e-8 * (1 + np.abs(2 * step * getattr(got, of)).sum() * 1e3), of


# The kernels: the twin's numbers

# Both types to compute in, and one of the two that are only loaded and stored.
@pytest.mark.parametrize("name, dtype", [(name, dtype) for n, name in enumerate(OPTIONS)
                                         for dtype in ("float32", "float64", ("float16", "bfloat16")[n % 2])])
def test_every_option(isa, name, dtype, seed):
    check(*inputs(np.random.default_rng(seed), **SIZES, dtype=dtype), **OPTIONS[name])


@pytest.mark.parametrize("sizes, options", [
    ((1, 1, 1, 1, 1, 1), {}),
    ((3, 1, 1, 300, 17, 3), {"causal": True}),
    ((2, 2, 200, 1, 5, 33), {"softcap": 1.0}),
    ((4, 2, 130, 530, 64, 32), {"causal": True}),
    ((6, 2, 101, 270, 80, 40), {"window": (60, 5), "sinks": np.arange(6.0)}),
    ((2, 1, 95, 95, 130, 16), {"mask": np.random.default_rng(3).random((95, 95)) < 0.1}),
    ((2, 1, 20, 70, 300, 600), {"causal": True, "q_offset": -3}),
])
def test_sizes(isa, sizes, options, seed):
    check(*inputs(np.random.default_rng(seed), (1,), *sizes), **options)


@pytest.mark.parametrize("shape", BIASES, ids=str)
def test_bias_sums_over_what_it_is_broadcast_to(isa, shape, seed):
    random = np.random.default_rng(seed)
    for dtype in ("float32", "float64"):
        bias = normal(random, shape, "bfloat16" if dtype == "float32" else dtype)
        got = check(*inputs(random, **SIZES, dtype=dtype), bias=bias, softcap=1.5, causal=True)
        assert got.bias.shape == shape and got.bias.dtype == bias.dtype


def test_bias_beyond_a_block(isa, seed):
    random = np.random.default_rng(seed)
    for shape in ((130, 300), (2, 1, 1, 300), (130, 1)):
        check(*inputs(random, (2,), 4, 2, 130, 300), bias=normal(random, shape), want=("bias",))


@pytest.mark.parametrize("shape", [(2, 4), (4,), (2, 1), ()], ids=str)
def test_tables_beyond_a_block(isa, shape, seed):
    """Also products of more than six rows of a table, and a chain of more than 256 depths."""
    random = np.random.default_rng(seed)
    names = ("relative_key", "relative_query")
    for sizes, options in (((4, 2, 130, 300, 16), {"causal": True}),
                           ((4, 2, 20, 40, 300), {"scale": -0.05, "softcap": 3.0})):
        arrays = inputs(random, (2,), *sizes)
        index = np.minimum(np.abs(np.arange(sum(sizes[2:4]) - 1) - 40), 149)
        tables = {name: normal(random, (*shape, 150, sizes[-1])) / np.float32(4) for name in names}
        got = check(*arrays, relative_index=index, **tables, **options, want=("query", "key", *names))
        assert all(getattr(got, name).shape == (*shape, 150, sizes[-1]) for name in names)


@pytest.mark.parametrize("shape", [(2, 4, 429), (4, 429), (2, 1, 429), (1, 4, 429), (429,)], ids=str)
def test_relative_bias_beyond_a_block(isa, shape, seed):
    random = np.random.default_rng(seed)
    got = check(*inputs(random, (2,), 4, 2, 130, 300), relative_bias=normal(random, shape), want=("relative_bias",))
    assert got.relative_bias.shape == shape


def test_query_heads_share_a_row_of_bias_in_two_blocks(isa, seed):
    """A block holds 96 rows, 19 of five heads and the twentieth of one: its gradient is the sum over two blocks."""
    random = np.random.default_rng(seed)
    arrays = inputs(random, (1,), 5, 1, 130, 40)
    grad, output, lse, grad_lse = forward(*arrays, bias=(bias := normal(random, (130, 40))))
    one, *many = (attnc.attention_backward(grad, *arrays, output, lse, grad_lse=grad_lse, bias=bias, want=("bias",),
                                           num_threads=threads).bias for threads in (1, 4, 4, 4, 4))
    check(*arrays, bias=bias, want=("bias",))
    for got in many:
        assert_same_bits(one, got)


@pytest.mark.parametrize("batches", [((), (3,), (3,)), ((3,), (), (1,)), ((2, 1), (3,), (2, 3)),
                                     ((2, 3), (1, 3), (1,))])
def test_broadcast_batches(isa, batches, seed):
    """An array that several batch elements share gets the sum of their gradients."""
    random = np.random.default_rng(seed)
    arrays = [normal(random, (*batch, *shape)) for batch, shape in
              zip(batches, ((4, 5, 8), (2, 7, 8), (2, 7, 3)), strict=True)]
    got = check(*arrays, causal=True)
    for name, array in zip(("query", "key", "value"), arrays, strict=True):
        assert getattr(got, name).shape == array.shape


def test_mixed_dtypes_each_have_their_own(isa, seed):
    query, key, value = inputs(np.random.default_rng(seed), **SIZES)
    got = check(query.astype(np.float64), key.astype(np.float16), value)
    assert [getattr(got, name).dtype for name in vars(got)] == [np.float64, np.float16, np.float32]


def test_two_axes_and_the_other_layout(isa, seed):
    arrays = inputs(np.random.default_rng(seed), **SIZES)
    plain = check(*arrays, causal=True)
    swapped = check(*[x.swapaxes(-2, -3) for x in arrays], causal=True, layout="bnhd", grad_lse=False)
    grad, output, lse, _ = forward(*[x.swapaxes(-2, -3) for x in arrays], causal=True, layout="bnhd")
    again = attnc.attention_backward(grad.swapaxes(-2, -3), *arrays, output.swapaxes(-2, -3), lse, causal=True)
    for name in vars(plain):
        assert getattr(swapped, name).flags.c_contiguous
        assert_same_bits(getattr(swapped, name).swapaxes(-2, -3), getattr(again, name))
    got = check(*[x[0, 0] for x in arrays], sinks=0.5, bias=BIAS[0, 0])
    assert got.query.shape == (9, 6) and got.sinks.shape == () and got.bias.shape == (9, 13)


@pytest.mark.parametrize("q_len, kv_len", [(0, 3), (3, 0), (0, 0)])
def test_empty_axes(isa, q_len, kv_len):
    got = check(*inputs(RANDOM, (2,), 2, 1, q_len, kv_len), sinks=np.zeros(2), bias=np.zeros((1, 1, 1, 1)))
    assert not any(getattr(got, name).any() for name in ("query", "key", "value", "bias"))


def test_part_of_the_keys(isa, seed):
    """Under the output and lse of all keys each part has its part of the gradients."""
    query, key, value = inputs(np.random.default_rng(seed), (2,), 4, 2, 20, 300, dtype="float64")
    grad, output, lse, grad_lse = forward(query, key, value)
    whole = attnc.attention_backward(grad, query, key, value, output, lse, grad_lse=grad_lse)
    parts = [attnc.attention_backward(grad, query, key[..., part, :], value[..., part, :], output, lse,
                                      grad_lse=grad_lse) for part in (slice(0, 100), slice(100, 300))]
    np.testing.assert_allclose(sum(part.query for part in parts), whole.query, rtol=0, atol=1e-13)
    for name in ("key", "value"):
        joined = np.concatenate([getattr(part, name) for part in parts], -2)
        np.testing.assert_allclose(joined, getattr(whole, name), rtol=0, atol=1e-13)


# Bits

LONG = {"heads": ((2,), 4, 2, 130, 530, 20, 12), "one head": ((1,), 2, 1, 400, 300, 8, 8),
        "few": ((3,), 4, 2, 1, 70, 9, 9)}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", LONG)
def test_threads_passes_and_mates_change_no_bit(isa, name, dtype, seed):
    """One pass over a head or two, on any number of threads, alone or in a batch, for one gradient or all."""
    random = np.random.default_rng(seed)
    query, key, value = inputs(random, *LONG[name], dtype=dtype)
    bias = normal(random, (query.shape[-2], key.shape[-2]), dtype)
    relative = normal(random, (query.shape[-3], query.shape[-2] + key.shape[-2] - 1), dtype)
    options = {"causal": True, "bias": bias, "relative_bias": relative, "sinks": np.zeros(query.shape[-3]),
               "relative_index": random.integers(0, 9, relative.shape[-1])}
    options |= {table: normal(random, (heads, 9, query.shape[-1]), dtype)
                for table, heads in (("relative_key", query.shape[-3]), ("relative_query", 1))}
    arrays = *forward(query, key, value, **options)[:1], query, key, value, *forward(query, key, value, **options)[1:3]
    one = attnc.attention_backward(*arrays, want=ALL, num_threads=1, **options)
    for threads in (2, 3, 5):
        assert_same_gradients(attnc.attention_backward(*arrays, want=ALL, num_threads=threads, **options), one)
    for want in ALL:
        got = attnc.attention_backward(*arrays, want=want, num_threads=2, **options)
        assert_same_bits(getattr(got, want), getattr(one, want), want)
    for i in range(len(query)):
        alone = attnc.attention_backward(*[x[i] for x in arrays], **options)
        for part in vars(alone):
            assert_same_bits(getattr(alone, part), getattr(one, part)[i], part)


def test_strides_change_no_bit(isa, seed):
    query, key, value = inputs(np.random.default_rng(seed), (2,), 4, 2, 50, 70)
    grad, output, lse, grad_lse = forward(query, key, value)
    plain = attnc.attention_backward(grad, query, key, value, output, lse, grad_lse=grad_lse)

    def scattered(x):
        room = np.full((*x.shape[:-1], 2 * x.shape[-1] + 1), np.nan, x.dtype.newbyteorder(">"))[..., 1::2]
        room[...] = x
        return room

    got = attnc.attention_backward(*[scattered(x) for x in (grad, query, key, value, output)], lse.swapaxes(1, 2).copy()
                                   .swapaxes(1, 2), grad_lse=np.asfortranarray(grad_lse))
    for name in vars(plain):
        assert_same_bits(getattr(got, name), getattr(plain, name), name)


# What may not be seen

@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hide", [{"causal": True, "q_offset": 20}, {"kv_lengths": 50},
                                  {"key_mask": np.arange(70) < 50},
                                  {"window": (70, 0), "q_offset": 20}, {"mask": np.arange(70) < 50},
                                  {"bias": np.where(np.arange(70) < 50, 0, -np.inf)},
                                  {"k_segments": np.where(np.arange(70) < 50, 1, -1), "q_segments": np.ones(30, int)}],
                         ids=lambda hide: next(iter(hide)))
def test_hidden_keys_change_no_bit(isa, hide, dtype, seed):
    """Keys 50 to 69, which no row sees: their gradient is 0, whatever they hold."""
    query, key, value = inputs(np.random.default_rng(seed), (2,), 4, 2, 30, 70, dtype=dtype)
    grad, output, lse, grad_lse = forward(query, key, value, **hide)
    clean = attnc.attention_backward(grad, query, key, value, output, lse, grad_lse=grad_lse, want=wants(hide), **hide)
    assert not clean.key[..., 50:, :].any() and not clean.value[..., 50:, :].any() and clean.key[..., :50, :].all()
    for bad in (np.nan, np.inf):
        for array in (key, value):
            array[..., 50:, :] = bad
        assert_same_gradients(attnc.attention_backward(grad, query, key, value, output, lse, grad_lse=grad_lse,
                                                       want=wants(hide), **hide), clean)


def assert_same_gradients(got, wanted):
    for name in vars(wanted):
        assert_same_bits(getattr(got, name), getattr(wanted, name), name)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_padding_are_not_read(isa, dtype, seed):
    query, key, value = inputs(np.random.default_rng(seed), (2,), 4, 2, 30, 70, dtype=dtype)
    options = {"q_lengths": [7, 20], "sinks": np.zeros(4), "want": (*ALL[:3], "sinks")}
    grad, output, lse, grad_lse = forward(query, key, value, sinks=options["sinks"], q_lengths=options["q_lengths"])
    clean = attnc.attention_backward(grad, query, key, value, output, lse, grad_lse=grad_lse, **options)
    assert not clean.query[0, :, 7:].any() and not clean.query[1, :, 20:].any()
    for i, length in enumerate(options["q_lengths"]):
        for array in (grad, query, output):
            array[i, :, length:] = np.nan
        grad_lse[i, :, length:] = np.nan
    assert_same_gradients(attnc.attention_backward(grad, query, key, value, output, lse, grad_lse=grad_lse, **options),
                          clean)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("of", ["query", "grad", "lse"])
def test_nan_stays_with_its_row_and_what_that_sees(isa, of, dtype, seed):
    query, key, value = inputs(np.random.default_rng(seed), (1,), 2, 1, 30, 70, dtype=dtype)
    grad, output, lse, _ = forward(query, key, value, causal=True)
    arrays = {"grad": grad, "query": query, "key": key, "value": value, "output": output, "lse": lse}
    clean = attnc.attention_backward(*arrays.values(), causal=True)
    arrays[of][0, 1, 12] = np.nan
    if of == "query":
        arrays["lse"][0, 1, 12] = np.nan
    got = attnc.attention_backward(*arrays.values(), causal=True)
    twin = reference.attention_backward(*arrays.values(), causal=True)
    for name in vars(got):
        assert (np.isnan(getattr(got, name)) == np.isnan(getattr(twin, name))).all(), name
    assert np.isnan(got.query).all(-1).sum() == 1 and np.isnan(got.query[0, 1, 12]).all()
    assert np.isnan(got.key[0, 0, :53]).all() and np.isnan(got.value[0, 0, :53]).all()
    assert np.isfinite(got.key[0, 0, 53:]).all() and np.isfinite(got.value[0, 0, 53:]).all()
    arrays = {name: np.delete(getattr(clean, name), 12, -2) if name == "query" else getattr(clean, name)[..., 53:, :]
              for name in vars(clean)}
    assert same_bits(np.delete(got.query, 12, -2)[0, 0], arrays["query"][0, 0])
    assert same_bits(got.key[0, 0, 53:], arrays["key"][0, 0]) and same_bits(got.value[0, 0, 53:], arrays["value"][0, 0])


def test_infinite_gradient_in_one_place(isa, seed):
    """The values' gradient is infinite there, and only there."""
    query, key, value = inputs(np.random.default_rng(seed), (1,), 2, 1, 30, 70)
    grad, output, lse, _ = forward(query, key, value, causal=True)
    grad[0, 1, 12, 3] = np.inf
    got = attnc.attention_backward(grad, query, key, value, output, lse, causal=True)
    wanted = np.zeros(got.value.shape, bool)
    wanted[0, 0, :53, 3] = True
    assert (np.isposinf(got.value) == wanted).all() and not np.isnan(got.value).any()


def test_weights_of_zero_pass_nothing_on(isa):
    """A key whose weight underflows has gradient 0, though its value is so large that 0 times it would be NaN."""
    query, key, value = np.float32([[1.0]]), np.float32([[0.0], [-1e4]]), np.float32([[1.0], [np.inf]])
    got = attnc.attention_backward(np.float32([[1.0]]), query, key, value, np.float32([[1.0]]), np.float32([0.0]))
    assert got.query == 0 and not got.key.any() and got.value.tolist() == [[1], [0]]


# Softmax

@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("shape, axis", [((3, 7), -1), ((3, 7), 0), ((2, 3, 5), (0, 2)), ((4,), None), ((2, 9000), 1),
                                         ((3, 0), 1), ((), None), ((2, 3), ())])
def test_softmax(isa, shape, axis, log, dtype, seed):
    random = np.random.default_rng(seed)
    name = "log_softmax" if log else "softmax"
    x, grad = normal(random, shape, dtype), normal(random, shape, dtype)
    output = getattr(attnc, name)(x, axis)
    honest = getattr(reference, name + "_backward")(grad, output, axis)
    wide = np.longdouble if dtype == "float64" else np.float64
    share = output.astype(wide)
    axes = tuple(range(x.ndim)) if axis is None else axis
    if log:
        true = grad.astype(wide) - np.exp(share) * grad.astype(wide).sum(axes, keepdims=True)
    else:
        true = share * (grad.astype(wide) - (grad.astype(wide) * share).sum(axes, keepdims=True))
    got = getattr(attnc, name + "_backward")(grad, output, axis)
    assert_within(got, true, honest, scale=1 + largest(grad))


@pytest.mark.parametrize("log", [False, True])
def test_softmax_leaves_out_what_took_no_part(isa, log):
    name = "log_softmax" if log else "softmax"
    where = np.array([[True, False, True, True], [False] * 4])
    x, grad = RANDOM.standard_normal((2, 4)), RANDOM.standard_normal((2, 4))
    output = getattr(attnc, name)(x, where=where)
    clean = getattr(attnc, name + "_backward")(grad, output)
    assert not clean[~where].any() and clean[0, 0] != 0
    grad[~where] = np.nan
    assert_same_bits(getattr(attnc, name + "_backward")(grad, output), clean)
    assert_same_bits(getattr(reference, name + "_backward")(grad, output) != 0, where)
    assert_same_bits(getattr(attnc, name + "_backward")(grad, output, num_threads=3), clean)


# Errors

X, K = np.zeros((2, 4, 9, 6)), np.zeros((2, 2, 13, 6))
GIVEN = {"grad_output": X, "query": X, "key": K, "value": K, "output": X, "lse": np.zeros((2, 4, 9))}


@pytest.mark.parametrize("module", [attnc, reference])
@pytest.mark.parametrize("error, change, words", [
    (ValueError, {"grad_output": X[..., :5]}, r"grad_output has shape \(2, 4, 9, 5\); wanted .* = \(2, 4, 9, 6\)"),
    (ValueError, {"output": X[:1]}, "output has shape"),
    (ValueError, {"lse": np.zeros((4, 9))}, "lse has shape"),
    (ValueError, {"grad_lse": np.zeros((2, 4, 1))}, "grad_lse has shape"),
    (TypeError, {"grad_output": None}, "grad_output must be an array, got None"),
    (TypeError, {"output": X.astype(complex)}, "output has dtype complex128"),
    (TypeError, {"grad_lse": X.astype("S3")}, "grad_lse has dtype"),
    (ValueError, {"want": "output"}, "want must be one of .*'sinks'"),
    (TypeError, {"want": 3}, "want must be a name or a tuple of names out of .*'query'"),
    (ValueError, {"want": ()}, "want is empty"),
    (ValueError, {"want": ("query", "bias")}, "want has 'bias', but no bias was given"),
    (ValueError, {"want": "sinks"}, "want has 'sinks', but no sinks was given"),
    (ValueError, {"sinks": np.zeros(3)}, "sinks has shape"),
    (ValueError, {"window": 3}, "window must be a pair"),
    (ValueError, {"num_threads": 0}, "num_threads"),
])
def test_errors(module, error, change, words):
    with pytest.raises(error, match=words):
        module.attention_backward(**{**GIVEN, **change})


@pytest.mark.parametrize("module", [attnc, reference])
@pytest.mark.parametrize("name", ["softmax_backward", "log_softmax_backward"])
def test_errors_of_softmax(module, name):
    function = getattr(module, name)
    with pytest.raises(ValueError, match=r"grad_output has shape \(2,\); wanted the shape of output = \(3,\)"):
        function([1.0, 2.0], [0.0, 0.5, 0.5])
    with pytest.raises(ValueError, match="axis"):
        function([1.0], [1.0], 1)
    with pytest.raises(TypeError, match="output has dtype complex128"):
        function([1.0], [1j])


def test_inputs_are_not_written(isa, seed):
    arrays = inputs(np.random.default_rng(seed), **SIZES)
    grad, output, lse, grad_lse = forward(*arrays)
    given = [grad, *arrays, output, lse, grad_lse]
    for x in given:
        x.flags.writeable = False
    attnc.attention_backward(*given[:-1], grad_lse=grad_lse)
    assert dtype_of("float32") == grad.dtype
