"""Tensors that a forward makes (`torch.zeros(...)`, `x.new_ones(...)`), written with and without autograd, and views.

Python has another object for what such a function gives than the op made, since torch wraps it once more.
"""

import contextlib
import itertools

import pytest
import torch

import scopetrace as st

FACTORIES = {
    "ones_like": torch.ones_like,
    "zeros_like": lambda x: torch.zeros_like(x, memory_format=torch.contiguous_format),
    "zeros": lambda x: torch.zeros(x.shape),
    "full": lambda x: torch.full(tuple(x.shape), 0.5),
    "empty": lambda x: torch.empty(x.shape).fill_(2.0),
    "arange": lambda x: torch.arange(float(x.numel())).view(x.shape),
    "new_ones": lambda x: x.new_ones(x.shape),
    "tensor": lambda x: torch.tensor([[0.5] * x.shape[1]] * x.shape[0]),
    "leaf": lambda x: torch.ones(x.shape, requires_grad=True),
    "leaf_like": lambda x: torch.ones_like(x, requires_grad=True),
    "clone": lambda x: torch.ones_like(x).clone(),
    "strided": lambda x: torch.empty_strided(x.shape, x.stride()).fill_(1.0),
}
WRITES = {
    "nothing": lambda t, x: t,
    "mul_": lambda t, x: t.mul_(x),
    "copy_": lambda t, x: t.copy_(x),
    "scalar": lambda t, x: t.add_(1.0),
    "masked_scatter_": lambda t, x: t.masked_scatter_(t > 0, x),
    "part": lambda t, x: t[:1].mul_(x[:1]) * 1,
    "out": lambda t, x: t.mul(x),
}
RESULTS = {
    "itself": lambda t: t,
    "squeeze": lambda t: t.squeeze(),
    "both": lambda t: (t, t.t()),
    "row": lambda t: t[0],
    "product": lambda t: t * 2,
}
MODES = (torch.enable_grad, torch.no_grad)
CASES = [*itertools.product(FACTORIES, WRITES, WRITES, MODES, MODES, (False, True))]


def forward_of(factory, first, second, outer, inner, result):
    """Makes a tensor and writes it in `outer`, and again in `inner`."""

    def forward(x):
        with outer():
            t = FACTORIES[factory](x)
            WRITES[first](t, x)
        with inner():
            u = WRITES[second](t, x)
        return RESULTS[result](t), u

    return forward


def strides(t):
    """Those of dimensions that have several elements; the others say nothing."""
    return [s for s, n in zip(t.stride(), t.shape, strict=True) if n > 1]


def outcome(run, transposed, grad):
    """What a call gives, and the gradient of its input."""
    leaf = (torch.linspace(-1, 1, 12).view(3, 4) * 2 + 0.3).requires_grad_(grad)
    x = (leaf * 1).t() if transposed else leaf * 1
    out = [t for part in run(x) for t in (part if isinstance(part, tuple) else (part,))]
    facts = [(t.requires_grad, t.is_leaf, strides(t), t.detach().clone()) for t in out]
    loss = [t.sin().sum() for t in out if t.requires_grad]
    if loss and torch.is_grad_enabled():
        torch.stack(loss).sum().backward()
    return facts, leaf.grad


def verdict(forward, transposed, grad, calls):
    """`right`, or the error of a trace that was refused; anything else fails. `calls` are grad modes to call it in."""
    x = torch.linspace(-1, 1, 12).view(3, 4).requires_grad_(grad) * 1
    try:
        outcome(forward, transposed, grad)
    except RuntimeError:
        return "eager raises"
    try:
        trace = st.trace(forward, (x.t() if transposed else x,))
    except st.errors.TraceError as error:
        return type(error).__name__
    found = "right"
    for mode, given in itertools.product(calls, (True, False)):
        with mode():
            try:
                wanted = outcome(forward, transposed, given)
            except RuntimeError:
                continue
            try:
                got = outcome(trace, transposed, given)
            except (st.errors.InputMismatchError, st.errors.StateMismatchError):
                found = "refused at a call"
                continue
        assert [f[:3] for f in got[0]] == [f[:3] for f in wanted[0]]
        torch.testing.assert_close((got[0], got[1]), (wanted[0], wanted[1]))
    return found


@pytest.mark.sample(2)
@pytest.mark.parametrize("factory", FACTORIES)
def test_a_tensor_of_a_factory_written_in_two_modes(factory):
    found = []
    for i, (name, *steps, transposed) in enumerate(CASES):
        if name == factory and i % 5 == len(name) % 5 and i // 5 % 12 < 2:
            result = [*RESULTS][i % len(RESULTS)]
            forward = forward_of(name, *steps, result)
            found.append(verdict(forward, transposed, i % 3 != 0, (torch.enable_grad, torch.no_grad)))
    right = found.count("right") + found.count("refused at a call")
    assert ("leaf" in factory) == (right == 0)  # the result of a leaf depends on what only the forward has


@pytest.mark.slow
@pytest.mark.parametrize("result", RESULTS)
@pytest.mark.parametrize("factory", FACTORIES)
def test_all_tensors_of_factories(factory, result):
    for name, *steps, transposed in CASES:
        if name == factory:
            for grad in (True, False):
                verdict(forward_of(name, *steps, result), transposed, grad, (torch.enable_grad, torch.no_grad))


LEAVES = {
    "ones_like": lambda t: torch.ones_like(t, requires_grad=True),
    "rand_like": lambda t: torch.rand_like(t, requires_grad=True) * 0,
    "two": lambda t: torch.ones_like(t, requires_grad=True).detach() + torch.ones_like(t, requires_grad=True),
    "full": lambda t: torch.full((4,), 2.0, requires_grad=True),
    "arange": lambda t: torch.arange(4.0, requires_grad=True),
    "eye": lambda t: torch.eye(4, requires_grad=True)[0],
    "new_ones": lambda t: t.new_ones(t.shape, requires_grad=True),
    "new_full": lambda t: t.new_full((4,), 2.0, requires_grad=True),
    "new_tensor": lambda t: t.new_tensor([1.0, 2.0, 3.0, 4.0], requires_grad=True),
    "tensor": lambda t: torch.tensor([1.0, 2.0, 3.0, 4.0], requires_grad=True),
    "asarray": lambda t: torch.asarray([1.0, 2.0, 3.0, 4.0], requires_grad=True),
    "scalar": lambda t: torch.scalar_tensor(2.0, requires_grad=True),
    "parameter": lambda t: torch.nn.Parameter(torch.ones(4)),
    "parameter_of": lambda t: torch.nn.Parameter(t.detach()),
    "later": lambda t: torch.ones(4).requires_grad_(),
    "later_of": lambda t: t.detach().requires_grad_(),
    "later_sum": lambda t: torch.arange(3).float().requires_grad_().sum(),
    "written": lambda t: t.new_zeros(t.shape).copy_(t),
    "part_written": lambda t: t.new_zeros(t.shape).index_fill_(0, torch.tensor([0]), 1.0).add_(t),
}
SWITCHES = {"none": contextlib.nullcontext, "on": torch.enable_grad, "off": torch.no_grad}


@pytest.mark.sample(6)
@pytest.mark.parametrize("leaf", LEAVES)
def test_what_a_forward_makes_that_requires_grad_in_a_grad_mode_of_its_own(leaf):
    flags = (True, False)
    for outer, inner, grad, mode in itertools.product(SWITCHES.values(), SWITCHES.values(), flags, flags):

        def forward(x, outer=outer, inner=inner):
            t = x * 2
            with outer():
                a = LEAVES[leaf](t)
            with inner():
                b = a * t
            return b + 1, b

        try:
            with torch.set_grad_enabled(mode):
                trace = st.trace(forward, (torch.rand(3, 4).requires_grad_(grad),))
        except st.errors.TraceError as error:
            assert "makes a tensor require grad" in str(error)
            continue
        for given, now in itertools.product(flags, flags):
            x = torch.rand(3, 4).requires_grad_(given)
            with torch.set_grad_enabled(now):
                wanted = forward(x)
                try:
                    got = trace(x)
                except (st.errors.InputMismatchError, st.errors.StateMismatchError):
                    assert (given, now) != (grad, mode)
                    continue
            assert [t.requires_grad for t in got] == [t.requires_grad for t in wanted]
            torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("make", [lambda t: t.new_zeros(t.shape), torch.zeros_like, lambda t: torch.zeros(t.shape)])
def test_a_new_tensor_that_is_written_ties_a_trace_to_no_gradient(make):
    def forward(x):
        out = make(x)
        out[0] = x[1] * 2
        return out

    trace = st.trace(forward, (torch.rand(3, 4, requires_grad=True),))
    x = torch.rand(3, 4)
    assert torch.equal(trace(x), forward(x))
    with torch.no_grad():
        assert not trace(x.requires_grad_()).requires_grad
