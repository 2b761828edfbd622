"""Results go exactly where they belong: `out=` of every stride, with not a byte changed around it."""

import numpy as np
import pytest
from checking import DTYPES, PATHS, assert_same_bits, dtypes_in_turn, inputs

import attnc
from attnc import reference
from attnc._checks.output import _overlaps_itself

GUARD = 0xA5


def guarded(shape, dtype, steps, order):
    """A view of `shape` inside a larger buffer of guard bytes, with a step along each axis and an order in memory."""
    inner = [shape[axis] * abs(step) + 2 for axis, step in enumerate(steps)]
    buffer = np.full([inner[axis] for axis in order] + [dtype.itemsize], GUARD, np.uint8)
    whole = buffer.view(dtype)[..., 0].transpose(np.argsort(order))
    view = whole[tuple(slice(1, 1 + n * abs(step), abs(step)) for n, step in zip(shape, steps, strict=True))]
    return buffer, view[tuple(slice(None, None, -1) if step < 0 else slice(None) for step in steps)]


def untouched(buffer, view):
    """Whether every byte outside `view` is still a guard byte."""
    view.view(f"u{view.dtype.itemsize}")[...] = int.from_bytes(bytes([GUARD] * view.dtype.itemsize), "little")
    return bool((buffer == GUARD).all())


STRIDES = {
    "rows apart": ((1, 1, 1, 1), (0, 1, 2, 3)),
    "steps": ((1, 1, 1, 2), (0, 1, 2, 3)),
    "backwards": ((-1, -1, -1, -1), (0, 1, 2, 3)),
    "steps backwards": ((1, 2, -3, -2), (0, 1, 2, 3)),
    "fortran": ((1, 1, 1, 1), (3, 2, 1, 0)),
    "bnhd": ((1, 1, 1, 1), (0, 2, 1, 3)),
}


@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
@pytest.mark.parametrize("strides, path, dtype", dtypes_in_turn(STRIDES, PATHS))
def test_attention(isa, strides, path, layout, dtype, seed):
    arrays = inputs(np.random.default_rng(seed), (2,), *PATHS[path], dtype=dtype)
    if layout == "bnhd":
        arrays = [x.swapaxes(-2, -3) for x in arrays]
    options = dict(layout=layout, causal=True, kv_lengths=[0, arrays[1].shape[-2 if layout == "bhnd" else -3]])
    wanted = attnc.attention(*arrays, **options)
    steps, order = STRIDES[strides]
    buffer, out = guarded(wanted.shape, wanted.dtype, steps, order)
    assert attnc.attention(*arrays, out=out, **options) is out
    assert_same_bits(out, wanted)
    assert untouched(buffer, out)


@pytest.mark.parametrize("strides, path, dtype", dtypes_in_turn(STRIDES, PATHS))
def test_scores_and_weights(isa, strides, path, dtype, seed):
    query, key, _ = inputs(np.random.default_rng(seed), (2,), *PATHS[path], dtype=dtype)
    options = dict(causal=True, kv_lengths=[0, key.shape[-2]])
    lse = attnc.attention(query, key, key, want="lse", **options).lse
    steps, order = STRIDES[strides]
    for function, more in (
            (attnc.attention_scores, {}), (attnc.attention_scores, {"stage": "raw"}), (attnc.attention_weights, {}),
            (attnc.attention_weights, {"lse": lse})):
        wanted = function(query, key, **options, **more)
        buffer, out = guarded(wanted.shape, wanted.dtype, steps, order)
        assert function(query, key, out=out, **options, **more) is out
        assert_same_bits(out, wanted)
        assert untouched(buffer, out)


def overlapping(shape, strides, dtype):
    """A view of zeros with strides in elements, which may be negative."""
    starts = [-stride * (n - 1) if stride < 0 else 0 for n, stride in zip(shape, strides, strict=True)]
    room = np.zeros(1 + sum(abs(stride) * (n - 1) for n, stride in zip(shape, strides, strict=True)), dtype)
    return np.lib.stride_tricks.as_strided(room[sum(starts):], shape, [stride * room.itemsize for stride in strides])


def place_count(x):
    """How many elements of memory `x` has."""
    places = np.zeros((), np.int64)
    for n, stride in zip(x.shape, x.strides, strict=True):
        places = np.add.outer(places, np.arange(n) * stride)
    return len(np.unique(places))


def takes_out(module, dtype):
    """Each function with `out=`, by the shape (2, 3, 4) or (3, 4) of its result: what calls it."""
    query, key, value = (np.ones(shape, dtype) for shape in ((2, 3, 5), (2, 4, 5), (2, 4, 4)))
    wide = np.float64 if dtype == np.float64 else np.float32
    cu, packed = [0, 2], np.ones((2, 3, 5), dtype)
    more = module.AttentionWeights(np.ones((2, 3, 5, 5), dtype), np.ones((2, 3, 4, 5), dtype))
    W, heads = module.AttentionWeights(query, key), module.AttentionWeights(query[:, None], key[:, None])
    return {
        "attention": (dtype, lambda out: module.attention(query, key, value, out=out)),
        "attention with options": (dtype, lambda out: module.attention(query, key, value, want="lse", out=out).output),
        "scores": (wide, lambda out: module.attention_scores(query, key, out=out)),
        "weights": (dtype, lambda out: module.attention_weights(query, key, out=out)),
        "weighted_sum": (dtype, lambda out: module.weighted_sum(np.ones((2, 3, 4), dtype), value, out=out)),
        "softmax": (dtype, lambda out: module.softmax(np.ones((2, 3, 4), dtype), out=out)),
        "softmax in place": (dtype, lambda out: module.softmax(out, out=out)),
        "log_softmax": (dtype, lambda out: module.log_softmax(np.ones((2, 3, 4), dtype), out=out)),
        "varlen": (dtype, lambda out: module.attention_varlen(packed, packed, packed[..., :4], cu, cu, out=out)),
        "dense": (wide, lambda out: W.dense(out=out)),
        "head_mean": (wide, lambda out: heads.head_mean(out=out)),
        "key_mass": (wide, lambda out: more.key_mass(out=out)),
    }


OVERLAPS = [(4, 4, 1), (1, 1, 1), (2, 6, 1), (12, 4, 0), (0, 4, 1), (12, 3, 1), (-4, 4, 1), (5, 2, 3), (12, -3, -1),
            (3, 2, 7), (13, 5, 6), (13, 5, 1)]
APART = [(12, 4, 1), (1, 2, 6), (4, 8, 1), (-12, 4, -1), (1, 8, 2), (3, 7, 28), (6, 2, 7), (15, -5, 1)]


@pytest.mark.parametrize("module", [attnc, reference])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_elements_of_out_have_places_of_their_own(module, dtype):
    for strides in OVERLAPS + APART:
        for name, (result, call) in takes_out(module, dtype).items():
            out = overlapping((2, 3, 4), strides, result)
            if place_count(out) == out.size:
                wanted = call(np.zeros((2, 3, 4), result))
                assert call(out) is out, name
                np.testing.assert_array_equal(out, wanted, err_msg=f"{name} {strides}")
            else:
                with pytest.raises(ValueError, match=r"out has strides .*elements share memory"):
                    call(out)
    assert all(place_count(overlapping((2, 3, 4), strides, dtype)) < 24 for strides in OVERLAPS)
    assert all(place_count(overlapping((2, 3, 4), strides, dtype)) == 24 for strides in APART)


def test_overlap_is_decided_exactly(seed):
    """Random strides, of axes of any order and sign, and of bytes that are no whole elements."""
    random, found = np.random.default_rng(seed), []
    for _ in range(2000):
        shape = random.integers(1, 5, random.integers(1, 5))
        strides = random.integers(-20, 21, len(shape))
        buffer = np.zeros(2 * 20 * 4 * 5, np.uint8)
        out = np.ndarray(shape, np.float32, buffer, 400, strides)
        axes = [np.arange(n) * stride for n, stride in zip(shape, strides, strict=True)]
        places = np.add.reduce(np.meshgrid(*axes, [0], indexing="ij"))
        gaps = np.diff(np.sort(places.ravel()))
        found.append(bool((gaps < 4).any()))
        assert _overlaps_itself(out) == found[-1], (shape, strides)
    assert 200 < sum(found) < 1800
    assert not _overlaps_itself(np.ndarray((0, 3), np.float32, buffer, 0, (0, 0)))


@pytest.mark.parametrize("module", [attnc, reference])
def test_out_of_scores_and_weights_is_checked_before_any_work(module):
    query, key = np.zeros((2, 3, 4), np.float16), np.zeros((2, 5, 4), np.float16)
    with pytest.raises(ValueError, match=r"out has shape \(2, 3, 4\); wanted \(2, 3, 5\)"):
        module.attention_weights(query, key, out=np.zeros((2, 3, 4), np.float16))
    with pytest.raises(TypeError, match="out has dtype float32; wanted float16"):
        module.attention_weights(query, key, out=np.zeros((2, 3, 5), np.float32))
    with pytest.raises(TypeError, match="out has dtype float16; wanted float32"):
        module.attention_scores(query, key, out=np.zeros((2, 3, 5), np.float16))
    weights = np.zeros((1, 1, 1), np.float32)
    with pytest.raises(ValueError, match="out shares memory with lse"):
        module.attention_weights(query[:1, :1].astype("f4"), key[:1, :1].astype("f4"), lse=weights[..., 0], out=weights)
    scores = np.zeros((2, 3, 5), np.float32)
    assert module.attention_scores(query + 1, key + 1, out=scores) is scores and (scores == 2).all()
    weights = np.zeros((2, 3, 5), np.float16)
    assert module.attention_weights(query, key, out=weights) is weights and (weights == np.float16(0.2)).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("strides", STRIDES)
def test_weighted_sum_and_softmax(isa, strides, dtype, seed):
    query, key, value = inputs(np.random.default_rng(seed), (2,), *PATHS["shared"], dtype=dtype)
    weights = attnc.attention_weights(query, key)
    steps, order = STRIDES[strides]
    calls = (attnc.weighted_sum, (weights, value)), (attnc.softmax, (query,)), (attnc.log_softmax, (query,))
    for function, arrays in calls:
        wanted = function(*arrays)
        buffer, out = guarded(wanted.shape, wanted.dtype, steps, order)
        assert function(*arrays, out=out) is out
        assert_same_bits(out, wanted)
        assert untouched(buffer, out)


SIZES = [(1, 1, 1), (5, 7, 3), (6, 16, 16), (7, 17, 17), (97, 513, 33), (2, 2049, 5)]


@pytest.mark.parametrize("q_len, kv_len, dim", SIZES)
def test_results_made_here_are_written_whole(isa, q_len, kv_len, dim, seed, monkeypatch):
    """New arrays hold guard numbers and lie between guard bytes: each element is written, nothing beside it."""
    made = []

    def empty(shape, dtype):
        buffer, view = guarded(shape, np.dtype(dtype), (1,) * len(shape), tuple(range(len(shape))))
        made.append((buffer, view))
        return view

    arrays = inputs(np.random.default_rng(seed), (2,), 2, 1, q_len, kv_len, dim)
    options = dict(causal=True, kv_lengths=[0, kv_len], q_lengths=[q_len, q_len // 2])
    wanted = attnc.attention(*arrays, want=("lse", "weights", "scores"), **options)
    monkeypatch.setattr(np, "empty", empty)
    got = attnc.attention(*arrays, want=("lse", "weights", "scores"), **options)
    monkeypatch.undo()
    assert len(made) == 4
    assert_same_bits(got, wanted)
    assert all(untouched(buffer, view) for buffer, view in made)


def test_out_is_returned_and_holds_two_axes(isa, seed):
    query, key, value = (x[0, 0] for x in inputs(np.random.default_rng(seed), (1,), 1, 1, 9, 20, 8))
    out = np.empty((9, 8), np.float32)
    assert attnc.attention(query, key, value, out=out) is out
    assert_same_bits(out, attnc.attention(query, key, value))
    result = attnc.attention(query, key, value, out=out, want="lse")
    assert result.output is out


def test_no_input_is_written(isa, seed):
    arrays = inputs(np.random.default_rng(seed), (2,), 4, 2, 40, 530, 16)
    bias = np.zeros((40, 530), np.float32)
    before = [x.tobytes() for x in (*arrays, bias)]
    attnc.attention(*arrays, bias=bias, mask=bias == 0, scale=-0.5, want=("lse", "weights", "scores"))
    attnc.softmax(arrays[0])
    assert before == [x.tobytes() for x in (*arrays, bias)]


def test_empty_out(isa):
    """An empty array has strides of 0 in NumPy, and shares no place with itself."""
    query, key, value = np.zeros((4, 0, 3)), np.zeros((4, 2, 3)), np.zeros((4, 2, 5))
    out = np.zeros((4, 0, 5))
    assert attnc.attention(query, key, value, out=out) is out
    assert attnc.weighted_sum(np.zeros((4, 0, 2)), value, out=out) is out
