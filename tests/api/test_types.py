"""What the annotations say of results and arguments, against what runs."""

import collections.abc
import inspect
import operator
import re
import sys
import types
import typing

import numpy as np
import pytest

import attnc
from attnc import _types, masks

X = np.ones((1, 2, 3, 4), np.float32)
ROWS, TOKENS = np.ones((1, 2, 3), np.float32), np.ones((3, 2, 4), np.float32)
OPTIONS = dict(
    mask=np.ones((3, 3), bool), block_mask=(np.ones((2, 1), bool), 2, 4), key_indices=np.zeros((1, 3, 2), int),
    key_mask=np.ones((1, 3), bool), bias=np.zeros((3, 3)),
    relative_bias=np.zeros(5), relative_index=np.zeros(5, int), relative_key=np.zeros((2, 1, 4)),
    relative_query=np.zeros((1, 1, 4)), causal=True, window=(1, None), q_offset=np.array([0]), k_positions=np.arange(3),
    scale=0.5, softcap=2.0, alibi_slopes=np.zeros(2), sinks=np.zeros(2),
    q_segments=np.zeros((1, 3), int), k_segments=np.zeros((1, 3), int), q_lengths=np.array([3]),
    kv_lengths=np.array([3]), layout="bhnd", num_threads=1)
BOUNDS = np.array([0, 3])
QKV, QK = dict(query=X, key=X, value=X), dict(query=X, key=X)
STATE = dict(scale=0.5, softcap=2.0, alibi_slopes=np.zeros(2), sinks=np.zeros(2), q_offset=np.array([0]), causal=True,
             window=(1, None), layout="bhnd", num_threads=1)


def but(*names):
    return {name: option for name, option in OPTIONS.items() if name not in names}


def cache(dtype=np.float32, **options):
    made = attnc.KVCache(1, 2, 4, capacity=5, dtype=dtype, **options)
    made.append(X, X)
    return made


def pages():
    made = attnc.PagedKVCache(5, 2, 2, 4, dtype=np.float32)
    made.append(made.add(), TOKENS, TOKENS)
    return made


def state():
    made = attnc.AttentionState(X)
    made.update(X, X)
    return made


def lazy():
    return attnc.AttentionWeights(X, X)


CALLS = {      # what makes the object of a method, and what to call it with
    "attention": (None, QKV | OPTIONS),
    "attention_scores": (None, QK | OPTIONS),
    "attention_weights": (None, QK | but("sinks") | {"lse": ROWS}),
    "weighted_sum": (None, dict(weights=X[..., :3], value=X, num_threads=1)),
    "attention_varlen": (None, dict(query=TOKENS, key=TOKENS, value=TOKENS, cu_seqlens_q=np.array([0, 3]),
                                              cu_seqlens_k=np.array([0, 3]), causal=True, window=(1, 0),
                                              alibi_slopes=np.zeros(2), sinks=np.zeros(2), bias=[np.zeros((3, 3))],
                                              key_mask=np.ones(3, bool), q_segments=np.zeros(3, int),
                                              k_segments=np.zeros(3, int), q_offset=np.array([0]))),
    "attention_weights_varlen": (None, dict(query=TOKENS, key=TOKENS, cu_seqlens_q=BOUNDS, cu_seqlens_k=BOUNDS)),
    "attention_varlen_backward": (None, dict(grad_output=TOKENS, query=TOKENS, key=TOKENS, value=TOKENS, output=TOKENS,
                                             lse=ROWS[0], grad_lse=ROWS[0], cu_seqlens_q=BOUNDS, cu_seqlens_k=BOUNDS)),
    "attention_backward": (None, QKV | OPTIONS | dict(grad_output=X, output=X, lse=ROWS, grad_lse=ROWS)),
    "softmax_backward": (None, dict(grad_output=X, output=X, axis=(0, 1))),
    "log_softmax_backward": (None, dict(grad_output=X, output=X, axis=None)),
    "softmax": (None, dict(x=X, axis=(0, 1), where=X == 1)),
    "log_softmax": (None, dict(x=X, axis=None, where=X == 1)),
    "merge_states": (None, dict(states=[(X, ROWS), [X, ROWS]])),
    "AttentionState": (None, dict(query=X) | STATE),
    "AttentionState.kv_len": (state, None),
    "AttentionState.update": (state, dict(key_chunk=X, value_chunk=X, mask=np.ones((3, 3), bool),
                                                    key_mask=np.ones((1, 3), bool), bias=np.zeros((3, 3)))),
    "AttentionState.result": (state, {}),
    "KVCache": (None, dict(batch=1, kv_heads=2, head_dim=4, value_dim=3, capacity=5, dtype="float16",
                                    window=(2, 0), shared=True)),
    **{f"KVCache.{name}": (cache, None) for name in ("keys", "values", "key_scales", "value_scales", "lengths",
                                                             "positions", "nbytes")},
    "KVCache.append": (cache, dict(key=X[..., :2, :], value=X[..., :2, :], lengths=np.array([1]))),
    "KVCache.attend": (cache, dict(query=X, causal=True, window=(1, 0), sinks=np.zeros(2),
                                            q_offset=np.array([2]), mask=np.ones((3, 5), bool),
                                            bias=np.zeros((3, 5)), relative_bias=np.zeros(7))),
    "KVCache.weights": (cache, dict(query=X, causal=True, window=(1, 0), sinks=np.zeros(2), q_offset=np.array([2]),
                                     mask=np.ones((3, 3), bool), bias=np.zeros((3, 3)))),
    "KVCache.keep": (cache, dict(indices=np.array([[[0, 2], [1, -1]]])[..., :1])),
    "KVCache.truncate": (cache, dict(lengths=np.array([1]))),
    "KVCache.reorder": (cache, dict(indices=np.array([0]))),
    "PagedKVCache": (None, dict(n_pages=5, page=2, kv_heads=2, head_dim=4, value_dim=3, dtype="float16", shared=True)),
    **{f"PagedKVCache.{name}": (pages, None) for name in ("keys", "values", "lengths", "free_pages", "nbytes")},
    "PagedKVCache.add": (pages, {}),
    "PagedKVCache.fork": (pages, dict(sequence=0)),
    "PagedKVCache.free": (pages, dict(ids=[0])),
    "PagedKVCache.truncate": (pages, dict(ids=[0], lengths=[0])),
    "PagedKVCache.append": (pages, dict(ids=np.array([0]), key=TOKENS, value=TOKENS, lengths=np.array([3]))),
    "PagedKVCache.attend": (pages, dict(ids=[0], query=TOKENS, q_lengths=np.array([3]), causal=True, window=(1, 0),
                                        sinks=np.zeros(2), bias=[np.zeros((3, 3))])),
    "PagedKVCache.weights": (pages, dict(ids=0, query=TOKENS, q_lengths=[3], causal=True)),
    "PagedKVCache.block_table": (pages, dict(ids=[0])),
    "causal_mask": (None, dict(q_len=2, kv_len=3, q_offset=np.array([1]))),
    "window_mask": (None, dict(q_len=2, kv_len=3, window=(1, None), q_offset=np.array([1]))),
    "length_mask": (None, dict(lengths=np.array([1, 2]), length=3)),
    "segment_mask": (None, dict(q_segments=np.array([0, 1]), k_segments=np.array([0]))),
    "alibi_slopes": (None, dict(heads=4)),
    "deberta_relative_index": (None, dict(q_len=2, kv_len=3, buckets=4, max_position=9, q_offset=1)),
    "t5_relative_bias": (None, dict(table=np.zeros((8, 2)), q_len=2, kv_len=3, q_offset=1, max_distance=9,
                                    bidirectional=False)),
    "t5_relative_bias_backward": (None, dict(grad_output=np.zeros((2, 4)), buckets=8, q_len=2, kv_len=3)),
    "align": (None, dict(matrix=np.eye(3), medfilt=3)),
    "AttentionWeights": (None, QK | but("sinks") | {"lse": ROWS}),
    **{f"AttentionWeights.{name}": (lazy, None) for name in ("shape", "ndim", "dtype", "lse", "T")},
    **{f"AttentionWeights.{name}": (lazy, {}) for name in (
        "dense", "entropy", "effective_keys", "max", "argmax", "mean_position", "mean_distance", "head_mean")},
    "AttentionWeights.summary": (lazy, dict(topk=2, entropy=True, map=(1, 2))),
    "AttentionWeights.topk": (lazy, dict(k=2)),
    "AttentionWeights.row_mass": (lazy, dict(keys=np.array([0, 2]))),
    "AttentionWeights.relevance": (lazy, dict(value=X, grad_output=X, sign="both")),
    "AttentionWeights.weighted": (lazy, dict(heads=np.ones(2))),
    "AttentionWeights.lost_mass": (lazy, dict(keep=np.array([True, False, True]))),
    "AttentionWeights.key_mass": (lazy, dict(rows=np.array([0, 2]), row_weights=ROWS)),
    "AttentionWeights.key_max": (lazy, dict(rows=np.array([0, 2]))),
    "AttentionWeights.key_hits": (lazy, dict(threshold=0.1, rows=np.array([0, 2]))),
    "AttentionWeights.map": (lazy, dict(bins=(1, 2))),
    "AttentionWeights.pool": (lazy, dict(query_labels=np.array([0, 1, -1]),
                                                             key_labels=np.array([0, 1, -1]))),
    "AttentionWeights.sparse": (lazy, dict(top_p=0.5)),
    "AttentionWeights.__matmul__": (lazy, dict(x=np.ones(3))),
    "rollout": (None, dict(layers=[lazy(), lazy()], start=np.ones((1, 3)))),
}


def hints(function):
    """Its annotations, which are strings, with names that only type checkers import; each option of an Unpack apart."""
    names = vars(attnc) | vars(_types) | vars(collections.abc) | {"NDArray": np.typing.NDArray}
    found = typing.get_type_hints(function, vars(sys.modules[function.__module__]), names)
    unpacked = [name for name, hint in found.items() if typing.get_origin(hint) is typing.Unpack]
    for name in unpacked:
        found |= typing.get_type_hints(typing.get_args(found.pop(name))[0])
    return found


def object_of(name):
    """The object of this name."""
    said = masks if hasattr(masks, name) else attnc
    for part in name.split("."):
        said = getattr(said, part)
    return said


def described(name):
    """The overloads, or the one function, by which a callable is described; the getter of a property."""
    said = object_of(name)
    said = said.__init__ if isinstance(said, type) else said.fget if isinstance(said, property) else said
    return typing.get_overloads(said) or [said]


def call(name, **more):
    make, arguments = CALLS[name]
    *of, last = name.split(".")
    source = make() if of else masks if hasattr(masks, last) else attnc
    return getattr(source, last) if arguments is None else getattr(source, last)(**arguments | more)


def conforms(value, hint):
    origin, inside = typing.get_origin(hint), typing.get_args(hint)
    if hint is typing.Any:
        return True
    if origin in (typing.Union, types.UnionType):
        return any(conforms(value, one) for one in inside)
    if origin is np.ndarray:
        scalar, = typing.get_args(inside[1])
        return isinstance(value, np.ndarray) and (scalar is typing.Any or issubclass(value.dtype.type, scalar))
    if origin is tuple:
        each = [inside[0]] * len(value) if inside[1:] == (...,) else inside
        return isinstance(value, tuple) and all(map(conforms, value, each)) and len(value) == len(each)
    return value is None if hint in (None, type(None)) else isinstance(value, origin or hint)


@pytest.mark.parametrize("name", CALLS)
def test_results(name):
    """Without `want` the first overload's, with each name the second's."""
    said = described(name)
    returned = [hints(one)["return"] for one in said]
    result = call(name)
    if CALLS[name][0] is None and isinstance(getattr(attnc, name, None), type):
        assert isinstance(result, getattr(attnc, name)) and returned == [type(None)]
        return
    assert conforms(result, returned[0]), (result, returned[0])
    for want in literals(said[-1]).get("want", ()) if len(said) > 1 else ():
        assert conforms(call(name, want=want), returned[1]) and not conforms(call(name, want=want), returned[0])


@pytest.mark.parametrize("function", [
    operator.attrgetter(name)(module) for module in (attnc, attnc.reference)
    for name in ("attention", "attention_varlen", "KVCache.attend", "PagedKVCache.attend")],
    ids=lambda function: f"{function.__module__}.{function.__qualname__}")
def test_overloads_take_the_options_of_the_function(function):
    own = {name: hint for name, hint in hints(function).items() if name != "unknown"}
    assert len(typing.get_overloads(function)) == 2
    for one in typing.get_overloads(function):
        assert hints(one).keys() == own.keys()
        assert {name: hint for name, hint in hints(one).items() if hint != own[name]}.keys() <= {"want", "return"}


ARRAYS_ALONE = [name for name in attnc.reference.__all__
                if inspect.isfunction(getattr(attnc, name)) and name != "rollout"]      # which takes AttentionWeights


@pytest.mark.parametrize("module", [attnc, attnc.reference])
@pytest.mark.parametrize("name", ARRAYS_ALONE)
def test_hints_of_functions_of_arrays_are_there_at_run_time(module, name):
    assert typing.get_type_hints(getattr(module, name))["return"]


def literals(function):
    """The names that annotations list for each argument."""
    def names(hint):
        inside = typing.get_args(hint)
        if typing.get_origin(hint) is typing.Literal:
            return set(inside)
        return set().union(*map(names, inside)) if inside else set()

    found = {name: names(hint) for name, hint in hints(function).items() if name != "return"}
    return {name: some for name, some in found.items() if some}


@pytest.mark.parametrize("name", [name for name in CALLS if any(map(literals, described(name)))])
def test_names(name):
    """The names in annotations are those that the call takes; what else it offers in an error it refuses."""
    for argument, listed in literals(described(name)[-1]).items():
        for one in listed:
            if one in ("bnhd", "sinks") or (argument == "want" and name.endswith("_backward")):
                continue                                    # other shapes; what was not given
            call(name, **{argument: one})
        with pytest.raises((ValueError, TypeError)) as error:
            call(name, **{argument: "nothing of the kind"})
        offered = set(re.findall(r"'(\w+)'", str(error.value)))
        assert listed <= offered, (argument, str(error.value))
        for other in offered - listed:                      # of other functions
            with pytest.raises(ValueError, match=other):
                call(name, **{argument: other})


def arrays():
    for name, (_, arguments) in CALLS.items():
        for argument, value in (arguments or {}).items():
            if isinstance(value, np.ndarray):
                yield name, argument


@pytest.mark.parametrize("name, argument", list(arrays()))
def test_lists_are_taken_where_annotations_say_like_an_array(name, argument):
    hint = hints(described(name)[-1])[argument]
    like = typing.get_args(np.typing.ArrayLike)
    assert set(like) <= set(typing.get_args(hint)), hint
    call(name, **{argument: CALLS[name][1][argument].tolist()})


def test_states_are_a_list_or_tuple():
    pairs = [(X, ROWS), (X, ROWS)]
    hint = hints(described("merge_states")[0])["states"]
    assert {typing.get_origin(one) for one in typing.get_args(hint)} == {list, tuple}
    for wrong in (iter(pairs), dict(enumerate(pairs)), {1}):
        with pytest.raises(TypeError, match="states must be a list or tuple"):
            attnc.merge_states(wrong)
    for right in (pairs, tuple(pairs)):
        attnc.merge_states(right)


def test_scales_of_a_cache():
    made = cache(np.int8)
    for name in ("key_scales", "value_scales"):
        hint = hints(described(f"KVCache.{name}")[0])["return"]
        assert conforms(getattr(made, name), hint) and getattr(made, name) is not None


def test_every_public_callable_is_called():
    public = set()
    for name in {*attnc.__all__, *masks.__all__} - NOT_HERE:
        public.add(name)
        if isinstance(object_of(name), type):
            public |= {f"{name}.{method}" for method in dir(object_of(name)) if not method.startswith("_")}
    assert public - set(CALLS) == UNCALLED


# Results, and functions of the process.
NOT_HERE = {"AttentionGradients", "AttentionResult", "explorer", "isa", "show_config", "get_num_threads",
            "set_num_threads", "threads"}
UNCALLED = {f"AttentionWeights.{name}" for name in ("head", "linear_operator", "blocks", "reduce")}
