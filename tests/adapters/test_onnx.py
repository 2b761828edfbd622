"""Conformance to ONNX: the node cases that the installed onnx package generates, and what its cases leave out."""

import doctest
import warnings

import numpy as np
import pytest

import attnc
from attnc import reference

pytestmark = pytest.mark.peers
onnx = pytest.importorskip("onnx")

from onnx.backend.test.case import node as node_tests  # noqa: E402
from onnx.backend.test.runner import Runner  # noqa: E402
from onnx.reference import ReferenceEvaluator  # noqa: E402

from attnc.integrations.onnx import OPERATORS, Attention  # noqa: E402

COUNTS = {"1.23": 93}  # how many Attention cases a release of onnx generates


@pytest.fixture(scope="module")
def node_cases():
    """The node cases of every operator, without those of its expansion into other operators."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cases = node_tests.collect_testcases(None)
    return [case for case in cases if "_expanded" not in case.name]


def failures(cases, compute):
    """What is wrong with a function of case and inputs, by the tolerances of the cases: one line each."""
    wrong = []
    for case in cases:
        for inputs, outputs in case.data_sets:
            try:
                Runner.assert_similar_outputs(outputs, compute(case, inputs), case.rtol, case.atol)
            except Exception as error:
                wrong.append(f"{case.name}: {type(error).__name__} {str(error)[:300]}")
    return wrong


def test_all_attention_cases_pass(node_cases, isa):
    def compute(case, inputs):
        evaluator = ReferenceEvaluator(case.model, new_ops=OPERATORS)
        assert [type(node) for node in evaluator.rt_nodes_] == [Attention]
        return evaluator.run(None, dict(zip(evaluator.input_names, inputs, strict=True)))

    cases = [case for case in node_cases if case.name.startswith("test_attention_")]
    wrong = failures(cases, compute)
    assert not wrong, "\n".join(wrong)
    release = ".".join(onnx.__version__.split(".")[:2])
    assert len(cases) == COUNTS.get(release, len(cases)) >= 60


@pytest.mark.parametrize("operator, function", [("Softmax", attnc.softmax), ("LogSoftmax", attnc.log_softmax)])
def test_all_softmax_cases_pass(operator, function, node_cases, isa):
    def compute(case, inputs):
        axis = next((a.i for a in case.model.graph.node[0].attribute if a.name == "axis"), -1)
        return [function(inputs[0], axis)]

    cases = [case for case in node_cases if [node.op_type for node in case.model.graph.node] == [operator]]
    wrong = failures(cases, compute)
    assert not wrong, "\n".join(wrong)
    assert len(cases) >= 7


def run(inputs, opset=25, outputs=("Y",), new_ops=OPERATORS, **attributes):
    """Evaluate a model of one Attention node; inputs and outputs by the names of the standard, in its order."""
    names = ("Q", "K", "V", "attn_mask", "past_key", "past_value", "nonpad_kv_seqlen")
    given = [name if name in inputs else "" for name in names[:1 + max(names.index(name) for name in inputs)]]
    node = onnx.helper.make_node("Attention", given, outputs, **attributes)
    values = [onnx.helper.make_tensor_value_info(name, onnx.helper.np_dtype_to_tensor_dtype(x.dtype), x.shape)
              for name, x in inputs.items()]
    results = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.UNDEFINED, None) for name in outputs if name]
    graph = onnx.helper.make_graph([node], "one", values, results)
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", opset)])
    return ReferenceEvaluator(model, new_ops=new_ops).run(None, inputs)


def inputs(batch=2, q_heads=4, kv_heads=2, q_len=3, kv_len=6, head_dim=8, value_dim=5, past=0, dtype=np.float64):
    random = np.random.default_rng(0)
    made = {"Q": (q_heads, q_len, head_dim), "K": (kv_heads, kv_len, head_dim), "V": (kv_heads, kv_len, value_dim)}
    if past:
        made |= {"past_key": (kv_heads, past, head_dim), "past_value": (kv_heads, past, value_dim)}
    return {name: random.standard_normal((batch, *shape)).astype(dtype) for name, shape in made.items()}


ALL = ("Y", "present_key", "present_value", "qk_matmul_output")
MASK = np.random.default_rng(1).random((2, 1, 3, 6)) < 0.7
BIAS = np.where(MASK, np.random.default_rng(2).standard_normal(MASK.shape), -np.inf)
MIXTURES = {
    "plain": ({}, {}),
    "causal": ({}, {"is_causal": 1}),
    "bool mask": ({"attn_mask": MASK}, {}),
    "float mask, causal": ({"attn_mask": BIAS}, {"is_causal": 1}),
    "short mask": ({"attn_mask": MASK[..., :4]}, {}),
    "short float mask of rank 1": ({"attn_mask": BIAS[0, 0, 0, :5]}, {}),
    "lengths, causal": ({"nonpad_kv_seqlen": np.array([2, 6])}, {"is_causal": 1}),
    "lengths, window": ({"nonpad_kv_seqlen": np.array([4, 6])}, {"left_window_size": 2, "right_window_size": 1}),
    "window": ({}, {"left_window_size": 1, "right_window_size": 1}),
    "softcap, scale": ({"attn_mask": BIAS}, {"softcap": 0.5, "scale": 0.25}),
    "double precision": ({}, {"softmax_precision": 11}),
}


@pytest.mark.parametrize("mode", range(4))
@pytest.mark.parametrize("name", MIXTURES)
def test_every_output_equals_that_of_the_package_in_float64(name, mode, isa):
    more, attributes = MIXTURES[name]
    made = inputs() | more
    with np.errstate(invalid="ignore"):
        want = run(made, outputs=ALL, new_ops=None, qk_matmul_output_mode=mode, **attributes)
    got = run(made, outputs=ALL, qk_matmul_output_mode=mode, **attributes)
    if mode == 0 and "softcap" in attributes:  # the standard wants it before the cap, the package gives it after
        want[3] = attributes["scale"] * made["Q"] @ made["K"].repeat(2, 1).swapaxes(2, 3)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)  # the package rounds the root of the scale to float32


@pytest.mark.parametrize("causal", [0, 1])
@pytest.mark.parametrize("rank", [3, 4])
def test_past_keys_come_first_and_shift_the_rows(rank, causal, isa):
    made = inputs(past=5)
    shape = {} if rank == 4 else {"q_num_heads": 4, "kv_num_heads": 2}
    given = dict(made)
    if rank == 3:
        given |= {name: made[name].swapaxes(1, 2).reshape(2, made[name].shape[2], -1) for name in "QKV"}
    output, key, value = run(given, outputs=ALL[:3], is_causal=causal, **shape)
    np.testing.assert_array_equal(key, np.concatenate([made["past_key"], made["K"]], 2))
    np.testing.assert_array_equal(value, np.concatenate([made["past_value"], made["V"]], 2))
    want = reference.attention(made["Q"], key, value, causal=bool(causal), q_offset=5)
    if rank == 3:
        want = want.swapaxes(1, 2).reshape(2, 3, -1)
    np.testing.assert_allclose(output, want, rtol=0, atol=1e-12)


def test_double_precision_of_the_softmax_is_computed_in_double():
    made = inputs(dtype=np.float32, kv_len=6)
    made["Q"] *= 30
    weights = run(made, outputs=("Y", "", "", "W"), softmax_precision=11, qk_matmul_output_mode=3)[1]
    assert weights.dtype == np.float32
    exact = reference.attention_weights(made["Q"].astype(np.float64), made["K"])
    np.testing.assert_array_equal(weights, exact.astype(np.float32))
    assert not np.array_equal(weights, attnc.attention_weights(made["Q"], made["K"]))


def test_poison_behind_a_length_changes_no_bit():
    made = inputs(dtype=np.float32) | {"nonpad_kv_seqlen": np.array([2, 5])}
    clean = run(made)[0]
    for batch, length in enumerate((2, 5)):
        made["K"][batch, :, length:] = np.nan
        made["V"][batch, :, length:] = np.inf
    np.testing.assert_array_equal(run(made)[0], clean)


@pytest.mark.parametrize("more, opset, attributes, says", [
    ({}, 23, {"left_window_size": 1}, "left_window_size"),
    ({}, 24, {"right_window_size": 1}, "right_window_size"),
    ({}, 25, {"dropout": 0.5}, "dropout"),
    ({}, 22, {}, "opset 22"),
    ({"nonpad_kv_seqlen": np.array([1, 1])}, 23, {}, "input number 7"),
    ({"past_key": np.ones((2, 2, 1, 8))}, 25, {}, "past_value"),
    ({"past_key": np.ones((2, 2, 1, 8)), "past_value": np.ones((2, 2, 1, 5)), "nonpad_kv_seqlen": np.array([1, 1])},
     25, {}, "nonpad_kv_seqlen"),
    ({"nonpad_kv_seqlen": np.array([1, 7])}, 25, {}, "kv_lengths"),
    ({"attn_mask": np.ones((3, 6), np.int64)}, 25, {}, "attn_mask"),
    ({"attn_mask": np.ones((3, 7), bool)}, 25, {}, "mask"),
    ({}, 25, {"is_causal": 2}, "is_causal"),
    ({}, 25, {"softcap": -1.0}, "softcap"),
    ({}, 25, {"qk_matmul_output_mode": 4}, "qk_matmul_output_mode"),
    ({}, 25, {"softmax_precision": 7}, "softmax_precision"),
    ({}, 25, {"left_window_size": -2}, "left_window_size"),
    ({}, 25, {"q_num_heads": 3, "kv_num_heads": 2}, "q_num_heads"),
    ({"Q": np.ones((2, 3, 32)), "K": np.ones((2, 6, 16)), "V": np.ones((2, 6, 10))}, 25, {}, "q_num_heads"),
    ({"Q": np.ones((3, 32))}, 25, {}, "3 or 4 axes"),
])
def test_what_has_no_meaning_is_refused_by_name(more, opset, attributes, says):
    with pytest.raises(ValueError, match=says):
        run(inputs() | more, opset=opset, **attributes)


# ------------------------------------------------------------------- where ONNX means something else


def test_differs_causal_without_a_cache_is_top_left():
    made = inputs(kv_heads=4)
    np.testing.assert_array_equal(run(made, is_causal=1)[0][:, :, 0], made["V"][:, :, 0])
    np.testing.assert_array_equal(attnc.attention(made["Q"], made["K"], made["V"], causal=True, q_offset=0),
                                  run(made, is_causal=1)[0])
    assert not np.array_equal(attnc.attention(made["Q"], made["K"], made["V"], causal=True), run(made, is_causal=1)[0])


def test_differs_a_mask_may_be_shorter_than_the_keys():
    made = inputs()
    mask = np.ones((3, 4), bool)
    shorter = attnc.attention(made["Q"], made["K"][:, :, :4], made["V"][:, :, :4])
    np.testing.assert_allclose(run(made | {"attn_mask": mask})[0], shorter, rtol=0, atol=1e-14)
    with pytest.raises(ValueError, match="mask"):
        attnc.attention(made["Q"], made["K"], made["V"], mask=mask)


def test_differs_the_first_stage_is_scaled():
    made = inputs()
    product = run(made, outputs=("", "", "", "qk_matmul_output"), scale=0.5)[0]
    for stage, wanted in (("scaled", product), ("raw", product * 2)):
        got = attnc.attention_scores(made["Q"], made["K"], stage=stage, scale=0.5)
        np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-14)


def test_differs_nan_behind_the_mask_leaks_from_the_package():
    made = inputs() | {"attn_mask": np.arange(6) < 5}
    clean = run(made)[0]
    made["V"][:, :, 5] = np.nan
    with np.errstate(invalid="ignore"):
        assert np.isnan(run(made, new_ops=None)[0]).all()
    np.testing.assert_array_equal(run(made)[0], clean)


def test_examples():
    """The example in the module's docstrings, which `make test` skips where onnx is absent."""
    import attnc.integrations.onnx as module

    result = doctest.testmod(module, extraglobs={"np": np})
    assert result.attempted > 0 and result.failed == 0
