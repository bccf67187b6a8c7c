"""Regions under `torch.utils.checkpoint` in a training step: backward runs them again, as eager does.

y = checkpoint(block, x, use_reentrant=False)
y.sum().backward()                          # the ops of `block` stand in the backward, "recomputed"
"""

import contextlib
import copy
import functools
import gc
import itertools
import operator

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import default_partition, min_cut_rematerialization_partition
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import scopetrace as st
from tests.steps import Net, step_of

aten = torch.ops.aten


# What a step looks like ----------------------------------------------------------------------------------------------


class Checkpointed(nn.Module):
    def __init__(self, **how):
        super().__init__()
        self.first, self.block, self.how = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 8), nn.Tanh()), how

    def forward(self, x):
        return checkpoint(self.block, self.first(x), use_reentrant=False, **self.how)


RECOMPUTED = """\
    recomputed
      Checkpointed[model]
        Sequential[block]
          Linear[0]
            %t_2: f32[4, 8] = aten.t(self.weight)
            %addmm_2: f32[5, 8] = aten.addmm(self.bias, %addmm, %t_2)
          Tanh[1]
            %tanh_1: f32[5, 8] = aten.tanh(%addmm_2)
    Checkpointed[model]
      Sequential[block]
        Tanh[1]
          %tanh_backward: f32[5, 8] = aten.tanh_backward(%mul_1, %tanh_1)
"""


def again(trace):
    return [n for n in trace.graph_module.graph.nodes if trace.is_recomputed(n)]


def test_the_ops_that_run_again():
    trace = st.trace(step_of(Checkpointed()), (torch.randn(5, 4),))
    assert RECOMPUTED in str(trace)
    assert [str(n.target) for n in again(trace)] == ["aten.t.default", "aten.addmm.default", "aten.tanh.default"]
    assert {trace.phase_of(n) for n in again(trace)} == {"backward"}
    assert [str(trace.scope_of(n)).split("/", 1)[1] for n in again(trace)] == [
        "Checkpointed[model]/Sequential[block]/Linear[0]",
        "Checkpointed[model]/Sequential[block]/Linear[0]",
        "Checkpointed[model]/Sequential[block]/Tanh[1]",
    ]
    assert set(again(trace)) <= set(trace.call("model.block").backward_nodes)


def test_other_forms_of_a_step_know_what_runs_again(tmp_path):
    args = (torch.randn(5, 4),)
    trace = st.trace(step_of(Checkpointed()), args)
    trace.save(tmp_path / "step.st")
    others = [st.load(tmp_path / "step.st"), trace.with_graph(copy.deepcopy(trace.graph_module)), copy.deepcopy(trace)]
    for other in (*others, trace.decompose({})):
        assert [str(n.target) for n in again(other)] == [str(n.target) for n in again(trace)]
    trace.lint()
    split = trace.split_backward()
    assert [n for n in split.backward.graph.nodes if trace.is_recomputed(n)]
    assert not [n for n in split.forward.graph.nodes if trace.is_recomputed(n)]
    with pytest.raises(st.ArgumentTypeError, match=r"is_recomputed takes a torch\.fx\.Node"):
        trace.is_recomputed("tanh")


def test_a_region_that_nothing_is_saved_in_does_not_run_again():
    def step(x):
        checkpoint(lambda x: x + 1, x, use_reentrant=False).sum().backward()

    assert again(st.trace(step, (torch.ones(2, requires_grad=True),))) == []


# The ops of eager ----------------------------------------------------------------------------------------------------


class BackwardOps(TorchDispatchMode):
    """The ops that eager runs while it differentiates, in order."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if torch._C._current_autograd_node() is not None and func is not aten.detach.default:
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


def keep(ctx, op, *args, **kwargs):
    kept = (aten.sin.default, aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if op in kept else CheckpointPolicy.PREFER_RECOMPUTE


selective = functools.partial(create_selective_checkpoint_contexts, keep)


def nested(block, x, **how):
    return checkpoint(lambda x: checkpoint(block, x.sin(), use_reentrant=False, **how).exp(), x, use_reentrant=False)


@pytest.mark.parametrize("run", [functools.partial(checkpoint, use_reentrant=False), nested])
@pytest.mark.parametrize(
    "how", [{}, {"early_stop": False}, {"context_fn": selective}], ids=["new", "late", "selective"]
)
@pytest.mark.parametrize(
    "block", [Net(), nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))], ids=["net", "mlp"]
)
def test_backward_runs_the_ops_of_eager(block, how, run):
    def step(x):
        run(block, x * 2, **how).exp().sum().backward()

    x = torch.randn(3, 4)
    block.zero_grad()
    trace = st.trace(step, (x,))
    nodes = [n for n in trace.graph_module.graph.nodes if "val" in n.meta and trace.phase_of(n) == "backward"]
    with BackwardOps() as eager:
        step(x)
    ours = [str(n.target) for n in nodes if n.target not in (aten.ones_like.default, operator.getitem)]
    theirs = iter(eager.found)
    missing = [op for name in ours for op in itertools.takewhile(lambda op, name=name: op != name, theirs)]
    assert list(theirs) == []  # the ops are those of eager, in their order, but for
    assert set(missing) <= {"aten.t.default", "aten.addmm.default"}  # those whose results nobody reads
    # of a parameter's transposed view, backward reads that of the forward: the same memory, and its history
    assert set(missing) <= {"aten.t.default"} or how or run is nested


def test_memory_and_flops_of_a_plan_that_is_applied():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(5)))
    x = torch.randn(256, 32)

    def step(x):
        model(x).logsumexp(1).sum().backward()

    trace = st.trace(step, (x,))
    plan = trace.checkpoint_plan(int(trace.memory().peak_bytes * 0.6))
    plan.apply(model)
    applied = st.trace(step, (x,))
    assert applied.memory().peak_bytes == pytest.approx(plan.peak_bytes, rel=0.05)
    assert applied.memory().saved_bytes < 0.5 * trace.memory().saved_bytes
    with FlopCounterMode(display=False) as eager:
        step(x)
    assert applied.summary().rows[0].flops == eager.get_total_flops()


# Programs beside eager -----------------------------------------------------------------------------------------------


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 2 * x * grad


class Parts(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.bn, self.ln, self.emb = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.LayerNorm(4), nn.Embedding(5, 4)
        self.att, self.lstm, self.p = (
            nn.MultiheadAttention(4, 2, dropout=0.1),
            nn.LSTM(4, 4),
            nn.Parameter(torch.rand(4)),
        )
        self.register_buffer("buf", torch.ones(4))


def inside(t, body, **how):
    return checkpoint(body, t, **{"use_reentrant": False, **how})


def step_by_step(*steps):
    """The last of some values; the others are for what making them does."""
    return steps[-1]


REGIONS = {
    "plain": lambda m, t: (t * m.p).sin(),
    "a layer": lambda m, t: m.fc(t).tanh(),
    "dropout": lambda m, t: F.dropout(F.dropout(m.fc(t), 0.5).sin(), 0.3) * m.p,
    "in place": lambda m, t: t.sin().mul_(m.p).exp_(),
    "a result in place": lambda m, t: m.fc(t).relu_() * m.p,
    "batch norm": lambda m, t: m.bn(m.fc(t)) * m.p,
    "batch norm twice": lambda m, t: m.bn(m.bn(t).sin()) * m.p,
    "a buffer written": lambda m, t: (m.buf.add_(1) * m.fc(t)).sin(),
    "a buffer written last": lambda m, t: step_by_step(u := m.fc(t).sin(), m.buf.add_(1), u),
    "an average": lambda m, t: step_by_step(m.buf.mul_(0.9).add_(t.detach().mean(0)), (t * m.p).sin().exp()),
    "nested": lambda m, t: inside(m.fc(t).tanh(), lambda u: (u * m.p).sin()).exp(),
    "nested at once": lambda m, t: inside(t, lambda u: (u * m.p).sin()),
    "nested twice": lambda m, t: inside(
        inside(t.exp(), lambda u: m.fc(u).tanh()).sin(), lambda u: (u * m.p).sin()
    ).exp(),
    "nested dropout": lambda m, t: inside(m.fc(t).tanh(), lambda u: F.dropout(u * m.p, 0.5).sin()).exp(),
    "reentrant inside": lambda m, t: inside(m.fc(t).tanh(), lambda u: (u * m.p).sin(), use_reentrant=True).exp(),
    "a function": lambda m, t: Square.apply(m.fc(t)).sin(),
    "a gradient inside": lambda m, t: torch.autograd.grad((t * t * m.p).sum(), t, create_graph=True)[0] * m.p,
    "views": lambda m, t: m.fc(t).sin().view(-1)[1:].exp(),
    "noise": lambda m, t: (t * torch.randn_like(t)) * m.p,
    "noise in place": lambda m, t: (m.fc(t).sin() * torch.zeros_like(t).bernoulli_(0.5).mul_(2)).exp(),
    "no_grad inside": lambda m, t: torch.no_grad()(m.fc)(t) * m.p,
    "a module twice": lambda m, t: m.fc(m.fc(t).sin()),
    "layer norm": lambda m, t: m.ln(m.fc(t)).exp(),
    "attention": lambda m, t: m.att(t, t, t)[0].sin(),
    "lstm": lambda m, t: m.lstm(t)[0].sin(),
    "an embedding": lambda m, t: (m.emb(torch.tensor([0, 3, 3])) * t).sin(),
    "results cut and joined": lambda m, t: torch.cat([a.sin() for a in (t * m.p).chunk(2, 1)], 1).exp(),
    "a loss": lambda m, t: F.cross_entropy(m.fc(t), torch.tensor([0, 1, 2])) * t.exp(),
    "index_put_": lambda m, t: t.sin().index_put_((torch.tensor([0, 1]),), m.p[None].expand(2, 4)).exp(),
    "other dtypes": lambda m, t: (m.fc(t).double() * m.p).float().sin(),
    "nothing": lambda m, t: t,
    "autocast": lambda m, t: torch.autocast("cpu", torch.bfloat16)(m.fc)(t).float().sin(),
    "out=": lambda m, t: torch.add(t.detach(), 1, out=torch.empty_like(t)) * m.p,
    "data written": lambda m, t: step_by_step(u := t.sin(), u.data.mul_(2), (u * m.p).exp()),
    "a shape in place": lambda m, t: (t.sin().unsqueeze_(0) * m.p).exp()[0],
}

KINDS = {
    "new": {"use_reentrant": False},
    "old": {"use_reentrant": True},
    "late": {"use_reentrant": False, "early_stop": False},
    "selective": {"use_reentrant": False, "context_fn": selective},
}


def backward(m, x, run):
    loss = run(x.sin()).square().sum()
    loss.backward()
    return loss


def gradients(m, x, run):
    return torch.autograd.grad(run(x.sin()).square().sum(), [x, *m.parameters()], allow_unused=True)


def two_backwards(m, x, run):
    loss = run(x.sin()).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()


def second_derivative(m, x, run):
    (g,) = torch.autograd.grad(run(x.sin()).square().sum(), x, create_graph=True)
    g.square().sum().backward()


def gradient_with_a_history(m, x, run):
    y = run(x.sin())
    (g,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    return [g * y.mean()]


def two_batches(m, x, run):
    for batch in (x, x * 2):
        run(batch.sin()).square().sum().backward()


def parameter_written(m, x, run):
    y = run(x.sin())
    with torch.no_grad():
        m.p.mul_(1.5)
    y.square().sum().backward()


def argument_written(m, x, run):
    x = x.sin()
    y = run(x)
    with torch.no_grad():
        x.mul_(1.5)
    y.exp().sum().backward()


def result_written(m, x, run):
    y = run(x)
    y.mul_(2)
    y.exp().sum().backward()
    return y.detach()


def chain(m, x, run):
    run(run(x.sin()).reshape(-1)[:12].reshape(3, 4) if "views" not in str(run) else x).sum().backward()


STEPS = [
    *(backward, gradients, two_backwards, second_derivative, gradient_with_a_history, two_batches),
    *(parameter_written, argument_written, result_written),
]
PROGRAMS = [*itertools.product(REGIONS, KINDS, STEPS)]
LOUDER_IN_EAGER = (
    "use_reentrant=True",  # autograd.grad through reentrant checkpointing
    "backward an extra time",  # a second backward through selective checkpointing
    "does not require grad",  # a gradient inside of a reentrant region, which runs under no_grad in eager
    "This view was created inside",  # a write to the result of a reentrant region
    "CheckpointFunction is a view",
)


def outcome(call, m, x):
    torch.manual_seed(5)
    result = call(x)
    if isinstance(result, list):
        (result,) = result
        result.sum().backward()
    tensors = [x.grad, *(p.grad for p in m.parameters()), *m.buffers(), *(p.detach() for p in m.parameters())]
    found = result if isinstance(result, tuple) else (result,)
    return [None if t is None else t.detach().clone() for t in (*found, *tensors)]


def beside_eager(region, kind, step, dynamic_shapes=None, form=lambda trace: trace):
    torch.manual_seed(1)
    m, x = Parts(), torch.linspace(-1, 1, 12).reshape(3, 4)
    twin = copy.deepcopy(m)

    def program(m):
        return lambda x: step(m, x, lambda t: checkpoint(lambda u: REGIONS[region](m, u), t, **KINDS[kind]))

    error = expected = None
    try:
        expected = outcome(program(twin), twin, x.clone().requires_grad_())
    except RuntimeError as raised:
        error = raised
    try:
        trace = st.trace(program(m), (x.clone().requires_grad_(),), dynamic_shapes=dynamic_shapes)
    except (st.errors.ScopetraceError, RuntimeError) as refusal:
        if error is None and not isinstance(refusal, st.errors.ScopetraceError):
            raise
        return "refused" if error is None else "raises"
    if error is not None:
        return "raises" if any(text in str(error) for text in LOUDER_IN_EAGER) else f"runs, and eager raises {error}"
    trace.lint()
    found = outcome(form(trace), m, x.clone().requires_grad_())
    rtol = 2e-2 if region == "autocast" else 1e-4  # bfloat16
    close = functools.partial(torch.testing.assert_close, rtol=rtol, atol=1e-6)
    for a, b in zip(found, expected, strict=True):
        close(a, b)
    return "equal"


SAMPLE = [p for i, p in enumerate(PROGRAMS) if p[1:] == ("new", backward) or i % 13 == 0]


@pytest.mark.parametrize(
    ("programs", "least"),
    [
        pytest.param(SAMPLE[::3], 0.75, id="some"),
        pytest.param(SAMPLE, 0.75, id="more", marks=pytest.mark.slow),
        *(pytest.param([p for p in PROGRAMS if p[1] == kind], 0.5, id=kind, marks=pytest.mark.slow) for kind in KINDS),
    ],
)
def test_steps_equal_eager(programs, least):
    found = [beside_eager(*program) for program in programs]
    assert {text for text in found if text.startswith("runs")} == set()
    assert found.count("refused") < 0.15 * len(found)
    assert found.count("equal") > least * len(found)


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_steps_with_a_dynamic_batch(every):
    sizes = {"x": {0: torch.export.Dim.AUTO}}
    found = [beside_eager(region, "new", backward, sizes) for region in [*REGIONS][::every]]
    assert found.count("equal") > 0.75 * len(found)


@pytest.mark.sample(2)
@pytest.mark.parametrize("partition", [default_partition, min_cut_rematerialization_partition])
def test_steps_as_two_graphs(partition):
    found = [beside_eager(region, "new", backward, form=lambda t: t.split_backward(partition)) for region in REGIONS]
    assert found.count("equal") > 0.9 * len(found)


def test_a_gradient_inside_of_selective_checkpointing():
    torch.manual_seed(1)
    m, x = Parts(), torch.rand(3, 4, requires_grad=True)

    def forward(x):
        return checkpoint(lambda u: REGIONS["a gradient inside"](m, u), x.sin(), **KINDS["selective"])

    expected = torch.autograd.grad(forward(x).square().sum(), (x, m.p))
    found = torch.autograd.grad(st.trace(forward, (x,))(x).square().sum(), (x, m.p))
    assert all(map(torch.allclose, found, expected))


def split_and_written(m, t):
    first, second = (t * m.p).unsafe_chunk(2, 1)
    return second.mul_(first.sigmoid_())  # autograd has saved `first`; writes to `second` are counted apart


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("kind", ["GRU", "LSTM", "RNN", "unsafe_chunk"])
def test_writes_beside_what_autograd_has_saved(kind, use_reentrant):
    torch.manual_seed(1)
    m, x = Parts(), torch.rand(3, 4, requires_grad=True)
    layer = nn.Identity() if kind == "unsafe_chunk" else getattr(nn, kind)(4, 4)
    leaves = [x, m.p, *layer.parameters()]

    def step(x):
        region = functools.partial(split_and_written, m) if kind == "unsafe_chunk" else lambda t: layer(t * m.p)[0]
        y = checkpoint(region, x, use_reentrant=use_reentrant)
        y.square().sum().backward()
        return y

    def gradients(run):
        y = run(x)
        found = [None if t.grad is None else t.grad.clone() for t in leaves]
        for t in leaves:
            t.grad = None
        return [y, *found]

    expected = gradients(step)
    torch.testing.assert_close(gradients(st.trace(step, (x,))), expected)  # nn.LSTM without gradients is one kernel


# What is refused -----------------------------------------------------------------------------------------------------


def bound(m, t):
    m.buf = m.buf * 0.9 + t.detach().mean(0)
    return (t * m.p).sin()


def written_again(m, t):
    u = t.exp()
    u[1:].mul_(2)
    return (u * m.p).sin()


STALE = "writes to what autograd has saved in it"
REFUSED = [
    ("binds a new tensor to m.buf", bound),
    (STALE, written_again),
    ("keeps a tensor, which is written outside of it", lambda m, t: t * m.buf.normal_() * m.p),
    # autograd saves the second argument, and eager takes what is there after the write
    (STALE, lambda m, t: (lambda u: u.mul_(u))(t * m.p)),
    (STALE, lambda m, t: (lambda u: u.mul_(u.detach()))(t * m.p)),
    (STALE, lambda m, t: (lambda u: u.addcmul_(u[0], u))(t * m.p)),
]


@pytest.mark.parametrize(("text", "region"), REFUSED)
def test_what_is_refused(text, region):
    m = Parts()

    def step(x):
        checkpoint(lambda u: region(m, u), x, use_reentrant=False).sum().backward()

    with pytest.raises(st.errors.UnsupportedOpError, match=text) as refused:
        st.trace(step, (torch.rand(3, 4, requires_grad=True),))
    assert "test_checkpoints.py" in str(refused.value)


def test_a_policy_s_result_that_is_written():
    def step(x):
        run = functools.partial(checkpoint, use_reentrant=False, context_fn=selective)
        run(lambda x: x.sin().mul_(2).exp(), x).sum().backward()

    with pytest.raises(st.errors.UnsupportedOpError, match="writes to what its policy keeps"):
        st.trace(step, (torch.rand(3, requires_grad=True),))


def test_a_container_that_the_region_fills():
    def step(x, cache):
        checkpoint(
            lambda x: step_by_step(cache.append(x.sin()), cache[-1].exp()), x, use_reentrant=False
        ).sum().backward()

    with pytest.raises(st.errors.UnsupportedOpError, match="binds a new tensor to"):
        st.trace(step, (torch.rand(3, requires_grad=True), []))


def fakes():
    gc.collect()
    return sum(type(t) is FakeTensor for t in gc.get_objects())


@pytest.mark.parametrize("kind", ["new", "old"])
@pytest.mark.parametrize("fails", [False, True])
def test_a_dropped_trace_is_freed(kind, fails):
    net, run = Net(), functools.partial(checkpoint, **KINDS[kind])

    def step(x):
        y = run(lambda x: run(net, x.sin()).exp(), x * 2)
        if fails:
            raise ValueError
        y[0].sum().backward(retain_graph=True)
        return y

    before = fakes()
    with pytest.raises(ValueError) if fails else contextlib.nullcontext():
        st.trace(step, (torch.rand(2, 4, requires_grad=True),))
    assert fakes() <= before
