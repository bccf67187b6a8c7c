"""Layers that write, copied and recorded: one statement, and two.

statements that write to a buffer, an argument, a view or what the layer makes -> three layers of them, of which one may
hold its buffers otherwise -> traced with copied layers and without, as a forward and as a training step -> one tape
"""

import contextlib
import itertools
import random

import pytest
import reuse_programs
import torch
import torch.nn.functional as F
from torch import nn

from scopetrace.session import record

STATEMENTS = {
    "count": "self.steps.add_(1)",
    "count into": "self.steps += self.steps",
    "norm": "x = self.norm(x)",
    "average": "x = self.average(x)",
    "instance": "x = F.instance_norm(x.T[None], self.mean, self.var, use_input_stats=True)[0].T",
    "mean": "self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)",
    "detached mean": "self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)",
    "lerp": "with torch.no_grad(): self.mean.lerp_(x.mean(0), 0.1)",
    "copy": "self.mean.copy_(x.detach()[0])",
    "fill": "self.mean[1:].fill_(2.0)",
    "read": "x = x + self.mean",
    "read other": "x = x * self.var",
    "row": "self.var[0] = 3.0",
    "data": "self.mean.data.add_(1.0)",
    "cast": "self.mean.add_(x.detach().double()[0])",
    "new": "x = x * 2; x.relu_()",
    "activated": "x = self.fc(x).relu_()",
    "argument": "x.relu_()",
    "argument's view": "x[:, 0].mul_(2.0)",
    "view": "y = x.view(-1) * 1; y[2:].sigmoid_(); x = y.view_as(x)",
    "sum": "y = self.fc(x); y += x; x = y",
    "into it": "y = torch.zeros_like(x); y.copy_(self.fc(x)); x = y",
    "into it from buffer": "y = x * 1; y.add_(self.mean); x = y",
    "masked": "x = self.fc(x).masked_fill_(x > 0, 1.0)",
    "put": "y = x * 1; y[:, 1] = self.fc(x)[:, 0]; x = y",
    "drop": "x = F.dropout(self.fc(x), 0.5, inplace=True)",
    "noise": "x = x + torch.empty_like(x).normal_()",
    "bernoulli": "self.mean.bernoulli_(0.5)",
    "scattered": "x = x.clone().scatter_add_(0, torch.zeros(1, 4, dtype=torch.int64), self.fc(x)[:1])",
    "out": "y = torch.empty_like(x.detach()); torch.neg(x.detach(), out=y); x = x + y",
    "apart": "x = x.detach_() if x.grad_fn is None else x.detach()",
    "self": "x = x * 1; x.add_(x)",
    "overlap": "x = x * 1; x[:, 1:].add_(x[:, :-1])",
}


class Block(nn.Module):
    """Runs statements; `run` is the code of all blocks of a model."""

    def __init__(self, run):
        super().__init__()
        self.run = run
        self.fc, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.average = nn.BatchNorm1d(4, momentum=None, affine=False)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("var", torch.ones(4))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        """Run them."""
        return self.run(self, x)


def _share(block, other):
    block.mean, block.norm = other.mean, other.norm


def _alias(block, other):
    block.var = block.mean[:]


TWISTS = {
    "": lambda block, other: None,
    "shared": _share,
    "one memory": _alias,
    "views": lambda block, other: setattr(block, "mean", torch.zeros(8)[::2]),
    "view of other": lambda block, other: setattr(block, "mean", other.var.view(4)),
    "view in view": lambda block, other: setattr(block, "mean", torch.zeros(5)[1:]),
    "statistics": lambda block, other: setattr(block.norm, "running_mean", block.mean),
    "other statistics": lambda block, other: setattr(block.norm, "running_var", other.norm.running_var),
}
"""How a block differs, which is the second or third; `other` is the first."""

BETWEEN = {
    "": "",
    "in place": "x = x * 1; x.add_(1.0)",
    "read": "x = x + net.blocks[0].mean",
    "view": "x = x * 1; v = x[0]",
}


class Net(nn.Module):
    """Three blocks, with something between them."""

    def __init__(self, run, between):
        super().__init__()
        self.blocks = nn.ModuleList([Block(run) for _ in range(4)])
        self.between, self.scale = between, nn.Parameter(torch.ones(4))

    def forward(self, x):
        """Run them."""
        x = x * self.scale
        for block in self.blocks:
            x = block(self.between(self, x))
        return x


def _function(parameter, lines):
    variables = {"torch": torch, "F": F}
    body = "".join(f"    {line}\n" for line in (*lines, "return x"))
    exec(f"def run({parameter}, x):\n{body}", variables)
    return variables["run"]


def _step(net):
    def step(x):
        loss = net(x).sum()
        loss.backward()
        return loss

    return step


WAYS = {
    "forward": (lambda net: net, torch.no_grad),
    "with autograd": (lambda net: net, contextlib.nullcontext),
    "in inference": (lambda net: net, torch.inference_mode),
    "step": (_step, contextlib.nullcontext),
}


def tapes(names, twist, where, between, way):
    """The tape with each block recorded and that with copied blocks, or class and text of the error of each."""
    found = []
    for reuse in (False, True):
        torch.manual_seed(0)
        net = Net(_function("self", [STATEMENTS[n] for n in names]), _function("net", [BETWEEN[between]]))
        TWISTS[twist](net.blocks[where], net.blocks[0])
        traced, mode = WAYS[way]
        with mode():
            try:
                found.append(record(traced(net), (torch.randn(3, 4),), {}, reuse=reuse))
            except Exception as error:
                found.append((type(error).__name__, str(error)))
    return found


def expect_equal(case):
    """Both tapes are one; how many blocks were copied."""
    plain, repeated = tapes(*case)
    if isinstance(plain, tuple) or isinstance(repeated, tuple):
        assert plain == repeated, case
        return 0
    assert told(plain) == told(repeated), case
    return repeated.reuse.replayed.get("Block", 0)


def told(tape):
    """All that a tape says, but which tensors code has asked for: where that outside of a block asks for one of its
    tensors, copies are taken to be asked for theirs."""
    return [line for line in reuse_programs.described(tape) if "'s dtype, shape and device" not in line]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", STATEMENTS)
def test_one_statement(name, way):
    cases = [*itertools.product(TWISTS, [""]), *itertools.product([""], BETWEEN)]
    copied = sum(expect_equal(((name,), twist, 2, between, way)) for twist, between in cases)
    assert copied or way in NEVER_COPIED.get(name, ()), "no block was copied"


@pytest.mark.parametrize("way", WAYS)
def test_two_statements_at_random(way):
    cases = list(itertools.product(itertools.product(STATEMENTS, repeat=2), TWISTS, (1, 2), BETWEEN, [way]))
    for case in random.Random(1).sample(cases, 60):
        expect_equal(case)


@pytest.mark.exhaustive
@pytest.mark.parametrize("first", STATEMENTS)
def test_two_statements(first):
    for second, twist, way in itertools.product(STATEMENTS, TWISTS, WAYS):
        expect_equal(((first, second), twist, 2, "", way))


OF_AUTOGRAD = "forward", "with autograd", "in inference", "step"
NEVER_COPIED = {
    **dict.fromkeys(("detached mean", "lerp", "copy", "data", "cast", "out", "apart"), OF_AUTOGRAD),
    "row": ("in inference",),
    **dict.fromkeys(("argument's view", "view", "into it", "put", "overlap"), ("step",)),
}
"""By statement, the ways in which a block with it is always recorded: it detaches or switches autograd off, or writes
to what is a view for autograd, which then runs."""
