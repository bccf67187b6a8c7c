"""What a forward does to Python objects: reported, and refused where a call would need it. All is put back."""

import collections
import copy
import functools
import itertools
import logging
import operator
import random
import time
import types
import warnings
from pathlib import Path
from time import perf_counter
from typing import ClassVar

import numpy
import pytest
import torch
from torch import nn

import scopetrace as st
from tests.nets import net

LOG = logging.getLogger(__name__)
X = torch.arange(8.0).reshape(2, 4)
CALLS = 0
SEEN = []
TABLE = {"n": 0}


@pytest.fixture(autouse=True)
def _globals_as_before():
    calls, total, n, defaults = CALLS, Net.total, writes_itself.n, writes_a_default.__defaults__
    kept = [(SEEN, list(SEEN)), (Net.log, list(Net.log)), (defaults[0], list(defaults[0]))]
    table = dict(TABLE)
    yield
    globals()["CALLS"], Net.total, writes_itself.n = calls, total, n
    for held, before in kept:
        held[:] = before
    TABLE.clear()
    TABLE.update(table)


class State:
    """No container of tensors: a plain object."""

    def __init__(self):
        self.n = 0

    def count(self):
        self.n += 1
        return self.n


class Slotted:
    __slots__ = ("n",)

    def __init__(self):
        self.n = 0


class Net(nn.Module):
    """A module with state of many kinds; `step` is its forward."""

    log: ClassVar[list[int]] = []
    total = 0

    def __init__(self, step):
        super().__init__()
        self.step = step
        self.n = 0
        self.hist = []
        self.stats = {"n": 0, "deep": {"k": 0}}
        self.names = set()
        self.last = collections.deque(maxlen=2)
        self.counts = collections.Counter()
        self.order = collections.OrderedDict(a=1)
        self.config = types.SimpleNamespace(n=0)
        self.state = State()
        self.slots = Slotted()
        self.array = numpy.zeros(2)
        self.rng = random.Random(0)
        self.generator = numpy.random.default_rng(0)

    def forward(self, x):
        return self.step(self, x)

    def bump(self):
        self.n += 1


def counts(self, x):
    self.n += 1
    return x * self.n


def only_counts(self, x):
    self.n = self.n + 1
    return x + 1


def counts_in_a_method(self, x):
    self.bump()
    return x + 1


def keeps_results(self, x):
    self.hist.append(x * 2)
    return x + 1


def keeps_and_reads(self, x):
    self.hist.append(x * 2)
    return x * len(self.hist)


def writes_a_dict(self, x):
    self.stats["n"] += 1
    self.stats["deep"]["k"] += 1
    return x + 1


def writes_a_set(self, x):
    self.names.add("a")
    return x + 1


def writes_a_deque(self, x):
    self.last.append(x.shape[0])
    return x + 1


def writes_a_counter(self, x):
    self.counts["f"] += 1
    return x + 1


def writes_an_ordered_dict(self, x):
    self.order["b"] = x
    self.order.move_to_end("a")
    return x + 1


def writes_a_namespace(self, x):
    self.config.n += 1
    return x + 1


def writes_an_object(self, x):
    self.state.n += 1
    return x * self.state.n


def writes_slots(self, x):
    self.slots.n += 1
    return x + 1


def writes_an_array(self, x):
    self.array[0] = 5
    return x + 1


def writes_the_class(self, x):
    type(self).total += 1
    Net.log.append(1)
    return x * Net.total


def new_attribute(self, x):
    self.sizes = tuple(x.shape)
    return x + 1


def removes_an_attribute(self, x):
    del self.n
    return x + 1


def switches_mode(self, x):
    self.eval()
    return x + 1


def draws_from_its_own(self, x):
    return x * self.rng.random() + float(self.generator.random())


def writes_a_global(self, x):
    global CALLS
    CALLS += 1
    return x * CALLS


def writes_a_global_by_name(self, x):
    globals()["CALLS"] = 5
    return x * CALLS


def keeps_in_a_global(self, x):
    SEEN.append(x)
    return x + 1


def reads_a_global_table(self, x):
    TABLE["n"] += 1
    return x * TABLE["n"]


def writes_a_default(self, x, seen=[]):  # noqa: B006
    seen.append(1)
    return x * len(seen)


def wrapped(function):
    def wrapper(self, x):
        return function(self, x)

    return wrapper


@wrapped
def adds_one(self, x):
    return x + 1


@wrapped
def counts_under_a_wrapper(self, x):
    TABLE["n"] += 1
    return adds_one(self, x)


COUNT = State().count


def counts_by_a_bound_method(self, x):
    return x * COUNT()


def writes_itself(self, x):
    writes_itself.n += 1
    return x * writes_itself.n


writes_itself.n = 0


def draws(self, x):
    return x * random.random()


def draws_and_forgets(self, x):
    random.random()
    return x + 1


def draws_from_numpy(self, x):
    return x * float(numpy.random.rand())


def shuffles(self, x):
    order = [0, 1]
    random.shuffle(order)
    return x[order]


def shuffles_by_numpy(self, x):
    order = numpy.arange(2)
    numpy.random.shuffle(order)
    return x[order.tolist()]


# The forward; the effects; whether the program depends on one of them, so that a second call is refused.
CASES = [
    (counts, ["self.n was 0 and became 1"], True),
    (only_counts, ["self.n was 0 and became 1"], False),
    (counts_in_a_method, ["self.n was 0 and became 1"], False),
    (keeps_results, ["self.hist was [] and became [a tensor [2, 4]]"], False),
    (keeps_and_reads, ["self.hist was [] and became [a tensor [2, 4]]"], True),
    (writes_a_dict, ["self.stats['n'] was 0 and became 1", "self.stats['deep']['k'] was 0 and became 1"], False),
    (writes_a_set, ["self.names was {} and became {'a'}"], False),
    (writes_a_deque, ["self.last was [] and became [2]"], False),
    (writes_a_counter, ["self.counts['f'] was missing and became 1"], False),
    (writes_an_ordered_dict, ["self.order['b'] was missing and became a tensor [2, 4]"], False),
    (writes_a_namespace, ["self.config.n was 0 and became 1"], False),
    (writes_an_object, ["self.state.n was 0 and became 1"], True),
    (writes_slots, ["self.slots.n was 0 and became 1"], False),
    (writes_an_array, ["self.array was a ndarray and became a ndarray"], False),
    (writes_the_class, ["Net.log was [] and became [1]", "Net.total was 0 and became 1"], True),
    (new_attribute, ["self.sizes was missing and became (2, 4)"], False),
    (removes_an_attribute, ["self.n was 0 and became missing"], True),
    (switches_mode, ["self.training was True and became False"], False),
    (draws_from_its_own, ["self.rng was in one state and became in another", "self.generator was in one state"], True),
    (writes_a_global, ["globals()['CALLS'] was 0 and became 1"], True),
    (writes_a_global_by_name, ["globals()['CALLS'] was 0 and became 5"], False),
    (keeps_in_a_global, ["SEEN was [] and became [a tensor [2, 4]]"], False),
    (reads_a_global_table, ["TABLE['n'] was 0 and became 1"], True),
    (counts_under_a_wrapper, ["TABLE['n'] was 0 and became 1"], False),
    (counts_by_a_bound_method, ["COUNT.__self__.n was 0 and became 1"], True),
    (writes_a_default, ["seen was [] and became [1]"], True),
    (writes_itself, ["writes_itself.n was 0 and became 1"], True),
    (draws, ["random was in one state and became in another"], True),
    (draws_and_forgets, ["random was in one state and became in another"], True),
    (draws_from_numpy, ["numpy.random was in one state and became in another"], True),
    (shuffles, ["random was in one state and became in another"], True),
    (shuffles_by_numpy, ["numpy.random was in one state and became in another"], True),
]


def contents(net):
    """What the trace must leave as it is."""
    own = {name: repr(value) for name, value in vars(net).items() if name not in ("rng", "generator")}
    own["state"], own["slots"] = net.state.n, net.slots.n
    drawn = net.rng.getstate(), str(net.generator.bit_generator.state), random.getstate(), str(numpy.random.get_state())
    return own, drawn


@pytest.mark.parametrize(("step", "expected", "baked_in"), CASES, ids=lambda x: getattr(x, "__name__", ""))
def test_effects_are_reported_and_the_model_is_put_back(step, expected, baked_in):
    net = Net(step)
    before = contents(net)
    tr = st.trace(net, (X,))
    assert contents(net) == before
    found = [str(effect) for effect in tr.side_effects]
    assert len(found) == len(expected) and all(a.startswith(b) for a, b in zip(found, expected, strict=True)), found
    assert any(effect.baked_in for effect in tr.side_effects) == baked_in


@pytest.mark.parametrize(("step", "expected", "baked_in"), CASES, ids=lambda x: getattr(x, "__name__", ""))
def test_a_second_call_is_refused_where_the_program_depends_on_the_first(step, expected, baked_in):
    net = Net(step)
    tr = st.trace(net, (X,))
    torch.testing.assert_close(tr(X), net(X))
    if baked_in:
        with pytest.raises(st.errors.SideEffectError, match="right for one call only"):
            tr(X)
    else:
        torch.testing.assert_close(tr(X), net(X))


class Counted:
    """A count that methods of its own, under decorators or as a property, and a nested function read."""

    def __init__(self):
        self.k = 1

    def plain(self):
        self.k += 1
        return self.k

    @torch.no_grad()
    def decorated(self):
        self.k += 1
        return self.k

    @torch.no_grad()
    @torch.autocast("cpu", enabled=False)
    def twice_decorated(self):
        self.k += 1
        return self.k

    @property
    def as_property(self):
        self.k += 1
        return self.k

    @torch.no_grad()
    def only_counts(self):
        self.k += 1
        return 2


class OfOthers:
    """Reads the count of an object that is given to it, or that it delegates to."""

    def __init__(self, counted):
        self.counted = counted

    def __getattr__(self, name):
        return getattr(self.__dict__["counted"], name)

    def delegated(self):
        self.counted.plain()
        return self.k

    @staticmethod
    def static(counted):
        counted.k += 1
        return counted.k


class OfItsOwn:
    """Has another count of the same name."""

    def __init__(self):
        self.k = 2

    def read(self, counted):
        counted.only_counts()
        return self.k


def nested(counted):
    def count(c):
        c.k += 1
        return c.k

    return count(counted)


@pytest.mark.parametrize(
    ("count", "baked_in"),
    [
        (lambda c: c.plain(), True),
        (lambda c: c.decorated(), True),
        (lambda c: c.twice_decorated(), True),
        (lambda c: c.as_property, True),
        (nested, True),
        (OfOthers.static, True),
        (lambda c: OfOthers(c).delegated(), True),
        (lambda c: c.only_counts(), False),
        (OfItsOwn().read, False),
    ],
    ids=["plain", "decorated", "twice", "property", "nested", "static", "delegated", "only counts", "another"],
)
def test_a_count_that_some_function_reads(count, baked_in):
    counted = Counted()
    tr = st.trace(lambda x: x * count(counted), (X,))
    torch.testing.assert_close(tr(X), X * 2)
    if baked_in:
        with pytest.raises(st.errors.SideEffectError, match=r"counted\.k was 1 and became 2"):
            tr(X)
    else:
        torch.testing.assert_close(tr(X), X * 2)


def test_the_error_names_the_effect_the_line_and_the_way_out():
    tr = st.trace(Net(counts), (X,))
    torch.testing.assert_close(tr(X), X)
    with pytest.raises(st.errors.SideEffectError) as error:
        tr(X)
    assert str(error.value).splitlines()[0] == (
        "the trace is right for one call only, and this is another one: self.n was 0 and became 1"
    )
    assert error.value.module == "Net" and error.value.source.endswith("in counts: self.n += 1")
    assert "register_buffer" in error.value.hint and "side_effects='warn'" in error.value.hint


class OneLine(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.n, self.inner = 0, inner

    def forward(self, x): y = self.inner(x); self.n += 1; return y * self.n  # fmt: skip  # noqa: E702


def test_the_line_of_an_effect_beside_calls_on_it():
    effects = st.trace(OneLine(OneLine(nn.ReLU())), (X,)).side_effects
    assert [e.source.partition(": ")[2][:20] for e in effects] == ["def forward(self, x)"] * 2
    other = st.trace(OneLine(Net(lambda m, x: x * 2)), (X,)).side_effects
    assert other[0].source.partition(": ")[2].startswith("def forward(self, x): y = self.inner(x)")


def test_the_error_about_a_tensor_that_is_kept_says_how_to_keep_it():
    shadow = torch.zeros(4)

    def average(x):
        nonlocal shadow
        shadow = shadow * 0.9 + x.mean(0) * 0.1
        return shadow * 2

    tr = st.trace(average, (X,))
    tr(X)
    with pytest.raises(st.SideEffectError, match=r"write into the tensor that is there, as in `shadow\[name\].copy_"):
        tr(X)


def test_refused_at_the_trace():
    with pytest.raises(st.errors.SideEffectError, match=r"no graph carries: self\.hist was"):
        st.trace(Net(keeps_results), (X,), side_effects="refuse")
    st.trace(nn.Linear(4, 4), (X,), side_effects="refuse")


def test_warned_of_at_the_trace_and_at_each_call_that_may_be_wrong():
    with pytest.warns(st.errors.SideEffectWarning, match=r"self\.n was 0 and became 1"):
        tr = st.trace(Net(counts), (X,), side_effects="warn")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tr(X)
    with pytest.warns(st.errors.SideEffectWarning, match="right for one call only"):
        tr(X)


def test_another_word_for_side_effects():
    with pytest.raises(st.errors.ArgumentError, match="must be 'warn', 'refuse' or None"):
        st.trace(nn.Linear(4, 4), (X,), side_effects="ignore")


@pytest.mark.parametrize(
    "statement", ["seen.append(y.sum().item())", "table['loss'] = y.sum().item()", "seen += y.tolist()"]
)
def test_numbers_of_the_trace_are_not_left_in_lists(statement):
    """A trace has symbols for them, which are no numbers."""
    seen, table = [], {}
    scope = {"seen": seen, "table": table}
    exec(f"def forward(x):\n    global seen\n    y = x[0] * 2\n    {statement}\n    return y", scope)
    tr = st.trace(scope["forward"], (X,))
    tr(X)
    assert (seen, table) == ([], {})
    assert [str(effect.new) for effect in tr.side_effects]


def test_a_check_is_no_call():
    tr = st.trace(Net(counts), (X,))
    tr.check((X,))
    tr.check((X,))
    tr(X)


def test_a_forward_that_runs_twice_writes_to_its_closure_once():
    hits = []

    def f(x):
        hits.append(1)
        return torch.vmap(torch.sin)(x)

    tr = st.trace(f, (X,))
    assert hits == [] and [e.change for e in tr.side_effects] == ["hits was [] and became [1]"]


def test_closures():
    n, hits = 0, []

    def f(x):
        nonlocal n
        n += 1
        hits.append(x)
        return x * n

    tr = st.trace(f, (X,))
    assert n == 0 and hits == []
    assert {e.change for e in tr.side_effects} == {
        "hits was [] and became [a tensor [2, 4]]",
        "closure n was 0 and became 1",
    }


@pytest.mark.parametrize("is_bound", [False, True])
def test_a_forward_that_was_put_on_a_module_keeps_no_fake_tensors(is_bound):
    seen, net = [], nn.Sequential(nn.Identity())

    def forward(self, x):
        seen.append(x)
        return x * 2

    net[0].forward = types.MethodType(forward, net[0]) if is_bound else functools.partial(forward, None)
    tr = st.trace(net, (X,))
    assert seen == []
    assert [e.change for e in tr.side_effects] == ["seen was [] and became [a tensor [2, 4]]"]
    assert net[0].forward(X) is not tr(X) and [type(x) for x in seen] == [torch.Tensor]


def test_a_hook_that_collects_activations_keeps_no_fake_tensors():
    hits, net = [], nn.Sequential(nn.Linear(4, 4))
    net[0].register_forward_hook(lambda m, args, out: hits.append(out))
    tr = st.trace(net, (X,))
    assert hits == []
    assert [e.change for e in tr.side_effects] == ["hits was [] and became [a tensor [2, 4]]"]
    tr(X), tr(X)


def test_objects_among_the_arguments():
    state = State()

    def f(x, state):
        state.n += 1
        return x * state.n

    tr = st.trace(f, (X, state))
    assert state.n == 0
    assert [e.change for e in tr.side_effects] == ["state.n was 0 and became 1"]


def test_a_function_that_remembers_results_forgets_those_of_the_trace():
    @functools.lru_cache
    def mask(n):
        return torch.ones(n)

    tr = st.trace(lambda x: x * mask(4), (X,))
    assert type(mask(4)) is torch.Tensor
    torch.testing.assert_close(tr(X), X)
    torch.testing.assert_close(tr(X), X)


class Remembers(nn.Module):
    """A method of the class that remembers its results, of which a layer takes its mask."""

    @staticmethod
    @functools.lru_cache
    def static(n):
        return torch.full((n, n), -1.0).triu(1)

    @classmethod
    @functools.lru_cache
    def of_class(cls, n):
        return torch.full((n, n), -1.0).triu(1)

    def __init__(self, name):
        super().__init__()
        self.name = name

    def forward(self, x):
        return x + (self.static if self.name == "static" else type(self).of_class)(x.shape[0])


@pytest.mark.parametrize("name", ["static", "of_class"])
def test_a_method_of_the_class_that_remembers_results_forgets_those_of_the_trace(name):
    net, x = nn.Sequential(Remembers(name), Remembers(name)), torch.randn(4, 4)
    for _ in range(2):
        tr = st.trace(net, (x,))
        assert type(getattr(Remembers, name)(4)) is torch.Tensor
        torch.testing.assert_close(tr(x), net(x))


class Trainer:
    def __init__(self):
        self.total, self.by_name = 0.0, {}

    def sums(self, x):
        self.total = self.total + x.sum()
        return x * 2

    def adds(self, x):
        self.total += x.sum()
        return x * 2

    def in_a_table(self, x):
        self.by_name["x"] = self.by_name.get("x", 0) + x.sum()
        return x * 2


@pytest.mark.parametrize("name", ["sums", "adds", "in_a_table"])
def test_a_tensor_that_is_made_of_the_one_before_stops_the_second_call(name):
    """Of a number the same is a count, which only people may look at."""
    tr = st.trace(getattr(Trainer(), name), (X,))
    tr(X)
    with pytest.raises(st.errors.SideEffectError, match=r"self\.(total|by_name)"):
        tr(X)


@pytest.mark.parametrize(
    ("make", "step"),
    [
        (lambda: nn.ModuleList([nn.Tanh()]), lambda children: children.append(nn.Sigmoid())),
        (lambda: nn.Sequential(nn.Tanh(), nn.ReLU()), lambda children: children.pop(0)),
        (lambda: nn.ModuleDict({"a": nn.Tanh()}), lambda children: children.update({"b": nn.Sigmoid()})),
        (lambda: nn.ModuleList([nn.Tanh(), nn.ReLU()]), lambda c: c.__setitem__(0, nn.Sigmoid())),
    ],
)
def test_children_that_are_found_without_their_names(make, step):
    class Changes(nn.Module):
        def __init__(self):
            super().__init__()
            self.all = make()

        def forward(self, x):
            for child in self.all.children():
                x = child(x)
            step(self.all)
            return x

    class Loops(Changes):
        def forward(self, x):
            for child in self.all.values() if isinstance(self.all, nn.ModuleDict) else self.all:
                x = child(x)
            step(self.all)
            return x

    for model in (Changes(), Loops()):
        tr = st.trace(model, (X,))
        assert torch.equal(tr(X), model(X))
        with pytest.raises(st.SideEffectError):
            tr(X)


def test_modules_outside_the_model():
    other = Net(counts)
    holder = State()
    holder.nets = [other]

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.holder = holder

        def forward(self, x):
            return self.holder.nets[0](x)

    tr = st.trace(Outer(), (X,))
    assert other.n == 0
    assert [(e.name, e.module) for e in tr.side_effects] == [("self.holder.nets[0].n", "Outer/Net")]


def test_everything_is_put_back_when_the_forward_fails():
    def fails(self, x):
        self.n += 1
        self.stats["n"] += 1
        SEEN.append(x)
        random.random()
        raise RuntimeError("half-way")

    net = Net(fails)
    before = contents(net)
    with pytest.raises(RuntimeError, match="half-way"):
        st.trace(net, (X,))
    assert contents(net) == before


def test_tensors_that_the_graph_carries_are_none():
    class Bound(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("total", torch.zeros(4))

        def forward(self, x):
            self.total = self.total + x.sum(0)
            self.last = x * 2
            return x + self.total

    net = Bound()
    tr = st.trace(net, (X,), side_effects="refuse")
    tr(X), tr(X)
    torch.testing.assert_close(net.total, 2 * X.sum(0))


@pytest.mark.parametrize(
    "make",
    [
        lambda x: (x * i for i in range(3)),
        lambda x: map(torch.relu, [x]),
        lambda x: zip([x], [x], strict=True),
        lambda x: iter([x]),
        lambda x: {"a": itertools.chain([x])},
        lambda x: [Path(__file__).open()],  # noqa: SIM115
    ],
)
def test_an_iterator_is_no_result(make):
    with pytest.raises(st.errors.OpaqueOutputError, match="can be gone through once") as error:
        st.trace(make, (X,))
    assert "return a list or tuple" in error.value.hint


@pytest.mark.parametrize("make", [lambda x: {x}, lambda x: frozenset([x]), lambda x: {"a": x}.values()])
def test_a_set_of_tensors_is_no_result(make):
    with pytest.raises(st.errors.OpaqueOutputError, match="no order or keys"):
        st.trace(make, (X,))


class Makers(collections.OrderedDict):
    """A table of classes that gives instances, as transformers' table of activations."""

    def __getitem__(self, key):
        return super().__getitem__(key)()

    def __setitem__(self, key, value):
        raise TypeError("made once")


class Chatty(list):
    def __iter__(self):
        raise TypeError("not now")


MAKERS = Makers()
collections.OrderedDict.__setitem__(MAKERS, "relu", nn.ReLU)
CHATTY = Chatty([1])


def test_tables_with_methods_of_their_own_are_left_alone():
    def f(x):
        CHATTY.append(2)
        collections.OrderedDict.__setitem__(MAKERS, "gelu", nn.GELU)
        return MAKERS["relu"](x)

    tr = st.trace(f, (X,))
    assert len(tr.side_effects) == 2


class Remembering(nn.Module):
    """A table of tensors that are made once."""

    def __init__(self, make):
        super().__init__()
        self.make = make
        self.made = {}
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x):
        if "a" not in self.made:
            self.made["a"] = self.make(self, x)
        return x * self.made["a"]


def test_a_tensor_that_is_remembered_may_be_computed_again():
    tr = st.trace(Remembering(lambda m, x: m.weight * 2), (X,))
    assert [(e.change, e.baked_in) for e in tr.side_effects] == [
        ("self.made['a'] was missing and became a tensor [4]", False)
    ]
    for _ in range(2):
        torch.testing.assert_close(tr(X), X * 2)


@pytest.mark.parametrize("make", [lambda m, x: x.sum(0), lambda m, x: torch.rand(4)])
def test_one_that_differs_from_call_to_call_may_not(make):
    tr = st.trace(Remembering(make), (X,))
    tr(X)
    with pytest.raises(st.errors.SideEffectError, match=r"self\.made"):
        tr(X)


# What no result depends on --------------------------------------------------------------------------------------------


class Told(Net):
    """Its `step` shows what it writes, or keeps a time, and nothing else."""

    warned, count, scale, took = False, 0, 1.0, 0.0

    def log(self, text):
        self.scale = len(text)

    def put(self, gains):
        gains.append(self.count)


def warns_once(self, x):
    if not self.warned:
        warnings.warn("slow", stacklevel=2)
        self.warned = True
    return x * 2


def warns_for_each(self, x):
    if "slow" not in SEEN:
        SEEN.append("slow")
        LOG.warning("slow")
    return x * 2


def logs_sometimes(self, x):
    self.count += 1
    if self.count % 100 == 0:
        LOG.info("step %d", self.count)
    if self.count > 3:
        print(f"{self.count}")
    return x * 2


def keeps_times(self, x):
    start = time.perf_counter()
    y = x * 2
    self.took = time.perf_counter() - start
    self.hist.append(round(time.perf_counter() - start, 3))
    LOG.info("took %.3f", perf_counter() - start)
    return y


def decides(self, x):
    if not self.warned:
        self.warned = True
        x = x * 2
    return x


def decides_else(self, x):
    self.count += 1
    if self.count > 3:
        print("late")
    else:
        x = x * 2
    return x


def writes_another(self, x):
    self.count += 1
    if self.count > 3:
        self.scale = 2.0
    return x * self.scale


def calls_its_own(self, x):
    if not self.warned:
        self.warned = True
        self.log("slow")
    return x * self.scale


def through_a_variable(self, x):
    self.count += 1
    seen = self.count
    print(seen)
    return x * seen


def reads_the_time(self, x):
    self.took = time.perf_counter()
    return x * self.took


GROUPS = [{"gain": 1.0}]


def in_an_entry_of_what_others_read(self, x):
    self.count += 1
    for group in GROUPS:
        group["gain"] = 1.0 / self.count
    return x * GROUPS[0]["gain"]


def in_a_list_of_the_caller(self, x):
    self.count += 1
    gains = []
    self.put(gains)
    return x * gains[0]


def in_a_dict_that_is_shown(self, x):
    self.count += 1
    logs = {}
    logs["count"] = self.count
    print(logs)
    return x * 2


class Timer:
    """Keeps times in all the ways that people write."""

    def __init__(self):
        self.total, self.times, self.sums, self.last = 0.0, {}, {}, 0.0

    def __enter__(self):
        self.start = time.perf_counter()
        return self

    def __exit__(self, *args):
        self.total += time.perf_counter() - self.start
        self.times.setdefault("step", []).append(time.perf_counter() - self.start)
        end = time.perf_counter()
        took = end - self.start
        self.sums["step"] = self.sums.get("step", 0.0) + took
        self.last = took


def has_a_timer(self, x):
    with TIMER:
        return x * 2


TIMER = Timer()
TIMES, STARTS = [], []


def keeping_times(times):
    def tick():
        times.append(time.perf_counter())

    return tick


TICKS = [keeping_times([])]


def times_in_a_global(self, x):
    start = time.perf_counter()
    y = x * 2
    TIMES.append(time.perf_counter() - start)
    for tick in TICKS:
        tick()
    return y


def starts_in_a_global(self, x):
    STARTS.append(time.perf_counter())
    return x * STARTS[-1]


def time_in_what_is_an_attribute_too(self, x):
    keeping_times(self.hist)()
    times = self.hist
    return x * times[-1]


SHOWING = [warns_once, warns_for_each, keeps_times, has_a_timer, in_a_dict_that_is_shown, calls_its_own]
SHOWING += [times_in_a_global]


@pytest.mark.parametrize("step", SHOWING)
def test_what_no_result_depends_on_stops_no_call(step):
    net = Told(step)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tr = st.trace(net, (X,))
    assert tr.side_effects and not any(effect.baked_in for effect in tr.side_effects)
    for _ in range(3):
        assert torch.equal(tr(X), net(X))


DECIDING = [decides, decides_else, writes_another, logs_sometimes, through_a_variable, reads_the_time]
DECIDING += [in_an_entry_of_what_others_read, in_a_list_of_the_caller]
DECIDING += [starts_in_a_global, time_in_what_is_an_attribute_too]


@pytest.mark.parametrize("step", DECIDING)
def test_what_decides_something_stops_the_second_call(step):
    tr = st.trace(Told(step), (X,))
    tr(X)
    with pytest.raises(st.errors.SideEffectError, match="right for one call"):
        tr(X)


class Captures(nn.Module):
    """Its first call puts hooks on its layers, which collect what these give, as models of transformers do."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.is_set_up = False
        self.captured = []

    def forward(self, x):
        if not self.is_set_up:
            self.is_set_up = True
            for layer in self.layers:
                layer.register_forward_hook(lambda m, args, kwargs, out: self.captured.append(out), with_kwargs=True)
        self.captured = []
        for layer in self.layers:
            x = layer(x)
        return x, list(self.captured)


def test_hooks_that_the_forward_puts_on_modules():
    model, x = Captures(), torch.randn(2, 4)
    tr = st.trace(model, (x,))
    assert not any(layer._forward_hooks or layer._forward_hooks_with_kwargs for layer in model.layers)
    told = {e.change: e.baked_in for e in tr.side_effects}
    assert told["forward hooks of self.layers.0 was 0 and became 1"]
    torch.testing.assert_close(tr(x), copy.deepcopy(model)(x))
    with pytest.raises(st.errors.SideEffectError, match="right for one call only") as error:
        tr(x)
    assert "run the model once before st.trace" in error.value.hint
    expected = model(x)
    assert len(expected[1]) == 2
    tr = st.trace(model, (x,))
    for _ in range(2):
        torch.testing.assert_close(tr(x), expected)


def test_hooks_that_the_forward_removes_again():
    def forward(s, x):
        handle = s.fc.register_forward_hook(lambda m, args, out: out * 2)
        out = s.fc(x)
        handle.remove()
        return out

    model, x = net(forward), torch.randn(2, 4)
    tr = st.trace(model, (x,))
    assert not tr.side_effects
    for _ in range(2):
        torch.testing.assert_close(tr(x), model(x))

    def removes(s, x):
        s.handle.remove()
        return s.fc(x)

    model = net(removes)
    model.handle = model.fc.register_forward_hook(lambda m, args, out: out * 2)
    tr = st.trace(model, (x,))
    assert len(model.fc._forward_hooks) == 1
    torch.testing.assert_close(tr(x), copy.deepcopy(model.fc)(x) / 2)


@pytest.mark.parametrize("kind", ["attribute", "buffer"])
def test_a_tensor_whose_shape_is_read_before_another_one_takes_its_place(kind):
    def forward(s, x):
        if s.state.shape[0] != x.shape[0]:
            s.state = x.new_zeros(x.shape)
        s.state = s.state * 0.5 + x
        return s.state * 1

    def make(size):
        model = net(forward)
        if kind == "buffer":
            model.register_buffer("state", torch.zeros(size, 4))
        else:
            model.state = torch.zeros(size, 4)
        return model

    model, x = make(1), torch.ones(2, 4)
    tr = st.trace(model, (x,))
    assert torch.equal(tr(x), x)
    said = r"state was float32 \[1, 4\] when traced and is float32 \[2, 4\] now; .* run the model once before st.trace"
    with pytest.raises(st.errors.StateMismatchError, match=said):
        tr(x)
    model.state = torch.zeros(1, 4)
    assert torch.equal(tr(x), x)
    model, eager = make(2), make(2)
    tr = st.trace(model, (x,))
    for _ in range(3):
        assert torch.equal(tr(x), eager(x))


class AsksByPath(nn.Module):
    """Counts its calls, and asks for the count by a path."""

    def __init__(self):
        super().__init__()
        self.config = types.SimpleNamespace(n=1)

    def forward(self, x):
        """Run it."""
        self.config.n += 1
        return {"out": x * operator.attrgetter("config.n")(self)}


class NamesInText(nn.Module):
    """Counts its calls, and has a text that begins with the name."""

    def __init__(self):
        super().__init__()
        self.config = types.SimpleNamespace(n=1)

    def forward(self, x):
        """Run it."""
        self.config.n += 1
        return {"n. of rows": x + 1}


def test_a_count_that_is_asked_for_by_a_path_is_baked_in_and_one_in_a_text_is_not():
    asks, names = st.trace(AsksByPath(), (X,)), st.trace(NamesInText(), (X,))
    for tr in (asks, names):
        tr(X)
    with pytest.raises(st.SideEffectError, match=r"config\.n was 1 and became 2"):
        asks(X)
    torch.testing.assert_close(names(X)["n. of rows"], X + 1)


@pytest.mark.parametrize(
    "result", [lambda n, y: (y, n), lambda n, y: {"y": y, "step": n * 2}, lambda n, y: {f"step {n}": y}]
)
def test_a_number_that_the_forward_counts_and_gives_is_right_for_one_call(result):
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.n = 0

        def forward(self, x):
            self.n += 1
            return result(self.n, x * 2)

    model = Counts()
    tr = st.trace(model, (X,))
    assert [effect.baked_in for effect in tr.side_effects] == [True]
    tr(X)
    with pytest.raises(st.errors.SideEffectError, match=r"self\.n was 0 and became 1"):
        tr(X)
