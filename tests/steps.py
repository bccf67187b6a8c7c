"""Training steps of small models, run as a trace beside eager."""

import copy

import torch

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
    for i, args in enumerate(given):
        torch.manual_seed(i)
        found = trace(*args)
        torch.manual_seed(i)
        assert equal(found, eager(*args))
        for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
            assert equal(p, q), name
            assert equal(p.grad, q.grad), f"{name}.grad"
        assert all(map(equal, model.buffers(), twin.buffers()))
    return trace


def step_of(model):
    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        return loss

    return step


def step_with(model, optimizer):
    """A function that trains a model, or what is called in its place, by one step on the sum of its result."""

    def step(x):
        loss = model(x).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step
