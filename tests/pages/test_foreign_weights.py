"""Pictures of weights that other libraries hold: torch, jax and dask, one array or a tuple of layers."""

import numpy as np
import pytest

import attnc
from attnc import plot
from attnc._views.source import load

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402

pytestmark = pytest.mark.peers


def torch(array):
    return pytest.importorskip("torch").tensor(array).requires_grad_()


def torch_bfloat16(array):
    return torch(array).bfloat16()


def jax(array):
    return pytest.importorskip("jax.numpy").asarray(array)


def dask(array):
    return pytest.importorskip("dask.array").from_array(array, chunks=3)


@pytest.fixture(params=[torch, torch_bfloat16, jax, dask])
def foreign(request):
    yield request.param
    pyplot.close("all")


@pytest.fixture
def weights(seed):
    return np.random.default_rng(seed).dirichlet(np.ones(7), size=(3, 7)).astype(np.float32)


def test_every_picture_takes_them(foreign, weights, seed):
    x, rounded = foreign(weights), np.asarray(load(foreign(weights)).weights[0])
    for one in (x, (x, x), [x[None]]):
        assert attnc.explorer(one).html == attnc.explorer(load(one)).html
        head = 1 if load(one).shape[0] == 1 else (1, 1)
        drawn = plot.heatmap(one, head=head).images[0].get_array()
        np.testing.assert_array_equal(drawn, rounded[1])
        plot.heads(one), plot.row(one, 2, head=head), plot.key_mass(one)
    assert np.abs(rounded - weights).max() <= (2**-9 if foreign is torch_bfloat16 else 1e-7)
    query = np.random.default_rng(seed).standard_normal((4, 8)).astype(np.float32)
    plot.explain(*(foreign(query) for _ in range(3)), row=1)


def test_the_attentions_of_a_model(weights):
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    config = transformers.BertConfig(hidden_size=16, num_attention_heads=2, num_hidden_layers=3, intermediate_size=8,
                                     vocab_size=20, attn_implementation="eager")
    model = transformers.BertModel(config).eval()
    found = model(torch.arange(6)[None], output_attentions=True).attentions     # they require gradients
    wanted = np.concatenate([layer.detach().numpy() for layer in found])
    assert isinstance(found, tuple) and load(found).shape == (3, 2, 6, 6)
    np.testing.assert_array_equal(plot.heatmap(found, head=(2, 1)).images[0].get_array(), wanted[2, 1])
    assert "3 layers" in repr(attnc.explorer(found))
    pyplot.close("all")


def test_lazy_weights_of_dask(seed):
    da = pytest.importorskip("dask.array")
    from attnc.integrations import dask as attnc_dask

    query = np.random.default_rng(seed).standard_normal((2, 6, 4))
    chunks = da.from_array(query[None], chunks=(1, 1, 3, 4))
    got = load(attnc_dask.AttentionWeights(chunks, chunks))
    np.testing.assert_allclose(got.weights[0], attnc.attention_weights(query, query), rtol=1e-12)
