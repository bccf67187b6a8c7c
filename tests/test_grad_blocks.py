"""Views, results and writes of an input in blocks that switch autograd, traced and called in each grad mode.

with torch.enable_grad():      traced under no_grad with an input that does not require grad,
    t = x * 2                  and called under no_grad with one that does: `t` requires grad
"""

import contextlib
import itertools

import pytest
import torch

import scopetrace as st

MODES = {"on": torch.enable_grad, "off": torch.no_grad, "none": contextlib.nullcontext}
MADE = {
    "view": lambda x: x.t(),
    "row": lambda x: x[1:],
    "part": lambda x: x.chunk(2)[1],
    "product": lambda x: x * 2,
    "copy": lambda x: x.clone(),
    "detached": lambda x: x.detach(),
    "new": lambda x: torch.zeros_like(x).copy_(x),
    "same": lambda x: x.to(x.dtype),
    "data": lambda x: x.data,
}
WRITES = {
    "nothing": lambda x: None,
    "mul_": lambda x: x.mul_(2),
    "copy_": lambda x: x.copy_(x.sin()),
    "row": lambda x: x[0].mul_(3),
    "view": lambda x: x.view(-1).sin_(),
    "twice": lambda x: x.mul_(2).add_(1),
    "data": lambda x: x.data.mul_(2),
}
RESULTS = {
    "made": lambda x, t: t,
    "given": lambda x, t: x,
    "view of given": lambda x, t: x[1:],
    "both": lambda x, t: (t, x),
    "product": lambda x, t: t.sum() * x,
}
FLAGS = (True, False)
CASES = [*itertools.product(MADE, MODES, WRITES, MODES, RESULTS)]


def forward_of(made, first, written, second, result):
    def forward(x):
        with MODES[first]():
            t = MADE[made](x)
            if second == "none":
                WRITES[written](x)
        with MODES[second]():
            if second != "none":
                WRITES[written](x)
        return RESULTS[result](x, t)

    return forward


def outcome(run, grad, mode, start):
    """What a call gives, what of it requires grad, and the gradient of a leaf before it; None for an error."""
    leaf = (torch.linspace(-1, 1, 16).view(4, 4) + start).requires_grad_(grad)
    x = leaf * 1
    try:
        with torch.set_grad_enabled(mode):
            out = run(x)
        found = [x, *(out if isinstance(out, tuple) else (out,))]
        facts = [(t.requires_grad, t.is_leaf) for t in found], [t.detach().clone() for t in found]
        losses = [t.sin().sum() for t in found if t.requires_grad]
        if losses:
            sum(losses).backward()
    except RuntimeError:
        return None
    return *facts, leaf.grad


def verdict(case, grad, mode):
    """Traces a program in one state and compares it with eager in all of them. Gives the number of equal calls."""
    forward, right = forward_of(*case), 0
    if outcome(forward, grad, mode, 0.0) is None:
        return 0
    x = torch.linspace(-1, 1, 16).view(4, 4).requires_grad_(grad) * 1
    try:
        with torch.set_grad_enabled(mode):
            trace = st.trace(forward, (x,))
    except st.errors.TraceError:
        return 0
    for given, now in itertools.product(FLAGS, FLAGS):
        wanted = outcome(forward, given, now, 0.3)
        if wanted is None:
            continue
        try:
            got = outcome(trace, given, now, 0.3)
        except (st.errors.InputMismatchError, st.errors.StateMismatchError):
            assert (given, now) != (grad, mode)
            continue
        assert got is not None
        assert got[0] == wanted[0], (case, grad, mode, given, now)
        torch.testing.assert_close(
            got[1:], wanted[1:], msg=lambda m, at=(given, now): f"{case} {grad} {mode} {at}: {m}"
        )
        right += 1
    return right


def test_an_input_in_blocks_that_switch_autograd():
    right = 0
    for i, case in enumerate(CASES[::11]):
        grad, mode = divmod(i % 4, 2)
        right += verdict(case, bool(grad), bool(mode))
    assert right > 120


@pytest.mark.slow
@pytest.mark.parametrize("made", MADE)
def test_every_input_in_blocks_that_switch_autograd(made):
    for case, grad, mode in itertools.product(CASES, FLAGS, FLAGS):
        if case[0] == made:
            verdict(case, grad, mode)
