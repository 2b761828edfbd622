"""Attention one element at a time, independent of the package, and random problems to try it on."""

import math

import numpy as np


def at(x, *index):
    """The element that broadcasting puts at `index`: right-aligned, axes of length 1 repeat."""
    x = np.asarray(x)
    index = index[len(index) - x.ndim:]
    return x[tuple(0 if length == 1 else i for length, i in zip(x.shape, index, strict=True))].item()


class Slow:
    """Attention one element at a time, in Python floats; arrays are (..., heads, length, dim)."""

    def __init__(self, query, key, value, **options):
        self.query, self.key, self.value, self.options = query, key, value, options
        self.batch = np.broadcast_shapes(query.shape[:-3], key.shape[:-3], value.shape[:-3])
        self.q_heads, self.q_len, self.dim = query.shape[-3:]
        self.kv_heads, self.kv_len = key.shape[-3:-1]

    def get(self, name, default, *index):
        option = self.options.get(name)
        return default if option is None else at(option, *index)

    def lengths(self, b):
        return self.get("q_lengths", self.q_len, *b), self.get("kv_lengths", self.kv_len, *b)

    def position(self, b, i):
        q_length, kv_length = self.lengths(b)
        return i + self.get("q_offset", kv_length - q_length, *b)

    def key_position(self, b, h, j):
        return self.get("k_positions", j, *b, h // (self.q_heads // self.kv_heads), j)

    def padding(self, b, i, j):
        q_length, kv_length = self.lengths(b)
        return i >= q_length or j >= kv_length

    def sees(self, b, h, i, j):
        p, k = self.position(b, i), self.key_position(b, h, j)
        left, right = self.options.get("window") or (None, None)
        segment = self.get("q_segments", 0, *b, i)
        return not (
            self.padding(b, i, j)
            or not self.get("mask", True, *b, h, i, j)
            or not self.in_seen_block(b, h, i, j)
            or not self.named(b, h, i, j)
            or not self.get("key_mask", True, *b, j)
            or self.get("bias", 0.0, *b, h, i, j) == -math.inf
            or self.get("relative_bias", 0.0, *b, h, j - i + self.q_len - 1) == -math.inf
            or (self.options.get("causal", False) and k > p)
            or (left is not None and k < p - left)
            or (right is not None and k > p + right)
            or segment < 0
            or segment != self.get("k_segments", 0, *b, j))

    def in_seen_block(self, b, h, i, j):
        mask, rows, keys = self.options.get("block_mask") or (True, 1, 1)
        return at(mask, *b, h, i // rows, j // keys)

    def named(self, b, h, i, j):
        lists = self.options.get("key_indices")
        if lists is None:
            return True
        head = h if lists.shape[-3] == self.q_heads else h // (self.q_heads // self.kv_heads)
        return any(at(lists, *b, head, i, place) == j for place in range(lists.shape[-1]))

    def score(self, b, h, i, j, stage="masked"):
        if self.padding(b, i, j) or (stage == "masked" and not self.sees(b, h, i, j)):
            return -math.inf
        group = self.q_heads // self.kv_heads
        s = 0.0
        for d in range(self.dim):
            s += at(self.query, *b, h, i, d) * at(self.key, *b, h // group, j, d)
        if stage == "raw":
            return s
        if self.options.get("relative_index") is not None:
            s += self.relative_terms(b, h, i, j)
        scale = self.options.get("scale")
        s *= 1 / math.sqrt(self.dim) if scale is None else scale
        softcap = self.options.get("softcap")
        if stage == "scaled" or (softcap is None and stage == "capped"):
            return s
        s = s if softcap is None else softcap * math.tanh(s / softcap)
        if stage == "capped":
            return s
        slope = self.get("alibi_slopes", 0.0, *b, h)
        s += self.get("bias", 0.0, *b, h, i, j) + self.get("relative_bias", 0.0, *b, h, j - i + self.q_len - 1)
        return s - slope * abs(self.position(b, i) - self.key_position(b, h, j))

    def relative_terms(self, b, h, i, j):
        """Products of the query and of the key with the table row of their distance."""
        x, total = int(self.options["relative_index"][j - i + self.q_len - 1]), 0.0
        for d in range(self.dim):
            total += self.get("relative_key", 0.0, *b, h, x, d) * at(self.query, *b, h, i, d)
            total += self.get("relative_query", 0.0, *b, h, x, d) * at(
                self.key, *b, h // (self.q_heads // self.kv_heads), j, d)
        return total

    def row(self, b, h, i):
        """Weights, lse and entropy of one row; the largest score comes off before sums are formed."""
        scores = [self.score(b, h, i, j) for j in range(self.kv_len)]
        logits = [s for s in scores if s != -math.inf]
        if self.options.get("sinks") is not None and i < self.lengths(b)[0]:
            logits.append(at(self.options["sinks"], h))
        if not logits or max(logits) == -math.inf:
            return [0.0] * self.kv_len, -math.inf, 0.0
        largest = max(logits)
        total = math.fsum(math.exp(s - largest) for s in logits)
        shares = [(math.exp(s - largest) / total, math.log(total) - (s - largest)) for s in logits]
        weights = [math.exp(s - largest) / total for s in scores]  # a NaN total makes every weight of the row NaN
        empty = all(s == -math.inf for s in scores)
        entropy = 0.0 if empty else math.fsum(share * surprise for share, surprise in shares if share)
        return weights, largest + math.log(total), entropy

    def attention(self):
        """Output, lse and weights."""
        rows = (*self.batch, self.q_heads, self.q_len)
        output, lse = np.zeros((*rows, self.value.shape[-1])), np.zeros(rows)
        weights = np.zeros((*rows, self.kv_len))
        group = self.q_heads // self.kv_heads
        for index in np.ndindex(rows):
            *b, h, i = index
            weights[index], lse[index], _ = self.row(b, h, i)
            for d in range(self.value.shape[-1]):
                output[index][d] = math.fsum(weights[index][j] * at(self.value, *b, h // group, j, d)
                                             for j in range(self.kv_len))
        return output, lse, weights

    def relevance(self, grad, positive):
        """Each weight times the gradient that reaches it."""
        weights, group = self.attention()[2], self.q_heads // self.kv_heads
        for *b, h, i, j in np.ndindex(weights.shape):
            gradient = sum(at(grad, *b, h, i, d) * at(self.value, *b, h // group, j, d) for d in range(grad.shape[-1]))
            gradient = 0.0 if positive and gradient < 0 else gradient
            weights[(*b, h, i, j)] *= gradient if weights[(*b, h, i, j)] != 0 else 0
        return weights

    def entropy(self):
        entropy = np.zeros((*self.batch, self.q_heads, self.q_len))
        for *b, h, i in np.ndindex(entropy.shape):
            entropy[(*b, h, i)] = self.row(b, h, i)[-1]
        return entropy

    def scores(self, stage):
        scores = np.zeros((*self.batch, self.q_heads, self.q_len, self.kv_len))
        for *b, h, i, j in np.ndindex(scores.shape):
            scores[(*b, h, i, j)] = self.score(b, h, i, j, stage)
        return scores


BATCHES = [((), (), ()), ((2,), (2,), (2,)), ((2, 1), (3,), (1, 3)), ((1,), (2,), (2,)), ((), (2,), ())]
NAMES = ("mask", "block_mask", "key_indices", "key_mask", "bias", "relative_bias", "causal", "window", "q_offset",
         "scale", "softcap", "alibi_slopes", "sinks", "segments", "q_lengths", "kv_lengths", "k_positions", "tables")


def some_option(name, random, batch, heads, q_len, kv_len, dim):
    """A random value of an option, in one of the shapes that it may have."""
    per_batch = batch if random.random() < 0.7 else ()
    full = (*per_batch, heads, q_len, kv_len)
    shape = tuple(1 if random.random() < 0.3 else n for n in full)[random.integers(len(full)):]
    if name == "segments":
        return {"q_segments": random.integers(-1, 2, (*per_batch, q_len)),
                "k_segments": random.integers(-1, 2, (*batch, kv_len))}
    if name == "k_positions":       # of one head for all: those of several are in tests/kernels/test_positions.py
        lead = (*per_batch, 1) if random.random() < 0.5 else ()
        positions = random.permuted(np.broadcast_to(np.arange(kv_len + 3), (*lead, kv_len + 3)), axis=-1)[..., :kv_len]
        kind = random.choice(["int64", "int32", "uint16", "uint8"])
        return {name: positions.astype(kind), "q_offset": random.integers(-2, kv_len + 2, per_batch)}
    if name == "tables":
        return tables(random, per_batch, heads, q_len + kv_len - 1, dim)
    return {name: {
        "mask": lambda: random.random(shape) < 0.7,
        "block_mask": lambda: cells(random, full, shape),
        "key_indices": lambda: lists(random, (*per_batch, int(random.choice([1, heads])), q_len), kv_len),
        "key_mask": lambda: random.random((*per_batch, kv_len)) < 0.7,
        "bias": lambda: np.where(random.random(shape) < 0.2, -np.inf, random.standard_normal(shape)),
        "relative_bias": lambda: of_distances(random, full, shape),
        "causal": lambda: True,
        "window": lambda: tuple(None if random.random() < 0.3 else int(random.integers(4)) for _ in "lr"),
        "q_offset": lambda: random.integers(-2, kv_len + 2, per_batch),
        "scale": lambda: float(random.choice([0.0, -0.7, 0.3, 2.0])),
        "softcap": lambda: float(random.choice([0.5, 3.0])),
        "alibi_slopes": lambda: random.random((*per_batch, heads)),
        "sinks": lambda: np.where(random.random(heads) < 0.3, -np.inf, random.standard_normal(heads)),
        "q_lengths": lambda: random.integers(0, q_len + 1, per_batch),
        "kv_lengths": lambda: random.integers(0, kv_len + 1, per_batch),
    }[name]()}


def cells(random, full, shape):
    """A mask over blocks of a size that need not divide the lengths."""
    sizes = [int(random.integers(1, 2 + n)) for n in full[-2:]]
    shape = *shape[:-2], *(-(-n // size) for n, size in zip(full[-2:], sizes, strict=True))
    return random.random(shape) < 0.6, *sizes


def lists(random, rows, kv_len):
    """Keys of each row, some of them -1, some named twice."""
    n = int(random.integers(0, 2 + kv_len))
    return random.integers(-1, kv_len, (*rows, n)).astype(random.choice(["int64", "int32", "int16"]))


def tables(random, batch, heads, distances, dim):
    """One or both tables of content-relative terms, and an index that rises, falls or jumps."""
    rows = int(random.integers(1, 9))
    index = np.arange(max(distances, 0)) // random.choice([1, 2, 5]) % rows
    index = [index, rows - 1 - index, random.permutation(index)][random.integers(3)]
    found = {"relative_index": index.astype(random.choice(["int64", "int32", "uint8"]))}
    for name in [("relative_key",), ("relative_query",), ("relative_key", "relative_query")][random.integers(3)]:
        lead = (batch, ())[random.integers(2)] + ((heads,) if random.random() < 0.7 else (1,))
        found[name] = random.standard_normal((*lead, rows, dim)).astype(random.choice(["float32", "float64"]))
    return found


def of_distances(random, full, shape):
    """A relative bias that forbids some distances, some axes before the last of length 1 or left out."""
    shape = *shape[:-2], max(full[-2] + full[-1] - 1, 0)
    return np.where(random.random(shape) < 0.2, -np.inf, random.standard_normal(shape))


def problem(seed, chance=0.4):
    """Random arrays and options; each option is on with probability `chance`."""
    random = np.random.default_rng(seed)
    batches = BATCHES[seed % len(BATCHES)]
    q_heads, kv_heads = [(2, 2), (4, 2), (3, 1)][seed % 3]
    q_len, kv_len, dim, value_dim = (int(random.integers(1, n)) for n in (5, 7, 5, 4))
    shapes = (q_heads, q_len, dim), (kv_heads, kv_len, dim), (kv_heads, kv_len, value_dim)
    arrays = [random.standard_normal((*batch, *shape)) for batch, shape in zip(batches, shapes, strict=True)]
    options = {}
    for name in NAMES:
        if random.random() < chance:
            options |= some_option(name, random, np.broadcast_shapes(*batches), q_heads, q_len, kv_len, dim)
    return arrays, options


def assert_close(got, wanted, bound):
    """Equal where not finite, else within the bound."""
    assert got.shape == wanted.shape
    finite = np.isfinite(wanted)
    np.testing.assert_array_equal(np.where(finite, 0, got), np.where(finite, 0, wanted))
    assert np.isfinite(got[finite]).all()
    error = np.abs(got[finite].astype(np.float64) - wanted[finite]).max(initial=0)
    assert error <= bound, f"error {error} above {bound}"


def bounds(arrays, options, eps):
    """Forward error bounds of scores, weights and output: each product and sum rounds once."""
    query, key, value = (np.abs(x.astype(np.float64)) for x in arrays)
    scale = options.get("scale")
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else abs(scale)
    largest = query.max() * key.max()
    for name, other in (("relative_key", query), ("relative_query", key)):
        largest += np.abs(np.asarray(options.get(name, 0.0), np.float64)).max() * other.max()
    largest *= query.shape[-1] * scale
    for name in ("bias", "relative_bias", "alibi_slopes", "sinks"):
        extra = np.abs(np.asarray(options.get(name, 0.0), np.float64))
        extra = extra[np.isfinite(extra)].max(initial=0)
        largest += extra * (20 if name == "alibi_slopes" else 1)
    score = (query.shape[-1] + 8) * eps * max(largest, 1)
    weight = 2 * score + (key.shape[-2] + 8) * eps
    return {"scores": score, "lse": score + (key.shape[-2] + 8) * eps, "weights": weight,
            "output": key.shape[-2] * weight * value.max()}


def full_batch(arrays):
    """Query and key with the batch axes that they have together with value."""
    batch = np.broadcast_shapes(*(x.shape[:-3] for x in arrays))
    return [np.broadcast_to(x, (*batch, *x.shape[-3:])) for x in arrays[:2]]


def slow_softmax(x, where, log):
    """Along the last axis, one element at a time."""
    result = np.full(x.shape, -np.inf if log else 0.0)
    for row in np.ndindex(x.shape[:-1]):
        chosen = [j for j in range(x.shape[-1]) if where[row][j]]
        if not chosen:
            continue
        largest = max(x[row][j] for j in chosen)
        total = math.fsum(math.exp(x[row][j] - largest) for j in chosen)
        for j in chosen:
            share = x[row][j] - largest - math.log(total)
            result[row][j] = share if log else math.exp(share)
    return result


def slow_path(x, width):
    """The alignment of a matrix, a list of rows: the path as pairs."""
    n, m, half = len(x), len(x[0]), width // 2
    if half and half < m:
        x = [[sorted(row[abs(j + d) if j + d < m else 2 * (m - 1) - j - d] for d in range(-half, half + 1))[half]
              for j in range(m)] for row in x]
    best = {(0, 0): (x[0][0], None)}
    for i in range(n):
        for j in range(m):
            if (i, j) != (0, 0):
                ways = [best[way][0] for way in ((i - 1, j - 1), (i, j - 1), (i - 1, j)) if way in best]
                which = [way for way in ((i - 1, j - 1), (i, j - 1), (i - 1, j)) if way in best]
                best[i, j] = x[i][j] + max(ways), which[ways.index(max(ways))]
    path = [(n - 1, m - 1)]
    while path[-1] != (0, 0):
        path.append(best[path[-1]][1])
    return path[::-1]
