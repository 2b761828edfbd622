"""The adapter for PyTorch: kinds of tensors, autocast, where the output lies in memory, numbers that are tensors."""

import itertools

import numpy as np
import pytest

import attnc

pytestmark = [pytest.mark.peers,
              pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning"),    # torch's own, both
              pytest.mark.filterwarnings("ignore:.*quantize", "ignore:ComplexHalf support is experimental")]
torch = pytest.importorskip("torch")
pytest.importorskip("ml_dtypes")

from torch._subclasses import FakeTensorMode  # noqa: E402
from torch.func import grad, jvp, vmap  # noqa: E402
from torch.nn import functional  # noqa: E402

from attnc.integrations import torch as adapter  # noqa: E402

sdpa, theirs = adapter.scaled_dot_product_attention, torch._C._nn.scaled_dot_product_attention
X = torch.randn(2, 4, 5, 8, generator=torch.Generator().manual_seed(0))


# Kinds of tensors

@pytest.mark.parametrize("dtype", [torch.complex32, torch.complex64, torch.complex128], ids=str)
def test_signs_that_are_not_written_yet(dtype):
    x = torch.complex(X.double(), X.double().sin()).to(dtype).conj().imag
    written = x.clone()
    assert x.is_neg() and not written.is_neg()
    assert torch.equal(adapter.as_tensor(adapter.as_array(x)), written)
    for function in (lambda x: sdpa(x, X.to(x.dtype), x),
                     lambda x: vmap(lambda x: sdpa(x, x, x))(x),
                     lambda x: torch.compile(sdpa, backend="aot_eager", fullgraph=True)(x, x, x),
                     lambda x: torch.autograd.grad(sdpa(*[y := x.detach().requires_grad_()] * 3).sin().sum(), y)[0],
                     lambda x: adapter.attention(x, x, x, bias=x[..., :5], sinks=x[0, :, 0, 0])):
        assert torch.equal(function(x), function(written))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_zeros_that_are_not_written_yet(dtype):
    zeros = torch._efficientzerotensor(2, 4, 5, 8, dtype=dtype)
    x = X.to(dtype)
    assert torch.equal(sdpa(zeros, x, x), sdpa(torch.zeros_like(x), x, x))
    assert torch.equal(sdpa(x, x, zeros), torch.zeros_like(x))


@pytest.mark.parametrize("make, words", [
    (lambda: X.to("meta"), "meta"),
    (lambda: FakeTensorMode().from_tensor(X), "tensor subclasses"),
    (lambda: X.to_sparse(), "layout torch.sparse_coo"),
    (lambda: X[0, 0].to_sparse_csr(), "layout torch.sparse_csr"),
    (lambda: X.to_mkldnn(), "layout torch._mkldnn"),
    (lambda: torch.quantize_per_tensor(X, 0.1, 0, torch.qint8), "a quantised tensor"),
    (lambda: X.to(torch.complex64), "dtype torch.complex64"),
    (lambda: X.to(torch.float8_e4m3fn), "dtype torch.float8_e4m3fn"),
], ids=["meta", "fake", "sparse", "CSR", "MKLDNN", "quantised", "complex", "8 bits"])
@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_what_is_no_array(make, words):
    x = make()
    with pytest.raises(ValueError, match=f"attnc takes dense tensors on the CPU, got .*{words}"):
        adapter.as_array(x)
    with pytest.raises(ValueError, match="attnc takes dense tensors on the CPU, got"):
        adapter.attention_weights(x, x)


@pytest.mark.parametrize("transform", [lambda f: vmap(f)(X), lambda f: grad(lambda x: f(x).sum())(X)])
def test_what_is_transformed_is_no_array(transform):
    with pytest.raises(ValueError, match="got one without memory of its own"):
        transform(adapter.as_array)


def test_requires_grad_and_views_are_arrays():
    x = X.clone().requires_grad_()
    for y in (x, x[:, ::2], x[:0], x.expand(3, 2, 4, 5, 8), x.transpose(1, 3), x[:, :, :0], torch.nn.Parameter(X)):
        np.testing.assert_array_equal(adapter.as_array(y), y.detach())


def test_fake_and_subclassed_tensors():
    with FakeTensorMode():
        x = torch.empty(2, 4, 5, 8).transpose(1, 2)
        found = sdpa(x, x, x)
        assert found.shape == x.shape and found.stride() == x.stride()

    class Subclass(torch.Tensor):
        pass

    found = sdpa(X.as_subclass(Subclass), X, X)
    assert type(found) is Subclass and torch.equal(found.as_subclass(torch.Tensor), sdpa(X, X, X))


@pytest.mark.parametrize("shape", [(0, 4, 5, 8), (2, 0, 5, 8), (2, 4, 0, 8), (2, 4, 5, 0), (0, 0), (0, 8)], ids=str)
def test_nothing(shape):
    x = torch.zeros(shape, requires_grad=True)
    for function in (sdpa, torch.compile(sdpa, backend="aot_eager")):
        found = function(x, x, x)
        [gradient] = torch.autograd.grad(found.sum(), x)
        assert found.shape == gradient.shape == x.shape
    assert jvp(lambda x: sdpa(x, x, x), (x,), (x,))[1].shape == x.shape
    assert grad(lambda x: sdpa(x, x, x).sum())(x).shape == x.shape


# autocast

@pytest.mark.parametrize("cast", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("given", [*itertools.product([torch.float32, torch.bfloat16, torch.float16], repeat=3),
                                   [torch.float64] * 3], ids=str)
def test_autocast(given, cast):
    inputs = [x.clone().to(dtype).requires_grad_() for x, dtype in zip((X, X.sin(), X.cos()), given, strict=True)]
    double = torch.float64 in given         # which torch leaves alone
    mask = None if double else torch.zeros(5, 5)
    wanted = sdpa(*(x if double else x.to(cast) for x in inputs), mask)
    with torch.autocast("cpu", dtype=cast):
        assert theirs(*inputs, mask).dtype == wanted.dtype
        with adapter.patch():
            patched = functional.scaled_dot_product_attention(*inputs, mask)
        for got in (sdpa(*inputs, mask), patched, adapter.attention(*inputs, bias=mask)):
            assert got.dtype == wanted.dtype and torch.equal(got, wanted)
            for x, y in zip(*(torch.autograd.grad(z.double().sin().sum(), inputs, retain_graph=True)
                              for z in (got, wanted)), strict=True):
                assert torch.equal(x, y)


def test_autocast_is_left_alone_without_it():
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=False):
        assert sdpa(X, X, X).dtype is torch.float32
        with pytest.raises(TypeError, match="query, key and value must have one dtype"):
            sdpa(X, X.bfloat16(), X)


@pytest.mark.parametrize("transform", [
    lambda f: torch.compile(f, backend="aot_eager", fullgraph=True)(X), lambda f: vmap(f)(X),
    lambda f: jvp(f, (X,), (X,))[1], lambda f: vmap(lambda x: jvp(f, (x,), (x,))[1])(X)])
def test_autocast_under_transforms(transform):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = transform(lambda x: sdpa(x, x, x, is_causal=True))
    wanted = transform(lambda x: sdpa(*[x.bfloat16()] * 3, is_causal=True))
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, wanted, atol=0, rtol=2 ** -7)     # the formula rounds once, of float64


# Where the output lies

def laid_out(order, batch=2, heads=4, length=5, dim=8):
    """A tensor of (batch, heads, length, dim) whose axes lie in memory in an order, by their letters."""
    sizes = {"b": batch, "h": heads, "n": length, "d": dim}
    if order == "packed":
        return torch.randn(batch, length, 3, heads, dim)[:, :, 1].transpose(1, 2)
    if order == "expanded":
        return torch.randn(1, heads, length, dim).expand(batch, -1, -1, -1)
    return torch.randn([sizes[axis] for axis in order]).permute([order.index(axis) for axis in "bhnd"])


ORDERS = ["bhnd", "bnhd", "nbhd", "hbnd", "nhbd", "bhdn", "packed", "expanded"]
KEYS = [{}, {"heads": 1}, {"heads": 2}, {"batch": 1}, {"length": 9}]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("keys", [{"order": order} for order in ("bhnd", "bnhd", "bhdn")] + KEYS, ids=str)
def test_output_lies_as_torchs(order, keys):
    keys = dict(keys)
    of_keys = keys.pop("order", order if order != "expanded" else "bhnd")
    key, value = laid_out(of_keys, **keys), laid_out(of_keys, **keys)
    query, grouped = laid_out(order), keys.get("heads") == 2
    masks = [None, torch.zeros(5, key.shape[2]), torch.zeros(1, 5, key.shape[2]), torch.zeros(2, 1, 5, key.shape[2]),
             torch.zeros(5, key.shape[2], requires_grad=True)]
    for mask, gradients in itertools.product(masks, (False, True)):
        inputs = [x.detach().requires_grad_(gradients) for x in (query, key, value)]
        wanted, got = (f(*inputs, mask, enable_gqa=grouped) for f in (theirs, sdpa))
        assert got.stride() == wanted.stride()
        torch.testing.assert_close(got, wanted)
        if gradients:
            torch.testing.assert_close(*(torch.autograd.grad(x.sin().sum(), inputs) for x in (got, wanted)))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dynamic", [False, True])
def test_output_of_compiled_code_lies_there_too(order, dynamic):
    torch._dynamo.reset()
    compiled = torch.compile(sdpa, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for length in (5, 6, 7):
        inputs = [laid_out(order, length=length) for _ in range(3)]
        wanted, got = sdpa(*inputs), compiled(*inputs)
        assert got.stride() == wanted.stride()
        torch.testing.assert_close(got, wanted)
    assert sdpa(*[x.to("meta") for x in inputs]).stride() == wanted.stride()


def test_usual_views_of_the_output():
    packed, first = torch.randn(2, 5, 3, 4, 8), torch.randn(5, 2, 3, 4, 8)
    with adapter.patch():
        found = functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in packed.unbind(2)))
        assert found.transpose(1, 2).view(2, 5, 32).shape == (2, 5, 32)
        found = functional.scaled_dot_product_attention(*(x.permute(1, 2, 0, 3) for x in first.unbind(2)))
        assert found.permute(2, 0, 1, 3).view(10, 32).shape == (10, 32)
        found = functional.scaled_dot_product_attention(X, X, X)
        assert found.view(8, 5, 8).shape == (8, 5, 8)


def test_other_ranks_and_sizes_lie_as_torchs():
    for x in (X[0], X[0].transpose(0, 1), X[None], X[None].transpose(2, 3), X[0, 0], X[0, 0].T):
        assert sdpa(x, x, x).stride() == theirs(x, x, x).stride()
    query, value = laid_out("bnhd"), laid_out("bnhd", dim=3)
    assert sdpa(query, query, value).stride() == theirs(query, query, value).stride()


# Numbers that are tensors

@pytest.mark.parametrize("name", ["scale", "softcap"])
def test_numbers_that_are_tensors(name):
    def function(x, number):
        return adapter.attention(x, x, x.sin(), **{name: number})

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    for number in (0.3, 0.7):
        x = X.clone().requires_grad_()
        wanted = function(x, number)
        for found in (function(x, torch.tensor(number, dtype=torch.float64)),
                      compiled(x, torch.tensor(number, dtype=torch.float64)), compiled(x, number)):
            torch.testing.assert_close(found, wanted)
            torch.testing.assert_close(*(torch.autograd.grad(y.sum(), x, retain_graph=True) for y in (found, wanted)))
    with pytest.raises(ValueError, match=f"{name} requires grad, but attnc has no gradient for it"):
        function(X, torch.tensor(0.3, requires_grad=True))


def test_scale_as_a_tensor_under_patch():
    scale = torch.tensor(0.3)
    wanted = theirs(X, X, X, scale=0.3)
    with adapter.patch():
        for function in (functional.scaled_dot_product_attention, torch.compile(
                lambda *x, scale: functional.scaled_dot_product_attention(*x, scale=scale), fullgraph=True,
                backend="aot_eager")):
            torch.testing.assert_close(function(X, X, X, scale=scale), wanted)


def test_numbers_of_numpy():
    wanted = attnc.attention(X.numpy(), X.numpy(), X.numpy(), scale=0.3, softcap=2.0, window=(3, 1), causal=True)
    options = {"scale": np.float32(0.3), "softcap": np.float64(2), "window": (np.int64(3), 1), "causal": True}
    x = X.clone().requires_grad_()
    for found in (adapter.attention(x, x, x, **options), vmap(lambda x: adapter.attention(x, x, x, **options))(X)):
        torch.testing.assert_close(found.detach(), torch.from_numpy(wanted), rtol=1e-5, atol=1e-6)
