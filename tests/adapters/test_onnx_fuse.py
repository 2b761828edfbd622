"""fuse(): attention of MatMul and Softmax becomes Attention with the same results; what is something else stays."""

import doctest

import numpy as np
import pytest

pytestmark = pytest.mark.peers
onnx = pytest.importorskip("onnx")

from onnx import parser  # noqa: E402
from onnx.reference import ReferenceEvaluator  # noqa: E402

from attnc.integrations import _onnx_fusion  # noqa: E402
from attnc.integrations.onnx import OPERATORS, fuse  # noqa: E402

SHAPES = {"q": (2, 3, 5, 8), "k": (2, 3, 7, 8), "t": (2, 3, 8, 7), "rows": (2, 7, 3, 8), "v": (2, 3, 7, 4),
          "mask": (5, 7), "column": (5, 1), "line": (7,)}
PLAIN = "kt = Transpose <perm = [0, 1, 3, 2]> (k)  s = MatMul (q, kt)"
END = "w = Softmax (s)  y = MatMul (w, v)"
FUSED = {
    "plain": f"{PLAIN} {END}",
    "keys that nothing transposes": f"s = MatMul (q, t) {END}",
    "keys before the heads": f"kt = Transpose <perm = [0, 2, 3, 1]> (rows)  s = MatMul (q, kt) {END}",
    "times a constant": f"{PLAIN.replace('s =', 'p =')} c = Constant <value = float {{0.3}}> ()  s = Mul (c, p) {END}",
    "divided by a constant": f"{PLAIN.replace('s =', 'p =')} c = Constant <value = float[1] {{4.0}}> ()  "
                             f"s = Div (p, c) {END}",
    "a query that is scaled before": "c = Constant <value = float {0.3}> ()  qc = Mul (q, c)  "
                                     f"s = MatMul (qc, t) {END}",
    "a mask": f"{PLAIN.replace('s =', 'p =')} s = Add (p, mask) {END}",
    "a mask and a scale": f"{PLAIN.replace('s =', 'p =')} c = Constant <value = float {{0.3}}> ()  d = Mul (p, c)  "
                          f"s = Add (mask, d) {END}",
    "a softmax of the last axis by name": f"{PLAIN} w = Softmax <axis = 3> (s)  y = MatMul (w, v)",
    "identity and dropout": f"{PLAIN} a = Identity (s)  w = Softmax (a)  b = Identity (w)  d = Dropout (b)  "
                            "y = MatMul (d, v)",
    "weights that are used beside": f"{PLAIN} {END}  weights = Sqrt (w)",
    "scores that are used beside": f"{PLAIN} {END}  scores = Sqrt (s)",
    "two": f"{PLAIN} {END.replace('y =', 'x =')}  s2 = MatMul (x, t2)  w2 = Softmax (s2)  y = MatMul (w2, v)",
}
KEPT = {
    "a softmax over the rows": f"{PLAIN} w = Softmax <axis = 2> (s)  y = MatMul (w, v)",
    "a mask of one key": f"{PLAIN.replace('s =', 'p =')} s = Add (p, column) {END}",
    "a mask of one axis": f"{PLAIN.replace('s =', 'p =')} s = Add (p, line) {END}",
    "a scale after the mask": f"{PLAIN.replace('s =', 'p =')} c = Constant <value = float {{0.3}}> ()  "
                              f"d = Add (p, mask)  s = Mul (d, c) {END}",
    "a scale that divides by scores": f"{PLAIN.replace('s =', 'p =')} c = Constant <value = float {{0.3}}> ()  "
                                      f"s = Div (c, p) {END}",
    "a scale for each row": f"{PLAIN.replace('s =', 'p =')} s = Mul (p, column) {END}",
    "weights on the right": f"{PLAIN} w = Softmax (s)  y = MatMul (q5, w)",
    "no product behind": f"{PLAIN} y = Softmax (s)",
    "no product before": "w = Softmax (t)  y = MatMul (v8, w)",
}
SHAPES |= {"t2": (2, 3, 4, 7), "q5": (2, 3, 4, 5), "v8": (2, 3, 4, 8)}


def model_of(nodes, opset=23):
    """A model of the text of its nodes, whose inputs are those of SHAPES that it names."""
    words = nodes.replace("(", " ").replace(")", " ").replace(",", " ").split()
    inputs = ", ".join(f"float[{','.join(map(str, shape))}] {name}" for name, shape in SHAPES.items() if name in words)
    outputs = ", ".join(f"float[a,b,c,d] {name}" for name in ("y", "weights", "scores") if f"{name} =" in nodes)
    return parser.parse_model(f'<ir_version: 10, opset_import: ["" : {opset}]> one ({inputs}) => ({outputs}) '
                                   f"{{ {nodes} }}")


def run(model, **kwargs):
    random = np.random.default_rng(0)
    given = {name: random.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}
    return ReferenceEvaluator(model, **kwargs).run(None, {x.name: given[x.name] for x in model.graph.input})


def kinds(model):
    return [node.op_type for node in model.graph.node]


@pytest.mark.parametrize("weights", (False, True))
@pytest.mark.parametrize("name", FUSED)
def test_attention_is_found_and_gives_the_same(name, weights):
    model = model_of(FUSED[name])
    before = model.SerializeToString()
    fused = fuse(model, weights=weights)
    onnx.checker.check_model(fused, full_check=True)
    assert model.SerializeToString() == before
    count = kinds(model).count("Softmax")
    assert kinds(fused).count("Attention") == count and "Softmax" not in kinds(fused)
    assert kinds(fused).count("MatMul") == ("scores" in name and 1)
    expected, found = run(model), run(fused, new_ops=OPERATORS)
    with np.errstate(invalid="ignore"):
        for a, b in zip(expected, found, strict=False):
            np.testing.assert_allclose(b, a, rtol=0, atol=2e-6)
    assert len(found) == len(expected) + weights * count
    if weights:
        np.testing.assert_allclose(found[-1].sum(-1), 1, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", KEPT)
def test_what_is_something_else_stays(name):
    with pytest.raises(ValueError, match="no attention of MatMul"):
        fuse(model_of(KEPT[name]))
    both = model_of(f"{KEPT[name].replace('y =', 'other =')}  e = Softmax (t)  scores = Identity (other)  "
                    "s9 = MatMul (q, t)  w9 = Softmax (s9)  y = MatMul (w9, v)")
    assert sorted(kinds(fuse(both))) == sorted([*kinds(both)[:-3], "Transpose", "Attention"])


def test_an_older_model_is_converted():
    model = model_of(FUSED["plain"], opset=11)
    model.graph.node[2].attribute.append(onnx.helper.make_attribute("axis", 3))
    fused = fuse(model)
    assert [x.version for x in fused.opset_import] == [23] and kinds(fused) == ["Attention"]
    np.testing.assert_allclose(run(fused, new_ops=OPERATORS)[0], run(model_of(FUSED["plain"]))[0], rtol=0, atol=2e-6)


def test_onnxruntime_runs_it_too():
    runtime = pytest.importorskip("onnxruntime")
    random = np.random.default_rng(0)
    given = {name: random.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}
    model = model_of(FUSED["a mask and a scale"])
    results = [runtime.InferenceSession(x.SerializeToString(), providers=["CPUExecutionProvider"]).run(
        ["y"], {x.name: given[x.name] for x in model.graph.input})[0] for x in (model, fuse(model))]
    np.testing.assert_allclose(*results, rtol=0, atol=2e-6)


def test_what_is_no_model_is_refused():
    with pytest.raises(TypeError, match=r"must be an onnx\.ModelProto, got str"):
        fuse("model.onnx")


def test_the_example_runs():
    assert doctest.testmod(_onnx_fusion) == (0, 3)
