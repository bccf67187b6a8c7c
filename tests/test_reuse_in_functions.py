"""Layers that repeat in a model around which a function is traced, such as a training step.

a function, and a model in its closure or among its globals -> traced with copied layers and without -> the same tape,
the same gradients as in eager; where code inside of a layer finds the model without being given it, nothing is copied
"""

import functools
import types

import pytest
import reuse_programs
import torch
import torch.nn.functional as F
from torch import nn

import scopetrace as st
from scopetrace.api.runnable import program_of


class Layer(nn.Module):
    """A layer that calls what it is given."""

    def __init__(self, drop=0.0):
        super().__init__()
        self.fc, self.norm, self.drop = nn.Linear(4, 4), nn.LayerNorm(4), nn.Dropout(drop)

    def forward(self, x, use=None):
        """Run it."""
        y = self.drop(self.fc(self.norm(x)).relu())
        return x + (y if use is None else use(y))


class Net(nn.Module):
    """Three equal layers."""

    def __init__(self, drop=0.0):
        super().__init__()
        self.layers = nn.ModuleList(Layer(drop) for _ in range(3))

    def forward(self, x, use=None):
        """Run it."""
        for layer in self.layers:
            x = layer(x, use)
        return x


def counts(trace):
    """How many calls of layers were recorded, and how many copied."""
    return trace.reuse.traced.get("Layer", 0), trace.reuse.replayed.get("Layer", 0)


def compared(fn, *args):
    """A trace with reuse, of which it is checked that it is the trace without."""
    plain, repeated = (st.trace(fn, args, reuse=reuse) for reuse in (False, True))
    assert not reuse_programs.differences(*(program_of(t).tape for t in (plain, repeated)))
    assert str(plain) == str(repeated)
    for a, b in zip(plain.calls, repeated.calls, strict=True):
        assert [n.name for n in a.backward_nodes] == [n.name for n in b.backward_nodes]
        assert [s.node.name for s in a.saved] == [s.node.name for s in b.saved]
    return repeated


def gradients(model, run, *args):
    """What `run` gives, and the gradients that it leaves."""
    model.zero_grad()
    torch.manual_seed(0)
    out = run(*args)
    return [out, *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("drop", [0.0, 0.5])
@pytest.mark.parametrize("batches", [1, 3])
def test_a_training_step(drop, batches):
    model, x = Net(drop), torch.randn(6, 4)

    def step(x):
        for i in range(batches):
            loss = F.mse_loss(model(x + i), torch.zeros_like(x))
            loss.backward()
        return loss

    trace = compared(step, x)
    assert trace.reuse.traced["Layer"] == 2  # the first takes what does not require grad
    assert trace.reuse.replayed.get("Net", 0) == max(batches - 2, 0)  # compared from the second call on
    for a, b in zip(gradients(model, step, x), gradients(model, trace, x), strict=True):
        torch.testing.assert_close(a, b)


def test_a_step_with_an_optimizer_and_clipping():
    model, x = Net(), torch.randn(2, 4)
    optimizer = torch.optim.AdamW(model.parameters())

    def step(x):
        optimizer.zero_grad()
        model(x).sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    step(x)  # which makes the state of the optimizer
    assert counts(compared(step, x)) == (2, 1)


class Trainer:
    """An object with a model and a method that is traced."""

    def __init__(self, model):
        self.model, self.scale = model, 2.0

    def step(self, x):
        """Run it."""
        return self.model(x) * self.scale


model_of_globals = Net()


def use_globals(x):
    """A function that finds the model by a global."""
    return model_of_globals(x) + 1


WAYS = {
    "closure": lambda model: lambda x: model(x),
    "partial": lambda model: functools.partial(lambda m, x: m(x), model),
    "method": lambda model: Trainer(model).step,
    "global": lambda model: use_globals,
    "twice": lambda model: lambda x: model(model(x)),
    "layers": lambda model: lambda x: functools.reduce(lambda y, layer: layer(y), model.layers, x),
}


@pytest.mark.parametrize("way", WAYS)
def test_ways_to_reach_a_model(way):
    trace = compared(WAYS[way](Net()), torch.randn(2, 4, requires_grad=True))
    assert counts(trace) == (2, 4 if way == "twice" else 1)  # the first takes a tensor that no op made


def first_weight(x):
    """A function that layers are given, which finds the first of them."""
    return x * model_of_globals.layers[0].norm.weight


class FirstWeight:
    """The same as an object."""

    def __call__(self, x):
        """Run it."""
        return first_weight(x)


a_first_weight = FirstWeight()
holder = types.SimpleNamespace(model=model_of_globals)

FOUND = {
    "a function": lambda x: model_of_globals(x, first_weight),
    "an object": lambda x: model_of_globals(x, a_first_weight),
    "a new object": lambda x: model_of_globals(x, FirstWeight()),
    "a lambda": lambda x: model_of_globals(x, lambda y: y * holder.model.layers[0].norm.weight),
    "a method": lambda x: model_of_globals(x, a_first_weight.__call__),
    "a partial": lambda x: model_of_globals(x, functools.partial(torch.mul, model_of_globals.layers[0].norm.weight)),
    "a module": lambda x: model_of_globals(x, model_of_globals.layers[0].norm),
}


@pytest.mark.parametrize("way", FOUND)
def test_what_layers_are_given_may_lead_to_the_first_of_them(way):
    # the tape is compared, so that a copy which read another layer's weight would be seen
    trace = compared(FOUND[way], torch.randn(2, 4))
    torch.testing.assert_close(trace(x := torch.randn(2, 4)), FOUND[way](x))


class Looks(Layer):
    """A layer whose own code finds the model."""

    def forward(self, x, use=None):
        """Run it."""
        return super().forward(x) * model_that_looks.layers[0].norm.weight


model_that_looks = Net()
model_that_looks.layers = nn.ModuleList(Looks() for _ in range(3))


def test_layers_whose_code_finds_the_model_run():
    trace = compared(lambda x: model_that_looks(x), torch.randn(2, 4))
    assert not trace.reuse.replayed.get("Looks")


def test_a_function_that_changes_layers_between_calls():
    model = Net()

    def f(x):
        x = model.layers[0](x)
        model.layers[1].drop.p = 0.3
        x = model.layers[1](x)
        return model.layers[2](x)

    compared(f, torch.randn(2, 4))
    assert model.layers[1].drop.p == 0.0
