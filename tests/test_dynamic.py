"""Sizes that differ from call to call: what is recorded, what a call checks, and that every size equals eager."""

import copy
import dataclasses
import logging
import pickle
import re

import pytest
import torch
import torch.nn.functional as F
from compare import assert_like_eager
from torch import nn
from torch.export import Dim, ShapesCollection

import scopetrace as st
from scopetrace.api.runnable import program_of
from scopetrace.cli.targets import declare_missing_ops
from scopetrace.errors import DynamicShapeError, InputMismatchError
from scopetrace.ir.tape import values_in
from scopetrace.ir.write_back import resolved
from scopetrace.view.tree import type_text


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


@dataclasses.dataclass
class Scaled:
    """pytree does not know it."""

    x: torch.Tensor
    by: int = 2


def test_a_collection_that_does_not_fit_the_arguments():
    inside, shapes = Scaled(torch.ones(3, 4)), ShapesCollection()
    shapes[inside.x] = {0: Dim("rows")}
    scaled = lambda s: s.x * s.by  # noqa: E731
    with pytest.raises(DynamicShapeError, match=r"(?s)ShapesCollection does not fit the arguments: .* by a dict"):
        st.trace(scaled, (inside,), dynamic_shapes=shapes)
    tr = st.trace(scaled, (inside,), dynamic_shapes={"s": {"x": {0: Dim("rows")}}})
    assert tr(Scaled(torch.ones(5, 4))).shape == (5, 4)

    others = torch.export.AdditionalInputs()
    others.add((torch.ones(3), "another"))
    with pytest.raises(DynamicShapeError, match=r"AdditionalInputs does not fit the arguments: .* differing values"):
        st.trace(lambda x, name: x * 2, (torch.ones(2), "name"), dynamic_shapes=others)


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


@pytest.mark.parametrize("number", [lambda n: int(n * 0.5), lambda n: int(n**0.5), lambda n: int(n / 2)])
def test_a_whole_number_made_of_a_size_is_a_rule_for_calls(number):
    tr = st.trace(lambda x: x * number(x.shape[0]), (torch.ones(8, 4),), dynamic_shapes=({0: Dim.DYNAMIC},))
    assert torch.equal(tr(torch.ones(8, 4)), torch.full((8, 4), float(number(8))))
    with pytest.raises(InputMismatchError, match=r"dimension 0 is 20: the trace holds for .*write math.trunc\(n\)"):
        tr(torch.ones(20, 4))


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


def test_names_as_strings_are_dims_that_may_equal_others():
    def f(a, b, c, d):
        return a + b, c + d

    shapes = ({0: Dim("n", min=3)}, {0: "of_b"}, {0: Dim.AUTO}, ("of_d", None))
    with pytest.warns(UserWarning, match="The axis name: of_b will not be used, .* another axis: n"):
        tr = st.trace(f, [torch.randn(4, 2) for _ in range(4)], dynamic_shapes=shapes)
    assert "a=%a: f32[n, 2], b=%b: f32[n, 2], c=%c: f32[of_d, 2], d=%d: f32[of_d, 2]" in str(tr)
    a, c = torch.randn(3, 2), torch.randn(7, 2)
    for each in (tr, tr.decompose()):
        assert [y.shape[0] for y in each(a, a, c, c)] == [3, 7]
    with pytest.raises(InputMismatchError, match="n"):
        tr(a[:2], a[:2], c, c)
    with pytest.raises(InputMismatchError):
        tr(a, c, c, c)


def test_one_name_for_two_strings_is_one_size():
    shapes = ({0: "n"}, {0: "n"})
    tr = st.trace(lambda a, b: (a + 1, b + 1), (torch.randn(4), torch.randn(4)), dynamic_shapes=shapes)
    with pytest.raises(InputMismatchError, match="must be n = 3"):
        tr(torch.randn(3), torch.randn(5))
    with pytest.raises(DynamicShapeError, match="one Dim stands for one size"):
        st.trace(lambda a, b: (a + 1, b + 1), (torch.randn(4), torch.randn(5)), dynamic_shapes=shapes)


def test_two_dims_that_equal_one_dimension_without_a_name():
    shapes = ({0: Dim("n")}, {0: Dim.AUTO}, {0: Dim("m")})
    with pytest.raises(DynamicShapeError, match=r"must always be [nm] in this model"):
        st.trace(lambda a, b, c: a + b + c, [torch.randn(3) for _ in range(3)], dynamic_shapes=shapes)


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


@pytest.mark.parametrize(
    "forward",
    [
        lambda x: x[1:].diagonal().squeeze(0),
        lambda x: x * 2 if x[1:].diagonal().shape[0] == 1 else x,
        lambda x: x if x[1:].diagonal().numel() > 1 else x * 2,
    ],
    ids=["squeeze", "equal", "at most"],
)
def test_a_size_that_the_model_fixes_by_the_smaller_of_two(forward):
    """The diagonal has `min(4, rows - 1)` elements."""
    with pytest.raises(
        DynamicShapeError, match=r"dimension 0 \(rows\) was said to be dynamic, .* fixes it at 2"
    ) as error:
        st.trace(forward, (torch.randn(2, 4),), dynamic_shapes=({0: Dim("rows")},))
    assert "in <lambda>: " in (error.value.source or "")
    tr = st.trace(forward, (torch.randn(2, 4),), dynamic_shapes=({0: Dim.AUTO},))
    assert_like_eager(forward, tr, (torch.randn(2, 4),))
    with pytest.raises(InputMismatchError, match="is 3 and must be at most 2"):
        tr(torch.randn(3, 4))


def test_a_gradient_that_divides_by_zero_at_another_size():
    """That of a variance divides by `rows - 1`: C++ gives infinity, and Python raises."""

    def forward(x):
        return torch.autograd.grad(x.var(0).sum(), x)[0]

    tr = st.trace(forward, (torch.randn(4, 3, requires_grad=True),), dynamic_shapes=({0: Dim("rows")},))
    for rows in (2, 4, 7):
        x = torch.randn(rows, 3, requires_grad=True)
        torch.testing.assert_close(tr(x), forward(x))
    with pytest.raises(InputMismatchError, match=r"rows\) is 1: the trace holds for Ne\(rows - 1, 0\)"):
        tr(torch.randn(1, 3, requires_grad=True))


def test_a_fixed_size_in_place_of_a_dynamic_one():
    forward = lambda x: x.clone().resize_(2, 3)  # noqa: E731
    example, shapes = (torch.randn(4, 3),), ({0: Dim("rows")},)
    if torch.__version__ >= "2.14":  # which knows the size
        x = torch.randn(5, 3)
        assert torch.equal(st.trace(forward, example, dynamic_shapes=shapes)(x), forward(x))
        return
    with pytest.raises(st.errors.UnsupportedOpError, match="gives a tensor with dynamic sizes a fixed size in place"):
        st.trace(forward, example, dynamic_shapes=shapes)


def test_two_dims_that_the_model_makes_equal():
    shapes = {"a": {0: Dim("n")}, "b": {0: Dim("m")}}
    with pytest.raises(DynamicShapeError, match=r"must always be [nm] in this model"):
        st.trace(lambda a, b: a + b, (torch.randn(3), torch.randn(3)), dynamic_shapes=shapes)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"z": {0: Dim("n")}}, "dynamic_shapes names 'z'; the arguments are x, y"),
        ({"x": {5: Dim("n")}}, "dimension 5 of x, which has 3"),
        ({"x": {"0": Dim("n")}}, "the key .0. for x: a dimension is a whole number"),
        ({"x": {0: 1.5}}, "dimension 0: 1.5 is none of"),
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


def second_row(x):
    row = x[:1]
    row.add_(1)
    return row.as_strided((3,), (2,)), x  # in the first row at the example's sizes


@pytest.mark.parametrize(
    ("fn", "make", "shapes"),
    [
        (cache_write, lambda n: (torch.randn(n, 9, 2), torch.randn(n, 3, 2)), ({0: Dim("b")}, {0: Dim("b")})),
        (halves, lambda n: (torch.randn(2 * n, 3),), ({0: 2 * Dim("h")},)),
        (flat, lambda n: (torch.randn(n, 4),), ({0: Dim("n")},)),
        (lambda x: (x.relu_(), x.mul_(2)[0]), lambda n: (torch.randn(n, 2),), ({0: Dim("n")},)),
        (second_row, lambda n: (torch.randn(4, n + 2),), ({1: Dim("n")},)),
    ],
    ids=["cache_write", "halves", "flat", "whole", "second_row"],
)
def test_mutation_at_any_size(fn, make, shapes):
    tr = st.trace(fn, make(3), dynamic_shapes=shapes)
    for n in (2, 3, 6):
        assert_like_eager(fn, tr, make(n))


def body(call):
    """The ops of a call, its values numbered in the order in which they turn up, sizes as expressions."""
    numbers = {}

    def number(x):
        if isinstance(x, torch.fx.Node):
            inside = "" if x.op != "get_attr" else str(x.target).removeprefix(call.fqn)
            return inside or f"%{numbers.setdefault(x, len(numbers))}"
        return x

    return [
        (str(n.target), torch.fx.node.map_arg((n.args, n.kwargs), number), number(n), type_text(n.meta["val"]))
        for n in call.nodes
        if n.op == "call_function"
    ]


def test_calls_of_equal_layers_have_equal_bodies():
    model = nn.Sequential(*[nn.TransformerEncoderLayer(8, 2, 16, batch_first=True) for _ in range(4)])
    shapes = ({0: Dim("batch"), 1: Dim("length")},)
    tr = st.trace(model, (torch.randn(2, 5, 8),), dynamic_shapes=shapes)
    # The first call stands apart, for it is where the sizes of the input are asked for.
    layers = [c for c in tr.calls if c.parent is tr.calls[0]]
    first, second, third, fourth = (body(c) for c in layers)
    assert "batch" in str(second)
    assert second == third == fourth
    assert [op[0] for op in first if "sym_size" not in op[0]] == [op[0] for op in second if "sym_size" not in op[0]]
    for batch, length in ((1, 5), (3, 2), (4, 9)):
        tr(torch.randn(batch, length, 8))


# ---------------------------------------------------------------- what a trace says of its sizes


def test_the_text_has_the_names_of_dims():
    shapes = {"x": {0: Dim("batch"), 1: Dim("length")}, "y": {0: Dim("batch")}}
    tr = st.trace(Net(), inputs(3), dynamic_shapes=shapes)
    assert (
        f"{tr}\n"
        == """\
Net: 7 ops, 2 module calls, 2 parameters (20 elements)
Net(x=%x: f32[batch, length, 4], y=%y: f32[batch, 3]) -> (%add: f32[batch, 4*length], %mul: Sym(2*batch))
  Linear[fc](input=%x: f32[batch, length, 4]) -> %linear: f32[batch, length, 4]
    %linear: f32[batch, length, 4] = aten.linear(%x, self.weight, self.bias)
  %view: f32[batch*length, 4] = aten.view(%linear, [-1, 4])
  %sym_size_int: Sym(batch) = aten.sym_size.int(%x, 0)
  %reshape: f32[batch, 4*length] = aten.reshape(%view, [%sym_size_int, -1])
  %sum_1: f32[] = aten.sum(%y)
  %add: f32[batch, 4*length] = aten.add.Tensor(%reshape, %sum_1)
  %mul: Sym(2*batch) = operator.mul(2, %sym_size_int)
"""
    )


def test_range_constraints_are_those_of_an_exported_program():
    x = torch.randn(6, 4)
    shapes = {"x": {0: Dim("n", min=2, max=9), 1: Dim("m")}}
    ranges = st.trace(Once(), (x,), dynamic_shapes=shapes).range_constraints
    exported = torch.export.export(Once(), (x,), dynamic_shapes=shapes).range_constraints
    assert sorted(map(str, ranges.values())) == sorted(map(str, exported.values())) == ["VR[0, int_oo]", "VR[2, 9]"]
    assert st.trace(Once(), (x,)).range_constraints == {}


@pytest.mark.parametrize("copied", [lambda tr: pickle.loads(pickle.dumps(tr)), copy.deepcopy, lambda tr: tr])
def test_a_copy_checks_sizes_just_as_well(copied, tmp_path):
    shapes = {"x": {0: 2 * Dim("half"), 1: Dim("length", max=7)}, "y": {0: 2 * Dim("half")}}
    tr = st.trace(Net(), inputs(6), dynamic_shapes=shapes)
    tr.save(tmp_path / "net.st")
    for again in (copied(tr), copied(st.load(tmp_path / "net.st"))):
        again.lint()
        assert str(again) == str(tr)
        assert again.range_constraints == tr.range_constraints
        args = inputs(4, 6)
        torch.testing.assert_close(again(*args), tr(*args))
        for wrong, message in ((inputs(3), "of the form 2*half"), (inputs(2, 8), "is 8 and must be at most 7")):
            with pytest.raises(InputMismatchError, match=re.escape(message)):
                again(*wrong)


def test_a_loaded_trace_keeps_the_guards(tmp_path):
    tr = st.trace(lambda x: x * 2 if x.shape[0] > x.shape[1] else x, (torch.randn(6, 4),), dynamic_shapes=(AUTO,))
    tr.save(tmp_path / "f.st")
    again = st.load(tmp_path / "f.st")
    again(torch.randn(9, 8))
    with pytest.raises(InputMismatchError, match="the trace holds for"):
        again(torch.randn(8, 9))


AUTO = {0: Dim.AUTO, 1: Dim.AUTO}


# ---------------------------------------------------------------- other arguments


def rows(x, n, *, more=1):
    x[:n].mul_(2)
    return x.view(n, -1) + more, n * more


def test_whole_numbers_can_be_dynamic():
    tr = st.trace(rows, (torch.randn(12), 4), {"more": 5}, dynamic_shapes={"n": Dim.DYNAMIC, "more": Dim.AUTO})
    placeholders = [n.name for n in tr.graph_module.graph.nodes if n.op == "placeholder"]
    assert placeholders == ["x", "n", "more"]
    tr.lint()
    for n, more in ((6, 2), (1, 0), (12, -3)):
        assert_like_eager(
            lambda x, n=n, more=more: rows(x, n, more=more),
            lambda x, n=n, more=more: tr(x, n, more=more),
            (torch.randn(12),),
        )
    for wrong in (5, 13, -1, 2.0, True):
        with pytest.raises(InputMismatchError, match=r"\bn\b|argument 1"):
            tr(torch.randn(12), wrong, more=1)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (Dim("n"), "has the Dim n for n, which is a whole number"),
        (5, "n is 4 in the example, and 5"),
        ("x", "has the Dim x for n"),
    ],
)
def test_what_a_whole_number_cannot_be(spec, message):
    with pytest.raises(DynamicShapeError, match=message):
        st.trace(rows, (torch.randn(12), 4), dynamic_shapes={"n": spec})


def test_a_whole_number_that_the_model_fixes():
    def f(x, n):
        return x * 2 if n == 4 else x

    with pytest.raises(DynamicShapeError, match="n was said to be dynamic, and the model fixes it at 4"):
        st.trace(f, (torch.randn(3), 4), dynamic_shapes={"n": Dim.DYNAMIC})
    tr = st.trace(f, (torch.randn(3), 4), dynamic_shapes={"n": Dim.AUTO})
    with pytest.raises(InputMismatchError, match="n is 5"):
        tr(torch.randn(3), 5)


@dataclasses.dataclass
class Pair:
    left: torch.Tensor
    right: torch.Tensor


def test_sizes_in_a_dataclass():
    def f(pair):
        return pair.left @ pair.right

    n = Dim("n")
    make = lambda n: (Pair(torch.randn(3, n), torch.randn(n, 2)),)  # noqa: E731
    tr = st.trace(f, make(4), dynamic_shapes={"pair": [{1: n}, {0: n}]})
    tr.check(make(7))
    with pytest.raises(InputMismatchError, match=r"pair.right: dimension 0 is 3 and must be n = 5"):
        tr(Pair(torch.randn(3, 5), torch.randn(3, 2)))


def test_a_cache_of_transformers_with_a_growing_length():
    """One token more, for any number of rows and of tokens before it."""
    pytest.importorskip("transformers")
    declare_missing_ops()
    from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        **{"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 30},
        **{"num_attention_heads": 4, "num_key_value_heads": 2},
    )
    model = LlamaForCausalLM(config).eval()

    def step(batch, past):
        torch.manual_seed(past)
        cache = DynamicCache(config=config)
        for layer in range(2):
            cache.update(*torch.randn(2, batch, 2, past, 4), layer)
        mask = torch.ones(batch, past + 1, dtype=torch.long)
        return {"input_ids": torch.randint(30, (batch, 1)), "attention_mask": mask, "past_key_values": cache}

    batch, past = Dim("batch", min=1), Dim("past", min=1)
    shapes = {"input_ids": {0: batch}, "attention_mask": {0: batch, 1: past + 1}}
    shapes["past_key_values"] = {"layers": [{"keys": {0: batch, 2: past}, "values": {0: batch, 2: past}}] * 2}
    tr = st.trace(model, (), step(3, 7), dynamic_shapes=shapes)
    for sizes in ((2, 5), (1, 9), (5, 3), (4, 20)):
        actual, expected = tr(**step(*sizes)), model(**step(*sizes))
        torch.testing.assert_close(actual.logits, expected.logits)
        for mine, theirs in zip(actual.past_key_values.layers, expected.past_key_values.layers, strict=True):
            torch.testing.assert_close((mine.keys, mine.values), (theirs.keys, theirs.values))
            assert mine.keys.shape[2] == sizes[1] + 1
    with pytest.raises(InputMismatchError, match="attention_mask: dimension 1 is 6 and must be past \\+ 1 = 7"):
        tr(**step(2, 6) | {"attention_mask": torch.ones(2, 6, dtype=torch.long)})


# ---------------------------------------------------------------- rules of common ops


X = torch.randn(4, 6, 8, 8)
OPS = {
    "pointwise": lambda x: torch.where(x > 0, x.exp(), x * x.shape[0]) + x[:1, :, :1],
    "permuted": lambda x: x.permute(0, 2, 3, 1).sigmoid() * 2,
    "linear": lambda x: F.linear(x, torch.ones(5, 8), torch.ones(5)),
    "matmul": lambda x: x @ x.transpose(-1, -2),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x),
    "norms": lambda x: F.layer_norm(F.batch_norm(x, torch.zeros(6), torch.ones(6)), (8,)),
    "softmax": lambda x: x.softmax(0) + x.mean((0, -1), keepdim=True),
    "reshape": lambda x: (x.reshape(-1, 64), x.flatten(1).view(x.shape[0], 2, -1), x.transpose(0, 1).reshape(6, -1)),
    "images": lambda x: F.max_pool2d(F.conv2d(x, torch.ones(3, 6, 3, 3), padding=1), 2),
    "channels_last": lambda x: F.conv2d(x.to(memory_format=torch.channels_last), torch.ones(3, 6, 3, 3)).relu(),
    "views": lambda x: (
        (x.transpose(1, -1), x[0, 1:5:2, -3:, -1], x[:, 2:], x.permute(3, 0, -2, 1)),
        (x[..., 0].unsqueeze(-1), x.unsqueeze(0), x[:, 5:2], x[0, 0].t(), (x > 0) & (x < 1), x.float().contiguous()),
    ),
    "views of views": lambda x: x[:, 1:, ::3].transpose(2, 3)[:, :, 2].unsqueeze(1)[:, 0, 1:] * 2,
    "activations in place": lambda x: F.hardswish(F.relu(F.silu(x * 2, inplace=True), inplace=True)[0], inplace=True),
    "grown": lambda x: F.interpolate(F.pad(x, (1, 0, 2, 0)), scale_factor=2.0).flatten(2),
    "attention with groups": lambda x: F.scaled_dot_product_attention(x, x[:, :3], x[:, :3], enable_gqa=True),
    "attention of three": lambda x: F.scaled_dot_product_attention(x[:, 0], x[:, 1], x[:, 2], x[:, :1, 0] > 0),
    "cat": lambda x: torch.cat([x, x[:2], x], 0),
    "embedding": lambda x: F.embedding((x > 0).long(), torch.ones(2, 5)).amax(1),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("fn", OPS.values(), ids=OPS)
def test_results_have_the_sizes_and_strides_of_eager(fn):
    tr = st.trace(fn, (X,), dynamic_shapes=({0: Dim("batch", min=1)},))
    for batch in (1, 2, 3, 7, 20):
        assert_like_eager(fn, tr, (torch.randn(batch, 6, 8, 8),))
    found, static = (t.graph_module.graph.output_node().meta["val"] for t in (tr, st.trace(fn, (X,))))
    example = lambda numbers: [n if type(n) is int else n.node.hint for n in numbers]  # noqa: E731
    assert [(example(v.size()), example(v.stride()), v.dtype) for v in found] == [
        (list(v.size()), list(v.stride()), v.dtype) for v in static
    ]


Y = torch.randn(3, 6, 24)
LENGTH_OPS = {
    "convolutions": lambda x: F.conv1d(
        F.gelu(F.conv1d(x, torch.ones(4, 6, 5), stride=2)), torch.ones(4, 4, 3), padding=1
    ),
    "norms": lambda x: (
        F.group_norm(F.conv1d(x, torch.ones(6, 6, 3)), 2) + F.conv1d(x, torch.ones(6, 6, 3)).mean(2, True)
    ),
    "transposed": lambda x: F.layer_norm(F.conv1d(x, torch.ones(8, 6, 3)).transpose(1, 2), (8,)).reshape(-1, 4),
    "same length": lambda x: F.gelu(F.conv1d(x.relu(), torch.ones(6, 6, 4), padding=2)[:, :, :-1]) * 2,
    "pad and chunks": lambda x: F.pad(x, (0, -x.shape[2] % 4)).reshape(x.shape[0], 6, -1, 4).transpose(1, 2) + 1,
    "blocks": lambda x: F.pad(x, (0, -x.shape[2] % 4)).view(x.shape[0], 6, (x.shape[2] + 3) // 4, 4).cumsum(2),
    "rotated": lambda x: torch.cat((-x.mT[..., 3:], x.mT[..., :3]), -1) * x.mT[..., :1].expand(-1, -1, 6),
    "parts": lambda x: [y * 2 for y in (*x.split(2, 1), *x.chunk(4, 1), *x.mT.split([5, 1], -1), *x.unbind(1))],
    "expanded": lambda x: (x[:, :, None].expand(-1, -1, 2, -1).reshape(x.shape[0], 12, -1), x[:, :1].expand_as(x) + x),
    "indexed": lambda x: (
        x[torch.arange(x.shape[0])[:, None], :, torch.arange(x.shape[2])],
        x[:, torch.tensor([1, 0])],
    ),
    "largest": lambda x: (*x.topk(2), *x.max(1, keepdim=True), *x.sort(1), x.gather(2, x.argsort(2)[:, :, :3])),
    "sums": lambda x: (torch.einsum("bcl,bdl->bcd", x, x), torch.einsum("...cl,...dl->...ld", x, x), x @ x.mT[:, None]),
    "pooled": lambda x: F.max_pool1d(F.max_pool1d(x, 3, padding=1), 2, stride=1),
    "made": lambda x: (torch.zeros(x.shape[2], 2), torch.arange(2, x.shape[2]), x.new_ones(x.shape[::-1]), x.tril()),
    "repeated": lambda x: x.repeat_interleave(2, 1).masked_fill(x[:, :1] > 0, 0.0),
    "resized": lambda x: F.interpolate(x[:, :, None], size=(3, x.shape[2] + 1)),
    "written": lambda x: x.clone().add_(x[:, :1]).mul_(2).masked_fill_(x > 0, 1.0).copy_(x[0]),
}


GRU, LSTM = nn.GRU(6, 5, batch_first=True, bidirectional=True), nn.LSTM(6, 5, batch_first=True, proj_size=3)
STEPS, RNN = nn.GRU(6, 5, 2), nn.RNN(6, 5, 2, nonlinearity="relu", batch_first=True)
RECURRENT = {
    "gru": lambda x: GRU(x.mT),
    "gru of steps": lambda x: STEPS(x.permute(2, 0, 1), x.new_ones(2, x.shape[0], 5)),
    "rnn": lambda x: RNN(x.mT),
    "lstm": lambda x: LSTM(x.mT),
}
SIZED = [pytest.param(fn, id=name) for name, fn in LENGTH_OPS.items()]
SIZED += [pytest.param(fn, id=name, marks=pytest.mark.slow) for name, fn in RECURRENT.items()]


@pytest.mark.sample(2)
@pytest.mark.parametrize("mode", ["nearest", "bilinear", "bicubic"])
def test_an_image_that_grows_by_a_float(mode):
    fn = lambda x: F.interpolate(x, scale_factor=1.5, mode=mode)  # noqa: E731
    tr = st.trace(fn, (torch.randn(1, 2, 10, 12),), dynamic_shapes=({2: "h", 3: "w"},))
    for size in ((11, 8), (3, 2), (40, 7)):
        x = torch.randn(1, 2, *size)
        torch.testing.assert_close(tr(x), fn(x))


@pytest.mark.sample(6)
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("fn", SIZED)
def test_what_is_said_of_results_holds_at_other_lengths(fn, grad):
    """The sizes, strides and `requires_grad` that a trace says are those of a trace with other sizes."""
    make = lambda batch, length: torch.randn(batch, 6, length).requires_grad_(grad)  # noqa: E731
    tr = st.trace(fn, (make(*Y.shape[::2]),), dynamic_shapes=({0: Dim("batch"), 2: Dim("length", min=8)},))
    for batch, length in ((2, 8), (3, 24), (7, 31), (5, 40)):
        inputs = (make(batch, length),)
        assert_like_eager(fn, tr, inputs)
        sizes = program_of(tr).tape.sizes.values(inputs, ())
        found, static = (program_of(t).tape.outputs for t in (tr, st.trace(fn, inputs)))
        for said, want in zip(values_in(found), values_in(static), strict=True):
            size, stride = (resolved(list(n), sizes) for n in (said.fake.size(), said.fake.stride()))
            assert (size, stride) == (list(want.fake.size()), list(want.fake.stride()))
            assert (said.fake.dtype, said.fake.requires_grad) == (want.fake.dtype, want.fake.requires_grad)


def test_a_copy_that_is_a_view_at_another_size():
    """`x[:, :n]` has gaps in the example. Without them, `reshape` would give a view, and x would be written to."""
    f = lambda x, y: x[:, : y.shape[0]].reshape(-1).mul_(2)  # noqa: E731
    tr = st.trace(f, (torch.randn(3, 6), torch.randn(4)), dynamic_shapes=({1: Dim("width")}, {0: Dim("n")}))
    assert_like_eager(f, tr, (torch.randn(3, 8), torch.randn(5)))
    with pytest.raises(InputMismatchError, match="trace again"):
        tr(torch.randn(3, 5), torch.randn(5))


def test_where_a_part_of_one_row_lies_in_memory_at_other_sizes():
    """In the example the part has one row, whose stride says nothing of the order of its dimensions."""

    def forward(x):
        part = x.t()[1:, 1:] * 2
        return x * part.stride(0) + part.stride(1), part

    tr = st.trace(forward, (torch.randn(2, 4),), dynamic_shapes=({0: Dim("rows")},))
    for rows in (2, 3, 5):
        assert_like_eager(forward, tr, (torch.randn(rows, 4),))


def test_a_view_of_a_part_of_one_row_that_is_a_copy_at_other_sizes():
    def forward(x):
        part = x.t()[1:, 1:] * 2
        part.flatten().add_(1)  # writes to `part` where it has one column
        return part

    with pytest.raises(DynamicShapeError, match=r"dimension 0 \(rows\) was said to be dynamic, and the model fixes it"):
        st.trace(forward, (torch.randn(2, 4),), dynamic_shapes=({0: Dim("rows")},))


@pytest.mark.parametrize(
    ("example", "others", "wrap"),
    [
        ((3, 4), [(2, 7), (7, 2), (4, 4), (9, 2)], False),
        ((3, 4), [(2, 7), (4, 3), (4, 4)], True),
        ((3, 3, 3), [(2, 2, 2), (5, 5, 5)], False),
    ],
)
def test_fill_diagonal(example, others, wrap):
    def forward(x):
        mask = torch.zeros(x.shape, dtype=torch.bool)
        return x.masked_fill(mask.fill_diagonal_(True, wrap=wrap), 7.0)

    tr = st.trace(forward, (torch.randn(example),), dynamic_shapes=({d: Dim.DYNAMIC for d in range(len(example))},))
    for size in (example, *others):
        assert_like_eager(forward, tr, (torch.randn(size),))


@pytest.mark.parametrize(("r", "with_replacement"), [(1, False), (2, False), (2, True), (3, False), (3, True)])
def test_combinations(r, with_replacement):
    forward = lambda x: torch.combinations(x.exp(), r, with_replacement).prod(1).cumsum(0)  # noqa: E731
    tr = st.trace(forward, (torch.randn(5),))
    assert_like_eager(forward, tr, (torch.randn(5, requires_grad=True),))
    if torch.__version__ < torch.torch_version.TorchVersion("2.14"):  # before, its kernel looks at the sizes
        with pytest.raises(st.TraceError):
            st.trace(forward, (torch.randn(5),), dynamic_shapes=({0: Dim("n")},))
        return
    tr = st.trace(forward, (torch.randn(5),), dynamic_shapes=({0: Dim("n")},))
    for n in (4, 8, 13):
        assert_like_eager(forward, tr, (torch.randn(n),))


def test_fill_diagonal_of_a_tall_matrix_with_wrap():
    forward = lambda x: (x * 2).fill_diagonal_(1.0, wrap=True)  # noqa: E731
    for rows, columns in ((9, 2), (8, 2), (5, 3), (7, 1)):
        x = torch.randn(rows, columns)
        tr = st.trace(forward, (x,), dynamic_shapes=({0: Dim.AUTO, 1: Dim.AUTO},))
        assert_like_eager(forward, tr, (x,))


WRITES_TO_PARTS = {
    "a column": lambda y: y[1:, 1].mul_(2),
    "rows": lambda y: y[1:].mul_(2),
    "rows, assigned": lambda y: y.__setitem__(slice(1, None), y[1:] * 2),
    "rows, filled": lambda y: y.__setitem__(slice(1, None), 3),
    "rows of a transposed tensor": lambda y: y.t()[1:, 1:].relu_(),
    "rows by rows": lambda y: y[1:].copy_(y[1:].clone()),
    "a part of a diagonal": lambda y: y.diagonal()[1:].add_(1),
}


@pytest.mark.parametrize("write", WRITES_TO_PARTS.values(), ids=WRITES_TO_PARTS)
def test_a_write_to_a_part_of_one_row_fixes_no_size(write):
    def forward(x):
        y = x * 2
        write(y)
        return y

    tr = st.trace(forward, (torch.randn(2, 4),), dynamic_shapes=({0: Dim("rows")},))
    for rows in (2, 3, 5):
        assert_like_eager(forward, tr, (torch.randn(rows, 4),))


@pytest.mark.parametrize("part", [lambda z: z, lambda z: z[1:] * 1])
@pytest.mark.parametrize("reads_first", [False, True])
def test_a_copy_that_is_a_view_of_one_row(part, reads_first):
    """With one row, eager writes to `z` too. Where nobody reads it afterwards, that is the same."""

    def forward(x):
        z = part(x * 1)
        found = z.sum()
        y = z.transpose(0, 1).flatten().add_(1)
        return (found if reads_first else z.sum()), y

    whole = part(torch.ones(2, 3)).shape[0] == 2
    args, from_one = (torch.randn(4, 3),), ({0: Dim("rows", min=1)},)
    if reads_first and whole:
        tr = st.trace(forward, args, dynamic_shapes=from_one)
        assert_like_eager(forward, tr, (torch.randn(1, 3),))
    else:
        with pytest.raises(DynamicShapeError, match=r"may be 1 .* the model goes another way for 1"):
            st.trace(forward, args, dynamic_shapes=from_one)
        tr = st.trace(forward, args, dynamic_shapes=({0: Dim("rows")},))
        with pytest.raises(InputMismatchError, match="trace again"):
            tr(torch.randn(1 if whole else 2, 3))
    for rows in (3, 4, 6):
        assert_like_eager(forward, tr, (torch.randn(rows, 3),))


@pytest.mark.parametrize("copied", [lambda z: z.t().flatten(), lambda z: z.t().contiguous(), lambda z: z.t().ravel()])
def test_a_copy_that_is_a_view_of_one_row_in_a_training_step(copied):
    model = nn.Linear(4, 4)

    def step(x):
        z = model(x)
        loss = copied(z).add_(1).sum() * 2 + z.sum()
        loss.backward()
        return loss

    with pytest.raises(DynamicShapeError, match=r"may be 1 .* the model goes another way for 1"):
        st.trace(step, (torch.randn(5, 4),), dynamic_shapes=({0: Dim("rows", min=1)},))
    tr = st.trace(step, (torch.randn(5, 4),), dynamic_shapes=({0: Dim("rows")},))
    x = torch.randn(3, 4)
    assert torch.equal(tr(x), step(x))
    with pytest.raises(InputMismatchError, match="is 1, for which the model goes another way"):
        tr(x[:1])


def test_a_write_that_fixes_a_size_is_refused_when_it_is_traced():
    def forward(x):
        y = x * 2
        y[1:].view(-1, 2, 2)[:, 0].zero_()
        return y

    with pytest.raises(DynamicShapeError, match=r"(?s)the model fixes it at 2.*module: forward.*source: .*zero_\(\)"):
        st.trace(forward, (torch.randn(2, 4),), dynamic_shapes=({0: Dim("rows")},))


def test_torch_logs_no_division_by_zero(caplog):
    """What sizes of 0 and 1 would change is tried, and an expression of sizes may divide by them."""

    def forward(x):
        return F.pad(x, (0, 0, 0, -x.shape[0] % 4)).view(-1, 4, 4).mul_(2)

    log = logging.getLogger("torch.utils._sympy.interp")
    log.addHandler(caplog.handler)
    try:
        tr = st.trace(forward, (torch.ones(8, 4),), dynamic_shapes=({0: Dim("n")},))
        assert_like_eager(forward, tr, (torch.ones(5, 4),))
    finally:
        log.removeHandler(caplog.handler)
    assert log.name not in [record.name for record in caplog.records]


def test_a_rule_does_not_hide_that_two_sizes_must_be_equal():
    tr = st.trace(lambda a, b: a @ b + a, (torch.randn(3, 4), torch.randn(4, 4)), dynamic_shapes=({1: AUTO[0]}, AUTO))
    tr(torch.randn(3, 6), torch.randn(6, 6))
    with pytest.raises(InputMismatchError, match=r"dimension \d is \d and must be|trace holds for"):
        tr(torch.randn(3, 6), torch.randn(5, 5))


@pytest.mark.parametrize("fn", [lambda x: (x.view(-1, 2), x + 1)[1], lambda x: (x.reshape(2, -1), x + 1)[1]])
def test_a_view_that_nobody_reads_does_not_fit_every_size(fn):
    tr = st.trace(fn, (torch.ones(4),), dynamic_shapes=({0: Dim.AUTO},))
    assert torch.equal(tr(torch.ones(6)), torch.full((6,), 2.0))
    for run in (fn, tr):
        with pytest.raises(RuntimeError, match="invalid for input of size 5"):
            run(torch.ones(5))


def test_a_convolution_chooses_its_kernel_at_each_size():
    conv = nn.Conv2d(8, 8, 3, groups=8, padding=1)
    tr = st.trace(conv, (torch.randn(3, 8, 6, 6),), dynamic_shapes=({0: Dim("batch"), 2: Dim("rows")},))
    for batch, height in ((1, 6), (15, 9), (16, 5), (40, 4)):
        tr.check((torch.randn(batch, 8, height, 6),))


def test_channels_of_a_convolution_are_fixed_by_its_weight():
    net, x = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3)), torch.randn(2, 3, 8, 8)
    with pytest.raises(
        DynamicShapeError, match=r"dimension 1 \(c\) was said to be dynamic, and the model fixes it at 3"
    ):
        st.trace(net, (x,), dynamic_shapes=({1: Dim("c")},))


def test_a_size_that_one_of_two_inputs_fixes_is_named_for_both():
    with pytest.raises(DynamicShapeError, match="name the sizes of other inputs that must equal it, too"):
        st.trace(torch.add, (torch.ones(3), torch.ones(3)), dynamic_shapes=({0: "n"}, None))


def test_a_size_written_in_another_way_is_no_other_size():
    def writes_twice(x):
        pairs = x.unflatten(0, (-1, 2))
        pairs.mul_(2)
        return x.add_(1)  # of 2 * (n // 2) rows

    tr = st.trace(writes_twice, (torch.randn(4, 6),), dynamic_shapes=({0: Dim.AUTO, 1: Dim.AUTO},))
    assert_like_eager(writes_twice, tr, (torch.randn(6, 8),))


# ---------------------------------------------------------------- dynamic_shapes and forward's signature


class Takes(nn.Module):
    def forward(self, x, *more, k1, k2=None, **rest):
        return x.sum() + sum(m.sum() for m in more) + k1.sum() * k1.shape[0] + k2.sum() + sum(rest.values()).sum()


def sizes_of(tr):
    """The printed type of each input, by its name."""
    return {n.name: type_text(n.meta["val"]) for n in tr.graph_module.graph.find_nodes(op="placeholder")}


D = {0: Dim("d")}


@pytest.mark.parametrize(
    "shapes",
    [
        (None, None, D, None, None),  # in the order of forward's parameters, as for torch.export
        (None, (None, None), D, None, {}),
        (None, None, None, D, None, None),  # each item of *more and **rest for itself
        {"k1": D},
        {"x": None, "more": (None, None), "k1": D, "k2": None, "rest": {"r": None}},
    ],
)
def test_arguments_are_known_by_forwards_signature(shapes):
    args, kwargs = (torch.randn(2), torch.randn(3), torch.randn(5)), {"r": torch.randn(6), "k2": torch.randn(7)}
    tr = st.trace(Takes(), args, {**kwargs, "k1": torch.randn(4)}, dynamic_shapes=shapes)
    assert sizes_of(tr) == {
        **{"x": "f32[2]", "more_0": "f32[3]", "more_1": "f32[5]"},
        **{"r": "f32[6]", "k2": "f32[7]", "k1": "f32[d]"},
    }
    tr.check(args, {**kwargs, "k1": torch.randn(9)})


@pytest.mark.parametrize(
    ("shapes", "dynamic"),
    [
        ((None, (D, None), None, None, None), "more_0"),
        ((None, D, None, None, None, None), "more_0"),
        ({"more": (None, D)}, "more_1"),
        ({"more[1]": D}, "more_1"),
        ({"rest": {"r": D}}, "r"),
        ({"r": D}, "r"),
        ((None, None, None, None, {"r": D}), "r"),
    ],
)
def test_items_of_variadic_parameters(shapes, dynamic):
    args, kwargs = (torch.randn(2), torch.randn(3), torch.randn(3)), {"k2": torch.randn(7), "r": torch.randn(6)}
    tr = st.trace(Takes(), args, {**kwargs, "k1": torch.randn(4)}, dynamic_shapes=shapes)
    assert [name for name, text in sizes_of(tr).items() if text == "f32[d]"] == [dynamic]


def test_a_sequence_for_a_class_of_dicts_that_has_fields():
    outputs = pytest.importorskip("transformers.modeling_outputs")
    x = outputs.BaseModelOutput(last_hidden_state=torch.randn(3))
    tr = st.trace(lambda x: x.last_hidden_state + 1, (x,), dynamic_shapes=([D],))
    assert tr(outputs.BaseModelOutput(last_hidden_state=torch.randn(5))).shape == (5,)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (([D, None],), r"has \[\{0: Dim.*\}, None\] for x, a dict with \['a'\], \['b'\]: write a dict"),
        (({1: D},), r"has keys \[1\] for x, which has \['a'\], \['b'\]"),
        ((Dim("d"),), "for x, a dict with .*: write a dict of what is in it, or None"),
        (([D],), "for x, a dict with"),
    ],
)
def test_entries_of_a_dict_are_known_by_key(shapes, message):
    def f(x):
        return x["a"] + x["b"].sum()

    x = {"a": torch.randn(3), "b": torch.randn(4)}
    with pytest.raises(DynamicShapeError, match=message):
        st.trace(f, (x,), dynamic_shapes=shapes)
    assert sizes_of(st.trace(f, (x,), dynamic_shapes=({"b": D},))) == {"x_a": "f32[3]", "x_b": "f32[d]"}


@dataclasses.dataclass
class Box:
    inner: list
    pair: tuple


@pytest.mark.parametrize("shapes", [{"pair": (None, D)}, [None, [None, D]], {"pair": {1: D}}])
def test_dataclasses_by_attribute_or_position(shapes):
    box = Box([torch.randn(3)], (torch.randn(3), torch.randn(3)))
    tr = st.trace(lambda box: box.inner[0].sum() * box.pair[1], (box,), dynamic_shapes=(shapes,))
    assert list(sizes_of(tr).values()) == ["f32[3]", "f32[3]", "f32[d]"]


def test_the_range_of_a_number():
    tr = st.trace(lambda n, x: x * n, (3, torch.ones(2)), dynamic_shapes=(Dim.DYNAMIC(min=3, max=10), None))
    tr.check((10, torch.ones(2)))
    for n, limit in ((2, "at least 3"), (11, "at most 10")):
        with pytest.raises(InputMismatchError, match=f"n is {n} and must be {limit}"):
            tr(n, torch.ones(2))
    with pytest.raises(DynamicShapeError, match=r"n is 2 in the example, outside of \[3, \]"):
        st.trace(lambda n, x: x * n, (2, torch.ones(2)), dynamic_shapes=(Dim.DYNAMIC(min=3), None))


def test_two_dims_of_one_name_have_one_range():
    shapes = ({0: Dim("C", min=3)}, {0: Dim("C", max=12)})
    with pytest.raises(DynamicShapeError, match=r"y, dimension 0 has a Dim C of \[0, 12\], and x, .* one of \[3, \]"):
        st.trace(lambda x, y: x.sum() + y.sum(), (torch.ones(5), torch.ones(5)), dynamic_shapes=shapes)


def test_a_range_of_two_sizes():
    tr = st.trace(Once(), (torch.ones(2),), dynamic_shapes=({0: Dim("d", min=1, max=2)},))
    tr.check((torch.ones(1),))
    with pytest.raises(InputMismatchError, match="at most 2"):
        tr(torch.ones(3))


def test_questions_about_a_range_of_two_sizes():
    def f(x, y):
        assert 1 <= x.shape[0] <= 2 and y.shape[0] <= 3
        return x + y[1:]

    dim, args = Dim("d", min=1, max=2), (torch.ones(2), torch.ones(3))
    tr = st.trace(f, args, dynamic_shapes=({0: dim}, {0: dim + 1}))
    tr.check((torch.ones(1), torch.ones(2)))
    again = st.trace(tr.to_exported_program().module(), args, dynamic_shapes=({0: dim}, {0: dim + 1}))
    again.check((torch.ones(1), torch.ones(2)))


def test_a_derived_dim_that_fits_one_size_only():
    d, args = Dim("d", min=6), (torch.randn(6, 2), torch.randn(12))
    with pytest.raises(DynamicShapeError, match=r"dimension 0 \(d\) was said to be dynamic, and .* at 12"):
        st.trace(lambda x, y: x.reshape([-1]) + y, args, dynamic_shapes={"x": (d - 6, 2), "y": (d,)})


def test_a_size_that_depends_on_a_comparison_of_sizes():
    def f(x):
        return torch.sym_ite(x.shape[0] > x.shape[1], x.shape[0], x.shape[1])

    tr = st.trace(f, (torch.zeros(3, 2),), dynamic_shapes={"x": {0: Dim.DYNAMIC, 1: Dim.DYNAMIC}})
    assert [tr(torch.zeros(*size)) for size in ((3, 2), (3, 5))] == [3, 5]


OTHER_FOR_ONE = {
    "a comparison": lambda x: x * 2 if x.shape[0] == 1 else x * 3,
    "a limit": lambda x: x if x.shape[0] > 1 else x + 1,
    "squeeze": lambda x: x.squeeze(0),
}
SAME_FOR_ONE = {
    "arithmetic": lambda x: x * 2 + x.sum(),
    "a slice": lambda x: x[1:] + x[:-1],
    "a product": lambda x: x @ x.t(),
}
FROM_ONE = {
    "Dim": lambda: torch.export.Dim("b", min=1),
    "a range": lambda: torch.export.Dim("b", min=1, max=8),
    "DYNAMIC": lambda: torch.export.Dim.DYNAMIC(min=1),
}


@pytest.mark.parametrize("dim", FROM_ONE)
def test_a_size_of_one_that_the_range_allows_is_served_or_refused_when_traced(dim):
    for forward in OTHER_FOR_ONE.values():
        with pytest.raises(st.errors.DynamicShapeError, match="may be 1 as dynamic_shapes has it") as caught:
            st.trace(forward, (torch.ones(4, 3),), dynamic_shapes={"x": {0: FROM_ONE[dim]()}})
        assert "write min=2" in caught.value.hint
    for forward in SAME_FOR_ONE.values():
        trace = st.trace(forward, (torch.ones(4, 3),), dynamic_shapes={"x": {0: FROM_ONE[dim]()}})
        torch.testing.assert_close(trace(torch.ones(1, 3)), forward(torch.ones(1, 3)))


def test_dynamic_shapes_of_another_number_of_items_name_both():
    batch = torch.export.Dim("b")
    message = r"2 items, \[\{0: .*\}, None\], for pair, a tuple with 3, \[0\], \[1\], \[2\]: write one for each"
    with pytest.raises(st.errors.DynamicShapeError, match=message):
        st.trace(lambda pair: pair[0], ((torch.ones(3),) * 3,), dynamic_shapes={"pair": [{0: batch}, None]})


def test_a_trace_is_as_before_where_its_decomposition_is_refused():
    layer, x = nn.GRU(4, 3), torch.randn(7, 2, 4)
    tr = st.trace(layer, (torch.randn(5, 2, 4),), dynamic_shapes=({0: "steps"},))
    tr.to_onnx()  # in which torch takes other shape functions
    tr.memory()  # which looks into the layer, for the sizes of the example
    with pytest.raises(DynamicShapeError, match="the model fixes it at 5"):
        tr.decompose()
    torch.testing.assert_close(tr(x), layer(x))
