"""Every error about an argument is raised here: the fast functions and their reference twins share these checks."""

from .attention import Args, attention_args
from .scalars import check_num_threads, integer
from .stages import SoftmaxArgs, WeightedSumArgs, softmax_args, weighted_sum_args

__all__ = [
    "Args",
    "SoftmaxArgs",
    "WeightedSumArgs",
    "attention_args",
    "check_num_threads",
    "integer",
    "softmax_args",
    "weighted_sum_args",
]
