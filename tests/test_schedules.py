"""Numbers of optimizers that change between the calls of a traced step: learning rates, momentum, weight decay."""

import copy
import functools
import math

import numpy as np
import pytest
import torch
from torch import nn, optim
from torch.optim import lr_scheduler as schedules

import scopetrace as st


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))


def step_of(model, optimizer):
    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def by_hand(key, *values):
    """Sets a number of each group, as training loops do."""

    def schedule(optimizer):
        rest = list(values)

        def advance():
            new = rest.pop(0)
            for group in optimizer.param_groups:
                group[key] = new

        return advance

    return schedule


def same(a, b):
    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def beside_eager(optimizer_of, schedule, make=step_of, between=lambda tr: tr, same=same):
    """Four steps, with the schedule between them. `between` makes of the trace what is called."""
    models = [net(), net()]
    optimizers = [optimizer_of(m) for m in models]
    advance = [schedule(o) for o in optimizers]
    steps = [make(m, o) for m, o in zip(models, optimizers, strict=True)]
    torch.manual_seed(1)
    batches = [torch.randn(5, 4) for _ in range(4)]
    tr = st.trace(steps[0], (batches[0],))
    run = between(tr)
    for x in batches:
        same(run(x), steps[1](x))
        same(models[0].state_dict(), models[1].state_dict())
        same(optimizers[0].state_dict(), optimizers[1].state_dict())
        for each in advance:
            each()


def two_groups(kind, **options):
    return lambda m: kind([{"params": m[0].parameters(), "lr": 0.1}, {"params": m[2].parameters()}], lr=0.05, **options)


SGD = two_groups(optim.SGD, momentum=0.9, weight_decay=0.01)
ADAMW = two_groups(optim.AdamW)
OPTIMIZERS = {
    "SGD": two_groups(optim.SGD),
    "SGD, momentum": SGD,
    "SGD, nesterov, foreach": two_groups(optim.SGD, momentum=0.9, nesterov=True, foreach=True),
    "SGD, fused": two_groups(optim.SGD, momentum=0.9, fused=True),
    "AdamW": ADAMW,
    "AdamW, foreach, amsgrad": two_groups(optim.AdamW, foreach=True, amsgrad=True),
    "Adam, fused": two_groups(optim.Adam, fused=True, weight_decay=0.1),
    "RMSprop": two_groups(optim.RMSprop, momentum=0.9, centered=True),
    "Adagrad": two_groups(optim.Adagrad),
    "Adadelta": two_groups(optim.Adadelta),
    "Adamax": two_groups(optim.Adamax),
    "NAdam": two_groups(optim.NAdam),
}
STEP = lambda o: schedules.StepLR(o, 1, 0.5).step  # noqa: E731


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_learning_rate_that_is_a_number_is_read_in_each_call(name):
    beside_eager(OPTIMIZERS[name], STEP)


SCHEDULES = {
    "OneCycleLR": lambda o: schedules.OneCycleLR(o, max_lr=0.1, total_steps=6).step,
    "CyclicLR": lambda o: schedules.CyclicLR(o, 0.01, 0.1, step_size_up=2).step,
    "CosineAnnealingLR": lambda o: schedules.CosineAnnealingLR(o, 4).step,
    "warmup from zero": lambda o: schedules.LambdaLR(o, lambda step: step / 4).step,
    "ReduceLROnPlateau": lambda o: functools.partial(schedules.ReduceLROnPlateau(o, patience=0).step, 1.0),
    "by hand": by_hand("lr", 0.2, 0.3, 1, 0.1),
    "by NumPy": by_hand("lr", *np.interp([1, 2, 3, 4], [0, 4], [0.1, 0.2])),
    "weight decay by hand": by_hand("weight_decay", 0.2, 0.3, 0.4, 0.1),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("kind", [SGD, ADAMW])
def test_schedules(kind, name):
    beside_eager(kind, SCHEDULES[name])


def test_a_momentum_that_is_set_by_hand():
    beside_eager(SGD, by_hand("momentum", 0.8, 0.7, 0.6, 0.5))


def by_hand_step(model, optimizer):
    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        with torch.no_grad():
            for group in optimizer.param_groups:
                for p in group["params"]:
                    p.add_(p.grad, alpha=-group["lr"])
        return loss.detach()

    return step


def decays_before(model, optimizer):
    def step(x):
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1 - optimizer.param_groups[0]["lr"] * 0.1)
        return step_of(model, optimizer)(x)

    return step


def gives_the_rate(model, optimizer):
    def step(x):
        return step_of(model, optimizer)(x), optimizer.param_groups[0]["lr"]

    return step


def with_a_closure(model, optimizer):
    def step(x):
        def closure():
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        return optimizer.step(closure).detach()

    return step


def scaled(model, optimizer):
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)

    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    return step


def in_a_list(model, optimizer):
    optimizers = {"all": [optimizer]}

    def step(x):
        for each in optimizers["all"]:
            each.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        for each in optimizers["all"]:
            each.step()
        return loss.detach()

    return step


def keeps_a_history(model, optimizer):
    history = []

    def step(x):
        history.append(optimizer.param_groups[0]["lr"])
        return step_of(model, optimizer)(x)

    return step


def shows_it(model, optimizer):
    def step(x):
        print(f"{optimizer.param_groups[0]['lr']:.3f}")
        return step_of(model, optimizer)(x)

    return step


STEPS = [by_hand_step, decays_before, gives_the_rate, with_a_closure, scaled, in_a_list, keeps_a_history, shows_it]


@pytest.mark.parametrize("make", STEPS)
def test_steps_that_read_the_rate_in_other_ways(make):
    beside_eager(SGD, STEP, make)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "between", [lambda tr: tr.decompose(), lambda tr: tr.outline("Linear"), lambda tr: tr.compile("eager")]
)
@pytest.mark.parametrize("kind", [SGD, ADAMW])
def test_what_is_made_of_a_trace_reads_it_too(kind, between):
    beside_eager(kind, SCHEDULES["OneCycleLR"], between=between, same=torch.testing.assert_close)


def test_an_optimizer_that_is_an_argument():
    models = [net(), net()]
    optimizers = [SGD(m) for m in models]

    def step(model, optimizer, x):
        return step_of(model, optimizer)(x)

    x = torch.randn(5, 4)
    tr = st.trace(step, (models[0], optimizers[0], x))
    for _ in range(3):
        same(tr(models[0], optimizers[0], x), step(models[1], optimizers[1], x))
        for optimizer in optimizers:
            optimizer.param_groups[1]["lr"] *= 0.5


def test_functional_false():
    models = [net(), net()]
    steps = [step_of(m, SGD(m)) for m in models]
    optimizers = [step.__closure__[1].cell_contents for step in steps]
    tr, x = st.trace(steps[0], (torch.ones(5, 4),), functional=False), torch.randn(5, 4)
    for _ in range(3):
        same(tr(x), steps[1](x))
        same(models[0].state_dict(), models[1].state_dict())
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] *= 0.5


def branches_on_it(model, optimizer):
    def step(x):
        if optimizer.param_groups[0]["lr"] > 0.04:
            x = x * 2
        return step_of(model, optimizer)(x)

    return step


def takes_its_root(model, optimizer):
    def step(x):
        return step_of(model, optimizer)(x * math.sqrt(optimizer.param_groups[0]["lr"]))

    return step


REFUSED = {
    "a branch": (branches_on_it, STEP, r"SGD.param_groups\[0\]\['lr'\] > 0.04, .*True when traced and False now"),
    "math": (takes_its_root, STEP, r"SGD.param_groups\[0\]\['lr'\], .*0.1 when traced and 0.05 now"),
    "no momentum": (step_of, by_hand("momentum", 0.0, 0.0), r"\['momentum'\] != 0.*True when traced and False now"),
    "a tensor": (step_of, by_hand("lr", torch.tensor(0.1)), r"\['lr'\]: 'a number' when traced and 'Tensor' now"),
    "another setting": (step_of, by_hand("nesterov", True), r"\['nesterov'\].*False when traced and True now"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_python_asks_of_such_a_number_is_fixed(case):
    make, schedule, words = REFUSED[case]
    with pytest.raises(st.StateMismatchError, match=words):
        beside_eager(SGD, schedule, make)


@pytest.mark.parametrize("reads", [lambda s: s.get_last_lr()[0], lambda s: s.last_epoch])
def test_what_a_scheduler_says_is_fixed(reads):
    """The program has the rate of the optimizer."""
    model = net()
    optimizer = SGD(model)
    scheduler = schedules.StepLR(optimizer, 1, 0.5)

    def step(x):
        return step_of(model, optimizer)(x), reads(scheduler)

    tr, x = st.trace(step, (torch.ones(5, 4),)), torch.randn(5, 4)
    tr(x)
    scheduler.step()
    with pytest.raises(st.StateMismatchError, match=r"scheduler\.\w+.*when traced and .* now"):
        tr(x)


def test_a_branch_that_goes_the_same_way_is_no_other_program():
    beside_eager(SGD, by_hand("lr", 0.09, 0.05, 0.3, 0.2), branches_on_it)


def test_what_a_file_has_is_the_rate_of_the_last_call(tmp_path):
    """It has no optimizer: the rate is a tensor of it."""
    model = net()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    tr = st.trace(step_of(model, optimizer), (torch.ones(5, 4),))
    tr.save(tmp_path / "step")
    loaded, x = st.load(tmp_path / "step"), torch.randn(5, 4)
    same(loaded(x), tr(x))
    same(loaded(x), tr(x))
    optimizer.param_groups[0]["lr"] = 0.5
    tr(x)
    assert loaded.graph_module.SGD_lr == 0.1
    assert tr.graph_module.SGD_lr == 0.5


def test_a_trace_and_a_check_leave_the_optimizer_as_it_is():
    model = net()
    optimizer = SGD(model)
    before = copy.deepcopy(optimizer.state_dict()["param_groups"])
    tr = st.trace(step_of(model, optimizer), (torch.ones(5, 4),))
    optimizer.param_groups[0]["lr"] = before[0]["lr"] = 0.3
    tr.check(torch.randn(5, 4))
    assert optimizer.state_dict()["param_groups"] == before
    assert all(type(group["lr"]) is float for group in optimizer.param_groups)


def test_a_forward_that_steps_no_optimizer_has_no_rate():
    class Holds(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net()
            self.optimizer = SGD(self.net)

        def forward(self, x):
            return self.net(x)

    tr = st.trace(Holds(), (torch.ones(5, 4),))
    assert "lr" not in str(tr)
