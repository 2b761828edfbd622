"""capture(): layers, heads and rows, what a record has of them, and gradients."""
# ruff: noqa: E402, F401, F811    (fixtures of capturing.py)

import gc
import weakref

import numpy as np
import pytest

pytestmark = pytest.mark.peers
torch = pytest.importorskip("torch")
pytest.importorskip("ml_dtypes")

from capturing import (
    HEADS,
    LENGTH,
    WIDTH,
    Attention,
    Twice,
    assert_close,
    by_name,
    places,
    restored,
    transposed,
    two,
    x,
)
from torch import nn
from torch.nn import functional
from torch.nn.functional import scaled_dot_product_attention as early

import attnc
from attnc.bench.machine import PeakMemory
from attnc.integrations.torch import attention, capture
from attnc.integrations.torch import scaled_dot_product_attention as ours

# Forward passes, names and numbers

def test_calls_and_indices_are_of_a_forward_pass(x):
    model = Twice()
    each = [("shared", 0, 0), ("shared", 1, 1), ("head", 0, 2)]
    with capture(model, "entropy") as records:
        model(x)
        model.steps(x)
        model.head(x)       # a pass of its own
    assert places(records) == each * 3 + [("head", 0, 0)]
    assert repr(records[1]) == f"AttentionRecord(shared, call 1, (2, {HEADS}, {LENGTH}, {LENGTH}): entropy)"


@pytest.mark.parametrize("layers, wanted", [
    (1, [1]), ([0, 2], [0, 2]), ("shared", [0, 1]), ("head", [2]), (("shared", 1), [1]),
    ([("shared", 0), "head"], [0, 2]), ((0, 1), [0, 1]), (np.int64(2), [2]), (None, [0, 1, 2]),
    (np.array([2, 0]), [0, 2]), (np.array(1), [1]), (torch.tensor([0]), [0]),
    ("", [0, 1, 2])], ids=str)
def test_layers(layers, wanted, x):
    model = Twice()
    with capture(model, "entropy", layers=layers) as records:
        model(x)
    assert [record.index for record in records] == wanted


def test_layers_by_a_part_of_their_names(x):
    model = nn.ModuleDict({f"block{n}": nn.ModuleDict({"self": Attention(), "cross": Attention()}) for n in (1, 11)})
    outer = nn.Module()
    outer.model = model
    with capture(outer, "entropy", layers=["cross", "model.block1"]) as records:
        for module in model.modules():
            if isinstance(module, Attention):
                module(x)
    assert [record.layer for record in records] == [
        "model.block1.self", "model.block1.cross", "model.block11.cross"]


def test_layers_by_each_name_of_a_shared_module(x):
    model = nn.ModuleDict({"first": Attention(), "last": Attention()})
    model["again"] = nn.ModuleDict({"inner": model["first"]})
    for layers in "again.inner", "again", ("first", 0):
        with capture(model, "entropy", layers=layers) as records:
            model["again"]["inner"](x)
            model["last"](x)
        assert places(records) == [("first", 0, 0)]


def test_heads_of_layers_that_are_not_chosen_do_no_harm(x):
    model = Twice()
    with capture(model, "entropy", layers=[2], heads={"shared": [0], "head": [1]}) as records:
        model(x)
    assert [(record.index, record.shape[1]) for record in records] == [(2, 1)]


@pytest.mark.parametrize("heads, shown", [(2, [2]), ([3, 0], [3, 0]), (range(1, 3), [1, 2]), (np.array([1]), [1]),
                                          (torch.tensor([3, 0]), [3, 0])], ids=str)
@pytest.mark.parametrize("rows", [None, slice(-1, None), slice(2, 5), slice(5, 2)])
def test_heads_and_rows(heads, shown, rows, x):
    model = two()
    with capture(model, ("weights", "entropy", "key_mass", "value"), heads=heads, rows=rows) as records:
        model(x)
    for record, module in zip(records, model, strict=True):
        wanted = module.weights.detach()[:, shown, rows or slice(None)]
        assert record.shape == wanted.shape and record.q_len == LENGTH
        assert_close(record.weights.dense(), wanted)
        assert_close(record.entropy, torch.special.entr(wanted).sum(-1))
        assert_close(record.key_mass, wanted.sum(-2))
        assert record.value.shape == (2, len(shown), LENGTH, 8)


def test_heads_of_each_layer(x):
    model = Twice()
    with capture(model, "weights", heads={("shared", 1): [0], "head": 3}) as records:
        model(x)
    assert places(records) == [("shared", 1, 1), ("head", 0, 2)]
    assert_close(records[1].weights.dense(), model.head.weights.detach()[:, [3]])
    with capture(model, "entropy", heads={2: [1, 2]}, layers=[0, 2]) as records:
        model(x)
    assert [record.shape[1] for record in records] == [HEADS, 2]


OPTIONS = {
    "bias": lambda: {"bias": torch.randn(1, 4, 5, 6)}, "one bias": lambda: {"bias": torch.randn(5, 6)},
    "relative_bias": lambda: {"relative_bias": torch.randn(2, 4, 10)},
    "one relative_bias": lambda: {"relative_bias": torch.randn(10)},
    "mask": lambda: {"mask": torch.rand(2, 4, 5, 6) < 0.7}, "key_mask": lambda: {"key_mask": torch.rand(2, 6) < 0.7},
    "block_mask": lambda: {"block_mask": (np.random.default_rng(0).random((4, 3, 2)) < 0.7, 2, 3)},
    "key_indices": lambda: {"key_indices": torch.randint(-1, 6, (2, 4, 5, 3))},
    "lists of key heads": lambda: {"key_indices": torch.randint(-1, 6, (2, 5, 3)), "causal": True},
    "k_positions": lambda: {"k_positions": torch.randint(0, 9, (2, 2, 6)), "causal": True, "q_offset": 3},
    "sinks": lambda: {"sinks": torch.randn(4), "softcap": 2.0},
    "alibi_slopes": lambda: {"alibi_slopes": torch.rand(2, 4)},
    "segments": lambda: {"q_segments": torch.randint(0, 2, (2, 5)), "k_segments": torch.randint(0, 2, (2, 6))},
    "lengths": lambda: {"q_lengths": torch.tensor([5, 3]), "kv_lengths": torch.tensor([4, 6]), "window": (2, 1)}}


@pytest.mark.parametrize("heads, rows", [([3, 1], slice(1, 4)), ([2], None), ([], None), (None, slice(-1, None))],
                         ids=str)
@pytest.mark.parametrize("options", OPTIONS)
def test_heads_and_rows_of_every_option(options, heads, rows):
    class Model(nn.Module):
        def forward(self, query, key, **options):
            return attention(query, key, key, **options)

    torch.manual_seed(6)
    model, query, key, options = Model(), torch.randn(2, 4, 5, 8), torch.randn(2, 2, 6, 8), OPTIONS[options]()
    arrays = {name: x.numpy() if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    wanted = attnc.attention_weights(query.numpy(), key.numpy(), **arrays)
    with capture(model, "weights", heads=heads, rows=rows) as records:
        model(query, key, **options)
    wanted = wanted[:, slice(None) if heads is None else heads, slice(None) if rows is None else rows]
    np.testing.assert_allclose(records[0].weights.dense(), wanted, rtol=0, atol=1e-6)


# What is asked

def test_functions(x):
    model = two()

    def corner(weights, call):
        seen.append((call.layer, call.index, call.shape))
        return weights[..., -1, 0]

    class Counter:
        def __call__(self, weights, call):
            return len(seen)

    seen = []
    with capture(model, ("entropy", corner, lambda weights, call: hasattr(call, "entropy"))) as records:
        model(x)
    assert_close(records[1].corner, model[1].weights.detach()[..., -1, 0])
    assert records[0].result is True and seen == [(str(n), n, (2, HEADS, LENGTH, LENGTH)) for n in (0, 1)]
    with capture(model, {"first": corner, "second": lambda weights, call: 7}) as records:
        model(x)
    assert list(vars(records[0]))[-2:] == ["first", "second"] and records[0].second == 7
    with capture(model, Counter()) as records:
        model(x)
    assert records[0].result == len(seen) == 4


def test_nothing_but_what_a_function_gives_is_kept(x):
    model = two()
    with torch.no_grad(), capture(model, lambda weights, call: held.append(weakref.ref(weights))) as records:
        held = []
        model(x)
    gc.collect()
    assert len(records) == 2 and all(ref() is None for ref in held)


def test_memory_is_linear_in_the_length():
    """Weights of 4 heads of 4,096 tokens are 256 MiB."""
    class Plain(nn.Module):
        def forward(self, x):
            x = x.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            return early(x, x, x, is_causal=True).transpose(1, 2).flatten(2)

    model, x = nn.Sequential(Plain(), Plain()), torch.randn(1, 4096, WIDTH)
    with torch.no_grad():
        model(x[:, :64])
        with PeakMemory() as peak, capture(model, ("topk", "key_mass", "entropy", "map", "weights")) as records:
            model(x)
    assert len(records) == 2 and (peak.bytes is None or peak.bytes < 64 << 20)


def test_weights_are_of_copies_and_say_when_a_mask_changes():
    class Model(nn.Module):
        def forward(self, x, mask):
            return early(x, x, x, attn_mask=mask)

    model, x, mask = Model(), torch.randn(1, 2, 5, 8), torch.ones(5, 5).bool()
    wanted = (x @ x.mT / 8 ** 0.5).softmax(-1).numpy()
    with capture(model, "weights") as kept, capture(model, "weights") as unasked, \
            capture(model, lambda weights, call: weights) as given:
        model(x, mask)
    x.zero_()
    assert_close(kept[0].weights.dense(), wanted)
    mask[0, 0] = False
    for weights, changed in (kept[0].weights, "mask"), (unasked[0].weights, "mask"), (given[0].result, "query and key"):
        with pytest.raises(RuntimeError, match=f"{changed}.* changed since"):
            weights.dense()


# Gradients

@pytest.mark.parametrize("function", [by_name, early, ours, transposed])
def test_gradient_of_the_output(function, x):
    model = two(function)
    wanted = []
    output = model(x)
    for module in model:
        module.output.retain_grad()
    output.sin().sum().backward()
    wanted = [module.output.grad for module in model]
    parameters = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with capture(model, ("grad_output", "value"), heads=[2], rows=slice(1, None)) as records:
        output = model(x)
        assert records[0].grad_output is None
        output.sin().sum().backward()
    for record, grad in zip(records, wanted, strict=True):
        np.testing.assert_array_equal(record.grad_output, grad[:, [2], 1:])
    for found, grad in zip(model.parameters(), parameters, strict=True):
        assert torch.equal(found.grad, grad)
    with capture(model, "grad_output") as records:
        for _ in range(2):      # adds up, as Tensor.grad
            model(x).sin().sum().backward(retain_graph=True)
    output = model(x)
    with capture(model, "grad_output") as records:
        loss = model(x).sin().sum()
        loss.backward(retain_graph=True)
        loss.backward()
    np.testing.assert_allclose(records[0].grad_output, 2 * wanted[0], rtol=1e-6, atol=0)


@pytest.mark.parametrize("needed", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
def test_gradient_within_multihead_attention(needed, batch_first, x, monkeypatch):
    """That of the heads' output, before the projection, whether torch multiplies matrices or not."""
    torch.manual_seed(2)
    layer = nn.MultiheadAttention(WIDTH, HEADS, batch_first=batch_first)
    before, theirs = [], functional.linear
    x = x if batch_first else x.transpose(0, 1)

    def linear(input, weight, bias=None):
        if weight is layer.out_proj.weight:
            input.retain_grad()
            before.append(input)
        return theirs(input, weight, bias)

    monkeypatch.setattr(functional, "linear", linear)
    layer(x, x, x, need_weights=needed)[0].sin().sum().backward()
    monkeypatch.undo()
    wanted = before[0].grad.view(LENGTH, 2, HEADS, -1).permute(1, 2, 0, 3)
    with capture(layer, "grad_output") as records:
        layer(x, x, x, need_weights=needed)[0].sin().sum().backward()
    np.testing.assert_allclose(records[0].grad_output, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("heads, rows", [(None, None), ([2, 0], slice(1, 5))], ids=str)
@pytest.mark.parametrize("function", [by_name, transposed])
def test_relevance(function, heads, rows, x):
    model = two(function)
    output = model(x)
    for module in model:
        module.output.retain_grad()
    output.sin().sum().backward()
    grads = [module.output.grad for module in model]
    with capture(model, "relevance", heads=heads, rows=rows) as records:
        model(x).sin().sum().backward()
    wanted = []
    for module, grad, given in zip(model, grads, (x, model[0](x)), strict=True):
        value = module.project(given).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)[2]
        wanted.append((module.weights * (grad @ value.mT)).detach())

    for record, full in zip(records, wanted, strict=True):
        part = full[:, slice(None) if heads is None else heads][:, :, slice(None) if rows is None else rows]
        for found, expected in ((record.relevance(sign="both"), part), (record.relevance(), part.clamp(min=0))):
            np.testing.assert_allclose(found.dense(), expected, rtol=0, atol=2e-6)
            assert found.shape == record.shape


@pytest.mark.parametrize("heads", [None, [3, 0]])
def test_relevance_of_grouped_heads(heads):
    class Model(nn.Module):
        def forward(self, query, key, value):
            return early(query, key, value, enable_gqa=True)

    model, query, key, value = Model(), torch.randn(2, 4, 5, 8), torch.randn(2, 2, 6, 8), torch.randn(2, 2, 6, 3)
    with capture(model, "relevance", heads=heads) as records:
        model(query.requires_grad_(), key, value).sin().sum().backward()
    weights = (query @ key.repeat_interleave(2, 1).mT / 8 ** 0.5).softmax(-1)
    value = value.repeat_interleave(2, 1)
    grad = (weights @ value).cos()
    wanted = (weights * (grad @ value.mT)).detach()[:, slice(None) if heads is None else heads]
    np.testing.assert_allclose(records[0].relevance(sign="both").dense(), wanted, rtol=0, atol=2e-6)
