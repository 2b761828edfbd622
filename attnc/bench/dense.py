"""Dense weights alone, written to memory that is used again for every call: their cases and contenders."""

from dataclasses import dataclass

import numpy as np

import attnc
from attnc import reference
from attnc.bench.links import ROWS, Expected
from attnc.testing import Case, exact_attention


@dataclass(frozen=True)
class DenseWeights:
    """`attention_weights` of a case without options, into an array that is there."""

    case: Case

    @property
    def name(self) -> str:
        return f"{self.case.name} attention_weights, memory used again"

    @property
    def dtype(self) -> str:
        return self.case.dtype

    options = ()

    def describe(self) -> dict:
        """Its sizes for the JSON file."""
        names = ("batch", "q_heads", "kv_heads", "q_len", "kv_len", "head_dim")
        return {name: getattr(self.case, name) for name in names}

    def make(self, seed: int):
        """Query, key and the value of the plain call beside it; no options."""
        return self.case.make(seed)

    def expected(self, seed: int) -> Expected:
        """What a contender has to give."""
        (query, key, _), _ = self.make(seed)
        rows = np.unique(np.linspace(0, query.shape[-2] - 1, ROWS).astype(np.intp))
        few = query[..., rows, :]
        return Expected(rows, exact_attention(few, key, key).weights, reference.attention_weights(few, key), 1.0)


def _room(case) -> np.ndarray:
    one = case.case
    return np.empty((one.batch, one.q_heads, one.q_len, one.kv_len), np.dtype(one.dtype))


# The contenders of peers.py, by the same names.

def setup_attnc(case, arrays, options, threads):
    """The package itself."""
    query, key, out = *arrays[:2], _room(case)
    return lambda: attnc.attention_weights(query, key, out=out, num_threads=threads)


def setup_numpy(case, arrays, options, threads):
    """What one writes with NumPy: all in one array."""
    query, key, out = *arrays[:2], _room(case)
    scale = query.dtype.type(case.case.head_dim ** -0.5)

    def call():
        np.matmul(query * scale, key.swapaxes(-1, -2), out=out)
        np.subtract(out, out.max(-1, keepdims=True), out=out)
        np.exp(out, out=out)
        return np.divide(out, out.sum(-1, keepdims=True), out=out)

    return call


def setup_torch(case, arrays, options, threads):
    """``torch.matmul`` and ``torch.softmax``, each into a tensor that is there."""
    from attnc.bench.peers import from_torch, import_torch, to_torch

    torch = import_torch(threads)
    query, key = (to_torch(torch, array) for array in arrays[:2])
    scores, out = (to_torch(torch, _room(case)) for _ in range(2))
    scale = case.case.head_dim ** -0.5

    def call():
        with torch.inference_mode():
            torch.matmul(query * scale, key.transpose(-1, -2), out=scores)
            return from_torch(torch, torch.softmax(scores, -1, out=out))

    return call
