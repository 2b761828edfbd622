"""The contenders: one ``setup_<name>(case, arrays, options, threads)`` each, giving a call without arguments.

The call returns the output as ``(batch, heads, length, dim)``, or ``(output, weights)`` for a case that wants the
weights. Whatever can be done once (building a model, laying the inputs out as the peer likes them) is done in the
setup and is not timed. A peer that cannot do a case raises `Unsupported` with the reason, which the report prints.
"""

# The order of the report's columns. A contender is named by module and function, so that its process can find it.
CONTENDERS = {
    "attnc": f"{__name__}.attention:setup_attnc",
    "twin": f"{__name__}.attention:setup_twin",
    "numpy": f"{__name__}.attention:setup_numpy",
    "torch": f"{__name__}.attention:setup_torch",
    "torch-flex": f"{__name__}.compilers:setup_torch_flex",
    "onnxruntime": f"{__name__}.attention:setup_onnxruntime",
    "onnxruntime-mha": f"{__name__}.attention:setup_onnxruntime_mha",
    "openvino": f"{__name__}.compilers:setup_openvino",
    "jax": f"{__name__}.compilers:setup_jax",
    "ggml": f"{__name__}.ggml:setup_ggml",
    "scipy": f"{__name__}.attention:setup_scipy",
}
