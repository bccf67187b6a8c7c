"""`torch.autograd.Function` under autograd: its own backward runs in a call of the trace."""

import copy
import pickle

import pytest
import torch
from compare import assert_like_eager
from torch import nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.export import Dim

import scopetrace as st

X = torch.linspace(-1, 2, 12).view(3, 4)
W = torch.linspace(1, 2, 4)


class Round(Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, grad):
        return grad


class Reverse(Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad.neg() * ctx.factor, None


class Same(Function):
    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad * 3


class Exp(Function):
    @staticmethod
    def forward(ctx, x):
        y = x.exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        return grad * y


class Linear(Function):
    @staticmethod
    def forward(ctx, x, weight, bias=None):
        ctx.save_for_backward(x, weight, bias)
        return x @ weight.t() if bias is None else x @ weight.t() + bias

    @staticmethod
    def backward(ctx, grad):
        x, weight, bias = ctx.saved_tensors
        assert ctx.needs_input_grad[1]
        gx = grad @ weight if ctx.needs_input_grad[0] else None
        gb = grad.sum(0) if bias is not None and ctx.needs_input_grad[2] else None
        return gx, grad.t() @ x, gb


class Sorted(Function):
    @staticmethod
    def forward(ctx, x):
        values, indices = x.sort(-1)
        ctx.mark_non_differentiable(indices)
        ctx.save_for_backward(indices)
        return values, indices, "sorted"

    @staticmethod
    def backward(ctx, grad, _, name):
        assert name is None
        (indices,) = ctx.saved_tensors
        return torch.zeros_like(grad).scatter(-1, indices, grad)


class Two(Function):
    @staticmethod
    def forward(ctx, x, y):
        ctx.n = x.shape[0]
        ctx.x = x
        return x * y, x + y

    @staticmethod
    def backward(ctx, gp, gs):
        return gp * 2 + gs, gp * ctx.x / ctx.n + gs


class Setup(Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x, k=2.0):
        return (x * k).sin()

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, ctx.k = inputs
        ctx.save_for_backward(x, output)

    @staticmethod
    def backward(ctx, grad):
        x, y = ctx.saved_tensors
        return grad * (x * ctx.k).cos() * ctx.k + 0 * y, None


class InPlaceInside(Function):
    @staticmethod
    def forward(ctx, x):
        y = x.clone()
        y[0] = 2
        y.mul_(3).relu_()
        ctx.mask = y > 0
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        grad = grad.clone()
        grad[~ctx.mask] = 0
        grad[0].zero_()
        return grad.mul_(3)


class Closed(Function):
    @staticmethod
    def forward(ctx, x):
        return x * W

    @staticmethod
    def backward(ctx, grad):
        return grad * W * 5


class NoneGradients(Function):
    @staticmethod
    def forward(ctx, x, y):
        ctx.set_materialize_grads(False)
        return x * y

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Unused(Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2, x * 3

    @staticmethod
    def backward(ctx, a, b):
        return a * 2 + b * 30 + (b + 1) * 0


class Nested(Function):
    @staticmethod
    def forward(ctx, x):
        return Exp.apply(x) + Round.apply(x)

    @staticmethod
    def backward(ctx, grad):
        return Round.apply(grad) * 2


class Dropped(Function):
    @staticmethod
    def forward(ctx, x, p):
        mask = torch.rand_like(x) > p
        ctx.save_for_backward(mask)
        return x * mask

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0], None


class ByVjp(Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def vjp(ctx, grad):
        return grad * 7


class Linear2(Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x, weight):
        return weight @ x

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight, torch.outer(grad, x)


W1 = torch.linspace(-1, 1, 20).view(5, 4).requires_grad_()
B1 = torch.linspace(-1, 1, 5).requires_grad_()

PROGRAMS = {
    "straight-through": lambda x: Round.apply(x * 2) * x,
    "reversal": lambda x: Reverse.apply(x * 2, 0.5).sin(),
    "an input itself": lambda x: Same.apply(x) * x,
    "an intermediate itself": lambda x: Same.apply(x * 1).exp(),
    "saved result": lambda x: Exp.apply(x) + x,
    "linear": lambda x: Linear.apply(x, W1, B1),
    "linear without a bias": lambda x: Linear.apply(x, W1),
    "non-differentiable": lambda x: (lambda v, i, _: v * i)(*Sorted.apply(x)),
    "two results": lambda x: (lambda a, b: a + b)(*Two.apply(x, x * 2)),
    "one of two results": lambda x: Two.apply(x, x * 2)[1],
    "one tensor twice": lambda x: Two.apply(x, x)[0],
    "setup_context": lambda x: Setup.apply(x),
    "setup_context by keyword": lambda x: Setup.apply(x, k=3.0),
    "in-place ops inside": lambda x: InPlaceInside.apply(x * 2),
    "closure": lambda x: Closed.apply(x),
    "None for a gradient": lambda x: NoneGradients.apply(x, x * 2) + x,
    "a result that is not used": lambda x: Unused.apply(x)[0],
    "nested": lambda x: Nested.apply(x),
    "random": lambda x: Dropped.apply(x, 0.5),
    "vjp": lambda x: ByVjp.apply(x),
    "in vmap": lambda x: torch.vmap(Setup.apply)(x),
    "in vmap, of some arguments": lambda x: torch.vmap(lambda r, k: Linear2.apply(r, k), (0, None))(x, W1),
    "twice": lambda x: Exp.apply(Exp.apply(x)),
    "written afterwards": lambda x: Round.apply(x).mul_(2).relu_(),
    "under no_grad inside": lambda x: x * torch.no_grad()(Exp.apply)(x),
    "in a branch": lambda x: torch.cond(x.sum() > 0, lambda x: Exp.apply(x) * 2, lambda x: Round.apply(x), (x,)),
}


def outcome(f, x):
    """Result and gradients."""
    x = x.clone().requires_grad_()
    W1.grad = B1.grad = None
    torch.manual_seed(0)
    y = f(x)
    (y * torch.linspace(-2, 3, y.numel()).view_as(y)).sum().backward()
    return y.detach(), x.grad, W1.grad, B1.grad


@pytest.mark.sample(2)
@pytest.mark.parametrize("functional", [True, False])
@pytest.mark.parametrize("name", PROGRAMS)
def test_values_and_gradients_are_those_of_eager(name, functional):
    f = PROGRAMS[name]
    tr = st.trace(f, (X.clone().requires_grad_(),), functional=functional)
    tr.lint()
    for x in (X, -X, X * 3):
        torch.testing.assert_close(outcome(tr, x), outcome(f, x))
    assert_like_eager(f, tr, (X.clone().requires_grad_(),))


def graded():
    return X.clone().requires_grad_()


def test_the_text_has_both_bodies():
    tr = st.trace(PROGRAMS["saved result"], (graded(),))
    assert str(tr).splitlines()[2:] == [
        "  %getitem: f32[3, 4], = torch.ops.higher_order.autograd_function_apply(fwd_body_0, bwd_body_0, %x, "
        "non_differentiable_idx=[], saved_for_backward_idx=[0])",
        "    fwd_body_0(%x: f32[3, 4]) -> ((%exp: f32[3, 4],), (%exp: f32[3, 4],))",
        "      %exp: f32[3, 4] = aten.exp(%x)",
        "    bwd_body_0(%grad_0: f32[3, 4], %arg1: f32[3, 4]) -> (%mul: f32[3, 4],)",
        "      %mul: f32[3, 4] = aten.mul.Tensor(%grad_0, %arg1)",
        "  %add: f32[3, 4] = aten.add.Tensor(%getitem, %x)",
    ]
    body = tr.graph_module.fwd_body_0.graph
    assert [str(tr.scope_of(n)) for n in body.nodes if n.name == "exp"] == ["function/Exp/forward"]


def test_an_apply_that_was_bound_before():
    """Since torch 2.14 it is C++ that nobody sees: the class is asked for its forward."""
    f = lambda x, apply=Exp.apply: apply(x)  # noqa: E731
    torch.testing.assert_close(outcome(st.trace(f, (graded(),)), X), outcome(f, X))
    assert "forward" not in vars(torch.autograd.function.FunctionMeta)
    g = lambda x, apply=Dirty.apply: apply(x * 1)  # noqa: E731
    if torch.__version__ < torch.torch_version.TorchVersion("2.14"):
        torch.testing.assert_close(outcome(st.trace(g, (graded(),)), X), outcome(g, X))
    else:
        with pytest.raises(st.errors.UnsupportedOpError, match="bound before the trace"):
            st.trace(g, (graded(),))


def test_derivatives_of_derivatives():
    for name in ("saved result", "linear", "setup_context", "two results", "closure"):
        f = PROGRAMS[name]
        tr = st.trace(f, (graded(),))
        found = []
        for g in (f, tr):
            x = graded()
            (first,) = torch.autograd.grad(g(x).square().sum(), x, create_graph=True)
            found.append(torch.autograd.grad(first.square().sum(), x)[0])
        torch.testing.assert_close(found[1], found[0])


def test_files_pickles_and_copies(tmp_path):
    f = PROGRAMS["linear"]
    tr = st.trace(f, (graded(),))
    tr.save(tmp_path / "linear.st")
    loaded = st.load(tmp_path / "linear.st")
    loaded.lint()
    assert str(loaded).splitlines()[2:] == str(tr).splitlines()[2:]
    expected = outcome(f, X)
    for gm in (loaded, copy.deepcopy(tr), pickle.loads(pickle.dumps(tr))):
        found = outcome(gm, X)
        torch.testing.assert_close(found[:2], expected[:2])


def test_dynamic_sizes():
    for name in ("linear", "two results", "non-differentiable", "in-place ops inside"):
        f = PROGRAMS[name]
        tr = st.trace(f, (graded(),), dynamic_shapes=({0: Dim("n", min=2)},))
        tr.lint()
        for n in (2, 3, 7):
            x = torch.randn(n, 4)
            torch.testing.assert_close(outcome(tr, x), outcome(f, x))


def test_decompositions_outlining_and_tracing_again():
    for name in ("linear", "non-differentiable", "saved result", "reversal", "in-place ops inside"):
        f = PROGRAMS[name]
        tr = st.trace(f, (graded(),))
        for other in (tr.decompose(), st.trace(tr.graph_module, (graded(),)), st.trace(tr, (graded(),))):
            other.lint()
            torch.testing.assert_close(outcome(lambda x, g=other: _one(g(x)), X), outcome(f, X))


def _one(x):
    return x[0] if isinstance(x, (tuple, list)) else x


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.b(Round.apply(self.a(x)).relu())


def gradients_of(f, model, x):
    x = x.clone().requires_grad_()
    return torch.autograd.grad(f(x).square().sum(), [x, *model.parameters()])


def test_a_model_outlined_and_exported():
    net = Net()
    tr = st.trace(nn.Sequential(net, net), (graded(),))
    expected = gradients_of(tr.model, net, X)
    outlined = tr.outline(Net)
    outlined.lint()
    program = tr.to_exported_program()
    assert "autograd_function_apply" in str(program.graph)
    for f in (tr, outlined, program.module(), torch.compile(tr.graph_module, backend="aot_eager")):
        found = gradients_of(lambda x, f=f: _one(f(x)), net, X)
        torch.testing.assert_close(found, expected)


def test_a_call_whose_arguments_require_other_gradients_is_refused():
    net = Net()
    net.a.weight.requires_grad_(False)
    tr = st.trace(lambda x: Linear.apply(x, net.b.weight), (X,))
    with pytest.raises(st.errors.InputMismatchError, match="requires_grad"):
        tr(graded())


class Writes(Function):
    @staticmethod
    def forward(ctx, x):
        W.add_(0)
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad


class Dirty(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


class Adds(Function):
    """Writes to an argument whose memory another one may share."""

    @staticmethod
    def forward(ctx, x, a, b):
        a.add_(1)
        return x * b

    @staticmethod
    def backward(ctx, grad):
        return grad, None, None


class Returned(Function):
    @staticmethod
    def forward(ctx, x):
        return x.add_(1)

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


class Shifted(Function):
    """As the sparsemax of TabNet: shifts its argument in place, and says nothing of it."""

    @staticmethod
    def forward(ctx, x):
        x -= x.max(-1, keepdim=True)[0]
        y = x.exp()
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx, grad):
        x, y = ctx.saved_tensors
        return grad * y * x


class DirtyOfTwo(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        x[0] = 1
        sign = x.sign()
        ctx.mark_non_differentiable(sign)
        return sign, x.sigmoid_(), x * 2

    @staticmethod
    def backward(ctx, sign, a, b):
        return a * 5 + b


class Short(Function):
    @staticmethod
    def forward(ctx, x, y):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad


class Many(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        return x * 2, x * 3

    @staticmethod
    def backward(ctx, *grads):
        return grads[0]


class Branches(Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad if grad.sum() > 0 else -grad


@pytest.mark.parametrize(
    "f, error, message",
    [
        (lambda x: Writes.apply(x), st.errors.UnsupportedOpError, "writes to a tensor from outside"),
        (lambda x: Adds.apply(x, *[torch.zeros(3, 4)] * 2), st.errors.UnsupportedOpError, "writes to a tensor from"),
        (lambda x: Adds.apply(x, (y := x * 1).detach(), y), st.errors.UnsupportedOpError, "writes to a tensor from"),
        (lambda x: Returned.apply(x * 1), st.errors.UnsupportedOpError, "writes to a tensor from outside"),
        (lambda x: Many.apply(x)[0], st.errors.UnsupportedOpError, "has 2 differentiable results, and asks for None"),
        (
            lambda x: torch.autograd.grad(Setup.apply(x).sum(), x, create_graph=True)[0],
            st.errors.UnsupportedOpError,
            "the forward differentiates, and has autograd_function_apply",
        ),
    ],
)
def test_what_is_refused(f, error, message):
    with pytest.raises(error, match=message):
        st.trace(lambda x: f(x), (graded(),))
    with torch.no_grad():
        if "differentiates" not in message:
            st.trace(lambda x: f(x), (X,))


class Recomputes(Function):
    """As the checkpoint of diffusion models that is older than torch's: backward runs the block again."""

    @staticmethod
    def forward(ctx, x, block, *weights):
        ctx.block, ctx.weights = block, weights
        ctx.save_for_backward(x)
        with torch.no_grad():
            return block(x)

    @staticmethod
    def backward(ctx, grad):
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            out = ctx.block(x)
        x_grad, *grads = torch.autograd.grad(out, [x, *ctx.weights], grad)
        return x_grad, None, *grads


class Seeds(Recomputes):
    @staticmethod
    def backward(ctx, grad):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return Recomputes.backward(ctx, grad)


@pytest.mark.parametrize(
    "f, reason",
    [
        (lambda net, x: Recomputes.apply(x, net.a, *net.a.parameters()), "it differentiates by itself; trace the step"),
        (lambda net, x: Seeds.apply(x, net.a, *net.a.parameters()), "seeds torch's random generator"),
        (lambda net, x: Branches.apply(net.a(x)), "data-dependent"),
        (lambda net, x: Short.apply(net.a(x), x), "1 gradients for 2 arguments"),
    ],
)
def test_a_backward_that_no_graph_has(f, reason):
    """The forward is right, as in a program of torch.export; gradients through it are refused where they are asked."""
    net = Net()
    tr = st.trace(lambda x: f(net, x), (X,))
    assert torch.equal(tr(X + 1), f(net, X + 1))
    with pytest.raises(st.errors.UnsupportedOpError, match=f"no gradient through .*{reason}"):
        tr(X).sum().backward()
    assert torch.equal(tr.to_exported_program().module()(X + 2), f(net, X + 2))
    assert torch.equal(tr.decompose()(X + 2), f(net, X + 2))


class UnderAutograd(Function):
    @staticmethod
    def forward(ctx, x):
        with torch.enable_grad():
            return x * 2

    @staticmethod
    def backward(ctx, grad):
        with torch.enable_grad():
            return grad * 2


def test_an_exported_program_leaves_autograd_as_it_was():
    net = Net()
    tr = st.trace(lambda x: UnderAutograd.apply(net.a(x)), (X,))
    tr.to_exported_program()
    assert torch.is_grad_enabled()


def last(out):
    return out if isinstance(out, torch.Tensor) else out[-1]


def then_read(function, y):
    return last(function.apply(y)).sum() + (y * 3).sum()


WRITES = {
    "nothing after it": lambda function, x: last(function.apply(x * W)),
    "read after it": lambda function, x: then_read(function, x * W),
    "read before it": lambda function, x: (lambda y: (y + 1).sum() * then_read(function, y))(x * W),
    "of a view": lambda function, x: (lambda y: then_read(function, y.view(x.shape)) + y.sum())((x * W).reshape(-1)),
    "a view read after it": lambda function, x: (lambda y, v: then_read(function, y) + v.sum())(*with_view(x * W)),
    "twice": lambda function, x: (lambda y: then_read(function, y) + then_read(function, y))(x * W),
    "an input": lambda function, x: then_read(function, x),
}


def with_view(y):
    return y, y[0]


@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("function", [Shifted, Dirty, DirtyOfTwo])
def test_writes_to_an_argument(function, name):
    """The body writes to a copy; the argument gets its data after the op, with its history for what is marked dirty."""

    def values(run):
        x = X.clone().requires_grad_()
        out = run(x)
        return out.detach(), torch.autograd.grad(out.sum(), x)[0]

    def f(x):
        return WRITES[name](function, x)

    try:
        expected = values(f)
    except RuntimeError as error:  # a leaf, a view of several results, what backward needs: autograd refuses these
        assert function is not Shifted or name in ("an input", "twice"), error
        return
    torch.testing.assert_close(values(st.trace(f, (graded(),))), expected)


@pytest.mark.parametrize("form", [lambda x, p: InPlaceInside.apply(x) * p, lambda x, p: InPlaceInside.apply(x * p) + p])
def test_a_function_that_is_once_differentiable_is_so_in_a_trace(form):
    def second(run):
        x, p = torch.ones(3, requires_grad=True), torch.full((3,), 2.0, requires_grad=True)
        (gx,) = torch.autograd.grad((run(x, p) * p).sum(), x, create_graph=True)
        (found,) = torch.autograd.grad(gx.sum(), p, retain_graph=True, allow_unused=True)
        with pytest.raises(RuntimeError, match="differentiate twice"):
            gx.sum().backward()
        return found

    args = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    expected, actual = second(form), second(st.trace(form, args))
    assert (expected is None and actual is None) or torch.equal(expected, actual)
