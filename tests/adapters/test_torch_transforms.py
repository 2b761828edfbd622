"""The adapter for PyTorch under torch.func, forward mode, vmap and second derivatives: as torch's own, or a loop."""

import pytest

import attnc

pytestmark = [pytest.mark.peers,
              pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning"),    # torch's own, both
              pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")]
torch = pytest.importorskip("torch")
pytest.importorskip("ml_dtypes")

from torch.autograd import forward_ad  # noqa: E402
from torch.func import grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402

from attnc.integrations import torch as adapter  # noqa: E402
from attnc.integrations.torch import _formula  # noqa: E402
from attnc.integrations.torch._operators import INPUTS, arguments  # noqa: E402

sdpa = adapter.scaled_dot_product_attention


def theirs(*args, **options):
    with sdpa_kernel(SDPBackend.MATH):
        return functional.scaled_dot_product_attention(*args, **options)


def random(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=dtype)


def same(got, wanted):
    torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-11)


QKV = [random(2, 4, 5, 8, seed=i) for i in range(3)]
TANGENTS = [random(2, 4, 5, 8, seed=i) for i in range(3, 6)]
SMALL = [x[:1, :1, :2, :3] for x in QKV]
BIAS = random(4, 5, 5)


def loss(attend):
    return lambda *args: attend(*args).sin().sum()


def duals(attend):
    with forward_ad.dual_level():
        return [*forward_ad.unpack_dual(attend(*map(forward_ad.make_dual, QKV, TANGENTS)))]


def duals_through_the_gradient(attend):
    inputs = [x.clone().requires_grad_() for x in QKV]
    before = attend(*inputs)
    with forward_ad.dual_level():
        grads = torch.autograd.grad(before, inputs, forward_ad.make_dual(*TANGENTS[:2]))
        inputs = [forward_ad.make_dual(x, t) for x, t in zip(inputs, TANGENTS, strict=True)]
        grads += torch.autograd.grad(loss(attend)(*inputs), inputs)
        return [tuple(forward_ad.unpack_dual(x)) for x in grads]


def second_derivatives(attend):
    inputs = [x.clone().requires_grad_() for x in (*QKV, BIAS)]
    first = torch.autograd.grad(loss(attend)(*inputs), inputs, create_graph=True)
    return first, torch.autograd.grad(sum(x.sin().sum() for x in first), inputs)


def batched_gradients(attend):
    inputs = [x.clone().requires_grad_() for x in QKV]
    return torch.autograd.grad(attend(*inputs), inputs, torch.stack(TANGENTS), is_grads_batched=True)


def third_derivative(attend):
    once = grad(lambda q: loss(attend)(q, *SMALL[1:]))
    twice = grad(lambda q: once(q).sin().sum())
    return grad(lambda q: twice(q).sin().sum())(SMALL[0])


def compiled(function, fullgraph=True):
    torch._dynamo.reset()
    return torch.compile(function, backend="aot_eager", fullgraph=fullgraph)


ALL = (0, 1, 2)
TRANSFORMS = {
    "grad": lambda f: grad(loss(f), ALL)(*QKV),
    "grad of the mask": lambda f: grad(loss(f), 3)(*QKV, BIAS),
    "vjp": lambda f: vjp(f, *QKV)[1](TANGENTS[0]),
    "jvp": lambda f: jvp(f, tuple(QKV), tuple(TANGENTS)),
    "jvp of the mask": lambda f: jvp(lambda mask: f(*QKV, mask), (BIAS,), (BIAS.cos(),)),
    "linearize": lambda f: linearize(f, *QKV)[1](*TANGENTS),
    "jacfwd": lambda f: jacfwd(f, ALL)(*SMALL),
    "jacrev": lambda f: jacrev(f, ALL)(*SMALL),
    "hessian": lambda f: hessian(loss(f), ALL)(*SMALL),
    "reverse over reverse": lambda f: jacrev(jacrev(loss(f), ALL), ALL)(*SMALL),
    "forward over forward": lambda f: jacfwd(jacfwd(loss(f), ALL), ALL)(*SMALL),
    "reverse over forward": lambda f: jacrev(jacfwd(loss(f), ALL), ALL)(*SMALL),
    "third": third_derivative,
    "duals": duals,
    "duals through the gradient": duals_through_the_gradient,
    "second derivatives": second_derivatives,
    "is_grads_batched": batched_gradients,
    "functional.hessian": lambda f: torch.autograd.functional.hessian(loss(f), tuple(SMALL)),
    "vectorized": lambda f: torch.autograd.functional.jacobian(f, tuple(SMALL), vectorize=True),
    "vectorized forward": lambda f: torch.autograd.functional.jacobian(
        f, tuple(SMALL), vectorize=True, strategy="forward-mode"),
    "compiled grad": lambda f: compiled(grad(loss(f), ALL))(*QKV),
    "compiled jvp": lambda f: compiled(lambda *args: jvp(f, args, tuple(TANGENTS)))(*QKV),
    "compiled vmap of grad": lambda f: compiled(vmap(grad(loss(f), ALL)))(*QKV),
    "jvp of compiled": lambda f: jvp(compiled(f, fullgraph=False), tuple(QKV), tuple(TANGENTS)),
    "grad of compiled": lambda f: grad(compiled(loss(f), fullgraph=False), ALL)(*QKV),
    "duals of compiled": lambda f: duals(compiled(f)),
}


@pytest.mark.parametrize("patched", [False, True], ids=["function", "patch"])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_as_torchs(transform, patched):
    wanted = TRANSFORMS[transform](theirs)
    if patched:
        with adapter.patch():
            got = TRANSFORMS[transform](lambda *args, **options: functional.scaled_dot_product_attention(
                *args, **options))
    else:
        got = TRANSFORMS[transform](sdpa)
    same(got, wanted)


@pytest.mark.parametrize("transform", ["grad", "vjp", "jacrev", "compiled vmap of grad", "is_grads_batched"])
def test_first_gradients_are_those_of_the_kernels(transform, monkeypatch):
    wanted = TRANSFORMS[transform](theirs)
    for name in ("attention", "attention_backward"):
        monkeypatch.setattr(_formula, name, None)
    same(TRANSFORMS[transform](sdpa), wanted)


# vmap

MAPPED = [random(3, 2, 4, 5, 8, seed=i) for i in range(3)]


@pytest.mark.parametrize("in_dims", [(0, 0, 0), (0, None, None), (None, 0, 0), (None, None, 0), (1, 2, 3),
                                     (-1, None, 0)], ids=str)
@pytest.mark.parametrize("two_d", [False, True], ids=["", "2-D"])
def test_vmap_as_torchs(in_dims, two_d):
    if two_d:
        inputs = [x[:, 0, 0] for x in MAPPED]
        in_dims = tuple(None if d is None else min(d, 2) for d in in_dims)
    else:
        inputs = MAPPED
    inputs = [x[0] if d is None else x.movedim(0, d) for x, d in zip(inputs, in_dims, strict=True)]
    for transform in (
        lambda f: vmap(f, in_dims)(*inputs),
        lambda f: vmap(grad(loss(f), ALL), in_dims)(*inputs),
        lambda f: grad(lambda *args: vmap(f, in_dims)(*args).sin().sum(), ALL)(*inputs),
        lambda f: vmap(lambda *args: jvp(grad(loss(f)), args, tuple(x * 2 for x in args)), in_dims)(*inputs),
    ):
        same(transform(sdpa), transform(theirs))


def test_nested_vmap():
    def transform(f):
        return vmap(vmap(f, (0, None, 0)), (1, 0, None))(MAPPED[0], MAPPED[1][:2], MAPPED[2])

    same(transform(sdpa), transform(theirs))


def test_vmap_over_heads():
    def transform(f):
        return vmap(f, 1, 1)(*QKV)

    same(transform(sdpa), transform(theirs))


SEGMENTS = torch.tensor([[0, 0, 1, 1, -1, 1, 0], [1, 1, 0, 1, 0, 0, -1]])
# Each for one example of queries (2, 4, 5, 8), keys (2, 2, 7, 8) and values (2, 2, 7, 3); those marked True are mapped
# too, with another value in each of three examples.
OPTIONS = {
    "plain": {},
    "mask": {"mask": random(2, 4, 5, 7) < 0.5},
    "mask of keys": {"mask": random(7) < 0.5, "causal": True},
    "key_mask": {"key_mask": random(2, 7) < 0.5},
    "bias": {"bias": random(4, 5, 1)},
    "forbidding bias": {"bias": torch.where(random(5, 7) < 0.8, random(5, 7), -torch.inf), "softcap": 2.0},
    "relative bias": {"relative_bias": random(4, 11), "softcap": 2.0},
    "two biases": {"relative_bias": torch.where(random(2, 1, 11) < 0.8, random(2, 1, 11), -torch.inf),
                   "bias": random(4, 5, 1)},
    "tables": {"relative_index": torch.arange(11) // 3, "relative_key": random(4, 4, 8) / 2,
               "relative_query": random(2, 1, 4, 8) / 2, "softcap": 3.0},
    "a table": {"relative_index": torch.arange(11).flip(0), "relative_key": random(1, 12, 8), "causal": True},
    "no keys": {"bias": torch.where(torch.arange(5)[:, None] == 2, -torch.inf, random(5, 7))},
    "causal": {"causal": True, "q_offset": torch.tensor([-2, 1])},
    "window": {"window": (2, 1), "scale": -0.3},
    "alibi": {"alibi_slopes": attnc.alibi_slopes(4), "softcap": 1.5},
    "alibi of each": {"alibi_slopes": random(2, 4).abs()},
    "sinks": {"sinks": random(4), "causal": True, "q_offset": -2},
    "no sink": {"sinks": torch.tensor([0.0, -torch.inf, 1.0, 2.0], dtype=torch.float64),
                "kv_lengths": torch.tensor([7, 0])},
    "lists": {"key_indices": torch.arange(40).reshape(2, 1, 5, 4) % 8 - 1, "causal": True},
    "lists of key heads": {"key_indices": torch.arange(30).reshape(2, 5, 3) % 7, "softcap": 2.0},
    "positions": {"k_positions": torch.arange(28).reshape(2, 2, 7).flip(-1), "causal": True, "window": (9, None),
                  "q_offset": torch.tensor([3, 22])},
    "segments": {"q_segments": SEGMENTS[:, :5], "k_segments": SEGMENTS},
    "lengths": {"q_lengths": torch.tensor([5, 2]), "kv_lengths": torch.tensor([3, 0]), "sinks": random(4)},
    "one length": {"kv_lengths": torch.tensor(4)},
    "scale": {"scale": torch.tensor(0.4), "softcap": torch.tensor(1.2)},
}


LEARNT = ("bias", "relative_bias", "relative_key", "relative_query", "sinks")


def operands(layout="bhnd", *lead, grad=False):
    found = [random(*lead, 2, *shape, seed=i) for i, shape in enumerate(((4, 5, 8), (2, 7, 8), (2, 7, 3)))]
    found = [x.transpose(-2, -3) if layout == "bnhd" else x for x in found]
    return [x.requires_grad_() for x in found] if grad else found


def differentiable(options):
    """Query, key, value, and the options that have a gradient."""
    given = {**dict(zip(("query", "key", "value"), operands(options.get("layout", "bhnd")), strict=True)), **options}
    return {name: x for name, x in given.items() if name in ("query", "key", "value", *LEARNT)}


def finite(found):
    return found.output, torch.where(found.lse.isfinite(), found.lse, 0.0)


@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_formula_is_what_the_kernels_mean(isa, options, layout):
    options = {**options, "layout": layout}
    args = [*operands(layout), *arguments(options)]
    wanted = torch.ops.attnc.attention.default(*args, True)
    got = _formula.attention(*args, True)
    same(got, wanted)
    grads = random(*wanted[0].shape), random(*wanted[1].shape)
    want = " ".join(differentiable(options))
    given = [*grads, *args[:3], *wanted[:2], *args[3:], want]
    same(_formula.attention_backward(*given), torch.ops.attnc.attention_backward.default(*given))


@pytest.mark.parametrize("hidden", ["key", "value"])
def test_formula_keeps_what_is_masked_apart(hidden):
    query, key, value = operands()
    {"key": key, "value": value}[hidden][:, :, 4:, 1] = torch.nan
    query[1, :, 0] = torch.nan
    mask = torch.arange(7) < 4 + (torch.arange(5) == 3)[:, None]        # row 3 sees one of them
    args = [query, key, value, *arguments({"mask": mask})]
    (output, lse, _), wanted = _formula.attention(*args, False), torch.ops.attnc.attention.default(*args, False)
    broken = torch.zeros(2, 4, 5, dtype=bool)
    broken[:, :, 3], broken[1, :, 0] = True, True
    assert torch.equal(output.isnan().all(-1), broken) and torch.equal(output.isnan().any(-1), broken)
    same(output[~broken], wanted[0][~broken])
    same(lse[~broken], wanted[1][~broken])
    grads = _formula.attention_backward(torch.ones_like(output), None, *args[:3], output, lse, *args[3:], "key value")
    assert all(x[:, :, 5:].count_nonzero() == 0 for x in grads)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_derivatives_of_all_orders(options):
    names, inputs = zip(*differentiable(options).items(), strict=True)
    # as small as it can be: the numerical derivatives take a call for each element
    small = ("query", "key", "value", "relative_key", "relative_query")
    inputs = [x[..., :2] if name in small else x for name, x in zip(names, inputs, strict=True)]
    inputs = [torch.where(x.isfinite(), x, -1.0).requires_grad_() for x in inputs]
    empty = {name: ~torch.isfinite(x) for name, x in options.items() if name in LEARNT and name not in small}

    def function(*inputs):
        given = dict(zip(names, inputs, strict=True))
        for name, where in empty.items():
            given[name] = torch.where(where, -torch.inf, given[name])
        return finite(adapter.attention(**{**options, **given}, want="lse"))

    assert torch.autograd.gradcheck(function, inputs, check_forward_ad=True, check_batched_grad=True,
                                    check_batched_forward_grad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, inputs, check_fwd_over_rev=True, check_batched_grad=True,
                                        fast_mode=True)


def mapped_options(options, size):
    """The tensors of options for `size` examples, in the last axis; what is the same for all."""
    found, shared = {}, {}
    for name, x in options.items():
        if torch.is_tensor(x) and name not in ("scale", "softcap", "relative_index"):
            shifts = [x if i == 0 else x.flip(-1) if x.ndim else (x - i) for i in range(size)]
            found[name] = torch.stack(shifts, -1)
        else:
            shared[name] = x
    return found, shared


@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
@pytest.mark.parametrize("options, mapped", [
    pytest.param(options, mapped, id=f"{name}-{mapped}") for name, options in OPTIONS.items()
    for mapped in ("all", "operands", "options") if mapped != "options" or (
        name != "scale" and any(map(torch.is_tensor, options.values())))])
def test_vmap_as_a_loop(isa, options, layout, mapped):
    size = 3
    many, shared = mapped_options(options, size)
    if mapped == "operands":
        many, shared = {}, options
    inputs = operands(layout, *([] if mapped == "options" else [size]))
    names = list(many)

    def gradients_and_results(query, key, value, *tensors):
        given = dict(zip(names, tensors, strict=True))

        def total(wanted):
            found = adapter.attention(**{"query": query, "key": key, "value": value, **shared, **given, **wanted},
                                      layout=layout, want=("lse", "weights"))
            output, lse = finite(found)
            return (output.sin().sum() + lse.cos().sum()), (found.output, found.lse, found.weights)

        of = {"query": query, "key": key, "value": value,
              **{name: x for name, x in {**shared, **given}.items() if name in LEARNT}}
        return grad(total, has_aux=True)(of)

    tensors = list(many.values())
    dims = (*[None if mapped == "options" else 0] * 3, *[-1] * len(tensors))
    got = vmap(gradients_and_results, dims)(*inputs, *tensors)
    loop = [gradients_and_results(*(x if mapped == "options" else x[i] for x in inputs), *(x[..., i] for x in tensors))
            for i in range(size)]
    wanted = torch.utils._pytree.tree_map(lambda *x: torch.stack(x), *loop)
    same(got, wanted)


def test_a_vmap_is_one_call(monkeypatch):
    calls = []
    for name in ("attention", "attention_backward"):
        function = getattr(attnc, name)
        monkeypatch.setattr(attnc, name, lambda *a, name=name, f=function, **k: calls.append(name) or f(*a, **k))
    vmap(vmap(grad(loss(sdpa), ALL)))(*MAPPED)
    assert calls == ["attention", "attention_backward"]
    inputs = [x.clone().requires_grad_() for x in QKV]
    output = sdpa(*inputs)
    calls.clear()
    torch.autograd.grad(output, inputs, torch.stack(TANGENTS), is_grads_batched=True)
    assert calls == ["attention_backward"]


@pytest.mark.filterwarnings("ignore:There is a performance drop")       # torch's own attention
def test_per_sample_gradients_of_a_layer():
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, dtype=torch.float64)
    parameters, x = dict(layer.named_parameters()), random(3, 5, 8)

    def gradients():
        return vmap(grad(lambda p, x: torch.func.functional_call(layer, p, (x[None],)).sin().sum()),
                    (None, 0))(parameters, x)

    wanted = gradients()
    with adapter.patch():
        same(gradients(), wanted)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint(reentrant):
    from torch.utils.checkpoint import checkpoint
    grads = []
    for attend in (lambda *x: checkpoint(sdpa, *x, use_reentrant=reentrant), sdpa):
        inputs = [x.clone().requires_grad_() for x in QKV]
        loss(attend)(*inputs).backward()
        grads.append([x.grad for x in inputs])
    same(*grads)


def test_an_ensemble():
    layers = [torch.nn.MultiheadAttention(8, 2, batch_first=True, dtype=torch.float64) for _ in range(3)]
    parameters, buffers = torch.func.stack_module_state(layers)
    x = random(2, 5, 8)

    def call(parameters, buffers):
        return torch.func.functional_call(layers[0], (parameters, buffers), (x, x, x), {"need_weights": False})[0]

    with adapter.patch():
        found = vmap(call)(parameters, buffers)
    same(found, torch.stack([layer(x, x, x, need_weights=False)[0] for layer in layers]))


@pytest.mark.parametrize("sinks", [None, torch.full((4,), -torch.inf)], ids=["", "sinks"])
def test_far_scores_in_forward_mode(sinks):
    """Weights sum to 1, so that values which all grow by 1 move the output by 1; exp(score - lse) would not do it."""
    query, key, value = (x.float() for x in QKV)
    query, key = 1e6 * query, key[..., :1, :].expand(key.shape)

    def function(value):
        return adapter.attention(query, key, value, sinks=sinks)

    tangent = jvp(function, (value,), (torch.ones_like(value),))[1]
    torch.testing.assert_close(tangent, torch.ones_like(tangent), rtol=0, atol=1e-6)


def test_graphs_of_gradients_have_the_operators():
    from torch.fx.experimental.proxy_tensor import make_fx
    code = make_fx(grad(loss(sdpa)))(*QKV).code
    assert "attnc.attention.default" in code and "attnc.attention_backward.default" in code


def test_inference_mode():
    with torch.inference_mode():
        inputs = [x.clone() for x in QKV]
        same(vmap(sdpa)(*inputs), theirs(*inputs))
        same(jvp(sdpa, tuple(inputs), tuple(TANGENTS)), jvp(theirs, tuple(inputs), tuple(TANGENTS)))


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_lists_are_on_the_cpu_whatever_the_default_device(device):
    options = {"sinks": [0.0, 1.0, 2.0, 3.0], "q_offset": [1, 2], "causal": True}
    wanted = adapter.attention(*QKV, **options)
    with torch.device(device):
        found = vmap(lambda q: adapter.attention(q, *QKV[1:], **options))(QKV[0][None])[0]
        tangent = jvp(lambda v: adapter.attention(*QKV[:2], v, **options), (QKV[2],), (QKV[2],))[1]
    same((found, tangent), (wanted, wanted))


def test_torch_compile_does_not_enter_the_kernels():
    """After a graph break it tries every function that is called."""
    def function(inputs):
        try:
            torch._dynamo.graph_break()
            return torch.ops.attnc.attention.default(*inputs, *arguments({}), False)[0]
        finally:
            pass

    def backend(graph, _):
        raise AssertionError(f"{graph.code} was compiled")

    torch._dynamo.reset()
    with torch.inference_mode():
        inputs = [x.clone() for x in QKV]
        same(torch.compile(function, backend=backend)(inputs), sdpa(*inputs))


# What has no derivative

SLOPES = torch.ones(4, dtype=torch.float64)


@pytest.mark.parametrize("name", ["alibi_slopes", "scale", "softcap"])
@pytest.mark.parametrize("words, transform", [
    ("requires grad", lambda f, x: grad(f)(x)),
    ("requires grad", lambda f, x: grad(lambda x: grad(lambda q: f(x, q))(QKV[0]).sum())(x)),
    ("has a tangent", lambda f, x: jvp(f, (x,), (x,))),
], ids=["grad", "outer grad", "jvp"])
def test_what_has_no_derivative_is_named(name, words, transform):
    def function(x, query=QKV[0]):
        return adapter.attention(query, *QKV[1:], **{name: x}).sin().sum()

    with pytest.raises(ValueError, match=f"{name} {words}, but attnc has no .* for it; pass {name}.detach"):
        transform(function, SLOPES if name == "alibi_slopes" else torch.tensor(0.5, dtype=torch.float64))


def test_slopes_have_no_gradient_through_vmap():
    def each(slopes):
        return vmap(lambda slopes: adapter.attention(*QKV, alibi_slopes=slopes))(slopes).sum()

    with pytest.raises(ValueError, match="alibi_slopes requires grad, but attnc has no derivative for it"):
        grad(each)(torch.stack([SLOPES, SLOPES]))


def test_slopes_have_no_tangent_within_another():
    def along_the_query(slopes):
        return jvp(lambda query: adapter.attention(query, *QKV[1:], alibi_slopes=slopes), (QKV[0],), (QKV[0],))

    with pytest.raises(ValueError, match="alibi_slopes has a tangent, but attnc has no derivative for it"):
        jvp(along_the_query, (SLOPES,), (SLOPES,))


def test_a_scale_for_each_example_is_refused():
    with pytest.raises(ValueError, match="scale is mapped by vmap; wanted one number for all examples"):
        vmap(lambda x, scale: sdpa(x, x, x, scale=scale))(QKV[0], torch.ones(2))


def test_statistics_have_no_derivative():
    with forward_ad.dual_level():
        x = forward_ad.make_dual(QKV[0], TANGENTS[0])
        with pytest.raises(ValueError, match="query has a tangent, but statistics have no gradient"):
            adapter.attention_weights(x, QKV[1])
    with pytest.raises(ValueError, match="got one without memory of its own"):
        jvp(lambda x: adapter.attention_weights(x, x).max(), (QKV[0],), (QKV[0],))


def test_the_operators_by_themselves():
    for layout in ("bhnd", "bnhd"):
        args = [*operands(layout, grad=True), *arguments({"causal": True, "layout": layout, "bias": BIAS[:, :, :1],
                                                          "sinks": SLOPES, "scale": torch.tensor(0.3)})]
        output, lse, _ = (x.detach() for x in torch.ops.attnc.attention.default(*args, False))
        backward = [random(*output.shape), None, *args[:3], output, lse, *args[3:], "query value bias sinks"]
        torch.library.opcheck(torch.ops.attnc.attention_backward.default, backward)
        torch.library.opcheck(torch.ops.attnc.attention_places.default,
                              [x.detach() for x in args[:2]] + args[3:][:len(INPUTS) - 3] + args[len(INPUTS):])
