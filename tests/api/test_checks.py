"""Every argument error says which argument, what came and what was wanted; what is accepted arrives as promised."""

import inspect
import math

import ml_dtypes
import numpy as np
import pytest

import attnc
from attnc import reference
from attnc._checks import OPTIONS, attention_args, softmax_args, weighted_sum_args

BATCH, Q_HEADS, KV_HEADS, Q_LEN, KV_LEN, DIM, VALUE_DIM = 2, 4, 2, 5, 7, 8, 3
QUERY = np.zeros((BATCH, Q_HEADS, Q_LEN, DIM), np.float32)
KEY = np.zeros((BATCH, KV_HEADS, KV_LEN, DIM), np.float32)
VALUE = np.zeros((BATCH, KV_HEADS, KV_LEN, VALUE_DIM), np.float32)
OUT = (BATCH, Q_HEADS, Q_LEN, VALUE_DIM)


def check(query=QUERY, key=KEY, value=VALUE, **options):
    return attention_args(query, key, value, **options)


class Unreadable:
    def __array__(self, *args, **kwargs):
        raise RuntimeError("lives elsewhere")


def read_only():
    out = np.zeros(OUT, np.float32)
    out.flags.writeable = False
    return out


def packed(take):
    """Query and an output in one buffer, where `take` puts the output."""
    buffer = np.zeros((BATCH, Q_HEADS, Q_LEN, 16), np.float32)
    return {"query": buffer[..., :DIM], "out": buffer[..., take]}


T, V = TypeError, ValueError
WRONG = {
    # dtypes of the inputs
    "uint16": (T, {"query": QUERY.view(np.uint16)[..., :DIM]}, ["query", "uint16", "query.view(ml_dtypes.bfloat16)"]),
    "longdouble": (T, {"key": KEY.astype(np.longdouble)}, ["key", np.dtype(np.longdouble).name, "float64"]),
    "complex": (T, {"value": VALUE.astype(complex)}, ["value", "complex128", "float64"]),
    "object": (T, {"query": QUERY.astype(object)}, ["query", "object"]),
    "strings": (T, {"query": QUERY.astype("U3")}, ["query", "str"]),
    "dates": (T, {"key": KEY.astype("M8[s]")}, ["key", "datetime64"]),
    "float8": (T, {"query": QUERY.astype(ml_dtypes.float8_e4m3fn)}, ["query", "float8_e4m3fn"]),
    "structured": (T, {"query": np.zeros((2, 2, 2), "f4,f4")}, ["query", "void"]),
    "masked array": (T, {"value": np.ma.array(VALUE)}, ["value", "numpy.ma", "mask="]),
    "None": (T, {"query": None}, ["query", "None"]),
    "unreadable": (T, {"key": Unreadable()}, ["key", "Unreadable", "lives elsewhere"]),
    "ragged": (V, {"query": [[1.0], [1.0, 2.0]]}, ["query", "list"]),
    # shapes of the inputs
    "scalar": (V, {"query": 1.0}, ["query has 0 axes"]),
    "1-D": (V, {"key": KEY[0, 0, 0]}, ["key has 1 axes", "(8,)", "(length, dim)"]),
    "2-D with 4-D": (V, {"query": QUERY[0, 0]}, ["query has 2 axes", "key (2, 2, 7, 8)", "(length, dim)"]),
    "head_dim": (V, {"key": KEY[..., :4]}, ["key", "head_dim 4", "query has 8", "(2, 2, 7, 4)"]),
    "lengths": (V, {"value": VALUE[..., :6, :]}, ["value", "length 6", "key has 7", "(2, 2, 6, 3)"]),
    "kv heads": (V, {"value": VALUE[:, :1]}, ["value", "1 heads", "key has 2"]),
    "groups": (V, {"query": QUERY[:, :3]}, ["query", "3 heads", "multiple", "(2, 3, 5, 8)"]),
    "no kv heads": (V, {"key": KEY[:, :0], "value": VALUE[:, :0]}, ["query", "4 heads", "0 of key"]),
    "batch": (V, {"query": np.zeros((3, 4, 5, 8))}, ["batch", "query (3, 4, 5, 8)", "key (2, 2, 7, 8)"]),
    "layout": (V, {"layout": "nbhd"}, ["layout", "'nbhd'", "'bnhd'"]),
    "layout type": (T, {"layout": 3}, ["layout", "int 3"]),
    "layout 2-D": (V, {"query": QUERY[0, 0], "key": KEY[0, 0], "value": VALUE[0, 0], "layout": "bnhd"}, ["layout"]),
    # masks and bias
    "float mask": (T, {"mask": np.zeros((5, 7))}, ["mask", "float64", "bool", "bias="]),
    "int mask": (T, {"mask": np.zeros((5, 7), int)}, ["mask", "int64", "bias="]),
    "mask shape": (V, {"mask": np.ones((5, 6), bool)}, ["mask", "(5, 6)", "(2, 4, 5, 7)"]),
    "mask batch": (V, {"mask": np.ones((3, 1, 5, 7), bool)}, ["mask", "(3, 1, 5, 7)"]),
    "mask axes": (V, {"mask": np.ones((1, 2, 4, 5, 7), bool)}, ["mask", "(1, 2, 4, 5, 7)"]),
    "masked mask": (T, {"mask": np.ma.array(np.ones((5, 7), bool))}, ["mask", "numpy.ma"]),
    "block_mask alone": (T, {"block_mask": np.ones((1, 1), bool)}, ["block_mask", "(mask, rows, keys)", "bool array"]),
    "block_mask of two": (T, {"block_mask": (np.ones((1, 1), bool), 4)}, ["block_mask", "(mask, rows, keys)"]),
    "block_mask dtype": (T, {"block_mask": (np.ones((1, 1)), 8, 8)}, ["mask of block_mask", "float64", "bool"]),
    "block_mask shape": (V, {"block_mask": (np.ones((2, 2), bool), 4, 3)}, ["mask of block_mask", "(2, 2)",
                                                                           "(2, 4, 2, 3)", "ceil(kv_len / keys)"]),
    "block_mask of no rows": (V, {"block_mask": (np.ones((1, 1), bool), 0, 8)}, ["rows of block_mask", "0"]),
    "block_mask of no keys": (V, {"block_mask": (np.ones((1, 1), bool), 8, -1)}, ["keys of block_mask", "-1"]),
    "block_mask of floats": (T, {"block_mask": (np.ones((1, 1), bool), 8, 8.0)}, ["keys of block_mask", "8.0"]),
    "key_mask dtype": (T, {"key_mask": np.ones(7)}, ["key_mask", "float64", "bool"]),
    "key_mask shape": (V, {"key_mask": np.ones((5, 7), bool)}, ["key_mask", "(5, 7)", "(2, 7)"]),
    "key_mask of one": (V, {"key_mask": np.ones((2, 1), bool)}, ["key_mask", "(2, 1)", "(2, 7)"]),
    "bool bias": (T, {"bias": np.ones((5, 7), bool)}, ["bias", "bool", "mask="]),
    "int bias": (T, {"bias": np.ones((5, 7), int)}, ["bias", "int64", "float32"]),
    "bias shape": (V, {"bias": np.ones((2, 5, 7))}, ["bias", "(2, 5, 7)", "(2, 4, 5, 7)"]),
    "bool relative_bias": (T, {"relative_bias": np.ones(11, bool)}, ["relative_bias", "bool", "float32"]),
    "relative_bias length": (V, {"relative_bias": np.ones(12)}, ["relative_bias", "(12,)", "(2, 4, 11)",
                                                                 "q_len + kv_len - 1"]),
    "relative_bias of one": (V, {"relative_bias": np.ones((4, 1))}, ["relative_bias", "(4, 1)", "(2, 4, 11)"]),
    "relative_bias heads": (V, {"relative_bias": np.ones((2, 11))}, ["relative_bias", "(2, 11)", "(2, 4, 11)"]),
    # content-relative terms
    "table alone": (V, {"relative_key": np.ones((4, 3, 8))}, ["relative_key", "relative_index was not"]),
    "query table alone": (V, {"relative_query": np.ones((4, 3, 8))}, ["relative_query", "relative_index was not"]),
    "relative_index alone": (V, {"relative_index": np.zeros(11, int)}, ["relative_index", "relative_key",
                                                                        "relative_query"]),
    "relative_index of floats": (T, {"relative_index": np.zeros(11), "relative_key": np.ones((1, 3, DIM))},
                                 ["relative_index", "float64", "integer"]),
    "relative_index too large": (V, {"relative_index": np.full(11, 3), "relative_key": np.ones((1, 3, DIM))},
                                 ["relative_index", "0 to 2", "3"]),
    "relative_index below 0": (V, {"relative_index": np.full(11, -1), "relative_query": np.ones((1, 3, DIM))},
                               ["relative_index", "0 to 2", "-1"]),
    "relative_index too short": (V, {"relative_index": np.zeros(10, int), "relative_key": np.ones((1, 3, DIM))},
                                 ["relative_index", "(10,)", "(11,)", "q_len + kv_len - 1"]),
    "relative_key of integers": (T, {"relative_index": np.zeros(11, int), "relative_key": np.ones((1, 3, DIM), int)},
                                 ["relative_key", "int64", "float32"]),
    "relative_key depth": (V, {"relative_index": np.zeros(11, int), "relative_key": np.ones((1, 3, DIM + 1))},
                           ["relative_key", f"(1, 3, {DIM + 1})", "head_dim"]),
    "relative_query heads": (V, {"relative_index": np.zeros(11, int), "relative_query": np.ones((3, 3, DIM))},
                             ["relative_query", f"(3, 3, {DIM})", "q_heads"]),
    "tables of other lengths": (V, {"relative_index": np.zeros(11, int), "relative_key": np.ones((1, 3, DIM)),
                                    "relative_query": np.ones((1, 4, DIM))},
                                ["relative_query", f"(1, 4, {DIM})", "rows"]),
    "table without rows": (V, {"relative_index": np.zeros(11, int), "relative_key": np.ones((1, 0, DIM))},
                           ["relative_key", "no rows"]),
    # positions and lengths
    "causal": (T, {"causal": 1}, ["causal", "int 1", "True or False"]),
    "causal array": (T, {"causal": np.ones(2, bool)}, ["causal", "bool array"]),
    "bare window": (V, {"window": 3}, ["window", "(3, 0)", "(3, 3)"]),
    "bare NumPy window": (V, {"window": np.int64(3)}, ["window", "(3, 0)", "(3, 3)"]),
    "window type": (T, {"window": "ab"}, ["window", "'ab'", "(left, right)"]),
    "window flag": (T, {"window": True}, ["window", "True", "(left, right)"]),
    "window of three": (V, {"window": (1, 2, 3)}, ["window", "3 elements", "(left, right)"]),
    "window side": (V, {"window": (3, -1)}, ["right side of window", "-1", "None"]),
    "window float": (T, {"window": (3.0, 0)}, ["left side of window", "3.0", "integer"]),
    "window bool": (T, {"window": (0, True)}, ["right side of window", "True", "integer"]),
    "q_offset float": (T, {"q_offset": 1.0}, ["q_offset", "float 1.0", "integer"]),
    "q_offset bool": (T, {"q_offset": True}, ["q_offset", "bool True", "integer"]),
    "q_offset shape": (V, {"q_offset": [0, 0, 0]}, ["q_offset", "(3,)", "(2,)"]),
    "q_offset range": (V, {"q_offset": 2**60}, ["q_offset", str(2**60), str(2**53)]),
    "k_positions dtype": (T, {"k_positions": np.zeros(7)}, ["k_positions", "float64", "integer"]),
    "k_positions bool": (T, {"k_positions": np.ones(7, bool)}, ["k_positions", "bool", "integer"]),
    "k_positions of the batch": (V, {"k_positions": np.zeros((3, 7), int)}, ["k_positions", "(3, 7)", "(2, 2, 7)"]),
    "k_positions of one key": (V, {"k_positions": [[0]]}, ["k_positions", "(1, 1)", "kv_heads"]),
    "k_positions negative": (V, {"k_positions": np.arange(7) - 1}, ["k_positions", "from 0 to", "-1"]),
    "k_positions far": (V, {"k_positions": np.full(7, 2**60)}, ["k_positions", str(2**53), str(2**60)]),
    "k_positions negative within a length": (
        V, {"k_positions": np.arange(7) * -1, "kv_lengths": [1, 2]}, ["k_positions", "from 0 to", "-1"]),
    **{f"k_positions with {name}": (V, {"k_positions": np.arange(7), name: option}, ["k_positions", "q_offset"])
       for name, option in (("causal", True), ("window", (1, 1)), ("alibi_slopes", np.ones(4)))},
    "q_lengths range": (V, {"q_lengths": [5, 6]}, ["q_lengths", "from 0 to 5", "6"]),
    "kv_lengths negative": (V, {"kv_lengths": -1}, ["kv_lengths", "from 0 to 7", "-1"]),
    "kv_lengths huge": (V, {"kv_lengths": np.array([1, 2**64 - 1], np.uint64)}, ["kv_lengths", str(2**64 - 1)]),
    "kv_lengths dtype": (T, {"kv_lengths": [1.0, 2.0]}, ["kv_lengths", "float64", "integer"]),
    "kv_lengths bool": (T, {"kv_lengths": np.True_}, ["kv_lengths", "bool", "integer"]),
    "kv_lengths shape": (V, {"kv_lengths": [[1], [2]]}, ["kv_lengths", "(2, 1)", "(2,)"]),
    "segments alone": (V, {"q_segments": np.zeros(5, int)}, ["q_segments", "k_segments", "both"]),
    "other segments alone": (V, {"k_segments": np.zeros(7, int)}, ["k_segments", "q_segments", "both"]),
    "segments dtype": (T, {"q_segments": np.zeros(5), "k_segments": np.zeros(7, int)}, ["q_segments", "float64"]),
    "segments shape": (V, {"q_segments": np.zeros(5, int), "k_segments": np.zeros(5, int)}, ["k_segments", "(5,)"]),
    # numbers
    "scale NaN": (V, {"scale": float("nan")}, ["scale", "nan", "finite"]),
    "scale inf": (V, {"scale": np.float32("inf")}, ["scale", "inf", "finite"]),
    "scale huge": (V, {"scale": 10**400}, ["scale", "1000", "finite"]),
    "scale str": (T, {"scale": "1"}, ["scale", "'1'", "number"]),
    "scale bool": (T, {"scale": True}, ["scale", "True", "number"]),
    "scale NumPy bool": (T, {"scale": np.True_}, ["scale", "True", "number"]),
    "scale complex": (T, {"scale": 1j}, ["scale", "1j", "number"]),
    "scale array": (T, {"scale": np.ones(1)}, ["scale", "(1,)", "number"]),
    "softcap zero": (V, {"softcap": 0}, ["softcap", "0", "greater than 0"]),
    "softcap negative": (V, {"softcap": -1.5}, ["softcap", "-1.5", "greater than 0"]),
    "softcap inf": (V, {"softcap": float("inf")}, ["softcap", "inf", "finite"]),
    "softcap bool": (T, {"softcap": True}, ["softcap", "True", "number"]),
    "slopes scalar": (V, {"alibi_slopes": 1.0}, ["alibi_slopes", "()", "(q_heads,)"]),
    "slopes shape": (V, {"alibi_slopes": np.ones((3, 4))}, ["alibi_slopes", "(3, 4)", "(2, 4)"]),
    "slopes dtype": (T, {"alibi_slopes": ["a"] * 4}, ["alibi_slopes", "str"]),
    "sinks shape": (V, {"sinks": np.ones(2)}, ["sinks", "(2,)", "(4,)"]),
    "sinks per batch": (V, {"sinks": np.ones((2, 4))}, ["sinks", "(2, 4)", "(4,)"]),
    "sinks dtype": (T, {"sinks": np.ones(4, complex)}, ["sinks", "complex128"]),
    # what is wanted, and how
    "want": (V, {"want": "weight"}, ["want", "'weight'", "'weights'"]),
    "want one of two": (V, {"want": ("lse", "x")}, ["want", "'x'", "'lse'"]),
    "want type": (T, {"want": 3}, ["want", "int 3", "'lse'"]),
    "want element": (T, {"want": (None,)}, ["want", "None", "'lse'"]),
    "stage": (V, {"stage": "final"}, ["stage", "'final'", "'masked'"]),
    "stage None": (T, {"stage": None}, ["stage", "None", "'masked'"]),
    "threads 0": (V, {"num_threads": 0}, ["num_threads", "0", "from 1 to 4096"]),
    "threads negative": (V, {"num_threads": -2}, ["num_threads", "-2", "from 1 to 4096"]),
    "threads absurd": (V, {"num_threads": 4097}, ["num_threads", "4097", "from 1 to 4096"]),
    "threads bool": (T, {"num_threads": True}, ["num_threads", "True", "integer"]),
    "threads float": (T, {"num_threads": 2.0}, ["num_threads", "2.0", "integer"]),
    "threads str": (T, {"num_threads": "2"}, ["num_threads", "'2'", "integer"]),
    # out
    "out list": (T, {"out": [0.0]}, ["out", "list", "float32"]),
    "out masked": (T, {"out": np.ma.zeros(OUT, np.float32)}, ["out", "ndarray"]),
    "out dtype": (T, {"out": np.zeros(OUT)}, ["out", "float64", "float32"]),
    "out byte order": (T, {"out": np.zeros(OUT, np.dtype(np.float32).newbyteorder())}, ["out", "native byte order"]),
    "out shape": (V, {"out": np.zeros(OUT[1:], np.float32)}, ["out", "(4, 5, 3)", "(2, 4, 5, 3)"]),
    "out layout": (V, {"query": QUERY.swapaxes(1, 2), "key": KEY.swapaxes(1, 2), "value": VALUE.swapaxes(1, 2),
                       "layout": "bnhd", "out": np.zeros(OUT, np.float32)}, ["out", "(2, 5, 4, 3)"]),
    "out read-only": (V, {"out": read_only()}, ["out", "read-only", "writable"]),
    "out zero stride": (V, {"out": np.lib.stride_tricks.as_strided(np.zeros(OUT, np.float32), OUT, (0, 60, 12, 4))},
                        ["out", "strides", "(0, 60, 12, 4)"]),
    "out on query": (V, packed(slice(6, 9)), ["out", "shares memory", "query"]),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors_say_what_is_wrong(name):
    error, arguments, words = WRONG[name]
    with pytest.raises((TypeError, ValueError)) as caught:
        check(**arguments)
    assert type(caught.value) is error
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("name", [
    "query", "key", "value", "mask", "key_mask", "bias", "relative_bias", "relative_index", "relative_key",
    "relative_query", "q_offset", "k_positions", "alibi_slopes", "sinks", "q_segments", "k_segments", "q_lengths",
    "kv_lengths"])
def test_out_shares_memory_with_no_input(name):
    shapes = {"query": (1, 1, 3, 4), "key": (1, 1, 3, 4), "value": (1, 1, 3, 3)}
    out = np.zeros((1, 1, 3, 3), np.float32)
    arguments = {part: np.zeros(shape, np.float32) for part, shape in shapes.items()}
    raw = out.view(np.uint8).ravel()
    arguments |= {
        "mask": {"mask": raw[:3].view(bool)}, "key_mask": {"key_mask": raw[:3].view(bool)},
        "bias": {"bias": raw[:12].view(np.float32)}, "relative_bias": {"relative_bias": raw[:20].view(np.float32)},
        "relative_index": {"relative_index": raw[:20].view(np.int32), "relative_key": np.zeros((1, 9, 4))},
        "relative_key": {"relative_index": np.zeros(5, int),
                         "relative_key": raw[:16].view(np.float32).reshape(1, 1, 4)},
        "relative_query": {"relative_index": np.zeros(5, int),
                           "relative_query": raw[:16].view(np.float32).reshape(1, 1, 4)},
        "q_offset": {"q_offset": raw[:4].view(np.int32)},
        "k_positions": {"k_positions": raw[:3]},
        "alibi_slopes": {"alibi_slopes": raw[:4].view(np.float32)}, "sinks": {"sinks": raw[:4].view(np.float32)},
        "q_segments": {"q_segments": raw[:24].view(np.int64), "k_segments": np.zeros(3, int)},
        "k_segments": {"k_segments": raw[:24].view(np.int64), "q_segments": np.zeros(3, int)},
        "q_lengths": {"q_lengths": raw[:8].view(np.int64)}, "kv_lengths": {"kv_lengths": raw[:1].view(np.int8)},
    }.get(name, {})
    if name in shapes:
        whole = np.zeros(64, np.float32)
        out = whole[:9].reshape(1, 1, 3, 3)
        arguments[name] = whole[8:8 + np.prod(shapes[name])].reshape(shapes[name])
    with pytest.raises(ValueError, match=f"out shares memory with {name};"):
        attention_args(**arguments, out=out)


def test_out_between_inputs_in_one_buffer_is_fine():
    arguments = packed(slice(DIM, DIM + VALUE_DIM))
    assert check(**arguments).out is arguments["out"]
    assert check(out=np.zeros(OUT, np.float32).swapaxes(0, 1).copy().swapaxes(0, 1)).out.shape == OUT
    single = np.broadcast_to(np.float32(0), (1, 1)).copy()
    assert attention_args(single, single, single, out=np.zeros((1, 1), np.float32)).out_shape == (1, 1)


# What is accepted

def test_sizes_and_views():
    a = check()
    assert (a.batch, a.q_heads, a.kv_heads, a.q_len, a.kv_len, a.head_dim, a.value_dim) == ((2,), 4, 2, 5, 7, 8, 3)
    assert (a.out_shape, a.lse_shape, a.weights_shape) == (OUT, (2, 4, 5), (2, 4, 5, 7))
    assert a.query is QUERY and a.key is KEY and a.value is VALUE
    assert a.dtype == a.acc == np.float32 and a.scale == 1 / math.sqrt(8) and a.want == () and not a.two_d
    a = attention_args(QUERY, KEY, None)
    assert a.value is None and a.value_dim == 0


def test_layout_and_two_dimensions_are_views():
    bnhd = [x.swapaxes(1, 2).copy() for x in (QUERY, KEY, VALUE)]
    a = attention_args(*bnhd, layout="bnhd")
    assert a.query.shape == QUERY.shape and np.shares_memory(a.query, bnhd[0])
    assert a.out_shape == (2, 5, 4, 3) and a.lse_shape == (2, 4, 5)
    a = attention_args(QUERY[0, 0], KEY[0, 0], VALUE[0, 0], sinks=0.5, alibi_slopes=1, kv_lengths=3)
    assert a.two_d and a.query.shape == (1, 5, 8) and np.shares_memory(a.query, QUERY)
    assert (a.batch, a.out_shape, a.lse_shape, a.weights_shape) == ((), (5, 3), (5,), (5, 7))
    assert a.sinks.tolist() == [0.5] and a.alibi_slopes.tolist() == [1.0] and a.kv_lengths.shape == ()
    with pytest.raises(ValueError, match=r"mask has shape \(1, 5, 7\); wanted \(q_len, kv_len\) = \(5, 7\)"):
        attention_args(QUERY[0, 0], KEY[0, 0], VALUE[0, 0], mask=np.ones((1, 5, 7), bool))


def test_batch_axes_broadcast_but_arrays_stay():
    a = attention_args(QUERY[:1], np.zeros((3, 1, 2, 7, 8), np.float32), VALUE)
    assert a.batch == (3, 2) and a.query.shape == (1, 4, 5, 8) and a.value.shape == (2, 2, 7, 3)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_float_arrays_are_taken_as_they_are(dtype):
    x = QUERY.astype(dtype)[..., ::-2]
    x.flags.writeable = False
    assert check(query=x, key=KEY[..., :4]).query is x


def test_other_arrays_are_converted():
    swapped = QUERY.astype(np.dtype(np.float32).newbyteorder())
    a = check(query=swapped, key=KEY.astype(np.int8), value=VALUE.tolist())
    assert a.query.dtype == np.float32 and a.query.dtype.isnative
    assert a.key.dtype == np.float64 and a.value.dtype == np.float64 and a.dtype == a.acc == np.float64
    a = check(bias=np.ones(7, np.dtype(np.float16).newbyteorder()), mask=True)
    assert a.bias.dtype == np.float16 and a.bias.dtype.isnative and a.mask.shape == ()


def test_options_arrive_in_their_form():
    a = check(
        causal=np.True_, window=[np.int8(3), None], q_offset=np.array(2), scale=np.array(3), softcap=np.float16(2),
        alibi_slopes=np.array([1e300, -1e300, np.inf, 1]), sinks=[0, 1, -np.inf, np.nan], q_lengths=np.int16(4),
        kv_lengths=np.array([1, 2], np.uint8), q_segments=np.zeros((2, 5), np.uint8), k_segments=[0] * 7,
        want=["scores", "lse", "scores"], num_threads=np.int64(2))
    assert a.causal is True and a.window == (3, None) and a.q_offset == 2 and type(a.q_offset) is int
    assert a.scale == 3 and type(a.scale) is float and a.softcap == 2 and a.num_threads == 2
    largest = np.finfo(np.float32).max
    assert a.alibi_slopes.dtype == np.float32 and a.alibi_slopes.tolist() == [largest, -largest, np.inf, 1]
    np.testing.assert_array_equal(a.sinks, np.array([0, 1, -np.inf, np.nan], np.float32))
    assert a.q_lengths.shape == () and a.q_lengths == 4 and a.kv_lengths.tolist() == [1, 2]
    assert {x.dtype for x in (a.q_lengths, a.kv_lengths, a.q_segments, a.k_segments)} == {np.dtype(np.int64)}
    assert a.want == ("scores", "lse") and check(want="lse").want == ("lse",)
    assert check(window=(None, None)).window is None and check(window=(2**90, 0)).window == (2**62, 0)
    assert check(q_offset=[1, -2]).q_offset.tolist() == [1, -2]
    positions = check(k_positions=[3, 2**53, 0, 0, 9, -1, 7], kv_lengths=5, causal=True, q_offset=2).k_positions
    assert positions.dtype == np.int64 and positions.tolist() == [3, 2**53, 0, 0, 9, -1, 7]
    given = np.zeros((2, 1, 14), int)[..., ::2]
    assert np.shares_memory(check(k_positions=given).k_positions, given)
    assert check(k_positions=range(7), window=(None, None), causal=False).k_positions is not None


def no_rows(q_len, kv_len, **options):
    return lambda m: m.attention(*(np.ones((2, n, 3)) for n in (q_len, kv_len, kv_len)), **options)


def no_batch(**options):
    return lambda m: m.attention(*(np.ones((0, 2, 4, 3)) for _ in "qkv"), **options)


def cache(module, batch=0):
    return module.KVCache(batch, 1, 2, capacity=3, dtype="float32")


EMPTY_LISTS = {
    "q_offset": no_batch(q_offset=[]), "q_lengths": no_batch(q_lengths=[]), "kv_lengths": no_batch(kv_lengths=()),
    "segments of rows": no_rows(0, 4, q_segments=[], k_segments=[0] * 4),
    "segments of keys": no_rows(4, 0, q_segments=[0] * 4, k_segments=[]),
    "key_indices": no_rows(2, 4, key_indices=[[], []]),
    "k_positions": no_rows(2, 0, k_positions=[]), "key_mask": no_rows(2, 0, key_mask=[]),
    "mask": no_rows(2, 0, mask=[[], []]), "block_mask": no_rows(2, 0, block_mask=([[]], 2, 2)),
    "relative_index": no_rows(1, 0, relative_index=[], relative_key=np.ones((4, 3))),
    "append": lambda m: cache(m).append(np.ones((0, 1, 1, 2)), np.ones((0, 1, 1, 2)), lengths=[]),
    "truncate": lambda m: cache(m).truncate([]), "reorder": lambda m: cache(m).reorder([]),
    "keep": lambda m: cache(m, 1).keep([[[]]]),
    "padding_mask": lambda m: attnc.masks.length_mask([], 4), "segments": lambda m: attnc.masks.segment_mask([], []),
    "pool": lambda m: m.AttentionWeights(np.ones((0, 3)), np.ones((0, 3))).pool([], []),
    "rows": lambda m: m.AttentionWeights(np.ones((2, 3)), np.ones((2, 3))).key_mass(rows=[]),
    "index": lambda m: m.AttentionWeights(np.ones((2, 3)), np.ones((2, 3)))[[]],
    "kv_lengths of pages": lambda m: m.attention_varlen(
        np.ones((0, 1, 2)), *[np.ones((3, 4, 1, 2))] * 2, [0], block_table=np.zeros((0, 1), int), kv_lengths=[]),
    "segments of tokens": lambda m: m.attention_varlen(
        *[np.ones((0, 1, 2))] * 3, [0], [0], q_segments=[], k_segments=[], key_mask=[], q_offset=[]),
}


@pytest.mark.parametrize("name", EMPTY_LISTS)
@pytest.mark.parametrize("module", [attnc, reference], ids=["attnc", "reference"])
def test_an_empty_list_is_of_the_dtype_that_is_wanted(module, name):
    """NumPy makes it float64; an array of floats stays an error."""
    EMPTY_LISTS[name](module)
    with pytest.raises(TypeError, match="must be an integer or an array of integers, got float64 array"):
        module.attention(*(np.ones((0, 2, 4, 3)) for _ in "qkv"), q_offset=np.zeros(0))


@pytest.mark.parametrize("scale", [0, -3, np.float16(0.5), np.int8(2), ml_dtypes.bfloat16(2), np.array(0.25)])
def test_scale_is_any_finite_number(scale):
    assert check(scale=scale).scale == float(scale)


def test_numbers_beyond_the_accumulation_dtype():
    largest, tiny = float(np.finfo(np.float32).max), float(np.finfo(np.float32).tiny)
    assert check(scale=-1e300).scale == -largest and check(softcap=1e300).softcap == largest
    assert check(softcap=1e-300).softcap == tiny
    assert check(query=QUERY.astype(float), scale=1e300).scale == 1e300
    assert attention_args(*(x[..., :0] for x in (QUERY, KEY, VALUE))).scale == 1.0


def test_softmax_args():
    x = np.zeros((2, 3, 4), np.float16)
    a = softmax_args(x, (0, -1), np.ones(4, bool), x, 1)
    assert a.axes == (0, 2) and a.dtype == np.float16 and a.acc == np.float32 and a.out is x and a.x is x
    assert softmax_args(x, None, None, None, None).axes == (0, 1, 2)
    assert softmax_args(x, (), None, None, None).axes == ()
    assert softmax_args([1, 2], -1, None, None, None).dtype == np.float64


@pytest.mark.parametrize("error, arguments, words", [
    (T, {"x": np.zeros(3, np.uint16)}, "x has dtype uint16"),
    (T, {"x": np.zeros(3, complex)}, "x has dtype complex128"),
    (T, {"axis": 1.0}, "axis must be an integer, got float 1.0"),
    (T, {"axis": True}, "axis must be an integer, got bool True"),
    (V, {"axis": 2}, "axis must be an integer from -2 to 1, got 2"),
    (V, {"axis": (0, -2)}, r"axis names an axis twice, got \(0, -2\)"),
    (V, {"x": 1.0}, "axis must be None"),
    (T, {"where": np.ones(3)}, "where must be bool"),
    (V, {"where": np.ones((4, 2, 3), bool)}, r"where has shape \(4, 2, 3\)"),
    (V, {"where": np.ones(2, bool)}, r"where has shape \(2,\)"),
    (T, {"out": np.zeros((2, 3), np.float16)}, "out has dtype float16"),
    (V, {"out": np.zeros((3, 2), np.float32)}, r"out has shape \(3, 2\)"),
    (V, {"num_threads": 0}, "num_threads"),
])
def test_softmax_errors(error, arguments, words):
    arguments = {"x": np.zeros((2, 3), np.float32), "axis": -1, "where": None, "out": None, "num_threads": None,
                 **arguments}
    with pytest.raises(error, match=words):
        softmax_args(**arguments)


def test_softmax_out_is_the_input_or_apart_from_it():
    x = np.zeros((4, 4), np.float32)
    with pytest.raises(ValueError, match="out shares memory with x"):
        softmax_args(x, -1, None, x.T, None)
    with pytest.raises(ValueError, match="out shares memory with x"):
        softmax_args(x[:3], -1, None, x[1:], None)
    with pytest.raises(ValueError, match="out shares memory with where"):
        softmax_args(np.zeros((4, 4), np.float32), -1, x.view(bool)[:, :4], x, None)


@pytest.mark.parametrize("error, arguments, words", [
    (V, {"weights": np.zeros((5, 7))}, r"weights has 2 axes, shape \(5, 7\)"),
    (V, {"value": np.zeros((7, 3))}, r"value has 2 axes, shape \(7, 3\)"),
    (V, {"value": np.zeros((2, 6, 3))}, r"value has length 6, weights has 7 keys.*\(2, 6, 3\)"),
    (V, {"value": np.zeros((3, 7, 3))}, r"weights has 4 heads, no multiple of the 3 of value.*\(3, 7, 3\)"),
    (V, {"weights": np.zeros((2, 4, 5, 7)), "value": np.zeros((3, 2, 7, 3))}, r"batch.*\(3, 2, 7, 3\)"),
    (T, {"weights": np.zeros((4, 5, 7), bool).astype(object)}, "weights has dtype object"),
    (T, {"out": np.zeros((4, 5, 3), np.float32)}, "out has dtype float32; wanted float64"),
    (V, {"out": np.zeros((4, 5, 4))}, r"out has shape \(4, 5, 4\); wanted \(4, 5, 3\)"),
    (V, {"num_threads": -1}, "num_threads"),
])
def test_weighted_sum_errors(error, arguments, words):
    arguments = {"weights": np.zeros((4, 5, 7)), "value": np.zeros((2, 7, 3)), "out": None, "num_threads": None,
                 **arguments}
    with pytest.raises(error, match=words):
        weighted_sum_args(**arguments)


def test_weighted_sum_out_on_an_input():
    weights = np.zeros((4, 5, 5))
    with pytest.raises(ValueError, match="out shares memory with weights"):
        weighted_sum_args(weights, np.zeros((4, 5, 5)), weights, None)


NO_ARRAYS_FIRST = ("AttentionWeights", "KVCache", "PagedKVCache", "alibi_slopes", "align", "deberta_relative_index",
                   "merge_states", "rollout", "t5_relative_bias", "t5_relative_bias_backward")


@pytest.mark.parametrize("name", [name for name in reference.__all__ if name not in NO_ARRAYS_FIRST])
def test_the_reference_checks_its_arguments(name):
    function = getattr(reference, name)
    positional = [p.name for p in inspect.signature(function).parameters.values()
                  if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    arrays = [np.zeros((2, 2, 2), complex)] * len(positional)
    with pytest.raises(TypeError, match=f"{positional[0]} has dtype complex128"):
        function(*arrays)
    with pytest.raises(ValueError, match="num_threads"):
        function(*(x.real for x in arrays), num_threads=0)


@pytest.mark.parametrize("module", [attnc, reference])
def test_attention_without_values_is_refused(module):
    """The checks know "no value" for attention_scores; attention itself needs one."""
    with pytest.raises(TypeError, match="value must be an array, got None"):
        module.attention(QUERY, KEY, None)


def test_nothing_is_written_when_a_check_fails():
    out = np.full((2, 2), 7.0)
    with pytest.raises(ValueError):
        reference.attention(np.ones((2, 2)), np.ones((2, 2)), np.ones((2, 2)), out=out, num_threads=0)
    assert (out == 7).all()


def test_options_are_passed_on_in_the_order_of_the_checks():
    own = list(inspect.signature(attention_args).parameters)[3:]
    assert own[:len(OPTIONS)] == list(OPTIONS)
    for module in (attnc, attnc.reference):
        for function in (module.attention, module.attention_scores, module.attention_weights, module.AttentionWeights,
                         module.attention_backward):
            assert set(OPTIONS) <= set(inspect.signature(function).parameters)


@pytest.mark.parametrize("options, ends", [
    ({"relative_bias": np.zeros((4, 1))}, r"\(17,\)"), ({"key_mask": np.ones((2, 1), bool)}, r"\(9,\)"),
    ({"block_mask": (np.ones(3, bool), 9, 3)}, r"\(1, 3\)"), ({"mask": np.ones((4, 2, 9), bool)}, None)])
def test_a_shape_that_may_not_broadcast_in_its_last_axes_says_so(options, ends):
    x = np.zeros((2, 4, 9, 8))
    words = rf"to it and ends with {ends}$" if ends else "to it$"
    with pytest.raises(ValueError, match=rf" has shape .*or a shape that broadcasts {words}"):
        attnc.attention(x, x, x, **options)
