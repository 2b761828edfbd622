"""What a capture has found: a record for each call of attention, in a list that can join the steps of a generation."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, SupportsIndex, overload

from . import _join

if TYPE_CHECKING:
    from ..._types import ArrayLike

_PLACE = ("layer", "call", "index", "shape", "q_len", "reordered")


class AttentionRecord(SimpleNamespace):
    """What one call of attention gave.

    Attributes
    ----------
    layer : str
        Name of the module that called.
    call : int
        The nth call of that module in this forward pass, from 0.
    index : int
        The nth call of attention in this forward pass, from 0.
    shape : tuple
        That of the recorded weights: (..., heads, rows, keys).
    q_len : int
        Rows of the call, of which ``shape[-2]`` are recorded.
    reordered : bool
        Whether this pass found the keys of the pass before in other places: beam search has exchanged sequences, or a
        cache has dropped its first keys.
    """

    layer: str
    call: int
    index: int
    shape: tuple[int, ...]
    q_len: int
    reordered: bool

    def relevance(self, *, sign: str = "positive") -> Any:
        """The weights times the gradient of the loss for each of them, as `AttentionWeights.relevance` gives it.

        Parameters
        ----------
        sign : "positive" or "both"

        Raises
        ------
        ValueError
            If the capture was not asked for ``"relevance"``, or no gradient has come yet.
        """
        missing = [name for name in ("weights", "value", "grad_output") if name not in vars(self)]
        if missing:
            raise ValueError(f"the record of {self.layer!r} has no {missing[0]}; "
                             "capture(model, \"relevance\") keeps what it is computed from")
        if self.grad_output is None:
            raise ValueError(f"no gradient has come to {self.layer!r}: call backward() of a loss first")
        return self.weights.relevance(self.value, self.grad_output, sign=sign)

    def __repr__(self) -> str:
        held = ", ".join(name for name in vars(self) if name not in _PLACE and not name.startswith("_"))
        call = f", call {self.call}" if self.call else ""
        return f"AttentionRecord({self.layer}{call}, {self.shape}: {held})"


class Records(list[AttentionRecord]):
    """The records of a capture, in the order of the calls; a slice of them is one too."""

    @overload
    def __getitem__(self, index: SupportsIndex, /) -> AttentionRecord: ...
    @overload
    def __getitem__(self, index: slice, /) -> Records: ...

    def __getitem__(self, index: SupportsIndex | slice, /) -> AttentionRecord | Records:
        if isinstance(index, slice):
            return Records(super().__getitem__(index))
        return super().__getitem__(index)

    def join(self, *, beam_indices: ArrayLike | None = None) -> Records:
        """One record for each layer, whose rows are those of all its records: of a prompt and each generated token.

        Rows that know fewer keys than the last are padded with zeros: those of arrays that functions gave, and of
        ``"weights"``, whose lazy object is one of all rows. Statistics of rows are concatenated; `key_mass` is added up
        and `key_max` is the largest, over all rows; `value` is that of the last step.

        Parameters
        ----------
        beam_indices : int array (sequences, steps), optional
            For beam search, which sequence of the batch each step of the result comes from, as `generate` of
            transformers returns it, -1 after its end: rows past that are 0. Arrays have `sequences` in place of the
            batch.

        Returns
        -------
        Records
            One for each `layer` and `call`, with the `index` of its first record.

        Raises
        ------
        ValueError
            For shapes that do not continue each other, such as those of two generations; for sequences that have
            exchanged their places without `beam_indices`, and for what cannot be joined: a map, the array of a
            function that has no axis of rows, and with `beam_indices` all of `key_mass`, `key_max`, `weights`, `value`.

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
