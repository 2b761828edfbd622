"""
The limits of your own machine
==============================

How fast can attention be at all? Two numbers bound it: how many multiply-and-adds the processor does in a second, and
how many bytes it reads. attnc measures both with its own instructions, so a call can be put beside them.

:Shows: the rate of attention over the length, and of one new token over the cache, as shares of this machine's limits
:Data: random numbers, on the machine that built this page
:Time: 10 s
:Memory: 900 MB
:Needs: attnc[plot]
"""

# %%
# What is in use here. This is what to paste into a bug report.
import time

import matplotlib.pyplot as plt

import attnc
import attnc.testing
from attnc.bench import limits

print(attnc.show_config())
threads = attnc.get_num_threads()


def share(case, limit):
    """The case's rate over the limit of this machine, which is measured right after it: a processor's clock varies."""
    arrays, options = case.make(seed=0)
    times = []
    while len(times) < 3 or (sum(times) < 0.2 and len(times) < 200):
        start = time.perf_counter()
        attnc.attention(*arrays, **options)
        times.append(time.perf_counter() - start)
    probe = limit(case, arrays, options, threads)
    found = probe.probe()
    rate, peak = probe.work / min(times), found["rate"]
    note = "" if found["busy"] > 0.9 else "   (other processes were at work: no measurement)"
    print(f"{case.name:12} {rate / 1e9:6.1f} of {peak / 1e9:6.1f} G{probe.unit}{note}")
    return rate / peak


# %%
# Attention does 4 operations a head_dim for each pair of row and key: arithmetic decides.
lengths = [64, 128, 256, 512, 1024]
shares = [share(attnc.testing.Case(f"{length} tokens", 1, 8, 8, length, length, 64), limits.Arithmetic)
          for length in lengths]
assert attnc.testing.Case("", 1, 8, 8, 1024, 1024, 64).flops == 8 * 1024 ** 2 * 4 * 64

# %%
# One new token reads each key and each value once: memory decides. A short cache stays in the processor, which reads
# it faster than memory, so its share can be above 1.
caches = [1024, 4096, 16384, 65536]
read_shares = [share(attnc.testing.Case(f"{length} keys", 1, 32, 8, 1, length, 128), limits.Reading)
               for length in caches]

figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
panels = (lengths, shares, "the arithmetic"), (caches, read_shares, "memory")
for ax, (sizes, found, name) in zip(axes, panels, strict=True):
    ax.semilogx(sizes, found, "o-", color="tab:red", base=2)
    ax.axhline(1, color="0.4", linestyle="--")
    ax.set(xticks=sizes, ylim=(0, max(1.1, 1.1 * max(found))), ylabel=f"share of {name}")
    ax.set_xticklabels([f"{size:,}" for size in sizes])
axes[0].set(xlabel="tokens", title="attention, 8 heads of 64")
axes[1].set(xlabel="keys in the cache", title="one new token, 32 heads on 8 of 128")
figure.set_label("Two plots with the limit of this machine as a dashed line at 1: the share of the peak of "
                 "multiply-and-adds over the length, and the share of the read bandwidth over the number of keys.")
