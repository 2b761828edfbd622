"""Rows that attend to lists of keys of their own."""

from dataclasses import dataclass

import numpy as np

from attnc import reference
from attnc.bench import Arrays, Json, Options
from attnc.bench.cases.links import ROWS, Expected
from attnc.testing import Case, exact_attention


@dataclass(frozen=True)
class Selected:
    """Each row names `named` keys, the same for all heads (DeepSeek's sparse attention); `key_indices`."""

    case: Case
    named: int
    options = ()
    contenders = "attnc.bench.contenders.selected"

    @property
    def name(self) -> str:
        return f"{self.case.name} lists of {self.named}"

    @property
    def dtype(self) -> str:
        return self.case.dtype

    @property
    def flops(self) -> int:
        c = self.case
        return 2 * c.batch * c.q_heads * c.q_len * self.named * (c.head_dim + c.value_dim)

    def describe(self) -> Json:
        """Its sizes for the JSON file."""
        names = ("batch", "q_heads", "kv_heads", "q_len", "kv_len", "head_dim", "value_dim")
        return {name: getattr(self.case, name) for name in names} | {"named": self.named, "flops": self.flops}

    def make(self, seed: int) -> tuple[Arrays, Options]:
        """Query, key, value, and the lists ``(1, 1, rows, named)``; no options."""
        arrays, _ = self.case.make(seed)
        order = np.random.default_rng((seed, 1)).random((1, 1, self.case.q_len, self.case.kv_len), np.float32)
        lists = np.argpartition(order, self.named - 1, axis=-1)[..., :self.named]
        return (*arrays, np.ascontiguousarray(lists)), {}

    def expected(self, seed: int) -> Expected:
        """What a contender has to give: each row over its keys alone."""
        (query, key, value, lists), _ = self.make(seed)
        rows = np.unique(np.linspace(0, self.case.q_len - 1, ROWS).astype(np.intp))
        each = [(query[..., row:row + 1, :], *(x[..., np.sort(lists[0, 0, row]), :] for x in (key, value)))
                for row in rows]
        exact = [exact_attention(*three).output for three in each]
        honest = [reference.attention(*three) for three in each]
        return Expected(rows, np.concatenate(exact, -2), np.concatenate(honest, -2), float(abs(value).max()))
