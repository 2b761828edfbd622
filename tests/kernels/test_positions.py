"""Keys at positions of their own: parity on every path, bits, blocks that are skipped, gradients, statistics."""

import ctypes
import mmap

import numpy as np
import pytest
from checking import PATHS, assert_same_bits, check_attention, check_scores, dtypes_in_turn, inputs, normal

import attnc
from attnc import reference

SLOPES = np.array([0.1, 0.0, 0.3, 1.0])
OPTIONS = {
    "causal": {"causal": True}, "window": {"window": (40, 3)}, "alibi": {"alibi_slopes": SLOPES},
    "all": {"causal": True, "window": (None, 5), "alibi_slopes": SLOPES, "softcap": 4.0,
            "sinks": np.array([0.5, -np.inf, 2.0, 0.0])}}
# Of each head other positions: as a cache keeps them, as they come, each block of keys in order and the blocks not,
# several keys at one position.
ORDERS = {
    "ascending": lambda random, n: np.sort(random.choice(2 * n, n, replace=False)),
    "any": lambda random, n: random.choice(2 * n, n, replace=False),
    "blocks": lambda random, n: np.concatenate(np.array_split(np.arange(n), 5)[::-1]),
    "alike": lambda random, n: random.integers(0, 1 + n // 9, n)}


def drawn(random, order, n, lead=(2, 2)):
    """Positions of each kv head, (*lead, n)."""
    return np.stack([ORDERS[order](random, n) for _ in range(int(np.prod(lead)))]).reshape(*lead, n)


def sized(path, random, dtype="float32"):
    """Query, key and value of four query heads that take this path."""
    _, _, q_len, kv_len, head_dim, value_dim = PATHS[path]
    kv_heads = 2 if path != "strips" else 4     # whose 7 rows fill vectors
    return inputs(random, (2,), 4, kv_heads, q_len, kv_len, head_dim, value_dim, dtype=dtype), kv_heads


@pytest.mark.parametrize("path, options, order, dtype", dtypes_in_turn(PATHS, OPTIONS, ORDERS))
def test_parity(isa, path, options, order, dtype, seed):
    random = np.random.default_rng(seed)
    arrays, kv_heads = sized(path, random, dtype)
    q_len, kv_len = PATHS[path][2:4]
    positions = drawn(random, order, kv_len, (2, kv_heads))
    check_attention(*arrays, k_positions=positions, q_offset=[kv_len - q_len, kv_len // 3], **OPTIONS[options])


@pytest.mark.parametrize("shape", [(1, 64, 40, 32, 32), (1, 40, 150, 64, 64), (3, 20, 1100, 32, 64)])
def test_parity_of_small_heads_and_pairs(isa, shape, seed):
    """Sizes of the fused path, and of pairs of bfloat16 in place and packed."""
    random = np.random.default_rng(seed)
    group, q_len, kv_len, head_dim, value_dim = shape
    for dtype in ("float32", "bfloat16"):
        arrays = inputs(random, (2,), 2 * group, 2, q_len, kv_len, head_dim, value_dim, dtype=dtype)
        for order in ORDERS:
            check_attention(*arrays, k_positions=drawn(random, order, kv_len), q_offset=kv_len - q_len, causal=True,
                            want=())


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("options", OPTIONS)
def test_positions_in_order_have_the_bits_of_none(isa, options, path, seed):
    random = np.random.default_rng(seed)
    arrays, _ = sized(path, random)
    q_len, kv_len = PATHS[path][2:4]
    want = ("lse", "weights", "scores", "entropy", "argmax")
    plain = attnc.attention(*arrays, q_offset=kv_len - q_len, want=want, **OPTIONS[options])
    for positions in (np.arange(kv_len), np.arange(kv_len)[None, None].astype(np.uint16)):
        got = attnc.attention(*arrays, q_offset=kv_len - q_len, want=want, k_positions=positions, **OPTIONS[options])
        assert_same_bits(got, plain)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("order", ORDERS)
def test_positions_have_the_bits_of_a_mask(isa, order, path, seed):
    """Which keys a row sees, and their places in the arrays, decide; where the keys stand does not."""
    random = np.random.default_rng(seed)
    arrays, kv_heads = sized(path, random)
    q_len, kv_len = PATHS[path][2:4]
    positions = drawn(random, order, kv_len, (2, kv_heads))
    rows = np.arange(q_len)[:, None] + kv_len // 2
    mask = ((positions[:, :, None] <= rows) & (positions[:, :, None] >= rows - 300)).repeat(4 // kv_heads, 1)
    assert_same_bits(attnc.attention(*arrays, q_offset=kv_len // 2, window=(300, 0), k_positions=positions, want="lse"),
                     attnc.attention(*arrays, mask=mask, want="lse"))


@pytest.mark.parametrize("dtype", ["int8", "uint8", ">i4", "uint64", "int64"])
def test_any_integers_and_strides(isa, dtype, seed):
    random = np.random.default_rng(seed)
    query, key, value = inputs(random, (2,), 4, 2, 9, 100, 16)
    wide = drawn(random, "any", 100, (2, 2)) % 100
    options = {"q_offset": 60, "causal": True, "window": (30, 0), "alibi_slopes": np.ones(4)}
    plain = attnc.attention(query, key, value, k_positions=wide, **options)
    other = np.full((2, 2, 300), 99, dtype)
    other[..., ::-3] = wide
    strided = other[..., ::-3]
    unaligned = np.zeros(wide.size * 8 + 1, np.uint8)[1:].view(np.int64).reshape(wide.shape)
    unaligned[...] = wide
    for positions in (strided, strided.swapaxes(0, 1).copy().swapaxes(0, 1), unaligned):
        assert_same_bits(attnc.attention(query, key, value, k_positions=positions, **options), plain)
    one = wide[:1, :1]
    assert_same_bits(attnc.attention(query, key, value, k_positions=one[0, 0], **options),
                     attnc.attention(query, key, value, k_positions=np.broadcast_to(one, wide.shape), **options))
    options = {"q_offset": 9, "causal": True}
    assert_same_bits(attnc.attention(query[0, 0], key[0, 0], value[0, 0], k_positions=one[0, 0], **options),
                     attnc.attention(query[:1, :1], key[:1, :1], value[:1, :1], k_positions=one, **options)[0, 0])


def test_kept_keys_stand_where_they_stood(isa, seed):
    """Attention over the keys of each head that stay equals attention over all with a mask of those that do not."""
    random = np.random.default_rng(seed)
    query, key, value = inputs(random, (2,), 4, 2, 30, 700, 16, dtype="float64")
    kept = np.sort(random.permuted(np.tile(np.arange(700), (2, 2, 1)), axis=-1)[..., :200], axis=-1)
    mask = np.zeros((2, 2, 700), bool)
    np.put_along_axis(mask, kept, True, -1)
    options = {"causal": True, "window": (400, None), "alibi_slopes": np.full(4, 0.01), "q_offset": 670}
    some = [np.take_along_axis(x, kept[..., None], -2) for x in (key, value)]
    got = attnc.attention(query, *some, k_positions=kept, **options)
    whole = attnc.attention(query, key, value, mask=mask.repeat(2, 1)[:, :, None], **options)
    np.testing.assert_allclose(got, whole, rtol=0, atol=1e-13)


@pytest.mark.parametrize("stage", ["raw", "scaled", "capped", "masked"])
def test_scores(isa, stage, seed):
    random = np.random.default_rng(seed)
    query, key, _ = inputs(random, (2,), 4, 2, 5, 80, 16)
    check_scores(query, key, stage, k_positions=drawn(random, "any", 80), q_offset=40, **OPTIONS["all"])


@pytest.mark.parametrize("lengths", [{}, {"q_lengths": [30, 11], "kv_lengths": [0, 555]}])
@pytest.mark.parametrize("order", ORDERS)
def test_gradients(isa, order, lengths, seed):
    """Against a mask and a bias that say the same, which test_backward.py holds against the reference."""
    random = np.random.default_rng(seed)
    query, key, value = inputs(random, (2,), 4, 2, 30, 600, 16)
    positions = drawn(random, order, 600).repeat(2, 1)
    distance = positions[:, :, None] - (np.arange(30)[:, None] + 400)
    options = {"causal": True, "window": (350, None), "q_offset": 400, "k_positions": positions[:, ::2]}
    same = {"mask": (distance <= 0) & (distance >= -350)}
    result = attnc.attention(query, key, value, want="lse", **options, **lengths)
    grad = normal(random, result.output.shape)
    got, wanted = (attnc.attention_backward(grad, query, key, value, result.output, result.lse, **some, **lengths)
                   for some in (options, same))
    for name in ("query", "key", "value"):
        assert_same_bits(getattr(got, name), getattr(wanted, name), name)
    twin = reference.attention_backward(*(x.astype(np.float64) for x in (
        grad, query, key, value, result.output, result.lse)), **options, **lengths)
    np.testing.assert_allclose(got.key, twin.key, rtol=0, atol=1e-5)


@pytest.mark.parametrize("order", ORDERS)
def test_statistics(isa, order, seed):
    random = np.random.default_rng(seed)
    query, key, _ = inputs(random, (2,), 4, 2, 30, 600, 16, dtype="float64")
    options = {"causal": True, "window": (500, None), "q_offset": 590, "k_positions": drawn(random, order, 600)}
    W, twin = (module.AttentionWeights(query, key, **options) for module in (attnc, reference))
    for name, arguments in {"entropy": (), "mean_position": (), "mean_distance": (), "key_mass": (), "key_max": (),
                            "key_hits": (0.01,), "map": ((3, 7),), "lse": None, "dense": ()}.items():
        got, wanted = (getattr(x, name) if arguments is None else getattr(x, name)(*arguments) for x in (W, twin))
        np.testing.assert_allclose(got, wanted, rtol=1e-11, atol=1e-11, err_msg=name)
    assert_same_bits(W[1, 2:, 3:9, 100:], W.dense()[1, 2:, 3:9, 100:])
    assert_same_bits(W.head(1, 3).dense(), W.dense()[1, 3])
    np.testing.assert_allclose(W @ np.ones(600), twin @ np.ones(600), atol=1e-12)
    np.testing.assert_allclose(W.key_mass(normalize=True), twin.key_mass(normalize=True), atol=1e-12)
    assert_same_bits(attnc.AttentionWeights(query, key, num_threads=2, **options).key_mass(), W.key_mass())
    loose = attnc.AttentionWeights(query, key, k_positions=options["k_positions"])
    assert loose.mean_position().shape == (2, 4, 30)
    with pytest.raises(ValueError, match="mean_distance was asked of weights with k_positions and without q_offset"):
        loose.mean_distance()


def read_pages(memory, start, size):
    """How many bytes of a mapped file have been read."""
    page = mmap.PAGESIZE
    present = (ctypes.c_ubyte * (size // page))()
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory, start))
    assert ctypes.CDLL(None, use_errno=True).mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), present) == 0
    return page * sum(x & 1 for x in present)


@pytest.mark.skipif(not hasattr(mmap, "MADV_RANDOM"), reason="the system does not tell which pages were read")
@pytest.mark.parametrize("q_heads, q_len", [(1, 1), (8, 1), (1, 30), (1, 200)])
def test_blocks_that_no_row_sees_are_not_read(isa, q_heads, q_len, tmp_path, seed):
    """Of 16,384 keys 4,096 stand within the window, the first and the last of the array; or anywhere, in each block."""
    n, bytes_of_keys = 16384, 16384 * 64 * 4
    random = np.random.default_rng(seed)
    query = normal(random, (1, q_heads, q_len, 64))
    read = []
    for name, positions in (("rolled", np.roll(np.arange(n), 2048)), ("shuffled", random.permutation(n))):
        with open(tmp_path / name, "wb") as file:
            file.truncate(2 * bytes_of_keys)
        with open(tmp_path / name, "r+b") as file, mmap.mmap(file.fileno(), 2 * bytes_of_keys) as memory:
            memory.madvise(mmap.MADV_RANDOM)
            key, value = np.frombuffer(memory, np.float32).reshape(2, 1, 1, n, 64)
            attnc.attention(query, key, value, k_positions=positions, window=(4095 - q_len, 0), causal=True,
                            q_offset=n - q_len, num_threads=1)
            read.append(read_pages(memory, 0, 2 * bytes_of_keys) / (2 * bytes_of_keys))
            del key, value
    assert 0.9 * 4096 / n <= read[0] <= 0.45 and read[1] > 0.9
