"""Cases of attention: how they are named, those with a drawn mask or bias, and what a contender asks of them."""

from dataclasses import dataclass
from typing import Any, TypeGuard

import numpy as np

from attnc import deberta_relative_index
from attnc.bench import Arrays, Json, Options
from attnc.testing import Case

SHORT = {"float32": "f32", "float64": "f64", "float16": "f16", "bfloat16": "bf16"}
DECODE_ROWS = 8             # up to this many query rows, fetching a key from memory costs more than using it
MEMORY_BYTES = 1 << 28      # beyond every cache
MIN_COPIED = 1 << 20      # a smaller case is one of calls, not of memory
BLOCK, BLOCKS_SEEN = 128, 0.1   # of a mask over blocks: rows and keys of a block, and the share of blocks that are seen
ADDED = ("mask", "bias", "relative_bias", "block_mask")
TABLES = ("relative_key", "relative_query")


def case(
        batch: int, heads: int | tuple[int, int], q_len: int, kv_len: int, head_dim: int, dtype: str = "float32",
        value_dim: int | None = None, **options: Any) -> Case:
    """A case named after its shape; `heads` is one number, or (query heads, key/value heads)."""
    q_heads, kv_heads = heads if isinstance(heads, tuple) else (heads, heads)
    shown = f"{q_heads}/{kv_heads}" if q_heads != kv_heads else q_heads
    value_dim = head_dim if value_dim is None else value_dim
    depths = head_dim if value_dim == head_dim else f"{head_dim}/{value_dim}"
    words = [f"{SHORT[dtype]} {batch},{shown},{q_len},{kv_len},{depths}"]
    words += [name for name, value in options.items() if value is True]
    words += ["window {},{}".format(*options["window"])] if "window" in options else []
    words += options.get("want", ())
    return Case(" ".join(words), batch, q_heads, kv_heads, q_len, kv_len, head_dim, value_dim, dtype,
                tuple(options.items()))


@dataclass(frozen=True)
class DrawnCase(Case):
    """A case with a random mask or bias, which all batch elements share.

    Parameters
    ----------
    drawn : {"mask", "bias", "relative_bias", "tables", "block_mask"}
        A mask allows 7 keys of 8, so that no block of keys can be skipped; a bias is standard normal; tables are those
        of DeBERTa's content-relative terms, with as many rows as the query; a mask over blocks of `BLOCK` rows and keys
        allows `BLOCKS_SEEN` of each row of blocks, the diagonal one among them.
    per_head : bool
        Whether each head has its own, or all share one.
    """

    drawn: str = "mask"
    per_head: bool = False

    def make(self, seed: int) -> tuple[Arrays, Options]:
        """As `Case.make`, with the array among the options."""
        arrays, options = super().make(seed)
        random = np.random.default_rng((seed, 1))
        heads = self.q_heads if self.per_head else 1
        if self.drawn == "relative_bias":
            values = random.standard_normal((heads, self.q_len + self.kv_len - 1), np.float32)
            return arrays, {**options, "relative_bias": values}
        if self.drawn == "tables":
            buckets = max(2, self.q_len // 2)
            tables = {name: random.standard_normal((heads, 2 * buckets, self.head_dim), np.float32) for name in TABLES}
            index = deberta_relative_index(self.q_len, self.kv_len, buckets, 2 * buckets)
            return arrays, {**options, **tables, "relative_index": index}
        if self.drawn == "block_mask":
            return arrays, {**options, "block_mask": (self._blocks(random, heads), BLOCK, BLOCK)}
        shape = 1, heads, self.q_len, self.kv_len
        if self.drawn == "mask":
            return arrays, {**options, "mask": random.random(shape, np.float32) < 7 / 8}
        return arrays, {**options, "bias": random.standard_normal(shape, np.float32)}

    def _blocks(self, random: np.random.Generator, heads: int) -> np.ndarray:
        rows, columns, seen = self._counts()
        order = random.random((1, heads, rows, columns))
        np.put_along_axis(order, np.arange(rows)[:, None] % columns * np.ones((1, heads, 1, 1), int), -1, axis=-1)
        return order.argsort(-1).argsort(-1) < seen

    def _counts(self) -> tuple[int, int, int]:
        """Rows and columns of blocks, and how many of a row are seen."""
        rows, columns = (-(-length // BLOCK) for length in (self.q_len, self.kv_len))
        return rows, columns, max(1, round(BLOCKS_SEEN * columns))

    @property
    def flops(self) -> int:
        """As `Case.flops`, without what a mask over blocks hides."""
        whole = super().flops
        if self.drawn != "block_mask":
            return whole
        _, columns, seen = self._counts()
        return whole * seen // columns


def drawn(what: str, per_head: bool, plain: Case | None = None, words: str | None = None) -> DrawnCase:
    """The case `plain`, by default 1,12,1024,1024,64, with a mask or a bias."""
    p = case(1, 12, 1024, 1024, 64) if plain is None else plain
    words = words or f"{what} {'a head' if per_head else 'shared'}"
    return DrawnCase(f"{p.name} {words}", p.batch, p.q_heads, p.kv_heads, p.q_len, p.kv_len, p.head_dim, p.value_dim,
                     p.dtype, p.options, drawn=what, per_head=per_head)


def added(each: Case, options: Options, rows: np.ndarray | None = None) -> np.ndarray | None:
    """The mask or the bias of a case as other libraries take it: an element for each of some rows (all by default) and
    each key, broadcast over batch and heads; None without either."""
    chosen = np.arange(each.q_len) if rows is None else rows
    for name in ("mask", "bias"):
        if name in options:
            array: np.ndarray = options[name]
            return array if rows is None else array[..., rows, :]
    if "relative_bias" in options:
        places = np.arange(each.kv_len) - chosen[:, None] + each.q_len - 1
        return np.ascontiguousarray(options["relative_bias"][None, :, places])
    if "block_mask" in options:
        blocks, of_rows, of_keys = options["block_mask"]
        return np.ascontiguousarray(blocks[..., chosen[:, None] // of_rows, np.arange(each.kv_len) // of_keys])
    return None


def table_rows(each: Case, options: Options) -> np.ndarray | None:
    """The table row of each query row and key of a case with tables, else None."""
    if "relative_index" not in options:
        return None
    rows: np.ndarray = options["relative_index"][
        np.arange(each.kv_len) - np.arange(each.q_len)[:, None] + each.q_len - 1]
    return rows


def visible(each: Case, options: Json, rows: np.ndarray | None = None) -> np.ndarray | None:
    """Causal and window as one boolean mask of some rows (all by default), bottom-right; None without either."""
    left, right = options.get("window") or (None, None)
    if not options.get("causal") and left is right is None:
        return None
    keys = np.arange(each.kv_len)
    positions = (np.arange(each.q_len) if rows is None else rows)[:, None] + each.kv_len - each.q_len
    keep = np.ones((len(positions), each.kv_len), bool)
    if options.get("causal"):
        keep &= keys <= positions
    if left is not None:
        keep &= keys >= positions - left
    if right is not None:
        keep &= keys <= positions + right
    return keep


def aligned(each: Case, options: Json) -> bool:
    """Whether the causal triangle of a peer that aligns it top-left says all that `visible` would say."""
    return bool(options.get("causal")) and each.q_len == each.kv_len and not options.get("window")


def reads(each: object) -> TypeGuard[Case]:
    """Whether so few rows use a key once it has been read that memory decides, not arithmetic."""
    return getattr(each, "q_len", DECODE_ROWS + 1) <= DECODE_ROWS


def copies(each: object, arrays: Arrays) -> list[Arrays]:
    """Inputs for calls in turn: where reading binds a case, more of them than the caches hold."""
    if not reads(each) or each.bytes < MIN_COPIED:
        return [arrays]
    return [arrays, *(tuple(array.copy() for array in arrays) for _ in range(MEMORY_BYTES // each.bytes))]


def wanted(options: Json) -> tuple[str, ...]:
    """The results a case asks for beside the output, always as a tuple."""
    want = options.get("want", ())
    return (want,) if isinstance(want, str) else tuple(want)
