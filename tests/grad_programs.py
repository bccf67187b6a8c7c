"""Small programs with gradients, drawn at random and run as traces and in eager.

    inputs and a module with state -> views, writes and reads, some of them under no_grad; derivatives inside
        -> results, some of them inputs or not differentiable -> gradients of all leaves, once, twice, and of gradients

    python tests/grad_programs.py --draw 1000 --seed 700

`tests/dense_programs.py` has more kinds of views and writes; here autograd is what is tried. In eager, gradients are
those of the program as written: what a backward pass needs is copied when it is kept, so that later writes cannot
change it (docs/mutation.md, "Programs without a defined result").
"""

import argparse
import collections
import contextlib
import dataclasses
import itertools
import random
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from unittest import mock

import torch
from dense_programs import (
    LIKE,
    VIEWS,
    WRITES,
    Line,
    Verdict,
    apart,
    first_line,
    is_defined,
    memory,
    raised,
    report,
    run_all,
    same,
    smallest,
    writes,
)
from torch.autograd.graph import saved_tensors_hooks

import scopetrace as st

GRID = "torch.linspace(-1, 1, 24).view(4, 6) + start"
# Lines that make the arguments x, y; `grad` is whether the leaves require grad.
INPUTS = {
    "leaf": [f"x = ({GRID}).requires_grad_(grad)"],
    "plain": [f"x = {GRID}"],
    "leaf_and_plain": [f"x = ({GRID}).requires_grad_(grad)", f"y = {GRID} / 2"],
    "two_leaves": [f"x = ({GRID}).requires_grad_(grad)", f"y = ({GRID} / 2).requires_grad_(grad)"],
    "second_leaf": [f"x = {GRID} / 2", f"y = ({GRID}).requires_grad_(grad)"],
    "same": [f"x = ({GRID}).requires_grad_(grad)", "y = x"],
    "derived": [f"s = ({GRID}).requires_grad_(grad)", "x = s * 1"],
    "derived_view": [f"s = ({GRID}).requires_grad_(grad)", "x = (s * 1)[1:]"],
    "derived_base_and_view": [f"s = ({GRID}).requires_grad_(grad)", "x = s * 1", "y = x[1:]"],
    "derived_overlap": [f"s = ({GRID}).requires_grad_(grad)", "d = s * 1", "x = d[:3]", "y = d[1:]"],
    "leaf_and_view": [f"x = ({GRID}).requires_grad_(grad)", "y = x[1:]"],
    "leaf_and_detached": [f"x = ({GRID}).requires_grad_(grad)", "y = x.detach()[1:]"],
    "detached_and_leaf": [f"y = ({GRID}).requires_grad_(grad)", "x = y.detach()[1:]"],
    "derived_and_detached": [f"s = ({GRID}).requires_grad_(grad)", "x = s * 1", "y = x.detach()"],
    "plain_and_detached": [f"x = {GRID}", "y = x.detach()"],
    "detached_by_set": [f"y = ({GRID}).requires_grad_(grad) * 1", "x = y + 1", "with torch.no_grad(): x.set_(y)"],
    "leaf_slice": [f"s = ({GRID}).requires_grad_(grad)", "x = s[1:]"],
    "expanded": [f"s = ({GRID}).requires_grad_(grad)", "x = (s * 1)[:1].expand(4, 6)"],
    "complex": [f"x = torch.complex({GRID}, ({GRID}) + 1).requires_grad_(grad)"],
    "hooked": [f"s = ({GRID}).requires_grad_(grad)", "x = hooked(s * 1)"],
    "hooked_leaf": [f"x = hooked(({GRID}).requires_grad_(grad))", f"y = {GRID} / 2"],
    "pieces": [f"s = ({GRID}).requires_grad_(grad)", "x, y = (s * 1).chunk(2)"],
    "transposed": [f"s = ({GRID}).requires_grad_(grad)", "x = (s * 1).t()"],
    "double": [f"x = ({GRID}).double().requires_grad_(grad)", f"y = {GRID} / 2"],
    "view_under_no_grad": [f"s = ({GRID}).requires_grad_(grad)", "with torch.no_grad(): x = s[1:]"],
    "retained": [f"s = ({GRID}).requires_grad_(grad)", "x = retained(s * 1)"],
}
NET = """class Hidden(torch.autograd.Function):
    @staticmethod
    def forward(ctx, t):
        ctx.mark_dirty(t)
        return t.mul_(2)

    @staticmethod
    def backward(ctx, g):
        return g * 3


class Signs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, t):
        signs = t.sign()
        ctx.save_for_backward(signs)
        ctx.mark_non_differentiable(signs)
        return t.abs(), signs

    @staticmethod
    def backward(ctx, g, _):
        return g * ctx.saved_tensors[0]


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, t):
        return t * 2

    @staticmethod
    def backward(ctx, g):
        return g * 3


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(t, scale):
        return t * scale

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.scale = inputs[1]

    @staticmethod
    def backward(ctx, g):
        return g * ctx.scale, None


class First(torch.autograd.Function):
    @staticmethod
    def forward(ctx, t):
        ctx.size = t.shape
        return t[0]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        return g.expand(ctx.size)


def hooked(t):
    if t.requires_grad:
        t.register_hook(lambda g: g * 2)
    return t


def retained(t):
    if t.requires_grad:
        t.retain_grad()
    return t


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.p = torch.nn.Parameter(torch.linspace(-1, 1, 6))
        self.q = torch.nn.Parameter(torch.linspace(1, -1, 24).view(4, 6))
        self.register_buffer("b", torch.linspace(0, 1, 6))
        self.linear = torch.nn.Linear(6, 6)
        self.norm = torch.nn.LayerNorm(6, eps=0.1)  # a smaller one makes rounding errors of equal rows large
        self.bn = torch.nn.BatchNorm1d(6, eps=0.1)
        self.weighted = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(6, 6))
        self.spectral = torch.nn.utils.parametrizations.spectral_norm(torch.nn.Linear(6, 6))

    @torch.no_grad()
    def quiet(self, t):
        return t * 2

    @torch.no_grad()
    def halve_(self, t):
        return t.mul_(0.5)

    @torch.enable_grad()
    def loud(self, t):
        return t * self.p

    def frozen(self, t):
        with torch.no_grad():
            weight = torch.nn.functional.normalize(self.linear.weight, dim=0)
        return torch.nn.functional.linear(t, weight)

    def toggled(self, t):
        before = torch.is_grad_enabled()
        torch.set_grad_enabled(False)
        try:
            scale = (t * self.p).abs().amax()
        finally:
            torch.set_grad_enabled(before)
        return t / (scale + 3)

    def forward_mode(self, t):
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(t, t.cos())
            return torch.autograd.forward_ad.unpack_dual(dual * self.p).tangent
"""
STATE = ("self.p", "self.q", "self.b", "self.linear.weight")

MODES = ["torch.no_grad()", "torch.enable_grad()", "torch.set_grad_enabled(False)", "torch.inference_mode()"]
MODES += ["torch.no_grad(), torch.inference_mode()", "torch.autograd.set_grad_enabled(x.dim() == 0)"]
RARE_MODES = [
    "torch.no_grad(), torch.enable_grad()",
    "torch.inference_mode(False)",
    "torch.inference_mode(x.dim() > 9)",
]
HOOKS = ["torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t * 2)", "torch.autograd.graph.save_on_cpu()"]
HOOKED = [
    "{t}.register_hook(lambda g: g * 2)",
    "{t}.register_hook(lambda g: None)",
    "{t}.retain_grad()",
    "self.p.register_post_accumulate_grad_hook(lambda p: None)",
    "self.p.register_hook(lambda g: g * 2)",
]
READS = [
    *("{t} * 2", "{t}.sin()", "{t} * {u}", "{t} + {u}", "{t}.clone()", "{t}.tanh()", "{t}.sum()", "{t}.detach() * {t}"),
    *("torch.where({t} > 0, {t}, {u})", "torch.stack([{t}, {u}])", "torch.cat([{t}, {u}])", "{t} * self.p"),
    *("torch.nn.functional.linear({t}, self.linear.weight)", "self.linear({t})", "self.norm({t})", "{t}.softmax(-1)"),
    *("{t} + self.b", "{t}.cumsum(0)", "{t}.relu()", "torch.einsum('...i,...i->...', {t}, {u})", "{t}.square().mean()"),
    *("self.quiet({t})", "self.halve_({t})", "self.loud({t})", "self.bn({t})", "self.weighted({t})", "{t}.max(-1)[0]"),
    *("torch.dropout({t}, 0.5, True)", "torch.dropout({t}, 0.5, False)", "torch.nn.functional.relu({t}, inplace=True)"),
    *("{t}.to(torch.float64)", "{t}.to({t}.dtype)", "{t}.sort(-1)[0]", "self.spectral({t})", "{t} * self.p.detach()"),
    *(
        "torch.zeros_like({t})",
        "torch.ones_like({t}, requires_grad=True) * {t}",
        "torch.empty_like({t}).copy_({t})",
        "torch.ones_like({t}).mul_({u})",
        "{t} @ {t}.mT",
    ),
    *("torch.vmap(lambda t: t.sin() * 2)({t})", "{t}.masked_fill({t} > 0, 0)", "{t}.detach().sin()"),
    *("{t}[..., torch.tensor([0, 1])]", "torch.nn.functional.scaled_dot_product_attention({t}, {u}, {t})"),
    "torch.utils.checkpoint.checkpoint(lambda t: (t * self.p).sin(), {t}, use_reentrant=False)",
    "torch.utils.checkpoint.checkpoint(self.linear, {t}, use_reentrant=False)",
    "torch.utils.checkpoint.checkpoint(lambda t: torch.dropout(t, 0.5, True) * self.p, {t}, use_reentrant=False)",
    "torch.utils.checkpoint.checkpoint(lambda t: t.sin().mul_(self.p), {t}, use_reentrant=False)",
]
READS += [
    *("{t}.detach().requires_grad_(False) * {u}", "{t}.data * {u}", "torch.where({t} > 0, {t}, {u}.detach())"),
    *("{t}.expand(2, *{t}.shape).sum(0)", "{t}.index_put((torch.tensor([0, 1]),), {u}[:2])", "({t} * 1j).imag"),
    *("{t}.to(torch.complex64).real", "torch.view_as_real({t} * 1j)", "{t}.abs()", "{t}.conj() * {u}", "{t}.float()"),
    *("{t}.half().float()", "{t}.double() * {u}", "{t}[:1].expand_as({t}) * {u}", "{t}.gather(-1, {t}.argsort(-1))"),
    *("{t}.index_select(0, torch.tensor([0, 0]))", "{t}.masked_scatter({t} > 0, {u})", "{t}.flip(0)", "{t}.prod(-1)"),
    *("{t}.norm()", "{t}.std(-1)", "{t}.logsumexp(-1)", "torch.nn.functional.gelu({t})", "self.q[:, :2].mT @ {t}"),
    *("{t}.sin().detach_()", "{t}.new_zeros(6).add_({t}.sum())", "{t}.clone().unbind()[0].mul_(2)", "{t}.sum() * {u}"),
    *("{t} * self.p.data", "{t} * self.b.mean()", "({t} * self.p).split(2)[0]", "{t}.clone().zero_() + {t}"),
    *("{t}.unfold(-1, 2, 1).sum(-1)", "torch.as_strided({t}.clone(), (2,), (1,))", "{t}.pow({u}.detach().abs())"),
    *(
        "{t} / ({u}.abs() + 1)",
        "torch.lerp({t}, {u}, self.p.mean())",
        "torch.outer({t}.flatten()[:3], {u}.flatten()[:2])",
    ),
]
READS += [  # estimators, constraints and derivatives as people write them
    *("{t} + ({t}.round() - {t}).detach()", "{t} * 0.1 + {t}.detach() * 0.9", "{t}.clone().detach_()"),
    *("torch.nn.functional.gumbel_softmax({t}, hard=True)", "torch.nn.functional.silu({t}, inplace=True)"),
    *("torch.fill({t}, self.p[0])", "torch.where({t} > 0, {t}, 0.1 * {t}).requires_grad_({t}.requires_grad)"),
    *("{t} / self.p.data.norm()", "self.p.requires_grad_(True) * {t}", "Scaled.apply({t}, 0.5)", "First.apply({t})"),
    *("{t}.renorm(2, 0, 1.0)", "torch.nn.functional.embedding(torch.tensor([0, 1, 1]), {t}.flatten(1), padding_idx=0)"),
    *("torch.utils.checkpoint.checkpoint(self.linear, {t}, use_reentrant=True)", "self.frozen({t})", "{t}.var(0)"),
    *("self.toggled({t})", "torch.func.functional_call(self.linear, {{'weight': self.q.mT @ self.q}}, ({t},))"),
]
READS += [  # leaves that the forward makes, and functions that are differentiated with numbers in them
    *(
        "torch.tensor([1.0, 2, 3, 4, 5, 6], requires_grad=True) + {t}",
        "torch.nn.Parameter({t}.detach()).detach() * {u}",
    ),
    "torch.utils.checkpoint.checkpoint_sequential([self.linear, self.norm], 2, {t}, use_reentrant=False)",
]
QUESTIONS = [
    *(
        "{t} * (2 if torch.is_grad_enabled() else 3)",
        "{t} * (2 if {t}.requires_grad else 3)",
        "{t} * (1 + {t}._version)",
    ),
    *("{t} * (2 if {t}.is_leaf else 3)", "{t} * (2 if {t}.grad_fn is None else 3)"),
    *("{t} * (2 if {t}.grad is None else 3)", "{t} * (2 if torch.is_inference_mode_enabled() else 3)"),
    "{t} * (2 if self.p.requires_grad else 3)",
]
PIECES = ["{t}.chunk(2)", "{t}.unbind()[:2]", "{t}.split(2)[:2]", "{t}.chunk(2, -1)", "{t}.unbind(-1)[:2]"]
INNER = [
    "torch.autograd.grad({u}.square().sum(), {t}, retain_graph=True, materialize_grads=True)[0]",
    "torch.autograd.grad(({t} * {t} * self.p.sum()).sum(), {t}, create_graph={flag})[0]",
    "torch.autograd.grad(self.norm(self.linear({t})).sin().sum(), self.linear.weight, create_graph={flag})[0]",
    "torch.autograd.grad({u}.sin().sum(), [{t}, self.p], create_graph={flag}, retain_graph=True, allow_unused=True)[0]",
]
INNER += [
    "torch.autograd.grad({t}.sum(), [{t}, {u}], create_graph={flag}, retain_graph=True, materialize_grads=True)[1]",
    "torch.autograd.grad(self.p.sin().sum() * {t}, self.p, torch.ones_like({t}), create_graph={flag})[0]",
    "torch.func.functional_call(self.linear, {{'weight': self.q.mT @ self.q, 'bias': self.p}}, ({t},))",
    "torch.func.hessian(lambda t: (t.sin() * self.p[0]).sum())({t}.flatten()[:2])",
    "torch.func.grad(lambda t: (t * self.p).sin().sum())({t})",
    "torch.func.vjp(lambda t: (t * self.p).sin(), {t})[1]({t})[0]",
    "torch.func.jvp(lambda t: (t * self.p).sin(), ({t},), ({t}.cos(),))[1]",
    "torch.autograd.functional.vjp(lambda t: (t * self.p).sin(), {t}, {t}.cos(), create_graph={flag})[1]",
]
INNER += [
    "torch.autograd.grad(torch.autograd.grad(({t} ** 3).sum(), {t}, create_graph=True)[0].sum(), {t})[0]",
    "torch.autograd.grad(({t} * self.p).sin().sum(), {t}, create_graph=True)[0].square().sum()",
    "torch.autograd.grad(({t} * self.p).sin(), {t}, {t}.detach().cos(), create_graph={flag})[0]",
    "torch.autograd.grad(Twice.apply({t}).sin().sum(), {t}, create_graph={flag})[0]",
    "torch.func.jacrev(lambda t: t.sin() * self.p[0])({t}.flatten()[:2])",
    "torch.func.jacfwd(lambda t: t.sin() * self.p[0])({t}.flatten()[:2])",
    "torch.func.vmap(torch.func.grad(lambda t: (t * self.p[0]).sin().sum()))({t})",
    "torch.func.grad_and_value(lambda t: (t * self.p).cos().sum())({t})[0]",
    "torch.func.grad(lambda p, t={t}: (p['bias'] * t).sin().sum())(dict(self.linear.named_parameters()))['bias']",
    "torch.func.linearize(lambda t: (t * self.p).sin(), {t})[1]({t}.cos())",
    "torch.autograd.functional.jacobian(lambda t: t.sin() * self.p[0], {t}.flatten()[:2], create_graph={flag})",
    "self.forward_mode({t})",
]
INNER += [
    "torch.func.grad(lambda t: (2 * t / 3).sin().sum())({t})",
    "torch.func.vjp(lambda t: self.loud(t * 2), {t})[1]({t}.cos())[0]",
    "torch.vmap(torch.func.grad(lambda t: (t * self.quiet(t)).sum()))({t})",
    "torch.autograd.grad(hooked({t} * self.p).sum(), self.p, create_graph=True)[0] * {t}",
]
WRITES_WITH_GRADIENTS = [
    *("{t}.mul_(self.p)", "{t}.addcmul_({u}, {u})", "{t}.lerp_({u}, 0.3)", "{t}.masked_scatter_({t} > 0, {u})"),
    *("{t}.index_put_((torch.tensor([0, 1]),), {u}[:2].sin())", "{t}.index_add_(0, torch.tensor([0]), {u}[:1].sin())"),
    *("{t}.scatter_add_(0, torch.zeros_like({t}, dtype=torch.long), {u}.sin())", "{t}[1:] = {u}[:-1].sin()"),
    *("torch._foreach_mul_([{t}], [{u}.sin()])", "torch._foreach_copy_([{t}], [{u}.sin()])", "{t}.sigmoid_()"),
    *("torch._foreach_add_([{t}, self.b], 1)", "{t}.clamp_(-1, 1)"),
    *("{t}.data = {u}.detach().clone()", "{t}.copy_({u}.detach())", "{t}[0] = self.p"),
    *("{t}.data.copy_({u})", "torch.nn.functional.dropout({t}, 0.5, inplace=True)"),
    *("{t}.unbind()[0].mul_(2)", "{t}.split(2)[0].add_({u}.split(2)[0])", "{t}.chunk(2, -1)[1].zero_()"),
    *("{t}.masked_fill_({u}.detach() > 0, 0.5)", "{t}.where({t} > 0, {u}).relu_()", "{t}.expand_as({t}).mul_(2)"),
    *("{t}.copy_({u}.sum())", "{t}.div_({u}.abs() + 1)", "{t}.pow_(2)", "{t}.tanh_()", "{t}.sqrt_()", "{t}.exp_()"),
    *("torch.mul({t}, {u}, out={t})", "torch.add({u}, 1, out={t}.detach())", "{t}.cumsum_(0)", "{t}.squeeze_()"),
    *(
        "{t}.flatten()[0:2].fill_(self.p[0])",
        "{t}.view(-1)[0] = {u}.sum()",
        "{t}[{t} > 0] *= 2",
        "{t}.diagonal().zero_()",
    ),
    *("{t}.detach().copy_({u})", "{t}.normal_()", "torch.nn.init.ones_({t})", "{t}.addmm_({t}, {u}[0].outer({u}[0]))"),
]
UPDATES = [
    *("self.p.mul_(0.9).add_({v}.detach(), alpha=0.1)", "self.q.data = self.q.data * 0.5 + self.p.data * 0.5"),
    *("torch._foreach_lerp_([self.p, self.b], [{v}.detach(), {v}.detach()], 0.1)", "self.b = self.p * {v}"),
    *("self.p.data.lerp_({v}, 0.5)", "self.linear.bias.data += {v}.detach()", "self.q[1:].mul_(0.5)", "self.b += 1"),
    *("self.b[2:] = {v}[2:]", "self.b.data = self.b.data + {v}.detach()", "self.b.zero_()", "self.b = self.b + 1"),
    *("self.b = {v} * 1", "self.b.detach_()", "self.b.copy_(self.b * {v})", "self.bn.running_mean.mul_(0.5)"),
    *("self.linear.weight.data.clamp_(-0.1, 0.1)", "self.q.data[1:] = 0", "self.p.data = {v}.detach().clone()"),
    *("torch._foreach_mul_([self.p.data, self.q.data], 0.9)", "self.p.data.copy_(self.p.data.softmax(0))"),
    *("self.b.mul_(0.9).add_({v}, alpha=0.1)", "self.b.copy_({v})", "self.b = self.b * 0.5 + {v}"),
    *(
        "self.b.lerp_({v}.detach(), 0.1)",
        "self.p.data.mul_(0.9)",
        "self.p.data[0] = 1",
        "self.b = {v}.detach().clone()",
    ),
    *(
        "self.p.copy_({v})",
        "self.p.mul_(0.5)",
        "self.q[0].add_({v})",
        "self.b.lerp_(self.p, 0.5)",
        "self.p.add_(self.b)",
    ),
]
RESULTS = ["{t}", "{t}", "{t}", "{t}", "{t}.argmax()", "{t} > 0", "{t}.detach()", "i", "{t}[0]", "i + 1"]
RESULTS += ["self.p", "self.p * 2", "self.b", "{t}.data", "{t}.expand(2, *{t}.shape)", "{t}.squeeze()", "self.q[0]"]
RESULTS += ["{t}.view_as({t})", "self.b[1:]", "{t}.unbind()[0]"]


@dataclasses.dataclass(frozen=True)
class Step:
    """A statement, the names that it makes, and the context manager that it is under."""

    text: str
    makes: tuple[str, ...] = ()
    mode: str = ""

    def __str__(self) -> str:
        return f"with {self.mode}: {self.text}" if self.mode else self.text


@dataclasses.dataclass(frozen=True)
class Program:
    """The forward of a module with state, on inputs of one of the kinds above and integers."""

    inputs: str
    steps: tuple[Step, ...]
    returned: tuple[str, ...]
    traced: str = "a call"
    """In which of the ways of CALLS it is traced."""

    @property
    def parameters(self) -> list[str]:
        """The names of the arguments."""
        made = [re.match(r"(?:with .*: )?([xy, ]+) = ", line) for line in INPUTS[self.inputs]]
        return [*(name for found in made if found for name in found[1].split(", ")), "i"]

    @property
    def make_source(self) -> str:
        """A function of the first element, and of whether leaves require grad; it gives the leaves and arguments."""
        lines = [*INPUTS[self.inputs], "i = torch.arange(6) % 4"]
        leaf = lines[0].partition(" = ")[0]
        others = ["y"] if self.inputs in ("two_leaves", "second_leaf") else []
        given = f"return [{', '.join([leaf, *others])}], ({', '.join(self.parameters)})"
        return "def make(start, grad):\n" + "".join(f"    {line}\n" for line in [*lines, given])

    @property
    def source(self) -> str:
        """The module and its inputs."""
        lines = [*map(str, self.steps), f"return [{', '.join(self.returned)}]"]
        forward = "".join(f"        {line}\n" for line in lines)
        head = f"    def forward(self, {', '.join(self.parameters)}):\n"
        return f"import torch\nimport torch.utils.checkpoint\n\n{NET}\n{head}{forward}\n{self.make_source}"

    def made(self) -> tuple[type[torch.nn.Module], Callable]:
        """The class of the module, and `make`."""
        names: dict = {}
        exec(compile(self.source, "<program with gradients>", "exec"), names)
        return names["Net"], names["make"]


# Making programs -----------------------------------------------------------------------------------------------------


class Draft:
    """A program that grows, and its tensors in eager."""

    def __init__(self, inputs: str, choose: random.Random) -> None:
        self.choose = choose
        self.empty = Program(inputs, (), ())
        net, make = self.empty.made()
        self.scope = {**make.__globals__, "self": net()}
        given = make(0, grad=True)[1]
        self.pool: dict[str, torch.Tensor] = dict(zip(self.empty.parameters, given, strict=True))
        del self.pool["i"]
        self.steps: list[Step] = []
        self.mode = ""
        self._names = (f"t{n}" for n in itertools.count(1))

    def add(self, kind: str) -> bool:
        """Add a step of a kind if one is found that eager takes."""
        makers = {
            "view": self._view,
            "write": self._write,
            "read": lambda: self._make(self._filled(self.choose.choice(READS))),
            "inner": self._inner,
            "pieces": lambda: self._make(self._filled(self.choose.choice(PIECES)), 2),
            "update": self._update,
            "leaf": lambda: self._make(self._filled("{t}.detach().requires_grad_()")),
            "function": self._function,
            "question": lambda: self._make(self._filled(self.choose.choice(QUESTIONS))),
            "hook": self._hook,
            "detach": lambda: self._execute(Step(self._filled("{t}.detach_()"), (), self.mode)),
            "unmake": lambda: self._execute(Step(self._filled("{t}.requires_grad_(False)"), (), self.mode)),
            "swap": lambda: self._execute(Step(self._filled("{t}.swapaxes_(0, -1)"), (), self.mode)),
        }
        return any(makers[kind]() for _ in range(6))

    def _view(self) -> bool:
        usual = [k for k in VIEWS if k not in ("as_strided", "bits", "complex")]
        kind = self.choose.choice(usual if self.choose.random() < 0.95 else list(VIEWS))
        return self._make(self._filled(self.choose.choice([*VIEWS[kind], *VIEWS["slice"]])))

    def _write(self) -> bool:
        forms = self.choose.choice([*WRITES.values(), *[WRITES_WITH_GRADIENTS] * 8])
        form = self.choose.choice(forms)
        if form.startswith("with "):
            form = form.partition(": ")[2]  # under a mode of its own
        target = self.choose.choice([*self.pool, *self.pool, self.choose.choice(STATE)])
        t = self._value(target)
        alike = [u for u in self.pool if u != target and self.pool[u].shape == t.shape]
        u = self.choose.choice(alike) if alike else LIKE.format(t=target)
        if alike and not apart(t, self.pool[u]):
            u = f"{u}.clone()"
        line = Line(form.format(t=target, u=u), "", "t", "")
        return is_defined(line, {"t": t}) and self._execute(Step(line.text, (), self.mode))

    def _update(self) -> bool:
        fitting = [
            f"{n}[0]" if t.dim() == 2 else n for n, t in self.pool.items() if t.shape[-1:] == (6,) and t.dim() < 3
        ]
        if not fitting:
            return False
        text = self.choose.choice(UPDATES).format(v=self.choose.choice(fitting))
        return self._execute(Step(text, (), self.mode))

    def _hook(self) -> bool:
        """A hook on a gradient, but for a view made under no_grad: torch 2.13 crashes there."""
        hooked = [n for n, t in self.pool.items() if _takes_hooks(t)]
        form = self.choose.choice(HOOKED)
        return bool(hooked) and self._execute(Step(form.format(t=self.choose.choice(hooked)), (), self.mode))

    def _function(self) -> bool:
        """A function of autograd, in the grad mode of the call: in another, one that writes may give a new tensor."""
        self.mode = ""
        form, count = self.choose.choice((("Twice.apply({t})", 1), ("Hidden.apply({t})", 1), ("Signs.apply({t})", 2)))
        return self._make(self._filled(form), count)

    def _inner(self) -> bool:
        """A derivative. Those under inference mode are computed by a thread that is not."""
        if "inference" in self.mode:
            self.mode = ""
        return self._make(self._filled(self.choose.choice(INNER)))

    def _filled(self, form: str) -> str:
        t = self.choose.choice([*self.pool, list(self.pool)[-1]])
        alike = [u for u in self.pool if u != t and self.pool[u].shape == self.pool[t].shape]
        u = self.choose.choice(alike or [t])
        return form.format(t=t, u=u, flag=self.choose.choice((True, False)))

    def _make(self, text: str, count: int = 1) -> bool:
        names = tuple(next(self._names) for _ in range(count))
        return self._execute(Step(f"{', '.join(names)} = {text}", names, self.mode))

    def _value(self, name: str) -> torch.Tensor:
        return eval(name, self.scope, self.pool)

    def _execute(self, step: Step) -> bool:
        """Whether eager takes it and what it makes is small and finite."""
        made = dict(self.pool)
        try:
            exec(str(step), self.scope, made)
        except (RuntimeError, IndexError, ValueError, TypeError, AttributeError):
            return False
        new = [made.get(name) for name in step.makes]
        if any(not isinstance(t, torch.Tensor) or not 0 < t.numel() <= 96 or t.dim() > 3 for t in new):
            return False
        if any(t.is_inference() for t in new) or any(float(t.detach().abs().max()) > 1e3 for t in new):
            return False
        self.pool |= dict(zip(step.makes, new, strict=True))
        self.steps.append(step)
        return True

    def program(self) -> Program:
        """What was made, with results of which at least one is computed last."""
        names = [*self.pool, *self.pool, self.choose.choice(STATE)]
        kept = (
            list(self.pool) if self.choose.random() < 0.5 else self.choose.choices(names, k=self.choose.randint(1, 4))
        )
        results = [self.choose.choice(RESULTS).format(t=t) if self.choose.random() < 0.4 else t for t in kept]
        sized = [r for r in results if self._is_tensor(r)]
        traced = self.choose.choice([*["a call"] * 8, *CALLS])
        if CALLS[traced][2] and re.search("enable_grad|loud", " ".join(map(str, self.steps))):
            traced = "a call"
        return dataclasses.replace(self.empty, steps=tuple(self.steps), returned=tuple(sized or ["i"]), traced=traced)

    def _is_tensor(self, text: str) -> bool:
        try:
            return isinstance(eval(text, self.scope, {**self.pool, "i": torch.arange(6)}), torch.Tensor)
        except (RuntimeError, IndexError):
            return False


def drawn_inputs(choose: random.Random) -> str:
    """A kind of inputs, seldom one that is often refused."""
    usual = [name for name in INPUTS if not re.search("detached|hooked|retained", name)]
    return choose.choice(usual if choose.random() < 0.9 else list(INPUTS))


def drawn_program(seed: int, number: int) -> Program:
    """The program of this number."""
    choose = random.Random(f"{seed} {number}")
    draft = Draft(drawn_inputs(choose), choose)
    kinds = ["view"] * 8 + ["write"] * 10 + ["read"] * 8 + ["pieces", "update"] * 4
    kinds += ["inner"] * (1 if "hooked" in draft.empty.inputs else 4)
    if choose.random() < 0.1:
        kinds += ["detach", "function", "leaf", "leaf", "unmake", "swap", "hook"]
    kinds += ["question"] * 4 if choose.random() < 0.15 else []
    modes = ["", "", "", *MODES, MODES[0], *((*RARE_MODES, *HOOKS) if choose.random() < 0.1 else [])]
    for _ in range(choose.randint(3, 8)):
        if choose.random() < 0.5:
            draft.mode = choose.choice(modes)
        draft.add(choose.choice(kinds))
    return draft.program()


def short_program(seed: int, number: int) -> Program:
    """The short program of this number: rare kinds of statements and modes as often as others, traced in any way."""
    choose = random.Random(f"short {seed} {number}")
    draft = Draft(drawn_inputs(choose), choose)
    kinds = ["view"] * 6 + ["write"] * 10 + ["read", "pieces", "update"] * 4 + ["inner"] * 2
    kinds += ["detach", "function", "leaf", "unmake", "swap"]
    for _ in range(choose.randint(2, 4)):
        if choose.random() < 0.6:
            draft.mode = choose.choice(["", "", *MODES, *RARE_MODES])
        draft.add(choose.choice(kinds))
    program = draft.program()
    traced = choose.choice(list(CALLS))
    if CALLS[traced][2] and re.search("enable_grad|loud", " ".join(map(str, program.steps))):
        traced = "a call"
    return dataclasses.replace(program, traced=traced)


# Running them --------------------------------------------------------------------------------------------------------

KINDS = {
    "wrong": "it does something else than eager",
    "fails": "it raises an exception that is no refusal",
    "refused": "it is refused when it is traced",
    "refused at the call": "it is refused when it is called with other inputs or in another grad mode",
    "eager raises": "so does it, or the trace is refused",
    "raises": "its backward pass raises: it needs a tensor that `.data` changed where eager does not look, "
    "or that is copied only where a trace is made with gradients",
    "right": "it does what eager does",
}
FORBIDDEN = (
    "function that returns multiple views",
    "has been modified inplace",
    "modified by an inplace operation",
    "being modified inplace",
    "a view of a leaf Variable",
    "a leaf Variable that requires grad is being used in an in-place operation",  # a view made before its base did
    "returned an invalid gradient",
    "backward through the graph a second time",
    "When use_reentrant=True",
    "Recomputed values for the following tensors",
    "Inference tensors cannot be saved for backward",  # a graph makes no inference tensors
)
CALLS = {  # the first element of the inputs, whether leaves require grad, and whether the call is under no_grad
    "a call": (-0.5, True, False),
    "a call under no_grad": (0.25, True, True),
    "a call with inputs that do not require grad": (0.5, False, False),
}


def verdict(program: Program) -> Verdict:
    """Trace a program, call the trace in three ways, first in that of the trace, and compare with eager."""
    net, make = program.made()
    model, traced = net(), net()
    _, grad, without = CALLS[program.traced]
    try:
        args = make(0, grad)[1]
        with torch.set_grad_enabled(not without):
            trace = st.trace(traced, args)
    except Exception as error:
        expected = observe(model, model, make(0, grad), without)
        return _raised(expected, error, {st.TraceError: "refused"})
    if impure := [str(n.target) for n in trace.graph_module.graph.nodes if writes(n.target)]:
        return Verdict("wrong", f"the graph has {', '.join(impure)}")
    for way in _ways(program):
        found = called(program, way, model, trace, traced)
        if found is None:
            break
        if found.kind != "right":
            return Verdict(found.kind, f"{way}: {found.why}")
    return Verdict("right")


def _ways(program: Program) -> list[str]:
    return sorted(CALLS, key=lambda way: way != program.traced)


def called(
    program: Program, way: str, model: torch.nn.Module, trace: Callable, traced: torch.nn.Module
) -> Verdict | None:
    """Call a trace in one of the ways, and compare; None where eager raises in another way than the traced one."""
    make, (start, grad, without) = program.made()[1], CALLS[way]
    _, traced_grad, traced_without = CALLS[program.traced]
    source = " ".join(step.text for step in program.steps)
    copied = saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t)
    with (
        contextlib.nullcontext() if "torch.func" in source else copied,  # which takes no such hooks
        mock.patch.object(torch.Tensor, "cpu", torch.Tensor.clone),  # save_on_cpu copies only what is elsewhere
    ):
        expected = observe(model, model, make(start, grad), without)
    actual = observe(trace, traced, make(start, grad), without)
    if isinstance(expected, Exception) and way != program.traced:
        return None  # inner derivatives need gradients; a graph has them as ops
    for what in _beside(source, expected) if not isinstance(expected, Exception) else ():
        expected.pop(what, None)
    found = compare(expected, actual)
    if found.kind == "fails" and ("modified by an inplace" in found.why or "has been modified inplace" in found.why):
        if ".data" in source or (grad, without) != (traced_grad, traced_without):
            return Verdict("raises", found.why)
        found = compare(_plainly(program, way), actual)
    if found.kind == "wrong" and ".data = " in source:  # which puts other data where backward looks, but for copies
        found = compare(_plainly(program, way), actual)
    return found


def _beside(source: str, seen: dict) -> set[str]:
    """What of an observation of eager a trace needs not have, because of what torch does beside the program."""
    found = set()
    if re.search(r"(axes|squeeze)_\(|\.data = ", source):
        found.add("unwritten")  # a shape or memory that changes in place counts as a write in eager
    if "detach_()" in source:
        found.add("views")  # of views of a tensor that is detached later, `_base` is that tensor
    if "torch.func" in source and ".data" in source:
        found |= seen.keys() - SEEN  # gradients from data that `.data` changed, where nothing is copied
    if "use_reentrant=True" in source:
        found |= REENTRANT
    return found


def _plainly(program: Program, way: str) -> dict | Exception:
    """What eager does in a call after the ways before it, without copies of what backward needs."""
    net, make = program.made()
    model = net()
    for before in _ways(program):
        start, grad, without = CALLS[before]
        found = observe(model, model, make(start, grad), without)
        if before == way:
            break
    return found


REENTRANT = {"of the first", "of the last", "of gradients"}
"""What `autograd.grad` gives: nothing from behind a region that `backward()` runs again."""

SEEN = {"values", "identity", "memory", "views", "requires_grad", "leaf", "unwritten", "attributes"}
"""What `seen` tells."""


def observe(run: Callable, model: torch.nn.Module, given: tuple, without: bool) -> dict | Exception:
    """All that a caller can see of a run: results, arguments and state, how they share memory, and gradients."""
    leaves, args = given
    versions = [t._version for t in args]
    parameters = list(model.parameters())
    for t in parameters:
        t.grad = None
    model.b = model.b.detach()  # without the history of the call before
    torch.manual_seed(0)
    try:
        with torch.set_grad_enabled(not without):
            results = run(*args)
        found = seen(model, leaves, args, versions, results)
        return found | ({} if without else gradients([*leaves, *parameters], args, results))
    except Exception as error:
        return error


def seen(
    model: torch.nn.Module, leaves: list[torch.Tensor], args: tuple, versions: list[int], results: list[torch.Tensor]
) -> dict:
    """Values, metadata and shared memory of arguments, what they were made of, results and state."""
    tensors = [*args, *results, *leaves, *model.parameters(), *model.buffers()]
    return {
        "values": [t.detach().clone() for t in tensors],
        "identity": [[u is t for u in tensors].index(True) for t in tensors],
        "memory": memory(tensors),
        "views": [[root(u) is root(t) for u in tensors].index(True) for t in tensors],
        "requires_grad": [t.requires_grad for t in tensors],
        "leaf": [t.is_leaf for t in tensors],
        "unwritten": [t._version == before for t, before in zip(args, versions, strict=True)],
        "attributes": list(dict(model.named_parameters())) + list(dict(model.named_buffers())),
    }


def _takes_hooks(t: torch.Tensor) -> bool:
    """Whether torch lets hooks act on the gradient of a tensor. On a view whose base was written since it crashes."""
    try:
        return not (t._is_view() and (t.is_leaf or t._version))
    except RuntimeError:  # a view made under no_grad whose base was written since
        return False


def root(t: torch.Tensor) -> torch.Tensor:
    """What autograd takes a tensor for a view of; itself if for none, and where it has no gradient."""
    return t._base if t._is_view() and t.requires_grad else t


def gradients(leaves: list[torch.Tensor], args: tuple, results: list[torch.Tensor]) -> dict:
    """The gradients of the leaves: accumulated by two backward passes, of one result, and of gradients."""
    leaves = [t for t in leaves if t.requires_grad and t.is_leaf]
    found: dict = {}
    parts = [r for r in results if r.requires_grad]
    if not parts or not leaves:
        return {"none": not parts}
    total = weighted(parts)
    for name in ("backward", "second backward"):
        total.backward(retain_graph=True)
        found[name] = [None if t.grad is None else t.grad.clone() for t in leaves]
    retained = [t for t in args if not t.is_leaf]
    retained += [t for t in parts if not t.is_leaf and all(t is not a for a in args)]
    found["retained"] = [None if t.grad is None else t.grad.clone() for t in retained]
    found["of the first"] = torch.autograd.grad(weighted(parts[:1]), leaves, retain_graph=True, allow_unused=True)
    found["of the last"] = torch.autograd.grad(weighted(parts[-1:]), leaves, retain_graph=True, allow_unused=True)
    first = torch.autograd.grad(total, leaves, create_graph=True, allow_unused=True)
    used = [g for g in first if g is not None and g.requires_grad]
    found["of gradients"] = torch.autograd.grad(weighted(used), leaves, materialize_grads=True) if used else []
    return {name: list(grads) for name, grads in found.items()}


def weighted(parts: list[torch.Tensor]) -> torch.Tensor:
    """The sum of all elements, each with another weight."""
    plain = [torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for t in parts]
    return sum((t * torch.arange(1.0, t.numel() + 1).view(t.shape).cos()).sum() for t in plain)


def compare(expected: dict | Exception, actual: dict | Exception) -> Verdict:
    """What a trace did against what eager did."""
    if isinstance(actual, Exception):
        return _raised(expected, actual, {st.errors.InputMismatchError: "refused at the call"})
    if isinstance(expected, Exception):
        # Autograd forbids some writes to views, and tells when somebody looks. A pure graph has no such views.
        return Verdict(
            "right" if any(f in str(expected) for f in FORBIDDEN) else "wrong", f"eager raises {first_line(expected)}"
        )
    # A write hidden from autograd (`.data`) does not count in eager, but does where a trace writes back.
    if "unwritten" in expected:
        actual["unwritten"] = list(map(max, actual["unwritten"], expected["unwritten"]))
    for what in expected:
        for i, (a, b) in (
            enumerate(zip(expected[what], actual.get(what, ()), strict=False))
            if isinstance(expected[what], list)
            else ()
        ):
            if what not in SEEN and isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and a.shape == b.shape:
                b = b.where(~a.isnan(), a)  # zero times infinity, on a way that a graph does not have
            if not ((a is None) == (b is None) and same(a, b)):
                return Verdict("wrong", f"{what} {i}: eager {a}, trace {b}")
        if what not in actual:
            return Verdict("wrong", f"{what}: missing in the trace")
    return Verdict("right")


def _raised(expected: dict | Exception, error: Exception, known: dict[type[Exception], str]) -> Verdict:
    if isinstance(expected, Exception):
        return Verdict("eager raises", first_line(expected))
    return raised(error, known)


def minimal(program: Program) -> Program:
    """The program without the steps and results that its failure does not need."""
    return smallest(program, _smaller, _fault)


def _fault(program: Program) -> tuple[str, ...]:
    try:
        found = verdict(program)
    except Exception as error:
        return ("fails", str(error))
    return found.kind, *re.sub(r"\d+", "", found.why).split(":")[:2]


def _smaller(program: Program) -> Iterator[Program]:
    replace, steps, returned = dataclasses.replace, program.steps, program.returned
    for i, step in enumerate(steps):
        rest = steps[:i] + steps[i + 1 :]
        if not any(re.search(rf"\b{n}\b", " ".join([*(o.text for o in rest), *returned])) for n in step.makes):
            yield replace(program, steps=rest)
    for i in range(len(returned) if len(returned) > 1 else 0):
        yield replace(program, returned=returned[:i] + returned[i + 1 :])
    for i, step in enumerate(steps):
        if step.mode:
            yield replace(program, steps=(*steps[:i], replace(step, mode=""), *steps[i + 1 :]))
    for simpler in ("plain", "leaf", "leaf_and_plain", "two_leaves", "derived"):
        if simpler != program.inputs and list(INPUTS).index(simpler) < list(INPUTS).index(program.inputs):
            yield replace(program, inputs=simpler)


def main(argv: list[str] | None = None) -> int:
    """Run programs, print those that are wrong and why others were refused; 1 if any is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--draw", type=int, metavar="N", default=100, help="N random programs")
    parser.add_argument("--seed", type=int, default=0, help="of the random programs")
    parser.add_argument("--short", action="store_true", help="programs of two to four statements")
    parser.add_argument("--show", type=int, default=10, help="print so many wrong programs, as small as they get")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    draw = short_program if options.short else drawn_program
    counts, others = run_all((draw(options.seed, n) for n in range(options.draw)), verdict)
    wrong = [(program, found.why) for program, found in others if found.kind in ("wrong", "fails")]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for program, why in wrong[: options.show]:
            small = minimal(program)
            print(f"# traced as {small.traced}: {why}\n# {verdict(small).why}\n{small.source.partition(NET)[2]}\n")
    refused = collections.Counter(found.why for _, found in others if found.kind.startswith("refused"))
    report(counts, refused, KINDS)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
