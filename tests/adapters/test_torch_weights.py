"""Weights of tensors that change in place, and those that a capture keeps."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from attnc.integrations.torch import attention_weights  # noqa: E402
from attnc.integrations.transformers import capture, register  # noqa: E402

pytestmark = pytest.mark.peers


def test_a_tensor_that_changes_in_place():
    query, sinks = torch.randn(4, 30, 8), torch.zeros(4)
    W = attention_weights(query, query, sinks=sinks)
    W.max()
    sinks.add_(1)
    with pytest.raises(RuntimeError, match=r"^sinks changed since the first answer"):
        W.max()
    query.mul_(2)
    with pytest.raises(RuntimeError, match=r"^query and key and sinks changed"):
        W.T @ np.ones(30)


def test_weights_of_a_capture_outlive_the_model_run():
    """Query and key are copies; of the other arrays it is known what they were in this call."""
    config = transformers.BertConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    model = transformers.BertModel._from_config(config, attn_implementation=register()).eval()
    mask = torch.ones(1, 10, dtype=torch.long)
    mask[0, 8:] = 0
    with torch.no_grad(), capture(model, ("weights", "entropy")) as records:
        model(torch.arange(100, 110)[None], attention_mask=mask)
        model(torch.arange(110, 120)[None], attention_mask=mask)
    assert len(records) == 4
    for record in records:
        np.testing.assert_array_equal(record.weights.entropy(), record.entropy)
    with torch.no_grad(), capture(model, "weights") as records:
        model(torch.arange(100, 110)[None], attention_mask=mask)
    W = records[0].weights
    held = {name: x for name, x in W._a.arrays.items() if name not in ("query", "key")}
    assert held
    for name, x in held.items():
        x.flags.writeable = True
        x[...] = ~x if x.dtype == bool else x + 1
        with pytest.raises(RuntimeError, match=f"^{name} changed since the first answer"):
            W.max()
        x[...] = ~x if x.dtype == bool else x - 1
    W.max()
