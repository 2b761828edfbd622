"""Print a digest of the bits that every function gives, for each instruction set that runs here.

    python tests/tools/digest.py [--dump FILE]

Two builds of the package that print the same digests give the same bits: a change of the source that is not to change
results is checked by running this before it and after it. `--dump` writes one line a call, so that `diff` names the
calls that changed. Errors count too, by type and text.
"""

import argparse
import hashlib
import re
import sys
import warnings
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import fuzz
from calls import all_calls, arrays_of
from checking import dtype_of, inputs
from slow import NAMES, some_option

import attnc
from attnc import _isa

FUZZ = 1500                 # random calls of every function
# q_heads, kv_heads, q_len, kv_len, head_dim, value_dim: each row count and depth at which kernels change their way
SIZES = [
    (1, 1, 1, 1, 1, 1), (2, 2, 1, 70, 64, 64), (4, 2, 3, 2100, 9, 5), (6, 3, 5, 70, 20, 20), (4, 1, 1, 1500, 128, 128),
    (8, 1, 1, 300, 64, 80), (4, 2, 7, 150, 32, 64), (8, 2, 4, 2300, 128, 128), (7, 7, 13, 64, 64, 64),
    (4, 4, 16, 16, 32, 32), (4, 4, 16, 64, 64, 32), (2, 2, 17, 90, 32, 32), (2, 2, 24, 100, 32, 32),
    (4, 4, 32, 32, 32, 64), (4, 4, 32, 256, 64, 64), (2, 2, 64, 64, 64, 64), (2, 2, 64, 500, 128, 48),
    (3, 1, 40, 530, 8, 12), (2, 2, 65, 65, 64, 64), (2, 1, 90, 700, 80, 72), (4, 2, 197, 197, 64, 64),
    (1, 1, 300, 1100, 40, 33), (2, 2, 130, 20, 256, 256), (1, 1, 3, 40, 700, 600), (1, 1, 70, 40, 700, 600),
    (2, 2, 8, 2100, 64, 64), (2, 2, 30, 1030, 16, 16),
]
WANTS = [(), "lse", ("lse", "weights", "scores"), ("entropy", "max", "argmax"), "weights"]


def numbers(random, sizes, dtype, kind):
    """Inputs; of kind 1 with infinite, huge and NaN values, of kind 2 with subnormal ones, of kind 3 not contiguous."""
    arrays = inputs(random, (2,), *sizes, dtype=dtype)
    if kind == 1:
        for x, worst in zip(arrays[1:], ([np.nan, np.inf], [np.inf, -np.inf, np.nan, 3e38]), strict=True):
            for value in worst:
                if dtype != "float16" or not np.isfinite(value):
                    x[tuple(random.integers(n) for n in x.shape[:-1])][..., random.integers(x.shape[-1])] = value
    elif kind == 2:
        arrays[2][...] = (arrays[2].astype(np.float64) * 1e-39).astype(arrays[2].dtype)
    elif kind == 3:
        arrays = [np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2)[..., ::-1] for x in arrays]
    return arrays


def attention_calls(i):
    """Call `i` of attention, its links and gradients: name and function."""
    random = np.random.default_rng([7, i])
    sizes, dtype = SIZES[i % len(SIZES)], ["float32", "float32", "float64", "float16", "bfloat16"][i // len(SIZES) % 5]
    heads, _, q_len, kv_len = sizes[:4]
    kind = random.choice([0, 0, 0, 1, 2, 3])
    query, key, value = numbers(random, sizes, dtype, kind)
    options = {}
    for name in NAMES:
        if i % 3 and random.random() < 0.15:
            options |= some_option(name, random, (2,), heads, q_len, kv_len, sizes[4])
    threads = int(random.integers(1, 4))
    want = WANTS[random.integers(len(WANTS))]
    name = f"{i} {sizes} {dtype} {kind} {sorted(options)} {want}"

    def forward():
        return attnc.attention(query, key, value, want=want, num_threads=threads, **options)

    def links():
        weights = attnc.attention_weights(query, key, num_threads=threads, **options)
        return [attnc.attention_scores(query, key, stage="capped", num_threads=threads, **options), weights,
                attnc.weighted_sum(weights, value, num_threads=threads)]

    def gradients():
        result = attnc.attention(query, key, value, want="lse", num_threads=threads, **options)
        grad = np.cos(np.arange(result.output.size)).reshape(result.output.shape).astype(result.output.dtype)
        wanted = ("query", "key", "value", *(["bias"] if "bias" in options else []))
        return attnc.attention_backward(grad, query, key, value, result.output, result.lse, want=wanted,
                                        num_threads=threads, **options)

    def statistics():
        lazy = attnc.AttentionWeights(query, key, num_threads=threads, **options)
        return [lazy.lse, lazy.topk(3), lazy.entropy(), lazy.key_mass(), lazy.mean_distance(), lazy.mean_position(),
                lazy.key_max(), lazy.key_hits(0.02), lazy.map((min(3, q_len), min(4, kv_len))), lazy.head_mean(),
                lazy @ np.ones((kv_len, 3), query.dtype), lazy[..., ::3, 1:]]

    return name, {"forward": forward, "links": links, "gradients": gradients, "statistics": statistics}


def softmax_calls(i):
    random = np.random.default_rng([8, i])
    shape = [(3, 1000), (5, 20000), (64, 7, 33), (16, 300), (4, 4, 4), (2, 100000), (200, 40), (1, 1)][i % 8]
    x = (random.standard_normal(shape) * 5).astype(dtype_of(["float32", "float64", "float16", "bfloat16"][i // 8 % 4]))
    where = random.random(shape) < 0.8 if i % 3 == 0 else None
    axis = [-1, 0, None, (0, -1)][i // 3 % 4]

    def call():
        y, z = (f(x, axis, where=where, num_threads=i % 3 + 1) for f in (attnc.softmax, attnc.log_softmax))
        return [y, z, attnc.softmax_backward(x, y, axis), attnc.log_softmax_backward(x, z, axis)]

    return f"softmax {i} {shape} {x.dtype} {axis}", {"softmax": call}


def calls():
    """All calls, by name, in an order that stays."""
    for i in range(2 * 5 * len(SIZES)):
        name, functions = attention_calls(i)
        for kind, function in functions.items():
            yield f"{kind} {name}", function
    for i in range(96):
        name, functions = softmax_calls(i)
        yield from ((f"{kind} {name}", function) for kind, function in functions.items())
    for dtype in ("float32", "float64", "float16", "bfloat16"):
        for q_len, kv_len in ((30, 90), (5, 64), (80, 700)):
            yield from ((f"{name} {dtype} {q_len} {kv_len}", call)
                        for name, call in all_calls(3, q_len, kv_len, dtype).items())
    for seed in range(FUZZ):
        name, call, _ = fuzz.case(seed)
        yield f"fuzz {seed} {name}", lambda call=call: call(attnc)


def bits(call):
    """What a call gave, as bytes: shapes, dtypes and numbers (NaN payloads aside), or the error."""
    found = hashlib.sha256()
    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            result = call()
    except Exception as error:
        text = re.sub(r"0x[0-9a-f]+|\(\d+ bytes\)|for \d+ bytes", "", str(error))
        found.update(f"{type(error).__name__}: {text}".encode())
        return found.hexdigest()
    for x in arrays_of(result):
        found.update(f"{x.dtype} {x.shape}".encode())
        odd = x != x
        found.update(np.where(odd, x.dtype.type(0), x).tobytes())
        found.update(np.asarray(odd).tobytes())
    return found.hexdigest()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dump", help="write one line for each call")
    parser.add_argument("--isa", nargs="*", default=_isa.available(), help="instruction sets, by default all")
    options = parser.parse_args()
    lines = []
    for isa in options.isa:
        _isa.use(isa)
        whole, count = hashlib.sha256(), 0
        for name, call in calls():
            one = bits(call)
            lines.append(f"{isa} {name} {one}")
            whole.update(one.encode())
            count += 1
        print(f"{isa}: {count} calls, {whole.hexdigest()}", flush=True)
    if options.dump:
        Path(options.dump).write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
