"""Ops of training steps whose backward reads what an op writes over or makes inside: in place, and recurrent layers."""

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F

import scopetrace as st
from tests.steps import run_beside_eager

VIEWS = {
    "whole": lambda y: y,
    "row": lambda y: y[0],
    "columns": lambda y: y[:, 1:],
    "steps": lambda y: y[::2],
    "flat": lambda y: y.view(-1),
    "diagonal": lambda y: y.diagonal(),
}


def like(v):
    return torch.linspace(0.5, 1.5, v.numel()).view(v.shape)


WRITES = {
    "div_": lambda v, w: v.div_(like(v) * w),
    "mul_": lambda v, w: v.mul_(w),
    "mul_ by what it writes": lambda v, w: v.mul_(v.clone().sin()),
    "sigmoid_": lambda v, w: v.mul_(w).sigmoid_(),
    "sin_": lambda v, w: v.sin_(),
    "square_": lambda v, w: v.square_(),
    "pow_": lambda v, w: v.abs_().add_(1).pow_(w),
    "silu": lambda v, w: F.silu(v, inplace=True),
    "relu": lambda v, w: F.relu(v.mul_(w), inplace=True),
    "mish": lambda v, w: F.mish(v, inplace=True),
    "dropout": lambda v, w: F.dropout(v, 0.5, inplace=True),
    "rrelu": lambda v, w: F.rrelu(v, training=True, inplace=True),
    "cumprod_": lambda v, w: v.cumprod_(0),
    "lerp_": lambda v, w: v.lerp_(like(v), w),
    "addcdiv_": lambda v, w: v.addcdiv_(like(v), like(v) * w),
    "atan2_": lambda v, w: v.atan2_(w),
    "copy_": lambda v, w: v.copy_(like(v) * w),
    "masked_fill_": lambda v, w: v.masked_fill_(v > 0, 0.3),
    "an item": lambda v, w: v.__setitem__(0, w),
    "_foreach_mul_": lambda v, w: torch._foreach_mul_([v], [w]),
}


def optimized(loss_of):
    """A step of SGD on `loss_of(model, x)`."""

    def make(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        def step(x):
            loss = loss_of(model, x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return step

    return make


PLACES = [*((write, "whole") for write in WRITES), *zip(WRITES, itertools.cycle([*VIEWS][1:]), strict=False)]


@pytest.mark.sample(3)
@pytest.mark.parametrize(("write", "view"), PLACES)
def test_backward_of_ops_in_place(write, view):
    def loss(model, x):
        y = model(x)
        before = y + 2
        WRITES[write](VIEWS[view](y), model.bias.sum() + 2)
        return y.sin().sum() + before.sum()

    torch.manual_seed(0)
    run_beside_eager(optimized(loss), torch.nn.Linear(4, 4), [(torch.rand(4, 4),) for _ in range(2)])


def test_the_copy_that_backward_reads_is_an_op_of_the_forward():
    model = torch.nn.Linear(4, 4)

    def step(x):
        y = x * model.weight
        y.sin_().sum().backward()

    trace = st.trace(step, (torch.rand(4, 4),))
    lines = [line.strip() for line in str(trace).splitlines() if "clone" in line]
    assert lines == ["%clone: f32[4, 4] = aten.clone(%mul)", "%cos: f32[4, 4] = aten.cos(%clone)"]


@pytest.mark.parametrize("keeps", [False, True], ids=["once", "retain_graph"])
def test_statistics_are_copied_only_for_a_backward_after_the_step(keeps):
    """Autograd keeps what a batch norm has read, and the step writes to it: `retain_graph` lets a caller go back."""
    torch.manual_seed(0)
    model, x = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3)), torch.rand(5, 4)
    mine = copy.deepcopy(model)

    def step(model):
        def run(x):
            loss = model(x).sin().sum()
            loss.backward(retain_graph=keeps)
            return loss

        return run

    trace = st.trace(step(mine), (x,))
    assert str(trace).count("aten.clone") == (2 if keeps else 0)
    for _ in range(2):
        losses = step(model)(x), trace(x)
        torch.testing.assert_close(*losses)
        if keeps:
            for loss in losses:
                loss.backward()
        compared = [[*m.buffers(), *(p.grad for p in m.parameters())] for m in (model, mine)]
        torch.testing.assert_close(*compared)
    if not keeps:
        for loss in losses:
            with pytest.raises(RuntimeError):
                loss.backward()


READS = {
    "a leaf that only the write reads": lambda y, v, w: y.sum().backward(inputs=[w]),
    "the base, beside what was before": lambda y, v, w: (y.sum() + 1).backward(inputs=[w]),
    "the base is differentiated": lambda y, v, w: y.backward(torch.ones_like(y)),
    "the base, by a leaf": lambda y, v, w: y.backward(torch.ones_like(y), inputs=[w]),
    "a row is differentiated": lambda y, v, w: v.backward(torch.ones_like(v)),
    "torch.autograd.grad": lambda y, v, w: setattr(w, "grad", torch.autograd.grad(y.sum(), w)[0]),
}


@pytest.mark.parametrize("write", ["base", "row"])
@pytest.mark.parametrize("name", READS)
def test_backward_of_what_was_written_by_another_alias(name, write):
    """The history of the written tensor has other leaves than the ops that made it."""

    def make(model):
        def step(x):
            y = model(x).clone()
            v = y[1]
            (y if write == "base" else v).mul_(model.w)
            READS[name](y, v, model.w)

        return step

    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    model.w = torch.nn.Parameter(torch.rand(4))
    run_beside_eager(make, model, [(torch.rand(3, 4),) for _ in range(2)])


RECURRENT = {
    "LSTM": lambda: torch.nn.LSTM(4, 3, num_layers=2, bidirectional=True),
    "GRU": lambda: torch.nn.GRU(4, 3, num_layers=2, batch_first=True),
    "RNN": lambda: torch.nn.RNN(4, 3, nonlinearity="relu"),
    "LSTMCell": lambda: torch.nn.LSTMCell(4, 3),
    "GRUCell": lambda: torch.nn.GRUCell(4, 3),
}


@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_layers(name):
    torch.manual_seed(0)
    size = (5, 4) if "Cell" in name else (5, 2, 4)
    loss = optimized(lambda model, x: next(t for t in model(x) if isinstance(t, torch.Tensor)).sin().sum())
    trace = run_beside_eager(loss, RECURRENT[name](), [(torch.rand(size),) for _ in range(3)])
    assert trace.call("model").backward_nodes
