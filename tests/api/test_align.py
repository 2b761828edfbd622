"""`align`: the path against every other one, against the twin and openai-whisper's own, its errors and its speed."""

import sys
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from slow import slow_path

import attnc
from attnc import reference

WHISPERS = Path(__file__).with_name("whisper_paths.npz")
BOTH = pytest.mark.parametrize("align", [attnc.align, reference.align], ids=["attnc", "reference"])


def drawn(seed, ties=True):
    """A small matrix; of few values, so that there are ties, or of many."""
    random = np.random.default_rng(seed)
    shape = random.integers(1, 9, 2)
    return random.integers(-1, 2, shape).astype(float) if ties else random.standard_normal(shape)


@BOTH
@pytest.mark.parametrize("medfilt", [None, 1, 3, 7])
@pytest.mark.parametrize("seed", range(30))
def test_against_a_second_definition(align, medfilt, seed):
    for ties in (True, False):
        x = drawn(seed, ties)
        rows, frames = align(x, medfilt=medfilt)
        assert rows.dtype == frames.dtype == np.int64
        assert list(zip(rows.tolist(), frames.tolist(), strict=True)) == slow_path(x.tolist(), medfilt or 1)


@pytest.mark.parametrize("seed", range(20))
def test_no_other_path_has_a_larger_sum(seed):
    x = drawn(seed, False)[:5, :6]

    @cache
    def largest(i, j):
        if i == j == 0:
            return x[0, 0]
        return x[i, j] + max(largest(k, m) for k, m in ((i - 1, j), (i, j - 1), (i - 1, j - 1)) if k >= 0 and m >= 0)

    rows, frames = attnc.align(x, medfilt=1)
    n, m = x.shape
    assert (rows[0], frames[0], rows[-1], frames[-1]) == (0, 0, n - 1, m - 1)
    assert {(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(zip(rows, frames, strict=True))} <= {(0, 1), (1, 0), (1, 1)}
    assert x[rows, frames].sum() == pytest.approx(largest(n - 1, m - 1))


def filtered(x, width):
    """The medians that `align` and openai-whisper compute first."""
    half = width // 2
    if not 0 < half < x.shape[1]:
        return x
    windows = np.lib.stride_tricks.sliding_window_view(np.pad(x, ((0, 0), (half, half)), mode="reflect"), width, axis=1)
    return np.median(windows, axis=-1)


def test_those_of_openai_whisper():
    """The paths are made by benchmarks/capture/whisper_paths.py, with its matrices.

    There a tie of the diagonal with the row before takes the frame before, whatever it costs: never a larger sum. Equal
    medians side by side make ties; without the filter there are none.
    """
    same = []
    with np.load(WHISPERS) as known:
        for name, path in known.items():
            seed, shape, width = name.split()
            weights = np.random.default_rng(int(seed)).random([int(n) for n in shape.split("x")]) ** 8
            x = weights - weights.mean(0)
            got = attnc.align(x, medfilt=int(width))
            same.append(np.array_equal(got, path))
            assert same[-1] or width != "1", name
            x = filtered(x, int(width))
            assert x[got].sum() >= x[tuple(path)].sum() - 1e-5, name
    assert len(same) == 48 and sum(same) >= 44


@BOTH
def test_ties_prefer_the_diagonal_then_the_frame_before(align):
    assert np.array_equal(align(np.zeros((3, 3))), [[0, 1, 2], [0, 1, 2]])
    assert np.array_equal(align(np.zeros((2, 4))), [[0, 0, 0, 1], [0, 1, 2, 3]])
    assert np.array_equal(align([[0.0, 1.0], [1.0, 0.0]], medfilt=1), [[0, 1, 1], [0, 0, 1]])


@BOTH
def test_minus_infinity_is_avoided(align):
    x = np.array([[0.0, -np.inf, 9.0], [-1.0, -np.inf, 9.0], [-1.0, -1.0, 0.0]])
    assert np.array_equal(align(x, medfilt=None), [[0, 1, 2, 2], [0, 0, 1, 2]])
    with pytest.raises(ValueError, match="no path without -inf"):
        align([[0.0, 0.0], [-np.inf, -np.inf], [0.0, 0.0]], medfilt=1)


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8", "bool", ">f8"])
def test_dtypes_and_strides(dtype):
    x = (np.random.default_rng(0).random((9, 14)) * 3).astype(dtype)
    wanted = attnc.align(x.astype(np.float64))
    assert np.array_equal(attnc.align(x), wanted)
    assert np.array_equal(attnc.align(np.asfortranarray(x)), wanted)
    assert np.array_equal(attnc.align(x.tolist()), wanted)
    assert np.array_equal(attnc.align(np.repeat(x, 2, 0)[::2]), wanted)


@pytest.mark.parametrize("elements", [1, 500])
def test_blocks_of_rows_change_nothing(elements, monkeypatch):
    x = np.random.default_rng(1).standard_normal((23, 31))
    wanted = attnc.align(x)
    monkeypatch.setattr(sys.modules["attnc.align"], "BLOCK", elements)
    assert np.array_equal(attnc.align(x), wanted)


@BOTH
@pytest.mark.parametrize(("error", "matrix", "options", "words"), [
    (ValueError, np.zeros((0, 3)), {}, r"matrix has shape \(0, 3\); wanted \(rows, frames\) with at least one"),
    (ValueError, np.zeros((3, 0)), {}, "at least one of each"),
    (ValueError, np.zeros(3), {}, r"shape \(3,\)"),
    (ValueError, np.zeros((2, 3, 4)), {}, r"shape \(2, 3, 4\)"),
    (ValueError, [[1.0, np.nan]], {}, "matrix holds NaN"),
    (ValueError, [[1.0, np.inf]], {}, "matrix holds inf"),
    (ValueError, [[-np.inf, np.nan]], {}, "matrix holds NaN"),
    (ValueError, np.zeros((2, 2)), {"medfilt": 2}, "medfilt must be odd, got 2"),
    (ValueError, np.zeros((2, 2)), {"medfilt": -1}, "medfilt must be an integer from 1"),
    (TypeError, np.zeros((2, 2)), {"medfilt": 7.0}, "medfilt must be an integer"),
    (TypeError, np.zeros((2, 2), complex), {}, "matrix has dtype complex128"),
    (TypeError, None, {}, "matrix must be an array, got None"),
    (TypeError, np.ma.array([[1.0]]), {}, "matrix is a numpy.ma masked array"),
])
def test_errors(align, error, matrix, options, words):
    with pytest.raises(error, match=words):
        align(matrix, **options)


def test_time_grows_with_the_size_alone():
    """4,000 x 4,000 places at once: a quadratic step would not end."""
    x = np.random.default_rng(0).random((4000, 4000), np.float32)
    rows, frames = attnc.align(x - x.mean(0), medfilt=1)
    assert (np.diff(rows) + np.diff(frames) >= 1).all()
