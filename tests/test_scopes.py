"""Scopes: the trie, user scopes, and what survives what people do to graphs."""

import copy
import operator
import pickle
import queue
import threading

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import scopetrace as st


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(2, 2)

    def forward(self, x):
        with st.scope("residual"):
            return x + self.fc(x).relu()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(2, 1)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


X = torch.randn(3, 2)
EXPECTED = {
    "linear": "Net/Block[layers.0]/residual/Linear[fc]",
    "relu": "Net/Block[layers.0]/residual",
    "add": "Net/Block[layers.0]/residual",
    "linear_1": "Net/Block[layers.1]/residual/Linear[fc]",
    "relu_1": "Net/Block[layers.1]/residual",
    "add_1": "Net/Block[layers.1]/residual",
    "linear_2": "Net/Linear[head]",
}


def scopes_of(tr, graph):
    return {n.name: str(tr.scope_of(n)) for n in graph.nodes if n.op == "call_function"}


def test_names_are_relative_to_the_enclosing_module():
    tr = st.trace(Net(), (X,))
    assert scopes_of(tr, tr.graph_module.graph) == EXPECTED
    assert {str(tr.scope_of(n)) for n in tr.graph_module.graph.nodes if n.op in ("placeholder", "output")} == {"Net"}


def test_the_trie():
    root = st.trace(Net(), (X,)).scope
    assert [s.path for s in root.children] == ["Net/Block[layers.0]", "Net/Block[layers.1]", "Net/Linear[head]"]
    inner = root.children[0].children[0]
    assert (inner.name, inner.type_name, inner.is_module) == ("residual", "", False)
    assert inner.parent is root.children[0] and inner.parent.parent is root and root.parent is None
    assert (root.name, root.type_name, str(root)) == ("", "Net", "Net")


def test_decorator_push_and_pop_and_current_scope():
    seen = queue.SimpleQueue()  # lists are put back after a trace

    @st.scope("double")
    def double(x):
        seen.put(str(st.tracing_state().current_scope))
        return x * 2

    def run(x):
        state = st.tracing_state()
        state.push_scope("outer")
        x = double(x)
        state.pop_scope()
        seen.put(str(state.current_scope))
        return x + 1

    tr = st.trace(run, (X,))
    assert [seen.get(), seen.get(), seen.empty()] == ["run/outer/double", "run", True]
    assert list(scopes_of(tr, tr.graph_module.graph).values()) == ["run/outer/double", "run"]


def test_outside_a_trace_nothing_happens():
    assert st.tracing_state() is None
    with st.scope("anything / at all"):
        assert st.tracing_state() is None


def leaves_open(x):
    st.tracing_state().push_scope("open")
    return x + 1


def pops_twice(x):
    state = st.tracing_state()
    state.push_scope("once")
    state.pop_scope()
    state.pop_scope()
    return x


def pops_a_module(x):
    st.tracing_state().pop_scope()
    return x


def leaves_open_inside_with(x):
    with st.scope("outer"):
        st.tracing_state().push_scope("inner")
    return x


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (leaves_open, r"scope 'open', opened at .*test_scopes.py:\d+, is still open at the end of leaves_open"),
        (pops_twice, r"last one closed was 'once', opened at .*test_scopes.py:\d+, closed at .*:\d+"),
        (pops_a_module, r"no user scope is open in pops_a_module"),
        (leaves_open_inside_with, r"scope 'inner', opened at .*test_scopes.py:\d+, is still open at the end of"),
        (lambda x: st.tracing_state().push_scope("a/b"), r"use a non-empty name without '/'"),
    ],
)
def test_wrong_nesting_is_an_error_that_says_where(run, message):
    with pytest.raises(st.ScopeError, match=message):
        st.trace(run, (X,))
    assert st.tracing_state() is None


def test_an_exception_closes_what_is_open():
    def fails(x):
        st.tracing_state().push_scope("left")
        raise KeyError("mine")

    class Guarded(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Wrap(fails)

        def forward(self, x):
            try:
                self.inner(x)
            except KeyError:
                return x + 1

    class Wrap(nn.Module):
        def __init__(self, fn):
            super().__init__()
            self.fn = fn

        def forward(self, x):
            return self.fn(x)

    tr = st.trace(Guarded(), (X,))
    assert list(scopes_of(tr, tr.graph_module.graph).values()) == ["Guarded"]
    with pytest.raises(KeyError):
        st.trace(fails, (X,))
    assert st.tracing_state() is None


def test_a_trace_inside_a_trace():
    inner, net = queue.SimpleQueue(), Net()

    def run(x):
        inner.put(st.trace(net, (x,)))
        return x + 1

    tr = st.trace(run, (X,))
    assert list(scopes_of(tr, tr.graph_module.graph).values()) == ["run"]
    found = inner.get()
    assert scopes_of(found, found.graph_module.graph) == EXPECTED


def test_threads_trace_at_once():
    found, errors = [], []

    def work():
        try:
            for _ in range(3):
                tr = st.trace(Net(), (X,))
                found.append(scopes_of(tr, tr.graph_module.graph) == EXPECTED)
        except Exception as error:  # reported by the assertion below
            errors.append(error)

    call_impl = nn.Module._call_impl
    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    eager = Net()
    for _ in range(50):
        assert type(eager(X)) is torch.Tensor  # this thread is not tracing
    for t in threads:
        t.join()
    assert not errors and found == [True] * 12
    assert nn.Module._call_impl is call_impl


# ------------------------------------------------------------------ survival


def test_dead_code_elimination_and_deepcopy():
    tr = st.trace(Net(), (X,))
    gm = copy.deepcopy(tr.graph_module)
    gm.graph.eliminate_dead_code()
    assert scopes_of(tr, gm.graph) == EXPECTED
    assert scopes_of(tr, copy.deepcopy(gm.graph)) == EXPECTED
    torch.testing.assert_close(gm(X), tr.graph_module(X))


def test_pickle():
    tr = st.trace(Net(), (X,))
    gm = pickle.loads(pickle.dumps(tr.graph_module))
    assert scopes_of(tr, gm.graph) == EXPECTED
    torch.testing.assert_close(gm(X), tr.graph_module(X))
    a, b = tr.graph_module.graph.nodes, gm.graph.nodes
    assert [n.meta.get("nn_module_stack") for n in a] == [n.meta.get("nn_module_stack") for n in b]
    assert [n.stack_trace for n in a] == [n.stack_trace for n in b]


class Reads(torch.nn.Module):
    """Has tensors at several depths, in another order than they are read, and a module one of whose own is read."""

    def __init__(self):
        super().__init__()
        self.late = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(4, 4)), torch.nn.BatchNorm1d(4))
        self.leaf = torch.nn.PReLU()
        self.first = torch.nn.Parameter(torch.ones(4))

    def forward(self, x):
        return self.late(self.leaf(x) * self.leaf.weight) + self.first


def test_what_a_graph_module_holds_is_ordered_as_torch_orders_it():
    tr = st.trace(Reads().eval(), (torch.randn(3, 4),), leaf_modules=[torch.nn.PReLU])
    found = tr.graph_module
    read = [n.target for n in found.graph.nodes if n.op in ("get_attr", "call_module")]
    held = {name: operator.attrgetter(name)(found) for name in read}
    expected = torch.fx.GraphModule(held, copy.deepcopy(found.graph))
    for gm in (found, pickle.loads(pickle.dumps(found))):
        for names in (torch.nn.Module.named_parameters, torch.nn.Module.named_buffers, torch.nn.Module.named_modules):
            assert [name for name, _ in names(gm)] == [name for name, _ in names(expected)]


@pytest.mark.parametrize("how", ["interpreter", "make_fx"])
def test_retracing(how):
    tr = st.trace(Net(), (X,))
    if how == "make_fx":
        again = make_fx(tr.graph_module)(X)
    else:
        with torch.fx.traceback.preserve_node_meta():
            again = make_fx(torch.fx.Interpreter(tr.graph_module).run)(X)
    kept = {n.name: str(tr.scope_of(n)) for n in again.graph.nodes if "linear" in n.name or "addmm" in n.name}
    assert list(kept.values()) == [p for name, p in EXPECTED.items() if "linear" in name]


def test_nodes_copied_replaced_and_inserted_by_passes():
    tr = st.trace(Net(), (X,))
    graph = copy.deepcopy(tr.graph_module.graph)
    relu = next(n for n in graph.nodes if n.name == "relu")
    with graph.inserting_after(relu):
        new = graph.call_function(torch.ops.aten.gelu.default, relu.args)
    relu.replace_all_uses_with(new)
    graph.erase_node(relu)
    assert str(tr.scope_of(new)) == EXPECTED["relu"]
    copied = torch.fx.Graph()
    copied.graph_copy(graph, {})
    found = scopes_of(tr, copied)
    assert {k: found[k] for k in ("linear", "add", "linear_2")} == {
        k: EXPECTED[k] for k in ("linear", "add", "linear_2")
    }


def test_replace_pattern():
    tr = st.trace(Net(), (X,))
    gm = copy.deepcopy(tr.graph_module)

    def pattern(x):
        return torch.ops.aten.relu.default(x)

    def replacement(x):
        return torch.ops.aten.gelu.default(x)

    assert len(torch.fx.subgraph_rewriter.replace_pattern(gm, pattern, replacement)) == 2
    gelus = [n for n in gm.graph.nodes if n.target is torch.ops.aten.gelu.default]
    assert [str(tr.scope_of(n)) for n in gelus] == [EXPECTED["relu"], EXPECTED["relu_1"]]


def test_save_and_load(tmp_path):
    net = Net()
    tr = st.trace(net, (X,))
    tr.save(tmp_path / "net.st")
    again = st.load(tmp_path / "net.st")
    again.lint()
    assert str(again) == str(tr)
    assert scopes_of(again, again.graph_module.graph) == EXPECTED
    assert [(c.fqn, c.index, c.module_type) for c in again.calls] == [(c.fqn, c.index, c.module_type) for c in tr.calls]
    assert [{k: str(v) for k, v in c.arguments.items()} for c in again.calls] == [
        {k: str(v) for k, v in c.arguments.items()} for c in tr.calls
    ]
    assert [n.stack_trace for n in again.graph_module.graph.nodes] == [
        n.stack_trace for n in tr.graph_module.graph.nodes
    ]
    torch.testing.assert_close(again(X), net(X))
    with pytest.raises(st.ScopetraceError, match="no model"):
        again.check((X,))


def test_a_long_program_can_be_saved(tmp_path):
    def run(x):
        for _ in range(3000):
            x = x + 1
        return x

    st.trace(run, (X,)).save(tmp_path / "long.st")
    torch.testing.assert_close(st.load(tmp_path / "long.st")(X), run(X))
