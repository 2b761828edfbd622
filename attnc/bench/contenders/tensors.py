"""Arrays as tensors of torch and back, without copies."""

from typing import Any

import numpy as np

from attnc.bench import Unsupported


def import_torch(threads: int) -> Any:
    """torch, with its number of threads set."""
    try:
        import torch
    except ImportError as error:
        raise Unsupported.import_of(error) from error
    torch.set_num_threads(threads)
    return torch


def to_torch(torch: Any, array: np.ndarray) -> Any:
    """The array as a tensor that shares its memory."""
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def from_torch(torch: Any, tensor: Any) -> Any:
    """The tensor as an array that shares its memory."""
    if tensor.dtype == torch.bfloat16:
        from ml_dtypes import bfloat16

        return tensor.view(torch.int16).numpy().view(bfloat16)
    return tensor.numpy()
