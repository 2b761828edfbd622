"""
Packed sequences without padding
================================

A batch of 100 texts of 5 to 400 tokens: padded to the longest, seven of ten tokens in memory are padding. Three ways
to compute it: padded as it is, which is wrong; padded with the lengths said, which costs memory but no work; and
packed one after another, which costs neither.

:Shows: the time of one batch, padded, padded with lengths, and packed; and the tokens that each way holds
:Data: random queries, keys and values; lengths drawn from a long-tailed distribution, seeded
:Time: 4 s
:Memory: 300 MB
:Needs: attnc[plot]
"""

# %%
# Lengths as of short messages with a few long ones among them.
import time
from itertools import pairwise

import matplotlib.pyplot as plt
import numpy as np

import attnc

rng = np.random.default_rng(0)
lengths = np.clip(rng.lognormal(4, 0.8, 100).astype(int), 5, 400)
bounds = np.concatenate([[0], lengths.cumsum()])            # where each text begins, and the end
query, key, value = rng.standard_normal((3, bounds[-1], 4, 64), np.float32)         # tokens, heads, head_dim
print(f"{len(lengths)} texts, {bounds[-1]:,} tokens; padded they are {lengths.max() * len(lengths):,}")
assert 0.65 < 1 - bounds[-1] / (lengths.max() * len(lengths)) < 0.75


def padded(packed):
    """The texts as a batch (texts, longest, heads, head_dim), zeros behind each."""
    result = np.zeros((len(lengths), lengths.max(), *packed.shape[1:]), packed.dtype)
    for text, (start, stop) in enumerate(pairwise(bounds)):
        result[text, :stop - start] = packed[start:stop]
    return result


# %%
# `kv_lengths` says how many keys count: padding is never read, so what it holds does not matter.
wide = [padded(array) for array in (query, key, value)]
ways = {
    "padded, no lengths": lambda: attnc.attention(*wide, layout="bnhd"),
    "padded, lengths": lambda: attnc.attention(*wide, layout="bnhd", q_lengths=lengths, kv_lengths=lengths),
    "packed": lambda: attnc.attention_varlen(query, key, value, bounds, bounds),
}
results = {name: call() for name, call in ways.items()}     # and memory is there
seconds = dict.fromkeys(ways, np.inf)
for _ in range(5):                                          # in turns, so that what else runs meets all of them
    for name, call in ways.items():
        start = time.perf_counter()
        call()
        seconds[name] = min(seconds[name], time.perf_counter() - start)
for name, best in seconds.items():
    print(f"{name:20} {1e3 * best:6.1f} ms")

# %%
# Packed, each text has the bits it has alone. The padded call without lengths is wrong: rows see keys of padding.
text = 7
alone = attnc.attention(*(array[bounds[text]:bounds[text + 1]] for array in (query, key, value)), layout="bnhd")
assert (results["packed"][bounds[text]:bounds[text + 1]] == alone).all()
assert np.allclose(padded(results["packed"]), results["padded, lengths"], atol=1e-5)
assert not np.allclose(padded(results["packed"])[text], results["padded, no lengths"][text], atol=1e-3)

figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
left.barh(list(ways), [1e3 * seconds[name] for name in ways], color=["0.6", "tab:blue", "tab:red"])
left.set(xlabel="milliseconds", title="time of a call")
left.invert_yaxis()
right.fill_between(range(len(lengths)), np.sort(lengths), lengths.max(), color="0.85", label="padding")
right.fill_between(range(len(lengths)), np.sort(lengths), color="tab:red", alpha=0.7, label="tokens")
right.set(xlabel="texts, by length", ylabel="tokens", title="what a padded batch holds")
right.legend(loc="upper left")
figure.set_label("Left: bars of the time of a call, padded without lengths, padded with lengths, packed. Right: the "
                 "lengths of 100 texts in order, with the padding above them, which is most of the area.")
