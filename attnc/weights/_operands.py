"""Fingerprints of the arrays that lazy weights hold, which detect changes after the first result."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from .._checks import Args

# Elements of an array that are compared. This takes 0.6 µs for smaller arrays, 7 µs for a query and key of
# 12 x 512 x 64 in cache and 0.1 to 0.25 ms from memory; statistics of their 12 x 512 x 512 weights take 2,000 µs on one
# thread.
SAMPLES = 4096


class Operands:
    """The contents of the arrays that weights are computed from, when the first result began.

    Parameters
    ----------
    arrays : dict
        Arrays by the names of arguments.
    since : str
        The time of the fingerprint, for the error.
    """

    def __init__(self, arrays: dict[str, np.ndarray], since: str):
        self._samples = {name: _samples(x) for name, x in arrays.items()}
        self._since, self._first = since, self._now()

    def _now(self) -> list[bytes]:
        return [x[places].tobytes() for x, places in self._samples.values()]       # as bits: NaN is equal to itself

    def check(self) -> None:
        """Raise if an array has changed."""
        now = self._now()
        if now != self._first:
            changed = [name for name, a, b in zip(self._samples, self._first, now, strict=True) if a != b]
            raise RuntimeError(f"{' and '.join(changed)} changed since {self._since}; wanted the same values for every "
                               "answer, which would mix two states: make a new AttentionWeights of what is there now, "
                               "or make it of copies")


def own_views(a: Args) -> None:
    """Replace the arrays of `a` by views, whose shape, strides and dtype a user cannot set."""
    for name, x in a.arrays.items():
        setattr(a, name, x.view())


def _samples(x: np.ndarray) -> tuple[np.ndarray, Any]:
    """An array and an index of its compared elements: all of a small array, else `SAMPLES` that include each index of
    each axis up to that length."""
    # Without the ellipsis, an array without axes would become a scalar copy.
    x = x[(..., *[slice(1) if stride == 0 else slice(None, None, -1 if stride < 0 else 1) for stride in x.strides])]
    if x.size <= SAMPLES:
        return x, ...
    places = _places(x.shape)
    if any(stride % x.itemsize for stride in x.strides):
        return x, places
    steps = [stride // x.itemsize for stride in x.strides]         # one axis is indexed several times faster than four
    memory = np.lib.stride_tricks.as_strided(
        x, (1 + sum((length - 1) * step for length, step in zip(x.shape, steps, strict=True)),), (x.itemsize,))
    return memory, sum(place * step for place, step in zip(places, steps, strict=True))


def _spread(shape: tuple[int, ...]) -> tuple[np.ndarray, ...]:
    """SAMPLES indices of each axis, shuffled independently: all of a shorter axis, even steps of a longer one."""
    random, steps = np.random.default_rng(0), np.arange(SAMPLES)
    return tuple([random.permutation(steps % length if length <= SAMPLES else steps * length // SAMPLES)
                  for length in shape])


_places = lru_cache(maxsize=32)(_spread)       # no decorator: stubtest would miss the parameters
