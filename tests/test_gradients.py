"""Gradients through writes, modes of autograd and derivatives inside: a trace gives those of eager, or is refused."""

import random

import pytest
import torch
from dense_programs import run_all
from grad_programs import (
    CALLS,
    INPUTS,
    Program,
    Step,
    drawn_inputs,
    drawn_program,
    minimal,
    short_program,
    verdict,
)

import scopetrace as st


def assert_none_wrong(programs, most_refused):
    counts, others = run_all(programs, verdict)
    for program, found in others:
        assert found.kind not in ("wrong", "fails"), f"{found.why}\n{minimal(program).source}"
    assert counts["refused"] <= most_refused * counts.total(), counts


def test_drawn_programs():
    assert_none_wrong((drawn_program(0, n) for n in range(20)), 0.2)


def test_short_programs():
    assert_none_wrong((short_program(0, n) for n in range(30)), 0.3)


@pytest.mark.slow
def test_many_short_programs():
    assert_none_wrong((short_program(1, n) for n in range(1000)), 0.2)


@pytest.mark.slow
def test_many_drawn_programs():
    assert_none_wrong((drawn_program(1, n) for n in range(500)), 0.2)  # some have hooks


def kind_of(inputs, *steps, returned, traced="a call"):
    """The kind of verdict; a step is a statement, or a mode and a statement."""
    made = []
    for step in steps:
        mode, text = step if isinstance(step, tuple) else ("", step)
        names = text.partition(" = ")[0] if " = " in text.partition("(")[0] else ""
        made.append(Step(text, tuple(n for n in names.split(", ") if n and "." not in n and "[" not in n), mode))
    found = verdict(Program(inputs, tuple(made), returned, traced))
    return found.kind, found.why if found.kind in ("wrong", "fails") else ""


RIGHT = {
    "a foreach op of which one operand requires grad in one call and not in another": (
        "leaf",
        ["self.b.add_(x[0])", "a = x * self.p", "torch._foreach_add_([a, self.b], 1)"],
        ("a", "self.b"),
    ),
    "a part of an input, expanded as another part of it that was written": (
        "plain",
        ["a = x[1]", "a[1:].copy_(x[0][1:])", "b = a[:1].expand_as(a) * self.p"],
        ("b",),
    ),
    "a foreach op of which no operand requires grad in the trace": (
        "leaf",
        ["a = x * 2", "torch._foreach_add_([a, self.b], 1)"],
        ("a", "self.b"),
        "a call with inputs that do not require grad",
    ),
    "a view under no_grad of a view of inference mode": (
        "leaf",
        [("torch.inference_mode()", "a = x[1:].movedim(0, -1)"), "b = a * 2", ("torch.no_grad()", "c = b[0]")],
        ("c",),
    ),
    "a view under no_grad of the whole of what is written": (
        "leaf",
        ["a = x * 2", ("torch.no_grad()", "b = a.split(4)[0]"), "a.data.mul_(2)"],
        ("b",),
    ),
    "a copy of a view under no_grad": (
        "derived",
        ["x.add_(1)", ("torch.no_grad()", "a = x.view(-1)"), "b = torch.empty_like(a).copy_(a)"],
        ("b",),
    ),
    "a write to a view under no_grad alone": (
        "leaf",
        ["a = x * 2", ("torch.no_grad()", "b = a.view(-1, 2)"), "b.data.mul_(2)"],
        ("b",),
    ),
    "an input that retains its gradient and whose data is written": (
        "retained",
        ["x.data.mul_(2)", "a = x[:2]"],
        ("a",),
    ),
    "an attribute bound to a tensor that is written over with a part of a result": (
        "leaf",
        ["t = x * 2", "self.b = x[0].detach().clone()", "self.b.copy_(t[0])", "r = t.squeeze()"],
        ("r",),
    ),
    "a view made under no_grad of a tensor that got the values of an input": (
        "two_leaves",
        ["a = torch.empty_like(y).copy_(y)", ("torch.no_grad()", "b = a[1:]")],
        ("b",),
    ),
    "a view made under no_grad, and a view of it": (
        "two_leaves",
        ["a = torch.empty_like(y).copy_(y)", ("torch.no_grad()", "b = a[1:]"), "c = b[1:]"],
        ("c",),
    ),
    "a view made under no_grad, beside its base, whose strides are others in the graph": (
        "transposed",
        [
            "torch.add(torch.arange(24).view(6, 4), 1, out=x.detach())",
            "a = x.flip(0)[1::2]",
            ("torch.no_grad()", "b = a[..., 1:]"),
            "c = b[1:]",
        ],
        ("b", "a", "c"),
    ),
    "a view made under no_grad, whose strides are others in the graph": (
        "transposed",
        ["x.mul_(x[0].clone())", "a = x.index_put((torch.tensor([0, 1]),), x[:2])", ("torch.no_grad()", "b = a[1:]")],
        ("b",),
    ),
    "a part that a write before did not touch": ("plain", ["x[1].mul_(2)", "a = x[0] * self.p"], ("a",)),
    "a part of several views, one of which is written": (
        "plain",
        ["a, b = x.unbind()[:2]", "b.div_(a.abs() + 1)", "c = self.weighted(a)"],
        ("c",),
    ),
    "a copy of an input that is written since": (
        "leaf_and_plain",
        ["a = torch.empty_like(y).copy_(y)", "b = a * self.p", "y.mul_(2)", "a.add_(1)"],
        ("b",),
    ),
    "a buffer that is written in one part and read in another": (
        "leaf",
        ["self.b[1:] = 0", "a = self.b[:1] * x"],
        ("a",),
    ),
    "a view made under no_grad of an input that gets other data": (
        "two_leaves",
        [
            ("torch.no_grad()", "a = y.diagonal(1)"),
            "y.data = x.detach().clone()",
            "b = torch.vmap(lambda t: t * 2)(y)",
            "c = a * 2",
        ],
        ("b", "c"),
    ),
    "what is read of an input after it changed its shape in place": (
        "derived",
        ["x.swapaxes_(0, -1)", "a = x.chunk(2, -1)[0]", "b = a * self.p[0]"],
        ("b",),
    ),
    "a gradient of the first input, kept, beside a result of vmap that is written": (
        "retained",
        ["a = torch.vmap(lambda t: t.sin() * 2)(x.logsumexp(-1))", "a[:2].neg_()"],
        ("a", "x"),
    ),
    "a derivative by a parameter of a module": (
        "leaf",
        ["a = torch.autograd.grad(self.norm(self.linear(x)).sin().sum(), self.linear.weight, create_graph=True)[0]"],
        ("a", "x"),
    ),
    "a write under no_grad to one of two inputs that share memory": (
        "derived_overlap",
        [("torch.no_grad()", "y.mul_(2)"), "a = y + x"],
        ("a", "y"),
    ),
    "a hidden write to a part, then one that autograd sees": (
        "derived_overlap",
        [("torch.inference_mode()", "torch.neg(y[0], out=y[0])"), "x[..., 0].fill_(7)"],
        ("y[0]",),
    ),
    "a view under inference mode of an input that shares memory": (
        "derived_overlap",
        ["y.add_(x.clone())", "a = y[..., 1:]", ("torch.inference_mode()", "b = a[..., :-1]")],
        ("x",),
    ),
    "a buffer that a gradient flows to, then written under no_grad": (
        "leaf",
        ["self.b.copy_(x[0])", ("torch.no_grad()", "self.b.mul_(0.9)")],
        ("x",),
    ),
    "a plain input times a tensor with gradient, in place": ("leaf_and_plain", ["y.mul_(x)"], ("y",)),
    "foreach in place": ("derived", ["torch._foreach_mul_([x], 2)"], ("x",)),
    "a buffer first used under inference mode": (
        "leaf",
        [("torch.inference_mode()", "self.b.mul_(2)"), "self.b.lerp_(self.p, 0.5)"],
        ("self.b",),
    ),
    "dropout in eval mode gives its argument, under inference mode too": (
        "leaf",
        [
            "a = x * 2",
            ("torch.inference_mode()", "b = torch.nn.functional.dropout(a, 0.5, training=False)"),
            "a.mul_(2)",
        ],
        ("a", "b"),
    ),
    "dropout in eval mode beside a derivative": (
        "two_leaves",
        [
            "a = torch.autograd.grad(self.norm(self.linear(y)).sin().sum(), self.linear.weight)[0]",
            "b = torch.nn.functional.dropout(y, 0.5, training=False)",
        ],
        ("b",),
    ),
    "a leaf that only a derivative inside needs": (
        "leaf",
        ["a = x.detach().requires_grad_()", "b = torch.autograd.grad((a**3).sum(), a)[0]"],
        ("b",),
    ),
    "a gradient penalty, whose gradients go to the parameters": (
        "plain",
        [
            "a = (x * 0.5).requires_grad_()",
            "b = torch.autograd.grad((a * self.p).sin().sum(), a, create_graph=True)[0]",
        ],
        ("b",),
    ),
    "a write that another one covers, whose gradient is zero and not None": (
        "leaf",
        ["self.b.lerp_(self.p, 0.5)", "self.b.copy_(x[0])"],
        ("self.b",),
    ),
    "a part that is covered twice": ("two_leaves", ["a = x * 2", "a[0] = y[0]", "a[:] = y"], ("a", "a[0]")),
    "an attribute that has the value of an input, before a block of no_grad": (
        "leaf",
        ["self.b = x[0] * 1", "self.b.copy_(x[0])", ("torch.no_grad()", "a = x * 2")],
        ("a",),
    ),
    "numbers drawn over a tensor": ("derived", ["a = x * 2", "a.normal_()", "b = a * 3"], ("a", "b")),
    "a comparison in place, whose gradients are zero": ("two_leaves", ["a = x * 1", "a.eq_(y)"], ("a",)),
    "logic in place, which autograd does not see": ("leaf", ["a = x * 2", "b = a[1:]", "b.logical_not_()"], ("a", "b")),
    "a parameter that gets other memory": ("leaf", ["self.p.data = self.p.data * 0.5", "a = x * self.p"], ("a",)),
    "a view of inference mode, used outside": (
        "leaf",
        [("torch.inference_mode()", "a = x[1:]"), ("torch.inference_mode()", "b = a[:1]"), "c = b[..., 1:]"],
        ("a", "b", "c"),
    ),
    "parts made under inference mode, which have no gradient": (
        "derived",
        ["a = x * 2", ("torch.inference_mode()", "b, c = a.chunk(2)"), "d = b * c + a[:2]"],
        ("b", "d"),
    ),
    "a hook on a view of inference mode, which autograd does not run": (
        "two_leaves",
        [("torch.inference_mode()", "a, b = y.chunk(2)"), "a.register_hook(torch.neg)"],
        ("a",),
    ),
    "a plain buffer is detached": ("leaf", ["self.b.detach_()", "self.b.mul_(x[0])"], ("self.b",)),
    "an attribute is detached": ("leaf", ["self.b = self.p * x[0]", "self.b.detach_()", "a = x * self.b"], ("a",)),
    "what has changed its shape in place is detached": ("leaf", ["a = x * 2", "a.t_()", "a.detach_()"], ("a",)),
    "nothing is detached under inference mode": (
        "leaf",
        ["a = x * 2", ("torch.inference_mode()", "a.detach_(); x.detach_()"), "b = a * 3"],
        ("a", "b"),
    ),
    "a derivative by what was made of an input that is written": (
        "transposed",
        ["x.detach().mul_(2)", "a = x[:2]", "b = torch.autograd.grad(a.square().sum(), a, create_graph=True)[0]"],
        ("b",),
    ),
    "a derivative beside an input with a hook": (
        "hooked",
        ["a = x * 2", "b = torch.autograd.grad((a * self.p).sin().sum(), a, create_graph=True)[0]"],
        ("b",),
    ),
    "a function of autograd that returns a view, under no_grad": (
        "leaf",
        [("torch.no_grad()", "a = First.apply(x)")],
        ("a",),
    ),
    "a gradient that the forward resets": ("leaf", ["self.p.grad = None", "a = x * self.p"], ("a",)),
    "a result beside its data, laid out otherwise": (
        "transposed",
        ["x.detach().copy_(x.detach().sin())", "a = x * 2", "b = a.data"],
        ("a", "b"),
    ),
    "an attribute of which the result is a view": (
        "leaf",
        ["self.b = self.p * x", "self.b.copy_(x)"],
        ("self.b[1:]",),
    ),
    "an attribute that is a result, and a view of another": (
        "leaf",
        ["a = x * 2", "a.mul_(3)", "self.b = a[1:]"],
        ("a", "self.b", "self.b[1:]"),
    ),
    "an attribute that changes its shape beside a view of it": (
        "leaf",
        ["self.b = self.p * x", "a = self.b[1:]", "self.b.t_()"],
        ("self.b", "a"),
    ),
    "an input that is written and gets other memory, which is written too": (
        "plain",
        ["x.mul_(2)", "x.data = x.detach() * 3", "x.neg_()"],
        ("x.view_as(x)",),
    ),
    "an input that two others share memory with, written before it gets other memory": (
        "plain_and_detached",
        ["x.mul_(2)", "x.data = x.detach() * 3", "y.add_(1)"],
        ("x", "y"),
    ),
    "dropout in eval mode under no_grad of what a copy has strides of its own": (
        "derived",
        ["x.copy_(x[:1].clone())", ("torch.no_grad()", "a = torch.dropout(x, 0.5, False)")],
        ("a",),
    ),
    "no cast under inference mode, then a write to a part": (
        "transposed",
        [
            "a = x.sin()",
            ("torch.inference_mode()", "b = a.to(a.dtype)"),
            ("torch.inference_mode()", "b[1:].zero_()"),
        ],
        ("a",),
    ),
    "a detached tensor that gets a gradient by a write to a part, beside that part": (
        "leaf",
        ["a = (x.detach() * 2).detach()", "b = a[1::2]", "b[0] = self.p"],
        ("a", "b", "a[1:]"),
    ),
    "a detached part that gets a gradient": (
        "plain",
        ["a = (x * 2).detach()", "b = a[1::2].detach()", "b[0] = self.p"],
        ("b", "b[1:]"),
    ),
    "what is written over with what a view made under no_grad of it gives": (
        "leaf",
        ["a = x * self.p", ("torch.no_grad()", "b = a[1::2]"), "a.copy_(b.sum())"],
        ("a",),
    ),
    "a derivative through a product with a complex number": (
        "leaf",
        ["a = (x * 1j).imag", "b = torch.autograd.grad(a.sin().sum(), x, create_graph=True)[0]"],
        ("b",),
    ),
    "an input that retains its gradient, written before it changes its shape": (
        "retained",
        ["x.mul_(2)", "x.squeeze_()"],
        ("x.mT",),
    ),
    "a leaf beside a write to the memory that it was detached from": (
        "leaf",
        ["a = (x * 2).detach().requires_grad_()", "b = torch.autograd.grad((a**2).sum(), a)[0]", "x.detach().mul_(2)"],
        ("b", "x"),
    ),
}


@pytest.mark.parametrize("case", RIGHT)
def test_gradients_are_those_of_eager(case):
    inputs, steps, returned, *traced = RIGHT[case]
    assert kind_of(inputs, *steps, returned=returned, traced=(*traced, "a call")[0]) == ("right", "")


REFUSED = {
    "a question about a gradient in memory of two inputs": (
        "derived_overlap",
        ["y[0] = self.p", "a = x * (2 if x.grad_fn is None else 3)"],
        ("a",),
    ),
    "a gradient into memory of two inputs, one of which is detached": (
        "plain_and_detached",
        ["y[0] = self.p", "a = x * 2"],
        ("a",),
    ),
    "a write into memory of two inputs, each with gradients of its own": (
        "detached_by_set",
        [("torch.no_grad()", "x.mul_(2)"), "a = x * y"],
        ("a",),
    ),
    "an input that changes its shape under inference mode, beside one that shares its memory": (
        "derived_base_and_view",
        ["y[1::2].zero_()", ("torch.inference_mode()", "y.swapaxes_(0, -1)"), "a = x * 2"],
        ("a",),
    ),
    "data that is a view of the tensor's own memory": (
        "plain",
        ["a = x * 2", "a.data = a.data.t()", "b = a + 1"],
        ("b",),
    ),
    "data of inference mode": (
        "two_leaves",
        [("torch.inference_mode()", "y.data = x.detach().clone()"), "a = y.sigmoid_()"],
        ("a",),
    ),
    "a change of shape under no_grad, and a derivative": (
        "transposed",
        [("torch.no_grad()", "x.t_()"), "a = torch.autograd.grad(x.sum(), x)[0]"],
        ("a",),
    ),
    "a leaf as result": ("leaf", ["a = x.detach().requires_grad_()"], ("a",)),
    "what is computed from a leaf alone": ("leaf", ["a = x.detach().requires_grad_()", "b = a * 2"], ("b",)),
    "a leaf of the sizes of an input": ("leaf", ["a = torch.zeros_like(x, requires_grad=True)"], ("a", "x")),
    "zeros in place of the gradient of what is not used, which require grad": (
        "two_leaves",
        ["a = torch.autograd.grad(x.sin().sum(), [x, y], create_graph=True, materialize_grads=True)[1]"],
        ("a",),
    ),
    "a factory's leaf": ("plain", ["a = torch.ones(6, requires_grad=True)"], ("a",)),
    "a leaf written into another tensor": (
        "plain",
        ["a = torch.zeros(2, 6)", "a[0].copy_(torch.ones(6, requires_grad=True))"],
        ("a",),
    ),
    "an input that the forward takes, and makes require grad": (
        "plain",
        ["b = x * 3", "x.requires_grad_()", "a = x * 2"],
        ("a",),
    ),
    "an input of which the forward asks, and which it makes require grad": (
        "plain",
        ["if not x.requires_grad: x.requires_grad_()", "a = x * 2"],
        ("a",),
    ),
    "a view of an input that the forward makes require grad": ("plain", ["a = x.view(-1).requires_grad_()"], ("a",)),
    "an input that the forward takes, makes require grad, and detaches to write": (
        "plain",
        ["b = x * 3", "x.requires_grad_()", "x.detach().add_(1)", "a = x * 2"],
        ("a",),
    ),
    "retain_grad of an input that is no leaf": ("derived", ["x.retain_grad()"], ("x",)),
    "inputs that share memory, of which one is detached": ("leaf_and_detached", ["y[0] = 3"], ("y",)),
    "results in one memory, computed from a tensor that was written over": (
        "two_leaves",
        ["a = x * 1", "a.copy_(y)", "b = a * 2"],
        ("b", "b[1:]"),
    ),
    "a leaf of memory that is written": ("derived", ["a = x.detach().requires_grad_()", "x[1:].zero_()"], ("a",)),
    "a leaf written into an input": ("plain", ["a = x.detach().requires_grad_()", "x.add_(a)"], ("x",)),
    "a parameter made anew": ("plain", ["self.p = torch.nn.Parameter(self.p * 2)"], ("x",)),
    "a checkpointed region whose parameter changes afterwards": (
        "leaf",
        [
            "a = torch.utils.checkpoint.checkpoint(lambda t: t * self.p, x, use_reentrant=False)",
            "self.p.data.mul_(0.9)",
        ],
        ("a",),
    ),
    "the same after a derivative of something else": (
        "leaf",
        [
            "a = torch.utils.checkpoint.checkpoint(lambda t: t * self.p, x, use_reentrant=False)",
            "b = torch.autograd.grad(x.sin().sum(), x)[0]",
            ("torch.no_grad()", "self.p.mul_(0.9)"),
        ],
        ("a",),
    ),
    "a tensor that retains its gradient and is written": (
        "leaf",
        ["a = (x * 2).reshape(-1)", "a.retain_grad()", "b = torch.nn.functional.relu(a, inplace=True)"],
        ("b",),
    ),
    "the version of a tensor that is written": ("derived", ["x.add_(1)", "a = x * x._version"], ("a",)),
    "a buffer that a gradient flows to, and that gets other memory": (
        "leaf",
        ["self.b.copy_(x[0])", "self.b.data = self.b.data * 2"],
        ("x",),
    ),
    "a leaf that is written over with what it was detached from": (
        "plain",
        ["a = x.detach().requires_grad_()", ("torch.no_grad()", "torch.neg(x, out=a)")],
        ("a",),
    ),
    "the version of a result": ("derived", ["a = x * 2", "b = a * a._version"], ("b",)),
    "a derivative by an input that is a view and is written": (
        "leaf_slice",
        ["a = x * 2", "x.detach()[0].add_(1)", "b = torch.autograd.grad(a.sum(), x, materialize_grads=True)[0]"],
        ("b",),
    ),
    "a derivative by an input from which another was computed": (
        "leaf_and_view",
        ["a = torch.autograd.grad(y.sin().sum(), x, materialize_grads=True)[0]"],
        ("a",),
    ),
    "a derivative in forward mode": ("leaf", ["a = self.forward_mode(x)"], ("a",)),
    "a function that linearizes": ("leaf", ["a = torch.func.linearize(torch.sin, x)[1](x)"], ("a",)),
    "a derivative by an input with a hook": ("hooked", ["a = torch.autograd.grad(x.sin().sum(), x)[0]"], ("a",)),
    "a derivative by a view made under no_grad": (
        "view_under_no_grad",
        ["a = torch.autograd.grad(x.sin().sum(), x, materialize_grads=True, allow_unused=True)[0]"],
        ("a",),
    ),
    "a derivative beside inputs that share the memory that is written": (
        "derived_base_and_view",
        ["y.mul_(2)", "a = torch.autograd.grad((x * self.p).sin().sum(), self.p)[0]"],
        ("a",),
    ),
    "a view that changes its shape under no_grad": ("leaf", ["a = x[1:]", ("torch.no_grad()", "a.t_()")], ("a",)),
    "a result that changes its shape and is written under no_grad": (
        "leaf",
        ["a = self.halve_(x.cumsum(0))", ("torch.no_grad()", "a.squeeze_()"), ("torch.no_grad()", "b = a.mul_(2)")],
        ("b",),
    ),
    "an input that is a view, is written and gets other memory": (
        "derived_view",
        ["x[1:].mul_(2)", "x.data = x.detach() * 5", "a = x * 2"],
        ("a",),
    ),
    "an input that gets other memory before a view of it is written": (
        "derived",
        ["a = x[1:]", "x.data = x.detach() * 5", "a.mul_(2)", "b = x * 2"],
        ("b",),
    ),
    "a function of autograd whose result is written, beside a derivative": (
        "two_leaves",
        ["a = Twice.apply(y)", "a.mul_(self.p)", "b = torch.func.grad(lambda t: t.sin().sum())(x)"],
        ("a",),
    ),
    "a view under no_grad of what was written over": (
        "leaf_and_plain",
        ["a = y * self.p", "a.copy_(x)", ("torch.no_grad()", "b = a[1:]")],
        ("b",),
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_graph_would_lose_is_refused(case):
    inputs, steps, returned = REFUSED[case]
    assert kind_of(inputs, *steps, returned=returned) == ("refused", "")


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpointed_region_that_writes_to_a_buffer_is_refused(reentrant):
    norm = torch.nn.BatchNorm1d(3)
    x = torch.ones(4, 3, requires_grad=True)
    with pytest.raises(st.errors.UnsupportedOpError, match="a checkpointed region"):
        st.trace(lambda x: torch.utils.checkpoint.checkpoint(norm, x, use_reentrant=reentrant), (x,))


def test_a_reentrant_checkpoint_requires_grad_as_its_arguments_do():
    net = torch.nn.Linear(3, 3)
    x = torch.ones(2, 3)

    def run(x):
        return torch.utils.checkpoint.checkpoint(net, x, use_reentrant=True)

    with pytest.warns(UserWarning, match="None of the inputs have requires_grad"):
        assert not run(x).requires_grad
        assert not st.trace(run, (x,))(x).requires_grad
    assert st.trace(run, (x.requires_grad_(),))(x).requires_grad


def test_an_input_that_the_forward_makes_require_grad_is_a_side_effect():
    def force(x):
        return torch.autograd.grad(x.requires_grad_().square().sum(), x)[0]

    (effect,) = st.trace(force, (torch.ones(2),)).side_effects
    assert effect.change == "x.requires_grad was False and became True"


def energy_and_force(x):
    energy = x.requires_grad_().pow(3).sum()
    return energy, -torch.autograd.grad(energy, x, create_graph=True)[0]


def beside_a_block(x):
    torch.zeros_like(x)
    x.requires_grad = True
    with torch.no_grad():
        y = x * 2
    return x * y, x.detach()


@pytest.mark.parametrize("forward", [energy_and_force, beside_a_block])
@pytest.mark.parametrize("required", [False, True])
def test_a_call_makes_an_input_require_grad_where_the_forward_does_so_before_all_else(forward, required, tmp_path):
    trace = st.trace(forward, (torch.ones(2),))
    trace.save(tmp_path / "file.st")
    for run in (trace, trace.decompose(), st.load(tmp_path / "file.st"), trace.to_module()):
        x, twin = (torch.tensor([1.0, 2.0], requires_grad=required) for _ in range(2))
        for _ in range(2):  # the second time both require grad
            results, expected = run(x), forward(twin)
            torch.testing.assert_close(results, expected)
            assert [t.requires_grad for t in results] == [t.requires_grad for t in expected]
            results[0].sum().backward()
            expected[0].sum().backward()
            torch.testing.assert_close(x.grad, twin.grad)


def test_torch_compile_does_not_trace_a_call_that_makes_an_input_require_grad():
    trace = st.trace(lambda x: x.requires_grad_() * 2, (torch.ones(2),))
    with pytest.raises(Exception, match="the forward makes an input require grad"):
        torch.compile(trace, backend="eager", fullgraph=True)(torch.ones(2))


def hidden(x):
    y = x * 1
    y.detach().mul_(2)
    return y * 3


class Negative(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        return -grad


def hooked(x):
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t * 2):
        return x * x


def test_a_leaf_made_inside_ties_the_trace_to_inputs_that_require_grad():
    def run(x):
        return x.detach().requires_grad_() * x

    trace = st.trace(run, (torch.ones(2, requires_grad=True),))
    with pytest.raises(st.errors.InputMismatchError, match=r"x\.requires_grad"):
        trace(torch.ones(2))


def changed(x):
    y = x * 1
    with torch.no_grad():
        y.data = torch.ones(2)
    return y


@pytest.mark.parametrize("run", [hidden, hooked, changed, Negative.apply])
def test_a_trace_without_gradients_is_refused_where_they_would_make_another_program(run):
    trace = st.trace(lambda x: run(x), (torch.ones(2),))
    assert torch.equal(trace(torch.ones(2)), run(torch.ones(2)))
    with pytest.raises(st.errors.InputMismatchError, match="requires_grad"):
        trace(torch.ones(2, requires_grad=True))


def partly_enabled(x):
    with torch.no_grad():
        y = x * 3
        with torch.enable_grad():
            z = x * y
        w = z * 2
    return w + x, z


def region_with_a_block(x):
    def region(x):
        with torch.no_grad():
            scale = x.abs().max()
        return x / scale

    return torch.utils.checkpoint.checkpoint(region, x.sin(), use_reentrant=False)


@pytest.mark.parametrize("run", [partly_enabled, region_with_a_block])
@pytest.mark.parametrize("form", [lambda t: t, lambda t: t.decompose(), lambda t: t.to_exported_program().module()])
def test_a_trace_without_gradients_has_those_of_a_call_outside_of_blocks(run, form):
    program = form(st.trace(lambda x: run(x), (torch.ones(3),)))
    gradients = []
    for f in (run, program):
        x = torch.linspace(1, 2, 3).requires_grad_()
        out = f(x)
        results = [t for t in (out if isinstance(out, (tuple, list)) else [out]) if t.requires_grad]
        gradients += torch.autograd.grad(sum(t.sum() for t in results), x)
    assert torch.equal(*gradients)


def zeros_without_gradients(x):
    a = torch.zeros(2)
    a[0].copy_(x[0])
    with torch.no_grad():
        return a * 2


def complex_without_gradients(x):
    a = torch.complex(x, x)
    with torch.no_grad():
        return a * 2


def never_in_inference_mode(x):
    with torch.inference_mode(False):
        return x * 2


def recomputed(x):
    return torch.utils.checkpoint.checkpoint(torch.nn.Linear(2, 2), x, use_reentrant=True)


@pytest.mark.parametrize(
    ("run", "traced", "called"),
    [
        (zeros_without_gradients, False, True),
        (complex_without_gradients, False, True),
        (never_in_inference_mode, True, False),
    ],
)
def test_a_block_that_switches_autograd_to_what_it_is_ties_the_trace_to_that(run, traced, called):
    x = torch.ones(2, requires_grad=True)
    with torch.set_grad_enabled(traced):
        trace = st.trace(run, (x,))
        assert trace(x).requires_grad is run(x).requires_grad
    with (
        torch.set_grad_enabled(called),
        pytest.raises(st.errors.StateMismatchError, match=f"in {run.__name__}: .*: {traced} when"),
    ):
        trace(x)


def test_a_reentrant_checkpoint_takes_arguments_that_require_grad_as_in_the_trace():
    trace = st.trace(recomputed, (torch.ones(2, requires_grad=True),))
    with pytest.raises(st.errors.InputMismatchError, match=r"x\.requires_grad"):
        trace(torch.ones(2))


def test_a_program_without_inputs_that_begins_in_a_block_of_no_grad():
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.p = torch.nn.Parameter(torch.ones(3))

        def forward(self):
            with torch.no_grad():
                a = self.p * 2
            return a, a + self.p

    assert [t.requires_grad for t in st.trace(Net(), ())()] == [False, True]


def test_a_buffer_written_under_no_grad_does_not_require_grad():
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("b", torch.zeros(6))

        def forward(self, x):
            self.b.copy_(x[0])
            return self.b[1:]

    net = Net()
    x = torch.ones(4, 6, requires_grad=True)
    with torch.no_grad():
        part = st.trace(net, (x,))(x)
    assert part._base is net.b and not part.requires_grad and not net.b.requires_grad


def test_results_of_one_memory_beside_one_that_got_their_values():
    def run(x):
        a, b = x * 2, x * 3
        a.data.copy_(b)
        return a, b, b[1:]

    for function in (run, st.trace(run, (torch.ones(2),))):
        a, b, part = function(torch.ones(2))
        part.zero_()
        assert b.tolist() == [3, 0] and a.tolist() == [3, 3]


def test_the_version_of_an_input_that_is_no_leaf():
    def run(x):
        return x * (2 + x._version)

    x = torch.ones(2, requires_grad=True) * 1
    assert torch.equal(st.trace(run, (x,))(x), run(x))


def test_a_leaf_may_be_a_view_of_a_plain_tensor_where_the_forward_differentiates():
    def run(x):
        return torch.autograd.grad((x**3).sum(), x)[0]

    x = torch.arange(4.0).view(2, 2).requires_grad_()
    assert torch.equal(st.trace(run, (x,))(x), run(x))


def test_an_attribute_whose_data_is_set_after_it_was_bound():
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("b", torch.zeros(2))

        def forward(self, x):
            self.b = x.detach().clone()
            self.b.data = self.b.data * 3
            return x * 2

    net = Net()
    st.trace(net, (torch.ones(2),))(torch.ones(2))
    assert net.b.tolist() == [3, 3]


def test_a_trace_without_gradients_of_complex_numbers_gives_them_too():
    def run(x):
        y = x * 1
        y[0].mul_(2)
        return y

    with torch.no_grad():
        trace = st.trace(run, (torch.ones(2, dtype=torch.complex64),))
    x = torch.ones(2, dtype=torch.complex64, requires_grad=True)
    trace(x).abs().sum().backward()
    assert x.grad.tolist() == [2, 1]


def test_memory_that_data_frees_is_no_memory_of_the_next_tensor():
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            for i in range(8):
                self.register_buffer(f"b{i}", torch.full((6,), float(i)))

        def forward(self, x):
            made = []
            for i in range(8):
                a = (x * 2).mul_(3)
                a.data = x * 5
                made += [a, self.get_buffer(f"b{i}")[1:]]
            return made

    x = torch.ones(6)
    trace = st.trace(Net(), (x,))
    for found, expected in zip(trace(x), Net()(x), strict=True):
        assert torch.equal(found, expected)


def test_a_derivative_of_what_was_written_since_is_refused():
    def run(x, w):
        y = (x * 1) @ w
        x.detach().add_(1)
        z = w * 1
        y = y + (z.square()).sum()
        z.detach().add_(1)
        return torch.autograd.grad(y.sum(), w)[0]

    with pytest.raises(st.errors.UnsupportedOpError, match="differentiates what it has written to since"):
        st.trace(run, (torch.ones(2, 2), torch.ones(2, 2, requires_grad=True)))


def test_foreach_gives_each_tensor_its_own_gradient():
    def run(x, y):
        a, b = x * 1, y * 1
        torch._foreach_mul_([a, b], 2)
        return a, b

    a, b = st.trace(run, (torch.ones(2, requires_grad=True), torch.ones(2)))(
        torch.ones(2, requires_grad=True), torch.ones(2)
    )
    assert a.requires_grad and not b.requires_grad


def test_an_attribute_shares_the_memory_of_a_result_that_was_written():
    class Net(torch.nn.Module):
        def forward(self, x):
            out = torch.zeros(3, 2)
            out[0] = x
            self.last = out[-1]
            return out

    net = Net()
    out = st.trace(net, (torch.ones(2),))(torch.ones(2))
    out.fill_(5)
    assert torch.equal(net.last, torch.full((2,), 5.0))


def test_derivatives_by_torch_func_beside_those_of_autograd():
    def run(x):
        slope = torch.autograd.grad(x.square().sum(), x, create_graph=True)[0]
        return torch.func.vjp(torch.sin, x)[1](slope)[0], torch.func.jvp(torch.sin, (x,), (slope,))[1]

    x = torch.ones(2, requires_grad=True)
    for found, expected in zip(st.trace(run, (x,))(x), run(x), strict=True):
        assert torch.equal(found, expected)


class Transformed(torch.nn.Module):
    """Differentiates what a transform has computed, by a parameter that its function reads."""

    def __init__(self, transform):
        super().__init__()
        self.p = torch.nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
        self.transform = transform

    def forward(self, x):
        y = self.transform(lambda t: (t * self.p).sin(), x, self.p)
        return torch.autograd.grad(y.sum() * self.p.sum(), self.p, create_graph=True)[0]


TRANSFORMS = {
    "jvp": lambda f, x, p: torch.func.jvp(f, (x,), (x.cos(),))[1],
    "vjp": lambda f, x, p: torch.func.vjp(f, x)[1](x.cos())[0],
    "vmap of grad": lambda f, x, p: torch.vmap(torch.func.grad(lambda t: f(t).sum()))(x),
    "jacrev": lambda f, x, p: torch.func.jacrev(f)(x[0]),
    "vmap": lambda f, x, p: torch.vmap(f)(x),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_derivatives_of_what_a_transform_computes_with_a_parameter(transform):
    x = torch.linspace(-1, 1, 6).view(2, 3)
    found = []
    for traced in (False, True):
        net = Transformed(TRANSFORMS[transform])
        run = st.trace(net, (x,)) if traced else net
        out = run(x)
        out.square().sum().backward()
        found.append((out, net.p.grad))
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.sample(3)
@pytest.mark.parametrize("traced", CALLS)
@pytest.mark.parametrize(
    "form",
    [
        "torch.func.grad(lambda t: (t * self.p * 2).sin().sum())(x)",
        "torch.func.grad(lambda t: (self.loud(t) / 2).sin().sum())(x)",
        "torch.func.grad(lambda t: (t * self.quiet(t)).sum())(x)",
        "torch.func.vjp(lambda t: (t * self.p).sin(), x)[1](x)[0]",
        "torch.vmap(torch.func.grad(lambda t: (2 / t.exp() * self.p).sum()))(x)",
        "torch.func.hessian(lambda t: (t.sin().multiply(2)).sum())(x[0])",
        "torch.func.grad(lambda t: (t * (2 if t.requires_grad else 3)).sum())(x)",
    ],
)
def test_a_transform_in_calls_of_other_states_than_the_trace(form, traced):
    """What requires grad around a transform, and the grad mode there, are not what it differentiates by."""
    kind, why = kind_of("leaf", f"a = {form}", returned=("a",), traced=traced)
    assert kind == "right" or ("quiet" in form and kind == "refused at the call"), why


def test_an_input_that_may_not_require_grad_in_a_call():
    trace = st.trace(lambda x, y: (x.requires_grad_(False), y * 2)[1], (torch.ones(3), torch.ones(3)))
    with pytest.raises(st.errors.InputMismatchError, match=r"x\.requires_grad"):
        trace(torch.ones(3, requires_grad=True), torch.ones(3))


def test_a_forward_mode_derivative_of_a_layer_norm():
    norm, x = torch.nn.LayerNorm(3), torch.randn(2, 3)

    def tangent(x):
        return torch.func.jvp(norm, (x,), (x,))[1]

    torch.testing.assert_close(st.trace(tangent, (torch.ones(2, 3),))(x), tangent(x))


def test_derivatives_by_a_parameter_that_a_transform_takes_are_refused():
    net = Transformed(lambda f, x, p: torch.func.functionalize(lambda t, p: t * p)(x, p))
    with pytest.raises(st.errors.UnsupportedOpError, match="took a parameter as its argument"):
        st.trace(net, (torch.ones(2, 3),))


@pytest.mark.parametrize(
    ("run", "match"),
    [
        (lambda x: setattr(y := x * 2, "data", torch.ones(2)) or y, "sets `.data` of a tensor"),
        (lambda x: x.detach_() * 2, "detaches a tensor"),
        (lambda x: torch.detach_(x) * 2, "detaches a tensor"),
        (lambda x: x[1:].detach_(), "detaches in place a view, which torch forbids"),
        (lambda x: ((y := x * 2)[1:], y.detach_())[0], "or what has views"),
        (lambda x: (x * 2).requires_grad_(False), "of a tensor that it computed to False"),
        (lambda x: (x * 2).to(x.dtype).requires_grad_(False), "of a tensor that it computed to False"),
    ],
)
def test_what_a_forward_does_to_a_tensor_without_an_op_is_refused(run, match):
    with pytest.raises(st.errors.UnsupportedOpError, match=match):
        st.trace(run, (torch.ones(2, requires_grad=True),))


@pytest.mark.parametrize(
    ("leave", "use"),
    [
        (lambda a: a.detach_(), lambda a: a * 2),
        (lambda a: torch.detach_(a), lambda a: a * 2),
        (lambda a: a.requires_grad_(False), lambda a: a[1:]),
        (lambda a: a.requires_grad_(False), lambda a: a * 2),
        (lambda a: a.requires_grad_(False), lambda a: a.to(a.dtype).view(-1)),
    ],
)
def test_what_is_computed_from_a_leaf_of_the_forward_that_leaves_autograd_later(leave, use):
    def forward(x):
        a = x.detach().requires_grad_()
        b = use(a)
        leave(a)
        return b, a

    x = torch.ones(2, 3, requires_grad=True)
    with pytest.raises(st.errors.UnsupportedOpError, match="makes a tensor require grad"):
        st.trace(forward, (x,))
    trace = st.trace(lambda x: (forward(x)[0].detach(), forward(x)[1] * x), (x,))
    torch.testing.assert_close([t.requires_grad for t in trace(x)], [False, True])


def test_a_parameter_moved_to_where_it_is_keeps_its_gradient():
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(3, 3)

        def forward(self, x):
            return self.linear.to(x.device)(x)

    net = Net()
    trace = st.trace(net, (torch.ones(2, 3),))
    trace(torch.ones(2, 3)).sum().backward()
    assert torch.equal(net.linear.weight.grad, torch.full((3, 3), 2.0))


def test_an_input_that_retains_its_gradient_and_is_written():
    def forward(x):
        x.mul_(2)
        return x.sin()

    def gradient(run):
        x = torch.ones(2, 3, requires_grad=True) * 1
        x.retain_grad()
        run(x).sum().backward()
        return x.grad

    trace = st.trace(forward, (torch.ones(2, 3, requires_grad=True) * 1,))
    assert torch.equal(gradient(trace), gradient(forward))
    with pytest.raises(st.errors.InputMismatchError, match="gradients with respect to what it is after the call"):
        gradient(lambda x: trace.run(lambda *inputs: trace.graph_module(*inputs), x))


def test_a_function_that_returns_a_view_beside_a_derivative():
    steps = ["a = First.apply(y)", "b = torch.func.grad(lambda t: (t * self.p).sin().sum())(x)"]
    assert kind_of("leaf_and_plain", *steps, returned=("a", "b"))[0] == "refused at the call"  # in another grad mode


@pytest.mark.parametrize("traced", CALLS)
@pytest.mark.parametrize("use", ["a * x", "a + 1", "torch.autograd.grad((x + a).sin().sum(), a)[0]"])
@pytest.mark.parametrize(
    "make",
    [
        "torch.ones_like(x, requires_grad=True)",
        "torch.tensor([1.0, 2, 3, 4, 5, 6], requires_grad=True)",
        "torch.no_grad()(lambda: x.detach().requires_grad_())()",
    ],
)
def test_a_factory_s_leaf_ties_the_trace_to_inputs_that_require_grad(make, use, traced):
    steps = [f"a = {make}", f"b = {use}"]
    kind, why = kind_of("leaf", *steps, returned=("b",), traced=traced)
    assert kind not in ("wrong", "fails"), why


def test_data_of_another_dtype_and_size_for_a_tensor_that_was_written():
    def forward(x):
        a = torch.cat([x, x])
        a.scatter_add_(0, torch.zeros(1, 4, dtype=torch.long), a.clone())
        total = a.sum(0)
        a.data = torch.arange(5)
        return total, a + 1

    x = torch.arange(12.0).view(3, 4)
    for expected, actual in zip(forward(x), st.trace(forward, (x,))(x), strict=True):
        assert expected.dtype == actual.dtype and torch.equal(expected, actual)


@pytest.mark.parametrize(
    ("write", "kind"),
    [
        ("a.copy_(self.p)", "refused at the call"),
        ("a.normal_()", "refused at the call"),
        ("a.t().normal_()", "refused at the call"),
        ("a[1:].normal_()", "right"),
        ("a.copy_(x.sin())", "right"),
        ("torch.empty_like(a).copy_(self.p)", "right"),
        ("torch.nn.functional.dropout(a, 0.5, inplace=True)", "right"),
    ],
)
def test_a_trace_without_gradients_where_the_gradient_of_what_is_written_over_is_zero(write, kind):
    found = kind_of("leaf", "a = x * 2", write, returned=("a",), traced="a call under no_grad")
    assert found == (kind, "")


def test_a_function_that_returns_a_view_is_no_write():
    steps = [("torch.no_grad()", "a = x[1:]"), "b = First.apply(x)", "c = torch.vmap(lambda t: t * 2)(a)"]
    assert kind_of("leaf_and_plain", *steps, returned=("b", "c"))[0] == "refused at the call"  # in another grad mode


def test_an_inner_step_of_functional_training():
    class Inner(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Linear(3, 3)

        def forward(self, x):
            params = dict(self.net.named_parameters())
            call = torch.func.functional_call
            grads = torch.func.grad(lambda p: call(self.net, p, (x,)).square().sum())(params)
            return call(self.net, {name: p - 0.1 * grads[name] for name, p in params.items()}, (x,))

    net, x = Inner(), torch.randn(2, 3)
    trace = st.trace(net, (x,))
    gradients = [torch.autograd.grad(run(x + 1).square().sum(), net.parameters()) for run in (trace, net)]
    assert all(torch.allclose(a, b) for a, b in zip(*gradients, strict=True))
    assert torch.equal(trace(x + 1), net(x + 1))


def test_a_reentrant_checkpoint_of_a_view_made_under_no_grad():
    steps = ["a = x * 2", ("torch.no_grad()", "b = a[1:]")]
    steps.append("c = torch.utils.checkpoint.checkpoint(self.linear, b, use_reentrant=True)")
    assert kind_of("leaf", *steps, returned=("b", "c"))[0] == "refused at the call"  # with other inputs


def test_data_of_a_leaf_made_of_an_input_that_is_written():
    steps = ["a = x.detach().requires_grad_()", "b = a[::2]", "x.detach()[..., 0] += 1"]
    assert kind_of("leaf", *steps, returned=("b.detach()",))[0] == "refused at the call"  # with other inputs


def test_requires_grad_set_to_what_it_is_ties_the_trace_to_the_grad_mode():
    steps = ["a = torch.where(x > 0, x, 0.1 * x).requires_grad_(x.requires_grad)"]
    assert kind_of("leaf", *steps, returned=("a",))[0] == "refused at the call"


def test_a_leaf_made_under_no_grad_ties_the_trace_to_the_grad_mode():
    steps = ["a = x.detach().requires_grad_()", "b = a * 2"]
    assert kind_of("leaf", *steps, returned=("b",), traced="a call under no_grad")[0] == "refused at the call"


def test_an_attribute_written_under_no_grad_requires_no_grad():
    steps = ["self.b = x[0].detach().clone()", "self.b.copy_(x[0])"]
    assert kind_of("plain", *steps, returned=("x",), traced="a call under no_grad") == ("right", "")

    class Last(torch.nn.Module):
        def forward(self, x):
            self.last = x[0].detach().clone()
            self.last.copy_(x[0])
            return x * 2

    net, x = Last(), torch.ones(2, 3, requires_grad=True)
    with torch.no_grad():
        st.trace(net, (x,))(x)
    assert not net.last.requires_grad


def test_every_kind_of_inputs_is_drawn():
    assert {drawn_inputs(random.Random(n)) for n in range(2000)} == set(INPUTS)


def test_one_op_in_two_modes():
    def run(x):
        with torch.inference_mode():
            a = x[:, 1:].shape[1]
        with torch.no_grad():
            return x[:, 1:] * a

    x = torch.ones(2, 3, requires_grad=True)
    assert torch.equal(st.trace(run, (x,))(x), run(x))


def test_the_gradient_of_a_tensor_with_other_data_is_not_known_once_it_is_written():
    def run(x, y):
        x.data = y.detach().clone()
        with torch.no_grad():
            y[torch.tensor([0])] = 2
        return y * (2 if x.grad is None else 3)

    x = torch.ones(2, 3, requires_grad=True)
    with pytest.raises(st.errors.FunctionalizationError, match="gets memory that is written"):
        st.trace(run, (x, x))


@pytest.mark.parametrize("grad", [False, True])
def test_what_a_hidden_write_brings_does_not_make_a_result_require_grad(grad):
    weight = torch.full((2,), 3.0, requires_grad=True)

    def run(x):
        y = x * 1
        with torch.no_grad():
            y[...] = weight * 2
        return y

    trace = st.trace(run, (torch.ones(2, requires_grad=True),))
    found = trace(torch.ones(2, requires_grad=grad))
    assert torch.equal(found, run(torch.ones(2)))
    assert found.requires_grad is grad


@pytest.mark.parametrize("reshape", [lambda y: y.t_(), lambda y: y.unsqueeze_(0), lambda y: y.squeeze_()])
def test_an_input_that_a_leaf_of_the_forward_is_written_into_and_that_changes_its_shape(reshape):
    def forward(x, y):
        leaf = x.detach().requires_grad_()
        y.view(-1)[0] = leaf.sum()
        reshape(y)
        return y.data

    with pytest.raises(st.UnsupportedOpError, match="the forward itself makes a tensor require grad"):
        st.trace(forward, (torch.ones(4, 6, requires_grad=True), torch.ones(4, 6)))


def test_a_leaf_made_under_enable_grad_ties_the_trace_to_the_grad_mode():
    """Beside what is computed before the block, which has no gradient under `no_grad`."""

    def forward(x):
        scaled = x * 2
        with torch.enable_grad():
            return torch.tensor([1.0, 2.0], requires_grad=True) + scaled

    x = torch.ones(2, requires_grad=True)
    tr = st.trace(forward, (x,))
    assert tr(x).requires_grad
    with torch.no_grad(), pytest.raises(st.StateMismatchError, match=r"torch.is_grad_enabled\(\)"):
        tr(x)


@pytest.mark.parametrize("transposed", [False, True])
def test_a_view_made_under_no_grad_of_what_was_written_in_another_layout_stays_a_leaf(transposed):
    def run(x):
        x.masked_fill_(x == 2, 0)
        with torch.no_grad():
            row = x[0]
        product = row.detach() * row
        with torch.no_grad():
            return product[0]

    def given():
        x = torch.linspace(-1, 1, 24).view(4, 6).requires_grad_() * 1
        return x.t() if transposed else x

    found, wanted = st.trace(run, (given(),))(given()), run(given())
    assert (found.requires_grad, found.is_leaf) == (wanted.requires_grad, wanted.is_leaf) == (True, True)


def test_a_written_input_that_is_read_under_no_grad_keeps_what_the_write_brought():
    p = torch.ones(6, requires_grad=True)

    def run(x, y):
        y[0].mul_(p)
        with torch.inference_mode():
            torch.add(x, 1, out=x)
        with torch.no_grad():
            y.narrow(0, 0, 2)
        return x.view_as(x)

    def given():
        x = torch.ones(4, 6) * 1
        return x, x[1:]

    (x, y), (a, b) = given(), given()
    found, wanted = st.trace(run, given())(x, y), run(a, b)
    assert [t.requires_grad for t in (found, x, y)] == [t.requires_grad for t in (wanted, a, b)] == 3 * [True]


def test_a_view_made_in_inference_mode_of_what_was_written_leaves_autograd():
    def run(x):
        leaf = x.detach().requires_grad_()
        with torch.inference_mode():
            row, _ = leaf.unbind()
            leaf.clamp_(-1, 1)
        slope = torch.func.grad(lambda t: (t * p).cos().sum())(x)
        row.requires_grad_(False)
        return slope

    p, x = torch.ones(3, requires_grad=True), torch.ones(2, 3)
    assert torch.equal(st.trace(run, (x,))(x), run(x))


@pytest.mark.parametrize("method", ["retain_grad", "register_hook"])
def test_a_hook_on_an_input_whose_memory_got_a_gradient_through_another(method):
    def run(x, y):
        y.mul_(p)
        x.register_hook(lambda grad: grad) if method == "register_hook" else x.retain_grad()
        return y

    p, x = torch.ones(3, requires_grad=True), torch.ones(2, 3) * 1
    with pytest.raises(st.errors.UnsupportedOpError, match="hook"):
        st.trace(run, (x, x[1:]))
