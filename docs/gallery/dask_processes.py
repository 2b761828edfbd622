"""
Attention on dask arrays, in two processes
==========================================

A sequence in chunks, on two worker processes: every block of keys that some row sees is a task, blocks behind the
causal border are none, and the weight that each key receives is exact, though no process ever holds the matrix.

:Shows: the weight that each of 4,096 keys receives, computed in two processes, and the blocks that were tasks
:Data: random queries and keys, in which every 512th key is one that many rows look for; seeded
:Time: 15 s
:Memory: 500 MB
:Needs: attnc[plot,dask], distributed
"""

# %%
# A cluster of this machine; any other cluster of dask's takes its place. Workers make their own random numbers.
import dask.array as da
import matplotlib.pyplot as plt
import numpy as np
from dask.distributed import Client, LocalCluster

import attnc
from attnc.integrations.dask import AttentionWeights, attention

TOKENS, CHUNK, HEADS, DIM = 4096, 1024, 2, 64


def job():
    """Output and key mass of causal attention, and the same in this process alone."""
    rng = np.random.default_rng(0)
    query, key, value = rng.standard_normal((3, HEADS, TOKENS, DIM), np.float32)
    key[:, ::512] += 1.5 * query.mean(1, keepdims=True) * np.sqrt(TOKENS)
    chunked = [da.from_array(x, chunks=(HEADS, CHUNK, DIM)) for x in (query, key, value)]
    with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster, Client(cluster) as client:
        print(f"{len(client.scheduler_info()['workers'])} worker processes")
        output = attention(*chunked, causal=True).compute()
        mass = AttentionWeights(*chunked[:2], causal=True).key_mass().compute()
    assert np.allclose(output, attnc.attention(query, key, value, causal=True), atol=1e-5)
    assert np.allclose(mass, attnc.AttentionWeights(query, key, causal=True).key_mass(), rtol=1e-4)
    return mass


# %%
# New processes import this file, so the work stands behind the usual guard.
if __name__ == "__main__":
    mass = job().mean(0)
    blocks = TOKENS // CHUNK
    tasks = np.tril(np.ones((blocks, blocks)))
    print(f"{int(tasks.sum())} of {tasks.size} blocks are tasks")
    planted = np.arange(0, TOKENS, 512)

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), width_ratios=(2.4, 1), layout="constrained")
    left.semilogy(mass, color="tab:blue", linewidth=0.6, label="every key")
    left.semilogy(planted, mass[planted], "o", color="tab:red", markersize=4, label="every 512th")
    left.set(xlabel="key", ylabel="weight it receives from all rows", title="key mass, mean over heads")
    left.legend()
    right.imshow(tasks, cmap="Blues", vmax=1.5)
    right.set(xlabel="chunk of keys", ylabel="chunk of rows", title="blocks that are tasks")
    figure.set_label("Left: the weight that each of 4,096 keys receives, with eight marked keys above the others. "
                     "Right: the blocks of rows and keys that are tasks, a filled lower triangle.")
