"""Small training steps, a way to differentiate by a treatment of gradients by an optimizer, each beside eager."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import scopetrace as st
from tests.steps import Net, batches, equal


def of_parameters(model, x, y):
    loss, params = F.cross_entropy(model(x), y), list(model.parameters())
    for p, gradient in zip(params, torch.autograd.grad(loss, params), strict=True):
        p.grad = gradient
    return loss


def by_torch_func(model, x, y):
    def loss_of(params):
        return F.cross_entropy(torch.func.functional_call(model, params, (x,)), y)

    gradients, loss = torch.func.grad_and_value(loss_of)({k: p.detach() for k, p in model.named_parameters()})
    for name, p in model.named_parameters():
        p.grad = gradients[name]
    return loss


def penalty(model, x, y):
    x = x.detach().requires_grad_()
    loss = F.cross_entropy(model(x), y)
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    (loss + gradient.square().sum()).backward()
    return loss, gradient


def two_losses(model, x, y):
    out = model(x)
    losses = F.cross_entropy(out, y), out.square().mean()
    torch.autograd.backward(losses, [torch.tensor(1.0), torch.tensor(0.5)])
    return losses


def micro_batches(model, x, y):
    total = torch.zeros(())
    for part, label in zip(x.split(2), y.split(2), strict=True):
        loss = F.cross_entropy(model(part), label) / 3
        loss.backward()
        total += loss.detach()
    return total


def plain(model, x, y):
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    return loss


def halve(model):
    for p in model.parameters():
        p.grad = p.grad * 0.5


def scale(model):
    for p in model.parameters():
        p.grad *= 0.5


def drop(model):
    model.a.bias.grad = None


def delete(model):
    del model.a.bias.grad


def share(model):
    model.norm.bias.grad = model.norm.weight.grad


def clip(model):
    return nn.utils.clip_grad_norm_(model.parameters(), 0.1)


class Descent(torch.optim.Optimizer):
    """An optimizer of a user, without state."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            p.sub_(p.grad * self.param_groups[0]["lr"])


class Momentum(Descent):
    """One that makes its state in its first step; with `rebinds`, it binds a new tensor in each."""

    rebinds = False

    @torch.no_grad()
    def step(self, closure=None):
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            state = self.state[p]
            if "v" not in state:
                state["v"] = torch.zeros_like(p)
            if self.rebinds:
                state["v"] = 0.9 * state["v"] + p.grad
            else:
                state["v"].mul_(0.9).add_(p.grad)
            p.sub_(state["v"] * 0.1)


def of_matrices(params):
    return torch.optim.Muon([p for p in params if p.dim() == 2], 0.01)


OPTIMIZERS = {
    "none": lambda p: None,
    "SGD": lambda p: torch.optim.SGD(p, 0.1),
    "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, 0.01),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 0.01),
    "Muon": of_matrices,
    "own": Descent,
}


def step_of(model, optimizer, differentiate=plain, treat=lambda model: None):
    def step(x, y):
        model.zero_grad()
        out = differentiate(model, x, y)
        also = treat(model)
        if optimizer is not None:
            optimizer.step()
        return out, also

    return step


def with_closure(model, optimizer):
    def step(x, y):
        def closure():
            optimizer.zero_grad()
            return plain(model, x, y)

        return optimizer.step(closure)

    return step


def assert_like_eager(make, optimizer_of):
    """The trace of `make(model, optimizer)` beside the same in eager, in three calls."""
    torch.manual_seed(0)
    model = Net()
    twin = copy.deepcopy(model)
    ours, theirs = optimizer_of(model.parameters()), optimizer_of(twin.parameters())
    step, eager = make(model, ours), make(twin, theirs)
    trace = st.trace(step, batches()[0])
    for args in batches():
        found, expected = (torch.utils._pytree.tree_leaves(run(*args)) for run in (trace, eager))
        assert all(map(equal, found, expected))
        for (name, p), q in zip(model.named_parameters(), twin.named_parameters(), strict=True):
            assert equal(p, q[1]), name
            assert equal(p.grad, q[1].grad), f"{name}.grad"
        if ours is not None:
            torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=0, atol=0)
    return trace


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("treat", [halve, scale, drop, delete, share, clip])
def test_gradients_between_backward_and_step(treat, name):
    assert_like_eager(lambda model, optimizer: step_of(model, optimizer, treat=treat), OPTIMIZERS[name])


@pytest.mark.parametrize("name", ["none", "momentum"])
@pytest.mark.parametrize("way", [of_parameters, by_torch_func, penalty, two_losses, micro_batches])
def test_ways_to_differentiate(way, name):
    assert_like_eager(lambda model, optimizer: step_of(model, optimizer, way), OPTIMIZERS[name])


OF_TORCH = {
    **{name: getattr(torch.optim, name) for name in ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam")},
    **{name: getattr(torch.optim, name) for name in ("RMSprop", "Rprop", "ASGD", "RAdam", "Adafactor")},
    "RMSprop, centered": lambda p, **k: torch.optim.RMSprop(p, momentum=0.9, centered=True, **k),
    "Adam, amsgrad": lambda p, **k: torch.optim.Adam(p, amsgrad=True, **k),
    "NAdam, decoupled": lambda p, **k: torch.optim.NAdam(p, weight_decay=0.1, decoupled_weight_decay=True, **k),
    "SGD, nesterov": lambda p, **k: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, **k),
}


@pytest.mark.sample(9)
@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("steps_before", [0, 1, 7])
@pytest.mark.parametrize("name", OF_TORCH)
def test_optimizers_of_torch_at_the_first_step_and_later(name, steps_before, foreach):
    def make(model, optimizer):
        step = step_of(model, optimizer)
        for _ in range(steps_before):
            step(*batches()[0])
        return step

    assert_like_eager(make, lambda p: OF_TORCH[name](p, foreach=foreach))


class Careful(torch.optim.SGD):
    """One that looks at the gradients."""

    def step(self, closure=None):
        if closure() > 1:
            super().step()


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, Careful])
def test_optimizers_that_branch_on_data_are_refused(kind):
    model = Net()
    step = with_closure(model, kind(model.parameters()))
    with pytest.raises(st.errors.DataDependentError, match=f"(?s){kind.__name__} branches in Python.*step it after"):
        st.trace(step, batches()[0])


def test_an_optimizer_that_branches_on_the_number_of_the_step_is_traced_until_it_goes_the_other_way():
    ours, theirs = Net(), Net()
    theirs.load_state_dict(ours.state_dict())
    eager, trace = step_of(theirs, torch.optim.RAdam(theirs.parameters())), None
    step = step_of(ours, torch.optim.RAdam(ours.parameters()))
    for i in range(12):
        if i in (0, 6):
            trace = st.trace(step, batches()[0])
        if i == 5:
            with pytest.raises(st.errors.InputMismatchError, match=r"the trace is specialized(.*)in step/RAdam[.]step"):
                trace(*batches()[0])
            step(*batches()[0])
        else:
            trace(*batches()[0])
        eager(*batches()[0])
        torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("name", ["SGD", "momentum", "AdamW", "Adagrad"])
def test_a_step_that_gets_a_closure(name):
    trace = assert_like_eager(with_closure, OPTIMIZERS[name])
    kind = type(OPTIMIZERS[name](Net().parameters())).__name__
    phases = {trace.phase_of(node) for node in trace.graph_module.graph.nodes if node.op == "call_function"}
    assert phases == {"forward", "backward", "other"}
    linear = next(node for node in trace.graph_module.graph.nodes if node.target is torch.ops.aten.addmm.default)
    assert trace.scope_of(linear).path == "step/Net[model]/Linear[a]"
    assert any(m.module == f"step/{kind}.step" for m in trace.mutations)


@pytest.mark.parametrize("make", [torch.optim.AdamW, lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), Momentum])
def test_an_optimizer_that_the_step_makes_begins_anew_in_each_call(make):
    def step_that_makes(model, _):
        def step(x, y):
            return step_of(model, make(model.parameters()))(x, y)

        return step

    make(Net().parameters())  # the first of a class changes the class
    assert_like_eager(step_that_makes, OPTIMIZERS["none"])


def test_an_optimizer_of_a_user_keeps_its_state():
    def warm(params):
        params = list(params)
        optimizer = Momentum(params)
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()
        return optimizer

    assert_like_eager(step_of, warm)


class Counting(Descent):
    """One whose steps get smaller by a number of Python, in its state of each parameter, of its own, or shared."""

    def __init__(self, params, place):
        super().__init__(params)
        self.place, self.n = place, 0
        self.state["n"] = 0
        for p in self.param_groups[0]["params"]:
            self.state[p]["n"] = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.n += 1
        self.state["n"] += 1
        for p in self.param_groups[0]["params"]:
            self.state[p]["n"] += 1
            n = {"state": self.state[p]["n"], "self": self.n, "shared": self.state["n"]}[self.place]
            p.sub_(p.grad, alpha=0.1 / n)


class CountingForNobody(Descent):
    def __init__(self, params):
        super().__init__(params)
        self.state["n"] = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.state["n"] += 1
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad, alpha=0.1)


@pytest.mark.parametrize("place", ["state", "shared"])
def test_a_step_that_depends_on_a_count_in_the_state_of_the_optimizer(place):
    assert_like_eager(step_of, lambda params: Counting(params, place))


def test_a_step_that_depends_on_another_count_of_the_optimizer_is_right_for_one_call():
    model = Net()
    trace = st.trace(step_of(model, Counting(model.parameters(), "self")), batches()[0])
    trace(*batches()[0])
    with pytest.raises(st.errors.SideEffectError, match=r"right for one call only.*n.* was 0 and became 1"):
        trace(*batches()[1])


def test_a_count_of_the_optimizer_on_which_no_step_depends():
    torch.manual_seed(0)
    model = Net()
    twin = copy.deepcopy(model)
    trace = st.trace(step_of(model, CountingForNobody(model.parameters())), batches()[0])
    eager = step_of(twin, CountingForNobody(twin.parameters()))
    for args in batches():
        assert equal(trace(*args)[0], eager(*args)[0])
    assert all(map(equal, model.parameters(), twin.parameters()))


def test_gradients_that_are_set_to_zero_are_there_before():
    def make(model, optimizer):
        def step(x, y):
            optimizer.zero_grad(set_to_none=False)
            loss = plain(model, x, y)
            optimizer.step()
            return loss

        step(*batches()[0])
        return step

    assert_like_eager(make, OPTIMIZERS["momentum"])


def test_state_that_a_step_binds_is_refused():
    model = Net()
    optimizer = Momentum(model.parameters())
    step = step_of(model, optimizer)
    step(*batches()[0])
    optimizer.rebinds = True
    match = r"(?s)Momentum puts other tensors in its state.*write them in place"
    with pytest.raises(st.errors.UnsupportedOpError, match=match):
        st.trace(step, batches()[0])


def test_derivatives_by_a_batch_of_gradients_are_refused():
    model = Net()

    def rows(x, y):
        return torch.autograd.grad(model(x).sum(0), [model.a.weight], torch.eye(3), is_grads_batched=True)

    with pytest.raises(st.errors.UnsupportedOpError, match=r"(?s)a batch of gradients at once.*torch\.func\.vmap"):
        st.trace(rows, batches()[0])


def test_forward_mode_with_a_dynamic_size():
    linear = nn.Linear(4, 3)

    def tangent(x):
        return torch.func.jvp(linear, (x,), (torch.ones_like(x),))

    trace = st.trace(tangent, (torch.randn(5, 4),), dynamic_shapes={"x": {0: torch.export.Dim("batch")}})
    for x in (torch.randn(5, 4), torch.randn(2, 4)):
        torch.testing.assert_close(trace(x), tangent(x))


def test_an_optimizer_that_only_clears_the_gradients_of_parameters_that_the_model_no_longer_has():
    model, given = Net(), batches()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x, y):
        optimizer.zero_grad()
        plain(model, x, y)

    tr = st.trace(step, given[0])
    tr(*given[0])
    model.load_state_dict(model.state_dict(), assign=True)
    with pytest.raises(st.errors.StateMismatchError, match="SGD has the parameters of the model"):
        tr(*given[1])


def by_rows(model, x):
    return torch.vmap(lambda w, b: (x @ w + b).tanh().sum())(model.a.weight, model.a.bias)


def by_columns(model, x):
    return torch.vmap(lambda w: (w * model.a.bias).sum(), in_dims=1)(model.a.weight)


def jacobian(model, x):
    return torch.func.jacrev(lambda w: F.linear(x, w).tanh().mean(0))(model.a.weight)


def tangent(model, x):
    return torch.func.jvp(lambda w: F.linear(x, w).tanh(), (model.a.weight,), (torch.ones(8, 4),))[1]


def gradient_of_gradient(model, x):
    def inner(b):
        return torch.func.grad(lambda b: F.linear(x, model.a.weight, b).tanh().sum())(b).square().sum()

    return torch.func.grad(inner)(model.a.bias)


def of_a_frozen_one(model, x):
    model.a.weight.requires_grad_(False)
    out = by_rows(model, x)
    model.a.weight.requires_grad_(True)
    return out


@pytest.mark.parametrize("transformed", [by_rows, by_columns, jacobian, tangent, gradient_of_gradient, of_a_frozen_one])
def test_transforms_take_parameters_as_arguments(transformed):
    def differentiate(model, x, y):
        loss = plain(model, x, y)
        part = transformed(model, x)
        part.square().mean().backward()
        return loss, part.detach()

    assert_like_eager(lambda model, optimizer: step_of(model, optimizer, differentiate), OPTIMIZERS["momentum"])


def test_an_ensemble_by_vmap_of_functional_call():
    def made():
        torch.manual_seed(0)
        models = [nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 3)) for _ in range(3)]
        params, buffers = torch.func.stack_module_state(models)
        optimizer = torch.optim.Adam(params.values())
        base = copy.deepcopy(models[0]).to("meta")

        def step(x, y):
            def run(params, buffers):
                return torch.func.functional_call(base, (params, buffers), (x,))

            optimizer.zero_grad()
            outputs = torch.vmap(run, randomness="different")(params, buffers)
            loss = F.cross_entropy(outputs.flatten(0, 1), y.repeat(3))
            loss.backward()
            optimizer.step()
            return loss

        return step, {**params, **buffers}

    (ours, state), (theirs, expected) = made(), made()
    trace = st.trace(ours, batches()[0])
    for i, args in enumerate(batches()):
        torch.manual_seed(i)
        found = trace(*args)
        torch.manual_seed(i)
        assert equal(found, theirs(*args))
        for name, t in state.items():
            assert equal(t, expected[name]), name
            assert equal(t.grad, expected[name].grad), f"{name}.grad"
