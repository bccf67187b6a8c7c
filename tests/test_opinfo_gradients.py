"""Derivatives of torch's own list of ops that a forward takes itself, and the derivatives of these, against eager.

    y = op(x); z = y.detach()
    g, = torch.autograd.grad(y.sin().sum() + (z * y).sum(), x, create_graph=True)

Backward reads what the op has saved, while other tensors lie in the same memory. What is refused is listed here.
"""

import itertools

import pytest
import torch
from compare import tensors
from test_opinfo import name, ops, rebuild, seeded_outside  # noqa: F401 (a fixture)

import scopetrace as st

VALUE = "Python needs the value of a tensor"
NO_SHAPE = "torch cannot tell the shape of what an op returns"
REFUSED = {
    "cov": VALUE,
    "index_reduce.prod": VALUE,
    "linalg.lstsq": NO_SHAPE,
    "linalg.lstsq.grad_oriented": NO_SHAPE,
    "nn.functional.gaussian_nll_loss": VALUE,
    "scatter_reduce.prod": VALUE,
}
SAMPLES = slice(0, 6, 3)


def real(t):
    return torch.view_as_real(t) if t.is_complex() else t


def derivative_of(op, sample):
    def forward(*given):
        (x, *args), kwargs = rebuild(sample, given, with_input=True)
        results = [y for y in tensors(op(x, *args, **kwargs)) if y.requires_grad]
        loss = sum((real(y * y if y.is_complex() else y.sin()) + real(y.detach() * y)).sum() for y in results)
        found = torch.autograd.grad(loss, [t for t in given if t.requires_grad], create_graph=True, allow_unused=True)
        return [g for g in found if g is not None]

    return forward


def copies(given):
    return tuple(t.detach().clone().requires_grad_(t.requires_grad) for t in given)


def outcome(run, given):
    """The derivatives, and the derivatives of their sum with weights."""
    torch.manual_seed(0)
    given = copies(given)
    first = run(*given)
    weighted = [
        (real(g) * torch.linspace(1, 2, real(g).numel()).view_as(real(g))).sum() for g in first if g.requires_grad
    ]
    leaves = [t for t in given if t.requires_grad]
    second = torch.autograd.grad(sum(weighted), leaves, allow_unused=True) if weighted else ()
    return [g.detach() for g in first], second


def cases(op):
    """What eager differentiates twice."""
    if not op.supports_gradgrad or torch.float64 not in op.supported_dtypes("cpu"):
        return
    torch.manual_seed(1)
    found = op.sample_inputs("cpu", torch.float64, requires_grad=True)
    for sample in itertools.islice(found, SAMPLES.start, SAMPLES.stop, SAMPLES.step):
        given = tensors((sample.input, sample.args, sample.kwargs))
        forward = derivative_of(op, sample)
        try:
            if any(t.requires_grad for t in given):
                yield forward, given, outcome(forward, given)
        except (RuntimeError, TypeError, NotImplementedError, ValueError, IndexError):
            continue


def problems(op):
    """What goes wrong, by case."""
    for forward, given, expected in cases(op):
        try:
            trace = st.trace(forward, copies(given))
            torch.testing.assert_close(outcome(trace, given), expected, equal_nan=True)
        except Exception as error:
            yield f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("every", [40, pytest.param(1, marks=pytest.mark.slow)])
def test_derivatives_are_those_of_eager(every):
    found = {}
    for op in ops()[::every]:
        if name(op) not in REFUSED:
            found |= {name(op): problem for problem in problems(op)}
    assert not found


@pytest.mark.parametrize("listed", REFUSED)
def test_what_is_listed_is_still_refused(listed):
    (op,) = (o for o in ops() if name(o) == listed)
    found = list(problems(op))
    assert found and all(REFUSED[listed] in problem for problem in found)
