"""Weights in a file: the arrays of an .npz by the names of attnc's own arguments."""

import inspect
import math
import os
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

import numpy as np

from ..weights import AttentionWeights
from .source import Source, load
from .tokens import shorten, visible

MEMORY, RATIO = 2**30, 100      # limits of the unpacked size, in bytes and in sizes of the file: the larger counts
NAMES = 12                      # array names in an error message
_SCALARS = ("causal", "scale", "softcap", "layout", "num_threads")


def read(path: str | os.PathLike[str]) -> tuple[Source, list[Any] | None, list[Any] | None]:
    """The source, tokens and key tokens of a file.

    Parameters
    ----------
    path : str or path-like
        An .npz file. It holds either ``weights`` (..., q_len, kv_len), and perhaps ``mask``; or ``query`` and ``key``,
        and any option of `attnc.AttentionWeights` under its name: ``causal``, ``scale``, ``sinks``, ...; ``window`` is
        an array of two integers, where -1 stands for None; ``block_mask`` is the mask, and ``block_sizes`` the rows and
        keys of a block. ``tokens`` and ``key_tokens`` name the positions. Other
        arrays are left alone.

    Returns
    -------
    source, tokens, key_tokens

    Raises
    ------
    ValueError
        If the file is damaged, or its arrays take more than 1 GiB and 100 times the size of the file, before they are
        unpacked; if they hold Python objects; if the shape of one is not what the file holds.
    """
    with open(path, "rb") as found:
        if not zipfile.is_zipfile(found):
            raise ValueError(f"{_shown(path)} is not an .npz file")
        try:
            archive = zipfile.ZipFile(found)
        except Exception as error:      # its type depends on what is damaged
            raise ValueError(f"{_shown(path)} cannot be read: {visible(str(error))}") from None
        arrays = _arrays(path, archive)
    tokens, key_tokens = (_words(name, arrays.pop(name, None)) for name in ("tokens", "key_tokens"))
    if "weights" in arrays:
        return load(arrays["weights"], arrays.get("mask")), tokens, key_tokens
    sizes = arrays.pop("block_sizes", np.empty(0))
    options = {name: _option(name, array) for name, array in arrays.items()}
    if "block_mask" in options:
        options["block_mask"] = options["block_mask"], *sizes.ravel().tolist()
    weights = AttentionWeights(**options)
    if 8 * math.prod(weights.shape[:-1]) > _max_bytes(path):
        raise ValueError(f"{_shown(path)} has weights of shape {weights.shape}: more rows than are read from a file of "
                         "its size")
    return load(weights), tokens, key_tokens


def _arrays(path: str | os.PathLike[str], archive: zipfile.ZipFile) -> dict[str, np.ndarray]:
    """The arrays that are asked of a file, after their headers have been compared with the file."""
    members = {member.filename.removesuffix(".npy"): member for member in archive.infolist()}
    if "weights" in members:
        wanted: tuple[str, ...] = ("weights", "mask", "tokens", "key_tokens")
    elif {"query", "key"} <= members.keys():
        wanted = (*inspect.signature(AttentionWeights).parameters, "block_sizes", "tokens", "key_tokens")
    else:
        names = [shorten(visible(name), 40) for name in sorted(members)[:NAMES]]
        more = f" and {len(members) - NAMES:,} more" * (len(members) > NAMES)
        raise ValueError(f"{_shown(path)} must hold weights, or query and key; it holds "
                         f"{', '.join(names) or 'nothing'}{more}")
    members = {name: members[name] for name in wanted if name in members}
    total, max_bytes = 0, _max_bytes(path)
    for name, member in members.items():
        with _reading(path, archive, name, member) as file:
            total += _size(file, member.file_size)
    if total > max_bytes:
        raise ValueError(f"{_shown(path)} holds arrays of {total:,} bytes, more than the {max_bytes:,} that are read "
                         f"from a file of its size ({MEMORY:,}, or {RATIO} times the size); write it with numpy.savez, "
                         "which does not compress")
    arrays = {}
    for name, member in members.items():
        with _reading(path, archive, name, member) as file:
            arrays[name] = _bfloat16(np.lib.format.read_array(file, allow_pickle=False))
    return arrays


@contextmanager
def _reading(
        path: str | os.PathLike[str], archive: zipfile.ZipFile, name: str,
        member: zipfile.ZipInfo) -> Iterator[IO[bytes]]:
    """A member of the archive; whatever fails while it is read becomes an error that names it."""
    try:
        with archive.open(member) as file:
            yield file
    except Exception as error:
        why = visible(str(error)) or type(error).__name__
        raise ValueError(f"{_shown(path)}: array {name} cannot be read: {why}") from None


def _size(file: IO[bytes], held: int) -> int:
    """The bytes of an array by its header; a ValueError if it is not what the file holds."""
    version = np.lib.format.read_magic(file)
    read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    # Version 3 is version 2 with names in UTF-8, which only records have.
    shape, _, dtype = read.get(version, np.lib.format.read_array_header_2_0)(file)
    if dtype.hasobject:
        raise ValueError("it holds Python objects, which are not loaded; leave out what is None")
    size = math.prod(shape) * dtype.itemsize
    if not size:
        raise ValueError(f"it is empty, with shape {shape} and dtype {dtype}")
    if size != held - file.tell():
        raise ValueError(f"shape {shape} of {dtype} takes {size:,} bytes, and it has {held - file.tell():,}")
    return size


def _max_bytes(path: str | os.PathLike[str]) -> int:
    return max(MEMORY, RATIO * os.stat(path).st_size)


def _shown(path: str | os.PathLike[str]) -> str:
    return visible(str(path))


def _bfloat16(array: np.ndarray) -> np.ndarray:
    """NumPy's files know bfloat16 as two bytes without a meaning."""
    if array.dtype != np.dtype("V2"):
        return array
    import ml_dtypes

    return array.view(ml_dtypes.bfloat16)


def _option(name: str, array: np.ndarray) -> Any:
    """An option as `AttentionWeights` takes it: numbers and names are no arrays, a window is a pair."""
    if name == "window" and array.ndim == 1 and array.dtype.kind in "iu":
        return tuple(None if side == -1 else side for side in array.tolist())
    return array.item() if array.ndim == 0 or (name in _SCALARS and array.size == 1) else array


def _words(name: str, array: np.ndarray | None) -> list[Any] | None:
    if array is None:
        return None
    if array.ndim != 1:
        raise ValueError(f"{name} must have one axis, got shape {array.shape}")
    return [word.decode("utf-8", "backslashreplace") if isinstance(word, bytes) else word for word in array.tolist()]
