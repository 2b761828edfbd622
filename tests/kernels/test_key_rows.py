"""Rows of keys and values that lie in any order: the array `key_rows` of the kernels, against keys in order."""

import numpy as np
import pytest
from checking import PATHS, assert_same_bits, dtypes_in_turn, inputs, same_bits

import attnc
from attnc import _call
from attnc._checks import attention_args

SIZES = PATHS | {"one row": (4, 4, 1, 1500, 128, 128), "fused": (4, 4, 16, 64, 64, 32), "pairs": (2, 2, 6, 90, 64, 64),
                 "many": (2, 2, 64, 600, 64, 80), "parts": (1, 1, 300, 700, 40, 33)}
OPTIONS = {"plain": {}, "causal": {"causal": True, "window": (900, None)},
           "lengths": {"kv_lengths": [0, 40], "q_lengths": 1}}


def spread(x, rows, n):
    """The rows of x at other places of n, with NaN in all others."""
    wide = np.full((*x.shape[:-2], n, x.shape[-1]), np.nan, x.dtype)
    np.put_along_axis(wide, rows[..., None], x, -2)
    return wide


def drawn(random, lead, n, room):
    """Places of n keys of each head among `room`, in any order."""
    places = [random.permutation(room)[:n] for _ in range(int(np.prod(lead)))]
    return np.array(places).reshape(*lead, n)


def attend(query, key, value, rows, **options):
    """Output, lse, weights and scores of the keys in these rows."""
    kv_len = rows.shape[-1]
    named = [np.broadcast_to(x[..., :1, :], (*x.shape[:-2], kv_len, x.shape[-1])) for x in (key, value)]
    a = attention_args(query, *named, **options)        # for the sizes; any row of each head has its dtype
    a.key, a.value = key, value
    found = {"output": np.empty(a.out_shape, a.dtype), "lse": np.empty(a.lse_shape, a.acc),
             "weights": np.empty(a.weights_shape, a.dtype), "scores": np.empty(a.weights_shape, a.acc)}
    scores, output = found.pop("scores"), np.empty(a.out_shape, a.dtype)
    _call.run("attend", a, value=value, key_rows=rows, out=found.pop("output"), **found)
    _call.run("attend", a, value=value, key_rows=rows, out=output)
    _call.run("scores", a, scores=scores, key_rows=rows)
    return attnc.AttentionResult(output, scores=scores, **found)


@pytest.mark.parametrize("size, option, dtype", dtypes_in_turn(SIZES, OPTIONS))
def test_bits_of_keys_in_order(isa, size, option, dtype, seed):
    random = np.random.default_rng(seed)
    query, key, value = inputs(random, (2,), *SIZES[size], dtype=dtype)
    kv_len = key.shape[-2]
    options = OPTIONS[option]
    value[0, 0, 1] = np.inf                 # values that the product excludes are loaded again
    key[1, 0, 2, 0] = np.nan
    plain = attnc.attention(query, key, value, want=("lse", "weights", "scores"), **options)
    unread = np.arange(kv_len) >= np.array(options.get("kv_lengths", [kv_len] * 2))[:, None, None]
    for rows, room in ((np.broadcast_to(np.arange(kv_len), (2, key.shape[1], kv_len)), kv_len),
                       (drawn(random, (2, key.shape[1]), kv_len, 2 * kv_len), 2 * kv_len)):
        places = np.where(unread, 2**62, rows)
        wide = [spread(x, rows, room) for x in (key, value)]
        assert_same_bits(attend(query, *wide, places, **options), plain)
        wide = [np.flip(np.flip(x).copy()) for x in wide]                       # any strides
        wide[1] = np.asfortranarray(wide[1])
        assert_same_bits(attend(query, *wide, places, **options), plain)


def test_rows_may_be_shared_and_repeated(isa, seed):
    """One array of rows for all heads of a batch element, over keys without a batch axis, and a row named twice."""
    random = np.random.default_rng(seed)
    query, key, value = inputs(random, (3,), 4, 2, 5, 70, 32)
    rows = random.integers(0, 70, (3, 1, 50))
    every = np.broadcast_to(rows, (3, 2, 50))
    named = [np.take_along_axis(np.broadcast_to(x[:1], x.shape), every[..., None], -2) for x in (key, value)]
    assert_same_bits(attend(query, key[0], value[0], rows),
                     attnc.attention(query, *named, want=("lse", "weights", "scores")))


def test_statistics_and_gradients_of_queries_read_the_same_rows(isa, seed):
    random = np.random.default_rng(seed)
    query, key, value = inputs(random, (2,), 4, 2, 9, 700, 16)
    rows = drawn(random, (2, 2), 700, 900)
    wide = [spread(x, rows, 900) for x in (key, value)]

    def results(key, value, **rows):
        a = attention_args(query, *inputs(random, (2,), 4, 2, 9, 700, 16)[1:], causal=True)
        a.key, a.value = key, value
        norm, entropy = np.empty((2, 4, 9, 2)), np.empty((2, 4, 9), np.float32)
        output, lse, mass = np.empty_like(query), np.empty((2, 4, 9), np.float32), np.empty((2, 4, 700), np.float32)
        _call.run("attend", a, _call.RowRequest(norm=norm, entropy=entropy), value=value, out=output, lse=lse, **rows)
        _call.run("key_statistics", a, _call.KeyRequest(norm=norm, mass=mass, walk=9), **rows)
        gradient, delta = np.empty_like(query), np.empty((2, 4, 9), np.float32)
        _call.run("backward", a, value=value, grad_output=np.ones_like(query), output=output, lse=lse, delta=delta,
                  d_query=gradient, **rows)
        return norm, entropy, output, mass, gradient

    for got, wanted in zip(results(*wide, key_rows=rows), results(key, value), strict=True):
        assert same_bits(got, wanted)
