"""Small programs of a `torch.autograd.Function`, with what else a forward does beside it, against eager.

y = hooked(x * p)                 # or a derivative, or nothing
z = Twice.apply(x.sin())          # whose backward is not that of its ops
return z * p                      # or a derivative of z, a write to it, ...
"""

import itertools

import pytest
import torch
from torch import nn
from torch.autograd.function import once_differentiable

import scopetrace as st


class Plain(torch.autograd.Function):
    @staticmethod
    def forward(ctx, t):
        return t * 2

    @staticmethod
    def backward(ctx, g):
        return g * 3


class Dirty(torch.autograd.Function):
    @staticmethod
    def forward(ctx, t):
        ctx.mark_dirty(t)
        return t.mul_(2)

    @staticmethod
    def backward(ctx, g):
        return g * 3


class DirtyAdd(torch.autograd.Function):
    @staticmethod
    def forward(ctx, t):
        ctx.mark_dirty(t)
        t.add_(1)
        return t

    @staticmethod
    def backward(ctx, g):
        return g * 3


class View(torch.autograd.Function):
    @staticmethod
    def forward(ctx, t):
        return t.view(-1)

    @staticmethod
    def backward(ctx, g):
        return g.view(4) * 3


class Same(torch.autograd.Function):
    @staticmethod
    def forward(ctx, t):
        return t

    @staticmethod
    def backward(ctx, g):
        return g * 3


class ViewAs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, t):
        return t.view_as(t)

    @staticmethod
    def backward(ctx, g):
        return g * 3


class Saves(torch.autograd.Function):
    @staticmethod
    def forward(ctx, t):
        y = t.exp()
        ctx.save_for_backward(t, y)
        return y

    @staticmethod
    def backward(ctx, g):
        t, y = ctx.saved_tensors
        return g * y * 3 + t * 0


class Two(torch.autograd.Function):
    @staticmethod
    def forward(ctx, t):
        return t * 2, t.sin()

    @staticmethod
    def backward(ctx, g, h):
        return g * 3 + h * 5


class NonDiff(torch.autograd.Function):
    @staticmethod
    def forward(ctx, t):
        s = t.sign()
        ctx.mark_non_differentiable(s)
        return t * 2, s

    @staticmethod
    def backward(ctx, g, _):
        return g * 3


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx, t):
        return t * 2

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        return g * 3


class NoneGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx, t):
        return t * 2

    @staticmethod
    def backward(ctx, g):
        return None


class WritesInside(torch.autograd.Function):
    @staticmethod
    def forward(ctx, t):
        y = t.clone()
        y.mul_(2)
        y[0] = 1
        return y

    @staticmethod
    def backward(ctx, g):
        h = g.clone()
        h.mul_(3)
        return h


class Ste(torch.autograd.Function):
    @staticmethod
    def forward(ctx, t):
        return t.round()

    @staticmethod
    def backward(ctx, g):
        return g


class Enabled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, t):
        with torch.enable_grad():
            d = t.detach().requires_grad_()
            y = d.sin()
        ctx.save_for_backward(d, y)
        return y.detach()

    @staticmethod
    def backward(ctx, g):
        d, y = ctx.saved_tensors
        return torch.autograd.grad(y, d, g, retain_graph=True)[0] * 3


def hooked(y):
    y.register_hook(lambda g: g * 2)
    return y


def without_grad(run):
    with torch.no_grad():
        return run()


def grad(y, by, **options):
    return torch.autograd.grad(y.sum(), by, **options)[0]


FUNCTIONS = [
    Plain,
    Dirty,
    DirtyAdd,
    View,
    Same,
    ViewAs,
    Saves,
    Two,
    NonDiff,
    Once,
    NoneGrad,
    WritesInside,
    Ste,
    Enabled,
]
BEFORE = {
    "nothing": lambda x, p: None,
    "a hook": lambda x, p: hooked(x * p),
    "a derivative": lambda x, p: grad(x * p, p),
    "a derivative with a hook": lambda x, p: grad(hooked(x * p), p),
    "a derivative with a history": lambda x, p: grad(x * p * p, p, create_graph=True),
    "torch.func": lambda x, p: torch.func.grad(lambda q: (q * q).sum())(x),
    "no_grad": lambda x, p: without_grad(lambda: x * p),
}
ARGUMENTS = {
    "product": lambda x, p, b: x * p,
    "sine": lambda x, p, b: x.sin() * 1,
    "view": lambda x, p, b: (x * p)[:],
    "of before": lambda x, p, b: x + 0 if b is None else b * x * p,
    "leaf": lambda x, p, b: x,
}
AFTER = {
    "itself": lambda z, x, p: z,
    "product": lambda z, x, p: z * p,
    "derivative with a history": lambda z, x, p: grad(z, x, create_graph=True) * p,
    "derivative": lambda z, x, p: grad(z, x) + x,
    "write": lambda z, x, p: (z.mul_(2), z)[1],
    "write under no_grad": lambda z, x, p: (without_grad(lambda: z.add_(1)), z)[1],
    "detached": lambda z, x, p: z.detach() * x,
    "derivative and itself": lambda z, x, p: grad(z, x, create_graph=True) + z,
}


class Net(nn.Module):
    def __init__(self, function, before, argument, after):
        super().__init__()
        self.p = nn.Parameter(torch.linspace(1, 2, 4))
        self.parts = function, BEFORE[before], ARGUMENTS[argument], AFTER[after]

    def forward(self, x):
        function, before, argument, after = self.parts
        z = function.apply(argument(x, self.p, before(x, self.p)))
        return after(z[0] + z[1] if isinstance(z, tuple) else z, x, self.p)


def seen(run, net):
    """The result, gradients of the input and the parameter, and the input."""
    x = torch.linspace(-1, 1, 4).requires_grad_()
    y = run(x)
    weighted = (y * torch.arange(1.0, 5)).sum()
    grads = torch.autograd.grad(weighted, [x, net.p], allow_unused=True) if y.requires_grad else (None, None)
    return y.detach(), *grads, x.detach()


CASES = list(itertools.product(FUNCTIONS, BEFORE, ARGUMENTS, AFTER))
EVERY = 47


def check(case):
    """Whether it was traced, and did what eager does; False where it is refused, or eager raises."""
    net = Net(*case)
    try:
        expected = seen(net, net)
    except (RuntimeError, TypeError):
        return False
    try:
        trace = st.trace(net, (torch.linspace(-1, 1, 4).requires_grad_(),))
        found = seen(trace, net)
    except st.errors.ScopetraceError:
        return False
    torch.testing.assert_close(found, expected, msg=str(case))
    return True


@pytest.mark.parametrize("start", [0, *(pytest.param(i, marks=pytest.mark.slow) for i in range(1, EVERY))])
def test_a_function_does_what_it_does_in_eager_or_is_refused(start):
    right = [check(case) for case in CASES[start::EVERY]]
    assert sum(right) > len(right) / 4


class Split(torch.autograd.Function):
    """Its backward asks for numbers of a tensor that the forward has made."""

    @staticmethod
    def forward(ctx, x, sizes):
        ctx.save_for_backward(sizes + 1)
        return x * 2

    @staticmethod
    def backward(ctx, g):
        (sizes,) = ctx.saved_tensors
        first, second = g.split(sizes.tolist())
        return torch.cat([first * 3, second * 5]), None


def test_backward_reads_numbers_of_what_forward_saved():
    x = torch.ones(5, requires_grad=True)
    tr = st.trace(lambda x, sizes: Split.apply(x, sizes), (x, torch.tensor([0, 3])))
    for sizes in ([0, 3], [2, 1]):
        args = x, torch.tensor(sizes)
        ours, theirs = (torch.autograd.grad(f(*args).sum(), x)[0] for f in (tr, Split.apply))
        assert torch.equal(ours, theirs), f"{sizes}: {ours} for {theirs}"


def test_a_specialized_backward_has_no_numbers_of_what_forward_saved():
    class Shown(Split):
        @staticmethod
        def backward(ctx, g):
            return g * int(ctx.saved_tensors[0][0]), None

    def forward(x):
        return Shown.apply(x, x.long()[:2])

    x = torch.ones(5, requires_grad=True)
    y = st.trace(forward, (x,), specialize=True)(x)
    with pytest.raises(st.errors.UnsupportedOpError, match="made in the forward of a torch"):
        y.sum().backward()


VIEWS_OF_WRITTEN = {
    "of a tensor": lambda h, other: ViewAs.apply(h.relu_()),
    "of a part": lambda h, other: (h[:, 0].zero_(), ViewAs.apply(h[:, 1:]) * 2),
    "of a view of it": lambda h, other: ViewAs.apply(ViewAs.apply(h.relu_())),
    "before a write to another": lambda h, other: (ViewAs.apply(h.relu_()), other.relu_()),
    "and the tensor": lambda h, other: (h.relu_(), ViewAs.apply(h)[:, 1:]),
}


@pytest.mark.parametrize("is_step", [False, True])
@pytest.mark.parametrize("name", VIEWS_OF_WRITTEN)
def test_a_view_of_what_was_written(name, is_step):
    """As a gradient reversal after `nn.ReLU(inplace=True)`: the view has what was written before."""
    layer, twin = nn.Linear(4, 4), nn.Linear(4, 4)
    twin.load_state_dict(layer.state_dict())

    def run(layer, x):
        layer.zero_grad()
        results = VIEWS_OF_WRITTEN[name](layer(x), layer(x * 2))
        if is_step:
            sum(t.sum() for t in torch.utils._pytree.tree_leaves(results)).backward()
        return results

    x = torch.rand(3, 4)
    found, wanted = st.trace(lambda x: run(layer, x), (x,))(x), run(twin, x)
    torch.testing.assert_close(found, wanted)
    if not is_step:
        for results in (found, wanted):
            sum(t.sum() for t in torch.utils._pytree.tree_leaves(results)).backward()
    torch.testing.assert_close(layer.weight.grad, twin.weight.grad)


def test_a_view_of_what_is_written_later_is_refused():
    """Eager refuses its gradient."""

    def forward(x):
        h = x * 2
        result = ViewAs.apply(h)
        h.zero_()
        return result

    with pytest.raises(st.errors.FunctionalizationError, match="a view of memory that is written after it"):
        st.trace(forward, (torch.rand(3, requires_grad=True),))
