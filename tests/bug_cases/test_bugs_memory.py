"""Bug cases on memory layout, sizes, dtypes and the mapping of heads."""

import itertools

import numpy as np
import pytest
from bug_checks import (
    BF16,
    DTYPES,
    EXTRA,
    F16,
    F32,
    F64,
    assert_same_bytes,
    buried,
    check,
    check_softmax,
    qkv,
    randn,
)
from layouts import MEMORY

import attnc
from attnc import reference
from attnc.testing import assert_within


def test_b13_permuted_heads(api):
    random = np.random.default_rng(13)
    for shape in ((84, 3, 3, 64), (2, 5, 8, 64)):
        check(api, *[randn(random, shape).transpose(0, 2, 1, 3) for _ in range(3)])
    check(api, *[randn(random, (5, 2, 8, 16)).transpose(1, 0, 2, 3) for _ in range(3)])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", MEMORY)
def test_b13_any_strides_give_the_same_bits(isa, name, dtype):
    other_memory = MEMORY[name]
    query, key, value = qkv(131, (2, 4), 7, 19, 12, kv_heads=2, dtype=dtype)
    bias = randn(132, (2, 4, 7, 19), dtype)
    plain = attnc.attention(query, key, value, bias=bias, want=EXTRA)
    for chosen in (*np.eye(4, dtype=bool), (True,) * 4):
        arrays = [other_memory(x) if other else x for x, other in zip((query, key, value, bias), chosen, strict=True)]
        result = attnc.attention(*arrays[:3], bias=arrays[3], want=EXTRA)
        for extra, array in vars(plain).items():
            assert_same_bytes(getattr(result, extra), array)
    assert_same_bytes(attnc.softmax(other_memory(bias)), attnc.softmax(bias))


def test_b29_read_only_inputs(api, tmp_path):
    query, key, value = qkv(29, (1, 2), 5, 9, 8)
    bias, mask = randn(291, (5, 9)), np.random.default_rng(292).random((5, 9)) > 0.3
    fixed = [np.frombuffer(x.tobytes(), x.dtype).reshape(x.shape) for x in (query, key, value, bias, mask)]
    check(api, *fixed[:3], bias=fixed[3], mask=fixed[4])
    key.tofile(tmp_path / "key")
    mapped = np.memmap(tmp_path / "key", F32, "r", shape=key.shape)
    assert_same_bytes(api.attention(query, mapped, value), api.attention(query, key, value))
    check_softmax(api, fixed[0])


def test_b29_an_output_that_cannot_be_written_is_refused_untouched(api):
    query, key, value = qkv(29, (1, 2), 5, 9, 8)
    one = np.zeros(8, F32)
    fixed = np.zeros((1, 2, 5, 8), F32)
    fixed.setflags(write=False)
    repeated = np.lib.stride_tricks.as_strided(one, (1, 2, 5, 8), (0, 0, 0, 4))
    others = [np.zeros((1, 2, 5, 8), F64), np.zeros((1, 2, 5, 7), F32), np.zeros((1, 2, 5, 8), ">f4")]
    for out in (fixed, repeated, *others):
        with pytest.raises((TypeError, ValueError), match="out"):
            api.attention(query, key, value, out=out)
        assert not out.any()


def test_b31_the_value_width_may_be_zero(api):
    query, key, value = qkv(31, (1, 2), 5, 9, 8)
    result = api.attention(query, key, value[..., :0], want=EXTRA)
    assert result.output.shape == (1, 2, 5, 0)
    np.testing.assert_allclose(result.weights.sum(-1), 1, rtol=1e-6)


def test_b31_no_key_heads_for_some_query_heads(api):
    query, none = np.ones((1, 2, 3, 4), F32), np.ones((1, 0, 3, 4), F32)
    with pytest.raises(ValueError, match="heads"):
        api.attention(query, none, none)
    for shape in ((10, 0), (0, 10), (4, 0, 0), (0,)):
        for axis in (-1, 0, None):
            for function in (api.softmax, api.log_softmax):
                assert function(np.zeros(shape, F32), axis).shape == shape


ZERO_SIZES = """
import itertools, numpy as np
from bug_checks import check
import attnc
for b, h, n, m, d, dv in itertools.product((0, 1, 3), repeat=6):
    if 0 in (b, h, n, m, d, dv):
        arrays = [np.ones(shape, np.float32) for shape in ((b, h, n, d), (b, h, m, d), (b, h, m, dv))]
        for options in ({}, {"causal": True}, {"mask": np.ones((n, m), bool)}):
            result = check(attnc, *arrays, **options)
            assert result.output.shape == (b, h, n, dv) and result.weights.shape == (b, h, n, m)
            assert (result.lse == -np.inf).all() or m
"""


def test_b31_sizes_of_zero(alone, isa):
    alone(ZERO_SIZES, isa)


def test_b33_nothing_beyond_the_last_key_is_read(api):
    for depth, q_len in itertools.product((64, 5), (1, 2, 8)):
        for kv_len in (*range(1, 18), 31, 32, 33, 38, 39, 63, 64, 65, 70, 127, 128, 129, 255, 256, 257):
            arrays = [buried(x) for x in qkv(33, (1, 2), q_len, kv_len, depth)]
            bias = randn(331, (1, 2, q_len, kv_len))
            want = reference.attention(*arrays, bias=bias)
            got = api.attention(*arrays, bias=buried(bias))
            assert_within(got, want.astype(F64), want, scale=np.abs(arrays[2]).max())


BEFORE_A_GUARD = """
import itertools, numpy as np
from bug_checks import DTYPES, before_guard, qkv, randn, assert_same_bytes
import attnc
sizes = (1, 1), (1, 70), (5, 17), (9, 257), (40, 33)
for dtype, depth, (q_len, kv_len) in itertools.product(DTYPES, (1, 5, 16, 33, 64), sizes):
    arrays = qkv(332, (1, 2), q_len, kv_len, depth, dtype=dtype)
    bias = randn(333, (q_len, kv_len), dtype)
    mask = bias > -1
    plain = attnc.attention(*arrays, bias=bias, mask=mask, want=("weights", "lse"))
    out = before_guard(np.zeros_like(plain.output))
    guarded = attnc.attention(*map(before_guard, arrays), bias=before_guard(bias), mask=before_guard(mask), out=out,
                              want=("weights", "lse"))
    for name, array in vars(plain).items():
        assert_same_bytes(getattr(guarded, name), array)
    x = before_guard(bias)
    assert_same_bytes(attnc.softmax(x, out=x), attnc.softmax(bias))
    assert_same_bytes(attnc.weighted_sum(before_guard(plain.weights), before_guard(arrays[2])),
              attnc.weighted_sum(plain.weights, arrays[2]))
"""


def test_b33_nothing_beyond_any_array_is_touched(alone, isa):
    alone(BEFORE_A_GUARD, isa)


@pytest.mark.more
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_b35_more_than_2_to_the_31_elements(alone, isa, dtype):
    alone(f"""
import numpy as np, attnc
length, depth = 2**28 + 5, 16
random = np.random.default_rng(35)
query, row, value = (random.standard_normal((1, n)).astype("{dtype}") for n in (depth, depth, 4))
keys, values = np.broadcast_to(row, (length, depth)), np.broadcast_to(value, (length, 4))
score = float((query.astype(float) * row).sum() / 4)
result = attnc.attention(query, keys, values, want="lse")
np.testing.assert_allclose(result.lse, score + np.log(length), rtol=1e-6)
if query.dtype == np.float64:
    np.testing.assert_allclose(result.output, value, rtol=0, atol=1e-8)

length = 2**31 // 64 + 2
zeros = np.zeros((length, 64), np.float32)  # pages that are never written take no memory
zeros[-1] = np.arange(64)
last = np.arange(length) == length - 1
result = attnc.attention(np.ones((1, 64), np.float32), zeros, zeros, mask=last)
np.testing.assert_array_equal(result, zeros[-1:])
""", isa, timeout=300)


def test_b51_query_heads_read_their_own_key_head(api):
    query, key = np.zeros((1, 4, 1, 1), F32), np.zeros((1, 2, 1, 1), F32)
    value = np.array([10, 20], F32).reshape(1, 2, 1, 1)
    np.testing.assert_array_equal(api.attention(query, key, value).ravel(), [10, 10, 20, 20])
    for q_heads, kv_heads in ((6, 3), (8, 2), (5, 1)):
        check(api, *qkv(51, (2, q_heads), 5, 9, 8, kv_heads=kv_heads))


def test_b59_integers_count_as_float64(api):
    x = np.array([[1, 2, 3], [3, 3, 0]])
    for dtype in (*np.typecodes["AllInteger"].replace("H", ""), "?"):
        assert_same_bytes(api.softmax(x.astype(dtype)), api.softmax(x.astype(dtype).astype(F64)))
    query = np.array([[1, 2], [3, 4]])
    assert_same_bytes(api.attention(query, query, query), api.attention(*[query.astype(F64)] * 3))
    assert_same_bytes(api.softmax([[1, 2, 3]]), api.softmax(np.array([[1.0, 2.0, 3.0]])))


@pytest.mark.parametrize("dtype", ["O", "U4", "S4", "c8", "c16", "M8[s]", "m8[s]", "g", "u2", "V4"])
def test_b59_dtypes_without_a_meaning_are_refused(api, dtype):
    if dtype == "g" and np.dtype("g") == F64:
        pytest.skip("long double is float64 here")
    good = np.ones((1, 1, 2, 4), F32)
    bad = np.zeros((1, 1, 2, 4), dtype)
    for position in range(3):
        arrays = [good] * 3
        arrays[position] = bad
        with pytest.raises(TypeError, match=("query", "key", "value")[position]):
            api.attention(*arrays)
    with pytest.raises(TypeError):
        api.softmax(bad)
    with pytest.raises(TypeError):
        api.attention(np.ma.ones((2, 4)), good[0, 0], good[0, 0])


def test_b61_an_output_that_shares_memory_with_an_input_is_refused(api):
    n = 48
    for which in ("query", "key", "value", "bias", "shifted", "reversed"):
        buffer = randn(61, (1, 1, n + 1, n))
        arrays = dict(zip(("query", "key", "value"), qkv(611, (1, 1), n, n, n), strict=True))
        arrays["bias"] = randn(612, (1, 1, n, n))
        if which == "shifted":
            arrays["value"], out = buffer[:, :, :n], buffer[:, :, 1:]
        else:
            out = arrays["key"][:, :, ::-1] if which == "reversed" else arrays[which]
        before = out.copy()
        with pytest.raises(ValueError, match="out"):
            api.attention(**arrays, out=out)
        assert_same_bytes(out, before)


def test_b61_softmax_in_place(api):
    for axis in (0, 1, None):
        x = randn(614, (5, 33))
        want = api.softmax(x, axis)
        assert api.softmax(x, axis, out=x) is x
        assert_same_bytes(x, want)


def test_b61_outputs_with_strides(api):
    query, key, value = qkv(615, (1, 2), 5, 9, 8)
    want = api.attention(query, key, value)
    for out in (np.zeros((1, 2, 5, 16), F32)[..., ::2], np.zeros((1, 2, 5, 8), F32)[:, :, ::-1],
                np.zeros((1, 2, 5, 8), F32)[..., ::-1], np.asfortranarray(np.zeros((1, 2, 5, 8), F32))):
        assert api.attention(query, key, value, out=out) is out
        assert_same_bytes(out, want)


def test_b67_values_of_another_width(api):
    for depth, value_dim in ((8, 1), (1, 8), (64, 24), (24, 64), (128, 64), (128, 256), (320, 256), (5, 7), (3, 2)):
        for q_len in (1, 6):
            check(api, *qkv(67, (2, 2), q_len, 13, depth, value_dim))


def test_b69_nothing_beside_the_output_is_written(api):
    for q_len, value_dim in itertools.product((1, 3, 8), (*range(1, 20), 33, 40, 72, 104)):
        query, key, value = qkv(69, (1, 2), q_len, 9, 8, value_dim)
        box = np.full((1, 2, q_len + 2, value_dim + 7), 12345, F32)
        inside = box[:, :, 1:-1, 3:3 + value_dim]
        api.attention(query, key, value, out=inside)
        assert_same_bytes(np.ascontiguousarray(inside), api.attention(query, key, value))
        inside[...] = 12345
        assert (box == 12345).all()


BIG_SCRATCH = """
import threading, numpy as np, attnc
from bug_checks import check, qkv, assert_same_bytes
threading.stack_size(256 * 1024)
for depth in (4096, 65536, 300000):
    arrays = qkv(77, (1, 1), 3, 5, depth)
    want = check(attnc, *arrays).output
    results = []
    thread = threading.Thread(target=lambda: results.append(attnc.attention(*arrays)))
    thread.start()
    thread.join()
    assert_same_bytes(results[0], want)
arrays = qkv(771, (1, 1), 2, 10**6, 2)
assert np.abs(attnc.attention(*arrays) - arrays[2].mean(-2)).max() < 5
"""


def test_b77_scratch_is_not_on_the_stack(alone, isa):
    alone(BIG_SCRATCH, isa, OMP_STACKSIZE="128k")


def test_b95_a_scale_of_zero_is_zero(api):
    query, key, value = qkv(95, (1, 2), 3, 7, 16)
    plain = api.attention(query, key, value)
    for scale in (None, 0.25, F32.type(0.25), np.array(0.25)):
        assert_same_bytes(api.attention(query, key, value, scale=scale), plain)
    for scale in (1, 0.0, -1.0, F64.type(2)):
        check(api, query, key, value, scale=scale)
    np.testing.assert_array_equal(api.attention_weights(query, key, scale=0.0), np.full((1, 2, 3, 7), F32.type(1) / 7))
    for scale in ("x", [1.0, 2.0], np.inf, np.nan, 1j):
        with pytest.raises((TypeError, ValueError), match="scale"):
            api.attention(query, key, value, scale=scale)


def test_b101_mixed_dtypes_give_the_wider(api):
    inputs = qkv(101, (1, 2), 5, 9, 8, dtype=F64)
    for dtypes in itertools.product(DTYPES, repeat=3):
        arrays = [x.astype(dtype) for x, dtype in zip(inputs, dtypes, strict=True)]
        widest = F64 if F64 in dtypes else F32 if F32 in dtypes or {F16, BF16} <= set(dtypes) else dtypes[0]
        assert check(api, *arrays).output.dtype == widest
    assert_same_bytes(api.attention([[1.0, 0.0]], [[1.0, 0.0]], [[2.0]]), np.array([[2.0]]))
