"""What a compiler behind `functional_backend` is told of the write-back, and `torch.compile(backend="scopetrace")`."""

import importlib.metadata
import textwrap
import tomllib
from pathlib import Path

import pytest
import torch
from torch import nn

import scopetrace as st

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
[BACKEND] = [
    importlib.metadata.EntryPoint(name, value, "torch_dynamo_backends").load()
    for name, value in PROJECT["entry-points"]["torch_dynamo_backends"].items()
]


class Device:
    """A compiler that writes what is left to it, and gives None for what nobody but it needs."""

    def __init__(self):
        self.tables = []

    def __call__(self, gm, example_inputs):
        rows = gm.meta["scopetrace"]
        self.tables.append("\n".join(map(str, rows)))
        writes = [row for row in rows if row.by == "compiler"]
        needed = {row.output for row in rows if row.by != "compiler"}

        def run(*inputs):
            outputs = list(gm(*inputs))
            for row in writes:
                inputs[row.input].copy_(outputs[row.output])
            return [output if i in needed else None for i, output in enumerate(outputs)]

        return run


def compiled(function, **options):
    device = Device()
    return torch.compile(function, backend=st.functional_backend(device, **options)), device


class Cache(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("k", torch.zeros(4, 2))
        self.fc = nn.Linear(2, 2)

    def forward(self, x, pos):
        self.k.index_copy_(0, pos, self.fc(x))
        return self.k.sum(0), self.k[1:]


X, POS = torch.ones(1, 2), torch.tensor([2])
BY_SCOPETRACE = """\
args_0.copy_(graph[0])  # by scopetrace
result[0] = graph[1]  # by scopetrace
result[1] = args_0.slice(0, 1, 9223372036854775807)  # by scopetrace"""


@pytest.mark.parametrize("level", ["aten", "torch"])
@pytest.mark.parametrize("writer", ["scopetrace", "compiler"])
def test_a_cache(writer, level):
    model, eager = Cache(), Cache()
    eager.load_state_dict(model.state_dict())
    run, device = compiled(model, write_back=writer, level=level)
    with torch.no_grad():
        for pos in (2, 3):
            torch.testing.assert_close(run(X, torch.tensor([pos])), eager(X, torch.tensor([pos])))
        torch.testing.assert_close(model.k, eager.k)
        view = run(X, POS)[1]
    assert view.data_ptr() == model.k[1:].data_ptr()
    assert device.tables == [BY_SCOPETRACE.replace("by scopetrace", f"by {writer}", 1)]


def swap(x, y):
    t = x.clone()
    x.copy_(y)
    y.copy_(t)
    return x


def turn(x, y):
    x.t_()
    x.add_(1)
    y.add_(1)
    return y.view(-1)


TABLES = {
    "nothing is written": (
        lambda x, y: (x + y, x),
        """
        result[0] = graph[0]  # by scopetrace
        result[1] = x  # by scopetrace
        """,
    ),
    "an input is the result": (
        lambda x, y: x.add_(y),
        """
        x.copy_(graph[0])  # by compiler
        result[0] = x  # by scopetrace
        """,
    ),
    "each input is read before it is written": (
        swap,
        """
        x.copy_(graph[0], copied)  # by scopetrace
        y.copy_(graph[1])  # by scopetrace
        result[0] = x  # by scopetrace
        """,
    ),
    "one changes its shape too": (
        turn,
        """
        x.copy_(graph[0])  # by scopetrace
        x.t_()  # by scopetrace
        y.copy_(graph[1])  # by compiler
        result[0] = y.view([-1])  # by scopetrace
        """,
    ),
    "autograd records one": (
        lambda x, y, w: (x.mul_(w), y.mul_(2)),
        """
        x.copy_(graph[0])  # by scopetrace
        y.copy_(graph[1])  # by compiler
        result[0] = x  # by scopetrace
        result[1] = y  # by scopetrace
        """,
    ),
}


def inputs_of(function):
    w = (torch.ones(2, 2, requires_grad=True),) * (function.__code__.co_argcount - 2)
    return [torch.arange(4.0).view(2, 2), torch.ones(2, 2), *w]


@pytest.mark.parametrize("name", TABLES)
def test_what_is_left_to_the_compiler(name):
    function, table = TABLES[name]
    device, ours, theirs = Device(), inputs_of(function), inputs_of(function)
    run = st.functional_backend(device, write_back="compiler")(torch.fx.symbolic_trace(function), ours)
    expected = function(*theirs)
    actual = run(*ours)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(ours, theirs)
    assert [t is x for t in actual for x in ours] == [t is x for t in expected for x in theirs]
    assert device.tables == [textwrap.dedent(table).strip()]


def test_a_row_says_which_output_and_which_input():
    gm = torch.fx.symbolic_trace(lambda x, y: (y.add_(x), x * 2, y[0]))
    rows = st.functionalize(gm, [X, X.clone()]).graph_module.meta["scopetrace"]
    assert [(row.action, row.output, row.input, row.result) for row in rows] == [
        ("copy", 0, 1, None),
        ("return", None, 1, 0),
        ("return", 1, None, 1),
        ("view", None, 1, 2),
    ]
    assert isinstance(rows[0], st.WriteBackRow)


def test_a_backward_compiler_by_name():
    backend = st.functional_backend("eager", backward_compiler="eager")
    weight = torch.ones(2, requires_grad=True)
    backend(torch.fx.symbolic_trace(lambda x, w: x * w), [X, weight])(X, weight).sum().backward()
    assert weight.grad.tolist() == [1, 1]


def test_the_forward_of_a_split_program_is_told_too():
    seen = []
    compiler = lambda gm, inputs: seen.append([str(row) for row in gm.meta.get("scopetrace", ())]) or gm  # noqa: E731
    backend = st.functional_backend(compiler, backward_compiler=lambda gm, inputs: gm)
    weight = torch.ones(2, requires_grad=True)
    backend(torch.fx.symbolic_trace(lambda x, w: x.add_(1) * w), [X, weight])(X.clone(), weight).sum().backward()
    assert seen == [["x.copy_(graph[0])  # by scopetrace", "result[0] = graph[1]  # by scopetrace"]]
    assert weight.grad.tolist() == [2, 2]


WRONG_COMPILERS = {
    "a result is None": (lambda *inputs: [None], "returned NoneType as value 0, the graph has a tensor"),
    "an array": (lambda x: [x.numpy() + 1], "returned ndarray as value 0, the graph has a tensor"),
    "no function": (None, "the compiler returned NoneType, not a function that runs the graph"),
}


@pytest.mark.parametrize("name", WRONG_COMPILERS)
def test_what_a_compiler_returns_is_checked(name):
    run, message = WRONG_COMPILERS[name]
    backend = st.functional_backend(lambda gm, inputs: run, write_back="compiler")
    with pytest.raises(st.errors.CompiledGraphError, match=message):
        backend(torch.fx.symbolic_trace(lambda x: x + 1), [X])(X)


REFUSED = {
    'write_back="device"': ({"write_back": "device"}, "must be one of 'scopetrace', 'compiler'"),
    "a backward too": ({"write_back": "compiler", "backward_compiler": Device()}, "give one of the two"),
    "no compiler": ({"compiler": None}, "a compiler is a function or the name of a backend, not NoneType"),
    "a misspelt option": ({"levl": "aten"}, "functional_backend has no argument levl=: write level="),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_options(name):
    options, message = REFUSED[name]
    with pytest.raises(st.ArgumentError, match=message):
        st.functional_backend(**{"compiler": Device(), **options})


# torch.compile(backend="scopetrace") ----------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["aten", "torch"])
def test_options_of_torch_compile(level):
    model, eager, device = Cache(), Cache(), Device()
    eager.load_state_dict(model.state_dict())
    run = torch.compile(model, backend=BACKEND, options={"compiler": device, "level": level, "write_back": "compiler"})
    with torch.no_grad():
        torch.testing.assert_close(run(X, POS), eager(X, POS))
    assert len(device.tables) == 1


def test_a_wrong_option_is_named_by_the_first_call():
    run = torch.compile(nn.Linear(2, 2), backend=BACKEND, options={"compilr": "eager"})
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="no argument compilr=: write compiler="):
        run(X)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=r'mode=: write options={"compiler": \.\.\.}'):
        torch.compile(nn.Linear(2, 2), backend=BACKEND, mode="reduce-overhead")(X)


def test_it_has_a_name_where_the_package_is_installed():
    entries = importlib.metadata.entry_points(group="torch_dynamo_backends", name="scopetrace")
    if not entries:
        pytest.skip("the installed scopetrace has no such entry point")
    run = torch.compile(lambda x: x.add_(1), backend="scopetrace", options={"compiler": "eager"})
    assert run(X.clone()).tolist() == [[2, 2]]


def test_a_symbolic_number_among_example_inputs():
    graphs = []

    def keep(graph_module, inputs):
        graphs.append((graph_module, inputs))
        return graph_module

    torch.compile(lambda x: x.mul_(x.shape[0]), backend=keep, dynamic=True)(torch.ones(3, 4))
    with pytest.raises(st.ArgumentTypeError, match=r"example_inputs\[0\] is a SymInt: give the number that .* is for"):
        st.functionalize(*graphs[0])
