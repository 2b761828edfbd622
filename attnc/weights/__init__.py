"""The weights of attention as an object, and exact statistics of them without the matrix."""

from ._heads import WeightedHeads
from ._products import rollout
from ._relevance import Relevance
from ._weights import AttentionWeights

__all__ = ["AttentionWeights", "Relevance", "WeightedHeads", "rollout"]
