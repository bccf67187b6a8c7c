"""`Trace.split_backward`: a forward and a backward graph, run one after the other, beside eager."""

import collections
import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import default_partition, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd

import scopetrace as st
from tests.steps import Net

PARTITIONERS = [default_partition, min_cut_rematerialization_partition]


class Parts(torch.nn.Module):
    """What the programs below use."""

    def __init__(self):
        super().__init__()
        self.fc, self.other = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        self.norm, self.table = torch.nn.BatchNorm1d(4), torch.nn.Embedding(5, 4)
        self.conv, self.lstm = torch.nn.Conv1d(5, 2, 3), torch.nn.LSTM(4, 4, 2, dropout=0.5)
        self.frozen = torch.nn.Parameter(torch.randn(4), requires_grad=False)
        self.register_buffer("count", torch.zeros(()))


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 30 * ctx.saved_tensors[0] ** 2


def several_results(m, x):
    y = m.fc(x)
    return {"y": y, "row": y[0], "x": x, "same": y, "plain": y.detach(), "count": (x > 0).sum()}


def buffers(m, x):
    m.count += 1
    return m.norm(m.fc(x)).relu() * m.count


def in_place(m, x):
    y = m.fc(x)
    y[:, 1:].mul_(y[0, 0].clone().sin())
    return y.sigmoid_()


def views_of_results(m, x):
    y = m.fc(x).t()
    return y, y[1:], y.unsqueeze(0)


def energy(m, x):
    return m.other(m.fc(x).tanh()).square().sum()


def energy_and_forces(m, x):
    e = energy(m, x)
    return e, torch.autograd.grad(e, x, create_graph=True)[0]


def loss_and_gradients(m, x):
    loss = energy(m, x)
    return loss, *torch.autograd.grad(loss, list(m.fc.parameters()), retain_graph=True)


def penalized_and_counted(m, x):
    e, forces = energy_and_forces(m, x.detach().requires_grad_())
    m.count += e.detach()
    return e + forces.norm()


PROGRAMS = {
    "linear": lambda m, x: m.fc(x),
    "twice": lambda m, x: m.fc(m.fc(x).tanh()) + m.fc.weight[0],
    "several results": several_results,
    "buffers": buffers,
    "in place": in_place,
    "views of results": views_of_results,
    "dropout of what is saved": lambda m, x: F.dropout(F.leaky_relu(m.fc(x), 0.2), 0.3),
    "an op that only checks": lambda m, x: torch.linalg.solve(m.fc.weight @ m.fc.weight.t() + torch.eye(4), x.t()),
    "a frozen parameter": lambda m, x: m.fc(x) * m.frozen,
    "a gradient of the input": lambda m, x: m.fc(x * x),
    "dropout": lambda m, x: F.dropout(m.fc(x), 0.5) * m.other(x),
    "attention": lambda m, x: F.scaled_dot_product_attention(m.fc(x)[None], m.other(x)[None], x[None], is_causal=True),
    "embedding and convolution": lambda m, x: m.conv(m.table(torch.arange(5)) * x),
    "lstm": lambda m, x: m.lstm(x)[0],
    "a function of autograd": lambda m, x: Cube.apply(m.fc(x)),
    "loss": lambda m, x: F.cross_entropy(m.fc(x), torch.tensor([0, 1, 2, 3, 0])),
    "no_grad": lambda m, x: m.fc(x) + m.other(x).detach() + torch.no_grad()(m.other)(x),
    "checkpoint": lambda m, x: torch.utils.checkpoint.checkpoint(m.fc, x.sin(), use_reentrant=False).sin(),
    "a function's derivative": lambda m, x: torch.func.grad(functools.partial(energy, m))(x),
    "forces by an input": energy_and_forces,
    "a loss and its gradients": loss_and_gradients,
    "a penalty of forces, and a count": penalized_and_counted,
    "sort": lambda m, x: m.fc(x).sort(-1).values.cumsum(0)[::2].std(),
}


class Model(Parts):
    def __init__(self, program):
        super().__init__()
        self.program = program

    def forward(self, x):
        return self.program(self, x)


def floating(out):
    return [t for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, torch.Tensor) and t.requires_grad]


def run(program, x):
    torch.manual_seed(3)
    out = program(x)
    sum((t * torch.linspace(0.1, 1, t.numel()).view(t.shape)).sum() for t in floating(out)).backward()
    return out, torch.get_rng_state()


def start(*models):
    """Without gradients, as before the first call."""
    for model in models:
        model.zero_grad()


def assert_as_eager(split, model, twin, x):
    """Of one call each: results, gradients and buffers, where those before it are equal."""
    other = x.detach().clone().requires_grad_(x.requires_grad)
    found, expected = run(split, x), run(twin, other)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    torch.testing.assert_close(x.grad, other.grad, rtol=0, atol=0)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(list(model.buffers()), list(twin.buffers()), rtol=0, atol=0)


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", PROGRAMS)
def test_results_effects_and_gradients_are_those_of_eager(name):
    torch.manual_seed(0)
    model, needs_grad = Model(PROGRAMS[name]), "input" in name
    twin, x = copy.deepcopy(model), torch.randn(5, 4, requires_grad=needs_grad)
    trace = st.trace(model, (x,))
    for partition_fn in PARTITIONERS:
        start(model, twin)
        split = trace.split_backward(partition_fn)
        for _ in range(2):
            assert_as_eager(split, model, twin, x.detach().clone().requires_grad_(needs_grad))


@pytest.mark.parametrize("partition_fn", PARTITIONERS)
def test_a_training_step(partition_fn):
    torch.manual_seed(0)
    model = Net()
    twin = copy.deepcopy(model)

    def step_of(model):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

        def step(x, y):
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return step

    x, y = torch.randn(5, 4), torch.randint(0, 3, (5,))
    step, eager = step_of(model), step_of(twin)
    split = st.trace(step, (x, y)).split_backward(partition_fn)
    for _ in range(3):
        assert torch.equal(split(x, y), eager(x, y))
        assert all(map(torch.equal, model.parameters(), twin.parameters()))
    ops = [str(n.target) for n in split.forward.graph.nodes]
    assert not any("backward" in op or "addcmul" in op for op in ops)


SIZED_LOSSES = {
    "mean": lambda model, x, y: F.cross_entropy(model(x), y),
    "sizes in the loss": lambda model, x, y: model(x).square().sum() / (2 * x.shape[0] + 1),
    "views": lambda model, x, y: (model(x).reshape(-1).sin().reshape(x.shape[0], -1) * x.shape[0]).sum(0).mean(),
    "expand": lambda model, x, y: (model(x) + torch.ones(3).expand(x.shape[0], 3) * y[:, None]).tanh().sum(),
    "dropout": lambda model, x, y: F.dropout(model(x), 0.5).sum(),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("partition_fn", PARTITIONERS)
@pytest.mark.parametrize("name", SIZED_LOSSES)
def test_a_training_step_of_dynamic_sizes(name, partition_fn):
    torch.manual_seed(0)
    model = Net()
    twin = copy.deepcopy(model)

    def step_of(model):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

        def step(x, y):
            loss = SIZED_LOSSES[name](model, x, y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return step

    step, eager, batch = step_of(model), step_of(twin), {0: torch.export.Dim("batch", min=2)}
    trace = st.trace(step, (torch.randn(5, 4), torch.randint(0, 3, (5,))), dynamic_shapes={"x": batch, "y": batch})
    split = trace.split_backward(partition_fn)
    for count in (5, 3, 8):
        x, y = torch.randn(count, 4), torch.randint(0, 3, (count,))
        torch.manual_seed(count)
        found = split(x, y)
        torch.manual_seed(count)
        assert torch.equal(found, eager(x, y))
        assert all(map(torch.equal, model.parameters(), twin.parameters()))
    assert all(isinstance(s.bytes, int | torch.SymInt) for s in split.saved)


UPDATES = {
    "parameters by hand": lambda model, loss, found: [
        p.data.sub_(g) for p, g in zip(model.parameters(), found, strict=True)
    ],
    "grad by hand": lambda model, loss, found: [
        setattr(p, "grad", g) for p, g in zip(model.parameters(), found, strict=True)
    ],
    "gradients as results": lambda model, loss, found: found,
}


@pytest.mark.parametrize("name", UPDATES)
def test_a_step_that_calls_no_backward(name):
    torch.manual_seed(0)
    model, x = Net(), torch.randn(5, 4)
    twin = copy.deepcopy(model)

    def step_of(model):
        def step(x):
            loss = model(x).square().sum()
            return UPDATES[name](model, loss, torch.autograd.grad(loss, list(model.parameters())))

        return step

    step, eager = step_of(model), step_of(twin)
    split = st.trace(step, (x,)).split_backward()
    assert not any("backward" in str(n.target) for n in split.forward.graph.nodes)
    for found, expected in zip(split(x), eager(x), strict=True):
        assert found is expected or torch.equal(found, expected)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q)
        assert p.grad is q.grad or torch.equal(p.grad, q.grad)


@pytest.mark.parametrize("partition_fn", PARTITIONERS)
@pytest.mark.parametrize(
    "select", [lambda x: x[x[:, 0] > 0], lambda x: x[(x[:, 0] > 0).nonzero()[:, 0]], lambda x: x.masked_select(x > 0)]
)
def test_a_training_step_with_sizes_that_depend_on_data(select, partition_fn):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    twin = copy.deepcopy(model)

    def step(model, x):
        loss = select(model(x)).square().sum()
        loss.backward()
        return loss.detach()

    split = st.trace(lambda x: step(model, x), (torch.randn(6, 4),)).split_backward(partition_fn)
    for _ in range(3):
        x = torch.randn(6, 4)
        assert torch.equal(split(x), step(twin, x))
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), twin.parameters(), strict=True))


def test_a_step_of_micro_batches():
    torch.manual_seed(0)
    model = Net()

    def step(x):
        for part in (x[:2], x[2:]):
            model(part).square().sum().backward()

    x = torch.randn(5, 4)
    split = st.trace(step, (x,)).split_backward()
    split(x)
    found = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    step(x)
    assert all(map(torch.equal, found, (p.grad for p in model.parameters())))
    count = collections.Counter(n.target for n in split.forward.graph.nodes)
    assert count[torch.ops.aten.native_layer_norm.default] == 2
    assert torch.ops.aten.native_layer_norm_backward.default not in count


def test_scopes_calls_and_what_is_saved():
    model, x = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Sigmoid()), torch.randn(5, 4)
    trace = st.trace(model, (x,))
    split = trace.split_backward()
    nodes = [n for n in split.backward.graph.nodes if n.op == "call_function"]
    assert [(n.name, str(trace.scope_of(n)), trace.phase_of(n)) for n in nodes[:2]] == [
        ("sigmoid_backward", "Sequential/Sigmoid[1]", "backward"),
        ("t_1", "Sequential/Linear[0]", "backward"),
    ]
    assert {str(trace.scope_of(n)) for n in nodes[1:]} == {"Sequential/Linear[0]"}
    assert nodes[0].meta["custom"]["scopetrace"]["forward"]["call"] == 2
    assert nodes[0].meta["fwd_nn_module_stack"]["L__self__1"][0] == "1"
    assert split.primals == ("0.weight", "0.bias", "input_1")
    assert split.gradients == ("0.weight", "0.bias")
    assert [(s.node.name, s.shape, s.bytes) for s in split.saved] == [
        ("primals_3", (5, 4), 80),
        ("sigmoid", (5, 4), 80),
    ]


def test_min_cut_keeps_less():
    model, x = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)), torch.randn(5, 4)
    trace = st.trace(lambda x: model(x).sin().exp().cos(), (x,))
    kept = [sum(s.bytes for s in trace.split_backward(fn).saved) for fn in PARTITIONERS]
    assert kept[1] < kept[0]


def test_both_graphs_by_hand():
    model, x = torch.nn.Linear(4, 2), torch.randn(5, 4)
    split = st.trace(model, (x,)).split_backward()
    with torch.no_grad():
        out, *saved = split.forward(model.weight, model.bias, x)
        weight, bias = split.backward(*saved, torch.ones(5, 2))
    model(x).sum().backward()
    assert torch.equal(out, model(x))
    assert torch.equal(weight, model.weight.grad)
    assert torch.equal(bias, model.bias.grad)


BATCH = torch.export.Dim("batch", min=2, max=64)
SIZED = {
    **{name: p for name, p in PROGRAMS.items() if name not in ("embedding and convolution", "loss", "lstm")},
    "a mean by the size": lambda m, x: m.fc(x).sum(0) / x.shape[0],
    "views by the size": lambda m, x: (m.fc(x).reshape(-1).sin().reshape(x.shape[0], -1) * x.shape[0]).t(),
    "slices by the size": lambda m, x: torch.cat([m.fc(x), m.other(x)]).cumsum(0)[: x.shape[0] * 2 - 1],
}


DIMS = BATCH, 2 * BATCH
IN_TEST_ALL = [pytest.param(name, DIMS[i % 2 - 1], marks=pytest.mark.slow) for i, name in enumerate(SIZED)]


@pytest.mark.sample(6)
@pytest.mark.parametrize(("name", "dim"), [*((name, DIMS[i % 2]) for i, name in enumerate(SIZED)), *IN_TEST_ALL])
def test_dynamic_sizes(name, dim):
    torch.manual_seed(0)
    model, needs_grad = Model(SIZED[name]), "input" in name
    twin, x = copy.deepcopy(model), torch.randn(6, 4, requires_grad=needs_grad)
    trace = st.trace(model, (x,), dynamic_shapes={"x": {0: dim}})
    for partition_fn in PARTITIONERS:
        start(model, twin)
        split = trace.split_backward(partition_fn)
        for count in (6, 4, 10):
            assert_as_eager(split, model, twin, torch.randn(count, 4, requires_grad=needs_grad))


class OfTwo(Model):
    def forward(self, x, y):
        return self.program(self, x, y)


@pytest.mark.parametrize("partition_fn", PARTITIONERS)
@pytest.mark.parametrize(
    ("forward", "counts"),
    [
        (lambda m, x, y: m.fc(x) * y, lambda n: (n, n)),
        (lambda m, x, y: m.fc(torch.cat([x, x])) * y, lambda n: (n, 2 * n)),
        (lambda m, x, y: m.fc(x).sum(0) + m.other(y[:3] * torch.ones(3, 1)), lambda n: (n, 7)),
        (lambda m, x, y: m.fc(x).t() @ torch.ones(5, 2) + m.other(y).sum(), lambda n: (5, n)),
    ],
    ids=["equal", "twice as many", "independent", "fixed"],
)
def test_sizes_that_the_model_relates(forward, counts, partition_fn):
    """With `Dim.AUTO` the model decides which sizes are equal."""
    torch.manual_seed(0)
    model, auto = OfTwo(forward), {0: torch.export.Dim.AUTO}
    twin = copy.deepcopy(model)
    examples = tuple(torch.randn(n, 4) for n in counts(5))
    split = st.trace(model, examples, dynamic_shapes=(auto, auto)).split_backward(partition_fn)
    for n in (5, 8, 4):
        given = [torch.randn(count, 4) for count in counts(n)]
        found, expected = split(*given), twin(*given)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        for out in (found, expected):
            out.sin().sum().backward()
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)


REFUSED = {
    "nothing requires grad": (lambda x: x * 2, {}, st.errors.ModeError, "nothing requires grad"),
    "sizes that depend on data": (
        Model(lambda m, x: m.fc(x)[x[:, 0] > 0]),
        {},
        st.errors.DynamicShapeError,
        "sizes that depend on data",
    ),
    "a size as a result": (
        Model(lambda m, x: (m.fc(x), x.shape[0])),
        {"dynamic_shapes": {"x": {0: BATCH}}},
        st.errors.DynamicShapeError,
        "gives a dynamic size as a result",
    ),
    "dropout of an lstm": (
        Model(PROGRAMS["lstm"]),
        {"dynamic_shapes": {"x": {0: BATCH}}},
        st.errors.DynamicShapeError,
        "a recurrent layer with dropout, of dynamic sizes",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case):
    model, options, error, text = REFUSED[case]
    trace = st.trace(model, (torch.randn(5, 4),), **options)
    with pytest.raises(error, match=text):
        trace.split_backward()


@pytest.mark.parametrize("kind", [torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN])
def test_decompositions_that_leave_dropout_out_are_refused(kind):
    layer, x = kind(4, 4, 2, dropout=0.5), torch.randn(3, 2, 4)

    def step(x):
        layer(x)[0].sum().backward()

    with pytest.raises(st.errors.DynamicShapeError, match="a recurrent layer with dropout, of dynamic sizes"):
        st.trace(step, (x,), dynamic_shapes={"x": {1: BATCH}})
    with pytest.raises(st.errors.DecompositionError, match="leaves the dropout between its layers out"):
        st.trace(layer, (x,)).decompose()
    st.trace(layer.eval(), (x,)).decompose()


def penalty(run, x):
    """A loss with the gradient by the input, which is to be differentiated again."""
    x = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(run(x).square().sum(), x, create_graph=True)
    (gradient.norm() + run(x).sum()).backward()


def test_a_second_derivative_is_refused():
    model, x = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh()), torch.randn(5, 4, requires_grad=True)
    with pytest.raises(st.errors.UnsupportedOpError, match="cannot be differentiated again"):
        penalty(st.trace(model, (x,)).split_backward(), x)
    backend = st.functional_backend(lambda graph, given: graph, backward_compiler=lambda graph, given: graph)
    with pytest.raises(st.errors.UnsupportedOpError, match="cannot be differentiated again"):
        penalty(torch.compile(model, backend=backend), x)
    (gradient,) = torch.autograd.grad(st.trace(model, (x,)).split_backward()(x).sum(), x, create_graph=True)
    assert torch.equal(gradient, torch.autograd.grad(model(x).sum(), x)[0])


def test_a_partitioner_by_name_is_refused():
    trace = st.trace(torch.nn.Linear(4, 4), (torch.randn(5, 4),))
    with pytest.raises(st.errors.ArgumentTypeError, match=r"'min_cut', and no function: give functorch\.compile"):
        trace.split_backward("min_cut")


def test_an_input_that_requires_grad_only_now_is_refused():
    model, x = torch.nn.Linear(4, 4), torch.randn(5, 4)
    split = st.trace(model, (x,)).split_backward()
    with pytest.raises(st.errors.StateMismatchError, match="input_1 requires grad"):
        split(x.requires_grad_())


def compiled(model, x, backend):
    """The model under torch.compile, and its gradients, beside eager."""
    torch._dynamo.reset()
    twin = copy.deepcopy(model)
    run_compiled = torch.compile(model, backend=backend)
    for _ in range(2):
        found, expected = run(run_compiled, x), run(twin, x)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close([p.grad for p in model.parameters()], [p.grad for p in twin.parameters()])
        torch.testing.assert_close(list(model.buffers()), list(twin.buffers()))


def scopes_in(gm):
    return {n.name: n.meta["custom"]["scopetrace"] for n in gm.graph.nodes if n.op == "call_function"}


def test_a_backend_gets_forward_and_backward_with_scopes():
    seen = []

    def compiler(gm, inputs):
        assert len(inputs) == len(gm.graph.find_nodes(op="placeholder"))
        seen.append(scopes_in(gm))
        return gm

    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Sigmoid())
    backend = st.functional_backend(compiler, backward_compiler=compiler)
    compiled(model, torch.randn(5, 4), backend)
    forward, backward = seen
    assert forward["sigmoid"]["scope"] == "Sequential/Sigmoid[2]"
    assert backward["sigmoid_backward"]["forward"]["scope"] == "Sequential/Sigmoid[2]"
    places = {place["forward"]["scope"] for place in backward.values()}
    assert places == {f"Sequential/{layer}" for layer in ("Linear[0]", "BatchNorm1d[1]", "Sigmoid[2]")}


def test_under_aot_autograd_backward_graphs_have_scopes():
    seen = []

    def compiler(gm, inputs):
        seen.append(scopes_in(gm))
        return gm

    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Sigmoid())
    part = st.functional_backend(compiler)
    compiled(model, torch.randn(5, 4), aot_autograd(fw_compiler=part, bw_compiler=part))
    assert seen[1]["sigmoid_backward"]["scope"] == "Sequential/Sigmoid[1]"


def test_decompositions_reach_the_backward():
    targets = []

    def compiler(gm, inputs):
        targets.append({n.target for n in gm.graph.nodes if n.op == "call_function"})
        return gm

    table = torch.export.default_decompositions()
    backend = st.functional_backend(compiler, backward_compiler=compiler, decompositions=table)
    compiled(Net(), torch.randn(5, 4), backend)
    aten = torch.ops.aten
    assert aten.addmm.default in targets[0]
    assert aten.native_layer_norm_backward.default not in targets[1]
    assert aten.t.default not in targets[1]


def test_a_backward_compiler_is_of_aten_graphs():
    with pytest.raises(st.errors.ArgumentError, match="backward_compiler"):
        st.functional_backend(lambda gm, inputs: gm, level="torch", backward_compiler=lambda gm, inputs: gm)
