"""Ring attention over processes of MPI: equal to the result in one piece, errors on every rank, no hang."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("mpi4py")

from attnc.integrations.mpi import pieces

pytestmark = pytest.mark.peers
MPIEXEC = shutil.which("mpiexec", path=os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", ""))))


@pytest.mark.skipif(MPIEXEC is None, reason="there is no mpiexec")
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_rings(ranks, seed):
    script = str(Path(__file__).with_name("mpi_ring.py"))
    # -m mpi4py: an error of one rank ends them all
    command = [MPIEXEC, "-n", str(ranks), sys.executable, "-m", "mpi4py", script, str(seed)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip() == "all right"


def test_examples(python):
    assert python("""
import doctest
from attnc.integrations import mpi
found = doctest.testmod(mpi)
print(found.failed, found.attempted > 5)
""") == "0 True"


@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
@pytest.mark.parametrize(("length", "size"), [(16, 4), (17, 3), (2, 5), (0, 2)])
def test_pieces_are_a_partition(length, size, order):
    found = [np.arange(piece.start, piece.stop) for own in pieces(length, size, order) for piece in own]
    assert sorted(np.concatenate(found)) == list(range(length))
    for own in pieces(length, size, order):
        assert [piece.at for piece in own] == list(np.cumsum([0] + [p.stop - p.start for p in own])[:-1])


def test_zigzag_gives_all_ranks_the_same_causal_work():
    for own in pieces(64, 4, "zigzag"):
        assert sum(sum(range(piece.start + 1, piece.stop + 1)) for piece in own) == 64 * 65 // 2 // 4
