"""One-node ONNX models for onnxruntime, run through bound buffers so that no copy is timed."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from attnc._types import Shape
from attnc.bench import Arrays, Call, Json, Unsupported
from attnc.testing import Case

OPSET = 23      # the first with the operator Attention


def _packages() -> tuple[Any, Any]:
    try:
        import onnx
        import onnxruntime
    except ImportError as error:
        raise Unsupported.import_of(error) from error
    if onnx.defs.onnx_opset_version() < OPSET:
        raise Unsupported(f"onnx {onnx.__version__} has no opset {OPSET}")
    return onnx, onnxruntime


def standard(
        case: Case, arrays: Arrays, visible: np.ndarray | None, added: np.ndarray | None, scale: float,
        want: tuple[str, ...], threads: int) -> Call:
    """The model of ai.onnx Attention; `added` is a mask or a bias, weights are its fourth output (mode 3)."""
    names = ["query", "key", "value"]
    attributes = {"scale": scale}
    inputs = dict(zip(names, arrays, strict=True))
    if arrays[0].dtype == np.float64:
        # It takes the root of the scale in float32, which spoils float64: a query scaled beforehand needs none.
        inputs["query"], attributes["scale"] = arrays[0] * scale, 1.0
    # is_causal is top-left, which is only the same triangle for equal lengths.
    if visible is not None and case.q_len == case.kv_len:
        attributes["is_causal"] = 1
    elif visible is not None:
        added = visible
    if added is not None:
        inputs["mask"] = added if added.dtype == bool else added.astype(arrays[0].dtype)
        names.append("mask")
    outputs: dict[str, Shape] = {"output": (case.batch, case.q_heads, case.q_len, arrays[2].shape[-1])}
    produced = ["output"]
    if want:
        attributes["qk_matmul_output_mode"] = 3
        outputs["weights"] = (case.batch, case.q_heads, case.q_len, case.kv_len)
        produced += ["", "", "weights"]
    call = _bind("Attention", "", attributes, names, inputs, produced, outputs, arrays[0].dtype, threads)
    return call if want else lambda: call()[0]


def multi_head(case: Case, arrays: Arrays, visible: np.ndarray | None, scale: float, threads: int) -> Call:
    """The model of com.microsoft MultiHeadAttention."""
    names = ["query", "key", "value"]
    flat = (np.ascontiguousarray(array.swapaxes(1, 2)).reshape(case.batch, array.shape[2], -1) for array in arrays)
    inputs = dict(zip(names, flat, strict=True))
    attributes = {"num_heads": case.q_heads, "scale": scale}
    if visible is not None and case.q_len == case.kv_len:
        attributes["unidirectional"] = 1
    elif visible is not None:
        inputs["bias"] = np.where(visible, 0, -np.inf).astype(arrays[0].dtype)[None, None]
        names += ["", "", "bias"]
    width = case.q_heads * arrays[2].shape[-1]
    call = _bind("MultiHeadAttention", "com.microsoft", attributes, names, inputs, ["output"],
                 {"output": (case.batch, case.q_len, width)}, arrays[0].dtype, threads)
    split = (case.batch, case.q_len, case.q_heads, -1)
    return lambda: call()[0].reshape(split).swapaxes(1, 2)


def node(operator: str, attributes: Json, inputs: dict[str, np.ndarray], shape: Shape, threads: int) -> Call:
    """The call of a model of one standard node with one output."""
    dtype = next(iter(inputs.values())).dtype
    call = _bind(operator, "", attributes, list(inputs), inputs, ["output"], {"output": shape}, dtype, threads)
    return lambda: call()[0]


def _bind(
        operator: str, domain: str, attributes: Json, names: list[str], inputs: dict[str, np.ndarray],
        produced: list[str], outputs: dict[str, Shape], dtype: np.dtype,
        threads: int) -> Callable[[], list[np.ndarray]]:
    """Build, load and bind the model; the call runs it and gives the arrays it wrote."""
    onnx, onnxruntime = _packages()
    helper = onnx.helper
    kinds = {name: helper.np_dtype_to_tensor_dtype(array.dtype) for name, array in inputs.items()}
    kind = helper.np_dtype_to_tensor_dtype(dtype)
    graph = helper.make_graph(
        [helper.make_node(operator, names, produced, domain=domain, **attributes)], "attention",
        [helper.make_tensor_value_info(name, kinds[name], array.shape) for name, array in inputs.items()],
        [helper.make_tensor_value_info(name, kind, shape) for name, shape in outputs.items()])
    opsets = [helper.make_opsetid("", OPSET)] + ([helper.make_opsetid(domain, 1)] if domain else [])
    model = helper.make_model(graph, opset_imports=opsets, ir_version=11)
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = threads
    settings.inter_op_num_threads = 1
    settings.log_severity_level = 4
    try:
        session = onnxruntime.InferenceSession(model.SerializeToString(), settings, ["CPUExecutionProvider"])
    except Exception as error:      # its own exception classes are not public; all mean that it cannot do this case
        raise Unsupported(f"refuses {operator} in {dtype.name}: {str(error).splitlines()[0][:120]}") from error
    binding = session.io_binding()
    written = [np.empty(shape, dtype) for shape in outputs.values()]
    for name, array in inputs.items():
        binding.bind_input(name, "cpu", 0, kinds[name], array.shape, array.ctypes.data)
    for name, array in zip(outputs, written, strict=True):
        binding.bind_output(name, "cpu", 0, kind, array.shape, array.ctypes.data)
    # The binding knows addresses only, so the call holds the inputs too.
    return partial(_run, session, binding, written, list(inputs.values()))


def _run(session: Any, binding: Any, written: list[np.ndarray], held: object) -> list[np.ndarray]:
    session.run_with_iobinding(binding)
    return written
