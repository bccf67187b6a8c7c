"""Small modules that several tests share."""

import re

import torch
from torch import nn


def differs(text):
    """A pattern for an error that says `k: 2.0 when traced and 3.0 now`, with or without the line that read it."""
    name, values = text.split(": ", 1)
    return rf"(?s){re.escape(name)}(, which the model reads at .*)?: {re.escape(values)}"


class Net(nn.Module):
    """A forward given as a function of the module; what `parts` holds are its attributes."""

    def __init__(self, forward, **parts):
        super().__init__()
        self._forward = forward
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args):
        return self._forward(self, *args)


def net(forward, **attributes):
    """A module of a class of its own, with a layer, a buffer and these attributes; its base has the methods."""

    class Base(nn.Module):
        def helped(self, x):
            return x * 2

    class Net(Base):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)
            self.register_buffer("shift", torch.ones(4))
            for name, value in attributes.items():
                setattr(self, name, value)

    Base.forward = forward
    return Net()


def weight(*shape):
    """A parameter of this shape."""
    return nn.Parameter(torch.randn(shape))


class Gate(nn.Module):
    """A layer that runs in one branch of a cond alone."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        return torch.cond(x.sum() > 0, lambda x: self.fc(x), lambda x: x * 2, (x,))
