"""patch(): what goes to attnc, what to torch, and that the name comes back in any order of leaving."""

import asyncio
import copy
import functools
import pickle
import threading

import pytest

pytestmark = [pytest.mark.peers,
              pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")]    # torch's own
torch = pytest.importorskip("torch")
pytest.importorskip("ml_dtypes")

from torch.nn import functional  # noqa: E402
from torch.overrides import TorchFunctionMode  # noqa: E402

from attnc.integrations import torch as adapter  # noqa: E402
from attnc.integrations.torch._interception import Interception  # noqa: E402

TORCHS = torch._C._nn.scaled_dot_product_attention
X = torch.randn(2, 4, 5, 8, generator=torch.Generator().manual_seed(0))
sdpa = adapter.scaled_dot_product_attention


def current():
    return functional.scaled_dot_product_attention


def attend(*args, **options):
    return functional.scaled_dot_product_attention(*args, **options)


@pytest.fixture(autouse=True)
def restored():
    assert current() is TORCHS
    yield
    left, functional.scaled_dot_product_attention = current(), TORCHS
    assert left is TORCHS


@pytest.fixture
def calls(monkeypatch):
    """The calls that attnc has taken."""
    found = []

    def counted(*args, **options):
        result = sdpa(*args, **options)
        found.append(1)
        return result

    monkeypatch.setattr(adapter, "scaled_dot_product_attention", counted)
    return found


# What goes where

def test_takes_what_attnc_can_do(calls):
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).train()
    layer.dropout1.p = layer.dropout2.p = layer.dropout.p = layer.self_attn.dropout = 0.0
    x = X[0]
    plain = copy.deepcopy(layer)
    with adapter.patch():
        got = layer(x)
        got.sum().backward()
    assert len(calls) == 1
    wanted = plain(x)
    wanted.sum().backward()
    assert len(calls) == 1
    torch.testing.assert_close(got, wanted)
    for ours, theirs in zip(layer.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5)


class Subclass(torch.Tensor):
    pass


MASK = torch.zeros(5, 5)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:.*quantize")
@pytest.mark.parametrize("make, options", [
    (lambda: X, {"dropout_p": 1.0}),
    (lambda: X.to_sparse(), {}),
    (lambda: torch.quantize_per_tensor(X, 0.1, 0, torch.qint8), {}),
    (lambda: torch.nested.nested_tensor([X[0], X[0]]), {}),
    (lambda: X.as_subclass(Subclass), {}),
    (lambda: X.to(torch.complex64), {}),
    (lambda: X.int(), {}),
    (lambda: X[0, 0, 0], {}),
    (lambda: X, {"attn_mask": MASK, "is_causal": True}),
    (lambda: X, {"attn_mask": MASK.int()}),
    (lambda: X, {"attn_mask": torch.zeros(3, 1, 5, 5)}),
    (lambda: X, {"attn_mask": X}),
    (lambda: X, {"scale": torch.tensor(0.5, requires_grad=True)}),
    (lambda: X, {"scale": "loud"}),
    (lambda: X.numpy(), {}),
], ids=["dropout", "sparse", "quantised", "nested", "subclass", "complex", "integers", "1-D", "mask and causal",
        "mask of integers", "larger mask", "wrong mask", "learned scale", "no number", "NumPy"])
def test_leaves_the_rest_to_torch(calls, make, options):
    x = make()

    def outcome():
        try:
            found = attend(x, x, x, **options)
        except Exception as error:
            return type(error), str(error)
        return type(found), found.is_nested or found.tolist()

    wanted = outcome()
    with adapter.patch():
        assert outcome() == wanted
    assert not calls


def test_mixed_dtypes_are_torchs_error(calls):
    with adapter.patch(), pytest.raises(RuntimeError, match="to have the same dtype"):
        attend(X, X.double(), X)
    assert not calls


def test_another_device_is_left_to_torch(calls):
    with adapter.patch():
        found = attend(*[X.to("meta")] * 3, dropout_p=0.5)
    assert found.is_meta and not calls


def test_a_mode_sees_the_call(calls):
    class Mode(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    seen = []
    with adapter.patch(), Mode():
        ours = current()
        attend(X, X, X, is_causal=True, scale=0.3)
    assert seen == [ours] and len(calls) == 1
    with adapter.patch(), torch.device("cpu"):
        attend(X, X, X)
    assert len(calls) == 2


def test_scripted_code_is_torchs(calls):
    class Layer(torch.nn.Module):
        def forward(self, x, mask: torch.Tensor):
            return torch.nn.functional.scaled_dot_product_attention(x, x, x, mask, scale=0.5)

    with adapter.patch():
        scripted = torch.jit.script(Layer())
        torch.testing.assert_close(scripted(X, MASK), TORCHS(X, X, X, MASK, scale=0.5))
    torch.testing.assert_close(scripted(X, MASK), TORCHS(X, X, X, MASK, scale=0.5))
    assert not calls


def test_derivatives_of_any_order():
    inputs = [x[:1, :2, :3, :4].double().requires_grad_() for x in (X, X.sin(), X.cos())]
    with adapter.patch():
        assert torch.autograd.gradcheck(current(), inputs, check_forward_ad=True, check_batched_grad=True,
                                        check_batched_forward_grad=True)
        assert torch.autograd.gradgradcheck(current(), inputs, check_fwd_over_rev=True, check_batched_grad=True)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_compiled(dynamic, grad):
    def layer(packed, mask):
        query, key, value = (x.transpose(1, 2) for x in packed.unbind(2))
        found = attend(query, key, value, mask, scale=0.4).transpose(1, 2)
        return found.view(*packed.shape[:2], -1).sin()

    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for length in (5, 6, 9):
        packed, mask = torch.randn(2, length, 3, 4, 8, requires_grad=grad), torch.rand(length, length) < 0.9
        with adapter.patch():
            got = compiled(packed, mask)
        wanted = layer(packed, mask)
        torch.testing.assert_close(got, wanted)
        if grad:
            torch.testing.assert_close(*(torch.autograd.grad(x.sum(), packed) for x in (got, wanted)))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore:.*torch.jit.trace",
                            "ignore::torch.jit.TracerWarning")
def test_traced():
    with adapter.patch():
        traced = torch.jit.trace(lambda x: attend(x, x, x), X)
    other = torch.randn(3, 4, 7, 8)
    assert "attnc::attention" in str(traced.graph)
    torch.testing.assert_close(traced(other), attend(other, other, other))


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
def test_entered_in_compiled_code(calls):
    @adapter.patch()
    def decorated(x):
        return attend(x, x, x)

    def within(x):
        with adapter.patch():
            return attend(x, x, x)

    for function in (decorated, within):
        torch._dynamo.reset()
        torch.testing.assert_close(torch.compile(function, backend="aot_eager")(X), attend(X, X, X))
    assert len(calls) == 2


def test_compiled_once_for_all_contexts():
    compilations = []

    def backend(graph, _):
        compilations.append([node.target for node in graph.graph.nodes if node.op == "call_function"])
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(lambda x: attend(x, x, x), backend=backend)
    for _ in range(4):
        with adapter.patch():
            compiled(X)
            with adapter.patch():
                compiled(X)
    assert len(compilations) == 1 and torch.ops.attnc.attention.default in compilations[0]
    compiled(X)
    assert len(compilations) == 2 and TORCHS in compilations[1]


def test_compiled_dropout_is_torchs():
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: attend(x, x, x, dropout_p=1.0), backend="aot_eager", fullgraph=True)
    with adapter.patch():
        assert compiled(X).count_nonzero() == 0


@pytest.mark.parametrize("strict", [False, True])
def test_exported(strict):
    class Layer(torch.nn.Module):
        def forward(self, x, mask):
            return attend(x, x, x, mask)

    length = torch.export.Dim("length", min=2, max=64)
    with adapter.patch():
        exported = torch.export.export(Layer(), (X, MASK), dynamic_shapes=({2: length}, {0: length, 1: length}),
                                       strict=strict)
    assert torch.ops.attnc.attention.default in [node.target for node in exported.graph.nodes]
    x, mask = torch.randn(2, 4, 9, 8, requires_grad=True), torch.randn(9, 9)
    results = exported.module()(x, mask), attend(x, x, x, mask)
    torch.testing.assert_close(*results)
    torch.testing.assert_close(*(torch.autograd.grad(y.sin().sum(), x) for y in results))


# Entering and leaving

def test_overlapping_contexts():
    first, second = adapter.patch(), adapter.patch()
    first.__enter__()
    ours = current()
    assert ours is not TORCHS
    second.__enter__()
    assert current() is ours
    first.__exit__(None, None, None)
    assert current() is ours
    second.__exit__(None, None, None)
    assert current() is TORCHS


def test_overlapping_threads():
    steps = [threading.Event() for _ in range(4)]
    found = []

    def first():
        with adapter.patch():
            steps[0].set()
            steps[1].wait(60)
        found.append(current() is not TORCHS)
        steps[2].set()

    def second():
        steps[0].wait(60)
        with adapter.patch():
            steps[1].set()
            steps[2].wait(60)

    threads = [threading.Thread(target=f) for f in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == [True] and current() is TORCHS


def test_many_threads_at_once():
    barrier = threading.Barrier(8)

    def work():
        barrier.wait(60)
        for _ in range(500):
            with adapter.patch():
                assert current() is not TORCHS

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert current() is TORCHS


def test_one_context_again_and_in_itself():
    context = adapter.patch()
    for _ in range(2):
        with context:
            with context:
                pass
            assert current() is not TORCHS
        assert current() is TORCHS
    with pytest.raises(RuntimeError, match=r"a patch\(\) was left that had not been entered"):
        context.__exit__(None, None, None)


def test_left_by_an_exception_and_by_generators():
    with pytest.raises(ZeroDivisionError), adapter.patch():
        raise ZeroDivisionError

    def generator():
        with adapter.patch():
            yield current()

    first, second = generator(), generator()
    assert next(first) is next(second) is not TORCHS
    first.close()
    assert current() is not TORCHS
    del second
    assert current() is TORCHS


def test_tasks():
    async def task(order):
        with adapter.patch():
            await asyncio.sleep(0.01 * order)
            assert current() is not TORCHS

    async def tasks():
        await asyncio.gather(*map(task, (3, 1, 2)))

    asyncio.run(tasks())


def test_as_a_decorator():
    @adapter.patch()
    def function(depth):
        assert current() is not TORCHS
        return depth and function(depth - 1)

    function(2)


def test_what_was_taken_within_goes_to_torch_afterwards(calls):
    with adapter.patch():
        kept = current()
        kept(X, X, X)
    assert len(calls) == 1
    torch.testing.assert_close(kept(X, X, X), TORCHS(X, X, X))
    assert len(calls) == 1


def test_what_was_taken_within_is_pickled_by_torchs_name():
    theirs = functional.scaled_dot_product_attention
    with adapter.patch():
        ours = functional.scaled_dot_product_attention
        dumped = pickle.dumps(ours)
        assert pickle.loads(dumped) is ours and ours is not theirs
    assert pickle.loads(dumped) is theirs


def test_what_another_library_has_put_there_stays(calls):
    def other(*args, **options):
        seen.append(1)
        return ours(*args, **options)

    seen = []
    context = adapter.patch()
    context.__enter__()
    ours = current()
    functional.scaled_dot_product_attention = other
    with pytest.warns(RuntimeWarning, match=r"scaled_dot_product_attention was replaced by .*other"):
        context.__enter__()
    context.__exit__(None, None, None)
    with pytest.warns(RuntimeWarning, match="while attnc's was in its place; it stays"):
        context.__exit__(None, None, None)
    assert current() is other
    attend(X, X, X)
    assert len(seen) == 1 and not calls
    with context:       # in its place now; what it calls is what it has always called
        assert current() not in (ours, other)
        attend(X, X, X)
        assert len(seen) == 1 and len(calls) == 1
        attend(X, X, X, dropout_p=1.0)
        assert len(seen) == 2 and len(calls) == 1
    assert current() is other
    functional.scaled_dot_product_attention = TORCHS


def test_what_stood_there_before_comes_back():
    def other(*args, **options):
        return TORCHS(*args, **options)

    functional.scaled_dot_product_attention = other
    with adapter.patch():
        assert current() is not other
    assert current() is other
    functional.scaled_dot_product_attention = TORCHS


def test_purposes_share_the_place():
    class module:
        __name__, name = "module", staticmethod(lambda: "theirs")

    theirs = module.name
    interception = Interception(module, "name", lambda state: lambda: (state.theirs(), sorted(state.purposes)))
    interception.enter("a")
    interception.enter("b")
    interception.enter("a")
    assert module.name() == ("theirs", ["a", "b"])
    interception.leave("a")
    interception.leave("b")
    assert module.name() == ("theirs", ["a"])
    interception.leave("a")
    assert module.name is theirs


@pytest.mark.filterwarnings("ignore:.*was replaced by:RuntimeWarning")
def test_what_another_library_puts_back_is_torchs_from_its_next_call_on(calls):
    """It has found ours in place, replaced it for a time that outlasts ours, and restores what it found."""
    for enter_again in (False, True):
        with adapter.patch():
            found = current()
            functional.scaled_dot_product_attention = functools.partial(found)
        functional.scaled_dot_product_attention = found
        if enter_again:
            with adapter.patch():
                attend(X, X, X)
        else:
            torch.testing.assert_close(attend(X, X, X), TORCHS(X, X, X))
        assert current() is TORCHS
    assert len(calls) == 1
