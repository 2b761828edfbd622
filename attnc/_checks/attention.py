"""Check the arguments of attention, attention_scores and attention_weights, and hold what was found."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter, itemgetter
from typing import Any, TypeAlias

import numpy as np

from .._types import Shape, Window
from . import options, scalars
from .arrays import FLOAT32, accumulator, float_array, promoted
from .output import check_out

_Options: TypeAlias = tuple[Any, Any, Any, Any, Any, Any, Any, Any, Any, Any, Any, Any, Any, Any, Any, Any, Any, Any,
                            Any, Any, Any, Any]
BHND, NOTHING = "bhnd", ()  # defaults, compared by identity: == with an array gives an array

# Options that public functions share, in the order of attention_args; options_of(locals()) is what a function was given
# for them. Names and values of 22 keywords would take longer, and say each name twice.
OPTIONS = ("mask", "block_mask", "key_indices", "key_mask", "bias", "relative_bias", "relative_index", "relative_key",
           "relative_query", "causal", "window", "q_offset", "k_positions", "scale", "softcap", "alibi_slopes", "sinks",
           "q_segments", "k_segments", "q_lengths", "kv_lengths", "layout")
options_of: Callable[[dict[str, Any]], _Options] = itemgetter(*OPTIONS)


@dataclass(slots=True, init=False, eq=False)
class Args:
    """Checked arguments: views in (..., heads, length, dim) order, sizes, and options that are None when off.

    Arrays keep their own shape, strides and alignment: batch axes and broadcast options are not expanded.
    """

    query: np.ndarray
    key: np.ndarray
    value: np.ndarray | None
    two_d: bool
    layout: str
    batch: Shape
    q_heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    value_dim: int
    dtype: np.dtype[Any]
    acc: np.dtype[Any]
    mask: np.ndarray | None
    block_mask: np.ndarray | None
    block_sizes: tuple[int, int, int, int] | None       # of its blocks: rows, keys, the first row, the first key
    key_indices: np.ndarray | None      # (..., heads, q_len, n) int64: ascending, -1 first, each key once
    key_mask: np.ndarray | None
    bias: np.ndarray | None
    relative_bias: np.ndarray | None        # as a view of the shape of a bias, whose rows overlap
    relative_index: np.ndarray | None       # int32, contiguous; None unless there is one of the two tables:
    relative_key: np.ndarray | None
    relative_query: np.ndarray | None
    causal: bool
    window: Window | None
    q_offset: int | np.ndarray | None
    k_positions: np.ndarray | None
    scale: float
    softcap: float | None
    alibi_slopes: np.ndarray | None
    sinks: np.ndarray | None
    q_segments: np.ndarray | None
    k_segments: np.ndarray | None
    q_lengths: np.ndarray | None
    kv_lengths: np.ndarray | None
    want: tuple[str, ...]
    out: np.ndarray | None
    num_threads: int | None
    key_scale: np.ndarray | None    # (batch..., kv_heads, kv_len): the factors of the int8 keys of a cache

    def __copy__(self) -> "Args":
        found = Args()          # a sixth of the time that copy.copy takes without this
        for name, x in zip(_FIELDS, _fields_of(self), strict=True):
            setattr(found, name, x)
        return found

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """The arguments that are arrays, by name."""
        given = {name: getattr(self, name) for name in self.__slots__ if name != "out"}
        return {name: x for name, x in given.items() if isinstance(x, np.ndarray)}

    @property
    def heads_per_kv(self) -> int:
        """Query heads that read the same key head; 1 if there are none."""
        return self.q_heads // self.kv_heads if self.kv_heads else 1

    @property
    def out_shape(self) -> Shape:
        """Shape of the output as the user sees it."""
        if self.two_d:
            return self.q_len, self.value_dim
        if self.layout == "bnhd":
            return *self.batch, self.q_len, self.q_heads, self.value_dim
        return *self.batch, self.q_heads, self.q_len, self.value_dim

    @property
    def lse_shape(self) -> Shape:
        """Shape of results with one entry per row, such as the lse."""
        return (self.q_len,) if self.two_d else (*self.batch, self.q_heads, self.q_len)

    @property
    def weights_shape(self) -> Shape:
        """Shape of scores and weights."""
        return *self.lse_shape, self.kv_len


_FIELDS = tuple(Args.__slots__)
_fields_of = attrgetter(*_FIELDS)


def attention_args(
        query: object, key: object, value: object, mask: object = None, block_mask: object = None,
        key_indices: object = None, key_mask: object = None, bias: object = None, relative_bias: object = None,
        relative_index: object = None, relative_key: object = None, relative_query: object = None,
        causal: object = False, window: object = None, q_offset: object = None, k_positions: object = None,
        scale: object = None, softcap: object = None, alibi_slopes: object = None, sinks: object = None,
        q_segments: object = None, k_segments: object = None, q_lengths: object = None, kv_lengths: object = None,
        layout: object = "bhnd", want: object = (), out: object = None, num_threads: object = None,
        stage: object = "masked", gives: str = "output") -> Args:
    """Check everything and return it as `Args`; `value` is None where a function has none.

    `gives` is what `out` receives: ``"output"``, ``"scores"`` or ``"weights"``.
    The tests for None keep a call without options cheap: this runs before every attention, however small.
    """
    a = Args()
    a.layout = layout if layout is BHND else scalars.check_choice("layout", layout, scalars.LAYOUTS)
    _check_inputs(a, query, key, value)
    a.causal = causal if causal is False or causal is True else scalars.check_causal(causal)
    a.scale = scalars.check_scale(scale, a.head_dim, a.acc)
    a.softcap = None if softcap is None else scalars.check_softcap(softcap, a.acc)
    a.window = None if window is None else scalars.check_window(window)
    a.mask = None if mask is None else options.check_mask(mask, a)
    a.block_mask = a.block_sizes = None
    if block_mask is not None:
        a.block_mask, a.block_sizes = options.check_block_mask(block_mask, a)
    a.key_indices = None if key_indices is None else options.check_key_indices(key_indices, a)
    a.key_mask = None if key_mask is None else options.check_key_mask(key_mask, a)
    a.bias = None if bias is None else options.check_bias(bias, a)
    a.relative_bias = None if relative_bias is None else options.check_relative_bias(relative_bias, a)
    a.relative_index = a.relative_key = a.relative_query = None
    if not (relative_index is relative_key is relative_query is None):
        a.relative_index, a.relative_key, a.relative_query = options.check_tables(
            relative_index, relative_key, relative_query, a)
    a.q_offset = None if q_offset is None else options.check_q_offset(q_offset, a)
    a.alibi_slopes = None if alibi_slopes is None else options.check_alibi_slopes(alibi_slopes, a)
    a.sinks = None if sinks is None else options.check_sinks(sinks, a)
    a.q_segments = a.k_segments = None
    if q_segments is not None or k_segments is not None:
        a.q_segments, a.k_segments = options.check_segments(q_segments, k_segments, a)
    a.q_lengths = None if q_lengths is None else options.check_lengths("q_lengths", q_lengths, a.q_len, a)
    a.kv_lengths = None if kv_lengths is None else options.check_lengths("kv_lengths", kv_lengths, a.kv_len, a)
    a.k_positions = None if k_positions is None else options.check_k_positions(k_positions, a)
    a.want = () if want is NOTHING else scalars.check_want(want)
    a.num_threads = None if num_threads is None else scalars.check_num_threads(num_threads)
    if type(stage) is not str or stage != "masked":
        scalars.check_choice("stage", stage, scalars.STAGES)
    a.out = a.key_scale = None
    if out is not None:
        shape = a.out_shape if gives == "output" else a.weights_shape
        a.out = check_out(out, shape, a.acc if gives == "scores" else a.dtype, dict(
            query=query, key=key, value=value, mask=mask, block_mask=a.block_mask, key_indices=key_indices,
            key_mask=key_mask, bias=bias, relative_bias=relative_bias, relative_index=relative_index,
            relative_key=relative_key, relative_query=relative_query, q_offset=q_offset, k_positions=k_positions,
            alibi_slopes=alibi_slopes, sinks=sinks, q_segments=q_segments, k_segments=k_segments, q_lengths=q_lengths,
            kv_lengths=kv_lengths))
    return a


def _check_inputs(a: Args, query: object, key: object, value: object) -> None:
    """Fill in the views, sizes and dtypes."""
    query = float_array("query", query)
    key = float_array("key", key)
    if value is not None:
        value = float_array("value", value)
    dtype = query.dtype
    if dtype is FLOAT32 and key.dtype is FLOAT32 and (value is None or value.dtype is FLOAT32):
        a.dtype = a.acc = FLOAT32
    else:
        a.dtype = promoted(dtype, key.dtype, dtype if value is None else value.dtype)
        a.acc = accumulator(a.dtype)

    a.two_d = query.ndim == 2
    if query.ndim < 3 or key.ndim < 3 or (value is not None and value.ndim < 3):
        if not query.ndim == key.ndim == 2 == (2 if value is None else value.ndim) or a.layout == "bnhd":
            _refuse_ranks(a.layout, query, key, value)
        query, key, value = query[None], key[None], None if value is None else value[None]
    elif a.layout == "bnhd":
        query, key = query.swapaxes(-2, -3), key.swapaxes(-2, -3)
        value = None if value is None else value.swapaxes(-2, -3)
    a.query, a.key, a.value = query, key, value

    shape, key_shape = query.shape, key.shape
    batch, key_batch = shape[:-3], key_shape[:-3]
    a.q_heads, a.q_len, a.head_dim = shape[-3:]
    a.kv_heads, a.kv_len, head_dim = key_shape[-3:]
    if value is None:
        value_batch, value_heads, value_len, a.value_dim = key_batch, a.kv_heads, a.kv_len, 0
    else:
        value_shape = value.shape
        value_batch = value_shape[:-3]
        value_heads, value_len, a.value_dim = value_shape[-3:]
    if head_dim != a.head_dim:
        raise ValueError(f"key has head_dim {head_dim}, query has {a.head_dim}; wanted equal: {_shapes(a)}")
    if value_len != a.kv_len:
        raise ValueError(f"value has length {value_len}, key has {a.kv_len}; wanted equal: {_shapes(a)}")
    if value_heads != a.kv_heads:
        raise ValueError(f"value has {value_heads} heads, key has {a.kv_heads}; wanted equal: {_shapes(a)}")
    if a.q_heads != a.kv_heads:
        check_groups("query", a.q_heads, "key", a.kv_heads, lambda: _shapes(a))
    if batch == key_batch == value_batch:
        a.batch = batch
    else:
        a.batch = broadcast_batch(lambda: _shapes(a), batch, key_batch, value_batch)


def _refuse_ranks(layout: str, query: np.ndarray, key: np.ndarray, value: np.ndarray | None) -> None:
    """Raise because some have fewer than 3 axes, but not all 2, or all 2 in a layout of heads."""
    given = {name: x for name, x in (("query", query), ("key", key), ("value", value)) if x is not None}
    if any(x.ndim != 2 for x in given.values()):
        name, x = min(given.items(), key=lambda item: item[1].ndim)
        shapes = ", ".join(f"{name} {x.shape}" for name, x in given.items())
        raise ValueError(f"{name} has {x.ndim} axes; wanted (length, dim) for each of {', '.join(given)}, "
                         f"or (batch..., heads, length, dim) for each: {shapes}")
    if layout == "bnhd":
        raise ValueError(f"query has 2 axes, shape {query.shape}; layout='bnhd' wanted (batch..., length, heads, dim)")


def check_groups(q_name: str, q_heads: int, kv_name: str, kv_heads: int, shapes: Callable[[], str]) -> None:
    """Raise unless every key and value head serves the same number of query heads."""
    if q_heads % kv_heads if kv_heads else q_heads:
        raise ValueError(f"{q_name} has {q_heads} heads, no multiple of the {kv_heads} of {kv_name}; wanted equally "
                         f"many {q_name} heads for each {kv_name} head: {shapes()}")


def broadcast_batch(shapes: Callable[[], str], *batches: Sequence[int]) -> Shape:
    """The NumPy broadcast of the leading axes (np.broadcast_shapes ends at 32, arrays may have 64)."""
    rank = max(map(len, batches))
    batch = [1] * rank
    for one in batches:
        for axis, length in enumerate(one, start=rank - len(one)):
            if length != 1 and batch[axis] not in (1, length):
                raise ValueError(f"the batch axes do not broadcast together: {shapes()}")
            batch[axis] = length if length != 1 else batch[axis]
    return tuple(batch)


def _shapes(a: Args) -> str:
    """The shapes of the inputs as the user gave them."""
    shapes = {name: getattr(a, name) for name in ("query", "key", "value") if getattr(a, name) is not None}
    if a.layout == "bnhd":
        shapes = {name: x.swapaxes(-2, -3) for name, x in shapes.items()}
    return ", ".join(f"{name} {x.shape[1:] if a.two_d else x.shape}" for name, x in shapes.items())
