"""The contenders of the gradients of attention: attnc and the CPU backward of torch."""

import attnc
from attnc.bench import Unsupported
from attnc.bench.cases.gradients import NAMES
from attnc.bench.contenders.tensors import from_torch, import_torch, to_torch


def setup_attnc(case, arrays, options, threads):
    """The package itself."""
    grad, *inputs = arrays
    result = attnc.attention(*inputs, want="lse", num_threads=threads, **options)

    def call():
        found = attnc.attention_backward(grad, *inputs, result.output, result.lse, num_threads=threads, **options)
        return [getattr(found, name) for name in NAMES]

    return call


def setup_torch(case, arrays, options, threads):
    """The gradients of ``scaled_dot_product_attention``, whose forward call is not timed."""
    torch = import_torch(threads)
    unknown = sorted(set(options) - {"causal"})
    if unknown or case.case.q_len != case.case.kv_len:
        raise Unsupported(f"has no {', '.join(unknown) or 'bottom-right triangle'}")
    grad, *inputs = (to_torch(torch, array) for array in arrays)
    inputs = [x.requires_grad_() for x in inputs]
    output = torch.nn.functional.scaled_dot_product_attention(
        *inputs, is_causal=bool(options.get("causal")), enable_gqa=case.case.q_heads != case.case.kv_heads)

    def call():
        return [from_torch(torch, x) for x in torch.autograd.grad(output, inputs, grad, retain_graph=True)]

    return call
