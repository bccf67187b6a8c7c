"""Training steps that keep averages of the parameters: by hand, and with `torch.optim.swa_utils.AveragedModel`."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import swa_utils

import scopetrace as st
from tests.steps import Net, batches, equal, run_beside_eager


class WithAverage(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = Net()
        self.ema = copy.deepcopy(self.net).requires_grad_(False)


def step_with(update, optimizer_of=lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)):
    def make(model):
        optimizer = optimizer_of(model.net.parameters())

        def step(x, y):
            loss = F.cross_entropy(model.net(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            update(model)
            return loss

        return step

    return make


def lerp(model):
    with torch.no_grad():
        for e, p in zip(model.ema.parameters(), model.net.parameters(), strict=True):
            e.lerp_(p, 0.1)


def multiply_and_add(model):
    with torch.no_grad():
        for e, p in zip(model.ema.parameters(), model.net.parameters(), strict=True):
            e.mul_(0.9).add_(p, alpha=0.1)


def by_data(model):
    for e, p in zip(model.ema.parameters(), model.net.parameters(), strict=True):
        e.data = e.data * 0.9 + p.data * 0.1


@torch.no_grad()
def all_at_once(model):
    torch._foreach_lerp_(list(model.ema.parameters()), list(model.net.parameters()), 0.1)


@torch.no_grad()
def by_state(model):
    found = model.net.state_dict()
    model.ema.load_state_dict({k: v * 0.9 + found[k] * 0.1 for k, v in model.ema.state_dict().items()})


@pytest.mark.parametrize("update", [lerp, multiply_and_add, by_data, all_at_once, by_state])
def test_an_average_by_hand(update):
    run_beside_eager(step_with(update), WithAverage())


FORMS = {
    "mean": {},
    "ema": {"avg_fn": swa_utils.get_ema_avg_fn(0.9)},
    "ema of all": {"multi_avg_fn": swa_utils.get_ema_multi_avg_fn(0.9)},
    "mean of all": {"multi_avg_fn": swa_utils.get_swa_multi_avg_fn()},
    "ema with buffers": {"multi_avg_fn": swa_utils.get_ema_multi_avg_fn(0.9), "use_buffers": True},
}


class Averaged(nn.Module):
    def __init__(self, updates, **how):
        super().__init__()
        self.net = Net()
        self.average = swa_utils.AveragedModel(self.net, **how)
        for _ in range(updates):
            self.average.update_parameters(self.net)


def update_average(model):
    model.average.update_parameters(model.net)


@pytest.mark.parametrize("form", FORMS)
def test_an_averaged_model_that_was_updated_once_before(form):
    """Its first update is another one than all that follow, which `specialize=True` compares each call with."""
    model = Averaged(1, **FORMS[form])
    twin = copy.deepcopy(model)
    trace, eager = (
        st.trace(step_with(update_average)(model), batches()[0], specialize=True),
        step_with(update_average)(twin),
    )
    for args in batches():
        assert equal(trace(*args), eager(*args))
        assert all(map(equal, model.parameters(), twin.parameters()))
        assert all(map(equal, model.buffers(), twin.buffers()))


def test_an_averaged_model_that_begins_with_the_trace():
    model = Averaged(0)
    step = step_with(update_average)(model)
    with pytest.raises(st.errors.DataDependentError, match="specialize=True"):
        st.trace(step, batches()[0])
    trace = st.trace(step, batches()[0], specialize=True)
    trace(*batches()[0])
    before = [t.clone() for t in [*model.parameters(), *model.buffers()]]
    with pytest.raises(st.errors.InputMismatchError, match="the trace is specialized"):
        trace(*batches()[0])
    assert all(map(torch.equal, before, [*model.parameters(), *model.buffers()]))
