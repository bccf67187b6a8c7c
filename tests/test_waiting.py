"""Layers whose ops are made when the tape is read (`OpList`): what else a forward does with their tensors.

a model that repeats a layer, then does one or two things with the tensors of the layers -> traced with copies and
without -> the same tapes, and the results of eager
"""

import concurrent.futures
import contextlib
import copy
import itertools
import types
from unittest import mock

import pytest
import reuse_programs
import torch
import torch.nn.functional as F
import waiting_programs
from torch import nn

import scopetrace as st
from scopetrace.api.runnable import program_of
from scopetrace.ir.tape import CallList, OpList, repetitions


class Layer(nn.Module):
    """A layer that looks at its input in several ways: views of it, no-op casts, views of a parameter."""

    def __init__(self):
        super().__init__()
        self.fc, self.out = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x):
        """Run it."""
        y = x.to(x.dtype).reshape(4, 2).t().reshape(2, 4).contiguous()
        with st.scope("mixed"):
            y = y * self.scale + self.out(self.fc(x)) @ self.fc.weight.t()
        return x + y.relu().sigmoid().tanh().exp().neg().abs()


# Statements after the layers: x is their result, first is what they got, self has the model's layers.
AFTER = {
    "nothing": "pass",
    "write_result": "x.add_(1)",
    "write_view_of_result": "x[0].mul_(2)",
    "write_input": "first.mul_(2)",
    "write_view_of_input": "first[:, 1].add_(x[:, 0])",
    "read_input": "x = x + first.reshape(4, 2).t().reshape(2, 4)",
    "same_cast": "x = x.to(x.dtype)",
    "use_parameter": "x = F.linear(x, self.layers[2].fc.weight)",
    "use_transposed": "x = x @ self.layers[3].out.weight.t()",
    "use_data": "x = x + self.layers[2].fc.bias.data",
    "use_detached": "x = x + self.layers[1].fc.bias.detach()",
    "use_buffer": "x = x * self.layers[2].scale",
    "write_buffer": "self.layers[2].scale.add_(1)",
    "write_first_buffer": "self.layers[0].scale.mul_(2)",
    "call_again": "x = self.layers[2](x)",
    "call_part": "x = self.layers[3].fc(x)",
    "call_first": "x = self.layers[0](x)",
    "stack": "x = torch.cat([x, first, self.layers[1].fc.weight])[:2]",
    "asks_stride": "x = x * x.stride(0)",
    "asks_contiguous": "x = x.contiguous() + first.contiguous()",
    "factory": "x = x + torch.ones_like(x) + torch.tensor([1.0])",
    "in_no_grad": "with torch.no_grad(): x = x + first",
    "detach": "x = x.detach() + first",
    "scope": "with st.scope('after'): x = x * 2",
    "size": "x = x.reshape(x.shape[1], x.shape[0]).t()",
    "copies": "x = x.clone(memory_format=torch.contiguous_format)",
    "bound": "self.last = x",
    "several": "x = x + self.layers[1].fc.weight[:2] * self.layers[2].fc.weight[2:]",
    "foreach": "x = torch._foreach_add([x, first], 1.0)[0]",
    "cond": "x = torch.cond(x.sum() > 0, torch.relu, torch.neg, (x,))",
    "cond_of_layers": "x = torch.cond(x.sum() > 0, self.layers[2], lambda v: self.layers[3].fc(v), (x,))",
    "cond_of_part": "x = torch.cond(x.sum() > 0, self.layers[2].fc, torch.neg, (x,))",
    "transposes": "y = self.layers[1](x); z = self.layers[2](y); y.t_(); x = x + z",
    "expanded": "x = x.expand(3, 2, 4).sum(0)",
    "as_strided": "x = x.as_strided((2, 4), (4, 1)) + first.as_strided((2, 4), (4, 1))",
}
ORDERS = {
    "after": ["LAYERS", "A", "B"],
    "around": ["A", "LAYERS", "B"],
    "between": ["LAYERS", "A", "LAYERS", "B"],
    "twice": ["LAYERS", "LAYERS", "A", "B"],
}
LAYERS = "for layer in self.layers: x = layer(x)"


def model(order, one, other):
    """A model of five layers, with two statements."""
    lines = [{"LAYERS": LAYERS, "A": AFTER[one], "B": AFTER[other]}[part] for part in ORDERS[order]]
    code = "\n    ".join(["def forward(self, x):", "first = x = x + 1", *lines, "return x, first"])
    namespace = {"torch": torch, "F": F, "st": st}
    exec(code, namespace)
    torch.manual_seed(0)
    net = type("Net", (nn.Module,), {"forward": namespace["forward"]})()
    net.layers = nn.ModuleList([Layer() for _ in range(5)])
    return net


def tape_of(trace):
    """The tape behind a trace."""
    return program_of(trace).tape


def noting(waited):
    """`OpList.wait`, which also appends to `waited`."""
    wait = OpList.wait

    def noted(self, repetition):
        waited.append(repetition)
        wait(self, repetition)

    return noted


MODES = {"no_grad": torch.no_grad, "grad": torch.enable_grad, "inference": torch.inference_mode}


def check(order, one, other, mode):
    """Trace with and without copies, and compare. Returns how many layers waited to be read."""
    x, waited, found = torch.arange(8.0).view(2, 4) / 4, [], []
    for reuse in (False, True):
        net = model(order, one, other)
        with MODES[mode](), mock.patch.object(OpList, "wait", noting(waited)):
            try:
                found.append(st.trace(net, (x.clone(),), reuse=reuse, functional=False))
            except st.TraceError as error:
                found.append(str(error).partition("\n")[0])
            except RuntimeError as error:  # of torch, as of branches that it does not take in eager either
                found.append(str(error).partition("\n")[0])
                with pytest.raises(RuntimeError):
                    model(order, one, other)(x.clone())
    plain, repeated = found
    if isinstance(plain, str) or isinstance(repeated, str):
        assert plain == repeated
        return 0
    assert not reuse_programs.differences(tape_of(plain), tape_of(repeated))
    assert str(plain) == str(repeated)
    assert plain.graph_module.code == repeated.graph_module.code
    expected, net = copy.deepcopy(repeated.model), repeated.model
    with MODES[mode]():
        wanted, got = expected(x.clone()), repeated(x.clone())
    for a, b in zip(wanted, got, strict=True):
        torch.testing.assert_close(a, b)
    for a, b in zip(expected.buffers(), net.buffers(), strict=True):
        assert torch.equal(a, b)
    return len(waited)


@pytest.mark.parametrize("order", ORDERS)
def test_one_statement(order):
    waiting = [check(order, one, "nothing", mode) for one, mode in itertools.product(AFTER, MODES)]
    assert sum(count > 0 for count in waiting) > len(waiting) // 4


class Stack(nn.Module):
    """Layers between others, of which one class is in the layers too."""

    def __init__(self, count=4):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)
        self.layers = nn.ModuleList([Layer() for _ in range(count)])

    def forward(self, x):
        """Run it."""
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


class Halves(nn.Module):
    """Two parts, called in the order that it is told."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, swapped=False):
        """Run it."""
        first, second = (self.b, self.a) if swapped else (self.a, self.b)
        with st.scope("second"):
            x = second(first(x).relu()).tanh()
        return x


class Halved(nn.Module):
    """Three equal layers, of which the last one is then called in another way."""

    def __init__(self, again):
        super().__init__()
        self.layers, self.again = nn.ModuleList(Halves() for _ in range(3)), again

    def forward(self, x):
        """Run it."""
        for layer in self.layers:
            x = layer(x)
        return self.layers[-1](x, swapped=True) if self.again else x


@pytest.mark.parametrize("again", [False, True])
def test_calls_and_scopes_inside_of_layers_that_wait_are_made_when_they_are_read(again, monkeypatch):
    """A layer that is called again makes them at once: scopes are in the order in which they were first entered."""
    monkeypatch.setenv("SCOPETRACE_CHECK", "0")  # which reads all
    model, x = Halved(again), torch.randn(2, 4)
    with torch.no_grad():
        plain, repeated = (st.trace(model, (x,), reuse=reuse) for reuse in (False, True))
    calls = tape_of(repeated).calls
    assert isinstance(calls, CallList)
    assert len(list.__getitem__(calls, slice(None))) == (4 + 2 * 3 + 3 if again else 4 + 2)
    assert len(calls) == len(tape_of(plain).calls) == (13 if again else 10)
    assert [str(scope) for scope in repeated.scope.walk()] == [str(scope) for scope in plain.scope.walk()]
    assert not calls.waiting
    assert [(c.position, c.index, str(c.scope)) for c in repeated.calls] == [
        (c.position, c.index, str(c.scope)) for c in plain.calls
    ]


def test_who_is_told_of_calls_is_told_of_those_inside_of_layers_that_wait():
    told = {False: [], True: []}
    for reuse, found in told.items():
        st.trace(
            Halved(False), (torch.randn(2, 4),), reuse=reuse, progress=lambda *call, found=found: found.append(call)
        )
    assert told[True] == told[False]


def paths(scope):
    """The paths of a scope and of those inside."""
    return [s.path for s in scope.walk()]


def described(outline):
    """What `Trace.outline` makes, as text."""
    functions = [(f.identifier, f.graph_module.code, [c.fqn for c in f.calls], f.inputs) for f in outline.functions]
    calls = [(c.fqn, c.scope.path, str(c.arguments), str(c.outputs), str(c.attributes)) for c in outline.calls]
    return functions, calls, outline.graph_module.code, str(outline)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(
    ("targets", "makes_all"),
    [
        (["layers"], False),
        (["repeated"], False),
        ([Layer], False),
        (["layers", Layer], False),
        ([nn.Linear], True),
        (["layers.2"], True),
        ([True], True),
    ],
)
def test_outlines_of_layers_that_wait(targets, makes_all, grad, monkeypatch):
    monkeypatch.setenv("SCOPETRACE_CHECK", "0")  # a check of the tape reads all of it
    model, x = Stack(), torch.ones(2, 4)
    with torch.set_grad_enabled(grad):
        plain, repeated = (st.trace(model, (x,), reuse=reuse) for reuse in (False, True))
        ops = tape_of(repeated).ops
        assert [r.call.fqn for r in repetitions(ops)] == ["layers.1", "layers.2", "layers.3"]
        assert paths(repeated.scope) == paths(plain.scope)
        assert [(c.fqn, c.index, c.attributes) for c in repeated.calls] == [
            (c.fqn, c.index, c.attributes) for c in plain.calls
        ]
        outline = repeated.outline(*targets)
        assert outline.functions
        assert (repetitions(ops) == []) == makes_all
        assert described(outline) == described(plain.outline(*targets))
        torch.testing.assert_close(outline(x), model(x))
    assert str(plain) == str(repeated)
    assert repetitions(ops) == []


class WithRotary(nn.Module):
    """Layers, with a block without autograd in one place: before them, as of rotary embeddings, in each, or after them.

    None of its parameters requires grad.
    """

    def __init__(self, place):
        super().__init__()
        self.place, self.angles = place, nn.Parameter(torch.ones(4))
        self.layers = nn.ModuleList([Layer() for _ in range(4)])
        self.last = nn.Linear(4, 4)
        if place == "inside":
            for layer in self.layers:
                layer.fc = Quiet()
        self.requires_grad_(False)

    def forward(self, x):
        """Run it."""
        with torch.no_grad() if self.place == "before" else contextlib.nullcontext():
            x = x + self.angles.cos()
        for layer in self.layers:
            x = layer(x)
        with torch.no_grad() if self.place == "after" else contextlib.nullcontext():
            x = x @ self.last.weight
        return x * 2


class Quiet(nn.Module):
    """A layer that runs without autograd."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4))

    @torch.no_grad()
    def forward(self, x):
        """Run it."""
        return x @ self.weight


@pytest.mark.parametrize(("place", "count"), [("before", 3), ("nowhere", 3), ("inside", 0), ("after", 0)])
def test_ops_without_autograd_before_layers_do_not_make_these(place, count, monkeypatch):
    """They ask which of the tensors before them do not require grad, and the program would differ if they did."""
    monkeypatch.setenv("SCOPETRACE_CHECK", "0")
    model, x = WithRotary(place), torch.ones(2, 4)
    plain, repeated = (st.trace(model, (x,), reuse=reuse) for reuse in (False, True))
    assert len(repetitions(tape_of(repeated).ops)) == count
    asked = [s.expression for s in plain.specializations if s.expression.endswith("requires_grad")]
    assert [s.expression for s in repeated.specializations if s.expression.endswith("requires_grad")] == asked
    assert ("angles.requires_grad" in asked, "layers.3.fc.weight.requires_grad" in asked) == {
        "before": (True, False),
        "nowhere": (False, False),
        "inside": (True, True),
        "after": (True, True),
    }[place]
    assert str(plain) == str(repeated)


class Sandwich(nn.Module):
    """Layers that are not copied, since they take an object, with norms that are; a norm before, and one after them."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Normed() for _ in range(3)])
        self.first, self.norm = Norm(), Norm()

    def forward(self, x):
        """Run it."""
        x, options = self.first(x).repeat(2, 1), types.SimpleNamespace(gain=2)
        for layer in self.layers:
            x = layer(x, options)
        return self.norm(x)


class Normed(nn.Module):
    """A layer with a norm."""

    def __init__(self):
        super().__init__()
        self.norm = Norm()

    def forward(self, x, options):
        """Run it."""
        return self.norm(x) * options.gain


class Norm(nn.Module):
    """A norm with a weight."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x):
        """Run it."""
        return self.weight * (x * (x.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt())


@pytest.mark.parametrize("targets", [["layers"], ["repeated"], [Norm], ["layers", Norm], [Normed], [True]])
def test_outlines_where_what_is_repeated_is_inside_of_a_function(targets, monkeypatch):
    monkeypatch.setenv("SCOPETRACE_CHECK", "0")
    with torch.no_grad():
        plain, repeated = (st.trace(Sandwich(), (torch.ones(2, 4),), reuse=reuse) for reuse in (False, True))
    waiting = [(r.call.fqn, r.repeated.fqn) for r in repetitions(tape_of(repeated).ops)]
    assert waiting == [("norm", "layers.0.norm")]
    assert described(repeated.outline(*targets)) == described(plain.outline(*targets))


def test_a_trace_whose_layers_wait_is_what_was_traced(monkeypatch, tmp_path):
    """Whatever becomes of the model after the trace; also in a file, and from several threads."""
    monkeypatch.setenv("SCOPETRACE_CHECK", "0")
    model, x = Stack(8), torch.ones(2, 4)
    wanted = st.trace(model, (x,), reuse=False).graph_module.code
    saved, shared, changed = (st.trace(model, (x,), reuse=True) for _ in range(3))
    assert all(repetitions(tape_of(trace).ops) for trace in (saved, shared, changed))
    saved.save(tmp_path / "net.trace")
    assert st.load(tmp_path / "net.trace").graph_module.code == wanted
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        texts = list(pool.map(lambda call: str(call.arguments), shared.calls))
    assert texts == [str(call.arguments) for call in shared.calls]
    model.layers[3] = nn.Identity()
    model.double()
    assert changed.graph_module.code == wanted
    values = [n.meta["val"].dtype for n in changed.graph_module.graph.nodes if n.op == "get_attr"]
    assert set(values) == {torch.float32}


@pytest.mark.parametrize(
    "programs",
    [
        pytest.param(range(300000, 300016), id="few"),
        pytest.param(range(300016, 300200), id="many", marks=pytest.mark.slow),
        pytest.param(range(300200, 302000), id="others", marks=pytest.mark.exhaustive),
    ],
)
def test_random_programs(programs, monkeypatch):
    monkeypatch.setenv("SCOPETRACE_CHECK", "0")
    found = [waiting_programs.verdict(waiting_programs.program(seed)) for seed in programs]
    assert not [(seed, v.why) for seed, v in zip(programs, found, strict=True) if v.kind == "differs"]
    assert sum(v.copied[1] > 0 for v in found) > len(programs) // 8


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
def test_two_statements(order):
    pairs = list(itertools.product(AFTER, AFTER))
    for i, (one, other) in enumerate(pairs[len(order) :: 7]):
        check(order, one, other, [*MODES][i % 3])


@pytest.mark.exhaustive
@pytest.mark.parametrize("order", ORDERS)
def test_all_pairs_of_statements(order):
    for one, other, mode in itertools.product(AFTER, AFTER, MODES):
        check(order, one, other, mode)
