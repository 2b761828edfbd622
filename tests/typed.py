"""What a user's type checker sees: mypy --strict reads this file (make lint), nothing runs it."""

from typing import Any, assert_type

import numpy as np
from numpy.typing import NDArray

import attnc

x = np.zeros((1, 2, 3, 4), np.float32)
assert_type(attnc.attention(x, x, x), NDArray[Any])
assert_type(attnc.attention(x, x, x, causal=True, window=(3, None), num_threads=1), NDArray[Any])
assert_type(attnc.attention(x, x, x, want=()), NDArray[Any])
assert_type(attnc.attention(x, x, x, want="lse"), attnc.AttentionResult)
assert_type(attnc.attention(x, x, x, want=("lse", "weights")), attnc.AttentionResult)
assert_type(attnc.attention(x, x, x, want="weights").weights, NDArray[Any])
output, lse = attnc.attention(x, x, x, want="lse")
assert_type(lse, NDArray[Any])
assert_type(attnc.attention([[1.0]], [[1.0]], [[1.0]]), NDArray[Any])
assert_type(attnc.attention_scores(x, x, stage="raw"), NDArray[Any])
assert_type(attnc.attention_weights(x, x), NDArray[Any])
assert_type(attnc.attention_varlen(x[0], x[0], x[0], [0, 2], [0, 2], want="lse"), attnc.AttentionResult)
assert_type(attnc.attention_varlen(x[0], x[0], x[0], [0, 2], [0, 2]), NDArray[Any])
assert_type(attnc.softmax(x, axis=(0, 1)), NDArray[Any])
assert_type(attnc.weighted_sum(x, x), NDArray[Any])
pairs = [(np.zeros((3, 4)), np.zeros(3))]
assert_type(attnc.merge_states(pairs), tuple[NDArray[Any], NDArray[Any]])
attnc.merge_states((([[1.0]], [0.0]), [np.ones((1, 1)), np.ones(1)]))
assert_type(attnc.alibi_slopes(4), NDArray[np.float64])
assert_type(attnc.align([[1.0]]), tuple[NDArray[np.int64], NDArray[np.int64]])
assert_type(attnc.KVCache(1, 2, 4, capacity=3, dtype=x.dtype).attend(x, want="entropy"), attnc.AttentionResult)
assert_type(attnc.get_num_threads(), int)
assert_type(attnc.isa(), str)

attnc.attention(x, x, x, want="output")  # type: ignore[call-overload]
attnc.attention(x, x, x, window=3)  # type: ignore[call-overload]
attnc.merge_states(iter(pairs))  # type: ignore[arg-type]
attnc.attention(x, x)  # type: ignore[call-overload]
attnc.attention(x, x, x, None)  # type: ignore[call-overload]
attnc.attention_scores(x, x, stage="softmax")  # type: ignore[arg-type]

weights = attnc.AttentionWeights(x, x, causal=True)
assert_type(weights.entropy(), NDArray[Any])
assert_type(weights.topk(2).indices, NDArray[Any])
assert_type(weights.head(0, 1), attnc.AttentionWeights)
assert_type(weights.relevance(x, x, sign="both").key_mass(), NDArray[Any])
assert_type(weights.weighted(heads=[1.0, 2.0]).topk(2).indices, NDArray[Any])
weights.relevance(x, x, sign="negative")  # type: ignore[arg-type]
assert_type(weights.reduce(lambda total, tile, index: total + float(tile.sum()), 0.0), float)
assert_type(attnc.rollout([weights, weights], 1), NDArray[Any])
weights.map(3)  # type: ignore[arg-type]
weights.key_mass(heads="first")  # type: ignore[arg-type]
