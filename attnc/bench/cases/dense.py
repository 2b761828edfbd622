"""Dense weights alone, written to memory that is used again for every call."""

from dataclasses import dataclass

import numpy as np

from attnc import reference
from attnc.bench import Arrays, Json, Options
from attnc.bench.cases.links import ROWS, Expected
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
    contenders = "attnc.bench.contenders.dense"

    def describe(self) -> Json:
        """Its sizes for the JSON file."""
        names = ("batch", "q_heads", "kv_heads", "q_len", "kv_len", "head_dim")
        return {name: getattr(self.case, name) for name in names}

    def make(self, seed: int) -> tuple[Arrays, Options]:
        """Query, key and the value of the plain call beside it; no options."""
        return self.case.make(seed)

    def expected(self, seed: int) -> Expected:
        """What a contender has to give."""
        (query, key, _), _ = self.make(seed)
        rows = np.unique(np.linspace(0, query.shape[-2] - 1, ROWS).astype(np.intp))
        few = query[..., rows, :]
        return Expected(rows, exact_attention(few, key, key).weights, reference.attention_weights(few, key), 1.0)
