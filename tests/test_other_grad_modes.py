"""A trace called where autograd follows other tensors than when it was traced: as in eager, or refused at the call.

Each program is traced with autograd on and off, with inputs and with parameters that require grad and that do not, and
each of these traces is called in all these ways. A call gives what eager gives, also for backward through its result,
or raises an error of scopetrace before anything is changed.
"""

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import scopetrace as st


class Program(nn.Module):
    """A forward that is a function of the module and an input, with a parameter and two buffers."""

    def __init__(self, run):
        super().__init__()
        self.run = run
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 4))
        self.register_buffer("mean", torch.linspace(0.1, 0.4, 4))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        """Run it."""
        return self.run(self, x)


def statistics(m, x):
    """As normalizations do, under no_grad."""
    with torch.no_grad():
        m.mean.lerp_(x.mean(0), 0.1)
        m.count.add_(1)
    return (x - m.mean) * m.weight


def read_then_written(m, x):
    y = x * m.weight * m.mean
    with torch.no_grad():
        m.mean.mul_(0.5)
    return y


def old_value(m, x):
    """Backward reads a copy of what is written."""
    y = x * m.weight * m.mean.clone()
    m.mean.add_(1)
    return y


def assigned(m, x):
    m.mean = m.mean * 0.9 + x.detach().mean(0) * 0.1
    return x * m.weight + m.mean


def assigned_with_history(m, x):
    m.mean = m.mean * 0.9 + x.mean(0) * 0.1
    return x * m.weight + m.mean


def block_off(m, x):
    with torch.no_grad():
        scale = x.abs().max() * m.weight
    return x * m.weight / scale


def block_on(m, x):
    with torch.enable_grad():
        y = x * m.weight
    return y.sin()


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w * 2

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g * w * 2, (g * x * 2).sum(0)


def spectral():
    return nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))


FUNCTIONS = {
    "mul": lambda m, x: x * m.weight,
    "linear": lambda m, x: F.linear(x, m.weight.expand(3, 4)),
    "attention": lambda m, x: F.scaled_dot_product_attention(x[None] * m.weight, x[None], x[None]),
    "view": lambda m, x: (x * m.weight).view(-1)[2:],
    "view of the input": lambda m, x: x.view(-1)[2:],
    "in place of a result": lambda m, x: (x * m.weight).exp_().mul_(m.weight).relu_(),
    "in place of a view": lambda m, x: (lambda y: (y[0].mul_(2), y)[1])(x * m.weight),
    "in place of the input": lambda m, x: x.mul_(m.weight) * 2,
    "in place of a part of the input": lambda m, x: (x[1:].mul_(2), x * m.weight)[1],
    "detach": lambda m, x: x.detach() * m.weight + x,
    "detach of the weight": lambda m, x: x * m.weight.detach(),
    "write through detach": lambda m, x: (lambda y: (y.detach().mul_(2), y * x)[1])(x * m.weight),
    "buffer in place": lambda m, x: (m.mean.mul_(2), x * m.weight * m.mean)[1],
    "buffer in place by itself": lambda m, x: (m.mean.mul_(m.mean), x * m.weight * m.mean)[1],
    "buffer gets what is detached": lambda m, x: (m.mean.copy_(x.detach().mean(0)), x * m.weight * m.mean)[1],
    "buffer gets a gradient": lambda m, x: (m.mean.copy_(x.mean(0)), m.weight * m.mean)[1],
    "buffer multiplied by the input": lambda m, x: (m.mean.mul_(x[0]), x * m.weight * m.mean)[1],
    "counter": lambda m, x: (m.count.add_(1), x * m.weight / m.count)[1],
    "statistics": statistics,
    "read, then written": read_then_written,
    "a copy is read": old_value,
    "assigned": assigned,
    "assigned with its history": assigned_with_history,
    "a block without autograd": block_off,
    "a block with autograd": block_on,
    "a function of autograd": lambda m, x: Twice.apply(x, m.weight),
    "batch_norm": lambda m, x: F.batch_norm(x, m.mean, m.mean + 1, m.weight, None, training=True),
    "batch_norm of its statistics": lambda m, x: F.batch_norm(x, m.mean, m.mean + 1, m.weight, None, training=False),
    "gradient inside": lambda m, x: torch.func.grad(lambda w: (x * w).square().sum())(m.weight) * x,
    "two results": lambda m, x: [x * m.weight, x.view(-1), m.mean * 2],
}
MODULES = {
    "BatchNorm1d": lambda: nn.BatchNorm1d(4),
    "BatchNorm1d without momentum": lambda: nn.BatchNorm1d(4, momentum=None),
    "BatchNorm1d without weights": lambda: nn.BatchNorm1d(4, affine=False),
    "BatchNorm1d in eval": lambda: nn.BatchNorm1d(4).eval(),
    "BatchNorm1d twice": lambda: (lambda n: nn.Sequential(n, nn.ReLU(), n))(nn.BatchNorm1d(4)),
    "Linear and BatchNorm1d": lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(inplace=True)),
    "InstanceNorm1d": lambda: nn.Sequential(nn.Unflatten(0, (1, 3)), nn.InstanceNorm1d(3, track_running_stats=True)),
    "LayerNorm": lambda: nn.LayerNorm(4),
    "GRU": lambda: nn.GRU(4, 3),
    "SiLU in place": lambda: nn.Sequential(nn.Linear(4, 4), nn.SiLU(inplace=True)),
    "ReLU in place of the input": lambda: nn.ReLU(inplace=True),
    "spectral norm": spectral,
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
    "tied": lambda: (lambda a: nn.Sequential(a, nn.Tanh(), a))(nn.Linear(4, 4)),
}
PROGRAMS = {**{name: lambda run=run: Program(run) for name, run in FUNCTIONS.items()}, **MODULES}

WAYS = list(itertools.product([True, False], repeat=3))
"""Whether autograd is on, the input requires grad, parameters require grad."""


def input_of(required):
    """An input, which is no leaf where it requires grad, so that it may be written; and its leaf."""
    leaf = torch.linspace(-1.0, 2.0, 12).view(3, 4).requires_grad_(required)
    return leaf, leaf * 1


def run(fn, model, way):
    """What a call gives, with the gradients that come of it and the state after it; or the error."""
    grad, input_required, _ = way
    with torch.set_grad_enabled(True):
        leaf, x = input_of(input_required)
    with torch.set_grad_enabled(grad):
        out = fn(x)
    found = [t for t in (out if isinstance(out, (list, tuple)) else [out]) if isinstance(t, torch.Tensor)]
    with_grad = [t.square().sum() for t in found if t.requires_grad]
    told = [t.detach().clone() for t in (*found, x)], [t.requires_grad for t in (*found, x)]
    state = {name: t.detach().clone() for name, t in model.named_buffers()}
    if with_grad:
        sum(with_grad).backward()
    gradients = [leaf.grad, *(p.grad for p in model.parameters())]
    return told, state, [t.requires_grad for t in model.buffers()], gradients


def require(model, required):
    for p in model.parameters():
        p.requires_grad_(required)
        p.grad = None


def buffers_of(model):
    return [(m, name, t) for m in model.modules() for name, t in m._buffers.items() if t is not None]


def put_back(buffers, values):
    """The buffers that the model had, with their values; a call may have assigned others, or given these a history."""
    for (module, name, t), value in zip(buffers, values, strict=True):
        module._buffers[name] = t.detach_()
        t.copy_(value)


@pytest.mark.sample(8)
@pytest.mark.parametrize("traced", WAYS, ids=str)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_call_in_another_mode_is_as_in_eager_or_refused(name, traced):
    torch.manual_seed(0)
    model = PROGRAMS[name]()
    twin = copy.deepcopy(model)
    require(model, traced[2])
    _, x = input_of(traced[1])
    with torch.set_grad_enabled(traced[0]):
        trace = st.trace(model, (x,))
    buffers, others = buffers_of(model), buffers_of(twin)
    values = [t.detach().clone() for _, _, t in buffers]
    first = (WAYS.index(traced) + list(PROGRAMS).index(name)) % len(WAYS)  # any way is that of some first call
    for called in WAYS[first:] + WAYS[:first]:
        put_back(buffers, values)
        put_back(others, values)
        require(model, called[2])
        require(twin, called[2])
        torch.manual_seed(0)
        try:
            expected = run(twin, twin, called)
        except RuntimeError:  # eager does not take the call, or not its backward
            continue
        before = {name: t.detach().clone() for name, t in model.named_buffers()}
        torch.manual_seed(0)
        try:
            found = run(trace, model, called)
        except st.ScopetraceError:
            assert called != traced, "the call of the trace"
            torch.testing.assert_close({name: t.detach() for name, t in model.named_buffers()}, before)
            continue
        torch.testing.assert_close(found, expected, msg=lambda m, called=called: f"called {called}: {m}")


DIFFERENTIATES = {
    "grad by a parameter": lambda m, x: torch.autograd.grad((x * m.weight).sum(), m.weight, create_graph=True)[0] + x,
    "grad by the input": lambda m, x: torch.autograd.grad((x * m.weight).square().sum(), x)[0],
    "backward": lambda m, x: ((x * m.weight).sum().backward(), x * 2)[1],
    "backward by inputs": lambda m, x: ((x * m.weight).sum().backward(inputs=[m.weight]), x * 2)[1],
}


@pytest.mark.parametrize("name", DIFFERENTIATES)
def test_a_call_that_eager_cannot_differentiate_is_refused(name):
    model, (x, _) = Program(DIFFERENTIATES[name]), input_of(True)
    trace = st.trace(model, (x,))
    torch.testing.assert_close(trace(x), model(x))
    for mode in (torch.no_grad, torch.inference_mode):
        with mode(), pytest.raises(st.StateMismatchError, match=r"torch\.is_grad_enabled\(\)"):
            trace(x)
    require(model, False)
    with pytest.raises(st.errors.InputMismatchError, match="requires_grad"):
        trace(x.detach())
