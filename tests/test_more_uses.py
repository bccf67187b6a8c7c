"""Rarer things that a forward asks: a call that would hear another answer is refused, or a side effect says so."""

import array
import collections
import copy
import functools
import itertools
import logging
import queue
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn

import scopetrace as st
from tests.nets import net

X = torch.ones(2, 4)
LOG = logging.getLogger("scopetrace.tests.more_uses")


class Config:
    def __init__(self, **attributes):
        self.__dict__.update(attributes)


def refused(tr, text, *args, error=st.errors.StateMismatchError, **kwargs):
    with pytest.raises(error, match=text):
        tr(*(args or (X,)), **kwargs)


def effects(forward, *args):
    return [(e.name, e.baked_in) for e in st.trace(forward, args or (X,)).side_effects]


# Code ----------------------------------------------------------------------------------------------------------------


def test_what_makes_a_function():
    def scaled(x, k=2.0, *, j=1.0):
        return x * k * j

    def other(x):
        return x * 3

    for change in (
        lambda: setattr(scaled, "__defaults__", (3.0,)),
        lambda: scaled.__kwdefaults__.update(j=5.0),
        lambda: setattr(scaled, "__code__", other.__code__),
    ):
        tr = st.trace(lambda x: scaled(x), (X,))
        tr(X)
        change()
        refused(tr, "the code or the default arguments of .*scaled are not those of the trace")


@pytest.mark.parametrize("name", ["forward", "helped", "__call__"])
def test_a_method_that_a_class_inherits_and_gets_later(name):
    model = net(lambda s, x: s.helped(x))
    tr = st.trace(model, (X,))
    tr(X)
    setattr(type(model), name, lambda s, x: x * 3)
    refused(tr, rf"Net\.{name}: <(function|class .*Module)")


def test_parameters_that_are_added_later():
    model = net(lambda s, x: x * sum(p.numel() for p in s.parameters()))
    tr = st.trace(model, (X,))
    assert torch.equal(tr(X), X * 20)
    model.extra = nn.Parameter(torch.ones(3))
    refused(tr, r"parameters\(\).*\['fc.weight', 'fc.bias'\] when traced and \['extra',")
    first = net(lambda s, x: x.to(next(s.parameters()).dtype))
    tr = st.trace(first, (X,))
    first.extra = nn.Parameter(torch.ones(3))
    refused(tr, r"parameters\(\).*\['fc.weight', 'fc.bias'\] when traced and \['extra',")  # which is the next one now


# Objects and the process ---------------------------------------------------------------------------------------------


def test_what_a_weak_reference_leads_to():
    config = Config(k=2.0)
    model = net(lambda s, x: x * (1.0 if s.of() is None else s.of().k), of=weakref.ref(config))
    tr = st.trace(model, (X,))
    assert torch.equal(tr(X), X * 2)
    config.k = 3.0
    refused(tr, r"k, .*: 2\.0 when traced and 3\.0 now")
    config.k = 2.0
    tr(X)
    del config
    refused(tr, "of, which the model reads")


def test_what_a_weak_proxy_leads_to():
    config = Config(k=2.0)
    tr = st.trace(net(lambda s, x: x * s.proxy.k, proxy=weakref.proxy(config)), (X,))
    assert torch.equal(tr(X), tr(X)) and torch.equal(tr(X), X * 2)
    config.k = 3.0
    refused(tr, r"k, .*: 2\.0 when traced and 3\.0 now")


def test_a_weak_dictionary():
    config = Config()
    model = net(lambda s, x: x * s.table[config], table=weakref.WeakKeyDictionary({config: 2.0}))
    tr = st.trace(model, (X,))
    tr(X)
    model.table[config] = 3.0
    refused(tr, r"table\.data\[.*\], which the model reads")


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_copies_of_objects(copied):
    model = net(lambda s, x: x * copied(s.config).k, config=Config(k=2.0))
    tr = st.trace(model, (X,))
    assert torch.equal(tr(X), X * 2)
    model.config.k = 3.0
    refused(tr, r"config\.k, which the model reads.*: 2\.0 when traced and 3\.0 now")


def test_what_a_logger_is_told():
    def told(x):
        LOG.debug("%s", x.shape)
        return x * 2

    tr = st.trace(told, (X,))
    LOG.setLevel(logging.DEBUG)
    assert torch.equal(tr(X), X * 2)
    LOG.setLevel(logging.NOTSET)


def test_an_iterator_in_a_list():
    model = net(lambda s, x: x * next(s.each[0]), each=[iter([2.0, 3.0])])
    tr = st.trace(model, (X,))
    tr(X)
    refused(tr, "right for one call only", error=st.errors.SideEffectError)


def test_an_iterator_that_cannot_be_pickled():
    batches = iter(torch.utils.data.DataLoader([1.0, 2.0]))
    tr = st.trace(net(lambda s, x: x * s.run["scale"], run={"scale": 2, "batches": batches}), (X,))
    assert torch.equal(tr(X), X * 2) and next(batches).item() == 1


def test_settings_that_a_forward_leaves():
    def leaves(x):
        torch.set_grad_enabled(False)
        torch.set_float32_matmul_precision("high")
        return x * 2

    try:
        assert effects(leaves) == [("torch.is_grad_enabled", True), ("torch.get_float32_matmul_precision", True)]
        assert torch.is_grad_enabled()  # tracing is over
    finally:
        torch.set_float32_matmul_precision("highest")


def test_settings_that_a_forward_sets_for_a_while_are_its_own():
    def inside(x):
        torch.set_default_dtype(torch.float64)
        y = torch.zeros(4)
        torch.set_default_dtype(torch.float32)
        with torch.no_grad():
            k = 2 if torch.is_grad_enabled() else 3
        with torch.autocast("cpu", torch.bfloat16):
            return x * k * (5 if torch.is_autocast_enabled("cpu") else 7) + y

    tr = st.trace(inside, (X,))
    assert torch.equal(tr(X), inside(X))
    with torch.no_grad():
        assert torch.equal(tr(X), inside(X))
    asks = st.trace(lambda x: inside(x) if torch.is_grad_enabled() else x, (X,))
    with torch.no_grad():
        refused(asks, r"torch.is_grad_enabled\(\).*: True when traced and False now")


# Tensors as Python objects -------------------------------------------------------------------------------------------


def test_the_text_of_a_tensor_may_be_shown(capsys):
    def shows(x):
        print(x, f"{x}", repr(x) + "!", LOG.debug("%s", x))
        return x * 2

    assert torch.equal(st.trace(shows, (X,))(X), X * 2)


def test_errors_that_a_forward_catches():
    def factor(x):
        try:
            return torch.linalg.cholesky(x)
        except RuntimeError:
            return x * 2

    tr = st.trace(factor, (torch.eye(2),))
    assert torch.equal(tr(torch.eye(2)), torch.eye(2))
    with pytest.raises(torch.linalg.LinAlgError):  # the path of the example is that of the trace
        tr(-torch.eye(2))


@pytest.mark.parametrize("bind", [lambda x: x[0], lambda x: x])
def test_a_view_of_a_written_input_in_an_attribute(bind):
    def forward(self, x):
        self.last = bind(x)
        x.add_(1)
        return x * 2

    model, x = net(forward), X.clone()
    tr = st.trace(model, (X.clone(),))
    tr(x)
    x.add_(5)
    assert torch.equal(model.last, bind(x))


def test_attributes_that_users_set_on_tensors():
    tagged = X.clone()
    tagged.scale = 3.0
    tr = st.trace(lambda x: x * getattr(x, "scale", 2.0), (tagged,))
    assert torch.equal(tr(tagged), tagged * 3.0)
    text = r"x\.scale: 3\.0 when .* missing now"
    refused(tr, text, X, error=st.errors.InputMismatchError)
    plain = st.trace(net(lambda s, x: x * 2), (tagged,))
    plain(X)  # nobody asked


def test_attributes_that_a_forward_sets_on_tensors():
    def marks(x):
        x.seen = True
        y = x * 2
        y.kind = "inner"
        return y + (y.kind == "inner")

    x = X.clone()
    tr = st.trace(marks, (x,))
    assert [str(e.change) for e in tr.side_effects] == ["x.seen was missing and became True"]
    assert torch.equal(tr(X), X * 2 + 1) and not hasattr(x, "seen")

    def result(x):
        y = x * 2
        y.kind = "result"
        return y

    with pytest.raises(st.errors.UnsupportedOpError, match="sets the attribute 'kind' of its result"):
        st.trace(result, (X,))


def test_the_class_of_a_tensor():
    def by_instance(x):
        assert isinstance(type(x), type) and issubclass(type, type) and type("Made", (), {}).__name__ == "Made"
        return x * 3 if isinstance(x, nn.Parameter) else x * 2

    for given, other in ((X, nn.Parameter(X)), (nn.Parameter(X), X)):
        tr = st.trace(by_instance, (given,))
        assert torch.equal(tr(given), by_instance(given))
        refused(tr, r"x\.is_parameter, which", other, error=st.errors.InputMismatchError)


def test_a_slot_that_is_none():
    class Options:
        __slots__ = ("scale",)

    model = net(lambda s, x: x * 2 if s.options.scale is None else x * s.options.scale)
    model.options = Options()
    model.options.scale = None
    tr = st.trace(model, (X,))
    model.options.scale = 3.0
    refused(tr, r"options\.scale, .*: None when traced and 3\.0 now")


def test_what_pytest_puts_into_an_assert_is_not_of_the_forward():
    def forward(x):
        assert x.shape == X.shape
        return x * 2

    places = [read.source for read in st.trace(forward, (X,))._program.tape.guards]
    functions = [f for place in places for f in getattr(place, "functions", ())]
    assert functions == [forward]


def test_results_of_a_subclass():
    class Own(torch.Tensor):
        pass

    tr = st.trace(lambda x: x * 2, (X,))
    refused(tr, "x is a Own now", X.as_subclass(Own), error=st.errors.InputMismatchError)
    tr(nn.Parameter(X))


def test_which_arguments_are_one_tensor():
    for same in (lambda x, y: x is y, lambda x, y: id(x) == id(y)):
        tr = st.trace(lambda x, y, same=same: x * 2 if same(x, y) else x * 3, (X, X.clone()))
        assert torch.equal(tr(X, X.clone()), X * 3)
        refused(tr, "which arguments are one tensor", X, X, error=st.errors.InputMismatchError)
    tr = st.trace(lambda x, y: x * 2 if x is not None else y, (X, X.clone()))
    assert torch.equal(tr(X, X), X * 2)
    model = net(lambda s, x: x * 2 if x is s.shift else x * 3)
    tr = st.trace(model, (torch.ones(4),))
    tr(torch.ones(4))
    refused(tr, "which arguments are tensors of the model", model.shift, error=st.errors.InputMismatchError)
    with pytest.raises(st.errors.UnsupportedOpError, match="x is a tensor of the model, and the forward compares"):
        st.trace(model, (model.shift,))


def test_an_op_that_returns_its_input_returns_the_same_object():
    def forward(self, x):
        found = [t.to(x) is t for t in (x, self.fc.weight, self.shift) for _ in range(2)]
        for t in (torch.zeros(4), torch.zeros(4)):  # the second is inferred from the first
            found.append(t.to(x) is t)
        return x * sum(found)

    model = net(forward)
    assert torch.equal(st.trace(model, (X,))(X), model(X))


def test_the_order_of_entries():
    y = X * 3
    tr = st.trace(lambda d: next(iter(d.values())) * 2, ({"a": X, "b": y},))
    assert torch.equal(tr({"a": y, "b": X}), y * 2)
    refused(tr, "in the order of the trace", {"b": X, "a": y}, error=st.errors.InputMismatchError)
    refused(tr, "OrderedDict", collections.OrderedDict(a=X, b=y), error=st.errors.InputMismatchError)
    tr = st.trace(lambda x, k=None, **more: x * next(iter(more.values())), (X,), {"a": X, "b": y, "k": X})
    tr(X, k=X, a=X, b=y)
    refused(tr, r"order of \*\*kwargs was \['a', 'b'\]", X, k=X, b=X, a=y, error=st.errors.InputMismatchError)


def by_key(self, x, batch, **more):
    y = x * batch["scale"] + more["shift"] if "scale" in batch else x
    return y if batch.get("mask") is None else y * batch["mask"]


def passed_on(self, x, batch, **more):
    return by_key(self, x, {**batch}, **more)


def in_an_order_of_its_own(self, x, batch, **more):
    return torch.stack([batch[name] for name in sorted(batch)]).cumsum(0)[0] * x


def as_they_come(self, x, batch, **more):
    return torch.stack([*batch.values()]).cumsum(0)[0] * x + next(iter(more.values()))


@pytest.mark.parametrize("forward", [by_key, passed_on, in_an_order_of_its_own, as_they_come])
def test_entries_in_another_order(forward, tmp_path):
    """The first call in an order records the forward in both; what came of it holds for the next."""
    args, kwargs = (X, {"scale": X * 2, "mask": X * 3}), {"shift": X * 4, "extra": X * 5}
    tr, (x, scale, mask, shift, extra) = st.trace(net(forward), args, kwargs), torch.randn(5, 2, 4).unbind()
    tr.save(tmp_path / "trace")
    for batch, more in itertools.product(
        ({"scale": scale, "mask": mask}, {"mask": mask, "scale": scale}),
        ({"shift": shift, "extra": extra}, {"extra": extra, "shift": shift}),
    ):
        for trace in (tr, tr, st.load(tmp_path / "trace")):
            if [*batch, *more] == [*args[1], *kwargs] or (forward is not as_they_come and trace is tr):
                assert torch.equal(trace(x, batch, **more), forward(None, x, batch, **more))
            else:
                with pytest.raises(st.errors.InputMismatchError, match="order"):
                    trace(x, batch, **more)


# What forward registers ----------------------------------------------------------------------------------------------


def tables(model):
    """Where a model has its tensors, and which of them are saved."""
    own = {name for name, x in vars(model).items() if isinstance(x, torch.Tensor)}
    return own, list(model._buffers), model._non_persistent_buffers_set, list(model.state_dict())


def registered(self, x):
    if not hasattr(self, "table"):
        self.register_buffer("table", torch.ones(4) * 2)
    return x * self.table


def registered_apart(self, x):
    if self.table is None:
        self.register_buffer("table", torch.ones(4) * 2, persistent=False)
    return x * self.table


@pytest.mark.parametrize("how", ["the trace", "a file", "a module", "a copy"])
@pytest.mark.parametrize("forward", [registered, registered_apart])
def test_a_buffer_that_the_first_call_registers(forward, how, tmp_path):
    eager, model = net(forward), net(forward)
    for m in (eager, model) if forward is registered_apart else ():
        m.register_buffer("table", None)
    before = tables(model)
    tr = st.trace(model, (X,))
    assert tables(model) == before
    if how == "a file":
        st.save(tr, tmp_path / "a.st")
    run = {"the trace": lambda: tr, "a module": tr.to_module, "a copy": lambda: copy.deepcopy(tr)}
    run = st.load(tmp_path / "a.st") if how == "a file" else run[how]()
    for x in (X, 2 * X, 3 * X):
        assert torch.equal(run(x), eager(x))
    if how == "the trace":
        assert tables(model) == tables(eager)


def test_a_buffer_of_other_data_in_each_call():
    model, eager = (net(lambda s, x: s.register_buffer("seen", x * 2) or x) for _ in range(2))
    tr = st.trace(model, (X,))
    assert not tr.side_effects
    for x in (X, X * 3):
        assert torch.equal(tr(x), eager(x)) and torch.equal(model.seen, eager.seen)


def test_a_parameter_that_forward_makes_under_no_grad():
    with torch.no_grad(), pytest.raises(st.errors.UnsupportedOpError, match=r"one run before st\.trace") as error:
        st.trace(net(lambda s, x: setattr(s, "p", nn.Parameter(x.sum(0))) or x), (X,))
    assert "trace under" not in str(error.value)


# Small questions -----------------------------------------------------------------------------------------------------


def test_a_dict_that_a_hook_fills_by_its_method():
    found = {}
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].register_forward_hook(lambda module, args, out: found.__setitem__("out", out))
    tr = st.trace(model, (X,))
    assert [(e.name, e.baked_in) for e in tr.side_effects] == [("found['out']", False)]
    assert torch.equal(tr(X), model(X)) and torch.equal(tr(2 * X), model(2 * X))


def test_arguments_by_name_or_by_position_beside_more_keywords():
    def forward(self, x, mask=None, **more):
        return self.fc(x) * (1 if mask is None else mask) * more.get("scale", 1)

    model, scale = net(forward), X * 3
    for args, kwargs in [((X, X * 2), {"scale": scale}), ((X,), {"scale": scale, "mask": X * 2})]:
        tr = st.trace(model, args, kwargs)
        for args, kwargs in [
            ((X, X), {"scale": X}),
            ((), {"mask": X, "scale": X, "x": X}),
            ((X,), {"mask": X, "scale": X}),
        ]:
            assert torch.equal(tr(*args, **kwargs), model(*args, **kwargs))
        refused(tr, "positional", X, X, error=st.errors.InputMismatchError)
        refused(tr, "more", X, X, scale=X, other=1, error=st.errors.InputMismatchError)


def test_a_dict_that_is_a_default_argument_and_changes():
    def forward(self, x, options={"k": 2.0}):  # noqa: B006
        return x * options["k"]

    tr = st.trace(net(forward), (X,))
    tr(X)
    forward.__defaults__[0]["k"] = 3.0
    refused(tr, "default arguments")


# Tensors that Python only looks at -----------------------------------------------------------------------------------

LOOKS = {
    "numel": lambda s, x: x * s.table.numel(),
    "len": lambda s, x: x * len(s.table),
    "dtype": lambda s, x: x.to(s.table.dtype),
    "is None": lambda s, x: x if s.table is None else x * 2,
    "items": lambda s, x: x * len([row for row in s.table]),
}


@pytest.mark.parametrize("kind", ["attribute", "buffer", "parameter"])
@pytest.mark.parametrize("look", LOOKS)
def test_a_tensor_of_the_model_that_no_op_takes(look, kind):
    make = nn.Parameter if kind == "parameter" else lambda t: t
    model = net(LOOKS[look])
    if kind == "buffer":
        model.register_buffer("table", torch.ones(3, 2))
    else:
        model.table = make(torch.ones(3, 2))
    tr = st.trace(model, (X,))
    torch.testing.assert_close(tr(X), model(X))
    model.table = make(torch.zeros(3, 2))
    torch.testing.assert_close(tr(X), model(X))
    for other in (make(torch.ones(5, 2)), make(torch.ones(3, 2).double()), None):
        model.table = other
        refused(tr, "table")


@pytest.mark.parametrize("kind", ["attribute", "buffer", "parameter"])
@pytest.mark.parametrize("ask", [lambda t: t.stride(0), lambda t: t.is_contiguous(), lambda t: t.storage_offset()])
def test_how_a_tensor_of_the_model_lies_in_memory(ask, kind):
    make = nn.Parameter if kind == "parameter" else lambda t: t
    model = net(lambda s, x: x * s.table[0] * (1 + ask(s.table)))
    if kind == "buffer":
        model.register_buffer("table", torch.ones(3, 4))
    else:
        model.table = make(torch.ones(3, 4))
    tr = st.trace(model, (X,))
    model.table = make(torch.ones(3, 4))
    torch.testing.assert_close(tr(X), model(X))
    model.table = make(torch.ones(7, 8)[1::2, ::2])
    refused(tr, r"table('s strides(\[0\])?|\.storage_offset\(\)), which the model reads")


def test_the_keywords_of_a_partial():
    model = net(lambda s, x: s.act(x), act=functools.partial(nn.functional.leaky_relu, negative_slope=0.5))
    tr = st.trace(model, (X,))
    model.act = functools.partial(nn.functional.leaky_relu, negative_slope=0.5)
    tr(X)
    model.act.keywords["negative_slope"] = 0.1
    refused(tr, r"act\.keywords\['negative_slope'\], which the model reads.*: 0\.5 when traced and 0\.1 now")


@pytest.mark.parametrize("make", [queue.Queue, queue.LifoQueue, queue.PriorityQueue])
def test_queues(make):
    def waits(s, x):
        s.waiting.put(1)
        return x * s.waiting.qsize()

    model = net(waits, waiting=make())
    tr = st.trace(model, (X,))
    assert [e.change for e in tr.side_effects] == ["self.waiting was [] and became [1]"] and model.waiting.empty()
    assert torch.equal(tr(X), X)
    refused(tr, "right for one call only", error=st.errors.SideEffectError)
    model = net(lambda s, x: x * s.waiting.qsize(), waiting=make())
    tr = st.trace(model, (X,))
    model.waiting.put(1)
    refused(tr, "waiting, which the model reads")


def test_numbers_in_an_array():
    def counts(s, x):
        s.counts[0] += 1
        return x * s.counts[0]

    tr = st.trace(net(counts, counts=array.array("d", [1.0])), (X,))
    assert torch.equal(tr(X), X * 2)
    refused(tr, "right for one call only.*self.counts", error=st.errors.SideEffectError)


@pytest.mark.parametrize("name", ["is_initialized", "get_rank", "get_world_size"])
def test_the_process_group(name, tmp_path):
    def asks(x):
        return x * (2 + getattr(dist, name)()) if dist.is_initialized() else x * 5

    tr = st.trace(asks, (X,))
    tr(X)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        refused(tr, r"is_initialized\(\), which the model reads.*: False when traced and True now")
        tr = st.trace(asks, (X,))
        torch.testing.assert_close(tr(X), asks(X))
    finally:
        dist.destroy_process_group()
    refused(tr, r"is_initialized\(\), which the model reads.*: True when traced and False now")


def test_an_argument_that_is_a_tensor_of_the_model():
    model = net(lambda s, x, w: s.fc(x) @ w)
    weight, other = model.fc.weight, torch.randn(4, 4)
    tr = st.trace(model, (X, weight))
    torch.testing.assert_close(tr(X, weight), model(X, weight))
    for w in (other, weight.detach().clone()):
        refused(tr, r"are tensors of the model: \(\(1, 'fc.weight'\),\)", X, w, error=st.errors.InputMismatchError)
    tr = st.trace(model, (X, other))
    torch.testing.assert_close(tr(X, weight), model(X, weight))
    step = lambda params, x: torch.func.functional_call(model, params, (x, x.T @ x))  # noqa: E731
    own = dict(model.named_parameters())
    tr = st.trace(step, (own, X))
    others = {name: p * 2 for name, p in own.items()}
    torch.testing.assert_close(tr(others, X), step(others, X))
