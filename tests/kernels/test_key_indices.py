"""Lists of keys: parity for lists of each kind of head, bits of order, poison, gradients, statistics, the cache."""

import numpy as np
import pytest
from checking import assert_same_bits, check_attention, inputs, normal, same_bits
from slow import NAMES, some_option

import attnc
from attnc import _gather, reference

HEADS = {"one list": lambda q, kv: 1, "of key heads": lambda q, kv: kv, "of query heads": lambda q, kv: q}
# q_heads, kv_heads, q_len, kv_len, head_dim, value_dim: rows of a key head in place, as strips, packed
SIZES = {"in place": (4, 2, 9, 150, 20, 24), "one head": (6, 1, 3, 1300, 16, 16), "strips": (14, 2, 3, 90, 32, 64),
         "packed": (40, 2, 2, 700, 8, 12), "each its own": (3, 3, 7, 80, 16, 16)}
RESULTS = ("lse", "entropy", "max", "argmax")


def drawn(random, heads, q_len, kv_len, n, batch=(2,)):
    """Lists with -1 among them, keys named twice, some rows without any."""
    lists = random.integers(-1, kv_len, (*batch, heads, q_len, n))
    lists[random.random(lists.shape[:-1]) < 0.1] = -1
    return lists


def as_mask(lists, q_heads, kv_len):
    """The same lists as a mask (..., q_heads, q_len, kv_len)."""
    named = np.zeros((*lists.shape[:-1], kv_len + 1), bool)
    np.put_along_axis(named, lists.astype(np.int64), True, -1)
    return np.repeat(named[..., :-1], q_heads // named.shape[-3], -3)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_parity(isa, dtype, size, heads, seed):
    random = np.random.default_rng(seed)
    arrays = inputs(random, (2,), *SIZES[size], dtype=dtype)
    q_heads, kv_heads, q_len, kv_len = SIZES[size][:4]
    lists = drawn(random, HEADS[heads](q_heads, kv_heads), q_len, kv_len, kv_len // 2)
    check_attention(*arrays, key_indices=lists)
    check_attention(*arrays, key_indices=lists, causal=True, window=(kv_len // 2, None), kv_lengths=[kv_len // 3, 9],
                    alibi_slopes=np.linspace(0, 1, q_heads), sinks=np.linspace(-1, 1, q_heads), softcap=3.0, want=())


@pytest.mark.parametrize("name", [name for name in NAMES if name != "key_indices"])
@pytest.mark.parametrize("heads", HEADS)
def test_every_other_option(isa, heads, name, seed):
    random = np.random.default_rng(seed)
    arrays = inputs(random, (2,), 4, 2, 5, 60, 16)
    other = some_option(name, random, (2,), 4, 5, 60, 16)
    if name == "k_positions":
        other |= {"causal": True, "alibi_slopes": np.array([0.1, 0.2, 0.0, 0.5])}
    check_attention(*arrays, key_indices=drawn(random, HEADS[heads](4, 2), 5, 60, 30), **other)


@pytest.mark.parametrize("heads", HEADS)
def test_order_and_repeats_change_no_bit(isa, heads, seed):
    random = np.random.default_rng(seed)
    arrays = inputs(random, (2,), 4, 2, 7, 300, 32)
    lists = drawn(random, HEADS[heads](4, 2), 7, 300, 40)
    options = {"causal": True, "want": (*RESULTS, "weights", "scores")}
    plain = attnc.attention(*arrays, key_indices=np.sort(lists, -1), **options)
    repeated = random.permuted(np.concatenate([lists, lists[..., ::3], np.full_like(lists, -1)], -1), axis=-1)
    assert_same_bits(attnc.attention(*arrays, key_indices=repeated, **options), plain)
    strided = np.asfortranarray(np.repeat(repeated, 2, -1))[..., ::-2].astype(np.int16)
    assert_same_bits(attnc.attention(*arrays, key_indices=strided, **options), plain)


@pytest.mark.parametrize("size", SIZES)
def test_a_row_has_the_bits_that_it_has_alone(isa, size, seed, monkeypatch):
    """Nor do threads, batch mates, or the rows of one call of the kernels change any."""
    random = np.random.default_rng(seed)
    query, key, value = inputs(random, (2,), *SIZES[size])
    _, kv_heads, q_len, kv_len = SIZES[size][:4]
    lists = drawn(random, kv_heads, q_len, kv_len, 50)
    options = {"causal": True, "q_offset": kv_len - q_len, "want": RESULTS}
    whole = attnc.attention(query, key, value, key_indices=lists, **options, num_threads=1)
    monkeypatch.setattr(_gather, "ELEMENTS", 1)
    assert_same_bits(attnc.attention(query, key, value, key_indices=lists, **options, num_threads=3), whole)
    row = q_len - 1
    alone = attnc.attention(query[1:, :, row:], key[1:], value[1:], key_indices=lists[1:, :, row:],
                            **{**options, "q_offset": kv_len - 1})
    for name in ("output", *RESULTS):
        assert same_bits(getattr(alone, name)[0, :, 0], getattr(whole, name)[1, :, row]), name


@pytest.mark.parametrize("heads", HEADS)
def test_keys_that_no_list_names_are_never_seen(isa, heads, seed):
    random = np.random.default_rng(seed)
    query, key, value = inputs(random, (2,), 4, 2, 6, 200, 16)
    lists = 2 * drawn(random, HEADS[heads](4, 2), 6, 100, 20).clip(0)
    want = (*RESULTS, "weights", "scores")
    plain = attnc.attention(query, key, value, key_indices=lists, want=want)
    key[..., 1::2, :], value[..., 1::2, :] = np.nan, np.inf
    assert_same_bits(attnc.attention(query, key, value, key_indices=lists, want=want), plain)


@pytest.mark.parametrize("n", [0, 1, 5])
def test_rows_without_keys(api, n):
    query, key, value = inputs(np.random.default_rng(0), (2,), 4, 2, 3, 9, 8)
    lists = np.full((2, 1, 3, n), -1)
    got = api.attention(query, key, value, key_indices=lists, want=("lse", "weights", "argmax"))
    assert not got.output.any() and (got.lse == -np.inf).all() and not got.weights.any() and (got.argmax == -1).all()
    sunk = api.attention(query, key, value, key_indices=lists, sinks=np.arange(4.0), want="lse")
    assert (sunk.lse == np.arange(4)[:, None]).all() and not sunk.output.any()


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("key_indices", "kv_lengths")])
def test_no_keys_beside_every_other_option(api, name, seed):
    random = np.random.default_rng(seed)
    query, key, value = inputs(random, (2,), 4, 2, 3, 0, 8)
    other = some_option(name, random, (2,), 4, 3, 0, 8)
    if name == "k_positions":
        other |= {"causal": True, "alibi_slopes": np.array([0.1, 0.2, 0.0, 0.5])}
    got = api.attention(query, key, value, key_indices=np.full((2, 1, 3, 5), -1), want=("lse", "argmax"), **other)
    assert not got.output.any() and (got.argmax == -1).all()


def test_no_heads(api):
    query, key, value = (x[:, :0] for x in inputs(np.random.default_rng(0), (2,), 2, 2, 3, 9, 8))
    for options in ({}, {"kv_lengths": 5}):
        for lists in (np.zeros((2, 0, 3, 4), int), np.full((2, 1, 3, 4), -1)):
            assert api.attention(query, key, value, key_indices=lists, **options).shape == (2, 0, 3, 8)


def test_two_axes(api):
    query, key, value = (x[0, 0] for x in inputs(np.random.default_rng(0), (1,), 1, 1, 3, 9, 8))
    lists = np.array([[1, 4, -1], [0, 0, 0], [-1, -1, -1]])
    mask = as_mask(lists[None], 1, 9)[0]
    np.testing.assert_allclose(api.attention(query, key, value, key_indices=lists),
                               api.attention(query, key, value, mask=mask), atol=1e-6)


@pytest.mark.parametrize("heads", HEADS)
def test_weights_and_gradients_have_the_bits_of_a_mask(isa, heads, seed):
    random = np.random.default_rng(seed)
    query, key, value = inputs(random, (2,), 4, 2, 30, 900, 16)
    lists = drawn(random, HEADS[heads](4, 2), 30, 900, 60)
    lists[:, :, :12] = np.minimum(lists[:, :, :12], 300)         # rows that leave whole blocks alone
    options = [{"key_indices": lists, "causal": True}, {"mask": as_mask(lists, 4, 900), "causal": True}]
    result = attnc.attention(query, key, value, want="lse", **options[0])
    grad = normal(random, result.output.shape)
    gradients = [attnc.attention_backward(grad, query, key, value, result.output, result.lse, **some)
                 for some in options]
    for name in ("query", "key", "value"):
        assert_same_bits(*(getattr(found, name) for found in gradients), name)
    W, V = (attnc.AttentionWeights(query, key, **some) for some in options)
    for answer in (lambda w: w.dense(), lambda w: w.key_mass(), lambda w: w.topk(5).indices, lambda w: w.key_hits(0.1),
                   lambda w: w[:, 2:3, 5:17, 100:800], lambda w: w.head(1, 3).entropy(), lambda w: w @ value[0, 0],
                   lambda w: w.map((4, 9)), lambda w: w.max()):
        assert_same_bits(answer(W), answer(V))
    assert_same_bits(*(attnc.attention_weights(query, key, **some) for some in options))


@pytest.mark.parametrize("dtype", [np.float32, np.int8])
def test_cache(api, dtype, seed):
    """As DeepSeek's sparse attention decodes; int8 rows too."""
    random = np.random.default_rng(seed)
    key, value = normal(random, (2, 2, 40, 16)), normal(random, (2, 2, 40, 24))
    cache = api.KVCache(2, 2, 16, value_dim=24, capacity=64, dtype=dtype)
    cache.append(key, value)
    lists = drawn(random, 4, 3, 40, 20)
    query = normal(random, (2, 4, 3, 16))
    got = cache.attend(query, key_indices=lists, causal=True)
    mask = np.concatenate([as_mask(lists, 4, 40), np.zeros((2, 4, 3, 24), bool)], -1)
    np.testing.assert_allclose(got, cache.attend(query, mask=mask, causal=True), atol=1e-5)
    np.testing.assert_allclose(cache.weights(query, key_indices=lists).dense(),
                               cache.weights(query, mask=mask[..., :40]).dense(), atol=1e-6)


def test_packed_sequences_have_a_list_each(api, seed):
    random = np.random.default_rng(seed)
    query, key, value = (normal(random, (n, heads, 8)) for n, heads in ((7, 4), (30, 2), (30, 2)))
    lists = [drawn(random, 2, 3, 20, 6, ()), None]
    got = api.attention_varlen(query, key, value, [0, 3, 7], [0, 20, 30], key_indices=lists)
    one = reference.attention(query[:3], key[:20], value[:20], key_indices=lists[0], layout="bnhd")
    np.testing.assert_allclose(got[:3], one, atol=1e-5)


def test_pages_have_the_bits_of_the_tokens(isa, seed):
    random = np.random.default_rng(seed)
    query, pages = normal(random, (11, 4, 16)), [normal(random, (6, 8, 2, n)) for n in (16, 24)]
    table, lengths, ends = np.array([[4, 0, 2], [1, 5, -1], [3, -1, -1], [-1, -1, -1]]), [20, 9, 1, 0], [0, 3, 7, 9, 11]
    lists = [drawn(random, 4, 3, 20, 9, ()), drawn(random, 1, 4, 9, 5, ()), np.zeros((4, 2, 3), int),
             np.full((1, 2, 3), -1)]
    got = attnc.attention_varlen(query, *pages, ends, block_table=table, kv_lengths=lengths, key_indices=lists,
                                 want="lse")
    tokens = [np.concatenate([x[row].reshape(24, 2, -1)[:n] for row, n in zip(table, lengths, strict=True)])
              for x in pages]
    bounds = np.concatenate(([0], np.cumsum(lengths)))
    assert_same_bits(got, attnc.attention_varlen(query, *tokens, ends, bounds, key_indices=lists, want="lse"))


@pytest.mark.parametrize("lists, error, words", [
    (np.zeros((2, 1, 5, 3)), TypeError, "key_indices must be an integer or an array of integers"),
    (np.full((2, 1, 5, 3), 7), ValueError, "key_indices must be from -1 to 6"),
    (np.full((2, 1, 5, 3), -2), ValueError, "key_indices must be from -1 to 6"),
    (np.zeros((2, 3, 5, 3), int), ValueError, r"key_indices has shape \(2, 3, 5, 3\)"),
    (np.zeros((2, 1, 1, 3), int), ValueError, r"key_indices has shape \(2, 1, 1, 3\).*q_len, n"),
    (0, ValueError, "key_indices")])
def test_errors(api, lists, error, words):
    query, key, value = inputs(np.random.default_rng(0), (2,), 4, 2, 5, 7, 8)
    with pytest.raises(error, match=words):
        api.attention(query, key, value, key_indices=lists)
