"""The user's model, process and random state are as they were."""

import copy
import itertools
import random
import sys
import threading

import numpy
import pytest
import torch
from compare import sharing
from nets import Net
from torch import nn

import scopetrace as st
from scopetrace.api.runnable import program_of


class Stateful(nn.Module):
    """Everything that a forward may do to its module."""

    def __init__(self, fail=False, draws=True):
        super().__init__()
        self.fc = nn.Linear(2, 2)
        self.bn = nn.BatchNorm1d(2)
        self.register_buffer("total", torch.zeros(2))
        self.history = []
        self.cache = {"deep": {}}
        self.fail, self.draws = fail, draws

    def forward(self, x):
        y = self.bn(self.fc(x))
        self.total = self.total + y.sum(0)
        self.history.append(y)
        self.cache["deep"]["y"] = y
        self.last = y
        self.steps = getattr(self, "steps", 0) + 1
        if self.draws:
            random.random()
        if self.fail:
            raise RuntimeError("half-way")
        return y


def snapshot(module):
    return {
        name: (
            {k: (id(v), v._version, v.clone()) for k, v in {**m._parameters, **m._buffers}.items()},
            sorted(m.__dict__),
            m.training,
            len(m._forward_hooks) + len(m._forward_pre_hooks),
            m.__dict__.get("history") and list(m.history),
            repr(m.__dict__.get("cache")),
        )
        for name, m in module.named_modules()
    }


def process():
    return (
        nn.Module._call_impl,
        nn.Linear.forward,
        Stateful.forward,
        torch.compiler.is_exporting(),
        torch.compiler.is_compiling(),
        torch.is_grad_enabled(),
        torch.is_autocast_cache_enabled(),
        st.tracing_state(),
    )


@pytest.mark.parametrize("fail", [False, True])
def test_all_is_as_it_was(fail):
    net, x = Stateful(fail).train(), torch.randn(4, 2)
    before, around = snapshot(net), process()
    torch_rng, python_rng, numpy_rng = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1]
    try:
        st.trace(net, (x,), functional=False)
    except RuntimeError as error:
        assert fail and str(error) == "half-way"
    after = snapshot(net)
    assert repr(after) == repr(before)
    assert process() == around
    assert torch.equal(torch_rng, torch.get_rng_state()) and python_rng == random.getstate()
    assert (numpy_rng == numpy.random.get_state()[1]).all()


def test_attributes_bound_to_tensors_are_bound_by_the_trace_too():
    torch.manual_seed(0)
    net, x = Stateful(draws=False).train(), torch.randn(4, 2)
    tr = st.trace(net, (x,), functional=False)
    assert not hasattr(net, "last")
    first = tr(x)
    assert net.last is first
    torch.testing.assert_close(net.total, first.detach().sum(0), check_stride=False)
    second = tr(x)  # reads the buffer that the first run bound
    torch.testing.assert_close(net.total, (first + second).sum(0))


def test_the_trace_reads_buffers_that_the_model_bound_anew():
    net = nn.BatchNorm1d(2).eval()
    tr = st.trace(net, (torch.randn(3, 2),))
    net.running_mean = torch.full((2,), 5.0)
    x = torch.randn(3, 2)
    torch.testing.assert_close(tr(x), net(x))


def test_a_check_puts_back_parameters_that_the_forward_changes():
    class Decaying(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(3))

        def forward(self, x):
            with torch.no_grad():
                self.w.mul_(0.5)
            return x * self.w

    net, x = Decaying(), torch.randn(2, 3)
    st.trace(net, (x,)).check((x,))
    assert net.w.tolist() == [1.0, 1.0, 1.0]


def state_bytes(m):
    """Where the tensors of a model lie, and what they hold."""
    return [(t.data_ptr(), t.device, t.tolist()) for t in (*m.parameters(), *m.buffers())]


def set_after_a_view(m, x):
    row = m.a[0]
    m.a.set_(x * 2)
    return row + m.a


def set_before_a_view(m, x):
    m.a.set_(x * 2)
    m.a[0].add_(1)
    return x + m.a


def set_twice(m, x):
    m.a.set_(x + 1)
    m.a.set_(m.a * 2)
    return m.a


def set_to_what_is_written(m, x):
    y = x * 2
    m.a.set_(y)
    y.add_(1)
    return x + m.a


def set_to_another(m, x):
    m.a.set_(m.c)
    m.a.add_(1)
    return x + m.c


def data_twice(m, x):
    m.a.data = m.a.data + x
    m.a.data = m.a.data * 2
    return x + m.a.data[0], m.a


def data_of_an_input(m, x):
    row = x[0]
    x.data = x * 2
    return x + row


def data_that_is_there(m, x):
    m.a.data = m.a.data.to(x.dtype)
    m.fc.to(x.device)
    return m.fc(x) + m.a


OTHER_MEMORY = [
    data_twice,
    data_of_an_input,
    data_that_is_there,
    lambda m, x: (m.a.set_(x[:]), x + m.a)[1],
    lambda m, x: (m.a.set_(x.clone()), m.a)[1],
    lambda m, x: (x.set_(x + 1), x.set_(x * 2), x + 1)[2],
    set_after_a_view,
    set_before_a_view,
    set_twice,
    set_to_what_is_written,
    set_to_another,
]


@pytest.mark.parametrize("functional", [True, False])
@pytest.mark.parametrize("run", OTHER_MEMORY)
def test_tensors_of_the_model_that_get_other_memory(run, functional):
    def state(m, x):
        return x, m.a, m.c

    torch.manual_seed(0)
    eager = Net(run, a=nn.Buffer(torch.zeros(2, 2)), c=torch.ones(2, 2), fc=nn.Linear(2, 2))
    traced = copy.deepcopy(eager)
    before = state_bytes(traced)
    tr = st.trace(traced, (torch.ones(2, 2),), functional=functional)
    assert state_bytes(traced) == before
    for value in (3.0, 4.0):
        x, y = torch.full((2, 2), value), torch.full((2, 2), value)
        expected, actual = eager(x), tr(y)
        torch.testing.assert_close((actual, state(traced, y)), (expected, state(eager, x)))
        assert sharing(actual, state(traced, y)) == sharing(expected, state(eager, x))


def test_the_new_value_of_a_call_that_changed_memory():
    net = Net(lambda m, x: (m.a.set_(x * 2), x + 1)[1], a=nn.Buffer(torch.zeros(2)))
    tr = st.trace(net, (torch.ones(2),))
    assert {name: str(node) for name, node in tr.calls[0].mutated.items()} == {"a": "mul"}


@pytest.mark.parametrize(
    "run",
    [
        lambda m, x: (m.a.t_(), x + m.a)[1],
        lambda m, x: (m.a.unsqueeze_(0), x + m.a)[1],
        lambda m, x: (m.a.resize_(4), x + m.a[0])[1],
        lambda m, x: (m.a.set_(x[0]), x + m.a)[1],
    ],
)
def test_tensors_of_the_model_that_get_other_sizes_in_place_are_refused(run):
    net = Net(run, a=nn.Buffer(torch.zeros(2, 2)))
    with pytest.raises(st.UnsupportedOpError, match="a, a tensor of the model, gets other sizes") as error:
        st.trace(net, (torch.ones(2, 2),))
    assert error.value.op and "lambda m, x" in error.value.source
    assert net.a.shape == (2, 2)


@pytest.mark.parametrize("leaves", [(), [Net]])
def test_data_of_another_dtype_or_in_a_leaf_is_refused_before_harm(leaves):
    def run(m, x):
        m.a.data = x if leaves else x.half()
        return x + m.a

    net = nn.Sequential(Net(run, a=nn.Buffer(torch.zeros(2, 2))))
    before = state_bytes(net)
    with pytest.raises(st.UnsupportedOpError, match=r"`\.data = \.\.\.` of a tensor of the model") as error:
        st.trace(net, (torch.ones(2, 2),), leaf_modules=leaves)
    assert error.value.op == "Tensor.data" and "m.a.data = x" in error.value.source
    assert state_bytes(net) == before and "data" not in torch.Tensor.__dict__


def test_a_parameter_that_gets_other_data_keeps_its_gradient():
    def run(m, x):
        m.w.data = x * 2
        return (x @ m.w * m.w).sum()

    torch.manual_seed(0)
    eager = Net(run, w=nn.Parameter(torch.randn(2, 2)))
    traced, x = copy.deepcopy(eager), torch.randn(2, 2)
    tr = st.trace(traced, (x,))
    for net, program in ((eager, eager), (traced, tr)):
        program(x).backward()
        torch.testing.assert_close(net.w, eager.w)
    torch.testing.assert_close(traced.w.grad, eager.w.grad)


def fill_once(m, x):
    if m.a is None:
        m.a = x.sum(0)
        m.seen.append(1)
    return x + m.a


BINDS = [
    (fill_once, None),
    (lambda m, x: (m.a.set_(x), x + m.a)[1], torch.zeros(2, 2)),
    (lambda m, x: (setattr(m, "a", m.a + x), setattr(m, "last", x), x + m.a)[2], torch.zeros(2, 2)),
]


@pytest.mark.parametrize(("run", "first"), BINDS)
def test_check_and_verify_put_bindings_and_memory_back(run, first):
    net = Net(run, seen=[])
    net.register_buffer("a", first)
    tr, x = st.trace(net, (torch.ones(2, 2),)), torch.randn(2, 2)
    tr.check((x,))
    if first is None:
        tr.to_onnx(verify=True)
    assert net.a is first and net.seen == [] and not hasattr(net, "last")
    assert first is None or state_bytes(net) == [(first.data_ptr(), first.device, [[0.0, 0.0], [0.0, 0.0]])]


def test_check_names_a_buffer_that_stays_unbound():
    net = Net(fill_once, seen=[])
    net.register_buffer("a", None)
    tr = st.trace(net, (torch.ones(2, 2),))
    program_of(tr).tape.attribute_writes.clear()
    with pytest.raises(st.CheckError, match=r"'bound buffer a of module 0'\]: Tensor became None"):
        tr.check((torch.ones(2, 2),))


def test_threads_started_in_forward_are_refused():
    def run(x):
        found = []
        t = threading.Thread(target=lambda: found.append(x * 2))
        t.start()
        t.join()
        return found[0] + 1

    with pytest.raises(st.ForeignTensorError, match="not recorded"):
        st.trace(run, (torch.randn(2),))


class NamedAsConstant(nn.Module):
    """Has a buffer under a name that traces give to constants, as modules made by torch.fx have."""

    def __init__(self):
        super().__init__()
        self.register_buffer("_tensor_constant0", torch.full((3,), 100.0))
        self._weight = nn.Parameter(torch.ones(3))

    def forward(self, x):
        y = x + torch.tensor([1.0, 2.0, 3.0])
        return y + self._tensor_constant0 * self._weight


def test_a_buffer_that_is_named_as_a_constant(tmp_path):
    model, x = NamedAsConstant(), torch.randn(3)
    trace = st.trace(model, (x,))
    model._tensor_constant0 += 1
    want = model(x)
    assert torch.equal(trace(x), want)
    program = trace.to_exported_program()
    assert [(s.kind.name, s.target) for s in program.graph_signature.input_specs[:-1]] == [
        ("PARAMETER", "_weight"),
        ("BUFFER", "_tensor_constant0"),
        ("CONSTANT_TENSOR", "lifted_tensor_0"),
    ]
    assert torch.equal(program.module()(x), want)
    trace.save(tmp_path / "trace.st")
    loaded = st.load(tmp_path / "trace.st")
    assert torch.equal(loaded(x), want) and str(loaded) == str(trace)


def test_python_may_not_read_a_buffer_that_is_named_as_a_constant():
    class Reads(NamedAsConstant):
        def forward(self, x):
            return x.sin() if self._tensor_constant0.sum() > 0 else x.cos()

    with pytest.raises(st.errors.DataDependentError):
        st.trace(Reads(), (torch.randn(3),))


class FillsDict(nn.Module):
    """Writes, and puts what it wrote into an argument that it returns."""

    def forward(self, x, out):
        y = x.clone()
        y[0] = 3.0
        out["y"] = y
        return x + 1, out


def test_a_loaded_trace_can_be_made_functional_again(tmp_path):
    x = torch.randn(3)
    trace = st.trace(FillsDict(), (x, {}))
    trace.save(tmp_path / "trace.st")
    program = st.load(tmp_path / "trace.st").to_exported_program()
    (plus, out), (want_plus, want) = program.module()(x, {}), FillsDict()(x, {})
    assert torch.equal(plus, want_plus) and torch.equal(out["y"], want["y"])
    assert program.graph_module.code == trace.to_exported_program().graph_module.code


def test_a_buffer_that_is_made_again_where_its_shape_does_not_fit():
    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("table", torch.zeros(1, 1), persistent=False)

        def forward(self, x):
            if self.table.shape[1] != x.shape[1]:
                self.table = torch.arange(x.shape[1])[None].float()
            return x * self.table

    model, x = Table(), torch.randn(2, 4)
    tr = st.trace(model, (x,))
    for _ in range(2):
        torch.testing.assert_close(tr(x), model(x))
    assert model.table.shape == (1, 4)


def test_other_threads_go_on_as_they_were_while_one_traces():
    x, inside, goes_on = torch.randn(4, 2), threading.Event(), threading.Event()

    def waits(x):
        inside.set()
        assert torch.compiler.is_compiling() and torch.compiler.is_exporting()
        goes_on.wait(10)
        return x * 2

    def trains():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(3):
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
        return list(model.state_dict().values())

    before, fn = trains(), torch.compile(lambda x: x + 1, backend="eager")
    thread = threading.Thread(target=st.trace, args=(waits, (x,)))
    thread.start()
    try:
        assert inside.wait(10)
        assert (
            not torch.compiler.is_compiling()
            and not torch.compiler.is_exporting()
            and not torch.fx._symbolic_trace.is_fx_tracing()
        )
        for old, new in zip(before, trains(), strict=True):
            assert torch.equal(old, new)
        threading.Timer(0.1, goes_on.set).start()
        assert torch.equal(fn(x), x + 1)
        thread.join()
        assert torch.equal(fn(x), x + 1)
    finally:
        goes_on.set()
        thread.join()
    # compiling may have begun in the trace and ended after it, and has put back what was there then, which is false now
    assert not torch.compiler._is_compiling_flag and not torch.compiler._is_exporting_flag


class Precision(nn.Module):
    def forward(self, x):
        precise = torch.get_float32_matmul_precision() == "highest" and torch.get_default_dtype() is torch.float32
        return x * torch.get_num_threads() if precise and torch.is_grad_enabled() else torch.zeros_like(x)


@pytest.mark.parametrize(
    "model", [nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), Precision()], ids=["layers", "flags"]
)
def test_a_call_compares_the_state_in_few_python_calls(model):
    model.eval()
    trace, x = st.trace(model, torch.ones(2, 8)), torch.ones(2, 8)
    trace(x)
    called = []

    def note(frame, event, arg):
        if event == "call":
            called.append(frame.f_code.co_qualname)

    sys.setprofile(note)
    try:
        trace(x)
    finally:
        sys.setprofile(None)
    inside = called[called.index("call") + 1 : called.index("unwrapped.<locals>.current")]
    assert inside == ["same_entries"] or not isinstance(model, nn.Sequential)  # the submodules, in order


GAIN, TABLE = 2.0, {"act": "relu", "sizes": [2, 2], "deep": {"x": [1, (2, [3])]}}


def around(by):
    return lambda x: x * by[0] + GAIN


class Reads(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.sizes, self.pair, self.flag, self.by = [2, 2], (1, [2]), 1, [3, 4]
        self.many, self.kinds, self.scaled = list(range(40)), {1: "a", "b": 2}, around(self.by)

    def forward(self, x):
        x = self.scaled(self.fc(x)) * self.pair[1][0] * self.flag * self.many[3] * len(self.kinds)
        if self.training or not torch.is_grad_enabled() or hasattr(self, "extra"):
            x = x * 2
        return x.view(-1, *self.sizes).sum() * TABLE["deep"]["x"][1][1][0] + torch.zeros(())


def put(owner, name):
    return lambda value: setattr(owner, name, value)


CHANGES = {
    "an item": lambda m: m.sizes.__setitem__(0, 4),
    "an item of another type": lambda m: m.sizes.__setitem__(0, 2.0),
    "one more item": lambda m: m.sizes.append(1),
    "an item of an item": lambda m: m.pair[1].__setitem__(0, 3),
    "a bool for a number": lambda m: put(m, "flag")(True),
    "an item of a long list": lambda m: m.many.__setitem__(3, 4),
    "the order of a dict": lambda m: m.kinds.__setitem__(1, m.kinds.pop(1)),
    "one entry less": lambda m: m.kinds.pop(1),
    "an item that a closure reads": lambda m: m.by.__setitem__(0, 5),
    "a tuple for a list": lambda m: put(m, "sizes")((2, 2)),
    "a new attribute": lambda m: put(m, "extra")(0),
    "no attribute": lambda m: delattr(m, "flag"),
    "training": lambda m: m.train(),
    "a hook": lambda m: m.fc.register_forward_hook(lambda m, args, y: y * 2),
    "a forward": lambda m: put(m.fc, "forward")(lambda x: x),
    "a class": lambda m: put(m.fc, "__class__")(type("Other", (nn.Linear,), {})),
    "a submodule": lambda m: put(m, "fc")(nn.Linear(4, 4)),
}
OTHER_OBJECTS = {
    "an equal list": lambda m: put(m, "sizes")([2, 2]),
    "equal items": lambda m: m.many.__setitem__(slice(None), list(range(40))),
    "an equal dict": lambda m: put(m, "kinds")(dict(m.kinds)),
    "a float": lambda m: put(m, "flag")(int("1")),
}


@pytest.mark.parametrize("change", [*CHANGES, *OTHER_OBJECTS])
def test_a_call_sees_what_has_changed_in_what_the_forward_read(change):
    model, x = Reads().eval(), torch.ones(2, 4)
    trace = st.trace(model, (x,))
    trace(x)
    if change in OTHER_OBJECTS:
        OTHER_OBJECTS[change](model)
        torch.testing.assert_close(trace(x), model(x))
        return
    CHANGES[change](model)
    with pytest.raises(st.errors.StateMismatchError):
        trace(x)


@pytest.mark.parametrize(
    "state",
    [torch.no_grad(), torch.autocast("cpu", torch.bfloat16), torch.device("meta")],
    ids=["no_grad", "autocast", "device"],
)
def test_a_call_sees_another_state_of_torch(state):
    model, x = Reads().eval(), torch.ones(2, 4)
    trace = st.trace(model, (x,))
    trace(x)
    with state, pytest.raises(st.errors.StateMismatchError):
        trace(x)
    with torch.device("cpu"):
        trace(x)


def test_a_call_sees_other_globals(monkeypatch):
    model, x = Reads().eval(), torch.ones(2, 4)
    trace = st.trace(model, (x,))
    expected = trace(x)
    for change in (
        lambda at: at.setitem(TABLE["deep"], "x", [1, (2, [4])]),
        lambda at: at.setitem(TABLE, "more", 1),
        lambda at: at.setitem(globals(), "GAIN", 3.0),
        lambda at: at.delitem(globals(), "GAIN"),
        lambda at: at.setattr(nn.Linear, "forward", lambda self, x: x),
        lambda at: at.setattr(Reads.forward, "__code__", Stateful.forward.__code__),
    ):
        with monkeypatch.context() as at:
            change(at)
            with pytest.raises(st.errors.StateMismatchError):
                trace(x)
        assert torch.equal(trace(x), expected)


class Counters(nn.Module):
    def __init__(self, *, tied=False):
        super().__init__()
        self.a, self.b = nn.Buffer(torch.zeros(3)), nn.Buffer(torch.ones(3))
        if tied:
            self.b = self.a

    def forward(self, x):
        self.a.add_(1)
        return x + self.a + self.b


def views_of_one(net):
    memory = torch.zeros(4)
    net.a, net.b = memory[:3], memory[1:]


AFTER = {
    "tied": (False, lambda net: setattr(net, "b", net.a)),
    "views of one tensor": (False, views_of_one),
    "the data of one": (False, lambda net: setattr(net.b, "data", net.a.data)),
    "no longer tied": (True, lambda net: setattr(net, "b", torch.ones(3))),
}


@pytest.mark.parametrize("is_called", [False, True])
@pytest.mark.parametrize("name", AFTER)
def test_buffers_that_share_memory_otherwise_than_in_the_trace(name, is_called):
    tied, change = AFTER[name]
    net, x = Counters(tied=tied), torch.ones(3)
    tr, twin = st.trace(net, (x,)), copy.deepcopy(net)
    if is_called:
        assert torch.equal(tr(x), twin(x))
    change(net)
    before = net.a.clone()
    with pytest.raises(st.StateMismatchError, match=r"(did not share memory when traced|a and b as one tensor)"):
        tr(x)
    assert torch.equal(net.a, before)


def test_buffers_that_are_not_written_may_be_tied_later():
    net = Net(lambda m, x: x + m.a * m.b, a=nn.Buffer(torch.ones(3)), b=nn.Buffer(torch.ones(3)))
    tr = st.trace(net, (torch.ones(3),))
    net.a = net.b
    assert torch.equal(tr(torch.ones(3)), net(torch.ones(3)))


REBINDS = {
    "swap": "self.one, self.two = self.two, self.one",
    "copy": "self.one = self.two",
    "copy back": "self.two = self.one",
    "new": "self.one, self.two = self.two, x + 1",
    "kept": "self.two = self.one; self.one = x",
    "one op": "self.one = self.two + 1",
}


def _partitions(count):
    """All ways to share `count` tensors: the number of the tensor in each place."""
    found = [[0]]
    for _ in range(count - 1):
        found = [[*f, n] for f in found for n in range(max(f) + 2)]
    return found


@pytest.mark.sample(3)
@pytest.mark.parametrize("statement", REBINDS)
@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("hold", [nn.Module.register_buffer, setattr], ids=["buffers", "attributes"])
def test_places_that_hold_one_tensor_and_get_others(statement, reads, hold):
    """Which places hold one tensor changes from call to call: each is as eager's, or refused."""

    class Holder(nn.Module):
        pass

    variables = {}
    exec(
        f"def forward(self, x):\n  y = x + {'self.one' if reads else 1}\n  {REBINDS[statement]}\n  return y", variables
    )
    Holder.forward = variables["forward"]
    for shared in _partitions(4):
        tensors = [torch.full((1,), float(i)) for i in range(4)]
        holders = [Holder(), Holder()]
        for place, (holder, name) in enumerate(itertools.product(holders, ("one", "two"))):
            hold(holder, name, tensors[shared[place]])
        net = nn.Sequential(*holders)
        twin = copy.deepcopy(net)
        trace = st.trace(net, (torch.zeros(1),))
        for i in range(4):
            try:
                got = trace(torch.full((1,), float(i)))
            except st.StateMismatchError:
                break
            assert torch.equal(got, twin(torch.full((1,), float(i)))), (shared, i)
            assert [(float(h.one), float(h.two)) for h in net] == [(float(h.one), float(h.two)) for h in twin], (
                shared,
                i,
            )
            assert net.state_dict() == twin.state_dict(), (shared, i)
        assert i >= 1, shared


def test_a_module_that_the_forward_converts_is_refused():
    """Eager keeps the parameters, whose `.data` it sets; on fake tensors torch would put others in their place."""

    class Converts(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            self.fc.double()
            y = self.fc(x.double())
            self.fc.float()
            return y.float()

    model = Converts()
    before = dict(model.named_parameters())
    with pytest.raises(st.errors.UnsupportedOpError, match=r"in the place of the parameter fc\.weight"):
        st.trace(model, (torch.ones(2, 4),))
    assert all(p is before[name] for name, p in model.named_parameters())


class Doubled(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 2


def another_class(fc):
    fc.__class__ = Doubled


def a_parametrization(fc):
    nn.utils.parametrize.register_parametrization(fc, "weight", nn.Identity())


@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize("change", [another_class, a_parametrization], ids=lambda change: change.__name__)
def test_a_class_that_the_forward_gives_a_module_is_put_back(change, raises):
    class Changes(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            y = self.fc(x)
            change(self.fc)
            if raises:
                raise ValueError("no more")
            return y

    model, x = Changes(), torch.ones(2, 4)
    eager = copy.deepcopy(model)
    if raises:
        with pytest.raises(ValueError, match="no more"):
            st.trace(model, (x,))
    else:
        trace = st.trace(model, (x,))
        assert torch.equal(trace(x), eager(x))
        with pytest.raises(st.errors.SideEffectError):
            trace(x)
    assert type(model.fc) is nn.Linear
    assert [*vars(model.fc)] == [*vars(nn.Linear(4, 4))]


class Counts(nn.Module):
    """A layer, and a buffer that each call changes."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(2, 2)
        self.register_buffer("n", torch.zeros(2))

    def forward(self, x):
        self.n.add_(1)
        return self.fc(x) + self.n


@pytest.mark.parametrize("through", [lambda tr: tr, lambda tr: lambda z: tr(z)], ids=["the trace", "a function"])
def test_a_trace_of_a_trace_sees_what_its_model_gets(through):
    model, eager, x = Counts(), Counts(), torch.ones(3, 2)
    eager.load_state_dict(model.state_dict())
    outer = st.trace(through(st.trace(model, (x,))), (x,))
    assert outer(x).equal(eager(x))
    model.fc.weight = eager.fc.weight = nn.Parameter(torch.zeros(2, 2))
    try:
        assert outer(x).equal(eager(x))
    except st.StateMismatchError as error:
        assert str(error).startswith("tr.fc.weight: a tensor [2, 2] when traced and another one now")
