"""Training steps of blocks and of ops in place, beside eager; how often their Python runs."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import scopetrace as st


class Block(nn.Module):
    """Normalization, dropout, a residual, an op in place and a view."""

    def __init__(self):
        super().__init__()
        self.norm, self.conv = nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x):
        y = self.norm(self.conv(x))
        y += x
        return F.dropout(F.relu(y, inplace=True), 0.5, self.training).transpose(2, 3)


class Attention(nn.Module):
    """Attention, whose parts are many ops."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out, self.norm = nn.Linear(8, 24), nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1 if self.training else 0.0)
        return x + self.out(F.gelu(y.transpose(1, 2).flatten(2)))


def stack(block, count, *size):
    """Several layers, the first of which runs twice, and what they take."""
    layers = nn.ModuleList([block() for _ in range(count)])
    return layers, torch.randn(*size)


def plain(layers, x):
    for layer in (*layers, layers[0]):
        x = layer(x)
    x.square().mean().backward()


def several(layers, x):
    """Two losses of one graph, one after the other; the same tensor as both operands."""
    y = layers[0](x)
    loss = (y * y).sum()
    loss.backward(retain_graph=True)
    torch.cat([loss[None], y.flatten()[:2]]).sum().backward()


def only_some(layers, x):
    y = layers[1](layers[0](x))
    found = torch.autograd.grad(y.sum(), list(layers[0].parameters()), retain_graph=True)
    y.square().mean().backward()
    return found


def traced(step, layers, *args):
    """The trace of a step, which prints when its Python runs."""

    def told(*args):
        print("a run")
        return step(layers, *args)

    return st.trace(told, args)


@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize(("block", "size"), [(Block, (2, 4, 6, 6)), (Attention, (2, 5, 8))])
@pytest.mark.parametrize("step", [plain, several, only_some])
def test_a_step_is_as_in_eager(step, block, size, checked, monkeypatch, capsys):
    monkeypatch.setenv("SCOPETRACE_CHECK", str(int(checked)))
    layers, x = stack(block, 3, *size)
    trace = traced(step, layers, x)
    assert capsys.readouterr().out.count("a run") == 1
    twin = copy.deepcopy(layers)
    torch.manual_seed(0)
    found = trace(x)
    torch.manual_seed(0)
    assert all(map(torch.allclose, found or (), step(twin, x) or ()))
    for p, q in zip(layers.parameters(), twin.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        assert p.grad is None or torch.allclose(p.grad, q.grad, atol=1e-6)


def written_view(w, x):
    y = x * w
    y[0].mul_(2)
    y.sum().backward()


def written_by_alias(w, x):
    y = x * w
    part = y[0]
    y.mul_(2)
    (part * w).sum().backward()


def hooked(w, x):
    y = x * w
    y.register_hook(lambda g: g * 3)
    y.sum().backward()


def autocast(w, x):
    with torch.autocast("cpu", torch.bfloat16):
        (x @ w).sum().backward()


def checkpointed(w, x):
    y = torch.utils.checkpoint.checkpoint(lambda t: (t * w).sin(), x.clone().requires_grad_(), use_reentrant=False)
    y.sum().backward()


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 5


def function(w, x):
    Double.apply(x * w).sum().backward()


def twice(w, x):
    y = x * w
    (gradient,) = torch.autograd.grad(y.square().sum(), w, create_graph=True)
    gradient.sum().backward()


def by_another_name(w, x):
    getattr((x * w).sum(), "".join(("back", "ward")))()


@pytest.mark.parametrize("names_other_things", [False, True])
def test_names_that_say_nothing_cost_a_second_run(names_other_things, capsys):
    """That code names `backward` is a hint alone."""
    w, x = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4)
    if names_other_things:

        def step(w, x):
            return F.linear(x, w) if x.dim() else x.backward()

        assert "linear" in str(traced(step, w, x))  # recorded as without the name
    else:
        twin = w.detach().clone().requires_grad_()
        trace = traced(by_another_name, w, x)
        trace(x)
        by_another_name(twin, x)
        assert torch.equal(w.grad, twin.grad)
    assert capsys.readouterr().out.count("a run") == 2


@pytest.mark.parametrize(
    "step",
    [written_view, written_by_alias, hooked, autocast, checkpointed, function, twice],
)
def test_a_step_runs_once(step, capsys):
    w, x = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4)
    twin = w.detach().clone().requires_grad_()
    trace = traced(step, w, x)
    assert capsys.readouterr().out.count("a run") == 1
    trace(x)
    step(twin, x)
    assert torch.allclose(w.grad, twin.grad)


IN_PLACE = {
    **{name: lambda y, w, n=name: getattr(y, f"{n}_")() for name in ("sin", "exp", "sqrt", "abs", "neg", "square")},
    **{name: lambda y, w, n=name: getattr(y, f"{n}_")() for name in ("relu", "sigmoid", "tanh", "log1p", "erf", "sgn")},
    **{
        n: lambda y, w, n=n: getattr(F, n)(y, inplace=True) for n in ("silu", "hardswish", "hardsigmoid", "mish", "elu")
    },
    **{
        n: lambda y, w, n=n: getattr(F, n)(y, inplace=True) for n in ("relu6", "hardtanh", "selu", "celu", "leaky_relu")
    },
    "pow": lambda y, w: y.pow_(3),
    "pow of parameter": lambda y, w: y.pow_(w),
    "mul": lambda y, w: y.mul_(w),
    "mul by number": lambda y, w: y.mul_(2),
    "mul by itself": lambda y, w: y.mul_(y),
    "mul by what needs none": lambda y, w: y.mul_(w.detach()),
    "div": lambda y, w: y.div_(w),
    "div by what needs none": lambda y, w: y.div_(w.detach() + 3),
    "add": lambda y, w: y.add_(w, alpha=2),
    "atan2": lambda y, w: y.atan2_(w),
    "lerp": lambda y, w: y.lerp_(w, 0.3),
    "addcmul": lambda y, w: y.addcmul_(w, w),
    "clamp": lambda y, w: y.clamp_(-0.5, 0.5),
    "threshold": lambda y, w: F.threshold(y, 0.1, 0.0, inplace=True),
    "masked_fill": lambda y, w: y.masked_fill_(w > 0, 0.0),
    "several": lambda y, w: F.silu(y, inplace=True).mul_(w).sin_().add_(1).mul_(w),
    "of what requires none": lambda y, w: y.detach().sin_() * w,
    "of a view": lambda y, w: y.view(-1).sin_().view(4, 4) * w,
    "of one with a view": lambda y, w: (y.view(-1), y.sin_())[1],
    "without autograd": lambda y, w: y * w.detach().sin_(),
    "of a leaf": lambda y, w: w.mul_(2),
}
"""Ops in place of which backward reads what they wrote over, what they gave, or neither."""


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", IN_PLACE)
def test_an_op_in_place_is_differentiated_as_in_eager(name):
    weights, x = [torch.rand(4, 4, requires_grad=True) for _ in range(2)], torch.rand(4, 4)

    def step(weights, x):
        for w in weights:
            x = IN_PLACE[name](x * w, w)
        x.sum().backward()

    twins = copy.deepcopy(weights)
    try:
        step(twins, x)
    except RuntimeError as error:
        with pytest.raises(RuntimeError, match=str(error)[:30]):
            traced(step, weights, x)
        return
    traced(step, weights, x)(x)
    for p, q in zip(weights, twins, strict=True):
        assert (p.grad is None) == (q.grad is None)
        assert p.grad is None or torch.allclose(p.grad, q.grad)


def test_a_write_after_an_op_that_saved_is_refused_as_in_eager():
    w, x = torch.randn(4, requires_grad=True), torch.randn(4)

    def step(w, x):
        y = x * w
        z = y.exp()
        with torch.no_grad():
            z.mul_(2)
        z.sum().backward()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        step(w, x)
    with pytest.raises((RuntimeError, st.ScopetraceError)):
        traced(step, w, x)


def test_a_second_backward_through_a_graph_that_is_freed_fails_as_in_eager():
    w, x = torch.randn(4, requires_grad=True), torch.randn(4)

    def step(w, x):
        y = (x * w).exp().sum()
        y.backward()
        y.backward()

    with pytest.raises(RuntimeError, match="second time"):
        traced(step, w, x)


def test_a_parameter_that_a_call_takes_is_read_before_the_call():
    class Tied(nn.Module):
        def forward(self, x, weight):
            return F.linear(x, weight)

    tied, w = Tied(), nn.Parameter(torch.randn(3, 4))

    def step(w, x):
        tied(x, w).sum().backward()

    traced(step, w, torch.randn(2, 4)).lint()


def test_a_second_backward_after_parameters_were_written():
    """As sharpness-aware minimization does: the second gradient is at other parameters."""
    model = nn.Linear(3, 2)

    def step(x):
        model(x).square().sum().backward()
        with torch.no_grad():
            for p in model.parameters():
                p.add_(p.grad, alpha=0.1)
        model.zero_grad()
        model(x).square().sum().backward()

    x, before = torch.randn(4, 3), copy.deepcopy(model.state_dict())
    st.trace(step, (x,))(x)
    found = [p.grad for p in model.parameters()]
    model.load_state_dict(before)
    model.zero_grad()
    step(x)
    for p, gradient in zip(model.parameters(), found, strict=True):
        torch.testing.assert_close(gradient, p.grad)


def test_anomaly_mode_looks_at_data():
    model = nn.Linear(3, 2)

    def step(x):
        with torch.autograd.set_detect_anomaly(True):
            model(x).square().sum().backward()

    with pytest.raises(st.errors.DataDependentError):
        st.trace(step, (torch.randn(4, 3),))
