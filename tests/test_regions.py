"""Regions that torch treats as one: `torch.utils.checkpoint`, and `torch.compiler.nested_compile_region`."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

import scopetrace as st

X = torch.linspace(-1, 2, 12).view(3, 4)
CHECKPOINT = torch.ops.higher_order.tag_activation_checkpoint
NESTED = torch.ops.higher_order.invoke_subgraph


class Block(nn.Module):
    def __init__(self, p=0.0):
        super().__init__()
        self.a, self.b, self.drop = nn.Linear(4, 8), nn.Linear(8, 4), nn.Dropout(p)

    def forward(self, x, scale=1.0):
        return x + self.b(self.drop(self.a(x).relu_())) * scale


class Net(nn.Module):
    """Blocks that `run` calls."""

    def __init__(self, run, p=0.0):
        super().__init__()
        self.blocks = nn.ModuleList([Block(p) for _ in range(2)])
        self.run = run

    def forward(self, x):
        for block in self.blocks:
            x = self.run(block, x)
        return x.sin()


def inner(block, x):
    return checkpoint(block, x.sin(), use_reentrant=False) * x


def returns_more(block, x):
    y, _, z, n = checkpoint(lambda x: (block(x), None, x * 2, 3), x, use_reentrant=False)
    return y + z * n


def leaks(block, x):
    found = []
    y = checkpoint(lambda x: [found.append(x.cos()), block(x)][1], x, use_reentrant=False)
    return y + found[0]


def result_is_a_view(block, x):
    return checkpoint(lambda x: block(x).view(-1), x, use_reentrant=False).view(x.shape)


def result_is_an_argument(block, x):
    y, same = checkpoint(lambda x: (block(x), x), x, use_reentrant=False)
    return y + same


RUNS = {
    "plain": lambda block, x: checkpoint(block, x, use_reentrant=False),
    "reentrant": lambda block, x: checkpoint(block, x, use_reentrant=True),
    "keywords": lambda block, x: checkpoint(block, x, scale=2.0, use_reentrant=False),
    "a module twice": lambda block, x: checkpoint(block, RUNS["plain"](block, x), use_reentrant=False),
    "nested": lambda block, x: checkpoint(inner, block, x, use_reentrant=False),
    "more results": returns_more,
    "leaks": leaks,
    "a result is a view": result_is_a_view,
    "a result is an argument": result_is_an_argument,
    "sequential": lambda block, x: checkpoint_sequential([block, block, block], 2, x, use_reentrant=False),
    "written afterwards": lambda block, x: checkpoint(block, x, use_reentrant=False).mul_(2),
    "no_grad inside": lambda block, x: checkpoint(
        lambda x: block(x) + torch.no_grad()(block)(x), x, use_reentrant=False
    ),
    "in a nested region": lambda block, x: torch.compiler.nested_compile_region(RUNS["plain"])(block, x),
    "a branch inside": lambda block, x: checkpoint(
        lambda x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (block(x),)), x, use_reentrant=False
    ),
}


def graded(x=X):
    return x.clone().requires_grad_()


def outcome(f, model, x=X):
    """Result, gradients, how many elements are saved for backward beside parameters, and the random state after it."""
    for p in model.parameters():
        p.grad = None
    x, saved = graded(x), []
    torch.manual_seed(0)
    own = {p.data_ptr() for p in (*model.parameters(), x)}

    def save(t):
        saved.append(t.numel() if t.data_ptr() not in own else 0)
        return t

    with torch.autograd.graph.saved_tensors_hooks(save, lambda t: t):
        y = f(x)
    y = y[0] if isinstance(y, tuple) else y
    torch.randn(3)  # backward has to draw the numbers of the forward all the same
    y.square().sum().backward()
    grads = [x.grad, *(p.grad for p in model.parameters())]
    return (y.detach(), grads, torch.randn(2)), sum(saved)


@pytest.mark.sample(5)
@pytest.mark.parametrize("functional", [True, False])
@pytest.mark.parametrize("p", [0.0, 0.5])
@pytest.mark.parametrize("name", RUNS)
def test_checkpoints_save_memory_and_equal_eager(name, p, functional):
    model = Net(RUNS[name], p)
    tr = st.trace(model, (graded(),), functional=functional)
    tr.lint()
    expected, most = outcome(model, model)
    found, saved = outcome(tr, model)
    torch.testing.assert_close(found, expected)
    if name != "a result is a view":  # stays part of the program
        assert tr.graph_module.graph.find_nodes(op="call_function", target=CHECKPOINT)
        assert saved <= most + 2 * X.numel()


def test_the_text_has_the_region_with_its_calls():
    tr = st.trace(Net(RUNS["plain"]), (graded(),))
    lines = str(tr).splitlines()
    assert lines[2].startswith(
        "  %getitem: f32[3, 4], = torch.ops.higher_order.tag_activation_checkpoint(wrap_body_0, %x, "
    )
    assert lines[3].startswith("    wrap_body_0(%x: f32[3, 4], %blocks_0_a_weight: f32[8, 4], ")
    assert lines[4].startswith("      Block[blocks.0](x=%x: f32[3, 4]) -> ")
    assert [c.fqn for c in tr.calls] == ["", *(f"blocks.{i}{m}" for i in (0, 1) for m in ("", ".a", ".drop", ".b"))]


def test_a_region_that_autograd_does_not_see_is_part_of_the_program():
    model = Net(RUNS["plain"])
    with torch.no_grad():
        assert "checkpoint" not in st.trace(model, (X,)).graph_module.code


@pytest.mark.parametrize("run", ["trace", "loaded", "exported", "compiled"])
def test_a_region_that_begins_with_a_block_without_gradients(run, tmp_path):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def part(self, x):
            with torch.no_grad():
                scale = x.mean() * 2
            return self.fc(x) * scale

        def forward(self, x):
            return checkpoint(self.part, x, use_reentrant=False)

    model, x = Scaled(), graded()
    tr = st.trace(model, (x,))
    tr.save(tmp_path / "tr.st")
    found = {
        "trace": lambda: tr,
        "loaded": lambda: st.load(tmp_path / "tr.st"),
        "exported": lambda: tr.to_exported_program().module(),
        "compiled": lambda: tr.compile("aot_eager"),
    }[run]()
    wanted, got = (torch.autograd.grad(f(x).sum(), x)[0] for f in (model, found))
    torch.testing.assert_close(got, wanted)


def test_derivatives_of_derivatives():
    model = Net(RUNS["plain"])
    found = []
    for f in (model, st.trace(model, (graded(),))):
        x = graded()
        (first,) = torch.autograd.grad(f(x).square().sum(), x, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), x)[0])
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("p", [0.0, 0.5])
def test_other_forms_of_a_program_with_checkpoints(p, tmp_path):
    model = Net(RUNS["plain"], p)
    tr = st.trace(model, (graded(),))
    expected, most = outcome(model, model)
    program = tr.to_exported_program()
    assert program.graph.find_nodes(op="call_function", target=CHECKPOINT)
    outlined = tr.outline(Block)
    assert len(outlined.functions) == 1
    forms = {
        "copy": copy.deepcopy(tr),
        "exported": program.module(),
        "outlined": outlined,
        "again": st.trace(tr.graph_module, (graded(),)),
        "decomposed": tr.decompose(),
        "compiled": torch.compile(tr.graph_module, backend="aot_eager"),
    }
    for name, form in forms.items():
        found, saved = outcome(form, model)
        torch.testing.assert_close(found[0], expected[0], msg=name)
        if name != "compiled":
            torch.testing.assert_close(found[1][0], expected[1][0], msg=name)
        if name in ("copy", "exported", "again"):
            assert saved <= most + 2 * X.numel(), name
    tr.save(tmp_path / "net.st")
    for form in (st.load(tmp_path / "net.st"), pickle.loads(pickle.dumps(tr))):
        found, saved = outcome(form, model)
        torch.testing.assert_close(found[1][0], expected[1][0])


class Wrapped(Block):
    """As transformers' layers, which replace their forward and ask whether it is still theirs."""

    def __init_subclass__(cls):
        forward = cls.forward

        def checkpointed(self, *args):
            if type(self).forward is checkpointed:
                return checkpoint(lambda *args: forward(self, *args), *args, use_reentrant=False)
            return forward(self, *args)

        cls.forward = checkpointed


class Inner(Wrapped):
    def forward(self, x):
        return self.b(self.a(x).relu())


def test_a_class_that_compares_its_forward():
    model = Inner()
    tr = st.trace(model, (graded(),))
    assert "tag_activation_checkpoint" in tr.graph_module.code
    torch.testing.assert_close(outcome(tr, model)[0], outcome(model, model)[0])


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        return self.fc(x).relu_() + x


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Layer() for _ in range(3)])

    def forward(self, x):
        region = torch.compiler.nested_compile_region(lambda layer, x: layer(x))
        for layer in self.layers:
            x = region(layer, x)
        return x


@torch.no_grad()
def test_a_nested_region_is_a_call_of_a_body():
    model = Stack()
    tr = st.trace(model, (X,))
    tr.lint()
    torch.testing.assert_close(tr(X), model(X))
    assert len(tr.graph_module.graph.find_nodes(op="call_function", target=NESTED)) == 3
    assert [c.fqn for c in tr.calls if c.fqn.endswith("fc")] == [f"layers.{i}.fc" for i in range(3)]
    program = tr.to_exported_program()
    calls = program.graph.find_nodes(op="call_function", target=NESTED)
    assert len({node.args[0].target for node in calls}) == len({node.args[1] for node in calls}) == 1
    torch.testing.assert_close(program.module()(X), model(X))
    for form in (tr.outline(Layer), tr.decompose(), st.trace(tr.graph_module, (X,))):
        found = form(X)
        torch.testing.assert_close(found[0] if isinstance(found, tuple) else found, model(X))
    assert "invoke_subgraph" not in str([n.op_type for n in tr.to_onnx().graph])


def test_a_nested_region_that_autograd_sees_is_part_of_the_program():
    model = Stack()
    tr = st.trace(model, (graded(),))
    assert "invoke_subgraph" not in tr.graph_module.code
    expected, _ = outcome(model, model)
    torch.testing.assert_close(outcome(tr, model)[0], expected)


def _times_of_linear(f, x):
    """How often a linear layer of 8 outputs is computed, in the forward and again for backward."""

    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        times = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **kwargs or {})
            self.times += func is torch.ops.aten.addmm.default and out.shape[-1] == 8
            return out

    with Count() as count:
        f(x.requires_grad_()).sum().backward()
    return count.times


@pytest.mark.parametrize("p", [0.0, 0.5])
@pytest.mark.parametrize("kept", [True, False])
def test_a_policy_chooses_what_is_computed_again(kept, p):
    def policy(ctx, op, *args, **kwargs):
        saves = kept and op is torch.ops.aten.addmm.default
        return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE

    def context_fn():
        return create_selective_checkpoint_contexts(policy)

    def run(block, x):
        def region(x):  # torch refuses a policy beside ops that write
            return x + block.b(block.drop(block.a(x).relu()))

        return checkpoint(region, x, use_reentrant=False, context_fn=context_fn)

    model = Net(run, p)
    tr = st.trace(model, (graded(),))
    torch.testing.assert_close(outcome(tr, model)[0], outcome(model, model)[0])
    for program in (model, tr, tr.to_exported_program().module()):
        assert _times_of_linear(program, X.clone()) == (2 if kept else 4)
