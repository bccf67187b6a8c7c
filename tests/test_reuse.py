"""`st.trace(..., reuse=True)`: equal module calls are copied, and the trace is the same as without."""

import array
import contextvars
import copy
import decimal
import enum
import functools
import math
import threading
import types
import weakref

import pytest
import reuse_programs
import torch
from torch import nn
from torch.nn.utils import parametrize

import scopetrace as st
from scopetrace.api.runnable import program_of
from scopetrace.errors import StateMismatchError
from scopetrace.ir.unmade import UnmadeValue

_aten = torch.ops.aten


class Layer(nn.Module):
    """A layer that may read its index."""

    def __init__(self, index, reads_index=False):
        super().__init__()
        self.index, self.reads_index = index, reads_index
        self.eps = 1e-5
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    def forward(self, x):
        """Run it."""
        return self.inner(x) * self.eps + (self.index if self.reads_index else 0)


class Net(nn.Module):
    """Layers in a row."""

    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        """Run it."""
        x = x + 1
        for layer in self.layers:
            x = layer(x)
        return x


def tape_of(trace):
    """The tape behind a trace."""
    return program_of(trace).tape


def compared(model, *args, **options):
    """A trace with reuse, of which it is checked that it is the trace without."""
    with torch.no_grad():
        plain, repeated = (st.trace(model, args, reuse=reuse, **options) for reuse in (False, True))
        assert plain.reuse is None
        assert not reuse_programs.differences(tape_of(plain), tape_of(repeated))
        assert str(plain) == str(repeated)
        assert plain.graph_module.code == repeated.graph_module.code
        assert torch.equal(model(*args), repeated(*args))
    return repeated


def test_report():
    model = Net(*(Layer(i) for i in range(4)))
    assert str(compared(model, torch.ones(2, 4)).reuse) == "4 Layer: 1 traced, 3 replayed"
    model.layers[2].eps = 0.1
    assert (
        str(compared(model, torch.ones(2, 4)).reuse)
        == """\
4 Layer: 2 traced, 2 replayed
2 Sequential: 1 traced, 1 replayed
  Net/Layer[layers.2]: eps differs: 1e-05, 0.1"""
    )
    alone = st.trace(Net(Layer(0)), (torch.ones(2, 4),), reuse=True)
    assert str(alone.reuse) == "no module call repeats another"


def _row_written(t):
    t = t.clone()
    t[0].mul_(2)
    return t


class TellsApart(Layer):
    def forward(self, x):
        return super().forward(x) + 0 * (id(self) & 1)


def test_report_says_why_nothing_is_compared():
    def reuse(layers, x=None, **options):
        tr = st.trace(Net(*layers), (torch.ones(2, 4) if x is None else x,), reuse=True, **options)
        return str(tr.reuse)

    def step(net):
        def run(x):
            loss = net(x).sum()
            loss.backward()
            return loss

        return str(st.trace(run, (torch.ones(2, 4),), reuse=True).reuse)

    class Row(Layer):
        def forward(self, x):
            return _row_written(super().forward(x))

    class Mapped(Layer):
        def forward(self, x):
            return torch.vmap(super().forward)(x)

    apart = "every module call ran: TellsApart.forward may tell equal modules apart, since it names id"
    assert reuse([TellsApart(i) for i in range(3)]) == apart
    assert (
        reuse([Layer(i) for i in range(3)], leaf_modules=[nn.Linear]) == "every module call ran: leaf_modules= is given"
    )
    assert reuse([Mapped(i) for i in range(3)]) == "every module call ran: a transform such as torch.vmap runs"
    assert step(Net(*(Row(i) for i in range(3)))).startswith(
        "every module call ran: an op reads a tensor that was written"
    )
    assert step(Net(*(Layer(i) for i in range(3)))).startswith("3 Layer: ")


def test_what_is_read_decides():
    unread = Net(*(Layer(i) for i in range(3)))
    assert compared(unread, torch.ones(2, 4)).reuse.replayed == {"Layer": 2}
    read = Net(*(Layer(i, reads_index=True) for i in range(3)))
    report = compared(read, torch.ones(2, 4)).reuse
    assert (report.replayed, [each.reason for each in report.not_shared][:1]) == (
        {"Sequential": 2},
        ["index differs: 0, 1"],
    )


def test_a_repeated_layer_is_checked_at_a_call():
    model = Net(*(Layer(i) for i in range(3)))
    trace = compared(model, torch.ones(2, 4))
    model.layers[2].eps = 0.5
    with pytest.raises(st.InputMismatchError, match=r"layers.2.eps"):
        trace(torch.ones(2, 4))


def test_loops_and_nested_repetitions():
    shared = Layer(0)
    model = Net(Net(shared, shared), Net(shared, shared), Net(shared, shared))
    assert str(compared(model, torch.ones(2, 4)).reuse) == "3 Net: 1 traced, 2 replayed"


def test_calls_without_ops():
    model = Net(*(nn.Sequential(nn.Sequential(nn.Identity(), nn.Identity())) for _ in range(4)))
    assert compared(model, torch.ones(2, 4)).reuse.replayed == {"Sequential": 3}


class Alternates(nn.Module):
    """Calls its module in one place or in another."""

    def __init__(self, inner, first):
        super().__init__()
        self.inner, self.first = inner, first

    def forward(self, x):
        """Run it."""
        if self.first:
            return self.inner(x)
        return self.inner(x)


def test_source_lines_of_a_call_that_was_copied_inside_of_one_that_is():
    pairs = [nn.Sequential(Layer(0), nn.Identity()) for _ in range(4)]
    first, last = nn.Sequential(*pairs[:2]), nn.Sequential(*pairs[2:])
    first[1].append(nn.ReLU())
    last[0].append(nn.ReLU())
    last[1].append(nn.ReLU())
    model = nn.Sequential(first, Alternates(last[0], True), Alternates(last[1], False))
    assert "Sequential" in compared(model, torch.ones(2, 4)).reuse.replayed


def test_dynamic_sizes():
    trace = compared(
        Net(*(Layer(i) for i in range(3))), torch.ones(2, 4), dynamic_shapes={"x": {0: torch.export.Dim("n")}}
    )
    assert trace.reuse.replayed == {"Layer": 2}
    assert trace(torch.ones(5, 4)).shape == (5, 4)


class Splits(nn.Module):
    """Attention's way with heads, around a norm."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(4)

    def forward(self, x):
        """Run it."""
        heads = self.norm(x).reshape(2, 2, 2).permute(1, 0, 2).reshape(2, 4)
        heads.view(8)  # which nobody reads
        return heads.view(4, 2).permute(1, 0).permute(1, 0).reshape(2, 4) + x


class Widths(nn.Module):
    """Pairs of equal layers, whose second is given other sizes."""

    def __init__(self, count):
        super().__init__()
        self.first, self.second = (nn.ModuleList(Wide(n) for n in range(1, count)) for _ in range(2))

    def forward(self, x):
        """Run them."""
        return sum(layer(x).sum() for layer in self.first) + sum(layer(x[:1]).sum() for layer in self.second)


class Wide(nn.Module):
    """A layer with a parameter of its own size."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width, 1))

    def forward(self, x):
        """Run it."""
        for _ in range(20):
            x = -x
        return x + self.weight


def test_calls_that_never_repeat_are_not_all_compared_unless_asked_for():
    model, x = Widths(12), torch.ones(2, 1, 1)
    assert len(st.trace(model, x, reuse=True).reuse.not_shared) == 11
    assert 6 <= len(st.trace(model, x).reuse.not_shared) < 10


def test_small_calls_are_copied_where_asked_for():
    model, x = Net(*(Layer(i) for i in range(4))).requires_grad_(False), torch.ones(2, 4)
    assert str(st.trace(model, x, reuse=True).reuse) == "4 Layer: 1 traced, 3 replayed"
    assert str(st.trace(model, x).reuse) == "no module call repeats another"
    assert st.trace(model, x, reuse=False).reuse is None


def test_reuse_is_true_false_or_none():
    with pytest.raises(st.ArgumentError, match="reuse='yes': it must be True, False or None"):
        st.trace(Layer(0), torch.ones(2, 4), reuse="yes")


def test_a_saved_trace_keeps_the_report(tmp_path):
    trace = compared(Net(*(Layer(i) for i in range(4))), torch.ones(2, 4))
    trace.save(tmp_path / "net.trace")
    assert str(st.load(tmp_path / "net.trace").reuse) == "4 Layer: 1 traced, 3 replayed"


def test_results_that_python_never_gets_are_results():
    """Views of repeated calls are shown and simplified as those of other calls."""
    model, x = nn.Sequential(*(Splits() for _ in range(3))), torch.ones(2, 4)
    plain, repeated = (st.trace(model, x, reuse=reuse) for reuse in (False, True))
    assert str(plain) == str(repeated)
    assert plain.to_html() == repeated.to_html()


class Nested(nn.Module):
    """A layer in layers, each of which could be an original."""

    def __init__(self, depth):
        super().__init__()
        self.inner = Nested(depth - 1) if depth else Wide(1)

    def forward(self, x):
        """Run it."""
        return self.inner(x) + 1


def test_layers_repeat_that_are_unlike_the_first():
    model = Net(*(Nested(2) for _ in range(5)))
    report = st.trace(model, torch.ones(2, 1)).reuse  # the first is given what requires no gradient
    assert report.replayed == {"Nested": 3}


def values(trace):
    """The values on the recorded tape of a trace."""
    return [v for op in program_of(trace).recorded.ops for v in op.values()]


def test_tensors_of_repeated_calls_are_made_when_asked_for():
    model = Net(*(Layer(i) for i in range(3)))
    with torch.no_grad():
        trace = st.trace(model, torch.ones(2, 4), reuse=True)
    unmade = [v for v in values(trace) if isinstance(v, UnmadeValue) and v.unmade is not None]
    assert [v.op.target for v in unmade] == 2 * [_aten.linear.default, _aten.relu.default, _aten.mul.Tensor]
    assert unmade[0].copy(0).fake is unmade[0].fake
    assert (unmade[0].fake.shape, unmade[0].unmade) == ((2, 4), None)
    assert trace.graph_module is not None
    assert all(v.unmade is None for v in unmade)


def outline_text(trace, *targets):
    """What `Trace.outline` makes: the program, its graph, and for each function its name, text, code and calls."""
    outline = trace.outline(*targets)
    functions = [(f.name, (str(f), f.graph_module.code), len(f.calls)) for f in outline.functions]
    return str(outline), outline.graph_module.code, functions


@pytest.mark.parametrize("targets", [["layers"], ["repeated"], [True], ["layers", nn.ReLU]])
def test_outlines_are_the_same(targets):
    layers = [Layer(i) for i in range(6)]
    layers[4].eps = 0.1
    model = Net(Net(*layers[:3]), Net(*layers[3:]), Net(Layer(6), Layer(7), Layer(8)), Layer(9))
    with torch.no_grad():
        texts = [outline_text(st.trace(model, torch.ones(2, 4), reuse=reuse), *targets) for reuse in (False, True)]
    assert texts[0] == texts[1]


class Cached(nn.Module):
    """A layer with a part whose calls are not copied, because they take a cache, and a part whose calls are."""

    def __init__(self, index):
        super().__init__()
        self.index, self.attention, self.after = index, Appends(), Layer(0)

    def forward(self, x, cache):
        """The first layer does more, as that of T5 has the bias of positions."""
        x = x if self.index else x.exp()
        return self.after(self.attention(x, cache))


class Appends(nn.Module):
    """Keeps what it takes in a cache."""

    def forward(self, x, cache):
        """Run it."""
        cache.kept.append(x)
        return x + cache.kept[-1].tanh()


class Stack(nn.Module):
    """Layers that share a cache of a class that is unknown to `torch.utils._pytree`."""

    def __init__(self, count):
        super().__init__()
        self.layers = nn.ModuleList(Cached(i) for i in range(count))

    def forward(self, x):
        """Run it."""
        cache = types.SimpleNamespace(kept=[])
        for layer in self.layers:
            x = layer(x, cache)
        return x


@pytest.mark.parametrize("targets", [["layers"], ["repeated"], [True], ["layers", Layer]])
def test_outlines_are_the_same_where_only_parts_of_layers_repeat(targets):
    texts, repeated = [], []
    for reuse in (False, True):
        with torch.no_grad():
            trace = st.trace(Stack(3), torch.ones(2, 4), reuse=reuse)
        repeated.append(trace.reuse and dict(trace.reuse.replayed))
        texts.append(outline_text(trace, *targets))
    assert repeated == [None, {"Layer": 2}]
    assert texts[0] == texts[1]
    if targets == ["repeated"]:
        assert [count for name, _, count in texts[0][2] if name.startswith("Cached")] == [1, 2]


ARRAY, VIEW = array.array("i"), memoryview(bytearray(4))


class Tells(nn.Module):
    """A layer that may tell which one it is, or how many ran before."""

    def __init__(self, way):
        super().__init__()
        self.way = way

    def by_array(self):
        """State of an object that cannot be watched."""
        ARRAY.append(1)
        return len(ARRAY)

    def by_view(self):
        """As `by_array`."""
        VIEW[0] += 1
        return VIEW[0]

    def by_context(self):
        """State of a module of Python."""
        decimal.getcontext().prec += 1
        return decimal.getcontext().prec

    def by_hash(self):
        """A number of its own."""
        return hash(self) % 1000

    def forward(self, x):
        """Run it."""
        return x.relu() * getattr(self, f"by_{self.way}")()


@pytest.mark.parametrize("way", ["array", "view", "context", "hash"])
def test_layers_that_tell_themselves_apart_otherwise_all_run(way):
    with decimal.localcontext():
        trace = st.trace(Net(*(Tells(way) for _ in range(4))), torch.ones(2, 4), reuse=True)
    assert not trace.reuse.replayed


class Told(nn.Module):
    """A layer that multiplies by what it finds in a value, which is unlike that of other layers."""

    def __init__(self, value, number):
        super().__init__()
        self.value, self.number = value, number

    def forward(self, x):
        """Run it."""
        return x.relu() * self.number(self.value)


def function(name="one", doc=None, defaults=None, named=None):
    """A function like others, but for what it has beside its code."""

    def base(x=1.0, a=1.0, *, b=1.0, c=1.0):
        return x - a + b / c

    made = types.FunctionType(base.__code__, base.__globals__, name, defaults)
    made.__doc__, made.__kwdefaults__ = doc, named
    return made


def annotated(kind):
    """A function with an annotation."""

    def f(x: kind):
        return x

    return f


def partial(**tags):
    """A partial function with attributes."""
    made = functools.partial(math.hypot, 1.0)
    vars(made).update(tags)
    return made


def local(**tags):
    """Attributes of this thread."""
    made = threading.local()
    vars(made).update(tags)
    return made


@pytest.mark.parametrize(
    ("one", "other", "number"),
    [
        (range(0, 3, 2), range(0, 4, 2), lambda r: r.stop),
        ((range(0), 1), (range(5, 5), 1), lambda t: t[0].start),
        ({0, 8}, {8, 0}, lambda s: float("".join(map(str, s)))),
        (frozenset((0, 8)), frozenset((8, 0)), lambda s: next(iter(s))),
        ({1}, {True}, lambda s: len(str(s))),
        (frozenset({0.0}), frozenset({-0.0}), lambda s: math.copysign(1, *s)),
        (function("a"), function("bc"), lambda f: len(f.__name__)),
        (function(doc="1"), function(doc="2"), lambda f: float(f.__doc__)),
        (
            function(defaults=(1, 2), named={"b": 3.0, "c": 4.0}),
            function(defaults=(1, 2), named={"c": 3.0, "b": 4.0}),
            lambda f: f(),
        ),
        (function(defaults=(1, 2)), function(named={"b": 1, "c": 2}), lambda f: len(f.__defaults__ or ())),
        (annotated(int), annotated(str), lambda f: len(f.__annotations__["x"].__name__)),
        (partial(k=2), partial(k=3), lambda p: p.k),
        (local(k=2), local(k=3), lambda t: t.k),
    ],
)
def test_equal_values_that_code_can_tell_apart(one, other, number):
    compared(Net(*(Told(value, number) for value in (one, one, one, other))), torch.ones(2, 4))


class Slotted(nn.Module):
    """A layer with an attribute that is not in its `__dict__`."""

    __slots__ = ("scale",)

    def __init__(self, scale):
        super().__init__()
        self.scale = scale

    def forward(self, x):
        """Run it."""
        return x.relu() * self.scale


class Listed(nn.Module, list):
    """A layer that is a list too."""

    __hash__ = nn.Module.__hash__

    def __init__(self, scale):
        super().__init__()
        self.append(scale)

    def forward(self, x):
        """Run it."""
        return x.relu() * self[0]


@pytest.mark.parametrize("make", [Slotted, lambda n: nn.Sequential(Listed(n))])
def test_modules_that_hold_more_than_their_dict(make):
    compared(nn.Sequential(*(make(n) for n in (2, 2, 2, 3))), torch.ones(2, 4))


class OfTable:
    """A descriptor with a number for each layer."""

    def __init__(self):
        self.table = weakref.WeakKeyDictionary()

    def __get__(self, owner, cls):
        return self if owner is None else self.table[owner]


class OfItsClass(nn.Module):
    """A layer that its class tells from others."""

    table, scale, numbers = weakref.WeakKeyDictionary(), OfTable(), iter(range(1, 99))

    def __init__(self, way, number):
        super().__init__()
        self.way = way
        self.table[self] = type(self).scale.table[self] = number

    def forward(self, x):
        """Run it."""
        if self.way == "table":
            return x.relu() * self.table[self]
        return x.relu() * (self.scale if self.way == "descriptor" else next(self.numbers))


@pytest.mark.parametrize("way", ["table", "descriptor", "iterator"])
def test_classes_that_tell_layers_apart(way):
    model, x = Net(*(OfItsClass(way, n) for n in (2, 2, 2, 3))), torch.ones(2, 4)
    graph = st.trace(model, x, reuse=True).graph_module.graph
    numbers = [node.args[1] for node in graph.find_nodes(op="call_function", target=_aten.mul.Tensor)]
    assert numbers == ([1, 2, 3, 4] if way == "iterator" else [2, 2, 2, 3])


class Mark(enum.Enum):
    """Members with a value that can change."""

    A = [1]  # noqa: RUF012


def test_values_of_enums_that_change():
    model, codes = Net(*(Told(Mark.A, lambda m: m.value.append(1) or len(m.value)) for _ in range(3))), []
    for reuse in (False, True):
        Mark.A.value[:] = [1]
        codes.append(st.trace(model, torch.ones(2, 4), reuse=reuse).graph_module.code)
    assert codes[0] == codes[1]


class ReadsDict(nn.Module):
    """A layer that asks for its `__dict__`."""

    def __init__(self):
        super().__init__()
        self.scale = 2

    def forward(self, x):
        """Run it."""
        return x.relu() * vars(self)["scale"] + ("extra" in self.__dict__)


@pytest.mark.parametrize("name", ["scale", "extra"])
def test_a_dict_that_a_copied_layer_is_asked_for_is_checked_at_a_call(name):
    model = nn.Sequential(*(ReadsDict() for _ in range(3)))
    trace = compared(model, torch.ones(2, 4))
    assert trace.reuse.replayed == {"ReadsDict": 2}
    setattr(model[2], name, 3)
    with pytest.raises(st.StateMismatchError, match=r"vars\(self\.2\)"):
        trace(torch.ones(2, 4))


class Settings:
    """What layers may share."""

    def __init__(self, scale):
        self.scale = scale


@pytest.mark.parametrize("name", ["config", "part"])
def test_what_the_first_two_layers_share_is_checked_in_the_others(name):
    model = nn.Sequential(*(Told(Settings(2), lambda c: c.scale) for _ in range(4)))
    model[1].value = model[0].value
    if name == "part":
        model = nn.Sequential(*(nn.Sequential(part, nn.ReLU()) for part in (model[0], *model[1:])))
        model[1][0] = model[0][0]
    trace = compared(model, torch.ones(2, 4))
    assert sum(trace.reuse.replayed.values()) == 3
    (model[3] if name == "config" else model[3][0]).value.scale = 3
    with pytest.raises(st.StateMismatchError, match=r"3\.(0\.)?value\.scale"):
        trace(torch.ones(2, 4))


@pytest.mark.parametrize("question", ["stride", "is_contiguous"])
@pytest.mark.parametrize("in_op", [False, True])
def test_the_layout_that_a_copied_layer_is_asked_for_is_checked_at_a_call(question, in_op):
    class Asks(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.ones(4, 4))

        def forward(self, x):
            x = x @ self.table if in_op else x.relu()
            answer = getattr(self.table, question)()
            return x * (answer if question == "is_contiguous" else answer[0])

    model, x = nn.Sequential(*(Asks() for _ in range(4))), torch.ones(2, 4)
    trace = compared(model, x)
    assert sum(trace.reuse.replayed.values()) >= 2
    model[3].table = nn.Parameter(torch.ones(4, 4).t())
    with torch.no_grad(), pytest.raises(st.StateMismatchError, match=r"3\.table's strides"):
        trace(x)


class Tagged(list):
    """A list with attributes."""

    scale = 1


def default_of_name(*, table={"scale": 1}):  # noqa: B006
    """A default argument that is written."""
    return table


PLACE, VARIABLE = types.ModuleType("place"), contextvars.ContextVar("VARIABLE")


class Writes(nn.Module):
    """A layer that writes one number, which the next one reads, somewhere in Python."""

    def __init__(self, way, held):
        super().__init__()
        self.way, self.held, self.proxy = way, held, types.MappingProxyType(vars(held))

    def read(self):
        """The number."""
        if self.way == "module":
            return PLACE.scale
        if self.way == "default of a name":
            return default_of_name()["scale"]
        if self.way == "proxy":
            return self.proxy["scale"]
        return VARIABLE.get().scale if self.way == "variable" else self.held.scale

    def write(self, number):
        """Put another one there."""
        if self.way == "module":
            PLACE.scale = number
        elif self.way == "default of a name":
            default_of_name.__kwdefaults__["table"]["scale"] = number
        elif self.way == "variable":
            VARIABLE.get().scale = number
        else:
            self.held.scale = number

    def forward(self, x):
        """Run it."""
        x = x.relu() * self.read()
        self.write(self.read() + 1)
        return x


@pytest.mark.parametrize("way", ["module", "default of a name", "proxy", "variable", "list", "tensor"])
def test_what_layers_write_in_python_is_seen_by_those_after_them(way):
    for reuse in (False, True):
        held = torch.ones(1) if way == "tensor" else Tagged()
        held.scale = PLACE.scale = default_of_name()["scale"] = 1
        VARIABLE.set(held)
        model = nn.Sequential(*(Writes(way, held) for _ in range(4)))
        trace = st.trace(model, torch.ones(2, 4), reuse=reuse)
        graph = trace.graph_module.graph
        assert [n.args[1] for n in graph.find_nodes(op="call_function", target=_aten.mul.Tensor)] == [1, 2, 3, 4]
        trace(torch.ones(2, 4))
        with pytest.raises(st.SideEffectError, match=r"scale'?\]? was 1 and became 5"):
            trace(torch.ones(2, 4))


class Remembers(nn.Module):
    """A layer that multiplies by what it finds in something that a memo gives, and writes to it."""

    def __init__(self, memo, number, write):
        super().__init__()
        self.memo, self.number, self.write = memo, number, write

    def forward(self, x):
        """Run it."""
        found = self.memo(4)
        x = x.relu() * self.number(found)
        self.write(found)
        return x


@pytest.mark.parametrize("memo", [functools.cache, functools.lru_cache])
@pytest.mark.parametrize("asked_before", [False, True])
@pytest.mark.parametrize(
    ("make", "number", "write"),
    [
        (lambda n: [n], len, lambda found: found.append(1)),
        (lambda n: types.SimpleNamespace(scale=n), lambda x: x.scale, lambda x: setattr(x, "scale", x.scale + 1)),
        (lambda n: (n, {}), lambda x: 1 + len(x[1]), lambda x: x[1].setdefault(len(x[1]), 1)),
        (lambda n: torch.ones(n), lambda t: t, lambda t: t.add_(1)),
    ],
)
def test_layers_that_write_to_what_a_memo_has(memo, asked_before, make, number, write):
    found = []
    for reuse in (False, True):
        remembered = memo(make)
        if asked_before:
            remembered(4)
        model, x = Net(*(Remembers(remembered, number, write) for _ in range(3))), torch.ones(2, 4)
        with torch.no_grad():
            found.append(st.trace(model, (x,), reuse=reuse))
    assert not reuse_programs.differences(*map(tape_of, found))


def test_layers_that_ask_a_memo_for_numbers_are_copied():
    for memo in (functools.cache, functools.lru_cache):
        remembered = memo(lambda n: (n, (n + 1, "a")))
        model = Net(*(Remembers(remembered, lambda found: found[1][0], len) for _ in range(3)))
        assert compared(model, torch.ones(2, 4)).reuse.replayed == {"Remembers": 2}


class Grows(nn.Module):
    """A parametrization with state."""

    def __init__(self):
        super().__init__()
        self.register_buffer("times", torch.ones(()))

    def forward(self, weight):
        """Run it."""
        self.times += 1
        return weight * self.times


class UsesCache(nn.Module):
    """Calls its part with and without the table of parametrized tensors."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        parametrize.register_parametrization(self.fc, "weight", Grows())

    def forward(self, x):
        """Run it."""
        x = self.fc(x)
        with parametrize.cached():
            return self.fc(x) + self.fc(x)


def test_cached_parametrizations():
    model, x = nn.Sequential(UsesCache(), UsesCache(), UsesCache()), torch.ones(2, 4)
    expected = copy.deepcopy(model)(x)
    assert torch.equal(st.trace(model, x, reuse=True)(x), expected)


DYNAMIC = {"dynamic_shapes": {"x": {0: torch.export.Dim("n")}}}


class RemovesHook(Net):
    """A forward that hangs a hook on the first layer, or on a part of it, for its first call."""

    def __init__(self, name, *layers):
        super().__init__(*layers)
        self.name = name

    def forward(self, x):
        """Run it."""
        module = self.layers[0].get_submodule(self.name)
        handle = module.register_forward_hook(lambda module, args, out: out * 2)
        x = self.layers[0](x)
        handle.remove()
        return super().forward(x)


@pytest.mark.parametrize("name", ["", "inner"])
def test_hooks_that_are_gone_later(name):
    compared(RemovesHook(name, Layer(0), Layer(1), Layer(2)), torch.ones(2, 4))

    model = Net(Layer(0), Layer(1), Layer(2))

    def hook(module, args, out):
        handle.remove()
        return out * 2

    handle = model.layers[0].get_submodule(name).register_forward_hook(hook)
    with torch.no_grad():
        plain, repeated = (st.trace(model, torch.ones(2, 4), reuse=reuse) for reuse in (False, True))
    assert not reuse_programs.differences(tape_of(plain), tape_of(repeated))
    assert repeated.reuse.replayed["Layer"] == 1


@pytest.mark.parametrize(
    ("programs", "options"),
    [
        pytest.param(range(15), {}, id="few"),
        pytest.param(range(15, 19), DYNAMIC, id="few-dynamic"),
        pytest.param(range(1000, 1400), {}, id="many", marks=pytest.mark.slow),
        pytest.param(range(4000, 4100), DYNAMIC, id="many-dynamic", marks=pytest.mark.slow),
        pytest.param(range(1400, 3000), {}, id="others", marks=pytest.mark.exhaustive),
        pytest.param(range(4100, 4300), DYNAMIC, id="others-dynamic", marks=pytest.mark.exhaustive),
    ],
)
def test_random_programs(programs, options):
    repeated = 0
    for seed in programs:
        found, count = reuse_programs.disagreement(seed, **options)
        assert not found, (seed, found[:2])
        repeated += count > 0
    assert repeated > len(programs) // 4


class Scale:
    def __init__(self):
        self.factor = 2.0


class Reads(nn.Module):
    """Reads attributes of its own, of an object, of a list, and of layers of torch."""

    def __init__(self):
        super().__init__()
        self.fc, self.norm, self.scale, self.shifts = nn.Linear(4, 4), nn.LayerNorm(4), Scale(), [1, 2]

    def forward(self, x):
        return torch.relu(self.norm(self.fc(x)) * self.scale.factor + sum(self.shifts))


class Around(nn.Module):
    """Four equal layers, and code around them that reads or writes an attribute of the third one."""

    def __init__(self, around):
        super().__init__()
        self.layers, self.around = nn.ModuleList(Reads() for _ in range(4)), around

    def forward(self, x):
        for i, layer in enumerate(self.layers):
            if i == 2 and self.around == "read before":
                x = x + len(layer.shifts)
            x = layer(x)
            if i == 2 and self.around == "read after":
                x = x + len(layer.shifts)
            if i == 3 and self.around == "write":
                self.layers[2].shifts = self.layers[2].shifts
        return self.layers[2](x) if self.around == "call again" else x


CHANGES_OF_A_LAYER = {
    "scale.factor": lambda layer: setattr(layer.scale, "factor", 3.0),
    "scale": lambda layer: setattr(layer, "scale", Scale()) or setattr(layer.scale, "factor", 5.0),
    "shifts": lambda layer: layer.shifts.append(3),
    "norm.eps": lambda layer: setattr(layer.norm, "eps", 0.5),
    "fc": lambda layer: setattr(layer, "fc", nn.Identity()),
}


@pytest.mark.parametrize("around", ["nothing", "read before", "read after", "write", "call again"])
@pytest.mark.parametrize("change", CHANGES_OF_A_LAYER)
def test_what_a_copied_layer_read_is_compared(around, change):
    x = torch.randn(2, 4)
    for i in range(4):
        model = Around(around)
        tr = st.trace(model, (x,), reuse=True)
        CHANGES_OF_A_LAYER[change](model.layers[i])
        with pytest.raises(StateMismatchError, match=rf"layers\.{i}"):
            tr(x)


class Sizes:
    """Settings of which the class has one."""

    size = 2

    def __init__(self, index):
        self.index = index


class Scaled(nn.Module):
    def __init__(self, index):
        super().__init__()
        self.scale = Sizes(index)

    def forward(self, x):
        return x * self.scale.size


def test_what_a_copied_layer_read_of_a_class_is_listed_and_compared(monkeypatch):
    x = torch.randn(2, 4)
    model = nn.Sequential(*map(Scaled, range(5)))
    found = {}
    for reuse in (False, True):
        tr = st.trace(model, (x,), reuse=reuse)
        reads = [read for read in tr._program.tape.reads if "size" in read.name]
        found[reuse] = [(read.name, read.value, read.module) for read in reads]
    assert len(found[True]) == 10
    assert sorted(found[True], key=repr) == sorted(found[False], key=repr)
    monkeypatch.setattr(Sizes, "size", 3)
    with pytest.raises(StateMismatchError, match=r"Sizes\.size"):
        tr(x)
