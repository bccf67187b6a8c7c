"""What users of torch.export expect of a trace and of its ExportedProgram."""

from __future__ import annotations

import copy
import dataclasses
import enum
import functools
import itertools
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim
from torch.export.dynamic_shapes import refine_dynamic_shapes_from_suggested_fixes
from torch.fx.experimental.symbolic_shapes import ConstraintViolationError
from torch.testing import assert_close
from torch.testing._internal.custom_tensor import CustomTensorPlainOut
from torch.utils import _pytree as pytree

import scopetrace as st
from scopetrace.cli.targets import declare_missing_ops

OpaqueBase = torch._opaque_base.OpaqueBase if hasattr(torch, "_opaque_base") else object  # torch 2.15 asks for no base


def module_of(forward):
    """A module with this forward."""
    return type("M", (nn.Module,), {"forward": forward})()


# Dynamic shapes ------------------------------------------------------------------------------------------------------

PLUS_ONE = module_of(lambda self, x, y: x + y[1:])
UP_TO_SIX = module_of(lambda self, x: x + 1 if x.shape[0] <= 6 else x - 1)
TIMES_FOUR = module_of(lambda self, x: x @ torch.ones(4, 4))
ADD = module_of(lambda self, x, y: x + y)


@pytest.mark.parametrize(
    ("model", "args", "dynamic_shapes", "fix"),
    [
        (PLUS_ONE, (torch.ones(5), torch.ones(6)), ({0: Dim("dx")}, {0: Dim("dy")}), "dy = dx + 1"),
        (UP_TO_SIX, (torch.ones(5),), ({0: Dim("n", min=3)},), "n = Dim('n', min=3, max=6)"),
        (TIMES_FOUR, (torch.ones(3, 4),), ({0: Dim("n"), 1: Dim("k")},), "k = 4"),
        (ADD, (torch.ones(4), torch.ones(4)), ({0: Dim("a")}, {0: Dim("b")}), "b = a"),
    ],
)
def test_suggested_fixes(model, args, dynamic_shapes, fix):
    with pytest.raises(torch._dynamo.exc.UserError, match="Suggested fixes") as theirs:
        torch.export.export(model, args, dynamic_shapes=dynamic_shapes)
    with pytest.raises(st.DynamicShapeError) as ours:
        st.trace(model, args, dynamic_shapes=dynamic_shapes).to_exported_program()
    assert isinstance(ours.value, torch._dynamo.exc.UserError)
    assert fix in str(ours.value) and str(theirs.value).partition("\n\n")[0] in str(ours.value)
    fixed = refine_dynamic_shapes_from_suggested_fixes(ours.value.msg, dynamic_shapes)
    ep = st.trace(model, args, dynamic_shapes=fixed).to_exported_program()
    torch.testing.assert_close(ep.module()(*args), model(*args))


@pytest.mark.parametrize(
    ("args", "dim", "error"),
    [
        ((torch.ones(3),), Dim("n", min=6), ConstraintViolationError),
        ((torch.ones(8),), 2 * Dim("n") + 1, torch._dynamo.exc.UserError),
        ((torch.ones(3),), Dim.STATIC(min=6, max=8), ValueError),
    ],
)
def test_errors_are_those_of_torch_too(args, dim, error):
    model, dynamic_shapes = module_of(lambda self, x: x[1:] * 2), ({0: dim},)
    with pytest.raises(error):
        torch.export.export(model, args, dynamic_shapes=dynamic_shapes)
    with pytest.raises(st.DynamicShapeError) as found:
        st.trace(model, args, dynamic_shapes=dynamic_shapes).to_exported_program()
    assert isinstance(found.value, error)


def test_an_error_about_data_is_that_of_torch_too():
    with pytest.raises(st.DataDependentError, match="Could not guard on data-dependent expression u0 > 3") as found:
        st.trace(module_of(lambda self, x: x + 1 if x.item() > 3 else x), (torch.tensor(5),))
    assert isinstance(found.value, torch.fx.experimental.symbolic_shapes.GuardOnDataDependentSymNode)


@pytest.mark.parametrize("other", [Dim.AUTO, Dim.DYNAMIC])
def test_a_named_dim_beside_another(other):
    args = torch.ones(4), torch.ones(4)
    for dynamic_shapes in (({0: Dim("d")}, {0: other}), ({0: other}, {0: Dim("d")})):
        tr = st.trace(ADD, args, dynamic_shapes=dynamic_shapes)
        assert tr(torch.ones(7), torch.ones(7)).shape == (7,)
        with pytest.raises(st.InputMismatchError):
            tr(torch.ones(7), torch.ones(6))


def test_a_relation_that_no_dim_can_say():
    model = module_of(lambda self, x, y: x.reshape(-1) + y)
    dynamic_shapes = ({0: Dim("a"), 1: Dim("b")}, {0: Dim("c")})
    tr = st.trace(model, (torch.ones(3, 4), torch.ones(12)), dynamic_shapes=dynamic_shapes)
    assert tr(torch.ones(2, 5), torch.ones(10)).shape == (10,)
    with pytest.raises(st.InputMismatchError):
        tr(torch.ones(2, 5), torch.ones(9))


D = Dim("d", min=3, max=6)


def refusals(program):
    """By sizes of two inputs, what the program says when it refuses them, None where it takes them."""
    run, found = program.module(), {}
    for sizes in itertools.product(range(2, 14), repeat=2):
        try:
            found[sizes] = None if run(*map(torch.ones, sizes)) is not None else ""
        except AssertionError as error:
            found[sizes] = str(error)
    return found


@pytest.mark.parametrize(
    ("model", "dynamic_shapes", "sizes", "is_text_the_same"),
    [
        (PLUS_ONE, ({0: D}, {0: D + 1}), (5, 6), True),
        (module_of(lambda self, x, y: x[1:] + y[1::2]), ({0: D + 1}, {0: 2 * D + 1}), (6, 11), True),
        (module_of(lambda self, x, y: x[::2] + y), ({0: 2 * D}, {0: D}), (8, 4), False),
    ],
)
def test_guards_of_derived_dims(model, dynamic_shapes, sizes, is_text_the_same):
    args = tuple(map(torch.ones, sizes))
    theirs = torch.export.export(model, args, dynamic_shapes=dynamic_shapes)
    ours = st.trace(model, args, dynamic_shapes=dynamic_shapes).to_exported_program()
    ranges = [sorted(map(str, ep.range_constraints.values())) for ep in (theirs, ours)]
    assert ranges[0] == ranges[1]
    want, found = refusals(theirs), refusals(ours)
    assert [n for n, said in want.items() if said is None] == [n for n, said in found.items() if said is None]
    assert want == found or not is_text_the_same


def test_relations_that_the_model_does_not_need_are_guarded_too():
    model = module_of(lambda self, x, y: x[:2] + y[-2:])
    args, dynamic_shapes = (torch.ones(4), torch.ones(11)), ({0: D - 1}, {0: 2 * D + 1})
    found = refusals(st.trace(model, args, dynamic_shapes=dynamic_shapes).to_exported_program())
    assert [n for n, said in found.items() if said is None] == [(d - 1, 2 * d + 1) for d in range(3, 7)]


CHECKS = module_of(lambda self, x, y: x * 2 if x.shape[0] ** 2 == y.shape[0] * 3 else x + 2)
RESHAPES = module_of(lambda self, x, y: x.reshape(-1) + y)


@pytest.mark.parametrize("decompose", [False, True])
@pytest.mark.parametrize(
    ("model", "args", "dims", "right", "wrong"),
    [
        (CHECKS, (6, 12), ({0: Dim("a")}, {0: Dim("b")}), (9, 27), [(9, 26), (10, 27)]),
        (RESHAPES, ((3, 4), 12), ({0: Dim("a"), 1: Dim("b")}, {0: Dim("c")}), ((5, 2), 10), [((5, 2), 9)]),
    ],
)
def test_assertions_in_place_of_guards(model, args, dims, right, wrong, decompose):
    tr = st.trace(model, tuple(map(torch.ones, args)), dynamic_shapes=dims)
    ep = tr.to_exported_program(prefer_deferred_runtime_asserts_over_guards=True)
    run = (ep.run_decompositions() if decompose else ep).module()
    given = tuple(map(torch.ones, right))
    torch.testing.assert_close(run(*given), model(*given))
    for sizes in wrong:
        message = "Guard failed" if decompose else r"Runtime assertion failed for expression .* on node"
        with pytest.raises(AssertionError if decompose else RuntimeError, match=message):
            run(*map(torch.ones, sizes))  # torch's re-tracing makes `eq(n, n)` of assertions, so there are guards again
        with pytest.raises(AssertionError, match="Guard failed"):
            tr.to_exported_program().module()(*map(torch.ones, sizes))


def test_an_example_of_size_one():
    model, dynamic_shapes = module_of(lambda self, x: x @ torch.ones(4, 2)), ({0: Dim("n")},)
    with pytest.raises(st.DynamicShapeError, match="is 1 in the example"):
        st.trace(model, (torch.ones(1, 4),), dynamic_shapes=dynamic_shapes)
    with torch.fx.experimental._config.patch(backed_size_oblivious=True):
        tr = st.trace(model, (torch.ones(1, 4),), dynamic_shapes=dynamic_shapes)
    for run in (tr, tr.to_exported_program().module()):
        for n in (0, 1, 2, 7):
            torch.testing.assert_close(run(torch.ones(n, 4)), model(torch.ones(n, 4)))


def test_additional_inputs_are_checked_by_the_trace():
    inputs = torch.export.AdditionalInputs()
    inputs.add((torch.randn(2),))
    with pytest.raises(st.DynamicShapeError, match="at least 3") as found:
        st.trace(module_of(lambda self, x: x[:3] * 2), (torch.randn(4),), dynamic_shapes=inputs)
    assert isinstance(found.value, RuntimeError)


def test_numbers_of_a_shapes_collection():
    args = torch.export.dynamic_shapes._IntWrapper(5), torch.randn(4)
    shapes = torch.export.ShapesCollection()
    shapes[args[0]] = Dim.DYNAMIC
    tr = st.trace(ADD, args, dynamic_shapes=shapes)
    torch.testing.assert_close(tr(7, args[1]), 7 + args[1])


SIZES = [
    lambda n: torch.sym_min(n, 10),
    lambda n: torch.sym_max(n, 5),
    lambda n: n / torch.sym_max(n, 4),
]


@pytest.mark.parametrize("of", SIZES)
def test_least_and_greatest_sizes(of):
    model = module_of(lambda self, x: x * of(x.shape[0]))
    tr = st.trace(model, (torch.ones(6),), dynamic_shapes=({0: Dim.DYNAMIC},))
    for n in (2, 4, 9, 12):
        torch.testing.assert_close(tr(torch.ones(n)), model(torch.ones(n)), rtol=0, atol=0)


@pytest.mark.parametrize("of", SIZES[:2])
def test_least_and_greatest_of_data(of):
    model = module_of(lambda self, n, x: x * of(n.item()))
    tr = st.trace(model, (torch.tensor(5), torch.ones(4)))
    for n in (-2, 4, 9, 12):
        args = torch.tensor(n), torch.ones(4)
        torch.testing.assert_close(tr(*args), model(*args), rtol=0, atol=0)


@pytest.mark.parametrize("of", [lambda n: min(n, 10), lambda n: max(3, n, 5), lambda n: min([n, 8])])
def test_pythons_own_least_and_greatest_decide(of):
    sizes = module_of(lambda self, x: x * of(x.shape[0]))
    tr = st.trace(sizes, (torch.ones(6),), dynamic_shapes=({0: Dim.DYNAMIC},))
    for n in (2, 4, 9, 12):
        try:
            torch.testing.assert_close(tr(torch.ones(n)), sizes(torch.ones(n)), rtol=0, atol=0)
        except st.InputMismatchError as error:
            assert "dimension 0 is" in str(error)
    data = module_of(lambda self, n, x: x * of(n.item()))
    with pytest.raises(st.DataDependentError, match=r"torch\.sym_min"):
        st.trace(data, (torch.tensor(5), torch.ones(4)))


def test_isin_of_a_number():
    model = module_of(lambda self, n, t: torch.isin(n, t))
    tr = st.trace(model, (3, torch.tensor([3, 4])), dynamic_shapes=(Dim.DYNAMIC, None))
    assert [bool(tr(n, torch.tensor([3, 4]))) for n in (3, 5)] == [True, False]


# Models --------------------------------------------------------------------------------------------------------------


def test_istft():
    window = torch.hann_window(16)
    x = torch.stft(torch.randn(2, 64), 16, window=window, return_complex=True)
    model = module_of(lambda self, x: torch.istft(x, n_fft=16, window=window))
    torch.testing.assert_close(st.trace(model, (x,))(x), model(x))


@pytest.mark.filterwarnings("ignore:functools.partial will be a method")  # in Python 3.14
def test_a_forward_that_is_a_partial():
    y = torch.randn(4)
    model = module_of(functools.partial(lambda x, y: x + y, y=y))
    torch.testing.assert_close(st.trace(model, (torch.ones(4),))(torch.ones(4)), y + 1)


class Tied(nn.Module):
    def forward(self, q, k):
        return q * 2 + k


def test_one_tensor_for_two_inputs():
    x, y = torch.randn(3), torch.randn(3)
    ep = st.trace(Tied(), (x, x)).to_exported_program()
    for program in (ep, ep.run_decompositions()):
        torch.testing.assert_close(program.module()(x, x), 3 * x)
        with pytest.raises(AssertionError, match="Guard failed: k is q"):
            program.module()(x, y)


def test_attention_to_itself():
    attention, x = nn.MultiheadAttention(8, 2, batch_first=True), torch.randn(2, 3, 8)
    ep = st.trace(attention, (x, x, x)).to_exported_program()
    torch.testing.assert_close(ep.module()(x, x, x), attention(x, x, x))


def test_example_inputs_are_those_of_the_trace():
    x = torch.randn(2, 4)
    ep = st.trace(nn.Linear(4, 4), (x,)).to_exported_program()
    assert ep.example_inputs[0][0] is x


# Tensors that are not plain ------------------------------------------------------------------------------------------


def test_under_a_fake_mode():
    with torch._subclasses.FakeTensorMode():
        model, x = nn.Linear(3, 3), torch.randn(2, 3)
        ep = st.trace(model, (x,)).to_exported_program()
    assert [type(t).__name__ for t in ep.state_dict.values()] == ["FakeTensor"] * 2
    assert [str(n.target) for n in ep.graph.nodes][-2:] == ["aten.linear.default", "output"]


def test_a_parameter_of_a_subclass():
    model = module_of(lambda self, x: x + self.p)
    model.p = nn.Parameter(CustomTensorPlainOut(torch.ones(3), torch.ones(3)))  # ops on it give plain tensors
    ep = st.trace(model, (torch.ones(3),)).to_exported_program()
    assert torch.equal(ep.module()(torch.ones(3)), model(torch.ones(3)))


def test_an_argument_of_a_subclass_is_refused_and_stays_as_it_was():
    x = CustomTensorPlainOut(torch.ones(3), torch.ones(3))
    with pytest.raises(st.errors.UnsupportedOpError, match="the argument x is a CustomTensorPlainOut"):
        st.trace(module_of(lambda self, x: x.mul_(2).sum()), (x,))
    assert torch.equal(x.elem1, torch.ones(3))


# Metadata ------------------------------------------------------------------------------------------------------------


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        with torch.fx.traceback.annotate({"part": "inner"}):
            return self.fc(x).relu_()


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Inner()

    def forward(self, x, *, scale):
        return self.inner(x) * scale


def origins(graph):
    """Of each op of a graph: its modules, source lines and annotations."""
    for n in graph.nodes:
        if n.op == "call_function":
            custom = {k: v for k, v in n.meta.get("custom", {}).items() if k == "part"}
            yield str(n.target), list(n.meta["nn_module_stack"].values()), n.meta["stack_trace"], custom


def test_annotations():
    x = torch.randn(2, 4)
    with torch.fx.traceback.preserve_node_meta():
        theirs = torch.export.export(Outer(), (x,), {"scale": x}).run_decompositions({})
    ours = st.trace(Outer(), (x,), {"scale": x}).to_exported_program()
    assert [o[3] for o in origins(ours.graph)] == [{"part": "inner"}, {"part": "inner"}, {}]
    assert [(o[1], o[3]) for o in origins(ours.graph)] == [(o[1], o[3]) for o in origins(theirs.graph)]


def test_what_is_asserted_of_sizes_is_annotated_as_the_op_after_it():
    def forward(self, x):
        with torch.fx.traceback.annotate({"part": "inner"}):
            return x + 1 if x.shape[0] ** 2 > 10 else x - 1

    with torch.fx.traceback.preserve_node_meta():
        tr = st.trace(module_of(forward), (torch.randn(4),), dynamic_shapes={"x": {0: Dim("n")}})
    ep = tr.to_exported_program(prefer_deferred_runtime_asserts_over_guards=True)
    ops = [n for n in ep.graph.nodes if n.op == "call_function"]
    assert len(ops) > 3 and {n.meta["custom"].get("part") for n in ops} == {"inner"}


def test_by_which_function_an_op_was_called():
    m, x = module_of(lambda self, x: F.relu(F.linear(x, x) + x).cos()), torch.randn(2, 2)
    ours, theirs = st.trace(m, (x,)).to_exported_program(), torch.export.export(m, (x,))
    assert [n.meta.get("torch_fn") for n in ours.graph.nodes] == [n.meta.get("torch_fn") for n in theirs.graph.nodes]


@pytest.mark.parametrize("dynamic_shapes", [None, {"x": {0: Dim("n")}, "scale": {0: Dim("n")}}])
def test_tensor_meta(dynamic_shapes):
    x = torch.randn(2, 4)
    theirs = torch.export.export(Outer(), (x,), {"scale": x}, dynamic_shapes=dynamic_shapes)
    ours = st.trace(Outer(), (x,), {"scale": x}, dynamic_shapes=dynamic_shapes).to_exported_program()
    for a, b in zip(ours.graph.nodes, theirs.graph.nodes, strict=True):
        assert str(a.meta.get("tensor_meta")) == str(b.meta.get("tensor_meta"))


@pytest.mark.parametrize("again", ["graph_module", "module", "export"])
def test_a_graph_that_is_traced_keeps_where_its_ops_come_from(again):
    x = torch.randn(2, 4)
    tr = st.trace(Outer(), (x,), {"scale": x})
    if again == "graph_module":
        first, graph, args, kwargs = tr.graph_module.graph, tr.graph_module, (x, x), {}
    else:
        program = tr.to_exported_program() if again == "module" else torch.export.export(Outer(), (x,), {"scale": x})
        first, graph, args, kwargs = program.graph, program.module(), (x,), {"scale": x}
    second = st.trace(graph, args, kwargs)
    assert [c.fqn for c in second.calls] == ["", "inner", "inner.fc"]
    strip = str.maketrans("", "", "_")  # the graph of torch.export has relu_
    for found in (second.graph_module.graph, second.to_exported_program().graph):
        assert [(o[0].translate(strip), *o[1:]) for o in origins(found)] == [
            (o[0].translate(strip), *o[1:]) for o in origins(first)
        ]
    torch.testing.assert_close(second(*args, **kwargs), graph(*args, **kwargs))
    assert "Linear[fc]" in str(second)


class Held(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.m = torch.ones(3), nn.Module()
        self.m.c = self.a

    def forward(self, x):
        torch.tensor(3)
        return x + self.a + self.m.c


def test_names_of_constants():
    theirs = torch.export.export(Held(), (torch.ones(3),))
    ours = st.trace(Held(), (torch.ones(3),)).to_exported_program()
    assert sorted(ours.constants) == sorted(theirs.constants) == ["a", "m.c"]


def test_names_of_arguments_come_first():
    model = module_of(lambda self, x, y, div: torch.div(x, y, rounding_mode=div))
    ep = st.trace(model, (torch.ones(3), torch.ones(3), "floor")).to_exported_program()
    assert [spec.arg.name for spec in ep.graph_signature.input_specs] == ["x", "y", "div"]
    torch.testing.assert_close(ep.module()(torch.ones(3), torch.ones(3), "floor"), torch.ones(3))


def test_a_graph_that_knows_source_lines_only():
    def forward(x):
        x = x.relu()
        x *= 2.0
        return x

    x = torch.randn(2, 4)
    graph = torch.fx.experimental.proxy_tensor.make_fx(forward, record_stack_traces=True)(x)
    ep = st.trace(graph, (x,)).to_exported_program().run_decompositions({})
    lines = [n.meta["stack_trace"].splitlines()[1].strip() for n in ep.graph.nodes if n.op == "call_function"]
    assert lines == ["x = x.relu()", "x *= 2.0"]


def test_a_model_that_asks_whether_it_is_traced():
    def forward(self, x):
        return x + 1 if torch.compiler.is_compiling() and torch.compiler.is_exporting() else x - 1

    x = torch.zeros(3)
    torch.testing.assert_close(st.trace(module_of(forward), (x,))(x), x + 1)
    assert not torch.compiler.is_compiling() and not torch.compiler.is_exporting()


@pytest.mark.parametrize("recursive", [False, True])
def test_a_function_that_torch_compile_is_not_to_follow(recursive):
    @functools.partial(torch.compiler.disable, recursive=recursive)
    def double(x):
        return x * 2 if torch.compiler.is_exporting() else x

    tr, x = st.trace(lambda x: double(x) + 1, (torch.zeros(3),)), torch.ones(3)
    torch.testing.assert_close(tr(x), x * 3)
    torch.testing.assert_close(tr.to_exported_program().module()(x), x * 3)


def test_an_active_fake_mode():
    with torch._subclasses.FakeTensorMode():
        model, x = nn.Linear(2, 2), torch.ones(5, 2)
        ep = st.trace(model, (x,)).to_exported_program()
        for program in (ep, ep.run_decompositions()):
            assert program.module()(x).shape == (5, 2)


def test_custom_data_is_the_users_alone():
    args = (torch.randn(2, 4),)
    ep = st.trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), args).to_exported_program()
    assert not any("custom" in n.meta for n in ep.graph.nodes)
    ep.graph_module.meta["custom"] = {"of": "graph"}
    next(n for n in ep.graph.nodes if n.name == "linear").meta["custom"] = {"of": "node"}
    again = st.trace(ep.module(), args).to_exported_program()
    assert again.graph_module.meta["custom"] == {"of": "graph"}
    assert {n.name: n.meta["custom"] for n in again.graph.nodes if "custom" in n.meta} == {"linear": {"of": "node"}}


def test_a_tensor_bound_to_an_attribute_is_warned_of():
    class Keeps(nn.Module):
        def forward(self, x):
            self.last = x.sum()
            return x + 2

    tr = st.trace(Keeps(), (torch.ones(3),))
    with pytest.warns(st.errors.SideEffectWarning, match="The tensor attribute self.last was assigned during export"):
        tr.to_exported_program()


def test_a_warning_may_show_a_tensor():
    model = module_of(lambda self, x: (warnings.warn(f"got {x}", stacklevel=1), x + 1)[1])
    with pytest.warns(UserWarning, match=r"got FakeTensor.*size=\(3,\)") as found:
        tr = st.trace(model, (torch.ones(3),))
    assert found[0].filename == __file__
    for x in torch.zeros(3), torch.ones(3):
        tr.check((x,))


BANK = []


@pytest.mark.parametrize(
    ("keep", "name"), [(lambda self, y: self.log.append(y), "self.log"), (lambda _, y: BANK.append({"y": y}), "BANK")]
)
def test_a_tensor_left_in_a_list_is_warned_of(keep, name):
    class Keeps(nn.Module):
        def __init__(self):
            super().__init__()
            self.log, self.calls = [], 0

        def forward(self, x):
            self.calls += 1
            keep(self, x.sum())
            return x + 2

    tr = st.trace(model := Keeps(), (torch.ones(3),))
    with pytest.warns(st.errors.SideEffectWarning) as found:
        tr.to_exported_program()
    assert len(found) == 1 and f"{name} was [] and became [" in str(found[0].message).replace(
        "globals()['BANK']", "BANK"
    )
    assert not model.log and not BANK


def test_assertions_say_the_tightest_bounds():
    def forward(self, x):
        n = x.item()
        torch._check(n >= 0)
        torch._check(n >= 4)
        torch._check(n <= 9)
        return torch.ones(n)

    args = (torch.tensor(5),)
    ours = st.trace(module_of(forward), args).to_exported_program()
    said = [n.args[1] for n in ours.graph.nodes if "_assert_scalar" in str(n.target)]
    assert [text.partition(" on node")[0].rpartition("expression ")[2] for text in said] == ["u0 >= 4", "u0 <= 9"]
    with pytest.raises(RuntimeError, match="u0 >= 4"):
        ours.module()(torch.tensor(3))


# Ops checked against real data ---------------------------------------------------------------------------------------


def op_of(name, run, fake=None, mutates=()):
    """A custom op of two tensors."""
    op = torch.library.custom_op(f"scopetrace_export::{name}", run, mutates_args=mutates)
    if fake is not None:
        op.register_fake(fake)
    return op


def _plus(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x + y


def _alias(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x


def _write(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return y.add_(1).clone()


@pytest.mark.parametrize(
    ("op", "message"),
    [
        (op_of("shape", _plus, lambda x, y: x.new_empty(x.shape[::-1])), "output size mismatch"),
        (op_of("dtype", _plus, lambda x, y: torch.empty(x.shape, dtype=torch.int32)), "metadata mismatch"),
        (op_of("alias", _alias, lambda x, y: x.clone()), "may not alias"),
        (op_of("write", _write, lambda x, y: x.clone()), "for argument 'y'"),
    ],
)
def test_custom_ops_are_compared_with_their_fake_kernels(op, message):
    model, args = module_of(lambda self, x, y: op(x * 2, y)), (torch.randn(4, 8), torch.randn(4, 8))
    st.trace(model, args)
    real = torch._functorch.config.patch(fake_tensor_propagate_real_tensors=True)
    with real, pytest.raises(RuntimeError, match=message):
        st.trace(model, args)


def test_an_op_without_a_fake_kernel_and_a_value_are_those_of_the_example():
    op = op_of("plain", _plus)
    model = module_of(lambda self, x, y: op(x, y) + 1 if bool((x > 5).any()) else op(x, y) - 1)
    args = torch.ones(2, 3), torch.ones(3)
    with torch._functorch.config.patch(fake_tensor_propagate_real_tensors=True):
        tr = st.trace(model, args)
    torch.testing.assert_close(tr.to_exported_program().module()(*args), model(*args))
    torch.testing.assert_close(tr(torch.zeros(2, 3), args[1]), model(torch.zeros(2, 3), args[1]))
    assert [s.expression for s in tr.specializations] == ["Eq(u0, 1)"]
    with pytest.raises(st.InputMismatchError):
        tr(torch.full((2, 3), 6.0), args[1])


# Arguments that are neither tensors nor numbers ----------------------------------------------------------------------


Plain = enum.Enum("Plain", ["A", "B"])


class Text(enum.StrEnum):
    A, B = "a", "b"


class Number(enum.IntEnum):
    A, B = 1, 2


@pytest.mark.parametrize("kind", [Plain, Text, Number])
def test_an_enum_as_argument(kind, tmp_path):
    model = module_of(lambda self, x, modes: x + 1 if modes[0] is kind.A else x - 1)
    tr, x = st.trace(model, (torch.ones(3), [kind.A])), torch.zeros(3)
    programs = [ep := tr.to_exported_program(), ep.run_decompositions()]
    if kind is not Plain:  # torch.export.save does not know others
        torch.export.save(ep, tmp_path / "p.pt2")
        with torch.serialization.safe_globals([kind, getattr]):  # by which Python 3.11.2 pickles an Enum
            programs.append(torch.export.load(tmp_path / "p.pt2"))
    for program in programs:
        torch.testing.assert_close(program.module()(x, [kind.A]), x + 1)
        with pytest.raises(AssertionError, match="Guard failed"):
            program.module()(x, [kind.B])


def test_a_size_as_argument():
    """It is a container of numbers, as pytree has it."""
    grid = module_of(lambda self, theta, size: nn.functional.affine_grid(theta, size, align_corners=False))
    args = (torch.ones(1, 2, 3), torch.Size((1, 3, 4, 4)))
    ep = st.trace(grid, args).to_exported_program()
    assert_close(ep.module()(*args), grid(*args))
    with pytest.raises(AssertionError, match=r"size\[3\] == 4"):
        ep.module()(args[0], torch.Size((1, 3, 4, 5)))


def test_an_opaque_object_as_argument():
    @dataclasses.dataclass(frozen=True)
    class Settings(OpaqueBase):
        scale: int

        def __fx_repr__(self):
            return f"Settings({self.scale})", {"Settings": Settings}

    torch._library.opaque_object.register_opaque_type(Settings, typ="value")
    tr = st.trace(module_of(lambda self, x, s: x * s.scale), (torch.ones(3), Settings(4)))
    with pytest.warns(st.errors.FixedValueWarning, match=r"s.scale = 4"):
        ep = tr.to_exported_program()
    torch.testing.assert_close(ep.module()(torch.ones(3), Settings(4)), torch.full((3,), 4.0))


@pytest.mark.parametrize("make", [lambda: nn.Linear(4, 4), lambda: nn.BatchNorm1d(4), lambda: Deep(nn.Linear(4, 4))])
def test_a_module_as_argument(make):
    model, x = module_of(lambda self, x, m, n: m(x) * n(x).sum()), torch.randn(3, 4)
    ep = st.trace(model, (x, make(), nn.Linear(4, 2))).to_exported_program()
    theirs = torch.export.export(model, (x, make(), nn.Linear(4, 2)))
    names, expected = ([s.arg.name for s in p.graph_signature.input_specs] for p in (ep, theirs))
    assert names == expected
    for program in (ep, ep.run_decompositions()):
        for other in (make(), make()):
            args = x, other, nn.Linear(4, 2)
            expected = copy.deepcopy(args)
            torch.testing.assert_close(program.module()(*args), model(*expected))
            torch.testing.assert_close(other.state_dict(), expected[1].state_dict())


class Deep(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = nn.ModuleList([inner, nn.ReLU()])
        self.register_buffer("unread", torch.zeros(2))

    def forward(self, x):
        return self.inner[1](self.inner[0](x))


def test_a_module_as_two_arguments():
    both, model = nn.Linear(3, 3), Deep(nn.Linear(3, 3))
    model.forward = lambda x, m, n: m(x) + n(x)
    for m, n, name in (both, both, "n"), (model.inner[0], both, "m"):
        with pytest.raises(st.ExportError, match=rf"the argument {name}\['weight'\] is a tensor of the model, or of"):
            st.trace(model, (torch.ones(3), m, n)).to_exported_program()


@pytest.mark.parametrize("value", [torch.float32, torch.device("cpu"), 1 + 2j])
def test_other_objects_are_refused_as_arguments(value):
    tr = st.trace(module_of(lambda self, x, s: x * 2), (torch.ones(3), value))
    with pytest.raises(st.ExportError, match=f"the argument s is a {type(value).__name__}"):
        tr.to_exported_program()


# Blocks of another grad mode -----------------------------------------------------------------------------------------


class Places(nn.Module):
    def forward(self, x):
        return x.topk(2)[1]


class Switches(nn.Module):
    """Returns one of several results of an op, between blocks of the other grad mode that have several results."""

    def __init__(self, grad):
        super().__init__()
        self.grad, self.places, self.fc = grad, Places(), nn.Linear(4, 4)

    def forward(self, x):
        with torch.set_grad_enabled(not self.grad):
            y = self.fc(x)
            z = self.fc(y)
        i = self.places(y + z)
        with torch.set_grad_enabled(not self.grad):
            y, z = self.fc(x), self.fc(y).max(0)[0]
        return i, y, z


@pytest.mark.parametrize(
    ("grad", "route"),  # for False torch's own decompositions raise IndexError, of torch.export's programs too
    [(True, "module"), (True, "decomposed"), (True, "unflattened"), (False, "module"), (False, "unflattened")],
)
def test_blocks_of_another_grad_mode_around_ops_with_several_results(grad, route):
    model, x = Switches(grad), torch.randn(4, 4, requires_grad=True)
    with torch.set_grad_enabled(grad):
        ep = st.trace(model, (x,)).to_exported_program(preserve_module_call_signature=("*",))
        if route == "decomposed":
            ep = ep.run_decompositions()
        run = torch.export.unflatten(ep) if route == "unflattened" else ep.module()
        found, want = run(x), model(x)
    torch.testing.assert_close(found, want)
    if route != "decomposed":  # where torch drops the blocks
        assert [t.requires_grad for t in found] == [t.requires_grad for t in want]


# Swapping modules ----------------------------------------------------------------------------------------------------


class Cast(nn.Module):
    def forward(self, x):
        return x + 4, x.to(torch.float32)


class Casts(nn.Module):
    def __init__(self):
        super().__init__()
        self.cast = Cast()

    def forward(self, x):
        y, a = self.cast(x)
        return y + a


class CastsFirst(nn.Module):
    def __init__(self):
        super().__init__()
        self.casts, self.other = Casts(), nn.ReLU()

    def forward(self, x):
        return self.casts(x) + self.other(x) * x


@pytest.mark.parametrize("name", ["casts", "casts.cast", "other"])
def test_a_cast_that_changes_nothing_does_not_hinder_swapping(name):
    model, x = CastsFirst(), torch.randn(2, 3)
    ep = st.trace(model, (x,)).to_exported_program(preserve_module_call_signature=("*",))
    modules = torch.export.unflatten(ep)
    modules.set_submodule(name, model.get_submodule(name))
    torch.testing.assert_close(modules(x), model(x))


class Halves(nn.Module):
    def __init__(self):
        super().__init__()
        self.p = nn.Parameter(torch.ones(4, 4))

    def forward(self, x):
        with torch.no_grad():
            self.p.div_(2)
            self.p[0].add_(x[0])
        return x + self.p


@pytest.mark.parametrize("decompose", [False, True])
def test_a_program_that_changes_parameters_has_ops_of_torch_only(decompose):
    x = torch.randn(4, 4)
    ep = st.trace(Halves(), (x,)).to_exported_program()
    ep = ep.run_decompositions() if decompose else ep
    graphs = [m.graph for m in ep.graph_module.modules() if isinstance(m, torch.fx.GraphModule)]
    assert not any("scopetrace" in str(n.target) for graph in graphs for n in graph.nodes)
    with torch.no_grad():
        run, again = ep.module(), Halves()
        for _ in range(2):
            torch.testing.assert_close(run(x), again(x))
    torch.testing.assert_close(run.p, again.p)


@pytest.mark.parametrize("dim", [Dim("n"), Dim.AUTO, Dim.DYNAMIC])
def test_a_size_that_a_decomposition_fixes_is_dynamic_in_the_trace(dim):
    """torch unrolls a GRU."""
    model, others = nn.GRU(4, 3), torch.randn(7, 2, 4)
    tr = st.trace(model, (torch.randn(5, 2, 4),), dynamic_shapes={"input": {0: dim}})
    text, ep = str(tr), tr.to_exported_program()
    decomposed = ep.run_decompositions()
    assert str(tr) == text
    for program in (tr, ep.module(), tr.to_exported_program().module()):
        assert_close(program(others), model(others))
    with pytest.raises(AssertionError, match=r"input.size\(\)\[0\] == 5"):
        decomposed.module()(others)


def test_symbols_that_are_numbers_have_no_bindings():
    def forward(self, x, y):
        n = x.item()
        torch._check(n == 4)
        return y[: n + 1] * y.sum().item()

    ep = st.trace(module_of(forward), (torch.tensor(4), torch.ones(9))).to_exported_program()
    assert sum("unbacked_bindings" in n.meta for n in ep.graph.nodes) == 1
    with pytest.raises(RuntimeError, match="u0 <= 4"):  # as of torch.export
        ep.module()(torch.tensor(5), torch.ones(9))


def test_torch_compile_starts_over_at_a_graph_break_beside_a_body():
    def forward(self, x, n):
        return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)), x[: n.item()]

    model, args = module_of(forward), (torch.randn(4), torch.tensor(2))
    compiled = torch.compile(st.trace(model, args).to_exported_program().module(), backend="aot_eager")
    torch.testing.assert_close(compiled(*args), model(*args))


def test_a_module_that_is_not_called_has_no_signature():
    model = nn.Sequential(nn.Linear(3, 3), nn.Identity())
    model.unused = nn.ReLU()
    model.forward = lambda x: model[0](x)
    ep = st.trace(model, (torch.ones(3),)).to_exported_program(preserve_module_call_signature=("0", "unused"))
    assert [e.fqn for e in ep.module_call_graph if e.signature] == ["", "0"]


WRITES = {
    "in place": lambda x: (x.add_(1), x * 2)[1],
    "a part": lambda x: (x[0].mul_(2), x + 1)[1],
    "that changes nothing": lambda x: (torch.ops.aten.dropout_(x, 0.5, False), x - 2)[1],
    "of a result": lambda x: (x.copy_(y := x.sin()), y)[1],
    "twice": lambda x: (x.add_(1), x.mul_(3), x.relu())[2],
}


@pytest.mark.parametrize("name", WRITES)
def test_inputs_that_change_are_unflattened_after_decompositions(name):
    model = module_of(lambda self, x: self.inner(x).relu())
    model.inner = module_of(lambda self, x: WRITES[name](x))
    ep = st.trace(model, (torch.ones(2, 3),)).to_exported_program(preserve_module_call_signature=("inner",))
    for program in (ep, ep.run_decompositions({})):
        assert torch.ops.aten.copy.default not in [n.target for n in program.graph.nodes]
        for run in (program.module(), torch.export.unflatten(program)):
            given = torch.randn(2, 3)
            expected = given.clone()
            torch.testing.assert_close(run(given), model(expected))
            torch.testing.assert_close(given, expected)


class Pair:
    """A container that pytree knows without keys, and that computes with what it gets, as a cache does."""

    def __init__(self, a, b):
        self.a, self.b = torch.cat([a]), torch.cat([b])


pytree.register_pytree_node(Pair, lambda p: ((p.a, p.b), None), lambda items, _: Pair(*items))


def test_a_result_of_a_class_without_keys():
    tr = st.trace(lambda x: {"pair": Pair(x + 1, x * 2), "n": 3}, (torch.ones(3),))
    out = tr.to_exported_program().module()(torch.ones(3))
    assert type(out["pair"]) is Pair
    assert_close([out["pair"].a, out["pair"].b, out["n"]], [2 * torch.ones(3), 2 * torch.ones(3), 3])


def test_an_argument_of_a_class_without_keys_is_refused_as_by_torch():
    tr = st.trace(lambda p: p.a + p.b, (Pair(torch.ones(3), torch.ones(3)),))
    with pytest.raises(
        st.errors.ExportError, match=r"Did not find a flatten_with_keys_fn [^\0]*flatten_with_keys_fn=, or"
    ):
        tr.to_exported_program()


def test_a_cache_as_result_and_as_argument(request):
    """Prefill, then a step that takes the cache and gives one a token longer; transformers registers the class."""
    transformers = pytest.importorskip("transformers")
    kept = declare_missing_ops()  # parts of transformers import torchvision
    from transformers.integrations.executorch import register_dynamic_cache_export_support

    register_dynamic_cache_export_support()
    request.addfinalizer(lambda: pytree._deregister_pytree_node(transformers.DynamicCache) and kept)
    config = transformers.LlamaConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=20,
    )
    model, tokens, token = (
        transformers.LlamaForCausalLM(config).eval(),
        torch.ones(1, 5).long(),
        torch.ones(1, 1).long(),
    )
    with torch.no_grad():
        prefill = st.trace(model, (tokens,)).to_exported_program().module()
        cache, expected = prefill(tokens).past_key_values, model(tokens).past_key_values
        assert type(cache) is transformers.DynamicCache
        step = st.trace(model, (token,), {"past_key_values": copy.deepcopy(cache)}).to_exported_program()
        out = step.module()(token, past_key_values=cache)
        assert_close(out.logits, model(token, past_key_values=expected).logits)
        assert out.past_key_values.get_seq_length() == 6
