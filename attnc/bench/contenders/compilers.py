"""The contenders that compile a graph: jax, OpenVINO, and FlexAttention of torch."""

import os
from typing import Any

import numpy as np

from attnc._types import Shape
from attnc.bench import Arrays, Call, Options, Unsupported, machine
from attnc.bench.cases import ADDED, added, aligned, visible
from attnc.bench.contenders.attention import only
from attnc.bench.contenders.tensors import from_torch, import_torch, to_torch
from attnc.testing import Case


def setup_jax(case: Case, arrays: Arrays, options: Options, threads: int) -> Call:
    """``jax.nn.dot_product_attention`` under ``jit``, which wants the heads after the length."""
    only(options, "causal", "window", "scale", *ADDED)
    jax = _import_jax(threads)
    if case.dtype == "float64":
        raise Unsupported("has its softmax in float32")
    if case.dtype == "float16":
        raise Unsupported("asks for a product of float16 that XLA does not have on the CPU")
    numpy = jax.numpy
    query, key, value = (numpy.asarray(np.ascontiguousarray(array.swapaxes(1, 2))) for array in arrays)
    if query.shape[-1] != value.shape[-1]:
        raise Unsupported("wants values as deep as keys")
    given, scale = added(case, options), options.get("scale")
    mask, bias = (given, None) if given is not None and given.dtype == bool else (None, given)
    triangle = aligned(case, options)
    if not triangle and (seen := visible(case, options)) is not None:
        mask = seen[None, None]
    mask, bias = (None if each is None else numpy.asarray(each) for each in (mask, bias))

    def attend(query: Any, key: Any, value: Any) -> Any:
        return jax.nn.dot_product_attention(query, key, value, bias, mask, scale=scale, is_causal=triangle)

    compiled = jax.jit(attend)
    return lambda: np.asarray(compiled(query, key, value).block_until_ready()).swapaxes(1, 2)


def _import_jax(threads: int) -> Any:
    """jax with a pool of `threads` threads: it makes one for each processor that the process may use."""
    try:
        import jax
    except ImportError as error:
        raise Unsupported.import_of(error) from error
    if not hasattr(os, "sched_setaffinity"):
        if threads < machine.cores():
            raise Unsupported(f"takes all {machine.cores()} processors")
        return jax
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(allowed)[:threads])
    try:
        jax.devices()                   # the pool is made here
    finally:
        os.sched_setaffinity(0, allowed)
    return jax


def setup_openvino(case: Case, arrays: Arrays, options: Options, threads: int) -> Call:
    """The operation ScaledDotProductAttention of opset 13, compiled for latency with the inputs' own precision."""
    try:
        import openvino
        from openvino import opset13
    except ImportError as error:
        raise Unsupported.import_of(error) from error
    only(options, "causal", "window", "scale", *ADDED)
    if case.dtype in ("float64", "bfloat16"):
        raise Unsupported(f"computes {case.dtype} in another precision")
    query, key, value = arrays
    parameters = [opset13.parameter(array.shape, array.dtype) for array in arrays]
    heads = [parameters[0], *(_repeated(opset13, node, array.shape, case) for node, array in zip(
        parameters[1:], (key, value), strict=True))]
    triangle = aligned(case, options)
    seen = None if triangle else visible(case, options)
    given = added(case, options) if seen is None else seen[None, None]
    given = np.zeros((1, 1, 1, 1), query.dtype) if given is None else given
    if given.dtype == bool:
        given = np.where(given, 0, -np.inf)
    scale = opset13.constant(np.array(options.get("scale", case.head_dim ** -0.5), query.dtype))
    node = opset13.scaled_dot_product_attention(*heads, opset13.constant(given.astype(query.dtype)), scale,
                                                causal=triangle)
    model = openvino.Model([node], parameters)
    settings = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY",
                "INFERENCE_PRECISION_HINT": "f16" if case.dtype == "float16" else "f32"}
    compiled = openvino.Core().compile_model(model, "CPU", settings)
    request = compiled.create_infer_request()
    for index, array in enumerate(arrays):
        request.set_input_tensor(index, openvino.Tensor(array, shared_memory=True))
    out = np.empty((*query.shape[:-1], value.shape[-1]), query.dtype)
    request.set_output_tensor(0, openvino.Tensor(out, shared_memory=True))

    def call(held: object = (compiled, arrays)) -> np.ndarray:      # the request knows neither its model nor its memory
        request.infer()
        return out

    return call


def _repeated(opset: Any, node: Any, shape: Shape, case: Case) -> Any:
    """Grouped heads side by side: the operation has no groups of its own."""
    heads_per_kv = case.q_heads // case.kv_heads
    if heads_per_kv == 1:
        return node
    batch, heads, length, dim = shape
    wide = np.array([batch, heads, heads_per_kv, length, dim], np.int64)
    node = opset.broadcast(opset.unsqueeze(node, np.int64(2)), wide, broadcast_spec="BIDIRECTIONAL")
    return opset.reshape(node, np.array([batch, heads * heads_per_kv, length, dim], np.int64), False)


def setup_torch_flex(case: Case, arrays: Arrays, options: Options, threads: int) -> Call:
    """``flex_attention`` under ``torch.compile`` with a ``BlockMask``: blocks that no row sees are skipped."""
    if "block_mask" not in options:
        raise Unsupported("is for masks over blocks")
    only(options, "block_mask", "scale")
    torch = import_torch(threads)
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    blocks, rows, keys = options["block_mask"]
    if blocks.shape[1] > 1:
        raise Unsupported("gets one mask for all heads here")
    seen = torch.from_numpy(blocks[0, 0])
    mask = create_block_mask(lambda batch, head, row, key: seen[row // rows, key // keys], None, None, case.q_len,
                             case.kv_len, device="cpu", BLOCK_SIZE=(rows, keys))
    query, key, value = (to_torch(torch, array) for array in arrays)
    compiled, scale = torch.compile(flex_attention), options.get("scale")
    grouped = case.q_heads != case.kv_heads

    def call() -> Any:
        with torch.inference_mode():
            return from_torch(torch, compiled(query, key, value, block_mask=mask, scale=scale, enable_gqa=grouped))

    return call
