"""Alignments by openai-whisper's own timing.py, which tests/api/test_align.py compares with `attnc.align`.

    python benchmarks/capture/whisper_paths.py [--check]

It needs openai-whisper in an environment of its own, with torch and numba, and attnc for the times.
"""

import argparse
import sys
import time
from pathlib import Path

import numpy as np

FILE = Path(__file__).resolve().parents[2] / "tests" / "api" / "whisper_paths.npz"
SHAPES = (1, 9), (9, 1), (2, 2), (4, 5), (7, 3), (5, 40), (40, 150), (30, 300)
LARGE = 448, 1500       # tokens and frames of whisper's longest segment


def matrix(seed, shape):
    """Like whisper's: weights of a head, standardised over the tokens; random, so that no two paths are alike."""
    weights = np.random.default_rng(seed).random(shape) ** 8
    return weights - weights.mean(0)


def whispers(x, width):
    """Filter and path of openai-whisper."""
    import torch
    from whisper import timing

    filtered = timing.median_filter(torch.from_numpy(x), width)
    return timing.dtw(-filtered.reshape(x.shape))


def seconds(function):
    """The shortest of five calls, after one."""
    function()
    times = []
    for _ in range(5):
        began = time.perf_counter()
        function()
        times.append(time.perf_counter() - began)
    return min(times)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with what is there, and write nothing")
    arguments = parser.parse_args()
    paths = {f"{seed} {rows}x{frames} {width}": whispers(matrix(seed, (rows, frames)), width).astype(np.int16)
             for seed in range(3) for rows, frames in SHAPES for width in (1, 7)}
    if arguments.check:
        with np.load(FILE) as known:
            return int(not all(np.array_equal(known[name], path) for name, path in paths.items()))
    np.savez_compressed(FILE, **paths)
    import attnc

    x = matrix(0, LARGE)
    for name, call in (("attnc", lambda: attnc.align(x)), ("openai-whisper", lambda: whispers(x, 7))):
        print(f"{name}: {1000 * seconds(call):.1f} ms for {LARGE[0]} x {LARGE[1]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
