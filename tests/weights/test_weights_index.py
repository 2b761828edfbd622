"""AttentionWeights indexed: by anything that NumPy takes, with the bits, dtype, shape and type of the dense weights."""

import itertools
import warnings

import numpy as np
import pytest
from checking import assert_same_bits, inputs

import attnc
from attnc import reference

SHAPES = {"batch": ((2,), 4, 2), "two axes before": ((3, 1), 2, 1), "heads": ((), 3, 3), "one head": None}


def weights(kind, module=attnc, **options):
    random = np.random.default_rng(0)
    if SHAPES[kind] is None:
        return module.AttentionWeights(*(random.standard_normal((n, 8), np.float32) for n in (5, 6)), **options)
    query, key, _ = inputs(random, *SHAPES[kind], q_len=5, kv_len=6)
    return module.AttentionWeights(query, key, **options)


def assert_like_numpy(W, dense, index):
    """The same result, or an IndexError where NumPy has one."""
    try:
        wanted = dense[index]
    except IndexError:
        with pytest.raises(IndexError):
            W[index]
        return
    got = W[index]
    assert type(got) is type(wanted) and got.dtype == wanted.dtype and got.shape == wanted.shape, index
    assert np.asarray(got).tobytes() == np.asarray(wanted).tobytes(), index


def drawn(random, shape):
    """An index out of all that there are: about one in twenty is an error."""
    parts, axis, dots = [], 0, False
    points = random.choice([1, 3], random.integers(1, 3))
    for _ in range(random.integers(0, len(shape) + 3)):
        length = shape[axis] if axis < len(shape) else 1
        bounds = [None, *range(-length - 1, length + 2)]
        kind = random.choice(["int", "slice", "ints", "bools", "none", "dots", "bool", "plane", "list"],
                             p=[0.2, 0.25, 0.2, 0.06, 0.1, 0.08, 0.03, 0.04, 0.04])
        axis += kind in ("int", "slice", "ints", "bools", "list") or 2 * (kind == "plane")
        if kind == "dots" and not dots:
            dots = True
            parts.append(...)
            axis += random.integers(0, len(shape) + 1)
        elif kind == "int":
            place = random.integers(-length - (random.random() < 0.02), length)
            parts.append(random.choice([int, np.int8, np.array])(place))
        elif kind == "slice":
            parts.append(slice(random.choice(bounds), random.choice(bounds), random.choice([None, 1, 2, -1, -2])))
        elif kind == "ints":
            own = [random.choice([1, n]) for n in points][random.integers(0, len(points)):]
            parts.append(random.integers(-length, length, own).astype(random.choice(["i1", "i8", "u8"])
                                                                      if random.random() < 0.3 else "i8"))
            if parts[-1].dtype == "u8":
                parts[-1] %= np.uint64(length)
        elif kind == "bools":
            parts.append(random.random(length) < 0.4)
        elif kind == "none":
            parts.append(None)
        elif kind == "bool":
            parts.append(bool(random.random() < 0.8))
        elif kind == "plane" and axis <= len(shape):
            parts.append(random.random(shape[axis - 2:axis]) < 0.3)
        elif kind == "list":
            parts.append(random.integers(-length, length, random.choice([0, 1, points[-1]])).tolist())
    return tuple(parts) if len(parts) != 1 or random.random() < 0.5 else parts[0]


@pytest.mark.parametrize("kind", SHAPES)
def test_drawn_indices(isa, kind, seed):
    W, random = weights(kind, causal=True), np.random.default_rng(seed)
    dense = W.dense()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        for _ in range(500):
            assert_like_numpy(W, dense, drawn(random, dense.shape))


EACH = (1, -1, slice(None), slice(None, None, -1), slice(3, 0, -2), slice(2, 2), None, ..., [], [1, 0], [[1], [0]],
        np.array([True, False] * 2), np.array(1), True, False, np.array(False), np.zeros((1, 0), int))


def test_all_triples_of_parts():
    """Every order of parts: where NumPy puts the axes of arrays with ints, None and an ellipsis of no width between."""
    query, key = (np.random.default_rng(0).standard_normal((2, n, 8), np.float32) for n in (4, 4))
    W = attnc.AttentionWeights(query, key)
    dense = W.dense()
    for count in range(4):
        for index in itertools.product(EACH, repeat=count):
            assert_like_numpy(W, dense, index)


@pytest.mark.parametrize("module", [attnc, reference])
def test_a_scalar_is_a_scalar(isa, module):
    W = module.AttentionWeights(np.ones((4, 8)), np.ones((4, 8)))
    assert type(W[1, 2]) is np.float64 and W[1, 2] == 0.25
    assert type(W[1, 2, ...]) is np.ndarray and W[1, 2, ...].shape == ()
    W = weights("batch", module)
    for one in (W[0, 1, 2, 3], W[np.array(0), 1, np.int8(2), -3], W.head(0, 1)[2, 3]):
        assert type(one) is np.float32
    assert W[0, 1, 2, 3] == W.head(0, 1)[2, 3]
    assert f"{W.head(0, 1)[2, 3]:.3f}" == f"{W.dense()[0, 1, 2, 3]:.3f}"


def test_errors_say_the_axis_and_its_size():
    W = weights("batch")
    for index, words in (
            ((2,), "index 2 is out of bounds for axis 0 with size 2"),
            ((0, -5), "index -5 is out of bounds for axis 1 with size 4"),
            ((..., [0, 7], 0), "index 7 is out of bounds for axis 2 with size 5"),
            ((..., np.array([[6]])), "index 6 is out of bounds for axis 3 with size 6"),
            ((0, 0, 5, []), "index 5 is out of bounds for axis 2 with size 5"),
            ((0, 2**70), f"index {2**70} is out of bounds for axis 1 with size 4"),
            ((..., np.ones(5, bool)), r"a bool array of shape \(5,\) indexes axis 3 with size 6; wanted \(6,\)")):
        with pytest.raises(IndexError, match=words):
            W[index]


def test_large_parts(isa):
    """Rows backwards, heads in any order, pairs over all heads: in blocks of the kernels' work, to the bit."""
    query, key, _ = inputs(np.random.default_rng(0), (2,), 6, 3, 400, 300)
    W = attnc.AttentionWeights(query, key, causal=True)
    dense, random = W.dense(), np.random.default_rng(1)
    rows, keys, heads, batch = (random.integers(-n, n, 500) for n in (400, 300, 6, 2))
    for index in (np.s_[:, ::-1, ::-2, ::-1], np.s_[:, [4, 1, 4], 10:200, ::7], np.s_[batch, heads, rows, keys],
                  np.s_[0, heads[:9], ::-1, keys[:9]], np.s_[batch[:5], :, rows[:5]],
                  np.ix_([1, 0], [5, 2], rows[:20], keys), dense > 0.3,
                  np.s_[:, random.random((6, 400)) < 0.01], np.s_[..., random.random((400, 300)) < 0.001]):
        assert_same_bits(W[index], dense[index])
