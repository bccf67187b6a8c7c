"""Two features in one forward that each are traced well alone, and once failed together."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

import scopetrace as st
from tests.compare import assert_like_eager

X, LABELS = torch.randn(3, 4), torch.tensor([0, 1, 2])


class Symmetric(nn.Module):
    def forward(self, w):
        return w.triu() + w.triu(1).mT


def parametrized():
    """A linear layer that passes a parameter to a module."""
    return parametrize.register_parametrization(nn.Linear(4, 4), "weight", Symmetric())


IN_TRANSFORMS = {
    "a module takes a parameter": parametrized,
    "a scripted module": lambda: torch.jit.script(nn.Linear(4, 4)),
    "a traced module": lambda: torch.jit.trace(nn.Linear(4, 4), X),
    "a loss whose backward torch writes in Python": lambda: lambda x: F.nll_loss(x, LABELS[: len(x)]),
}
TRANSFORMS = {
    "grad": lambda f: torch.func.grad(lambda x: f(x).sum()),
    "vjp": lambda f: lambda x: torch.func.vjp(f, x)[0],
    "jacrev": lambda f: lambda x: torch.func.jacrev(f)(x),
    "vmap": lambda f: lambda x: torch.vmap(lambda row: f(row[None]))(x),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("inner", IN_TRANSFORMS)
def test_in_transforms(inner, transform):
    fn = TRANSFORMS[transform](IN_TRANSFORMS[inner]())
    assert_like_eager(fn, st.trace(fn, (X,)), (X,))


def test_scripted_children_beside_a_list_of_parameters():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.scripted = nn.Linear(4, 4), torch.jit.trace(nn.Linear(4, 4), X)

        def forward(self, x):
            doubled = {name: 2 * p for name, p in self.fc.named_parameters()}
            return torch.func.functional_call(self.fc, doubled, (self.scripted(x),))

    model = Net()
    assert_like_eager(model, st.trace(model, (X,)), (X,))


def test_a_step_with_a_scripted_child_is_saved(tmp_path):
    model = nn.Sequential(torch.jit.trace(nn.Linear(4, 4), X))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        loss = model(x).pow(2).sum()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    st.trace(step, (X,)).save(tmp_path / "step.st")
    torch.testing.assert_close(st.load(tmp_path / "step.st")(X), step(X))


def positive(x):
    return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_cond_in_a_checkpointed_region(sign):
    def fn(x):
        return checkpoint(positive, x * 2, use_reentrant=False)

    gradients = []
    for run in (lambda x: positive(x * 2), st.trace(fn, (X.clone().requires_grad_(),))):
        x = (X.abs() * sign).requires_grad_()
        run(x).sum().backward()
        gradients.append(x.grad)
    torch.testing.assert_close(*gradients)


def test_scan_in_inference_mode():
    def fn(x):
        with torch.inference_mode():
            return torch._higher_order_ops.scan(lambda c, row: (c + row, c * row), x[0] * 0, x, dim=0)[1].clone()

    torch.testing.assert_close(st.trace(fn, (X,))(X), fn(X))


@pytest.mark.parametrize("write", [lambda b, x: b.copy_(x), lambda b, x: torch.mul(x, 2, out=b)])
def test_onnx_of_a_buffer_that_is_only_written(write):
    pytest.importorskip("onnxscript")

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("last", torch.zeros(3, 4))

        def forward(self, x):
            write(self.last, x)
            return x * 2

    with torch.no_grad():
        model = st.trace(Net(), (X,)).to_onnx(verify=True)
    assert [output.name for output in model.graph.outputs] == ["output", "last_updated"]
