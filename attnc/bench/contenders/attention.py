"""The contenders of attention that run as they are; those that compile are in compilers.py."""

from collections.abc import Callable
from typing import Any

import numpy as np

import attnc
from attnc import reference
from attnc.bench import Arrays, Call, Options, Unsupported, machine
from attnc.bench.cases import ADDED, TABLES, added, aligned, table_rows, visible, wanted
from attnc.bench.contenders import onnxmodels
from attnc.bench.contenders.tensors import from_torch, import_torch, to_torch
from attnc.testing import Case

TWIN_LIMIT = 1 << 26        # scores; the definition holds several such matrices at once
COMPOSITE_BYTES = 1 << 28   # scores of the composite at a time: more heads than this holds go in slices


def only(options: Options, *known: str, weights: bool = False) -> None:
    """Refuse a case with an option that the peer has no equal of, or that wants more than the peer returns."""
    unknown = sorted(set(options) - set(known) - {"want"})
    if unknown:
        raise Unsupported(f"has no {', '.join(unknown)}")
    if set(wanted(options)) - ({"weights"} if weights else set()):
        raise Unsupported(f"cannot return {', '.join(wanted(options))}")


def _fits(case: Case, arrays: Arrays, copies: int) -> None:
    """Refuse a case for which `copies` matrices of scores would not fit in half of the memory there is."""
    needed = copies * case.batch * case.q_heads * case.q_len * case.kv_len * arrays[0].dtype.itemsize
    if needed > machine.available_memory() / 2:
        raise Unsupported(f"would need about {needed / 1e9:.0f} GB for its scores")


def _scale(case: Case, options: Options) -> float:
    return float(options.get("scale", case.head_dim ** -0.5))


def setup_attnc(case: Case, arrays: Arrays, options: Options, threads: int) -> Call:
    """The package itself."""
    return _with_weights(attnc.attention, arrays, options | {"num_threads": threads})


def _with_weights(attention: Callable[..., Any], arrays: Arrays, options: Options) -> Call:
    """A call of the package or its twin; with the weights, if the case wants them."""
    if not wanted(options):
        return lambda: attention(*arrays, **options)

    def call() -> tuple[np.ndarray, np.ndarray]:
        result = attention(*arrays, **options)
        return result.output, result.weights

    return call


def setup_twin(case: Case, arrays: Arrays, options: Options, threads: int) -> Call:
    """The NumPy twin, which is the definition and not written for speed."""
    scores = case.batch * case.q_heads * case.q_len * case.kv_len
    if scores > TWIN_LIMIT:
        raise Unsupported(f"would hold matrices of {scores:.1e} scores")
    return _with_weights(reference.attention, arrays, options)


def setup_numpy(case: Case, arrays: Arrays, options: Options, threads: int) -> Call:
    """What one writes with NumPy and cares: two matmuls, the softmax in place, 16-bit inputs widened first."""
    only(options, "causal", "window", "scale", *ADDED, "relative_index", *TABLES, weights=True)
    query, key, value = arrays
    stored, work = query.dtype, np.dtype("float64" if query.dtype == np.float64 else "float32")
    pairs, heads_per_kv = case.batch * case.kv_heads, case.q_heads // case.kv_heads
    query = query.reshape(pairs, heads_per_kv, case.q_len, case.head_dim)
    key, value = (array.reshape(pairs, 1, *array.shape[-2:]) for array in (key, value))
    scale = work.type(_scale(case, options))
    seen = visible(case, options)
    hidden = None if seen is None else ~seen
    given = added(case, options)
    per_pair = heads_per_kv * case.q_len * case.kv_len * work.itemsize
    step = max(1, min(pairs, COMPOSITE_BYTES // per_pair))
    if given is not None and given.shape[1] > 1:        # whole batch elements, or equal parts of one
        given = given.reshape(case.kv_heads, heads_per_kv, *given.shape[2:])
        step = next(n for n in range(step, 0, -1) if n % case.kv_heads == 0 or case.kv_heads % n == 0)
    not_allowed = ~given if given is not None and given.dtype == bool else None
    want_weights = bool(wanted(options))
    rows = table_rows(case, options)
    tables = [] if rows is None else [options[name].reshape(case.kv_heads, heads_per_kv, -1, case.head_dim)
                                      for name in TABLES]

    def part(first: int) -> tuple[np.ndarray, np.ndarray | None]:
        q, k, v = (array[first:first + step].astype(work, copy=False) for array in (query, key, value))
        scores = (q * scale) @ k.swapaxes(-1, -2)
        if rows is not None:
            heads = np.arange(first, first + len(q)) % case.kv_heads
            by_row, by_key = (scale * x @ table[heads].swapaxes(-1, -2)
                              for x, table in zip((q, k), tables, strict=True))
            scores += np.take_along_axis(by_row, rows[None, None], -1)
            scores += np.take_along_axis(by_key, rows.T[None, None], -1).swapaxes(-1, -2)
        if hidden is not None:
            np.copyto(scores, -np.inf, where=hidden)
        if given is not None:
            of_pairs = slice(first % len(given), first % len(given) + step)
            view = scores.reshape(-1, *given[of_pairs].shape)
            if not_allowed is None:
                view += given[of_pairs]
            else:
                np.copyto(view, -np.inf, where=not_allowed[of_pairs])
        scores -= scores.max(axis=-1, keepdims=True)
        np.exp(scores, out=scores)
        scores /= scores.sum(axis=-1, keepdims=True)
        return scores @ v, scores if want_weights else None

    def call() -> Any:
        parts = [part(first) for first in range(0, pairs, step)]
        outputs, weights = (list(each) for each in zip(*parts, strict=True))
        output = _join(outputs).reshape(case.batch, case.q_heads, case.q_len, -1).astype(stored, copy=False)
        if not want_weights:
            return output
        return output, _join(weights).reshape(*output.shape[:3], case.kv_len).astype(stored, copy=False)

    return call


def _join(parts: list[np.ndarray]) -> np.ndarray:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def setup_torch(case: Case, arrays: Arrays, options: Options, threads: int) -> Call:
    """``scaled_dot_product_attention``; for weights, which it never returns, the same by matmul and softmax."""
    torch = import_torch(threads)
    only(options, "causal", "window", "scale", *ADDED, "relative_index", *TABLES, weights=True)
    query, key, value = (to_torch(torch, array) for array in arrays)
    seen = visible(case, options)
    given = added(case, options)
    given = seen if given is None else given
    mask = None if given is None else torch.from_numpy(given)
    scale = _scale(case, options)
    grouped = case.q_heads != case.kv_heads
    if wanted(options):
        _fits(case, arrays, 3)
        if grouped:
            key, value = (each.repeat_interleave(case.q_heads // case.kv_heads, dim=1) for each in (key, value))
        hidden = None if mask is None else ~mask

        def chain() -> tuple[np.ndarray, np.ndarray]:
            with torch.inference_mode():
                scores = (query * scale) @ key.transpose(-1, -2)
                if hidden is not None:
                    scores.masked_fill_(hidden, -torch.inf)
                weights = torch.softmax(scores, dim=-1)
                return from_torch(torch, weights @ value), from_torch(torch, weights)

        return chain
    triangle = aligned(case, options)       # a window is a mask to torch
    places = table_rows(case, options)
    rows: Any = None if places is None else torch.from_numpy(places)
    tables: list[Any] = [] if rows is None else [torch.from_numpy(options[name]) for name in TABLES]

    def terms() -> Any:
        """DeBERTa's bias for every head, of this query and key: two products with the tables, and two gathers."""
        by_row = (query @ tables[0].mT).gather(-1, rows.expand(*query.shape[:-1], -1))
        by_key = (key @ tables[1].mT).gather(-1, rows.T.expand(*key.shape[:-1], -1))
        return by_row.add_(by_key.mT).mul_(scale)

    def fused() -> Any:
        with torch.inference_mode():
            return from_torch(torch, torch.nn.functional.scaled_dot_product_attention(
                query, key, value, attn_mask=None if triangle else mask if rows is None else terms(),
                is_causal=triangle, scale=scale, enable_gqa=grouped))

    return fused


def setup_onnxruntime(case: Case, arrays: Arrays, options: Options, threads: int) -> Call:
    """The standard operator Attention (opset 23)."""
    only(options, "causal", "scale", *ADDED, weights=True)
    _fits(case, arrays, 6 if arrays[0].dtype == np.float64 else 3)      # as measured with onnxruntime 1.32
    given, scale = added(case, options), _scale(case, options)
    return onnxmodels.standard(case, arrays, visible(case, options), given, scale, wanted(options), threads)


def setup_onnxruntime_mha(case: Case, arrays: Arrays, options: Options, threads: int) -> Call:
    """The contributed operator MultiHeadAttention, which wants the heads side by side in the last axis."""
    only(options, "causal", "scale")
    if case.q_heads != case.kv_heads:
        raise Unsupported("has no grouped heads")
    _fits(case, arrays, 3)
    return onnxmodels.multi_head(case, arrays, visible(case, options), _scale(case, options), threads)


def setup_scipy(case: Case, arrays: Arrays, options: Options, threads: int) -> Call:
    """It has the softmax alone (`attnc.bench.contenders.links`)."""
    raise Unsupported("has no attention")
