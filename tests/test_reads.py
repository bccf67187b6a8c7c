"""A trace holds for what its forward read: a call that would read something else is refused, and no other call is."""

import argparse
import contextlib
import dataclasses
import functools
import types

import pytest
import torch
import torch.nn.functional as F
from nets import Net, differs
from torch import nn

import scopetrace as st
from scopetrace.errors import ArgumentTypeError, InputMismatchError, SideEffectError, StateMismatchError
from scopetrace.program.boundary import CallBoundary

X = torch.randn(2, 4)


def agrees(tr, model, *args):
    """Whether a call of the trace has eager's values and `requires_grad`; raises what the call raises."""
    torch.manual_seed(0)
    actual = tr(*args)
    torch.manual_seed(0)
    expected = model(*args)
    torch.testing.assert_close(actual, expected)
    assert actual.requires_grad == expected.requires_grad
    return True


# Attributes ----------------------------------------------------------------------------------------------------------


class Scaled(nn.Module):
    """One of whose class some code asks for a `__dict__`: its attributes are then asked for in another way."""

    def __init__(self):
        super().__init__()
        self.scale = 2.0

    def forward(self, x):
        return x * self.scale


class Described(nn.Module):
    def __init__(self):
        super().__init__()
        self.config, self.scaled = Config(), Scaled()

    def forward(self, x):
        return self.scaled(x) + len(vars(self.config))


def test_a_read_names_its_line_where_code_asks_for_a_dict():
    model = Described()
    tr = st.trace(model, (X,))
    model.scaled.scale = 3.0
    with pytest.raises(StateMismatchError, match=r"scaled\.scale, .*in forward: return x \* self\.scale: 2\.0 when"):
        tr(X)


@dataclasses.dataclass
class Config:
    scale: float = 2.0
    unused: int = 1
    nested: object = None

    @property
    def double(self):
        return self.scale * 2


class Base(nn.Module):
    factor = 2.0
    other = 3.0

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.k = 2.0
        self.unread = 1.0
        self.config = Config(nested=Config())
        self.space = types.SimpleNamespace(scale=2.0)
        self.sizes = [1, 2]
        self.table = {"k": 2.0}
        self.act = F.relu
        self._private = 5.0

    def helper(self, x):
        return x * self.k


def set_to(path, value):
    """A change of `m.path`."""

    def change(m):
        *owners, name = path.split(".")
        setattr(functools.reduce(getattr, owners, m), name, value)

    return change


READ = {
    "attribute": (lambda m, x: x * m.k, set_to("k", 3.0), "k: 2.0 when traced and 3.0 now"),
    "in_method": (lambda m, x: m.helper(x), set_to("k", 3.0), "k: "),
    "private": (lambda m, x: x * m._private, set_to("_private", 3.0), "_private: "),
    "getattr": (lambda m, x: x * getattr(m, "k", 1), set_to("k", 3.0), "k: "),
    "type": (lambda m, x: x * m.k, set_to("k", 2), "k: 2.0 when traced and 2 now"),
    "config": (lambda m, x: x * m.config.scale, set_to("config.scale", 3.0), "config.scale: "),
    "nested": (lambda m, x: x * m.config.nested.scale, set_to("config.nested.scale", 3.0), "config.nested.scale: "),
    "property": (lambda m, x: x * m.config.double, set_to("config.scale", 3.0), "config.scale: "),
    "whole_config": (lambda m, x: x * m.config.scale, set_to("config", Config(3.0)), "config.scale: "),
    "namespace": (lambda m, x: x * m.space.scale, set_to("space.scale", 3.0), "space.scale: 2.0 when"),
    "list": (lambda m, x: x * m.sizes[1], lambda m: m.sizes.append(3), "sizes: [1, 2] when traced"),
    "dict": (lambda m, x: x * m.table["k"], lambda m: m.table.update(k=3.0), "table['k']: "),
    "function": (lambda m, x: m.act(x), set_to("act", torch.tanh), "act: "),
    "class": (lambda m, x: x * m.factor, lambda m: setattr(type(m), "factor", 4.0), "factor: "),
    "shadowed": (lambda m, x: x * m.factor, set_to("factor", 4.0), "factor of the model: that of its class when"),
    "of_child": (lambda m, x: m.fc(x) * m.fc.in_features, set_to("fc.in_features", 5), "fc.in_features: 4 when"),
    "training": (lambda m, x: F.dropout(x, 0.5, m.training), lambda m: m.eval(), "training: True when"),
    "deleted": (lambda m, x: x * getattr(m, "k", 1), lambda m: delattr(m, "k"), "k: 2.0 when traced and missing now"),
}


def net(forward):
    """A module of a class of its own with this forward."""
    return type("Model", (Base,), {"forward": lambda self, x: forward(self, x), "factor": 2.0})()


@pytest.mark.parametrize("name", READ)
def test_an_attribute_that_was_read_and_has_changed_is_refused(name):
    forward, change, text = READ[name]
    m = net(forward)
    tr = st.trace(m, (X,))
    assert agrees(tr, m, X)
    change(m)
    with pytest.raises(StateMismatchError, match=differs(text)):
        tr(X)


@pytest.mark.parametrize(
    "change",
    [
        set_to("unread", 3.0),
        set_to("config.unused", 3),
        set_to("other", 3),
        set_to("new", 3),
        lambda m: m.eval(),
        lambda m: m.sizes.append(1),
        set_to("k", float("2.0")),
        set_to("fc.weight", nn.Parameter(torch.randn(4, 4))),
    ],
)
def test_a_change_of_what_nobody_read_is_not_refused(change):
    m = net(lambda m, x: m.fc(x) * m.k * m.config.scale)
    tr = st.trace(m, (X,))
    change(m)
    assert agrees(tr, m, X)


def test_what_the_forward_wrote_itself_is_no_read():
    def forward(m, x):
        m.k = 5.0
        return x * m.k

    m = net(forward)
    tr = st.trace(m, (X,))
    m.k = 7.0
    assert agrees(tr, m, X)


class Times:
    def __init__(self):
        self.scale = 2.0

    def __call__(self, x):
        return x * self.scale


FORWARDS = {
    "object": lambda scaled: scaled,
    "method": lambda scaled: scaled.__call__,
    "partial": lambda scaled: functools.partial(lambda s, x: s(x), scaled),
}


@pytest.mark.parametrize("put", FORWARDS.values(), ids=FORWARDS)
def test_an_object_that_a_forward_put_on_a_module_holds(put):
    scaled, model = Times(), nn.Sequential(nn.Identity())
    model[0].forward = put(scaled)
    tr = st.trace(model, (X,))
    assert torch.equal(tr(X), tr(X))
    scaled.scale = 3.0
    with pytest.raises(StateMismatchError, match=r"0\.forward.*\.scale: 2.0 when traced and 3.0 now|forward.scale"):
        tr(X)


@pytest.mark.parametrize("name", ["weights", "_flat_weights", "_flat_weight_refs"])  # the last two are nn.LSTM's, too
def test_a_list_that_gets_another_tensor(name):
    model = Net(lambda m, x: x + getattr(m, name)[0])
    setattr(model, name, [nn.Parameter(torch.ones(4))])
    tr = st.trace(model, (X,))
    getattr(model, name)[0] = nn.Parameter(torch.zeros(4))
    with pytest.raises(StateMismatchError, match=rf"{name}\[0\], which the model reads"):
        tr(X)


@pytest.mark.parametrize(
    "layer, dims",
    [
        (nn.Dropout(0.5), 2),
        (nn.BatchNorm1d(4), 2),
        (nn.TransformerEncoderLayer(4, 2, 8), 3),
        (nn.LSTM(4, 4, 2, dropout=0.5), 3),
        (nn.RReLU(), 2),
        (nn.GRU(4, 4), 3),
    ],
)
def test_eval_and_train_after_the_trace(layer, dims):
    x = torch.randn(*(2,) * (dims - 1), 4)
    model = Net(lambda m, x: m.layer(x)[0] if isinstance(layer, nn.RNNBase) else m.layer(x), layer=layer)
    for mode in (True, False):
        tr = st.trace(model.train(mode), (x,))
        model.train(not mode)
        with pytest.raises(StateMismatchError, match=r"training.*: (True|False) when traced"):
            tr(x)
        model.train(mode)
        tr(x)


def test_eval_after_the_trace_of_layers_without_a_mode():
    m = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.LayerNorm(4))
    tr = st.trace(m, (X,))
    m.eval()
    assert agrees(tr, m, X)


# Globals and closures ------------------------------------------------------------------------------------------------

SCALE, UNREAD, OPTIONS = 2.0, 1.0, {"k": 2.0}
CONFIG = Config()
THIS = __import__("sys").modules[__name__]


def scaled(x):
    return x * SCALE


def scaling(x):
    return x * factor()


def factor():
    return SCALE


@contextlib.contextmanager
def given_in_a_block():
    yield SCALE


class Scaling:
    def __init__(self):
        self.first = SCALE

    def __enter__(self):
        return SCALE

    def __exit__(self, *args):
        pass

    def __mul__(self, other):
        return other * SCALE

    def __float__(self):
        return float(SCALE)

    def __bool__(self):
        return SCALE == 2

    @classmethod
    def made(cls):
        return cls()

    def scale(self):
        return SCALE


class ScalingLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.k = SCALE

    def forward(self, x):
        return x * self.k


class ScalingFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * SCALE

    @staticmethod
    def backward(ctx, gradient):
        return gradient * SCALE


def in_block(manager):
    def forward(x):
        with manager() as k:
            return x * k

    return forward


FUNCTIONS, OBJECTS = {"k": lambda: SCALE}, [Scaling()]

GLOBALS = {
    "context_manager": (in_block(given_in_a_block), lambda: set_global("SCALE", 3.0)),
    "class_of_blocks": (in_block(Scaling), lambda: set_global("SCALE", 3.0)),
    "new_object": (lambda x: x * Scaling().first, lambda: set_global("SCALE", 3.0)),
    "product": (lambda x: Scaling() * x, lambda: set_global("SCALE", 3.0)),
    "number": (lambda x: x * float(Scaling()), lambda: set_global("SCALE", 3.0)),
    "truth": (lambda x: x * 2 if Scaling() else x, lambda: set_global("SCALE", 3.0)),
    "class_method": (lambda x: x * Scaling.made().first, lambda: set_global("SCALE", 3.0)),
    "new_layer": (lambda x: ScalingLayer()(x), lambda: set_global("SCALE", 3.0)),
    "autograd_function": (lambda x: ScalingFunction.apply(x), lambda: set_global("SCALE", 3.0)),
    "function_in_dict": (lambda x: x * FUNCTIONS["k"](), lambda: set_global("SCALE", 3.0)),
    "object_in_list": (lambda x: x * OBJECTS[0].scale(), lambda: set_global("SCALE", 3.0)),
    "by_computed_name": (lambda x: x * getattr(OBJECTS[0], "scale")(), lambda: set_global("SCALE", 3.0)),  # noqa: B009
    "global": (lambda x: x * SCALE, lambda: set_global("SCALE", 3.0)),
    "in_helper": (lambda x: scaled(x), lambda: set_global("SCALE", 3.0)),
    "in_helper_without_ops": (lambda x: scaling(x), lambda: set_global("SCALE", 3.0)),
    "dict": (lambda x: x * OPTIONS["k"], lambda: set_global("OPTIONS", {"k": 3.0})),
    "object": (lambda x: x * CONFIG.scale, lambda: set_global("CONFIG", Config(3.0))),
    "module": (lambda x: x * THIS.SCALE, lambda: set_global("SCALE", 3.0)),
    "helper": (lambda x: scaled(x), lambda: set_global("scaled", lambda x: x * 3)),
    "comprehension": (lambda x: sum(x * SCALE for _ in range(2)), lambda: set_global("SCALE", 3.0)),
    "no_grad": (torch.no_grad()(lambda x: x * SCALE), lambda: set_global("SCALE", 3.0)),
    "partial": (functools.partial(lambda k, x: x * SCALE * k, 2), lambda: set_global("SCALE", 3.0)),
}


def set_global(name, value):
    globals()[name] = value


@pytest.fixture
def kept_globals():
    saved = dict(globals())
    yield
    globals().update(saved)


@pytest.mark.parametrize("name", GLOBALS)
def test_a_global_that_was_read_and_has_changed_is_refused(name, kept_globals):
    fn, change = GLOBALS[name]
    tr = st.trace(fn, (X,))
    set_global("UNREAD", 5.0)
    assert agrees(tr, fn, X)
    change()
    with pytest.raises(StateMismatchError, match="when traced and"):
        tr(X)


def test_a_variable_of_an_enclosing_function():
    k, unread = 2.0, 1.0

    def helper(x):
        return x * k

    def fn(x):
        return helper(x), unread * 0 if x.dim() == 7 else None

    def model(x):
        return helper(x)

    tr = st.trace(model, (X,))
    unread = 2.0
    assert agrees(tr, model, X) and fn
    k = 3.0
    with pytest.raises(StateMismatchError, match=r"k: 2.0 when traced and 3.0 now"):
        tr(X)


# Facts of inputs -----------------------------------------------------------------------------------------------------


def written(x):
    x = x.clone()
    x.add_(1)
    return x


FACTS = {
    "stride": (lambda x: x * x.stride(0), lambda x: x.t().contiguous().t()),
    "strides": (lambda x: x * x.stride()[1], lambda x: x.t().contiguous().t()),
    "is_contiguous": (lambda x: x * (2 if x.is_contiguous() else 3), lambda x: x.t().contiguous().t()),
    "storage_offset": (lambda x: x * (x.storage_offset() + 1), lambda x: torch.cat([x, x])[2:]),
    "requires_grad": (lambda x: x * (2 if x.requires_grad else 3), lambda x: x.clone().requires_grad_()),
    "is_leaf": (lambda x: x * (2 if x.is_leaf else 3), lambda x: x.clone().requires_grad_() * 1),
    "_version": (lambda x: x * (x._version + 1), written),
    "of_result": (lambda x: (y := x * 2) * y.stride(0), lambda x: x.t().contiguous().t()),
    "grad_of_result": (lambda x: x * (2 if (x * 2).requires_grad else 3), lambda x: x.clone().requires_grad_()),
    "is_inference": (lambda x: x * (2 if x.is_inference() else 3), torch.inference_mode()(torch.clone)),
}


@pytest.mark.parametrize("name", FACTS)
def test_a_fact_of_an_input_that_was_read_and_differs_is_refused(name):
    fn, other = FACTS[name]
    for first, second in ((X.clone(), other(X)), (other(X), X.clone())):
        tr = st.trace(fn, (first,))
        assert agrees(tr, fn, first)
        with pytest.raises((InputMismatchError, StateMismatchError)):
            tr(second)


@pytest.mark.parametrize("name", FACTS)
def test_a_fact_of_an_input_that_nobody_read_does_not_matter(name):
    m = nn.Linear(4, 4)
    tr = st.trace(m, (X.clone(),))
    with torch.set_grad_enabled(name != "is_inference"):
        assert agrees(tr, m, FACTS[name][1](X))


def test_a_parameter_that_is_frozen_after_its_requires_grad_was_read():
    m = Net(lambda m, x: m.fc(x) * (2 if m.fc.weight.requires_grad else 3), fc=nn.Linear(4, 4))
    tr = st.trace(m, (X,))
    m.requires_grad_(False)
    with pytest.raises(StateMismatchError, match=r"fc.weight.requires_grad.*: True when traced and False now"):
        tr(X)


class AsksForTied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)

    def forward(self, x):
        return self.head(self.embed(x)) * (2 if self.embed.weight is self.head.weight else 1)


def test_parameters_that_become_one_tensor_are_named():
    model = AsksForTied()
    tr = st.trace(model, (torch.ones(1, 2),))
    model.head.weight = model.embed.weight
    message = r"one tensor: \(\) when traced and \('embed.weight and head.weight',\) now"
    with pytest.raises(StateMismatchError, match=message):
        tr(torch.ones(1, 2))


# State of torch ------------------------------------------------------------------------------------------------------


class Blocks(nn.Module):
    """A block with another grad mode inside."""

    def __init__(self, block):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self._block = block

    def forward(self, x):
        y = self.a(x)
        with self._block():
            z = self.b(y)
        return z + y if self._block is torch.inference_mode else z + self.a(z)


BLOCKS = [contextlib.nullcontext, torch.no_grad, torch.enable_grad, torch.inference_mode]


@pytest.mark.sample(3)
@pytest.mark.parametrize("call", BLOCKS[:3])
@pytest.mark.parametrize("trace", BLOCKS[:3])
@pytest.mark.parametrize("inner", BLOCKS)
def test_grad_mode_of_trace_and_call(inner, trace, call):
    m = Blocks(inner)
    with trace():
        tr = st.trace(m, (X,))
    with call():
        try:
            assert agrees(tr, m, X)
            assert torch.is_grad_enabled() == (call is not torch.no_grad)
        except StateMismatchError as error:
            assert inner is not contextlib.nullcontext and (trace is torch.no_grad) != (call is torch.no_grad)
            assert "torch.is_grad_enabled()" in str(error)


def test_a_model_that_asks_for_the_grad_mode():
    def fn(x):
        return x * (2 if torch.is_grad_enabled() else 3)

    tr = st.trace(fn, (X,))
    with torch.no_grad(), pytest.raises(StateMismatchError, match=r"torch.is_grad_enabled\(\).*True when traced"):
        tr(X)


@pytest.mark.parametrize("traced", [False, True])
def test_autocast_at_the_call(traced):
    m = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    with torch.autocast("cpu", enabled=traced):
        tr = st.trace(m, (X,))
        tr(X)
    with (
        torch.autocast("cpu", enabled=not traced),
        pytest.raises(StateMismatchError, match=r"torch.autocast.*bfloat16"),
    ):
        tr(X)


def test_autocast_where_no_op_depends_on_it():
    def fixed(m, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return m.fc(x)

    for fn in (lambda x: x.relu() + 1, Net(fixed, fc=nn.Linear(4, 4))):
        tr = st.trace(fn, (X,))
        with torch.autocast("cpu"):
            assert agrees(tr, fn, X)


@pytest.fixture
def double():
    def switch():
        torch.set_default_dtype(torch.float64)

    yield switch
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: torch.zeros(3),
        lambda x: x.long() * 2.5,
        lambda x: x.long() / 2,
        lambda x: torch.arange(3.0),
        lambda x: x * torch.tensor([1.5, 2.5, 3.5, 4.5]),
        lambda x: x * (2 if torch.get_default_dtype() == torch.float32 else 3),
    ],
)
def test_default_dtype_at_the_call(fn, double):
    tr = st.trace(fn, (X,))
    double()
    with pytest.raises(StateMismatchError, match=r"torch.get_default_dtype\(\).*torch.float32 when traced"):
        tr(X)


def test_default_dtype_where_nothing_depends_on_it(double):
    def fn(x):
        return x * 2.0 + torch.zeros(4, dtype=torch.float32) + x.long().to(torch.float32)

    tr = st.trace(fn, (X,))
    double()
    assert agrees(tr, fn, X)


# All ways to run a trace ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "run",
    [
        lambda tr, x: tr(x),
        lambda tr, x: tr.run(tr.graph_module, x),
        lambda tr, x: tr.outline(nn.Linear)(x),
        lambda tr, x: __import__("copy").deepcopy(tr)(x),
        lambda tr, x: __import__("pickle").loads(__import__("pickle").dumps(tr))(x),
    ],
)
def test_every_way_to_run_a_trace_checks(run):
    m = Net(lambda m, x: m.fc(x) * x.stride(0), fc=nn.Linear(4, 4))
    tr = st.trace(m, (X,))
    torch.testing.assert_close(run(tr, X), m(X))
    with pytest.raises(InputMismatchError, match=r"args\[0\].stride\(0\).*: 4 when traced and 1 now"):
        run(tr, X.t().contiguous().t())


# What was read ---------------------------------------------------------------------------------------------------

FACTOR = 2.0


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = 3.0
        self.drop = nn.Dropout()

    def forward(self, x):
        if x.is_contiguous():
            x = x * FACTOR
        return self.drop(x) * self.scale


def test_what_the_model_read_is_among_the_specializations():
    tr = st.trace(nn.Sequential(Reader()), (X,))
    assert [(s.expression, s.value, s.op, s.module, s.fqn) for s in tr.specializations] == [
        ("input.is_contiguous()", True, "input", "Sequential/Reader[0]", "0"),
        ("FACTOR", 2.0, "global", "Sequential", ""),
        ("0.scale", 3.0, "attribute", "Sequential/Reader[0]", "0"),
    ]
    assert "test_reads.py:" in tr.specializations[2].source


def test_a_global_that_the_root_module_reads(monkeypatch):
    model = Reader().eval()
    tr = st.trace(model, (X,))
    monkeypatch.setitem(globals(), "FACTOR", 5.0)
    with pytest.raises(StateMismatchError, match=r"FACTOR: 2\.0 when traced and 5\.0 now"):
        tr(X)


def test_sources_are_those_of_the_model():
    model = nn.Sequential(nn.BatchNorm1d(4))
    tr = st.trace(model, (X,))
    model.eval()
    with pytest.raises(StateMismatchError) as error:
        tr(X)
    assert st.__file__.removesuffix("__init__.py") not in str(error.value)


# Callables and arguments ---------------------------------------------------------------------------------------------


class Scaler:
    def __init__(self):
        self.scale = 2.0
        self.mode = "a"

    def __call__(self, x):
        return x * self.scale

    def method(self, x):
        return x * self.scale


def test_attributes_of_a_callable_object_of_its_bound_method_and_of_a_partial():
    for make in (lambda s: s, lambda s: s.method, lambda s: functools.partial(lambda x, s: x * s.scale, s=s)):
        scaler = Scaler()
        tr = st.trace(make(scaler), (X,))
        tr(X)
        scaler.scale = 3.0
        with pytest.raises(StateMismatchError, match=r"scale: 2\.0 when traced"):
            tr(X)


def test_an_object_among_the_arguments():
    scaler = Scaler()
    tr = st.trace(lambda x, s: x * 2 if s.mode == "a" else x, (X, scaler))
    tr(X, scaler)
    scaler.mode = "b"
    with pytest.raises(StateMismatchError, match=r"s\.mode: 'a' when traced and 'b' now"):
        tr(X, scaler)


def test_a_namespace():
    options = argparse.Namespace(scale=2.0, unread=1)
    tr = st.trace(lambda x: x * options.scale, (X,))
    options.unread = 2
    tr(X)
    options.scale = 3.0
    with pytest.raises(StateMismatchError, match=r"options\.scale"):
        tr(X)


def test_an_iterator_gives_another_item_to_each_call():
    numbers = iter([1.0, 2.0, 3.0])
    tr = st.trace(lambda x: x * next(numbers), (X,))
    tr(X)
    with pytest.raises(SideEffectError, match=r"next\(numbers\) gave an item"):
        tr(X)


@pytest.mark.parametrize(("model", "what"), [(nn.Linear, "the class Linear"), (3, "a int"), (None, "a NoneType")])
def test_what_is_no_model(model, what):
    with pytest.raises(ArgumentTypeError, match=f"and is {what}"):
        st.trace(model, (X,))


# What code of torch reads of modules that it does not call ------------------------------------------------------------

OF_UNCALLED = {
    "eps": lambda layer: setattr(layer.norm1, "eps", 0.5),
    "heads": lambda layer: setattr(layer.self_attn, "num_heads", 1),
    "hook": lambda layer: layer.linear1.register_forward_hook(lambda *_: None),
    "pre_hook": lambda layer: layer.self_attn.register_forward_pre_hook(lambda *_: None),
    "swapped": lambda layer: setattr(layer, "linear1", nn.Linear(4, 8)),
}


@pytest.mark.parametrize("name", OF_UNCALLED)
def test_the_fast_path_of_a_transformer_reads_what_it_does_not_call(name):
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    net = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).eval()
    x = torch.randn(2, 5, 4)
    with torch.no_grad():
        tr = st.trace(net, (x,))
        net.layers[2].dropout.p = 0.9  # which is off
        torch.testing.assert_close(tr(x), net(x))
        OF_UNCALLED[name](net.layers[2])
        with pytest.raises(StateMismatchError, match=r"layers\.2"):
            tr(x)


# Objects and functions that are reached in other ways ----------------------------------------------------------------


class Slotted:
    __slots__ = ("k",)

    def __init__(self):
        self.k = 2.0


class Holder:
    def __init__(self):
        self.k = 2.0


def decorated(fn):
    @functools.wraps(fn)
    def wrapper(*args):
        return fn(*args) * SCALE

    return wrapper


class TwoTimes:
    k = 2.0


DOUBLED, SCALINGS, KINDS = decorated(lambda x: x + 1), {"scaled": scaled}, {"two": TwoTimes}


def holding(x):
    """A change of `k` in what the model holds, and its forward."""
    return lambda m, y: y * x(m).k, lambda m: setattr(x(m), "k", 3.0)


REACHED = {
    "slots": holding(lambda m: m.slots),
    "in_a_list": holding(lambda m: m.held[0]),
    "in_a_dict": holding(lambda m: m.held[1]["a"]),
    "namespace_in_a_namespace": holding(lambda m: m.names.inner),
    "attribute_of_a_layer": holding(lambda m: m.fc),
    "class_in_a_table": (lambda m, x: x * KINDS["two"].k, lambda m: setattr(TwoTimes, "k", 3.0)),
    "decorated_function": (lambda m, x: DOUBLED(x), lambda m: set_global("SCALE", 3.0)),
    "function_in_a_table": (lambda m, x: SCALINGS["scaled"](x), lambda m: set_global("SCALE", 3.0)),
    "p_of_dropout": (lambda m, x: m.drop(x), set_to("drop.p", 0.3)),
}


@pytest.mark.parametrize("name", REACHED)
def test_a_read_of_what_is_reached_in_another_way(name, kept_globals):
    forward, change = REACHED[name]
    space = types.SimpleNamespace(inner=types.SimpleNamespace(k=2.0))
    held = [Holder(), {"a": argparse.Namespace(k=2.0)}]
    m = Net(forward, fc=nn.Linear(4, 4), drop=nn.Dropout(), names=space, held=held, slots=Slotted())
    m.fc.k = m.fc.unread = 2.0
    tr = st.trace(m, (X,))
    m.fc.unread = 3.0
    assert agrees(tr, m, X)
    change(m)
    with pytest.raises(StateMismatchError, match="when traced and"):
        tr(X)


def test_what_equal_layers_read_is_printed_once():
    layer = lambda: Net(lambda m, x: x * m.scale, scale=2.0)  # noqa: E731
    found = st.trace(nn.Sequential(layer(), layer(), layer()), (torch.ones(2),)).specializations
    assert [s.expression for s in found if "scale" in s.expression] == [f"{i}.scale" for i in range(3)]
    rows = [line.split() for line in str(found).splitlines()]
    (line,) = [row[-1] for row in rows if row[:-1] == ["attribute", "*.scale", "2.0", "in", "3", "places"]]
    assert line == f"test_reads.py:{layer.__code__.co_firstlineno}"
    assert "*.scale" in found._repr_html_()
    assert str(type(found)()) == "nothing is fixed"


class Sized:
    """An object of which code asks a size, that of its class, by a method of the class."""

    size = 3

    def __init_subclass__(cls):
        cls.size = 4

    @classmethod
    def of(cls):
        return cls.size


def test_what_no_line_is_known_to_read_is_printed_behind_the_table():
    trace = st.trace(Net(lambda m, x: x * m.sized.of() * m.k, sized=Sized(), k=2.0), (torch.ones(2),))
    assert "__init_subclass__" not in str(trace.specializations)
    rows, _, others = str(trace.specializations).partition("also as when traced:")
    assert "Sized" not in rows.replace("Sized()", "")
    assert [line.split()[1] for line in rows.splitlines() if line.startswith("attribute")] == ["sized", "k"]
    assert "Sized.size = 3" in others
    assert others.count("Sized.of") == 1


def test_a_printed_table_names_all_that_a_call_is_checked_for():
    m = net(lambda m, x: m.fc(x) * m.k * SCALE if x.is_contiguous() else x)
    trace = st.trace(m, (X,))
    text = " ".join(str(trace.specializations).split())
    names = [name for read in trace._program.tape.guards for name in read.labels()]
    assert len(names) > 10 and all(name in text for name in names)


class class_property(property):
    """As in transformers: each who asks gets an object of its own."""

    def __get__(self, x, kind=None):
        return self.fget(kind)


class Configured(nn.Module):
    SCALE = 2

    @class_property
    def config(cls):
        return {"scale": cls.SCALE}

    def __init__(self):
        super().__init__()
        self.tags = {"a", "b"}

    def forward(self, x):
        return x * self.config["scale"] + len(self.tags)


def test_what_is_as_it_was_is_not_compared_by_value_in_each_call(monkeypatch):
    net, x = Configured(), torch.ones(2)
    tr = st.trace(net, (x,))
    tr(x)  # makes the code of calls
    monkeypatch.setattr(CallBoundary, "check_state", lambda self: pytest.fail("it is as it was"))
    assert torch.equal(tr(x), net(x))
    monkeypatch.undo()
    net.tags.add("c")
    with pytest.raises(st.StateMismatchError, match="tags"):
        tr(x)
    net.tags.remove("c")
    monkeypatch.setattr(Configured, "SCALE", 3)
    with pytest.raises(st.StateMismatchError, match="SCALE"):
        tr(x)
