"""Uses that a first user tries: something that the forward read is changed after the trace, and the call is refused."""

import array
import collections
import contextvars
import dataclasses
import subprocess
import sys
import threading
import types

import pytest
import torch
from torch import nn

import scopetrace as st
from tests.nets import differs, net

X = torch.ones(2, 4)
LEVEL = contextvars.ContextVar("LEVEL", default=2.0)
LOCAL = threading.local()


class Config:
    def __init__(self, **attributes):
        self.__dict__.update(attributes)


class Computed(Config):
    def __getattr__(self, name):
        return self.__dict__["values"][name]


class AttributeDict(dict):
    def __getattr__(self, name):
        return self[name]


class FromSlot:
    def __get__(self, owner, cls):
        return owner.__dict__.get("_scale", 2.0)


def described():
    """A module with an attribute that a descriptor of its class gives."""
    model = net(lambda s, x: x * s.described)
    type(model).described = FromSlot()
    return model


def with_property():
    """A module with a property of its class."""
    model = net(lambda s, x: x * s.scale)
    type(model).scale = property(lambda s: 2.0)
    return model


def tagged():
    """A module whose weight has an attribute of users."""
    model = net(lambda s, x: s.fc(x) * (2.0 if getattr(s.fc.weight, "kind", "") == "scaled" else 1.0))
    model.fc.weight.kind = "scaled"
    return model


def replaced(owner, name, value):
    return lambda m: setattr(owner(m), name, value)


def of_kind(make, read, change):
    """A container in an attribute, which `read` takes a number of and `change` changes in place."""
    return lambda: net(lambda self, x: x * read(self.c), c=make()), lambda m: change(m.c), "c, which|c.data|c.maps"


# name: the model, a change, and what the error says of it
CHANGES = {
    "vars of a module": (lambda: net(lambda s, x: x * vars(s)["k"], k=2.0), replaced(lambda m: m, "k", 3.0), "vars"),
    "__dict__": (lambda: net(lambda s, x: x * s.__dict__.get("k", 1)), replaced(lambda m: m, "k", 3.0), "vars"),
    "vars of an object": (
        lambda: net(lambda s, x: x * sum(vars(s.c).values()), c=Config(k=2.0)),
        replaced(lambda m: m.c, "k", 3.0),
        r"c\.k",
    ),
    "vars of a namespace": (
        lambda: net(lambda s, x: x * vars(s.c)["k"], c=types.SimpleNamespace(k=2.0)),
        replaced(lambda m: m.c, "k", 3.0),
        r"c\.k",
    ),
    "a property": (
        with_property,
        replaced(type, "scale", property(lambda s: 3.0)),
        r"Net\.scale: <property object> when",
    ),
    "an attribute of a weight": (
        tagged,
        replaced(lambda m: m.fc.weight, "kind", "plain"),
        r"fc\.weight\.kind: 'scaled' ",
    ),
    "a descriptor": (described, replaced(lambda m: m, "_scale", 3.0), "_scale, which"),
    "a computed attribute": (
        lambda: net(lambda s, x: x * s.c.k, c=Computed(values={"k": 2.0})),
        lambda m: m.c.values.update(k=3.0),
        r"c\.values\['k'\]",
    ),
    "a layer's attribute by a computed name": (
        lambda: net(lambda s, x: x * getattr(s.fc, "in_" + "features")),
        replaced(lambda m: m.fc, "in_features", 7),
        r"fc\.in_features.*: 4 when traced and 7 now",
    ),
    "what a layer does not have": (
        lambda: net(lambda s, x: x * getattr(s.fc, "scale", 1.0)),
        replaced(lambda m: m.fc, "scale", 3.0),
        r"fc\.scale.*: missing when traced and 3\.0 now",
    ),
    "what an object does not have": (
        lambda: net(lambda s, x: x * 2 if hasattr(s.c, "scale") else x, c=Config()),
        replaced(lambda m: m.c, "scale", 3.0),
        r"c\.scale.*: missing when traced and 3\.0 now",
    ),
    "what a namespace does not have": (
        lambda: net(lambda s, x: x * 2 if hasattr(s.c, "scale") else x, c=types.SimpleNamespace()),
        replaced(lambda m: m.c, "scale", 3.0),
        r"c\.scale.*: missing when traced and 3\.0 now",
    ),
    "a submodule that was not there": (
        lambda: net(lambda s, x: s.head(x) if hasattr(s, "head") else x),
        replaced(lambda m: m, "head", nn.Linear(4, 4)),
        r"head.*: missing when traced",
    ),
    "forward of the model": (
        lambda: net(lambda s, x: x * 2),
        replaced(lambda m: m, "forward", lambda x: x * 3),
        "forward of the model: that of its class when traced and another one now",
    ),
    "forward of a layer": (
        lambda: net(lambda s, x: s.fc(x)),
        replaced(lambda m: m.fc, "forward", lambda x: x * 3),
        "forward of fc: that of its class",
    ),
    "forward of a class": (
        lambda: net(lambda s, x: x * 2),
        replaced(type, "forward", lambda s, x: x * 3),
        r"Net\.forward: <function",
    ),
    "a method of a class": (
        lambda: net(lambda s, x: s.helped(x)),
        replaced(type, "helped", lambda s, x: x * 3),
        r"Net\.helped: <function",
    ),
    "a method of the model": (
        lambda: net(lambda s, x: s.helped(x)),
        replaced(lambda m: m, "helped", lambda x: x * 3),
        "helped of the model: that of its class",
    ),
    "the class": (
        lambda: nn.Sequential(nn.ReLU()),
        replaced(lambda m: m[0], "__class__", nn.Tanh),
        "class of module 0: ReLU when traced and Tanh now",
    ),
    "bytes": of_kind(lambda: bytearray(b"a"), lambda c: c[0], lambda c: c.__setitem__(0, 5)),
    "an array": of_kind(lambda: array.array("f", [2.0]), lambda c: c[0], lambda c: c.__setitem__(0, 5.0)),
    "a chain of dicts": of_kind(
        lambda: collections.ChainMap({}, {"k": 2.0}), lambda c: c["k"], lambda c: c.maps[1].update(k=3.0)
    ),
    "a UserDict": of_kind(lambda: collections.UserDict(k=2.0), lambda c: c["k"], lambda c: c.update(k=3.0)),
    "a UserList": of_kind(lambda: collections.UserList([2.0]), lambda c: c[0], lambda c: c.__setitem__(0, 3.0)),
    "a dict of a class": of_kind(lambda: AttributeDict(k=2.0), lambda c: c.k, lambda c: c.update(k=3.0)),
    "a dataclass made at run time": (
        lambda: net(lambda s, x: x * s.c.k, c=dataclasses.make_dataclass("Made", [("k", float)])(2.0)),
        replaced(lambda m: m.c, "k", 3.0),
        r"c\.k",
    ),
    "a parameter of a module in a list": (
        lambda: net(lambda s, x: s.layers[0](x), layers=[nn.Linear(4, 4)]),
        replaced(lambda m: m.layers[0], "weight", nn.Parameter(torch.ones(4, 4))),
        r"layers\[0\]\.weight: a tensor \[4, 4\] when traced",
    ),
    "the dtype of a parameter": (
        lambda: net(lambda s, x: x * 2 if s.fc.weight.dtype == torch.float32 else x),
        lambda m: m.double(),
        r"fc\.weight was float32 .* and is float64",
    ),
    "the dtype of the first parameter": (
        lambda: net(lambda s, x: x.to(next(s.parameters()).dtype)),
        lambda m: m.double(),
        r"fc\.weight was float32 .* and is float64",
    ),
    "the length of a buffer": (
        lambda: net(lambda s, x: x * len(s.shift)),
        replaced(lambda m: m, "shift", torch.ones(7)),
        r"shift was float32 \[4\] .* and is float32 \[7\]",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_call_is_refused_after_a_change_of(name):
    make, change, text = CHANGES[name]
    model = make()
    tr = st.trace(model, (X,))
    tr(X)
    change(model)
    with pytest.raises(st.errors.StateMismatchError, match=text):
        tr(X)


def test_what_may_change():
    """What the forward does not ask for, also of objects that it asks for something else."""
    model = net(lambda s, x: s.fc(x) * s.c.k, c=Config(k=2.0, name="a"))
    tr = st.trace(model, (X,))
    model.c.name, model.c.note, model.note, model.fc.note = "b", 1, 2, 3
    model.head = nn.Linear(4, 4)
    assert torch.equal(tr(X), model(X))


def refused(tr, text):
    with pytest.raises(st.errors.StateMismatchError, match=text):
        tr(X)


def test_a_context_variable():
    tr = st.trace(lambda x: x * LEVEL.get(), (X,))
    tr(X)
    token = LEVEL.set(3.0)
    refused(tr, differs("LEVEL: 2.0 when traced and 3.0 now"))
    LEVEL.reset(token)
    tr(X)


def test_a_context_variable_that_the_forward_sets():
    def forward(x):
        LEVEL.set(LEVEL.get() + 1)
        return x * LEVEL.get()

    tr = contextvars.copy_context().run(st.trace, forward, (X,))
    assert [(e.change, e.baked_in) for e in tr.side_effects] == [("LEVEL was 2.0 and became 3.0", True)]


def test_attributes_of_a_thread_local():
    LOCAL.scale = 2.0
    tr = st.trace(lambda x: x * LOCAL.scale * getattr(LOCAL, "extra", 1.0), (X,))
    tr(X)
    LOCAL.extra = 2.0
    refused(tr, differs("LOCAL.extra: missing when traced and 2.0 now"))
    del LOCAL.extra
    LOCAL.scale = 3.0
    refused(tr, differs("LOCAL.scale: 2.0 when traced and 3.0 now"))


def test_default_arguments_that_hold_something():
    class Net(nn.Module):
        def forward(self, x, options={"k": 2.0}):  # noqa: B006
            return x * options["k"]

    tr = st.trace(Net(), (X,))
    Net.forward.__defaults__[0]["k"] = 3.0
    refused(tr, r"the default arguments of .*Net\.forward are not those of the trace")


def test_a_module_in_a_variable_of_an_enclosing_function():
    layer = nn.Linear(4, 4)
    tr = st.trace(lambda x: layer(x), (X,))
    layer = nn.Linear(4, 4)
    refused(tr, differs("layer: Linear"))


def test_class_and_static_methods():
    class Scaled:
        scale = 2.0

        @staticmethod
        def plain(x):
            return x * Scaled.scale

        @classmethod
        def of_class(cls, x):
            return x * cls.scale

    traces = st.trace(Scaled.plain, (X,)), st.trace(Scaled.of_class, (X,))
    Scaled.scale = 3.0
    for tr in traces:
        refused(tr, r"Scaled\.scale: 2\.0 when traced and 3\.0 now")


SCALE = 2.0


def test_a_global_of_a_method_with_a_computed_name(monkeypatch):
    class Net(nn.Module):
        def run_a(self, x):
            return x * SCALE

        def forward(self, x):
            return getattr(self, "run_" + "a")(x)

    tr = st.trace(Net(), (X,))
    monkeypatch.setitem(globals(), "SCALE", 3.0)
    refused(tr, r"SCALE: 2\.0 when traced and 3\.0 now")


def test_a_list_of_a_class_that_the_forward_fills():
    class Net(nn.Module):
        seen = []  # noqa: RUF012

        def forward(self, x):
            self.seen.append(1)
            return x * len(self.seen)

    tr = st.trace(Net(), (X,))
    assert [(e.change, e.baked_in) for e in tr.side_effects] == [("Net.seen was [] and became [1]", True)]


def test_parameters_that_are_tied_no_more():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    tr = st.trace(model, (X,))
    model.load_state_dict({name: t * 2 for name, t in model.state_dict().items()})
    assert torch.equal(tr(X), model(X))
    model[1].weight = nn.Parameter(torch.ones(4, 4))
    refused(tr, r"0\.weight and 1\.weight as one tensor: True when traced and False now")


@pytest.mark.parametrize("forward", [lambda s, x: x + s.shift.add_(1), lambda s, x: x.add_(1) * s.shift])
def test_an_input_that_shares_memory_with_a_buffer_that_is_written(forward):
    model = net(forward)
    tr = st.trace(model, (torch.ones(4),))
    assert torch.equal(tr(torch.ones(4)), torch.full((4,), 3.0) if forward(model, torch.ones(4))[0] > 2 else X[0] * 2)
    with pytest.raises(st.errors.InputMismatchError, match=r"shares memory with shift of the model.*; pass x\.clone"):
        tr(model.shift.view(4))


@pytest.mark.parametrize(
    "go", [lambda s, x: [x := c(x) for c in s.children()][-1], lambda s, x: s.fc(x) * len(list(s.modules()))]
)
def test_a_module_that_is_added_where_the_forward_goes_through_all(go):
    model = net(go)
    tr = st.trace(model, (X,))
    model.extra = nn.Linear(4, 4)
    refused(tr, differs("_modules['extra']: missing when traced and Linear now"))


def test_settings_of_backends():
    cudnn, name = torch.backends.cudnn, "torch.backends.cudnn.benchmark"
    asking, not_asking = (st.trace(f, (X,)) for f in (lambda x: x * 2 if cudnn.benchmark else x, lambda x: x * 2))
    before = cudnn.benchmark
    with cudnn.flags(enabled=True, benchmark=not before):
        refused(asking, f"{name}, which .*: {before} when traced and {not before} now")
        not_asking(X)
    asking(X)


@pytest.mark.parametrize("make", [lambda x: torch.zeros(3), lambda x: torch.arange(3), lambda x: torch.tensor([1, 2])])
def test_the_default_device_of_a_new_tensor(make):
    tr, other = st.trace(make, (X,)), st.trace(lambda x: torch.zeros_like(x) + x.new_ones(1), (X,))
    tr(X)
    with torch.device("meta"):
        refused(tr, r"torch\.get_default_device\(\).*: device\(type='cpu'\) when traced")
        other(X)


def test_the_state_of_torch_s_generator():
    def restores(x):
        state = torch.get_rng_state()
        y = torch.rand(4)
        torch.set_rng_state(state)
        return x + y + torch.rand(4)

    def forks(x):
        with torch.random.fork_rng():
            return x + torch.rand(4)

    for forward in (restores, forks):
        with pytest.raises(st.errors.RandomStateError, match="seeds torch's random generator, or sets its state"):
            st.trace(forward, (X,))


def test_zero_has_a_sign():
    tr = st.trace(lambda x, n: x / n, (X, 0.0))
    with pytest.raises(st.errors.InputMismatchError, match=r"was 0\.0 when traced and is -0\.0 now"):
        tr(X, -0.0)


def effects(tr):
    return [(e.change, e.baked_in) for e in tr.side_effects]


def test_what_is_written_before_it_is_read_is_not_baked_in():
    """As `self.shape = x.shape`, also where another object has an attribute of this name."""

    def forward(self, x):
        self.shape = x.shape
        self.k = 3.0
        return self.fc(x) * self.k * x.shape[0] * self.shape[1]

    model = net(forward, k=2.0)
    tr = st.trace(model, (X,))
    assert effects(tr) == [
        ("self.k was 2.0 and became 3.0", False),
        ("self.shape was missing and became torch.Size([2, 4])", False),
    ]
    assert torch.equal(tr(X), model(X))
    assert torch.equal(tr(X), model(X))


def test_what_is_read_before_it_is_written_is():
    def forward(self, x):
        first = getattr(self, "seen", None) is None
        self.seen = 1
        return x * 2 if first else x

    assert effects(st.trace(net(forward), (X,))) == [("self.seen was missing and became 1", True)]


def test_a_counter_in_a_method_with_a_computed_name():
    class Net(nn.Module):
        n = 0

        def run_a(self, x):
            self.n += 1
            return x * self.n

        def forward(self, x):
            return getattr(self, "run_" + "a")(x)

    assert effects(st.trace(Net(), (X,))) == [("self.n was missing and became 1", True)]


@pytest.mark.parametrize("kind", ["forward_hook", "forward_pre_hook"])
def test_hooks_of_all_modules(kind):
    register = getattr(nn.modules.module, f"register_module_{kind}")
    hook = {"forward_hook": lambda m, x, y: y * 2, "forward_pre_hook": lambda m, x: (x[0] * 2,)}[kind]
    model = net(lambda s, x: s.fc(x))
    tr = st.trace(model, (X,))
    handle = register(hook)
    try:
        refused(tr, f"{kind.replace('_', ' ').replace('pre ', 'pre-')}s of all modules: 0 when traced and 1 now")
        hooked = st.trace(model, (X,))
        assert torch.allclose(hooked(X), model(X))
    finally:
        handle.remove()
    assert torch.equal(tr(X), model(X))
    refused(hooked, "of all modules: 1 when traced and 0 now")


FIRST_USE = """
import torch
import scopetrace as st

def forward(x):
    with torch.device("cpu"):
        torch.overrides.is_tensor_method_or_property(torch.Tensor.numpy)
        return x + torch.tensor([1.0])

st.trace(forward, (torch.ones(1),))
with torch.device("meta"):
    assert torch.tensor([1.0]).is_meta
assert torch.overrides.is_tensor_method_or_property(torch.Tensor.numpy)
"""


def test_what_torch_makes_once_knows_none_of_a_trace():
    subprocess.run([sys.executable, "-c", FIRST_USE], check=True, timeout=300)
