"""What the stubs say of results and arguments, against what runs: stubtest compares signatures alone."""

import re
import types
import typing
from pathlib import Path

import numpy as np
import pytest

import attnc
from attnc import masks

ROOT = Path(attnc.__file__).parent
X = np.ones((1, 2, 3, 4), np.float32)
ROWS, TOKENS = np.ones((1, 2, 3), np.float32), np.ones((3, 2, 4), np.float32)
OPTIONS = dict(
    mask=np.ones((3, 3), bool), key_mask=np.ones((1, 3), bool), bias=np.zeros((3, 3)), causal=True, window=(1, None),
    q_offset=np.array([0]), scale=0.5, softcap=2.0, alibi_slopes=np.zeros(2), sinks=np.zeros(2),
    q_segments=np.zeros((1, 3), int), k_segments=np.zeros((1, 3), int), q_lengths=np.array([3]),
    kv_lengths=np.array([3]), layout="bhnd", num_threads=1)
QKV, QK = dict(query=X, key=X, value=X), dict(query=X, key=X)
STATE = dict(scale=0.5, softcap=2.0, alibi_slopes=np.zeros(2), sinks=np.zeros(2), q_offset=np.array([0]), causal=True,
             window=(1, None), layout="bhnd", num_threads=1)


def but(*names):
    return {name: option for name, option in OPTIONS.items() if name not in names}


def cache(dtype=np.float32, **options):
    made = attnc.KVCache(1, 2, 4, capacity=5, dtype=dtype, **options)
    made.append(X, X)
    return made


def state():
    made = attnc.AttentionState(X)
    made.update(X, X)
    return made


def lazy():
    return attnc.AttentionWeights(X, X)


CALLS = {      # stub, name and what to call it with; of a method what makes the object
    "attention": ("attention", None, QKV | OPTIONS),
    "attention_scores": ("attention", None, QK | OPTIONS),
    "attention_weights": ("attention", None, QK | but("sinks") | {"lse": ROWS}),
    "weighted_sum": ("attention", None, dict(weights=X[..., :3], value=X, num_threads=1)),
    "attention_varlen": ("varlen", None, dict(query=TOKENS, key=TOKENS, value=TOKENS, cu_seqlens_q=np.array([0, 3]),
                                              cu_seqlens_k=np.array([0, 3]), causal=True, window=(1, 0),
                                              alibi_slopes=np.zeros(2), sinks=np.zeros(2))),
    "attention_backward": ("backward", None, QKV | OPTIONS | dict(grad_output=X, output=X, lse=ROWS, grad_lse=ROWS)),
    "softmax_backward": ("backward", None, dict(grad_output=X, output=X, axis=(0, 1))),
    "log_softmax_backward": ("backward", None, dict(grad_output=X, output=X, axis=None)),
    "softmax": ("softmax", None, dict(x=X, axis=(0, 1), where=X == 1)),
    "log_softmax": ("softmax", None, dict(x=X, axis=None, where=X == 1)),
    "merge_states": ("states", None, dict(states=[(X, ROWS), [X, ROWS]])),
    "AttentionState": ("states", None, dict(query=X) | STATE),
    "AttentionState.kv_len": ("states", state, None),
    "AttentionState.update": ("states", state, dict(key_chunk=X, value_chunk=X, mask=np.ones((3, 3), bool),
                                                    key_mask=np.ones((1, 3), bool), bias=np.zeros((3, 3)))),
    "AttentionState.result": ("states", state, {}),
    "KVCache": ("cache", None, dict(batch=1, kv_heads=2, head_dim=4, value_dim=3, capacity=5, dtype="float16",
                                    window=(2, 0))),
    **{f"KVCache.{name}": ("cache", cache, None) for name in ("keys", "values", "key_scales", "value_scales", "lengths",
                                                             "nbytes")},
    "KVCache.append": ("cache", cache, dict(key=X[..., :2, :], value=X[..., :2, :], lengths=np.array([1]))),
    "KVCache.attend": ("cache", cache, dict(query=X, causal=True, window=(1, 0), sinks=np.zeros(2),
                                            q_offset=np.array([2]), mask=np.ones((3, 5), bool),
                                            bias=np.zeros((3, 5)))),
    "KVCache.truncate": ("cache", cache, dict(lengths=np.array([1]))),
    "KVCache.reorder": ("cache", cache, dict(indices=np.array([0]))),
    "causal_mask": ("masks", None, dict(q_len=2, kv_len=3, q_offset=np.array([1]))),
    "window_mask": ("masks", None, dict(q_len=2, kv_len=3, window=(1, None), q_offset=np.array([1]))),
    "length_mask": ("masks", None, dict(lengths=np.array([1, 2]), length=3)),
    "segment_mask": ("masks", None, dict(q_segments=np.array([0, 1]), k_segments=np.array([0]))),
    "alibi_slopes": ("masks", None, dict(heads=4)),
    "AttentionWeights": ("weights/__init__", None, QK | but("sinks") | {"lse": ROWS}),
    **{f"AttentionWeights.{name}": ("weights/__init__", lazy, None) for name in ("shape", "ndim", "dtype", "lse", "T")},
    **{f"AttentionWeights.{name}": ("weights/__init__", lazy, {}) for name in (
        "dense", "entropy", "effective_keys", "max", "argmax", "mean_position", "mean_distance", "head_mean")},
    "AttentionWeights.summary": ("weights/__init__", lazy, dict(topk=2, entropy=True, map=(1, 2))),
    "AttentionWeights.topk": ("weights/__init__", lazy, dict(k=2)),
    "AttentionWeights.lost_mass": ("weights/__init__", lazy, dict(keep=np.array([True, False, True]))),
    "AttentionWeights.key_mass": ("weights/__init__", lazy, dict(rows=np.array([0, 2]), row_weights=ROWS)),
    "AttentionWeights.key_max": ("weights/__init__", lazy, dict(rows=np.array([0, 2]))),
    "AttentionWeights.key_hits": ("weights/__init__", lazy, dict(threshold=0.1, rows=np.array([0, 2]))),
    "AttentionWeights.map": ("weights/__init__", lazy, dict(bins=(1, 2))),
    "AttentionWeights.pool": ("weights/__init__", lazy, dict(query_labels=np.array([0, 1, -1]),
                                                             key_labels=np.array([0, 1, -1]))),
    "AttentionWeights.sparse": ("weights/__init__", lazy, dict(top_p=0.5)),
    "AttentionWeights.__matmul__": ("weights/__init__", lazy, dict(x=np.ones(3))),
    "rollout": ("weights/__init__", None, dict(layers=[lazy(), lazy()], start=np.ones((1, 3)))),
}


def stub(name):
    """A stub as a module: it is Python."""
    module = types.ModuleType(f"attnc.{name.replace('/', '.')}")
    module.__package__ = "attnc.weights" if "/" in name else "attnc"
    exec(compile((ROOT / f"{name}.pyi").read_text(), f"{name}.pyi", "exec"), vars(module))
    return module


STUBS = {name: stub(name) for name in {call[0] for call in CALLS.values()}}


def described(name):
    """The overloads, or the one function, by which a stub describes a callable; the getter of a property."""
    module = said = STUBS[CALLS[name][0]]
    for part in name.split("."):
        said = getattr(said, part)
    said = said.__init__ if isinstance(said, type) else said.fget if isinstance(said, property) else said
    return typing.get_overloads(types.SimpleNamespace(__module__=module.__name__, __qualname__=name)) or [said]


def call(name, **more):
    _, make, arguments = CALLS[name]
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
    hints = [typing.get_type_hints(one)["return"] for one in said]
    result = call(name)
    if CALLS[name][1] is None and isinstance(getattr(attnc, name, None), type):
        assert isinstance(result, getattr(attnc, name)) and hints == [type(None)]
        return
    assert conforms(result, hints[0]), (result, hints[0])
    for want in literals(said[-1]).get("want", ()) if len(said) > 1 else ():
        assert conforms(call(name, want=want), hints[1]) and not conforms(call(name, want=want), hints[0])


def literals(function):
    """The names that a stub lists for each argument."""
    def names(hint):
        inside = typing.get_args(hint)
        if typing.get_origin(hint) is typing.Literal:
            return set(inside)
        return set().union(*map(names, inside)) if inside else set()

    found = {name: names(hint) for name, hint in typing.get_type_hints(function).items() if name != "return"}
    return {name: some for name, some in found.items() if some}


@pytest.mark.parametrize("name", [name for name in CALLS if any(map(literals, described(name)))])
def test_names(name):
    """The stub's names are those that the call takes; what else it offers in an error it refuses."""
    for argument, listed in literals(described(name)[-1]).items():
        for one in listed:
            if one in ("bnhd", "sinks") or (argument, name) == ("want", "attention_backward"):
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
    for name, (_, _, arguments) in CALLS.items():
        for argument, value in (arguments or {}).items():
            if isinstance(value, np.ndarray):
                yield name, argument


@pytest.mark.parametrize("name, argument", list(arrays()))
def test_lists_are_taken_where_the_stub_says_like_an_array(name, argument):
    hint = typing.get_type_hints(described(name)[-1])[argument]
    like = typing.get_args(np.typing.ArrayLike)
    assert set(like) <= set(typing.get_args(hint)), hint
    call(name, **{argument: CALLS[name][2][argument].tolist()})


def test_states_are_a_list_or_tuple():
    pairs = [(X, ROWS), (X, ROWS)]
    hint = typing.get_type_hints(described("merge_states")[0])["states"]
    assert {typing.get_origin(one) for one in typing.get_args(hint)} == {list, tuple}
    for wrong in (iter(pairs), dict(enumerate(pairs)), {1}):
        with pytest.raises(TypeError, match="states must be a list or tuple"):
            attnc.merge_states(wrong)
    for right in (pairs, tuple(pairs)):
        attnc.merge_states(right)


def test_scales_of_a_cache():
    made = cache(np.int8)
    for name in ("key_scales", "value_scales"):
        hint = typing.get_type_hints(described(f"KVCache.{name}")[0])["return"]
        assert conforms(getattr(made, name), hint) and getattr(made, name) is not None


def test_every_public_callable_of_the_stubs_is_called():
    public = {}
    for name, module in STUBS.items():
        for top, what in vars(module).items():
            if getattr(what, "__module__", None) != module.__name__ or top.startswith("_") or top in INTERNAL:
                continue
            public[top] = name
            for method, it in vars(what).items() if isinstance(what, type) else ():
                if not method.startswith("_") and (callable(it) or isinstance(it, property)):
                    public[f"{top}.{method}"] = name
    assert set(public) - set(CALLS) == UNCALLED


INTERNAL = {"attend", "alike", "allowed", "within_lengths", "rows_within", "positions"}
UNCALLED = {f"AttentionWeights.{name}" for name in ("head", "linear_operator", "blocks", "reduce")}
