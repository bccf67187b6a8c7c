"""Graphs without mutation for compilers: any GraphModule, at ATen and at torch level, alone and under torch.compile."""

import copy
import operator

import pytest
import torch
import torch.fx
import torch.nn.functional as F
from compare import assert_like_eager
from purity import assert_pure
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import scopetrace as st
from scopetrace.api.functional import functional_backend, functionalize
from scopetrace.errors import FunctionalizationError, InputMismatchError, ScopetraceError
from scopetrace.program.graph import scope_path

LEVELS = ("aten", "torch")
FORMS = ("slice_scatter", "index_put", "where", "cat")


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()


def inputs(*shapes):
    torch.manual_seed(0)
    return tuple(torch.randn(s) for s in shapes)


def steps(program):
    return steps_of(program.graph_module)


def steps_of(gm):
    """The calls of a graph, one a line, as text without the inputs and the output."""
    rows = []
    for node in gm.graph.nodes:
        if node.op in ("call_function", "call_method", "call_module"):
            name = node.target if isinstance(node.target, str) else torch.fx.node._get_qualified_name(node.target)
            args = [*map(str, node.args), *(f"{k}={v}" for k, v in node.kwargs.items())]
            rows.append(f"{node.name} = {'.' if node.op == 'call_method' else ''}{name}({', '.join(args)})")
    return rows


def dynamo_graphs(fn, *args):
    graphs = []

    def keep(gm, example_inputs):
        graphs.append(gm)
        return gm.forward

    torch.compile(fn, backend=keep)(*copy.deepcopy(args))
    return graphs


def collect(graphs):
    """A compiler that runs the graph as it is and keeps it."""

    def compiler(gm, example_inputs):
        graphs.append(gm)
        return gm.forward

    return compiler


def check(fn, args, level, lower_scatter=None, **options):
    """Compare a compiled function with eager: values, effects, and what shares memory; returns the graphs."""
    graphs = []
    backend = functional_backend(collect(graphs), level=level, lower_scatter=lower_scatter)
    compiled = torch.compile(fn, backend=backend, **options)
    assert_like_eager(fn, compiled, args)
    for gm in graphs:
        assert_pure(gm)
    return graphs


# ---------------------------------------------------------------- graphs


def f_relu(x):
    return F.relu(x, inplace=True)


def f_method(x, y):
    z = x * 1
    z.add_(y, alpha=2)
    return z


def f_out(x, y):
    o = torch.empty(3, 4)
    torch.add(x, y, out=o)
    return o


def f_operator(x, y):
    x += y
    return x


def f_item(x, y):
    z = y * 1
    z[:, 0] = x[:, 0]
    return z


def f_named(x):
    return torch.relu_(x)


TORCH_FORMS = [
    (f_relu, 1, ["relu = torch.nn.functional.relu(l_x)"]),
    (f_method, 2, ["z = _operator.mul(l_x, 1)", "add_ = .add(z, l_y, alpha=2)"]),
    (f_out, 2, ["add = torch.add(l_x, l_y)"]),
    (f_operator, 2, ["x = _operator.add(l_x, l_y)"]),
    (f_item, 2, None),
    (f_named, 1, ["relu_ = torch.relu(l_x)"]),
]


def targets(rows):
    return [row.split(" = ", 1)[1].split("(")[0] for row in rows]


@pytest.mark.parametrize(("fn", "count", "expected"), TORCH_FORMS, ids=lambda p: getattr(p, "__name__", ""))
def test_torch_level_keeps_the_vocabulary(fn, count, expected):
    args = inputs(*[(3, 4)] * count)
    (gm,) = check(fn, args, "torch")
    expected = expected or ["_ = _operator.mul(", "_ = _operator.getitem(", "_ = torch.select_scatter("]
    assert sorted(targets(steps_of(gm))) == sorted(targets(expected))


def test_a_graph_reads_like_the_program():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)
            self.act = nn.ReLU(inplace=True)

        def forward(self, x):
            y = self.act(self.fc(x))
            y += 1
            y[:, 0].copy_(x[:, 0])
            return y.mul_(2)

    net = Net()
    gm = torch.fx.symbolic_trace(net)
    program = functionalize(gm, inputs((3, 4)), level="torch")
    assert steps(program) == [
        "fc = fc(x)",
        "relu = torch.nn.functional.relu(fc)",
        "add = _operator.add(relu, 1)",
        "getitem = _operator.getitem(x, (slice(None, None, None), 0))",
        "select_scatter = torch.select_scatter(add, getitem, 1, 0)",
        "mul = .mul(select_scatter, 2)",
    ]
    assert net.act.inplace is True
    (x,) = inputs((3, 4))
    torch.testing.assert_close(program(x), net(x))


# ---------------------------------------------------------------- functionalize


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("n", torch.zeros(()))
        self.bn = nn.BatchNorm1d(4)

    def forward(self, x):
        self.n.add_(torch.ones_like(x[0, 0]))  # a number alone would be added while fx traces
        return self.bn(x) * self.n


@pytest.mark.parametrize("level", LEVELS)
def test_symbolic_trace_updates_the_buffers_of_the_graph(level):
    model = Counter()
    gm = torch.fx.symbolic_trace(copy.deepcopy(model))
    program = functionalize(gm, inputs((3, 4)), level=level)
    for seed in range(2):
        torch.manual_seed(seed)
        x = torch.randn(3, 4)
        torch.testing.assert_close(program(x), model(x))
        torch.testing.assert_close(dict(gm.named_buffers()), dict(model.named_buffers()))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("make", ["make_fx", "export"])
def test_graphs_from_torch(level, make):
    def fn(x, y):
        x.add_(1)
        y[0].mul_(2)
        return x + y

    class Fn(nn.Module):
        def forward(self, x, y):
            return fn(x, y)

    args = inputs((3, 4), (3, 4))
    if make == "make_fx":
        gm = make_fx(fn)(*copy.deepcopy(args))
    else:
        gm = torch.export.export(Fn(), copy.deepcopy(args)).module()
    program = functionalize(gm, args, level=level)
    ours, theirs = copy.deepcopy(args), copy.deepcopy(args)
    torch.testing.assert_close(program(*ours), fn(*theirs))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("level", LEVELS)
def test_the_report_and_the_write_back_are_there(level):
    def fn(x):
        x.add_(1)
        return x, x[0]

    (gm,) = dynamo_graphs(fn, *inputs((3, 4)))
    program = functionalize(gm, inputs((3, 4)), level=level)
    assert [m.kind for m in program.mutations] == ["input"]
    assert [a.kind for a in program.aliases] == ["same", "view"] or len(program.aliases) == 1
    assert ".copy_(graph[0])" in str(program.write_back)


def test_inputs_are_checked():
    gm = torch.fx.symbolic_trace(lambda x: x.add_(1))
    program = functionalize(gm, inputs((3, 4)))
    with pytest.raises(InputMismatchError):
        program(torch.ones(2, 2))


def test_wrong_options_say_what_is_right():
    gm = torch.fx.symbolic_trace(lambda x: x + 1)
    with pytest.raises(ScopetraceError, match="'aten', 'torch'"):
        functionalize(gm, inputs((3, 4)), level="Torch")
    with pytest.raises(ScopetraceError, match="'where'"):
        functionalize(gm, inputs((3, 4)), lower_scatter="scatter")


def test_a_refusal_names_the_op_and_the_line():
    def pieces(x, y):
        x.add_(1)
        return y.view(torch.float32)

    base = torch.zeros(4)
    graphs = []

    def keep(gm, args):
        graphs.append(gm)
        return gm.forward

    torch.compile(pieces, backend=keep)(base.clone(), base.view(torch.int32).clone())
    with pytest.raises(FunctionalizationError, match="different dtypes") as error:
        functionalize(graphs[0], (base, base.view(torch.int32)), level="torch")
    assert error.value.op == "aten.add_.Tensor"
    assert "x.add_(1)" in error.value.source


# ---------------------------------------------------------------- assert_pure


def graph_of(build):
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.output(build(graph, x))
    return torch.fx.GraphModule({"act": nn.ReLU(inplace=True), "bn": nn.BatchNorm1d(4)}, graph)


IMPURE = [
    lambda g, x: g.call_function(torch.ops.aten.add_.Tensor, (x, 1)),
    lambda g, x: g.call_function(torch.add, (x, 1), {"out": x}),
    lambda g, x: g.call_function(F.relu, (x,), {"inplace": True}),
    lambda g, x: g.call_function(F.relu, (x, True)),
    lambda g, x: g.call_function(F.batch_norm, (x, x, x, None, None, True)),
    lambda g, x: g.call_function(operator.setitem, (x, 0, 1)),
    lambda g, x: g.call_function(operator.iadd, (x, 1)),
    lambda g, x: g.call_function(torch.relu_, (x,)),
    lambda g, x: g.call_method("mul_", (x, 1)),
    lambda g, x: g.call_method("__imul__", (x, 1)),
    lambda g, x: g.call_method("__setitem__", (x, 0, 1)),
    lambda g, x: g.call_module("act", (x,)),
    lambda g, x: g.call_module("bn", (x,)),
]


@pytest.mark.parametrize("build", IMPURE)
def test_impure_nodes_are_found(build):
    gm = graph_of(build)
    with pytest.raises(FunctionalizationError, match="mutates"):
        assert_pure(gm)
    with pytest.raises(FunctionalizationError):
        assert_pure(nn.Sequential(gm))


PURE = [
    lambda g, x: g.call_function(torch.add, (x, 1), {"out": None}),
    lambda g, x: g.call_function(F.relu, (x, False)),
    lambda g, x: g.call_function(operator.is_, (x, None)),
    lambda g, x: g.call_function(operator.invert, (x,)),
    lambda g, x: g.call_function(operator.and_, (x, x)),
    lambda g, x: g.call_method("__invert__", (x,)),
    lambda g, x: g.call_method("__and__", (x, x)),
]


@pytest.mark.parametrize("build", PURE)
def test_pure_nodes_pass(build):
    assert_pure(graph_of(build))


# ---------------------------------------------------------------- torch.compile


def p_views(x):
    z = x * 1
    a, b = z[:, :2], z[:, 1:3]
    a.add_(1)
    b.mul_(2)
    a.sub_(3)
    return z, a, b


def p_input_returned(x):
    x.mul_(2)
    return x[1:], x


def p_strides(x):
    o = x.t().contiguous().t() * 1
    o.copy_(x)
    o[0] = 7
    return o, o.t().view(-1)


def p_dtype(x):
    h = x.half()
    h += x
    i = (x * 10).long()
    i[0] = x[0] * 10
    return h, i


def p_diagonal(x):
    z = x * 1
    z.diagonal(1).fill_(3)
    z.t()[1:3, ::2] = 5
    return z


def p_masked(x):
    z = x * 1
    z[z > 0] = 0
    z.masked_fill_(z < -1, 4.0)
    z.clamp_(min=-2).lerp_(x, 0.5)
    return z


def p_foreach(x):
    z = x * 1
    torch._foreach_add_(list(z.unbind(0)), 1.0)
    return z


def p_shape(x):
    z = x * 1
    z.unsqueeze_(0).transpose_(0, 1)
    z.add_(1)
    return z


def p_split(x):
    a, b = x.chunk(2, 1)
    a.add_(b)
    return b, a


def p_break(x):
    y = x[0]
    y.add_(1)
    torch._dynamo.graph_break()
    x.mul_(2)
    return y, x


def p_complex(x):
    z = torch.complex(x, x)
    z.real.mul_(2)
    torch.view_as_real(z)[..., 0].add_(1)
    return z


PROGRAMS = [v for k, v in list(globals().items()) if k.startswith("p_")]


@pytest.mark.sample(2)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("fn", PROGRAMS, ids=lambda f: f.__name__)
def test_compiled_programs_do_what_eager_does(fn, level):
    graphs = check(fn, inputs((3, 4)), level)
    assert len(graphs) == (2 if fn is p_break else 1)


@pytest.mark.parametrize("level", LEVELS)
def test_inputs_that_share_memory(level):
    base = torch.arange(12.0).reshape(3, 4)

    def fn(a, b):
        a.add_(1)
        b.mul_(2)
        return a + b

    check(fn, (base[:, :3], base[:, 1:]), level)
    check(fn, (base.clone()[:, :3], base.clone()[:, 1:]), level)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("form", FORMS)
def test_scatters_in_each_form(form, level):
    known = {
        "slice_scatter": {"select_scatter", "diagonal_scatter"},
        "index_put": {"slice_scatter", "select_scatter", "diagonal_scatter"},
        "where": {"slice_scatter", "select_scatter", "diagonal_scatter", "index_put"},
        "cat": {"slice_scatter", "select_scatter", "diagonal_scatter", "index_put"},
    }[form]

    def fn(x):
        z = x * 1
        z[1] = 5
        z[:, 1:3].mul_(2)
        z[:, ::2].add_(1)
        z.diagonal().neg_()
        z[..., -1] = z[..., 0]
        return z

    (gm,) = check(fn, inputs((3, 4)), level, form)
    assert not known & {n.name.rstrip("_0123456789") for n in gm.graph.nodes}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("form", (None, *FORMS))
def test_gradients_flow_through_scatters(form, level):
    def fn(x, w):
        z = x * w
        z[:, 0] = w[0] * 2
        z[1:, ::2] *= 3
        return (z * z).sum()

    x, w = inputs((3, 4), (4,))
    w1, w2 = w.clone().requires_grad_(), w.clone().requires_grad_()
    fn(x, w1).backward()
    torch.compile(fn, backend=functional_backend(collect([]), level=level, lower_scatter=form))(x, w2).backward()
    torch.testing.assert_close(w2.grad, w1.grad)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Linear(8, 1))


def train(model, steps=3):
    owner = getattr(model, "_orig_mod", model)
    optimizer = torch.optim.SGD(owner.parameters(), lr=0.1, momentum=0.9)
    for seed in range(steps):
        torch.manual_seed(seed)
        optimizer.zero_grad()
        model(torch.randn(5, 4)).square().mean().backward()
        optimizer.step()
    return {k: v.detach().clone() for k, v in owner.state_dict().items()}


@pytest.mark.parametrize("level", LEVELS)
def test_training_gives_the_weights_of_eager(level):
    compiled = torch.compile(net(), backend=functional_backend(collect([]), level=level))
    torch.testing.assert_close(train(compiled), train(net()))


def test_training_around_and_inside_aot_autograd():
    graphs = []
    outside = functional_backend(lambda gm, args: aot_autograd(fw_compiler=collect(graphs))(gm, args))
    torch.testing.assert_close(train(torch.compile(net(), backend=outside)), train(net()))
    torch._dynamo.reset()
    inside = aot_autograd(fw_compiler=functional_backend(collect(graphs)))
    torch.testing.assert_close(train(torch.compile(net(), backend=inside)), train(net()))
    for gm in graphs:
        assert_pure(gm)


@pytest.mark.parametrize("level", LEVELS)
def test_dynamic_sizes_compile_again(level):
    def fn(x):
        x[: x.shape[0] // 2] = 0
        return x.sum(0)

    graphs = []
    compiled = torch.compile(fn, backend=functional_backend(collect(graphs), level=level), dynamic=True)
    for n in (4, 6, 4, 8):
        x, y = torch.ones(n, 3), torch.ones(n, 3)
        torch.testing.assert_close(compiled(x), fn(y))
        torch.testing.assert_close(x, y)
    assert len(graphs) == 3


class Rate(nn.Module):
    def __init__(self):
        super().__init__()
        self.rate = 0.5

    def forward(self, x):
        return x.sin() * self.rate


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    "module",
    [nn.LayerNorm(4), nn.BatchNorm1d(4), nn.BatchNorm1d(4).eval(), nn.Dropout(0.5), nn.GroupNorm(2, 4), Rate()],
    ids=str,
)
def test_floats_of_a_model_under_dynamic_sizes(module, level):
    """Dynamo gives them as tensors, of which the graph takes `item`."""
    eager, graphs = copy.deepcopy(module), []
    compiled = torch.compile(module, backend=functional_backend(collect(graphs), level=level), dynamic=True)
    for n in (3, 5, 3):
        x = torch.randn(n, 4)
        results = []
        for run in (compiled, eager):
            torch.manual_seed(0)
            results.append(run(x))
        torch.testing.assert_close(*results)
    for mine, theirs in zip(module.buffers(), eager.buffers(), strict=True):
        torch.testing.assert_close(mine, theirs)
    assert len(graphs) == 2
    if isinstance(module, Rate):
        module.rate = -2.0
        torch.testing.assert_close(compiled(x), x.sin() * -2)


class Checkpointed(nn.Module):
    """Dynamo has the region as a body, which takes the `item` of both `eps`."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.LayerNorm(4, eps=0.1), nn.LayerNorm(4, eps=0.2)

    def forward(self, x):
        y = checkpoint(self.first, x, use_reentrant=False)
        return checkpoint(lambda t: self.second(t).sin(), y, use_reentrant=False)


@pytest.mark.parametrize("level", LEVELS)
def test_floats_in_a_checkpointed_region_under_dynamic_sizes(level):
    module = Checkpointed()
    compiled = torch.compile(module, backend=functional_backend(collect([]), level=level), dynamic=True)
    for n in (3, 5, 3):
        x = torch.randn(n, 4)
        results = []
        for run in (compiled, module):
            module.zero_grad()
            out = run(x)
            out.square().sum().backward()
            results.append((out, [p.grad for p in module.parameters()]))
        torch.testing.assert_close(*results)


def test_autocast_and_no_grad_at_torch_level():
    def fn(x, w):
        with torch.no_grad():
            w.mul_(0.5)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = x @ w
            y.add_(1)
        return y

    check(fn, inputs((3, 4), (4, 4)), "torch")


def test_a_module_does_not_read_a_parameter_that_was_written_before():
    class Decay(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            self.fc.bias.data.add_(1)
            return self.fc(x)

    model = Decay()
    gm = torch.fx.symbolic_trace(copy.deepcopy(model))
    program = functionalize(gm, inputs((3, 4)), level="torch")
    for _ in range(2):
        (x,) = inputs((3, 4))
        torch.testing.assert_close(program(x), model(x))


def test_random_numbers_are_those_of_eager():
    def fn(x):
        z = x * 1
        F.dropout(z, 0.5, True, inplace=True)
        return z.add_(torch.rand(4))

    for level in LEVELS:
        torch._dynamo.reset()
        compiled = torch.compile(fn, backend=functional_backend(collect([]), level=level))
        (x,) = inputs((30, 4))
        torch.manual_seed(1)
        expected = fn(x)
        torch.manual_seed(1)
        torch.testing.assert_close(compiled(x), expected)


@pytest.mark.slow
def test_inductor_behind_the_wrapper():
    from torch._inductor.compile_fx import compile_fx

    def fn(x):
        x.unfold(0, 2, 3).mul_(2)
        return x

    (x,) = inputs((7,))
    expected = fn(x.clone())
    actual = torch.compile(fn, backend=functional_backend(compile_fx))(x)
    assert actual is x
    torch.testing.assert_close(actual, expected)  # Inductor alone zeroes what the windows leave out


class _Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 3)

    def forward(self, x):
        return self.fc(x).relu_()


@pytest.mark.parametrize("level", ["aten", "torch"])
def test_scopes_are_those_of_the_modules_that_dynamo_went_through(level):
    graphs, stacks = [], []

    def backend(gm, example_inputs):
        made = functionalize(gm, example_inputs, level=level)
        calls = [n for n in made.graph_module.graph.nodes if n.op.startswith("call")]
        graphs.extend((scope_path(n), n.name) for n in calls)
        stacks.extend([*n.meta["nn_module_stack"].values()] for n in calls)
        return made

    torch.compile(nn.Sequential(_Layer(), _Layer()), backend=backend)(torch.randn(2, 3))
    assert [path.split("/", 1)[1] for path, _ in graphs] == [
        "_Layer[0]/Linear[fc]",
        "_Layer[0]",
        "_Layer[1]/Linear[fc]",
        "_Layer[1]",
    ]
    names = [(fqn, kind.rpartition(".")[2]) for fqn, kind in stacks[2]]
    assert names == [("", "Sequential"), ("1", "_Layer"), ("1.fc", "Linear")]


@pytest.mark.parametrize("level", ["aten", "torch"])
def test_refusals_cite_the_line_of_the_model_and_not_of_generated_code(level):
    def f(x):
        v = torch.as_strided(x, (2, 2), (1, 1))
        v.add_(1)
        return v

    def backend(gm, example_inputs):
        return functionalize(gm, example_inputs, level=level)

    with pytest.raises(Exception, match=r"no pure form") as caught:
        torch.compile(f, backend=backend)(torch.zeros(4))
    assert "test_functionalize.py" in str(caught.value) and "v.add_(1)" in str(caught.value)


def test_one_program_wherever_an_input_begins_in_its_memory():
    compiled = []

    def compiler(gm, example_inputs):
        compiled.append(gm)
        return gm

    run = torch.compile(lambda x: x.mul_(2).sum(), backend=functional_backend(compiler))
    rows = torch.ones(4, 3)
    for i in range(4):
        run(rows[i])
    assert len(compiled) == 1
    torch.testing.assert_close(rows, torch.full((4, 3), 2.0))


def test_programs_that_count_from_the_start_of_the_memory_are_compiled_for_each():
    run = torch.compile(lambda x: x.as_strided((2,), (1,), 1) + 0, backend=functional_backend(lambda gm, _: gm))
    rows = torch.arange(8.0).view(2, 4)
    for row in rows:
        torch.testing.assert_close(run(row), row.as_strided((2,), (1,), 1) + 0)


@pytest.mark.parametrize("dims", [(1, 6), (4, 1)])
def test_an_expanded_input_that_is_written_gets_the_random_numbers_of_eager(dims):
    def run(x):
        x.select(dims.index(1), 1).exp_()
        return torch.dropout(x, 0.5, True)

    trace = st.trace(run, (torch.ones(dims).expand(4, 6),))
    torch.manual_seed(0)
    wanted = run(torch.ones(dims).expand(4, 6))
    torch.manual_seed(0)
    assert torch.equal(trace(torch.ones(dims).expand(4, 6)), wanted)


def multiplied_in_place(a, b):
    a @= b  # tensors have no `__imatmul__`: a new one
    return a + 0


WRITES_AS_PEOPLE_WRITE_THEM = {
    "@=": multiplied_in_place,
    "relu": lambda a, b: F.relu(a, inplace=True) + b,
    "hardswish": lambda a, b: F.hardswish(a, inplace=True),
    "dropout": lambda a, b: F.dropout(a, 0.5, False, inplace=True) * b,
    "a part": lambda a, b: (a[1:].add_(b[1:]), a)[1],
    "an entry": lambda a, b: (a.__setitem__((slice(None), 0), 5.0), a * b)[1],
    "out=": lambda a, b: torch.add(a, b, out=torch.empty(3, 3)),
    "+=": lambda a, b: a.__iadd__(b.sum()),
    "several": lambda a, b: (F.leaky_relu_(a, 0.2).clamp_(0), b[0].zero_(), a + b)[2],
    "index_add_": lambda a, b: a.index_add_(0, torch.tensor([0, 1]), b[:2]),
    "t_": lambda a, b: a.t_() * b,
}


@pytest.mark.parametrize("name", WRITES_AS_PEOPLE_WRITE_THEM)
def test_torch_level_computes_and_writes_what_eager_does(name):
    forward = WRITES_AS_PEOPLE_WRITE_THEM[name]
    ours, eager = ([torch.linspace(-1, 1, 9).reshape(3, 3), torch.linspace(2, 3, 9).reshape(3, 3)] for _ in range(2))
    compiled = torch.compile(forward, backend=st.functional_backend(lambda gm, inputs: gm, level="torch"))
    torch.testing.assert_close(compiled(*ours), forward(*eager))
    torch.testing.assert_close(ours, eager)


SIZES_OF_DATA = {
    "nonzero": lambda x: x.nonzero() + 1,
    "mask": lambda x: x[x > 0] * 2,
    "unique": lambda x: torch.unique(x) + x.sum(),
    "written": lambda x: x.add_(1)[x > 1],
    "item": lambda x: torch.zeros(int((x > 0).sum().item()) + 1) + 1,
}


@pytest.mark.parametrize("backend", ["aot_eager", "eager"])
@pytest.mark.parametrize("name", SIZES_OF_DATA)
def test_a_backend_by_name_and_sizes_that_depend_on_data(name, backend):
    torch._dynamo.reset()
    function = SIZES_OF_DATA[name]
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True):
        compiled = torch.compile(function, backend=functional_backend(backend), fullgraph=True)
        for x in (torch.tensor([1.0, 0, 2]), torch.tensor([1.0, 3, 2]), torch.tensor([0.0, -5, 0])):
            assert torch.equal(compiled(x.clone()), function(x.clone()))
