"""Arguments of any kind, drawn and shrunk by hypothesis: the reference's error word for word, or its answer."""

import random

import hypothesis
import numpy as np
import pytest
from checking import DTYPES, SEED, dtype_of
from fuzz import THINGS, differs, frozen
from hypothesis import strategies as st
from layouts import MEMORY

import attnc
from attnc import reference

SIZES = st.integers(0, 5)
NUMBERS = st.one_of(st.sampled_from([0, 1, -1, 0.5, -2.0, float("nan"), float("inf"), True, 2**40]), st.integers(-6, 6))
GARBAGE = {
    "mask": [np.ones(3), "yes", np.ones((9, 9, 9, 9, 9, 9), bool)], "key_mask": [np.ones(2), True, [[1]]],
    "block_mask": [np.ones((1, 1), bool), (1, 2), (np.ones((9, 9), bool), 1, 1)],
    "key_indices": [np.ones((1, 1, 1, 1)), [[[-2]]], "keys", 0, np.full((1, 5, 2), 99)],
    "bias": [np.ones(3, int), "b", np.ones((7, 1, 1, 1, 1), complex)],
    "relative_bias": [np.ones(3, int), np.ones((4, 1)), 1.0], "relative_index": [0, "x", [0.5], np.full(9, 2**40)],
    "relative_key": [1.0, np.ones((3, 0)), [[1]]], "relative_query": [None, np.ones((2, 2, 2, 3)), "x"],
    "causal": [1, "no", None],
    "window": [3, (1,), (-1, 2), "ab", (1.5, 0), True], "q_offset": [1.5, "x", [[1, 2], [3, 4], [5, 6]], 2**60, True],
    "scale": [np.nan, np.inf, "x", [1.0], 1j, True], "softcap": [0, -1.0, np.nan, "x"],
    "alibi_slopes": [np.ones(1000), "x", [1j]], "sinks": [np.ones((2, 2)), "x", {}], "q_segments": [[1], 1, [0.5]],
    "k_segments": [[1], None], "q_lengths": [-1, 10**6, 0.5, "x"], "kv_lengths": [-1, 10**6, [0.5], "x"],
    "layout": ["hnbd", 3, None], "num_threads": [0, -3, 5000, "2", 1.5, True],
    "k_positions": [0, "x", np.ones(900, int), [0.5], [[[[[0]]]]], True],
}


def arrays(shape, kind="float32"):
    """An array of a shape: small numbers by a seed, in any memory."""
    def made(seed, memory):
        numbers = np.random.default_rng(seed)
        if kind == "bool":
            x = numbers.random(shape) < 0.7
        elif kind == "int":
            x = numbers.integers(-1, 6, shape)
        else:
            x = numbers.standard_normal(shape).astype(dtype_of(kind))
        return MEMORY[memory](x) if memory else x

    return st.builds(made, st.integers(0, 3), st.sampled_from([None, *MEMORY]))


@st.composite
def calls(draw):
    """Arrays and options of one call. Each option is as it should be, or of another shape, or anything."""
    batch, kv_heads, group = draw(st.sampled_from([(), (2,)])), draw(st.integers(1, 2)), draw(st.integers(1, 2))
    q_len, kv_len, depth, heads = draw(SIZES), draw(SIZES), draw(SIZES), kv_heads * group
    shapes = {"query": (*batch, heads, q_len, depth), "key": (*batch, kv_heads, kv_len, depth),
              "value": (*batch, kv_heads, kv_len, 3)}
    found = {name: draw(arrays(shape, draw(st.sampled_from(DTYPES)))) for name, shape in shapes.items()}
    right = {
        "mask": arrays((heads, q_len, kv_len), "bool"), "key_mask": arrays((*batch, kv_len), "bool"),
        "block_mask": st.builds(lambda x, rows, keys: (x[..., :-(-q_len // rows), :-(-kv_len // keys)], rows, keys),
                                arrays((heads, q_len, kv_len), "bool"), st.integers(1, 4), st.integers(1, 4)),
        "key_indices": st.builds(lambda x: x.clip(-1, kv_len - 1), arrays((heads, q_len, 3), "int")),
        "bias": arrays((heads, q_len, kv_len)), "relative_bias": arrays((heads, max(q_len + kv_len - 1, 0))),
        "relative_index": arrays((max(q_len + kv_len - 1, 0),), "int"), "relative_key": arrays((heads, 6, depth)),
        "relative_query": arrays((1, 6, depth)),
        "causal": st.booleans(),
        "window": st.tuples(*[st.one_of(st.none(), st.integers(0, 3))] * 2), "q_offset": st.integers(-3, 9),
        "k_positions": arrays((*batch, kv_heads, kv_len), "int").map(np.abs),
        "scale": st.floats(-2, 2), "softcap": st.floats(0.5, 9), "alibi_slopes": arrays((heads,)),
        "sinks": arrays((heads,)), "q_segments": arrays((*batch, q_len), "int"),
        "k_segments": arrays((*batch, kv_len), "int"), "q_lengths": arrays(batch, "int"),
        "kv_lengths": arrays(batch, "int"), "layout": st.sampled_from(["bhnd", "bnhd"]),
        "num_threads": st.integers(1, 3)}
    anything = st.one_of(NUMBERS, st.sampled_from(THINGS), arrays((kv_len,), "float64"), arrays((q_len, 1), "bool"))
    for name in draw(st.lists(st.sampled_from(list(GARBAGE)), unique=True, max_size=3)):
        found[name] = draw(st.one_of(right[name], right[name], st.sampled_from(GARBAGE[name]), anything))
    if draw(st.integers(0, 5)) == 5:
        found[draw(st.sampled_from(list(shapes)))] = draw(anything)
    return found


def outcome(function, options):
    """What a call gives, or the type and words of its error."""
    try:
        with np.errstate(all="ignore"):
            return function(**options), None
    except (TypeError, ValueError) as error:
        return None, (type(error), str(error))


def agree(name, options):
    before = frozen(options)
    wanted, error = outcome(getattr(reference, name), options)
    got, its_error = outcome(getattr(attnc, name), options)
    assert its_error == error
    assert frozen(options) == before, "an input was written"
    if error is None:
        assert (said := differs(got, wanted, name)) is None, said
    return error


@hypothesis.seed(SEED)
@hypothesis.settings(max_examples=400, deadline=None, database=None)
@hypothesis.given(calls())
def test_attention(options):
    agree("attention", options)


@hypothesis.seed(SEED)
@hypothesis.settings(max_examples=150, deadline=None, database=None)
@hypothesis.given(calls(), st.sampled_from(["raw", "scaled", "capped", "masked", "lse", 3]))
def test_scores(options, stage):
    agree("attention_scores", {name: x for name, x in options.items() if name not in ("value", "sinks")} | {
        "stage": stage})


def test_a_check_that_is_missing_is_found_and_shrunk(monkeypatch):
    """Without its check a wrong option is taken by one of the twins; the example has hardly anything beside it."""
    fast = attnc.attention
    monkeypatch.setattr(attnc, "attention", lambda softcap=None, **options: fast(**options))

    def twins_disagree(options):
        return outcome(attnc.attention, options)[1] != outcome(reference.attention, options)[1]

    smallest = hypothesis.find(calls(), twins_disagree, random=random.Random(SEED),
                               settings=hypothesis.settings(database=None, deadline=None, max_examples=2000))
    assert "softcap" in smallest and len(smallest) <= 5
    with pytest.raises(AssertionError):
        agree("attention", smallest)
