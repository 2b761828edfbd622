"""Packed sequences: the bits of each alone, against the twin, on the path it takes alone, and no other row touched."""

import numpy as np
import pytest
from checking import DTYPES, assert_same_bits, dtype_of, largest, normal, plans

import attnc
from attnc import _isa, reference
from attnc._checks import varlen_args
from attnc.testing import assert_within, exact_attention
from attnc.varlen import alike

LENGTHS = {
    "one": ([5], [7]),
    "none": ([], []),
    "decode": ([1] * 9, [3, 700, 1, 0, 1030, 64, 2, 2100, 15]),
    "prefill": ([65, 130, 70, 90, 33], [65, 130, 70, 90, 33]),
    "mixed": ([0, 1, 40, 3, 0, 200, 2, 17, 1, 64, 66, 0], [4, 0, 40, 1100, 0, 513, 3, 0, 2500, 70, 66, 9]),
}
OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "all": {"causal": True, "window": (100, 5), "scale": -0.4, "softcap": 4.0, "alibi_slopes": [0.1, 0.0, 0.3, 1.0],
            "sinks": [0.5, -np.inf, 2.0, 0.0]},
}


def packed(random, lengths, dtype="float32", heads=(4, 2), dims=(16, 24)):
    """Query, key, value and both running sums."""
    lengths = LENGTHS[lengths] if isinstance(lengths, str) else lengths
    bounds = [np.concatenate(([0], np.cumsum(x))).astype(np.int32) for x in lengths]
    shapes = (bounds[0][-1], heads[0], dims[0]), (bounds[1][-1], heads[1], dims[0]), (bounds[1][-1], heads[1], dims[1])
    return *(normal(random, shape, dtype) for shape in shapes), *bounds


def one_by_one(function, query, key, value, q_bounds, k_bounds, alibi_slopes=None, **options):
    """Output and lse of each sequence by a function for one, put together."""
    found = []
    for i in range(len(q_bounds) - 1):
        rows, keys = slice(*q_bounds[i:i + 2]), slice(*k_bounds[i:i + 2])
        slopes = alibi_slopes if np.ndim(alibi_slopes) < 2 else alibi_slopes[i]
        found.append(function(query[rows], key[keys], value[keys], layout="bnhd", alibi_slopes=slopes, want="lse",
                              **options))
    if not found:
        return None
    lse = np.concatenate([x.lse for x in found], -1)
    return attnc.AttentionResult(np.concatenate([x.output for x in found]), lse=lse)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_the_bits_of_the_sequences_one_by_one(isa, lengths, options, dtype, seed):
    arrays = packed(np.random.default_rng(seed), lengths, dtype)
    got = attnc.attention_varlen(*arrays, want="lse", **OPTIONS[options])
    assert got.output.shape == (arrays[3][-1], 4, 24) and got.lse.shape == (4, arrays[3][-1])
    alone = one_by_one(attnc.attention, *arrays, **OPTIONS[options])
    if alone:
        assert_same_bits(got, alone)
    assert_same_bits(attnc.attention_varlen(*arrays, **OPTIONS[options]), got.output)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("lengths", ["decode", "mixed"])
def test_against_the_twin(isa, lengths, options, dtype, seed):
    arrays = packed(np.random.default_rng(seed), lengths, dtype, dims=(8, 4))
    got = attnc.attention_varlen(*arrays, want="lse", **OPTIONS[options])
    honest = reference.attention_varlen(*arrays, want="lse", **OPTIONS[options])
    exact = one_by_one(lambda *x, want, **more: exact_attention(*x, **more), *arrays, **OPTIONS[options])
    assert_within(got.output, exact.output, honest.output, scale=largest(arrays[2]), name="output")
    scores = max(largest(reference.attention_scores(*(x[slice(*bounds[i:i + 2])] for x, bounds in zip(
        arrays[:2], arrays[3:], strict=True)), layout="bnhd", **OPTIONS[options])) for i in range(len(arrays[3]) - 1))
    assert_within(got.lse, exact.lse, honest.lse, scale=max(1.0, largest(exact.lse), scores), name="lse")


def test_positions_of_the_keys_of_each_sequence(seed):
    random = np.random.default_rng(seed)
    query, key, value, *bounds = packed(random, ([3, 0, 5], [40, 7, 9]))
    positions = [random.permutation(80)[:40].reshape(1, 40), None, random.permutation(18).reshape(2, 9)]
    options = {"causal": True, "window": (30, None), "q_offset": [50, 3, 9]}
    got, twin = (module.attention_varlen(query, key, value, *bounds, k_positions=positions, want="weights", **options)
                 for module in (attnc, reference))
    assert_same_bits(got.output[3:], attnc.attention(
        query[3:], key[47:], value[47:], layout="bnhd", k_positions=positions[2], q_offset=9, causal=True,
        window=(30, None)))
    for one, wanted in zip(got.weights, twin.weights, strict=True):
        np.testing.assert_allclose(one, wanted, atol=1e-6)
    with pytest.raises(ValueError, match="sequence 0: k_positions was given with causal, window or alibi_slopes"):
        attnc.attention_varlen(query, key, value, *bounds, k_positions=positions, causal=True)


def test_the_twin_is_one_by_one(seed):
    arrays = packed(np.random.default_rng(seed), "mixed", dims=(8, 4))
    slopes = np.random.default_rng(seed).random((12, 4))
    got = reference.attention_varlen(*arrays, want="lse", alibi_slopes=slopes)
    assert_same_bits(got, one_by_one(reference.attention, *arrays, alibi_slopes=slopes))


@pytest.mark.parametrize("q_heads, kv_heads", [(1, 1), (6, 6), (6, 1), (8, 2)])
def test_the_path_of_a_sequence_alone(isa, q_heads, kv_heads, seed):
    """Few rows and many, on both sides of the border: keys are split in the packed call as they are alone."""
    group = q_heads // kv_heads
    classes = [_isa.kernels.path_class(0, n) for n in range(200)]
    split_rows = max(n for n in range(1, 200) if classes[n] != classes[-1])
    border = split_rows // group
    q_lengths = [border, border + 1, 1, border - 1 or 2, border + 2]
    q_bounds, k_bounds = np.concatenate(([0], np.cumsum(q_lengths))), np.arange(6) * 2100
    random = np.random.default_rng(seed)
    query = normal(random, (q_bounds[-1], q_heads, 8))
    key = normal(random, (k_bounds[-1], kv_heads, 8))
    with plans() as taken:
        attnc.attention_varlen(query, key, key, q_bounds, k_bounds)
    with plans() as alone:
        for i in range(5):
            rows, keys = slice(*q_bounds[i:i + 2]), slice(*k_bounds[i:i + 2])
            attnc.attention(query[rows], key[keys], key[keys], layout="bnhd")
    assert [plan.splits > 1 for plan in alone] == [n * group <= split_rows for n in q_lengths]
    groups = alike(varlen_args(query, key, key, q_bounds, k_bounds, alibi_slopes=None, want=()))
    assert sorted(i for group in groups for i in group) == [0, 1, 2, 3, 4] and len(groups) == len(taken)
    for sequences, plan in zip(groups, taken, strict=True):
        cuts = {(alone[i].path, alone[i].splits, alone[i].block_k) for i in sequences}
        assert cuts == {(plan.path, plan.splits, plan.block_k)}


@pytest.mark.parametrize("q_heads, kv_heads, kv_len", [(1, 1, 33), (2, 2, 1100), (6, 2, 40)])
def test_every_number_of_rows(isa, q_heads, kv_heads, kv_len, seed):
    """Lengths 1 to 100 in one packed call: a border of the kernels that path_class() does not have would show."""
    random = np.random.default_rng(seed)
    q_bounds, k_bounds = np.concatenate(([0], np.cumsum(np.arange(1, 101)))), np.arange(101) * kv_len
    query = normal(random, (q_bounds[-1], q_heads, 19))
    key, value = (normal(random, (k_bounds[-1], kv_heads, dim)) for dim in (19, 21))
    arrays = query, key, value, q_bounds, k_bounds
    assert_same_bits(attnc.attention_varlen(*arrays, want="lse"), one_by_one(attnc.attention, *arrays))


def test_groups_are_alike_and_the_longest_come_first():
    lengths = [3, 100, 0, 2, 127, 64, 8, 3], [90, 100, 9, 70, 80, 0, 90, 600]
    q_bounds, k_bounds = (np.concatenate(([0], np.cumsum(x))) for x in lengths)
    x, y = np.zeros((q_bounds[-1], 1, 2)), np.zeros((k_bounds[-1], 1, 2))
    v = varlen_args(x, y, y, q_bounds, k_bounds, alibi_slopes=None, want=())
    assert alike(v) == [[4, 1], [7], [6], [0, 3], [5]]


def test_any_number_of_threads(isa, seed):
    arrays = packed(np.random.default_rng(seed), "mixed")
    one = attnc.attention_varlen(*arrays, want="lse", causal=True, num_threads=1)
    for threads in (2, 3, 7):
        assert_same_bits(attnc.attention_varlen(*arrays, want="lse", causal=True, num_threads=threads), one)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", ["decode", "prefill", "mixed"])
def test_other_sequences_change_no_bit(isa, lengths, dtype, seed):
    """Every second sequence full of NaN and infinity: the others keep their bits."""
    query, key, value, q_bounds, k_bounds = packed(np.random.default_rng(seed), lengths, dtype)
    options = OPTIONS["all"]
    clean = attnc.attention_varlen(query, key, value, q_bounds, k_bounds, want="lse", **options)
    kept = np.ones(len(query), bool)
    for i in range(0, len(q_bounds) - 1, 2):
        kept[q_bounds[i]:q_bounds[i + 1]] = False
        query[q_bounds[i]:q_bounds[i + 1]] = np.nan
        key[k_bounds[i]:k_bounds[i + 1]], value[k_bounds[i]:k_bounds[i + 1]] = np.nan, np.inf
    dirty = attnc.attention_varlen(query, key, value, q_bounds, k_bounds, want="lse", **options)
    assert kept.any()
    assert_same_bits(clean.output[kept], dirty.output[kept])
    assert_same_bits(clean.lse[:, kept], dirty.lse[:, kept])


def test_every_row_is_written_once(isa, seed):
    """`out` full of NaN, of any strides: rows without keys are zeros, and nothing beside the rows is touched."""
    arrays = packed(np.random.default_rng(seed), "mixed")
    tokens = len(arrays[0])
    buffer = np.full((tokens + 2, 5, 30), np.nan, np.float32)
    out = buffer[1:-1, ::-1, 3:27][:, :4]
    got = attnc.attention_varlen(*arrays, out=out, want="lse")
    assert got.output is out
    assert_same_bits(np.ascontiguousarray(out), attnc.attention_varlen(*arrays))
    buffer[1:-1, ::-1, 3:27][:, :4] = np.nan
    assert np.isnan(buffer).all()
    q_bounds, k_bounds = arrays[3:]
    for i in np.flatnonzero(np.diff(k_bounds) == 0):
        rows = slice(*q_bounds[i:i + 2])
        assert (got.lse[:, rows] == -np.inf).all()
        assert not attnc.attention_varlen(*arrays)[rows].any()


def test_slopes_of_each_sequence(isa, seed):
    random = np.random.default_rng(seed)
    arrays = packed(random, "mixed")
    slopes = random.random((12, 4))
    got = attnc.attention_varlen(*arrays, want="lse", alibi_slopes=slopes)
    assert_same_bits(got, one_by_one(attnc.attention, *arrays, alibi_slopes=slopes))


@pytest.mark.parametrize("dtypes", [("float16", "float32", "float16"), ("bfloat16", "float16", "float16"),
                                    ("float64", "bfloat16", "float32")])
def test_mixed_dtypes_and_strides(isa, dtypes, seed):
    *arrays, q_bounds, k_bounds = packed(np.random.default_rng(seed), "mixed", "float64")
    arrays = [np.asfortranarray(x.astype(dtype_of(dtype))) for x, dtype in zip(arrays, dtypes, strict=True)]
    got = attnc.attention_varlen(*arrays, q_bounds, k_bounds, want="lse")
    assert_same_bits(got, one_by_one(attnc.attention, *arrays, q_bounds, k_bounds))


@pytest.mark.parametrize("heads, dims", [((0, 0), (4, 4)), ((2, 1), (0, 3)), ((2, 2), (4, 0))])
def test_empty_axes(isa, heads, dims):
    arrays = packed(np.random.default_rng(0), "mixed", heads=heads, dims=dims)
    got = attnc.attention_varlen(*arrays, want="lse")
    assert_same_bits(got, one_by_one(attnc.attention, *arrays))


QUERY, KEY, VALUE = np.zeros((5, 4, 8)), np.zeros((7, 2, 8)), np.zeros((7, 2, 3))


@pytest.mark.parametrize("module", [attnc, reference])
@pytest.mark.parametrize("error, options, words", [
    (TypeError, {"cu_seqlens_q": [0.0, 5.0]}, "cu_seqlens_q must be an integer or an array of integers, got float64"),
    (TypeError, {"cu_seqlens_k": None}, "cu_seqlens_k must be an array, got None"),
    (ValueError, {"cu_seqlens_q": [[0, 5]]}, r"cu_seqlens_q has shape \(1, 2\); wanted \(sequences \+ 1,\)"),
    (ValueError, {"cu_seqlens_q": 5}, r"cu_seqlens_q has shape \(\)"),
    (ValueError, {"cu_seqlens_q": np.zeros(0, int)}, r"cu_seqlens_q has shape \(0,\)"),
    (ValueError, {"cu_seqlens_q": [1, 5]}, "cu_seqlens_q starts at 1; wanted 0"),
    (ValueError, {"cu_seqlens_q": [0, 4, 3, 5]}, "cu_seqlens_q falls from 4 to 3 at sequence 1"),
    (ValueError, {"cu_seqlens_q": [0, 4]}, "cu_seqlens_q ends at 4; wanted 5, the tokens of query"),
    (ValueError, {"cu_seqlens_k": [0, 8]}, "cu_seqlens_k ends at 8; wanted 7, the tokens of key"),
    (ValueError, {"cu_seqlens_k": [0, 1, 7]}, "cu_seqlens_q bounds 1 sequences, cu_seqlens_k 2"),
    (ValueError, {"query": QUERY[0]}, r"query has 2 axes, shape \(4, 8\); wanted \(tokens, heads, dim\)"),
    (ValueError, {"key": KEY[None]}, "key has 4 axes"),
    (ValueError, {"value": VALUE[:6]}, "value has length 6, key has 7"),
    (ValueError, {"value": VALUE[:, :1]}, "value has 1 heads, key has 2"),
    (TypeError, {"value": None}, "value must be an array, got None"),
    (ValueError, {"want": "weight"}, "want"),
    (ValueError, {"alibi_slopes": np.zeros((2, 4))}, r"alibi_slopes has shape \(2, 4\)"),
    (ValueError, {"sinks": np.zeros(3)}, "sinks has shape"),
    (ValueError, {"out": np.zeros((5, 4, 8))}, r"out has shape \(5, 4, 8\); wanted \(5, 4, 3\)"),
    (ValueError, {"window": 3}, "bare integer 3"),
])
def test_errors(module, error, options, words):
    arguments = {"query": QUERY, "key": KEY, "value": VALUE, "cu_seqlens_q": [0, 5], "cu_seqlens_k": [0, 7], **options}
    with pytest.raises(error, match=words):
        module.attention_varlen(**arguments)


def test_nothing_is_written_after_an_error():
    out = np.full((5, 4, 3), 7.0)
    with pytest.raises(ValueError, match="cu_seqlens_k"):
        attnc.attention_varlen(QUERY, KEY, VALUE, [0, 5], [0, 6], out=out)
    assert (out == 7).all()
