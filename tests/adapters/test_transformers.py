"""Models of transformers with attnc as their attention: what `eager` gives, within honest rounding."""

import ml_dtypes
import numpy as np
import pytest

from attnc.testing import assert_within

pytestmark = pytest.mark.peers
torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from models import LENGTH, MODELS, inputs_of, model_of  # noqa: E402

from attnc.integrations import transformers as ours  # noqa: E402

WRITERS = [name for name in MODELS if name not in ("Bert", "ModernBert", "ViT")]
LOSSES = 4      # one may round luckily
PADDED = [name for name in MODELS if name not in ("ViT", "Whisper")]


@pytest.fixture(scope="module", autouse=True)
def registered():
    assert ours.register() == "attnc"


def results_of(model, inputs, counts):
    """Every tensor that the model gives, by name; the rows of padding left out."""
    with torch.no_grad():
        output = model(**inputs, output_attentions=True, use_cache=False)
    found = {}
    for name, given in output.items():
        for layer, x in enumerate(given if isinstance(given, tuple) else (given,)):
            rows = x.transpose(1, 2) if name.endswith("attentions") else x
            padded = counts is not None and rows.shape[:2] == counts.shape
            found[f"{name} {layer}"] = (rows[counts] if padded else rows).to(torch.float64).numpy()
    return found


def assert_as_eager(name, inputs, counts, dtype=torch.float32):
    """Within twice the distance of `eager` from the formula in float64, that of the weights over all layers.

    In a single layer the largest error of a few hundred weights is a matter of luck, and of the BLAS.
    """
    wide = {key: x.double() if x.is_floating_point() else x for key, x in inputs.items()}
    exact = results_of(model_of(name, torch.float64, "exact"), wide, counts)
    honest = results_of(model_of(name, dtype, "eager"), inputs, counts)
    got = results_of(model_of(name, dtype, "attnc"), inputs, counts)
    assert got.keys() == exact.keys() and any("attentions" in key for key in got)
    exact, honest, got = map(joined, (exact, honest, got))
    for key in exact:
        assert_within(got[key], exact[key], honest[key], scale=np.abs(exact[key]).max(),
                      eps_dtype="float32" if dtype == torch.float32 else ml_dtypes.bfloat16, name=f"{name}: {key}")


def joined(results):
    """The weights of all layers in one array, after it was seen that each has its shape; the rest as it is."""
    weights = [x for name, x in results.items() if "attentions" in name]
    rest = {name: x for name, x in results.items() if "attentions" not in name}
    return {"shapes": np.concatenate([x.shape for x in weights]).astype(np.float64),
            "attentions": np.concatenate([x.ravel() for x in weights]), **rest}


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_attentions(name, isa):
    assert_as_eager(name, *inputs_of(name))


@pytest.mark.parametrize("padding", ["left", "right"])
@pytest.mark.parametrize("name", PADDED)
def test_padding(name, padding):
    assert_as_eager(name, *inputs_of(name, padding))


@pytest.mark.parametrize("name", MODELS)
def test_bfloat16(name):
    padding = "left" if name in PADDED else None
    assert_as_eager(name, *inputs_of(name, padding, torch.bfloat16), torch.bfloat16)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("name", WRITERS)
def test_twenty_tokens(name, beams, cache):
    inputs, _ = inputs_of(name, "left")
    inputs.pop("decoder_input_ids", None)
    how = {"max_new_tokens": 20, "num_beams": beams, "do_sample": False, "use_cache": True}
    if cache == "static":
        how["cache_implementation"] = "static"
    eager, found = (model_of(name, attention=kind).generate(**inputs, **how) for kind in ("eager", "attnc"))
    assert found.shape[1] >= 20 and len(found.unique()) > 4
    assert found.tolist() == eager.tolist()


def gradients_of(name, kind, padding, dtype=torch.float32):
    """The gradient of every weight after a step of training, for a few losses that hear every number of the output."""
    model, (inputs, counts) = model_of(name, dtype, kind).train(), inputs_of(name, padding, dtype)
    output = model(**inputs, use_cache=False)[0]
    output = output[counts] if counts is not None and output.shape[:2] == counts.shape else output
    found = {}
    for seed in range(LOSSES):
        targets = torch.randn(output.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        model.zero_grad()
        ((output - targets.to(dtype)) ** 2).mean().backward(retain_graph=True)
        for part, weight in model.named_parameters():
            if weight.grad is not None:
                found.setdefault(part, []).append(weight.grad.to(torch.float64, copy=True).numpy())
    model.eval()
    return {part: np.stack(each) for part, each in found.items()}


@pytest.mark.parametrize("name", MODELS)
def test_gradients_of_a_training_step(name):
    padding = "left" if name in PADDED else None
    exact = gradients_of(name, "exact", padding, torch.float64)
    honest, got = gradients_of(name, "eager", padding), gradients_of(name, "attnc", padding)
    assert got.keys() == exact.keys() and len(exact) > 10
    if name in ("T5", "GptOss"):    # a bias and sinks that are learned
        assert any(np.abs(x).max() > 0 for part, x in exact.items() if "sinks" in part or "relative" in part)
    for part in exact:
        # that of a key's bias is 0: terms as large as those of the key's weight cancel
        module = part.rpartition(".")[0]
        scale = max(np.abs(x).max() for other, x in exact.items() if other.rpartition(".")[0] == module)
        assert_within(got[part], exact[part], honest[part], scale=scale, eps_dtype="float32",
                      name=f"{name}: gradient of {part}")


def test_checkpointed_layers_have_the_same_gradients():
    whole = gradients_of("Llama", "attnc", "left")
    model = model_of("Llama")
    model.activation_checkpointing_enable()
    again = gradients_of("Llama", "attnc", "left")
    model.activation_checkpointing_disable()
    for part in whole:
        np.testing.assert_array_equal(again[part], whole[part])


@pytest.mark.parametrize("name", ["Mistral", "T5"])
def test_compiled(name):
    """As one graph, whose results are those of the model as it was."""
    model, (inputs, counts) = model_of(name), inputs_of(name, "left")
    torch._dynamo.reset()
    with torch.no_grad():
        wanted = model(**inputs, use_cache=False).logits
        got = torch.compile(model, backend="aot_eager", fullgraph=True)(**inputs, use_cache=False).logits
    rows = counts if wanted.shape[:2] == counts.shape else ...
    np.testing.assert_allclose(got[rows].numpy(), wanted[rows].numpy(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["Mistral", "Bert"])
def test_compiled_layers_of_a_model(name):
    """What they are given is the mask as options."""
    model, (inputs, counts) = model_of(name), inputs_of(name, "left")
    layers = model.model.layers if name == "Mistral" else model.bert.encoder.layer
    before = list(layers)
    torch._dynamo.reset()
    try:
        with torch.no_grad():
            wanted = model(**inputs).logits
            for place, layer in enumerate(before):
                layers[place] = torch.compile(layer, backend="aot_eager")
            got = model(**inputs).logits
    finally:
        for place, layer in enumerate(before):
            layers[place] = layer
    np.testing.assert_allclose(got[counts].numpy(), wanted[counts].numpy(), rtol=0, atol=1e-5)


# ------------------------------------------------------------------- where transformers' eager attention differs


def hidden(kind, name="Llama", **inputs):
    model = model_of(name, attention=kind)
    with torch.no_grad():
        return model(**inputs, output_attentions=True, use_cache=False)


def test_differs_a_row_of_padding_sees_everything_alike():
    inputs, counts = inputs_of("Llama", "left")
    eager, ours_ = (hidden(kind, **inputs).attentions[0][~counts.T[0]][0, :, 0] for kind in ("eager", "attnc"))
    assert torch.allclose(eager, torch.full_like(eager, 1 / eager.shape[-1])) and (ours_ == 0).all()


def test_differs_nan_in_padding_leaks():
    inputs, counts = inputs_of("Llama", "left")
    embeddings = model_of("Llama").get_input_embeddings()(inputs["input_ids"])
    embeddings = torch.where(counts[..., None], embeddings, torch.nan).detach()
    given = {"inputs_embeds": embeddings, "attention_mask": inputs["attention_mask"]}
    assert hidden("eager", **given).logits[0].isnan().all()
    found = hidden("attnc", **given).logits[counts]
    np.testing.assert_array_equal(found.numpy(), hidden("attnc", **inputs).logits[counts].numpy())


def test_differs_a_boolean_mask_of_four_axes_is_added():
    inputs, _ = inputs_of("Llama")
    mask = torch.tril(torch.ones(LENGTH, LENGTH, dtype=torch.bool)).expand(2, 1, -1, -1)
    added, causal = (hidden("eager", **inputs, **more).logits for more in ({"attention_mask": mask}, {}))
    assert (added - causal).abs().max() > 1e-2
    found = hidden("attnc", **inputs, attention_mask=mask).logits
    np.testing.assert_allclose(found.numpy(), causal.numpy(), rtol=0, atol=1e-4)


def test_differs_dropout_of_weights():
    inputs, _ = inputs_of("Llama")
    for kind in ("eager", "attnc"):
        model = model_of("Llama", attention=kind).train()
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = 0.5
        if kind == "eager":
            assert not torch.equal(model(**inputs).logits, model(**inputs).logits)
        else:
            with torch.no_grad(), pytest.raises(ValueError, match="dropout"):
                model(**inputs)
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = 0.0
        model.eval()


def test_differs_output_attentions_in_the_configuration_is_refused():
    """By transformers, for every attention but its eager one; the argument of the call is taken."""
    config = model_of("Llama").config
    with pytest.raises(ValueError, match="output_attentions"):
        config.output_attentions = True
    assert len(hidden("attnc", **inputs_of("Llama")[0]).attentions) == 2
