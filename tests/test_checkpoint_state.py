"""Regions under torch.utils.checkpoint that change state, or read what changes: backward runs them again in eager.

Each kind of region is traced with and without gradients, with frozen and trained parameters, for an input with and
without gradients, and called in each of these ways. The trace does what the model does, or it is refused.
"""

import collections
import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed._composable import checkpoint as composable_checkpoint
from torch.utils.checkpoint import checkpoint

import scopetrace as st


class Regions(nn.Module):
    """One region, called `kind`, and what follows it."""

    def __init__(self, kind, use_reentrant):
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(4), nn.Linear(4, 4)
        self.register_buffer("n", torch.zeros(()))
        self.kind, self.use_reentrant, self.last, self.total = kind, use_reentrant, None, torch.zeros(())

    def statistics(self, x):
        return self.norm(self.linear(x))

    def written_and_read(self, x):
        self.n.add_(1)
        return self.linear(x) * self.n.detach()

    def written(self, x):
        self.n.fill_(3)
        return self.linear(x).sin()

    def bound_anew(self, x):
        self.n = self.n + 1
        return self.linear(x).sin()

    def kept(self, x):
        self.last = self.linear(x)
        return self.last.sin()

    def summed(self, x):
        self.total = self.total + x.sum().detach()
        return self.linear(x).sin()

    def written_later(self, x):
        return self.linear(x).sin() * self.n.detach()

    bound_later = written_later

    def handed_over(self, x):
        return self.linear(self.hidden).sin()

    def with_dropout(self, x):
        return F.dropout(self.linear(x).sin(), 0.5)

    def with_other_dropout(self, x):
        return F.dropout(self.linear(x).sin(), 0.5)

    def pure(self, x):
        return self.linear(x).sin()

    def forward(self, x):
        if self.kind == "handed_over":
            self.hidden = x.sin()
        options = {"preserve_rng_state": False} if self.kind == "with_other_dropout" else {}
        y = checkpoint(getattr(self, self.kind), x, use_reentrant=self.use_reentrant, **options)
        if self.kind == "written_later":
            self.n.add_(1)
        if self.kind == "bound_later":
            self.n = self.n + y.detach().sum()
        if self.kind == "handed_over":
            self.hidden = y.cos()
        return y


def results(run, model, x, with_grad, input_grad):
    """What a call gives and leaves, after backward; None where it raises."""
    torch.manual_seed(3)
    x = x.clone().requires_grad_(input_grad)
    with torch.set_grad_enabled(with_grad):
        y = run(x)
    if y.requires_grad:
        y.sum().backward()
    kept = [getattr(model, name, None) for name in ("last", "total", "hidden")]
    return [y, *model.buffers(), *(p.grad for p in model.parameters()), x.grad, *kept]


def equal(a, b):
    return a is b if a is None or b is None else torch.allclose(a, b)


def verdicts(kind, use_reentrant):
    count = collections.Counter()
    for grad, with_grad, input_grad, trained, trained_later in itertools.product([False, True], repeat=5):
        torch.manual_seed(0)
        model, x = Regions(kind, use_reentrant).requires_grad_(trained), torch.randn(3, 4)
        other = copy.deepcopy(model).requires_grad_(trained_later)
        try:
            with torch.set_grad_enabled(grad):
                tr = st.trace(model, (x.clone().requires_grad_(input_grad),))
            model.requires_grad_(trained_later)
            got = results(tr, model, x, with_grad, input_grad)
        except st.errors.ScopetraceError:
            count["refused"] += 1
            continue
        expected = results(other, other, x, with_grad, input_grad)
        count["right" if all(map(equal, got, expected)) else "wrong"] += 1
    return dict(count)


WRITE = ["statistics", "written_and_read", "written", "bound_anew", "kept", "summed"]
OTHERS = ["written_later", "bound_later", "handed_over", "with_other_dropout"]


@pytest.mark.sample(4)
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("kind", [*WRITE, *OTHERS])
def test_what_backward_would_do_again_is_refused_where_it_may_run(kind, use_reentrant):
    found = verdicts(kind, use_reentrant)
    assert "wrong" not in found
    assert found["right"] >= 10  # among them the calls without gradients of traces without them


@pytest.mark.sample(2)
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("kind", ["pure", "with_dropout"])
def test_other_regions_are_traced(kind, use_reentrant):
    found = verdicts(kind, use_reentrant)
    assert "wrong" not in found
    assert found["right"] >= (24 if use_reentrant else 32)  # reentrant ones ask whether their arguments require grad


def test_random_numbers_that_backward_draws_anew_in_a_step():
    def step(x):
        run = Regions("with_other_dropout", use_reentrant=False)
        run(x).sum().backward()

    with pytest.raises(st.errors.UnsupportedOpError, match="preserve_rng_state is False"):
        st.trace(step, (torch.rand(3, 4, requires_grad=True),))


class Composed(nn.Module):
    """Batch norm in a module that torch's composable checkpoint runs again by hooks."""

    def __init__(self):
        super().__init__()
        self.region = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        composable_checkpoint(self.region)

    def forward(self, x):
        return self.region(x) * 2


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("with_grad", [False, True])
def test_a_module_that_hooks_run_again(grad, with_grad):
    x = torch.randn(3, 4)
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Composed())
    try:
        with torch.set_grad_enabled(grad):
            tr = st.trace(models[0], (x,))
        got = results(tr, models[0], x, with_grad, input_grad=True)
    except st.errors.ScopetraceError:
        assert grad or with_grad
        return
    assert not with_grad
    expected = results(models[1], models[1], x, with_grad, input_grad=True)
    assert all(map(equal, got, expected))


ASKED = {
    "whether autograd is on": lambda y: torch.is_grad_enabled(),
    "whether a result requires grad": lambda y: y.requires_grad,
    "whether a result is a leaf": lambda y: not y.is_leaf,
}


@pytest.mark.parametrize("differentiates", [False, True])
@pytest.mark.parametrize("asked", ASKED)
def test_questions_that_a_reentrant_region_answers_otherwise_in_backward_are_refused(asked, differentiates):
    fc = nn.Linear(4, 4)

    def region(x):
        y = fc(x)
        return y if ASKED[asked](y) else y * 2

    def run(x, use_reentrant):
        y = checkpoint(region, x, use_reentrant=use_reentrant)
        if differentiates:
            y.sum().backward()
        return y

    x = torch.randn(2, 4, requires_grad=True)
    with pytest.raises(st.errors.UnsupportedOpError, match="under reentrant checkpointing"):
        st.trace(run, (x, True))
    assert torch.equal(st.trace(run, (x, False))(x, False), fc(x))
