"""Hold a statement about weights against its twin by the derived tolerance."""

import numpy as np
from checking import expected, largest, sharing

import attnc
from attnc import reference
from attnc.testing import assert_within


def twin(query, key, wide=False, **options):
    """The reference's weights, `wide`: computed one precision up."""
    W = reference.AttentionWeights(query, key, **options)
    if wide:
        W._a.acc = np.dtype(np.longdouble if W._a.acc == np.float64 else np.float64)
        W._given = None if W._given is None else W._given.astype(W._a.acc)
    return W


def both(query, key, **options):
    """The twin, the twin one precision up, and what they have said so far: a list, in the order of the questions."""
    query, key = query.copy(), key.copy()     # a test may change its own
    return twin(query, key, **options), twin(query, key, True, **options), []


class Twins:
    """The weights three times: fast, honest (the twin), exact (the twin one precision up).

    A test asks the same questions in the same order under each instruction set; the twins answer once.
    """

    def __init__(self, query, key, **options):
        self.fast = attnc.AttentionWeights(query, key, **options)
        self.honest, self.exact, self.answers = expected(both, query, key, **options)
        self.asked = 0
        _, (lse, scores) = self.ask(lambda W: (W.lse, np.multiply(*W._scores())))
        self.logits = max(1.0, largest(lse), largest(scores))

    def ask(self, say):
        """What honest and exact say."""
        with sharing, np.errstate(all="ignore"):
            if self.asked == len(self.answers):
                self.answers.append((say(self.honest), say(self.exact)))
        self.asked += 1
        return self.answers[self.asked - 1]

    def check(self, say, scale=1.0, name="result"):
        """`say` of all three: the fast one within tolerance; returns it. `scale` is a number or a function of exact."""
        with np.errstate(all="ignore"):
            got = say(self.fast)
        honest, exact = self.ask(say)
        bound = scale(exact) if callable(scale) else scale
        assert_within(got, exact, honest, scale=bound, name=name)
        return got

    def check_topk(self, k):
        """The weights in order, and indices of keys that have these weights."""
        top = self.fast.topk(k)
        wanted = self.check(lambda W: W.topk(k).weights, name="topk")
        assert top.indices.dtype == np.int64 and top.indices.shape == wanted.shape
        (honest, _), (exact, dense) = self.ask(lambda W: (W.topk(k), W.dense()))
        np.testing.assert_array_equal(top.indices == -1, exact.indices == -1)
        there = np.take_along_axis(dense, np.maximum(top.indices, 0), -1)
        there = np.where(top.indices == -1, np.where(np.isnan(top.weights), np.nan, 0), there)
        assert_within(top.weights, there, honest.weights, name="weights at the indices")
        rows = np.sort(top.indices.reshape(-1, k), -1)
        assert not ((rows[:, 1:] == rows[:, :-1]) & (rows[:, 1:] >= 0)).any()
        return top


def at_least_one(exact):
    return max(1.0, largest(exact))
