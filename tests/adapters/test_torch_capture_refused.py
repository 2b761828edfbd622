"""capture(): what it cannot see, and what is asked for that does not exist, is an error that says so."""
# ruff: noqa: E402, F401, F811    (fixtures of capturing.py)

import numpy as np
import pytest

pytestmark = pytest.mark.peers
torch = pytest.importorskip("torch")
pytest.importorskip("ml_dtypes")

from capturing import (
    HEADS,
    PADDING,
    WIDTH,
    Attention,
    restored,
    two,
    x,
)
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.nn import functional
from torch.nn.functional import scaled_dot_product_attention as early

from attnc.integrations.torch import Records, capture


def test_what_is_asked_for_must_exist(x):
    model = two()
    for error, match, how in [
            (ValueError, "what has 'columns'.*entropy", {"what": "columns"}),
            (ValueError, r"what is \(\)", {"what": ()}),
            (TypeError, "what has 3", {"what": ("entropy", 3)}),
            (ValueError, "two functions of the name 'result'", {"what": (lambda w, c: 1, lambda w, c: 2)}),
            (ValueError, "'shape', which a record uses", {"what": {"shape": lambda w, c: 1}}),
            (ValueError, "'relevance', which a record uses", {"what": {"relevance": lambda w, c: 1}}),
            (ValueError, "wanted functions by names", {"what": {"x": "entropy"}}),
            (ValueError, "layers is empty; wanted at least one layer, or None", {"layers": []}),
            (ValueError, "heads is empty; wanted at least one layer, or None", {"heads": {}}),
            (ValueError, "layers has 'cross'; no module", {"layers": "cross"}),
            (ValueError, "heads has 'cross'; no module", {"heads": {"cross": [0]}}),
            (ValueError, "layers has 2, for which no attention was called; .* 2 calls", {"layers": [0, 2]}),
            (ValueError, r"layers has \('0', 1\)", {"layers": ("0", 1)}),
            (ValueError, r"layers has 'project'", {"layers": "project"}),
            (ValueError, "heads has 5", {"heads": {5: [0]}}),
            (ValueError, "-1.*counted from 0", {"layers": -1}),
            (ValueError, "wanted an index, a name", {"layers": [(0, 1)]}),
            (TypeError, r"layers is 0\.5; wanted indices", {"layers": 0.5}),
            (TypeError, "layers has True; wanted an index", {"layers": [True]}),
            (TypeError, "layers is True|layers has True", {"layers": True}),
            (TypeError, r"layers has \('0', True\)|layers has True", {"layers": ("0", True)}),
            (TypeError, r"what is None; wanted names", {"what": None}),
            (ValueError, "heads has 4; '0' has 4 heads", {"heads": 4}),
            (ValueError, "heads has -1", {"heads": [-1]}),
            (ValueError, "heads has 7; '1'", {"heads": {1: [7]}}),
            (TypeError, r"heads has 0\.5; wanted integers", {"heads": [0.5]}),
            (TypeError, r"heads has 0\.5; wanted integers", {"heads": {0: np.array([0.5])}}),
            (TypeError, "heads is slice.*; wanted integers", {"heads": slice(0, 1)}),
            (TypeError, "heads has True; wanted integers", {"heads": True}),
            (TypeError, "heads has '0'; wanted integers", {"heads": "0"}),
            (TypeError, "rows has 'a'; wanted a slice of integers", {"rows": slice("a")}),
            (ValueError, "topk must be an integer from 1 .*, got 0", {"topk": 0}),
            (TypeError, r"topk must be an integer, got float 2\.0", {"topk": 2.0}),
            (ValueError, "row_bins must be an integer from 1 .*, got 0", {"bins": (0, 4)}),
            (TypeError, r"bins is 4; wanted a pair \(row_bins, col_bins\)", {"bins": 4}),
            (ValueError, "rows is 3", {"rows": 3}),
            (ValueError, "step 1", {"rows": slice(None, None, 2)})]:
        how.setdefault("what", "entropy")
        with pytest.raises(error, match=match), capture(model, **how):
            model(x)
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got str"), capture("model"):
        pass


def test_a_model_that_calls_no_attention(x):
    for model in (nn.Linear(WIDTH, WIDTH), two()):
        with pytest.raises(ValueError, match=f"{type(model).__name__} never called attention"), capture(model):
            if not isinstance(model, nn.Sequential):
                model(x)
    with pytest.raises(KeyError, match="another error"), capture(two()):      # is not hidden
        raise KeyError("another error")


def test_a_function_that_raises_is_for_the_model_to_handle(x):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = two()

        def forward(self, x):
            try:
                return self.layers(x)
            except ZeroDivisionError:
                return x

    model = Model()
    with capture(model, lambda weights, call: 1 / call.index) as records:
        assert model(x) is x
    assert len(records) == 0
    with pytest.raises(ZeroDivisionError), capture(model.layers, lambda weights, call: 1 / call.index):
        model.layers(x)


@pytest.mark.parametrize("make, match", [
    (lambda x: x.to("meta"), "device meta|without memory"),
    (lambda x: torch.nested.nested_tensor(list(x), layout=torch.jagged), "nested tensor"),
    (lambda x: FakeTensorMode().from_tensor(x), "without memory|FakeTensor")], ids=["device", "nested", "fake"])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_tensors_that_are_not_plain(make, match, x):
    class Model(nn.Module):
        def forward(self, x):
            x = x.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            return early(x, x, x)

    model = Model()
    with pytest.raises((ValueError, TypeError), match=f"capture cannot see.*({match})"), capture(model):
        model(make(x))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_the_nested_tensors_of_an_encoder(x):
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, HEADS, 64, batch_first=True), 1).eval()
    with torch.no_grad(), pytest.raises(ValueError, match=r"nested tensors.*enable_nested_tensor=False"), \
            capture(model):
        model(x, src_key_padding_mask=PADDING)
    model.use_nested_tensor = False
    with torch.no_grad(), capture(model) as records:
        model(x, src_key_padding_mask=PADDING)
    assert len(records) == 1


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore:.*torch.jit.*",
                            "ignore::torch.jit.TracerWarning")
def test_graphs(x):
    class Method(Attention):
        def __init__(self):
            super().__init__()
            self.forward = torch.compile(super().forward, backend="eager")

    class Decorated(Attention):
        forward = torch.compile(Attention.forward, backend="eager")

    in_place = Attention()
    in_place.compile(backend="eager")
    plain = Attention()
    for compiled in (torch.compile(Attention(), backend="eager"), in_place, Method(), Decorated()):
        with pytest.raises(ValueError, match="1 is compiled"), capture(nn.Sequential(plain, compiled)):
            pass
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 64, batch_first=True).eval()
    for scripted in (torch.jit.trace(Attention(early), x), torch.jit.script(layer)):
        with pytest.raises(ValueError, match=r"1.* is compiled by torch.jit"), capture(nn.Sequential(plain, scripted)):
            pass
    others = nn.Sequential(torch.jit.script(nn.Linear(WIDTH, WIDTH)), plain)
    with capture(others, "entropy") as records:
        others(x)
    assert len(records) == 1


def test_other_models_are_compiled_meanwhile(x):
    model, other = two(), two()
    torch._dynamo.reset()
    compiled = torch.compile(other, backend="aot_eager", fullgraph=True)
    with capture(model, "entropy") as records:
        model(x)
        torch.testing.assert_close(compiled(x), other(x))
    torch.testing.assert_close(compiled(x), other(x))
    assert len(records) == 2


def test_a_multihead_attention_with_code_of_its_own(x):
    class Own(nn.MultiheadAttention):
        def forward(self, x):
            return (x @ x.mT).softmax(-1) @ x

    model = nn.Sequential(Attention(), Own(WIDTH, HEADS))
    with pytest.raises(ValueError, match="cannot see the attention of '1', a MultiheadAttention"), capture(model):
        model(x)


def test_a_module_that_uses_the_weights_of_a_multihead_attention(x):
    """Where it has called no attention; one that sometimes calls it is no error."""
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.calls = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True), False

        def forward(self, x):
            if self.calls:
                return self.inner(x, x, x)[0]
            query, key, value = functional.linear(x, self.inner.in_proj_weight).chunk(3, -1)
            return (query @ key.mT).softmax(-1) @ value

    model = nn.Sequential(Attention(), Own())
    with pytest.raises(ValueError, match="cannot see the attention of '1', which computes with the parameters"), \
            capture(model):
        model(x)
    with capture(model, "entropy") as records:
        model(x)
        model[1].calls = True
        model(x)
    assert [record.layer for record in records] == ["0", "0", "1.inner"]


@pytest.mark.parametrize("how", ["rows", "linear", "transposed", "cat", "output"])
def test_every_way_to_use_the_weights_of_a_multihead_attention(how, x):
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

        def forward(self, x):
            weight = self.inner.in_proj_weight
            if how == "output":
                return self.inner.out_proj((x @ x.mT).softmax(-1) @ x)
            query = {"rows": lambda: x @ weight[:WIDTH].mT, "linear": lambda: functional.linear(x, weight=weight),
                     "transposed": lambda: x @ weight.mT, "cat": lambda: x @ torch.cat([weight, weight]).T}[how]()
            return (query @ query.mT).softmax(-1) @ x

    model = nn.Sequential(Attention(), Own())
    with pytest.raises(ValueError, match="cannot see the attention of '1'"), capture(model):
        model(x)


def test_a_multihead_attention_that_is_not_run_records_nothing(x):
    """Whether the module that holds it has an attention beside it, none, or only reads its attributes."""
    class Holder(nn.Module):
        def __init__(self, shared=None):
            super().__init__()
            self.unused = shared or nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
            self.project = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            assert not self.unused.in_proj_weight.is_cuda
            return self.project(x.to(self.unused.in_proj_weight.dtype))

    class Both(Holder):
        def forward(self, x):
            return self.unused(x, x, x)[0]

    used = Both()
    for model in nn.Sequential(Attention(), Holder()), nn.Sequential(Holder(used.unused), used):
        with capture(model, "entropy") as records:
            model(x)
        assert len(records) == 1
    alone, beside = Holder(), nn.Sequential(Attention(), Holder())
    with pytest.raises(ValueError, match="Holder never called attention"), capture(alone):
        alone(x)
    with pytest.raises(ValueError, match=r"layers has '1\.unused', for which no attention was called"), \
            capture(beside, layers=["0", "1.unused"]):
        beside(x)


def test_gradients_that_cannot_come(x):
    model = two()
    for what in ("grad_output", "relevance"):
        with torch.no_grad(), pytest.raises(ValueError, match=r"'0' has no gradient.*no_grad"), capture(model, what):
            model(x)
    with capture(model, "relevance") as records:
        model(x)
    with pytest.raises(ValueError, match=r"no gradient has come to '0': call backward\(\)"):
        records[0].relevance()
    with capture(model, "weights") as records:
        model(x)
    with pytest.raises(ValueError, match=r"has no value.*relevance"):
        records[0].relevance()


def test_a_list_that_slices_as_one(x):
    model = two()
    with capture(model) as records:
        model(x)
    assert isinstance(records, list) and isinstance(records[:1], Records) and records[-1].layer == "1"


class Calls(nn.Module):
    """Attention by a function that is given."""

    def __init__(self, function):
        super().__init__()
        self.project, self.function = nn.Linear(WIDTH, WIDTH), [function]

    def forward(self, x):
        x = self.project(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        return self.function[0](x, x, x)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")     # dynamo's own
def test_compiled_functions_that_a_model_calls(x):
    for function in (lambda *x: functional.scaled_dot_product_attention(*x).sin(), lambda *x: early(*x), early):
        for whole in (False, True):
            torch._dynamo.reset()
            model = Calls(torch.compile(function, backend="aot_eager", fullgraph=whole))
            for before in (False, True):
                if before:
                    wanted = model(x)
                with pytest.raises(ValueError, match=r"'' calls a function of torch\.compile.*force_eager"), \
                        capture(model):
                    model(x)
                with torch.compiler.set_stance("force_eager"), capture(model, "entropy") as records:
                    model(x)
                assert len(records) == 1
            torch.testing.assert_close(model(x), wanted)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: model(x), backend="aot_eager")
    model = two()
    with pytest.raises(ValueError, match=r"Sequential never called attention.* compiled"), capture(model):
        compiled(x)


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
def test_transforms_of_torch_func(x):
    model = Calls(early)
    for transformed in (torch.vmap(model), torch.func.grad(lambda x: model(x).sum())):
        with pytest.raises(ValueError, match=r"cannot see the attention of '': .* without memory"), capture(model):
            transformed(x[None])
