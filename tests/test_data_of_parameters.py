"""Steps that set `p.data = ...` of parameters and ask for `p.grad`: SAM, Lookahead, averages, swapped weights."""

import copy

import pytest
import torch
from torch import nn

import scopetrace as st


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))


STEPS = {}


def case(make):
    STEPS[make.__name__] = make
    return make


def loss_of(model, x):
    return model(x).square().mean()


@case
def sharpness_aware(model, optimizer):
    def step(x):
        loss_of(model, x).backward()
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        old = {}
        for p in model.parameters():
            old[p] = p.data.clone()
            p.data.add_(p.grad * (0.05 / (norm + 1e-12)))
        optimizer.zero_grad()
        loss = loss_of(model, x)
        loss.backward()
        for p in model.parameters():
            p.data = old[p]
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step, []


@case
def decays_before(model, optimizer):
    def step(x):
        for p in model.parameters():
            p.data = p.data * 0.99
        optimizer.zero_grad()
        loss = loss_of(model, x)
        loss.backward()
        optimizer.step()
        return loss

    return step, []


@case
def clips_after(model, optimizer):
    def step(x):
        optimizer.zero_grad()
        loss = loss_of(model, x)
        loss.backward()
        optimizer.step()
        for p in model.parameters():
            p.data = p.data.clamp(-0.3, 0.3)
        return loss.detach(), [p.grad.sum() for p in model.parameters()]

    return step, []


@case
def looks_ahead(model, optimizer):
    slow = [p.detach().clone() for p in model.parameters()]

    def step(x):
        optimizer.zero_grad()
        loss = loss_of(model, x)
        loss.backward()
        optimizer.step()
        for p, s in zip(model.parameters(), slow, strict=True):
            s.add_(p.data - s, alpha=0.5)
            p.data = s.clone()
        return loss.detach()

    return step, slow


@case
def shares_the_slow_weights(model, optimizer):
    """From the first step on an optimizer that writes in place writes to both."""
    slow = [p.detach().clone() for p in model.parameters()]

    def step(x):
        for p, s in zip(model.parameters(), slow, strict=True):
            p.data = s
        optimizer.zero_grad()
        loss = loss_of(model, x)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step, slow


@case
def an_alias_from_before(model, optimizer):
    def step(x):
        before = model[0].weight.detach()
        model[0].weight.data = before * 0.5
        optimizer.zero_grad()
        loss = loss_of(model, x) + before.sum()
        loss.backward()
        optimizer.step()
        return loss.detach(), before.sum()

    return step, []


@case
def twice(model, optimizer):
    def step(x):
        optimizer.zero_grad()
        for p in model.parameters():
            p.data = p.data + 0.01
        loss_of(model, x).backward()
        for p in model.parameters():
            p.data = p.data - p.grad * 0.1
        loss = loss_of(model, x)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step, []


@case
def gradients_that_stay(model, optimizer):
    def step(x):
        for p in model.parameters():
            p.data = p.data * 0.99
        loss = loss_of(model, x)
        loss.backward()
        return loss.detach()

    return step, []


@case
def swapped_for_a_forward(model, optimizer):
    averages = [p.detach().clone() for p in model.parameters()]

    def step(x):
        optimizer.zero_grad()
        loss = loss_of(model, x)
        loss.backward()
        optimizer.step()
        kept = [p.data for p in model.parameters()]
        for p, e in zip(model.parameters(), averages, strict=True):
            e.lerp_(p.data, 0.1)
            p.data = e
        with torch.no_grad():
            by_averages = loss_of(model, x)
        for p, k in zip(model.parameters(), kept, strict=True):
            p.data = k
        return loss.detach(), by_averages

    return step, averages


@case
def a_teacher(model, optimizer):
    teacher = copy.deepcopy(model).requires_grad_(False)

    def step(x):
        optimizer.zero_grad()
        loss = (model(x) - teacher(x)).square().mean() + loss_of(model, x)
        loss.backward()
        optimizer.step()
        for p, q in zip(model.parameters(), teacher.parameters(), strict=True):
            q.data = q.data * 0.9 + p.data * 0.1
        return loss.detach()

    return step, list(teacher.parameters())


@case
def a_parameter_of_another(model, optimizer):
    other = copy.deepcopy(model)

    def step(x):
        optimizer.zero_grad()
        loss = loss_of(model, x)
        loss.backward()
        optimizer.step()
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            q.data = p.data
        return loss.detach()

    return step, list(other.parameters())


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", ["SGD", "Adam"])
@pytest.mark.parametrize("name", STEPS)
def test_four_steps_are_those_of_eager(name, kind):
    models = [net(), net()]
    optimizers = [getattr(torch.optim, kind)(m.parameters(), lr=0.05) for m in models]
    (step, state), (eager, expected) = (STEPS[name](m, o) for m, o in zip(models, optimizers, strict=True))
    outside = [[p.detach() for p in m.parameters()] for m in models]
    torch.manual_seed(1)
    batches = [torch.randn(5, 4) for _ in range(4)]
    before = copy.deepcopy(models[0].state_dict())
    tr = st.trace(step, (batches[0],))
    torch.testing.assert_close(models[0].state_dict(), before, rtol=0, atol=0)
    for x in batches:
        result, of_eager = tr(x), eager(x)
        torch.testing.assert_close(result, of_eager)
        torch.testing.assert_close(models[0].state_dict(), models[1].state_dict())
        torch.testing.assert_close(state, expected)
        torch.testing.assert_close(outside[0], outside[1])
        torch.testing.assert_close(*[[p.grad for p in m.parameters()] for m in models])


def sets_it_in_between(model, backward):
    def step(x):
        loss = loss_of(model, x)
        for p in model.parameters():
            p.data = p.data * 0.5
        return backward(loss)

    return step


@pytest.mark.parametrize("by", [lambda m: None, lambda m: list(m.parameters())])
def test_between_a_forward_and_its_backward(by):
    """The graph of autograd knows the parameter no more; eager takes the gradient by it all the same."""
    model = net()
    with pytest.raises(st.UnsupportedOpError, match=r"sets `.data` of a tensor between what it computes from that and"):
        st.trace(sets_it_in_between(model, lambda loss: loss.backward(inputs=by(model))), (torch.ones(5, 4),))
    params = list(model.parameters())
    for allows in (True, False):
        step = sets_it_in_between(model, lambda loss, a=allows: torch.autograd.grad(loss, params, allow_unused=a))
        with pytest.raises((st.UnsupportedOpError, RuntimeError), match=r"sets `.data`|appears to not have been used"):
            st.trace(step, (torch.ones(5, 4),))


def test_a_result_that_can_be_differentiated_still():
    """Its gradient would not get to the parameter."""
    model = net()

    def step(x):
        model(x).sum().backward()
        model[0].weight.data = model[0].weight.data * 0.5
        model[0].weight.grad = None
        model[0].weight.data.add_(1)
        return model(x).sum()

    with pytest.raises(st.FunctionalizationError, match="a tensor that requires grad gets memory that is written"):
        st.trace(step, (torch.ones(5, 4),))
