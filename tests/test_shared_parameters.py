"""Two parameters in one memory, written under no_grad: for autograd each is a tensor of its own."""

import itertools

import pytest
import torch

import scopetrace as st

LAYOUTS = {
    "over": lambda t: (t[:3], t[1:4]),
    "same": lambda t: (t[:3], t[:3]),
    "apart": lambda t: (t[:3], t[3:6]),
    "inside": lambda t: (t[:4], t[1:3]),
}
WRITES = {
    "first": lambda p, q: torch.no_grad()(p.mul_)(2),
    "second": lambda p, q: torch.no_grad()(q.mul_)(2),
    "both": lambda p, q: (torch.no_grad()(p.mul_)(2), torch.no_grad()(q.add_)(1)),
    "data": lambda p, q: p.data.mul_(3),
    "part": lambda p, q: torch.no_grad()(p[1:].mul_)(2),
    "detached": lambda p, q: q.detach().add_(1),
    "none": lambda p, q: None,
}
RESULTS = {
    "first": lambda p, q, x: (p * x).sum(),
    "second": lambda p, q, x: (q * x).sum(),
    "both": lambda p, q, x: p.sum() * 3 + (q * q).sum() * x,
    "views": lambda p, q, x: (q[1:] * p[:1]).sum() * x,
}


class Net(torch.nn.Module):
    def __init__(self, layout, write, result):
        super().__init__()
        p, q = LAYOUTS[layout](torch.arange(1.0, 7.0))
        self.p, self.q = torch.nn.Parameter(p), torch.nn.Parameter(q)
        self.write, self.result = write, result

    def forward(self, x):
        WRITES[self.write](self.p, self.q)
        return RESULTS[self.result](self.p, self.q, x)


def step(run, net):
    """The result, the gradients, None for what has none, and the parameters afterwards."""
    result = run(torch.tensor(2.0))
    result.backward()
    return result, net.p.grad, net.q.grad, net.p, net.q


@pytest.mark.sample(2)
@pytest.mark.parametrize(("layout", "write"), [*itertools.product(LAYOUTS, WRITES)])
def test_gradients_are_those_of_eager(layout, write):
    for result in RESULTS:
        eager, traced = Net(layout, write, result), Net(layout, write, result)
        expected = step(eager, eager)
        found = step(st.trace(traced, (torch.tensor(2.0),)), traced)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, msg=result)
