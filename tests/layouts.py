"""The same numbers in other memory: one table for all tests of strides, alignment and byte order."""

import numpy as np


def swapped(x, i, j):
    """Axes i and j lie in memory in the order of j and i; an array without these axes is itself."""
    if max(i, j, -i - 1, -j - 1) >= x.ndim:
        return x
    return np.ascontiguousarray(x.swapaxes(i, j)).swapaxes(i, j)


def backwards(x, axes):
    """The elements of these of the last two axes lie in memory from the last to the first."""
    steps = tuple(slice(None, None, -1 if axis - 2 in axes else 1) for axis in range(2))[-x.ndim:]
    return np.ascontiguousarray(x[..., *steps])[..., *steps] if x.ndim else x


def within(x, before, after, step=1):
    """A part of a wider array along the last axis, with NaN, or True, around it."""
    if x.ndim == 0:
        return x
    wide = np.empty((*x.shape[:-1], before + x.shape[-1] * step + after), x.dtype)
    wide[...] = np.nan if x.dtype.kind in "fV" else 1
    view = wide[..., before:before + x.shape[-1] * step:step]
    view[...] = x
    return view


def unaligned(x):
    """At an odd address."""
    view = np.empty(x.nbytes + 1, np.uint8)[1:].view(x.dtype).reshape(x.shape)
    view[...] = x
    return view


def read_only(x):
    return np.frombuffer(x.tobytes(), x.dtype).reshape(x.shape)


def swapped_bytes(x):
    """In the other byte order, which ml_dtypes has not: its types are themselves."""
    return x if x.dtype.kind == "V" or x.dtype.name == "bfloat16" else x.astype(x.dtype.newbyteorder())


def odd_strides(x):
    """Axes of length 1 have a stride that is no whole number of elements."""
    strides = [12345 if n == 1 else stride for n, stride in zip(x.shape, x.strides, strict=True)]
    return np.lib.stride_tricks.as_strided(x, x.shape, strides)


MEMORY = {
    "Fortran order": np.asfortranarray,
    "last axes swapped": lambda x: swapped(x, -1, -2),
    "heads swapped": lambda x: swapped(x, -2, -3),
    "outer axes swapped": lambda x: swapped(x, 0, 1),
    "rows backwards": lambda x: backwards(x, {-2}),
    "columns backwards": lambda x: backwards(x, {-1}),
    "all backwards": lambda x: np.flip(np.flip(x).copy()),
    "every second": lambda x: within(x, 1, 0, 2),
    "every third": lambda x: within(x, 0, 2, 3),
    "padded rows": lambda x: within(x, 2, 3),
    "unaligned": unaligned,
    "read-only": read_only,
    "swapped bytes": swapped_bytes,
    "odd strides": odd_strides,
}


def drawn(x, random):
    """The array, or in half of the draws the same numbers in memory of a kind of `MEMORY`."""
    kinds = list(MEMORY.values())
    kind = int(random.integers(2 * len(kinds)))
    return kinds[kind](x) if kind < len(kinds) else x
