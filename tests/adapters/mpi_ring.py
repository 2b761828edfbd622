"""Run by every rank of tests/adapters/test_mpi.py: rings against the result in one piece, and errors on every rank."""

import sys
from contextlib import contextmanager, nullcontext

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


def refused(comm, kind, text, *arrays, function=ring_attention, **options):
    try:
        function(comm, *arrays, **options)
    except kind as error:
        assert text in str(error), error
        assert comm.allgather(comm.rank) == list(range(comm.size)), "the ranks are at different places"
        return
    raise AssertionError(f"nothing was raised; wanted {kind.__name__} with {text!r}")


@contextmanager
def failing(name, kind, calls):
    """A function of attnc raises after a number of calls."""
    real, left = getattr(attnc, name), iter(range(calls))

    def function(*arguments, **options):
        if next(left, None) is None:
            raise kind("planted")
        return real(*arguments, **options)

    setattr(attnc, name, function)
    yield
    setattr(attnc, name, real)


def check_failures(comm, query, key, value):
    """An exception on one rank is one on every rank, wherever it comes: none is left waiting."""
    last = comm.rank == comm.size - 1
    where = f"rank {comm.size - 1}: "
    for options in ({"caussal": True}, {"scale": "half"}, {"sinks": [1.0]}, {"num_threads": 0}, {"softcap": -1},
                    {"want": "weights"}, {"causal": 2}):
        kind = TypeError if set(options) & {"caussal", "scale", "causal"} else ValueError
        text = where if options != {"caussal": True} else f"{where}ring_attention() got an unexpected keyword"
        refused(comm, kind, text, query, key, value, **(options if last else {}))
    refused(comm, TypeError, f"{where}ring_attention() missing a required argument: 'value'", query, key,
            *([] if last else [value]))
    refused(comm, TypeError, where, query, key, object() if last else value)
    refused(comm, TypeError, where, query, None if last else key, value)
    refused(comm, ValueError, where, query, key, value[:, :1] if last else value)
    refused(comm, TypeError, where, query, key, np.ma.masked_array(value) if last else value)
    result = ring_attention(comm, query, key, value, want="lse")
    right = [result.output, query, key, value, result.output, result.lse]
    for kind, wrong in ((ValueError, [*right[:5], result.lse[..., 1:]]), (TypeError, right[:5]),
                        (TypeError, [result.output.astype(complex), *right[1:]])):
        refused(comm, kind, where, *(wrong if last else right), function=ring_attention_backward)
    for kind, raised in ((MemoryError, MemoryError), (KeyError, RuntimeError), (KeyboardInterrupt, RuntimeError)):
        for calls in range(comm.size):
            own = KeyboardInterrupt if last and kind is KeyboardInterrupt else raised
            text = "planted" if own is KeyboardInterrupt else where
            with failing("attention", kind, calls) if last else nullcontext():
                refused(comm, own, text, query, key, value)
            with failing("attention_backward", kind, calls) if last else nullcontext():
                refused(comm, own, text, *right, function=ring_attention_backward)
    if comm.size == 1:
        return
    refused(comm, ValueError, f"{where[:-2]} has function=ring_attention_backward; wanted", *(
        right if last else [query, key, value]), function=ring_attention_backward if last else ring_attention)
    sinks = np.float32([0, 1, 2, 3])
    text = f"rank {comm.size - 1} has sinks[2]=9.0; wanted what rank 0 has: sinks[2]=2.0"
    refused(comm, ValueError, text, query, key, value, sinks=np.where(last & (sinks == 2), 9, sinks))
    text = f"rank {comm.size - 1} has scale=0.5, softcap=2.0; wanted what rank 0 has: scale=0.35355"
    refused(comm, ValueError, text, query, key, value, **({"scale": 0.5, "softcap": 2} if last else {}))
    text = f"rank {comm.size - 1} has key.dtype=float16; wanted what rank 0 has: key.dtype=float32"
    refused(comm, ValueError, text, query, key.astype(np.float16) if last else key, value)
    refused(comm, ValueError, "has value.shape[:-2]=(2,); wanted", query, key, value[0] if last else value)
    refused(comm, ValueError, "has batch=(1,), ", *(x[:1] if last else x for x in (query, key, value)))
    refused(comm, ValueError, "has causal=True; wanted what rank 0 has: causal=False", query, key, value, causal=last)
    refused(comm, ValueError, "has order=zigzag; wanted", query, key, value, order="zigzag" if last else "contiguous")
    swapped = (x.astype(x.dtype.newbyteorder()) if last else x for x in (query, key, value))
    np.testing.assert_array_equal(ring_attention(comm, *swapped), result.output)


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
        refused(comm, ValueError, "wanted what rank 0 has", query, key, value, scale=0.5 if last else None)
        refused(comm, ValueError, "lengths of key", query, *(x[..., 1:, :] if last else x for x in (key, value)))
    refused(comm, ValueError, "order", query, key, value, order="spiral")
    refused(comm, ValueError, "want=", query, key, value, want="weights")
    check_failures(comm, query, key, value)
    flat = (x[0, 0] for x in (query, key, value))
    np.testing.assert_allclose(ring_attention(comm, *flat), ring_attention(comm, query, key, value)[0, 0], atol=1e-6)
    if comm.rank == 0:
        print("all right")


if __name__ == "__main__":
    main(int(sys.argv[1]))
