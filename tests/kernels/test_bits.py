"""A row's bits depend on its own inputs alone: not on threads, mates, strides, or keys it may not see."""

import mmap

import numpy as np
import pytest
from checking import DTYPES, PATH_OF, PATHS, WANT, assert_same_bits, dtypes_in_turn, inputs, plans
from layouts import MEMORY
from slow import NAMES, some_option

import attnc
from attnc import _isa


def problem(random, path, dtype="float32", chance=0.25, **fixed):
    """Inputs and some options, every one of them with all its batch axes, so that elements can be taken out."""
    q_heads, _, q_len, kv_len, dim, _ = PATHS[path]
    arrays = inputs(random, (2,), *PATHS[path], dtype=dtype)
    options = {}
    for name in NAMES:
        if random.random() < chance:
            options |= some_option(name, random, (2,), q_heads, q_len, kv_len, dim)
    return arrays, options | fixed


def run(arrays, options, want=WANT, **more):
    return attnc.attention(*arrays, want=want, **options, **more)


@pytest.mark.parametrize("path", PATHS)
def test_paths(isa, path):
    """The tests of this file take the paths that they name."""
    with plans() as taken:
        run(inputs(np.random.default_rng(0), (2,), *PATHS[path]), {}, ())
    assert [plan.path for plan in taken] == [PATH_OF[path]]
    assert (taken[0].splits > 1) == (path == "split")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("path", PATHS)
def test_any_number_of_threads(isa, path, dtype, seed):
    arrays, options = problem(np.random.default_rng([seed, len(path), len(dtype)]), path, dtype, chance=0.4)
    one = run(arrays, options, num_threads=1)
    for threads in (2, 3, 7):
        assert_same_bits(run(arrays, options, num_threads=threads), one)


@pytest.mark.parametrize("path", PATHS)
def test_run_after_run(isa, path, seed):
    arrays, options = problem(np.random.default_rng(seed), path)
    first = run(arrays, options)
    for _ in range(2):
        assert_same_bits(run(arrays, options), first)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("path", PATHS)
def test_a_batch_element_alone(isa, path, dtype, seed):
    random = np.random.default_rng(seed)
    q_heads, _, q_len, kv_len, *_ = PATHS[path]
    arrays, _ = problem(random, path, dtype, chance=0)
    options = dict(
        mask=random.random((2, 1, q_len, kv_len)) < 0.8, key_mask=random.random((2, kv_len)) < 0.9,
        bias=random.standard_normal((2, q_heads, 1, kv_len)), q_lengths=np.array([q_len, q_len - 1]),
        kv_lengths=np.array([kv_len - 7, kv_len]), q_offset=np.array([kv_len, kv_len // 2]), causal=True)
    both = run(arrays, options)
    for i in range(2):
        alone = run([x[i:i + 1] for x in arrays], {name: x if x is True else x[i:i + 1] for name, x in options.items()})
        for name in vars(both):
            assert_same_bits(getattr(alone, name), getattr(both, name)[i:i + 1], name)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("path", PATHS)
def test_a_head_alone(isa, path, dtype, seed):
    """A kv head with its query heads; their number stays, since few or many rows take different paths."""
    random = np.random.default_rng(seed)
    q_heads, kv_heads, q_len, kv_len, *_ = PATHS[path]
    arrays, _ = problem(random, path, dtype, chance=0)
    options = dict(bias=random.standard_normal((q_heads, q_len, kv_len)), sinks=random.standard_normal(q_heads),
                   alibi_slopes=random.random(q_heads))
    both = run(arrays, options | {"causal": True})
    group = q_heads // kv_heads
    for h in range(kv_heads):
        mine = slice(h * group, (h + 1) * group)
        query, key, value = arrays
        alone = run([query[:, mine], key[:, h:h + 1], value[:, h:h + 1]],
                    {name: x[mine] for name, x in options.items()} | {"causal": True})
        for name in vars(both):
            assert_same_bits(getattr(alone, name), getattr(both, name)[:, mine], name)


@pytest.mark.parametrize("path", PATHS)
def test_other_rows(isa, path, seed):
    """The same number of rows with other contents: the row in the middle keeps its bits."""
    random = np.random.default_rng(seed)
    arrays, options = problem(random, path, chance=0, causal=True)
    before = run(arrays, options)
    row = arrays[0].shape[-2] // 2
    query = np.flip(arrays[0], 0) * 3
    query[..., row, :] = arrays[0][..., row, :]
    after = run([query, *arrays[1:]], options)
    for name in vars(before):
        a, b = (getattr(x, name)[:, :, row] for x in (before, after))
        assert_same_bits(a, b, name)


# Memory of every kind

CLASSES = [(1, 2, 3, 6), (7, 8), (9, 12, 16), (17, 40, 64), (65, 66, 130, 200)]


@pytest.mark.parametrize("counts, sizes, dtype", dtypes_in_turn(CLASSES, [(70, 32, 64), (2100, 20, 12), (300, 64, 64)]),
                         ids=str)
def test_the_number_of_rows_counts_by_its_class(isa, counts, sizes, dtype, seed):
    """Rows of a key head, q_len * q_heads / kv_heads, in the classes of the page; `want` changes no bit of output."""
    random, wanted, (keys, depth, value_dim) = np.random.default_rng(seed), None, sizes
    query, key, value = inputs(random, (), 1, 1, 200, keys, depth, value_dim, dtype)
    for count in counts:
        for group in (1, 2, 4):
            if count % group:
                continue
            some = query[0, :count].reshape(group, count // group, depth)
            for want in ((), ("lse", "weights", "scores")):
                got = attnc.attention(some, key, value, want=want)
                found = [got] if not want else [got.output, got.lse, got.weights, got.scores]
                rows = [x[0, 0] for x in found]
                wanted = rows if wanted is None or len(rows) > len(wanted) else wanted
                for row, first in zip(rows, wanted, strict=False):
                    assert_same_bits(row, first, f"{count} rows, {group} heads")


def test_the_kernels_change_their_path_only_between_classes(isa):
    """The classes of the page hold on every instruction set and type, which may have fewer."""
    for acc in (0, 1):
        for counts in CLASSES:
            assert len({_isa.kernels.path_class(acc, n) for n in range(counts[0], counts[-1] + 1)}) == 1, counts
        assert _isa.kernels.path_class(acc, 64) != _isa.kernels.path_class(acc, 65)


def read_only_map(x, tmp_path):
    path = tmp_path / f"{id(x)}.bin"
    x.tofile(path)
    return np.memmap(path, x.dtype, "r", shape=x.shape)


@pytest.mark.parametrize("name, path, dtype", dtypes_in_turn(MEMORY, PATHS))
def test_memory(isa, name, path, dtype, seed):
    arrays, options = problem(np.random.default_rng(seed), path, dtype, chance=0.3)
    if name == "odd strides":       # of axes of length 1
        arrays = [x[:1, :1] for x in arrays]
        options = {}
    wanted = run(arrays, options)
    other = MEMORY[name]
    assert_same_bits(run([other(x) for x in arrays], options), wanted)
    for i in range(3):
        assert_same_bits(run([other(x) if i == k else x for k, x in enumerate(arrays)], options), wanted)


@pytest.mark.parametrize("path", PATHS)
def test_memory_of_options(isa, path, seed):
    random = np.random.default_rng(seed)
    q_heads, _, q_len, kv_len, *_ = PATHS[path]
    arrays, _ = problem(random, path, chance=0)
    full = (2, q_heads, q_len, kv_len)
    options = dict(mask=random.random(full) < 0.8, bias=random.standard_normal(full),
                   key_mask=random.random((2, kv_len)) < 0.9, k_segments=random.integers(0, 2, (2, kv_len)),
                   q_segments=random.integers(0, 2, (2, q_len)), sinks=random.standard_normal(q_heads),
                   alibi_slopes=random.random((2, q_heads)), kv_lengths=np.array([kv_len - 3, kv_len]),
                   q_lengths=np.array([q_len - 1, q_len]), q_offset=np.array([3, kv_len]))
    wanted = run(arrays, options)
    for change in MEMORY.values():
        assert_same_bits(run(arrays, {name: change(x) for name, x in options.items()}), wanted)
    assert_same_bits(run(arrays, {name: x.tolist() for name, x in options.items() if name not in ("mask", "bias")} | {
        name: MEMORY["unaligned"](options[name]) for name in ("mask", "bias")}), wanted)


@pytest.mark.parametrize("path", PATHS)
def test_memory_map(isa, path, seed, tmp_path):
    arrays, options = problem(np.random.default_rng(seed), path)
    assert_same_bits(run([read_only_map(x, tmp_path) for x in arrays], options), run(arrays, options))


@pytest.mark.parametrize("path", PATHS)
def test_stride_zero(isa, path, seed):
    """Broadcast views: one head for all, one row for all, one number for all."""
    (query, key, value), options = problem(np.random.default_rng(seed), path, chance=0.2)
    for views in ((np.broadcast_to(x[:1, :1], x.shape) for x in (query, key, value)),
                  (np.broadcast_to(x[:, :, :1], x.shape) for x in (query, key, value)),
                  (np.broadcast_to(x[..., :1], x.shape) for x in (query, key, value))):
        views = list(views)
        assert_same_bits(run(views, options), run([x.copy() for x in views], options))


def test_nothing_is_read_outside_the_arrays(isa):
    """The arrays end where a page that may not be read begins: reading on would end the process."""
    page = mmap.PAGESIZE
    for dtype in (np.float32, np.float64, np.float16):
        for kv_len, dim in ((1, 1), (7, 5), (33, 17), (70, 24)):
            shapes = (1, 3, dim), (1, kv_len, dim), (1, kv_len, dim), (1, 80, dim)
            ends = [at_the_end_of_a_page(np.ones(shape, dtype), page) for shape in shapes]
            plain = attnc.attention(*[np.ones(shape, dtype) for shape in shapes[:3]], want=WANT)
            assert_same_bits(attnc.attention(*ends[:3], want=WANT), plain)
            attnc.attention(ends[3], *ends[1:3], want=WANT)
            attnc.softmax(ends[1])
            attnc.weighted_sum(at_the_end_of_a_page(np.ones((1, 3, kv_len), dtype), page), ends[2])


def at_the_end_of_a_page(x, page):
    """A copy of `x` whose last byte is the last one before memory that may not be touched."""
    import ctypes

    size = (x.nbytes + page - 1) // page * page
    memory = mmap.mmap(-1, size + page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mprotect(ctypes.c_void_p(start + size), ctypes.c_size_t(page), 0) == 0
    view = np.frombuffer(memory, np.uint8, size)[size - x.nbytes:].view(x.dtype).reshape(x.shape)
    view[...] = x
    return view


# Keys behind the last visible one

@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("path", PATHS)
def test_appended_keys(isa, path, dtype, seed):
    random = np.random.default_rng(seed)
    (query, key, value), _ = problem(random, path, dtype, chance=0)
    kv_len = key.shape[-2]
    for cut in (1, 5, 64, 513, kv_len - 1):
        if cut >= kv_len:
            continue
        for more in ({}, {"softcap": 3.0, "sinks": np.ones(query.shape[1])}):
            options = {"causal": True, "q_offset": cut - query.shape[-2], **more}
            short = run([query, key[:, :, :cut], value[:, :, :cut]], options)
            long = run([query, key, value], options)
            hidden = run([query, key, value], options | {"kv_lengths": cut})
            for name in vars(short):
                a, b, c = (getattr(x, name) for x in (short, long, hidden))
                if name in ("weights", "scores"):
                    b, c = b[..., :cut], c[..., :cut]
                assert_same_bits(a, b, name)
                assert_same_bits(a, c, name)


@pytest.mark.parametrize("path", PATHS)
def test_output_memory_changes_no_bit(isa, path, seed):
    arrays, options = problem(np.random.default_rng(seed), path)
    wanted = attnc.attention(*arrays, **options)
    out = np.empty(wanted.shape[::-1], wanted.dtype).T
    assert attnc.attention(*arrays, out=out, **options) is out
    assert_same_bits(out, wanted)


@pytest.mark.parametrize("path", PATHS)
def test_layout(isa, path, seed):
    arrays, options = problem(np.random.default_rng(seed), path)
    plain, swapped = run(arrays, options), run([x.swapaxes(-2, -3) for x in arrays], options | {"layout": "bnhd"})
    assert_same_bits(swapped.output.swapaxes(-2, -3), plain.output)
    for name in WANT:
        assert_same_bits(getattr(swapped, name), getattr(plain, name), name)


@pytest.mark.parametrize("rows, keys, depth, behind", [
    (13, 513, 64, 600), (13, 511, 257, 600), (3, 1000, 300, 600), (1, 700, 64, 5000), (100, 700, 64, 30000)])
def test_weights_whether_kept_or_computed_again(isa, seed, rows, keys, depth, behind):
    """Keys behind the last visible one decide whether a task can keep its scores, and must not decide a bit."""
    random = np.random.default_rng(seed)
    lengths = rows, keys + behind, keys + behind
    query, key, value = (random.standard_normal((1, n, depth), np.float32) for n in lengths)
    alone = attnc.attention(query, key[:, :keys], value[:, :keys], want="weights")
    among = attnc.attention(query, key, value, kv_lengths=keys, want="weights")
    assert_same_bits(among.weights[..., :keys], alone.weights)
    assert_same_bits(among.output, alone.output)
    assert not among.weights[..., keys:].any()
    assert_same_bits(attnc.attention_weights(query, key, kv_lengths=keys)[..., :keys],
                     attnc.attention_weights(query, key[:, :keys]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows, keys, depth, value_dim", [
    (16, 16, 32, 32), (12, 20, 64, 32), (7, 64, 128, 64), (16, 1, 16, 128), (44, 47, 48, 16), (64, 65, 64, 64),
    (31, 500, 32, 32), (208, 208, 64, 64), (300, 77, 40, 24), (65, 440, 64, 64)])
def test_fused(isa, rows, keys, depth, value_dim, dtype, seed):
    """Small heads of which only the output is wanted are fused: the same operations in the same order."""
    random = np.random.default_rng([seed, rows, keys])
    query, key, value = inputs(random, (3,), 2, 2, rows, keys, depth, value_dim, dtype)
    large = np.inf if dtype == "float16" else 1e30
    value[1, 0, keys // 2, 0], value[1, 1, keys - 1, -1] = np.inf, large
    key[2, 0, keys - 1], query[2, 1, 0] = np.nan, np.inf
    for options in ({}, {"causal": True}, {"kv_lengths": [keys, keys // 2, 0]}, {"scale": -2.0},
                    {"q_offset": 3, "causal": True}):
        steps = attnc.attention(query, key, value, want="lse", **options).output
        with plans() as taken:
            assert_same_bits(attnc.attention(query, key, value, **options), steps, str(options))
        assert [plan.path == "fused" for plan in taken] == [fuses(isa, dtype, rows, keys, depth, value_dim)]
        assert_same_bits(attnc.attention(query, key, value, **options), steps, str(options))
        apart = [np.stack([x, x], axis=-1)[..., 1] for x in (query, key, value)]
        out = np.empty((3, 2, value_dim, rows), dtype=query.dtype).swapaxes(-1, -2)
        assert_same_bits(attnc.attention(*apart, out=out, **options), steps, str(options))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows, keys, depth, value_dim", [
    (16, 3, 32, 32), (12, 20, 64, 32), (49, 49, 32, 32), (64, 65, 64, 64), (31, 500, 32, 32), (208, 208, 64, 64)])
def test_fused_with_a_bias(isa, rows, keys, depth, value_dim, dtype, seed):
    """A bias is fused where vectors have 32 bytes; -inf in it excludes keys that are not finite too."""
    random = np.random.default_rng([seed, rows, keys])
    query, key, value = inputs(random, (3,), 2, 2, rows, keys, depth, value_dim, dtype)
    key[1, 0, keys - 1], value[2, 1, keys // 2] = np.nan, np.inf
    bias = random.standard_normal((2, rows, keys))
    bias[0, :, keys - 1] = bias[1, rows // 2] = bias[1, :, keys // 2] = -np.inf
    odd = np.where(random.random(bias.shape) < 0.01, np.nan, bias)
    relative = random.standard_normal((2, rows + keys - 1))
    columns = np.asfortranarray(bias.astype(dtype))
    for options in ({"bias": bias.astype(dtype)}, {"bias": bias[:, :1], "causal": True, "scale": -2.0},
                    {"bias": columns, "kv_lengths": [keys, keys // 2, 0]}, {"bias": odd.astype(np.float32)},
                    {"relative_bias": relative.astype(dtype), "q_offset": 3, "causal": True}):
        steps = attnc.attention(query, key, value, want="lse", **options).output
        with plans() as taken:
            assert_same_bits(attnc.attention(query, key, value, **options), steps, str(options))
        fused = isa == "avx2" and fuses(isa, dtype, rows, keys, depth, value_dim)
        assert [plan.path == "fused" for plan in taken] == [fused], str(options)


def fuses(isa, dtype, rows, keys, depth, value_dim):
    """Whether a head of `rows` rows is fused: its strips are filled, and not multiplied in pairs."""
    lanes = {"avx2": 32, "avx512": 64, "avx512bf16": 64}.get(isa, 16) // (8 if dtype == "float64" else 4)
    strip = max(8, lanes)
    if isa in ("base", "neon"):
        return False
    if isa == "avx512bf16" and dtype == "bfloat16" and (rows > 16 or (depth % 32 == 0 and value_dim % 64 == 0)):
        return False
    if rows > 64:
        return isa == "avx2" and keys * (depth + value_dim) * (8 if dtype == "float64" else 4) <= 224 * 1024
    return rows > 6 and 2 * rows > lanes if rows <= 16 else 5 * -(-rows // strip) * strip <= 6 * rows
