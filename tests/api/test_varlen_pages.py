"""Keys and values in pages: the bits of each sequence over contiguous keys, whatever lies beside them."""

import numpy as np
import pytest
from checking import DTYPES, assert_same_bits, dtype_of, normal
from slow import Slow, assert_close, bounds

import attnc
from attnc import reference

Q_LENGTHS = [1, 0, 4, 1, 70, 1]
KV_LENGTHS = [40, 9, 4, 0, 90, 1100]
OPTIONS = {
    "plain": {},
    "causal": {"causal": True, "want": "lse"},
    "all": {"causal": True, "window": (100, 5), "scale": -0.4, "softcap": 4.0, "alibi_slopes": [0.1, 0.0, 0.3, 1.0],
            "sinks": [0.5, -np.inf, 2.0, 0.0], "want": "lse", "q_offset": [39, 0, 2, 0, 20, 1000]},
}
LAYOUTS = ["contiguous", "interleaved", "heads first", "of layers", "both", "reversed", "odd", "value apart",
           "heads first, value apart", "Fortran"]


def in_pages(random, tokens, lengths, page, spare=3):
    """Pages in any order, with NaN wherever no token lies, and the table, with garbage behind what is used."""
    counts = [-(-n // page) for n in lengths]
    order = random.permutation(sum(counts) + spare)
    pages = [np.full((len(order), page, *x.shape[1:]), np.nan, x.dtype) for x in tokens]
    table = random.choice([-1, -7, 10**6], (len(lengths), max(counts, default=0) + 2))
    start = done = 0
    for i, (n, count) in enumerate(zip(lengths, counts, strict=True)):
        table[i, :count] = order[done:done + count]
        for x, into in zip(tokens, pages, strict=True):
            for j in range(n):
                into[table[i, j // page], j % page] = x[start + j]
        start, done = start + n, done + count
    return *pages, table


def laid_out(layout, key, value):
    """The same pages in other memory, where all else is NaN."""
    def within(x, shape, place):
        whole = np.full(shape, np.nan, x.dtype)
        view = place(whole)
        view[...] = x
        return view

    n, page, heads, dim = key.shape
    if layout == "interleaved":         # keys and values of a page side by side
        return [within(x, (n, 2, *x.shape[1:]), lambda whole, i=i: whole[:, i]) for i, x in enumerate((key, value))]
    if layout == "heads first":
        return [within(x, (n, heads, page, x.shape[-1]), lambda whole: whole.swapaxes(1, 2)) for x in (key, value)]
    if layout == "of layers":
        return [within(x, (n, page, 3, heads, x.shape[-1] + 1), lambda whole: whole[:, :, 1, :, 1:])
                for x in (key, value)]
    if layout == "both":                # one row of memory for the key and value of a head
        whole = np.full((n, page, heads, dim + value.shape[-1]), np.nan, key.dtype)
        whole[..., :dim], whole[..., dim:] = key, value
        return whole[..., :dim], whole[..., dim:]
    if layout == "reversed":
        return [np.ascontiguousarray(x[::-1])[::-1] for x in (key, value)]
    if layout == "odd":                 # a page's distance is no multiple of a token's
        return [within(x, (n, x[0].size + 1), lambda whole, x=x: np.lib.stride_tricks.as_strided(
            whole, x.shape, (whole.strides[0], *x.strides[1:]))) for x in (key, value)]
    if layout == "Fortran":
        return np.asfortranarray(key), np.asfortranarray(value)
    if layout == "heads first, value apart":
        key = laid_out("heads first", key, value)[0]
    if layout.endswith("value apart"):
        return key, within(value, (n, 3, *value.shape[1:]), lambda whole: whole[:, 2])
    return key, value


def problem(random, dtype="float32", heads=(4, 2), dims=(16, 24), q_lengths=Q_LENGTHS, kv_lengths=KV_LENGTHS):
    query = normal(random, (sum(q_lengths), heads[0], dims[0]), dtype)
    key, value = (normal(random, (sum(kv_lengths), heads[1], dim), dtype) for dim in dims)
    return query, key, value, *(np.concatenate(([0], np.cumsum(n))) for n in (q_lengths, kv_lengths))


@pytest.mark.parametrize("page", [1, 3, 16, 64, 2000])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", OPTIONS)
def test_the_bits_of_contiguous_keys(isa, options, dtype, page, seed):
    random = np.random.default_rng(seed)
    query, key, value, *ends = problem(random, dtype)
    keys, values, table = in_pages(random, (key, value), KV_LENGTHS, page)
    got = attnc.attention_varlen(query, keys, values, ends[0], None, block_table=table, kv_lengths=KV_LENGTHS,
                                 **OPTIONS[options])
    assert_same_bits(got, attnc.attention_varlen(query, key, value, *ends, **OPTIONS[options]))


@pytest.mark.parametrize("page", [1, 5])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_in_any_memory(isa, layout, page, seed):
    random = np.random.default_rng(seed)
    query, key, value, *ends = problem(random)
    keys, values, table = in_pages(random, (key, value), KV_LENGTHS, page)
    keys, values = laid_out(layout, keys, values)
    tables = {np.dtype(np.int32): table, np.dtype(np.int64): np.asfortranarray(table)[:, ::1],
              np.dtype(">i4"): np.repeat(table, 2, 1)[:, ::2]}
    wanted = attnc.attention_varlen(query, key, value, *ends, causal=True, want="lse")
    for kind, one in tables.items():
        got = attnc.attention_varlen(query, keys, values, ends[0], block_table=one.astype(kind, order="K"),
                                     kv_lengths=np.array(KV_LENGTHS, np.uint16), causal=True, want="lse")
        assert_same_bits(got, wanted)


def of_each(random, query, key, ends):
    """Options of which each sequence has its own, and those over packed tokens."""
    lengths = list(zip(*map(np.diff, ends), strict=True))
    return {
        "mask": [None if i == 2 else random.random((4, *n)) < 0.8 for i, n in enumerate(lengths)],
        "bias": [random.standard_normal(n, np.float32) for n in lengths],
        "relative_bias": [random.standard_normal(max(q + k - 1, 0), np.float32) for q, k in lengths],
        "key_mask": random.random(len(key)) < 0.8,
        "q_segments": random.integers(0, 2, len(query)), "k_segments": random.integers(0, 2, len(key)),
        "k_positions": [random.permutation(k) for _, k in lengths], "q_offset": [k for _, k in lengths],
        "causal": True, "alibi_slopes": random.random((len(lengths), 4))}


@pytest.mark.parametrize("module", [attnc, reference], ids=["attnc", "reference"])
def test_every_option_and_result(isa, module, seed):
    random = np.random.default_rng(seed)
    lengths = [3, 0, 4, 1, 20], [40, 9, 4, 0, 90]
    query, key, value, *ends = problem(random, q_lengths=lengths[0], kv_lengths=lengths[1])
    keys, values, table = in_pages(random, (key, value), lengths[1], 16)
    where = {"block_table": table, "kv_lengths": lengths[1]}
    options = of_each(random, query, key, ends)
    results = "lse", "weights", "scores", "entropy", "max", "argmax"
    found = [module.attention_varlen(query, keys, values, ends[0], want=results, **where, **options),
             module.attention_varlen(query, key, value, *ends, want=results, **options)]
    for name in ("output", "lse", "entropy", "max", "argmax"):
        assert_same_bits(getattr(found[0], name), getattr(found[1], name))
    for name in ("weights", "scores"):
        for a, b in zip(getattr(found[0], name), getattr(found[1], name), strict=True):
            assert_same_bits(a, b)
    got = module.attention_weights_varlen(query, keys, ends[0], **where, **options)
    for a, b in zip(got, module.attention_weights_varlen(query, key, *ends, **options), strict=True):
        assert a.shape == b.shape
        assert_same_bits(a.dense(), b.dense())
        assert_same_bits(a.key_mass(), b.key_mass())


def test_against_the_slow_formulation(isa, seed):
    random = np.random.default_rng(seed)
    q_lengths, kv_lengths, page = [2, 1, 3], [5, 0, 7], 3
    query, key, value, *ends = problem(random, "float64", dims=(4, 3), q_lengths=q_lengths, kv_lengths=kv_lengths)
    keys, values, table = in_pages(random, (key, value), kv_lengths, page)
    options = {"causal": True, "softcap": 3.0, "sinks": random.standard_normal(4)}
    for module in attnc, reference:
        got = module.attention_varlen(query, keys, values, ends[0], block_table=table, kv_lengths=kv_lengths,
                                      want="lse", **options)
        for i, m in enumerate(kv_lengths):
            rows = slice(*ends[0][i:i + 2])
            one = [np.empty((2, m, x.shape[-1])) for x in (key, value)]
            for j in range(m):
                for x, pages in zip(one, (keys, values), strict=True):
                    x[:, j] = pages[table[i, j // page], j % page]
            arrays = query[rows].swapaxes(0, 1), *one
            output, lse, _ = Slow(*arrays, **options).attention()
            bound = bounds(arrays, options, 2**-52) if m else {"output": 0, "lse": 1e-15}
            assert_close(got.output[rows].swapaxes(0, 1), output, bound["output"])
            assert_close(got.lse[:, rows], lse, bound["lse"])


def test_sequences_share_pages(isa, seed):
    random = np.random.default_rng(seed)
    pages = normal(random, (6, 4, 2, 8))
    query = normal(random, (5, 4, 8))
    table, lengths = np.array([[3, 1, 2], [3, 1, 5], [3, 3, 3]]), [11, 9, 12]
    got = attnc.attention_varlen(query, pages, pages, [0, 2, 3, 5], block_table=table, kv_lengths=lengths, causal=True)
    for i, rows in enumerate([slice(0, 2), slice(2, 3), slice(3, 5)]):
        keys = pages[table[i]].reshape(12, 2, 8)[:lengths[i]]
        assert_same_bits(got[rows], attnc.attention(query[rows], keys, keys, layout="bnhd", causal=True))


@pytest.mark.parametrize("shape, table, lengths", [
    ((0, 4, 2, 8), np.zeros((3, 0), int), [0, 0, 0]), ((0, 4, 2, 8), np.full((3, 2), -1), [0, 0, 0]),
    ((3, 4, 2, 8), np.full((3, 1), 2), [0, 4, 1]), ((3, 4, 2, 0), np.full((3, 1), 2), [0, 4, 1]),
    ((3, 4, 0, 8), np.full((3, 1), 2), [0, 4, 1])])
def test_no_page_no_head_no_dim(isa, shape, table, lengths):
    pages, query = np.ones(shape, "f"), np.ones((3, 2 * shape[2], shape[3]), "f")
    for module in attnc, reference:
        got = module.attention_varlen(query, pages, pages, [0, 1, 2, 3], block_table=table, kv_lengths=lengths,
                                      want="lse")
        assert got.output.shape == query.shape
        assert (got.output == (np.array(lengths) > 0)[:, None, None]).all()
        assert (np.isinf(got.lse) == (np.array(lengths) == 0)).all()
    none = attnc.attention_varlen(query[:0], pages, pages, [0], block_table=table[:0],
                                   kv_lengths=np.zeros(0, int))
    assert none.shape == (0, *query.shape[1:])


@pytest.mark.parametrize("dtypes", [("float16", "float32"), ("bfloat16", "float64"), ("int32", "float32")])
def test_mixed_dtypes(isa, dtypes, seed):
    random = np.random.default_rng(seed)
    query, key, value, *ends = problem(random)
    key, value = (np.rint(3 * x).astype(dtype_of(dtype)) for x, dtype in zip((key, value), dtypes, strict=True))
    pages = [np.zeros((60, 32, *x.shape[1:]), x.dtype) for x in (key, value)]
    table, start = np.full((6, 40), -1), 0
    for i, n in enumerate(KV_LENGTHS):
        table[i, :-(-n // 32)] = start + np.arange(-(-n // 32))
        for x, into in zip((key, value), pages, strict=True):
            into[start:].reshape(-1, *x.shape[1:])[:n] = x[ends[1][i]:ends[1][i + 1]]
        start += -(-n // 32)
    got = attnc.attention_varlen(query, *pages, ends[0], block_table=table, kv_lengths=KV_LENGTHS)
    assert_same_bits(got, attnc.attention_varlen(query, key, value, *ends))


@pytest.mark.parametrize("module", [attnc, reference], ids=["attnc", "reference"])
@pytest.mark.parametrize("table, rows", [([[], []], [0, 1, 3]), ([[]], [0, 2]), (((), ()), [0, 0, 0])])
def test_a_table_of_empty_lists(module, table, rows):
    """NumPy makes an empty list float64."""
    got = module.attention_varlen(np.zeros((rows[-1], 4, 8)), PAGES, PAGES, rows, block_table=table,
                                  kv_lengths=[0] * len(table), want="lse")
    assert not got.output.any() and (got.lse == -np.inf).all()


PAGES = np.zeros((8, 4, 2, 8))
GIVEN = {"query": np.zeros((5, 4, 8)), "key": PAGES, "value": PAGES, "cu_seqlens_q": [0, 2, 5],
         "block_table": [[0, 7], [1, -1]], "kv_lengths": [8, 3]}


@pytest.mark.parametrize("module", [attnc, reference], ids=["attnc", "reference"])
@pytest.mark.parametrize("error, change, words", [
    (TypeError, {"cu_seqlens_k": [0, 8, 11]}, r"cu_seqlens_k was given with block_table; wanted None, and kv_lengths="),
    (TypeError, {"kv_lengths": None}, "kv_lengths is missing: block_table needs"),
    (TypeError, {"kv_lengths": [8.0, 3.0]}, "kv_lengths must be an integer or an array of integers"),
    (ValueError, {"kv_lengths": [8]}, r"kv_lengths has shape \(1,\); wanted"),
    (ValueError, {"kv_lengths": [-1, 3]}, "kv_lengths must be from 0"),
    (ValueError, {"kv_lengths": [9, 3]}, "kv_lengths is 9 for sequence 0, which has 2 pages of 4 in block_table"),
    (ValueError, {"kv_lengths": [8, 5]}, "block_table names page -1 for tokens from 4 of sequence 1, which has 5; "
                                         "wanted from 0 to 7, as key has 8 pages"),
    (ValueError, {"block_table": [[0, 8], [1, 0]]}, "block_table names page 8 for tokens from 4 of sequence 0"),
    (TypeError, {"block_table": [[0.0, 7.0], [1.0, 0.0]]}, "block_table must be an integer or an array of integers"),
    (ValueError, {"block_table": [0, 1]}, r"block_table has shape \(2,\); wanted \(sequences, pages\) = \(2, pages\)"),
    (ValueError, {"block_table": [[0, 7]]}, r"block_table has shape \(1, 2\); wanted"),
    (ValueError, {"key": PAGES[0]}, r"key has 3 axes, shape \(4, 2, 8\); wanted pages"),
    (ValueError, {"value": PAGES[0]}, r"value has 3 axes, shape \(4, 2, 8\); wanted pages"),
    (TypeError, {"value": None}, "value must be an array, got None"),
    (ValueError, {"value": PAGES[:7]}, r"value has shape \(7, 4\); wanted"),
    (ValueError, {"key": PAGES[:, :0], "value": PAGES[:, :0]}, "key has pages of 0 tokens"),
    (ValueError, {"key": PAGES[..., :3]}, "key has head_dim 3, query has 8"),
    (ValueError, {"query": np.zeros((5, 3, 8))}, "query has 3 heads, no multiple of the 2 of key"),
    (ValueError, {"query": np.zeros((6, 4, 8))}, "cu_seqlens_q ends at 5; wanted 6"),
    (ValueError, {"query": np.zeros((4, 8))}, "query has 2 axes"),
    (ValueError, {"key_mask": np.ones(8, bool)}, r"key_mask has shape \(8,\); wanted"),
    (ValueError, {"out": PAGES.reshape(-1)[:160].reshape(5, 4, 8)}, "out shares memory with key"),
    (TypeError, {"block_table": None, "key": PAGES[0], "value": PAGES[0], "cu_seqlens_k": [0, 1, 4]},
     "kv_lengths was given without block_table; wanted cu_seqlens_k"),
])
def test_errors(module, error, change, words):
    given = {**GIVEN, **change}
    if "value" in change or "out" in change or "kv_lengths" in change:
        with pytest.raises(error, match=words):
            module.attention_varlen(**given)
        return
    with pytest.raises(error, match=words):
        module.attention_varlen(**given)
    del given["value"]
    with pytest.raises(error, match=words):
        module.attention_weights_varlen(**given)


@pytest.mark.parametrize("module", [attnc, reference], ids=["attnc", "reference"])
@pytest.mark.parametrize("name", ["cu_seqlens_q", "block_table", "kv_lengths", "key", "value", "Fortran key"])
def test_out_shares_no_memory_with_pages_or_where_they_are(module, name):
    memory = np.zeros(512)
    order, name = "F" if name.startswith("Fortran") else "C", name.split()[-1]
    if np.ndim(GIVEN[name]) == 4:
        own = memory.reshape(PAGES.shape, order=order)      # in Fortran order, pages are copied
    else:
        own = memory.view(np.int64)[:np.size(GIVEN[name])].reshape(np.shape(GIVEN[name]))
        own[...] = GIVEN[name]
    with pytest.raises(ValueError, match=f"out shares memory with {name}; wanted"):
        module.attention_varlen(**{**GIVEN, name: own, "out": memory[:160].reshape(5, 4, 8)})


@pytest.mark.parametrize("filler", [np.int8(-1), np.uint64(2**64 - 1), np.int64(-2**63), np.uint8(255)])
def test_any_filler_behind_the_last_page(api, filler):
    table = np.array([[0, 7], [1, filler]], filler.dtype)
    assert not api.attention_varlen(**{**GIVEN, "block_table": table}).any()


@pytest.mark.parametrize("module", [attnc, reference], ids=["attnc", "reference"])
def test_pages_have_no_gradients(module):
    lse = np.zeros((4, 5))
    given = {**GIVEN, "grad_output": GIVEN["query"], "output": GIVEN["query"], "lse": lse, "cu_seqlens_k": None}
    with pytest.raises(TypeError, match=r"attention_varlen_backward.* unexpected .*'block_table'; .*no gradients"):
        module.attention_varlen_backward(**given)
    with pytest.raises(TypeError, match=r"attention.* unexpected .*'block_table'; use attention_varlen for keys"):
        module.attention(PAGES, PAGES, PAGES, block_table=[[0]])


def test_weights_keep_the_keys_of_their_time():
    random = np.random.default_rng(0)
    pages, query = normal(random, (4, 4, 2, 8)), normal(random, (3, 4, 8))
    W, = attnc.attention_weights_varlen(query, pages, [0, 3], block_table=[[2, 0]], kv_lengths=[6])
    before = W.dense()
    pages[...] = np.nan
    assert_same_bits(W.dense(), before)


def test_pages_that_need_a_copy_are_copied_where_used():
    """Of 64 GB of pages, one."""
    huge = np.lib.stride_tricks.as_strided(np.ones((1, 4, 2, 8), "f"), (2**28, 4, 2, 8), (0, 64, 32, 4))
    with pytest.raises(ValueError, match="block_table names page"):
        attnc.attention_varlen(np.ones((1, 4, 8), "f"), huge, huge, [0, 1], block_table=[[2**28]], kv_lengths=[3])
    got = attnc.attention_varlen(np.ones((1, 4, 8), "f"), huge, huge, [0, 1], block_table=[[2**27]], kv_lengths=[3])
    assert (got == 1).all()
