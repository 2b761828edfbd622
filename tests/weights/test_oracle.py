"""The reference maps heads, rows and keys by definitions of its own: a wrong mapping in the fast code is seen."""

import numpy as np
import pytest
from checking import inputs
from weighing import Twins

import attnc
from attnc import _slices, backward, reference
from attnc.testing import assert_within
from attnc.weights import _blocks, _keys

SIZES = (2,), 4, 2, 7, 11, 8, 8        # two groups of two heads


def weights(seed):
    """Of each seed only the same questions in the same order (`Twins`)."""
    query, key, _ = inputs(np.random.default_rng(seed), *SIZES, dtype="float64")
    return Twins(query, key, causal=True, alibi_slopes=np.array([0.1, 0.5, 1.0, 2.0]), sinks=np.arange(4.0))


def masses():
    twins = weights(1)
    for heads in (None, "group", "mean", "sum", "max"):
        twins.check(lambda W, heads=heads: W.key_mass(heads=heads), 7, f"heads={heads}")


def rows():
    twins = weights(2)
    for chosen in (slice(1, None, 2), [0, -1, 0], (5, 2), (4,), np.arange(7) > 4, []):
        twins.check(lambda W, chosen=chosen: W.key_mass(rows=chosen), 7, f"rows={chosen}")


def maps():
    twins = weights(3)
    for bins in ((3, 4), (7, 11), (1, 1)):
        twins.check(lambda W, bins=bins: W.map(bins), name=f"bins={bins}")


def sparse():
    twins = weights(4)
    for how in ({"threshold": 0.2}, {"top_p": 0.6}):
        fast, honest = twins.fast.sparse(**how), twins.honest.sparse(**how)
        np.testing.assert_array_equal(fast.indptr, honest.indptr)
        np.testing.assert_array_equal(fast.indices, honest.indices)
        twins.check(lambda W, how=how: W.sparse(**how).dropped, 4, f"dropped {how}")


def tiles():
    twins = weights(5)
    fast, honest = (W.reduce(lambda seen, tile, index: [*seen, index], [], rows=3, keys=4)
                    for W in (twins.fast, twins.honest))
    assert fast == honest and len(fast) == 2 * 4 * 3 * 3


def heads():
    twins = weights(6)
    for head in ((0, 1), (1, 2), (-1, -1)):
        twins.check(lambda W, head=head: W.head(*head).dense(), name=f"head {head}")


def gradients():
    """Of inputs that broadcast, and of the sinks, also where the lse has no digits left for the row sum."""
    random = np.random.default_rng(4)
    query, key, value = inputs(random, *SIZES, dtype="float64")
    bias = random.standard_normal((1, 1, 11))
    for far in (0.0, 5e3):
        sinks = random.standard_normal(4) + far
        options = dict(bias=bias + far, sinks=sinks)
        result = reference.attention(query, key[:1], value[:1], want="lse", **options)
        given = (random.standard_normal(result.output.shape), query, key[:1], value[:1], *result)
        names = ("query", "key", "value", "bias", "sinks")
        fast, honest = (module.attention_backward(*given, want=names, **options) for module in (attnc, reference))
        for name in names:
            wanted = getattr(honest, name)
            assert_within(getattr(fast, name), wanted, wanted, scale=1e3 * max(1.0, np.abs(wanted).max()), name=name)


def test_mappings():
    for say in (masses, rows, maps, sparse, tiles, heads, gradients):
        say()


def by_member(x, heads, a):
    """Heads that are members of the same rank of their groups, instead of those of one group."""
    if heads != "group":
        return right["over_heads"](x, heads, a)
    return np.stack([x[..., head::a.kv_heads, :].sum(-2) for head in range(a.kv_heads)], -2)


def shifted(bins, length):
    return np.minimum((np.arange(length) + 1) * bins // length, bins - 1)


def one_more(kept, threshold, top_p):
    return right["kept"](kept, threshold, None if top_p is None else min(1.0, top_p + 0.2))


def keys_first(shape, rows, keys):
    found = list(right["tiles"](shape, rows, keys))
    return sorted(found, key=lambda index: (*index[:-2], index[-1].start, index[-2].start))


def next_head(a, places):
    return right["one_head"](a, (*places[:-1], (places[-1] + 1) % a.q_heads))


def of_next_sink(b, sinks, delta, known):
    return np.roll(right["of_sinks"](b, sinks, delta, known), 1)


def of_first_copy(x, shape):
    return x[(0,) * (x.ndim - len(shape)) + tuple(slice(0, n) for n in shape)]


def every_row_once(self, rows, row_weights):
    order, found = right["walk"](self, rows, row_weights)
    return order, None if isinstance(rows, list) else found


right = dict(over_heads=_keys.over_heads, kept=_blocks._kept, tiles=_blocks._tiles, one_head=_slices.one_head,
             of_sinks=backward._of_sinks, walk=_keys.KeyStatistics._walk)
FAULTS = {
    "heads": (masses, _keys, "over_heads", by_member),
    "rows": (rows, _keys.KeyStatistics, "_walk", every_row_once),
    "bins": (maps, _keys, "bin_labels", shifted),
    "sparse": (sparse, _blocks, "_kept", one_more),
    "tiles": (tiles, _blocks, "_tiles", keys_first),
    "head": (heads, attnc.weights._weights, "one_head", next_head),
    "sinks": (gradients, backward, "_of_sinks", of_next_sink),
    "broadcast": (gradients, backward, "_sum_to", of_first_copy),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_mapping_is_seen(monkeypatch, fault):
    say, where, name, wrong = FAULTS[fault]
    monkeypatch.setattr(where, name, wrong)
    with pytest.raises(AssertionError):
        say()
