"""Check the arguments over packed tokens: where each sequence starts and ends, and what belongs to it."""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .._types import PagedOptions, VarlenOptions
from .arrays import as_array, check_fits, float_array, native_floats, saturated
from .attention import Args, attention_args
from .backward import GRADIENTS, BackwardArgs, gradient_args
from .options import bools, check_alibi_slopes, check_both_segments, check_table_rows, integers
from .output import check_apart
from .pages import Pages, open_pages
from .scalars import MAX_OFFSET, check_want
from .spellings import unexpected

# options of which each sequence has its own array
RAGGED = ("mask", "key_indices", "bias", "relative_bias", "relative_index", "k_positions")
TABLES = "relative_key", "relative_query"       # shared by all sequences
OF_TOKENS = {"key_mask": 1, "q_segments": 0, "k_segments": 1}   # options over packed tokens: 0 of queries, 1 of keys


@dataclass(slots=True)
class VarlenArgs:
    """Arguments of the tokens as one sequence, and the first row and the length of each sequence (int64).

    `options` are those of `attention` that all sequences share, `own` those that each has for itself. `each` are the
    arguments of every sequence alone, its tokens (length, heads, dim); None where the sequences share calls. With
    `pages`, `k_starts` are those of options over keys, one sequence after another.
    """

    args: Args
    q_starts: np.ndarray
    k_starts: np.ndarray
    q_lengths: np.ndarray
    kv_lengths: np.ndarray
    options: dict[str, Any]
    own: dict[str, Any]
    each: list[Args] | None
    pages: Pages | None

    def rows(self, i: int) -> slice:
        """The packed rows of sequence i."""
        return slice(int(self.q_starts[i]), int(self.q_starts[i] + self.q_lengths[i]))

    def keys(self, i: int) -> slice:
        """The packed keys of sequence i."""
        return slice(int(self.k_starts[i]), int(self.k_starts[i] + self.kv_lengths[i]))

    def tokens(self, name: str) -> np.ndarray:
        """Query, key or value as floats, (tokens, heads, dim)."""
        x: np.ndarray = getattr(self.args, name).swapaxes(-2, -3)
        return x

    def alone(self) -> Iterator[Args]:
        """Check the arguments of each sequence, and name it where an option does not fit it.

        Keys and values in pages are those of all sequences.
        """
        a, query, key = self.args, self.tokens("query"), self.tokens("key")
        value = None if a.value is None else self.tokens("value")
        without_terms = {name: x for name, x in self.options.items() if name not in TABLES}
        for i in range(len(self.q_lengths)):
            rows, keys = self.rows(i), self.keys(i)
            own = {name: x[i] if name not in OF_TOKENS else x[keys if OF_TOKENS[name] else rows]
                   for name, x in self.own.items()}
            held: list[Any] = [None if x is None else x[keys] for x in (key, value)]
            if self.pages is not None:      # checks see the shapes alone
                n = int(self.kv_lengths[i])
                held = [None if x is None else np.broadcast_to(np.zeros((), x.dtype), (n, *x.shape[1:]))
                        for x in (key, value)]
            options = without_terms if own.get("relative_index") is None else self.options
            try:
                one = attention_args(query[rows], held[0], held[1], layout="bnhd", **options, **own)
            except (TypeError, ValueError) as error:
                raise type(error)(f"sequence {i}: {error}") from None
            if self.pages is not None:
                one.key, one.value = a.key, a.value
            one.want, one.num_threads = a.want, a.num_threads
            yield one

    def gathered(self) -> Iterator[Args]:
        """The arguments of each sequence; where keys and values lie in pages, with a copy of its own."""
        for i, one in enumerate(self.each or ()):
            if self.pages is not None:
                places = self.pages.rows([i], one.kv_len)[0, 0]
                one = copy.copy(one)
                one.key, one.value = one.key[:, places], None if one.value is None else one.value[:, places]
            yield one


def check_varlen_names(function: Callable[..., Any], options: VarlenOptions, pages: bool = False) -> None:
    """Raise for what is no option of packed tokens, as Python does for a name that a signature does not have."""
    known = (PagedOptions if pages else VarlenOptions).__annotations__
    unknown = {name: x for name, x in options.items() if name not in known}
    if unknown:
        unexpected(function, unknown, known)


def varlen_args(
        query: object, key: object, value: object, cu_seqlens_q: object, cu_seqlens_k: object, *,
        block_table: object = None, kv_lengths: object = None, has_value: bool = True, shared: bool = False,
        alibi_slopes: object = None, q_offset: object = None, want: object = (), out: object = None,
        num_threads: object = None, **options: Any) -> VarlenArgs:
    """Check everything; slopes and offsets may have one row per sequence.

    With `shared`, sequences share calls where none has arrays of its own and no more than the lse is wanted.
    """
    _check_axes("query", query)
    inputs = {"query": query, "key": key, "value": value, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k,
              "block_table": block_table, "kv_lengths": kv_lengths}
    pages = None
    if block_table is not None:
        _, q_lengths = _sequences("cu_seqlens_q", cu_seqlens_q, len(as_array("query", query)), "query")
        if has_value:
            as_array("value", value)        # None is no array
        key, value, pages, k_lengths = open_pages(key, value, block_table, kv_lengths, cu_seqlens_k, len(q_lengths))
        k_starts = np.cumsum(k_lengths) - k_lengths
    else:
        if kv_lengths is not None:
            raise TypeError("kv_lengths was given without block_table; wanted cu_seqlens_k for packed keys")
        _check_axes("key", key)
        if has_value:
            _check_axes("value", value)
    given = {name: x for name, x in options.items() if name in (*RAGGED, *OF_TOKENS) and x is not None}
    options = {name: x for name, x in options.items() if name not in (*RAGGED, *OF_TOKENS)}
    tables = {}         # are checked with the distances of each sequence
    if "relative_index" in given:
        tables = {name: options.pop(name) for name in TABLES if name in options}
    a = attention_args(query, key, value, layout="bnhd", want=want, out=out, num_threads=num_threads, **options)
    check_table_rows({name: x for name, x in tables.items() if x is not None}, a)
    check_both_segments(given.get("q_segments"), given.get("k_segments"))
    options |= tables
    q_starts, q_lengths = _sequences("cu_seqlens_q", cu_seqlens_q, a.q_len, "query")
    if pages is None:
        k_starts, k_lengths = _sequences("cu_seqlens_k", cu_seqlens_k, a.kv_len, "key")
        if len(q_lengths) != len(k_lengths):
            raise ValueError(f"cu_seqlens_q bounds {len(q_lengths)} sequences, cu_seqlens_k {len(k_lengths)}; "
                             "wanted equally many")
    count = len(q_lengths)
    if alibi_slopes is not None:
        a.alibi_slopes = check_alibi_slopes(alibi_slopes, a, (count,))
        (options if a.alibi_slopes.ndim == 1 else given)["alibi_slopes"] = a.alibi_slopes
    if q_offset is not None:
        offsets = integers("q_offset", q_offset, -MAX_OFFSET, MAX_OFFSET)
        check_fits("q_offset", offsets.shape, (count,), "an integer or (sequences,)")
        a.q_offset = offsets if offsets.ndim else int(offsets)
        given["q_offset"] = np.broadcast_to(offsets, (count,)).tolist()
    tokens = a.q_len, int(k_lengths.sum())
    for name in given.keys() & OF_TOKENS.keys():
        x = bools(name, given[name], "attend", "a 0/1 mask is key_mask.astype(bool)") if name == "key_mask" \
            else integers(name, given[name])
        of = OF_TOKENS[name]
        check_fits(name, x.shape, (tokens[of],), ("(q_tokens,)", "(kv_tokens,)")[of], exact=1)
        given[name] = x
    for name in given.keys() & set(RAGGED):
        x = given[name]
        if isinstance(x, np.ndarray) or not isinstance(x, Sequence) or len(x) != count:
            came = f"{len(x)}" if isinstance(x, list | tuple) else type(x).__name__
            raise (ValueError if isinstance(x, list | tuple) else TypeError)(
                f"{name} must be a list of one array (or None) for each of the {count} sequences, got {came}")
    v = VarlenArgs(a, q_starts, k_starts, q_lengths, k_lengths, options, given, None, pages)
    if not shared or given.keys() & {*RAGGED, *OF_TOKENS} or set(a.want) - {"lse"}:
        v.each = list(v.alone())
    if a.out is not None:
        check_apart(a.out, inputs | {"alibi_slopes": a.alibi_slopes, "q_offset": a.q_offset} | tables
                    | {name: given[name] for name in given.keys() & OF_TOKENS.keys()}
                    | {f"{name} of sequence {i}": x for name in given.keys() & set(RAGGED)
                       for i, x in enumerate(given[name])})
    return v


def _check_axes(name: str, x: object) -> None:
    x = as_array(name, x)
    if x.ndim != 3:
        raise ValueError(f"{name} has {x.ndim} axes, shape {x.shape}; wanted (tokens, heads, dim)")


@dataclass(slots=True)
class VarlenBackwardArgs:
    """Checked arguments of attention_varlen_backward beside those of attention_varlen."""

    grad_output: np.ndarray
    output: np.ndarray
    lse: np.ndarray
    grad_lse: np.ndarray | None
    sinks: np.ndarray | None
    tables: dict[str, np.ndarray]       # by the names of their options
    want: Any
    own: dict[str, Any]

    def want_of(self, i: int) -> Any:
        """The gradients that sequence i has: no bias where it was given none, no tables without their index."""
        none = {name for name, x in self.own.items() if x[i] is None}
        return tuple(name for name in self.want if ("relative_index" if name in TABLES else name) not in none)

    def alone(self, v: VarlenArgs) -> Iterator[BackwardArgs | None]:
        """The arguments of each sequence, None: no gradient of it is wanted. What all share comes in the dtype in which
        its gradients are summed: sinks in float64, tables in that of the computation."""
        sinks = None if self.sinks is None else self.sinks.astype(np.float64)
        tables = {name: saturated(x, v.args.acc) for name, x in self.tables.items()}
        for i, a in enumerate(v.each or ()):
            rows = v.rows(i)
            a.sinks = None          # the lse includes them
            if a.relative_index is not None:
                for name, x in tables.items():
                    setattr(a, name, x)
            want = self.want_of(i)
            yield gradient_args(a, self.grad_output[rows], self.output[rows], self.lse[:, rows], sinks,
                                None if self.grad_lse is None else self.grad_lse[:, rows], want) if want else None


def varlen_backward_args(v: VarlenArgs, grad_output: object, output: object, lse: object, grad_lse: object,
                         want: object) -> VarlenBackwardArgs:
    """Check what is of rows against the packed tokens, and that what is wanted was given."""
    a, names = v.args, check_want(want, GRADIENTS)
    if not names:
        raise ValueError(f"want is empty; wanted at least one name out of {GRADIENTS}")
    for name in names:
        if name not in ("query", "key", "value") and name not in v.own and v.options.get(name) is None:
            raise ValueError(f"want has {name!r}, but no {name} was given")
    found: dict[str, Any] = {"grad_output": float_array("grad_output", grad_output),
                             "output": float_array("output", output), "lse": float_array("lse", lse),
                             "grad_lse": None if grad_lse is None else float_array("grad_lse", grad_lse)}
    for name, x in found.items():
        shape, of = (a.out_shape, "the shape of the output") if name.endswith("output") else (
            a.lse_shape, "(q_heads, q_tokens)")
        if x is not None:
            check_fits(name, x.shape, shape, of, exact=len(shape))
    sinks = v.options.get("sinks")
    tables = {name: native_floats(name, v.options[name], "") for name in TABLES if v.options.get(name) is not None}
    return VarlenBackwardArgs(**found, sinks=None if sinks is None else float_array("sinks", sinks), tables=tables,
                              want=names,
                              own={name: x for name, x in v.own.items() if name in RAGGED})


def _sequences(name: str, bounds: object, tokens: int, packed: str) -> tuple[np.ndarray, np.ndarray]:
    """Starts and lengths from the running sum of lengths: 0, then the end of each sequence."""
    bounds = integers(name, bounds)
    if bounds.ndim != 1 or bounds.size == 0:
        raise ValueError(f"{name} has shape {bounds.shape}; wanted (sequences + 1,): 0 and the end of each sequence")
    if bounds[0] != 0:
        raise ValueError(f"{name} starts at {bounds[0]}; wanted 0")
    falls = np.flatnonzero(bounds[1:] < bounds[:-1])
    if falls.size:
        i = int(falls[0])
        raise ValueError(f"{name} falls from {bounds[i]} to {bounds[i + 1]} at sequence {i}; "
                         "wanted ends that never fall")
    if bounds[-1] != tokens:
        raise ValueError(f"{name} ends at {bounds[-1]}; wanted {tokens}, the tokens of {packed}")
    return bounds[:-1].copy(), np.diff(bounds)
