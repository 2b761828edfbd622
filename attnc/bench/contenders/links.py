"""The contenders of the links of the chain that are functions of their own: softmax and weighted sum."""

import numpy as np

import attnc
from attnc import reference
from attnc.bench import Arrays, Call, Options, Unsupported
from attnc.bench.cases.links import Softmax, WeightedSum
from attnc.bench.contenders import onnxmodels
from attnc.bench.contenders.tensors import from_torch, import_torch, to_torch


def setup_attnc(case: Softmax | WeightedSum, arrays: Arrays, options: Options, threads: int) -> Call:
    """The package itself."""
    if isinstance(case, WeightedSum):
        out = np.empty((case.q_heads, case.q_len, case.value_dim), arrays[0].dtype)
        return lambda: attnc.weighted_sum(*arrays, out=out, num_threads=threads)
    function, out = getattr(attnc, case.function), np.empty_like(arrays[0])
    return lambda: function(arrays[0], case.axis, out=out, num_threads=threads)


def setup_twin(case: Softmax | WeightedSum, arrays: Arrays, options: Options, threads: int) -> Call:
    """The NumPy twin."""
    if isinstance(case, WeightedSum):
        return lambda: reference.weighted_sum(*arrays)
    return lambda: getattr(reference, case.function)(arrays[0], case.axis)


def setup_numpy(case: Softmax | WeightedSum, arrays: Arrays, options: Options, threads: int) -> Call:
    """What one writes with NumPy: in place where that is possible."""
    if isinstance(case, WeightedSum):
        weights, value = arrays
        grouped = weights.reshape(case.kv_heads, -1, case.kv_len)
        out = np.empty((case.kv_heads, grouped.shape[1], case.value_dim), weights.dtype)
        return lambda: np.matmul(grouped, value, out=out).reshape(case.q_heads, case.q_len, -1)
    x, stored = arrays[0], arrays[0].dtype
    work = np.float64 if stored == np.float64 else np.float32
    out = np.empty(x.shape, work)

    def call() -> np.ndarray:
        wide = x.astype(work, copy=False)
        np.subtract(wide, wide.max(case.axis, keepdims=True), out=out)
        if case.function == "log_softmax":
            np.subtract(out, np.log(np.exp(out).sum(case.axis, keepdims=True)), out=out)
        else:
            np.exp(out, out=out)
            np.divide(out, out.sum(case.axis, keepdims=True), out=out)
        return out.astype(stored, copy=False)

    return call


def setup_scipy(case: Softmax | WeightedSum, arrays: Arrays, options: Options, threads: int) -> Call:
    """``scipy.special.softmax`` and ``log_softmax``."""
    try:
        from scipy import special
    except ImportError as error:
        raise Unsupported.import_of(error) from error
    if isinstance(case, WeightedSum) or case.dtype == "bfloat16":
        raise Unsupported("has no such function or dtype")
    return lambda: getattr(special, case.function)(arrays[0], axis=case.axis)


def setup_torch(case: Softmax | WeightedSum, arrays: Arrays, options: Options, threads: int) -> Call:
    """``torch.softmax`` and ``log_softmax`` into a tensor that is there; ``torch.matmul``."""
    torch = import_torch(threads)
    tensors = [to_torch(torch, array) for array in arrays]
    if isinstance(case, WeightedSum):
        weights, value = tensors[0].reshape(case.kv_heads, -1, case.kv_len), tensors[1]
        out = torch.empty((*weights.shape[:2], case.value_dim))
        return lambda: torch.matmul(weights, value, out=out).reshape(case.q_heads, case.q_len, -1).numpy()
    out, function = torch.empty_like(tensors[0]), getattr(torch, case.function)
    return lambda: from_torch(torch, function(tensors[0], case.axis, out=out))


def setup_onnxruntime(case: Softmax | WeightedSum, arrays: Arrays, options: Options, threads: int) -> Call:
    """The operators Softmax and LogSoftmax; MatMul."""
    if isinstance(case, WeightedSum):
        weights, value = arrays
        inputs = {"weights": weights.reshape(case.kv_heads, -1, case.kv_len), "value": value}
        shape = (case.kv_heads, inputs["weights"].shape[1], case.value_dim)
        call = onnxmodels.node("MatMul", {}, inputs, shape, threads)
        return lambda: call().reshape(case.q_heads, case.q_len, -1)
    operator = {"softmax": "Softmax", "log_softmax": "LogSoftmax"}[case.function]
    return onnxmodels.node(operator, {"axis": case.axis}, {"x": arrays[0]}, case.shape, threads)
