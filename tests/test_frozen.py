"""Forwards and training steps that set `requires_grad` of parameters for a part."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import scopetrace as st
from tests.steps import Net, equal, run_beside_eager, step_of


class Gan(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator, self.critic = Net(), nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1))


def by_module(module, flag):
    module.requires_grad_(flag)


def by_parameter(module, flag):
    for p in module.parameters():
        p.requires_grad_(flag)


def by_attribute(module, flag):
    for p in module.parameters():
        p.requires_grad = flag


def gan_step(freeze, thaws, *, critic_first, to_none):
    """`thaws` says where the critic requires grad again: before or after the generator's backward, or in its turn."""

    def make(model):
        generator, critic = model.generator, model.critic
        ours = torch.optim.Adam(generator.parameters(), 0.01)
        others = torch.optim.SGD(critic.parameters(), 0.1, momentum=0.9)

        def generate(x):
            freeze(critic, False)
            ours.zero_grad(set_to_none=to_none)
            loss = F.softplus(-critic(generator(x))).mean()
            if thaws == "before":
                freeze(critic, True)
            loss.backward()
            ours.step()
            if thaws == "after":
                freeze(critic, True)
            return loss

        def criticise(x, real):
            freeze(critic, True)
            others.zero_grad(set_to_none=to_none)
            loss = F.softplus(critic(generator(x).detach())).mean() + F.softplus(-critic(real)).mean()
            loss.backward()
            others.step()
            return loss

        def step(x, real):
            if critic_first:
                return [criticise(x, real), generate(x)]
            return [generate(x), criticise(x, real)]

        step(*given[0])
        return step

    torch.manual_seed(2)
    given = [(torch.randn(5, 4), torch.randn(5, 3)) for _ in range(3)]
    return make, given


def results_equal(a, b):
    if isinstance(a, list):
        return len(a) == len(b) and all(map(results_equal, a, b))
    if not isinstance(a, torch.Tensor):
        return a == b
    return equal(a, b) and a.requires_grad == b.requires_grad


@pytest.mark.sample(4)
@pytest.mark.parametrize("freeze", [by_module, by_parameter, by_attribute])
@pytest.mark.parametrize(
    ("thaws", "critic_first", "to_none"),
    [
        c
        for c in itertools.product(["before", "after", "later"], [True, False], [True, False])
        if c[:2] != ("later", True)
    ],
)
def test_a_critic_that_is_frozen_while_the_generator_learns(freeze, thaws, critic_first, to_none):
    make, given = gan_step(freeze, thaws, critic_first=critic_first, to_none=to_none)
    model = Gan()
    run_beside_eager(make, model, given, equal=results_equal)
    assert all(p.requires_grad for p in model.parameters())


def test_a_step_that_leaves_parameters_frozen_is_refused():
    make, given = gan_step(by_module, "later", critic_first=True, to_none=True)
    model = Gan()
    step = make(model)
    model.critic.requires_grad_(True)
    with pytest.raises(st.errors.UnsupportedOpError, match=r"leaves requires_grad of .* at False, which was True"):
        st.trace(step, given[0])
    assert all(p.requires_grad for p in model.parameters())


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.p, self.q = nn.Parameter(torch.rand(3) + 0.5), nn.Parameter(torch.rand(3) + 0.5)


FREEZE, THAW = "m.p.requires_grad_(False)", "m.p.requires_grad_(True)"
BACKWARD = "(h * m.q).sum().backward()"
PROGRAMS = {
    "a product": [FREEZE, "h = h * m.p", THAW],
    "a product, by the loss": [FREEZE, "h = h * m.p", THAW, BACKWARD],
    "frozen and not": ["h = h * m.p", FREEZE, "h = h * m.p", THAW, BACKWARD],
    "frozen before backward": ["h = h * m.p", FREEZE, BACKWARD, THAW],
    "frozen between backwards": ["h = h * m.p", BACKWARD, FREEZE, "h = x * m.p", BACKWARD, THAW],
    "frozen twice": [FREEZE, "h = h * m.p", THAW, "h = h * m.p", FREEZE, "h = h + m.p", THAW, BACKWARD],
    "a view": [FREEZE, "h = h * m.p.view(3, 1)[:, 0]", THAW, BACKWARD],
    "written while frozen": [FREEZE, "m.p.mul_(0.9)", "h = h * m.p", THAW, BACKWARD],
    "written after": ["v = m.p[1:]", FREEZE, "h = h * m.p", THAW, "with torch.no_grad(): m.p.add_(h)", "h = h * m.p"],
    "a branch": [FREEZE, "h = h if m.p.requires_grad else h * m.p", THAW, "h = h + m.p if m.p.requires_grad else h"],
    "a gradient that is asked for": ["(h * m.p).sum().backward()", FREEZE, "h = h * m.p.grad", THAW, "m.p.grad = None"],
    "a gradient that is set": [FREEZE, "m.p.grad = h.clone()", "h = h * m.p", THAW],
    "a derivative": [FREEZE, "g = m.p * h", THAW, "h = torch.autograd.grad((m.p * g).sum(), m.p)[0] + h"],
    "as it was": [THAW, "h = h * m.p", BACKWARD],
    "a result": [FREEZE, "h = m.p * 2", THAW],
    "other data": ["m.p.data = m.p.data * 2", "(h * m.p).sum().backward()"],
    "other data after": ["m.p.grad = x * 2", FREEZE, THAW, "m.p.data = m.p.data * 2", "h = m.p.grad"],
}


def step_from(steps):
    def make(model):
        names = {"m": model, "torch": torch}
        exec("def step(x):\n    h = x\n" + "".join(f"    {s}\n" for s in [*steps, "return [h]"]), names)
        return names["step"]

    return make


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_parameter_that_is_frozen_for_a_part(name):
    torch.manual_seed(0)
    run_beside_eager(step_from(PROGRAMS[name]), Two(), [(torch.rand(3),) for _ in range(3)], equal=results_equal)


def test_a_parameter_that_requires_grad_for_a_part_only():
    torch.manual_seed(0)
    model, given = Two(), [(torch.rand(3),) for _ in range(3)]
    model.p.requires_grad_(False)
    steps = [THAW, "h = h * m.p", BACKWARD, "h = h.detach()", FREEZE]
    run_beside_eager(step_from(steps), model, given, equal=results_equal)
    with pytest.raises(st.errors.UnsupportedOpError, match="makes a tensor require grad"):
        st.trace(step_from([THAW, "h = h * m.p", FREEZE])(model), given[0])


def test_a_trace_is_of_the_flags_that_it_found():
    model = Two()
    trace = st.trace(step_from([FREEZE, "h = h * m.p", THAW])(model), (torch.rand(3),))
    model.p.requires_grad_(False)
    with pytest.raises(st.errors.StateMismatchError, match="requires_grad"):
        trace(torch.rand(3))


@pytest.mark.parametrize(
    ("steps", "why"),
    [
        ([FREEZE], "leaves requires_grad"),
        (["m.p.data = m.p.data * 2", FREEZE, THAW], "sets `.data` of a tensor that it freezes"),
        ([FREEZE, "m.p.data = m.p.data * 2", THAW], "sets `.data` of a tensor that it freezes"),
        (["h = h * m.p", "m.p.data = m.p.data * 2", BACKWARD], "sets `.data` of a tensor between what it computes"),
    ],
)
def test_flags_and_data_that_are_refused(steps, why):
    model = Two()
    with pytest.raises(st.errors.UnsupportedOpError, match=why):
        st.trace(step_from(steps)(model), (torch.rand(3),))
    assert model.p.requires_grad


def test_a_hook_on_a_parameter_that_is_frozen_between_forward_and_backward_is_refused():
    model = Two()
    model.p.register_hook(lambda gradient: gradient * 2)
    with pytest.raises(st.errors.UnsupportedOpError, match="freezes tensors with hooks"):
        st.trace(step_from(PROGRAMS["frozen before backward"])(model), (torch.rand(3),))


def test_an_error_leaves_the_flags_as_they_were():
    model = Two()
    with pytest.raises(ZeroDivisionError):
        st.trace(step_from([FREEZE, "1 / 0"])(model), (torch.rand(3),))
    assert model.p.requires_grad


def test_layers_of_which_one_is_frozen():
    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

        def forward(self, x):
            self.layers[1].requires_grad_(False)
            for layer in self.layers:
                x = layer(x).tanh()
            self.layers[1].requires_grad_(True)
            return x

    run_beside_eager(step_of, Deep(), [(torch.rand(2, 4),) for _ in range(2)])
    model = Deep()
    given = torch.rand(2, 4)
    st.trace(model, (given,))(given).sum().backward()
    assert [layer.weight.grad is None for layer in model.layers] == [False, True, False]
