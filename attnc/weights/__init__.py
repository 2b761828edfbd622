"""The weights of attention as an object, and what can be said of them without the matrix."""

from ._products import rollout
from ._weights import AttentionWeights

__all__ = ["AttentionWeights", "rollout"]
