"""The cache in pages: its twin in random histories, sharing and copies on write, errors, threads."""

import copy
import pickle
import re
import threading

import numpy as np
import pytest
from checking import DTYPES, assert_same_bits, dtype_of, normal

import attnc
from attnc import reference

MODULES = pytest.mark.parametrize("module", [attnc, reference], ids=["attnc", "reference"])


def made(module=attnc, n_pages=12, page=4, dtype="float32", **options):
    return module.PagedKVCache(n_pages, page, 2, 8, 6, dtype=dtype_of(dtype), **options)


def tokens(random, n, dtype="float32"):
    return [normal(random, (n, 2, dim), dtype) for dim in (8, 6)]


class History:
    """The same random changes of a cache and its twin, which must agree in every result and error."""

    def __init__(self, seed, **sizes):
        self.random = np.random.default_rng(seed)
        self.caches = [made(module, **sizes) for module in (attnc, reference)]
        self.shared = sizes.get("shared", False)
        self.refused = 0

    def both(self, name, *args, **options):
        found = []
        for cache in self.caches:
            try:
                found.append(getattr(cache, name)(*args, **options))
            except (ValueError, MemoryError) as error:
                found.append((type(error), str(error)))
        self.refused += isinstance(found[0], tuple) and found[0][0] is MemoryError
        return found

    def some(self, most):
        ids = list(self.caches[0].lengths)
        return self.random.permutation(ids)[:self.random.integers(0, most + 1)].tolist()

    def step(self):
        random, (cache, twin) = self.random, self.caches
        action = random.choice(["add", "fork", "free", "append", "append", "append", "truncate", "attend"])
        if action in ("add", "fork"):
            source = self.some(1) if action == "fork" else []
            a, b = self.both(action if source else "add", *source)
        elif action == "free":
            a, b = self.both(action, [i for i in self.some(2) if random.random() < 0.5])
        elif action == "append":
            ids = self.some(3)
            counts = random.integers(0, 7, len(ids))
            key, value = tokens(random, int(counts.sum()))
            a, b = self.both(action, ids, key, None if self.shared else value, lengths=counts)
        elif action == "truncate":
            ids = self.some(2)
            a, b = self.both(action, ids, [random.integers(max(cache.lengths[i] - 6, 0), cache.lengths[i] + 1)
                                           for i in ids])
        else:
            ids = self.some(4)
            rows = random.integers(0, 4, len(ids))
            query = normal(random, (int(rows.sum()), 4, 8))
            a, b = self.both(action, ids, query, q_lengths=rows, causal=True, window=(9, 0), want="lse")
            np.testing.assert_allclose(a.output, b.output, rtol=0, atol=2e-6)
            np.testing.assert_allclose(a.lse, b.lse, rtol=0, atol=2e-6)
            a = b = None
        assert a == b
        assert cache.lengths == twin.lengths and cache.free_pages == twin.free_pages and repr(cache) == repr(twin)
        ids = list(cache.lengths)
        np.testing.assert_array_equal(*self.both("block_table", ids))
        return a


@pytest.mark.parametrize("page", [1, 3, 16])
@pytest.mark.parametrize("history", range(3))
def test_the_twin_through_a_random_history(isa, history, page, seed):
    both = History(seed * 97 + history, page=page, n_pages=max(40 // page, 4), shared=history == 1)
    for _ in range(150):
        both.step()
    assert both.refused
    cache = both.caches[0]
    used = cache.block_table(list(cache.lengths))
    assert cache.free_pages == len(cache.keys) - len(np.unique(used[used >= 0]))
    cache.free(list(cache.lengths))
    assert cache.free_pages == len(cache.keys) and not cache.lengths


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_bits_of_attention_over_contiguous_tokens(isa, dtype, seed):
    random = np.random.default_rng(seed)
    cache, lengths, rows = made(n_pages=90, page=16, dtype=dtype), [40, 1, 0, 1100], [1, 3, 2, 1]
    ids = [cache.add() for _ in lengths]
    key, value = tokens(random, sum(lengths), dtype)
    cache.append(ids, key, value, lengths=lengths)
    query = normal(random, (sum(rows), 4, 8), dtype)
    got = cache.attend(ids, query, q_lengths=rows, causal=True, want=("lse", "entropy"))
    start = np.cumsum([0, *lengths])
    ends = np.cumsum([0, *rows])
    for i in range(4):
        keys, mine = slice(*start[i:i + 2]), slice(*ends[i:i + 2])
        alone = attnc.attention(query[mine], key[keys], value[keys], layout="bnhd", causal=True,
                                want=("lse", "entropy"))
        assert_same_bits(got.output[mine], alone.output)
        assert_same_bits(got.lse[:, mine], alone.lse)
        assert_same_bits(got.entropy[:, mine], alone.entropy)
    for W, i in zip(cache.weights(ids, query, q_lengths=rows, causal=True), range(4), strict=True):
        keys, mine = slice(*start[i:i + 2]), slice(*ends[i:i + 2])
        assert_same_bits(W.dense(), attnc.AttentionWeights(query[mine], key[keys], layout="bnhd", causal=True).dense())


def test_a_fork_shares_full_pages_and_copies_the_last(isa, seed):
    random = np.random.default_rng(seed)
    cache = made()
    prompt = cache.add()
    first = tokens(random, 10)
    cache.append(prompt, *first)                      # two full pages, and two tokens in a third
    one, two = cache.fork(prompt), cache.fork(prompt)
    assert cache.free_pages == 9 and cache.block_table([prompt, one, two]).tolist() == [[0, 1, 2]] * 3
    more = [tokens(random, 3) for _ in range(3)]
    cache.append([one, prompt], *(np.concatenate([x[i] for x in more[:2]]) for i in range(2)))
    assert cache.block_table([prompt, one, two]).tolist() == [[0, 1, 5, 6], [0, 1, 3, 4], [0, 1, 2, -1]]
    cache.append(two, *more[2])                       # the last of the sharers writes in place
    assert cache.block_table(two).tolist() == [[0, 1, 2, 7]] and cache.free_pages == 4
    query = normal(random, (3, 4, 8))
    got = cache.attend([prompt, one, two], query)
    for row, i in enumerate([1, 0, 2]):
        key, value = (np.concatenate((a, b)) for a, b in zip(first, more[i], strict=True))
        assert_same_bits(got[row], attnc.attention(query[row:row + 1], key, value, layout="bnhd")[0])
    cache.free([prompt, two])
    assert cache.free_pages == 8 and cache.block_table(one).tolist() == [[0, 1, 3, 4]]


def test_one_fork_of_two_in_one_append(seed):
    """Both sharers of a page append at once: one copies it, the other then writes in place."""
    random = np.random.default_rng(seed)
    caches = [made(module) for module in (attnc, reference)]
    for cache in caches:
        cache.append(cache.add(), *tokens(np.random.default_rng(1), 5))
        assert cache.fork(0) == 1
        cache.append([0, 1], *tokens(np.random.default_rng(2), 2))
        assert cache.block_table([0, 1]).tolist() == [[0, 2], [0, 1]]
    query = normal(random, (2, 4, 8))
    np.testing.assert_allclose(*(cache.attend([1, 0], query) for cache in caches), atol=1e-6)


def test_tokens_that_lie_in_a_page_which_the_copy_takes(seed):
    """A free page still holds the tokens of its last sequence, and may be the one that copy on write takes."""
    random, cache = np.random.default_rng(seed), made()
    first, last = cache.add(), cache.add()
    for i, n in ((first, 6), (last, 4)):
        cache.append(i, *tokens(random, n))
    [page] = cache.block_table([last])[0]
    cache.free(last)
    views = cache.keys[page, :2], cache.values[page, :2]
    wanted = [x.copy() for x in views]
    copied = cache.fork(first)
    cache.append(copied, *views)
    pages = cache.block_table([copied])[0]
    assert page in pages
    for stored, new in zip((cache.keys, cache.values), wanted, strict=True):
        np.testing.assert_array_equal(stored[pages].reshape(-1, *new.shape[1:])[6:8], new)


def test_values_that_are_views_of_keys_which_the_append_overwrites(seed):
    random = np.random.default_rng(seed)
    cache = attnc.PagedKVCache(2, 4, 2, 8, 8, dtype="float32")
    i = cache.add()
    old, new = (normal(random, (3, 2, 8)) for _ in range(2))
    cache.append(i, old, old)
    [page] = cache.block_table([i])[0]
    cache.truncate(i, 0)
    cache.append(i, new, cache.keys[page, :3])
    assert page == cache.block_table([i])[0][0]
    np.testing.assert_array_equal(cache.values[page, :3], old)


def test_truncate_gives_back_pages_and_never_writes_into_shared_ones(isa, seed):
    random = np.random.default_rng(seed)
    cache = made()
    one = cache.add()
    first = tokens(random, 11)
    cache.append(one, *first)
    two = cache.fork(one)
    query = normal(random, (1, 4, 8))
    whole = cache.attend(one, query)
    cache.truncate(two, 5)                          # one token in the second page, which the first sequence fills
    assert cache.lengths == {one: 11, two: 5} and cache.free_pages == 9
    assert cache.block_table([one, two]).tolist() == [[0, 1, 2], [0, 1, -1]]
    more = tokens(random, 2)
    cache.append(two, *more)
    assert cache.block_table(two).tolist() == [[0, 3]]
    assert_same_bits(cache.attend(one, query), whole)
    assert_same_bits(cache.attend(two, query), attnc.attention(query, *(
        np.concatenate((x[:5], y)) for x, y in zip(first, more, strict=True)), layout="bnhd"))
    cache.truncate([one, two], [4, 0])
    assert cache.free_pages == 11 and cache.block_table([one, two]).tolist() == [[0], [-1]]
    cache.truncate(one, 4)                          # no change
    assert cache.lengths == {one: 4, two: 0}
    cache.free([one, two])
    assert cache.free_pages == 12


SHARED = {"head_dim": 36, "value_dim": 32, "kv_heads": 1}


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_that_are_columns_of_the_keys(isa, dtype, seed):
    """Latents of multi-head latent attention: the bits of a cache with both, in the memory of the keys."""
    random = np.random.default_rng(seed)
    one, two = (attnc.PagedKVCache(20, 4, **SHARED, dtype=dtype_of(dtype), shared=shared) for shared in (True, False))
    key, more, query = (normal(random, (n, heads, 36), dtype) for n, heads in ((31, 1), (5, 1), (9, 8)))
    assert one.nbytes * 68 == two.nbytes * 36 and np.shares_memory(one.keys, one.values)
    assert "shared=True" in repr(one) and "shared" not in repr(two)
    found = []
    for cache in one, two:
        ids = [cache.add(), cache.add()]
        for x, lengths in (key, [22, 9]), (more, [1, 4]):
            cache.append(ids, x, None if cache is one else x[..., :32], lengths=lengths)
        ids.append(cache.fork(ids[0]))
        cache.append(ids[2], more[:2], *([] if cache is one else [more[:2, :, :32]]))      # copies the last page
        got = cache.attend(ids, query, q_lengths=[2, 6, 1], causal=True, want="lse")
        found.append([got.output, got.lse, np.ascontiguousarray(cache.values), *(
            W.dense() for W in cache.weights(ids, query, q_lengths=[2, 6, 1]))])
    for x, y in zip(*found, strict=True):
        assert_same_bits(x, y)


@MODULES
@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_of_shared_values(module, way, seed):
    cache = module.PagedKVCache(6, 4, **SHARED, dtype="float32", shared=True)
    key, query = normal(np.random.default_rng(seed), (7, 1, 36)), np.ones((1, 8, 36), "f")
    cache.append(cache.add(), key)
    before, other = cache.attend(0, query), way(cache)
    other.truncate(0, 2)
    other.append(0, key[:3])
    assert_same_bits(cache.attend(0, query), before)
    assert_same_bits(other.attend(0, query), module.attention(
        query, *(np.concatenate((key[:2], key[:3]))[..., :n] for n in (36, 32)), layout="bnhd"))
    if module is attnc:
        assert np.shares_memory(other.keys, other.values) and not np.shares_memory(other.keys, cache.keys)


@MODULES
@pytest.mark.parametrize("error, call, words", [
    (ValueError, lambda m: m.PagedKVCache(4, 2, 1, 8, 9, dtype="float32", shared=True),
     "value_dim is 9 and head_dim 8; wanted at most head_dim"),
    (TypeError, lambda m: m.PagedKVCache(4, 2, 1, 8, dtype="float32", shared=1), "shared must be True or False"),
    (TypeError, lambda m: m.PagedKVCache(4, 2, **SHARED, dtype="float32", shared=True).append(
        [], np.zeros((0, 1, 36)), np.zeros((0, 1, 32))), "value was given to a cache whose values are the first col"),
    (TypeError, lambda m: made(m).append([], np.zeros((0, 2, 8))), "value must be an array, got None"),
])
def test_errors_of_shared_values(module, error, call, words):
    with pytest.raises(error, match=words):
        call(module)


@MODULES
def test_without_room_nothing_is_written(module, seed):
    random = np.random.default_rng(seed)
    cache = made(module, n_pages=3)
    a, b = cache.add(), cache.add()
    cache.append([a, b], *tokens(random, 9), lengths=[5, 4])
    before = cache.attend([a, b], np.ones((2, 4, 8), "f"))
    words = re.escape("3 more pages of 4 tokens are needed, and 0 of 3 are free; nothing was appended")
    with pytest.raises(MemoryError, match=words):
        cache.append([a, b], *tokens(random, 9), lengths=[8, 1])
    assert cache.lengths == {a: 5, b: 4} and cache.free_pages == 0
    assert_same_bits(cache.attend([a, b], np.ones((2, 4, 8), "f")), before)
    cache.append(a, *tokens(random, 3))
    fork = cache.fork(a)
    assert cache.lengths == {a: 8, b: 4, fork: 8}
    cache.free(b)
    cache.append([fork], *tokens(random, 4))
    with pytest.raises(MemoryError, match="1 more pages"):
        cache.append(a, *tokens(random, 1))


@MODULES
@pytest.mark.parametrize("error, call, words", [
    (ValueError, lambda c: c.free(0), "ids names sequence 0, which was freed; wanted what add"),
    (ValueError, lambda c: c.free([1, 7]), "ids names sequence 7, which was never added"),
    (ValueError, lambda c: c.free([1, 1]), "ids names sequence 1 twice; wanted each once"),
    (ValueError, lambda c: c.fork(0), "sequence names sequence 0, which was freed"),
    (ValueError, lambda c: c.fork([1]), r"sequence has shape \(1,\); wanted an id"),
    (TypeError, lambda c: c.fork("1"), "sequence must be an integer"),
    (TypeError, lambda c: c.attend(1.0, np.ones((1, 4, 8))), "ids must be an integer"),
    (ValueError, lambda c: c.attend(-1, np.ones((1, 4, 8))), "ids names sequence -1, which was never added"),
    (ValueError, lambda c: c.block_table([[1]]), r"ids has shape \(1, 1\); wanted an id or a list of ids"),
    (ValueError, lambda c: c.append([1, 1], *tokens(np.random.default_rng(0), 2)), "ids names sequence 1 twice"),
    (ValueError, lambda c: c.append([1, 2], *tokens(np.random.default_rng(0), 3)),
     "key has 3 tokens for 2 sequences; wanted a multiple, or lengths= with the number of each"),
    (ValueError, lambda c: c.append([1, 2], *tokens(np.random.default_rng(0), 3), lengths=[1, 1]),
     "lengths sums to 2; wanted 3, the tokens of key"),
    (ValueError, lambda c: c.append([1, 2], *tokens(np.random.default_rng(0), 3), lengths=[4, -1]), "lengths must be"),
    (ValueError, lambda c: c.append([1, 2], *tokens(np.random.default_rng(0), 3), lengths=[3]), "lengths has shape"),
    (TypeError, lambda c: c.append(1, *tokens(np.random.default_rng(0), 3), lengths=[3.0]), "lengths must be an int"),
    (ValueError, lambda c: c.append(1, np.ones((3, 2, 8)), np.ones((2, 2, 6))), r"value has shape \(2, 2, 6\); wa"),
    (ValueError, lambda c: c.append(1, np.ones((3, 1, 8)), np.ones((3, 2, 6))), r"key has shape \(3, 1, 8\); wanted "
     r"\(tokens, kv_heads, dim\) = \(3, 2, 8\)"),
    (TypeError, lambda c: c.append(1, np.ones((3, 2, 8), complex), np.ones((3, 2, 6))), "key has dtype complex128"),
    (ValueError, lambda c: c.truncate(1, 4), "lengths asks for 4 tokens of sequence 1, which has 3; wanted no more"),
    (ValueError, lambda c: c.truncate([1, 2], [1, 7]), "lengths asks for 7 tokens of sequence 2, which has 3"),
    (ValueError, lambda c: c.truncate([1, 2], [1, 1, 1]), r"lengths has shape \(3,\); wanted an integer or \(len\(ids"),
    (ValueError, lambda c: c.truncate(1, -1), "lengths must be an integer from 0"),
    (TypeError, lambda c: c.truncate(1, 1.0), "lengths must be an integer"),
    (ValueError, lambda c: c.truncate([1, 1], 1), "ids names sequence 1 twice"),
    (ValueError, lambda c: c.truncate([1, 0], 0), "ids names sequence 0, which was freed"),
    (ValueError, lambda c: c.attend([1, 2], np.ones((3, 4, 8))), "query has 3 tokens for 2 sequences; .* q_lengths="),
    (ValueError, lambda c: c.attend([1, 2], np.ones((3, 4, 8)), q_lengths=[1, 1]), "q_lengths sums to 2; wanted 3"),
    (ValueError, lambda c: c.attend([], np.ones((3, 4, 8))), "query has 3 tokens for 0 sequences"),
    (ValueError, lambda c: c.attend(1, np.ones((4, 8))), r"query has 2 axes, shape \(4, 8\); wanted"),
    (ValueError, lambda c: c.attend(1, np.ones((1, 3, 8))), "query has 3 heads, no multiple of the 2 of the cache"),
    (ValueError, lambda c: c.attend(1, np.ones((1, 4, 7))), "query has head_dim 7, the cache has 8"),
    (TypeError, lambda c: c.attend(1, np.ones((1, 4, 8)), is_causal=True), r"^PagedKVCache.attend\(\) .*use causal=Tr"),
    (TypeError, lambda c: c.weights(1, np.ones((1, 4, 8)), scaling=1), r"^PagedKVCache.weights\(\) .*use scale="),
])
def test_errors_change_nothing(module, error, call, words):
    cache = made(module)
    for _ in range(3):
        cache.add()
    cache.append([1, 2], *tokens(np.random.default_rng(0), 6))
    cache.free(0)
    before = repr(cache), cache.lengths
    with pytest.raises(error, match=words):
        call(cache)
    assert (repr(cache), cache.lengths) == before


@MODULES
@pytest.mark.parametrize("error, change, words", [
    (ValueError, {"page": 0}, "page must be an integer from 1"),
    (ValueError, {"n_pages": -1}, "n_pages must be an integer from 0"),
    (TypeError, {"kv_heads": 1.5}, "kv_heads must be an int"), (TypeError, {"dtype": None}, "dtype must be a dtype"),
    (TypeError, {"dtype": np.int8}, "dtype is int8; wanted float32, float16, bfloat16 or float64"),
    (TypeError, {"dtype": "what"}, "dtype must be a dtype, got str 'what'"), (ValueError, {"head_dim": -3}, "head_dim"),
])
def test_sizes_that_are_refused(module, error, change, words):
    with pytest.raises(error, match=words):
        module.PagedKVCache(**{"n_pages": 4, "page": 2, "kv_heads": 1, "head_dim": 8, "dtype": "float32"} | change)


def test_out_must_not_share_memory_with_the_pages():
    cache = attnc.PagedKVCache(3, 4, 2, 8, dtype="float32")
    cache.append(cache.add(), *[np.ones((4, 2, 8))] * 2)
    for pages in cache._keys, cache._values:
        with pytest.raises(ValueError, match=r"out shares memory with (key|value)"):
            cache.attend(0, np.ones((1, 4, 8), "f"), out=np.moveaxis(pages, 2, 0).reshape(-1)[:32].reshape(1, 4, 8))
    with pytest.raises(ValueError, match="read-only"):
        cache.keys[...] = 0


@MODULES
def test_no_sequence_and_no_token(module):
    cache = made(module)
    empty = cache.add()
    cache.append([], np.zeros((0, 2, 8)), np.zeros((0, 2, 6)))
    cache.append(empty, np.zeros((0, 2, 8)), np.zeros((0, 2, 6)))
    assert cache.attend([], np.zeros((0, 4, 8))).shape == (0, 4, 6) and cache.weights([], np.zeros((0, 4, 8))) == []
    output, lse = cache.attend([empty], np.ones((2, 4, 8), "f"), want="lse")
    assert not output.any() and (lse == -np.inf).all()
    assert cache.block_table([]).shape == (0, 0) and cache.block_table(empty).shape == (1, 0)
    assert cache.attend([empty, empty], np.ones((2, 4, 8))).shape == (2, 4, 6)


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
@MODULES
def test_copies_are_independent(module, way, seed):
    random = np.random.default_rng(seed)
    cache, query = made(module), np.ones((2, 4, 8), "f")
    cache.append([cache.add(), cache.add()], *tokens(random, 12))
    before, other = cache.attend([0, 1], query), way(cache)
    assert_same_bits(other.attend([0, 1], query), before)
    other.append([0, other.add()], *tokens(random, 6))
    other.free(1)
    assert_same_bits(cache.attend([0, 1], query), before)
    cache.append([0], *tokens(random, 3))
    assert cache.lengths == {0: 9, 1: 6} and other.lengths == {0: 9, 2: 3}


def test_unused_rows_never_matter(isa, seed):
    random = np.random.default_rng(seed)
    cache = made()
    ids = [cache.add() for _ in range(3)]
    cache.append(ids, *tokens(random, 20), lengths=[3, 9, 8])
    query = normal(random, (6, 4, 8))
    before = cache.attend(ids, query, want="lse")
    used = {(page, place) for i, n in cache.lengths.items() for j in range(n)
            for page, place in [(cache.block_table(i)[0, j // 4], j % 4)]}
    for place in np.ndindex(12, 4):
        if place not in used:
            cache._keys[place] = cache._values[place] = np.nan
    assert_same_bits(cache.attend(ids, query, want="lse"), before)


def test_threads_share_a_cache():
    """Each thread adds, appends, attends and frees its own sequences; a prompt of all is never disturbed."""
    cache, errors = made(n_pages=60), []
    prompt = cache.add()
    cache.append(prompt, *tokens(np.random.default_rng(0), 6))
    query = np.ones((1, 4, 8), "f")
    wanted = cache.attend(prompt, query)

    def work(seed):
        random = np.random.default_rng(seed)
        try:
            for _ in range(30):
                mine = cache.fork(prompt)
                key, value = tokens(random, 5)
                for j in range(5):
                    cache.append(mine, key[j:j + 1], value[j:j + 1])
                    cache.attend([mine, prompt], np.ones((2, 4, 8), "f"))
                assert_same_bits(cache.attend(prompt, query), wanted)
                whole = [np.concatenate([pages[cache.block_table(prompt)[0]].reshape(-1, *pages.shape[2:])[:6], x])
                         for pages, x in zip((cache.keys, cache.values), (key, value), strict=True)]
                assert_same_bits(cache.attend(mine, query), attnc.attention(query, *whole, layout="bnhd"))
                cache.free(mine)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert cache.free_pages == 58


def test_a_handler_within_a_call_of_its_thread():
    cache = made()
    cache.append(cache.add(), *tokens(np.random.default_rng(0), 3))
    within = "PagedKVCache is used within a call of the same thread"
    with cache._lock:
        for call in (cache.add, lambda: cache.fork(0), lambda: cache.free(0), lambda: cache.truncate(0, 1),
                     lambda: cache.attend(0, np.ones((1, 4, 8)))):
            with pytest.raises(RuntimeError, match=within):
                call()
    reader = cache._reader()
    cache._enter(reader)
    with pytest.raises(RuntimeError, match=within):
        cache.append(0, *tokens(np.random.default_rng(0), 1))
    cache._leave(reader)
    cache.append(0, *tokens(np.random.default_rng(0), 1))
    assert cache.lengths == {0: 4}
