"""Memory: refused before any work, given back always, and not much of it."""

import gc
import resource
import sys

import numpy as np
import pytest
from checking import check_attention, inputs

import attnc


def test_no_memory(python):
    """Under a limit of address space a call raises MemoryError, leaves nothing behind, and the next one is right."""
    said = python("""
import resource, numpy as np, attnc
x = np.random.default_rng(0).standard_normal((1, 4, 200, 64)).astype(np.float32)
wide = np.ones((1, 2, 9000, 128), np.float32)
out = np.empty((1, 2, 9000, 128), np.float32)
wanted = attnc.attention(x, x, x)
attnc.attention(x, x, x, num_threads=2)
def size():
    return int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
limit = size() + 8 * 2**20
resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
count = 0
for _ in range(200):
    try:
        attnc.attention(wide, wide, wide, out=out)     # 9 MB of packed keys and values a head
    except MemoryError as error:
        count += "scratch" in str(error)
    try:
        attnc.attention_weights(wide, wide)
    except MemoryError:
        count += 1
assert size() < limit
assert (attnc.attention(x, x, x) == wanted).all()
print(count)
""")
    assert said == "400"


def test_impossible_sizes_are_a_memory_error(isa):
    """Broadcast views can ask for more than there is: it must not wrap around."""
    query = np.broadcast_to(np.float32(1), (2**20, 1, 2**20, 1))
    key = np.broadcast_to(np.float32(1), (1, 1, 2**20, 1))
    with pytest.raises((MemoryError, ValueError)):
        attnc.attention_scores(query, key)
    with pytest.raises((MemoryError, ValueError)):
        attnc.attention(query, key, np.broadcast_to(np.float32(1), (1, 1, 2**20, 2**40)))


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def wrong_calls(query, key, value):
    """Calls that raise, one for each place where they can."""
    return (lambda: attnc.attention(query, key[..., :3], value), lambda: attnc.attention(query, key, value[:, :, :2]),
            lambda: attnc.attention(query, key, value, mask=np.ones(3)),
            lambda: attnc.attention(query, key, value, out=query),
            lambda: attnc.attention(query, key, value.astype(complex)), lambda: attnc.softmax(query, 7),
            lambda: attnc.weighted_sum(query, key), lambda: attnc.attention(query, key, value, num_threads=0))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_many_small_calls_take_no_memory(isa):
    query, key, value = inputs(np.random.default_rng(0), (1,), 4, 2, 5, 20, 8)
    mask, out = np.ones((5, 20), bool), np.empty((1, 4, 5, 8), np.float32)
    odd = query[:, :, :1, ::2], key[..., ::2], value[:, :, :, None][:, :, :, 0]
    wrong = wrong_calls(query, key, value)

    def calls(n):
        for i in range(n):
            attnc.attention(query, key, value, mask=mask, want=("lse", "weights"), causal=True)
            attnc.attention(query, key, value, out=out)
            attnc.attention(*odd)
            attnc.softmax(query, (0, 1), where=np.bool_(True))
            attnc.weighted_sum(query[..., :1], value[:, :, :1])
            with pytest.raises((TypeError, ValueError)):
                wrong[i % len(wrong)]()

    calls(200)
    gc.collect()
    before = resident()
    calls(2000)
    gc.collect()
    assert resident() - before < 2**20


def test_reference_counts(isa):
    arrays = inputs(np.random.default_rng(0), (1,), 4, 2, 5, 20, 8)
    mask, bias, out = np.ones((5, 20), bool), np.zeros((5, 20)), np.empty((1, 4, 5, 8), np.float32)
    held = (*arrays, mask, bias, out, attnc.AttentionResult)
    wrong = wrong_calls(*arrays)
    gc.collect()
    before = [sys.getrefcount(x) for x in held]
    for _ in range(100):
        attnc.attention(*arrays, mask=mask, bias=bias, out=out)
        attnc.attention(*arrays, want=("lse", "weights", "scores"))
        attnc.attention_scores(*arrays[:2], bias=bias)
        attnc.softmax(bias, out=bias)
        for call in wrong:
            with pytest.raises((TypeError, ValueError)):
                call()
    gc.collect()
    assert [sys.getrefcount(x) for x in held] == before


@pytest.mark.parametrize("head_dim, value_dim", [(65536, 8), (300_000, 1), (8, 20_000), (1000, 1000)])
@pytest.mark.parametrize("q_len", [1, 70])
def test_great_depths(isa, head_dim, value_dim, q_len, seed):
    q_len, kv_len = (q_len, 70) if head_dim < 10_000 else (1, 5)
    query, key, value = inputs(
        np.random.default_rng(seed), (), 1, 1, q_len, kv_len, head_dim, value_dim, dtype="float64")
    got = attnc.attention(query, key, value, want="lse")
    scores = (query.astype(np.longdouble)[0] @ key.astype(np.longdouble)[0].T) / np.sqrt(np.longdouble(head_dim))
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    wanted = (weights / weights.sum(-1, keepdims=True)) @ value[0]
    bound = 4 * np.sqrt(head_dim) * np.finfo(float).eps * float(np.abs(scores).max() + 1) * float(np.abs(value).max())
    assert np.abs(got.output[0] - wanted).max() <= bound


def test_scratch_is_a_mebibyte_a_thread(python):
    """Long keys, many rows: beside inputs, output and a packed kv head only 1 MiB for each thread (depth <= 576)."""
    code = """
import resource, numpy as np, attnc
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
attnc.attention(*[np.ones((1, 4, 200, {dim}), np.float32)] * 3, num_threads=2)
query = np.ones((1, 2, {rows}, {dim}), np.float32)
key = np.ones((1, 1, {keys}, {dim}), np.float32)
out = np.ones((1, 2, {rows}, {dim}), np.float32)
before = peak()
attnc.attention(query, key, key, out=out, num_threads=2)
print(peak() - before)
"""
    for rows, keys, dim in ((1, 100_000, 64), (300, 20_000, 64), (3000, 3000, 128), (300, 2000, 576)):
        taken = int(python(code.format(rows=rows, keys=keys, dim=dim)))
        packed = 0 if rows * 2 <= 64 else (keys + 512) * dim * 4 * 2 * 1.05
        assert taken <= packed + 2 * 2**20 + 2**20, f"{rows} rows, {keys} keys: {taken / 2**20:.1f} MiB"


def test_long_keys(isa):
    """More keys than one round of states or packed heads holds."""
    query, key, value = inputs(np.random.default_rng(0), (), 1, 1, 2, 70_000, 4, 3)
    check_attention(query, key, value, want="lse")
