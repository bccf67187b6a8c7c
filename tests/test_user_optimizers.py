"""Optimizers that users write, which make their state in their first step, each beside eager from there on."""

import math

import pytest
import torch

import scopetrace as st
from tests.steps import Net, batches, run_beside_eager
from tests.test_step_programs import assert_like_eager, step_of, with_closure


def lion(p, grad, state, lr):
    if len(state) == 0:
        state["exp_avg"] = torch.zeros_like(p)
    p.mul_(1 - lr * 0.1).add_((state["exp_avg"] * 0.9 + grad * 0.1).sign_(), alpha=-lr)
    state["exp_avg"].lerp_(grad, 0.01)


def muon(p, grad, state, lr):
    if "m" not in state:
        state["m"] = torch.zeros_like(grad)
    x = grad.add(state["m"].mul_(0.95).add_(grad), alpha=0.95)
    if x.dim() == 2:
        x = x / (x.norm() + 1e-7)
        for _ in range(3):
            square = x @ x.T
            x = 3.4445 * x + (-4.775 * square + 2.0315 * square @ square) @ x
    p.add_(x, alpha=-lr)


def momentum(p, grad, state, lr):
    p.add_(state.setdefault("v", torch.zeros(p.shape)).mul_(0.9).add_(grad), alpha=-lr)


def momentum_from_the_gradient(p, grad, state, lr):
    if "v" in state:
        state["v"].mul_(0.9).add_(grad)
    else:
        state["v"] = grad.clone().detach()
    p.add_(state["v"], alpha=-lr)


def adam(p, m, v, n, lr):
    p.addcdiv_(m / (1 - 0.9**n), (v / (1 - 0.99**n)) ** 0.5 + 1e-8, value=-lr)


def adam_that_counts_in_python(p, grad, state, lr):
    if not state:
        state.update(step=0, m=torch.zeros_like(p), v=torch.zeros_like(p))
    state["step"] += 1
    adam(p, state["m"].lerp_(grad, 0.1), state["v"].lerp_(grad**2, 0.01), state["step"], lr)


def adam_that_gets_its_count(p, grad, state, lr):
    m, v = (state.setdefault(name, torch.zeros_like(p)) for name in "mv")
    state["step"] = state.get("step", 0) + 1
    adam(p, m.lerp_(grad, 0.1), v.lerp_(grad**2, 0.01), state["step"], lr)


def adam_that_counts_in_tensors(p, grad, state, lr):
    if not state:
        state |= {"step": torch.tensor(0.0), "m": torch.zeros_like(p), "v": torch.zeros_like(p)}
    state["step"] += 1
    p.sub_(lr * state["m"].lerp_(grad, 0.1) / (1 - 0.9 ** state["step"]))


def adam_that_reads_its_tensor(p, grad, state, lr):
    if not state:
        state |= {"step": torch.tensor(0.0), "m": torch.zeros_like(p), "v": torch.zeros_like(p)}
    state["step"] += 1
    adam(p, state["m"].lerp_(grad, 0.1), state["v"].lerp_(grad**2, 0.01), state["step"].item(), lr)


def with_constants(p, grad, state, lr):
    if not state:
        state |= {"m": torch.full_like(p, 0.5), "rank": 3, "on": True, "mask": None}
    p.sub_(state["m"].add_(grad) * state["rank"], alpha=lr)


RULES = (
    *(lion, muon, momentum, momentum_from_the_gradient, with_constants),
    *(adam_that_counts_in_python, adam_that_gets_its_count, adam_that_counts_in_tensors, adam_that_reads_its_tensor),
)


class Optimizer(torch.optim.Optimizer):
    def __init__(self, params, rule):
        super().__init__(params, {"lr": 0.01})
        self.rule = rule

    @torch.no_grad()
    def step(self, closure=None):
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                self.rule(p, p.grad, self.state[p], group["lr"])
        return loss if closure is not None else None


def in_groups(params):
    params = [*params]
    return [{"params": params[:2], "lr": 0.05}, {"params": params[2:]}]


@pytest.mark.sample(2)
@pytest.mark.parametrize("steps_before", [0, 1, 3])
@pytest.mark.parametrize("rule", RULES)
def test_from_the_first_step_on_and_later(rule, steps_before):
    def make(model, optimizer):
        step = step_of(model, optimizer)
        for _ in range(steps_before):
            step(*batches()[0])
        return step

    assert_like_eager(make, lambda params: Optimizer(in_groups(params), rule))


@pytest.mark.parametrize("rule", [lion, adam_that_counts_in_python])
def test_a_closure_a_schedule_and_a_file(rule, tmp_path):
    assert_like_eager(with_closure, lambda params: Optimizer(params, rule))
    models = [Net(), Net()]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [Optimizer(model.parameters(), rule) for model in models]
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) for optimizer in optimizers]
    trace, eager = st.trace(step_of(models[0], optimizers[0]), batches()[0]), step_of(models[1], optimizers[1])
    for args in batches():
        assert torch.equal(trace(*args)[0], eager(*args)[0])
        for scheduler in schedulers:
            scheduler.step()
    trace.check(batches()[0])
    torch.testing.assert_close(optimizers[0].state_dict(), optimizers[1].state_dict(), rtol=0, atol=0)
    trace(*batches()[0])
    trace.save(tmp_path / "step.st")
    loaded = st.load(tmp_path / "step.st")
    assert all(torch.equal(trace(*args)[0], loaded(*args)[0]) for args in batches())


@pytest.mark.parametrize("rule", [adam_that_counts_in_python, momentum_from_the_gradient])
def test_a_recurrent_model(rule):
    """Its op gives what backward reads only where autograd records it."""

    def make(model):
        optimizer = Optimizer(model.parameters(), rule)

        def step(x):
            optimizer.zero_grad()
            loss = model(x)[0].square().mean()
            loss.backward()
            optimizer.step()
            return loss

        return step

    run_beside_eager(make, torch.nn.GRU(4, 3), [(torch.randn(5, 2, 4),) for _ in range(3)])


def slow_weights(p, grad, state, lr):
    if not state:
        state["slow"] = p.clone()
    p.sub_(grad, alpha=lr)
    state["slow"].lerp_(p, 0.5)


def dampened(p, grad, state, lr):
    if "v" in state:
        state["v"].mul_(0.9).add_(grad, alpha=0.5)
    else:
        state["v"] = grad.clone()
    p.add_(state["v"], alpha=-lr)


def of_the_first_gradient(p, grad, state, lr):
    state.setdefault("first", grad.clone())
    p.sub_(grad, alpha=lr)


def one_memory(p, grad, state, lr):
    if not state:
        state["a"] = torch.zeros_like(p)
        state["b"] = state["a"].view(-1)
    p.sub_(state["a"].add_(grad), alpha=lr)
    state["b"].mul_(0.5)


def parameter(p, grad, state, lr):
    state.setdefault("p", p)
    state["p"].sub_(grad, alpha=lr)


def grows(p, grad, state, lr):
    state[len(state)] = torch.zeros_like(p)
    p.sub_(grad, alpha=lr * len(state))


@pytest.mark.parametrize("rule", [slow_weights, dampened, of_the_first_gradient, one_memory, parameter, grows])
def test_a_first_step_that_is_not_like_the_next_ones_is_refused_and_leaves_nothing(rule):
    model = Net()
    optimizer = Optimizer(model.parameters(), rule)
    match = r"(?s)Optimizer makes its state in its first step.*run optimizer.step\(\) once before the trace"
    with pytest.raises(st.errors.UnsupportedOpError, match=match):
        st.trace(step_of(model, optimizer), batches()[0])
    assert not optimizer.state


def every_other(p, grad, state, lr):
    state["n"] = state.get("n", 0) + 1
    p.sub_(grad, alpha=lr * (state["n"] % 2 == 0))


def by_math(p, grad, state, lr):
    state["n"] = state.get("n", 0) + 1
    p.sub_(grad, alpha=lr / math.sqrt(state["n"]))


@pytest.mark.parametrize("rule", [every_other, by_math])
def test_what_python_asks_of_a_count_is_part_of_the_trace(rule):
    model = Net()
    trace = st.trace(step_of(model, Optimizer(model.parameters(), rule)), batches()[0])
    trace(*batches()[0])
    with pytest.raises(st.StateMismatchError, match=r"Optimizer\.state\['model\.a\.weight'\]\['n'\].*x \*\* 0\.5"):
        trace(*batches()[0])


def test_a_count_of_another_class_is_refused():
    def halves(p, grad, state, lr):
        state["n"] = state.get("n", 0) / 2
        p.sub_(grad, alpha=lr)

    model = Net()
    optimizer = Optimizer(model.parameters(), halves)
    for p in model.parameters():
        optimizer.state[p]["n"] = 4
    with pytest.raises(
        st.errors.UnsupportedOpError, match=r"(?s)of another class in the place of .*keep it of class int"
    ):
        st.trace(step_of(model, optimizer), batches()[0])
