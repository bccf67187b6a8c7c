"""What a function imports itself counts as read and written as what its file imports."""

import sys
import types

import pytest
import torch
from torch import nn

import scopetrace as st

_SOURCE = """
SCALE = 2

class Config:
    scale = 2

config = Config()
counts = [1]

def __getattr__(name):
    if name != "late":
        raise AttributeError(name)
    return SCALE

def scale():
    return SCALE

def count():
    counts[0] += 1
    return counts[0]
"""
_LAYER = """
from torch import nn

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        {body}
"""


@pytest.fixture(name="settings")
def _settings():
    """A package with a module of settings, imported before the trace."""
    made = {}
    for name, source in (("local_package", ""), ("local_package.settings", _SOURCE)):
        made[name] = types.ModuleType(name)
        made[name].__file__ = f"/{name}.py"
        exec(source, vars(made[name]))
    made["local_package"].settings = made["local_package.settings"]
    sys.modules.update(made)
    yield made["local_package.settings"]
    for name in made:
        del sys.modules[name]


def net(body):
    """Layers with this in `forward`; the file is one of the package."""
    table = {"__name__": "local_package.layers", "__package__": "local_package"}
    exec(_LAYER.format(body=body.replace(";", "\n       ")), table)
    return nn.Sequential(*(table["Layer"]() for _ in range(3))).requires_grad_(False)


@pytest.mark.parametrize(
    ("body", "change"),
    [
        ("import local_package.settings; return self.fc(x) * local_package.settings.SCALE", "SCALE"),
        ("import local_package.settings as s; return self.fc(x) * s.SCALE", "SCALE"),
        ("from local_package.settings import SCALE; return self.fc(x) * SCALE", "SCALE"),
        ("from local_package import settings; return self.fc(x) * settings.SCALE", "SCALE"),
        ("from .settings import SCALE; return self.fc(x) * SCALE", "SCALE"),
        ("from . import settings; return self.fc(x) * settings.SCALE", "SCALE"),
        ("from . import settings; return self.fc(x) * settings.late", "SCALE"),
        ("from .settings import scale; return self.fc(x) * scale()", "SCALE"),
        ("from .settings import config; return self.fc(x) * config.scale", "config"),
        ("from .settings import Config; return self.fc(x) * Config.scale", "Config"),
        ("def run():;    from .settings import SCALE;    return SCALE; return self.fc(x) * run()", "SCALE"),
    ],
)
def test_what_a_forward_imports_is_compared(settings, body, change):
    model, x = net(body), torch.ones(2, 4)
    trace = st.trace(model, (x,))
    assert torch.equal(trace(x), model(x))
    if change == "SCALE":
        settings.SCALE = 3
    else:
        getattr(settings, change).scale = 3
    with pytest.raises(st.StateMismatchError, match=r"SCALE|scale"):
        trace(x)


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ("from .settings import count; return self.fc(x) * count()", "counts"),
        ("from . import settings; settings.SCALE += 1; return self.fc(x) * settings.SCALE", "SCALE"),
        ("import local_package.settings as s; s.config.scale += 1; return self.fc(x) * s.config.scale", "config"),
    ],
)
def test_what_a_forward_writes_to_an_import_is_a_side_effect(settings, body, name):
    x = torch.ones(2, 4)
    trace = st.trace(net(body), (x,))
    factors = [n.args[1] for n in trace.graph_module.graph.find_nodes(op="call_function", target=_MUL)]
    assert factors in ([2, 3, 4], [3, 4, 5])
    trace(x)
    with pytest.raises(st.SideEffectError, match=name):
        trace(x)


_MUL = torch.ops.aten.mul.Tensor
