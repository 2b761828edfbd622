"""What the functions beside the chain give, their twins, and their twins one precision up: gradients, packed sequences,
parts of the keys, the cache, statistics of the weights. `parity` makes lines of them."""

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

import attnc
from attnc import reference
from attnc._types import ArrayLike
from attnc.bench import Arrays, Options
from attnc.testing import exact_attention

VARLEN = {"causal", "window", "scale", "softcap", "alibi_slopes", "sinks"}      # what packed sequences and chunks take
CACHE = VARLEN | {"mask", "key_mask", "bias", "q_offset", "q_segments", "k_segments", "q_lengths"}
INT8 = " int8"


class Trio(NamedTuple):
    """A result, what it should be, and what the honest twin gives; `scale` of its rounding errors."""

    function: str
    got: np.ndarray
    exact: np.ndarray
    honest: np.ndarray
    scale: float


def beside_the_chain(arrays: Arrays, options: Options) -> Iterator[Trio]:
    """The trios of query, key and value, whose accumulation dtype is float32, so that float64 is one precision up."""
    arrays = tuple(x if x.ndim > 3 else x[None] for x in arrays)
    random = np.random.default_rng(0)
    yield from _gradients(arrays, options, random)
    yield from _softmax_gradients(arrays, options, random)
    if options.keys() <= VARLEN:
        yield from _packed(arrays, options)
        yield from _paged(arrays, options)
        yield from _parts(arrays, options)
    if options.keys() <= CACHE:
        yield from _cached(arrays, options)
    yield from _statistics(arrays, options, random)
    yield from _whole_process(arrays, options)


def largest(array: ArrayLike) -> float:
    """The largest finite magnitude, which sets the scale of a rounding error."""
    array = np.abs(np.asarray(array, np.float64))
    return float(array.max(initial=0.0, where=np.isfinite(array)))


def wide(arrays: Iterable[np.ndarray]) -> tuple[Any, ...]:
    """Arrays in float64."""
    return tuple(array.astype(np.float64) for array in arrays)


def _three(of: Callable[..., Any], *arrays: np.ndarray) -> tuple[Any, Any, Any]:
    """What ``of(module, *arrays)`` gives with the package, with the twin one precision up, and with the twin."""
    return of(attnc, *arrays), of(reference, *wide(arrays)), of(reference, *arrays)


def _gradients(arrays: Arrays, options: Options, random: np.random.Generator) -> Iterator[Trio]:
    query, key, value = wide(arrays)
    given = reference.attention(*arrays, want="lse", **options)
    grad = random.standard_normal(given.output.shape).astype(given.output.dtype)
    names = ("query", "key", "value", *(name for name in ("bias", "sinks") if name in options))
    inputs = grad, *arrays, given.output, given.lse
    results = _three(lambda module, *each: module.attention_backward(*each, want=names, **options), *inputs)
    weights = reference.attention_weights(query, key, **options)
    size, heads_per_kv = np.abs(grad.astype(np.float64)), query.shape[-3] // key.shape[-3]
    of_values = np.abs(np.repeat(value, heads_per_kv, -3)).swapaxes(-1, -2)
    rows = (size * np.abs(given.output.astype(np.float64))).sum(-1, keepdims=True)
    terms = weights * (size @ of_values + rows)             # magnitudes of what the gradients of the scores add up
    scale = abs(options.get("scale") or query.shape[-1] ** -0.5)
    scales = {"query": scale * largest(terms.sum(-1)) * largest(key), "bias": largest(terms.sum((0, 1))),
              "key": scale * heads_per_kv * largest(terms.sum(-2)) * largest(query),
              "value": heads_per_kv * largest(weights.sum(-2)) * largest(grad), "sinks": largest(rows.sum((0, -2)))}
    for name in names:
        got, exact, honest = (getattr(result, name) for result in results)
        yield Trio(f"attention_backward {name}", got, exact, honest, scales[name])


def _softmax_gradients(arrays: Arrays, options: Options, random: np.random.Generator) -> Iterator[Trio]:
    scores = reference.attention_scores(*arrays[:2], **options)
    grad = random.standard_normal(scores.shape).astype(scores.dtype)
    for name in ("softmax", "log_softmax"):
        scale = 2 * largest(grad) if name == "softmax" else largest(np.abs(grad).sum(-1))
        backward = operator.attrgetter(f"{name}_backward")
        results = _three(lambda module, *each, of=backward: of(module)(*each), grad, getattr(reference, name)(scores))
        yield Trio(f"{name}_backward", *results, scale)


def _packed(arrays: Arrays, options: Options) -> Iterator[Trio]:
    """The batch as packed sequences, the last of which lost a row and a key."""
    batch, _, q_len, _ = arrays[0].shape
    packed = [x.swapaxes(1, 2).reshape(-1, x.shape[1], x.shape[3]) for x in arrays]
    bounds = [np.minimum(np.arange(batch + 1) * n, batch * n - (n > 1)) for n in (q_len, arrays[1].shape[2])]
    packed = [x[:bound[-1]] for x, bound in zip(packed, (bounds[0], bounds[1], bounds[1]), strict=True)]
    results = _three(lambda module, *each: module.attention_varlen(*each, *bounds, **options), *packed)
    yield Trio("attention_varlen", *results, largest(arrays[2]))
    results = _three(lambda module, *each: module.attention_weights_varlen(*each, *bounds, **options)[-1][...],
                     *packed[:2])
    yield Trio("attention_weights_varlen", *results, 1.0)
    given = reference.attention_varlen(*packed, *bounds, want="lse", **options)
    inputs = np.ones_like(given.output), *packed, given.output, given.lse
    gradients = _three(lambda module, *each: module.attention_varlen_backward(*each, *bounds, want="value", **options),
                       *inputs)
    got, exact, honest = (found.value for found in gradients)
    yield Trio("attention_varlen_backward value", got, exact, honest, largest(exact))


def _parts(arrays: Arrays, options: Options) -> Iterator[Trio]:
    """Keys in two parts: their merged states, and a state that takes one after the other."""
    query, key, value = arrays
    offset = options | {"q_offset": options.get("q_offset", key.shape[2] - query.shape[2])}
    exact, honest = exact_attention(*arrays, **offset), reference.attention(*arrays, want="lse", **offset)
    cut, state = key.shape[2] // 2, attnc.AttentionState(query, **offset)
    halves = [(key[:, :, part], value[:, :, part]) for part in (slice(None, cut), slice(cut, None))]
    for half in halves:
        state.update(*half)
    of_scores = max(1.0, largest(exact.scores), largest(exact.lse))
    result = state.result()
    yield Trio("AttentionState output", result.output, exact.output, honest.output, largest(value))
    yield Trio("AttentionState lse", result.lse, exact.lse, honest.lse, of_scores)
    states = [(result.output, result.lse) for result in (reference.attention(query, *half, want="lse", scale=0.1)
                                                         for half in halves)]
    merged = _three(lambda module, *each: module.merge_states([each[:2], each[2:]]), *states[0], *states[1])
    for name, got, wanted, twin in zip(("output", "lse"), *merged, strict=True):
        yield Trio(f"merge_states {name}", got, wanted, twin, largest(value) if name == "output" else of_scores)


def _cached(arrays: Arrays, options: Options) -> Iterator[Trio]:
    """A cache that took the keys in two parts; with rows of int8 too."""
    query, key, value = arrays
    batch, heads, tokens, _ = key.shape
    for dtype, mark in ((key.dtype, ""), (np.int8, INT8)):
        caches = [module.KVCache(batch, heads, key.shape[-1], value.shape[-1], capacity=tokens, dtype=dtype)
                  for module in (attnc, reference)]
        for cache in caches:
            for part in (slice(None, tokens // 2), slice(tokens // 2, None)):
                cache.append(key[:, :, part], value[:, :, part])
        rows = wide((caches[1].keys, caches[1].values))
        got, honest = (cache.attend(query, **options) for cache in caches)
        exact = reference.attention(query.astype(np.float64), *rows, **options)
        yield Trio(f"KVCache.attend{mark}", got, exact, honest, largest(rows[1]))


def _paged(arrays: Arrays, options: Options) -> Iterator[Trio]:
    """A cache in pages, two sequences of which share their first pages."""
    query, key, value = (x[0].swapaxes(0, 1) for x in arrays)
    tokens, heads, dim = key.shape
    rows = query[-1:], key[-1:], value[-1:]
    found = []
    for module, dtype in ((attnc, key.dtype), (reference, np.float64), (reference, key.dtype)):
        cache = module.PagedKVCache(2 * tokens, 4, heads, dim, value.shape[-1], dtype=dtype)
        first = cache.add()
        cache.append(first, *(x.astype(dtype) for x in (key, value)))
        second = cache.fork(first)
        cache.append(second, *(x.astype(dtype) for x in rows[1:]))
        both = np.concatenate([query, rows[0]]).astype(dtype)
        found.append(cache.attend([first, second], both, q_lengths=[len(query), 1], **options))
    yield Trio("PagedKVCache.attend", found[0], found[1], found[2], largest(value))


def _statistics(arrays: Arrays, options: Options, random: np.random.Generator) -> Iterator[Trio]:
    query, key, value = arrays
    three = _three(lambda module, *each: module.AttentionWeights(*each, **options), query, key)
    q_len, kv_len = three[0].shape[-2:]
    keep, grad = np.arange(kv_len) % 3 > 0, random.standard_normal((*three[0].shape[:-1], 3), np.float32)
    gradient = random.standard_normal((*three[0].shape[:-1], value.shape[-1]), np.float32)
    heads = np.arange(query.shape[-3], dtype=np.float32) - 1
    of_value = np.repeat(value, query.shape[-3] // key.shape[-3], -3)
    bins = min(q_len, 5), min(kv_len, 7)
    scores = reference.attention_scores(*wide((query, key)), **options)
    logits = max(1.0, largest(scores), largest(three[1].lse))
    statements: Sequence[tuple[str, Callable[[Any], Any], float]] = (
        ("dense", lambda W: W.dense(), 1.0), ("lse", lambda W: W.lse, logits),
        ("max", lambda W: W.max(), 1.0), ("topk", lambda W: W.topk(3).weights, 1.0),
        ("entropy", lambda W: W.entropy(), logits), ("mean_position", lambda W: W.mean_position(), kv_len),
        ("mean_distance", lambda W: W.mean_distance(), q_len + kv_len),
        ("lost_mass", lambda W: W.lost_mass(keep), 1.0), ("key_mass", lambda W: W.key_mass(), q_len),
        ("row_mass", lambda W: W.row_mass(keys=keep), 1.0),
        ("relevance", lambda W: W.relevance(value, gradient).row_mass(), kv_len * largest(gradient)),
        ("relevance T @", lambda W: W.relevance(value, gradient, sign="both").T @ grad, q_len * largest(grad)),
        ("weighted", lambda W: W.weighted(heads=heads).dense(), largest(heads) * len(heads)),
        ("key_max", lambda W: W.key_max(), 1.0), ("map", lambda W: W.map(bins), 1.0),
        ("head_mean", lambda W: W.head_mean(), 1.0), ("@", lambda W: W @ of_value, largest(value)),
        ("T @", lambda W: W.T @ grad, q_len * largest(grad)))
    for name, say, scale in statements:
        yield Trio(f"AttentionWeights {name}", say(three[0]), say(three[1]), say(three[2]), scale)
    if q_len == kv_len:
        yield Trio("rollout", attnc.rollout([three[0]] * 2, 1), reference.rollout([three[1]] * 2, 1),
                   reference.rollout([three[2]] * 2, 1), 1.0)


def _whole_process(arrays: Arrays, options: Options) -> Iterator[Trio]:
    """Slopes beside their formula; an alignment; the same bits with other numbers of threads."""
    slopes = 2.0 ** -np.arange(1, 9)
    yield Trio("alibi_slopes", attnc.alibi_slopes(8), slopes, slopes, 1.0)
    random = np.random.default_rng(0)
    table, of_bias = random.standard_normal((32, 3)), random.standard_normal((3, 69))
    results = _three(lambda module, *each: module.t5_relative_bias(*each, 30, 40), table)
    yield Trio("t5_relative_bias", *results, largest(table))
    results = _three(lambda module, *each: module.t5_relative_bias_backward(*each, 32, 30, 40), of_bias)
    yield Trio("t5_relative_bias_backward", *results, 69 * largest(of_bias))
    got, exact = (module.deberta_relative_index(30, 40, 8, 50).astype(np.float64) for module in (attnc, reference))
    yield Trio("deberta_relative_index", got, exact, exact, 1.0)
    matrix = np.random.default_rng(0).standard_normal((7, 19))
    path = np.array(reference.align(matrix), np.float64)
    yield Trio("align", np.array(attnc.align(matrix), np.float64), path, path, 0.0)
    with attnc.threads(1):
        alone = attnc.attention(*arrays, **options)
    with attnc.threads(3):
        together = attnc.attention(*arrays, **options)
    yield Trio("threads", together, alone, alone, 0.0)
