"""Layers of which one runs in another state of the process, or has other tables of nn.Module: what is no copy.

a state that code can ask for, switched around one layer by the model -> traced with copied layers and without -> the
same tape, and calls as in eager; a table that code names -> the same, and a call is refused after a change of it
"""

import abc
import contextlib
import sys
import warnings

import numpy as np
import pytest
import reuse_programs
import torch
from torch import nn

import scopetrace as st
from scopetrace.api.runnable import program_of


class Asks(nn.Module):
    """A layer that multiplies by the answer to a question."""

    def __init__(self, ask):
        super().__init__()
        self.ask, self.fc = ask, nn.Linear(4, 4)
        self.register_buffer("table", torch.ones(4))

    def forward(self, x):
        """Run it."""
        return self.fc(x * self.ask(self)).tanh()


class Net(nn.Module):
    """Layers of which the third runs in a state of its own."""

    def __init__(self, ask, state=contextlib.nullcontext):
        super().__init__()
        self.layers, self.state = nn.ModuleList(Asks(ask) for _ in range(4)), state

    def forward(self, x):
        """Run it."""
        for i, layer in enumerate(self.layers):
            x = self.in_block(layer, x) if i == 2 else layer(x)
        return x

    def in_block(self, layer, x):
        """Run a layer in it."""
        with self.state():
            return layer(x)


def compared(model, x):
    """A trace with reuse, of which it is checked that it is the trace without, and does what the model does."""
    with torch.no_grad():
        expected = model(x)
        plain, repeated = (st.trace(model, (x,), reuse=reuse) for reuse in (False, True))
        assert not reuse_programs.differences(*(program_of(t).tape for t in (plain, repeated)))
        assert torch.equal(repeated(x), expected)
    return repeated


@contextlib.contextmanager
def another_engine():
    """Another engine for quantized tensors."""
    before = torch.backends.quantized.engine
    torch.backends.quantized.engine = next(e for e in torch.backends.quantized.supported_engines if e != before)
    yield
    torch.backends.quantized.engine = before


@contextlib.contextmanager
def warnings_as_errors():
    """Warnings raise."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


class Sized(abc.ABC):  # noqa: B024
    """A class of which others may be said to be subclasses."""


def warns(layer):
    """Whether a warning raises."""
    try:
        warnings.warn("slow", UserWarning, stacklevel=1)
    except UserWarning:
        return 3.0
    return 2.0


def around(layer):
    """Whether a function of that name is around."""
    frame = sys._getframe()
    while frame is not None and frame.f_code.co_name != "in_block":
        frame = frame.f_back
    return 2.0 if frame is None else 3.0


@pytest.mark.parametrize(
    ("ask", "state"),
    [
        (
            lambda layer: 2.0 if torch.get_autocast_dtype("cpu") == torch.float16 else 3.0,
            lambda: torch.autocast("cpu", torch.float16, enabled=False),
        ),
        (lambda layer: float(len(torch.backends.quantized.engine)), another_engine),
        (lambda layer: float(len(np.geterr()["divide"])), lambda: np.errstate(divide="ignore")),
        (warns, warnings_as_errors),
        (around, contextlib.nullcontext),
    ],
)
def test_a_state_of_the_process_tells_layers_apart(ask, state):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compared(Net(ask, state), torch.ones(2, 4))


def test_a_class_that_is_registered_between_two_layers():
    model = Net(lambda layer: 2.0 + issubclass(_Kind, Sized), lambda: contextlib.closing(_Registers()))
    with torch.no_grad():
        trace = st.trace(model, (torch.ones(2, 4),), reuse=True)
    factors = [n.args[1] for n in trace.graph_module.graph.find_nodes(op="call_function", target=_MUL)]
    assert factors == [2.0, 2.0, 3.0, 3.0]


_MUL = torch.ops.aten.mul.Tensor


class _Kind:
    """A class that becomes a subclass."""


class _Registers:
    """Registers it."""

    def __init__(self):
        Sized.register(_Kind)

    def close(self):
        """It stays."""


@pytest.mark.parametrize(
    ("ask", "change"),
    [
        (
            lambda layer: 2.0 + ("table" in layer._non_persistent_buffers_set),
            lambda layer: layer._non_persistent_buffers_set.add("table"),
        ),
        (
            lambda layer: 2.0 + len(layer._state_dict_hooks),
            lambda layer: layer.register_state_dict_post_hook(lambda *given: None),
        ),
        (
            lambda layer: 2.0 + len(layer._load_state_dict_pre_hooks),
            lambda layer: layer.register_load_state_dict_pre_hook(lambda *given: None),
        ),
        (lambda layer: 2.0 + len(layer._modules), lambda layer: layer.add_module("late", nn.ReLU())),
    ],
)
def test_the_tables_of_a_module_tell_layers_apart(ask, change):
    model, x = Net(ask), torch.ones(2, 4)
    change(model.layers[2])
    trace = compared(model, x)
    change(model.layers[3])
    with torch.no_grad(), pytest.raises(st.StateMismatchError, match=r"layers\.3"):
        trace(x)


class Doubles(Asks):
    """Another class of such layers."""

    def forward(self, x):
        """Run it."""
        return self.fc(x * 4.0).tanh()


class Switches(Net):
    """The third layer is of another class for its call."""

    def in_block(self, layer, x):
        """Run a layer in it."""
        layer.__class__ = Doubles
        x = layer(x)
        layer.__class__ = Asks
        return x


def test_a_layer_that_is_of_another_class_for_a_while():
    trace = compared(Switches(lambda layer: 2.0), torch.ones(2, 4))
    assert trace.reuse.replayed == {"Asks": 2}


@contextlib.contextmanager
def hooks_on_all_modules():
    """The results of linear layers are doubled."""
    hook = torch.nn.modules.module.register_module_forward_hook(
        lambda module, args, out: out * 2 if isinstance(module, nn.Linear) else None
    )
    yield
    hook.remove()


def test_hooks_on_all_modules_that_are_there_for_a_while():
    compared(Net(lambda layer: 2.0, hooks_on_all_modules), torch.ones(2, 4))
