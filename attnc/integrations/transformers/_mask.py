"""The mask that transformers passes from a model to its attention: options of attnc, dense numbers only on demand."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import masking_utils

# The functions that transformers' masks consist of, recognized by their code; the arguments here have no effect.
_CAUSAL = masking_utils.causal_mask_function.__code__
_ALL = masking_utils.bidirectional_mask_function.__code__
_BOTH = masking_utils.and_masks().__code__
_WINDOW = masking_utils.sliding_window_overlay(1).__code__
_WINDOW_BOTH_SIDES = masking_utils.sliding_window_bidirectional_overlay(1).__code__
_CHUNKED = masking_utils.chunked_overlay(1, None).__code__
_PACKED = masking_utils.packed_sequence_mask_function(None).__code__
_REMAPPED = masking_utils.remap_positions_for_packed_sequence(None, None).__code__
# Functions that do not build the numbers of a mask. torch.compile compares the strides with those of the memory.
_SHAPE = {torch.Tensor.dim, torch.Tensor.size, torch.Tensor.__len__, torch.Tensor.numel, torch.Tensor.is_floating_point,
          torch.Tensor.stride, torch.Tensor.storage_offset, torch.Tensor.is_contiguous,
          *(getattr(torch.Tensor, name).__get__ for name in ("shape", "ndim", "dtype", "device", "requires_grad"))}


class Mask(torch.Tensor):    # type: ignore[misc]    # torch is Any to mypy
    """The mask that `eager` adds, (batch, 1, q_len, kv_len), as equivalent `options` of `attnc.attention`.

    It takes no memory of its own. The first operation on it builds the numbers: 0 where the row may see the key, the
    smallest number of its dtype elsewhere. From then on they are the mask, so that models which change it stay correct.
    """

    @staticmethod
    def __new__(cls: type[Mask], shape: tuple[int, ...], options: dict[str, Any], build: Callable[[], torch.Tensor],
                dtype: torch.dtype = torch.float32) -> Mask:
        # Code that bypasses this class and reads the memory finds NaN, so that the mask is not lost silently.
        found: Mask = torch.full((), torch.nan, dtype=dtype).expand(shape).as_subclass(cls)
        return found

    def __init__(self, shape: tuple[int, ...], options: dict[str, Any], build: Callable[[], torch.Tensor],
                 dtype: torch.dtype = torch.float32):
        self.options, self._build = options, build
        self._numbers: torch.Tensor | None = None

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (),
                           kwargs: dict[str, Any] | None = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func in _SHAPE:
                return func(*args, **kwargs or {})
            if func in (torch.as_strided, torch.Tensor.as_strided):
                raise NotImplementedError("a mask of attnc has no strides to go by; take those of mask.contiguous()")
            return func(*_numbers(args), **_numbers(kwargs or {}))

    def numbers(self) -> torch.Tensor:
        """The mask as a plain tensor, to be added to the scores."""
        if self._numbers is None:
            with torch._C.DisableTorchFunctionSubclass():
                dtype = self.dtype
            self._numbers = torch.where(self._build(), torch.zeros((), dtype=dtype), torch.finfo(dtype).min)
            self.options = {"bias": self._numbers}
        return self._numbers

    def __repr__(self, **kwargs: Any) -> str:
        return f"Mask({tuple(self.shape)}, {self.options})"


def _numbers(x: Any) -> Any:
    """Arguments with every `Mask` in them replaced by its numbers."""
    if isinstance(x, Mask):
        return x.numbers()
    if isinstance(x, dict):
        return {name: _numbers(each) for name, each in x.items()}
    return type(x)(map(_numbers, x)) if type(x) in (tuple, list) else x


def mask(batch_size: int, q_length: int, kv_length: int, q_offset: int | torch.Tensor = 0, kv_offset: int = 0,
         mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
         attention_mask: torch.Tensor | None = None, dtype: torch.dtype = torch.float32,
         allow_is_bidirectional_skip: bool = False, **arguments: Any) -> torch.Tensor | None:
    """The mask function of ``attn_implementation="attnc"``: a `Mask`, or None if `eager` has none."""
    sizes = batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask
    arguments.pop("allow_is_causal_skip", None)
    if torch.compiler.is_compiling():
        return masking_utils.eager_mask(*sizes, dtype=dtype, allow_is_bidirectional_skip=allow_is_bidirectional_skip,
                                        **arguments)
    build = partial(masking_utils.sdpa_mask, *sizes, allow_is_causal_skip=False, **arguments)
    shape = batch_size, 1, q_length, kv_length
    options = None
    if attention_mask is None or attention_mask.ndim == 2:
        options = _options(mask_function, np.arange(q_length) + int(q_offset), np.arange(kv_length) + kv_offset)
    if options is None:
        booleans = build()
        return Mask(booleans.shape, {"mask": booleans}, lambda: booleans, dtype)
    options = {**options, **_padding(attention_mask, kv_length, kv_offset)}
    if not options and allow_is_bidirectional_skip:
        return None
    if options.keys() & {"causal", "window"}:
        options["q_offset"] = int(q_offset) - kv_offset
    return Mask(shape, options, build, dtype)


def _options(rule: Any, rows: np.ndarray, keys: np.ndarray) -> dict[str, Any] | None:
    """The options equivalent to a mask function at these positions; None if the function is not known."""
    code = getattr(rule, "__code__", None)
    if code is _CAUSAL:
        return {"causal": True}
    if code is _ALL:
        return {}
    if code is _WINDOW:
        return {"window": (_held(rule, "sliding_window") - 1, None)}
    if code is _WINDOW_BOTH_SIDES:
        return {"window": (_held(rule, "sliding_window"),) * 2}
    if code is _CHUNKED:
        size, padding = _held(rule, "chunk_size"), _held(rule, "left_padding").numpy()[:, None]
        first = padding.max(initial=0) // size + 1      # ids of padding are negative; negative segments see nothing
        return {"q_segments": (rows - padding) // size + first, "k_segments": (keys - padding) // size + first}
    if code is _PACKED:
        return dict.fromkeys(("q_segments", "k_segments"), _held(rule, "packed_sequence_mask").numpy())
    if code is _BOTH:
        parts = list(_held(rule, "mask_functions"))
        if any(getattr(part, "__code__", None) is _PACKED for part in parts):
            parts = [_positions_alone(part) for part in parts]
        return _merged([_options(part, rows, keys) for part in parts])
    return None


def _positions_alone(rule: Any) -> Any:
    """The rule without a remap to positions within packed sequences, whose differences are those of the whole."""
    if getattr(rule, "__code__", None) is not _REMAPPED:
        return rule
    return _held(rule, "mask_function")


def _held(rule: Any, name: str) -> Any:
    """A variable in the closure of a mask function."""
    return rule.__closure__[rule.__code__.co_freevars.index(name)].cell_contents


def _merged(parts: list[dict[str, Any] | None]) -> dict[str, Any] | None:
    """The union of options; None if a part is unknown, or two parts have the same option."""
    found: dict[str, Any] = {}
    for part in parts:
        if part is None or found.keys() & part.keys():
            return None
        found.update(part)
    return found


def _padding(attention_mask: torch.Tensor | None, kv_length: int, kv_offset: int) -> dict[str, Any]:
    """The option for a padding mask (batch, keys), where missing keys are padding: lengths if the padding is right."""
    if attention_mask is None:
        return {}
    seen = attention_mask.numpy()[:, kv_offset:kv_offset + kv_length].astype(bool, copy=False)
    if seen.shape[1] < kv_length:
        seen = np.pad(seen, ((0, 0), (0, kv_length - seen.shape[1])))
    if seen.all():
        return {}
    lengths = np.count_nonzero(seen, axis=1)
    right = (seen == (np.arange(kv_length) < lengths[:, None])).all()
    return {"kv_lengths": lengths} if right else {"key_mask": seen}
