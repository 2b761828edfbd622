"""Ring attention over MPI ranks: keys and values circulate while each rank attends with its own queries.

Each rank holds a part of the sequence. In every step it sends its current keys and values to the next rank, receives
those of the previous rank, and meanwhile attends over the current ones; outputs are merged by their lse (Liu et al.
2023, "Ring Attention with Blockwise Transformers"). With ``order="zigzag"`` a rank holds two pieces, one from either
end, so that all ranks have the same work in causal attention (Brandon et al. 2023, "Striped Attention", balance it by
stripes).
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeVar

import numpy as np

import attnc

from .._checks import attention_args, backward_args
from .._checks.scalars import check_causal, check_choice, check_want
from .._types import ArrayLike, Lse
from ..results import AttentionGradients, AttentionResult

if TYPE_CHECKING:
    from mpi4py import MPI

    from .._checks import Args

P = ParamSpec("P")
R = TypeVar("R")

ORDERS = ("contiguous", "zigzag")
SHOWN = 4       # differences that a message shows


class Piece(NamedTuple):
    """Tokens start .. stop of the whole sequence, which begin at index `at` of a rank's part."""

    start: int
    stop: int
    at: int

    @property
    def here(self) -> slice:
        return slice(self.at, self.at + self.stop - self.start)


def pieces(length: int, size: int, order: str = "contiguous") -> list[list[Piece]]:
    """The pieces of a sequence that each of `size` ranks holds, in order.

    Parameters
    ----------
    length : int
        Length of the whole sequence.
    size : int
        Number of ranks.
    order : {"contiguous", "zigzag"}
        One piece for each rank; or two, the r-th from the front and the r-th from the back.

    Returns
    -------
    list of list of Piece
        The pieces of each rank.

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


def scatter(comm: MPI.Comm, array: np.ndarray, order: str = "contiguous", axis: int = -2) -> np.ndarray:
    """This rank's part of an array that every rank has, along `axis`.

    Parameters
    ----------
    comm : mpi4py communicator
    array : array
        The whole array, the same on every rank.
    order : {"contiguous", "zigzag"}
        As in `pieces`.
    axis : int
        The axis of the sequence.

    Returns
    -------
    array
        A copy of this rank's pieces, concatenated.

    Examples
    --------
    >>> from mpi4py import MPI
    >>> scatter(MPI.COMM_SELF, np.arange(4), axis=0)       # a single rank has everything
    array([0, 1, 2, 3])
    """
    own = pieces(array.shape[axis], comm.size, order)[comm.rank]
    return np.concatenate([np.take(array, range(piece.start, piece.stop), axis) for piece in own], axis)


class _Failure(NamedTuple):
    """An exception in a form that can be sent to, and raised on, another rank."""

    kind: type[Exception]
    text: str

    @classmethod
    def of(cls, error: BaseException) -> _Failure:
        for kind in (TypeError, ValueError, MemoryError):
            if isinstance(error, kind):
                return cls(kind, str(error))
        return cls(RuntimeError, f"{type(error).__name__}: {error}")


def _attempt(function: Callable[..., R], *arguments: Any, **options: Any) -> R | BaseException:
    """The result of the function, or the exception that it raises."""
    try:
        return function(*arguments, **options)
    except BaseException as error:      # a KeyboardInterrupt of one rank ends the call of all
        return error


def _everyones(comm: MPI.Comm, mine: Any) -> list[Any]:
    """The objects of all ranks; an exception among them is raised on every rank."""
    own = mine if isinstance(mine, BaseException) else None
    everyone: list[Any] = comm.allgather(mine if own is None else _Failure.of(own))
    if own is not None and not isinstance(own, Exception):
        raise own
    for rank, each in enumerate(everyone):
        if isinstance(each, _Failure):
            raise each.kind(f"rank {rank}: {each.text}") from own
    return everyone


def _collective(function: Callable[P, R]) -> Callable[P, R]:
    """Raise on every rank if arguments do not fit the signature on one, since the others would wait for it."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*arguments: P.args, **options: P.kwargs) -> R:
        misfit = _attempt(signature.bind, *arguments, **options)
        comm: Any = arguments[0] if arguments else options.get("comm")
        if isinstance(misfit, TypeError) and hasattr(comm, "allgather"):
            _everyones(comm, TypeError(f"{function.__name__}() {misfit}"))
        return function(*arguments, **options)

    return call


@_collective
def ring_attention(comm: MPI.Comm, query: ArrayLike, key: ArrayLike, value: ArrayLike, *, causal: bool = False,
                   scale: float | None = None, softcap: float | None = None, sinks: ArrayLike | None = None,
                   order: str = "contiguous", want: Lse | tuple[()] = (),
                   num_threads: int | None = None) -> np.ndarray | AttentionResult:
    """`attnc.attention` over a sequence that is distributed over the ranks of a communicator.

    Parameters
    ----------
    comm : mpi4py communicator
    query, key, value : array (..., q_heads, length of this rank's part, head_dim) and so on
        This rank's `pieces` of the whole, as from `scatter`.
    causal, scale, softcap, sinks, num_threads
        As in `attnc.attention`, the same on every rank.
    order : {"contiguous", "zigzag"}
        As in `pieces`; "zigzag" gives all ranks the same work if `causal` is True.
    want : name or tuple of names
        ``"lse"``.

    Returns
    -------
    array (..., q_heads, length, value_dim), or AttentionResult
        The rows of this rank's part.

    Raises
    ------
    TypeError, ValueError
        On every rank, if one has a wrong argument or ranks do not fit each other; the message names rank and cause.
    MemoryError, RuntimeError
        On every rank, if one runs out of memory, or raises another exception while it computes.

    Examples
    --------
    >>> import numpy as np
    >>> from mpi4py import MPI
    >>> ring_attention(MPI.COMM_SELF, np.ones((1, 2, 4)), np.ones((1, 2, 4)), np.ones((1, 2, 1)))[0, :, 0]
    array([1., 1.])
    """
    options: dict[str, Any] = {"scale": scale, "softcap": softcap, "num_threads": num_threads}

    def check() -> Args:
        a: Args = attention_args(query, key, value, causal=check_causal(causal), want=want, sinks=sinks, **options)
        if set(check_want(want)) - {"lse"}:
            raise ValueError(f"want={want!r}; wanted 'lse' or nothing")
        return a

    ring = _Ring(comm, "ring_attention", order, check)
    states: dict[Piece, tuple[np.ndarray, np.ndarray]] = {}

    def attend(held: list[Piece], arrays: list[np.ndarray]) -> None:
        for mine in ring.own:
            for theirs in held:
                first = mine not in states
                if causal and theirs.start >= mine.stop and not first:
                    continue
                key_part, value_part = (x[..., theirs.here, :] for x in arrays)
                result = attnc.attention(
                    ring.query[..., mine.here, :], key_part, value_part, causal=causal,
                    q_offset=mine.start - theirs.start if causal else None, sinks=sinks if first else None,
                    want="lse", **options)
                state = result.output, result.lse
                states[mine] = state if first else attnc.merge_states([states[mine], state])

    def join() -> tuple[np.ndarray, np.ndarray]:
        output, lse = (np.concatenate([states[mine][n] for mine in ring.own], axis) for n, axis in ((0, -2), (1, -1)))
        return output.astype(ring.args.dtype), lse

    ring.turn(attend, [ring.key, ring.value])
    output, lse = ring.together(join)
    return AttentionResult(output, lse=lse) if ring.args.want else output


@_collective
def ring_attention_backward(
        comm: MPI.Comm, grad_output: ArrayLike, query: ArrayLike, key: ArrayLike, value: ArrayLike, output: ArrayLike,
        lse: ArrayLike, *, causal: bool = False, scale: float | None = None, softcap: float | None = None,
        order: str = "contiguous", num_threads: int | None = None) -> AttentionGradients:
    """Gradients of `ring_attention`; those of keys and values circulate with them and return after one round.

    Parameters
    ----------
    comm, query, key, value, causal, scale, softcap, order, num_threads
        As passed to `ring_attention`.
    grad_output, output, lse : array
        This rank's part of each; output and lse are those of ``ring_attention(..., want="lse")``.

    Returns
    -------
    AttentionGradients
        ``query``, ``key`` and ``value``, each of this rank's part, in its dtype.

    Raises
    ------
    TypeError, ValueError, MemoryError, RuntimeError
        As in `ring_attention`, on every rank.

    Examples
    --------
    >>> import numpy as np
    >>> from mpi4py import MPI
    >>> one = np.ones((1, 2, 1))
    >>> result = ring_attention(MPI.COMM_SELF, one, one, one, want="lse")
    >>> ring_attention_backward(MPI.COMM_SELF, one, one, one, one, result.output, result.lse).value[0, :, 0]
    array([1., 1.])
    """
    options: dict[str, Any] = {"scale": scale, "softcap": softcap, "num_threads": num_threads}
    names = "query", "key", "value"
    rows: dict[str, np.ndarray] = {}

    def check() -> Args:
        b = backward_args(grad_output, query, key, value, output, lse, sinks=None, grad_lse=None, want=names,
                          causal=check_causal(causal), **options)
        given = {"grad_output": b.grad_output, "output": b.output, "lse": b.lse}
        rows.update({name: x[0] if b.args.two_d and name != "lse" else x for name, x in given.items()})
        return b.args

    ring = _Ring(comm, "ring_attention_backward", order, check)
    acc = ring.args.acc
    totals = ring.together(lambda: {name: np.zeros(getattr(ring, name).shape, acc) for name in names})

    def pull_back(held: list[Piece], arrays: list[np.ndarray], travelling: list[np.ndarray]) -> None:
        for mine in ring.own:
            own_grad, own_output = (rows[name][..., mine.here, :] for name in ("grad_output", "output"))
            for theirs in held:
                if causal and theirs.start >= mine.stop:
                    continue
                key_part, value_part = (x[..., theirs.here, :].astype(acc) for x in arrays)
                found = attnc.attention_backward(
                    own_grad, ring.query[..., mine.here, :], key_part, value_part, own_output,
                    rows["lse"][..., mine.here], causal=causal,
                    q_offset=mine.start - theirs.start if causal else None, **options)
                totals["query"][..., mine.here, :] += found.query
                for total, part in zip(travelling, (found.key, found.value), strict=True):
                    total[..., theirs.here, :] += part

    totals["key"], totals["value"] = ring.turn(pull_back, [ring.key, ring.value], [totals["key"], totals["value"]])
    return AttentionGradients(**ring.together(lambda: {
        name: total.astype(ring.dtypes[name]) for name, total in totals.items()}))


class _Ring:
    """Checked arguments, the pieces of each rank, and the turns of the ring.

    Ranks exchange their state before they wait for each other's keys, and once more at the end: an exception on one
    rank is raised on all, and none waits for a message that is never sent.
    """

    def __init__(self, comm: MPI.Comm, name: str, order: str, check: Callable[[], Args]):
        self.comm = comm
        self.failure: BaseException | None = None
        everyone = _everyones(comm, _attempt(self._described, name, order, check))
        for rank, each in enumerate(everyone):
            _check_alike(rank, each, everyone[0])
        self.own, self.holders = self._check_lengths(everyone, order)

    def _described(self, name: str, order: str, check: Callable[[], Args]) -> dict[str, Any]:
        """The description of this rank's arguments for the other ranks."""
        check_choice("order", order, ORDERS)
        self.args = a = check()
        inputs: tuple[Any, ...] = (a.query, a.key, a.value)     # not None: ring attention has a value
        query, self.key, self.value = (x[0] if a.two_d else x for x in inputs)
        self.dtypes = {"query": query.dtype, "key": self.key.dtype, "value": self.value.dtype}
        self.query = query.astype(a.acc)                # so that partial results merge in the accumulation dtype
        lengths = {"query": a.q_len, "key": a.kv_len}
        alike = {"function": name, "batch": a.batch, "axes": query.ndim, "q_heads": a.q_heads,
                 "kv_heads": a.kv_heads, "head_dim": a.head_dim, "value_dim": a.value_dim,
                 "key.dtype": self.key.dtype.name, "value.dtype": self.value.dtype.name, "dtype": a.dtype.name,
                 "key.shape[:-2]": self.key.shape[:-2], "value.shape[:-2]": self.value.shape[:-2],
                 "causal": a.causal, "order": order, "scale": a.scale, "softcap": a.softcap}
        sinks = {} if a.sinks is None else {f"sinks[{head}]": sink for head, sink in enumerate(a.sinks.tolist())}
        return {"lengths": lengths, "alike": {name: str(x) for name, x in (alike | sinks).items()}}

    def _check_lengths(self, everyone: list[dict[str, Any]], order: str) -> tuple[list[Piece], list[list[Piece]]]:
        """This rank's pieces of the queries, and every rank's pieces of the keys."""
        found = {name: [each["lengths"][name] for each in everyone] for name in ("query", "key")}
        wanted = {name: pieces(sum(lengths), self.comm.size, order) for name, lengths in found.items()}
        for name, lengths in found.items():
            whole = [sum(piece.stop - piece.start for piece in own) for own in wanted[name]]
            if lengths != whole:
                raise ValueError(f"the lengths of {name} over the ranks are {lengths}; wanted {whole}: order={order!r} "
                                 f"of {sum(lengths)} places")
        rows, keys = (sum(lengths) for lengths in found.values())
        if self.args.causal and rows != keys:
            raise ValueError(f"causal attention of {rows} rows over {keys} keys; wanted equally many")
        return wanted["query"][self.comm.rank], wanted["key"]

    def together(self, function: Callable[[], Any]) -> Any:
        """The function's result, if neither it nor the ring raised on any rank; else raises on all."""
        result = _attempt(function) if self.failure is None else self.failure
        _everyones(self.comm, result if isinstance(result, BaseException) else None)
        return result

    def turn(self, work: Callable[..., None], arrays: list[np.ndarray],
             totals: list[np.ndarray] | None = None) -> list[np.ndarray]:
        """Call ``work(pieces, arrays)`` for the arrays of each rank in turn, from this rank's own backwards.

        While it works with the arrays of one rank, those of the next arrive. `work` adds to the totals that belong to
        its arrays; these move on when it is done, and those returned are this rank's own. After an exception a rank
        stops working but still passes on what the others wait for; `together` raises the exception.
        """
        size, rank, totals = self.comm.size, self.comm.rank, totals or []
        moving = [*arrays, *totals]
        after, before = (rank + 1) % size, (rank - 1) % size
        held, buffers = self.together(lambda: ([np.ascontiguousarray(x) for x in arrays], [
            [np.empty(max(self._bytes_of(x, owner) for owner in range(size)), np.uint8) for x in moving]
            for _ in range(2)]))
        for turn in range(size):
            owner, coming, pending = (rank - turn) % size, [], []
            places = [self._like(x, (owner - 1) % size, buffer)
                      for x, buffer in zip([*held, *totals], buffers[turn % 2], strict=True)]
            if turn + 1 < size:
                coming = places[:len(held)]
                for tag, (going, place) in enumerate(zip(held, coming, strict=True)):
                    pending += [self.comm.Irecv(_bytes(place), before, tag), self.comm.Isend(_bytes(going), after, tag)]
            if self.failure is None:
                result = _attempt(work, self.holders[owner], held, *([totals] if totals else []))
                self.failure = result if isinstance(result, BaseException) else None
            for request in pending:
                request.Wait()
            for n, (total, place) in enumerate(zip(totals, places[len(held):], strict=True)):
                self.comm.Sendrecv(_bytes(total), after, 8 + n, _bytes(place), before, 8 + n)
            held, totals = coming, places[len(held):]
        return totals

    def _shape(self, x: np.ndarray, owner: int) -> tuple[int, ...]:
        """The shape of another rank's array like x."""
        return *x.shape[:-2], sum(piece.stop - piece.start for piece in self.holders[owner]), x.shape[-1]

    def _bytes_of(self, x: np.ndarray, owner: int) -> int:
        return math.prod(self._shape(x, owner)) * x.dtype.itemsize

    def _like(self, x: np.ndarray, owner: int, buffer: np.ndarray) -> np.ndarray:
        """The part of a buffer that holds another rank's array like x."""
        return buffer[:self._bytes_of(x, owner)].view(x.dtype).reshape(self._shape(x, owner))


def _check_alike(rank: int, here: dict[str, Any], first: dict[str, Any]) -> None:
    """Raise if a rank differs from rank 0."""
    here, first = here["alike"], first["alike"]
    if here != first:
        names = [name for name in (first | here) if here.get(name) != first.get(name)]
        more = ", ..." if len(names) > SHOWN else ""
        has, wanted = (", ".join(f"{name}={of.get(name)}" for name in names[:SHOWN]) + more for of in (here, first))
        raise ValueError(f"rank {rank} has {has}; wanted what rank 0 has: {wanted}")


def _bytes(array: np.ndarray) -> np.ndarray:
    """The array as bytes, for which MPI has a type whatever the dtype."""
    return array.reshape(-1).view(np.uint8)
