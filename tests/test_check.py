"""`Trace.check`: each kind of difference is found, and what was compared is said."""

import dataclasses
import math
import operator

import pytest
import torch
from torch import nn

import scopetrace as st
from scopetrace.program.check import Outcome, differences

aten = torch.ops.aten


def node_of(tr, target):
    return next(node for node in tr.graph_module.graph.nodes if node.target is target)


def edited(tr, change):
    """The trace with a graph that `change` has altered."""
    change(tr)
    tr.graph_module.graph.lint()
    tr.graph_module.recompile()
    return tr


def with_factor(factor):
    def change(tr):
        node = node_of(tr, aten.mul.Tensor)
        node.args = (node.args[0], factor)

    return change


def after(target, *args, **kwargs):
    """Another op on each tensor that the graph gives."""

    def change(tr):
        graph = tr.graph_module.graph
        output = next(iter(reversed(graph.nodes)))
        with graph.inserting_before(output):
            results = [graph.call_function(target, (node, *args), kwargs) for node in output.args[0]]
        for node, new in zip(output.args[0], results, strict=True):
            new.meta.update(node.meta)
        output.args = (type(output.args[0])(results),)

    return change


def in_place_of(target, new, *args):
    def change(tr):
        node = node_of(tr, target)
        node.target = new
        node.args = (node.args[0], *args)

    return change


X = torch.arange(6.0).reshape(2, 3) + 1

# The function, its argument, an edit of its graph, what the error says.
DIFFERENT = {
    "a small factor": (lambda x: x * 1e-9, X, with_factor(3e-9), "not close"),
    "a small difference": (lambda x: x * 1e-9, X, with_factor(1.001e-9), "not close"),
    "a small complex factor": (lambda x: x * 1e-9, X.to(torch.complex64), with_factor(3e-9), "not close"),
    "a double": (lambda x: x * 1e-30, X.double(), with_factor(1.00001e-30), "not close"),
    "a half": (lambda x: x * 1e-3, X.half(), with_factor(1.1e-3), "not close"),
    "a whole number": (lambda x: x * 2, X.long(), with_factor(3), "not equal"),
    "zeros": (lambda x: x * 0, X, with_factor(1e-20), "not close"),
    "infinite": (lambda x: x * math.inf, X, with_factor(1e30), "not close"),
    "no number": (lambda x: x * math.nan, X, with_factor(1.0), "not close"),
    "a dtype": (lambda x: x * 2, X, after(aten.to.dtype, torch.float64), "dtype"),
    "a shape": (lambda x: x * 2, X, after(aten.reshape.default, [6]), "shape"),
    "strides": (lambda x: x.t() * 2, X, after(aten.contiguous.default), r"strides \[1, 3\] became \[2, 1\]"),
    "requires_grad": (
        lambda x: x * 2,
        X.clone().requires_grad_(),
        after(aten.detach.default),
        "requires_grad True became False",
    ),
    "a copy in place of a view": (
        lambda x: x.view(3, 2),
        X,
        after(aten.clone.default),
        r"result: it shares memory with arguments\[0\]\[0\] no longer",
    ),
    "a view in place of a copy": (
        lambda x: x.clone(),
        X,
        in_place_of(aten.clone.default, aten.alias.default),
        r"result: it shares memory with arguments\[0\]\[0\], and did not",
    ),
    "another part of equal content": (
        lambda x: x[0],
        torch.ones(2, 3),
        in_place_of(aten.select.int, aten.select.int, 0, 1),
        "from 12 bytes after its start, and did not",
    ),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_a_difference_is_told(what):
    fn, x, change, message = DIFFERENT[what]
    assert st.trace(fn, (x,)).check((x,)).startswith("equal in result: 1 tensor")
    with pytest.raises(st.errors.CheckError, match=message):
        edited(st.trace(fn, (x,)), change).check((x,))


def test_results_that_share_memory_no_longer():
    def fn(x):
        y = x + 1
        return y, y[0]

    tr = st.trace(fn, (X,))
    assert tr.check((X,)).endswith("memory that results share: 2")
    node = node_of(tr, aten.select.int)
    with tr.graph_module.graph.inserting_after(node):
        copy = tr.graph_module.graph.call_function(aten.clone.default, (node,))
    node.replace_all_uses_with(copy, delete_user_cb=lambda user: user is not copy)
    copy.meta.update(node.meta)
    tr.graph_module.recompile()
    with pytest.raises(st.errors.CheckError, match=r"result\[1\]: it shares memory with result\[0\] no longer"):
        tr.check((X,))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x, scale=2):
        x.add_(1)
        return {"y": self.norm(x), "x": x, "weight": self.norm.weight, "scale": scale, "name": "net"}


def test_what_was_compared_is_said():
    said = st.trace(Net(), (X.clone(),)).check((X.clone(),))
    assert said == (
        "equal in result: 3 tensors, 2 values; arguments: 1 tensor; the model: 3 buffers; memory that results share: 2"
    )


def test_an_input_with_gradients_that_the_model_writes():
    def make():
        return X.clone().requires_grad_() * 1  # no leaf, which eager could not write

    model = lambda x: x.mul_(2).sin()  # noqa: E731
    assert "arguments: 1 tensor" in st.trace(model, (make(),)).check((make(),))


def test_an_object_without_tensors_is_compared_in_type():
    @dataclasses.dataclass
    class Options:
        names: object

    options = Options(object())
    assert "and the types of 1 other object" in st.trace(lambda x: (x + 1, options.names), (X,)).check((X,))


# What no edit of a graph can change -----------------------------------------------------------------------------------


def outcome(result=None, arguments=((), {}), state=None, memory=None):
    return Outcome(result, arguments, state or {}, memory or {})


PAIRS = {
    "number": (outcome([1]), outcome([2]), "result[0]: 1 became 2"),
    "number of another type": (outcome(1), outcome(1.0), "result: int became float"),
    "truth": (outcome([True]), outcome([1]), "result[0]: bool became int"),
    "text": (outcome({"a": "x"}), outcome({"a": "y"}), "result['a']: 'x' became 'y'"),
    "None": (outcome([None]), outcome([0]), "result[0]: NoneType became int"),
    "dtype": (outcome([torch.float32]), outcome([torch.float64]), "result[0]: torch.float32 became torch.float64"),
    "structure": (outcome([1, 2]), outcome([1]), "result: structure ['[0]', '[1]'] became ['[0]']"),
    "container": (outcome([1]), outcome((1,)), "result: list became tuple"),
    "argument": (outcome(None, (([1],), {})), outcome(None, (([2],), {})), "arguments[0][0][0]: 1 became 2"),
    "tensor for a number": (outcome([1]), outcome([torch.ones(())]), "result[0]: int became Tensor"),
    "a tensor of the model": (
        outcome(state={"buffer a": torch.ones(1)}),
        outcome(state={"buffer a": torch.zeros(1)}),
        "the model['buffer a']: Tensor-likes are not close!",
    ),
    "an input itself": (
        outcome(memory={"result": ["is arguments[0][0]"]}),
        outcome(memory={"result": ["shares memory with arguments[0][0]"]}),
        "result: it is arguments[0][0] no longer",
    ),
}


@pytest.mark.parametrize("what", PAIRS)
def test_a_difference_of_outcomes_is_told(what):
    expected, actual, message = PAIRS[what]
    assert list(differences(expected, expected)) == []
    assert next(differences(expected, actual)).startswith(message)


@pytest.mark.parametrize("x", [math.nan, 0.5, "a", 3, None, 1 + 2j, range(3), torch.int8])
def test_equal_values_are_equal(x):
    assert list(differences(outcome([x]), outcome([operator.pos(x) if isinstance(x, float) else x]))) == []
