"""
Attention sinks over 65,536 tokens
==================================

Heads that have nothing to look at put their weight somewhere: on the first token, a *sink*. A learned logit
(``sinks=``) gives that weight a place outside the sequence. How much goes where, for every key of 65,536 tokens: the
matrix would take 16 GiB, the statistics take seconds and a few megabytes.

:Shows: the weight of each of 65,536 keys with and without a sink logit, and a map of the whole matrix
:Data: random keys and queries, in which most queries point at the first key, as published models do; seeded
:Time: 15 s
:Memory: 200 MB
:Needs: attnc[plot]
"""

# %%
# One head. Nine of ten queries have a component along a direction that only the first key has.
import matplotlib.pyplot as plt
import numpy as np

import attnc

TOKENS, DIM = 65_536, 64
rng = np.random.default_rng(0)
query, key = rng.standard_normal((2, 1, TOKENS, DIM), np.float32)
direction = np.zeros(DIM, np.float32)
direction[0] = 1
key[0, :, 0] = 0
key[0, 0] = 10 * direction
idle = rng.random(TOKENS) < 0.9
query[0, :, 0] = np.where(idle, 10, 0)

# %%
# One sweep answers three questions at once; the matrix of 65,536 x 65,536 weights exists at no time.
W = attnc.AttentionWeights(query, key, causal=True)
found = W.summary(key_mass=True, entropy=True, map=(128, 128))
first = float(found.key_mass[0, 0]) / TOKENS
print(found)
print(f"the first key receives {first:.0%} of all weight")
assert first > 0.5

# %%
# The same head with a sink logit of its own, of the size of the scores of the first key: idle rows leave part of
# their weight there, so the rows sum to less than 1.
with_sink = attnc.AttentionWeights(query, key, causal=True, sinks=np.float32([12.5]))
mass = with_sink.key_mass()
left = 1 - float(mass.sum()) / TOKENS
print(f"with a sink: {float(mass[0, 0]) / TOKENS:.0%} on the first key, {left:.0%} on no key at all")
assert mass[0, 0] < found.key_mass[0, 0] and left > 0.2

figure, (up, down) = plt.subplots(1, 2, figsize=(10, 4), width_ratios=(1.4, 1), layout="constrained")
keys = np.arange(1, TOKENS + 1)
for name, values, colour in (("no sink", found.key_mass[0], "tab:blue"), ("sink logit of 12.5", mass[0], "tab:red")):
    up.loglog(keys[::37], values[::37] / TOKENS, ".", markersize=1.5, color=colour)
    up.loglog(1, values[0] / TOKENS, "o", color=colour, label=name)
up.set(xlabel="key, counted from 1", ylabel="share of all weight", title="what each key receives")
up.legend()
attnc.plot.heatmap(W, head=0, bins=128, ax=down, norm="log")
down.set_title("the matrix, pooled to 128 x 128")
figure.set_label("Left: the share of all weight that each of 65,536 keys receives, on logarithmic axes; the first key "
                 "has most of it, less with a sink logit. Right: the pooled matrix, a dark first column and a pale "
                 "triangle.")
