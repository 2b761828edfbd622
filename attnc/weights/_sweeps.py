"""Sweeps of the kernels over the weights: statistics of rows and of keys, and dense weights."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from .. import _call, _isa
from .._checks import Args
from .._checks.weights import check_progress
from .._types import Progress, Report

UNITS = 1000         # of progress
COLUMNS = 64         # per sweep of a product with the transpose: the sums of a block of keys fit in half of L2


class Steps:
    """Progress of a method over several parts, shown as a bar or passed to a function of (done, total)."""

    def __init__(self, progress: Progress, parts: int):
        told = check_progress(progress)
        self._part, self._parts = -1, max(parts, 1)
        self._bar = _bar() if told is True else None
        self._function: Report | None = None if told is True else told

    def __enter__(self) -> Steps:
        return self

    def part(self) -> Report | None:
        """The function that the next part calls with its own (done, total), or None."""
        self._part += 1
        return None if self._bar is None and self._function is None else self._report

    def _report(self, done: int, total: int) -> None:
        self._tell(int(UNITS * (self._part + min(done / max(total, 1), 1)) / self._parts))

    def _tell(self, units: int) -> None:
        if self._bar is not None:
            self._bar.update(units - self._bar.n)
        elif self._function is not None:
            self._function(units, UNITS)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._tell(UNITS)
        if self._bar is not None:
            self._bar.close()


def _bar() -> Any:
    """A bar by tqdm, or a percentage if tqdm is not installed."""
    try:
        from tqdm.auto import tqdm
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("tqdm"):
            raise
        return _Percentage()
    return tqdm(total=UNITS, unit="‰")


class _Percentage:
    """Progress as a line of text on stderr, with the methods of a tqdm bar."""

    n = 0

    def update(self, more: int) -> None:
        self.n += more
        print(f"\r{self.n * 100 // UNITS:3d} %", end="", file=sys.stderr, flush=True)

    def close(self) -> None:
        print(file=sys.stderr)


def rows(a: Args, given: np.ndarray | None, names: tuple[str, ...], k: int | None,
         report: Report | None) -> dict[str, Any]:
    """Statistics of rows by name, with ``norm`` and ``lse``, from which weights are recomputed; ``unit`` is the score
    per unit of the maxima in the norm."""
    lead = (*a.batch, a.q_heads, a.q_len)
    found: dict[str, Any] = {name: np.empty(lead, a.acc) for name in names}
    if k is not None:
        found["top"], found["top_keys"] = np.empty((*lead, k), a.acc), np.empty((*lead, k), np.int64)
    if given is None:
        found["norm"], found["lse"] = np.empty((*lead, 2), np.float64), np.empty(lead, a.acc)
    request = _call.RowRequest(k=k or 0, given=given, **{name: x for name, x in found.items() if name != "lse"})
    found["unit"] = _call.run("attend", a, request, report, lse=found.get("lse")).unit
    return found


def places(a: Args, norm: np.ndarray | None, given: np.ndarray | None, out: np.ndarray,
           report: Report | None = None) -> None:
    """Write dense weights of the rows and keys of `a` to `out` (..., q_heads, q_len, kv_len)."""
    _call.run("weights_under_lse", a, None, report, weights=out, norm=norm, given=given)


def scores(a: Args, norm: np.ndarray | None = None) -> np.ndarray:
    """Dense scores (..., q_heads, q_len, kv_len); any `norm` selects the path of statistics."""
    found = np.empty((*a.batch, a.q_heads, a.q_len, a.kv_len), a.acc)
    _call.run("scores", a, scores=found, norm=norm)
    return found


def keys(a: Args, norm: np.ndarray | None, given: np.ndarray | None, report: Report | None, *,
         order: np.ndarray | None = None, row_weights: np.ndarray | None = None, names: tuple[str, ...] = (),
         threshold: float | None = None, bins: Bins | None = None,
         factors: np.ndarray | None = None) -> dict[str, np.ndarray]:
    """Statistics over the rows in `order` (None: all) by name: `names` from ``mass``, ``max`` and ``visible``; ``hits``
    of a `threshold`, ``map`` of `bins`, ``products`` of `factors` (..., q_heads, q_len, columns)."""
    lead = (*a.batch, a.q_heads)
    found = {name: np.zeros((*lead, a.kv_len), a.acc) for name in names}
    request = _call.KeyRequest(norm=norm, given=given, row_weights=row_weights, order=order)
    if threshold is not None:
        found["hits"], request.threshold = np.zeros((*lead, a.kv_len), np.int64), threshold
    if bins is not None:
        found["map"] = np.zeros((*lead, len(bins.rows), bins.keys), a.acc)
        request.order, request.row_bin, request.bin_rows = bins.order, bins.row_bin, bins.rows
        request.key_bins, request.map_max = bins.keys, bins.largest
        request.slot, request.slot_start, request.slot_bin = bins.slots(a)
    if factors is not None:
        request.factors, request.columns = factors, factors.shape[-1]
        request.nonfinite_factors = not np.isfinite(factors).all()
        found["products"] = np.zeros((*lead, a.kv_len, request.columns), a.acc)
    for name, x in found.items():
        setattr(request, name, x)
    request.walk = a.q_len if request.order is None else len(request.order)
    if request.walk and a.kv_len and all(x.size for x in found.values()):
        _call.run("key_statistics", a, request, report)
    return found


class Bins:
    """Bins of rows and keys of a map, from labels (-1 for none), in the order in which the kernels walk."""

    def __init__(self, row_labels: np.ndarray, key_labels: np.ndarray, row_bins: int, key_bins: int, largest: bool):
        taken = np.flatnonzero(row_labels >= 0)
        order = taken[np.argsort(row_labels[taken], kind="stable")]
        self.row_bin = row_labels[order]
        self.rows = np.bincount(self.row_bin, minlength=row_bins).astype(np.float64)
        self.order = None if np.array_equal(order, np.arange(len(row_labels))) else order
        self.keys, self.largest, self._labels = key_bins, largest, key_labels

    def slots(self, a: Args) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The index of each key's bin in its chunk's list of bins, the starts of the lists, and the lists."""
        block, chunk = _isa.kernels.key_plan(_call.code(a.acc), a.kv_len, a.head_dim)
        slot, starts, lists = np.full(a.kv_len, -1, np.int64), [0], []
        for first in range(0, a.kv_len, block * chunk):
            part = slice(first, first + block * chunk)
            taken = self._labels[part] >= 0
            there, slot[part][taken] = np.unique(self._labels[part][taken], return_inverse=True)
            lists.append(there)
            starts.append(starts[-1] + len(there))
        return slot, np.array(starts, np.int64), np.concatenate([*lists, []]).astype(np.int64)
