"""
One sequence over four MPI ranks
================================

Each rank holds a quarter of a sequence, computes its own rows, and sees the other ranks' keys as they pass by in a
ring. The result is that of one process, and no rank holds more than two quarters of the keys.

:Shows: how the keys travel: which part each rank attends to in each step, and the work it does there
:Data: random queries, keys and values, seeded
:Time: 15 s
:Memory: 100 MB
:Needs: attnc[plot,mpi], mpich (or another MPI with mpiexec)
"""

# %%
# The program of a rank: `mpiexec` starts four of them. ``order="zigzag"`` gives each rank a piece from the front of
# the sequence and one from the back, so that all have the same work under a causal mask.
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

import attnc
from attnc.integrations.mpi import pieces

PROGRAM = """
import json
import numpy as np
from mpi4py import MPI
import attnc
from attnc.integrations.mpi import ring_attention, scatter

comm = MPI.COMM_WORLD
whole = np.random.default_rng(0).standard_normal((3, 4, 2048, 64), np.float32)
mine = [scatter(comm, x, "zigzag") for x in whole]
output = ring_attention(comm, *mine, causal=True, order="zigzag", num_threads=1)
expected = scatter(comm, attnc.attention(*whole, causal=True, num_threads=1), "zigzag")
error = comm.gather(float(abs(output - expected).max()))
if comm.rank == 0:
    print(json.dumps({"ranks": comm.size, "rows": output.shape[1], "errors": error}))
"""

mpiexec = shutil.which("mpiexec", path=str(Path(sys.executable).parent)) or shutil.which("mpiexec")
with tempfile.TemporaryDirectory() as folder:
    Path(folder, "ring.py").write_text(PROGRAM, encoding="utf-8")
    done = subprocess.run([mpiexec, "-n", "4", sys.executable, f"{folder}/ring.py"], capture_output=True, text=True,
                          check=True)
report = json.loads(done.stdout)
print(report)
assert report["ranks"] == 4 and max(report["errors"]) < 1e-5

# %%
# The work of each step, counted in pairs of a row and a key that it may see. In step s rank r attends to the part of
# rank r - s. In the contiguous order the last rank does almost everything and the others wait.
LENGTH, RANKS = 2048, 4
visible = attnc.masks.causal_mask(LENGTH, LENGTH)
figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True, layout="constrained")
for ax, order in zip(axes, ("contiguous", "zigzag"), strict=True):
    parts = [np.concatenate([np.arange(piece.start, piece.stop) for piece in own])
             for own in pieces(LENGTH, RANKS, order)]
    work = np.array([[visible[np.ix_(parts[rank], parts[(rank - step) % RANKS])].sum() for step in range(RANKS)]
                     for rank in range(RANKS)])
    assert work.sum() == visible.sum()
    for step in range(RANKS):
        ax.bar(range(RANKS), work[:, step] / 1e3, bottom=work[:, :step].sum(1) / 1e3, label=f"step {step}")
    ax.set(title=f'order="{order}"', xlabel="rank", xticks=range(RANKS))
    print(f"{order:10} most work of a rank / mean: {work.sum(1).max() / work.sum(1).mean():.2f}")
axes[0].set_ylabel("thousand pairs of row and key")
axes[0].legend(loc="upper left")
figure.set_label("Bars of the work of four ranks, stacked by step. In contiguous order they rise from rank 0 to rank "
                 "3; in zigzag order all are of the same height.")
