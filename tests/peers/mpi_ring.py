"""Run by every rank of tests/peers/test_mpi.py: rings against the result in one piece, and errors on every rank."""

import sys

import numpy as np
from mpi4py import MPI

import attnc
from attnc.integrations.mpi import ring_attention, ring_attention_backward, scatter
from attnc.testing import assert_within, exact_attention


def whole(seed, length, dtype):
    random = np.random.default_rng(seed)
    return [random.standard_normal(shape).astype(dtype) for shape in
            ((2, 4, length, 8), (2, 2, length, 8), (2, 2, length, 5), (2, 4, length, 5))]


def check(comm, seed, length, dtype, order, options):
    arrays = whole(seed, length, dtype)
    query, key, value, grad = (scatter(comm, x, order) for x in arrays)
    got = ring_attention(comm, query, key, value, order=order, want="lse", num_threads=1, **options)
    exact, honest = exact_attention(*arrays[:3], **options), attnc.attention(*arrays[:3], want="lse", **options)
    assert got.output.dtype == honest.output.dtype
    assert_within(got.output, scatter(comm, exact.output, order), scatter(comm, honest.output, order),
                  scale=np.abs(arrays[2]).max())
    lse = scatter(comm, exact.lse, order, -1)
    largest = np.abs(exact.scores[np.isfinite(exact.scores)]).max()
    assert_within(got.lse, lse, scatter(comm, honest.lse, order, -1), scale=max(1, largest))
    if "sinks" in options:
        return
    mine = ring_attention_backward(comm, grad, query, key, value, got.output, got.lse, order=order, num_threads=1,
                                   **options)
    result = attnc.attention(*arrays[:3], want="lse", **options)
    together = attnc.attention_backward(arrays[3], *arrays[:3], result.output, result.lse, **options)
    for name in ("query", "key", "value"):
        wanted = scatter(comm, getattr(together, name), order)
        got, atol = getattr(mine, name), 1e-5 * max(1, np.abs(wanted).max(initial=0))
        np.testing.assert_allclose(got, wanted, rtol=0, atol=atol, err_msg=name)
        assert got.dtype == wanted.dtype


def refused(comm, kind, text, *arrays, **options):
    try:
        ring_attention(comm, *arrays, **options)
    except kind as error:
        assert text in str(error), error
        return
    raise AssertionError(f"nothing was raised; wanted {kind.__name__} with {text!r}")


def main(seed):
    comm = MPI.COMM_WORLD
    for order in ("contiguous", "zigzag"):
        for length in (32, 37, 3):
            check(comm, seed, length, np.float32, order, {})
            check(comm, seed, length, np.float32, order, {"causal": True})
        check(comm, seed, 40, np.float64, order, {"causal": True, "softcap": 3.0, "scale": 0.3})
        check(comm, seed, 40, np.float32, order, {"causal": True, "sinks": np.float32([0.5, -1, 0, 2])})
    query, key, value, _ = (scatter(comm, x) for x in whole(seed, 16, np.float32))
    last = comm.rank == comm.size - 1
    refused(comm, ValueError, f"rank {comm.size - 1}: ", query, key[..., :7] if last else key, value)
    refused(comm, TypeError, f"rank {comm.size - 1}: ", query, key.astype(complex) if last else key, value)
    if comm.size > 1:
        refused(comm, ValueError, "wanted those of rank 0", query, key, value, scale=0.5 if last else None)
        refused(comm, ValueError, "lengths of key", query, *(x[..., 1:, :] if last else x for x in (key, value)))
    refused(comm, ValueError, "order", query, key, value, order="spiral")
    refused(comm, ValueError, "want=", query, key, value, want="weights")
    if comm.rank == 0:
        print("all right")


if __name__ == "__main__":
    main(int(sys.argv[1]))
