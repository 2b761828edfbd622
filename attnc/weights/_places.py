"""The weights of chosen rows and keys: runs of consecutive places, each by one call of the kernels."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .._checks.parts import part
from .._checks.weights import Selection
from . import _sweeps

BLOCK_BYTES = 8 << 20     # of dense weights that are made only to take some of them


def select(W, chosen: Selection) -> np.ndarray:
    """What NumPy would give for the dense weights."""
    rows, keys = chosen.rows, chosen.keys
    lead = [_count(*side) for side in zip(chosen.lead, W.shape[:-2], strict=True)]
    if isinstance(rows, slice) or isinstance(keys, slice):
        sides = list(zip((rows, keys), W.shape[-2:], strict=True))
        out = np.empty((*lead, *(_count(*side) for side in sides)), W.dtype)      # refused before any place is listed
        some_rows, some_keys = (_listed(*side) for side in sides)
        outer(W, chosen.lead, some_rows.ravel(), some_keys.ravel(), out)
        out = out.reshape(*lead, *some_rows.shape, *some_keys.shape)
    else:
        some_rows, some_keys = np.broadcast_arrays(rows, keys)
        out = _pointwise(W, chosen.lead, some_rows.ravel(), some_keys.ravel(), lead).reshape(*lead, *some_rows.shape)
    arrays = [0 if isinstance(one, slice) else one.ndim for one in (rows, keys)]
    if chosen.front:
        first = len(lead) + (0 if arrays[0] else out.ndim - len(lead) - max(arrays))
        out = np.moveaxis(out, range(first, first + max(arrays)), range(max(arrays)))
        return out.reshape([n for i, n in enumerate(out.shape) if i - max(arrays) not in chosen.drop])
    return out.reshape([n for i, n in enumerate(out.shape) if i not in chosen.drop])


def _count(one: slice | np.ndarray, length: int) -> int:
    return len(range(*one.indices(length))) if isinstance(one, slice) else one.size


def _listed(one: slice | np.ndarray, length: int) -> np.ndarray:
    return np.arange(length)[one] if isinstance(one, slice) else one


def outer(W, lead: tuple, rows: np.ndarray, keys: np.ndarray, out: np.ndarray) -> None:
    """Weights of all pairs of `rows` and `keys` (1-D) of the heads in `lead` into `out` (lead..., rows, keys)."""
    if not out.size:
        return
    first, last = int(keys.min()), int(keys.max()) + 1
    consecutive = bool((np.diff(keys) == 1).all())
    at = 0
    for run in _runs(rows):
        step = len(run) if consecutive else max(1, BLOCK_BYTES // _nbytes(out, 1, last - first))
        for r in range(run.start, run.stop, step):
            n = min(step, run.stop - r)
            block, span = slice(r, r + n), slice(first, last)
            if consecutive:
                _dense(W, lead, block, span, out[..., at:at + n, :])
            else:
                wide = np.empty((*out.shape[:-2], n, last - first), out.dtype)
                _dense(W, lead, block, span, wide)
                np.take(wide, keys - first, -1, out=out[..., at:at + n, :])
            at += n


def _nbytes(out: np.ndarray, rows: int, keys: int) -> int:
    return int(np.prod(out.shape[:-2], dtype=np.int64)) * rows * keys * out.itemsize


def _runs(places: np.ndarray) -> Iterator[range]:
    """Consecutive places as ranges."""
    cuts = np.flatnonzero(np.diff(places) != 1) + 1
    for start, stop in zip([0, *cuts], [*cuts, len(places)], strict=True):
        if stop > start:
            yield range(int(places[start]), int(places[start]) + int(stop - start))


def _pointwise(W, lead: tuple, rows: np.ndarray, keys: np.ndarray, sizes: list) -> np.ndarray:
    """One weight of each head for each pair of a row and a key."""
    out = np.empty((*sizes, rows.size), W.dtype)
    if not out.size:
        return out
    order = np.argsort(rows, kind="stable")
    there, starts = np.unique(rows[order], return_index=True)
    starts = [*starts.tolist(), rows.size]
    step = max(1, BLOCK_BYTES // max(_nbytes(out, 1, W.shape[-1]), 1))
    for i in range(0, len(there), step):
        some = there[i:i + step]
        pairs = order[starts[i]:starts[i + len(some)]]
        first, last = int(keys[pairs].min()), int(keys[pairs].max()) + 1
        wide = np.empty((*sizes, len(some), last - first), W.dtype)
        outer(W, lead, some, np.arange(first, last), wide)
        out[..., pairs] = wide[..., np.searchsorted(some, rows[pairs]), keys[pairs] - first]
    return out


def _dense(W, lead: tuple, rows: slice, keys: slice, out: np.ndarray) -> None:
    """Weights of consecutive rows and keys; heads that do not fill whole groups one at a time."""
    a, *batch = W._a, *lead[:-1]
    heads = lead[-1] if lead else slice(None)
    places = range(*heads.indices(a.q_heads))
    if len(places) == a.q_heads and places.step == 1:
        _dense_heads(W, tuple(batch), slice(None), rows, keys, out if lead else out[None])
        return
    for i, head in enumerate(places):
        _dense_heads(W, tuple(batch), slice(head, head + 1), rows, keys, out[..., i:i + 1, :, :])


def _dense_heads(W, batch: tuple, heads: slice, rows: slice, keys: slice, out: np.ndarray) -> None:
    some_rows = part(W._a, batch=batch, heads=heads, rows=rows)
    norm, given = W._norm_of(some_rows, batch, heads, rows)
    _sweeps.places(part(some_rows, keys=keys), norm, given, out)
