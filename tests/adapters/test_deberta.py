"""DeBERTa with attnc's attention, and T5's bias by distance: what their own code gives, with gradients."""

import copy

import numpy as np
import pytest

import attnc
from attnc.testing import assert_within

pytestmark = pytest.mark.peers
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from models import inputs_of, model_of  # noqa: E402
from transformers.models.deberta_v2 import modeling_deberta_v2  # noqa: E402

from attnc.integrations import transformers as ours  # noqa: E402
from attnc.integrations.transformers import _distances  # noqa: E402

SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 99,
         "relative_attention": True, "position_biased_input": False, "hidden_dropout_prob": 0.0,
         "attention_probs_dropout_prob": 0.0, "type_vocab_size": 0, "max_relative_positions": 32}
KINDS = {
    "v3": ("DebertaV2", {"position_buckets": 8, "share_att_key": True, "pos_att_type": ["p2c", "c2p"]}),
    "v2 of its own vectors": ("DebertaV2", {"pos_att_type": ["c2p", "p2c"], "norm_rel_ebd": "layer_norm"}),
    "v2 c2p": ("DebertaV2", {"position_buckets": 8, "pos_att_type": ["c2p"]}),
    "v2 without terms": ("DebertaV2", {"pos_att_type": []}),
    "v2 without positions": ("DebertaV2", {"relative_attention": False, "position_biased_input": True}),
    "v1": ("Deberta", {"pos_att_type": ["c2p", "p2c"]}),
    "v1 p2c": ("Deberta", {"pos_att_type": ["p2c"], "max_relative_positions": 8}),
    "v1 talking heads": ("Deberta", {"pos_att_type": ["c2p"], "talking_head": True}),
}


def model(name, dtype=torch.float32):
    family, options = KINDS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SMALL | options)
    return getattr(transformers, f"{family}Model")(config).eval().to(dtype)


def run(one, inputs, keep):
    """Hidden states and weights of the rows that are no padding, and gradients of all parameters."""
    found = one(**inputs, output_attentions=True)
    last = found.last_hidden_state[keep]
    last.backward(torch.linspace(-1, 1, last.numel(), dtype=last.dtype).view(last.shape))
    results = {"last": last, **{f"weights {i}": x.transpose(1, 2)[keep] for i, x in enumerate(found.attentions)},
               **{name: x.grad for name, x in one.named_parameters() if x.grad is not None}}
    return {name: x.detach().double().numpy() for name, x in results.items()}


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", KINDS)
def test_as_its_own_code(name, padded):
    """Within the tolerance of its own error, against the model in float64."""
    torch.manual_seed(1)
    inputs = {"input_ids": torch.randint(0, 99, (2, 40)), "attention_mask": torch.ones(2, 40, dtype=torch.long)}
    if padded:
        inputs["attention_mask"][1, 23:] = 0
    keep = inputs["attention_mask"].bool()
    exact, honest, got = (run(each, inputs, keep) for each in (
        model(name, torch.float64), model(name), ours.patch_deberta(model(name))))
    assert exact.keys() == honest.keys() == got.keys()
    for part, x in got.items():
        assert_within(x, exact[part], honest[part], scale=max(1.0, np.abs(exact[part]).max()), name=part,
                      eps_dtype=np.float32)


def test_it_is_attnc_that_runs(monkeypatch):
    """With the terms of each layer; talking heads run their own code."""
    calls = []
    monkeypatch.setattr(attnc, "attention", lambda *a, f=attnc.attention, **k: calls.append(k) or f(*a, **k))
    ids = torch.arange(20)[None]
    with torch.no_grad():
        ours.patch_deberta(model("v3"))(ids)
        assert [{"relative_key", "relative_query", "relative_index"} <= call.keys() for call in calls] == [True, True]
        ours.patch_deberta(model("v1 talking heads"))(ids)
        model("v3")(ids)
    assert len(calls) == 2


def test_its_index_is_that_of_the_models():
    for buckets, positions, length in ((8, 32, 70), (256, 512, 700), (16, 100, 3), (0, 20, 50)):
        rows = torch.zeros(1, length, 1)
        found = modeling_deberta_v2.build_relative_position(rows, rows, buckets, positions)[0].numpy()
        span = buckets or positions
        wanted = np.clip(np.concatenate([found[::-1, 0], found[0, 1:]]) + span, 0, 2 * span - 1)
        np.testing.assert_array_equal(attnc.deberta_relative_index(length, length, buckets, positions), wanted)


def test_positions_of_ones_own_run_the_models_code():
    one, patched = model("v3"), ours.patch_deberta(model("v3"))
    states, mask = torch.randn(1, 12, 32), torch.ones(1, 1, 12, 12)
    layers = [each.encoder.layer[0].attention.self for each in (one, patched)]
    vectors = one.encoder.get_rel_embedding()
    for positions in (torch.randint(-5, 5, (1, 12, 12)), torch.arange(12)[:, None].expand(12, 12)):
        with torch.no_grad():
            wanted, got = (each(states, mask, relative_pos=positions, rel_embeddings=vectors)[0] for each in layers)
        assert torch.equal(wanted, got)


def test_copies_and_refusals():
    patched = ours.patch_deberta(model("v3"))
    ids = torch.arange(15)[None]
    with torch.no_grad():
        assert torch.equal(copy.deepcopy(patched)(ids)[0], patched(ids)[0])
    with pytest.raises(ValueError, match="Linear has no DisentangledSelfAttention"):
        ours.patch_deberta(torch.nn.Linear(2, 2))
    patched.encoder.layer[0].attention.self.dropout.p = 0.1
    with pytest.raises(ValueError, match=r"no dropout of attention weights; the model is in training with 0\.1"):
        patched.train()(ids)


def test_t5_goes_by_distance(monkeypatch):
    """Encoder, decoder and cross-attention have a bias for each distance, each found once for all its layers."""
    ours.register()
    calls, compared = [], []
    monkeypatch.setattr(attnc, "attention", lambda *a, f=attnc.attention, **k: calls.append(k) or f(*a, **k))
    equal = torch.equal
    monkeypatch.setattr(_distances.torch, "equal", lambda *x: compared.append(x) or equal(*x))
    inputs, _ = inputs_of("T5")
    with torch.no_grad():
        model_of("T5", attention="attnc")(**inputs)
    assert len(calls) == 6 and all("relative_bias" in call for call in calls) and len(compared) == 3


def test_of_distances():
    bias = torch.randn(1, 3, 9)
    dense = bias[..., torch.arange(6) - torch.arange(4)[:, None] + 3]
    assert torch.equal(_distances.of_distances(dense), bias)
    dense[0, 1, 2, 2] += 1              # a change is noticed
    assert _distances.of_distances(dense) is None
    assert _distances.of_distances(torch.randn(1, 3, 1, 5)) is None
    learnt = torch.nn.Parameter(bias)
    dense = learnt[..., torch.arange(6) - torch.arange(4)[:, None] + 3]
    grad = torch.randn(1, 3, 9)
    _distances.of_distances(dense).backward(grad)
    assert torch.equal(learnt.grad, grad)
