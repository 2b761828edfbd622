"""The adapter for PyTorch: torch's own samples, its checkers of operators and gradients, and what is refused."""

import numpy as np
import pytest

import attnc
from attnc.testing import assert_within

pytestmark = pytest.mark.peers
torch = pytest.importorskip("torch")
pytest.importorskip("ml_dtypes")

from torch.nn import functional  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402

from attnc.integrations import torch as adapter  # noqa: E402
from attnc.integrations.torch._operators import ARRAYS  # noqa: E402

sdpa = adapter.scaled_dot_product_attention
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
EMPTY = torch.tensor([[True, False, True], [False, False, False]])


def tensors(q_heads=4, kv_heads=4, q_len=5, kv_len=7, head_dim=8, value_dim=8, batch=(2,), dtype=torch.float64,
            grad=False):
    generator = torch.Generator().manual_seed(0)
    shapes = (q_heads, q_len, head_dim), (kv_heads, kv_len, head_dim), (kv_heads, kv_len, value_dim)
    return [torch.randn(*batch, *shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_(grad)
            for shape in shapes]


def wide(x):
    return x.detach().to(torch.float64).requires_grad_(x.requires_grad) if torch.is_tensor(x) else x


def formula(*arrays, **options):
    """torch's own, in float64, without its fused kernels."""
    with sdpa_kernel(SDPBackend.MATH):
        options = {name: wide(x) if torch.is_tensor(x) and x.dtype != torch.bool else x for name, x in options.items()}
        return functional.scaled_dot_product_attention(*arrays, **options)


def check(arrays, **options):
    """Output and gradients as torch's in float64, within the rounding of torch's in the dtype."""
    exact_inputs = [wide(x) for x in arrays]
    exact, got, honest = formula(*exact_inputs, **options), sdpa(*arrays, **options), None
    assert got.dtype == arrays[0].dtype and got.shape == exact.shape
    with sdpa_kernel(SDPBackend.MATH):
        honest_inputs = [x.detach().clone().requires_grad_(x.requires_grad) for x in arrays]
        honest = functional.scaled_dot_product_attention(*honest_inputs, **options)
    q, k, v = (float(x.detach().abs().max()) if x.numel() else 0 for x in arrays)
    # in float64 theirs is both: what the largest score loses in the exponent is not seen in it
    loud = max(1, q * k * arrays[0].shape[-1] ** 0.5) if got.dtype is torch.float64 else 1
    assert_within(*map(numpy, (got, exact, honest)), scale=loud * v, name="output")
    if arrays[0].requires_grad:
        grad = torch.randn(got.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(got.dtype)
        for output, of in ((got, arrays), (exact, exact_inputs), (honest, honest_inputs)):
            output.backward(grad.to(output.dtype))
            assert all(x.grad.shape == x.shape and x.grad.dtype == x.dtype for x in of)
        for name, ours, true, theirs in zip("qkv", arrays, exact_inputs, honest_inputs, strict=True):
            assert_within(*map(numpy, (ours.grad, true.grad, theirs.grad)), name=f"gradient of {name}",
                          scale=loud * 4 * max(v * got.shape[-1], 1) * max(q, k, 1))


def numpy(x):
    return adapter.as_array(x.detach())


# What torch says it means

def samples(dtype, grad):
    """torch's own samples of the function, without those that have dropout."""
    pytest.importorskip("expecttest")
    from torch.testing._internal.common_methods_invocations import op_db
    [info] = [op for op in op_db if op.name == "nn.functional.scaled_dot_product_attention"]
    assert dtype in info.dtypes
    return list(info.sample_inputs("cpu", dtype, requires_grad=grad))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("grad", [False, True])
def test_torchs_own_samples(isa, dtype, grad):
    with_dropout = 0
    for sample in samples(dtype, grad):
        if sample.kwargs["dropout_p"] > 0:
            with_dropout += 1
            with pytest.raises(ValueError, match=r"attnc has no dropout: dropout_p must be 0, got 0\.5"):
                sdpa(sample.input, *sample.args, **sample.kwargs)
        else:
            check([sample.input, *sample.args], **sample.kwargs)
    assert with_dropout == 12


@pytest.mark.parametrize("sizes, options", [
    ({}, {"is_causal": True}),
    ({"q_len": 9, "kv_len": 3}, {"is_causal": True}),
    ({"kv_heads": 2}, {"enable_gqa": True, "is_causal": True}),
    ({"kv_heads": 1}, {}),
    ({"q_heads": 1}, {}),
    ({"value_dim": 3}, {"scale": -0.4}),
    ({"batch": ()}, {"attn_mask": torch.rand(5, 7, generator=torch.Generator().manual_seed(0)) < 0.7}),
    ({"batch": (2, 3)}, {"attn_mask": torch.rand(3, 1, 5, 7, generator=torch.Generator().manual_seed(0)) < 0.7}),
    ({"q_len": 2, "kv_len": 3}, {"attn_mask": EMPTY}),
    ({"q_len": 2, "kv_len": 3}, {"attn_mask": torch.where(EMPTY, 0.5, -torch.inf)}),
    ({"q_len": 0}, {}),
    ({"batch": (0,)}, {}),
], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_agrees_with_torch(isa, sizes, options, dtype):
    if "attn_mask" in options and options["attn_mask"].is_floating_point():
        options = {"attn_mask": options["attn_mask"].to(dtype)}
    check(tensors(**sizes, dtype=dtype, grad=True), **options)


def test_two_axes_go_with_more(isa):
    query, key, value = tensors(batch=(), q_heads=1, kv_heads=1)
    for arrays in ([query[0], key[0], value[0]], [query[0], key, value], [query, key[0], value[0]]):
        check([x.clone().requires_grad_() for x in arrays])


def test_the_gradient_of_a_mask_that_is_added(isa):
    query, key, value = tensors()
    for shape in ((2, 4, 5, 7), (4, 1, 7), (5, 1)):
        mask = torch.randn(shape, dtype=torch.float64, requires_grad=True)
        sdpa(query, key, value, mask).sin().sum().backward()
        wanted, mask.grad = mask.grad, None
        functional.scaled_dot_product_attention(query, key, value, mask).sin().sum().backward()
        torch.testing.assert_close(wanted, mask.grad)


# Memory

@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_copies(dtype):
    x = tensors(dtype=dtype)[0].transpose(1, 2)
    array = adapter.as_array(x)
    assert array.__array_interface__["data"][0] == x.data_ptr() and array.dtype.name == str(dtype)[6:]
    assert array.strides == tuple(n * x.element_size() for n in x.stride())
    again = adapter.as_tensor(array)
    assert again.data_ptr() == x.data_ptr() and again.dtype == dtype and again.stride() == x.stride()
    assert adapter.as_array("no tensor") == "no tensor"


# Checkers of torch

def run(*inputs):
    query, key, value, bias, sinks = inputs
    found = adapter.attention(query, key, value, bias=bias, sinks=sinks, softcap=2.0, causal=True, window=(4, None),
                              q_lengths=4, want="lse")
    return found.output, torch.where(torch.isinf(found.lse), 0, found.lse)


def differentiable():
    generator = torch.Generator().manual_seed(2)
    return [*tensors(kv_heads=2, value_dim=3, grad=True),
            *(torch.randn(shape, dtype=torch.float64, generator=generator, requires_grad=True)
              for shape in ((4, 5, 1), (4,)))]


def test_gradcheck(isa):
    assert torch.autograd.gradcheck(run, differentiable())


def test_gradcheck_of_the_operator():
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    assert torch.autograd.gradcheck(compiled, differentiable())


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_opcheck(dtype, layout, weights):
    query, key, value = tensors(kv_heads=2, q_heads=4, dtype=dtype, grad=True)
    if layout == "bnhd":
        query, key, value = (x.detach().transpose(1, 2).requires_grad_() for x in (query, key, value))
    bias, sinks = torch.zeros(4, 5, 7, requires_grad=True), torch.zeros(4, requires_grad=True)
    given = {"mask": torch.rand(5, 7) < 0.8, "bias": bias, "sinks": sinks, "kv_lengths": torch.tensor([7, 3])}
    arrays = [given.get(name) for name in ARRAYS]
    for order in (None, (0, 2, 1, 3)) if layout == "bhnd" else (None,):
        arguments = query, key, value, *arrays, True, 3, None, 1, 0.4, None, layout, 2, order, weights
        if order is None or value.shape[-1] == query.shape[-1]:
            torch.library.opcheck(torch.ops.attnc.attention.default, arguments)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(dynamic):
    def layer(x, mask):
        x = torch.stack([x, x * 2, x + 1])
        return functional.relu(sdpa(*x, attn_mask=mask)).sum() + sdpa(*x, is_causal=True).sum()

    compiled = torch.compile(layer, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for length in (5, 9):
        x = torch.randn(2, 4, length, 8, requires_grad=True)
        mask = torch.rand(length, length) < 0.9
        gradients = []
        for function in (compiled, layer):
            value = function(x, mask)
            gradients.append((value, *torch.autograd.grad(value, x)))
        torch.testing.assert_close(*gradients)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")     # torch's own
def test_compile_by_the_default_compiler():
    compiled = torch.compile(lambda x: sdpa(x * 2, x, x, is_causal=True).sin(), fullgraph=True)
    x = torch.randn(2, 4, 5, 8)
    torch.testing.assert_close(compiled(x), sdpa(x * 2, x, x, is_causal=True).sin())


@pytest.mark.filterwarnings("ignore")      # torch.jit is deprecated, and warns of every shape
def test_what_records_or_transforms_sees_an_operator():
    from torch.fx.experimental.proxy_tensor import make_fx
    x = tensors()[0].requires_grad_()
    graph = make_fx(lambda x: sdpa(x, x, x))(x.detach())
    assert "attnc.attention" in graph.code
    traced = torch.jit.trace(lambda x: sdpa(x, x, x), x.detach())
    other = tensors(kv_len=5)[1]
    torch.testing.assert_close(traced(other), sdpa(other, other, other))
    torch.testing.assert_close(graph(other), sdpa(other, other, other))
    assert sdpa(*[x.to("meta")] * 3).shape == x.shape


def test_a_mask_that_was_overwritten_is_noticed():
    x = tensors(grad=True)[0]
    mask = torch.zeros(5, 5)
    output = sdpa(x, x, x, mask)
    mask += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


# All of attnc on tensors

def test_options_and_results(isa):
    query, key, value = tensors(kv_heads=2, dtype=torch.float32)
    options = {"window": (3, 0), "softcap": 3.0, "kv_lengths": torch.tensor([7, 4]), "sinks": [0.0, 1.0, 2.0, -1.0],
               "alibi_slopes": attnc.alibi_slopes(4), "key_mask": torch.arange(7) != 2,
               "q_offset": torch.tensor([2, 1])}
    want = ("weights", "lse", "scores")
    got = adapter.attention(query, key, value, want=want, **options)
    arrays = [x.numpy() for x in (query, key, value)]
    wanted = attnc.attention(*arrays, want=want, **{name: adapter.as_array(x) for name, x in options.items()})
    assert list(vars(got)) == list(vars(wanted))
    for name, x in vars(wanted).items():
        np.testing.assert_array_equal(getattr(got, name).numpy(), x)
    query.requires_grad_()
    graph = adapter.attention(query, key, value, want=("weights", "lse"), **options)
    for name in ("output", "weights", "lse"):
        torch.testing.assert_close(getattr(graph, name), getattr(got, name), rtol=0, atol=0)
    assert graph.output.requires_grad and graph.lse.requires_grad and not graph.weights.requires_grad
    compiled = torch.compile(lambda q: adapter.attention(q, key, value, want="weights", **options).weights,
                             backend="aot_eager")
    torch.testing.assert_close(compiled(query), got.weights, rtol=0, atol=0)


def test_statistics(isa):
    query, key, _ = tensors(kv_heads=2, dtype=torch.bfloat16)
    weights = adapter.attention_weights(query, key, causal=True, key_mask=torch.arange(7) != 2)
    dense = adapter.attention(query, key, key, causal=True, key_mask=torch.arange(7) != 2, want="weights").weights
    np.testing.assert_allclose(weights.key_mass(), dense.double().sum(-2), atol=0.05)
    with pytest.raises(ValueError, match=r"query requires grad.*pass query.detach\(\)"):
        adapter.attention_weights(query.requires_grad_(), key)
    with torch.no_grad():
        assert adapter.attention_weights(query, key).shape == (2, 4, 5, 7)


# What is refused

X = torch.zeros(2, 4, 5, 8)


@pytest.mark.parametrize("error, arguments, words", [
    (ValueError, {"dropout_p": 0.1}, "attnc has no dropout"),
    (ValueError, {"dropout_p": -0.1}, "attnc has no dropout"),
    (ValueError, {"attn_mask": X[..., :5], "is_causal": True}, "attn_mask and is_causal=True were given"),
    (TypeError, {"attn_mask": X[..., :5].int()}, "attn_mask must be bool .* or floating point .* got torch.int32"),
    (TypeError, {"key": X.double()}, "query, key and value must have one dtype"),
    (ValueError, {"key": X[:, :2], "value": X[:, :2]}, "query has 4 heads, key has 2; .* enable_gqa=True"),
    (ValueError, {"attn_mask": torch.zeros(3, 1, 5, 5)}, r"bias has shape \(3, 1, 5, 5\); wanted"),
    (ValueError, {"query": X.to_sparse()}, "query must be a dense tensor .* got layout torch.sparse_coo"),
    (ValueError, {"query": torch.nested.nested_tensor([X[0], X[0]], layout=torch.jagged)},
     "query has 4 axes, of which axis 1 is jagged"),
    (ValueError, {name: X.to(torch.complex64) for name in ("query", "key", "value")}, "dtype torch.complex64"),
    (ValueError, {name: X.to(torch.float8_e4m3fn) for name in ("query", "key", "value")}, "dtype torch.float8_e4m3fn"),
    (TypeError, {name: X.int() for name in ("query", "key", "value")}, "query must be of a floating-point dtype"),
])
def test_refused(error, arguments, words):
    with pytest.raises(error, match=words):
        sdpa(**{"query": X, "key": X, "value": X, **arguments})


@pytest.mark.parametrize("error, arguments, words", [
    (TypeError, {"key": np.zeros((2, 4, 5, 8))}, "key must be a dense tensor .* got ndarray"),
    (TypeError, {"out": X}, "attention on tensors has no option out"),
    (TypeError, {"nothing": X}, "nothing"),
    (ValueError, {"alibi_slopes": torch.zeros(4, requires_grad=True)}, "alibi_slopes requires grad, but attnc has no"),
    (ValueError, {"query": X.clone().requires_grad_(), "want": "scores"}, "want must be out of 'lse' and 'weights'"),
    (ValueError, {"kv_lengths": [9, 9]}, "kv_lengths must be from 0 to 5"),
    (ValueError, {"mask": (torch.zeros(5, 5) < 1).to_sparse()}, "mask must be a dense tensor"),
    (TypeError, {"mask": torch.zeros(5, 5)}, "mask must be bool"),
    (ValueError, {"value": X.to("meta")}, "query is on cpu, value on meta; wanted one device"),
])
def test_refused_by_attention(error, arguments, words):
    with pytest.raises(error, match=words):
        adapter.attention(**{"query": X, "key": X, "value": X, **arguments})


def test_another_device_is_named():
    class Elsewhere(torch.Tensor):
        @property
        def device(self):
            return torch.device("cuda:0")

    with pytest.raises(ValueError, match=r"query must be a dense tensor on the CPU .* got device cuda:0"):
        sdpa(X.as_subclass(Elsewhere), X, X)
