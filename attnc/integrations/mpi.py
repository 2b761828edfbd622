"""Ring attention over MPI ranks: keys and values go round while each rank attends with its own queries.

Each rank holds a part of the sequence. In every step it sends the keys and values it has to the next rank, receives
those of the one before, and meanwhile attends over what it has; outputs are merged by their lse (Liu et al. 2023, "Ring
Attention with Blockwise Transformers"). With ``order="zigzag"`` a rank holds two pieces, one from either end, so that
all have the same work in causal attention (Brandon et al. 2023, "Striped Attention", balance the same way by stripes).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

import attnc

from .._checks import attention_args
from .._checks.scalars import check_causal, check_choice, check_want
from ..results import AttentionGradients, AttentionResult

ORDERS = ("contiguous", "zigzag")


class Piece(NamedTuple):
    """Places start .. stop of the whole sequence, which lie from `at` on in what a rank holds."""

    start: int
    stop: int
    at: int

    @property
    def here(self) -> slice:
        return slice(self.at, self.at + self.stop - self.start)


def pieces(length: int, size: int, order: str = "contiguous") -> list[list[Piece]]:
    """Which places of a sequence each of `size` ranks holds, in the order in which it holds them.

    Parameters
    ----------
    length : int
        Of the whole sequence.
    size : int
        Ranks.
    order : {"contiguous", "zigzag"}
        One piece for each rank; or two, the r-th from the front and the r-th from the back.

    Returns
    -------
    list of list of Piece
        For each rank.

    Examples
    --------
    >>> [[(piece.start, piece.stop) for piece in of_rank] for of_rank in pieces(8, 2, "zigzag")]
    [[(0, 2), (6, 8)], [(2, 4), (4, 6)]]
    """
    check_choice("order", order, ORDERS)
    count = size if order == "contiguous" else 2 * size
    cuts = [n * length // count for n in range(count + 1)]
    numbers = [(rank,) if order == "contiguous" else (rank, count - 1 - rank) for rank in range(size)]
    found = []
    for of_rank in numbers:
        at, own = 0, []
        for n in of_rank:
            own.append(Piece(cuts[n], cuts[n + 1], at))
            at += cuts[n + 1] - cuts[n]
        found.append(own)
    return found


def scatter(comm, array, order: str = "contiguous", axis: int = -2) -> np.ndarray:
    """This rank's part of an array that every rank has, along `axis`."""
    own = pieces(array.shape[axis], comm.size, order)[comm.rank]
    return np.concatenate([np.take(array, range(piece.start, piece.stop), axis) for piece in own], axis)


def ring_attention(comm, query, key, value, *, causal=False, scale=None, softcap=None, sinks=None,
                   order="contiguous", want=(), num_threads=None):
    """`attnc.attention` over a sequence that lies over the ranks of a communicator.

    Parameters
    ----------
    comm : mpi4py communicator
    query, key, value : array (..., q_heads, length of this rank's part, head_dim) and so on
        This rank's part, as `pieces` of the whole length says (`scatter` cuts it so).
    causal, scale, softcap, sinks, num_threads
        As in `attnc.attention`, the same on every rank.
    order : {"contiguous", "zigzag"}
        As in `pieces`; "zigzag" gives all ranks the same work where `causal` is True.
    want : name or tuple of names
        ``"lse"``.

    Returns
    -------
    array (..., q_heads, length, value_dim), or AttentionResult
        The rows of this rank's part.

    Raises
    ------
    TypeError, ValueError
        On every rank, if one has a wrong argument or they do not fit each other.

    Examples
    --------
    >>> import numpy as np
    >>> from mpi4py import MPI
    >>> ring_attention(MPI.COMM_SELF, np.ones((1, 2, 4)), np.ones((1, 2, 4)), np.ones((1, 2, 1)))[0, :, 0]
    array([1., 1.])
    """
    options = {"scale": scale, "softcap": softcap, "num_threads": num_threads}
    ring = _Ring(comm, query, key, value, options | {"sinks": sinks}, causal, order, want)
    states = {}
    for held, arrays in ring.turns([key, value]):
        for mine in ring.own:
            for theirs in held:
                first = mine not in states
                if causal and theirs.start >= mine.stop and not first:
                    continue
                result = attnc.attention(
                    ring.query[..., mine.here, :], *(x[..., theirs.here, :] for x in arrays), causal=causal,
                    q_offset=mine.start - theirs.start if causal else None, sinks=sinks if first else None,
                    want="lse", **options)
                state = result.output, result.lse
                states[mine] = state if first else attnc.merge_states([states[mine], state])
    output, lse = (np.concatenate([states[mine][n] for mine in ring.own], axis) for n, axis in ((0, -2), (1, -1)))
    output = output.astype(ring.args.dtype)
    return AttentionResult(output, lse=lse) if ring.args.want else output


def ring_attention_backward(comm, grad_output, query, key, value, output, lse, *, causal=False, scale=None,
                            softcap=None, order="contiguous", num_threads=None) -> AttentionGradients:
    """Gradients of `ring_attention`: those of keys and values travel with them and come home after one round.

    Parameters
    ----------
    comm, query, key, value, causal, scale, softcap, order, num_threads
        As they went into `ring_attention`.
    grad_output, output, lse : array
        This rank's part of each; output and lse as ``ring_attention(..., want="lse")`` gave them.

    Returns
    -------
    AttentionGradients
        ``query``, ``key`` and ``value``, each of this rank's part, in its dtype.

    Raises
    ------
    TypeError, ValueError
        On every rank, if one has a wrong argument or they do not fit each other.

    Examples
    --------
    >>> import numpy as np
    >>> from mpi4py import MPI
    >>> one = np.ones((1, 2, 1))
    >>> result = ring_attention(MPI.COMM_SELF, one, one, one, want="lse")
    >>> ring_attention_backward(MPI.COMM_SELF, one, one, one, one, result.output, result.lse).value[0, :, 0]
    array([1., 1.])
    """
    options = {"scale": scale, "softcap": softcap, "num_threads": num_threads}
    ring = _Ring(comm, query, key, value, options, causal, order, (), grad_output=grad_output, output=output, lse=lse)
    acc = ring.args.acc
    wide = {name: np.zeros(x.shape, acc) for name, x in (("query", query), ("key", key), ("value", value))}
    for held, arrays in ring.turns([key, value], travelling := [wide["key"], wide["value"]]):
        for mine in ring.own:
            rows = [x[..., mine.here, :] for x in (grad_output, ring.query, output)]
            for theirs in held:
                if causal and theirs.start >= mine.stop:
                    continue
                keys = [x[..., theirs.here, :].astype(acc) for x in arrays]
                found = attnc.attention_backward(
                    rows[0], rows[1], *keys, rows[2], lse[..., mine.here], causal=causal,
                    q_offset=mine.start - theirs.start if causal else None, **options)
                wide["query"][..., mine.here, :] += found.query
                for total, part in zip(travelling, (found.key, found.value), strict=True):
                    total[..., theirs.here, :] += part
    key_grad, value_grad = travelling
    return AttentionGradients(query=wide["query"].astype(query.dtype), key=key_grad.astype(key.dtype),
                              value=value_grad.astype(value.dtype))


class _Ring:
    """Checked arguments, which pieces each rank holds, and the turns of the ring."""

    def __init__(self, comm, query, key, value, options, causal, order, want, **more):
        self.comm = comm
        self.args, mine = None, None
        try:
            check_choice("order", order, ORDERS)
            self.args = a = attention_args(query, key, value, causal=check_causal(causal), want=want, **options)
            if set(check_want(want)) - {"lse"}:
                raise ValueError(f"want={want!r}; wanted 'lse' or nothing")
            for name, x in more.items():
                shape = a.lse_shape if name == "lse" else a.out_shape
                if np.shape(x) != shape:
                    raise ValueError(f"{name} has shape {np.shape(x)}; wanted {shape}")
            alike = (a.batch, a.q_heads, a.kv_heads, a.head_dim, a.value_dim, key.dtype.str, value.dtype.str,
                     a.dtype.str, causal, order, a.scale, a.softcap, None if a.sinks is None else a.sinks.tobytes())
            mine = (query.shape[-2], key.shape[-2], alike)
        except (TypeError, ValueError) as error:
            mine = error
        everyone = comm.allgather(mine)
        self._check(everyone)
        query_len, key_len = (sum(each[n] for each in everyone) for n in (0, 1))
        wanted = [pieces(length, comm.size, order) for length in (query_len, key_len)]
        for n, name in enumerate(("query", "key")):
            found = [each[n] for each in everyone]
            whole = [sum(piece.stop - piece.start for piece in own) for own in wanted[n]]
            if found != whole:
                raise ValueError(f"the lengths of {name} over the ranks are {found}; wanted {whole}: order={order!r} "
                                 f"of {sum(found)} places")
        if causal and query_len != key_len:
            raise ValueError(f"causal attention of {query_len} rows over {key_len} keys; wanted equally many")
        self.own, self.holders = wanted[0][comm.rank], wanted[1]
        self.query = query.astype(self.args.acc)        # wide, so that merging loses nothing

    def _check(self, everyone):
        """Raise on every rank what is wrong on any."""
        wrong = [(rank, each) for rank, each in enumerate(everyone) if isinstance(each, Exception)]
        if wrong:
            rank, error = wrong[0]
            raise type(error)(f"rank {rank}: {error}")
        for rank, each in enumerate(everyone):
            if each[2] != everyone[0][2]:
                raise ValueError(f"rank {rank} has batch, q_heads, kv_heads, head_dim, value_dim, dtypes and options "
                                 f"{each[2][:-1]}; wanted those of rank 0: {everyone[0][2][:-1]}")

    def turns(self, arrays: list, totals: list | None = None):
        """For each rank in turn, from this one backwards: its pieces, and its arrays.

        While the caller works with the arrays of one rank, those of the next arrive. The totals are what the caller
        adds to for the arrays at hand; they go on when it is done, and are this rank's own again after the last turn.
        """
        size, rank = self.comm.size, self.comm.rank
        after, before = (rank + 1) % size, (rank - 1) % size
        held = [np.ascontiguousarray(x) for x in arrays]
        for turn in range(size):
            owner, coming, pending = (rank - turn) % size, held, []
            if turn + 1 < size:
                coming = [np.empty(self._shape(x, (owner - 1) % size), x.dtype) for x in held]
                for tag, (going, place) in enumerate(zip(held, coming, strict=True)):
                    pending += [self.comm.Irecv(_bytes(place), before, tag), self.comm.Isend(_bytes(going), after, tag)]
            yield self.holders[owner], held
            for request in pending:
                request.Wait()
            for n, total in enumerate(totals or ()):
                place = np.empty(self._shape(total, (owner - 1) % size), total.dtype)
                self.comm.Sendrecv(_bytes(np.ascontiguousarray(total)), after, 8 + n, _bytes(place), before, 8 + n)
                totals[n] = place
            held = coming

    def _shape(self, x, owner: int) -> tuple:
        """Of an array like x as another rank holds it."""
        return *x.shape[:-2], sum(piece.stop - piece.start for piece in self.holders[owner]), x.shape[-1]


def _bytes(array: np.ndarray) -> np.ndarray:
    """As bytes, which MPI has a type for whatever the dtype."""
    return array.reshape(-1).view(np.uint8)
