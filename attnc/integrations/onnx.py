"""ONNX: the `Attention` operator of `onnx.reference.ReferenceEvaluator` by attnc, and `fuse`, which inserts it."""

from __future__ import annotations

from typing import Any

import numpy as np

from .._types import Stage

try:
    import onnx
    from onnx.reference.op_run import OpRun
except ModuleNotFoundError as error:
    if error.name != "onnx":
        raise
    raise ImportError("attnc.integrations.onnx needs the package 'onnx', which is not installed") from error

from ..attention import attention, attention_scores
from ._onnx_fusion import fuse

__all__ = ["OPERATORS", "Attention", "fuse"]

VERSIONS = (23, 24, 25)  # opsets that changed Attention; a model of a later opset uses the last of these
SCALED, CAPPED, MASKED, WEIGHTS = range(4)  # values of qk_matmul_output_mode
DOUBLE = 11
PRECISIONS = (1, 10, DOUBLE, 16)  # float, float16, double, bfloat16
_WANT: dict[int | None, Any] = {MASKED: "scores", WEIGHTS: "weights"}


class Attention(OpRun):    # type: ignore[misc]    # onnx is Any to mypy
    """`Attention` of opset 23, 24 and 25 (nonpad_kv_seqlen from 24, windows from 25), chosen by the model's opset.

    Accepts float32, float64, float16 and bfloat16. Computes in float32, or in float64 if an input or
    `softmax_precision` is double, never with less precision than requested. A key that a row may not see never changes
    the result, not even if it is NaN.

    Raises
    ------
    ValueError
        For attributes that the model's opset does not have or whose value is invalid, naming them; for integer masks;
        for shapes that do not fit. (Not TypeError, whose text the evaluator hides.)

    Examples
    --------
    >>> import numpy as np
    >>> import onnx.parser
    >>> from onnx.reference import ReferenceEvaluator
    >>> model = onnx.parser.parse_model('''
    ...     <ir_version: 10, opset_import: ["" : 23]>
    ...     one (float[1,1,1,2] q, float[1,1,2,2] k, float[1,1,2,1] v) => (float[1,1,1,1] y) { y = Attention (q, k, v) }
    ... ''')
    >>> evaluator = ReferenceEvaluator(model, new_ops=OPERATORS)
    >>> one = np.ones((1, 1, 2, 2), np.float32)
    >>> evaluator.run(None, {"q": one[:, :, :1], "k": one, "v": np.float32([[[[1], [3]]]])})[0].ravel()
    array([2.], dtype=float32)
    """

    op_domain = ""

    def __init__(self, onnx_node: onnx.NodeProto, run_params: dict[str, Any], schema: Any = None):
        opset = run_params["opsets"][""]
        schema = onnx.defs.get_schema("Attention", opset) if opset >= VERSIONS[0] else None
        if schema is None or schema.since_version not in VERSIONS:
            raise ValueError(f"Attention of opset {opset} is not supported, only its versions {VERSIONS}")
        unknown = [a.name for a in onnx_node.attribute if a.name not in schema.attributes]
        if unknown:
            raise ValueError(f"Attention of opset {opset} has no attribute {', '.join(unknown)}")
        if len(onnx_node.input) > len(schema.inputs):
            raise ValueError(f"Attention of opset {opset} has no input number {len(onnx_node.input)}")
        super().__init__(onnx_node, run_params, schema)

    def _run(self, query: np.ndarray, key: np.ndarray, value: np.ndarray, attn_mask: np.ndarray | None = None,
             past_key: np.ndarray | None = None, past_value: np.ndarray | None = None,
             nonpad_kv_seqlen: np.ndarray | None = None, *, scale: float | None = None, is_causal: int = 0,
             q_num_heads: int | None = None, kv_num_heads: int | None = None, softmax_precision: int | None = None,
             softcap: float = 0.0, qk_matmul_output_mode: int = 0, left_window_size: int = -1,
             right_window_size: int = -1) -> tuple[np.ndarray, ...]:
        for name, x, meaningful in (
                ("is_causal", is_causal, (0, 1)), ("qk_matmul_output_mode", qk_matmul_output_mode, range(4)),
                ("softmax_precision", softmax_precision, (None, *PRECISIONS)),
                ("left_window_size", left_window_size, range(-1, 2**63)),
                ("right_window_size", right_window_size, range(-1, 2**63))):
            if x not in meaningful:
                raise ValueError(f"{name} of Attention is {x}, which has no meaning")
        if (past_key is None) != (past_value is None):
            raise ValueError("past_key and past_value of Attention go together")
        if past_key is not None and nonpad_kv_seqlen is not None:
            raise ValueError("nonpad_kv_seqlen of Attention cannot be combined with past_key and past_value")

        dtype, packed = query.dtype, query.ndim == 3
        query = _split_heads("Q", query, "q_num_heads", q_num_heads)
        key, value = (_split_heads(name, x, "kv_num_heads", kv_num_heads) for name, x in (("K", key), ("V", value)))
        offset: int | np.ndarray = 0  # position of the first row: the number of earlier keys
        if past_key is not None and past_value is not None:
            key, value = (np.concatenate(pair, axis=2) for pair in ((past_key, key), (past_value, value)))
            offset = past_key.shape[2]
        elif nonpad_kv_seqlen is not None:
            offset = nonpad_kv_seqlen - query.shape[2]
        present = key, value
        if softmax_precision == DOUBLE:
            query = query.astype(np.float64)  # one float64 input makes all computation float64

        mode = qk_matmul_output_mode if len(self.output) > 3 and self.output[3] else None
        product: dict[str, Any] = {"scale": None if scale is None else float(scale), "softcap": float(softcap) or None}
        left, right = (None if n < 0 else n for n in (left_window_size, right_window_size))
        result = attention(
            query, key, value, **product, **_mask_or_bias(attn_mask, key.shape[2]), causal=bool(is_causal),
            window=(left, right), q_offset=offset, kv_lengths=nonpad_kv_seqlen, want=_WANT.get(mode, ()))
        output = getattr(result, "output", result)
        if packed:
            output = output.swapaxes(1, 2).reshape(output.shape[0], output.shape[2], output.shape[1] * output.shape[3])
        outputs = [output.astype(dtype, copy=False), *present]
        if mode is not None:
            if mode in (SCALED, CAPPED):
                stage: Stage = "capped" if mode == CAPPED else "scaled"
                middle = attention_scores(query, key, stage=stage, **product)
            else:
                middle = result.scores if mode == MASKED else result.weights
            with np.errstate(over="ignore"):  # scores may exceed the range of float16
                outputs.append(middle.astype(dtype, copy=False))
        return tuple(outputs)


OPERATORS = [Attention]


def _split_heads(name: str, x: np.ndarray, attribute: str, heads: int | None) -> np.ndarray:
    """(batch, heads, length, dim) from 4-D input unchanged, or from 3-D (batch, length, heads * dim) as a view."""
    if x.ndim == 4:
        if heads is not None and heads != x.shape[1]:
            raise ValueError(f"{attribute} of Attention is {heads}, but {name} has {x.shape[1]} heads")
        return x
    if x.ndim != 3:
        raise ValueError(f"{name} of Attention must have 3 or 4 axes, got shape {x.shape}")
    if not heads or heads < 0 or x.shape[2] % heads:
        raise ValueError(f"{attribute} of Attention must divide the last axis of {name} {x.shape}, got {heads}")
    return x.reshape(*x.shape[:2], heads, x.shape[2] // heads).swapaxes(1, 2)


def _mask_or_bias(attn_mask: np.ndarray | None, kv_len: int) -> dict[str, Any]:
    """The option for `attn_mask`; a shorter mask excludes the keys that it does not cover."""
    if attn_mask is None:
        return {}
    if attn_mask.dtype.kind in "iu":
        raise ValueError(f"attn_mask of Attention must be bool (True = attend) or float (added), got {attn_mask.dtype}")
    boolean = attn_mask.dtype == bool
    if attn_mask.ndim and attn_mask.shape[-1] < kv_len:
        whole = np.full((*attn_mask.shape[:-1], kv_len), False if boolean else -np.inf, attn_mask.dtype)
        whole[..., :attn_mask.shape[-1]] = attn_mask
        attn_mask = whole
    return {"mask" if boolean else "bias": attn_mask}
