"""capture(): each way to call attention is seen, with its weights, and the model does not notice."""
# ruff: noqa: E402, F401, F811    (fixtures of capturing.py)


import numpy as np
import pytest

pytestmark = pytest.mark.peers
torch = pytest.importorskip("torch")
pytest.importorskip("ml_dtypes")

from capturing import (
    CAUSAL,
    HEADS,
    LENGTH,
    PADDING,
    WIDTH,
    Attention,
    assert_close,
    by_name,
    by_options,
    restored,
    transposed,
    two,
    x,
)
from torch import nn
from torch.nn import functional
from torch.nn.functional import multi_head_attention_forward as early_mha
from torch.nn.functional import scaled_dot_product_attention as early
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import attnc
from attnc.integrations.torch import capture, patch
from attnc.integrations.torch import scaled_dot_product_attention as ours

# What it sees: each way to call attention gives the weights that the module computes for itself, and its own output.

@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("function", [
    by_name, early, torch._C._nn.scaled_dot_product_attention, torch.ops.aten.scaled_dot_product_attention,
    torch.ops.aten.scaled_dot_product_attention.default, ours, by_options, transposed],
    ids=["name", "imported", "torch", "packet", "overload", "ours", "options", "bnhd"])
def test_sees_every_name(function, training, x):
    model = two(function).train(training)
    wanted = model(x)
    for context in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with context(), capture(model, ("weights", "entropy")) as records:
            got = model(x)
        assert torch.equal(got, wanted)
        assert [(r.layer, r.call, r.index, r.shape) for r in records] == [
            ("0", 0, 0, (2, HEADS, LENGTH, LENGTH)), ("1", 0, 1, (2, HEADS, LENGTH, LENGTH))]
        for record, module in zip(records, model, strict=True):
            weights = module.weights.detach().double()
            assert_close(record.weights.dense(), weights)
            assert_close(record.entropy, torch.special.entr(weights).sum(-1))


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("options", [{}, {"bias": False}, {"kdim": 8, "vdim": 8}, {"add_bias_kv": True},
                                     {"add_zero_attn": True}], ids=str)
def test_multihead_attention(options, grad, training, average, x):
    """With weights and without: the same numbers come out, and the weights are those that torch gives."""
    torch.manual_seed(2)
    layer = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, **options).train(training)
    key = torch.randn(2, 5, 8) if "kdim" in options else x
    mask = torch.ones(LENGTH, key.shape[1]).triu(1).bool()
    padding = torch.zeros(2, key.shape[1]).bool()
    padding[0, 4:] = True
    for masks in ({}, {"attn_mask": mask}, {"key_padding_mask": padding},
                  {"attn_mask": mask, "key_padding_mask": padding}, {"attn_mask": mask, "is_causal": True}):
        for needed in (True, False):
            how = {**masks, "need_weights": needed, "average_attn_weights": average}
            with torch.set_grad_enabled(grad):
                wanted = layer(x, key, key, **how)
                with capture(layer, "weights") as records:
                    got = layer(x, key, key, **how)
                weights = layer(x, key, key, **masks, average_attn_weights=False)[1]
            assert torch.equal(got[0], wanted[0]) and (got[1] is None) == (not needed)
            [record] = records
            assert (record.layer, record.call, record.index) == ("", 0, 0)
            # Without weights torch takes the hint before the mask: its row 0 sees key 0 alone, not the added key.
            if not (masks.get("is_causal") and not needed and any(name.startswith("add") for name in options)):
                assert_close(record.weights.dense(), weights.detach())


@pytest.mark.parametrize("needed", [True, False])
def test_multihead_attention_of_one_sequence(needed):
    layer, x = nn.MultiheadAttention(WIDTH, HEADS), torch.randn(LENGTH, WIDTH)
    with capture(layer, "weights") as records:
        output, weights = layer(x, x, x, need_weights=needed)
    assert torch.equal(output, layer(x, x, x, need_weights=needed)[0])
    assert records[0].shape == (1, HEADS, LENGTH, LENGTH)
    if needed:
        assert_close(records[0].weights.dense()[0].mean(0), weights.detach())


class Pool(nn.Module):
    """Calls the function of MultiheadAttention with the weights of one, as CLIP's pooling does."""

    def __init__(self, function):
        super().__init__()
        self.attention, self.function = nn.MultiheadAttention(WIDTH, HEADS), function

    def forward(self, x, needed):
        a, x = self.attention, x.transpose(0, 1)
        found, weights = self.function(x, x, x, WIDTH, HEADS, a.in_proj_weight, a.in_proj_bias, None, None, False, 0.0,
                                       a.out_proj.weight, a.out_proj.bias, need_weights=needed)
        return found, weights


@pytest.mark.parametrize("needed", [True, False])
@pytest.mark.parametrize("function", [early_mha, lambda *args, **options: functional.multi_head_attention_forward(
    *args, **options)], ids=["imported", "name"])
def test_the_function_of_multihead_attention(function, needed, x):
    model = Pool(function)
    wanted = model(x, needed)[0]
    with capture(model, "weights") as records:
        output, _ = model(x, needed)
    assert torch.equal(output, wanted) and len(records) == 1
    assert_close(records[0].weights.dense().mean(1), model(x, True)[1].detach())


def encoder(**options):
    torch.manual_seed(3)
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 64, batch_first=True, dropout=0.0, **options)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


@pytest.mark.parametrize("masks", [{}, {"mask": CAUSAL}, {"src_key_padding_mask": PADDING},
                                   {"mask": CAUSAL, "src_key_padding_mask": PADDING}], ids=lambda x: " ".join(x))
@pytest.mark.parametrize("norm_first", [True, False])
def test_encoder_in_evaluation_takes_its_fused_layer(norm_first, masks, x, monkeypatch):
    """The fused layer and the others give the same weights; fused is what runs, also where it is watched."""
    model, fused = encoder(norm_first=norm_first), []
    theirs = torch._transformer_encoder_layer_fwd
    monkeypatch.setattr(torch, "_transformer_encoder_layer_fwd", lambda *args: [fused.append(1), theirs(*args)][1])
    found = []
    for training in (True, False):
        model.train(training)
        with torch.no_grad():
            wanted = model(x, **masks)
            with capture(model, "weights") as records:
                got = model(x, **masks)
        assert torch.equal(got, wanted)
        assert [record.layer for record in records] == ["layers.0.self_attn", "layers.1.self_attn"]
        found.append([record.weights.dense() for record in records])
    assert len(fused) == 4
    rows = ... if "src_key_padding_mask" not in masks else np.broadcast_to(
        ~PADDING.numpy()[:, None, :, None], found[0][0].shape)      # what padding sees is of padding
    for slow, fast in zip(*found, strict=True):
        assert_close(fast[rows], slow[rows])
    hidden = np.zeros((2, 1, LENGTH, LENGTH), bool)
    if "mask" in masks:
        hidden |= CAUSAL.numpy()
    if "src_key_padding_mask" in masks:
        hidden |= PADDING.numpy()[:, None, None]
    assert (found[1][0][np.broadcast_to(hidden, found[1][0].shape)] == 0).all() and found[1][0].sum() > 50


def test_multihead_attention_in_evaluation_takes_its_fused_function(x, monkeypatch):
    layer, fused = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True).eval(), []
    theirs = torch._native_multi_head_attention
    monkeypatch.setattr(torch, "_native_multi_head_attention", lambda *args: [fused.append(1), theirs(*args)][1])

    class Layer(nn.MultiheadAttention):
        def forward(self, x):
            return super().forward(x, x, x)[0]

    class Direct(nn.Module):
        def forward(self, x):
            return layer.forward(x, x, x)[0]

    direct, derived = Direct(), Layer(WIDTH, HEADS, batch_first=True).eval()
    direct.layer = layer
    with torch.no_grad():
        for model in (direct, derived):
            wanted = model(x)
            with capture(model, "entropy") as records:
                assert torch.equal(model(x), wanted)
            assert len(records) == 1
    assert len(fused) == 4


def test_decoder_and_cross_attention(x):
    model, memory = nn.Transformer(WIDTH, HEADS, 1, 2, 64, batch_first=True).eval(), torch.randn(2, 5, WIDTH)
    with torch.no_grad():
        wanted = model(memory, x)
        with capture(model, "entropy") as records:
            assert torch.equal(model(memory, x), wanted)
    assert [(r.layer, r.index, r.shape[-2:]) for r in records] == [
        ("encoder.layers.0.self_attn", 0, (5, 5)), ("decoder.layers.0.self_attn", 1, (7, 7)),
        ("decoder.layers.0.multihead_attn", 2, (7, 5)), ("decoder.layers.1.self_attn", 3, (7, 7)),
        ("decoder.layers.1.multihead_attn", 4, (7, 5))]


class Ranks(nn.Module):
    def forward(self, x):
        return by_name(x, x, x)


@pytest.mark.parametrize("shape", [(LENGTH, 8), (HEADS, LENGTH, 8), (2, 3, HEADS, LENGTH, 8)])
def test_ranks(shape):
    x, model = torch.randn(shape), Ranks()
    with capture(model, "weights") as records:
        model(x)
    wanted = (x @ x.mT / 8 ** 0.5).softmax(-1)
    assert_close(records[0].weights.dense(), wanted if len(shape) > 2 else wanted[None])


def test_masks_scale_groups_and_values_of_another_width():
    class Model(nn.Module):
        def forward(self, query, key, value, **options):
            return early(query, key, value, **options)

    model, mask = Model(), torch.rand(2, 1, 5, 6) < 0.7
    mask[..., 0] = True
    query, key, value = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 6, 8), torch.randn(2, 2, 6, 3)
    with capture(model, "weights") as records:
        model(query, key, value, attn_mask=mask, scale=0.7, enable_gqa=True)
        model(query, key, value, attn_mask=mask.float().log() + 1, scale=0.7, enable_gqa=True)
    scores = (query @ key.repeat_interleave(2, 1).mT * 0.7).masked_fill(~mask, -torch.inf)
    for record in records:
        assert_close(record.weights.dense(), scores.softmax(-1))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(dtype, x):
    model = two().to(dtype)
    with torch.no_grad(), capture(model, "weights") as records:
        model(x.to(dtype))
    for record, module in zip(records, model, strict=True):
        tolerance = {torch.float64: 1e-14, torch.float32: 1e-6}.get(dtype, 8e-3)
        np.testing.assert_allclose(record.weights.dense(), module.weights.double(), rtol=0, atol=tolerance)


def test_autocast(x):
    """The tensors of the attention are those that it computes with."""
    model, x = Ranks(), x.unflatten(-1, (HEADS, -1)).transpose(1, 2)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        wanted = model(x)
        with capture(model, "weights") as records:
            assert torch.equal(model(x), wanted)
    rounded = x.bfloat16().float()
    assert_close(records[0].weights.dense(), (rounded @ rounded.mT / 8 ** 0.5).softmax(-1))


def test_dropout_is_not_in_the_weights(x):
    model = nn.Sequential(Attention(dropout=0.5)).train()
    torch.manual_seed(5)
    wanted = model(x)
    torch.manual_seed(5)
    with capture(model, "weights") as records:
        assert torch.equal(model(x), wanted)
    assert_close(records[0].weights.dense(), model[0].weights.detach())


def test_within_patch_the_output_is_attncs(x):
    model = two(by_name)
    with patch():
        wanted = model(x)
        with capture(model, "weights") as records:
            assert torch.equal(model(x), wanted)
    assert len(records) == 2
    with capture(model, "weights") as records, patch():
        assert torch.equal(model(x), wanted)
    assert len(records) == 2


@pytest.mark.parametrize("function", [ours, by_options, transposed])
def test_statistics_beside_the_output_of_attnc(function, x, monkeypatch):
    """Without gradients they are computed with it, and are the same; the output keeps its bits."""
    sweeps, theirs = [], attnc.AttentionWeights.summary
    monkeypatch.setattr(attnc.AttentionWeights, "summary",
                        lambda self, **asked: [sweeps.append(1), theirs(self, **asked)][1])
    model, what = two(function), ("lse", "entropy", "argmax")
    found = []
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            wanted = model(x)
            with capture(model, what) as records, capture(model[1], "max") as part:
                assert torch.equal(model(x), wanted)
            found.append([*records, *part])
        assert len(sweeps) == (3 if grad else 0)
    for name in (*what, "max"):
        for beside, swept in zip(*found, strict=True):
            if hasattr(swept, name):
                assert getattr(beside, name).shape == getattr(swept, name).shape == (2, HEADS, LENGTH)
                assert_close(getattr(beside, name), getattr(swept, name))
    with torch.no_grad(), capture(model, ("max", "topk")), capture(model, "max", heads=1), \
            capture(model, "entropy", rows=slice(2)):
        model(x)
    assert len(sweeps) == 9
    x = torch.randn(LENGTH, 8)
    model = Ranks()
    with torch.no_grad(), patch(), capture(model, "max") as records:
        model(x)
    assert records[0].max.shape == (1, LENGTH) and len(sweeps) == 9


def test_under_other_modes(x):
    class Mode(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    layer = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True).eval()
    with Mode(), capture(layer, "weights") as records:
        layer(x, x, x)
        layer(x, x, x, need_weights=False)
    with torch.device("cpu"), torch.no_grad(), capture(layer, "weights") as more:
        layer(x, x, x)
        with Mode():
            layer(x, x, x, need_weights=False)
    found = [record.weights.dense() for record in (*records, *more)]
    assert len(found) == 4
    for each in found[1:]:
        assert_close(each, found[0])


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_is_seen_once(reentrant, x):
    model = two()

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = model

        def forward(self, x):
            for part in self.parts:
                x = checkpoint(part, x, use_reentrant=reentrant)
            return x

    whole = Model()
    with capture(whole, "weights") as records:
        whole(x.requires_grad_()).sum().backward()
    assert [record.layer for record in records] == ["parts.0", "parts.1"]
