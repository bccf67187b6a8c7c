"""Objects that code looks at as a whole: `vars(x)`, `==`, Protocols, and containers that contain themselves."""

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
    "equal": lambda args: 2.0 if args == argparse.Namespace(scale=1.0) else 3.0,
    "text": lambda args: float(str(args).partition("=")[2][:3]),
    "contains": lambda args: 2.0 if "scale" in args else 3.0,
}


class Scaled(nn.Module):
    """A layer with an object of settings."""

    def __init__(self, read, args):
        super().__init__()
        self.read, self.args, self.fc = read, args, nn.Linear(4, 4)

    def forward(self, x):
        """Run it."""
        return self.fc(x) * self.read(self.args)


IN_C = ("equal", "text", "contains")
"""What a SimpleNamespace does in C, or does not do."""


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *[(name, argparse.Namespace) for name in READS],
        *[(name, types.SimpleNamespace) for name in READS if name not in IN_C],
    ],
)
def test_namespaces(name, kind):
    model = nn.Sequential(*[Scaled(READS[name], kind(scale=1.0 + (i == 2))) for i in range(4)])
    tr = st.trace(model, (X,))
    assert torch.equal(tr(X), model(X))
    model[0].args.scale = 9.0
    if name == "contains":
        del model[0].args.scale
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


@pytest.mark.parametrize("of_object", [False, True])
@pytest.mark.parametrize("name", ["method", "attribute", "hook"])
def test_an_instance_of_a_protocol(name, of_object):
    """Whether one layer has an attribute is no matter of the others, in the trace and after it."""
    asked = protocols()[name]

    class Holder:
        pass

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.held = nn.Linear(4, 4), Holder()

        def forward(self, x):
            return self.fc(x) * (2.0 if isinstance(self.held if of_object else self, asked) else 1.0)

    model = nn.Sequential(*[Layer() for _ in range(4)])
    special = model[2].held if of_object else model[2]
    special.bias, special.scale = torch.sin, 3.0
    tr = st.trace(model, (X,))
    assert torch.equal(tr(X), model(X))
    assert [isinstance(m.held if of_object else m, asked) for m in model] == [False, False, name != "hook", False]
    other = model[1].held if of_object else model[1]
    other.bias, other.scale = torch.sin, 3.0
    if name == "hook":  # which looks at the class
        assert torch.equal(tr(X), model(X))
    else:
        with pytest.raises(st.StateMismatchError, match=r"bias|scale"):
            tr(X)
