"""Weights of a part of the keys under the lse of all: against the twin, and joined against the weights of the whole."""

import numpy as np
import pytest
from checking import DTYPES, PATHS, assert_same_bits, farthest, inputs, largest
from slow import NAMES, some_option

import attnc
from attnc import reference
from attnc._checks import attention_args, check_lse
from attnc.reference._chain import weights_under
from attnc.testing import assert_within


def check_weights(query, key, lse, **options):
    """`attention_weights` under an lse within tolerance of its twin one precision up; returns the weights."""
    a = attention_args(query, key, None, **options)
    given = check_lse(lse, a)
    a.acc = np.dtype(np.longdouble if a.acc == np.float64 else np.float64)
    with np.errstate(all="ignore"):
        exact = weights_under(given.astype(a.acc), a)

    def honest():
        return reference.attention_weights(query, key, lse=lse, **options)

    got = attnc.attention_weights(query, key, lse=lse, **options)
    assert_within(got, exact, farthest(honest, exact, given.size), scale=max(1.0, largest(exact)), name="weights")
    return got


def some_options(random, path, chance):
    q_heads, _, q_len, kv_len, dim, _ = PATHS[path]
    options = {}
    for name in NAMES:
        if name != "sinks" and random.random() < chance:
            options |= some_option(name, random, (2,), q_heads, q_len, kv_len, dim)
    return options


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("chance", [0.0, 0.25, 0.5])
def test_against_the_twin(isa, chance, path, dtype, seed):
    """Some more keys than these are in the lse; and where no number is."""
    random = np.random.default_rng([seed, int(10 * chance)])
    query, key, value = inputs(random, (2,), *PATHS[path], dtype=dtype)
    options = some_options(random, path, chance)
    lse = reference.attention(query, key, value, want="lse", **options).lse + random.uniform(0, 3, query.shape[:-1])
    lse[..., 1], lse[0, ..., 2], lse[1, 0, 0] = -np.inf, np.inf, np.nan
    check_weights(query, key, lse, **options)


@pytest.mark.parametrize("scale", [None, 3.0, 0.0])
def test_an_lse_below_the_scores(isa, scale, seed):
    """No lse of these keys, but still exp(score - lse): each of score, lse and difference rounds once."""
    random = np.random.default_rng(seed)
    query, key, _ = inputs(random, (2,), 4, 2, 9, 70, 8, dtype="float64")
    lse = random.uniform(-30, 0, (2, 4, 9))
    scores = attnc.attention_scores(query, key, scale=scale)
    got = attnc.attention_weights(query, key, scale=scale, lse=lse)
    wanted = np.exp(scores.astype(np.longdouble) - lse[..., None])
    assert (np.abs(got / wanted - 1) <= 4 * 2.0**-52 * (8 + np.abs(scores) + np.abs(lse)[..., None])).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("path", PATHS)
def test_chunks_under_the_lse_of_all(isa, path, dtype, seed):
    """Keys cut in three, with everything that has a position: joined they are the whole."""
    random = np.random.default_rng(seed)
    q_heads, _, q_len, kv_len, *_ = PATHS[path]
    query, key, value = inputs(random, (2,), *PATHS[path], dtype=dtype)
    options = dict(bias=random.standard_normal((q_len, kv_len)), mask=random.random((q_heads, q_len, kv_len)) < 0.8)
    fixed = dict(causal=True, window=(kv_len // 2, None), alibi_slopes=np.linspace(0, 0.1, q_heads), softcap=5.0)
    offset = kv_len - q_len
    whole = attnc.attention(query, key, value, want=("lse", "weights"), sinks=np.arange(q_heads) / 2, **options,
                            **fixed)
    joined = []
    for start, stop in ((0, kv_len // 3), (kv_len // 3, kv_len // 3), (kv_len // 3, kv_len)):
        joined.append(check_weights(query, key[..., start:stop, :], whole.lse, q_offset=offset - start, **fixed,
                                    **{name: x[..., start:stop] for name, x in options.items()}))
    eps = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}[dtype]
    # The lse was rounded once more than the sum that divides the whole: half an eps of it, in the accumulation dtype.
    slack = 4 * eps + (2.0**-52 if dtype == "float64" else 2.0**-23) * largest(whole.lse)
    joined = np.concatenate(joined, -1)
    assert joined.dtype == whole.weights.dtype
    np.testing.assert_allclose(joined.astype(float), whole.weights.astype(float), rtol=0, atol=slack)


@pytest.mark.parametrize("scale", [0.0, -2.0, 1e-35, 1e-3, 40.0])
def test_any_scale(isa, scale, seed):
    random = np.random.default_rng(seed)
    query, key, value = inputs(random, (2,), 4, 2, 33, 70)
    lse = attnc.attention(query, key, value, scale=scale, want="lse").lse
    check_weights(query, key, lse, scale=scale)


def test_two_axes_and_the_other_layout(isa, seed):
    random = np.random.default_rng(seed)
    query, key, _ = inputs(random, (2,), 4, 2, 70, 90)
    lse = random.uniform(4, 6, (2, 4, 70))
    plain = check_weights(query, key, lse)
    swapped = check_weights(query.swapaxes(-2, -3), key.swapaxes(-2, -3), lse, layout="bnhd")
    assert_same_bits(plain, swapped)
    assert check_weights(query[0, 0], key[0, 0], lse[0, 0]).shape == (70, 90)
    assert not check_weights(query[0, 0], key[0, 0], lse[0, 0], q_lengths=3)[3:].any()


def test_any_memory_of_the_lse(isa, seed):
    random = np.random.default_rng(seed)
    query, key, _ = inputs(random, (2,), 4, 2, 9, 30)
    lse = np.full((2, 9, 8), 5.0, ">f8")
    lse[..., ::2] = random.uniform(4, 6, (2, 9, 4))
    view = lse[..., ::2].swapaxes(-1, -2)
    assert_same_bits(attnc.attention_weights(query, key, lse=view),
                     attnc.attention_weights(query, key, lse=np.ascontiguousarray(view, np.float32)))
    assert (attnc.attention_weights(query, key, lse=np.full((2, 4, 9), 1e300)) == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_inf_and_nan(isa, dtype, seed):
    """-inf: the row saw nothing, so nothing has a weight. NaN: it stays in its row, and out of rows of padding."""
    query, key, _ = inputs(np.random.default_rng(seed), (2,), 4, 2, 5, 40, dtype=dtype)
    lse = np.full((2, 4, 5), 4.0)
    clean = attnc.attention_weights(query, key, lse=lse)
    lse[0, 1, 2], lse[1, 3, 4] = np.nan, -np.inf
    got = attnc.attention_weights(query, key, lse=lse)
    assert np.isnan(got[0, 1, 2].astype(float)).all() and not got[1, 3, 4].any()
    got[0, 1, 2], got[1, 3, 4] = clean[0, 1, 2], clean[1, 3, 4]
    assert_same_bits(got, clean)
    short = attnc.attention_weights(query, key, lse=lse, q_lengths=[2, 5])
    assert not short[0, :, 2:].any()
    hidden = attnc.attention_weights(query, key, lse=lse, mask=np.arange(40) < 0)
    assert np.isnan(hidden[0, 1, 2].astype(float)).all() and np.isnan(hidden.astype(float)).sum() == 40


@pytest.mark.parametrize("path", PATHS)
def test_what_a_row_may_not_see(isa, path, seed):
    """Hidden keys that are NaN change no bit; one that is seen is NaN in its own place, since the lse is what it is."""
    random = np.random.default_rng(seed)
    *_, q_len, kv_len, _, _ = PATHS[path]
    query, key, _ = inputs(random, (2,), *PATHS[path])
    lse = random.uniform(4, 6, query.shape[:-1])
    clean = attnc.attention_weights(query, key, lse=lse, causal=True, q_offset=kv_len - q_len - 4)
    key[..., -4:, :] = np.nan
    assert_same_bits(attnc.attention_weights(query, key, lse=lse, causal=True, q_offset=kv_len - q_len - 4), clean)
    got = check_weights(query, key, lse)
    assert np.isnan(got[..., -4:]).all() and np.isfinite(got[..., :-4]).all()


@pytest.mark.parametrize("path", PATHS)
def test_threads_and_mates_change_no_bit(isa, path, seed):
    random = np.random.default_rng(seed)
    query, key, _ = inputs(random, (2,), *PATHS[path])
    lse = random.uniform(4, 6, query.shape[:-1])
    one = attnc.attention_weights(query, key, lse=lse, num_threads=1)
    for threads in (2, 3):
        assert_same_bits(attnc.attention_weights(query, key, lse=lse, num_threads=threads), one)
    for i in range(2):
        assert_same_bits(attnc.attention_weights(query[i], key[i], lse=lse[i]), one[i])


@pytest.mark.parametrize("q_len, kv_len", [(0, 3), (3, 0), (0, 0)])
def test_empty_axes(isa, q_len, kv_len):
    got = attnc.attention_weights(np.ones((2, q_len, 4)), np.ones((2, kv_len, 4)), lse=np.zeros((2, q_len)))
    assert got.shape == (2, q_len, kv_len)


@pytest.mark.parametrize("module", [attnc, reference])
@pytest.mark.parametrize("error, options, words", [
    (ValueError, {"lse": np.zeros((2, 4, 5)), "sinks": np.zeros(4)}, "sinks were given with lse"),
    (ValueError, {"lse": np.zeros((4, 5))}, r"lse has shape \(4, 5\); wanted .*q_len\) = \(2, 4, 5\)"),
    (ValueError, {"lse": np.zeros((1, 4, 5))}, "lse has shape"),
    (ValueError, {"lse": np.zeros((2, 4, 5, 1))}, "lse has shape"),
    (ValueError, {"lse": 0.0}, "lse has shape"),
    (TypeError, {"lse": np.zeros((2, 4, 5), complex)}, "lse has dtype complex128"),
    (TypeError, {"lse": np.ma.zeros((2, 4, 5))}, "lse is a numpy.ma"),
])
def test_errors(module, error, options, words):
    with pytest.raises(error, match=words):
        module.attention_weights(np.zeros((2, 4, 5, 8)), np.zeros((2, 2, 7, 8)), **options)
