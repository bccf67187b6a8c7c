"""Training steps: `backward()`, gradients that accumulate, optimizers. A trace does what eager does, several times."""

import copy

import pytest
import torch
import torch.nn.functional as F

import scopetrace as st


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.norm, self.b = torch.nn.Linear(4, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 3)

    def forward(self, x):
        return self.b(self.norm(self.a(x)).relu())


def batches(count=3):
    torch.manual_seed(1)
    return [(torch.randn(5, 4), torch.randint(0, 3, (5,))) for _ in range(count)]


def equal(a, b):
    return (a is None) == (b is None) and (a is None or (torch.equal(a, b) and a.stride() == b.stride()))


def run_beside_eager(make, model=None, given=None, equal=equal):
    """`make(model)` is a step. Its trace is called several times, beside the same of a copy in eager."""
    model = Net() if model is None else model
    twin, given = copy.deepcopy(model), batches() if given is None else given
    step, eager = make(model), make(twin)
    trace = st.trace(step, given[0])
    for args in given:
        assert equal(trace(*args), eager(*args))
        for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
            assert equal(p, q), name
            assert equal(p.grad, q.grad), f"{name}.grad"
        assert all(map(equal, model.buffers(), twin.buffers()))
    return trace


def test_gradients_accumulate_whatever_was_there():
    def make(model):
        def step(x, y):
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        return step

    trace = run_beside_eager(make)
    assert "gradient model.b.bias.grad: sum by aten.view.default in step" in str(trace.mutations[-1])
    trace.lint()


def test_several_backwards_and_what_is_read_in_between():
    def make(model):
        def step(x, y):
            model.zero_grad()
            for part in (x[:2], x[2:]):
                (model(part).square().mean() / 2).backward()
            with torch.no_grad():
                model.a.weight.grad *= 2
            return torch.stack([p.grad.norm() for p in model.parameters()])

        return step

    run_beside_eager(make)


def test_a_gradient_that_was_there_is_read():
    def make(model):
        model.a.weight.grad = torch.ones_like(model.a.weight)

        def step(x, y):
            model(x).sum().backward(inputs=[model.a.weight])
            return model.a.weight.grad.sum()

        return step

    trace = run_beside_eager(make)
    trace.model.__closure__[0].cell_contents.zero_grad()
    with pytest.raises(st.errors.StateMismatchError, match=r"model.a.weight.grad is not None.*: True when traced"):
        trace(*batches()[0])


def test_the_gradient_of_an_input():
    model = Net().requires_grad_(False)

    def attack(x, y):
        x.grad = None
        F.cross_entropy(model(x), y).backward()
        return x + x.grad.sign()

    (x, y), *_ = batches()
    x.requires_grad_()
    trace, other = st.trace(attack, (x, y)), x.detach().clone().requires_grad_()
    assert torch.equal(trace(x, y), attack(other, y))
    assert equal(x.grad, other.grad)


def test_gradients_in_memory_of_their_own():
    """Both gradients are one tensor; that of `c` is the input itself."""

    class Sum(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = (torch.nn.Parameter(torch.ones(3)) for _ in range(3))

        def forward(self, x):
            (self.a + self.b).sum().backward()
            self.c.backward(x)
            self.a.grad.mul_(2)
            return self.c.grad

    model, twin = Sum(), Sum()
    trace, x = st.trace(model, (torch.ones(3),)), torch.randn(3)
    for net, run in ((model, trace), (twin, twin)):
        net.zero_grad()
        assert torch.equal(run(x), x)
    assert all(equal(p.grad, q.grad) for p, q in zip(model.parameters(), twin.parameters(), strict=True))
    assert len({p.grad.untyped_storage().data_ptr() for p in (*model.parameters(),)} | {x.data_ptr()}) == 4


def clamp(p):
    p.grad.clamp_(-0.01, 0.01)


def test_hooks_run_as_part_of_the_program():
    def make(model):
        model.a.weight.register_hook(lambda g: g * 3)
        model.b.weight.register_post_accumulate_grad_hook(clamp)

        def step(x, y):
            model.zero_grad()
            model(x).square().sum().backward()

        return step

    run_beside_eager(make)


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1),
    "SGD with momentum and all else": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.1, nesterov=True),
    "SGD, foreach": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, foreach=True),
    "Adam": lambda p: torch.optim.Adam(p, 0.01, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, 0.01),
    "AdamW, foreach": lambda p: torch.optim.AdamW(p, 0.01, foreach=True),
    "AdamW, a tensor as learning rate": lambda p: torch.optim.AdamW(p, torch.tensor(0.01)),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 0.01, momentum=0.9, centered=True),
}


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name, first):
    def make(model):
        optimizer = OPTIMIZERS[name](model.parameters())

        def step(x, y):
            if first:
                optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            if not first:
                optimizer.zero_grad()
            return loss

        return step

    trace = run_beside_eager(make)
    assert any(f"{type(OPTIMIZERS[name](Net().parameters())).__name__}.step" in m.module for m in trace.mutations)


class Trainer:
    def __init__(self, model):
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def step(self, x, y):
        loss = F.cross_entropy(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss


def test_the_step_of_an_object():
    trace = run_beside_eager(lambda model: Trainer(model).step)
    assert "model.a.weight_exp_avg" in [m.name for m in trace.mutations]
    assert trace.call("model.a").module_type is torch.nn.Linear


def test_settings_and_state_of_an_optimizer_are_compared_at_a_call():
    trainer, args = Trainer(Net()), batches(1)[0]
    trace = st.trace(trainer.step, args)
    trace(*args)
    trainer.optimizer.param_groups[0]["lr"] = 1.0
    with pytest.raises(st.errors.StateMismatchError, match=r"AdamW\.param_groups"):
        trace(*args)
    trainer.optimizer.param_groups[0]["lr"] = 0.01
    trainer.optimizer.load_state_dict(copy.deepcopy(trainer.optimizer.state_dict()))
    with pytest.raises(st.errors.StateMismatchError, match="the parameters and state of AdamW"):
        trace(*args)


def test_a_trace_leaves_gradients_parameters_and_optimizer_as_they_are():
    trainer, args = Trainer(Net()), batches(1)[0]
    before = copy.deepcopy(trainer.model.state_dict())
    st.trace(trainer.step, args)
    assert all(p.grad is None for p in trainer.model.parameters())
    assert all(torch.equal(t, before[name]) for name, t in trainer.model.state_dict().items())
    for state in trainer.optimizer.state.values():
        assert not any(x.any() for x in state.values())


def test_training_mode_changes_buffers_and_draws():
    def make(model):
        def step(x, y):
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        def seeded(*args):
            return step(*args)

        return seeded

    model = torch.nn.Sequential(torch.nn.Conv1d(4, 8, 1), torch.nn.BatchNorm1d(8), torch.nn.Flatten())
    run_beside_eager(make, model, [(torch.randn(5, 4, 2), torch.randint(0, 16, (5,))) for _ in range(3)])


def test_a_file_of_a_step(tmp_path):
    model, args = Net(), batches(1)[0]

    def step(x, y):
        F.cross_entropy(model(x), y).backward()

    trace = st.trace(step, args)
    trace.save(tmp_path / "step.st")
    loaded = st.load(tmp_path / "step.st")
    loaded(*args)
    trace(*args)
    held = dict(loaded.graph_module.named_parameters())
    assert all(torch.equal(held[f"model.{name}"].grad, p.grad) for name, p in model.named_parameters())


REFUSED = {
    "an export": (lambda trace, args: trace.to_exported_program(), st.errors.ExportError, "to gradients"),
    "torch.compile": (
        lambda trace, args: torch.compile(trace, fullgraph=True, backend="eager")(*args),
        Exception,
        "it changes gradients",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_hold_gradients_refuses_them(case):
    use, error, text = REFUSED[case]
    model, args = Net(), batches(1)[0]
    trace = st.trace(lambda x, y: F.cross_entropy(model(x), y).backward(), args)
    with pytest.raises(error, match=text):
        use(trace, args)


def test_backward_beyond_an_input_is_refused():
    x = torch.randn(5, 4, requires_grad=True) * 2
    with pytest.raises(st.errors.UnsupportedOpError, match="beyond an input"):
        st.trace(lambda x: x.sum().backward(), (x,))


def test_an_optimizer_whose_first_step_is_another_is_refused():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, dampening=0.5)

    def step(x, y):
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    with pytest.raises(st.errors.UnsupportedOpError, match="SGD has no state yet"):
        st.trace(step, batches(1)[0])
