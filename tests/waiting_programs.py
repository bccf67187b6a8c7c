"""Random models of repeated layers whose ops are made when the tape is read, and random uses of their traces.

    seed -> a class of layers, of drawn statements -> a model that calls them, with drawn statements before and after
        -> traced with copies and without -> drawn uses of both traces, in one order: calls, text, outlines, files
        -> what differs; and what differs from eager in results, buffers and gradients

    python tests/waiting_programs.py --draw 1000 --seed 90000

`tests/reuse_programs.py` tries whether a call may be copied at all. Here nearly all may, and the rest of the forward
and the users of the trace look at what is not made yet. `SCOPETRACE_CHECK=1` makes all of it at once, so it is off.
"""

import argparse
import collections
import contextlib
import copy
import dataclasses
import io
import itertools
import linecache
import os
import pathlib
import random
import re
import sys
import tempfile
import typing
import warnings
from unittest import mock

import reuse_programs
import torch
from torch import nn

import scopetrace as st
from scopetrace.api.runnable import program_of
from scopetrace.ir.tape import OpList, repetitions

F = nn.functional
"""For programs."""
KEPT: list[typing.Any] = []


class Both(typing.NamedTuple):
    """Two results."""

    y: typing.Any
    h: typing.Any


@dataclasses.dataclass
class Result:
    """Two results in an object."""

    y: typing.Any
    h: typing.Any


class Inner(nn.Module):
    """A part of a layer, of equal parts."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)])

    def forward(self, y):
        """Run it."""
        for part in self.parts:
            y = y + part(y)
        return y


INSIDE = [
    "y = self.fc(y)",
    "y = F.linear(y, self.fc.weight, self.out.bias)",
    "y = y @ self.out.weight.t()",
    "y = y.relu()",
    "y = y.tanh() * self.gain",
    "y = y.reshape(4, -1).t().reshape(-1, 4)",
    "y = y.to(y.dtype)",
    "y = y.contiguous()",
    "y = y.t().contiguous().t()",
    "y = y.float().double().float()",
    "with st.scope('mixed'): y = y * 2",
    "with st.scope('a'):\n            with st.scope('b'): y = self.out(y)",
    "y = y + self.scale",
    "y = self.inner(y)",
    "y = F.dropout(y, 0.5, self.training)",
    "y = y if y.shape[1] > 1 else y * 2",
    "y = y * y.size(-1)",
    "y, z = y.chunk(2, -1); y = torch.cat([z, y], -1)",
    "y, z = y.chunk(2, -1); y = torch.cat([y, y], -1)",
    "y = self.experts[1](y) + self.experts[0](y)",
    "y = y + aux if aux is not None else y",
    "y = y * y.stride(0) if y.is_contiguous() else y",
    "y = y.detach() + x",
    "y = torch.where(y > 0, y, x)",
    "y = y.max(-1, keepdim=True)[0] + x",
    "y = y.topk(2)[0].repeat(1, 2)",
    "y = self.norm(y)",
    "y = F.batch_norm(y, self.mean, self.var, training=self.training)",
    "y = y.expand(2, *y.shape)[1]",
    "y = y.type_as(x)",
    "y = y.masked_fill(torch.ones_like(y).triu().bool(), 0.0)",
    "y = y.unsqueeze(0).squeeze(0)",
    "y = torch.stack([y, x]).sum(0)",
    "y = torch.cat([*y.split(1, -1)[:2], *x.split(2, -1)[1:]], -1)",
    "y = self.same(y)",
    "h = y.exp()",
    "h = self.scale",
]
"""Statements of a layer: `x` is what it takes, `y` what it makes of it, `h` another result."""

OTHERS = [
    "self.steps.add_(1)",
    "self.scale.mul_(0.5)",
    "y = y.clone(); y.add_(1)",
    "y = y.clone(); y[0] = x[1]",
    "y = y * 1; y[:, 1:].mul_(2)",
    "x.add_(1)",
    "y = self.experts[self.index % 2](y)",
    "y = y + torch.arange(4)",
    "y = y + torch.tensor([1.0, 2.0, 3.0, 4.0])",
    "with torch.no_grad(): y = y + x",
    "with torch.autocast('cpu', dtype=torch.bfloat16): y = self.fc(y).float()",
    "try: y = y.view(3, 5)\n        except RuntimeError: y = y + 1",
    "h = x[:1]",
]
"""Those of which a layer does not wait, or is not copied."""

GIVES = [
    *("y", "y", "y", "y", "x + y", "x + y", "(x + y, h)", "{'y': y, 'h': h}", "(y, y)", "[y, [h]]", "Both(y, h)"),
    *("Result(y, h)", "(y, y.shape[1])", "(y, None)", "(x, y)", "(y, x)", "(y, self.scale)", "(y, y[:1])", "y.t().t()"),
    "y.view(y.shape)",
]

STATEMENTS = [
    "x.add_(1)",
    "x[0].mul_(2)",
    "x = x.clone(); x.t()[0] = 1",
    "first.mul_(2)",
    "first[:, 1].add_(x[:, 0])",
    "prev.add_(1)",
    "prev[0] = 0",
    "outs[1].mul_(2)",
    "outs[-2][0].add_(1)",
    "outs[0].zero_()",
    "outs[0].copy_(x)",
    "torch.add(x, 1, out=x)",
    "x = x + outs[1]",
    "x = x + outs[0] * outs[-1]",
    "x = x + F.relu(outs[1], inplace=True)",
    "x = x + outs[1].view(-1)[:4]",
    "x = x + prev.reshape(4, -1).t().reshape(x.shape)",
    "x = x + first.reshape(4, -1).t().reshape(x.shape)",
    "x = x.to(x.dtype)",
    "x = x.contiguous() + prev.contiguous()",
    "x = x * x.stride(0)",
    "x = x * outs[0].stride(0)",
    "x = x * x.storage_offset() + outs[1].element_size()",
    "x = x if outs[1].is_contiguous() else x * 2",
    "x = x * x.shape[-1] + len(outs)",
    "x = x[: x.shape[0] - 1].repeat(2, 1)",
    "x = x + 1 if x.requires_grad else x + 2",
    "x = x + 1 if outs[1].grad_fn is None else x + 2",
    "x = x + 1 if outs[0].is_leaf else x + 2",
    "x = x + 1 if x.data_ptr() == outs[-1].data_ptr() else x + 2",
    "x = x + outs[1]._version",
    "x = x * float(x.sum())",
    "x = x * outs[1][0, 0].item()",
    "x = x + 1 if x.sum() > 0 else x",
    "x = x + 1 if x is outs[-1] else x + 2",
    "x = x + torch.tensor(x.tolist())",
    "x = x + outs[1].data",
    "x = x.detach() + first",
    "outs[1].data.mul_(2)",
    "x = F.linear(x, self.layers[2].fc.weight)",
    "x = x @ self.layers[3].out.weight.t()",
    "x = x + self.layers[1].fc.weight[:1] * self.layers[2].fc.weight[2:3]",
    "x = x + self.layers[2].fc.bias.data",
    "x = x + self.layers[1].fc.bias.detach()",
    "x = x * self.layers[2].scale + self.layers[1].steps",
    "self.layers[2].scale.add_(1)",
    "self.layers[0].scale.mul_(2)",
    "self.layers[1].scale.copy_(x[0])",
    "self.layers[2].scale = x[0].detach()",
    "self.layers[1].scale = self.layers[2].scale",
    "self.layers[2].steps = self.layers[2].steps + 1",
    "with torch.no_grad(): self.layers[1].fc.weight.mul_(0.5)",
    "self.layers[1].fc.weight.data.add_(1)",
    "x = x + sum(p.sum() for p in self.layers[1].parameters())",
    "x = x + sum(p.sum() for n, p in self.named_buffers())",
    "x = x + self.layers[1].fc.weight.data_ptr() % 1",
    "x = take(self.layers[2](x))",
    "x = take(self.layers[0](x))",
    "x = take(self.layers[1](x, outs[0]))",
    "x = take(self.layers[2](x, x))",
    "x = take(self.layers[2](x, x[:]))",
    "x = take(self.layers[2](x, self.layers[2].scale))",
    "x = take(self.layers[2](x, self.layers[1].scale))",
    "x = take(self.layers[2](x=x))",
    "x = take(self.layers[3](x.t().contiguous().t()))",
    "x = take(self.layers[3](x[:]))",
    "x = take(self.layers[1](torch.cat([x, x])))[: x.shape[0]]",
    "x = take(self.layers[1](x.double().float()))",
    "x = take(self.layers[1](x.detach()))",
    "x = take(self.layers[3].forward(x))",
    "x = self.layers[3].fc(x)",
    "x = self.layers[2].inner(x) + self.layers[1].inner.parts[1](x)",
    "x = take(copy.deepcopy(self.layers[1])(x))",
    "x = take(torch.utils.checkpoint.checkpoint(self.layers[1], x, use_reentrant=False))",
    "x = take(torch.func.functional_call(self.layers[1], {'fc.bias': x[0]}, (x,)))",
    "x = torch.vmap(lambda v: self.layers[1].fc(v).relu())(x)",
    "x = torch.cond(x.sum() > 0, torch.relu, torch.neg, (x,))",
    "x = torch.cond(x.sum() > 0, lambda v: take(self.layers[2](v)), lambda v: self.layers[3].fc(v), (x,))",
    "x = x + torch.autograd.grad(x.sum(), first)[0]",
    "x.square().sum().backward()",
    "x.square().sum().backward(); self.layers[1].fc.weight.grad.mul_(2)",
    "x = x + torch.autograd.grad(outs[-1].sum(), self.layers[1].fc.bias, retain_graph=True)[0]",
    "x.register_hook(lambda g: g * 2)",
    "outs[1].retain_grad()",
    "self.last = x",
    "self.last = outs",
    "KEPT.append(outs[1])",
    "self.layers[1].kept = outs[0]",
    "try: self.layers[1](x[:, :3])\n        except RuntimeError: x = x + 1",
    "try: self.layers[2](x, fail=True)\n        except ValueError: x = x + 1",
    "try: self.layers[2](x, fail=True)\n        finally: x = x + 1",
    "with torch.no_grad(): x = take(self.layers[1](x))",
    "with torch.no_grad(): x = x + outs[1]",
    "with torch.autocast('cpu', dtype=torch.bfloat16): x = take(self.layers[1](x)).float()",
    "with torch.inference_mode(): x = take(self.layers[1](x))\n        x = x.clone()",
    "with st.scope('after'): x = take(self.layers[2](x)) * 2",
    "self.layers[1].eval(); x = take(self.layers[1](x)); self.layers[1].train(self.training)",
    "self.layers[2].gain = 3",
    "x = x + torch.ones_like(x) + torch.tensor([1.0])",
    "x = torch._foreach_add([x, outs[1]], 1.0)[0]",
    "torch._foreach_add_([outs[0], outs[1]], 1.0)",
    "x = x.as_strided(x.shape, (4, 1)) + first.as_strided(first.shape, (4, 1))",
    "x = x.expand(3, *x.shape).sum(0)",
    "x = torch.cat([x, outs[1], outs[0]])[: x.shape[0]]",
    "x = x + torch.rand_like(x) * 0",
    "x = F.dropout(x, 0.5, self.training)",
    "x = x + F.embedding(torch.arange(x.shape[0]), self.layers[1].fc.weight)",
    "del outs[1:]; outs += [x, x]",
    "outs[1].resize_(4, 2)",
    "outs[1].t_()",
    "outs[0].requires_grad_(False)",
    "outs[1].set_(first)",
    "x.swapaxes_(0, 1); x.swapaxes_(0, 1)",
    "x = x + outs[1].unsafe_chunk(2, -1)[0].sum()",
    "x = x.view(torch.int32).view(torch.float32)",
    "x = x + x.untyped_storage().nbytes()",
    "x = take(self.layers[0](self.layers[0].scale + x))",
    "x = take(self.layers[1](self.layers[1].fc.weight))[: x.shape[0]]",
    "x = take(self.layers[2](self.layers[1].fc.weight))[: x.shape[0]]",
    "print(end=str(x.shape))",
    "str(outs[1])",
    "assert x.shape == first.shape",
]
"""Statements of the model: `x` is what goes on, `first` what the layers got, `prev` what the last one got, and `outs`
what each gave."""

LAYERS = [
    "for layer in self.layers: prev = x; x = take(layer(x)); outs.append(x)",
    "for layer in self.layers: prev = x; x = take(layer(x)); outs.append(x)",
    "for layer in self.layers: prev = x; x = take(layer(x)); outs.append(x)",
    "for layer in self.layers: prev = x; x = x + take(layer(x)); outs.append(x)",
    "for layer in reversed(self.layers): prev = x; x = take(layer(x, first)); outs.append(x)",
    "for layer in self.layers: prev = x; r = layer(x); x = take(r); outs.append(x); rest.append(r)",
    "for layer in self.layers: prev = x; x = take(layer(x)); x.add_(1); outs.append(x)",
    "for layer in self.layers: prev = x; x = take(layer(x)); prev.mul_(2); outs.append(x)",
    "for i, layer in enumerate(self.layers): prev = x; x = take(layer(x, outs[-2] if i > 1 else None)); outs.append(x)",
    "for layer in self.layers: prev = x; z = take(layer(first)); x = take(layer(x)) + z; outs += [z, x]",
    "for layer in self.layers: prev = x; x = take(layer(x)); layer.scale.add_(x[0].detach()); outs.append(x)",
    "for layer in self.layers: prev = x; x = take(layer(x)).relu_(); outs.append(x)",
    "for block in self.blocks: prev = x; x = block(x); outs += [prev, x]",
]

RESULTS = ["x, first", "x, outs", "x, outs[0], outs[-1]", "x", "x, rest, outs[1][0]", "x, prev, self.layers[1].scale"]


def take(r):
    """The tensor that goes on, of what a layer gives."""
    while not isinstance(r, torch.Tensor):
        r = r["y"] if isinstance(r, dict) else r.y if isinstance(r, Result) else r[0]
    return r


class Base(nn.Module):
    """What all layers have."""

    def __init__(self, index):
        super().__init__()
        self.index, self.gain = index, 2.0
        self.fc, self.out, self.inner, self.norm = nn.Linear(4, 4), nn.Linear(4, 4), Inner(), nn.LayerNorm(4)
        self.experts, self.same = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]), nn.Identity()
        for name, shape in {"scale": (4,), "steps": (), "mean": (4,), "var": (4,)}.items():
            self.register_buffer(name, torch.ones(shape))


class Block(nn.Module):
    """Two layers."""

    def __init__(self, layers):
        super().__init__()
        self.pair = nn.ModuleList(layers)

    def forward(self, x):
        """Run them."""
        for layer in self.pair:
            x = x + take(layer(x))
        return x


def _tie(net):
    net.layers[2].fc.weight = net.layers[1].fc.weight


def _tie_inside(net):
    for layer in net.layers:
        layer.out.weight = layer.fc.weight


def _tie_across(net):
    for layer in net.layers[1:]:
        layer.out.weight = net.layers[0].out.weight


def _share_buffers(net):
    base = torch.ones(len(net.layers), 4)
    for i, layer in enumerate(net.layers):
        layer.scale = base[i]


def _views_as_parameters(net):
    base = torch.randn(len(net.layers), 4, 4)
    for i, layer in enumerate(net.layers):
        layer.fc.weight = nn.Parameter(base[i])


def _share_module(net):
    net.layers[3].inner = net.layers[2].inner


def _share_layer(net):
    net.layers[3] = net.layers[1]


def _parametrize(net):
    for layer in net.layers:
        nn.utils.parametrizations.weight_norm(layer.fc)


def _hook_all(net):
    for layer in net.layers:
        layer.register_forward_hook(lambda m, args, y: None)


def _transposed(net):
    for layer in net.layers:
        layer.out.weight = nn.Parameter(layer.out.weight.detach().t())


TWISTS = {
    "": lambda net: None,
    "tie": _tie,
    "tie inside": _tie_inside,
    "tie across": _tie_across,
    "share buffers": _share_buffers,
    "views as parameters": _views_as_parameters,
    "share module": _share_module,
    "share layer": _share_layer,
    "parametrize": _parametrize,
    "transposed": _transposed,
    "freeze one": lambda net: net.layers[2].fc.requires_grad_(False),
    "freeze": lambda net: net.requires_grad_(False),
    "hook": lambda net: net.layers[2].inner.register_forward_hook(lambda m, args, y: y * 2),
    "hook all": _hook_all,
    "other gain": lambda net: setattr(net.layers[3], "gain", 5.0),
    "double buffer": lambda net: setattr(net.layers[2], "steps", torch.ones((), dtype=torch.float64)),
}


@dataclasses.dataclass(frozen=True)
class Program:
    """A drawn program."""

    seed: int
    inside: list[str]
    gives: str
    body: list[str]
    result: str
    twist: str
    mode: tuple[bool, bool, bool, bool, bool]
    """Whether autograd is on, the model trains, the trace is functional, the batch is dynamic, data is read."""
    reuse: bool | None
    uses: list[str]

    def of_autograd(self) -> contextlib.AbstractContextManager[typing.Any]:
        """Inside, autograd is as the program wants it: on, off, or off in inference mode."""
        is_inference = not self.mode[0] and self.seed % 3 == 1
        return torch.inference_mode() if is_inference else torch.set_grad_enabled(self.mode[0])

    @property
    def source(self) -> str:
        """The code of the classes."""
        layer = ["y, h = x, None", *self.inside, "if fail: raise ValueError('fails')", f"return {self.gives}"]
        net = ["x = x * 2", "first = prev = x", "outs, rest = [], []", *self.body, f"return {self.result}"]
        return "\n".join(
            [
                "class Layer(Base):",
                "    def forward(self, x, aux=None, fail=False):",
                *(f"        {line}" for line in layer),
                "",
                "class Net(nn.Module):",
                "    def forward(self, x):",
                *(f"        {line}" for line in net),
            ]
        )

    def model(self) -> nn.Module:
        """The model, with the same weights each time."""
        namespace = dict(globals())
        name = f"<program {self.seed}>"
        linecache.cache[name] = (len(self.source), None, self.source.splitlines(True), name)
        exec(compile(self.source, name, "exec"), namespace)
        torch.manual_seed(self.seed)
        net = namespace["Net"]()
        net.layers = nn.ModuleList([namespace["Layer"](i) for i in range(4)])
        if "self.blocks" in self.source:
            net.blocks = nn.ModuleList([Block([net.layers[i], net.layers[i + 1]]) for i in (0, 2)])
        TWISTS[self.twist](net)
        return net.train(self.mode[1])


_WRITES = re.compile(r"\w_\(|\] = |out=|inplace|\.(scale|steps|last|kept|gain|data) = |hook|blocks|\.stride|contiguous")
"""Of statements after which the ops of layers are made at the end of the trace at latest."""


def program(seed: int) -> Program:
    """A program. Two of five only read, so that layers wait after the trace too."""
    r = random.Random(seed)
    if reads := r.random() < 0.4:
        statements, layers = ([x for x in lines if not _WRITES.search(x)] for lines in (STATEMENTS, LAYERS))
    else:
        statements, layers = STATEMENTS, LAYERS
    inside = r.sample(INSIDE, r.choice((1, 2, 3, 4))) + (r.sample(OTHERS, 1) if not reads and r.random() < 0.3 else [])
    r.shuffle(inside)
    extra = r.sample(statements, r.choice((0, 1, 1, 2, 2, 3)))
    loops = [r.choice(layers) for _ in range(r.choice((1, 1, 1, 2)))]
    body = [loops[0], *r.sample([*loops[1:], *extra], len(loops) - 1 + len(extra))]
    twist = r.choice(list(TWISTS)) if r.random() < 0.4 else ""
    mode = r.random() < 0.5, r.random() < 0.3, r.random() < 0.6, r.random() < 0.1, r.random() < 0.15
    uses = r.sample(list(USES), 4) + r.sample(list(SLOW_USES), int(r.random() < 0.1))
    gives, result, reuse = r.choice(GIVES), r.choice(RESULTS), None if r.random() < 0.17 else True
    return Program(seed, inside, gives, body, result, twist, mode, reuse, uses)


# What is done with a trace -------------------------------------------------------------------------------------------


def _number(trace, i):
    return trace.calls[i % len(trace.calls)]


def _call_text(c):
    return c.fqn, c.index, c.scope.path, *map(str, (c.arguments, c.outputs, c.attributes, c.mutated, c.raised))


def _outline(*targets):
    def use(trace):
        outline = trace.outline(*targets)
        functions = [
            (f.identifier, str(f), f.graph_module.code, [c.fqn for c in f.calls], str(f.inputs), str(f.outputs))
            for f in outline.functions
        ]
        return str(outline), outline.graph_module.code, functions, [*map(_call_text, outline.calls)]

    return use


def _nodes(trace):
    def node(n):
        value = n.meta.get("val")
        facts = (value.shape, value.dtype, value.stride()) if isinstance(value, torch.Tensor) else value
        return n.format_node(), str(facts), n.meta.get("stack_trace"), trace.scope_of(n).path, sorted(n.meta)

    return [node(n) for n in trace.graph_module.graph.nodes if n.op != "output"]


def _saved(trace):
    with tempfile.TemporaryDirectory() as folder:
        trace.save(pathlib.Path(folder) / "t.trace")
        loaded = st.load(pathlib.Path(folder) / "t.trace")
        return str(loaded), loaded.graph_module.code, [*map(_call_text, loaded.calls)], _outline("layers")(loaded)


def _edited(trace):
    other = copy.deepcopy(trace)
    for node in other.graph_module.graph.find_nodes(op="call_function", target=torch.ops.aten.tanh.default):
        node.target = torch.ops.aten.sigmoid.default
    other.graph_module.recompile()
    return str(other), [*map(_call_text, other.calls)], _outline("layers")(other)


def _with_graph(trace):
    return str(trace.with_graph(copy.deepcopy(trace.graph_module)))


def _explorer(trace):
    with tempfile.TemporaryDirectory() as folder:
        trace.to_model_explorer(pathlib.Path(folder) / "t.json")
        return (pathlib.Path(folder) / "t.json").read_text()


def _order(trace):
    return str(trace.order), trace.order.modules if hasattr(trace.order, "modules") else ""


def _of_fqns(trace):
    names = ("layers.1", "layers.3.inner", "layers.2.fc", "layers.3.inner.parts.1")
    return [_call_text(trace.call(name)) for name in names]


USES = {
    "last call": lambda t: _call_text(_number(t, -1)),
    "inner call": lambda t: str(_number(t, 37).arguments),
    "inner outputs": lambda t: str(_number(t, 23).outputs),
    "middle call": lambda t: _call_text(_number(t, 15)),
    "calls": lambda t: [*map(_call_text, t.calls)],
    "nodes of calls": lambda t: [[n.name for n in c.nodes] for c in t.calls],
    "records": lambda t: [(c.record.start, c.record.stop, c.record.position) for c in t.calls],
    "named calls": _of_fqns,
    "scopes": lambda t: [s.path for s in t.scope.walk()],
    "text": str,
    "code": lambda t: t.graph_module.code,
    "nodes": _nodes,
    "layers": _outline("layers"),
    "repeated": _outline("repeated"),
    "all functions": _outline(True),
    "linear functions": _outline(nn.Linear),
    "inner functions": _outline("layers", Inner),
    "inner functions only": _outline(Inner),
    "named functions": _outline("layers.2"),
    "saved": _saved,
    "edited": _edited,
    "copied": lambda t: str(copy.deepcopy(t)),
    "with graph": _with_graph,
    "order": _order,
    "summary": lambda t: str(t.summary()),
    "mutations": lambda t: (str(t.mutations), str(t.write_back), str(t.side_effects)),
    "aliases": lambda t: str(t.aliases),
    "memory": lambda t: str(t.memory()),
    "explorer": _explorer,
    "split": lambda t: (lambda s: (s.forward.code, s.backward.code))(t.split_backward()),
    "diff": lambda t: str(st.diff(t, t)),
    "named scopes": lambda t: [t.scope_of(n).path for n in t.graph_module.graph.nodes],
    "digest": lambda t: t.digest if isinstance(t.digest, str) else t.digest(),
    "page": lambda t: t.to_html(),
    "events": lambda t: str(t.to_chrome_trace()),
    "lint": lambda t: t.lint(),
    "decomposed": lambda t: str(t.decompose()),
    "module": lambda t: str(t.to_module()),
    "attributes": lambda t: (list(program_of(t).tape.attributes), list(program_of(t).tape.owners)),
    "model": lambda t: type(t.model).__name__,
}
SLOW_USES = {
    "exported": lambda t: str(t.to_exported_program().graph_module.code),
    "onnx": lambda t: str(t.to_onnx().model_proto)[:200000],
    "onnx flat": lambda t: str(t.to_onnx(functions=False).model_proto)[:200000],
}


def used(trace: st.Trace, uses: list[str]) -> list[typing.Any]:
    """What the uses of a trace give, or the errors that they raise."""
    found = []
    for name in uses:
        try:
            found.append((name, reuse_programs.without_addresses({**USES, **SLOW_USES}[name](trace))))
        except Exception as error:
            found.append((name, type(error).__name__, reuse_programs.without_addresses(error)))
    return found


# Comparing -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Verdict:
    """What became of a program."""

    kind: str
    """`same`, `differs`, `refused`."""
    why: str = ""
    copied: tuple[int, int, int] = (0, 0, 0)
    """How many calls were copied, of how many of these the ops waited, and do so after the trace."""


def traced(drawn: Program, reuse: bool | None) -> st.Trace | str:
    """A trace, or the error."""
    _, _, functional, dynamic, specialize = drawn.mode
    KEPT.clear()
    model, x = drawn.model(), (torch.arange(8.0).view(2, 4) / 4).requires_grad_(drawn.seed % 4 == 0)
    options = {"dynamic_shapes": {"x": {0: torch.export.Dim("n", min=2)}}} if dynamic else {"specialize": specialize}
    with drawn.of_autograd(), contextlib.redirect_stdout(io.StringIO()):
        try:
            return st.trace(model, (x,), reuse=reuse, functional=functional, **options)
        except Exception as error:
            return f"{type(error).__name__}: {reuse_programs.without_addresses(error)}"


def verdict(drawn: Program) -> Verdict:
    """Trace a program with copies and without, and compare."""
    waited: list[typing.Any] = []
    wait = OpList.wait

    def noted(self, repetition):
        waited.append(repetition)
        wait(self, repetition)

    with mock.patch.object(OpList, "wait", noted):
        plain, repeated = [traced(drawn, reuse) for reuse in (False, drawn.reuse)]
    if isinstance(plain, str) or isinstance(repeated, str):
        found = [x if isinstance(x, str) else "a trace" for x in (plain, repeated)]
        return Verdict("refused", found[0]) if found[0] == found[1] else Verdict("differs", " | ".join(found))
    assert repeated.reuse is not None
    left = len(repetitions(tape_of(repeated).ops))
    count = sum(repeated.reuse.replayed.values()), len(waited), left
    for a, b in zip(used(plain, drawn.uses), used(repeated, drawn.uses), strict=True):
        if a != b:
            return Verdict("differs", f"in use {a[0]}: {_first(str(a), str(b))}", count)
    found = _differences(tape_of(plain), tape_of(repeated))
    if found:
        return Verdict("differs", f"in tapes: {found[0]}", count)
    if str(plain) != str(repeated) or plain.graph_module.code != repeated.graph_module.code:
        return Verdict("differs", "in text or graph", count)
    if drawn.seed % 8 == 0:
        why = _outline_unlike_eager(drawn)
        if why:
            return Verdict("differs", why, count)
    why = unlike_eager(drawn, repeated)
    if why and unlike_eager(drawn, plain) != why:
        return Verdict("differs", f"from eager: {why}", count)
    return Verdict("unlike eager" if why else "same", why, count)


def tape_of(trace):
    """The tape behind a trace."""
    return program_of(trace).recorded


def _differences(one: typing.Any, other: typing.Any) -> list[tuple[str, str]]:
    """As `reuse_programs.differences`, where `other` may have more reads.

    What was read of a layer from outside is taken for what its call has read: then the copies have read it too.
    """
    left, right = ([x for x in reuse_programs.described(tape) if not x.startswith("('read'")] for tape in (one, other))
    reads = [{(r.name, r.source, r.module) for r in tape.reads} for tape in (one, other)]
    found = [pair for pair in itertools.zip_longest(left, right) if pair[0] != pair[1]]
    return found + [(str(r), "not read") for r in reads[0] - reads[1]]


def _first(a: str, b: str) -> str:
    at = next((i for i, (p, q) in enumerate(zip(a, b, strict=False)) if p != q), min(len(a), len(b)))
    return f"{a[max(at - 80, 0) : at + 120]!r} | {b[max(at - 80, 0) : at + 120]!r}"


def _run(model, drawn, call) -> tuple[list[torch.Tensor], list[typing.Any]]:
    x = (torch.arange(8.0).view(2, 4) / 4).requires_grad_(drawn.seed % 4 == 0)
    KEPT.clear()
    torch.manual_seed(7)
    with drawn.of_autograd(), contextlib.redirect_stdout(io.StringIO()):
        out = [t for t in torch.utils._pytree.tree_leaves(call(x)) if isinstance(t, torch.Tensor)]
    state = [t.detach().clone() for t in model.state_dict().values()]
    grads = []
    total = sum((t.float().square().sum() for t in out if t.requires_grad), torch.zeros(()))
    if total.requires_grad:
        leaves = [p for p in [x, *model.parameters()] if p.requires_grad]
        grads = list(torch.autograd.grad(total, leaves, allow_unused=True))
    return [*(t.detach() for t in out), *state], grads


def _outline_unlike_eager(drawn: Program) -> str:
    """How a call of an outline of a trace with copies differs, where that of one without does not."""
    why = []
    for reuse in (drawn.reuse, False):
        trace = traced(drawn, reuse)
        assert not isinstance(trace, str)
        try:
            outline = trace.outline("layers")
        except st.ScopetraceError as error:
            why.append(reuse_programs.without_addresses(error))
        else:
            why.append(unlike_eager(drawn, trace, outline))
        if not why[0]:
            return ""
    return "" if why[0] == why[1] else f"outline: {why[0]} | {why[1]}"


def unlike_eager(drawn: Program, trace: st.Trace, call_of: typing.Any = None) -> str:
    """How a call of a trace, or of `call_of`, differs from one of the model; empty where it does not."""
    model, eager = trace.model, drawn.model()
    found = []
    for net, call in ((eager, eager), (model, call_of or trace)):
        try:
            found.append(_run(net, drawn, call))
        except Exception as error:
            found.append(f"{type(error).__name__}: {reuse_programs.without_addresses(error)[:200]}")
    if isinstance(found[0], str) or isinstance(found[1], str):
        return f"{found[0]} | {found[1]}"[:400] if isinstance(found[1], str) else f"eager: {found[0]}"
    for what, one, other in zip(("results", "gradients"), *found, strict=True):
        if len(one) != len(other):
            return f"{len(one)} {what}, not {len(other)}"
        for i, (a, b) in enumerate(zip(one, other, strict=True)):
            if (a is None) != (b is None) or (a is not None and not torch.allclose(a, b, 1e-4, 1e-5, equal_nan=True)):
                return f"{what} {i}: {a} | {b}"
    return ""


def smallest(drawn: Program) -> Program:
    """A program that differs still, without what it does not need."""

    def shorter(p: Program) -> typing.Iterator[Program]:
        for name in ("inside", "body", "uses"):
            lines = getattr(p, name)
            for i in range(len(lines)):
                yield dataclasses.replace(p, **{name: lines[:i] + lines[i + 1 :]})
        if p.twist:
            yield dataclasses.replace(p, twist="")
        if p.gives != "y":
            yield dataclasses.replace(p, gives="y")
        if p.result != "x":
            yield dataclasses.replace(p, result="x")

    while True:
        for other in shorter(drawn):
            with contextlib.suppress(Exception):
                if verdict(other).kind == "differs":
                    drawn = other
                    break
        else:
            return drawn


def main(argv: list[str] | None = None) -> int:
    """Draw programs and print those that differ; 1 if any do."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--draw", type=int, metavar="N", default=100, help="N random programs")
    parser.add_argument("--seed", type=int, default=0, help="of the first program; the others have those after it")
    parser.add_argument("--show", type=int, default=10, help="print so many programs that differ, as small as they get")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    os.environ["SCOPETRACE_CHECK"] = "0"
    warnings.simplefilter("ignore")
    counts: collections.Counter[str] = collections.Counter()
    refusals: collections.Counter[str] = collections.Counter()
    unlike = []
    for seed in range(options.seed, options.seed + options.draw):
        drawn = program(seed)
        try:
            found = verdict(drawn)
        except Exception as error:
            found = Verdict("differs", f"raises {type(error).__name__}: {error}")
        counts[found.kind] += 1
        for what, count in zip(("copy", "wait", "wait after the trace"), found.copied, strict=True):
            counts[what] += count > 0
        if found.kind == "refused":
            refusals[re.sub(r"[^A-Za-z ]+", "", found.why.partition("\n")[0])[:90]] += 1
        if found.kind == "unlike eager":
            unlike.append((seed, found.why.partition("\n")[0][:150]))
        if found.kind == "differs":
            print(f"# {seed}: {found.why[:1500]}", flush=True)
            if counts["differs"] <= options.show:
                small = smallest(drawn)
                with contextlib.suppress(Exception):
                    print(f"# {verdict(small).why[:1500]}")
                print(f"# {small.twist!r} {small.mode} {small.reuse} {small.uses}\n{small.source}\n", flush=True)
    print(dict(counts))
    for why, count in refusals.most_common(12):
        print(f"  refused {count}: {why}")
    for seed, why in unlike[:20]:
        print(f"  unlike eager, as without copies: {seed}: {why}")
    return counts["differs"] > 0


if __name__ == "__main__":
    sys.exit(main())
