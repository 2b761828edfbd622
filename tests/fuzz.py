"""Seeded random calls of every public function, right ones and garbage: the reference's answer or its error, no more.

    python tests/fuzz.py N [first seed]

A failure prints the seed that makes it happen again.
"""

import contextlib
import sys
import warnings

import numpy as np
from calls import arrays_of
from checking import DTYPES, dtype_of, inputs
from layouts import drawn
from slow import NAMES, some_option

import attnc
from attnc import _isa, reference

CLEAN = (TypeError, ValueError, MemoryError, IndexError, NotImplementedError)
MANY = 2**31        # rows, keys or heads are right, and may take more memory than there is
THINGS = [
    None, True, False, 0, 1, -1, 3, MANY, 2**63, -2**70, 0.5, float("nan"), float("inf"), 1j, "x", b"x", "lse", (),
    [], {}, (1, 2), (None, 0), [0, 1], [[0], [1, 2]], object(), slice(None), ..., np.float32(2), np.int8(-3),
    np.bool_(True), np.zeros(0), np.zeros((0, 3)), np.ones(()), np.ones(3), np.ones((2, 2)),
    np.ones((1, 2, 3, 4), np.float16), np.ones((2, 3, 4, 5, 6)), np.ones(3, bool), np.ones(2, complex),
    np.array(["a", "b"]), np.array([None, 1]),
    np.ones(2, "M8[s]"), np.ma.array([1.0, 2.0], mask=[0, 1]), np.ones(4, np.uint16), np.ones((3, 3), np.longdouble),
    np.full((2, 2), np.nan), np.broadcast_to(np.float32(1), (3, 2**40)), range(3), memoryview(b"abc"), np.float64,
    [np.ones(2)] * 2, np.ones(3, "f4,i4"), 10**400, -0.0, np.ones(2, ">f8"), lambda *a: None, type,
]
METHODS = {     # arguments of the methods of AttentionWeights
    "dense": {"dtype": ["float32", "float16"]}, "topk": {"k": [0, 1, 3, 50]}, "entropy": {}, "effective_keys": {},
    "max": {}, "argmax": {}, "mean_position": {}, "mean_distance": {}, "lost_mass": {"keep": "keep"},
    "row_mass": {"keys": "columns"},
    "key_mass": {"rows": "rows", "heads": [None, "mean", "sum", "max", "group"], "normalize": [True, False]},
    "key_max": {"rows": "rows"}, "key_hits": {"threshold": [0.01, 0.1, 0.5]},
    "map": {"bins": [(1, 1), (2, 3), (1, 2)], "reduce": ["mean", "max"]},
    "pool": {"query_labels": "q", "key_labels": "k"}, "head_mean": {}, "sparse": {"threshold": [0.01, 0.2]},
    "head": {"*": "places"}, "__matmul__": {"x": "operand"},
    "summary": {"topk": [None, 2], "entropy": [True], "key_mass": [True, False], "lse": [True]},
    "__getitem__": {"index": "index"},
}

OF_OTHERS = {   # methods of what the weights give
    "relevance": ("dense", "key_mass", "row_mass", "map", "pool", "sparse", "__matmul__"),
    "weighted": ("dense", "topk", "max", "argmax", "entropy", "mean_position", "mean_distance", "key_mass", "row_mass",
                 "key_max", "key_hits", "map", "pool", "sparse", "__matmul__")}


def differs(got, wanted, where=""):
    """What is wrong with a result, as text: kind, shapes, dtypes, places that are not finite, numbers far away."""
    if type(got).__name__ != type(wanted).__name__ and not isinstance(wanted, np.ndarray | np.generic):
        return f"{where}: {type(got)} instead of {type(wanted)}"
    a, b = arrays_of(got), arrays_of(wanted)
    if [(x.shape, x.dtype) for x in a] != [(x.shape, x.dtype) for x in b]:
        return f"{where}: {[(x.shape, x.dtype) for x in a]} instead of {[(x.shape, x.dtype) for x in b]}"
    for x, y in zip(a, b, strict=True):
        if x.dtype.kind in "biu":
            if (x != y).sum() > (0.03 * x.size if x.size > 100 else 0):      # among many, two keys may be as good
                return f"{where}: {x.dtype} differ"
            continue
        floor = 2**-22 if "rollout" in where or "Weights" in where else 0      # of float32 weights, times float64
        eps = {2: 2**-7 if x.dtype.name == "bfloat16" else 2**-10, 4: 2**-22, 8: 2**-50}[x.dtype.itemsize]
        eps = max(eps, floor)
        wide_x, wide_y = x.astype(np.float64), y.astype(np.float64)
        finite = np.isfinite(wide_y)
        if "backward" in where:     # NaN or infinite: where infinite gradients meet it may be either
            wide_x, wide_y = (np.where(np.isfinite(z), z, np.nan) for z in (wide_x, wide_y))
        if not np.array_equal(np.where(finite, 0, wide_x), np.where(finite, 0, wide_y), equal_nan=True):
            return f"{where}: other places are not finite"
        # Far wider than the tolerance rule, which the parity tests hold: what is sought here are other numbers.
        far = np.abs(wide_x[finite] - wide_y[finite]).max(initial=0)
        if not far <= 4000 * eps * max(1, np.abs(wide_y[finite]).max(initial=0)):
            return f"{where}: {x.dtype} off by {far}"
    return None


class WholeState:
    """What `attnc.AttentionState` is to give: attention over all chunks in one piece."""

    def __init__(self, query, **options):
        self.query, self.options, self.chunks = query, options, []

    def update(self, key_chunk, value_chunk, mask):
        self.chunks.append((key_chunk, value_chunk))

    def result(self):
        key, value = (np.concatenate(x, -2) for x in zip(*self.chunks, strict=True))
        return reference.attention(self.query, key, value, want="lse", **self.options)


class Random:
    """Draws of one seed."""

    def __init__(self, seed):
        self.random = np.random.default_rng(seed)

    def chance(self, p):
        return self.random.random() < p

    def one(self, things):
        return things[self.random.integers(len(things))]

    def arrays(self):
        """Query, key, value of one call, their sizes and batch."""
        r = self.random
        batch = self.one([(), (1,), (2,), (2, 1), (0,)] if self.chance(0.3) else [(), (2,)])
        kv_heads, group = int(r.integers(1, 3)), int(r.integers(1, 3))
        q_len, kv_len, dim, value_dim = (int(r.integers(0 if self.chance(0.1) else 1, n)) for n in (9, 30, 12, 12))
        if self.chance(0.05):
            q_len, kv_len = 80, 600
        dtype = self.one(DTYPES)
        found = inputs(r, batch, kv_heads * group, kv_heads, q_len, kv_len, dim, value_dim, dtype=dtype)
        if self.chance(0.1):
            i = r.integers(3)
            found[i] = found[i].astype(dtype_of(self.one(DTYPES)))
        if self.chance(0.05) and found[1].size:
            found[self.one([1, 2])].reshape(-1)[:1] = self.one([np.nan, np.inf, -np.inf])
        return [self.memory(x) for x in found], batch, kv_heads * group, q_len, kv_len

    def memory(self, x):
        """The array, or the same numbers in other memory."""
        return drawn(x, self.random)

    def options(self, names, *sizes):
        found = {}
        for name in names:
            if self.chance(0.2):
                found |= some_option(name, self.random, *sizes)
        return found

    def spoilt(self, arguments):
        """With one argument that is something else."""
        found = dict(arguments)
        thing, name = self.one(THINGS), self.one(list(found))
        endless = (thing is MANY and ("n_pages" in found or name in ("q_len", "kv_len", "heads", "buckets"))) or (
            name == "matrix" and isinstance(thing, np.ndarray) and thing.size >= MANY)  # align looks at all elements
        found[name] = 2**63 if endless else thing
        return found


def case(seed):
    """A name, and a function that makes the call in a module: attnc, or its reference."""
    r = Random(seed)
    query, key, value = (arrays := r.arrays())[0]
    batch, heads, q_len, kv_len = arrays[1:]
    options = r.options(NAMES, batch, heads, q_len, kv_len, query.shape[-1])
    over = {name: x for name, x in options.items() if name not in ("q_lengths", "kv_lengths", "sinks")}
    kind = r.one(["attention", "attention_scores", "attention_weights", "weighted_sum", "softmax", "log_softmax",
                  "attention_backward", "softmax_backward", "log_softmax_backward", *PACKED, "merge_states",
                  "AttentionState", "KVCache", "PagedKVCache", "alibi_slopes", "align", "t5_relative_bias",
                  "t5_relative_bias_backward", "deberta_relative_index", "rollout", *["AttentionWeights"] * 6])
    bad = r.chance(0.5)
    after = []      # calls of methods: name, arguments
    first = {"query": query, "key": key}
    if kind == "attention":
        arguments = {**first, "value": value, **options, "want": r.one([(), "lse", ("weights", "scores"), "entropy"]),
                     "layout": "bhnd"}
    elif kind == "attention_scores":
        arguments = {**first, **options, "stage": r.one(["raw", "scaled", "capped", "masked"])}
    elif kind == "attention_weights":
        arguments = {**first, **options, "lse": None}
    elif kind == "weighted_sum":
        weights = np.abs(inputs(r.random, batch, heads, 1, q_len, 1, kv_len)[0])
        arguments = {"weights": r.memory(weights), "value": value}
    elif kind in ("softmax", "log_softmax"):
        arguments = {"x": query, "axis": r.one([-1, 0, None, (-1, -2), (), 1]),
                     "where": r.one([None, True, r.random.random(query.shape) < 0.7])}
    elif kind in ("softmax_backward", "log_softmax_backward"):
        arguments = {"grad_output": query, "output": query, "axis": r.one([-1, 0, None, (-1, -2), ()])}
    elif kind == "attention_backward":
        with np.errstate(all="ignore"):
            result = reference.attention(query, key, value, want="lse", **options)
        arguments = {"grad_output": result.output, **first, "value": value, "output": result.output, "lse": result.lse,
                     **options, "want": r.one(["query", ("query", "key", "value"), "value"])}
    elif kind in PACKED:
        arguments = packed(r, kind, (query, key, value), q_len, kv_len, over)
    elif kind == "merge_states":
        states = [(value + i, value[..., 0] if value.shape[-1] else np.zeros(value.shape[:-1])) for i in range(2)]
        arguments = {"states": states, "layout": "bhnd"}
    elif kind == "AttentionState":
        fit = ("causal", "window", "scale", "softcap", "sinks")
        arguments = {"query": query, "q_offset": r.one([0, 3, -2]),
                     **{name: options[name] for name in fit if name in options}}
        for part in (slice(0, kv_len // 2), slice(kv_len // 2, None)):
            after.append(("update", {"key_chunk": key[..., part, :], "value_chunk": value[..., part, :], "mask": None}))
        after.append(("result", {}))
    elif kind == "KVCache":
        query, key, value = (x.reshape(int(np.prod(x.shape[:-3])), *x.shape[-3:]) for x in (query, key, value))
        arguments = {"batch": key.shape[0], "kv_heads": key.shape[1], "head_dim": key.shape[-1],
                     "value_dim": value.shape[-1], "capacity": max(kv_len + int(r.random.integers(3)), 1),
                     "dtype": r.one(["float32", "float64", "float16", np.int8]), "window": r.one([None, None, (3, 0)])}
        after = [("append", {"key": key[..., part, :], "value": value[..., part, :], "lengths": None})
                 for part in (slice(0, kv_len // 2), slice(kv_len // 2, None))]
        after.insert(r.random.integers(3), r.one([
            ("truncate", {"lengths": r.one([0, 1, kv_len // 2])}),
            ("reorder", {"indices": r.random.integers(0, max(key.shape[0], 1), key.shape[0])}),
            ("keep", {"indices": r.random.permuted(np.broadcast_to(
                np.arange(kv_len // 2), (*key.shape[:2], kv_len // 2)), axis=-1)[..., :r.one([1, 3, 50])]})]))
        if r.chance(0.3):
            after.append(("weights", {"query": query, "causal": True, "window": r.one([None, (4, 0)])}))
            after.append(r.one([("key_mass", {"heads": "group"}), ("entropy", {}), ("dense", {})]))
        else:
            after.append(("attend", {"query": query, "causal": True, "want": r.one([(), "lse"]), "scale": None,
                                     "alibi_slopes": r.one([None, np.ones(heads)])}))
    elif kind == "PagedKVCache":
        arguments, after = paged_history(r)
    elif kind == "AttentionWeights":
        if "softcap" in options:
            options["softcap"] = 3.0        # a smaller one makes many weights alike
        arguments = {**first, **options}
        methods = METHODS
        if r.chance(0.3):
            what = r.one(["relevance", "weighted"])
            grad = inputs(r.random, batch, heads, heads, q_len, 1, value.shape[-1], dtype=r.one(DTYPES))[0]
            after.append((what, {"value": value, "grad_output": r.memory(grad), "sign": r.one(["positive", "both"])}
                          if what == "relevance" else {"heads": r.random.integers(-2, 4, heads) / 2.0}))
            methods = {name: METHODS[name] for name in OF_OTHERS[what]}
        name = r.one(list(methods))
        arguments_of = method_arguments(r, methods[name], batch, heads, q_len, kv_len, query.dtype)
        for unknown in ("heads", "normalize", "reduce") if methods is not METHODS else ():
            arguments_of.pop(unknown, None)
        after.append((name, arguments_of))
    elif kind == "alibi_slopes":
        arguments = {"heads": int(r.random.integers(0, 40))}
    elif kind == "t5_relative_bias_backward":
        grad = inputs(r.random, (), 1, 1, heads, 1, max(q_len + kv_len - 1, 0))[0][0]
        arguments = {"grad_output": r.memory(grad), "buckets": 8, "q_len": q_len, "kv_len": kv_len,
                     "max_distance": r.one([5, 20]), "bidirectional": r.one([True, False])}
    elif kind == "t5_relative_bias":
        arguments = {"table": r.memory(inputs(r.random, (), 1, 1, 8, 1, heads)[0][0]), "q_len": q_len, "kv_len": kv_len,
                     "max_distance": r.one([5, 20]), "bidirectional": r.one([True, False])}
    elif kind == "deberta_relative_index":
        arguments = {"q_len": q_len, "kv_len": kv_len, "buckets": r.one([1, 4, 9]), "max_position": r.one([6, 20, 50]),
                     "q_offset": r.one([None, 0, 3])}
    elif kind == "align":
        matrix = inputs(r.random, (), 1, 1, q_len, 1, kv_len, dtype=r.one(DTYPES))[0][0]
        arguments = {"matrix": r.memory(matrix), "medfilt": r.one([None, 1, 3, 7, 31, 4])}
    else:
        square = inputs(r.random, (), heads, heads, q_len, q_len, 4)
        layers = [(square[0], square[1])] * 2
        arguments = {"layers": layers, "start": r.one([0, q_len - 1, np.ones(q_len, np.float32)]),
                     "residual": r.one([0.5, 0.0, 1.0])}
    if bad:
        spoil = int(r.random.integers(len(after) + 1))
        if spoil == 0 or not after[spoil - 1][1]:
            arguments = r.spoilt(arguments)
        else:
            after[spoil - 1] = (after[spoil - 1][0], r.spoilt(after[spoil - 1][1]))
    for name, more in after:
        # A weight below the smallest normal number is 0 for the kernels alone, and more than a threshold of 0.
        if name == "key_hits" and type(more["threshold"]) in (int, float) and more["threshold"] == 0:
            more["threshold"] = float(np.finfo(np.float32).tiny)
    threads = r.one([1, 2, 3])

    def call(module):
        found = dict(arguments)
        if kind == "rollout" and isinstance(found["layers"], list):
            found["layers"] = [module.AttentionWeights(*x) if isinstance(x, tuple) else x for x in found["layers"]]
        elif kind not in ("rollout", "KVCache", "PagedKVCache", "alibi_slopes", "align", "t5_relative_bias",
                      "t5_relative_bias_backward", "deberta_relative_index", "merge_states"):
            found["num_threads"] = threads
        target = WholeState if kind == "AttentionState" and module is reference else getattr(module, kind)
        result = target(**found)
        if kind == "attention_weights_varlen":
            return [W.dense() for W in result]
        for name, more in after:
            more = dict(more)
            places = more.pop("*", ())
            positional = places if isinstance(places, tuple) else (places,)
            if name.startswith("__"):
                positional, more = tuple(more.values()), {}
            answer = getattr(result, name)(*positional, **more)
            result = answer if (name == "weights" and kind == "KVCache") or name in OF_OTHERS else result
            answer = [W.dense() for W in answer] if name == "weights" and kind == "PagedKVCache" else answer
            if name == "head":
                answer = answer.dense()
        return answer if after else result

    name = "spoilt AttentionState" if bad and kind == "AttentionState" else kind
    return name, call, [arguments, *[more for _, more in after]]


PACKED = ("attention_varlen", "attention_varlen_backward", "attention_weights_varlen")


def packed(r, kind, arrays, q_len, kv_len, options):
    """Arguments over packed tokens."""
    tokens = [x.reshape(-1, *x.shape[-3:])[0].swapaxes(0, 1) if x.size else x[..., :0, :, :] for x in arrays]
    n = int(r.random.integers(1, 4))
    bounds = [np.sort(np.r_[0, r.random.integers(0, m + 1, n - 1), m]) for m in (q_len, kv_len)]
    found = {name: x for name, x in options.items() if name in ("causal", "window", "scale", "softcap")}
    if r.chance(0.3):
        found["key_mask"] = r.random.random(kv_len) < 0.7
    if r.chance(0.3):
        found["bias"] = [None if r.chance(0.2) else r.random.standard_normal((rows, keys), np.float32)
                         for rows, keys in zip(*map(np.diff, bounds), strict=True)]
    first = dict(zip(("query", "key", "value"), tokens, strict=True))
    where = {"cu_seqlens_q": bounds[0], "cu_seqlens_k": bounds[1]}
    if kind != "attention_varlen_backward" and len(tokens[1]) == len(tokens[2]) == kv_len and r.chance(0.4):
        where = {"cu_seqlens_q": bounds[0], **in_pages(r, first, bounds[1])}
    if kind == "attention_varlen":
        return {**first, **where, **found, "want": r.one([(), "lse", ("weights", "argmax")])}
    if kind == "attention_weights_varlen":
        del first["value"]
        return {**first, **where, **found}
    rows = (*tokens[0].shape[:-1], tokens[2].shape[-1])
    lse = np.zeros(rows[-2::-1], np.float32)
    with np.errstate(all="ignore"), contextlib.suppress(*CLEAN):        # tokens without elements have other axes
        lse = reference.attention_varlen(*tokens, *bounds, want="lse", **found).lse
    grad = r.random.standard_normal(rows)
    return {"grad_output": grad, **first, "output": grad, "lse": lse, **where, **found,
            "want": r.one(["query", ("query", "key", "value"), "bias"])}


def paged_history(r):
    """Arguments of a paged cache, and changes of it before one question."""
    heads, group, dim, value_dim = (int(r.random.integers(1, n)) for n in (3, 3, 12, 12))
    shared = value_dim <= dim and r.chance(0.5)
    query, key, value = (r.memory(x.swapaxes(0, 1)) for x in inputs(
        r.random, (), heads * group, heads, int(r.random.integers(9)), int(r.random.integers(30)), dim, value_dim,
        dtype=r.one(DTYPES)))
    arguments = {"n_pages": r.one([int(r.random.integers(8)), 90]), "page": int(r.random.integers(1, 7)),
                 "kv_heads": heads, "head_dim": dim, "value_dim": value_dim,
                 "dtype": r.one(["float32", "float64", "float16"]), "shared": shared}
    after, held, given = [("add", {}), ("add", {})], {0: 0, 1: 0}, 2    # the tokens of each sequence, the ids so far
    for what in ["append", *r.random.choice(["append", "fork", "truncate", "free", "add"], r.random.integers(8))]:
        ids = r.random.permuted(list(held))[:r.random.integers(1, len(held) + 1)]
        if what in ("fork", "add"):
            after.append((what, {"sequence": int(ids[0])} if what == "fork" else {}))
            held[given], given = held[ids[0]] if what == "fork" else 0, given + 1
        elif what == "append":
            lengths = r.random.multinomial(len(key), np.full(len(ids) + 1, 1 / (len(ids) + 1)))[:-1]
            new = [x[len(key) - lengths.sum():] for x in (key, value)]
            after.append((what, {"ids": ids, "key": new[0], "value": None if shared else new[1], "lengths": lengths}))
            held |= {i: held[i] + n for i, n in zip(ids, lengths, strict=True)}
        elif what == "truncate":
            lengths = np.array([r.random.integers(held[i] + 1) for i in ids])
            after.append((what, {"ids": ids, "lengths": lengths}))
            held |= dict(zip(ids, lengths, strict=True))
        elif len(held) > 1:
            after.append((what, {"ids": ids[:1]}))
            del held[ids[0]]
    ids = r.random.choice(list(held), r.random.integers(1, 4))
    rows = r.random.multinomial(len(query), np.full(len(ids), 1 / len(ids)))
    question = {"ids": ids, "query": query, "q_lengths": rows, "causal": r.one([True, False]),
                "window": r.one([None, (4, 0)])}
    after.append(r.one([("attend", question | {"want": r.one([(), "lse", "entropy"])}), ("weights", question),
                        ("block_table", {"ids": ids})]))
    return arguments, after


def in_pages(r, tokens, bounds):
    """Put key and value among `tokens` into pages, some of whose places hold NaN, and say where they are."""
    page, lengths = int(r.random.integers(1, 7)), np.diff(bounds)
    counts = -(-lengths // page)
    order = r.random.permutation(counts.sum() + 2)
    table = r.random.integers(-1, len(order), (len(lengths), counts.max(initial=0) + 1)).astype(r.one("bhiq"))
    for i, (count, end) in enumerate(zip(counts, np.cumsum(counts), strict=True)):
        table[i, :count] = order[end - count:end]
    places = np.concatenate([np.arange(n) for n in lengths] or [[]]).astype(int)
    pages = table[np.repeat(np.arange(len(lengths)), lengths), places // page], places % page
    for name in ("key", "value"):
        x = tokens[name]
        into = np.full((len(order), page, *x.shape[1:]), np.nan).astype(x.dtype)
        into[pages] = x
        tokens[name] = r.memory(into)
    return {"block_table": r.memory(table), "kv_lengths": lengths}


def method_arguments(r, kinds, batch, heads, q_len, kv_len, dtype):
    """Values of the arguments of a method of the weights."""
    lead = (*batch, heads)
    special = {
        "keep": lambda: r.random.random((q_len, kv_len)) < 0.5, "rows": lambda: r.one(
            [None, slice(1, 5), np.arange(q_len)[::2], np.arange(q_len) % 2 == 0, 0]),
        "columns": lambda: r.one([None, slice(1, 5), np.arange(kv_len)[::2], np.arange(kv_len) % 2 == 0, 0]),
        "q": lambda: r.random.integers(-1, 2, q_len), "k": lambda: r.random.integers(-1, 3, kv_len),
        "places": lambda: tuple(int(r.random.integers(-n, n)) if n else 0 for n in lead),
        "operand": lambda: r.random.standard_normal((kv_len, 3) if r.chance(0.7) else (kv_len,)).astype(dtype),
        "index": lambda: r.one([..., (..., 0), (..., slice(1, 4), slice(None, None, 2)), 0, (..., [0, -1]), (0, 0),
                                (..., slice(None), np.arange(kv_len) % 2 == 0), (None, 0)]),
    }
    return {name: special[values]() if isinstance(values, str) else r.one(values) for name, values in kinds.items()
            if isinstance(values, str) or name not in ("reduce", "normalize", "dtype") or r.chance(0.5)}


def frozen(x):
    """The bytes of all arrays in arguments."""
    if isinstance(x, np.ndarray):
        x = x.astype(np.float64) if x.dtype == np.longdouble else x         # has padding bytes
        return x.dtype.str, x.shape, x.tobytes() if x.size < 10**6 else x.flat[:9].tobytes()
    if isinstance(x, dict):
        return [frozen(y) for y in x.values()]
    return [frozen(y) for y in x] if isinstance(x, list | tuple) else repr(x)


def answer(call, module):
    try:
        return call(module), None
    except CLEAN as error:
        return None, error


def one(seed):
    """One case; what is wrong, or None."""
    kind, call, arguments = case(seed)
    before = frozen(arguments)
    if kind != "spoilt AttentionState":      # that says itself what is wrong
        with np.errstate(all="ignore"):
            wanted, error = answer(call, reference)
    with warnings.catch_warnings(), np.errstate(all="warn"):
        warnings.simplefilter("error")
        got, its_error = answer(call, attnc)
    if frozen(arguments) != before:
        return f"{kind}: an input was written"
    if kind == "spoilt AttentionState":
        return None
    if (error is None) != (its_error is None) or type(error) is not type(its_error):
        return f"{kind}: {its_error!r} instead of {error!r}"
    if error is not None:
        return None if str(error) == str(its_error) or isinstance(error, MemoryError) else (
            f"{kind}: {its_error} instead of {error}")
    return differs(got, wanted, kind)


def run(first, count):
    """Cases that went wrong, as text; each instruction set in turn."""
    isas, wrong = _isa.available(), []
    for seed in range(first, first + count):
        isa = isas[seed % len(isas)]
        _isa.use(isa)
        try:
            said = one(seed)
        except Exception as error:      # of a kind that no caller expects
            said = f"{type(error).__name__}: {error}"
        if said:
            wrong.append(f"ATTNC_ISA={isa} seed {seed}: {said[:500]}")
    return wrong


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    found = run(int(sys.argv[2]) if len(sys.argv) > 2 else 0, int(sys.argv[1]))
    print(*found, f"{sys.argv[1]} cases, {len(found)} wrong", sep="\n")
    sys.exit(bool(found))
