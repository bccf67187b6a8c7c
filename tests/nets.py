"""Small modules that the tests of order and of plans share."""

import torch
from torch import nn


class Net(nn.Module):
    """A forward given as a function of the module; what `parts` holds are its attributes."""

    def __init__(self, forward, **parts):
        super().__init__()
        self._forward = forward
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args):
        return self._forward(self, *args)


def weight(*shape):
    """A parameter of this shape."""
    return nn.Parameter(torch.randn(shape))
