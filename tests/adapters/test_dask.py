"""dask arrays in any chunks: the result in one piece, to rounding; on one thread and on processes that may die."""

import time

import numpy as np
import pytest

import attnc
from attnc.testing import assert_within, exact_attention

pytest.importorskip("dask")
pytest.importorskip("distributed")

import dask
import dask.array as da
import distributed

from attnc.integrations.dask import AttentionWeights, attention

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]
CHUNKS = [((1, 1, 16, 8), (1, 1, 24, 8)), ((2, 4, 10, 8), (2, 2, 100, 8)), ((1, 2, 37, 3), (1, 2, 7, 8)), (-1, -1)]


@pytest.fixture(autouse=True)
def one_thread():
    with dask.config.set(scheduler="synchronous"):
        yield


def inputs(seed, q_len=37, kv_len=50, dtype="float32"):
    random = np.random.default_rng(seed)
    return [random.standard_normal(shape).astype(dtype) for shape in
            ((2, 4, q_len, 8), (2, 2, kv_len, 8), (2, 2, kv_len, 5))]


def chunked(arrays, chunks):
    query, keys = chunks
    last = [keys if keys == -1 else (*keys[:3], size) for size in (8, 5)]
    return [da.from_array(x, chunks=c) for x, c in zip(arrays, (query, *last), strict=True)]


def options(seed, q_len=37, kv_len=50):
    random = np.random.default_rng(seed + 1)
    yield {}
    yield {"causal": True}
    yield {"causal": True, "window": (9, 0), "q_offset": 5}
    yield {"window": (4, 6), "softcap": 2.0, "scale": 0.7}
    yield {"mask": random.random((4, q_len, kv_len)) < 0.6, "sinks": np.float32([0.1, -1, 2, 0])}
    yield {"relative_bias": random.standard_normal((2, 4, q_len + kv_len - 1)).astype(np.float32), "causal": True}
    yield {"relative_index": random.integers(0, 5, q_len + kv_len - 1),
           "relative_key": random.standard_normal((2, 4, 5, 8)).astype(np.float32),
           "relative_query": random.standard_normal((1, 5, 8)).astype(np.float32), "causal": True}
    yield {"bias": random.standard_normal((2, 1, 1, kv_len)).astype(np.float32),
           "key_mask": random.random((2, kv_len)) < 0.7}
    yield {"alibi_slopes": attnc.alibi_slopes(4), "causal": True}
    yield {"k_positions": random.permutation(2 * kv_len).reshape(2, kv_len), "window": (20, 3), "causal": True,
           "q_offset": 40, "alibi_slopes": attnc.alibi_slopes(4)}
    yield {"q_lengths": [30, 7], "kv_lengths": np.array([50, 13]), "causal": True}
    yield {"block_mask": (random.random((2, 4, -(-q_len // 5), -(-kv_len // 7))) < 0.4, 5, 7),
           "sinks": np.float32([0.1, -1, 2, 0])}
    yield {"block_mask": (random.random((1, 1, -(-q_len // 64), -(-kv_len // 3))) < 0.3, 64, 3), "causal": True,
           "q_lengths": [30, 37]}
    yield {"key_indices": random.integers(-1, kv_len, (2, 1, q_len, 12)), "causal": True}
    yield {"key_indices": random.integers(-1, kv_len, (1, 4, q_len, 5)).astype(np.int32)}
    yield {"q_segments": random.integers(-1, 3, (2, q_len)), "k_segments": random.integers(-1, 3, (2, kv_len))}


@pytest.mark.parametrize("chunks", CHUNKS, ids=str)
def test_every_option_in_any_chunks(chunks, seed):
    arrays = inputs(seed)
    for chosen in options(seed):
        got = attention(*chunked(arrays, chunks), want="lse", **chosen)
        exact, honest = exact_attention(*arrays, **chosen), attnc.attention(*arrays, want="lse", **chosen)
        assert got.output.shape == honest.output.shape and got.output.dtype == honest.output.dtype
        output, lse = dask.compute(got.output, got.lse)
        largest = np.abs(exact.scores[np.isfinite(exact.scores)]).max()
        assert_within(output, exact.output, honest.output, scale=np.abs(arrays[2]).max(), name=str(chosen))
        assert_within(lse, exact.lse, honest.lse, scale=max(1, largest))


@pytest.mark.parametrize("chunks", CHUNKS, ids=str)
def test_the_weights_and_their_statistics(chunks, seed):
    query, key, _ = inputs(seed)
    for chosen in list(options(seed))[2::2]:
        lazy = AttentionWeights(*chunked(inputs(seed), chunks)[:2], **chosen)
        whole = attnc.AttentionWeights(query, key, **chosen)
        assert lazy.shape == whole.shape and lazy.dtype == whole.dtype
        np.testing.assert_allclose(lazy.dense().compute(), whole.dense(), rtol=2e-5, atol=1e-7)
        np.testing.assert_allclose(lazy.key_mass().compute(), whole.key_mass(), rtol=2e-5, atol=1e-6)
        np.testing.assert_allclose(lazy.map((5, 7)).compute(), whole.map((5, 7)), rtol=2e-5, atol=1e-6)
        weights, indices = dask.compute(*lazy.topk(3))
        found = whole.topk(3)
        np.testing.assert_allclose(weights, found.weights, rtol=2e-5, atol=1e-7)
        np.testing.assert_array_equal(indices, found.indices)


def test_blocks_that_nobody_sees_are_not_computed(monkeypatch, seed):
    from attnc.integrations.dask import _attention

    calls, part = [], _attention._part
    monkeypatch.setattr(_attention, "_part", lambda *a: (calls.append(1), part(*a))[1])
    arrays = inputs(seed, 48, 48)
    attention(*chunked(arrays, ((2, 4, 8, 8), (2, 2, 8, 8))), causal=True).compute()
    assert len(calls) == 6 * 7 // 2
    calls.clear()
    attention(*chunked(arrays, ((2, 4, 8, 8), (2, 2, 8, 8))), causal=True, window=(8, 0)).compute()
    assert len(calls) == 6 + 5
    calls.clear()
    blocks = np.zeros((2, 4, 4, 4), bool)       # of 12: blocks 1 and 2 of 8 meet block 1
    blocks[1, 3, 1, 1] = True
    attention(*chunked(arrays, ((1, 2, 8, 8), (1, 1, 8, 8))), block_mask=(blocks, 12, 12)).compute()
    assert len(calls) == (2 * 2 * 6 - 2) + 2 * 2        # a block of rows without keys is one call


def test_two_axes_and_the_other_layout(seed):
    query, key, value = (x[0, 0] for x in inputs(seed))
    got = attention(*(da.from_array(x, chunks=(9, -1)) for x in (query, key, value)), want="lse")
    whole = attnc.attention(query, key, value, want="lse")
    np.testing.assert_allclose(got.output.compute(), whole.output, atol=1e-6)
    np.testing.assert_allclose(got.lse.compute(), whole.lse, atol=1e-6)
    arrays = [x.swapaxes(1, 2) for x in inputs(seed)]
    got = attention(*(da.from_array(x, chunks=(1, 11, 2, -1)) for x in arrays), layout="bnhd", causal=True)
    np.testing.assert_allclose(got.compute(), attnc.attention(*arrays, layout="bnhd", causal=True), atol=1e-6)


def test_the_weights_of_two_axes_and_their_dtype(seed):
    """Blocks that no row sees are of the dtype of the others; results of 2-D inputs have no axis of heads."""
    query, key = (x[0, 0] for x in inputs(seed)[:2])
    options = {"window": (3, 0), "q_offset": 4}
    lazy, whole = (kind(*arrays, **options) for kind, arrays in (
        (AttentionWeights, [da.from_array(x, chunks=(9, -1)) for x in (query, key)]),
        (attnc.AttentionWeights, (query, key))))
    assert lazy.shape == whole.shape == (37, 50)
    assert repr(lazy) == f"AttentionWeights(shape=(37, 50), dtype={whole.dtype}, chunksize=(9, 9))"
    four = AttentionWeights(*(da.from_array(x, chunks=(1, 2, 20, -1)) for x in inputs(seed)[:2]))
    assert repr(four).endswith(f"chunksize={four.dense().chunksize})")
    for say in (lambda W: W.dense(), lambda W: W.lse, lambda W: W.key_mass(), lambda W: W.map((5, 6)),
                lambda W: W.topk(3).weights, lambda W: W.topk(3).indices):
        got, wanted = np.asarray(say(lazy)), say(whole)
        assert got.dtype == wanted.dtype and got.shape == say(lazy).shape == wanted.shape
        np.testing.assert_allclose(got, wanted, atol=1e-5)
    assert AttentionWeights(*chunked(inputs(seed, kv_len=0), (-1, -1))[:2]).dense().compute().shape == (2, 4, 37, 0)


def test_half_precision_is_rounded_once(seed):
    arrays = inputs(seed, dtype="float16")
    got = attention(*chunked(arrays, CHUNKS[2]))
    exact, honest = exact_attention(*arrays), attnc.attention(*arrays)
    assert got.dtype == np.float16
    assert_within(got.compute(), exact.output, honest, scale=np.abs(arrays[2].astype(float)).max())


def test_options_may_be_lists(seed):
    arrays = inputs(seed)
    for chosen in ({"sinks": [0.1, -1, 2, 0]}, {"key_mask": [True, False] * 25}, {"alibi_slopes": (0.1, 0.2, 0, 1)},
                   {"q_segments": [0, 1, 1] * 12 + [1], "k_segments": [0, 1] * 25},
                   {"q_offset": [3, 5], "causal": True}):
        got = attention(*chunked(arrays, CHUNKS[0]), **chosen)
        np.testing.assert_allclose(got.compute(), attnc.attention(*arrays, **chosen), atol=1e-6)


def test_batches_broadcast(seed):
    query, key, value = inputs(seed)
    got = attention(*chunked((query, key[:1], value[:1]), CHUNKS[0]), causal=True)
    np.testing.assert_allclose(got.compute(), attnc.attention(query, key[:1], value[:1], causal=True), atol=1e-6)


def test_bad_input_is_named_before_anything_is_computed(seed):
    query, key, value = chunked(inputs(seed), CHUNKS[0])
    with pytest.raises(TypeError, match="key is ndarray; wanted a dask array"):
        attention(query, np.ones((2, 2, 50, 8), np.float32), value)
    with pytest.raises(ValueError, match="query has chunks of unknown size"):
        attention(query[query[:, 0, 0, 0] < 9], key, value)
    with pytest.raises(ValueError, match="value has length 49"):
        attention(query, key, value[:, :, :49])
    with pytest.raises(ValueError, match="window"):
        attention(query, key, value, window=3)
    with pytest.raises(TypeError, match="kv_lengths is a dask array"):
        attention(query, key, value, kv_lengths=da.ones(2, dtype=int))
    with pytest.raises(TypeError, match="the mask of block_mask is a dask array"):
        attention(query, key, value, block_mask=(da.ones((1, 1, 4, 4), dtype=bool), 10, 13))
    with pytest.raises(TypeError, match="key_indices is a dask array"):
        attention(query, key, value, key_indices=da.ones((1, 1, 4, 4), dtype=int))
    with pytest.raises(ValueError, match="mask of block_mask has shape"):
        attention(query, key, value, block_mask=(np.ones((1, 1, 5, 4), bool), 10, 13))
    with pytest.raises(TypeError, match="block_mask must be"):
        AttentionWeights(query, key, block_mask=np.ones((4, 4), bool))
    with pytest.raises(ValueError, match="AttentionWeights has the weights"):
        attention(query, key, value, want="weights")
    with pytest.raises(TypeError, match="dtype"):
        attention(query.astype(complex), key, value)
    with pytest.raises(ValueError, match="k_positions must be from 0"):
        attention(query, key, value, k_positions=np.arange(-1, 49))
    with pytest.raises(TypeError, match="bias must be"):
        attention(query, key, value, bias=[[1, 2]])
    with pytest.raises(ValueError, match="bins"):
        AttentionWeights(query, key).map((0, 3))


# Worker processes

@pytest.fixture(scope="module")
def cluster():
    with distributed.LocalCluster(n_workers=2, threads_per_worker=1, processes=True, memory_limit="400MiB",
                                  dashboard_address=None, host="127.0.0.1") as cluster, \
            distributed.Client(cluster) as client:
        yield client


def test_two_workers_give_the_result_in_one_piece(cluster, seed):
    arrays = inputs(seed)
    got = cluster.compute(attention(*chunked(arrays, CHUNKS[0]), causal=True)).result(timeout=60)
    np.testing.assert_allclose(got, attnc.attention(*arrays, causal=True), atol=1e-6)


def test_keys_and_values_larger_than_the_memory_of_a_worker(cluster, tmp_path):
    """Half a gigabyte of keys and values in files, read chunk by chunk by workers of 400 MiB."""
    length, depth = 1 << 20, 64
    files = []
    for n, name in enumerate(("key", "value")):
        memory = np.lib.format.open_memmap(tmp_path / f"{name}.npy", "w+", np.float32, (1, 1, length, depth))
        random = np.random.default_rng(n)
        for start in range(0, length, 1 << 16):
            memory[0, 0, start:start + (1 << 16)] = random.standard_normal((1 << 16, depth), np.float32)
        memory.flush()
        files.append(tmp_path / f"{name}.npy")
    query = np.random.default_rng(3).standard_normal((1, 1, 8, depth), np.float32)

    def lazy(path):
        def read(block_info=None):
            (_, _, (start, stop), _) = block_info[None]["array-location"]
            return np.array(np.load(path, mmap_mode="r")[:, :, start:stop])

        return da.map_blocks(read, chunks=((1,), (1,), (1 << 15,) * (length >> 15), (depth,)), dtype=np.float32,
                             meta=np.empty((0, 0, 0, 0), np.float32))

    got = cluster.compute(attention(da.from_array(query), *map(lazy, files))).result(timeout=120)
    key, value = (np.load(path, mmap_mode="r") for path in files)
    np.testing.assert_allclose(got, attnc.attention(query, key, value), atol=1e-6)


def test_a_worker_that_is_killed_half_way_costs_no_result(seed):
    arrays = inputs(seed, 96, 96)
    with distributed.LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None,
                                  host="127.0.0.1") as cluster, distributed.Client(cluster) as client:
        held = [x.map_blocks(_one_then_wait, dtype=x.dtype) for x in chunked(arrays, ((2, 4, 8, 8), (2, 2, 8, 8)))]
        future = client.compute(attention(*held, causal=True))
        victim = next(iter(cluster.workers.values()))
        address, deadline = victim.worker_address, time.monotonic() + 60
        while not client.run(lambda dask_worker: len(dask_worker.data), workers=[address])[address]:
            assert time.monotonic() < deadline, "the worker has computed nothing"
        victim.process.process.kill()
        distributed.Event("killed", client).set()
        got = future.result(timeout=90)
    np.testing.assert_allclose(got, attnc.attention(*arrays, causal=True), atol=1e-6)


def _one_then_wait(block):
    """The block; each worker gives its first at once, the others after one has been killed."""
    worker = distributed.get_worker()
    if getattr(worker, "has_one", False):
        distributed.Event("killed").wait(60)
    worker.has_one = True
    return block
