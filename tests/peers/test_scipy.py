"""Agreement with scipy.special.softmax and log_softmax, how they differ; SciPy's operators and matrices of weights."""

import numpy as np
import pytest

import attnc
from attnc import reference
from attnc.testing import assert_within

pytestmark = pytest.mark.peers
special = pytest.importorskip("scipy.special")

# Values to all digits of float64, computed by SciPy's authors with mpmath at 200 digits.
WEIGHTS = np.array([0.03205860328008499, 0.08714431874203256, 0.23688281808991013, 0.6439142598879722])
LOGARITHMS = np.array([-3.4401896985611953, -2.4401896985611953, -1.4401896985611953, -0.44018969856119533])
STEPS = np.arange(4)
WIDE = np.array([[-25, 0, 25, 50], [1, 325, 749, 750]])
WIDE_WEIGHTS = np.array([[2.678636961770877e-33, 1.9287498479371314e-22, 1.3887943864771144e-11, 0.999999999986112],
                         [0.0, 1.9444526359919372e-185, 0.2689414213699951, 0.7310585786300048]])
PAIRS = {"softmax": (attnc.softmax, reference.softmax, special.softmax),
         "log_softmax": (attnc.log_softmax, reference.log_softmax, special.log_softmax)}


@pytest.mark.parametrize("x, axis, want", [
    ([1000, 0, 0, 0], -1, [1, 0, 0, 0]),
    ([1, 1], -1, [0.5, 0.5]),
    ([0, 1], -1, [1 / (1 + np.e), np.e / (1 + np.e)]),
    (STEPS, -1, WEIGHTS),
    (STEPS + 100, -1, WEIGHTS),
    (STEPS.reshape(2, 2), None, WEIGHTS.reshape(2, 2)),
    ([[1000, 0], [1000, 0]], 0, [[0.5, 0.5], [0.5, 0.5]]),
    ([[1000, 0], [1000, 0]], 1, [[1, 0], [1, 0]]),
    (WIDE, 1, WIDE_WEIGHTS),
    (WIDE.T, 0, WIDE_WEIGHTS.T),
    (WIDE.reshape(2, 2, 2), (1, 2), WIDE_WEIGHTS.reshape(2, 2, 2)),
    (np.stack([STEPS, STEPS]).reshape(2, 2, 2), (1, 2), np.stack([WEIGHTS, WEIGHTS]).reshape(2, 2, 2)),
    (np.stack([STEPS, STEPS]).T, 0, np.stack([WEIGHTS, WEIGHTS]).T),
    (1.0, None, 1.0),
])
def test_softmax_of_known_values(x, axis, want, isa):
    np.testing.assert_allclose(attnc.softmax(np.asarray(x, np.float64), axis), np.asarray(want), rtol=1e-13)


@pytest.mark.parametrize("x, axis, want", [
    ([1000, 1], -1, [0, -999]),
    (STEPS, -1, LOGARITHMS),
    (STEPS + 100, -1, LOGARITHMS),
    (STEPS.reshape(2, 2), None, LOGARITHMS.reshape(2, 2)),
    ([[1000, 1], [1000, 1]], 0, np.full((2, 2), np.log(0.5))),
    ([[1000, 1], [1000, 1]], 1, [[0, -999], [0, -999]]),
    (np.arange(8).reshape(2, 4), 1, np.stack([LOGARITHMS, LOGARITHMS])),
    (np.arange(8).reshape(2, 4).T, 0, np.stack([LOGARITHMS, LOGARITHMS]).T),
    (np.arange(8).reshape(2, 2, 2), (1, 2), np.stack([LOGARITHMS, LOGARITHMS]).reshape(2, 2, 2)),
    (1.0, None, 0.0),
])
def test_log_softmax_of_known_values(x, axis, want, isa):
    np.testing.assert_allclose(attnc.log_softmax(np.asarray(x, np.float64), axis), np.asarray(want), rtol=1e-13)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
@pytest.mark.parametrize("axis", [-1, 0, 1, (0, 1), (2, 0), (-1, 1), None, (1,)])
@pytest.mark.parametrize("name", PAIRS)
def test_agrees_with_scipy_in_float64(name, axis, dtype, isa):
    ours, twin, theirs = PAIRS[name]
    x = (np.random.default_rng(1).standard_normal((5, 7, 33)) * 5).astype(dtype)
    exact = theirs(x.astype(np.float64), axis)
    assert_within(ours(x, axis), exact, twin(x, axis), scale=max(1.0, np.abs(exact).max()))


# ------------------------------------------------------------------- where SciPy means something else


def test_differs_default_axis_is_the_whole_array():
    x = np.arange(6.0).reshape(2, 3)
    np.testing.assert_allclose(special.softmax(x).sum(), 1)
    np.testing.assert_allclose(attnc.softmax(x).sum(-1), 1)
    np.testing.assert_allclose(attnc.softmax(x, axis=None), special.softmax(x), rtol=1e-14)


@pytest.mark.parametrize("row", [[1, 1, np.inf], [-np.inf, -np.inf, -np.inf]])
def test_differs_a_row_without_meaning_warns(row):
    with pytest.warns(RuntimeWarning):
        assert np.isnan(special.softmax(row)).all()
    assert np.isnan(attnc.softmax(row)).all()


def test_differs_an_empty_axis_is_an_error():
    with pytest.raises(ValueError):
        special.softmax(np.zeros((2, 0)), axis=1)
    assert attnc.softmax(np.zeros((2, 0))).shape == (2, 0)


def test_differs_small_integers_become_half_precision():
    assert special.softmax(np.array([1, 2], np.int8)).dtype == np.float16
    assert attnc.softmax(np.array([1, 2], np.int8)).dtype == np.float64


def test_differs_half_precision_is_summed_in_half_precision():
    x = np.zeros(70000, np.float16)
    with pytest.warns(RuntimeWarning):
        assert (special.softmax(x) == 0).all()  # the sum overflowed
    np.testing.assert_array_equal(attnc.softmax(x), np.float16(1 / 70000))


# ------------------------------------------------------------------- weights as operators and sparse matrices


def test_a_head_is_a_linear_operator_and_kept_weights_are_a_sparse_matrix(isa):
    linalg, sparse = pytest.importorskip("scipy.sparse.linalg"), pytest.importorskip("scipy.sparse")
    random = np.random.default_rng(0)
    query, key = random.standard_normal((2, 4, 9, 8), np.float32), random.standard_normal((2, 2, 12, 8), np.float32)
    W = attnc.AttentionWeights(query, key)
    head = W.head(1, 2)
    operator, dense = head.linear_operator(), head.dense()
    largest = linalg.svds(operator, k=1, return_singular_vectors=False)
    np.testing.assert_allclose(largest, np.linalg.svd(dense, compute_uv=False)[:1], rtol=1e-4)
    x, y = random.standard_normal((12, 3), np.float32), random.standard_normal(9, np.float32)
    np.testing.assert_allclose(operator @ x, dense @ x, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(operator.T @ y, dense.T @ y, rtol=1e-4, atol=1e-6)
    kept = W.sparse(threshold=0.1).toscipy()
    assert sparse.issparse(kept)
    every = W.dense().reshape(72, 12)
    np.testing.assert_array_equal(kept.toarray(), np.where(every >= 0.1, every, 0))
    with pytest.raises(ValueError, match="wanted those of one head"):
        W.linear_operator()
