"""Attention in plain NumPy: the definition of what the fast functions of the same names compute.

Everything is computed in the accumulation dtype, with the whole matrix of scores in memory and no tricks. Inputs of
float64 make it an oracle for narrower dtypes; the original inputs make it the yardstick of honest rounding.
"""

from ..masks import alibi_slopes
from ..relative import deberta_relative_index, t5_relative_bias, t5_relative_bias_backward
from ._align import align
from ._attention import attention, attention_weights, weighted_sum
from ._backward import attention_backward, log_softmax_backward, softmax_backward
from ._cache import KVCache
from ._pages import PagedKVCache
from ._scores import attention_scores
from ._softmax import log_softmax, softmax
from ._states import merge_states
from ._varlen import attention_varlen, attention_varlen_backward, attention_weights_varlen
from ._weights import AttentionWeights, rollout

__all__ = ["AttentionWeights", "KVCache", "PagedKVCache", "alibi_slopes", "align", "attention", "attention_backward",
           "attention_scores", "attention_varlen", "attention_varlen_backward", "attention_weights",
           "attention_weights_varlen", "deberta_relative_index", "log_softmax", "log_softmax_backward", "merge_states",
           "rollout", "softmax", "softmax_backward", "t5_relative_bias", "t5_relative_bias_backward", "weighted_sum"]
