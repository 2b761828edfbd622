"""`capture`: what it says of each layer is what the matrices of `output_attentions=True` say."""

import numpy as np
import pytest

pytestmark = pytest.mark.peers
torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from models import MODELS, inputs_of, model_of  # noqa: E402

import attnc  # noqa: E402
from attnc.bench.machine import PeakMemory  # noqa: E402
from attnc.integrations import transformers as ours  # noqa: E402

EVERYTHING = ("topk", "key_mass", "entropy", "map", "effective_keys", "max", "argmax", "mean_position", "mean_distance",
              "key_max", "lse", "weights")


@pytest.fixture(scope="module", autouse=True)
def registered():
    ours.register()


def run(name, padding=None, **how):
    """The records of a call, and the matrices of each layer in the order in which the layers ran."""
    model, (inputs, counts) = model_of(name), inputs_of(name, padding)
    with torch.no_grad(), ours.capture(model, **how) as records:
        output = model(**inputs, output_attentions=True, use_cache=False)
    halves = [output.get(key) or () for key in ("encoder_attentions", "attentions")]
    pairs = zip(output.get("decoder_attentions") or (), output.get("cross_attentions") or (), strict=True)
    layers = [*halves[0], *halves[1], *(each for pair in pairs for each in pair)]
    return records, [x.numpy().astype(np.float64) for x in layers], counts


def bins_of(matrix, rows, keys):
    """Means over the rows of a bin of the sums over its keys, both cut evenly."""
    (q_len, kv_len), found = matrix.shape[-2:], np.zeros((*matrix.shape[:-2], rows, keys))
    places = [np.arange(n) * count // n for n, count in ((q_len, rows), (kv_len, keys))]
    for r in range(rows):
        for c in range(keys):
            found[..., r, c] = matrix[..., places[0] == r, :][..., places[1] == c].sum(-1).mean(-1)
    return found


@pytest.mark.parametrize("name", MODELS)
def test_statistics_are_those_of_the_matrices(name):
    records, matrices, _ = run(name, topk=3, bins=(4, 3))
    assert len(records) == len(matrices) == (6 if name in ("T5", "Whisper") else 2)
    for record, matrix in zip(records, matrices, strict=True):
        assert record.shape == matrix.shape
        np.testing.assert_allclose(record.key_mass, matrix.sum(-2), rtol=0, atol=1e-5)
        np.testing.assert_allclose(record.map, bins_of(matrix, 4, 3), rtol=0, atol=1e-6)
        np.testing.assert_allclose(record.topk.weights, -np.sort(-matrix, -1)[..., :3], rtol=0, atol=1e-6)
        there = record.topk.indices >= 0
        chosen = np.take_along_axis(matrix, np.maximum(record.topk.indices, 0), -1)
        np.testing.assert_allclose(record.topk.weights[there], chosen[there], rtol=0, atol=1e-6)
        if name != "GptOss":    # whose sink is an event of its own
            logs = np.log(matrix, where=matrix > 0, out=np.zeros_like(matrix))
            np.testing.assert_allclose(record.entropy, -(matrix * logs).sum(-1), rtol=0, atol=1e-5)


@pytest.mark.parametrize("padding", ["left", "right"])
def test_padding_receives_nothing(padding):
    records, matrices, counts = run("Llama", padding, what=("key_mass", "weights"))
    for record, matrix in zip(records, matrices, strict=True):
        np.testing.assert_allclose(record.weights.dense(), matrix, rtol=0, atol=1e-6)
        assert (record.key_mass[0][:, ~counts[0].numpy()] == 0).all()


@pytest.mark.parametrize("name", ["Llama", "GptOss", "T5"])
def test_a_few_heads(name):
    alone, matrices, _ = run(name, what="weights", heads=[2, 1])
    for record, matrix in zip(alone, matrices, strict=True):
        np.testing.assert_allclose(record.weights.dense(), matrix[:, [2, 1]], rtol=0, atol=1e-6)
    records, _, _ = run(name, what="key_mass", heads=2)
    assert records[0].key_mass.shape == (2, 1, matrices[0].shape[-1])


def test_everything_that_can_be_asked_for():
    records, matrices, _ = run("Mistral", what=EVERYTHING)
    public = [name for name in vars(records[0]) if not name.startswith("_")]
    assert public == ["layer", "call", "index", "shape", "q_len", "reordered", *EVERYTHING]
    np.testing.assert_array_equal(records[1].argmax, matrices[1].argmax(-1))
    assert repr(records[0]).startswith("AttentionRecord(model.layers.0.self_attn, (2, 4, 12, 12): topk, ")


def test_layers_by_number_and_by_name():
    everything, _, _ = run("T5", what="entropy")
    names = [record.layer for record in everything]
    assert [record.layer for record in run("T5", what="entropy", layers=[0, 3])[0]] == [names[0], names[3]]
    cross = [name for name in names if "EncDec" in name]
    found = [record.layer for record in run("T5", what="entropy", layers="EncDecAttention")[0]]
    assert found == cross and len(cross) == 2


def test_generated_tokens_give_a_record_each():
    model, (inputs, _) = model_of("Mistral"), inputs_of("Mistral", "left")
    with ours.capture(model, ("key_mass", "weights"), layers=1) as records:
        model.generate(**inputs, max_new_tokens=4, do_sample=False, cache_implementation="static")
    assert [record.shape[2] for record in records] == [12, 1, 1, 1]
    for record in records:      # the cache has moved on since, in place
        np.testing.assert_allclose(record.weights.dense().sum(-2), record.key_mass, rtol=0, atol=1e-6)


def test_memory_is_linear_in_the_length():
    """A matrix of 4 heads of 4,096 tokens is 256 MiB: neither the records nor the model at work come near one."""
    model = model_of("Llama")
    with torch.no_grad():
        model(torch.arange(4, 84)[None])      # what is loaded and made once
        with PeakMemory() as peak, ours.capture(model) as records:
            model(torch.arange(4, 68).repeat(64)[None])
    for record in records:
        arrays = record.key_mass, record.entropy, record.map, *record.topk
        assert sum(x.nbytes for x in arrays) < 2 << 20
    assert len(records) == 2 and (peak.bytes is None or peak.bytes < 64 << 20)


def test_the_explorer_takes_the_weights_of_the_layers():
    model = model_of("Llama")
    tokens = torch.arange(4, 16)[None]
    with torch.no_grad(), ours.capture(model, "weights") as records:
        model(tokens)
    page = attnc.explorer([record.weights for record in records], [f"word{n}" for n in tokens[0]])
    assert "word15" in page.html


def test_two_captures_and_two_models():
    model, other = model_of("Llama"), model_of("Mistral")
    tokens = torch.arange(4, 14)[None]
    with torch.no_grad(), ours.capture(model, "entropy") as first:
        with ours.capture(other, "max") as second:
            model(tokens)
            other(tokens)
        other(tokens)
    assert len(first) == len(second) == 2 and hasattr(first[0], "entropy") and hasattr(second[0], "max")
    with torch.no_grad():
        model(tokens)
    assert len(first) == 2


def test_nothing_but_the_records_changes():
    model, (inputs, _) = model_of("Gemma2"), inputs_of("Gemma2")
    with torch.no_grad():
        before = model(**inputs).logits
        with ours.capture(model, EVERYTHING):
            during = model(**inputs).logits
    assert torch.equal(before, during)


def test_what_it_does_not_know_is_an_error_that_names_it():
    model = model_of("Llama")
    tokens = torch.arange(4, 14)[None]

    def refused(name, **how):
        with pytest.raises(ValueError, match=name), torch.no_grad(), ours.capture(model, **how):
            model(tokens)

    refused("columns", what="columns")
    refused("what", what=())
    refused("cross", layers="cross")
    refused("layers has 2", layers=[0, 2])
    refused("heads has 4", heads=4)
    refused("heads has -1", heads=[-1])
    with pytest.raises(ValueError, match="compiled"), ours.capture(torch.compile(model, backend="eager")):
        pass
    model.set_attn_implementation("eager")
    refused("'eager'.*'attnc'")
