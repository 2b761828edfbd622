"""The results of a capture: a record for each call of attention, in a list that joins the steps of a generation."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, SupportsIndex, overload

from . import _join

if TYPE_CHECKING:
    from ..._types import ArrayLike, Sign
    from ...weights import Relevance

_PLACE = ("layer", "call", "index", "shape", "q_len", "reordered")


class AttentionRecord(SimpleNamespace):
    """The results of one call of attention.

    Attributes
    ----------
    layer : str
        Name of the module that called attention.
    call : int
        Number of the call within that module and forward pass, from 0.
    index : int
        Number of the call within the forward pass, from 0.
    shape : tuple
        Shape of the recorded weights: (..., heads, rows, keys).
    q_len : int
        Rows of the call, of which ``shape[-2]`` are recorded.
    reordered : bool
        Whether keys of the previous pass have moved: beam search has exchanged sequences, or a cache has dropped its
        first keys.
    """

    layer: str
    call: int
    index: int
    shape: tuple[int, ...]
    q_len: int
    reordered: bool

    def relevance(self, *, sign: Sign = "positive") -> Relevance:
        """The weights times the gradient of the loss with respect to each, as by `AttentionWeights.relevance`.

        Parameters
        ----------
        sign : {"positive", "both"}
            "both" keeps what is below 0.

        Returns
        -------
        Relevance
            Of the shape of the weights, without their matrix: maps, sums over rows and keys, products, dense parts.

        Raises
        ------
        ValueError
            If the capture did not request ``"relevance"``, or has received no gradient yet.

        Examples
        --------
        >>> import torch
        >>> from attnc.integrations.torch import capture
        >>> layer = torch.nn.MultiheadAttention(8, 2, batch_first=True)
        >>> with capture(layer, "relevance") as records:
        ...     layer(*[torch.randn(1, 5, 8)] * 3)[0][:, 0].sum().backward()
        >>> records[0].relevance().key_mass().shape
        (1, 2, 5)
        """
        missing = [name for name in ("weights", "value", "grad_output") if name not in vars(self)]
        if missing:
            raise ValueError(f"the record of {self.layer!r} has no {missing[0]}; "
                             "capture(model, \"relevance\") keeps what it is computed from")
        if self.grad_output is None:
            raise ValueError(f"no gradient has come to {self.layer!r}: call backward() of a loss first")
        found: Relevance = self.weights.relevance(self.value, self.grad_output, sign=sign)
        return found

    def __repr__(self) -> str:
        held = ", ".join(name for name in vars(self) if name not in _PLACE and not name.startswith("_"))
        call = f", call {self.call}" if self.call else ""
        return f"AttentionRecord({self.layer}{call}, {self.shape}: {held})"


class Records(list[AttentionRecord]):
    """The records of a capture, in the order of the calls; slices are Records too."""

    @overload
    def __getitem__(self, index: SupportsIndex, /) -> AttentionRecord: ...
    @overload
    def __getitem__(self, index: slice, /) -> Records: ...

    def __getitem__(self, index: SupportsIndex | slice, /) -> AttentionRecord | Records:
        if isinstance(index, slice):
            return Records(super().__getitem__(index))
        return super().__getitem__(index)

    def join(self, *, beam_indices: ArrayLike | None = None) -> Records:
        """One record for each layer, with the rows of all its records: of a prompt and each generated token.

        Statistics of rows are concatenated; `key_mass` is summed and `key_max` maximized over all rows; `value` is that
        of the last step. ``"weights"`` becomes one lazy object of all rows, and `map` is its map. Rows with fewer keys
        than the last, in it and in arrays of functions, are padded with zeros.

        Parameters
        ----------
        beam_indices : int array (sequences, steps), optional
            For beam search: the sequence of the batch from which each step of a result comes, as `generate` of
            transformers returns it; -1 after the end, where rows are 0. Arrays have `sequences` in place of the batch.

        Returns
        -------
        Records
            One for each `layer` and `call`, with the `index` of its first record.

        Raises
        ------
        ValueError
            For shapes that do not continue each other, such as those of two generations; for exchanged sequences
            without `beam_indices`; for results that cannot be joined: a map of fewer bins than rows or keys without
            ``"weights"`` beside it, an array of a function without an axis of rows, and, with `beam_indices`,
            `key_mass`, `key_max`, `weights` and `value`.

        Examples
        --------
        >>> import torch
        >>> from attnc.integrations.torch import capture
        >>> layer = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval()
        >>> keys = torch.zeros(1, 5, 8)
        >>> with torch.no_grad(), capture(layer, "entropy") as records:
        ...     for steps in (3, 1, 1):
        ...         _ = layer(keys[:, :steps], keys, keys)
        >>> records.join()[0].entropy.shape
        (1, 2, 5)
        """
        steps: dict[tuple[str, int], list[AttentionRecord]] = {}
        for record in self:
            steps.setdefault((record.layer, record.call), []).append(record)
        return Records([AttentionRecord(**_join.join(each, beam_indices)) for each in steps.values()])
