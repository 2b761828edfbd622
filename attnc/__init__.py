"""Exact attention on the CPU for NumPy arrays, with the attention weights as a result."""

from typing import TYPE_CHECKING

from ._isa import isa
from .align import align
from .attention import attention, attention_scores, attention_weights, weighted_sum
from .backward import attention_backward, log_softmax_backward, softmax_backward
from .cache import KVCache
from .config import show_config
from .masks import alibi_slopes
from .pages import PagedKVCache
from .relative import deberta_relative_index, t5_relative_bias, t5_relative_bias_backward
from .results import AttentionGradients, AttentionResult
from .softmax import log_softmax, softmax
from .states import AttentionState, merge_states
from .threads import get_num_threads, set_num_threads, threads
from .varlen import attention_varlen, attention_varlen_backward, attention_weights_varlen
from .weights import AttentionWeights, rollout

if TYPE_CHECKING:       # imported on first access, see __getattr__
    from . import datasets, integrations, plot, reference, testing  # noqa: F401
    from ._views.explorer import explorer

    __version__: str

__all__ = ["AttentionGradients", "AttentionResult", "AttentionState", "AttentionWeights", "KVCache", "PagedKVCache",
           "alibi_slopes", "align", "attention", "attention_backward", "attention_scores", "attention_varlen",
           "attention_varlen_backward", "attention_weights", "attention_weights_varlen", "deberta_relative_index",
           "explorer", "get_num_threads", "isa", "log_softmax", "log_softmax_backward", "merge_states", "rollout",
           "set_num_threads", "show_config", "softmax", "softmax_backward", "t5_relative_bias",
           "t5_relative_bias_backward", "threads", "weighted_sum"]

_MODULES = ("datasets", "integrations", "plot", "reference", "testing")     # imported on first access

if not TYPE_CHECKING:       # a type checker would take any name for one of these
    def __getattr__(name: str):
        if name == "explorer":      # pictures, and what they import, on first access
            from ._views.explorer import explorer

            return explorer
        if name in _MODULES:
            from importlib import import_module

            return import_module(f".{name}", __name__)
        if name == "__version__":  # reading the metadata takes longer than the rest of the import
            from .config import version

            return version()
        raise AttributeError(f"module 'attnc' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *_MODULES, "__version__", "masks"])
