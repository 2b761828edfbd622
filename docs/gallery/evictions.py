"""
Which tokens may a cache forget?
================================

Four policies choose the tokens that stay in a :class:`attnc.KVCache`: those with the most weight so far (H2O), those
that the last rows look at (SnapKV), the first and the latest (StreamingLLM), and as many as hold a share of the weight.
They read the weights of the cache without their matrix; what stays keeps its position.

:Shows: the error of the next 64 outputs against the number of tokens that stay, for each policy
:Data: random keys and queries with two sinks, forty tokens that many rows look at, and a pull to near tokens; seeded
:Time: 5 s
:Memory: 150 MB
:Needs: attnc[plot]
"""

# %%
# Four heads, a prompt of 2,048 tokens and 64 new rows. Rows look at the sinks, at the forty tokens and at their
# neighbours.
import matplotlib.pyplot as plt
import numpy as np

import attnc

HEADS, TOKENS, NEW, DIM = 4, 2048, 64, 64
rng = np.random.default_rng(0)
query, key, value = rng.standard_normal((3, 1, HEADS, TOKENS + NEW, DIM), np.float32)
special = rng.choice(TOKENS, 40, replace=False)
key[..., 0] = query[..., 0] = 0
key[:, :, [0, 1], 0], key[:, :, special, 0] = 7, 5                  # two sinks, and tokens that many rows look at
query[..., 0] = 8
slopes = np.full(HEADS, 0.01, np.float32)                           # near tokens weigh more
prompt, new = np.s_[:, :, :TOKENS], np.s_[:, :, TOKENS:]
options = {"causal": True, "alibi_slopes": slopes}


def filled():
    cache = attnc.KVCache(1, HEADS, DIM, capacity=TOKENS + NEW, dtype="float32")
    cache.append(key[prompt], value[prompt])
    return cache


# %%
# The policies. Each returns the rows of the cache to keep, ``(batch, heads, n)``, of each head its own.
def h2o(cache, n):
    mass = cache.weights(query[prompt], **options).key_mass(normalize=True)
    return np.argsort(-mass, -1, kind="stable")[..., :n]


def snapkv(cache, n, window=16):
    mass = cache.weights(query[prompt][:, :, -window:], **options).key_mass()[..., :-window]
    around = np.pad(mass, [(0, 0), (0, 0), (2, 2)])
    mass = np.lib.stride_tricks.sliding_window_view(around, 5, -1).sum(-1)
    best, own = np.argsort(-mass, -1, kind="stable")[..., :n - window], np.arange(TOKENS - window, TOKENS)
    return np.concatenate([best, np.broadcast_to(own, (*best.shape[:2], window))], -1)


def streaming(cache, n, sinks=4):
    return np.tile(np.r_[:sinks, TOKENS - n + sinks:TOKENS], (1, HEADS, 1))


def top_p(cache, p):
    mass = cache.weights(query[prompt], **options).key_mass(normalize=True)
    order = np.argsort(-mass, -1, kind="stable")
    share = np.cumsum(np.take_along_axis(mass, order, -1), -1) / mass.sum(-1, keepdims=True)
    return order[..., :1 + int((share < p).sum(-1).max())]


# %%
# The error of a policy: how far the outputs of the new rows are from those of the whole cache.
def answer(cache):
    cache.append(key[new], value[new])
    return cache.attend(query[new], **options)


whole = answer(filled())


def error(kept):
    cache = filled()
    cache.keep(kept)
    return float(np.linalg.norm(answer(cache) - whole) / np.linalg.norm(whole))


budgets = [64, 128, 256, 512, 1024]
found = {policy.__name__: [error(policy(filled(), n)) for n in budgets] for policy in (h2o, snapkv, streaming)}
shares = [top_p(filled(), p) for p in (0.5, 0.7, 0.9)]
for name, errors in found.items():
    print(f"{name:10}", *(f"{n}: {one:.3f}" for n, one in zip(budgets, errors, strict=True)), sep="  ")
    assert errors[-1] < errors[0]
assert found["snapkv"][2] < found["streaming"][2]       # forty tokens far back are worth keeping

# %%
figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
for name, errors in found.items():
    axes.plot(budgets, errors, "o-", label={"h2o": "H2O", "snapkv": "SnapKV", "streaming": "StreamingLLM"}[name])
axes.plot([kept.shape[-1] for kept in shares], [error(kept) for kept in shares], "s", color="black", label="top-p")
axes.set(xscale="log", xticks=budgets, xticklabels=budgets, xlabel=f"tokens that stay, of {TOKENS}",
         ylabel="relative error of the next outputs", ylim=(0, None))
axes.minorticks_off()
axes.legend()
figure.set_label("The relative error of the next 64 outputs falls as more tokens stay. Policies that read the weights "
                 "are below StreamingLLM, which forgets the tokens far back that many rows look at.")
