"""Objects that code looks at as a whole: `vars(x)`, Protocols of modules, and containers that contain themselves."""

import abc
import argparse
import types
import typing

import pytest
import torch
from torch import nn

import scopetrace as st

X = torch.randn(2, 4)

READS = {
    "attribute": lambda args: args.scale,
    "vars": lambda args: vars(args)["scale"],
    "get": lambda args: vars(args).get("scale"),
    "dict": lambda args: args.__dict__["scale"],
    "keywords": lambda args: dict(**vars(args))["scale"],
}


class Scaled(nn.Module):
    """A layer with an object of settings."""

    def __init__(self, read, args):
        super().__init__()
        self.read, self.args, self.fc = read, args, nn.Linear(4, 4)

    def forward(self, x):
        """Run it."""
        return self.fc(x) * self.read(self.args)


@pytest.mark.parametrize("kind", [argparse.Namespace, types.SimpleNamespace])
@pytest.mark.parametrize("name", READS)
def test_namespaces(name, kind):
    model = nn.Sequential(*[Scaled(READS[name], kind(scale=1.0 + (i == 2))) for i in range(4)])
    tr = st.trace(model, (X,))
    assert torch.equal(tr(X), model(X))
    model[0].args.scale = 9.0
    with pytest.raises(st.StateMismatchError, match="scale"):
        tr(X)


def test_what_a_layer_of_torch_has():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.drop = nn.Dropout(0.0)

        def forward(self, x):
            return x * vars(self.drop)["p"]

    net = Net()
    tr = st.trace(net, (X,))
    net.drop.p = 0.5
    with pytest.raises(st.StateMismatchError, match=r"drop"):
        tr(X)


class AttrDict(dict):
    """The settings of many models."""

    def __init__(self, **items):
        super().__init__(**items)
        self.__dict__ = self


LOOP: dict[str, typing.Any] = {"scale": 2.0}
LOOP["self"] = LOOP
RING: list[typing.Any] = [2.0]
RING.append(RING)


@pytest.mark.parametrize(
    ("make", "read", "change"),
    [
        (lambda: AttrDict(scale=2.0), lambda h: h.scale, lambda h: h.update(scale=3.0)),
        (lambda: AttrDict(scale=2.0), lambda h: h["scale"], lambda h: setattr(h, "scale", 3.0)),
        (lambda: LOOP, lambda h: LOOP["self"]["scale"], lambda h: h.update(scale=h["scale"] + 1)),
        (lambda: RING, lambda h: RING[1][1][0], lambda h: h.__setitem__(0, h[0] + 1)),
    ],
)
def test_containers_that_contain_themselves(make, read, change):
    model = Scaled(read, make())
    tr = st.trace(model, (X,))
    assert torch.equal(tr(X), model(X))
    change(model.args)
    with pytest.raises(st.StateMismatchError, match="when traced"):
        tr(X)


def protocols():
    """Protocols that nobody has asked yet: Python keeps their answers for each class."""

    @typing.runtime_checkable
    class HasBias(typing.Protocol):
        def bias(self, x): ...

    @typing.runtime_checkable
    class HasScale(typing.Protocol):
        scale: float

    class Hook(metaclass=abc.ABCMeta):  # noqa: B024
        @classmethod
        def __subclasshook__(cls, other):
            return any("bias" in vars(base) for base in other.__mro__)

    return {"method": HasBias, "attribute": HasScale, "hook": Hook}


@pytest.mark.parametrize("name", ["method", "attribute", "hook"])
def test_an_instance_of_a_protocol(name):
    """Whether one layer has an attribute is no matter of the others, in the trace and after it."""
    asked = protocols()[name]

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            return self.fc(x) * (2.0 if isinstance(self, asked) else 1.0)

    model = nn.Sequential(*[Layer() for _ in range(4)])
    model[2].bias, model[2].scale = torch.sin, 3.0
    tr = st.trace(model, (X,))
    assert torch.equal(tr(X), model(X))
    assert [isinstance(m, asked) for m in model] == [False, False, name != "hook", False]
    model[1].bias, model[1].scale = torch.sin, 3.0
    if name == "hook":  # which looks at the class
        assert torch.equal(tr(X), model(X))
    else:
        with pytest.raises(st.StateMismatchError, match=r"bias|scale"):
            tr(X)
