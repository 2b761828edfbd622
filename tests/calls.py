"""One call of every public function that computes, for the tests of what all calls have in common."""

import numpy as np
from checking import inputs

import attnc


def all_calls(seed=0, q_len=30, kv_len=90, dtype="float32", steep=1):
    """Functions without arguments, by name; each gives arrays, the same bits every time, and none changes an input."""
    random = np.random.default_rng(seed)
    query, key, value = inputs(random, (2,), 4, 2, q_len, kv_len, 16, dtype=dtype)
    query = query * query.dtype.type(steep)
    bias, mask = random.standard_normal((4, q_len, kv_len)), random.random((q_len, kv_len)) < 0.8
    distances = random.standard_normal((4, q_len + kv_len - 1))
    result = attnc.attention(query, key, value, want="lse")
    weights = attnc.attention_weights(query, key)
    tokens = [x[0].swapaxes(0, 1) for x in (query, key, value)]
    bounds = [0, q_len // 3, q_len], [0, kv_len // 2, kv_len]
    lists = random.integers(-1, kv_len, (4, q_len, 8))
    table = random.standard_normal((4, 5, 16))
    terms = dict(relative_index=np.arange(q_len + kv_len - 1) % 5, relative_key=table, relative_query=table)

    def streamed():
        state = attnc.AttentionState(query, q_offset=kv_len - q_len, causal=True)
        for part in (slice(20), slice(20, 21), slice(21, None)):
            state.update(key[..., part, :], value[..., part, :])
        return state.result()

    def cached(rows, window=None):
        cache = attnc.KVCache(2, 2, 16, capacity=kv_len, dtype=rows, window=window)
        for part in (slice(kv_len // 2), slice(kv_len // 2, kv_len)):
            cache.append(key[..., part, :], value[..., part, :])
        cache.reorder([1, 1])
        return cache.attend(query[:, :, :3], causal=True)

    def paged():
        cache = attnc.PagedKVCache(2 * kv_len, 4, 2, 16, dtype="float32")
        first = cache.add()
        cache.append(first, *(x[:kv_len // 2] for x in tokens[1:]))
        ids = first, cache.fork(first)
        cache.append(ids, *(x[:9] for x in tokens[1:]), lengths=[4, 5])
        cache.truncate(ids[1], kv_len // 2 + 3)
        return cache.attend(ids, tokens[0], q_lengths=[2, q_len - 2], causal=True)

    def lazy():
        return attnc.AttentionWeights(query, key, causal=True)

    return {
        "attention": lambda: attnc.attention(query, key, value, bias=bias, mask=mask, want=("lse", "weights")),
        "key_indices": lambda: attnc.attention(query, key, value, key_indices=lists, want="lse"),
        "content-relative": lambda: attnc.attention(query, key, value, **terms, want="weights"),
        "gradients of tables": lambda: attnc.attention_backward(
            result.output, query, key, value, result.output, result.lse, **terms, want=("query", *[*terms][1:])),
        "a long row": lambda: attnc.attention(query[:, :, :1], np.repeat(key, 30, 2), np.repeat(value, 30, 2)),
        "attention_scores": lambda: attnc.attention_scores(query, key, bias=bias, relative_bias=distances),
        "attention_weights": lambda: attnc.attention_weights(query, key, window=(5, 0), softcap=3.0),
        "weighted_sum": lambda: attnc.weighted_sum(weights, value),
        "softmax": lambda: attnc.softmax(weights, -2, where=mask),
        "log_softmax": lambda: attnc.log_softmax(query, (0, 2)),
        "attention_backward": lambda: attnc.attention_backward(
            result.output, query, key, value, result.output, result.lse, bias=np.zeros_like(bias),
            relative_bias=np.zeros_like(distances), want=("query", "key", "value", "bias", "relative_bias")),
        "softmax_backward": lambda: attnc.softmax_backward(weights, weights),
        "log_softmax_backward": lambda: attnc.log_softmax_backward(weights, weights, 1),
        "attention_varlen": lambda: attnc.attention_varlen(*tokens, *bounds, causal=True, want="lse"),
        "attention_varlen_backward": lambda: attnc.attention_varlen_backward(
            tokens[0], *tokens, *attnc.attention_varlen(*tokens, *bounds, want="lse"), *bounds),
        "attention_weights_varlen": lambda: [w.dense() for w in attnc.attention_weights_varlen(*tokens[:2], *bounds)],
        "merge_states": lambda: attnc.merge_states([(result.output, result.lse)] * 3),
        "AttentionState": streamed,
        "KVCache": lambda: cached("float32"),
        "KVCache int8": lambda: cached(np.int8),
        "KVCache window": lambda: cached("float16", (kv_len // 2 - 1, 0)),
        "PagedKVCache": paged,
        "align": lambda: attnc.align(weights[0, 0]),
        "lse": lambda: lazy().lse,
        "dense": lambda: lazy().dense(),
        "tile": lambda: lazy()[..., 3:9, 2:],
        "topk": lambda: lazy().topk(5),
        "entropy": lambda: lazy().entropy(),
        "mean_distance": lambda: lazy().mean_distance(),
        "lost_mass": lambda: lazy().lost_mass(mask),
        "key_mass": lambda: lazy().key_mass(normalize=True),
        "key_max": lambda: lazy().key_max(),
        "key_hits": lambda: lazy().key_hits(0.02),
        "map": lambda: lazy().map((3, 4)),
        "mean_mass": lambda: lazy().key_mass(heads="mean"),
        "row_mass": lambda: lazy().row_mass(keys=slice(1, None, 2)),
        "relevance": lambda: lazy().relevance(value, result.output).map((3, 4)),
        "relevance @": lambda: lazy().relevance(value, result.output, sign="both") @ value.repeat(2, 1),
        "weighted": lambda: lazy().weighted(heads=np.arange(4) - 1.5).topk(3),
        "head_mean": lambda: lazy().head_mean(),
        "matmul": lambda: lazy() @ value.repeat(2, 1),
        "sparse": lambda: lazy().sparse(top_p=0.5),
        "summary": lambda: lazy().summary(topk=2, entropy=True, key_mass=True),
        "rollout": lambda: attnc.rollout([attnc.AttentionWeights(query, query)] * 2, 1),
    }


def arrays_of(found):
    """All arrays of a result."""
    if isinstance(found, np.ndarray | np.generic):
        return [np.asarray(found)]
    if found is None or isinstance(found, int | float):
        return []
    parts = found if isinstance(found, tuple | list) else vars(found).values()
    return [array for part in parts for array in arrays_of(part)]
