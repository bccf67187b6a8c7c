"""Writes over all that a tensor had, and through tensors that autograd takes for no views: whose gradients are left.

t = x * 2          traced with an input that does not require grad, and called with one that does:
t[0].copy_(c)      eager has gradients of zero for x where all of t was written over, the rest of its gradients
return t[0]        where a part was, and none where the write was to memory that autograd takes for another tensor
"""

import collections
import contextlib
import functools
import itertools

import pytest
import torch

import scopetrace as st

KINDS = ("plain", "leaf", "derived")


def given(kind, shape, seed):
    t = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return t if kind == "plain" else t.requires_grad_() * 1 if kind == "derived" else t.requires_grad_()


def program(lines, names):
    space = {"torch": torch}
    body = "\n".join(f"    {line}" for line in (*lines, f"return {names}"))
    exec(f"def forward(x, p):\n{body}\n", space)
    return space["forward"]


def outcome(run, kinds, grad):
    """What a call gives, whether it requires grad, what lies in one memory, and gradients of each result."""
    x, p = given(kinds[0], (2, 3), 0), given(kinds[1], (3,), 1)
    with torch.set_grad_enabled(grad):
        found = run(x, p)
    found = found if isinstance(found, tuple) else (found,)
    facts = [(t.requires_grad, [t.data_ptr() == other.data_ptr() for other in found]) for t in found]
    sources = [t for t in (x, p) if t.requires_grad]
    for t in found:
        if t.requires_grad and t.grad_fn is not None:
            weights = torch.arange(1.0, t.numel() + 1).view(t.shape)
            facts.append(torch.autograd.grad((t * weights).sum(), sources, retain_graph=True, allow_unused=True))
    return facts, [t.detach().clone() for t in (*found, x, p)]


def is_same(a, b):
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(is_same, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) else a == b


def verdicts(forward, traced=None):
    """How often a trace with inputs of some kinds does as eager in calls with others, and how often it is refused."""
    count = collections.Counter()
    calls = [*itertools.product(itertools.product(KINDS, repeat=2), (True, False))]

    @functools.cache
    def in_eager(kinds, grad):
        with contextlib.suppress(RuntimeError):
            return outcome(forward, kinds, grad)

    for kinds, grad in calls if traced is None else traced:
        try:
            with torch.set_grad_enabled(grad):
                trace = st.trace(forward, (given(kinds[0], (2, 3), 0), given(kinds[1], (3,), 1)))
        except (st.errors.ScopetraceError, RuntimeError):  # torch's errors are those of eager
            count["no trace"] += 1
            continue
        for other, with_grad in calls:
            expected = in_eager(other, with_grad)
            if expected is None:
                continue  # eager refuses it
            try:
                got = outcome(trace, other, with_grad)
            except st.errors.ScopetraceError:
                count["as traced, refused" if (other, with_grad) == (kinds, grad) else "refused"] += 1
                continue
            same = is_same(expected, got)
            count["right" if same else "wrong"] += 1
            if not same:
                count[f"traced {kinds} {grad}, called {other} {with_grad}"] += 1
    return count


PLAIN = [(("plain", "plain"), True), (("plain", "plain"), False), (("plain", "leaf"), True)]
MADE = ("x * 2", "x.clone()", "torch.cat([x, x])[:2]", "x.detach() + x")
COVERED = {
    "whole": ("t.copy_(x.detach() + 1)",),
    "row": ("t[0].copy_(torch.ones(3))",),
    "rows": ("t[0].zero_()", "t[1].fill_(1)"),
    "flat": ("t.view(-1).copy_(torch.arange(6.))",),
    "turned": ("a = t.t()", "a.zero_()"),
    "with_p": ("t[0].copy_(p)",),
    "whole_with_p": ("t.copy_(p)",),
    "before": ("a = t[1]", "t.zero_()", "a.add_(p)"),
}
RESULTS = ("t", "t[0]", "(t, t[0])", "t[1:] * 3")
EVERY = [pytest.param(2, id="some"), pytest.param(1, id="all", marks=pytest.mark.slow)]
"""One in so many of the results, which are others for the next write."""


@pytest.mark.sample(4)
@pytest.mark.parametrize("every", EVERY)
@pytest.mark.parametrize("made", MADE)
@pytest.mark.parametrize("covered", COVERED)
def test_what_is_written_over_has_gradients_of_zero(made, covered, every):
    for result in RESULTS[(MADE.index(made) + [*COVERED].index(covered)) % every :: every]:
        found = verdicts(program((f"t = {made}", *COVERED[covered]), result), PLAIN)
        assert not found["wrong"], (result, found)
        assert not found["as traced, refused"], (result, found)
        assert not found["no trace"]
        assert found["right"] >= 10


APART = (
    "x.view(torch.float32)",
    "(x * 2).view(torch.float32)",
    "(x * 2).view(torch.int32).view(torch.float32)",
    "x.double().view(torch.float64)[:, :3].float()",
    "torch.ops.aten._unsafe_view(x * 2, [2, 3])",
    "torch.ops.aten._unsafe_view(x * 2, [3, 2]).view(2, 3)",
    "(x * 2).detach()",
)
WRITES = ("t.copy_(p)", "t[0].copy_(p)", "t.zero_()", "t.mul_(2)", "t[1:].add_(p)")
LATER = ("t", "(t, t[0])", "(t.view(-1), t)", "(t * 2, t.t())")


@pytest.mark.sample(4)
@pytest.mark.parametrize("every", EVERY)
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("made", APART)
def test_tensors_that_autograd_takes_for_no_views(made, write, every):
    for result in LATER[(APART.index(made) + WRITES.index(write)) % every :: every]:
        found = verdicts(program((f"t = {made}", write), result), [*PLAIN, (("derived", "leaf"), True)])
        assert not found["wrong"], (result, found)
        assert not found["as traced, refused"], (result, found)


BLOCKS = {
    "none": contextlib.nullcontext,
    "grad": torch.enable_grad,
    "normal": lambda: torch.inference_mode(False),
    "off": torch.no_grad,
}


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("write", ["y[0] = 1", "y.mul_(x[1:])", "x[1:].add_(1)", "x.mul_(2)"])
def test_parts_of_an_input_beside_one_that_it_was_detached_from(block, write):
    def forward(x, y):
        with BLOCKS[block]():
            exec(write, {"x": x, "y": y})
        return x * 2, y * 3

    def run(fn, kind, grad):
        x = given(kind, (2, 3), 0)
        with torch.set_grad_enabled(grad):
            found = fn(x, x.detach()[1:])
        gradients = [torch.autograd.grad(t.sum(), x, retain_graph=True)[0] for t in found if t.requires_grad]
        return [t.requires_grad for t in found], gradients, [t.detach() for t in (*found, x)]

    count = collections.Counter()
    for kind, grad in itertools.product(KINDS, (False, True)):
        x = given(kind, (2, 3), 0)
        try:
            with torch.set_grad_enabled(grad):
                trace = st.trace(forward, (x, x.detach()[1:]))
        except (st.errors.ScopetraceError, RuntimeError):  # torch's errors are those of eager
            count["no trace"] += 1
            continue
        for other, with_grad in itertools.product(KINDS, (False, True)):
            try:
                expected = run(forward, other, with_grad)
            except RuntimeError:
                continue
            try:
                count["right" if is_same(expected, run(trace, other, with_grad)) else "wrong"] += 1
            except st.errors.ScopetraceError:
                count["refused"] += 1
    assert not count["wrong"]
    assert count["right"] >= 2, count


def test_the_error_names_the_write():
    def forward(x, counter):
        counter.add_(1)
        t = x * 2
        t[0].copy_(torch.ones(3))
        return t[0]

    trace = st.trace(forward, (torch.randn(2, 3), torch.zeros(())))
    with pytest.raises(st.errors.InputMismatchError, match=r"x\.requires_grad, .* t\[0\]\.copy_\(torch\.ones\(3\)\)"):
        trace(torch.randn(2, 3, requires_grad=True), torch.zeros(()))
