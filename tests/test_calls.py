"""Module calls: what went in, what came out, under which names."""

import collections
import dataclasses
import functools

import pytest
import torch
from torch import nn

import scopetrace as st

F = nn.functional


def values(x):
    """Nodes as their names, so that a structure reads."""
    if isinstance(x, torch.fx.Node):
        return f"%{x.name}"
    if isinstance(x, (list, tuple)):
        return type(x)(values(i) for i in x)
    if isinstance(x, dict):
        return {k: values(v) for k, v in x.items()}
    return x


def call_of(tr, fqn, index=0):
    return next(c for c in tr.calls if c.fqn == fqn and c.index == index)


class Inner(nn.Module):
    def forward(self, x, scale=2.0, *rest, mask=None, **options):
        return x * scale


class Outer(nn.Module):
    def __init__(self, call):
        super().__init__()
        self.inner = Inner()
        self.call = call

    def forward(self, x, y):
        return self.call(self.inner, x, y)


def inner_arguments(call):
    tr = st.trace(Outer(call), (torch.randn(2), torch.randn(2)))
    tr.lint()
    return values(call_of(tr, "inner").arguments)


def test_defaults_are_shown():
    assert inner_arguments(lambda m, x, y: m(x)) == {
        "x": "%x",
        "scale": 2.0,
        "rest": (),
        "mask": None,
        "options": {},
    }


def test_kwargs_varargs_and_objects_stay_as_passed():
    marker = object()
    got = inner_arguments(lambda m, x, y: m(y, 3, x, "text", mask=x, deep={"a": [x, None, 1]}, obj=marker))
    assert got == {
        "x": "%y",
        "scale": 3,
        "rest": ("%x", "text"),
        "mask": "%x",
        "options": {"deep": {"a": ["%x", None, 1]}, "obj": marker},
    }
    assert got["options"]["obj"] is marker


def test_a_list_changed_after_the_call_is_recorded_as_it_was():
    def call(m, x, y):
        items = [x]
        out = m(x, rest=items)
        items.append(y)
        return out

    assert inner_arguments(call)["options"] == {"rest": ["%x"]}


def test_order_parents_and_indices_of_repeated_calls():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(2, 2)
            self.b = nn.Sequential(self.a, nn.ReLU())

        def forward(self, x):
            return self.b(self.a(self.a(x)))

    tr = st.trace(Net(), (torch.randn(1, 2),))
    assert [(c.fqn, c.index, c.parent and c.parent.fqn) for c in tr.calls] == [
        ("", 0, None),
        ("a", 0, ""),
        ("a", 1, ""),
        ("b", 0, ""),
        ("b.0", 2, "b"),  # the third call of this Linear, under the name that it has here
        ("b.1", 0, "b"),
    ]
    assert [c.fqn for c in tr.calls[0].children] == ["a", "a", "b"]
    assert values(call_of(tr, "b").arguments) == {"input": "%linear_1"}
    assert values(call_of(tr, "b.0", 2).outputs) == "%linear_2"
    assert [n.name for n in call_of(tr, "b").nodes] == ["linear_2", "relu"]


def test_attributes_of_the_module_at_the_call():
    tr = st.trace(nn.LayerNorm(3, eps=0.5).eval(), (torch.randn(2, 3),))
    assert tr.calls[0].attributes == {
        "training": False,
        "normalized_shape": (3,),
        "eps": 0.5,
        "elementwise_affine": True,
    }


@dataclasses.dataclass
class Pair:
    first: torch.Tensor
    second: object = None
    name: str = "pair"


Point = collections.namedtuple("Point", "x y")


class Returns(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.make = make

    def forward(self, x):
        return self.make(x)


@pytest.mark.parametrize(
    "make",
    [
        lambda x: Pair(x + 1, [x * 2, None, "text", 3]),
        lambda x: Point(x + 1, {"k": (x, x)}),
        lambda x: {"a": None, "b": [x, (x + 1, 4)]},
        lambda x: collections.OrderedDict(a=x, b=x + 1),
        lambda x: None,
        lambda x: (x, 7, "s", [], {}),
        lambda x: x,
    ],
)
def test_results_keep_their_structure(make):
    x = torch.randn(2)
    tr = st.trace(Returns(make), (x,))
    tr.check((x,))
    expected, actual = make(x), tr(x)
    assert type(actual) is type(expected)
    assert repr(actual) == repr(expected)


def test_a_dataclass_passed_between_modules():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.make = Returns(lambda x: Pair(x + 1, {"k": x * 2}))
            self.use = Returns(lambda p: p.first + p.second["k"])

        def forward(self, x):
            return self.use(self.make(x))

    tr = st.trace(Net(), (torch.randn(2),))
    passed = call_of(tr, "use").arguments["x"]
    assert isinstance(passed, Pair) and passed.name == "pair"
    assert values([passed.first, passed.second]) == ["%add", {"k": "%mul"}]
    assert passed is not call_of(tr, "make").outputs


def test_an_argument_returned_unchanged_and_an_unused_one():
    class Skip(nn.Module):
        def forward(self, x, unused):
            return x

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.skip = Skip()

        def forward(self, x):
            return self.skip(x, x * 2) + 1

    tr = st.trace(Net(), (torch.randn(2),))
    call = call_of(tr, "skip")
    assert values(call.arguments) == {"x": "%x", "unused": "%mul"}
    assert values(call.outputs) == "%x"
    assert call.nodes == []


def test_forward_called_directly_is_a_call():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(2, 2)

        def forward(self, x):
            return self.fc.forward(x) + self.fc(x)

    tr = st.trace(Net(), (torch.randn(1, 2),))
    assert [(c.fqn, c.index) for c in tr.calls] == [("", 0), ("fc", 0), ("fc", 1)]
    assert [str(tr.scope_of(n)) for n in tr.graph_module.graph.nodes if n.op == "call_function"] == [
        "Net/Linear[fc]",
        "Net/Linear[fc]",
        "Net",
    ]


def test_a_forward_that_is_a_static_method_is_a_call():
    class Swish(nn.Module):
        @staticmethod
        def forward(x):
            return x * torch.sigmoid(x)

    net, x = nn.Sequential(Swish(), Swish()), torch.randn(2)
    tr = st.trace(net, (x,))
    assert [(c.fqn, [*c.arguments]) for c in tr.calls] == [("", ["input"]), ("0", ["x"]), ("1", ["x"])]
    assert torch.equal(tr(x), net(x))


def test_super_forward_is_the_same_call():
    class Double(nn.Linear):
        def forward(self, x):
            return super().forward(x) * 2

    tr = st.trace(nn.Sequential(Double(2, 2)), (torch.randn(1, 2),))
    assert [c.fqn for c in tr.calls] == ["", "0"]
    assert len([n for n in tr.calls[1].nodes if n.op == "call_function"]) == 2


def test_a_module_that_is_not_in_the_tree():
    outside = nn.Linear(2, 2)
    tr = st.trace(Returns(lambda x: outside(x)), (torch.randn(1, 2),))
    assert [(c.fqn, c.module) for c in tr.calls][1] == (None, outside)
    tr.check((torch.randn(1, 2),))


def test_functions_methods_and_partials_are_callables_too():
    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU())

    def run(x, *, times=1):
        for _ in range(times):
            x = net(x)
        return x

    x = torch.randn(1, 2)
    tr = st.trace(run, (x,), {"times": 2})
    assert [(c.fqn, c.index) for c in tr.calls] == [
        ("", 0),
        ("net", 0),
        ("net.0", 0),
        ("net.1", 0),
        ("net", 1),
        ("net.0", 1),
        ("net.1", 1),
    ]
    assert values(tr.calls[0].arguments) == {"x": "%x", "times": 2}
    assert tr.scope.path == "run"
    torch.testing.assert_close(tr(x, times=2), run(x, times=2))

    partial = st.trace(functools.partial(run, times=1), (x,))
    torch.testing.assert_close(partial(x), run(x))
    assert partial.scope.path == "run"
    layer = nn.Bilinear(3, 3, 2)
    of_module = st.trace(functools.partial(layer, input2=torch.ones(2, 3)), (torch.ones(2, 3),))
    torch.testing.assert_close(of_module(torch.ones(2, 3)), layer(torch.ones(2, 3), torch.ones(2, 3)))
    assert [call.fqn for call in of_module.calls[1:]] == ["func"]


def test_a_bound_method_has_the_names_of_its_module():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(2, 2)

        def encode(self, x):
            return self.fc(x)

    net = Net()
    tr = st.trace(net.encode, (torch.randn(1, 2),))
    assert [(c.fqn, str(c.scope)) for c in tr.calls] == [("", "Net"), ("fc", "Net/Linear[fc]")]
    assert values(tr.calls[0].arguments) == {"x": "%x"}


@dataclasses.dataclass
class Trainer:
    model: nn.Module
    more: list


NETS = {"a": nn.Linear(4, 4), "b": [nn.Linear(4, 4)]}
GIVEN = {
    "an argument": (lambda model, x: model(x), (nn.Linear(4, 4),), {}, ["model"]),
    "a keyword": (lambda x, *, model: model(x), (), {"model": nn.Linear(4, 4)}, ["model"]),
    "several": (
        lambda *models: models[0](models[1](models[2])),
        (nn.Tanh(), nn.Linear(4, 4)),
        {},
        ["models.1", "models.0"],
    ),
    "one twice": (lambda p, q, x: p(q(x)), (NETS["a"], NETS["a"]), {}, ["p", "p"]),
    "a dict": (lambda nets, x: nets["a"](nets["b"][0](x)), (NETS,), {}, ["nets.b.0", "nets.a"]),
    "an object": (
        lambda trainer, x: trainer.model(trainer.more[0](x)),
        (Trainer(nn.Tanh(), [nn.Linear(4, 4)]),),
        {},
        ["trainer.more.0", "trainer.model"],
    ),
    "beside one of a closure": (lambda model, x: model(NETS["a"](x)), (nn.Tanh(),), {}, ["NETS.a", "model"]),
}


@pytest.mark.parametrize("given", GIVEN)
def test_modules_among_the_arguments_are_named_after_them(given):
    run, modules, kwargs, names = GIVEN[given]
    x = torch.randn(2, 4)
    tr = st.trace(run, (*modules, x), kwargs)
    assert [call.fqn for call in tr.calls if call.fqn] == names
    assert not any("constant" in str(node.target) for node in tr.graph_module.graph.nodes)
    with torch.no_grad():
        for model in leaves(modules, kwargs):
            model.weight *= 2
    assert torch.equal(tr(*modules, x, **kwargs), run(*modules, x, **kwargs))


class Holder:
    net = nn.Linear(4, 4)


BOUND, DEEP = nn.Linear(4, 4).forward, [[collections.deque([nn.Linear(4, 4)])]]
VARIABLES = {
    "Holder.net": (lambda x: Holder.net(x), Holder.net),
    "BOUND": (lambda x: BOUND(x), BOUND.__self__),
    "DEEP.0.0.0": (lambda x: DEEP[0][0][0](x), DEEP[0][0][0]),
}


@pytest.mark.parametrize("name", VARIABLES)
def test_modules_of_a_function_are_named_after_its_variables(name):
    run, module = VARIABLES[name]
    x = torch.randn(2, 4)
    tr = st.trace(run, (x,))
    assert next(node.target for node in tr.graph_module.graph.nodes if node.op == "get_attr") == f"{name}.weight"
    module.weight = nn.Parameter(torch.ones(4, 4))
    assert torch.equal(tr(x), run(x))


def leaves(*given):
    """The linear layers in arguments."""
    found = torch.utils._pytree.tree_leaves(given)
    found += [m for x in found if isinstance(x, Trainer) for m in x.more]
    return {id(m): m for m in found if isinstance(m, nn.Linear)}.values()


def test_another_module_as_argument_is_refused():
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    tr = st.trace(lambda model, x: model(x), (model, x))
    with pytest.raises(st.InputMismatchError, match=r"argument 0 was Linear.* is another one now"):
        tr(nn.Linear(4, 4), x)


def test_parameters_of_a_parent_in_a_child_and_tensors_from_closures():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(2))
            self.table = torch.randn(2)  # a plain attribute
            self.child = Returns(lambda x: x * self.w + closed + self.table)

        def forward(self, x):
            return self.child(x)

    closed = torch.ones(2)
    net = Net()
    tr = st.trace(net, (torch.randn(2),))
    nodes = {n.target for n in tr.graph_module.graph.nodes if n.op == "get_attr"}
    assert nodes == {"w", "table", "_tensor_constant0"}
    assert tr.graph_module.w is net.w
    tr.check((torch.randn(2),))
    closed.add_(1)  # held, not copied
    tr.check((torch.randn(2),))


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint(reentrant):
    from torch.utils.checkpoint import checkpoint

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(2, 2)

        def forward(self, x):
            return checkpoint(self.fc, x, use_reentrant=reentrant) * 2

    x = torch.randn(1, 2, requires_grad=True)
    tr = st.trace(Net(), (x,))
    assert [c.fqn for c in tr.calls] == ["", "fc"]
    assert values(call_of(tr, "fc").arguments) == {"input": "%x"}
    torch.testing.assert_close(tr(x), tr.model(x))


def test_an_exception_caught_outside_the_call():
    class Fails(nn.Module):
        def forward(self, x):
            y = x + 1
            raise ValueError(str(y.shape))

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fails = Fails()
            self.fc = nn.Linear(2, 2)

        def forward(self, x):
            try:
                return self.fails(x)
            except ValueError:
                return self.fc(x)

    tr = st.trace(Net(), (torch.randn(1, 2),))
    tr.lint()
    assert [(c.fqn, type(c.raised)) for c in tr.calls] == [
        ("", type(None)),
        ("fails", ValueError),
        ("fc", type(None)),
    ]
    assert call_of(tr, "fails").outputs is None
    assert str(call_of(tr, "fc").scope) == "Net/Linear[fc]"


def test_scripted_and_parametrized_submodules():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.script = torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
            self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))

        def forward(self, x):
            return self.normed(self.script(x))

    net, x = Net(), torch.randn(1, 2)
    tr = st.trace(net, (x,))
    tr.check((x,))
    names = [c.fqn for c in tr.calls]
    assert names[:2] == ["", "script"] and "normed" in names
    assert "normed.parametrizations.weight" in names


def test_a_scripted_module_that_torchscript_has_optimized_keeps_its_gradients():
    for wrap in (lambda m: m, nn.Sequential):
        net, x = wrap(torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.Tanh()))), torch.randn(1, 2)
        for _ in range(4):
            net(x)
        tr = st.trace(net, (x,))
        parameters = list(net.parameters())
        grads = [torch.autograd.grad(f(x).sum(), parameters) for f in (tr, net)]
        torch.testing.assert_close(*grads)


class Scripted(torch.jit.ScriptModule):
    """Its forward is Python, and calls a scripted method."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(2, 2)

    @torch.jit.script_method
    def scripted(self, x):
        return self.fc(x).sin()

    def forward(self, x):
        return self.scripted(x) * 2


def test_a_scripted_method_under_a_forward_in_python():
    for runs_before in (0, 4):
        net, x = nn.Sequential(nn.Sequential(Scripted(), Scripted()), nn.Sequential(Scripted())), torch.randn(1, 2)
        for _ in range(runs_before):
            net(x).sum().backward()
        net.zero_grad()
        tr = st.trace(net, (x,))
        tr.check((x,))
        grads = [torch.autograd.grad(f(x).sum(), list(net.parameters())) for f in (tr, net)]
        torch.testing.assert_close(*grads)
        assert [c.fqn for c in tr.calls][:3] == ["", "0", "0.0"]


@pytest.mark.parametrize("how", ["module.compile()", "torch.compile(module)", "torch.compile(function)"])
def test_compiled_parts_run_their_python(how):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(2, 2)
            if how == "module.compile()":
                self.fc.compile(backend="eager")
            elif how == "torch.compile(module)":
                self.fc = torch.compile(self.fc, backend="eager")
            self.act = torch.compile(torch.relu, backend="eager") if "function" in how else torch.relu

        def forward(self, x):
            return self.act(self.fc(x))

    net, x = Net(), torch.randn(1, 2)
    tr = st.trace(net, (x,))
    targets = [n.target for n in tr.graph_module.graph.nodes if n.op == "call_function"]
    assert targets == [torch.ops.aten.linear.default, torch.ops.aten.relu.default]
    assert "fc" in [c.fqn for c in tr.calls]
    if how == "module.compile()":
        assert net.fc._compiled_call_impl is not None
    torch.testing.assert_close(tr(x), net(x))


def test_the_fast_path_of_the_transformer_layer_stays():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    x = torch.randn(1, 3, 8)
    with torch.no_grad():
        tr = st.trace(layer, (x,))
        tr.check((x,))
    targets = [n.target for n in tr.graph_module.graph.nodes if n.op == "call_function"]
    assert targets == [torch.ops.aten._transformer_encoder_layer_fwd.default]
    assert len(tr.calls) == 1


def test_mutated_names_what_a_call_changed():
    class Count(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("n", torch.zeros(()))

        def forward(self, x, out):
            self.n += 1
            out.copy_(x)
            return x + self.n

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.count = Count()

        def forward(self, x, y):
            return self.count(x, y)

    tr = st.trace(Net(), (torch.randn(2), torch.randn(2)), functional=False)
    assert values(call_of(tr, "count").mutated) == {"out": "%copy_", "n": "%add_"}


@torch.jit.script
def scripted_function(x: torch.Tensor) -> torch.Tensor:
    return x * 2 + 1


def test_scripted_functions():
    x = torch.randn(2)
    st.trace(Returns(lambda x: scripted_function(x)), (x,)).check((x,))


def test_a_trace_with_parametrized_modules_is_saved(tmp_path):
    layers = [torch.nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)) for _ in range(2)]
    net, x = nn.Sequential(*layers), torch.randn(2, 4)
    st.trace(net, (x,)).save(tmp_path / "trace")
    loaded = st.load(tmp_path / "trace")
    torch.testing.assert_close(loaded(x), net(x))
    first, second = (call.module_type for call in loaded.calls[0].children)
    assert first is second
    assert (first.__name__, first.__base__) == ("ParametrizedLinear", nn.Linear)


class Norm32(nn.Module):
    def forward(self, x):
        y = x.to(torch.float32)  # returns x itself
        return y * y.pow(2).mean(-1, keepdim=True)


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = Norm32()
        self.drop = nn.Dropout()  # in eval it returns its input, which is what it was given

    def forward(self, x):
        return x + self.drop(self.norm(x))


def test_what_a_call_makes_of_the_same_tensor_is_read_in_it_and_from_its_result_alone():
    tr = st.trace(nn.Sequential(Residual(), Residual()).eval(), (torch.randn(2, 4),))
    added = [n for n in tr.graph_module.graph.nodes if n.target is torch.ops.aten.add.Tensor]
    assert [[str(a) for a in n.args] for n in added] == [["input_1", "dropout"], ["add", "dropout_1"]]
    assert [[o.kind for o in f.outputs] for f in tr.outline(Norm32).functions] == [["result"]]
    tr.check((torch.randn(2, 4),))


def test_a_write_to_the_same_tensor_in_a_call_is_read_after_it():
    class Writes(nn.Module):
        def forward(self, x):
            x.to(x.dtype).view(-1)[:2].mul_(3)
            return x.to(x.dtype).sum()

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Writes()

        def forward(self, x):
            x = x * 1
            return self.inner(x) + x, x.to(x.dtype)

    tr = st.trace(Outer(), (torch.randn(2, 4),))
    tr.check((torch.randn(2, 4),))
