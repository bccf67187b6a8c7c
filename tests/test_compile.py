"""`torch.compile` of a trace, of its module, its graph and its outlined form: one graph, equal to eager, checked."""

import collections
import copy
import dataclasses

import pytest
import torch
from nets import Net
from torch import nn
from torch.export import Dim

import scopetrace as st
from scopetrace.errors import InputMismatchError

Unsupported = torch._dynamo.exc.Unsupported
Pair = collections.namedtuple("Pair", "a b")


@pytest.fixture(autouse=True)
def compiled_anew():
    torch.compiler.reset()


@dataclasses.dataclass
class Scaled:
    x: torch.Tensor
    scale: int


class Optional(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x, mask=None, *, scale=2.0, bias=True):
        y = self.fc(x) if mask is None else self.fc(x) * mask
        return y * scale if bias else y


class Stateful(nn.Module):
    def __init__(self):
        super().__init__()
        self.bn = nn.BatchNorm1d(4)
        self.register_buffer("steps", torch.zeros(4))

    def forward(self, x):
        self.steps[1:] += 1
        self.last = self.steps * 2
        return self.bn(x) + self.last


def switching(model, x):
    with torch.no_grad():
        y = model.fc(x)
    return model.fc(x) * y


def writing(_, x, y):
    x.add_(1)
    y[0].mul_(2)
    return {"x": x, "parts": (y[0], x.t(), y)}


def weighted(forward):
    torch.manual_seed(0)
    return Net(forward, fc=nn.Linear(4, 4))


def randn(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


X = randn(3, 4)
PROGRAMS = {  # a model, and the arguments of calls: those of the first are the example
    "layers": (nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), [((X,), {})]),
    "a function": (lambda x: (x.relu(), x.sum()), [((X,), {})]),
    "state": (Stateful(), [((X,), {}), ((X + 1,), {})]),
    "blocks without gradients": (weighted(switching), [((X,), {})]),
    "writes and views": (Net(writing), [((randn(4, 4), randn(4, 4)), {})]),
    "defaults and names": (
        Optional(),
        [((X,), {"scale": 3.0}), ((), {"x": X, "scale": 3.0}), ((X, None), {"scale": 3.0})],
    ),
    "by name": (Optional(), [((X, X * 2), {}), ((X,), {"mask": X + 1}), ((X, X), {"scale": 2.0})]),
    "containers": (
        Net(lambda _, d: Pair(d["a"] + d["b"][0], [3, None, d["b"][1].t()])),
        [(({"a": X, "b": [X, X]},), {})],
    ),
    "named tuples": (Net(lambda _, p: Pair(p.b, p.a + 1)), [((Pair(X, X + 1),), {})]),
    "dataclasses": (Net(lambda _, d: Scaled(d.x * d.scale, d.scale)), [((Scaled(X, 2),), {})]),
    "one tensor twice": (Net(lambda _, x, y: x * y), [((X, X), {})]),
    "a branch": (
        Net(lambda _, x: torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x * 2, (x,))),
        [((X,), {}), ((-X,), {})],
    ),
    "several results of an op": (Net(lambda _, x: (*x.split(2), x.topk(2))), [((X,), {})]),
}


def state_of(model):
    return {**dict(model.named_buffers()), "last": getattr(model, "last", 0)}


def tensors(x):
    """The tensors and other leaves of arguments or results."""
    found = torch.utils._pytree.tree_leaves(x)
    return [part for leaf in found for part in (vars(leaf).values() if isinstance(leaf, Scaled) else (leaf,))]


@pytest.mark.parametrize("form", ["trace", *(pytest.param(f, marks=pytest.mark.slow) for f in ("module", "outlined"))])
@pytest.mark.parametrize("name", PROGRAMS)
def test_calls_are_those_of_the_model(name, form):
    model, calls = PROGRAMS[name]
    model, eager = copy.deepcopy(model), copy.deepcopy(model)
    trace = st.trace(model, *copy.deepcopy(calls[0]))
    made = {"trace": lambda: trace, "module": trace.to_module, "outlined": lambda: trace.outline("repeated")}[form]()
    compiled = torch.compile(made, backend="eager", fullgraph=True)
    for call in calls:
        (args, kwargs), (eager_args, eager_kwargs) = copy.deepcopy(call), copy.deepcopy(call)
        found, wanted = compiled(*args, **kwargs), eager(*eager_args, **eager_kwargs)
        assert type(found) is type(wanted)
        torch.testing.assert_close(tensors(found), tensors(wanted), equal_nan=True)
        torch.testing.assert_close(tensors(args), tensors(eager_args))
        grads = [[t.requires_grad for t in tensors(x) if isinstance(t, torch.Tensor)] for x in (found, wanted)]
        assert grads[0] == grads[1]
    if isinstance(model, nn.Module):
        torch.testing.assert_close(state_of(made if form == "module" else model), state_of(eager))


def test_results_are_the_inputs_and_their_views():
    compiled = torch.compile(st.trace(Net(writing), (randn(4, 4), randn(4, 4))), backend="eager", fullgraph=True)
    x, y = randn(4, 4), randn(4, 4)
    found = compiled(x, y)
    assert found["x"] is x
    assert found["parts"][2] is y
    assert found["parts"][0].data_ptr() == y.data_ptr()
    assert found["parts"][1].stride() == (1, 4)


@pytest.mark.parametrize("form", ["trace", "module", "graph", "outlined", "outlined graph"])
def test_gradients(form):
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2)))
    trace, x = st.trace(model, (X,)), X.clone().requires_grad_()
    outlined = trace.outline(True)
    forms = {"trace": trace, "graph": trace.graph_module, "outlined": outlined, "outlined graph": outlined.graph_module}
    made = forms.get(form) or trace.to_module()
    model(x).sum().backward()
    wanted = [x.grad, *(p.grad for p in model.parameters())]
    x.grad = None
    for p in model.parameters():
        p.grad = None
    found = torch.compile(made, backend="aot_eager", fullgraph=True)(x)
    (found[0] if "graph" in form else found).sum().backward()
    parameters = made.parameters() if form == "module" else model.parameters()
    torch.testing.assert_close([x.grad, *(p.grad for p in parameters)], wanted)


def test_functions_are_regions_that_are_compiled_once():
    graphs = []

    def backend(gm, _):
        graphs.append(gm)
        return gm

    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3)))
    outlined = st.trace(model, (X,)).outline("?", nn.Linear)
    with torch.no_grad():
        torch.compile(outlined, backend=backend, fullgraph=True)(X)
    [graph] = graphs
    calls = graph.graph.find_nodes(op="call_function", target=torch.ops.higher_order.invoke_subgraph)
    assert len(calls) == 3  # those of the inner functions are inline
    assert len({call.args[0].target for call in calls}) == 1


# Dynamic sizes: how they are, sizes that the trace takes, sizes that it refuses.
SIZES = {
    "any": (lambda x: x * 2, ({0: Dim("b")},), [(4,), (7,)], []),
    "a range": (lambda x: x * 2, ({0: Dim("b", min=3, max=6)},), [(4,), (6,)], [(7,)]),
    "even ones": (lambda x: x.reshape(-1, 2) if x.shape[0] % 2 == 0 else x, ({0: Dim.AUTO},), [(4,), (6,)], [(7,)]),
    "a derived one": (
        lambda x, y: x.reshape(-1, 2).sum(1) + y,
        ({0: 2 * Dim("d")}, {0: Dim("d")}),
        [(4, 2), (6, 3)],
        [(6, 4)],
    ),
    "only derived ones": (lambda x: x.reshape(-1, 3), ({0: 3 * Dim("d", min=2)},), [(6,), (9,)], [(7,)]),
    "numbers among results": (
        lambda x: (x.new_zeros(2 * x.shape[0]), x.shape[0]),
        ({0: Dim.DYNAMIC},),
        [(4,), (7,)],
        [],
    ),
    "two equal ones": (lambda x, y: x + y, ({0: Dim.AUTO}, {0: Dim.AUTO}), [(4, 4), (7, 7)], [(5, 6)]),
}


@pytest.mark.parametrize("name", SIZES)
def test_dynamic_sizes(name):
    function, dynamic_shapes, sizes, others = SIZES[name]
    trace = st.trace(function, tuple(map(randn, sizes[0])), dynamic_shapes=dynamic_shapes)
    compiled = torch.compile(trace, backend="eager", fullgraph=True)
    for numbers in sizes:
        args = tuple(map(randn, numbers))
        torch.testing.assert_close(compiled(*args), function(*args))
    for numbers in others:
        args = tuple(map(randn, numbers))
        with pytest.raises(Unsupported, match="the trace does not hold for these sizes"):
            compiled(*args)


def test_a_break_of_the_graph_tells_what_the_trace_tells():
    trace = st.trace(lambda x: x * 2, (X,))
    with pytest.raises(InputMismatchError, match="dimension 0 was 3 when traced and is 5 now"):
        torch.compile(trace, backend="eager")(randn(5, 4))


def test_a_number_among_the_arguments():
    trace = st.trace(lambda x, n: x[:n] * n, (randn(9), 3), dynamic_shapes=(None, Dim.DYNAMIC))
    compiled = torch.compile(trace, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(randn(9), 5), randn(9)[:5] * 5)


MISTAKES = {
    "another size": (Optional(), (X,), (randn(3, 5),), "dimension 1 was 4 when traced and is 5 now"),
    "another dtype": (Optional(), (X,), (X.double(),), "dtype was torch.float32"),
    "another text": (
        Net(lambda _, x, f: getattr(x, f)()),
        (X, "sin"),
        (X, "cos"),
        "argument 1 was 'sin' when traced and is 'cos' now",
    ),
    "another structure": (Net(lambda _, d: d["a"]), ({"a": X},), ({"b": X},), r"had 1 items \(\['a'\]\)"),
    "other strides": (Net(lambda _, x: x * 2 if x.stride(0) == 4 else x), (X,), (randn(4, 3).t(),), r"stride\(0\): 4"),
    "gradients": (
        Net(lambda _, x: x * 2 if x.requires_grad else x),
        (X,),
        (X.clone().requires_grad_(),),
        "requires_grad",
    ),
    "an expanded input": (Net(lambda _, x: x.add_(1)), (X,), (randn(1, 4).expand(3, 4),), "is expanded"),
    "one tensor for two": (Net(lambda _, x, y: x.add_(y)), (X, X + 1), (X, X), "is given twice"),
    "two tensors for one": (
        Net(lambda _, x, y: x + y),
        (X, X),
        (X, X + 1),
        "were one tensor when traced and are two now",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_arguments_unlike_those_of_the_trace(name):
    model, example, args, message = MISTAKES[name]
    compiled = torch.compile(st.trace(model, example), backend="eager", fullgraph=True)
    compiled(*example)
    with pytest.raises(Unsupported, match=message):
        compiled(*args)


def test_the_state_of_the_model():
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).eval()
    trace = st.trace(model, (X,))
    compiled = torch.compile(trace, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(X), model(X))
    model[0].weight = nn.Parameter(torch.ones(4, 4))
    torch.testing.assert_close(compiled(X), model(X))
    model.train()
    with pytest.raises(Unsupported, match="training"):
        compiled(X)


REFUSED = {
    "lists that grow": (lambda x, found: found.append(x), (X, []), "puts tensors into containers"),
    "views of one memory": (lambda x, y: x + y, (X[0], X[1]), "inputs are views of one memory"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_form_for_dynamo_runs_without_it(name):
    function, args, message = REFUSED[name]
    trace = st.trace(function, args)
    with pytest.raises(Unsupported, match=message):
        torch.compile(trace, backend="eager", fullgraph=True)(*args)
    torch.testing.assert_close(torch.compile(trace, backend="eager")(*args), function(*args))


@pytest.mark.slow
def test_many_traces_in_one_process():
    for n in range(12):
        trace = st.trace(lambda x, n=n: x * n, (X,))
        torch.testing.assert_close(torch.compile(trace, backend="eager", fullgraph=True)(X), X * n)


def test_in_a_larger_function():
    first, second = (st.trace(model, (X,)) for model in (nn.Linear(4, 4), nn.ReLU()))

    @torch.compile(backend="eager", fullgraph=True)
    def f(x):
        return second(first(x)) * 2 + second.graph_module(x)[0]

    torch.testing.assert_close(f(X), first.model(X).relu() * 2 + X.relu())


def test_loaded_edited_and_decomposed_traces(tmp_path):
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU())
    trace = st.trace(model, (X,))
    trace.save(tmp_path / "trace")
    edited = st.trace(model, (X,))
    for node in edited.graph_module.graph.find_nodes(op="call_function", target=torch.ops.aten.gelu.default):
        node.target = torch.ops.aten.relu.default
    for made, wanted in (
        (st.load(tmp_path / "trace"), model(X)),
        (trace.decompose(), model(X)),
        (edited, model[0](X).relu()),
    ):
        torch.testing.assert_close(torch.compile(made, backend="eager", fullgraph=True)(X), wanted)


def test_strict_export_takes_a_trace():
    module = st.trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), (X,)).to_module()
    for strict in (True, False):
        program = torch.export.export(module, (X,), strict=strict)
        assert [str(n.target) for n in program.graph.find_nodes(op="call_function", target=torch.ops.aten.relu.default)]
        torch.testing.assert_close(program.module()(X), module(X))
