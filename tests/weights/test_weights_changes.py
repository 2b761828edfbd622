"""Arrays of AttentionWeights that change after the first answer: every method names them; and progress."""

import copy
import inspect
import pickle
import sys

import numpy as np
import pytest
from checking import DTYPES, assert_same_bits, dtype_of, inputs

import attnc
from attnc.weights import _operands

SIZES = dict(batch=(2,), q_heads=4, kv_heads=2, q_len=9, kv_len=12, head_dim=8)
METHODS = {
    "topk": lambda W, p: W.topk(2, progress=p), "entropy": lambda W, p: W.entropy(progress=p),
    "effective_keys": lambda W, p: W.effective_keys(progress=p), "max": lambda W, p: W.max(progress=p),
    "argmax": lambda W, p: W.argmax(progress=p), "mean_position": lambda W, p: W.mean_position(progress=p),
    "mean_distance": lambda W, p: W.mean_distance(progress=p),
    "row_mass": lambda W, p: W.row_mass(keys=[0], progress=p),
    "lost_mass": lambda W, p: W.lost_mass(np.ones(W.shape[-1], bool), progress=p),
    "key_mass": lambda W, p: W.key_mass(progress=p), "key_max": lambda W, p: W.key_max(progress=p),
    "key_hits": lambda W, p: W.key_hits(0.1, progress=p), "map": lambda W, p: W.map((2, 2), progress=p),
    "pool": lambda W, p: W.pool(np.zeros(W.shape[-2], int), np.zeros(W.shape[-1], int), progress=p),
    "dense": lambda W, p: W.dense(progress=p), "summary": lambda W, p: W.summary(topk=2, map=(2, 2), progress=p),
    "head_mean": lambda W, p: W.head_mean(progress=p), "sparse": lambda W, p: W.sparse(top_p=0.5, progress=p),
    "reduce": lambda W, p: W.reduce(lambda state, tile, _: max(state, float(tile.max())), 0.0, progress=p)}
OTHERS = {
    "lse": lambda W: W.lse, "array": np.asarray, "@": lambda W: W @ np.ones(W.shape[-1]),
    "T @": lambda W: W.T @ np.ones(W.shape[-2]), "index": lambda W: W[..., 0, 0], "row": lambda W: W[..., -1, :],
    "weighted": lambda W: W.weighted(heads=np.ones(W.shape[-3] if W.ndim > 2 else 1)).key_mass(),
    "blocks": lambda W: list(W.blocks(2)), "head": lambda W: W.head(*[0] * (W.ndim - 2)).max(),
    "operator": lambda W: W.head(*[0] * (W.ndim - 2)).linear_operator() @ np.ones(W.shape[-1]),
    "rollout": lambda W: attnc.rollout([W], 0) if W.shape[-2] == W.shape[-1] else W.T @ np.ones(W.shape[-2]),
    "pickle": pickle.dumps, "copy": copy.copy}
ANSWERS = {name: lambda W, method=method: method(W, None) for name, method in METHODS.items()} | OTHERS


def made(**options):
    query, key, _ = inputs(np.random.default_rng(0), **SIZES)
    return query, key, attnc.AttentionWeights(query, key, **options)


def test_every_method_with_progress_is_here():
    taking = {name for name, method in inspect.getmembers(attnc.AttentionWeights, callable)
              if not name.startswith("_") and "progress" in inspect.signature(method).parameters}
    assert taking == set(METHODS)


def needs(name):
    if name == "operator":
        pytest.importorskip("scipy")


@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize("first", ["max", "index"])
def test_every_method_names_what_changed(isa, name, first):
    needs(name)
    query, _, W = made()
    ANSWERS[first](W)
    before = ANSWERS[name](W)
    query *= 2
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"^query changed since the first answer was computed; wanted the same"):
            ANSWERS[name](W)
    query /= 2                      # exactly what it was: all is well
    after = ANSWERS[name](W)
    if isinstance(before, np.ndarray):
        assert_same_bits(after, before)


@pytest.mark.parametrize("name", ANSWERS)
def test_before_the_first_answer_arrays_may_change(isa, name):
    needs(name)
    query, key, W = made()
    query *= 2
    got, wanted = (ANSWERS[name](one) for one in (W, attnc.AttentionWeights(query, key)))
    if isinstance(wanted, np.ndarray):
        assert_same_bits(got, wanted)


OPERANDS = {
    "block_mask": (np.ones((3, 3), bool), False), "key_indices": (np.tile(np.arange(12), (4, 9, 1)), -1),
    "query": (None, 0.5), "key": (None, 0.5), "mask": (np.ones((9, 12), bool), False),
    "key_mask": (np.ones((2, 12), bool), False), "bias": (np.zeros((4, 9, 12), np.float32), np.nan),
    "relative_bias": (np.zeros((4, 20), np.float32), 0.5),
    "relative_key": (np.ones((4, 2, 8), np.float32), 0.5), "relative_query": (np.ones((4, 2, 8), np.float32), 0.5),
    "q_offset": (np.array([3, 4]), 2), "alibi_slopes": (np.ones(4, np.float32), 0.5),
    "sinks": (np.ones(4, np.float32), 0.5), "q_segments": (np.zeros((2, 9), np.int64), 1),
    "k_segments": (np.zeros((2, 12), np.int64), 1), "q_lengths": (np.array([9, 9]), 8),
    "kv_lengths": (np.array([12, 12]), 11), "lse": (np.ones((2, 4, 9), np.float32), 2.0)}


@pytest.mark.parametrize("name", OPERANDS)
def test_every_operand_is_watched(isa, name):
    arrays = {"q_segments": np.zeros((2, 9), np.int64), "k_segments": np.zeros((2, 12), np.int64),
              "relative_index": np.zeros(20, int), "relative_key": np.ones((1, 2, SIZES["head_dim"]))}
    query, key, _ = inputs(np.random.default_rng(0), **SIZES)
    arrays |= {"query": query, "key": key}
    array, other = OPERANDS[name]
    if array is not None:
        arrays[name] = array.copy()
    sized = {"block_mask": (arrays[name], 4, 4)} if name == "block_mask" else {}
    W = attnc.AttentionWeights(**arrays | sized)
    if name != "lse":
        W.max()
    head = W.head(1, 3)
    arrays[name][(0,) * arrays[name].ndim] = other          # a single element, of the first head of the first example
    changed = f"^{name} changed since {'the lse was given' if name == 'lse' else 'the first answer'}"
    for ask in (lambda: W.key_mass(), lambda: W.head(1, 3)):
        with pytest.raises(RuntimeError, match=changed):
            ask()
    if name in ("mask", "block_mask"):                      # of all heads
        with pytest.raises(RuntimeError, match=changed):
            head.max()
    else:
        head.max()


@pytest.mark.parametrize("name, first, other", [
    ("q_lengths", 9, 8), ("kv_lengths", 12, 11), ("mask", True, False), ("bias", np.float32(0), np.nan),
    ("sinks", np.float32(1), 0.5), ("alibi_slopes", np.float32(1), 0.5)])
def test_an_array_without_axes_is_watched(isa, name, first, other):
    query, key, _ = inputs(np.random.default_rng(0), **SIZES)
    array = np.array(first)
    W = attnc.AttentionWeights(query[0, 0], key[0, 0], **{name: array})
    W.max()
    array[...] = other
    with pytest.raises(RuntimeError, match=f"^{name} changed since the first answer"):
        W.dense()


def test_all_that_changed_is_named(isa):
    query, key, W = made()
    W.max()
    query += 1
    key += 1
    with pytest.raises(RuntimeError, match=r"^query and key changed"):
        W.max()


LAYOUTS = {
    "contiguous": lambda x: x, "transposed": lambda x: np.asfortranarray(x), "backwards": lambda x: x[..., ::-1, ::-1],
    "every other": lambda x: np.repeat(x, 2, -1)[..., ::2], "broadcast": lambda x: np.broadcast_to(x[:1], x.shape),
    "a field": lambda x: np.rec.fromarrays([x, np.zeros(x.shape, np.int8)], names="a,b").a,
    "read-only": lambda x: np.lib.stride_tricks.as_strided(x, x.shape, x.strides, writeable=False)}


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_memory(layout, dtype, large):
    sizes = dict(SIZES, q_len=40, kv_len=70, head_dim=24) if large else SIZES
    query, key, _ = inputs(np.random.default_rng(0), **sizes, dtype=dtype)
    query[0, 0, 0, 0] = np.nan                            # which is not equal to itself, but the same
    given = LAYOUTS[layout](query)
    memory = given.base if layout in ("broadcast", "read-only", "a field") and given.base is not None else given
    memory = query if layout in ("broadcast", "read-only") else memory
    W = attnc.AttentionWeights(given, key)
    first = W.max()
    assert_same_bits(W.max(), first)
    memory = given if memory.dtype.names else memory
    memory[..., 1, :] += dtype_of(dtype).type(1)          # a row of each head
    with pytest.raises(RuntimeError, match=r"^query changed"):
        W.max()


def test_memory_map(tmp_path):
    written = np.memmap(tmp_path / "keys", np.float32, "w+", shape=(2, 300, 16))
    written[...] = np.random.default_rng(0).standard_normal(written.shape)
    mapped = np.memmap(tmp_path / "keys", np.float32, "r", shape=written.shape)
    W = attnc.AttentionWeights(np.ones((2, 3, 16), np.float32), mapped)
    W.max()
    written[:, 150] = 0
    with pytest.raises(RuntimeError, match=r"^key changed"):
        W.max()


@pytest.mark.parametrize("shape", [(1, 2, 3000, 64), (2, 40, 33, 5), (4096, 2, 1), (3, 1, 4097), (70, 70, 70)])
def test_each_index_of_each_axis_of_a_large_array_is_watched(shape):
    x = np.zeros(shape, np.float32)
    watched = _operands.Operands({"key": x}, "now")
    assert sum(map(len, watched._first)) <= _operands.SAMPLES * 4 < x.nbytes
    for axis, length in enumerate(shape):
        for place in range(min(length, _operands.SAMPLES)):
            some = (*[slice(None)] * axis, place)
            if length > _operands.SAMPLES:      # then a stretch
                some = (*[slice(None)] * axis, slice(place, place + 2 + length // _operands.SAMPLES))
            x[some] = 1
            with pytest.raises(RuntimeError, match=r"^key changed since now"):
                watched.check()
            x[some] = 0
    watched.check()


def test_a_change_during_the_work_is_an_error_and_leaves_nothing_behind(isa):
    query, _, W = made()
    wanted = W.head(0, 0).key_mass()

    def change(done, total):
        query[...] = 7

    before = query.copy()
    for name in ("head_mean", "sparse", "reduce"):      # which report between their parts
        W = attnc.AttentionWeights(query, made()[1])
        with pytest.raises(RuntimeError, match="query changed"):
            METHODS[name](W, change)
        query[...] = before
        assert_same_bits(W.head(0, 0).key_mass(), wanted)
    W = attnc.AttentionWeights(query, made()[1])
    with pytest.raises(RuntimeError, match="query changed"):
        W.reduce(lambda *_: change(0, 0), rows=3)
    query[...] = before
    assert_same_bits(W.head(0, 0).key_mass(), wanted)
    blocks = W.blocks(3)
    next(blocks)
    change(0, 0)
    with pytest.raises(RuntimeError, match="query changed"):
        next(blocks)


def test_an_lse_of_mixed_states_is_dropped(isa):
    """The norm that a failed answer computed from changed arrays must not serve when they are back."""
    query, key, W = made()
    wanted, before = attnc.AttentionWeights(query, key).dense(), query.copy()
    W[0, 0, 0, 0]                                # a small part: no lse of the whole is kept
    assert W._known is None

    check, calls = W._check_operands, []

    def late():
        calls.append(0)
        if len(calls) == 1:
            check()
            query[...] *= 3                      # between the first look and the sweep, as another thread would
        else:
            check()

    W._check_operands = late
    with pytest.raises(RuntimeError, match="query changed"):
        W.entropy()
    del W._check_operands
    query[...] = before
    assert_same_bits(W.dense(), wanted)


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda W: pickle.loads(pickle.dumps(W))])
@pytest.mark.parametrize("given", [False, True])
def test_copies_have_arrays_of_their_own(isa, clone, given):
    query, _, W = made(lse=made()[2].lse.copy() if given else None)
    wanted = W.key_mass()
    other = clone(W)
    query *= 2
    assert_same_bits(other.key_mass(), wanted)
    other._a.query[...] = 0
    with pytest.raises(RuntimeError, match=r"^query changed"):
        other.key_mass()


def test_what_is_held_can_not_be_reshaped_or_written(isa):
    query, _, W = made()
    wanted = W.dense()
    lse = W.lse
    for array in (lse, W.head(0, 0).lse, made(lse=lse.copy())[2].lse):
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 0
    assert W.summary(lse=True).lse.flags.writeable
    query.dtype = np.int32
    assert_same_bits(W.dense(), wanted)


def test_views_of_changed_weights(isa):
    query, _, W = made()
    W.max()
    assert "<img" in W._repr_html_() and W._repr_png_()
    query *= 2
    assert "Not drawn: query changed" in W._repr_html_() and "<img" not in W._repr_html_()
    assert W._repr_png_() is None and repr(W) == "AttentionWeights(shape=(2, 4, 9, 12), dtype=float32)"
    with pytest.raises(RuntimeError, match=r"^query changed"):
        attnc.explorer(W)


# Progress

@pytest.mark.parametrize("progress", [False, None, np.False_])
@pytest.mark.parametrize("name", METHODS)
def test_no_progress(name, progress, capsys):
    METHODS[name](made()[2], progress)
    W = attnc.AttentionWeights(np.ones((3, 4)), np.ones((3, 4)))
    attnc.rollout([W], 0, progress=progress)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("tqdm", [True, False])
@pytest.mark.parametrize("name", [*METHODS, "rollout"])
def test_a_bar_with_tqdm_and_without(name, tqdm, capsys, monkeypatch):
    if tqdm:
        pytest.importorskip("tqdm")
    else:
        monkeypatch.setitem(sys.modules, "tqdm", None)
        monkeypatch.delitem(sys.modules, "tqdm.auto", raising=False)
    if name == "rollout":
        attnc.rollout([attnc.AttentionWeights(np.ones((3, 4)), np.ones((3, 4)))], 0, progress=True)
    else:
        METHODS[name](made()[2], True)
    out, told = capsys.readouterr()
    assert out == "" and "100" in told and told.endswith("\n")
    assert tqdm or set(told) <= set("\r\n %0123456789")


@pytest.mark.parametrize("name", METHODS)
def test_a_wrong_progress_is_refused_before_any_work(name):
    _, _, W = made()
    for wrong in (3, 1.0, "yes", np.ones(2)):
        with pytest.raises(TypeError, match="progress must be True, False or a function"):
            METHODS[name](W, wrong)
    out = np.full((2, 9, 12), 7, np.float32)
    with pytest.raises(TypeError, match="progress must be"):
        W.head_mean(out=out, progress=0)
    assert (out == 7).all() and W._known is None and not hasattr(W, "_operands")
    square = attnc.AttentionWeights(np.ones((3, 4)), np.ones((3, 4)))
    with pytest.raises(TypeError, match="progress must be"):
        attnc.rollout([square], 0, progress="yes")


def test_a_cache_that_goes_on(isa):
    """Views of its rows and lengths are arrays like any other."""
    random = np.random.default_rng(0)
    cache = attnc.KVCache(2, 2, 8, capacity=40, dtype=np.float32)
    cache.append(*random.standard_normal((2, 2, 2, 30, 8), np.float32))
    query = random.standard_normal((2, 4, 1, 8), np.float32)

    def new():
        W = attnc.AttentionWeights(query, cache.keys, kv_lengths=cache.lengths)
        W.key_mass()
        return W

    token = random.standard_normal((2, 2, 2, 1, 8), np.float32)
    for change, names in ((lambda: cache.append(*token), "key and kv_lengths"),
                          (lambda: cache.truncate(20), "kv_lengths"), (lambda: cache.reorder([1, 0]), "key")):
        W = new()
        change()
        with pytest.raises(RuntimeError, match=rf"^{names} changed since"):
            W.key_mass()
        np.testing.assert_allclose(new().key_mass().sum(-1), 1, rtol=1e-6)
