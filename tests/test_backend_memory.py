"""What a backend of torch.compile keeps: no inputs and no weights, before and after `torch._dynamo.reset()`."""

import gc
import weakref

import pytest
import torch
from torch import nn

import scopetrace as st


class Cached(nn.Module):
    """Writes a buffer and its input, and reads a constant."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.fc = nn.Linear(8, 8)
        self.register_buffer("last", torch.zeros(8))

    def forward(self, x):
        x[0].mul_(2)
        y = self.fc(self.norm(x))
        self.last.copy_(y[0].detach())
        return y, x[1]


def identity(graph_module, inputs):
    return graph_module


BACKENDS = {
    "plain": lambda: st.functional_backend(identity),
    "torch level": lambda: st.functional_backend(identity, level="torch"),
    "scatters": lambda: st.functional_backend(identity, lower_scatter="where"),
    "backward": lambda: st.functional_backend(identity, backward_compiler=identity),
    "decompositions": lambda: st.functional_backend(identity, decompositions=torch.export.default_decompositions()),
}


@pytest.fixture(scope="module", autouse=True)
def only_new_objects():
    """The garbage collector leaves out what other tests and imports made, which takes most of its time."""
    torch._dynamo.reset()
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def reset():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def alive(references):
    gc.collect()
    return [name for name, reference in references.items() if reference() is not None]


CASES = [
    *((backend, Cached, None, True) for backend in BACKENDS),
    ("plain", lambda: nn.Linear(8, 8), None, False),
    ("plain", Cached, False, False),
]


@pytest.mark.parametrize(("backend", "make", "dynamic", "grad"), CASES)
def test_neither_inputs_nor_weights_are_kept(backend, make, dynamic, grad):
    model = make()
    weights = {name: weakref.ref(t) for name, t in model.state_dict(keep_vars=True).items()}
    compiled = torch.compile(model, backend=BACKENDS[backend](), dynamic=dynamic)
    inputs = {}
    with torch.set_grad_enabled(grad):
        for size in (2, 3, 5, 2):
            x = torch.rand(size, 8)
            inputs[f"input of size {size}"] = weakref.ref(x)
            result = compiled(x)
            if grad:
                (result if isinstance(result, torch.Tensor) else result[0]).sum().backward()
            del x, result
    assert alive(inputs) == []
    assert len(alive(weights)) == len(weights)
    del model, compiled
    torch._dynamo.reset()
    assert alive(weights) == []


def test_a_call_after_the_example_is_freed_is_right():
    backend = st.functional_backend(identity)
    model, eager = Cached(), Cached()
    eager.load_state_dict(model.state_dict())
    compiled = torch.compile(model, backend=backend)
    for size in (2, 2, 4, 2):
        x, y = (torch.arange(8.0 * size).reshape(size, 8) for _ in range(2))
        torch.testing.assert_close(compiled(x), eager(y))
        torch.testing.assert_close(x, y)
        torch.testing.assert_close(model.state_dict(), eager.state_dict())
