"""Cases whose keys and values are held between calls: in an int8 cache, as shared latents, in a file."""

import tempfile
import weakref
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from attnc import reference
from attnc.bench import Arrays, Json, Options
from attnc.bench.cases.links import Expected
from attnc.testing import Case, exact_attention, standard_normal

CONTENDERS = "attnc.bench.contenders.caches"


@dataclass(frozen=True)
class _Held:
    """What the cases have in common: sizes and inputs are those of `case`."""

    case: Case
    options = ()
    contenders = CONTENDERS

    @property
    def dtype(self) -> str:
        return self.case.dtype

    @property
    def flops(self) -> int:
        return self.case.flops

    def describe(self) -> Json:
        """Its sizes for the JSON file."""
        names = ("batch", "q_heads", "kv_heads", "q_len", "kv_len", "head_dim", "value_dim")
        return {name: getattr(self.case, name) for name in names}

    def make(self, seed: int) -> tuple[Arrays, Options]:
        """Query, key and value in the dtype of the query; no options."""
        return self.case.make(seed)


@dataclass(frozen=True)
class Int8Cache(_Held):
    """`KVCache.attend` over int8 rows, for a query of another dtype."""

    @property
    def name(self) -> str:
        return f"{self.case.name} int8 cache"

    @property
    def q_len(self) -> int:
        return self.case.q_len

    @property
    def bytes(self) -> int:
        """Of rows and their scales, and of query and output."""
        c = self.case
        rows = c.batch * c.kv_heads * c.kv_len * (c.head_dim + c.value_dim + 2 * 4)
        return rows + c.batch * c.q_heads * c.q_len * (c.head_dim + c.value_dim) * 4

    def expected(self, seed: int) -> Expected:
        """What a contender has to give: attention over the numbers that the rows stand for."""
        (query, key, value), _ = self.make(seed)
        batch, heads, length, dim = key.shape
        cache = reference.KVCache(batch, heads, dim, value.shape[-1], capacity=length, dtype=np.int8)
        cache.append(key, value)
        exact = exact_attention(query.astype(np.float64), cache.keys, cache.values).output
        return Expected(slice(None), exact, np.asarray(cache.attend(query)), float(abs(value).max()))


@dataclass(frozen=True)
class Latent(_Held):
    """Absorbed multi-head latent attention: all query heads read one latent, whose first columns are the values."""

    @property
    def name(self) -> str:
        return f"{self.case.name} shared cache"

    def make(self, seed: int) -> tuple[Arrays, Options]:
        """Query, latents, and the view of them that is the values."""
        (query, key, _), options = self.case.make(seed)
        return (query, key, key[..., :self.case.value_dim]), options

    def expected(self, seed: int) -> Expected:
        """What a contender has to give."""
        (query, key, value), _ = self.make(seed)
        return Expected(slice(None), exact_attention(query, key, value).output,
                        reference.attention(query, key, value), float(abs(value).max()))


@dataclass(frozen=True)
class Mapped(_Held):
    """Keys and values in a file, read chunk by chunk through a new memory map in each call."""

    chunk: int = 4096

    @property
    def name(self) -> str:
        return f"{self.case.name} from a file"

    @property
    def bytes(self) -> int:
        """Of the file."""
        c = self.case
        return c.batch * c.kv_heads * c.kv_len * (c.head_dim + c.value_dim) * 4

    def make(self, seed: int) -> tuple[Arrays, Options]:
        """Query in memory, key and value in temporary files that go with their arrays."""
        c, random = self.case, np.random.default_rng(seed)
        query = standard_normal(random, (c.batch, c.q_heads, c.q_len, c.head_dim), self.dtype)
        rows = [_in_a_file(standard_normal(random, (c.batch, c.kv_heads, c.kv_len, dim), self.dtype))
                for dim in (c.head_dim, c.value_dim)]
        return (query, *rows), {}

    def expected(self, seed: int) -> Expected:
        """What a contender has to give."""
        (query, key, value), _ = self.make(seed)
        return Expected(slice(None), exact_attention(query, key, value).output,
                        reference.attention(query, key, value), float(abs(value).max()))


def _in_a_file(array: np.ndarray) -> np.memmap:
    """The array in a temporary file, which is removed with the map."""
    with tempfile.NamedTemporaryFile(prefix="attnc-bench-", suffix=".raw", delete=False) as file:
        array.tofile(file)
    mapped = np.memmap(file.name, array.dtype, "r", shape=array.shape)
    weakref.finalize(mapped, Path(file.name).unlink)
    return mapped


def again(mapped: np.ndarray) -> np.ndarray:
    """A new map of the same file, whose pages have to be found again; private, as torch wants memory it may write."""
    assert isinstance(mapped, np.memmap) and mapped.filename is not None
    return np.memmap(mapped.filename, mapped.dtype, "c", shape=mapped.shape)
