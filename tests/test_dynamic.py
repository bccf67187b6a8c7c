"""Sizes that differ from call to call: what is recorded, what a call checks, and that every size equals eager."""

import pytest
import torch
from compare import assert_like_eager
from torch import nn
from torch.export import Dim, ShapesCollection

import scopetrace as st
from scopetrace.errors import DynamicShapeError, InputMismatchError


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x, y):
        rows = self.fc(x).view(-1, 4)
        return rows.reshape(x.shape[0], -1) + y.sum(), x.shape[0] * 2


def inputs(batch, length=5):
    return torch.randn(batch, length, 4), torch.randn(batch, 3)


def test_sizes_are_sym_size_nodes_and_arithmetic_on_demand():
    tr = st.trace(Net(), inputs(3), dynamic_shapes={"x": {0: Dim("batch"), 1: Dim.DYNAMIC}, "y": {0: Dim("batch")}})
    nodes = [(n.name, str(n.target), n.args) for n in tr.graph_module.graph.nodes if "sym" in n.name or "mul" in n.name]
    x, size = (next(n for n in tr.graph_module.graph.nodes if n.name == name) for name in ("x", "sym_size_int"))
    assert nodes == [
        ("sym_size_int", "aten.sym_size.int", (x, 0)),
        ("mul", "<built-in function mul>", (2, size)),
    ]
    tr.lint()
    for batch, length in ((1, 5), (2, 2), (3, 7), (8, 1), (5, 64)):
        tr.check(inputs(batch, length))


@pytest.mark.parametrize(
    "shapes",
    [
        {"x": {0: Dim("b"), 1: Dim.AUTO}, "y": {0: Dim("b")}},
        ({0: Dim.DYNAMIC, 1: Dim.DYNAMIC}, {0: Dim.DYNAMIC}),
        {"x": (Dim("b"), Dim("n"), 4), "y": [Dim("b"), None]},
        {"x": {0: 2 * Dim("half"), 1: Dim("n")}, "y": {0: 2 * Dim("half")}},
    ],
)
def test_the_forms_of_torch_export(shapes):
    tr = st.trace(Net(), inputs(6), dynamic_shapes=shapes)
    for batch in (2, 4, 12):
        tr.check(inputs(batch, 9))


def test_a_shapes_collection():
    args = inputs(3)
    shapes = ShapesCollection()
    shapes[args[0]] = {0: Dim("batch")}
    shapes[args[1]] = {0: Dim("batch")}
    st.trace(Net(), args, dynamic_shapes=shapes).check(inputs(7))


def test_nested_arguments_and_keywords():
    def f(pair, *, scale):
        return pair["a"] * scale[0] + pair["b"]

    def args(n):
        return ({"a": torch.randn(n), "b": torch.randn(n)},), {"scale": [torch.randn(n)]}

    n = Dim("n")
    shapes = {"pair": {"a": {0: n}, "b": {0: n}}, "scale": [{0: n}]}
    tr = st.trace(f, *args(3), dynamic_shapes=shapes)
    tr.check(*args(8))
    with pytest.raises(InputMismatchError, match=r"pair\['b'\]: dimension 0 is 9 and must be n = 8"):
        tr({"a": torch.randn(8), "b": torch.randn(9)}, scale=[torch.randn(8)])


# ---------------------------------------------------------------- what a call checks


def test_a_size_outside_the_bounds():
    tr = st.trace(lambda x: x * 2, (torch.randn(3),), dynamic_shapes=({0: Dim("n", min=2, max=8)},))
    tr(torch.randn(8))
    for n, limit in ((9, "at most 8"), (1, "at least 2")):
        with pytest.raises(InputMismatchError, match=rf"dimension 0 \(n\) is {n} and must be {limit}"):
            tr(torch.randn(n))


def test_a_guard_of_the_forward_is_a_rule_for_calls():
    def f(x):
        return x * 2 if x.shape[0] > 4 else x * 3

    tr = st.trace(f, (torch.randn(6),), dynamic_shapes=({0: Dim("n")},))
    tr.check((torch.randn(5),))
    with pytest.raises(InputMismatchError, match=r"dimension 0 .*is 4 and must be at least 5|the trace holds for"):
        tr(torch.randn(4))


def test_a_derived_dim_must_be_of_its_form():
    tr = st.trace(lambda x: x * 2, (torch.randn(6),), dynamic_shapes=({0: 2 * Dim("half")},))
    tr.check((torch.randn(10),))
    with pytest.raises(InputMismatchError, match=r"dimension 0 is 7 and must be of the form 2\*half"):
        tr(torch.randn(7))


# ---------------------------------------------------------------- slips of torch.export


def test_size_one_is_right_or_refused_where_python_branched_on_it():
    def f(x):
        return x * 2 if x.shape[0] == 1 else x * 3

    tr = st.trace(f, (torch.randn(4),), dynamic_shapes=({0: Dim("n")},))
    tr.check((torch.randn(9),))
    with pytest.raises(InputMismatchError, match=r"dimension 0 \(n\) is 1, for which the model goes another way"):
        tr(torch.randn(1))


def test_size_one_is_refused_where_squeeze_would_drop_it():
    tr = st.trace(lambda x: x.squeeze(), (torch.randn(4, 1),), dynamic_shapes=({0: Dim("n")},))
    tr.check((torch.randn(5, 1),))
    with pytest.raises(InputMismatchError, match="goes another way"):
        tr(torch.randn(1, 1))


@pytest.mark.parametrize("dim", [Dim("n"), Dim.DYNAMIC])
@pytest.mark.parametrize("size", [0, 1])
def test_an_example_of_zero_or_one_is_refused(dim, size):
    with pytest.raises(DynamicShapeError, match=f"x, dimension 0 is {size} in the example"):
        st.trace(Once(), (torch.zeros(size),), dynamic_shapes={"x": {0: dim}})


class Once(nn.Module):
    def forward(self, x):
        return x + 1


def test_auto_with_an_example_of_one_is_static_and_says_so():
    with pytest.warns(UserWarning, match="it is static"):
        tr = st.trace(Once(), (torch.zeros(1),), dynamic_shapes={"x": {0: Dim.AUTO}})
    with pytest.raises(InputMismatchError, match="dimension 0 was 1 when traced"):
        tr(torch.zeros(2))


def test_one_tensor_given_twice_stays_two_arguments():
    x = torch.randn(3)
    tr = st.trace(lambda a, b: a - 2 * b, (x, x), dynamic_shapes={"a": {0: Dim("n")}, "b": {0: Dim("n")}})
    y = torch.randn(5)
    torch.testing.assert_close(tr(y, y), y - 2 * y)


# ---------------------------------------------------------------- what cannot be dynamic


def test_a_size_that_the_model_fixes():
    class Fixes(nn.Module):
        def forward(self, x):
            return x + torch.ones(3)

    with pytest.raises(DynamicShapeError) as caught:
        st.trace(nn.Sequential(Fixes()), (torch.randn(3),), dynamic_shapes=({0: Dim("n")},))
    assert "input, dimension 0 (n) was said to be dynamic, and the model fixes it at 3" in str(caught.value)
    assert caught.value.module == "Sequential/Fixes[0]"
    assert "return x + torch.ones(3)" in (caught.value.source or "")
    assert "write 3" in (caught.value.hint or "")


def test_two_dims_that_the_model_makes_equal():
    shapes = {"a": {0: Dim("n")}, "b": {0: Dim("m")}}
    with pytest.raises(DynamicShapeError, match=r"must always be [nm] in this model"):
        st.trace(lambda a, b: a + b, (torch.randn(3), torch.randn(3)), dynamic_shapes=shapes)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"z": {0: Dim("n")}}, "dynamic_shapes names 'z'; the arguments are x, y"),
        ({"x": {5: Dim("n")}}, "dimension 5 of x, which has 3"),
        ({"x": {0: "n"}}, "dimension 0: 'n' is none of"),
        (({0: Dim("n")},), "1 items for 2 arguments"),
        ({"x": {0: Dim("n", max=2)}}, r"is 3 in the example, outside of \[0, 2\]"),
        ({"x": {0: Dim("n"), 1: Dim("n")}}, "one Dim stands for one size"),
    ],
)
def test_specifications_that_do_not_fit(shapes, message):
    with pytest.raises(DynamicShapeError, match=message):
        st.trace(Net(), inputs(3), dynamic_shapes=shapes)


# ---------------------------------------------------------------- mutation


def cache_write(cache, new):
    cache[:, 1 : 1 + new.shape[1]] = new
    return cache.sum(1)


def halves(x):
    a, b = x.split(x.shape[0] // 2)
    a.mul_(2)
    b.t().add_(1)
    return x, a


def flat(x):
    y = x * 1
    y.view(-1)[::2].zero_()
    y.transpose(0, 1).unsqueeze(0).add_(1)
    return y, y[1:]


@pytest.mark.parametrize(
    ("fn", "make", "shapes"),
    [
        (cache_write, lambda n: (torch.randn(n, 9, 2), torch.randn(n, 3, 2)), ({0: Dim("b")}, {0: Dim("b")})),
        (halves, lambda n: (torch.randn(2 * n, 3),), ({0: 2 * Dim("h")},)),
        (flat, lambda n: (torch.randn(n, 4),), ({0: Dim("n")},)),
        (lambda x: (x.relu_(), x.mul_(2)[0]), lambda n: (torch.randn(n, 2),), ({0: Dim("n")},)),
    ],
    ids=["cache_write", "halves", "flat", "whole"],
)
def test_mutation_at_any_size(fn, make, shapes):
    tr = st.trace(fn, make(3), dynamic_shapes=shapes)
    for n in (2, 3, 6):
        assert_like_eager(fn, tr, make(n))


def test_calls_of_equal_layers_have_equal_bodies():
    model = nn.Sequential(*[nn.TransformerEncoderLayer(8, 2, 16, batch_first=True) for _ in range(3)]).eval()
    shapes = ({0: Dim("batch"), 1: Dim("length")},)
    tr = st.trace(model, (torch.randn(2, 5, 8),), dynamic_shapes=shapes)
    assert "×2 as TransformerEncoderLayer[0]" in str(tr) or "×1 as TransformerEncoderLayer[1]" in str(tr)
    for batch, length in ((1, 5), (3, 2), (4, 9)):
        tr.check((torch.randn(batch, length, 8),))
