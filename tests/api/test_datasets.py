"""The shipped real inputs are what they say: shapes, tokens, and the attention weights they are known for."""

from __future__ import annotations

import math
from importlib.resources import files
from typing import NamedTuple

import numpy as np
import pytest

from attnc import datasets


class Known(NamedTuple):
    """What a data set must hold, written down apart from it."""

    name: str
    tokens: str
    layer: int
    head: int
    query_word: str
    key_word: str
    weight: float
    off: float


KNOWN = [
    Known("coreference", "[CLS] the animal did not cross the street because it was too tired . [SEP]",
          layer=3, head=1, query_word="it", key_word="animal", weight=0.69, off=0.01),
    Known("turkish", "<s> ▁Ayşe ▁kitabı ▁okudu ▁çünkü ▁onu ▁merak ▁ediyor du . </s>",
          layer=0, head=3, query_word="▁onu", key_word="▁kitabı", weight=0.3530, off=0.005),
]


def weights_of(data: datasets.Capture) -> np.ndarray:
    """Softmax of query·key/sqrt(head_dim) in float64, (heads, tokens, tokens)."""
    query, key = data.query.astype(np.float64), data.key.astype(np.float64)
    exps = np.exp(np.einsum("hqd,hkd->hqk", query, key) / math.sqrt(query.shape[-1]))
    return exps / exps.sum(-1, keepdims=True)


def test_names_are_those_known():
    assert datasets.names() == [known.name for known in KNOWN]


@pytest.mark.parametrize("name", ["", "Turkish", "../datasets/data/turkish", "nothing"])
def test_unknown_name_lists_the_names(name):
    with pytest.raises(ValueError, match="there are: coreference, turkish"):
        datasets.load(name)


def test_all_files_together_stay_small():
    assert sum(len(file.read_bytes()) for file in files(datasets).joinpath("data").iterdir()) <= 300_000


@pytest.fixture(params=KNOWN, ids=lambda known: known.name)
def known(request) -> Known:
    return request.param


@pytest.fixture
def data(known) -> datasets.Capture:
    return datasets.load(known.name)


def test_arrays(known, data):
    for array in (data.query, data.key, data.value):
        assert array.shape == (12, len(known.tokens.split()), 32)
        assert array.dtype == np.float32 and array.dtype.isnative and array.flags.c_contiguous
        assert np.isfinite(array).all() and array.std() > 0.1


def test_tokens_match_the_sentence(known, data):
    assert data.tokens == known.tokens.split()
    spelled = "".join(data.tokens[1:-1]).replace("▁", "")
    assert spelled.lower() == data.sentence.replace(" ", "").lower()


def test_weight_it_is_known_for(known, data):
    tokens = known.tokens.split()
    rows, columns = [tokens.index(known.query_word)], [tokens.index(known.key_word)]
    assert (data.layer, data.head, list(data.rows), list(data.columns)) == (known.layer, known.head, rows, columns)
    between = weights_of(data)[:, rows][..., columns].sum(-1).mean(-1)
    assert between.argmax() == known.head
    assert abs(between[known.head] - known.weight) <= known.off
    assert abs(between[known.head] - data.weight) <= 2e-6  # float32 storage, and the six digits of the fact


def test_weights_sum_to_one(data):
    weights = weights_of(data)
    assert (weights > 0).all()
    np.testing.assert_allclose(weights.sum(-1), 1, rtol=0, atol=1e-14)


def test_source_says_where_it_comes_from(known, data):
    facts = ["Model: ", "package", "MIT", "no prefix", data.sentence, f"Layer {known.layer} ", f"head {known.head} "]
    assert [fact for fact in facts if fact not in data.source] == []
    assert ("4 bits" in data.source) == (known.name == "turkish")
    assert f"{data.weight:.4f}" in data.source


def test_each_load_has_arrays_of_its_own(known, data):
    data.query[:] = 0
    data.tokens.clear()
    again = datasets.load(known.name)
    assert again.query.any() and again.tokens
