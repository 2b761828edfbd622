"""Joins the records of one layer over the steps of a generation."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from ... import AttentionWeights
from ...masks import allowed
from ...results import TopKeys

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..._types import ArrayLike

_ROWS = ("entropy", "effective_keys", "max", "argmax", "mean_position", "mean_distance", "lse")     # (..., rows)
_KEYS = ("key_mass", "key_max")                                                                     # (..., keys)
_OF_KEYS = (*_KEYS, "weights", "value")
_PLACE = ("layer", "call", "index", "shape", "q_len", "reordered", "_bins")


def join(records: Sequence[SimpleNamespace], beam_indices: ArrayLike | None) -> dict[str, Any]:
    """The attributes of the joined record."""
    first, last = records[0], records[-1]
    names = [name for name in vars(first) if name not in _PLACE]
    _check_steps(records)
    if beam_indices is not None:
        return _join_beams(records, names, np.asarray(beam_indices))
    moved = next((i for i, x in enumerate(records) if x.reordered and i), None)
    if moved is not None and first.shape[:-3] != (1,):
        raise ValueError(f"before step {moved} of {first.layer!r} sequences exchanged their places, as in beam search, "
                         "or keys were dropped; wanted beam_indices=, as generate(..., return_dict_in_generate=True, "
                         "output_scores=True) returns them, or steps whose keys continue each other")
    found = {name: _joined(name, records) for name in names}
    shape = (*last.shape[:-2], sum(x.shape[-2] for x in records), last.shape[-1])
    return dict(layer=first.layer, call=first.call, index=first.index, shape=shape,
                q_len=sum(x.q_len for x in records), reordered=False, _bins=first._bins, **found)


def _check_steps(records: Sequence[SimpleNamespace]) -> None:
    for step, (before, after) in enumerate(pairwise(records), 1):
        same = before.shape[:-2] == after.shape[:-2] and vars(before).keys() == vars(after).keys()
        more = after.shape[-1] - before.shape[-1]
        room = more > after.q_len and all(x.shape[-1] == after.shape[-1] for x in records[step:])   # of a static cache
        grows = more == after.q_len or room
        stays = more == 0 and not before.q_len == after.q_len == after.shape[-1] > 1
        if not (same and (grows or stays)):
            raise ValueError(f"step {step} of {before.layer!r}, {_said(after)}, does not continue the one before, "
                             f"{_said(before)}; wanted the same batch and heads, and the keys before with one for each "
                             "new row, or the same keys; a part of the records joins by itself: records[a:b].join()")


def _said(record: SimpleNamespace) -> str:
    return f"{record.q_len} rows of weights {record.shape}"


def _joined(name: str, records: Sequence[SimpleNamespace]) -> Any:
    values = [getattr(x, name) for x in records]
    if len(values) == 1:
        return values[0]
    keys = records[-1].shape[-1]
    if name in _ROWS:
        return np.concatenate(values, -1)
    if name == "topk":
        return TopKeys(*(np.concatenate(x, -2) for x in zip(*values, strict=True)))
    if name in _KEYS:
        values = [_padded(x, keys) for x in values]
        return (np.sum if name == "key_mass" else np.max)(values, 0)
    if name == "value":
        return values[-1]
    if name == "grad_output":
        return None if any(x is None for x in values) else np.concatenate(values, -2)
    if name == "weights":
        return _joined_weights(records[0].layer, values)
    if name == "map":
        return _joined_map(records)
    axis, dense = _axis_of_rows(name, values, records)
    return np.concatenate([_padded(x, keys) for x in values] if dense else values, axis)


def _joined_map(records: Sequence[SimpleNamespace]) -> Any:
    """The map of all rows, from the weights, or from maps that have a bin for each row and key."""
    first, last = records[0], records[-1]
    rows, keys = sum(x.shape[-2] for x in records), last.shape[-1]
    bins = tuple(max(1, min(x)) for x in zip(first._bins, (rows, keys), strict=True))
    if hasattr(first, "weights"):
        return _joined_weights(first.layer, [x.weights for x in records]).map(bins)
    if not rows:
        return last.map         # of zeros
    for step, x in enumerate(records):
        if x.map.shape[-2:] != x.shape[-2:]:
            raise ValueError(f"the map of {first.layer!r} cannot be joined: at step {step} its {x.map.shape} bins are "
                             f"fewer than the weights {x.shape}; wanted \"weights\" beside \"map\", from which the map "
                             "of all rows follows, or larger bins=")
    whole = np.concatenate([_padded(x.map, keys) for x in records], -2)
    starts = -(-np.arange(bins[0] + 1) * rows // bins[0])
    return np.add.reduceat(whole, starts[:-1], -2) / np.diff(starts).astype(whole.dtype)[:, None]


def _padded(x: np.ndarray, keys: int) -> np.ndarray:
    return np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, keys - x.shape[-1])])


def _axis_of_rows(name: str, values: Sequence[Any], records: Sequence[SimpleNamespace]) -> tuple[int, bool]:
    """The axis of rows in a function's results, and whether the last axis is that of keys."""
    if all(isinstance(x, np.ndarray) for x in values):
        pairs = [(x.shape, record.shape) for x, record in zip(values, records, strict=True)]
        if all(a[-2:] == b[-2:] for a, b in pairs):
            return -2, True
        if all(a[-1:] == b[-2:-1] for a, b in pairs):
            return -1, False
        if all(a[-2:-1] == b[-2:-1] and a[-1] == pairs[0][0][-1] for a, b in pairs):
            return -2, False
    raise ValueError(f"{name} cannot be joined: wanted arrays (..., rows, keys), (..., rows) or (..., rows, n) of each "
                     f"step, got {[getattr(x, 'shape', type(x).__name__) for x in values[:3]]}")


def _joined_weights(layer: str, parts: Sequence[AttentionWeights]) -> AttentionWeights:
    """The lazy weights of all rows over the keys of the last step."""
    args = [x._a for x in parts]
    last, count = args[-1], args[-1].kv_len
    for x in parts:
        x._check_operands()
    # Some models repeat the keys that heads share for a prompt, but not for a single token.
    same = all(a.kv_heads == last.kv_heads for a in args)
    keys = [a.key if same else a.key.repeat(a.q_heads // a.kv_heads, -3) for a in args]
    for name in ("scale", "softcap", "sinks"):
        values = [getattr(a, name) for a in args]
        if any(not np.array_equal(x, values[-1]) for x in values):
            raise ValueError(f"the weights of {layer!r} cannot be joined: {name} is not the same in all steps")
    for name in ("alibi_slopes", "relative_bias", "relative_index"):
        if getattr(last, name) is not None:
            raise ValueError(f"the weights of {layer!r} cannot be joined: {name} goes by the position of each row")
    seen = [_seen_by_position(a) for a in args]
    options: dict[str, Any] = {"scale": last.scale, "softcap": last.softcap, "sinks": last.sinks}
    if any(x is None for x in seen):
        masks = [allowed(a) for a in args]
        for key, mask in zip(keys, masks, strict=True):
            _check_keys(layer, key, keys[-1], mask.any(tuple(range(mask.ndim - 1))))
        options["mask"] = np.concatenate([_padded(x, count) for x in masks], -2)
    else:
        for key in keys:
            _check_keys(layer, key, keys[-1], slice(None))
        ends = np.concatenate([x for x in seen if x is not None])
        if (np.diff(ends) == 1).all() and ends[-1] == count:
            options.update(causal=True, q_offset=int(ends[0]) - 1)
        elif (ends < count).any():
            options["mask"] = np.arange(count) < ends[:, None]
    if any(a.bias is not None for a in args):
        shape = np.broadcast_shapes(*(a.bias.shape[:-2] for a in args if a.bias is not None))
        options["bias"] = np.concatenate([_padded(np.broadcast_to(
            0 if a.bias is None else a.bias, (*shape, a.q_len, a.kv_len)), count) for a in args], -2).astype(last.acc)
    query = np.concatenate([a.query for a in args], -2)
    return AttentionWeights(query, keys[-1], **options)


def _seen_by_position(a: Any) -> np.ndarray | None:
    """The number of keys, from the first on, that each row sees; None if a row may see others."""
    others = ("mask", "block_mask", "key_indices", "key_mask", "window", "k_positions", "q_segments", "q_lengths",
              "kv_lengths")
    if any(getattr(a, name) is not None for name in others):
        return None
    if not a.causal:
        return np.full(a.q_len, a.kv_len)
    offset = np.unique(a.kv_len - a.q_len if a.q_offset is None else a.q_offset)
    ends = offset[0] + np.arange(a.q_len) + 1 if len(offset) == 1 else None
    return None if ends is None or (ends > a.kv_len).any() or (ends < 1).any() else ends


def _check_keys(layer: str, key: np.ndarray, last: np.ndarray, where: Any) -> None:
    if not np.array_equal(key[..., where, :], last[..., :key.shape[-2], :][..., where, :]):
        raise ValueError(f"the weights of {layer!r} cannot be joined: a step does not have the keys of the step before")


def _join_beams(records: Sequence[SimpleNamespace], names: Sequence[str], beams: np.ndarray) -> dict[str, Any]:
    """Join the rows of each sequence, from its position in the batch at each step."""
    first = records[0]
    if refused := [name for name in names if name in _OF_KEYS]:
        raise ValueError(f"{refused[0]} cannot be joined over beams; wanted statistics of rows, or a function that "
                         "gives arrays of rows")
    batch = first.shape[0]
    if beams.ndim != 2 or beams.dtype.kind not in "iu" or beams.shape[1] > len(records) or len(first.shape) != 4 \
            or (beams < -1).any() or (beams >= batch).any():
        raise ValueError(f"beam_indices is {beams.dtype} of shape {beams.shape}; wanted integers (sequences, steps) "
                         f"below {batch} for at most {len(records)} steps")
    records = records[:beams.shape[1]]
    chosen = []
    for record, places in zip(records, beams.T, strict=True):
        taken = {name: _taken(name, getattr(record, name), places, batch) for name in names}
        place = {name: getattr(record, name) for name in _PLACE} | {"shape": (len(beams), *record.shape[1:])}
        chosen.append(SimpleNamespace(**place | {"reordered": False}, **taken))
    return join(chosen, None)


def _taken(name: str, x: Any, places: np.ndarray, batch: int) -> Any:
    if isinstance(x, TopKeys):
        return TopKeys(*(_taken(name, each, places, batch) for each in x))
    if x is None:
        return None
    if not isinstance(x, np.ndarray) or x.shape[:1] != (batch,):
        raise ValueError(f"{name} cannot be joined over beams: wanted arrays with an axis of {batch} sequences first")
    found = x[places]
    found[places < 0] = 0
    return found
