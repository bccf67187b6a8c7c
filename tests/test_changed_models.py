"""A model that is changed after its trace: a call does what the model does then, or is refused."""

import collections
import copy
import functools

import numpy
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune

import scopetrace as st
from scopetrace.errors import SideEffectError, StateMismatchError
from tests.nets import differs

X = torch.randn(2, 4)


class Settings:
    SCALE = 2.0


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.ReLU()])
        self.unused = nn.Linear(4, 4)
        self.no_bias = nn.Linear(4, 4, bias=False)
        self.register_buffer("mask", None)
        self.register_buffer("shift", torch.ones(4))
        self.table = collections.OrderedDict(k=2.0)
        self.last = collections.deque([1.0])
        self.array = numpy.array([2.0])

    def forward(self, x):
        x = functools.reduce(lambda y, layer: layer(y), self.layers, self.no_bias(self.fc(x)))
        x = x * self.table["k"] + self.last[0] + float(self.array[0]) + self.shift
        x = x if self.mask is None else x * self.mask
        x = x * getattr(self, "factor", 1.0)
        return x * 2 if hasattr(self, "doubled") else x * Settings.SCALE


REFUSED = {
    "a submodule": (lambda m: setattr(m, "fc", nn.Linear(4, 4)), differs("fc: Linear when traced and another one now")),
    "an item": (
        lambda m: m.layers.__setitem__(1, nn.Tanh()),
        differs("layers._modules['1']: ReLU when traced and Tanh now; trace again, or put it back") + "$",
    ),
    "a new item": (
        lambda m: m.layers.append(nn.ReLU()),
        differs("layers._modules['2']: missing when traced and ReLU now"),
    ),
    "a hook": (
        lambda m: m.fc.register_forward_hook(print),
        "forward hooks of fc: 0 when traced and 1 now; trace again, or put it back$",
    ),
    "a pre-hook": (lambda m: m.register_forward_pre_hook(print), "forward pre-hooks of the model: 0 when traced"),
    "a backward hook": (lambda m: m.fc.register_full_backward_hook(print), "backward hooks of fc"),
    "a parametrization": (
        lambda m: parametrize.register_parametrization(m.fc, "weight", nn.Tanh()),
        "class of fc: Linear when traced and ParametrizedLinear now",
    ),
    "pruning": (lambda m: prune.l1_unstructured(m.fc, "weight", 0.5), "forward pre-hooks of fc"),
    "half": (lambda m: m.half(), r"float32 \[4.*\] when traced and is float16 \[4.*\] now"),
    "data of another dtype": (lambda m: setattr(m.fc.bias, "data", torch.ones(4).double()), r"fc\.bias was float32"),
    "another shape": (lambda m: setattr(m, "shift", torch.ones(2, 4)), r"shift was float32 \[4\] .* float32 \[2, 4\]"),
    "no parameter": (lambda m: setattr(m.fc, "bias", None), r"fc\.bias was float32 \[4\] .* is no tensor now"),
    "a new parameter": (lambda m: setattr(m.no_bias, "bias", nn.Parameter(torch.ones(4))), r"no_bias\.bias"),
    "a new buffer": (lambda m: setattr(m, "mask", torch.ones(4)), "mask, which the model reads at"),
    "a new attribute": (lambda m: setattr(m, "doubled", True), "doubled, which .* missing when traced and True now"),
    "an entry of a dict": (lambda m: m.table.update(k=3.0), r"table\['k'\], which"),
    "a deque": (lambda m: m.last.appendleft(3.0), "last, which"),
    "an array": (lambda m: m.array.fill(3.0), "array, which"),
}


@pytest.mark.parametrize("change", REFUSED)
def test_a_call_is_refused_after(change):
    model = Net()
    tr = st.trace(model, (X,))
    tr(X)
    change, message = REFUSED[change]
    change(model)
    with pytest.raises(StateMismatchError, match=message):
        tr(X)


def test_an_attribute_of_a_class_that_code_names(monkeypatch):
    tr = st.trace(Net(), (X,))
    monkeypatch.setattr(Settings, "SCALE", 5.0)
    with pytest.raises(StateMismatchError, match=r"Settings\.SCALE: 2\.0 when traced and 5\.0 now"):
        tr(X)
    tr = st.trace(Net(), (X,))
    monkeypatch.setattr(Net, "factor", 3.0, raising=False)
    with pytest.raises(StateMismatchError, match=r"factor, which .* missing when traced and 3\.0 now"):
        tr(X)


FOLLOWED = {
    "a parameter": lambda m: setattr(m.fc, "weight", nn.Parameter(torch.randn(4, 4))),
    "its data": lambda m: setattr(m.fc.weight, "data", torch.randn(4, 4)),
    "a buffer": lambda m: setattr(m, "shift", torch.randn(4)),
    "a state dict": lambda m: m.load_state_dict({k: v + 1 for k, v in m.state_dict().items()}, assign=True),
    "frozen parameters": lambda m: m.requires_grad_(False),
    "a module that is not used": lambda m: setattr(m, "unused", None),
    "a new module": lambda m: setattr(m, "head", nn.Linear(4, 4)),
    "a hook of a module that is not used": lambda m: m.unused.register_forward_hook(print),
    "a hook that is gone again": lambda m: m.fc.register_forward_hook(print).remove(),
}


@pytest.mark.parametrize("change", FOLLOWED)
def test_a_call_does_what_the_model_does_after(change):
    model = Net()
    tr = st.trace(model, (X,))
    tr(X)
    FOLLOWED[change](model)
    actual, expected = tr(X), model(X)
    torch.testing.assert_close(actual, expected)
    assert actual.requires_grad == expected.requires_grad


def test_hundreds_of_modules_inside_each_other():
    model = nn.Linear(4, 4)
    for _ in range(100):
        model = nn.Sequential(model)
    tr = st.trace(model, (X,))
    tr(X)
    next(m for m in model.modules() if isinstance(m, nn.Linear)).register_forward_hook(print)
    with pytest.raises(StateMismatchError, match="forward hooks of module 0"):
        tr(X)


# A tensor that forward puts where there was none ----------------------------------------------------------------------


class Total(nn.Module):
    """Adds up what it is given, as a cache of a decoder does."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        if kind == "attribute":
            self.total = None
        if kind == "buffer":
            self.register_buffer("total", None)
        if kind == "number":
            self.total = 0.0

    def forward(self, x):
        if self.kind == "missing":
            self.total = self.total + x if hasattr(self, "total") else x
        elif self.kind == "number":
            self.total = self.total + x
        else:
            self.total = x if self.total is None else self.total + x
        return x * 2


@pytest.mark.parametrize("kind", ["attribute", "buffer", "missing", "number"])
def test_it_makes_a_trace_right_for_one_call(kind):
    model, eager = Total(kind), Total(kind)
    tr = st.trace(model, (X,))
    torch.testing.assert_close(tr(X), eager(X))
    torch.testing.assert_close(model.total, eager.total)
    with pytest.raises(SideEffectError, match=r"self\.total was .* and became a tensor \[2, 4\]"):
        tr(X)


class Memo(nn.Module):
    """Computes once what each call would compute again."""

    def forward(self, x):
        if not hasattr(self, "steps"):
            self.steps = torch.arange(4.0)
        return x * self.steps


def test_but_not_where_each_call_would_compute_it_again():
    tr = st.trace(Memo(), (X,))
    for _ in range(3):
        torch.testing.assert_close(tr(X), Memo()(X))
    assert tr.side_effects == []


class Table(nn.Module):
    def forward(self, x):
        return x + self.table


class Tables(nn.Module):
    """Layers that hold one tensor, as a table of rotary embeddings; so may the model."""

    def __init__(self, kind):
        super().__init__()
        self.layers = nn.ModuleList([Table(), Table(), Table()])
        table = nn.Parameter(torch.ones(4)) if kind == "parameter" else torch.ones(4)
        for layer in self.layers:
            layer.__dict__["table"] = table
        if kind == "parameter":
            self.table = table
        elif kind == "buffer":
            self.register_buffer("table", table)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("changed", [0, 2])
@pytest.mark.parametrize("kind", ["parameter", "buffer", "attribute"])
def test_a_tensor_that_several_modules_hold_is_replaced_in_one(kind, changed):
    model = Tables(kind)
    tr = st.trace(model, (X,))
    torch.testing.assert_close(tr(X), model(X))
    model.layers[changed].__dict__["table"] = torch.zeros(4)
    with pytest.raises(StateMismatchError, match=r"layers\.2\.table as one tensor: True when traced and False now"):
        tr(X)


def test_a_tensor_that_several_modules_hold_is_replaced_in_all():
    model, table = Tables("attribute"), torch.randn(4)
    tr = st.trace(model, (X,))
    for layer in model.layers:
        layer.table = table
    torch.testing.assert_close(tr(X), model(X))


class OfParameters(nn.Module):
    def __init__(self, read):
        super().__init__()
        self.read = read
        self.dict = nn.ParameterDict({"a": torch.ones(4), "b": torch.ones(4)})
        self.list = nn.ParameterList([torch.ones(4)])

    def forward(self, x):
        return x * self.read(self)


READS = [
    lambda m: sum(m.dict.values()) * sum(m.list),
    lambda m: sum(p for _, p in m.dict.items()) * m.list[-1],
    lambda m: len(m.dict) * len(m.list),
    lambda m: 2.0 if "c" in m.dict else sum(p for p in m.list),
]


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("kind", ["dict", "list"])
def test_entries_of_containers_of_parameters(kind, read):
    model, new = OfParameters(read), nn.Parameter(torch.full((4,), 3.0))
    tr = st.trace(model, (X,))
    torch.testing.assert_close(tr(X), model(X))
    if kind == "dict":
        model.dict["c"] = new
    else:
        model.list.append(new)
    with pytest.raises(StateMismatchError, match=kind):
        tr(X)


class Chooses(nn.Module):
    def __init__(self):
        super().__init__()
        self.kind = "twice"

    def run_twice(self, x):
        return x * 2

    def forward(self, x):
        return getattr(self, f"run_{self.kind}")(x)


def test_a_method_that_is_found_by_a_computed_name(monkeypatch):
    model = Chooses()
    tr = st.trace(model, (X,))
    torch.testing.assert_close(tr(X), model(X))
    monkeypatch.setattr(Chooses, "run_twice", lambda self, x: x * 3)
    with pytest.raises(StateMismatchError, match=r"Chooses\.run_twice"):
        tr(X)


class _Recurrent(nn.Module):
    def __init__(self, state):
        super().__init__()
        self.fc, self.state = nn.Linear(2, 2), state

    def forward(self, x):
        self.state = torch.tanh(self.fc(x) + self.state)
        return self.state


def test_layers_that_begin_with_one_state():
    zeros, x = torch.zeros(1, 2), torch.ones(1, 2)
    with torch.no_grad():
        tr = st.trace(nn.Sequential(_Recurrent(zeros), _Recurrent(zeros)), (x,))
        tr(x)
        with pytest.raises(StateMismatchError, match=r"0\.state and 1\.state as one tensor: .* a tensor of its own"):
            tr(x)
        model = nn.Sequential(_Recurrent(zeros.clone()), _Recurrent(zeros.clone()))
        eager, tr = copy.deepcopy(model), st.trace(model, (x,))
        assert all(torch.equal(tr(x), eager(x)) for _ in range(3))
