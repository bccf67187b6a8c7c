"""TVM cannot take mutation. Behind `functional_backend` it does what eager does. Optional: needs the extra `tvm`."""

import runpy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

pytest.importorskip("tvm")

EXAMPLE = runpy.run_path(str(Path(__file__).parents[1] / "examples" / "tvm_backend.py"))
ALONE = EXAMPLE["compile_torch_functions"]
LEVELS = {"torch": EXAMPLE["tvm_torch"], "aten": EXAMPLE["tvm_aten"]}


@pytest.fixture(autouse=True)
def inference():
    torch.compiler.reset()
    with torch.no_grad():
        yield


@pytest.fixture(params=LEVELS)
def backend(request):
    return LEVELS[request.param]


def relu_in_place(x):
    y = x * 2
    F.relu(y, inplace=True)
    return y


def add_one_and_halve(x):
    x.add_(1)
    return x * 0.5


def with_a_graph_break(x):
    y = x * 2
    y += 1
    torch._dynamo.graph_break()
    x -= y
    return x + y


class Cache(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("keys", torch.zeros(1, 4, 3))

    def forward(self, key):
        self.keys[:, 2:3] = key
        return self.keys.sum(1)


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x):
        self.steps += 1
        return x * self.steps


def test_alone_tvm_reads_in_place_functions_as_pure_ones():
    x = torch.tensor([-1.0, 2.0])
    assert torch.compile(relu_in_place, backend=ALONE)(x).tolist() == [-2.0, 4.0]
    assert relu_in_place(x).tolist() == [0.0, 4.0]


@pytest.mark.parametrize("function", [relu_in_place, add_one_and_halve, with_a_graph_break])
def test_results_and_inputs_are_those_of_eager(backend, function):
    x = torch.tensor([[-1.0, 2.0, 3.0]])
    ours, eagers = x.clone(), x.clone()
    torch.testing.assert_close(torch.compile(function, backend=backend)(ours), function(eagers))
    torch.testing.assert_close(ours, eagers)


@pytest.mark.parametrize(("model", "shape"), [(Cache, (1, 1, 3)), (Counter, (2, 3))])
def test_results_and_buffers_are_those_of_eager_call_after_call(backend, model, shape):
    ours, eagers = model(), model()
    compiled = torch.compile(ours, backend=backend)
    for value in (1.0, -2.0):
        x = torch.full(shape, value)
        torch.testing.assert_close(compiled(x), eagers(x))
        torch.testing.assert_close(dict(ours.named_buffers()), dict(eagers.named_buffers()))


def test_a_result_that_tvm_returns_as_the_input_itself_is_fresh(backend):
    def copy_and_clear(x):
        y = x.clone()
        x.zero_()
        return y

    x = torch.ones(3)
    assert torch.compile(copy_and_clear, backend=backend)(x).tolist() == [1.0, 1.0, 1.0]
    assert x.tolist() == [0.0, 0.0, 0.0]
