"""The contenders of the gradients of attention: attnc and the CPU backward of torch."""

import numpy as np

import attnc
from attnc.bench import Arrays, Call, Options, Unsupported
from attnc.bench.cases.gradients import NAMES, Gradients
from attnc.bench.contenders.tensors import from_torch, import_torch, to_torch


def setup_attnc(case: Gradients, arrays: Arrays, options: Options, threads: int) -> Call:
    """The package itself."""
    grad, query, key, value = arrays
    result = attnc.attention(query, key, value, want="lse", num_threads=threads, **options)

    def call() -> list[np.ndarray]:
        found = attnc.attention_backward(grad, query, key, value, result.output, result.lse, num_threads=threads,
                                         **options)
        return [getattr(found, name) for name in NAMES]

    return call


def setup_torch(case: Gradients, arrays: Arrays, options: Options, threads: int) -> Call:
    """The gradients of ``scaled_dot_product_attention``, whose forward call is not timed."""
    torch = import_torch(threads)
    unknown = sorted(set(options) - {"causal"})
    if unknown or case.case.q_len != case.case.kv_len:
        raise Unsupported(f"has no {', '.join(unknown) or 'bottom-right triangle'}")
    grad, *inputs = (to_torch(torch, array) for array in arrays)
    inputs = [x.requires_grad_() for x in inputs]
    output = torch.nn.functional.scaled_dot_product_attention(
        *inputs, is_causal=bool(options.get("causal")), enable_gqa=case.case.q_heads != case.case.kv_heads)

    def call() -> list[np.ndarray]:
        return [from_torch(torch, x) for x in torch.autograd.grad(output, inputs, grad, retain_graph=True)]

    return call
