"""Weights in a file: the arrays of an .npz by the names of attnc's own arguments."""

from __future__ import annotations

import inspect
import zipfile

import numpy as np

from ..weights import AttentionWeights
from .source import load


def read(path):
    """The source, tokens and key tokens of a file.

    Parameters
    ----------
    path : str or path-like
        An .npz file. It holds either ``weights`` (..., q_len, kv_len), and perhaps ``mask``; or ``query`` and ``key``,
        and any option of `attnc.AttentionWeights` under its name (``causal``, ``scale``, ``sinks``, ...). ``tokens``
        and ``key_tokens`` name the positions. Other arrays are left alone.

    Returns
    -------
    source, tokens, key_tokens
    """
    with open(path, "rb") as found:
        if not zipfile.is_zipfile(found):
            raise ValueError(f"{path} is not an .npz file")
    with np.load(path, allow_pickle=False) as file:
        names = set(file.files)
        tokens, key_tokens = (file[name].tolist() if name in names else None for name in ("tokens", "key_tokens"))
        if "weights" in names:
            return load(file["weights"], file["mask"] if "mask" in names else None), tokens, key_tokens
        if not {"query", "key"} <= names:
            raise ValueError(f"{path} must hold weights, or query and key; it holds "
                             f"{', '.join(sorted(names)) or 'nothing'}")
        options = inspect.signature(AttentionWeights).parameters.keys() & names - {"query", "key"}
        given = {name: file[name] if file[name].ndim else file[name].item() for name in sorted(options)}
        return load(AttentionWeights(file["query"], file["key"], **given)), tokens, key_tokens
