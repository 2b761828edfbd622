"""Every error about an argument is raised here: the fast functions and their reference twins share these checks."""

from .attention import OPTIONS, Args, attention_args, options_of
from .backward import BackwardArgs, SoftmaxBackwardArgs, backward_args, softmax_backward_args
from .cache import (
    append_args,
    cache_sizes,
    check_attend,
    check_cache_want,
    check_no_distances,
    check_rows_stay,
    keep_args,
    reorder_args,
    truncate_args,
)
from .options import check_lse
from .pages import check_room, lengths_left, paged_query, paged_sizes, paged_tokens, sequence_ids
from .scalars import check_num_threads, integer
from .stages import SoftmaxArgs, WeightedSumArgs, align_args, softmax_args, weighted_sum_args
from .states import states_args
from .varlen import VarlenArgs, check_varlen_names, varlen_args, varlen_backward_args

__all__ = ["OPTIONS", "Args", "BackwardArgs", "SoftmaxArgs", "SoftmaxBackwardArgs", "VarlenArgs", "WeightedSumArgs",
           "align_args", "append_args", "attention_args", "backward_args", "cache_sizes", "check_attend",
           "check_cache_want", "check_lse", "check_no_distances", "check_num_threads", "check_room",
           "check_rows_stay", "check_varlen_names", "integer", "keep_args", "lengths_left", "options_of", "paged_query",
           "paged_sizes", "paged_tokens", "reorder_args", "sequence_ids", "softmax_args", "softmax_backward_args",
           "states_args", "truncate_args", "varlen_args", "varlen_backward_args", "weighted_sum_args"]
