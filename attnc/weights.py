"""The weights of attention as an object, and what can be said of them without the matrix."""

from .reference import AttentionWeights, rollout

__all__ = ["AttentionWeights", "rollout"]
