"""torch.cond, while_loop, scan and map in a model: recorded with their bodies, which are graphs of their own."""

import copy
import pickle

import pytest
import torch
from compare import assert_like_eager, assert_same_gradients
from purity import assert_pure
from torch import nn
from torch._higher_order_ops import associative_scan, map, scan, while_loop
from torch.export import Dim

import scopetrace as st


class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)

    def forward(self, x):
        def on(x):
            with st.scope("open"):
                return self.a(x).relu_()

        return torch.cond(x.sum() > 0, on, lambda x: self.b(x) * 2, (x,))


X = torch.linspace(-1, 2, 12).view(3, 4)  # its sum is positive
W = torch.linspace(1, 2, 4)


def assert_both_ways(fn, tr, x=X, stance="force_eager"):
    """A trace is right for inputs that take either branch, and agrees with itself."""
    tr.lint()
    with torch.compiler.set_stance(stance):  # eager's torch.cond compiles itself, which costs a second
        for given in (x, -x):
            assert_like_eager(fn, tr, (given,))


def operands(gm, op):
    node = next(n for n in gm.graph.nodes if n.target is op)
    return [getattr(gm, n.target) for n in node.all_input_nodes if n.target in dict(gm.named_children())]


# ---------------------------------------------------------------- what is recorded


def test_the_text_has_the_bodies_below_the_op():
    tr = st.trace(Gate(), (X,))
    assert str(tr) == (
        """\
Gate: 7 ops, 3 module calls, 4 parameters (40 elements)
Gate(x=%x: f32[3, 4]) -> %getitem: f32[3, 4]
  %sum_1: f32[] = aten.sum(%x)
  %gt: b8[] = aten.gt.Scalar(%sum_1, 0)
  %getitem: f32[3, 4], = torch.ops.higher_order.cond(%gt, true_graph_0, false_graph_0, \
(%x, self.a.weight, self.a.bias, self.b.weight, self.b.bias))
    true_graph_0(%x: f32[3, 4], %a_weight: f32[4, 4], %a_bias: f32[4], %b_weight: f32[4, 4], %b_bias: f32[4]) \
-> (%relu: f32[3, 4],)
      scope("open")
        Linear[a](input=%x: f32[3, 4]) -> %linear: f32[3, 4]
          %linear: f32[3, 4] = aten.linear(%x, %a_weight, %a_bias)
        %relu: f32[3, 4] = aten.relu(%linear)
    false_graph_0(%x: f32[3, 4], %a_weight: f32[4, 4], %a_bias: f32[4], %b_weight: f32[4, 4], %b_bias: f32[4]) \
-> (%mul: f32[3, 4],)
      Linear[b](input=%x: f32[3, 4]) -> %linear: f32[3, 4]
        %linear: f32[3, 4] = aten.linear(%x, %b_weight, %b_bias)
      %mul: f32[3, 4] = aten.mul.Tensor(%linear, 2)"""
    )
    assert_both_ways(tr.model, tr)


def test_a_loop():
    def f(x):
        return while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, y * 2 + x), (0, x))

    tr = st.trace(f, (X,))
    assert str(tr).splitlines()[2:] == [
        "  %getitem: Sym(u2), %getitem_1: f32[3, 4] = torch.ops.higher_order.while_loop("
        "while_loop_cond_graph_0, while_loop_body_graph_0, (0, %x), (%x,))",
        "    while_loop_cond_graph_0(%arg0: Sym(u0), %arg1: f32[3, 4], %x: f32[3, 4]) -> %lt: Sym(u0 < 3)",
        "      %lt: Sym(u0 < 3) = operator.lt(%arg0, 3)",
        "    while_loop_body_graph_0(%arg0: Sym(u1), %arg1: f32[3, 4], %x: f32[3, 4]) "
        "-> (%add_1: Sym(u1 + 1), %add: f32[3, 4])",
        "      %mul: f32[3, 4] = aten.mul.Tensor(%arg1, 2)",
        "      %add: f32[3, 4] = aten.add.Tensor(%mul, %x)",
        "      %add_1: Sym(u1 + 1) = operator.add(1, %arg0)",
    ]
    assert_both_ways(f, tr)


def test_calls_and_scopes_in_a_body():
    tr = st.trace(Gate(), (X,))
    root, a, b = tr.calls
    assert [c.scope.path for c in tr.calls] == [
        "Gate",
        "Gate/cond/true_fn/open/Linear[a]",
        "Gate/cond/false_fn/Linear[b]",
    ]
    on, off = operands(tr.graph_module, torch.ops.higher_order.cond)
    assert [n.name for n in a.nodes] == ["linear"]
    assert {n.graph for n in (*a.nodes, a.arguments["input"], a.outputs)} == {on.graph}
    assert {n.graph for n in b.nodes} == {off.graph}
    assert {n.graph for n in root.nodes} == {tr.graph_module.graph}
    assert [c.parent for c in (a, b)] == [root, root]
    assert root.children == [a, b]
    relu = next(n for n in on.graph.nodes if n.name == "relu")
    assert str(tr.scope_of(relu)) == "Gate/cond/true_fn/open"


def test_source_lines_and_types_in_a_body():
    tr = st.trace(Gate(), (X,))
    on, _ = operands(tr.graph_module, torch.ops.higher_order.cond)
    linear = next(n for n in on.graph.nodes if n.name == "linear")
    assert linear.meta["val"].shape == (3, 4)
    assert "return torch.cond(x.sum() > 0, on" in linear.meta["stack_trace"]
    assert [fqn for fqn, _ in linear.meta["nn_module_stack"].values()] == ["", "a"]


def test_equal_layers_with_a_branch_fold():
    tr = st.trace(nn.Sequential(Gate(), Gate(), Gate()), (X,))
    assert "  Gate[1, 2] ×2 as Gate[0] -> %getitem_2: f32[3, 4]" in str(tr).splitlines()
    assert_both_ways(tr.model, tr)


def test_layers_whose_branches_differ_do_not_fold():
    class Other(Gate):
        def __init__(self, k):
            super().__init__()
            self.k = k

        def forward(self, x):
            return torch.cond(x.sum() > 0, lambda x: x * self.k, lambda x: x + 1, (x,))

    assert "×" not in str(st.trace(nn.Sequential(Other(2), Other(3)), (X,)))


def test_save_load_copy_and_pickle(tmp_path):
    tr = st.trace(Gate(), (X,))
    tr.save(tmp_path / "gate.pt")
    loaded = st.load(tmp_path / "gate.pt")
    loaded.lint()
    assert str(loaded) == str(tr)
    for gm in (loaded, copy.deepcopy(tr.graph_module), pickle.loads(pickle.dumps(tr.graph_module))):
        for x in (X, -X):
            torch.testing.assert_close(torch.utils._pytree.tree_leaves(gm(x)), [tr(x)])


def test_other_tools_know_the_op():
    gm = st.trace(Gate(), (X,)).graph_module
    torch.testing.assert_close(torch.compile(gm, backend="aot_eager")(X), gm(X))
    torch.testing.assert_close(torch.export.export(gm, (X,)).module()(-X), gm(-X))
    torch.testing.assert_close(st.trace(gm, (X,))(-X), gm(-X))


# ---------------------------------------------------------------- programs, against eager and torch.export

PROGRAMS = {
    "tree": lambda x: torch.cond(
        x.sum() > 0, lambda d: {"s": d["k"] + 1, "l": [x * 2]}, lambda d: {"s": d["k"] - 1, "l": [x * 3]}, ({"k": x},)
    ),
    "no operands": lambda x: torch.cond(x.sum() > 0, lambda: x + W, lambda: x - W, ()),
    "nested": lambda x: torch.cond(
        x.sum() > 0, lambda x: torch.cond(x.sum() > 99, torch.sin, lambda y: y * W, (x,)), lambda x: x - W, (x,)
    ),
    "in place inside": lambda x: torch.cond(x.sum() > 0, lambda x: (x * 2).add_(1), lambda x: x.clone().mul_(x), (x,)),
    "a write to a part": lambda x: torch.cond(x.sum() > 0, lambda x: (x * 2).fill_diagonal_(1), lambda x: x * 3, (x,)),
    "several results": lambda x: torch.cond(
        x.sum() > 0, lambda x: (x.sin(), x[0] + 1), lambda x: (x * 2, x[1] + 2), (x,)
    ),
    "an unused operand": lambda x: torch.cond(x.sum() > 0, lambda x, w: x * 2, lambda x, w: x * w, (x, x[0] * 1)),
    "while": lambda x: while_loop(lambda i, y: i.sum() < 3, lambda i, y: (i + 1, (y * W).add_(x)), (torch.zeros(1), x)),
    "while tree": lambda x: while_loop(
        lambda d: d["i"].sum() < 3, lambda d: ({"i": d["i"] + 1, "x": d["x"] * 2},), ({"i": torch.zeros(1), "x": x},)
    ),
    "while by index": lambda x: while_loop(lambda i, y: i < x.shape[0], lambda i, y: (i + 1, y + x[i]), (0, x[0] * 1)),
    "scan": lambda x: (lambda k: scan(lambda c, y: (c + y, c * y * k), x[0] * 1, x))(x[1] * 1),
    "scan back": lambda x: scan(lambda c, y: (c + y, c * y), x[:, 0] * 1, x, dim=1, reverse=True),
    "map": lambda x: map(lambda y, k: (y * k).sin(), x, x[0] * 1),
    "associative_scan": lambda x: associative_scan(lambda a, b: a + b, x, dim=0, combine_mode="generic"),  # plain ops
    "loop in branch": lambda x: torch.cond(
        x.sum() > 0,
        lambda x: while_loop(lambda i, y: i.sum() < 3, lambda i, y: (i + 1, y * W), (torch.zeros(1), x))[1],
        lambda x: x * W,
        (x,),
    ),
    "branch in scan": lambda x: scan(
        lambda c, y: (torch.cond(y.sum() > 0, lambda c: c + 1, lambda c: c - y, (c,)), y * c), x[0] * 1, x
    ),
    "random": lambda x: torch.cond(x.sum() > 0, lambda x: torch.rand_like(x) * x, nn.functional.dropout, (x,)),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_equal_eager(name):
    f = PROGRAMS[name]
    stance = "default" if "tree" in name else "force_eager"  # only what compiles takes nested operands
    for functional in (True, False):
        assert_both_ways(f, st.trace(f, (X,), functional=functional), stance=stance)


def targets(gm):
    """The ops of each graph in a graph module, in order, by the graph's path; without arithmetic on sizes."""
    return {
        path: [str(n.target) for n in inner.graph.nodes if n.op == "call_function" and "function" not in str(n.target)]
        for path, inner in gm.named_modules()
        if isinstance(inner, torch.fx.GraphModule)
    }


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", [name for name in PROGRAMS if name != "associative_scan"])
def test_graphs_are_those_of_torch_export(name):
    class Model(nn.Module):
        def forward(self, x):
            return PROGRAMS[name](x)

    expected = targets(torch.export.export(Model(), (X,)).graph_module)
    assert targets(st.trace(Model(), (X,), functional=False).graph_module) == expected


@pytest.mark.parametrize("name", ["in place inside", "a write to a part", "nested", "map", "no operands"])
def test_gradients(name):
    f = PROGRAMS[name]
    for x in (X, -X):
        given = x.clone().requires_grad_()
        assert_same_gradients(f, st.trace(f, (given,)), (given,))


@pytest.mark.parametrize("name", ["while", "scan"])
def test_gradients_of_loops(name):
    def f(x):
        return PROGRAMS[name](x)[1]

    given = X.clone().requires_grad_()
    assert_same_gradients(f, st.trace(f, (given,)), (given,))


def test_gradients_of_parameters_that_a_branch_reads():
    model = Gate()
    tr = st.trace(model, (X,))
    for x in (X, -X):
        grads = [torch.autograd.grad(f(x).sum(), list(model.parameters())) for f in (model, tr)]
        torch.testing.assert_close(grads[1], grads[0])


def test_no_grad_around_and_inside():
    def around(x):
        with torch.no_grad():
            y = torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))
        return y * x

    def inside(x):
        def on(x):
            with torch.no_grad():
                y = x.sin()
            return y * x

        return torch.cond(x.sum() > 0, on, torch.cos, (x,))

    def begins(x):
        def on():
            with torch.no_grad():
                y = x.sin()
            return y * x

        return torch.cond(x.sum() > 0, on, lambda: x.cos(), ())

    def whole(x):
        def on():
            with torch.no_grad():
                return x.sin()

        return torch.cond(x.sum() > 0, on, lambda: x.cos(), ())

    given = X.clone().requires_grad_()
    for f in (around, inside, begins, whole):
        assert_same_gradients(f, st.trace(f, (given,)), (given,))


# ---------------------------------------------------------------- symbolic sizes


def test_a_predicate_of_sizes():
    def f(x):
        return torch.cond(x.shape[0] > 4, lambda x: x.sin(), lambda x: x.cos() * x.shape[0], (x,))

    tr = st.trace(f, (torch.randn(6, 4),), dynamic_shapes=({0: Dim("n")},))
    tr.lint()
    for n in (2, 4, 5, 9):
        tr.check((torch.randn(n, 4),))
    assert "cond(%gt, true_graph_0, false_graph_0, (%x,))" in str(tr)


def test_a_size_of_another_tensor_is_an_operand():
    def f(x, y):
        n = y.shape[0]
        return torch.cond(x.sum() > 0, lambda x: x * n, lambda x: x - n, (x,))

    tr = st.trace(f, (X, torch.randn(5)), dynamic_shapes=(None, {0: Dim("n")}))
    tr.lint()
    assert "cond(%gt, true_graph_0, false_graph_0, (%x, %sym_size_int))" in str(tr)
    for n in (2, 7):
        tr.check((X, torch.randn(n)))
        tr.check((-X, torch.randn(n)))


@pytest.mark.parametrize("name", ["nested", "scan", "map", "loop in branch"])
def test_bodies_of_dynamic_sizes(name):
    f = PROGRAMS[name]
    tr = st.trace(f, (torch.randn(6, 4),), dynamic_shapes=({0: Dim("n")},))
    for n in (2, 4, 9):
        tr.check((torch.randn(n, 4).abs(),))
        tr.check((-torch.randn(n, 4).abs(),))


def test_branches_of_different_sizes_and_numbers():
    def f(x):
        return torch.cond(x.sum() > 0, lambda x: (x[:2] + 1, 3), lambda x: (x + 2, 4), (x,))

    assert_both_ways(f, st.trace(f, (X,)))


# ---------------------------------------------------------------- mutation


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("n", torch.zeros(4))

    def forward(self, x):
        def on(x):
            self.n[:2].add_(x.sum())
            return x * 2

        with torch.no_grad():
            return torch.cond(x.sum() > 0, on, lambda x: x + self.n, (x,))


def test_a_buffer_that_a_branch_changes_comes_out_as_a_result():
    model = Counts()
    tr = st.trace(model, (X,))
    assert "-> (%mul: f32[3, 4], %slice_scatter: f32[4])" in str(tr)
    assert "-> (%add: f32[3, 4], %clone: f32[4])" in str(tr)
    assert str(tr.write_back).startswith("self.n.copy_(graph[")
    assert [(m.name, m.op) for m in tr.mutations] == [("n", "cond")]
    assert list(tr.calls[0].mutated) == ["n"]
    tr.lint()
    for x in (X, -X):
        tr.check((x,))
    tr(X)
    assert model.n[:2].ne(0).all() and model.n[2:].eq(0).all()


def test_inputs_views_and_closures_that_branches_change():
    def inputs(x):
        with torch.no_grad():
            y = torch.cond(x.sum() > 0, lambda x: x[0].add_(1).sum(), lambda x: x.mul_(3).sum(), (x,))
        return x, y

    def views(x):
        y = x * 2
        with torch.no_grad():
            z = torch.cond(x.sum() > 0, lambda r: r.mul_(3).sum(), lambda r: r.sum(), (y[1],))
        return y, z

    def closures(x):
        y = x * 2
        with torch.no_grad():
            z = torch.cond(x.sum() > 0, lambda: y.t()[0].mul_(3).sum(), lambda: x.sum(), ())
        return y, z

    def nested(x):
        y = x * 1

        def on(y):
            torch.cond(y.sum() > 1, lambda a: a.add_(1).sum(), lambda a: a.sum(), (y,))
            return y.sum()

        with torch.no_grad():
            z = torch.cond(x.sum() > 0, on, lambda y: y.sum(), (y,))
        return y, z

    for f in (inputs, views, closures, nested):
        assert_both_ways(f, st.trace(f, (X,)))


def test_a_write_that_autograd_does_not_see():
    def f(x):
        y = x * 2
        with torch.no_grad():
            z = torch.cond(x.sum() > 0, lambda y: y.mul_(3).sum(), lambda y: y.sum(), (y,))
        return y * z

    given = X.clone().requires_grad_()
    assert_same_gradients(f, st.trace(f, (given,)), (given,))


def test_a_result_is_written_to_later():
    def f(x):
        y = torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))
        y[0] = 3
        return y.add_(1)

    assert_both_ways(f, st.trace(f, (X,)))


def test_an_operand_that_the_pure_graph_lays_out_otherwise():
    def f(x):
        z = x.t().contiguous().t()
        z.t().copy_(x.t() * 2)
        return torch.cond(x.sum() > 0, lambda z: z.t().view(-1).sin(), lambda z: z.t().view(-1).cos(), (z,))

    assert_both_ways(f, st.trace(f, (X,)))


# ---------------------------------------------------------------- what torch does not allow


def binds():
    model = nn.Linear(4, 4)

    class Binds(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, x):
            def on(x):
                self.inner.last = x * 1
                return x * 2

            return torch.cond(x.sum() > 0, on, lambda x: x * 3, (x,))

    return Binds()


REFUSED = [
    ("shares memory", lambda x: torch.cond(x.sum() > 0, lambda x: x, lambda x: x + 1, (x,))),
    ("shares memory", lambda x: torch.cond(x.sum() > 0, lambda x: x[0], lambda x: x[0] + 1, (x,))),
    ("shares memory", lambda x: torch.cond(x.sum() > 0, lambda x: [x + 1] * 2, lambda x: [x + 1, x * 2], (x,))),
    ("different structures", lambda x: torch.cond(x.sum() > 0, lambda x: [x + 1, x * 2], lambda x: x + 1, (x,))),
    ("returns a NoneType", lambda x: torch.cond(x.sum() > 0, lambda x: (x + 1, None), lambda x: (x, None), (x,))),
    ("while autograd is on", lambda x: torch.cond(x.sum() > 0, lambda x: x.add_(1).sum(), torch.sum, (x,))),
]


@pytest.mark.parametrize(("message", "f"), REFUSED)
def test_what_torch_refuses_is_refused(message, f):
    with pytest.raises(RuntimeError):
        f(X.clone())
    with pytest.raises(st.ControlFlowError, match=message) as found:
        st.trace(f, (X,))
    assert found.value.op == "cond"
    assert "test_control_flow.py" in found.value.source


BEYOND = [
    ("several of its operands share", lambda x: torch.cond(x.sum() > 0, lambda y: y.add_(1) * x, torch.sin, (x,))),
    ("changes the shape", lambda x: torch.cond(x.sum() > 0, lambda x: x.t_().sum(), torch.sum, (x,))),
    (
        "runs several times",
        lambda x: while_loop(lambda i, y: i.sum() < 3, lambda i, y: (i + 1, y.add_(1) * 1), (torch.zeros(1), x)),
    ),
]


@pytest.mark.parametrize(("message", "f"), BEYOND)
def test_writes_that_are_refused_without_autograd(message, f):
    with torch.no_grad(), pytest.raises(st.ControlFlowError, match=message):
        st.trace(f, (X,))


def test_tensors_that_leave_a_body():
    model = binds()
    before = dict(model.inner.__dict__)
    with pytest.raises(st.ControlFlowError, match="binds one of its tensors to an attribute"):
        st.trace(model, (X,))
    assert model.inner.__dict__ == before

    kept = []

    def leaks(x):
        return torch.cond(x.sum() > 0, lambda x: kept.append(x * 1) or x * 2, lambda x: x * 3, (x,)) + kept[0]

    with pytest.raises(st.ForeignTensorError):
        st.trace(leaks, (X,))


def test_an_exception_in_a_body():
    def f(x):
        return torch.cond(x.sum() > 0, lambda x: x @ torch.zeros(7), torch.sin, (x,))

    def caught(x):
        try:
            return f(x)
        except RuntimeError:
            return x * 1

    with pytest.raises(RuntimeError, match="size mismatch"):
        st.trace(f, (X,))
    with pytest.raises(st.ControlFlowError, match="was caught"):
        st.trace(caught, (X,))


def test_other_uses_that_are_refused():
    def vmapped(x):
        return torch.vmap(lambda y: torch.cond(y.sum() > 0, torch.sin, torch.cos, (y,)))(x)

    def differentiated(x):
        return torch.autograd.grad(torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)).sum(), x)

    with pytest.raises(st.UnsupportedOpError, match=r"inside of torch\.vmap"):
        st.trace(vmapped, (X,))
    with pytest.raises(st.UnsupportedOpError, match="the forward differentiates"):
        st.trace(differentiated, (X.clone().requires_grad_(),))
    with pytest.raises(st.ControlFlowError, match="a leaf module is called in a body"):
        st.trace(Gate(), (X,), leaf_modules=[nn.Linear])


# ---------------------------------------------------------------- graphs that have such ops


@pytest.mark.sample(3)
@pytest.mark.parametrize("level", ["aten", "torch"])
@pytest.mark.parametrize("name", ["in place inside", "nested", "while", "scan", "map"])
def test_a_backend_sees_pure_bodies(name, level):
    seen = []

    def compiler(gm, inputs):
        seen.append(gm)
        assert_pure(gm)
        return gm

    compiled = torch.compile(PROGRAMS[name], backend=st.functional_backend(compiler, level=level), fullgraph=True)
    for x in (X, -X):
        torch.testing.assert_close(compiled(x), PROGRAMS[name](x))
    assert any(isinstance(m, torch.fx.GraphModule) for m in seen[0].children())


def test_ops_called_as_ops():
    add = torch.fx.symbolic_trace(lambda a, b: (a + b,))

    def shared(x):
        return torch.ops.higher_order.invoke_subgraph(add, "add", x, W)[0]

    def summed(x):
        return torch.ops.higher_order.associative_scan(lambda a, b: (a + b,), [x], ())[0]

    for f, graph in ((shared, "repeated_subgraph_0"), (summed, "associative_scan_combine_graph_0")):
        tr = st.trace(f, (X,))
        assert_both_ways(f, tr)
        assert list(dict(tr.graph_module.named_children())) == [graph]


@pytest.mark.parametrize("level", ["aten", "torch"])
def test_checkpoints_and_regions_of_dynamo(level):
    @torch.compiler.nested_compile_region
    def region(x, y):
        return x.sin().add_(y)

    def f(x):
        y = torch.utils.checkpoint.checkpoint(lambda x: x.sin().mul_(2), x, use_reentrant=False)
        return region(x, y) + region(y, x)

    compiled = torch.compile(f, backend=st.functional_backend(lambda gm, _: gm, level=level), fullgraph=True)
    torch.testing.assert_close(compiled(X), f(X))
    assert_like_eager(f, st.trace(f, (X,)), (X,))


def test_an_exported_program():
    model = Gate()
    gm = torch.export.export(model, (X,)).module()
    pure = st.functionalize(gm, (X,))
    on, _ = operands(pure.graph_module, torch.ops.higher_order.cond)
    assert [str(n.target) for n in on.graph.nodes if n.op == "call_function"] == [
        "aten.linear.default",
        "aten.relu.default",
    ]
    for x in (X, -X):
        torch.testing.assert_close(pure(x), model(x))


def test_lowered_scatters_in_a_body():
    def f(x):
        def on(x):
            y = x * 1
            y[0] = 2
            return y

        return torch.cond(x.sum() > 0, on, torch.sin, (x,))

    gm = st.trace(f, (X,), functional=False).graph_module
    pure = st.functionalize(gm, (X,), lower_scatter="cat")
    on, _ = operands(pure.graph_module, torch.ops.higher_order.cond)
    assert "aten.cat.default" in [str(n.target) for n in on.graph.nodes]
    for x in (X, -X):
        torch.testing.assert_close(pure(x), [f(x)] if isinstance(pure(x), list) else (f(x),))
