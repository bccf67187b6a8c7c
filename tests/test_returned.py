"""Compilers that know values only: whatever memory they return, effects and results are those of eager."""

import pytest
import torch
from compare import sharing
from torch.utils._pytree import tree_leaves

import scopetrace as st


def value_compiler(gm, example_inputs):
    """Returns an input wherever the value is an input's, copies of views, and everything contiguous."""

    def run(*inputs):
        return [next((x for x in inputs if same(x, o)), o.contiguous().clone()) for o in gm(*inputs)]

    return run


def same(a, b):
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)


def old_value(x):
    y = x.clone()
    x.zero_()
    return y


def swap(x):
    a, b = x.unbind(0)[:2]
    t = a.clone()
    a.copy_(b)
    b.copy_(t)
    return t


def view_of_input(x):
    y, z = x[0], x.view(-1)
    torch._dynamo.graph_break()
    y.add_(1)
    z.mul_(2)
    return x


def views_of_one_result(x):
    y = x + 1
    row = y[0]
    torch._dynamo.graph_break()
    row.zero_()
    return y


def other_strides(x):
    return x.t() + 1, x.sum().expand(3, 4), x.t().contiguous().t()


PROGRAMS = [old_value, swap, view_of_input, views_of_one_result, other_strides]


@pytest.mark.parametrize("level", ["aten", "torch"])
@pytest.mark.parametrize("fn", PROGRAMS, ids=lambda f: f.__name__)
def test_memory_and_strides_are_those_of_eager(fn, level):
    torch._dynamo.reset()
    theirs, ours = torch.arange(12.0).reshape(3, 4), torch.arange(12.0).reshape(3, 4)
    expected = fn(theirs)
    actual = torch.compile(fn, backend=st.functional_backend(value_compiler, level=level))(ours)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(ours, theirs)
    assert [t.stride() for t in tree_leaves(actual)] == [t.stride() for t in tree_leaves(expected)]


def test_a_view_of_another_dtype():
    torch._dynamo.reset()
    x = torch.ones(3, 4)
    torch.compile(lambda x: x.view(torch.int32)[1:], backend=st.functional_backend(value_compiler))(x).zero_()
    assert x.sum(1).tolist() == [4, 0, 0]


@pytest.mark.parametrize("wrong", [lambda y: y[0], lambda y: y.double(), lambda y: (y, y)])
def test_other_shapes_and_dtypes_raise(wrong):
    torch._dynamo.reset()
    backend = st.functional_backend(lambda gm, example_inputs: lambda x: wrong(x + 1))
    with pytest.raises(st.CompiledGraphError, match="the compiled graph returned"):
        torch.compile(lambda x: x + 1, backend=backend)(torch.ones(3, 4))


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(4, 4)
        self.register_buffer("table", torch.ones(4))

    def forward(self, x):
        y = self.fc(x)
        self.last = y.detach()
        return y, x[1:].t(), x, self.table[1:], self.fc.weight


class Layers(torch.nn.Module):
    """Its results are inputs, parameters, views of these and one tensor twice; two are also in attributes."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([Layer(), Layer()])

    def forward(self, x):
        found = []
        for layer in self.layers:
            y, *rest = layer(x)
            found += [y, y, *rest]
        return found


FORMS = {
    "outlined": lambda tr: tr.outline("layers"),
    "compiled": lambda tr: tr.compile(backend="aot_eager"),
    "by a compiler": lambda tr: lambda *args: tr.run(value_compiler(tr.graph_module, args), *args),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("strides", ["equal", "other"])
@pytest.mark.parametrize("size", ["static", "dynamic"])
@pytest.mark.parametrize("form", FORMS)
def test_results_share_memory_as_in_eager(form, size, strides):
    """With inputs, with parameters and with each other, also where inputs have other sizes and strides."""
    model = Layers().requires_grad_(False)
    x = torch.randn(5, 4)
    tr = st.trace(model, (x,), dynamic_shapes={"x": {0: "n"}} if size == "dynamic" else None)
    rows = 5 if size == "static" else 7
    x = torch.randn(rows, 4) if strides == "equal" else torch.randn(4, rows).t()
    run = FORMS[form](tr)
    for _ in range(2):
        expected, kept = model(x), [layer.last for layer in model.layers]
        actual = run(x)
        torch.testing.assert_close(actual, expected)
        of_model = [x, *model.parameters(), *model.buffers()]
        now = [*actual, *(layer.last for layer in model.layers)]
        assert sharing(now, of_model) == sharing([*expected, *kept], of_model)


def test_what_is_right_is_not_copied():
    torch._dynamo.reset()
    made = []

    def compiler(gm, example_inputs):
        return lambda x: made.append([x + 1]) or made[-1]

    result = torch.compile(lambda x: x + 1, backend=st.functional_backend(compiler))(torch.ones(3))
    assert result is made[0][0]


class Config:
    def __eq__(self, other):
        return type(other) is Config

    __hash__ = None


def batch():
    return {"x": torch.ones(2), "list": [torch.ones(2)], "inner": {"t": torch.ones(3)}, "config": Config(), "n": 2}


def updates(d):
    d.update(new=d["x"] * 2)
    return d["x"] + 1


def appends(d):
    d["list"].append(d["x"] * 2)
    return d


def moves(d):
    d["moved"] = (d["list"], [d["inner"]])
    return d["config"], {"all": d}


def returns_parts(d):
    return [d["list"], d["x"] * 2, (d["inner"], d["config"])], d["list"]


@pytest.mark.parametrize("forward", [updates, appends, moves, returns_parts])
@pytest.mark.parametrize("form", ["traced", "to_module"])
def test_objects_among_the_arguments_are_the_caller_s(forward, form):
    """As in eager: what a forward returns or leaves in its arguments is no copy."""
    trace = st.trace(forward, (batch(),))
    run = trace if form == "traced" else trace.to_module()
    ours, eager = batch(), batch()
    names = lambda d: {id(d): "d"} | {id(x): key for key, x in d.items() if not isinstance(x, torch.Tensor | int)}  # noqa: E731
    known, known_in_eager = names(ours), names(eager)
    found, wanted = run(ours), forward(eager)
    assert described((found, ours), known) == described((wanted, eager), known_in_eager)


def described(x, known, inside=False):
    """A value with the names of known objects in it; the first time with what they hold."""
    if inside and id(x) in known:
        return known[id(x)]
    if isinstance(x, torch.Tensor):
        return x.tolist()
    if isinstance(x, dict):
        return {key: described(item, known, True) for key, item in x.items()}
    if isinstance(x, (list, tuple)):
        return type(x)(described(item, known, not isinstance(item, dict) or inside) for item in x)
    return known.get(id(x), x)


def test_a_file_keeps_which_parts_are_the_caller_s(tmp_path):
    def forward(d):
        d["new"] = d["x"] * 2
        return d["list"], d

    given = {"x": torch.ones(2), "list": [torch.ones(2)]}
    st.trace(forward, (dict(given, list=list(given["list"])),)).save(tmp_path / "saved.st")
    inner = given["list"]
    found, whole = st.load(tmp_path / "saved.st")(given)
    assert found is inner
    assert whole is given
    assert given["list"] is inner
    assert torch.equal(given["new"], torch.full((2,), 2.0))


class Holder:
    def __init__(self, items, more=None):
        self.items, self.more = items, more


def row():
    return [torch.ones(2), torch.zeros(2)]


def to_list(a, b):
    a.append(b[0] + 1)
    return b[-1]


def to_inner(a, b):
    b["k"]["n"] = a["x"] + 1
    return a.get("n", a["x"])


def to_holder(a, b):
    a.items.append(b.items[0] + 1)
    return b.items[-1]


def to_attribute(a, b):
    a.items.append(a.more[0] + 1)
    return b[0][0][-1]


ONE_OBJECT = [  # a forward that changes one argument, and arguments of which parts are one, and are others
    (to_list, lambda: [row()] * 2, lambda: [row(), row()]),
    (
        to_inner,
        lambda: (d := {"x": torch.ones(2)}, {"k": d}),
        lambda: ({"x": torch.ones(2)}, {"k": {"x": torch.ones(2)}}),
    ),
    (to_holder, lambda: [Holder(row())] * 2, lambda: [Holder(row()), Holder(row())]),
    (to_holder, lambda: [Holder(x) for x in [row()] * 2], lambda: [Holder(row()), Holder(row())]),
    (to_attribute, lambda: (Holder(x := row(), x), ((x, x),)), lambda: (Holder(row(), x := row()), ((x, x),))),
]


@pytest.mark.parametrize("is_loaded", [False, True], ids=["traced", "loaded"])
@pytest.mark.parametrize(("forward", "one", "others"), ONE_OBJECT, ids=range(len(ONE_OBJECT)))
def test_what_is_one_object_in_several_arguments_is_one_in_the_forward(forward, one, others, is_loaded, tmp_path):
    for traced, other in ((one, others), (others, one)):
        tr = st.trace(forward, tuple(traced()))
        if is_loaded:
            tr.save(tmp_path / "saved.st")
            tr = st.load(tmp_path / "saved.st")
        ours, eager = traced(), traced()
        assert torch.equal(tr(*ours), forward(*eager))
        sizes = [[len(x.items if type(x) is Holder else x) for x in arguments] for arguments in (ours, eager)]
        assert sizes[0] == sizes[1]
        with pytest.raises(st.InputMismatchError, match="that are one list, dict or object"):
            tr(*other())


def test_an_argument_in_an_object_that_is_the_result_is_the_caller_s():
    tr = st.trace(lambda c, x: Holder(c, x + 1), (row(), torch.ones(2)))
    items = row()
    assert tr(items, torch.ones(2)).items is items


class Holds(torch.nn.Module):
    def __init__(self, held, forward):
        super().__init__()
        self.held, self.run = held, forward

    def forward(self, c, x):
        return self.run(self, c, x)


HELD = [
    ([torch.ones(2)], lambda m, c, x: (c.append(x + 1), m.held[-1] * 2)[1]),
    ([torch.ones(2)], lambda m, c, x: (m.held.append(x + 1), c[-1] * 2)[1]),
    ({"a": torch.ones(2)}, lambda m, c, x: (c.update(k=x + 1), m.held["k"] * 2)[1]),
    ([], lambda m, c, x: (c.append(x + 1), m.held[-1] * 2)[1]),
    ({"n": 1}, lambda m, c, x: (m.held.update(n=5), x * c["n"])[1]),
]


@pytest.mark.parametrize(("held", "forward"), HELD, ids=range(len(HELD)))
def test_an_argument_that_the_model_holds_too_may_not_change(held, forward):
    net = Holds(held, forward)
    with pytest.raises(st.UnsupportedOpError, match=r"the argument c is (self\.)?held too"):
        st.trace(net, (held, torch.ones(2)))


def test_an_error_of_a_forward_that_changes_nothing_is_that_of_eager():
    net = Holds({"n": 1}, lambda m, c, x: m.held["missing"] + c["n"])
    with pytest.raises(KeyError, match="missing"):
        st.trace(net, (net.held, torch.ones(2)))


def test_a_call_with_what_the_model_holds_is_compared_where_the_forward_changes_it():
    net, x = Holds([torch.ones(2)], lambda m, c, x: (c.append(x + 1), m.held[-1] * 2)[1]), torch.ones(2)
    tr = st.trace(net, ([x], x))
    assert torch.equal(tr([x], x), torch.full((2,), 2.0))
    with pytest.raises(st.InputMismatchError, match=r"none when traced and \[0\] is held now"):
        tr(net.held, x)
    reads = Holds(net.held, lambda m, c, x: m.held[0] * x + c[0])
    assert torch.equal(st.trace(reads, (net.held, x))(net.held, x), torch.full((2,), 2.0))


def test_results_that_share_memory_as_another_dtype_in_another_layout_are_refused():
    def run(x):
        x.copy_(torch.arange(6).view(3, 2))
        z = x * 1
        return z.real, z.real[0]

    with pytest.raises(st.FunctionalizationError, match="views of another dtype"):
        st.trace(run, (torch.zeros(2, 3, dtype=torch.complex64).t(),))
