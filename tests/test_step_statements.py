"""Training steps of a few statements, enumerated: what stands before, between and after two backwards, beside eager.

statements of STATEMENTS, in each order -> a step of a model whose parameters are used twice -> two calls of its trace
and two runs in eager: results, gradients, parameters and buffers are equal, or the step is refused
"""

import copy
import itertools
import random
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import scopetrace as st

# x is an input, y what the model made last, p and q parameters, b a buffer; loss() is a backward of y.
STATEMENTS = {
    "forward": "y = self.fc(x).relu() * self.p",
    "forward_view": "y = (self.fc(x) * self.p)[1:]",
    "functional": "y = F.linear(x, self.fc.weight, self.p).tanh()",
    "transposed": "y = x @ self.fc.weight.t() + self.p",
    "normalized": "y = self.norm(self.fc(x))",
    "twice": "y = self.fc(self.fc(x))",
    "buffered": "y = y * self.b",
    "in_place": "y = y * 2; y.add_(1); y.mul_(self.p)",
    "detached": "y = y.detach() + self.p",
    "no_grad": "with torch.no_grad(): y = y * 2\n    y = y + self.p",
    "backward": "y.square().sum().backward()",
    "backward_kept": "z = y.square().sum(); z.backward(retain_graph=True); z.backward()",
    "grad": "g, = torch.autograd.grad((y * y).sum(), [self.p], retain_graph=True); y = y * g.sum()",
    "write_p": "with torch.no_grad(): self.p.add_(0.5)",
    "write_weight": "with torch.no_grad(): self.fc.weight.mul_(0.5)",
    "write_data": "self.p.data.mul_(2)",
    "write_row": "with torch.no_grad(): self.fc.weight[0].add_(1)",
    "step": "with torch.no_grad():\n        for t in self.parameters(): t.grad is None or t.sub_(t.grad, alpha=0.1)",
    "zero": "self.zero_grad()",
    "zero_in_place": "self.zero_grad(set_to_none=False)",
    "write_buffer": "self.b.add_(1)",
    "write_input": "x.mul_(0.5)",
    "grad_scaled": "self.p.grad = None if self.p.grad is None else self.p.grad * 2",
    "copy_back": "with torch.no_grad(): self.p.copy_(y.sum(0) if y.dim() == 2 else self.p)",
}
NAMES = list(STATEMENTS)


class Model(nn.Module):
    """What the steps train."""

    def __init__(self):
        super().__init__()
        self.fc, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)
        self.p = nn.Parameter(torch.linspace(0.5, 1.5, 4))
        self.register_buffer("b", torch.linspace(1, 2, 4))


def step_of(names):
    """A function of a model and an input that runs the statements."""
    lines = ["x = x * 1", STATEMENTS["forward"], *map(STATEMENTS.get, names), "y.sum().backward()", "return y.detach()"]
    code = "\n    ".join(["def step(self, x):", *lines])
    namespace = {"torch": torch, "F": F}
    exec(code, namespace)
    return namespace["step"]


def state(model):
    """Parameters, gradients and buffers."""
    params = [t for p in model.parameters() for t in (p.detach(), p.grad)]
    return [None if t is None else t.clone() for t in (*params, *model.buffers())]


def same(one, other):
    """Whether two lists of tensors and None are equal up to rounding."""
    return all(
        (a is None) == (b is None) and (a is None or torch.allclose(a, b, atol=1e-4, rtol=1e-4))
        for a, b in zip(one, other, strict=True)
    )


def verdict(names):
    """`right`, `refused`, `fails` as eager does, or what differs."""
    step = step_of(names)
    torch.manual_seed(0)
    model = Model()
    mine = copy.deepcopy(model)
    inputs = [torch.linspace(-1, 1, 12).view(3, 4) + i for i in range(2)]
    wanted = []
    try:
        for x in inputs:
            wanted.append(([step(model, x.clone())], state(model)))
    except RuntimeError:
        pass
    try:
        trace = st.trace(lambda x: step(mine, x), (inputs[0].clone(),))
    except st.ScopetraceError:
        return "refused"
    except RuntimeError:
        return "RuntimeError at the trace" if wanted else "fails"
    for i, x in enumerate(inputs):
        try:
            out = [trace(x.clone())]
        except st.ScopetraceError:
            return "refused"
        if i == len(wanted):
            return f"runs in call {i}, where eager raises"
        if not same(out, wanted[i][0]) or not same(state(mine), wanted[i][1]):
            return f"differs in call {i}"
    return "right"


def check(programs):
    """Assert that each is right, refused, or fails as in eager; and that many are right."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = {names: verdict(names) for names in programs}
    wrong = {names: text for names, text in found.items() if text not in ("right", "refused", "fails")}
    assert not wrong, list(wrong.items())[:5]
    assert sum(text == "right" for text in found.values()) > len(found) // 5


def test_one_statement_and_two_at_random():
    pairs = list(itertools.product(NAMES, NAMES))
    check([(), *((n,) for n in NAMES), *random.Random(0).sample(pairs, 30)])


@pytest.mark.slow
def test_sequences_at_random():
    longer = [tuple(random.Random(i).choices(NAMES, k=3 + i % 3)) for i in range(600)]
    check(longer)


@pytest.mark.exhaustive
def test_all_of_two_and_three_statements():
    check(itertools.product(NAMES, NAMES))
    check(itertools.product(NAMES, NAMES, NAMES))
