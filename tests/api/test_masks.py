"""Masks as arrays: the public helpers against the words of their definition."""

import numpy as np
import pytest

from attnc import masks


@pytest.mark.parametrize("q_len, kv_len, q_offset", [(3, 5, None), (5, 3, None), (3, 5, 0), (2, 2, -1), (0, 4, None),
                                                     (4, 0, 2), (1, 3, 10)])
@pytest.mark.parametrize("window", [(None, None), (0, 0), (1, None), (None, 2), (2, 1), (2**80, 0)])
def test_causal_and_window(q_len, kv_len, q_offset, window):
    offset = kv_len - q_len if q_offset is None else q_offset
    causal = masks.causal_mask(q_len, kv_len, q_offset)
    near = masks.window_mask(q_len, kv_len, window, q_offset)
    assert causal.shape == near.shape == (q_len, kv_len)
    assert causal.dtype == near.dtype == bool
    left, right = window
    for i, j in np.ndindex(q_len, kv_len):
        assert causal[i, j] == (j <= i + offset)
        before, after = i + offset - j, j - i - offset
        assert near[i, j] == ((left is None or before <= left) and (right is None or after <= right))


def test_an_array_of_offsets_makes_a_mask_with_a_heads_axis():
    offsets = np.array([[0], [2]])
    got = masks.causal_mask(2, 3, offsets)
    assert got.shape == (2, 1, 1, 2, 3)
    for b, offset in enumerate(offsets[:, 0]):
        np.testing.assert_array_equal(got[b, 0, 0], masks.causal_mask(2, 3, int(offset)))
    assert masks.window_mask(2, 3, (1, 0), offsets).shape == got.shape


def test_default_offset_shows_the_last_row_every_key():
    assert masks.causal_mask(3, 7)[-1].all()
    assert masks.causal_mask(3, 7)[0].tolist() == [True] * 5 + [False] * 2


def test_lengths():
    assert masks.length_mask(2, 3).tolist() == [True, True, False]
    assert masks.length_mask([[0], [3]], 3).tolist() == [[[False] * 3], [[True] * 3]]


def test_segments():
    assert masks.segment_mask([0, 1, -1], [1, -1]).tolist() == [[False, False], [True, False], [False, False]]
    got = masks.segment_mask([[0, 1], [1, 1]], [0, 1])
    assert got.shape == (2, 1, 2, 2)
    assert got[:, 0].tolist() == [[[True, False], [False, True]], [[False, True], [False, True]]]


def test_alibi_slopes():
    np.testing.assert_array_equal(masks.alibi_slopes(8), 0.5 ** np.arange(1, 9))
    np.testing.assert_array_equal(masks.alibi_slopes(1), [2.0**-8])
    twelve = masks.alibi_slopes(12)
    assert twelve.dtype == np.float64
    np.testing.assert_array_equal(twelve[:8], masks.alibi_slopes(8))
    np.testing.assert_array_equal(twelve[8:], masks.alibi_slopes(16)[:8:2])


@pytest.mark.parametrize("error, call, words", [
    (ValueError, lambda: masks.causal_mask(-1, 2), "q_len"),
    (TypeError, lambda: masks.causal_mask(2, 2.0), "kv_len"),
    (TypeError, lambda: masks.causal_mask(2, 2, 0.5), "q_offset"),
    (ValueError, lambda: masks.window_mask(2, 2, 3), r"\(3, 0\).*\(3, 3\)"),
    (ValueError, lambda: masks.window_mask(2, 2, (-1, 0)), "left side of window"),
    (TypeError, lambda: masks.length_mask([1.5], 2), "lengths"),
    (ValueError, lambda: masks.length_mask([1], -2), "length"),
    (TypeError, lambda: masks.segment_mask([0.5], [1]), "q_segments"),
    (ValueError, lambda: masks.segment_mask(1, [1]), "q_segments"),
    (ValueError, lambda: masks.segment_mask([[1], [1]], [[1], [1], [1]]), "batch"),
    (ValueError, lambda: masks.alibi_slopes(0), "heads"),
    (TypeError, lambda: masks.alibi_slopes(True), "heads"),
])
def test_errors(error, call, words):
    with pytest.raises(error, match=words):
        call()
