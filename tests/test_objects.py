"""Containers and objects among the arguments and results: seen through, and given what the forward puts into them."""

import collections
import copy
import dataclasses
import functools
import operator
import pickle
import threading
import types
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from processes import in_another_process
from torch import nn

import scopetrace as st
from scopetrace.api.runnable import program_of

X = torch.arange(4.0)
GET = operator.itemgetter(0)


class Layer:
    """As in transformers' caches: a class that pytree does not know."""

    def __init__(self, keys=None):
        self.keys = keys
        self.is_initialized = keys is not None

    def update(self, new):
        self.keys = new if self.keys is None else torch.cat([self.keys, new])
        self.is_initialized = True
        return self.keys


class Cache:
    def __init__(self, *keys):
        self.layers = [Layer(k) for k in keys]

    def update(self, new, index):
        while len(self.layers) <= index:
            self.layers.append(Layer())
        return self.layers[index].update(new)


@dataclasses.dataclass
class Point:
    x: torch.Tensor
    name: str = ""


def plain(x):
    """A structure as lists, dicts and tensors, so that two can be compared."""
    if isinstance(x, torch.Tensor):
        return x.tolist()
    if isinstance(x, (list, tuple)):
        return [plain(i) for i in x]
    if isinstance(x, dict):
        return {k: plain(v) for k, v in x.items()}
    return {"class": type(x).__name__} | plain(vars(x)) if hasattr(x, "__dict__") else x


def assert_same_effects(fn, *args):
    """A call of the trace does to its arguments what a call of the function does, and tracing does nothing to them."""
    given, expected, traced = (copy.deepcopy(args) for _ in range(3))
    tr = st.trace(fn, given)
    assert plain(given) == plain(args)
    assert plain(tr(*traced)) == plain(fn(*expected))
    assert plain(traced) == plain(expected)
    tr.check(copy.deepcopy(args))
    loaded = pickle.loads(pickle.dumps(tr))
    again = copy.deepcopy(args)
    loaded(*again)
    assert plain(again) == plain(expected)
    return tr


# Effects on arguments ------------------------------------------------------------------------------------------------


def test_new_and_changed_and_removed_items_of_a_dict():
    def forward(d):
        d["y"] = d["x"] * 2
        d["x"] = d.pop("z") + 1
        d["n"] = 3
        return d["y"]

    assert_same_effects(forward, {"x": X, "z": X * 3, "n": 1})


def test_lists_that_grow_and_are_sorted_and_emptied():
    def forward(grows, turns, empties):
        grows.append(grows[0] + 1)
        turns.reverse()
        empties.clear()
        return X * 2

    assert_same_effects(forward, [X], [X, X + 1, 3], [X])


def test_nested_containers():
    def forward(state):
        state["layers"][1].append(state["layers"][0][0] * 2)
        state["point"].x = state["point"].x - 1
        state["new"] = {"a": [state["point"].x]}

    assert_same_effects(forward, {"layers": [[X], []], "point": Point(X, "p")})


def test_a_dataclass_argument():
    def forward(p):
        p.x = p.x * 2
        p.name = "moved"
        return p.x.sum()

    assert_same_effects(forward, Point(X))


def test_writes_in_place_are_no_effects_but_stay_writes():
    def forward(d):
        d["x"].add_(1)
        return d["x"] * 2

    tr = assert_same_effects(forward, {"x": X})
    assert [str(m).split(":")[0] for m in tr.mutations] == ["input d['x']"]


def test_an_item_may_become_another_argument_or_a_view_of_it():
    def forward(d, x):
        d["same"], d["view"] = x, x[1:]
        return x.sum()

    d, x = {}, X.clone()
    st.trace(forward, ({}, X))(d, x)
    assert d["same"] is x
    x.zero_()
    assert d["view"].tolist() == [0, 0, 0]


def test_no_effect_without_change():
    tr = st.trace(lambda d: d["x"] + 1, ({"x": X},))
    given = {"x": X}
    tr(given)
    assert given["x"] is X


def test_arguments_by_name_in_other_positions():
    def forward(x, cache=None):
        cache["x"] = x
        return x + 1

    tr = st.trace(forward, (X,), {"cache": {}})
    cache = {}
    tr(X, cache)
    assert cache["x"] is X


# Objects -------------------------------------------------------------------------------------------------------------


def step(cache, x):
    return cache.update(x, 0).sum() + cache.update(x * 2, 1).sum()


def test_a_cache_object_grows_as_in_the_model():
    tr = assert_same_effects(step, Cache(X, X + 1), X)
    paths = map(str, program_of(tr).tape.input_paths)
    assert list(paths) == ["cache.layers[0].keys", "cache.layers[1].keys", "x"]


def test_an_empty_cache_is_filled():
    """Its class turns out to hold tensors when the forward has run: it is put back, and the forward recorded again."""
    assert_same_effects(step, Cache(), X)


def test_a_cache_of_another_length_is_refused_and_one_with_a_dynamic_length_taken():
    tr = st.trace(step, (Cache(X, X), X))
    with pytest.raises(st.InputMismatchError, match=r"cache.layers\[0\].keys"):
        tr(Cache(torch.ones(5), torch.ones(5)), X)
    with pytest.raises(st.InputMismatchError, match=r"layers had 2 items"):
        tr(Cache(X), X)


def test_sizes_in_an_object_by_the_names_of_its_attributes():
    length = torch.export.Dim("length", min=2)
    shapes = {"cache": {"layers": [{"keys": {0: length}}, {"keys": {0: length}}]}, "x": None}
    tr = st.trace(step, (Cache(X + 1, X + 2), X), dynamic_shapes=shapes)
    for n in (2, 5, 9):
        given, expected = (Cache(torch.ones(n), torch.zeros(n)) for _ in "ab")
        assert plain(tr(given, X)) == plain(step(expected, X))
        assert plain(given) == plain(expected)


def test_python_values_in_an_object_are_fixed():
    tr = st.trace(step, (Cache(X, X), X))
    other = Cache(X, X)
    other.layers[0].is_initialized = False
    with pytest.raises(st.InputMismatchError, match="is_initialized was True when traced and is False now"):
        tr(other, X)


def test_results_in_an_object():
    def forward(x):
        return {"cache": Cache(x + 1, x * 2), "space": types.SimpleNamespace(n=1, x=x - 1)}

    assert_same_effects(forward, X)


def test_a_call_has_the_object_s_tensors_as_nodes():
    class Attend(nn.Module):
        def forward(self, x, cache):
            return cache.update(x, 0)

    tr = st.trace(Attend(), (X, Cache(X + 1)))
    assert "Attend(x=%x: f32[4], cache=Cache(layers=[Layer(keys=%cache_layers_0_keys: f32[4]" in str(tr)


@pytest.mark.slow
def test_a_trace_with_objects_is_read_in_another_process(tmp_path):
    """And the class that the loaded trace opens stays closed for other traces."""
    st.trace(step, (Cache(X, X), X)).save(tmp_path / "trace")
    code = (
        "sys.path.insert(0, sys.argv[2]); import test_objects as t; before = t.describe_a_constant_object()\n"
        "cache = t.Cache(t.X, t.X); st.load(sys.argv[1])(cache, t.X); print(len(cache.layers[0].keys))\n"
        "print(t.describe_a_constant_object() == before)"
    )
    assert in_another_process(code, tmp_path / "trace", Path(__file__).parent) == "8\nTrue\n"


# Classes that derive from list, tuple or dict -------------------------------------------------------------------------


class Entries(dict):
    """As AttrDict: items are attributes."""

    __getattr__, __setattr__ = dict.__getitem__, dict.__setitem__


class Mirrored(dict):
    def __init__(self, **entries):
        super().__init__(**entries)
        self.__dict__ = self


class Both(dict):
    """As EasyDict: each item is an attribute too."""

    def __init__(self, **entries):
        for name, value in entries.items():
            setattr(self, name, value)

    def __setattr__(self, name, value):
        super().__setattr__(name, value)
        self[name] = value


@dataclasses.dataclass
class Output(dict):
    k: torch.Tensor

    def __post_init__(self):
        self["k"] = self.k


class Named(list):
    name = "list"


class Pair(tuple):
    @property
    def k(self):
        return self[0]


def named(x):
    new = Named([x])
    new.name = "new"
    return new


def puts(d):
    d.j = d.k + 1
    return d.j * 2


def appends(items):
    items.append(items[0] + 1)
    items.name = "longer"
    return items[1] * 2


DERIVED = {
    **{f"read of {kind.__name__}": (lambda d: d.k * 2, lambda x, kind=kind: kind(k=x)) for kind in (Entries, Output)},
    **{f"into {kind.__name__}": (puts, lambda x, kind=kind: kind(k=x)) for kind in (Entries, Mirrored, Both)},
    **{f"new {kind.__name__}": (lambda x, kind=kind: kind(k=x * 2), torch.clone) for kind in (Mirrored, Both, Output)},
    "in place": (lambda d: d.k.add_(1), lambda x: Entries(k=x.clone())),
    "nested": (lambda d: Entries(a=[Entries(k=d.a["k"] + 1)]), lambda x: Entries(a=Mirrored(k=x))),
    "a list with attributes": (appends, named),
    "a new list with attributes": (named, torch.clone),
    "a tuple": (lambda p: Pair((p.k, p[1] * 2)), lambda x: Pair((x, x + 1))),
}


@pytest.mark.parametrize("case", DERIVED)
def test_a_class_that_derives_from_list_tuple_or_dict(case):
    def shown(x):
        attributes = {} if isinstance(x, torch.Tensor) or vars(x) is x else {k: plain(v) for k, v in vars(x).items()}
        return type(x), plain(x), attributes

    forward, argument = DERIVED[case]
    tr = st.trace(forward, (argument(X),))
    for x in (X + 1, X - 3):
        given, other = argument(x), argument(x)
        assert shown(tr(given)) == shown(forward(other))
        assert shown(given) == shown(other)


# Refused -------------------------------------------------------------------------------------------------------------


def test_an_object_that_leads_back_to_itself_cannot_be_copied():
    class Ring:
        def __init__(self, x):
            self.x, self.me = x, self

    with pytest.raises(st.OpaqueOutputError, match="Ring with tensors in it"):
        st.trace(lambda x: Ring(x + 1), (X,))


def test_an_object_whose_getattr_raises_other_errors_is_shown():
    tr = st.trace(lambda d, x: x * d["n"], (Entries(n=2), X))
    assert "d={'n': 2}" in str(tr)
    with pytest.raises(st.InputMismatchError, match=r"argument 0 was {'n': 2} when traced and is {'n': 3} now"):
        tr(Entries(n=3), X)


@pytest.mark.parametrize("kind", [set, frozenset, type("Ordered", (collections.OrderedDict,), {})])
def test_a_container_of_a_kind_that_cannot_be_opened(kind):
    items = {"k": X} if issubclass(kind, dict) else {X}
    with pytest.raises(st.OpaqueOutputError, match=f"the argument items is a {kind.__name__} with tensors in it"):
        st.trace(lambda items: X * 2, (kind(items),))


def test_forms_without_effects_refuse_what_is_not_returned():
    def hides(d, x):
        d["y"] = x + 1
        return x * 2

    def returns(d, x):
        d["y"] = x + 1
        return d["y"] * 2, d["y"]

    with pytest.raises(st.ExportError, match=r"puts new tensors into a container among its arguments, \[0\]"):
        st.trace(hides, ({}, X)).to_exported_program()
    ep = st.trace(returns, ({}, X)).to_exported_program()
    assert [t.tolist() for t in ep.module()({}, X)] == [(2 * (X + 1)).tolist(), (X + 1).tolist()]


# What one trace learned is not seen by another ------------------------------------------------------------------------


def describe_a_constant_object():
    """What a trace says of a `Layer` without tensors: a constant, whatever other traces found in a `Layer`."""
    given = Layer()
    tr = st.trace(lambda layer, x: x + layer.is_initialized, (given, X))
    tr(given, X)
    with pytest.raises(st.InputMismatchError) as refused:
        tr(Layer(), X)
    return str(tr), str(refused.value)


def test_a_class_that_another_trace_opened():
    before = describe_a_constant_object()
    st.trace(lambda layer: layer.keys * 2, (Layer(X),))
    st.trace(step, (Cache(), X))
    assert describe_a_constant_object() == before


def test_a_class_that_a_trace_in_another_thread_opened():
    before = describe_a_constant_object()
    inside, go_on = threading.Event(), threading.Event()

    def forward(layer):
        inside.set()
        go_on.wait(10)
        return layer.keys * 2

    with ThreadPoolExecutor(2) as pool:
        other = pool.submit(st.trace, forward, (Layer(X),))
        assert inside.wait(10)
        found = pool.submit(describe_a_constant_object)
        go_on.set()
        assert found.result() == before
        assert other.result()(Layer(X)).tolist() == (X * 2).tolist()


def test_a_trace_goes_on_as_before_when_another_opened_its_classes():
    tr, given = st.trace(step, (Cache(), X)), Cache()
    st.trace(lambda layer: layer.keys * 2, (Layer(X),))
    assert tr(given, X).item() == step(Cache(), X).item()
    assert [layer.keys.tolist() for layer in given.layers] == [X.tolist(), (X * 2).tolist()]


def test_calls_have_objects_of_the_users_classes_with_nodes_for_tensors():
    class Attend(nn.Module):
        def forward(self, x, cache):
            return cache.update(x, 0), cache

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.attend = Attend()

        def forward(self, x, cache):
            return self.attend(x, cache)[0]

    call = st.trace(Net(), (X, Cache(X.clone()))).calls[1]
    cache = call.arguments["cache"]
    assert isinstance(cache, Cache) and isinstance(cache.layers[0], Layer)
    assert isinstance(cache.layers[0].keys, torch.fx.Node)
    assert str(call.outputs[1].layers[0].keys) == str(call.outputs[0]) == "cat"


class Computing:
    """A class that pytree makes again by computing, as transformers does for its caches."""

    def __init__(self, *tensors):
        self.tensors = [torch.cat([torch.tensor([]), t]) for t in tensors]


torch.utils._pytree.register_pytree_node(Computing, lambda c: (c.tensors, None), lambda tensors, _: Computing(*tensors))


def test_a_registered_class_may_compute_when_an_instance_is_made():
    def f(x, held):
        held.tensors[0].mul_(2)
        return x + held.tensors[0], held

    x, held = torch.ones(3), Computing(torch.arange(3.0))
    tr = st.trace(f, (x, held))
    for first in (held, Computing(torch.full((3,), 5.0))):
        wanted, given = f(x, Computing(first.tensors[0].clone()))
        found, back = tr(x, Computing(first.tensors[0].clone()))
        torch.testing.assert_close(found, wanted)
        torch.testing.assert_close(back.tensors[0], given.tensors[0])


# Results that hold tensors where no container shows them -------------------------------------------------------------


class Slots:
    __slots__ = ("held",)

    def __init__(self, held):
        self.held = held


@pytest.mark.parametrize(
    "make",
    [
        *(lambda t: t.tolist, lambda t: (t * 2).sum, lambda t: lambda: t, lambda t: lambda default=t: default),
        *(
            lambda t: functools.partial(torch.add, t),
            lambda t: [t].append,
            lambda t: Slots(t),
            lambda t: {"a": t}.items(),
        ),
        *(lambda t: types.MappingProxyType({"a": t}), lambda t: ValueError(t), lambda t: slice(t.sum(), None)),
        *(
            lambda t: weakref.ref(t),
            lambda t: t.untyped_storage(),
            lambda t: nn.ParameterList([t]),
            lambda t: nn.Linear(2, 2),
        ),
    ],
)
@pytest.mark.parametrize("place", [lambda x: x, lambda x: {"inner": [x]}])
def test_a_result_that_holds_a_tensor_in_hiding_is_refused(make, place):
    with pytest.raises(
        st.errors.OpaqueOutputError, match=r"the result(\['inner'\]\[0\])? is a \w+ (that holds|with tensors)"
    ):
        st.trace(lambda x: (place(make(x * 2)),)[0], (torch.ones(2),))


def test_results_without_tensors_are_kept():
    model = nn.Linear(2, 2)
    model.settings = types.SimpleNamespace(a=[1, len])
    forward = lambda self, x: (len, GET, self.settings, self.reset_parameters, self, x * 2)  # noqa: E731
    given = st.trace(lambda x: forward(model, x), (torch.ones(2),))(torch.ones(2))
    assert given[:5] == forward(model, torch.ones(2))[:5]


# Objects that the forward makes ---------------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self, index):
        super().__init__()
        self.index = index

    def forward(self, x, cache, note=None):
        return cache.update(x, self.index) * 2


class Decoder(nn.Module):
    """Makes an empty cache, which its layers fill, and returns it."""

    def __init__(self, note):
        super().__init__()
        self.layers = nn.ModuleList([Attention(0), Attention(1)])
        self.note = note

    def forward(self, x):
        cache = Cache()
        for layer in self.layers:
            x = layer(x, cache, note=self.note)
        return x, cache


class Holder:
    def __init__(self, **attributes):
        vars(self).update(attributes)


def chain(length):
    return Holder(inner=chain(length - 1)) if length else Holder()


def itself():
    found = Holder()
    found.me = found
    return found


@pytest.mark.parametrize(
    ("note", "runs"),
    [
        (None, 1),
        (Holder(sizes=[1, 2]), 1),
        (itself(), 1),
        (Holder(scale=torch.ones(4)), 2),  # no op reads this tensor: whether the trace holds it is known at the end
        (Layer(torch.ones(4)), 2),
        (chain(200), 2),
    ],
    ids=["none", "plain", "itself", "tensor", "same class", "large"],
)
def test_a_cache_that_the_forward_makes_is_seen_as_it_was_at_each_call(note, runs):
    model, calls = Decoder(note), []
    tr = st.trace(model, (X,), progress=lambda *of_call: calls.append(of_call))
    first, second = tr.calls[1:]
    assert first.arguments["cache"].layers == []
    assert [(layer.keys.name, layer.is_initialized) for layer in second.arguments["cache"].layers] == [("x", True)]
    assert [layer.keys.name for layer in tr.calls[0].outputs[1].layers] == ["x", "mul"]
    assert isinstance(note, Layer) or first.arguments["note"] is note
    assert plain(list(tr(X))) == plain(list(model(X)))
    assert len(calls) == 2 * runs


@dataclasses.dataclass
class Masked:
    """A dataclass with more than its fields, as `__post_init__` and cached properties give it."""

    x: torch.Tensor

    def __post_init__(self):
        self.mask = self.x > 2

    @functools.cached_property
    def twice(self):
        return self.x * 2


def test_attributes_of_a_dataclass_beside_its_fields():
    """They are arguments and results as the fields are."""

    def forward(box):
        out = Masked(box.x * box.mask)
        return out, out.twice

    tr = st.trace(forward, (Masked(torch.ones(2)),))
    for x in (torch.ones(2), torch.tensor([1.0, 5.0])):
        (out, twice), (expected, expected_twice) = tr(Masked(x)), forward(Masked(x))
        torch.testing.assert_close([out.x, out.twice, twice], [expected.x, expected.twice, expected_twice])
        assert torch.equal(out.mask, expected.mask) and type(out.twice) is torch.Tensor


def test_a_dataclass_argument_that_gets_an_attribute():
    def forward(x, box):
        box.extra = x * 2
        return x + 1

    box = Masked(torch.ones(2))
    st.trace(forward, (torch.ones(2), Masked(torch.ones(2))))(torch.full((2,), 3.0), box)
    assert torch.equal(box.extra, torch.full((2,), 6.0))


def test_a_deque_among_the_arguments_that_changes():
    def forward(x, last):
        last.append(x * 2)
        return sum(last)

    first = collections.deque([torch.ones(2)], maxlen=2)
    tr = st.trace(forward, (torch.ones(2), copy.copy(first)))
    given, expected = copy.copy(first), copy.copy(first)
    x = torch.full((2,), 3.0)
    torch.testing.assert_close(tr(x, given), forward(x, expected))
    torch.testing.assert_close(list(given), list(expected))
    assert given.maxlen == 2


def test_an_attribute_is_set_back_past_a_descriptor_that_adds_up():
    class Sum:
        def __set__(self, owner, value):
            vars(owner)["n"] += value

    class Account:
        n = Sum()

        def __init__(self):
            vars(self)["n"] = 1

    def forward(x, account):
        account.n = 2
        return x + account.n

    account = Account()
    st.trace(forward, (torch.ones(2), account))
    assert vars(account) == {"n": 1}
