"""Small models with attention, the names that `capture` replaces, and a fixture that they come back."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from attnc.integrations.torch import attention

NAMES = [(nn.Module, "_call_impl"), (nn.MultiheadAttention, "forward"), (nn.TransformerEncoderLayer, "forward"),
         (nn.TransformerEncoder, "forward"), (functional, "scaled_dot_product_attention"),
         (functional, "multi_head_attention_forward"), (torch, "_native_multi_head_attention"),
         (torch, "_transformer_encoder_layer_fwd")]
THEIRS = [getattr(*name) for name in NAMES]
LENGTH, WIDTH, HEADS = 7, 32, 4


@pytest.fixture(autouse=True)
def restored():
    yield
    assert [getattr(*name) for name in NAMES] == THEIRS
    assert torch._C._len_torch_function_stack() == 0


@pytest.fixture
def x():
    return torch.randn(2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(0))


def by_name(*args, **options):
    return functional.scaled_dot_product_attention(*args, **options)


class Attention(nn.Module):
    """Causal attention of one width, by any function; keeps its own weights."""

    def __init__(self, function=by_name, dropout=0.0):
        super().__init__()
        self.project, self.function, self.dropout = nn.Linear(WIDTH, 3 * WIDTH), function, dropout

    def forward(self, x):
        query, key, value = self.project(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        scores = query @ key.mT / query.shape[-1] ** 0.5
        self.weights = scores.masked_fill(torch.ones(x.shape[1], x.shape[1]).triu(1).bool(), -torch.inf).softmax(-1)
        options = {"dropout_p": self.dropout} if self.dropout and self.training else {}
        found = self.function(query, key, value, is_causal=True, **options)
        self.output = found
        return found.transpose(1, 2).flatten(2)


def two(function=by_name):
    torch.manual_seed(1)
    return nn.Sequential(Attention(function), Attention(function))


def assert_close(found, wanted):
    np.testing.assert_allclose(found, np.asarray(wanted), rtol=0, atol=1e-6)


class Twice(nn.Module):
    """One module that runs two times in a forward pass."""

    def __init__(self):
        super().__init__()
        self.shared, self.head = Attention(), Attention()

    def forward(self, x):
        return self.head(self.shared(self.shared(x)))

    def steps(self, x):
        return self(self(x))


def places(records):
    return [(record.layer, record.call, record.index) for record in records]


def by_options(query, key, value, is_causal=False):
    return attention(query, key, value, causal=is_causal, q_offset=0)


def transposed(query, key, value, is_causal=False):
    operands = (z.transpose(1, 2) for z in (query, key, value))
    return attention(*operands, causal=is_causal, q_offset=0, layout="bnhd", want="lse").output.transpose(1, 2)


PADDING = torch.arange(LENGTH) >= torch.tensor([[LENGTH], [5]])
CAUSAL = torch.ones(LENGTH, LENGTH).triu(1).bool()
