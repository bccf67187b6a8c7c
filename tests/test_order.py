"""Execution order: which module runs when, and which parameters each call uses.

A test whose name says "original" runs the same question through torch's own `_ExecOrderTracer`, and shows its answer.
"""

import contextlib
import pickle

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import _trace_utils

import scopetrace as st
from benchmarks import order_oracle
from tests.nets import Net, weight

F = nn.functional
X = torch.randn(2, 6)


class Layers(nn.Module):
    """The model of PyTorch's own test of its tracer."""

    def __init__(self):
        super().__init__()
        self.weight1 = nn.Parameter(torch.randn(6, 6))
        self.weight2 = nn.Parameter(torch.randn(6, 6))
        self.weight_unused = nn.Parameter(torch.randn(2, 2))
        self.layer0 = nn.Linear(6, 6)
        self.layer1 = nn.Linear(6, 6, bias=False)
        self.layer2 = nn.Sequential(nn.Linear(6, 3, bias=False), nn.ReLU(), nn.Linear(3, 6, bias=False))
        self.relu = nn.ReLU()

    def forward(self, x, run_all_layers):
        z = self.relu(self.layer0(x))
        z = self.relu(self.layer2(z))
        z = z @ self.weight1
        if run_all_layers:
            z = self.relu(self.layer1(z))
            z = z @ self.weight2
            z = self.relu(self.layer0(x))
        return z


def uses(order):
    """The calls as a tree, a line each, and under each the parameters that its ops use together."""
    lines, depth = [], 0
    for step in order.steps:
        if step.kind == "call":
            call = order.calls[step.call]
            name = "(outside)" if call.fqn is None else call.fqn or "(root)"
            how = "".join([".forward" * call.direct, f"#{call.index}" * bool(call.index), ", raised" * call.raised])
            lines.append("  " * depth + name + how)
        elif step.kind == "use":
            lines.append("  " * depth + "- " + ", ".join(step.params))
        depth += {"call": 1, "return": -1}.get(step.kind, 0)
    return lines


def traced(model, *args):
    """The order of a trace, which must be that of a run with hooks."""
    order = st.trace(model, args or (X,)).order
    assert order_oracle.differences(order, order_oracle.record(model, args or (X,), {})) == []
    return order


def symbolic(model, **concrete_args):
    """What we see of a symbolic trace."""
    config = st.TracingConfig(tracer=torch.fx.Tracer(), concrete_args=concrete_args or None)
    return st.ExecOrderTracer().trace(model, config)


def original(model, **concrete_args):
    """What torch's own tracer sees of it."""
    tracer, watcher = torch.fx.Tracer(), _trace_utils._ExecOrderTracer()
    with watcher.patch_tracer(tracer, model):
        tracer.trace(model, concrete_args or None)
    return watcher.exec_info


def names(model, params):
    known = {id(p): name for name, p in model.named_parameters()}
    return [known[id(p)] for p in params]


# The order of a trace ------------------------------------------------------------------------------------------------


def test_modules_and_parameters_in_the_order_of_the_run():
    order = traced(Layers(), X, True)
    assert uses(order) == [
        "(root)",
        "  layer0",
        "    - layer0.weight, layer0.bias",
        "  relu",
        "  layer2",
        "    layer2.0",
        "      - layer2.0.weight",
        "    layer2.1",
        "    layer2.2",
        "      - layer2.2.weight",
        "  relu#1",
        "  - weight1",
        "  layer1",
        "    - layer1.weight",
        "  relu#2",
        "  - weight2",
        "  layer0#1",
        "    - layer0.weight, layer0.bias",
        "  relu#3",
    ]
    assert order.module_forward_order == [
        *("", "layer0", "relu", "layer2", "layer2.0", "layer2.1", "layer2.2"),
        *("relu", "layer1", "relu", "layer0", "relu"),
    ]
    assert order.param_forward_order == [
        *("layer0.weight", "layer0.bias", "layer2.0.weight", "layer2.2.weight"),
        *("weight1", "layer1.weight", "weight2"),
    ]
    assert order.unused_params == ["weight_unused"]
    assert list(order.registered.params)[:4] == ["weight1", "weight2", "weight_unused", "layer0.weight"]


def test_the_last_use_is_where_a_parameter_can_be_freed():
    order = traced(Layers(), X, True)
    assert list(order.param_last_use) == [
        *("layer2.0.weight", "layer2.2.weight", "weight1", "layer1.weight", "weight2"),
        *("layer0.weight", "layer0.bias"),  # the second call of layer0 comes last
    ]
    last = order.param_last_use["layer0.weight"]
    assert (last.module, order.calls[last.call].index) == ("layer0", 1)
    assert order.param_first_use["layer0.weight"].step < last.step


def test_each_call_has_its_own_uses_and_those_of_its_children():
    infos = traced(Layers(), X, True).module_to_param_usage_infos
    assert infos[""] == [
        ("layer0", ("layer0.weight", "layer0.bias")),
        ("layer2", ("layer2.0.weight", "layer2.2.weight")),
        ("", ("weight1",)),
        ("layer1", ("layer1.weight",)),
        ("", ("weight2",)),
        ("layer0", ("layer0.weight", "layer0.bias")),
    ]
    assert infos["layer2"] == [("layer2.0", ("layer2.0.weight",)), ("layer2.2", ("layer2.2.weight",))]
    assert infos["layer0"] == [("layer0", ("layer0.weight", "layer0.bias"))]
    assert infos["relu"] == []


def test_a_second_call_that_uses_other_parameters_is_beside_the_first():
    branch = Net(lambda m, x, first: x @ (m.a if first else m.b), a=weight(6, 6), b=weight(6, 6))
    order = traced(Net(lambda m, x: m.branch(m.branch(x, True), False), branch=branch))
    assert order.module_to_param_usage_infos["branch"] == [("branch", ("branch.a",)), ("branch", ("branch.b",))]
    assert [order.used_in(n) for n in (1, 2)] == [("branch.a",), ("branch.b",)]


def test_a_child_s_parameter_used_without_the_child():
    model = Net(lambda m, x: F.linear(x, m.fc.weight, bias=m.fc.bias), fc=nn.Linear(6, 6))
    order = traced(model)
    assert uses(order) == ["(root)", "  - fc.weight, fc.bias"]
    assert order.uncalled_modules == ["fc"]
    assert [(name, [use.module for use in found]) for name, found in order.outside_uses.items()] == [
        ("fc.weight", [""]),
        ("fc.bias", [""]),
    ]


def test_attention_uses_its_output_projection_without_calling_it():
    model = nn.MultiheadAttention(6, 2)
    order = traced(model, X, X, X)
    assert list(order.outside_uses) == ["out_proj.weight", "out_proj.bias"]
    assert order.uncalled_modules == ["out_proj"]


def test_tied_weights_have_all_their_names():
    model = Net(lambda m, x: m.head(m.embed(x)), embed=nn.Embedding(5, 6), head=nn.Linear(6, 5, bias=False))
    model.head.weight = model.embed.weight
    order = traced(model, torch.tensor([1, 2]))
    assert uses(order) == ["(root)", "  embed", "    - embed.weight", "  head", "    - embed.weight"]
    assert order.shared_params == {"embed.weight": ("embed.weight", "head.weight")}
    assert order.outside_uses == {}
    assert order.param_last_use["embed.weight"].module == "head"


def test_a_shared_module_is_called_by_the_name_around():
    shared = nn.Linear(6, 6)
    model = nn.Sequential(Net(lambda m, x: m.fc(x), fc=shared), Net(lambda m, x: m.fc(x), fc=shared))
    order = traced(model)
    assert order.module_forward_order == ["", "0", "0.fc", "1", "1.fc"]
    assert [call.index for call in order.calls] == [0, 0, 0, 0, 1]
    assert order.param_forward_order == ["0.fc.weight", "0.fc.bias"]
    assert order.registered.params["0.fc.bias"].names == ("0.fc.bias", "1.fc.bias")


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_layers(use_reentrant):
    def forward(m, x):
        return torch.utils.checkpoint.checkpoint(m.fc, x, use_reentrant=use_reentrant)

    order = traced(Net(forward, fc=nn.Linear(6, 6)), X.clone().requires_grad_())
    assert uses(order) == ["(root)", "  fc", "    - fc.weight, fc.bias"]


def test_parametrized_weights_are_used_by_their_parametrization():
    order = traced(torch.nn.utils.parametrizations.weight_norm(nn.Linear(6, 6)))
    assert uses(order) == [
        "(root)",
        "  parametrizations.weight",
        "    parametrizations.weight.0",
        "      - parametrizations.weight.original1, parametrizations.weight.original0",  # not as registered
        "  - bias",
    ]


def test_an_exception_that_the_model_catches_ends_only_its_own_call():
    def fails(m, x):
        m.fc(x)
        raise ValueError

    def forward(m, x):
        try:
            m.bad(x)
        except ValueError:
            return m.good(x)

    model = Net(forward, bad=Net(fails, fc=nn.Linear(6, 6)), good=nn.Linear(6, 6))
    assert uses(traced(model)) == [
        *("(root)", "  bad, raised", "    bad.fc", "      - bad.fc.weight, bad.fc.bias"),
        *("  good", "    - good.weight, good.bias"),
    ]


def test_arguments_by_name_and_in_containers():
    def forward(m, x):
        return F.linear(x, weight=m.w, bias=m.b) + torch.cat([m.v, m.b[None]])

    assert uses(traced(Net(forward, w=weight(6, 6), b=weight(6), v=weight(1, 6)))) == [
        "(root)",
        "  - w, b",
        "  - b",
        "  - v",
    ]


def test_a_parameter_given_to_another_module_is_used_there():
    model = Net(lambda m, x: m.bi(x, m.w), w=weight(2, 6), bi=nn.Bilinear(6, 6, 3))
    order = traced(model)
    assert uses(order) == ["(root)", "  bi", "    - w, bi.weight, bi.bias"]
    assert list(order.outside_uses) == ["w"]


def test_a_parameter_that_is_only_returned_is_used_by_the_root():
    assert uses(traced(Net(lambda m, x: (x + 1, m.w), w=weight(3)))) == ["(root)", "  - w"]


def test_a_view_of_a_parameter_is_used_where_it_is_read():
    """What is freed after the last use is memory: the last reader of a view counts."""
    model = Net(lambda m, x: m.inner(x, m.w.t()), w=weight(6, 6), inner=Net(lambda m, x, w: F.relu(x) @ w))
    order = st.trace(model, (X,)).order
    assert uses(order) == ["(root)", "  - w", "  inner", "    - w"]
    assert order.param_last_use["w"].module == "inner"
    assert uses(traced(Net(lambda m, x: x @ m.w.t(), w=weight(6, 6)))) == ["(root)", "  - w"]


def test_a_shape_is_no_use():
    order = traced(Net(lambda m, x: x * m.w.shape[0] + m.w.dim(), w=weight(6)))
    assert order.param_forward_order == []
    assert order.unused_params == ["w"]


def test_forward_called_directly_is_a_call_without_hooks():
    order = traced(Net(lambda m, x: m.fc.forward(x), fc=nn.Linear(6, 6)))
    assert order.module_forward_order == ["", "fc"]
    assert [call.direct for call in order.calls] == [False, True]


def test_leaf_modules_use_all_that_they_hold():
    model = nn.Sequential(nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 6), nn.ReLU()))
    order = st.trace(model, (X,), leaf_modules=["1"]).order
    assert uses(order) == ["(root)", "  0", "    - 0.weight, 0.bias", "  1", "    - 1.0.weight, 1.0.bias"]


def test_uses_inside_the_branches_of_cond():
    def forward(m, x):
        return torch.cond(x.sum() > 0, lambda x: m.a(x), lambda x: m.b(x) + m.w, (x,))

    order = st.trace(Net(forward, a=nn.Linear(6, 6), b=nn.Linear(6, 6), w=weight(6)), (X,)).order
    assert uses(order) == ["(root)", "  a", "    - a.weight, a.bias", "  b", "    - b.weight, b.bias", "  - w"]


def test_the_order_is_that_of_the_model_not_of_the_graph_without_mutation():
    def forward(m, x):
        m.unread = x @ m.dead
        x = x.clone()
        x.mul_(m.w)
        return x

    model = Net(forward, w=weight(6), dead=weight(6, 6), unread=None)
    for functional in (True, False):
        order = st.trace(model, (X,), functional=functional).order
        assert order.param_forward_order == ["dead", "w"]


def test_saved_traces_and_copies_keep_it(tmp_path):
    tr = st.trace(Layers(), (X, True))
    tr.save(tmp_path / "trace")
    assert st.load(tmp_path / "trace").order == tr.order == pickle.loads(pickle.dumps(tr.order))
    assert st.load(tmp_path / "trace").order.unused_params == ["weight_unused"]


# Comparing -----------------------------------------------------------------------------------------------------------


def test_orders_are_equal_where_calls_and_uses_are():
    one, two = (st.trace(Layers(), (torch.randn(n, 6), True)).order for n in (2, 5))
    assert one == two
    assert hash(one) == hash(two)
    assert one.digest == two.digest
    assert one.first_difference(two) is None


def test_the_first_difference_has_a_name():
    one, two = (st.trace(Layers(), (X, flag)).order for flag in (True, False))
    assert one != two
    assert one.digest != two.digest
    assert str(one.first_difference(two)) == (
        "step 19, after Layers uses weight1: call of Linear[layer1], in the other return of Layers"
    )


def test_a_call_that_raises_is_another_one_than_one_that_returns():
    def forward(m, x, fails):
        with contextlib.suppress(ValueError):
            m.part(x, fails)
        return x + 1

    def part(m, x, fails):
        if fails:
            raise ValueError

    model = Net(forward, part=Net(part))
    one, two = (st.trace(model, (X, fails)).order for fails in (False, True))
    assert one != two
    assert str(one.first_difference(two)) == (
        "step 2, after call of Net[part]: return of Net[part], in the other return of Net[part], raised"
    )


def test_an_order_prints_as_a_table():
    assert str(traced(Layers(), X, True)) == TABLE


TABLE = """\
order  registered  parameter        shape  first used by  last used by
0      3           layer0.weight    6x6    layer0         layer0#1
1      4           layer0.bias      6      layer0         layer0#1
2      6           layer2.0.weight  3x6    layer2.0       layer2.0
3      7           layer2.2.weight  6x3    layer2.2       layer2.2
4      0           weight1          6x6    (root)         (root)
5      5           layer1.weight    6x6    layer1         layer1
6      1           weight2          6x6    (root)         (root)

12 module calls, 7 of 8 parameters used
never used: weight_unused"""


# The symbolic way ----------------------------------------------------------------------------------------------------


def test_what_pytorch_s_own_test_expects():
    model, tracer = Layers(), torch.fx.Tracer()
    before = tracer.call_module, tracer.create_proxy
    watcher = st.ExecOrderTracer()
    with watcher.patch_tracer(tracer, model):
        tracer.trace(model, {"run_all_layers": True})
    assert (tracer.call_module, tracer.create_proxy) == before
    info = watcher.exec_info

    def of(module):
        return module, list(module.named_parameters())

    assert info.module_forward_order == [
        *(model, model.layer0, model.relu, model.layer2, *model.layer2),
        *(model.relu, model.layer1, model.relu, model.layer0, model.relu),
    ]
    assert info.module_to_param_usage_infos[model] == [
        of(model.layer0),
        of(model.layer2),
        (model, [("weight1", model.weight1)]),
        of(model.layer1),
        (model, [("weight2", model.weight2)]),
        of(model.layer0),
    ]
    assert info.module_to_param_usage_infos[model.layer0] == [of(model.layer0)]
    assert info.module_to_param_usage_infos[model.layer1] == [of(model.layer1)]
    assert info.module_to_param_usage_infos[model.layer2] == [of(model.layer2[0]), of(model.layer2[2])]
    assert info.module_to_param_usage_infos[model.relu] == []
    used = [*model.layer0.parameters(), model.layer2[0].weight, model.layer2[2].weight]
    used += [model.weight1, model.layer1.weight, model.weight2]
    assert list(map(id, info.param_forward_order)) == list(map(id, used))
    assert info.visited_params == set(used)


def test_the_symbolic_order_is_that_of_the_trace():
    model = Layers()
    assert symbolic(model, run_all_layers=True).order == st.trace(model, (X, True)).order


FAULTS = {
    "by name": (
        lambda m, x: F.linear(x, weight=m.w, bias=m.b),
        lambda: dict(w=weight(6, 6), b=weight(6)),
        ["w", "b"],
        [],
    ),
    "in a list": (lambda m, x: torch.cat([m.w, m.b]), lambda: dict(w=weight(6), b=weight(6)), ["w", "b"], []),
    "given to a leaf module": (
        lambda m, x: m.bi(x, m.w),
        lambda: dict(w=weight(2, 6), bi=nn.Bilinear(6, 6, 3)),
        ["w", "bi.weight", "bi.bias"],
        ["bi.weight", "bi.bias"],
    ),
    "only returned": (lambda m, x: (x + 1, m.w), lambda: dict(w=weight(6)), ["w"], []),
    "only its shape": (lambda m, x: x * m.w.size(0), lambda: dict(w=weight(6)), [], ["w"]),
    "read past the attribute": (
        lambda m, x: x @ next(iter(m._parameters.values())),
        lambda: dict(w=weight(6, 6)),
        ["w"],
        [],
    ),
}


@pytest.mark.parametrize(("forward", "parts", "expected", "of_original"), FAULTS.values(), ids=FAULTS)
def test_uses_that_the_original_misses(forward, parts, expected, of_original):
    model = Net(forward, **parts())
    assert names(model, symbolic(model_of(model)).param_forward_order) == expected
    assert names(model, original(model_of(model)).param_forward_order) == of_original


def model_of(model):
    """The same module with a forward that the symbolic tracer can read the arguments of."""
    forward = model._forward
    model.__class__ = type("Net", (nn.Module,), {"forward": lambda self, x: forward(self, x)})
    return model


def test_a_placeholder_with_the_name_of_a_parameter_is_no_use():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = weight(6)

        def forward(self, weight):
            return weight + 1

    model = Named()
    assert symbolic(model).param_forward_order == []
    assert names(model, original(model).param_forward_order) == ["weight"]


class Branch(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = weight(6, 6), weight(6, 6)

    def forward(self, x, first):
        return x @ (self.a if first else self.b)


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.branch = Branch()

    def forward(self, x):
        return self.branch(self.branch(x, True), False)


def test_the_second_call_of_a_module_does_not_replace_the_first():
    model = Twice()
    branch = model.branch
    expected = [(branch, [("a", branch.a)]), (branch, [("b", branch.b)])]
    assert symbolic(model).module_to_param_usage_infos[branch] == expected
    assert [[p for _, p in info.named_params] for info in original(model).module_to_param_usage_infos[branch]] == [
        [branch.b]
    ]


def test_a_child_s_entry_has_what_its_call_used():
    model = Twice()
    a, b = model.branch.a, model.branch.b
    assert [[p for _, p in i.named_params] for i in symbolic(model).module_to_param_usage_infos[model]] == [[a], [b]]
    assert [[p for _, p in i.named_params] for i in original(model).module_to_param_usage_infos[model]] == [[a, b]] * 2


def test_names_are_relative_to_the_module_of_the_entry_and_from_the_root_in_the_order():
    model = Twice()
    named = [
        name for info in symbolic(model).module_to_param_usage_infos[model.branch] for name, _ in info.named_params
    ]
    assert named == ["a", "b"]
    assert symbolic(model).order.param_forward_order == ["branch.a", "branch.b"]
    theirs = original(model).module_to_param_usage_infos
    assert [name for name, _ in theirs[model.branch][0].named_params] == ["branch.b"]
    assert [name for name, _ in theirs[model][0].named_params] == ["a", "b"]  # the same module, by other names


class Fails(nn.Module):
    def forward(self, x):
        raise ValueError


class Catches(nn.Module):
    def __init__(self):
        super().__init__()
        self.bad, self.w = Fails(), weight(6)

    def forward(self, x):
        with contextlib.suppress(ValueError):
            self.bad(x)
        return x * self.w


def test_an_exception_that_is_caught_does_not_leave_its_module_current():
    model = Catches()
    assert symbolic(model).module_to_param_usage_infos == {model: [(model, [("w", model.w)])], model.bad: []}
    theirs = original(model)
    assert theirs.curr_module is model.bad
    assert theirs.module_to_param_usage_infos[model] == []


def test_the_tracer_is_restored_when_tracing_fails():
    model, tracer = Fails(), torch.fx.Tracer()
    before = dict(tracer.__dict__)
    watcher = st.ExecOrderTracer()
    with pytest.raises(ValueError), watcher.patch_tracer(tracer, model):
        tracer.trace(model)
    assert {name for name in tracer.__dict__ if name in ("call_module", "create_node", "create_proxy")} == set()
    assert set(before) <= set(tracer.__dict__)
    with _trace_utils._ExecOrderTracer().patch_tracer(tracer, model):
        pass
    assert "call_module" in tracer.__dict__  # the original leaves bound methods on the instance


def test_a_tracer_of_another_class_with_its_own_leaves():
    class Opaque(torch.fx.Tracer):
        def is_leaf_module(self, m, module_qualified_name):
            return isinstance(m, nn.Sequential) or super().is_leaf_module(m, module_qualified_name)

    model = Layers()
    info = st.ExecOrderTracer().trace(model, st.TracingConfig(Opaque(), {"run_all_layers": False}))
    assert info.order.module_forward_order == ["", "layer0", "relu", "layer2", "relu"]
    assert info.module_to_param_usage_infos[model][1] == (model.layer2, list(model.layer2.named_parameters()))
