"""The contender ggml: its flash attention, called in the libraries that the package pywhispercpp brings along."""

import ctypes
import weakref
from functools import cache
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from attnc.bench import Arrays, Call, Options, Unsupported
from attnc.bench.cases import added, visible
from attnc.bench.contenders.attention import only
from attnc.testing import Case

_KINDS = {"float32": 0, "float16": 1}       # GGML_TYPE_F32, GGML_TYPE_F16
_ACCURATE = 10                              # GGML_PREC_F32
_MASK_ROWS = 64                             # to a multiple of which older versions want the rows of a mask padded
_ROOM = 1 << 22                             # bytes for what describes tensors and graph

_POINTER, _LENGTH = ctypes.c_void_p, ctypes.c_int64


class _Memory(ctypes.Structure):
    """ggml_init_params."""

    _fields_ = [("size", ctypes.c_size_t), ("buffer", _POINTER), ("no_alloc", ctypes.c_bool)]


class _Plan(ctypes.Structure):
    """The first members of ggml_cplan, and room for those of later versions."""

    _fields_ = [("work_size", ctypes.c_size_t), ("work", _POINTER), ("threads", ctypes.c_int), ("pool", _POINTER),
                ("later", ctypes.c_char * 64)]


@cache
def _library() -> tuple[Any, Any]:
    """The libraries of tensors and of the CPU, with the types of what is called."""
    spec = find_spec("pywhispercpp")
    if spec is None or spec.origin is None:
        raise Unsupported("not installed (the package pywhispercpp has it)")
    folder = Path(spec.origin).parent.parent / "pywhispercpp.libs"
    try:
        _, base, cpu = [ctypes.CDLL(str(next(folder.glob(f"{name}-*.so*"))), ctypes.RTLD_GLOBAL)
                        for name in ("libgomp", "libggml-base", "libggml-cpu")]
    except (StopIteration, OSError) as error:
        raise Unsupported(f"pywhispercpp has no ggml that can be loaded: {error or folder}") from error
    signatures: tuple[tuple[Any, str, Any, list[Any]], ...] = (
        (base, "ggml_init", _POINTER, [_Memory]),
        (base, "ggml_free", None, [_POINTER]),
        (base, "ggml_new_tensor_4d", _POINTER, [_POINTER, ctypes.c_int, *[_LENGTH] * 4]),
        (base, "ggml_get_data", _POINTER, [_POINTER]),
        (base, "ggml_flash_attn_ext", _POINTER, [*[_POINTER] * 5, *[ctypes.c_float] * 3]),
        (base, "ggml_flash_attn_ext_set_prec", None, [_POINTER, ctypes.c_int]),
        (base, "ggml_new_graph", _POINTER, [_POINTER]),
        (base, "ggml_build_forward_expand", None, [_POINTER, _POINTER]),
        (cpu, "ggml_graph_plan", _Plan, [_POINTER, ctypes.c_int, _POINTER]),
        (cpu, "ggml_graph_compute", ctypes.c_int, [_POINTER, ctypes.POINTER(_Plan)]),
    )
    for library, name, result, arguments in signatures:
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return base, cpu


def setup_ggml(case: Case, arrays: Arrays, options: Options, threads: int) -> Call:
    """``ggml_flash_attn_ext``, with sums in float32; a mask is one of float16, so it takes no bias."""
    only(options, "causal", "window", "scale", "mask", "block_mask")
    if case.dtype not in _KINDS:
        raise Unsupported(f"takes no query of {case.dtype}")
    base, cpu = _library()
    query, key, value = arrays
    inputs = [query.astype(np.float32), key, value]
    seen = visible(case, options)
    seen = added(case, options) if seen is None else seen[None, None]
    if seen is not None:
        rows = -(-case.q_len // _MASK_ROWS) * _MASK_ROWS
        mask = np.full((*seen.shape[:2], rows, case.kv_len), -np.inf, np.float16)
        mask[..., :case.q_len, :] = np.where(seen, 0, -np.inf)
        inputs.append(mask)
    shape = case.batch, case.q_len, case.q_heads, case.value_dim
    size = sum(x.nbytes for x in inputs) + 4 * prod(shape) + _ROOM
    context = base.ggml_init(_Memory(size, None, False))
    if context is None:
        raise Unsupported(f"gets no {size / 1e9:.0f} GB")
    tensors = []
    for x in inputs:
        tensors.append(base.ggml_new_tensor_4d(context, _KINDS[x.dtype.name], *x.shape[::-1]))
        _view(base, tensors[-1], x.shape, x.dtype)[...] = x
    given = tensors[3] if seen is not None else None
    node = base.ggml_flash_attn_ext(context, *tensors[:3], given, options.get("scale", case.head_dim ** -0.5), 0.0, 0.0)
    base.ggml_flash_attn_ext_set_prec(node, _ACCURATE)
    graph = base.ggml_new_graph(context)
    base.ggml_build_forward_expand(graph, node)
    plan = cpu.ggml_graph_plan(graph, threads, None)
    work = np.empty(max(1, plan.work_size), np.uint8)
    plan.work = work.ctypes.data
    written = _view(base, node, shape, np.dtype(np.float32))

    def call(held: object = work) -> np.ndarray:
        status = cpu.ggml_graph_compute(graph, ctypes.byref(plan))
        if status:
            raise RuntimeError(f"ggml_graph_compute gave {status}")
        return written.swapaxes(1, 2).astype(query.dtype, copy=False)

    weakref.finalize(call, base.ggml_free, context)
    return call


def _view(base: Any, tensor: Any, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """The elements of a tensor, in its own memory."""
    memory = (ctypes.c_uint8 * (prod(shape) * dtype.itemsize)).from_address(base.ggml_get_data(tensor))
    return np.ctypeslib.as_array(memory).view(dtype).reshape(shape)
